"""DP-SPIDER: line by line against numpy, its two noises, its split, its bounds, and correlated differences."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from reproduce import spider_tables
from reproduce import valley_runs as valley
from scipy import special

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import calibrate_event
from quietgrad.core.errors import BudgetError
from quietgrad.core.noise.correlated import BufferedToeplitzNoise
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import BaseObjective, Batch, LossConstants, NoRegularizer
from quietgrad.methods.learning_rates import Linear
from quietgrad.methods.oracles.spider import SpiderSettings, relative_noise, split_for
from quietgrad.methods.theorems import bounds
from quietgrad.objectives import Logistic
from quietgrad.tables.landscapes import SyntheticRecords
from tests.methods.common import objective, problem

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(1.0, 1e-5)
FALSE_ALARM = 1e-6  # of each chi-square test, seeds fixed


class Listening:
    """A session that writes down what was asked and what the noise was."""

    def __init__(self, session: Any, exact: Any) -> None:
        self.session, self.exact = session, exact
        self.heard: list[tuple[str, float, Floats]] = []
        self.asked: list[Any] = []  # whose records each release was about; None: all
        self.length = 0.0  # of the walk, as the method reports it

    def release(self, slot: str, query: Any) -> Any:
        answer = self.session.release(slot, query)
        self.asked.append(self.session._samplers[slot].batch(self.session._used[slot] - 1))
        self.heard.append((slot, query.bound, answer - self.exact(query, self.asked[-1])))
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def walked(method: qg.DPSpider, budget: qg.Budget | None, n: int = 300) -> tuple[list[Floats], Listening, Any]:
    """Every iterate of a run on the common problem, the session that was listened to, and the data."""
    X, y = problem(n)
    curator = CentralCurator(objective(), (X, y), seed=3)

    def exact(query: Any, indices: Any) -> Floats:
        out = np.zeros(X.shape[1])
        query.sum_into(objective(), Batch(curator.records, indices), out)
        return out

    session = Listening(curator.open(qg.plan(method, n=n, budget=budget)), exact)
    state = method.init(curator.initial())
    path = [np.array(state.params)]
    while not state.done:
        state = method.step(state, session)  # type: ignore[arg-type]
        path.append(np.array(state.params))
    session.length = state.extra["path"]
    return path, session, (X, y)


def reference(method: qg.DPSpider, data: Any, session: Listening) -> tuple[list[Floats], list[float]]:
    """DP-SPIDER in numpy, line by line, given the samples and noise of its releases; iterates, and clips used."""
    X, y = data
    n, heard, clips = len(X), zip(session.asked, (noise for _, _, noise in session.heard), strict=True), []

    def gradients(w: Floats) -> Floats:
        return np.asarray((1.0 / (1.0 + np.exp(-X @ w)) - y)[:, None] * X)

    sampled = method.sampling in ("poisson", "fixed-size")
    full = method.batch_size if sampled and method.batch_size else n
    part = (method.difference_batch_size or full) if sampled else n / (method.cohorts or 1)

    def clipped_sum(rows: Floats, clip: float) -> Floats:
        clips.append(clip)
        asked, noise = next(heard)
        rows = rows if asked is None else rows[asked]
        lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
        return np.asarray((rows * np.minimum(1.0, clip / lengths)).sum(axis=0) + noise)

    w = np.zeros(X.shape[1])
    path, previous, estimate, drift, since = [w], w, np.zeros_like(w), 0.0, 0
    for t in range(method.steps):
        if t < method.warm_steps:
            estimate = clipped_sum(gradients(w), method.clip) / full
            since = 0
        else:
            moved = float(np.linalg.norm(w - previous))
            drift += moved**2
            by_period = since % (method.period or method.steps) == 0 if method.kappa is None else False
            by_drift = method.kappa is not None and (since == 0 or drift >= method.kappa)
            if by_period or by_drift:
                estimate, drift = clipped_sum(gradients(w), method.clip) / full, 0.0
            else:
                change = gradients(w) - gradients(previous)
                bound = method.difference_clip or method.smoothness * moved
                estimate = estimate + clipped_sum(change, bound) / part
            since += 1
        previous = w
        slope = estimate + 0.001 * w  # the common problem's L2(0.001)
        rate = float(str(method.learning_rate))
        if method.difference_clip is not None:  # under correlated noise no step is longer than this one clip allows
            rate = min(rate, method.difference_clip / (method.smoothness * float(np.linalg.norm(slope))))
        w = w - rate * slope
        path.append(w)
    return path, clips


SAMPLED: dict[str, Any] = {
    "steps": 12, "period": 4, "learning_rate": 2.0, "smoothness": 0.25, "clip": 0.5, "batch_size": 60,
    "difference_batch_size": 25,
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [
        qg.DPSpider(steps=12, learning_rate=2.0, smoothness=0.25, path=3.0),
        qg.DPSpider(steps=12, period=4, learning_rate=2.0, smoothness=0.05, clip=0.4, split=0.7),
        qg.DPSpider(steps=12, warm_steps=5, period=3, learning_rate=2.0, smoothness=0.25),
        qg.DPSpider(steps=12, kappa=0.05, full_queries=12, learning_rate=2.0, smoothness=0.25),
        qg.DPSpider(
            steps=12,
            period=6,
            learning_rate=2.0,
            smoothness=0.25,
            difference_clip=0.02,
            noise="correlated",
            sampling="turns",
            cohorts=3,
        ),
        qg.DPSpider(sampling="poisson", **SAMPLED),
        qg.DPSpider(sampling="poisson", warm_steps=3, **SAMPLED),
        qg.DPSpider(sampling="fixed-size", **SAMPLED),
    ],
    ids=[
        "one chain",
        "period",
        "warm start",
        "drift",
        "correlated",
        "Poisson",
        "Poisson, warm start",
        "fixed size",
    ],
)
@pytest.mark.parametrize("private", [False, True], ids=["exact", "private"])
def test_every_line_is_that_of_the_reference(method: qg.DPSpider, private: bool) -> None:
    relation = "replace-one" if method.sampling == "fixed-size" else "add-remove"
    path, session, data = walked(method, replace(BUDGET, relation=qg.Relation(relation)) if private else None)
    expected, clips = reference(method, data, session)
    if method.sampling in ("poisson", "fixed-size"):  # samples, and of their own sizes
        sizes: dict[str, list[int]] = {slot: [] for slot in ("warm", "o1", "o2")}
        for (slot, _, _), asked in zip(session.heard, session.asked, strict=True):
            sizes[slot].append(len(asked))
        assert np.mean(sizes["o2"]) < 0.7 * np.mean(sizes["o1"]) < 0.7 * 100
        assert method.sampling != "fixed-size" or {*sizes["o1"], *sizes["o2"]} == {60, 25}
    np.testing.assert_allclose(np.stack(path), np.stack(expected), rtol=0.0, atol=1e-9)
    np.testing.assert_allclose([bound for _, bound, _ in session.heard], clips, rtol=1e-9)
    walk = np.linalg.norm(np.diff(np.stack(expected), axis=0), axis=1)
    assert session.length == pytest.approx(walk[method.warm_steps :].sum(), rel=1e-9)


def test_each_kind_of_release_has_the_noise_of_its_own_slot() -> None:
    """z₁·G on full gradients and z₂·M‖θ − θ′‖ on differences: two chi-square tests; the other's would be seen."""
    method = qg.DPSpider(steps=120, period=4, learning_rate=0.5, smoothness=0.25, split=0.9)
    _, session, _ = walked(method, BUDGET, n=40)
    plan = session.plan
    z = {slot.name: slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots}
    assert z["o1"] / z["o2"] == pytest.approx(math.sqrt(30 / 0.9) / math.sqrt(90 / 0.1))
    for name, other in (("o1", "o2"), ("o2", "o1")):
        noise = np.concatenate([n / bound for slot, bound, n in session.heard if slot == name])
        low, high = (float(special.chdtri(len(noise), p)) for p in (1 - FALSE_ALARM / 2, FALSE_ALARM / 2))
        assert low < float(noise @ noise) / z[name] ** 2 < high
        assert not low < float(noise @ noise) / z[other] ** 2 < high


