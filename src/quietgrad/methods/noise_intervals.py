"""Intervals for numbers of this table, from noisy sums whose law of noise is known.

A release is a table's number plus noise of a public law, so an interval needs no asymptotics. For a ratio of two
sums it is Fieller's: all values that a test does not reject. The intervals cover the number of these records; what
a new sample of people would give is another question.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_GRID = 201
_HALVINGS = 40
_DRAWS = 20_000


@dataclass(frozen=True)
class NoiseLaw:
    """The law of the noise of a release: Gaussian of deviation ``scale``, or K-norm noise in blocks of ``width``.

    >>> round(NoiseLaw(2.0).half_width(1.0), 2), round(NoiseLaw(2.0, 1).half_width(1.0), 2)  # 1.96·2 and ln(20)·2
    (3.92, 5.99)
    """

    scale: float
    width: int | None = None

    def half_width(self, first: float, second: float = 0.0, miss: float = 0.05) -> float:
        """Return the bound that |a·e₁ + b·e₂| exceeds with probability ``miss``.

        e₁ and e₂ are the noise of two numbers of one block.
        """
        high, low = max(abs(first), abs(second)), min(abs(first), abs(second))
        if high == 0.0:
            return 0.0
        if self.width is None:
            return self.scale * math.hypot(first, second) * _normal_quantile(miss)
        if self.width == 1 and low:
            raise ValueError("two numbers of one block: blocks have one number each.")
        return self.scale * high * _cube_quantile(self.width, low / high, miss)

    def edge_widths(self, bins: int, share: float, miss: float = 0.05) -> Floats:
        """Return by edge the error that a test of :func:`quantile_interval` exceeds with probability ``miss``."""
        return self.scale * _edge_widths(self.width is None, bins, share, miss)

    def share_widths(self, levels: int, miss: float = 0.05) -> Floats:
        """Return such errors of cᵢ − p·Σc over the counts of ``levels`` cells, at equally spaced p from 0 to 1."""
        return self.scale * _share_widths(self.width is None, levels, miss)


@lru_cache
def _edge_widths(gaussian: bool, bins: int, share: float, miss: float) -> Floats:
    return _widths(gaussian, np.tri(bins, bins)[:-1] - share, miss)


@lru_cache
def _share_widths(gaussian: bool, levels: int, miss: float) -> Floats:
    return _widths(gaussian, np.array([[1.0 - p, *[-p] * (levels - 1)] for p in np.linspace(0, 1, 21)]), miss)


def _widths(gaussian: bool, weights: Floats, miss: float) -> Floats:
    """Return by row of ``weights`` what |Σ wᵢ·eᵢ| exceeds with probability ``miss``, for noise of scale 1."""
    if gaussian:
        return np.asarray(np.sqrt((weights**2).sum(axis=1)) * _normal_quantile(miss))
    drawn = np.abs(weights @ _laplace_draws(weights.shape[1]))
    # The quantile of draws is off by a few in a hundred of ``miss``; one further out is safe.
    return np.asarray(np.quantile(drawn, 1.0 - 0.94 * miss, axis=1, method="higher"))


@lru_cache
def _normal_quantile(miss: float) -> float:
    from scipy.special import ndtri

    return -float(ndtri(miss / 2.0))


@lru_cache(maxsize=4)
def _laplace_draws(count: int) -> Floats:
    """Laplace numbers of scale 1, the same for all: they are no one's noise."""
    return np.random.default_rng(0).laplace(size=(count, _DRAWS))


@lru_cache(maxsize=4096)
def _cube_quantile(width: int, m: float, miss: float) -> float:
    """t with P(|r(u₁ − m·u₂)| > t) = miss, r ~ Gamma(width + 1), u uniform in [−1, 1], 0 ≤ m ≤ 1."""
    from scipy.special import gammaincinv

    radius = gammaincinv(width + 1.0, (np.arange(4000) + 0.5) / 4000)

    def beyond(t: float) -> float:
        x = t / radius
        tail = np.clip(1.0 + m - x, 0.0, None) ** 2 / (4.0 * m) if m > 1e-9 else np.clip(1.0 - x, 0.0, None)
        return float(np.where(x <= 1.0 - m, 1.0 - x, tail).mean())

    low, high = 0.0, float(radius[-1]) * (1.0 + m)
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if beyond(middle) > miss else (low, middle)
    return high


def ratio_interval(
    above: float, below: float, widths: Floats, low: float = -1.0, high: float = 1.0
) -> tuple[float, float]:
    """All m in [low, high] with |above − m·below| ≤ h(m), and whatever lies between them.

    ``widths`` are h at equally spaced m. Where nothing is accepted, the end that is nearest.
    """
    places = np.linspace(low, high, len(widths))
    grid = np.linspace(low, high, _GRID)

    def misfit(m: Floats | float) -> Floats:
        return np.abs(above - np.asarray(m) * below) - np.interp(m, places, widths)

    guess = min(max(above / below, low), high) if below else low
    accepted = grid[misfit(grid) <= 0.0].tolist()
    if misfit(guess) <= 0.0:
        accepted.append(guess)
    if not accepted:
        return guess, guess
    step = (high - low) / (_GRID - 1)
    ends = []
    for end, side in ((min(accepted), -1.0), (max(accepted), 1.0)):
        inside, outside = end, min(max(end + side * step, low), high)
        if misfit(outside) <= 0.0:
            inside = outside
        for _ in range(_HALVINGS):
            middle = (inside + outside) / 2.0
            inside, outside = (middle, outside) if misfit(middle) <= 0.0 else (inside, middle)
        ends.append(outside)
    return float(ends[0]), float(ends[1])


def quantile_interval(counts: Floats, edges: Floats, share: float, widths: Floats) -> tuple[float, float]:
    """Where the ``share``-quantile of binned records lies: the bins that two tests do not reject, together.

    The quantile is in bin j if fewer than ``share`` of the records lie below its lower edge and at least ``share``
    below its upper one. Each is a sum of the counts with weights 1 − share and −share. Its noise exceeds ``widths``
    (:meth:`NoiseLaw.edge_widths`, of the inner edges) on one side with probability 2.5 %, so both tests of the true
    bin pass but for 5 %.
    """
    total = counts.sum()
    signs = np.cumsum(counts)[:-1] - share * total  # at the inner edges; < 0 left of the quantile
    may_be_above = np.concatenate([[True], signs <= widths])  # bin j: its lower edge may be left of the quantile
    may_be_below = np.concatenate([signs >= -widths, [True]])
    bins = np.flatnonzero(may_be_above & may_be_below)
    if not len(bins):
        return float(edges[0]), float(edges[-1])
    return float(edges[bins[0]]), float(edges[bins[-1] + 1])
