"""`quietgrad describe`: private counts, means, quantiles and tables of a file's columns, as a page and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import typer
from typer import Argument, Option

from quietgrad import __version__
from quietgrad.assurance.report.page import page_environment
from quietgrad.charts import Intervals
from quietgrad.cli.options import Explain, Json, answer, say_meaning, usage, writable
from quietgrad.cli.run_spec import RunSpec, account_of, with_options
from quietgrad.core.files import write_atomically
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import Categorical, ColumnKind, Date, Numeric, YesNo, to_numbers, yes_or_no
from quietgrad.data.schema import Schema, read_schema
from quietgrad.data.tables import read_cells

if TYPE_CHECKING:
    from quietgrad.estimators import Description

Row: TypeAlias = Mapping[str, Any]  # a column of a description
app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad describe people.csv --schema schema.toml --epsilon 0.5 -o people.html")
@with_options("relation", "ledger", "account", "cap_epsilon", "n_public", "person", epsilon=0.5, delta=1e-6)
def describe(
    spec: RunSpec,
    file: Annotated[Path, Argument(help="A delimited or parquet file.", show_default=False)],
    schema: Annotated[Path, Option(help="Its public schema; see `quietgrad data schema`.", show_default=False)],
    output: Annotated[Path, Option("--output", "-o", help="The page; JSON goes beside it.")] = Path(
        "description.html"
    ),
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Release counts, means, quantiles, histograms and two-way tables of the columns, each with its error."""
    from quietgrad import estimators  # loads scikit-learn

    spec.budget()
    public = read_schema(schema)
    cells = read_cells(file, public, () if spec.person is None else (spec.person,))
    frame, declared = _columns(cells, public)
    ledger = None if spec.ledger is None else Path(spec.ledger)
    assert spec.epsilon is not None
    with usage():
        found = estimators.describe(
            frame, schema=declared, epsilon=spec.epsilon, delta=spec.delta, relation=spec.relation,
            account=account_of(file, spec.account, ledger, spec.cap()), n_public=spec.n_public,
            person=None if spec.person is None else cells[spec.person],
        )  # fmt: skip
    told, beside = found.to_json(), output.with_suffix(".json")
    write_atomically(writable(output), _page(file.name, found).encode())
    write_atomically(beside, (json.dumps(told, indent=1, default=str) + "\n").encode())
    say_meaning(explain, found.privacy.epsilon, spec.delta, found.privacy.unit)
    width = max(len(str(row["column"])) for row in found.rows) + 2
    lines = [f"{sanitize(row['column']):<{width}}{_in_words(row)}" for row in found.rows]
    answer(as_json, told, *lines, f"privacy: {found.privacy}", f"written: {output}, {beside}")


def _columns(cells: dict[str, list[object]], schema: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns as numbers, words and dates, and what is public of each."""
    frame: dict[str, Any] = {}
    said: dict[str, Any] = {}
    gaps = {*schema.missing, "None", "NaT"}
    target: ColumnKind = Numeric(schema.label_bounds, False, None, False, *schema.label_format)
    if schema.classes is not None:
        target = YesNo() if schema.label_kind == "yes/no" else Categorical(schema.classes)
    for name, kind in {**schema.columns, schema.label: target}.items():
        texts = [str(cell).strip() for cell in cells[name]]
        flagged = {"missing": "indicator"} if kind.indicator else {}
        if isinstance(kind, Numeric):
            written = {"decimal": kind.decimal, "thousands": kind.thousands}
            frame[name] = to_numbers(name, texts, schema.missing, **written)
            bounds = {} if kind.bounds is None else {"bounds": list(kind.bounds)}
            said[name] = {"kind": "number", **bounds, **flagged}
        elif isinstance(kind, Date):
            frame[name] = np.array(kind.dates(name, texts, schema.missing), dtype="datetime64[D]")
            days_given = {} if kind.bounds is None else {"bounds": [str(end) for end in kind.bounds]}
            said[name] = {"kind": "date", **days_given, **flagged}
        elif isinstance(kind, YesNo):
            frame[name] = np.array(["" if text in gaps else yes_or_no(text) for text in texts], dtype=object)
            said[name] = {"kind": "category", "categories": ["no", "yes"]}
        elif isinstance(kind, Categorical):
            frame[name] = np.array(texts, dtype=object)
            said[name] = {"kind": "category", "categories": list(kind.categories)}
    return frame, said


def _in_words(row: Row) -> str:
    """A column's main numbers on one line, each with its error."""
    words = [f"{row['count']:.0f} ± {row['count_error']:.0f} records"]
    if "mean" in row:
        words.append(f"mean {row['mean']:.4g} ± {row['mean_error']:.2g}")
        words.append(f"median {row['q50']:.4g} ± {row['q50_error']:.2g}")
    else:
        words.append(f"most frequent: {sanitize(row['most_frequent'])} ({row['most_frequent_count']:.0f})")
    return ", ".join(words)


def _page(file: str, found: Description) -> str:
    """One self-contained page: the statement, and for each column its numbers and its histogram."""
    columns = []
    for row in found.rows:
        bars = []
        for cell in found.histograms[str(row["column"])]:
            bin, off = str(cell["cell"]), 2.0 * cell["error"]
            if row["kind"] != "category":  # ends of bins in three digits; the JSON has all of them
                bin = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3g}", bin)
            bars.append((bin, cell["count"], cell["count"] - off, cell["count"] + off))
        columns.append((row["column"], _facts(row), Intervals(str(row["column"]), bars, "records").svg()))
    template = page_environment().get_template("description.html.j2")
    return template.render(name=file, privacy=found.privacy, columns=columns, version=__version__)


def _facts(row: Row) -> list[tuple[str, str]]:
    """What is known of a column, each number with its error where it has one."""
    quantile = re.compile(r"q(\d\d)")
    rows = []
    for key, value in row.items():
        if key == "column" or key.endswith("_error") or value is None:
            continue
        named = quantile.fullmatch(key)
        label = f"{int(named[1])} % quantile" if named else key.replace("_", " ")
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        error = row.get(f"{key}_error")
        rows.append((label, shown if error is None else f"{shown} ± {error:.2g}"))
    return rows
