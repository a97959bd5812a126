"""What the estimators share: one budget per fit, one reservation before anything leaves, one account for clones.

A fit may need private looks at labels, targets or feature ranges before it can train. Its whole cost, looking and
training, is planned from public numbers, reserved in the ledger at once, and stated in ``privacy_``. Clones made
by a grid search or a cross-validation carry the same ledger and account, so each of their fits is charged to the
same people; that pays for the fits and not for looking at exact scores to choose one of them.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator, clone
from sklearn.utils.validation import check_is_fitted

from quietgrad.algorithms import by_name
from quietgrad.algorithms.base import Algorithm
from quietgrad.algorithms.range_estimation import Bounds, checked_bounds
from quietgrad.algorithms.whitened_design import for_table, strength
from quietgrad.algorithms.whitened_gd import NO_ERRORS
from quietgrad.curators.account import Account, Charge, note_pickled
from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.errors import DataError, TooNoisyWarning
from quietgrad.estimators.parts import Parts, joined, newcomers
from quietgrad.estimators.runs import params_of
from quietgrad.estimators.scans import is_scan, nameless, predict_to, scan_if_one
from quietgrad.estimators.summaries import summarise
from quietgrad.estimators.validation import Whom, checked_rows, named, without
from quietgrad.objectives.base import NoRegularizer
from quietgrad.objectives.privacy_units import Combine
from quietgrad.objectives.regularizers import L2
from quietgrad.objectives.tables.range_queries import Frame
from quietgrad.objectives.tables.table import refuse_text
from quietgrad.plans.counting import NOMINAL, PublicCount
from quietgrad.plans.schedule import Plan, Slot
from quietgrad.privacy.accounting import sensitivity_factor
from quietgrad.privacy.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.privacy.closed_form_accountants import gaussian_mu
from quietgrad.training import plan as make_plan
from quietgrad.training import run
from quietgrad.training.minimizing import settle_failed_run
from quietgrad.training.result import Privacy

_ROWS = Whom()


def look_noise(budget: Budget, share: float) -> float:
    """The noise multiplier of a look with its share of μ², the Gaussian-DP parameter of the whole budget."""
    mu = gaussian_mu(budget.epsilon, budget.delta)
    return sensitivity_factor(budget.relation) / (mu * math.sqrt(share))


@dataclass(eq=False, repr=False)
class SpendsPrivacy(BaseEstimator):  # type: ignore[misc]
    """What is fitted at a price. Without a ledger, what it spends is known in its own process only."""

    epsilon: float = 1.0
    delta: float = 1e-5
    relation: str = DEFAULT_RELATION
    _: KW_ONLY
    ledger: Any = None
    account: str | Account = "default"
    cap: Budget | None = None
    n_public: int | None = None

    def __getstate__(self) -> Any:
        if self.ledger is None and not hasattr(self, "privacy_"):
            note_pickled(str(self.account))  # to a worker of joblib, perhaps, whose fits this process does not see
        return super().__getstate__()


@dataclass(eq=False, repr=False)
class PrivateModel(SpendsPrivacy):
    """Base of the models; see :class:`~quietgrad.estimators.PrivateLogisticRegression` for the parameters."""

    _: KW_ONLY
    feature_bounds: Any = None
    random_state: int | None = None

    row_bound: ClassVar[float | None] = None
    fit_intercept: ClassVar[bool] = True
    regularization: ClassVar[float] = 0.0
    inference: ClassVar[bool | None] = False
    algorithm: ClassVar[Algorithm | str | None] = None
    _within: ClassVar[Charge | None] = None
    """An entry that pays for the fit already: that of a private search whose round it is."""

    def _budget(self) -> Budget:
        return Budget(self.epsilon, self.delta, Relation.parse(self.relation))

    # --- what is given ----------------------------------------------------------------------------------------

    def _validated(self, X: Any, y: Any, *, y_numeric: bool = False) -> tuple[Any, Any]:
        if y_numeric:
            refuse_text(y, "y")
        kinds = [np.float64, np.float32]
        checked, y = checked_rows(self, X, y, accept_sparse="csr", dtype=kinds, y_numeric=y_numeric)
        self._check_size(checked.shape[0])
        self._bounds = self._declared_bounds(X, checked.shape[1])
        self._is_sparse = not isinstance(checked, np.ndarray)
        return checked, y

    def _check_size(self, rows: int) -> None:
        """Refuse a single record where it is public that it is one; under add-remove nobody is told."""
        if rows < 2 and Relation.parse(self.relation) is Relation.REPLACE_ONE:
            raise DataError(
                "X: one sample (n_samples = 1) is too few: the noise hides a single record. Give more records."
            )

    def _scanned(self, X: Any) -> Any:
        """A scan, with what is public of it; it is read when the fit's door is opened."""
        self._check_size(len(X))
        self.n_features_in_ = X.features
        self.feature_names_in_ = np.array(X.feature_names, dtype=object)
        self._bounds = self._declared_bounds(None, X.features) if self.feature_bounds is not None else X.bounds
        self._is_sparse = False
        return X

    def _declared_bounds(self, X: Any, features: int) -> tuple[Bounds | None, ...] | None:
        """One (low, high) per feature or ``None`` where it must be found; boolean columns count as declared."""
        given = self.feature_bounds
        kinds = getattr(X, "dtypes", None)
        boolean = [str(kind) in ("bool", "boolean") for kind in kinds] if kinds is not None and len(
            np.shape(kinds)
        ) else [False] * features  # fmt: skip
        pairs: list[Bounds | None] = [(0.0, 1.0) if known else None for known in boolean]
        if isinstance(given, Mapping):
            names = self._column_names(features)
            if unknown := sorted(str(name) for name in given if str(name) not in names):
                raise ValueError(f"feature_bounds: {', '.join(unknown)}: not among the columns of X.")
            for name, pair in given.items():
                pairs[names.index(str(name))] = checked_bounds("feature_bounds", pair)
        elif given is not None:
            if isinstance(given, str) or not hasattr(given, "__len__"):
                raise ValueError(
                    "feature_bounds: must be one (low, high) per feature, or a mapping of column names to them."
                )
            if len(given) != features:
                raise ValueError(f"feature_bounds: has {len(given)} pairs, X has {features} features.")
            pairs = [None if pair is None else checked_bounds("feature_bounds", pair) for pair in given]
        return tuple(pairs) if any(pair is not None for pair in pairs) else None

    def _column_names(self, features: int) -> list[str]:
        return list(map(str, getattr(self, "feature_names_in_", [f"x{j}" for j in range(features)])))

    def _features(self, X: Any) -> Any:
        """Rows to predict for, checked against the columns of the fit and moved into the range it knows."""
        if is_scan(X):
            raise DataError("X: is a scan, whose predictions may not fit in memory; use predict_to(scan, FILE).")
        X = without(X, getattr(self, "person_column_", None))
        X = checked_rows(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        limits = self.feature_range_
        return X if limits is None else Frame(limits[0], limits[1]).clipped(X)

    def _seed(self) -> int | None:
        seed = self.random_state
        if seed is None:
            return None
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise ValueError(f"random_state={seed!r}: must be a whole number (for tests; not private) or None.")
        warnings.warn(f"random_state={seed}: seeded noise is not private; use it for tests only.", stacklevel=5)
        return int(seed)

    # --- the plan ---------------------------------------------------------------------------------------------

    def _method(self, n: int, features: int, whom: Whom = _ROWS) -> Algorithm:
        """The method for a public number of records."""
        if isinstance(self.algorithm, str):
            return _by_name(self.algorithm, n)
        if self.algorithm is not None:
            if not (hasattr(self.algorithm, "schedule") and hasattr(self.algorithm, "step")):
                raise ValueError("algorithm: must be a method of quietgrad, its name such as 'dp-sgd', or None.")
            return self.algorithm
        return for_table(
            n,
            features,
            budget=self._budget(),
            feature_bounds=getattr(self, "_bounds", None),
            row_bound=self.row_bound,
            sparse=getattr(self, "_is_sparse", False),
            **self._shape_for(whom),
        )

    def _shape_for(self, whom: Whom) -> dict[str, Any]:
        """The shape of the task, and whether standard errors are bought: never where they could not be told.

        They rest on a curvature that is bounded for means of records only.
        """
        if self.inference and not self._offers_inference:
            raise ValueError(f"inference: {NO_ERRORS}, without class_weight.")
        if self.inference and not whom.means:
            raise ValueError("inference: standard errors need combine='mean' and all of a person's records.")
        return {**self._shape(), "inference": self.inference if self._offers_inference and whom.means else False}

    @property
    def _offers_inference(self) -> bool:
        """Whether the covariance of a Newton step is that of this model's loss."""
        return False

    def _shape(self) -> dict[str, Any]:
        """What the default method is told about the task."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """What every loss is told."""
        given: Any = self.regularization
        if not isinstance(given, numbers.Real):
            raise ValueError(f"regularization={self.regularization!r}: must be a number >= 0.")
        penalty = L2(self.regularization) if self.regularization else NoRegularizer()
        return {"regularizer": penalty, "intercept": self.fit_intercept}

    def _count(self, curator: CentralCurator, features: int, whom: Whom) -> PublicCount:
        """How many records to plan for: the first release of the fit where their number is a secret."""
        budget = self._budget()
        declared = self.n_public if budget.relation is Relation.ADD_REMOVE else None
        return curator.count(budget, declared, self._method(NOMINAL, features, whom))

    def _plan(
        self, size: int | PublicCount, features: int, looks: tuple[Slot, ...] = (), whom: Whom = _ROWS
    ) -> Plan:
        """The plan of a whole fit, looks at the labels included."""
        method = self._method(size.n if isinstance(size, PublicCount) else size, features, whom)
        return make_plan(
            method, n=size, budget=self._budget(), looks=looks, unit=whom.unit,
            records_public=whom.records_public,
        )  # fmt: skip

    def _planned(self, n: int, features: int, whom: Whom = _ROWS) -> Plan:
        """The plan that a fit would make whose public number of records is ``n``."""
        return self._plan(n, features, whom=whom)

    def _signal(self, n: int) -> float:
        """nμ: records per unit of the budget's noise, which decides what can be found."""
        return n * strength(self._budget())

    # --- the fit ----------------------------------------------------------------------------------------------

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        person: Any = None,
        combine: Combine = "mean",
        records_per_person: int | None = None,
        records_public: int | None = None,
        **options: Any,
    ) -> Self:
        """Fit on records ``X`` and labels or targets ``y``; a refusal of what is given spends nothing.

        ``X`` may be a :class:`~quietgrad.data.scanning.Scan`, which knows its target, or an Arrow, polars or Dask
        frame with the name of the target column as ``y``.

        Args:
            person: whom each record is about: one id per record, or the name of a column of a data frame, which is
                then no feature. The promise is to people with all their records; without it, to single records.
            combine: a person counts with the ``"mean"`` of their records or their ``"sum"``, clipped as a whole.
            records_per_person: the most of a person's records that one release looks at.
            records_public: how many records people have together, if that is public; never shown otherwise.
        """
        refuse_weights(options)
        X, y = scan_if_one(X, y)
        X, ids = named(X, person)

        def whose(rows: int) -> Whom:
            return Whom.of(ids, rows, combine, records_per_person, records_public)

        self._fit(X, y, whose)
        self.person_column_ = person if isinstance(person, str) else None
        return self

    def _fit(self, X: Any, y: Any, whose: Callable[[int], Whom]) -> None:
        """Check what is given, then ask ``whose`` its rows are, plan, and train."""
        raise NotImplementedError

    def _curator(self, objective: Any, data: Any) -> CentralCurator:
        """Who holds the records of the fit."""
        seed = self._seed()
        payer = Account.of(self.account, self.ledger, self.cap, seeded=seed is not None)
        return CentralCurator(objective, data, account=payer, seed=seed)

    def _open(self, curator: CentralCurator, plan: Plan) -> CentralSession:
        """Charge the whole fit before anything else is released, and open its door."""
        return curator.open(plan, within=self._within, note=type(self).__name__, part=True)

    def _train(self, session: CentralSession, method: Algorithm, notes: tuple[str, ...]) -> Any:
        """Run the method; sets ``privacy_``, ``n_iter_`` and returns weights (features, outputs) and intercepts."""
        try:
            result = run(method, session, session.initial(), account=str(self.account), notes=notes)
        except Exception as error:
            settle_failed_run(session, error)
            raise
        found, missed = what_was_missed(result.details, result.config.get("look") or {})
        self.result_ = result
        self.privacy_: Privacy = noted(result.privacy, found)
        if missed:
            warnings.warn(missed, TooNoisyWarning, stacklevel=4)
        self.n_iter_ = max(1, sum(result.privacy.releases.values()))
        limits = result.details.get("feature_range")
        self.feature_range_ = None if limits is None else (np.array(limits[0]), np.array(limits[1]))
        return session.objective.coefficients(result.params)

    def predict_to(self, scan: Any, path: Any) -> int:
        """Write the predictions for a scan's records to a csv or parquet file, block by block; how many they are.

        They are about people: only the file's owner may read it.
        """
        check_is_fitted(self)
        return predict_to(self, scan, path)

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, *, person: Any = None, disjoint: bool | None = None
    ) -> Any:
        """Learn from further records, after :meth:`fit` or earlier calls; the models are averaged by their records.

        Every call spends a whole budget, and calls add up: ``privacy_`` states the ε of all of them together, and
        all are charged to ``account``. Passes over the same rows cost as many fits. Only where the people of a call
        were in none before does each of them pay for one fit alone: ``privacy_`` then states the worst part. The
        account still adds all calls up, because a ledger does not know who is in which: name an account for each
        part (``set_params(account=...)``) if you keep them apart yourself.

        Args:
            classes: the label set, at the first call, where it is not a setting already.
            person: one id per record. A person who came to this model before, in this process, is refused, so parts
                are of different people and do not add up; who came is not known to copies, loaded models and after
                :meth:`fit`, whose parts add up.
            disjoint: ``True`` declares that no person in this call was in an earlier one; nothing checks it where
                there are no ids; the statement says that it is a promise. ``False`` adds up whatever ids show.
        """
        X, y = scan_if_one(X, y)
        column = person if isinstance(person, str) else None
        X, person = named(X, person)
        coming = newcomers(self, person, disjoint)
        before = getattr(self, "result_", None)
        parts = Parts.of(before)
        model = clone(self)
        model._within = self._within
        if classes is not None and hasattr(self, "classes"):
            model.set_params(classes=list(classes))
        if before is not None:
            self._go_on(model, X)
        elif getattr(model, "classes", True) is None:
            raise ValueError("partial_fit: declare the classes, here or as a setting: classes=[...].")
        model.fit(X, y, person=person)
        n = model.result_.n_public
        now = parts.and_one(n, apart=coming.apart, promised=coming.promised)
        result = model.result_
        if before is None:
            result = replace(result, details={**result.details, "parts": asdict(now)})
        else:
            weight = n / now.records
            for name in ("coef_", "intercept_"):
                mine = getattr(self, name)
                setattr(model, name, mine + weight * (getattr(model, name) - mine))
            earlier, part = (replace(m.result_, privacy=m.privacy_) for m in (self, model))
            result = joined(earlier, part, params_of(model), now, apart=coming.apart, account=str(self.account))
            model.privacy_ = result.privacy
        model.result_ = result
        kept = ("coef_", "intercept_", "privacy_", "result_", "n_iter_", "n_features_in_", "feature_names_in_")
        for name in (*kept, "classes_", *(("feature_range_", "target_range_") if before is None else ())):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        self.person_column_ = column
        coming.remember(self)
        return self

    def _go_on(self, model: Any, X: Any) -> None:
        """Settings of a further part, so that its coefficients mean what those before do."""
        if is_scan(X):
            nameless(self, X)  # refused if it has other columns
        else:
            checked_rows(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        if (known := self.feature_range_) is not None:
            model.set_params(feature_bounds=list(zip(known[0].tolist(), known[1].tolist(), strict=True)))
        if hasattr(self, "classes_"):
            if (np.unique(self.classes_) != self.classes_).any():
                raise DataError(
                    "partial_fit: the run has its classes in another order than a fit; fit a new model."
                )
            model.set_params(classes=self.classes_.tolist())
        if hasattr(self, "target_range_") and np.isfinite(self.target_range_).all():
            model.set_params(target_bounds=self.target_range_)

    def summary(self, level: float = 0.95) -> Any:
        """Coefficients with standard errors, intervals and p-values that cover both sampling and privacy noise.

        They come from a Newton step that the fit paid for (``inference``), and hold for the model's assumptions as
        ordinary ones do: a logistic likelihood, or errors of equal variance. A DataFrame if pandas is installed.

        Raises:
            TooNoisyError: the plan of the fit bought none; the message says what would do.
        """
        check_is_fitted(self)
        return summarise(self, level)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


@dataclass(eq=False, repr=False)
class PrivateLinearModel(PrivateModel):
    """What linear models share besides."""

    _: KW_ONLY
    row_bound: float | None = None  # type: ignore[misc]
    fit_intercept: bool = True  # type: ignore[misc]
    regularization: float = 0.0  # type: ignore[misc]
    inference: bool | None = None  # type: ignore[misc]
    algorithm: Algorithm | str | None = None  # type: ignore[misc]


def what_was_missed(details: Mapping[str, Any], look: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Notes on what the releases could not tell, and a sentence to warn with where declaring would help."""
    notes, advice = [], ""
    hidden, silent = int(details.get("hidden_features", 0)), int(details.get("silent_features", 0))
    if look.get("ranges") in ("pooled", "means") and look.get("range_share"):
        kind = "a common range for all" if look["ranges"] == "pooled" else "a rough range for each"
        notes.append(f"n and ε allow only {kind} of the features' scales to be found: declare feature_bounds")
        advice = (
            "at this n and ε the ranges of the features can hardly be found privately; declare what is public as "
            "feature_bounds=[(low, high), ...] for a much better model"
        )
    elif hidden:
        notes.append(f"the ranges of {hidden} features do not stand out of the noise: a usual one was taken")
    if silent:
        notes.append(f"{silent} features are below the noise floor: each is scaled as their average")
    if raised := details.get("raised_eigenvalues"):
        notes.append(f"{raised} directions of the curvature are hidden by noise: intervals along them are wider")
    return tuple(notes), advice


def noted(privacy: Privacy, notes: Sequence[str]) -> Privacy:
    """The statement with more notes."""
    return replace(privacy, notes=(*privacy.notes, *notes))


def _by_name(name: str, n: int) -> Algorithm:
    """An algorithm by its command-line name, with settings that suit ``n`` records where it has none of its own."""
    kind = by_name(name)
    known = {field.name for field in fields(kind)}
    batch = max(1, min(n, 512))
    chosen = {"batch_size": batch, "steps": max(1, 20 * n // batch), "learning_rate": 1.0}
    # Full-batch methods take few steps; mini-batch ones twenty passes.
    settings = {key: value for key, value in chosen.items() if key in known and "batch_size" in known}
    made: Algorithm = kind(**settings)
    return made


def refuse_weights(options: dict[str, Any]) -> None:
    """Raise if a fit is given sample weights or anything else it does not take."""
    if options.get("sample_weight") is not None:
        raise ValueError(
            "sample_weight: refused, because a record of weight w would spend w times the privacy of the others; "
            "for whole classes use class_weight, which the clip bounds."
        )
    options.pop("sample_weight", None)
    if options:
        raise TypeError(f"fit() got unexpected arguments: {', '.join(sorted(options))}.")
