"""What every algorithm is, and the loop that first-order ones share.

An algorithm is a frozen, public configuration. It plans its releases from a public n, starts a state, and takes
steps through a session until ``state.done``. State is plain data, so that a run can be saved and resumed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from quietgrad.algorithms.learning_rates import LearningRate, as_rate
from quietgrad.curators.base import Session
from quietgrad.objectives.base import Asked, Objective
from quietgrad.oracles.base import Estimate, Oracle
from quietgrad.plans.schedule import Law, Plan, Schedule
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.events import round_law
from quietgrad.vectors import Vector, copy, zeros_like

Output = Literal["last", "average", "ema", "random"]


@dataclass(slots=True)
class State:
    """Where a run stands; every field is a vector, a number, a text or an :class:`Estimate`.

    ``velocity`` and ``second`` are momentum buffers, ``average`` the running average that may be returned,
    ``stop_at`` a random round drawn before the first release. ``extra`` is an algorithm's own state; ``memo`` holds
    what can be computed from the rest again and is never saved.
    """

    params: Vector
    step: int = 0
    done: bool = False
    estimate: Estimate = field(default_factory=Estimate)
    velocity: Vector | None = None
    second: Vector | None = None
    average: Vector | None = None
    averaged: int = 0
    stop_at: int | None = None
    stopped_by: str = "steps"
    extra: dict[str, Any] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)


class HasSchedule(Protocol):
    """What a plan is made of: public settings and the releases they lead to."""

    name: ClassVar[str]
    private: ClassVar[bool] = True
    whole_epochs: ClassVar[bool] = True
    """Whether a plan of random allocation that ends within an epoch, which is paid for whole, is refused."""

    @property
    def condition(self) -> str | None:
        """The clause under which the ε of its releases holds; ``None`` where the library enforces all of it."""
        return None

    def schedule(self, n_public: int) -> Schedule:
        """The releases of a run on ``n_public`` records, known before any data."""
        ...

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return config_of(self)

    def check_budget(self, budget: Budget) -> None:
        """Raise if there is no proof for such a budget; before any noise is calibrated."""
        return


class Algorithm(HasSchedule, Protocol):
    """A method: its releases and three steps of arithmetic. Inherit from it: what is optional is here."""

    @property
    def needs_means(self) -> bool:
        """Whether it asks what is bounded for a mean of all of a person's records only."""
        return False

    def init(self, x0: Vector) -> State:
        """The state that a run from ``x0`` starts with."""
        ...

    def step(self, state: State, session: Session) -> State:
        """One step through the session."""
        ...

    def output(self, state: State) -> Vector:
        """What is returned of a run that is over."""
        ...

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        """Raise if settings, loss and start do not go together; before anything is reserved."""
        return

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """By slot, every query that a run may ask, and what may vary in it; nothing if others cannot approve it."""
        return iter(())


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if isinstance(value, bool) or int(value) != value or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number ≥ {least}.")


def check_range(name: str, value: float, low: float, high: float, *, closed: bool = True) -> None:
    """Raise unless low ≤ value ≤ high (low < value ≤ high if not ``closed``)."""
    inside = low <= value <= high if closed else low < value <= high
    if not inside:
        bracket = "[" if closed else "("
        raise ValueError(f"{name}={value!r}: must be in {bracket}{low:g}, {high:g}].")


def config_of(algorithm: Any) -> dict[str, Any]:
    """The public settings of a frozen dataclass as JSON values."""

    def plain(value: Any) -> Any:
        if hasattr(value, "config"):
            return value.config()
        if hasattr(value, "to_json"):
            return value.to_json()
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    return {f.name: plain(getattr(algorithm, f.name)) for f in dataclasses.fields(algorithm)}


