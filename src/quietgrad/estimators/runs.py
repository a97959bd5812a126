"""Runs of the command line as fitted estimators, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.errors import DataError
from quietgrad.objectives.tables.frame import Frame
from quietgrad.training.result import Result, load

_KINDS = {
    "logistic": ("classifiers", "PrivateLogisticRegression"),
    "multinomial": ("classifiers", "PrivateLogisticRegression"),
    "hinge": ("classifiers", "PrivateSVC"),
    "huber": ("regressors", "PrivateHuberRegressor"),
    "squared": ("regressors", "PrivateLinearRegression"),
}
_NAMES = {"PrivateLogisticRegression": "logistic", "PrivateSVC": "hinge", "PrivateHuberRegressor": "huber"}


def from_run(folder: str | Path) -> Any:
    """The fitted estimator of a run that ``quietgrad train`` (or :func:`to_run`) left in ``folder``.

    >>> import tempfile
    >>> from quietgrad.estimators import PrivateLogisticRegression
    >>> X = np.random.default_rng(0).standard_normal((3000, 2))
    >>> model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], row_bound=4.0).fit(X, X[:, 0] > 0)
    >>> folder = to_run(model, tempfile.mkdtemp())
    >>> bool((from_run(folder).predict(X) == model.predict(X)).all())
    True
    """
    from importlib import import_module

    result = load(folder)
    facts = result.details.get("model")
    if facts is None:
        raise DataError(f"{folder}: the result does not say which model it is of; it was not made by `train`.")
    name = str(facts["objective"]).partition(":")[0]
    if name not in _KINDS:
        raise DataError(f"{folder}: no estimator has the loss {name}.")
    home, kind = _KINDS[name]
    model = getattr(import_module(f"quietgrad.estimators.{home}"), kind)()
    weights, bias = coefficients(result, facts)
    model.result_, model.privacy_ = result, result.privacy
    model.n_features_in_ = int(facts["features"])
    model.n_iter_ = max(1, sum(result.privacy.releases.values()))
    if facts.get("feature_names"):
        model.feature_names_in_ = np.array(facts["feature_names"], dtype=object)
    frame = Frame.told(result.details)
    model.feature_range_ = None if frame is None else (frame.low, frame.high)
    if facts["task"] == "regression":
        model.coef_, model.intercept_ = weights[:, 0], float(bias[0])
        model.target_range_ = (-np.inf, np.inf) if frame is None or frame.target is None else frame.target
    else:
        model.coef_, model.intercept_ = np.ascontiguousarray(weights.T), bias
        model.classes_ = np.array([_label(c) for c in facts["class_names"]])
    return model


def coefficients(result: Result, facts: dict[str, Any]) -> tuple[Any, Any]:
    """(W, b) of a result on raw features, from the public facts that are kept with it."""
    from quietgrad.objectives.registry import make_objective

    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    objective: Any = make_objective(facts["objective"], given, task=facts["task"], classes=facts["classes"])[0]
    return objective.coefficients(np.asarray(result.params))  # type: ignore[no-any-return]


def to_run(model: Any, folder: str | Path) -> Path:
    """Save a fitted estimator so that ``quietgrad predict``, ``evaluate`` and ``report`` can read it."""
    kind = type(model).__name__
    if kind not in {name for _, name in _KINDS.values()}:
        raise ValueError(f"{kind}: only linear estimators are saved as runs.")
    several = len(getattr(model, "classes_", ())) > 2
    if several and kind == "PrivateSVC":
        raise ValueError("PrivateSVC: a run holds a machine of two classes only.")
    loss = "multinomial" if several else _NAMES.get(kind, "squared")
    knob = {"hinge": getattr(model, "smoothing", None), "huber": getattr(model, "threshold", None)}.get(loss)
    regression = hasattr(model, "target_range_")
    names = getattr(model, "feature_names_in_", None)
    facts = {
        "objective": loss if knob is None else f"{loss}:{knob:g}",
        "regularizer": None,
        "intercept": model.fit_intercept,
        "row_bound": None,
        "rows": "refuse",
        "features": model.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "task": "regression" if regression else "multiclass" if several else "binary",
        "classes": None if regression else len(model.classes_),
        "class_names": None if regression else [str(c) for c in model.classes_.tolist()],
    }
    result = replace(model.result_, details={**model.result_.details, "model": facts}, privacy=model.privacy_)
    result.save(folder)
    return Path(folder)


def _label(text: str) -> Any:
    """A class as it was before it was written down: a whole number, a number, a boolean or a text."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
