"""One process at a time in a folder; a killed one lets go by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p3net.errors import InputError


@contextmanager
def alone(lock: Path, *, wait: bool) -> Iterator[None]:
    """Hold a lock file, made with its folder; where the system knows no locks, hold nothing.

    Of a process, not of its children, so that those of a killed one do not hold it either.

    Args:
        lock: the file, which stays.
        wait: until another process lets go; otherwise it is an error that one holds it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise InputError(
            f"a run cannot be kept here: {error.strerror}; choose another --out", source=lock.parent
        ) from None
    with file:
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            raise InputError(
                "another process is training in this folder; let it finish, or stop it first",
                source=lock.parent,
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
