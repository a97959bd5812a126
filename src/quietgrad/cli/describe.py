"""`quietgrad describe`: private counts, means, quantiles and tables of a file's columns, as a page and as JSON."""

from __future__ import annotations

import itertools
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
from quietgrad.data.columns import Categorical, Choices, ColumnKind, Date, Numeric, YesNo, to_numbers, yes_or_no
from quietgrad.data.schema import Schema, read_schema
from quietgrad.data.tables import read_cells
from quietgrad.tables.cells import day_text

if TYPE_CHECKING:
    from quietgrad.estimators import Description, GroupedDescription

Row: TypeAlias = Mapping[str, Any]  # a column of a description
_MOST_DRAWN = 40  # groups of a drawing
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
    by: Annotated[
        str | None, Option(help="One column or two, as sex,town: statistics of each group.", show_default=False)
    ] = None,
    statistics: Annotated[
        str, Option(help="With --by, what is released: the fewer, the less noise.")
    ] = "count,sum,mean,quantiles,shares",
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Release counts, means, quantiles, histograms and two-way tables of the columns, each with its error.

    Numbers are cut to the bounds of the schema; where it has none, to a range that is found privately. A mean is
    that of the values after this cut, and so are its errors. Declare bounds to choose the range yourself.

    With --by it releases statistics of each group, with intervals that hold the number of these records, after the
    cut, with probability 95 %. Groups are the categories of the schema. For a column without categories in the
    schema they are found privately.
    """
    from quietgrad import estimators  # loads scikit-learn

    spec.budget()
    public = read_schema(schema)
    grouped = None if by is None else [name.strip() for name in by.split(",")]
    extra = [name for name in (*(grouped or ()), spec.person) if name is not None]
    cells = read_cells(file, public, extra)
    frame, declared = _columns(cells, public)
    frame |= {name: np.array(cells[name], dtype=object) for name in grouped or () if name not in frame}
    declared |= {name: {"kind": "id"} for name in grouped or () if name in public.ids}
    declared |= {name: {"kind": "text"} for name in grouped or () if name in public.texts}
    ledger = None if spec.ledger is None else Path(spec.ledger)
    assert spec.epsilon is not None
    options: dict[str, Any] = {
        "epsilon": spec.epsilon, "delta": spec.delta, "relation": spec.relation, "n_public": spec.n_public,
        "account": account_of(file, spec.account, ledger, spec.cap()),
        "person": None if spec.person is None else cells[spec.person],
    }  # fmt: skip
    if grouped is not None:
        with usage():
            chosen: Any = [name.strip() for name in statistics.split(",")]
            groups = estimators.describe(frame, schema=declared, by=grouped, statistics=chosen, **options)
        _write_groups(file.name, groups, output, as_json=as_json, explain=explain)
        return
    with usage():
        description = estimators.describe(frame, schema=declared, **options)
    document, beside = description.to_json(), output.with_suffix(".json")
    write_atomically(writable(output), _page(file.name, description).encode())
    write_atomically(beside, (json.dumps(document, indent=1, default=str) + "\n").encode())
    say_meaning(explain, description.privacy.epsilon, spec.delta, description.privacy.unit)
    rows = description.written_rows()
    width = max(len(str(row["column"])) for row in rows) + 2
    lines = [f"{sanitize(row['column']):<{width}}{_in_words(row)}" for row in rows]
    answer(as_json, document, *lines, f"privacy: {description.privacy}", f"written: {output}, {beside}")


def _columns(cells: dict[str, list[object]], schema: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns as numbers, words and dates, and what is public of each."""
    frame: dict[str, Any] = {}
    said: dict[str, Any] = {}
    gaps = {*schema.missing, "None", "NaT"}
    target: ColumnKind = Numeric(
        schema.label_bounds, False, None, False, *schema.label_format, lenient=schema.label_lenient
    )
    if schema.classes is not None:
        target = YesNo() if schema.label_kind == "yes/no" else Categorical(schema.classes)
    for name, kind in {**schema.columns, schema.label: target}.items():
        texts = [str(cell).strip() for cell in cells[name]]
        flagged = {"missing": "indicator"} if kind.indicator else {}
        if isinstance(kind, Numeric):
            written: dict[str, Any] = {
                "decimal": kind.decimal, "thousands": kind.thousands, "lenient": kind.lenient,
            }  # fmt: skip
            frame[name] = to_numbers(name, texts, schema.missing, **written)
            bounds = {} if kind.bounds is None else {"bounds": list(kind.bounds)}
            said[name] = {"kind": "integer" if kind.whole else "number", **bounds, **flagged}
        elif isinstance(kind, Date):
            frame[name] = np.array(kind.dates(name, texts, schema.missing), dtype="datetime64[D]")
            days_given = {} if kind.bounds is None else {"bounds": [str(end) for end in kind.bounds]}
            said[name] = {"kind": "date", **days_given, **flagged}
        elif isinstance(kind, YesNo):
            frame[name] = np.array(["" if text in gaps else yes_or_no(text) for text in texts], dtype=object)
            said[name] = {"kind": "category", "categories": ["no", "yes"]}
        elif isinstance(kind, Choices):
            for word, chosen in zip(kind.categories, kind.encode(name, texts, schema.missing).T, strict=False):
                frame[f"{name}={word}"] = np.where(chosen > 0.0, "yes", "no").astype(object)
                said[f"{name}={word}"] = {"kind": "category", "categories": ["no", "yes"]}
        elif isinstance(kind, Categorical):
            frame[name] = np.array(texts, dtype=object)
            said[name] = {"kind": "category", "categories": list(kind.categories)}
    return frame, said


