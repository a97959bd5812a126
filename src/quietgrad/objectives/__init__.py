"""Objectives: losses, their clipped per-example sums, and their constants.

>>> from quietgrad import objectives
>>> objectives.Logistic(regularizer=objectives.L2(0.1)).regularizer.strong_convexity
0.1
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.tables.landscapes import landscape
    from quietgrad.tables.losses import (
        Hinge,
        Huber,
        Logistic,
        Multinomial,
        Pinball,
        PoissonDeviance,
        Squared,
    )
    from quietgrad.tables.regularizers import L2, Nonconvex

_HOMES = {
    "Logistic": "losses",
    "Multinomial": "losses",
    "Huber": "losses",
    "Pinball": "losses",
    "PoissonDeviance": "losses",
    "Squared": "losses",
    "Hinge": "losses",
    "L2": "regularizers",
    "Nonconvex": "regularizers",
    "landscape": "landscapes",
}

__all__ = [
    "Hinge",
    "Huber",
    "L2",
    "Logistic",
    "Multinomial",
    "Nonconvex",
    "Pinball",
    "PoissonDeviance",
    "Squared",
    "landscape",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return resolve_name(f"quietgrad.tables.{_HOMES[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
