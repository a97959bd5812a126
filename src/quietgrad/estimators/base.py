"""Base classes of estimators: one budget per fit, one reservation before any release, one account for clones.

A fit may need private estimates of labels, targets or feature ranges before it can train. Its whole cost is planned
from public numbers, reserved in the ledger at once, and stated in ``privacy_``. Clones made by a grid search or a
cross-validation carry the same ledger and account, so each of their fits is charged to the same people. That pays
for the fits, not for choosing one of them by exact scores.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.core.errors import DataError, TooNoisyError, TooNoisyWarning
from quietgrad.core.ledger.account import Account, Charge
from quietgrad.core.ledger.state import DEFAULT
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.plans.schedule import Plan, Slot
from quietgrad.core.session.kept import Run, is_kept, open_run
from quietgrad.core.session.objectives import NoRegularizer
from quietgrad.core.session.opening import Keeping, OpenRun, Terms, opened, reopened
from quietgrad.core.session.statement import Privacy
from quietgrad.estimators.dates import bounds_in_days
from quietgrad.estimators.predicting import predict_to
from quietgrad.estimators.raw_frames import encode_raw_frame
from quietgrad.estimators.runs import can_be_saved, fitted_attributes, to_run
from quietgrad.estimators.summaries import CLIPPED_ERRORS, summary_of
from quietgrad.estimators.validation import (
    PrivacyUnitSpec,
    ScanTable,
    checked_rows,
    drop_person_column,
    is_frame,
    is_scan,
    scan_if_one,
    take_person_column,
)
from quietgrad.methods import plan as make_plan
from quietgrad.methods import run
from quietgrad.methods.base import Algorithm
from quietgrad.methods.budget_allocation import budget_mu, error_tightness, for_table
from quietgrad.methods.range_estimation import Bounds, checked_bounds
from quietgrad.methods.registry import entry
from quietgrad.methods.result import over
from quietgrad.methods.whitened_gd import CROWDED, NO_ERRORS, WhitenedGD
from quietgrad.tables.privacy_units import Combine, PersonRule, survey_weights
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.regularizers import L2
from quietgrad.tables.table import Array, refuse_text

_ROWS = PrivacyUnitSpec()
_NO_ERRORS_BOUGHT = (
    "standard errors were asked for and not bought: the number of records, which was counted privately, is too "
    "small for them at this budget. The whole budget went into the model; summary() says what would do"
)


@dataclass(eq=False, repr=False)
class SpendsPrivacy(BaseEstimator):  # type: ignore[misc]
    """An estimator whose fit costs ε. Without a ledger, only its own process knows what it spent."""

    epsilon: float = 1.0
    delta: float = 1e-5
    relation: str = DEFAULT_RELATION
    _: KW_ONLY
    ledger: Any = None
    account: str | Account = "default"
    cap: Budget | None = None
    n_public: int | None = None

    def _budget(self) -> Budget:
        return Budget(self.epsilon, self.delta, Relation.parse(self.relation))

    def _declared_n(self) -> int | None:
        """The declared number of records, under the relation that keeps their number secret."""
        return self.n_public if Relation.parse(self.relation) is Relation.ADD_REMOVE else None


@dataclass(eq=False, repr=False)
class PrivateModel(SpendsPrivacy):
    """Base of the models; see :class:`~quietgrad.estimators.PrivateLogisticRegression` for the parameters."""

    _: KW_ONLY
    feature_bounds: Any = None
    random_state: int | None = None

    row_bound: ClassVar[float | None] = None
    fit_intercept: ClassVar[bool] = True
    regularization: ClassVar[float] = 0.0
    features: ClassVar[Any] = None
    inference: ClassVar[bool | None] = False
    algorithm: ClassVar[Algorithm | str | None] = None
    person_column_: str | None = field(init=False, default=None)
    _counted_before: ClassVar[bool] = False
    """Whether the number of records that is declared for a round was counted by its search."""
    _within: ClassVar[Charge | None] = None
    """Set by ``PrivateSearch``: the search's reservation, which already pays for this fit."""
    _folder: Path | None = field(init=False, default=None)
    _kept: Run | None = field(init=False, default=None)
    _bounds: tuple[Bounds | None, ...] | None = field(init=False, default=None)
    _is_sparse: bool = field(init=False, default=False)

    # --- what is given ----------------------------------------------------------------------------------------

    def _validated(self, X: object, y: object, *, y_numeric: bool = False) -> tuple[Any, Any]:
        if y_numeric:
            refuse_text(y, "y")
        kinds = [np.float64, np.float32]
        checked, y = checked_rows(self, X, y, accept_sparse="csr", dtype=kinds, y_numeric=y_numeric)
        self._check_size(checked.shape[0])
        if self.features is not None:
            X, checked = None, self._mapped(checked)
        self._bounds = self._declared_bounds(X, checked.shape[1])
        self._is_sparse = not isinstance(checked, np.ndarray)
        return checked, y

    def _check_size(self, rows: int) -> None:
        """Refuse a single record where their number is public; under add-remove the refusal would tell it."""
        if rows < 2 and Relation.parse(self.relation) is Relation.REPLACE_ONE:
            raise DataError(
                "X: one sample (n_samples = 1) is too few: the noise hides a single record. Give more records."
            )

    def _mapped(self, X: Any) -> Any:
        """The public features of checked rows, each from its own row alone."""
        if not hasattr(self.features, "rows") or not hasattr(self.features, "note"):
            raise ValueError(
                "features: must be a map of quietgrad.features, such as Frozen(module) or Pictures(28)."
            )
        return self.features.rows(X)

    def _scanned(self, X: ScanTable) -> ScanTable:
        """A scan, with what is public of it; it is read when the session opens."""
        if self.features is not None:
            raise DataError("features: apply to a table in memory; leave features= out for a scan.")
        self._check_size(len(X))
        self.n_features_in_ = X.features
        self.feature_names_in_: Array = np.array(list(X.feature_names), dtype=object)
        self._bounds = self._declared_bounds(None, X.features) if self.feature_bounds is not None else X.bounds
        self._is_sparse = False
        return X

    def _declared_bounds(self, X: object, features: int) -> tuple[Bounds | None, ...] | None:
        """One (low, high) per feature or ``None`` where it must be found; boolean columns count as declared."""
        given = self.feature_bounds
        pairs: list[Bounds | None] = [None] * features
        if is_frame(X) and np.ndim(X.dtypes) == 1:
            pairs = [(0.0, 1.0) if str(kind) in ("bool", "boolean") else None for kind in X.dtypes]
        if isinstance(given, Mapping):
            names = self._column_names(features)
            if unknown := sorted(str(name) for name in given if str(name) not in names):
                raise ValueError(f"feature_bounds: {', '.join(unknown)}: not among the columns of X.")
            for name, pair in given.items():
                pairs[names.index(str(name))] = checked_bounds("feature_bounds", bounds_in_days(pair))
        elif given is not None:
            if isinstance(given, str) or not isinstance(given, Collection):
                raise ValueError(
                    "feature_bounds: must be one (low, high) per feature, or a mapping of column names to them."
                )
            if len(given) != features:
                raise ValueError(f"feature_bounds: has {len(given)} pairs, X has {features} features.")
            pairs = [
                None if pair is None else checked_bounds("feature_bounds", bounds_in_days(pair)) for pair in given
            ]
        return tuple(pairs) if any(pair is not None for pair in pairs) else None

    def _column_names(self, features: int) -> list[str]:
        if self.features is not None:
            return [f"x{j}" for j in range(features)]
        return list(map(str, vars(self).get("feature_names_in_", [f"x{j}" for j in range(features)])))

    def _features(self, X: Any) -> Any:
        """Rows to predict for, checked against the columns of the fit and moved into the range it knows."""
        if is_scan(X):
            raise DataError("X: is a scan. Its predictions may not fit in memory; use predict_to(scan, FILE).")
        X = encode_raw_frame(drop_person_column(X, self.person_column_), vars(self).get("_schema"))
        X = checked_rows(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        X = X if self.features is None else self._mapped(X)
        limits = self.feature_range_
        return X if limits is None else FeatureBox(limits[0], limits[1]).clipped(X)

    # --- the plan ---------------------------------------------------------------------------------------------

    def _method(self, size: int | PublicCount, features: int, whom: PrivacyUnitSpec = _ROWS) -> Algorithm:
        """The method for a public number of records.

        Standard errors that the number cannot pay for are refused. A number that was counted is a release, after
        which nothing is refused: the method is then one without them.
        """
        n = number_of(size)
        if isinstance(self.algorithm, str):
            kind = entry(self.algorithm).kind
            names = {each.name for each in fields(kind)}
            batch = max(1, min(n, 512))  # mini-batch methods take twenty passes
            usual = {"batch_size": batch, "steps": max(1, 20 * n // batch), "learning_rate": 1.0}
            given = {key: value for key, value in usual.items() if key in names and "batch_size" in names}
            method: Algorithm = kind(**given)
            return method
        if self.algorithm is not None:
            if not isinstance(self.algorithm, Algorithm):
                raise ValueError("algorithm: must be a method of quietgrad, its name such as 'dp-sgd', or None.")
            return self.algorithm
        # Standard errors rest on a curvature that is bounded for means of records only.
        if self.inference and not self._offers_inference:
            raise ValueError(f"inference: {NO_ERRORS}, without class_weight.")
        if self.inference and not whom.means:
            raise ValueError("inference: standard errors need combine='mean' and all of a person's records.")
        if self.inference and whom.weights is not None:
            raise ValueError("inference: standard errors are not offered with weights; leave sample_weight out.")
        wanted = self.inference if self._offers_inference and whom.means and whom.weights is None else False
        released = self._counted_before or (isinstance(size, PublicCount) and size.counted)
        if wanted and released and error_tightness(n, features, self._budget()) > CROWDED:
            wanted = False
        return for_table(
            n,
            features,
            budget=self._budget(),
            feature_bounds=self._bounds,
            row_bound=self._known_row_bound,
            sparse=self._is_sparse,
            inference=wanted,
            intercept=self.fit_intercept,
            **self._shape(),
        )

    @property
    def _offers_inference(self) -> bool:
        """Whether the covariance of a Newton step is that of this model's loss."""
        return False

    @property
    def _known_row_bound(self) -> float | None:
        """The declared bound on row norms, or that of the public features."""
        if self.features is None or self.row_bound is not None or self._bounds is not None:
            return self.row_bound
        bound: float | None = self.features.row_bound
        return bound

    def _shape(self) -> dict[str, Any]:
        """The settings of the default method that depend on the task."""
        return {}

    def _settings(self) -> dict[str, Any]:
        """The settings that every loss gets."""
        given: Any = self.regularization
        if not isinstance(given, numbers.Real):
            raise ValueError(f"regularization={self.regularization!r}: must be a number >= 0.")
        penalty = L2(self.regularization) if self.regularization else NoRegularizer()
        settings: dict[str, Any] = {"regularizer": penalty, "intercept": self.fit_intercept}
        if self.algorithm is not None and self._known_row_bound is not None:  # from which its constants follow
            settings |= {"row_bound": self._known_row_bound, "rows": "clip"}
        return settings

    def _plan(
        self, size: int | PublicCount, features: int, looks: tuple[Slot, ...] = (), whom: PrivacyUnitSpec = _ROWS
    ) -> Plan:
        """The plan of a whole fit, with the estimates of labels (``looks``)."""
        method = self._method(size, features, whom)
        return make_plan(
            method, n=size, budget=self._budget(), looks=looks, unit=whom.unit,
            records_public=whom.records_public,
        )  # fmt: skip

    def _signal(self, n: int) -> float:
        """nμ: records per unit of the budget's noise, which decides what can be found."""
        return n * budget_mu(self._budget())

    # --- the fit ----------------------------------------------------------------------------------------------

    def fit(
        self,
        X: object,
        y: object = None,
        *,
        person: object = None,
        combine: Combine = "mean",
        records_per_person: int | None = None,
        records_public: int | None = None,
        folder: str | Path | None = None,
        sample_weight: object = None,
        max_weight: float | None = None,
        **options: Any,
    ) -> Self:
        """Fit on records ``X`` and labels or targets ``y``; a refusal of what is given spends nothing.

        ``X`` may be a :class:`~quietgrad.data.scanning.Scan`, which knows its target, or an Arrow or polars
        frame with the name of the target column as ``y``.

        Args:
            person: the person each record is about: one id per record, or the name of a column of a data frame,
                which is then no feature. The guarantee is for people with all their records, else for records.
            combine: a person counts with the ``"mean"`` of their records or their ``"sum"``, clipped as a whole.
            records_per_person: the most of a person's records that one release uses.
            records_public: how many records people have together, if that is public; never shown otherwise.
            sample_weight: survey weights, one per record. A record counts with its weight over ``max_weight``.
            max_weight: the largest weight, as a public number; larger ones are cut to it. ε is the same for all.
            folder: keep the fit here until it is over. If it is interrupted, the same call goes on with it: what
                was released is replayed at no cost. In the end the model is saved here as a run, which
                :func:`~quietgrad.estimators.from_run` and the command line read.
        """
        if options:
            raise TypeError(f"fit() got unexpected arguments: {', '.join(sorted(options))}.")
        if folder is not None and over(folder) is not None:  # killed after its end, while it cleared away
            self.__dict__.update(fitted_attributes(folder, self.features))
            return self
        X, y = scan_if_one(X, y)
        X, ids = take_person_column(X, person)

        rule = PersonRule(combine, records_per_person)

        if sample_weight is not None and is_scan(X):
            raise DataError("sample_weight: is not known to scans. Give a table in memory.")

        def whose(rows: int) -> PrivacyUnitSpec:
            weights = survey_weights(sample_weight, max_weight, rows)
            return PrivacyUnitSpec.of(ids, rows, rule, records_public)._replace(weights=weights)

        self._folder = None if folder is None else Path(folder)
        try:
            self._fit(X, y, whose)
            if self._folder is not None:
                self._save_in(self._folder)
        finally:
            self._folder = self._kept = None  # of one fit, not of the estimator
        self.person_column_ = person if isinstance(person, str) else None
        return self

    def _save_in(self, folder: Path) -> None:
        """Save the fitted model as a run, then destroy what the fit was kept by: a crash between loses nothing."""
        if can_be_saved(self):
            to_run(self, folder)
        else:
            self.result_.save(folder)
        if self._kept is not None:  # None if seeded, or paid by no ledger: it could not have been resumed
            self._kept.discard()

    def _fit(self, X: object, y: object, whose: Callable[[int], PrivacyUnitSpec]) -> None:
        """Check what is given, then ask ``whose`` its rows are, plan, and train."""
        raise NotImplementedError

    @contextmanager
    def _opened(
        self,
        objective: object,
        data: object,
        features: int,
        unit_spec: PrivacyUnitSpec,
        looks: Callable[[PublicCount], tuple[Slot, ...]] = lambda size: (),
    ) -> Iterator[OpenRun[Algorithm]]:
        """Open the fit's run, its whole cost charged; or go on with the one that is kept in the fit's folder.

        ``looks`` are the releases that come before the method's own, for a number of units; what cannot be fitted
        at that number is refused there.
        """
        seed = self.random_state
        if seed is not None:
            if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
                raise ValueError(f"random_state={seed!r}: must be a whole number (for tests; not private) or None.")
            warnings.warn(f"random_state={seed}: seeded noise is not private; use it for tests only.", stacklevel=6)
            seed = int(seed)
        adapter, given = unit_spec.asks(objective), unit_spec.of_data(data)
        if self._folder is not None and is_kept(self._folder):
            with self._reopened(adapter, given, features, unit_spec) as active:
                yield active
            return
        terms = Terms.of(
            self._budget(), account=self.account, ledger=self.ledger, cap=self.cap, seed=seed,
            n_public=self._declared_n(), records_public=unit_spec.records_public, note=type(self).__name__,
            part=True, within=self._within,
        )  # fmt: skip

        def planned(size: PublicCount) -> tuple[Algorithm, Plan]:
            slots = looks(size)
            return self._method(size, features, unit_spec), self._plan(size, features, slots, unit_spec)

        keeping = None if self._folder is None else Keeping(self._folder, type(self).__name__, lambda *_: None)
        with opened(
            adapter, given, lambda n: self._method(n, features, unit_spec), terms, plan=planned, keeping=keeping
        ) as active:
            yield active

    @contextmanager
    def _reopened(
        self, adapter: Any, data: Any, features: int, unit_spec: PrivacyUnitSpec
    ) -> Iterator[OpenRun[Algorithm]]:
        """Go on with an interrupted fit: what it had released is replayed, bit for bit, at no cost."""
        assert self._folder is not None
        saved_run = open_run(self._folder, kind=type(self).__name__, ledger=self.ledger)
        try:
            plan = saved_run.plan
            saved_run.agree_on_account(None if str(self.account) == DEFAULT else str(self.account), self.cap)
            saved_run.agree("budget", self._budget().to_json(), plan.budget and plan.budget.to_json())
            method = self._method(plan.counted or PublicCount(plan.n_public), features, unit_spec)
            saved_run.agree("method", [method.name, method.config()], [plan.algorithm, dict(plan.config)])
            yield reopened(saved_run, adapter, data, method)
        finally:
            saved_run.close()

    def _train(self, active: OpenRun[Algorithm], notes: tuple[str, ...]) -> Any:
        """Run the method; sets ``privacy_``, ``n_iter_`` and returns weights (features, outputs) and intercepts."""
        session, method = active.session, active.method
        if self.inference and isinstance(method, WhitenedGD) and not method.inference_share:
            warnings.warn(_NO_ERRORS_BOUGHT, TooNoisyWarning, stacklevel=4)
            notes = (*notes, _NO_ERRORS_BOUGHT)
        if self.features is not None:  # in the statement, and so in the certificate
            notes = (*notes, self.features.note)
        result = run(method, session, session.initial(), account=str(active.account), notes=notes)
        self._kept = active.kept
        range_notes, missed = undetected_notes(result.details, result.config.get("look") or {})
        self.result_ = result
        self.privacy_: Privacy = noted(result.privacy, range_notes)
        if missed:
            warnings.warn(missed, TooNoisyWarning, stacklevel=4)
        self.n_iter_ = max(1, sum(result.privacy.releases.values()))
        limits = result.details.get("feature_range")
        self.feature_range_ = None if limits is None else (np.array(limits[0]), np.array(limits[1]))
        return session.objective.coefficients(result.params)

    def predict_to(self, scan: object, path: str | Path) -> int:
        """Write the predictions for a scan's records to a csv or parquet file, block by block; how many they are.

        They are about people: only the file's owner may read it.
        """
        check_is_fitted(self)
        return predict_to(self, scan, path)

    def summary(self, level: float = 0.95) -> Any:
        """Coefficients with standard errors, intervals and p-values that cover both sampling and privacy noise.

        They come from a Newton step that the fit paid for (``inference``), and hold for the model's assumptions as
        ordinary ones do: a logistic likelihood, or errors of equal variance. Unasked (``inference=None``) they are
        about features clipped to ``feature_range_``, which moves a few far values. One row per coefficient, the
        intercept last; a DataFrame if pandas is installed, else a list of rows that prints as a table.

        Raises:
            TooNoisyError: the plan of the fit bought no standard errors; the message says what would do.
        """
        check_is_fitted(self)
        if not 0.5 < level < 1.0:
            raise ValueError(f"level={level!r}: must be between 0.5 and 1, such as 0.95.")
        covariance = self.result_.details.get("coefficient_covariance")
        if covariance is None:
            raise TooNoisyError(f"no standard errors: {self._why_no_errors()}")
        errors = np.sqrt(np.diag(np.asarray(covariance)))
        values = np.ravel(self.coef_)
        names = self._column_names(len(values))
        if self.fit_intercept:
            values, names = np.append(values, np.ravel(self.intercept_)[0]), [*names, "(intercept)"]
        return summary_of(names, values, errors, level)

    def _why_no_errors(self) -> str:
        n, p = self.result_.n_public, np.atleast_2d(self.coef_).shape[1] + 1
        tight = p**1.5 / self._signal(n)
        if tight <= CROWDED:
            return "they were not asked for. Fit with inference=True; that takes half the budget."
        needed = math.ceil(n * tight / CROWDED / 100) * 100
        more = f"About {needed} records, or an ε about {tight / CROWDED:.1f} times as large, would do."
        return f"{p - 1} features are too many for n and ε. {more}"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


@dataclass(eq=False, repr=False)
class PrivateLinearModel(PrivateModel):
    """Base class of linear models: row bound, intercept, regularization, features, inference and algorithm."""

    _: KW_ONLY
    row_bound: float | None = None  # type: ignore[misc]
    fit_intercept: bool = True  # type: ignore[misc]
    regularization: float = 0.0  # type: ignore[misc]
    features: Any = None  # type: ignore[misc]
    inference: bool | None = None  # type: ignore[misc]
    algorithm: Algorithm | str | None = None  # type: ignore[misc]


def number_of(size: int | PublicCount) -> int:
    """Return the number of records, declared, public or counted."""
    return size.n if isinstance(size, PublicCount) else size


def what_counting_cost(size: PublicCount) -> str:
    """Return a refusal's sentence on what was charged, once the number of records of a fit is known."""
    if size.counted:
        return "The private count of the records was charged, about 1 % of ε; the rest of the budget was not."
    return "No privacy budget was spent."


def undetected_notes(details: Mapping[str, Any], look: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
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
    if "coefficient_covariance" in details and look and not look.get("whole"):
        notes.append(CLIPPED_ERRORS)
    if raised := details.get("raised_eigenvalues"):
        one = "1 direction of the curvature is hidden by noise; intervals along it are wider"
        several = f"{raised} directions of the curvature are hidden by noise; intervals along them are wider"
        notes.append(one if raised == 1 else several)
    return tuple(notes), advice


def noted(privacy: Privacy, notes: Sequence[str]) -> Privacy:
    """The statement with more notes."""
    return replace(privacy, notes=(*privacy.notes, *notes))
