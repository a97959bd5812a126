"""Model cards: what a model is for, what it was trained on, and what it guarantees, as Markdown or HTML.

A card states declared facts and paid releases only. Scores that were computed without noise are left out. The
Markdown begins with the metadata block that model hubs read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quietgrad import __version__
from quietgrad.assurance.report.certificate import NOT_COVERED, SCORES
from quietgrad.assurance.report.page import Evaluation, ReportedRun, page_environment, read_runs
from quietgrad.core.errors import DataError
from quietgrad.core.files import write_atomically
from quietgrad.core.sanitize import sanitize

MARKDOWN, HTML = "MODEL_CARD.md", "model_card.html"
FILL_IN = "To fill in: "
_MOST_NAMES = 40
_TASKS = {
    "binary": "tabular-classification",
    "multiclass": "tabular-classification",
    "regression": "tabular-regression",
}


@dataclass(frozen=True)
class Section:
    """One part of a card: paragraphs, facts and a command."""

    title: str
    text: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    code: tuple[str, ...] = ()


@dataclass(frozen=True)
class Card:
    """A model card: metadata for hubs, and sections for readers."""

    name: str
    metadata: dict[str, Any]
    sections: tuple[Section, ...]

    def markdown(self) -> str:
        """The card as Markdown, with its metadata block first."""
        metadata = [f"{key}: {json.dumps(value)}" for key, value in self.metadata.items()]  # JSON is YAML
        parts = ["\n".join(["---", *metadata, "---"]), f"# {_plain(self.name)}"]
        for section in self.sections:
            parts.append(f"## {section.title}")
            parts += [_plain(text) for text in section.text]
            if section.facts:
                cells = [[_plain(text).replace("|", "\\|") for text in row] for row in section.facts]
                rows = [f"| {name} | {value} |" for name, value in cells]
                parts.append("\n".join(["| | |", "|---|---|", *rows]))
            if section.code:
                parts.append("\n".join(["```", *map(sanitize, section.code), "```"]))
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """The card as one page that loads nothing from elsewhere."""
        return page_environment().get_template("card.html.j2").render(card=self, version=__version__)


def card_of(folder: Path, ledger: Path | None = None) -> Card:
    """Return the card of a finished run; raise ``DataError`` if its statement is refuted."""
    run = read_runs([folder], ledger)[0]
    privacy = run.result.privacy
    if privacy.refuted:
        raise DataError(
            f"{folder}: there is no card for a refuted statement ({'; '.join(privacy.refuted)}). "
            "Restore the files of the run, or train again."
        )
    sections = (
        Section("Intended use", (f"{FILL_IN}who should use this model, for which decisions, and for which not.",)),
        _model(run),
        _data(run),
        _guarantee(run),
        _scores(run.evaluation),
        Section("Limitations and risks", (
            f"{FILL_IN}groups for which the model was not tested, and known failures.",
            "Noise hurts small groups more than large ones.",
        )),
        Section("How to use it", code=(
            "pip install quietgrad", f"quietgrad predict {folder.name} new.csv -o predictions.csv",
        )),
        Section("Contact and licence", (f"{FILL_IN}who answers questions, and under which licence.",)),
    )  # fmt: skip
    return Card(run.name, _metadata(run), sections)


def write_cards(folder: Path, output: Path | None = None, ledger: Path | None = None) -> list[Path]:
    """Write the card to ``output`` (.md or .html); without one, both into the run's folder."""
    targets = [folder / MARKDOWN, folder / HTML] if output is None else [output]
    if any(target.suffix not in (".md", ".html") for target in targets):
        raise DataError(f"{output}: a card is a .md or .html file. Nothing was written.")
    card = card_of(folder, ledger)
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, (card.markdown() if target.suffix == ".md" else card.html()).encode())
    return targets


def _model(run: ReportedRun) -> Section:
    elsewhere = {"data", run.result.privacy.unit.in_words("records"), "seconds", "stopped by"}
    facts = [(name, value) for name, value in run.model if name not in elsewhere]
    written = ("written by", f"quietgrad {run.result.versions.get('quietgrad', '?')}")
    return Section("Model", facts=(("algorithm", run.result.algorithm), *facts, written))


