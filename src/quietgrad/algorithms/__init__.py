"""Algorithms: the update, its schedules, when it stops and which iterate it returns."""

from __future__ import annotations

from typing import Any

from quietgrad.algorithms.registry import ALGORITHMS

_CLASSES = {found.home.partition(".")[2]: found for found in ALGORITHMS.values()}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return _CLASSES[name].kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
