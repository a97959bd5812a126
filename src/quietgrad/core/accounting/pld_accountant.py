"""The PLD accountant: it puts the losses of all releases on one grid and composes them, in both orders of
neighbours.

Composition is a Fourier transform with a proved bound on its rounding errors. Spectra multiply, repetitions are
powers, random rounds are averages of powers. Plainly done, each release costs up to a unit in the last place of
*one*, and a million of them 10⁻¹⁰: more than many a δ. Where that matters, losses are *tilted* first: with M = E
e^{θL} the masses p(ℓ) e^{θℓ}/M are a distribution too, its T-fold sum has the masses p_T(ℓ) e^{θℓ}/M^T, and what
is wrong with those by at most E is wrong with p_T(ℓ) by at most E·M^T e^{−θℓ}. At the saddle point θ, where M^T
e^{−θε} is least, that is E times Chernoff's bound of the very tail that δ is read from: errors are relative to δ,
whatever δ. E is computed for the composition at hand and added to every mass.

The bound. Let u = 2⁻⁵³ and w a leaf's tilted masses, which are ≥ 0 and add up to 1.

1. *A transform.* In a Cooley–Tukey network every output is Σ_j w_j ω^{jk} Π(1 + δ) over the roundings on the path
   from input j, each |δ| ≤ u for a sum, √5·u for a complex product, u for a root of unity. A pass of radix 2 or 4
   has one product and one or two sums on a path, those of radix 3 and 5 fewer than eight operations: less than 4u
   per factor of two. So |X̂_k − X_k| ≤ e = 8u·log₂N at *every* frequency, without a factor √N; likewise backwards,
   relative to Σ_k |Y_k|/N.
2. *The masses.* Tails have a relative error of a few u plus that of their argument, x²u at x deviations, x² below
   2·log(1/tail). Summed by parts against e^{θℓ} they move X_k by that much at frequencies of the order of θ, where
   the composition lives; splitting a cell costs another θu. ``_allowance`` is a multiple of all of this.
3. *The composition* F is a polynomial with coefficients ≥ 0 in the spectra, of degree at most T, so
   |F(X̂) − F(X)| ≤ F(m) − F(|X̂|) with m = |X̂| + e, and that is at most F(m)·Σ_i T_i (1 − |X̂_i|/m_i) (Bernoulli).
   Products add √5·u per degree, which m is given too. F(m) is small except at the few frequencies of the composed
   bell, and it is evaluated there and everywhere, so nothing is assumed about its shape.

The transform is cyclic. Losses above the window come back at its lower end, those below at its upper end, and both
add mass where they appear, which errs to the safe side; what is missing above is counted as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.accounting.composition import AccountantRefusal, approximate_mu, check_relation, count_releases
from quietgrad.core.accounting.events import (
    ZCDP,
    AllocationSampled,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
)
from quietgrad.core.accounting.loss_distribution import (
    LARGEST_LOSS,
    Array,
    DiscretizedPLD,
    DominatingPair,
    FixedSizePair,
    GaussianPair,
    PoissonPair,
    PoissonReplacePair,
    PurePair,
)

Releases = Mapping[Event, int]
Grids = Mapping[Event, DiscretizedPLD]
Spectrum = npt.NDArray[np.complex128]
_Numbers = TypeVar("_Numbers", Array, Spectrum)

_UNIT = 2.0**-53
_PER_LEVEL = 8.0  # see step 1
_PER_PRODUCT = 4.0  # ≥ √5, see step 3
_NEGLIGIBLE = math.log(1e9)  # of the tilted losses, that much less is above a window
_TILTS = 3  # at most this many are tried
_PER_RELEASE = _UNIT  # what an untilted sum loses per release: measured below this for up to 10⁷ releases
_NOTICED = 1e-4  # so it is relied on only where it is a 10⁻⁴ part of δ


@dataclass(frozen=True)
class ChernoffBounds:
    """Chernoff's bounds of a composition: all but e^{−need} of it on each side lies between ``low`` and ``high``.

    ``moment`` is log E e^{θL} as a function of θ, ``orders`` some θ > 0 around those worth trying.
    """

    low: float
    high: float
    need: float
    orders: tuple[float, ...]
    moment: Callable[[float], float]

    def epsilon(self, delta: float) -> float:
        """An ε above which there is at most ``delta`` of the losses."""
        return self.least(lambda order: (self.moment(order) - math.log(delta)) / order)[0]

    def tilt(self, epsilon: float) -> float:
        """The θ with the least bound of the losses above ``epsilon``; 0 if there is none."""
        return self.least(lambda order: self.moment(order) - order * epsilon)[1]

    def window(self, tilt: float) -> tuple[float, float]:
        """The losses to compute at a tilt, so that next to nothing comes back from outside them.

        A tilt magnifies rare large losses, which need room; but not more than twice that of no tilt, as what comes
        back only loosens the result.
        """
        if tilt == 0.0:
            return self.low, self.high
        more = [tilt * (scale - 1.0) for scale in (1.1, 1.3, 1.7, 2.5)]
        reach = min((self.moment(tilt + by) - self.moment(tilt) + _NEGLIGIBLE) / by for by in more)
        high = min(max(self.high, reach), 2.0 * self.high - self.low)
        # Losses from below come back e^{θ·width} times smaller, and no negative loss is ever asked for.
        return max(self.low, min(0.0, high - self.need / tilt)), high

    def least(self, function: Callable[[float], float]) -> tuple[float, float]:
        """The least value of a function with one valley, and where: near the best of ``orders``, by thirds."""
        if not self.orders:
            return math.inf, 0.0
        orders = sorted(self.orders)
        place = min(range(len(orders)), key=lambda i: function(orders[i]))
        low, high = orders[max(place - 1, 0)], orders[min(place + 1, len(orders) - 1)]
        for _ in range(4):
            third = (high / low) ** (1 / 3)
            if function(low * third) < function(high / third):
                high = high / third
            else:
                low = low * third
        best = math.sqrt(low * high)
        return function(best), best


@dataclass(frozen=True)
class SummedLosses:
    """The losses of a composition in one order of the neighbours: the lesser of what a grid and what moments prove.

    The transform of many rare large losses may leave more to rounding than there is to see (little noise on tiny
    samples, a small δ). Moments have no such limit: of L > ε, with θ > 0,

        δ(ε) = E (1 − e^{ε−L})₊ ≤ c_θ E e^{θ(L−ε)},  c_θ = max_{x ≥ 0} (1 − e^{−x}) e^{−θx} = θ^θ/(1 + θ)^{1+θ},

    which is the conversion of Canonne, Kamath and Steinke (2020, Prop. 12) at order 1 + θ, of the grid's losses.
    ``infinite`` bounds the mass of infinite losses, ``wrong`` how far rounding may move a moment at θ.
    """

    grid: DiscretizedPLD
    bounds: ChernoffBounds
    infinite: float
    wrong: Callable[[float], float]

    def epsilon(self, delta: float) -> float:
        """ε at ``delta``."""
        exact = self.grid.epsilon(delta)
        rest = delta - self.infinite
        if rest <= 0.0:
            return exact
        log_rest = math.log(rest)
        return min(exact, max(0.0, self.bounds.least(lambda order: (self._moment(order) - log_rest) / order)[0]))

    def delta(self, epsilon: float) -> float:
        """δ at ``epsilon``."""
        log_delta = self.bounds.least(lambda order: self._moment(order) - order * epsilon)[0]
        return min(self.grid.delta(epsilon), self.infinite + math.exp(min(log_delta, 0.0)))

    def _moment(self, order: float) -> float:
        """log c_θ E e^{θL}, from above."""
        tail = order * math.log(order) - (1.0 + order) * math.log1p(order)
        return tail + self.bounds.moment(order) + self.wrong(order)


def compose_plds(
    releases: Releases,
    uses: Releases,
    grids: Grids,
    bounds: ChernoffBounds,
    *,
    tail: float,
    one_tail: float,
    delta: float | None,
    epsilon: float | None,
) -> SummedLosses:
    """Add the losses of all ``releases``: valid everywhere, sharp at ``delta``, or else at ``epsilon``.

    ``uses`` says how often each leaf of ``grids`` happens at most, ``tail`` bounds the mass above the window,
    ``one_tail`` what was cut off each grid. Where rounding could be a 10⁻⁴ part of δ, the losses are tilted.
    """
    add = partial(compose_tilted, releases, uses, grids, bounds, tail=tail, one_tail=one_tail)
    spreads = {leaf: float(np.dot(grid.mass, np.abs(grid.losses))) for leaf, grid in grids.items()}

    def wrong(order: float) -> float:
        # Of each release as in step 2; a moment is a sum of as many terms as the grid has points, in pairs.
        return math.fsum(n * 4.0 * _allowance(order, spreads[leaf], one_tail) for leaf, n in uses.items())

    infinite = _infinite(releases, grids)

    def found(grid: DiscretizedPLD) -> SummedLosses:
        return SummedLosses(grid, bounds, infinite, wrong)

    def value(grid: DiscretizedPLD) -> float:
        return grid.delta(epsilon or 0.0) if delta is None else grid.epsilon(delta)

    rounding = _PER_RELEASE * (math.fsum(uses.values()) + 64.0)
    plain = delta is None or rounding < 0.1 * delta
    best = add(0.0) if plain else None
    wanted = delta if delta is not None else value(best) if best else 0.0
    if best and rounding <= _NOTICED * wanted:
        return found(best)
    if not bounds.orders:
        return found(best or add(0.0))
    # Chernoff's ε at δ is far above the true one where large losses are rare: then again for the ε that was found.
    tilt = bounds.tilt(epsilon or 0.0 if delta is None else bounds.epsilon(delta))
    for _ in range(_TILTS):
        again = add(tilt)
        best = again if best is None else min(best, again, key=value)
        last, tilt = tilt, bounds.tilt(min(value(best), bounds.high)) if delta is not None else tilt
        if tilt > 0.95 * last:
            break
    return found(best or again)


def transform_error(size: int) -> float:
    """The largest error of any coefficient of a transform of ``size`` numbers whose magnitudes add up to 1."""
    return _PER_LEVEL * _UNIT * math.log2(max(2, size))


def _allowance(tilt: float, spread: float, one_tail: float) -> float:
    """How far the rounding of one release's tilted masses may move its spectrum (step 2); ``spread`` is E|L|."""
    return _UNIT * (64.0 + 16.0 * math.log(1 / one_tail) + tilt * (16.0 + 4.0 * spread))


