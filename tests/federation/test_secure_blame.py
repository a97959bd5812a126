"""Who lied: only what is proved is said of someone, and nobody hides behind another.

Hostile dealers, holders, servers and sums, in the protocol itself and in a whole federation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.federation import ProtocolError, SecureSession, SecureSumConfig
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.members import MaskingMember, SharingMember
from quietgrad.federation.rounds import proved_faults
from quietgrad.federation.secure import secret_sharing
from quietgrad.federation.secure.channel import FrameType
from quietgrad.federation.secure.graph import GRAPHS_PER_RELEASE
from quietgrad.federation.secure.identity import (
    DropoutError,
    SumOutOfBoundsError,
    SurvivorAttestation,
    pack_members,
)
from quietgrad.federation.secure.masking import MaskingParty, MaskingServer
from quietgrad.federation.simulation import assemble, train
from quietgrad.federation.transport import Bytes
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.tables.losses import Logistic
from tests.federation.faults import Fault, Faulty
from tests.federation.talk import people, say
from tests.federation.test_secure_faults import Masked

FALSE = b"\1" + bytes(32)


def opened(world: Masked, t: int = 0, **silent: set[int]) -> Any:
    """The rest of a round, after everybody's vectors but those of ``submit`` were sent."""
    frames = {i: f for i, f in world.submitted(t).items() if i not in silent.get("submit", set())}
    asks = world.server.survivors(t, frames)
    gone = silent.get("reveal", set())
    return world.server.finish(t, {i: world.parties[i].reveal(t, q) for i, q in asks.items() if i not in gone})


# --- holders ------------------------------------------------------------------------------------------------------


