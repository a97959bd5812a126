"""What the page says of models of tables: an additive one's functions, and a private evaluation beside the run.

Both are arithmetic on paid releases. Drawings take the page's text colour, so they need no style of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from quietgrad.errors import boundary
from quietgrad.files import read_json
from quietgrad.training.result import Privacy, Result, contradiction, digest_of

EVALUATION = "evaluation.json"
"""Beside a run: what ``quietgrad evaluate`` or ``PrivateScore.save`` found."""
_NUMBERS = {
    "accuracy": "accuracy", "auc": "AUC", "log_loss": "log loss", "r2": "R²", "rmse": "RMSE", "mae": "mean error",
}  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 300, 180, 44, 30, 10
_MOST_SHAPES, _MOST_NAMES = 60, 12


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
    if why is not None:
        return Evaluation(why, privacy, [], "", [], [], [])
    return Evaluation(None, privacy, numbers, _calibration(curve), classes, confusion, notes)


def _frame(
    xs: Sequence[float], ys: Sequence[float]
) -> tuple[Callable[[float], float], Callable[[float], float], list[str]]:
    """Maps into the drawing, and its axes with their ends named."""
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in (xs, ys))
    x1, y1 = (x1 if x1 > x0 else x0 + 1.0), (y1 if y1 > y0 else y0 + 1.0)

    def across(x: float) -> float:
        return float(_LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - 8))

    def down(y: float) -> float:
        return float(_HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _BOTTOM - _TOP))

    marks = [
        _text(_LEFT - 6, down(y0), "end", f"{y0:.3g}"),
        _text(_LEFT - 6, down(y1) + 8, "end", f"{y1:.3g}"),
    ]
    if y0 < 0.0 < y1:
        y = down(0.0)
        line = f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
        marks += [line, _text(_LEFT - 6, y + 4, "end", "0")]
    return across, down, marks


def _shape(shape: dict[str, Any]) -> str:
    """One function with a band of two standard errors: steps over bins, or a bar for each category."""
    values, errors = ([float(v) for v in shape[key]] for key in ("values", "errors"))
    low = [v - 2.0 * e for v, e in zip(values, errors, strict=True)]
    high = [v + 2.0 * e for v, e in zip(values, errors, strict=True)]
    named = bool(shape["named"])
    where = [float(k) for k in range(len(values) + 1)] if named else [float(x) for x in shape["where"]]
    across, down, parts = _frame(where, [*low, *high, 0.0])
    for k, value in enumerate(values):
        left, right = across(where[k]), across(where[k + 1])
        top, bottom = down(high[k]), down(low[k])
        parts.append(
            f'<rect x="{left:.1f}" width="{right - left:.1f}" y="{top:.1f}" height="{bottom - top:.1f}" '
            'fill="currentColor" opacity="0.16"/>'
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{down(value):.1f}" y2="{down(value):.1f}" '
            'stroke="currentColor" stroke-width="2"/>'
        )
        if named and len(values) <= _MOST_NAMES:
            parts.append(_text((left + right) / 2.0, _HEIGHT - 12, "middle", _short(str(shape["where"][k]))))
    if not named:
        parts += [_text(_LEFT, _HEIGHT - 12, "start", f"{where[0]:.4g}")]
        parts += [_text(_WIDTH - 8, _HEIGHT - 12, "end", f"{where[-1]:.4g}")]
    span = f"from {min(values):.3g} to {max(values):.3g}"
    return _svg(parts, f"{shape['name']}: effect on the score {span}, bands of two standard errors")


def _calibration(rows: Sequence[Sequence[float]]) -> str:
    """Observed frequency over predicted probability, with two standard errors, beside the diagonal."""
    if not rows:
        return ""
    across, down, parts = _frame([0.0, 1.0], [0.0, 1.0])
    parts.append(
        f'<line class="grid" x1="{across(0):.1f}" y1="{down(0):.1f}" x2="{across(1):.1f}" y2="{down(1):.1f}"/>'
    )
    for predicted, seen, error, _ in rows:
        ends = [down(min(1.0, max(0.0, seen + sign * 2.0 * error))) for sign in (-1.0, 1.0)]
        x, y = across(predicted), down(min(1.0, max(0.0, seen)))
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}" stroke="currentColor"/>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="currentColor"/>'
        )
    parts += [
        _text(across(0), _HEIGHT - 12, "start", "0"),
        _text(across(0.5), _HEIGHT - 12, "middle", "predicted"),
        _text(across(1), _HEIGHT - 12, "end", "1"),
        _text(across(0) + 4, down(1) + 8, "start", "observed"),
    ]
    return _svg(parts, f"Calibration: observed frequency over predicted probability in {len(rows)} bins")


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width: 24rem" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _short(name: str) -> str:
    return name if len(name) <= 8 else f"{name[:7]}…"
