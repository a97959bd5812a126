"""An append-only file of hash-chained JSON lines that survives kill -9, power loss and a full disk.

Every line is the canonical JSON of ``{body, hash, kind, prev, seq, time}``: ``seq`` is its line number, ``prev``
the hash of the line before, ``hash`` the SHA-256 of the other five. An append returns only after the line, and
then a small head file ``<path>.head`` that names it, are on the disk. So

- an edited, deleted, inserted or moved line breaks the chain, and a cut at the end disagrees with the head;
- bytes after the last line end are an append that never returned, so nothing was released for it: the next writer
  moves the bytes into a ``quarantine`` line and goes on;
- a write that fails is taken back, and if that fails too, what stays is either such a tail or a whole line.

Writers exclude each other with a lock on the file (:mod:`~quietgrad.core.ledger.locks`), which the system releases
when a process dies.
The chain is not keyed: it catches accidents and plain edits, not an attacker who recomputes it and the head, nor a
backup of both. An :func:`anchor` kept elsewhere does: every later state of the same chain has it as its beginning.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quietgrad.core.accounting.budget import Json
from quietgrad.core.errors import DataError, LedgerError, SettingError
from quietgrad.core.files import (
    AS_IS,
    NO_WAIT,
    check_regular,
    os_error_text,
    read_json,
    sync_folder,
    write_atomically,
)
from quietgrad.core.ledger.locks import lock
from quietgrad.core.ledger.log import append_whole

FORMAT = "quietgrad-ledger"
_BEFORE_FIRST = "0" * 64
_ANCHOR_DIGITS = 40  # 160 bits of a hash: too many to find a second chain for
_FIRST_BYTES = b'{"body":{"format":"' + FORMAT.encode() + b'"'
_MAX_PROBLEMS = 20


def canonical(value: object) -> bytes:
    """Return the one JSON spelling of ``value`` that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True)
class ChainEntry:
    """One line: what happened (``kind``, ``body``), when, and its place in the chain."""

    seq: int
    time: str
    kind: str
    body: dict[str, Any]
    prev: str
    hash: str = ""

    def digest(self) -> str:
        """SHA-256 over the canonical JSON of everything but the hash."""
        content = {name: value for name, value in vars(self).items() if name != "hash"}
        return hashlib.sha256(canonical(content)).hexdigest()

    @classmethod
    def parse(cls, line: bytes) -> ChainEntry:
        """Read a line back; ``ValueError`` if it is not exactly what was written."""
        try:
            entry = cls(**json.loads(line))
        except (ValueError, TypeError, RecursionError):
            raise ValueError("is not a ledger entry") from None
        if not isinstance(entry.body, dict) or not all(isinstance(v, str) for v in (entry.kind, entry.time)):
            raise ValueError("is not a ledger entry")
        if line != canonical(vars(entry)) or entry.hash != entry.digest():
            raise ValueError("was edited (its hash does not fit its content)")
        return entry


def anchor(entry: ChainEntry) -> str:
    """The short text that commits to ``entry`` and, through the chain, to every line before it."""
    return f"{entry.seq}-{entry.hash[:_ANCHOR_DIGITS]}"


def check_anchor(entries: Sequence[ChainEntry], text: str) -> str:
    """Compare a chain with its anchor. Returns one sentence that says what is wrong, or ''."""
    if not re.fullmatch(rf"[1-9][0-9]{{0,17}}-[0-9a-f]{{{_ANCHOR_DIGITS}}}", text):
        raise SettingError("{head}: must be what `quietgrad ledger head` printed, such as 12-3f9a….", head=text)
    seq = int(text.partition("-")[0])
    if seq > len(entries):
        lines = len(entries)
        return f"the anchor names line {seq}, the file has {lines}: it is older than the anchor, restored or cut."
    if anchor(entries[seq - 1]) != text:
        return f"line {seq} is not the one anchored: the ledger was restored and continued, or rewritten."
    return ""


@dataclass(frozen=True)
class ChainContents:
    """The contents of a ledger's file: its entries, the bytes of an unfinished append, and the faults."""

    entries: tuple[ChainEntry, ...] = ()
    torn: bytes = b""
    problems: tuple[str, ...] = ()


