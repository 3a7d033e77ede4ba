"""The benchmarks, read straight from the downloaded archive: ShanghaiTech, QNRF, JHU++, NWPU.

A reader lists images and knows where their annotation would be; the annotation is read when
it is asked for. PATH is the archive's root, a folder around it, or the part's own folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p3net.data.images import image_files, natural_order, open_image
from p3net.data.layout import Layout
from p3net.data.matfile import describe, read_mat
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Points, Sample, as_points

UNPUBLISHED = frozenset({("nwpu", "test")})
"""Kind and split of the images whose annotation nobody outside the benchmark holds."""

Splits = dict[str, Path]
"""The folder of each split, by its name."""

_MAX_ANNOTATION_BYTES = 16_000_000  # the largest published one has under 1 MB
_MAX_COORDINATE = 1e6  # px
_WEATHER = ("none", "fog", "rain", "snow")


# --- ShanghaiTech -----------------------------------------------------------------------


def _shanghaitech(part: str) -> Layout:
    return Layout(
        f"sh{part.lower()}",
        f"ShanghaiTech {part}: part_{part}/{{train_data,test_data}}/images/IMG_1.jpg and "
        "ground_truth/GT_IMG_1.mat",
        lambda path: bool(_shanghaitech_splits(part, path)),
        partial(_read_shanghaitech, part),
    )


def _shanghaitech_splits(part: str, path: Path) -> Splits:
    """The `train_data` and `test_data` folders of part "A" or "B" at or below a path."""
    names = {"train": "train_data", "test": "test_data"}
    for folder in _around(path):
        for name in (f"part_{part}", f"part_{part}_final"):
            if found := _splits(folder / name, names, _has_images):
                return found
    other = {"A": "part_b", "B": "part_a"}[part]
    above = (*path.parts[-2:], *path.resolve().parts[-2:])
    if any(name.lower().removesuffix("_final") == other for name in above):
        return {}
    return _splits(path, names, _has_images)


def _has_images(folder: Path) -> bool:
    return (folder / "images").is_dir()


def _read_shanghaitech(part: str, path: Path) -> Dataset:
    kind = f"sh{part.lower()}"
    samples: list[Sample] = []
    orphans: list[Path] = []
    for split, folder in _found(kind, path, _shanghaitech_splits(part, path)).items():
        hyphen = folder / "ground-truth"
        truth = hyphen if hyphen.is_dir() else folder / "ground_truth"
        files = {image: truth / f"GT_{image.stem}.mat" for image in image_files(folder / "images")}
        samples += _samples(split, files, _read_shanghaitech_mat)
        orphans += _orphans(truth.glob("*.mat"), files.values())
    return Dataset(kind, str(path), tuple(samples), tuple(orphans))


def _read_shanghaitech_mat(path: Path) -> Marks:
    variables = read_mat(_read_bytes(path), source=path)
    match variables.get("image_info"):
        case [[{"location": location, "number": np.ndarray(size=1) as number}]] if _whole(number):
            return Marks(_number_pairs(location, path), declared=int(number.item()))
    raise InputError(
        "expected image_info{1,1} with the fields location (N×2) and number, as ShanghaiTech "
        f"publishes it; found {describe(variables)}",
        source=path,
    )


# --- UCF-QNRF ---------------------------------------------------------------------------


def _qnrf_splits(path: Path) -> Splits:
    for folder in _around(path):
        if found := _splits(folder, {"train": "Train", "test": "Test"}, _has_ann_files):
            return found
    return {}


def _has_ann_files(folder: Path) -> bool:
    return any(folder.glob("*_ann.mat"))


def _read_qnrf(path: Path) -> Dataset:
    samples: list[Sample] = []
    orphans: list[Path] = []
    for split, folder in _found("qnrf", path, _qnrf_splits(path)).items():
        files = {image: folder / f"{image.stem}_ann.mat" for image in image_files(folder)}
        samples += _samples(split, files, _read_ann_points)
        orphans += _orphans(folder.glob("*.mat"), files.values())
    return Dataset("qnrf", str(path), tuple(samples), tuple(orphans))


def _read_ann_points(path: Path) -> Marks:
    variables = read_mat(_read_bytes(path), source=path)
    if "annPoints" not in variables:
        raise InputError(f"expected annPoints (N×2); found {describe(variables)}", source=path)
    return Marks(_number_pairs(variables["annPoints"], path))


# --- JHU-Crowd++ ------------------------------------------------------------------------


def _jhu_splits(path: Path) -> Splits:
    for folder in _around(path):
        names = {"train": "train", "val": "val", "test": "test"}
        if found := _splits(folder, names, _has_image_labels):
            return found
    return {}


def _has_image_labels(folder: Path) -> bool:
    return (folder / "image_labels.txt").is_file() and _has_images(folder)


def _read_jhu(path: Path) -> Dataset:
    samples: list[Sample] = []
    orphans: list[Path] = []
    for split, folder in _found("jhu", path, _jhu_splits(path)).items():
        labels = _read_jhu_labels(folder / "image_labels.txt")
        files = {
            image: folder / "gt" / f"{image.stem}.txt" for image in image_files(folder / "images")
        }
        for image, truth in files.items():
            declared, tags = labels.get(image.stem, (None, {}))
            read = partial(_read_jhu_text, truth, declared) if truth.is_file() else None
            samples.append(_sample(image, split, read, tags))
        orphans += _orphans(folder.glob("gt/*.txt"), files.values())
    return Dataset("jhu", str(path), tuple(samples), tuple(orphans))


def _read_jhu_labels(path: Path) -> dict[str, tuple[int, dict[str, str]]]:
    """Of each image: the number of people and the tags scene, weather and distractor."""
    labels: dict[str, tuple[int, dict[str, str]]] = {}
    for number, line in _lines(path):
        try:
            stem, count, scene, weather, distractor = (word.strip() for word in line.split(","))
            tags = {
                "scene": scene,
                "weather": _WEATHER[int(weather)],
                "distractor": ("no", "yes")[int(distractor)],
            }
            labels[stem] = (int(count), tags)
        except (ValueError, IndexError):
            raise InputError(
                f"line {number}: expected id,count,scene,weather 0–3,distractor 0/1; "
                f"found {line[:80]!r}",
                source=path,
            ) from None
    return labels


def _read_jhu_text(path: Path, declared: int | None) -> Marks:
    points: list[tuple[float, float]] = []
    for number, line in _lines(path):
        try:
            x, y, *_width_height_occlusion_blur = map(float, line.split())
        except ValueError:
            raise InputError(
                f"line {number}: expected x y w h occlusion blur; found {line[:80]!r}", source=path
            ) from None
        points.append((x, y))
    return Marks(_number_pairs(points, path), declared)


# --- NWPU-Crowd -------------------------------------------------------------------------


def _is_nwpu(path: Path) -> bool:
    root = _nwpu_root(path)
    return root is not None and any((root / name).is_dir() for name in ("jsons", "mats"))


def _nwpu_root(path: Path) -> Path | None:
    for folder in _around(path):
        listed = any((folder / f"{split}.txt").is_file() for split in ("train", "val", "test"))
        if listed and _nwpu_image_folders(folder):
            return folder
    return None


def _nwpu_image_folders(root: Path) -> list[Path]:
    names = ("images", *(f"images_part{part}" for part in range(1, 6)))
    return [root / name for name in names if (root / name).is_dir()]


def _read_nwpu(path: Path) -> Dataset:
    root = _nwpu_root(path)
    if root is None:
        raise _not_found("nwpu", path)
    images = {
        file.stem: file for folder in _nwpu_image_folders(root) for file in image_files(folder)
    }
    truths = {file.stem: file for file in root.glob("mats/*.mat")}
    truths |= {file.stem: file for file in root.glob("jsons/*.json")}
    samples: list[Sample] = []
    for split in ("train", "val", "test"):
        if not (root / f"{split}.txt").is_file():
            continue
        for number, line in _lines(root / f"{split}.txt"):
            stem, *facts = line.split()
            if len(facts) not in (0, 2):
                raise InputError(
                    f"line {number}: expected `id illumination level`; found {line[:80]!r}",
                    source=root / f"{split}.txt",
                )
            # An image that is listed but not there stays: to count without it would mislead.
            image = images.get(stem, root / "images" / f"{stem}.jpg")
            read = partial(_read_nwpu_truth, truths[stem]) if stem in truths else None
            tags = dict(zip(("illumination", "level"), facts, strict=False))
            samples.append(_sample(image, split, read, tags))
    listed = {sample.name.rpartition(".")[0] for sample in samples}
    orphans = [truths[stem] for stem in sorted(truths) if stem not in listed]
    return Dataset("nwpu", str(path), tuple(samples), tuple(orphans))


def _read_nwpu_truth(path: Path) -> Marks:
    if path.suffix == ".mat":
        return _read_ann_points(path)
    content = _read_bytes(path)
    try:
        record = json.loads(content)
        points, number = record["points"], int(record["human_num"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(
            f"expected JSON with points ([[x, y], …]) and human_num ({error})", source=path
        ) from error
    return Marks(_number_pairs(points, path), declared=number)


# --- Shared steps -----------------------------------------------------------------------


def _around(path: Path) -> Iterator[Path]:
    """The path itself, then the folders in it: archives often unpack into one of their own."""
    if path.is_dir():
        yield path
        yield from sorted(child for child in path.iterdir() if child.is_dir())


def _splits(folder: Path, names: Mapping[str, str], accepts: Callable[[Path], bool]) -> Splits:
    """The folders of a set's splits: those in `folder`, or `folder` itself when it is one."""
    own = folder.resolve().name
    if own in names.values() and accepts(folder):
        return {split: folder for split, name in names.items() if name == own}
    children = {split: folder / name for split, name in names.items() if (folder / name).is_dir()}
    return children if any(map(accepts, children.values())) else {}


