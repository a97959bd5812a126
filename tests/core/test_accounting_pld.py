"""The PLD accountant from the inside: dominating pairs, grids, windows, extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.core.accounting.accounting import account, delta_of, prove
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_delta, gaussian_epsilon
from quietgrad.core.accounting.events import (
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    Pure,
    Repeated,
    gaussian,
    poisson_gaussian,
)
from quietgrad.core.accounting.loss_distribution import (
    DiscretizedPLD,
    FixedSizePair,
    GaussianPair,
    PoissonPair,
    PoissonReplacePair,
    PurePair,
    TailPair,
)
from quietgrad.core.accounting.pld_accountant import pld_profile

ADD, REPLACE = "add-remove", "replace-one"
PAIRS: list[TailPair] = [
    GaussianPair(0.01),
    GaussianPair(3.0),
    PurePair(1.3),
    PoissonPair(GaussianPair(1.0), 0.01),
    PoissonPair(PurePair(2.0), 0.3),
    FixedSizePair(GaussianPair(2.0), 0.02),
    FixedSizePair(PurePair(1.0), 0.5),
    PoissonReplacePair(2.0, 0.01),
    PoissonReplacePair(0.5, 0.7),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_rounded_pairs_keep_both_masses_and_dominate(pair: TailPair) -> None:
    step = 1e-2
    grid = pair.on_grid(step, 1e-12)
    assert np.all(grid.mass >= 0)
    assert grid.mass.sum() + grid.infinite == pytest.approx(1.0, abs=1e-13)
    turned = grid.reversed()
    assert turned.mass.sum() + turned.infinite == pytest.approx(1.0, abs=1e-9)
    for epsilon in (0.0, 0.4 * step, 0.123, 0.5, 1.0):
        (p,), (q,) = pair.above(np.array([epsilon]))
        exact = float(p - math.exp(epsilon) * q)
        assert grid.delta(epsilon) >= exact * (1 - 1e-9) - 1e-15
        assert grid.delta(epsilon) <= exact + step  # connecting the dots errs by less than a step
        (p,), (q,) = pair.below(np.array([epsilon]))
        assert turned.delta(epsilon) >= float(p - math.exp(epsilon) * q) * (1 - 1e-9) - 1e-15


def hockey_stick(p: npt.NDArray[np.float64], q: npt.NDArray[np.float64], epsilon: float, cell: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * cell)


@given(st.integers(0, 2**31), st.sampled_from([0.05, 0.3]), st.sampled_from([0.7, 1.5]))
@settings(max_examples=15, deadline=None)
def test_no_triple_of_batches_exceeds_the_fixed_size_profile(seed: int, rate: float, s: float) -> None:
    """Without the record the batch sum is 0, with it a or a'; all within Δ = 1 of each other, in the plane."""
    rng = np.random.default_rng(seed)
    while True:
        points = rng.uniform(-1, 1, (2, 2))
        points /= np.maximum(1.0, np.linalg.norm(points, axis=1, keepdims=True))
        if rng.random() < 0.5:
            points /= np.linalg.norm(points, axis=1, keepdims=True)
        if np.linalg.norm(points[0] - points[1]) <= 1:
            break
    axis = np.linspace(-1 - 6 * s, 1 + 6 * s, 161)
    x, y = np.meshgrid(axis, axis)

    def density(centre: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        bell = np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / (2 * s * s)) / (2 * math.pi * s * s)
        return np.asarray(bell, dtype=np.float64)

    absent, cell = density(np.zeros(2)), (axis[1] - axis[0]) ** 2
    here, there = ((1 - rate) * absent + rate * density(point) for point in points)
    n = 1000
    event = FixedSizeSampled(n, round(rate * n), Gaussian(2 * s))
    profile = pld_profile(event, Relation.REPLACE_ONE, 2.0, delta=1e-3)
    for epsilon in (0.0, 0.05, 0.2, 0.5):
        claimed = profile.delta(epsilon)
        assert hockey_stick(here, there, epsilon, cell) <= claimed + 1e-5
        # negative ε through the mirrored profile: H_{1/α}(P‖Q) = 1 − 1/α + H_α(Q‖P)/α
        assert hockey_stick(there, here, epsilon, cell) <= claimed + 1e-5


