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
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quietgrad.core.errors import ExhaustedError
from quietgrad.core.noise.mechanisms import AboveThreshold
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import SinglePass
from quietgrad.core.session.base import Session
from quietgrad.core.session.queries import Objective
from quietgrad.core.settings import Count, Positive, PositiveFraction
from quietgrad.core.vectors import Vector, copy, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import Estimate, constant_of, plan_preview, total_smoothness
from quietgrad.methods.oracles.error_bounds import bernstein
from quietgrad.methods.oracles.gradient_estimators import AdaptiveSpider
from quietgrad.methods.perturbed_sgd import SmallGradient, check_tolerance, states
from quietgrad.tables.queries.second_order import StationarityGap

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

    name: ClassVar[str] = "model-selection"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.oracle.regime != "fresh":
            raise ValueError("regime='reuse': selection needs held-out records; use an oracle of the fresh regime.")

    def schedule(self, n_public: int) -> Schedule:
        """The oracle's slots and one search, all on disjoint records."""
        kept = int(self.held_out * n_public)
        if kept < 1 or n_public - kept < self.oracle.batches(n_public)[0]:
            raise ValueError(f"n={n_public}: too small for one full query and a held-out part of {kept} records.")
        search = Slot("select", SinglePass(n_public, kept), noise=_SEARCH_NOISE, mechanism=AboveThreshold())
        return Schedule((*self.oracle.slots(n_public, self.steps), search), "parallel", adaptive=True)

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        """Refuse missing constants before anything is paid for."""
        self._settle(plan_preview(objective, plan), len(x0))

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

    def _margin(self, session: Session, dim: int, candidates: int) -> float:
        """By how many records' changes a candidate must pass; see the module's text."""
        slot, n = session.plan.schedule["select"], session.expected_batch("select")
        scale = slot.multiplier(session.plan.noise_multiplier)
        noise = 2.0 * math.log(2.0 / self.failure) + 4.0 * math.log(2.0 * candidates / self.failure)
        error = slot.sampling.mean_error(session.plan.n_public)
        assert error is not None  # a single pass states it
        log_odds = math.log(4.0 * max(2, dim) * candidates * error.odds / self.failure)
        return scale * noise + n * bernstein(math.sqrt(error.variance), error.longest, log_odds) + 1.0

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
