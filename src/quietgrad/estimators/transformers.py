"""Transformers for pipelines that do not leak: a scaler and a binner that find ranges privately, a public one-hot.

``StandardScaler`` or a learnt encoder in front of a private model looks at every record without noise, and the
whole pipeline is then private no more. These pay for what they look at, or look at nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.algorithms.range_estimation import Look, found_frame
from quietgrad.algorithms.whitened_design import look_for
from quietgrad.curators.base import Session
from quietgrad.estimators.base import PrivateModel, SpendsPrivacy
from quietgrad.estimators.scans import is_scan, nameless, with_labels
from quietgrad.estimators.validation import Columns, Whom, checked_rows, named, read_table
from quietgrad.objectives.tables.losses import Squared
from quietgrad.objectives.tables.range_queries import Frame
from quietgrad.objectives.tables.shapes import usual_edges
from quietgrad.plans.schedule import Plan, Schedule, Slot, plan
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.sampling import FullBatch
from quietgrad.vectors import Vector


class _Ranges(Algorithm):
    """The releases of a look and nothing else, in the shape of an algorithm."""

    name = "ranges"

    def __init__(self, look: Look) -> None:
        shares = look.shares()
        total = sum(shares.values())
        self._shares = {slot: share / total for slot, share in shares.items()}
        self._look = look

    def schedule(self, n_public: int) -> Schedule:
        slots = [Slot(name, FullBatch(), noise=share**-0.5) for name, share in self._shares.items()]
        return Schedule(tuple(slots))

    def init(self, x0: Vector) -> State:
        return State(params=x0)

    def step(self, state: State, door: Session) -> State:
        relation = Relation.ADD_REMOVE if door.plan.budget is None else door.plan.budget.relation
        state.extra.update(found_frame(self._look, door, len(state.params), relation))
        state.extra["feature_range"] = [state.extra["low"].tolist(), state.extra["high"].tolist()]
        state.step, state.done = 1, True
        return state

    def output(self, state: State) -> Vector:
        return state.params

    def config(self) -> dict[str, Any]:
        return {"look": self._look.config()}


def plan_scaling(n: int, features: int, budget: Budget) -> Plan:
    """What finding the ranges of ``features`` numbers would release."""
    return plan(_Ranges(look_for(n, features, budget=budget)), n=n, budget=budget)


@dataclass(eq=False, repr=False)
class PrivateScaler(OneToOneFeatureMixin, TransformerMixin, SpendsPrivacy):  # type: ignore[misc]
    """Scaling of features into [−1, 1] by declared or privately estimated ranges.

    Args:
        epsilon: Privacy budget of one fit. Smaller is more private and noisier. Nothing is spent if all
            bounds are declared.
        delta: Probability with which the bound e^ε may fail. Choose it well below 1/n.
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
    _takes_sparse = True

    def fit(self, X: Any, y: Any = None, *, person: Any = None) -> Any:
        """Find the ranges that are not declared; with ``person``, one id per record, those of people."""
        X, person = named(X, person) if is_scan(X) else (X, person)
        rows = self._checked(X, reset=True)
        budget = Budget(self.epsilon, self.delta, Relation.parse(self.relation))
        whom = Whom.of(person, rows.shape[0])
        features = rows.shape[1]
        given = self.n_public if budget.relation is Relation.ADD_REMOVE else None
        sparse = not isinstance(rows, np.ndarray) and not is_scan(rows)
        bounds = self._declared_bounds(None if is_scan(X) else X, features)
        bounds = X.bounds if is_scan(X) and self.feature_bounds is None else bounds

        def ranges(n: int) -> _Ranges:
            return _Ranges(look_for(n, features, budget=budget, feature_bounds=bounds, sparse=sparse))

        self.privacy_: Any = None
        if bounds is None or any(pair is None for pair in bounds):
            from quietgrad.training import minimize

            data = with_labels(rows, np.zeros(rows.shape[0]), _no_labels)
            result = minimize(
                Squared(), data, ranges, budget=budget, ledger=self.ledger,
                account=self.account, cap=self.cap, n_public=given, person=whom.people,
            )  # fmt: skip
            self.privacy_ = result.privacy
            low, high = result.details["feature_range"]
            self._frame = Frame(np.array(low), np.array(high))
        else:
            pairs = np.array(bounds, dtype=np.float64)
            self._frame = Frame(pairs[:, 0], pairs[:, 1])
            self._frame = self._frame.zero_kept() if sparse else self._frame
        self.feature_range_ = (self._frame.low, self._frame.high)
        return self

    def transform(self, X: Any) -> Any:
        """Rows in [−1, 1]; a scan stays one."""
        check_is_fitted(self)
        return self._turned(self._frame.apply, X)

    def _turned(self, rows: Callable[[Any], Any], X: Any) -> Any:
        checked = self._checked(X, reset=False)
        return checked.mapped(rows, self.get_feature_names_out()) if is_scan(checked) else rows(checked)

    def _checked(self, X: Any, *, reset: bool) -> Any:
        if is_scan(X):
            if reset:
                self.n_features_in_ = X.features
                self.feature_names_in_ = np.array(X.feature_names, dtype=object)
            nameless(self, X)  # refuses other columns than those of the fit
            return X
        taken = "csr" if self._takes_sparse else False
        return checked_rows(self, X, accept_sparse=taken, dtype=[np.float64, np.float32], reset=reset)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self._takes_sparse
        return tags


