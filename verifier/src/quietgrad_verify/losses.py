"""Privacy losses of single releases, by curves of our own or by dp-accounting, composed by dp-accounting.

A *curve* is δ(ε) = H_{e^ε}(P‖Q) of a dominating pair, for every real ε. A bound of a curve becomes a distribution
of losses by connecting its dots (Doroshenko et al. 2022), which can only raise δ. With e^{-ε}-reversal, δ_{Q‖P}(ε)
= 1 − e^ε + e^ε·δ_{P‖Q}(−ε), one curve gives both orders of the neighbours.

*Samples.* With the record in the sample with probability q, P = (1−q)Q + qP′, and H_{e^ε}(P‖Q) = q·H_{α}(P′‖Q) with
α = 1 + (e^ε − 1)/q, where α > 0 (Balle, Barthe, Gaboardi 2018); below, 1 − e^ε. For fixed-size batches under
replace-one, advanced joint convexity bounds either order by that curve for ε ≥ 0, and by its reversal for ε < 0.

*Random allocation.* P/Q = S = (Y₁ + … + Y_T)/T under Q, Y = e^{μG − μ²/2}, so δ_{P‖Q}(ε) = E(S − e^ε)₊ and
δ_{Q‖P}(ε) = E(1 − e^ε S)₊: both convex in S. Each Y is moved to the two neighbours on an even grid that keep its
mean, which makes S larger in convex order, and so both curves. Added to them, with their proofs in
:func:`_allocated`, are what is cut off above the grid, what a cyclic transform carries around, and the rounding of
the transforms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, ndtri

from quietgrad_verify._version import VERSION
from quietgrad_verify.events import Allocated, Gaussian, NoRule, Pure, Release, Sampled

Floats = npt.NDArray[np.float64]
Curve = Callable[[Floats], Floats]

OURS = f"quietgrad-verify {VERSION}"
THEIRS = f"dp-accounting {version('dp-accounting')}"
_POINTS = 1 << 21
_MOST_CELLS = 1 << 23
_UNIT = 2.0**-53
_BY_THEM, _BY_US = frozenset((THEIRS,)), frozenset((OURS, THEIRS))


@dataclass(frozen=True)
class Losses:
    """A privacy-loss distribution and the authors of what is in it."""

    distribution: Any
    authors: frozenset[str]

    def times(self, count: int, tail: float) -> Losses:
        """The losses of so many adaptive releases."""
        if count == 1:
            return self
        return Losses(self.distribution.self_compose(count, tail_mass_truncation=tail), self.authors | _BY_THEM)

    def then(self, other: Losses, tail: float) -> Losses:
        """The losses of both."""
        both = self.distribution.compose(other.distribution, tail_mass_truncation=tail)
        return Losses(both, self.authors | other.authors | _BY_THEM)

    def epsilon(self, delta: float) -> float:
        """The least ε at ``delta``."""
        return float(self.distribution.get_epsilon_for_delta(delta))

    def delta(self, epsilon: float) -> float:
        """The least δ at ``epsilon``."""
        return float(self.distribution.get_delta_for_epsilon(epsilon))


def gaussian_delta(mu: float, epsilon: Floats) -> Floats:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), of N(μ, 1) against N(0, 1); ε may be −∞, where it is 1."""
    with np.errstate(invalid="ignore", over="ignore"):
        above = log_ndtr(mu / 2.0 - epsilon / mu)
        below = epsilon + log_ndtr(-mu / 2.0 - epsilon / mu)
        value = -np.exp(above) * np.expm1(np.minimum(below - above, 0.0))
    return np.where(np.isneginf(epsilon), 1.0, np.maximum(value, 0.0))


def pure_delta(total: float, epsilon: Floats) -> Floats:
    """δ(ε) of randomised response, which dominates every ε-DP release."""
    inside = -np.expm1(np.minimum(epsilon - total, 0.0)) / (1.0 + math.exp(-total))
    with np.errstate(over="ignore"):
        return np.where(epsilon < -total, -np.expm1(np.minimum(epsilon, 0.0)), inside)


