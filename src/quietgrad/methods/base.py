"""The protocol of all algorithms, and the loop that first-order ones share.

An algorithm is a frozen, public configuration. It plans its releases from a public n, starts a state, and takes
steps through a session until ``state.done``. State is plain data, so that a run can be saved and resumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import round_law
from quietgrad.core.errors import SettingError
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Law, Plan, Schedule
from quietgrad.core.session.base import Session
from quietgrad.core.session.checkpoint import kept_state
from quietgrad.core.session.clipping import FLAT, read_clipping
from quietgrad.core.session.objectives import NoRegularizer, Objective, public_loss
from quietgrad.core.session.queries import Asked
from quietgrad.core.settings import Within
from quietgrad.core.vectors import Vector, copy, subtracted_from, zeros_like
from quietgrad.methods.learning_rates import LearningRate, as_rate
from quietgrad.methods.oracles.base import Estimate, Oracle

Output = Literal["last", "average", "ema", "random"]


@kept_state
@dataclass(slots=True)
class State:
    """State of a run. Every field is a vector, a number, a text or an :class:`Estimate`.

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


@runtime_checkable
class Algorithm(HasSchedule, Protocol):
    """A method: its releases and three steps of arithmetic. Inherit from it: what is optional is here."""

    by_party: ClassVar[bool] = False
    """Whether a federation's privacy unit is a party: each takes part as a whole, with one clipped contribution."""

    @property
    def needs_means(self) -> bool:
        """Whether some query has a bound only if a person counts with the mean of all their records."""
        return False

    def init(self, x0: Vector) -> State:
        """The state that a run from ``x0`` starts with."""
        return State(params=copy(x0))

    def step(self, state: State, session: Session) -> State:
        """One step through the session."""
        ...

    def output(self, state: State) -> Vector:
        """Return the parameters of a finished run."""
        return state.params

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        """Raise if settings, loss and start do not fit together. This runs before anything is reserved."""
        return

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Yield every query that a run may ask, with its slot and the fields that may vary.

        Yield nothing if other parties cannot approve the run beforehand.
        """
        return iter(())

    def bound_symbols(self) -> Mapping[str, tuple[str, str]]:
        """What C is in a slot: the symbol of the bound on a record's part, and its meaning."""
        return {}

    def notes(self, plan: Plan) -> tuple[str, ...]:
        """Return the notes that the privacy statement of a run of ``plan`` adds to its ε."""
        return ()


def check_known(n: object, dim: object, budget: object, **sizes: float | None) -> None:
    """Check what every theorem's settings follow from: records, dimension, budget, and positive numbers by name.

    >>> check_known(1000, 0, Budget(1.0, 1e-5))
    Traceback (most recent call last):
    quietgrad.core.errors.SettingError: dim=0: must be a whole number ≥ 1.
    """
    for name, count in (("n", n), ("dim", dim)):
        Within(1, whole=True).check(name, count)
    if not isinstance(budget, Budget):
        raise TypeError(f"budget={budget!r}: must be a Budget(epsilon, delta).")
    for name, size in sizes.items():
        if size is not None:
            Within(0.0, 1e300, closed=False).check(name, size)


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
    _rate: LearningRate
    _oracle: Oracle

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.returns == "random" and self.first_round + self.steps < 2:
            raise SettingError("{steps=1}: returns='random' needs 2 steps or more.")
        object.__setattr__(self, "_rate", self.rate())
        object.__setattr__(self, "_oracle", self.oracle())

    def oracle(self) -> Oracle:
        """The oracle the settings describe."""
        raise NotImplementedError

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        clipping = read_clipping(getattr(self, "clipping", FLAT))
        if not clipping.grouped:
            return
        names = public_loss(objective).parameter_names
        if names is None:
            raise ValueError(
                f"clipping={clipping.kind!r}: groups parameters by the modules of a network, and this model has "
                "none; use 'flat' or 'automatic'. No privacy budget was spent."
            )
        clipping.groups(names)  # raises if a parameter is in no group

    def bound_symbols(self) -> Mapping[str, tuple[str, str]]:
        return self._oracle.bound_symbols()

    def rate(self) -> LearningRate:
        """The step-size schedule."""
        return as_rate(self.learning_rate)

    def rounds(self) -> Sequence[float] | None:
        """P(R = first_round + k) of a random round, k = 0, 1, …; ``None`` for a fixed number of steps."""
        return [1.0 / self.steps] * self.steps if self.returns == "random" else None

    def law(self, after: int = 0) -> Law | None:
        """The law of the number of releases of a slot that is asked in all of R steps but the first ``after``."""
        probabilities = self.rounds()
        if probabilities is None:
            return None
        asked, never = max(0, self.first_round - after), max(0, after - self.first_round)
        return round_law([math.fsum(probabilities[: never + 1]), *probabilities[never + 1 :]], first=asked)

    def schedule(self, n_public: int) -> Schedule:
        rounds = self.rounds()
        most = self.steps if rounds is None else self.first_round + len(rounds) - 1
        return Schedule.of(self.oracle().slots(n_public, most))

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        return self._oracle.asks(x0, session)

    def step(self, state: State, session: Session) -> State:
        """One release, one update."""
        if state.step == 0 and (rounds := self.rounds()) is not None:
            # R by inversion of its law; rounding may leave a remainder, which is the last round's.
            sums = itertools.accumulate(rounds)
            u = session.uniform("round") * math.fsum(rounds)
            state.stop_at = self.first_round + next((k for k, p in enumerate(sums) if u < p), len(rounds) - 1)
            if state.stop_at == 0:
                state.done = True
                return state
        state.estimate = self._oracle.estimate(state.estimate, state.params, session)
        gradient = state.estimate.value
        assert gradient is not None
        if type(session.regularizer) is not NoRegularizer:  # of a network's length, adding zeros is not free
            gradient = gradient + session.regularizer.gradient(state.params)
        size, direction = self.direction(state, gradient)
        state.params = self.project(subtracted_from(state.params, size * direction))
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

    def _average(self, state: State) -> None:
        if self.returns == "average" and 2 * state.step > self.steps:  # the second half of the run
            fresh = 1.0 / (state.averaged + 1.0)
        elif self.returns == "ema":
            # Weight 10 % of the run's length, corrected for the start like Adam's moments.
            fresh = 1.0 - min(1.0 - 10.0 / max(self.steps, 11), state.averaged / (state.averaged + 1.0))
        else:
            return
        state.averaged += 1
        if state.average is None:
            state.average = zeros_like(state.params)
        state.average = state.average + (state.params - state.average) * fresh
