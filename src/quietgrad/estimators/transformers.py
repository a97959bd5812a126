"""Pipelines that do not leak: a scaler that finds ranges privately, a public one-hot, and a pipeline that warns.

``StandardScaler`` or a learnt encoder in front of a private model looks at every record without noise, and the
whole pipeline is then private no more. These steps pay for what they read of records, or read nothing. scikit-learn
tells an estimator nothing of the pipeline that fits it; :class:`PrivatePipeline` knows its steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.utils import get_tags
from sklearn.utils.validation import check_is_fitted

from quietgrad.core.errors import LedgerWarning
from quietgrad.core.session.statement import Privacy
from quietgrad.estimators.base import PrivateModel, SpendsPrivacy, noted
from quietgrad.estimators.predicting import nameless
from quietgrad.estimators.validation import (
    ColumnSchema,
    PrivacyUnitSpec,
    checked_rows,
    is_scan,
    read_table,
    take_person_column,
    with_labels,
)
from quietgrad.methods import minimize
from quietgrad.methods.budget_allocation import allocate_range_estimation
from quietgrad.methods.range_estimation import Ranges
from quietgrad.tables.losses import Squared
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.table import Array, Floats

_DECLARED = {"OneHotEncoder": "categories", "OrdinalEncoder": "categories", "CountVectorizer": "vocabulary"}
"""Steps of scikit-learn that learn nothing if this setting is given."""


@dataclass(eq=False, repr=False)
class PrivateScaler(OneToOneFeatureMixin, TransformerMixin, SpendsPrivacy):  # type: ignore[misc]
    """Scaling of features into [−1, 1] by declared or privately estimated ranges.

    Args:
        epsilon: Privacy budget of one fit. Smaller is more private and noisier. Nothing is spent if all
            bounds are declared.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        feature_bounds: public (low, high) of each feature, ``None`` where it must be found, or a mapping of names.
        ledger, account, cap, n_public: as in the estimators. A model fitted on the result is charged apart.

    Attributes:
        feature_range_: (low, high) used; ``privacy_``: what is proved, ``None`` if nothing was asked.

    >>> X = np.random.default_rng(0).uniform(0, 1e6, (20_000, 2))
    >>> scaler = PrivateScaler(epsilon=0.2).fit(X)
    >>> bool(np.abs(scaler.transform(X)).max() <= 1.0), round(scaler.privacy_.epsilon, 2)
    (True, 0.2)
    """

    epsilon: float = 0.1
    delta: float = 1e-6
    feature_bounds: Any = field(default=None, kw_only=True)

    _declared_bounds, _column_names = PrivateModel._declared_bounds, PrivateModel._column_names

    def fit(self, X: object, y: object = None, *, person: object = None) -> Any:
        """Estimate the ranges that are not declared.

        With ``person``, one id per record, they are those of people.
        """
        X, person = take_person_column(X, person) if is_scan(X) else (X, person)
        rows = self._checked(X, reset=True)
        budget = self._budget()
        whom = PrivacyUnitSpec.of(person, rows.shape[0])
        features = rows.shape[1]
        sparse = not isinstance(rows, np.ndarray) and not is_scan(rows)
        bounds = self._declared_bounds(None if is_scan(X) else X, features)
        bounds = X.bounds if is_scan(X) and self.feature_bounds is None else bounds

        def ranges(n: int) -> Ranges:
            return Ranges(
                allocate_range_estimation(n, features, budget=budget, feature_bounds=bounds, sparse=sparse)
            )

        self.privacy_: Any = None
        if bounds is None or any(pair is None for pair in bounds):
            data = with_labels(rows, np.zeros(rows.shape[0]), _no_labels)
            result = minimize(
                Squared(), data, ranges, budget=budget, ledger=self.ledger,
                account=self.account, cap=self.cap, n_public=self._declared_n(), person=whom.people,
            )  # fmt: skip
            self.privacy_ = result.privacy
            low, high = result.details["feature_range"]
            self._frame = FeatureBox(np.array(low), np.array(high))
        else:
            pairs = np.array(bounds, dtype=np.float64)
            self._frame = FeatureBox(pairs[:, 0], pairs[:, 1])
            self._frame = self._frame.zero_kept() if sparse else self._frame
        self.feature_range_ = (self._frame.low, self._frame.high)
        return self

    def transform(self, X: object) -> Any:
        """Rows in [−1, 1]; a scan stays one."""
        check_is_fitted(self)
        checked, turned = self._checked(X, reset=False), self._frame.apply
        return checked.mapped(turned, self.get_feature_names_out()) if is_scan(checked) else turned(checked)

    def _checked(self, X: object, *, reset: bool) -> Any:
        if is_scan(X):
            if reset:
                self.n_features_in_ = X.features
                self.feature_names_in_ = np.array(X.feature_names, dtype=object)
            nameless(self, X)  # refuses other columns than those of the fit
            return X
        return checked_rows(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _no_labels(y: Array) -> Floats:
    return np.zeros(len(y))


class PublicOneHot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """One-hot encoding by a public vocabulary, without privacy cost.

    Args:
        categories: vocabulary by column name or position. Boolean columns need no entry. For a pandas category
            column the dtype's categories are used, with a warning, because ``astype("category")`` reads them from
            the records. Other columns pass through. A value outside its vocabulary becomes zeros.

    With ``set_output(transform="pandas")`` the columns of categories are boolean, so that an estimator behind it
    need not pay to find that they lie in [0, 1].

    >>> PublicOneHot({0: ["a", "b"]}).fit_transform(np.array([["b"], ["z"]], dtype=object)).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, categories: Mapping[Any, Sequence[Any]] | None = None) -> None:
        self.categories = categories

    _columns: ColumnSchema

    def fit(self, X: object, y: object = None) -> PublicOneHot:
        """Read the columns' names and types.

        Of the records, only whether each can be transformed is checked.
        """
        read_table(self, X, self.categories, reset=True)
        return self

    def transform(self, X: object) -> Any:
        """Numbers as they are, categories as zeros and ones."""
        check_is_fitted(self, "n_features_in_")
        numbers, blocks = read_table(self, X, self.categories, reset=False), []
        for column, name in zip(numbers.T, self._columns.names, strict=True):
            vocabulary = self._columns.vocabularies.get(name)
            if vocabulary is None:
                blocks.append(column[:, None])
                continue
            codes = column.astype(int)
            blocks.append(np.eye(len(vocabulary), dtype=bool)[np.maximum(codes, 0)] & (codes >= 0)[:, None])
        own: Mapping[str, str] = getattr(self, "_sklearn_output_config", {})
        if own.get("transform", get_config()["transform_output"]) == "pandas":
            import pandas

            columns = [column for block in blocks for column in block.T]
            names = self.get_feature_names_out()
            if len(set(names)) == len(names):  # else the estimator behind it refuses them by name
                return pandas.DataFrame(dict(zip(names, columns, strict=True)), index=getattr(X, "index", None))
        return np.hstack([block.astype(np.float64) for block in blocks])

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """``name`` of a number, ``name=value`` of a category."""
        check_is_fitted(self, "n_features_in_")
        names = []
        for name in self._columns.names:
            values = self._columns.vocabularies.get(name)
            names += [name] if values is None else [f"{name}={value}" for value in values]
        return np.array(names, dtype=object)


