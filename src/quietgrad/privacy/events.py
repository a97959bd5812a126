"""Events: value objects that say what was released, in units that mean the same everywhere.

``noise_multiplier`` is always σ of the noise on the *sum* divided by C, the L2 bound of one record's
contribution. The neighbouring relation is not part of an event: an accountant is asked for ε under a relation
and turns C into the sensitivity (C for add-remove, 2C for replace-one). Only ``Pure``, ``ZCDP`` and ``Upfront``
state results that were already proved, so they carry the relation they were proved under.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quietgrad.privacy.budget import Relation

_KINDS: dict[str, type[Event]] = {}


class Event:
    """Base of all events; a frozen value that can be written as JSON and read back."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        _KINDS[kind] = cls

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain JSON values, with its kind under ``"event"``."""
        fields = {f.name: _to_json(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"event": self.kind, **fields}


def from_json(data: dict[str, Any]) -> Event:
    """Rebuild an event from :meth:`Event.to_json`.

    >>> from_json(PoissonSampled(0.01, Gaussian(1.1)).to_json())
    PoissonSampled(rate=0.01, inner=Gaussian(noise_multiplier=1.1))
    """
    try:
        kind = _KINDS[data["event"]]
        fields = {f.name: _from_json(data[f.name]) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event: {data!r} ({error!r})") from None
    inside = [fields[name] for name in ("inner",) if name in fields]
    inside += [part for name in ("parts", "parties") for part in fields.get(name) or ()]
    if not all(isinstance(part, Event) for part in inside):
        raise ValueError(f"not an event: a {data['event']} event holds something that is none")
    return kind(**fields)


def _to_json(value: Any) -> Any:
    if isinstance(value, Event):
        return value.to_json()
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, Relation) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return from_json(value)
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    return value


# What events are made of. Accountants square, multiply and divide these numbers: in these ranges none of that
# leaves the range of doubles, and nothing that anybody runs is outside them.
LEAST_NUMBER, LARGEST_NUMBER = 1e-18, 1e18  # ε and noise multipliers; of ρ, their squares
_LEAST_RATE = 1e-15
_LARGEST_COUNT = 10**15
_LARGEST_EPOCH = 10**9


def _positive(name: str, value: Any, low: float = LEAST_NUMBER, high: float = LARGEST_NUMBER) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be a number > 0, from {low:g} to {high:g}.")
    return float(value)


def _count(name: str, value: Any, least: int = 1, most: int = _LARGEST_COUNT) -> int:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not least <= value <= most or int(value) != value:
        raise ValueError(f"{name}={value!r}: must be a whole number from {least} to {most:.0e}.")
    return int(value)


def _probability(name: str, value: Any) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value!r}: must be in [0, 1).")
    return float(value)


@dataclass(frozen=True)
class Gaussian(Event, kind="gaussian"):
    """One release of a sum with N(0, (z·C)² I), every record taking part."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _positive("noise_multiplier", self.noise_multiplier))