class Chain:
    """The file at ``path``; :meth:`read` it, or append inside ``with chain.writing() as writer``."""

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 120.0) -> None:
        # The real path: a symbolic link and its target must share one lock and one head.
        self.path = Path(os.path.realpath(os.path.expanduser(path)))
        self.head = self.path.with_name(self.path.name + ".head")
        self.timeout = timeout
        self._one_thread = threading.Lock()
        self._seen: tuple[tuple[int, ...], ChainContents] = ((), ChainContents())

    def read(self) -> ChainContents:
        """Return what the file holds, good or bad; only a file that cannot be opened or locked raises."""
        with self._one_thread:
            try:
                with self._locked(os.O_RDONLY, shared=True) as fd:
                    return self._reading(fd)
            except FileNotFoundError:
                gone = f"the file is gone, but {self.head.name} says that it existed; restore it."
                return ChainContents(problems=(gone,) if self.head.exists() else ())

    @contextlib.contextmanager
    def writing(self, *, adopt: bool = False) -> Iterator[Writer]:
        """Hold the file alone and yield its :class:`Writer`; ``LedgerError`` if anything in it is wrong.

        ``adopt=True`` accepts a file whose head is missing or disagrees, as long as its lines chain.
        """
        with self._one_thread:
            if not self.path.exists() and self.head.exists() and not adopt:
                raise LedgerError(f"{self.path}: the file is gone, but {self.head.name} says that it existed.")
            with self._locked(os.O_RDWR | os.O_APPEND | os.O_CREAT) as fd:
                reading = self._reading(fd, trust_head=not adopt)
                if reading.problems:
                    raise LedgerError(f"{self.path}: {reading.problems[0]}")
                yield Writer(self, fd, reading)

    @contextlib.contextmanager
    def _locked(self, flags: int, *, shared: bool = False) -> Iterator[int]:
        """Open and lock the file that ``path`` names, and be sure that it still names it once locked."""
        deadline = time.monotonic() + self.timeout
        pause = 0.001
        while True:
            try:
                if self.path.exists() and not self.path.is_dir():
                    check_regular(self.path)
                # A pipe that took the file's place in between is not waited for; reading it finds no ledger.
                fd = os.open(self.path, flags | NO_WAIT | AS_IS, 0o644)
            except DataError as error:
                raise LedgerError(str(error)) from None
            except FileNotFoundError:
                if flags & os.O_CREAT:
                    # A mistyped folder must not become a second, empty ledger.
                    raise LedgerError(f"{self.path}: the folder does not exist; create it first.") from None
                raise
            except OSError as error:
                raise LedgerError(f"{self.path}: cannot open the ledger ({os_error_text(error)}).") from None
            try:
                unlock = lock(fd, self.path, shared=shared)
                if self._names(fd):
                    break
                unlock()
                os.close(fd)
            except OSError as error:
                os.close(fd)
                if not isinstance(error, BlockingIOError):
                    raise LedgerError(f"{self.path}: cannot lock the ledger ({error.strerror}).") from None
            if time.monotonic() > deadline:
                raise LedgerError(
                    f"{self.path}: still locked by another process after {self.timeout:g} s; nothing was reserved."
                )
            time.sleep(pause)
            pause = min(2.0 * pause, 0.02)
        try:
            yield fd
        finally:
            unlock()
            os.close(fd)

    def _names(self, fd: int) -> bool:
        """Whether ``path`` still names the open file."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _reading(self, fd: int, *, trust_head: bool = True) -> ChainContents:
        seq, stated, problem = self._read_head() if trust_head else (0, "", "")
        state = (seq, *_signature(fd))
        if state != self._seen[0]:
            with open(fd, "rb", closefd=False) as stream:
                stream.seek(0)
                self._seen = (state, _check_lines(stream.read(), acknowledged=seq))
        reading = self._seen[1]
        lines = len(reading.entries)
        if not trust_head or reading.problems:
            return reading
        if seq == 0 and lines > 1 and not problem:
            problem = f"{self.head.name} is missing, so a cut end cannot be ruled out; {_HOW_TO_ADOPT}"
        elif seq > lines:
            problem = f"the end was cut: {self.head.name} names line {seq}, the file has {lines}; restore the file."
        elif seq > 0 and reading.entries[seq - 1].hash != stated:
            problem = f"line {seq} is not the one that {self.head.name} names; the ledger was rewritten."
        return replace(reading, problems=(problem,)) if problem else reading

    def _read_head(self) -> tuple[int, str, str]:
        """The last acknowledged line's number (0 if there is no head) and hash, and what is wrong."""
        try:
            head = read_json(self.head, most=1 << 12)
            return int(head["seq"]), str(head["hash"]), ""
        except FileNotFoundError:
            return 0, "", ""
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return 0, "", f"{self.head.name} cannot be read; {_HOW_TO_ADOPT}"