class PrivatePipeline(Pipeline):  # type: ignore[misc]
    """A scikit-learn pipeline that warns of steps that its ε does not cover.

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

    def fit(self, X: object, y: object = None, **params: Any) -> Self:
        """Fit every step.

        The warning about steps that learn without privacy comes before anything is charged.
        """
        uncovered = tuple(learning_steps(self))
        for told in uncovered:
            warnings.warn(told, LedgerWarning, stacklevel=2)
        super().fit(X, y, **params)
        unit, mixed = self.privacy_.unit, []
        for name, step in _steps(self.steps[:-1]):
            stated: Privacy | None = vars(step).get("privacy_")
            if stated is not None and stated.unit is not unit:
                mixed.append(
                    f"the guarantee of the step {name} of this pipeline is per {stated.unit}, that of the last one "
                    f"per {unit}: together they guarantee nothing per person; give every step that pays person=, "
                    "or declare its bounds"
                )
        for told in mixed:
            warnings.warn(told, LedgerWarning, stacklevel=2)
        self[-1].privacy_ = noted(self.privacy_, (*uncovered, *mixed))
        return self

    @property
    def privacy_(self) -> Privacy:
        """The privacy statement of the last step's fit.

        Its notes name what it does not cover.
        """
        stated: Privacy = self[-1].privacy_
        return stated


def learning_steps(pipeline: Pipeline) -> Iterator[str]:
    """Yield a warning about the steps before the last that learn from the records without privacy."""
    if learning := [name for name, step in _steps(pipeline.steps[:-1]) if learns(step)]:
        yield (
            f"ε does not cover {', '.join(learning)}: such a step learns from the records without privacy. Use "
            "PrivateScaler, PublicOneHot or a public vocabulary, or give a step public numbers"
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
