"""The private transcript of a run: a MAC of every sum before its noise, so that replay is by content.

An interrupted run continues from its last checkpoint and asks again for what it had released after it. The same
noise on the same sum tells nothing new; the same noise on any other sum lets anyone subtract the two. So each
release first leaves a MAC of everything that determines it but the noise (slot, number, multiplier, bound, and the
sum itself) here. Asked again, a release whose MAC agrees is a replay and free; one whose MAC differs begins a new
*epoch*: fresh samples, fresh noise, and a new charge. Which of the two happened is private, so nothing
is raised.

Lines are written before a release leaves, and survive a killed process. After a power cut the last ones may be
missing, and a copy or a backup may be older than the run: the file, the run's ledger and its checkpoint each tell
(:class:`~quietgrad.core.session.transcript.SealedLog`). Where one of them does not agree, what is missing here is
not trusted to have never been released, until a new epoch has begun.

A :class:`LockedAppendFile` is held by one process at a time, and each line is on the disk before what it describes
happens. A run's transcript, a party's journal and a coordinator's aggregates are such files. A second process is
refused by name. A killed process releases the file.

What a run must not forget stands in a :class:`SealedLog`: its lines are chained under the run's key, so none can be
changed, moved or left out in the middle. Three things that a copy of the file does not bring along show that
lines are missing at the end: how often the ledger says that the run was opened, which file on which start of the
machine it is, and when the system last changed it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError, LedgerError
from quietgrad.core.files import os_error_text, sync_folder
from quietgrad.core.noise.rng import SecureStream
from quietgrad.core.vectors import Vector


class LockedAppendFile:
    """A locked, append-only file with mode 0600; made empty if it is not there.

    Args:
        path: the file; its folder is made.
        who: what another process would be, for the refusal.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> kept = LockedAppendFile(Path(folder.name) / "run", "coordinates this run")
    >>> kept.append(b"line")
    >>> try:
    ...     LockedAppendFile(kept.path, "coordinates this run")
    ... except DataError as refusal:
    ...     print(str(refusal).partition(": ")[2].partition(";")[0])
    another process coordinates this run in this folder
    >>> kept.close()
    >>> again = LockedAppendFile(kept.path, "coordinates this run")
    >>> again.content()
    b'line'
    >>> again.remove()
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, who: str) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._locked(path, who)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be kept here ({os_error_text(error)}); choose a folder of your own."
            ) from None
        self._free = weakref.finalize(self, os.close, self._file)
        sync_folder(path.parent)  # so that a new file's name survives a power cut

    @staticmethod
    def _locked(path: Path, who: str) -> int:
        while True:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its holder may have removed it since it was opened here: then this file has no name any more.
                if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                    return file
                os.close(file)
            except OSError as error:
                os.close(file)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise DataError(
                    f"{path.parent}: another process {who} in this folder; wait for it, or end it first."
                ) from None

    @property
    def identity(self) -> str:
        """Which file this is: a copy, or one restored from a backup, is another."""
        found = os.fstat(self._file)
        return f"{found.st_dev}:{found.st_ino}"

    def content(self) -> bytes:
        """Everything that was written."""
        return self.path.read_bytes()

    def append(self, data: bytes, *, durable: bool = True) -> None:
        """Write; durably, or so that at least no death of the process can lose it."""
        if not self._free.alive:  # the number of a closed file may be another file's by now
            raise DataError(f"{self.path}: was let go of; nothing more is kept in it.")
        before, done = os.fstat(self._file).st_size, 0
        try:
            while done < len(data):
                done += os.write(self._file, data[done:])
            if durable:
                os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                os.ftruncate(self._file, before)
            raise LedgerError(
                f"{self.path}: cannot be written ({os_error_text(error)}), and nothing was given; make room, "
                f"start again."
            ) from None

    def sync(self) -> None:
        """Bring everything that was written to the disk."""
        os.fsync(self._file)

    def cut(self, length: int) -> None:
        """Drop what follows the first ``length`` bytes: a crash tore it, before what it spoke of happened."""
        if self._free.alive:
            os.ftruncate(self._file, length)
            os.fsync(self._file)

    def remove(self) -> None:
        """It is over: remove the file and let go."""
        if self._free.alive:  # else it may be another process's by now
            self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._free()


