"""Prepared copies of images, kept in a folder as raw pixels to be mapped into memory.

An entry is a plain .npy file (H×W×3 uint8) followed by the height and width of the original
and a CRC-32. Its name is a hash of the image's content and of the preparation, so a changed
image or setting never meets an old copy. Entries are written under another name and moved
into place: a crash halfway, or several processes at once, leave a whole entry or none. An
entry that fails its check is built again. A cache saves time and never changes a result: what
does not fit is prepared in memory instead.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

import numpy as np

from p3net.data.images import to_rgb, upright_size_hw
from p3net.data.transforms import Backend, Pixels, default_backend, prepare
from p3net.errors import InputError
from p3net.structures import Sample

_VERSION = "1"  # of the preparation and the file: raise it when either changes
_PARTIAL = ".partial-"
_STALE_AFTER_S = 3600.0
_TRAILER = struct.Struct("<III")  # height and width of the original, CRC-32

Prepared = tuple[Pixels, tuple[float, float]]
"""As `transforms.prepare` gives it: pixels, and prepared pixels for one original pixel (x, y)."""


class Cache:
    """A folder of prepared images.

    Args:
        folder: made where it does not exist; may be shared by processes and runs.
        budget_bytes: no entry is added beyond this; nothing is thrown out, because every
            image of an epoch is as likely to be needed next. Several processes that write at
            once can exceed it by one entry each.
    """

    def __init__(self, folder: str | Path, *, budget_bytes: int = 8 << 30) -> None:
        self.folder = Path(folder)
        self.budget_bytes = budget_bytes
        self._digests: dict[Hashable, str] = {}
        self._mapped: dict[str, Prepared] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.folder)
        except OSError as error:
            raise InputError(
                f"cannot be used as a cache: {error.strerror}; choose another folder", source=folder
            ) from None

    def __getstate__(self) -> dict[str, object]:
        """What another process needs: the place, not the open files."""
        return {"folder": self.folder, "budget_bytes": self.budget_bytes}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _digests={}, _mapped={})

    def prepared(
        self, sample: Sample, *, max_shorter_side: float = 2048, backend: Backend | None = None
    ) -> Prepared:
        """The whole image, upright and shrunk to the limit; what `prepare` gives, read-only.

        An image within the limit keeps its size: the pixels are the decoded ones, and a crop
        from them equals a crop from the file.
        """
        backend = backend or default_backend()
        settings = f"{_VERSION} {max_shorter_side} {backend}"
        name = f"{self._digest(sample)}-{_hash(settings.encode())[:8]}.npy"
        if name not in self._mapped:
            entry = _map(self.folder / name)
            if entry is None:
                with sample.open() as image:
                    size_hw = upright_size_hw(image)
                    made = prepare(image, max_shorter_side=max_shorter_side, backend=backend)
                made[0].flags.writeable = False
                self._store(self.folder / name, made[0], size_hw)
                entry = _map(self.folder / name)
                if entry is None:
                    return made
            self._mapped[name] = entry
        return self._mapped[name]

    def used_bytes(self) -> int:
        """How much the folder holds, unfinished entries included."""
        total = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # finished or removed meanwhile
                    total += entry.stat().st_size
        return total

    def _digest(self, sample: Sample) -> str:
        """A hash of the image's content, worked out once in a process."""
        if sample.path is None:
            known_by: Hashable = sample.open  # kept alive here, so it stays the same object
        else:
            try:
                stat = sample.path.stat()
            except OSError as error:
                raise InputError(
                    f"cannot read the image: {error.strerror}", source=sample.path
                ) from None
            known_by = (sample.path, stat.st_mtime_ns, stat.st_size)
        if known_by not in self._digests:
            if sample.path is None:
                with sample.open() as image:
                    rgb = to_rgb(image)
                    content = repr(rgb.size).encode() + rgb.tobytes()
            else:
                content = sample.path.read_bytes()
            self._digests[known_by] = _hash(content)
        return self._digests[known_by]

    def _store(self, target: Path, pixels: Pixels, original_hw: tuple[int, int]) -> None:
        """Write an entry, if it fits."""
        partial: Path | None = None
        try:
            if self.used_bytes() + pixels.nbytes > self.budget_bytes:
                return
            handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=self.folder)
            partial = Path(name)
            with os.fdopen(handle, "wb") as file:
                np.lib.format.write_array(file, pixels, allow_pickle=False)
                file.write(_TRAILER.pack(*original_hw, _check(pixels, original_hw)))
            partial.replace(target)
        except OSError:  # disk full, folder gone: work goes on without the entry
            if partial is not None:
                partial.unlink(missing_ok=True)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _check(pixels: Pixels, original_hw: tuple[int, int]) -> int:
    return zlib.crc32(repr((pixels.shape, original_hw)).encode(), zlib.crc32(pixels.data))


def _map(path: Path) -> Prepared | None:
    """Map an entry; None where there is none, or none that is whole. Reads it once, to check."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.open("rb") as file:
            file.seek(-_TRAILER.size, os.SEEK_END)
            height, width, check = _TRAILER.unpack(file.read())
    except (OSError, ValueError, EOFError, struct.error):
        return None
    if mapped.dtype != np.uint8 or mapped.ndim != 3:
        return None
    pixels: Pixels = mapped.view(np.ndarray)  # slices of a memmap are slow to make
    if _check(pixels, (height, width)) != check:
        return None
    return pixels, (pixels.shape[1] / width, pixels.shape[0] / height)


def _remove_leftovers(folder: Path) -> None:
    """Remove what a crash left half written, long enough ago that nobody is writing it."""
    for partial in folder.glob(f"{_PARTIAL}*"):
        with suppress(FileNotFoundError):
            if time.time() - partial.stat().st_mtime > _STALE_AFTER_S:
                partial.unlink()
