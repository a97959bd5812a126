"""DDP-SRM of ten parties is central DP-SRM with the same total noise, noise on, in every trust setting.

The noise that entered each round's sum is made a second time, outside the run, from the seeds alone: for
secure sums as whole numbers on the grid, by roles who sum zeros and, share by share, without any protocol. A
central run is then given exactly these vectors and must walk the same path; and every released sum, minus its
noise, must be on the grid the whole number that the parties' rounded sums add up to. Seeds are fixed; the one
statistic, the variance, has a false-alarm rate of 6e-7.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.curators.central import CentralCurator
from quietgrad.data.file_formats import parse_libsvm, read_content
from quietgrad.federation import Party, deal
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.simulation import assemble
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.objectives.base import Batch, Query
from quietgrad.objectives.regularizers import Nonconvex
from quietgrad.objectives.tables.losses import Logistic
from quietgrad.privacy.mechanisms import StandardNormals
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import SecureStream, seed_key
from quietgrad.sampling import Poisson
from quietgrad.sampling.samplers import KeyedPoissonSampler
from quietgrad.secure.channel import NoiseShare
from quietgrad.secure.local_session import SecureSession
from quietgrad.secure.terms import COARSE_SIGMA, COARSE_STEP, COARSE_TOP
from quietgrad.training import plan as make_plan

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Table = tuple[Any, Floats]

M, SEED, STEPS = 10, 11, 12
BUDGET = qg.Budget(1.0, 1e-5)
OBJECTIVE = Logistic(regularizer=Nonconvex(1e-2))
MODES = ("masks", "servers", "mpc")
FACTORS = {"curator": 1.0, "masks": M / (M - 1), "servers": 2.0, "mpc": 1.0026}
REAL = Path(os.environ.get("QUIETGRAD_DATA") or Path(__file__).parents[2] / "shared" / "data")


def generated() -> Table:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(900, 40)) / 6.0
    return X, (X @ rng.normal(size=40) > 0.1).astype(np.float64)


def a9a() -> Table:
    if not (REAL / "a9a.bz2").is_file():
        pytest.skip("a9a is not here: set QUIETGRAD_DATA to the folder of the papers' data sets")
    X, y = parse_libsvm(read_content(REAL / "a9a.bz2"), 123)
    return X, (y > 0.0).astype(np.float64)


TABLES = {"generated": generated, "a9a": a9a}


@dataclass(frozen=True)
class Released:
    """One release: what was asked, and the sum that left."""

    slot: str
    query: Query
    total: Floats


class Door:
    """A session that remembers what it released, and adds given vectors to the sums."""

    def __init__(self, session: Any, noise: list[Floats] | None = None) -> None:
        self._session, self._noise = session, noise
        self.released: list[Released] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Floats:
        total: Floats = self._session.release(slot, query, rho=rho)
        if self._noise is not None:
            total = total + self._noise[len(self.released)]
        self.released.append(Released(slot, query, total.copy()))
        return total


def walk(algorithm: Any, door: Door, start: Floats) -> Floats:
    """All iterates."""
    state = algorithm.init(start)
    path = [start]
    while not state.done:
        state = algorithm.step(state, door)
        path.append(np.array(state.params))
    return np.stack(path)


class Federation:
    """One run of ten parties with the noise on, everyone present in every round."""

    def __init__(self, table: Table, trust: str) -> None:
        self.table = table
        self.algorithm = qg.DPSRM(steps=STEPS, batch_size=table[1].size // 20, learning_rate=0.5)
        self.parties: list[Party] = deal(*table, M, unevenness=4.0)
        secure: dict[str, Any] = {"trust": "secure", "secure": trust}
        secure = {"trust": "curator"} if trust == "curator" else secure
        plan, people = assemble(self.algorithm, OBJECTIVE, self.parties, seed=SEED, budget=BUDGET, **secure)
        curator = FederatedCurator(
            OBJECTIVE, InProcess(people.handlers), identity=people.identity, roster=people.roster, seed=SEED
        )
        session = curator.open(plan)
        door = Door(session)
        self.start: Floats = np.zeros(plan.shape.dim)
        self.path = walk(self.algorithm, door, self.start)
        assert session.faults == []
        self.plan: FederatedPlan = plan
        self.released = door.released

    @cached_property
    def noise_units(self) -> list[Integers]:
        """The noise of every round on the grid of the secure sum: the same roles and seeds sum zeros."""
        d = self.start.size
        terms = self.plan.terms(d)
        again = SecureSession(terms, names=self.plan.names, seed=SEED)
        return [whole(again.sum(np.zeros((M, d))), terms.step) for _ in self.released]

    def unit(self, t: int) -> float:
        """What one grid unit of round t's secure sum is worth."""
        release = self.released[t]
        return self.plan.terms(self.start.size).step * self.scale(release)

    def scale(self, release: Released) -> float:
        multiplier = self.plan.multiplier(release.slot, None)
        return self.plan.scale(multiplier, release.query.bound, self.start.size)

    def central(self, noise: list[Floats]) -> tuple[Floats, list[Released]]:
        """One curator of all records with exactly this noise: its path, and what it released."""
        door = Door(self.noiseless_session(), noise)
        return walk(self.algorithm, door, self.start), door.released

    def noiseless_session(self) -> Any:
        """The door of one curator of all records, who samples by record with the federation's key."""
        plan = make_plan(self.algorithm, n=self.table[1].size, budget=None)
        return CentralCurator(OBJECTIVE, self.table, seed=SEED).open(plan)


