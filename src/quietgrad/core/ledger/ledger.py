"""The ledger: what privacy each named account has spent, across runs and processes.

*Reserve → release → close.* The whole cost of a plan is durably written before its first number leaves;
closing gives back only what a stop that did not look at the data left unreleased; a run that crashed counts in
full. All entries of one account compose: an account is a group of people that the user names, so a renamed or
re-split copy of a table belongs to the same account. Caps bound an account's total and are entries themselves.

Where no ledger is named, the project's pays, so that every run has one. A project is the folder with a file
``quietgrad.toml`` (it may be empty) around the working folder. Without one it is all that this user does, and the
ledger is in the state folder (``$QUIETGRAD_STATE``, else ``~/.local/state/quietgrad``).
"""

from __future__ import annotations

import os
import stat
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation, check_condition, check_delta
from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import BudgetError, LedgerError, LedgerWarning, UnprovableError
from quietgrad.core.ledger.chain import Chain, ChainEntry, anchor, check_anchor
from quietgrad.core.ledger.fingerprints import fingerprint, salted, sealed, state_folder
from quietgrad.core.ledger.state import (
    LedgerState,
    Reservation,
    ReservationState,
    canonical_account_name,
    check_account_name,
    compose_events,
    is_unnamed,
    may_give_back,
)

if TYPE_CHECKING:
    from quietgrad.core.accounting.accounting import ProvedGuarantee

__all__ = ["Ledger", "Reservation", "VerifyReport", "fingerprint"]


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of :meth:`Ledger.verify`. A torn tail is a crash's trace, not a fault: it paid for nothing."""

    ok: bool
    entries: int
    problems: tuple[str, ...]
    torn_tail: bool
    accounts: tuple[str, ...]


