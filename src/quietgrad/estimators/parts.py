"""A model that learns in parts: what all of them cost together, and when a part costs nobody before it anything.

A person who may be in every part pays for every part: their events compose. If a part is of people who were in none
before, each person pays for the earlier parts or for this one, and the worse of the two counts. With E the event of
the parts so far and p that of the next one, E becomes (E, p) composed, or the parallel of E and p. That nobody came
before is shown by ids, whose keyed hashes are kept beside a model while its process lives, or it is promised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

from quietgrad.errors import DataError
from quietgrad.estimators.scans import is_scan
from quietgrad.objectives.person_ids import SeenIds
from quietgrad.plans.schedule import Slot
from quietgrad.privacy.accounting import prove
from quietgrad.privacy.budget import PrivacyUnit, Relation
from quietgrad.privacy.events import Composed, Event, Parallel
from quietgrad.training.result import SEEDED, Privacy, Result

# Beside a model, because a model is published.
_met: WeakKeyDictionary[Any, tuple[SeenIds, Result]] = WeakKeyDictionary()
_KEPT = ("composition", "feature_range", "target_range", "model")  # details that all parts share
_NOTE = "fitted in "


@dataclass(frozen=True)
class Parts:
    """What a model was fitted on so far.

    ``apart`` if some part is of people of its own; ``promised`` if that was the caller's word for one of them.
    """

    count: int = 0
    records: int = 0
    apart: bool = False
    promised: bool = False

    @classmethod
    def of(cls, result: Result | None) -> Self:
        """From the result that a fit, or the parts before, left."""
        if result is None:
            return cls()
        known: Mapping[str, Any] = result.details.get("parts") or {"count": 1, "records": result.n_public}
        return cls(**known)

    def and_one(self, records: int, *, apart: bool, promised: bool) -> Parts:
        return Parts(self.count + 1, self.records + records, self.apart or apart, self.promised or promised)

    @property
    def note(self) -> str:
        told = f"{_NOTE}{self.count} parts of {self.records} records together"
        if not self.apart:
            return f"{told}, whose costs add up"
        why = "the caller's promise (disjoint=True)" if self.promised else "shown by their ids"
        return f"{told}; parts of different people do not add up, and that they are different is {why}"


@dataclass(frozen=True)
class Newcomers:
    """How the next part counts: whether its people were in none before, by whose word, and their hashes."""

    apart: bool
    promised: bool
    met: SeenIds | None = None
    hashes: frozenset[bytes] = frozenset()

    def remember(self, model: Any) -> None:
        """They have come to ``model``, whose result is now that of this part too."""
        if self.met is None:
            _met.pop(model, None)
        else:
            self.met.add(set(self.hashes))
            _met[model] = (self.met, model.result_)


def newcomers(model: Any, person: Any, disjoint: bool | None) -> Newcomers:
    """Who comes to ``model`` next; refused where somebody was in a part before, or may have been and cannot pay.

    Raises:
        DataError: nothing was reserved.
    """
    if disjoint not in (None, True, False):
        raise ValueError("disjoint: must be True (you declare it), False, or None.")
    before = getattr(model, "result_", None)
    if before is not None:
        _check_alike(model, before, person)
    listed = person is not None and not is_scan(person)  # a scan lists nobody
    met = _who_came(model, before) if listed and disjoint is not False else None
    if met is not None:
        return Newcomers(True, False, met, frozenset(met.newcomers(person)))
    if disjoint:
        return Newcomers(True, True)
    return Newcomers(False, False)


def _who_came(model: Any, before: Result | None) -> SeenIds | None:
    """Everybody of every part so far; ``None`` if that is not known: after a fit, or in a copy that was loaded."""
    if before is None:
        return SeenIds()
    met, last = _met.get(model, (None, None))
    return met if last is before else None


def _check_alike(model: Any, before: Result, person: Any) -> None:
    """Parts have one unit and one relation, or no one sentence is true of all of them."""
    privacy = before.privacy
    if (person is None) != (privacy.unit is PrivacyUnit.RECORD):
        raise DataError("the privacy unit cannot change between parts. Continue by record or by person, as begun.")
    if privacy.events is None or privacy.relation is not Relation.parse(model.relation):
        raise DataError(
            "partial_fit: the model was fitted under another relation or without noise. Go on as begun, or anew."
        )


def joined(before: Result, part: Result, params: Any, parts: Parts, *, apart: bool, account: str) -> Result:
    """The result of all parts: ``params`` of the model as it is now, and what all of them cost."""
    slots = [*_slots(before, parts.count - 1), *_slots(part, parts.count)]
    shared = {key: part.details[key] for key in _KEPT if key in part.details}
    details = {**shared, "slots": slots, "parts": asdict(parts)}
    privacy = _statement(before.privacy, part.privacy, parts, apart=apart, account=account)
    return replace(part, params=params, privacy=privacy, details=details, history=[])


def _statement(before: Privacy, part: Privacy, parts: Parts, *, apart: bool, account: str) -> Privacy:
    assert before.events is not None
    assert part.events is not None
    assert part.delta is not None
    assert part.relation is not None
    event = _together(before.events, part.events, apart=apart)
    proof = prove(event, delta=part.delta, relation=part.relation)
    notes = [note for note in (*before.notes, *part.notes) if not note.startswith(_NOTE)]
    if SEEDED in notes:
        notes.insert(0, SEEDED)
    if apart and part.delta * parts.records >= 1.0:
        notes.append("δ is not below 1/n of all parts: a mechanism that publishes a random record would satisfy it")
    whose = account if account == before.account else f"{before.account}; {account}"
    releases = [(before.releases, parts.count - 1), (part.releases, parts.count)]
    return replace(
        part,
        epsilon=proof.epsilon,
        accountant=proof.accountant,
        noise_multiplier=min(before.noise_multiplier, part.noise_multiplier),
        events=event,
        releases={_name(k, name): made for each, k in releases for name, made in each.items()},
        sampling=f"{_name(parts.count - 1, before.sampling)}; {_name(parts.count, part.sampling)}",
        account=whose,
        adversary=before.adversary if before.adversary == part.adversary else _both(before, part, parts),
        is_private=before.is_private and part.is_private,
        notes=tuple(dict.fromkeys((*notes, part.unit.in_words(parts.note)))),
    )


def _both(before: Privacy, part: Privacy, parts: Parts) -> str:
    """Whom the parts are safe from, where that differs."""
    return f"{_name(parts.count - 1, before.adversary)}; {_name(parts.count, part.adversary)}"


def _together(before: Event, part: Event, *, apart: bool) -> Event:
    """E and p: the worse of them for people who are in one, both for people who may be in both."""
    kind = Parallel if apart else Composed
    return kind((*(before.parts if isinstance(before, kind) else (before,)), part))


def _slots(result: Result, part: int) -> list[dict[str, Any]]:
    """The slots of a part by its number, each with its own noise; those of several parts have theirs already."""
    found = (Slot.from_json(slot) for slot in result.details.get("slots", ()))
    noise = result.privacy.noise_multiplier
    return [replace(s, name=_name(part, s.name), fixed=s.multiplier(noise)).to_json() for s in found]


def _name(part: int, of: str) -> str:
    """``part k: …``; what is of several parts is numbered already."""
    return of if of.startswith("part ") else f"part {part}: {of}"