class SealedLog(LockedAppendFile):
    """Lines that are chained under a key, with openings among them; one process at a time may hold it.

    An *opening* is a line that says how often the run was opened by then, which the run's ledger says too. It is
    written here first and there second, so after a crash between the two this file is one ahead, and nothing
    follows the opening.

    Args:
        path: the file.
        who: what another process would be, for the refusal.
        key: a secret of the run.
        run: its name.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> log = SealedLog(Path(folder.name) / "log", "runs this", bytes(32), "run")
    >>> log.reopen(0)
    1
    >>> log.add("a line")
    >>> log.close()
    >>> again = SealedLog(log.path, "runs this", bytes(32), "run")
    >>> again.lines(), again.untouched, again.agrees(1), again.agrees(2)
    (['a line'], True, True, False)
    >>> again.close()
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, who: str, key: bytes, run: str) -> None:
        super().__init__(path, who)
        self._seal_key = hmac.digest(key, f"sealed log of {run}".encode(), "sha256")
        self._last = b""  # the seal of the last line
        self._opening, self._since = 0, 0  # the last opening, and how many lines followed it
        self._lines: list[str] = []
        self.untouched = True
        """Whether this is the file that was written, and nothing touched it since."""
        self.same_start = True
        """Whether the machine was not started anew since: then nothing was lost by a power cut."""
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def lines(self) -> list[str]:
        """What was written before, openings left out."""
        return self._lines

    def agrees(self, openings: int) -> bool:
        """Whether a ledger that knows of so many openings is as old as this file."""
        return self._opening == openings or (self._opening == openings + 1 and not self._since)

    def reopen(self, openings: int) -> int:
        """Open the run again, after ``openings`` times by its ledger; return the number for the ledger."""
        self._opening, self._since = openings + 1, -1
        self.add(f"{_OPENING} {openings + 1} {_boot()}/{self.identity}")
        return openings + 1

    def add(self, text: str, *, durable: bool = True) -> None:
        """Write a line; no death of the process can lose it, and if ``durable`` no power cut."""
        for _ in range(_ATTEMPTS):
            now = time.time_ns()
            said = f"{text} {now}"
            seal = self._seal(said)
            self.append(f"{said} {seal.hex()}\n".encode(), durable=durable)
            self._last = seal
            self._since += 1
            if abs(self._changed() - now) <= _PROMPT:
                return
            # The process was held up between looking at the clock and writing.
            text, self._since = _LATE, self._since - 1

    def _seal(self, said: str) -> bytes:
        return hashlib.blake2b(self._last + said.encode(), key=self._seal_key, digest_size=8).digest()

    def _changed(self) -> int:
        """When the system last changed the file, in ns; only a change of the clock can set it."""
        return os.fstat(self._file).st_ctime_ns

    def _load(self) -> None:
        whole, newline, torn = self.content().rpartition(b"\n")
        place, written = "", 0
        for line in whole.decode(errors="replace").split("\n") if newline else ():
            said, _, seal = line.rpartition(" ")
            expected = self._seal(said)
            if not hmac.compare_digest(seal.encode(errors="replace"), expected.hex().encode()):
                raise LedgerError(
                    f"{self.path}: was altered, or is of another run, so it is unknown what was released. Start "
                    "a new run; it is charged in full."
                )
            self._last = expected
            text, _, at = said.rpartition(" ")
            written = int(at)
            if text.startswith(_OPENING):
                _, number, place = text.split(" ", 2)
                self._opening, self._since = int(number), 0
            elif text != _LATE:
                self._lines.append(text)
                self._since += 1
        if newline:
            boot, _, identity = place.partition("/")
            self.same_start = boot == _boot()
            self.untouched = not torn and identity == self.identity and abs(self._changed() - written) <= _NEAR
        if torn:  # by a crash, before what it speaks of happened
            self.cut(len(whole) + len(newline))


_OPENING, _LATE = "/opening", "/late"
_ATTEMPTS = 3
_PROMPT, _NEAR = 12_000_000, 25_000_000  # ns: a tick of the kernel's clock is at most 10 ms


def plan_key(key: bytes, plan: str) -> bytes:
    """The key of one plan's samples and noise in a run whose key is ``key``; ``plan`` is the plan's digest."""
    return SecureStream(key, f"plan/{plan}").bytes(0, len(key))


def _boot() -> str:
    """Which start of the machine this is; unknown ones never agree."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.urandom(16).hex()


_MAC_BYTES = 16


