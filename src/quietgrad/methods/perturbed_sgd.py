"""Perturbed SGD (paper 003, Algorithm 1): descent that leaves saddles and says when it has arrived.

When ‖ĝ‖ ≤ 3χ the point may be a saddle. Up to Q times 𝒯 steps are tried from it; the privacy noise in ĝ is the
perturbation. Moving a distance 𝒮 away is an escape, and descent goes on from there. If no attempt moves that far,
the run says that the point is second-order stationary at α: ‖∇F‖ ≤ α and ∇²F ≽ −√(ρα). The first half is proved,
with probability 1 − ω/2; the second is argued from a linearised saddle, with ω/2 left for its failure. Both need
constants which every record must obey. Such constants are mostly far too large for α to mean anything; then
``mode="practical"`` still leaves saddles, and its stop is an observation.

Two readings of the printed algorithm. It returns the last iterate of the last attempt; its analysis is about the
point x̃ the attempts began at, and that is returned unless ``returns="last"``. (The last iterate usually has the
smaller gradient, but its curvature is only known to be above −√(ρα) − ρ𝒮.) Attempts restore x̃ with the oracle's
state (ĝ, x_prev, drift), for otherwise SPIDER would take a difference across a jump; since ĝ is restored too,
printed attempts of SPIDER share its error, and an unlucky one fails them all, which Lemma 2 excludes by assuming
independence. So every attempt after the first begins with a full query here, unless ``independent=False``.

*Derived* numbers follow from what the loss states of every record (G, M, ρ) and from the noise. With ψ the error of
ĝ in mean square, r₁ the noise of a coordinate of a full query, K how many full queries there can be, and γ = √(ρα),

    χ = ψ,   α = 3ψ + B,   η = 1/M,   𝒮 = ½√(α/ρ),   P(‖ĝ − ∇F‖ ≤ B in all estimates) ≥ 1 − ω/2,
    𝒯 = [ln(1 + γ𝒮/(0.32r₁)) + ln(4/3)] / ln(1 + ηγ),   Q = 1 + ⌈log₄(2K/ω)⌉.

B is proved in :mod:`~quietgrad.methods.oracles.error_bounds`. A run goes on until one estimate is small, so B must
hold for all of them: the first lucky estimate passes a bound in mean square. Where ‖ĝ‖ ≤ 3ψ then ‖∇F‖ ≤ 3ψ + B. F
is the population's risk where every record is used once (``details["risk"]`` is ``"population"``). It is that of
these records where samples are drawn anew for every query (``"records"``); n must then be their true number.

𝒯 is how long a saddle of curvature −γ takes to carry noise of 0.32r₁ (exceeded with probability 3/4) to distance 𝒮
while the slope falls behind as fast as ρ allows: x′ = γx − ½ρx² reaches 𝒮 = ½γ/ρ later than x′ = γx does by
ln(4/3)/γ. So an attempt with noise of its own fails at a saddle with probability 1/4 at most. All attempts but the
first have that, and at most K points are tried more than once. Other directions than the saddle's own are left out
of this argument, hence "argued". Sampling errors help, but nothing is known of their direction, so they do not
count. What a stop then says, λ_min ≥ −√(ρα), is worth something only if √(ρα) is small against curvature that
occurs: see :func:`check_tolerance`.

*Practical* numbers follow from a step η and a clip C that are chosen, as for DP-SGD, and from γ, the curvature to
be left. Differences are clipped to ‖x − x′‖/η. A point at rest under errors of size χ in every step
is carried about ηχ√𝒯 far in 𝒯 steps; 𝒮 is twice that, and 𝒯 is as long as curvature −γ needs for it:

    𝒮 = 2ηχ√𝒯,   𝒯 = ln(1 + γ𝒮/(0.32r)) / ln(1 + ηγ),   Q = 2.

with χ = r(√d + √(2 ln(4·steps/ω))) + σ, a size and no bound. A stop then says that two drifts did not get away.
That is an observation: clipped gradients may lead elsewhere than the risk's own, and no constant of the loss is
known to hold. If γ is not given it is 0.1/η at first. A flatter saddle is left too slowly for 𝒯, and stopping
early saves no privacy; so the last drift goes on, and γ is halved (𝒯 about doubled) whenever it has not got away,
until records or steps run out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import ExhaustedError, SettingError
from quietgrad.core.plans.schedule import Plan, Schedule
from quietgrad.core.sampling.schemes import Risk
from quietgrad.core.session.base import Session
from quietgrad.core.session.clipping import FLAT
from quietgrad.core.session.objectives import LossConstants, Objective
from quietgrad.core.session.queries import Asked
from quietgrad.core.settings import Count, Positive, PositiveFraction
from quietgrad.core.vectors import Vector, copy, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import (
    Estimate,
    Oracle,
    constant_of,
    plan_preview,
    total_smoothness,
)
from quietgrad.methods.oracles.error_bounds import EstimateError
from quietgrad.methods.oracles.gradient_estimators import MiniBatch
from quietgrad.methods.oracles.spider import AdaptiveSpider, Spider
from quietgrad.methods.second_order_theorem import solve

STEP, CLIP, ATTEMPTS = 0.5, 1.0, 2  # what practical runs take if nothing is given: DP-SGD's own defaults
_PUSH = 0.32  # |N(0, 1)| exceeds it with probability 3/4


class EscapeParameters(NamedTuple):
    """χ, η, the curvature that a stop rules out, 𝒮, 𝒯 and Q."""

    chi: float
    eta: float
    tolerance: float
    radius: float
    escape_steps: int
    attempts: int


def derived(
    chi: float,
    alpha: float,
    push: float,
    *,
    smoothness: float,
    rho: float,
    failure: float,
    chains: int,
    eta: float | None,
    radius: float | None,
) -> EscapeParameters:
    """The numbers that G, M and ρ imply; ``push`` is r₁ and ``chains`` K."""
    eta = 1.0 / smoothness if eta is None else eta
    gamma = math.sqrt(rho * alpha)
    radius = 0.5 * math.sqrt(alpha / rho) if radius is None else radius
    late = -math.log1p(-0.5 * min(1.0, rho * radius / gamma))
    growth = math.log1p(gamma * radius / (_PUSH * push)) + late
    steps = math.ceil(growth / math.log1p(eta * gamma))
    attempts = 1 + math.ceil(math.log(2.0 * chains / failure) / math.log(4.0))
    return EscapeParameters(chi, eta, gamma, radius, steps, attempts)


def practical(
    chi: float, push: float, *, eta: float, curvature: float | None, radius: float | None = None
) -> EscapeParameters:
    """The numbers for leaving curvature −γ by steps of η.

    >>> practical(0.01, 2e-4, eta=0.5, curvature=None).escape_steps
    58
    """
    gamma = 0.1 / eta if curvature is None else curvature
    steps = 1
    for _ in range(100):  # 𝒯 enters its own right-hand side through a logarithm of its root
        far = 2.0 * eta * chi * math.sqrt(steps) if radius is None else radius
        steps, before = math.ceil(math.log1p(gamma * far / (_PUSH * push)) / math.log1p(eta * gamma)), steps
        if steps == before:
            break
    return EscapeParameters(chi, eta, gamma, far, steps, ATTEMPTS)


def check_tolerance(
    n: int, alpha: float, rho: float, smoothness: float, objective: Objective, curvature: float | None = None
) -> float:
    """Return √(ρα). Raise unless it is below the curvature that matters, for else a saddle point would pass.

    That curvature is ``curvature`` if given, or the most negative that the risk can have, or β, which bounds it. A
    convex risk has no saddle, so every α is fine.
    """
    gamma, loss_curvature = math.sqrt(rho * alpha), objective.negative_curvature()
    if curvature is not None:
        limit, what = curvature, f"curvature={curvature:.3g}"
    elif loss_curvature == 0.0:
        return gamma
    elif loss_curvature is not None and loss_curvature < smoothness:
        limit, what = loss_curvature, f"the curvature {loss_curvature:.3g} of its saddles"
    else:
        limit, what = smoothness, f"β={smoothness:.3g}"
    if gamma >= limit:
        raise SettingError(
            f"{{n}}: too small. α={alpha:.3g} means √(ρα)={gamma:.3g}, not below {what}, so a stop would say "
            "nothing: a saddle would pass. Use more records, a larger ε, larger batches or a smaller clip; or "
            "mode='practical', which leaves saddles but proves nothing.",
            n=n,
        )
    return gamma


class SmallGradient(NamedTuple):
    """Size χ of a small estimate, and the bound α on the gradient that it implies.

    With probability 1 − ω/2, all estimates of a run with ‖ĝ‖ ≤ 3χ have ‖∇F‖ ≤ α.

    >>> threshold = SmallGradient.of(EstimateError(sampling=0.1, noise=0.0), dim=5, failure=0.1)
    >>> threshold.chi, round(threshold.alpha, 3)
    (0.1, 0.596)
    """

    chi: float
    alpha: float

    @classmethod
    def of(cls, error: EstimateError, dim: int, failure: float, chains: int | None = None) -> SmallGradient:
        """χ = ψ, which estimates fall below near a critical point, and α = 3ψ + B; see the module's text."""
        chi = error.size(dim)
        return cls(chi, 3.0 * chi + error.bound(dim, failure / 2.0, chains))


