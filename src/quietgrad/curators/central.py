"""The central curator: one trusted holder of all records, who pays for a plan before its door opens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from quietgrad.curators.account import EPOCH, Account, Charge
from quietgrad.curators.session import CentralSession
from quietgrad.curators.transcript import Transcript
from quietgrad.errors import DataError
from quietgrad.objectives.base import Reading
from quietgrad.objectives.people import OfPeople
from quietgrad.objectives.tables.scanned import UNCOUNTED, Scanned
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget, Relation, Unit
from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.sampling import FixedSize
from quietgrad.vectors import Vector

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger

__all__ = ["CentralCurator", "CentralSession"]


class CentralCurator:
    """Holds one table; opens a session for a plan after its whole cost is in the ledger.

    Args:
        objective: the loss and its clipped sums.
        data: what ``objective.prepare`` takes; refused if unusable, before anything is reserved.
        ledger: path of a ledger file, a :class:`~quietgrad.privacy.ledger.Ledger`, or ``None`` (nothing durable).
        account: the people the records are about; all runs of one account compose.
        cap: a budget the account as a whole may not exceed.
        run: name of the run in the ledger; needed to resume.
        key: 32 secret bytes for samples and noise; ``None`` draws them from the operating system. A key is for one
            curator: two that share one draw the same noise, and the difference of their releases has none.
        seed: fixed randomness for tests: the run is then **not private** and says so.
    """

    session: ClassVar[type[CentralSession]] = CentralSession

    def __init__(
        self,
        objective: Reading,
        data: Any,
        *,
        ledger: Ledger | str | Path | None = None,
        account: str = "default",
        cap: Budget | None = None,
        run: str | None = None,
        key: bytes | None = None,
        seed: int | None = None,
    ) -> None:
        self.account = Account(account, ledger, cap)
        self.objective = objective
        self.records = objective.prepare(data)
        self.run = run
        self.seeded = seed is not None
        self._key = seed_key(seed) if seed is not None else (key or fresh_key())
        self._opened = 0
        self._process = os.getpid()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a curator cannot be copied or pickled: two would use the same noise. Make another.")

    def initial(self) -> Vector:
        """The starting point, which depends on no record."""
        return self.objective.initial(self.records)

    def open(
        self,
        plan: Plan,
        *,
        transcript: Transcript | None = None,
        used: Mapping[str, int] | None = None,
        rho_left: float | None = None,
        within: Charge | None = None,
        note: str = "",
        part: bool = False,
    ) -> CentralSession:
        """Reserve the cost of ``plan`` durably, then open its door.

        Args:
            transcript: of the run, if it may be interrupted. One that was found on the disk continues its run:
                the entry it made in the ledger is opened again, for the identical plan only.
            used, rho_left: how far the interrupted session had come by its last checkpoint.
            within: an entry that pays for this plan already (a round of a private search).
            note: what the ledger says of the run; the algorithm's name by default.
            part: the data may be a part of a table that the account knows, such as a fold.
        """
        self._check(plan)
        resumed = transcript is not None and transcript.resumed
        if transcript is not None and self.run is None:
            raise ValueError("run: a run with a transcript needs a name that its entry is found by.")
        if within is None:
            # An epoch that an earlier process began is part of what the run cost, whether or not it is met again.
            epochs = range(1, 1 + (0 if transcript is None else transcript.epoch))
            first = self._charge(plan, self.run or "", note, resumed=resumed, part=part)
            charges = [first, *(self._epoch(plan, epoch, note) for epoch in epochs)]
        else:
            charges = [within.part(plan.event, plan.budget)]
        session = self.session(
            plan,
            self.objective,
            self.records,
            self._session_key() if transcript is None else transcript.key(0),
            charges,
            transcript=transcript,
            again=lambda epoch: self._epoch(plan, epoch, note),
            seeded=self.seeded,
        )
        session.advance(used or {}, rho_left)
        return session

    def _epoch(self, plan: Plan, epoch: int, note: str) -> Charge:
        return self._charge(plan, f"{self.run}{EPOCH}{epoch}", note, resumed=True, part=True)

    def _charge(self, plan: Plan, run: str, note: str, *, resumed: bool, part: bool) -> Charge:
        event = plan.event if plan.is_private else None
        found = self.account.reopen(event, plan.budget, run=run, unit=self.unit) if resumed else None
        if found is not None:
            return found
        contents = None if self.account.ledger is None else self.records.fingerprint_parts()
        return self.account.reserve(
            event,
            plan.budget,
            run=run,
            note=(note or plan.algorithm) + ("" if plan.records_public is None else f"; {plan.counts}"),
            contents=contents,
            part=part,
            unit=self.unit,
        )

    def _session_key(self) -> bytes:
        """The curator's key for the first session, a new one for each other: two sessions that drew the same noise
        would let anyone subtract it."""
        if os.getpid() != self._process and not self.seeded:  # forked: the parent may draw from the same key
            self._key, self._opened, self._process = fresh_key(), 0, os.getpid()
        self._opened += 1
        if self._opened == 1:
            return self._key
        return SecureStream(self._key, f"session/{self._opened}").bytes(0, len(self._key))

    @property
    def unit(self) -> Unit:
        """Whom its records are about: what is held decides, not what a plan says."""
        return Unit.PERSON if isinstance(self.objective, OfPeople) else Unit.RECORD

    def _check(self, plan: Plan) -> None:
        self._check_unit(plan)
        exact = plan.budget is not None and plan.budget.relation is Relation.REPLACE_ONE
        if exact and isinstance(self.records, Scanned) and self.records.leaves_out:
            raise DataError(f"X: {UNCOUNTED}")
        fixed = any(isinstance(slot.sampling, FixedSize) for slot in plan.schedule.slots)
        if (exact or fixed) and len(self.records) != plan.n_public:
            why = (
                "under replace-one n is public and must be exact"
                if exact
                else "fixed-size batches need the exact n"
            )
            what = plan.unit.in_words("records")
            raise DataError(f"the plan is for n={plan.n_public} but the data has another number of {what}: {why}.")

    def _check_unit(self, plan: Plan) -> None:
        if plan.unit is not self.unit:
            raise DataError(
                f"the plan counts a {plan.unit} as one and the data were given by {self.unit}: plan with "
                f"unit={str(self.unit)!r}, n being their number."
            )
