"""`quietgrad train` and `quietgrad resume`: a table and a budget in; a model, a result and a report out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quietgrad.cli.ledger import reminder, so_far
from quietgrad.cli.options import (
    Explain,
    Json,
    Quiet,
    say,
    say_meaning,
    show_json,
    show_rows,
    usage,
    with_options,
    working,
)
from quietgrad.cli.report import report_if_possible
from quietgrad.cli.run_spec import RunSpec, objective_from
from quietgrad.cli.scoring import (
    clipped_features,
    held_out_score,
    metrics_of,
    plain_scores,
    remember_trained,
    save_score,
)

if TYPE_CHECKING:
    from quietgrad.data import Dataset
    from quietgrad.training.minimizing import Watched
    from quietgrad.training.result import Result

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: quietgrad train a9a --algorithm dp-srm --epsilon 1 --delta 1e-5 --out runs/a9a   ·   "
    "quietgrad train people.csv --schema schema.json --epsilon 0.5 --account patients --out runs/people"
)
@with_options(RunSpec)
def train(
    spec: RunSpec,
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the model, result, ledger and report.")] = Path("runs/last"),
    from_file: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Take all options from a TOML file or the run.json of a run.", show_default=False
        ),
    ] = None,
    explain: Explain = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a finished result in the folder.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model privately; an interrupted run continues with `quietgrad resume DIR`."""
    if from_file is not None:
        if (changed := _given(context)) - {"from_file", "out", "overwrite", "quiet", "as_json", "explain"}:
            raise typer.BadParameter(f"the file says the whole run; leave {', '.join(sorted(changed))} out.")
        spec = RunSpec.read(from_file)
    with usage():
        spec.check()
    _check_folder(out, overwrite=overwrite)
    if not (quiet or as_json) and (words := reminder()) is not None:
        say(words, err=True)
    result = run(spec, out, quiet=quiet or as_json)
    show(result, out, as_json=as_json, explain=explain)


def run(spec: RunSpec, out: Path, *, quiet: bool, resumed: bool = False) -> Result:
    """Train, or continue, the run that ``spec`` describes in the folder ``out``; write everything it leaves."""
    from quietgrad.plans.counting import NOMINAL

    if spec.landscape is not None:
        return run_on_landscape(spec, out, quiet=quiet, resumed=resumed)
    data = spec.load_data()
    with usage():
        people = spec.people_in(data)
    if spec.uses_estimator:
        return _fit_model(spec, out, data, quiet=quiet)
    facts = spec.describe_objective(data)
    with usage():
        loss = objective_from(facts)

    def method(n: int) -> Any:
        return spec.make_algorithm(data, n)

    with usage():
        method(NOMINAL if spec.n_public is None else spec.n_public)  # a mistake is told before anything is written
    table = getattr(data, "table", None) or (data.X, data.y)
    if not resumed:
        _begin(spec, out, data)
    whose = {"person": people, "combine": spec.combine, "records_per_person": spec.records_per_person}
    result, watched = _descend(spec, out, (loss, table, method), whose, quiet=quiet, resumed=resumed)
    return finish(spec, out, data, result, watched, loss)


def _descend(
    spec: RunSpec, out: Path, problem: tuple[Any, Any, Any], whose: Mapping[str, Any], *, quiet: bool, resumed: bool
) -> tuple[Result, Watched]:
    """Minimise the problem (objective, data, method), or continue; an interruption says how to go on."""
    from quietgrad.training import minimize, resume
    from quietgrad.training.minimizing import progress_bar

    kept: dict[str, Any] = {"folder": out, "checkpoint_seconds": spec.checkpoint_seconds, **whose}
    try:
        with usage(), progress_bar(quiet=quiet) as watched:
            if resumed:
                return resume(*problem, callback=watched, **kept), watched
            result = minimize(
                *problem, budget=spec.budget(), n_public=spec.n_public, records_public=spec.records_public,
                callback=watched, account=spec.payer(out), **kept,
            )  # fmt: skip
            return result, watched
    except KeyboardInterrupt:
        say(f"interrupted; continue with `quietgrad resume {out}`.", err=True)
        raise


def _begin(spec: RunSpec, out: Path, data: Any) -> None:
    """Write what a run is before it releases anything: its options, and keyed digests of who is trained on."""
    spec.save(out)
    if not hasattr(data, "table"):
        remember_trained(out, data)


