"""One choreography per secure protocol, whichever driver runs it; and the reply that a party can repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.log import LockedAppendFile
from quietgrad.federation import Party, SecureSession, SecureSumConfig, simulate
from quietgrad.federation.journal import LastReply
from quietgrad.federation.secure.choreography import ANSWERS, Reply, SharedSums, Step, drive
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.secure.servers import NoiseServer
from quietgrad.federation.simulation import Federation, InProcess
from quietgrad.federation.transport import Bytes, Transport
from quietgrad.federation.wire import Message, decode
from quietgrad.objectives import Logistic

MODES = pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
STEPS = {
    "masks": ["hello", "meet", "prepare", "deliver", "ask", "reveal"],
    "servers": ["hello", "meet", "ask", "receive", "partial", "finish"],
    "mpc": ["hello", "meet", *["noise"] * 14, "ask", "receive", "partial", "finish"],
}


def steps_in_process(mode: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    replies = SecureSession._replies

    def recorded(self: SecureSession, step: Step) -> Any:
        seen.append(step.kind)
        return replies(self, step)

    monkeypatch.setattr(SecureSession, "_replies", recorded)
    session = SecureSession(SecureSumConfig(mode, parties=3, dimension=2, bound=1.0, sigma=0.5))
    session.prepare()
    seen.append("ask")
    session.sum([[0.1, 0.2]] * 3)
    return seen


def steps_over_messages(mode: Any) -> list[str]:
    """The kinds of messages that the coordinator sends, one after another, to whomever."""
    seen: list[str] = []

    def recording(federation: Federation) -> Transport:
        def recorded(handle: Callable[[Bytes], Bytes]) -> Callable[[Bytes], Bytes]:
            def answer(data: Bytes) -> Bytes:
                kind = decode(bytes(data)).kind
                if kind not in ("open", "close"):
                    seen.append(kind)
                return handle(data)

            return answer

        return InProcess({name: recorded(handle) for name, handle in federation.handlers.items()})

    X = np.linspace(-1.0, 1.0, 60)[:, None]
    parties = [Party(X[k::3], X[k::3, 0] > 0) for k in range(3)]
    simulate(qg.DPGD(steps=1), Logistic(), parties, budget=qg.Budget(1.0, 1e-4), trust="secure", secure=mode,
             transport=recording)  # fmt: skip
    recipients = {"masks": 3, "servers": 2, "mpc": 3}[mode]
    steps, at = [], 0
    while at < len(seen):  # those to whom one step goes are asked one after another
        kind = seen[at]
        count = {"hello": 3, "meet": 3, "ask": 3, "finish": 1}.get(kind, recipients)
        count += recipients if mode != "masks" and kind in ("hello", "meet") else 0
        assert seen[at : at + count] == [kind] * count
        steps.append(kind)
        at += count
    return steps


@MODES
def test_both_drivers_run_the_same_steps(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert steps_in_process(mode, monkeypatch) == STEPS[mode]
    assert steps_over_messages(mode) == STEPS[mode]


@MODES
def test_a_session_goes_on_after_a_round_that_too_few_joined(mode: Any) -> None:
    session = SecureSession(SecureSumConfig(mode, parties=3, dimension=2, bound=1.0, sigma=0.0))
    session.prepare()
    with pytest.raises(qg.federation.DropoutError):
        session.sum([None, None, None])
    assert session.round == 0
    np.testing.assert_allclose(session.sum([[0.1, 0.2]] * 3), [0.3, 0.6], atol=1e-9)
    assert session.round == 1


def test_every_kind_of_message_has_an_answer_at_the_role_that_gets_it() -> None:
    answered = {kind for answers in ANSWERS.values() for kind in answers}
    assert {kind for steps in STEPS.values() for kind in steps} - {"hello", "ask"} == answered


@pytest.mark.parametrize("shape", [(), (0,), (3, 3), (80, 1000)])
def test_shares_of_any_shape_are_their_senders_absence(shape: tuple[int, ...]) -> None:
    terms = SecureSumConfig("servers", parties=3, dimension=2, bound=1.0, sigma=0.5, quorum=2)
    left: dict[str, str] = {}
    frames: Any = {"3": np.zeros(shape, np.uint8), "4": np.zeros(shape)}
    with pytest.raises(qg.federation.DropoutError, match="0 present, 2 needed"):
        drive(
            SharedSums(terms, ["a", "b", "c", "s-1", "s-2"]).sum(0, [0, 1, 2], left.update),
            lambda step: {i: Reply(frames) for i in step.to},
        )
    assert set(left) == {"a", "b", "c"}


def test_noise_that_was_not_begun_or_failed_is_not_gone_on_with() -> None:
    session = SecureSession(SecureSumConfig("mpc", parties=1, dimension=2, bound=1.0, sigma=0.5))
    server = next(role for role in session._roles.values() if isinstance(role, NoiseServer))
    with pytest.raises(ProtocolError, match="not begun"):
        server.sample_noise(0, b"frame")
    assert server.sample_noise(0, None)
    with pytest.raises(ProtocolError, match="frame"):
        server.sample_noise(0, b"frame")
    with pytest.raises(ProtocolError, match="not begun"):
        server.sample_noise(0, b"frame")


REPLY = Message("sum", {"round": 3}, {"total": np.arange(4.0)})
QUESTION = bytes(range(32))


def test_the_last_reply_is_repeated_by_a_later_process(tmp_path: Path) -> None:
    first = LastReply(tmp_path / "a.reply", "a")
    first.keep(bytes(32), 2, Message("sum", {"round": 2}, {"total": np.arange(9.0)}))
    first.keep(QUESTION, 3, REPLY)
    with pytest.raises(DataError, match="another process answers for a"):
        LockedAppendFile(tmp_path / "a.reply", "answers for a")
    first.close()
    again = LastReply(tmp_path / "a.reply", "a")
    assert again.to(QUESTION, 4) is None
    assert again.to(bytes(32), 3) is None
    reply = again.to(QUESTION, 3)
    assert reply is not None
    assert reply.arrays["total"].tolist() == [0.0, 1.0, 2.0, 3.0]
    again.forget()
    assert not (tmp_path / "a.reply").exists()


@pytest.mark.parametrize("length", [0, 10, 47, 60, 120])
def test_a_reply_torn_by_a_crash_is_no_reply(length: int, tmp_path: Path) -> None:
    kept = LastReply(tmp_path / "a.reply", "a")
    kept.keep(QUESTION, 3, REPLY)
    kept.close()
    whole = (tmp_path / "a.reply").read_bytes()
    assert length < len(whole)
    (tmp_path / "a.reply").write_bytes(whole[:length])
    assert LastReply(tmp_path / "a.reply", "a").to(QUESTION, 3) is None
