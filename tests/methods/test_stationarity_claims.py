"""Claims of stationarity under true constants: how often they are false, on a bowl, a saddle and a valley."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import binom

import quietgrad as qg
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import BaseObjective, Batch, LossConstants, NoRegularizer
from quietgrad.methods.oracles.base import Estimate
from quietgrad.methods.oracles.error_bounds import EstimateError
from quietgrad.methods.oracles.gradient_estimators import MiniBatch
from quietgrad.tables.landscapes import SyntheticRecords

Floats = npt.NDArray[np.float64]
OMEGA, FALSE_ALARM = 0.05, 1e-4  # ω of every claim; false-alarm rate of each binomial test, seeds fixed


@dataclass(frozen=True)
class Surface(BaseObjective):
    """A risk on the plane whose records each tilt it by ± ``tilt`` along the second axis.

    ``shape`` names the risk: *bowl* is ½x² + ½·0.03·y²; *saddle* is ¼x⁴ − ½x² + ½y²; *valley* is ½(y − sin x)² +
    ½·0.1·x², curved and, beside its floor, not convex. The constants hold where runs go: |x| ≤ 1.2 and |y| ≤ 1 on
    the saddle, |y − sin x| ≤ 1 in the valley.
    """

    shape: str
    tilt: float
    seed: int = 0

    name: ClassVar[str] = "surface"
    dim: ClassVar[int] = 2
    regularizer: ClassVar[NoRegularizer] = NoRegularizer()

    def constants(self) -> LossConstants:
        slope, smooth, rho = {"bowl": (12.5, 1.0, 8e-6), "saddle": (1.2, 3.4, 7.2), "valley": (1.7, 3.1, 3.1)}[
            self.shape
        ]
        return LossConstants.of(
            self.regularizer, row_bound=math.inf, lipschitz=slope + self.tilt, smoothness=smooth,
            hessian_lipschitz=rho, convex=self.shape == "bowl",
        )  # fmt: skip

    def negative_curvature(self) -> float:
        return {"bowl": 0.0, "saddle": 1.0, "valley": 0.9}[self.shape]

    def population_gradient(self, params: Floats) -> Floats:
        x, y = params
        if self.shape == "bowl":
            return np.array([x, 0.03 * y])
        if self.shape == "saddle":
            return np.array([x**3 - x, y])
        off = y - math.sin(x)
        return np.array([0.1 * x - off * math.cos(x), off])

    def population_hessian_product(self, params: Floats, vector: Floats) -> Floats:
        x, y = params
        if self.shape == "bowl":
            return np.array([vector[0], 0.03 * vector[1]])
        if self.shape == "saddle":
            return np.array([(3 * x**2 - 1) * vector[0], vector[1]])
        bend = math.cos(x) ** 2 + (y - math.sin(x)) * math.sin(x) + 0.1
        cross = -math.cos(x)
        return np.array([bend * vector[0] + cross * vector[1], cross * vector[0] + vector[1]])

    def prepare(self, data: Any) -> SyntheticRecords:
        if isinstance(data, SyntheticRecords):
            return data
        rng = np.random.default_rng(self.seed)
        return SyntheticRecords({"kind": rng.integers(0, 2, int(data), dtype=np.int32)}, 2)

    def initial(self, records: object) -> Floats:
        return np.array({"bowl": (0.0, 400.0), "saddle": (0.0, 0.0), "valley": (0.7, 1.4)}[self.shape])

    def add(self, batch: Batch, points: Any, rule: ClippingRule, out: Floats) -> None:
        kinds = batch.records["kind"] if batch.indices is None else batch.records["kind"][batch.indices]
        up = int(kinds.sum())
        _, beta, clip, gamma, _ = rule.numbers  # gradients or differences: α is 1 and γ is 0
        assert not gamma
        slope = self.population_gradient(points[0])
        if beta:
            slope = slope - self.population_gradient(points[1])
        for sign, count in ((1.0, up), (-1.0, len(kinds) - up)):
            x, y = slope[0], slope[1] + (0.0 if beta else sign * self.tilt)
            weight = count * min(1.0, clip / max(math.hypot(x, y), 1e-300))
            out[0] += weight * x
            out[1] += weight * y

    def tilted_by(self, records: SyntheticRecords) -> float:
        """How much all records together tilt their mean."""
        return self.tilt * (2.0 * float(records["kind"].mean()) - 1.0)


def most_failures(runs: int, rate: float) -> int:
    """What failures of ``runs`` exceed with probability below the false alarm, if their rate is ``rate``."""
    return int(binom.isf(FALSE_ALARM, runs, rate))


@pytest.mark.parametrize(
    ("sampling", "relation"),
    [("poisson", "add-remove"), ("fixed-size", "replace-one"), ("fresh", "add-remove"), ("fresh", "replace-one")],
)
def test_the_stated_bound_covers_all_estimates_of_a_run(sampling: str, relation: str) -> None:
    """60 or 32 runs of 90 estimates along a path: the largest error of a run is above the bound in few of them.

    The error in mean square is exceeded in nearly every run, and so is a fifth of the bound: it is no empty one.
    """
    n, steps, runs = 30_000, 90, 60 if sampling == "fresh" else 32
    surface = Surface("bowl", 100.0)
    oracle: Any = qg.AdaptiveSpider(500, 100, kappa=20.0)
    if sampling != "fresh":
        oracle = MiniBatch(500, surface.constants().lipschitz or 0.0, sampling)  # type: ignore[arg-type]
    method = qg.PerturbedSGD(oracle=oracle, steps=steps)
    plan = qg.plan(method, n=n, budget=qg.Budget(20.0, 1e-6, qg.Relation.parse(relation)))
    over = over_size = over_fifth = 0
    for seed in range(runs):
        records = Surface("bowl", 100.0, seed).prepare(n)
        door = CentralCurator(surface, records, seed=seed).open(plan)
        stated: EstimateError = oracle.error(door)
        tilt = 0.0 if stated.risk == "population" else surface.tilted_by(records)
        state, worst = Estimate(), 0.0
        for step in range(steps):
            x = np.array([2.0 * math.sin(step), 300.0 - step])
            state = oracle.estimate(state, x, door)
            worst = max(worst, float(np.linalg.norm(state.value - surface.population_gradient(x) - (0.0, tilt))))
        bound = stated.bound(2, OMEGA)
        over += worst > bound
        over_size += worst > stated.size(2)
        over_fifth += worst > bound / 5.0
    assert over <= most_failures(runs, OMEGA)
    assert min(over_size, over_fifth) >= 0.9 * runs
    assert stated.risk == ("population" if sampling == "fresh" else "records")


def test_attempts_on_a_bowl_begin_at_points_of_small_gradient() -> None:
    """A run can stop only where its first attempt began: on a bowl none gets away, so each such point is a claim.

    The bowl is about sampling alone: noise would take a longer run. With a bound in mean square instead of one for
    all estimates 14 to 16 of 40 such claims were false.
    """
    n, tilt, runs, wrong = 40_000, 100.0, 40, 0
    surface = Surface("bowl", tilt)
    method = qg.PerturbedSGD(MiniBatch(2000, 112.5), steps=3000, failure=OMEGA)
    plan = qg.plan(method, n=n, budget=None)
    for seed in range(runs):
        records = Surface("bowl", tilt, seed).prepare(n)
        session = CentralCurator(surface, records, seed=seed).open(plan)
        state = method.init(surface.initial(records))
        while not state.extra["attempt"]:
            state = method.step(state, session)
            assert not state.done
        assert state.extra["claim"] == "stated constants"
        assert state.extra["risk"] == "records"
        gradient = surface.population_gradient(state.extra["saved"]["params"])
        gradient[1] += surface.tilted_by(records)
        wrong += float(np.linalg.norm(gradient)) > state.extra["alpha"]
    assert wrong <= most_failures(runs, OMEGA)


CLAIMS: dict[str, tuple[Any, int, float, qg.Budget | None, int]] = {
    # oracle, records, tilt, budget, runs
    "saddle": (qg.AdaptiveSpider(), 600_000, 0.1, qg.Budget(8.0, 1e-6), 12),
    "valley": (qg.AdaptiveSpider(), 600_000, 0.1, qg.Budget(8.0, 1e-6), 12),
}


@pytest.mark.parametrize("shape", CLAIMS)
def test_false_claims_are_as_rare_as_stated(shape: str) -> None:
    """A run that says "sosp" is wrong with probability at most ω."""
    oracle, n, tilt, budget, runs = CLAIMS[shape]
    surface, method = Surface(shape, tilt), qg.PerturbedSGD(oracle, steps=3000, failure=OMEGA)
    said, wrong = 0, 0
    for seed in range(runs):
        records = Surface(shape, tilt, seed).prepare(n)
        run = qg.minimize(surface, records, method, budget=budget, seed=seed)
        assert run.details["claim"] == "stated constants"
        if run.stopped_by != "sosp":
            continue
        said += 1
        alpha, rho = run.details["alpha"], run.details["rho"]
        gradient = surface.population_gradient(run.params)
        assert run.details["risk"] == "population"
        hessian = np.stack([surface.population_hessian_product(run.params, e) for e in np.eye(2)])
        least = float(np.linalg.eigvalsh(hessian)[0])
        wrong += float(np.linalg.norm(gradient)) > alpha or least < -math.sqrt(rho * alpha)
    assert said >= 0.9 * runs  # a test of claims that are never made is none
    assert wrong <= most_failures(runs, OMEGA)
