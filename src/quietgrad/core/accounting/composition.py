"""Walking event trees: what every accountant needs to know about a composition before it can prove anything.

* ``parallel_branches``: under ``Parallel`` and ``MaxOverParties`` a record lies in one part, so a composition costs
  what its worst choice of parts costs. An event becomes the list of its choices, none of which is parallel.
* ``total_slack``, ``total_failure``, ``total_upfront``: the sums over all ``TotalVariationSlack``,
  ``FailureProbability`` and ``Upfront`` events of a composition.
* ``count_releases``: a composition as a multiset of releases, un-sampled Gaussians merged into one.
* ``approximate_mu``: an asymptotic size of the privacy loss. A starting point for searches, never a guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import combinations_with_replacement, product
from operator import add
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.events import (
    LARGEST_NUMBER,
    LEAST_NUMBER,
    ZCDP,
    AllocationSampled,
    Composed,
    Event,
    FailureProbability,
    FixedSizeSampled,
    Gaussian,
    MaxOverParties,
    Parallel,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    TotalVariationSlack,
    Upfront,
    composed,
    repeated,
)

_MOST_CHOICES = 256
_INSIDE = (PoissonSampled, FixedSizeSampled, AllocationSampled, RandomNumberOfReleases, RepeatAndSelect)


class AccountantRefusal(Exception):
    """One accountant's refusal: the event that stopped it, and why."""

    def __init__(self, event: Event, reason: str) -> None:
        super().__init__(reason)
        self.event = event
        self.reason = reason


def check_relation(event: Event, proved: Relation, asked: Relation) -> None:
    """Refuse a result that was proved under another relation than the one asked for."""
    if proved is not asked:
        raise AccountantRefusal(
            event, f"it was proved under {proved}, not under {asked}; prove and record it under {asked}"
        )


def describe(event: Event, limit: int = 160) -> str:
    """Return the event as short text for messages."""
    text = repr(event)
    return text if len(text) <= limit else text[: limit - 1] + "…"


_Value = TypeVar("_Value", float, npt.NDArray[np.float64])


def fold(event: Event, leaf: Callable[[Event], _Value]) -> _Value:
    """Add up over a composition, multiply repetitions, take the worst of parallel parts; ``leaf`` gives the rest.

    A value is a number, or an array of them, whose entries are then taken each by itself.
    """
    match event:
        case Composed(parts=parts):
            return reduce(add, (fold(part, leaf) for part in parts))
        case Parallel(parts=parts) | MaxOverParties(parties=parts):
            return reduce(_larger, (fold(part, leaf) for part in parts))
        case Repeated(inner=inner, count=count):
            return count * fold(inner, leaf)
    return leaf(event)


def _larger(one: _Value, other: _Value) -> _Value:
    return np.maximum(one, other) if isinstance(one, np.ndarray) else max(one, other)


def total_slack(event: Event) -> float:
    """Return the total variation distance that all slacks of a composition may add up to."""
    return _total(event, lambda part: part.total_variation if isinstance(part, TotalVariationSlack) else 0.0)


def total_failure(event: Event) -> float:
    """Return the probability that any ``FailureProbability`` of a composition happens, by the union bound."""
    return _total(event, lambda part: part.probability if isinstance(part, FailureProbability) else 0.0)


def total_upfront(event: Event, relation: Relation) -> float:
    """Return what all ``Upfront`` events of a composition add to its ε; refuses those inside a sample or search."""

    def added(part: Event) -> float:
        if not isinstance(part, Upfront):
            return 0.0
        check_relation(part, part.relation, relation)
        return part.epsilon

    def hidden(part: Event) -> float:
        return _total(part.inner, added) if isinstance(part, _INSIDE) else 0.0

    if fold(event, hidden) != 0.0:
        raise AccountantRefusal(
            event, "a release that decides about others must come before them, and cannot be inside a sample"
        )
    return fold(event, added)


def _total(event: Event, measure: Callable[[Event], float]) -> float:
    def leaf(part: Event) -> float:
        match part:
            case RandomNumberOfReleases(inner=inner, law=law):
                return math.fsum(weight * count for count, weight in law) * fold(inner, leaf)
            case RepeatAndSelect(inner=inner, mean=mean):
                return mean * fold(inner, leaf)
            case PoissonSampled(inner=inner) | FixedSizeSampled(inner=inner):
                return fold(inner, leaf)
            case AllocationSampled(steps_per_epoch=steps, inner=inner):
                return steps * fold(inner, leaf)
        return measure(part)

    return fold(event, leaf)


