"""What the words after `p3net count MODEL` mean: images, videos, folders, patterns, addresses."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from p3net.data.folders import files_below
from p3net.data.images import MAX_BYTES, is_image_name, is_overlay, natural_order
from p3net.data.video_source import is_stream, is_video_name, public_name
from p3net.errors import InputError

_FETCH_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Source:
    """One thing to count.

    Attributes:
        kind: "image" and "picture" (behind an address) hold one count, "video" many.
        place: its file or address; "-" is standard input.
        shown: what results call it.
        name: its path below the folder that all files given have in common, for output folders.
        error: why it cannot be counted, where that is known already.
    """

    kind: Literal["image", "picture", "video", "stdin"]
    place: Path | str
    shown: str
    name: str
    error: str = ""


def split_words(words: Sequence[str]) -> tuple[str, list[str]]:
    """The model and the files; the model comes first, and without one the one in the box counts."""
    from p3net.checkpoint import BOX

    first, *others = words
    if not is_model(first) or (not others and _is_missing(first)):
        if (Path(first) / "run.json").is_file():
            raise InputError(
                "this run has no model yet; continue it with p3net train --out … --resume",
                source=first,
            )
        if others and _is_no_source(first):
            raise InputError("no such model, file or folder", source=first)
        return BOX, list(words)
    if not others:
        raise InputError("nothing to count; give images, folders, videos or - after the model")
    return first, others


def _is_missing(word: str) -> bool:
    """Whether a word is a path that leads nowhere, and no name on a hub."""
    from p3net.hub import is_elsewhere

    return not Path(word).exists() and Path(word).suffix == "" and not is_elsewhere(word)


def _is_no_source(word: str) -> bool:
    """Whether a word can be nothing to count: a path that leads nowhere and has no ending."""
    here = Path(word).exists() or is_stream(word) or glob.has_magic(word)
    return not here and word != "-" and Path(word).suffix == ""


def is_model(word: str) -> bool:
    """Whether a word looks like a model: weights, a folder with weights, or OWNER/NAME of a hub."""
    from p3net.checkpoint import BOX, NAMES
    from p3net.hub import MODEL_SUFFIXES, is_name

    path = Path(word)
    if word == BOX and not path.exists():
        return True
    if path.is_dir():
        return os.access(path, os.X_OK) and any((path / name).is_file() for name in NAMES)
    if path.exists() or path.suffix in MODEL_SUFFIXES:
        return path.suffix in MODEL_SUFFIXES
    media = is_image_name(word) or is_video_name(word) or is_stream(word)
    return not media and is_name(word)


def plan(words: Sequence[str]) -> list[Source]:
    """What to count, in order and each file once; what is not there has an error.

    Folders are gone through with all folders below them, hidden ones left out; patterns know
    `*`, `?`, `[…]` and `**`. Both keep to files that are named like images or videos.
    """
    found: dict[str, Source] = {}
    for source in chain.from_iterable(map(_meaning, words)):
        place = source.place
        found.setdefault(str(place.resolve() if isinstance(place, Path) else place), source)
    return _named(list(found.values()))


def _meaning(word: str) -> Iterator[Source]:
    path = Path(word)
    if word == "-":
        yield Source("stdin", word, word, "stdin")
    elif is_stream(word):
        shown = public_name(word)
        bare = re.sub(r"^\w+://|[?#].*$", "", shown)
        kind: Literal["picture", "video"] = "video"
        if word.lower().startswith(("http://", "https://")) and is_image_name(bare):
            kind = "picture"
        yield Source(kind, word, shown, re.sub(r"[^\w.-]+", "_", bare).strip("_.") or "stream")
    elif path.is_dir():
        refused: list[Source] = []
        found = _media(_below(path, refused))
        yield from found + refused or [_missing(word, "no images or videos in it")]
    elif path.exists():
        yield _file(path)
    elif glob.has_magic(word):
        # Path.glob takes no absolute patterns
        matches = [Path(match) for match in glob.glob(word, recursive=True)]  # noqa: PTH207
        refused = []
        files = {f: None for m in matches for f in (_below(m, refused) if m.is_dir() else [m])}
        found = _media(list(files))
        yield from found + refused or [_missing(word, "no image or video matches")]
    else:
        yield _missing(word, "no such file or folder")


def _below(folder: Path, refused: list[Source]) -> list[Path]:
    """The files below a folder; folders that cannot be listed are added to `refused`."""

    def refuse(error: OSError) -> None:
        refused.append(_missing(str(error.filename), f"cannot be listed: {error.strerror}"))

    return [path for _, path in files_below(folder, refuse)]


def _media(files: Sequence[Path]) -> list[Source]:
    wanted = [
        path
        for path in files
        if (is_image_name(path) or is_video_name(path)) and not is_overlay(path)
    ]
    return [_file(path) for path in sorted(wanted, key=natural_order)]


def _file(path: Path) -> Source:
    return Source("video" if is_video_name(path) else "image", path, str(path), path.name)


def _missing(word: str, problem: str) -> Source:
    return Source("image", word, word, word, problem)


def _named(sources: list[Source]) -> list[Source]:
    """Give files that lie in several folders names that say so."""
    files = [Path(s.place).absolute() for s in sources if isinstance(s.place, Path)]
    try:
        common = os.path.commonpath([path.parent for path in files])
    except ValueError:  # none, or on several drives
        return sources
    return [
        replace(s, name=s.place.absolute().relative_to(common).as_posix())
        if isinstance(s.place, Path)
        else s
        for s in sources
    ]


def unique(name: str, taken: set[str]) -> str:
    """A path like `name` that is not taken yet, on any file system; takes it.

    >>> taken = {"a.jpg"}
    >>> unique("A.jpg", taken), unique("a.jpg", taken), unique("b/a.jpg", taken)
    ('A-2.jpg', 'a-3.jpg', 'b/a.jpg')
    """
    stem, ending = re.fullmatch(  # type: ignore[union-attr]
        r"(.*?)((?:\.overlay)?\.[^./]*)?", name, re.DOTALL
    ).groups()
    candidate, number = name, 1
    while candidate.lower() in taken:
        number += 1
        candidate = f"{stem}-{number}{ending or ''}"
    taken.add(candidate.lower())
    return candidate


def fetch(address: str) -> bytes:
    """The content of a picture behind an address."""
    from urllib.request import urlopen

    try:
        with urlopen(address, timeout=_FETCH_TIMEOUT_S) as answer:  # noqa: S310  http or https
            content: bytes = answer.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"cannot be fetched: {reason}", source=public_name(address)) from None
    if len(content) > MAX_BYTES:
        raise InputError(f"more than {MAX_BYTES:,} bytes", source=public_name(address))
    return content
