"""`quietgrad check`: what a careful colleague would say of a file before a budget is spent on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import typer

from quietgrad.cli.options import say, usage
from quietgrad.cli.run_spec import RunSpec, with_options
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.training import training_of
from quietgrad.core.accounting.budget import Budget, Relation, advised_delta
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import Date, is_number
from quietgrad.data.dataset import Dataset
from quietgrad.data.drafting import draft_schema, named_columns, read_text_cells
from quietgrad.data.inspection import (
    ColumnRemark,
    grouped_remarks,
    inspect_columns,
    inspect_ids,
    inspect_labels,
    inspect_left_out,
)
from quietgrad.data.schema import Schema, read_schema
from quietgrad.data.text_layout import TextLayout
from quietgrad.estimators.holdout import expected_error
from quietgrad.features.naming import named_features
from quietgrad.methods.score_noise import TOO_NOISY

_TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".pq", ".gz", ".bz2", ".xz")
_EPSILONS = (0.3, 1.0, 3.0)  # by which uncertainty is told where no ε is chosen yet
_LARGEST = 100 * 2**20  # bytes of a file that `train` looks at unasked
_OWNER = (
    "For the owner of the records: this was read without noise. It stands on this terminal alone, and in no file."
)
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad check people.csv --schema schema.toml --epsilon 1 --holdout 0.2")
@with_options()
def check(spec: RunSpec) -> None:
    """Say what would be wasted if this file were trained on with the same options as `quietgrad train`.

    It checks labels, bounds, gaps, ids, rare classes, δ and n, and how uncertain a score would be. Its output is
    for the owner of the records alone: it is printed to this terminal, not stored, and charges nothing. The exit
    code is 1 if training would be refused. Without --epsilon it states the uncertainty at ε = 0.3, 1 and 3.
    """
    unchosen = spec.epsilon is None and not spec.non_private
    specs = [replace(spec, epsilon=epsilon) for epsilon in _EPSILONS] if unchosen else [spec]
    with usage():
        specs[0].check()
    findings, refused = findings_of(*specs)
    name = "the demo's data" if spec.data is None else Path(spec.data).name
    for finding in sorted(grouped_remarks(findings), key=lambda finding: not finding.wastes):
        say(f"{'!' if finding.wastes else '·'} {sanitize(finding.about)}: {sanitize(finding.text, most=400)}.")
    if refused is not None:
        say(f"! train would refuse: {refused}")
    wasted = sum(finding.wastes for finding in findings) + (refused is not None)
    say(f"{name}: {wasted or 'nothing'} to mend{' (marked !)' if wasted else ''}. Nothing was charged.\n{_OWNER}")
    if refused is not None:
        raise typer.Exit(1)


def findings_of(*specs: RunSpec) -> tuple[list[ColumnRemark], str | None]:
    """Return remarks on a run, and the reason why training would be refused, if any.

    The runs of ``specs`` differ in ε alone, and none is to be refused that another one allows: the last has most.
    """
    spec = specs[-1]
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
    if data.undeclared and not any("match no class" in finding.text for finding in findings):
        findings.append(ColumnRemark("label", f"{data.undeclared} labels match no class", True))
    schema = None if spec.schema is None else read_schema(spec.schema)
    findings += _constant(data, [finding.about for finding in findings if "is the same" in finding.text], schema)
    return findings + ([] if spec.non_private else _of_budget(specs, data)), None


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
        layout = None if schema is None else TextLayout(schema.skip_lines, schema.skip_rows, schema.skip_end)
        cells = read_text_cells(path, delimiter, encoding, layout)
        draft = draft_schema(path, label=_label_of(spec, schema), delimiter=delimiter, encoding=encoding)
    except DataError:
        return []  # reading the file says it better
    aside = [spec.person, spec.keep, *(spec.drop or ())]
    findings = inspect_columns(cells, schema, aside)
    label, classes = (draft.label, spec.classes) if schema is None else (schema.label, schema.classes)
    if schema is None or schema.label_kind != "yes/no":
        listed = classes.split(",") if isinstance(classes, str) else classes
        findings += inspect_labels(label, cells[label], listed)
    ids = [column.name for column in draft.columns if column.kind == "id"]
    ids += [name for name in (() if schema is None else schema.ids) if name in cells and name not in ids]
    ids = [name for name in ids if name not in aside[1:]]
    others = [name for name in cells if name not in (*ids, *aside, label) and not _is_date(schema, name)]
    findings += inspect_ids(cells, ids, spec.person, others)
    if schema is None:
        kinds = ("category", "text", "date", "yes/no")
        named = [column.name for column in draft.columns if column.kind in kinds]
        named = [name for name in named if not all(map(is_number, cells[name]))]
        if words := [name for name in named if name not in (*aside, label)]:
            text = f"columns of words or dates need a schema: {', '.join(map(sanitize, words[:10]))}"
            findings.append(ColumnRemark("columns", text, True))
    return findings


def _is_date(schema: Schema | None, name: str) -> bool:
    return schema is not None and isinstance(schema.columns.get(name), Date)


def _label_of(spec: RunSpec, schema: Schema | None) -> str | None:
    return spec.label if schema is None else schema.label


def _constant(data: Dataset, named: Sequence[str], schema: Schema | None) -> list[ColumnRemark]:
    """Features that are the same for all records, which only noise moves; without columns named already."""
    if not isinstance(data.X, np.ndarray) or data.feature_names is None or not len(data.X):
        return []
    columns = {} if schema is None else schema.columns
    dated = {
        feature: name for name, kind in columns.items() if isinstance(kind, Date) for feature in kind.names(name)
    }
    constant = [data.feature_names[k] for k in np.flatnonzero((data.X[0] == data.X).all(axis=0))]
    constant = [feature for feature in constant if dated.get(feature, feature) not in named]
    findings = []
    for same, advice in (
        (
            [feature for feature in constant if feature not in dated],
            "drop the columns, or categories that do not occur",
        ),
        (
            [feature for feature in constant if feature in dated],
            "leave out the parts of the dates that tell nothing, with parts = [...] of "
            f"{named_columns(sorted({dated[feature] for feature in constant if feature in dated}))} in the schema",
        ),
    ):
        if same:
            names = ", ".join(map(sanitize, same[:10])) + (", …" if len(same) > 10 else "")
            text = f"{len(same)} of {data.d} features are the same for all records ({names}): {advice}"
            findings.append(ColumnRemark("features", text, len(same) > data.d // 10))
    return findings


def _of_budget(specs: Sequence[RunSpec], data: Dataset) -> list[ColumnRemark]:
    """δ against n, and how uncertain the score and the coefficients will be, by ε if there are several."""
    spec = specs[-1]
    n = data.n if data.person is None else len(set(data.person.tolist()))
    unit = "records" if data.person is None else "people"
    findings = []
    if spec.delta * n >= 1.0:
        text = f"{spec.delta:g} is not below 1/n = {1.0 / n:.2g} and would allow one record to be published"
        findings.append(ColumnRemark("δ", f"{text}; choose --delta {advised_delta(n):g}", True))
    elif spec.delta > advised_delta(n) and spec.delta * n > 0.01:
        text = f"{spec.delta:g} is above 1/(100 n) = {0.01 / n:.2g}; choose --delta {advised_delta(n):g}"
        findings.append(ColumnRemark("δ", text))
    budgets = [budget for one in specs if (budget := one.budget()) is not None]
    width = features_seen(spec, data)
    off = [_coefficient_error(n, width, budget) for budget in budgets]
    text = f"{n} {unit} and {width} features: a coefficient is off by about {_by_epsilon(specs, off)}"
    findings.append(ColumnRemark("model", f"{text}, per range of its feature", off[-1] > 5.0))
    scores = [budget for one in specs if (budget := one.budget(of_score=True)) is not None]
    if scores and data.X_test is not None:
        held_out = data.X_test.shape[0] if data.person_test is None else len(set(data.person_test.tolist()))
        classes = 0 if data.classes is None else len(data.classes)
        errors = [expected_error(held_out, budget, classes=classes) for budget in scores]
        text = f"of {held_out} held-out {unit}: its error will be about {_by_epsilon(specs, errors)}"
        hopeless = [f"{one.epsilon:g}" for one, error in zip(specs, errors, strict=True) if error > TOO_NOISY]
        if hopeless:
            where = "" if len(hopeless) == len(specs) else f" at ε = {' and '.join(hopeless)}"
            text += f"; it would not be released{where}. Hold out more, raise --score-share, or leave --holdout out"
        findings.append(ColumnRemark("score", text, len(hopeless) == len(specs)))
    return findings


def features_seen(spec: RunSpec, data: Dataset) -> int:
    """The number of features that the model sees: those of --features, else the table's."""
    if spec.features is None:
        return data.d
    return int(named_features(spec.features, data.d).rows(np.zeros((1, data.d), dtype=np.float32)).shape[1])


def _coefficient_error(n: int, features: int, budget: Budget) -> float:
    """Noise on a mean gradient of √(d + 1) numbers, over the curvature of a feature that fills its range evenly."""
    mu = gaussian_mu(budget.epsilon, budget.delta) / (1 if budget.relation is Relation.ADD_REMOVE else 2)
    return 24.0 * math.sqrt(features + 1.0) / (n * mu)


def _by_epsilon(specs: Sequence[RunSpec], errors: Sequence[float]) -> str:
    """The errors, each with the ε of the whole run.

    >>> _by_epsilon([RunSpec(epsilon=1.0), RunSpec(epsilon=3.0)], [0.5, 0.2])
    '± 0.5 at ε = 1, ± 0.2 at ε = 3'
    """
    return ", ".join(f"± {error:.2g} at ε = {one.epsilon:g}" for one, error in zip(specs, errors, strict=True))
