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
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import PrivacyUnit, Relation, check_condition
from quietgrad.core.accounting.events import Composed, Event, MaxOverParties, composed, from_json
from quietgrad.core.errors import DataError, LedgerError, UnprovableError, boundary
from quietgrad.core.files import check_regular, read_bytes, read_json, write_atomically
from quietgrad.core.ledger.account import run_of
from quietgrad.core.ledger.ledger import Ledger, project_ledger, project_path
from quietgrad.core.ledger.state import ReservationState, same
from quietgrad.core.plans.counting import COUNT
from quietgrad.core.session.base import Session, SessionCost
from quietgrad.core.vectors import Vector

SCHEMA_VERSION = 1
SEEDED = "seeded randomness: not private"
REFUTED = "refuted"


_STATEMENT: dict[str, tuple[type, ...]] = {
    "epsilon": (float, int, type(None)), "delta": (float, int, type(None)), "noise_multiplier": (float, int),
    "accountant": (str, type(None)), "sampling": (str,), "adversary": (str,), "account": (str, type(None)),
    "is_private": (bool,), "releases": (dict,), "notes": (list,),
}  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """The guarantee of a run: (ε, δ) under a relation, for a privacy unit, against an adversary.

    ``epsilon`` is ``None`` if the run added no noise. ``is_private`` is also false if its randomness was seeded, or
    if a paper's noise was used only to reproduce it; the first of the ``notes`` then says so. ``unit`` is the
    privacy unit: a record, or a person with all their records. ``condition`` is the sentence under which ε holds if
    code that cannot be checked has a part in it, else ``None``.
    """

    epsilon: float | None
    delta: float | None
    relation: Relation | None
    accountant: str | None
    noise_multiplier: float
    events: Event | None
    releases: Mapping[str, int]
    sampling: str
    adversary: str
    account: str | None
    is_private: bool
    notes: tuple[str, ...] = ()
    unit: PrivacyUnit = PrivacyUnit.RECORD
    condition: str | None = None

    def __post_init__(self) -> None:
        check_condition(self.condition)

    def to_json(self) -> dict[str, Any]:
        """The statement as JSON values."""
        plain = {key: vars(self)[key] for key in (*_STATEMENT, "condition")}
        return {
            **plain,
            "relation": None if self.relation is None else str(self.relation),
            "unit": str(self.unit),
            "releases": dict(self.releases),
            "notes": list(self.notes),
            "event": None if self.events is None else self.events.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Privacy:
        """Rebuild a statement from :meth:`to_json`; ``ValueError`` if its parts are not of their kind."""
        for key, kinds in _STATEMENT.items():
            value = data[key]
            if not isinstance(value, kinds) or (isinstance(value, float) and not value >= 0.0):
                raise ValueError(f"{key}={value!r}: is not what a privacy statement has there.")
        if not all(isinstance(note, str) for note in data["notes"]):
            raise ValueError("notes: a privacy statement has texts there.")
        plain: dict[str, Any] = {key: data[key] for key in _STATEMENT if key != "notes"}
        return cls(
            **plain,
            relation=None if data["relation"] is None else Relation.parse(data["relation"]),
            events=None if data["event"] is None else from_json(data["event"]),
            notes=tuple(data["notes"]),
            unit=PrivacyUnit.parse(data.get("unit", "record")),
            condition=data.get("condition"),
        )

    @property
    def refuted(self) -> tuple[str, ...]:
        """What contradicts the statement, if it was read from a file that does not prove it."""
        return tuple(note for note in self.notes if note.startswith(f"{REFUTED}: "))

    def facts(self) -> list[tuple[str, object]]:
        """What is proved, against which adversary and by which accountant, as rows of a table."""
        rows: list[tuple[str, object]] = [("privacy", str(self))]
        if self.epsilon is not None:
            rows += [("ε", f"{self.epsilon:.4g}"), ("δ", f"{self.delta:g}"), ("neighbours", self.relation)]
            rows += [] if self.condition is None else [("condition", self.condition)]
            rows += [
                ("proved by", self.accountant),
                ("adversary", self.adversary),
                ("account", self.account or "–"),
            ]
        releases = ", ".join(f"{made} × {name}" for name, made in self.releases.items() if made)
        return [*rows, ("released", releases), *(("note", note) for note in self.notes)]

    def _repr_html_(self) -> str:
        """The statement in a notebook."""
        return to_notebook_html("Privacy", self.facts())

    def __str__(self) -> str:
        if self.refuted:
            return f"REFUTED: {'; '.join(note.removeprefix(f'{REFUTED}: ') for note in self.refuted)}"
        if self.epsilon is None:
            return "NOT PRIVATE"
        whom = " per person" if self.unit is PrivacyUnit.PERSON else ""
        text = f"({self.epsilon:.4g}, {self.delta:g})-DP{whom}, {self.relation}, proved by {self.accountant}"
        text = text if self.condition is None else f"{text}, {self.condition}"
        if self.is_private:
            return text
        if SEEDED in self.notes:
            return f"NOT PRIVATE (seeded; with secret randomness: {text})"
        return f"NOT PRIVATE ({self.notes[0] if self.notes else 'no reason was kept'}; proved: {text})"


@dataclass(frozen=True)
class Result:
    """The outcome of :func:`quietgrad.minimize`.

    ``history`` holds public numbers only: norms of released estimates and the ε spent, never raw losses.
    ``seconds`` is for its owner: how long a batch took depends on its size, which is secret under Poisson
    sampling, so only whole seconds are saved.
    """

    params: Vector
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
        """Write ``model.safetensors`` and ``result.json`` into ``folder``; :func:`quietgrad.load` reads them."""
        from safetensors.numpy import save as to_bytes

        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        params = self.params if isinstance(self.params, np.ndarray) else self.params.detach().cpu().numpy()
        write_atomically(path / "model.safetensors", to_bytes({"params": params}))
        write_atomically(path / "result.json", (json.dumps(self.to_json(), indent=2) + "\n").encode())
        return path


def digest_of(folder: Path) -> str:
    """What tells the result in ``folder`` from any other that may take its place."""
    return hashlib.sha256(read_bytes(folder / "result.json")).hexdigest()


def load(folder: str | Path) -> Result:
    """Read a result that :meth:`Result.save` wrote, and prove its ε again from the releases it lists.

    A statement that its own events do not prove comes back as not private, with ``privacy.refuted`` saying why;
    ``quietgrad report`` also holds it against the options of the run and its ledger.
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


ADVERSARY = "anyone who sees every released number; the curator and its machine are trusted"


def privacy_statement(session: Session, spent: SessionCost, account: str | None, notes: tuple[str, ...]) -> Privacy:
    """State what ``spent`` proves about the people of ``account``, and what it does not cover."""
    the_plan = session.plan
    sampling = "; ".join(f"{slot.name}: {slot.sampling.describe()}" for slot in the_plan.schedule.slots)
    sampling = the_plan.unit.in_words(sampling)
    if the_plan.records_public is not None:
        notes = (*notes, the_plan.declared)
    if the_plan.budget is None or spent.event is None:
        return Privacy(
            None, None, None, None, 0.0, None, spent.releases, sampling, ADVERSARY, account, False,
            ("not private", *notes), the_plan.unit,
        )  # fmt: skip
    budget = the_plan.budget
    # A filter's run is charged what it spent, but how much that is depends on data: what is proved is its total.
    whole = session.epochs == 1 and (spent.event == the_plan.event or the_plan.schedule.composition == "filter")
    charged = spent.event.parts if session.epochs > 1 and isinstance(spent.event, Composed) else (spent.event,)
    first = None if the_plan.counted is None else the_plan.counted.event(budget.relation)
    released = the_plan.total if whole else composed([*([] if first is None else [first]), *charged])
    proof = the_plan.proof if whole else prove(released, delta=budget.delta, relation=budget.relation)
    epsilon, releases = proof.epsilon, spent.releases
    if the_plan.counted is not None:
        # Another count would have led to another plan; the guarantee of all of them is the budget.
        epsilon, releases = max(epsilon, budget.epsilon), {COUNT: 1, **releases}
        notes = (the_plan.counted.describe(the_plan.unit), *notes)
    if the_plan.delta_caution is not None:
        notes = (the_plan.delta_caution, *notes)
    if session.epochs > 1:
        again = "resumed on other sums than it was interrupted on: fresh noise was drawn and charged again"
        notes = (again, *notes)
    notes = (*session.charged, *notes)
    if session.seeded:
        notes = (SEEDED, *notes)
    return Privacy(
        epsilon, budget.delta, budget.relation, proof.accountant, the_plan.noise_multiplier, released, releases,
        sampling, ADVERSARY, account, not session.seeded, notes, the_plan.unit, the_plan.condition,
    )  # fmt: skip


_SLACK = 1e-6  # relative: the accountants' own numerics on another machine
_MOST_EVENTS = 4096  # parts of a composition: a proof takes some ten milliseconds for each


def contradiction(privacy: Privacy) -> str | None:
    """Why the statement does not follow from its own events; ``None`` if it does.

    >>> from quietgrad.core.accounting.events import gaussian
    >>> from quietgrad.core.accounting.budget import Relation
    >>> stated = Privacy(0.01, 1e-5, Relation.ADD_REMOVE, "gaussian-exact", 5.0, gaussian(5.0, 10),
    ...                  {"gradient": 10}, "all", "anyone", None, True)
    >>> contradiction(stated)
    'ε = 0.01 is stated, and the releases listed cost ε = 2.594'
    >>> contradiction(replace(stated, epsilon=2.6)) is None
    True
    """
    if privacy.epsilon is None:
        return "it is called private and states no ε" if privacy.is_private else None
    if privacy.events is None or privacy.delta is None or privacy.relation is None:
        return "an ε is stated without the releases, the δ or the relation it was proved for"
    if event_size(privacy.events.to_json()) > _MOST_EVENTS:
        return f"more than {_MOST_EVENTS} different releases are listed, which are not proved again here"
    try:
        proved = prove(privacy.events, delta=privacy.delta, relation=privacy.relation).epsilon
    except (UnprovableError, ValueError, OverflowError) as error:
        return f"no ε can be proved for the releases listed ({error})"
    if privacy.epsilon < proved * (1.0 - _SLACK):
        return f"ε = {privacy.epsilon:.4g} is stated, and the releases listed cost ε = {proved:.4g}"
    return None


def refuted(privacy: Privacy, *problems: str) -> Privacy:
    """The statement with what refutes it."""
    notes = [f"{REFUTED}: {problem}" for problem in problems]
    return replace(privacy, is_private=False, notes=(*notes, *(n for n in privacy.notes if n not in notes)))


def problems_of(result: Result, folder: Path, ledger: Path | None) -> list[str]:
    """What refutes a saved result: its own events, its schedule, the options of its run, its ledger."""
    privacy, stated = result.privacy, result.privacy.epsilon
    found = [note.removeprefix(f"{REFUTED}: ") for note in privacy.refuted]
    if not found and (problem := contradiction(privacy)) is not None:
        found.append(problem)
    # Releases beyond what was planned, and a curve that ends elsewhere than the statement.
    slots = {str(slot.get("name")): slot for slot in result.details.get("slots", ()) if isinstance(slot, Mapping)}
    for name, made in privacy.releases.items():
        if name in slots and made > slots[name].get("count", made):
            found.append(f"{made} releases of {name!r} are stated where {slots[name]['count']} were planned")
    curve = result.details.get("epsilon_curve") or ()
    if stated is not None and curve and max(float(point[1]) for point in curve) > stated * (1.0 + _SLACK) + 1e-9:
        found.append(f"its curve of ε goes beyond the stated {stated:.4g}")
    words = PrivacyUnit.PERSON if re.search(r"\b(person|people)\b", str(privacy.sampling)) else PrivacyUnit.RECORD
    if words is not privacy.unit:
        found.append(f"its samples are of a {words} each, and it is stated about a {privacy.unit}")
    if stated is None:
        return found
    found += _against_options(privacy, folder)
    if ledger is None or not ledger.exists() or privacy.events is None:
        return found
    try:
        held = list(Ledger(ledger).book().held.values())
    except (LedgerError, DataError) as error:
        return [*found, f"its ledger is cut or altered: {error}"]
    said_by = "said_by" in result.details
    return [*found, *unpaid(privacy, result.details.get("run"), held, ledger.name, of_a_party=said_by)]


def _against_options(privacy: Privacy, folder: Path) -> list[str]:
    """``run.json`` holds what was asked for before the run; a party's copy of a federation's result has none."""
    try:
        asked = read_json(folder / "run.json")
        epsilon, delta, relation = asked["epsilon"], asked["delta"], asked["relation"]
        private = not asked["non_private"]
        person = asked.get("person", asked.get("reading", {}).get("person"))  # 0.2 kept it in a group
        unit = PrivacyUnit.RECORD if person is None else PrivacyUnit.PERSON
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    if epsilon is None or not private or privacy.delta is None:
        return []
    found = []
    if not math.isclose(float(delta), privacy.delta, rel_tol=_SLACK) or str(relation) != str(privacy.relation):
        stated = f"δ = {privacy.delta:g} under {privacy.relation}"
        found.append(f"δ = {delta} under {relation} was asked for, {stated} is stated")
    if unit is not privacy.unit:
        found.append(f"a guarantee for a {unit} was asked for, one to a {privacy.unit} is stated")
    return found


def unpaid(
    privacy: Privacy, run: str | None, held: Sequence[ReservationState], name: str, *, of_a_party: bool = False
) -> list[str]:
    """What the reservations in a ledger called ``name`` say against a statement.

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
    own = folder / "ledger.jsonl"
    # A copy of a folder may hold what a link led to, without the head that belongs to it: that is no ledger.
    if own.exists() and (own.is_symlink() or own.with_name(own.name + ".head").exists()):
        return own
    try:
        run = read_json(folder / "result.json")["details"]["run"]
        if project_path().exists() and project_ledger().find(str(run)):
            return project_path()
    except (OSError, ValueError, KeyError, TypeError, LedgerError):
        pass
    return folder / "no ledger"


def event_size(value: object) -> int:
    """How many objects a JSON value holds."""
    if isinstance(value, dict):
        return 1 + sum(map(event_size, value.values()))
    return sum(map(event_size, value)) if isinstance(value, list) else 0
