"""What a certificate says, taken from a saved run: nothing in it is computed from data, and no record is in it.

The ledger's lines are copied as they are. Their fingerprints of tables are keyed with a secret of the machine that
made them, so they tell nobody else anything; the names of other accounts in the same ledger they do tell, and
``whole_ledger=False`` leaves those lines out.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quietgrad.certificates.document import LARGEST, PrivacyCertificate
from quietgrad.curators.account import run_of
from quietgrad.errors import DataError
from quietgrad.files import read_bytes
from quietgrad.privacy.chain import anchor
from quietgrad.privacy.ledger import Ledger
from quietgrad.privacy.ledger_state import DEFAULT, same
from quietgrad.training.result import Result, ledger_of, load, problems_of

_PUBLIC_MODEL = ("objective", "regularizer", "intercept", "row_bound", "rows", "features", "task", "classes")


def issue(folder: str | Path, *, whole_ledger: bool = True, ledger: str | Path | None = None) -> PrivacyCertificate:
    """The unsigned certificate of the run in ``folder``; ``DataError`` if there is nothing to certify.

    ``ledger`` says where the run was paid, if neither its options nor its folder do (a run of Python's, saved).
    With ``whole_ledger`` all lines of the ledger are copied, unless they are more than a certificate may hold.
    The run's statement is first proved again and held against its options and its ledger: what refutes it there is
    not certified.
    """
    path = Path(folder)
    result = load(path)
    book = ledger_of(path, None if ledger is None else Path(ledger))
    if problems := problems_of(result, path, book):
        raise DataError(f"{path}: its statement is refuted, so nothing is certified: {problems[0]}.")
    lines = _lines(result, book, whole=whole_ledger)
    if ledger is not None and lines is None:
        raise DataError(
            f"{ledger}: has no line that names this run (it was paid for elsewhere), so it "
            "cannot go into a certificate; leave the ledger out."
        )
    privacy = result.privacy
    if result.details.get("parts", {}).get("count", 1) > 1:
        raise DataError(
            f"{path}: its model was fitted in several parts (partial_fit), and a certificate is of one plan. Its "
            "statement holds all parts, and `quietgrad report` proves it again."
        )
    if not privacy.is_private or privacy.events is None:
        why = privacy.notes[0] if privacy.notes else "no noise was added"
        raise DataError(f"{path}: the run is not private ({why}), so there is nothing to certify.")
    stated = privacy.to_json()
    event = stated.pop("event")
    document = PrivacyCertificate(
        {
            "issued": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "claim": stated,
            "event": event,
            "plan": plan_of(result),
            "federation": _federation(result),
            "ledger": lines,
            "model": {
                "sha256": hashlib.sha256(read_bytes(path / "model.safetensors")).hexdigest(),
                "parameters": len(result.params),
            },
            "data": {
                "name": str(result.data.get("name", "not named")),
                "n_public": result.n_public,
                **{key: result.details.get("model", {}).get(key) for key in _PUBLIC_MODEL},
            },
            "versions": {name: text for name, text in result.versions.items() if text},
        }
    )
    try:
        size = len(document.to_bytes())
    except ValueError:
        raise DataError(f"{path}: its settings hold a number that no certificate can (not finite).") from None
    if size > LARGEST and whole_ledger:  # nobody would read it: the run's own lines must do
        return issue(path, whole_ledger=False)
    return document


def plan_of(result: Result) -> dict[str, Any]:
    """What was planned, from which the events follow."""
    details = result.details
    return {
        "algorithm": result.algorithm,
        "config": dict(result.config),
        "n_public": result.n_public,
        "noise_multiplier": result.privacy.noise_multiplier,
        "composition": details.get("composition", "sequential"),
        "rounds": details.get("rounds"),
        "slots": list(details.get("slots", ())),
        "counted": details.get("counted"),
        "stopped_by": result.stopped_by,
    }


def _federation(result: Result) -> dict[str, Any] | None:
    """How parties took part; their names stay with them."""
    if "trust" not in result.details:
        return None
    kept = ("trust", "secure", "sizes", "parties_per_person", "plan_file")
    return {**{key: result.details.get(key) for key in kept}, "matched": bool(result.details.get("matched"))}


def _lines(result: Result, file: Path | None, *, whole: bool) -> dict[str, Any] | None:
    if file is None or not file.exists():
        return None
    entries = Ledger(file).entries()
    run = result.details.get("run")
    if run is None or not entries:
        return None
    mine, ids = [], set()
    for entry in entries:
        if entry.kind == "reserve" and run_of(str(entry.body.get("run"))) == run:
            ids.add(entry.body["id"])
            # A ledger of a whole project tells of other tables too, which nobody meant to show.
            whole = whole and (entry.body["account"] == DEFAULT or not same(entry.body["account"], DEFAULT))
        if entry.body.get("id") in ids:
            mine.append(entry)
    kept = entries if whole else tuple(mine)
    if not mine:
        return None
    return {"run": run, "head": anchor(entries[-1]), "lines": [dict(vars(entry)) for entry in kept]}
