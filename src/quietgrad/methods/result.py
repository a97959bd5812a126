"""Results: the model, its public history, and a privacy statement that is proved again when it is read.

A result is a file that others may have edited. So no ε is shown because the file says so: the accountant proves it
from the stored events, the options the run was started with and the reservation in its ledger must tell the same
story, and what differs refutes the statement. The chain of a ledger is not keyed: who rewrites the result, the
options and the whole ledger alike is not caught here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.charts import Lines, Series, to_notebook_html
from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.accounting.events import MaxOverParties, composed
from quietgrad.core.errors import DataError, LedgerError, boundary
from quietgrad.core.files import check_regular, is_path_name, read_bytes, read_json, write_atomically
from quietgrad.core.ledger.account import Account, run_of
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.ledger import Ledger, project_ledger, project_path
from quietgrad.core.ledger.state import ReservationState, same
from quietgrad.core.session import checkpoint
from quietgrad.core.session.kept import FILE, clear
from quietgrad.core.session.statement import REFUTED, SLACK, Privacy, contradiction, refuted
from quietgrad.core.vectors import OwnVector

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Result:
    """The outcome of :func:`quietgrad.minimize`.

    ``history`` holds public numbers only: norms of released estimates and the ε spent, never raw losses.
    ``seconds`` is for its owner: how long a batch took depends on its size, which is secret under Poisson
    sampling, so only whole seconds are saved.
    """

    params: OwnVector
    privacy: Privacy
    algorithm: str
    config: Mapping[str, Any]
    n_public: int
    history: list[dict[str, float]] = field(default_factory=list)
    stopped_by: str = "steps"
    seconds: float = 0.0
    versions: Mapping[str, str | None] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def escapes(self) -> int:
        """Saddle escapes made (perturbed SGD)."""
        return int(self.details.get("escapes", 0))

    @property
    def samples_used(self) -> int:
        """Fresh records consumed (single-pass oracles)."""
        return int(self.details.get("samples_used", 0))

    def _repr_html_(self) -> str:
        """The result in a notebook: the guarantee, and the public curves of the run."""
        curve = [(0.0, 0.0), *((float(p[0]), float(p[1])) for p in self.details.get("epsilon_curve", ()))]
        norms = [(r["step"], r["estimate_norm"]) for r in self.history if "estimate_norm" in r]
        charts = (
            Lines("Privacy spent", (Series("ε", curve if len(curve) > 2 else ()),), "releases", "ε", zero=True),
            Lines("Gradient estimate", (Series("norm", norms),), "steps", "norm of the estimate", log_y=True),
        )
        rows: list[tuple[str, object]] = [
            ("parameters", len(self.params)),
            (self.privacy.unit.in_words("records (public number)"), self.n_public),
            ("stopped by", self.stopped_by),
            *self.privacy.facts(),
        ]
        return to_notebook_html(self.algorithm, rows, charts)

    def to_json(self) -> dict[str, Any]:
        """Everything but the parameters, as JSON values (schema version 1)."""
        return {
            "schema_version": SCHEMA_VERSION,
            "algorithm": self.algorithm,
            "config": dict(self.config),
            "data": {"d": len(self.params), "n_public": self.n_public, **self.data},
            "privacy": self.privacy.to_json(),
            "metrics": dict(self.metrics),
            "stopped_by": self.stopped_by,
            "details": dict(self.details),
            "history": self.history,
            "seconds": math.ceil(self.seconds),
            "versions": dict(self.versions),
        }

    def save(self, folder: str | Path) -> Path:
        """Write ``model.safetensors`` and ``result.json`` into ``folder``.

        :func:`quietgrad.load` reads them.
        """
        from safetensors.numpy import save as to_bytes

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        params = self.params if isinstance(self.params, np.ndarray) else self.params.detach().cpu().numpy()
        write_atomically(path / "model.safetensors", to_bytes({"params": params}))
        write_atomically(path / "result.json", (json.dumps(self.to_json(), indent=2) + "\n").encode())
        return path


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of ``result.json`` in ``folder``. It differs for another result in the same place."""
    return hashlib.sha256(read_bytes(folder / "result.json")).hexdigest()


