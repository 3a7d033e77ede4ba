"""What people make themselves: a folder of images with points, or an annotation tool's export.

The same rules hold for every format. PATH is the folder, or one annotation file in it: then
only the images of that file. An image nobody annotated is unlabelled; an annotation without
points says that nobody is there. Images are copied byte for byte, and points keep every
digit (Label Studio holds percentages: 1e-6 px at first, exactly from then on).
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL import Image

from p3net.data import annotations as single
from p3net.data import exports as many
from p3net.data.annotations import Item
from p3net.data.exports import Entry
from p3net.data.folders import (
    Place,
    Tree,
    copy_images,
    create,
    files_below,
    load,
    new_folder,
    split_of,
)
from p3net.data.images import is_image_name, natural_order, open_image
from p3net.data.layout import Layout
from p3net.errors import InputError
from p3net.structures import Dataset, Marks, Sample

Parse = Callable[[bytes, Path], Marks]
"""From the bytes of one image's annotation file to its marks."""

_MAX_LOOKED_AT = 100_000  # files of a folder that recognition goes through
_HEAD_BYTES = 65_536
_KEYS = {
    "cvat": rb"(?=<)(?s:.*)<annotations[\s>]",
    "labelstudio": rb"\[\s*\{(?s:.*)\"(data|annotations|completions)\"\s*:",
    "folder": rb"\[\s*(\[|\]\s*$)",
    "labelme": rb"\{(?s:.*)\"shapes\"\s*:\s*\[",
    "coco": rb"\{(?s:.*)\"(images|annotations)\"\s*:\s*\[",
    "cclabeler": rb"\{(?s:.*)\"(human_num\"\s*:|points\"\s*:\s*\[)",
}
_NOT_POINTS = ("readme", "license", "licence", "classes", "labels", "train", "val", "test")


# --- Recognition: one function decides, so that no two formats claim a path ---------------


def _kind(path: Path) -> str | None:
    """The format of an annotation file, or of a folder by the first file that tells."""
    if path.is_file():
        return _file_kind(path)
    images = False
    for count, (_, file) in enumerate(files_below(path) if path.is_dir() else ()):
        if count > _MAX_LOOKED_AT:
            break
        images = images or is_image_name(file)
        if kind := _file_kind(file):
            return kind
    return "folder" if images else None


def _file_kind(path: Path) -> str | None:
    """The format of a JSON or XML file, by the keys near its beginning."""
    if path.suffix.lower() not in (".json", ".xml"):
        return None
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return None
    return next((kind for kind, pattern in _KEYS.items() if re.match(pattern, head)), None)


# --- One annotation file for each image ---------------------------------------------------


def _each(
    name: str, parsers: Mapping[str, Parse], emit: Callable[[Item], bytes], beside: str
) -> Layout:
    """A format with a file for each image, beside it or in the folder `beside` images.

    `parsers` are by ending, the one that is written first.
    """
    kind = name if name in _KEYS else "folder"
    return Layout(
        name,
        _SUMMARIES[name],
        lambda path: name in _KEYS and _kind(path) == name,
        partial(_read_each, kind, parsers, beside),
        partial(_write_each, emit, next(iter(parsers)), beside),
    )


def _read_each(kind: str, parsers: Mapping[str, Parse], beside: str, path: Path) -> Dataset:
    root = path if path.is_dir() else path.parent
    if root != path and root.name == beside:
        root = root.parent
    tree = Tree.of(root)
    claims = annotation_files(tree, tuple(parsers), beside)
    orphans = []
    for key in sorted(set(tree.others) - set(claims.values())):
        file, suffix = tree.others[key], posixpath.splitext(key)[1]
        if suffix not in parsers or file.stem.lower() in _NOT_POINTS:
            continue
        if suffix == ".json" and _file_kind(file) != kind:
            continue
        image = _labelme_image(tree, key) if kind == "labelme" else None
        if image is None:
            orphans.append(file)
        elif claims.setdefault(image, key) != key:
            raise InputError(f"{claims[image]!a} annotates the same image", source=file)

    def reader(image: str) -> Callable[[], Marks] | None:
        if image not in claims:
            return None
        parse = parsers[posixpath.splitext(claims[image])[1]]
        return partial(_read_marks, parse, tree.others[claims[image]])

    if path.is_dir():
        samples = [_sample(tree, image, reader(image)) for image in tree.images]
        return _dataset(kind, path, samples, orphans)
    own = [image for image, key in claims.items() if tree.others[key] == path]
    if not own:
        raise InputError("no image belongs to this annotation", source=path)
    return _dataset(kind, path, [_sample(tree, image, reader(image)) for image in own])


