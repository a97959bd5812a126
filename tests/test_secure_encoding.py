"""Vectors on the grid: round trips, bounds, and terms that cannot overflow or under-noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quietgrad.errors import DataError
from quietgrad.federation import SecureSumConfig, sensitivity_growth
from quietgrad.secure.discrete_gaussian import decode, encode, require_headroom

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    arrays(np.float64, st.integers(1, 30), elements=FINITE),
    st.floats(1e-6, 1e6),
    st.integers(10, 44),
)
def test_what_is_read_back_is_the_clipped_vector_to_half_a_step(
    x: np.ndarray[tuple[int], np.dtype[np.float64]], bound: float, bits: int
) -> None:
    step = bound / 2.0**bits
    back = decode(encode(x, dimension=x.size, bound=bound, step=step), step)
    largest = np.abs(x).max()
    length = np.linalg.norm(x / largest) if largest > 0 else 1.0
    clipped = x if largest <= bound / length else x / largest * (bound / length)
    assert np.abs(back - clipped).max() <= step * (0.5 + 2.0 ** (bits - 50))
    assert np.linalg.norm(back) <= bound + step * (math.sqrt(x.size) / 2 + 2.0 ** (bits - 50))


@given(
    st.lists(arrays(np.float64, 7, elements=st.floats(-10, 10)), min_size=2, max_size=20),
    st.sampled_from([2.0**-20, 2.0**-28, 1e-7]),
)
def test_sums_of_words_are_sums_of_integers(
    vectors: list[np.ndarray[tuple[int], np.dtype[np.float64]]], step: float
) -> None:
    words = [encode(v, dimension=7, bound=3.0, step=step) for v in vectors]
    total = np.zeros(7, np.uint64)
    for w in words:
        total = total + w
    exact = [sum(int(w[k]) - (1 << 64) * (int(w[k]) >> 63) for w in words) for k in range(7)]
    assert total.view(np.int64).tolist() == exact
    largest = require_headroom(parties=len(vectors), bound=3.0, step=step, noise_support=0)
    assert max(abs(e) for e in exact) <= largest


@settings(max_examples=50)
@given(
    arrays(np.float64, 50, elements=st.floats(-1, 1)),
    arrays(np.float64, 50, elements=st.floats(-0.01, 0.01)),
)
def test_rounding_adds_at_most_the_stated_sensitivity(
    x: np.ndarray[tuple[int], np.dtype[np.float64]], change: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> None:
    step = 2.0**-8
    a, b = (encode(v, dimension=50, bound=100.0, step=step).view(np.int64) for v in (x, x + change))
    moved = float(np.linalg.norm((a - b).astype(np.float64)))
    assert moved <= np.linalg.norm(change) / step + sensitivity_growth(50) + 1e-9


def test_growth_is_reached() -> None:
    # Rounding 0.5⁻ and 0.5⁺ apart: no smaller growth than √d can be true.
    a = encode(np.full(9, 0.4999999), dimension=9, bound=99.0, step=1.0).view(np.int64)
    b = encode(np.full(9, 0.5000001), dimension=9, bound=99.0, step=1.0).view(np.int64)
    assert np.linalg.norm(a - b) == sensitivity_growth(9) == 3.0


@pytest.mark.parametrize("bad", [[1.0], [1.0, math.nan], [math.inf, 0.0], [[1.0, 2.0]]])
def test_bad_vectors_are_refused(bad: list[float]) -> None:
    with pytest.raises(DataError, match="vector"):
        encode(bad, dimension=2, bound=1.0, step=0.1)


@pytest.mark.parametrize("mode", ["masks", "servers", "mpc"])
def test_overflow_is_refused_before_anything_is_sent(mode: str) -> None:
    with pytest.raises(ValueError, match="Raise the noise or lower the bound"):
        SecureSumConfig(mode, parties=5, dimension=10, bound=1.0, sigma=1e-10)  # type: ignore[arg-type]
    terms = SecureSumConfig(mode, parties=5, dimension=10, bound=1e6, sigma=1.0)  # type: ignore[arg-type]
    worst = 5 * (math.ceil(terms.bound / terms.step) + 2) + terms.noise_support
    assert worst < 2**63


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mode": "magic"}, "mode"),
        ({"dimension": 0}, "dimension"),
        ({"bound": 0.0}, "bound"),
        ({"bound": math.nan}, "bound"),
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"parties": 1}, "parties"),
        ({"honest": 0}, "honest"),
        ({"honest": 5, "colluders": 1}, "honest"),
        ({"servers": 2}, "servers"),
        ({"mode": "servers", "servers": 1}, "servers"),
        ({"mode": "servers", "quorum": 6}, "quorum"),
        ({"mode": "servers", "honest": 3}, "honest"),
        ({"mode": "mpc", "servers": 4}, "exactly 3"),
    ],
)
def test_bad_terms_are_refused(change: dict[str, object], match: str) -> None:
    good: dict[str, object] = {"mode": "masks", "parties": 5, "dimension": 3, "bound": 1.0, "sigma": 1.0}
    with pytest.raises(ValueError, match=match):
        SecureSumConfig(**(good | change))  # type: ignore[arg-type]


@given(st.integers(2, 60), st.data())
def test_no_server_can_open_both_secrets_and_survivors_can_open_one(m: int, data: st.DataObject) -> None:
    h = data.draw(st.integers(1, m))
    c = data.draw(st.integers(0, m - h))
    terms = SecureSumConfig("masks", parties=m, dimension=1, bound=1.0, sigma=1.0, honest=h, colluders=c)
    assert 2 * terms.threshold > (m - c) + 2 * c
    assert terms.threshold <= m
    assert terms.variance_factor * h == pytest.approx(m)
    assert terms.least_parties - c >= h


def test_the_digest_depends_on_every_term() -> None:
    base = {"mode": "masks", "parties": 5, "dimension": 3, "bound": 1.0, "sigma": 1.0, "honest": 3}
    digests = {SecureSumConfig(**base).digest(b"r")}  # type: ignore[arg-type]
    for key, value in [("parties", 6), ("dimension", 4), ("bound", 2.0), ("sigma", 2.0), ("honest", 2)]:
        digests.add(SecureSumConfig(**(base | {key: value})).digest(b"r"))  # type: ignore[arg-type]
    assert len(digests) == 6


def test_numpy_numbers_are_the_numbers_they_stand_for() -> None:
    plain = SecureSumConfig("masks", parties=5, dimension=3, bound=2.0, sigma=1.0, honest=3)
    wrapped = SecureSumConfig("masks", np.int64(5), np.int32(3), np.float32(2.0), np.float64(1.0), np.int8(3))  # type: ignore[arg-type]
    assert wrapped.digest(b"r") == plain.digest(b"r")
    with pytest.raises(TypeError):
        SecureSumConfig("masks", parties=5, dimension=3.5, bound=2.0, sigma=1.0)  # type: ignore[arg-type]
