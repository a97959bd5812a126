"""Freed memory, given back to the operating system between rounds of long vectors.

glibc keeps blocks of up to 32 MiB that were freed, in case they are needed again. A round frees and takes a dozen
vectors of about that size, so what is kept grows beyond what is used: a party held 4.7 copies of a vector of 7
million numbers where it needs 3.7.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

LONG = 1 << 20
"""Numbers in a vector from which on this is worth a call."""


def give_back(dimension: int) -> None:
    """Return freed pages if vectors are long; without glibc nothing happens.

    >>> give_back(10), give_back(LONG)
    (None, None)
    """
    if dimension >= LONG:
        _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        malloc_trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or no dynamic loader
        return lambda pad: None
    return malloc_trim
