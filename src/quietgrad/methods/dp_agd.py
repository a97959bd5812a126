"""DP-AGD (Lee & Kifer 2018): gradient descent that decides its own per-step budget.

Each step spends ρ on a noisy gradient and ρ′ on a noisy choice of the step length from a grid that contains zero.
If zero is chosen the gradient was too noisy: it is measured again with a little more budget and averaged in. A hard
zCDP filter ends the run, so the adaptive spending never passes the total.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from quietgrad.core.noise.mechanisms import ExponentialMechanism
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.queries import GradientQuery, LossQuery
from quietgrad.core.settings import Count, Positive, Within
from quietgrad.core.vectors import Vector, copy, norm
from quietgrad.methods.base import Algorithm, State


@dataclass(frozen=True)
class DPAGD(Algorithm):
    """Adaptive full-batch descent under a zCDP filter.

    Args:
        splits: the first gradient and the first choice each get ρ/(2·splits).
        growth: after a refused step the gradient's share grows by this fraction.
        longest_step: largest step length on the grid; adapted every ``adapt_every`` accepted steps to 1 + growth
            times the largest length recently taken.
        grid: number of candidate lengths, zero among them.
        clip: C of the gradients. ``loss_clip``: largest loss of one record in the choice.
        max_steps: an upper limit of rounds, public like everything here.

    >>> DPAGD(max_steps=10).schedule(100).composition
    'filter'
    """

    splits: Count = 60
    growth: Positive = 0.1
    longest_step: Positive = 2.0
    adapt_every: Count = 10
    grid: Annotated[int, Within(2, whole=True)] = 20
    clip: Positive = 1.0
    loss_clip: Positive = 3.0
    max_steps: Count = 2000

    name: ClassVar[str] = "dp-agd"

    @property
    def steps(self) -> int:
        """The most rounds a run can make."""
        return self.max_steps

    def schedule(self, n_public: int) -> Schedule:
        everyone = FullBatch()
        return Schedule(
            (
                Slot("gradient", everyone, 2 * self.max_steps),
                Slot("length", everyone, 2 * self.max_steps, mechanism=ExponentialMechanism()),
            ),
            "filter",
        )

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0), extra={"longest": self.longest_step, "recent": []})

    def step(self, state: State, session: Session) -> State:
        extra = state.extra
        if "gradient_rho" not in extra:
            first = 1.0 if math.isinf(session.rho_left) else session.rho_left / (2 * self.splits)
            extra.update(gradient_rho=first, length_rho=first)
        cost = self._gradient_cost(state) + extra["length_rho"]
        if cost > session.rho_left or state.step >= self.max_steps:
            state.done = True
            state.stopped_by = "steps" if state.step >= self.max_steps else "budget"
            return state
        gradient = self._measure(state, session)
        length = norm(gradient)
        direction = gradient * (1.0 / length) if length > 0.0 else gradient
        lengths = [extra["longest"] * k / (self.grid - 1) for k in range(self.grid)]
        candidates = [state.params - a * direction for a in lengths]
        # n·F(c) = Σ fᵢ(c) + n·r(c): the second part is public, and without it the choice is that of another risk.
        n = session.expected_batch("length")
        chosen = session.choose(
            "length",
            [LossQuery(c, self.loss_clip) for c in candidates],
            rho=extra["length_rho"],
            offsets=[n * float(session.regularizer.value(c)) for c in candidates],
        )
        state.step += 1
        if chosen == 0:
            extra["refused"] = True
            return state
        state.params = candidates[chosen]
        state.estimate.value = None
        extra["refused"] = False
        extra["recent"] = [*extra["recent"], lengths[chosen]]
        if len(extra["recent"]) >= self.adapt_every:
            extra["longest"] = (1.0 + self.growth) * max(extra["recent"])
            extra["recent"] = []
        return state

    def _gradient_cost(self, state: State) -> float:
        return float(state.extra["gradient_rho"] * (self.growth if state.extra.get("refused") else 1.0))

    def _measure(self, state: State, session: Session) -> Vector:
        """A fresh noisy gradient, or the last one averaged with another that costs only the increase of ρ."""
        cost = self._gradient_cost(state)
        fresh: Vector = session.release("gradient", GradientQuery(state.params, self.clip), rho=cost)
        fresh = fresh * (1.0 / session.expected_batch("gradient")) + session.regularizer.gradient(state.params)
        if state.extra.get("refused"):
            old = state.extra["gradient_rho"]
            fresh = (old * state.estimate.value + cost * fresh) * (1.0 / (old + cost))
            state.extra["gradient_rho"] = old + cost
        state.estimate.value = fresh
        return fresh
