"""A run's model as its report shows it: coefficients, the features they belong to, and shape functions.

Everything here was released by the run or declared before it. Nothing is computed from records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quietgrad.charts import Intervals, Lines, Series
from quietgrad.methods.result import Result
from quietgrad.tables.losses import LOSSES
from quietgrad.tables.registry import saved_objective
from quietgrad.tables.table import Floats

_MOST_DRAWN = 20
_MOST_ROWS = 300
_MOST_OPEN = 15  # the rest is folded
_MOST_SHAPES = 60
_NORMAL_95 = 1.96
_SCORES = {"logistic": "log-odds", "multinomial": "log-odds", "hinge": "margin", "poisson": "log of the mean"}
INTERCEPT = "(intercept)"


@dataclass(frozen=True)
class FeatureRow:
    """One row of the feature table, as text; ``coefficients`` has one entry per output of the model."""

    name: str
    range: str
    mean: str
    coefficients: tuple[str, ...]
    interval: str


@dataclass(frozen=True)
class FittedModel:
    """The section of a page about one model; parts that a model does not have are empty."""

    score: str
    """The quantity that coefficients and shapes add to, such as log-odds."""
    outputs: tuple[str, ...] = ()
    rows: tuple[FeatureRow, ...] = ()
    folded: tuple[FeatureRow, ...] = ()
    """Further rows, with smaller coefficients, that are shown on a click."""
    left_out: int = 0
    chart: str = ""
    shapes: tuple[tuple[str, str], ...] = ()
    shapes_left_out: int = 0
    has_means: bool = False
    has_ranges: bool = False
    is_scaled: bool = False
    """Whether columns with declared bounds were mapped to [0, 1]."""
    is_numbered: bool = False
    """Whether the rows are parameters by their number, because the run does not name its features."""

    @property
    def has_intervals(self) -> bool:
        return bool(self.chart)

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.shapes)


def model_of(result: Result) -> FittedModel:
    """Return what a result says of its model: a linear or additive one, else nothing."""
    facts = result.details.get("model") or {}
    name = str(facts.get("objective", "")).partition(":")[0]
    score = _SCORES.get(name, "score" if facts.get("task") != "regression" else "prediction")
    if shapes := result.details.get("shapes"):
        declared = result.details.get("declared_bounds") or {}
        names = [str(shape["name"]) for shape in shapes[:_MOST_SHAPES]]
        flags = set(result.details.get("flags") or ())
        drawn = tuple(
            (name, _flag(shape) if name in flags else _shape(shape, declared.get(name)))
            for name, shape in zip(names, shapes, strict=False)
        )
        return FittedModel(score, shapes=drawn, shapes_left_out=len(shapes) - len(drawn))
    if not facts and np.ndim(result.params) == 1 and len(result.params) <= _MOST_ROWS:
        return _numbered_parameters(np.asarray(result.params, dtype=np.float64))
    if name not in LOSSES or "features" not in facts:
        return FittedModel(score)
    objective = saved_objective(facts)
    if len(result.params) != (int(facts["features"]) + bool(facts["intercept"])) * objective.outputs:
        return FittedModel(score)
    weights, bias = objective.coefficients(np.asarray(result.params, dtype=np.float64))
    return _linear_model(result, score, weights, bias if facts["intercept"] else None)


def _numbered_parameters(params: Floats) -> FittedModel:
    """The parameters of a run made in Python, which knows its loss as an object and not by name."""
    rows = [FeatureRow(f"θ{k}", "", "", (f"{value:.4g}",), "") for k, value in enumerate(params)]
    shown, folded = (rows, []) if len(rows) <= _MOST_OPEN + 5 else (rows[:_MOST_OPEN], rows[_MOST_OPEN:])
    return FittedModel("objective", rows=tuple(shown), folded=tuple(folded), is_numbered=True)


def _linear_model(result: Result, score: str, weights: Floats, bias: Floats | None) -> FittedModel:
    facts, details = result.details["model"], result.details
    names = [
        str(name)
        for name in facts.get("feature_names")
        or details.get("feature_names")
        or [f"x{k}" for k in range(len(weights))]
    ]
    values = weights if bias is None else np.vstack([weights, bias])
    names = [*names, INTERCEPT][: len(values)]
    errors = _standard_errors(details, values)
    declared = details.get("declared_bounds") or {}
    estimated_ranges = {} if declared else _found_ranges(details, names)
    means = _means(details, names, declared)

    def weight(k: int) -> float:
        return float(np.abs(values[k]).max() / (1.0 if errors is None else errors[k]))

    order = sorted((k for k in range(len(values)) if names[k] != INTERCEPT), key=lambda k: -weight(k))
    order += [k for k in range(len(values)) if names[k] == INTERCEPT]
    rows, intervals = [], []
    for k in order:
        ends = declared.get(names[k]) or estimated_ranges.get(names[k])
        interval = ""
        if errors is not None:
            value, reach = float(values[k, 0]), _NORMAL_95 * float(errors[k])
            interval = f"{value - reach:.3g} to {value + reach:.3g}"
            if names[k] != INTERCEPT:  # of another size: it would press all others together
                intervals.append((names[k], value, value - reach, value + reach))
        numbers = tuple(f"{value:.4g}" for value in values[k])
        between = f"{ends[0]:g} to {ends[1]:g}" if ends else ""
        rows.append(FeatureRow(names[k], between, means.get(names[k], ""), numbers, interval))
    shown, folded = rows, []
    if len(rows) > _MOST_OPEN + 5:  # a click for less is not worth it; the intercept stays with the largest
        last = len(rows) - (bias is not None)
        shown, folded = [*rows[:_MOST_OPEN], *rows[last:]], rows[_MOST_OPEN:last]
    return FittedModel(
        score,
        outputs=tuple(map(str, facts["class_names"])) if values.shape[1] > 1 else (),
        rows=tuple(shown),
        folded=tuple(folded[:_MOST_ROWS]),
        left_out=max(0, len(folded) - _MOST_ROWS),
        chart=Intervals("Coefficients", intervals[:_MOST_DRAWN], f"added to the {score}").svg(),
        has_means=any(row.mean for row in rows),
        has_ranges=any(row.range for row in rows),
        is_scaled=bool(declared),
    )


def _standard_errors(details: Mapping[str, Any], values: Floats) -> Floats | None:
    """Standard errors of the coefficients of one output, where the run bought them."""
    covariance = np.asarray(details.get("coefficient_covariance") or (), dtype=np.float64)
    if values.shape[1] != 1 or covariance.shape != (len(values), len(values)):
        return None
    variances = np.diag(covariance)
    return np.sqrt(variances) if (variances > 0.0).all() else None


def _found_ranges(details: Mapping[str, Any], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The range of each feature that the fit used, declared in Python or estimated with noise."""
    limits = details.get("feature_range")
    features = [name for name in names if name != INTERCEPT]
    if limits is None or any(len(side) != len(features) for side in limits):
        return {}
    pairs = list(zip(map(float, limits[0]), map(float, limits[1]), strict=True))
    bound = (details.get("model") or {}).get("row_bound") or details.get("declared_row_bound")
    if bound is not None and set(pairs) == {(-float(bound), float(bound))}:
        return {}  # the bound on rows, which says nothing of one feature
    return {name: pair for name, pair in zip(features, pairs, strict=True) if all(map(math.isfinite, pair))}


