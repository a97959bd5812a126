"""Noise that is correlated over releases: its proof by enumeration, its law, its mutants, and every refusal.

Every check is two-sided: the sound thing passes and each broken variant named beside it is caught. Statistical ones
fix their seeds; the numbers of samples make a false alarm rarer than 1e-6.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates import check, issue
from quietgrad.core.accounting import events
from quietgrad.core.errors import BudgetError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.correlated import (
    BandedToeplitzNoise,
    BufferedToeplitzNoise,
    BufferedToeplitzRecurrence,
    CorrelatedNoise,
    NoiseRecurrence,
)
from quietgrad.core.noise.grid import sigma_for
from quietgrad.core.noise.mechanisms import (
    ExponentialMechanism,
    GaussianNoise,
    L2LaplaceNoise,
    StandardNormals,
    from_json,
)
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import (
    CyclicCohorts,
    CyclicPoisson,
    FixedSize,
    FullBatch,
    Poisson,
    RandomAllocation,
    SinglePass,
)
from quietgrad.core.sampling.samplers import CohortSampler
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery
from quietgrad.methods.registry import ALGORITHMS
from quietgrad.objectives import Logistic
from tests.methods.common import interrupted, objective, problem, resumed, spent_after

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(1.0, 1e-5)
KEY = seed_key(11)
ADD, REPLACE = qg.Relation.ADD_REMOVE, qg.Relation.REPLACE_ONE
TURNS_OF_8: dict[str, Any] = {"sampling": "turns", "cohorts": 8, "noise": "correlated"}
BANDS: dict[str, Any] = {"sampling": "poisson-turns", "cohorts": 4, "noise": "correlated", "batch_size": 15}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def matrix(mechanism: BufferedToeplitzNoise, count: int | None = None) -> Floats:
    """S, entry by entry from the definition."""
    T = mechanism.releases if count is None else count
    S = np.eye(T)
    for i in range(T):
        for j in range(i):
            S[i, j] = sum(a * lam ** (i - j - 1) for a, lam in zip(mechanism.alpha, mechanism.lam, strict=True))
    return S


# --- one Gaussian, whoever asks -------------------------------------------------------------------------------

Move = Callable[[int, Floats, Floats], Any]
ADVERSARIES: dict[str, Move] = {
    # What a record of bound 1 contributes to release t, given the innovations and the privacy loss so far.
    "steady": lambda t, seen, loss: 1.0,
    "alternating": lambda t, seen, loss: (-1.0) ** t,
    "follows": lambda t, seen, loss: np.where(seen[:, :t].sum(1) >= 0.0, 1.0, -1.0),
    "flees": lambda t, seen, loss: np.where(seen[:, :t].sum(1) >= 0.0, -1.0, 1.0),
    "stops when ahead": lambda t, seen, loss: np.where(loss > 0.5, 0.0, 1.0),
    "stops when behind": lambda t, seen, loss: np.where(loss < -0.2, 0.0, 1.0),
}


def gaussian_delta(mu: float, epsilon: float) -> float:
    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2.0))

    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def leaked(S: Floats, turns: list[int], sigma: float, move: Move, epsilon: float) -> tuple[float, float]:
    """δ at ε of a run with a record against one without, by simulation of what S makes of the transcript."""
    rng, N, T = np.random.default_rng(4), 60_000, len(S)
    seen, moved, loss = np.zeros((N, T)), np.zeros((N, T)), np.zeros(N)
    for t in range(T):
        if t in turns:
            moved[:, t] = move(t, seen, loss)
        shift = moved[:, : t + 1] @ S[t, : t + 1]
        seen[:, t] = shift + sigma * rng.standard_normal(N)
        loss += (shift * seen[:, t] - shift * shift / 2.0) / sigma**2
    terms = np.maximum(0.0, -np.expm1(epsilon - loss))
    return float(terms.mean()), float(terms.std() / math.sqrt(N))


@pytest.mark.parametrize("name", ADVERSARIES)
def test_no_adaptive_record_gets_more_than_one_gaussian(name: str) -> None:
    """Four turns of eight releases, contributions chosen by what was released: δ stays at or below the claim."""
    mechanism, turns, z = BufferedToeplitzNoise.made(8, 4, 2), [0, 2, 4, 6], 1.2
    S = matrix(mechanism)
    for epsilon in (0.3, 1.0, 2.0):
        claim = gaussian_delta(1.0 / z, epsilon)
        found, error = leaked(S, turns, z * mechanism.factor, ADVERSARIES[name], epsilon)
        assert found <= claim + 5.0 * error
        if name == "steady":  # attained, so that a smaller sensitivity would be caught …
            assert found >= claim - 5.0 * error
            c = mechanism.coefficients()
            short, its = leaked(S, turns, z * 2.0 * float(np.linalg.norm(c)), ADVERSARIES[name], epsilon)
            assert short > claim + 5.0 * its  # … as √k·‖c‖ is


# --- sensitivity ----------------------------------------------------------------------------------------------


def attained(S: Floats, k: int, b: int) -> float:
    """The most that a record can move S·sums by, over all sets of turns and all signs."""
    G, T, best = S.T @ S, len(S), 0.0
    for size in range(1, k + 1):
        for turns in itertools.combinations(range(T), size):
            if all(later - earlier >= b for earlier, later in itertools.pairwise(turns)):
                part = G[np.ix_(turns, turns)]
                signs = itertools.product((1.0, -1.0), repeat=size - 1)
                best = max(best, *(float(x @ part @ x) for x in (np.array([1.0, *rest]) for rest in signs)))
    return math.sqrt(best)


TURNS = [(1, 10), (2, 3), (3, 3), (4, 2), (2, 9)]


@pytest.mark.parametrize(("k", "b"), TURNS)
def test_the_sensitivity_is_what_enumeration_finds(k: int, b: int) -> None:
    mechanism = BufferedToeplitzNoise.made(10, k, b)
    most = attained(matrix(mechanism), k, b)
    assert most <= mechanism.sensitivity() * (1 + 1e-9)
    assert most >= mechanism.sensitivity() * (1 - 1e-9)


def test_wrong_formulas_for_the_sensitivity_are_below_what_is_attained() -> None:
    mechanism = BufferedToeplitzNoise.made(10, 3, 3)
    most = attained(matrix(mechanism), 3, 3)
    norm = float(np.linalg.norm(mechanism.coefficients()))
    assert math.sqrt(3) * norm < 0.95 * most  # as if columns were orthogonal
    assert replace(mechanism, participations=2).sensitivity() < 0.9 * most
    assert replace(mechanism, separation=4).sensitivity() < 0.999 * most
    # The first columns are the worst only because the coefficients fall.
    c = np.array([1.0, 0.1, 0.1, 0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0])
    rising = np.array([[c[i - j] if i >= j else 0.0 for j in range(10)] for i in range(10)])
    first = float(np.linalg.norm(rising[:, 0] + rising[:, 2]))
    assert attained(rising, 2, 2) > 1.05 * first


def test_contributions_of_any_direction_stay_within_the_sensitivity() -> None:
    mechanism, rng = BufferedToeplitzNoise.made(24, 4, 6), np.random.default_rng(0)
    for _ in range(300):
        given, v = np.zeros((24, 3)), rng.standard_normal((4, 3))
        lengths = rng.choice([1.0, rng.random()], (4, 1))
        given[rng.integers(6) :: 6] = lengths * v / np.linalg.norm(v, axis=1, keepdims=True)
        assert np.linalg.norm(matrix(mechanism) @ given) <= mechanism.sensitivity()


def test_a_stopped_run_costs_its_own_rows_and_columns() -> None:
    mechanism = BufferedToeplitzNoise.made(32, 4, 8)
    for j in (1, 7, 9, 31):
        S = matrix(mechanism, j)
        columns = S[:, ::8][:, :4].sum(axis=1)
        assert mechanism.sensitivity(j) == pytest.approx(float(np.linalg.norm(columns)), rel=1e-9)
    assert mechanism.event(_same, 2.0, qg.Relation.ADD_REMOVE, 32) == events.Gaussian(2.0)
    stopped = mechanism.event(_same, 2.0, qg.Relation.ADD_REMOVE, 9)
    assert stopped == events.Gaussian(2.0 * mechanism.sensitivity() / mechanism.sensitivity(9))
    assert isinstance(stopped, events.Gaussian)
    assert stopped.noise_multiplier > 2.0
    plan = turns_plan()
    epsilons = [plan.epsilon_after({"gradient": j}) for j in (1, 8, 16, 32)]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < 0.9 * epsilons[-1]
    assert epsilons[-1] == plan.epsilon()


@pytest.mark.parametrize("settings", [TURNS_OF_8, BANDS])
def test_a_session_that_is_closed_early_gives_back_what_was_not_released(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    plan = qg.plan(qg.DPSGD(steps=32, **settings), n=300, budget=BUDGET)
    part = plan.event_of({"gradient": 9})
    if settings is BANDS:  # the rounds that it began
        z = plan.noise_multiplier
        assert part == events.repeated(events.PoissonSampled(0.2, events.Gaussian(z)), 3)
    for name, data_dependent in (("clock", False), ("looked", True)):
        spent = spent_after(plan, problem(300), 9, tmp_path / f"{name}.jsonl", data_dependent=data_dependent)
        expected = plan.event if data_dependent else part
        assert spent == pytest.approx(qg.account(expected, delta=1e-5, relation=ADD), rel=1e-9)
    assert plan.epsilon_after({"gradient": 9}) < 0.75 * plan.epsilon()


def _same(event: events.Event) -> events.Event:
    return event


# --- the law of the noise -------------------------------------------------------------------------------------

T_LAW, WIDTH = 12, 6000


class Independent(BufferedToeplitzRecurrence):
    def row(self, release: int, dim: int) -> Floats:
        return self._units.row(release, dim)


class UpdatedFirst(BufferedToeplitzRecurrence):
    def row(self, release: int, dim: int) -> Floats:
        if self._buffers is None:
            self._buffers = np.zeros((len(self._alpha), dim))
        u = self._units.row(release, dim)
        self._buffers = self._lam * self._buffers + u
        return np.asarray(u - self._alpha @ self._buffers)


class FedInnovations(BufferedToeplitzRecurrence):
    def row(self, release: int, dim: int) -> Floats:
        if self._buffers is None:
            self._buffers = np.zeros((len(self._alpha), dim))
        u = self._units.row(release, dim)
        w = u - self._alpha @ self._buffers
        self._buffers = self._lam * self._buffers + u
        return np.asarray(w)


class Swapped(BufferedToeplitzRecurrence):
    def __init__(self, mechanism: BufferedToeplitzNoise, key: bytes, label: str) -> None:
        super().__init__(mechanism, key, label)
        self._alpha, self._lam = self._lam.ravel(), self._alpha[:, None]


class WrongSign(BufferedToeplitzRecurrence):
    def __init__(self, mechanism: BufferedToeplitzNoise, key: bytes, label: str) -> None:
        super().__init__(mechanism, key, label)
        self._alpha = -self._alpha


class ResetPerBlock(BufferedToeplitzRecurrence):
    """Forgets its buffers where a new block of normals begins."""

    def row(self, release: int, dim: int) -> Floats:
        if release % 16 == 0:
            self._buffers = np.zeros((len(self._alpha), dim))
            self._next = release
        return super().row(release, dim)


def heard(
    mechanism: CorrelatedNoise,
    rows: Callable[..., NoiseRecurrence] | None = None,
    dim: int = WIDTH,
    factor: float = 1.0,
) -> Floats:
    """Releases of zeros by the real source, its rows of another kind if given."""
    source: Any = mechanism.source(KEY, "law", mechanism.releases)
    if rows is not None:
        source._rows = rows(mechanism, KEY, "law")
    out = np.zeros((mechanism.releases, dim))
    for k in range(mechanism.releases):
        source.add(out[k], k, 2.0 * factor, 0.5)
    return out


def innovations(mechanism: BufferedToeplitzNoise, released: Floats) -> Floats:
    """What must be independent standard normals: S·released ÷ (z·C·s)."""
    found: Floats = matrix(mechanism, len(released)) @ released / (2.0 * 0.5 * mechanism.sensitivity())
    return found


def white(z: Floats) -> bool:
    """Within 6 deviations: the variance of N squares has deviation √(2/N), a product's mean 1/√N."""
    covariance = z @ z.T / z.shape[1] - np.eye(len(z))
    variances = np.diag(np.diag(covariance))
    most = 6 / math.sqrt(z.shape[1])
    return bool(np.abs(variances).max() < math.sqrt(2) * most and np.abs(covariance - variances).max() < most)


