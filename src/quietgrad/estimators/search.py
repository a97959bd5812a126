"""Private hyper-parameter search: the best of a random number of fits, at a price that does not grow with it.

Each round draws a setting at random, fits it on one part of the records with noise, and scores it on the other part
with noise. Only the best round leaves. If the number of rounds K is geometric (Papernot & Steinke 2022), the whole
search costs little more than one round in Rényi terms, however large K turns out; the accountant's
``RepeatAndSelect`` event prices it. That holds as long as K stays secret: do not publish how long a search took.
Ordinary grid search with a shared ledger is charged for every fit instead.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils.validation import check_is_fitted

from quietgrad.errors import DataError, UnprovableError
from quietgrad.estimators.base import forget
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.noise import release_gaussian, sigma_for
from quietgrad.privacy.rng import SecureStream, fresh_key

_MOST_ROUNDS = 1000  # on average
_OWN = frozenset({"epsilon", "delta", "relation", "ledger", "account", "cap"})


class PrivateSearch(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Choose hyper-parameters of a private classifier within one budget.

    How long :meth:`fit` takes tells about how many settings were tried, which the price assumes to be secret: let
    nobody time it who may not see the data.

    Args:
        estimator: a private classifier with public ``classes`` and ``row_bound``.
        param_grid: names and the values to try.
        epsilon, delta, relation: the promise of the whole search.
        mean_rounds: expected number of settings tried.
        holdout: part of the records that only scores, chosen at random.
        ledger, account, cap: as in the estimators.

    Attributes:
        best_estimator_, best_params_, best_score_ (noisy), privacy_epsilon_; ``best_estimator_.privacy_`` states
        the cost of the whole search, which is what choosing that model costs.

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
        words = SecureStream(key, "split").uint64(0, n)
        if budget.relation is Relation.REPLACE_ONE:
            held = max(1, round(self.holdout * n))
            test, train = np.split(np.argsort(words), [held])
            public_train, public_test = n - held, float(held)
        else:
            # Each record on its own: in a split of fixed sizes, one record more moves another to the other side.
            aside = words < np.uint64(int(self.holdout * 2.0**64))
            test, train = np.flatnonzero(aside), np.flatnonzero(~aside)
            public = getattr(self.estimator, "n_public", None) or n
            public_train = max(1, round((1.0 - self.holdout) * public))
            public_test = self.holdout * public

        def search(z: float) -> events.Event:
            # Training and scoring see disjoint records, so a round costs one Gaussian release of multiplier z.
            return events.RepeatAndSelect(events.Gaussian(z), mean=self.mean_rounds, shape=1.0)

        z = calibrate_event(search, budget=budget)
        round_budget = _gaussian_budget(z, budget)
        grid = [
            dict(zip(self.param_grid, values, strict=True))
            for values in itertools.product(*self.param_grid.values())
        ]
        account = f"search/{os.urandom(4).hex()}"

        def candidate(setting: Mapping[str, Any]) -> Any:
            return clone(self.estimator).set_params(
                **{
                    "n_public": public_train,
                    **setting,
                    "epsilon": round_budget.epsilon,
                    "delta": round_budget.delta,
                    "relation": self.relation,
                    "ledger": None,
                    "cap": None,
                    "account": account,
                }
            )

        for setting in grid:
            _check_round(candidate(setting), public_train, z, budget.relation)
        close = self._reserve(search(z), budget)
        best = None
        for k in range(_rounds(self.mean_rounds, key)):
            pick = int(SecureStream(key, "pick").uint64(k, 1)[0] % np.uint64(len(grid)))
            model = candidate(grid[pick])
            model.fit(X[train], y[train])
            correct = np.array([float((model.predict(X[test]) == y[test]).sum())])
            sigma, step = sigma_for(z, 1.0, 1)
            release_gaussian(correct, SecureStream(key, f"score/{k}").normal(0, 1), sigma, step)
            if best is None or correct[0] > best[0]:
                best = (float(correct[0]), model, grid[pick])
        close()
        forget(account)
        assert best is not None
        self.best_score_ = best[0] / public_test
        self.best_estimator_, self.best_params_ = best[1], best[2]
        self.privacy_epsilon_ = self._state(self.best_estimator_, search(z), z)
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

    def _state(self, model: Any, event: events.Event, z: float) -> float:
        """Say on the chosen model what choosing it cost, not what its own round would have cost alone."""
        from quietgrad.privacy.accounting import prove

        proof = prove(event, delta=self.delta, relation=self.relation)
        notes = (*model.privacy_.notes, "chosen by a private search: ε is that of the whole search")
        if getattr(self.estimator, "n_public", None) is None and proof.relation is Relation.ADD_REMOVE:
            notes = (*notes, "n was taken from the data and is thereby declared public")
        model.privacy_ = replace(
            model.privacy_,
            epsilon=proof.epsilon,
            delta=proof.delta,
            accountant=proof.accountant,
            events=event,
            account=self.account,
            notes=notes,
        )
        model.result_ = replace(model.result_, privacy=model.privacy_)
        model.set_params(account=self.account)
        return proof.epsilon

    def _check(self) -> None:
        if not self.param_grid or not all(len(values) for values in self.param_grid.values()):
            raise ValueError("param_grid: must name at least one parameter and a value for each.")
        if own := _OWN.intersection(self.param_grid):
            raise ValueError(f"param_grid: {', '.join(sorted(own))} are the search's own; give them to it.")
        if not 1.0 < self.mean_rounds <= _MOST_ROUNDS:
            raise ValueError(f"mean_rounds={self.mean_rounds!r}: must be between 1 and {_MOST_ROUNDS}.")
        if not 0.0 < self.holdout < 1.0:
            raise ValueError(f"holdout={self.holdout!r}: must be strictly between 0 and 1.")
        if getattr(self.estimator, "random_state", None) is not None or "random_state" in self.param_grid:
            raise ValueError("random_state: a search of seeded fits is not private; leave it None.")
        if getattr(self.estimator, "classes", None) is None:
            raise DataError(
                "estimator: declare its classes as public; a search cannot look for them in every round."
            )

    def _reserve(self, event: events.Event, budget: Budget) -> Any:
        if self.ledger is None:
            from quietgrad.estimators.base import tally

            if self.cap is not None:
                raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")
            tally(self.account, event, budget.relation)
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
    return 1 + math.floor(math.log1p(-u) / math.log1p(-1.0 / mean))


def _check_round(model: Any, n: int, z: float, relation: Relation) -> None:
    """Raise unless all releases of a fit compose to one Gaussian of multiplier z or more, as a round is priced."""
    from quietgrad.privacy.accounting import mu_of, sensitivity_factor

    try:
        mu = mu_of(model._plans(n, ()).event, relation=relation)
    except UnprovableError:
        mu = math.inf
    if model.classes is None or mu > sensitivity_factor(relation) / z * (1.0 + 1e-9):
        raise ValueError(
            "a round of a search is priced as one Gaussian release: only full-batch methods (algorithm=None, "
            "WhitenedGD, DPGD) and declared classes can be searched over."
        )
