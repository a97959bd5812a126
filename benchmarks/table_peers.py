"""DP-EBM and diffprivlib on one table that ``tables.py`` wrote out; run in their own environment, prints JSON."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

FITS = 3
DELTA = 1e-5


def main(path: Path) -> None:
    warnings.simplefilter("ignore")
    facts = json.loads(path.with_suffix(".json").read_text())
    train, test = (read(path, part, facts["words"]) for part in ("train", "test"))
    y, y_test = (part.pop("__target__").to_numpy() for part in (train, test))
    out: dict[str, Any] = {}
    for epsilon in facts["epsilons"]:
        for name, fit in (("dp-ebm", ebm), ("diffprivlib", logistic)):
            try:
                scores = [fit(train, y, test, y_test, facts["bounds"], epsilon, seed) for seed in range(FITS)]
            except ImportError as error:  # diffprivlib lags behind scikit-learn
                out[f"{name} {epsilon:g}"] = {"refused": f"cannot be imported here: {error}"}
                continue
            accuracy, auc = np.array(scores).T
            out[f"{name} {epsilon:g}"] = {"mean": accuracy.mean(), "worst": accuracy.min(), "auc": auc.mean()}
    print(json.dumps(out))


def read(path: Path, part: str, words: dict[str, list[str]]) -> Any:
    """One part of a table, categories with their whole vocabulary."""
    frame = pd.read_csv(f"{path}.{part}.csv", dtype=dict.fromkeys(words, str), keep_default_na=False)
    for column, values in words.items():
        frame[column] = pd.Categorical(frame[column], categories=values)
    return frame


def ebm(train: Any, y: Any, test: Any, y_test: Any, bounds: Any, epsilon: float, seed: int) -> Any:
    from interpret.privacy import DPExplainableBoostingClassifier
    from sklearn.metrics import roc_auc_score

    kinds = ["continuous" if c in bounds else "nominal" for c in train]
    limits = {j: bounds[c] for j, c in enumerate(train) if c in bounds}
    raw = [part.assign(**{c: part[c].astype(str) for c in part if c not in bounds}) for part in (train, test)]
    model = DPExplainableBoostingClassifier(
        feature_types=kinds, privacy_bounds=limits, epsilon=epsilon, delta=DELTA, random_state=None
    )
    model.fit(raw[0], y)
    return float((model.predict(raw[1]) == y_test).mean()), float(
        roc_auc_score(y_test, model.predict_proba(raw[1])[:, 1])
    )


def logistic(train: Any, y: Any, test: Any, y_test: Any, bounds: Any, epsilon: float, seed: int) -> Any:
    from diffprivlib.models import LogisticRegression
    from sklearn.metrics import roc_auc_score

    def numbers(part: Any) -> Any:
        columns = []
        for c in part:
            if c in bounds:
                low, high = bounds[c]
                columns.append(((part[c].to_numpy(float) - low) / (high - low)).clip(0, 1))
            else:
                columns += list(np.eye(len(part[c].cat.categories))[part[c].cat.codes].T)
        return np.column_stack(columns)

    X, X_test = numbers(train), numbers(test)
    model = LogisticRegression(epsilon=epsilon, data_norm=float(np.sqrt(train.shape[1])), max_iter=500)
    model.fit(X, y)
    return float((model.predict(X_test) == y_test).mean()), float(
        roc_auc_score(y_test, model.predict_proba(X_test)[:, 1])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
