"""Scores of a run as the command line shows and keeps them: private with their errors, or marked as exact."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from quietgrad.cli.options import say
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.core.files import read_json, write_atomically
from quietgrad.data.dataset import Dataset, Labels, Matrix
from quietgrad.methods.score_noise import score_text
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.range_queries import FeatureBox

if TYPE_CHECKING:
    from quietgrad.data.scanning import Scan
    from quietgrad.estimators.scoring import PrivateScore

Details: TypeAlias = Mapping[str, Any]  # what a result.json holds
_MOST_NAMES = 10  # of classes in one line
_EDGE = 0.02  # of a declared range
_MAJORITY = "majority_accuracy"  # of always answering the most frequent class
TRAINING_PEOPLE = "training people: this score is of records that the model was trained on, not of held-out ones"


def clipped_features(details: Details) -> list[str]:
    """Bounded features whose noisy mean, which the fit paid for, is one end of their declared [0, 1].

    >>> told = {"feature_means": [0.5, 0.999], "feature_mean_errors": [0.001, 0.001], "bounded": ["a", "b"]}
    >>> clipped_features({**told, "model": {"feature_names": ["a", "b"]}})
    ['b']
    """
    means, errors = details.get("feature_means"), details.get("feature_mean_errors")
    names, bounded = (details.get("model") or {}).get("feature_names"), details.get("bounded") or ()
    if means is None or not names or len(means) != len(names):
        return []
    at_an_end = [
        mean - 3.0 * error > 1.0 - _EDGE or mean + 3.0 * error < _EDGE
        for mean, error in zip(means, errors or (), strict=True)
    ]
    return [name for name, end in zip(names, at_an_end, strict=True) if end and name in bounded]


def score_rows(score: PrivateScore) -> list[tuple[str, str]]:
    """Every number of a score with its error, or that it is too noisy."""
    rows = [(name, score_text(*number)) for name, number in score.stated.items()]
    rows += [(name, score_text(None, error)) for name, error in score.too_noisy.items()]
    return [(name.replace("_", " "), text) for name, text in rows]


def metrics_of(score: PrivateScore) -> dict[str, Any]:
    """A private score as the metrics of a result: values, errors, and what always saying one class would score."""
    scores: dict[str, Any] = {}
    for name, (value, error) in score.stated.items():
        scores |= {_metric(name): float(value), f"{_metric(name)}_error": float(error)}
    if score.confusion is not None and "accuracy" in score.stated:
        shares = np.asarray(score.confusion).sum(axis=1)
        scores[_MAJORITY] = float(np.clip(shares.max(), 0.0, 1.0))
    where = f"held-out records, with noise (ε = {score.privacy.epsilon:.4g})"
    noisy = {_metric(name): error for name, error in score.too_noisy.items()}
    return {**scores, "too_noisy": noisy, "private": True, "computed_on": dict.fromkeys(scores, where)}


def _metric(name: str) -> str:
    return "test_loss" if name == "log_loss" else f"test_{name}"


def save_score(score: PrivateScore, folder: Path, people: str) -> None:
    """Write the score beside its run, with the people it is of: "held-out" or "training"."""
    path = score.save(folder)
    document = {**read_json(path), "people": people}
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def say_undeclared(data: Dataset) -> None:
    """Tell the owner of the records, on the terminal alone, of labels that are none of the classes.

    A refusal would tell others that there are such labels, and so would anything that is stored: this is neither.
    """
    if data.class_labels is None:
        return
    count = data.X.undeclared() if isinstance(data, ScannedData) else data.undeclared
    if not count:
        return
    held_out = 0 if data.X_test is None or isinstance(data, ScannedData) else data.X_test.shape[0]
    rows, names = data.X.shape[0] + held_out, data.class_labels.names
    known = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
    whose = "No label is" if count == rows else f"{count} of {rows} labels are not"
    say(
        f"{data.name}: {whose} among the classes {known}; such labels count as {names[0]!r}, and the training goes "
        "on. Nothing is charged yet: interrupt it (Ctrl-C) if that is not meant.\n"
        "(For the records' owner: only this terminal shows it, and no file.)",
        err=True,
    )


def exact_scores(model: Any, data: Dataset) -> dict[str, Any]:
    """Scores of a fitted estimator on the held-out records, without noise; nothing if there are no such records."""
    if data.X_test is None or data.targets_test is None:
        return {}
    truth, answers = data.targets_test, np.asarray(model.predict(data.X_test))
    if data.class_labels is None:
        scores = {"test_rmse": float(np.sqrt(np.mean((answers - truth) ** 2)))}
    else:
        known = ClassLabels.of(model.classes_)
        shares = np.bincount(known.encode_known(truth), minlength=len(known.names)) / len(truth)
        scores = {
            "test_accuracy": float(np.mean(known.agree(answers, truth))),
            _MAJORITY: float(shares.max()),
        }
        if hasattr(model, "predict_proba"):
            own = np.take_along_axis(model.predict_proba(data.X_test), known.encode_known(truth)[:, None], axis=1)
            scores["test_loss"] = float(-np.mean(np.log(np.maximum(own, 1e-300))))
    return {**scores, "private": False, "computed_on": dict.fromkeys(scores, HELD_OUT)}


HELD_OUT = "held-out records, without noise"
TRAINING = "private training records, without noise"


def plain_scores(
    objective: LinearObjective, params: npt.NDArray[np.float64], data: Dataset, frame: FeatureBox | None, *,
    test: bool, train: bool,
) -> dict[str, Any]:  # fmt: skip
    """Scores without noise on the held-out part, if there is one and ``test`` says so, and likewise for ``train``.

    ``frame`` is the box that the model keeps rows and predictions in. ``"private": false`` marks all scores;
    ``"computed_on"`` says whose records each was computed on.
    """
    metrics: dict[str, Any] = {}
    where: dict[str, str] = {}
    if test and data.X_test is not None:
        scores = _scores_on(objective, params, data.X_test, data.y_test, data.task, frame)
        scores = {_MAJORITY if name == _MAJORITY else f"test_{name}": value for name, value in scores.items()}
        metrics |= scores
        where |= dict.fromkeys(scores, HELD_OUT)
    if train:
        scores = _scores_on(objective, params, data.X, data.y, data.task, frame)
        records = objective.prepare(data.X if isinstance(data, ScannedData) else (data.X, data.y))
        gradient = float(np.linalg.norm(objective.risk_gradient(records, params)))
        scores = {f"train_{name}": value for name, value in scores.items() if name != _MAJORITY}
        metrics |= scores | {"gradient_norm": gradient}
        where |= dict.fromkeys([*scores, "gradient_norm"], TRAINING)
    return {**metrics, "private": False, "computed_on": where} if metrics else {}


def _scores_on(
    objective: LinearObjective, params: npt.NDArray[np.float64], table: Matrix | Scan, labels: Labels | None,
    task: str, frame: FeatureBox | None,
) -> dict[str, float]:  # fmt: skip
    loss, good, seen = 0.0, 0.0, 0
    classes: Counter[float] = Counter()
    blocks: Any = [(table, labels)] if labels is not None else cast("Scan", table).by_row().blocks()
    for rows, y in blocks:
        X = rows if frame is None else frame.clipped(rows)
        records = objective.prepare((X, y))
        loss += len(y) * (objective.risk(records, params) - objective.regularizer.value(params))
        answers = objective.predict(records, params)
        if frame is not None and frame.target is not None:
            answers = np.clip(answers, *frame.target)
        good += float(np.sum((answers - y) ** 2 if task == "regression" else answers == y))
        seen += len(y)
        if task != "regression":
            classes.update(np.asarray(y).tolist())
    if task == "regression":
        return {"loss": loss / seen, "rmse": math.sqrt(good / seen)}
    return {"loss": loss / seen, "accuracy": good / seen, _MAJORITY: max(classes.values()) / seen}
