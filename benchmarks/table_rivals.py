"""Private rivals of the defaults, on features scaled by declared bounds: DP-GD, DP-SGD and DP-Newton.

Their settings are searched on held-out rows (a fifth of the training rows), and the search is not charged, which
favours them. DP-GD and DP-Newton promise under replace-one or, where their name says so, under add-remove, which is
DP-SGD's relation and the easier one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import quietgrad as qg
from benchmarks.table_suite import Problem, outward
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.range_estimation import noise_of
from quietgrad.tables.losses import Logistic, Multinomial, Squared
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import WhitenedGradient, WhitenedInformation, Whitening

DELTA = 1e-5
_LONG = 2e7  # cells of a table (MNIST) on which 128 full passes are not tried
_MOST = 200  # features of a Newton step: its matrix is noisy in all d² entries


@dataclass(frozen=True)
class Newton(Algorithm):
    """DP-Newton: in every step a noisy gradient and a noisy Hessian, damped by the norm that its noise has."""

    steps: int = 4
    clip: float = 1.0
    reach: float = 1.0

    name: ClassVar[str] = "dp-newton"

    def schedule(self, n_public: int) -> Schedule:
        noise = math.sqrt(2.0 * self.steps)
        return Schedule(
            tuple(Slot(name, FullBatch(), self.steps, noise=noise) for name in ("score", "information"))
        )

    def init(self, x0: Any) -> State:
        return State(params=np.array(x0))

    def step(self, state: State, door: Any) -> State:
        size, n = len(state.params), door.expected_batch("score")
        column = door.objective.intercept_scale
        flat = Whitening(Affine(np.zeros(size - 1), np.ones(size - 1)), column, 1)
        length = self.reach * 0.4 * math.sqrt(size)
        gradient = WhitenedGradient(state.params, self.clip * length, flat)
        top = 0.25 if isinstance(door.objective, Logistic) else 1.0
        matrix = WhitenedInformation(state.params, top * length**2, flat, door.plan.budget.relation)
        slope = door.release("score", gradient) / n
        curve = matrix.unpack(door.release("information", matrix) / n)
        damping = noise_of(door, "information", matrix.bound) / n * math.sqrt(2.0 * size)
        values, vectors = np.linalg.eigh(curve)
        step = vectors @ ((vectors.T @ slope) / (np.maximum(values, 0.0) + damping))
        state.params = state.params - step
        state.step += 1
        state.done = state.step >= self.steps
        return state

    def output(self, state: State) -> Any:
        return state.params


def settings(kind: str, problem: Problem) -> list[dict[str, Any]]:
    """The grid of a rival; empty if it cannot take the table."""
    n, d = problem.X.shape
    kind = kind.partition(",")[0]
    if kind == "dp-gd":
        rates = (0.5, 2.0) if problem.task == "regression" else (2.0, 16.0, 64.0)
        lengths = (8, 32) if n * d > _LONG else (8, 32, 128)
        grid = itertools.product(lengths, rates, (0.3, 1.0))
        return [{"steps": s, "learning_rate": r, "clip": c, "returns": "average"} for s, r, c in grid]
    if kind == "dp-sgd":
        batch = min(n, 1024)
        grid = itertools.product((5, 20), (0.5, 4.0, 16.0), (0.3, 1.0))
        common = {"batch_size": batch, "returns": "average"}
        return [{"steps": max(50, p * n // batch), "learning_rate": r, "clip": c, **common} for p, r, c in grid]
    if problem.task == "multiclass" or d > _MOST:
        return []
    grid = itertools.product((3, 8), (0.5, 1.0, 1.5), (0.4, 1.0))
    return [{"steps": s, "reach": r, "clip": c} for s, r, c in grid]


_METHODS: dict[str, Any] = {"dp-gd": qg.DPGD, "dp-sgd": qg.DPSGD, "dp-newton": Newton}
KINDS = tuple(_METHODS)


class Rival:
    """One rival with one setting, in the shape of an estimator."""

    def __init__(self, kind: str, problem: Problem, epsilon: float, setting: dict[str, Any]) -> None:
        method, _, eased = kind.partition(", ")
        relation = Relation.ADD_REMOVE if eased or method == "dp-sgd" else Relation.REPLACE_ONE
        self.budget = qg.Budget(epsilon, DELTA, relation)
        self.method = _METHODS[method](**setting)
        bounds = problem.bounds or [(-1.0, 1.0)] * problem.X.shape[1]
        low, high = np.array(bounds, dtype=float).T
        regression = problem.task == "regression"
        self.frame = FeatureBox(low, high, outward(problem.y) if regression else None)
        if not isinstance(problem.X, np.ndarray):
            self.frame = self.frame.zero_kept()
        self.classes = sorted(set(problem.y.tolist()))
        if regression:
            self.loss: Any = Squared(intercept=True)
        else:
            k = len(self.classes)
            self.loss = Logistic(intercept=True) if k == 2 else Multinomial(k, intercept=True)

    def fit(self, X: Any, y: Any) -> Rival:
        codes = self.frame.targets(y) if self.frame.target else np.searchsorted(self.classes, y)
        rows = self.frame.apply(X)
        if isinstance(self.method, Newton) and not isinstance(rows, np.ndarray):
            rows = rows.toarray()
        result = qg.minimize(self.loss, (rows, codes), self.method, budget=self.budget)
        self.params = result.params
        return self

    def decision_function(self, X: Any) -> Any:
        return self.loss.decision(self.frame.apply(X), self.params)

    def predict(self, X: Any) -> Any:
        answers = self.loss.predict(self.frame.apply(X), self.params)
        if self.frame.target:
            return np.clip(answers * self.frame.target_scale + self.frame.target_centre, *self.frame.target)
        return np.asarray(self.classes)[answers]
