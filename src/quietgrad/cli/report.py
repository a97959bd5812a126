"""`quietgrad report`, `quietgrad card`: pages about finished runs. `quietgrad frontier`: accuracy against ε.

Drawing that curve looks at the people once for every ε, and at held-out people to score: both are charged to a
ledger like any other use. Only where the data are declared public (``--public``) is nothing charged, and only there
can the line without privacy be drawn: it is a model without noise.
"""

from __future__ import annotations

import json
import math
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from quietgrad.assurance.report.card import FILL_IN, write_cards
from quietgrad.assurance.report.page import read_runs, write_page, write_report
from quietgrad.charts import Lines, Series, to_svg_file
from quietgrad.cli.options import Explain, Json, LedgerOfRun, RunFolder, answer, budget, say, say_meaning, usage
from quietgrad.cli.run_spec import RunSpec, account_of, with_options
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.core.errors import BudgetError, DataError, QuietgradError, UnprovableError
from quietgrad.core.files import write_atomically
from quietgrad.core.ledger.account import Account
from quietgrad.data.dataset import SPLIT_SEED, Dataset
from quietgrad.estimators.holdout import expected_error, hold_out_records
from quietgrad.methods.score_noise import is_too_noisy, score_text

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: quietgrad report runs/a9a runs/a9a-sgd -o comparison.html")
def report(
    folders: Annotated[list[Path], Argument(help="Folders of finished runs.", show_default=False)],
    output: Annotated[
        Path | None, Option("--output", "-o", help="The page; else report.html in the first folder.")
    ] = None,
    ledger: LedgerOfRun = None,
    as_json: Json = False,
) -> None:
    """Write curves, a comparison of the runs and their privacy certificates as one HTML file.

    Every ε is proved again and held against the run's options and ledger; exit code 1 if one is refuted.
    """
    runs = read_runs(folders, ledger)
    target = write_page(runs, output or folders[0] / "report.html")
    reasons = {str(folder): run.result.privacy.refuted for folder, run in zip(folders, runs, strict=True)}
    refuted = {folder: list(why) for folder, why in reasons.items() if why}
    summary = {"report": str(target), "runs": [str(folder) for folder in folders], "refuted": refuted}
    answer(as_json, summary, f"report of {len(folders)} run{'s' if len(folders) > 1 else ''}: {target}")
    if not as_json:
        for folder, why in refuted.items():
            say("\n".join(f"{folder}: {each}" for each in why), err=True)
    raise typer.Exit(1 if refuted else 0)


def report_if_possible(folders: Sequence[Path], target: Path) -> Path | None:
    """Write the page after a training; a model that is trained and saved is not undone by a page that cannot be."""
    try:
        return write_report(folders, target)
    except QuietgradError as error:
        say(f"no {target.name}: {error}", err=True)
        return None


card_app = typer.Typer(add_completion=False)


@card_app.command(epilog="Example: quietgrad card runs/a9a   ·   quietgrad card runs/a9a -o README.md")
def card(
    folder: RunFolder,
    output: Annotated[
        Path | None, Option("--output", "-o", help="A .md or .html file; else both, in the folder.")
    ] = None,
    ledger: LedgerOfRun = None,
    as_json: Json = False,
) -> None:
    """Write a model card: data as declared, guarantee, private scores, and intended use to fill in.

    The run's ε is proved again first. Scores that were computed without noise are left out.
    """
    written = write_cards(folder, output, ledger)
    yours = f"Lines that begin with “{FILL_IN.strip()}” are yours to write."
    answer(as_json, {"card": [str(file) for file in written]}, *(f"model card: {file}" for file in written), yours)


frontier_app = typer.Typer(add_completion=False)

_HELD_OUT = 0.2  # of the rows, where no test file is given
_WIDEST = 0.05  # the error of a point above which a curve tells too little for its cost
_DRAWN = (
    "; unless --test names them, who is held out is drawn anew by each call, so over several calls both accounts "
    "together are what a person may pay"
)


