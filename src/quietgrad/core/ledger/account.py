"""Accounts: every reservation and every close, for tables, modules, searches and parties alike.

*Reserve → release → close.* An :class:`Account` is a group of people and the ledger that keeps their spending; a
:class:`Charge` is one plan's entry in it. Opening an existing entry again demands the identical event, and closing
is idempotent. Front ends charge the ledger that they are given, or else the project's (:meth:`Account.of`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import gdp_mu
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import BudgetError, LedgerError, LedgerWarning, UnprovableError
from quietgrad.core.files import os_error_text
from quietgrad.core.ledger.fingerprints import fingerprint
from quietgrad.core.ledger.ledger import Ledger, project_ledger, project_ledger_exists
from quietgrad.core.ledger.state import (
    COUNTED,
    DEFAULT,
    EPOCH,
    NAMELESS,
    canonical_account_name,
    check_account_name,
    run_of,
    unnamed,
)

__all__ = ["COUNTED", "EPOCH", "Account", "Charge", "run_of"]

if TYPE_CHECKING:
    from quietgrad.core.ledger.ledger import Reservation


@dataclass(frozen=True)
class Account:
    """The people whose privacy is spent, the ledger that records it, and the most it may come to.

    Args:
        name: the people the records are about; all entries of one account compose.
        ledger: path of a ledger file, a :class:`~quietgrad.core.ledger.ledger.Ledger`, or ``None``: then nothing is
            durable, and this run alone is stated.
        cap: a budget the account as a whole may not exceed; needs a ledger.
        by_default: no ledger was named, so the project's pays.
        note: what a statement says of how the run adds up to others.
        asked: the name that the user gave, where lines stand under another.
        table: the keyed fingerprint of the table, or the file whose fingerprint stands for it.
    """

    name: str = DEFAULT
    ledger: Ledger | str | Path | None = None
    cap: Budget | None = None
    by_default: bool = False
    note: str = ""
    asked: str = ""
    table: str | Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_account_name(self.name))
        if self.cap is not None and self.ledger is None and not self.by_default:
            raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")

    def __str__(self) -> str:
        return self.asked or self.name

    @classmethod
    def of(
        cls, name: str | Account, ledger: Ledger | str | Path | None, cap: Budget | None, *, seeded: bool = False
    ) -> Account:
        """The account that a front end charges: in the ledger given, else in the project's own.

        A ``seeded`` run is not private, so it is charged only where a ledger is named. An account stays as it is.
        """
        if isinstance(name, Account):
            if ledger is not None or cap is not None:
                raise ValueError("account: an Account has its own ledger and cap; leave ledger= and cap= out.")
            return name
        return cls(name, ledger, cap, by_default=ledger is None and not seeded)

    def settled(self, contents: Callable[[], Iterable[bytes | memoryview]]) -> Account:
        """The account with its ledger open and the name that its lines have: the name given, if there is one.

        Without a name, a project's ledger has one account for each table. A keyed fingerprint distinguishes the
        tables, so that the costs of unrelated ones do not add up.
        """
        if self.asked:
            return self
        ledger, table = self.open(), self.table
        if ledger is None:
            return replace(self, by_default=False, note=_IN_MEMORY if self.by_default else self.note)
        if isinstance(table, Path):
            with table.open("rb") as file:
                table = fingerprint(iter(lambda: file.read(2**20), b""))
        if not self.by_default:
            return replace(self, table=table)
        table = table or fingerprint(contents())
        if canonical_account_name(self.name) not in NAMELESS:
            return replace(self, ledger=ledger, asked=self.name, table=table)
        return replace(self, ledger=ledger, name=unnamed(table), asked=self.name, table=table, note=_NO_ACCOUNT)

    def check(self, cost: Cost) -> None:
        """Raise ``BudgetError`` if :meth:`reserve` would now refuse ``cost``; writes nothing."""
        if (ledger := self.open()) is not None:
            ledger.check_cap(self.name, cost, cap=self.cap)

    def reserve(
        self,
        cost: Cost | None,
        *,
        run: str = "",
        note: str = "",
        contents: Iterable[bytes | memoryview] | None = None,
        part: bool = False,
    ) -> Charge:
        """Write the whole ``cost`` to the ledger, durably. Its releases may be made once this returns.

        Args:
            cost: the cost of the plan, or ``None`` for a run without noise. An account that was charged for another
                privacy unit is refused.
            run: the run's name in the ledger; empty for a run that is never resumed.
            contents: the table as bytes. By their keyed fingerprint the ledger warns if two accounts share a table.
            part: the table may be a part of one that the account knows, such as a fold.
        """
        if cost is None:
            return Charge(None)
        ledger = self.open()
        if ledger is None:
            return Charge(cost.event, note=self.note)
        mark = self.table if isinstance(self.table, str) else None
        if mark is None and contents is not None:
            mark = fingerprint(contents)
        with warnings.catch_warnings() if self.by_default else nullcontext():
            if self.by_default:  # a warning of a ledger that was not named must not turn into an error
                warnings.simplefilter("default", LedgerWarning)
            try:
                reservation = ledger.reserve_cost(
                    self.name, cost, run=run, cap=self.cap, note=note, fingerprint=mark, part=part
                )
            except LedgerError as error:
                raise _unusable(error) if self.by_default else error from None
        return Charge(cost.event, ledger, reservation, note=self.note)

    def reopen(self, cost: Cost | None, *, run: str) -> Charge | None:
        """The entry that ``run`` made before it was interrupted, or ``None`` if there is none.

        An entry pays for its own cost only: another cost under the same name is refused.
        """
        ledger = self.open()
        if cost is None or ledger is None:
            return None
        held = ledger.find(run)
        if held is None:
            return None
        reserved = held.reservation
        if reserved.cost != cost or canonical_account_name(reserved.account) != canonical_account_name(self.name):
            raise BudgetError(
                f"run {run!r}: its entry in the ledger is for another plan or account. Resume it with the plan "
                "and the account that it was started with, or start a new run."
            )
        return Charge(cost.event, ledger, reserved, paid=held.state != "open", booked=held.counts, note=self.note)

    def epochs(self, run: str) -> tuple[str, ...]:
        """The nonces of all epochs that ``run`` was charged for, even if its transcript has lost some."""
        ledger = self.open()
        held = () if ledger is None else ledger.book().held.values()
        names = (each.reservation.run.partition(EPOCH) for each in held if each.counts is not None)
        return tuple(dict.fromkeys(nonce for name, mark, nonce in names if name == run and mark))

    def openings(self, run: str) -> int:
        """How often the ledger knows ``run`` to have been opened; ``LedgerError`` if there is no ledger."""
        ledger = self.open()
        if ledger is None:
            raise LedgerError("a run can be resumed only with the ledger it is charged to. Start a new run.")
        return ledger.openings(run)

    def resume(self, run: str) -> None:
        """Write down that ``run`` is opened again."""
        if (ledger := self.open()) is not None and ledger.openings(run):
            ledger.resume(run)

    def open(self) -> Ledger | None:
        """The ledger that pays: the one given, else the project's. ``None`` if nothing is durable.

        A project's ledger that exists must be used, because its accounts may have caps. A run goes on without a
        ledger only if none exists and none can be made (the folder is read-only or cannot exist).

        Raises:
            LedgerError: the project's ledger exists and cannot be used, or a cap needs one and none can be made.
        """
        if self.ledger is not None:
            return self.ledger if isinstance(self.ledger, Ledger) else Ledger(self.ledger)
        if not self.by_default:
            return None
        try:
            ledger = project_ledger()
            _ = ledger.id  # begins the file
        except (LedgerError, OSError, RuntimeError) as error:
            if project_ledger_exists():
                raise _unusable(error) from None
            if self.cap is not None:
                raise LedgerError(
                    "cap: there is no project ledger to keep the account's total in, and none could be made. "
                    "Nothing was charged or released. Pass ledger=PATH."
                ) from None
            return None
        return ledger


@dataclass
class Charge:
    """The entry of one plan: the event that it pays for, and whether it is closed.

    ``paid`` marks an entry that an earlier process closed. Nothing new may be released under it, and ``booked`` is
    the event that it was closed with. ``note`` is a remark on the charge, which the statement repeats.
    """

    event: events.Event | None
    ledger: Ledger | None = None
    reservation: Reservation | None = None
    paid: bool = False
    booked: events.Event | None = None
    note: str = ""
    spent: events.Event | None = field(default=None, init=False)
    parted: bool = field(default=False, init=False)
    """Whether it paid for a round of a search, so that something may have been released under it."""
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

    def set_condition(self, condition: str) -> None:
        """Write down that what this entry pays for is private under ``condition``, before more is released."""
        if self.ledger is not None and self.reservation is not None:
            self.reservation = self.ledger.set_condition(self.reservation.id, condition)

    def part(self, event: events.Event, budget: Budget | None) -> Charge:
        """Charge one round of the search that this entry pays for; refused if the round costs more."""
        if self.closed:
            raise BudgetError(
                "the search that this round was charged with is closed. Fit outside it, at a cost of its own."
            )
        inner = self.event.inner if isinstance(self.event, events.RepeatAndSelect) else None
        try:
            pays = (
                inner is not None
                and budget is not None
                and gdp_mu(event, relation=budget.relation)
                <= gdp_mu(inner, relation=budget.relation) * (1.0 + 1e-9)
            )
        except UnprovableError:
            pays = False
        if not pays:
            raise UnprovableError(
                "a round of a search is accounted as one Gaussian release: only full-batch methods "
                "(algorithm=None, WhitenedGD, DPGD) and declared classes can be searched over."
            )
        self.parted = True
        return Charge(event)

    def cancel(self, reason: str) -> None:
        """Give the whole entry back: right only if nothing at all was released under it."""
        if self.ledger is not None and self.reservation is not None and not self.paid:
            self.ledger.cancel(self.reservation.id, reason=reason)


_NO_ACCOUNT = (
    "no account was named: this run adds up to runs on the very same table alone. A sorted, cleaned or shortened "
    "copy has an account of its own; pass account=NAME for the people in all of them"
)
_IN_MEMORY = "there is no project ledger and none could be made, so this run is not added to others"


def _unusable(error: Exception) -> LedgerError:
    why = os_error_text(error) if isinstance(error, OSError) else str(error).rstrip(".")
    return LedgerError(
        f"the project's ledger cannot be used: {why}. Nothing was charged or released. Run `quietgrad ledger "
        "verify` on it and repair it, or name another one: ledger=PATH."
    )
