"""Objectives: losses, their clipped per-example sums, and their constants.

>>> from quietgrad import objectives
>>> objectives.Logistic(regularizer=objectives.L2(0.1)).regularizer.strong_convexity
0.1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.core.exports import lazy_names

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


__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "tables.losses": "Logistic Multinomial Huber Pinball PoissonDeviance Squared Hinge",
        "tables.regularizers": "L2 Nonconvex",
        "tables.landscapes": "landscape",
    },
)
