"""Private hyper-parameter search: the best of a random number of fits, at a price that does not grow with it.

Each round draws a setting at random, fits it on one part of the records with noise, and scores it on the other part
with noise. Only the best round leaves. If the number of rounds K is geometric (Papernot & Steinke 2022), the whole
search costs little more than one round in Rényi terms, however large K turns out; the accountant's
``RepeatAndSelect`` event prices it. Ordinary grid search with a shared ledger is charged for every fit instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils.validation import check_is_fitted

from quietgrad.errors import DataError
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.noise import release_gaussian, sigma_for
from quietgrad.privacy.rng import SecureStream, fresh_key

_LIMIT = 10_000  # rounds; the geometric law passes it with probability (1 − 1/mean)^10000


class PrivateSearch(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Choose hyper-parameters of a private classifier within one budget.

    Args:
        estimator: a private classifier with public ``classes`` and ``row_bound``.
        param_grid: names and the values to try.
        epsilon, delta, relation: the promise of the whole search.
        mean_rounds: expected number of settings tried.
        holdout: part of the records that only scores, chosen at random.
        ledger, account, cap: as in the estimators.

    Attributes:
        best_estimator_, best_params_, best_score_ (noisy), privacy_epsilon_.

    >>> import numpy as np
    >>> from quietgrad.estimators import PrivateLogisticRegression
    >>> X = np.random.default_rng(0).standard_normal((5000, 2))
    >>> model = PrivateLogisticRegression(classes=[0, 1], row_bound=3.0)
    >>> search = PrivateSearch(model, {"regularization": [0.0, 0.1]}, epsilon=4.0).fit(X, X[:, 0] > 0)
    >>> bool(search.score(X, X[:, 0] > 0) > 0.85), search.privacy_epsilon_ <= 4.0
    (True, True)
    """

    def __init__(
        self,
        estimator: Any,
        param_grid: Mapping[str, Sequence[Any]],
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        relation: str = "replace-one",
        mean_rounds: float = 10.0,
        holdout: float = 0.2,
        ledger: Any = None,
        account: str = "default",
        cap: Budget | None = None,
    ) -> None:
        self.estimator = estimator
        self.param_grid = param_grid
        self.epsilon = epsilon
        self.delta = delta
        self.relation = relation
        self.mean_rounds = mean_rounds
        self.holdout = holdout
        self.ledger = ledger
        self.account = account
        self.cap = cap

    def fit(self, X: Any, y: Any) -> PrivateSearch:
        """Search, and keep the best round's model; its cost is reserved before the first round."""
        from quietgrad.privacy.calibrate import calibrate_event

        budget = Budget(self.epsilon, self.delta, Relation.parse(self.relation))
        self._check()
        key = fresh_key()
        y = np.asarray(y)
        n = len(y)
        order = np.argsort(SecureStream(key, "split").uint64(0, n))
        held = max(1, round(self.holdout * n))
        test, train = order[:held], order[held:]

        def search(z: float) -> events.Event:
            # Training and scoring see disjoint records, so a round costs one Gaussian release of multiplier z.
            return events.RepeatAndSelect(events.Gaussian(z), mean=self.mean_rounds, shape=1.0)

        z = calibrate_event(search, budget=budget)
        close = self._reserve(search(z), budget)
        round_budget = _gaussian_budget(z, budget)
        grid = [
            dict(zip(self.param_grid, values, strict=True))
            for values in itertools.product(*self.param_grid.values())
        ]
        best = None
        for k in range(_rounds(self.mean_rounds, key)):
            pick = int(SecureStream(key, "pick").uint64(k, 1)[0] % np.uint64(len(grid)))
            model = clone(self.estimator).set_params(
                **grid[pick], epsilon=round_budget.epsilon, delta=round_budget.delta, relation=self.relation
            )
            model.set_params(ledger=None, account=f"search/{key[:4].hex()}")
            model.fit(X[train], y[train])
            correct = np.array([float((model.predict(X[test]) == y[test]).sum())])
            sigma, step = sigma_for(z, 1.0, 1)
            release_gaussian(correct, SecureStream(key, f"score/{k}").normal(0, 1), sigma, step)
            if best is None or correct[0] > best[0]:
                best = (float(correct[0]), model, grid[pick])
        close()
        assert best is not None
        self.best_score_ = best[0] / held
        self.best_estimator_, self.best_params_ = best[1], best[2]
        from quietgrad.privacy.accounting import account as price

        self.privacy_epsilon_ = price(search(z), delta=self.delta, relation=self.relation)
        self.classes_ = self.best_estimator_.classes_
        return self

    def predict(self, X: Any) -> Any:
        """What the best model says."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict(X)

    def score(self, X: Any, y: Any) -> float:
        """Accuracy of the best model on ``X``, without noise: an evaluation, not private."""
        check_is_fitted(self, "best_estimator_")
        return float(self.best_estimator_.score(X, y))

    def _check(self) -> None:
        if not self.param_grid or not all(len(values) for values in self.param_grid.values()):
            raise ValueError("param_grid: must name at least one parameter and a value for each.")
        if not 1.0 < self.mean_rounds < _LIMIT / 10:
            raise ValueError(f"mean_rounds={self.mean_rounds!r}: must be between 1 and {_LIMIT // 10}.")
        if not 0.0 < self.holdout < 1.0:
            raise ValueError(f"holdout={self.holdout!r}: must be strictly between 0 and 1.")
        if getattr(self.estimator, "algorithm", None) is not None:
            # A round is priced as one Gaussian release, which the default method's releases compose to exactly.
            raise ValueError("estimator: a search works with the default algorithm only; leave algorithm=None.")
        if getattr(self.estimator, "classes", None) is None:
            raise DataError(
                "estimator: declare its classes as public; a search cannot look for them in every round."
            )

    def _reserve(self, event: events.Event, budget: Budget) -> Any:
        if self.ledger is None:
            from quietgrad.estimators.base import tally

            tally(self.account, event)
            return lambda: None
        from quietgrad.privacy.ledger import Ledger

        ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        reservation = ledger.reserve(
            self.account, event, delta=budget.delta, relation=budget.relation, run="", cap=self.cap, note="search"
        )
        return lambda: ledger.close(reservation.id, reason="searched", data_dependent=False)


def _gaussian_budget(z: float, budget: Budget) -> Budget:
    """An (ε, δ) that a fit of un-sampled Gaussian releases meets if it costs one release of multiplier z."""
    from quietgrad.privacy.accounting import account as price

    return Budget(
        price(events.Gaussian(z), delta=budget.delta, relation=budget.relation), budget.delta, budget.relation
    )


def _rounds(mean: float, key: bytes) -> int:
    """K ≥ 1, geometric with the given mean, independent of the data."""
    u = float(SecureStream(key, "rounds").uint64(0, 1)[0] >> np.uint64(11)) * 2.0**-53
    return min(_LIMIT, 1 + math.floor(math.log1p(-u) / math.log1p(-1.0 / mean)))
