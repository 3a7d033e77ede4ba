"""What passes between the modules: Marks, Sample, Dataset, Batch; frozen, checked on creation.

Coordinates are pixels of the upright image, x to the right and y down, the centre of the
top left pixel at (0.5, 0.5); a point belongs to an image when 0 <= x < width and
0 <= y < height. Shapes: N points, B images, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from p3net.errors import InputError

Points = NDArray[np.float64]
"""Read-only array N×2 of (x, y) in pixels."""


def as_points(values: ArrayLike, *, source: str | Path | None = None) -> Points:
    """Check and freeze a list of points.

    >>> as_points([[1, 2]]).tolist(), as_points([]).shape
    ([[1.0, 2.0]], (0, 2))
    """
    try:
        points = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"points must be numbers, two a row (x y): {error}", source=source
        ) from None
    if points.size == 0:
        points = points.reshape(0, 2)
    if points.ndim != 2 or points.shape[1] != 2:
        raise InputError(f"points must be an N×2 array of x y, got {points.shape}", source=source)
    bad = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if bad.size:
        raise InputError(
            f"point {bad[0] + 1} of {len(points)} is not a finite number: "
            f"{points[bad[0]].tolist()}; correct or remove it",
            source=source,
        )
    points.flags.writeable = False
    return points


def inside(points_xy: Points, size_hw: tuple[int, int]) -> NDArray[np.bool_]:
    """Which points lie in an image of the given height and width."""
    height, width = size_hw
    x, y = points_xy[:, 0], points_xy[:, 1]
    return (x >= 0) & (x < width) & (y >= 0) & (y < height)


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """The annotation of one image.

    Attributes:
        points_xy: N×2 pixels of the upright image, as the file has them; some published
            sets hold points outside their image.
        declared: the number of people the file itself states, where it does.
    """

    points_xy: Points
    declared: int | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a dataset, opened and read only when asked.

    Attributes:
        name: the image's file name, or its path below the dataset's folder, with `/`.
        open: gives the image, opened but not yet decoded where the format allows.
        read_marks: reads the annotation; None for an unlabelled image.
        split: the published part it belongs to: "train", "val" or "test".
        path: the image's file, where there is one.
        tags: what the set says of the image: weather, scene, level and the like.
        withheld: the annotation exists but this run may not look at it.
    """

    name: str
    open: Callable[[], Image.Image]
    read_marks: Callable[[], Marks] | None = None
    split: str = "train"
    path: Path | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    withheld: bool = False

    def __post_init__(self) -> None:
        """Check the name and the split."""
        if not self.name:
            raise InputError("an image needs a name", source=self.path)
        if self.split not in ("train", "val", "test"):
            raise InputError(
                f"unknown split {self.split!r}; use train, val or test", source=self.name
            )

    @property
    def key(self) -> str:
        """`split/name`: unique within a dataset."""
        return f"{self.split}/{self.name}"

    @property
    def labelled(self) -> bool:
        """Whether this run may read points for this image."""
        return self.read_marks is not None and not self.withheld

    def marks(self) -> Marks:
        """Read the annotation; an error where there is none or it is withheld."""
        if self.withheld:
            raise InputError(
                "its points are withheld: this run uses the image without labels", source=self.key
            )
        if self.read_marks is None:
            raise InputError("the image has no annotation", source=self.key)
        return self.read_marks()

    def without_labels(self) -> Sample:
        """The same image with its annotation out of reach."""
        return replace(self, withheld=True)


@dataclass(frozen=True)
class Dataset:
    """Images in a fixed order.

    Attributes:
        kind: the reading that recognised it: "sha", "jhu", "folder", "coco", ….
        root: where it was read from, as the user wrote it.
        samples: the images; their keys are unique.
        orphans: annotation files that belong to no image.
    """

    kind: str
    root: str
    samples: tuple[Sample, ...]
    orphans: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        """Refuse two images under one key."""
        seen: set[str] = set()
        for sample in self.samples:
            if sample.key in seen:
                raise InputError(f"two images are called {sample.key}", source=self.root)
            seen.add(sample.key)

    def __len__(self) -> int:
        return len(self.samples)

    def part(self, split: str) -> Dataset:
        """The images of one published split."""
        return self.where(lambda sample: sample.split == split)

    def where(self, keep: Callable[[Sample], bool]) -> Dataset:
        """The images for which `keep` holds."""
        return replace(self, samples=tuple(filter(keep, self.samples)))

    def pick(self, keys: Iterable[str]) -> Dataset:
        """The images with these keys, in this order."""
        by_key = {sample.key: sample for sample in self.samples}
        keys = tuple(keys)
        missing = [key for key in keys if key not in by_key]
        if missing:
            raise InputError(
                f"{len(missing)} images not found, first {missing[0]}", source=self.root
            )
        return replace(self, samples=tuple(by_key[key] for key in keys))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Crops of one size, ready for a network.

    Attributes:
        images: B×3×H×W float32, RGB in [0, 1], not normalised.
        points_xy: B tensors N×2 float64, pixels of the crop; None for unlabelled crops.
        names: B keys of the images the crops come from.
        shorter_sides: B lengths in px: the shorter side of the scaled image before cropping.
        seeds: B numbers, functions of (seed, step, position), for whatever a method draws for a
            crop; empty where nothing is drawn.
    """

    images: Tensor
    points_xy: tuple[Tensor, ...] | None
    names: tuple[str, ...]
    shorter_sides: tuple[float, ...]
    seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts agree."""
        count = len(self.images)
        if self.images.ndim != 4 or self.images.shape[1] != 3:
            raise InputError(f"images must be B×3×H×W, got {tuple(self.images.shape)}")
        lengths = {len(self.names), len(self.shorter_sides), len(self.seeds or self.names)}
        if self.points_xy is not None:
            lengths.add(len(self.points_xy))
        if lengths != {count}:
            raise InputError(f"{count} images but names, points or sides of lengths {lengths}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def labelled(self) -> bool:
        """Whether the crops carry points."""
        return self.points_xy is not None