def _read_marks(parse: Parse, path: Path) -> Marks:
    return parse(load(path), path)


def _labelme_image(tree: Tree, key: str) -> str | None:
    file = tree.others[key]
    reference = single.labelme_image(load(file), file)
    return tree.find(reference, posixpath.dirname(key), Place.of(key).split, file)


def annotation_files(tree: Tree, suffixes: tuple[str, ...], beside: str) -> dict[str, str]:
    """The annotation of each image: `a.jpg.txt` can only be that of a.jpg, else `a.txt`."""

    def present(image: str, *, whole: bool) -> list[str]:
        places = {image: None, Place.of(image).beside_images(beside): None}
        stems = [place if whole else posixpath.splitext(place)[0] for place in places]
        return [stem + end for stem in stems for end in suffixes if stem + end in tree.others]

    certain = {image: found for image in tree.images if (found := present(image, whole=True))}
    taken = {file for files in certain.values() for file in files}
    owners: dict[str, str] = {}
    for image, path in tree.images.items():
        found = certain.get(image) or [
            file for file in present(image, whole=False) if file not in taken
        ]
        if len(found) > 1:
            raise InputError(
                f"two annotations, {found[0]!a} and {found[1]!a}; remove one, or choose by "
                "txt:, csv:, npy: or json: before the path",
                source=path,
            )
        for file in found:
            if file in owners:
                raise InputError(
                    f"may belong to {owners[file]!a} or {image!a}; call it "
                    f"{path.name}{posixpath.splitext(file)[1]}",
                    source=tree.others[file],
                )
            owners[file] = image
    return {image: file for file, image in owners.items()}


def _write_each(
    emit: Callable[[Item], bytes], suffix: str, beside: str, dataset: Dataset, destination: Path
) -> None:
    with new_folder(destination) as new:
        items = [item for _, item in copy_images(dataset, new)]
        images = {item.image for item in items}
        stems = Counter(posixpath.splitext(image)[0] for image in images)
        for item in items:
            if item.marks is not None:
                path = Place.of(item.image).beside_images(beside)
                stem, ending = posixpath.splitext(item.image)
                if stems[stem] == 1 and stem not in images:
                    path = path.removesuffix(ending)
                create(new / (path + suffix), emit(item))


# --- One annotation file for many images --------------------------------------------------


def _shared(
    name: str,
    suffix: str,
    parse: Callable[[bytes, Path], list[Entry]],
    emit: Callable[[Sequence[Item]], bytes],
) -> Layout:
    """A format whose files list their images; each split has one."""
    return Layout(
        name,
        _SUMMARIES[name],
        lambda path: _kind(path) == name,
        partial(_read_shared, name, suffix, parse),
        partial(_write_shared, emit, suffix),
    )


def _read_shared(
    kind: str, suffix: str, parse: Callable[[bytes, Path], list[Entry]], path: Path
) -> Dataset:
    root = path if path.is_dir() else path.parent
    if root != path and root.name == "annotations":
        root = root.parent
    tree = Tree.of(root)
    same_ending = {key: file for key, file in tree.others.items() if key.endswith(suffix)}
    files = {
        key: file
        for key, file in same_ending.items()
        if file == path or (path.is_dir() and _file_kind(file) == kind)
    }
    if not files and not same_ending:
        raise InputError(f"no {suffix} file here", source=path)
    found: dict[str, Sample] = {}
    missing: list[Path] = []
    files = files or same_ending  # the reading was forced: let the parser say what is wrong
    for key, file in files.items():
        folder = posixpath.dirname(key)
        for entry in parse(load(file), file):
            split = split_of(entry.split or "") or Place.of(key).split
            split = split or split_of(file.stem)
            if entry.foreign:
                image = tree.find_foreign(entry.image, split, file)
            else:
                image = tree.find(entry.image, folder, split, file)
            if image is None:
                missing.append(root / entry.image.encode("ascii", "backslashreplace").decode())
            elif image in found:
                raise InputError(f"{image!a} is listed twice", source=file)
            else:
                found[image] = _sample(tree, image, entry.read, split)
    if missing and not found:
        raise InputError(
            f"none of the {len(missing)} images listed is in {root}, not even {missing[0].name}",
            source=next(iter(files.values())),
        )
    if path.is_dir():
        rest = (image for image in tree.images if image not in found)
        found |= {image: _sample(tree, image, None) for image in rest}
    return _dataset(kind, path, list(found.values()), missing)


