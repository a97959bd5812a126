"""Mechanisms: what a kind of release costs, and how its noise is added. Noise meets data here and nowhere else.

A mechanism is a frozen, public object in a plan's slot. It has the event that prices it, the source that adds its
noise to release k from a keyed stream, the law that an auditor tests, and a description in words and in JSON.
Sessions, certificates and audits treat all mechanisms alike: a new mechanism is one new class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise import grid as noise
from quietgrad.core.noise.device import DeviceStream
from quietgrad.core.noise.grid import (
    NoiseStream,
    add_discretized_gaussian,
    l2_laplace,
    l2_laplace_for,
    noisy_argmax,
    release_l2_laplace,
    sigma_for,
)
from quietgrad.core.registered import Registered

if TYPE_CHECKING:
    from torch import Tensor

Floats = npt.NDArray[np.float64]
Sampled = Callable[[events.Event], events.Event]
"""What secret sampling makes of the event of one release."""

_BLOCK_NUMBERS = 2**16  # large enough to amortise a call into the stream, small enough for the cache


class NoiseSource:
    """The noise of one slot, addressed by the number of the release; one number serves one release only.

    A source answers the verbs of its mechanism and no others.
    """

    def stays(self, total: Tensor) -> bool:
        """Whether the noise of a sum on an accelerator can be made there; else it must come to the CPU."""
        return False

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        """Replace the sum ``total``, to which a record contributes at most ``bound``, by what may be published."""
        raise NotImplementedError

    def choose(self, scores: Floats, release: int, rho: float, bound: float) -> int:
        """The position of the least of ``scores``, by a choice that is ρ-zCDP."""
        raise NotImplementedError

    def first_below(
        self, values: Iterable[tuple[float, float]], threshold: float, release: int, multiplier: float
    ) -> int | None:
        """The position of the first (value, bound) that is noisily at most ``threshold``."""
        raise NotImplementedError

    def passing(self, counts: Floats, release: int, multiplier: float, bound: float) -> npt.NDArray[np.bool_]:
        """Select the counts that may be published, of whatever labels there are."""
        raise NotImplementedError


@dataclass(frozen=True)
class Probe:
    """Releases whose exact answers are known, and how an answer becomes standard normals if the claim holds.

    ``normals`` takes the answer, the number of the release and the auditor's own randomness. ``values`` are the
    exact numbers to choose among; without them zeros are released, or labels that occur ``count`` times each.
    """

    normals: Callable[[Any, int, np.random.Generator], Floats]
    values: tuple[float, ...] = ()
    count: int = 0


def spread_choice(chosen: npt.ArrayLike, shares: Floats, rng: np.random.Generator) -> Floats:
    """Normals from outcomes of known probabilities: anywhere within the outcome's part of the unit interval."""
    from scipy.special import ndtri

    at = np.atleast_1d(np.asarray(chosen))
    edges = np.concatenate([[0.0], np.cumsum(shares)])
    u = edges[at] + shares[at] * rng.random(at.shape)
    return np.asarray(ndtri(np.clip(u, 1e-15, 1.0 - 1e-15)))


