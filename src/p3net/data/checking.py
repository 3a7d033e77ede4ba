"""What a dataset holds and what is wrong with it, each fault with its file.

Every image is decoded: a truncated file opens like a whole one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops

from p3net.data.images import to_rgb
from p3net.data.readers import BENCHMARKS, UNPUBLISHED
from p3net.errors import InputError
from p3net.structures import Dataset, Sample, inside

FAULTS: dict[str, str] = {
    "image": "the image cannot be read",
    "annotation": "the annotation cannot be read",
    "missing": "an image of a benchmark has no annotation",
    "number": "the annotation's own number of people is not its number of points",
    "orphan": "an annotation has no image",
    "outside": "points lie outside the image",
    "corner": "all points lie in the first pixel: shares of the size instead of pixels?",
    "duplicate": "a point occurs more than once",
    "dark": "numbers of 16 bits that use 12 of them or fewer: it will look black",
    "small": "the image is smaller than the crop and will be scaled up",
}
"""Kinds of faults, the gravest first."""

WARNINGS = frozenset({"duplicate", "dark", "small"})  # published sets repeat a few points
"""Kinds that need nothing done: they do not make a dataset faulty."""

_GREY_MODES = ("1", "L", "I", "F")  # Pillow's; LAB, the one exception, is refused on decoding


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: the image or annotation, as a path where there is one.
        kind: a key of `FAULTS`.
        message: what was found.
    """

    file: str
    kind: str
    message: str

    @property
    def severity(self) -> str:
        """`error`, or `warning` where training goes well without a change."""
        return "warning" if self.kind in WARNINGS else "error"


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many images have how many points.

    Attributes:
        edges: B+1 rising numbers of points; bin i is [edges[i], edges[i+1]).
        images: B numbers of images.
    """

    edges: tuple[int, ...]
    images: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Points an image, over the labelled images."""

    least: int
    median: float
    mean: float
    most: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found.

    Attributes:
        kind: the dataset's reading, and `root` where it is, as the user wrote it.
        splits: number of images of each published split.
        images: all images; `readable` of them decode.
        grey: images stored as grey; `colourless` are those stored as colour without any.
        labelled: images whose points could be read; `points` is how many they hold.
        smallest_hw: height and width of the image with the fewest pixels; None without images.
        largest_hw: the same for the most pixels.
        counts: points an image; None without labelled images.
    """

    kind: str
    root: str
    splits: dict[str, int]
    images: int
    readable: int
    grey: int
    colourless: int
    labelled: int
    points: int
    smallest_hw: tuple[int, int] | None
    largest_hw: tuple[int, int] | None
    counts: Counts | None
    histogram: Histogram
    faults: tuple[Fault, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing but warnings was found."""
        return all(fault.severity == "warning" for fault in self.faults)


@dataclass(frozen=True, slots=True)
class _Look:
    """One image, looked at."""

    size_hw: tuple[int, int] | None
    grey: bool
    colourless: bool
    count: int | None
    faults: tuple[Fault, ...]