def _found(kind: str, path: Path, splits: Splits) -> Splits:
    if not splits:
        raise _not_found(kind, path)
    return splits


def _not_found(kind: str, path: Path) -> InputError:
    if not path.exists():
        return InputError("no such folder", source=path)
    return InputError(f"expected {BENCHMARKS[kind].summary}; found nothing of it", source=path)


def _sample(
    image: Path, split: str, read: Callable[[], Marks] | None, tags: Mapping[str, str]
) -> Sample:
    return Sample(image.name, partial(open_image, image), read, split, image, tags)


def _samples(
    split: str, files: Mapping[Path, Path], read: Callable[[Path], Marks]
) -> Iterator[Sample]:
    """Images with the file that should hold their points; without that file, unlabelled."""
    for image, truth in files.items():
        yield _sample(image, split, partial(read, truth) if truth.is_file() else None, {})


def _orphans(present: Iterable[Path], expected: Iterable[Path]) -> list[Path]:
    return sorted(set(present) - set(expected), key=natural_order)


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > _MAX_ANNOTATION_BYTES:
            raise InputError(f"{size:,} bytes are too many for an annotation", source=path)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the annotation: {error.strerror}", source=path) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that are not blank."""
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"expected text, found {error}", source=path) from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _whole(number: NDArray[np.generic]) -> bool:
    """Whether a single number is finite and has no fraction."""
    return number.dtype.kind in "fiu" and float(number.item()).is_integer()