class Mechanism(Registered, ABC, family="mechanism", key="kind"):
    """Base of all mechanisms; a frozen value that can be written as JSON and read back."""

    verb: ClassVar[str] = "release"
    """The session's method that makes the release. Another method would have another cost."""
    what: ClassVar[str] = "a sum"
    noise: ClassVar[str] = "Gaussian"
    in_secure_sums: ClassVar[bool] = True
    """Whether its noise can be made inside a secure sum, where only Gaussian shares add up to it."""
    one_curator: ClassVar[bool] = False
    """Whether it needs one curator who sees the exact numbers of all records."""
    together: ClassVar[str] = ""
    """For correlated noise: the releases that are priced jointly, in words.

    No other release may come between them.
    """
    whole_run: ClassVar[bool] = False
    """Whether these are all releases of a run."""
    only_central: ClassVar[str] = ""
    """Why parties cannot release with it; empty if they can."""
    white: ClassVar[bool] = False
    """Whether the noise of a release is Gaussian and independent from coordinate to coordinate."""
    amplified: ClassVar[bool] = False
    """Whether the secrecy of a sample lowers its cost."""

    def bound_of(self, query: Any) -> float:
        """C, what ``query`` says one record adds at most, in the norm that this mechanism is proved for: L2."""
        return float(query.bound)

    @abstractmethod
    def once(self, multiplier: float, relation: Relation) -> events.Event:
        """The event of one release that every record takes part in."""

    def event(self, sampled: Sampled, multiplier: float, relation: Relation, count: int) -> events.Event:
        """The event of ``count`` releases, each on a secret sample."""
        return events.repeated(self.once(multiplier, relation), count)

    @abstractmethod
    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        """Noise for at most ``count`` releases under ``key`` and a label that no other source uses."""

    @abstractmethod
    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """The law that is claimed, worked out from the plan's numbers and not by the source."""

    @classmethod
    def example(cls, releases: int) -> Mechanism:
        """One of this kind for so many releases."""
        return cls()

    @property
    def cohorts(self) -> int:
        """How many cohorts records must take turns in."""
        return 1

    def strategy(self) -> tuple[Floats, range] | None:
        """For correlated noise S⁻¹u: the first column of S, and the columns that one record moves together."""
        return None

    @property
    def factor(self) -> float:
        """The factor on a slot's noise multiplier when noise is added."""
        return 1.0

    @property
    def loudness(self) -> float:
        """Standard deviation of the noise of one release ÷ z·C."""
        return 1.0

    def describe(self, multiplier: float) -> str:
        """The noise in words."""
        return f"{self.noise} noise of scale {multiplier:.4g}·C"

    def stated(self, multiplier: float) -> str:
        """The noise in the few words of a table."""
        return f"{self.noise}, σ = {multiplier:.4g} C"

    def check(self, count: int, participation: tuple[int, int] | None, sampling: str) -> None:
        """Raise if no proof covers ``count`` releases under this sampling; most mechanisms accept any sampling.

        Args:
            participation: the largest number of releases that a record is in, and the least distance between two of
                them; ``None`` if they are drawn at random.
            sampling: in words.
        """
        return

    def over(self, releases: int, participations: int, separation: int) -> Mechanism:
        """The same for a run of another length; most are the same for all."""
        return self

    def reach(self, dim: int) -> float:
        """A length, in noise scales, that ``dim`` numbers of noise exceed with probability below 10⁻¹²."""
        return math.sqrt(dim) + 10.0

    def to_json(self) -> Any:
        """The kind, or an object with the kind and the settings if there are any."""
        return super().to_json() if self.__match_args__ else self.kind


def from_json(data: object) -> Mechanism:
    """Rebuild a mechanism from :meth:`Mechanism.to_json`; whatever is not known exactly is refused.

    >>> from_json("gaussian"), from_json(GaussianPartitionSelection(1e-9).to_json())
    (GaussianNoise(), GaussianPartitionSelection(failure=1e-09))
    """
    kinds()  # registers all of them
    return Mechanism.read(data)


def kinds() -> dict[str, type[Mechanism]]:
    """All mechanisms, by kind."""
    # These register kinds of noise that build on this module.
    import quietgrad.core.noise.correlated
    import quietgrad.core.noise.k_norm  # noqa: F401

    return Mechanism.kinds


@dataclass(frozen=True)
class GaussianNoise(Mechanism, kind="gaussian"):
    """N(0, (z·C)²) on every coordinate of a sum, on the integer grid."""

    white: ClassVar[bool] = True
    amplified: ClassVar[bool] = True

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Gaussian(multiplier)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """Zeros with noise of standard deviation z·C."""
        return Probe(lambda heard, number, rng: heard / (multiplier * bound))

    def event(self, sampled: Sampled, multiplier: float, relation: Relation, count: int) -> events.Event:
        return events.repeated(sampled(self.once(multiplier, relation)), count)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _GaussianSource(key, label, count)


