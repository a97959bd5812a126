"""A file that one process at a time may hold, and whose every line is on the disk before what it speaks of happens.

A run's transcript, a party's journal and a coordinator's aggregates are such files. Two processes on one would each
believe that they are the run: the second is refused by name. A process that is killed lets go of the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import weakref
from pathlib import Path

from quietgrad.errors import DataError, LedgerError
from quietgrad.files import reason


class KeptFile:
    """A locked, append-only file with mode 0600; made empty if it is not there.

    Args:
        path: the file; its folder is made.
        who: what another process would be, for the refusal.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> kept = KeptFile(Path(folder.name) / "run", "coordinates this run")
    >>> kept.append(b"line")
    >>> try:
    ...     KeptFile(kept.path, "coordinates this run")
    ... except DataError as refusal:
    ...     print(str(refusal).partition(": ")[2].partition(";")[0])
    another process coordinates this run in this folder
    >>> kept.close()
    >>> again = KeptFile(kept.path, "coordinates this run")
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
                f"{path}: cannot be kept here ({reason(error)}); choose a folder of your own."
            ) from None
        self._free = weakref.finalize(self, os.close, self._file)
        _sync(path.parent)

    @staticmethod
    def _locked(path: Path, who: str) -> int:
        while True:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever held it may have removed it since it was opened here: then this is nobody's file.
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
                f"{self.path}: cannot be written ({reason(error)}), and nothing was given; make room, start again."
            ) from None

    def sync(self) -> None:
        """Bring everything that was written to the disk."""
        os.fsync(self._file)

    def blot(self, secret: bytes) -> None:
        """Write zeros (the digit) over the first occurrence of ``secret``, in place, durably."""
        at = self.content().find(secret)
        if not self._free.alive or at < 0:
            return
        # A second descriptor: on Linux one that appends writes at the end, whatever place it is told.
        place = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(place, b"0" * len(secret), at)
            os.fsync(place)
        finally:
            os.close(place)

    def cut(self, length: int) -> None:
        """Drop what follows the first ``length`` bytes: a crash tore it, before what it spoke of happened."""
        if self._free.alive:
            os.ftruncate(self._file, length)
            os.fsync(self._file)

    def remove(self) -> None:
        """It is over: remove the file and let go."""
        if self._free.alive:  # else it may be somebody else's by now
            self.path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._free()


def _sync(folder: Path) -> None:
    """Make a new file's name survive a power cut."""
    directory = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
