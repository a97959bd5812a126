"""How far a fixed noise multiplier goes: the steps of a plan that its budget affords."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quietgrad.algorithms.base import State
from quietgrad.curators.base import Session
from quietgrad.errors import BudgetError
from quietgrad.plans.schedule import Plan, Schedule

__all__ = ["Shortened", "affordable", "affordable_steps"]


def affordable(plan: Plan) -> Plan:
    """The plan, or the part of it that its budget affords."""
    steps = affordable_steps(plan)
    return plan if steps is None else replace(plan, schedule=_first(plan.schedule, steps))


class Shortened:
    """An algorithm that ends after so many steps, decided before the run; all else is as it was.

    >>> from quietgrad import DPSGD
    >>> Shortened(DPSGD(steps=100, batch_size=10), 30).schedule(1000).releases
    30
    """

    def __init__(self, algorithm: Any, steps: int) -> None:
        self._algorithm = algorithm
        self._steps = steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._algorithm, name)

    def schedule(self, n_public: int) -> Schedule:
        """The first releases of the algorithm's schedule."""
        return _first(self._algorithm.schedule(n_public), self._steps)

    def step(self, state: State, door: Session) -> State:
        """The algorithm's step; the last one says that the budget ended the run."""
        state = self._algorithm.step(state, door)
        if state.step >= self._steps and not state.done:
            state.done, state.stopped_by = True, "budget"
        return state

    def config(self) -> dict[str, Any]:
        """The algorithm's settings and the step it stops after."""
        return {**self._algorithm.config(), "stops_after": self._steps}


def _first(schedule: Schedule, steps: int) -> Schedule:
    slots = []
    for slot in schedule.slots:
        count = min(slot.count, steps)
        steps -= count
        if count:
            slots.append(replace(slot, count=count))
    return replace(schedule, slots=tuple(slots))


def affordable_steps(plan: Plan) -> int | None:
    """How many steps a plan of fixed noise may take within its budget; None: all of them."""
    if plan.budget is None or plan.paper_noise or plan.epsilon() <= plan.budget.epsilon:
        return None
    limit = plan.budget.epsilon
    if plan.schedule.composition != "sequential" or any(slot.law is not None for slot in plan.schedule.slots):
        raise BudgetError(
            f"noise_multiplier={plan.noise_multiplier:g}: the run would cost ε = {plan.epsilon():.4g}, above the "
            f"budget of {limit:g}, and cannot be cut short. Leave the noise to calibration."
        )

    def cost(steps: int) -> float:
        counts: dict[str, int] = {}
        for slot in plan.schedule.slots:
            counts[slot.name] = min(slot.count, steps)
            steps -= counts[slot.name]
        return plan.epsilon_after(counts)

    low, high = 0, plan.schedule.releases  # cost(low) ≤ limit < cost(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    if low == 0:
        raise BudgetError(
            f"noise_multiplier={plan.noise_multiplier:g}: one step costs ε = {cost(1):.4g}, above the budget of "
            f"{limit:g}. Use more noise or a smaller batch."
        )
    return low
