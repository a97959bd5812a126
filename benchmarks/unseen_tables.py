"""Tables outside the benchmark, at ε = 0.2, 1 and 4, beside diffprivlib and DP-EBM.

    python -m benchmarks.unseen_tables [NAME ...] | report

Synthetic ones have what breaks defaults: heavy tails, scales of 1e±9, collinear and constant columns, pairs without
main effects, 30 classes, sparse counts, few positives, n = 600 and 100 000. Three are shipped with statsmodels, in
the environment of the peers; they are left out where it is missing. All are told the same public bounds, classes
and target range. quietgrad promises (ε, 10⁻⁵) under add-remove and counts its records itself; DP-EBM promises
(ε, 10⁻⁵), diffprivlib (ε, 0) with its strength searched on held-out rows, uncharged. Three fits each; the error is
that of their mean. Half of the rows train, at most 100 000. What peers reached is kept and not run again.
``report`` prints the saved numbers as a Markdown table and the worst differences to the peers and to the majority
(R² 0), beyond one error of the difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import make_friedman1
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from benchmarks.record import save
from benchmarks.table_peers import scored, summary
from benchmarks.tables import PEERS
from quietgrad.core.errors import QuietgradError
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
)

EPSILONS = (0.2, 1.0, 4.0)
FITS = 3
OURS, THEIRS = ("linear", "additive", "additive, pairs"), ("dp-ebm", "diffprivlib")
RESULTS = Path(__file__).parent / "results" / "unseen_tables.json"


@dataclass(frozen=True)
class Case:
    """A table, and what is public of it; ``target`` for a regression."""

    X: Any
    y: Any
    bounds: list[tuple[float, float]]
    target: tuple[float, float] | None = None

    @property
    def task(self) -> str:
        return (
            "regression" if self.target is not None else "binary" if len(np.unique(self.y)) == 2 else "multiclass"
        )


def chance(rng: Any, score: Any) -> Any:
    return (rng.random(len(score)) < 1.0 / (1.0 + np.exp(-score))).astype(int)


def _heavy(rng: Any) -> Case:
    X = np.column_stack([np.exp(rng.normal(9.0, 1.2, 40_000)), rng.standard_normal((40_000, 4))])
    return Case(X, chance(rng, 2.0 * (np.log(X[:, 0]) - 9.0) + X[:, 1]), [(0.0, 1e6), *[(-10.0, 10.0)] * 4])


def _money_and_age(rng: Any) -> Case:
    age, money = rng.uniform(18, 90, 10_000), np.exp(rng.normal(7.0, 1.5, 10_000))
    score = 0.8 * (np.log(money) - 7.0) - ((age - 50.0) / 15.0) ** 2 + 1.0
    return Case(np.column_stack([age, money]), chance(rng, score), [(0.0, 120.0), (0.0, 1e6)])


def _scales(rng: Any) -> Case:
    scales = 10.0 ** rng.uniform(-9, 9, 12)
    X = rng.standard_normal((20_000, 12))
    return Case(X * scales, chance(rng, X @ rng.standard_normal(12)), [(-8.0 * s, 8.0 * s) for s in scales])


def _collinear(rng: Any) -> Case:
    base = rng.standard_normal((20_000, 4))
    X = base @ rng.standard_normal((4, 20)) + 0.05 * rng.standard_normal((20_000, 20))
    return Case(X, chance(rng, base @ [1.5, -1.0, 0.5, 0.0]), [(-15.0, 15.0)] * 20)


def _constant(rng: Any) -> Case:
    X = np.column_stack([rng.standard_normal((10_000, 4)), np.zeros((10_000, 3)), np.full((10_000, 3), 7.0)])
    return Case(X, chance(rng, X[:, 0] - X[:, 1]), [(-5.0, 5.0)] * 4 + [(0.0, 10.0)] * 6)


def _xor(rng: Any) -> Case:
    X = rng.uniform(-1, 1, (40_000, 8))
    flipped = rng.random(40_000) < 0.05
    return Case(X, ((X[:, 0] * X[:, 1] > 0) ^ flipped).astype(int), [(-1.0, 1.0)] * 8)


def _main_and_pair(rng: Any) -> Case:
    X = rng.standard_normal((20_000, 6))
    return Case(X, chance(rng, X[:, 0] + 0.5 * X[:, 1] + 1.5 * X[:, 2] * X[:, 3]), [(-5.0, 5.0)] * 6)


def _thirty_classes(rng: Any) -> Case:
    centres = rng.standard_normal((30, 20))
    y = rng.integers(0, 30, 40_000)
    return Case(centres[y] + 1.6 * rng.standard_normal((40_000, 20)), y, [(-10.0, 10.0)] * 20)


def _sparse_counts(rng: Any) -> Case:
    X = rng.poisson(rng.gamma(0.3, 0.5, 60), (20_000, 60)).astype(float)
    return Case(X, chance(rng, X @ rng.normal(0.0, 1.0, 60) - 0.2), [(0.0, 100.0)] * 60)


def _small_linear(rng: Any) -> Case:
    X = rng.standard_normal((1200, 8))
    return Case(X, chance(rng, X @ rng.standard_normal(8)), [(-5.0, 5.0)] * 8)


def _small_curved(rng: Any) -> Case:
    X = rng.uniform(-2, 2, (1200, 5))
    return Case(X, chance(rng, 2.0 * X[:, 0] + 2.0 * (X[:, 1] ** 2 - 1.3)), [(-2.0, 2.0)] * 5)


def _large_mixed(rng: Any) -> Case:
    X = np.column_stack([
        rng.standard_normal((200_000, 4)), np.exp(rng.standard_normal((200_000, 3))),
        rng.integers(0, 5, (200_000, 3)),
    ])  # fmt: skip
    score = X[:, 0] + np.sin(3.0 * X[:, 1]) + np.log(X[:, 4]) + (X[:, 7] == 2) - 0.5 * X[:, 2] * X[:, 3]
    return Case(X, chance(rng, score), [(-6.0, 6.0)] * 4 + [(0.0, 1000.0)] * 3 + [(0.0, 4.0)] * 3)


def _few_positives(rng: Any) -> Case:
    X = rng.standard_normal((40_000, 10))
    return Case(X, chance(rng, X @ rng.normal(0.0, 0.5, 10) - 4.2), [(-6.0, 6.0)] * 10)


def _stepwise(rng: Any) -> Case:
    X = rng.uniform(0, 100, (20_000, 6))
    return Case(
        X, chance(rng, 2.0 * (X[:, 0] > 30) - 2.0 * (X[:, 1] > 80) + (X[:, 2] % 20 > 10)), [(0.0, 100.0)] * 6
    )


def _linear_60(rng: Any) -> Case:
    X = rng.standard_normal((6000, 60))
    y = X @ rng.normal(0.0, 0.4, 60) + 1.3 * rng.standard_normal(6000)
    return Case(X, y, [(-5.0, 5.0)] * 60, (-15.0, 15.0))


def _friedman(rng: Any) -> Case:
    X, y = make_friedman1(20_000, 10, noise=1.0, random_state=3)
    return Case(X, y, [(0.0, 1.0)] * 10, (-5.0, 35.0))


def _curved_30(rng: Any) -> Case:
    X = rng.standard_normal((12_000, 30))
    y = 0.5 * (X[:, :6] ** 2 - 1.0).sum(axis=1) + 0.5 * X[:, 6:12].sum(axis=1) + rng.standard_normal(12_000)
    return Case(X, y, [(-5.0, 5.0)] * 30, (-10.0, 25.0))


def _heavy_target(rng: Any) -> Case:
    X = rng.standard_normal((20_000, 8))
    y = X @ rng.standard_normal(8) + rng.standard_t(2.5, 20_000)
    return Case(X, y, [(-5.0, 5.0)] * 8, (-100.0, 100.0))


def _shipped(name: str, target: Callable[[Any], Any], bounds: dict[str, tuple[float, float]]) -> Any:
    def read(rng: Any) -> Case:
        path = PEERS / "tables" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        code = f"import statsmodels.api as sm; sm.datasets.{name}.load_pandas().data.to_csv({str(path)!r})"
        subprocess.run([str(PEERS / "bin" / "python"), "-c", code], check=True, capture_output=True)
        frame = pd.read_csv(path)
        order = rng.permutation(len(frame))
        X = frame[list(bounds)].to_numpy(float)[order]
        return Case(X, np.asarray(target(frame), dtype=int)[order], list(bounds.values()))

    return read


_FAIR = {"rate_marriage": (1, 5), "age": (15, 60), "yrs_married": (0, 40), "children": (0, 10), "religious": (1, 4),
         "educ": (5, 25), "occupation": (1, 6), "occupation_husb": (1, 6)}  # fmt: skip
_ANES = {"popul": (0, 10_000), "TVnews": (0, 7), "selfLR": (1, 7), "ClinLR": (1, 7), "DoleLR": (1, 7),
         "age": (17, 100), "educ": (1, 7), "income": (1, 24)}  # fmt: skip
_RAND = {"lncoins": (0, 5), "idp": (0, 1), "lpi": (0, 8), "fmde": (0, 9), "physlm": (0, 1), "disea": (0, 60),
         "hlthg": (0, 1), "hlthf": (0, 1), "hlthp": (0, 1)}  # fmt: skip

CASES: dict[str, Callable[[Any], Case]] = {
    "heavy tails": _heavy,
    "money and age": _money_and_age,
    "scales 1e±9": _scales,
    "collinear": _collinear,
    "constant columns": _constant,
    "xor": _xor,
    "main effects and a pair": _main_and_pair,
    "30 classes": _thirty_classes,
    "sparse counts": _sparse_counts,
    "n = 600, linear": _small_linear,
    "n = 600, curved": _small_curved,
    "n = 100 000, mixed": _large_mixed,
    "2 % positives": _few_positives,
    "steps": _stepwise,
    "linear, d = 60": _linear_60,
    "Friedman 1": _friedman,
    "curved, d = 30": _curved_30,
    "heavy-tailed target": _heavy_target,
    "fair (statsmodels)": _shipped("fair", lambda f: f.affairs > 0, _FAIR),
    "anes96 (statsmodels)": _shipped("anes96", lambda f: f.vote, _ANES),
    "randhie (statsmodels)": _shipped("randhie", lambda f: f.mdvis > 2, _RAND),
}


def models(case: Case, epsilon: float) -> Iterator[tuple[str, Any]]:
    """What quietgrad offers for a table, told what everybody is told."""
    told: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": 1e-5,
        "relation": "add-remove",
        "feature_bounds": case.bounds,
    }
    if case.target is not None:
        told["target_bounds"] = case.target
        yield "linear", PrivateLinearRegression(**told)
        yield "additive", PrivateAdditiveRegressor(**told)
        yield "additive, pairs", PrivateAdditiveRegressor(**told, pairs="auto")
        return
    told["classes"] = sorted(np.unique(case.y).tolist())
    yield "linear", PrivateLogisticRegression(**told)
    yield "additive", PrivateAdditiveClassifier(**told)
    yield "additive, pairs", PrivateAdditiveClassifier(**told, pairs="auto")


def run(case: Case) -> dict[str, Any]:
    """Every model at every ε, and boosting without privacy."""
    half = len(case.y) // 2
    train, test = slice(0, half), slice(half, None)
    out: dict[str, Any] = {}
    for epsilon in EPSILONS:
        scores: dict[str, list[tuple[float, float]]] = {}
        for _ in range(FITS):
            for name, model in models(case, epsilon):
                try:
                    model.fit(case.X[train], case.y[train])
                except QuietgradError as error:
                    out[f"{name} {epsilon:g}"] = {"refused": str(error)}
                    continue
                scores.setdefault(name, []).append(scored(answers(case, model, test), case.y[test], case.task))
        out |= {f"{name} {epsilon:g}": summary(told) for name, told in scores.items()}
    boosted: Any = HistGradientBoostingClassifier if case.target is None else HistGradientBoostingRegressor
    exact = boosted().fit(case.X[train], case.y[train])
    first, auc = scored(answers(case, exact, test), case.y[test], case.task)
    out["boosting without privacy"] = {"mean": first, "auc": None if np.isnan(auc) else auc}
    if case.target is None:
        out["majority"] = float(np.unique(case.y[test], return_counts=True)[1].max() / len(case.y[test]))
    return out


def answers(case: Case, model: Any, test: slice) -> tuple[Any, Any]:
    said = model.predict(case.X[test])
    return said, model.predict_proba(case.X[test])[:, 1] if case.task == "binary" else None


def peers(case: Case, kept: dict[str, Any]) -> dict[str, Any]:
    """diffprivlib and DP-EBM in their environment, which ``benchmarks.tables peers`` makes; what is ``kept``."""
    known = {cell: told for cell, told in kept.items() if cell.startswith((*THEIRS, "versions"))}
    if len(known) >= len(EPSILONS) * (1 if case.task == "multiclass" else 2):
        return known
    python = PEERS / "bin" / "python"
    if not python.exists():
        return {}
    folder = PEERS / "tables"
    folder.mkdir(exist_ok=True)
    path, half = folder / "unseen", len(case.y) // 2
    names = [f"x{j}" for j in range(case.X.shape[1])]
    for part, rows in (("train", slice(0, half)), ("test", slice(half, None))):
        frame = pd.DataFrame(case.X[rows], columns=names).assign(__target__=case.y[rows])
        frame.to_csv(f"{path}.{part}.csv", index=False)
    facts = {
        "task": case.task, "words": {}, "bounds": dict(zip(names, case.bounds, strict=True)), "target": case.target,
        "done": [], "epsilons": EPSILONS, "fits": FITS,
    }  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(facts))
    script = Path(__file__).parent / "table_peers.py"
    answer = subprocess.run([str(python), str(script), str(path)], capture_output=True, text=True, check=False)
    if answer.returncode:
        return {"peers failed": answer.stderr.splitlines()[-1] if answer.stderr else "without a word"}
    told: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return told


def behind(ours: dict[str, Any], other: dict[str, Any], what: str) -> float:
    """How far ``ours`` is behind in ``what`` ("mean" or "auc"), beyond one error of the difference."""
    if ours.get(what) is None or other.get(what) is None:
        return -np.inf
    key = "error" if what == "mean" else "auc error"
    return float(other[what] - ours[what] - np.hypot(ours.get(key) or 0.0, other.get(key) or 0.0))


def report(tables: dict[str, Any]) -> Iterator[str]:
    """Ours and the peers' best of each table and ε, and where ours are furthest behind."""
    yield "| table | ε | linear | additive | additive, pairs | DP-EBM | diffprivlib | without: majority |"
    yield "|" + "---|" * 8
    worst: dict[str, tuple[float, str]] = {}
    for name, cells in tables.items():
        floor = {"mean": cells.get("majority", 0.0), "error": 0.0}
        for epsilon in EPSILONS:
            said = {kind: cells.get(f"{kind} {epsilon:g}", {}) for kind in (*OURS, *THEIRS)}
            told = " | ".join(_told(cell) for cell in said.values())
            yield f"| {name} | {epsilon:g} | {told} | {floor['mean']:.3f} |"
            rivals = [(k, "diffprivlib") for k in OURS] + [(k, "dp-ebm") for k in OURS[1:]]
            for kind, peer in rivals:
                for what in ("mean", "auc"):
                    _note(worst, f"{kind} behind {peer}", behind(said[kind], said[peer], what), name, epsilon)
            for kind in OURS:
                _note(worst, f"{kind} below the majority or R² 0", behind(said[kind], floor, "mean"), name, epsilon)
    yield ""
    for what, (most, where) in worst.items():
        yield f"- {what}: {most:+.3f} ({where})"


