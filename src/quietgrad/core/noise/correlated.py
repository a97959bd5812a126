"""Correlated noise (the matrix mechanism): later releases cancel part of the Gaussian noise of earlier ones.

Release k of T is sum_k + z·C·s·w_k with w = S⁻¹u, u independent standard normals and S lower triangular and
Toeplitz. Later releases take back most of what earlier ones added, so that *sums* of releases, which is what a
descent method makes of them, carry far less noise. A single release carries more (``loudness``).

**Why it is private** (proof: ``docs/correlated-proof.md``). S is lower triangular and invertible, so the transcript
is a causal bijection of S·sums + z·C·s·u. A record that takes part in the releases π moves step k of it by r_k, a
vector that is known given the steps before, and Σ‖r_k‖² ≤ C²·Σ_{i,j∈π}|G_ij| with G = SᵀS on every path.

**Buffers** (:class:`BufferedToeplitzNoise`): c₀ = 1, c_k = Σ_i α_i λ_i^(k−1). All T releases together are **one**
Gaussian release of noise multiplier z, if s² is at least Σ|G_ij| over every possible π. G_ij falls in j and in
j − i, because c₁ ≥ c₂ ≥ … ≥ 0. With at most k participations at least b apart no π exceeds {0, b, 2b, …}: s is the
norm of the sum of those columns, and it is attained.

**Bands, on secret samples** (:class:`BandedToeplitzNoise`): at most b coefficients c₀ = 1 > c₁ ≥ … ≥ 0, s = ‖c‖.
Records are in b cohorts that take turns (:class:`~quietgrad.core.sampling.CyclicPoisson`): release t asks a Poisson
sample, at rate q, of cohort t mod b. Cut the transcript into windows of b steps that begin at a record's turns.
What it gave to the first release of a window moves the rows of that window, by c₀Δ, c₁Δ, …, and no row after them:
there are no more bands. So in a window one contribution is heard, a Δ with ‖Δ‖ ≤ C that follows from earlier
releases. Given the coins of the others and all steps before, the window is N(0, σ²I) without the record and
(1 − q)·N(0, σ²I) + q·N(c⊗Δ, σ²I) with it, σ = z·C·s and ‖c⊗Δ‖ ≤ s·C: one Poisson sample of one Gaussian release.
The record's coin is independent of everything before, so its ⌈T/b⌉ windows compose adaptively. A run is
``Repeated(PoissonSampled(q, Gaussian(z)), ⌈T/b⌉)``, for either relation: under replace-one the new record has the
cohort and the coins of the old one. What breaks it: more bands than cohorts (a row would hear two contributions),
samples of all records (a record twice within a window), a rate that forgets that a cohort is b times smaller.

*When* a record takes part must not depend on other records (see :class:`~quietgrad.core.sampling.CyclicCohorts`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import BudgetError, SettingError
from quietgrad.core.noise.grid import add_discretized_gaussian, sigma_for
from quietgrad.core.noise.mechanisms import Mechanism, NoiseSource, Probe, Sampled, StandardNormals

Floats = npt.NDArray[np.float64]

_BUFFERS = 4
_ROUNDED_UP = 1.0 + 1e-12
_MOST_BANDS = 1024  # as many vectors are kept
_MOST_RELEASES = 2**20  # beyond, a λ comes so near to 1 that float64 sums of T terms lose digits


class CorrelatedNoise(Mechanism, ABC):
    """Gaussian noise w = S⁻¹u over the releases of a run, S lower triangular and Toeplitz with c₀ = 1.

    Subclasses say which S, how its inverse is applied step by step, and what one record can do to S·sums.
    """

    releases: int

    noise: ClassVar[str] = "correlated Gaussian"
    white: ClassVar[bool] = True

    @abstractmethod
    def coefficients(self) -> Floats:
        """c₀, c₁, …, the first column of S."""

    @abstractmethod
    def strategy(self) -> tuple[Floats, range]:
        """The first column of S, and which columns one record moves together at most."""

    @abstractmethod
    def rows(self, key: bytes, label: str) -> NoiseRecurrence:
        """The noise of unit scale, by number of the release."""

    @property
    @abstractmethod
    def inverse(self) -> Floats:
        """g, the first column of S⁻¹."""

    @property
    def loudness(self) -> float:
        """Standard deviation of the noise of one late release ÷ z·C: s·‖g‖."""
        return self.factor * float(np.linalg.norm(self.inverse))

    def once(self, multiplier: float, relation: Relation) -> events.Event:
        return events.Gaussian(multiplier)

    def probe(self, multiplier: float, bound: float, relation: Relation) -> Probe:
        """The innovations u, which are S·releases ÷ (z·C·s); releases themselves are not independent."""
        column, columns = self.strategy()
        scale = multiplier * bound * _worst_move(column, columns)
        heard: list[Floats] = []

        def normals(release: Floats, number: int, rng: np.random.Generator) -> Floats:
            del heard[number:]
            heard.append(release / scale)
            return np.asarray(column[: len(heard)][::-1] @ np.stack(heard))

        return Probe(normals)

    def source(self, key: bytes, label: str, count: int) -> NoiseSource:
        return _CorrelatedSource(self, key, label)

    def reach(self, dim: int) -> float:
        return self.loudness * super().reach(dim)

    def _check(self, numbers: Mapping[str, object], lists: Mapping[str, object]) -> None:
        for name, value in numbers.items():
            if type(value) is not int or not 1 <= value <= _MOST_RELEASES:
                raise SettingError(
                    f"{{{name}}}: must be a whole number between 1 and {_MOST_RELEASES}.", **{name: value}
                )
        for name, values in lists.items():
            if not isinstance(values, tuple | list) or not all(isinstance(v, float) for v in values):
                raise ValueError(f"{name}: must be a list of numbers.")
            object.__setattr__(self, name, tuple(values))


@dataclass(frozen=True)
class BufferedToeplitzNoise(CorrelatedNoise, kind="correlated"):
    """Gaussian noise correlated over ``releases`` releases; the whole run costs one ``Gaussian(z)``.

    Build it with :meth:`made`. Plans carry the coefficients; their reader computes the sensitivity again.

    Args:
        releases: T, the most releases there can be; the noise does not depend on where a run stops.
        participations: k, the most releases that a record takes part in.
        separation: b, the least distance between two releases of a record.
        lam: λ of the buffers, all in (0, 1).
        alpha: α of the buffers, all in (0, 1) with Σα ≤ 1, which makes c positive and falling and the recursion
            stable.

    >>> once = BufferedToeplitzNoise.made(256)
    >>> round(once.sensitivity(), 3), round(once.loudness, 2)
    (1.546, 1.73)
    >>> once.event(lambda event: event, 2.0, Relation.ADD_REMOVE, 256)
    Gaussian(noise_multiplier=2.0)
    """

    releases: int
    participations: int
    separation: int
    lam: tuple[float, ...]
    alpha: tuple[float, ...]

    whole_run: ClassVar[bool] = True
    together: ClassVar[str] = (
        "all releases of the run are together one Gaussian release, whatever is asked in each: their noise is "
        "correlated"
    )

    def __post_init__(self) -> None:
        numbers = {"releases": self.releases, "participations": self.participations, "separation": self.separation}
        self._check(numbers, {"lam": self.lam, "alpha": self.alpha})
        if not 1 <= len(self.lam) == len(self.alpha) <= 64:
            raise ValueError("lam, alpha: must be as many of the one as of the other.")
        # Written so that a NaN is refused.
        if not all(0.0 < value < 1.0 for value in self.lam):
            raise ValueError("lam: every decay must be in (0, 1): the sensitivity is that of falling coefficients.")
        if not (all(value > 0.0 for value in self.alpha) and math.fsum(self.alpha) <= 1.0):
            raise ValueError("alpha: every weight must be above 0, and all together at most 1.")

    @staticmethod
    @lru_cache(maxsize=64)
    def made(releases: int, participations: int = 1, separation: int | None = None) -> BufferedToeplitzNoise:
        """The strategy for T releases of which a record is in at most k, at least b apart (default: in one).

        Quadrature of (1−x)^(−1/2), whose square makes prefix sums: C(2k,k)/4^k = (1/π)∫λ^k (λ(1−λ))^(−1/2) dλ with
        λ = 1/(1+e^x), on 4 points of [log(1/2H), log 3]. H is T for one participation and else the one of T, T/2,
        T/4, … with the least error of prefix sums; nothing of this is a matter of privacy.

        >>> BufferedToeplitzNoise.made(64, 4, 16).separation
        16
        """
        apart = releases if separation is None else separation
        halvings = 0 if participations == 1 else releases.bit_length()
        candidates = []
        for horizon in sorted({max(1.0, releases / 2**j) for j in range(1 + halvings)}, reverse=True):
            x = np.linspace(math.log(0.5 / horizon), math.log(3.0), _BUFFERS)
            lam = 1.0 / (1.0 + np.exp(x))
            alpha = ((x[1] - x[0]) / math.pi) * lam**1.5 * np.sqrt(1.0 - lam)
            buffers = tuple(lam.tolist()), tuple(alpha.tolist())
            candidates.append(BufferedToeplitzNoise(releases, participations, apart, *buffers))
        return min(candidates, key=BufferedToeplitzNoise._error) if len(candidates) > 1 else candidates[0]

    def coefficients(self) -> Floats:
        powers = np.arange(self.releases - 1)[:, None] * np.log(self.lam)
        return np.concatenate([[1.0], np.exp(powers) @ np.array(self.alpha)])

    @lru_cache(maxsize=256)  # noqa: B019 a value, of which few are made
    def sensitivity(self, releases: int | None = None) -> float:
        """s: how far one record of bound 1 can move S·sums; after the first ``releases`` only, if given."""
        count = self.releases if releases is None else releases
        if not 1 <= count <= self.releases:
            raise BudgetError(f"{count} releases: the correlated noise was made for {self.releases}.")
        columns = range(0, count, self.separation)[: self.participations]
        return _worst_move(self.coefficients()[:count], columns) * _ROUNDED_UP

    def strategy(self) -> tuple[Floats, range]:
        """Return the first column of S, and the columns 0, b, 2b, … that a record in k releases moves."""
        return self.coefficients(), range(0, self.releases, self.separation)[: self.participations]

    @property
    def cohorts(self) -> int:
        """The number of cohorts, b: a record's releases are then at least b apart."""
        return self.separation

    @classmethod
    def example(cls, releases: int) -> BufferedToeplitzNoise:
        """Return the strategy for a record in four releases."""
        return cls.made(releases, 4, releases // 4)

    @property
    def factor(self) -> float:
        """s of the whole run, by which the noise is louder than z·C."""
        return self.sensitivity()

    @cached_property
    def inverse(self) -> Floats:
        """g, the first column of S⁻¹: S is N/D with D = Π(1 − λ_i x), so S⁻¹ is D/N."""
        from scipy.signal import lfilter

        below = np.array([1.0])
        for value in self.lam:
            below = np.convolve(below, [1.0, -value])
        above = below.copy()
        for i, weight in enumerate(self.alpha):
            others = np.array([1.0])
            for j, value in enumerate(self.lam):
                if j != i:
                    others = np.convolve(others, [1.0, -value])
            above[1 : 1 + len(others)] += weight * others
        return np.asarray(lfilter(below, above, np.eye(1, self.releases)[0]), np.float64)

    def _error(self) -> float:
        """Σ over prefixes of the variance of their sum, for noise of multiplier 1."""
        sums = np.cumsum(self.inverse)
        return float(np.arange(len(sums), 0, -1.0) @ (sums * sums)) * self.factor**2

    def event(self, sampled: Sampled, multiplier: float, relation: Relation, count: int) -> events.Event:
        """``Gaussian(z·s_T/s_j)`` after j releases: the noise is that of T, the sensitivity that of j.

        True only if j does not depend on the data; a stop that follows from releases costs the whole plan.
        """
        if count == self.releases:
            return events.Gaussian(multiplier)
        return events.Gaussian(multiplier * (self.factor / self.sensitivity(count)))

    def over(self, releases: int, participations: int, separation: int) -> BufferedToeplitzNoise:
        return BufferedToeplitzNoise.made(releases, participations, separation)

    def check(self, count: int, participation: tuple[int, int] | None, sampling: str) -> None:
        """Refuse releases that the sensitivity is not proved for."""
        if participation is None:
            raise SettingError(
                f"correlated noise on {sampling}: needs a fixed number of releases per record, at fixed "
                "distances; use {sampling='single-pass'} or 'turns', or 'poisson-turns' for secret samples. The "
                "whole "
                "table in every release (DP-GD) gains nothing from it."
            )
        k, b = participation
        if k > 1 and b == 1:
            raise ValueError("correlated noise gains nothing where every record is in every release: use DP-GD.")
        if count > self.releases or k > self.participations or (k > 1 and b < self.separation):
            raise ValueError(
                f"correlated noise: this noise supports {self.releases} releases with {self.participations} "
                f"participations at least {self.separation} steps apart; the plan needs {count} releases with {k} "
                f"at least {b} apart. Build it with those values."
            )

    def rows(self, key: bytes, label: str) -> BufferedToeplitzRecurrence:
        return BufferedToeplitzRecurrence(self, key, label)

    def describe(self, multiplier: float) -> str:
        return (
            f"Gaussian noise correlated over the releases, of scale {multiplier:.4g}·C times the sensitivity "
            f"{self.factor:.4g} of the run: all of them together are one Gaussian release of noise multiplier "
            f"{multiplier:.4g}, each record in at most {self.participations} of them, at least {self.separation} "
            "apart"
        )

    def stated(self, multiplier: float) -> str:
        return (
            f"correlated: one Gaussian release of noise multiplier {multiplier:.4g} over the whole run; each "
            f"record in at most {self.participations} releases, at least {self.separation} apart"
        )


@dataclass(frozen=True)
class BandedToeplitzNoise(CorrelatedNoise, kind="banded"):
    """Gaussian noise that the next releases take back, up to as many as there are bands.

    Build it with :meth:`made`. Plans carry the coefficients; their reader computes the sensitivity again.

    Args:
        releases: T, the most releases there can be.
        column: c₀ = 1 > c₁ ≥ … ≥ 0, the first column of S: as many bands. Falling coefficients have all zeros of
            Σc_k x^k outside of the unit disc (Eneström and Kakeya), so the recursion is stable.

    >>> bands = BandedToeplitzNoise.made(560, 16)
    >>> round(bands.factor, 3), round(bands.loudness, 2)
    (1.394, 1.58)
    >>> bands.event(lambda inner: events.PoissonSampled(0.1, inner), 2.0, Relation.ADD_REMOVE, 35)
    Repeated(inner=PoissonSampled(rate=0.1, inner=Gaussian(noise_multiplier=2.0)), count=35)
    """

    releases: int
    column: tuple[float, ...]

    amplified: ClassVar[bool] = True
    in_secure_sums: ClassVar[bool] = False
    only_central: ClassVar[str] = "noise in bands is for one curator; parties' turns have noise='correlated'."
    together: ClassVar[str] = (
        "the releases from one turn of a record to its next are together one Gaussian release: their noise is "
        "correlated; turns compose adaptively"
    )

    def __post_init__(self) -> None:
        self._check({"releases": self.releases}, {"column": self.column})
        c = self.column
        # Written so that a NaN is refused.
        if not (2 <= len(c) <= _MOST_BANDS and c[0] == 1.0 > c[1] and c[-1] >= 0.0):
            raise ValueError(f"column: must be 2 to {_MOST_BANDS} numbers from 1 downwards, none below 0.")
        if not all(before >= after for before, after in pairwise(c)):
            raise ValueError("column: must fall.")

    @classmethod
    def made(cls, releases: int, bands: int) -> BandedToeplitzNoise:
        """The first coefficients of (1−x)^(−1/2), whose square makes prefix sums: a matter of use, not of privacy.

        >>> BandedToeplitzNoise.made(10, 4).column
        (1.0, 0.5, 0.375, 0.3125)
        """
        if not 2 <= bands <= _MOST_BANDS:
            raise SettingError(
                f"{{cohorts}}: noise that cancels over them needs 2 to {_MOST_BANDS}.", cohorts=bands
            )
        return cls(releases, tuple(np.cumprod([1.0, *(1.0 - 0.5 / k for k in range(1, bands))]).tolist()))

    @property
    def cohorts(self) -> int:
        """The number of cohorts, one per band: a window then holds one contribution of a record."""
        return len(self.column)

    def coefficients(self) -> Floats:
        c = np.zeros(self.releases)
        c[: self.cohorts] = self.column[: self.releases]
        return c

    def strategy(self) -> tuple[Floats, range]:
        """In a window one contribution is heard: one column."""
        return self.coefficients(), range(1)

    @classmethod
    def example(cls, releases: int) -> BandedToeplitzNoise:
        return cls.made(releases, 8)

    @property
    def factor(self) -> float:
        """s = ‖c‖: how far one contribution of bound 1 can move S·sums."""
        return float(np.linalg.norm(self.column)) * _ROUNDED_UP

    @cached_property
    def inverse(self) -> Floats:
        """S is the polynomial c, so S⁻¹ is 1/c."""
        from scipy.signal import lfilter

        return np.asarray(lfilter([1.0], self.column, np.eye(1, self.releases)[0]), np.float64)

    def rows(self, key: bytes, label: str) -> BandedRecurrence:
        return BandedRecurrence(self, key, label)

    def event(self, sampled: Sampled, multiplier: float, relation: Relation, count: int) -> events.Event:
        """``count`` windows, each on a secret sample: as many as a record has turns."""
        return events.repeated(sampled(self.once(multiplier, relation)), count)

    def over(self, releases: int, participations: int, separation: int) -> BandedToeplitzNoise:
        return BandedToeplitzNoise(releases, self.column)

    def check(self, count: int, participation: tuple[int, int] | None, sampling: str) -> None:
        """Refuse releases that the windows are not proved for."""
        if participation is None:
            raise SettingError(
                f"noise in bands on {sampling}: needs a record's releases at least as far apart as there are "
                "bands; use {sampling='poisson-turns'}."
            )
        k, b = participation
        if count > self.releases or (k > 1 and b < self.cohorts):
            raise ValueError(
                f"correlated noise: this noise supports {self.releases} releases in {self.cohorts} bands; the plan "
                f"needs {count} releases, with those of a record at least {b} apart. Build it with those values; "
                "there may be as many bands as cohorts."
            )

    def describe(self, multiplier: float) -> str:
        return (
            f"Gaussian noise correlated over {self.cohorts} releases, of scale {multiplier:.4g}·C times the "
            f"sensitivity {self.factor:.4g} of a contribution: each turn of a record is one Gaussian release of "
            f"noise multiplier {multiplier:.4g}"
        )

    def stated(self, multiplier: float) -> str:
        return (
            f"correlated over {self.cohorts} releases: each turn of a record is one Gaussian release of noise "
            f"multiplier {multiplier:.4g}"
        )


class NoiseRecurrence(ABC):
    """w_k = (S⁻¹u)_k by number k, from the few vectors that are kept of the rows before it.

    Rows are a function of the key and of k alone: after an interruption the buffers are made again from
    the stream's rows 0 … k−1, and nothing of them is ever stored, for with a release they are as secret as the key.
    Numbers that are skipped (a release of bound 0, a lost round, a draw that was never released) are run through
    all the same: a recursion that stood still would cancel what was never added.

    A resumed run whose sums differ goes on in a new epoch with a key of its own and is charged again. Its buffers
    start empty at row 0 of its own stream; whichever rows of it are then released are a part of a whole run's, so
    one more ``Gaussian(z)`` covers them, and noise of the two epochs is independent. Old buffers that were kept
    would instead give the same noise to two different sums.

    >>> from quietgrad.core.noise.rng import seed_key
    >>> on, again = (BufferedToeplitzNoise.made(8).rows(seed_key(0), "noise") for _ in range(2))
    >>> kept = [on.row(k, 3) for k in range(8)]
    >>> bool((again.row(5, 3) == kept[5]).all())
    True
    """

    def __init__(self, mechanism: CorrelatedNoise, key: bytes, label: str, buffer_rows: int) -> None:
        self._releases, self._buffer_rows = mechanism.releases, buffer_rows
        self._units = StandardNormals(key, f"unit/{label}", mechanism.releases)
        self._next = 0
        self._buffers: Floats | None = None

    def row(self, release: int, dim: int) -> Floats:
        """The unit noise of ``release``; a new array."""
        if not 0 <= release < self._releases:
            raise BudgetError(f"release {release}: the correlated noise was made for {self._releases}.")
        if self._buffers is not None and self._buffers.shape[1] != dim:
            raise BudgetError(
                f"a release of {dim} numbers after one of {self._buffers.shape[1]}: correlated noise is over "
                "vectors of one length."
            )
        if self._buffers is None or release < self._next:
            self._buffers, self._next = np.zeros((self._buffer_rows, dim)), 0
        row: Floats = np.empty(0)
        for number in range(self._next, release + 1):
            row = self._step(number, self._units.row(number, dim), self._buffers)
        self._next = release + 1
        return row

    @abstractmethod
    def _step(self, number: int, unit: Floats, buffers: Floats) -> Floats:
        """Return w of ``number`` as a new array, from u and ``buffers``, which it updates in place."""


class BufferedToeplitzRecurrence(NoiseRecurrence):
    """w = u_k − α·B and B ← λ·B + w, with four buffers B that start empty."""

    def __init__(self, mechanism: BufferedToeplitzNoise, key: bytes, label: str) -> None:
        super().__init__(mechanism, key, label, len(mechanism.alpha))
        self._lam, self._alpha = np.array(mechanism.lam)[:, None], np.array(mechanism.alpha)

    def _step(self, number: int, unit: Floats, buffers: Floats) -> Floats:
        row: Floats = unit - np.dot(self._alpha, buffers)
        buffers *= self._lam  # after w is computed: w_k rests on the buffers of k − 1
        buffers += row
        return row


class BandedRecurrence(NoiseRecurrence):
    """w_k = u_k − Σ_{0<m<b} c_m·w_{k−m}: of the b − 1 rows that are kept, row k takes the place of the oldest."""

    def __init__(self, mechanism: BandedToeplitzNoise, key: bytes, label: str) -> None:
        super().__init__(mechanism, key, label, mechanism.cohorts - 1)
        self._past = np.array(mechanism.column[1:])

    def _step(self, number: int, unit: Floats, buffers: Floats) -> Floats:
        size = len(buffers)
        weights = self._past[(number - 1 - np.arange(size)) % size]  # place j holds the newest row k' ≡ j
        row: Floats = unit - np.dot(weights, buffers)
        buffers[number % size] = row
        return row


class _CorrelatedSource(NoiseSource):
    def __init__(self, mechanism: CorrelatedNoise, key: bytes, label: str) -> None:
        self._rows = mechanism.rows(key, label)
        self._louder = mechanism.factor

    def add(self, total: Floats, release: int, multiplier: float, bound: float) -> None:
        # Real noise is combined first and rounded once, to the grid of the data: that is post-processing. Integer
        # noise combined with fractions would live on a finer grid than the sum and bare its residue.
        # The step is sized by z·C·s, so that the float64 errors of w are as small in steps as those of normals.
        grid = sigma_for(multiplier * self._louder, bound, len(total))
        add_discretized_gaussian(total, self._rows.row(release, len(total)), *grid)


def _worst_move(column: Floats, columns: range) -> float:
    """The norm of the sum of these columns of S: how far a record of bound 1 can move S·sums."""
    moved = np.zeros(len(column))
    for first in columns:
        moved[first:] += column[: len(column) - first]
    return float(np.linalg.norm(moved))
