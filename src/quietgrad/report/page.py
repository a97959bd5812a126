"""One self-contained HTML page about one or more finished runs: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quietgrad import __version__
from quietgrad.charts import Bars, Chart, Intervals, Lines, Series
from quietgrad.errors import boundary
from quietgrad.files import write_atomically
from quietgrad.report.certificate import (
    NOT_COVERED,
    AuditResult,
    RunCertificate,
    assumptions,
    audit_of,
    certify_run,
)
from quietgrad.report.tables import Evaluation, table_section
from quietgrad.sanitize import sanitize
from quietgrad.training.result import Result, ledger_of, load, problems_of, refuted

_METRICS = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "test_rmse": "test RMSE",
    "train_accuracy": "training accuracy",
    "train_loss": "training loss",
    "train_rmse": "training RMSE",
    "gradient_norm": "gradient norm",
}
WITH_NOISE = "with noise"
_NOT_SHOWN = "the result holds something that cannot be shown."
_MOST_COEFFICIENTS = 20
_MOST_ITEMS = 8  # of a setting that is a list

_SECOND_ORDER = {"escapes": "saddles left", "samples_used": "fresh records used", "alpha": "second-order level α"}


@dataclass(frozen=True)
class ReportedRun:
    """A finished run as the page shows it."""

    name: str
    anchor: str
    result: Result
    certificate: RunCertificate
    command: str | None = None
    audit: AuditResult | None = None
    score: Evaluation | None = None
    """The private score beside the run, if its own releases prove it."""

    @property
    def metrics(self) -> list[tuple[str, str, str]]:
        """(label, value, how it was computed) of each score; a private score is read from its own file alone."""
        scores = self.result.metrics
        if self.score is not None and scores.get("private") is True:
            return [(f"{label}, {self.score.people}", value, WITH_NOISE) for label, value in self.score.numbers]
        return [
            (label, f"{scores[key]:.4f}", "held out" if key.startswith("test_") else "private records")
            for key, label in _METRICS.items()
            if key in scores
        ]

    @property
    def config(self) -> list[tuple[str, str]]:
        """The public settings, as text."""
        return [(key.replace("_", " "), _plain(value)) for key, value in self.result.config.items()]

    @property
    def model(self) -> list[tuple[str, str]]:
        """What was fitted, to what."""
        facts = self.result.details.get("model", {})
        rows = [
            ("data", str(self.result.data.get("name", "not named"))),
            (self.result.privacy.unit.in_words("records (public number)"), f"{self.result.n_public}"),
            ("parameters", str(len(self.result.params))),
        ]
        said = ("objective", "regularizer", "intercept", "row_bound")
        rows += [(key.replace("_", " "), _plain(facts[key])) for key in said if facts.get(key) is not None]
        found = self.result.details
        rows += [(label, _plain(found[key])) for key, label in _SECOND_ORDER.items() if key in found]
        if "generalization" in found:
            rows += [("a loss in [0, 1] on new records differs by at most", f"{found['generalization']:.3g}")]
        rows += [("stopped by", self.result.stopped_by), ("seconds", f"{math.ceil(self.result.seconds)}")]
        return rows


def write_report(
    folders: Sequence[Path], target: Path, runs: Sequence[ReportedRun] | None = None, ledger: Path | None = None
) -> Path:
    """Write the page about the runs in ``folders`` (read before, or now) to ``target`` and return it.

    ``ledger`` says where they were paid, if neither their options nor their folders do.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) for folder in folders]
    write_atomically(target, render(paths, read_runs(paths, ledger) if runs is None else runs).encode())
    return target


def read_runs(folders: Sequence[Path], paid: Path | None = None) -> list[ReportedRun]:
    """The runs in ``folders``, each statement proved again and held against its options and its ledger."""
    found = [(folder, load(folder)) for folder in folders]
    names = [f"{result.algorithm} on {result.data.get('name', folder.name)}" for folder, result in found]
    runs = []
    for k, (folder, result) in enumerate(found):
        name = names[k] if names.count(names[k]) == 1 else f"{names[k]} ({folder.name})"
        ledger = ledger_of(folder, paid)
        with boundary(f"{folder}: {_NOT_SHOWN}"):
            problems = problems_of(result, folder, ledger)
            if problems:
                result = replace(result, privacy=refuted(result.privacy, *problems))
            certificate, audit = certify_run(result, ledger), audit_of(folder, result.privacy)
            score = table_section(result, Path(folder)).evaluation
            if score is not None and (score.refuted or not score.privacy.is_private):
                score = None
            told = result.details.get("repeat")  # the command, without the machine's own folders
            repeat = told if isinstance(told, str) else None
            runs.append(ReportedRun(name, f"run-{k + 1}", result, certificate, repeat, audit, score))
    return runs