@pytest.mark.parametrize(("k", "b"), [(1, 12), (3, 4)])
def test_the_innovations_are_white_and_the_releases_are_not(k: int, b: int) -> None:
    mechanism = BufferedToeplitzNoise.made(T_LAW, k, b)
    released = heard(mechanism)
    assert white(innovations(mechanism, released))
    probe = mechanism.probe(2.0, 0.5, ADD)  # what an audit makes of the same releases
    rng = np.random.default_rng(0)
    listened = np.stack([probe.normals(release, number, rng) for number, release in enumerate(released)])
    np.testing.assert_allclose(listened, innovations(mechanism, released), rtol=1e-6, atol=1e-6)
    raw = released / (2.0 * 0.5 * mechanism.sensitivity())
    inverse = np.linalg.inv(matrix(mechanism))
    claimed = inverse @ inverse.T
    assert not white(raw)
    assert np.abs(raw @ raw.T / WIDTH - claimed).max() < 0.1
    assert claimed[1, 0] < -0.1


@pytest.mark.parametrize("rows", [Independent, UpdatedFirst, FedInnovations, Swapped, WrongSign])
def test_another_recursion_is_not_white(rows: type[BufferedToeplitzRecurrence]) -> None:
    mechanism = BufferedToeplitzNoise.made(T_LAW, 3, 4)
    assert not white(innovations(mechanism, heard(mechanism, rows)))