def load(folder: str | Path) -> Result:
    """Read a result that :meth:`Result.save` wrote, and prove its ε again.

    The proof starts from the releases that the result lists.

    A statement that its own events do not prove is returned as not private, and ``privacy.refuted`` has the
    reasons. ``quietgrad report`` also compares it with the options of the run and its ledger.
    """
    from safetensors.numpy import load_file

    path = Path(folder)
    try:
        with boundary(f"{path}: the result cannot be read: it may be cut short."):
            data = read_json(path / "result.json")
            check_regular(path / "model.safetensors")
            params = load_file(path / "model.safetensors")["params"]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no result here ({Path(error.filename or '').name} is missing).") from None
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise DataError(f"{path}: schema_version {version!r}; this version reads {SCHEMA_VERSION}.")
    with boundary(f"{path / 'result.json'}: not a result of this version."):
        privacy = Privacy.from_json(data["privacy"])
        problem = contradiction(privacy)
        return Result(
            params=params,
            privacy=privacy if problem is None else refuted(privacy, problem),
            algorithm=str(data["algorithm"]),
            config=dict(data["config"]),
            n_public=int(data["data"]["n_public"]),
            history=[dict(record) for record in data["history"]],
            stopped_by=str(data["stopped_by"]),
            seconds=float(data["seconds"]),
            versions=dict(data["versions"]),
            details=dict(data["details"]),
            data={k: v for k, v in data["data"].items() if k not in ("d", "n_public")},
            metrics=dict(data["metrics"]),
        )


def problems_of(result: Result, folder: Path, ledger: Path | None) -> list[str]:
    """Return the contradictions of a saved result with its events, schedule, run options and ledger."""
    privacy, stated = result.privacy, result.privacy.epsilon
    problems = [note.removeprefix(f"{REFUTED}: ") for note in privacy.refuted]
    if not problems and (problem := contradiction(privacy)) is not None:
        problems.append(problem)
    # Releases beyond what was planned, and a curve that ends elsewhere than the statement.
    slots = {str(slot.get("name")): slot for slot in result.details.get("slots", ()) if isinstance(slot, Mapping)}
    for name, count in privacy.releases.items():
        if name in slots and count > slots[name].get("count", count):
            problems.append(f"{count} releases of {name!r} are stated where {slots[name]['count']} were planned")
    curve = result.details.get("epsilon_curve") or ()
    if stated is not None and curve and max(float(point[1]) for point in curve) > stated * (1.0 + SLACK) + 1e-9:
        problems.append(f"its curve of ε goes beyond the stated {stated:.4g}")
    named = (unit for unit in PrivacyUnit if re.search(rf"\b({unit}|{unit.plural})\b", str(privacy.sampling)))
    words = next(named, PrivacyUnit.RECORD)
    if words is not privacy.unit:
        problems.append(f"its samples are of a {words} each, and it is stated about a {privacy.unit}")
    if stated is None:
        return problems
    # Of a federation whose parties are the unit the options name no unit: the method has it.
    party = privacy.unit is PrivacyUnit.PARTY and "trust" in result.details
    problems += _against_options(privacy, folder, PrivacyUnit.PARTY if party else None)
    if ledger is None or not ledger.exists() or privacy.events is None:
        return problems
    try:
        held = list(Ledger(ledger).book().held.values())
    except (LedgerError, DataError) as error:
        return [*problems, f"its ledger is cut or altered: {error}"]
    said_by = "said_by" in result.details
    return [*problems, *unpaid(privacy, result.details.get("run"), held, ledger.name, of_a_party=said_by)]


