"""What goes wrong between parties: every fault is refused by name, dropouts are recovered or abort cleanly."""

from __future__ import annotations

import os
from collections.abc import Callable, Set

import numpy as np
import pytest

from quietgrad.federation import (
    DropoutError,
    Identity,
    MaskingParty,
    MaskingServer,
    NoiseServer,
    ProtocolError,
    Roster,
    SecureSession,
    SecureSumConfig,
    SharingParty,
    SumServer,
)
from quietgrad.federation.secure.channel import Channel, FrameType
from quietgrad.federation.secure.identity import SurvivorAttestation, pack_members, read_hello, write_hello
from quietgrad.federation.secure.secret_sharing import ShareCommitments, reconstruct, split

D = 6
NONE: Set[int] = frozenset()


class Masked:
    """Five parties and a server, driven message by message."""

    def __init__(self, honest: int = 2, sigma: float = 0.0, parties: int = 5) -> None:
        self.terms = SecureSumConfig("masks", parties=parties, dimension=D, bound=10.0, sigma=sigma, honest=honest)
        people = [Identity(f"clinic-{i}") for i in range(parties)] + [Identity("server")]
        roster, run = Roster.of(people), os.urandom(16)
        self.parties = [MaskingParty(p, roster, self.terms, run) for p in people[:-1]]
        self.server = MaskingServer(people[-1], roster, self.terms, run)
        self.server.meet([p.hello for p in self.parties])
        for i, hellos in self.server.introductions().items():
            self.parties[i].meet(hellos)
        self.vectors = np.random.default_rng(0).normal(size=(parties, D))

    def question(self, to: int, t: int, survivors: tuple[int, ...]) -> bytes:
        """What a server says that claims these survivors, signed as it must be."""
        packed = pack_members(survivors, self.terms.parties)
        signature = SurvivorAttestation.sign(self.server._identity, self.server.context, t, packed)
        return self.server._seal(to, FrameType.SURVIVORS, t, packed + signature)

    def submitted(self, t: int) -> dict[int, bytes]:
        """Everybody up to the masked vectors."""
        delivery = self.server.relay(t, {p.me: p.prepare(t) for p in self.parties})
        for p in self.parties:
            p.deliver(t, delivery[p.me])
        return {p.me: p.submit(t, self.vectors[p.me]) for p in self.parties}

    def run(
        self, t: int, at_prepare: Set[int] = NONE, at_submit: Set[int] = NONE, at_reveal: Set[int] = NONE
    ) -> None:
        """One round in which the given parties go silent at the given phase; checks the sum of the rest."""
        live = [p for p in self.parties if p.me not in at_prepare]
        delivery = self.server.relay(t, {p.me: p.prepare(t) for p in live})
        for p in live:
            p.deliver(t, delivery[p.me])
        live = [p for p in live if p.me not in at_submit]
        ask = self.server.survivors(t, {p.me: p.submit(t, self.vectors[p.me]) for p in live})
        answers = {p.me: p.reveal(t, ask[p.me]) for p in live if p.me not in at_reveal}
        total = self.server.finish(t, answers)
        np.testing.assert_allclose(total, self.vectors[[p.me for p in live]].sum(0), atol=1e-9)


@pytest.mark.parametrize("silent", [(), ({0},), (NONE, {4}), (NONE, NONE, {2}), (NONE, {1}), ({3},)], ids=str)
def test_masks_recover_a_party_that_drops_in_any_phase(silent: tuple[Set[int], ...]) -> None:
    world = Masked(honest=3)
    world.run(0, *silent)
    world.run(1)  # and everyone may come back in the next round


@pytest.mark.parametrize("phase", ["prepare", "submit", "reveal"])
def test_masks_abort_by_name_when_too_many_drop(phase: str) -> None:
    world = Masked(honest=4)
    silent = {"prepare": {"at_prepare": {1}}, "submit": {"at_submit": {1}}, "reveal": {"at_reveal": {1, 2}}}
    with pytest.raises(DropoutError, match="clinic-1") as caught:
        world.run(0, **silent[phase])
    assert "clinic-1" in caught.value.missing


