"""Every kind of event against quadrature, enumeration or simulation, at twenty settings each.

Reference values are computed here by other means than the proofs: integrals of densities on a fine grid, sums over
all outcomes, or Monte Carlo with a stated false-alarm rate. A proof must not be below its reference, nor far above.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from quietgrad_verify import NoRule, prove
from quietgrad_verify.correlated import column_of, move, patterns, sensitivity

Floats = npt.NDArray[np.float64]
Event = dict[str, Any]
RNG = np.random.default_rng(20)
SETTINGS = 20 if os.environ.get("QUIETGRAD_LONG") else 5


def gaussian(z: float) -> Event:
    return {"event": "gaussian", "noise_multiplier": z}


def repeated(inner: Event, count: int) -> Event:
    return {"event": "repeated", "inner": inner, "count": count}


def composed(*parts: Event) -> Event:
    return {"event": "composed", "parts": list(parts)}


def pure(epsilon: float, relation: str) -> Event:
    return {"event": "pure", "epsilon": epsilon, "relation": relation}


# ---- references ------------------------------------------------------------------------------------------------

GRID = np.linspace(-20.0, 20.0, 20_001)


def normal(mean: float) -> Floats:
    return np.exp(-((GRID - mean) ** 2) / 2.0) / math.sqrt(2.0 * math.pi)


def hockey_stick(p: Floats, q: Floats, epsilon: float) -> float:
    """∫(p − e^ε q)₊ by the trapezoidal rule."""
    return float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0.0), GRID))


def least(delta_at: Callable[[float], float], delta: float) -> float:
    low, high = 0.0, 64.0
    if delta_at(0.0) <= delta:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return high


def worse_order(p: Floats, q: Floats, delta: float) -> float:
    return max(least(partial(hockey_stick, a, b), delta) for a, b in ((p, q), (q, p)))


def discrete(p: Floats, q: Floats, delta: float) -> float:
    def at(a: Floats, b: Floats, epsilon: float) -> float:
        return float(np.maximum(a - math.exp(epsilon) * b, 0.0).sum())

    return max(least(partial(at, a, b), delta) for a, b in ((p, q), (q, p)))


def settings(seed: int, *ranges: tuple[float, float]) -> list[tuple[float, ...]]:
    """The first five of twenty settings, spread evenly in the logarithm; all twenty with ``make long``."""
    rng = np.random.default_rng(seed)
    draws = [np.exp(rng.uniform(math.log(low), math.log(high), 20)) for low, high in ranges]
    return [tuple(float(v) for v in row) for row in zip(*draws, strict=True)][:SETTINGS]


def agree(event: Event, relation: str, delta: float, reference: float, above: float = 2e-3) -> None:
    proved = prove(event, delta=delta, relation=relation).epsilon
    assert reference * (1.0 - 1e-4) - 1e-7 <= proved <= reference * (1.0 + above) + 1e-4


# ---- single releases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("z", "count", "delta"), settings(1, (0.8, 9.0), (1.0, 30.0), (1e-8, 1e-3)))
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_gaussian_releases(z: float, count: float, delta: float, relation: str) -> None:
    number = int(count)
    mu = (1.0 if relation == "add-remove" else 2.0) * math.sqrt(number) / z
    if mu > 8.0:
        number, mu = 1, mu / math.sqrt(number)
    agree(repeated(gaussian(z), number), relation, delta, worse_order(normal(mu), normal(0.0), delta), 1e-4)


@pytest.mark.parametrize(("rate", "z", "delta"), settings(2, (0.005, 0.5), (0.6, 4.0), (1e-7, 1e-3)))
def test_poisson_samples_under_add_remove(rate: float, z: float, delta: float) -> None:
    mixture = (1.0 - rate) * normal(0.0) + rate * normal(1.0 / z)
    event = {"event": "poisson", "rate": rate, "inner": gaussian(z)}
    agree(event, "add-remove", delta, worse_order(mixture, normal(0.0), delta))


@pytest.mark.parametrize(("rate", "z", "delta"), settings(3, (0.005, 0.5), (0.8, 4.0), (1e-7, 1e-3)))
def test_poisson_samples_under_replace_one(rate: float, z: float, delta: float) -> None:
    p, q = ((1.0 - rate) * normal(0.0) + rate * normal(side / z) for side in (1.0, -1.0))
    agree({"event": "poisson", "rate": rate, "inner": gaussian(z)}, "replace-one", delta, worse_order(p, q, delta))


@pytest.mark.parametrize(("part", "z", "delta"), settings(4, (0.01, 0.5), (1.0, 6.0), (1e-7, 1e-3)))
def test_fixed_size_samples(part: float, z: float, delta: float) -> None:
    """One release is known exactly: the mixture against its own part, at sensitivity 2C."""
    n, size = 1000, max(1, round(1000 * part))
    mixture = (1.0 - size / n) * normal(0.0) + size / n * normal(2.0 / z)
    event = {"event": "fixed-size", "n": n, "batch_size": size, "inner": gaussian(z)}
    agree(event, "replace-one", delta, least(lambda e: hockey_stick(mixture, normal(0.0), e), delta))


@pytest.mark.parametrize(("epsilon", "count", "delta"), settings(5, (0.02, 1.5), (1.0, 12.0), (1e-6, 1e-2)))
def test_pure_releases(epsilon: float, count: float, delta: float) -> None:
    """Randomised response, all outcomes of all releases."""
    number = int(count)
    heads = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    ones = np.arange(number + 1)
    ways = np.array([math.comb(number, k) for k in ones], float)
    p, q = (ways * a**ones * (1.0 - a) ** (number - ones) for a in (heads, 1.0 - heads))
    event = repeated(pure(epsilon, "add-remove"), number)
    agree(event, "add-remove", delta, discrete(p, q, delta), 5e-3)


@pytest.mark.parametrize(("epsilon", "rate", "count"), settings(6, (0.2, 2.0), (0.02, 0.5), (1.0, 8.0)))
@pytest.mark.parametrize("kind", ["poisson", "fixed-size"])
def test_samples_of_pure_releases(epsilon: float, rate: float, count: float, kind: str) -> None:
    number, delta = int(count), 1e-4
    heads = math.exp(epsilon) / (1.0 + math.exp(epsilon))
    size = max(1, round(1000 * rate))
    share = rate if kind == "poisson" else size / 1000
    p, q = np.array([heads, 1.0 - heads]), np.array([1.0 - heads, heads])
    if kind == "poisson":
        relation, inner = "add-remove", {"event": kind, "rate": rate, "inner": pure(epsilon, "add-remove")}
    else:
        relation = "replace-one"
        inner = {"event": kind, "n": 1000, "batch_size": size, "inner": pure(epsilon, "replace-one")}
    mixed = (1.0 - share) * q + share * p
    one = [mixed, q]
    for _ in range(number - 1):
        one = [np.outer(a, b).ravel() for a, b in zip(one, (mixed, q), strict=True)]
    reference = discrete(one[0], one[1], delta)
    proved = prove(repeated(inner, number), delta=delta, relation=relation).epsilon
    assert reference * (1.0 - 1e-4) <= proved
    if kind == "poisson":  # of fixed-size batches no pair that attains the bound is known
        assert proved <= reference * 1.01 + 1e-3


@pytest.mark.parametrize(("rho", "delta"), settings(7, (1e-3, 2.0), (1e-8, 1e-3)))
def test_zcdp_releases(rho: float, delta: float) -> None:
    """A Gaussian release of that ρ is one: no bound for all of them can be below, and the best order is known."""
    mu = math.sqrt(2.0 * rho)
    exact = worse_order(normal(mu), normal(0.0), delta)
    orders = 1.0 + np.geomspace(1e-3, 1e6, 200_001)
    best = float(np.min(rho * orders + np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)))
    proved = prove(
        {"event": "zcdp", "rho": rho, "relation": "add-remove"}, delta=delta, relation="add-remove"
    ).epsilon
    assert exact <= proved <= max(best, 0.0) * 1.002 + 1e-4


# ---- random allocation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("z", "steps", "delta"), settings(8, (0.9, 4.0), (2.0, 60.0), (1e-5, 1e-2)))
def test_random_allocation_against_simulation(z: float, steps: float, delta: float) -> None:
    """Importance sampling from the world with the record: five standard errors, one false alarm in 10⁶ tests."""
    number, mu, runs = int(steps), 1.0 / z, 200_000
    rng = np.random.default_rng(int(1e6 * z))
    g = rng.standard_normal((runs, number))
    plain = np.exp(mu * g - mu * mu / 2.0).mean(axis=1)  # S in the world without it
    g[:, 0] += mu
    lifted = np.exp(mu * g - mu * mu / 2.0).mean(axis=1)  # S in the world with it: which step, does not matter
    event = {"event": "random-allocation", "steps_per_epoch": number, "inner": gaussian(z)}
    epsilon = prove(event, delta=delta, relation="add-remove").epsilon
    for value in (
        np.maximum(1.0 - math.exp(epsilon) / lifted, 0.0),
        np.maximum(1.0 - math.exp(epsilon) * plain, 0.0),
    ):
        assert float(value.mean()) - 5.0 * float(value.std() / math.sqrt(runs)) - 1e-12 <= delta
    lower = epsilon * 0.97 - 0.01
    if lower > 0.0:  # an ε 3 % smaller is seen to be too small, where the simulation can see it
        values = np.maximum(1.0 - math.exp(lower) / lifted, 0.0), np.maximum(1.0 - math.exp(lower) * plain, 0.0)
        assert max(float(v.mean() + 5.0 * v.std() / math.sqrt(runs)) for v in values) + 2e-6 > delta


@pytest.mark.parametrize(("z", "epochs"), settings(9, (1.0, 3.0), (1.0, 20.0)))
def test_epochs_cost_less_than_every_record_in_every_epoch(z: float, epochs: float) -> None:
    one = {"event": "random-allocation", "steps_per_epoch": 40, "inner": gaussian(z)}
    hidden = prove(repeated(one, int(epochs)), delta=1e-5, relation="add-remove").epsilon
    open_ = prove(repeated(gaussian(z), int(epochs)), delta=1e-5, relation="add-remove").epsilon
    poisson = {"event": "poisson", "rate": 1.0 / 40, "inner": gaussian(z)}
    sampled = prove(repeated(poisson, 40 * int(epochs)), delta=1e-5, relation="add-remove").epsilon
    assert hidden < open_
    assert hidden == pytest.approx(sampled, rel=0.25)


# ---- compositions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("z", "mean", "delta"), settings(10, (4.0, 30.0), (2.0, 40.0), (1e-7, 1e-3)))
def test_random_rounds_of_gaussian_releases(z: float, mean: float, delta: float) -> None:
    most = int(mean) + 1
    law = [[k, 1.0 / most] for k in range(1, most + 1)]

    def delta_at(epsilon: float) -> float:
        mus = [math.sqrt(k) / z for k, _ in law]
        return sum(hockey_stick(normal(mu), normal(0.0), epsilon) / most for mu in mus)

    event = {"event": "random-round", "inner": gaussian(z), "law": law}
    agree(event, "add-remove", delta, least(delta_at, delta))


@pytest.mark.parametrize(("rate", "z"), settings(11, (0.02, 0.3), (0.9, 3.0)))
def test_random_rounds_of_samples(rate: float, z: float) -> None:
    """One or no release: δ is the average, exactly."""
    mixture = (1.0 - rate) * normal(0.0) + rate * normal(1.0 / z)
    event = {"event": "random-round", "inner": {"event": "poisson", "rate": rate, "inner": gaussian(z)},
             "law": [[0, 0.5], [1, 0.5]]}  # fmt: skip
    agree(event, "add-remove", 1e-5, worse_order(mixture, normal(0.0), 2e-5))


@pytest.mark.parametrize(("z", "mean", "delta"), settings(12, (3.0, 40.0), (1.5, 30.0), (1e-7, 1e-4)))
def test_selection_by_enumeration(z: float, mean: float, delta: float) -> None:
    """The best of K scores, K geometric: the law of the released one is known, on a grid of scores."""
    mu = 1.0 / z
    p, q = normal(mu), normal(0.0)
    step = GRID[1] - GRID[0]
    gamma = 1.0 / mean  # geometric: P(K = k) = γ(1 − γ)^{k−1}

    def best(density: Floats) -> Floats:
        cdf = np.clip(np.cumsum(density) * step, 0.0, 1.0)
        return np.asarray(density * gamma / (1.0 - (1.0 - gamma) * cdf) ** 2)

    event = {"event": "repeat-and-select", "inner": gaussian(z), "mean": mean, "shape": 1.0}
    proved = prove(event, delta=delta, relation="add-remove").epsilon
    assert worse_order(best(p), best(q), delta) <= proved
    assert prove(gaussian(z), delta=delta, relation="add-remove").epsilon <= proved


@pytest.mark.parametrize(("z", "slack", "failure"), settings(13, (2.0, 9.0), (1e-12, 1e-8), (1e-9, 1e-6)))
def test_slack_and_failures(z: float, slack: float, failure: float) -> None:
    delta = 1e-5
    event = composed(gaussian(z), {"event": "slack", "total_variation": slack},
                     {"event": "failure", "probability": failure})  # fmt: skip
    proved = prove(event, delta=delta, relation="add-remove").epsilon
    epsilon = proved + math.log1p(-failure)
    left = hockey_stick(normal(1.0 / z), normal(0.0), epsilon) + (1.0 + math.exp(epsilon)) * slack
    assert left == pytest.approx(delta - failure, rel=2e-3)


@pytest.mark.parametrize(("a", "b"), settings(14, (0.05, 1.0), (2.0, 20.0)))
def test_upfront_is_added_and_parallel_is_the_worst(a: float, b: float) -> None:
    rest = prove(gaussian(b), delta=1e-5, relation="add-remove").epsilon
    upfront = composed({"event": "upfront", "epsilon": a, "relation": "add-remove"}, gaussian(b))
    assert prove(upfront, delta=1e-5, relation="add-remove").epsilon == pytest.approx(a + rest)
    for kind, name in (("parallel", "parts"), ("per-party", "parties")):
        apart = {"event": kind, name: [gaussian(b), repeated(gaussian(3.0 * b), 2), gaussian(b * 1.5)]}
        assert prove(apart, delta=1e-5, relation="add-remove").epsilon == pytest.approx(rest)


@pytest.mark.parametrize(("rate", "z", "epsilon"), settings(15, (0.05, 0.5), (1.0, 4.0), (0.1, 1.0)))
def test_two_kinds_together(rate: float, z: float, epsilon: float) -> None:
    """A sample and a pure release: the product of their outcomes, on a grid."""
    delta = 1e-4
    mixture = (1.0 - rate) * normal(0.0) + rate * normal(1.0 / z)
    heads = math.exp(epsilon) / (1.0 + math.exp(epsilon))

    def delta_at(p: Floats, q: Floats, value: float) -> float:
        first = hockey_stick(heads * p, (1.0 - heads) * q, value)
        return first + hockey_stick((1.0 - heads) * p, heads * q, value)

    both = (mixture, normal(0.0)), (normal(0.0), mixture)
    reference = max(least(partial(delta_at, p, q), delta) for p, q in both)
    event = composed({"event": "poisson", "rate": rate, "inner": gaussian(z)}, pure(epsilon, "add-remove"))
    agree(event, "add-remove", delta, reference)


# ---- correlated noise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SETTINGS))
def test_the_sensitivity_of_correlated_noise_by_all_patterns_and_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    releases, most = int(rng.integers(4, 9)), int(rng.integers(1, 4))
    apart = int(rng.integers(1, 4))
    lam, alpha = rng.uniform(0.2, 0.95, 2), rng.uniform(0.05, 0.45, 2)
    mechanism = {"kind": "correlated", "releases": releases, "participations": most, "separation": apart,
                 "lam": lam.tolist(), "alpha": alpha.tolist()}  # fmt: skip
    s, how = sensitivity(mechanism)
    column, _, _ = column_of(mechanism)
    assert "patterns" in how
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(releases)] for i in range(releases)])
    worst = 0.0
    for pattern in itertools.chain.from_iterable(
        itertools.combinations(range(releases), k) for k in range(1, most + 1)
    ):
        if all(later - earlier >= apart for earlier, later in itertools.pairwise(pattern)):
            for signs in itertools.product((1.0, -1.0), repeat=len(pattern)):
                vector = np.zeros(releases)
                vector[list(pattern)] = signs
                worst = max(worst, float(np.linalg.norm(matrix @ vector)))
    assert s == pytest.approx(worst, rel=1e-12)
    assert s == pytest.approx(move(column, tuple(range(0, releases, apart))[:most]))  # what the theorem says


def test_long_runs_take_the_theorem_and_refuse_columns_that_rise() -> None:
    long = {
        "kind": "correlated",
        "releases": 5000,
        "participations": 50,
        "separation": 100,
        "lam": [0.9],
        "alpha": [0.3],
    }
    s, how = sensitivity(long)
    assert "earliest" in how
    assert s > 1.0
    assert sum(1 for _ in patterns(6, 2, 3)) > 5
    rising = {"kind": "banded", "releases": 40, "column": [1.0, 0.2, 0.5]}
    assert sensitivity(rising)[0] > 1.0  # few patterns: all are tried
    with pytest.raises(ValueError, match="whole number"):
        sensitivity({"kind": "banded", "releases": 0, "column": [1.0]})


# ---- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "relation", "why"),
    [
        (pure(0.1, "replace-one"), "add-remove", "proved under replace-one"),
        ({"event": "random-allocation", "steps_per_epoch": 4, "inner": gaussian(2.0)}, "replace-one", "add-remove"),
        ({"event": "fixed-size", "n": 10, "batch_size": 2, "inner": gaussian(2.0)}, "add-remove", "not understood"),
        ({"event": "poisson", "rate": 0.1, "inner": composed(gaussian(2.0), pure(0.1, "add-remove"))}, "add-remove",
         "not understood"),
        ({"event": "poisson", "rate": 0.1, "inner": {"event": "upfront", "epsilon": 0.1, "relation": "add-remove"}},
         "add-remove", "before them"),
        (composed(gaussian(2.0), {"event": "failure", "probability": 0.5}), "add-remove", "uses up"),
        (repeated({"event": "poisson", "rate": 1e-9, "inner": gaussian(1.0)}, 10**12), "add-remove", "releases"),
        ({"event": "poisson", "rate": 0.5, "inner": gaussian(0.01)}, "add-remove", "so small"),
    ],
)  # fmt: skip
def test_what_no_rule_proves_is_refused(event: Event, relation: str, why: str) -> None:
    with pytest.raises(NoRule, match=why):
        prove(event, delta=1e-5, relation=relation)


@pytest.mark.parametrize(
    "event",
    [
        None, [], {}, {"event": "gauss"}, gaussian(0.0), gaussian(math.nan), gaussian(True),
        {**gaussian(1.0), "more": 1},
        composed(), repeated(gaussian(1.0), 0), repeated(gaussian(1.0), 1.5),  # type: ignore[arg-type]
        {"event": "random-round", "inner": gaussian(1.0), "law": [[1, 0.5]]},
        {"event": "poisson", "rate": 0.0, "inner": gaussian(1.0)}, composed(*[gaussian(1.0)] * 5000),
        {"event": "fixed-size", "n": 5, "batch_size": 6, "inner": gaussian(1.0)},
        {"event": "pure", "epsilon": 1.0, "relation": "both"},
    ],
)  # fmt: skip
def test_what_is_no_event_is_refused(event: Any) -> None:
    with pytest.raises(ValueError):
        prove(event, delta=1e-5, relation="add-remove")
