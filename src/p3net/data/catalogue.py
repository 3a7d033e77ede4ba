"""From what a user writes to a dataset: `sha:PATH`, `synthetic:SEED`, a path, or several of them.

A path is recognised by its contents. Several are joined by ` + `.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from p3net.data.formats import FORMATS
from p3net.data.layout import Layout
from p3net.data.readers import BENCHMARKS
from p3net.errors import InputError
from p3net.structures import Dataset, Sample

SYNTHETIC = "synthetic"
SURFACES = "surfaces"
JOINED = "joined"
"""The kind of several datasets in one."""

_PLUS = " + "

_LAYOUTS = BENCHMARKS | FORMATS


def kinds() -> dict[str, str]:
    """What may stand before the colon, each with one line about it."""
    known = {name: layout.summary for name, layout in _LAYOUTS.items()}
    return known | {
        SYNTHETIC: "rendered scenes: synthetic:SEED",
        SURFACES: "rendered gravel, leaves and the like, without anybody: surfaces:SEED",
    }


def open_dataset(spec: str | Path) -> Dataset:
    """Open `KIND:PATH`, `synthetic:SEED`, or a path whose layout is recognised.

    No image or annotation is read yet. A path whose own name starts like a kind is written
    `./sha:PATH`. In `sha:A + shb:B` images are called `sha/NAME` and `shb/NAME`; of two parts of
    one kind the second's are `folder-2/NAME`.
    """
    text = str(spec)
    if isinstance(spec, str) and _PLUS in text and not _path(text).exists():
        return _join(text)
    kind, colon, rest = text.partition(":") if isinstance(spec, str) else ("", "", "")
    if colon and kind == SYNTHETIC:
        from p3net.data.synthetic import scenes_from_spec

        return scenes_from_spec(rest)
    if colon and kind == SURFACES:
        from p3net.data.surfaces import surfaces_from_spec

        return surfaces_from_spec(rest)
    if colon and kind in _LAYOUTS:
        if not rest:
            raise InputError(f"expected a path after {text}", source=text)
        return _read(_LAYOUTS[kind], _path(rest), text)
    path = _path(text)
    if not text or (_names_a_kind(kind, colon) and not path.exists()):
        raise InputError(f"no such path and no such kind; the kinds are\n{_listing()}", source=text)
    return _read(_recognise(path), path, text)


def _join(text: str) -> Dataset:
    """The datasets between the plus signs, each image's name behind its part's."""
    parts = [open_dataset(part.strip()) for part in text.split(_PLUS)]
    kinds = [part.kind for part in parts]
    samples: list[Sample] = []
    for index, part in enumerate(parts):
        before = kinds[:index].count(part.kind)
        name = part.kind + (f"-{before + 1}" if before else "")
        samples += (replace(sample, name=f"{name}/{sample.name}") for sample in part.samples)
    orphans = tuple(orphan for part in parts for orphan in part.orphans)
    return Dataset(JOINED, text, tuple(samples), orphans)


def origin(kind: str, key: str) -> tuple[str, str]:
    """The kind and key that an image of a dataset has by itself, outside of any joined one.

    >>> origin("joined", "train/sha/IMG_1.jpg"), origin("sha", "train/IMG_1.jpg")
    (('sha', 'train/IMG_1.jpg'), ('sha', 'train/IMG_1.jpg'))
    >>> origin("joined", "train/folder-2/a/b.jpg")
    ('folder', 'train/a/b.jpg')
    """
    if kind != JOINED:
        return kind, key
    split, part, name = key.split("/", 2)
    return re.sub(r"-\d+$", "", part), f"{split}/{name}"


def is_own(dataset: Dataset) -> bool:
    """Whether these are a user's own images: some are, and none are of a published set."""
    kinds = {origin(dataset.kind, sample.key)[0] for sample in dataset.samples}
    return bool(kinds & FORMATS.keys()) and not kinds & BENCHMARKS.keys()


def _names_a_kind(kind: str, colon: str) -> bool:
    """Whether `kind:…` was meant as a kind: a Windows drive has one letter, a path has slashes."""
    return bool(colon) and len(kind) > 1 and not set(kind) & set("/\\.~")


def _path(text: str) -> Path:
    # The shell leaves the ~ of `sha:~/data` as it is.
    return Path.home() / text[2:] if text.startswith("~/") else Path(text)


def _recognise(path: Path) -> Layout:
    if not path.exists():
        raise InputError("no such file or folder", source=path)
    for group in (BENCHMARKS, FORMATS):  # a benchmark also looks like a folder of images
        try:
            matches = [layout for layout in group.values() if layout.recognises(path)]
        except OSError as error:
            raise InputError(f"cannot look inside: {error.strerror}", source=path) from None
        if len(matches) == 1:
            return matches[0]
        if matches:
            choices = " or ".join(f"{layout.name}:{path}" for layout in matches)
            raise InputError(f"can be read in several ways; write {choices}", source=path)
    raise InputError(
        f"none of the known layouts is here. Tried\n{_listing()}\n"
        "Give the folder that holds one of these, or force a reading with KIND:PATH",
        source=path,
    )


def _read(layout: Layout, path: Path, spec: str) -> Dataset:
    if not path.exists():
        raise InputError("no such file or folder", source=path)
    try:
        dataset = layout.read(path)
    except OSError as error:
        raise InputError(f"cannot read: {error.strerror}", source=error.filename or path) from None
    if not dataset.samples:
        raise InputError(f"no images there; expected {layout.summary}", source=path)
    return replace(dataset, root=spec)


def _listing() -> str:
    names = kinds()
    width = max(map(len, names))
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in names.items())