def test_a_party_refuses_a_sum_with_too_few_others() -> None:
    """A server that claims most of the others dropped, to read one vector, gets nothing."""
    world = Masked(honest=4)
    world.server.survivors(0, world.submitted(0))
    question = world.question(0, 0, (0, 1))
    with pytest.raises(DropoutError, match="noise needs 5"):
        world.parties[0].reveal(0, question)


def test_a_party_answers_once_and_never_gives_both_secrets() -> None:
    world = Masked(honest=2)
    ask = world.server.survivors(0, world.submitted(0))
    world.parties[0].reveal(0, ask[0])
    second = world.question(0, 0, (0, 1, 2, 3))
    with pytest.raises(ProtocolError, match="round 0 was not prepared, or is over"):
        world.parties[0].reveal(0, second)


def test_rounds_never_go_back() -> None:
    world = Masked(honest=2)
    world.run(3)
    for t in (3, 2):
        with pytest.raises(ProtocolError, match="already prepared"):
            world.parties[0].prepare(t)


def test_the_next_round_may_be_prepared_during_one_and_aborted_rounds_are_forgotten() -> None:
    world = Masked(honest=4)
    parties, server = world.parties, world.server

    def prepare(t: int) -> None:
        delivery = server.relay(t, {p.me: p.prepare(t) for p in parties})
        for p in parties:
            p.deliver(t, delivery[p.me])

    def finish(t: int) -> None:
        ask = server.survivors(t, {p.me: p.submit(t, world.vectors[p.me]) for p in parties})
        total = server.finish(t, {p.me: p.reveal(t, ask[p.me]) for p in parties})
        np.testing.assert_allclose(total, world.vectors.sum(0), atol=1e-9)

    prepare(0)
    prepare(7)
    finish(0)
    finish(7)
    for t in (8, 9, 10):
        prepare(t)
    with pytest.raises(ProtocolError, match="round 8 was not prepared, or is over"):
        parties[0].submit(8, np.zeros(D))
    finish(9)


def test_a_mask_is_sealed_once_and_only_with_one_vector_in_it() -> None:
    world = Masked(honest=4)
    delivery = world.server.relay(0, {p.me: p.prepare(0) for p in world.parties})
    party = world.parties[0]
    party.deliver(0, delivery[0])
    with pytest.raises(ProtocolError, match="no vector to be sealed"):
        party.sealed(0)
    party.add(0, world.vectors[0])
    with pytest.raises(ProtocolError, match="already submitted"):
        party.add(0, world.vectors[0])
    party.sealed(0)
    with pytest.raises(ProtocolError, match="no vector to be sealed"):
        party.sealed(0)


Frames = dict[int, bytes]


def flip(frame: bytes, position: int) -> bytes:
    out = bytearray(frame)
    out[position] ^= 1
    return bytes(out)


MALFORMED = {
    "bit in the header": lambda frame: flip(frame, 0),
    "bit in the run": lambda frame: flip(frame, 21),
    "bit in the text": lambda frame: flip(frame, 45),
    "bit in the tag": lambda frame: flip(frame, -1),
    "short": lambda frame: frame[:-1],
    "long": lambda frame: frame + b"\0",
    "empty": lambda frame: b"",
    "header alone": lambda frame: frame[:46],
}


@pytest.mark.parametrize("phase", ["prepare", "submit", "reveal"])
@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_of_one_party_is_her_absence(phase: str, spoil: Callable[[bytes], bytes]) -> None:
    """The others finish the round: she is left out of the sum, or only of its opening, and named."""
    world = Masked(honest=3)
    server, everyone = world.server, range(5)

    def sent(frames: Frames, now: str) -> Frames:
        return {i: spoil(frame) if i == 2 and now == phase else frame for i, frame in frames.items()}

    delivery = server.relay(0, sent({i: world.parties[i].prepare(0) for i in everyone}, "prepare"))
    for i, frame in delivery.items():
        world.parties[i].deliver(0, frame)
    vectors = {i: world.parties[i].submit(0, world.vectors[i]) for i in delivery}
    questions = server.survivors(0, sent(vectors, "submit"))
    total = server.finish(0, sent({i: world.parties[i].reveal(0, q) for i, q in questions.items()}, "reveal"))
    summed = [i for i in everyone if i != 2 or phase == "reveal"]
    np.testing.assert_allclose(total, world.vectors[summed].sum(0), atol=1e-9)
    assert list(server.left_out) == ["clinic-2"]
    world.run(1)  # and she may come back in the next round


