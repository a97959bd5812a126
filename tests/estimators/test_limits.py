"""As ε grows, every estimator tends to the fit without privacy: at ε = 1000 it is within .005 of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor, QuantileRegressor
from sklearn.metrics import d2_pinball_score, roc_auc_score

from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
    PrivatePoissonRegressor,
    PrivateQuantileRegressor,
)

N = 8000
pytestmark = pytest.mark.filterwarnings("ignore:random_state")
SETTINGS: dict[str, Any] = {"epsilon": 1000.0, "random_state": 0}


def features(name: str, rng: Any) -> tuple[Any, Any]:
    """A table, and scores that a linear model of it can have."""
    if name == "plain":
        X = rng.standard_normal((N, 8))
    elif name == "offset":
        X = rng.standard_normal((N, 8)) + 2000.0
    elif name == "lognormal":
        X = np.exp(rng.standard_normal((N, 6)))
    elif name == "sparse counts":
        X = rng.poisson(rng.gamma(0.3, 0.5, 30), (N, 30)).astype(float)
    elif name == "collinear":
        X = rng.standard_normal((N, 3)) @ rng.standard_normal((3, 10)) + 0.05 * rng.standard_normal((N, 10))
    else:  # scales
        X = rng.standard_normal((N, 6)) * 10.0 ** rng.uniform(-9, 9, 6)
    Z = (X - X.mean(axis=0)) / np.maximum(X.std(axis=0), 1e-300)
    return X, Z @ (rng.standard_normal(X.shape[1]) / np.sqrt(X.shape[1]))


def whitened(X: Any) -> Any:
    """The same columns for a solver that stops early on raw scales."""
    return (X - X.mean(axis=0)) / np.maximum(X.std(axis=0), 1e-300)


@pytest.mark.parametrize("name", ["plain", "offset", "lognormal", "sparse counts", "collinear", "scales"])
def test_classifiers(name: str) -> None:
    rng = np.random.default_rng(0)
    X, score = features(name, rng)
    y = (rng.random(N) < 1.0 / (1.0 + np.exp(-2.0 * score + 1.0))).astype(int)
    model = PrivateLogisticRegression(classes=[0, 1], inference=False, **SETTINGS).fit(X, y)
    exact = LogisticRegression(C=1e4, max_iter=5000).fit(whitened(X), y)
    best = roc_auc_score(y, exact.decision_function(whitened(X)))
    assert roc_auc_score(y, model.decision_function(X)) > best - 0.005
    shaped = PrivateAdditiveClassifier(classes=[0, 1], **SETTINGS).fit(X, y)
    assert roc_auc_score(y, shaped.decision_function(X)) > best - 0.005


@pytest.mark.parametrize("name", ["plain", "offset", "collinear", "scales"])
def test_regressors(name: str) -> None:
    rng = np.random.default_rng(1)
    X, score = features(name, rng)
    y = 10.0 * score + 5.0 * rng.standard_normal(N)
    best = LinearRegression().fit(whitened(X), y).score(whitened(X), y)
    assert PrivateLinearRegression(inference=False, **SETTINGS).fit(X, y).score(X, y) > best - 0.005
    assert PrivateAdditiveRegressor(**SETTINGS).fit(X, y).score(X, y) > best - 0.005
    quantile = PrivateQuantileRegressor(quantile=0.8, **SETTINGS).fit(X, y)
    part = rng.permutation(N)[:2000]
    line = QuantileRegressor(quantile=0.8, alpha=0.0).fit(whitened(X)[part], y[part])
    told = [d2_pinball_score(y, p, alpha=0.8) for p in (quantile.predict(X), line.predict(whitened(X)))]
    assert told[0] > told[1] - 0.005
    counts = rng.poisson(np.exp(score))
    best = PoissonRegressor(alpha=0.0, max_iter=1000).fit(whitened(X), counts).score(whitened(X), counts)
    assert PrivatePoissonRegressor(**SETTINGS).fit(X, counts).score(X, counts) > best - 0.005


@pytest.mark.parametrize(("classes", "features"), [(4, 10), (30, 20)])
def test_many_classes(classes: int, features: int) -> None:
    rng = np.random.default_rng(2)
    y = rng.integers(0, classes, N)
    X = rng.standard_normal((classes, features))[y] + 1.6 * rng.standard_normal((N, features))
    model = PrivateLogisticRegression(classes=list(range(classes)), **SETTINGS).fit(X, y)
    assert model.score(X, y) > LogisticRegression(C=1e4, max_iter=1000).fit(X, y).score(X, y) - 0.005
