"""Vectors on a public integer grid: clip, round, add mod 2^64, read back.

Everything that leaves a party is a whole number mod 2^64, so the low bits of a released float can carry nothing
about the data (Mironov 2012). The grid is public: with noise of standard deviation σ its step is σ divided by a
fixed number of units (2^28 for masks and servers), which makes the noise tables the same for every σ.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.secure.faults import ImpossibleSum

Words = npt.NDArray[np.uint64]
Vector = npt.NDArray[np.float64]

_HALF_RING = 1 << 63


def encode(vector: npt.ArrayLike, *, dimension: int, bound: float, step: float) -> Words:
    """Clip to the L2 ball of radius ``bound``, round to the grid, and return words mod 2^64.

    Args:
        vector: ``dimension`` finite numbers.
        dimension: the agreed length d.
        bound: the agreed L2 bound of one party's vector.
        step: the grid's step.

    >>> encode([0.5, -0.25], dimension=2, bound=1.0, step=0.25).view(np.int64).tolist()
    [2, -1]
    """
    x = np.asarray(vector, np.float64)
    if x.shape != (dimension,):
        raise DataError(f"vector of shape {x.shape}: must have shape ({dimension},), as agreed at the start.")
    if not np.isfinite(x).all():
        raise DataError("vector: has a NaN or an infinity. Count such contributions as zero before summing.")
    # Scaled by the largest entry, so that no square overflows or vanishes.
    largest = float(np.abs(x).max())
    if largest > 0.0:
        direction = x / largest
        length = float(np.linalg.norm(direction))
        if largest > bound / length:
            x = direction * (bound / length)
    return np.rint(x / step).astype(np.int64).view(np.uint64)


def decode(words: Words, step: float) -> Vector:
    """Read a sum mod 2^64 back as numbers; exact as long as :func:`require_headroom` held.

    >>> decode(np.array([2, 2**64 - 1], np.uint64), 0.25).tolist()
    [0.5, -0.25]
    """
    return words.view(np.int64).astype(np.float64) * step


def require_headroom(*, parties: int, bound: float, step: float, noise_support: int) -> int:
    """Prove that no sum can wrap around, or refuse; return the largest magnitude that can occur.

    A coordinate of one clipped vector is at most bound/step + ½ grid units after rounding; one more unit
    covers the rounding of the floating-point division and norm (relative 2⁻⁵⁰ of less than 2⁴⁹ units, checked).
    The noise tables have finite support. So |sum| ≤ m(bound/step + 2) + noise support, which must be < 2^63.

    >>> require_headroom(parties=10, bound=1.0, step=2.0**-28, noise_support=2**33) < 2**34
    True
    >>> require_headroom(parties=10, bound=1e9, step=2.0**-28, noise_support=2**33)
    Traceback (most recent call last):
    ...
    ValueError: bound=1000000000.0 is 2.68e+17 grid steps of 3.73e-09; ... Raise the noise or lower the bound.
    """
    units = bound / step
    largest = parties * (math.ceil(min(units, 2.0**70)) + 2) + noise_support
    if units >= 2.0**49 or largest >= _HALF_RING:
        raise ValueError(
            f"bound={bound!r} is {units:.3g} grid steps of {step:.3g}; one vector may have 2^49 and the sum of "
            f"{parties} parties must stay below 2^63. Raise the noise or lower the bound."
        )
    return largest


def check_length(total: Vector, most: float) -> None:
    """Refuse a sum longer than what was proved possible: a mask did not cancel, or a share was falsified.

    It looks at the released sum only, so it costs no privacy.

    >>> check_length(np.array([3.0, 4.0]), most=5.0)
    >>> check_length(np.array([3.0, 4.0]), most=4.9)
    Traceback (most recent call last):
    ...
    quietgrad.secure.faults.ImpossibleSum: headroom check: the sum has length 5, the most that ... is 4.9; ...
    """
    length = float(np.linalg.norm(total))
    if not length <= most:
        raise ImpossibleSum(length, most)


def sensitivity_growth(dimension: int) -> float:
    """How many grid units rounding one party's sum can add to the L2 sensitivity: √d.

    Each rounding moves a coordinate by at most ½, and two neighbouring sums are both rounded:
    ‖round(x) − round(x′)‖ ≤ ‖x − x′‖ + √d, under either relation. Multiply by the grid's step.

    >>> sensitivity_growth(10_000)
    100.0
    """
    return math.sqrt(dimension)


def rounded_gaussian_distance(sigma: float) -> float:
    """Total variation between N_Z(0, σ²) and a rounded N(0, σ²), from above, for σ ≥ 4 grid units.

    The rounded mass of k is ∫φ over its cell = φ(k) + φ″(k)/24 + …, a relative change of (k²/σ² − 1)/24σ², so the
    distance is E|Z² − 1|/48σ² = 0.02017/σ² to leading order; 0.021 covers the rest. An integer sum plus rounded
    Gaussian noise is the rounded Gaussian mechanism: post-processing, nothing else to pay.

    >>> rounded_gaussian_distance(2.0**20) < 2e-14
    True
    """
    if sigma < 4.0:
        raise ValueError(f"sigma={sigma!r} grid units: must be ≥ 4.")
    return 0.021 / sigma**2
