"""What an ε does not cover: what scikit-learn does around a fit, by what is being called while it runs.

scikit-learn tells an estimator nothing of the pipeline or search that fits it, so the calls under way are asked.
What is found is said, and changes nothing that is released: a wrapper that is not seen costs a warning, no privacy.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils import get_tags

from quietgrad.errors import LedgerWarning, TooNoisyWarning
from quietgrad.privacy.budget import PrivacyUnit

_SEARCHES = ("sklearn.model_selection._search", "sklearn.model_selection._validation")
_SEARCHED = (
    "this fit is part of a cross-validation or search over exact scores: the fits are charged, but choosing by "
    "such scores is a release that nothing pays for; use PrivateSearch, or private_score"
)
_DECLARED = {"OneHotEncoder": "categories", "OrdinalEncoder": "categories", "CountVectorizer": "vocabulary"}
"""Steps of scikit-learn that learn nothing if this setting is given."""


def outside(unit: PrivacyUnit) -> Iterator[tuple[type[Warning], str]]:
    """What to say of the searches and pipelines that a fit is part of, whose promise is to ``unit``."""
    searched = False
    for frame, _ in traceback.walk_stack(None):
        searched |= frame.f_globals.get("__name__") in _SEARCHES
        pipeline = frame.f_locals.get("self")
        if isinstance(pipeline, Pipeline) and frame.f_code.co_name == "fit":
            yield from _of_pipeline(pipeline, unit)
    if searched:
        yield TooNoisyWarning, _SEARCHED


def _of_pipeline(pipeline: Pipeline, unit: PrivacyUnit) -> Iterator[tuple[type[Warning], str]]:
    steps = list(_steps(pipeline.steps[:-1]))
    if learning := [name for name, step in steps if learns(step)]:
        yield (
            LedgerWarning,
            (
                f"ε does not cover {', '.join(learning)}: such a step learns from the records without privacy. Use "
                "PrivateScaler, PublicOneHot or a public vocabulary, or give a step public numbers"
            ),
        )
    for name, step in steps:
        stated = getattr(step, "privacy_", None)
        if stated is not None and stated.unit is not unit:
            yield (
                LedgerWarning,
                (
                    f"the step {name} of this pipeline promises per {stated.unit}, this one per {unit}: together "
                    "they promise nothing per person; give every step that pays person=, or declare its bounds"
                ),
            )


def _steps(named: Any) -> Iterator[tuple[str, Any]]:
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


def learns(step: Any) -> bool:
    """Whether a step reads something from the records that nothing pays for.

    >>> from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
    >>> learns(StandardScaler()), learns(FunctionTransformer()), learns(OneHotEncoder(categories=[["a", "b"]]))
    (True, False, False)
    """
    kind = type(step)
    if kind.__module__.partition(".")[0] == "quietgrad" or not get_tags(step).requires_fit:
        return False
    if kind.__name__ == "SimpleImputer":
        return bool(step.strategy != "constant")
    return getattr(step, _DECLARED.get(kind.__name__, ""), "auto") in ("auto", None)
