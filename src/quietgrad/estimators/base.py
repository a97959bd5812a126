"""What the estimators share: one budget per fit, one reservation before anything leaves, one account for clones.

A fit may need a private look at the labels or targets before it can train. Its whole cost, looking and training, is
planned from public numbers, reserved in the ledger at once, and stated in ``privacy_``. Clones made by a grid
search or a cross-validation carry the same ledger and account, so each of their fits is charged to the same people.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from quietgrad.algorithms.base import Algorithm
from quietgrad.algorithms.whitened_gd import WhitenedGD
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import UnprovableError
from quietgrad.objectives.base import NoRegularizer
from quietgrad.objectives.regularizers import L2
from quietgrad.objectives.tables.layout import refuse_text
from quietgrad.plans.schedule import Plan
from quietgrad.privacy import events
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import fresh_key, seed_key
from quietgrad.training import plan as make_plan
from quietgrad.training import run
from quietgrad.training.result import Privacy

LOOK_SHARE = 0.05  # of the squared budget μ², for a private look at labels or targets

_tally: dict[str, list[tuple[events.Event, Relation]]] = {}
_tally_lock = threading.Lock()


def spent(account: str = "default", *, delta: float = 1e-5, relation: str | Relation = "replace-one") -> float:
    """The ε that all fits of this process without a ledger spent together on ``account``.

    Fits under replace-one are not priced under add-remove: they publish n, and some of their bounds are about two
    records.

    >>> spent("nobody")
    0.0
    """
    from quietgrad.privacy.accounting import account as price

    with _tally_lock:
        parts = list(_tally.get(account, []))
    if not parts:
        return 0.0
    asked = Relation.parse(relation)
    if asked is Relation.ADD_REMOVE and any(planned is Relation.REPLACE_ONE for _, planned in parts):
        raise UnprovableError(f"{account}: a fit was made under replace-one; ask for what was spent under that.")
    return price(events.composed([event for event, _ in parts]), delta=delta, relation=asked)


def tally(account: str, event: events.Event, relation: Relation) -> None:
    """Add ``event`` to what this process spent on ``account`` without a ledger."""
    with _tally_lock:
        _tally.setdefault(account, []).append((event, relation))


def forget(account: str) -> None:
    """Drop what was added up for ``account``, which another entry covers."""
    with _tally_lock:
        _tally.pop(account, None)


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

    def _key(self) -> bytes:
        seed = self.random_state
        if seed is None:
            return fresh_key()
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ValueError(f"random_state={seed!r}: must be a whole number (for tests; not private) or None.")
        warnings.warn(f"random_state={seed}: seeded noise is not private; use it for tests only.", stacklevel=4)
        return seed_key(int(seed))

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

    def _plans(self, n: int, looks: Sequence[events.Event]) -> Plan:
        """The training plan whose ε, with the looks, meets the budget."""
        budget = self._budget()
        return make_plan(self._method(), n=self._public_n(n, budget), budget=budget, extra=tuple(looks))

    def _reserve(self, plan: Plan) -> Any:
        """Charge the whole fit before anything is released; returns a function that closes the entry."""
        assert plan.budget is not None
        if self.ledger is None:
            if self.cap is not None:
                raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")
            tally(self.account, plan.event, plan.budget.relation)
            return lambda: None
        from quietgrad.privacy.ledger import Ledger

        ledger = self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        reservation = ledger.reserve(
            self.account,
            plan.event,
            delta=plan.budget.delta,
            relation=plan.budget.relation,
            run="",
            cap=self.cap,
            note=type(self).__name__,
        )
        return lambda: ledger.close(reservation.id, reason="fitted", data_dependent=False)

    def _train(self, objective: Any, X: Any, y: Any, plan: Plan, key: bytes, notes: tuple[str, ...]) -> Any:
        """Run the plan; sets ``privacy_``, ``n_iter_`` and returns weights (features, outputs) and intercepts."""
        curator = CentralCurator(objective, (X, y), key=key)
        if self.n_public is None and Relation.parse(self.relation) is Relation.ADD_REMOVE:
            notes = (*notes, "n was taken from the data and is thereby declared public")
        seeded = self.random_state is not None
        result = run(
            self._method(), curator.open(plan), curator.initial(), account=self.account, seeded=seeded, notes=notes
        )
        if self.ledger is None:
            notes = (*result.privacy.notes, "no ledger: only fits of this process are added up (estimators.spent)")
            self.privacy_: Privacy = replace(result.privacy, notes=notes)
        else:
            self.privacy_ = result.privacy
        self.n_iter_ = max(1, sum(result.privacy.releases.values()))
        self.result_ = result
        return objective.coefficients(result.params)

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