_HOW_TO_ADOPT = "bring it back, or accept the file as it is with `quietgrad ledger adopt`."


class Writer:
    """Appends to a locked, checked chain; lives inside ``Chain.writing`` only.

    Its ``entries`` are all entries, those just appended included. A torn tail is put aside first.
    """

    def __init__(self, chain: Chain, fd: int, reading: ChainContents) -> None:
        self._chain, self._fd, self.entries = chain, fd, reading.entries
        try:
            if reading.torn:
                os.ftruncate(fd, os.fstat(fd).st_size - len(reading.torn))
            if len(self.entries) == 1:
                # The process that opened the ledger may have died before its head, and its name, were on the disk.
                # Without a head a second line is refused.
                self._write_head(self.entries[0])
                sync_folder(chain.path.parent)
        except OSError as error:
            raise self._failed(error) from None
        if not self.entries:
            self.append("open", {"format": FORMAT, "version": 1, "id": os.urandom(8).hex()})
        if reading.torn:
            torn_bytes = base64.b64encode(reading.torn).decode("ascii")
            self.append("quarantine", {"reason": "an append that never finished", "bytes": torn_bytes})

    def append(self, kind: str, body: Json, *, time: str | None = None) -> ChainEntry:
        """Add one entry; it and the head are on the disk when this returns, or ``LedgerError`` and no trace.

        Lines are shown to others, so their time is coarse: the minute. ``time`` is that of an earlier line, for one
        whose own would tell how long something took.
        """
        previous = self.entries[-1].hash if self.entries else _BEFORE_FIRST
        minute = datetime.now(UTC).isoformat(timespec="minutes").replace("+00:00", "Z")
        entry = ChainEntry(len(self.entries) + 1, time or minute, kind, dict(body), previous)
        entry = replace(entry, hash=entry.digest())
        size = os.fstat(self._fd).st_size
        try:
            append_whole(self._fd, canonical(vars(entry)) + b"\n")
            self._write_head(entry)
            if entry.seq == 1:
                sync_folder(self._chain.path.parent)
        except OSError as error:
            # Shrinking needs no space. If even this fails, what is left counts or is a torn tail.
            with contextlib.suppress(OSError):
                if entry.seq == 1:
                    self._chain.head.unlink(missing_ok=True)
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
            raise self._failed(error) from None
        self.entries = (*self.entries, entry)
        self._chain._seen = ((entry.seq, *_signature(self._fd)), ChainContents(self.entries))
        return entry

    def _write_head(self, entry: ChainEntry) -> None:
        """Replace the head in one step. A head that is a line behind after a crash is still a true head."""
        head = canonical({"seq": entry.seq, "hash": entry.hash}) + b"\n"
        write_atomically(self._chain.head, head, sync_name=False)

    def _failed(self, error: OSError) -> LedgerError:
        return LedgerError(
            f"{self._chain.path}: cannot write the ledger ({os_error_text(error)}); nothing was reserved, so "
            "nothing may be released. Make room or permit writing, then run again."
        )


def _check_lines(data: bytes, *, acknowledged: int) -> ChainContents:
    """Split into lines and check each by itself and against the one before."""
    *lines, torn = data.split(b"\n")
    entries: list[ChainEntry] = []
    problems: list[str] = []
    previous: str | None = _BEFORE_FIRST
    for number, line in enumerate(lines, start=1):
        try:
            entry = ChainEntry.parse(line)
        except ValueError as error:
            if 0 < acknowledged < number == len(lines) and not problems:
                # A power cut can keep the end of a line and lose its middle; no caller relies on it.
                torn = line + b"\n" + torn
                break
            problems.append(f"line {number} {error}; restore the file from a copy.")
            previous = None  # the next line can only be checked by itself
            continue
        if entry.seq != number or previous not in (None, entry.prev):
            problems.append(f"line {number} does not follow the line before; one was removed, added or moved.")
        if number == 1 and (entry.kind != "open" or entry.body.get("format") != FORMAT):
            problems.append("line 1 does not open a quietgrad ledger.")
        previous = entry.hash
        entries.append(entry)
    if not lines and not _FIRST_BYTES.startswith(torn[: len(_FIRST_BYTES)]):
        problems.append("this is not a quietgrad ledger; choose another file.")
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"… and {len(problems) - _MAX_PROBLEMS} more."]
    return ChainContents(tuple(entries), torn, tuple(problems))


def _signature(fd: int) -> tuple[int, ...]:
    """Changes whenever another process wrote: then everything is read and checked anew."""
    stat = os.fstat(fd)
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
