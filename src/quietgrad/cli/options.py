"""Options that several commands share, printing, and errors in the words of the command line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from quietgrad.sanitize import sanitize, sanitize_lines

if TYPE_CHECKING:
    from rich.table import Table

    from quietgrad.cli.run_spec import RunSpec
    from quietgrad.privacy.budget import Budget


def algorithm_names() -> list[str]:
    """The algorithms, for completion."""
    from quietgrad.algorithms.registry import ALGORITHMS

    return list(ALGORITHMS)


def dataset_names() -> list[str]:
    """The registered data sets, for completion."""
    from quietgrad.data.registry import REGISTRY

    return sorted(REGISTRY)


Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
Explain = Annotated[bool, typer.Option("--explain", help="Say in one line what ε and δ mean.")]
Epsilon = Annotated[
    float | None, typer.Option(help="Privacy budget ε; smaller is more private.", show_default=False)
]
Delta = Annotated[float, typer.Option(help="Privacy budget δ: well below 1/n.")]
RelationName = Annotated[
    str,
    typer.Option(
        "--relation",
        help="Neighbouring relation: add-remove (one record more or less) or replace-one.",
        autocompletion=lambda: ["add-remove", "replace-one"],
    ),
]
Algorithm = Annotated[
    str, typer.Option(help="Such as dp-srm, dp-sgd, dp-gd; `quietgrad plan --list` shows all with their settings.")
]
Steps = Annotated[int | None, typer.Option(help="Number of steps.", show_default=False)]
BatchSize = Annotated[int | None, typer.Option(help="(Expected) records per step.", show_default=False)]
LearningRate = Annotated[
    str | None, typer.Option(help="A number or a schedule such as cosine:0.5.", show_default=False)
]
Clip = Annotated[float | None, typer.Option(help="L2 bound on one record's gradient.", show_default=False)]
Gamma = Annotated[float | None, typer.Option(help="DP-SRM: weight of the fresh gradient.", show_default=False)]
Sampling = Annotated[
    str | None,
    typer.Option(
        help="poisson, random-allocation, fixed-size, full, single-pass or turns.",
        show_default=False,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting of the algorithm, as KEY=VALUE; may be repeated."),
]


def known_task(text: str | None) -> str | None:
    """``text``, if there is such a task; anything else is a mistake on the command line."""
    from quietgrad.data.dataset import check_task
    from quietgrad.errors import DataError

    try:
        check_task(text)
    except DataError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Account = Annotated[str, typer.Option(help="Ledger account to charge: a name for the people in the data.")]
DataAccount = Annotated[
    str | None,
    typer.Option(help="Ledger account to charge: a name for the people in the data; else the file's name."),
]
CapEpsilon = Annotated[float | None, typer.Option(help="Refuse if the account would exceed this ε.")]
RowBound = Annotated[float | None, typer.Option(help="Public bound on the norm of a row.")]
SchemaFile = Annotated[str | None, typer.Option(help="Public schema of a CSV or parquet file.")]
Label = Annotated[str | None, typer.Option("--label", "--target", help="Label column; else the last.")]
Drop = Annotated[list[str] | None, typer.Option(help="Leave this column out; may be repeated.", show_default=False)]
Keep = Annotated[
    str | None, typer.Option(help="Column of ids: no feature, kept beside predictions.", show_default=False)
]
Delimiter = Annotated[str | None, typer.Option(help="Of delimited text: , ; or a tab.", show_default=False)]
Encoding = Annotated[str | None, typer.Option(help="Of delimited text, such as cp1252.", show_default=False)]
Holdout = Annotated[
    float | None,
    typer.Option(help="Share of the records to hold out for a private score, such as 0.2.", show_default=False),
]
Classes = Annotated[str | None, typer.Option(help="Public class labels, such as no,yes.")]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="binary, multiclass or regression.",
        callback=known_task,
        autocompletion=lambda: ["binary", "multiclass", "regression"],
    ),
]


def with_options(spec: type[RunSpec], *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make fields of ``spec`` (all, or ``names``) options of a command, which gets them as one value ``spec``."""
    keyword = inspect.Parameter.KEYWORD_ONLY

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(spec, include_extras=True)
        shared = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name]
            )
            for one in dataclasses.fields(spec)
            if (one.name in names if names else hasattr(hints[one.name], "__metadata__"))
        ]

        @functools.wraps(command)
        def takes(**given: Any) -> None:
            options = {one.name: given.pop(one.name) for one in shared}
            command(spec=spec.from_options(options), **given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            *shared,
            *(one.replace(kind=keyword) for one in own if one.name != "spec"),
        ]
        takes.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        takes.__annotations__ = {one.name: one.annotation for one in parameters}
        return takes

    return decorate


@contextmanager
def usage() -> Iterator[None]:
    """Inside, a ``ValueError`` is a mistake on the command line: exit code 2.

    Errors that the product raises on purpose (an ε that no accountant proves, a cap) stay refusals: exit code 1.
    """
    from quietgrad.errors import QuietgradError

    try:
        yield
    except QuietgradError:
        raise
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error


