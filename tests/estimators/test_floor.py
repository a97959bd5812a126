"""Small tables at ε = 0.2: the defaults are not below what says the same of everybody, by more than noise.

Seeds are fixed. Each case compares a mean over fits with a floor, three standard errors apart: if a model were
exactly as good as the floor, seeds drawn anew would raise a false alarm in one case of 740, in one run of 80 of
this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn import datasets
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateLinearRegression,
    PrivateLogisticRegression,
)
from quietgrad.methods.budget_allocation import budget_mu

FITS = 20
pytestmark = [pytest.mark.filterwarnings("ignore:random_state"), pytest.mark.filterwarnings("ignore:at this n")]


def three_hundred() -> tuple[Any, Any]:
    rng = np.random.default_rng(6)
    X = rng.standard_normal((375, 6)) * [1, 10, 0.1, 1, 100, 1] + [0, 50, 0, 0, 0, 3]
    return X, (X[:, 0] + X[:, 4] / 100.0 + rng.logistic(size=375) > 0.8).astype(int)


TABLES: dict[str, Any] = {
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "three hundred": three_hundred,
}


def wide(X: Any) -> list[tuple[float, float]]:
    """Bounds as a code book would have them: from zero or its mirror to twice what occurs."""
    return [(min(0.0, 2.0 * float(c.min())), 2.0 * float(c.max())) for c in X.T]


def voted(y: Any, test: Any, fits: int = 4000) -> float:
    """The accuracy of answering the most frequent class, if its name is bought with the whole of ε = 0.2."""
    names, counts = np.unique(y, return_counts=True)
    noise = np.sqrt(2.0) / budget_mu(Budget(0.2, 1e-5, Relation.REPLACE_ONE))
    noisy = counts + noise * np.random.default_rng(0).standard_normal((fits, len(names)))
    return float(np.mean([np.mean(test == names[k]) for k in noisy.argmax(axis=1)]))


def floor_is_kept(scores: list[float], floor: float) -> bool:
    return bool(np.mean(scores) >= floor - 3.0 * np.std(scores, ddof=1) / np.sqrt(len(scores)))


LINEAR, ADDITIVE = PrivateLogisticRegression, PrivateAdditiveClassifier


@pytest.mark.parametrize(("kind", "name", "declared"), [
    *((LINEAR, name, declared) for name in TABLES for declared in (False, True)),
    *((ADDITIVE, name, True) for name in ("breast cancer", "three hundred")),
])  # fmt: skip
def test_classifiers_are_not_below_the_majority(kind: Any, name: str, declared: bool) -> None:
    X, y = TABLES[name]()
    X, T, y, t = train_test_split(X, y, test_size=0.3, random_state=0)
    classes, bounds = np.unique(y).tolist(), wide(X) if declared else None
    scores = []
    for seed in range(FITS if kind is LINEAR else FITS // 2):
        model = kind(epsilon=0.2, classes=classes, feature_bounds=bounds, random_state=seed)
        scores.append(float(model.fit(X, y).score(T, t)))
    # Of two classes the true majority; of three in 124 records not even its name can be bought.
    floor = float(np.mean(t == np.bincount(y).argmax())) if len(classes) == 2 else voted(y, t)
    assert floor_is_kept(scores, floor), (np.mean(scores), floor)


def test_regressors_are_not_below_the_mean() -> None:
    """That of 309 targets in a range of 400, bought with the whole of ε = 0.2, has an error of 21."""
    X, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    X, T, y, t = train_test_split(X, y, test_size=0.3, random_state=0)
    scores = []
    for seed in range(FITS):
        model = PrivateLinearRegression(
            epsilon=0.2, target_bounds=(0, 400), feature_bounds=wide(X), random_state=seed
        )
        scores.append(float(r2_score(t, model.fit(X, y).predict(T))))
    error = 400.0 / len(y) / budget_mu(Budget(0.2, 1e-5, Relation.REPLACE_ONE))
    floor = float(r2_score(t, np.full(len(t), y.mean()))) - error**2 / float(np.var(t))
    assert floor_is_kept(scores, floor), (np.mean(scores), floor)


def test_correlated_features_do_not_make_descent_leap() -> None:
    """Fifteen features of one factor, a target that fills a tenth of its range: R² at ε = 4 was .15."""
    scores = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        factor = rng.standard_normal((700, 1))
        X = 0.85 * factor + 0.5 * rng.standard_normal((700, 15))
        y = 10.0 + 0.35 * factor[:, 0] + 0.1 * rng.standard_normal(700)
        model = PrivateLinearRegression(epsilon=4.0, feature_bounds=[(-4, 4)] * 15, target_bounds=(8, 20))
        scores.append(model.fit(X[:400], y[:400]).score(X[400:], y[400:]))
    assert np.mean(scores) > 0.6  # .78, with a standard deviation of .04
