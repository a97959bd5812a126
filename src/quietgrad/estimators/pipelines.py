"""Pipelines that state what their ε does not cover.

scikit-learn tells an estimator nothing of the pipeline or search that fits it. A plain ``Pipeline`` therefore fits
without a word whatever its steps learn; :class:`PrivatePipeline` knows its steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Self

from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils import get_tags

from quietgrad.errors import LedgerWarning
from quietgrad.estimators.base import noted
from quietgrad.training.result import Privacy

_DECLARED = {"OneHotEncoder": "categories", "OrdinalEncoder": "categories", "CountVectorizer": "vocabulary"}
"""Steps of scikit-learn that learn nothing if this setting is given."""


class PrivatePipeline(Pipeline):  # type: ignore[misc]
    """A scikit-learn pipeline that warns of steps which its ε does not cover, and notes them in ``privacy_``.

    The last step is a private estimator. Steps before it should learn nothing, or learn privately:
    ``PrivateScaler``, ``PublicOneHot``, or steps of scikit-learn with public numbers and vocabularies.

    >>> import numpy as np
    >>> from sklearn.preprocessing import FunctionTransformer
    >>> from quietgrad.estimators import PrivateLogisticRegression
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> last = PrivateLogisticRegression(classes=[0, 1], row_bound=2.0)
    >>> model = PrivatePipeline([("squash", FunctionTransformer(np.tanh)), ("model", last)]).fit(X, X[:, 0] > 0)
    >>> bool(model.score(X, X[:, 0] > 0) > 0.9), model.privacy_.is_private
    (True, True)
    """

    def fit(self, X: Any, y: Any = None, **params: Any) -> Self:
        """Fit every step; the warning of steps that learn without privacy comes before anything is charged."""
        uncovered = tuple(learning_steps(self))
        for told in uncovered:
            warnings.warn(told, LedgerWarning, stacklevel=2)
        super().fit(X, y, **params)
        mixed = tuple(_other_units(self))
        for told in mixed:
            warnings.warn(told, LedgerWarning, stacklevel=2)
        self[-1].privacy_ = noted(self.privacy_, (*uncovered, *mixed))
        return self

    @property
    def privacy_(self) -> Privacy:
        """What is proved about the last step's fit, and what that does not cover."""
        stated: Privacy = self[-1].privacy_
        return stated


def learning_steps(pipeline: Pipeline) -> Iterator[str]:
    """What to say of the steps before the last that learn from the records without privacy."""
    if learning := [name for name, step in _steps(pipeline.steps[:-1]) if learns(step)]:
        yield (
            f"ε does not cover {', '.join(learning)}: such a step learns from the records without privacy. Use "
            "PrivateScaler, PublicOneHot or a public vocabulary, or give a step public numbers"
        )


def _other_units(pipeline: PrivatePipeline) -> Iterator[str]:
    """What to say of private steps whose privacy unit is not that of the last."""
    for name, step in _steps(pipeline.steps[:-1]):
        stated: Privacy | None = vars(step).get("privacy_")
        if stated is not None and stated.unit is not pipeline.privacy_.unit:
            yield (
                f"the step {name} of this pipeline promises per {stated.unit}, the last one per "
                f"{pipeline.privacy_.unit}: together they promise nothing per person; give every step that pays "
                "person=, or declare its bounds"
            )


def _steps(named: Any) -> Iterator[tuple[str, BaseEstimator]]:
    """Every step by name, also those inside of unions and pipelines."""
    for name, step, *_ in named:
        if isinstance(step, Pipeline):
            yield from _steps(step.steps)
        elif isinstance(step, FeatureUnion):
            yield from _steps(step.transformer_list)
        elif isinstance(step, ColumnTransformer):
            yield from _steps(step.transformers)
        elif isinstance(step, BaseEstimator):
            yield str(name), step


def learns(step: BaseEstimator) -> bool:
    """Whether a step reads something from the records that nothing pays for.

    >>> from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
    >>> learns(StandardScaler()), learns(FunctionTransformer()), learns(OneHotEncoder(categories=[["a", "b"]]))
    (True, False, False)
    """
    kind = type(step)
    if kind.__module__.partition(".")[0] == "quietgrad" or not get_tags(step).requires_fit:
        return False
    settings = step.get_params(deep=False)
    if kind.__name__ == "SimpleImputer":
        return bool(settings["strategy"] != "constant")
    return settings.get(_DECLARED.get(kind.__name__, ""), "auto") in ("auto", None)