def _told(cell: dict[str, Any]) -> str:
    if "mean" not in cell:
        return "–"
    return f"{cell['mean']:.3f}" + ("" if cell.get("auc") is None else f" / {cell['auc']:.3f}")


def _note(worst: dict[str, tuple[float, str]], what: str, value: float, name: str, epsilon: float) -> None:
    if value > worst.get(what, (-np.inf, ""))[0]:
        worst[what] = (value, f"{name}, ε = {epsilon:g}")


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    tables = json.loads(RESULTS.read_text())["tables"] if RESULTS.exists() else {}
    if names == ["report"]:
        print("\n".join(report(tables)))
        return
    for seed, (name, make) in enumerate(CASES.items()):
        if names and name not in names:
            continue
        try:
            case = make(np.random.default_rng(1000 + seed))
        except (OSError, subprocess.CalledProcessError):
            print(f"{name}: statsmodels is not installed in {PEERS}", flush=True)
            continue
        kept = tables.get(name, {})
        tables[name] = {"records": len(case.y) // 2, "features": case.X.shape[1], "task": case.task, **run(case)}
        tables[name] |= peers(case, kept)
        print(name, json.dumps(tables[name]), flush=True)
        save(RESULTS, {"fits": FITS, "relation": "add-remove", "delta": 1e-5, "tables": tables})


if __name__ == "__main__":
    main(sys.argv[1:])
