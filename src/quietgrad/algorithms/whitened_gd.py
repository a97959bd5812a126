"""Full-batch descent on privately whitened features: the default for linear models.

A part of the budget buys a feature mean and a second-moment matrix; the rest buys a few full-batch gradient steps
in whitened coordinates, where one public step size suits all directions. Every release is an un-sampled
Gaussian, so the composition is exact, and every choice follows from public numbers and the releases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from quietgrad.algorithms.base import Algorithm, State, check_count, check_range, config_of
from quietgrad.curators.base import Session
from quietgrad.objectives.tables.whitening import (
    FeatureMean,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Relation
from quietgrad.sampling import FullBatch
from quietgrad.vectors import Vector, copy


@dataclass(frozen=True)
class WhitenedGD(Algorithm):
    """DP-GD in coordinates whitened by a private mean and second-moment matrix.

    Args:
        steps: T.
        learning_rate: η in units of 1/(curvature of the loss in its score); default 1.25.
        clip: C in units of the whitened rows' root mean square length.
        row_bound: R for the moments; ``None`` finds the 99 % quantile of row norms privately.
        mean_share, moment_share, norm_share: parts of the squared budget μ² spent on the mean, the second moments,
            and (without ``row_bound``) the row norms.
        damping: τ, in units of the spectral norm that the noise of the second moments is expected to have.

    >>> [(slot.name, slot.count) for slot in WhitenedGD(steps=10, row_bound=1.0).schedule(1000).slots]
    [('mean', 1), ('second-moments', 1), ('gradient', 10)]
    """

    steps: int = 32
    learning_rate: float = 1.25
    clip: float = 0.4
    row_bound: float | None = None
    mean_share: float = 0.04
    moment_share: float = 0.16
    norm_share: float = 0.02
    damping: float = 0.6

    name: ClassVar[str] = "whitened-gd"

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        for name in ("learning_rate", "clip", "damping"):
            check_range(name, getattr(self, name), 0.0, math.inf, closed=False)
        for name in ("mean_share", "moment_share", "norm_share"):
            check_range(name, getattr(self, name), 0.0, 0.5, closed=False)
        if self.row_bound is not None:
            check_range("row_bound", self.row_bound, 0.0, math.inf, closed=False)

    def schedule(self, n_public: int) -> Schedule:
        shares = {"mean": self.mean_share, "second-moments": self.moment_share}
        if self.row_bound is None:
            shares = {"norms": self.norm_share, **shares}
        rest = 1.0 - sum(shares.values())
        everyone = FullBatch()
        # A share s of μ² for k releases means noise ∝ √(k/s) each.
        slots = [Slot(name, everyone, noise=1.0 / math.sqrt(share)) for name, share in shares.items()]
        return Schedule((*slots, Slot("gradient", everyone, self.steps, noise=math.sqrt(self.steps / rest))))

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0))

    def step(self, state: State, door: Session) -> State:
        if state.step == 0:
            self._measure(state, door)
        extra = state.extra
        whitening = self._whitening(state, door)
        curvature = replace(door.objective, intercept=False, row_bound=1.0).constants().smoothness or 1.0
        gradient = door.release("gradient", WhitenedGradient(extra["inner"], extra["clip"], whitening))
        gradient *= 1.0 / door.expected_batch("gradient")
        gradient += whitening.pull_back(door.regularizer.gradient(whitening.to_raw(extra["inner"])))
        extra["inner"] = extra["inner"] - (self.learning_rate / curvature) * gradient
        state.estimate.value = gradient
        state.step += 1
        if 2 * state.step > self.steps:  # average the second half
            state.averaged += 1
            extra["mean_inner"] = extra["mean_inner"] + (extra["inner"] - extra["mean_inner"]) / state.averaged
        state.done = state.step >= self.steps
        if state.done:
            state.params = whitening.to_raw(extra["mean_inner"])
        return state

    def _measure(self, state: State, door: Session) -> None:
        """Release the moments and keep what follows from them."""
        plan = door.plan
        relation = Relation.ADD_REMOVE if plan.budget is None else plan.budget.relation
        bound = self.row_bound if self.row_bound is not None else self._row_bound(door)
        n = door.expected_batch("mean")
        mean = door.release("mean", FeatureMean(bound)) / n
        features = len(mean)
        query = SecondMomentMatrix(bound, relation)
        second = query.unpack(door.release("second-moments", query) / n, features)
        noise = plan.noise_multiplier * plan.schedule["second-moments"].noise * query.bound / n
        # GOE noise of diagonal deviation s has spectral norm about s·√(2d); never below float noise of the data.
        floor = max(self.damping * noise * math.sqrt(2.0 * features), 1e-9 * bound * bound)
        extra = state.extra
        extra.update(row_bound=bound, mean=mean, second=second, floor=floor)
        whitening = self._whitening(state, door)
        extra["clip"] = self.clip * whitening.radius
        extra["inner"] = np.zeros_like(state.params)
        extra["mean_inner"] = np.zeros_like(state.params)

    def _row_bound(self, door: Session) -> float:
        query = RowNormHistogram()
        counts = door.release("norms", query)
        noise = door.plan.noise_multiplier * door.plan.schedule["norms"].noise
        return query.quantile(counts, 0.99, noise)

    def _whitening(self, state: State, door: Session) -> Whitening:
        if "whitening" not in state.memo:
            state.memo["whitening"] = Whitening.from_moments(
                state.extra["mean"],
                state.extra["second"],
                floor=state.extra["floor"],
                column=door.objective.intercept_scale if door.objective.intercept else 0.0,
                outputs=door.objective.outputs,
            )
        return cast(Whitening, state.memo["whitening"])

    def output(self, state: State) -> Vector:
        return state.params

    def config(self) -> dict[str, Any]:
        return config_of(self)
