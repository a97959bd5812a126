"""The common table: one row per algorithm, and the shared problems every row must solve.

A new algorithm is one file in ``algorithms/``, one oracle if it needs one, and one row here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import quietgrad as qg
from quietgrad.objectives import L2, Logistic

N, D = 3000, 6


@dataclass(frozen=True)
class Row:
    """An algorithm as the table runs it.

    ``loss`` is the risk it must reach on the shared problem at ``budget`` (the origin has 0.693, the minimum
    about 0.40); ``sums`` says whether all its releases are sums of clipped queries.
    """

    algorithm: Any
    loss: float
    budget: qg.Budget = field(default_factory=lambda: qg.Budget(4.0, 1e-5))
    sums: bool = True

    @property
    def name(self) -> str:
        return str(self.algorithm.name)


REPLACE = qg.Budget(4.0, 1e-5, qg.Relation.REPLACE_ONE)

ROWS = [
    Row(qg.DPSRM(steps=150, batch_size=200, learning_rate=1.0), 0.50),
    Row(qg.DPSRM(steps=150, batch_size=200, learning_rate=1.0, joint_clip=True), 0.50),
    Row(qg.DPSRM(steps=150, batch_size=200, learning_rate=1.0, difference_clip=1.0, smoothness=0.3), 0.52),
    Row(qg.DPSRM(steps=150, batch_size=200, learning_rate=1.0, sampling="fixed-size"), 0.50, REPLACE),
    Row(qg.DPSRM(steps=300, batch_size=200, learning_rate=1.0, returns="random"), 0.66),
    Row(qg.DPSGD(steps=150, batch_size=200, learning_rate=1.0), 0.48),
    Row(qg.DPSGD(steps=150, batch_size=200, learning_rate="cosine:1.0", momentum=0.9, momentum_kind="ema"), 0.50),
    Row(qg.DPSGD(steps=150, batch_size=200, learning_rate="inverse-sqrt:3", returns="average"), 0.50, REPLACE),
    Row(qg.DPSGD(steps=100, batch_size=200, learning_rate="linear:0.5", momentum=0.9, momentum_steps=20), 0.50),
    Row(
        qg.DPSGD(steps=100, batch_size=200, learning_rate=1.0, returns="ema", sampling="fixed-size"), 0.50, REPLACE
    ),
    Row(qg.DPAdam(steps=100, batch_size=300, learning_rate=0.1), 0.50),
    Row(qg.DPGD(steps=40, learning_rate=3.0), 0.46),
    Row(qg.DPGD(steps=40, learning_rate=1.0, momentum=0.8, returns="average"), 0.50, REPLACE),
    Row(qg.DPAGD(), 0.52, sums=False),
    Row(qg.StagewiseDPSGD(stages=3, first_steps=20, batch_size=200, learning_rate=2.0), 0.50),
    Row(qg.StagewiseDPSGD(stages=3, first_steps=20, batch_size=200, learning_rate=4.0, early_momentum=0), 0.50),
    Row(qg.StagewiseDPSGD(stages=3, first_steps=20, batch_size=200, learning_rate=2.0, returns="random"), 0.60),
    Row(qg.RRPSGD(steps=225, batch_size=200, learning_rate=1.0), 0.66),
    Row(qg.BassilySGD(steps=225, batch_size=200, learning_rate=3.0), 0.50),
    Row(qg.OutputPerturbation(steps=60), 0.60, REPLACE),
    Row(qg.OutputPerturbation(steps=60, mechanism="pure"), 0.65, REPLACE),
    Row(qg.WhitenedGD(steps=20, row_bound=1.0), 0.48, REPLACE),
    Row(
        qg.PerturbedSGD(
            oracle=qg.AdaptiveSpider(300, 60, clip=1.0, smoothness=0.25, kappa=3.0),
            learning_rate=2.0,
            chi=0.02,
            radius=1.0,
            escape_steps=10,
            attempts=2,
            hessian_lipschitz=0.1,
        ),
        0.58,
        REPLACE,
    ),
    Row(
        qg.PerturbedSGD(
            oracle=qg.AdaptiveSpider(
                300, 150, clip=1.0, smoothness=0.25, kappa=3.0, regime="reuse", full_queries=20
            ),
            steps=60,
            learning_rate=2.0,
            chi=0.01,
            radius=1.0,
            escape_steps=10,
            attempts=2,
            hessian_lipschitz=0.1,
        ),
        0.55,
    ),
]


def labels(rows: list[Row]) -> list[str]:
    """Distinct names for pytest."""
    return [f"{row.name}-{i}" for i, row in enumerate(rows)]


def problem(n: int = N, seed: int = 0) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Rows in the unit ball and noisy linear labels."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, D))
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    y = (rng.random(n) < 1.0 / (1.0 + np.exp(-X @ np.array([6.0, -4.0, 2.0, 0.0, 1.0, -1.0])))).astype(float)
    return X, y


def objective() -> Logistic:
    """A strongly convex logistic risk on bounded rows, which every method of the table may be run on."""
    return Logistic(regularizer=L2(0.001), row_bound=1.0)
