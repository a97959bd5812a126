"""Private classifiers: logistic regression (binary and multinomial) and a linear machine with a smooth hinge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from quietgrad.algorithms.base import Algorithm
from quietgrad.errors import DataError
from quietgrad.estimators.base import PrivateLinearModel, look_noise, refuse_weights
from quietgrad.objectives.queries.labels import LabelCounts, LabelSet
from quietgrad.objectives.tables.glm import Hinge, Logistic, Multinomial
from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.mechanisms import FrequentLabels
from quietgrad.sampling import FullBatch

_FAILURE_PART = 1e-3  # of δ, for a rare label that passes the threshold


class _PrivateClassifier(ClassifierMixin, PrivateLinearModel):  # type: ignore[misc]
    classes: Sequence[Any] | None

    def fit(self, X: Any, y: Any, **options: Any) -> Any:
        """Fit on records ``X`` and labels ``y``; nothing is spent if either is refused."""
        refuse_weights(options)
        X, y = self._validated(X, y)
        check_classification_targets(y)
        declared = None if self.classes is None else _declared(self.classes, y)
        plan = self._planned(X.shape[0])
        notes: tuple[str, ...] = ()
        if declared is not None:
            self.classes_ = declared
            session = self._open(self._loss(len(declared)), (X, np.searchsorted(declared, y)), plan)
        else:
            session = self._open(LabelSet(), (X, y), plan)
            self.classes_ = session.discover("labels", LabelCounts(self._budget().relation))
            notes = ("classes were found privately; rarer labels count as the first",)
            try:
                session.reread(self._loss(_two_or_more(self.classes_)), (X, _codes(self.classes_, y)))
            except DataError:
                session.close("refused after looking at the labels", data_dependent=True)
                raise
        weights, bias = self._train(session, notes)
        self.coef_ = np.ascontiguousarray(weights.T)
        self.intercept_ = bias
        return self

    def _planned(self, n: int) -> Plan:
        """With a look at the labels if they are not declared."""
        return self._plan(n, () if self.classes is not None else (self._look(),))

    def _look(self) -> Slot:
        """The private look at the labels: a share of the budget, and of δ for a rare label that passes."""
        budget = self._budget()
        failure = FrequentLabels(_FAILURE_PART * budget.delta)
        return Slot("labels", FullBatch(), mechanism=failure, fixed=look_noise(budget))

    def _loss(self, classes: int) -> Any:
        raise NotImplementedError

    def decision_function(self, X: Any) -> Any:
        """Scores: one per record for two classes, else one per record and class."""
        check_is_fitted(self)
        scores = self._features(X) @ self.coef_.T + self.intercept_
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Any:
        """The likelier or likeliest class of each record."""
        scores = self.decision_function(X)
        codes = (scores > 0.0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[codes]


def _two_or_more(classes: Any) -> int:
    if len(classes) < 2:
        raise DataError(
            "y: at most one class is frequent enough to be found privately. Declare them as public: classes=[...]."
        )
    return len(classes)


def _codes(classes: Any, y: Any) -> Any:
    codes = np.searchsorted(classes, y)
    codes[codes == len(classes)] = 0
    # A label too rare to be found counts as the first class: a public rule, the same for every record.
    codes[classes[codes] != y] = 0
    return codes


def _declared(classes: Sequence[Any], y: Any) -> Any:
    declared = np.unique(np.asarray(classes))
    if len(declared) < 2:
        raise ValueError(f"classes={list(classes)!r}: must name at least two classes.")
    if not np.isin(y, declared).all():
        raise DataError(
            "y: has a label that is not among the declared classes. Declare it, or remove such records."
        )
    return declared


class PrivateLogisticRegression(_PrivateClassifier):
    """Differentially private logistic regression, binary or multinomial; good without tuning.

    Args:
        epsilon, delta, relation: the promise of one fit. ``"replace-one"`` keeps n public and fixed.
        classes: the label set, public; ``None`` finds frequent labels privately, at a small charge.
        row_bound: a public bound on row norms; ``None`` finds one privately. Longer rows are shortened.
        fit_intercept: whether to add a constant.
        regularization: strength of an ℓ2 penalty; the noise regularises already.
        algorithm: a method of quietgrad instead of the default
            :class:`~quietgrad.algorithms.whitened_gd.WhitenedGD`.
        ledger: path of a ledger file; all fits of an account compose there, clones' included. ``None`` adds up the
            fits of this process only (:func:`quietgrad.estimators.spent`).
        account: the people the records are about.
        cap: a :class:`~quietgrad.Budget` the account as a whole must not exceed.
        n_public: under add-remove, the public number of records (default: the data's, thereby declared public).
        random_state: a seed for tests; the result is then not private and a warning says so.

    Attributes:
        coef_, intercept_, classes_: as in scikit-learn.
        privacy_: what is proved about this fit, a :class:`~quietgrad.training.result.Privacy`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=3.0).fit(X, X[:, 0] > 0)
    >>> round(model.privacy_.epsilon, 2), model.predict_proba(X).shape
    (2.0, (3000, 2))
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        relation: str = "replace-one",
        *,
        classes: Sequence[Any] | None = None,
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
        self.classes = classes
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
        self.algorithm = algorithm
        self.ledger = ledger
        self.account = account
        self.cap = cap
        self.n_public = n_public
        self.random_state = random_state

    def _loss(self, classes: int) -> Any:
        settings = self._settings()
        return Logistic(**settings) if classes == 2 else Multinomial(classes, **settings)

    def predict_proba(self, X: Any) -> Any:
        """P(class) of each record."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: Any) -> Any:
        """log P(class) of each record."""
        return np.log(self.predict_proba(X))


class PrivateSVC(_PrivateClassifier):
    """A private linear support vector machine with two classes: the hinge with its corner rounded.

    Args:
        smoothing: width over which the hinge's corner is rounded.

    The other parameters are those of :class:`PrivateLogisticRegression`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> bool(PrivateSVC(epsilon=2.0, classes=[0, 1], row_bound=3.0).fit(X, X[:, 0] > 0).score(X, X[:, 0] > 0) > 0.9)
    True
    """

    def __init__(
        self,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        relation: str = "replace-one",
        *,
        smoothing: float = 1.0,
        classes: Sequence[Any] | None = None,
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
        self.smoothing = smoothing
        self.classes = classes
        self.row_bound = row_bound
        self.fit_intercept = fit_intercept
        self.regularization = regularization
        self.algorithm = algorithm
        self.ledger = ledger
        self.account = account
        self.cap = cap
        self.n_public = n_public
        self.random_state = random_state

    def _loss(self, classes: int) -> Any:
        if classes != 2:
            raise DataError("Only binary classification is supported: PrivateSVC takes two classes; "
                            "use PrivateLogisticRegression for more.")  # fmt: skip
        return Hinge(self.smoothing, **self._settings())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags
