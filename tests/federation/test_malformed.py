"""One party whose messages are malformed is absent: a quorum finishes the run, in every mode and at every step.

The rest of the federation is real: plans, messages, secure sums and rounds. One party's replies are altered on the
way out, as a broken or hostile party would send them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.secure import secret_sharing
from quietgrad.federation.secure.masking import MaskingParty
from quietgrad.federation.simulation import InProcess, assemble, train
from quietgrad.federation.transport import Bytes
from quietgrad.federation.wire import Array, Message, decode, encode
from quietgrad.tables.losses import Logistic
from tests.federation.malformed_party import HOSTILE
from tests.federation.talk import people, toml_plan
from tests.federation.test_network import ended, folder, plan_text, start

__all__ = ["folder", "start"]

STEPS = 4
ALGORITHM = qg.DPGD(steps=STEPS, learning_rate=1.0)
BUDGET = qg.Budget(1.0, 1e-5)
BAD = "party-2"
Change = Callable[[Message, Message], Message | bytes]

MODES: dict[str, dict[str, Any]] = {
    "curator": {"trust": "curator"},
    "local": {"trust": "local"},
    "masks": {"trust": "secure", "secure": "masks"},
    "servers": {"trust": "secure", "secure": "servers"},
    "mpc": {"trust": "secure", "secure": "mpc"},
}
STAGES = {
    "curator": ("ask",),
    "local": ("ask",),
    "masks": ("hello", "meet", "prepare", "deliver", "ask", "reveal"),
    "servers": ("hello", "meet", "ask"),
    "mpc": ("hello", "meet", "ask"),
}


def arrays(edit: Callable[[Array], Array]) -> Change:
    """Every array of a reply altered."""
    return lambda asked, reply: Message(
        reply.kind, reply.fields, {name: edit(value) for name, value in reply.arrays.items()}
    )


def flipped(value: Array) -> Array:
    raw = bytearray(value.tobytes())
    raw[-1] ^= 1
    return np.frombuffer(bytes(raw), value.dtype).reshape(value.shape)


CHANGES: dict[str, Change] = {
    "one bit": arrays(flipped),
    "short": arrays(lambda value: value[:-1]),
    "long": arrays(lambda value: np.concatenate([value, value[:1]])),
    "very long": arrays(lambda value: np.resize(value, 200_000)),
    "empty": arrays(lambda value: value[:0]),
    "another type": arrays(lambda value: value.astype(np.float32)),
    "two axes": arrays(lambda value: np.stack([value, value])),
    "not finite": arrays(lambda value: np.full(len(value), np.nan)),
    "infinite": arrays(lambda value: np.full(len(value), np.inf)),
    "out of range": arrays(lambda value: np.full(len(value), 1e300)),
    "no arrays": lambda asked, reply: Message(reply.kind, reply.fields),
    "other names": lambda asked, reply: Message(reply.kind, reply.fields, {"x": np.zeros(3)}),
    "other kind": lambda asked, reply: Message("sum", {}, {}),
    "odd fields": lambda asked, reply: Message(reply.kind, {"round": {"a": [1]}, "run": None}, reply.arrays),
    "no message": lambda asked, reply: b"\0" * 40,
    "nothing": lambda asked, reply: b"",
    "refusal by the plan": lambda asked, reply: Message("refused", {"code": "plan", "reason": "I do not like it"}),
    "refusal": lambda asked, reply: Message("refused", {"code": "protocol", "reason": "no"}),
    "stranger": lambda asked, reply: Message("refused", {"code": "stranger", "reason": "who?"}),
    "accusation": lambda asked, reply: Message("refused", {"code": "protocol", "reason": "party-4: lies"}),
}


def federation(change: Change, stage: str, mode: str, **settings: Any) -> tuple[Any, FederatedCurator]:
    """Five parties of which four are a quorum; the second one's answers at one stage are altered."""
    settings = {"budget": BUDGET, "quorum": 4, **MODES[mode], **settings}
    plan, made = assemble(ALGORITHM, Logistic(), people(5), **settings)

    def answer(data: Bytes) -> Bytes:
        asked = decode(bytes(data))
        reply = made.handlers[BAD](data)
        if asked.kind != stage:
            return reply
        said = change(asked, decode(bytes(reply)))
        return said if isinstance(said, bytes) else encode(said)

    handlers = {**made.handlers, BAD: answer}
    return plan, FederatedCurator(Logistic(), InProcess(handlers), identity=made.identity, roster=made.roster)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("mode", "stage"), [(mode, stage) for mode in MODES for stage in STAGES[mode]])