def _fit_model(spec: RunSpec, out: Path, data: Dataset, *, quiet: bool) -> Result:
    from quietgrad.cli import models

    with usage():
        models.estimator_of(spec, data, "default")  # a mistake is told before anything is written
    _begin(spec, out, data)
    with usage(), working(f"fitting {spec.model or 'linear'}", quiet=quiet):
        result = models.fit(spec, data, out)
    result = replace(result, data={"name": data.name, "notes": list(data.notes)})
    return _conclude(spec, out, data, result)


def _conclude(spec: RunSpec, out: Path, data: Dataset, result: Result) -> Result:
    """Score the held-out records privately if there is a share of ε for it; write the result and the report."""
    from quietgrad.estimators.runs import from_run

    details = {**result.details, "repeat": spec.command(), "bounded": list(data.bounded_names)}
    result = replace(result, details=details)
    result.save(out)
    score = None
    if spec.scores_privately:
        model = from_run(out)
        model.__dict__.pop("feature_names_in_", None)
        score = held_out_score(spec, out, data, model, result.n_public)
        if isinstance(score, str):
            result = replace(result, details={**result.details, "score": score})
        else:
            costs = {"model": result.privacy, "score": score.privacy}
            cost = {name: [paid.epsilon, paid.delta] for name, paid in costs.items()}
            details = {**result.details, "cost": cost}
            result = replace(result, metrics={**result.metrics, **metrics_of(score)}, details=details)
        result.save(out)
        if not isinstance(score, str):
            save_score(score, out, "held-out")
    spec.link_ledger(out)
    report_if_possible([out], out / "report.html")
    return result


def finish(
    spec: RunSpec,
    out: Path,
    data: Dataset,
    result: Result,
    watched: Watched | None = None,
    objective: Any = None,
) -> Result:
    """Score the model, and write the result and the report of a run that is over."""

    facts = spec.describe_objective(data)
    from quietgrad.objectives.tables.range_queries import Frame

    details = {**result.details, "model": facts}
    curve = None if watched is None else watched.curve_of(result.privacy.epsilon)
    if curve and watched is not None and watched.plan is not None:  # a run that was charged again has neither
        details["epsilon_curve"] = [list(point) for point in curve]
        details["generalization"] = watched.plan.generalization
    result = replace(
        result,
        data={"name": data.name, "notes": list(data.notes)},
        details=details,
        metrics=plain_scores(
            objective or objective_from(facts),
            result.params,
            data,
            test=not spec.scores_privately,
            train=spec.evaluate_train,
            frame=Frame.told(details),
        ),
    )
    return _conclude(spec, out, data, result)


def show(result: Result, out: Path, *, as_json: bool, explain: bool = False) -> None:
    """Tell what came out, and what its ε means if asked."""
    privacy = result.privacy
    say_meaning(explain, privacy.epsilon if privacy.is_private else None, privacy.delta, privacy.unit)
    if as_json:
        show_json({"folder": str(out), **{k: v for k, v in result.to_json().items() if k != "history"}})
        return
    files = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith((".", "run.json"))))
    rows = [("privacy", str(result.privacy)), *_in_all(result), *so_far(result, out)]
    rows += [*_score_rows(result), *_cautions(result)]
    rows += [("seconds", f"{result.seconds:.2f}"), ("written", files)]
    show_rows(f"{result.algorithm} on {result.data.get('name')} → {out}", rows)


def _in_all(result: Result) -> list[tuple[str, str]]:
    """What model and score cost together, by basic composition."""
    cost = result.details.get("cost")
    if cost is None:
        return []
    parts = f"model {cost['model'][0]:.3g} + score {cost['score'][0]:.3g}"
    epsilon, delta = cost["model"][0] + cost["score"][0], cost["model"][1] + cost["score"][1]
    return [("privacy in all", f"ε ≤ {epsilon:.4g} at δ = {delta:.3g} ({parts})")]


def _score_rows(result: Result) -> list[tuple[str, str]]:
    """The scores, each private one with its error and an accuracy with the majority's beside it."""
    said, rows = dict(result.metrics), []
    majority = said.pop("majority_accuracy", None)
    for name, value in said.items():
        if type(value) is not float or name.endswith("_error"):
            continue
        error = said.get(f"{name}_error")
        text = f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"
        if name == "test_accuracy" and majority is not None:
            text += f"   (always the most frequent class: {majority:.4f})"
        rows.append((name.replace("_", " "), text))
    if rows and said.get("private") is not True:
        rows.append(("", "(scores look at records without noise: they are data, not private)"))
    if why := result.details.get("score"):
        rows.append(("score", str(why)))
    return rows


