"""What it costs that the number of records is counted privately: accuracy at n = 300 … 30 000, exact against noisy.

    OMP_NUM_THREADS=1 python -m benchmarks.private_count

Logistic labels over six features with declared bounds; ``PrivateLogisticRegression`` (un-sampled Gaussian
releases: the count has 2 % of μ²) and DP-SGD (Poisson samples: the count has 1 % of ε) under add-remove, δ =
1e-5. ``declared`` is given n_public = n, ``counted`` is not; both are fitted on the same tables and scored on 20
000 other records of the same law. ``n_error`` is the root of the mean squared relative error of the counts.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import save
from quietgrad.core.errors import TooNoisyWarning
from quietgrad.estimators import PrivateLogisticRegression
from quietgrad.methods.dp_sgd import DPSGD

RESULT = Path(__file__).parent / "results" / "private_count.json"
SIZES = (300, 1000, 3000, 10_000, 30_000)
EPSILONS = (0.2, 1.0)
FITS = {300: 60, 1000: 60, 3000: 30, 10_000: 15, 30_000: 10}
WEIGHTS = np.array([2.0, -1.5, 1.0, 0.5, -0.5, 0.0])


def table(n: int, rng: np.random.Generator) -> tuple[Any, Any]:
    """Rows in [−1, 1]⁶ and labels by a logistic law."""
    X = rng.uniform(-1.0, 1.0, (n, len(WEIGHTS)))
    return X, (rng.random(n) < 1.0 / (1.0 + np.exp(-3.0 * X @ WEIGHTS))).astype(np.int64)


def cell(method: str, epsilon: float, n: int, test: tuple[Any, Any]) -> dict[str, float]:
    """Mean accuracy of both, with standard errors, over as many tables as :data:`FITS` says."""
    rng = np.random.default_rng([n, round(100 * epsilon), len(method)])
    scores: dict[str, list[float]] = {"declared": [], "counted": []}
    errors = []
    for _ in range(FITS[n]):
        X, y = table(n, rng)
        for name, declared in (("declared", n), ("counted", None)):
            sampled = DPSGD(steps=200, batch_size=max(10, n // 20), learning_rate=1.0)
            model = PrivateLogisticRegression(
                epsilon=epsilon, relation="add-remove", classes=[0, 1], feature_bounds=[(-1.0, 1.0)] * len(WEIGHTS),
                algorithm=None if method == "default" else sampled, n_public=declared, account="benchmark",
            )  # fmt: skip
            try:
                model.fit(X, y)
                scores[name].append(float(model.score(*test)))
            except ValueError:  # a batch that is larger than the count: told, and nothing was fitted
                scores[name].append(max(float(test[1].mean()), 1.0 - float(test[1].mean())))
                continue
            if declared is None:
                errors.append((model.result_.n_public / n - 1.0) ** 2)
    row: dict[str, float] = {"n_error": math.sqrt(float(np.mean(errors)))}
    for name, values in scores.items():
        row[name] = float(np.mean(values))
        row[f"{name}_se"] = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    return row


def main() -> None:
    """Measure every cell and write the table."""
    warnings.simplefilter("ignore", TooNoisyWarning)
    test = table(20_000, np.random.default_rng(0))
    rows = [
        {"method": method, "epsilon": epsilon, "n": n, **cell(method, epsilon, n, test)}
        for method in ("default", "dp-sgd")
        for epsilon in EPSILONS
        for n in SIZES
    ]
    for row in rows:
        print(
            f"{row['method']:8} ε={row['epsilon']:<4} n={row['n']:<6} declared {row['declared']:.3f} ± "
            f"{row['declared_se']:.3f}  counted {row['counted']:.3f} ± {row['counted_se']:.3f}  "
            f"error of n {row['n_error']:.3f}"
        )
    save(RESULT, {"fits": FITS, "rows": rows})


if __name__ == "__main__":
    main()