def test_noise_without_the_sensitivity_is_not_enough() -> None:
    mechanism = BufferedToeplitzNoise.made(T_LAW, 3, 4)
    quiet = heard(mechanism, factor=1.0 / mechanism.sensitivity())
    assert not white(innovations(mechanism, quiet))


def prefix_error(released: Floats) -> float:
    return float(np.sqrt(np.mean(np.cumsum(released, axis=0) ** 2)))


def test_sums_of_releases_have_the_stated_gain() -> None:
    mechanism = BufferedToeplitzNoise.made(256)
    independent = prefix_error(heard(replace(mechanism, alpha=(1e-12,) * 4), dim=2000))
    assert independent / prefix_error(heard(mechanism, dim=2000)) == pytest.approx(4.30, rel=0.03)
    for rows in (WrongSign, ResetPerBlock):
        assert independent / prefix_error(heard(mechanism, rows, dim=2000)) < 0.9 * 4.30


# --- what a record can do through the session -----------------------------------------------------------------


def turns_plan(relation: str = "add-remove", n: int = 300, **more: Any) -> Plan:
    algorithm = qg.DPSGD(steps=32, sampling="turns", cohorts=8, noise="correlated", **more)
    return qg.plan(algorithm, n=n, budget=qg.Budget(1.0, 1e-5, qg.Relation.parse(relation)))


