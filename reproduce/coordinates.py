"""Coordinate search: one setting at a time along its list, from a start, until no neighbour is better.

A full grid of four settings takes hundreds of fits. This takes about ten, and says what it leaves open: that every
neighbour of what it chose is worse holds along each list, not across lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Setting = dict[str, Any]
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Found:
    """The best setting tried, how many were tried, and the neighbours of it that were not."""

    best: Setting
    tried: int
    untried: list[Setting]


def neighbours(axes: Axes, at: Setting, name: str) -> list[Setting]:
    """The settings one place further and one place back in the list of ``name``.

    >>> neighbours({"step": [0.1, 0.2, 0.5]}, {"step": 0.5}, "step")
    [{'step': 0.2}]
    """
    values = list(axes[name])
    place = values.index(at[name])
    return [{**at, name: values[i]} for i in (place + 1, place - 1) if 0 <= i < len(values)]


def coordinate_search(axes: Axes, start: Setting, error: Callable[[Setting], float], allowed: int) -> Found:
    """Descend ``error`` along one list after the other, by at most ``allowed`` fits.

    Each list is walked first in its own direction. A setting is fitted once, however often it is met.

    >>> error = lambda at: abs(at["step"] - 4) + abs(at["batch"] - 1)
    >>> coordinate_search({"step": [1, 2, 3, 4, 5], "batch": [1, 2]}, {"step": 3, "batch": 2}, error, 10)
    Found(best={'step': 4, 'batch': 1}, tried=6, untried=[])
    """
    errors: dict[tuple[Any, ...], float] = {}

    def key(at: Setting) -> tuple[Any, ...]:
        return tuple(at[name] for name in axes)

    def try_it(at: Setting) -> bool:
        """Whether the error at a setting is known; fits it if a fit is left."""
        if key(at) not in errors and len(errors) < allowed:
            errors[key(at)] = error(at)
        return key(at) in errors

    best, moved = start, try_it(start)
    while moved:
        moved = False
        for name in axes:
            ahead = neighbours(axes, best, name)
            while ahead:
                at = ahead.pop(0)
                if try_it(at) and errors[key(at)] < errors[key(best)]:
                    best, moved = at, True
                    ahead = neighbours(axes, best, name)
    untried = [at for name in axes for at in neighbours(axes, best, name) if key(at) not in errors]
    return Found(best, len(errors), untried)
