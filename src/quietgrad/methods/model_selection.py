"""Selecting a second-order stationary point among released iterates (Liu et al. 2024).

Where :class:`~quietgrad.methods.perturbed_sgd.PerturbedSGD` knows that it has arrived, this pipeline only knows
that some iterate was good: SPIDER runs on one part of the records, and the first of its iterates to pass a noisy
test on the held-out rest is returned. The test is one AboveThreshold search over a scalar per iterate
(:class:`~quietgrad.tables.queries.second_order.StationarityGap`); the parts are disjoint, so each may spend
the whole budget.

*What a stop says.* The chosen iterate is second-order stationary at α for the population's risk, with probability
1 − ω, if G, M and ρ hold of every record. A noisy test passes at a margin: a candidate must be stationary on the n
held-out records by m, in units of what one record can change, with m the sum of

- what the search's noise can hide: of scale 2s on the threshold and 4s on each of C candidates, hence
  2s ln(2/ω) + 4s ln(2C/ω), too little with probability ω/2;
- what n records can differ from the population: n·(σ√(2ℓ) + aℓ/3) by
  :func:`~quietgrad.methods.oracles.error_bounds.bernstein`, for gradients as for Hessians. Held-out records are
  independent of the candidates. Tropp (2012, theorem 1.4) bounds the least eigenvalue of a sum of symmetric
  matrices in the same form, with d for 2; so ℓ = ln(2·max(2, d)·C/(ω/2)), for two conditions on C candidates.

One unit more pays for rounding to the noise's grid.

*Among parties* a scalar of all records is nobody's to compute, so ``search="hessians"`` releases what the test is
made of, as paper 003's Algorithm 4 does: gradient and Hessian of the held-out records at C candidates, one Gaussian
vector of sensitivity √(C(G² + rM²)), whatever the trust. Everything after it is post-processing. With s its noise
on a coordinate, and t = √(2 ln(4C/ω)),

- the gradient's noise is longer than s(√d + t) with probability ω/(4C) at most;
- the Hessian's is s·A with A of diagonal variance 1 and 1/2 off it. E λ_max(A) ≤ √(2d) (Sudakov and Fernique:
  ‖uuᵀ − vvᵀ‖_F² ≤ 2‖u − v‖²), and λ_max is 1-Lipschitz in the packed entries, so s(√(2d) + t) bounds it alike.

Both take the place of the search's noise, and the sampling error is as above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from quietgrad.core.errors import ExhaustedError, SettingError
from quietgrad.core.noise.mechanisms import AboveThreshold
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import SinglePass
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import Objective
from quietgrad.core.session.queries import Asked
from quietgrad.core.settings import Count, Positive, PositiveFraction
from quietgrad.core.vectors import Vector, copy, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import (
    Estimate,
    constant_of,
    noise_multiplier,
    plan_preview,
    total_smoothness,
)
from quietgrad.methods.oracles.error_bounds import bernstein
from quietgrad.methods.oracles.spider import AdaptiveSpider
from quietgrad.methods.perturbed_sgd import SmallGradient, check_tolerance, states
from quietgrad.tables.queries.second_order import GradientsAndHessians, StationarityGap, hessian_rank

_SEARCH_NOISE = 0.3  # the search's noise relative to the gradients': at ε = 1, δ = 1e-5 both then spend about ε


@dataclass(frozen=True)
class ModelSelection(Algorithm):
    """SPIDER, then a private choice among its iterates.

    SPIDER on (1 − held_out)·n fresh records, then a noisy search over its iterates on the others.

    Wherever ‖ĝ‖ ≤ 3χ the iterate becomes a candidate, and after ``patience`` such steps the oracle asks in full
    again, which renews the perturbation (in the original, noise is added there; here the privacy noise is it).

    Args:
        oracle: an :class:`AdaptiveSpider` on fresh records.
        alpha: α of the test (default: what ‖ĝ‖ ≤ 3χ says of ‖∇F‖ in perturbed SGD).
        held_out: the share of records kept for the search.
        patience: steps near a critical point before a full query is asked again.
        steps: cap on oracle calls.
        learning_rate: η (default 1/M).
        failure: ω.
        search: ``"threshold"``: one noisy search by one curator of all records. ``"hessians"``: noisy gradients and
            Hessians of the candidates, which parties can sum under every trust; its noise grows with d.
        candidates: C, how many iterates are tested with ``"hessians"``: of more, evenly spaced ones.

    >>> import quietgrad as qg
    >>> hill = qg.objectives.landscape("strict-saddle", d=5)
    >>> run = qg.minimize(hill, 10**6, ModelSelection(), budget=qg.Budget(4.0, 1e-6), seed=0)
    >>> run.stopped_by, qg.certify(hill, run.params, alpha=run.details["alpha"]).kind
    ('sosp', 'sosp')
    """

    oracle: AdaptiveSpider = field(default_factory=AdaptiveSpider)
    alpha: Positive | None = None
    held_out: PositiveFraction = 0.5
    patience: Count = 20
    steps: Count = 1000
    learning_rate: Positive | None = None
    failure: PositiveFraction = 0.05
    hessian_lipschitz: Positive | None = None
    search: Literal["threshold", "hessians"] = "threshold"
    candidates: Count = 4

    name: ClassVar[str] = "model-selection"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle.regime != "fresh":
            raise ValueError("regime='reuse': selection needs held-out records; use an oracle of the fresh regime.")
        if self.search not in ("threshold", "hessians"):
            raise ValueError(f"search={self.search!r}: must be 'threshold' or 'hessians'.")

    def schedule(self, n_public: int) -> Schedule:
        """The oracle's slots and one search, all on disjoint records."""
        size = int(self.held_out * n_public)
        if size < 1 or n_public - size < self.oracle.batches(n_public)[0]:
            raise SettingError(
                f"{{n}}: too small for one full query and a held-out part of {size} records.", n=n_public
            )
        search = Slot("select", SinglePass(n_public, size))
        if self.search == "threshold":
            search = Slot("select", SinglePass(n_public, size), noise=_SEARCH_NOISE, mechanism=AboveThreshold())
        return Schedule((*self.oracle.slots(n_public, self.steps), search), "parallel", adaptive=True)

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        """Refuse missing constants before anything is paid for."""
        self._settle(plan_preview(objective, plan), len(x0))

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Yield the oracle's queries and, with ``search="hessians"``, the test of all candidates."""
        yield from self.oracle.asks(x0, session)
        if self.search == "hessians":
            yield "select", Asked(self._tests([x0] * self.candidates, session))

    def init(self, x0: Vector) -> State:
        """Start at ``x0``."""
        return State(params=copy(x0), extra={"samples_used": 0, "near": 0, "candidates": [], "chosen": -1})

    def step(self, state: State, session: Session) -> State:
        """One step of SPIDER, or the search when records for the next one would cut into the held-out part."""
        extra = state.extra
        if state.step == 0:
            extra.update(self._settle(session, len(state.params)))
        state.step += 1
        left = session.plan.n_public - extra["samples_used"] - session.expected_batch("select")
        if state.step > self.steps or left < session.expected_batch("o1"):
            return self._search(state, session)
        try:
            state.estimate = self.oracle.estimate(state.estimate, state.params, session)
        except ExhaustedError:
            return self._search(state, session)
        extra["samples_used"] = _samples(session)
        gradient = state.estimate.value + session.regularizer.gradient(state.params)
        if norm(gradient) <= 3.0 * extra["chi"]:
            extra["candidates"].append(state.params)
            extra["near"] += 1
            if extra["near"] % self.patience == 0:
                state.estimate = Estimate(calls=state.estimate.calls)
        state.params = state.params - extra["eta"] * gradient
        return state

    def _search(self, state: State, session: Session) -> State:
        extra = state.extra
        if self.search == "hessians":
            return self._search_hessians(state, session)
        clip, smoothness = self.oracle.lipschitz(session), self.oracle.smooth(session)
        n = session.expected_batch("select")
        tests = [StationarityGap(x, extra["alpha"], extra["rho"], clip, smoothness, n) for x in extra["candidates"]]
        margin = self._margin(session, len(state.params), max(1, len(tests)))
        chosen = session.first_below("select", tests, -margin)
        extra["margin"] = margin / n
        extra["samples_used"] = _samples(session)
        extra["asked"] = len(extra["candidates"])
        if chosen is not None:
            extra["chosen"], state.params = chosen, extra["candidates"][chosen]
        state.stopped_by, state.done = "samples" if chosen is None else "sosp", True
        return state

    def _tests(self, points: list[Vector], session: Session) -> GradientsAndHessians:
        rows = np.stack([np.asarray(point, np.float64) for point in points])
        rank = hessian_rank(session.objective, rows.shape[1])
        return GradientsAndHessians(rows, self.oracle.lipschitz(session), self.oracle.smooth(session), rank)

    def _search_hessians(self, state: State, session: Session) -> State:
        """Release gradients and Hessians at the candidates, and take the first that passes."""
        extra, candidate_points = state.extra, state.extra["candidates"]
        state.stopped_by, state.done, extra["asked"] = "samples", True, 0
        if not candidate_points:
            return state
        spaced = np.unique(np.linspace(0, len(candidate_points) - 1, self.candidates).round().astype(int)).tolist()
        # A plan fixes how many points are asked about: the last one fills up.
        spaced += [spaced[-1]] * (self.candidates - len(spaced))
        query, n = self._tests([candidate_points[k] for k in spaced], session), session.expected_batch("select")
        try:
            total = session.release("select", query)
        except ExhaustedError:  # a round among parties was lost, and with it the held-out records
            return state
        extra["asked"], extra["samples_used"] = len(set(spaced)), _samples(session)
        dim = query.points.shape[1]
        spread = noise_multiplier(session, "select") * query.bound
        tail = math.sqrt(2.0 * math.log(4.0 * self.candidates / self.failure))
        sampled = self._sampling_error(session, dim, self.candidates) + 1.0
        steep = n * extra["alpha"] - query.clip * sampled - spread * (math.sqrt(dim) + tail)
        bent = n * math.sqrt(extra["rho"] * extra["alpha"])
        bent -= query.smoothness * sampled + spread * (math.sqrt(2.0 * dim) + tail)
        extra["margin"] = max(extra["alpha"] - steep / n, 0.0)
        for k, (gradient, hessian) in zip(spaced, query.unpack(total), strict=True):
            if session.regularizer.smoothness:
                hessian[np.diag_indices(dim)] += n * session.regularizer.curvature(candidate_points[k])
            slope = norm(gradient + n * session.regularizer.gradient(candidate_points[k]))
            if slope <= steep and float(np.linalg.eigvalsh(hessian)[0]) >= -bent:
                extra["chosen"], state.params, state.stopped_by = k, candidate_points[k], "sosp"
                break
        return state

    def _margin(self, session: Session, dim: int, candidates: int) -> float:
        """By how many records' changes a candidate must pass; see the module's text."""
        scale = session.plan.schedule["select"].multiplier(session.plan.noise_multiplier)
        noise = 2.0 * math.log(2.0 / self.failure) + 4.0 * math.log(2.0 * candidates / self.failure)
        return scale * noise + self._sampling_error(session, dim, candidates) + 1.0

    def _sampling_error(self, session: Session, dim: int, candidates: int) -> float:
        """By how many records' changes held-out sums can differ from the population's."""
        error = session.plan.schedule["select"].sampling.mean_error(session.plan.n_public)
        assert error is not None  # a single pass states it
        log_odds = math.log(4.0 * max(2, dim) * candidates * error.odds / self.failure)
        return session.expected_batch("select") * bernstein(math.sqrt(error.variance), error.longest, log_odds)

    def _settle(self, session: Session, dim: int) -> dict[str, Any]:
        smoothness = total_smoothness(self.oracle, session)
        error = self.oracle.error(session)
        small = SmallGradient.of(error, dim, self.failure)
        alpha = small.alpha if self.alpha is None else self.alpha
        rho = constant_of("hessian_lipschitz", "hessian_lipschitz", self.hessian_lipschitz, session)
        return {
            "eta": 1.0 / smoothness if self.learning_rate is None else self.learning_rate,
            "chi": small.chi,
            "alpha": alpha,
            "rho": rho,
            "risk": error.risk,
            "claim": "stated constants" if states(session, self.oracle, self.hessian_lipschitz) else "observed",
            "tolerance": check_tolerance(session.plan.n_public, alpha, rho, smoothness, session.objective),
        }


def _samples(session: Session) -> int:
    return round(sum(used * session.expected_batch(slot) for slot, used in session.used.items()))
