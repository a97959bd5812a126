"""`quietgrad reproduce`: the papers' tables and figures beside ours, from the scripts and results of a clone.

A script of ``reproduce/`` says in its docstring what it reproduces and how long it takes, and leaves its numbers in
``reproduce/results/``. Both are only read here; a script runs in a process of its own.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer import Argument, Option

import quietgrad
from quietgrad.cli.options import Json, say, show_json
from quietgrad.core.errors import QuietgradError

Record: TypeAlias = dict[str, Any]  # of results, as a script leaves it
app = typer.Typer(add_completion=False)
_WIDEST = 120  # characters of a cell; --json has all of it


@app.command(epilog="Example: quietgrad reproduce output-perturbation --quick", no_args_is_help=True)
def reproduce(
    name: Annotated[
        str,
        Argument(
            help="`list` for all of them, one name of that list, or `page` for all in one HTML file with pictures.",
            show_default=False,
        ),
    ],
    quick: Annotated[
        bool, Option("--quick", help="Run the small form, which takes seconds and keeps nothing.")
    ] = False,
    run: Annotated[
        bool, Option("--run", help="Run it all; a script may keep fits that its results already hold.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a paper's table or figure beside ours; without results in the clone, or with --run, make them first."""
    if quick and run:
        raise typer.BadParameter("--quick and --run exclude each other.")
    if name == "page":
        if quick or run or as_json:
            raise typer.BadParameter("`page` draws what the results hold; leave --quick, --run and --json out.")
        Reproduction(clone() / "reproduce" / "page.py").run(quick=False, quiet=False)
        return
    known = reproductions(clone())
    if name == "list":
        if quick or run:
            raise typer.BadParameter("`list` runs nothing; leave --quick and --run out.")
        rows = [each.about() for each in known.values()]
        if as_json:
            show_json(rows)
        else:
            columns = ("name", "paper", "takes", "results", "what")
            _print([[row[column] for column in columns] for row in rows], columns)
        return
    chosen = known.get(name.replace("_", "-"))
    if chosen is None:
        near = get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
        raise typer.BadParameter(f"{name!r} is no reproduction; {advice}")
    if quick or run or not chosen.results.exists():
        chosen.run(quick=quick, quiet=as_json)
    if quick:
        if as_json:
            show_json({**chosen.about(), "ran": "quick"})
        return
    record, about = chosen.record(), chosen.about()
    tables = tables_of(record)
    if as_json:
        origin = {key: record.get(key) for key in ("command", "date", "machine", "versions")}
        show_json({**about, **origin, "tables": tables})
        return
    say(about["what"])
    say(f"made by `{record['command']}` on {record['date'][:10]}, quietgrad {record['versions']['quietgrad']}")
    for table in tables:
        say(f"\n{table['title']}")
        _print(table["rows"], table["columns"])


@dataclass(frozen=True)
class Reproduction:
    """One script and what it says of itself."""

    script: Path

    @property
    def name(self) -> str:
        return self.script.stem.replace("_", "-")

    @property
    def results(self) -> Path:
        return self.script.parent / "results" / f"{self.script.stem}.json"

    def record(self) -> Record:
        """The numbers, with the command, date and versions that made them."""
        record: Record = json.loads(self.results.read_text(encoding="utf-8"))
        return record

    def about(self) -> Record:
        """Name, paper, what and how long, as the docstring has it."""
        text = ast.get_docstring(ast.parse(self.script.read_text(encoding="utf-8"))) or ""
        paper, takes = re.search(r"[Pp]aper (\d{3})", text), re.search(r"Takes ([^.]+)\.", text)
        return {
            "name": self.name,
            "paper": paper[1] if paper else None,
            "what": text.partition("\n")[0],
            "takes": takes[1] if takes else None,
            "results": self.record()["date"][:10] if self.results.exists() else None,
        }

    def run(self, *, quick: bool, quiet: bool) -> None:
        """Run the script; ``quiet`` sends what it prints to stderr."""
        command = [sys.executable, str(self.script), *(["--quick"] if quick else [])]
        done = subprocess.run(
            command, cwd=self.script.parents[1], stdout=sys.stderr if quiet else None, check=False
        )
        if done.returncode:
            raise QuietgradError(
                f"reproduce/{self.script.name} ended with code {done.returncode}; its own words are above."
            )


def clone() -> Path:
    """The clone with the scripts: the one this package is installed from, or the current folder."""
    for root in (Path(quietgrad.__file__).parents[2], Path.cwd()):
        if (root / "reproduce" / "results").is_dir():
            return root
    raise QuietgradError(
        "the reproduce/ folder is not part of an installed package; "
        "clone the repository and run this command inside it."
    )


def reproductions(root: Path) -> dict[str, Reproduction]:
    """Every runnable script of ``reproduce/``, by name, but the one that draws the page."""
    scripts = sorted(path for path in (root / "reproduce").glob("*.py") if path.stem != "page")
    runnable = (
        Reproduction(path) for path in scripts if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    )
    return {each.name: each for each in runnable}


def tables_of(record: Record) -> list[Record]:
    """The record's own tables, or its lists of rows with what in them is a plain value.

    >>> tables_of({"date": "…", "rows": [{"ε": 1.0, "error": 0.25, "settings": {"steps": 3}}]})
    [{'title': 'rows', 'columns': ['ε', 'error'], 'rows': [[1.0, 0.25]]}]
    """
    if "tables" in record:
        return list(record["tables"])
    lists = {
        key: rows for key, rows in record.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    }
    if "table" in lists:  # a summary of the other lists
        lists = {"table": lists["table"]}
    tables_read = []
    for title, rows in lists.items():
        columns = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, dict | list)))
        body = [[row.get(column) for column in columns] for row in rows]
        tables_read.append({"title": title, "columns": columns, "rows": body})
    return tables_read


def _print(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> None:
    """Aligned columns, never cut: a reader may pipe them on."""
    lines = [list(columns)]
    for row in rows:
        texts = ["–" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v) for v in row]
        lines.append([text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…" for text in texts])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say("  ".join(f"{value:<{width}}" for value, width in zip(line, widths, strict=True)).rstrip())
