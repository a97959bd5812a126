"""The ledger's file: every way in which it can be cut, edited, torn, filled up or fought over."""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import Gaussian
from quietgrad.core.errors import LedgerError
from quietgrad.core.ledger.chain import ChainEntry, canonical
from quietgrad.core.ledger.ledger import Ledger

PROMISE: dict[str, Any] = {"delta": 1e-5, "relation": "add-remove"}


def reserve(ledger: Ledger, run: str = "run") -> str:
    return ledger.reserve("people", Gaussian(2.0), run=run, **PROMISE).id


def head_of(path: Path) -> Path:
    return path.with_name(path.name + ".head")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger of five lines: its opening, three reservations and a cap."""
    file = tmp_path / "ledger.jsonl"
    ledger = Ledger(file)
    for run in "abc":
        reserve(ledger, run)
    ledger.set_cap("others", Budget(1.0, 1e-5))
    return file


def refused(path: Path, what: str) -> None:
    """The file is reported by verify, and neither read nor written by anything else."""
    before = path.read_bytes()
    report = Ledger(path).verify()
    assert not report.ok
    assert any(what in problem for problem in report.problems), report.problems
    with pytest.raises(LedgerError, match=what):
        reserve(Ledger(path))
    with pytest.raises(LedgerError, match=what):
        Ledger(path).entries()
    assert path.read_bytes() == before


def test_format_is_one_canonical_hash_chained_json_object_per_line(path: Path) -> None:
    previous = "0" * 64
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        data = json.loads(line)
        assert canonical(data) == line
        assert (data["seq"], data["prev"]) == (number, previous)
        assert data["time"].endswith("Z")
        previous = data["hash"]
    assert json.loads(head_of(path).read_bytes()) == {"seq": 5, "hash": previous}
    report = Ledger(path).verify()
    assert (report.ok, report.entries, report.torn_tail) == (True, 5, False)
    assert report.accounts == ("people", "others")


def joined(*lines: bytes) -> bytes:
    return b"".join(lines)


DAMAGES: dict[str, tuple[Callable[..., bytes], str]] = {
    **{
        f"line {k} edited": (
            lambda *lines, k=k: joined(
                *lines[: k - 1], lines[k - 1].replace(b'"time":"2', b'"time":"3'), *lines[k:]
            ),
            f"line {k} was edited",
        )
        for k in range(1, 6)
    },
    "less cost": (
        lambda *lines: joined(*lines).replace(b'multiplier":2.0', b'multiplier":9.0', 1),
        "line 2 was edited",
    ),
    "another spelling": (lambda *lines: joined(*lines).replace(b'"kind":', b'"kind": ', 1), "line 1 was edited"),
    **{
        f"line {k} deleted": (lambda *lines, k=k: joined(*lines[: k - 1], *lines[k:]), f"line {k} does not follow")
        for k in (1, 2, 4)
    },
    "moved": (lambda a, b, c, *rest: joined(a, c, b, *rest), "line 2 does not follow"),
    "doubled": (lambda a, b, *rest: joined(a, b, b, *rest), "line 3 does not follow"),
    "inserted": (lambda a, *rest: joined(a, b"\n", *rest), "line 2 is not a ledger entry"),
    **{f"cut after {k}": (lambda *lines, k=k: joined(*lines[:k]), "the end was cut") for k in (0, 1, 2, 4)},
    "cut inside a line that was acknowledged": (lambda *lines: joined(*lines)[:-1], "the end was cut"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_is_read_or_written(path: Path, damage: str) -> None:
    change, said = DAMAGES[damage]
    path.write_bytes(change(*path.read_bytes().splitlines(keepends=True)))
    refused(path, said)


def test_a_lost_file_is_not_a_new_ledger(path: Path) -> None:
    path.unlink()
    assert "gone" in Ledger(path).verify().problems[0]
    with pytest.raises(LedgerError, match="gone"):
        reserve(Ledger(path))
    assert not path.exists()


def test_a_swapped_ledger_is_not_the_one_the_head_names(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for run in "abcde":
        reserve(Ledger(other), run)
    shutil.copy(other, path)
    refused(path, "is not the one that")


def test_a_missing_or_broken_head_is_refused_until_the_file_is_adopted(path: Path) -> None:
    head_of(path).write_bytes(b"\x00")
    refused(path, "cannot be read")
    head_of(path).unlink()
    refused(path, "cannot be ruled out")
    Ledger(path).adopt(reason="moved to a new disk")
    report = Ledger(path).verify()
    assert (report.ok, report.entries) == (True, 6)
    assert Ledger(path).entries()[-1].body == {"reason": "moved to a new disk"}


def test_adopting_does_not_forgive_an_edit_nor_invent_a_file(path: Path, tmp_path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"2.0", b"3.0", 1))
    with pytest.raises(LedgerError, match="edited"):
        Ledger(path).adopt(reason="no")
    with pytest.raises(LedgerError, match="no ledger"):
        Ledger(tmp_path / "none").adopt(reason="no")


@pytest.mark.parametrize(
    "content",
    [b"hello", b"hello\n", b"\x00" * 100, b"{}\n", b"\xff\xfe\n\x80", b"[" * 5000 + b"\n", b"1\n2\n", b"\n"],
)
def test_a_file_that_is_no_ledger_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(content)
    refused(file, "not a")


def test_a_chain_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    entry = ChainEntry(1, "2024-01-01T00:00:00.000000Z", "open", {"format": "something else"}, "0" * 64)
    data = {**vars(entry), "hash": entry.digest()}
    file.write_bytes(canonical(data) + b"\n")
    refused(file, "line 1 does not open a quietgrad ledger")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 10_000), value=st.integers(1, 255))
def test_any_changed_byte_is_noticed(path: Path, where: int, value: int) -> None:
    whole = path.read_bytes()
    data = bytearray(whole)
    data[where % len(data)] ^= value
    path.write_bytes(data)
    assert not Ledger(path).verify().ok
    path.write_bytes(whole)
    assert Ledger(path).verify().ok


def test_an_empty_file_is_a_new_ledger(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    file.touch()
    assert Ledger(file).verify().ok
    reserve(Ledger(file))
    assert Ledger(file).verify().entries == 2


def test_a_torn_append_of_any_length_is_put_aside(path: Path) -> None:
    """The file as a crash leaves it after each byte of an append: nothing that was acknowledged is lost."""
    whole, head = path.read_bytes(), head_of(path).read_bytes()
    reserve(Ledger(path), "torn")
    line = path.read_bytes()[len(whole) :]
    for kept in range(1, len(line)):
        path.write_bytes(whole + line[:kept])
        head_of(path).write_bytes(head)
        report = Ledger(path).verify()
        assert (report.ok, report.entries, report.torn_tail) == (True, 5, True)
        if kept % 16 == 1:
            paid = reserve(Ledger(path))
            entries = Ledger(path).entries()
            assert [entry.kind for entry in entries[5:]] == ["quarantine", "reserve"]
            assert base64.b64decode(entries[5].body["bytes"]) == line[:kept]
            assert entries[6].body["id"] == paid
            assert not Ledger(path).verify().torn_tail


def test_a_torn_first_line_is_put_aside(path: Path, tmp_path: Path) -> None:
    first = path.read_bytes().splitlines()[0]
    file = tmp_path / "young.jsonl"
    for kept in (1, 12, 25, len(first)):
        file.write_bytes(first[:kept])
        head_of(file).unlink(missing_ok=True)
        assert Ledger(file).verify().torn_tail
        reserve(Ledger(file))
        assert [entry.kind for entry in Ledger(file).entries()] == ["open", "quarantine", "reserve"]


def test_a_power_cut_that_kept_only_the_end_of_an_unacknowledged_line(path: Path) -> None:
    torn = b"\x00" * 64 + b'"}\n'
    path.write_bytes(path.read_bytes() + torn)
    assert Ledger(path).verify().torn_tail
    reserve(Ledger(path))
    assert base64.b64decode(Ledger(path).entries()[5].body["bytes"]) == torn


def test_a_line_that_is_ahead_of_the_head_counts(path: Path) -> None:
    """Killed between line and head: the caller never heard of it, and it is counted all the same."""
    head = head_of(path).read_bytes()
    paid = reserve(Ledger(path))
    head_of(path).write_bytes(head)
    assert Ledger(path).verify().ok
    assert paid in Ledger(path).book().held


class Crash(BaseException):
    """A process that dies: no ``except OSError`` sees it."""


def test_deaths_before_the_first_head_leave_a_ledger_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: killed between line and head twice in a row, a young ledger had two lines and no head for ever."""
    ledger = Ledger(tmp_path / "young.jsonl")

    def dies(*args: Any, **more: Any) -> None:
        raise Crash

    for _ in range(3):
        with monkeypatch.context() as patched:
            patched.setattr("quietgrad.core.ledger.chain.write_atomically", dies)
            with pytest.raises(Crash):
                reserve(Ledger(ledger.path))
    assert ledger.verify().ok
    paid = reserve(ledger)
    assert Ledger(ledger.path).verify().ok
    assert paid in Ledger(ledger.path).book().held


