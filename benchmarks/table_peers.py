"""DP-EBM and diffprivlib on one table that ``tables.py`` wrote out; run in their own environment, prints JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

DELTA = 1e-5
FITS = {"dp-ebm": 3, "diffprivlib": 5}
EPSILONS = {"dp-ebm": (0.2, 1.0, 4.0), "diffprivlib": (0.2, 0.5, 1.0, 3.0)}
STRENGTHS = (0.001, 0.03, 1.0)  # diffprivlib's C, searched on held-out rows, uncharged; 1 is its default
LARGE = 5000  # records, from which diffprivlib gets 3 fits at ε = 0.2 and 1 only
HUGE = 2e7  # cells of a dense table (MNIST) on which diffprivlib would take hours
WITHOUT_NOISE = 1e6  # least squares is what is left: diffprivlib's regression is called as it means to be


def main(path: Path) -> None:
    warnings.simplefilter("ignore")
    facts = json.loads(path.with_suffix(".json").read_text())
    train, test = (read(path, part, facts["words"]) for part in ("train", "test"))
    y, y_test = (part.pop("__target__").to_numpy() for part in (train, test))
    out: dict[str, Any] = {"versions": {p: version(p) for p in ("interpret-core", "diffprivlib", "scikit-learn")}}
    large = train.shape[0] >= LARGE
    huge = train.shape[0] * train.shape[1] > HUGE
    for name, fit in (("dp-ebm", ebm), ("diffprivlib", linear)):
        if name == "dp-ebm" and facts["task"] == "multiclass":
            continue  # it refuses more than two classes
        for epsilon in facts.get("epsilons") or EPSILONS[name]:
            if f"{name} {epsilon:g}" in facts["done"] or (large and epsilon not in (0.2, 1.0, 4.0)) or huge:
                continue
            start = time.process_time()
            setting = {} if name == "dp-ebm" else searched(train, y, facts, epsilon)
            fits = facts.get("fits") or (3 if large else FITS[name])
            models = (fit(train, y, facts, epsilon, **setting) for _ in range(fits))
            scores = [scored(model(test), y_test, facts["task"]) for model in models]
            out[f"{name} {epsilon:g}"] = {
                **summary(scores), **setting, "cpu seconds": round((time.process_time() - start) / len(scores), 3)
            }  # fmt: skip
    if facts["task"] == "regression":
        said = linear(train, y, facts, WITHOUT_NOISE)(test)
        out["diffprivlib without noise"] = {"R2": scored(said, y_test, "regression")[0]}
    print(json.dumps(out))


def searched(train: Any, y: Any, facts: Any, epsilon: float) -> dict[str, Any]:
    """diffprivlib's C that does best on the last fifth of the training rows; its regression has no setting."""
    if facts["task"] == "regression":
        return {}
    order = np.random.default_rng(7).permutation(train.shape[0])
    fit, check = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    inner, outer = train.iloc[fit], train.iloc[check]
    found = {C: scored(linear(inner, y[fit], facts, epsilon, C=C)(outer), y[check], "multi")[0] for C in STRENGTHS}
    return {"C": max(found, key=lambda C: found[C])}


def summary(scores: list[tuple[float, float]]) -> dict[str, Any]:
    first, auc = np.array(scores).T
    root = np.sqrt(len(first))
    error, auc_error = (part.std(ddof=1) / root if len(first) > 1 else None for part in (first, auc))
    return {
        "mean": first.mean(),
        "worst": first.min(),
        "error": error,
        "auc": None if np.isnan(auc).any() else auc.mean(),
        "auc error": None if np.isnan(auc).any() else auc_error,
        "fits": len(first),
    }


def scored(answers: tuple[Any, Any], y: Any, task: str) -> tuple[float, float]:
    """(accuracy, AUC), or (R², NaN)."""
    from sklearn.metrics import r2_score, roc_auc_score

    said, score = answers
    if task == "regression":
        return float(r2_score(y, said)), float("nan")
    return float((said == y).mean()), float(roc_auc_score(y, score)) if task == "binary" else float("nan")


def read(path: Path, part: str, words: dict[str, list[str]]) -> Any:
    """One part of a table, categories with their whole vocabulary."""
    frame = pd.read_csv(f"{path}.{part}.csv", dtype=dict.fromkeys(words, str), keep_default_na=False)
    for column, values in words.items():
        frame[column] = pd.Categorical(frame[column], categories=values)
    return frame


def ebm(train: Any, y: Any, facts: Any, epsilon: float) -> Any:
    from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

    bounds = facts["bounds"]

    def texts(part: Any) -> Any:
        return part.assign(**{c: part[c].astype(str) for c in part if c not in bounds})

    common = {
        "feature_types": ["continuous" if c in bounds else "nominal" for c in train],
        "privacy_bounds": {j: bounds[c] for j, c in enumerate(train) if c in bounds},
        "epsilon": epsilon, "delta": DELTA, "random_state": None, "n_jobs": 1,
    }  # fmt: skip
    if facts["task"] == "regression":
        low, high = facts["target"]
        model = DPExplainableBoostingRegressor(**common, privacy_target_min=low, privacy_target_max=high)
        model.fit(texts(train), y)
        return lambda part: (np.clip(model.predict(texts(part)), low, high), None)
    model = DPExplainableBoostingClassifier(**common)
    model.fit(texts(train), y)
    return lambda part: (model.predict(texts(part)), model.predict_proba(texts(part))[:, 1])


def linear(train: Any, y: Any, facts: Any, epsilon: float, C: float = 1.0) -> Any:
    """diffprivlib's logistic or linear regression on columns in [0, 1]; its promise is (ε, 0) under replacement.

    Its linear regression adds noise to the coefficients of the objective, which below ε of some hundreds is
    indefinite on these tables: the minimiser runs away, and only the clip to the target's range stops it.
    """
    from diffprivlib.models import LinearRegression, LogisticRegression

    bounds = facts["bounds"]

    def numbers(part: Any) -> Any:
        columns = []
        for c in part:
            if c in bounds:
                low, high = bounds[c]
                columns.append(((part[c].to_numpy(float) - low) / (high - low)).clip(0, 1))
            else:
                columns += list(np.eye(len(part[c].cat.categories))[part[c].cat.codes].T)
        return np.column_stack(columns)

    if facts["task"] == "regression":
        low, high = facts["target"]
        model = LinearRegression(epsilon=epsilon, bounds_X=(0.0, 1.0), bounds_y=(low, high))
        model.fit(numbers(train), y)
        return lambda part: (np.clip(model.predict(numbers(part)), low, high), None)
    norm = float(np.sqrt(train.shape[1]))
    model = LogisticRegression(epsilon=epsilon, data_norm=norm, max_iter=500, C=C)
    model.fit(numbers(train), y)
    binary = facts["task"] == "binary"
    return lambda part: (
        model.predict(numbers(part)), model.predict_proba(numbers(part))[:, 1] if binary else None
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
