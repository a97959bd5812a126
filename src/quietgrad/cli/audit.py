"""`quietgrad audit`: attack the claims of algorithms, or of a run that was made, and say what was found."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from quietgrad.assurance.report.certificate import AUDIT_FILE
from quietgrad.cli.options import Json, say, show_json
from quietgrad.core.accounting.budget import Budget, PrivacyUnit
from quietgrad.core.errors import DataError
from quietgrad.core.files import write_atomically
from quietgrad.core.plans.schedule import plan
from quietgrad.core.sanitize import did_you_mean
from quietgrad.core.session.statement import SEEDED
from quietgrad.methods.additive_gd import AdditiveGD
from quietgrad.methods.registry import entry
from quietgrad.methods.result import digest_of, load, problems_of

if TYPE_CHECKING:
    from quietgrad.assurance.audit.report import AuditReport

app = typer.Typer(add_completion=False)

_QUICK, _FULL = 2000, 20_000
_FEW, _MANY = 400, 8000  # for the claim of a folder


@app.command(epilog="Example: quietgrad audit dp-srm dp-sgd --runs 20000 · quietgrad audit --all --quick")
def audit(
    what: Annotated[
        list[str] | None,
        Argument(help="Algorithms such as dp-srm, or folders of finished runs.", show_default=False),
    ] = None,
    everything: Annotated[
        bool,
        Option("--all", help="Everything that makes a release: algorithms, estimators, loops, federations."),
    ] = False,
    quick: Annotated[bool, Option("--quick", help=f"{_QUICK} runs of each world, not {_FULL}.")] = False,
    runs: Annotated[
        int | None,
        Option(
            help="Runs of each of the two neighbouring worlds: more runs detect smaller violations. By default "
            f"{_FULL} for an algorithm; for a folder what shows half the noise missing, up to {_MANY}.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack algorithms or runs and compare lower bounds on ε with the claims; exit code 1 on a violation.

    A pass means that these attacks found no violation. It is no proof. The nearer the lower bound is to the
    claim, the stronger the attack was. VACUOUS means too few runs to detect anything.
    """
    if bool(what) == everything:
        raise typer.BadParameter("name algorithms or folders of runs, or give --all (not both).")
    from quietgrad.assurance.audit.attacks import ATTACKS  # loads all that can be attacked

    names = list(ATTACKS) if everything else what or []
    for name in names:
        if name not in ATTACKS and not Path(name).is_dir():
            known, near = ", ".join(ATTACKS), did_you_mean(name, list(ATTACKS))
            raise typer.BadParameter(
                f"{name!r}: must be a folder of a run, or one of {known}.{near}", param_hint="WHAT"
            )
    count = runs if runs is not None else _QUICK if quick else None
    reports: list[AuditReport] = []
    for name in names:
        for report in _audits(name, count):
            reports.append(report)
            if not as_json:
                say(_line(report))
    if as_json:
        show_json({"reports": [report.to_json() for report in reports]})
    for report in reports:
        if not as_json and (not report.passed or len(reports) == 1):
            say(str(report))
    raise typer.Exit(1 if "violation" in [report.verdict for report in reports] else 0)


def _audits(name: str, runs: int | None) -> Iterator[AuditReport]:
    from quietgrad.assurance.audit.attacks import ATTACKS

    if name in ATTACKS:
        try:
            yield from ATTACKS[name].reports(runs or _FULL)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return
    folder = Path(name)
    report = audit_folder(folder, runs)
    document = {"result": digest_of(folder), **report.to_json()}  # beside the run, where its page shows it
    write_atomically(folder / AUDIT_FILE, (json.dumps(document, indent=2, default=str) + "\n").encode())
    yield report


