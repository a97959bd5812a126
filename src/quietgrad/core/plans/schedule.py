"""Plans: a schedule, a budget and the noise that meets it, decided before any data is read.

A curator opens a session for a plan and refuses whatever the plan does not hold.

:func:`calibrate_plan` finds the noise with which the releases meet a budget. Nothing else in quietgrad calibrates a
plan. It proves the plan's own events before it returns the plan, so no search can exceed the budget.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import account, calibrate_event, delta_of, prove
from quietgrad.core.accounting.budget import Budget, Json, PrivacyUnit, Relation, check_condition
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import BudgetError, SettingError, UnprovableError
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.plans.explain import explain
from quietgrad.core.plans.slots import Composition, Law, Schedule, Slot
from quietgrad.core.sanitize import html_facts

if TYPE_CHECKING:
    from quietgrad.core.accounting.accounting import ProvedGuarantee
    from quietgrad.core.plans.method import HasSchedule

__all__ = ["Composition", "Law", "Plan", "Schedule", "Slot", "calibrate_plan", "check_records_public", "plan"]


@dataclass(frozen=True)
class Plan:
    """A schedule, a budget, and the noise that meets it, all public.

    It is made without data.

    ``budget=None`` is a non-private run without noise. ``noise_multiplier`` is σ of the noise on the sum ÷ C of a
    slot whose relative noise is 1.
    ``unit``: the privacy unit, a record or a person with all their records. ``n_public`` counts units, and clipping
    bounds one unit's contribution.
    ``records_public``: the number of all people's records together, if it was declared public. It is printed beside
    n, and nothing is computed from it.
    ``counted``: the private count behind ``n_public``, if there was one. It is the run's first release, made before
    this plan and paid for on its own. ``event`` is the event of the plan's own session, ``total`` the event of the
    session and the count.
    ``condition``: the clause under which the plan's ε holds, such as "if the loop's own code treats records apart
    (not checked)"; ``None`` if it holds without one. It is reserved, stated and certified with ε.
    """

    algorithm: str
    config: Mapping[str, Any]
    schedule: Schedule
    n_public: int
    budget: Budget | None
    noise_multiplier: float
    unit: PrivacyUnit = PrivacyUnit.RECORD
    records_public: int | None = None
    condition: str | None = None
    counted: PublicCount | None = None

    def __post_init__(self) -> None:
        check_condition(self.condition)
        if self.counted is not None and (self.budget is None or self.counted.n != self.n_public):
            raise ValueError("plan: was counted for another number of records, or without a budget.")
        if self.counted is not None and self.budget is not None:
            # Which kinds of release there are does not depend on their noise.
            self.with_count(self.schedule.event(1.0, self.budget.relation))
        if self.budget is not None and self.schedule != self.schedule.under(self.budget.relation):
            raise ValueError(
                f"plan: the schedule is for another relation than {self.budget.relation}; use "
                "schedule.under(relation)."
            )

    @property
    def counts(self) -> str:
        """The public numbers in words.

        >>> people = PrivacyUnit.PERSON
        >>> Plan("dp-gd", {}, Schedule(()), 40218, None, 0.0, unit=people, records_public=1203554).counts
        '40 218 people, 1 203 554 records'
        """
        people = self.unit.in_words(f"{_spaced(self.n_public)} records")
        return people if self.records_public is None else f"{people}, {_spaced(self.records_public)} records"

    @property
    def declared(self) -> str:
        """The declared public number of people's records, in words.

        Empty if none was declared.
        """
        if self.records_public is None:
            return ""
        if self.counted is not None:
            return f"{_spaced(self.records_public)} records in all, {DECLARED}"
        return f"{self.counts}, both {DECLARED}"

    @property
    def delta_caution(self) -> str | None:
        """A warning if the plan's δ is not below 1/n, else ``None``.

        It is printed before the plan is charged.

        n is declared, public or counted privately, never the secret number itself.

        >>> Plan("dp-gd", {}, Schedule(()), 200, Budget(1.0, 0.01, "replace-one"), 1.0).delta_caution
        'δ is not below 1/n: a mechanism that publishes a random record would satisfy it'
        """
        if self.budget is None or self.budget.delta * self.n_public < 1.0:
            return None
        return self.unit.in_words("δ is not below 1/n: a mechanism that publishes a random record would satisfy it")

    @property
    def digest(self) -> str:
        """A digest of what decides samples and noise.

        These are the slots, how they compose, n and the noise multiplier.
        """
        slots = [slot.to_json() for slot in self.schedule.slots]
        decides = [slots, self.schedule.composition, self.n_public, self.noise_multiplier]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    @property
    def variance_factor(self) -> float:
        """Variance of the noise in a sum ÷ that of a trusted curator.

        It is above 1 only where parties add noise.
        """
        return 1.0

    @property
    def is_private(self) -> bool:
        """Whether the run adds noise at all; what it costs is :meth:`epsilon`."""
        return self.budget is not None

    @property
    def event(self) -> events.Event:
        """The event of the plan's session: everything that it releases and pays for."""
        return self.event_of(None)

    @property
    def cost(self) -> Cost | None:
        """The cost that the ledger is charged for the plan's session.

        ``None`` for a run without noise.
        """
        return None if self.budget is None else Cost.of(self.event, self.budget, self.unit, self.condition)

    @property
    def total(self) -> events.Event:
        """The event of the whole run.

        It is the private count, if there was one, and then the plan's own releases.
        """
        return self.with_count(self.event)

    def with_count(self, event: events.Event) -> events.Event:
        """``event`` after the count of the records, if that was a release."""
        return event if self.counted is None else self.counted.before(event, self._relation)

    @property
    def whole_only(self) -> bool:
        """Whether a run that stops early still costs the whole plan.

        It does in three cases. The data decide which releases are made; the number of releases is itself secret (a
        random round, a search); or the plan follows from a private count, and ε holds over all counts.
        """
        random = any(slot.law is not None for slot in self.schedule.slots)
        return self.schedule.adaptive or random or self.schedule.rounds is not None or self.counted is not None

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
        """The event after ``counts`` releases of each slot."""
        return self.schedule.event(self.noise_multiplier, self._relation, counts)

    @cached_property
    def proof(self) -> ProvedGuarantee:
        """The best proof of the plan's ε at the budget's δ."""
        event = self.total
        assert self.budget is not None
        return prove(event, delta=self.budget.delta, relation=self.budget.relation)

    @cached_property
    def generalization(self) -> float:
        """An upper bound on the expected gap of any mean loss in [0, 1] between new records and these.

        Replacing one record changes the law of what is released by a total variation of at most δ(0), so the run is
        uniformly stable at that level for every such loss (the error rate, say), and its generalisation gap is no
        larger (Hardt et al. 2016, theorem 2.2). Records are draws of one population. Removing one and adding
        another replaces one: under add-remove it is twice δ(0).

        >>> from quietgrad import DPGD, Budget, plan
        >>> round(plan(DPGD(steps=8), n=100, budget=Budget(1.0, 1e-5, "replace-one")).generalization, 3)
        0.107
        """
        relation, proof = self._relation, self.proof
        try:
            distance = delta_of(self.total, epsilon=0.0, relation=relation)
        except UnprovableError:  # then the bound that follows from ε and δ alone
            distance = math.tanh(proof.epsilon / 2.0) + 2.0 * proof.delta / (1.0 + math.exp(proof.epsilon))
        return min(1.0, distance if relation is Relation.REPLACE_ONE else 2.0 * distance)

    def epsilon(self, delta: float | None = None) -> float:
        """The ε the plan costs at ``delta`` (default: the budget's)."""
        if self.budget is None or delta is None or delta == self.budget.delta:
            return float(self.proof.epsilon)
        return account(self.total, delta=delta, relation=self.budget.relation)

    def epsilon_after(self, counts: Mapping[str, int]) -> float:
        """The ε of the first ``counts`` releases of each slot, at the budget's δ.

        It is never above the plan's.
        """
        if not any(counts.values()):
            return 0.0 if self.counted is None else self.epsilon()  # the count was made
        if any(slot.law is not None for slot in self.schedule.slots):
            return self.epsilon()  # δ is averaged over the rounds: a short run has no smaller ε of its own
        released = self.with_count(self.event_of(counts))
        return min(account(released, delta=self.proof.delta, relation=self._relation), self.epsilon())

    @cached_property
    def epsilon_curve(self) -> list[tuple[int, float]]:
        """ε after some numbers of releases, for slots that are used in their order; the last point is the plan's ε.

        >>> from quietgrad import DPGD, Budget, plan
        >>> [count for count, _ in plan(DPGD(steps=8), n=100, budget=Budget(1.0, 1e-5)).epsilon_curve]
        [1, 2, 3, 4, 5, 6, 8]
        """
        if self.budget is None:
            return []
        total, curve = self.schedule.releases, []
        if self.schedule.composition == "sequential" and not any(slot.law for slot in self.schedule.slots):
            # closer together at first, where ε grows fastest
            marks = sorted({max(1, round(total * (k / 10) ** 2)) for k in range(1, 10)} - {total})
            curve = [(mark, self.epsilon_after(self.first(mark))) for mark in marks]
        return [*curve, (total, self.epsilon())]

    def epsilon_by(self, releases: int) -> float:
        """ε of the curve's next point at or after ``releases``.

        It is never less than what they cost.
        """
        at = bisect_left(self.epsilon_curve, releases, key=lambda point: point[0])
        return self.epsilon_curve[min(at, len(self.epsilon_curve) - 1)][1]

    def curve_of(self, epsilon: float | None) -> list[tuple[int, float]] | None:
        """The curve of a run that states ``epsilon``.

        ``None`` for a run that was charged again and is above it.
        """
        whole = self.budget is None or epsilon is None or epsilon <= self.epsilon() * (1 + 1e-9)
        return self.epsilon_curve if whole else None

    def first(self, releases: int) -> dict[str, int]:
        """The first ``releases`` of the plan by slot, for slots that are used in their order."""
        counts: dict[str, int] = {}
        for slot in self.schedule.slots:
            counts[slot.name] = min(slot.count, releases)
            releases -= counts[slot.name]
        return counts

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values: what a party pins and a ledger stores."""
        return {
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "n_public": self.n_public,
            "unit": str(self.unit),
            **({} if self.condition is None else {"condition": self.condition}),
            **({} if self.records_public is None else {"records_public": self.records_public}),
            "budget": None if self.budget is None else self.budget.to_json(),
            "noise_multiplier": self.noise_multiplier,
            "paper_noise": None,  # a setting until 0.2: digests of plans that parties pinned cover the key
            "composition": self.schedule.composition,
            **({"adaptive": True} if self.schedule.adaptive else {}),
            **({} if self.schedule.rounds is None else {"rounds": list(self.schedule.rounds)}),
            "slots": [slot.to_json() for slot in self.schedule.slots],
            "counted": None if self.counted is None else self.counted.to_json(),
            "event": None if self.budget is None else self.event.to_json(),
        }

    @classmethod
    def from_json(cls, data: Json) -> Plan:
        """Rebuild a plan from :meth:`to_json`; its event follows from its slots and must be the one written."""
        rounds = data.get("rounds")
        schedule = Schedule(
            tuple(Slot.from_json(slot) for slot in data["slots"]),
            data["composition"],
            data.get("adaptive", False),
            None if rounds is None else (float(rounds[0]), float(rounds[1])),
        )
        plan = cls(
            algorithm=data["algorithm"],
            config=data["config"],
            schedule=schedule,
            n_public=data["n_public"],
            budget=None if data["budget"] is None else Budget.from_json(data["budget"]),
            noise_multiplier=data["noise_multiplier"],
            unit=PrivacyUnit.parse(data["unit"]),
            records_public=data.get("records_public"),
            condition=data.get("condition"),
            counted=None
            if data.get("counted") is None
            else PublicCount.from_json(data["n_public"], data["counted"]),
        )
        if plan.budget is not None and plan.event.to_json() != data["event"]:
            raise ValueError("event: does not follow from the slots")
        return plan

    def _repr_html_(self) -> str:
        """The plan in a notebook: each kind of release, and what all of them cost."""
        rows: list[tuple[str, object]] = [
            (
                f"{slot.count} × {slot.name}",
                f"{slot.sampling.describe()}; noise σ = {slot.multiplier(self.noise_multiplier):.4g} C",
            )
            for slot in self.schedule.slots
        ]
        if self.budget is None:
            rows.append(("privacy", "NOT PRIVATE: no noise is added"))
        else:
            rows.append(
                ("cost", f"ε = {self.proof.epsilon:.4g} at δ = {self.budget.delta:g} ({self.budget.relation})")
            )
            rows.append(("proved by", self.proof.accountant))
            if self.condition is not None:
                rows.append(("condition", self.condition))
        return f"<div>{html_facts(f'{self.algorithm} on {self.counts}', rows)}</div>"

    def explain(self, bounds: Iterable[object] = ()) -> str:
        """Return in words what will be released and what it costs.

        The text says what each release reveals and which proof gives its cost.

        ``bounds`` are printed below: what theorems say of the run (:mod:`quietgrad.methods.theorems`).
        """
        return "\n".join((explain(self), *(f"theorem: {bound}" for bound in bounds)))


DECLARED = "declared public"
"""What :attr:`Plan.declared` ends with."""


def check_records_public(records: int | None, n: int, unit: PrivacyUnit) -> None:
    """Raise ValueError unless ``records`` may be the public number of records of n people."""
    if records is None:
        return
    if unit is PrivacyUnit.RECORD:
        raise ValueError("records_public: is the number of all people's records; without person= it is n itself.")
    if isinstance(records, bool) or not isinstance(records, int) or records < n:
        raise ValueError(f"records_public={records!r}: must be a whole number, at least the number of people.")


def _spaced(count: int) -> str:
    return f"{count:,}".replace(",", " ")


_Plan = TypeVar("_Plan", bound=Plan)


def calibrate_plan(make: Callable[[float], _Plan], budget: Budget) -> _Plan:
    """The plan ``make(z)`` with the least noise multiplier z whose events are proved to meet ``budget``."""
    calibrated = make(calibrate_event(lambda z: make(z).total, budget=budget))
    if not calibrated.proof.within(budget):
        raise BudgetError(
            f"{calibrated.algorithm}: no noise was found that is proved to meet ε = {budget.epsilon:g}."
        )
    return calibrated


def plan(
    algorithm: HasSchedule,
    *,
    n: int | PublicCount,
    budget: Budget | None,
    noise_multiplier: float | None = None,
    looks: tuple[Slot, ...] = (),
    unit: str | PrivacyUnit = "record",
    records_public: int | None = None,
) -> Plan:
    """Calibrate ``algorithm`` to ``budget`` for ``n`` records, without reading data.

    Args:
        n: the number of records, or of people if they are the ``unit``: a public constant, or a curator's private
            count, whose cost is then part of the plan's.
        budget: the guarantee, or ``None`` for a run without noise that is not private.
        noise_multiplier: fix the noise instead; the plan's ε is then whatever it proves to be.
        looks: releases made before the algorithm starts, such as labels or ranges found privately; they share
            the budget and the session.
        unit: ``"person"`` if people have several records each (``person=`` of the run): the arithmetic is the same,
            of people.
        records_public: how many records these people have together, if that is public; it is only repeated.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> p = plan(DPGD(steps=30), n=10000, budget=Budget(1.0, 1e-5))
    >>> round(p.noise_multiplier, 1), round(p.epsilon(), 2)
    (20.4, 1.0)
    """
    kind = PrivacyUnit.parse(unit)
    size = n if isinstance(n, PublicCount) else PublicCount(n)
    n, counted = size.n, size if size.counted else None
    check_records_public(records_public, int(n), kind)
    if budget is not None and not algorithm.private:
        raise SettingError(
            f"{algorithm.name} is a non-private baseline: pass {{budget=None}}, or use its private form."
        )
    schedule = algorithm.schedule(int(n))
    if looks:
        if schedule.composition != "sequential":
            raise ValueError(
                f"{algorithm.name}: cannot share its budget with other releases, such as range estimates. "
                "Declare the bounds."
            )
        schedule = replace(schedule, slots=(*looks, *schedule.slots))

    def made(z: float) -> Plan:
        return Plan(
            algorithm.name, algorithm.config(), schedule, int(n), budget, float(z), kind, records_public,
            algorithm.condition, counted,
        )  # fmt: skip

    if counted is None and algorithm.whole_epochs:
        for slot in schedule.slots:
            if slot.law is None:
                slot.sampling.check_whole(slot.count)
    if budget is None:
        return made(0.0)
    schedule = schedule.under(budget.relation)
    algorithm.check_budget(budget)
    return calibrate_plan(made, budget) if noise_multiplier is None else made(noise_multiplier)
