"""Training as the command line does it: one call trains or goes on, whether a loss or an estimator is asked for.

:func:`training_of` refuses mistakes before anything is written. What it returns leaves the same things in the run's
folder in both cases: a checkpoint while it lasts, then a result that ``quietgrad.estimators.from_run`` reads.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quietgrad.cli.options import say
from quietgrad.cli.run_spec import RunSpec, objective_from
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.scoring import exact_scores, plain_scores
from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.ledger.account import Account
from quietgrad.core.plans.counting import NOMINAL
from quietgrad.core.sanitize import did_you_mean
from quietgrad.data.dataset import Dataset
from quietgrad.features.naming import named_features
from quietgrad.methods.minimizing import Watched, minimize, progress_bar, resume
from quietgrad.methods.result import Result, load
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.privacy_units import UnitGrouping
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.scanned import ScannedPeople


class ModelTraining(Protocol):
    """A training whose options are known to be sound."""

    def __call__(self, out: Path, *, resumed: bool, quiet: bool) -> Result:
        """Train in the folder ``out``, or go on with the run that is kept there; describe and score the model."""
        ...

    def described(self, out: Path, result: Result) -> Result:
        """The trained model of ``out`` with its public facts and exact scores; a private score comes later."""
        ...


def training_of(spec: RunSpec, data: Dataset) -> ModelTraining:
    """The training that the options ask for; what cannot be is refused here."""
    if data.person_test is not None:
        UnitGrouping.of(data.person_test)
    return EstimatorFit.of(spec, data) if spec.uses_estimator else Minimization.of(spec, data)


@dataclass(frozen=True, eq=False)
class Minimization:
    """A linear loss, minimised by the algorithm that was asked for or by the default for tables."""

    spec: RunSpec
    data: Dataset
    loss: LinearObjective
    people: UnitGrouping | ScannedPeople | None

    @classmethod
    def of(cls, spec: RunSpec, data: Dataset) -> Minimization:
        """Check the loss and the algorithm, for a nominal number of records if that is a secret."""
        people: UnitGrouping | ScannedPeople | None = None
        if isinstance(data, ScannedData):
            people = None if data.person is None else ScannedPeople(data.X, spec.person_rule)
        elif data.person is not None:
            people = UnitGrouping.of(data.person, spec.person_rule)
        loss = objective_from(spec.describe_objective(data))
        spec.make_algorithm(data, NOMINAL if spec.n_public is None else spec.n_public)
        return cls(spec, data, loss, people)

    def __call__(self, out: Path, *, resumed: bool, quiet: bool) -> Result:
        """Minimise; an interrupted run says how to go on."""
        spec, data = self.spec, self.data
        table = data.X if isinstance(data, ScannedData) else (data.X, data.y)
        method = partial(spec.make_algorithm, data)
        storage: dict[str, Any] = {
            "folder": out, "checkpoint_seconds": spec.checkpoint_seconds, "person": self.people,
            "combine": spec.combine, "records_per_person": spec.records_per_person,
        }  # fmt: skip
        try:
            with progress_bar(quiet=quiet) as watched:
                if resumed:
                    result = resume(self.loss, table, method, callback=watched, **storage)
                else:
                    result = minimize(
                        self.loss, table, method, budget=spec.budget(), n_public=spec.n_public,
                        records_public=spec.records_public, callback=watched, account=spec.payer(out), **storage,
                    )  # fmt: skip
        except KeyboardInterrupt:
            say(f"interrupted; continue with `quietgrad resume {out}`.", err=True)
            raise
        return described(spec, data, result, watched)

    def described(self, out: Path, result: Result) -> Result:
        """The result with the public facts of its model and its exact scores."""
        return described(self.spec, self.data, result)


def described(spec: RunSpec, data: Dataset, result: Result, watched: Watched | None = None) -> Result:
    """The result of a minimisation with the public facts of its model, its course and its exact scores."""
    facts = spec.describe_objective(data)
    details = {**result.details, "model": facts}
    curve = None if watched is None else watched.curve_of(result.privacy.epsilon)
    if curve and watched is not None and watched.plan is not None:  # a run that was charged again has neither
        details["epsilon_curve"] = [list(point) for point in curve]
        details["generalization"] = watched.plan.generalization
    metrics = plain_scores(
        objective_from(facts), result.params, data, FeatureBox.from_details(details),
        test=not spec.scores_privately, train=spec.evaluate_train,
    )  # fmt: skip
    return replace(result, details=details, metrics=metrics)


MODELS: dict[str, tuple[str | None, str | None]] = {
    "linear": ("PrivateLogisticRegression", "PrivateHuberRegressor"),
    "additive": ("PrivateAdditiveClassifier", "PrivateAdditiveRegressor"),
    "svc": ("PrivateSVC", None),
    "least-squares": (None, "PrivateLinearRegression"),
    "poisson": (None, "PrivatePoissonRegressor"),
    "quantile": (None, "PrivateQuantileRegressor"),
}
"""A model's name and its estimators: of a classification, of a regression."""