def test_the_price_is_that_of_both_slots_and_every_restart_is_in_it() -> None:
    method = qg.DPSpider(steps=100, period=10, split=0.6)
    plan = qg.plan(method, n=1000, budget=BUDGET)
    z1, z2 = (slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots)
    mu = math.sqrt(10 / z1**2 + 90 / z2**2)
    assert 10 / z1**2 == pytest.approx(0.6 * mu**2)
    single = qg.account(events.Gaussian(1.0 / mu), delta=1e-5, relation="add-remove")
    assert plan.epsilon() == pytest.approx(single, rel=1e-6)
    fewer = qg.plan(replace(method, period=100), n=1000, budget=None)
    assert [slot.count for slot in fewer.schedule.slots] == [1, 99]
    curator = CentralCurator(objective(), problem(1000), seed=0)
    session = curator.open(plan)
    state = replace(method, period=1, steps=11).init(curator.initial())
    oracle = qg.Spider(period=1, clip=1.0, smoothness=1.0)
    for _ in range(10):  # a restart in every step, of which the plan holds ten
        state.estimate = oracle.estimate(state.estimate, state.params, session)
    with pytest.raises(BudgetError, match="10 releases of 'o1' and all were made"):
        oracle.estimate(state.estimate, state.params, session)


@pytest.mark.parametrize("given", [{}, {"period": 10}, {"warm_steps": 9, "period": 7}], ids=str)
def test_a_random_round_pays_for_the_differences_that_are_asked_on_average(given: dict[str, Any]) -> None:
    """δ(ε) is the mean over R of that of K full gradients and the differences of R steps, all of them Gaussian.

    Full gradients count as if all were asked: how many there are depends on R as well, and the product of two
    averages would be less than the average of the products.
    """
    last = qg.DPSpider(steps=50, split=0.5, **given)
    plan = qg.plan(replace(last, returns="random"), n=1000, budget=BUDGET)
    slots = {slot.name: slot for slot in plan.schedule.slots}
    assert plan.noise_multiplier < 0.95 * qg.plan(last, n=1000, budget=BUDGET).noise_multiplier
    weights = {name: slot.multiplier(plan.noise_multiplier) ** -2.0 for name, slot in slots.items()}
    fixed = sum(slot.count * weights[name] for name, slot in slots.items() if name != "o2")
    deltas = []
    for steps in range(50):
        left = max(0, steps - last.warm_steps)
        differences = left - math.ceil(left / (last.period or 50))
        mu, epsilon = math.sqrt(fixed + differences * weights["o2"]), plan.epsilon()
        low, high = special.ndtr([-epsilon / mu - mu / 2.0, -epsilon / mu + mu / 2.0])
        deltas.append(high - math.exp(epsilon) * low)
    assert np.mean(deltas) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("given", [{"kappa": 0.1}, {"noise": "correlated", "sampling": "turns", "cohorts": 4,
                                                    "difference_clip": 0.1}], ids=str)  # fmt: skip
