"""The common table: one row per algorithm, and the shared problems every row must solve.

The rows are the examples of ``quietgrad.methods.registry``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery
from quietgrad.methods.registry import ALGORITHMS, AlgorithmSpec, Example
from quietgrad.objectives import L2, Logistic

N, D = 3000, 6


@dataclass(frozen=True)
class Row:
    """An example of the registry as the table runs it; ``loss`` is the risk it must reach on the shared problem."""

    algorithm: Any
    loss: float
    budget: qg.Budget

    @property
    def name(self) -> str:
        return str(self.algorithm.name)


def _row(entry: AlgorithmSpec, example: Example) -> Row:
    budget = qg.Budget(example.epsilon, example.delta, qg.Relation.parse(example.relation))
    return Row(entry.make(example.settings), example.loss, budget)


ROWS = [_row(entry, example) for entry in ALGORITHMS.values() for example in entry.examples]


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


def interrupted(data: Any, algorithm: Any, folder: Path, budget: qg.Budget, after: int) -> list[Any]:
    """Start a run of the common objective that dies after so many steps; its iterates. The ledger is beside it."""

    class Died(Exception):
        pass

    def die(progress: qg.Progress) -> None:
        if progress.step:
            seen.append(np.array(progress.params))
        if len(seen) == after:
            raise Died

    seen: list[Any] = []
    with pytest.raises(Died):
        qg.minimize(
            objective(), data, algorithm, budget=budget, ledger=folder / "ledger.jsonl", folder=folder / "run",
            callback=die, checkpoint_seconds=1e9,
        )  # fmt: skip
    return seen


def resumed(data: Any, algorithm: Any, folder: Path) -> tuple[qg.Result, list[Any]]:
    """Go on with the run that was interrupted; what it ends with, and its iterates."""
    seen: list[Any] = []
    result = qg.resume(
        objective(), data, algorithm, folder=folder / "run", ledger=folder / "ledger.jsonl",
        callback=lambda progress: seen.append(np.array(progress.params)),
    )  # fmt: skip
    return result, seen


def spent_after(plan: Any, data: Any, releases: int, ledger: Path, *, data_dependent: bool) -> float:
    """ε in the ledger after a session was closed so early."""
    session = CentralCurator(Logistic(), data, ledger=ledger).open(plan)
    for _ in range(releases):
        session.release("gradient", GradientQuery(np.zeros(data[0].shape[1]), 1.0))
    session.close("enough", data_dependent=data_dependent)
    return qg.Ledger(ledger).spent("default", delta=1e-5, relation=qg.Relation.ADD_REMOVE).epsilon


class Killed(Exception):
    """Stands in for a kill: what is on the disk stays as it is."""


def dies(step: int) -> Callable[[qg.Progress], None]:
    """A callback that kills the run after ``step``."""

    def callback(progress: qg.Progress) -> None:
        if progress.step == step:
            raise Killed

    return callback