def check(
    dataset: Dataset,
    *,
    crop: int | None = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Decode every image and read every annotation.

    Args:
        dataset: what to look at.
        crop: side of the training crops in px; None to leave the sizes unjudged.
        progress: called with images done and images in all, from this thread.
    """
    looks: list[_Look] = []
    pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1))  # Pillow decodes without the lock
    try:
        for look in pool.map(lambda sample: _look(dataset.kind, sample, crop), dataset.samples):
            looks.append(look)
            if progress is not None:
                progress(len(looks), len(dataset))
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupt need not wait for the rest
    faults = [fault for look in looks for fault in look.faults]
    faults += [Fault(str(path), "orphan", "no image belongs to it") for path in dataset.orphans]
    order = list(FAULTS)
    sizes = sorted((look.size_hw for look in looks if look.size_hw), key=lambda hw: hw[0] * hw[1])
    counts = [look.count for look in looks if look.count is not None]
    splits = [sample.split for sample in dataset.samples]
    return Report(
        kind=dataset.kind,
        root=dataset.root,
        splits={
            split: splits.count(split) for split in ("train", "val", "test") if split in splits
        },
        images=len(dataset),
        readable=len(sizes),
        grey=sum(look.grey for look in looks),
        colourless=sum(look.colourless for look in looks),
        labelled=len(counts),
        points=sum(counts),
        smallest_hw=sizes[0] if sizes else None,
        largest_hw=sizes[-1] if sizes else None,
        counts=_summary(counts),
        histogram=histogram(counts),
        faults=tuple(sorted(faults, key=lambda fault: order.index(fault.kind))),
    )


def histogram(counts: Sequence[int], bins: int = 10) -> Histogram:
    """Bins of one round width (1, 2 or 5 times a power of ten) from 0 to beyond the largest.

    >>> histogram([0, 3, 7, 12], bins=3)
    Histogram(edges=(0, 5, 10, 15), images=(2, 1, 1))
    """
    if not counts:
        return Histogram((0,), ())
    most = max(counts)
    steps = (digit * 10**power for power in range(10) for digit in (1, 2, 5))
    step = next(step for step in steps if step * bins > most)
    edges = np.arange(0, most + step + 1, step)[: most // step + 2]
    images, _ = np.histogram(np.asarray(counts) // step, np.arange(len(edges)))
    return Histogram(tuple(map(int, edges)), tuple(map(int, images)))


def _summary(counts: Sequence[int]) -> Counts | None:
    if not counts:
        return None
    return Counts(min(counts), float(np.median(counts)), float(np.mean(counts)), max(counts))


def _look(kind: str, sample: Sample, crop: int | None) -> _Look:
    file = sample.key if sample.path is None else str(sample.path)
    faults: list[Fault] = []
    size_hw, grey, colourless = None, False, False
    try:
        with sample.open() as opened:
            grey = opened.mode.startswith(_GREY_MODES)
            image = to_rgb(opened)
            if opened.mode.startswith("I") and (most := int(np.asarray(opened).max())) <= 4095:
                faults.append(Fault(file, "dark", f"the brightest pixel has {most} of 65,535"))
            size_hw, colourless = (image.height, image.width), not grey and _is_colourless(image)
    except InputError as error:
        faults.append(Fault(error.source or file, "image", error.message))
    if size_hw is not None and crop is not None and min(size_hw) < crop:
        message = f"{size_hw[1]} × {size_hw[0]} px, the crop is {crop}"
        faults.append(Fault(file, "small", message))
    count = None
    if sample.labelled:
        try:
            count = _judge_points(sample, file, size_hw, faults)
        except InputError as error:
            faults.append(Fault(error.source or file, "annotation", error.message))
    elif (
        sample.read_marks is None and kind in BENCHMARKS and (kind, sample.split) not in UNPUBLISHED
    ):
        faults.append(Fault(file, "missing", "no annotation"))
    return _Look(size_hw, grey, colourless, count, tuple(faults))


def _judge_points(
    sample: Sample, file: str, size_hw: tuple[int, int] | None, faults: list[Fault]
) -> int:
    marks = sample.marks()
    points = marks.points_xy
    if marks.declared is not None and marks.declared != len(points):
        message = f"states {marks.declared}, holds {len(points)} points"
        faults.append(Fault(file, "number", message))
    if size_hw is not None and not (within := inside(points, size_hw)).all():
        x, y = points[~within][0]
        message = f"{(~within).sum()} of {len(points)} points, the first at ({x:g}, {y:g})"
        faults.append(Fault(file, "outside", message))
    different = len(np.unique(points, axis=0))
    if different > 1 and (points <= 1).all():
        faults.append(Fault(file, "corner", f"{len(points)} points of 0 to 1"))
    repeated = len(points) - different
    if repeated:
        faults.append(Fault(file, "duplicate", f"{repeated} of {len(points)} points are repeated"))
    return len(points)


def _is_colourless(image: Image.Image) -> bool:
    """Whether red, green and blue agree everywhere."""
    red, green, blue = image.split()
    return not any(ImageChops.difference(red, other).getbbox() for other in (green, blue))
