"""Noise in bands on secret samples: its proof by simulation of the exact mixtures, its law, its seams and refusals.

Checks are two-sided: the sound thing passes and each broken variant is caught. Statistical ones fix their seeds;
their margins of five deviations or more make a false alarm rarer than 1e-6.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.assurance.audit.noise_checks import probe_mechanism
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import delta_of
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.correlated import BandedToeplitzNoise, BufferedToeplitzNoise
from quietgrad.core.noise.grid import sigma_for
from quietgrad.core.noise.mechanisms import from_json
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import CyclicCohorts, CyclicPoisson, FullBatch, Poisson, SinglePass
from quietgrad.core.sampling.samplers import BernoulliSubsampler
from quietgrad.methods.dp_disk import KalmanGradient
from quietgrad.objectives import Logistic
from tests.core.test_correlated import heard, state, transcript, white
from tests.methods.common import interrupted, objective, problem, resumed

__all__ = ["state"]  # a fixture of every test

Floats = npt.NDArray[np.float64]
ADD, REPLACE = qg.Relation.ADD_REMOVE, qg.Relation.REPLACE_ONE
BUDGET = qg.Budget(1.0, 1e-5)
KEY = seed_key(5)
BANDS: dict[str, Any] = {"sampling": "poisson-turns", "cohorts": 4, "noise": "correlated"}


def matrix(column: tuple[float, ...], T: int) -> Floats:
    """S, entry by entry from the definition."""
    return np.array([[column[i - j] if 0 <= i - j < len(column) else 0.0 for j in range(T)] for i in range(T)])


# --- the proof, against the exact mixture ---------------------------------------------------------------------


def leaked(
    S: Floats, turns: list[int], rate: float, sigma: float, epsilon: float, *, gives: float = 0.0
) -> tuple[float, float]:
    """δ at ε, and its standard error: a record of bound 1 with a coin in each of ``turns``, against none.

    Or against one that ``gives`` something else with the same coins. All patterns of coins are enumerated.
    """
    rng, N = np.random.default_rng(8), 60_000
    patterns = np.array(list(itertools.product((0.0, 1.0), repeat=len(turns))))
    weights = np.prod(np.where(patterns > 0, rate, 1.0 - rate), axis=1)
    moved = S[:, turns] @ patterns.T  # by row and pattern
    drawn = rng.choice(len(weights), N, p=weights)
    seen = moved[:, drawn] + sigma * rng.standard_normal((len(S), N))

    def density(means: Floats) -> Floats:
        exponent = (means.T @ seen - (means**2).sum(0)[:, None] / 2.0) / sigma**2
        top = exponent.max(axis=0)
        return np.asarray(top + np.log(weights @ np.exp(exponent - top)))

    loss = density(moved) - density(gives * moved)
    terms = np.maximum(0.0, -np.expm1(epsilon - loss))
    return float(terms.mean()), float(terms.std() / math.sqrt(N))


Z, RATE, T = 1.0, 0.3, 8
EPSILONS = (0.5, 1.0, 2.0)


def claim(windows: int, rate: float, epsilon: float, relation: qg.Relation = ADD, z: float = Z) -> float:
    event = events.repeated(events.PoissonSampled(rate, events.Gaussian(z)), windows)
    return delta_of(event, epsilon=epsilon, relation=relation)


@pytest.mark.parametrize("bands", [2, 4])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_a_record_leaks_what_is_claimed_and_no_more(bands: int, epsilon: float) -> None:
    mechanism = BandedToeplitzNoise.made(T, bands)
    S = matrix(mechanism.column, T)
    for first in (0, bands - 1):
        found, error = leaked(S, list(range(first, T, bands)), RATE, Z * mechanism.factor, epsilon)
        stated = claim(-(-T // bands), RATE, epsilon)
        assert found <= stated + 5.0 * error
        if first == 0:
            assert found >= stated - 5.0 * error  # attained: less noise would be caught
    found, error = leaked(S, list(range(0, T, bands)), RATE, Z * mechanism.factor, epsilon, gives=-1.0)
    assert found <= claim(-(-T // bands), RATE, epsilon, REPLACE) + 5.0 * error


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_broken_variants_leak_more_than_they_claim(epsilon: float) -> None:
    four, two = BandedToeplitzNoise.made(T, 4), BandedToeplitzNoise.made(T, 2)
    dense = BandedToeplitzNoise.made(T, T)
    variants = {
        "four bands in two cohorts": (four, [0, 2, 4, 6], RATE, claim(4, RATE, epsilon)),
        "the whole square root in two cohorts": (dense, [0, 2, 4, 6], RATE, claim(4, RATE, epsilon)),
        "samples of everybody": (four, list(range(T)), RATE / 4, claim(T, RATE / 4, epsilon)),
        "the rate of the whole table": (four, [0, 4], RATE, claim(2, RATE / 4, epsilon)),
        "whole rounds only": (two, [0, 2, 4, 6], RATE, claim(3, RATE, epsilon)),
    }
    for what, (mechanism, turns, rate, stated) in variants.items():
        found, error = leaked(matrix(mechanism.column, T), turns, rate, Z * mechanism.factor, epsilon)
        assert found > stated + 5.0 * error, what
    quiet, error = leaked(matrix(four.column, T), [0, 4], RATE, Z, epsilon)  # the sensitivity forgotten
    assert quiet > claim(2, RATE, epsilon) + 5.0 * error


MOVES: dict[str, Any] = {
    "steady": lambda loss, last: 1.0,
    "follows": lambda loss, last: np.where(last >= 0.0, 1.0, -1.0),
    "stops when ahead": lambda loss, last: np.where(loss > 0.3, 0.0, 1.0),
    "stops when behind": lambda loss, last: np.where(loss < -0.1, 0.0, 1.0),
}


@pytest.mark.parametrize("name", MOVES)
def test_no_adaptive_record_gets_more(name: str) -> None:
    """What a record gives to its next turn follows from what was released before, and stays within the claim."""
    mechanism, rng, N = BandedToeplitzNoise.made(12, 4), np.random.default_rng(3), 60_000
    c, sigma = np.array(mechanism.column), Z * mechanism.factor
    loss, last = np.zeros(N), np.zeros(N)
    for _ in range(3):
        given = np.broadcast_to(MOVES[name](loss, last), N)
        shift = c[:, None] * given
        seen = np.where(rng.random(N) < RATE, shift, 0.0) + sigma * rng.standard_normal((4, N))
        ratio = np.exp(((shift * seen).sum(0) - (shift**2).sum(0) / 2.0) / sigma**2)
        loss += np.log1p(RATE * (ratio - 1.0))
        last = (shift * seen).sum(0)
    for epsilon in EPSILONS:
        terms = np.maximum(0.0, -np.expm1(epsilon - loss))
        assert terms.mean() <= claim(3, RATE, epsilon) + 5.0 * terms.std() / math.sqrt(N)


# --- samples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_a_record_is_drawn_in_its_turns_only_and_at_the_rate(relation: qg.Relation) -> None:
    n, cohorts, rate, rounds = 4000, 4, 0.25, 50
    sampler = CyclicPoisson(cohorts, rate, relation).sampler(n, SecureStream(KEY, "batches"))
    drawn = np.zeros((cohorts * rounds, n), bool)
    for i in range(cohorts * rounds):
        drawn[i, sampler.batch(i)] = True
    by_turn = drawn.reshape(rounds, cohorts, n).sum(axis=0)  # how often in which turn
    assert ((by_turn > 0).sum(axis=0) <= 1).all()
    assert abs(drawn.mean() - rate / cohorts) < 6 * math.sqrt(rate / cohorts / drawn.size)
    often = by_turn.max(axis=0)
    assert abs(often.var() / (rounds * rate * (1 - rate)) - 1.0) < 0.15  # coins of rounds are independent
    together = drawn[:cohorts].any(axis=0)
    again = drawn[cohorts : 2 * cohorts].any(axis=0)
    assert abs((together & again).mean() - rate**2) < 6 * math.sqrt(rate**2 / n)
    assert CyclicPoisson(cohorts, rate).expected_batch(n) == 250.0


def test_a_scan_draws_the_same_records_and_a_coin_is_not_that_of_the_cohort() -> None:
    stream = SecureStream(KEY, "batches")
    sampling = CyclicPoisson(4, 0.3, ADD)
    listed, scanned = sampling.sampler(999, stream), sampling.scanning(999, stream)
    for i in (0, 3, 17):
        assert np.array_equal(np.asarray(listed.batch(i)), np.asarray(scanned.batch(i)))
    whole = CyclicPoisson(4, 1.0, ADD).sampler(999, stream)
    assert np.array_equal(
        np.asarray(whole.batch(2)), np.asarray(CyclicCohorts(4, ADD).sampler(999, stream).batch(2))
    )
    # Cohorts are where the words of block 0 fall; coins of block 0 would draw all of a cohort or nobody.
    sizes = [len(np.asarray(listed.batch(i))) for i in range(4)]
    assert all(40 < size < 115 for size in sizes)
    assert CyclicPoisson(4, 1.0).event(events.Gaussian(2.0), 8) == events.Repeated(events.Gaussian(2.0), 2)


# --- the law of the noise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bands", [2, 3, 5, 12])
def test_the_innovations_are_white_and_the_releases_are_not(bands: int) -> None:
    mechanism = BandedToeplitzNoise.made(12, bands)
    released = heard(mechanism)
    scale = 2.0 * 0.5 * math.sqrt(math.fsum(c * c for c in mechanism.column))
    assert white(matrix(mechanism.column, 12) @ released / scale)
    assert not white(released / scale)
    _, step = sigma_for(2.0 * mechanism.factor, 0.5, 6000)
    assert np.array_equal(released, np.rint(released / step) * step)
    inverse = np.linalg.inv(matrix(mechanism.column, 12))
    assert mechanism.loudness == pytest.approx(mechanism.factor * float(np.linalg.norm(inverse[-1])))


def test_an_audit_hears_noise_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = BandedToeplitzNoise.made(256, 8)
    assert {finding.verdict for finding in probe_mechanism(mechanism, seed=0)} == {"pass"}
    monkeypatch.setattr(BandedToeplitzNoise, "factor", 1.0)
    assert "violation" in {finding.verdict for finding in probe_mechanism(mechanism, seed=0)}


# --- through the session --------------------------------------------------------------------------------------


def band_plan(relation: str = "add-remove", n: int = 300, steps: int = 32) -> Plan:
    algorithm = qg.DPSGD(steps=steps, batch_size=15, **BANDS)
    return qg.plan(algorithm, n=n, budget=qg.Budget(1.0, 1e-5, qg.Relation.parse(relation)))


@pytest.mark.parametrize(("relation", "times"), [("add-remove", 1.0), ("replace-one", 2.0)])
def test_a_record_moves_one_window_for_each_coin_by_what_is_claimed(relation: str, times: float) -> None:
    plan, (X, y) = band_plan(relation, steps=64), problem(300)
    X, other = X.copy(), X.copy()
    X[-1], other[-1] = 1e6, -1e6
    beside = (X[:-1], y[:-1]) if relation == "add-remove" else (other, y)
    moved = transcript(plan, X, y) - transcript(plan, *beside)  # noise of one key cancels
    mechanism = plan.schedule.slots[0].mechanism
    assert isinstance(mechanism, BandedToeplitzNoise)
    (turns,) = np.nonzero(np.abs(moved).max(axis=1))
    assert len({t % 4 for t in turns.tolist()}) == 1
    assert 0 < len(turns) < 16  # 16 coins of probability 0.2: all or none once in 30
    rows = np.linalg.norm(matrix(mechanism.column, 64) @ moved, axis=1) / (plan.noise_multiplier * mechanism.factor)
    for window in range(int(turns[0]) % 4, 64, 4):
        size = float(np.linalg.norm(rows[window : window + 4]))
        assert size <= times / plan.noise_multiplier * (1 + 1e-5)  # but for the rounding that C pays for
        assert (size > 0) == (window in turns)
    assert plan.event == events.Repeated(events.PoissonSampled(0.2, events.Gaussian(plan.noise_multiplier)), 16)


def other_noise(kind: str) -> Any:
    """A method that states little of itself, by its noise alone."""
    oracle = KalmanGradient(15, 1.0, 0.7, 0.4, "poisson-turns", None, 4, kind)  # type: ignore[arg-type]
    return qg.PerturbedSGD(oracle, steps=32, chi=1e-3, mode="practical", learning_rate=0.5)


def test_a_run_goes_on_with_the_noise_it_began_with(tmp_path: Path) -> None:
    """In bands or independent, a run costs the same; one sum under both, of the same normals, would be bare."""
    data = problem(300)
    prices = [qg.plan(other_noise(kind), n=300, budget=BUDGET).event for kind in ("correlated", "independent")]
    assert prices[0] == prices[1]
    interrupted(data, other_noise("correlated"), tmp_path, BUDGET, after=3)
    with pytest.raises(DataError, match="another algorithm"):
        resumed(data, other_noise("independent"), tmp_path)
    resumed(data, other_noise("correlated"), tmp_path)
    assert Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation=ADD).epsilon < 1.1


def test_people_are_the_unit_of_coins_and_cohorts() -> None:
    X, y = problem(600)
    person = np.repeat(np.arange(300), 2)
    result = qg.minimize(
        objective(), (X, y), qg.DPSGD(steps=16, batch_size=15, **BANDS), budget=BUDGET, person=person
    )
    assert result.privacy.epsilon is not None
    assert 0.9 <= result.privacy.epsilon <= 1.0
    assert str(result.privacy.unit) == "person"


# --- words and refusals ---------------------------------------------------------------------------------------


def test_json_round_trip_and_hostile_coefficients() -> None:
    mechanism = BandedToeplitzNoise.made(64, 4)
    wire = json.loads(json.dumps(mechanism.to_json()))
    assert from_json(wire) == mechanism
    bad = (
        {"column": [1.0]},
        {"column": [1.0, 1.0]},
        {"column": [2.0, 0.5]},
        {"column": [1.0, 0.2, 0.3]},
        {"column": [1.0, 0.5, -0.1]},
        {"column": [1.0, math.nan]},
        {"column": [1.0, 0.5, math.nan, 0.1]},
        {"column": "1.0"},
        {"column": [1, 0]},
        {"releases": 0},
        {"releases": 6.0},
        {"sensitivity": 0.1},
    )
    for change in bad:
        with pytest.raises(ValueError):
            from_json({**wire, **change})
    slot = json.loads(json.dumps(band_plan().schedule.slots[0].to_json()))
    assert Slot.from_json(slot).mechanism == BandedToeplitzNoise.made(32, 4)
    for change in ({"releases": 31}, {"column": [1.0, 0.5, 0.4, 0.3, 0.2]}):
        with pytest.raises(ValueError, match="as many bands as cohorts"):
            Slot.from_json({**slot, "mechanism": {**slot["mechanism"], **change}})
    with pytest.raises(ValueError, match="as many bands as cohorts"):
        Slot.from_json({**slot, "sampling": {**slot["sampling"], "cohorts": 3}})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampling": "poisson", "noise": BandedToeplitzNoise.made(32, 4), "cohorts": None}, "poisson-turns"),
        ({"sampling": "full", "noise": BandedToeplitzNoise.made(32, 4), "cohorts": None}, "poisson-turns"),
        ({"noise": BandedToeplitzNoise.made(31, 4)}, "as many bands as cohorts"),
        ({"noise": BandedToeplitzNoise.made(32, 5)}, "as many bands as cohorts"),
        ({"cohorts": None}, "name the cohorts"),
        ({"cohorts": 1}, "must be"),
        ({"cohorts": 0}, "whole number"),
        ({"cohorts": "4"}, "whole number"),
        ({"cohorts": 40}, "smaller batches or fewer cohorts"),
        ({"returns": "random"}, "random number of releases"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qg.plan(qg.DPSGD(**{"steps": 32, "batch_size": 15, **BANDS, **settings}), n=300, budget=BUDGET)


def test_bands_stand_alone_and_without_coins_cost_every_turn() -> None:
    slot = Slot("a", CyclicPoisson(4, 0.2), 32, mechanism=BandedToeplitzNoise.made(32, 4))
    for others in ((Slot("b", FullBatch(), 3),), (replace(slot, name="b"),)):
        with pytest.raises(ValueError, match="all its releases in one slot"):
            Schedule((slot, *others))
    with pytest.raises(ValueError, match="all its releases in one slot"):
        Schedule((slot,), "filter")
    turns = Slot("a", CyclicCohorts(8), 32, mechanism=BandedToeplitzNoise.made(32, 4))
    assert turns.event(2.0, ADD) == events.Repeated(events.Gaussian(2.0), 4)
    once = Slot("a", SinglePass(320, 10), 32, mechanism=BandedToeplitzNoise.made(32, 4))
    assert once.event(2.0, ADD) == events.Parallel((events.Gaussian(2.0),))
    with pytest.raises(ValueError, match="bands"):
        Slot("a", Poisson(0.1), 32, mechanism=BandedToeplitzNoise.made(32, 4))
    # Buffers hear every turn at once: certain participation prices them, and coins are worth nothing to them.
    buffers = Slot("a", CyclicPoisson(4, 0.2), 32, mechanism=BufferedToeplitzNoise.made(32, 8, 4))
    assert buffers.event(2.0, ADD) == events.Gaussian(2.0)
    with pytest.raises(ValueError, match="2 to"):
        BandedToeplitzNoise.made(10, 1)


def test_parties_do_not_take_it() -> None:
    from quietgrad.federation import Party, simulate

    parties = [Party(np.ones((n, 2)), np.ones(n)) for n in (60, 90)]
    for noise in ("correlated", "independent"):
        algorithm = qg.DPSGD(steps=8, batch_size=15, **{**BANDS, "noise": noise})
        with pytest.raises(ValueError, match="one curator"):
            simulate(algorithm, Logistic(), parties, budget=BUDGET)
    banded = qg.DPSGD(steps=8, sampling="turns", cohorts=4, noise=BandedToeplitzNoise.made(8, 4))
    with pytest.raises(ValueError, match="one curator"):
        simulate(banded, Logistic(), parties, budget=BUDGET)


def test_coins_are_thrown_for_each_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: coins by cohort and not by release would draw the same records in every round."""
    stream, n = SecureStream(KEY, "batches"), 2000

    def repeats(sampler: Any) -> float:
        first, later = (set(np.asarray(sampler.batch(i)).tolist()) for i in (1, 5))
        return len(first & later) / len(first)

    sampling = CyclicPoisson(4, 0.2, ADD)
    assert repeats(sampling.sampler(n, stream)) < 0.5

    def broken(self: BernoulliSubsampler, i: int) -> npt.NDArray[np.int64]:
        return real(self, i % 4)

    real = BernoulliSubsampler.batch
    monkeypatch.setattr(BernoulliSubsampler, "batch", broken)
    assert repeats(sampling.sampler(n, stream)) == 1.0
