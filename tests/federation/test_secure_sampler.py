"""The noise of secure sums: tables are exact, draws follow the mass function, secure equals plain.

Statistical tests use fixed seeds; each has a false-alarm rate of at most 1e-6 over the choice of seed.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import chdtrc, ndtr

from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.federation import SecureSumConfig, sensitivity_growth
from quietgrad.federation.secure.discrete_gaussian import (
    DiscreteGaussian,
    alias_table,
    decode,
    encode,
    gaussian_masses,
    require_headroom,
    rounded_gaussian_distance,
    smoothing_error,
)
from quietgrad.federation.secure.servers import Computation, ReplicatedSharing, sample
from quietgrad.federation.secure.terms import COARSE_SIGMA, COARSE_TOP, COARSE_WORD_BITS, Mode, coarse_error

FALSE_ALARM = 1e-6


def mass_function(sigma: float, top: int) -> npt.NDArray[np.float64]:
    """The discrete Gaussian's probabilities for −top…top."""
    k = np.arange(-top, top + 1, dtype=np.float64)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    return np.asarray(weights / weights.sum(), np.float64)


def chi_square_p(draws: npt.NDArray[np.int64], sigma: float) -> float:
    """p-value of Pearson's χ² of draws against N_Z(σ²), cells with fewer than 10 expected pooled at each end."""
    top = math.ceil(12 * sigma)
    expected = mass_function(sigma, top) * draws.size
    observed = np.bincount(draws + top, minlength=2 * top + 1).astype(np.float64)
    inside = np.flatnonzero(expected >= 10)
    low, high = inside[0], inside[-1] + 1
    e = np.concatenate([[expected[:low].sum()], expected[low:high], [expected[high:].sum()]])
    o = np.concatenate([[observed[:low].sum()], observed[low:high], [observed[high:].sum()]])
    if min(e[0], e[-1]) < 5:
        e = np.concatenate([[e[0] + e[1]], e[2:-2], [e[-2] + e[-1]]])
        o = np.concatenate([[o[0] + o[1]], o[2:-2], [o[-2] + o[-1]]])
    return float(chdtrc(e.size - 1, ((o - e) ** 2 / e).sum()))


def stream(seed: int) -> SecureStream:
    return SecureStream(seed_key(seed), "test")


@pytest.mark.parametrize(("sigma", "magnitudes"), [(0.3, False), (2.0, True), (24.0, True), (100.5, False)])
def test_table_holds_the_masses_exactly_and_they_are_gaussian(sigma: float, magnitudes: bool) -> None:
    bits = 8 if magnitudes else 11
    top = (1 << bits) - 1 if magnitudes else (1 << (bits - 1)) - 1
    masses = gaussian_masses(sigma, top, 1 << (bits + 56), magnitudes=magnitudes)
    table = alias_table(masses if magnitudes else [*masses, 0], 56)
    assert table.masses()[: len(masses)] == masses
    with localcontext() as context:
        context.prec = 60
        values = range(top + 1) if magnitudes else range(-top, top + 1)
        weights = [(-(Decimal(k) ** 2) / (2 * Decimal(sigma) ** 2)).exp() for k in values]
        if magnitudes:
            weights = [w if k == 0 else 2 * w for k, w in enumerate(weights)]
        norm, total = sum(weights), Decimal(1 << (bits + 56))
        distance = sum(abs(w / norm - m / total) for w, m in zip(weights, masses, strict=True)) / 2
    assert distance <= Decimal(2) ** -56


def test_alias_table_refuses_masses_that_do_not_fill_it() -> None:
    for masses in ([1, 1], [2, 2, 2], [5, -1]):
        with pytest.raises(ValueError, match="add up"):
            alias_table(masses, 1)


@pytest.mark.parametrize("sigma", [0.5, 24.0, 1599.0])
def test_single_table_draws_follow_the_mass_function(sigma: float) -> None:
    draws = DiscreteGaussian(sigma).sample(stream(1), 0, 400_000)
    assert chi_square_p(draws, sigma) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [2500.0])
def test_convolved_draws_follow_the_mass_function(sigma: float) -> None:
    noise = DiscreteGaussian(sigma)
    assert len(noise.parts) == 2
    assert chi_square_p(noise.sample(stream(2), 0, 1_000_000), sigma) > FALSE_ALARM


@pytest.mark.parametrize("sigma", [2.0**20, 2.0**28 / math.sqrt(3)])
def test_wide_noise_is_gaussian_down_to_the_last_bits(sigma: float) -> None:
    draws = DiscreteGaussian(sigma).sample(stream(4), 0, 400_000)
    # Coarse shape: 64 equally likely cells of the Gaussian; fine shape: the low eight bits are uniform.
    cells = np.floor(ndtr(draws / sigma) * 64).astype(np.int64)
    for values in (cells, draws & 0xFF):
        observed = np.bincount(values, minlength=int(values.max()) + 1)
        expected = draws.size / observed.size
        assert float(chdtrc(observed.size - 1, ((observed - expected) ** 2 / expected).sum())) > FALSE_ALARM


