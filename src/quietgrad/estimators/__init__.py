"""scikit-learn estimators: give a table and an ε, get a model and a ledger entry.

>>> import numpy as np
>>> from quietgrad.estimators import PrivateLogisticRegression
>>> X = np.random.default_rng(0).standard_normal((4000, 3))
>>> model = PrivateLogisticRegression(epsilon=1.0, delta=1e-6, classes=[0, 1], row_bound=4.0).fit(X, X[:, 0] > 0)
>>> bool(model.score(X, X[:, 0] > 0) > 0.9), model.privacy_.is_private
(True, True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.core.exports import lazy_names

if TYPE_CHECKING:
    from quietgrad.estimators.additive import PrivateAdditiveClassifier, PrivateAdditiveRegressor
    from quietgrad.estimators.classifiers import PrivateLogisticRegression, PrivateSVC
    from quietgrad.estimators.describing import Description, describe
    from quietgrad.estimators.grouped_rows import GroupedDescription
    from quietgrad.estimators.regressors import (
        PrivateHuberRegressor,
        PrivateLinearRegression,
        PrivatePoissonRegressor,
        PrivateQuantileRegressor,
    )
    from quietgrad.estimators.runs import from_run, to_run
    from quietgrad.estimators.scoring import PrivateScore, private_score
    from quietgrad.estimators.search import PrivateSearch
    from quietgrad.estimators.transformers import PrivatePipeline, PrivateScaler, PublicOneHot

__all__ = [
    "Description",
    "GroupedDescription",
    "PrivateAdditiveClassifier",
    "PrivateAdditiveRegressor",
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
    "to_run",
]

# scikit-learn is loaded with the first estimator.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "estimators.additive": "PrivateAdditiveClassifier PrivateAdditiveRegressor",
        "estimators.classifiers": "PrivateLogisticRegression PrivateSVC",
        "estimators.describing": "Description describe",
        "estimators.grouped_rows": "GroupedDescription",
        "estimators.regressors": (
            "PrivateHuberRegressor PrivateLinearRegression PrivatePoissonRegressor PrivateQuantileRegressor"
        ),
        "estimators.runs": "from_run to_run",
        "estimators.scoring": "PrivateScore private_score",
        "estimators.search": "PrivateSearch",
        "estimators.transformers": "PrivatePipeline PrivateScaler PublicOneHot",
    },
)