def page_environment() -> Environment:
    """Templates of pages: everything is escaped, and marks that turn a line around are spelt out."""
    environment = Environment(
        loader=PackageLoader("quietgrad.report", "."),
        autoescape=True,
        finalize=lambda value: sanitize(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=_plain, clauses=_clauses)
    environment.filters["odds"] = lambda epsilon: math.exp(min(epsilon, 700.0))
    return environment


def render(folders: Sequence[Path], runs: Sequence[ReportedRun] | None = None) -> str:
    """The page about the runs in ``folders`` as text."""
    runs = read_runs(folders) if runs is None else runs
    page = page_environment().get_template("page.html.j2")
    with boundary(f"{', '.join(map(str, folders))}: {_NOT_SHOWN}"):
        scores = [metric for run in runs for metric in run.metrics]
        better = [metric for metric in scores if metric[2] != "private records"]  # worth a column, if there are any
        return page.render(
            runs=runs,
            metrics=list(dict.fromkeys(label for label, _, _ in better or scores)),
            exact=any(how != WITH_NOISE for _, _, how in scores),
            charts=[(chart.title, chart.svg(), caption) for chart, caption in charts_of(runs)],
            promises=len({(run.result.privacy.delta, run.result.privacy.relation) for run in runs}),
            assumptions=assumptions(run.result.privacy for run in runs),
            not_covered=NOT_COVERED,
            tables=[table_section(run.result, Path(folder)) for run, folder in zip(runs, folders, strict=True)],
            version=__version__,
            date=datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC"),
        )


def _clauses(text: str) -> list[str]:
    """A threat model in the parts it was made of, each with its heading.

    >>> _clauses("setting: three servers, noise inside; nobody knows it; on restart: new keys")
    ['setting: three servers, noise inside; nobody knows it', 'on restart: new keys']
    """
    return re.split(r"; (?=[a-z][a-z' ]{2,30}: )", text)


def charts_of(runs: Sequence[ReportedRun]) -> list[tuple[Chart, str]]:
    """Each chart that has something to show, and its caption."""
    spent = [
        Series(run.name, [(0, 0.0), *((p[0], p[1]) for p in run.result.details.get("epsilon_curve", ()))])
        for run in runs
    ]
    norms = [
        Series(run.name, [(r["step"], r["estimate_norm"]) for r in run.result.history if "estimate_norm" in r])
        for run in runs
    ]
    (spent, releases), (norms, steps) = _on_one_axis(spent, "releases"), _on_one_axis(norms, "steps")
    totals = {run.certificate.account.account: run.certificate.account for run in runs if run.certificate.account}
    accounts = [(name, total.epsilon, total.cap) for name, total in totals.items() if total.epsilon is not None]
    candidates: list[tuple[Chart, str]] = [
        (
            Lines("Privacy spent", spent, releases, "ε", zero=True),
            "ε proved after so many releases, at each run's δ and relation.",
        ),
        (
            Lines("Size of the gradient estimate", norms, steps, "norm of the estimate", log_y=True),
            "Norm of each released, noisy estimate: a public number. It levels off where noise outweighs signal.",
        ),
        (Bars("Budget of the account", accounts, "ε"), "ε that all runs of an account have spent, and its cap."),
        _coefficients(runs),
    ]
    return [(chart, caption) for chart, caption in candidates if chart.svg()]


def _coefficients(runs: Sequence[ReportedRun]) -> tuple[Intervals, str]:
    """The coefficients of one linear model with standard errors, farthest from zero for their error first."""
    result = runs[0].result
    covariance = result.details.get("coefficient_covariance") or ()
    variances = [float(row[k]) for k, row in enumerate(covariance)]
    features = result.details.get("model", {}).get("feature_names") or [f"x{k}" for k in range(len(variances))]
    rows = []
    # Coefficients of scaled targets mean nothing to a reader.
    if len(runs) == 1 and len(variances) == len(result.params) and result.details.get("target_range") is None:
        names = [*features, "(intercept)"][: len(variances)]
        values = zip(names, map(float, result.params), map(math.sqrt, variances), strict=True)
        ranked = sorted(values, key=lambda row: -abs(row[1]) / row[2])[:_MOST_COEFFICIENTS]
        rows = [(str(name), value, value - 1.96 * error, value + 1.96 * error) for name, value, error in ranked]
    caption = "95 % intervals that cover sampling and privacy noise; the largest of them."
    return Intervals("Coefficients", rows, "coefficient"), caption


def _on_one_axis(series: list[Series], unit: str) -> tuple[list[Series], str]:
    """Runs of very different length are drawn over the share of each run, else the short ones vanish."""
    series = [line if len(line.points) > 2 else Series(line.name, ()) for line in series]
    lengths = [line.points[-1][0] for line in series if line.points]
    if not lengths or max(lengths) <= 3 * min(lengths):
        return series, unit
    shared = [Series(line.name, [(100.0 * x / line.points[-1][0], y) for x, y in line.points]) for line in series]
    return shared, f"% of the run's {unit}"


def _plain(value: Any) -> str:
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
        said = [f"{count} × {item}" if count > 1 else item for item, count in runs[:_MOST_ITEMS]]
        more = [f"… ({len(value)} in all)"] if len(runs) > _MOST_ITEMS else []
        return f"[{', '.join([*said, *more])}]"
    return str(value)