class _GaussianSource(NoiseSource):
    def __init__(self, key: bytes, label: str, count: int) -> None:
        self._key, self._label = key, label
        self._units = StandardNormals(key, f"unit/{label}", count)

    def stays(self, total: Tensor) -> bool:
        return total.dim() == 1 and noise.usable(total.device)

    def add(self, total: Floats | Tensor, release: int, multiplier: float, bound: float) -> None:
        scale = sigma_for(multiplier, bound, len(total))
        if not isinstance(total, np.ndarray):
            label = f"unit/{self._label}/{len(total)}"  # lengths do not share words of a stream
            unit = DeviceStream(self._key, label, total.device).normal(release, len(total))
            noise.add_gaussian(total, unit, *scale)
            return
        self._units.add(total, release, *scale)


@dataclass(frozen=True)
class L2LaplaceNoise(Mechanism, kind="pure"):
    """Noise of density ∝ exp(−‖x‖/(z·C)): pure ε = Δ/(z·C) (paper 004, Theorem 1)."""

    what: ClassVar[str] = "a model"
    noise: ClassVar[str] = "L2-Laplace"
    in_secure_sums: ClassVar[bool] = False

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Pure(sensitivity_factor(relation) / multiplier, relation)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _L2LaplaceSource(key, label)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """The length is Gamma(d, z·C), and becomes that of d normals."""
        from scipy.special import chdtri, gammaincc

        def normals(heard: Floats, number: int, rng: np.random.Generator) -> Floats:
            length, width = float(np.linalg.norm(heard)), len(heard)
            if length == 0.0:
                return heard
            beyond = max(float(gammaincc(width, length / (multiplier * bound))), 1e-300)
            return heard * (math.sqrt(float(chdtri(width, beyond))) / length)

        return Probe(normals)

    def reach(self, dim: int) -> float:
        """The length is Gamma(dim)."""
        return dim + 40.0 + 10.0 * math.sqrt(dim)


class _StreamSource(NoiseSource):
    """A source that draws from one stream."""

    def __init__(self, key: bytes, label: str) -> None:
        self._stream = NoiseStream(key, f"noise/{label}")


class _L2LaplaceSource(_StreamSource):
    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        # On the grid both C and Δ grow by √d steps, so scale ÷ C = multiplier holds with the growth in it.
        release_l2_laplace(total, *l2_laplace_for(1.0 / multiplier, bound, len(total)), self._stream, release)


@dataclass(frozen=True)
class ExponentialMechanism(Mechanism, kind="choice"):
    """The least of several sums by the exponential mechanism, whose bounded range makes it ε²/8-zCDP.

    Where exact sums are secret from all (parties with their own noise, secure sums) the sums are released with
    Gaussian noise of the same ρ instead, and the choice is post-processing.
    """

    verb: ClassVar[str] = "choose"
    what: ClassVar[str] = "the position of the least of several sums"
    noise: ClassVar[str] = "Gumbel"

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.ZCDP((sensitivity_factor(relation) / multiplier) ** 2 / 2.0, relation)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """Sums at gaps that change the odds of a choice by known factors; ε = √(8ρ) is 2Δ/(z·C)."""
        gaps = np.array([0.0, 0.3, 0.6, 1.0, 1.5])
        shares = np.exp(-gaps) / np.exp(-gaps).sum()
        values = bound * multiplier / sensitivity_factor(relation) * gaps
        return Probe(lambda chosen, number, rng: spread_choice(chosen, shares, rng), tuple(values.tolist()))

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _ChoiceSource(key, label, count)


class _ChoiceSource(_GaussianSource):
    def __init__(self, key: bytes, label: str, count: int) -> None:
        super().__init__(key, label, count)
        self._choices = NoiseStream(key, f"choice/{label}")

    def choose(self, scores: Floats, release: int, rho: float, bound: float) -> int:
        # Scores are sums of numbers in [0, bound], which one record moves by at most the bound under either
        # relation; the exponential mechanism of parameter ε is ε²/8-zCDP.
        return noisy_argmax(-scores, math.sqrt(8.0 * rho), bound, self._choices, release)


