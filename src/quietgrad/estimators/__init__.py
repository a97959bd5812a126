"""scikit-learn estimators: give a table and an ε, get a model and a ledger entry.

>>> import numpy as np
>>> from quietgrad.estimators import PrivateLogisticRegression
>>> X = np.random.default_rng(0).standard_normal((4000, 3))
>>> model = PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=[0, 1], row_bound=4.0).fit(X, X[:, 0] > 0)
>>> bool(model.score(X, X[:, 0] > 0) > 0.9), model.privacy_.is_private
(True, True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.curators.account import spent
    from quietgrad.estimators.additive import PrivateAdditiveClassifier, PrivateAdditiveRegressor
    from quietgrad.estimators.classifiers import PrivateLogisticRegression, PrivateSVC
    from quietgrad.estimators.describing import Description, describe
    from quietgrad.estimators.pipelines import PrivatePipeline
    from quietgrad.estimators.regressors import (
        PrivateHuberRegressor,
        PrivateLinearRegression,
        PrivatePoissonRegressor,
        PrivateQuantileRegressor,
    )
    from quietgrad.estimators.runs import from_run, to_run
    from quietgrad.estimators.scoring import PrivateScore, private_score
    from quietgrad.estimators.search import PrivateSearch
    from quietgrad.estimators.transformers import PrivateBinner, PrivateScaler, PublicOneHot

_HOMES = {
    "PrivateLogisticRegression": "estimators.classifiers",
    "PrivateSVC": "estimators.classifiers",
    "PrivateAdditiveClassifier": "estimators.additive",
    "PrivateAdditiveRegressor": "estimators.additive",
    "PrivateBinner": "estimators.transformers",
    "PrivateHuberRegressor": "estimators.regressors",
    "PrivateLinearRegression": "estimators.regressors",
    "PrivatePoissonRegressor": "estimators.regressors",
    "PrivateQuantileRegressor": "estimators.regressors",
    "PrivatePipeline": "estimators.pipelines",
    "PrivateScaler": "estimators.transformers",
    "PrivateScore": "estimators.scoring",
    "PublicOneHot": "estimators.transformers",
    "PrivateSearch": "estimators.search",
    "Description": "estimators.describing",
    "describe": "estimators.describing",
    "from_run": "estimators.runs",
    "private_score": "estimators.scoring",
    "to_run": "estimators.runs",
    "spent": "curators.account",
}

__all__ = [
    "Description",
    "PrivateAdditiveClassifier",
    "PrivateAdditiveRegressor",
    "PrivateBinner",
    "PrivateHuberRegressor",
    "PrivateLinearRegression",
    "PrivateLogisticRegression",
    "PrivatePipeline",
    "PrivatePoissonRegressor",
    "PrivateQuantileRegressor",
    "PrivateSVC",
    "PrivateScaler",
    "PrivateScore",
    "PrivateSearch",
    "PublicOneHot",
    "describe",
    "from_run",
    "private_score",
    "spent",
    "to_run",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"quietgrad.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