def pass_plan(relation: str = "add-remove", n: int = 300) -> Plan:
    algorithm = qg.DPSGD(steps=20, batch_size=15, sampling="single-pass", noise="correlated")
    return qg.plan(algorithm, n=n, budget=qg.Budget(1.0, 1e-5, qg.Relation.parse(relation)))


def transcript(plan: Plan, X: Any, y: Any) -> Floats:
    session = CentralCurator(Logistic(), (X, y), key=KEY).open(plan)
    slot = plan.schedule.slots[0]
    theta = np.zeros(X.shape[1])
    return np.stack([session.release(slot.name, GradientQuery(theta, 1.0)) for _ in range(slot.count)])


def shift(plan: Plan, X: Any, y: Any, X2: Any, y2: Any) -> float:
    """μ between neighbours: noise of the same key cancels, and what is left is whitened."""
    mechanism = plan.schedule.slots[0].mechanism
    assert isinstance(mechanism, BufferedToeplitzNoise)
    moved = transcript(plan, X, y) - transcript(plan, X2, y2)
    return float(np.linalg.norm(matrix(mechanism) @ moved)) / (plan.noise_multiplier * mechanism.sensitivity())


def huge(n: int) -> tuple[Floats, Floats]:
    """The common problem with a last record whose gradient is clipped in every release."""
    X, y = problem(n)
    X = X.copy()
    X[-1] = 1e6
    return X, y


@pytest.mark.parametrize(("relation", "times"), [("add-remove", 1.0), ("replace-one", 2.0)])
@pytest.mark.parametrize(("make", "least"), [(turns_plan, 0.9), (pass_plan, 0.6)])
def test_a_record_moves_the_innovations_by_what_is_claimed(
    make: Callable[[str], Plan], least: float, relation: str, times: float
) -> None:
    """Replaced it moves them by twice as much, and the noise is calibrated for that."""
    plan, (X, y) = make(relation), huge(300)
    other = X.copy()
    other[-1] = -1e6
    beside = (X[:-1], y[:-1]) if relation == "add-remove" else (other, y)
    seen, claimed = shift(plan, X, y, *beside), times / plan.noise_multiplier
    assert seen <= claimed * (1 + 1e-6)
    assert seen >= (least if times == 1.0 else 0.6) * claimed  # its turn is not always the first
    assert plan.event == events.Gaussian(plan.noise_multiplier)
    assert plan.noise_multiplier == pytest.approx(times * make("add-remove").noise_multiplier, rel=1e-3)


def test_every_release_without_the_record_is_the_same_to_the_bit() -> None:
    plan, (X, y) = turns_plan(), huge(300)
    moved = np.abs(transcript(plan, X, y) - transcript(plan, X[:-1], y[:-1])).max(axis=1) > 0
    (turns,) = np.nonzero(moved)
    assert len(turns) == 4
    assert set(np.diff(turns)) == {8}


