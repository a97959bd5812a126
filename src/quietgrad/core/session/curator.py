"""The central curator: one trusted holder of all records. It pays for a plan before it opens a session."""

from __future__ import annotations

import math
import os
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np

from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import DataError, DeltaWarning
from quietgrad.core.ledger.account import COUNTED, EPOCH, Account, Charge
from quietgrad.core.ledger.state import canonical_account_name
from quietgrad.core.noise.rng import SecureStream, fresh_key, seed_key
from quietgrad.core.plans.counting import COUNT, PublicCount, count_noise, plans_gaussian, rest_like
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.objectives import UNCOUNTED, RecordAdapter, StreamedRecords
from quietgrad.core.session.session import CentralSession
from quietgrad.core.session.transcript import Transcript
from quietgrad.core.vectors import OwnVector

if TYPE_CHECKING:
    from quietgrad.core.ledger.ledger import Ledger
    from quietgrad.core.plans.method import HasSchedule

__all__ = ["CentralCurator", "CentralSession"]


_COUNTED_IN_MEMORY: set[str] = set()  # runs that no ledger pays for, counted here and not planned yet


class CentralCurator:
    """Holds one table; opens a session for a plan after its whole cost is in the ledger.

    Args:
        objective: the loss and its clipped sums.
        data: what ``objective.prepare`` takes; refused if unusable, before anything is reserved.
        ledger: path of a ledger file, a :class:`~quietgrad.core.ledger.ledger.Ledger`, or ``None`` (nothing
            durable).
        account: the people the records are about; all runs of one account compose. An
            :class:`~quietgrad.core.ledger.account.Account` says where it is kept and its cap too.
        cap: a budget the account as a whole may not exceed.
        run: name of the run in the ledger; a random one if it is not given.
        key: 32 secret bytes for samples and noise; ``None`` draws them from the operating system. A key is for one
            curator: two that share one draw the same noise, and the difference of their releases has none.
        seed: fixed randomness for tests: the run is then **not private** and says so.
    """

    session: ClassVar[type[CentralSession]] = CentralSession

    def __init__(
        self,
        objective: RecordAdapter,
        data: object,
        *,
        ledger: Ledger | str | Path | None = None,
        account: Account | str = "default",
        cap: Budget | None = None,
        run: str | None = None,
        key: bytes | None = None,
        seed: int | None = None,
    ) -> None:
        self.account = account if isinstance(account, Account) else Account(account, ledger, cap)
        self.objective = objective
        self.records = objective.prepare(data)
        self.run = run or uuid.uuid4().hex
        self.seeded, self._seed = seed is not None, seed
        self._key = seed_key(seed) if seed is not None else (key or fresh_key())
        self._opened = 0
        self._process = os.getpid()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a curator cannot be copied or pickled: two would use the same noise. Make another.")

    def initial(self) -> OwnVector:
        """The starting point, which depends on no record."""
        return self.objective.initial(self.records)

    def count(
        self, budget: Budget | None, declared: int | PublicCount | None, algorithm: HasSchedule | None
    ) -> PublicCount:
        """The number of records to plan ``algorithm`` for: ``declared``, exact if public, or counted privately.

        A private count is the first release of a run. The plan follows from the count, so the count is paid for
        before there is a plan, by its own line in the ledger, under the run's name. ``algorithm`` is ``None`` if
        there is none; the other releases are then not taken to be Gaussian.
        """
        if isinstance(declared, PublicCount):
            self._check_count(declared, budget)
            return declared
        if declared is not None:
            return PublicCount(declared)
        if budget is None or budget.relation is Relation.REPLACE_ONE:
            return PublicCount(len(self.records))
        gaussian = algorithm is not None and plans_gaussian(algorithm, budget.relation)
        size = public_count(len(self.records), budget, self.settle(), gaussian, self.run, self.unit, self._seed)
        return size if algorithm is None else size.at_least(algorithm)

    def _check_count(self, count: PublicCount, budget: Budget | None) -> None:
        """Raise if a private count was not paid for by this account, or if another run was planned from it."""
        if not count.counted or budget is None or self.seeded:
            return
        ledger = self.settle().open()
        if ledger is None:
            paid_and_unused = count.run in _COUNTED_IN_MEMORY
        else:
            line = ledger.find(f"{count.run}{COUNTED}")
            paid_and_unused = (
                line is not None
                and line.counts == count.event(budget.relation)
                and canonical_account_name(line.reservation.account) == canonical_account_name(self.account.name)
                and ledger.find(count.run) is None
            )
        _COUNTED_IN_MEMORY.discard(count.run)
        if not paid_and_unused:
            raise ValueError(
                "n_public: is a private count that was not charged to this account, or that another run was "
                "planned from. Leave it out, so that the records are counted, or declare a public number."
            )

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
        """Reserve the cost of ``plan`` durably, then open its session.

        Args:
            transcript: the run's transcript, if the run may be interrupted. A transcript that was found on the disk
                continues its run: the run's entry in the ledger is opened again, for the identical plan only, and a
                new line says so. A private run without a ledger cannot be continued.
            used: number of releases by slot at the interrupted session's last checkpoint.
            rho_left: what was left of a zCDP filter at that checkpoint.
            within: an entry that pays for this plan already (a round of a private search).
            note: what the ledger says of the run; the algorithm's name by default.
            part: the data may be a part of a table that the account knows, such as a fold.
        """
        self._check(plan)
        if plan.budget is not None and plan.delta_caution is not None and within is None:
            spent = "Nothing" if plan.counted is None else "Nothing but the private count of n"
            advice = f"{spent} is charged yet; choose δ ≤ 1/(100 n)."
            warnings.warn(f"δ = {plan.budget.delta:g}: {plan.delta_caution}. {advice}", DeltaWarning, stacklevel=4)
        if plan.is_private and within is None:
            self.settle()
        run = self.run if transcript is not None or not self._opened else uuid.uuid4().hex
        if transcript is not None:
            transcript.bind(plan.digest)

        def charge(name: str, *, resumed: bool = True, part: bool = True) -> Charge:
            """The entry that an interrupted run made under ``name``, or a new one."""
            reopened = self.account.reopen(plan.cost, run=name) if resumed else None
            text = (note or plan.algorithm) + ("" if plan.records_public is None else f"; {plan.counts}")
            contents = None if self.account.ledger is None else self.records.fingerprint_parts()
            return reopened or self.account.reserve(plan.cost, run=name, note=text, contents=contents, part=part)

        resumed = transcript is not None and transcript.resumed and plan.is_private
        if within is not None:
            charges = {"": within.part(plan.event, plan.budget)}
        elif transcript is not None and resumed:
            # The transcript and the ledger record the resumption before anything is released. The ledger knows
            # every epoch that was charged, even if the transcript lost it. An epoch that only the transcript knows
            # is charged again.
            transcript.reopen(self.account.openings(run))
            self.account.resume(run)
            charges = {"": charge(run, part=part)}
            for nonce in dict.fromkeys((*self.account.epochs(run), *transcript.epochs)):
                charges[nonce] = charge(f"{run}{EPOCH}{nonce}")
        else:
            charges = {"": charge(run, resumed=False, part=part)}
        session = self.session(
            plan,
            self.objective,
            self.records,
            self._session_key() if transcript is None else transcript.key(0),
            charges,
            run=run,
            transcript=transcript,
            again=lambda nonce: charge(f"{run}{EPOCH}{nonce}"),
            seeded=self.seeded,
        )
        session.advance(used or {}, rho_left)
        return session

    def settle(self) -> Account:
        """Open the ledger that pays, fix the name of the account's lines, and return the account."""
        self.account = self.account.settled(self.records.fingerprint_parts)
        return self.account

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
    def unit(self) -> PrivacyUnit:
        """The privacy unit of its records: what is held decides, not what a plan says."""
        return self.objective.unit

    def _check(self, plan: Plan) -> None:
        if plan.unit is not self.unit:
            raise DataError(
                f"the plan counts a {plan.unit} as one, and the data count a {self.unit} as one. Plan with "
                f"unit={str(self.unit)!r} and their number n."
            )
        exact = plan.budget is not None and plan.budget.relation is Relation.REPLACE_ONE
        if exact and isinstance(self.records, StreamedRecords) and self.records.leaves_out:
            raise DataError(f"X: {UNCOUNTED}")
        if exact:
            why = "under replace-one n is public and must be exact"
        elif any(slot.sampling.counts_exactly for slot in plan.schedule.slots):
            why = "fixed-size batches need the exact n"
        else:
            return
        if len(self.records) != plan.n_public:
            what = plan.unit.in_words("records")
            raise DataError(
                f"the plan is for {{n}} but the data has another number of {what}: {why}.", n=plan.n_public
            )


