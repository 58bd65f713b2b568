"""How a CPU run keeps its buffers: the C library is told not to hand freed memory back to the system.

glibc returns large buffers when they are freed; the next operation then asks for them again and every page is cleared
once more, which can take a good part of a forward or backward on a CPU.
"""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt(3), from glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER = 2**31 - 1
TOP_PAD = 64 * 2**20
"""Bytes that the heap grows by at a time."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed; False where there is no glibc or the environment sets ``MALLOC_*`` itself."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    libc = ctypes.CDLL(None)
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, TOP_PAD))
    return all(bool(libc.mallopt(parameter, value)) for parameter, value in settings)
