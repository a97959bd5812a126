"""`quietgrad report`: one self-contained page about one or more finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli.options import Json, show_json

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad report runs/a9a runs/a9a-sgd -o comparison.html")
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; else report.html in the first folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write curves, a comparison of the runs and their privacy certificates as one HTML file."""
    from quietgrad.report.page import write_report

    target = write_report(folders, output or folders[0] / "report.html")
    if as_json:
        show_json({"report": str(target), "runs": [str(folder) for folder in folders]})
    else:
        typer.echo(f"report of {len(folders)} run{'s' if len(folders) > 1 else ''}: {target}")


def report_if_possible(folders: Sequence[Path], target: Path) -> Path | None:
    """Write the page after a training; a model that is trained and saved is not undone by a page that cannot be."""
    from quietgrad.errors import QuietgradError
    from quietgrad.report.page import write_report

    try:
        return write_report(folders, target)
    except QuietgradError as error:
        typer.echo(f"no {target.name}: {error}", err=True)
        return None
