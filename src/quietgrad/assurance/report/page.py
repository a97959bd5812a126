"""One self-contained HTML page about one or more finished runs: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quietgrad import __version__
from quietgrad.assurance.report.certificate import NOT_COVERED, PrivacyReport, assumptions, audit_of, privacy_report
from quietgrad.assurance.report.model import FittedModel, model_of
from quietgrad.assurance.report.spending import Spending, asked_of, spending_of
from quietgrad.charts import Lines, Series, colour_of
from quietgrad.core.errors import boundary
from quietgrad.core.files import read_json, write_atomically
from quietgrad.core.sanitize import sanitize
from quietgrad.core.session.statement import Privacy, contradiction, refuted
from quietgrad.methods.result import Result, digest_of, ledger_of, load, problems_of
from quietgrad.methods.score_noise import is_too_noisy, score_text

_METRICS = {
    "test_accuracy": "test accuracy",
    "majority_accuracy": "majority class alone",
    "test_loss": "test loss",
    "test_rmse": "test RMSE",
    "train_accuracy": "training accuracy",
    "train_loss": "training loss",
    "train_rmse": "training RMSE",
    "gradient_norm": "gradient norm",
}
_OF_HELD_OUT = ("test_", "majority_")
_SETTING_NAMES = {"look": "range estimation"}
WITH_NOISE = "with noise"
_NOT_SHOWN = "the result holds something that cannot be shown."
_MOST_ITEMS = 8  # of a setting that is a list

_SECOND_ORDER = {"escapes": "saddles left", "samples_used": "fresh records used", "alpha": "second-order level α"}
EVALUATION = "evaluation.json"
"""The file beside a run in which ``quietgrad evaluate`` or ``PrivateScore.save`` keeps a private score."""
_NUMBERS = {
    "accuracy": "accuracy", "auc": "AUC", "log_loss": "log loss", "r2": "R²", "rmse": "RMSE", "mae": "mean error",
}  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """A private score of the model, or why the file beside the run is refuted."""

    refuted: str | None
    privacy: Privacy
    numbers: list[tuple[str, str]]
    calibration: str
    classes: list[str]
    confusion: list[tuple[str, list[str]]]
    notes: list[str]
    people: str
    """Whose records were scored: "held-out" ones, or "training" ones."""
    has_negative: bool = False
    """Whether a share of the table is below zero."""


@dataclass(frozen=True)
class ReportedRun:
    """A finished run as the page shows it."""

    name: str
    anchor: str
    result: Result
    report: PrivacyReport
    command: str | None
    audit: Mapping[str, Any] | None
    evaluation: Evaluation | None
    asked: tuple[float, float] | None = None
    """ε and δ that the run's options asked for, for the model and its score together."""

    @property
    def spending(self) -> Spending | None:
        """The ε that was asked for and the ε that was spent; ``None`` for a run without a guarantee."""
        score = self.score
        return spending_of(self.result.privacy, None if score is None else score.privacy, self.asked)

    @cached_property
    def fitted(self) -> FittedModel:
        """Coefficients, features and shape functions."""
        return model_of(self.result)

    @property
    def score(self) -> Evaluation | None:
        """The private score beside the run, if its own releases prove it."""
        evaluation = self.evaluation
        return None if evaluation is None or evaluation.refuted or not evaluation.privacy.is_private else evaluation

    @property
    def metrics(self) -> list[tuple[str, str, str]]:
        """(label, value, how it was computed) of each score; a private score is read from its own file alone."""
        scores = self.result.metrics
        if (score := self.score) is not None and scores.get("private") is True:
            return [(f"{label}, {score.people}", value, WITH_NOISE) for label, value in score.numbers]
        return [
            (label, f"{scores[key]:.4f}", "held out" if key.startswith(_OF_HELD_OUT) else "private records")
            for key, label in _METRICS.items()
            if key in scores
        ]

    @property
    def seconds(self) -> int:
        """How long the run took, in whole seconds: finer times depend on the sizes of secret samples."""
        return math.ceil(self.result.seconds)

    @property
    def how_counted(self) -> str:
        """How the number of records came to be known."""
        return "counted privately, within ε" if "counted" in self.result.details else "a public number"

    @property
    def config(self) -> list[tuple[str, str]]:
        """The public settings, as text; of a setting that has settings of its own, those that are in use."""
        rows: list[tuple[str, str]] = []
        for key, value in self.result.config.items():
            name = _SETTING_NAMES.get(key, key.replace("_", " "))
            if isinstance(value, Mapping):
                in_use = {inner: item for inner, item in value.items() if item not in (None, False, 0.0, "")}
                rows += [(f"{name}: {inner.replace('_', ' ')}", _plain(item)) for inner, item in in_use.items()]
            else:
                rows.append((name, _plain(value)))
        return rows

    @property
    def model(self) -> list[tuple[str, str]]:
        """Facts about the model and its data, as pairs of text."""
        facts = self.result.details.get("model", {})
        rows = [
            ("data", str(self.result.data.get("name", "not named"))),
            (self.result.privacy.unit.in_words("records"), f"{self.result.n_public} ({self.how_counted})"),
            ("parameters", str(len(self.result.params))),
        ]
        fact_names = ("objective", "module", "loss", "regularizer", "intercept", "row_bound")
        rows += [(key.replace("_", " "), _plain(facts[key])) for key in fact_names if facts.get(key) is not None]
        details = self.result.details
        rows += [(label, _plain(details[key])) for key, label in _SECOND_ORDER.items() if key in details]
        if "generalization" in details:
            rows += [("a loss in [0, 1] on new records differs by at most", f"{details['generalization']:.3g}")]
        rows += [("stopped by", self.result.stopped_by), ("seconds", f"{self.seconds}")]
        return rows