def sampled_curve(rate: float, base: Curve) -> Curve:
    """H_{e^ε}((1−q)Q + qP′‖Q)."""

    def curve(epsilon: Floats) -> Floats:
        # log(1 + (e^ε − 1)/q) without losing digits where ε is near 0, nor range where it is large.
        odds = np.expm1(np.minimum(epsilon, 30.0)) / rate
        with np.errstate(divide="ignore", invalid="ignore"):
            moved = np.where(epsilon > 30.0, epsilon - math.log(rate), np.log1p(np.maximum(odds, -1.0)))
        return np.where(odds <= -1.0, -np.expm1(epsilon), rate * base(moved))

    return curve


def reversed_curve(curve: Curve) -> Curve:
    """The curve of the other order of the pair."""
    return lambda epsilon: np.clip(
        -np.expm1(np.minimum(epsilon, 700.0)) + np.exp(np.minimum(epsilon, 700.0)) * curve(-epsilon), 0.0, 1.0
    )


def _connected(curve: Curve, step: float, reach: float) -> Any:
    """The distribution through the dots of a curve at multiples of ``step`` in ±reach."""
    from dp_accounting.pld import pld_pmf

    last = math.ceil(reach / step)
    if 2 * last > _MOST_CELLS:
        raise NoRule("its losses do not fit the grid at the accuracy that is asked for")
    deltas = np.clip(curve(step * np.arange(-last, last + 1, dtype=np.float64)), 0.0, 1.0)
    # δ falls; rounding may not. Raising what comes before is outward.
    deltas = np.maximum.accumulate(deltas[::-1])[::-1]
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(step, -last, last, deltas)


@lru_cache(maxsize=64)
def one_loss(release: Release, relation: str, step: float, delta: float) -> Losses:
    """The losses of one release on a grid of ``step``, fine enough for δ."""
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as pld

    replaced, factor = relation == "replace-one", 2.0 if relation == "replace-one" else 1.0
    neighbours = NeighboringRelation.REPLACE_ONE if replaced else NeighboringRelation.ADD_OR_REMOVE_ONE
    match release:
        case Gaussian(z=z) | Sampled(law="poisson", base=Gaussian(z=z)):
            rate = release.rate if isinstance(release, Sampled) else 1.0
            return Losses(
                pld.from_gaussian_mechanism(
                    z,
                    value_discretization_interval=step,
                    sampling_prob=rate,
                    neighboring_relation=neighbours,
                    log_mass_truncation_bound=min(-50.0, math.log(delta) - 20.0),
                ),
                _BY_THEM,
            )
        case Pure(epsilon=epsilon):  # randomised response is the worst of all, and is its own reversal
            pmf = _connected(lambda e: pure_delta(epsilon, e), step, epsilon + step)
            return Losses(pld.PrivacyLossDistribution(pmf), _BY_US)
        case Sampled(law=law, rate=rate, base=base):
            if (law == "fixed-size") != replaced:
                raise NoRule(f"{law} samples of this kind of release are not understood under {relation}")
            tail = float(-ndtri(delta * 1e-7))
            if isinstance(base, Gaussian):
                mu = factor / base.z
                curve, reach = sampled_curve(rate, lambda e: gaussian_delta(mu, e)), mu * (mu / 2.0 + tail)
            else:
                total = base.epsilon
                curve, reach = sampled_curve(rate, lambda e: pure_delta(total, e)), total
            if law == "poisson":
                both = [_connected(each, step, reach + step) for each in (curve, reversed_curve(curve))]
                return Losses(pld.PrivacyLossDistribution(*both), _BY_US)
            # One curve for both orders: it is self-reversed, because it is the larger of both at every ε.
            larger = lambda e: np.where(e >= 0.0, curve(e), reversed_curve(curve)(e))  # noqa: E731
            return Losses(pld.PrivacyLossDistribution(_connected(larger, step, reach + step)), _BY_US)
        case Allocated(steps=steps, base=Gaussian(z=z)):
            if replaced:
                raise NoRule("random allocation is understood under add-remove alone")
            curves, reach = _allocated(1.0 / z, steps, delta)
            return Losses(pld.PrivacyLossDistribution(*(_connected(c, step, reach) for c in curves)), _BY_US)
    raise NoRule(f"nothing is known of the losses of a {type(release).__name__} release")


