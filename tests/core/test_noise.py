"""Noise on the grid: exactness, the cost of rounding, nothing in the last bits, and the laws of the noise."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special

from quietgrad.core.noise.grid import (
    NoiseStream,
    add_discretized_gaussian,
    grid_bound,
    grid_step,
    l2_laplace,
    l2_laplace_for,
    noisy_argmax,
    release_l2_laplace,
    sigma_for,
)
from quietgrad.core.noise.rng import seed_key

FALSE_ALARM = 1e-6
Floats = npt.NDArray[np.float64]


def stream(seed: int = 0) -> NoiseStream:
    return NoiseStream(seed_key(seed), "noise test")


def ks_rejects(sample: Floats, cdf: Callable[[Floats], Floats]) -> bool:
    ordered, n = np.sort(sample), sample.size
    values, grid = cdf(ordered), np.arange(n + 1) / n
    distance = max(float(np.max(grid[1:] - values)), float(np.max(values - grid[:-1])))
    return bool(special.kolmogorov(distance * math.sqrt(n)) < FALSE_ALARM)


def chi2_rejects(counts: npt.NDArray[np.int64], expected: Floats) -> bool:
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    return bool(special.gammaincc((counts.size - 1) / 2, statistic / 2) < FALSE_ALARM)


sigmas = st.floats(1e-30, 1e30)
multipliers = st.floats(0.05, 500.0)
bounds = st.floats(1e-6, 1e6)


@given(sigmas)
def test_step_is_the_largest_power_of_two(sigma: float) -> None:
    step = grid_step(sigma)
    assert math.frexp(step)[0] == 0.5
    assert 2**20 <= sigma / step < 2**21


@given(multipliers, bounds, st.integers(1, 10**7))
def test_noise_covers_the_rounded_sum(z: float, bound: float, dim: int) -> None:
    sigma, step = sigma_for(z, bound, dim)
    assert sigma == z * grid_bound(bound, dim, step)
    assert sigma / step >= 2**20
    assert sigma / (z * bound) <= 1 + z * math.sqrt(dim) / 2**20 + 1e-12


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.sampled_from([1e-9, 1e-6, 1.0]), st.booleans())
def test_rounded_neighbours_stay_within_the_bound(dim: int, seed: int, clip: float, replace: bool) -> None:
    """Sums of neighbours, put where rounding hurts most: on both sides of every half unit."""
    rng = np.random.default_rng(seed)
    _, step = sigma_for(1.0, 1.0, dim)
    bound = clip
    record, other = (v * bound / np.linalg.norm(v) for v in rng.standard_normal((2, dim)))
    shift = record - other if replace else record
    rest = (rng.integers(-5, 5, dim) + 0.5 - np.sign(shift) * rng.choice([1e-9, 0.3])) * step
    apart = (np.rint((rest + shift) / step) - np.rint(rest / step)) * step
    sensitivity = 2 if replace else 1
    assert np.linalg.norm(apart) <= sensitivity * grid_bound(bound, dim, step) * (1 + 1e-9)


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(hnp.arrays(np.float64, st.integers(1, 20), elements=finite), multipliers, bounds, st.integers(0, 9))
def test_release_is_exact_and_on_the_grid_for_any_sum(total: Floats, z: float, bound: float, block: int) -> None:
    sigma, step = sigma_for(z, bound, total.size)
    unit = stream().normal(block, total.size)
    kept = unit.copy()
    released = total.copy()
    with np.errstate(over="ignore"):  # a sum of 1e308 in tiny units: far outside any bound, still clamped
        add_discretized_gaussian(released, unit, sigma, step)
    np.testing.assert_array_equal(unit, kept)
    for before, after, u in zip(total.tolist(), released.tolist(), unit.tolist(), strict=True):
        units = max(-(2**52), min(2**52, round(Fraction(before) / Fraction(step))))
        assert Fraction(after) == (units + round(Fraction(u * (sigma / step)))) * Fraction(step)


def test_last_bits_tell_nothing() -> None:
    """Float noise on a float sum betrays it through one bit; the release on the grid does not."""
    n = 100_000
    sigma, step = sigma_for(1.0, 1.0, 1)
    unit = stream().normal(0, n)

    def last_bit(values: Floats) -> float:
        return float(np.mean((values.view(np.uint64) & np.uint64(1)) == 0))

    def last_unit(shift: float) -> float:
        total = np.full(n, shift)
        add_discretized_gaussian(total, unit, sigma, step)
        assert not np.any(total % step)
        return float(np.mean((total / step) % 2 == 0))

    assert last_bit(1.0 + unit) - last_bit(unit) > 0.1
    limit = special.ndtri(1 - FALSE_ALARM / 6) * 0.5 / math.sqrt(n)
    for shift in (0.0, 1.0, math.pi):
        assert abs(last_unit(shift) - 0.5) < limit


def test_released_noise_passes_and_wrong_scales_fail() -> None:
    n = 200_000
    sigma, step = sigma_for(2.0, 1.5, n)
    total = np.zeros(n)
    add_discretized_gaussian(total, stream().normal(1, n), sigma, step)
    assert not ks_rejects(total / sigma, special.ndtr)
    for wrong in (0.95, 1.05):
        assert ks_rejects(total / (wrong * sigma), special.ndtr)


def test_a_query_that_is_zero_by_definition_gets_no_noise() -> None:
    sigma, step = sigma_for(1.0, 0.0, 5)
    total = np.full(5, 1e-300)
    add_discretized_gaussian(total, np.ones(5), sigma, step)
    assert total.tolist() == [0.0] * 5


def test_a_float32_sum_is_noised_in_float64() -> None:
    unit = stream().normal(2, 50)
    sigma, step = sigma_for(1.0, 1.0, 50)
    narrow = np.linspace(-3, 3, 50, dtype=np.float32)
    wide = narrow.astype(np.float64)
    add_discretized_gaussian(narrow, unit, sigma, step)
    add_discretized_gaussian(wide, unit, sigma, step)
    np.testing.assert_array_equal(narrow, wide.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_tensors_are_noised_in_place(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.linspace(-3, 3, 50, dtype=getattr(torch, dtype), requires_grad=True)
    array = tensor.detach().numpy().copy()
    unit = stream().normal(3, 50)
    sigma, step = sigma_for(1.0, 1.0, 50)
    add_discretized_gaussian(tensor, unit, sigma, step)
    add_discretized_gaussian(array, unit, sigma, step)
    np.testing.assert_array_equal(tensor.detach().numpy(), array)
    with pytest.raises(TypeError, match=r"total\.cpu"):
        add_discretized_gaussian(torch.zeros(3, device="meta"), unit[:3], sigma, step)


def test_importing_the_noise_is_light() -> None:
    code = (
        "import sys, quietgrad.core.noise.grid, quietgrad.core.ledger.keys, quietgrad.core.sampling as s\n"
        "s.FullBatch().sampler(10, None).batch(0)\n"
        "print(sorted({'torch', 'numba', 'scipy', 'sklearn'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grid_step(0.0), "sigma=0.0"),
        (lambda: grid_step(math.nan), "sigma=nan"),
        (lambda: sigma_for(0.0, 1.0, 1), "noise_multiplier=0.0"),
        (lambda: sigma_for(math.inf, 1.0, 1), "noise_multiplier=inf"),
        (lambda: sigma_for(1.0, -1.0, 1), "bound=-1.0"),
        (lambda: sigma_for(1.0, math.nan, 1), "bound=nan"),
        (lambda: l2_laplace_for(0.0, 1.0, 1), "epsilon=0.0"),
        (lambda: l2_laplace_for(1.0, math.inf, 1), "sensitivity=inf"),
        (lambda: noisy_argmax([1.0], -1.0, 1.0, stream(), 0), "epsilon=-1.0"),
        (lambda: noisy_argmax([], 1.0, 1.0, stream(), 0), "scores of shape"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_list_is_not_a_sum() -> None:
    with pytest.raises(TypeError, match="total is a list"):
        add_discretized_gaussian([0.0], np.zeros(1), 1.0, grid_step(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [1, 3, 200])
def test_l2_laplace_norm_passes_and_wrong_scales_fail(dim: int) -> None:
    scale = 0.7
    norms = np.array([np.linalg.norm(l2_laplace(dim, scale, stream(), i)) for i in range(20_000)])
    assert not ks_rejects(norms / scale, lambda x: special.gammainc(dim, x))
    for wrong in (0.95, 1.05):
        assert ks_rejects(norms / (wrong * scale), lambda x: special.gammainc(dim, x))


def test_l2_laplace_direction_is_uniform() -> None:
    """In three dimensions each coordinate of a uniform direction is uniform on [−1, 1] (Archimedes)."""
    draws = np.array([l2_laplace(3, 1.0, stream(1), i) for i in range(20_000)])
    directions = draws / np.linalg.norm(draws, axis=1, keepdims=True)
    for axis in range(3):
        assert not ks_rejects(directions[:, axis], lambda x: (x + 1) / 2)
    assert ks_rejects(directions[:, 0], lambda x: np.clip((1.05 * x + 1) / 2, 0, 1))


def test_l2_laplace_release_is_on_the_grid() -> None:
    scale, step = l2_laplace_for(0.5, 2.0, dim=7)
    assert scale == grid_bound(2.0, 7, step) / 0.5
    for total in (np.full(7, math.pi), np.zeros((7, 1))):
        expected = np.rint(total / step) * step + l2_laplace(7, scale, stream(), 4).reshape(total.shape)
        release_l2_laplace(total, scale, step, stream(), 4)
        assert not np.any(total % step)
        np.testing.assert_array_equal(total, expected)


def test_noisy_argmax_is_the_exponential_mechanism() -> None:
    scores, draws = np.arange(6.0), 50_000
    counts = np.bincount([noisy_argmax(scores, 4.0, 2.0, stream(), i) for i in range(draws)], minlength=6)

    def expected(epsilon: float) -> Floats:
        weights = np.exp(epsilon * scores / (2 * 2.0))
        return np.asarray(draws * weights / weights.sum(), np.float64)

    assert not chi2_rejects(counts, expected(4.0))
    for wrong in (0.95, 1.05):
        assert chi2_rejects(counts, expected(wrong * 4.0))


def test_noisy_argmax_takes_broken_scores_as_the_worst() -> None:
    clean = [noisy_argmax([1.0, 1.0, 3.0], 1.0, 1.0, stream(), i) for i in range(200)]
    broken = [noisy_argmax([math.nan, 1.0, 3.0], 1.0, 1.0, stream(), i) for i in range(200)]
    assert clean == broken
    assert noisy_argmax([math.inf, math.nan], 1.0, 1.0, stream(), 0) in (0, 1)
