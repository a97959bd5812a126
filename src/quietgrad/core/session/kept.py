"""A run is a folder: one way to begin it, one way to open it again, sealed whole, paid by its own ledger.

While a run lasts, its folder holds ``checkpoint.safetensors``: the *header* (what the run is: its plan, the ledger,
account and cap that pay, what its front end settled) and where the run stands, under one seal. The key of the seal
and of all noise, and the transcript of what was released, are kept apart, in the state folder. When the run is over
the result is saved, and the key, the transcript and the checkpoint are destroyed.

Nothing that a folder says is believed without its seal, and nothing is asked of the caller that the folder says.
The plan of the header is the plan that goes on, so its events are those that are charged. Each opening is a line in
the ledger, and the transcript carries its number: a copy that was rolled back contradicts the ledger, and whatever
it may have forgotten is charged as new.

A front end with a loop of its own uses five calls::

    # a new run: opening() keeps it and reserves the plan's whole cost
    active = opening(adapter, data, method, terms, keeping=Keeping(folder, "loop", state, settings))
    run = active.kept

    run.save({"model": ..., "step": ...}, active.session)   # whenever it likes; at most every `every` seconds
    run.finish(result)                                       # saves the result, destroys key and transcript
    run.close()                                              # or: let go, so that another process may go on

    # another process
    run = open_run(folder, kind="loop")          # or DataError, LedgerError, KeyFileError: nothing was released
    active = reopened(run, adapter, data, method)   # a line in the ledger; replays are free, other sums are charged
    state = run.state                            # what the last save was given

``session.draw``/``release_drawn`` serve a loop that reads its records itself. A state may hold dictionaries, lists,
arrays, tensors and plain values. What the user loads from elsewhere (a ``state_dict``) is model, never spending:
what was spent follows from the header's plan, the transcript and the ledger.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.files import is_path_name
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session import checkpoint
from quietgrad.core.session.base import Session
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.transcript import Transcript

__all__ = ["FILE", "Header", "Run", "begin", "clear", "forget", "is_kept", "read_run", "open_run"]

FILE = "checkpoint.safetensors"


class Savable(Protocol):
    """A result that can be saved in the folder of its run."""

    def save(self, folder: str | Path) -> Path:
        """Write it into ``folder``."""
        ...


_Saved = TypeVar("_Saved", bound=Savable)


@dataclass(frozen=True)
class Header:
    """The header of a run: all that was settled before its first release. Every checkpoint has it, unchanged.

    Args:
        kind: of the front end, which alone may go on with it: "table", "loop", …
        plan: what may be released and what it costs.
        ledger: path of the ledger that is charged; ``None`` for a run without noise.
        ledger_id: the identity of that ledger, which a copy at another path shares.
        account: the name under which lines stand in the ledger.
        asked: the account name that the user gave.
        cap: a budget that the account as a whole must not exceed.
        settings: what else the front end settled, as JSON values.
        notes: what the statement will say besides.
    """

    kind: str
    plan: Plan
    ledger: str | None
    ledger_id: str | None
    account: str
    asked: str
    by_default: bool
    cap: Budget | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {**vars(self), "plan": self.plan.to_json(), "notes": list(self.notes)}
        return {**values, "cap": None if self.cap is None else self.cap.to_json(), "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Header:
        """Rebuild it from :meth:`to_json`."""
        cap = None if data["cap"] is None else Budget.from_json(data["cap"])
        fields = {**data, "plan": Plan.from_json(data["plan"]), "cap": cap, "notes": tuple(data["notes"])}
        return cls(**fields)


class Run:
    """A run that is kept in a folder; made by :func:`begin` and :func:`open_run`, held by one process at a time."""

    def __init__(
        self,
        folder: Path,
        name: str,
        key: bytes,
        header: Header,
        account: Account,
        transcript: Transcript,
        stands: Mapping[str, Any],
        every: float,
    ) -> None:
        self.folder, self.name, self.header, self.account, self.every = folder, name, header, account, every
        self.history: list[dict[str, float]] = list(stands["history"])
        """Public numbers of the run so far, which the result will hold."""
        self.seconds: float = stands["seconds"]
        """How long earlier processes ran."""
        self.state: Any = stands["state"]
        """What the last save was given."""
        self._used: dict[str, int] = dict(stands["used"])
        self._rho_left: float | None = stands["rho_left"]
        self._key, self._transcript = key, transcript
        self._started = self._last = time.monotonic()

    @property
    def plan(self) -> Plan:
        """The plan: everything that may be released."""
        return self.header.plan

    @property
    def resumed(self) -> bool:
        """Whether an earlier process began it."""
        return self._transcript.resumed

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last >= self.every

    def open(self, curator: CentralCurator) -> CentralSession:
        """The session, for a curator that was made with this run's account and name.

        The plan's whole cost is in the ledger when this returns: as a new entry, or as the one that the run made
        before. What does not agree with the ledger or the transcript is charged as new once it is asked for.
        """
        if curator.run != self.name or curator.account != self.account:
            raise ValueError("curator: must be made with account=run.account and run=run.name.")
        note = str(self.header.settings.get("note", ""))
        return curator.open(
            self.plan, transcript=self._transcript, used=self._used, rho_left=self._rho_left, note=note
        )

    def save(self, state: object, session: Session, *, now: bool = False) -> None:
        """Write a checkpoint if one is due, or ``now``."""
        if now or self.due:
            rho = session.rho_left if session.plan.schedule.composition == "filter" else None
            self._write(state, session.used, rho)
            self._last = time.monotonic()

    def _write(self, state: object, used: Mapping[str, int], rho_left: float | None) -> None:
        self._transcript.sync()
        stands = {
            "state": state,
            "used": dict(used),
            "rho_left": rho_left,
            "released": self._transcript.length,
            "history": self.history,
            "seconds": time.monotonic() - self._started + self.seconds,
        }
        content = {"header": json.dumps(self.header.to_json()), "stands": stands}
        checkpoint.save(self.folder / FILE, self.name, content, self._key)

    def agree(self, what: str, given: object, folder_value: object) -> None:
        """Raise ``DataError`` if ``given``, which may be ``None``, is not what the folder says."""
        if given is not None and json.loads(json.dumps(given)) != json.loads(json.dumps(folder_value)):
            text = json.dumps(folder_value)
            raise DataError(
                f"{self.folder}: the run that is kept here was started with another {what}: leave it out, or go on "
                f"with that ({text if len(text) <= 200 else text[:200] + '…'})."
            )

    def agree_on_account(self, account: str | None, cap: Budget | None) -> None:
        """Raise ``DataError`` if what is given beside the folder says that another account pays."""
        self.agree("account", account, self.header.asked)
        self.agree("cap", None if cap is None else cap.to_json(), self.header.cap and self.header.cap.to_json())

    def finish(self, result: _Saved) -> _Saved:
        """The run is closed: once its result is safe, its key must not outlive it."""
        result.save(self.folder)
        self.discard()
        return result

    def discard(self) -> None:
        """Leave neither key nor transcript nor checkpoint: the run is over, or never began. The key goes first."""
        self.close()
        clear(self.folder, self.name)

    def close(self) -> None:
        """Let go, so that another process may go on with the run."""
        self._transcript.close()


def begin(
    folder: str | Path,
    plan: Plan,
    curator: CentralCurator,
    *,
    kind: str,
    state: object,
    settings: Mapping[str, object] | None = None,
    notes: tuple[str, ...] = (),
    every: float = 10.0,
) -> Run | None:
    """Keep a new run of ``plan`` in ``folder``, so that it can be opened again from its first release on.

    Nothing is reserved yet: that is :meth:`Run.open`'s. ``None`` for a run that cannot be resumed and is not kept:
    a seeded one, which is not private, and a private one that no ledger pays for.

    Args:
        curator: who holds the data, made with the account that pays.
        kind: of the front end.
        state: where the run stands before its first step.
        settings: what else is settled, as JSON values; ``Run.header.settings`` has it.
        notes: what the statement will say besides.
        every: seconds between checkpoints.
    """
    path = Path(folder)
    if is_kept(path):
        raise DataError(f"{path}: an interrupted run is kept here; resume it, or choose another folder.")
    account = curator.settle() if plan.is_private else curator.account
    ledger = account.open() if plan.is_private else None
    if curator.seeded or (plan.is_private and ledger is None):
        return None
    path_and_id = (None, None) if ledger is None else (str(ledger.path), ledger.id)
    settled = json.loads(json.dumps(dict(settings or {})))
    header = Header(
        kind, plan, path_and_id[0], path_and_id[1], account.name, str(account), account.by_default, account.cap,
        settled, notes,
    )  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    key = KeyFile.create(name := curator.run, path)
    try:
        transcript = Transcript(_transcript(name), name, key)
        stands = {"state": state, "used": {}, "rho_left": None, "history": [], "seconds": 0.0}
        run = Run(path, name, key, header, account, transcript, stands, every)
        run._write(state, {}, None)  # before the reservation, so that a crash after it finds something to resume
    except BaseException:
        KeyFile.destroy(name)
        raise
    return run


def is_kept(folder: str | Path) -> bool:
    """Whether a run that is not over is kept in ``folder``."""
    return (Path(folder) / FILE).exists()


def forget(folder: str | Path) -> bool:
    """Give up the run that is kept in ``folder``, if there is one: what it cost stays charged, its key goes.

    ``False`` if what is there cannot be read, so that a key may be left (``quietgrad keys``).
    """
    path = Path(folder)
    name = checkpoint.run_named_in(path / FILE) if is_kept(path) else ""
    if name and is_path_name(name):
        clear(path, name)
    (path / FILE).unlink(missing_ok=True)
    return name is not None


def clear(folder: Path, name: str) -> None:
    """Remove what is kept of a run: its key first, then its checkpoint and transcript."""
    KeyFile.destroy(name)
    for file in (folder / FILE, _transcript(name)):
        file.unlink(missing_ok=True)


def open_run(
    folder: str | Path, *, kind: str, ledger: Ledger | str | Path | None = None, every: float = 10.0
) -> Run:
    """Open the run that is kept in ``folder``: the only way to go on with one.

    Args:
        kind: of the front end that goes on; a run of another is refused.
        ledger: where the run's ledger is by now, if it was moved; it must be the same one.
        every: seconds between checkpoints.

    Raises:
        DataError: there is no such run, it was altered, or another process holds it.
        LedgerError: the ledger that pays is not there, is another, or was altered.
        KeyFileError: the run's key is gone, so that it was closed, or started elsewhere.
    """
    path = Path(folder)
    name, key, header, stands = _sealed(path)
    if header.kind != kind:
        raise DataError(
            f"{path}: this folder holds an unfinished {header.kind} run; this call resumes only {kind} runs. "
            "Use the call that started it, or another folder."
        )
    account = Account(header.account)
    if header.ledger is not None:
        book = ledger if isinstance(ledger, Ledger) else Ledger(ledger or header.ledger)
        if not book.path.exists():
            raise BudgetError(
                f"{path}: the ledger that this run is charged to, {book.path}, does not exist, and the run "
                "cannot continue without it. Restore it, or pass where it is now: ledger=PATH."
            )
        if book.id != header.ledger_id:
            raise BudgetError(
                f"{path}: {book.path} is not the ledger that this run is charged to (it has another id). Pass that "
                "one: ledger=PATH."
            )
        account = Account(header.account, book, header.cap, header.by_default, asked=header.asked)
    transcript = Transcript(_transcript(name), name, key, resumed=True, least=int(stands["released"]))
    return Run(path, name, key, header, account, transcript, stands, every)


def read_run(folder: str | Path) -> tuple[Header, Any]:
    """Read a run's header and its last saved state, for a caller that needs them before opening."""
    _, _, header, stands = _sealed(Path(folder))
    return header, stands["state"]


def _sealed(folder: Path) -> tuple[str, bytes, Header, dict[str, Any]]:
    """The name, the key, the header and where it stands; a file whose seal does not fit is not read."""
    name, content = checkpoint.load(folder / FILE, KeyFile.load)
    return name, KeyFile.load(name), Header.from_json(json.loads(content["header"])), content["stands"]


def _transcript(name: str) -> Path:
    return KeyFile.directory() / f"{name}.transcript"