@pytest.mark.parametrize(("ratio", "c", "sigma_2"), [(1.75, 8, 4.0), (1.0, 8, 4.0), (0.6, 16, 3.0)])
def test_smoothing_error_bounds_the_true_distance(ratio: float, c: int, sigma_2: float) -> None:
    sigma_1 = ratio * c
    top = 400
    a, b = mass_function(sigma_1, top), mass_function(sigma_2, 60)
    spread = np.zeros(2 * 60 * c + 1)
    spread[::c] = b
    total = np.convolve(a, spread)
    half = total.size // 2
    true = 0.5 * np.abs(total - mass_function(math.hypot(sigma_1, c * sigma_2), half)).sum()
    bound = smoothing_error(sigma_1, c, sigma_2)
    assert true <= bound + 1e-14
    assert true >= bound / 20 - 1e-14, "the bound should not be vacuous"


@pytest.mark.parametrize("sigma", [4.0, 16.0, 100.0])
def test_distance_of_discrete_from_rounded_gaussian(sigma: float) -> None:
    top = math.ceil(12 * sigma)
    edges = np.arange(-top, top + 2) - 0.5
    rounded = np.diff(ndtr(edges / sigma))
    true = 0.5 * np.abs(mass_function(sigma, top) - rounded).sum()
    assert 0.9 * rounded_gaussian_distance(sigma) < true < rounded_gaussian_distance(sigma)


def together(computations: list[Computation[npt.NDArray[np.uint64]]]) -> list[npt.NDArray[np.uint64]]:
    """Run three servers' computations in step and return what they return."""
    frames = [next(c) for c in computations]
    out: list[npt.NDArray[np.uint64]] = []
    while not out:
        inbound = [frames[(i + 1) % 3] for i in range(3)]
        frames = []
        for c, frame in zip(computations, inbound, strict=True):
            try:
                frames.append(c.send(frame))
            except StopIteration as done:
                out.append(done.value)
    return out


def replicated(seed: int, t: int) -> list[ReplicatedSharing]:
    streams = [SecureStream(seed_key(seed + k), "replicated") for k in range(3)]
    return [ReplicatedSharing(i, streams[i], streams[(i + 1) % 3], t, f"server-{i}") for i in range(3)]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_noise_inside_the_computation_equals_the_plain_alias_method(size: int) -> None:
    total = np.sum(together([sample(s, size) for s in replicated(10, 7)]), axis=0).view(np.int64)
    # Open the random bits that the servers used: x = x_0 ⊕ x_1 ⊕ x_2, in the order the sampler draws them.
    width = (size + 63) // 64
    shadow = replicated(10, 7)

    def opened(*shape: int) -> npt.NDArray[np.uint8]:
        words = np.bitwise_xor.reduce([s.random(*shape)[0] for s in shadow])
        return np.unpackbits(words.reshape(-1, width).view(np.uint8), axis=1, bitorder="little")[:, :size]

    weights = 1 << np.arange(63, -1, -1, dtype=np.uint64)
    columns = (opened(2, 4, width).T @ weights[-8:]).astype(np.int64)
    words = (opened(COARSE_WORD_BITS, width).T.astype(np.uint64) @ weights[-COARSE_WORD_BITS:]).astype(np.uint64)
    sign = opened(1, width)[0].astype(np.int64)
    masses = gaussian_masses(COARSE_SIGMA, COARSE_TOP, 1 << (8 + COARSE_WORD_BITS), magnitudes=True)
    plain = alias_table(masses, COARSE_WORD_BITS).choose(columns, words) * (1 - 2 * sign)
    assert (total == plain).all()


def test_noise_inside_the_computation_follows_the_mass_function() -> None:
    draws = np.sum(together([sample(s, 400_000) for s in replicated(20, 1)]), axis=0).view(np.int64)
    assert chi_square_p(draws, COARSE_SIGMA) > FALSE_ALARM


def test_coarse_table_is_as_close_as_stated() -> None:
    tail = 2 * math.fsum(np.exp(-(np.arange(256, 600.0) ** 2) / (2 * COARSE_SIGMA**2)))
    assert tail / (COARSE_SIGMA * math.sqrt(2 * math.pi)) + 2.0**-57 < coarse_error() < 2.0**-55


@pytest.mark.parametrize(("mode", "most"), [("masks", 1e-11), ("servers", 1e-11), ("mpc", 1e-10)])
def test_slack_is_stated_and_grows_with_the_dimension(mode: Mode, most: float) -> None:
    one = SecureSumConfig(mode, 5, 1, 1.0, 1.0).slack()
    assert one > 0
    assert SecureSumConfig(mode, 5, 10**6, 1.0, 1.0).slack() == pytest.approx(one * 1e6)
    assert one * 1e6 < most


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
        ({"mode": "mpc", "servers": 4}, "servers"),
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