class Transcript(SealedLog):
    """MACs of the releases of one run, in a 0600 file that one process at a time may hold.

    The file belongs beside the run's key, not into its folder: a folder is copied, and two copies that are resumed
    must find one transcript.

    Args:
        path: the file.
        run: the run's name.
        key: the run's secret key.
        resumed: whether the run had begun before. Then a file that is missing hides what was released, and
            nothing is trusted to be new.
        least: how many releases it must hold, as the last checkpoint says.

    :meth:`reopen` takes how often the ledger knows the run to have been opened.

    >>> import tempfile
    >>> from quietgrad.core.noise.rng import seed_key
    >>> folder = tempfile.TemporaryDirectory()
    >>> log = Transcript(Path(folder.name) / "transcript", "run", seed_key(0))
    >>> mac = log.mac("gradient", 0, [1.5, 1.0], np.ones(3))
    >>> log.record("gradient", 0, mac)
    >>> log.close()
    >>> again = Transcript(Path(folder.name) / "transcript", "run", seed_key(0), resumed=True)
    >>> again.reopen(1)
    2
    >>> again.known("gradient", 0) == (0, mac), again.known("gradient", 1), again.complete
    (True, None, True)
    >>> again.close()
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, run: str, key: bytes, *, resumed: bool = False, least: int = 0) -> None:
        self.resumed = resumed
        self._run_key = self._key = key
        self._mac_key = SecureStream(key, "transcript").bytes(0, 32)
        self._nonces: list[str] = []  # of the epochs after the first
        self._intended = ""  # the nonce of an epoch that is being charged
        self._known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.length = 0
        """How many releases were written down, those of all epochs."""
        self.complete = True
        """Whether a release that is not here was certainly never made."""
        super().__init__(path, f"is running run {run}", key, run)
        try:
            if not self._last:  # nothing was ever written
                self.complete = not resumed
                if not resumed:
                    super().reopen(0)
            elif not resumed:  # to begin it anew under the same key would use its noise again
                raise LedgerError(f"{path}: run {run} has begun already; resume it, or start another.")
            for line in self.lines():
                first, _, rest = line.partition(" ")
                if first == _FORK:
                    self._nonces.append(rest)
                    self._intended, self.complete = "", True
                elif first == _INTEND:
                    self._intended = rest
                elif first == _TORN:
                    self.complete = False
                else:
                    mac, _, slot = rest.partition(" ")
                    self._known[slot, int(first)] = (self.epoch, bytes.fromhex(mac))
                    self.length += 1
            self.complete = self.complete and self.untouched and self.same_start and self.length >= least
        except BaseException:
            self.close()
            raise

    @property
    def epoch(self) -> int:
        """The newest epoch."""
        return len(self._nonces)

    @property
    def epochs(self) -> tuple[str, ...]:
        """The nonces of the epochs after the first."""
        return tuple(self._nonces)

    def bind(self, plan: str) -> None:
        """Derive the keys of samples, noise and MACs from the digest of a plan's releases.

        Two plans on one transcript draw independent noise, and what one released is no replay for the other.
        """
        self._key = plan_key(self._run_key, plan)
        self._mac_key = SecureStream(self._key, "transcript").bytes(0, 32)

    def key(self, epoch: int) -> bytes:
        """The key of samples and noise of an epoch."""
        if epoch == 0:
            return self._key
        return SecureStream(self._key, f"epoch/{self._nonces[epoch - 1]}").bytes(0, len(self._key))

    def known(self, slot: str, number: int) -> tuple[int, bytes] | None:
        """The epoch and the MAC that a release was last made with."""
        return self._known.get((slot, number))

    def count(self, slot: str) -> int:
        """How many releases of a slot have been made, by this process or by one that died."""
        return max((number + 1 for name, number in self._known if name == slot), default=0)

    def released_besides(self, pin: str) -> bool:
        """Whether anything was released yet; ``pin`` is what a run keeps of itself."""
        return any(slot != pin for slot, _ in self._known)

    def mac(self, slot: str, number: int, settings: Iterable[float], *sums: npt.NDArray[np.generic]) -> bytes:
        """A MAC of a release before its noise."""
        digest = hashlib.blake2b(key=self._mac_key, digest_size=_MAC_BYTES)
        digest.update(f"{slot}\0{number}\0{[float(x).hex() for x in settings]}".encode())
        for total in sums:
            digest.update(f"\0{total.dtype} {total.shape}\0".encode())
            digest.update(np.ascontiguousarray(total).data)
        return digest.digest()

    def mac_of(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """A MAC of records, so that without the run's key it does not show which records they are."""
        digest = hashlib.blake2b(key=self._mac_key, digest_size=_MAC_BYTES, person=b"records")
        for part in parts:
            digest.update(part)
        return digest.digest()

    def digest(self, total: Vector) -> npt.NDArray[np.int64]:
        """What stands for a sum on an accelerator in its MAC: a keyed digest that is made there."""
        from quietgrad.core.noise.device import digest

        return digest(total, self._mac_key)

    def reopen(self, openings: int) -> int:
        """Go on, after the ledger knew of so many openings of this run; the number of this one.

        The caller writes it to the ledger. Where the two disagree, one of them hides releases.
        """
        agreed = self.agrees(openings)
        self.complete = self.complete and agreed
        if not self.complete:  # the next process must know, until a new epoch has begun
            self.add(_TORN)
            self._intended = ""  # it may have begun, where this file does not say so any more
        return super().reopen(openings)

    def record(self, slot: str, number: int, mac: bytes) -> None:
        """The release is about to be made; when this returns, no death of the process can hide it."""
        self.add(f"{number} {mac.hex()} {slot}", durable=False)
        self._known[slot, number] = (self.epoch, mac)
        self.length += 1

    def intend(self) -> str:
        """The nonce of the epoch that will be next: it is charged under it before it begins.

        A process that dies between the two leaves an entry that nothing was released under: it pays for the next.
        """
        if not self._intended:
            self._intended = os.urandom(8).hex()
            self.add(f"{_INTEND} {self._intended}")
        return self._intended

    def fork(self) -> int:
        """Begin the epoch that was intended, durably, and return its number."""
        nonce = self.intend()
        self.add(f"{_FORK} {nonce}")
        self._nonces.append(nonce)
        self._intended, self.complete = "", True
        return self.epoch


_FORK, _INTEND, _TORN = "fork", "intend", "torn"