def typical_error(error: EstimateError, dim: int, steps: int, failure: float) -> float:
    """χ of practical runs, r(√d + √(2 ln(4T/ω))) + σ: a size of ‖ĝ − ∇F‖, and no bound on it.

    >>> typical_error(EstimateError(sampling=0.1, noise=0.0), dim=5, steps=10, failure=0.1)
    0.1
    """
    tail = math.sqrt(dim) + math.sqrt(2.0 * math.log(4.0 * steps / failure))
    return error.noise * tail + error.sampling


@dataclass(frozen=True)
class PerturbedSGD(Algorithm):
    """SGD that leaves saddle points and states when it has arrived.

    x ← x − η·ĝ with escape attempts where ‖ĝ‖ ≤ 3χ; see the module's text.

    What is left ``None`` is derived when the run starts, all of it public; the formulas are in the
    module's text. ``result.details`` has them, with ``tolerance``, the
    curvature that a stop rules out (√(ρα), or γ of a practical run), and ``claim``: what the stop rests on.

    Args:
        oracle: where ĝ comes from: ``AdaptiveSpider`` or ``MiniBatch``. A practical run takes C = 1 and
            M = 1/η where the oracle names none.
        steps: cap on oracle calls.
        learning_rate: η. chi: χ. radius: 𝒮. escape_steps: 𝒯. attempts: Q.
        failure: ω.
        hessian_lipschitz: ρ of the whole risk, regulariser included (default: the objective's).
        curvature: in a practical run γ, the least curvature to leave; without it a run tries 0.1/η first and
            then for half of it, again and again, as long as records last. Else the curvature that √(ρα) must stay
            below (default: the most negative that the risk can have, or β).
        independent: begin every attempt after the first with a full query.
        returns: ``"certified"``, the point no attempt could leave, or ``"last"``, where the last attempt ended.
        mode: ``"derived"`` (from G, M and ρ), ``"practical"`` (η, C and γ are chosen; with ``curvature`` it ends
            with ``stopped_by="no-escape"`` where another would say ``"sosp"``), or ``"theory"``, made by
            :meth:`theory`.

    >>> import quietgrad as qg
    >>> hill = qg.objectives.landscape("strict-saddle", d=5)
    >>> run = qg.minimize(hill, 10**6, PerturbedSGD(), budget=qg.Budget(4.0, 1e-6), seed=0)
    >>> run.stopped_by, run.escapes >= 1, qg.certify(hill, run.params, alpha=run.details["alpha"]).kind
    ('sosp', True, 'sosp')
    """

    oracle: Oracle = field(default_factory=AdaptiveSpider)
    steps: Count = 1000
    learning_rate: Positive | None = None
    chi: Positive | None = None
    radius: Positive | None = None
    escape_steps: Count | None = None
    attempts: Count | None = None
    failure: PositiveFraction = 0.05
    hessian_lipschitz: Positive | None = None
    curvature: Positive | None = None
    independent: bool = True
    returns: Literal["certified", "last"] = "certified"
    mode: Literal["derived", "practical", "theory"] = "derived"

    name: ClassVar[str] = "perturbed-sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "theory" and None in (self.learning_rate, self.chi, self.radius, self.escape_steps):
            raise ValueError(
                "mode='theory': build it with PerturbedSGD.theory(constants, ...), which needs G, M and ρ."
            )
        if self.mode == "practical":
            rate, oracle = self.learning_rate or STEP, self.oracle
            object.__setattr__(self, "learning_rate", rate)
            if isinstance(oracle, AdaptiveSpider | Spider):
                oracle = replace(oracle, clip=oracle.clip or CLIP, smoothness=oracle.smoothness or 1.0 / rate)
                object.__setattr__(self, "oracle", oracle)

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        risk_bound: float,
        failure: float = 0.05,
        scale: float = 1.0,
        constant: float = 1.0,
        parties: int = 1,
    ) -> PerturbedSGD:
        """Equations (4), (5) and Theorem 2.

        :func:`~quietgrad.methods.second_order_theorem.solve` says what s and C are.
        """
        solution = solve(
            constants, n=n, dim=dim, budget=budget, risk_bound=risk_bound, failure=failure, scale=scale,
            constant=constant, parties=parties,
        )  # fmt: skip
        oracle = AdaptiveSpider(
            batch_size=solution.batch_size,
            difference_batch_size=solution.difference_batch_size,
            clip=constants.lipschitz,
            smoothness=constants.record_smoothness,
            kappa=solution.kappa,
        )
        return cls(
            oracle=oracle,
            steps=solution.steps,
            learning_rate=solution.learning_rate,
            chi=solution.chi,
            radius=solution.radius,
            escape_steps=solution.escape_steps,
            attempts=solution.attempts,
            failure=failure,
            hessian_lipschitz=constants.hessian_lipschitz,
            mode="theory",
        )

    # --- what a run is ------------------------------------------------------------------------------------------

    def schedule(self, n_public: int) -> Schedule:
        """The oracle's slots: in parallel on fresh records, else one after another on the same people."""
        return Schedule.of(self.oracle.slots(n_public, self.steps), adaptive=True)

    def check_run(self, objective: Objective, plan: Plan, x0: Vector) -> None:
        """Refuse a start outside the domain, or settings that mean nothing, before anything is paid for."""
        objective.check_domain(x0)
        self._settle(plan_preview(objective, plan), len(x0))

    def bound_symbols(self) -> Mapping[str, tuple[str, str]]:
        """Return the oracle's."""
        return self.oracle.bound_symbols()

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """Return the oracle's queries."""
        return self.oracle.asks(x0, session)

    def init(self, x0: Vector) -> State:
        """Start at ``x0``."""
        return State(params=copy(x0), extra={"escapes": 0, "attempt": 0, "samples_used": 0, "start": copy(x0)})

    def step(self, state: State, session: Session) -> State:
        """One call of the oracle and, but for the call that finds a small gradient, one update."""
        extra = state.extra
        if state.step == 0:
            extra.update(self._settle(session, len(state.params)))
        try:
            state.estimate = self.oracle.estimate(state.estimate, state.params, session)
        except ExhaustedError:
            return _stop(state, "samples" if session.plan.schedule.composition == "parallel" else "steps")
        state.step += 1
        extra["samples_used"] = round(
            sum(used * session.expected_batch(slot) for slot, used in session.used.items())
        )
        gradient = state.estimate.value + session.regularizer.gradient(state.params)
        if extra["attempt"]:
            self._attempt(state, gradient)
        elif norm(gradient) <= 3.0 * extra["chi"]:
            extra["saved"] = {"params": state.params, "estimate": state.estimate}
            extra.update(attempt=1, tried=0)
        else:
            state.params = state.params - extra["eta"] * gradient
        extra["trace"] = {
            "gradient_norm": norm(gradient),
            "drift": state.estimate.drift,
            "escapes": extra["escapes"],
            "attempt": extra["attempt"],
            "moved": norm(state.params - extra["start"]),
        }
        return _stop(state, "steps") if state.step >= self.steps and not state.done else state

    # --- the parts of a step ------------------------------------------------------------------------------------

    def _attempt(self, state: State, gradient: Vector) -> None:
        """Lines 9–18 of Algorithm 1: one step of an escape attempt."""
        extra, saved = state.extra, state.extra["saved"]
        state.params = state.params - extra["eta"] * gradient
        extra["tried"] += 1
        if norm(state.params - saved["params"]) >= extra["radius"]:
            extra["escapes"] += 1
            extra["attempt"] = 0
            extra.update(extra.get("first", {}))
        elif extra["tried"] >= extra["escape_steps"]:
            done = extra["attempt"] >= extra["attempts"]
            if done and "first" in extra:
                # A practical run spends its records anyway: its last drift goes on, for half the curvature.
                sought = extra["tolerance"] = extra["sought"]
                escape = practical(
                    extra["chi"], extra["push"], eta=extra["eta"], curvature=0.5 * sought, radius=self.radius
                )
                extra.update(sought=escape.tolerance, radius=escape.radius, escape_steps=escape.escape_steps)
                return
            if not done or self.returns == "certified":
                state.params = saved["params"]
            if done:
                _stop(state, "no-escape" if self.mode == "practical" else "sosp")
                return
            extra.update(attempt=extra["attempt"] + 1, tried=0)
            state.estimate = Estimate(calls=state.estimate.calls) if self.independent else saved["estimate"]

    def _settle(self, session: Session, dim: int) -> dict[str, Any]:
        """The public numbers of the run: given, or from the oracle's error and what the loss states."""
        error = self.oracle.error(session)
        # A path of estimates is a chain from its full query on; attempts that share one are each a path of its own.
        chains = self.steps if error is None or not self.independent else error.chains
        small = self._small(error, dim, chains)
        more: dict[str, Any] = {"alpha": small.alpha}
        if self.mode == "practical":
            assert self.learning_rate is not None
            push = _push(error, small.chi, dim, whole=True)
            escape = practical(
                small.chi, push, eta=self.learning_rate, curvature=self.curvature, radius=self.radius
            )
            if self.curvature is None and self.escape_steps is None:
                first = {"radius": escape.radius, "escape_steps": escape.escape_steps,
                         "sought": escape.tolerance, "tolerance": escape.tolerance}  # fmt: skip
                more |= {"push": push, "first": first, **first}
        else:
            smoothness = total_smoothness(self.oracle, session)
            rho = constant_of("hessian_lipschitz", "hessian_lipschitz", self.hessian_lipschitz, session)
            check_tolerance(session.plan.n_public, small.alpha, rho, smoothness, session.objective, self.curvature)
            escape = derived(
                *small, _push(error, small.chi, dim), smoothness=smoothness, rho=rho, failure=self.failure,
                chains=chains, eta=self.learning_rate, radius=self.radius,
            )  # fmt: skip
            more["rho"] = rho
        if self.escape_steps is not None:
            escape = escape._replace(escape_steps=self.escape_steps)
        if self.attempts is not None:
            escape = escape._replace(attempts=self.attempts)
        risk = None if error is None else error.risk
        return {**escape._asdict(), **more, "risk": risk, "claim": self._claim(session, risk)}

    def _small(self, error: EstimateError | None, dim: int, chains: int) -> SmallGradient:
        """The threshold for ‖ĝ‖ and what passing it says: as given, as a size, or as proved."""
        if self.chi is not None:
            return SmallGradient(self.chi, 4.0 * self.chi)
        if error is None:
            raise ValueError(f"chi=None: {type(self.oracle).__name__} states no error to derive it from; give chi.")
        if self.mode == "practical":
            chi = typical_error(error, dim, self.steps, self.failure)
            return SmallGradient(chi, 4.0 * chi)
        return SmallGradient.of(error, dim, self.failure, chains)

    def _claim(self, session: Session, risk: Risk | None) -> str:
        """Whether a stop rests on constants that the loss states, or on what was seen alone."""
        if self.mode == "theory":
            return "stated constants, with s and C taken as given"
        by_hand = (self.chi, self.radius, self.escape_steps, self.attempts, self.learning_rate)
        if self.mode == "practical" or any(value is not None for value in by_hand):
            return "observed"
        if risk is None or self.returns == "last" or not self.independent:
            return "observed"  # no bound for such samples; another point than was tested; attempts share one error
        return "stated constants" if states(session, self.oracle, self.hessian_lipschitz) else "observed"


