"""Slots and schedules: which releases a run makes, and how they compose.

A *slot* is a kind of release: its name, its sampling, how often it may happen and how loud its noise is relative
to the plan's. A *schedule* is all slots of an algorithm and how they compose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import gdp_mu, sensitivity_factor
from quietgrad.core.accounting.budget import Json, Relation
from quietgrad.core.errors import BudgetError, UnprovableError
from quietgrad.core.noise.mechanisms import GaussianNoise, Mechanism
from quietgrad.core.noise.mechanisms import from_json as mechanism_from
from quietgrad.core.sampling import Sampling
from quietgrad.core.sampling import from_json as sampling_from

Law = tuple[tuple[int, float], ...]
Composition = Literal["sequential", "parallel", "filter", "select"]


@dataclass(frozen=True)
class Slot:
    """One kind of release.

    ``count`` releases at most, each by ``mechanism`` on a sample; the noise multiplier is the plan's times
    ``noise``, or ``fixed`` whatever the plan's is (an estimate with its own share of the budget). With a ``law``
    the number of releases is a random round drawn before the run (see
    :class:`~quietgrad.core.accounting.events.RandomNumberOfReleases`).
    """

    name: str
    sampling: Sampling
    count: int = 1
    noise: float = 1.0
    law: Law | None = None
    mechanism: Mechanism = field(default_factory=GaussianNoise)
    fixed: float | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(
                f"slot {self.name!r}: count={self.count}: must be ≥ 1; a run of no steps releases nothing."
            )
        if not 0.0 < self.noise < math.inf:
            raise ValueError(f"slot {self.name!r}: noise={self.noise}: must be a finite number > 0.")
        if self.fixed is not None and not 0.0 < self.fixed < math.inf:
            raise ValueError(f"slot {self.name!r}: fixed={self.fixed}: must be a finite number > 0, or None.")
        if self.law is not None and self.mechanism.together:
            raise ValueError(
                f"slot {self.name!r}: the ε of a random number of releases is not known under correlated noise; "
                "return the last iterate or an average."
            )
        self.mechanism.check(self.count, self.sampling.participation(self.count), self.sampling.describe())

    def lengthened(self, more: int) -> Slot:
        """The slot with a mechanism that serves ``more`` releases beyond its count (rounds that may be lost)."""
        count = self.count + more
        participation = self.sampling.participation(count)
        if not more or participation is None:
            return self
        return replace(self, mechanism=self.mechanism.over(count, *participation))

    @cached_property
    def interleaves(self) -> bool:
        """Whether its releases and those of other such slots have a proved cost in any order.

        They do where noise is Gaussian, independent or correlated over the whole run, and no cost rests on secret
        samples: on every path a record moves all innovations together by a bounded length, and squares add up
        (``docs/correlated-proof.md``, interleaved slots). Secret samples are seen in the slot's own event: only
        un-sampled Gaussian releases have a μ.
        """
        if self.law is not None or not (type(self.mechanism) is GaussianNoise or self.mechanism.whole_run):
            return False
        if self.sampling.fresh:  # a record is in one release, and which one lowers no cost
            return True
        try:
            gdp_mu(self.event(1.0, Relation.ADD_REMOVE), relation=Relation.ADD_REMOVE)
        except UnprovableError:
            return False
        return True

    def multiplier(self, noise_multiplier: float) -> float:
        """The slot's own noise multiplier at the plan's; 0 in a run without noise."""
        if self.fixed is not None:
            return self.fixed if noise_multiplier else 0.0
        return noise_multiplier * self.noise

    def event(self, noise_multiplier: float, relation: Relation, count: int | None = None) -> events.Event:
        """The event of ``count`` releases (default: all) at the plan's noise multiplier."""
        z = self.multiplier(noise_multiplier)
        if count is None and self.law is not None:
            law: dict[int, float] = {}
            for rounds, chance in self.law:
                times = self.sampling.times(rounds)
                law[times] = law.get(times, 0.0) + chance
            return events.RandomNumberOfReleases(
                self.mechanism.event(self.sampling.event, z, relation, 1), tuple(law.items())
            )
        count = count or self.count
        held = None if self.mechanism.whole_run else self.sampling.participation(count)
        # Where a record is certainly not in every release, it pays for those that it is in.
        times = self.sampling.times(count) if held is None else held[0]
        return self.mechanism.event(self.sampling.event, z, relation, times)

    def to_json(self) -> dict[str, Any]:
        """The slot as plain JSON values."""
        return {
            "name": self.name,
            "sampling": self.sampling.to_json(),
            "count": self.count,
            "noise": self.noise,
            "fixed": self.fixed,
            "mechanism": self.mechanism.to_json(),
            "law": None if self.law is None else [list(pair) for pair in self.law],
        }

    @classmethod
    def from_json(cls, data: Json) -> Slot:
        """Rebuild a slot from :meth:`to_json`."""
        law = data["law"]
        return cls(
            data["name"],
            sampling_from(data["sampling"]),
            data["count"],
            data["noise"],
            None if law is None else tuple((int(r), float(p)) for r, p in law),
            mechanism_from(data["mechanism"]),
            data["fixed"],
        )


