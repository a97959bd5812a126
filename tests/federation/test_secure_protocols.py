"""Secure sums from end to end: exact without noise, the right variance with it, for every mode."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.special import chdtrc

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream
from quietgrad.federation import (
    NoiseServer,
    SecureSession,
    SecureSumConfig,
    TranscriptRecorder,
    secure_sum,
    threat_model,
)
from quietgrad.federation.secure.channel import FrameType, NoiseShare
from quietgrad.federation.secure.discrete_gaussian import encode
from quietgrad.federation.secure.terms import Mode

MODES: tuple[Mode, ...] = ("masks", "servers", "mpc")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [2, 3, 7, 20])
def test_sum_without_noise_is_exact(mode: Mode, m: int) -> None:
    rng = np.random.default_rng(m)
    vectors = rng.normal(size=(m, 37)) * 0.05
    terms = SecureSumConfig(mode, parties=m, dimension=37, bound=1.0, sigma=0.0)
    words = [encode(v, dimension=37, bound=1.0, step=terms.step).view(np.int64) for v in vectors]
    whole = [sum(int(w[k]) for w in words) for k in range(37)]
    session = SecureSession(terms)
    for _ in range(2):
        total = session.sum(vectors)
        assert (total / terms.step).astype(np.int64).tolist() == whole
        np.testing.assert_allclose(total, vectors.sum(0), atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_edges_of_the_bound_do_not_wrap(mode: Mode, sigma: float) -> None:
    bound = 2.0**20
    vectors = [[s * bound, 0.0] for s in (1, 1, 1, -1, 1)]
    session = SecureSession(SecureSumConfig(mode, parties=5, dimension=2, bound=bound, sigma=sigma), seed=1)
    np.testing.assert_allclose(session.sum(vectors), [3 * bound, 0.0], atol=10.0 * sigma + 1e-6)


MASKS = [(2, 1), (2, 2), (3, 2), (5, 1), (5, 3), (5, 4), (10, 7), (20, 19)]
SPREAD: list[tuple[Mode, int, dict[str, int], float]] = [
    *(("masks", m, {"honest": h, "colluders": min(1, m - h)}, m / h) for m, h in MASKS),
    *(("servers", 3, {"servers": k}, float(k)) for k in (2, 3, 5)),
    *(("mpc", m, {}, 1.0026) for m in (1, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "parties", "extra", "factor"), SPREAD)
def test_the_sum_has_the_stated_variance(mode: Mode, parties: int, extra: Any, factor: float) -> None:
    """m/h times σ² with masks, K times with servers, hardly more than once inside the computation."""
    d = 40_000
    terms = SecureSumConfig(mode, parties=parties, dimension=d, bound=1.0, sigma=3.0, **extra)
    assert terms.variance_factor == pytest.approx(factor, rel=1e-3)
    noise = SecureSession(terms, seed=100 * parties + len(extra)).sum([np.zeros(d)] * parties)
    assert abs(noise.mean()) < 4.9 * 3.0 * math.sqrt(factor / d)  # false alarms 1e-6
    assert abs(float((noise**2).mean()) / (9.0 * terms.variance_factor) - 1) < 4.9 * math.sqrt(2.0 / d)


@pytest.mark.parametrize(
    ("mode", "extra", "known"),
    [
        ("masks", {"honest": 4}, [2]),
        ("masks", {"honest": 2, "colluders": 3}, [0, 1, 4]),
        ("servers", {}, [6]),
        ("servers", {"servers": 3}, [5, 7]),
        ("mpc", {}, [5]),
        ("mpc", {}, [7]),
    ],
)
def test_noise_the_adversary_does_not_know_is_all_of_sigma(
    mode: Mode, extra: dict[str, Any], known: list[int]
) -> None:
    """Take away what the allowed coalition drew itself: σ² is left, neither less nor more (false alarm 1e-6)."""
    d = 40_000
    terms = SecureSumConfig(mode, parties=5, dimension=d, bound=1.0, sigma=1.0, **extra)
    total = SecureSession(terms, seed=9).sum(np.zeros((5, d))) / terms.step
    for role in known:
        total -= NoiseShare(terms, role, 9).draw(0).view(np.int64)
    left = float((total**2).mean()) / terms.noise_units**2
    assert abs(left - 1) < 4.9 * math.sqrt(2.0 / d)


@pytest.mark.parametrize("mode", MODES)
def test_seeded_noise_repeats_and_fresh_noise_does_not(mode: Mode) -> None:
    def run(seed: int | None) -> list[float]:
        return secure_sum(np.zeros((3, 20)), noise_multiplier=1.0, mode=mode, seed=seed).tolist()  # type: ignore[no-any-return]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)


@pytest.mark.parametrize(
    ("vectors", "extra", "error", "match"),
    [
        ([], {}, DataError, "non-empty"),
        ([[]], {}, DataError, "non-empty"),
        ([[[1.0]]], {}, DataError, "one-dimensional"),
        ([[1.0, 2.0], [1.0]], {}, DataError, "vector 1: must have shape"),
        ([[1.0], [math.nan]], {}, DataError, "vector 1"),
        ([[1.0], [1.0]], {"noise_multiplier": -1.0}, ValueError, "noise_multiplier=-1.0"),
        ([[1.0], [1.0]], {"noise_multiplier": math.nan}, ValueError, "noise_multiplier=nan"),
        ([[1.0], [1.0]], {"clip": 0.0}, ValueError, "bound=0.0"),
        ([[1.0], [1.0]], {"mode": "yao"}, ValueError, "mode='yao'"),
        ([[1.0]], {}, ValueError, "between 2 and 10000"),
    ],
)
def test_bad_requests_are_refused(
    vectors: list[list[float]], extra: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        secure_sum(vectors, **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_threat_model_states_the_numbers_of_the_terms(mode: Mode) -> None:
    terms = SecureSumConfig(mode, parties=7, dimension=123, bound=1.0, sigma=1.0)
    text = threat_model(terms).text()
    assert f"variance {terms.variance_factor:.4g} times" in text
    assert ("semi-honest" in text.lower()) == (mode == "mpc")
    silent = threat_model(SecureSumConfig(mode, parties=7, dimension=123, bound=1.0, sigma=0.0)).text()
    assert "not differentially private" in silent


def test_importing_the_room_is_light() -> None:
    code = (
        "import sys, quietgrad.federation as f; f.secure_sum; "
        "print({'scipy', 'torch', 'sklearn'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_threat_model_of_many_parties_states_its_probabilities() -> None:
    terms = SecureSumConfig("masks", parties=1000, dimension=1, bound=1.0, sigma=1.0, honest=899)
    rows = dict(threat_model(terms).rows)
    assert f"probability {terms.graph.failure:.2g}" in rows["neighbours"]
    assert "semi-honest" in rows["server"]
    assert "the server alone" in rows["to see one party's vector"]
    few = dict(threat_model(SecureSumConfig("masks", parties=10, dimension=1, bound=1.0, sigma=1.0, honest=7)).rows)
    assert "opens no sum of fewer than 7 honest parties" in few["server"]


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
    servers = [role for role in session._roles.values() if isinstance(role, NoiseServer)]
    assert len(servers) == 3
    for server in servers:
        # Draw 2 of round 0 is the sign (draws 0 and 1 are the columns and the uniform words).
        parts = [server._streams[peer].uint64(2, D * 4 // 64) for peer in (server.previous, server.next)]
        for guess in (parts[0], parts[1], parts[0] ^ parts[1]):
            bits = np.unpackbits(guess.view(np.uint8), bitorder="little").astype(bool)[large]
            agree = float((bits == signs).mean())
            assert abs(agree - 0.5) < 5.4 * 0.5 / np.sqrt(signs.size)


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_parties_see_nothing_of_each_other(mode: Mode) -> None:
    _, view = run(mode, INPUTS[0])
    kinds = {s.kind for s in view.seen if s.role.startswith("party")}
    relayed = {FrameType.DELIVER, FrameType.ENVELOPE, FrameType.SURVIVORS} if mode == "masks" else set()
    assert kinds == relayed


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_no_stream_serves_twice_over_rounds_and_restarts(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[tuple[bytes, int]]] = defaultdict(list)
    original = SecureStream._read

    def recorded(self: SecureStream, block: int, size: int, counter: int = 0) -> npt.NDArray[np.uint8]:
        drawn[self.label].append((bytes(self._aes.key), block))
        return original(self, block, size, counter)

    monkeypatch.setattr(SecureStream, "_read", recorded)
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