def _cautions(result: Result) -> list[tuple[str, str]]:
    """What a user should know before relying on the guarantee or the model."""
    privacy, rows = result.privacy, []
    n = result.n_public
    if privacy.is_private and privacy.delta is not None and n and privacy.delta > 1.0 / n:
        why = "it would allow one person's records to be published; choose a δ well below 1/n"
        rows.append(("caution", f"δ = {privacy.delta:g} is above 1/n: {why}"))
    rows += [("caution", note) for note in privacy.notes if "declare feature_bounds" in note]
    if crowded := clipped_features(result.details):
        named = ", ".join(crowded)
        why = "they clip it, or are far too wide; correct the schema"
        rows.append(("caution", f"nearly every record lies at one end of the declared bounds of {named}: {why}"))
    return rows


def _given(context: typer.Context) -> set[str]:
    """The parameters that were given on the command line."""
    return {
        name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def _check_folder(out: Path, *, overwrite: bool) -> None:
    from quietgrad.errors import DataError

    if (out / "checkpoint.safetensors").exists():
        raise DataError(f"{out} holds an interrupted run: `quietgrad resume {out}`, or choose another --out.")
    if (out / "result.json").exists() and not overwrite:
        raise DataError(f"{out} holds a finished run: choose another --out, or pass --overwrite.")


_RECORDS = 1_000_000


def run_on_landscape(spec: RunSpec, out: Path, *, quiet: bool, resumed: bool = False) -> Result:
    """Train, or continue, on the landscape that ``spec`` names; write the result and the report."""
    from quietgrad.cli.settings import algorithm_from, key_values
    from quietgrad.objectives.registry import make_landscape
    from quietgrad.training.stationarity import certify

    spec = replace(spec, n_public=spec.n_public or _RECORDS)
    settings = spec.settings or ()
    its = [text.partition(".")[2] for text in settings if text.startswith("landscape.")]
    others = [text for text in settings if not text.startswith("landscape.")]
    with usage():
        land = make_landscape(spec.landscape or "", key_values(its))
    method = algorithm_from(spec.algorithm or "perturbed-sgd", spec.flags, others, spec.oracle)
    if not resumed:
        spec.save(out)
    result, watched = _descend(spec, out, (land, spec.n_public, method), {}, quiet=quiet, resumed=resumed)
    found = certify(land, result.params, alpha=float(result.details.get("alpha", 0.01)))
    curve = watched.curve_of(result.privacy.epsilon) or []
    details = {**result.details, "certificate": str(found), "epsilon_curve": [list(point) for point in curve]}
    details["repeat"] = spec.command()
    result = replace(result, data={"name": land.name, "notes": ["synthetic records"]}, details=details)
    result.save(out)
    spec.link_ledger(out)
    report_if_possible([out], out / "report.html")
    if not quiet:
        rests = result.details.get("claim")
        say(f"{result.stopped_by}: {found}" + (f"; the stop rests on: {rests}" if rests else ""))
    return result


resume_app = typer.Typer(add_completion=False)


@resume_app.command("resume", epilog="Example: quietgrad resume runs/a9a")
def resume_command(
    folder: Annotated[Path, typer.Argument(help="The --out folder of the interrupted run.", show_default=False)],
    quiet: Quiet = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Continue where a run stopped: the model is that of an undisturbed run, and nothing is spent twice.

    If versions, threads or kernels changed since, fresh noise is drawn and the plan is charged again.
    """
    from quietgrad.errors import DataError
    from quietgrad.training.result import load

    spec = RunSpec.load(folder)
    if (folder / "checkpoint.safetensors").exists():
        result = run(spec, folder, quiet=quiet or as_json, resumed=True)
    elif not (folder / "result.json").exists() and spec.uses_estimator:
        raise DataError(
            f"{folder}: a fit of --model {spec.model or 'linear'} is not kept halfway; train again. What was "
            "charged stays charged."
        )
    elif not (folder / "result.json").exists():
        raise DataError(f"{folder}: the run released nothing before it stopped; train again with --out {folder}.")
    else:
        result = load(folder)
        if "model" not in result.details:  # stopped after training, before scores and report were written
            result = finish(spec, folder, spec.load_data(), result)
        elif not as_json:
            say(f"{folder}: the run was finished already.")
    show(result, folder, as_json=as_json, explain=explain)
