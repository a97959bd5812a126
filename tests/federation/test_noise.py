"""The noise that leaves after aggregation has the claimed scale, from both sides, in every trust setting.

Rows of zeros have zero gradients, so a release is nothing but its noise. With N numbers the variance is known to
√(2/N); the tolerance is five of those, so a right implementation fails once in two million fixed seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.errors import DataError
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery, Query
from quietgrad.federation import Party, deal
from quietgrad.federation.coordinator import FederatedCurator, FederatedSession
from quietgrad.federation.plan import FederatedPlan
from quietgrad.federation.secure.channel import NoiseShare
from quietgrad.federation.secure.local_session import SecureSession
from quietgrad.federation.secure.terms import COARSE_SIGMA, COARSE_STEP, COARSE_TOP
from quietgrad.federation.simulation import InProcess, assemble, simulate
from quietgrad.tables.losses import Logistic
from quietgrad.tables.regularizers import Nonconvex

D, ROUNDS = 300, 12
SIZES = (30, 20, 10)
TOLERANCE = 5.0 * math.sqrt(2.0 / (D * ROUNDS))


def open_session(
    algorithm: Any, sizes: tuple[int, ...] = SIZES, seed: int | None = 3, **settings: Any
) -> tuple[FederatedSession, FederatedPlan]:
    parties = [Party(np.zeros((n, D)), np.zeros(n)) for n in sizes]
    settings = {"budget": qg.Budget(1.0, 1e-5), "noise_multiplier": 1.7, **settings}
    plan, people = assemble(algorithm, Logistic(), parties, seed=seed, **settings)
    curator = FederatedCurator(
        Logistic(), InProcess(people.handlers), identity=people.identity, roster=people.roster, seed=seed
    )
    return curator.open(plan), plan


def variance(session: FederatedSession, clip: float) -> float:
    sums = [session.release("gradient", GradientQuery(np.zeros(D), clip)) for _ in range(ROUNDS)]
    assert len({total.tobytes() for total in sums}) == ROUNDS  # no noise is used twice
    return float(np.mean(np.square(sums)))


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "curator": ({"trust": "curator"}, 1.0),
    "curator, equal weights": ({"trust": "curator", "weights": "equal"}, 2.0**2),  # 60/(3·10) = 2
    "local": ({"trust": "local"}, 3.0),
    "local, equal weights": ({"trust": "local", "weights": "equal"}, (2 / 3) ** 2 + 1.0 + 2.0**2),
    "masks": ({"trust": "secure", "secure": "masks"}, 3 / 2),
    "masks, two colluders": ({"trust": "secure", "secure": "masks", "colluders": 2}, 3.0),
    "masks, equal weights": ({"trust": "secure", "secure": "masks", "weights": "equal"}, 4.0 * 3 / 2),
    "servers": ({"trust": "secure", "secure": "servers"}, 2.0),
    "three servers": ({"trust": "secure", "secure": "servers", "servers": 3}, 3.0),
    "mpc": ({"trust": "secure", "secure": "mpc"}, 1.0026),
}


@pytest.mark.parametrize("name", CASES)
def test_noise_of_a_release_is_as_claimed(name: str) -> None:
    settings, factor = CASES[name]
    session, plan = open_session(qg.DPGD(steps=ROUNDS, clip=0.5), **settings)
    expected = (1.7 * 0.5) ** 2 * factor
    assert variance(session, 0.5) == pytest.approx(expected, rel=TOLERANCE)
    assert plan.variance_factor * max(plan.factors) ** 2 == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize("settings", [{"trust": "local"}, {"trust": "secure", "secure": "masks"}])
def test_noise_follows_the_bound_of_the_query(settings: dict[str, Any]) -> None:
    """SPIDER-like: the clip of a release is free, and its noise is proportional to it."""
    session, plan = open_session(qg.DPGD(steps=ROUNDS, clip=0.5), **settings)
    for templates in plan.templates.values():
        templates[0]["query.clip"] = {"from": 0.0, "to": 0.5}
    assert variance(session, 1e-3) == pytest.approx((1.7e-3) ** 2 * plan.variance_factor, rel=TOLERANCE)


def test_secure_plan_pays_for_discrete_noise() -> None:
    budget = qg.Budget(1.0, 1e-5)
    _, plain = open_session(qg.DPGD(steps=4), trust="curator", noise_multiplier=None, budget=budget)
    _, secure = open_session(qg.DPGD(steps=4), trust="secure", secure="masks", noise_multiplier=None, budget=budget)
    assert isinstance(secure.event, events.Composed)
    assert secure.event.parts[-1] == events.TotalVariationSlack(secure.slack)
    assert secure.slack == pytest.approx(4 * secure.terms(D).slack())
    assert secure.noise_multiplier >= plain.noise_multiplier
    assert secure.epsilon() <= 1.0


def test_spare_rounds_are_paid_beforehand() -> None:
    _, plan = open_session(qg.DPGD(steps=4), spare=2)
    assert plan.event == events.gaussian(1.7, 6)
    assert plan.event_of({"gradient": 5}) == events.gaussian(1.7, 5)
    _, random = open_session(qg.DPGD(steps=4, returns="random"), spare=2)
    assert isinstance(random.event, events.RandomNumberOfReleases)
    assert [rounds for rounds, _ in random.event.law] == [2, 3, 4, 5]


def test_fixed_batches_cost_what_the_most_sampled_party_pays() -> None:
    """b_j/n_j differs by rounding, and a party may have no batch at all (b < m)."""
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    algorithm = qg.DPSGD(steps=ROUNDS, batch_size=2, sampling="fixed-size", clip=0.5)
    session, plan = open_session(algorithm, sizes=(30, 20, 4), budget=budget)
    assert plan.schedule.slots[0].sampling.local_batches(plan.sizes) == (1, 1, 0)
    once = [events.fixed_size_gaussian(n, 1, 1.7, ROUNDS) for n in (30, 20)]
    assert plan.event == events.MaxOverParties(tuple(once))
    assert plan.epsilon() == pytest.approx(
        max(qg.account(event, delta=1e-5, relation="replace-one") for event in once), rel=1e-6
    )
    assert variance(session, 0.5) == pytest.approx((1.7 * 0.5) ** 2, rel=TOLERANCE)
    assert "1 of 30, 1 of 20, 0 of 4" in plan.explain()


def test_fixed_batches_need_the_true_sizes() -> None:
    parties = [Party(np.zeros((5, 2)), np.zeros(5), n_public=6)]
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    with pytest.raises(DataError, match="exact"):
        simulate(qg.DPGD(steps=1), Logistic(), parties, budget=budget, noise_multiplier=1.0)


Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Table = tuple[Any, Floats]

M, SEED, STEPS = 10, 11, 12
BUDGET = qg.Budget(1.0, 1e-5)
OBJECTIVE = Logistic(regularizer=Nonconvex(1e-2))
MODES = ("masks", "servers", "mpc")


def generated() -> Table:
    rng = np.random.default_rng(3)
    X = rng.normal(size=(900, 40)) / 6.0
    return X, (X @ rng.normal(size=40) > 0.1).astype(np.float64)


@dataclass(frozen=True)
class Released:
    """One release: what was asked, and the sum that left."""

    slot: str
    query: Query
    total: Floats


class Door:
    """A session that remembers what it released."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.released: list[Released] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Floats:
        total: Floats = self._session.release(slot, query, rho=rho)
        self.released.append(Released(slot, query, total.copy()))
        return total


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
        state = self.algorithm.init(self.start)
        while not state.done:
            state = self.algorithm.step(state, door)
        assert session.faults == []
        self.plan: FederatedPlan = plan
        self.released = door.released

    @cached_property
    def noise_units(self) -> list[Integers]:
        """The noise of every round on the grid of the secure sum: the same roles and seeds sum zeros."""
        d = self.start.size
        terms = self.plan.terms(d)
        again = SecureSession(terms, seed=SEED)
        return [whole(again.sum(np.zeros((M, d))), terms.step) for _ in self.released]

    def unit(self, t: int) -> float:
        """What one grid unit of round t's secure sum is worth."""
        release = self.released[t]
        return self.plan.terms(self.start.size).step * self.scale(release)

    def scale(self, release: Released) -> float:
        multiplier = self.plan.multiplier(release.slot)
        return self.plan.scale(multiplier, release.query.bound, self.start.size)


def whole(values: Floats, unit: float) -> Integers:
    """Multiples of a unit as whole numbers; refuses what is not one."""
    units = values / unit
    # Two roundings of a number below 2^53: a multiple of the unit is off by less than 2^-10 of one here.
    assert float(np.abs(units - np.rint(units)).max()) < 1e-3
    return np.rint(units).astype(np.int64)


@pytest.fixture(scope="module")
def run() -> Any:
    return lru_cache(lambda trust: Federation(generated(), trust))


@pytest.mark.parametrize("mode", MODES)
def test_released_sum_minus_its_noise_is_the_sum_of_rounded_vectors(run: Any, mode: str) -> None:
    """Exactly, as whole numbers: every party's part of the central curator's sample, rounded, added up."""
    federation = run(mode)
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


@pytest.mark.parametrize("mode", MODES)
def test_noise_is_the_sum_of_the_shares_that_the_roles_draw(run: Any, mode: str) -> None:
    """No protocol at all: the seeded shares of the ten parties, or of the servers, added up."""
    federation = run(mode)
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
