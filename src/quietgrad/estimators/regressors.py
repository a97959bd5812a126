"""Private regressors: least squares, Huber, quantiles and counts, on targets scaled by public or found numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score
from sklearn.utils.validation import check_is_fitted

from quietgrad.core.errors import DataError
from quietgrad.core.plans.counting import NOMINAL, PublicCount
from quietgrad.core.plans.schedule import Slot
from quietgrad.estimators.base import PrivateLinearModel, PrivateModel, what_counting_cost
from quietgrad.estimators.predicting import row_products
from quietgrad.estimators.validation import PrivacyUnitSpec, is_scan, with_labels
from quietgrad.methods.additive_gd import AdditiveGD
from quietgrad.methods.range_estimation import Bounds, checked_bounds
from quietgrad.methods.whitened_gd import WhitenedGD
from quietgrad.tables.losses import Huber, Pinball, PoissonDeviance, Squared
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.table import Floats, numbers_of

_LARGEST = 1e4  # means of a count that its loss follows exactly
_LEAST_SIGNAL = 150.0  # nμ below which the range of targets cannot be found: a false one is a useless model


@dataclass(eq=False, repr=False)
class Regressor(RegressorMixin, PrivateModel):  # type: ignore[misc]
    """Base class of linear and additive regressors: targets in declared or privately found bounds."""

    target_bounds: tuple[float, float] | None = field(default=None, kw_only=True)

    def _fit(self, X: Any, y: object, whose: Callable[[int], PrivacyUnitSpec]) -> None:
        X, y, bounds = self._accept(X, y)
        whom, features = whose(X.shape[0]), X.shape[1]
        kind = self._method(NOMINAL, features, whom)
        whom.check(kind, self._loss())
        looks_itself = isinstance(kind, WhitenedGD | AdditiveGD) and kind.look is not None
        scale = None
        if not looks_itself:  # another method sees targets scaled to ±2 by public bounds, counts as they are
            if bounds is None:
                raise ValueError("target_bounds: algorithms other than the default need a public (low, high).")
            scale = self._target_frame(bounds)
        data = with_labels(X, y, None if scale is None else scale.targets)
        found = ("the range of the targets was found privately",) if bounds is None else ()

        def looks(size: PublicCount) -> tuple[Slot, ...]:
            self._target_bounds(size)  # which may be too few to find a range
            return ()

        with self._opened(self._loss(), data, features, whom, looks) as active:
            weights, bias = self._train(active, (*whom.notes, *found))
        limits = self.result_.details.get("target_range") or bounds
        assert limits is not None
        self.target_range_ = (float(limits[0]), float(limits[1]))
        self._keep(weights, bias, scale)

    def _keep(self, weights: Floats, bias: Floats, scale: FeatureBox | None) -> None:
        """Keep the coefficients, of targets that ``scale`` scaled, for targets as they are."""
        unit, centre = (1.0, 0.0) if scale is None else (scale.target_scale, scale.target_centre)
        self.coef_ = weights[:, 0] * unit
        self.intercept_: float | Floats = float(bias[0]) * unit + centre

    def _target_frame(self, bounds: Bounds) -> FeatureBox:
        return FeatureBox(np.zeros(1), np.ones(1), bounds)

    def _accept(self, X: object, y: object) -> tuple[Any, Any, Bounds | None]:
        """Check what is given before anything is planned or reserved; also the declared range of the targets."""
        if is_scan(X):
            return self._scanned(X), y, self._target_bounds()
        X, y = self._validated(X, y, y_numeric=True)
        self._loss()  # what no loss takes is refused before any charge
        return X, np.asarray(y, dtype=np.float64), self._target_bounds()

    def _target_bounds(self, size: PublicCount | None = None) -> Bounds | None:
        """The declared range of the targets; refused without one if it could not be found among so many records."""
        if self.target_bounds is not None:
            return checked_bounds("target_bounds", self.target_bounds)
        if size is not None and self._signal(size.n) < _LEAST_SIGNAL:
            raise DataError(
                "y: at this n and ε the range of the targets cannot be estimated privately. Pass a public range: "
                f"target_bounds=(low, high). {what_counting_cost(size)}"
            )
        return None

    def _shape(self) -> dict[str, Any]:
        bounds = None if self.target_bounds is None else checked_bounds("target_bounds", self.target_bounds)
        return {"regression": True, "target_bounds": bounds}

    def _loss(self) -> Any:
        raise NotImplementedError

    def predict(self, X: object) -> Any:
        """The predicted target of each record, within the targets' range."""
        check_is_fitted(self)
        scores = row_products(self._features(X), np.atleast_2d(self.coef_).T) + self.intercept_
        return np.clip(scores.ravel(), *self.target_range_)