@pytest.mark.parametrize(("rate", "z", "epsilon"), [(0.01, 2.0, 0.3), (0.2, 3.0, 0.05), (0.5, 1.0, 2.0)])
def test_one_fixed_size_release_equals_amplification_by_subsampling(rate: float, z: float, epsilon: float) -> None:
    """T = 1: δ(ε) = q δ₀(log(1 + (e^ε − 1)/q)) (Balle, Barthe, Gaboardi 2018, Thm. 11)."""
    event = FixedSizeSampled(1000, round(1000 * rate), Gaussian(z))
    expected = rate * gaussian_delta(2 / z, math.log1p(math.expm1(epsilon) / rate))
    assert delta_of(event, epsilon=epsilon, relation=REPLACE) == pytest.approx(expected, rel=1e-5)


def normal(x: mpmath.mpf, mean: float, s: float) -> mpmath.mpf:
    return mpmath.npdf(x, mean, s)


@pytest.mark.parametrize(("rate", "z", "epsilon"), [(0.02, 1.0, 0.2), (0.3, 2.5, 0.5)])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_poisson_profile_equals_quadrature(rate: float, z: float, epsilon: float, relation: str) -> None:
    """One Poisson-sampled Gaussian: the worse order of the two densities, integrated by mpmath."""
    with mpmath.workdps(16):

        def mixture(x: mpmath.mpf, mean: float) -> mpmath.mpf:
            return (1 - rate) * normal(x, 0, z) + rate * normal(x, mean, z)

        def stick(p: object, q: object) -> float:
            def gap(x: mpmath.mpf) -> mpmath.mpf:
                return max(p(x) - mpmath.exp(epsilon) * q(x), mpmath.mpf(0))  # type: ignore[operator]

            return float(mpmath.quad(gap, [k * z / 2 for k in range(-20, 21)], maxdegree=5))

        if relation == ADD:
            orders = [
                (lambda x: mixture(x, 1.0), lambda x: normal(x, 0, z)),
                (lambda x: normal(x, 0, z), lambda x: mixture(x, 1.0)),
            ]
        else:
            orders = [(lambda x: mixture(x, 1.0), lambda x: mixture(x, -1.0))]
        exact = max(stick(p, q) for p, q in orders)
    assert delta_of(PoissonSampled(rate, Gaussian(z)), epsilon=epsilon, relation=relation) == pytest.approx(
        exact, rel=3e-4
    )


@pytest.mark.parametrize("delta", [1e-3, 1e-11])
@pytest.mark.parametrize(("z", "steps"), [(1.0, 1), (20.0, 400), (100.0, 10_000)])
def test_composition_on_the_grid_reaches_the_exact_gaussian(z: float, steps: int, delta: float) -> None:
    """Sampling at a rate of 1 − 10⁻¹² is an un-sampled Gaussian composed by Fourier transform, not by formula."""
    event = poisson_gaussian(1 - 1e-12, z, steps)
    exact = gaussian_epsilon(math.sqrt(steps) / z, delta)
    found = account(event, delta=delta, relation=ADD)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 5e-3)
    at_once = account(gaussian(z, steps), delta=delta, relation=ADD, accountant="pld")
    assert exact * (1 - 1e-9) <= at_once <= exact * (1 + 1e-4)


def test_a_finer_grid_is_tighter_and_a_coarser_one_stays_valid() -> None:
    event = poisson_gaussian(0.01, 1.0, 500)
    found = [
        pld_profile(event, Relation.ADD_REMOVE, 1.0, delta=1e-5, step=step).epsilon(1e-5)
        for step in (1e-2, 1e-3, 1e-4, 2e-5)
    ]
    assert found == sorted(found, reverse=True)
    assert found[2] == pytest.approx(found[3], rel=1e-3)
    assert account(event, delta=1e-5, relation=ADD) == pytest.approx(found[3], rel=1e-3)


def test_the_step_follows_losses_smaller_than_expected() -> None:
    """Few of a pure release's samples matter, so its losses spread less than the first guess of the step."""
    event = Repeated(PoissonSampled(1e-4, Pure(2.5, Relation.ADD_REMOVE)), 100)
    fine = pld_profile(event, Relation.ADD_REMOVE, 1.0, delta=1e-5, step=2e-6).epsilon(1e-5)
    assert account(event, delta=1e-5, relation=ADD) == pytest.approx(fine, rel=2e-3)


@pytest.mark.parametrize(
    ("event", "delta", "expected", "rel"),
    [
        (poisson_gaussian(1e-3, 1.0, 10**6), 1e-5, 6.02, 0.01),  # μ ≈ 1.31 if the central limit held
        (poisson_gaussian(1e-6, 1.0, 10**6), 1e-5, 0.00268, 0.01),
        (poisson_gaussian(1e-6, 0.5, 10**6), 1e-5, 0.0268, 0.03),  # rare large losses: capped by the grid's size
        (poisson_gaussian(1e-3, 0.2, 10), 1e-5, 20.8, 0.01),
        (poisson_gaussian(1e-3, 0.05, 10), 0.1, 0.0, 0.01),  # a chance of 1 − 0.999¹⁰ < δ of any loss at all
    ],
)
def test_extremes(event: Event, delta: float, expected: float, rel: float) -> None:
    assert account(event, delta=delta, relation=ADD) == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("delta", [1e-12, 1e-30])