@dataclass(eq=False, repr=False)
class PrivateBinner(PrivateScaler):
    """Bins of each feature's declared or privately estimated range, one-hot encoded.

    Args:
        bins: of each feature; narrower near zero.

    The other parameters are those of :class:`PrivateScaler`.

    >>> PrivateBinner(bins=4, feature_bounds=[(0, 16)]).fit(np.zeros((9, 1))).transform(np.array([[5.0]])).tolist()
    [[0.0, 0.0, 1.0, 0.0]]
    """

    bins: int = field(default=8, kw_only=True)

    _takes_sparse = False

    def transform(self, X: Any) -> Any:
        """One column per feature and bin."""
        check_is_fitted(self)
        if isinstance(self.bins, bool) or int(self.bins) != self.bins or not 2 <= self.bins <= 4096:
            raise ValueError(f"bins={self.bins!r}: must be a whole number from 2 to 4096.")
        edges = [usual_edges(float(a), float(b), int(self.bins)) for a, b in zip(*self.feature_range_, strict=True)]
        return self._turned(partial(_binned, edges), X)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """``name[k]`` for each feature and bin."""
        names = super().get_feature_names_out(input_features)
        return np.array([f"{name}[{k}]" for name in names for k in range(self.bins)], dtype=object)


def _binned(edges: list[Any], rows: Any) -> Any:
    places = [np.searchsorted(e[1:-1], c, side="right") for e, c in zip(edges, rows.T, strict=True)]
    return np.hstack([np.eye(len(e) - 1)[place] for e, place in zip(edges, places, strict=True)])


def _no_labels(y: Any) -> Any:
    return np.zeros(len(y))


class PublicOneHot(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """One-hot encoding by a public vocabulary; it reads no records and costs nothing.

    Args:
        categories: vocabulary by column name or position; columns of pandas' category or boolean type declare
            theirs, and a warning says so of the former: ``astype("category")`` reads them from the records. Other
            columns pass through. A value outside its vocabulary becomes zeros.

    With ``set_output(transform="pandas")`` the columns of categories are boolean, so that an estimator behind it
    need not pay to find that they lie in [0, 1].

    >>> PublicOneHot({0: ["a", "b"]}).fit_transform(np.array([["b"], ["z"]], dtype=object)).tolist()
    [[0.0, 1.0], [0.0, 0.0]]
    """

    def __init__(self, categories: Mapping[Any, Sequence[Any]] | None = None) -> None:
        self.categories = categories

    _columns: Columns

    def fit(self, X: Any, y: Any = None) -> PublicOneHot:
        """Read the columns' names and types; of the records, only that each can be transformed."""
        read_table(self, X, self.categories, reset=True)
        return self

    def transform(self, X: Any) -> Any:
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
        if self._gives_frames():
            import pandas

            columns = [column for block in blocks for column in block.T]
            names = self.get_feature_names_out()
            if len(set(names)) == len(names):  # else the estimator behind it refuses them by name
                return pandas.DataFrame(dict(zip(names, columns, strict=True)), index=getattr(X, "index", None))
        return np.hstack([block.astype(np.float64) for block in blocks])

    def _gives_frames(self) -> bool:
        """Whether scikit-learn was told to put what this transforms into pandas frames."""
        own: Mapping[str, str] = getattr(self, "_sklearn_output_config", {})
        return bool(own.get("transform", get_config()["transform_output"]) == "pandas")

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """``name`` of a number, ``name=value`` of a category."""
        check_is_fitted(self, "n_features_in_")
        names = []
        for name in self._columns.names:
            values = self._columns.vocabularies.get(name)
            names += [name] if values is None else [f"{name}={value}" for value in values]
        return np.array(names, dtype=object)
