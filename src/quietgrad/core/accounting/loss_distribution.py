"""Privacy loss distributions (PLDs): dominating pairs of single releases, and how a pair is rounded to a grid.

Rounding *connects the dots* (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022): the mass of the losses between
two grid points is split between them so that both P and Q keep theirs. The rounded pair dominates the exact one, so
every ε read off a grid is an upper bound at any step.

A dominating pair of a release is two distributions at least as far apart as its outputs on any neighbouring data.
A pair (P, Q) is described by the tails of its privacy loss L = log dP/dQ: P{L > ε} and Q{L > ε} for ε ≥ 0 tell all
about its positive losses, the same tails of the reversed pair all about its negative ones. Tails, unlike profiles,
keep full relative precision, and the difference of two of them is the mass of an interval.

Fixed-size batches under replace-one (proof: ``docs/accounting-proof.md``). Condition on whether the record is
drawn: M(D) = (1−q)A + qB and M(D') = (1−q)A + qB', q = batch/n. For α = e^ε ≥ 1 advanced joint convexity (Balle,
Barthe, Gaboardi 2018) bounds H_α(M(D) ‖ M(D')) by q·δ₀(log(1 + (α−1)/q)), δ₀ the un-sampled profile, because
batches with and without the record couple into neighbours. For α < 1 the mirrored bound holds. Together they are
the profile of one pair, which covers both orders: its positive losses are those of ((1−q)Q₀ + qP₀, Q₀), its
negative ones their mirror image, and what is left of the mass sits at loss 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

Array = npt.NDArray[np.float64]


class DominatingPair(ABC):
    """Two distributions P, Q by their privacy loss L = log dP/dQ."""

    symmetric: ClassVar[bool] = False
    """Whether the reversed pair has the same loss."""

    @abstractmethod
    def reach_above(self, tail: float) -> float:
        """A loss with P{L > loss} ≤ tail."""

    @abstractmethod
    def reach_below(self, tail: float) -> float:
        """A loss with Q{L < −loss} ≤ tail."""

    @abstractmethod
    def on_grid(self, step: float, tail: float) -> DiscretizedPLD:
        """The losses of a pair that dominates this one, tails of at most ``tail`` cut."""


class TailPair(DominatingPair):
    """A pair by the tails of its loss; it is rounded to a grid by connecting the dots."""

    @abstractmethod
    def above(self, loss: Array) -> tuple[Array, Array]:
        """(P{L > ℓ}, Q{L > ℓ}) at ℓ ≥ 0."""

    @abstractmethod
    def below(self, loss: Array) -> tuple[Array, Array]:
        """(Q{L < −ℓ}, P{L < −ℓ}) at ℓ ≥ 0: ``above`` of the reversed pair."""

    def on_grid(self, step: float, tail: float) -> DiscretizedPLD:
        up, infinite, p_up = _half(*self.above(_points(self.reach_above(tail), step)), step)
        if self.symmetric:
            down, infinite_reversed = up, infinite
            p_down = float(self.above(np.zeros(1))[1][0])
        else:
            p_tail, q_tail = self.below(_points(self.reach_below(tail), step))
            down, infinite_reversed, _ = _half(p_tail, q_tail, step)
            p_down = float(q_tail[0])
        # ``down`` holds Q-masses at −ℓ; P's are e^{−ℓ} times those. What neither half holds lies at loss 0.
        mirrored = down * np.exp(-step * np.arange(down.size))
        centre = up[0] + down[0] + max(0.0, 1.0 - p_up - p_down)
        mass = np.concatenate((mirrored[:0:-1], [centre], up[1:]))
        return DiscretizedPLD(step, -(down.size - 1), mass, infinite, infinite_reversed)


class _Symmetric(TailPair):
    """A pair whose reversal has the same loss: only positive losses need describing."""

    symmetric: ClassVar[bool] = True

    def below(self, loss: Array) -> tuple[Array, Array]:
        return self.above(loss)

    def reach_below(self, tail: float) -> float:
        return self.reach_above(tail)


@dataclass(frozen=True)
class GaussianPair(_Symmetric):
    """N(μ, 1) against N(0, 1)."""

    mu: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        return ndtr(self.mu / 2 - loss / self.mu), ndtr(-self.mu / 2 - loss / self.mu)

    def reach_above(self, tail: float) -> float:
        return max(0.0, self.mu * (self.mu / 2 - float(ndtri(tail))))


@dataclass(frozen=True)
class PurePair(_Symmetric):
    """Randomised response, which dominates every ε-DP release: the loss is ε or −ε."""

    epsilon: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        odds = math.exp(-self.epsilon)
        inside = loss < self.epsilon
        return np.where(inside, 1 / (1 + odds), 0.0), np.where(inside, odds / (1 + odds), 0.0)

    def reach_above(self, tail: float) -> float:
        return self.epsilon


@dataclass(frozen=True)
class _SampledPair(TailPair):
    """A pair whose positive losses are those of ((1−q)Q₀ + qP₀, Q₀)."""

    base: _Symmetric
    rate: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        # log(1 + (e^ℓ − 1)/q) is the un-sampled loss that sampling at rate q turns into ℓ ≥ 0.
        rate, small, large = self.rate, np.minimum(loss, 1.0), np.maximum(loss, 1.0)
        near = np.log1p(np.expm1(small) / rate)
        far = large + np.log1p(-(1.0 - rate) * np.exp(-large)) - math.log(rate)
        p, q = self.base.above(np.where(loss < 1.0, near, far))
        return (1.0 - rate) * q + rate * p, q

    def reach_above(self, tail: float) -> float:
        return float(np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + self.base.reach_above(tail)))


class FixedSizePair(_SampledPair, _Symmetric):
    """Fixed-size batches under replace-one: see the proof at the top of this module."""


class PoissonPair(_SampledPair):
    """Poisson sampling under add-remove: (1−q)Q₀ + qP₀ against Q₀, the record present against absent.

    The reversed pair is the other order of the same neighbours; both must be composed and the worse one reported.
    """

    def below(self, loss: Array) -> tuple[Array, Array]:
        shrink = np.expm1(-loss) / self.rate  # e^{−ℓ₀} − 1 of the un-sampled loss −ℓ₀; below −1 there is none
        inside = shrink > -1.0
        q, p = self.base.above(-np.log1p(np.where(inside, shrink, 0.0)))
        return np.where(inside, q, 0.0), np.where(inside, (1.0 - self.rate) * q + self.rate * p, 0.0)

    def reach_below(self, tail: float) -> float:
        return -math.log1p(self.rate * math.expm1(-self.base.reach_above(tail)))


@dataclass(frozen=True)
class PoissonReplacePair(_Symmetric):
    """Poisson-sampled Gaussian under replace-one: (1−q)N(0,1) + qN(μ/2,1) against (1−q)N(0,1) + qN(−μ/2,1).

    The record, when drawn, moves the sum by C to one side or the other (Lebeda, Regehr, Kamath, Steinke 2024).
    The loss increases in t with ℓ = log[(1−q) + qc e^{mt}] − log[(1−q) + qc e^{−mt}], m = μ/2, c = e^{−m²/2};
    solving a quadratic in e^{mt} gives m t = ℓ/2 + asinh((1−q) sinh(ℓ/2)/(qc)).
    """

    mu: float
    rate: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        m = self.mu / 2
        half = loss / 2
        # log w with sinh(x) = e^x (1 − e^{−2x})/2, because w itself overflows for little noise
        with np.errstate(divide="ignore"):
            log_w = half + np.log(-np.expm1(-loss) / 2) + math.log1p(-self.rate) - math.log(self.rate) + m * m / 2
        t = (half + np.logaddexp(log_w, 0.5 * np.logaddexp(0.0, 2 * log_w))) / m
        still = (1.0 - self.rate) * ndtr(-t)
        return still + self.rate * ndtr(m - t), still + self.rate * ndtr(-m - t)

    def reach_above(self, tail: float) -> float:
        m = self.mu / 2
        t = m - float(ndtri(tail))
        stay, move = math.log1p(-self.rate), math.log(self.rate) - m * m / 2
        return max(0.0, float(np.logaddexp(stay, move + m * t) - np.logaddexp(stay, move - m * t)))


LARGEST_LOSS = 600.0  # beyond it e^ℓ leaves the range of doubles; such losses count as infinite


@dataclass(frozen=True)
class DiscretizedPLD:
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

    def reversed(self) -> DiscretizedPLD:
        """The pair (Q, P): Q-mass at loss −ℓ is e^{−ℓ} times the P-mass at ℓ."""
        mass = (self.mass * np.exp(-self.losses))[::-1]
        first = -(self.first + self.mass.size - 1)
        return DiscretizedPLD(self.step, first, mass, self.infinite_reversed, self.infinite)

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
