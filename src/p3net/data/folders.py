"""A dataset's folder: which images are in it, what a reference means, how one is written.

Folders called train, val or test at the top are splits, and `images` after or before them
is no part of a name. An image is found only among the files below the folder, whatever a
reference says.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from uuid import uuid4

from p3net.data.annotations import Item
from p3net.data.images import is_image_name, is_overlay, to_rgb, upright_size_hw
from p3net.errors import InputError
from p3net.structures import Dataset, Sample

MAX_BYTES = 512_000_000
"""The largest annotation file read; COCO's own keypoints of 118,287 images have 238 MB."""

_SPLITS = dict.fromkeys(("train", "training"), "train")
_SPLITS |= dict.fromkeys(("val", "valid", "validation"), "val")
_SPLITS |= dict.fromkeys(("test", "testing"), "test")
_SPLIT_IN_NAME = re.compile(rf"(?<![a-z])({'|'.join(sorted(_SPLITS, reverse=True))})(?![a-z])")


def split_of(word: str) -> str | None:
    """The split a word names, by itself or as part of a file name.

    >>> split_of("Validation"), split_of("person_keypoints_train2017"), split_of("latest")
    ('val', 'train', None)
    """
    found = _SPLIT_IN_NAME.search(word.lower())
    return _SPLITS[found[1]] if found else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where an image stands in a dataset's folder.

    Attributes:
        split: the split its folder names.
        name: its path without the folders of the split and `images`.
        outer: the split's folder above `images`, or "".
        inner: the split's folder below `images`, or "".
    """

    split: str | None
    name: str
    outer: str
    inner: str

    @classmethod
    def of(cls, path: str) -> Place:
        """Take a path below the dataset's folder apart.

        >>> Place.of("val/images/gate/7.jpg")
        Place(split='val', name='gate/7.jpg', outer='val', inner='')
        """
        *folders, file = path.split("/")
        outer = folders.pop(0) if folders and folders[0].lower() in _SPLITS else ""
        images = folders.pop(0) if folders and folders[0] == "images" else ""
        below = images and not outer and folders and folders[0].lower() in _SPLITS
        inner = folders.pop(0) if below else ""
        split = _SPLITS.get((outer or inner).lower())
        return cls(split, posixpath.join(*folders, file), outer, inner)

    def beside_images(self, folder: str) -> str:
        """The path the image would have in a sibling of the folder `images`."""
        return posixpath.join(self.outer, folder, self.inner, self.name)


@dataclass(frozen=True)
class Tree:
    """The files below a folder, by their path there; the endings of `others` in lower case."""

    root: Path
    images: Mapping[str, Path]
    others: Mapping[str, Path]

    @classmethod
    def of(cls, root: Path) -> Tree:
        """List a folder; one without images is refused."""
        images: dict[str, Path] = {}
        others: dict[str, Path] = {}
        for relative, path in files_below(root):
            if is_overlay(path):
                continue
            if is_image_name(path):
                images[relative] = path
            else:
                stem, suffix = posixpath.splitext(relative)
                others[stem + suffix.lower()] = path
        if not images:
            raise InputError("no images in this folder", source=root)
        return cls(root, images, others)

    @cached_property
    def by_name(self) -> Mapping[str, Sequence[str]]:
        """The paths of the images by file name, also as Label Studio spells it on upload."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for path in self.images:
            name = posixpath.basename(path)
            for spelling in {name, re.sub(r"[^-\w.]", "", name.replace(" ", "_"))}:
                found[spelling].append(path)
        return dict(found)

    def find(self, reference: str, folder: str, split: str | None, source: Path) -> str | None:
        """The image that a reference seen from `folder` means; None where it is not there."""
        if reference not in self.by_name:
            reference = reference.replace("\\", "/")
        if reference.startswith("/") or re.match("[A-Za-z]:/", reference):
            return self.find_foreign(reference, split, source)
        if f"{posixpath.normpath(posixpath.join(folder, reference))}/".startswith("../"):
            raise InputError(
                f"{reference!a} lies outside the dataset's folder; give the folder above both",
                source=source,
            )
        for base in (folder, posixpath.join(folder, "images"), "", "images"):
            path = posixpath.normpath(posixpath.join(base, reference))
            if path in self.images:
                return path
        end = "/" + posixpath.normpath(reference)
        same = self.by_name.get(posixpath.basename(end), ())
        return _only([path for path in same if path.endswith(end)], split, reference, source)

    def find_foreign(self, reference: str, split: str | None, source: Path) -> str | None:
        """The image that shares most of the end of a path from another machine."""
        reference = posixpath.normpath(reference.replace("\\", "/"))
        if reference in self.images:
            return reference
        name = posixpath.basename(reference)
        uploaded = re.sub("^[0-9a-f]{8}-", "", name)
        same = self.by_name.get(name) or self.by_name.get(uploaded) or ()
        shared = [_shared_parts(path, reference) for path in same]
        best = [path for path, count in zip(same, shared, strict=True) if count == max(shared)]
        return _only(best, split, reference, source)


