"""`quietgrad report`: one self-contained page about one or more finished runs.

`quietgrad frontier`: accuracy against ε on a table, with what the search itself costs.

Drawing the curve looks at the people once for every ε, and at held-out people to score: both are charged to a
ledger like any other use. Only where the data are declared public (``--public``) is nothing charged, and only there
can the line without privacy be drawn: it is a model without noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.cli.options import (
    Classes,
    DataAccount,
    Delta,
    Explain,
    Json,
    Label,
    RelationName,
    TaskName,
    class_labels,
    say,
    say_meaning,
    show_json,
    usage,
)
from quietgrad.cli.run_spec import account_of
from quietgrad.privacy.budget import DEFAULT_RELATION

if TYPE_CHECKING:
    from quietgrad.charts import Lines
    from quietgrad.curators.account import Account
    from quietgrad.data import Dataset
    from quietgrad.report.page import ReportedRun

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
        typer.Option(
            help="Ledger that was charged for the runs, if their folders do not name it.", show_default=False
        ),
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


def _pictures(runs: Sequence[ReportedRun], folder: Path, kind: str) -> list[Path]:
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


frontier_app = typer.Typer(add_completion=False)

_USUAL = "0.1,0.2,0.5,1,2,5"
_WIDEST = 0.05  # the error of a point above which a curve tells too little for its cost
_DRAWN = (
    "; unless --test names them, who is held out is drawn anew by each call, so over several calls both accounts "
    "together are what a person may pay"
)


@frontier_app.command(
    epilog="Example: quietgrad frontier a9a --public --plot a9a.svg   ·   "
    "quietgrad frontier people.csv --schema schema.json --epsilons 0.1,0.3 --account patients --out runs/frontier"
)
def frontier(
    data: Annotated[str, typer.Argument(help="A file, or a registered name.", show_default=False)],
    epsilons: Annotated[str, typer.Option(help="Where to fit, such as 0.1,0.5,1.")] = _USUAL,
    delta: Delta = 1e-5,
    relation: RelationName = DEFAULT_RELATION,
    public: Annotated[
        bool, typer.Option("--public", help="The data are public: charge nothing, and draw the non-private line.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Fits at each ε (public data only: each one costs).")] = 3,
    score_epsilon: Annotated[float, typer.Option(help="ε of each private score of the held-out people.")] = 0.3,
    out: Annotated[Path, typer.Option(help="Folder for the picture, the numbers and the ledger.")] = Path(
        "runs/frontier"
    ),
    ledger: Annotated[Path | None, typer.Option(help="Ledger file; else the project's own.")] = None,
    account: DataAccount = None,
    held_out: Annotated[
        str | None, typer.Option(help="Ledger account charged for the scores; else the same.", show_default=False)
    ] = None,
    cap_epsilon: Annotated[
        float | None, typer.Option(help="Refuse if the fits together could exceed this ε.", show_default=False)
    ] = None,
    test: Annotated[Path | None, typer.Option(help="Held-out records; else a fifth of the rows.")] = None,
    schema: Annotated[Path | None, typer.Option(help="Public schema of a CSV or parquet file.")] = None,
    label: Label = None,
    classes: Classes = None,
    task: TaskName = None,
    row_bound: Annotated[float | None, typer.Option(help="Public bound on the norm of a row.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw it to this .svg, .png or .pdf.")] = None,
    n_public: Annotated[
        int | None,
        typer.Option(
            help="Public number of records, rough is enough: says beforehand how uncertain points will be."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before privacy budget is spent.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help=f"Go on even if every point would be more uncertain than ± {_WIDEST:g}.")
    ] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Fit the default model at each ε, score it on held-out records, and draw accuracy against ε."""
    from quietgrad.charts import in_a_file
    from quietgrad.files import write_atomically
    from quietgrad.privacy.budget import Budget, Relation

    with usage():
        levels = _levels(epsilons)
        for level in levels:
            Budget(level, delta, Relation.parse(relation))
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: must be ≥ 1.")
    given = {"test": test, "schema": schema, "label": label, "task": task, "classes": class_labels(classes)}
    table = _load(data, given)
    if not public:
        table.refuse_uncounted(Budget(levels[0], delta, Relation.parse(relation)))
    table = _with_held_out(table, relation)
    if row_bound is not None:
        table = replace(table, row_bound=row_bound)
    if public:
        found = _public(table, levels, delta, relation, repeats)
    else:
        _ask(table, levels, delta, relation, score_epsilon, n_public, yes=yes, force=force)
        cap = None if cap_epsilon is None else Budget(cap_epsilon, delta, Relation.parse(relation))
        payer = account_of(data, account, ledger, cap)
        scored = payer if held_out is None else account_of(test, held_out, ledger, None)
        found = _private(table, levels, delta, relation, score_epsilon, (payer, scored), quiet=as_json)
    import json

    chart = _chart(data, found, relation)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "frontier.json", (json.dumps({"data": table.name, **found}, indent=1) + "\n").encode())
    write_atomically(out / "frontier.svg", in_a_file(chart).encode())
    if plot is not None:
        from quietgrad.report.figures import save_chart

        save_chart(plot, chart)
    say_meaning(explain, max(levels), delta)
    if as_json:
        show_json({"data": table.name, **found})
        return
    say(f"{found['score']:<10}{'±':>8}   ε (δ = {delta:g}, {relation})")
    for row in found["points"]:
        say(f"{row['value']:<10.4f}{row['error']:>8.4f}   {row['epsilon']:g}")
    if found["non_private"] is not None:
        say(f"{found['non_private']:<10.4f}{'':>8}   without privacy")
    say(found["cost"])
    say(f"written: {out / 'frontier.svg'}, {out / 'frontier.json'}{f', {plot}' if plot else ''}")


