"""One approval is one run: the journal of what a party answered, and what it pays for it.

The first run that a coordinator opens uses the approval up, durably; no other run is answered under it, and a
party that restarts continues where it was. Every line is on the disk before the answer leaves. Lines are sealed,
and the party's ledger counts openings too, so a journal that was copied, restored or edited is not believed. The
key of the seals and samples lies beside it until the run is over; keys of noise are kept nowhere.

The plan's whole cost is in the ledger before the first answer and stays there, because the coordinator decides
when a run stops after it has seen releases. Only a run in which nothing was asked gives budget back.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

from quietgrad.core.accounting.cost import Cost
from quietgrad.core.errors import BudgetError, DataError, LedgerError
from quietgrad.core.files import AS_IS, NO_LINK, NO_WAIT, POSIX, parse_json, read_bytes, write_atomically
from quietgrad.core.ledger.account import EPOCH, Account, Charge
from quietgrad.core.ledger.log import LockedAppendFile, SealedLog
from quietgrad.core.noise.rng import KEY_BYTES, fresh_key
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.wire import Message, WireError, decode, encode

_DAMAGED = "is damaged, so what was answered is unknown; choose another folder, and pay for a new run."
_REPLY = struct.Struct("<32sqQ")


class Journal:
    """The run that an approval was used for, and the rounds answered in it; in memory, or also in ``folder``.

    One process at a time may hold it. A journal of a plan with another digest is refused.
    """

    def __init__(self, folder: Path | None, name: str, digest: str) -> None:
        self._folder, self._name, self._digest = folder, name, digest
        self.run: str | None = None
        """The run that this approval was used for."""
        self.entry = os.urandom(16).hex()
        """Its name in the party's ledger, which no other member chose."""
        self.key = fresh_key()
        """Of its samples."""
        self.ended = False
        self.resumed = False
        """Whether an earlier process of this party made it."""
        self.last_round = -1
        self._places = ""  # a MAC of the records in their order
        self._draws: dict[str, int] = {}
        self._drawn: dict[str, int] = {}
        self._file = None if folder is None else self._opened(folder / f"{name}.journal")

    def draws(self, slot: str) -> int:
        return self._draws.get(slot, 0)

    def bind(self, run: str) -> None:
        """Use the approval for ``run``, and for no other from now on."""
        self._write({"run": run})
        self.run = run

    def reopen(self, openings: int) -> bool:
        """Go on after so many openings in the ledger. Return whether it and the file agree that nothing is missing.

        Where they do not, rounds may have been answered that are not here.
        """
        if not isinstance(self._file, SealedLog):
            return True
        nothing_paid = openings == 0 and self.last_round < 0  # killed before the first reservation
        agreed = self._file.untouched and (nothing_paid or self._file.agrees(openings))
        self._file.reopen(openings)
        return agreed

    def record(self, t: int, slot: str, draw: int, *, drawn: bool = False) -> None:
        """Keep that a round was answered, and whether the coordinator had drawn this party for it."""
        self._write({"round": t, "slot": slot, "draw": draw, **({"drawn": True} if drawn else {})})
        self.last_round, self._draws[slot] = t, draw + 1
        self._drawn[slot] = self._drawn.get(slot, 0) + drawn

    def times_drawn(self, slot: str) -> int:
        """In how many rounds of a slot this party took part because the coordinator had drawn it."""
        return self._drawn.get(slot, 0)

    def keep_places(self, contents: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Keep the places of records that take part once, or in turn: a restarted party must hold them alike.

        In another order a used record would have the place of an unused one: ``DataError``.
        """
        if self._file is None or self.run is None or self.ended:
            return
        mac = hashlib.blake2b(key=self.key, digest_size=16, person=b"records")
        for part in contents():
            mac.update(part)
        if hmac.compare_digest(self._places, mac.hexdigest()):
            return
        if self.last_round >= 0:
            raise DataError(
                f"{self._name}: the records, or their order, differ from those at the start of this run. "
                "Continue with the same table; otherwise a record would be used twice."
            )
        self._places = mac.hexdigest()
        self._write({"places": self._places})

    def end(self) -> None:
        """End a run that is closed and paid for. Nothing more is answered in it."""
        if not self.ended:
            self._write({"ended": self.run})
            self.ended = True
            if self._file is not None:
                _destroy(_key_file(self._file.path))

    def unbind(self) -> None:
        """Free the approval from a run in which nothing was asked."""
        if self.last_round >= 0:
            raise LedgerError(f"{self._name}: rounds were answered, so the approval is used.")
        self.discard()
        Journal.__init__(self, self._folder, self._name, self._digest)

    def discard(self) -> None:
        """Remove the journal of a run whose results are safe. Nothing more is answered in the run."""
        self.ended = True
        if self._file is not None:
            _destroy(_key_file(self._file.path))
            self._file.remove()

    def close(self) -> None:
        """Let go of the folder; one that no run was opened in is left as it was found."""
        if self._file is not None:
            if self.run is None:
                self.discard()
            self._file.close()

    def _write(self, line: dict[str, object]) -> None:
        if isinstance(self._file, SealedLog):
            self._file.add(json.dumps(line))

    def _opened(self, path: Path) -> LockedAppendFile:
        who, secret = f"answers for {self._name}", _key_file(path)
        held = LockedAppendFile(path, who)
        new = not held.content()
        try:
            if new:
                write_atomically(secret, self.key, private=True)
            elif not os.path.lexists(secret):  # it is over, and what else it says cannot be checked
                lines = held.content().decode(errors="replace").split("\n")
                self._read(path, [line.rsplit(" ", 2)[0] for line in lines])
                if self.run is None:
                    raise LedgerError(f"{path}: {_DAMAGED}")
                self.ended = True
                return held
            self.key = read_bytes(secret, most=KEY_BYTES, follow=False)
        except BaseException:
            held.close()
            raise
        held.close()
        file = SealedLog(path, who, self.key, self._name)
        try:
            if new:
                file.add(json.dumps({"plan": self._digest, "entry": self.entry}))
                file.reopen(0)
            self._read(path, file.lines())
        except BaseException:
            file.close()
            raise
        if self.ended:
            _destroy(secret)  # killed between the two
        self.resumed = not new
        return file

    def _read(self, path: Path, lines: list[str]) -> None:
        other = False
        try:
            for line in (parse_json(text) for text in lines if text.startswith("{")):
                if "entry" in line:
                    self.entry, other = str(line["entry"]), line["plan"] != self._digest
                elif "run" in line:
                    self.run = str(line["run"])
                elif "ended" in line:
                    self.ended = True
                elif "places" in line:
                    self._places = str(line["places"])
                else:
                    slot = str(line["slot"])
                    self.last_round, self._draws[slot] = int(line["round"]), int(line["draw"]) + 1
                    self._drawn[slot] = self._drawn.get(slot, 0) + bool(line.get("drawn"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LedgerError(f"{path}: {_DAMAGED}") from None
        if other:
            raise DataError(f"{path}: has a run of another plan; continue that, or choose another folder.")


class LastReply:
    """The last sum that was given, so that the same question gets the same answer again.

    Lost connections and restarts then cost no release. It is written before the answer leaves, and not
    synchronised: after a power cut it may be torn, and its round is lost. Plain sums only: a secure sum has keys,
    which are kept nowhere.
    """

    def __init__(self, path: Path | None, name: str) -> None:
        self._path, self._who = path, f"answers for {name}"
        self._file: LockedAppendFile | None = None  # made with the first reply of this process
        self._record = b""
        if path is not None and os.path.lexists(path):
            self._record = read_bytes(path, follow=False)

    def to(self, question: bytes, last_round: int) -> Message | None:
        """The reply to a question that was the last to be answered."""
        try:
            asked, t, length = _REPLY.unpack_from(self._record)
            same = t == last_round and asked == question
            return decode(self._record[_REPLY.size : _REPLY.size + length]) if same else None
        except (struct.error, WireError):  # none, or torn by a crash
            return None

    def keep(self, question: bytes, t: int, reply: Message) -> None:
        """Replace what is kept. The reply before is of a round that the coordinator has left behind."""
        content = bytes(encode(reply))
        self._record = _REPLY.pack(question, t, len(content)) + content
        if self._path is not None:
            if self._file is None:
                self._path.unlink(missing_ok=True)  # a file of an earlier process, or a link: never written through
                self._file = LockedAppendFile(self._path, self._who)
            self._file.cut(0, durable=False)
            self._file.append(self._record, durable=False)

    def forget(self) -> None:
        """Remove what is kept: the run is over."""
        self._record = b""
        self.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the file, for another process of this party."""
        if self._file is not None:
            self._file.close()
            self._file = None


def forget(folder: Path, name: str) -> None:
    """Remove a party's journal, where calling for a run approves it, as in a simulation."""
    (folder / f"{name}.reply").unlink(missing_ok=True)
    path = folder / f"{name}.journal"
    if path.exists():
        _destroy(_key_file(path))
        LockedAppendFile(path, f"answers for {name}").remove()


def _key_file(journal: Path) -> Path:
    return journal.with_name(journal.name + ".key")


def _destroy(secret: Path) -> None:
    """Overwrite and remove a key, so that the sampled records stay secret. Of a link, only the link is removed."""
    if not os.path.lexists(secret):
        return
    try:
        descriptor = os.open(secret, os.O_WRONLY | NO_LINK | NO_WAIT | AS_IS)
    except OSError:  # no plain file, so nothing that was written here
        secret.unlink(missing_ok=True)
        return
    with os.fdopen(descriptor, "wb") as file:
        if POSIX:
            secret.unlink()  # first: a crash in between must not leave another key
        file_status, names = os.fstat(file.fileno()), 0 if POSIX else 1
        if stat.S_ISREG(file_status.st_mode) and file_status.st_nlink == names:  # else it is another file too
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    if not POSIX:
        secret.unlink()  # an open file cannot be removed there


class Approval:
    """A party's word that one run of a plan may use its records; ``place`` is the party's number in the plan.

    ``contents`` are those of the records, for the ledger's fingerprint.
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
        self._account = account if plan.budget is None else account.settled(contents)
        self.journal = journal
        self._charges: list[Charge] = []  # one, and one more for each time the journal was not as it was left

    @property
    def account(self) -> str:
        """The account that pays, as its lines in the party's ledger have it."""
        return self._account.name

    @property
    def in_use(self) -> bool:
        return bool(self._charges) and not self.journal.ended

    @property
    def _cost(self) -> Cost | None:
        """The cost that the party's own ledger is charged: the plan as the party's records see it."""
        plan = self._plan
        event = None if plan.budget is None else plan.party_event(self._place, None)
        return None if plan.budget is None or event is None else Cost.of(event, plan.budget, plan.unit)

    def check_cap(self) -> None:
        """Raise ``BudgetError`` if a new run would exceed the account's cap; writes nothing.

        A run that was interrupted and may be continued is paid for already.
        """
        cost = self._cost
        if cost is not None and self.journal.run is None:
            self._account.check(cost)

    def use(self, run: str) -> bool:
        """Pay for ``run``, or find that it was paid; ``False`` if it is over, ``BudgetError`` if it is another."""
        if self.journal.run is None:
            self.journal.bind(run)
        if self.journal.run != run:
            raise BudgetError(
                "one run was approved here, and this is another; it needs a new approval: a new `party` command "
                "with another --out. Nothing was given."
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
                charge.close(None, reason=reason, data_dependent=True)
        self.journal.end()

    def withdraw(self) -> bool:
        """Withdraw the approval and refund its charge if no round was asked under it; return whether that is so."""
        if self.journal.last_round >= 0 or len(self._charges) > 1:
            return False
        if self.journal.run is not None:
            if not self.journal.ended:
                charges = self._charges or [self._reopened(self.journal.entry) or Charge(None)]
                charges[0].cancel("the run ended before anything was asked")
            self.journal.unbind()
            self._charges = []
        return True

    def _pay(self) -> None:
        # The entry has a name of our own, so that no coordinator can point to what paid for something else.
        entry, agreed = self.journal.entry, True
        try:
            if self.journal.resumed and self._cost is not None:
                agreed = self.journal.reopen(self._account.openings(entry))
                self._account.resume(entry)
            charges = [self._reopened(entry) or self._reserve(entry)]
            later = (self._reopened(f"{entry}{EPOCH}{nonce}") for nonce in self._account.epochs(entry))
            charges += [charge for charge in later if charge is not None]
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
        note = f"{self._plan.algorithm}, party {self._plan.names[self._place]}"
        contents = None if self._account.ledger is None else self._contents()
        return self._account.reserve(self._cost, run=run, note=note, contents=contents)

    def _reopened(self, run: str) -> Charge | None:
        return self._account.reopen(self._cost, run=run)