@pytest.mark.parametrize(("rate", "z", "steps"), [(0.01, 1.0, 10_000), (1e-3, 1.0, 1000), (1.5e-4, 0.61, 65_600)])
def test_tiny_delta_stays_with_the_losses_and_beats_the_curves(
    rate: float, z: float, steps: int, delta: float, relation: str
) -> None:
    """A curve of the same pair cannot be smaller; tilted sums must not lose that where large losses are rare."""
    event = poisson_gaussian(rate, z, steps)
    proof = prove(event, delta=delta, relation=relation)
    assert proof.accountant == "pld-poisson"
    assert proof.epsilon < account(event, delta=delta, relation=relation, accountant="rdp")
    assert proof.epsilon > account(event, delta=10 * delta, relation=relation)


def test_too_little_noise_has_no_finite_epsilon_on_the_grid() -> None:
    profile = pld_profile(PoissonSampled(0.5, Gaussian(0.01)), Relation.ADD_REMOVE, 1.0, delta=1e-5)
    assert profile.epsilon(1e-5) == math.inf
    assert prove(PoissonSampled(0.5, Gaussian(0.01)), delta=1e-5, relation=ADD).accountant == "rdp"


def test_epsilon_and_delta_of_a_grid_invert_each_other() -> None:
    grid = DiscretizedPLD(0.1, -2, np.array([0.1, 0.1, 0.2, 0.3, 0.2, 0.09]), 0.01)
    for delta in (0.011, 0.02, 0.05, 0.08):
        epsilon = grid.epsilon(delta)
        assert epsilon > 0
        assert grid.delta(epsilon) == pytest.approx(delta)
    assert grid.epsilon(0.5) == 0.0
    assert grid.epsilon(0.01) == math.inf
    above = DiscretizedPLD(0.1, 3, np.array([0.5, 0.5]), 0.0)  # no loss below 0.3
    assert above.delta(above.epsilon(0.2)) == pytest.approx(0.2)


def test_mixed_releases_share_one_grid() -> None:
    parts: tuple[Event, ...] = (
        poisson_gaussian(0.02, 1.2, 50),
        Gaussian(8.0),
        Repeated(Pure(0.05, Relation.ADD_REMOVE), 4),
        Pure(0.1, Relation.ADD_REMOVE),
        PoissonSampled(0.05, Pure(0.5, Relation.ADD_REMOVE)),
    )
    together = account(Composed(parts), delta=1e-5, relation=ADD)
    assert together == pytest.approx(account(Composed(parts[::-1]), delta=1e-5, relation=ADD), rel=1e-9)
    assert max(account(part, delta=1e-5, relation=ADD) for part in parts) < together
    assert together < sum(account(part, delta=2e-6, relation=ADD) for part in parts)


@pytest.mark.parametrize(
    ("z", "rate", "steps", "delta", "relation"),
    [(0.15, 1e-6, 10**5, 1e-10, ADD), (0.2, 1e-8, 10**6, 1e-10, REPLACE)],
)
def test_little_noise_on_rare_samples_is_never_looser_than_its_own_moments(
    z: float, rate: float, steps: int, delta: float, relation: str
) -> None:
    """The grid alone said ε = 1.1e7 where Rényi divergences prove 59.5."""
    event = poisson_gaussian(rate, z, steps)
    by_losses = account(event, delta=delta, relation=relation, accountant="pld")
    assert by_losses <= account(event, delta=delta, relation=relation, accountant="rdp")
    assert account(event, delta=delta, relation=relation) == by_losses
    assert delta_of(event, epsilon=by_losses, relation=relation) <= delta * (1.0 + 1e-3)


def test_moments_bound_the_sum_whatever_became_of_its_grid() -> None:
    profile = pld_profile(poisson_gaussian(0.01, 1.0, 1000), Relation.ADD_REMOVE, 1.0, delta=1e-5)
    for order in profile.orders:
        assert order.grid.epsilon(1e-5) < 50.0
        nothing = replace(order, grid=replace(order.grid, infinite=1.0))
        assert order.epsilon(1e-5) < nothing.epsilon(1e-5) < 1.3 * order.epsilon(1e-5)
        assert order.delta(1.0) < nothing.delta(1.0) < 1.0
