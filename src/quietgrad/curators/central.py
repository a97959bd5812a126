"""The central curator: one trusted holder of all records, who pays for a plan before its door opens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.curators.central_session import CentralSession
from quietgrad.errors import DataError
from quietgrad.objectives.base import Objective
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import SecureStream, fresh_key, seed_key
from quietgrad.sampling import FixedSize
from quietgrad.vectors import Vector

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger, Reservation

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

    def __init__(
        self,
        objective: Objective,
        data: Any,
        *,
        ledger: Ledger | str | Path | None = None,
        account: str = "default",
        cap: Budget | None = None,
        run: str | None = None,
        key: bytes | None = None,
        seed: int | None = None,
    ) -> None:
        if cap is not None and ledger is None:
            raise ValueError("cap: needs a ledger that the account's total is kept in; pass ledger=PATH.")
        self.objective = objective
        self.records = objective.prepare(data)
        self.account = account
        self.cap = cap
        self.run = run
        self.seeded = seed is not None
        self._key = seed_key(seed) if seed is not None else (key or fresh_key())
        self._opened = 0
        self._ledger = ledger

    def use_key(self, key: bytes) -> None:
        """Draw samples and noise of the sessions to come from ``key``, that of a key file a run is resumed with."""
        self._key = key

    def initial(self) -> Vector:
        """The starting point, which depends on no record."""
        return self.objective.initial(self.records)

    def open(
        self, plan: Plan, *, used: Mapping[str, int] | None = None, rho_left: float | None = None
    ) -> CentralSession:
        """Reserve the cost of ``plan`` durably, then open its door.

        ``used`` and ``rho_left`` continue an interrupted session of the same plan and key; its reservation, made
        by the first open, is found in the ledger and not made again.
        """
        self._check(plan)
        ledger, reservation = self._reserve(plan, resumed=used is not None)
        session = CentralSession(
            plan, self.objective, self.records, self._session_key(), ledger, reservation, seeded=self.seeded
        )
        session.advance(used or {}, rho_left)
        return session

    def _session_key(self) -> bytes:
        """The curator's key for the first session, a new one for each other: two sessions that drew the same noise
        would let anyone subtract it."""
        self._opened += 1
        if self._opened == 1:
            return self._key
        return SecureStream(self._key, f"session/{self._opened}").bytes(0, len(self._key))

    def _check(self, plan: Plan) -> None:
        exact = plan.budget is not None and plan.budget.relation is Relation.REPLACE_ONE
        fixed = any(isinstance(slot.sampling, FixedSize) for slot in plan.schedule.slots)
        if (exact or fixed) and len(self.records) != plan.n_public:
            why = (
                "under replace-one n is public and must be exact"
                if exact
                else "fixed-size batches need the exact n"
            )
            raise DataError(f"the plan is for n={plan.n_public} but the data has another number of records: {why}.")

    def _reserve(self, plan: Plan, *, resumed: bool) -> tuple[Ledger | None, Reservation | None]:
        if self._ledger is None or plan.budget is None:
            return None, None
        from quietgrad.privacy.ledger import Ledger

        ledger = self._ledger if isinstance(self._ledger, Ledger) else Ledger(self._ledger)
        if resumed and self.run is not None:
            found = ledger.find(self.run)
            if found is not None and found.state == "open":
                return ledger, found.reservation
            if any(held.reservation.run == self.run for held in ledger.book().held.values()):
                return None, None  # the run was closed before its result was saved: it is paid, and only replays
        return ledger, ledger.reserve(
            self.account,
            plan.event,
            delta=plan.budget.delta,
            relation=plan.budget.relation,
            run=self.run or "",
            cap=self.cap,
            note=plan.algorithm,
            fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> str | None:
        parts = getattr(self.records, "fingerprint_parts", None)
        if parts is None:
            return None
        from quietgrad.privacy.fingerprint import fingerprint

        return fingerprint(parts())
