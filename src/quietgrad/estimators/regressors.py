"""Private regressors: Huber and least squares, on targets scaled by public or privately found numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted

from quietgrad.algorithms.base import Algorithm
from quietgrad.estimators.base import PrivateLinearModel, look_noise, refuse_weights
from quietgrad.objectives.base import Batch
from quietgrad.objectives.tables.glm import Huber, Squared
from quietgrad.plans.schedule import Slot
from quietgrad.privacy.budget import Budget
from quietgrad.sampling import FullBatch

_REACH = 5.0  # scaled targets are kept within ± this


@dataclass(frozen=True)
class TargetHistogram:
    """Counts of targets between public points ±√2^k: one record is one count."""

    bound: float = 1.0

    @property
    def edges(self) -> Any:
        """Bin edges, symmetric about zero; the outer bins are open."""
        powers = np.exp2(np.arange(-40, 61) / 2.0)
        return np.concatenate([-powers[::-1], [0.0], powers])

    def dim(self, records: Any) -> int:
        """One count per bin."""
        return len(self.edges) + 1

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        """out += the counts."""
        out += np.bincount(np.searchsorted(self.edges, batch.records.y), minlength=len(out))

    def centre_and_scale(self, counts: Any, noise: float) -> tuple[float, float]:
        """Median and half the 10–90 % range, from counts that stand out of the noise."""
        kept = np.where(counts > 4.0 * noise, counts, 0.0)
        if not kept.any():
            kept = np.where(counts == counts.max(), 1.0, 0.0)
        share = np.cumsum(kept) / kept.sum()
        low, middle, high = (self._value(int(np.searchsorted(share, q))) for q in (0.1, 0.5, 0.9))
        return middle, max(0.5 * (high - low), 1e-6 * max(1.0, abs(middle)), 2.0**-20)

    def _value(self, index: int) -> float:
        edges = self.edges
        return float(0.5 * (edges[max(index - 1, 0)] + edges[min(index, len(edges) - 1)]))


class _PrivateRegressor(RegressorMixin, PrivateLinearModel):  # type: ignore[misc]
    target_bounds: tuple[float, float] | None

    def fit(self, X: Any, y: Any, **options: Any) -> Any:
        """Fit on records ``X`` and targets ``y``; nothing is spent if either is refused."""
        refuse_weights(options)
        X, y = self._validated(X, y, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        notes: tuple[str, ...] = ()
        if self.target_bounds is not None:
            centre, scale = _middle(self.target_bounds)
            session = self._open(self._loss(), (X, _scaled(y, centre, scale)), self._plan(X.shape[0]))
        else:
            look = Slot("targets", FullBatch(), fixed=look_noise(self._budget()))
            plan = self._plan(X.shape[0], (look,))
            session = self._open(Squared(), (X, y), plan)
            query = TargetHistogram()
            counts = session.release("targets", query)
            centre, scale = query.centre_and_scale(np.asarray(counts), look.multiplier(plan.noise_multiplier))
            session.reread(self._loss(), (X, _scaled(y, centre, scale)))
            notes = ("the targets' centre and scale were found privately",)
        weights, bias = self._train(session, notes)
        self.coef_ = weights[:, 0] * scale
        self.intercept_ = float(bias[0] * scale + centre)
        return self

    def _loss(self) -> Any:
        raise NotImplementedError

    def predict(self, X: Any) -> Any:
        """The predicted target of each record."""
        check_is_fitted(self)
        return self._features(X) @ self.coef_ + self.intercept_


def _scaled(y: Any, centre: float, scale: float) -> Any:
    with np.errstate(over="ignore"):  # a warning would tell that some target is that far out
        return np.clip((y - centre) / scale, -_REACH, _REACH)


def _middle(bounds: tuple[float, float] | None) -> tuple[float, float]:
    if bounds is None or len(bounds) != 2 or not math.isfinite(bounds[0] + bounds[1]) or bounds[0] >= bounds[1]:
        raise ValueError(f"target_bounds={bounds!r}: must be (low, high) with low < high, both finite and public.")
    return 0.5 * (bounds[0] + bounds[1]), 0.25 * (bounds[1] - bounds[0])


class PrivateHuberRegressor(_PrivateRegressor):
    """Differentially private linear regression with the Huber loss.

    Args:
        threshold: where the loss turns from square to linear, in units of the targets' scale.
        target_bounds: public (low, high) of the targets; ``None`` finds their centre and scale privately.

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
        relation: str = "replace-one",
        *,
        threshold: float = 1.0,
        target_bounds: tuple[float, float] | None = None,
        row_bound: float | None = None,
        fit_intercept: bool = True,
        regularization: float = 0.0,
        algorithm: Algorithm | None = None,
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
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
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
        target_bounds: public (low, high) of the targets; ``None`` finds their centre and scale privately.

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
        relation: str = "replace-one",
        *,
        target_bounds: tuple[float, float] | None = None,
        row_bound: float | None = None,
        fit_intercept: bool = True,
        regularization: float = 0.0,
        algorithm: Algorithm | None = None,
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
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
        self.algorithm = algorithm
        self.ledger = ledger
        self.account = account
        self.cap = cap
        self.n_public = n_public
        self.random_state = random_state

    def _loss(self) -> Any:
        return Squared(**self._settings())
