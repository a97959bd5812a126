"""Discrete Gaussian noise from exact alias tables, in constant time, and vectors on a public integer grid.

N_Z(0, σ²) gives the integer k the probability ∝ exp(−k²/2σ²) (Canonne, Kamath and Steinke 2020). A table of 2^b
columns holds its masses as whole numbers that add up to 2^b·2^λ (Walker's alias method): a draw takes b + λ bits,
reads the same number of cells whatever the result, and never rejects. Wide noise is built from narrow tables: if
X₁ ~ N_Z(σ₁²), X₂ ~ N_Z(σ₂²) and σ₁ ≥ 1.75·c, then X₁ + c·X₂ is N_Z(σ₁² + c²σ₂²) up to :func:`smoothing_error`,
since

    Σ_{y ∈ cZ} ρ_{σ₁}(x − y) ρ_{cσ₂}(y) = ρ_σ(x) · Σ_{y ∈ cZ} ρ_τ(y − μ_x),   τ = cσ₁σ₂/σ,

and by Poisson summation the last sum depends on x only through terms of size exp(−2π²τ²/c²).

All that leaves a party is whole numbers mod 2^64, so low bits of floats carry nothing about the data (Mironov
2012). The grid's step is σ divided by a fixed number of units, so the noise tables are the same for every σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.federation.secure.identity import SumOutOfBoundsError

Words = npt.NDArray[np.uint64]

SMOOTHING = 1.75  # least σ₁/c for which X₁ + c·X₂ is accepted as a discrete Gaussian
_PRECISION = 256  # bits of the fixed-point arithmetic behind a table
_TAIL = 10.0  # tables reach at least this many σ: the mass beyond is below 2⁻⁷¹
_RATIO = 512  # c of every convolution of wide noise
_BASE = SMOOTHING * _RATIO  # σ₁ of every convolution of wide noise
_WIDEST = 1600.0  # σ of the widest single table: 2^15 columns


@dataclass(frozen=True)
class AliasTable:
    """2^b equally likely columns; column k gives k if a λ-bit word is below its threshold, else its alias."""

    word_bits: int
    thresholds: Words
    alias: npt.NDArray[np.int64]

    def masses(self) -> list[int]:
        """The exact mass of every value, in units of 2^−(b + λ)."""
        full = 1 << self.word_bits
        out: list[int] = self.thresholds.tolist()
        for threshold, other in zip(self.thresholds.tolist(), self.alias.tolist(), strict=True):
            out[other] += full - threshold
        return out

    def choose(self, columns: npt.NDArray[np.integer], words: Words) -> npt.NDArray[np.int64]:
        """Turn uniform columns and uniform λ-bit words into draws."""
        return np.where(words < self.thresholds[columns], columns, self.alias[columns])


def alias_table(masses: list[int], word_bits: int) -> AliasTable:
    """Build the table whose masses are exactly the given 2^b whole numbers (Vose 1991, in integers).

    >>> alias_table([5, 1, 1, 1], word_bits=1).masses()
    [5, 1, 1, 1]
    """
    full = 1 << word_bits
    if sum(masses) != full * len(masses) or len(masses) & (len(masses) - 1) or min(masses) < 0:
        raise ValueError(f"masses: must be 2^b whole numbers ≥ 0 that add up to 2^b·{full}.")
    left = list(masses)
    thresholds = [0] * len(left)  # a full column is its own alias: threshold 0 always takes the alias
    alias = list(range(len(left)))
    small = [k for k, mass in enumerate(left) if mass < full]
    large = [k for k, mass in enumerate(left) if mass > full]
    while small:
        poor, rich = small.pop(), large[-1]
        thresholds[poor], alias[poor] = left[poor], rich
        left[rich] -= full - left[poor]
        if left[rich] <= full:
            large.pop()
            if left[rich] < full:
                small.append(rich)
    return AliasTable(word_bits, np.array(thresholds, np.uint64), np.array(alias, np.int64))


def gaussian_masses(sigma: float, top: int, total: int, *, magnitudes: bool = False) -> list[int]:
    """Whole-number masses of N_Z(0, σ²) cut at ±top, adding up to ``total``.

    Every mass is rounded down and the remainder, at most one unit per value, goes to 0, so the total variation
    to the cut Gaussian is at most (number of values)/total. ρ(k+1)/ρ(k) = exp(−(2k+1)/2σ²) makes each weight
    one multiplication of 256-bit fixed-point numbers. ``magnitudes`` gives the masses of |X| for 0…top.

    >>> gaussian_masses(0.8, 2, 1000)
    [21, 228, 502, 228, 21]
    >>> gaussian_masses(0.8, 2, 1000, magnitudes=True)
    [500, 457, 43]
    """
    one = 1 << _PRECISION
    with localcontext() as context:
        context.prec = 100
        variance = Decimal(sigma) ** 2
        ratio = int((Decimal(-1) / (2 * variance)).exp() * one)
    square = ratio * ratio >> _PRECISION
    weights = [one]
    for _ in range(top):
        weights.append(weights[-1] * ratio >> _PRECISION)
        ratio = ratio * square >> _PRECISION
    both_signs = [one, *(2 * weight for weight in weights[1:])]
    weights = both_signs if magnitudes else [*weights[:0:-1], *weights]
    norm = sum(weights)
    masses = [weight * total // norm for weight in weights]
    masses[0 if magnitudes else top] += total - sum(masses)
    return masses


def smoothing_error(sigma_1: float, c: int, sigma_2: float) -> float:
    """Total variation between X₁ + c·X₂ and N_Z(0, σ₁² + c²σ₂²), from above.

    With ρ = τ/c = σ₁σ₂/√(σ₁² + c²σ₂²) and θ = 2Σ_k exp(−2π²k²ρ²) the ratio of the two mass functions lies in
    [(1−θ)/(1+θ), (1+θ)/(1−θ)], so their distance is below 2θ. ``c = 1`` is the sum of two shares.

    >>> smoothing_error(1.75 * 16, 16, 8.0) < 2**-80
    True
    >>> smoothing_error(0.5 * 16, 16, 8.0) > 1e-3
    True
    """
    spread = (sigma_1 * sigma_2) ** 2 / (sigma_1**2 + (c * sigma_2) ** 2)
    terms = (math.exp(-2.0 * (math.pi * k) ** 2 * spread) for k in range(1, 50))
    theta = 2.0 * math.fsum(terms)
    return min(1.0, 2.0 * theta)


@dataclass(frozen=True)
class DiscreteGaussian:
    """The discrete Gaussian N_Z(0, σ²) for any σ > 0 in grid units, as tables joined by X₁ + c·X₂ with c = 512.

    ``support`` bounds every draw, ``total_variation`` bounds the distance of one draw from the ideal
    distribution: cut tails, masses rounded to 2⁻⁶⁴ of a column, and the joints.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> noise = DiscreteGaussian(2.0**20)
    >>> x = noise.sample(SecureStream(seed_key(0), "noise"), 0, 10_000)
    >>> bool(abs(x.std() / 2**20 - 1) < 0.05), noise.total_variation < 1e-15
    (True, True)
    """

    sigma: float
    parts: tuple[tuple[int, AliasTable], ...] = field(init=False, repr=False, compare=False)
    total_variation: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.sigma < 2.0**60:
            raise ValueError(f"sigma={self.sigma!r}: must be > 0 and < 2^60 grid units.")
        parts, scale, sigma, distance = [], 1, self.sigma, 0.0
        while sigma > _WIDEST:
            rest = math.sqrt((sigma / _RATIO) ** 2 - SMOOTHING**2)
            distance += smoothing_error(_BASE, _RATIO, rest) + _table_error(_BASE)
            parts.append((scale, _signed_table(_BASE)))
            scale, sigma = scale * _RATIO, rest
        parts.append((scale, _signed_table(sigma)))
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "total_variation", distance + _table_error(sigma))

    @property
    def support(self) -> int:
        return sum(scale * (table.alias.size // 2 - 1) for scale, table in self.parts)

    def sample(self, stream: SecureStream, block: int, size: int) -> npt.NDArray[np.int64]:
        """Draw ``size`` numbers from one block of a stream; a block must serve one draw only."""
        quarter = (size + 3) // 4  # four 16-bit columns in a word
        words = stream.uint64(block, len(self.parts) * (size + quarter)).reshape(len(self.parts), -1)
        out = np.zeros(size, np.int64)
        for row, (scale, table) in zip(words, self.parts, strict=True):
            columns = row[size:].view(np.uint16)[:size] & np.uint16(table.alias.size - 1)
            out += scale * (table.choose(columns, row[:size]) - (table.alias.size // 2 - 1))
        return out

    def add_to(self, out: npt.NDArray[np.uint32], stream: SecureStream, block: int) -> None:
        """out += as many draws of one block of a stream, mod 2^32: those of :meth:`sample`."""
        from quietgrad.core.compiled import add_alias_draws  # imports numba

        size = len(out)
        quarter = (size + 3) // 4
        words = stream.uint64(block, len(self.parts) * (size + quarter)).reshape(len(self.parts), -1)
        for row, (scale, table) in zip(words, self.parts, strict=True):
            columns = row[size:].view(np.uint16)[:size]
            middle = table.alias.size // 2 - 1
            add_alias_draws(columns, row[:size], table.thresholds, table.alias, scale, middle, out)


@lru_cache(maxsize=64)
def discrete_gaussian(sigma: float) -> DiscreteGaussian:
    """The sampler for σ, built once per process (tens of milliseconds)."""
    return DiscreteGaussian(sigma)


@lru_cache(maxsize=64)
def _signed_table(sigma: float) -> AliasTable:
    # Column k stands for the integer k − top; one column is left over and gets no mass.
    column_bits = max(2, math.ceil(math.log2(2.0 * (math.ceil(_TAIL * sigma) + 1))))
    top = (1 << (column_bits - 1)) - 1
    masses = gaussian_masses(sigma, top, 1 << (column_bits + 64))
    return alias_table([*masses, 0], 64)


def _table_error(sigma: float) -> float:
    # P(|X| > 10σ) ≤ 2exp(−50) by the sub-Gaussian tail, and one unit of 2^−(b+64) for each of 2^b values.
    return 2.0 * math.exp(-(_TAIL**2) / 2.0) + 2.0**-64


Vector = npt.NDArray[np.float64]


def encode(vector: npt.ArrayLike, *, dimension: int, bound: float, step: float) -> Words:
    """Clip to the L2 ball of radius ``bound``, round to the grid, and return words mod 2^64.

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


