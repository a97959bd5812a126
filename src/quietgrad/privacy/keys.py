"""Key files: where a run's secret key waits until the run is closed, so that it can be resumed.

The key is kept apart from results and checkpoints, readable by its owner only, and destroyed when the run is
closed: whoever holds it can subtract the noise from everything the run published.
"""

from __future__ import annotations

import os
from pathlib import Path

from quietgrad.errors import QuietgradError
from quietgrad.naming import check_path_name
from quietgrad.privacy.rng import KEY_BYTES, fresh_key


class KeyFileError(QuietgradError, RuntimeError):
    """A run's key is missing, damaged, already there, or open to others; nothing was released."""


class KeyFile:
    """The key files of this user, under ``$QUIETGRAD_STATE/keys`` or ``~/.local/state/quietgrad/keys``.

    >>> import tempfile, unittest.mock
    >>> state = tempfile.TemporaryDirectory()
    >>> with unittest.mock.patch.dict(os.environ, QUIETGRAD_STATE=state.name):
    ...     key = KeyFile.create("run-1")
    ...     same = KeyFile.load("run-1") == key
    ...     KeyFile.destroy("run-1")
    ...     left = os.listdir(KeyFile.directory())
    >>> same, left
    (True, [])
    >>> state.cleanup()
    """

    @staticmethod
    def directory() -> Path:
        """Return the folder that holds the keys."""
        state = os.environ.get("QUIETGRAD_STATE")
        return (Path(state) if state else Path.home() / ".local" / "state" / "quietgrad") / "keys"

    @classmethod
    def create(cls, run_id: str) -> bytes:
        """Write a fresh key for ``run_id``, durably, and return it; refuse if the run has one already."""
        path = cls._path(run_id)
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
                f"cannot write a key to {path.parent} ({error.strerror}): "
                "set QUIETGRAD_STATE to a folder that can be written."
            ) from None
        key = fresh_key()
        with os.fdopen(file, "wb") as out:
            out.write(key)
            out.flush()
            os.fsync(out.fileno())
        _sync_folder(path.parent)
        return key

    @classmethod
    def load(cls, run_id: str) -> bytes:
        """Return the key of ``run_id``."""
        path = cls._path(run_id)
        try:
            _check_private(path, "chmod 600")
            key = path.read_bytes()
        except FileNotFoundError:
            raise KeyFileError(
                f"run {run_id!r} has no key in {path.parent}: it was closed, or started elsewhere. "
                "Start a new run; it draws fresh noise and is charged again."
            ) from None
        except OSError as error:
            raise KeyFileError(f"cannot read the key {path} ({error.strerror}).") from None
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
            with path.open("r+b") as file:
                size = max(KEY_BYTES, os.fstat(file.fileno()).st_size)
                file.write(os.urandom(size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise KeyFileError(f"cannot destroy the key {path} ({error.strerror}): remove it by hand.") from None
        _sync_folder(path.parent)

    @classmethod
    def _path(cls, run_id: str) -> Path:
        return cls.directory() / f"{check_path_name('run_id', run_id)}.key"


def _check_private(path: Path, remedy: str) -> None:
    mode = path.stat().st_mode
    if mode & 0o077:
        raise KeyFileError(f"{path} is open to other users (mode {mode & 0o777:o}): {remedy} it first.")


def _sync_folder(folder: Path) -> None:
    """Make the creation or removal of a file in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
