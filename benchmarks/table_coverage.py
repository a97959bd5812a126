"""How often the intervals of ``summary()`` cover the truth, and where they are refused.

    OMP_NUM_THREADS=1 python benchmarks/table_coverage.py [fits at n = 5000] [fits at n = 50 000] [cells ...]

Gaussian features, coefficients of norm about 1, a logistic or a linear model that is true; nominal 95 %, δ = 1e-5,
replace-one, feature and target ranges found privately. Width is the mean standard error over that of the same model
without privacy, √(1/n) in units of the curvature. ``error`` is one standard error of the coverage.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.errors import TooNoisyError
from quietgrad.estimators import PrivateLinearRegression, PrivateLogisticRegression

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "table_coverage.json"


def cell(kind: str, n: int, d: int, epsilon: float, fits: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    truth = np.append(rng.standard_normal(d) / np.sqrt(d), 0.3)
    inside, widths, refused = [], [], 0
    for _ in range(fits):
        X = rng.standard_normal((n, d))
        scores = X @ truth[:-1] + truth[-1]
        settings: dict[str, Any] = {"epsilon": epsilon, "inference": True}
        try:
            if kind == "logistic":
                y: Any = rng.random(n) < 1.0 / (1.0 + np.exp(-scores))
                rows = PrivateLogisticRegression(**settings).fit(X, y).summary()
            else:
                rows = PrivateLinearRegression(**settings).fit(X, scores + rng.standard_normal(n)).summary()
        except TooNoisyError:
            refused += 1
            continue
        except ValueError as error:
            return {"refused in public": str(error)}
        inside.append((rows.lower < truth) & (truth < rows.upper))
        widths.append(float(rows.std_err.mean() * np.sqrt(n * (0.2 if kind == "logistic" else 1.0))))
    if not inside:
        return {"refused": refused}
    # Coefficients of one fit share its noise: the error is that of the fits' shares, not of coefficients.
    shares = np.mean(inside, axis=1)
    return {
        "coverage": float(shares.mean()),
        "error": float(shares.std(ddof=1) / np.sqrt(len(shares))),
        "worst coefficient": float(np.mean(inside, axis=0).min()),
        "width": float(np.mean(widths)),
        "fits": len(inside),
        "refused": refused,
    }


def main() -> None:
    words = sys.argv[1:]
    few, many = (int(word) for word in (*words, "500", "500")[:2])
    wanted = words[2:]  # such as "logistic n=5000"; none for all
    warnings.simplefilter("ignore")
    cells = json.loads(RESULT.read_text())["cells"] if wanted and RESULT.exists() else {}
    for kind in ("logistic", "linear"):
        for n in (5000, 50_000):
            for d in (5, 20):
                for epsilon in (0.5, 1.0, 3.0):
                    name = f"{kind} n={n} d={d} ε={epsilon:g}"
                    if wanted and not any(name.startswith(word) for word in wanted):
                        continue
                    cells[name] = cell(kind, n, d, epsilon, few if n == 5000 else many)
                    save(RESULT, {"cells": cells})
                    print(name, cells[name], flush=True)


if __name__ == "__main__":
    main()