def _number_pairs(values: object, path: Path) -> Points:
    """Points of a file; some published ones lie a little outside their image, none absurdly."""
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.asarray(["rows of different lengths"])
    if array.size and array.dtype.kind not in "fiu":
        raise InputError("points must be numbers, two a row (x y)", source=path)
    points = as_points(array, source=path)
    if (np.abs(points) > _MAX_COORDINATE).any():
        raise InputError(f"a coordinate of {np.abs(points).max():g} px is absurd", source=path)
    return points


BENCHMARKS: dict[str, Layout] = {
    "sha": _shanghaitech("A"),
    "shb": _shanghaitech("B"),
    "qnrf": Layout(
        "qnrf",
        "UCF-QNRF: {Train,Test}/img_0001.jpg and img_0001_ann.mat",
        lambda path: bool(_qnrf_splits(path)),
        _read_qnrf,
    ),
    "jhu": Layout(
        "jhu",
        "JHU-Crowd++: {train,val,test}/images/0001.jpg, gt/0001.txt and image_labels.txt",
        lambda path: bool(_jhu_splits(path)),
        _read_jhu,
    ),
    "nwpu": Layout(
        "nwpu",
        "NWPU-Crowd: images or images_part1 to 5, jsons or mats, train.txt, val.txt and test.txt",
        _is_nwpu,
        _read_nwpu,
    ),
}
"""The published sets, by the word before the colon."""
