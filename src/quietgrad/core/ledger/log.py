"""Append-only files that survive a killed process: one way to lock, append, cut a torn tail and seal.

A :class:`LockedAppendFile` is held by one process at a time, and each line is on the disk before what it describes
happens. A run's transcript, a party's journal and last reply, a coordinator's aggregates are such files. A second
process is refused by name. A killed process releases the file.

What a run must not forget stands in a :class:`SealedLog`: its lines are chained under the run's key, so none can be
changed, moved or left out in the middle. Three things that a copy of the file does not bring along show that
lines are missing at the end: how often the ledger says that the run was opened, which file on which start of the
machine it is, and when the system last changed it.

:func:`append_whole` is the write that all of them share, the ledger's chain included: a line is there whole, or the
file is as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from quietgrad.core.errors import DataError, LedgerError
from quietgrad.core.files import AS_IS, NO_LINK, POSIX, os_error_text, sync_folder
from quietgrad.core.ledger.locks import lock


def append_whole(file: int, data: bytes, *, durable: bool = True) -> None:
    """Append ``data`` to an open file, on the disk if ``durable``; after an ``OSError`` the file is as it was.

    Shrinking needs no space. If even that fails, what stays is a torn tail, which the next reader cuts off, or a
    whole line.
    """
    before, done = os.fstat(file).st_size, 0
    try:
        while done < len(data):
            done += os.write(file, data[done:])
        if durable:
            os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
            if durable:
                os.fsync(file)
        raise


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
            self._file, self._unlock = self._locked(path, who)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be kept here ({os_error_text(error)}); choose a folder of your own."
            ) from None
        self._free = weakref.finalize(self, _let_go, self._file, self._unlock)
        sync_folder(path.parent)  # so that a new file's name survives a power cut

    @staticmethod
    def _locked(path: Path, who: str) -> tuple[int, Callable[[], None]]:
        while True:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | NO_LINK | AS_IS, 0o600)
            try:
                unlock = lock(file, path)
                # Its holder may have removed it since it was opened here: then this file has no name any more.
                if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                    return file, unlock
                _let_go(file, unlock)
            except OSError as error:
                os.close(file)
                if not isinstance(error, BlockingIOError | PermissionError):
                    raise
                raise DataError(
                    f"{path.parent}: another process {who} in this folder; wait for it, or end it first."
                ) from None

    @property
    def identity(self) -> str:
        """The file's device and inode: a copy, or one restored from a backup, has others."""
        status = os.fstat(self._file)
        return f"{status.st_dev}:{status.st_ino}"

    def content(self) -> bytes:
        """Everything that was written."""
        return self.path.read_bytes()

    def append(self, data: bytes, *, durable: bool = True) -> None:
        """Write; durably, or so that at least no death of the process can lose it."""
        if not self._free.alive:  # the number of a closed file may be another file's by now
            raise DataError(f"{self.path}: was released by this process; it takes no more entries.")
        try:
            append_whole(self._file, data, durable=durable)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: cannot be written ({os_error_text(error)}), and nothing was released; free some "
                "space on the disk and start again."
            ) from None

    def sync(self) -> None:
        """Bring everything that was written to the disk."""
        os.fsync(self._file)

    def cut(self, length: int, *, durable: bool = True) -> None:
        """Drop what follows the first ``length`` bytes: a torn tail, or what is not needed any more."""
        if self._free.alive:
            os.ftruncate(self._file, length)
            if durable:
                os.fsync(self._file)

    def remove(self) -> None:
        """It is over: remove the file and let go."""
        if self._free.alive:  # else it may be another process's by now
            if POSIX:
                self.path.unlink(missing_ok=True)
                self.close()
            else:  # an open file cannot be removed; the lock is beside it and still held
                self._free.detach()
                os.close(self._file)
                self.path.unlink(missing_ok=True)
                self._unlock()

    def close(self) -> None:
        """Let go of the file."""
        self._free()


def _let_go(file: int, unlock: Callable[[], None]) -> None:
    """Close a locked file. Unlocking it as well would take the lock from the parent of a forked process."""
    os.close(file)
    if not POSIX:
        unlock()


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
        """The lines that were written before, openings left out."""
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
            body = f"{text} {now}"
            seal = self._seal(body)
            self.append(f"{body} {seal.hex()}\n".encode(), durable=durable)
            self._last = seal
            self._since += 1
            if abs(self._changed() - now) <= _PROMPT:
                return
            # The process was held up between looking at the clock and writing.
            text, self._since = _LATE, self._since - 1

    def _seal(self, text: str) -> bytes:
        return hashlib.blake2b(self._last + text.encode(), key=self._seal_key, digest_size=8).digest()

    def _changed(self) -> int:
        """When the system last changed the file, in ns; only a change of the clock can set it."""
        return os.fstat(self._file).st_ctime_ns

    def _load(self) -> None:
        whole, newline, torn = self.content().rpartition(b"\n")
        place, written = "", 0
        for line in whole.decode(errors="replace").split("\n") if newline else ():
            body, _, seal = line.rpartition(" ")
            expected = self._seal(body)
            if not hmac.compare_digest(seal.encode(errors="replace"), expected.hex().encode()):
                raise LedgerError(
                    f"{self.path}: was altered, or is of another run, so it is unknown what was released. Start "
                    "a new run; it is charged in full."
                )
            self._last = expected
            text, _, at = body.rpartition(" ")
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


def _boot() -> str:
    """The identifier of this start of the machine; unknown ones never agree."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.urandom(16).hex()
