"""Algorithms: the update, its schedules, when it stops and which iterate it returns."""

from __future__ import annotations

from typing import Any

from quietgrad.algorithms.registry import ALGORITHMS, entry

_CLASSES = {found.home.partition(".")[2]: found for found in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name].kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def by_name(name: str) -> Any:
    """The algorithm class with a command-line name.

    >>> by_name("dp-srm").__name__
    'DPSRM'
    """
    return entry(name).kind
