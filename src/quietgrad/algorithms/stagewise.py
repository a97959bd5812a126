"""DPageEM and DPageS (paper 001, Algorithms 1 and 2): stages that halve the step and double the length.

Stage k = 1 … K runs T^k = 2^k·T⁰ steps at η^k = η⁰/2^k from the point the stage before returned, with momentum ϱ
switched on for its first 2^k·t⁰_on steps. Momentum, restarts and rates are post-processing. The paper prices this
with a theorem for another sampler and relation; here the accountant prices what is run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quietgrad.algorithms.base import Algorithm, State, check_count, check_range, config_of
from quietgrad.curators.base import Session
from quietgrad.objectives.base import Gradient
from quietgrad.oracles.base import SamplingName, sampling_of
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.events import round_law
from quietgrad.vectors import Vector, copy


@dataclass(frozen=True)
class StagewiseDPSGD(Algorithm):
    """ω ← ω − η^k·ĝ + ϱ_t(ω − ω_prev); ``early_momentum=0`` is DPageS.

    Args:
        stages: K.
        first_steps: T⁰, so that stage k has 2^k·T⁰ steps.
        batch_size, clip, sampling: as in :class:`~quietgrad.algorithms.dp_sgd.DPSGD`.
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
        sampling = sampling_of(self.sampling, n_public, self.batch_size)
        slots = []
        for k in range(1, self.stages + 1):
            length = self.length(k)
            law = round_law([1.0 / length] * length) if self.returns == "random" else None
            slots.append(Slot(f"stage-{k}", sampling, length, law=law))
        return Schedule(tuple(slots))

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0), extra={"stage": 1, "stage_step": 0})

    def step(self, state: State, door: Session) -> State:
        stage, t = state.extra["stage"], state.extra["stage_step"]
        if t == 0:
            state.velocity = None  # ω₋₁ = ω₀: a stage starts at rest
            length = self.length(stage)
            state.stop_at = length if self.returns == "last" else 1 + int(door.uniform(f"stage-{stage}") * length)
        slot = f"stage-{stage}"
        gradient = door.release(slot, Gradient(state.params, self.clip))
        gradient *= 1.0 / door.expected_batch(slot)
        gradient += door.regularizer.gradient(state.params)
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