def _allocated(mu: float, steps: int, delta: float) -> tuple[tuple[Curve, Curve], float]:
    """Both curves of one epoch, from above, and how far its losses reach.

    Cut off: with Y′ = Y·1[Y ≤ x], S − S′ has the mean E[Y; Y > x] = Φ(μ − g(x)), which is added to the first curve;
    the second falls in S. Carried around: what of ΣY′ is above the grid, at R, comes back lower. The first curve
    misses at most E[S′; ΣY′ > R] ≤ e^{−θR}·M′(θ)·M(θ)^{T−1} for every θ > 0, M the transform of the masses at hand.
    Rounding: every frequency is wrong by at most e = 16u·log₂N, its T-th power by T·|F|^{T−1}·e, and a mass by the
    mean of that over all frequencies plus e times the mean of |F|^T. Masses are lifted by e^{θx} before and lowered
    after, so that what is wrong far out, where S is large, is small.
    """
    far = math.exp(mu * (mu / 2.0 - float(ndtri(delta * 1e-7))))
    spread = math.sqrt(steps * math.expm1(min(mu * mu, 600.0)))
    top = max(steps + 12.0 * spread, steps + 1.3 * far)
    if not top < 1e12:
        raise NoRule("the noise is so small that the grid of an epoch does not hold its losses")
    h = top / _POINTS
    x = h * np.arange(math.ceil(far / h) + 2)
    with np.errstate(divide="ignore"):
        g = np.log(x) / mu + mu / 2.0

    def between(edges: Floats) -> Floats:
        upper = edges[:-1] > 0.0
        return np.where(upper, ndtr(-edges[:-1]) - ndtr(-edges[1:]), ndtr(edges[1:]) - ndtr(edges[:-1]))

    mass, mean = between(g), between(g - mu)  # of Y in each cell, under Q and weighted by Y
    right = np.clip((mean - x[:-1] * mass) / h, 0.0, mass)
    law_of_one = np.zeros(_POINTS)
    law_of_one[: mass.size] += mass - right
    law_of_one[1 : mass.size + 1] += right
    law_of_one[0] += float(ndtr(-g[-1]))  # cut off: Y′ = 0
    cut = float(ndtr(mu - g[-1]))
    used = np.flatnonzero(law_of_one)
    values, weights = h * used, law_of_one[used]
    around = math.inf
    for share in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        theta = share / far if far > spread else share / spread
        lifted = weights * np.exp(np.minimum(theta * values, 600.0))
        moment, slope = float(lifted.sum()), float(lifted @ values)
        around = min(around, math.exp(min(0.0, (steps - 1) * math.log(moment) + math.log(slope) - theta * top)))
    theta = min(20.0 / (top - steps), 2.0 / steps)
    lift = np.exp(theta * h * np.arange(_POINTS))
    moment = float(law_of_one @ lift)
    spectrum = np.fft.rfft(law_of_one * lift / moment)
    size = np.abs(spectrum)
    unlift = np.exp(steps * math.log(moment) - theta * h * np.arange(_POINTS))
    law = np.maximum(np.fft.irfft(spectrum**steps, _POINTS), 0.0) * unlift
    wrong = 16.0 * _UNIT * math.log2(_POINTS) * float(steps * np.mean(size ** (steps - 1)) + np.mean(size**steps))
    s = h / steps * np.arange(_POINTS)
    first_extra, second_extra = cut + around + wrong * float(unlift @ s), wrong * float(unlift.sum())
    # Sums from above and from below, so that a curve at any ε is two lookups.
    heavy, count = np.cumsum((law * s)[::-1])[::-1], np.cumsum(law[::-1])[::-1]
    light, below = np.cumsum(law * s), np.cumsum(law)

    def first(epsilon: Floats) -> Floats:
        bound = np.exp(np.minimum(epsilon, 700.0))
        at = np.searchsorted(s, bound)
        inside = np.minimum(at, _POINTS - 1)
        value = np.where(at < _POINTS, heavy[inside] - bound * count[inside], 0.0)
        return np.clip(np.maximum(value, 0.0) + first_extra, 0.0, 1.0)

    def second(epsilon: Floats) -> Floats:
        scale = np.exp(np.minimum(epsilon, 700.0))
        at = np.minimum(np.searchsorted(s, 1.0 / scale), _POINTS - 1)
        return np.asarray(np.clip(np.maximum(below[at] - scale * light[at], 0.0) + second_extra, 0.0, 1.0))

    if first_extra > 0.1 * delta:
        raise NoRule("rounding on the grid of an epoch would be seen at this δ")
    low = float(s[np.searchsorted(below, delta * 1e-3)])
    return (first, second), max(math.log(top / steps), -math.log(max(low, 1e-300)))
