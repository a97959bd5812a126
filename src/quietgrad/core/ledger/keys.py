"""Key files: where a run's secret key waits until the run is closed, so that it can be resumed.

The key is kept apart from results and checkpoints, readable by its owner only, and destroyed when the run is
closed: its holder can subtract the noise from everything the run published. A key whose run was abandoned,
its folder deleted or its federation gone, outlives its purpose: ``quietgrad keys`` lists and destroys such keys.
While a process holds a key it leaves no core dump.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from quietgrad.core.errors import QuietgradError
from quietgrad.core.files import (
    AS_IS,
    NO_LINK,
    NO_WAIT,
    POSIX,
    check_path_name,
    is_path_name,
    is_shared,
    os_error_text,
    read_bytes,
    read_json,
    sync_folder,
    write_atomically,
)
from quietgrad.core.ledger.fingerprints import state_folder
from quietgrad.core.noise.rng import KEY_BYTES, fresh_key

_PR_SET_DUMPABLE = 4


class KeyFileError(QuietgradError, RuntimeError):
    """A run's key is missing, damaged, already there, or open to others; nothing was released."""

    code = "QG-KEY"


@dataclass(frozen=True)
class PendingKey:
    """A key that waits: its run, since when (seconds since 1970), and the run's folder if it was noted."""

    run: str
    since: float
    folder: str | None

    @property
    def orphaned(self) -> bool:
        """Whether the run's folder is gone, so that it cannot be resumed."""
        return self.folder is not None and not Path(self.folder).is_dir()


class KeyFile:
    """The key files of this user, under ``$QUIETGRAD_STATE/keys`` or ``~/.local/state/quietgrad/keys``."""

    @staticmethod
    def directory() -> Path:
        """Return the folder that holds the keys."""
        return state_folder() / "keys"

    @classmethod
    def waiting(cls) -> list[PendingKey]:
        """All keys that wait for their runs to be resumed or closed, oldest first."""
        folder = cls.directory()
        keys = []
        for path in folder.glob("*.key") if folder.is_dir() else ():
            if is_path_name(path.stem):
                try:
                    place = str(read_json(path.with_suffix(".where"), most=1 << 16)["folder"])
                except (OSError, ValueError, KeyError, TypeError):
                    place = None
                keys.append(PendingKey(path.stem, path.lstat().st_mtime, place))
        return sorted(keys, key=lambda key: key.since)

    @classmethod
    def create(cls, run_id: str, folder: str | os.PathLike[str] | None = None) -> bytes:
        """Write a fresh key for ``run_id``, durably, and return it; refuse if the run has one already.

        ``folder`` is where the run keeps its checkpoints: it is noted beside the key, so that a key whose folder
        was deleted can be distinguished from one still in use.
        """
        path = cls._path(run_id)
        forbid_core_dumps()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(path.parent, "chmod 700")
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise KeyFileError(
                f"run {run_id!r} has a key already ({path}): resume the run, close it, or choose another name."
            ) from None
        except OSError as error:
            raise KeyFileError(
                f"cannot write a key to {path.parent} ({os_error_text(error)}): "
                "set QUIETGRAD_STATE to a folder that can be written, best on the volume of the runs."
            ) from None
        key = fresh_key()
        try:
            with os.fdopen(file, "wb") as out:
                out.write(key)
                out.flush()
                os.fsync(out.fileno())
            if folder is not None:
                place = json.dumps({"folder": os.path.abspath(folder)}).encode()
                write_atomically(path.with_suffix(".where"), place, private=True)
            sync_folder(path.parent)
        except OSError as error:
            cls.destroy(run_id)
            raise KeyFileError(
                f"cannot write a key to {path.parent} ({os_error_text(error)}); nothing was released."
            ) from None
        return key

    @classmethod
    def exists(cls, run_id: str) -> bool:
        """Whether a key waits for ``run_id``."""
        return cls._path(run_id).exists()

    @classmethod
    def load(cls, run_id: str) -> bytes:
        """Return the key of ``run_id``."""
        path = cls._path(run_id)
        forbid_core_dumps()
        try:
            _check_private(path, "chmod 600")
            key = read_bytes(path, most=4096)
        except FileNotFoundError:
            raise KeyFileError(
                f"run {run_id!r} has no key in {path.parent}: it was closed, or started elsewhere. "
                "Start a new run; it draws fresh noise and is charged again."
            ) from None
        except OSError as error:
            raise KeyFileError(f"cannot read the key {path} ({os_error_text(error)}).") from None
        if len(key) != KEY_BYTES:
            raise KeyFileError(
                f"the key {path} has {len(key)} bytes instead of {KEY_BYTES}: it was cut short. "
                "Destroy it and start a new run; it draws fresh noise and is charged again."
            )
        return key

    @classmethod
    def destroy(cls, run_id: str) -> None:
        """Overwrite and remove the key of ``run_id``; a run without a key is left as it is.

        File systems that copy on write, backups and flash wear-levelling may keep what was overwritten: put
        the folder on an encrypted or memory-backed disk where that matters.
        """
        path = cls._path(run_id)
        try:
            path.with_suffix(".where").unlink(missing_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | NO_LINK | NO_WAIT | AS_IS), "r+b") as file:
                if POSIX:
                    path.unlink()  # first: a process that dies in between must not leave another key
                size = max(KEY_BYTES, os.fstat(file.fileno()).st_size)
                file.write(os.urandom(size))
                file.flush()
                os.fsync(file.fileno())
            if not POSIX:
                path.unlink()  # an open file cannot be removed there
        except FileNotFoundError:
            return
        except OSError as error:
            raise KeyFileError(
                f"cannot destroy the key {path} ({os_error_text(error)}): remove it by hand."
            ) from None
        sync_folder(path.parent)

    @classmethod
    def _path(cls, run_id: str) -> Path:
        return cls.directory() / f"{check_path_name('run_id', run_id)}.key"


def _check_private(path: Path, remedy: str) -> None:
    if is_shared(path):
        mode = path.stat().st_mode & 0o777
        raise KeyFileError(f"{path} is open to other users (mode {mode:o}): {remedy} it first.")


def forbid_core_dumps() -> None:
    """From now on this process leaves no core dump, which would hold its keys.

    The limit alone does not bind kernels that hand dumps to a program; on Linux the process is also marked as not
    to be dumped, which keeps other processes of the same user from reading its memory, debuggers included. Windows
    has no such limit.
    """
    if not POSIX:
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
