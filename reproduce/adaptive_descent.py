"""DP-AGD in Lee & Kifer's own kind of experiment: does a method that spends its budget as it goes beat fixed ones?

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/adaptive_descent.py
    OMP_NUM_THREADS=1 python reproduce/adaptive_descent.py --quick             # breast cancer, seconds

A baseline of paper 000. Takes 10 CPU minutes. Lee and Kifer (2018) show test accuracy over ε at δ = 1e-8 on Adult,
Bank, KDD Cup 99 and two IPUMS extracts, logistic and SVM. Their figures have no numbers and the IPUMS extracts
are not here; what is compared is their claim: DP-AGD is at least as good as descent with a fixed number of evenly
paid steps, as DP-SGD and as output perturbation, without a number of steps to choose.

Rows have norm 1; replace-one, for output perturbation has no other; ε = .05, .2, .8; 5 runs. DP-AGD has its
defaults everywhere, and so has *dp-gd, fixed*: the like-for-like comparison. *Tuned* methods choose on a fixed
fifth of the training rows, per data set and loss at ε = .2 (one fit each): DP-GD steps and rate, DP-SGD passes and
rate at batches of 512, output perturbation its λ. The search is not in ε. Test rows decide nothing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.data import load
from quietgrad.objectives import L2, Hinge, Logistic

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.comparisons import Comparison, Contender, Tried, looked_at, reached_by
from reproduce.store import Row, Store, Table, print_table

EPSILONS, DELTA, RUNS, SEARCHED_AT = (0.05, 0.2, 0.8), 1e-8, 5, 0.2
DATA = ("adult", "bank", "kddcup99")
LOSSES = {"logistic": Logistic, "svm": Hinge}
CLASSES = {
    "dp-agd": qg.DPAGD, "dp-gd, fixed": qg.DPGD, "dp-gd, tuned": qg.DPGD, "dp-sgd, tuned": qg.DPSGD,
    "output perturbation, tuned": qg.OutputPerturbation, "non-private": qg.GD,
}  # fmt: skip
METHODS = tuple(CLASSES)
Setting = dict[str, Any]


def grid(method: str, n: int) -> list[Setting]:
    """What a method chooses from; one entry means it chooses nothing."""
    if method == "dp-gd, tuned":
        return [{"steps": s, "learning_rate": r} for s, r in itertools.product((10, 30, 100), (1.0, 4.0, 16.0))]
    if method == "dp-sgd, tuned":
        shapes = itertools.product((2, 5, 20), (0.5, 2.0, 8.0))
        return [{"steps": max(1, p * n // 512), "batch_size": min(n, 512), "learning_rate": r} for p, r in shapes]
    if method == "output perturbation, tuned":
        return [{"strength": s} for s in (1e-4, 1e-3, 1e-2)]
    return [{"strength": 1e-4}] if method == "non-private" else [{}]


def accuracy(loss: str, method: str, setting: Setting, train: Any, test: Any, epsilon: float) -> float:
    """One fit and its accuracy on ``test``."""
    setting = dict(setting)
    strength = setting.pop("strength", None)
    made: dict[str, Any] = {} if strength is None else {"regularizer": L2(strength)}
    objective = LOSSES[loss](row_bound=1.0, rows="normalize", **made)
    if method == "non-private":
        setting = {"steps": 500, "learning_rate": 4.0}
    budget = None if method == "non-private" else qg.Budget(epsilon, DELTA, "replace-one")
    fitted = qg.minimize(objective, train, CLASSES[method](**setting), budget=budget)
    return float(np.mean(objective.predict(test[0], fitted.params) == np.asarray(test[1])))


def study(data: str, loss: str) -> None:
    """All methods and ε of one data set and loss."""
    table: Any = load(data)
    train, test = (table.X, table.y), (table.X_test, table.y_test)
    n = len(table.y)
    order = np.random.default_rng(0).permutation(n)  # public
    look, learn = order[: n // 5], order[n // 5 :]
    for method in METHODS:
        settings = grid(method, n)
        chosen = settings[0]
        if len(settings) > 1:
            rows = []
            for number, setting in enumerate(settings):
                key = {"data": data, "loss": loss, "method": method, "number": number}
                row = STORE.find("search", **key)
                if row is None:
                    parts = ((table.X[learn], table.y[learn]), (table.X[look], table.y[look]))
                    row = {**key, **setting, "accuracy": accuracy(loss, method, setting, *parts, SEARCHED_AT)}
                    STORE.keep("search", row)
                rows.append(row)
            chosen = settings[int(np.argmax([row["accuracy"] for row in rows]))]
        for epsilon in EPSILONS[:1] if method == "non-private" else EPSILONS:
            for run in range(1 if method == "non-private" else RUNS):
                key = {"data": data, "loss": loss, "method": method, "epsilon": epsilon, "run": run}
                if STORE.find("fits", **key) is None:
                    found = accuracy(loss, method, chosen, train, test, epsilon)
                    STORE.keep("fits", {**key, **chosen, "accuracy": found})
        print(data, loss, method, "done", flush=True)


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """DP-AGD beside as many equally noisy steps, untuned, at every ε; tuned methods where they were searched."""
    found: list[Comparison] = []
    for data, loss, epsilon in itertools.product(DATA, LOSSES, EPSILONS):
        what = f"{data}, {loss}, ε = {epsilon:g}: share of wrong answers"
        pairs = [("dp-agd", "dp-gd, fixed")]
        if epsilon == record["searched_at"]:
            pairs += [
                (method, "dp-gd, tuned") for method in METHODS if "tuned" in method and method != "dp-gd, tuned"
            ]
        found += [
            Comparison(what, [contender(record, data, loss, epsilon, each) for each in pair]) for pair in pairs
        ]
    return found


def contender(record: Mapping[str, Any], data: str, loss: str, epsilon: float, method: str) -> Contender:
    """A method on one data set. Rows have length 1, so no gradient is longer; output perturbation needs no clip."""
    search, fits = (
        [row for row in record[kind] if (row["data"], row["loss"], row["method"]) == (data, loss, method)]
        for kind in ("search", "fits")
    )
    fits = [row for row in fits if row["epsilon"] == epsilon]
    names = ("steps", "batch_size", "learning_rate", "strength")
    tried = looked_at(search, names, _wrong) if "tuned" in method else [Tried({}, 0.0)]
    clip = min(1.0, getattr(CLASSES[method](), "clip", 1.0))
    return Contender(method, tried, reached_by(fits, names, _wrong), lambda given: clip)


def _wrong(row: Mapping[str, Any]) -> float:
    return 1.0 - float(row["accuracy"])


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """One table per data set and loss: accuracy over ε."""
    found = []
    for data, loss in dict.fromkeys((row["data"], row["loss"]) for row in rows["fits"]):
        body: list[list[Any]] = []
        for method in METHODS:
            mine = [
                row for row in rows["fits"] if (row["data"], row["loss"], row["method"]) == (data, loss, method)
            ]
            cells: list[Any] = [method]
            for epsilon in EPSILONS:
                got = [row["accuracy"] for row in mine if row["epsilon"] == epsilon or method == "non-private"]
                spread = statistics.stdev(got) / len(got) ** 0.5 if len(got) > 1 else 0.0
                cells.append(f"{statistics.fmean(got):.4f} ± {spread:.4f}" if got else None)
            if mine:
                body.append(cells)
        columns = ["method", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)]
        found.append({"title": f"{data}, {loss}: test accuracy", "columns": columns, "rows": body})
    return found


STORE = Store(
    Path(__file__).parent / "results" / "adaptive_descent.json",
    "python reproduce/adaptive_descent.py",
    {"delta": DELTA, "relation": "replace-one", "searched_at": SEARCHED_AT},
    tables=tables,
)


def main() -> None:
    """Search and fit; every finished fit is written at once and not made again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="breast cancer at ε = 1.6; nothing is saved")
    if parser.parse_args().quick:
        table: Any = load("breast-cancer")
        parts = ((table.X, table.y), (table.X_test, table.y_test))
        body = [[m, accuracy("logistic", m, grid(m, len(table.y))[0], *parts, 1.6)] for m in METHODS]
        print_table("breast cancer, ε = 1.6, one fit each (not a result)", ["method", "test accuracy"], body)
        return
    for data, loss in itertools.product(DATA, LOSSES):
        study(data, loss)


if __name__ == "__main__":
    main()