def compose_tilted(
    releases: Releases,
    uses: Releases,
    grids: Grids,
    bounds: ChernoffBounds,
    tilt: float,
    *,
    tail: float,
    one_tail: float,
) -> DiscretizedPLD:
    """:func:`compose_plds` at one tilt. With a tilt every mass is an upper bound, and so is every δ read off it."""
    window = bounds.window(tilt)
    step = next(iter(grids.values())).step
    first = math.floor(window[0] / step)
    least = math.ceil(window[1] / step) - first + 2
    scale = 1 << max(0, (least - 1).bit_length() - 3)
    size = next(m * scale for m in (4, 5, 6, 8) if m * scale >= least)  # lengths that the transform is quick at
    tilted = {leaf: grid.tilted(tilt) for leaf, grid in grids.items()}
    moments = {leaf: moment for leaf, (_, moment) in tilted.items()}
    spectra = {}
    for leaf, (weights, _) in tilted.items():
        places = np.arange(grids[leaf].first, grids[leaf].first + weights.size) % size
        spectra[leaf] = np.fft.rfft(np.bincount(places, weights=weights, minlength=size))
    composed = np.fft.irfft(_evaluate(releases, spectra, moments), size)
    mass = np.maximum(np.roll(composed, -first % size if first >= 0 else -first), 0.0)
    infinite = _infinite(releases, grids) + tail
    moment = extend_log_over_composition(releases, moments)
    if tilt == 0.0:
        rounding = _PER_RELEASE * (math.fsum(uses.values()) + 64.0)
        return DiscretizedPLD(step, first, mass * math.exp(moment), infinite + rounding)

    allowances = {
        leaf: _allowance(tilt, float(np.dot(tilted[leaf][0], np.abs(grid.losses))), one_tail)
        for leaf, grid in grids.items()
    }
    error = _composed_error(releases, uses, spectra, moments, allowances, size)
    exponents = moment - tilt * step * np.arange(first, first + size)
    slack = 1.0 + 4.0 * _UNIT * (size + 64 + float(np.abs(exponents[[0, -1]]).max()))
    # No mass exceeds one, so nothing is lost where e^x would overflow.
    mass = np.minimum((mass + error) * slack * np.exp(np.minimum(exponents, 700.0)), 1.0)
    return DiscretizedPLD(step, first, mass, infinite)