def _write_groups(file: str, groups: GroupedDescription, output: Path, *, as_json: bool, explain: bool) -> None:
    """Write page, CSV and JSON, and say the counts and means of the groups."""
    document = groups.to_json()
    write_atomically(writable(output), _groups_page(file, groups).encode())
    write_atomically(output.with_suffix(".json"), (json.dumps(document, indent=1) + "\n").encode())
    groups.to_csv(output.with_suffix(".csv"))
    say_meaning(explain, groups.privacy.epsilon, groups.privacy.delta, groups.privacy.unit)
    rows = groups.written_rows()
    names = [", ".join(sanitize(row[name]) for name in groups.by) for row in rows]
    width = max(map(len, names)) + 2
    lines = []
    for name, row in zip(names, rows, strict=True):
        if row["statistic"] in ("count", "mean"):
            what = "records" if row["column"] is None else f"{row['statistic']} of {sanitize(row['column'])}"
            lines.append(f"{name:<{width}}{what}: {_number(row['value'])} ({_interval(row)})")
    files = ", ".join(str(output.with_suffix(suffix)) for suffix in (output.suffix, ".csv", ".json"))
    answer(as_json, document, *lines, f"privacy: {groups.privacy}", f"written: {files}")


def _groups_page(file: str, groups: GroupedDescription) -> str:
    """One self-contained page: for each statistic of each column a drawing and a table of the groups."""
    sections = []
    for (column, statistic, level), group in itertools.groupby(
        sorted(
            zip(groups.rows, groups.written_rows(), strict=True),
            key=lambda pair: [str(pair[0][key] or "") for key in ("column", "statistic", "level")],
        ),
        key=lambda pair: (pair[0]["column"], pair[0]["statistic"], pair[0]["level"]),
    ):
        pairs = list(group)
        words = f"{int(statistic[1:])} % quantile" if statistic[1:].isdigit() else statistic
        title = ("records" if column is None else f"{column}: {words}") + ("" if level is None else f" of {level}")
        drawn = [
            (", ".join(row[name] for name in groups.by), row["value"], row["lower"], row["upper"])
            for row, _ in pairs
            if row["value"] is not None
        ]
        written = day_text if column in groups.dates and statistic != "sum" else None
        chart = Intervals(title, drawn, statistic, written).svg() if len(drawn) <= _MOST_DRAWN else ""
        shown = [([row[name] for name in groups.by], _number(row["value"]), _interval(row)) for _, row in pairs]
        sections.append((title, _of_values(pairs[0][1]), chart, shown))
    template = page_environment().get_template("groups.html.j2")
    return template.render(name=file, by=groups.by, privacy=groups.privacy, sections=sections, version=__version__)


