"""`quietgrad report`: one self-contained page about one or more finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quietgrad.cli.options import Json, say, show_json

if TYPE_CHECKING:
    from quietgrad.report.page import Run

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad report runs/a9a runs/a9a-sgd -o comparison.html")
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of finished runs.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page; else report.html in the first folder.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write each chart as a picture into this folder.", show_default=False)
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Where the runs were paid, if their folders do not say.", show_default=False),
    ] = None,
    picture: Annotated[str, typer.Option(help="Of what kind: svg, png or pdf.")] = "svg",
    as_json: Json = False,
) -> None:
    """Write curves, a comparison of the runs and their privacy certificates as one HTML file.

    Every ε is proved again and held against the run's options and ledger; exit code 1 if one is refuted.
    """
    from quietgrad.report.page import read_runs, write_report

    if picture not in ("svg", "png", "pdf"):
        raise typer.BadParameter(f"{picture!r}: must be svg, png or pdf.", param_hint="--picture")
    runs = read_runs(folders, ledger)
    target = write_report(folders, output or folders[0] / "report.html", runs)
    drawn = [] if figures is None else _pictures(runs, figures, picture)
    refuted = {str(folder): run.result.privacy.refuted for folder, run in zip(folders, runs, strict=True)}
    if as_json:
        said = {folder: list(why) for folder, why in refuted.items() if why}
        told = {"report": str(target), "runs": [str(folder) for folder in folders], "refuted": said}
        show_json({**told, "figures": [str(file) for file in drawn]})
    else:
        say(f"report of {len(folders)} run{'s' if len(folders) > 1 else ''}: {target}")
        for file in drawn:
            say(f"picture: {file}")
        for folder, reasons in refuted.items():
            for why in reasons:
                say(f"{folder}: {why}", err=True)
    raise typer.Exit(1 if any(refuted.values()) else 0)


def _pictures(runs: Sequence[Run], folder: Path, kind: str) -> list[Path]:
    from quietgrad.report.figures import save_chart
    from quietgrad.report.page import charts_of

    return [
        save_chart(folder / f"{chart.title.lower().replace(' ', '-')}.{kind}", chart)
        for chart, _ in charts_of(runs)
    ]


def report_if_possible(folders: Sequence[Path], target: Path) -> Path | None:
    """Write the page after a training; a model that is trained and saved is not undone by a page that cannot be."""
    from quietgrad.errors import QuietgradError
    from quietgrad.report.page import write_report

    try:
        return write_report(folders, target)
    except QuietgradError as error:
        say(f"no {target.name}: {error}", err=True)
        return None
