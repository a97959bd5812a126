"""Random allocation: the losses of one epoch in which every record secretly takes part in one of T steps.

Proof: ``docs/accounting-proof.md``. However its queries adapt, an epoch is post-processing of one draw of
P = (1/T) Σ_t N(e_t, I/μ²), or without the record of Q = N(0, I/μ²), μ = C/σ, and epochs compose as the product.

*The losses.* dP/dQ = S = (Y_1 + … + Y_T)/T with Y_t = e^{μG_t − μ²/2}, independent log-normals of mean one under Q.
The two profiles are expectations of convex functions of S, so whatever is larger in the *convex order* dominates in
both directions at once. To split the mass at a point between two points around it so that its mean stays makes a
law larger in that order, and sums of independent terms keep the order. The law of Y is put on a grid in this way.
Sums are formed by doubling, each spread on a grid of its own. Mass above a grid is split between its end and
infinity, where Q has none of it and P has the mean: an infinite loss. On a grid of spacing h a profile C(x) grows
by at most h²C″(x)/8; the spacing makes that a small part of ε.

*Rounding.* All masses are sums of products of positive numbers, so each is right to a relative error: a few units
for a mass of Y (ten Gauss–Legendre nodes on cells of at most 2/(8 + |g|) deviations leave less than a unit), then
one unit for each term of a sum. Grid points have 44 bits, so that the distance of a sum from its neighbours is
exact up to its last rounding. The errors add up to ``error``, and every mass is raised by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri

from quietgrad.core.accounting.loss_distribution import (
    LARGEST_LOSS,
    Array,
    DiscretizedPLD,
    DominatingPair,
    GaussianPair,
)
from quietgrad.core.compiled import convolve

LEAST_MU, LARGEST_MU = 1e-4, 5.0
_ACCURACY = 3e-3  # of ε, shared by the grids of all doublings
_KNOT = 0.5  # a grid's spacing is chosen anew whenever a tail has fallen by this power of e
_AROUND = 3  # and looks at so many knots on each side
_SKETCH = 160  # points of a law that the grid of a sum is chosen from
_BITS = 44
_UNIT = 2.0**-53
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)


@dataclass(frozen=True, eq=False)
class SumLaw:
    """A law that is at least that of Y_1 + … + Y_terms in convex order: ``mass`` at ``points``, the first at 0.

    ``lost`` is the part of the mean that is infinitely far above. Masses may be too small, by a factor of at most
    1 + ``error``.
    """

    terms: int
    points: Array
    mass: Array
    lost: float
    error: float


@dataclass(frozen=True)
class AllocationPair(DominatingPair):
    """One epoch: μ = C/σ, ``steps`` is T. See the proof at the top of this module."""

    mu: float
    steps: int

    @classmethod
    def of(cls, mu: float, steps: int) -> AllocationPair | GaussianPair:
        """The pair for any μ. Less noise than is computed here counts as if the bin were known, which dominates."""
        return cls(max(mu, LEAST_MU), steps) if mu <= LARGEST_MU else GaussianPair(mu)

    def reach_above(self, tail: float) -> float:
        """log S at the upper end of its grid."""
        law = law_of_sum(self.mu, self.steps, tail)
        return math.log(float(law.points[-1]) / law.terms)

    def reach_below(self, tail: float) -> float:
        """−log S at the lower end of its grid."""
        law = law_of_sum(self.mu, self.steps, tail)
        return math.log(law.terms / float(law.points[1]))

    def on_grid(self, step: float, tail: float) -> DiscretizedPLD:
        law = law_of_sum(self.mu, self.steps, tail)
        q = law.mass * (1.0 + law.error)
        ratio = law.points / law.terms
        loss = np.log(ratio[1:])
        p = q[1:] * ratio[1:]
        inside = np.abs(loss) < LARGEST_LOSS
        infinite = law.lost / law.terms * (1.0 + 1e-6) + float(p[loss >= LARGEST_LOSS].sum())
        infinite_reversed = float(q[0]) + float(q[1:][loss <= -LARGEST_LOSS].sum())
        loss, p = loss[inside], p[inside]
        left = np.floor(loss / step)
        # The loss itself is rounded: each side is given what that could have taken from it.
        guard = 16.0 * _UNIT * (1.0 + np.abs(loss)) / step
        right = np.expm1(left * step - loss) / math.expm1(-step)
        first = int(left.min())
        places = (left - first).astype(np.int64)
        size = int(places.max()) + 2
        mass: Array = np.zeros(size)
        mass += np.bincount(places, p * np.clip(1.0 - right + guard, 0.0, 1.0), size)
        mass += np.bincount(places + 1, p * np.clip(right + guard, 0.0, 1.0), size)
        return DiscretizedPLD(step, first, mass * (1.0 + 8.0 * _UNIT * loss.size), infinite, infinite_reversed)


@lru_cache(maxsize=32)
def law_of_sum(mu: float, terms: int, tail: float) -> SumLaw:
    """The law of Y_1 + … + Y_terms from above, in which at most ``tail`` of P and of Q has an infinite loss."""
    doublings = terms.bit_length() + terms.bit_count()
    accuracy, cut = _ACCURACY / (doublings + 4), tail / (2 * doublings)
    power, total = _log_normal(mu, accuracy, cut), None
    while True:
        if terms & 1:
            total = power if total is None else _sum(total, power, accuracy, cut)
        terms >>= 1
        if not terms:
            assert total is not None
            return total
        power = _sum(power, power, accuracy, cut)


def _log_normal(mu: float, accuracy: float, cut: float) -> SumLaw:
    """The law of Y on a grid."""
    reach = -float(ndtri(cut)) + 0.5
    g = np.arange(-reach, mu + reach, 0.02)
    density = np.exp(-g * g / 2.0) * (0.02 / math.sqrt(2.0 * math.pi))
    at = np.exp(mu * g - mu * mu / 2.0)
    points = np.append(_grid(at, density, 1, accuracy, cut)[1:], at[-1])  # P's own tail, which is larger
    g = np.log(points) / mu + mu / 2.0
    points = _snapped(_refined(points, np.diff(g) * (8.0 + np.abs(g[1:])) / 2.0))
    a, b = points[:-1], points[1:]
    span = np.log1p((b - a) / a)
    t = span[:, None] * ((1.0 + _NODES) / 2.0)  # log y − log a at the nodes
    g = (np.log(a)[:, None] + t) / mu + mu / 2.0
    q = np.exp(-g * g / 2.0) * (_WEIGHTS / (2.0 * math.sqrt(2.0 * math.pi))) * (span / mu)[:, None]
    mass = np.zeros(points.size + 1)
    mass[1:-1] += (q * np.expm1(t - span[:, None])).sum(axis=1) * (-b / (b - a))
    mass[2:] += (q * np.expm1(t)).sum(axis=1) * (a / (b - a))
    # Below the grid all of the mass counts at 0, and its mean at the first point as well; above it likewise.
    low, high = (math.log(float(points[end])) / mu + mu / 2.0 for end in (0, -1))
    mass[0] = ndtr(low)
    mass[1] += ndtr(low - mu) / points[0]
    mass[-1] += ndtr(-high)
    farthest = float(np.abs(g).max()) + mu
    error = _UNIT * (128.0 + 32.0 * farthest * farthest)
    return SumLaw(1, np.concatenate(([0.0], points)), mass, float(ndtr(mu - high)), error)


def _sum(one: SumLaw, other: SumLaw, accuracy: float, cut: float) -> SumLaw:
    """The law of a sum of independent terms, on a grid of its own."""
    terms = one.terms + other.terms
    (x, p), (y, q) = _sketch(one), _sketch(other)
    at, mass = np.add.outer(x, y).ravel(), np.multiply.outer(p, q).ravel()
    order = np.argsort(at)
    points = np.concatenate(([0.0], _snapped(_grid(at[order], mass[order], terms, accuracy, cut)[1:])))
    spread, number, laws = np.zeros(points.size), np.zeros(points.size), (one.points, one.mass)
    inverse = 1.0 / np.diff(points)
    lost = convolve(*laws, other.points, other.mass, points, inverse, spread, number, one is other)
    error = one.error + other.error + _UNIT * (2.0 * float(number.max()) + 32.0)
    return SumLaw(terms, points, spread, one.lost + other.lost + lost, error)


def _sketch(law: SumLaw) -> tuple[Array, Array]:
    """A law in a few points, without its atom at 0: only good for choosing a grid."""
    first = np.unique(np.linspace(1, law.points.size, _SKETCH, endpoint=False).astype(np.int64))
    mass = np.add.reduceat(law.mass, first)
    points = np.add.reduceat(law.mass * law.points, first)[mass > 0.0]
    return points / mass[mass > 0.0], mass[mass > 0.0]


def _grid(at: Array, mass: Array, terms: int, accuracy: float, cut: float) -> Array:
    """A grid for about the law that is given: 0, then points from one cut tail to the other. Any grid is sound.

    Spacing h moves the point where a profile has a given value by at most h²·density/(8·tail). It is chosen to make
    that ``accuracy`` times the distance from the mean, or from 1 in units of log S below it, or the mean deviation.
    """
    below, above = np.cumsum(mass), np.cumsum(mass[::-1])[::-1]
    excess = np.zeros(at.size)
    excess[:-1] = np.cumsum((np.diff(at) * above[1:])[::-1])[::-1]
    deviation = float(np.interp(terms, at, excess))
    top = min(int(np.searchsorted(-excess, -cut * terms)), at.size - 1)
    bottom = max(int(np.searchsorted(below, cut)) - 1, 0)
    up, fall_up = _knots(at, -np.log(above), top)
    down, fall_down = _knots(at[::-1], -np.log(below)[::-1], at.size - 1 - bottom)
    knots = np.concatenate((down[::-1], up))
    fall = np.concatenate((fall_down[::-1], [min(fall_down[0], fall_up[0])], fall_up))
    middle = (knots[1:] + knots[:-1]) / 2.0
    low = middle * np.maximum(deviation / terms, np.log(terms / middle))
    scale = np.where(middle > terms, np.maximum(deviation, middle - terms), low)
    spacing = np.maximum(np.sqrt(8.0 * accuracy * scale * fall), 1e-300)
    return np.concatenate(([0.0], _refined(knots, np.diff(knots) / spacing)))


def _knots(at: Array, level: Array, end: int) -> tuple[Array, Array]:
    """Where minus the log of a tail takes evenly spaced values up to ``level[end]``; 1/slope between them."""
    start = math.log(2.0)
    stop = max(float(level[end]), start + _KNOT)
    number = math.ceil((stop - start) / _KNOT) + 1
    values, each = np.linspace(start, stop, number, retstep=True)
    knots = np.interp(values, level, at)
    i = np.arange(number - 1)
    low, high = np.maximum(i - _AROUND, 0), np.minimum(i + 1 + _AROUND, number - 1)
    return knots, np.abs(knots[high] - knots[low]) / ((high - low) * float(each))


def _refined(knots: Array, cells: Array) -> Array:
    """The knots, with at least so many equal cells between neighbours."""
    count = np.maximum(1, np.ceil(cells)).astype(np.int64)
    which = np.repeat(np.arange(count.size), count)
    inside = np.arange(which.size) - np.repeat(np.cumsum(count) - count, count)
    return np.append(knots[which] + np.diff(knots)[which] * (inside / count[which]), knots[-1])


def _snapped(points: Array) -> Array:
    """The points rounded to so few bits that their differences are exact; equal ones once."""
    mantissa, exponent = np.frexp(points)
    return np.unique(np.ldexp(np.round(np.ldexp(mantissa, _BITS)), exponent - _BITS))
