"""Parties as real processes: killed with -9, restarted, hung; the coordinator always gets an answer in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.federation import deal
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.simulation import assemble, simulate, train
from quietgrad.federation.transport import Bytes, Handler
from quietgrad.federation.transport.local_socket import Processes
from quietgrad.objectives.tables.losses import Logistic
from quietgrad.secure.identity import DropoutError
from tests.talk import Talk

ALGORITHM = qg.DPGD(steps=6, learning_rate=1.0)


def people() -> Any:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 3))
    return deal(X, (X[:, 0] > 0.0) * 1.0, 3)


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Processes, Callable[..., Any]]]:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    plan, members = assemble(
        ALGORITHM,
        Logistic(),
        people(),
        budget=None,
        trust="secure",
        secure="masks",
        seed=1,
        spare=2,
        folder=tmp_path,
    )
    transport = Processes(members.makers)
    exchange = Exchange(transport, timeout=20.0, patience=20.0)
    curator = FederatedCurator(Logistic(), exchange, identity=members.identity, roster=members.roster, seed=1)
    yield transport, partial(train, ALGORITHM, curator, plan, np.zeros(3))
    transport.close()


def test_killed_party_comes_back_and_the_model_is_right(federation: Any) -> None:
    transport, go = federation

    def strike(progress: qg.Progress) -> None:
        if progress.step == 2:
            os.kill(transport.process("party-2").pid, signal.SIGKILL)
            transport.process("party-2").join()
            transport.restart("party-2")

    result = go(callback=strike)
    expected = simulate(ALGORITHM, Logistic(), people(), budget=None, seed=1)
    np.testing.assert_allclose(result.params, expected.params, atol=1e-9)
    assert result.privacy.releases["gradient"] == ALGORITHM.steps  # nobody had been asked anything


def test_killed_party_that_stays_away_is_named(federation: Any) -> None:
    transport, go = federation

    def strike(progress: qg.Progress) -> None:
        if progress.step == 2:
            os.kill(transport.process("party-3").pid, signal.SIGKILL)

    with pytest.raises(DropoutError, match="party-3"):
        go(callback=strike)


def test_hung_party_is_timed_out_and_its_late_answer_is_dropped(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    transport = Processes({"quick": partial(patient, None), "slow": partial(patient, gate)})
    talk = Talk(transport, "")
    try:
        replies, missing = talk.exchange({"quick": b"warm", "slow": b"warm"}, timeout=60.0)
        assert (sorted(replies), missing) == (["quick", "slow"], [])
        replies, missing = talk.exchange({"quick": b"one", "slow": b"one"}, timeout=2.0)
        assert (bytes(replies["quick"]), missing) == (b"one", ["slow"])
        gate.touch()
        replies, missing = talk.exchange({"quick": b"two", "slow": b"two"}, timeout=60.0)
        assert (bytes(replies["slow"]), missing) == (b"two", [])
    finally:
        transport.close()


def patient(gate: Path | None) -> Handler:
    """A party that answers once its gate is there; runs in a child process."""

    def handle(data: Bytes) -> Bytes:
        while gate is not None and bytes(data) != b"warm" and not gate.exists():
            time.sleep(0.01)
        return data

    return handle
