"""quietgrad's answers to task.py; prints JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

import task

import quietgrad as qg
from quietgrad.core.accounting.accounting import account, calibrate, prove_or_infinite
from quietgrad.core.accounting.events import poisson_gaussian
from quietgrad.estimators import PrivateLinearRegression, PrivateLogisticRegression, PrivateScaler
from quietgrad.tables.regularizers import L2


def calibration() -> dict[str, Any]:
    """The noise of the run, the ε of the given noise, and what each takes, nothing remembered."""

    def noise() -> float:
        prove_or_infinite.cache_clear()
        return calibrate(
            epsilon=task.RUN_EPSILON, delta=task.DELTA, n=task.RUN_N, batch_size=task.RUN_BATCH,
            steps=task.RUN_STEPS,
        )  # fmt: skip

    def epsilon() -> float:
        prove_or_infinite.cache_clear()
        return epsilon_of(task.GIVEN_NOISE)

    (z, z_seconds), (e, e_seconds) = task.cpu(noise, 7), task.cpu(epsilon, 7)
    return {
        "pld": {"noise_multiplier": z, "cpu_seconds": z_seconds, "epsilon": e, "epsilon_cpu_seconds": e_seconds}
    }


def epsilon_of(z: float) -> float:
    """The ε that quietgrad proves for the run with noise multiplier ``z``."""
    return account(
        poisson_gaussian(task.RUN_BATCH / task.RUN_N, z, task.RUN_STEPS), delta=task.DELTA, relation="add-remove"
    )


def accuracy(table: task.Table) -> dict[str, Any]:
    """Private logistic regression under each promise that some peer makes."""

    def minimised(data: task.Table, algorithm: Any, budget: qg.Budget, penalty: float = 0.0) -> task.Model:
        objective = qg.objectives.Logistic(regularizer=L2(penalty), intercept=penalty == 0.0, row_bound=1.0)
        theta = qg.minimize(objective, (data.X, data.y), algorithm, budget=budget).params
        return lambda rows: rows @ theta[: rows.shape[1]] + sum(theta[rows.shape[1] :]) > 0

    def dp_sgd(data: task.Table, rate: float, clip: float) -> task.Model:
        algorithm = qg.DPSGD(steps=task.STEPS, batch_size=len(data.y) // task.PARTS, learning_rate=rate, clip=clip)
        return minimised(data, algorithm, qg.Budget(task.EPSILON, task.DELTA))

    def pure(data: task.Table, penalty: float) -> task.Model:
        budget = qg.Budget(task.EPSILON, task.DELTA, relation="replace-one")  # the mechanism spends no δ
        return minimised(data, qg.OutputPerturbation(steps=300, mechanism="pure"), budget, penalty)

    def default(relation: str) -> Callable[[task.Table], task.Model]:
        def fit(data: task.Table) -> task.Model:
            public = {"n_public": len(data.y)} if relation == "add-remove" else {}
            model = PrivateLogisticRegression(
                task.EPSILON, task.DELTA, relation, classes=[0, 1], row_bound=1.0, **public
            )
            return model.fit(data.X, data.y).predict  # type: ignore[no-any-return]

        return fit

    return {
        "add-remove": {
            "quietgrad DP-SGD": task.searched(dp_sgd, table, task.DP_SGD_GRID),
            "quietgrad default": task.searched(default("add-remove"), table, [{}]),
        },
        "replace-one": {"quietgrad default": task.searched(default("replace-one"), table, [{}])},
        "replace-one, pure": {"quietgrad OutputPerturbation": task.searched(pure, table, task.PENALTIES)},
    }


def main() -> None:
    warnings.simplefilter("ignore")
    np.random.seed(0)  # noqa: NPY002 (scikit-learn's checks draw from it)
    loose: dict[str, Any] = {**task.LOOSE, "delta": 0.1}
    estimators = [PrivateLogisticRegression(**loose), PrivateLinearRegression(**loose), PrivateScaler(**loose)]
    found = {
        "calibration": calibration(),
        "accuracy": accuracy(task.Table.read(sys.argv[1])),
        "checks": task.checks(estimators),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
