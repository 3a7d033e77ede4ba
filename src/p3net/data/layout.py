"""A layout of files on disk: how to know it, read it and, where people write it, write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from p3net.structures import Dataset


@dataclass(frozen=True, slots=True)
class Layout:
    """One entry of the plain dicts `readers.BENCHMARKS` and `formats.FORMATS`.

    Attributes:
        name: what stands before the colon in `sha:PATH`.
        summary: one line for `--help` and the documentation.
        recognises: whether a path has this layout, judged by its contents, quickly.
        read: the dataset at that path; annotations are read when they are asked for.
        write: writes a dataset into a new folder; None where nobody writes this layout.
    """

    name: str
    summary: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Dataset]
    write: Callable[[Dataset, Path], None] | None = None
