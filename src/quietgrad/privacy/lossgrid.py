"""Privacy losses on a grid: rounding a dominating pair to it, and reading ε and δ off it.

Rounding *connects the dots* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): the mass of the losses between
two grid points is split between them so that both P and Q keep theirs. The rounded pair dominates the exact one, so
every ε read off a grid is an upper bound at any step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quietgrad.privacy.pairs import Array, Pair

LARGEST_LOSS = 600.0  # beyond it e^ℓ leaves the range of doubles; such losses count as infinite


@dataclass(frozen=True)
class LossGrid:
    """A discrete pair: P-mass at losses h·(first + i), and the masses P and Q put where the other has none."""

    step: float
    first: int
    mass: Array
    infinite: float
    infinite_reversed: float = 0.0

    @property
    def losses(self) -> Array:
        """The grid's losses."""
        losses: Array = self.step * np.arange(self.first, self.first + self.mass.size, dtype=np.float64)
        return losses

    @property
    def variance(self) -> float:
        """Variance of the finite losses under P."""
        mean = float(np.dot(self.mass, self.losses))
        return float(np.dot(self.mass, (self.losses - mean) ** 2))

    def reversed(self) -> LossGrid:
        """The pair (Q, P): Q-mass at loss −ℓ is e^{−ℓ} times the P-mass at ℓ."""
        mass = (self.mass * np.exp(-self.losses))[::-1]
        first = -(self.first + self.mass.size - 1)
        return LossGrid(self.step, first, mass, self.infinite_reversed, self.infinite)

    def tilted(self, order: float) -> tuple[Array, float]:
        """The finite losses' masses times e^{order·ℓ}, scaled to add up to 1, and log of what they added up to."""
        if order == 0.0:
            return self.mass, 0.0
        weights, shift = self._weights(order)
        total = float(weights.sum())
        return weights / total, shift + math.log(total)

    def log_moment(self, order: float) -> float:
        """log E_P[e^{order·L}] over the finite losses."""
        weights, shift = self._weights(order)
        return shift + math.log(float(weights.sum()))

    def _weights(self, order: float) -> tuple[Array, float]:
        exponents = order * self.losses
        # Losses without mass may lie far out. Moved only where e^x would overflow, because moving costs precision.
        if (shift := max(0.0, float(exponents[0]), float(exponents[-1])) - LARGEST_LOSS) > 0.0:
            shift = max(0.0, float(exponents.max(where=self.mass > 0.0, initial=-np.inf)) - LARGEST_LOSS)
            exponents = np.minimum(exponents - shift, LARGEST_LOSS)
        weights: Array = np.exp(exponents, out=exponents)
        weights *= self.mass
        return weights, max(0.0, shift)

    def delta(self, epsilon: float) -> float:
        """Infinite mass plus the sum over losses ℓ > ε of (1 − e^{ε−ℓ}) × mass."""
        start = max(0, math.floor(epsilon / self.step) + 1 - self.first)
        gaps = epsilon - self.losses[start:]
        return min(1.0, self.infinite - float(np.dot(self.mass[start:], np.expm1(np.minimum(gaps, 0.0)))))

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``; infinite when the infinite mass alone exceeds it."""
        if self.infinite >= delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        zero = max(0, -self.first)
        mass = self.mass[zero:]
        above = self.infinite + np.cumsum(mass[::-1])[::-1]
        decay = np.exp(-self.step * np.arange(mass.size))
        # δ exceeds ``delta`` at the loss of index low (or low = −1), and not at that of index high.
        low, high = -1, mass.size - 1
        while high - low > 1:
            middle = (low + high) // 2
            if above[middle] - np.dot(mass[middle:], decay[: mass.size - middle]) > delta:
                low = middle
            else:
                high = middle
        # Up to the loss of index high, δ(ε) = above − e^{ε − ℓ_high} Σ_{j ≥ high} mass_j e^{ℓ_high − ℓ_j}.
        seen = float(np.dot(mass[high:], decay[: mass.size - high]))
        return self.step * (self.first + zero + high) + math.log((float(above[high]) - delta) / seen)


def discretise(pair: Pair, step: float, tail: float) -> LossGrid:
    """Round ``pair`` to the grid by connecting the dots, cutting tails of at most ``tail``.

    >>> from quietgrad.privacy.pairs import GaussianPair
    >>> grid = discretise(GaussianPair(1.0), 1e-2, 1e-12)
    >>> abs(float(grid.mass.sum()) + grid.infinite - 1.0) < 1e-14
    True
    """
    up, infinite, p_up = _half(*pair.above(_points(pair.reach_above(tail), step)), step)
    if pair.symmetric:
        down, infinite_reversed = up, infinite
        p_down = float(pair.above(np.zeros(1))[1][0])
    else:
        p_tail, q_tail = pair.below(_points(pair.reach_below(tail), step))
        down, infinite_reversed, _ = _half(p_tail, q_tail, step)
        p_down = float(q_tail[0])
    # ``down`` holds Q-masses at −ℓ; P's are e^{−ℓ} times those. What neither half holds lies at loss 0.
    mirrored = down * np.exp(-step * np.arange(down.size))
    centre = up[0] + down[0] + max(0.0, 1.0 - p_up - p_down)
    mass = np.concatenate((mirrored[:0:-1], [centre], up[1:]))
    return LossGrid(step, -(down.size - 1), mass, infinite, infinite_reversed)


def _points(reach: float, step: float) -> Array:
    points: Array = step * np.arange(max(1, math.ceil(min(reach, LARGEST_LOSS) / step)) + 1, dtype=np.float64)
    return points


def _half(p_tail: Array, q_tail: Array, step: float) -> tuple[Array, float, float]:
    """Masses at 0, h, 2h, … of the positive losses, the infinite mass, and P{L > 0}."""
    points = step * np.arange(p_tail.size)
    p = np.maximum(-np.diff(p_tail), 0.0)
    q = np.maximum(-np.diff(q_tail), 0.0)
    right = np.clip((p - np.exp(points[:-1]) * q) / -math.expm1(-step), 0.0, p)
    mass = np.zeros(p_tail.size)
    mass[:-1] = p - right
    mass[1:] += right
    last = min(float(p_tail[-1]), float(q_tail[-1]) * math.exp(points[-1]))
    mass[-1] += last
    return mass, float(p_tail[-1]) - last, float(p_tail[0])
