"""The random source: addressing, independence, the laws of its numbers, key files."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger.keys import KeyFile, KeyFileError
from quietgrad.core.noise.grid import NoiseStream, add_discretized_gaussian
from quietgrad.core.noise.rng import SecureStream, fresh_key, inversion_table, seed_key

FALSE_ALARM = 1e-6


def stream(seed: int = 0, label: str = "test") -> NoiseStream:
    return NoiseStream(seed_key(seed), label)


def ks_rejects(sample: npt.NDArray[np.float64], cdf: npt.NDArray[np.float64]) -> bool:
    """Kolmogorov–Smirnov at the stated false-alarm rate; ``cdf`` is evaluated at the sorted sample."""
    n = sample.size
    grid = np.arange(n + 1) / n
    distance = max(float(np.max(grid[1:] - cdf)), float(np.max(cdf - grid[:-1])))
    return bool(special.kolmogorov(distance * math.sqrt(n)) < FALSE_ALARM)


def variance_rejects(sample: npt.NDArray[np.float64]) -> bool:
    """Two-sided χ² test that the sample is N(0, 1)."""
    tail = special.gammaincc(sample.size / 2, float(np.sum(sample**2)) / 2)
    return bool(min(tail, 1 - tail) < FALSE_ALARM / 2)


@given(
    block=st.integers(0, 2**63),
    n=st.integers(0, 200),
    label=st.text(max_size=20),
    seed=st.integers(-(2**70), 2**70),
)
def test_the_same_address_gives_the_same_numbers(block: int, n: int, label: str, seed: int) -> None:
    one, two = stream(seed, label), stream(seed, label)
    assert one.bytes(block, n) == two.bytes(block, n)
    assert one.bytes(block, n + 8)[:n] == two.bytes(block, n)
    np.testing.assert_array_equal(one.normal(block, n), two.normal(block, n))


def test_every_part_of_the_address_matters() -> None:
    numbers = {
        SecureStream(key, label).bytes(block, 16)
        for key in (seed_key(0), seed_key(1), fresh_key())
        for label in ("noise", "noise/", "batches", "")
        for block in (0, 1, 2, 2**63)
    }
    assert len(numbers) == 3 * 4 * 4


def test_stream_is_aes_in_counter_mode() -> None:
    """Against the cipher itself: AES-256 of (block, counter), and reading at single counters."""
    import hmac

    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = hmac.digest(seed_key(3), b"quietgrad stream 1\0x", "sha256")
    blocks = b"".join((5).to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(40000))
    expected = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(blocks)
    assert stream(3, "x").bytes(5, len(expected)) == expected
    words = np.frombuffer(expected, "<u8")
    np.testing.assert_array_equal(stream(3, "x").uint64(5, words.size), words)
    np.testing.assert_array_equal(stream(3, "x").at(5, np.arange(40000)), words[::2])
    np.testing.assert_array_equal(stream(3, "x").at(5, np.array([[7], [2**64 - 1]], np.uint64))[0], words[14:15])


def test_normals_pass_and_wrong_scales_fail() -> None:
    x = stream().normal(0, 200_000)
    assert not variance_rejects(x)
    assert variance_rejects(0.95 * x)
    assert variance_rejects(1.05 * x)
    ordered = np.sort(x)
    assert not ks_rejects(ordered, special.ndtr(ordered))
    for wrong in (0.95, 1.05):
        assert ks_rejects(ordered, special.ndtr(wrong * ordered))
    assert ks_rejects(ordered, special.ndtr(ordered - 0.03))
    assert abs(x.mean()) * math.sqrt(x.size) < special.ndtri(1 - FALSE_ALARM / 2)


def test_inverse_cdf_is_as_accurate_as_the_docstring_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the whole path, word to number, against 40-digit arithmetic, far tail included."""
    rng = np.random.default_rng(1)
    words = np.concatenate(
        [
            rng.integers(0, 2**64, 400, dtype=np.uint64),
            (rng.integers(0, 2**63, 63, dtype=np.uint64) >> np.arange(63, dtype=np.uint64)) * np.uint64(2),
            np.array([0, 1, 2, 3, 2**64 - 1, 2**64 - 2, 2**63, 2**63 - 1], np.uint64),
        ]
    )

    class Fixed:
        def update_into(self, zeros: memoryview, out: memoryview) -> None:
            out[:] = words.view(np.uint8).data

    monkeypatch.setattr(NoiseStream, "_open", lambda self, block, counter=0: Fixed())
    numbers = stream().normal(0, words.size)
    more = stream().at(0, np.uint64(2**63) + np.arange(words.size, dtype=np.uint64))
    assert np.isfinite(numbers).all()
    assert np.abs(numbers).max() > 9.0
    with mpmath.workdps(40):
        for word, rest, x in zip(words.tolist(), more.tolist(), numbers.tolist(), strict=True):
            k = word >> 1
            fraction = (mpmath.mpf(rest) + 0.5) / mpmath.mpf(2) ** 64 if k < 2**48 else 0.5
            p = (k + fraction) / mpmath.mpf(2) ** 64
            # A Newton step from x in 40 digits: the distance to the exact quantile.
            magnitude = -abs(mpmath.mpf(x))
            error = abs((mpmath.ncdf(magnitude) - p) / mpmath.npdf(magnitude))
            spacing = p * mpmath.mpf(2) ** -49 / mpmath.npdf(magnitude)  # of neighbouring outputs, halved
            assert error + (spacing if 2**48 <= k < 2**53 else 0) <= 1e-15 * (abs(x) + 0.2)
            assert x == 0.0 or (x < 0) == (word % 2 == 0)


