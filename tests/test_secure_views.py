"""What each role saw: uniform given the output; no stream ever serves twice.

Views come from fresh keys, so these tests are random; each check has a false-alarm rate of at most 1e-7.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter, defaultdict

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import chdtrc

from quietgrad.federation import NoiseServer, SecureSession, SecureSumConfig, TranscriptRecorder
from quietgrad.privacy.rng import SecureStream
from quietgrad.secure.channel import FrameType
from quietgrad.secure.local_session import _Shared
from quietgrad.secure.terms import Mode

D = 4096
FALSE_ALARM = 1e-7
# Inputs as different as they can be: a view that depends on them would show.
INPUTS = [np.zeros((3, D)), np.full((3, D), 1.0 / 64.0)]


def is_uniform(data: bytes | npt.NDArray[np.uint64]) -> bool:
    """χ² of the bytes against the uniform distribution, and of the XOR of neighbouring words."""
    octets = np.frombuffer(data if isinstance(data, bytes) else data.tobytes(), np.uint8)
    words = octets[: octets.size // 8 * 8].view(np.uint64)
    for values in (octets, (words[1:] ^ words[:-1]).view(np.uint8)):
        observed = np.bincount(values, minlength=256)
        expected = values.size / 256
        if float(chdtrc(255, ((observed - expected) ** 2 / expected).sum())) < FALSE_ALARM:
            return False
    return True


def words_of(payload: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(payload, "<u8").astype(np.uint64)


def run(mode: Mode, vectors: npt.NDArray[np.float64], rounds: int = 1) -> tuple[SecureSession, TranscriptRecorder]:
    view = TranscriptRecorder()
    session = SecureSession(SecureSumConfig(mode, parties=3, dimension=D, bound=1.0, sigma=1.0), view=view)
    for _ in range(rounds):
        session.sum(vectors)
    return session, view


@pytest.mark.parametrize("vectors", INPUTS, ids=["zeros", "constants"])
def test_the_server_of_a_masked_sum_sees_uniform_vectors(vectors: npt.NDArray[np.float64]) -> None:
    _, view = run("masks", vectors, rounds=2)
    masked = [words_of(s.payload) for s in view.of("server", FrameType.MASKED)]
    assert len(masked) == 6
    for k, y in enumerate(masked):
        assert is_uniform(y)
        # Any two of the three parties, and one party in two rounds, are still uniform together.
        for other in masked[:k]:
            assert is_uniform(y + other)
            assert is_uniform(y - other)


def test_the_uniformity_test_would_notice_a_missing_mask() -> None:
    view = TranscriptRecorder()
    session = SecureSession(SecureSumConfig("servers", parties=3, dimension=D, bound=1.0, sigma=1.0), view=view)
    released = np.rint(session.sum(INPUTS[1]) / session.terms.step).astype(np.int64)
    assert is_uniform(view.of("server-1", FrameType.PARTIAL)[0].payload)
    assert not is_uniform(released.tobytes()), "the released sum is small numbers, not uniform words"


@pytest.mark.parametrize("vectors", INPUTS, ids=["zeros", "constants"])
@pytest.mark.parametrize("mode", ["servers", "mpc"])
def test_one_server_sees_uniform_shares(mode: Mode, vectors: npt.NDArray[np.float64]) -> None:
    session, view = run(mode, vectors)
    last = f"server-{session.terms.server_count}"
    shares = [words_of(s.payload) for s in view.of(last, FrameType.SHARE)]
    assert len(shares) == 3
    assert all(is_uniform(share) for share in shares)
    assert is_uniform(shares[0] + shares[1] + shares[2])
    partials = [words_of(s.payload) for s in view.of("server-1", FrameType.PARTIAL)]
    assert all(is_uniform(p) for p in partials)


def test_servers_of_the_noise_computation_see_uniform_messages() -> None:
    session, view = run("mpc", INPUTS[0])
    for k in range(3):
        seen = view.of(f"server-{k + 1}", FrameType.NOISE)
        assert len(seen) == 13
        assert is_uniform(b"".join(s.payload for s in seen))
    assert len({s.payload for s in view.of("server-1", FrameType.NOISE)[:-1]}) == 12
    assert session.terms.mode == "mpc"


def test_what_one_server_holds_does_not_tell_the_sign_of_the_noise() -> None:
    """The two components of the sign bits that a server knows agree with the true signs half of the time."""
    view = TranscriptRecorder()
    terms = SecureSumConfig("mpc", parties=1, dimension=D * 4, bound=1.0, sigma=1.0)
    session = SecureSession(terms, view=view)
    noise = session.sum([np.zeros(D * 4)])
    large = np.abs(noise) > 0.5
    signs = noise[large] < 0
    assert isinstance(session._roles, _Shared)
    for server in session._roles.servers:
        assert isinstance(server, NoiseServer)
        # Draw 2 of round 0 is the sign (draws 0 and 1 are the columns and the uniform words).
        parts = [server._streams[peer].uint64(2, D * 4 // 64) for peer in (server.previous, server.next)]
        for guess in (parts[0], parts[1], parts[0] ^ parts[1]):
            bits = np.unpackbits(guess.view(np.uint8), bitorder="little").astype(bool)[large]
            agree = float((bits == signs).mean())
            assert abs(agree - 0.5) < 5.4 * 0.5 / np.sqrt(signs.size)


def test_two_servers_together_do_know_it() -> None:
    """The counter-check: with the third component the sign is known, as the threat model says."""
    session = SecureSession(SecureSumConfig("mpc", parties=1, dimension=D, bound=1.0, sigma=1.0))
    noise = session.sum([np.zeros(D)])
    assert isinstance(session._roles, _Shared)
    first, second, _ = session._roles.servers
    assert isinstance(first, NoiseServer)
    assert isinstance(second, NoiseServer)
    streams = [first._streams[first.previous], first._streams[first.next], second._streams[second.next]]
    sign = np.bitwise_xor.reduce([s.uint64(2, D // 64) for s in streams])
    bits = np.unpackbits(sign.view(np.uint8), bitorder="little").astype(bool)
    large = np.abs(noise) > 0.5
    assert (bits == (noise < 0))[large].all()


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_parties_see_nothing_of_each_other(mode: Mode) -> None:
    _, view = run(mode, INPUTS[0])
    kinds = {s.kind for s in view.seen if s.role.startswith("party")}
    relayed = {FrameType.DELIVER, FrameType.ENVELOPE, FrameType.SURVIVORS} if mode == "masks" else set()
    assert kinds == relayed


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_no_stream_serves_twice_over_rounds_and_restarts(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    original = SecureStream.uint64

    def recorded(self: SecureStream, block: int, size: int) -> npt.NDArray[np.uint64]:
        drawn[self.label].append((bytes(self._aes.key), block))
        return original(self, block, size)

    monkeypatch.setattr(SecureStream, "uint64", recorded)
    vectors = INPUTS[0][:, :64]
    for _ in range(3):
        session = SecureSession(SecureSumConfig(mode, parties=3, dimension=64, bound=1.0, sigma=1.0))
        for _ in range(4):
            session.sum(vectors)
    # A masking or sharing stream is read at its two ends; a share of noise by its owner alone.
    for label, reads in drawn.items():
        ends = 1 if label == "noise share" else 2
        assert set(Counter(reads).values()) == {ends}, label
    every = [pair for reads in drawn.values() for pair in set(reads)]
    assert len(every) == len(set(every))
    expected = {
        "masks": {"noise share", "pair mask", "self mask"},
        "servers": {"noise share", "share"},
        "mpc": {"noise share", "share", "replicated"},
    }
    assert set(drawn) == expected[mode]


def test_processes_never_share_a_stream() -> None:
    code = (
        "import numpy as np\n"
        "from quietgrad.federation import SecureSession, SecureSumConfig, TranscriptRecorder\n"
        "from quietgrad.secure.channel import FrameType\n"
        "view = TranscriptRecorder()\n"
        "terms = SecureSumConfig('masks', parties=2, dimension=4, bound=1.0, sigma=0.0)\n"
        "SecureSession(terms, view=view).sum(np.zeros((2, 4)))\n"
        "print(*(s.payload.hex() for s in view.of('server', FrameType.MASKED)))\n"
    )
    out = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert len({*out[0], *out[1]}) == 4