def falsify(party: MaskingParty, dealer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``party`` return something else than the share that ``dealer`` dealt her."""
    deliver = party.deliver

    def lying(t: int, frame: bytes) -> None:
        deliver(t, frame)
        party._rounds[t].shares[dealer] = (FALSE, FALSE)

    monkeypatch.setattr(party, "deliver", lying)


def test_a_false_share_names_who_returned_it_and_the_sum_is_opened_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Masked(honest=2)
    falsify(world.parties[2], 1, monkeypatch)
    np.testing.assert_allclose(opened(world), world.vectors.sum(0), atol=1e-9)
    assert world.server.proved == {"clinic-2": "returned a false share of clinic-1's secret"}


def test_too_many_false_shares_abort_by_the_liars_names_and_not_by_the_victims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Masked(honest=2)  # four of five shares open a secret
    for i in (2, 3):
        falsify(world.parties[i], 1, monkeypatch)
    with pytest.raises(ProtocolError, match=r"^clinic-2, clinic-3: returned false shares; of clinic-1's"):
        opened(world)
    assert set(world.server.proved) == {"clinic-2", "clinic-3"}


# --- dealers ------------------------------------------------------------------------------------------------------


def test_a_dealer_whose_shares_are_not_her_hashes_is_caught_before_there_are_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Masked(honest=2)
    prepared = {p.me: p.prepare(0) for p in world.parties if p.me != 1}
    honest = secret_sharing.deal

    def bad(*args: Any, **sizes: Any) -> Any:
        shares, commitments = honest(*args, **sizes)
        return [(key, FALSE) for key, _ in shares], commitments

    monkeypatch.setattr(secret_sharing, "deal", bad)
    prepared[1] = world.parties[1].prepare(0)
    delivery = world.server.relay(0, prepared)
    for i in (0, 2, 3, 4):
        with pytest.raises(ProtocolError, match=r"clinic-1: dealt shares that are not those committed"):
            world.parties[i].deliver(0, delivery[i])


def test_a_dealer_who_commits_to_shares_of_nothing_is_proved_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """All her shares have their hashes; they lie on no polynomial of her secret. No holder is named."""
    world = Masked(honest=2)
    prepared = {p.me: p.prepare(0) for p in world.parties if p.me != 1}
    split = secret_sharing.split
    monkeypatch.setattr(secret_sharing, "split", lambda secret, t, n: [FALSE[:-1] + bytes([k]) for k in range(n)])
    prepared[1] = world.parties[1].prepare(0)
    monkeypatch.setattr(secret_sharing, "split", split)
    delivery = world.server.relay(0, prepared)
    for p in world.parties:
        p.deliver(0, delivery[p.me])
    asks = world.server.survivors(0, {p.me: p.submit(0, world.vectors[p.me]) for p in world.parties})
    with pytest.raises(ProtocolError, match=r"^clinic-1: dealt false shares: they have her hashes"):
        world.server.finish(0, {p.me: p.reveal(0, asks[p.me]) for p in world.parties})
    assert list(world.server.proved) == ["clinic-1"]


def test_hashes_must_be_signed_for_this_run_and_round() -> None:
    world = Masked(honest=2)
    frames = {p.me: p.prepare(0) for p in world.parties}
    old = world.server._open(1, FrameType.PREPARE, 0, frames[1])
    later = {p.me: p.prepare(1) for p in world.parties if p.me != 1}
    later[1] = world.parties[1]._seal(5, FrameType.PREPARE, 1, old)  # last round's statement again
    assert set(world.server.relay(1, later)) == {0, 2, 3, 4}
    assert world.server.left_out == {"clinic-1": "did not sign the hashes of her shares"}


# --- servers ------------------------------------------------------------------------------------------------------


def test_survivors_must_be_signed() -> None:
    world = Masked(honest=2)
    world.server.survivors(0, world.submitted(0))
    question = world.question(0, 0, (0, 1, 2, 3, 4))
    payload = world.parties[0]._channel(5).open(FrameType.SURVIVORS, 0, question)
    unsigned = world.server._seal(0, FrameType.SURVIVORS, 0, payload[:-64] + bytes(64))
    with pytest.raises(ProtocolError, match="server: did not sign the survivors of round 0"):
        world.parties[0].reveal(0, unsigned)


# --- sums that cannot be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_a_mask_that_does_not_cancel_is_refused_by_the_name_of_the_check(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Masked(honest=2, sigma=sigma)
    deliver = world.parties[3].deliver

    def spoiled(t: int, frame: bytes) -> None:
        deliver(t, frame)
        state = world.parties[3]._rounds[t]
        assert state.mask is not None
        state.mask += np.uint64(1 << 61)

    monkeypatch.setattr(world.parties[3], "deliver", spoiled)
    with pytest.raises(SumOutOfBoundsError, match=r"^headroom check: the sum has length"):
        opened(world)


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_the_check_lets_every_honest_sum_pass(mode: Any) -> None:
    """The largest data that can be, and noise: 200 sums, of which one fails with probability 2e-10."""
    session = SecureSession(SecureSumConfig(mode, parties=3, dimension=2, bound=1.0, sigma=0.25), seed=0)
    for _ in range(200):
        session.sum([[1.0, 0.0]] * 3)


# --- federations --------------------------------------------------------------------------------------------------

ALGORITHM = qg.DPGD(steps=3, learning_rate=1.0)
BUDGET = qg.Budget(1.0, 1e-5)


Change = Callable[[Message, Message], Message]


def federation(
    change: dict[str, Change], faults: list[Fault] | None = None, **settings: Any
) -> tuple[Any, FederatedCurator]:
    """A federation in which some parties' answers are changed on the way out."""
    settings = {"budget": BUDGET, "trust": "secure", "secure": "masks", **settings}
    plan, made = assemble(ALGORITHM, Logistic(), people(5), **settings)

    def wrapped(name: str) -> Callable[[Bytes], Bytes]:
        handle, alter = made.handlers[name], change[name]

        def answer(data: Bytes) -> Bytes:
            asked = decode(bytes(data))
            return encode(alter(asked, decode(bytes(handle(data)))))

        return answer

    handlers = {**made.handlers, **{name: wrapped(name) for name in change}}
    curator = FederatedCurator(
        Logistic(), Faulty(handlers, faults or []), identity=made.identity, roster=made.roster
    )
    return plan, curator


def refusing(reason: str, kind: str = "prepare") -> Change:
    refusal = Message("refused", {"code": "protocol", "reason": reason})
    return lambda asked, reply: refusal if asked.kind == kind else reply


@pytest.mark.parametrize("secure", ["masks", "servers", "mpc"])
def test_a_party_does_not_hide_behind_one_who_is_absent(secure: str) -> None:
    """party-4 is away, which the quorum allows; party-2 refuses and says it is because of party-4."""
    away = [Fault("party-4", "leave", 0, last=10**6)]
    lie = {"party-2": refusing("party-4: has not said hello in this run", "ask")}
    plan, curator = federation(lie, away, secure=secure, quorum=4)
    with pytest.raises(DropoutError) as caught:
        train(ALGORITHM, curator, plan, np.zeros(3))
    assert "party-2" in caught.value.missing


def test_accusations_are_proved_only_if_more_accuse_than_may_collude() -> None:
    said = "refuses: c: dealt a false share"
    assert proved_faults({"a": said, "b": said, "d": "did not answer within 9 s"}, colluders=1) == {
        "d": "did not answer within 9 s",
        "c": "dealt a false share (so say a, b)",
    }
    assert proved_faults({"a": said}, colluders=1) == {"a": "or c: dealt a false share"}


@pytest.mark.parametrize("secure", ["masks", "servers", "mpc"])
def test_an_impossible_sum_updates_no_model(secure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One party ignores the clip, within the protocol's own bound: the plan's sizes tell that it is impossible."""
    kind = MaskingMember if secure == "masks" else SharingMember
    submit = kind.submit

    def loud(self: Any, message: Message, vector: Any) -> Message:
        return submit(self, message, (lambda: vector() + 1e5) if self.name == "party-2" else vector)

    monkeypatch.setattr(kind, "submit", loud)
    plan, curator = federation({}, secure=secure, spare=1)
    told: list[str] = []
    curator.tell = told.append
    steps: list[Any] = []
    with pytest.raises(DropoutError, match="headroom check"):
        train(ALGORITHM, curator, plan, np.zeros(3), callback=steps.append)
    assert any("headroom check the sum has length" in words for words in told)
    assert [progress.step for progress in steps] == [0]
    monkeypatch.undo()
    plan, curator = federation({}, secure=secure)
    train(ALGORITHM, curator, plan, np.zeros(3), callback=steps.append)
    assert len(steps) >= 5


def test_a_false_share_is_noted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    reveal = MaskingParty.reveal

    def lying(self: MaskingParty, t: int, frame: bytes) -> bytes:
        if self.name == "party-3":
            self._rounds[t].shares[0] = (FALSE, FALSE)
        return reveal(self, t, frame)

    monkeypatch.setattr(MaskingParty, "reveal", lying)
    plan, curator = federation({}, quorum=5)
    result = train(ALGORITHM, curator, plan, np.zeros(3))
    assert any("party-3 returned a false share of party-1's secret" in note for note in result.privacy.notes)


def test_a_coordinator_cannot_ask_for_new_neighbours_until_it_likes_them() -> None:
    """Each set-up draws neighbours; δ pays for eight drawings per release, and a party makes no more."""
    plan, made = assemble(ALGORITHM, Logistic(), people(5), budget=BUDGET, trust="secure", secure="masks")
    party, most = made.handlers["party-1"], GRAPHS_PER_RELEASE * ALGORITHM.steps
    say(party, "open", run="r", plan=plan.digest)
    kinds = [say(party, "hello", run="r", dim=3, epoch=f"{t:032x}").kind for t in range(most + 1)]
    assert kinds == ["hello"] * most + ["refused"]


def test_beginning_anew_does_not_hide_two_lists_of_survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the parties are told another list, the round is called lost, new keys are made: it is found out."""
    signed = MaskingServer.survivors
    lied: list[int] = []

    def equivocating(self: MaskingServer, t: int, frames: Any) -> dict[int, bytes]:
        questions = signed(self, t, frames)
        if lied:
            return questions
        lied.append(t)
        packed = pack_members((0, 1, 2, 3), 5)
        other = packed + SurvivorAttestation.sign(self._identity, self.context, t, packed)
        return {i: self._seal(i, FrameType.SURVIVORS, t, other) if i < 3 else q for i, q in questions.items()}

    monkeypatch.setattr(MaskingServer, "survivors", equivocating)
    plan, curator = federation({}, quorum=4, spare=2)
    told: list[str] = []
    curator.tell = told.append
    with pytest.raises(DropoutError):
        train(ALGORITHM, curator, plan, np.zeros(3))
    assert any("signed two lists of survivors of round 0" in words for words in told)
