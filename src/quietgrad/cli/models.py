"""`quietgrad train --model`: the estimators of tables, fitted and kept as runs."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.cli.run_spec import RunSpec
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.account import Account
from quietgrad.core.sanitize import did_you_mean
from quietgrad.data.dataset import Dataset
from quietgrad.methods.result import Result, load

MODELS: dict[str, tuple[str | None, str | None]] = {
    "linear": ("PrivateLogisticRegression", "PrivateHuberRegressor"),
    "additive": ("PrivateAdditiveClassifier", "PrivateAdditiveRegressor"),
    "svc": ("PrivateSVC", None),
    "least-squares": (None, "PrivateLinearRegression"),
    "poisson": (None, "PrivatePoissonRegressor"),
    "quantile": (None, "PrivateQuantileRegressor"),
}
"""A model's name and its estimators: of a classification, of a regression."""


def estimator_of(spec: RunSpec, data: Dataset, account: Account | str) -> Any:
    """The estimator that ``--model`` names, with the run's guarantee, account and public facts."""
    from quietgrad import estimators  # loads scikit-learn

    name, _, knob = (spec.model or "linear").partition(":")
    if name not in MODELS:
        raise ValueError(f"model={name!r}: must be one of {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    regression = data.task == "regression"
    kind = MODELS[name][regression]
    if kind is None:
        wanted = "a regression: --task regression" if not regression else "classes: --classes no,yes"
        raise DataError(f"--model {name} is of {wanted}, or say so in the schema's label.")
    guarantee = spec.budget()
    if guarantee is None:
        raise DataError("--model: an estimator is private; leave --non-private out, or --model.")
    given: dict[str, Any] = {
        "epsilon": guarantee.epsilon, "delta": guarantee.delta, "relation": str(guarantee.relation),
        "account": account, "n_public": spec.n_public, "fit_intercept": spec.intercept,
        "feature_bounds": None if data.feature_bounds is None else list(data.feature_bounds),
        "row_bound": spec.row_bound if data.feature_bounds is None else None,
    }  # fmt: skip
    if data.feature_bounds is None and spec.row_bound is None:
        given["row_bound"] = data.row_bound
    if regression:
        given["target_bounds"] = data.label_bounds
    else:
        given["classes"] = [] if data.class_labels is None else data.class_labels.values.tolist()
    if spec.inference:
        given["inference"] = True
    if spec.class_weight is not None:
        given["class_weight"] = _weights(spec.class_weight)
    if knob and name == "quantile":
        given["quantile"] = float(knob)
    factory = getattr(estimators, kind)
    known = inspect.signature(factory).parameters
    for option in ("inference", "class_weight", "fit_intercept"):
        if option in given and option not in known and not (option == "fit_intercept" and spec.intercept):
            raise DataError(f"--{option.replace('_', '-')}: {name} models do not have it.")
    return factory(**{key: value for key, value in given.items() if key in known})


def fitted(folder: Path) -> Any:
    """The estimator of a run, for rows without names: those were compared when the file was read."""
    from quietgrad import estimators  # loads scikit-learn

    model = estimators.from_run(folder)
    model.__dict__.pop("feature_names_in_", None)
    return model


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
        raise ValueError(f"class_weight={text!r}: must be CLASS=WEIGHT,… such as no=1,yes=5.") from None


def fit(spec: RunSpec, data: Dataset, out: Path) -> Result:
    """Fit the model and keep it as a run in ``out``."""
    from quietgrad import estimators  # loads scikit-learn

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
    model.fit(X, data.targets, **people)
    estimators.to_run(model, out)
    result = load(out)
    if "model" in result.details:
        return result
    facts = {**spec.describe_objective(data), "objective": "additive"}
    if data.classes is not None:  # in the model's own order, as of every other run
        values = np.asarray(model.classes_).tolist()
        facts |= {"class_names": [str(value) for value in values], "class_values": values}
    return replace(result, details={**result.details, "model": facts})