def states(session: Session, oracle: Oracle, rho: float | None) -> bool:
    """Whether the loss states G, M and ρ, and none that is used instead is smaller."""
    try:
        stated = session.objective.constants()
    except (AttributeError, ValueError):  # rows without a bound state nothing
        return False
    taken = [(stated.hessian_lipschitz, rho), (stated.record_smoothness, oracle.smoothness)]
    if isinstance(oracle, AdaptiveSpider | MiniBatch):
        taken.append((stated.lipschitz, oracle.clip))
    weaker = any(given is not None and (least is None or given < least) for least, given in taken)
    bent = isinstance(oracle, AdaptiveSpider) and oracle.difference_clip is not None
    bent |= isinstance(oracle, MiniBatch) and oracle.clipping not in ("flat", FLAT)
    return not weaker and not bent


def _push(error: EstimateError | None, chi: float, dim: int, *, whole: bool = False) -> float:
    """The standard deviation of one coordinate that can be relied on to leave a saddle.

    It is the noise of a full query (of a ``whole`` chain in practical runs), if there is noise.
    """
    if error is None:
        return chi / math.sqrt(dim)
    return (error.noise if whole else error.first_noise) or error.sampling / math.sqrt(dim)


def _stop(state: State, reason: str) -> State:
    state.stopped_by, state.done = reason, True
    return state
