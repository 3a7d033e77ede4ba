"""Marks on disk, in the project's folder format, written whole after every change.

Each image has one file of points beside it or in `points/`; `p3net data` reads the folder at any
moment. A version is a hash of that file, so a change made by anybody, another program included,
is seen. What belongs to the server (runs, originals, the lock) lies in the hidden `.p3net`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from p3net.data import annotations as single
from p3net.data.annotations import Item
from p3net.data.catalogue import open_dataset
from p3net.data.folders import Place, Tree, load
from p3net.data.formats import annotation_files
from p3net.data.images import natural_order
from p3net.errors import InputError
from p3net.structures import Marks, Points, as_points

UNMARKED = "none"
"""The version of an image that nobody has marked."""

HIDDEN = ".p3net"
"""The folder of the server's own files; readers of datasets pass over hidden names."""

_FORMATS: dict[str, tuple[Callable[[bytes, Path], Marks], Callable[[Item], bytes]]] = {
    ".txt": (single.parse_text, single.emit_text),
    ".csv": (single.parse_text, single.emit_csv),
    ".npy": (single.parse_npy, single.emit_npy),
    ".json": (single.parse_list, single.emit_list),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One image of the folder.

    Attributes:
        id: what requests call it: 16 hex digits of its name's hash.
        name: its path below the folder, with `/`.
        key: `split/name`, as datasets and splits have it.
        path: its file.
        marks: the file its points are in or will be in.
    """

    id: str
    name: str
    key: str
    path: Path
    marks: Path


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What is marked on an image: points, or None where nobody has marked; and its version."""

    points_xy: Points | None
    version: str


class UnknownImageError(LookupError):
    """No image of the folder has this id."""


class ConflictError(Exception):
    """The marks have changed since the version that a change was made to."""

    def __init__(self, state: State) -> None:
        super().__init__("the marks have changed meanwhile")
        self.state = state


class Store:
    """The images of a folder and their marks; safe to use from many threads.

    One server works on a folder at a time: the lock goes with the process, however it ends.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise InputError("no such folder; give one with images", source=folder)
        kind = open_dataset(folder).kind
        if kind != "folder":
            raise InputError(
                f"this is {kind}; marks are kept as a folder of images with a file of points each. "
                f"Make one: p3net data convert {folder} NEW --to folder",
                source=folder,
            )
        self.folder = folder.resolve()
        self.hidden = self.folder / HIDDEN
        self._changing = threading.Lock()
        self._counts: dict[Path, tuple[tuple[int, int], int | str]] = {}
        self._lock = claim(self.hidden / "lock")
        if self._lock is None:
            raise InputError(
                "another p3net serve works on this folder; stop it first", source=folder
            )
        self.entries: Mapping[str, Entry] = self.refresh()

    def close(self) -> None:
        """Let another server work on the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def refresh(self) -> Mapping[str, Entry]:
        """List the folder again: the images by id, IMG_2 before IMG_10."""
        tree = Tree.of(self.folder)
        taken = annotation_files(tree, tuple(_FORMATS), "points")
        found = {}
        for name in sorted(tree.images, key=lambda name: natural_order(Path(name))):
            place = Place.of(name)
            key = f"{place.split or 'train'}/{place.name}"
            # With the image's whole name it can belong to no other image, now or later.
            new = self.folder / f"{place.beside_images('points')}.txt"
            marks = tree.others[taken[name]] if name in taken else new
            id_ = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
            found[id_] = Entry(id_, name, key, tree.images[name], marks)
        self.entries = found
        return found

    def entry(self, id_: str) -> Entry:
        """An image by its id, looked up and never made into a path."""
        try:
            return self.entries[id_]
        except KeyError:
            raise UnknownImageError(id_) from None

    def read(self, id_: str) -> State:
        """The marks of an image."""
        return _read(self.entry(id_))

    def write(self, id_: str, points_xy: Points | None, version: str) -> State:
        """Replace the marks that have this version; None makes the image unmarked again.

        When it returns, the new marks have reached the disk; a kill before leaves the old ones.
        """
        entry = self.entry(id_)
        with self._changing:
            before = _read(entry)
            if before.version != version:
                raise ConflictError(before)
            try:
                self._keep_original(entry)
                if points_xy is None:
                    entry.marks.unlink(missing_ok=True)
                    return State(None, UNMARKED)
                _, emit = _FORMATS[entry.marks.suffix.lower()]
                content = emit(Item(entry.name, (0, 0), Marks(as_points(points_xy))))
                replace_durably(entry.marks, content)
            except OSError as error:
                raise InputError(
                    f"the marks cannot be written ({error.strerror}); the previous ones are kept",
                    source=entry.name,
                ) from None
        return State(points_xy, _version(content))

    def marked(self, entry: Entry) -> int | str | None:
        """How many points an image has; None where unmarked; a text where its file is damaged."""
        try:
            status = entry.marks.stat()
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._counts.get(entry.marks)
        if known is None or known[0] != stamp:
            try:
                points = _read(entry).points_xy
            except InputError as error:
                known = (stamp, error.message)
            else:
                known = (stamp, 0 if points is None else len(points))
            self._counts[entry.marks] = known
        return known[1]

    def _keep_original(self, entry: Entry) -> None:
        """Put a file aside that says more than points, such as a csv with other columns."""
        kept = self.hidden / "originals" / entry.marks.relative_to(self.folder)
        if not entry.marks.exists() or kept.exists():
            return
        content = entry.marks.read_bytes()
        parse, emit = _FORMATS[entry.marks.suffix.lower()]
        if emit(Item(entry.name, (0, 0), parse(content, entry.marks))) != content:
            replace_durably(kept, content)


def _read(entry: Entry) -> State:
    if not entry.marks.exists():
        return State(None, UNMARKED)
    content = load(entry.marks)
    parse, _ = _FORMATS[entry.marks.suffix.lower()]
    return State(parse(content, entry.marks).points_xy, _version(content))


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file so that at every moment the old one or the new one is there, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # gone where all went well
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def claim(path: Path) -> int | None:
    """Lock a file and give its descriptor, or None where another process holds it.

    The lock lives as long as a process that has the descriptor, a child included.
    """
    try:
        import fcntl
    except ImportError:
        raise InputError("the page needs the file locks of Linux or macOS") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"cannot be written to: {error.strerror}", source=path) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
