"""DPageEM and DPageS (paper 001, Algorithms 1 and 2): stages that halve the step and double the length.

Stage k = 1 … K runs T^k = 2^k·T⁰ steps at η^k = η⁰/2^k from the point the stage before returned, with momentum ϱ
switched on for its first 2^k·t⁰_on steps. Momentum, restarts and rates are post-processing. The paper prices this
with a theorem for another sampler and relation; here the accountant prices what is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quietgrad.algorithms.base import Algorithm, State, check_count, check_range, config_of
from quietgrad.curators.base import Session
from quietgrad.objectives.base import Asked, GradientQuery
from quietgrad.oracles.base import Noise, slot_of
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.events import round_law
from quietgrad.sampling import SamplingName, sampling_of
from quietgrad.vectors import Vector, copy


@dataclass(frozen=True)
class StagewiseDPSGD(Algorithm):
    """DP-SGD with a step length that falls in stages, and early momentum.

    ω ← ω − η^k·ĝ + ϱ_t(ω − ω_prev); ``early_momentum=0`` is DPageS.

    Args:
        stages: K.
        first_steps: T⁰, so that stage k has 2^k·T⁰ steps.
        batch_size, clip, sampling, cohorts, noise: as in :class:`~quietgrad.algorithms.dp_sgd.DPSGD`. In turns, or
            with correlated noise, all stages are one slot.
        learning_rate: η⁰.
        momentum: ϱ while it is on.
        early_momentum: t⁰_on, so that momentum is on for the first 2^k·t⁰_on steps of stage k.
        returns: what a stage returns: its ``"last"`` iterate, or a uniformly ``"random"`` one, whose number is
            drawn first so that the stage stops there and the accountant averages over it.

    >>> algorithm = StagewiseDPSGD(stages=2, first_steps=10)
    >>> [(slot.name, slot.count) for slot in algorithm.schedule(1000).slots]
    [('stage-1', 20), ('stage-2', 40)]
    """

    stages: int = 4
    first_steps: int = 50
    batch_size: int = 256
    learning_rate: float = 1.0
    clip: float = 1.0
    momentum: float = 0.9
    early_momentum: int = 5
    sampling: SamplingName = "poisson"
    returns: Literal["last", "random"] = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "stagewise"

    def __post_init__(self) -> None:
        check_count("stages", self.stages)
        check_count("first_steps", self.first_steps)
        check_count("batch_size", self.batch_size)
        check_count("early_momentum", self.early_momentum, least=0)
        check_range("learning_rate", self.learning_rate, 0.0, math.inf, closed=False)
        check_range("clip", self.clip, 0.0, math.inf, closed=False)
        check_range("momentum", self.momentum, 0.0, 1.0 - 1e-9)

    @property
    def steps(self) -> int:
        """ΣT^k."""
        return sum(self.length(k) for k in range(1, self.stages + 1))

    def length(self, stage: int) -> int:
        """T^k = 2^k·T⁰."""
        return self.first_steps << stage

    def schedule(self, n_public: int) -> Schedule:
        sampling = sampling_of(self.sampling, n_public, self.batch_size, self.cohorts)
        if self._slot(1) == "stages":
            if self.returns == "random":
                raise ValueError(
                    "returns='random': the ε of a random number of releases is not known here; return the last."
                )
            return Schedule((slot_of("stages", sampling, self.steps, self.noise),))
        slots = []
        for k in range(1, self.stages + 1):
            length = self.length(k)
            law = round_law([1.0 / length] * length) if self.returns == "random" else None
            slots.append(Slot(f"stage-{k}", sampling, length, law=law))
        return Schedule(tuple(slots), "parallel" if self.sampling == "single-pass" else "sequential")

    def _slot(self, stage: int) -> str:
        """A stage's own slot, unless all releases together are one thing."""
        apart = self.noise == "independent" and self.cohorts is None
        return f"stage-{stage}" if apart else "stages"

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        for slot in session.plan.schedule.slots:
            yield slot.name, Asked(GradientQuery(x0, self.clip))

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0), extra={"stage": 1, "stage_step": 0})

    def step(self, state: State, session: Session) -> State:
        stage, t = state.extra["stage"], state.extra["stage_step"]
        if t == 0:
            state.velocity = None  # ω₋₁ = ω₀: a stage starts at rest
            length = self.length(stage)
            state.stop_at = (
                length if self.returns == "last" else 1 + int(session.uniform(f"stage-{stage}") * length)
            )
        slot = self._slot(stage)
        gradient = session.release(slot, GradientQuery(state.params, self.clip))
        gradient *= 1.0 / session.expected_batch(slot)
        gradient += session.regularizer.gradient(state.params)
        move = (-self.learning_rate / 2**stage) * gradient
        if state.velocity is not None and t < self.early_momentum * 2**stage:
            move = move + self.momentum * state.velocity
        state.estimate.value = gradient
        state.params = state.params + move
        state.velocity = move
        state.step += 1
        t += 1
        if t >= (state.stop_at or 0):
            stage, t = stage + 1, 0
        state.extra = {"stage": stage, "stage_step": t}
        state.done = stage > self.stages
        return state

    def output(self, state: State) -> Vector:
        return state.params

    def config(self) -> dict[str, Any]:
        return config_of(self)
