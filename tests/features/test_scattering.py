"""Scattering features against the definition, convolution by convolution at full size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.scattering_reference import picture  # noqa: E402

from quietgrad.features.scattering import Scattering, gabor, wavelet  # noqa: E402


def test_the_transform_is_its_definition() -> None:
    """Full-size periodic convolutions in complex128, subsampled at the end only; the fast path works at half size.

    A modulus is not band-limited, so what folding leaves out is seen: within 2e-3 of values up to 0.7.
    """
    rng = np.random.default_rng(0)
    x = np.kron(rng.random((8, 8)), np.ones((2, 2)))  # a picture of 16 × 16
    n = 24
    padded = np.pad(x, 4, mode="reflect")
    phi = gabor(n, 1.6, 0.0, 0.0, 1.0).real

    def convolved(a: Any, b: Any) -> Any:
        return np.asarray(np.fft.ifft2(np.fft.fft2(a) * np.fft.fft2(b)))

    def low(a: Any) -> Any:
        return convolved(a, phi).real[4:-4:4, 4:-4:4]

    first = [np.abs(convolved(padded, wavelet(n, 0, k))) for k in range(8)]
    wide = [np.abs(convolved(padded, wavelet(n, 1, k))) for k in range(8)]
    second = [np.abs(convolved(f, wavelet(n, 1, k))) for f in first for k in range(8)]
    expected = np.stack([low(padded), *(low(f) for f in [*first, *wide, *second])])
    found = Scattering(16)(torch.tensor(x, dtype=torch.float32)).numpy()
    assert found.shape == expected.shape == (81, 4, 4)
    assert np.abs(found - expected).max() < 2e-3
    assert np.abs(expected[1:]).max() > 0.05


def test_the_numbers_are_kymatio_s() -> None:
    """kymatio cuts the tails of its filters, which is all that is left between the two."""
    kept = json.loads((Path(__file__).parent / "scattering_reference.json").read_text())
    expected = np.array(kept["maps"]).reshape(81, 3, 3)
    found = Scattering(kept["size"])(torch.tensor(picture(kept["size"]))).numpy()
    assert np.abs(found - expected).max() < 1e-3
    assert np.abs(found - expected)[17:].max() < 1e-4
    assert expected.max() > 0.5
    assert expected[17:].max() > 0.01


def test_pictures_do_not_see_each_other() -> None:
    """To the last bit: else one picture more or less would move the features of all others a little."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pictures = torch.rand(35, 28, 28, generator=torch.Generator().manual_seed(1))
        made = Scattering(28)
        together = made(pictures)
        assert tuple(together.shape) == (35, 81, 7, 7)
        assert all(torch.equal(made(pictures[i]), together[i]) for i in (0, 17, 34))
        assert torch.equal(made(pictures[1:]), together[1:])
        assert torch.equal(made.normalized(pictures[1:]), made.normalized(pictures)[1:])
    finally:
        torch.set_num_threads(before)
    pictures, made = pictures[:24, :8, :8].reshape(8, 3, 8, 8), Scattering(8)
    assert tuple(made(pictures).shape) == (8, 3, 81, 2, 2)
    other = pictures.clone()
    other[7] = 0.0
    moved = (made.normalized(other) - made.normalized(pictures)).abs().amax((1, 2, 3, 4))
    assert (moved > 1e-6).nonzero().ravel().tolist() == [7]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        Scattering(30)
    with pytest.raises(ValueError, match="must end in"):
        Scattering(28)(torch.zeros(2, 32, 32))