def test_the_far_tail_has_no_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws with the same smallest word still differ, by the words that continue them."""

    class Zeros:
        def update_into(self, zeros: memoryview, out: memoryview) -> None:
            out[:] = zeros

    monkeypatch.setattr(NoiseStream, "_open", lambda self, block, counter=0: Zeros())
    x = stream().normal(0, 20_000)
    assert np.unique(x).size == x.size
    assert x.max() < special.ndtri(2.0**-64)
    # Given k = 0 the tail probability is uniform on (0, 2⁻⁶⁴).
    ordered = np.sort(x)
    assert not ks_rejects(ordered, special.ndtr(ordered) * 2.0**64)
    assert ks_rejects(ordered, special.ndtr(ordered) * 2.0**64 * 0.95)


def test_exponentials_pass_and_wrong_scales_fail() -> None:
    x = np.sort(stream().exponential(0, 200_000))
    assert not ks_rejects(x, -np.expm1(-x))
    assert ks_rejects(x, -np.expm1(-1.05 * x))
    assert ks_rejects(x, -np.expm1(-0.95 * x))


@given(st.lists(st.integers(0, 2**80), min_size=1, max_size=30).filter(any))
def test_inversion_table_is_exact_to_the_last_bit(weights: list[int]) -> None:
    table = [0, *inversion_table(weights).tolist(), 2**64]
    for weight, low, high in zip(weights, table[:-1], table[1:], strict=True):
        assert abs((high - low) * sum(weights) - weight * 2**64) <= sum(weights)


@pytest.mark.parametrize("key", [b"", b"x" * 31, "x" * 32, None])
def test_bad_keys_are_refused(key: bytes) -> None:
    with pytest.raises(ValueError, match="must be 32 bytes"):
        SecureStream(key, "noise")


def test_bad_addresses_are_refused() -> None:
    for block in (-1, 2**64):
        with pytest.raises(ValueError, match="block="):
            stream().uint64(block, 1)
    with pytest.raises(ValueError, match="must be ≥ 0"):
        stream().uint64(0, -1)
    with pytest.raises(ValueError, match="must be ≥ 0"):
        stream().at(0, [-1])
    with pytest.raises(TypeError, match="whole numbers"):
        stream().at(0, [0.5])
    with pytest.raises(TypeError, match="seed="):
        seed_key(1.5)  # type: ignore[arg-type]


def test_the_key_is_not_printed() -> None:
    assert repr(stream(0, "noise")) == "NoiseStream(label='noise')"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "keys"


def test_key_file_lives_and_dies(state: Path) -> None:
    key = KeyFile.create("a9a.2024-01_x")
    path = state / "a9a.2024-01_x.key"
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert KeyFile.load("a9a.2024-01_x") == key
    other_name = path.with_name("hard-link")
    os.link(path, other_name)
    KeyFile.destroy("a9a.2024-01_x")
    KeyFile.destroy("a9a.2024-01_x")  # already gone: nothing to do
    assert not path.exists()
    assert other_name.read_bytes() != key  # overwritten, not only unlinked
    with pytest.raises(KeyFileError, match="has no key"):
        KeyFile.load("a9a.2024-01_x")


def test_key_file_defaults_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIETGRAD_STATE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KeyFile.directory() == tmp_path / ".local/state/quietgrad/keys"


def test_key_file_refusals(state: Path) -> None:
    key = KeyFile.create("run")
    with pytest.raises(KeyFileError, match="has a key already"):
        KeyFile.create("run")
    assert KeyFile.load("run") == key
    (state / "run.key").chmod(0o640)
    with pytest.raises(KeyFileError, match="chmod 600"):
        KeyFile.load("run")
    (state / "run.key").chmod(0o600)
    (state / "run.key").write_bytes(key[:10])
    with pytest.raises(KeyFileError, match="10 bytes"):
        KeyFile.load("run")
    state.chmod(0o755)
    with pytest.raises(QuietgradError, match="chmod 700"):
        KeyFile.create("next")
    for name in ("", "../run", "a/b", ".hidden", "x" * 129):
        with pytest.raises(ValueError, match="run_id="):
            KeyFile.create(name)


def test_key_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "file"))
    with pytest.raises(KeyFileError, match="QUIETGRAD_STATE"):
        KeyFile.create("run")
    with pytest.raises(KeyFileError, match="cannot read"):
        KeyFile.load("run")
    with pytest.raises(KeyFileError, match="cannot destroy"):
        KeyFile.destroy("run")


def test_compiled_inversion_is_scipys_bit_for_bit() -> None:
    """Long vectors are inverted by compiled loops, short ones by scipy: noise must not depend on which it was."""
    from scipy.special import ndtri

    from quietgrad.core.compiled import PIECE, lower_quantiles

    edge = 0.13533528323661269189  # of the tail
    random = np.random.default_rng(0)
    p = np.concatenate(
        [
            random.random(300_000) * 0.5,
            0.5 * 10.0 ** -(random.random(100_000) * 38),  # to where 127 bits end; beyond 8 is another formula
            [edge, np.nextafter(edge, 1), np.nextafter(edge, 0), 0.5 - 2**-54, 2.0**-128],
        ]
    )
    found = p.copy()
    lower_quantiles(found)
    np.testing.assert_array_equal(found.view(np.uint64), ndtri(p).view(np.uint64))
    assert len(p) % PIECE  # the last piece is not whole


def test_pieces_of_a_long_vector_are_the_vector() -> None:
    """A network's noise is added piece by piece; each length and release has numbers of its own."""
    noise = NoiseStream(seed_key(5), "noise")
    for size in (1, 1 << 14, (1 << 14) + 1, 100_003):
        joined = np.full(size, np.nan)
        for where, piece in noise.normal_pieces(7, size):
            joined[where] = piece
        np.testing.assert_array_equal(joined, noise.normal(7, size))