def test_a_bit_flipped_by_the_relay_inside_an_envelope_is_noticed() -> None:
    world = Masked()
    server = world.server
    frames = {p.me: p.prepare(0) for p in world.parties}
    payload = bytearray(server._open(1, FrameType.PREPARE, 0, frames[1]))
    payload[ShareCommitments.size(5) + 100] ^= 1  # in the envelope from clinic-1 to clinic-0
    frames[1] = world.parties[1]._seal(5, FrameType.PREPARE, 0, bytes(payload))
    delivery = server.relay(0, frames)
    with pytest.raises(ProtocolError, match="clinic-1"):
        world.parties[0].deliver(0, delivery[0])


def channels(limit: int = 64) -> tuple[Channel, Channel]:
    run = bytes(16)
    return (
        Channel(b"k" * 32, run, 0, 1, "bob", limit=limit),
        Channel(b"k" * 32, run, 1, 0, "alice", limit=limit),
    )


def test_replay_reorder_and_reflection_are_refused() -> None:
    alice, bob = channels()
    first, second = alice.seal(FrameType.SHARE, 1, b"one"), alice.seal(FrameType.SHARE, 1, b"two")
    assert bob.open(FrameType.SHARE, 1, second) == b"two"
    for frame in (second, first):
        with pytest.raises(ProtocolError, match=r"alice: frame \d is a replay or out of order"):
            bob.open(FrameType.SHARE, 1, frame)
    with pytest.raises(ProtocolError, match="from or for another role"):
        alice.open(FrameType.SHARE, 1, alice.seal(FrameType.SHARE, 1, b"mine"))


@pytest.mark.parametrize(
    ("key", "run", "kind", "t", "match"),
    [
        (b"k", b"r", FrameType.SHARE, 1, "another run"),
        (b"x", b"\0", FrameType.SHARE, 1, "another key"),
        (b"k", b"\0", FrameType.SHARE, 2, "round 2"),
        (b"k", b"\0", FrameType.PARTIAL, 1, "kind 9"),
    ],
)
def test_frames_are_bound_to_run_key_round_and_kind(
    key: bytes, run: bytes, kind: FrameType, t: int, match: str
) -> None:
    alice = Channel(key * 32, run * 16, 0, 1, "bob", limit=64)
    with pytest.raises(ProtocolError, match=f"alice: .*{match}"):
        channels()[1].open(FrameType.SHARE, 1, alice.seal(kind, t, b"text"))


def test_a_forked_channel_refuses_to_reuse_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    alice, _ = channels()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked"):
        alice.seal(FrameType.SHARE, 1, b"text")


def test_hellos_with_other_terms_keys_or_names_are_refused() -> None:
    people = [Identity("a"), Identity("b"), Identity("server")]
    roster, run = Roster.of(people), os.urandom(16)
    terms = SecureSumConfig("masks", parties=2, dimension=3, bound=1.0, sigma=1.0)
    weaker = SecureSumConfig("masks", parties=2, dimension=3, bound=1.0, sigma=0.1)
    a = MaskingParty(people[0], roster, terms, run)
    for their_terms, their_run in ((weaker, run), (terms, os.urandom(16))):
        with pytest.raises(ProtocolError, match="b: hello is for another run, other terms"):
            a.meet([MaskingParty(people[1], roster, their_terms, their_run).hello])
    impostor = Identity("b")
    forged = write_hello(impostor, roster, a.context, bytes(32))
    with pytest.raises(ProtocolError, match="b: hello is not signed"):
        a.meet([forged])
    with pytest.raises(ValueError, match="another key under this name"):
        MaskingParty(impostor, roster, terms, run)
    with pytest.raises(ProtocolError, match="degenerate"):
        a.meet([write_hello(people[1], roster, a.context, bytes(32))])
    good = MaskingParty(people[1], roster, terms, run).hello
    a.meet([good, a.hello])
    with pytest.raises(ProtocolError, match="twice"):
        a.meet([good])
    with pytest.raises(ProtocolError, match="server: has not said hello"):
        a.prepare(0)
    with pytest.raises(ProtocolError, match="bytes"):
        read_hello(good[:-1], roster, a.context)


