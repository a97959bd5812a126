"""`quietgrad data`: which data sets are registered, where they are, and how to get them."""

from __future__ import annotations

from typing import Annotated

import typer

from quietgrad.cli.options import Json, say, show_json

app = typer.Typer(
    help="Registered data sets: list them, fetch them, find them.", no_args_is_help=True, add_completion=False
)

Name = Annotated[str, typer.Argument(help="A registered name, such as a9a; see `quietgrad data list`.")]


@app.command("list", epilog="Example: quietgrad data list --json")
def list_sets(as_json: Json = False) -> None:
    """List the registered data sets and say which are on this machine."""
    from quietgrad.data.registry import REGISTRY, locate

    rows = []
    for entry in REGISTRY.values():
        found = locate(entry.name)
        carriers = REGISTRY[entry.made_from].sources if entry.made_from else entry.sources
        rows.append(
            {
                "name": entry.name,
                "title": entry.title,
                "task": entry.task,
                "rows": entry.rows[0],
                "test_rows": entry.rows[1],
                "features": entry.features,
                "available": found is not None,
                "sources": [source.label for source in carriers] or ([] if entry.files else ["scikit-learn"]),
                "sha256": {file.name: list(file.checksums) for file in entry.files},
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


@app.command(epilog="Example: quietgrad data fetch a9a")
def fetch(name: Name, as_json: Json = False) -> None:
    """Fetch a data set into the cache unless it is here already; its checksums are verified either way."""
    from quietgrad.data.registry import fetch as fetch_files

    _show(name, {file: str(path) for file, path in fetch_files(name).items()}, as_json)


@app.command(epilog="Example: quietgrad data path adult")
def path(name: Name, as_json: Json = False) -> None:
    """Say where a data set's files are, without downloading anything."""
    from quietgrad.data.registry import locate
    from quietgrad.errors import DataError

    found = locate(name)
    if found is None:
        raise DataError(f"{name} is not on this machine. Run `quietgrad data fetch {name}` or set QUIETGRAD_DATA.")
    _show(name, {file: str(where) for file, where in found[1].items()}, as_json)


def _show(name: str, paths: dict[str, str], as_json: bool) -> None:
    if as_json:
        show_json({"name": name, "files": paths})
    elif paths:
        for where in paths.values():
            say(where)
    else:
        say(f"{name} comes with scikit-learn; no file is needed.")
