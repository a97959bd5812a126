"""Printing, the options that many commands share, and what counts as bad usage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import QuietgradError
from quietgrad.core.sanitize import sanitize, sanitize_lines

Rows = Sequence[tuple[str, str]]
"""What, and its value: two columns for people."""
Json = Annotated[bool, Option("--json", help="Print JSON for a program to read.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress bar.")]
Explain = Annotated[bool, Option("--explain", help="Say in one line what ε and δ mean.")]
Delta = Annotated[float, Option(help="Privacy budget δ: at most 1/(100 n).")]
RelationName = Annotated[
    str, Option("--relation", help="Neighbouring relation: add-remove (one record more or less) or replace-one.")
]
LedgerOfRun = Annotated[
    Path | None,
    Option(
        "--ledger", help="Ledger that was charged for the run, if its folder does not name it.", show_default=False
    ),
]
RunFolder = Annotated[Path, Argument(metavar="RUN", help="Folder of a finished run.", show_default=False)]


@contextmanager
def usage() -> Iterator[None]:
    """Inside, a ``ValueError`` is a mistake on the command line: exit code 2.

    Errors that the product raises on purpose (an ε that no accountant proves, a cap) stay refusals: exit code 1.
    """
    try:
        yield
    except QuietgradError:
        raise
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error


def budget(epsilon: float | None, delta: float, relation: str) -> Budget:
    """The budget that the options state."""
    if epsilon is None:
        raise typer.BadParameter(
            "it is missing: give a privacy budget, such as 1 (smaller is more private).", param_hint="--epsilon"
        )
    with usage():
        return Budget(epsilon, delta, Relation.parse(relation))


def class_labels(text: str) -> list[object]:
    """Labels as ``--classes`` lists them: numbers if all of them are.

    >>> class_labels("no, yes"), class_labels("1,2")
    (['no', 'yes'], [1, 2])
    """
    words = [word.strip() for word in text.split(",")]
    labels: list[object] = list(words)
    with suppress(ValueError):
        labels = [int(word) for word in words]
    if len(labels) < 2 or len(set(labels)) != len(labels):
        raise typer.BadParameter(f"--classes {text}: must be two or more different labels.")
    return labels


def say(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print for people: lines that are laid out here, with nothing in them that a terminal obeys."""
    typer.echo(sanitize_lines(text), err=err, nl=nl)


def say_meaning(wanted: bool, epsilon: float | None, delta: float | None, unit: object = "record") -> None:
    """If ``--explain`` asks for it, say on stderr what the printed ε and δ mean; nothing of a run without noise."""
    if wanted and epsilon is not None and delta is not None and math.isfinite(epsilon):
        factor = math.exp(min(epsilon, 700.0))
        say(
            f"ε = {epsilon:.4g}, δ = {delta:g}: one {unit} changes the probability of any outcome by a factor of "
            f"at most e^ε = {factor:.3g}, plus at most δ. Smaller is more private; ε = 1 is usual.",
            err=True,
        )


def show_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table; what is in its cells may come from another person's file."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(sanitize(cell) for cell in row))
    Console(markup=False, highlight=False).print(table)


def show_json(value: object) -> None:
    """Print ``value`` as JSON; numbers that JSON has no word for become text."""
    typer.echo(json.dumps(value, indent=2, default=str, allow_nan=False))  # ASCII, controls escaped


def show_rows(title: str, rows: Rows) -> None:
    """Print two columns for people: what, and its value."""
    say(sanitize(title))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        say(f"  {sanitize(name):<{width}}{sanitize(value)}")


def answer(as_json: bool, value: object, *lines: object, table: tuple[str, Rows] | None = None) -> None:
    """Print ``value`` as JSON for a program, or a table of two columns and lines for people."""
    if as_json:
        show_json(value)
        return
    if table is not None:
        show_rows(*table)
    for line in lines:
        say(line)


def writable(path: Path) -> Path:
    """``path`` with its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
