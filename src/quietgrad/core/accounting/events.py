"""Events: value objects that say what was released, in units that mean the same everywhere.

``noise_multiplier`` is always σ of the noise on the *sum* divided by C, the L2 bound of one record's
contribution. The neighbouring relation is not part of an event: an accountant is asked for ε under a relation
and turns C into the sensitivity (C for add-remove, 2C for replace-one). Only ``Pure``, ``ZCDP`` and ``Upfront``
state results that were already proved, so they carry the relation they were proved under.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from quietgrad.core.accounting.budget import Json, Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.registered import Registered


class Event(Registered, family="event"):
    """Base of all events; a frozen value that can be written as JSON and read back.

    A field of one name is checked in one way in all events (``_CHECKS``).
    """

    def __post_init__(self) -> None:
        for name in self.__match_args__:
            object.__setattr__(self, name, _CHECKS[name](name, vars(self)[name]))


def kinds() -> dict[str, type[Event]]:
    """All events, by kind."""
    return dict(Event.kinds)


def from_json(data: Json) -> Event:
    """Rebuild an event from its ``to_json``.

    >>> from_json(PoissonSampled(0.01, Gaussian(1.1)).to_json())
    PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1))
    """
    try:
        return Event.read(data)
    except TypeError as error:
        raise ValueError(f"not an event: {data!r} ({error!r})") from None


# The ranges of the numbers in events. Accountants square, multiply and divide them: within these ranges no result
# leaves the range of doubles. No real run is outside them.
LEAST_NUMBER, LARGEST_NUMBER = 1e-18, 1e18  # for ε and noise multipliers; the range of ρ follows from the squares
_LEAST_RATE = 1e-15
_LARGEST_COUNT = 10**15
_LARGEST_EPOCH = 10**9


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number(low: float, high: float, words: str, *, whole: bool = False) -> Callable[[str, object], float]:
    """A check that a number is within a range, or a whole number of it."""

    def check(name: str, value: object) -> float:
        if not _is_number(value) or not low <= value <= high or (whole and int(value) != value):
            raise SettingError(f"{{{name}}}: must be {words}.", **{name: value})
        return int(value) if whole else float(value)

    return check


_BELOW_ONE = math.nextafter(1.0, 0.0)
_positive = _number(LEAST_NUMBER, LARGEST_NUMBER, f"a number > 0, from {LEAST_NUMBER:g} to {LARGEST_NUMBER:g}")
_count = _number(1, _LARGEST_COUNT, f"a whole number from 1 to {_LARGEST_COUNT:.0e}", whole=True)
_rounds = _number(0, _LARGEST_COUNT, f"a whole number from 0 to {_LARGEST_COUNT:.0e}", whole=True)
_epoch = _number(1, _LARGEST_EPOCH, f"a whole number from 1 to {_LARGEST_EPOCH:.0e}", whole=True)
_rho = _number(LEAST_NUMBER**2 / 4, 4 * LARGEST_NUMBER**2, "a number > 0, from 2.5e-37 to 4e+36")
_rate = _number(_LEAST_RATE, 1.0, f"in (0, 1], at least {_LEAST_RATE:g}; it is the expected batch ÷ n")
_probability = _number(0.0, _BELOW_ONE, "in [0, 1)")


def _event(name: str, value: object) -> Event:
    if not isinstance(value, Event):
        raise SettingError(f"{{{name}}}: is not an event.", **{name: value})
    return value


def _events(name: str, value: Iterable[object]) -> tuple[Event, ...]:
    checked = tuple(_event(name, each) for each in value)
    if not checked:
        raise ValueError(f"{name}=(): needs at least one event; nothing released costs nothing.")
    return checked


def _law(name: str, value: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    law = tuple((int(_rounds("rounds", r)), float(p)) for r, p in value)
    if not law or not all(p >= 0.0 for _, p in law) or not abs(sum(p for _, p in law) - 1.0) <= 1e-9:
        raise ValueError("law: must be pairs (rounds ≥ 0, probability ≥ 0) whose probabilities sum to 1.")
    return law


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "noise_multiplier": _positive,
    "epsilon": _positive,
    "rho": _rho,
    "relation": lambda name, value: Relation.parse(value),
    "rate": _rate,
    "n": _count,
    "batch_size": _count,
    "count": lambda name, value: _count("steps", value),
    "steps_per_epoch": _epoch,
    "inner": _event,
    "parts": _events,
    "parties": _events,
    "law": _law,
    "mean": _number(1.0, LARGEST_NUMBER, f"≥ 1, at most {LARGEST_NUMBER:g}"),
    "shape": _number(0.0, math.inf, "≥ 0"),
    "total_variation": _probability,
    "probability": _probability,
}


@dataclass(frozen=True)
class Gaussian(Event, kind="gaussian"):
    """One release of a sum with N(0, (z·C)² I), every record taking part."""

    noise_multiplier: float


@dataclass(frozen=True)
class Pure(Event, kind="pure"):
    """A release proved ε-DP (δ = 0) under ``relation``: L2-Laplace noise, noisy max, AboveThreshold."""

    epsilon: float
    relation: Relation


@dataclass(frozen=True)
class ZCDP(Event, kind="zcdp"):
    """A release, or an adaptive sequence under a hard filter, proved ρ-zCDP under ``relation``."""

    rho: float
    relation: Relation


@dataclass(frozen=True)
class PoissonSampled(Event, kind="poisson"):
    """``inner`` on a sample that every record enters independently with probability ``rate``."""

    rate: float
    inner: Event


@dataclass(frozen=True)
class FixedSizeSampled(Event, kind="fixed-size"):
    """``inner`` on ``batch_size`` of ``n`` records drawn without replacement."""

    n: int
    batch_size: int
    inner: Event

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.n:
            raise SettingError("{batch_size}: must be ≤ {n}.", batch_size=self.batch_size, n=self.n)

    @property
    def rate(self) -> float:
        """batch_size / n."""
        return self.batch_size / self.n


@dataclass(frozen=True)
class AllocationSampled(Event, kind="random-allocation"):
    """One epoch of ``steps_per_epoch`` releases of ``inner``: every record draws one and is in that one alone.

    The draws are secret, uniform, and independent of each other and of all other epochs.
    """

    steps_per_epoch: int
    inner: Event


@dataclass(frozen=True)
class Repeated(Event, kind="repeated"):
    """``inner`` released ``count`` times, each release allowed to depend on those before."""

    inner: Event
    count: int


@dataclass(frozen=True)
class Composed(Event, kind="composed"):
    """All of ``parts`` on the same people, adaptively."""

    parts: tuple[Event, ...]


@dataclass(frozen=True)
class Parallel(Event, kind="parallel"):
    """``parts`` on disjoint records, assigned before and independently of the data: the worst part counts."""

    parts: tuple[Event, ...]


@dataclass(frozen=True)
class MaxOverParties(Event, kind="per-party"):
    """One event per party, each about its own records only: ε is the worst party's."""

    parties: tuple[Event, ...]


