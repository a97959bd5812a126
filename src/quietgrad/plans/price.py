"""The price of a plan: the noise with which its releases meet a budget, found once and proved before it is used.

Nothing else in quietgrad calibrates a plan. A remembered calibration is a guess like any other: the plan's own
events are proved before the plan is returned, so no file can make a run dearer than its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from quietgrad.errors import BudgetError
from quietgrad.plans.counting import PublicCount, only_gaussian
from quietgrad.plans.schedule import Plan, Slot, check_records_public
from quietgrad.privacy.budget import Budget, Unit

if TYPE_CHECKING:
    from quietgrad.algorithms.base import Releases

AnyPlan = TypeVar("AnyPlan", bound=Plan)


def price(make: Callable[[float], AnyPlan], budget: Budget) -> AnyPlan:
    """The plan ``make(z)`` with the least noise multiplier z whose events are proved to meet ``budget``."""
    from quietgrad.privacy.calibrate import calibrate_event

    made = make(calibrate_event(lambda z: make(z).total, budget=budget))
    if not made.proof.within(budget):
        raise BudgetError(f"{made.algorithm}: no noise was found that is proved to meet ε = {budget.epsilon:g}.")
    return made


def plan(
    algorithm: Releases,
    *,
    n: int | PublicCount,
    budget: Budget | None,
    noise_multiplier: float | None = None,
    looks: tuple[Slot, ...] = (),
    unit: str | Unit = "record",
    records_public: int | None = None,
) -> Plan:
    """Price ``algorithm`` on ``n`` records without touching any: find the noise that meets ``budget``.

    Args:
        n: the number of records, or of people if they are the ``unit``; a public constant, or what
            :func:`~quietgrad.curators.counting.public_count` counted, whose price is then part of the plan's.
        budget: the promise, or ``None`` for a run without noise that is not private.
        noise_multiplier: fix the noise instead; the plan's ε is then whatever it proves to be.
        looks: releases made before the algorithm starts, such as labels or ranges found privately; they share
            the budget and the session.
        unit: ``"person"`` if people have several records each (``person=`` of the run): the arithmetic is the same,
            of people.
        records_public: how many records these people have together, if that is public; it is only repeated.

    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> p = plan(DPGD(steps=30), n=10000, budget=Budget(1.0, 1e-5))
    >>> round(p.noise_multiplier, 1), round(p.epsilon(), 2)
    (20.4, 1.0)
    """
    kind = Unit.parse(unit)
    size = n if isinstance(n, PublicCount) else PublicCount(n)
    n, counted = size.n, size if size.counted else None
    check_records_public(records_public, int(n), kind)
    if budget is not None and not algorithm.private:
        raise ValueError(f"{algorithm.name} is a non-private baseline: pass budget=None, or use its private form.")
    schedule = algorithm.schedule(int(n))
    if looks:
        if schedule.composition != "sequential":
            raise ValueError(f"{algorithm.name}: a method that cannot share its budget with a look at the data.")
        schedule = replace(schedule, slots=(*looks, *schedule.slots))

    def made(z: float, paper: str | None = None) -> Plan:
        return Plan(
            algorithm.name, algorithm.config(), schedule, int(n), budget, float(z), paper, kind, records_public,
            algorithm.condition, counted,
        )  # fmt: skip

    if budget is None:
        return made(0.0)
    schedule = schedule.under(budget.relation)
    algorithm.check_budget(budget)
    printed = algorithm.paper_noise(int(n), budget)
    if printed is not None:
        return made(printed, algorithm.name)
    if counted is not None and counted.gaussian and not only_gaussian(schedule.event(1.0, budget.relation)):
        raise ValueError(f"{algorithm.name}: its releases are not Gaussian, and the records were counted as if.")
    return price(made, budget) if noise_multiplier is None else made(noise_multiplier)