def test_noise_in_one_pass_is_noise_added_piece_by_piece() -> None:
    """A long sum meets its noise in one compiled pass: all bits are those of numpy's, far sums and NaN included."""
    stream = NoiseStream(seed_key(5), "noise")
    random = np.random.default_rng(0)
    for size in (100, 1 << 14, (1 << 14) + 1, 100_003):
        total = random.standard_normal(size) * np.exp(random.uniform(-30, 60, size))
        total[:7] = 0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**40, 0.5 * 2.0**-20
        wanted = total.copy()
        add_discretized_gaussian(wanted, stream.normal(3, size), 1.37, 2.0**-20)
        stream.add_normal(3, total, 1.37, 2.0**-20)
        np.testing.assert_array_equal(total.view(np.uint64), wanted.view(np.uint64))


def test_far_tail_of_long_vectors_takes_second_words() -> None:
    """Of 64 bits the tail beyond 4.17 is continued by a second word, in compiled pieces as in numpy.

    Words of a stream are chosen by the key: in 2²⁰ draws k < 2⁴⁸ is met about 32 times. There the numbers are what
    scipy makes of all 127 bits, and no two words that agree in 64 bits would give the same number.
    """
    from scipy.special import ndtri

    stream, size = NoiseStream(seed_key(5), "noise"), 1 << 20
    words = stream.uint64(2, size)
    places = np.flatnonzero(words < np.uint64(1 << 49))
    assert 8 < len(places) < 80  # P(outside) < 1e-6 for Poisson(32)
    k, more = words[places] >> np.uint64(1), stream.at(2, places.astype(np.uint64) + np.uint64(1 << 63))
    p = (k + (more + 0.5) * 2.0**-64) * 2.0**-64
    signs = np.where(words[places] & np.uint64(1), -1.0, 1.0)
    found = stream.normal(2, size)[places]
    np.testing.assert_array_equal(found, signs * ndtri(p))
    assert np.all(np.abs(found) > 4.0)
    coarse = signs * ndtri((k + 0.5) * 2.0**-64)
    assert np.any(found != coarse)