def decode(words: Words | npt.NDArray[np.uint32], step: float) -> Vector:
    """Read a sum mod 2^b back as numbers; exact as long as :func:`require_headroom` held."""
    # The signed view is two's complement: a word of 2^(b−1) or more is a negative number.
    numbers = words.view(f"i{words.itemsize}").astype(np.float64)
    numbers *= step
    return numbers


def require_headroom(*, parties: int, bound: float, step: float, noise_support: int, bits: int = 64) -> int:
    """Prove that no sum can wrap around, or refuse; return the largest magnitude that can occur.

    A coordinate of one clipped vector is at most bound/step + ½ grid units after rounding; one more unit
    covers the rounding of the floating-point division and norm (relative 2⁻⁵⁰ of less than 2⁴⁹ units, checked).
    The noise tables have finite support. So |sum| ≤ m(bound/step + 2) + noise support, which must be below half of
    the ring, 2^(bits − 1).
    """
    units = bound / step
    largest = parties * (math.ceil(min(units, 2.0**70)) + 2) + noise_support
    if units >= 2.0**49 or largest >= 1 << (bits - 1):
        raise ValueError(
            f"bound={bound!r} is {units:.3g} grid steps: one vector may have 2^49, and {parties} together "
            f"2^{bits - 1}. "
            "Raise the noise or lower the bound."
        )
    return largest


