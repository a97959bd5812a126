"""Private hyper-parameter search: the best of a random number of fits, at a cost that does not grow with it.

Each round draws a setting at random, fits it on one part of the records with noise, and scores it on the other part
with noise. Only the best round leaves. If the number of rounds K is geometric (Papernot & Steinke 2022), the whole
search costs little more than one round in Rényi terms, however large K turns out; the accountant's
``RepeatAndSelect`` event states its cost. That holds while K stays secret: do not publish how long a search took.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from sklearn.base import MetaEstimatorMixin, clone, is_regressor
from sklearn.utils import _safe_indexing, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import account as price_of
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.core.errors import DataError, SettingError, TooNoisyWarning, UnprovableError
from quietgrad.core.ledger.account import Charge
from quietgrad.core.noise.rng import SecureStream, fresh_key
from quietgrad.core.plans.counting import NOMINAL
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.opening import Terms, opened
from quietgrad.core.session.session import CentralSession
from quietgrad.estimators.base import PrivateModel, SpendsPrivacy
from quietgrad.estimators.predicting import predict_row_independent
from quietgrad.estimators.validation import PrivacyUnitSpec, refuse_scan, take_person_column
from quietgrad.methods.dp_sgd import DPGD
from quietgrad.methods.whitened_gd import WhitenedGD
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.privacy_units import Combine, PersonRule, UnitGrouping
from quietgrad.tables.queries.counts import MeanScore, Scoring
from quietgrad.tables.table import Array

_MOST_ROUNDS = 1000  # on average
_ROUNDS = 10**6  # that many are reached with probability below e^-1000
_OWN = frozenset({"epsilon", "delta", "relation", "ledger", "account", "cap"})
_FACTS = frozenset({"classes", "target_bounds", "n_public", "random_state"})
_FEWEST = 40  # records on either side of a split by chance: fewer than two are left with probability 10⁻¹⁶


def _has(name: str) -> Any:
    """Whether the best model, or before a fit the estimator, has a method."""
    return lambda search: hasattr(getattr(search, "best_estimator_", search.estimator), name)


class PrivateSearch(MetaEstimatorMixin, SpendsPrivacy):  # type: ignore[misc]
    """Choose hyper-parameters of a private classifier or regressor within one budget.

    The running time of :meth:`fit` reveals roughly how many settings were tried. The proof assumes that this number
    is secret, so only people who may see the data may time a fit.

    Args:
        estimator: a private classifier with public ``classes``, or a regressor with public ``target_bounds``.
        param_grid: names and the values to try.
        epsilon: Privacy budget of the whole search. Smaller is more private and noisier.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation, ``"add-remove"`` or ``"replace-one"``.
        mean_rounds: expected number of settings tried.
        holdout: part of the records that only scores, chosen at random.
        scoring: ``"accuracy"`` (the default for classifiers), ``"log_loss"``, or ``"squared_error"`` (for
            regressors, in units of the targets' range); each record's score is in [0, 1], the higher the better.
        ledger: Path of a ledger file, as in the estimators.
        account: Name of the people in the ledger.
        cap: Refuse the search if the account would exceed this budget.

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
        relation: str = DEFAULT_RELATION,
        mean_rounds: float = 10.0,
        holdout: float = 0.2,
        scoring: str | None = None,
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
        self.scoring = scoring
        self.ledger = ledger
        self.account = account
        self.cap = cap

    def fit(
        self,
        X: object,
        y: object,
        *,
        person: object = None,
        combine: Combine = "mean",
        records_per_person: int | None = None,
    ) -> PrivateSearch:
        """Search, and keep the best round's model.

        The cost is reserved before the first round.

        With ``person`` (one id per record, or the name of a column) people are held out with all their records.
        """
        refuse_scan(X, "a private search")
        X, ids = take_person_column(X, person)
        budget = self._budget()
        each = self._checked_scoring()
        # What cannot be fitted is refused before any charge.
        accepted, labels, _ = clone(self.estimator)._accept(X, y)
        whom = PrivacyUnitSpec.of(ids, accepted.shape[0], PersonRule(combine, records_per_person))
        features = accepted.shape[1]
        X = X if hasattr(X, "iloc") or self.estimator.features is not None else accepted  # each round maps its own
        grid = [
            dict(zip(self.param_grid, values, strict=True))
            for values in itertools.product(*self.param_grid.values())
        ]
        for setting in grid:  # and so is whatever cannot be a round
            model = clone(self.estimator).set_params(**setting)
            model._accept(X, labels)
            method = model._method(NOMINAL, features, whom)
            whom.check(method, None)
            if not isinstance(method, (WhitenedGD, DPGD)):
                raise UnprovableError(
                    "algorithm: a round of a search is accounted as one Gaussian release: only the default, "
                    "WhitenedGD and DPGD can be searched over."
                )
        split: _Split | None = None
        rounds: list[Any] = []

        def prepare(method: SearchReleases, plan: Plan, start: object) -> None:
            """Split the people and make the models of all rounds; nothing is charged for the search yet."""
            nonlocal split
            split = self._split(whom, accepted.shape[0], plan.n_public, budget)
            # A round's fit has a budget that un-sampled Gaussian releases meet at the cost of one release.
            one = plan.schedule.slots[0].event(plan.noise_multiplier, budget.relation, 1)
            own: dict[str, Any] = {"epsilon": price_of(one, delta=budget.delta, relation=budget.relation)}
            own |= {"delta": budget.delta, "relation": self.relation, "ledger": None, "cap": None}
            own |= {"account": self.account}
            whole = Charge(plan.event)
            for setting in grid:
                model = clone(self.estimator).set_params(**{"n_public": split.public_train, **setting, **own})
                model._accept(X, labels)
                model._counted_before = plan.counted is not None
                whole.part(model._plan(split.public_train, features, whom=whom).event, budget)
                rounds.append(model)

        terms = Terms.of(
            budget, account=self.account, ledger=self.ledger, cap=self.cap, note="search",
            n_public=self.estimator.n_public if budget.relation is Relation.ADD_REMOVE else None,
        )  # fmt: skip
        best = None
        method = SearchReleases(float(self.mean_rounds))
        with opened(whom.asks(Scoring()), whom.of_data((X, labels)), method, terms, check=prepare) as active:
            session = active.session
            assert split is not None
            for k in range(_rounds(self.mean_rounds, session.uniform("rounds"))):
                pick = int(session.uniform(f"pick/{k}") * len(grid))
                model = clone(rounds[pick])
                model._within, model._counted_before = session.charge, active.size.counted
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", TooNoisyWarning)  # how often it warned would tell the rounds
                    model.fit(_safe_indexing(X, split.train), labels[split.train], person=split.trained)
                # A later fit of the chosen model is a fit of its own.
                model._within, model._counted_before = None, False
                total = session.release("round", MeanScore(partial(each, model), split.test))
                if best is None or total[0] > best[0]:
                    best = (float(total[0]), model, grid[pick])
            spent = session.close("searched")
        assert best is not None
        assert spent.event is not None
        self.best_score_ = best[0] / split.public_test
        self.best_estimator_, self.best_params_ = best[1], best[2]
        self.privacy_epsilon_ = self._state(self.best_estimator_, session, spent.event)
        self.n_features_in_ = self.best_estimator_.n_features_in_
        if hasattr(self.best_estimator_, "feature_names_in_"):
            self.feature_names_in_ = self.best_estimator_.feature_names_in_
        self.privacy_ = self.best_estimator_.privacy_
        return self

    @property
    def classes_(self) -> Any:
        """The classes of the best model, if it is a classifier."""
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.classes_

    def _split(self, whom: PrivacyUnitSpec, rows: int, public: int, budget: Budget) -> _Split:
        """Positions that train and that score, and the public numbers of both."""
        n = rows if whom.people is None else len(whom.people)
        words = SecureStream(fresh_key(), "split").uint64(0, n)
        if budget.relation is Relation.REPLACE_ONE:
            held = max(1, round(self.holdout * n))
            if n - held < 2:
                raise DataError("X: one sample or two are too few to fit on some and score on others; give more.")
            test, train = np.split(np.argsort(words), [held])
            public_train, public_test = n - held, float(held)
        else:
            # Each record on its own: in a split of fixed sizes, one record more moves another to the other side.
            aside = words < np.uint64(int(self.holdout * 2.0**64))
            if min(self.holdout, 1.0 - self.holdout) * public < _FEWEST:
                raise DataError(
                    f"X: under add-remove a search needs about {_FEWEST} records (n_samples) on either side."
                )
            train, test = np.flatnonzero(~aside), np.flatnonzero(aside)
            public_train, public_test = max(1, round((1.0 - self.holdout) * public)), self.holdout * public
        if not isinstance(whom.people, UnitGrouping):
            return _Split(train, None, test, public_train, public_test)
        # The rows of the people who train, and of those who score.
        (train, trained), (test, _) = whom.people.only(train), whom.people.only(test)
        return _Split(train, trained, test, public_train, public_test)

    def predict(self, X: object) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict(X)

    @available_if(_has("predict_proba"))  # type: ignore[untyped-decorator]
    def predict_proba(self, X: object) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.predict_proba(X)

    @available_if(_has("decision_function"))  # type: ignore[untyped-decorator]
    def decision_function(self, X: object) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_.decision_function(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags, tags.regressor_tags = inner.classifier_tags, inner.regressor_tags
        tags.input_tags.sparse = inner.input_tags.sparse
        tags.target_tags.required = True
        return tags

    def score(self, X: object, y: object) -> float:
        """Accuracy of the best model on ``X``, without noise: an evaluation, not private."""
        check_is_fitted(self, "best_estimator_")
        return float(self.best_estimator_.score(X, y))

    def _state(self, model: Any, session: CentralSession, event: events.Event) -> float:
        """Say on the chosen model what choosing it cost, not what its own round would have cost alone."""
        plan = session.plan
        event = plan.with_count(event)
        proof = prove(event, delta=self.delta, relation=self.relation)
        epsilon = proof.epsilon
        notes = (*model.privacy_.notes, "chosen by a private search: ε is that of the whole search")
        if plan.counted is not None:
            # Another count would have led to another search; what holds for all of them is the budget.
            epsilon, notes = max(epsilon, float(self.epsilon)), (*notes, plan.counted.describe(plan.unit))
        model.privacy_ = replace(
            model.privacy_,
            epsilon=epsilon,
            delta=proof.delta,
            accountant=proof.accountant,
            events=event,
            account=self.account,
            notes=notes,
        )
        details = {**model.result_.details, "run": session.run}  # its entry in the ledger is the search's
        model.result_ = replace(model.result_, privacy=model.privacy_, details=details)
        model.set_params(account=self.account, ledger=self.ledger, cap=self.cap)
        return epsilon

    def _checked_scoring(self) -> Any:
        """Check the settings; what a record scores: f(model, rows, truth), within [0, 1] or cut to it."""
        grid = self.param_grid
        if (
            not isinstance(grid, Mapping)
            or not grid
            or not all(
                isinstance(values, Sized) and not isinstance(values, str | bytes) and len(values) > 0
                for values in grid.values()
            )
        ):
            raise ValueError("param_grid: must map at least one parameter to a list of values to try.")
        if own := _OWN.intersection(grid):
            raise ValueError(
                f"param_grid: {', '.join(sorted(own))} are arguments of PrivateSearch; pass them there."
            )
        if facts := _FACTS.intersection(grid):
            raise ValueError(
                f"param_grid: {', '.join(sorted(facts))} cannot be searched, because they describe public facts. "
                "Set them on the estimator."
            )
        if not 1.0 < self.mean_rounds <= _MOST_ROUNDS:
            raise ValueError(f"mean_rounds={self.mean_rounds!r}: must be between 1 and {_MOST_ROUNDS}.")
        if not 0.0 < self.holdout < 1.0:
            raise SettingError("{holdout}: must be strictly between 0 and 1.", holdout=self.holdout)
        if not isinstance(self.estimator, PrivateModel):
            raise TypeError("estimator: must be one of quietgrad's linear estimators.")
        if self.estimator.random_state is not None:
            raise ValueError("random_state: a search of seeded fits is not private; leave it None.")
        regression = is_regressor(self.estimator)
        if regression and self.estimator.target_bounds is None:
            raise DataError("estimator: declare its target_bounds as public; scores are in their units.")
        if not regression and self.estimator.classes is None:
            raise DataError(
                "estimator: declare its classes as public; a search cannot estimate them in every round."
            )
        name = self.scoring or ("squared_error" if regression else "accuracy")
        known = {"squared_error": _closeness} if regression else {"accuracy": _right, "log_loss": _likelihood}
        if name not in known:
            raise ValueError(f"scoring={name!r}: must be one of {', '.join(sorted(known))} for this estimator.")
        if name == "log_loss" and not hasattr(self.estimator, "predict_proba"):
            raise ValueError("scoring='log_loss': needs an estimator with predict_proba.")
        return known[name]


def _right(model: Any, X: object, y: Array) -> Any:
    known = ClassLabels.of(model.classes_)
    return known.agree(model.predict(X), y) * 1.0


def _likelihood(model: Any, X: object, y: Array) -> Any:
    """1 − (log loss)/5, from 1 for a certain right answer to 0 for a chance below e^−5."""
    known = ClassLabels.of(model.classes_)
    chances = predict_row_independent(model, "predict_proba", X, len(known))
    own = chances[np.arange(len(y)), known.encode_known(y)]  # other labels: the first class
    return 1.0 + np.log(np.maximum(own, math.exp(-5.0))) / 5.0


def _closeness(model: Any, X: object, y: Array) -> Any:
    """1 − (error ÷ a quarter of the targets' range)²."""
    low, high = model.target_range_
    close = 1.0 - ((predict_row_independent(model, "predict", X, None) - y) / (0.25 * (high - low))) ** 2
    return np.where(np.isnan(close), 0.0, close)


class _Split(NamedTuple):
    """Rows and people that train, rows that score, and the public numbers of both sides."""

    train: Any
    trained: Any
    test: Any
    public_train: int
    public_test: float


@dataclass(frozen=True)
class SearchReleases(HasSchedule):
    """The releases of a private search: of a random number of rounds the best is told.

    Training and scoring see disjoint records, so a round costs one Gaussian release.
    """

    mean_rounds: float

    name: ClassVar[str] = "private-search"

    def schedule(self, n_public: int) -> Schedule:
        """One slot, of which the best release leaves."""
        slot = Slot("round", FullBatch(), count=_ROUNDS)
        return Schedule((slot,), "select", rounds=(self.mean_rounds, 1.0))


def _rounds(mean: float, u: float) -> int:
    """K ≥ 1, geometric with the given mean, from a uniform number that is independent of the data."""
    return min(_ROUNDS, 1 + math.floor(math.log1p(-u) / math.log1p(-1.0 / mean)))
