"""People with several records: what a step costs, and what ε = 1 per person leaves of a model.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/people.py cost|adult|bike

cost: CPU time of one clipped sum over people ÷ that of today's sum over rows, per record processed, alternating in
one process, medians. With one record per person, and with ten: rows that lie together and rows that lie scattered.
adult, bike: two tables whose records are grouped. ``adult``: 32 561 records, a "person" being whoever shares age,
occupation, working class and sex (a stated public key: groups of very uneven size); test accuracy. ``bike``: 17 379
hours, a "person" being a day; R² on held-out days. All at ε = 1 per person, δ = 1e-5, replace-one, declared bounds,
the default estimators. Against (a) training on rows with the group bound: at most K records of each and K times the
noise, which is exact for Gaussian releases; the best K on held-out people at the same ε; (b) one random record of
each (K = 1).
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import brentq

from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.estimators import PrivateLinearRegression, PrivateLogisticRegression
from quietgrad.objectives import Logistic, Multinomial
from quietgrad.tables.privacy_units import RecordsWithIds, UnitGrouping, UserLevelObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULTS = Path(__file__).parent / "results"
RULES = {"one point": ClippingRule.gradient(0.1), "two points": ClippingRule.momentum(0.1, 0.1, 0.05)}
ROWS, BATCH, REPEATS = 20_000, 1_000, 41
EPSILON, DELTA, FITS = 1.0, 1e-5, 10
MOST = (2, 4, 8, 16)


def cost() -> dict[str, Any]:
    """Ratios of CPU time per record processed."""
    rng = np.random.default_rng(0)
    dense, wide = rng.normal(size=(ROWS, 100)), sparse.random(ROWS, 2000, 0.02, "csr", random_state=0)
    two, three = rng.integers(0, 2, ROWS), rng.integers(0, 3, ROWS)
    tables: dict[str, tuple[Any, Any, Any]] = {
        "logistic, 100 columns": (Logistic(intercept=True), dense, two),
        "logistic, sparse, 40 of 2000": (Logistic(intercept=True), wide, two),
        "multinomial, 3 classes": (Multinomial(3), dense, three),
    }
    found: dict[str, Any] = {}
    for name, (loss, X, y) in tables.items():
        for points, rule in RULES.items():
            for records, scattered in ((1, False), (10, False), (10, True)):
                what = f"{name}; {points}; {records} per person{', scattered' if scattered else ''}"
                found[what] = _ratios(loss, X, y, rule, records, scattered)
                print(what, found[what], flush=True)
    return found


def _ratios(loss: Any, X: Any, y: Any, rule: ClippingRule, records: int, scattered: bool) -> dict[str, float]:
    rng = np.random.default_rng(1)
    ids = np.repeat(np.arange(ROWS // records), records)
    rows, asked = loss.prepare((X, y)), UserLevelObjective(loss)
    people = asked.prepare(RecordsWithIds((X, y), rng.permutation(ids) if scattered else ids))
    points = [0.1 * rng.normal(size=rows.dim) for _ in range(2 if rule.beta else 1)]
    out = np.zeros(rows.dim)
    of_rows = [rng.choice(ROWS, BATCH, replace=False) for _ in range(8)]
    of_people = [rng.choice(len(people), BATCH // records, replace=False) for _ in range(8)]
    index = _medians(
        lambda k: loss.add(Batch(rows, of_rows[k % 8]), points, rule, out),
        lambda k: asked.add(Batch(people, of_people[k % 8]), points, rule, out),
        REPEATS,
    )
    whole = _medians(
        lambda k: loss.add(Batch(rows, None), points, rule, out),
        lambda k: asked.add(Batch(people, None), points, rule, out),
        9,
    )
    return {"index batch": round(index, 3), "full batch": round(whole, 3)}


def _medians(today: Any, ours: Any, repeats: int) -> float:
    times: dict[Any, list[int]] = {today: [], ours: []}
    for k in range(repeats + 2):
        for each, taken in times.items():
            started = time.thread_time_ns()
            for _ in range(3):
                each(k)
            if k > 1:  # the first two compile and warm up
                taken.append(time.thread_time_ns() - started)
    return float(np.median(times[ours]) / np.median(times[today]))


# --- use ----------------------------------------------------------------------------------------------------------


def use(name: str) -> dict[str, Any]:
    """Scores of every way to protect a person."""
    table = _adult() if name == "adult" else _bike()
    sizes = np.bincount(table["ids"])
    inner, held = _split(table)
    best = max(MOST, key=lambda most: float(np.mean([_grouped(inner, held, most, s) for s in range(3)])))
    test = table["test"]
    ways = {
        "by person, mean": lambda s: _by_person(table, test, s, combine="mean"),
        "by person, sum": lambda s: _by_person(table, test, s, combine="sum"),
        "by person, mean of at most 4": lambda s: _by_person(table, test, s, records_per_person=4),
        f"(a) rows, group bound K = {best}": lambda s: _grouped(table, test, best, s),
        "(b) one record of each": lambda s: _grouped(table, test, 1, s),
        "rows, ε = 1 per record: no promise to people": lambda s: _fit(
            table, table["X"], table["y"], EPSILON, s, test
        ),
    }
    scores = {}
    for way, score in ways.items():
        values = [score(seed) for seed in range(FITS)]
        error = float(np.std(values, ddof=1) / math.sqrt(FITS))
        scores[way] = {"mean": round(float(np.mean(values)), 4), "standard error": round(error, 4)}
        print(name, way, scores[way], flush=True)
    facts = {"people": len(sizes), "records": int(sizes.sum()), "largest": int(sizes.max())}
    return {**facts, "median": float(np.median(sizes)), "scores": scores}


def _fit(table: Any, X: Any, y: Any, epsilon: float, seed: int, test: Any, **person: Any) -> float:
    kind, settings = table["estimator"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(epsilon=epsilon, delta=DELTA, inference=False, account=f"benchmark {seed}", **settings)
        return float(model.fit(X, y, **person).score(*test))


def _by_person(table: Any, test: Any, seed: int, **settings: Any) -> float:
    return _fit(table, table["X"], table["y"], EPSILON, seed, test, person=table["ids"], **settings)


def _grouped(table: Any, test: Any, most: int, seed: int) -> float:
    """At most K random records of each, on rows, with K times the noise: μ/K for each record is μ for a person."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(table["y"]))
    people = UnitGrouping.of(table["ids"][order])
    kept = np.concatenate([order[people.order[a : min(a + most, b)]]
                           for a, b in zip(people.starts[:-1], people.starts[1:], strict=True)])  # fmt: skip
    mu = gaussian_mu(EPSILON, DELTA) / most
    epsilon = EPSILON if most == 1 else float(brentq(lambda e: gaussian_mu(e, DELTA) - mu, 1e-4, EPSILON))
    return _fit(table, table["X"][kept], table["y"][kept], epsilon, seed, test)


