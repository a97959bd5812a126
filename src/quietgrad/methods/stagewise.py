"""DPageEM and DPageS (paper 001, Algorithms 1 and 2): stages that halve the step and double the length.

Stage k = 1 … K runs T^k = 2^k·T⁰ steps at η^k = η⁰/2^k from the point the stage before returned, with momentum ϱ
switched on for its first 2^k·t⁰_on steps. Momentum, restarts and rates are post-processing. The paper
accounts for this with a theorem for another sampler and relation; here the accountant proves what is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import round_law
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import SamplingName, sampling_of
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import LossConstants
from quietgrad.core.session.queries import Asked, GradientQuery
from quietgrad.core.settings import Count, Fraction, Positive, Within
from quietgrad.core.vectors import Vector, copy
from quietgrad.methods.base import Algorithm, State, check_known
from quietgrad.methods.oracles.base import Noise, slot_of


@dataclass(frozen=True)
class StagewiseDPSGD(Algorithm):
    """DP-SGD with a step length that falls in stages, and early momentum.

    ω ← ω − η^k·ĝ + ϱ_t(ω − ω_prev); ``early_momentum=0`` is DPageS.

    Args:
        stages: K.
        first_steps: T⁰, so that stage k has 2^k·T⁰ steps.
        batch_size, clip, sampling, cohorts, noise: as in :class:`~quietgrad.methods.dp_sgd.DPSGD`. In turns, or
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

    stages: Count = 4
    first_steps: Count = 50
    batch_size: Count = 256
    learning_rate: Positive = 1.0
    clip: Positive = 1.0
    momentum: Fraction = 0.9
    early_momentum: Annotated[int, Within(0, whole=True)] = 5
    sampling: SamplingName = "poisson"
    returns: Literal["last", "random"] = "last"
    cohorts: int | None = None
    noise: Noise = "independent"

    name: ClassVar[str] = "stagewise"

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        batch_size: int,
        growth: float | None = None,
        quasi_convexity: float = 1.0,
        momentum: float = 0.9,
        early: float = 0.2,
        slack: float = 1.0,
        sampling: SamplingName = "poisson",
    ) -> StagewiseDPSGD:
        """Theorem 3.2's settings.

        η⁰ = min{θ(1−ϱ)²/(2β), 1}, T⁰ with η⁰·T⁰·((1−e) + e/(2(1−ϱ))) = 1/(c₄θμ), t⁰_on = e·T⁰, and
        K = log₂(n²ε²θ²μ/(dL²·ln(1/δ))); every stage returns a random iterate. Printed is max{…, 1}, but the proof
        needs the smaller. These are not for practice: with ϱ = 0.9 the step is 200 times shorter than 1/β, and the
        stages of the example below have 50 million steps together.

        Args:
            constants: L and β of the loss at its row bound.
            growth: μ of the Polyak–Łojasiewicz inequality (default: the regulariser's strong convexity).
            quasi_convexity: θ; 1 if the risk is convex.
            early: e, the share of a stage with momentum. slack: c₄ in (0, 2).

        >>> from quietgrad.objectives import L2, Logistic
        >>> strong = Logistic(regularizer=L2(0.1), row_bound=1.0, rows="clip").constants()
        >>> made = StagewiseDPSGD.theory(strong, n=10_000, dim=20, budget=Budget(1.0, 1e-5), batch_size=100)
        >>> made.stages, made.first_steps, round(made.learning_rate, 4)
        (16, 389, 0.0143)
        """
        lipschitz, beta = constants.needed("lipschitz", "smoothness")
        mu = constants.strong_convexity if growth is None else growth
        check_known(n, dim, budget)
        Within(0.0, closed=False).check("growth", mu)
        Within(0.0, 1.0, closed=False).check("quasi_convexity", quasi_convexity)
        Within(0.0, 1.0).check("early", early)
        Within(0.0, 2.0 - 1e-9, closed=False).check("slack", slack)
        rate = min(quasi_convexity * (1.0 - momentum) ** 2 / (2.0 * beta), 1.0)
        effective = (1.0 - early) + early / (2.0 * (1.0 - momentum))
        first = max(1, math.ceil(1.0 / (slack * quasi_convexity * mu * rate * effective)))
        signal = (n * budget.epsilon * quasi_convexity / lipschitz) ** 2 * mu / (dim * math.log(1.0 / budget.delta))
        return cls(
            stages=max(1, math.ceil(math.log2(max(2.0, signal)))), first_steps=first, batch_size=batch_size,
            learning_rate=rate, clip=lipschitz, momentum=momentum, early_momentum=round(early * first),
            sampling=sampling, returns="random",
        )  # fmt: skip

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