@dataclass(frozen=True)
class AboveThreshold(Mechanism, kind="threshold"):
    """The first small number of a list (Dwork and Roth 2014, Algorithm 1): one pure release however long the list.

    Laplace noise of twice the release's scale on the threshold and of four times on each number. Both are rounded
    to a public grid before they meet the noise, which is on it too.
    """

    verb: ClassVar[str] = "first_below"
    what: ClassVar[str] = "the first of many numbers to pass a test"
    noise: ClassVar[str] = "Laplace"
    in_secure_sums: ClassVar[bool] = False
    one_curator: ClassVar[bool] = True

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Pure(sensitivity_factor(relation) / multiplier, relation)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """Numbers that fall towards the threshold 0; which passes first has a law by one integral.

        The Laplace noise has scales 2 and 4.
        """
        values = 4.0 * np.linspace(1.5, 0.5, 6)  # in units of the release's scale
        grid = np.linspace(-80.0, 80.0, 64_001)
        alive = np.exp(-np.abs(grid) / 2.0)
        alive /= alive.sum()
        stops = []
        for value in values:
            gap = (grid - value) / 4.0
            tail = 0.5 * np.exp(-np.abs(gap))
            passes = np.where(gap < 0.0, tail, 1.0 - tail)
            stops.append(float((alive * passes).sum()))
            alive = alive * (1.0 - passes)
        shares = np.array([*stops, float(alive.sum())])
        scaled = tuple((multiplier * bound * values).tolist())
        return Probe(lambda first, number, rng: spread_choice(first, shares, rng), scaled)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _ThresholdSource(key, label)


class _ThresholdSource(_StreamSource):
    def first_below(
        self, values: Iterable[tuple[float, float]], threshold: float, release: int, multiplier: float
    ) -> int | None:
        first = release << 32  # blocks of the stream: as many searches as there are releases
        level = bound = scale = step = 0.0
        for position, (value, its_bound) in enumerate(values):
            if position == 0:
                bound = its_bound
                scale, step = l2_laplace_for(1.0 / multiplier, bound, 1)
                level = round(threshold / step) * step
                level += float(l2_laplace(1, 2.0 * scale, self._stream, first, step)[0])
            if its_bound != bound:
                raise BudgetError("one search compares numbers of one bound; scale the queries to it.")
            # Whatever is not a number counts as far above: an error would tell which record caused it.
            noisy = round(value / step) * step if math.isfinite(value) else math.inf
            noisy += float(l2_laplace(1, 4.0 * scale, self._stream, first + position + 1, step)[0])
            if noisy <= level:
                return position
        return None


@dataclass(frozen=True)
class PartitionSelection(Mechanism, ABC):
    """The labels of a table: a noisy count per label, and only those above a threshold leave.

    For labels that both of two neighbouring tables have, the counts are an ordinary noisy release. A label that
    only one of them has occurs there once, and passes the threshold with probability at most ``failure``,
    independently of the other counts; otherwise it might as well not be there. Hence such a release that may fail.
    """

    failure: float

    verb: ClassVar[str] = "discover"
    what: ClassVar[str] = "the labels whose noisy count passes a threshold"
    in_secure_sums: ClassVar[bool] = False
    one_curator: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.failure < 1.0:
            raise ValueError(f"failure={self.failure!r}: must be a probability in (0, 1).")

    @classmethod
    def example(cls, releases: int) -> PartitionSelection:
        return cls(1e-9)

    @abstractmethod
    def release(self, multiplier: float, relation: Relation) -> events.Event:
        """The event of the noisy counts of labels that both tables have."""

    @abstractmethod
    def counts_noise(self, multiplier: float, bound: float) -> tuple[float, float]:
        """Scale and the grid's step of the counts.

        Neighbours differ in two counts at most, so no other is rounded apart: dim is 2. The number of labels must
        not enter: it would make the noise depend on the data.
        """

    @abstractmethod
    def noise_above(self, chance: float) -> float:
        """The level that noise of scale 1 exceeds with probability ``chance``."""

    @abstractmethod
    def share_above(self, level: float) -> float:
        """The probability that noise of scale 1 exceeds ``level``."""

    @abstractmethod
    def unit_noise(self, stream: NoiseStream, release: int, count: int) -> Floats:
        """Noise of scale 1 for ``count`` labels."""

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Composed((self.release(multiplier, relation), events.FailureProbability(self.failure)))

    def threshold(self, multiplier: float, bound: float) -> float:
        """The noisy count a label must pass: that of one record does with probability at most ``failure``."""
        scale, step = self.counts_noise(multiplier, bound)
        # Count and noise are each rounded to a step.
        return float(1.0 + 2.0 * step + scale * self.noise_above(self.failure))

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """Labels that pass about two times of three: with less noise than claimed all of them would."""
        scale = multiplier * bound
        threshold = 1.0 + scale * self.noise_above(self.failure)
        count = math.ceil(threshold + 0.5 * scale)
        passes = self.share_above((threshold - count) / scale)
        shares = np.array([1.0 - passes, passes])
        return Probe(lambda label, number, rng: spread_choice(label, shares, rng), count=count)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _LabelSource(self, key, label)