def test_a_random_round_counts_everything_where_the_average_has_no_proof(given: dict[str, Any]) -> None:
    slots = qg.DPSpider(steps=50, returns="random", **given).schedule(1000).slots
    assert [slot.law for slot in slots] == [None, None]


def test_theory_splits_where_the_noise_of_an_estimate_is_least() -> None:
    """G√(K/s) and M·path√(1/(K(1−s))) as in the module's text, against a search."""
    for ratio, chains in ((6.0, 1), (0.3, 1), (0.3, 8)):
        shares = np.linspace(1e-4, 1 - 1e-4, 20001)
        variance = ratio**2 * chains / shares + 1.0 / (chains * (1.0 - shares))
        assert split_for(ratio, chains) == pytest.approx(float(shares[variance.argmin()]), abs=2e-4)
    method = qg.DPSpider(steps=100, period=25, clip=3.0, smoothness=0.5, path=4.0)
    noise = [slot.noise for slot in method.schedule(1000).slots]
    assert noise == relative_noise((1.0, 4, split_for(1.5, 4)), (1.0, 96, 1.0 - split_for(1.5, 4)))
    adaptive = qg.AdaptiveSpider(100, 20, clip=2.0, smoothness=0.5, kappa=0.04, regime="reuse", full_queries=5)
    _, differences = adaptive.slots(1000, 80)
    own, walk = 2.0 * math.sqrt(5), 0.5 * math.sqrt(0.04 * 80)
    share = own / (own + walk)
    assert differences.noise == pytest.approx(0.02 * math.sqrt(80 / (1 - share)) / (0.1 * math.sqrt(5 / share)))


