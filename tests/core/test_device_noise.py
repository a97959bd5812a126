"""Noise on a device: the cipher is RFC 8439's, normals are as exact as the proof asks, sessions keep sums there.

No accelerator is at hand: what runs here are the same lines on the CPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from scipy import special

from quietgrad.core.noise.grid import add_discretized_gaussian, sigma_for
from quietgrad.core.noise.mechanisms import GaussianNoise
from quietgrad.core.noise.rng import fresh_key, seed_key

torch = pytest.importorskip("torch")

from quietgrad.core.noise import grid as noise  # noqa: E402
from quietgrad.core.noise.device import DeviceStream, chacha20, digest  # noqa: E402

CPU = torch.device("cpu")


def keystream(key: bytes, nonce: bytes, first: int, rows: int) -> bytes:
    cipher = Cipher(algorithms.ChaCha20(key, first.to_bytes(4, "little") + nonce), mode=None)
    return cipher.encryptor().update(bytes(64 * rows))


def test_the_cipher_is_that_of_cryptography() -> None:
    """ChaCha20 of RFC 8439."""
    for first in (0, 7, 2**32 - 40):
        key, nonce = fresh_key(), fresh_key()[:12]
        words = chacha20(key, nonce, torch.arange(first, first + 33))
        assert words.numpy().astype("<u4").tobytes() == keystream(key, nonce, first, 33)


def test_normals_are_the_inverse_of_their_words() -> None:
    """Bit by bit from the keystream, at 40 digits, to the error that the proof allows: 10⁻¹⁵(|x| + ⅕)."""
    stream = DeviceStream(seed_key(1), "noise", CPU)
    words = stream.words(5, 4000).numpy().reshape(-1, 2)
    numbers = stream.normal(5, 2000).numpy()
    with mpmath.workdps(40):
        for (low, high), x in zip(words[:300].tolist(), numbers[:300].tolist(), strict=True):
            k = (high << 31) | (low >> 1)
            p = (mpmath.mpf(k) + mpmath.mpf("0.5")) / mpmath.mpf(2) ** 64
            true = mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1) * (-1 if low & 1 else 1)
            assert abs(x - true) <= 1e-15 * (abs(x) + 0.2)
    tail = torch.logspace(-38, -0.302, 200, dtype=torch.float64)
    with mpmath.workdps(60):
        for p, x in zip(tail.tolist(), torch.special.ndtri(tail).tolist(), strict=True):
            exact = mpmath.mpf(p)
            # One Newton step from x: what is left of its error at 60 digits.
            missed = (mpmath.ncdf(x) - exact) / mpmath.npdf(x)
            assert abs(missed) <= 1e-15 * (abs(x) + 0.2)


def test_normals_have_their_law_and_their_rare_words_are_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 000 numbers: Kolmogorov–Smirnov and χ², false alarm 10⁻⁶ each. The rare branch is forced on all."""
    from quietgrad.core.noise import device as device_stream

    x = np.sort(DeviceStream(seed_key(2), "noise", CPU).normal(0, 200_000).numpy())
    grid = np.arange(x.size + 1) / x.size
    cdf = special.ndtr(x)
    distance = max(float(np.max(grid[1:] - cdf)), float(np.max(cdf - grid[:-1])))
    assert special.kolmogorov(distance * math.sqrt(x.size)) > 1e-6
    tail = special.gammaincc(x.size / 2, float(np.sum(x**2)) / 2)
    assert 5e-7 < tail < 1 - 5e-7
    stream = DeviceStream(seed_key(2), "noise", CPU)
    before = stream.normal(3, 100)
    monkeypatch.setattr(device_stream, "_COARSE", 1 << 63)
    after = stream.normal(3, 100)
    torch.testing.assert_close(before, after, rtol=1e-12, atol=1e-12)  # 64 more bits behind 63: the same number


def test_addresses_are_apart() -> None:
    draws = {
        tuple(DeviceStream(seed_key(seed), label, CPU).words(block, 4).tolist())
        for seed in (0, 1)
        for label in ("a", "b")
        for block in (0, 1, 2**63)
    }
    assert len(draws) == 12
    with pytest.raises(ValueError, match="2³² rows"):
        DeviceStream(seed_key(0), "a", CPU).words(2**64, 4)


def test_the_grid_is_that_of_the_cpu() -> None:
    sigma, step = sigma_for(1.3, 0.7, 1000)
    total = 1e3 * torch.randn(1000, dtype=torch.float64)
    total[0], total[1] = 1e300, -1e300
    unit = torch.randn(1000, dtype=torch.float64)
    wanted = total.numpy().copy()
    add_discretized_gaussian(wanted, unit.numpy(), sigma, step)
    noise.add_gaussian(total, unit, sigma, step)
    assert np.array_equal(total.numpy(), wanted)


def test_a_source_adds_noise_of_its_scale_where_the_sum_is() -> None:
    source = GaussianNoise().source(seed_key(4), "gradient", 10)
    rows = []
    for release in (0, 1):
        total: Any = torch.zeros(20_000, dtype=torch.float64)
        assert source.stays(total)
        source.add(total, release, 2.0, 0.5)
        rows.append(total)
    again: Any = torch.zeros(20_000, dtype=torch.float64)
    source.add(again, 1, 2.0, 0.5)
    assert torch.equal(again, rows[1])
    assert not torch.equal(rows[0], rows[1])
    assert 0.95 < float(rows[0].std()) < 1.05  # z·C = 1; 20 000 numbers: ten standard errors


def test_a_digest_tells_sums_apart() -> None:
    total = torch.randn(50, dtype=torch.float64)
    key = fresh_key()
    seen = {tuple(digest(total, key).tolist())}
    for place in range(50):
        other = total.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(9.0, dtype=torch.float64))
        seen.add(tuple(digest(other, key).tolist()))
    seen.add(tuple(digest(total.flip(0), key).tolist()))
    assert len(seen) == 52
    assert tuple(digest(total.clone(), key).tolist()) in seen
    assert digest(total, fresh_key()).tolist() != digest(total, key).tolist()


def test_a_run_keeps_its_sums_where_they_are_and_resumes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With sums taken to be elsewhere no array is made of one, and a resumed run repeats what it released."""
    import quietgrad as qg
    import quietgrad.torch as qt
    from quietgrad.core.noise import mechanisms
    from quietgrad.core.session import session

    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(session, "on_accelerator", lambda out: not isinstance(out, np.ndarray))
    monkeypatch.setattr(mechanisms, "add_discretized_gaussian", None)  # the CPU's: never asked
    x = torch.randn(80, 3)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    settings: dict[str, Any] = {"progress": False, "checkpoint_seconds": 0.0}
    algorithm = qg.DPSGD(steps=6, batch_size=20, learning_rate=0.5)

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2)

    budget = qg.Budget(3.0, 1e-5)
    data = (x, (x[:, 0] > 0).long())
    whole = qt.fit(model(), loss, data, algorithm, budget=budget, folder=tmp_path / "run", **settings)
    assert not torch.equal(whole.params[:6].view(2, 3), model().weight)

    def stop(progress: Any) -> bool:
        if progress.step == 3:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        qt.fit(
            model(), loss, data, algorithm, budget=budget, folder=tmp_path / "cut", every=1, stop=stop, **settings
        )
    resumed = qt.resume(model(), loss, data, algorithm, folder=tmp_path / "cut", **settings)
    assert resumed.privacy.epsilon == whole.privacy.epsilon  # nothing was charged twice
