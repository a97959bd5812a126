"""Private classifiers: logistic regression (binary and multinomial) and a linear machine with a smooth hinge."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtri
from sklearn.base import ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import DataError, SettingError, TooNoisyError
from quietgrad.core.noise.mechanisms import GaussianPartitionSelection
from quietgrad.core.plans.counting import NOMINAL, PublicCount
from quietgrad.core.plans.schedule import Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.session import CentralSession
from quietgrad.estimators.base import PrivateLinearModel, PrivateModel, what_counting_cost
from quietgrad.estimators.predicting import row_products
from quietgrad.estimators.validation import (
    PrivacyUnitSpec,
    check_labels,
    coder,
    is_scan,
    listed_by,
    taken_as_public,
    warn_declared,
    with_labels,
)
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.losses import Hinge, Logistic, Multinomial, OneVsRestHinge
from quietgrad.tables.queries.counts import LabelCounts, LabelSet

_FAILURE_PART = 1e-3  # of δ, for a rare label that passes the threshold
_FEW = 300  # nμ below which the estimate of the labels takes more of the budget


@dataclass(eq=False, repr=False)
class Classifier(ClassifierMixin, PrivateModel):  # type: ignore[misc]
    """Base class of linear and additive classifiers: declared or privately found classes, and accuracy."""

    classes: Sequence[Any] | None = field(default=None, kw_only=True)

    _known: int | None = field(init=False, default=None)
    """How many classes are declared, once that is known."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of records whose class is predicted. It looks at ``y`` without noise: it is not private.

        A label belongs to the class that is written alike, so 1 and "1" are one label.
        """
        labels = ClassLabels.of(self.classes_)
        right = labels.agree(np.asarray(y), np.asarray(self.predict(X)))
        return float(np.average(right, weights=sample_weight))

    def _fit(self, X: Any, y: object, whose: Callable[[int], PrivacyUnitSpec]) -> None:
        kind = getattr(y, "dtype", None)
        listed = hasattr(kind, "categories") and self.classes is None and len(listed_by(kind) or ()) > 1
        typed = (taken_as_public("y", "classes=[...]"),) if listed else ()
        X, y, declared = self._accept(X, y)
        warn_declared(typed)
        unit_spec, features = whose(X.shape[0]), X.shape[1]
        notes = (*unit_spec.notes, *typed)
        loss = self._loss(ClassLabels.of((0, 1)) if declared is None else declared)
        # Settings are checked before anything is reserved in the ledger.
        unit_spec.check(self._method(NOMINAL, features, unit_spec), loss)
        if declared is not None:
            self.classes_ = declared.values
            if self.classes is None and not typed:
                notes = (*notes, "the classes are those that the type of y lists, which is taken as public")
            with self._opened(loss, with_labels(X, y, coder(X, declared)), features, unit_spec) as active:
                weights, self.intercept_ = self._train(active, notes)
        else:
            data = X if is_scan(X) else (X, y)
            with self._opened(LabelSet(), data, features, unit_spec, lambda size: (self._look(size),)) as active:
                notes = (*notes, self._discover(active.session, X, y, unit_spec))
                weights, self.intercept_ = self._train(active, notes)
        self.coef_ = np.ascontiguousarray(weights.T)

    def _discover(self, session: CentralSession, X: Any, y: object, unit_spec: PrivacyUnitSpec) -> str:
        """Find the labels privately, and read the records again by them; what a statement says of it."""
        self.classes_ = session.discover("labels", LabelCounts(self._budget().relation))
        if len(self.classes_) < 2:
            raise TooNoisyError(
                "y: fewer than two labels could be detected privately. Pass {classes=[...]} if the label set is "
                "public. The whole budget of this fit was charged, because the stop depends on a release."
            )
        labels = ClassLabels.of(self.classes_)
        data = with_labels(X.known() if is_scan(X) else X, y, coder(X, labels))
        session.reread(unit_spec.asks(self._loss(labels)), unit_spec.of_data(data))
        return f"{len(self.classes_)} classes were found privately; rarer labels count as the first"

    def _accept(self, X: object, y: Any) -> tuple[Any, Any, ClassLabels | None]:
        """Check what is given before anything is planned or reserved; also the declared classes, if they are."""
        if is_scan(X):
            public = self.classes if self.classes is not None else X.classes
            X = self._scanned(X)
            declared = None if public is None else declared_classes(public, ())
        else:
            listed = listed_by(getattr(y, "dtype", None)) or []
            public = self.classes if self.classes is not None else listed if len(listed) > 1 else None
            if np.asarray(y).dtype.kind == "c":  # scikit-learn would print them
                raise DataError("y: Complex data not supported; give labels.")
            X, y = self._validated(X, y)
            check_labels(y, public)
            declared = None if public is None else declared_classes(public, y)
        self._known = None if declared is None else len(declared)
        if declared is not None:
            self._loss(declared)  # what no loss takes is refused before any charge
        return X, y, declared

    def _shape(self) -> dict[str, Any]:
        return {"outputs": 1 if self._known in (None, 2) else self._known}

    def _look(self, size: PublicCount) -> Slot:
        """The release of the labels of so many records: a share of μ², and of δ for a rare one that passes."""
        budget, n = self._budget(), size.n
        share = 0.2 if self._signal(n) < _FEW else 0.05
        failure = GaussianPartitionSelection(_FAILURE_PART * budget.delta)
        noise = sensitivity_factor(budget.relation) / (gaussian_mu(budget.epsilon, budget.delta) * math.sqrt(share))
        slot = Slot("labels", FullBatch(), mechanism=failure, fixed=noise)
        least = 1.0 - LabelCounts(budget.relation).bound * slot.multiplier(1.0) * float(ndtri(failure.failure))
        if 2.0 * least > n:
            raise DataError(
                f"y: at this budget one class is detected only if about {math.ceil(least)} records have it, and "
                "the table is too small for two such classes. Pass {classes=[...]} if the label set is public. "
                f"{what_counting_cost(size)}"
            )
        return slot

    def _loss(self, labels: ClassLabels) -> Any:
        raise NotImplementedError

    def decision_function(self, X: object) -> Any:
        """Scores: one per record for two classes, else one per record and class."""
        check_is_fitted(self)
        scores = row_products(self._features(X), self.coef_.T) + self.intercept_
        return scores.ravel() if scores.shape[1] == 1 else scores

    def predict(self, X: object) -> Any:
        """The likelier or likeliest class of each record."""
        scores = self.decision_function(X)
        codes = (scores > 0.0).astype(np.int64) if scores.ndim == 1 else scores.argmax(axis=1)
        return ClassLabels.of(self.classes_).decode(codes)


@dataclass(eq=False, repr=False)
class _LinearClassifier(PrivateLinearModel, Classifier):
    class_weight: Mapping[Any, float] | None = field(default=None, kw_only=True)

    def _weights(self, labels: ClassLabels) -> tuple[float, ...] | None:
        """class_weight by code, the largest 1; the clip bounds a weighted record like any other."""
        if self.class_weight is None:
            return None
        if not isinstance(self.class_weight, Mapping):
            raise ValueError(
                "class_weight: must be a mapping of classes to public weights; 'balanced' would count the labels."
            )
        given: Any = self.class_weight.values()
        if not all(isinstance(w, numbers.Real) and math.isfinite(w) and float(w) > 0.0 for w in given):
            raise ValueError("class_weight: each must be a finite number > 0.")
        weights = np.ones(len(labels))
        codes = labels.encode(np.array([*self.class_weight, None], dtype=object)[:-1])
        if self._known is not None and (codes < 0).any():
            raise ValueError(f"class_weight: weighs a class that is none of {', '.join(labels.names)}.")
        weights[codes[codes >= 0]] = np.array(list(given), dtype=np.float64)[codes >= 0]
        return tuple((weights / weights.max()).tolist())


def declared_classes(classes: Sequence[object], y: Any) -> ClassLabels:
    """The declared classes, sorted. A label that is not among them counts as the first.

    What is refused is public: too few classes, or texts declared for a column of numbers and the other way round.
    """
    values = np.asarray(classes)
    try:
        declared = ClassLabels(np.unique(values))
    except (TypeError, ValueError):  # no order, one class, a gap
        raise SettingError(
            "{classes}: must be at least two different classes, all texts or all numbers.", classes=list(classes)
        ) from None
    texts = [np.asarray(each).dtype.kind in "US" for each in (declared.values, y)]
    if np.asarray(y).dtype.kind in "biufUS" and len(y) and texts[0] != texts[1]:
        raise ValueError(
            "classes: are texts where y has numbers, or the other way round; declare them as y has them."
        )
    return declared


@dataclass(eq=False, repr=False)
class PrivateLogisticRegression(_LinearClassifier):
    """Differentially private logistic regression, binary or multinomial.

    One fit costs (ε, δ), whatever it estimates besides the model: label set, feature ranges, standard errors.
    The defaults are meant to be used untuned.

    Args:
        epsilon: Privacy budget of one fit. Smaller is more private and noisier.
        delta: Probability with which the bound e^ε may fail. Choose at most 1/(100 n).
        relation: Neighbouring relation. ``"add-remove"`` keeps the number of records secret; ``"replace-one"``
            takes it as public.
        classes: The public label set. ``None`` detects frequent labels privately, at a small charge. Boolean labels
            and pandas categoricals declare theirs; a warning says so of the latter, because ``astype("category")``
            reads them from the records.
        feature_bounds: Public (low, high) of each feature, or a mapping of column names to them. Undeclared ranges
            are estimated privately where n and ε allow. Values outside are moved to the limit, also at prediction.
            Boolean columns count as declared. Columns of dates, moments and durations count in days (since 1970,
            UTC), whatever their unit, and their bounds may be dates. A published norm
            ``{"centre": c, "spread": s}`` stands for three spreads around its centre.
        class_weight: Public weights of classes; the clip bounds a weighted record like any other.
        row_bound: a public bound on row norms instead of bounds on features.
        fit_intercept: whether to add a constant.
        regularization: strength of an ℓ2 penalty on features scaled to ±1; the noise regularises already.
        features: a public map of single rows, :class:`~quietgrad.features.Frozen` or
            :class:`~quietgrad.features.Pictures`; the model is of what it makes of the rows.
        inference: spend half the budget on standard errors for :meth:`summary`; ``None`` does so where that costs
            the predictions next to nothing and the two classes are declared.
        algorithm: a method of quietgrad, or its name ("dp-sgd"), instead of the default
            :class:`~quietgrad.methods.whitened_gd.WhitenedGD`.
        ledger: Path of a ledger file. The whole cost is written there before the first release; all fits of an
            account compose, clones included. ``None`` charges the project's ledger.
        account: Name of the group of people that the records are about.
        cap: A :class:`~quietgrad.Budget` that the account as a whole must not exceed.
        n_public: under add-remove, the public number of records; ``None`` counts them privately, with 1 % of ε.
        random_state: a seed for tests; the result is then not private and a warning says so.

    Attributes:
        coef_: Coefficients, as in scikit-learn.
        intercept_: Constants, as in scikit-learn.
        classes_: Labels, as in scikit-learn.
        feature_range_: (low, high) that rows are moved into, declared or found; ``None`` for another algorithm.
        privacy_: what is proved about this fit, a :class:`~quietgrad.core.session.statement.Privacy`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=3.0).fit(X, X[:, 0] > 0)
    >>> round(model.privacy_.epsilon, 2), model.predict_proba(X).shape
    (2.0, (3000, 2))
    """

    @property
    def _offers_inference(self) -> bool:
        """Only where it is public that there are two classes."""
        return self._known == 2 and self.class_weight is None

    def _loss(self, labels: ClassLabels) -> Any:
        settings = self._settings() | {"class_weights": self._weights(labels)}
        return Logistic(**settings) if len(labels) == 2 else Multinomial(len(labels), **settings)

    def predict_proba(self, X: object) -> Any:
        """P(class) of each record."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: object) -> Any:
        """log P(class) of each record."""
        return np.log(self.predict_proba(X))


@dataclass(eq=False, repr=False)
class PrivateSVC(_LinearClassifier):
    """A private linear support vector machine: the hinge with its corner rounded; one against the rest for more
    than two classes.

    Args:
        smoothing: width over which the hinge's corner is rounded.

    The other parameters are those of :class:`PrivateLogisticRegression`.

    >>> import numpy as np
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> bool(PrivateSVC(epsilon=2.0, classes=[0, 1], row_bound=3.0).fit(X, X[:, 0] > 0).score(X, X[:, 0] > 0) > 0.9)
    True
    """

    smoothing: float = field(default=1.0, kw_only=True)

    def _loss(self, labels: ClassLabels) -> Any:
        settings = self._settings() | {"class_weights": self._weights(labels)}
        if len(labels) == 2:
            return Hinge(self.smoothing, **settings)
        return OneVsRestHinge(len(labels), self.smoothing, **settings)