def _against_options(privacy: Privacy, folder: Path, unit: PrivacyUnit | None = None) -> list[str]:
    """Return the contradictions of a privacy statement with ``run.json``, the options of the run.

    A party's copy of a federation's result has no such file.
    """
    try:
        asked = read_json(folder / "run.json")
        epsilon, delta, relation = asked["epsilon"], asked["delta"], asked["relation"]
        private = not asked["non_private"]
        person = asked.get("person", asked.get("reading", {}).get("person"))  # 0.2 kept it in a group
        unit = unit or (PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    if epsilon is None or not private or privacy.delta is None:
        return []
    problems = []
    if not math.isclose(float(delta), privacy.delta, rel_tol=SLACK) or str(relation) != str(privacy.relation):
        stated = f"δ = {privacy.delta:g} under {privacy.relation}"
        problems.append(f"δ = {delta} under {relation} was asked for, {stated} is stated")
    if unit is not privacy.unit:
        problems.append(f"a guarantee for a {unit} was asked for, one to a {privacy.unit} is stated")
    return problems


def unpaid(
    privacy: Privacy, run: str | None, held: Sequence[ReservationState], name: str, *, of_a_party: bool = False
) -> list[str]:
    """Return how the reservations in a ledger called ``name`` contradict a privacy statement.

    A party's ledger keeps an account of its own naming (``of_a_party``).
    """
    mine = [each for each in held if run is None or run_of(each.reservation.run) == run]
    theirs = {privacy.events, *(privacy.events.parties if isinstance(privacy.events, MaxOverParties) else ())}
    paid = [each for each in mine if {each.counts, each.reservation.event} & theirs]
    if run is not None and len(mine) > 1:  # resumed on other sums: one entry for each time the plan was charged
        charged = [(each.counts, each.reservation.event) for each in mine if each.counts is not None]
        paid = mine if charged and privacy.events in [composed(each) for each in zip(*charged, strict=True)] else []
    if not paid:
        return [f"{name} holds no reservation of this run for the releases listed"]
    if not of_a_party and not any(same(each.reservation.account, privacy.account) for each in paid):
        return [f"{name} has the run under the account {paid[0].reservation.account!r}"]
    entries = [each.reservation for each in paid]
    if not any((entry.relation, entry.delta) == (privacy.relation, privacy.delta) for entry in entries):
        return [f"{name} has the run under another δ or relation"]
    if not any(entry.unit == privacy.unit for entry in entries):
        return [f"{name} has the run about a {entries[0].unit}, and it is stated about a {privacy.unit}"]
    if not any(entry.condition == privacy.condition for entry in entries):
        return [f"{name} has the run under another condition"]
    return []


def ledger_of(folder: Path, given: Path | None = None) -> Path:
    """The ledger a saved run was paid from: the ``given`` one, else that of its options, of its folder, or of the
    project if that has the run."""
    if given is not None:
        if not given.is_file():
            raise DataError(f"{given}: no such ledger.")
        return given
    try:
        named = read_json(folder / "run.json")["ledger"]
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    if isinstance(named, str) and "\0" not in named:
        return Path(named)
    folder_ledger = folder / "ledger.jsonl"
    # A copy of a folder may hold what a link led to, without the head that belongs to it: that is no ledger.
    if folder_ledger.exists() and (
        folder_ledger.is_symlink() or folder_ledger.with_name(folder_ledger.name + ".head").exists()
    ):
        return folder_ledger
    try:
        run = read_json(folder / "result.json")["details"]["run"]
        if project_path().exists() and project_ledger().find(str(run)):
            return project_path()
    except (OSError, ValueError, KeyError, TypeError, LedgerError):
        pass
    return folder / "no ledger"


def payer_of(folder: Path) -> Account:
    """The account that paid for the saved run in ``folder``, in the ledger that holds the run's entry.

    Raises:
        LedgerError: no ledger with an entry of the run is found. Nothing is charged to another one in its place.
    """
    run, path = str(load(folder).details.get("run")), ledger_of(folder)
    entry = Ledger(path).find(run) if path.exists() else None
    if entry is None:
        raise LedgerError(
            f"{folder}: the ledger that this run was charged to is not found, so its people cannot be charged "
            "again. Restore the ledger at its path. No privacy budget was spent."
        )
    name = entry.reservation.account
    return Account(name, Ledger(path), by_default=True, asked=name)  # the user named neither


def over(folder: str | Path) -> Result | None:
    """Return the result of a run that was killed after its end, while it cleared away, or ``None``.

    A run without its key goes on nowhere. What is left of it is cleared away, and its result is what any saved
    result is: a claim, that is held against its own releases and its ledger.
    """
    path = Path(folder)
    name = checkpoint.run_named_in(path / FILE)
    if name is None or not is_path_name(name) or not (path / "result.json").exists() or KeyFile.exists(name):
        return None
    result = load(path)
    if result.details.get("run") != name:
        return None
    if problems := problems_of(result, path, ledger_of(path)):
        result = replace(result, privacy=refuted(result.privacy, *problems))
    clear(path, name)
    return result
