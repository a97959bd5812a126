"""diffprivlib's answers to task.py, in an environment with the newest scikit-learn it works with; prints JSON.

With ``try`` it fits each of its linear models once and ends: whether it bears the scikit-learn that is installed.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import task
from diffprivlib.models import LinearRegression, LogisticRegression, StandardScaler


def fits() -> None:
    """One small fit of everything that is measured."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-0.4, 0.4, (200, 3))
    LogisticRegression(epsilon=1e3, data_norm=1.0).fit(X, X[:, 0] > 0).predict(X)
    LinearRegression(epsilon=1e3, bounds_X=(-1, 1), bounds_y=(-1, 1)).fit(X, X[:, 0]).predict(X)
    StandardScaler(epsilon=1e3, bounds=(-1, 1)).fit(X).transform(X)


def accuracy(table: task.Table) -> dict[str, Any]:
    """Pure ε: its sum of losses with penalty 1/C is n times the mean loss with λ = 1/(C·n)."""

    def fit(data: task.Table, penalty: float) -> task.Model:
        model = LogisticRegression(
            epsilon=task.EPSILON, data_norm=1.0, C=1.0 / (penalty * len(data.y)), max_iter=500,
            fit_intercept=False,
        )  # fmt: skip
        return model.fit(data.X, data.y).predict  # type: ignore[no-any-return]

    return {"replace-one, pure": {"diffprivlib": task.searched(fit, table, task.PENALTIES)}}


def main() -> None:
    warnings.simplefilter("ignore")
    fits()
    if sys.argv[1] == "try":
        return
    np.random.seed(0)  # noqa: NPY002 (scikit-learn's checks draw from it)
    bounds: dict[str, Any] = {"bounds_X": (-10, 10), "bounds_y": (-500, 500)}
    estimators = [
        LogisticRegression(**task.LOOSE, data_norm=100.0),
        LinearRegression(**task.LOOSE, **bounds),
        StandardScaler(**task.LOOSE, bounds=(-10, 10)),
    ]
    found = {
        "versions": {name: version(name) for name in ("diffprivlib", "scikit-learn", "numpy")},
        "accuracy": accuracy(task.Table.read(sys.argv[1])),
        "checks": task.checks(estimators),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