@pytest.mark.usefixtures("positions")
def test_cohorts_by_list_position_are_caught() -> None:
    plan, (X, y) = turns_plan(), problem(300)
    claimed = 1.0 / plan.noise_multiplier
    assert shift(plan, X, y, X[1:], y[1:]) > 2.0 * claimed  # everybody moved up


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> None:
    def sampler(self: CyclicCohorts, n_records: int, stream: SecureStream) -> CohortSampler:
        return CohortSampler(np.arange(n_records) % self.cohorts, self.cohorts)

    monkeypatch.setattr(CyclicCohorts, "sampler", sampler)


def test_a_record_that_is_used_twice_in_a_pass_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from quietgrad.core.sampling.samplers import SlotSampler

    def twice(self: SlotSampler, count: int) -> npt.NDArray[np.int64]:
        self.position += count
        return np.arange(295, 300)  # the last ones, in every release

    monkeypatch.setattr(SlotSampler, "take", twice)
    plan, (X, y) = pass_plan("replace-one"), huge(300)
    other = X.copy()
    other[-1] = -1e6
    assert shift(plan, X, y, other, y) > 2.0 * 2.0 / plan.noise_multiplier


def test_cohorts_are_whole_and_of_public_expected_size() -> None:
    stream = SecureStream(KEY, "cohorts")
    by_place, by_hash = (CyclicCohorts(7, relation).sampler(100, stream) for relation in (REPLACE, ADD))
    for sampler in (by_place, by_hash):
        members = [sampler.batch(i) for i in range(7)]
        assert sorted(np.concatenate([m for m in members if m is not None]).tolist()) == list(range(100))
        assert np.array_equal(np.asarray(sampler.batch(3)), np.asarray(sampler.batch(10)))
    assert {len(by_place.batch(i)) for i in range(7)} == {14, 15}  # type: ignore[arg-type]
    assert len({len(by_hash.batch(i)) for i in range(7)}) > 2  # type: ignore[arg-type]
    assert CyclicCohorts(7).expected_batch(100) == 100 / 7
    whole = CyclicCohorts(7, ADD).by_id([5, 6, 7, 8], stream)
    parts = [CyclicCohorts(7, ADD).by_id(ids, stream) for ids in ([5, 6], [7, 8])]
    for i in range(7):
        split = [*parts[0].batch(i), *(np.asarray(parts[1].batch(i)) + 2)]  # type: ignore[misc]
        assert whole.batch(i).tolist() == split  # type: ignore[union-attr]


def test_independent_noise_in_turns_pays_for_each_turn() -> None:
    plan = qg.plan(qg.DPSGD(steps=32, sampling="turns", cohorts=8), n=300, budget=BUDGET)
    assert plan.event == events.Repeated(events.Gaussian(plan.noise_multiplier), 4)
    once = qg.plan(qg.DPSGD(steps=20, batch_size=15, sampling="single-pass"), n=300, budget=BUDGET)
    assert once.noise_multiplier == pytest.approx(plan.noise_multiplier / 2.0, rel=1e-3)


# --- resuming -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", [BufferedToeplitzNoise.made(64, 4, 16), BandedToeplitzNoise.made(64, 6)])
@pytest.mark.parametrize("k", [0, 1, 5, 37, 63])
def test_a_resumed_source_makes_the_same_noise(mechanism: CorrelatedNoise, k: int) -> None:
    on = mechanism.rows(KEY, "r")
    kept = [on.row(i, 5) for i in range(64)]
    again = mechanism.rows(KEY, "r")
    assert all(np.array_equal(again.row(i, 5), kept[i]) for i in range(k, 64))
    assert not np.array_equal(mechanism.rows(seed_key(12), "r").row(k, 5), kept[k])
    assert np.array_equal(on.row(k, 5), kept[k])  # and back
    if k:
        u = StandardNormals(KEY, "unit/r", 64)
        assert not np.array_equal(u.row(k, 5), kept[k])  # empty buffers after a resume
        assert not np.array_equal(mechanism.rows(KEY, "r").row(k - 1, 5), kept[k])  # one row off


@pytest.mark.parametrize("settings", [TURNS_OF_8, BANDS])
def test_an_interrupted_run_continues_to_the_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    data, algorithm = problem(300), qg.DPSGD(steps=32, **settings)
    seen = interrupted(data, algorithm, tmp_path, BUDGET, after=13)
    result, replayed = resumed(data, algorithm, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(seen, replayed, strict=False))
    assert len(replayed) == 32
    assert result.privacy.epsilon == pytest.approx(1.0, abs=0.01)
    assert Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation=ADD).epsilon <= 1.0
    files = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"buffer" not in files


