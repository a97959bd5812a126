"""Adding losses: the bound on rounding holds, tilted sums are upper bounds, and millions of steps keep their ε."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from quietgrad.core.accounting.accounting import account, delta_of, prove
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_epsilon
from quietgrad.core.accounting.events import (
    Composed,
    Event,
    Gaussian,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    Repeated,
    poisson_gaussian,
)
from quietgrad.core.accounting.loss_distribution import DiscretizedPLD
from quietgrad.core.accounting.pld_accountant import chernoff, compose_tilted, transform_error

ADD = "add-remove"
Floats = npt.NDArray[np.float64]


def masses(kind: str, size: int) -> Floats:
    rng = np.random.default_rng(size)
    raw = {
        "one point": np.eye(1, size, size // 3)[0],
        "flat": np.ones(size),
        "rough": rng.exponential(size=size) ** 4,
        "bell": np.exp(-0.5 * ((np.arange(size) - size / 2) / (size / 20)) ** 2),
        "cliff": np.exp(-np.arange(size, dtype=np.float64)),
    }[kind]
    return np.asarray(raw / raw.sum(), np.float64)


@pytest.mark.parametrize("kind", ["one point", "flat", "rough", "bell", "cliff"])
@pytest.mark.parametrize("size", [8, 160, 5 * 2**11, 2**15])
def test_no_coefficient_of_a_transform_is_further_off_than_said(kind: str, size: int) -> None:
    """Against sums in 64-bit mantissas with exact roots of unity; the bound has room for machines that differ."""
    values = masses(kind, size)
    found = np.fft.rfft(values)
    index = np.arange(size)
    for k in {0, 1, 2, 3, size // 7, size // 4, size // 3, size // 2}:
        turns = (index * k % size).astype(np.longdouble) / np.longdouble(size)
        angle = 2 * np.longdouble("3.14159265358979323846264338327950288") * turns
        exact = complex(np.sum(values * np.cos(angle))), complex(np.sum(values * np.sin(angle)))
        assert abs(found[k] - (exact[0].real - 1j * exact[1].real)) <= transform_error(size) / 2
    back = np.fft.irfft(found, size)
    assert np.max(np.abs(back - values)) <= transform_error(size) * (1 + float(np.abs(found).sum()) * 2 / size)


def exact_sum(mass: list[float], times: int) -> list[mpmath.mpf]:
    total = [mpmath.mpf(1)]
    base = [mpmath.mpf(m) for m in mass]
    for _ in range(times):
        grown = [mpmath.mpf(0)] * (len(total) + len(base) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(base):
                grown[i + j] += a * b
        total = grown
    return total


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    "mass", [[0.1, 0.2, 0.4, 0.2, 0.1], [0.01, 0.97, 0.0, 0.0, 0.02], [0.5, 0.5 - 2**-30, 2**-30]]
)
def test_tilted_masses_are_upper_bounds_of_the_exact_ones(mass: list[float], share: float) -> None:
    """30 releases convolved in 60 digits; every mass of the window, 10⁻⁴⁰ ones included."""
    leaf: Event = Gaussian(1.0)
    step, times, first = 0.1, 30, -2
    grid = DiscretizedPLD(step, first, np.array(mass), 0.0)
    deviation = math.sqrt(times * grid.variance)
    releases, grids = {leaf: times}, {leaf: grid}
    bounds = chernoff(releases, grids, deviation, 1e-30)
    tilt = share * bounds.tilt(bounds.high * 0.7)
    found = compose_tilted(releases, releases, grids, bounds, tilt, tail=1e-30, one_tail=1e-32)
    with mpmath.workdps(60):
        exact = exact_sum(mass, times)
        for i, value in enumerate(exact):
            place = times * first + i - found.first
            if 0 <= place < found.mass.size and tilt > 0.0:
                assert mpmath.mpf(float(found.mass[place])) >= value
        for epsilon in (0.0, 0.3, 0.7 * bounds.high):
            losses = [(step * (times * first + i), value) for i, value in enumerate(exact)]
            truth = mpmath.fsum(v * -mpmath.expm1(epsilon - loss) for loss, v in losses if loss > epsilon)
            assert mpmath.mpf(found.delta(epsilon)) >= truth * (1 - mpmath.mpf(10) ** -12)
        if share == 1.0:  # at its own ε the tilted sum is not only above, it is right
            assert found.delta(0.7 * bounds.high) == pytest.approx(float(truth), rel=1e-6)


@pytest.mark.parametrize(("steps", "delta"), [(10**6, 1e-9), (10**6, 1e-12), (10**7, 1e-12)])
def test_millions_of_steps_reach_the_exact_gaussian(steps: int, delta: float) -> None:
    event = poisson_gaussian(1 - 1e-12, math.sqrt(steps), steps)
    exact = gaussian_epsilon(1.0, delta)
    proof = prove(event, delta=delta, relation=ADD)
    assert proof.accountant == "pld-poisson"
    assert exact * (1 - 1e-9) <= proof.epsilon <= exact * (1 + 3e-4)


def two_point_delta(up: float, down: float, chance: float, steps: int, epsilon: float) -> float:
    """δ(ε) of ``steps`` losses that are ``up`` with ``chance``, else ``down``: a binomial sum, in 30 digits."""
    with mpmath.workdps(30):
        p, first = mpmath.mpf(chance), math.ceil((epsilon - steps * down) / (up - down))
        term = mpmath.exp(
            mpmath.loggamma(steps + 1) - mpmath.loggamma(first + 1) - mpmath.loggamma(steps - first + 1)
            + first * mpmath.log(p) + (steps - first) * mpmath.log1p(-p)
        )  # fmt: skip
        total = mpmath.mpf(0)
        for k in range(first, steps + 1):
            gain = -mpmath.expm1(epsilon - k * mpmath.mpf(up) - (steps - k) * mpmath.mpf(down)) * term
            total += gain
            if gain < total * mpmath.mpf(10) ** -15 and k > first + 50:
                break
            term *= mpmath.mpf(steps - k) / (k + 1) * p / (1 - p)
        return float(total)


@pytest.mark.parametrize(
    ("rate", "pure", "steps", "delta"),
    [
        (None, 2e-3, 10**6, 1e-9),
        (0.01, 0.2, 10**6, 1e-12),
    ],
)
def test_millions_of_randomised_responses_reach_the_binomial(
    rate: float | None, pure: float, steps: int, delta: float
) -> None:
    """Each loss has two values, sampled or not, so their sum is binomial in both orders of the neighbours."""
    single: Event = Pure(pure, Relation.ADD_REMOVE)
    event = Repeated(single if rate is None else PoissonSampled(rate, single), steps)
    found = account(event, delta=delta, relation=ADD, accountant="pld")
    q, odds = rate or 1.0, math.exp(pure)
    up, down = math.log1p(q * (odds - 1)), math.log1p(q * (1 / odds - 1))
    far = 1 / (1 + 1 / odds)  # the chance of the likelier answer
    with_record = q * far + (1 - q) * (1 - far)
    orders: list[Callable[[float], float]] = [
        lambda e: two_point_delta(up, down, with_record, steps, e),
        lambda e: two_point_delta(-down, -up, far, steps, e),
    ]
    assert max(order(found) for order in orders) <= delta  # never below the truth
    assert max(order(found * (1 - 2e-3)) for order in orders) >= delta  # and not far above it


def test_delta_at_a_given_epsilon_is_right_far_below_the_rounding_of_one() -> None:
    event = poisson_gaussian(1 - 1e-12, 1000.0, 10**6)
    for delta in (1e-10, 1e-13):
        assert delta_of(event, epsilon=gaussian_epsilon(1.0, delta), relation=ADD) == pytest.approx(delta, rel=5e-3)


def test_random_rounds_and_mixtures_are_tilted_alike() -> None:
    """Every kind of composition at a δ where sums are tilted: above its largest part, below twice the whole."""
    rounds = RandomNumberOfReleases(
        PoissonSampled(0.01, Gaussian(1.5)), ((5_000, 0.5), (20_000, 0.3), (40_000, 0.2))
    )
    parts: tuple[Event, ...] = (
        rounds,
        poisson_gaussian(0.002, 1.0, 30_000),
        Repeated(Pure(0.0025, Relation.ADD_REMOVE), 50),
    )
    together, worst = Composed(parts), Composed((poisson_gaussian(0.01, 1.5, 40_000), *parts[1:]))
    for delta in (1e-11, 1e-14):
        proof = prove(together, delta=delta, relation=ADD)
        assert proof.accountant.startswith("pld")
        most = account(worst, delta=delta, relation=ADD)
        # the longest run alone has a chance of 0.2, so it costs at least its ε at 5δ
        assert account(worst, delta=5 * delta, relation=ADD) * (1 - 1e-3) <= proof.epsilon <= most
