"""`quietgrad plan`: what a run would release and cost, in words and a table, before it touches any data."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from typer import Argument, Option

from quietgrad.assurance.report.certificate import sampling_words
from quietgrad.cli.options import Explain, Json, budget, say, say_meaning, show_json, show_rows, show_table, usage
from quietgrad.cli.run_spec import RunSpec, algorithm_from, with_options
from quietgrad.core.accounting.accounting import sensitivity_factor
from quietgrad.core.plans.explain import ScanCostEstimate, expected_cost
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.plans.schedule import plan as make_plan
from quietgrad.methods.base import Algorithm
from quietgrad.methods.budget_allocation import for_table
from quietgrad.methods.dp_spider import DPSpider
from quietgrad.methods.regimes import Regime
from quietgrad.methods.registry import ALGORITHMS

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: quietgrad plan dp-srm --n 32561 --steps 1500 --batch-size 100 --epsilon 1 --delta 1e-5"
)
@with_options(
    "epsilon", "delta", "relation", "steps", "batch_size", "learning_rate", "clip", "gamma", "sampling", "settings"
)
def plan(
    spec: RunSpec,
    algorithm: Annotated[
        str | None,
        Argument(help="Such as dp-srm, dp-sgd, dp-gd (the default), dp-agd; for a scan, the estimators' default."),
    ] = None,
    n: Annotated[int | None, Option("--n", help="Number of records (public).")] = None,
    people: Annotated[bool, Option("--people", help="n counts people, each with any number of records.")] = False,
    records_public: Annotated[
        int | None, Option(help="With --people: how many records they have together, if that is public.")
    ] = None,
    rows: Annotated[
        float | None, Option(help="Rows of a table to scan, such as 1e9: adds passes, bytes and time.")
    ] = None,
    columns: Annotated[int | None, Option(help="Number of feature columns of that table.")] = None,
    cluster: Annotated[str, Option(help="Machines x cores that scan the table, such as 64x8.")] = "1x1",
    noise_multiplier: Annotated[float | None, Option(help="Fix the noise; ε is then what it proves to be.")] = None,
    radius: Annotated[
        float | None,
        Option(help="A public bound on how far the model moves, to say whether differences help (default: path)."),
    ] = None,
    smoothness: Annotated[
        float | None, Option(help="With --radius: M, one record's curvature at most; ¼ for logistic loss.")
    ] = None,
    show_list: Annotated[bool, Option("--list", help="List the algorithms and their settings.")] = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Compute the cost of a run before it reads data: each release, its sensitivity and noise, and the total ε."""
    if show_list:
        _list(as_json)
        return
    if rows is not None:
        n = whole(rows, "--rows") if n is None else n
        if columns is None or columns < 1:
            raise typer.BadParameter("it is missing: how many feature columns are there?", param_hint="--columns")
    if n is None:
        raise typer.BadParameter("it is missing: how many records are there?", param_hint="--n")
    epsilon = spec.epsilon
    if algorithm is None and columns is not None and not (spec.flags or spec.settings):
        epsilon = 1.0 if epsilon is None else epsilon
        method: Algorithm = for_table(
            n, columns, budget=budget(epsilon, spec.delta, spec.relation), inference=False
        )
    else:
        method = algorithm_from(algorithm or "dp-gd", spec.flags, spec.settings)
    if noise_multiplier is not None and epsilon is None:
        epsilon = 1.0  # not used: the noise is fixed, and the ε printed is what it proves
    guarantee = budget(epsilon, spec.delta, spec.relation) if method.private else None
    with usage():
        unit = "person" if people else "record"
        the_plan = make_plan(method, n=n, budget=guarantee, noise_multiplier=noise_multiplier, unit=unit,
                             records_public=records_public)  # fmt: skip
    say_meaning(explain, the_plan.proof.epsilon if the_plan.is_private else None, spec.delta, unit)
    if radius is None and isinstance(method, DPSpider):
        radius = method.path
    regime = None if radius is None else _regime(method, radius, smoothness)
    reading = None if columns is None or rows is None else expected(the_plan, columns, cluster)
    if as_json:
        proof = None if guarantee is None else the_plan.proof.to_json()
        more: dict[str, Any] = {} if reading is None else {"scan": reading.to_json()}
        if guarantee is not None:
            more["generalization"] = the_plan.generalization
        if regime is not None:
            more["differences"] = regime.to_json()
        show_json({**the_plan.to_json(), "proof": proof, **more})
        return
    if reading is not None:
        show_rows(f"scanning {n:,} rows of {columns} columns on {cluster}", reading.lines())
    say(the_plan.explain())
    symbols = method.bound_symbols()
    for slot in the_plan.schedule.slots:
        if slot.name in symbols:
            symbol, meaning = symbols[slot.name]
            say(f"C of {slot.name!r} is {symbol}: {meaning}")
    if regime is not None:
        say(str(regime))
    if the_plan.is_private:
        say(
            "on new records: the mean of a loss in [0, 1], such as the error rate, is expected to differ from that "
            f"on these by at most {the_plan.generalization:.3g}, because of the noise"
        )
        moves = sensitivity_factor(spec.relation)
        filtered = the_plan.schedule.composition == "filter"
        lines = []
        for slot in the_plan.schedule.slots:
            scale = slot.multiplier(the_plan.noise_multiplier) * slot.mechanism.factor
            symbol, _ = symbols.get(slot.name, ("C", ""))
            noise = "within the filter" if filtered else f"{scale:.4g}·{symbol}"
            sampling = sampling_words(slot.sampling.to_json())
            lines.append((slot.name, slot.count, sampling, f"{moves:g}·{symbol}", noise))
        show_table(("release", "at most", "sampling", "sensitivity", "noise σ"), lines)


def _regime(method: Algorithm, radius: float, smoothness: float | None) -> Regime:
    """Whether differences pay, for the method's clip and M as given, or as the method has it."""
    bend = getattr(method, "smoothness", None) if smoothness is None else smoothness
    if bend is None:
        raise typer.BadParameter("it is missing: how curved is a record's loss at most?", param_hint="--smoothness")
    with usage():
        return Regime(float(getattr(method, "clip", 1.0)), float(bend), radius)


def whole(number: float, option: str) -> int:
    """Check that a number, which may be written as 1e9, is a count, and return it."""
    if not (number >= 1.0 and float(number).is_integer()):
        raise typer.BadParameter(f"{number:g}: must be a whole number ≥ 1.", param_hint=option)
    return int(number)


def expected(the_plan: Plan, columns: int, cluster: str) -> ScanCostEstimate:
    """Estimate the cost of scanning the plan's table on ``MACHINESxCORES``."""
    machines, _, cores = cluster.partition("x")
    if not (machines.isdigit() and cores.isdigit() and int(machines) and int(cores)):
        raise typer.BadParameter(f"{cluster!r}: must be MACHINESxCORES, such as 64x8.", param_hint="--cluster")
    return expected_cost(the_plan, columns, int(machines), int(cores))


def _list(as_json: bool) -> None:
    rows = []
    for entry in ALGORITHMS.values():
        kind = entry.kind
        settings = {
            f.name: "required" if f.default is dataclasses.MISSING else str(f.default)
            for f in dataclasses.fields(kind)
        }
        summary = (kind.__doc__ or "").strip().splitlines()[0]
        rows.append({"name": kind.name, "private": kind.private, "settings": settings, "summary": summary})
    if as_json:
        show_json(rows)
        return
    for row in rows:
        say(f"{row['name']}: {row['summary']}")
        say("    " + "  ".join(f"{key}={value}" for key, value in row["settings"].items()))