def test_a_run_resumed_on_other_data_is_charged_again_and_has_other_noise(tmp_path: Path) -> None:
    (X, y), algorithm = problem(300), qg.DPSGD(steps=32, **TURNS_OF_8)
    interrupted((X, y), algorithm, tmp_path, BUDGET, after=9)
    result, _ = resumed((-X, y), algorithm, tmp_path)
    assert result.privacy.events is not None
    z = result.privacy.noise_multiplier  # beside the count of the records, which was made once
    gaussians = [each for each in _leaves(result.privacy.events) if isinstance(each, events.Gaussian)]
    gaussians = [each for each in gaussians if each.noise_multiplier < 5 * z]
    assert sum(1.0 / each.noise_multiplier**2 for each in gaussians) == pytest.approx(2.0 / z**2, rel=1e-6)


def test_a_table_in_another_order_is_another_run(tmp_path: Path) -> None:
    """Cohorts go by place: of a table that was sorted anew, half a round would ask some records twice."""
    (X, y), algorithm = problem(300), qg.DPSGD(steps=32, **TURNS_OF_8)
    interrupted((X, y), algorithm, tmp_path, BUDGET, after=10)
    resumed((X[::-1].copy(), y[::-1].copy()), algorithm, tmp_path)
    assert Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation=ADD).epsilon > 1.3


def test_nothing_is_asked_between_releases_that_belong_together() -> None:
    look = Slot("look", Poisson(0.5), 3, fixed=9.0)  # a secret sample: no proof reaches it there
    slot = Slot("gradient", CyclicCohorts(4, ADD), 8, mechanism=BufferedToeplitzNoise.made(8, 2, 4))
    session = CentralCurator(Logistic(), problem(300)).open(Plan("p", {}, Schedule((look, slot)), 300, BUDGET, 5.0))
    query = GradientQuery(np.zeros(6), 1.0)
    session.release("look", query)
    session.release("gradient", query)
    with pytest.raises(BudgetError, match="cannot be released between"):
        session.release("look", query)
    for _ in range(7):
        session.release("gradient", query)
    session.release("look", query)


def test_samples_for_another_relation_than_the_promise_are_refused() -> None:
    slot = Slot("gradient", CyclicCohorts(4), 8, mechanism=BufferedToeplitzNoise.made(8, 2, 4))
    for sampling in (slot.sampling, SinglePass(80, 10)):
        schedule = Schedule((replace(slot, sampling=sampling),))
        with pytest.raises(ValueError, match="another relation"):
            Plan("p", {}, schedule, 300, BUDGET, 5.0)
        assert Plan("p", {}, schedule.under(ADD), 300, BUDGET, 5.0).schedule.slots[0].count == 8


def test_a_mechanism_names_its_kind() -> None:
    with pytest.raises(TypeError, match="names its kind"):
        type("Quieter", (GaussianNoise,), {})


@pytest.mark.parametrize(
    "settings",
    [
        {**TURNS_OF_8, "cohorts": 4, "noise": BufferedToeplitzNoise.made(32, 8, 4)},
        {**BANDS, "noise": BandedToeplitzNoise.made(32, 3)},
        {"batch_size": 100, "noise": L2LaplaceNoise()},
        {"batch_size": 100, "noise": GaussianNoise()},
    ],
)
def test_a_mechanism_made_by_hand_is_certified(tmp_path: Path, settings: dict[str, Any]) -> None:
    method = qg.DPSGD(steps=32, **settings)
    qg.minimize(objective(), problem(300), method, budget=BUDGET, n_public=300).save(tmp_path)
    assert [finding.what for finding in check(issue(tmp_path)).findings if finding.ok is False] == []
    with pytest.raises(ValueError, match="mechanism"):
        ALGORITHMS["dp-sgd"].make({"noise": "pink"})


def _leaves(event: events.Event) -> list[events.Event]:
    if isinstance(event, events.Composed):
        return [leaf for part in event.parts for leaf in _leaves(part)]
    if isinstance(event, events.Repeated):
        return _leaves(event.inner) * event.count
    return [event]


def test_a_release_of_bound_zero_advances_the_recursion() -> None:
    X, y = problem(300)
    plan = turns_plan()
    theta = np.zeros(X.shape[1])
    usual = transcript(plan, X, y)
    session = CentralCurator(Logistic(), (X, y), key=KEY).open(plan)
    mixed = [session.release("gradient", GradientQuery(theta, 0.0 if k in (3, 4, 9) else 1.0)) for k in range(32)]
    for k in range(32):
        if k in (3, 4, 9):
            assert not mixed[k].any()
        else:
            assert np.array_equal(mixed[k], usual[k])


# --- the grid -------------------------------------------------------------------------------------------------


def test_releases_lie_on_the_grid_of_the_data() -> None:
    mechanism = BufferedToeplitzNoise.made(16, 2, 8)
    released = heard(mechanism, dim=50)
    _, step = sigma_for(2.0 * mechanism.sensitivity(), 0.5, 50)
    assert np.array_equal(released, np.rint(released / step) * step)
    unrounded = mechanism.rows(KEY, "law").row(3, 50) * mechanism.sensitivity()
    assert not np.array_equal(unrounded, np.rint(unrounded / step) * step)