def interrupt(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> Callable[[], int]:
    """Make the ``call``-th system call that changes a file raise; a write leaves half of its bytes behind."""
    seen = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def wrapped(*args: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == call:
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                raise error
            return real(*args)

        monkeypatch.setattr(os, name, wrapped)

    for name in ("write", "fsync", "replace", "ftruncate"):
        wrap(name)
    return lambda: seen


@pytest.mark.parametrize("state", ["new", "used", "torn"])
@pytest.mark.parametrize("kind", ["crash", "full disk"])
def test_failure_at_every_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, kind: str
) -> None:
    """Whatever is interrupted, the ledger stays readable, keeps what was acknowledged and can go on."""
    for call in range(1, 100):
        file = tmp_path / f"{call}.jsonl"
        kept = [] if state == "new" else [reserve(Ledger(file)), reserve(Ledger(file))]
        if state == "torn":
            file.write_bytes(file.read_bytes() + b'{"body":')
        error = Crash() if kind == "crash" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with monkeypatch.context() as patched:
            calls = interrupt(patched, call, error)
            message = None
            try:
                kept.append(reserve(Ledger(file), "interrupted"))
            except Crash:
                pass
            except LedgerError as failure:
                message = str(failure)
        report = Ledger(file).verify()
        assert report.ok, report.problems
        book = Ledger(file).book()
        assert set(kept) <= set(book.held)
        if kind == "full disk" and calls() >= call:
            assert message is not None
            assert "No space left" in message
            assert len(book.held) == len(kept)  # refused means: nothing spent
        kept.append(reserve(Ledger(file)))
        assert Ledger(file).verify().ok
        assert set(kept) <= set(Ledger(file).book().held)
        if calls() < call:
            break
    else:
        pytest.fail("the append makes more system calls than the test interrupts")
    assert call > 4


def test_full_disk_where_even_taking_back_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        patched.setattr(os, "ftruncate", full)
        with pytest.raises(LedgerError, match="No space left"):
            reserve(Ledger(path))
    report = Ledger(path).verify()
    assert report.ok
    assert len(Ledger(path).book().held) == 4  # the line is whole, so it counts: too much, never too little


def test_places_where_no_ledger_can_be(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match="folder does not exist"):
        reserve(Ledger(tmp_path / "mistyped" / "ledger.jsonl"))
    with pytest.raises(LedgerError, match="Not a directory"):
        reserve(Ledger(path / "ledger.jsonl"))
    with pytest.raises(LedgerError, match="Is a directory"):
        reserve(Ledger(tmp_path))

    real = os.open

    def read_only(name: Any, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(LedgerError, match="Read-only file system"):
        reserve(Ledger(path))
    assert Ledger(path).verify().ok  # reading needs no permission to write


def test_a_torn_tail_that_cannot_be_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes() + b"torn")

    def denied(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "ftruncate", denied)
    with pytest.raises(LedgerError, match="Input/output error"):
        reserve(Ledger(path))


def test_a_locked_ledger_waits_then_says_so(path: Path) -> None:
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match=r"still locked by another process after 0.05 s"):
            reserve(Ledger(path, timeout=0.05))
        timer = threading.Timer(0.1, fcntl.flock, (other, fcntl.LOCK_UN))
        timer.start()
        reserve(Ledger(path))
        timer.join()
    assert len(Ledger(path).book().held) == 4


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LedgerError, match="cannot lock"):
        reserve(Ledger(path))


