"""kill -9 storms: hundreds of writers die at random moments, and no release is ever missing from the ledger.

A nursery process forks writers that reserve, then note the release they just paid for in a side file, and close
some reservations; it kills each after a random time. Half of the writers write their lines in small pieces, so
that many die in the middle of one. Time decides nothing but the moment of the kill.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quietgrad.core.accounting.events import Gaussian, Repeated
from quietgrad.core.ledger.ledger import Ledger

NURSERY = r"""
import os, random, signal, sys, time
from quietgrad.core.accounting.events import Gaussian, Repeated
from quietgrad.core.ledger.ledger import Ledger

path, side, rounds, writers, honest = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])


def write_in_pieces(fd, data, write=os.write):
    time.sleep(0.0002)
    return write(fd, data[:40])


def note(fd, text):
    os.write(fd, text.encode())
    os.fsync(fd)


def write_for_ever(number):
    if number % 2:
        os.write = write_in_pieces
    fd = os.open(f"{side}.{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = Ledger(path)
    plan = Repeated(Gaussian(2.0), 10)
    while True:
        run = os.urandom(8).hex()
        if not honest:
            note(fd, f"released {run}\n")
        paid = ledger.reserve("people", plan, delta=1e-5, relation="add-remove", run=run)
        if honest:
            note(fd, f"released {run}\n")
        if random.random() < 0.3:
            short = Repeated(Gaussian(2.0), 4)
            ledger.close(paid.id, spent_event=short, reason="asked to stop", data_dependent=False)
            note(fd, f"closed {run}\n")


# A writer should live for a few appends, however slow the disk is today.
warm = Ledger(path + ".warm")
start = time.perf_counter()
for _ in range(5):
    warm.reserve("people", Gaussian(2.0), delta=1e-5, relation="add-remove", run="x")
life = min(0.06, max(0.01, (time.perf_counter() - start) / 5 * 2))

kills = 0
for _ in range(rounds):
    children = []
    for number in range(writers):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(number)
            except BaseException as error:
                note(2, f"{error!r}\n")
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        time.sleep(random.expovariate(1 / life))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
print(kills)
"""


def storm(folder: Path, *, rounds: int, writers: int, honest: bool = True) -> tuple[Ledger, set[str], set[str]]:
    """Run a storm; return the ledger and the runs that were released and closed according to the side files."""
    path = folder / "ledger.jsonl"
    arguments = [str(path), str(folder / "side"), str(rounds), str(writers), str(int(honest))]
    command = [sys.executable, "-c", NURSERY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""  # no writer met an error of its own
    assert int(done.stdout) == rounds * writers
    notes = [line.split() for side in folder.glob("side.*") for line in side.read_text().splitlines()]
    released = {words[1] for words in notes if words[0] == "released" and len(words) == 2}
    closed = {words[1] for words in notes if words[0] == "closed" and len(words) == 2}
    return Ledger(path), released, closed


def missing(ledger: Ledger, released: set[str]) -> set[str]:
    return released - {held.reservation.run for held in ledger.book().held.values()}


@pytest.mark.slow
def test_no_release_is_missing_after_hundreds_of_kills(tmp_path: Path) -> None:
    released: set[str] = set()
    for _ in range(4):
        ledger, released, closed = storm(tmp_path, rounds=27, writers=3)
        report = ledger.verify()
        assert report.ok, report.problems
        assert missing(ledger, released) == set()
        for held in ledger.book().held.values():
            shortened = held.counts == Repeated(Gaussian(2.0), 4)
            assert shortened or held.counts == Repeated(Gaussian(2.0), 10)
            assert shortened == (held.state == "closed")
        states = {held.reservation.run: held.state for held in ledger.book().held.values()}
        assert {states[run] for run in closed} == {"closed"}
    assert len(released) > 20
    # The storm must have hit what it aims at: appends cut in the middle, and reservations never released. The very
    # last kill may leave the tail of the file torn; only whole lines are entries.
    whole = [line for line in ledger.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    kinds = [json.loads(line)["kind"] for line in whole]
    assert kinds.count("quarantine") > 2
    assert len(ledger.book().held) > len(released)


def test_the_storm_would_notice_a_release_before_its_reservation(tmp_path: Path) -> None:
    ledger, released, _ = storm(tmp_path, rounds=15, writers=3, honest=False)
    assert ledger.verify().ok
    assert missing(ledger, released)


def test_processes_that_start_together_make_one_chain_and_respect_one_cap(tmp_path: Path) -> None:
    """Each of 4 processes asks 5 times for a tenth of the cap: exactly ten requests are granted."""
    path = tmp_path / "ledger.jsonl"
    script = f"""
from quietgrad.core.errors import BudgetError
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import Pure
from quietgrad.core.ledger.ledger import Ledger
granted = 0
for _ in range(5):
    try:
        Ledger({str(path)!r}).reserve(
            "people", Pure(0.1, "add-remove"), delta=1e-9, relation="add-remove", run="x", cap=Budget(1.001, 1e-9)
        )
        granted += 1
    except BudgetError:
        pass
print(granted)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    granted = [int(child.communicate(timeout=120)[0]) for child in children]
    assert [child.returncode for child in children] == [0] * 4
    assert sum(granted) == 10
    assert Ledger(path).verify().entries == 11
