from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# A block that is freed and asked for again: how many pages had to be brought in the second time.
PROGRAM = """
import ctypes, resource, sys
from p3net.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def touch():
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator than glibc's")
def test_freed_memory_is_not_brought_in_again():
    def faults(way: str) -> int:
        words = [sys.executable, "-c", PROGRAM, way]
        return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)

    assert faults("kept") < 100
    assert faults("plain") > 1000  # 16,384 of 4 kB