def public_count(
    records: int,
    budget: Budget,
    account: Account,
    gaussian: bool,
    run: str,
    unit: PrivacyUnit,
    seed: int | None = None,
) -> PublicCount:
    """Pay for a private count, and return the number of ``records`` with noise.

    The noise is ``gaussian`` if the run's other releases are un-sampled Gaussian ones.
    """
    counter = PublicCount(1, count_noise(budget, gaussian=gaussian), gaussian)
    event = counter.event(budget.relation)
    assert counter.multiplier is not None
    assert event is not None
    whole = counter.before(rest_like(budget, counter), budget.relation)
    account.check(Cost.of(whole, budget, unit))  # else the count would be in vain
    charge = account.reserve(Cost.of(event, budget, unit), run=f"{run}{COUNTED}", note=COUNT, part=True)
    total = np.array([float(records)])
    key = fresh_key() if seed is None else seed_key(seed)
    if seed is None and charge.reservation is None:
        _COUNTED_IN_MEMORY.add(run)
    counter.mechanism.source(key, COUNT, 1).add(total, 0, counter.multiplier, 1.0)
    charge.close(event, reason="counted", data_dependent=False)
    # Below its own noise a count says nothing; a number that small would only make shares and steps absurd.
    n = max(round(float(total[0])), math.ceil(counter.multiplier), 2)
    return PublicCount(n, counter.multiplier, gaussian, run)