@dataclass(eq=False, repr=False)
class PrivateHuberRegressor(PrivateLinearModel, Regressor):
    """Differentially private linear regression with the Huber loss.

    Args:
        threshold: where the loss turns from square to linear, in quarters of the targets' range.
        target_bounds: public (low, high) of the targets; ``None`` finds their range privately or refuses;
            predictions stay inside it.

    The other parameters are those of :class:`~quietgrad.estimators.PrivateLogisticRegression`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((5000, 2))
    >>> model = PrivateHuberRegressor(epsilon=2.0, row_bound=3.0, target_bounds=(-5, 5)).fit(X, X @ [1.0, -1.0])
    >>> bool(model.score(X, X @ [1.0, -1.0]) > 0.9)
    True
    """

    threshold: float = field(default=1.0, kw_only=True)

    def _loss(self) -> Any:
        return Huber(self.threshold, **self._settings())


@dataclass(eq=False, repr=False)
class PrivateLinearRegression(PrivateLinearModel, Regressor):
    """Differentially private least squares with clipped residual gradients.

    Args:
        target_bounds: public (low, high) of the targets; ``None`` finds their range privately or refuses;
            predictions stay inside it.

    The other parameters are those of :class:`~quietgrad.estimators.PrivateLogisticRegression`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((5000, 2))
    >>> model = PrivateLinearRegression(epsilon=2.0, row_bound=3.0, target_bounds=(-5, 5)).fit(X, X @ [1.0, -1.0])
    >>> bool(model.score(X, X @ [1.0, -1.0]) > 0.9)
    True
    """

    @property
    def _offers_inference(self) -> bool:
        return True

    def _loss(self) -> Any:
        return Squared(**self._settings())


@dataclass(eq=False, repr=False)
class PrivateQuantileRegressor(PrivateLinearModel, Regressor):
    """Differentially private linear regression of a quantile.

    The loss is the pinball loss with its corner rounded a little.

    Args:
        quantile: strictly between 0 and 1; 0.5 is the median.
        target_bounds: public (low, high) of the targets; ``None`` finds their range privately or refuses;
            predictions stay inside it.

    The corner is rounded over a fortieth of the targets' range. The other parameters are those of
    :class:`~quietgrad.estimators.PrivateLogisticRegression`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((20_000, 2))
    >>> y = X @ [1.0, -1.0] + rng.standard_normal(20_000)
    >>> model = PrivateQuantileRegressor(quantile=0.9, epsilon=2.0, target_bounds=(-8, 8)).fit(X, y)
    >>> bool(abs((y <= model.predict(X)).mean() - 0.9) < 0.03)
    True
    """

    quantile: float = field(default=0.5, kw_only=True)

    def _loss(self) -> Any:
        return Pinball(self.quantile, **self._settings())


@dataclass(eq=False, repr=False)
class PrivatePoissonRegressor(PrivateLinearModel, Regressor):
    """Differentially private Poisson regression of counts: the mean is exp(score).

    Args:
        target_bounds: public (0, most) of the counts; ``None`` finds a limit privately. Larger counts count as the
            limit and negative ones as 0, and predictions stay inside it.

    The other parameters are those of :class:`~quietgrad.estimators.PrivateLogisticRegression`.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((20_000, 2))
    >>> y = rng.poisson(np.exp(0.5 * X[:, 0]))
    >>> model = PrivatePoissonRegressor(epsilon=2.0, target_bounds=(0, 30)).fit(X, y)
    >>> bool(abs(model.coef_[0] - 0.5) < 0.1), bool(abs(model.predict(X).mean() - y.mean()) < 0.1)
    (True, True)
    """

    def _shape(self) -> dict[str, Any]:
        return {**super()._shape(), "counts": True}

    def _target_frame(self, bounds: Bounds) -> FeatureBox:
        return FeatureBox(np.zeros(1), np.ones(1), bounds, 1.0)

    def _target_bounds(self, size: PublicCount | None = None) -> Bounds | None:
        bounds = super()._target_bounds(size)
        if bounds is not None and bounds[0] != 0.0:
            raise ValueError("target_bounds: counts begin at 0; give (0, most).")
        return bounds

    def _loss(self) -> Any:
        return PoissonDeviance(_LARGEST, **self._settings())

    def predict(self, X: object) -> Any:
        """The mean count of each record, within the counts' range."""
        check_is_fitted(self)
        scores = row_products(self._features(X), self.coef_[:, None])[:, 0] + self.intercept_
        return np.clip(np.exp(np.minimum(scores, 700.0)), *self.target_range_)

    def score(self, X: object, y: object, sample_weight: npt.ArrayLike | None = None) -> float:
        """D², the part of the Poisson deviance that is explained."""
        least = 1e-9 * self.target_range_[1]
        counts = np.maximum(numbers_of(y, "y"), 0.0)
        return float(
            d2_tweedie_score(counts, np.maximum(self.predict(X), least), power=1, sample_weight=sample_weight)
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags
