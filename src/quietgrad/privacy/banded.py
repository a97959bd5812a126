"""Noise that cancels within bands, on secret samples: what correlation and amplification buy together.

Records are in b cohorts that take turns (:class:`~quietgrad.sampling.CyclicPoisson`): release t asks a
Poisson sample, at rate q, of cohort t mod b. Its noise is z·C·s·w_t with w = S⁻¹u, S lower triangular and
Toeplitz with at most b coefficients c₀ = 1 > c₁ ≥ … ≥ 0 and s = ‖c‖.

**Why it is private.** As for all correlated noise the transcript is a causal bijection of S·sums + z·C·s·u. A
record of cohort g may take part in the releases g, g + b, g + 2b, …, in each if a coin of its own says so. Cut the
transcript into windows of b steps that begin at those releases. What the record gave to release t = g + mb moves
rows t … t + b − 1 of S·sums, by c₀Δ, c₁Δ, …, and no row after them: there are no more bands. So

- in a window only *one* of its contributions is heard, a Δ with ‖Δ‖ ≤ C that is known when the window begins: it
  follows from earlier releases, and the rest of the window are fixed multiples of it;
- given the coins of the others and all steps before, the window is, after subtraction of what the others give (a
  function of earlier steps), N(0, σ²I) without the record and (1 − q)·N(0, σ²I) + q·N(c⊗Δ, σ²I) with it,
  σ = z·C·s and ‖c⊗Δ‖ = s·‖Δ‖ ≤ s·C: **one Poisson sample of one Gaussian release of noise multiplier z**;
- its coin is independent of everything before, so windows compose adaptively. A record has at most ⌈T/b⌉ of them;
  the last may be cut off, which is post-processing of a whole one, and before its first nothing depends on it.

The coins of the others are independent of the record's and may as well be known: the bound holds for each outcome.
Under replace-one the new record has the cohort and the coins of the old one, and the window is the two mixtures
of a Poisson-sampled release of as many dimensions. C may follow from earlier releases: each step is divided
by its own. A run is therefore ``Repeated(PoissonSampled(q, Gaussian(z)), ⌈T/b⌉)``, for either relation.

What breaks it: more bands than cohorts (a row would hear two contributions of the record), samples of everybody (a
record twice within a window), a rate that forgets that a cohort is b times smaller than the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.correlated import ROUNDED_UP, CorrelatedNoise, NoiseRecurrence
from quietgrad.privacy.mechanisms import Sampled

Floats = npt.NDArray[np.float64]

_MOST_BANDS = 1024  # as many vectors are kept


@dataclass(frozen=True)
class BandedToeplitzNoise(CorrelatedNoise, kind="banded"):
    """Gaussian noise that the next releases take back, up to as many as there are bands.

    Build it with :meth:`made`. Plans carry the coefficients; whoever reads one computes the sensitivity again.

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
    in_mpc: ClassVar[bool] = False
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
            raise ValueError(f"cohorts={bands}: noise that cancels over them needs 2 to {_MOST_BANDS}.")
        return cls(releases, tuple(np.cumprod([1.0, *(1.0 - 0.5 / k for k in range(1, bands))]).tolist()))

    # --- the strategy -----------------------------------------------------------------------------------------

    @property
    def bands(self) -> int:
        """How many releases a piece of noise is taken back in."""
        return len(self.column)

    def coefficients(self, releases: int | None = None) -> Floats:
        count = self.releases if releases is None else releases
        c = np.zeros(count)
        c[: self.bands] = self.column[:count]
        return c

    def strategy(self) -> tuple[Floats, range]:
        """In a window one contribution is heard: one column."""
        return self.coefficients(), range(1)

    @property
    def cohorts(self) -> int:
        return self.bands

    @classmethod
    def example(cls, releases: int) -> BandedToeplitzNoise:
        return cls.made(releases, 8)

    @property
    def factor(self) -> float:
        """s = ‖c‖: how far one contribution of bound 1 can move S·sums."""
        return float(np.linalg.norm(self.column)) * ROUNDED_UP

    @cached_property
    def inverse(self) -> Floats:
        """S is the polynomial c, so S⁻¹ is 1/c."""
        from scipy.signal import lfilter

        return np.asarray(lfilter([1.0], self.column, np.eye(1, self.releases)[0]), np.float64)

    def rows(self, key: bytes, label: str) -> BandedRecurrence:
        return BandedRecurrence(self, key, label)

    # --- what a mechanism is ----------------------------------------------------------------------------------

    def event(self, sampled: Sampled, multiplier: float, relation: Relation, count: int) -> events.Event:
        """``count`` windows, each on a secret sample: as many as a record has turns."""
        return events.repeated(sampled(self.once(multiplier, relation)), count)

    def over(self, releases: int, participations: int, separation: int) -> BandedToeplitzNoise:
        return BandedToeplitzNoise(releases, self.column)

    def check(self, count: int, participation: tuple[int, int] | None, sampling: str) -> None:
        """Refuse releases that the windows are not proved for."""
        if participation is None:
            raise ValueError(
                f"noise in bands on {sampling}: a record's releases must be certain to be as far apart as there "
                "are bands; use sampling='poisson-turns'."
            )
        k, b = participation
        if count > self.releases or (k > 1 and b < self.bands):
            raise ValueError(
                f"noise in {self.bands} bands for {self.releases} releases: the plan has {count}, a record's at "
                f"least {b} apart. Make it for those; there may be as many bands as cohorts."
            )

    def describe(self, multiplier: float) -> str:
        return (
            f"Gaussian noise correlated over {self.bands} releases, of scale {multiplier:.4g}·C times the "
            f"sensitivity {self.factor:.4g} of a contribution: each turn of a record is one Gaussian release of "
            f"noise multiplier {multiplier:.4g}"
        )

    def stated(self, multiplier: float) -> str:
        return (
            f"correlated over {self.bands} releases: each turn of a record is one Gaussian release of noise "
            f"multiplier {multiplier:.4g}"
        )


class BandedRecurrence(NoiseRecurrence):
    """w_k = u_k − Σ_{0<m<b} c_m·w_{k−m}: of the b − 1 rows that are kept, row k takes the place of the oldest."""

    def __init__(self, mechanism: BandedToeplitzNoise, key: bytes, label: str) -> None:
        super().__init__(mechanism, key, label, mechanism.bands - 1)
        self._past = np.array(mechanism.column[1:])

    def _step(self, number: int, unit: Floats, kept: Floats) -> Floats:
        size = len(kept)
        weights = self._past[(number - 1 - np.arange(size)) % size]  # place j holds the newest row k' ≡ j
        row: Floats = unit - np.dot(weights, kept)
        kept[number % size] = row
        return row
