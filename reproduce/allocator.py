"""Keep freed memory inside the process: fewer page faults per training step on Linux.

Torch on CPUs returns large tensors to the operating system when they die and asks for fresh, zeroed pages for
the next ones. A step that keeps two tapes (DP-SRM) can spend a tenth of its time on that. glibc can be
told to keep the pages; the process then holds on to its peak memory.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def keep_freed_memory(largest: int = 1 << 30) -> bool:
    """Let glibc keep freed blocks of up to `largest` bytes; returns whether the C library took the setting.

    For the whole process, so it is yours to call: once, before training. Without glibc it does nothing.

    >>> keep_freed_memory() in (True, False)
    True
    """
    if not 0 < largest < 1 << 31:
        raise ValueError(f"largest={largest}: must be between 1 and 2³¹ − 1 bytes, the range of mallopt.")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    if sys.platform != "linux":
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, largest), mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)])