def _split(table: Any) -> tuple[Any, Any]:
    """A fifth of the people held out, for the choice of K."""
    held = np.random.default_rng(7).random(table["ids"].max() + 1) < 0.2
    inside = ~held[table["ids"]]
    ids = np.unique(table["ids"][inside], return_inverse=True)[1]
    inner = {**table, "X": table["X"][inside], "y": table["y"][inside], "ids": ids}
    return inner, (table["X"][~inside], table["y"][~inside])


def _adult() -> dict[str, Any]:
    from quietgrad.data import load

    data = load("adult")
    X = np.asarray(data.X.todense() if sparse.issparse(data.X) else data.X)
    assert data.feature_names is not None
    assert data.X_test is not None
    key = [j for j, name in enumerate(data.feature_names)
           if name.partition("=")[0] in ("age", "occupation", "workclass", "sex")]  # fmt: skip
    ids = np.unique(X[:, key], axis=0, return_inverse=True)[1].ravel()
    X_test = np.asarray(data.X_test.todense() if sparse.issparse(data.X_test) else data.X_test)
    bounds = [(0.0, 1.0)] * X.shape[1]
    return {"X": X, "y": data.y, "ids": ids, "test": (X_test, data.y_test),
            "estimator": (PrivateLogisticRegression, {"classes": [0, 1], "feature_bounds": bounds})}  # fmt: skip


def _bike() -> dict[str, Any]:
    path = Path(os.environ["QUIETGRAD_DATA"]) / "bike-hour.csv.gz"
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(path.read_bytes()).decode())))
    hours = np.eye(24)[[int(row["hr"]) for row in rows]]
    season = np.eye(5)[[int(row["season"]) for row in rows]][:, 1:]
    weather = np.eye(5)[[int(row["weathersit"]) for row in rows]][:, 1:]
    plain = np.array(
        [[float(row[name]) for name in ("yr", "workingday", "temp", "hum", "windspeed")] for row in rows]
    )
    work = hours * plain[:, 1:2]
    X = np.hstack([hours, work, season, weather, plain])
    y = np.array([float(row["cnt"]) for row in rows])
    ids = np.unique([row["dteday"] for row in rows], return_inverse=True)[1]
    test = np.random.default_rng(5).random(ids.max() + 1)[ids] < 0.2
    settings = {"feature_bounds": [(0.0, 1.0)] * X.shape[1], "target_bounds": (0.0, 1000.0)}
    return {"X": X[~test], "y": y[~test], "ids": np.unique(ids[~test], return_inverse=True)[1],
            "test": (X[test], y[test]), "estimator": (PrivateLinearRegression, settings)}  # fmt: skip


if __name__ == "__main__":
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked not in ("cost", "adult", "bike"):
        sys.exit(__doc__)
    save(RESULTS / f"people-{asked}.json", cost() if asked == "cost" else use(asked))