class Ledger:
    """An append-only, hash-chained file of reservations, safe for many processes.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> ledger = Ledger(folder.name + "/ledger.jsonl")
    >>> step = events.poisson_gaussian(rate=0.01, noise_multiplier=1.1, steps=100)
    >>> paid = ledger.reserve("patients", step, delta=1e-5, relation="add-remove", run="run-1")
    >>> half = events.poisson_gaussian(rate=0.01, noise_multiplier=1.1, steps=50)
    >>> ledger.close(paid.id, spent_event=half, reason="stopped by the user", data_dependent=False) == half
    True
    >>> ledger.verify().ok
    True
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 120.0) -> None:
        self._chain = Chain(path, timeout=timeout)
        self.path, self._timeout = self._chain.path, timeout
        self._folded = LedgerState()

    def __reduce__(self) -> tuple[object, ...]:
        """A copy is another handle of the same file: scikit-learn clones estimators with what they were given."""
        return partial(type(self), timeout=self._timeout), (self.path,)

    def reserve(
        self,
        account: str,
        event: events.Event,
        *,
        delta: float,
        relation: str | Relation,
        run: str,
        cap: Budget | None = None,
        note: str = "",
        fingerprint: str | None = None,
        part: bool = False,
        unit: str | PrivacyUnit = "record",
        condition: str | None = None,
    ) -> Reservation:
        """Write the whole cost of ``event`` to the disk, before anything is released.

        A cap is the account's own in the ledger, the argument, or both. The account's entries and ``event`` are
        composed and proved under the cap's relation at the cap's δ. ``BudgetError`` is raised if the total exceeds
        it. A run without a name is called after its reservation. Spellings of one account (case, spaces around) are
        one account, kept as first spelled. ``fingerprint`` (see :func:`fingerprint`) only warns, with
        ``LedgerWarning``; the table of a ``part`` (a fold of a cross-validation) is expected to differ from others
        of its account. ``unit`` is the privacy unit of the guarantee. An account has one unit, and an entry of
        another is refused, because its cost to a person with k records is not known. ``condition`` is the clause
        under which the event's ε holds; the account's total holds under those of all.
        """
        cost = Cost(event, check_delta(delta), Relation.parse(relation), PrivacyUnit.parse(unit), condition)
        return self.reserve_cost(account, cost, run=run, cap=cap, note=note, fingerprint=fingerprint, part=part)

    def reserve_cost(
        self,
        account: str,
        cost: Cost,
        *,
        run: str,
        cap: Budget | None = None,
        note: str = "",
        fingerprint: str | None = None,
        part: bool = False,
    ) -> Reservation:
        """Write down ``cost`` as :meth:`reserve` does."""
        account = check_account_name(account)
        if not isinstance(run, str):
            raise ValueError(f"run={run!r}: must be the run's name, or '' for one that is never resumed.")
        new_id = os.urandom(8).hex()
        body: dict[str, Any] = {
            "id": new_id,
            "account": account,
            "run": run or new_id,
            **cost.to_json(),
            "cap": None if cap is None else cap.to_json(),
            "note": note,
            "fingerprint": None if fingerprint is None else salted(fingerprint),
            "table": None if fingerprint is None else sealed(fingerprint, new_id),
            "part": part,
        }
        with self._chain.writing() as writer:
            book = self._book(writer.entries)
            body["account"] = account = book.name(account)
            _check_charge(book, account, cost, cap)
            messages = book.table_warnings(account, fingerprint, part=part) if fingerprint else []
            for message in messages:  # before the append: where warnings are errors, nothing gets spent
                warnings.warn(f"{self.path.name}: {message}", LedgerWarning, stacklevel=2)
            writer.append("reserve", body)  # without the messages: others read it, and they name other accounts
        return Reservation.from_body(body)

    def check_cap(self, account: str, cost: Cost, *, cap: Budget | None = None) -> None:
        """Raise ``BudgetError`` if :meth:`reserve` would now refuse ``cost``.

        Nothing is written or reserved.
        """
        _check_charge(self.book(), check_account_name(account), cost, cap)

    def close(
        self,
        reservation_id: str,
        *,
        spent_event: events.Event | None = None,
        reason: str,
        data_dependent: bool = True,
    ) -> events.Event:
        """Close a reservation and return the event that the account is charged for it.

        ``spent_event`` is what was really released, a part of what was reserved. It replaces the reserved cost only
        if the stop did not depend on the data (``data_dependent=False``), or if the reservation is a zCDP filter.
        Otherwise the reserved cost stays. Closing again with the same outcome returns the entry and writes nothing.
        A run that crashed between its close and its result may therefore close once more. Another outcome is
        refused.
        """
        with self._chain.writing() as writer:
            held = self._held(writer.entries, reservation_id)
            reserved = held.reservation.event
            counts = reserved
            if spent_event is not None:
                if may_give_back(spent_event, reserved, data_dependent=data_dependent):
                    counts = spent_event
                elif not data_dependent:
                    raise ValueError(
                        f"spent_event={spent_event!r}: is not a part of the reserved {reserved!r}; "
                        "pass the released part of it, or None to be charged in full."
                    )
            if held.state == "closed":
                if counts == held.counts:
                    return counts
                raise LedgerError(
                    f"{self.path}: reservation {reservation_id!r} is already closed with another cost; a closed "
                    "entry does not change."
                )
            left = None if counts == reserved else counts.to_json()
            outcome = {"reason": reason, "data_dependent": data_dependent, "gives_back_all_but": left}
            # How long a run took may depend on the data (a search's number of rounds is secret): the line that
            # closes it has the time of the one that reserved it.
            writer.append("close", {"id": reservation_id, **outcome}, time=held.time)
        return counts

    def cancel(self, reservation_id: str, *, reason: str) -> None:
        """Give a whole reservation back.

        This is right only if nothing at all was released under it.
        """
        with self._chain.writing() as writer:
            held = self._held(writer.entries, reservation_id)
            if held.state == "closed":
                raise LedgerError(f"{self.path}: reservation {reservation_id!r} is already closed, so it counts.")
            writer.append("cancel", {"id": reservation_id, "reason": reason}, time=held.time)

    def set_condition(self, reservation_id: str, condition: str) -> Reservation:
        """State from now on that a reservation's ε holds under ``condition``.

        A reservation has one condition at most. It may be open or closed, because a run may learn of its condition
        only at the end.
        """
        with self._chain.writing() as writer:
            reservation = self._held(writer.entries, reservation_id).reservation
            if reservation.condition is None:
                writer.append("condition", {"id": reservation_id, "condition": check_condition(condition)})
            elif reservation.condition != condition:
                raise LedgerError(f"{self.path}: reservation {reservation_id!r} has another condition already.")
        return reservation.under(condition)

    def resume(self, run: str) -> int:
        """Record that ``run`` is opened again, and return how often it was by now.

        The run has an entry in this ledger.

        What a run keeps of itself carries this number, so that an older copy of it contradicts the ledger.
        """
        with self._chain.writing() as writer:
            number = self._book(writer.entries).openings.get(run, 0) + 1
            if number == 1:
                raise LedgerError(f"{self.path}: holds no entry of run {run!r} that could be opened again.")
            writer.append("resume", {"run": run, "opening": number})
        return number

    def certify(self, run: str, digest: str, *, last: bool = False) -> None:
        """Record the digest of a certificate of ``run``, once.

        From then on the head of the ledger covers it. With ``last`` the newest line must hold it, for a certificate
        that leaves out the lines behind.
        """
        body = {"run": run, "digest": digest}
        with self._chain.writing() as writer:
            lines = writer.entries[-1:] if last else writer.entries
            if not any(entry.kind == "certificate" and entry.body == body for entry in lines):
                writer.append("certificate", body)

    def openings(self, run: str) -> int:
        """How often ``run`` was opened.

        0 without an entry, 1 from its reservation on, and one more by each resume.
        """
        return self.book().openings.get(run, 0)

    @property
    def id(self) -> str:
        """The ledger's identifier, the same wherever its file is moved.

        A file that does not exist yet is created.
        """
        entries = self.entries()
        if not entries:
            with self._chain.writing() as writer:  # makes the first line
                entries = writer.entries
        return str(entries[0].body["id"])

    def set_cap(self, account: str, budget: Budget) -> None:
        """Bound the account's total from now on.

        The newest cap counts, and the old ones stay on record.
        """
        account = check_account_name(account)
        with self._chain.writing() as writer:
            shown = self._book(writer.entries).name(account)
            writer.append(
                "cap", {"account": shown, "identity": canonical_account_name(account), **budget.to_json()}
            )

    def adopt(self, *, reason: str) -> None:
        """Accept a file whose head is missing or disagrees.

        It rests on the user's word that the end of the file is not cut.
        """
        if not self.path.exists():
            raise LedgerError(f"{self.path}: there is no ledger to adopt.")
        with self._chain.writing(adopt=True) as writer:
            self._book(writer.entries)
            writer.append("adopt", {"reason": reason})

    def spent(
        self, account: str, *, delta: float, relation: str | Relation, unit: PrivacyUnit | None = None
    ) -> ProvedGuarantee:
        """Prove what all entries of ``account`` together cost.

        Open entries count in full, closed ones as charged.

        ``unit`` asks for the entries about that privacy unit alone; without it all must be about one.
        Runs planned under replace-one have no cost under add-remove (``UnprovableError``): they publish n, and
        some of their bounds are about two records, not one.
        """
        book, asked = self.book(), Relation.parse(relation)
        if unit is None and len(book.units(account)) > 1:
            raise UnprovableError(
                f"account {account!r}: some of its runs are about a record each, others about a person each; their "
                "costs do not add up."
            )
        _check_relation(book.relations(account), asked)
        return _prove(book.counted(account, unit), check_delta(delta), asked)

    def cap(self, account: str) -> Budget | None:
        """The account's newest cap, if it has one."""
        return self.book().cap(account)

    def find(self, run: str) -> ReservationState | None:
        """Find the entry of ``run``.

        It is the newest open reservation, else the newest closed one, else ``None``.

        Check ``state`` before releasing anything under it, because a closed entry does not change.
        ``reservation.event`` is what was reserved, ``counts`` what is charged, ``fingerprint`` the table it was
        for.
        """
        return self.book().find(run)

    def head(self) -> str:
        """A short digest of the ledger to keep elsewhere.

        With it :meth:`verify` detects a ledger that was restored from a backup.
        """
        entries = self.entries()
        if not entries:
            raise LedgerError(f"{self.path}: nothing is written yet, so there is no head to keep.")
        return anchor(entries[-1])

    def entries(self) -> tuple[ChainEntry, ...]:
        """All lines, oldest first; ``LedgerError`` if the file is cut or altered."""
        reading = self._chain.read()
        if reading.problems:
            raise LedgerError(f"{self.path}: {reading.problems[0]}")
        return reading.entries

    def book(self) -> LedgerState:
        """The reservations, caps and charges that the entries add up to."""
        return LedgerState().fold(self.entries(), self.path)  # not the writers', which a thread may be changing

    def verify(self, head: str | None = None) -> VerifyReport:
        """Check every line, the chain, the head and what the entries say.

        Problems are returned, never raised.

        With ``head``, an earlier :meth:`head`, also that this ledger is that one or a continuation of it.
        """
        reading = self._chain.read()
        problems = list(reading.problems)
        if head is not None and (problem := check_anchor(reading.entries, head)):
            problems.append(problem)
        book = LedgerState()
        if not problems:
            try:
                book.fold(reading.entries)
            except LedgerError as error:
                problems.append(str(error))
        torn, accounts = bool(reading.torn), book.accounts()
        return VerifyReport(not problems, len(reading.entries), tuple(problems), torn, accounts)

    def _book(self, entries: Sequence[ChainEntry]) -> LedgerState:
        """For writers: fold what is new since the last call, or everything if the past is not the same."""
        last = self._folded.last
        if last is None or len(entries) < last.seq or entries[last.seq - 1].hash != last.hash:
            self._folded = LedgerState()
        return self._folded.fold(entries, self.path)

    def _held(self, entries: Sequence[ChainEntry], reservation_id: str) -> ReservationState:
        """The reservation of that id, open or closed."""
        book = self._book(entries)
        held = book.held.get(reservation_id)
        if held is not None and held.state == "closed":
            return held
        try:
            return book.open(reservation_id)
        except ValueError as error:
            raise LedgerError(f"{self.path}: {error}") from None