def _ask(
    table: Dataset,
    levels: list[float],
    delta: float,
    relation: str,
    score_epsilon: float,
    n_public: int | None,
    *,
    yes: bool,
    force: bool,
) -> None:
    """Say what the curve costs and how uncertain it is, by n and ε alone; refuse, or ask, before a charge."""
    import sys

    from quietgrad.cli.scoring import expected_error
    from quietgrad.errors import BudgetError
    from quietgrad.privacy.budget import Budget, Relation

    assert table.X_test is not None
    if n_public is not None:
        held: float | None = n_public / 5
    else:  # under add-remove the number of records is a secret, of which nothing may be told unpaid
        held = float(table.X_test.shape[0]) if Relation.parse(relation) is Relation.REPLACE_ONE else None
    promise = Budget(score_epsilon, delta, Relation.parse(relation))
    classes = 0 if table.classes is None else len(table.classes)
    cost = (
        f"{len(levels)} fits of together at most ε = {math.fsum(levels):g}, and {len(levels)} scores of "
        f"ε = {score_epsilon:g} each"
    )
    if held is None:
        few, many = (expected_error(n, promise, classes=classes) for n in (1_000, 10_000))
        cost += f"; a point will be uncertain by about ± {few:.1g} if 1 000 are held out, ± {many:.1g} if 10 000"
        if not force:
            raise BudgetError(
                f"this would cost {cost}. Under add-remove the number of records is not public: state about how "
                "many there are with --n-public, or pass --force. Nothing was spent."
            )
    else:
        error = expected_error(held, promise, classes=classes)
        cost += f"; every point will be uncertain by about ± {error:.1g}"
        if error > _WIDEST and not force:
            raise BudgetError(
                f"this would cost {cost}, more than ± {_WIDEST:g}. Raise --score-epsilon, give more held-out "
                "records, or pass --force. Nothing was spent."
            )
    if yes:
        return
    if not sys.stdin.isatty():
        raise BudgetError(f"this costs {cost}. Pass --yes to spend it. Nothing was spent.")
    typer.confirm(f"This costs {cost}. Go on?", abort=True, err=True)


def _levels(text: str) -> list[float]:
    """
    >>> _levels("1, 0.5")
    [0.5, 1.0]
    """
    try:
        return sorted({float(word) for word in text.split(",")})
    except ValueError:
        raise ValueError(f"epsilons={text!r}: must be numbers such as 0.1,0.5,1.") from None


def _load(data: str, given: dict[str, Any]) -> Dataset:
    from quietgrad.data import load

    return load(data, **{key: value for key, value in given.items() if value is not None})


