"""From what a user writes to a dataset: `sha:PATH`, `synthetic:SEED` or a path.

A path is recognised by its contents.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from p3net.data.formats import FORMATS
from p3net.data.layout import Layout
from p3net.data.readers import BENCHMARKS
from p3net.errors import InputError
from p3net.structures import Dataset

SYNTHETIC = "synthetic"

_LAYOUTS = BENCHMARKS | FORMATS


def kinds() -> dict[str, str]:
    """What may stand before the colon, each with one line about it."""
    known = {name: layout.summary for name, layout in _LAYOUTS.items()}
    return known | {SYNTHETIC: "rendered scenes: synthetic:SEED"}


def open_dataset(spec: str | Path) -> Dataset:
    """Open `KIND:PATH`, `synthetic:SEED`, or a path whose layout is recognised.

    No image or annotation is read yet. A path whose own name starts like a kind is written
    `./sha:PATH`.
    """
    text = str(spec)
    kind, colon, rest = text.partition(":") if isinstance(spec, str) else ("", "", "")
    if colon and kind == SYNTHETIC:
        from p3net.data.synthetic import scenes_from_spec

        return scenes_from_spec(rest)
    if colon and kind in _LAYOUTS:
        if not rest:
            raise InputError(f"expected a path after {text}", source=text)
        return _read(_LAYOUTS[kind], _path(rest), text)
    path = _path(text)
    if not text or (_names_a_kind(kind, colon) and not path.exists()):
        raise InputError(f"no such path and no such kind; the kinds are\n{_listing()}", source=text)
    return _read(_recognise(path), path, text)


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