def test_integer_noise_combined_with_fractions_would_bare_a_residue() -> None:
    rng = np.random.default_rng(0)
    mechanism = BufferedToeplitzNoise.made(8)
    x0 = rng.integers(-100, 100, 500)
    z0, z1 = (np.rint(rng.standard_normal((2, 500)) * 2**20)).astype(np.int64)
    first, second = x0 + z0, 0 - 3 * z0 + 4 * z1  # w₁ = z₁ − ¾z₀ in quarters, published beside x₀ + z₀
    assert np.array_equal((second + 3 * first) % 4, (3 * x0) % 4)  # anyone reads x₀ mod 4
    # Reals combined and rounded once: the residues of what is published say nothing.
    source = mechanism.source(KEY, "trap", 8)
    sums = np.zeros((2, 4000))
    _, step = sigma_for(mechanism.sensitivity(), 1.0, 4000)
    sums[0] = rng.integers(0, 4, 4000) * step
    hidden = sums[0] / step
    for k in range(2):
        source.add(sums[k], k, 1.0, 1.0)
    units = np.rint(sums / step).astype(np.int64)
    for a, b in itertools.product(range(4), repeat=2):
        residue = (a * units[0] + b * units[1]) % 4
        agree = float(np.mean(residue == hidden))
        assert abs(agree - 0.25) < 6 * math.sqrt(0.25 * 0.75 / 4000)


# --- plans, words, refusals -----------------------------------------------------------------------------------


def test_json_round_trip_and_hostile_coefficients() -> None:
    mechanism = BufferedToeplitzNoise.made(64, 4, 16)
    wire = json.loads(json.dumps(mechanism.to_json()))
    assert from_json(wire) == mechanism
    assert "sensitivity" not in wire  # whoever reads a plan computes it
    assert all("one Gaussian release" in words for words in (mechanism.describe(2.0), mechanism.stated(2.0)))
    bad = (
        {"alpha": [0.0, *wire["alpha"][1:]]},
        {"alpha": [0.9, 0.9, 0.1, 0.1]},
        {"alpha": [math.nan, 0.1, 0.1, 0.1]},
        {"lam": [1.0, 0.5, 0.5, 0.5]},
        {"lam": [math.nan, 0.5, 0.5, 0.5]},
        {"lam": [0.5]},
        {"lam": "0.5"},
        {"releases": 0},
        {"releases": 10.0},
        {"participations": -1},
        {"separation": True},
    )
    for change in bad:
        with pytest.raises(ValueError):
            from_json({**wire, **change})
    with pytest.raises(ValueError):
        from_json({**wire, "sensitivity": 0.1})


