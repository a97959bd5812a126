"""What the page says of models of tables: an additive one's functions, and a private evaluation beside the run.

Both are arithmetic on paid releases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad.charts import Lines, Series, Steps
from quietgrad.errors import boundary
from quietgrad.files import read_json
from quietgrad.training.result import Privacy, Result, contradiction, digest_of

EVALUATION = "evaluation.json"
"""Beside a run: what ``quietgrad evaluate`` or ``PrivateScore.save`` found."""
_NUMBERS = {
    "accuracy": "accuracy", "auc": "AUC", "log_loss": "log loss", "r2": "R²", "rmse": "RMSE", "mae": "mean error",
}  # fmt: skip
_MOST_SHAPES = 60


@dataclass(frozen=True)
class Evaluation:
    """How good the model is on held-out people, if the file beside the run bears it out."""

    refuted: str | None
    privacy: Privacy
    numbers: list[tuple[str, str]]
    calibration: str
    classes: list[str]
    confusion: list[tuple[str, list[str]]]
    notes: list[str]
    people: str = "held-out"
    """Whose records were scored: "held-out" ones, or "training" ones."""


@dataclass(frozen=True)
class TableSection:
    """The parts of a run's page that only models of tables have."""

    evaluation: Evaluation | None
    shapes: list[tuple[str, str]]
    more: int = 0


def table_section(result: Result, folder: Path) -> TableSection:
    """Read what there is; a file that is not what it should be is refused."""
    shapes = result.details.get("shapes") or []
    drawn = [(str(s["name"]), _shape(s)) for s in shapes[:_MOST_SHAPES]]
    return TableSection(_evaluation(folder / EVALUATION), drawn, max(0, len(shapes) - _MOST_SHAPES))


def _evaluation(path: Path) -> Evaluation | None:
    if not path.exists():
        return None
    with boundary(f"{path}: is not an evaluation as `quietgrad evaluate` writes it. Evaluate again."):
        said = read_json(path)
        if said["result"] != digest_of(path.parent):
            return None  # of a run that was here before
        privacy = Privacy.from_json(said["privacy"])
        why = contradiction(privacy)
        numbers = [
            (label, f"{said[key][0]:.4f} ± {said[key][1]:.4f}") for key, label in _NUMBERS.items() if key in said
        ]
        classes = [str(c) for c in said.get("classes") or []]
        rows = [[f"{float(x):.3f}" for x in row] for row in said.get("confusion") or []]
        curve = [[float(x) for x in row] for row in said.get("calibration") or [] if None not in row]
        notes = [str(note) for note in said.get("notes", [])]
        confusion = list(zip(classes, rows, strict=True)) if rows else []
        if rows:  # the most frequent class in the same noisy table: what a constant answer would score
            majority = max(sum(float(x) for x in row) for row in said["confusion"])
            numbers.insert(1, ("majority class alone", f"{majority:.4f}"))
    if why is not None:
        return Evaluation(why, privacy, [], "", [], [], [])
    people = "training" if said.get("people") == "training" else "held-out"
    return Evaluation(None, privacy, numbers, _calibration(curve), classes, confusion, notes, people)


def _shape(shape: dict[str, Any]) -> str:
    """One function of an additive model."""
    values, errors = ([float(v) for v in shape[key]] for key in ("values", "errors"))
    where = [str(w) for w in shape["where"]] if shape["named"] else [float(x) for x in shape["where"]]
    return Steps(str(shape["name"]), where, values, errors, "effect on the score").svg()


def _calibration(rows: Sequence[Sequence[float]]) -> str:
    """Observed frequency over predicted probability, with two standard errors, beside the diagonal."""
    if not rows:
        return ""
    seen = Series(
        "observed", [(row[0], min(1.0, max(0.0, row[1]))) for row in rows], [2.0 * row[2] for row in rows]
    )
    ideal = Series("as predicted", [(0.0, 0.0), (1.0, 1.0)])
    return Lines("Calibration", (seen, ideal), "predicted probability", "observed frequency", zero=True).svg()