@dataclass(frozen=True)
class Laplace(Event, kind="laplace"):
    """One release of a scalar sum with Laplace noise of scale z·C."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", _positive("noise_multiplier", self.noise_multiplier))


@dataclass(frozen=True)
class Pure(Event, kind="pure"):
    """A release proved ε-DP (δ = 0) under ``relation``: L2-Laplace noise, noisy max, AboveThreshold."""

    epsilon: float
    relation: Relation

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _positive("epsilon", self.epsilon))
        object.__setattr__(self, "relation", Relation.parse(self.relation))


@dataclass(frozen=True)
class ZCDP(Event, kind="zcdp"):
    """A release, or an adaptive sequence under a hard filter, proved ρ-zCDP under ``relation``."""

    rho: float
    relation: Relation

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", _positive("rho", self.rho, LEAST_NUMBER**2 / 4, 4 * LARGEST_NUMBER**2))
        object.__setattr__(self, "relation", Relation.parse(self.relation))


@dataclass(frozen=True)
class PoissonSampled(Event, kind="poisson"):
    """``inner`` on a sample that every record enters independently with probability ``rate``."""

    rate: float
    inner: Event

    def __post_init__(self) -> None:
        if not isinstance(self.rate, (int, float)) or not _LEAST_RATE <= self.rate <= 1.0:
            raise ValueError(
                f"rate={self.rate!r}: must be in (0, 1], at least {_LEAST_RATE:g}; it is the expected batch ÷ n."
            )


@dataclass(frozen=True)
class FixedSizeSampled(Event, kind="fixed-size"):
    """``inner`` on ``batch_size`` of ``n`` records drawn without replacement."""

    n: int
    batch_size: int
    inner: Event

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", _count("n", self.n))
        object.__setattr__(self, "batch_size", _count("batch_size", self.batch_size))
        if self.batch_size > self.n:
            raise ValueError(f"batch_size={self.batch_size}: must be ≤ n={self.n}.")

    @property
    def rate(self) -> float:
        """batch_size / n."""
        return self.batch_size / self.n


@dataclass(frozen=True)
class RandomAllocation(Event, kind="random-allocation"):
    """One epoch of ``steps_per_epoch`` releases of ``inner``: every record draws one and is in that one alone.

    The draws are secret, uniform, and independent of each other and of all other epochs.
    """

    steps_per_epoch: int
    inner: Event

    def __post_init__(self) -> None:
        steps = _count("steps_per_epoch", self.steps_per_epoch, most=_LARGEST_EPOCH)
        object.__setattr__(self, "steps_per_epoch", steps)


@dataclass(frozen=True)
class Repeated(Event, kind="repeated"):
    """``inner`` released ``count`` times, each release allowed to depend on those before."""

    inner: Event
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _count("steps", self.count))


@dataclass(frozen=True)
class Composed(Event, kind="composed"):
    """All of ``parts`` on the same people, adaptively."""

    parts: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("Composed(()): needs at least one event; nothing released costs nothing.")


@dataclass(frozen=True)
class Parallel(Event, kind="parallel"):
    """``parts`` on disjoint records, assigned before and independently of the data: the worst part counts."""

    parts: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ValueError("Parallel(()): needs at least one event.")


@dataclass(frozen=True)
class MaxOverParties(Event, kind="per-party"):
    """One event per party, each about its own records only: ε is the worst party's."""

    parties: tuple[Event, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parties", tuple(self.parties))
        if not self.parties:
            raise ValueError("PerParty(()): needs at least one party.")


@dataclass(frozen=True)
class RandomNumberOfReleases(Event, kind="random-round"):
    """``inner`` repeated R times, R drawn before and independently of the data from ``law``.

    ``law`` holds pairs (rounds, probability) that sum to one. Then δ(ε) = E_R[δ_R(ε)] by joint convexity,
    even if R is published.
    """

    inner: Event
    law: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        law = tuple((_count("rounds", r, 0), float(p)) for r, p in self.law)
        object.__setattr__(self, "law", law)
        if not law or not all(p >= 0.0 for _, p in law) or not abs(sum(p for _, p in law) - 1.0) <= 1e-9:
            raise ValueError("law: must be pairs (rounds ≥ 0, probability ≥ 0) whose probabilities sum to 1.")


@dataclass(frozen=True)
class RepeatAndSelect(Event, kind="repeat-and-select"):
    """Private search: ``inner`` run K times, only the best result released, K negative binomial.

    ``mean`` is E[K]; ``shape`` is the law's shape parameter (1 is geometric, 0 logarithmic, inf Poisson).
    All laws but the Poisson one make at least one run; under that one K may be 0, and then nothing is
    released.
    """

    inner: Event
    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _positive("mean", self.mean))
        if self.mean < 1.0:
            raise ValueError(f"mean={self.mean!r}: must be ≥ 1, the number of runs that is expected.")
        if not self.shape >= 0.0:
            raise ValueError(f"shape={self.shape!r}: must be ≥ 0 (1 is the geometric law).")


@dataclass(frozen=True)
class TotalVariationSlack(Event, kind="slack"):
    """The outputs released are within ``total_variation`` of those the other events describe.

    A mechanism within total variation τ of an (ε, δ) one is (ε, δ + (1 + e^ε)τ): discrete noise
    shares and cut tables enter the guarantee here.
    """

    total_variation: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_variation", _probability("total_variation", self.total_variation))


@dataclass(frozen=True)
class FailureProbability(Event, kind="failure"):
    """With ``probability`` at most p, and independently of the rest, something else was released as well.

    The other events describe what is released otherwise. An (ε, δ) mechanism that fails so is
    (ε + log(1/(1−p)), δ + p): a rare label that passes a threshold enters the guarantee here.
    """

    probability: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "probability", _probability("probability", self.probability))


@dataclass(frozen=True)
class Upfront(Event, kind="upfront"):
    """A release proved ε-DP (δ = 0) under ``relation``, by whose outcome the other events were chosen.

    A private count of the records that sets sampling rates is one. The other events then depend on the outcome, and
    no accountant of a fixed list of releases may compose them with it. What holds is basic composition: if the
    others are (ε′, δ)-DP whatever the outcome is, all together are (ε + ε′, δ)-DP. So its ε is added to the rest's.
    """

    epsilon: float
    relation: Relation

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _positive("epsilon", self.epsilon))
        object.__setattr__(self, "relation", Relation.parse(self.relation))


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
    RandomAllocation(steps_per_epoch=100, inner=Gaussian(noise_multiplier=1.0))
    """
    return repeated(RandomAllocation(steps_per_epoch, Gaussian(noise_multiplier)), epochs)


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
