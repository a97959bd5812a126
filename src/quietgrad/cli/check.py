"""`quietgrad check`: what a careful colleague would say of a file before a budget is spent on it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import typer

from quietgrad.cli.options import say, usage
from quietgrad.cli.run_spec import RunSpec, with_options
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.training import training_of
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.dataset import Dataset
from quietgrad.data.drafting import draft_schema, read_text_cells
from quietgrad.data.inspection import ColumnRemark, inspect_columns, inspect_ids, inspect_labels, inspect_left_out
from quietgrad.data.schema import Schema, read_schema
from quietgrad.estimators.holdout import expected_error
from quietgrad.methods.score_noise import TOO_NOISY

_TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".pq", ".gz", ".bz2", ".xz")
_LARGEST = 100 * 2**20  # bytes of a file that `train` looks at unasked
_OWNER = (
    "For the owner of the records: this was read without noise. It stands on this terminal alone, and in no file."
)
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad check people.csv --schema schema.toml --epsilon 1 --holdout 0.2")
@with_options()
def check(spec: RunSpec) -> None:
    """Say what would be wasted if this file were trained on with the same options as `quietgrad train`.

    It looks at labels, bounds, gaps, ids, rare classes, δ and n, and how uncertain a score would be. It is the
    owner's look at private records: printed to this terminal, stored nowhere, charged to no account. The exit code
    is 1 if training would be refused.
    """
    with usage():
        spec.check()
    findings, refused = findings_of(spec)
    name = "the demo's data" if spec.data is None else Path(spec.data).name
    for finding in sorted(findings, key=lambda finding: not finding.wastes):
        say(f"{'!' if finding.wastes else '·'} {sanitize(finding.about)}: {sanitize(finding.text, most=400)}.")
    if refused is not None:
        say(f"! train would refuse: {refused}")
    wasted = sum(finding.wastes for finding in findings) + (refused is not None)
    say(f"{name}: {wasted or 'nothing'} to mend{' (marked !)' if wasted else ''}. Nothing was charged.\n{_OWNER}")
    if refused is not None:
        raise typer.Exit(1)


def findings_of(spec: RunSpec) -> tuple[list[ColumnRemark], str | None]:
    """Return remarks on the run that ``spec`` describes, and the reason why training would be refused, if any."""
    findings = _of_cells(spec)
    try:
        data = spec.load_data()
        with usage():
            training_of(spec, data)
    except (DataError, ValueError, typer.BadParameter) as error:
        return findings, str(error)
    findings += inspect_left_out(data.notes)
    if isinstance(data, ScannedData):
        return [*findings, ColumnRemark("file", "it is scanned, so single cells are not looked at here")], None
    if not any(finding.about in (data.name, "label") for finding in findings) and data.undeclared:
        findings.append(ColumnRemark("label", f"{data.undeclared} labels match no class", True))
    findings += _constant(data)
    guarantee = spec.budget()
    return findings + ([] if guarantee is None else _of_budget(spec, data, guarantee)), None


def is_worth_a_check(spec: RunSpec) -> bool:
    """Whether `train` should point to `check`: something would be wasted, in a file of a size to be looked at."""
    if spec.data is None or not Path(spec.data).is_file() or Path(spec.data).stat().st_size > _LARGEST:
        return False
    return any(finding.wastes for finding in _of_cells(spec))


def _of_cells(spec: RunSpec) -> list[ColumnRemark]:
    """Return remarks on the cells of a delimited, parquet or xlsx file, and none on files of other kinds."""
    path = None if spec.data is None else Path(spec.data)
    if path is None or not path.is_file() or path.suffix.lower() not in _TABLES:
        return []
    try:
        schema = None if spec.schema is None else read_schema(spec.schema)
        delimiter = spec.delimiter if schema is None else schema.delimiter
        encoding = spec.encoding if schema is None else schema.encoding
        cells = read_text_cells(path, delimiter, encoding)
        draft = draft_schema(path, label=_label_of(spec, schema), delimiter=delimiter, encoding=encoding)
    except DataError:
        return []  # reading the file says it better
    aside = [spec.person, spec.keep, *(spec.drop or ())]
    findings = inspect_columns(cells, schema, aside)
    label, classes = (draft.label, spec.classes) if schema is None else (schema.label, schema.classes)
    if schema is None or schema.label_kind != "yes/no":
        listed = classes.split(",") if isinstance(classes, str) else classes
        findings += inspect_labels(label, cells[label], listed)
    ids = [column.name for column in draft.columns if column.kind == "id" and column.name not in aside[1:]]
    findings += inspect_ids(cells, ids, spec.person)
    if schema is None:
        named = [column.name for column in draft.columns if column.kind in ("category", "text", "date", "yes/no")]
        if words := [name for name in named if name not in (*aside, label)]:
            text = f"columns of words or dates need a schema: {', '.join(map(sanitize, words[:10]))}"
            findings.append(ColumnRemark("columns", text, True))
    return findings


def _label_of(spec: RunSpec, schema: Schema | None) -> str | None:
    return spec.label if schema is None else schema.label


def _constant(data: Dataset) -> list[ColumnRemark]:
    """Features that are the same for all records, which only noise moves."""
    if not isinstance(data.X, np.ndarray) or data.feature_names is None or not len(data.X):
        return []
    same = np.flatnonzero((data.X[0] == data.X).all(axis=0))
    names = ", ".join(sanitize(data.feature_names[k]) for k in same[:10])
    text = f"{len(same)} of {data.d} features are the same for all records ({names}): drop the columns"
    return [ColumnRemark("features", text, len(same) > data.d // 10)] if len(same) else []


def _of_budget(spec: RunSpec, data: Dataset, guarantee: Budget) -> list[ColumnRemark]:
    """δ against n, and how uncertain the score and the coefficients will be."""
    n = data.n if data.person is None else len(set(data.person.tolist()))
    unit = "records" if data.person is None else "people"
    findings = []
    if spec.delta * n >= 1.0:
        text = f"{spec.delta:g} is not below 1/n = {1.0 / n:.2g} and would allow one record to be published"
        findings.append(ColumnRemark("δ", text, True))
    elif spec.delta * n > 0.1:
        findings.append(ColumnRemark("δ", f"{spec.delta:g} is close to 1/n = {1.0 / n:.2g}; choose less"))
    mu = gaussian_mu(guarantee.epsilon, guarantee.delta) / (1 if guarantee.relation is Relation.ADD_REMOVE else 2)
    # Noise on a mean gradient of √(d + 1) numbers, over the curvature of a feature that fills its range evenly.
    off = 24.0 * math.sqrt(data.d + 1.0) / (n * mu)
    text = f"{n} {unit} and {data.d} features at ε = {guarantee.epsilon:.3g}: a coefficient is off by about"
    findings.append(ColumnRemark("model", f"{text} ± {off:.2g} per range of its feature", off > 5.0))
    score = spec.budget(of_score=True)
    if score is not None and data.X_test is not None:
        held = data.X_test.shape[0] if data.person_test is None else len(set(data.person_test.tolist()))
        error = expected_error(held, score, classes=0 if data.classes is None else len(data.classes))
        hopeless = error > TOO_NOISY
        advice = "; it would not be released. Hold out more, raise --score-share, or leave --holdout out"
        said = f"of {held} held-out {unit}: its error will be about ± {error:.1g}{advice if hopeless else ''}"
        findings.append(ColumnRemark("score", said, hopeless))
    return findings
