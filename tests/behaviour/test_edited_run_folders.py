"""Storms over everything that a run keeps: whatever happens to the files, what is stated is true, or is refused.

Some three hundred lives of runs that are begun, killed, edited, cut, copied, put back and swapped; and processes
that die before every single write.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from tests.behaviour.kept_runs import (
    KINDS,
    LoopRun,
    TableRun,
    World,
    believe_what_is_found,
    storm,
    undisturbed_epsilon,
)

LIVES = {"table": 80, "sampled": 60, "once": 60, "party": 80, "network": 12, "loop": 36}


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder in memory if there is one: a storm waits for the disk at every line otherwise."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::quietgrad.core.errors.LedgerWarning")
@pytest.mark.parametrize("kind", LIVES)
def test_what_is_stated_is_true_or_refused(kind: str, home: Path) -> None:
    if kind in ("network", "loop"):
        pytest.importorskip("torch")
    other = KINDS[kind](home / "other")
    other.go(0, kill=4)
    lives = [storm(KINDS[kind](home / str(k)), other, np.random.default_rng(k)) for k in range(LIVES[kind])]
    counts = Counter(lives)
    assert min(counts["true"], counts["refused"]) > len(lives) // 10, counts  # it neither refuses nor accepts all


def test_the_storm_would_notice_a_run_that_believes_what_it_finds(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe_what_is_found(monkeypatch)
    other = TableRun(home / "other")
    other.go(0, kill=4)
    false = 0
    for k in range(60):
        try:
            storm(TableRun(home / str(k)), other, np.random.default_rng(k))
        except AssertionError:
            false += 1
    assert false > 0


_WRITES = ("write", "fsync", "replace", "ftruncate", "unlink", "link")


def dying(world: World, what: Callable[[], Any], at: int) -> bool:
    """Do ``what`` in a process that dies before its ``at``-th write; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        left = [at]

        def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **settings: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return real(*args, **settings)

            return call

        try:
            for name in _WRITES:
                setattr(os, name, deadly(getattr(os, name)))
            what()
        except BaseException as error:
            print(repr(error))
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9), "it failed by itself"
    return code == 0


@pytest.mark.slow
@pytest.mark.parametrize("when", ["begun", "gone on with"])
@pytest.mark.parametrize("kind", [TableRun, LoopRun])
def test_a_process_that_dies_before_any_write_spends_nothing_twice(
    kind: type[TableRun | LoopRun], when: str, home: Path
) -> None:
    """At every write of a whole run, and of one that is resumed: the model is that of an undisturbed run, for ε."""
    if kind is LoopRun:
        pytest.importorskip("torch")
    deaths, whole = 0, False
    while not whole:
        world = kind(home / str(deaths))
        deaths += 1
        if when == "gone on with":
            world.go(0, kill=3)
            whole = dying(world, lambda world=world: world.go(0), deaths)  # type: ignore[misc]
        else:
            whole = dying(world, lambda world=world: world.go(0), deaths)  # type: ignore[misc]
        keys = list((world.home / "state" / "keys").glob("*.key"))
        model = world.undisturbed(keys[0].read_bytes()) if keys and keys[0].stat().st_size == 32 else None
        if not (world.folder / "checkpoint.safetensors").exists():
            if not (world.folder / "result.json").exists():
                assert not world.ledger.exists() or world.charges() == 0  # it never began
                continue
        else:
            world.begun = True
            world.go(0)
        stated = json.loads((world.folder / "result.json").read_text())["privacy"]
        assert world.charges() == 1, deaths
        assert stated["epsilon"] == pytest.approx(undisturbed_epsilon(world))
        if model is not None:
            assert np.array_equal(qg.load(world.folder).params, model), deaths
    assert deaths > 40