def test_a_malformed_reply_is_its_senders_absence(mode: str, stage: str, change: str) -> None:
    plan, curator = federation(CHANGES[change], stage, mode)
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert np.isfinite(result.params).all()
    assert result.privacy.releases == {"gradient": STEPS}  # no round was lost
    assert result.details["lost_rounds"] == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_random_edits_of_one_partys_messages_cost_no_round(mode: str, seed: int) -> None:
    """Bytes of any message of one party are changed, cut or added, before its checksum and after it."""
    rng = np.random.default_rng(seed)

    def edit(raw: bytes) -> bytes:
        out = bytearray(raw)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, len(out) + 1))
            kind = rng.integers(0, 3)
            if kind == 0 and at < len(out):
                out[at] = int(rng.integers(0, 256))
            elif kind == 1:
                del out[at : at + int(rng.integers(1, 20))]
            else:
                out[at:at] = rng.bytes(int(rng.integers(1, 20)))
        return bytes(out)

    plan, made = assemble(ALGORITHM, Logistic(), people(5), budget=BUDGET, quorum=4, **MODES[mode])

    def answer(data: Bytes) -> Bytes:
        asked, reply = decode(bytes(data)).kind, bytes(made.handlers[BAD](data))
        if asked in ("open", "close") or rng.random() < 0.3:
            return reply
        if rng.random() < 0.3:
            return edit(reply)
        said = decode(reply)
        values = {name: np.frombuffer(edit(value.tobytes()), np.uint8) for name, value in said.arrays.items()}
        return encode(Message(said.kind, said.fields, values))

    handlers = {**made.handlers, BAD: answer}
    curator = FederatedCurator(Logistic(), InProcess(handlers), identity=made.identity, roster=made.roster)
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert result.privacy.releases == {"gradient": STEPS}


def test_false_envelopes_are_found_before_a_question_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party deals shares that are not those she committed to: all refuse because of her, at no charge."""
    prepare, honest = MaskingParty.prepare, secret_sharing.deal

    def false(*args: Any, **sizes: Any) -> Any:
        shares, commitments = honest(*args, **sizes)
        return [(key, bytes(33)) for key, _ in shares], commitments

    def lying(self: MaskingParty, t: int) -> bytes:
        with monkeypatch.context() as patch:
            if self.name == BAD:
                patch.setattr(secret_sharing, "deal", false)
            return prepare(self, t)

    monkeypatch.setattr(MaskingParty, "prepare", lying)
    plan, curator = federation(lambda asked, reply: reply, "none", "masks")
    told: list[str] = []
    curator.tell = told.append
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert result.privacy.releases == {"gradient": STEPS}
    assert any("begun anew (party-2 dealt shares that are not those committed" in words for words in told)


def test_shares_of_nothing_cost_one_spare_round_and_not_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party commits to shares that open no secret. That shows when the sum is opened; then she is left out."""
    prepare, honest = MaskingParty.prepare, secret_sharing.split

    def lying(self: MaskingParty, t: int) -> bytes:
        with monkeypatch.context() as patch:
            if self.name == BAD:
                patch.setattr(secret_sharing, "split", lambda s, t, n: honest(b"\xff" * 32, t, n))
            return prepare(self, t)

    monkeypatch.setattr(MaskingParty, "prepare", lying)
    plan, curator = federation(lambda asked, reply: reply, "none", "masks", spare=1)
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert result.details["lost_rounds"] == 1
    assert result.privacy.releases == {"gradient": STEPS + 1}


def test_rounds_that_a_quorum_completed_are_not_called_lost() -> None:
    plan, curator = federation(CHANGES["nothing"], "ask", "curator")
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert result.details["lost_rounds"] == 0
    assert any("party-2" in note for note in result.privacy.notes)


@pytest.mark.parametrize(("secure", "how"), [("masks", "short"), ("servers", "altered")])
def test_processes_finish_without_the_party_that_sends_malformed_vectors(
    secure: str, how: str, folder: Path, start: Any
) -> None:
    """Five parties over TLS, no spare round, a quorum of four."""
    text = toml_plan(
        dict.fromkeys("abcde", 40), f'trust = "secure"\nsecure = "{secure}"\nquorum = 4', steps=3, features=3,
        coordinator='address = "127.0.0.1:7443"\ntimeout = 40\ngrace = 40',
    )  # fmt: skip
    Path("plan.toml").write_text(plan_text(text))
    assert main(["federate", "provision", "plan.toml", "--out", "keys"]) == 0
    rng = np.random.default_rng(0)
    running = [start("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--wait", "60")]
    helpers = ("server-1", "server-2") if secure == "servers" else ()
    running += [start("server", "plan.toml", "--keys", f"keys/{name}") for name in helpers]
    for name in "abcde":
        X = rng.normal(size=(40, 3))
        np.savez(f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
        program = (HOSTILE, how) if name == "b" else ("-m", "quietgrad")
        words = ("party", "plan.toml", "--keys", f"keys/{name}", "--data", f"{name}.npz", "--out", name)
        running.append(start(*words, program=program))
    outcomes = [ended(process) for process in running]
    assert [code for code, *_ in outcomes] == [0] * len(running), outcomes
    result = qg.load("model")
    assert result.details["lost_rounds"] == 0
    assert any("b " in note for note in result.privacy.notes)
