"""Who pays: every reservation and every close of quietgrad, for tables, modules, searches and parties alike.

*Reserve → release → close.* An :class:`Account` is a group of people and the ledger that keeps their spending; a
:class:`Charge` is one plan's entry in it. Opening an existing entry again demands the identical event, closing is
idempotent, and without a ledger the events are added up in this process (:func:`spent`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quietgrad.errors import BudgetError, LedgerWarning, UnprovableError
from quietgrad.privacy import events
from quietgrad.privacy.accounts import checked, identity
from quietgrad.privacy.budget import Budget, Relation, Unit

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger, Reservation


EPOCH = "#"  # between a run's name and the number of an epoch, in the ledger
_tally: dict[str, list[Charge]] = {}
_elsewhere: set[str] = set()  # accounts of models that left this process before they were fitted
_tally_lock = threading.Lock()


@dataclass(frozen=True)
class Account:
    """The people whose privacy is spent, where it is written down, and the most it may come to.

    Args:
        name: the people the records are about; all entries of one account compose.
        ledger: path of a ledger file, a :class:`~quietgrad.privacy.ledger.Ledger`, or ``None``: then nothing is
            durable, and only runs of this process are added up.
        cap: a budget the account as a whole may not exceed; needs a ledger.
    """

    name: str = "default"
    ledger: Ledger | str | Path | None = None
    cap: Budget | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", checked(self.name))
        if self.cap is not None and self.ledger is None:
            raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")

    def check(self, event: events.Event, budget: Budget, unit: Unit = Unit.RECORD) -> None:
        """Raise ``BudgetError`` if :meth:`reserve` would now refuse ``event``; writes and promises nothing."""
        if (ledger := self._open()) is not None:
            ledger.check_cap(self.name, event, relation=budget.relation, cap=self.cap, unit=unit)

    def reserve(
        self,
        event: events.Event | None,
        budget: Budget | None,
        *,
        run: str = "",
        note: str = "",
        contents: Iterable[bytes | memoryview] | None = None,
        part: bool = False,
        unit: Unit = Unit.RECORD,
    ) -> Charge:
        """Write the whole cost of ``event`` down, durably; what it pays for may be released when this returns.

        Args:
            event, budget: ``None`` for a run without noise, which has no cost that could be stated.
            run: its name in the ledger; empty for one that is never resumed.
            contents: of the table; a keyed fingerprint of it warns if one table meets two accounts.
            part: it may be a part of a table that the account knows, such as a fold.
            unit: whom the promise is about; an account whose ledger was charged for another is refused.
        """
        if event is None or budget is None:
            return Charge(event)
        ledger = self._open()
        if ledger is None:
            charge = Charge(event, tallied=(identity(self.name), budget.relation, unit))
            with _tally_lock:
                _tally.setdefault(identity(self.name), []).append(charge)
            return charge
        from quietgrad.privacy.fingerprint import fingerprint

        reservation = ledger.reserve(
            self.name,
            event,
            delta=budget.delta,
            relation=budget.relation,
            run=run,
            cap=self.cap,
            note=note,
            fingerprint=None if contents is None else fingerprint(contents),
            part=part,
            unit=unit,
        )
        return Charge(event, ledger, reservation)

    def reopen(
        self, event: events.Event | None, budget: Budget | None, *, run: str, unit: Unit = Unit.RECORD
    ) -> Charge | None:
        """The entry that ``run`` made before it was interrupted, or ``None`` if there is none.

        What was reserved under a name pays for that event only: another one under the same name is refused.
        """
        ledger = self._open()
        if event is None or budget is None or ledger is None:
            return None
        held = ledger.find(run)
        if held is None:
            return None
        found = held.reservation
        asked = (event, budget.delta, budget.relation, unit)
        same = (found.event, found.delta, found.relation, found.unit) == asked
        if not same or identity(found.account) != identity(self.name):
            raise BudgetError(
                f"run {run!r}: its entry in the ledger is for another plan or account than the one it is reopened "
                "with. Resume it with what it was started with, or start a new run."
            )
        return Charge(event, ledger, found, paid=held.state != "open", booked=held.counts)

    def _open(self) -> Ledger | None:
        from quietgrad.privacy.ledger import Ledger

        return self.ledger if self.ledger is None or isinstance(self.ledger, Ledger) else Ledger(self.ledger)


@dataclass
class Charge:
    """One plan's entry: what it may release, and whether it was closed already.

    ``paid`` marks an entry that an earlier process closed: nothing new may be released under it, and it stays
    ``booked`` as it is. ``tallied`` is where one without a ledger is counted.
    """

    event: events.Event | None
    ledger: Ledger | None = None
    reservation: Reservation | None = None
    paid: bool = False
    booked: events.Event | None = None
    tallied: tuple[str, Relation, Unit] | None = None
    spent: events.Event | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    def close(self, spent: events.Event | None, *, reason: str, data_dependent: bool) -> events.Event | None:
        """Close the entry and return the event that is charged; closing again changes nothing.

        Only a stop that does not depend on data gives back what was not released.
        """
        self.closed = True
        if self.paid:
            self.spent = self.booked or self.event
        elif self.ledger is None or self.reservation is None:
            self.spent = self.event if data_dependent else spent
        elif self.spent is None:
            self.spent = self.ledger.close(
                self.reservation.id, spent_event=spent, reason=reason, data_dependent=data_dependent
            )
        return self.spent

    def part(self, event: events.Event, budget: Budget | None) -> Charge:
        """What pays for one round of the search that this entry is for; refused if a round costs more than that."""
        from quietgrad.privacy.accounting import mu_of

        if self.closed:
            raise BudgetError("the search that paid for this round is over; a fit of its own has its own charge.")
        inner = self.event.inner if isinstance(self.event, events.RepeatAndSelect) else None
        try:
            pays = (
                inner is not None
                and budget is not None
                and mu_of(event, relation=budget.relation) <= mu_of(inner, relation=budget.relation) * (1.0 + 1e-9)
            )
        except UnprovableError:
            pays = False
        if not pays:
            raise UnprovableError(
                "a round of a search is priced as one Gaussian release: only full-batch methods (algorithm=None, "
                "WhitenedGD, DPGD) and declared classes can be searched over."
            )
        return Charge(event)

    def cancel(self, reason: str) -> None:
        """Give the whole entry back: right only if nothing at all was released under it."""
        if self.ledger is not None and self.reservation is not None and not self.paid:
            self.ledger.cancel(self.reservation.id, reason=reason)
        if self.tallied is not None:
            with _tally_lock:
                kept = [charge for charge in _tally[self.tallied[0]] if charge is not self]
                _tally[self.tallied[0]] = kept


def sent_away(account: str) -> None:
    """Remember that a model without a ledger was pickled before its fit: what it spends then is not seen here."""
    with _tally_lock:
        _elsewhere.add(identity(account))


def spent(account: str = "default", *, delta: float = 1e-5, relation: str | Relation = "replace-one") -> float:
    """The ε that all runs of this process without a ledger spent together on ``account``.

    Runs under replace-one are not priced under add-remove: they publish n, and some of their bounds are about two
    records. Other processes are not seen: give every run a ledger instead. If a model of this account went to one
    before its fit (a worker of joblib, say), a warning says that ε is at least what is returned.

    >>> spent("nobody")
    0.0
    """
    from quietgrad.privacy.accounting import account as price

    with _tally_lock:
        parts = list(_tally.get(identity(account), []))
        elsewhere = identity(account) in _elsewhere
    if elsewhere:
        warnings.warn(
            f"{account}: a model without a ledger left this process before its fit, so what was spent cannot be "
            "known here; it is at least this much. Give every fit a ledger.",
            LedgerWarning,
            stacklevel=2,
        )
    if not parts:
        return 0.0
    if len({c.tallied[2] for c in parts if c.tallied}) > 1:
        raise UnprovableError(f"{account}: some runs were about records and some about people: they do not add up.")
    asked = Relation.parse(relation)
    if asked is Relation.ADD_REMOVE and any(c.tallied and c.tallied[1] is Relation.REPLACE_ONE for c in parts):
        raise UnprovableError(f"{account}: a fit was made under replace-one; ask for what was spent under that.")
    return price(events.composed([c.event for c in parts if c.event is not None]), delta=delta, relation=asked)
