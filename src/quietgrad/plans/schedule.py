"""What a run will release, decided before any data: slots, how they compose, and the plan that prices them.

A *slot* is a kind of release: its name, its sampling, how often it may happen and how loud its noise is relative
to the plan's. A *schedule* is all slots of an algorithm and how they compose. A *plan* adds the budget and the
noise that meets it; a curator opens a session for a plan and refuses whatever the plan does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from quietgrad.errors import BudgetError
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.sampling import Sampling, SinglePass

Law = tuple[tuple[int, float], ...]
Mechanism = Literal["gaussian", "pure", "threshold"]
Composition = Literal["sequential", "parallel", "filter"]


@dataclass(frozen=True)
class Slot:
    """One kind of release.

    ``count`` releases at most; the noise multiplier is the plan's times ``noise``. Mechanisms are Gaussian noise,
    L2-Laplace noise (``pure``) and the noisy search for the first small number of a list (``threshold``), the last
    two of pure ε = Δ/(multiplier·C). With a ``law`` the number of
    releases is a random round drawn before the run (see :class:`~quietgrad.privacy.events.RandomRound`).
    """

    name: str
    sampling: Sampling
    count: int = 1
    noise: float = 1.0
    law: Law | None = None
    mechanism: Mechanism = "gaussian"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(
                f"slot {self.name!r}: count={self.count}: must be ≥ 1; a run of no steps releases nothing."
            )
        if not 0.0 < self.noise < math.inf:
            raise ValueError(f"slot {self.name!r}: noise={self.noise}: must be a finite number > 0.")

    def event(self, noise_multiplier: float, relation: Relation, count: int | None = None) -> events.Event:
        """The event of ``count`` releases (default: all) at the plan's noise multiplier."""
        once: events.Event
        if self.mechanism != "gaussian":
            from quietgrad.privacy.accounting import sensitivity_factor

            once = events.Pure(sensitivity_factor(relation) / (noise_multiplier * self.noise), relation)
        else:
            once = self.sampling.event(events.Gaussian(noise_multiplier * self.noise))
        if count is None and self.law is not None:
            return events.RandomRound(once, self.law)
        return events.repeated(once, count or self.count)


@dataclass(frozen=True)
class Schedule:
    """All slots of a run and how they compose.

    ``sequential``: all on the same people. ``parallel``: on disjoint records, so the worst release counts.
    ``filter``: every release names its own ρ and a hard zCDP filter stops at the total (DP-AGD).
    ``adaptive``: which slot is used when follows from what was released, so the counts of a run depend on data
    and unused releases are never given back.
    """

    slots: tuple[Slot, ...]
    composition: Composition = "sequential"
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.composition == "parallel":
            passes = [slot.sampling for slot in self.slots if isinstance(slot.sampling, SinglePass)]
            if len(passes) < len(self.slots) or len({p.n for p in passes}) > 1:
                raise ValueError("parallel composition: every slot must be a SinglePass over the same n records.")

    def under(self, relation: Relation) -> Schedule:
        """The schedule with every sampling as it must be for neighbours of ``relation``."""
        return replace(self, slots=tuple(replace(s, sampling=s.sampling.under(relation)) for s in self.slots))

    def __getitem__(self, name: str) -> Slot:
        for slot in self.slots:
            if slot.name == name:
                return slot
        known = ", ".join(repr(slot.name) for slot in self.slots)
        raise BudgetError(f"release {name!r} is not in the plan (it holds {known}); plan again with it.")

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
            from quietgrad.privacy.accounting import sensitivity_factor

            return events.ZCDP((sensitivity_factor(relation) / noise_multiplier) ** 2 / 2.0, relation)
        parts = [
            slot.event(noise_multiplier, relation, None if counts is None else counts.get(slot.name, 0))
            for slot in self.slots
            if counts is None or counts.get(slot.name, 0) > 0
        ]
        if self.composition == "parallel":
            # Disjoint records: a record takes part in one release of one slot, however many there are.
            once = tuple(slot.event(noise_multiplier, relation, 1) for slot in self.slots)
            return once[0] if len(once) == 1 else events.Parallel(once)
        return events.composed(parts)


