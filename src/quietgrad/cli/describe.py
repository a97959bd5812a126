"""`quietgrad describe`: private counts, means, quantiles and tables of a file's columns, as a page and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.cli.options import (
    DataAccount,
    Delta,
    Explain,
    Json,
    RelationName,
    say,
    say_meaning,
    show_json,
    usage,
    working,
    writable,
)
from quietgrad.cli.run_spec import account_of
from quietgrad.privacy.budget import DEFAULT_RELATION
from quietgrad.sanitize import sanitize

if TYPE_CHECKING:
    from quietgrad.data.schema import Schema
    from quietgrad.estimators.describing import Description

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad describe people.csv --schema schema.toml --epsilon 0.5 -o people.html")
def describe(
    file: Annotated[Path, typer.Argument(help="A delimited or parquet file.", show_default=False)],
    schema: Annotated[
        Path, typer.Option(help="Its public schema; see `quietgrad data schema`.", show_default=False)
    ],
    epsilon: Annotated[float, typer.Option(help="ε of the whole description.")] = 0.5,
    delta: Delta = 1e-6,
    relation: RelationName = DEFAULT_RELATION,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page; JSON goes beside it.")] = Path(
        "description.html"
    ),
    ledger: Annotated[Path | None, typer.Option(help="Ledger file; else the project's own.")] = None,
    account: DataAccount = None,
    cap_epsilon: Annotated[float | None, typer.Option(help="Refuse if the account would exceed this ε.")] = None,
    n_public: Annotated[int | None, typer.Option(help="Public number of records; else counted privately.")] = None,
    person: Annotated[str | None, typer.Option(help="Column of person ids: ε then holds per person.")] = None,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Release counts, means, quantiles, histograms and two-way tables of the columns, each with its error."""
    from quietgrad.data.schema import read_schema
    from quietgrad.data.tables import read_cells
    from quietgrad.estimators import describe as describe_frame
    from quietgrad.files import write_atomically
    from quietgrad.privacy.budget import Budget, Relation

    with usage():
        promise = Budget(epsilon, delta, Relation.parse(relation))
        cap = None if cap_epsilon is None else Budget(cap_epsilon, delta, promise.relation)
    public = read_schema(schema)
    cells = read_cells(file, public, () if person is None else (person,))
    frame, declared = _columns(cells, public)
    with usage(), working("describing", quiet=as_json):
        found = describe_frame(
            frame, schema=declared, epsilon=epsilon, delta=delta, relation=relation,
            account=account_of(file, account, ledger, cap), n_public=n_public,
            person=None if person is None else cells[person],
        )  # fmt: skip
    told = found.to_json()
    write_atomically(writable(output), _page(file.name, found).encode())
    write_atomically(output.with_suffix(".json"), (json.dumps(told, indent=1, default=str) + "\n").encode())
    say_meaning(explain, found.privacy.epsilon, delta, found.privacy.unit)
    if as_json:
        show_json(told)
        return
    width = max(len(str(row["column"])) for row in found.rows) + 2
    for row in found.rows:
        say(f"{sanitize(row['column']):<{width}}{_in_words(row)}")
    say(f"privacy: {found.privacy}")
    say(f"written: {output}, {output.with_suffix('.json')}")


def _columns(cells: dict[str, list[Any]], schema: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns as numbers, words and dates, and what is public of each."""
    import numpy as np

    from quietgrad.data.columns import Categorical, Date, Numeric, YesNo, to_numbers, yes_or_no

    frame: dict[str, Any] = {}
    said: dict[str, Any] = {}
    gaps = {*schema.missing, "None", "NaT"}
    label = Numeric(schema.label_bounds, False, None, False, *schema.label_format)
    target: Any = label if schema.classes is None else YesNo() if schema.label_kind == "yes/no" else (
        Categorical(schema.classes)
    )  # fmt: skip
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
        else:
            frame[name] = np.array(texts, dtype=object)
            said[name] = {"kind": "category", "categories": list(kind.categories)}
    return frame, said


def _in_words(row: Mapping[str, Any]) -> str:
    """A column's main numbers on one line, each with its error."""
    words = [f"{row['count']:.0f} ± {row['count_error']:.0f} records"]
    if "mean" in row:
        words.append(f"mean {row['mean']:.4g} ± {row['mean_error']:.2g}")
        words.append(f"median {row['q50']:.4g} ± {row['q50_error']:.2g}")
    else:
        words.append(f"most frequent: {sanitize(row['most_frequent'])} ({row['most_frequent_count']:.0f})")
    return ", ".join(words)


def _page(name: str, found: Description) -> str:
    """One self-contained page: the statement, and for each column its numbers and its histogram."""
    from quietgrad import __version__
    from quietgrad.charts import Intervals
    from quietgrad.report.page import page_environment

    columns = []
    for row in found.rows:
        bars = []
        for cell in found.histograms[str(row["column"])]:
            name, off = str(cell["cell"]), 2.0 * cell["error"]
            if row["kind"] != "category":  # ends of bins in three digits; the JSON has all of them
                name = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3g}", name)
            bars.append((name, cell["count"], cell["count"] - off, cell["count"] + off))
        columns.append((row["column"], _facts(row), Intervals(str(row["column"]), bars, "records").svg()))
    template = page_environment().get_template("description.html.j2")
    return template.render(name=name, privacy=found.privacy, columns=columns, version=__version__)


def _facts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
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
