"""The state of a ledger as a fold over its entries: reservations, caps, totals, account names, fingerprints.

Nothing here reads or writes a file. A reservation counts in full from the moment it is written;
closing it can only replace its event by a part of it (:func:`is_part`), and only if the stop that caused it
did not depend on the data, or the event is a zCDP filter (whose accounting allows any stopping rule).

An account is a group of people by the user's word, and a cap per spelling is no cap. So names are compared by
:func:`canonical_account_name`, which only ever brings spellings together: too much is then charged, never too
little.

Fingerprints of tables let a ledger warn about mixed-up accounts (:mod:`~quietgrad.core.ledger.fingerprints`).
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, Json, PrivacyUnit, Relation, check_condition
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import LedgerError, SettingError
from quietgrad.core.ledger.chain import ChainEntry
from quietgrad.core.ledger.fingerprints import is_of_table, unsealed

DEFAULT = "default"  # the account of a run that names none
NAMELESS = (DEFAULT, "held-out")  # what front ends charge if the caller names no account
_UNNAMED = re.compile(r"[a-z ]+ [0-9a-f]{16}")
LONGEST = 120  # characters; a name is a label in tables and messages

_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn")  # controls, formats (zero-width, direction marks), what is no character


@lru_cache(maxsize=4096)  # asked of every line of a ledger
def canonical_account_name(name: str) -> str:
    """Reduce an account name to what its spellings share: no case, width, spaces around or invisible signs."""
    # Folding case can undo a normal form and the other way round, so both are repeated until nothing moves.
    before, folded = None, name
    while folded != before:
        before = folded
        visible = (c for c in folded if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
        folded = " ".join(unicodedata.normalize("NFKC", "".join(visible)).casefold().split())
    return folded


def check_account_name(name: object) -> str:
    """Return the name as it is shown, without spaces around; ``ValueError`` says what is wrong with it."""
    if not isinstance(name, str) or not name.strip():
        raise SettingError("{account}: must be a name that is not empty.", account=name)
    shown = name.strip()
    if len(shown) > LONGEST:
        raise SettingError(
            f"{{account}}: has {len(shown)} characters; use at most {LONGEST}.", account=f"{shown[:20]}…"
        )
    if any(unicodedata.category(c) in _INVISIBLE for c in shown):
        raise SettingError(
            "{account}: holds characters that cannot be seen; use letters, digits and signs.", account=shown
        )
    if "/" in shown or "\\" in shown or not canonical_account_name(shown):
        raise SettingError("{account}: name the people, not a file; leave out / and \\.", account=shown)
    return shown


def unnamed(mark: str) -> str:
    """The account of a table in a project's ledger if the caller names none.

    It is the table alone, not the privacy unit or the front end: one table has one account.
    """
    return f"table {mark[:16]}"


def is_unnamed(account: str) -> bool:
    """Whether lines under ``account`` are of a table for which the caller named no account."""
    return _UNNAMED.fullmatch(canonical_account_name(account)) is not None


def same(name: str, other: str | None) -> bool:
    """Whether lines under ``name`` are those of the account that a run was charged to as ``other``.

    >>> same("Patients", "patients"), same("table 3f9ab0c41d6e7a52", "default"), same("patients", "default")
    (True, True, False)
    """
    if other is None:
        return False
    shown = canonical_account_name(name)
    return shown == canonical_account_name(other) or (
        canonical_account_name(other) in NAMELESS and is_unnamed(shown)
    )


COUNTED = "~count"
"""Behind a run's name: the private count that it was planned from."""
SCORE = "evaluation"
"""The note of a score of a model."""
EPOCH = "#"
"""Between a run's name and the nonce of an epoch."""


def run_of(line: str) -> str:
    """The name of the run that an entry is about."""
    return line.removesuffix(COUNTED).partition(EPOCH)[0]


@dataclass(frozen=True)
class Reservation:
    """A cost that is durably written down: what may now be released, of which account, under which guarantee."""

    id: str
    account: str
    run: str
    cost: Cost

    @property
    def event(self) -> events.Event:
        """Everything that may be released."""
        return self.cost.event

    @property
    def delta(self) -> float:
        """δ at which ε is stated."""
        return self.cost.delta

    @property
    def relation(self) -> Relation:
        """The neighbouring relation."""
        return self.cost.relation

    @property
    def unit(self) -> PrivacyUnit:
        """The privacy unit."""
        return self.cost.unit

    @property
    def condition(self) -> str | None:
        """The clause under which ε holds."""
        return self.cost.condition

    @cached_property
    def epsilon(self) -> float:
        """ε of the reserved event alone; accounted when first asked for, so that reserving stays quick."""
        from quietgrad.core.accounting.accounting import account

        return account(self.event, delta=self.delta, relation=self.relation)

    def under(self, condition: str | None) -> Reservation:
        """The same reservation, whose ε holds under ``condition``."""
        return replace(self, cost=replace(self.cost, condition=condition))

    @classmethod
    def from_body(cls, body: Json) -> Reservation:
        """Rebuild a reservation from the body of its entry."""
        return cls(
            id=str(body["id"]),
            account=str(body["account"]),
            run=str(body["run"]),
            cost=Cost.from_json(body),
        )


