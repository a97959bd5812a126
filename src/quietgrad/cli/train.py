"""`quietgrad train` and `quietgrad resume`: a table and a budget in; a model, a result and a report out."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from quietgrad.cli.check import is_worth_a_check
from quietgrad.cli.ledger import reminder, so_far
from quietgrad.cli.options import Explain, Json, Quiet, say, say_meaning, show_json, show_rows, usage
from quietgrad.cli.report import report_if_possible
from quietgrad.cli.run_spec import RunSpec, with_options
from quietgrad.cli.scanned_data import ScannedData
from quietgrad.cli.scoring import clipped_features, metrics_of, save_score, say_undeclared
from quietgrad.cli.training import training_of
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import project_path
from quietgrad.core.session.kept import is_kept
from quietgrad.data.address import is_address, public
from quietgrad.data.dataset import Dataset
from quietgrad.data.schema import read_schema
from quietgrad.estimators.holdout import remember_trained, score_held_out
from quietgrad.methods.result import Result, load
from quietgrad.methods.score_noise import score_text

if TYPE_CHECKING:
    from quietgrad.estimators.scoring import PrivateScore

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
    if is_kept(out):
        raise DataError(f"{out} holds an interrupted run: `quietgrad resume {out}`, or choose another --out.")
    if (out / "result.json").exists() and not overwrite:
        raise DataError(f"{out} holds a finished run: choose another --out, or pass --overwrite.")


def run(spec: RunSpec, out: Path, *, quiet: bool, resumed: bool = False, tells_owner: bool = False) -> Result:
    """Train, or continue, the run that ``spec`` describes in the folder ``out``; write everything it leaves."""
    whole = spec.read_data()
    hopeless: str | None = None
    if not resumed:
        with usage():
            spec, hopeless = spec.without_hopeless_score(whole)
    data = spec.held_out(whole)
    with usage():
        training = training_of(spec, data)  # mistakes are reported before anything is written
    if tells_owner:
        say_undeclared(data)
        if hopeless is not None:
            say(f"score: {hopeless}.", err=True)
        if is_worth_a_check(spec):
            say(f"some of {data.name} would be wasted: `{spec.command('check')}` says what.", err=True)
    if not resumed:  # what the run is, before it releases anything
        spec.save(out)
        if not isinstance(data, ScannedData):
            remember_trained(out, data)
    with usage():
        return conclude(spec, out, data, training(out, resumed=resumed, quiet=quiet), hopeless)


def conclude(spec: RunSpec, out: Path, data: Dataset, result: Result, unscored: str | None = None) -> Result:
    """Score the held-out records privately if there is a share of ε for it; write the result and the report.

    A result without its command (``repeat``) is that of a run which was stopped here: ``resume`` concludes it.
    """
    details = {**result.details, "bounded": list(data.bounded_names)}
    if spec.schema is not None:  # public facts, so that a report can show features in their own units
        schema = read_schema(out / f"schema{Path(spec.schema).suffix}")
        details["declared_bounds"] = {name: list(pair) for name, pair in schema.declared_bounds.items()}
        details["flags"] = list(schema.flags)
    if data.feature_names is not None:
        details["feature_names"] = list(data.feature_names)
    if data.row_bound is not None:
        details["declared_row_bound"] = data.row_bound
    result = replace(result, data={"name": data.name, "notes": list(data.notes)}, details=details)
    score: PrivateScore | str | None = None
    if spec.scores_privately:
        result.save(out)  # is what is scored
        score = _held_out_score(spec, out, data, result.n_public)
    details["repeat"] = spec.command()
    if isinstance(score, str) or unscored is not None:
        details["score"] = score if isinstance(score, str) else unscored
    elif score is not None:
        costs = {"model": result.privacy, "score": score.privacy}
        details["cost"] = {name: [paid.epsilon, paid.delta] for name, paid in costs.items()}
        result = replace(result, metrics={**result.metrics, **metrics_of(score)})
    result = replace(result, details=details)
    result.save(out)
    if score is not None and not isinstance(score, str):
        save_score(score, out, "held-out")  # names the result that it is of
    if not spec.non_private and spec.ledger_in(out) is None:  # a link in the folder leads to the project's ledger
        link = out / "ledger.jsonl"
        with suppress(OSError):  # on file systems without links the folder just has none
            link.unlink(missing_ok=True)
            link.symlink_to(project_path().resolve())
    report_if_possible([out], out / "report.html")
    return result


def _held_out_score(spec: RunSpec, out: Path, data: Dataset, n: float) -> PrivateScore | str:
    """A private score of the run's held-out records, paid by its account; or why none was released."""
    from quietgrad import estimators  # loads scikit-learn

    model = estimators.from_run(out)
    model.__dict__.pop("feature_names_in_", None)  # names were compared when the file was read
    guarantee = spec.budget(of_score=True)
    assert guarantee is not None
    return score_held_out(model, data, guarantee, spec.payer(out), share=spec.holdout, n=n)


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
        why = "it would allow one person's records to be published; choose δ ≤ 1/(100 n)"
        rows.append(("caution", f"δ = {privacy.delta:g} is above 1/n: {why}"))
    rows += [("caution", note) for note in privacy.notes if "declare feature_bounds" in note]
    if crowded := clipped_features(result.details):
        why = "they clip it, or are far too wide; correct the schema"
        text = f"nearly every record lies at one end of the declared bounds of {', '.join(crowded)}: {why}"
        rows.append(("caution", text))
    files = ", ".join(sorted(path.name for path in out.iterdir() if not path.name.startswith((".", "run.json"))))
    rows += [("seconds", f"{math.ceil(result.seconds)}"), ("written", files)]
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
        str | None, Option(help="Address of the data with its login, which no file keeps.", parser=public)
    ] = None,
    test: Annotated[str | None, Option(help="Address of the --test data with its login.", parser=public)] = None,
    quiet: Quiet = False,
    explain: Explain = False,
    as_json: Json = False,
) -> None:
    """Continue where a run stopped: the model is that of an undisturbed run, and nothing is spent twice.

    If versions, threads or kernels changed since, fresh noise is drawn and the plan is charged again.
    """
    spec = RunSpec.load(folder).with_login(data=data, test=test)
    if is_kept(folder):
        result = run(spec, folder, quiet=quiet or as_json, resumed=True)
    elif (folder / "result.json").exists():
        result = load(folder)
        if "repeat" not in result.details:  # stopped after training, before scores and report were written
            table = spec.load_data()
            with usage():
                result = conclude(spec, folder, table, training_of(spec, table).described(folder, result))
        elif not as_json:
            say(f"{folder}: the run was finished already.")
    else:
        raise DataError(f"{folder}: the run released nothing before it stopped; train again with --out {folder}.")
    show(result, folder, as_json=as_json, explain=explain)