def _write_shared(
    emit: Callable[[Sequence[Item]], bytes], suffix: str, dataset: Dataset, destination: Path
) -> None:
    with new_folder(destination) as new:
        parts: defaultdict[str, list[Item]] = defaultdict(list)
        for split, item in copy_images(dataset, new):
            parts[split or "annotations"].append(item)
        for name, items in parts.items():
            create(new / f"{name}{suffix}", emit(items))


# --- Both ---------------------------------------------------------------------------------


def _sample(
    tree: Tree, image: str, read: Callable[[], Marks] | None, split: str | None = None
) -> Sample:
    place, path = Place.of(image), tree.images[image]
    return Sample(
        place.name, partial(open_image, path), read, place.split or split or "train", path
    )


def _dataset(kind: str, path: Path, samples: list[Sample], orphans: Sequence[Path] = ()) -> Dataset:
    order = ("train", "val", "test").index
    samples.sort(key=lambda sample: (order(sample.split), natural_order(Path(sample.name))))
    return Dataset(kind, str(path), tuple(samples), tuple(orphans))


def convert(
    source: Dataset,
    destination: Path,
    layout: Layout,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a dataset in another format, into a new folder that is there whole or not at all.

    `progress` is called with images done and images in all.
    """
    if layout.write is None:
        writable = ", ".join(name for name, other in FORMATS.items() if other.write)
        raise InputError(f"{layout.name} can be read but not written; choose {writable}")
    if progress is not None:
        total = len(source)
        samples = (
            replace(sample, open=partial(_opened, sample.open, partial(progress, done, total)))
            for done, sample in enumerate(source.samples)
        )
        source = replace(source, samples=tuple(samples))
    layout.write(source, destination)
    if progress is not None:
        progress(len(source), len(source))


def _opened(open_: Callable[[], Image.Image], report: Callable[[], None]) -> Image.Image:
    """Open an image and say so: a writer opens each once, in order."""
    report()
    return open_()


_TXT = {".txt": single.parse_text}
_CSV = {".csv": single.parse_text}
_NPY = {".npy": single.parse_npy}
_JSON = {".json": single.parse_list}
_ANY = _TXT | _CSV | _NPY | _JSON
_LABELME = {".json": single.parse_labelme}
_CCLABELER = {".json": single.parse_cclabeler}

_SUMMARIES = {
    "folder": "images with points in .txt, .csv, .npy or .json, beside them or in points/",
    "txt": "the same, .txt only: x y a line",
    "csv": "the same, .csv only: x,y a line",
    "npy": "the same, .npy only: an array N×2",
    "json": "the same, .json only: [[x, y], …]",
    "labelme": "LabelMe: a .json with points beside each image",
    "cclabeler": "cclabeler: images/1.jpg and jsons/1.json",
    "coco": "COCO keypoints; images that the .json does not list are unlabelled",
    "labelstudio": "Label Studio: keypoints in its JSON export",
    "cvat": "CVAT for images 1.1: points; the tag `empty` where nobody is",
}

FORMATS: dict[str, Layout] = {
    "folder": _each("folder", _ANY, single.emit_text, "points"),
    "txt": _each("txt", _TXT, single.emit_text, "points"),
    "csv": _each("csv", _CSV, single.emit_csv, "points"),
    "npy": _each("npy", _NPY, single.emit_npy, "points"),
    "json": _each("json", _JSON, single.emit_list, "points"),
    "labelme": _each("labelme", _LABELME, single.emit_labelme, "images"),
    "cclabeler": _each("cclabeler", _CCLABELER, single.emit_cclabeler, "jsons"),
    "coco": _shared("coco", ".json", many.parse_coco, many.emit_coco),
    "labelstudio": _shared("labelstudio", ".json", many.parse_labelstudio, many.emit_labelstudio),
    "cvat": _shared("cvat", ".xml", many.parse_cvat, many.emit_cvat),
}
"""What people make themselves, by the word before the colon; all can be written."""