@dataclass(frozen=True)
class Schedule:
    """All slots of a run and how they compose.

    ``sequential``: all on the same people. ``parallel``: on disjoint records, so the worst release counts.
    ``filter``: every release names its own ρ and a hard zCDP filter stops at the total (DP-AGD).
    ``select``: a secret random number of rounds of which only the best leaves (private search); the one slot is a
    round, and ``rounds`` are the mean and the shape of their number's law.
    ``adaptive``: which slot is used when follows from what was released, so the counts of a run depend on data
    and unused releases are never given back.
    """

    slots: tuple[Slot, ...]
    composition: Composition = "sequential"
    adaptive: bool = False
    rounds: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if (self.composition == "select") != (self.rounds is not None and len(self.slots) == 1):
            raise ValueError("select: a private search has one slot, its round, and the law of their number.")
        if any(slot.mechanism.together for slot in self.slots):
            # An estimate before the run has its own part of the budget; a session lets it be nowhere else.
            run = [slot for slot in self.slots if slot.fixed is None or slot.mechanism.together]
            alone = len(run) == 1 and self.composition == "sequential"
            if not alone and not (
                self.composition in ("sequential", "parallel") and all(slot.interleaves for slot in run)
            ):
                raise ValueError(
                    "correlated noise: needs all its releases in one slot, without filters, searches, secret "
                    "samples or noise of another law in between. Use independent noise with this method."
                )
        if self.composition == "parallel":
            passes = {slot.sampling.pass_size for slot in self.slots}
            if 0 in passes or len(passes) > 1:
                raise ValueError("parallel composition: every slot must be a SinglePass over the same n records.")

    @classmethod
    def of(cls, slots: tuple[Slot, ...], *, adaptive: bool = False) -> Schedule:
        """Slots in parallel if all their records are fresh, else in sequence; so too a correlated one alone."""
        correlated = any(slot.mechanism.together for slot in slots)
        proved = len(slots) > 1 and all(slot.interleaves for slot in slots)
        apart = all(slot.sampling.fresh for slot in slots) and (proved or not correlated)
        return cls(slots, "parallel" if apart else "sequential", adaptive)

    def under(self, relation: Relation) -> Schedule:
        """The schedule with every sampling as it must be for neighbours of ``relation``."""
        return replace(self, slots=tuple(replace(s, sampling=s.sampling.under(relation)) for s in self.slots))

    def __getitem__(self, name: str) -> Slot:
        for slot in self.slots:
            if slot.name == name:
                return slot
        names = ", ".join(repr(slot.name) for slot in self.slots)
        raise BudgetError(f"release {name!r} is not in the plan (it holds {names}); plan again with it.")

    def slot_at(self, place: int) -> Slot:
        """The slot of a release, for slots that are used in their order; ``place`` counts from 0."""
        for slot in self.slots:
            if place < slot.count:
                return slot
            place -= slot.count
        raise BudgetError(f"the plan holds {self.releases} releases and no more; plan a longer run.")

    def place_of(self, name: str, number: int) -> int:
        """The place of a slot's release among all, for slots that are used in their order.

        >>> from quietgrad.core.sampling import FullBatch
        >>> plan = Schedule((Slot("loud", FullBatch(), 3), Slot("quiet", FullBatch(), 2, noise=0.5)))
        >>> plan.place_of("quiet", 1), plan.slot_at(4).name, plan.slot_at(2).name
        (4, 'quiet', 'loud')
        """
        names = [slot.name for slot in self.slots]
        return sum(slot.count for slot in self.slots[: names.index(self[name].name)]) + number

    @property
    def releases(self) -> int:
        """The most releases a run can make."""
        return sum(slot.count for slot in self.slots)

    def event(
        self, noise_multiplier: float, relation: Relation, counts: Mapping[str, int] | None = None
    ) -> events.Event:
        """The event of the whole run, or of ``counts`` releases of each slot.

        In a filter ``noise_multiplier`` is that of one Gaussian release that would spend the whole ρ.
        """
        if self.composition == "filter":
            return events.ZCDP((sensitivity_factor(relation) / noise_multiplier) ** 2 / 2.0, relation)
        if self.rounds is not None:
            # Whatever was tried and did not leave is paid for by the law, however many rounds there were.
            return events.RepeatAndSelect(self.slots[0].event(noise_multiplier, relation, 1), *self.rounds)
        parts = [
            slot.event(noise_multiplier, relation, None if counts is None else counts.get(slot.name, 0))
            for slot in self.slots
            if counts is None or counts.get(slot.name, 0) > 0
        ]
        if self.composition == "parallel":
            # Disjoint records: a record takes part in one release of one slot, however many there are. Correlated
            # noise carries what it gave there into all later releases of the slot.
            once = tuple(
                slot.event(noise_multiplier, relation, None if slot.mechanism.together else 1)
                for slot in self.slots
            )
            return once[0] if len(once) == 1 else events.Parallel(once)
        return events.composed(parts)