def _of_values(row: Row) -> str:
    """What the numbers of a row are of, as a sentence; empty for counts and shares."""
    if row["range"] == "hidden":
        return "Unknown: the range of the column does not stand out of the noise. Declare its bounds."
    if row["range"] is None:
        return ""
    how = "found privately" if row["range"] == "found" else "declared"
    return f"Of values cut to [{_number(row['cut_low'])}, {_number(row['cut_high'])}], {how}."


def _number(value: float | str | None) -> str:
    return "unknown" if value is None else value if isinstance(value, str) else f"{value:.6g}"


def _interval(row: Row) -> str:
    if row["range"] == "hidden":
        return "no range stands out of the noise: declare bounds"
    cut = f", of values cut to [{_number(row['cut_low'])}, {_number(row['cut_high'])}], found privately"
    return f"{_number(row['lower'])} to {_number(row['upper'])}{cut if row['range'] == 'found' else ''}"


def _in_words(row: Row) -> str:
    """A column's main numbers on one line, each with its error."""
    words = [f"{row['count']:.0f} ± {row['count_error']:.0f} records"]
    if row.get("range") == "hidden":
        words.append("values unknown: no range stands out of the noise; declare bounds")
    elif "mean" in row and row["mean"] is None:
        words.append("values unknown: too few records stand out of the noise")
    elif "mean" in row:
        unit = " days" if row["kind"] == "date" else ""
        for key, name in (("mean", "mean"), ("q50", "median")):
            words.append(f"{name} {_shown(row, key)} ± {row[f'{key}_error']:.2g}{unit}")
        if row["range"] == "found":
            ends = f"[{_shown(row, 'cut_low')}, {_shown(row, 'cut_high')}]"
            words.append(f"of values cut to {ends}, found privately")
    elif row["most_frequent"] is None:
        words.append("most frequent value unknown: none stands out of the noise")
    else:
        words.append(f"most frequent: {sanitize(row['most_frequent'])} ({row['most_frequent_count']:.0f})")
    return ", ".join(words)


def _page(file: str, description: Description) -> str:
    """One self-contained page: the statement, and for each column its numbers and its histogram."""
    columns = []
    for row in description.written_rows():
        bars = []
        for cell in description.histograms[str(row["column"])]:
            bin, off = str(cell["cell"]), 2.0 * cell["error"]
            if row["kind"] not in ("category", "date"):  # ends of bins in three digits; the JSON has all of them
                bin = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3g}", bin)
            bars.append((bin, cell["count"], cell["count"] - off, cell["count"] + off))
        columns.append((row["column"], _facts(row), Intervals(str(row["column"]), bars, "records").svg()))
    template = page_environment().get_template("description.html.j2")
    return template.render(name=file, privacy=description.privacy, columns=columns, version=__version__)


def _shown(row: Row, key: str) -> str:
    value = row[key]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(row: Row) -> list[tuple[str, str]]:
    """Return the facts of a column as rows, each number with its error where it has one."""
    quantile = re.compile(r"q(\d\d)")
    rows = []
    for key, value in row.items():
        if key == "column" or key.endswith("_error") or value is None:
            continue
        named = quantile.fullmatch(key)
        label = f"{int(named[1])} % quantile" if named else key.replace("_", " ")
        error, shown = row.get(f"{key}_error"), _shown(row, key)
        unit = " days" if row["kind"] == "date" and "count" not in key else ""
        rows.append((label, shown if error is None else f"{shown} ± {error:.2g}{unit}"))
    return rows