class Shared:
    """Three parties and their servers, driven message by message."""

    def __init__(self, kind: type[SumServer], quorum: int = 2) -> None:
        mode = "mpc" if kind is NoiseServer else "servers"
        self.terms = SecureSumConfig(mode, parties=3, dimension=D, bound=10.0, sigma=0.5, quorum=quorum)  # type: ignore[arg-type]
        count = self.terms.server_count
        people = [Identity(f"clinic-{i}") for i in range(3)] + [Identity(f"server-{k}") for k in range(count)]
        roster, run = Roster.of(people), os.urandom(16)
        self.parties = [SharingParty(p, roster, self.terms, run) for p in people[:3]]
        self.servers = [kind(p, roster, self.terms, run, seed=1) for p in people[3:]]
        hellos = [r.hello for r in (*self.parties, *self.servers)]
        for role in (*self.parties, *self.servers):
            role.meet(hellos)

    def prepare(self, t: int) -> None:
        if self.terms.mode == "mpc":
            servers = [server for server in self.servers if isinstance(server, NoiseServer)]
            frames = [server.sample_noise(t, None) for server in servers]
            while all(frames):  # i's frame goes to i − 1
                frames = [server.sample_noise(t, frames[(i + 1) % 3]) for i, server in enumerate(servers)]

    def receive(self, t: int, frames: dict[int, Frames]) -> dict[int, Frames]:
        return {s.me: s.receive(t, {i: f[s.me] for i, f in frames.items() if s.me in f}) for s in self.servers}

    def partial(self, t: int, present: dict[int, Frames]) -> Frames:
        out = {}
        for s in self.servers:
            frame = s.partial(t, {k: f[s.me] for k, f in present.items() if k != s.me})
            if frame is not None:
                out[s.me] = frame
        return out


KINDS = pytest.mark.parametrize("kind", [SumServer, NoiseServer])


@KINDS
def test_a_party_that_reached_only_some_servers_is_left_out(kind: type[SumServer]) -> None:
    world = Shared(kind)
    world.prepare(0)
    frames = {p.me: p.share(0, np.full(D, 1.0 + p.me)) for p in world.parties}
    del frames[1][world.servers[0].me]
    total = world.servers[0].finish(0, world.partial(0, world.receive(0, frames)))
    np.testing.assert_allclose(total, np.full(D, 4.0), atol=8 * 0.5 * 1.5)


@KINDS
@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("where", ["first", "last", "all"])
def test_a_malformed_share_is_its_senders_absence(
    kind: type[SumServer], spoil: Callable[[bytes], bytes], where: str
) -> None:
    world = Shared(kind)
    world.prepare(0)
    frames = {p.me: p.share(0, np.full(D, 1.0 + p.me)) for p in world.parties}
    to = {"first": world.servers[:1], "last": world.servers[-1:], "all": world.servers}[where]
    frames[1] |= {server.me: spoil(frames[1][server.me]) for server in to}
    total = world.servers[0].finish(0, world.partial(0, world.receive(0, frames)))
    np.testing.assert_allclose(total, np.full(D, 4.0), atol=8 * 0.5 * 1.5)
    assert [list(server.left_out) for server in world.servers] == [["clinic-1"] * (s in to) for s in world.servers]


@KINDS
def test_servers_abort_below_the_quorum_and_without_a_server(kind: type[SumServer]) -> None:
    world = Shared(kind, quorum=3)
    world.prepare(0)
    present = world.receive(0, {p.me: p.share(0, np.zeros(D)) for p in world.parties[:2]})
    with pytest.raises(DropoutError, match="clinic-2: missing; 2 present, 3 needed"):
        world.partial(0, present)
    world.prepare(1)
    present = world.receive(1, {p.me: p.share(1, np.zeros(D)) for p in world.parties})
    with pytest.raises(DropoutError, match="server-1"):
        world.servers[0].partial(1, {})