@dataclass(frozen=True, eq=False)
class EstimatorFit:
    """An estimator of tables, which chooses its method by itself."""

    spec: RunSpec
    data: Dataset

    @classmethod
    def of(cls, spec: RunSpec, data: Dataset) -> EstimatorFit:
        """Check the options by making the estimator once, for no account."""
        if data.person is not None:
            UnitGrouping.of(data.person, spec.person_rule)
        estimator_of(spec, data, "default")
        return cls(spec, data)

    def __call__(self, out: Path, *, resumed: bool, quiet: bool) -> Result:
        """Fit; an interrupted fit is kept in ``out``, and the same call goes on with it."""
        spec, data = self.spec, self.data
        model = estimator_of(spec, data, spec.payer(out))
        people: dict[str, Any] = {}
        if data.person is not None:
            people = {
                "person": data.person, "combine": spec.combine, "records_per_person": spec.records_per_person,
                "records_public": spec.records_public,
            }  # fmt: skip
        X: Any = data.X
        if data.feature_names is not None and isinstance(X, np.ndarray):
            with suppress(ImportError):  # without pandas, columns have no names
                import pandas as pd

                X = pd.DataFrame(X, columns=list(data.feature_names))
        try:
            model.fit(X, data.targets, folder=out, **people)
        except KeyboardInterrupt:
            say(f"interrupted; continue with `quietgrad resume {out}`.", err=True)
            raise
        return self.described(out, load(out))

    def described(self, out: Path, result: Result) -> Result:
        """The result with the public facts of its model and its exact scores."""
        from quietgrad import estimators  # loads scikit-learn

        spec, data, model = self.spec, self.data, estimators.from_run(out)
        if "model" not in result.details:
            facts = {**spec.describe_objective(data), "objective": "additive"}
            if data.classes is not None:  # in the model's own order, as of every other run
                values = np.asarray(model.classes_).tolist()
                facts |= {"class_names": [str(value) for value in values], "class_values": values}
            result = replace(result, details={**result.details, "model": facts})
        if spec.scores_privately:
            return result
        model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
        return replace(result, metrics=exact_scores(model, data))


def estimator_of(spec: RunSpec, data: Dataset, account: Account | str) -> Any:
    """Make the estimator that ``--model`` names, with the run's guarantee, account and public facts."""
    from quietgrad import estimators  # loads scikit-learn

    name, _, knob = (spec.model or "linear").partition(":")
    if name not in MODELS:
        raise SettingError(
            f"{{model}}: must be one of {', '.join(MODELS)}.{did_you_mean(name, MODELS)}", model=name
        )
    regression = data.task == "regression"
    kind = MODELS[name][regression]
    if kind is None:
        wanted = "a regression: --task regression" if not regression else "classes: --classes no,yes"
        raise DataError(f"--model {name} is of {wanted}, or say so in the schema's label.")
    guarantee = spec.budget()
    if guarantee is None:
        raise DataError("--model: an estimator is private; leave --non-private out, or --model.")
    settings: dict[str, Any] = {
        "epsilon": guarantee.epsilon, "delta": guarantee.delta, "relation": str(guarantee.relation),
        "account": account, "n_public": spec.n_public, "fit_intercept": spec.intercept,
        "feature_bounds": None if data.feature_bounds is None else list(data.feature_bounds),
        "row_bound": spec.row_bound if data.feature_bounds is None else None,
    }  # fmt: skip
    if data.feature_bounds is None and spec.row_bound is None:
        settings["row_bound"] = data.row_bound
    if spec.features is not None:  # what is declared of the columns is not about what is made of them
        features = named_features(spec.features, data.d)
        settings |= {"features": features, "feature_bounds": None, "row_bound": spec.row_bound}
    if regression:
        settings["target_bounds"] = data.label_bounds
    else:
        settings["classes"] = [] if data.class_labels is None else data.class_labels.values.tolist()
    if spec.inference:
        settings["inference"] = True
    if spec.class_weight is not None:
        settings["class_weight"] = _weights(spec.class_weight)
    if knob and name == "quantile":
        settings["quantile"] = float(knob)
    factory = getattr(estimators, kind)
    known = inspect.signature(factory).parameters
    for option in ("inference", "class_weight", "features", "fit_intercept"):
        if option in settings and option not in known and not (option == "fit_intercept" and spec.intercept):
            raise DataError(f"--{option.replace('_', '-')}: {name} models do not have it.")
    return factory(**{key: value for key, value in settings.items() if key in known})


def _weights(text: str) -> Any:
    """
    >>> _weights("no=1,yes=5"), _weights("balanced")
    ({'no': 1.0, 'yes': 5.0}, 'balanced')
    """
    if "=" not in text:
        return text
    try:
        return {
            name.strip(): float(weight) for name, _, weight in (part.rpartition("=") for part in text.split(","))
        }
    except ValueError:
        raise SettingError(
            "{class_weight}: must be CLASS=WEIGHT,… such as no=1,yes=5.", class_weight=text
        ) from None