def _check_relation(planned: set[Relation], asked: Relation) -> None:
    if asked is Relation.ADD_REMOVE and Relation.REPLACE_ONE in planned:
        raise UnprovableError(
            "a run was planned under replace-one, which proves nothing under add-remove; ask under replace-one."
        )


def _prove(parts: Sequence[events.Event], delta: float, relation: Relation) -> ProvedGuarantee:
    from quietgrad.core.accounting.accounting import ProvedGuarantee, prove

    event = compose_events(parts)
    if event is None:
        return ProvedGuarantee(epsilon=0.0, delta=delta, relation=relation, accountant="none")
    return prove(event, delta=delta, relation=relation)


def _check_charge(book: LedgerState, account: str, cost: Cost, cap: Budget | None) -> None:
    """Raise ``BudgetError`` if the account counts another unit, or would exceed its own caps or the one given."""
    unit = cost.unit
    # A table that no account was named for may be read by record and by person: its totals are stated by unit, and
    # where a cap bounds one, the other is refused below.
    others = [counted for counted in book.units(account) if counted is not unit]
    if not is_unnamed(account) and others:
        other = others[0]
        raise BudgetError(
            f"account {account!r}: its entries are about a {other} each and this run about a {unit}, so they do "
            f"not add up. Nothing was reserved. Run it by {other} too, or name another account and state both "
            f"totals: what {account!r} spent still counts for the same people."
        )
    given = [] if cap is None else [(account, cap)]
    for capped, bound in dict.fromkeys([*book.bounds(account), *given]):
        counted, planned = book.counted(capped), book.relations(capped) | {cost.relation}
        whose = f"account {account!r}" + ("" if capped == account else f", as all runs of {capped!r} together")
        if {unit, *book.units(capped)} != {unit}:
            raise BudgetError(
                f"{whose}: it has a cap, and some runs under it are about a {unit} each, others about another "
                "unit. These do not add up. Name an account for each; nothing was reserved."
            )
        try:
            _check_relation(planned, bound.relation)
            together = _prove([*counted, cost.event], bound.delta, bound.relation).epsilon
            if together <= bound.epsilon:
                continue
            already = _prove(counted, bound.delta, bound.relation).epsilon
            asked = _prove([cost.event], bound.delta, bound.relation).epsilon
        except UnprovableError as error:
            raise BudgetError(
                f"{whose}: its cap is stated under {bound.relation}, and its releases have no proof "
                f"under that relation: {error} Nothing was charged. Set a cap that every run can be compared with: "
                "`quietgrad ledger cap FILE ACCOUNT --epsilon E --delta D --relation replace-one`, or plan under "
                f"{bound.relation}: {{relation}}.",
                relation=str(bound.relation),
            ) from None
        raise BudgetError(
            f"{whose}: this run would exceed the cap. "
            f"Cap: ε={bound.epsilon:.4g} (δ={bound.delta:g}, {bound.relation}). Spent: ε={already:.4g}. "
            f"This run: ε={asked:.4g}. Together: ε={together:.4g}. Nothing was charged or released. "
            "Lower epsilon, or raise the cap with `quietgrad ledger cap`."
        )


_open: dict[tuple[int, Path], Ledger] = {}  # kept open: what was read and checked once is not read again
_lock = threading.Lock()


def project_path() -> Path:
    """Where the project's ledger is, or will be; ``OSError`` if that cannot be told.

    A working folder that was removed, or one around it that may not be looked at, may belong to a project: then
    the user's own ledger is not known to be the one that pays.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        try:
            mode = os.stat(folder / "quietgrad.toml").st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_ISREG(mode):
            return folder / "ledger.jsonl"
    return state_folder() / "ledger.jsonl"


def project_ledger() -> Ledger:
    """The project's ledger; its folder is made, the file with the first entry."""
    path = project_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock:
        place = (os.getpid(), path)
        if place not in _open:
            _open[place] = Ledger(path)
        return _open[place]


def project_ledger_exists() -> bool:
    """Whether the project has a ledger: its file, a link to it, or the head that a lost file left.

    A place that may not be looked at, or cannot be told, counts as one with a ledger.
    """
    try:
        path = project_path()
    except OSError:
        return True
    except RuntimeError:  # no home: there is no state folder that could hold one
        return False
    for file in (path, Path(f"{os.path.realpath(path)}.head")):
        try:
            os.lstat(file)
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return True
    return False