def _with_held_out(table: Dataset, relation: str) -> Dataset:
    """The table with held-out rows of its own, a fifth where it brings none.

    Under add-remove each row is held out by a draw of its own: in a split of fixed sizes one record more would move
    others to the other side, and tables that are neighbours would not have parts that are.
    """
    import numpy as np

    from quietgrad.data.dataset import SPLIT_SEED
    from quietgrad.errors import DataError
    from quietgrad.privacy.budget import Relation
    from quietgrad.privacy.rng import SecureStream, fresh_key

    if table.X_test is not None and table.y_test is not None:
        return table
    if Relation.parse(relation) is Relation.ADD_REMOVE:
        aside = SecureStream(fresh_key(), "split").uint64(0, table.n) < np.uint64(2**64 // 5)
    elif table.n < 20:
        raise DataError(f"{table.name}: has too few rows to hold some out; give --test.")
    else:
        aside = np.random.default_rng(SPLIT_SEED).permutation(table.n) < table.n // 5
    return replace(table, X=table.X[~aside], y=table.y[~aside], X_test=table.X[aside], y_test=table.y[aside])


def _model(table: Dataset, epsilon: float, delta: float, relation: str, **kept: Any) -> Any:
    from quietgrad.estimators import PrivateHuberRegressor, PrivateLogisticRegression

    shared = {"epsilon": epsilon, "delta": delta, "relation": relation, "row_bound": table.row_bound, **kept}
    if table.task == "regression":
        return PrivateHuberRegressor(**shared)
    return PrivateLogisticRegression(classes=table.classes, **shared)


def _public(table: Dataset, levels: list[float], delta: float, relation: str, repeats: int) -> dict[str, Any]:
    from sklearn.linear_model import HuberRegressor, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    points = []
    for level in levels:
        scores = [
            float(_model(table, level, delta, relation).fit(table.X, table.y).score(table.X_test, table.y_test))
            for _ in range(repeats)
        ]
        mean = math.fsum(scores) / repeats
        spread = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / max(1, repeats - 1) / repeats)
        points.append({"epsilon": level, "value": mean, "error": spread})
    plain = HuberRegressor() if table.task == "regression" else LogisticRegression(max_iter=2000)
    line = make_pipeline(MaxAbsScaler(), plain).fit(table.X, table.y).score(table.X_test, table.y_test)
    return {
        "score": "R²" if table.task == "regression" else "accuracy",
        "points": points,
        "non_private": float(line),
        "delta": delta,
        "relation": relation,
        "public": True,
        "cost": f"cost: nothing is charged, the data were declared public; {repeats} fits at each ε",
    }


def _private(
    table: Dataset,
    levels: list[float],
    delta: float,
    relation: str,
    score_epsilon: float,
    payers: tuple[Account, Account],  # of the fits, of the scores
    *,
    quiet: bool,
) -> dict[str, Any]:
    from quietgrad.errors import BudgetError
    from quietgrad.estimators import private_score
    from quietgrad.privacy.budget import Relation

    most, cap = math.fsum(levels), payers[0].cap  # basic composition: the ledger's own is smaller
    if cap is not None and most > cap.epsilon:
        raise BudgetError(
            f"the fits could cost ε = {most:g} together, more than --cap-epsilon {cap.epsilon:g}; ask for fewer or "
            "smaller ε. Nothing was spent."
        )
    if not quiet:
        say(
            f"Charged before it is drawn: at most ε = {most:g} to {str(payers[0])!r}, and {len(levels)} scores of "
            f"ε = {score_epsilon:g} to {str(payers[1])!r}. Public data cost nothing with --public.",
            err=True,
        )
    points = []
    for level in levels:
        model = _model(table, level, delta, relation, account=payers[0])
        model.fit(table.X, table.y)
        score = private_score(
            model, table.X_test, table.y_test, epsilon=score_epsilon, delta=delta, relation=relation,
            account=payers[1],
        )  # fmt: skip
        value, error = (score.r2 if table.task == "regression" else score.accuracy) or (math.nan, math.nan)
        points.append({"epsilon": level, "value": float(value), "error": float(error)})
    spent = {str(payer): _spent(payer, delta, relation) for payer in payers}
    told = ", ".join(
        f"ε = {epsilon:.4g} by {name!r}" if epsilon is not None else f"no common ε by {name!r}"
        for name, epsilon in spent.items()
    )
    return {
        "score": "R²" if table.task == "regression" else "accuracy",
        "points": points,
        "non_private": None,
        "delta": delta,
        "relation": relation,
        "public": False,
        "spent": spent,
        "cost": f"cost: {told} in all at δ = {delta:g}; no line without privacy, which would cost without end"
        + (_DRAWN if len(spent) > 1 and Relation.parse(relation) is Relation.ADD_REMOVE else ""),
    }


def _spent(payer: Account, delta: float, relation: str) -> float | None:
    from quietgrad.errors import UnprovableError

    ledger = payer.open()
    try:
        return None if ledger is None else ledger.spent(payer.name, delta=delta, relation=relation).epsilon
    except UnprovableError:  # earlier runs of the account were planned under another relation
        return None


def _chart(name: str, found: dict[str, Any], relation: str) -> Lines:
    from quietgrad.charts import Lines, Series

    points = [(row["epsilon"], row["value"]) for row in found["points"]]
    lines = [Series("private", points, tuple(row["error"] for row in found["points"]))]
    if found["non_private"] is not None:
        lines.append(Series("without privacy", [(points[-1][0], found["non_private"])], level=True))
    label = f"ε (δ = {found['delta']:g}, {relation})"
    return Lines(f"{Path(name).name}: {found['score']} against ε", lines, label, found["score"], log_x=True)