@KINDS
def test_a_server_gives_one_partial_sum_per_round(kind: type[SumServer]) -> None:
    world = Shared(kind)
    world.prepare(0)
    shares = {p.me: p.share(0, np.zeros(D)) for p in world.parties}
    present = world.receive(0, shares)
    world.partial(0, present)
    with pytest.raises(ProtocolError, match="already given"):
        world.partial(0, present)
    with pytest.raises(ProtocolError, match="already taken"):
        world.servers[0].receive(0, {})
    with pytest.raises(ProtocolError, match="already shared"):
        world.parties[0].share(0, np.zeros(D))


@KINDS
def test_a_tampered_share_or_partial_names_its_sender(kind: type[SumServer]) -> None:
    world = Shared(kind)
    world.prepare(0)
    shares = {p.me: p.share(0, np.zeros(D)) for p in world.parties}
    bad = {i: {k: flip(f, -1) if i == 1 else f for k, f in frames.items()} for i, frames in shares.items()}
    world.receive(0, bad)
    assert all(list(server.left_out) == ["clinic-1"] for server in world.servers)
    world.prepare(1)
    partials = world.partial(1, world.receive(1, {p.me: p.share(1, np.zeros(D)) for p in world.parties}))
    last = world.servers[-1]
    with pytest.raises(ProtocolError, match=last.name):
        world.servers[0].finish(1, partials | {last.me: flip(partials[last.me], 50)})


def test_a_tampered_message_of_the_noise_computation_names_its_sender() -> None:
    world = Shared(NoiseServer)
    servers = [s for s in world.servers if isinstance(s, NoiseServer)]
    computations = [s.prepare(0) for s in servers]
    frames = [next(c) for c in computations]
    with pytest.raises(ProtocolError, match="server-1"):
        computations[0].send(flip(frames[1], -1))


def test_noise_must_be_prepared_before_a_sum_and_only_once() -> None:
    world = Shared(NoiseServer)
    with pytest.raises(ProtocolError, match="not prepared"):
        world.partial(0, world.receive(0, {p.me: p.share(0, np.zeros(D)) for p in world.parties}))
    world.prepare(1)
    with pytest.raises(ProtocolError, match="already prepared"):
        world.prepare(1)


@pytest.mark.parametrize(("mode", "extra"), [("masks", {"honest": 1}), ("servers", {"quorum": 2})])
def test_a_session_goes_on_after_an_aborted_round(mode: str, extra: dict[str, int]) -> None:
    terms = SecureSumConfig(mode, parties=4, dimension=2, bound=1.0, sigma=0.0, **extra)  # type: ignore[arg-type]
    session = SecureSession(terms)
    with pytest.raises(DropoutError):
        session.sum([[0.5, 0.0], None, None, None])
    np.testing.assert_allclose(session.sum([[0.5, 0.0], [0.0, 0.5], [0.1, 0.1], None]), [0.6, 0.6], atol=1e-9)
    assert session.round == 1


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (1, 4), (3, 5), (20, 20)])
def test_shamir_opens_with_any_threshold_of_shares(threshold: int, holders: int) -> None:
    secret = b"\xff" * 32
    shares = split(secret, threshold, holders)
    rng = np.random.default_rng(0)
    for _ in range(5):
        chosen = rng.permutation(holders)[:threshold].tolist()
        assert reconstruct({k: shares[k] for k in chosen}, threshold) == secret
    with pytest.raises(ValueError, match="at least"):
        reconstruct(dict(enumerate(shares[: threshold - 1])), threshold)


def test_shamir_shares_below_the_threshold_are_uniform() -> None:
    # The top byte of a share of a fixed secret: 256 equally likely values; χ² at a false alarm of 1e-6.
    from scipy.special import chdtrc

    tops = [split(bytes(32), 2, 2)[0][1] for _ in range(5000)]
    observed = np.bincount(tops, minlength=256)
    expected = 5000 / 256
    assert float(chdtrc(255, ((observed - expected) ** 2 / expected).sum())) > 1e-6