def test_a_plan_that_lies_about_turns_is_refused() -> None:
    plan = turns_plan()
    wire = json.loads(json.dumps(plan.schedule.slots[0].to_json()))
    assert Slot.from_json(wire) == plan.schedule.slots[0]
    for change in ({"releases": 31}, {"participations": 3}, {"separation": 9}):
        with pytest.raises(ValueError, match="Build it with those values"):
            Slot.from_json({**wire, "mechanism": {**wire["mechanism"], **change}})
    with pytest.raises(ValueError, match="Build it with those values"):
        Slot.from_json({**wire, "sampling": {**wire["sampling"], "cohorts": 4}})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sampling": "poisson"}, "single-pass"),
        ({"sampling": "fixed-size"}, "single-pass"),
        ({"sampling": "full"}, "DP-GD"),
        ({"sampling": "turns", "cohorts": 1}, "full batch"),
        ({"sampling": "turns"}, "name the cohorts"),
        ({"sampling": "poisson", "cohorts": 4}, "name the cohorts"),
        ({"sampling": "turns", "cohorts": 8, "returns": "random"}, "random number of releases"),
        ({"sampling": "single-pass", "batch_size": 100}, "every record is used once"),
        (
            {"sampling": "turns", "cohorts": 8, "noise": BufferedToeplitzNoise.made(31, 4, 8)},
            "Build it with those values",
        ),
        ({"sampling": "turns", "cohorts": 8, "noise": "pink"}, "must be"),
        ({"sampling": "turns", "cohorts": 301}, "at most n"),
    ],
)
def test_refusals(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qg.plan(qg.DPSGD(**{"steps": 32, "noise": "correlated", **settings}), n=300, budget=BUDGET)


def test_refusals_of_schedules_and_lengths() -> None:
    correlated = Slot("a", CyclicCohorts(8), 32, mechanism=BufferedToeplitzNoise.made(32, 4, 8))
    sampled = (Poisson(0.1), CyclicPoisson(4, 0.1), FixedSize(300, 10), RandomAllocation(3))
    for other in (*(Slot("b", each, 3) for each in sampled), Slot("b", FullBatch(), 3, law=((1, 0.5), (3, 0.5)))):
        with pytest.raises(ValueError, match="all its releases in one slot"):
            Schedule((correlated, other))
    with pytest.raises(ValueError, match="all its releases in one slot"):
        Schedule((correlated, Slot("b", FullBatch(), mechanism=ExponentialMechanism())))
    bands = Slot("a", CyclicPoisson(4, 0.1), 32, mechanism=BandedToeplitzNoise.made(32, 4))
    with pytest.raises(ValueError, match="all its releases in one slot"):
        Schedule((bands, Slot("b", FullBatch(), 3)))
    # Gaussian noise on all records in between has a proof: docs/correlated-proof.md, interleaved slots.
    assert Schedule((correlated, Slot("b", FullBatch(), 3))).releases == 35
    with pytest.raises(ValueError, match="all its releases in one slot"):
        Schedule((correlated,), "filter")
    look = Slot("labels", FullBatch(), 1, fixed=3.0)
    assert Schedule((look, correlated)).releases == 33
    with pytest.raises(ValueError, match="a fixed number of releases per record"):
        Slot("a", FullBatch(), 3, mechanism=BufferedToeplitzNoise.made(3))
    rows = BufferedToeplitzNoise.made(4).rows(KEY, "dims")
    rows.row(0, 3)
    with pytest.raises(BudgetError, match="one length"):
        rows.row(1, 4)
    with pytest.raises(BudgetError, match="made for 4"):
        rows.row(4, 3)
    with pytest.raises(ValueError, match="in turns"):
        qg.plan(
            qg.DPSRM(steps=10, sampling="turns", cohorts=5, first_noise=2.0, noise="correlated"),
            n=300,
            budget=BUDGET,
        )
    assert isinstance(Slot("c", FullBatch(), mechanism=ExponentialMechanism()).mechanism, ExponentialMechanism)
    assert isinstance(Slot("d", SinglePass(10), 10).mechanism, GaussianNoise)


@pytest.mark.parametrize(
    "algorithm",
    [
        qg.DPSGD(steps=32, momentum=0.5, **TURNS_OF_8),
        qg.DPSRM(steps=32, **TURNS_OF_8),
        qg.DPSRM(steps=20, batch_size=15, sampling="single-pass", noise="correlated"),
        qg.DPSRM(steps=32, sampling="turns", cohorts=8),
        qg.DPAdam(steps=32, subtract_noise=True, **TURNS_OF_8),
        qg.StagewiseDPSGD(stages=2, first_steps=5, **TURNS_OF_8),
        qg.StagewiseDPSGD(stages=2, first_steps=3, batch_size=15, sampling="single-pass"),
        qg.DPSGD(steps=32, momentum=0.5, **BANDS),
        qg.DPSGD(steps=32, **{**BANDS, "noise": "independent"}),
        qg.DPSRM(steps=32, **BANDS),
        qg.DPAdam(steps=32, subtract_noise=True, **BANDS),
        qg.StagewiseDPSGD(stages=2, first_steps=5, **BANDS),
    ],
)
def test_every_first_order_method_takes_it(algorithm: Any) -> None:
    X, y = problem(300)
    result = qg.minimize(objective(), (X, y), algorithm, budget=BUDGET, n_public=300)
    assert result.privacy.epsilon is not None
    assert 0.9 <= result.privacy.epsilon <= 1.0
    assert np.isfinite(result.params).all()
    plan = qg.plan(algorithm, n=300, budget=BUDGET)
    assert sum(result.privacy.releases.values()) == plan.schedule.releases
    if plan.schedule.slots[0].sampling.kind == "poisson-turns":
        rounds, z = -(-plan.schedule.releases // 4), result.privacy.noise_multiplier
        assert result.privacy.events == events.repeated(events.PoissonSampled(0.2, events.Gaussian(z)), rounds)


def test_adam_knows_how_loud_one_release_is() -> None:
    from quietgrad.methods.oracles.base import noise_multiplier, plan_preview

    plan = turns_plan()
    mechanism = plan.schedule.slots[0].mechanism
    inverse = np.linalg.inv(matrix(mechanism))  # type: ignore[arg-type]
    loud = plan.noise_multiplier * mechanism.sensitivity() * float(np.linalg.norm(inverse[-1]))  # type: ignore[attr-defined]
    assert noise_multiplier(plan_preview(objective(), plan), "gradient") == pytest.approx(loud, rel=1e-6)