def _shared_parts(first: str, second: str) -> int:
    pairs = zip(reversed(first.split("/")), reversed(second.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _only(found: list[str], split: str | None, reference: str, source: Path) -> str | None:
    if len(found) > 1:
        found = [path for path in found if Place.of(path).split == split] or found
    if len(found) > 1:
        raise InputError(f"{reference!a} may mean {found[0]!a} or {found[1]!a}", source=source)
    return found[0] if found else None


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot be listed: {error.strerror}", source=error.filename) from None


def files_below(
    root: Path, refuse: Callable[[OSError], None] = _refuse
) -> Iterator[tuple[str, Path]]:
    """Every file below a folder with its path there; nothing hidden, links followed once.

    Nothing of a run's folder further down either; `refuse` is told of folders that cannot be
    listed.
    """
    seen: set[tuple[int, int]] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=refuse):
        status = Path(folder).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__MACOSX")))
        relative = Path(folder).relative_to(root)
        if "run.json" in files and relative.parts:
            folders.clear()
            continue
        for name in sorted(files):
            if not name.startswith("."):
                yield (relative / name).as_posix(), Path(folder, name)


def load(path: Path) -> bytes:
    """The content of an annotation file."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(f"{size:,} bytes are too many for annotations", source=path)
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=path) from None


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder that becomes `destination` when all went well, and is gone otherwise."""
    new = destination.absolute().with_name(f".{destination.absolute().name}-{uuid4().hex[:8]}")
    try:
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            raise InputError("already exists; give a new or an empty folder", source=destination)
        new.mkdir(parents=True)
        yield new
        if destination.exists():
            destination.rmdir()
        new.rename(destination)
    except OSError as error:
        raise InputError(f"cannot be written: {error}", source=destination) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def create(path: Path, content: bytes) -> None:
    """Write a file that is not there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as stream:
        stream.write(content)


def copy_images(dataset: Dataset, new: Path) -> list[tuple[str, Item]]:
    """Write the images, each opened once; give each one's split folder and what to annotate.

    The folders are `SPLIT/images`, or `images` alone (and "" given) where all is training data.
    """
    parts = {sample.split for sample in dataset.samples}
    names = {sample.name.split("/")[0].lower() for sample in dataset.samples}
    plain = parts <= {"train"} and names.isdisjoint(_SPLITS)
    written = []
    for sample in dataset.samples:
        image = sample.open()
        size_hw = upright_size_hw(image)
        marks = sample.marks() if sample.labelled else None
        split = "" if plain else sample.split
        path = posixpath.join(split, "images", _file_name(sample))
        if (new / path).exists():
            raise InputError("two images would be one file there; rename one", source=sample.key)
        (new / path).parent.mkdir(parents=True, exist_ok=True)
        if sample.path is not None:
            shutil.copyfile(sample.path, new / path)
        else:
            to_rgb(image).save(new / path, format="PNG")
        written.append((split, Item(path, size_hw, marks)))
    return written


_ODD = re.compile(r"[\x00-\x1f\\\ud800-\udfff]")


def plain_name(name: str) -> str:
    """A name that every file system takes, as like the given one as can be."""
    return _ODD.sub("_", name)


def _file_name(sample: Sample) -> str:
    """The name as a path below a folder, ending as an image does."""
    name = sample.name
    hidden = any(part.startswith(".") or not part for part in name.split("/"))
    if hidden or _ODD.search(name):
        raise InputError("cannot be a file's name everywhere; rename the image", source=name)
    if sample.path is None:
        return name if name.lower().endswith(".png") else f"{name}.png"
    return name if is_image_name(name) else name + sample.path.suffix
