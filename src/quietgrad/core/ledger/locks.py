"""Locks on files: one process at a time writes, and a process that dies lets go.

On POSIX systems the lock is ``flock`` on the open file itself, shared among readers. Windows has no such lock:
there the package filelock locks a file beside it, ``<name>.lock``, and readers exclude each other too. Both locks
belong to an open file, so the system releases them when the process ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quietgrad.core.files import POSIX


def lock(file: int, path: Path, *, shared: bool = False) -> Callable[[], None]:
    """Lock ``file``, which is open at ``path``, without waiting; return the function that unlocks it.

    Raises ``BlockingIOError`` if another holds the lock, another ``OSError`` if the file system has no locks.

    >>> import os, tempfile
    >>> place = tempfile.TemporaryDirectory()
    >>> path = Path(place.name) / "file"
    >>> first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    >>> unlock = lock(first, path)
    >>> try:
    ...     lock(second, path)
    ... except BlockingIOError:
    ...     print("held")
    held
    >>> unlock()
    >>> lock(second, path)()
    >>> os.close(first), os.close(second), place.cleanup()
    (None, None, None)
    """
    if not POSIX:
        return _lock_beside(path)
    import fcntl

    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    # Closing the file is not enough to unlock it if a thread forked meanwhile.
    return lambda: fcntl.flock(file, fcntl.LOCK_UN)


def _lock_beside(path: Path) -> Callable[[], None]:
    from filelock import FileLock, Timeout

    # The lock belongs to the file, not to the thread that happened to open it.
    beside = FileLock(path.with_name(path.name + ".lock"), thread_local=False)
    try:
        beside.acquire(blocking=False)
    except Timeout:
        raise BlockingIOError(f"{path} is locked") from None
    return beside.release
