"""`quietgrad data`: registered data sets, where they are and how to get them; and schemas for files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from quietgrad.cli.options import Json, answer, say, show_json, writable
from quietgrad.cli.run_spec import RunSpec, with_options
from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.drafting import draft_schema
from quietgrad.data.registry import REGISTRY, locate
from quietgrad.data.registry import fetch as fetch_files

app = typer.Typer(
    help="Registered data sets (list, fetch, path), and a schema drafted for a file of your own.",
    no_args_is_help=True,
    add_completion=False,
)

_MOST_LINES = 40  # columns with a line each; more are shown by kind
Name = Annotated[str, Argument(help="A registered name, such as a9a; see `quietgrad data list`.")]


@app.command("list", epilog="Example: quietgrad data list --json")
def list_sets(as_json: Json = False) -> None:
    """List the registered data sets and say which are on this machine."""
    rows = []
    for entry in REGISTRY.values():
        located = locate(entry.name)
        carriers = REGISTRY[entry.made_from].sources if entry.made_from else entry.sources
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "task": entry.task,
                "rows": entry.rows[0],
                "test_rows": entry.rows[1],
                "features": entry.features,
                "available": located is not None,
                "sources": [source.label for source in carriers] or ([] if entry.files else ["scikit-learn"]),
                "sha256": {f["name"]: [f["sha256"], *f.get("copies", {}).values()] for f in entry.files},
            }
        )
    if as_json:
        show_json(rows)
        return
    say(f"{'name':<24}{'task':<12}{'rows':>7}{'test':>7}{'d':>6}  here  what")
    for row in rows:
        here = "yes" if row["available"] else "no"
        counts = f"{row['rows']:>7}{row['test_rows']:>7}{row['features']:>6}"
        say(f"{row['name']:<24}{row['task']:<12}{counts}  {here:<4}  {row['title']}")


@app.command(epilog="Example: quietgrad data schema people.csv --label ill --keep patient_id -o schema.toml")
@with_options("label", "drop", "keep", "delimiter", "encoding")
def schema(
    spec: RunSpec,
    file: Annotated[
        Path, Argument(help="A delimited file with a header line, or .parquet or .xlsx.", show_default=False)
    ],
    output: Annotated[Path | None, Option("--output", "-o", help="The schema file; else it is printed.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing schema file.")] = False,
    as_json: Json = False,
) -> None:
    """Draft a schema from the header and the form of the cells: names, kinds, delimiter, encoding; no values.

    This looks at the file for its owner, without noise. Bounds and categories are left for you to fill in.
    """
    if output is not None and output.exists() and not overwrite:
        raise DataError(f"{output}: exists already; choose another -o, or pass --overwrite.")
    if output is not None and output.suffix != ".toml":
        raise DataError(f"{output}: a schema is drafted as TOML; name the file {output.stem}.toml.")
    draft = draft_schema(
        file, label=spec.label, drop=tuple(spec.drop or ()), keep=spec.keep, delimiter=spec.delimiter,
        encoding=spec.encoding,
    )  # fmt: skip
    if output is not None:
        writable(output).write_text(draft.to_toml(), encoding="utf-8")
    kinds = {column.name: column.kind for column in draft.columns}
    if as_json:
        format = {"delimiter": draft.delimiter, "encoding": draft.encoding, "problems": draft.problems}
        show_json({"schema": output and str(output), "label": draft.label, "kinds": kinds, **format})
        return
    if output is None:
        say(draft.to_toml())
        return
    say(f"{output}: drafted from the header and the form of the cells of {file}, which were read without noise for "
        "you as their owner. The draft is not private: keep it to yourself.")  # fmt: skip
    if len(kinds) > _MOST_LINES:
        by_kind: dict[str, list[str]] = {}
        for name, kind in kinds.items():
            by_kind.setdefault(kind, []).append(name)
        say(f"  label: {sanitize(draft.label)} ({kinds[draft.label]})")
        for kind, names in by_kind.items():
            some = ", ".join(map(sanitize, names[:5])) + (", …" if len(names) > 5 else "")
            say(f"  {kind:<14}{len(names):>5} columns: {some}")
    else:
        width = max(map(len, kinds)) + 2
        for name, kind in kinds.items():
            say(f"  {sanitize(name):<{width}}{kind}{'  (label)' if name == draft.label else ''}")
    for problem in draft.problems[:_MOST_LINES]:
        say(f"problem: {problem}", err=True)
    if len(draft.problems) > _MOST_LINES:
        say(f"problem: {len(draft.problems) - _MOST_LINES} more, all of them in {output}", err=True)
    if any(column.gap_words for column in draft.columns):
        say("Words for gaps (such as n/a or -) are listed in the schema: missing = [...]. Strike what is no gap.")
    needed = [name for name, kind in kinds.items() if kind == "category"]
    if needed:
        say(f"Fill in the public values of: {', '.join(map(sanitize, needed))}.")
    say("Fill in bounds that are public; empty ones are found privately. "
        f"Then: quietgrad train {file} --schema {output} --epsilon 1 --holdout 0.2 --out runs/first")  # fmt: skip


@app.command(epilog="Example: quietgrad data fetch a9a")
def fetch(name: Name, as_json: Json = False) -> None:
    """Fetch a data set into the cache unless it is here already; its checksums are verified either way."""
    _show(name, {file: str(path) for file, path in fetch_files(name).items()}, as_json)


@app.command(epilog="Example: quietgrad data path adult")
def path(name: Name, as_json: Json = False) -> None:
    """Say where a data set's files are, without downloading anything."""
    located = locate(name)
    if located is None:
        raise DataError(f"{name} is not on this machine. Run `quietgrad data fetch {name}` or set QUIETGRAD_DATA.")
    _show(name, {file: str(where) for file, where in located[1].items()}, as_json)


def _show(name: str, paths: dict[str, str], as_json: bool) -> None:
    lines = paths.values() or [f"{name} comes with scikit-learn; no file is needed."]
    answer(as_json, {"name": name, "files": paths}, *lines)
