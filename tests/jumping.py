"""`quietgrad` on a machine whose clock jumps by days, back and forth, each time somebody reads it."""

from __future__ import annotations

import itertools
import sys
import time

_DAYS = itertools.cycle((0.0, 86_400.0, -86_400.0, 30 * 86_400.0, -300 * 86_400.0))
_now = time.time


def jumping() -> float:
    """The time of day, give or take some."""
    return _now() + next(_DAYS)


if __name__ == "__main__":
    time.time = jumping
    from quietgrad.cli import main

    sys.exit(main(sys.argv[1:]))