class FirstOrder(Algorithm):
    """θ ← θ − η_t·direction, the loop of DP-SGD and its relatives; subclasses choose oracle and direction.

    With ``returns="random"`` the result is uniform on θ⁰ … θᵀ⁻¹, the points at which gradients were asked for: the
    number of steps R is drawn before the first release and the run stops there. The accountant then averages over
    R, and half the work is saved. ``first_round`` is the least R.
    """

    first_round: ClassVar[int] = 0

    steps: int
    learning_rate: Any
    returns: Any

    def oracle(self) -> Oracle:
        """The oracle the settings describe."""
        raise NotImplementedError

    def rate(self) -> LearningRate:
        """The step-size schedule."""
        return as_rate(self.learning_rate)

    def rounds(self) -> Sequence[float] | None:
        """P(R = first_round + k) of a random round, k = 0, 1, …; ``None`` for a fixed number of steps."""
        return [1.0 / self.steps] * self.steps if self.returns == "random" else None

    def law(self, after: int = 0) -> Law | None:
        """The law that a slot is priced with which is asked in all of R steps but the first ``after``."""
        probabilities = self.rounds()
        if probabilities is None:
            return None
        asked, never = max(0, self.first_round - after), max(0, after - self.first_round)
        return round_law([math.fsum(probabilities[: never + 1]), *probabilities[never + 1 :]], first=asked)

    @property
    def _most_steps(self) -> int:
        """The largest R."""
        rounds = self.rounds()
        return self.steps if rounds is None else self.first_round + len(rounds) - 1

    def schedule(self, n_public: int) -> Schedule:
        """The releases of a run on ``n_public`` records."""
        return Schedule.of(self.oracle().slots(n_public, self._most_steps))

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """What the oracle asks."""
        return self._oracle.asks(x0, session)

    def init(self, x0: Vector) -> State:
        """Start at ``x0``."""
        return State(params=copy(x0))

    def step(self, state: State, session: Session) -> State:
        """One release, one update."""
        if state.step == 0:
            state.stop_at = self._draw_round(session)
            if state.stop_at == 0:
                state.done = True
                return state
        state.estimate = self._oracle.estimate(state.estimate, state.params, session)
        gradient = state.estimate.value + session.regularizer.gradient(state.params)
        size, direction = self.direction(state, gradient)
        state.params = self.project(state.params - size * direction)
        state.step += 1
        self._average(state)
        state.done = state.step >= (self.steps if state.stop_at is None else state.stop_at)
        return state

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        """The step size and the direction to go against."""
        return self._rate(state.step, self.steps), gradient

    def project(self, params: Vector) -> Vector:
        """Back into the domain; here the whole space."""
        return params

    def output(self, state: State) -> Vector:
        """The iterate that is returned: last, random round, tail average or exponential average."""
        return state.average if state.average is not None else state.params

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if self.returns not in get_args(Output):
            raise ValueError(f"returns={self.returns!r}: must be one of {', '.join(get_args(Output))}.")
        if self.returns == "random" and self.first_round + self.steps < 2:
            raise ValueError("steps=1: returns='random' needs 2 steps or more.")
        object.__setattr__(self, "_rate", self.rate())
        object.__setattr__(self, "_oracle", self.oracle())

    _rate: LearningRate
    _oracle: Oracle

    def _draw_round(self, session: Session) -> int | None:
        probabilities = self.rounds()
        if probabilities is None:
            return None
        u, total = session.uniform("round") * math.fsum(probabilities), 0.0
        for k, p in enumerate(probabilities):
            total += p
            if u < total:
                return self.first_round + k
        return self._most_steps

    def _average(self, state: State) -> None:
        rule = self.returns
        if rule == "average" and 2 * state.step > self.steps:  # the second half of the run
            state.averaged += 1
            if state.average is None:
                state.average = zeros_like(state.params)
            state.average = state.average + (state.params - state.average) * (1.0 / state.averaged)
        elif rule == "ema":
            # Weight 10 % of the run's length, corrected for the start like Adam's moments.
            keep = min(1.0 - 10.0 / max(self.steps, 11), state.averaged / (state.averaged + 1.0))
            state.averaged += 1
            if state.average is None:
                state.average = zeros_like(state.params)
            state.average = keep * state.average + (1.0 - keep) * state.params
