"""Private additive models: one smooth function per feature, each with its error band, trained by the same releases.

A score is a constant plus one function of each feature, and of pairs that were named or found. Ranges and bins are
found privately first; then lines, shapes and pairs are fitted in turn, all within one plan
(:mod:`quietgrad.methods.additive_gd`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_y, check_consistent_length, check_is_fitted

from quietgrad.core.errors import DataError
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.session.opening import OpenRun
from quietgrad.estimators.base import PrivateModel, noted, number_of
from quietgrad.estimators.classifiers import Classifier, PrivateLogisticRegression
from quietgrad.estimators.regressors import Regressor
from quietgrad.estimators.validation import ColumnSchema, PrivacyUnitSpec, ScanTable, drop_person_column, read_table
from quietgrad.methods.additive_gd import AdditiveGD, for_shapes
from quietgrad.methods.base import Algorithm
from quietgrad.methods.range_estimation import Bounds
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.losses import Logistic, Multinomial, Squared
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.shapes import AdditiveBasis, Feature
from quietgrad.tables.table import Floats, refuse_text

_ROWS = PrivacyUnitSpec()
_FINEST = 768  # columns of numeric features cut into 32 bins each; more are cut into 16


@dataclass(eq=False, repr=False)
class _Additive(PrivateModel):
    """Base class of both additive models: categories, bins and pairs of columns."""

    categories: Mapping[Any, Sequence[Any]] | None = field(default=None, kw_only=True)
    bins: int | None = field(default=None, kw_only=True)
    pairs: Sequence[tuple[Any, Any]] | str | None = field(default=None, kw_only=True)

    _columns: ColumnSchema = field(init=False)
    _indicators: frozenset[str] = field(init=False)

    def _features(self, X: object) -> Any:
        X = drop_person_column(X, self.person_column_)
        return self.shapes_.expand(read_table(self, X, self.categories, reset=False))

    def _bins(self, n: int) -> int:
        given: Any = self.bins
        if given is not None:
            if isinstance(given, bool) or not isinstance(given, int | np.integer) or not 2 <= given <= 256:
                raise ValueError(f"bins={given!r}: must be a whole number from 2 to 256, or None.")
            return int(given)
        signal = self._signal(n)
        numeric = [name for name in self._columns.names if name not in self._columns.vocabularies]
        # The finest bins only where their columns' whole matrix of second moments is bought.
        finest = 32 if 31 * len(numeric) <= _FINEST else 16
        return 4 if signal < 300 else 8 if signal < 3000 else 16 if signal < 15_000 else finest

    def _column_names(self, features: int) -> list[str]:
        return self._columns.names

    def _declared_bounds(self, X: object, features: int) -> tuple[Bounds | None, ...]:
        """Public ranges: declared ones, and a dummy one for categories, whose codes are no quantities."""
        found = super()._declared_bounds(None, features) or (None,) * features
        words = self._columns.vocabularies
        return tuple(
            (0.0, 1.0) if name in words else pair for name, pair in zip(self._columns.names, found, strict=True)
        )

    def _pairs(self) -> tuple[tuple[int, int], ...] | None:
        """Positions of the pairs; ``None`` to select them privately."""
        if self.pairs is None or isinstance(self.pairs, str):
            if self.pairs not in (None, "auto"):
                raise ValueError(f"pairs={self.pairs!r}: must be 'auto', pairs of columns, or None.")
            return () if self.pairs is None else None
        names = self._columns.names
        places = {name: j for j, name in enumerate(names)}
        if not self._columns.named:  # a column of an array is named by its position too
            places |= {str(j): j for j in range(len(names))}
        found = []
        for pair in self.pairs:
            try:
                first, second = (places[str(name)] for name in pair)
            except (TypeError, ValueError, KeyError):
                raise ValueError("pairs: each must name two columns of X.") from None
            if first == second:
                raise ValueError("pairs: each must name two columns of X, not one twice.")
            found.append((first, second))
        return tuple(found)

    def _method(self, size: int | PublicCount, features: int, whom: PrivacyUnitSpec = _ROWS) -> AdditiveGD:
        n, vocabularies = number_of(size), self._columns.vocabularies
        drafts = tuple(  # before their ranges are known; an indicator has a line alone
            Feature(name, values=tuple(vocabularies.get(name, ())), weight=0.0 if name in self._indicators else 1.0)
            for name in self._columns.names
        )
        return for_shapes(
            n, drafts, budget=self._budget(), bins=self._bins(n),
            bounds=(None,) * features if self._bounds is None else self._bounds, pairs=self._pairs(),
            **self._shape(),
        )  # fmt: skip

    def _train(self, active: OpenRun[Algorithm], notes: tuple[str, ...]) -> Any:
        if self._bounds is None or None in self._bounds:
            notes = (*notes, "ranges of undeclared features were found privately")
        found = super()._train(active, (*notes, *self._columns.notes))
        self.shapes_ = AdditiveBasis.from_json(self.result_.details["shape_map"])
        if self.pairs == "auto":
            pairs = ", ".join(f"{a} × {b}" for a, b in self.pairs_) or "none"
            self.privacy_ = noted(self.privacy_, (f"pairs that act together were looked for privately: {pairs}",))
        return found

    @property
    def pairs_(self) -> list[tuple[str, str]]:
        """The pairs of columns in the model, by name."""
        names = self._columns.names
        return [(names[a], names[b]) for a, b in self.shapes_.pairs]

    def _scanned(self, X: ScanTable) -> ScanTable:
        if self.categories is not None:
            raise DataError("categories: of a scan they are declared in its schema.")
        self._columns = ColumnSchema([str(name) for name in X.feature_names], named=True)
        self._indicators = X.indicators
        return super()._scanned(X)

    def _validated(self, X: object, y: object, *, y_numeric: bool = False) -> tuple[Any, Any]:
        """Numbers and codes of the rows, and the targets."""
        self._indicators = frozenset()
        if y is None:
            raise ValueError("y: this estimator requires y to be passed, but the target y is None.")
        Z = read_table(self, X, self.categories, reset=True)
        if y_numeric:
            refuse_text(y, "y")
        y = _check_y(y, y_numeric=y_numeric, estimator=self)
        check_consistent_length(Z, y)
        self._check_size(len(Z))
        self._bounds = self._declared_bounds(None, Z.shape[1])
        return Z, y

    @property
    def shape_functions_(self) -> dict[Any, tuple[Any, Any, Any]]:
        """{feature: (bin edges or categories, values, error)}; of the last class against the others' mean.

        Values are on the score's scale, with mean zero over bins or categories. The error is one standard error of
        the privacy noise and the sampling; what the fit's shrinkage towards smoothness costs is not in it. Bins
        that hold no records have what smoothing makes of the noise beside them, which no error covers.
        """
        check_is_fitted(self)
        weights = self.coef_[-1] - (self.coef_[:-1].mean(axis=0) if len(self.coef_) > 1 else 0.0)
        scale = FeatureBox(np.zeros(1), np.ones(1), vars(self).get("target_range_")).target_scale
        covariance = np.asarray(self.result_.details["noise_covariance"]) * scale**2
        shapes: dict[Any, tuple[Any, Any, Any]] = {}
        for feature, part in zip(self.shapes_.features, self.shapes_.parts(), strict=False):
            basis = feature.basis()
            centred = basis - basis.mean(axis=0)
            errors = np.sqrt(np.maximum((centred @ covariance[part, part] * centred).sum(axis=1), 0.0))
            where: Any = np.array(feature.cuts) if feature.bins else list(feature.values)
            shapes[feature.name] = (where, centred @ weights[part], errors)
        return shapes

    def plot(self, features: Sequence[Any] | None = None, axes: Any = None) -> Any:
        """Draw the shape functions with bands of two standard errors; returns the matplotlib figure."""
        import matplotlib.pyplot as plt

        shapes = self.shape_functions_
        names = list(shapes) if features is None else [str(name) for name in features]
        if unknown := [name for name in names if name not in shapes]:
            raise ValueError(f"features: {', '.join(unknown)}: not in the model.")
        if axes is None:
            across = min(4, len(names))
            down = math.ceil(len(names) / across)
            _, grid = plt.subplots(down, across, figsize=(3.2 * across, 2.4 * down), squeeze=False)
            axes = list(grid.ravel())
        for axis in axes[len(names) :]:
            axis.set_visible(False)
        for axis, name in zip(axes, names, strict=False):
            where, values, errors = shapes[name]
            if isinstance(where, list):
                axis.errorbar(range(len(where)), values, yerr=2.0 * errors, fmt="o", capsize=3)
                axis.set_xticks(range(len(where)), [str(v) for v in where], rotation=60, fontsize=6)
            else:
                axis.stairs(values, where)
                axis.fill_between(where, *(np.append(v, v[-1]) for v in (values - 2 * errors, values + 2 * errors)),
                                  step="post", alpha=0.25)  # fmt: skip
            axis.axhline(0.0, linewidth=0.5, color="grey")
            axis.set_title(str(name), fontsize=8)
        figure = axes[0].figure
        figure.tight_layout()
        return figure

    def summary(self, level: float = 0.95) -> Any:
        """Not offered: see :attr:`shape_functions_` for functions with error bands."""
        raise NotImplementedError("an additive model has shape_functions_ with error bands, and no summary.")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = False
        return tags


@dataclass(eq=False, repr=False)
class PrivateAdditiveClassifier(Classifier, _Additive):
    """A private additive classifier.

    The score is a constant plus one smooth function of each feature.

    Args:
        epsilon: Privacy budget of one fit. Smaller is more private and noisier.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        classes: the label set, public; ``None`` finds frequent labels privately.
        feature_bounds: public (low, high) by feature or column name; what is missing is found privately.
        categories: the public vocabulary of each category column, by name or position. Boolean columns need no
            entry. For a pandas category column the dtype's categories are used, with a warning, because
            ``astype("category")`` reads them from the records. A value outside its vocabulary counts for nothing.
        bins: of each numeric feature, at most; ``None`` chooses 4, 8, 16 or 32 by n and ε. A private estimate of
            where values lie sets the cuts, inside declared bounds too. Features that show no bend keep a line.
        pairs: columns whose joint effect is modelled too, such as ``[("age", "hours")]``, or positions of an array;
            ``"auto"`` selects up to four pairs of numbers privately.
        ledger, account, cap, n_public, random_state: as in
            :class:`~quietgrad.estimators.PrivateLogisticRegression`.

    Attributes:
        shape_functions_: {feature: (bin edges or categories, values, error)}.
        pairs_: pairs of columns in the model.
        privacy_: what is proved about this fit.

    >>> X = np.random.default_rng(0).uniform(-2, 2, (6000, 2))
    >>> y = X[:, 0] ** 2 > 1
    >>> model = PrivateAdditiveClassifier(epsilon=2.0, feature_bounds=[(-2, 2), (-2, 2)]).fit(X, y)
    >>> bool(model.score(X, y) > 0.85), len(model.shape_functions_["x0"][1])
    (True, 16)
    """

    def _loss(self, known: ClassLabels) -> Any:
        return Logistic(intercept=True) if len(known) == 2 else Multinomial(len(known), intercept=True)

    predict_proba = PrivateLogisticRegression.predict_proba
    predict_log_proba = PrivateLogisticRegression.predict_log_proba


@dataclass(eq=False, repr=False)
class PrivateAdditiveRegressor(Regressor, _Additive):
    """A private additive regressor.

    The prediction is a constant plus one smooth function of each feature.

    Args:
        target_bounds: public (low, high) of the targets; ``None`` finds their range privately or refuses.

    The other parameters are those of :class:`PrivateAdditiveClassifier`.

    >>> X = np.random.default_rng(0).uniform(-2, 2, (6000, 2))
    >>> model = PrivateAdditiveRegressor(epsilon=2.0, feature_bounds=[(-2, 2)] * 2, target_bounds=(-1, 5))
    >>> bool(model.fit(X, X[:, 0] ** 2).score(X, X[:, 0] ** 2) > 0.7)
    True
    """

    def _loss(self) -> Any:
        return Squared(intercept=True)

    def _keep(self, weights: Floats, bias: Floats, scale: FeatureBox | None) -> None:
        frame = FeatureBox(np.zeros(1), np.ones(1), self.target_range_)
        self.coef_ = np.ascontiguousarray(weights.T) * frame.target_scale
        self.intercept_ = bias * frame.target_scale + frame.target_centre