@dataclass(frozen=True)
class RandomNumberOfReleases(Event, kind="random-round"):
    """``inner`` repeated R times, R drawn before and independently of the data from ``law``.

    ``law`` holds pairs (rounds, probability) that sum to one. Then δ(ε) = E_R[δ_R(ε)] by joint convexity,
    even if R is published.
    """

    inner: Event
    law: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RepeatAndSelect(Event, kind="repeat-and-select"):
    """Private search: ``inner`` run K times, only the best result released, K negative binomial.

    ``mean`` ≥ 1 is E[K]; ``shape`` is the law's parameter (1 is geometric, 0 logarithmic, inf Poisson). All laws
    but the Poisson one make at least one run; under that one K may be 0, and then nothing is released.
    """

    inner: Event
    mean: float
    shape: float = 1.0


@dataclass(frozen=True)
class TotalVariationSlack(Event, kind="slack"):
    """The outputs released are within ``total_variation`` of those the other events describe.

    A mechanism within total variation τ of an (ε, δ) one is (ε, δ + (1 + e^ε)τ): discrete noise
    shares and cut tables enter the guarantee here.
    """

    total_variation: float


@dataclass(frozen=True)
class FailureProbability(Event, kind="failure"):
    """A failure: with probability p at most, independently of the rest, something else is released as well.

    p is ``probability``. The other events describe the releases without the failure. With it, an (ε, δ)-DP
    mechanism is (ε + log(1/(1−p)), δ + p)-DP. A rare label that passes a threshold is such a failure.
    """

    probability: float