def _infinite(releases: Releases, grids: Grids) -> float:
    """The probability that any of the losses is infinite."""
    return -math.expm1(
        extend_log_over_composition(releases, {leaf: math.log1p(-grid.infinite) for leaf, grid in grids.items()})
    )


def _composed_error(
    releases: Releases,
    uses: Releases,
    spectra: Mapping[Event, Spectrum],
    moments: Mapping[Event, float],
    allowances: Mapping[Event, float],
    size: int,
) -> float:
    """How wrong any one mass of the tilted composition may be: the mean over all frequencies of their errors."""
    wrong = transform_error(size)
    share = np.zeros(size // 2 + 1)
    sizes: dict[Event, Array] = {}
    for leaf, spectrum in spectra.items():
        seen = np.abs(spectrum)
        more = wrong + allowances[leaf] + _PER_PRODUCT * _UNIT * seen
        sizes[leaf] = seen + more
        share += uses[leaf] * more / sizes[leaf]
    mixed = [(event, count) for event, count in releases.items() if isinstance(event, RandomNumberOfReleases)]
    sums = sum(count * (len(event.law) + 8) for event, count in mixed)
    relative = np.minimum(share, 1.0) + (wrong + 8.0 * _UNIT * (sums + 64))
    return 2.0 / size * float(np.dot(_evaluate(releases, sizes, moments), relative))


def _evaluate(releases: Releases, values: Mapping[Event, _Numbers], moments: Mapping[Event, float]) -> _Numbers:
    """The polynomial that composes spectra, or their magnitudes; a random round's law is tilted by its moments."""
    total = np.ones_like(next(iter(values.values())))
    for event, count in releases.items():
        if isinstance(event, RandomNumberOfReleases):
            parts = count_releases(event.inner)
            inner, log_inner = _evaluate(parts, values, moments), extend_log_over_composition(parts, moments)
            log_mixed = extend_log_over_composition({event: 1}, moments)
            mixed, power, rounds = np.zeros_like(total), np.ones_like(total), 0
            steps: dict[int, _Numbers] = {}  # evenly spaced laws need one power only
            for number, weight in sorted(event.law):
                gap = number - rounds
                if gap not in steps:
                    steps = {gap: _power(inner, gap)}
                power, rounds = power * steps[gap], number
                mixed += weight * math.exp(number * log_inner - log_mixed) * power
            total = total * _power(mixed, count)
        else:
            total = total * _power(values[event], count)
    return total


def _power(base: _Numbers, exponent: int) -> _Numbers:
    """base**exponent by squaring: much faster than complex powers through logarithms."""
    result = np.ones_like(base)
    while exponent:
        if exponent & 1:
            result = result * base
        exponent >>= 1
        if exponent:
            base = base * base
    return result


def extend_log_over_composition(releases: Releases, values: Mapping[Event, float]) -> float:
    """Extend the logarithm of a multiplicative quantity (a moment, a mass) from releases to their composition."""
    total = 0.0
    for event, count in releases.items():
        if isinstance(event, RandomNumberOfReleases):
            inner = extend_log_over_composition(count_releases(event.inner), values)
            logs = [math.log(weight) + number * inner for number, weight in event.law if weight > 0]
            largest = max(logs)
            total += count * (largest + math.log(math.fsum(math.exp(value - largest) for value in logs)))
        else:
            total += count * values[event]
    return total


def chernoff(releases: Releases, grids: Grids, deviation: float, tail: float) -> ChernoffBounds:
    """Bound the losses of the composition, all but ``tail`` on either side.

    ``deviation`` is about the standard deviation of the total loss; it only tells which orders are worth trying.
    """

    @cache
    def moment(order: float) -> float:
        return extend_log_over_composition(releases, {leaf: grid.log_moment(order) for leaf, grid in grids.items()})

    need = math.log(1 / tail)
    if deviation == 0.0:  # too little noise: all losses are infinite
        return ChernoffBounds(0.0, 0.0, need, (), moment)
    best = math.sqrt(2 * need) / deviation
    # Gaussian losses are best bounded near ``best``; rare large losses of tiny samples at smaller orders.
    orders = [scale * best for scale in (0.12, 0.25, 0.5, 0.8, 1.2)]
    orders += [order for order in (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0) if order < orders[0]]
    low = -min((moment(-order) + need) / order for order in orders)
    high = min((moment(order) + need) / order for order in orders)
    return ChernoffBounds(min(low, 0.0), max(high, 0.0), need, tuple(orders), moment)


_COARSEST_STEP = 1e-4
_MOST_POINTS = 1 << 21
_FINEST_STEP = 1e-12  # losses that are smaller than this altogether are rounded up to it
# Rounding adds at most about h²/6 to each release's loss variance; h ≤ 0.035 τ keeps that below 2·10⁻⁴ of τ².
_STEPS_PER_DEVIATION = 1 / 0.035
_TAIL_PER_DELTA = 1e-7
_TAIL_AT_EPSILON = 1e-16  # where ε is given, δ is not known beforehand
_LEAST_TAIL = 1e-280


_Base = GaussianPair | PurePair


@dataclass(frozen=True)
class ComposedPLD:
    """The privacy profile of a composition: one sum of losses if neighbours look alike in both orders, else two."""

    orders: tuple[SummedLosses, ...]
    name: str

    def delta(self, epsilon: float) -> float:
        """δ at ``epsilon``, in the worse order."""
        return max(order.delta(epsilon) for order in self.orders)

    def epsilon(self, delta: float) -> float:
        """ε at ``delta``, in the worse order."""
        return max(order.epsilon(delta) for order in self.orders)


def pld_profile(
    event: Event,
    relation: Relation,
    factor: float,
    *,
    delta: float | None = None,
    epsilon: float | None = None,
    step: float | None = None,
) -> ComposedPLD:
    """Return the composition's profile, fine enough to be asked at ``delta`` or at ``epsilon``.

    The grid's step is at most 10⁻⁴, ε/2000 and a fraction of the releases' own losses, unless ``step`` is given;
    a coarser one stays valid and becomes looser. ``factor`` is Δ/C. Refuses with ``AccountantRefusal``.
    """
    releases = count_releases(event)
    uses = _uses(releases)
    pairs = {leaf: pair_of(leaf, relation, factor) for leaf in uses}
    tail = _TAIL_AT_EPSILON if delta is None else max(_LEAST_TAIL, _TAIL_PER_DELTA * delta)
    number = math.fsum(uses.values())
    one_tail = max(tail / (8 * number), 1e-300)
    reach = max(max(p.reach_above(one_tail), p.reach_below(one_tail)) for p in pairs.values())
    deviation = math.sqrt(math.fsum(count * approximate_mu(leaf, factor) ** 2 for leaf, count in uses.items()))
    adapt = step is None
    if step is None:
        about = epsilon if epsilon is not None else gaussian_epsilon(min(deviation, 30.0), delta or 1e-6)
        step = min(_COARSEST_STEP, max(about, 1e-5) / 2000, deviation / math.sqrt(number) / _STEPS_PER_DEVIATION)
    floor = max(_FINEST_STEP, 2 * min(reach, LARGEST_LOSS) / _MOST_POINTS)
    while True:
        step = max(step, floor) if adapt else step
        grids = {leaf: pair.on_grid(step, one_tail) for leaf, pair in pairs.items()}
        deviation = math.sqrt(math.fsum(uses[leaf] * grid.variance for leaf, grid in grids.items()))
        fine = deviation / math.sqrt(number) / _STEPS_PER_DEVIATION
        if adapt and step > max(1.5 * fine, floor):
            step = fine
            continue
        bounds = chernoff(releases, grids, deviation, tail)
        points = (bounds.high - bounds.low) / step
        if adapt and points > _MOST_POINTS:
            floor = step = step * points / _MOST_POINTS * 1.01
            continue
        break
    add = partial(compose_plds, releases, uses, tail=tail, one_tail=one_tail, delta=delta, epsilon=epsilon)
    orders = [add(grids, bounds)]
    if not all(pair.symmetric for pair in pairs.values()):
        turned = {leaf: grid.reversed() for leaf, grid in grids.items()}
        orders.append(add(turned, chernoff(releases, turned, deviation, tail)))
    kinds = {leaf.kind for leaf in uses} & {"poisson", "fixed-size", "random-allocation"}
    return ComposedPLD(tuple(orders), f"pld-{kinds.pop()}" if len(kinds) == 1 else "pld")


def _uses(releases: Mapping[Event, int]) -> dict[Event, int]:
    """How often each single release happens at most."""
    uses: dict[Event, int] = {}
    for event, count in releases.items():
        if isinstance(event, RandomNumberOfReleases):
            most = max(number for number, _ in event.law)
            for leaf, times in _uses(count_releases(event.inner)).items():
                uses[leaf] = uses.get(leaf, 0) + count * most * times
        else:
            uses[event] = uses.get(event, 0) + count
    return uses


def pair_of(event: Event, relation: Relation, factor: float) -> DominatingPair:
    """Return the dominating pair of one release, or refuse with ``AccountantRefusal``; ``factor`` is Δ/C."""
    match event:
        case PoissonSampled(rate=rate, inner=inner) if relation is Relation.ADD_REMOVE:
            return PoissonPair(_sampled_base(event, inner, relation, factor), rate)
        case PoissonSampled(rate=rate, inner=Gaussian(noise_multiplier=z)):
            return PoissonReplacePair(factor / z, rate)
        case PoissonSampled():
            raise AccountantRefusal(
                event,
                "under replace-one only Poisson samples of a single Gaussian release are understood; "
                "use FixedSize, or the relation add-remove",
            )
        case FixedSizeSampled(inner=inner) if relation is Relation.REPLACE_ONE:
            return FixedSizePair(_sampled_base(event, inner, relation, factor), event.rate)
        case FixedSizeSampled():
            raise AccountantRefusal(
                event,
                "fixed-size batches hide a record only among data sets of the same size; "
                "use the relation replace-one, or Poisson sampling",
            )
        case AllocationSampled(steps_per_epoch=steps, inner=inner):
            base = _sampled_base(event, inner, relation, factor)
            if relation is not Relation.ADD_REMOVE or not isinstance(base, GaussianPair):
                raise AccountantRefusal(
                    event,
                    "random allocation is understood for Gaussian releases under add-remove; "
                    "use that relation, or Poisson sampling",
                )
            from quietgrad.core.accounting.random_allocation import AllocationPair  # imports numba

            return AllocationPair.of(base.mu, steps)
    return _base(event, relation, factor)


def _base(event: Event, relation: Relation, factor: float) -> _Base:
    match event:
        case Gaussian(noise_multiplier=z):
            return GaussianPair(factor / z)
        case Pure(epsilon=epsilon, relation=proved):
            check_relation(event, proved, relation)
            return PurePair(epsilon)
        case ZCDP(relation=proved):
            check_relation(event, proved, relation)
    raise AccountantRefusal(
        event, f"nothing is known about the losses of a {event.kind} event beyond its curve or parts"
    )


def _sampled_base(event: Event, inner: Event, relation: Relation, factor: float) -> _Base:
    """The pair of what happens on one sample: a single release, or Gaussians that merge into one."""
    releases = list(count_releases(inner).items())
    if len(releases) != 1 or releases[0][1] != 1:
        raise AccountantRefusal(
            event, "one sample may feed Gaussian releases or a single other one; sample anew for more"
        )
    return _base(releases[0][0], relation, factor)
