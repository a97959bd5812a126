"""Dominating pairs: for each single release, two distributions at least as far apart as any neighbours' outputs.

A pair (P, Q) is described by the tails of its privacy loss L = log dP/dQ: P{L > ε} and Q{L > ε} for ε ≥ 0 tell all
about its positive losses, the same tails of the reversed pair all about its negative ones. Tails, unlike profiles,
keep full relative precision, and the difference of two of them is the mass of an interval.

Fixed-size batches under replace-one
------------------------------------
Let D, D' differ in one record (x against x'), q = batch/n, and let the un-sampled release have profile
δ₀(ε) under replace-one. Condition on whether the record is drawn: M(D) = (1−q)A + qB and M(D') = (1−q)A + qB',
where A, B, B' are mixtures over batches without the record, with x, and with x'.

For α = e^ε ≥ 1 put α' = 1 + (α−1)/q and β = α/α' ≤ 1. Advanced joint convexity (Balle, Barthe, Gaboardi 2018)
says H_α(M(D) ‖ M(D')) = q H_α'(B ‖ (1−β)A + βB'), and H is convex in its second argument, so it is at most
q[(1−β) H_α'(B ‖ A) + β H_α'(B ‖ B')]. A batch with x becomes a batch without it by replacing that one record, and
every batch of A is reached equally often, so B and A couple into pairs of neighbouring batches; B and B' do so
plainly. Hence H_α(M(D) ‖ M(D')) ≤ q δ₀(log α'), which is the profile of the pair ((1−q)Q₀ + qP₀, Q₀) for α ≥ 1.
For α < 1 use H_α(P ‖ Q) = 1 − α + α H_{1/α}(Q ‖ P) and the same bound with D and D' exchanged.

Together they bound every neighbouring pair in both orders by one function of α. It is convex, decreasing, 1 at 0
and at least (1−α)₊, so it is itself the profile of some pair, and adaptive composition of mechanisms dominated by
that pair is dominated by its product (Zhu, Dong, Wang 2022). In tails: the positive losses are those of
((1−q)Q₀ + qP₀, Q₀), the negative ones their mirror image, and what is left of the mass sits at loss 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

Array = npt.NDArray[np.float64]


class Pair(Protocol):
    """Two distributions by the tails of their privacy loss."""

    @property
    def symmetric(self) -> bool:
        """Whether the reversed pair has the same loss."""
        ...

    def above(self, loss: Array) -> tuple[Array, Array]:
        """(P{L > ℓ}, Q{L > ℓ}) at ℓ ≥ 0."""
        ...

    def below(self, loss: Array) -> tuple[Array, Array]:
        """(Q{L < −ℓ}, P{L < −ℓ}) at ℓ ≥ 0: ``above`` of the reversed pair."""
        ...

    def reach_above(self, tail: float) -> float:
        """A loss with P{L > loss} ≤ tail."""
        ...

    def reach_below(self, tail: float) -> float:
        """A loss with Q{L < −loss} ≤ tail."""
        ...


class _Symmetric:
    """A pair whose reversal has the same loss: only positive losses need describing."""

    @property
    def symmetric(self) -> bool:
        return True

    def above(self, loss: Array) -> tuple[Array, Array]:
        raise NotImplementedError

    def below(self, loss: Array) -> tuple[Array, Array]:
        return self.above(loss)

    def reach_above(self, tail: float) -> float:
        raise NotImplementedError

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
class LaplacePair(_Symmetric):
    """Laplace(1, 1/ε) against Laplace(0, 1/ε): losses between −ε and ε with atoms at both ends."""

    epsilon: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        inside = loss < self.epsilon
        p = np.where(inside, 1.0 - 0.5 * np.exp((np.minimum(loss, self.epsilon) - self.epsilon) / 2), 0.0)
        return p, np.where(inside, 0.5 * np.exp(-(loss + self.epsilon) / 2), 0.0)

    def reach_above(self, tail: float) -> float:
        return self.epsilon


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


def _amplified(loss: Array, rate: float) -> Array:
    """log(1 + (e^ℓ − 1)/q): the un-sampled loss that sampling at rate q turns into ℓ ≥ 0."""
    small = np.minimum(loss, 1.0)
    large = np.maximum(loss, 1.0)
    return np.where(
        loss < 1.0,
        np.log1p(np.expm1(small) / rate),
        large + np.log1p(-(1.0 - rate) * np.exp(-large)) - math.log(rate),
    )


def _sampled_above(base: _Symmetric, rate: float, loss: Array) -> tuple[Array, Array]:
    """Tails of ((1−q)Q₀ + qP₀, Q₀) at ℓ ≥ 0."""
    p, q = base.above(_amplified(loss, rate))
    return (1.0 - rate) * q + rate * p, q


def _sampled_reach(base: _Symmetric, rate: float, tail: float) -> float:
    return float(np.logaddexp(math.log1p(-rate), math.log(rate) + base.reach_above(tail)))


@dataclass(frozen=True)
class FixedSizePair(_Symmetric):
    """Fixed-size batches under replace-one: see the proof at the top of this module."""

    base: _Symmetric
    rate: float

    def above(self, loss: Array) -> tuple[Array, Array]:
        return _sampled_above(self.base, self.rate, loss)

    def reach_above(self, tail: float) -> float:
        return _sampled_reach(self.base, self.rate, tail)


@dataclass(frozen=True)
class PoissonPair:
    """Poisson sampling under add-remove: (1−q)Q₀ + qP₀ against Q₀, the record present against absent.

    The reversed pair is the other order of the same neighbours; both must be composed and the worse one reported.
    """

    base: _Symmetric
    rate: float

    @property
    def symmetric(self) -> bool:
        return False

    def above(self, loss: Array) -> tuple[Array, Array]:
        return _sampled_above(self.base, self.rate, loss)

    def below(self, loss: Array) -> tuple[Array, Array]:
        shrink = np.expm1(-loss) / self.rate  # e^{−ℓ₀} − 1 of the un-sampled loss −ℓ₀; below −1 there is none
        inside = shrink > -1.0
        q, p = self.base.above(-np.log1p(np.where(inside, shrink, 0.0)))
        return np.where(inside, q, 0.0), np.where(inside, (1.0 - self.rate) * q + self.rate * p, 0.0)

    def reach_above(self, tail: float) -> float:
        return _sampled_reach(self.base, self.rate, tail)

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
