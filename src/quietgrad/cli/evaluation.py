"""Scores of a model. They look at records without noise, so every one of them is data and is marked so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.cli.scans import scan_scores

if TYPE_CHECKING:
    from quietgrad.data import Dataset
    from quietgrad.objectives.tables.frame import Frame

HELD_OUT = "held-out records, without noise"
TRAINING = "private training records, without noise"


def evaluate(
    objective: Any, params: npt.NDArray[np.float64], data: Dataset, *, train: bool, frame: Frame | None = None
) -> dict[str, Any]:
    """Scores on the held-out part, if there is one, and on the training part if ``train`` says so.

    ``frame`` is the box that the model keeps rows and predictions in. ``"private": false`` marks all scores;
    ``"computed_on"`` says whose records each was computed on.
    """
    metrics: dict[str, Any] = {}
    where: dict[str, str] = {}
    if data.X_test is not None:
        scores = _scores(objective, params, (data.X_test, data.y_test), data.task, frame)
        metrics |= {f"test_{name}": value for name, value in scores.items()}
        where |= {f"test_{name}": HELD_OUT for name in scores}
    if train:
        scores = _scores(objective, params, (data.X, data.y), data.task, frame)
        records = objective.prepare(getattr(data, "table", None) or (data.X, data.y))
        gradient = float(np.linalg.norm(objective.risk_gradient(records, params)))
        metrics |= {f"train_{name}": value for name, value in scores.items()} | {"gradient_norm": gradient}
        where |= {name: TRAINING for name in metrics if not name.startswith("test_")}
    return {**metrics, "private": False, "computed_on": where} if metrics else {}


def _scores(
    objective: Any, params: npt.NDArray[np.float64], part: tuple[Any, Any], task: str, frame: Frame | None
) -> dict[str, float]:
    if part[1] is None:
        return scan_scores(objective, params, part[0], task, frame)
    X = part[0] if frame is None else frame.clipped(part[0])
    records = objective.prepare((X, part[1]))
    answers = objective.predict(records, params)
    if frame is not None and frame.target is not None:
        answers = np.clip(answers, *frame.target)
    scores = {"loss": float(objective.risk(records, params) - objective.regularizer.value(params))}
    if task == "regression":
        scores["rmse"] = float(np.sqrt(np.mean((answers - part[1]) ** 2)))
    else:
        scores["accuracy"] = float(np.mean(answers == part[1]))
    return scores
