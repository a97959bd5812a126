"""Open a run: count, plan, keep, reserve, and open its session. Every front end does it here.

``Terms`` states the account that pays, the privacy unit and the public facts. :func:`opened` does the rest, in this
order:

1. The adapter lays out the data; what cannot be used is refused.
2. The records are counted: a declared number, the exact one where it is public, or a private release of its own.
3. The method is planned for that number, and the plan is proved to meet the budget.
4. A run with a folder is kept there, so that it can go on after an interruption.
5. The plan's whole cost is written to the ledger of the account that pays. From here on numbers may leave.

Nothing is charged before step 2, and nothing but the count before step 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import BudgetError, DataError, TooNoisyError
from quietgrad.core.ledger.account import Account, Charge
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.counting import NOMINAL, PublicCount
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.plans.schedule import plan as make_plan
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.kept import Run, begin, is_kept
from quietgrad.core.session.objectives import RecordAdapter
from quietgrad.core.session.session import CentralSession
from quietgrad.core.session.statement import Privacy, privacy_statement
from quietgrad.core.vectors import OwnVector, all_finite, copy

__all__ = ["Keeping", "OpenRun", "Terms", "counted", "opened", "opening", "reopened", "settle_failed_run"]

Method = TypeVar("Method", bound=HasSchedule)


@dataclass(frozen=True)
class Terms:
    """The terms of a run: the account that pays, the privacy unit and the public facts.

    Args:
        budget: (ε, δ) and the neighbouring relation; ``None`` runs without noise, and the statement says so.
        account: the people whose privacy is spent and the ledger that records it. :meth:`of` resolves it; its name
            is the one that the user gave.
        n_public: the public number of privacy units. If it is not given, units are counted: privately under
            add-remove, exactly under replace-one. A :class:`PublicCount` is a count that was already paid for.
        takes_n: take the number of units in the data as public, which its owner may decide; nothing is counted.
        records_public: the public number of all people's records together; statements repeat it, nothing uses it.
        noise_multiplier: fix the noise instead of calibrating it; ε is then whatever the plan proves.
        seed: fixed randomness for tests: the run is then not private and says so.
        key: 32 secret bytes for samples and noise, for processes that must draw alike; drawn if not given.
        note: the run's note in the ledger; the method's name by default.
        part: the data may be a part of a table that the account knows, such as a fold.
        within: the entry of a private search that already pays for this run, which is one of its rounds.
    """

    budget: Budget | None
    account: Account = field(default_factory=Account)
    n_public: int | PublicCount | None = None
    records_public: int | None = None
    noise_multiplier: float | None = None
    takes_n: bool = False
    seed: int | None = None
    key: bytes | None = field(default=None, repr=False)
    note: str = ""
    part: bool = False
    within: Charge | None = None

    @classmethod
    def of(
        cls,
        budget: Budget | None,
        *,
        account: str | Account = "default",
        ledger: Ledger | str | Path | None = None,
        cap: Budget | None = None,
        seed: int | None = None,
        **facts: Any,
    ) -> Terms:
        """The terms of a front end that was given ``account=``, ``ledger=`` and ``cap=``.

        Front ends decide here who pays: the ledger given, else the project's. The rule itself is
        :meth:`quietgrad.core.ledger.account.Account.of`, and :meth:`~quietgrad.core.ledger.account.Account.settled`
        names the account. A seeded run is not private, so it is charged only if a ledger is named.

        >>> Terms.of(Budget(1.0, 1e-5), account="patients", ledger="ledger.jsonl").account.name
        'patients'
        """
        payer = Account.of(account, ledger, cap, seeded=seed is not None)
        return cls(budget, payer, seed=seed, **facts)

    @property
    def counts_privately(self) -> bool:
        """Whether the number of units is a secret that must be counted."""
        n_is_public = self.n_public is not None or self.takes_n
        return not n_is_public and self.budget is not None and self.budget.relation is Relation.ADD_REMOVE


@dataclass(frozen=True)
class Keeping:
    """A folder that keeps a run until it is over, the kind of its front end, and the settings saved with it.

    ``state`` makes the state before the first step from the method and the starting point.
    """

    folder: str | Path
    kind: str
    state: Callable[[Any, OwnVector], object]
    settings: Mapping[str, object] = field(default_factory=dict)
    every: float = 10.0


@dataclass
class OpenRun(Generic[Method]):
    """A run whose whole cost is reserved: its method, its plan, its session and its starting point."""

    method: Method
    plan: Plan
    session: CentralSession
    start: OwnVector
    account: Account
    notes: tuple[str, ...] = ()
    kept: Run | None = None

    @property
    def size(self) -> PublicCount:
        """The number of units that the run was planned for, and how it was counted."""
        return self.plan.counted or PublicCount(self.plan.n_public)

    def close(self, reason: str, *, data_dependent: bool = False) -> Privacy:
        """End the run and state what it cost; only a stop that does not depend on data gives budget back."""
        cost = self.session.close(reason, data_dependent=data_dependent)
        return privacy_statement(self.session, cost, str(self.account), self.notes)


@contextmanager
def opened(
    adapter: RecordAdapter,
    data: object,
    method: Method | Callable[[int], Method],
    terms: Terms,
    **how: Any,
) -> Iterator[OpenRun[Method]]:
    """Open a run as :func:`opening` does, for the time of a ``with`` block; an error in it settles the entry."""
    run = opening(adapter, data, method, terms, **how)
    try:
        yield run
    except Exception as error:
        if settle_failed_run(run.session, error) and run.kept is not None:
            run.kept.discard()  # there is nothing to resume
        raise
    finally:
        if run.kept is not None:
            run.kept.close()


def opening(
    adapter: RecordAdapter,
    data: object,
    method: Method | Callable[[int], Method],
    terms: Terms,
    *,
    plan: Callable[[PublicCount], tuple[Method, Plan]] | None = None,
    start: OwnVector | None = None,
    first: Callable[[Method, OwnVector], None] | None = None,
    check: Callable[[Method, Plan, OwnVector], None] | None = None,
    keeping: Keeping | None = None,
    notes: tuple[str, ...] = (),
    curator: type[CentralCurator] = CentralCurator,
) -> OpenRun[Method]:
    """Count the records, plan, keep, reserve the whole cost, and open the session.

    Args:
        adapter: reads the data, and declares the privacy unit: a loss, or an adapter that tabulates records.
        data: the argument of ``adapter.prepare``.
        method: the method, or a function that makes it from the public number of units.
        terms: who pays, and the public facts.
        plan: a function that makes the method and its plan from the count, instead of :func:`quietgrad.plan`.
        start: a starting point other than the adapter's own.
        first: called with the method for a nominal number of units and the starting point, before anything is
            counted or charged. It may refuse the run or report on it.
        check: called with the method, the plan and the starting point, before the reservation. It may refuse too.
        keeping: keep the run in a folder.
        notes: remarks that the statement repeats.
        curator: the class of the curator.
    """
    if keeping is not None and is_kept(keeping.folder):
        raise DataError(f"{keeping.folder}: an interrupted run is kept here; resume it, or choose another folder.")
    if terms.noise_multiplier is not None and terms.counts_privately:
        raise ValueError(
            "noise_multiplier: its ε depends on n, which is secret under add-remove; pass n_public too, or "
            "leave it out."
        )
    name = terms.n_public.run if isinstance(terms.n_public, PublicCount) else None
    holder = curator(adapter, data, account=terms.account, seed=terms.seed, key=terms.key, run=name or None)
    nominal = _made(method, NOMINAL)
    if terms.budget is not None and nominal.private:
        nominal.check_budget(terms.budget)
    x0 = holder.initial()
    if start is not None:
        if tuple(start.shape) != tuple(x0.shape) or not all_finite(start):
            raise DataError(f"start: must be {len(x0)} finite numbers, one per parameter.")
        x0 = copy(start)
    if first is not None:
        first(nominal, x0)
    declared = PublicCount(len(holder.records)) if terms.takes_n else terms.n_public
    size = holder.count(terms.budget, declared, nominal)
    if plan is None:
        chosen = _made(method, size.n)
        the_plan = make_plan(
            chosen, n=size, budget=terms.budget, noise_multiplier=terms.noise_multiplier, unit=holder.unit,
            records_public=terms.records_public,
        )  # fmt: skip
    else:
        chosen, the_plan = plan(size)
    _check_plan(the_plan, size, terms)
    if check is not None:
        check(chosen, the_plan, x0)
    saved_run = None
    if keeping is not None:
        saved_run = begin(
            keeping.folder, the_plan, holder, kind=keeping.kind, state=keeping.state(chosen, x0),
            settings=keeping.settings, notes=notes, every=keeping.every,
        )  # fmt: skip
    try:
        if saved_run is None:
            session = holder.open(the_plan, within=terms.within, note=terms.note, part=terms.part)
        else:
            session = saved_run.open(holder)
    except Exception:
        if saved_run is not None:
            saved_run.discard()
        raise
    return OpenRun(chosen, the_plan, session, x0, holder.account, notes, saved_run)


def counted(adapter: RecordAdapter, data: object, method: HasSchedule, terms: Terms) -> Terms:
    """Count the units, and return the terms with their number, for a front end that needs it to read the data.

    A private count is paid for here, under the name of the run that follows. That run must use the returned terms.
    """
    holder = CentralCurator(adapter, data, account=terms.account, seed=terms.seed)
    size = holder.count(terms.budget, terms.n_public, method)
    return replace(terms, n_public=size, account=holder.account)


def reopened(
    run: Run,
    adapter: RecordAdapter,
    data: object,
    method: Method,
    *,
    key: bytes | None = None,
    curator: type[CentralCurator] = CentralCurator,
) -> OpenRun[Method]:
    """Go on with a run that is kept in a folder: its plan, its account and its entry in the ledger."""
    holder = curator(adapter, data, account=run.account, run=run.name, key=key)
    session = run.open(holder)
    return OpenRun(method, run.plan, session, holder.initial(), run.account, run.header.notes, run)


def followed(
    plan: Plan,
    used: Mapping[str, int],
    adapter: RecordAdapter,
    data: object,
    method: Method,
    *,
    key: bytes | None,
    curator: type[CentralCurator],
) -> OpenRun[Method]:
    """Open the session of a worker process. Another process pays for the kept run and adds the noise."""
    if curator is CentralCurator:
        raise ValueError("curator: must be a class whose sessions let another process release.")
    holder = curator(adapter, data, account=Account(), key=key)
    session = holder.open(plan, used=used)
    return OpenRun(method, plan, session, holder.initial(), holder.account)


def _made(method: Method | Callable[[int], Method], n: int) -> Method:
    """The method for ``n`` units: as it is, or made by the function that was given."""
    return method(n) if callable(method) else method


def _check_plan(plan: Plan, size: PublicCount, terms: Terms) -> None:
    """Refuse a plan that is not the one that the terms ask for."""
    counted = size if size.counted else None
    if counted is not None and terms.budget is not None and not plan.proof.within(terms.budget):
        raise BudgetError(
            "n_public: was counted privately, so the run must stay within its budget, which this plan exceeds."
        )
    facts = (plan.budget, plan.n_public, plan.counted, plan.records_public)
    if facts != (terms.budget, size.n, counted, terms.records_public):
        raise ValueError("planned: is a plan for another budget or another number of records; plan again.")


def settle_failed_run(session: CentralSession, error: Exception) -> bool:
    """Close or cancel the ledger entry of a failed run if that is safe. Returns whether it did.

    If nothing was asked of the data, the whole entry is given back. A run that found nothing above its noise
    stopped because of its releases, so the whole plan stays charged. (A zCDP filter is charged what it counted,
    because its accounting allows any stopping rule.) After any other error the entry stays open and whole, because
    nothing is known about the stop.
    """
    if not any(session.used.values()) and not session.charge.parted:
        session.charge.cancel("refused before anything was released")
        return True
    if isinstance(error, TooNoisyError):
        session.close("refused after looking", data_dependent=True)
        return True
    return False
