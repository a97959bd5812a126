"""`quietgrad train` and `quietgrad resume`: a table and a budget in; a model, a result and a report out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from quietgrad.cli import models
from quietgrad.cli.ledger import reminder, so_far
from quietgrad.cli.options import Explain, Json, Quiet, say, say_meaning, show_json, show_rows, usage
from quietgrad.cli.report import report_if_possible
from quietgrad.cli.run_spec import RunSpec, objective_from, with_options
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.scoring import (
    clipped_features,
    exact_scores,
    held_out_score,
    metrics_of,
    plain_scores,
    remember_trained,
    save_score,
    say_undeclared,
)
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import project_path
from quietgrad.core.plans.counting import NOMINAL
from quietgrad.data.address import is_address, public
from quietgrad.data.dataset import Dataset
from quietgrad.methods.minimizing import Watched, minimize, progress_bar, resume
from quietgrad.methods.result import Result, load
from quietgrad.methods.score_noise import score_text
from quietgrad.tables.privacy_units import UnitGrouping
from quietgrad.tables.range_queries import FeatureBox
from quietgrad.tables.scanned import ScannedPeople

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: quietgrad train a9a --algorithm dp-srm --epsilon 1 --delta 1e-5 --out runs/a9a   ·   "
    "quietgrad train people.csv --schema schema.json --epsilon 0.5 --account patients --out runs/people"
)
@with_options()
def train(
    spec: RunSpec,
    context: typer.Context,
    out: Annotated[Path, Option(help="Folder for the model, result, ledger and report.")] = Path("runs/last"),
    from_file: Annotated[
        Path | None, Option("--from", help="Take all options from a TOML file or the run.json of a run.")
    ] = None,
    explain: Explain = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace a finished result in the folder.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a model privately; an interrupted run continues with `quietgrad resume DIR`."""
    if from_file is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        again = {name: getattr(spec, name) for name in given & {"data", "test"} if is_address(getattr(spec, name))}
        if changed := given - {"from_file", "out", "overwrite", "quiet", "as_json", "explain", *again}:
            raise typer.BadParameter(f"the file says the whole run; leave {', '.join(sorted(changed))} out.")
        spec = RunSpec.read(from_file).with_login(**again)
    with usage():
        spec.check()
    check_folder(out, overwrite=overwrite)
    if not (quiet or as_json) and (words := reminder()) is not None:
        say(words, err=True)
    result = run(spec, out, quiet=quiet or as_json, tells_owner=not quiet)
    show(result, out, as_json=as_json, explain=explain)