@dataclass(frozen=True)
class Plan:
    """A schedule, a budget, and the noise that meets it: all public, made without data.

    ``budget=None`` is a non-private run without noise. ``noise_multiplier`` is σ of the noise on the sum ÷ C of a
    slot whose relative noise is 1; ``paper_noise`` marks a paper's own formula, whose ε is proved, not claimed.
    """

    algorithm: str
    config: Mapping[str, Any]
    schedule: Schedule
    n_public: int
    budget: Budget | None
    noise_multiplier: float
    paper_noise: str | None = None
    extra: tuple[events.Event, ...] = field(default=())

    @property
    def is_private(self) -> bool:
        """Whether the run adds noise at all; what it costs is :meth:`epsilon`."""
        return self.budget is not None

    @property
    def event(self) -> events.Event:
        """What the whole run releases, with what was released for it beforehand (``extra``)."""
        return self.event_of(None)

    @property
    def event_rho(self) -> float:
        """The total ρ of a plan with a zCDP filter."""
        event = self.schedule.event(self.noise_multiplier, self._relation)
        if not isinstance(event, events.ZCDP):
            raise BudgetError("this plan has no zCDP filter.")
        return event.rho

    @property
    def _relation(self) -> Relation:
        if self.budget is None:
            raise BudgetError("this plan has no budget (budget=None): its run is not private and has no ε.")
        return self.budget.relation

    def event_of(self, counts: Mapping[str, int] | None) -> events.Event:
        """What was released after ``counts`` releases of each slot."""
        run = self.schedule.event(self.noise_multiplier, self._relation, counts)
        return events.composed([*self.extra, run])

    @cached_property
    def proof(self) -> Any:
        """The best proof of the plan's ε at the budget's δ."""
        from quietgrad.privacy.accounting import prove

        event = self.event
        assert self.budget is not None
        return prove(event, delta=self.budget.delta, relation=self.budget.relation)

    def epsilon(self, delta: float | None = None) -> float:
        """The ε the plan costs at ``delta`` (default: the budget's)."""
        if self.budget is None or delta is None or delta == self.budget.delta:
            return float(self.proof.epsilon)
        from quietgrad.privacy.accounting import account

        return account(self.event, delta=delta, relation=self.budget.relation)

    def epsilon_after(self, counts: Mapping[str, int]) -> float:
        """The ε of the first ``counts`` releases of each slot, at the budget's δ; never above the plan's."""
        from quietgrad.privacy.accounting import account

        relation = self._relation
        assert self.budget is not None
        if not any(counts.values()):
            return 0.0
        if any(slot.law is not None for slot in self.schedule.slots):
            return self.epsilon()  # δ is averaged over the rounds: a short run has no smaller ε of its own
        spent = account(self.event_of(counts), delta=self.budget.delta, relation=relation)
        return min(spent, self.epsilon())

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values: what a party pins and a ledger stores."""
        return {
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "n_public": self.n_public,
            "budget": None if self.budget is None else self.budget.to_json(),
            "noise_multiplier": self.noise_multiplier,
            "paper_noise": self.paper_noise,
            "composition": self.schedule.composition,
            "slots": [
                {
                    "name": slot.name,
                    "sampling": slot.sampling.to_json(),
                    "count": slot.count,
                    "noise": slot.noise,
                    "mechanism": slot.mechanism,
                    "random_round": slot.law is not None,
                }
                for slot in self.schedule.slots
            ],
            "event": None if self.budget is None else self.event.to_json(),
        }

    def explain(self) -> str:
        """Say for people what will be released, what each release reveals, and which proof prices it."""
        from quietgrad.plans.explain import explain

        return explain(self)
