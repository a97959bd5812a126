"""A saved statement is a claim: here it is proved again from the releases it lists, and held against its ledger.

A result is a file that anybody may have edited. So no ε is shown because the file says so: the accountant proves it
from the stored events, the options the run was started with and the reservation in its ledger must tell the same
story, and what differs refutes the statement. The chain of a ledger is not keyed: who rewrites the result, the
options and the whole ledger alike is not caught here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quietgrad.curators.account import run_of
from quietgrad.errors import DataError, LedgerError, UnprovableError
from quietgrad.files import read_json
from quietgrad.privacy.accounts import same
from quietgrad.privacy.budget import Unit
from quietgrad.privacy.events import PerParty, composed
from quietgrad.privacy.spending import Held
from quietgrad.training.result import REFUTED, Privacy, Result

_SLACK = 1e-6  # relative: the accountants' own numerics on another machine
_MOST_EVENTS = 4096  # parts of a composition: a proof takes some ten milliseconds for each


def contradiction(privacy: Privacy) -> str | None:
    """Why the statement does not follow from its own events; ``None`` if it does.

    >>> from quietgrad.privacy.events import gaussian
    >>> from quietgrad.privacy.budget import Relation
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
    from quietgrad.privacy.accounting import prove

    try:
        proved = prove(privacy.events, delta=privacy.delta, relation=privacy.relation).epsilon
    except (UnprovableError, ValueError, OverflowError) as error:
        return f"no ε can be proved for the releases listed ({error})"
    if privacy.epsilon < proved * (1.0 - _SLACK):
        return f"ε = {privacy.epsilon:.4g} is stated, and the releases listed cost ε = {proved:.4g}"
    return None


def checked(privacy: Privacy) -> Privacy:
    """The statement, or what is left of it: not private, with the reason first among its notes."""
    problem = contradiction(privacy)
    return privacy if problem is None else refuted(privacy, problem)


def refuted(privacy: Privacy, *problems: str) -> Privacy:
    """The statement with what refutes it."""
    notes = [f"{REFUTED}: {problem}" for problem in problems]
    return replace(privacy, is_private=False, notes=(*notes, *(n for n in privacy.notes if n not in notes)))


def problems_of(result: Result, folder: Path, ledger: Path | None) -> list[str]:
    """What refutes a saved result: its own events, its schedule, the options of its run, its ledger."""
    privacy = result.privacy
    found = [note.removeprefix(f"{REFUTED}: ") for note in privacy.notes if note.startswith(REFUTED)]
    if not found and (problem := contradiction(privacy)) is not None:
        found.append(problem)
    found += _against_schedule(result)
    words = Unit.PERSON if re.search(r"\b(person|people)\b", str(privacy.sampling)) else Unit.RECORD
    if words is not privacy.unit:
        found.append(f"its samples are of a {words} each, and it is stated about a {privacy.unit}")
    if privacy.epsilon is not None:
        found += _against_options(privacy, folder)
        found += _against_ledger(result, ledger)
    return found


def _against_schedule(result: Result) -> list[str]:
    """Releases beyond what was planned, and a curve that ends elsewhere than the statement."""
    found = []
    slots = {str(slot.get("name")): slot for slot in result.details.get("slots", ()) if isinstance(slot, Mapping)}
    for name, made in result.privacy.releases.items():
        if name in slots and made > slots[name].get("count", made):
            found.append(f"{made} releases of {name!r} are stated where {slots[name]['count']} were planned")
    curve = result.details.get("epsilon_curve") or ()
    stated = result.privacy.epsilon
    if stated is not None and curve and max(float(point[1]) for point in curve) > stated * (1.0 + _SLACK) + 1e-9:
        found.append(f"its curve of ε goes beyond the stated {stated:.4g}")
    return found


def _against_options(privacy: Privacy, folder: Path) -> list[str]:
    """``run.json`` holds what was asked for before the run; a party's copy of a federation's result has none."""
    try:
        asked = read_json(folder / "run.json")
        epsilon, delta, relation = asked["epsilon"], asked["delta"], asked["relation"]
        private = not asked["non_private"]
        unit = Unit.RECORD if asked.get("reading", {}).get("person") is None else Unit.PERSON
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    if epsilon is None or not private or privacy.delta is None:
        return []
    found = []
    if not math.isclose(float(delta), privacy.delta, rel_tol=_SLACK) or str(relation) != str(privacy.relation):
        stated = f"δ = {privacy.delta:g} under {privacy.relation}"
        found.append(f"δ = {delta} under {relation} was asked for, {stated} is stated")
    if unit is not privacy.unit:
        found.append(f"a promise to a {unit} was asked for, one to a {privacy.unit} is stated")
    return found


def _against_ledger(result: Result, file: Path | None) -> list[str]:
    """The reservation that paid for the run must be for these releases, at this δ, under this relation."""
    privacy = result.privacy
    if file is None or not file.exists() or privacy.events is None:
        return []
    from quietgrad.privacy.ledger import Ledger

    try:
        held = list(Ledger(file).book().held.values())
    except (LedgerError, DataError) as error:
        return [f"its ledger is cut or altered: {error}"]
    said_by = "said_by" in result.details
    return unpaid(privacy, result.details.get("run"), held, file.name, of_a_party=said_by)


def unpaid(
    privacy: Privacy, run: str | None, held: Sequence[Held], name: str, *, of_a_party: bool = False
) -> list[str]:
    """What the reservations in a ledger called ``name`` say against a statement.

    A party's ledger keeps an account of its own naming (``of_a_party``).
    """
    mine = [each for each in held if run is None or run_of(each.reservation.run) == run]
    theirs = {privacy.events, *(privacy.events.parties if isinstance(privacy.events, PerParty) else ())}
    paid = [each for each in mine if {each.counts, each.reservation.event} & theirs]
    if run is not None and len(mine) > 1:  # resumed on other sums: one entry for each time the plan was charged
        charged = [(each.counts, each.reservation.event) for each in mine if each.counts is not None]
        paid = mine if charged and privacy.events in [composed(each) for each in zip(*charged, strict=True)] else []
    if not paid:
        return [f"{name} holds no reservation of this run for the releases listed"]
    if not of_a_party and not any(same(each.reservation.account, privacy.account) for each in paid):
        return [f"{name} has the run under the account {paid[0].reservation.account!r}"]
    if not any(
        each.reservation.relation == privacy.relation and each.reservation.delta == privacy.delta for each in paid
    ):
        return [f"{name} has the run under another δ or relation"]
    if not any(each.reservation.unit == privacy.unit for each in paid):
        return [f"{name} has the run about a {paid[0].reservation.unit}, and it is stated about a {privacy.unit}"]
    if not any(each.reservation.condition == privacy.condition for each in paid):
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
    whole = own.is_symlink() or own.with_name(own.name + ".head").exists()
    return own if own.exists() and whole else _project_of(folder) or folder / "no ledger"


def _project_of(folder: Path) -> Path | None:
    """The project's ledger, if the run in ``folder`` has an entry there."""
    from quietgrad.privacy.project import project_ledger, project_path

    try:
        run = read_json(folder / "result.json")["details"]["run"]
        return project_path() if project_path().exists() and project_ledger().find(str(run)) else None
    except (OSError, ValueError, KeyError, TypeError, LedgerError):
        return None


def event_size(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(event_size, value.values()))
    return sum(map(event_size, value)) if isinstance(value, list) else 0