def test_the_method_and_its_oracle_share_their_settings() -> None:
    """Each is declared once, and every value that is given reaches the oracle."""
    names = [each.name for each in fields(SpiderSettings)]
    assert len(names) == 13
    given: dict[str, Any] = {
        "period": 3, "clip": 2.0, "smoothness": 0.5, "difference_clip": 0.1, "split": 0.7, "path": 4.0,
        "batch_size": 30, "difference_batch_size": 20, "sampling": "turns", "warm_steps": 2, "warm_share": 0.25,
        "cohorts": 4, "noise": "correlated",
    }  # fmt: skip
    assert given.keys() == {*names}
    oracle = qg.DPSpider(10, 0.1, **given).oracle()
    assert {name: getattr(oracle, name) for name in names} == given
    assert all(given[each.name] != each.default for each in fields(SpiderSettings))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: qg.DPSpider(split=1.0), "split=1.0"),
        (lambda: qg.DPSpider(kappa=1.0, period=3), "kappa"),
        (lambda: qg.DPSpider(full_queries=3), "needs kappa"),
        (lambda: qg.DPSpider(steps=5, warm_steps=5).schedule(100), "warm_steps=5: must be below"),
        (lambda: qg.DPSpider(noise="correlated", sampling="turns", cohorts=4), "needs difference_clip"),
        (lambda: qg.DPSpider(noise="correlated", difference_clip=0.1).schedule(100), "a fixed number of releases"),
        (lambda: qg.AdaptiveSpider(split=0.5), "on fresh records"),
        (lambda: qg.AdaptiveSpider(regime="reuse", noise="correlated", difference_clip=1.0), "regime='fresh'"),
        (lambda: qg.Spider(path=2.0), "give those too"),
        (lambda: qg.DPSpider(warm_steps=2.5), "warm_steps=2.5: must be a whole number"),  # type: ignore[arg-type]
        (lambda: qg.DPSpider(warm_steps=-1), "warm_steps=-1: must be a whole number"),
        (lambda: qg.DPSpider(warm_learning_rate=0.1), "needs warm_steps"),
        (lambda: qg.DPSpider(split=math.nan), "split=nan"),
        (lambda: qg.DPSpider(split=1e-300), "split=1e-300"),
        (lambda: qg.DPSpider(period=0), "period=0"),
        (lambda: qg.DPSpider(clip=math.inf), "clip=inf"),
        (lambda: qg.DPSpider(smoothness=math.inf), "smoothness=inf"),
        (lambda: qg.DPSpider(path=math.inf), "path=inf"),
        (lambda: qg.DPSpider(path=1e300).schedule(100), "path=1e[+]300: with this clip"),
        (lambda: qg.DPSpider(path=1e-300).schedule(100), "path=1e-300: with this clip"),
        (lambda: qg.DPSpider(kappa=1e300).schedule(100), "kappa=1e[+]300: with this clip"),
        (lambda: qg.DPSpider(noise="correlatd"), "noise='correlatd'"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_mean_nothing_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# --- correlated differences ---------------------------------------------------------------------------------------


def test_correlated_differences_cost_one_release_beside_the_full_gradients() -> None:
    tree: dict[str, Any] = {"noise": "correlated", "difference_clip": 0.1, "sampling": "turns", "cohorts": 8}
    plan = qg.plan(qg.DPSpider(steps=64, period=16, split=0.7, **tree), n=800, budget=BUDGET)
    z1, z2 = (slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots)
    mu = math.sqrt(4 / z1**2 + 1 / z2**2)
    assert 4 / z1**2 == pytest.approx(0.7 * mu**2)
    single = qg.account(events.Gaussian(1.0 / mu), delta=1e-5, relation="add-remove")
    assert plan.epsilon() == pytest.approx(single, rel=1e-6)
    fresh = qg.PerturbedSGD(
        qg.AdaptiveSpider(40, 10, noise="correlated", difference_clip=0.1, clip=1.0, smoothness=1.0), chi=0.1
    )
    plan = qg.plan(fresh, n=800, budget=BUDGET)
    # A record is in one release, but correlated noise carries it on: the whole slot counts, not its first release.
    assert plan.schedule.composition == "parallel"
    assert plan.event == events.Parallel((
        events.Parallel((events.Gaussian(plan.noise_multiplier),)), events.Gaussian(plan.noise_multiplier)
    ))  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
def test_no_path_of_interleaved_releases_moves_further_than_the_price(seed: int) -> None:
    """A record that chooses what it gives by all that was released, and full gradients at times that follow too.

    Innovations are what the noise u is heard as; in units of their deviations the squares of the shifts add up to
    1/z² + K/z₁² at most. With equal contributions of one sign that is attained.
    """
    rng, dim, cohorts, releases = np.random.default_rng(seed), 3, 4, 16
    noise = BufferedToeplitzNoise.made(releases, 4, cohorts)
    column, z, z1 = noise.coefficients(), 2.0, 3.0
    S = np.array([[column[i - j] if i >= j else 0.0 for j in range(releases)] for i in range(releases)])
    full, spent, gave, heard = 0, 0.0, np.zeros((releases, dim)), np.full(dim, 0.1)
    for t in range(releases):
        if (seed and heard[0] > 0.0 and full < 5) or (not seed and full < 5):
            shift = np.eye(dim)[0] if not seed else _unit(heard)
            spent, full = spent + float(shift @ shift) / z1**2, full + 1
            heard = heard + shift + z1 * rng.standard_normal(dim)
        if t % cohorts == seed % cohorts:
            gave[t] = np.eye(dim)[0] if not seed else _unit(np.sin(heard * (t + 1)))
        moved = S[t] @ gave  # of the innovation, which needs releases up to t alone
        spent += float(moved @ moved) / (z * noise.factor) ** 2
        heard = heard + moved + z * noise.factor * rng.standard_normal(dim)
    price = 1.0 / z**2 + full / z1**2
    assert spent <= price * (1.0 + 1e-9)
    if seed == 0:
        assert spent == pytest.approx(price, rel=1e-9)


def _unit(vector: Floats) -> Floats:
    return np.asarray(vector / np.linalg.norm(vector))


# --- the valley of the study --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Valley(BaseObjective):
    """The risk of ``reproduce/valley.py`` with records of their own: kind k adds the slope ±ς along one axis."""

    spread: float

    name: ClassVar[str] = "valley"
    dim: ClassVar[int] = valley.DIM
    regularizer: ClassVar[NoRegularizer] = NoRegularizer()

    def prepare(self, data: Any) -> SyntheticRecords:
        return SyntheticRecords({"kind": np.arange(int(data), dtype=np.int32) % (2 * self.dim)}, self.dim)

    def initial(self, records: object) -> Floats:
        return np.zeros(self.dim)

    def add(self, batch: Batch, points: Any, rule: ClippingRule, out: Floats) -> None:
        kinds = batch.records["kind"] if batch.indices is None else batch.records["kind"][batch.indices]
        rows = (
            valley.gradient(np.asarray(points[0]))
            + self.spread * np.concatenate([np.eye(self.dim), -np.eye(self.dim)])[kinds]
        )
        if rule.beta:
            rows = np.broadcast_to(valley.gradient(points[0]) - valley.gradient(points[1]), rows.shape)
        lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
        out += (rows * np.minimum(1.0, rule.clip / lengths)).sum(axis=0)


def test_the_study_walks_the_path_of_the_library() -> None:
    cell = valley.Cell(spread=3.0, noise=1e-300)
    shared = {"steps": 60, "learning_rate": 0.01, "decay": False, "average": False}
    reduced = valley.points("dp-spider", cell, {**shared, "full_gradients": 4, "split": 0.5}, 0, 1)[0]
    plain = valley.points("dp-gd", cell, {**shared, "momentum": 0.0}, 0, 1)[0]
    methods: dict[str, Any] = {
        "spider": qg.DPSpider(
            steps=60, period=15, learning_rate=0.01, clip=cell.clip, smoothness=valley.SMOOTHNESS, split=0.5
        ),
        "descent": qg.DPGD(steps=60, learning_rate=0.01, clip=cell.clip),
    }
    for name, expected in (("spider", reduced), ("descent", plain)):
        result = qg.minimize(Valley(3.0), 20, methods[name], budget=None)
        np.testing.assert_allclose(result.params, expected, atol=1e-8)
    plan = qg.plan(methods["spider"], n=20, budget=BUDGET)
    z1, z2 = (slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots)
    assert z2 / z1 == pytest.approx(math.sqrt(56 / 0.5) / math.sqrt(4 / 0.5))  # as in the study's two noises


@pytest.mark.parametrize("method", ["dp-gd", "dp-spider"])
def test_the_study_of_tables_walks_the_path_of_the_library(method: str) -> None:
    """Without noise, with a decaying step: the walk, and the average of its second half."""
    X, y = problem(300)
    X = spider_tables.scaled(X)
    fit = spider_tables.Fit.of((X, y), (X, y), 0.0)
    settings = {"learning_rate": 3.0, "decay": True, "momentum": 0.0, "full_gradients": 3, "split": 0.5}
    last, average, length = fit.walk(method, 12, [settings], 0, 1)
    shared: dict[str, Any] = {"steps": 12, "learning_rate": Linear(3.0, end=1.0 / 12.0)}  # 1 − t/T
    theirs: Any = qg.DPGD(**shared)
    if method == "dp-spider":
        theirs = qg.DPSpider(period=4, smoothness=0.25, split=0.5, **shared)
    loss, path = Logistic(row_bound=1.0), list[Floats]()  # begins with θ⁰
    for returns, expected in (("last", last), ("average", average)):
        result = qg.minimize(
            loss, (X, y), replace(theirs, returns=returns), budget=None,
            callback=lambda progress: path.append(np.array(progress.params)),
        )  # fmt: skip
        np.testing.assert_allclose(expected[0, 0], result.params, atol=1e-5)
    walked = sum(float(np.linalg.norm(b - a)) for a, b in itertools.pairwise(path[:13]))
    assert length[0, 0] == pytest.approx(walked, rel=1e-4)


def test_the_noise_of_the_study_of_tables_is_that_of_the_plan() -> None:
    """√(K/s)·z and √((T−K)/(1−s))·z, z of one release: the library's two slots."""
    z = calibrate_event(events.Gaussian, budget=BUDGET)
    X, y = problem(50)
    fit = spider_tables.Fit.of((X, y), (X, y), z)
    settings = {"full_gradients": 3, "split": 0.3, "momentum": 0.0}
    plan = qg.plan(qg.DPSpider(steps=12, period=4, split=0.3), n=50, budget=BUDGET)
    expected = [slot.multiplier(plan.noise_multiplier) for slot in plan.schedule.slots]
    assert [each.item() for each in fit._constants("dp-spider", 12, [settings])[2:]] == pytest.approx(
        expected, rel=1e-3
    )
    alone = qg.plan(qg.DPSpider(steps=12, period=1), n=50, budget=BUDGET)
    all_full = fit._constants("dp-spider", 12, [{**settings, "full_gradients": 96}])[2].item()
    assert all_full == pytest.approx(alone.noise_multiplier, rel=1e-3)
    descent = qg.plan(qg.DPGD(steps=12), n=50, budget=BUDGET).noise_multiplier
    assert fit._constants("dp-gd", 12, [settings])[2].item() == pytest.approx(descent, rel=1e-3)


# --- bounds -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bowl(BaseObjective):
    """½Σλx² plus slopes of ±1 that cancel: G = 1.5 where |∇F| ≤ ½, M = β = 1, Polyak–Łojasiewicz at ``least``."""

    least: float = 0.3

    name: ClassVar[str] = "bowl"
    dim: ClassVar[int] = 4
    regularizer: ClassVar[NoRegularizer] = NoRegularizer()

    def constants(self) -> LossConstants:
        return LossConstants(math.inf, 1.5, 1.0, 1.0, 0.0, 0.0, 0.0)

    def prepare(self, data: Any) -> SyntheticRecords:
        return SyntheticRecords({"kind": np.arange(int(data), dtype=np.int32) % 2}, self.dim)

    def initial(self, records: object) -> Floats:
        return np.full(self.dim, 0.2)

    def slope(self, x: Floats) -> Floats:
        return np.asarray(np.array([1.0, self.least, self.least, 1.0]) * x)

    def add(self, batch: Batch, points: Any, rule: ClippingRule, out: Floats) -> None:
        n = len(batch.records["kind"])
        slope = self.slope(points[0]) - (self.slope(points[1]) if rule.beta else 0.0)
        for sign in (1.0, -1.0):
            row = slope + (0.0 if rule.beta else sign * np.eye(self.dim)[0])
            out += n / 2.0 * row * min(1.0, rule.clip / max(float(np.linalg.norm(row)), 1e-300))


@pytest.mark.parametrize("growth", [None, 0.3])
def test_the_bounds_hold_on_a_bowl_and_are_no_empty_ones(growth: float | None) -> None:
    bowl, n, known = Bowl(), 2000, {"dim": 4, "initial_gap": 0.06}
    method = qg.DPSpider.theory(bowl.constants(), n=n, budget=BUDGET, growth=growth, **known)  # type: ignore[arg-type]
    plan = qg.plan(method, n=n, budget=BUDGET)
    found = bounds(method, bowl.constants(), plan, growth=growth, sharpness=(1.3, 2.0), **known)  # type: ignore[arg-type]
    names = [each.theorem for each in found]
    if growth is None:
        assert names == ["DP-SPIDER, stationary points", "DP-SPIDER, Kurdyka–Łojasiewicz"]
    else:
        assert names == ["DP-SPIDER, Polyak–Łojasiewicz"]
    # A random iterate's expectation is the mean over the whole path, θ⁰ among it; the last one is the path's end.
    whole = method if growth is not None else replace(method, returns="last", steps=method.steps - 1)
    reached = []
    for seed in range(12):
        path: list[Floats] = []  # begins with θ⁰
        qg.minimize(
            bowl, n, whole, budget=BUDGET, seed=seed, n_public=n,
            callback=lambda progress, path=path: path.append(np.array(progress.params)),
        )  # fmt: skip
        slopes = [bowl.slope(x) for x in path]
        squares = [float(slope @ slope) for slope in slopes[: method.steps]]
        reached.append(float(np.mean(squares)) if growth is None else float(path[-1] @ slopes[-1]) / 2.0)
    assert np.mean(reached) < found[0].value < 20.0 * np.mean(reached)


def test_the_bound_of_dp_srm_is_inequality_b17_with_the_noise_that_is_added() -> None:
    strong = qg.objectives.Logistic(row_bound=1.0, rows="clip").constants()
    known: dict[str, Any] = {"dim": 6, "initial_gap": 0.7}
    method = qg.DPSRM.theory(strong, n=10**6, budget=BUDGET, **known)
    plan = qg.plan(method, n=10**6, budget=BUDGET)
    (found,) = bounds(method, strong, plan, **known)
    z, g, smooth, zeta, gamma, T = plan.noise_multiplier, 1.0, 0.25, method.zeta, method.gamma, method.steps
    assert zeta is not None
    b, b0 = method.batch_size, method.first_batch_size
    s, s0 = z * ((1 - gamma) * zeta + gamma * g) / b, z * g / (b0 or b)
    inner = 2 * (1 - gamma) ** 2 * zeta**2 / (gamma * b) + 2 * gamma * g**2 / b
    inner += 6 * (s**2 + s0**2 / T) / gamma + g**2 / (T * gamma * (b0 or b))
    expected = 4 * smooth * 0.7 / (T * zeta) + 2 * zeta + inner / zeta + math.sqrt(inner)
    assert found.value == pytest.approx(expected, rel=1e-9)
    assert bounds(qg.DPSRM(), strong, qg.plan(qg.DPSRM(), n=10**6, budget=BUDGET), **known) == ()