@dataclass(frozen=True)
class ReservationState:
    """A reservation, when it was made, how it stands, and the event that it counts as (None: nothing)."""

    reservation: Reservation
    time: str
    note: str
    fingerprint: str | None
    counts: events.Event | None
    state: str = "open"  # or "closed" or "cancelled"
    reason: str = ""
    table: str | None = None
    """The sealed fingerprint."""
    part: bool = False
    """Whether the table is a part of one that the account knows."""
    warned: tuple[str, ...] = ()
    """Warnings that the line itself holds, as versions before 0.3 wrote them."""


@dataclass
class LedgerState:
    """The entries of a ledger, folded one by one."""

    held: dict[str, ReservationState] = field(default_factory=dict)
    caps: dict[str, dict[str, Budget]] = field(default_factory=dict)  # by identity, then by spelling, newest last
    names: dict[str, str] = field(default_factory=dict)  # by identity: the first spelling, which is shown
    openings: dict[str, int] = field(default_factory=dict)  # by run: how often it was opened, the first included
    last: ChainEntry | None = None

    def fold(self, entries: Sequence[ChainEntry], path: Path | None = None) -> LedgerState:
        """Fold in what comes after the last entry; ``LedgerError`` names a line that chains but makes no sense."""
        for entry in entries[self.last.seq if self.last else 0 :]:
            try:
                self._apply(entry.kind, entry.body, entry.time)
            except (KeyError, TypeError, ValueError) as error:
                where = "" if path is None else f"{path}: "
                raise LedgerError(f"{where}line {entry.seq} ({entry.kind}) makes no sense: {error}") from None
            self.last = entry
        return self

    def _apply(self, kind: str, body: Json, time: str) -> None:
        if kind == "reserve":
            new = Reservation.from_body(body)
            if new.id in self.held:
                raise ValueError(f"reservation {new.id} is already there.")
            self.names.setdefault(canonical_account_name(new.account), new.account)
            self.held[new.id] = ReservationState(
                new, time, str(body["note"]), body["fingerprint"], new.event,
                table=body.get("table"), part=body.get("part") is True,
                warned=tuple(map(str, body.get("warnings") or ())),
            )  # fmt: skip
            self.openings.setdefault(new.run, 1)
        elif kind in ("close", "cancel"):
            old = self.open(str(body["id"]))
            if kind == "cancel":
                counts, state = None, "cancelled"
            else:
                back = body["gives_back_all_but"]
                counts, state = old.reservation.event if back is None else events.from_json(back), "closed"
            self.held[old.reservation.id] = replace(old, counts=counts, state=state, reason=str(body["reason"]))
        elif kind == "condition":
            old = self.held[str(body["id"])]
            rests = old.reservation.under(check_condition(body["condition"]))
            self.held[old.reservation.id] = replace(old, reservation=rests)
        elif kind == "cap":
            account, who = str(body["account"]), canonical_account_name(str(body["account"]))
            self.names.setdefault(who, account)
            # Old ledgers capped each spelling by itself: until a cap for all of them is set, all of those hold.
            others = {} if "identity" in body else self.caps.get(who, {})
            spellings = {spelling: cap for spelling, cap in others.items() if spelling != account}
            self.caps[who] = {**spellings, account: Budget.from_json(body)}
        elif kind == "resume":
            run, number = str(body["run"]), body["opening"]
            if number != self.openings.get(run, 0) + 1:
                raise ValueError(f"opening {number} of run {run} does not follow the one before.")
            self.openings[run] = number
        elif kind not in ("open", "quarantine", "adopt", "certificate"):
            raise ValueError("unknown kind; it was written by a newer quietgrad.")

    def open(self, reservation_id: str) -> ReservationState:
        """The open reservation of that id; ``ValueError`` if there is none."""
        held = self.held.get(reservation_id)
        if held is None or held.state != "open":
            state = "unknown" if held is None else f"already {held.state}"
            raise ValueError(f"reservation {reservation_id!r} is {state}; only an open one can be closed.")
        return held

    def of(self, account: str) -> list[ReservationState]:
        """The reservations that count for one account, oldest first.

        ``"default"`` is the account of all runs that name none, so the tables of such runs count for it: a cap on
        it bounds all of them together.
        """
        return [held for held in self.held.values() if same(held.reservation.account, account)]

    def lines(self, account: str) -> list[ReservationState]:
        """The reservations that stand under the name of one account, oldest first."""
        who = canonical_account_name(account)
        return [held for held in self.held.values() if canonical_account_name(held.reservation.account) == who]

    def bounds(self, account: str) -> list[tuple[str, Budget]]:
        """The caps that a new entry of ``account`` must keep, each with the account whose total it bounds."""
        names = [account, *(NAMELESS if is_unnamed(account) else ())]
        return [(name, cap) for name in names for cap in self.caps_of(name)]

    def accounts(self) -> tuple[str, ...]:
        """All accounts with a reservation or a cap, in the order in which they appeared, as first spelled."""
        return tuple(self.names.values())

    def without_account(self) -> tuple[str, ...]:
        """The tables for which no account was named, each of which has an account of its own."""
        return tuple(name for name in self.accounts() if is_unnamed(name))

    def name(self, account: str) -> str:
        """How the account is shown: as it was first spelled."""
        return self.names.get(canonical_account_name(account), account)

    def cap(self, account: str) -> Budget | None:
        """The account's newest cap."""
        return next(reversed(self.caps_of(account)), None)

    def caps_of(self, account: str) -> tuple[Budget, ...]:
        """The caps that hold for the account, the newest last."""
        return tuple(self.caps.get(canonical_account_name(account), {}).values())

    def find(self, run: str) -> ReservationState | None:
        """The newest reservation of ``run`` that is open, else the newest that was closed."""
        mine = [h for h in self.held.values() if h.reservation.run == run and h.state != "cancelled"]
        return max(reversed(mine), key=lambda held: held.state == "open", default=None)  # max takes the first

    def counted(self, account: str, unit: PrivacyUnit | None = None) -> list[events.Event]:
        """The events that count for one account; those about ``unit`` alone, if one is given."""
        lines = self.of(account)
        return [held.counts for held in lines if held.counts is not None and unit in (None, held.reservation.unit)]

    def charged(self, account: str) -> list[Reservation]:
        """The reservations that count for one account."""
        return [held.reservation for held in self.of(account) if held.counts is not None]

    def runs(self, account: str, unit: PrivacyUnit | None = None) -> int:
        """How many runs count for one account; one may have several entries (a count, epochs)."""
        return len({run_of(one.run) for one in self.charged(account) if unit in (None, one.unit)})

    def relations(self, account: str) -> set[Relation]:
        """The relations that what counts for one account was planned under."""
        return {one.relation for one in self.charged(account)}

    def units(self, account: str) -> tuple[PrivacyUnit, ...]:
        """The privacy units of what counts for one account."""
        return tuple(dict.fromkeys(one.unit for one in self.charged(account)))

    def stated_delta(self, account: str, run: str | None = None) -> float:
        """The δ at which the total of ``account`` is stated, wherever it is: the cap's, else what a run was given.

        The run is the newest one or ``run``. Its δ is shared with the scores of its model, whose entries follow.
        """
        if (cap := self.cap(account)) is not None:
            return cap.delta
        groups: list[dict[str, float]] = []
        scored = False  # whether the newest group is of a model
        for held in self.of(account):
            name, is_score = run_of(held.reservation.run), held.note.partition(";")[0] == SCORE
            if held.counts is None or held.reservation.run.endswith(COUNTED):
                continue
            if not (groups and (name in groups[-1] or (is_score and scored))):
                groups.append({})
                scored = not is_score
            groups[-1][name] = held.reservation.delta
        mine = [group for group in groups if run is None or run in group]
        return math.fsum(mine[-1].values()) if mine else self.of(account)[-1].reservation.delta

    def counted_runs(self, account: str) -> int:
        """How many runs of one account were planned from a private count of their records."""
        return len({one.run for one in self.charged(account) if one.run.endswith(COUNTED)})

    def conditions(self, account: str) -> tuple[str, ...]:
        """The conditions that the ε of one account rests on."""
        return tuple(dict.fromkeys(one.condition for one in self.charged(account) if one.condition is not None))

    def table_warnings(self, account: str, fingerprint: str, *, part: bool = False) -> list[str]:
        """Warnings about this pair of account and table; a pair that was seen before gives none."""
        pairs = {
            (self.name(held.reservation.account), is_of_table(held.fingerprint, fingerprint))
            for held in self.held.values()
            if held.fingerprint
        }
        return _pair_warnings(self.name(account), pairs, part=part)

    def past_warnings(self, account: str) -> dict[str, list[str]]:
        """The warnings of :meth:`table_warnings` that lines of one account caused, by reservation.

        Lines hold no warning, since it would name other accounts. This machine's key opens their fingerprints, and
        the warnings follow from these again; lines of other machines give none. Older lines hold their warnings.
        """
        marks: list[tuple[str, str]] = []
        warnings_by_reservation: dict[str, list[str]] = {}
        for reservation_id, held in self.held.items():
            name = self.name(held.reservation.account)
            same_account = canonical_account_name(name) == canonical_account_name(account)
            messages = list(held.warned)
            mark = None if held.table is None else unsealed(held.table, reservation_id)
            if mark is not None:
                pairs = {(other, other_mark == mark) for other, other_mark in marks} if same_account else set()
                messages += _pair_warnings(name, pairs, part=held.part)
                marks.append((name, mark))
            if same_account and messages:
                warnings_by_reservation[reservation_id] = messages
        return warnings_by_reservation


