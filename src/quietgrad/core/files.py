"""Files made by others, and files of our own: read within limits, written whole, privately and through no link.

Reading never waits for a pipe, never opens a device and never takes more than a stated number of bytes. Writing
goes to a fresh file with an unpredictable name that cannot be a link of an attacker, and replaces the target
in one step, so a crash leaves the old file or the new one, never a part.

There is one rule for names that become part of a path. A federation, a party, a run or a data set is named by
others, and the name becomes a folder or a file here: ``../../etc`` must never arrive there, nor a name that
two file systems spell differently.

Windows lacks some of what keeps a file safe elsewhere: flags of ``open``, rights in a file's mode, and folders that
can be brought to the disk. :data:`POSIX` says whether they are there. Without them a user's files are as private as
the folder they are in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

from quietgrad.core.errors import DataError

try:
    import fcntl  # noqa: F401  what every POSIX system has, and Windows has not

    POSIX = True
except ImportError:
    POSIX = False

# Flags of os.open. A system without one of them has 0 in its place. Windows changes line ends unless told not to.
NO_WAIT, NO_LINK = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_NOFOLLOW", 0)
AS_IS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

SMALL = 64 << 20  # bytes: the largest JSON or TOML file that is read
_DEEPEST = 64  # levels: nothing of ours nests deeper than a dozen


def os_error_text(error: OSError) -> str:
    """Return the system's message with the error's name: people search for ENOSPC, not for its translation.

    >>> os_error_text(OSError(28, "No space left on device"))
    'No space left on device, ENOSPC'
    """
    words = error.strerror or type(error).__name__
    number = errno.errorcode.get(error.errno or 0)
    return words if number is None else f"{words}, {number}"


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Refuse what is not a plain file, before it is opened: opening a pipe may wait for ever.

    Raises ``FileNotFoundError`` and other ``OSError`` as ``os.stat`` does.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise DataError(f"{os.fspath(path)}: is {kind}, not a file.")
    return status


def is_shared(path: Path) -> bool:
    """Whether other users may read or write ``path``, as far as a file's mode says so: not on Windows."""
    return POSIX and bool(path.stat().st_mode & 0o077)


def read_bytes(path: str | os.PathLike[str], *, most: int | None = None, follow: bool = True) -> bytes:
    """The bytes of a plain file of at most ``most`` bytes; ``OSError`` as ``open`` raises it.

    Without ``follow`` a link is refused: files of our own are none.

    >>> read_bytes("/dev/null")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: /dev/null: is a pipe, socket or device, not a file.
    """
    if not follow and os.path.islink(path):
        raise DataError(f"{os.fspath(path)}: is a link, and this file is never one; remove it.")
    check_regular(path)
    # A pipe may be put there between check and opening: do not wait for it, and check again.
    flags = os.O_RDONLY | NO_WAIT | AS_IS | (0 if follow else NO_LINK)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{os.fspath(path)}: is not a plain file.")
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise DataError(f"{os.fspath(path)}: has more than {most} bytes, which no such file needs.")
    return content


def read_text(path: str | os.PathLike[str], *, most: int = SMALL) -> str:
    """The text of a plain UTF-8 file; ``ValueError`` if it is none."""
    return read_bytes(path, most=most).decode("utf-8")


def read_json(path: str | os.PathLike[str], *, most: int = SMALL) -> Any:
    """Read a JSON file; ``ValueError`` if it is none, ``OSError`` if it cannot be read."""
    return parse_json(read_bytes(path, most=most))


def parse_json(text: str | bytes | bytearray) -> Any:
    """Parse a JSON text; ``ValueError`` for everything else, texts that nest without end included.

    >>> parse_json("[" * 100000)
    Traceback (most recent call last):
    ValueError: nested more than 64 deep
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {_DEEPEST} deep") from None
    opened = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if opened > _DEEPEST:
        _check_depth(value)
    return value


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_DEEPEST} deep")


def write_atomically(
    path: Path, content: bytes, *, private: bool = False, sync: bool = True, sync_name: bool = True
) -> None:
    """Replace ``path`` by ``content`` in one step; with ``private`` only its owner may read it.

    A link at ``path`` is replaced by the file, not followed. Without ``sync_name`` a power cut may bring the old
    file back. Without ``sync`` it may leave neither.
    """
    fresh = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.tmp")
    # The number of rights is cut by the umask, as for every file that a user makes.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | AS_IS, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    if sync and sync_name:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the creation or removal of a file in ``folder`` survive a power cut; Windows does so by itself."""
    if not POSIX:
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | AS_IS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_TABLES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}
PACKED = (".gz", ".bz2", ".zst", ".lz4")


def table_kind(path: str) -> str | None:
    """parquet or csv, by the suffix.

    >>> table_kind("people/1.csv.gz"), table_kind("people/1.parquet"), table_kind("people/readme.md")
    ('csv', 'parquet', None)
    """
    suffixes = [s for s in Path(path).suffixes if s not in PACKED]
    return _TABLES.get(suffixes[-1]) if suffixes else None


def is_multi_file(source: str) -> bool:
    """Whether a text names many files, or files elsewhere: a pattern, a folder of tables, or an address."""
    if Path(source).is_file():
        return False
    if "://" in source or any(mark in source for mark in "*?["):
        return True
    return Path(source).is_dir() and any(table_kind(path.name) for path in Path(source).rglob("*"))


_PATH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RULE = "must be 1 to 128 letters, digits, dots, dashes or underscores, and begin with a letter or digit"


def is_path_name(name: object) -> bool:
    """Whether ``name`` can be one part of a path, on any system.

    >>> [is_path_name(name) for name in ("five-clinics", "..", "a/b", "", "a\\n", ".hidden", "é", None)]
    [True, False, False, False, False, False, False, False]
    """
    return isinstance(name, str) and _PATH_NAME.fullmatch(name) is not None


def check_path_name(what: str, name: object) -> str:
    """``name`` if it can be one part of a path.

    >>> check_path_name("federation", "../../tmp")
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: federation='../../tmp': must be 1 to 128 letters, digits, ...
    """
    if not isinstance(name, str) or not is_path_name(name):
        raise DataError(f"{what}={name!r}: {RULE}; it becomes a file's or a folder's name.")
    return name
