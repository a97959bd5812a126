"""Private regressors: Huber and least squares, on targets scaled by public or privately found numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from quietgrad.algorithms.base import Algorithm
from quietgrad.algorithms.table_looks import Bounds, checked_bounds
from quietgrad.algorithms.whitened_gd import WhitenedGD
from quietgrad.errors import DataError
from quietgrad.estimators.base import PrivateLinearModel
from quietgrad.estimators.scans import is_scan, with_labels
from quietgrad.estimators.whom import Whom
from quietgrad.objectives.tables.frame import Frame
from quietgrad.objectives.tables.glm import Huber, Squared
from quietgrad.plans.counting import NOMINAL
from quietgrad.privacy.budget import DEFAULT_RELATION, Budget

_LEAST_SIGNAL = 150.0  # nμ below which the range of targets cannot be found: a false one is a useless model


class _PrivateRegressor(RegressorMixin, PrivateLinearModel):  # type: ignore[misc]
    target_bounds: tuple[float, float] | None
    _regression = True

    def _fit(self, X: Any, y: Any, whose: Callable[[int], Whom]) -> None:
        X, y, bounds = self._accept(X, y)
        whom, features = whose(X.shape[0]), X.shape[1]
        kind = self._method(NOMINAL, features, whom)
        whom.check(kind, self._loss())
        looks_itself = isinstance(kind, WhitenedGD) and kind.look is not None
        scale = None
        if not looks_itself:  # another method sees targets scaled to ±2 by public bounds
            if bounds is None:
                raise ValueError("target_bounds: algorithms other than the default need a public (low, high).")
            scale = Frame(np.zeros(1), np.ones(1), bounds)
        data = whom.of_data(with_labels(X, y, None if scale is None else scale.targets))
        curator = self._curator(whom.asks(self._loss()), data)
        size = self._count(curator, features, whom)
        self._target_bounds(size.n)
        method = self._method(size.n, features, whom)
        session = self._open(curator, self._plan(size, features, whom=whom))
        found = ("the range of the targets was found privately",) if bounds is None else ()
        weights, bias = self._train(session, method, (*whom.notes, *found))
        self.coef_, self.intercept_ = weights[:, 0], float(bias[0])
        if scale is not None:
            self.coef_ = self.coef_ * scale.target_scale
            self.intercept_ = self.intercept_ * scale.target_scale + scale.target_centre
        limits = self.result_.details.get("target_range") or bounds
        assert limits is not None
        self.target_range_ = (float(limits[0]), float(limits[1]))

    def _accept(self, X: Any, y: Any) -> tuple[Any, Any, Bounds | None]:
        """Check what is given before anything is planned or reserved; also the declared range of the targets."""
        if is_scan(X):
            return self._scanned(X), y, self._target_bounds()
        X, y = self._validated(X, y, y_numeric=True)
        self._loss()  # what no loss takes is refused before anybody pays
        return X, np.asarray(y, dtype=np.float64), self._target_bounds()

    def _target_bounds(self, n: int | None = None) -> Bounds | None:
        """The declared range of the targets; refused without one if it could not be found among ``n`` records."""
        if self.target_bounds is not None:
            return checked_bounds("target_bounds", self.target_bounds)
        if n is not None and self._signal(n) < _LEAST_SIGNAL:
            raise DataError(
                "y: at this n and ε no range of the targets can be found privately. Declare it as public: "
                "target_bounds=(low, high)."
            )
        return None

    def _shape(self) -> dict[str, Any]:
        bounds = None if self.target_bounds is None else checked_bounds("target_bounds", self.target_bounds)
        inference = self.inference if self._offers_inference else False
        return {"regression": True, "target_bounds": bounds, "inference": inference}

    _offers_inference = False

    def _loss(self) -> Any:
        raise NotImplementedError

    def predict(self, X: Any) -> Any:
        """The predicted target of each record, within the targets' range."""
        check_is_fitted(self)
        return np.clip(self._features(X) @ self.coef_ + self.intercept_, *self.target_range_)


class PrivateHuberRegressor(_PrivateRegressor):
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

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        relation: str = DEFAULT_RELATION,
        *,
        threshold: float = 1.0,
        target_bounds: tuple[float, float] | None = None,
        feature_bounds: Any = None,
        row_bound: float | None = None,
        fit_intercept: bool = True,
        regularization: float = 0.0,
        inference: bool | None = None,
        algorithm: Algorithm | str | None = None,
        ledger: Any = None,
        account: str = "default",
        cap: Budget | None = None,
        n_public: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.threshold = threshold
        self.target_bounds = target_bounds
        self.feature_bounds = feature_bounds
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
        self.inference = inference
        self.algorithm = algorithm
        self.ledger = ledger
        self.account = account
        self.cap = cap
        self.n_public = n_public
        self.random_state = random_state

    def _loss(self) -> Any:
        return Huber(self.threshold, **self._settings())


class PrivateLinearRegression(_PrivateRegressor):
    """Differentially private least squares; residual gradients are clipped, so outliers weigh less.

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

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        relation: str = DEFAULT_RELATION,
        *,
        target_bounds: tuple[float, float] | None = None,
        feature_bounds: Any = None,
        row_bound: float | None = None,
        fit_intercept: bool = True,
        regularization: float = 0.0,
        inference: bool | None = None,
        algorithm: Algorithm | str | None = None,
        ledger: Any = None,
        account: str = "default",
        cap: Budget | None = None,
        n_public: int | None = None,
        random_state: int | None = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.target_bounds = target_bounds
        self.feature_bounds = feature_bounds
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
        self.inference = inference
        self.algorithm = algorithm
        self.ledger = ledger
        self.account = account
        self.cap = cap
        self.n_public = n_public
        self.random_state = random_state

    _offers_inference = True

    def _loss(self) -> Any:
        return Squared(**self._settings())