def _data(run: ReportedRun) -> Section:
    """Build the section of declared facts about the data. n is public, declared or counted with noise."""
    result = run.result
    facts = result.details.get("model", {})
    unit = result.privacy.unit.in_words("records")
    number = f"{result.n_public} ({run.how_counted})"
    rows = [("data set", str(result.data.get("name", "not named"))), (unit, number)]
    labels = {"features": "features", "feature_names": "feature names", "class_names": "classes"}
    labels["row_bound"] = "declared bound on a row's norm"
    for key, label in labels.items():
        value = facts.get(key)
        if isinstance(value, list):
            more = f", … ({len(value)} in all)" if len(value) > _MOST_NAMES else ""
            rows.append((label, ", ".join(map(str, value[:_MOST_NAMES])) + more))
        elif value is not None:
            rows.append((label, f"{value:.6g}"))
    text = (
        "Declared facts only. Nothing here was computed from the records without noise.",
        f"{FILL_IN}where the records come from, when they were collected, and on which legal basis.",
    )
    return Section("Training data", text, tuple(rows))


def _guarantee(run: ReportedRun) -> Section:
    privacy, report = run.result.privacy, run.report
    if not privacy.is_private or privacy.epsilon is None:
        why = "; ".join(privacy.notes) or "no noise was added"
        return Section("Privacy guarantee", (f"None: this model is NOT PRIVATE ({why}).",))
    words = [
        f"{privacy}.",
        f"{report.relation_words} An attacker who tries to detect {report.protected} and accepts 5 % false "
        f"alarms succeeds at most {100 * (report.best_guess or 1.0):.1f} % of the time.",
    ]
    if privacy.condition:
        words.append(f"Condition: the guarantee holds {privacy.condition}.")
    rows = [
        ("ε", f"{privacy.epsilon:.4g}"),
        ("δ", f"{privacy.delta:g}"),
        ("neighbouring relation", str(privacy.relation)),
        ("privacy unit", str(privacy.unit)),
        ("proved by", str(privacy.accountant)),
        ("adversary", privacy.adversary),
    ]
    if account := report.account:
        spent = "no common ε" if account.epsilon is None else f"ε = {account.epsilon:.4g} at δ = {account.delta:g}"
        cap = f", capped at {account.cap:g}" if account.cap else ""
        runs = f"{account.runs} run{'' if account.runs == 1 else 's'}"
        note = f". {account.note}" if account.note else ""
        rows.append((f"all runs of account “{account.account}”", f"{spent}, {runs}{cap}{note}"))
    if audit := run.audit:
        rows.append(("audit", f"{audit['verdict']}: ε ≥ {audit['epsilon_lower']:.3g} seen in {audit['runs']} runs"))
    rows += [("not covered", line) for line in NOT_COVERED if line is not SCORES]
    return Section("Privacy guarantee", tuple(words), tuple(rows))


def _scores(evaluation: Evaluation | None) -> Section:
    title = f"Scores on {'held-out' if evaluation is None else evaluation.people} people"
    if evaluation is None or evaluation.refuted or not evaluation.privacy.is_private:
        return Section(title, (
            "No private score stands beside this run. Exact scores are data about the held-out people and are left "
            "out. `quietgrad evaluate RUN DATA --epsilon 0.3` releases private ones.",))  # fmt: skip
    text = f"Released with noise: {evaluation.privacy}. ± is one standard error of noise and sampling together."
    return Section(title, (text,), tuple(evaluation.numbers))


def _metadata(run: ReportedRun) -> dict[str, Any]:
    """The block that model hubs read: library, task, tags and the guarantee."""
    privacy = run.result.privacy
    task = _TASKS.get(str(run.result.details.get("model", {}).get("task")), "other")
    private = ["differential-privacy"] if privacy.is_private else []
    meta: dict[str, Any] = {"license": "other", "library_name": "quietgrad", "pipeline_tag": task,
                            "tags": ["quietgrad", task, *private]}  # fmt: skip
    if privacy.is_private:
        stated = privacy.to_json()
        keys = ("epsilon", "delta", "relation", "unit", "accountant", "condition")
        meta["privacy"] = {key: stated[key] for key in keys}
    return meta


def _plain(text: str) -> str:
    """Text from files, without what Markdown or HTML would take for markup.

    >>> _plain("<b>a|b</b> [x](y)")
    '\\\\<b\\\\>a|b\\\\</b\\\\> \\\\[x\\\\](y)'
    """
    return re.sub(r"([\[\]<>*_#\\])", r"\\\1", sanitize(text))