def write_report(folders: Sequence[Path], target: Path, *, ledger: Path | None = None) -> Path:
    """Write the page about the runs in ``folders`` to ``target`` and return it.

    ``ledger`` says where they were paid, if neither their options nor their folders do.
    """
    return write_page(read_runs(folders, ledger), target)


def write_page(runs: Sequence[ReportedRun], target: Path) -> Path:
    """Write the page about ``runs`` to ``target`` and return it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, render(runs).encode())
    return target


def read_runs(folders: Sequence[Path], paid: Path | None = None) -> list[ReportedRun]:
    """Read the runs in ``folders``, prove each statement again, and compare it with its options and ledger."""
    results = [(Path(folder), load(folder)) for folder in folders]
    names = [f"{result.algorithm} on {result.data.get('name', folder.name)}" for folder, result in results]
    runs = []
    for k, (folder, result) in enumerate(results):
        name = names[k] if names.count(names[k]) == 1 else f"{names[k]} ({folder.name})"
        ledger = ledger_of(folder, paid)
        with boundary(f"{folder}: {_NOT_SHOWN}"):
            if problems := problems_of(result, folder, ledger):
                result = replace(result, privacy=refuted(result.privacy, *problems))
            command = result.details.get("repeat")  # the command, without the machine's own folders
            repeat = command if isinstance(command, str) else None
            report, audit = privacy_report(result, ledger), audit_of(folder, result.privacy)
            evaluation = _evaluation(folder / EVALUATION)
            asked = asked_of(folder)
            runs.append(ReportedRun(name, f"run-{k + 1}", result, report, repeat, audit, evaluation, asked))
    return runs


def page_environment() -> Environment:
    """Templates of pages: everything is escaped, and marks that turn a line around are spelt out."""
    environment = Environment(
        loader=PackageLoader("quietgrad.assurance.report", "."),
        autoescape=True,
        finalize=lambda value: sanitize(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=_plain, clauses=_clauses, colour=colour_of)
    environment.filters["odds"] = lambda epsilon: math.exp(min(epsilon, 700.0))
    return environment


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the page about ``runs`` as text."""
    page = page_environment().get_template("page.html.j2")
    with boundary(f"{', '.join(run.name for run in runs)}: {_NOT_SHOWN}"):
        scores = [metric for run in runs for metric in run.metrics]
        better = [metric for metric in scores if metric[2] != "private records"]  # worth a column, if there are any
        charts = _charts(runs)
        return page.render(
            runs=runs,
            metrics=list(dict.fromkeys(label for label, _, _ in better or scores)),
            scored=any(run.score is not None for run in runs),
            exact=any(how != WITH_NOISE for _, _, how in scores),
            charts=[(chart.title, chart.svg(), caption) for chart, caption in charts if chart.svg()],
            drawn=sorted({place for chart, _ in charts for place in chart.drawn}),  # a run may have no curve
            guarantees=len({(run.result.privacy.delta, run.result.privacy.relation) for run in runs}),
            assumptions=assumptions(run.result.privacy for run in runs),
            not_covered=NOT_COVERED,
            version=__version__,
            date=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        )


def _clauses(text: str) -> list[str]:
    """A threat model in the parts it was made of, each with its heading.

    >>> _clauses("setting: three servers, noise inside; no server knows it; on restart: new keys")
    ['setting: three servers, noise inside; no server knows it', 'on restart: new keys']
    """
    return re.split(r"; (?=[a-z][a-z' ]{2,30}: )", text)