@pytest.mark.parametrize("then", ["back", "gone"])
def test_a_file_replaced_while_waiting_for_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """Whoever gets the lock of a file that is no longer at the path must not write into it."""
    real = fcntl.flock
    aside = path.with_name("aside")
    moves = iter([True])

    def flock(fd: int, kind: int) -> None:
        real(fd, kind)
        if kind & fcntl.LOCK_EX and next(moves, False):
            path.rename(aside)
            if then == "back":
                shutil.copy(aside, path)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = path.read_bytes()
    if then == "back":
        reserve(Ledger(path))
        assert Ledger(path).verify().entries == 6
    else:
        with pytest.raises(LedgerError, match="cut"):
            reserve(Ledger(path))
    assert aside.read_bytes() == before


def test_threads_and_links_share_one_ledger(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    shared = Ledger(link)
    threads = [threading.Thread(target=lambda: [reserve(shared) for _ in range(8)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    reserve(Ledger(path))
    for thread in threads:
        thread.join()
    assert Ledger(path).verify().entries == 5 + 32 + 1
    assert not head_of(link).exists()


def test_an_edit_is_noticed_by_a_ledger_that_is_already_open(path: Path) -> None:
    ledger = Ledger(path)
    reserve(ledger)
    time.sleep(0.02)  # file times tick every few milliseconds
    path.write_bytes(path.read_bytes().replace(b'"noise_multiplier":2.0', b'"noise_multiplier":9.0', 1))
    with pytest.raises(LedgerError, match="line 2 was edited"):
        reserve(ledger)


def test_a_past_that_was_exchanged_is_folded_anew(path: Path, tmp_path: Path) -> None:
    """The file restored from a longer, valid copy with its head: the open ledger follows it."""
    other = tmp_path / "other.jsonl"
    ids = [reserve(Ledger(other), str(random.random())) for _ in range(6)]
    ledger = Ledger(path)
    reserve(ledger)
    shutil.copy(other, path)
    shutil.copy(head_of(other), head_of(path))
    ledger.close(ids[0], reason="done")
    assert set(ledger.book().held) == set(ids)
