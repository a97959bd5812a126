"""The sensitivity of noise that is correlated over a run, by the patterns in which a record may take part.

Release k is sum_k + z·C·s·w_k with w = S⁻¹u, u standard normals and S lower triangular and Toeplitz with the first
column c. All releases together are S·sums + z·C·s·u, so s must be at least the largest move of S·sums by a record
that takes part in at most k releases, at least b apart, with a vector of length 1 in each. Vectors may point
anywhere: the square of a move is at most Σ_{i,j∈π} |G_ij| with G = SᵀS, and that is attained where no G_ij is
negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quietgrad_verify.losses import Floats

_MOST_PATTERNS = 20_000
_MOST_RELEASES = 1 << 20


def column_of(mechanism: Mapping[str, Any]) -> tuple[Floats, int, int]:
    """The first column of S, and how often and how far apart a record takes part; ``ValueError`` for none."""
    releases = mechanism.get("releases")
    if type(releases) is not int or not 1 <= releases <= _MOST_RELEASES:
        raise ValueError("releases: must be a whole number ≥ 1.")
    if mechanism.get("kind") == "banded":
        column = np.zeros(releases)
        bands = np.asarray(mechanism["column"], float)[:releases]
        column[: bands.size] = bands
        return column, 1, releases
    lam, alpha = np.asarray(mechanism["lam"], float), np.asarray(mechanism["alpha"], float)
    if lam.shape != alpha.shape or not ((lam > 0.0) & (lam < 1.0) & (alpha > 0.0)).all():
        raise ValueError("lam, alpha: must be as many of the one as of the other, λ in (0, 1) and α above 0.")
    powers = np.arange(releases - 1)[:, None] * np.log(lam)
    column = np.concatenate([[1.0], np.exp(powers) @ alpha])
    return column, int(mechanism["participations"]), int(mechanism["separation"])


def move(column: Floats, pattern: tuple[int, ...]) -> float:
    """√Σ|G_ij| over the releases of a pattern."""
    n = column.size
    total = 0.0
    for i in pattern:
        for j in pattern:
            low, high = min(i, j), max(i, j)
            total += abs(float(column[: n - high] @ column[high - low : n - low]))
    return math.sqrt(total)


def patterns(releases: int, most: int, apart: int, first: int = 0) -> Iterator[tuple[int, ...]]:
    """Every way to take part in at most ``most`` releases, at least ``apart`` apart; longest ones only."""
    if most == 0 or first >= releases:
        yield ()
        return
    for start in range(first, releases):
        for rest in patterns(releases, most - 1, apart, start + apart):
            yield (start, *rest)


def sensitivity(mechanism: Mapping[str, Any]) -> tuple[float, str]:
    """s, and how it was found: by all patterns, or where they are too many by the theorem for falling columns."""
    column, most, apart = column_of(mechanism)
    worst, number, releases = 0.0, 0, column.size
    for number, pattern in enumerate(patterns(releases, most, apart), start=1):
        worst = max(worst, move(column, pattern))
        if number > _MOST_PATTERNS or number * len(pattern) ** 2 * releases > 4e8:
            break
    else:
        return worst, f"by all {number} patterns"
    if (column < 0.0).any() or (np.diff(column[1:]) > 1e-15).any() or column[0] + 1e-15 < column[1]:
        raise ValueError("its coefficients do not fall, so no theorem gives its sensitivity.")
    return move(column, tuple(range(0, releases, apart))[:most]), "by the earliest pattern; its columns fall"
