"""The PLD accountant: the losses of every release on one grid, added up in both orders of the neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from quietgrad.privacy.budget import Relation
from quietgrad.privacy.composition import CannotProve, bag, check_relation, rough_mu
from quietgrad.privacy.events import ZCDP, Event, FixedSize, Gaussian, Laplace, Poisson, Pure, RandomRound
from quietgrad.privacy.gaussian import gaussian_epsilon
from quietgrad.privacy.lossgrid import LARGEST_LOSS, discretise
from quietgrad.privacy.losssum import SummedLosses, add_losses, chernoff
from quietgrad.privacy.pairs import (
    FixedSizePair,
    GaussianPair,
    LaplacePair,
    Pair,
    PoissonPair,
    PoissonReplacePair,
    PurePair,
)

_COARSEST_STEP = 1e-4
_MOST_POINTS = 1 << 21
_FINEST_STEP = 1e-12  # losses that are smaller than this altogether are rounded up to it
# Rounding adds at most about h²/6 to each release's loss variance; h ≤ 0.035 τ keeps that below 2·10⁻⁴ of τ².
_STEPS_PER_DEVIATION = 1 / 0.035
_TAIL_PER_DELTA = 1e-7
_TAIL_AT_EPSILON = 1e-16  # where ε is given, δ is not known beforehand
_LEAST_TAIL = 1e-280


class _Asked(TypedDict):
    tail: float
    one_tail: float
    delta: float | None
    epsilon: float | None


_Base = GaussianPair | LaplacePair | PurePair


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
    a coarser one stays valid and becomes looser. ``factor`` is Δ/C. Refuses with ``CannotProve``.
    """
    releases = bag(event)
    uses = _uses(releases)
    pairs = {leaf: pair_of(leaf, relation, factor) for leaf in uses}
    tail = _TAIL_AT_EPSILON if delta is None else max(_LEAST_TAIL, _TAIL_PER_DELTA * delta)
    number = math.fsum(uses.values())
    one_tail = max(tail / (8 * number), 1e-300)
    reach = max(max(p.reach_above(one_tail), p.reach_below(one_tail)) for p in pairs.values())
    deviation = math.sqrt(math.fsum(count * rough_mu(leaf, factor) ** 2 for leaf, count in uses.items()))
    adapt = step is None
    if step is None:
        about = epsilon if epsilon is not None else gaussian_epsilon(min(deviation, 30.0), delta or 1e-6)
        step = min(_COARSEST_STEP, max(about, 1e-5) / 2000, deviation / math.sqrt(number) / _STEPS_PER_DEVIATION)
    floor = max(_FINEST_STEP, 2 * min(reach, LARGEST_LOSS) / _MOST_POINTS)
    while True:
        step = max(step, floor) if adapt else step
        grids = {leaf: discretise(pair, step, one_tail) for leaf, pair in pairs.items()}
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
    asked: _Asked = {"tail": tail, "one_tail": one_tail, "delta": delta, "epsilon": epsilon}
    orders = [add_losses(releases, uses, grids, bounds, **asked)]
    if not all(pair.symmetric for pair in pairs.values()):
        turned = {leaf: grid.reversed() for leaf, grid in grids.items()}
        orders.append(add_losses(releases, uses, turned, chernoff(releases, turned, deviation, tail), **asked))
    return ComposedPLD(tuple(orders), _name(uses))


def _uses(releases: Mapping[Event, int]) -> dict[Event, int]:
    """How often each single release happens at most."""
    uses: dict[Event, int] = {}
    for event, count in releases.items():
        if isinstance(event, RandomRound):
            most = max(number for number, _ in event.law)
            for leaf, times in _uses(bag(event.inner)).items():
                uses[leaf] = uses.get(leaf, 0) + count * most * times
        else:
            uses[event] = uses.get(event, 0) + count
    return uses


def _name(leaves: Mapping[Event, int]) -> str:
    kinds = {leaf.kind for leaf in leaves} & {"poisson", "fixed-size"}
    return f"pld-{kinds.pop()}" if len(kinds) == 1 else "pld"


def pair_of(event: Event, relation: Relation, factor: float) -> Pair:
    """Return the dominating pair of one release, or refuse with ``CannotProve``; ``factor`` is Δ/C."""
    match event:
        case Poisson(rate=rate, inner=inner) if relation is Relation.ADD_REMOVE:
            return PoissonPair(_sampled_base(event, inner, relation, factor), rate)
        case Poisson(rate=rate, inner=Gaussian(noise_multiplier=z)):
            return PoissonReplacePair(factor / z, rate)
        case Poisson():
            raise CannotProve(
                event,
                "under replace-one only Poisson samples of a single Gaussian release are understood; "
                "use FixedSize, or the relation add-remove",
            )
        case FixedSize(inner=inner) if relation is Relation.REPLACE_ONE:
            return FixedSizePair(_sampled_base(event, inner, relation, factor), event.rate)
        case FixedSize():
            raise CannotProve(
                event,
                "fixed-size batches hide a record only among data sets of the same size; "
                "use the relation replace-one, or Poisson sampling",
            )
    return _base(event, relation, factor)


def _base(event: Event, relation: Relation, factor: float) -> _Base:
    match event:
        case Gaussian(noise_multiplier=z):
            return GaussianPair(factor / z)
        case Laplace(noise_multiplier=z):
            return LaplacePair(factor / z)
        case Pure(epsilon=epsilon, relation=proved):
            check_relation(event, proved, relation)
            return PurePair(epsilon)
        case ZCDP(relation=proved):
            check_relation(event, proved, relation)
    raise CannotProve(event, f"nothing is known about the losses of a {event.kind} event beyond its curve or parts")


def _sampled_base(event: Event, inner: Event, relation: Relation, factor: float) -> _Base:
    """The pair of what happens on one sample: a single release, or Gaussians that merge into one."""
    releases = list(bag(inner).items())
    if len(releases) != 1 or releases[0][1] != 1:
        raise CannotProve(
            event, "one sample may feed Gaussian releases or a single other one; sample anew for more"
        )
    return _base(releases[0][0], relation, factor)
