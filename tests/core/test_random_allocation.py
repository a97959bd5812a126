"""Random allocation: its price against exact integrals and simulations, its samples, and the plans made of both."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy.special import ndtr

from quietgrad import DPSGD, DPSRM, Budget, events, plan
from quietgrad.core.accounting.accounting import account, delta_of, prove
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.events import Repeated
from quietgrad.core.accounting.random_allocation import AllocationPair, law_of_sum
from quietgrad.core.errors import UnprovableError
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.plans.schedule import Plan, Slot
from quietgrad.core.sampling import RandomAllocation

ADD = Relation.ADD_REMOVE
cost = partial(account, delta=1e-5, relation=ADD)
proved = partial(prove, delta=1e-5, relation=ADD)


def call(strike: np.ndarray, mu: float) -> np.ndarray:
    """E(Y − K)₊ of a log-normal Y of mean one: Black and Scholes for K > 0."""
    positive = np.maximum(strike, 1e-300)
    d = -np.log(positive) / mu + mu / 2
    return np.where(strike > 0, ndtr(d) - positive * ndtr(d - mu), 1.0 - strike)


def exact_profiles(mu: float, steps: int, epsilon: float) -> tuple[float, float]:
    """δ(ε) of one epoch in both orders: all coordinates but one by the trapezoidal rule, that one in closed
    form.
    """
    nodes = {2: 20001, 3: 1201}[steps]
    g, width = np.linspace(-9.0, 9.0 + mu, nodes, retstep=True)
    y, weight = np.exp(mu * g - mu * mu / 2), np.exp(-g * g / 2) * width / math.sqrt(2 * math.pi)
    total, mass = np.zeros(1), np.ones(1)
    for _ in range(steps - 1):
        total = np.add.outer(total, y).ravel()
        mass = np.multiply.outer(mass, weight).ravel()
    above = float(mass @ call(steps * math.exp(epsilon) - total, mu)) / steps
    strike = (
        steps * math.exp(-epsilon) - total
    )  # E(1 − e^ε S)₊ = e^ε E(K − Y)₊/T, and E(K − Y)₊ = E(Y − K)₊ + K − 1
    put = np.where(strike > 0, call(strike, mu) + strike - 1.0, 0.0)
    return above, math.exp(epsilon) * float(mass @ np.maximum(put, 0.0)) / steps


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_one_epoch_is_the_mixture_of_all_its_steps(steps: int, sigma: float) -> None:
    grid = AllocationPair(1 / sigma, steps).on_grid(1e-4, 1e-18)
    resolved = {2: 1e-6, 3: 1e-4}[steps]  # how far the integral itself is right
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
        exact = exact_profiles(1 / sigma, steps, epsilon)
        for losses, true in zip((grid, grid.reversed()), exact, strict=True):
            if true < 1e-9:
                continue  # below what the integral resolves
            assert losses.delta(epsilon) >= true * (1 - resolved)
            if epsilon > 0.0:
                assert losses.epsilon(true) <= epsilon * 1.01


@pytest.mark.parametrize(("sigma", "steps", "epochs"), [(0.6, 5, 3), (1.0, 30, 1), (0.7, 10, 40)])
def test_simulated_runs_never_cost_more(sigma: float, steps: int, epochs: int) -> None:
    """δ at the proved ε, simulated in both orders; a correct bound fails with probability below 10⁻⁵ altogether."""
    rng = np.random.default_rng([steps, epochs])
    event = events.random_allocation(steps_per_epoch=steps, noise_multiplier=sigma, epochs=epochs)
    runs = 60_000
    present, absent = np.zeros(runs), np.zeros(runs)
    for _ in range(epochs):
        for losses, shift in ((present, 1.0), (absent, 0.0)):
            x = rng.normal(0.0, sigma, (runs, steps))
            x[:, 0] += shift
            exponent = (2 * x - 1) / (2 * sigma**2)
            losses += np.log(np.exp(exponent).mean(axis=1))
    for delta in (0.3, 0.03, 1e-3):
        epsilon = cost(event, delta=delta)
        found = []
        for losses in (present, -absent):
            values = np.maximum(-np.expm1(epsilon - losses), 0.0)
            found.append((values.mean(), values.std() / math.sqrt(runs)))
        assert all(mean <= delta * 1.000001 + 5.0 * error + 20.0 / runs * (delta < 1e-2) for mean, error in found)
        worst, error = max(found)
        assert epsilon == 0.0 or worst + 5.0 * error >= 0.9 * delta  # and it is no loose bound either


def test_masses_keep_their_mean_and_say_how_wrong_they_are() -> None:
    for mu, steps in ((2.0, 2), (1.0, 1000), (0.01, 77), (0.2, 99_999)):
        law = law_of_sum(mu, steps, 1e-20)
        assert law.error < 1e-6
        assert abs(math.fsum(law.mass) - 1.0) < 1e-9 + law.error
        assert abs(math.fsum(law.mass * law.points) / steps - 1.0) < 1e-9 + law.error
        assert law.lost / steps < 1e-20


def test_it_composes_with_other_releases_and_with_itself() -> None:
    epoch = events.random_allocation(steps_per_epoch=50, noise_multiplier=1.0)
    look = events.Pure(0.2, ADD)
    both = events.composed([events.repeated(epoch, 4), look, events.poisson_gaussian(0.01, 1.0, 100)])
    one = cost(events.repeated(epoch, 4))
    assert one < cost(both) < one + 0.2 + 1.0
    assert proved(both).accountant == "pld"
    assert delta_of(both, epsilon=cost(both), relation=ADD) <= 1.001e-5
    slack = events.TotalVariationSlack(1e-9)  # of every step of an epoch
    inside = events.AllocationSampled(50, events.composed([events.Gaussian(1.0), slack]))
    outside = events.composed([epoch, events.TotalVariationSlack(50e-9)])
    assert cost(inside) == cost(outside)


def test_what_has_no_proof_is_refused() -> None:
    epoch = events.random_allocation(steps_per_epoch=50, noise_multiplier=1.0)
    with pytest.raises(UnprovableError, match="under add-remove"):
        cost(epoch, relation=Relation.REPLACE_ONE)
    with pytest.raises(UnprovableError, match="Gaussian releases"):
        cost(events.AllocationSampled(50, events.Pure(1.0, ADD)))
    with pytest.raises(ValueError, match="steps_per_epoch"):
        events.random_allocation(steps_per_epoch=0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="steps_per_epoch"):
        events.random_allocation(steps_per_epoch=10**10, noise_multiplier=1.0)


# --- samples --------------------------------------------------------------------------------------------------


def test_an_epoch_of_one_step_is_every_record() -> None:
    batch = RandomAllocation(1).sampler(5, SecureStream(seed_key(0), "batches")).batch(3)
    assert batch is not None
    assert batch.tolist() == [0, 1, 2, 3, 4]
    assert RandomAllocation(1).event(events.Gaussian(1.0), 4) == events.gaussian(1.0, 4)


# --- plans ----------------------------------------------------------------------------------------------------


def test_a_plan_pays_for_epochs_and_a_started_one_whole() -> None:
    made = plan(DPSGD(steps=40, batch_size=100, sampling="random-allocation"), n=1000, budget=Budget(1.0, 1e-5))
    assert made.schedule["gradient"].sampling == RandomAllocation(10)
    assert made.event == events.random_allocation(
        steps_per_epoch=10, noise_multiplier=made.noise_multiplier, epochs=4
    )
    assert made.proof.accountant == "pld-random-allocation"
    assert 0.99 < made.epsilon() <= 1.0
    assert Plan.from_json(made.to_json()) == made
    begun = {used: made.event_of({"gradient": used}) for used in (1, 10, 11, 40)}
    assert [getattr(begun[used], "count", 1) for used in (1, 10, 11, 40)] == [1, 1, 2, 4]
    poisson = plan(DPSGD(steps=40, batch_size=100), n=1000, budget=Budget(1.0, 1e-5))
    assert made.noise_multiplier < poisson.noise_multiplier


def test_a_random_round_pays_for_the_epochs_it_reaches() -> None:
    for method in (DPSGD, DPSRM):
        made = method(steps=20, batch_size=100, sampling="random-allocation", returns="random")
        (slot,) = made.schedule(1000).slots
        event = slot.event(1.0, ADD)
        assert isinstance(event, events.RandomNumberOfReleases)
        reached = {0: 0.05, 1: 0.5, 2: 0.45}
        assert dict(event.law) == pytest.approx(reached)


def test_refusals_of_plans_say_what_to_do() -> None:
    budget = Budget(1.0, 1e-5)
    with pytest.raises(ValueError, match="Plan 40 or 50 steps"):
        plan(DPSGD(steps=45, batch_size=100, sampling="random-allocation"), n=1000, budget=budget)
    with pytest.raises(UnprovableError, match="under add-remove"):
        plan(
            DPSGD(steps=40, batch_size=100, sampling="random-allocation"),
            n=1000,
            budget=Budget(1.0, 1e-5, Relation.REPLACE_ONE),
        )
    with pytest.raises(ValueError, match="correlated noise"):
        plan(
            DPSGD(steps=40, batch_size=100, sampling="random-allocation", noise="correlated"), n=1000, budget=budget
        )
    event = Slot("gradient", RandomAllocation(10), 40).event(2.0, ADD)
    assert isinstance(event, Repeated)
    assert event.count == 4