def whole(values: Floats, unit: float) -> Integers:
    """Multiples of a unit as whole numbers; refuses what is not one."""
    units = values / unit
    # Two roundings of a number below 2^53: a multiple of the unit is off by less than 2^-10 of one here.
    assert float(np.abs(units - np.rint(units)).max()) < 1e-3
    return np.rint(units).astype(np.int64)


@pytest.fixture(autouse=True)
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the central curator sample by record id, as parties with a shared key do."""

    def poisson(self: Poisson, n_records: int, stream: SecureStream) -> KeyedPoissonSampler:
        return self.by_id(np.arange(n_records), stream)

    monkeypatch.setattr(Poisson, "sampler", poisson)


@pytest.fixture(scope="module")
def run() -> Any:
    kept: dict[tuple[str, str], Federation] = {}

    def made(table: str, trust: str) -> Federation:
        if (table, trust) not in kept:
            kept[table, trust] = Federation(TABLES[table](), trust)
        return kept[table, trust]

    return made


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES)
def test_secure_sums_give_the_central_model_with_the_same_noise(run: Any, table: str, mode: str) -> None:
    federation = run(table, mode)
    noise = [units * federation.unit(t) for t, units in enumerate(federation.noise_units)]
    path, released = federation.central(noise)
    assert len(released) == len(federation.released) == STEPS
    assert np.linalg.norm(path[-1]) > 1e-2
    quiet, _ = federation.central([np.zeros_like(federation.start)] * STEPS)
    assert np.linalg.norm(path[-1] - quiet[-1]) > 1e-2  # the noise does matter
    np.testing.assert_allclose(federation.path, path, rtol=0.0, atol=1e-9)
    for t, (ours, theirs) in enumerate(zip(federation.released, released, strict=True)):
        # Ten roundings to the grid, and what earlier ones moved the iterate by.
        assert float(np.abs(ours.total - theirs.total).max()) < (M / 2 + M) * federation.unit(t)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", TABLES)
def test_released_sum_minus_its_noise_is_the_sum_of_rounded_vectors(run: Any, table: str, mode: str) -> None:
    """Exactly, as whole numbers: every party's part of the central curator's sample, rounded, added up."""
    federation = run(table, mode)
    n = federation.table[1].size
    schedule = federation.plan.schedule
    draws = dict.fromkeys((slot.name for slot in schedule.slots), 0)
    for t, release in enumerate(federation.released):
        stream = SecureStream(seed_key(SEED), f"sample/{release.slot}")
        sampler = schedule[release.slot].sampling.by_id(np.arange(n), stream)
        sampled = np.zeros(n, bool)
        sampled[sampler.batch(draws[release.slot])] = True
        draws[release.slot] += 1
        expected = np.zeros(federation.start.size, np.int64)
        for party in federation.parties:
            records = OBJECTIVE.prepare(party.data)
            own = np.flatnonzero(sampled[np.asarray(party.ids)])
            total = np.zeros(federation.start.size)
            release.query.sum_into(OBJECTIVE, Batch(records, own), total)
            step = federation.plan.terms(total.size).step
            expected += np.rint(total / federation.scale(release) / step).astype(np.int64)
        got = whole(release.total, federation.unit(t))
        np.testing.assert_array_equal(got - federation.noise_units[t], expected)


@pytest.mark.parametrize("table", TABLES)
def test_trusted_curator_gives_the_central_model_with_the_same_noise(run: Any, table: str) -> None:
    """The coordinator rounds the sum and σ times its seeded normals to one grid."""
    federation = run(table, "curator")
    units = {
        slot.name: StandardNormals(seed_key(SEED), f"unit/{slot.name}", federation.plan.limit(slot.name))
        for slot in federation.plan.schedule.slots
    }
    d = federation.start.size

    class OnTheGrid(Door):
        def release(self, slot: str, query: Query, *, rho: float | None = None) -> Floats:
            sigma, step = sigma_for(federation.plan.multiplier(slot, None), query.bound, d)
            number = sum(each.slot == slot for each in self.released)
            noise = np.rint(units[slot].row(number, d) * (sigma / step))
            exact = self._session.release(slot, query, rho=rho)
            total: Floats = (np.rint(exact / step) + noise) * step
            self.released.append(Released(slot, query, total.copy()))
            return total

    door = OnTheGrid(federation.noiseless_session())
    path = walk(federation.algorithm, door, federation.start)
    np.testing.assert_allclose(federation.path, path, rtol=0.0, atol=1e-12)
    for ours, theirs in zip(federation.released, door.released, strict=True):
        np.testing.assert_allclose(ours.total, theirs.total, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("trust", FACTORS)
def test_total_noise_has_the_claimed_variance(run: Any, trust: str) -> None:
    """In units of the central noise z·C: what the plan says, from both sides."""
    federation = run("generated", trust)
    plan, session = federation.plan, federation.noiseless_session()
    noise = [
        (r.total - session.release(r.slot, r.query)) / (plan.multiplier(r.slot, None) * r.query.bound)
        for r in federation.released
    ]
    numbers = np.concatenate(noise)
    tolerance = 5.0 * math.sqrt(2.0 / numbers.size)
    assert plan.variance_factor == pytest.approx(FACTORS[trust], rel=1e-3)
    assert float(np.mean(numbers**2)) == pytest.approx(FACTORS[trust], rel=tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_the_sum_of_the_shares_that_the_roles_draw(run: Any, mode: str) -> None:
    """No protocol at all: the seeded shares of the ten parties, or of the servers, added up."""
    federation = run("generated", mode)
    terms = federation.plan.terms(federation.start.size)
    roles = range(M) if mode == "masks" else range(M, M + terms.server_count)
    shares = [NoiseShare(terms, role, SEED) for role in roles]
    rest = [
        units - sum(share.draw(t).view(np.int64) for share in shares)
        for t, units in enumerate(federation.noise_units)
    ]
    if mode != "mpc":
        assert not np.any(rest)
        return
    # What is left was drawn inside the computation, by nobody: whole multiples of the coarse step.
    coarse, remainder = np.divmod(np.concatenate(rest), COARSE_STEP)
    assert not np.any(remainder)
    assert np.abs(coarse).max() <= COARSE_TOP
    tolerance = 5.0 * math.sqrt(2.0 / coarse.size)
    assert float(np.mean(np.square(coarse))) == pytest.approx(COARSE_SIGMA**2, rel=tolerance)
