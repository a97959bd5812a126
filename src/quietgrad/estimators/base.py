"""What the estimators share: one budget per fit, one reservation before anything leaves, one account for clones.

A fit may need a private look at the labels or targets before it can train. Its whole cost, looking and training, is
planned from public numbers, reserved in the ledger at once, and stated in ``privacy_``. Clones made by a grid
search or a cross-validation carry the same ledger and account, so each of their fits is charged to the same people.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from quietgrad.algorithms.base import Algorithm
from quietgrad.algorithms.whitened_gd import WhitenedGD
from quietgrad.curators.account import Charge
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.objectives.base import NoRegularizer
from quietgrad.objectives.regularizers import L2
from quietgrad.objectives.tables.layout import refuse_text
from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.accounting import sensitivity_factor
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.gaussian import gaussian_mu
from quietgrad.training import plan as make_plan
from quietgrad.training import run
from quietgrad.training.result import Privacy

LOOK_SHARE = 0.05  # of the squared budget μ², for a private look at labels or targets


def look_noise(budget: Budget) -> float:
    """The noise multiplier of a look that takes its share of μ², the Gaussian-DP parameter of the whole budget."""
    mu = gaussian_mu(budget.epsilon, budget.delta)
    return sensitivity_factor(budget.relation) / (mu * math.sqrt(LOOK_SHARE))


class PrivateLinearModel(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators; see :class:`~quietgrad.estimators.PrivateLogisticRegression` for the parameters."""

    epsilon: float
    delta: float
    relation: str
    row_bound: float | None
    fit_intercept: bool
    regularization: float
    algorithm: Algorithm | None
    ledger: Any
    account: str
    cap: Budget | None
    n_public: int | None
    random_state: int | None

    _within: Charge | None = None
    """An entry that pays for the fit already: that of a private search whose round it is."""

    def _budget(self) -> Budget:
        return Budget(self.epsilon, self.delta, Relation.parse(self.relation))

    def _validated(self, X: Any, y: Any, **options: Any) -> tuple[Any, Any]:
        refuse_text(X, "X")
        if options.get("y_numeric"):
            refuse_text(y, "y")
        return validate_data(  # type: ignore[no-any-return]
            self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], **options
        )

    def _features(self, X: Any) -> Any:
        refuse_text(X, "X")
        return validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)

    def _seed(self) -> int | None:
        seed = self.random_state
        if seed is None:
            return None
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ValueError(f"random_state={seed!r}: must be a whole number (for tests; not private) or None.")
        warnings.warn(f"random_state={seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
        return int(seed)

    def _method(self) -> Algorithm:
        if self.algorithm is not None:
            return self.algorithm
        return WhitenedGD(row_bound=self.row_bound)

    def _settings(self) -> dict[str, Any]:
        """What every loss is told."""
        penalty = L2(self.regularization) if self.regularization else NoRegularizer()
        return {"regularizer": penalty, "intercept": self.fit_intercept}

    def _public_n(self, n: int, budget: Budget) -> int:
        if self.n_public is None or budget.relation is Relation.REPLACE_ONE:
            return n
        return self.n_public

    def _plan(self, n: int, looks: tuple[Slot, ...] = ()) -> Plan:
        """The plan of a whole fit, looks at labels or targets included."""
        budget = self._budget()
        return make_plan(self._method(), n=self._public_n(n, budget), budget=budget, looks=looks)

    def _planned(self, n: int) -> Plan:
        """The plan that a fit on ``n`` records would make."""
        return self._plan(n)

    def _open(self, objective: Any, data: Any, plan: Plan) -> CentralSession:
        """Charge the whole fit before anything is released, and open its door."""
        curator = CentralCurator(
            objective, data, ledger=self.ledger, account=self.account, cap=self.cap, seed=self._seed()
        )
        return curator.open(plan, within=self._within, note=type(self).__name__, part=True)

    def _train(self, session: CentralSession, notes: tuple[str, ...]) -> Any:
        """Run the method; sets ``privacy_``, ``n_iter_`` and returns weights (features, outputs) and intercepts."""
        if self.n_public is None and Relation.parse(self.relation) is Relation.ADD_REMOVE:
            notes = (*notes, "n was taken from the data and is thereby declared public")
        if self.ledger is None:
            notes = (*notes, "no ledger: only fits of this process are added up (estimators.spent)")
        result = run(self._method(), session, session.initial(), account=self.account, notes=notes)
        self.privacy_: Privacy = result.privacy
        self.n_iter_ = max(1, sum(result.privacy.releases.values()))
        self.result_ = result
        return session.objective.coefficients(result.params)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def refuse_weights(options: dict[str, Any]) -> None:
    """Raise if a fit is given sample weights or anything else it does not take."""
    if options.get("sample_weight") is not None:
        raise ValueError(
            "sample_weight: refused, because a record of weight w would spend w times the privacy of the others; "
            "bound and apply weights inside the objective instead."
        )
    options.pop("sample_weight", None)
    if options:
        raise TypeError(f"fit() got unexpected arguments: {', '.join(sorted(options))}.")
