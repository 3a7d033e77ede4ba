"""Freed memory stays with the process: the next step or image asks for the same again.

glibc gives every large block back to the system as soon as it is freed, and each new one costs a
fault and a cleared page for every 4 kB of it: a tenth of a training step.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # from malloc.h
_SETTINGS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 64 * 2**20))


@cache
def keep_freed_memory() -> bool:
    """Say so to the allocator, once and for the whole process; False where it is not glibc's."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) for name, value in _SETTINGS)
