"""Runs of the command line as fitted estimators, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.errors import DataError
from quietgrad.data.schema import Schema
from quietgrad.estimators.raw_frames import schema_of_run
from quietgrad.features.frozen import PublicFeatures
from quietgrad.features.naming import read_features
from quietgrad.methods.result import Result, load
from quietgrad.tables.losses import LOSSES
from quietgrad.tables.registry import saved_objective
from quietgrad.tables.shapes import AdditiveBasis
from quietgrad.tables.table import Array

_KINDS = {
    "multinomial": "PrivateLogisticRegression",
    "logistic": "PrivateLogisticRegression",
    "hinge": "PrivateSVC",
    "huber": "PrivateHuberRegressor",
    "squared": "PrivateLinearRegression",
    "pinball": "PrivateQuantileRegressor",
    "poisson": "PrivatePoissonRegressor",
}
_NAMES = {kind: loss for loss, kind in _KINDS.items()}
_JSON = (bool, int, float, str)


def from_run(folder: str | Path, features: PublicFeatures | None = None) -> Any:
    """Read the fitted estimator of a run.

    The run is one of ``quietgrad train`` or of :func:`to_run`. A model that was trained with a schema predicts for
    frames with the schema's columns, as they are in the file, and for features that the schema encoded.

    Args:
        folder: of the run.
        features: the public features that the model was fitted on, if they are those of a torch module: its code
            is not kept with the run. Another network is refused.

    >>> import tempfile
    >>> from quietgrad.estimators import PrivateLogisticRegression
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=4.0).fit(X, X[:, 0] > 0)
    >>> folder = to_run(model, tempfile.mkdtemp())
    >>> bool((from_run(folder).predict(X) == model.predict(X)).all())
    True
    """
    from quietgrad import estimators

    result, schema = load(folder), schema_of_run(folder)
    if result.details.get("additive"):
        return _additive_from(result, schema)
    facts = result.details.get("model")
    if facts is None:
        raise DataError(f"{folder}: the result does not say which model it is of; it was not made by `train`.")
    name = str(facts["objective"]).partition(":")[0]
    if name not in _KINDS:
        raise DataError(f"{folder}: no estimator has the loss {name}.")
    model = getattr(estimators, _KINDS[name])(fit_intercept=bool(facts["intercept"]))
    if result.privacy.relation is not None:
        model.relation = str(result.privacy.relation)
    if (account := result.privacy.account) is not None:  # of the people who pay if the model learns more from them
        model.account = account
    weights, bias = saved_objective(facts).coefficients(np.asarray(result.params))
    model.result_, model.privacy_, model._schema = result, result.privacy, schema
    model.n_features_in_ = int(facts["features"])
    model.n_iter_ = max(1, sum(result.privacy.releases.values()))
    if facts.get("feature_map") is not None:
        model.features = read_features(facts["feature_map"], folder, features)
    elif features is not None:
        raise DataError(f"{folder}: the model was fitted on rows as they are; leave features out.")
    if facts.get("feature_names"):
        model.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
    limits, target = result.details.get("feature_range"), result.details.get("target_range")
    model.feature_range_ = None if limits is None else (np.asarray(limits[0]), np.asarray(limits[1]))
    if facts["task"] == "regression":
        model.coef_, model.intercept_ = weights[:, 0], float(bias[0])
        model.target_range_ = (-np.inf, np.inf) if target is None else (float(target[0]), float(target[1]))
    else:
        model.coef_, model.intercept_ = np.ascontiguousarray(weights.T), bias
        values = facts.get("class_values")
        model.classes_ = np.array(_labels(facts["class_names"]) if values is None else values)
    return model


def fitted_attributes(folder: str | Path, features: PublicFeatures | None = None) -> dict[str, Any]:
    """Read the attributes that a fit sets on its estimator from the run in ``folder``."""
    model = from_run(folder, features)
    return {name: value for name, value in vars(model).items() if name.endswith("_") or name == "_columns"}


def params_of(model: Any) -> Any:
    """The parameters of a fitted linear model as a run keeps them.

    They are made of ``coef_`` and ``intercept_``, which are what predicts: the parameters of the training may be on
    another scale.
    """
    weights = np.atleast_2d(model.coef_).T
    rows = [weights, np.atleast_2d(model.intercept_)] if model.fit_intercept else [weights]
    return np.ascontiguousarray(np.vstack(rows), dtype=np.float64).ravel()


def can_be_saved(model: Any) -> bool:
    """Whether :func:`to_run` knows the kind of the model and its labels are JSON values."""
    known = "shapes_" in vars(model) or type(model).__name__ in _NAMES
    return known and all(isinstance(label, _JSON) for label in np.asarray(vars(model).get("classes_", ())).tolist())


def to_run(model: Any, folder: str | Path) -> Path:
    """Save a fitted estimator as a run.

    ``quietgrad predict``, ``evaluate`` and ``report`` read it.

    Of an additive model the report shows the functions; it predicts in Python, by :func:`from_run`.
    """
    known, kind = vars(model), type(model).__name__
    if "shapes_" in known:
        return _save_additive(model, Path(folder))
    if kind not in _NAMES:
        steps = (
            " Save its last step, pipeline[-1], and keep the steps before it yourself: a run holds one model."
            if hasattr(model, "named_steps")
            else ""
        )
        raise ValueError(
            f"{kind}: is not saved as a run. The fitted linear and additive estimators of quietgrad are.{steps}"
        )
    labels = None if "classes_" not in known else _values(model.classes_)
    several = labels is not None and len(labels) > 2
    loss = "multinomial" if several and kind != "PrivateSVC" else _NAMES[kind]
    number = known.get(str(LOSSES[loss].number))
    names = known.get("feature_names_in_")
    facts = {
        "objective": loss if number is None else f"{loss}:{number:g}",
        "regularizer": None,
        "intercept": model.fit_intercept,
        "row_bound": None,
        "rows": "clip",
        "features": model.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "task": "regression" if labels is None else "multiclass" if several else "binary",
        "classes": None if labels is None else len(labels),
        "class_names": None if labels is None else [str(label) for label in labels],
        "class_values": labels,
    }
    if model.features is not None:
        facts["feature_map"] = model.features.to_json()
    details = {**model.result_.details, "model": facts}
    for name in ("feature_range", "target_range"):  # what predictions are kept in
        limits = known.get(f"{name}_")
        details[name] = None if limits is None else np.asarray(limits, dtype=np.float64).tolist()
    replace(model.result_, params=params_of(model), details=details, privacy=model.privacy_).save(folder)
    if model.features is not None:
        model.features.save(folder)
    return Path(folder)


def _save_additive(model: Any, folder: Path) -> Path:
    """The coefficients and the functions with their errors, as JSON values; the public map is in the result."""
    facts = {
        "columns": [model._columns.names, model._columns.named],
        "coef": model.coef_.tolist(),
        "intercept": np.asarray(model.intercept_).tolist(),
        "classes": None if "classes_" not in vars(model) else _values(model.classes_),
    }
    shapes = []
    for name, (where, values, errors) in model.shape_functions_.items():
        plain = [x.item() if isinstance(x, np.generic) else x for x in where]
        curve = {"where": plain, "values": values.tolist(), "errors": errors.tolist()}
        shapes.append({"name": name, "named": isinstance(where, list), **curve})
    details = {**model.result_.details, "additive": facts, "shapes": shapes}
    replace(model.result_, details=details, privacy=model.privacy_).save(folder)
    return folder


def _additive_from(result: Result, schema: Schema | None) -> Any:
    from quietgrad.estimators import additive
    from quietgrad.estimators.validation import ColumnSchema

    facts: Any = result.details["additive"]
    classifies = facts["classes"] is not None
    model: Any = additive.PrivateAdditiveClassifier() if classifies else additive.PrivateAdditiveRegressor()
    model._schema = schema
    model.shapes_ = AdditiveBasis.from_json(result.details["shape_map"])
    vocabularies = {f.name: list(f.values) for f in model.shapes_.features if f.values}
    names, named = facts["columns"]
    model._columns = ColumnSchema(names, named, vocabularies)
    model.n_features_in_ = len(names)
    if named:
        model.feature_names_in_ = np.array(names, dtype=object)
    model.coef_, model.intercept_ = np.array(facts["coef"]), np.array(facts["intercept"])
    if classifies:
        model.classes_ = np.array(facts["classes"])
    else:
        low, high = result.details["target_range"]
        model.target_range_ = (float(low), float(high))
    model.result_, model.privacy_ = result, result.privacy
    model.n_iter_ = max(1, sum(result.privacy.releases.values()))
    return model


def _values(classes: Array) -> list[Any]:
    """Classes as JSON values, each of its kind: 1, 1.0, true and "1" are four."""
    values: list[Any] = np.asarray(classes).tolist()
    if not all(isinstance(value, _JSON) for value in values):
        raise ValueError("classes: only numbers, booleans and texts can be saved as labels of a run.")
    return values


def _labels(texts: list[str]) -> list[Any]:
    """Classes of a file as they were before they were written down: all of one kind whose letters these are."""
    if set(texts) <= {"True", "False"}:
        return [text == "True" for text in texts]
    for kind in (int, float):
        try:
            found = [kind(text) for text in texts]
        except ValueError:
            continue
        if [str(value) for value in found] == texts:
            return found
    return texts