@frontier_app.command(
    epilog="Example: quietgrad frontier a9a --public --out runs/a9a-frontier   ·   "
    "quietgrad frontier people.csv --schema schema.json --epsilons 0.1,0.3 --account patients --out runs/frontier"
)
@with_options(
    "data", "delta", "relation", "test", "schema", "label", "classes", "task", "row_bound", "n_public", "ledger",
    "account", "cap_epsilon",
)  # fmt: skip
def frontier(
    spec: RunSpec,
    epsilons: Annotated[str, Option(help="Where to fit, such as 0.1,0.5,1.")] = "0.1,0.2,0.5,1,2,5",
    public: Annotated[
        bool, Option("--public", help="The data are public: charge nothing, and draw the non-private line.")
    ] = False,
    repeats: Annotated[int, Option(help="Fits at each ε (public data only: each one costs).")] = 3,
    score_epsilon: Annotated[float, Option(help="ε of each private score of the held-out people.")] = 0.3,
    out: Annotated[Path, Option(help="Folder for the picture and the numbers.")] = Path("runs/frontier"),
    held_out: Annotated[str | None, Option(help="Ledger account charged for the scores; else the same.")] = None,
    yes: Annotated[bool, Option("--yes", help="Do not ask before privacy budget is spent.")] = False,
    force: Annotated[
        bool, Option("--force", help=f"Go on even if every point would be more uncertain than ± {_WIDEST:g}.")
    ] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Fit the default model at each ε, score it on held-out records, and draw accuracy against ε."""
    if spec.data is None:
        raise typer.BadParameter("it is missing: a file, or a registered name.", param_hint="DATA")
    with usage():
        try:
            levels = sorted({float(word) for word in epsilons.split(",")})
        except ValueError:
            raise ValueError(f"epsilons={epsilons!r}: must be numbers such as 0.1,0.5,1.") from None
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: must be ≥ 1.")
    for level in levels:
        budget(level, spec.delta, spec.relation)
    spec = replace(spec, epsilon=levels[0], non_private=public)
    table = spec.load_data()
    if isinstance(table, ScannedData):
        raise DataError(f"{spec.data}: a frontier is drawn of one file, which is read whole.")
    if table.X_test is None:
        fixed = public or spec.relation == "replace-one"
        table = hold_out_records(
            table, _HELD_OUT, f"{SPLIT_SEED:x}" if fixed else secrets.token_hex(16), fixed=fixed
        )
    if spec.row_bound is not None:
        table = replace(table, row_bound=spec.row_bound)
    if public:
        curve = _public(table, spec, levels, repeats)
    else:
        _ask(table, spec, levels, score_epsilon, yes=yes, force=force)
        payer = spec.payer(out)
        scored = payer if held_out is None else account_of(spec.test, held_out, spec.ledger_in(out), None)
        curve = _private(table, spec, levels, score_epsilon, (payer, scored))
    score = "R²" if table.task == "regression" else "accuracy"
    summary = {"data": table.name, "score": score, "delta": spec.delta, "relation": spec.relation, "public": public}
    summary |= curve
    stated = [row for row in curve["points"] if row["value"] is not None]  # the others are too noisy to be drawn
    points = [(row["epsilon"], row["value"]) for row in stated]
    lines = [Series("private", points, tuple(row["error"] for row in stated))]
    if curve["non_private"] is not None:
        lines.append(Series("without privacy", [(levels[-1], curve["non_private"])], level=True))
    label = f"ε (δ = {spec.delta:g}, {spec.relation})"
    chart = Lines(f"{table.name}: {score} against ε", lines, label, score, log_x=True)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "frontier.json", (json.dumps(summary, indent=1) + "\n").encode())
    written = [out / "frontier.json"]
    if chart.svg():
        write_atomically(out / "frontier.svg", to_svg_file(chart).encode())
        written.append(out / "frontier.svg")
    say_meaning(explain, max(levels), spec.delta)
    text = [f"{score:<30}{label}"]
    text += [f"{score_text(row['value'], row['error']):<30}{row['epsilon']:g}" for row in curve["points"]]
    if curve["non_private"] is not None:
        text.append(f"{curve['non_private']:<30.4f}without privacy")
    answer(as_json, summary, *text, curve["cost"], f"written: {', '.join(map(str, written))}")


def _ask(
    table: Dataset, spec: RunSpec, levels: list[float], score_epsilon: float, *, yes: bool, force: bool
) -> None:
    """Say what the curve costs and how uncertain it is, by n and ε alone; refuse, or ask, before a charge."""
    assert table.X_test is not None
    guarantee = budget(score_epsilon, spec.delta, spec.relation)
    classes = 0 if table.classes is None else len(table.classes)
    cost = (
        f"{len(levels)} fits of together at most ε = {math.fsum(levels):g}, and {len(levels)} scores of "
        f"ε = {score_epsilon:g} each"
    )
    if spec.n_public is None and spec.relation != "replace-one":
        # The number of records is secret: a statement about it must be paid for.
        few, many = (expected_error(n, guarantee, classes=classes) for n in (1_000, 10_000))
        cost += f"; a point will be uncertain by about ± {few:.1g} if 1 000 are held out, ± {many:.1g} if 10 000"
        if not force:
            raise BudgetError(
                f"this would cost {cost}. Under add-remove the number of records is not public: state about how "
                "many there are with --n-public, or pass --force. Nothing was spent."
            )
    else:
        held_out = table.X_test.shape[0] if spec.n_public is None else _HELD_OUT * spec.n_public
        error = expected_error(held_out, guarantee, classes=classes)
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


def _model(table: Dataset, spec: RunSpec, epsilon: float, **settings: Any) -> Any:
    from quietgrad import estimators  # loads scikit-learn

    settings |= {"epsilon": epsilon, "delta": spec.delta, "relation": spec.relation, "row_bound": table.row_bound}
    if table.task == "regression":
        return estimators.PrivateHuberRegressor(**settings)
    assert table.class_labels is not None
    return estimators.PrivateLogisticRegression(classes=table.class_labels.values.tolist(), **settings)


def _public(table: Dataset, spec: RunSpec, levels: list[float], repeats: int) -> dict[str, Any]:
    from sklearn.linear_model import HuberRegressor, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    points = []
    for level in levels:
        fits = [_model(table, spec, level).fit(table.X, table.targets) for _ in range(repeats)]
        scores = [float(fit.score(table.X_test, table.targets_test)) for fit in fits]
        mean = math.fsum(scores) / repeats
        spread = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / max(1, repeats - 1) / repeats)
        points.append({"epsilon": level, "value": mean, "error": spread})
    plain = HuberRegressor() if table.task == "regression" else LogisticRegression(max_iter=2000)
    line = make_pipeline(MaxAbsScaler(), plain).fit(table.X, table.targets).score(table.X_test, table.targets_test)
    cost = f"cost: nothing is charged, the data were declared public; {repeats} fits at each ε"
    return {"points": points, "non_private": float(line), "cost": cost}


def _private(
    table: Dataset, spec: RunSpec, levels: list[float], score_epsilon: float, payers: tuple[Account, Account]
) -> dict[str, Any]:
    """Fit and score at every level; ``payers`` are the accounts of the fits and of the scores."""
    from quietgrad import estimators  # loads scikit-learn

    most, cap = math.fsum(levels), payers[0].cap  # basic composition: the ledger's own is smaller
    if cap is not None and most > cap.epsilon:
        raise BudgetError(
            f"the fits could cost ε = {most:g} together, more than --cap-epsilon {cap.epsilon:g}; ask for fewer or "
            "smaller ε. Nothing was spent."
        )
    say(
        f"Charged before it is drawn: at most ε = {most:g} to {str(payers[0])!r}, and {len(levels)} scores of "
        f"ε = {score_epsilon:g} to {str(payers[1])!r}. Public data cost nothing with --public.",
        err=True,
    )
    points = []
    for level in levels:
        model = _model(table, spec, level, account=payers[0]).fit(table.X, table.targets)
        score = estimators.private_score(
            model, table.X_test, table.targets_test, epsilon=score_epsilon, delta=spec.delta,
            relation=spec.relation, account=payers[1],
        )  # fmt: skip
        value, error = (score.r2 if table.task == "regression" else score.accuracy) or (math.nan, math.nan)
        # A number that noise drowns is not stated, as in every other score.
        noisy = is_too_noisy("r2" if table.task == "regression" else "accuracy", value, error)
        points.append({"epsilon": level, "value": None if noisy else float(value), "error": _finite(error)})
    spent = {str(payer): _spent(payer, spec) for payer in payers}
    summary = ", ".join(
        f"ε = {epsilon:.4g} by {name!r}" if epsilon is not None else f"no common ε by {name!r}"
        for name, epsilon in spent.items()
    )
    drawn = _DRAWN if len(spent) > 1 and spec.relation == "add-remove" else ""
    cost = f"cost: {summary} in all at δ = {spec.delta:g}; no line without privacy, which would cost without end"
    return {"points": points, "non_private": None, "spent": spent, "cost": cost + drawn}


def _finite(error: float) -> float | None:
    return float(error) if math.isfinite(error) else None


def _spent(payer: Account, spec: RunSpec) -> float | None:
    ledger = payer.open()
    try:
        return (
            None if ledger is None else ledger.spent(payer.name, delta=spec.delta, relation=spec.relation).epsilon
        )
    except UnprovableError:  # earlier runs of the account were planned under another relation
        return None