def parallel_branches(event: Event) -> list[Event]:
    """Return the choices of parts of ``event``, without what is added up apart: its ε is the largest of theirs.

    An empty list means that nothing but slack was released. Raises ``AccountantRefusal`` when there are too many
    choices to try; the Rényi accountant takes such an event whole.
    """
    match event:
        case TotalVariationSlack() | FailureProbability() | Upfront():
            return []
        case Composed(parts=parts):
            lists = [choices for part in parts if (choices := parallel_branches(part))]
            _check_number(event, math.prod(len(choices) for choices in lists))
            return list(dict.fromkeys(composed(pick) for pick in product(*lists))) if lists else []
        case Parallel(parts=parts) | MaxOverParties(parties=parts):
            return _undominated(list(dict.fromkeys(choice for part in parts for choice in parallel_branches(part))))
        case Repeated(inner=inner, count=count):
            choices = parallel_branches(inner)
            if len(choices) < 2:
                return [repeated(choice, count) for choice in choices]
            _check_number(event, math.comb(count + len(choices) - 1, count))
            return [
                composed([repeated(c, pick.count(c)) for c in dict.fromkeys(pick)])
                for pick in combinations_with_replacement(choices, count)
            ]
        case PoissonSampled(rate=1.0) | FixedSizeSampled(rate=1.0) | AllocationSampled(steps_per_epoch=1):
            return parallel_branches(event.inner)
        case RandomNumberOfReleases(law=law) if not any(number for number, _ in law):
            return []
    if not isinstance(event, _INSIDE):
        return [event]
    choices = parallel_branches(event.inner)
    if len(choices) > 1 and isinstance(event, RepeatAndSelect):
        return [event]
    if len(choices) > 1 and isinstance(event, (RandomNumberOfReleases, AllocationSampled)):
        raise AccountantRefusal(event, "epochs and random rounds of parallel parts have too many choices of parts")
    return [replace(event, inner=choice) for choice in choices]


def _check_number(event: Event, number: int) -> None:
    if number > _MOST_CHOICES:
        raise AccountantRefusal(event, f"its parallel parts combine in {number} ways, more than {_MOST_CHOICES}")


def _undominated(events: list[Event]) -> list[Event]:
    """Drop what another choice covers: same kind of release, no less noise, no higher rate, no more often."""
    keys = [_strength(event) for event in events]
    undominated = []
    for i, (event, key) in enumerate(zip(events, keys, strict=True)):
        covered = key is not None and any(
            other is not None
            and other[0] == key[0]
            and all(a >= b for a, b in zip(other[1], key[1], strict=True))
            and (other[1] != key[1] or j < i)
            for j, other in enumerate(keys)
            if j != i
        )
        if not covered:
            undominated.append(event)
    return undominated


def _strength(event: Event) -> tuple[tuple[str, ...], tuple[float, ...]] | None:
    """(kind, numbers that make it more revealing) of a repeated simple release, else None."""
    kinds: list[str] = []
    count, rate = 1.0, 1.0
    while isinstance(event, Repeated):
        count, event = count * event.count, event.inner
    if isinstance(event, (PoissonSampled, FixedSizeSampled)):
        kinds.append(event.kind)
        rate, event = event.rate, event.inner
    elif isinstance(event, AllocationSampled):  # an average of more terms is smaller in convex order
        kinds.append(event.kind)
        rate, event = 1.0 / event.steps_per_epoch, event.inner
    if isinstance(event, Gaussian):
        return (*kinds, event.kind), (count, rate, 1 / event.noise_multiplier)
    return None


def count_releases(event: Event) -> dict[Event, int]:
    """Return a parallel-free composition as releases and how often each happens.

    Un-sampled Gaussians become one: adaptive Gaussian releases are exactly one Gaussian with Σ 1/z² as its 1/z².
    """
    counts: dict[Event, int] = {}
    precision: list[float] = []

    def walk(part: Event, times: int) -> None:
        match part:
            case Composed(parts=parts):
                for inner in parts:
                    walk(inner, times)
            case Repeated(inner=inner, count=count):
                walk(inner, times * count)
            case Gaussian(noise_multiplier=z):
                precision.append(times / z**2)
            case _:
                counts[part] = counts.get(part, 0) + times

    walk(event, 1)
    if precision:
        merged = 1 / math.sqrt(math.fsum(precision))
        if merged < LEAST_NUMBER:
            raise AccountantRefusal(event, "its Gaussian releases together have too little noise for any finite ε")
        counts[Gaussian(min(merged, LARGEST_NUMBER))] = 1
    return counts


def approximate_mu(event: Event, factor: float) -> float:
    """Return about how many standard deviations apart neighbours look (a central limit, for starting points).

    ``factor`` is Δ/C. Sampled Gaussians count q√(e^{μ²} − 1) each. The value may err to either side.
    """

    def square(part: Event) -> float:
        match part:
            case Gaussian(noise_multiplier=z):
                return (factor / z) ** 2
            case Pure(epsilon=epsilon):
                return epsilon**2
            case ZCDP(rho=rho):
                return 2 * rho
            case PoissonSampled(rate=rate, inner=inner) | FixedSizeSampled(rate=rate, inner=inner):
                one = fold(inner, square)
                return min(one, rate**2 * math.expm1(min(one, 600.0)))
            case AllocationSampled(steps_per_epoch=steps, inner=inner):
                one = fold(inner, square)
                return min(one, math.expm1(min(one, 600.0)) / steps)
            case RandomNumberOfReleases(inner=inner, law=law):
                return max(count for count, _ in law) * fold(inner, square)
            case RepeatAndSelect(inner=inner):
                return 4 * fold(inner, square)
        return 0.0

    return math.sqrt(fold(event, square))


def root_search(function: Callable[[float], float], guess: float, rtol: float = 1e-12) -> float:
    """Return the largest x > 0 (to ``rtol``) with ``function(x) ≤ 0``, for an increasing function."""
    low = high = guess
    while function(low) > 0:
        high, low = low, low / 2
    while function(high) <= 0:
        low, high = high, high * 2
    return bisect(lambda x: function(x) <= 0, low, high, lambda at: rtol * at)[0]


def bisect(
    holds: Callable[[float], bool], low: float, high: float, width: Callable[[float], float]
) -> tuple[float, float]:
    """Narrow an interval at whose lower end something holds and at whose upper end it does not."""
    while high - low > width(high):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high
