"""The statement of a run: (ε, δ), under which relation, for which privacy unit, proved by which accountant.

A statement is made from what a session released and was charged for, and from nothing else. One that was read from
a file is a claim: :func:`contradiction` proves its ε again from the releases that it lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quietgrad.core.accounting.accounting import prove
from quietgrad.core.accounting.budget import PrivacyUnit, Relation, check_condition
from quietgrad.core.accounting.events import Composed, Event, composed, from_json
from quietgrad.core.errors import UnprovableError
from quietgrad.core.plans.counting import COUNT
from quietgrad.core.sanitize import html_facts
from quietgrad.core.session.base import Session, SessionCost

SEEDED = "seeded randomness: not private"
N_TAKEN = "n was taken from the data set's length, which is thereby declared public (n_public= declares another)"
UNKEPT = "kept in no ledger"
SO_FAR = "planned steps so far"
_IN_THE_LINE = (UNKEPT, N_TAKEN, SO_FAR)
"""Remarks that the printed line has too. Without them ε would be read as holding, or as charged, for more."""
REFUTED = "refuted"


_STATEMENT: dict[str, tuple[type, ...]] = {
    "epsilon": (float, int, type(None)), "delta": (float, int, type(None)), "noise_multiplier": (float, int),
    "accountant": (str, type(None)), "sampling": (str,), "adversary": (str,), "account": (str, type(None)),
    "is_private": (bool,), "releases": (dict,), "notes": (list,),
}  # fmt: skip


@dataclass(frozen=True)
class Privacy:
    """The guarantee of a run.

    It is (ε, δ) under a neighbouring relation, for a privacy unit, against an adversary.

    ``epsilon`` is ``None`` if the run added no noise, and infinite for a custom loop without noise. ``is_private``
    is false also if its randomness was seeded, or if a paper's noise was used only to reproduce it; the first of
    the ``notes`` then says so. ``unit`` is the privacy unit: a record, a person with all their records, or a party
    with all it holds. ``condition`` is the sentence under which ε holds if code that cannot be checked has a part
    in it, else ``None``.
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
        """The contradictions of a statement whose file does not prove it."""
        return tuple(note for note in self.notes if note.startswith(f"{REFUTED}: "))

    def facts(self) -> list[tuple[str, object]]:
        """The statement as rows of a table.

        They say what is proved, against which adversary and by which accountant.
        """
        rows: list[tuple[str, object]] = [("privacy", str(self))]
        if self.epsilon is not None and self.accountant is not None:
            rows += [("ε", f"{self.epsilon:.4g}"), ("δ", f"{self.delta:g}"), ("neighbours", self.relation)]
            rows += [] if self.condition is None else [("condition", self.condition)]
            rows += [
                ("proved by", self.accountant),
                ("adversary", self.adversary),
                ("account", self.account or "–"),
            ]
        releases = ", ".join(f"{count} × {name}" for name, count in self.releases.items() if count)
        return [*rows, ("released", releases), *(("note", note) for note in self.notes)]

    def _repr_html_(self) -> str:
        """The statement in a notebook."""
        return f"<div>{html_facts('Privacy', self.facts())}</div>"

    def __str__(self) -> str:
        if self.refuted:
            return f"REFUTED: {'; '.join(note.removeprefix(f'{REFUTED}: ') for note in self.refuted)}"
        if self.epsilon is None or self.accountant is None:
            return "NOT PRIVATE"
        per_unit = "" if self.unit is PrivacyUnit.RECORD else f" per {self.unit}"
        text = f"({self.epsilon:.4g}, {self.delta:g})-DP{per_unit}, {self.relation}, proved by {self.accountant}"
        text = text if self.condition is None else f"{text}, {self.condition}"
        text = "; ".join([text, *(note for note in self.notes if any(mark in note for mark in _IN_THE_LINE))])
        if self.is_private:
            return text
        if SEEDED in self.notes:
            return f"NOT PRIVATE (seeded; with secret randomness: {text})"
        return f"NOT PRIVATE ({self.notes[0] if self.notes else 'no reason was kept'}; proved: {text})"


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


SLACK = 1e-6
"""Relative: the accountants' own numerics on another machine."""
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
    if privacy.epsilon is None or privacy.epsilon == math.inf:
        return "it is called private and states no ε" if privacy.is_private else None
    if privacy.events is None or privacy.delta is None or privacy.relation is None:
        return "an ε is stated without the releases, the δ or the relation it was proved for"
    if event_size(privacy.events.to_json()) > _MOST_EVENTS:
        return f"more than {_MOST_EVENTS} different releases are listed, which are not proved again here"
    try:
        proved = prove(privacy.events, delta=privacy.delta, relation=privacy.relation).epsilon
    except (UnprovableError, ValueError, OverflowError) as error:
        return f"no ε can be proved for the releases listed ({error})"
    if privacy.epsilon < proved * (1.0 - SLACK):
        return f"ε = {privacy.epsilon:.4g} is stated, and the releases listed cost ε = {proved:.4g}"
    return None


def refuted(privacy: Privacy, *problems: str) -> Privacy:
    """The statement with what refutes it."""
    notes = [f"{REFUTED}: {problem}" for problem in problems]
    return replace(privacy, is_private=False, notes=(*notes, *(n for n in privacy.notes if n not in notes)))


def event_size(value: object) -> int:
    """How many objects a JSON value holds."""
    if isinstance(value, dict):
        return 1 + sum(map(event_size, value.values()))
    return sum(map(event_size, value)) if isinstance(value, list) else 0