@dataclass(frozen=True)
class Upfront(Event, kind="upfront"):
    """A release proved ε-DP (δ = 0) under ``relation``, whose outcome determines the other events.

    An example is a private count of the records that sets sampling rates. The other events depend on its outcome,
    so no accountant of a fixed list of releases may compose them with it. Basic composition holds: if the others
    are (ε′, δ)-DP for every outcome, all together are (ε + ε′, δ)-DP. So its ε is added to that of the others.
    """

    epsilon: float
    relation: Relation


def gaussian(noise_multiplier: float, steps: int = 1) -> Event:
    """Full-batch Gaussian releases, ``steps`` of them.

    >>> gaussian(2.0, steps=10)
    Repeated(inner=Gaussian(noise_multiplier=2.0), count=10)
    """
    return repeated(Gaussian(noise_multiplier), steps)


def poisson_gaussian(rate: float, noise_multiplier: float, steps: int = 1) -> Event:
    """``steps`` Gaussian releases, each on a Poisson sample of the given rate (DP-SGD).

    >>> poisson_gaussian(rate=0.01, noise_multiplier=1.1)
    PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1))
    """
    return repeated(PoissonSampled(rate, Gaussian(noise_multiplier)), steps)


def fixed_size_gaussian(n: int, batch_size: int, noise_multiplier: float, steps: int = 1) -> Event:
    """``steps`` Gaussian releases, each on ``batch_size`` of ``n`` records without replacement."""
    return repeated(FixedSizeSampled(n, batch_size, Gaussian(noise_multiplier)), steps)


def random_allocation(*, steps_per_epoch: int, noise_multiplier: float, epochs: int = 1) -> Event:
    """``epochs`` of Gaussian releases, every record in one secretly drawn release of each epoch.

    >>> random_allocation(steps_per_epoch=100, noise_multiplier=1.0)
    AllocationSampled(steps_per_epoch=100, inner=Gaussian(noise_multiplier=1.0))
    """
    return repeated(AllocationSampled(steps_per_epoch, Gaussian(noise_multiplier)), epochs)


def repeated(inner: Event, count: int) -> Event:
    """``inner`` ``count`` times; once is ``inner`` itself."""
    return inner if count == 1 else Repeated(inner, count)


def composed(parts: Sequence[Event]) -> Event:
    """All of ``parts`` on the same people; one part is itself."""
    return parts[0] if len(parts) == 1 else Composed(tuple(parts))


def round_law(
    probabilities: Sequence[float], *, first: int = 1, groups: int = 128
) -> tuple[tuple[int, float], ...]:
    """The law of a random round with P(R = first + k) = ``probabilities[k]``, in at most ``groups`` groups.

    Rounds of a group are all counted as its largest, so the ε proved from the law stays an upper bound.

    >>> round_law([0.25] * 4, groups=2)
    ((2, 0.5), (4, 0.5))
    """
    size = max(1, math.ceil(len(probabilities) / groups))
    total = math.fsum(probabilities)
    chunks = [(k, probabilities[k : k + size]) for k in range(0, len(probabilities), size)]
    return tuple((first + k + len(chunk) - 1, math.fsum(chunk) / total) for k, chunk in chunks)