def _means(
    details: Mapping[str, Any], names: Sequence[str], declared: Mapping[str, Sequence[float]]
) -> dict[str, str]:
    """The noisy mean of each feature with its standard error, in the units of its declared bounds."""
    means, errors = details.get("feature_means") or (), details.get("feature_mean_errors") or ()
    features = [name for name in names if name != INTERCEPT]
    if not len(means) == len(errors) == len(features):
        return {}
    texts = {}
    for name, mean, error in zip(features, means, errors, strict=True):
        low, high = declared.get(name) or (0.0, 1.0)
        texts[name] = _with_error(low + (high - low) * mean, (high - low) * error)
    return texts


def _with_error(value: float, error: float) -> str:
    """A number to the digits that its error leaves.

    >>> _with_error(0.0001745, 0.0025), _with_error(41.23456, 0.31), _with_error(51234.5, 800.0)
    ('0.0002 ± 0.0025', '41.23 ± 0.31', '51234 ± 800')
    """
    if not (math.isfinite(value) and math.isfinite(error) and error > 0.0):
        return f"{value:.4g} ± {error:.2g}"
    digits = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _shape(shape: Mapping[str, Any], bounds: Sequence[float] | None) -> str:
    """Draw one function of an additive model: a row for each category, or a line of steps over bins.

    ``bounds`` are those that the column was mapped from to [0, 1].
    """
    values, errors = ([float(v) for v in shape[key]] for key in ("values", "errors"))
    title, effect = str(shape["name"]), "effect on the score"
    if shape["named"]:
        named = zip(map(str, shape["where"]), values, errors, strict=True)
        return Intervals(title, [(name, v, v - 2.0 * e, v + 2.0 * e) for name, v, e in named], effect).svg()
    low, high = bounds or (0.0, 1.0)
    edges = [low + (high - low) * float(edge) for edge in shape["where"]]
    points, bars = [], []
    for (left, right), value, error in zip(pairwise(edges), values, errors, strict=True):
        points += [
            (left, value),
            ((left + right) / 2.0, value),
            (right, value),
        ]  # the bar is in the middle of the bin
        bars += [0.0, 2.0 * error, 0.0]
    return Lines(title, [Series(title, points, bars)], title, effect).svg()


def _flag(shape: Mapping[str, Any]) -> str:
    """Draw the function of a feature that is 0 or 1: its values there, whatever its bins between them are."""
    title, ends = str(shape["name"]), (("no", 0), ("yes", -1))
    values, errors = ([float(v) for v in shape[key]] for key in ("values", "errors"))
    rows = [(word, values[k], values[k] - 2.0 * errors[k], values[k] + 2.0 * errors[k]) for word, k in ends]
    return Intervals(title, rows, "effect on the score").svg()
