"""`quietgrad train --landscape`: the same run on a risk with known saddles, and the truth beside the claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.cli.options import say, usage
from quietgrad.cli.report import report_if_possible
from quietgrad.cli.runs import RunSpec
from quietgrad.cli.settings import algorithm_from, key_values

if TYPE_CHECKING:
    from quietgrad.training.result import Result

_RECORDS = 1_000_000


def run_on_landscape(spec: RunSpec, out: Path, *, quiet: bool, resumed: bool = False) -> Result:
    """Train, or continue, on the landscape that ``spec`` names; write the result and the report."""
    from quietgrad.objectives.registry import make_landscape
    from quietgrad.training import minimize, resume
    from quietgrad.training.minimizing import progress_bar
    from quietgrad.training.stationarity import certify

    n = spec.n_public or _RECORDS
    its = [text.partition(".")[2] for text in spec.settings if text.startswith("landscape.")]
    others = [text for text in spec.settings if not text.startswith("landscape.")]
    with usage():
        land = make_landscape(spec.landscape or "", key_values(its))
    method = algorithm_from(spec.algorithm or "perturbed-sgd", spec.flags, others, spec.oracle)
    promise = spec.budget()
    pays: dict[str, Any] = {"ledger": spec.ledger_in(out), "account": spec.account, "cap": spec.cap()}
    kept: dict[str, Any] = {"folder": out, "checkpoint_seconds": spec.checkpoint_seconds}
    if not resumed:
        spec.save(out)
    with usage(), progress_bar(quiet=quiet) as watched:
        if resumed:
            result = resume(land, n, method, callback=watched, **kept)
        else:
            result = minimize(land, n, method, budget=promise, n_public=n, callback=watched, **pays, **kept)
    found = certify(land, result.params, alpha=float(result.details.get("alpha", 0.01)))
    curve = watched.curve_of(result.privacy.epsilon) or []
    details = {**result.details, "certificate": str(found), "epsilon_curve": [list(point) for point in curve]}
    result = replace(result, data={"name": land.name, "notes": ["synthetic records"]}, details=details)
    result.save(out)
    spec.link_ledger(out)
    report_if_possible([out], out / "report.html")
    if not quiet:
        rests = result.details.get("claim")
        say(f"{result.stopped_by}: {found}" + (f"; the stop rests on: {rests}" if rests else ""))
    return result