def _charts(runs: Sequence[ReportedRun]) -> list[tuple[Lines, str]]:
    """Each chart and its caption."""
    curves = [[(0, 0.0), *((p[0], p[1]) for p in run.result.details.get("epsilon_curve", ()))] for run in runs]
    norms = [[(r["step"], r["estimate_norm"]) for r in run.result.history if "estimate_norm" in r] for run in runs]
    spent, releases = _on_one_axis(runs, curves, "releases")
    sizes, steps = _on_one_axis(runs, norms, "steps")
    return [
        (
            Lines("Privacy spent", spent, releases, "ε", zero=True),
            "ε proved after so many releases, at each run's δ and relation.",
        ),
        (
            Lines("Size of the gradient estimate", sizes, steps, "norm of the estimate", log_y=True),
            "Norm of each released, noisy estimate: a public number. It levels off where noise outweighs signal.",
        ),
    ]


def _on_one_axis(
    runs: Sequence[ReportedRun], curves: Sequence[Sequence[tuple[float, float]]], unit: str
) -> tuple[list[Series], str]:
    """Draw runs of very different length over the share of each run: else the short ones vanish."""
    curves = [curve if len(curve) > 2 else () for curve in curves]
    lengths = [curve[-1][0] for curve in curves if curve]
    if lengths and max(lengths) > 3 * min(lengths):
        curves = [[(100.0 * x / curve[-1][0], y) for x, y in curve] for curve in curves]
        unit = f"% of the run's {unit}"
    return [Series(run.name, curve) for run, curve in zip(runs, curves, strict=True)], unit


def _evaluation(path: Path) -> Evaluation | None:
    if not path.exists():
        return None
    with boundary(f"{path}: is not an evaluation as `quietgrad evaluate` writes it. Evaluate again."):
        evaluation_json = read_json(path)
        if evaluation_json["result"] != digest_of(path.parent):
            return None  # of a run that was here before
        privacy = Privacy.from_json(evaluation_json["privacy"])
        noisy = {**evaluation_json.get("too_noisy", {})} | {
            key: evaluation_json[key][1]
            for key in _NUMBERS
            if key in evaluation_json and _is_drowned(key, *evaluation_json[key])
        }
        numbers = [
            (label, score_text(*((None, noisy[key]) if key in noisy else evaluation_json[key])))
            for key, label in _NUMBERS.items()
            if key in evaluation_json or key in noisy
        ]
        classes = [str(c) for c in evaluation_json.get("classes") or []]
        rows = [[float(x) for x in row] for row in evaluation_json.get("confusion") or []]
        curve = [[float(x) for x in row] for row in evaluation_json.get("calibration") or [] if None not in row]
        shares = [[f"{x:.3f}" for x in row] for row in rows]
        confusion = list(zip(classes, shares, strict=True)) if rows else []
        if (
            rows and "accuracy" not in noisy
        ):  # the most frequent class in the same noisy table: what a constant answer would score
            numbers.insert(1, ("majority class alone", f"{max(map(sum, rows)):.4f}"))
        people = "training" if evaluation_json.get("people") == "training" else "held-out"
        notes = [str(note) for note in evaluation_json.get("notes", [])]
        why = contradiction(privacy)
        negative = any(share < 0.0 for row in rows for share in row)
        return Evaluation(why, privacy, numbers, _calibration(curve), classes, confusion, notes, people, negative)


def _is_drowned(name: str, value: float | None, error: float | None) -> bool:
    """Whether a number that an older version wrote would not be stated today."""
    return value is None or error is None or is_too_noisy(name, float(value), float(error))


def _calibration(rows: Sequence[Sequence[float]]) -> str:
    """Draw observed frequency over predicted probability, with two standard errors, beside the diagonal."""
    if not rows:
        return ""
    points, bars = [(row[0], min(1.0, max(0.0, row[1]))) for row in rows], [2.0 * row[2] for row in rows]
    lines = Series("observed", points, bars), Series("as predicted", [(0.0, 0.0), (1.0, 1.0)])
    return Lines("Calibration", lines, "predicted probability", "observed frequency", zero=True).svg()


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):  # ranges of a thousand columns would fill pages
        runs = [(item, len(list(same))) for item, same in groupby(map(_plain, value))]
        items = [f"{count} × {item}" if count > 1 else item for item, count in runs[:_MOST_ITEMS]]
        more = [f"… ({len(value)} in all)"] if len(runs) > _MOST_ITEMS else []
        return f"[{', '.join([*items, *more])}]"
    return str(value)