def _pair_warnings(account: str, pairs: set[tuple[str, bool]], *, part: bool) -> list[str]:
    """Warnings about an account and a table, where ``pairs`` are (account, is it this table) of earlier lines."""
    if (account, True) in pairs:
        return []
    messages = []
    if not part and any(name == account for name, _ in pairs):
        messages.append(
            f"account {account!r} was used with another table before; "
            "if these are other people, give them another account."
        )
    others = sorted(name for name, same_table in pairs if same_table)
    if others:
        names = ", ".join(map(repr, others))
        messages.append(f"{_SHARED}{names} before, now to {account!r}; the same people must stay in one account.")
    return messages


_SHARED = "this table was charged to account "


def names_other_accounts(body: Json) -> bool:
    """Whether the body of a line names other accounts: versions before 0.3 wrote their warnings into it."""
    return any(str(text).startswith(_SHARED) for text in body.get("warnings") or ())


def compose_events(parts: Iterable[events.Event]) -> events.Event | None:
    """All of ``parts`` on the same people as one event, equal ones counted together; None if there are none.

    Counting keeps accounting quick: k equal parallel events have far fewer worst cases than k different ones.
    """
    counts = Counter(parts)
    if not counts:
        return None
    return events.composed([events.repeated(event, count) for event, count in counts.items()])


