"""A plan before a run: the releases of an algorithm, and the noise with which they meet a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.errors import BudgetError
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget

if TYPE_CHECKING:
    from quietgrad.algorithms.base import Algorithm


def plan(
    algorithm: Algorithm,
    *,
    n: int,
    budget: Budget | None,
    noise_multiplier: float | None = None,
    extra: tuple[events.Event, ...] = (),
) -> Plan:
    """Price ``algorithm`` on ``n`` records without touching any: find the noise that meets ``budget``.

    Args:
        n: the number of records, a public constant.
        budget: the promise, or ``None`` for a run without noise that is not private.
        noise_multiplier: fix the noise instead; the plan's ε is then whatever it proves to be.
        extra: what was released for this run beforehand (such as private feature means); it shares the budget.

    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> p = plan(DPGD(steps=30), n=10000, budget=Budget(1.0, 1e-5))
    >>> round(p.noise_multiplier, 1), round(p.epsilon(), 2)
    (20.4, 1.0)
    """
    if isinstance(n, bool) or int(n) != n or n < 1:
        raise ValueError(f"n={n!r}: must be a whole number ≥ 1.")
    if budget is not None and not algorithm.private:
        raise ValueError(f"{algorithm.name} is a non-private baseline: pass budget=None, or use its private form.")
    schedule = algorithm.schedule(int(n))
    if budget is not None:
        schedule = schedule.under(budget.relation)
    paper, calibrated = None, False
    if budget is None:
        noise_multiplier = 0.0
    else:
        if hasattr(algorithm, "check_budget"):
            algorithm.check_budget(budget)
        printed = algorithm.paper_noise(int(n), budget) if hasattr(algorithm, "paper_noise") else None
        if printed is not None:
            noise_multiplier, paper = printed, algorithm.name
        elif noise_multiplier is None:
            from quietgrad.privacy.calibrate import calibrate_event

            def event(z: float) -> events.Event:
                return events.composed([*extra, schedule.event(z, budget.relation)])

            noise_multiplier = calibrate_event(event, budget=budget)
            calibrated = True
    made = Plan(algorithm.name, algorithm.config(), schedule, int(n), budget, float(noise_multiplier), paper, extra)
    # Calibrations are remembered in files that anybody may have written; the plan's own proof is needed anyway.
    if calibrated and not made.proof.within(budget):
        raise BudgetError(
            f"the remembered noise multiplier {noise_multiplier:g} costs ε = {made.epsilon():.4g}, not the budget: "
            "the calibration cache was altered. Delete it (QUIETGRAD_CACHE, or ~/.cache/quietgrad) and plan again."
        )
    return made