def audit_folder(folder: Path, runs: int | None = None) -> AuditReport:
    """Audit the configuration, noise and claim of a finished run; its data are not needed.

    Without ``runs``, as many as show half the noise missing, within limits, fixed before anything is seen.
    """
    from quietgrad.assurance.audit.attacks import with_people
    from quietgrad.assurance.audit.confidence_bounds import runs_for
    from quietgrad.assurance.audit.running import PrivacyClaim, run

    result = load(folder)
    privacy = result.privacy
    if privacy.epsilon is None or privacy.delta is None or privacy.relation is None:
        raise DataError(f"{folder}: this run is not private and claims nothing, so there is nothing to audit.")
    if problems := problems_of(result, folder, None):
        raise DataError(f"{folder}: {problems[0]}; an audit attacks a claim only if the run's own files prove it.")
    if SEEDED in privacy.notes:
        raise DataError(f"{folder}: {SEEDED}; the seed reveals the noise, so there is no claim to audit.")
    config = dict(result.config)
    if config.get("look"):  # the auditor's columns and targets are others than those that were declared or found
        look = config["look"]
        numbers = look.get("target") or look.get("target_share")
        config["look"] = {**look, "features": None, "target": (-2.0, 2.0) if numbers else None}
    algorithm, prefix, noise = rebuild(result.algorithm, config), "", privacy.noise_multiplier
    if isinstance(algorithm, AdditiveGD):  # its last descent is attacked, with the noise that it has in the plan
        algorithm, prefix, share = algorithm.last_descent()
        noise = None if noise is None else noise / math.sqrt(share)
    # A fit's stability scales as 1/n: a few records stand for any number, and thousands of copies of them fit.
    n = 4 if result.algorithm in ("output-perturbation", "whitened-gd", AdditiveGD.name) else result.n_public
    budget = Budget(privacy.epsilon, privacy.delta, privacy.relation)
    claimed = plan(algorithm, n=n, budget=budget, noise_multiplier=noise)
    if runs is None:
        claim = PrivacyClaim(claimed)
        wanted = runs_for(claim.mu, claim.profile, 1e-7) or _MANY
        share = min(1.0, entry(algorithm.name).attacks[0].share)  # less where runs are made one by one
        runs = max(_FEW, round(share * min(wanted, _MANY)))
    report = run(algorithm, budget=budget, n=n, runs=runs, noise_multiplier=noise)
    attacked = {prefix + slot.name for slot in claimed.schedule.slots}
    if left := [slot["name"] for slot in result.details.get("slots", ()) if slot["name"] not in attacked]:
        why = f"not attacked: {', '.join(left)}, with which the run claims ε={privacy.epsilon:.4g}"
        report = replace(report, notes=(*report.notes, why))
    elif result.details.get("counted") is not None:
        why = f"not attacked: the count, with which the run claims ε={privacy.epsilon:.4g}"
        report = replace(report, epsilon_claimed=privacy.epsilon, notes=(*report.notes, why))
    elif privacy.epsilon > 1.001 * report.epsilon_claimed:
        why = f"the plan was charged more than once: with all of it the run claims ε={privacy.epsilon:.4g}"
        report = replace(report, notes=(*report.notes, why))
    return with_people(report, privacy.noise_multiplier) if privacy.unit is PrivacyUnit.PERSON else report


def rebuild(name: str, config: dict[str, Any]) -> Any:
    """The algorithm of a ``result.json``.

    >>> rebuild("dp-gd", {"steps": 5, "learning_rate": {"schedule": "Linear", "start": 1.0, "end": 0.1}})
    DPGD(steps=5, learning_rate=Linear(start=1.0, end=0.1), clip=1.0, momentum=0.0, returns='last', clipping='flat')
    """
    return AdditiveGD.from_config(config) if name == AdditiveGD.name else entry(name).make(config)


def _line(report: AuditReport) -> str:
    claim = f"{report.algorithm} ({report.relation})"
    return (
        f"{claim:<52}claimed ε {report.epsilon_claimed:6.3g}  at least {report.epsilon_lower:6.3g}  "
        f"{report.verdict.upper():<10}{report.layer:<15}{report.seconds:6.2f} s"
    )
