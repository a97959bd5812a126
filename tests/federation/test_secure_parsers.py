"""Bytes from the network: whatever they are, a role refuses them by name or goes on; it never crashes.

Two kinds of fuzzing: raw bytes (an outsider), and arbitrary payloads in authentic frames (a malicious peer).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.federation import (
    Identity,
    MaskingParty,
    MaskingServer,
    NoiseServer,
    ProtocolError,
    Roster,
    SumServer,
)
from quietgrad.federation.secure.channel import Channel, FrameType
from quietgrad.federation.secure.identity import WITNESS_BYTES, DropoutError, pack_members, read_hello
from quietgrad.federation.secure.secret_sharing import SHARE_BYTES, ShareCommitments
from quietgrad.federation.transport.tls_connection import receive
from tests.federation.test_secure_faults import D, Masked, Shared

PAYLOADS = st.one_of(
    st.binary(max_size=600),
    st.integers(0, 600).map(bytes),
    st.tuples(st.sampled_from([(0, 1, 2), (0, 1), (0,), (1, 2)]), st.binary(max_size=400)).map(
        lambda p: pack_members(p[0], 3) + p[1]
    ),
)
FUZZ = settings(max_examples=60, deadline=None)


def masked() -> tuple[list[MaskingParty], MaskingServer]:
    world = Masked(honest=1, parties=3)
    return world.parties, world.server


@FUZZ
@given(st.binary(max_size=400))
def test_raw_bytes_are_refused_by_a_channel(data: bytes) -> None:
    channel = Channel(b"k" * 32, bytes(16), 0, 1, "peer", limit=200)
    with pytest.raises(ProtocolError, match="peer"):
        channel.open(FrameType.SHARE, 0, data)


@FUZZ
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 255))
def test_mutated_frames_are_refused_by_a_channel(payload: bytes, position: int, value: int) -> None:
    sender = Channel(b"k" * 32, bytes(16), 1, 0, "us", limit=200)
    receiver = Channel(b"k" * 32, bytes(16), 0, 1, "peer", limit=200)
    frame = bytearray(sender.seal(FrameType.SHARE, 3, payload))
    position %= len(frame)
    if frame[position] == value:
        assert receiver.open(FrameType.SHARE, 3, bytes(frame)) == payload
        return
    frame[position] = value
    with pytest.raises(ProtocolError, match="peer"):
        receiver.open(FrameType.SHARE, 3, bytes(frame))


@FUZZ
@given(st.one_of(st.binary(max_size=200), st.binary(min_size=128, max_size=128).map(lambda b: b"QGH2\0\0" + b)))
def test_raw_bytes_are_refused_as_a_hello(data: bytes) -> None:
    roster = Roster.of([Identity("a", bytes(31) + b"\1")])
    with pytest.raises(ProtocolError):
        read_hello(data, roster, bytes(32))


@FUZZ
@given(PAYLOADS)
def test_a_malicious_server_cannot_crash_a_party(payload: bytes) -> None:
    parties, server = masked()
    frames = {p.me: p.prepare(0) for p in parties}
    with pytest.raises(ProtocolError):
        parties[0].deliver(0, server._seal(0, FrameType.DELIVER, 0, payload))
    delivery = server.relay(0, frames)
    for p in parties:
        p.deliver(0, delivery[p.me])
    server.survivors(0, {p.me: p.submit(0, np.zeros(D)) for p in parties})
    with contextlib.suppress(ProtocolError):
        answer = parties[0].reveal(0, server._seal(0, FrameType.SURVIVORS, 0, payload))
        assert len(server._open(0, FrameType.REVEAL, 0, answer)) == 3 * SHARE_BYTES


@FUZZ
@given(PAYLOADS, st.sampled_from(["prepare", "masked", "reveal"]))
def test_a_malicious_party_cannot_crash_the_server(payload: bytes, phase: str) -> None:
    parties, server = masked()
    frames = {p.me: p.prepare(0) for p in parties}
    if phase == "prepare":
        frames[1] = parties[1]._seal(3, FrameType.PREPARE, 0, payload)
        assert set(server.relay(0, frames)) == {0, 2}
        assert list(server.left_out) == ["clinic-1"]
        return
    delivery = server.relay(0, frames)
    for p in parties:
        p.deliver(0, delivery[p.me])
    submitted = {p.me: p.submit(0, np.zeros(D)) for p in parties}
    if phase == "masked":
        submitted[1] = parties[1]._seal(3, FrameType.MASKED, 0, payload)
        if len(payload) != 8 * D:
            with pytest.raises(DropoutError, match="clinic-1"):
                server.survivors(0, submitted)
            assert list(server.left_out) == ["clinic-1"]
        return
    ask = server.survivors(0, submitted)
    answers = {p.me: p.reveal(0, ask[p.me]) for p in parties}
    answers[1] = parties[1]._seal(3, FrameType.REVEAL, 0, payload)
    with pytest.raises(ProtocolError, match="clinic"):
        server.finish(0, answers)


@FUZZ
@given(st.one_of(st.just(bytes(32)), st.binary(min_size=32, max_size=32)), st.binary(max_size=80))
def test_a_malicious_envelope_is_refused_by_the_name_of_its_author(key: bytes, shares: bytes) -> None:
    parties, server = masked()
    frames = {p.me: p.prepare(0) for p in parties}
    payload = server._open(1, FrameType.PREPARE, 0, frames[1])
    size, head = 32 + 2 * SHARE_BYTES + WITNESS_BYTES, ShareCommitments.size(3)
    evil = parties[1]._seal(0, FrameType.ENVELOPE, 0, (key + shares + bytes(size))[:size])
    frames[1] = parties[1]._seal(3, FrameType.PREPARE, 0, payload[:head] + evil + payload[head + len(evil) :])
    delivery = server.relay(0, frames)
    with pytest.raises(ProtocolError, match="clinic-1: dealt shares that are not those committed to, or server"):
        parties[0].deliver(0, delivery[0])


def test_a_round_key_of_low_order_is_refused_by_the_name_of_its_author(monkeypatch: pytest.MonkeyPatch) -> None:
    """The "shared" secret would be known to everyone."""
    parties, server = masked()
    seal = MaskingParty._seal

    def degenerate(self: MaskingParty, peer: int, kind: FrameType, t: int, payload: bytes) -> bytes:
        bad = self is parties[1] and kind is FrameType.ENVELOPE
        return seal(self, peer, kind, t, bytes(32) + payload[32:] if bad else payload)

    monkeypatch.setattr(MaskingParty, "_seal", degenerate)
    delivery = server.relay(0, {p.me: p.prepare(0) for p in parties})
    with pytest.raises(ProtocolError, match="clinic-1: round key is degenerate"):
        parties[0].deliver(0, delivery[0])


@FUZZ
@given(PAYLOADS)
def test_malicious_shares_lists_and_partials_cannot_crash_a_server(payload: bytes) -> None:
    world = Shared(SumServer)
    parties, (first, last) = world.parties, world.servers

    def receive(t: int) -> None:
        shares = [p.share(t, np.zeros(D)) for p in parties]
        first.receive(t, {i: s[first.me] for i, s in enumerate(shares)})

    for server, right in ((first, 32), (last, 8 * D)):
        if len(payload) != right:
            server.receive(0, {1: parties[1]._seal(server.me, FrameType.SHARE, 0, payload)})
            assert list(server.left_out) == ["clinic-1"]
    receive(1)
    if payload != bytes([1, 1, 1]):
        with pytest.raises(ProtocolError):
            first.partial(1, {last.me: last._seal(first.me, FrameType.PRESENT, 1, payload)})
    receive(2)
    first.partial(2, {last.me: last._seal(first.me, FrameType.PRESENT, 2, bytes([1, 1, 1]))})
    if len(payload) != 8 * D:
        with pytest.raises(ProtocolError, match="server-1"):
            first.finish(2, {last.me: last._seal(first.me, FrameType.PARTIAL, 2, payload)})


@FUZZ
@given(PAYLOADS)
def test_a_malicious_neighbour_cannot_crash_the_noise_computation(payload: bytes) -> None:
    first, second, _ = Shared(NoiseServer).servers
    assert isinstance(first, NoiseServer)
    computation = first.prepare(0)
    next(computation)
    with contextlib.suppress(ProtocolError):
        frame = computation.send(second._seal(first.me, FrameType.NOISE, 0, payload))
        assert len(payload) == 8 * 2 * 2
        assert frame


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_a_socket_reads_any_bytes_without_crashing(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError, ProtocolError):
            while True:
                assert len(receive(ours, most=200, deadline=None)[1]) <= 200


def test_a_socket_takes_no_memory_for_an_absurd_length() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack("<IB", 2**32 - 1, 0))
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match="the limit is 1000"):
                receive(ours, most=1000, deadline=None)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()