def budget(epsilon: float | None, delta: float, relation: str) -> Budget:
    """The budget that the options state."""
    from quietgrad.privacy.budget import Budget, Relation

    if epsilon is None:
        raise typer.BadParameter(
            "it is missing: give a privacy budget, such as 1 (smaller is more private).", param_hint="--epsilon"
        )
    with usage():
        return Budget(epsilon, delta, Relation.parse(relation))


def class_labels(text: str | None) -> list[object] | None:
    """Labels as ``--classes`` lists them: numbers if all of them are.

    >>> class_labels("no, yes"), class_labels("1,2")
    (['no', 'yes'], [1, 2])
    """
    if text is None:
        return None
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


def say_meaning(asked: bool, epsilon: float | None, delta: float | None, unit: object = "record") -> None:
    """If ``--explain`` asks for it, say on stderr what the printed ε and δ mean; nothing of a run without noise."""
    if asked and epsilon is not None and delta is not None and math.isfinite(epsilon):
        factor = math.exp(min(epsilon, 700.0))
        say(
            f"ε = {epsilon:.4g}, δ = {delta:g}: one {unit} changes the probability of any outcome by a factor of "
            f"at most e^ε = {factor:.3g}, plus at most δ. Smaller is more private; ε = 1 is usual.",
            err=True,
        )


def say_table(table: Table) -> None:
    """Print a table of :func:`table_row` rows."""
    from rich.console import Console

    Console(markup=False, highlight=False).print(table)


def table_row(table: Table, *cells: object) -> None:
    """Add a row to a table; what is in its cells may come from another person's file."""
    table.add_row(*(sanitize(cell) for cell in cells))


def show_json(value: Any) -> None:
    """Print ``value`` as JSON; numbers that JSON has no word for become text."""
    typer.echo(json.dumps(value, indent=2, default=str, allow_nan=False))  # ASCII, controls escaped


def show_rows(title: str, rows: list[tuple[str, str]]) -> None:
    """Print two columns for people: what, and its value."""
    say(sanitize(title))
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        say(f"  {sanitize(name):<{width}}{sanitize(value)}")


def answer(
    as_json: bool, value: Any, *lines: object, table: tuple[str, list[tuple[str, str]]] | None = None
) -> None:
    """Print ``value`` as JSON for a program, or a table of two columns and lines for people."""
    if as_json:
        show_json(value)
        return
    if table is not None:
        show_rows(*table)
    for line in lines:
        say(line)


@contextmanager
def working(what: str, *, quiet: bool) -> Iterator[None]:
    """Inside, a bar on a terminal shows that work goes on, if it takes more than two seconds."""
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    bar = Progress(TextColumn(what), BarColumn(), TimeElapsedColumn(), console=console, transient=True)
    bar.add_task(what, total=None)
    timer = threading.Timer(2.0, bar.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        bar.stop()


def writable(path: Path) -> Path:
    """``path`` with its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


FLAGS = (
    "epsilon", "delta", "relation", "steps", "batch_size", "learning_rate", "clip", "gamma", "sampling",
    "algorithm", "oracle", "landscape", "objective", "regularizer", "row_bound", "rows", "label", "classes", "task",
    "n_features", "n_public", "model", "holdout", "score_share", "class_weight", "encoding", "delimiter",
    "schema", "account", "noise_multiplier", "rate", "accountant", "cap_epsilon", "head",
)  # fmt: skip
_PHRASES = {
    "For a non-private run pass budget=None.": "For a run without noise pass --non-private to `quietgrad train`.",
    "OutputPerturbation(mechanism='pure')": "--algorithm output-perturbation --set mechanism=pure",
    "pass budget=None, or use its private form": "pass --non-private, or use its private form",
    "budget=None": "--non-private",
    "Budget(..., relation='replace-one')": "relation='replace-one'",
}
_ARGUMENT = re.compile(rf"(?<![\w.])({'|'.join(FLAGS)})=('[^']*'|\"[^\"]*\"|\([^)]*\)|[-+\w.]+)?")


def to_flag_names(text: str) -> str:
    """``text`` with arguments of Python as flags.

    >>> to_flag_names("epsilon=-1.0: must be > 0 and finite. For a non-private run pass budget=None.")
    '--epsilon -1.0: must be > 0 and finite. For a run without noise pass --non-private to `quietgrad train`.'
    >>> to_flag_names("relation='add-remove': not proved; pass Budget(..., relation='replace-one').")
    '--relation add-remove: not proved; pass --relation replace-one.'
    >>> to_flag_names("say what they are: classes=(1, 2, 3), or task='regression'; batch_size=9: must be ≤ n=4.")
    'say what they are: --classes 1,2,3, or --task regression; --batch-size 9: must be ≤ n=4.'
    """
    for python, here in _PHRASES.items():
        text = text.replace(python, here)
    return _ARGUMENT.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    flag, value = f"--{found[1].replace('_', '-')}", found[2] or ""
    if value.startswith("("):
        value = ",".join(part.strip().strip("'\"") for part in value[1:-1].split(",") if part.strip())
    return f"{flag} {value.strip(chr(39) + chr(34))}".rstrip()
