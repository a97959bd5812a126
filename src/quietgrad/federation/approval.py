"""One approval is one run, and costs what the plan costs.

The first run that a coordinator opens uses the approval up, durably: no other is answered under it, by whatever
process of this party, and the same one may be continued. The plan's whole cost is in the party's ledger before the
first answer and stays there. When and why a run stopped early is the coordinator's word, who has seen releases by
then: a stop that may depend on data gives nothing back. Two exceptions need nobody's word: a run in which this
party was asked nothing, and a zCDP filter, whose accounting allows any stopping rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from quietgrad.curators.account import EPOCH, Account, Charge
from quietgrad.errors import BudgetError
from quietgrad.federation.journal import Journal
from quietgrad.federation.plan import FederatedPlan
from quietgrad.privacy.events import Event, MaxOverParties


class Approval:
    """A party's word that one run of a plan may use its records.

    Args:
        plan: the plan.
        place: the party's number in it.
        account: the people whose privacy is spent.
        journal: which run the approval was used for, and what was answered in it.
        contents: of the records, for the ledger's fingerprint.
    """

    def __init__(
        self,
        plan: FederatedPlan,
        place: int,
        account: Account,
        journal: Journal,
        contents: Callable[[], Iterable[bytes | memoryview]],
    ) -> None:
        self._plan, self._place, self._contents = plan, place, contents
        self._account = account if plan.budget is None else account.settled(contents, plan.unit)
        self.journal = journal
        self._charges: list[Charge] = []  # one, and one more for each time the journal was not as it was left

    @property
    def in_use(self) -> bool:
        """Whether a run was opened here that is paid for and not over."""
        return bool(self._charges) and not self.journal.ended

    @property
    def _event(self) -> Event | None:
        return None if self._plan.budget is None else self._plan.party_event(self._place, None)

    def check_cap(self) -> None:
        """Raise ``BudgetError`` if a new run would exceed the account's cap; writes nothing.

        A run that was interrupted and may be continued is paid for already.
        """
        event, budget = self._event, self._plan.budget
        if event is not None and budget is not None and self.journal.run is None:
            self._account.check(event, budget, self._plan.unit)

    def use(self, run: str) -> bool:
        """Pay for ``run``, or find that it was paid; ``False`` if it is over, ``BudgetError`` if it is another."""
        if self.journal.run is None:
            self.journal.bind(run)
        if self.journal.run != run:
            raise BudgetError(
                f"one run was approved here, {self.journal.run}, and this is another; it needs a new approval: a "
                "new `party` command with another --out. Nothing was given."
            )
        if not self.journal.ended and not self._charges:
            self._pay()
        return not self.journal.ended

    def close(self, run: str, reason: str) -> None:
        """The run is over: book what it costs. Closing again changes nothing, in this process or another."""
        if not self.use(run):
            return
        for charge in self._charges:
            if self.journal.last_round < 0 and len(self._charges) == 1:
                charge.cancel(reason or "nothing was asked")
            else:
                charge.close(self._filtered(), reason=reason, data_dependent=True)
        self.journal.end()

    def withdraw(self) -> bool:
        """Take the approval back if nothing was asked under it, and give back what was paid; whether that is so."""
        if self.journal.last_round >= 0 or len(self._charges) > 1:
            return False
        if self.journal.run is not None:
            if not self.journal.ended:
                found = self._charges or [self._reopened(self.journal.entry) or Charge(None)]
                found[0].cancel("the run ended before anything was asked")
            self.journal.unbind()
            self._charges = []
        return True

    def _pay(self) -> None:
        # The entry has a name of our own, so that no coordinator can point to what paid for something else.
        entry, agreed = self.journal.entry, True
        try:
            if self.journal.resumed and self._event is not None:
                agreed = self.journal.reopen(self._account.openings(entry))
                self._account.resume(entry)
            charges = [self._reopened(entry) or self._reserve(entry)]
            charges += [found for nonce in self._account.epochs(entry) if (found := self._reopened(entry, nonce))]
            over = charges[0].paid  # killed after its ledger was closed, before the journal said so; or restored
            if not agreed and not over:  # rounds may have been answered that the journal does not know of
                charges.append(self._reserve(f"{entry}{EPOCH}{os.urandom(8).hex()}"))
        except BudgetError:
            if self.journal.last_round < 0:
                self.journal.unbind()
            raise
        self._charges = charges
        if over:
            self.journal.end()

    def _reserve(self, run: str) -> Charge:
        return self._account.reserve(
            self._event,
            self._plan.budget,
            run=run,
            note=f"{self._plan.algorithm}, party {self._plan.names[self._place]}",
            contents=None if self._account.ledger is None else self._contents(),
            unit=self._plan.unit,
        )

    def _reopened(self, entry: str, nonce: str = "") -> Charge | None:
        plan, run = self._plan, f"{entry}{EPOCH}{nonce}" if nonce else entry
        return self._account.reopen(self._event, plan.budget, run=run, unit=plan.unit)

    def _filtered(self) -> Event | None:
        """What the plan's zCDP filter counted, if it has one."""
        rho = self.journal.rho
        if not self._plan.is_private or self._plan.schedule.composition != "filter":
            return None
        event = self._plan.filter_event(rho) if 0.0 < rho < self._plan.event_rho else None
        return event.parties[self._place] if isinstance(event, MaxOverParties) else event
