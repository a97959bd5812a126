"""`quietgrad card`: a model card of a finished run, as Markdown and HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quietgrad.cli.options import Json, answer

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad card runs/a9a   ·   quietgrad card runs/a9a -o README.md")
def card(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .md or .html file; else both, in the folder.", show_default=False),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(
            help="Ledger that was charged for the run, if its folder does not name it.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a model card: data as declared, guarantee, private scores, and intended use to fill in.

    The run's ε is proved again first. Scores that were computed without noise are left out.
    """
    from quietgrad.report.card import FILL_IN, write_cards

    written = write_cards(folder, output, ledger)
    lines = [f"model card: {file}" for file in written]
    yours = f"Lines that begin with “{FILL_IN.strip()}” are yours to write."
    answer(as_json, {"card": [str(file) for file in written]}, *lines, yours)