@dataclass(frozen=True)
class GaussianPartitionSelection(PartitionSelection, kind="labels"):
    """The labels of a table, by Gaussian counts."""

    def release(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Gaussian(multiplier)

    def counts_noise(self, multiplier: float, bound: float) -> tuple[float, float]:
        """σ and the grid's step of the counts."""
        return sigma_for(multiplier, bound, dim=2)

    def noise_above(self, chance: float) -> float:
        from scipy.special import ndtri

        return -float(ndtri(chance))

    def share_above(self, level: float) -> float:
        from scipy.special import ndtr

        return float(ndtr(-level))

    def unit_noise(self, stream: NoiseStream, release: int, count: int) -> Floats:
        return stream.normal(release, count)


class _LabelSource(_StreamSource):
    def __init__(self, mechanism: PartitionSelection, key: bytes, label: str) -> None:
        super().__init__(key, label)
        self._mechanism = mechanism

    def passing(self, counts: Floats, release: int, multiplier: float, bound: float) -> npt.NDArray[np.bool_]:
        total = np.array(counts, dtype=np.float64)
        unit = self._mechanism.unit_noise(self._stream, release, len(total))
        add_discretized_gaussian(total, unit, *self._mechanism.counts_noise(multiplier, bound))
        return np.asarray(total > self._mechanism.threshold(multiplier, bound))


class StandardNormals:
    """Standard normals, addressed by release and length; each address serves one draw only.

    The numbers of many releases are made at a time, because a call into the stream costs more than a short vector.

    Args:
        key: key of the stream they come from.
        label: label of the stream they come from.
        count: how many releases there can be, if that is known: a short run draws no more.
    """

    def __init__(self, key: bytes, label: str, count: int = _BLOCK_NUMBERS) -> None:
        self._key, self._label, self._count = key, label, count
        self._kept: dict[int, tuple[int, Floats]] = {}  # by length: first release, its and later rows

    def row(self, release: int, dim: int) -> Floats:
        """The numbers of ``release``; lengths do not share words of a stream."""
        first, rows = self._kept.get(dim, (0, _NOTHING))
        if not 0 <= release - first < len(rows):
            size = max(1, min(_BLOCK_NUMBERS // max(dim, 1), self._count))
            number = release // size
            first, rows = self._kept[dim] = number * size, self._stream(dim).normal(number, (size, dim))
        units: Floats = rows[release - first]
        return units

    def add(self, total: Floats, release: int, sigma: float, step: float) -> None:
        """Replace a sum by what may be published, with these numbers as its noise."""
        if len(total) <= _BLOCK_NUMBERS:
            add_discretized_gaussian(total, self.row(release, len(total)), sigma, step)
        else:
            self._stream(len(total)).add_normal(release, total, sigma, step)

    def _stream(self, dim: int) -> NoiseStream:
        return NoiseStream(self._key, f"{self._label}/{dim}")


_NOTHING: Floats = np.empty((0, 0))