def check_length(total: Vector, most: float) -> None:
    """Refuse a sum longer than what was proved possible: a mask did not cancel, or a share was falsified.

    It looks at the released sum only, so it costs no privacy.
    """
    length = float(np.linalg.norm(total))
    if not length <= most:
        raise SumOutOfBoundsError(length, most)


def sensitivity_growth(dimension: int) -> float:
    """How many grid units rounding one party's sum can add to the L2 sensitivity: √d.

    Each rounding moves a coordinate by at most ½, and two neighbouring sums are both rounded:
    ‖round(x) − round(x′)‖ ≤ ‖x − x′‖ + √d, under either relation. Multiply by the grid's step.
    """
    return math.sqrt(dimension)


def rounded_gaussian_distance(sigma: float) -> float:
    """Total variation between N_Z(0, σ²) and a rounded N(0, σ²), from above, for σ ≥ 4 grid units.

    The rounded mass of k is ∫φ over its cell = φ(k) + φ″(k)/24 + …, a relative change of (k²/σ² − 1)/24σ², so the
    distance is E|Z² − 1|/48σ² = 0.02017/σ² to leading order; 0.021 covers the rest. An integer sum plus rounded
    Gaussian noise is the rounded Gaussian mechanism: post-processing, nothing else to pay.
    """
    if sigma < 4.0:
        raise ValueError(f"sigma={sigma!r} grid units: must be ≥ 4.")
    return 0.021 / sigma**2