def is_part(spent: events.Event, reserved: events.Event) -> bool:
    """Whether ``spent`` can be seen to be ``reserved`` stopped early, release by release.

    Only then is giving back safe whatever the accountant: fewer repetitions, some members of a composition in
    their order, some of the disjoint parts, every party's own part, a smaller ρ, more noise.
    A :class:`~quietgrad.core.accounting.events.TotalVariationSlack`, a failure and an upfront release always stay.
    """
    if spent == reserved:
        return True
    if isinstance(reserved, events.ZCDP):
        return isinstance(spent, events.ZCDP) and spent.relation == reserved.relation and spent.rho < reserved.rho
    if isinstance(reserved, events.Gaussian):
        # A run of correlated noise is one Gaussian release; stopped early, one of more noise.
        return isinstance(spent, events.Gaussian) and spent.noise_multiplier >= reserved.noise_multiplier
    if isinstance(reserved, events.Repeated):
        if isinstance(spent, events.Repeated) and spent.count <= reserved.count:
            return is_part(spent.inner, reserved.inner)
        return is_part(spent, reserved.inner)
    if isinstance(reserved, events.Composed):
        return _in_order(_flat(spent), _flat(reserved))
    if isinstance(reserved, events.Parallel):
        return _in_order(spent.parts if isinstance(spent, events.Parallel) else (spent,), reserved.parts)
    if isinstance(reserved, events.MaxOverParties) and isinstance(spent, events.MaxOverParties):
        # The place identifies a party, so none may be left out.
        same = len(spent.parties) == len(reserved.parties)
        return same and all(map(is_part, spent.parties, reserved.parties))
    return False


def _in_order(wanted: Sequence[events.Event], whole: Sequence[events.Event]) -> bool:
    """Whether each of ``wanted`` is part of a member of ``whole``, in order, and no slack is left out."""
    matched = 0
    for part in whole:
        if matched < len(wanted) and is_part(wanted[matched], part):
            matched += 1
        elif isinstance(part, (events.TotalVariationSlack, events.FailureProbability, events.Upfront)):
            return False
    return matched == len(wanted)


def _flat(event: events.Event) -> list[events.Event]:
    """The members of a composition, compositions inside it opened; any other event by itself."""
    if isinstance(event, events.Composed):
        return [member for part in event.parts for member in _flat(part)]
    return [event]


def may_give_back(spent: events.Event, reserved: events.Event, *, data_dependent: bool) -> bool:
    """Whether the account may be charged ``spent`` instead of ``reserved``.

    A stop that looked at the data may only shorten a zCDP filter: ρ adds up under any stopping rule
    (fully adaptive composition), and an account with a ZCDP entry is always accounted in Rényi divergences.
    """
    if data_dependent and not isinstance(reserved, events.ZCDP):
        return False
    return is_part(spent, reserved)