def check_folder(out: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds another run."""
    if (out / "checkpoint.safetensors").exists():
        raise DataError(f"{out} holds an interrupted run: `quietgrad resume {out}`, or choose another --out.")
    if (out / "result.json").exists() and not overwrite:
        raise DataError(f"{out} holds a finished run: choose another --out, or pass --overwrite.")


def run(spec: RunSpec, out: Path, *, quiet: bool, resumed: bool = False, tells_owner: bool = False) -> Result:
    """Train, or continue, the run that ``spec`` describes in the folder ``out``; write everything it leaves."""
    data = spec.load_data()
    people: UnitGrouping | ScannedPeople | None = None
    combine: Any = spec.combine
    with usage():  # mistakes are reported before anything is written
        if data.person_test is not None:
            UnitGrouping.of(data.person_test)
        if isinstance(data, ScannedData):
            people = None if data.person is None else ScannedPeople(data.X, combine, spec.records_per_person)
        elif data.person is not None:
            people = UnitGrouping.of(data.person, combine=combine, records_per_person=spec.records_per_person)
        if spec.uses_estimator:
            models.estimator_of(spec, data, "default")
        else:
            loss = objective_from(spec.describe_objective(data))
            spec.make_algorithm(data, NOMINAL if spec.n_public is None else spec.n_public)
    if tells_owner:
        say_undeclared(data)
    if not resumed:  # what the run is, before it releases anything
        spec.save(out)
        if not isinstance(data, ScannedData):
            remember_trained(out, data)
    if spec.uses_estimator:
        with usage():
            result = models.fit(spec, data, out)
            if not spec.scores_privately:
                result = replace(result, metrics=exact_scores(models.fitted(out), data))
            return _conclude(spec, out, data, result)
    method = partial(spec.make_algorithm, data)
    table = data.X if isinstance(data, ScannedData) else (data.X, data.y)
    kept: dict[str, Any] = {
        "folder": out, "checkpoint_seconds": spec.checkpoint_seconds, "person": people, "combine": spec.combine,
        "records_per_person": spec.records_per_person,
    }  # fmt: skip
    try:
        with usage(), progress_bar(quiet=quiet) as watched:
            if resumed:
                result = resume(loss, table, method, callback=watched, **kept)
            else:
                result = minimize(
                    loss, table, method, budget=spec.budget(), n_public=spec.n_public,
                    records_public=spec.records_public, callback=watched, account=spec.payer(out), **kept,
                )  # fmt: skip
    except KeyboardInterrupt:
        say(f"interrupted; continue with `quietgrad resume {out}`.", err=True)
        raise
    return finish(spec, out, data, result, watched)


def finish(spec: RunSpec, out: Path, data: Dataset, result: Result, watched: Watched | None = None) -> Result:
    """Score the model, and write the result and the report of a run that is over."""
    facts = spec.describe_objective(data)
    details = {**result.details, "model": facts}
    curve = None if watched is None else watched.curve_of(result.privacy.epsilon)
    if curve and watched is not None and watched.plan is not None:  # a run that was charged again has neither
        details["epsilon_curve"] = [list(point) for point in curve]
        details["generalization"] = watched.plan.generalization
    metrics = plain_scores(
        objective_from(facts), result.params, data, FeatureBox.from_details(details),
        test=not spec.scores_privately, train=spec.evaluate_train,
    )  # fmt: skip
    return _conclude(spec, out, data, replace(result, details=details, metrics=metrics))


def _conclude(spec: RunSpec, out: Path, data: Dataset, result: Result) -> Result:
    """Score the held-out records privately if there is a share of ε for it; write the result and the report."""
    details = {**result.details, "repeat": spec.command(), "bounded": list(data.bounded_names)}
    result = replace(result, data={"name": data.name, "notes": list(data.notes)}, details=details)
    result.save(out)
    if spec.scores_privately:
        score = held_out_score(spec, out, data, result.n_public)
        if isinstance(score, str):
            result = replace(result, details={**details, "score": score})
            result.save(out)
        else:
            costs = {"model": result.privacy, "score": score.privacy}
            cost = {name: [paid.epsilon, paid.delta] for name, paid in costs.items()}
            metrics = {**result.metrics, **metrics_of(score)}
            result = replace(result, metrics=metrics, details={**details, "cost": cost})
            result.save(out)
            save_score(score, out, "held-out")  # names the result that it is of
    if not spec.non_private and spec.ledger_in(out) is None:  # a link in the folder leads to the project's ledger
        own = out / "ledger.jsonl"
        with suppress(OSError):  # on file systems without links the folder just has none
            own.unlink(missing_ok=True)
            own.symlink_to(project_path().resolve())
    report_if_possible([out], out / "report.html")
    return result


def show(result: Result, out: Path, *, as_json: bool, explain: bool = False) -> None:
    """Tell what came out, and what its ε means if asked."""
    privacy = result.privacy
    say_meaning(explain, privacy.epsilon if privacy.is_private else None, privacy.delta, privacy.unit)
    if as_json:
        show_json({"folder": str(out), **{k: v for k, v in result.to_json().items() if k != "history"}})
        return
    rows = [("privacy", str(privacy))]
    if cost := result.details.get("cost"):  # by basic composition
        epsilon, delta = (cost["model"][k] + cost["score"][k] for k in (0, 1))
        parts = f"model {cost['model'][0]:.3g} + score {cost['score'][0]:.3g}"
        rows.append(("privacy in all", f"ε ≤ {epsilon:.4g} at δ = {delta:.3g} ({parts})"))
    rows += [*so_far(result, out), *_score_rows(result)]
    n = result.n_public
    if privacy.is_private and privacy.delta is not None and n and privacy.delta > 1.0 / n:
        why = "it would allow one person's records to be published; choose a δ well below 1/n"
        rows.append(("caution", f"δ = {privacy.delta:g} is above 1/n: {why}"))
    rows += [("caution", note) for note in privacy.notes if "declare feature_bounds" in note]
    if crowded := clipped_features(result.details):
        why = "they clip it, or are far too wide; correct the schema"
        said = f"nearly every record lies at one end of the declared bounds of {', '.join(crowded)}: {why}"
        rows.append(("caution", said))
    files = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith((".", "run.json"))))
    rows += [("seconds", f"{result.seconds:.2f}"), ("written", files)]
    show_rows(f"{result.algorithm} on {result.data.get('name')} → {out}", rows)


def _score_rows(result: Result) -> list[tuple[str, str]]:
    """The scores, each private one with its error and an accuracy with the majority's beside it."""
    said, rows = dict(result.metrics), []
    majority = said.pop("majority_accuracy", None)
    for name, value in said.items():
        if type(value) is not float or name.endswith("_error"):
            continue
        error = said.get(f"{name}_error")
        text = f"{value:.4f}" if error is None else score_text(value, error)
        if name == "test_accuracy" and majority is not None:
            text += f"   (always the most frequent class: {majority:.4f})"
        rows.append((name.replace("_", " "), text))
    rows += [(name.replace("_", " "), score_text(None, error)) for name, error in said.get("too_noisy", {}).items()]
    if rows and said.get("private") is not True:
        rows.append(("", "(scores look at records without noise: they are data, not private)"))
    if why := result.details.get("score"):
        rows.append(("score", str(why)))
    return rows


resume_app = typer.Typer(add_completion=False)


@resume_app.command("resume", epilog="Example: quietgrad resume runs/a9a")
def resume_command(
    folder: Annotated[Path, Argument(help="The --out folder of the interrupted run.", show_default=False)],
    data: Annotated[
        str | None, Option(help="The run's address again, with its login: no file keeps it.", parser=public)
    ] = None,
    test: Annotated[str | None, Option(help="The address of its --test again, likewise.", parser=public)] = None,
    quiet: Quiet = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Continue where a run stopped: the model is that of an undisturbed run, and nothing is spent twice.

    If versions, threads or kernels changed since, fresh noise is drawn and the plan is charged again.
    """
    spec = RunSpec.load(folder).with_login(data=data, test=test)
    if (folder / "checkpoint.safetensors").exists():
        result = run(spec, folder, quiet=quiet or as_json, resumed=True)
    elif (folder / "result.json").exists():
        result = load(folder)
        if "model" not in result.details:  # stopped after training, before scores and report were written
            result = finish(spec, folder, spec.load_data(), result)
        elif not as_json:
            say(f"{folder}: the run was finished already.")
    elif spec.uses_estimator:
        raise DataError(
            f"{folder}: a fit of --model {spec.model or 'linear'} is not kept halfway; train again. What was "
            "charged stays charged."
        )
    else:
        raise DataError(f"{folder}: the run released nothing before it stopped; train again with --out {folder}.")
    show(result, folder, as_json=as_json, explain=explain)
