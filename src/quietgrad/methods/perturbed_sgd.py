"""Perturbed SGD (paper 003, Algorithm 1): descent that leaves saddles and says when it has arrived.

When ‖ĝ‖ ≤ 3χ the point may be a saddle. Up to Q times 𝒯 steps are tried from it; the privacy noise in ĝ is the
perturbation. Moving a distance 𝒮 away is an escape, and descent goes on from there. If no attempt moves that far,
the point is with probability 1 − ω second-order stationary at α = 4χ: ‖∇F‖ ≤ α and ∇²F ≽ −√(ρα). That is argued
from constants which every record must obey. Such constants are mostly far too large for α to mean anything; then
``mode="practical"`` still leaves saddles, and its stop is an observation.

Two readings of the printed algorithm. It returns the last iterate of the last attempt; its analysis is about the
point x̃ the attempts began at, and that is returned unless ``returns="last"``. (The last iterate usually has the
smaller gradient, but its curvature is only known to be above −√(ρα) − ρ𝒮.) Attempts restore x̃ with the oracle's
state (ĝ, x_prev, drift), for otherwise SPIDER would take a difference across a jump; since ĝ is restored too,
printed attempts of SPIDER share its error, and an unlucky one fails them all, which Lemma 2 excludes by assuming
independence. So every attempt after the first begins with a full query here, unless ``independent=False``.

*Derived* numbers follow from what the loss states of every record (G, M, ρ) and from the noise. With σ the sampling
error in norm, r the noise of a coordinate and γ = √(ρα),

    χ = r(√d + √(2 ln(4·steps/ω))) + σ,   α = 4χ,   η = 1/M,   𝒮 = ½√(α/ρ),
    𝒯 = [ln(1 + γ𝒮/(0.32r)) + ln(4/3)] / ln(1 + ηγ),   Q = ⌈2.5 ln(1/ω)⌉.

𝒯 is how long a saddle of curvature −γ takes to carry noise of 0.32r (exceeded with probability 3/4) to distance 𝒮
while the slope falls behind as fast as ρ allows: x′ = γx − ½ρx² reaches 𝒮 = ½γ/ρ later than x′ = γx does by
ln(4/3)/γ. Sampling errors help, but nothing is known of their direction, so they do not count. What a stop then
says, λ_min ≥ −√(ρα), is worth something only if √(ρα) is small against curvature that occurs: see
:func:`check_tolerance`.

*Practical* numbers follow from a step η and a clip C that are chosen, as for DP-SGD, and from γ, the curvature to
be left. Differences are clipped to ‖x − x′‖/η. A point at rest under errors of size χ in every step
is carried about ηχ√𝒯 far in 𝒯 steps; 𝒮 is twice that, and 𝒯 is as long as curvature −γ needs for it:

    𝒮 = 2ηχ√𝒯,   𝒯 = ln(1 + γ𝒮/(0.32r)) / ln(1 + ηγ),   Q = 2.

A stop then says that two drifts did not get away. That is an observation: clipped gradients may lead elsewhere than
the risk's own, and no constant of the loss is known to hold. If γ is not given it is 0.1/η at first. A flatter
saddle is left too slowly for 𝒯, and stopping early saves no privacy; so the last drift goes on, and γ is halved (𝒯
about doubled) whenever it has not got away, until records or steps run out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import calibrate_event
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import ExhaustedError
from quietgrad.core.plans.schedule import Plan, Schedule
from quietgrad.core.session.base import Session
from quietgrad.core.session.queries import Asked, LossConstants, Objective
from quietgrad.core.settings import Count, Positive, PositiveFraction, Within
from quietgrad.core.vectors import Vector, copy, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.oracles.base import (
    Estimate,
    EstimateError,
    Oracle,
    constant_of,
    plan_preview,
    total_smoothness,
)
from quietgrad.methods.oracles.gradient_estimators import AdaptiveSpider, MiniBatch

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
    push: float,
    *,
    smoothness: float,
    rho: float,
    failure: float,
    eta: float | None,
    radius: float | None,
) -> EscapeParameters:
    """The numbers that G, M and ρ imply; ``push`` is r."""
    alpha = 4.0 * chi
    eta = 1.0 / smoothness if eta is None else eta
    gamma = math.sqrt(rho * alpha)
    radius = 0.5 * math.sqrt(alpha / rho) if radius is None else radius
    late = -math.log1p(-0.5 * min(1.0, rho * radius / gamma))
    growth = math.log1p(gamma * radius / (_PUSH * push)) + late
    steps = math.ceil(growth / math.log1p(eta * gamma))
    return EscapeParameters(chi, eta, gamma, radius, steps, math.ceil(2.5 * math.log(1.0 / failure)))


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
    """√(ρα); raise unless it is below the curvature that matters, for else the point of a saddle would pass.

    That curvature is ``curvature`` if given, or the most negative that the risk can have, or β, which bounds it. A
    convex risk has no saddle, so every α is fine.
    """
    gamma, known = math.sqrt(rho * alpha), objective.negative_curvature()
    if curvature is not None:
        limit, what = curvature, f"curvature={curvature:.3g}"
    elif known == 0.0:
        return gamma
    elif known is not None and known < smoothness:
        limit, what = known, f"the curvature {known:.3g} of its saddles"
    else:
        limit, what = smoothness, f"β={smoothness:.3g}"
    if gamma >= limit:
        raise ValueError(
            f"n={n}: too small. α={alpha:.3g} means √(ρα)={gamma:.3g}, not below {what}, so a stop would say "
            "nothing: a saddle would pass. Use more records, a larger ε, larger batches or a smaller clip; or "
            "mode='practical', which leaves saddles but proves nothing."
        )
    return gamma


def estimate_error(error: EstimateError, dim: int, steps: int, failure: float) -> float:
    """χ = r(√d + √(2 ln(4T/ω))) + σ: what ‖ĝ − ∇F‖ stays below, the noise in all T steps with probability 1 − ω/2.

    >>> estimate_error(EstimateError(sampling=0.1, noise=0.0), dim=5, steps=10, failure=0.1)
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
            rate, own = self.learning_rate or STEP, self.oracle
            object.__setattr__(self, "learning_rate", rate)
            if isinstance(own, AdaptiveSpider):
                own = replace(own, clip=own.clip or CLIP, smoothness=own.smoothness or 1.0 / rate)
                object.__setattr__(self, "oracle", own)

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
    ) -> PerturbedSGD:
        """Equations (4), (5) and Theorem 2; see :func:`solve` for s and C."""
        found = solve(
            constants, n=n, dim=dim, budget=budget, risk_bound=risk_bound, failure=failure, scale=scale,
            constant=constant,
        )  # fmt: skip
        oracle = AdaptiveSpider(
            batch_size=found.batch_size,
            difference_batch_size=found.difference_batch_size,
            clip=constants.lipschitz,
            smoothness=constants.record_smoothness,
            kappa=found.kappa,
        )
        return cls(
            oracle=oracle,
            steps=found.steps,
            learning_rate=found.learning_rate,
            chi=found.chi,
            radius=found.radius,
            escape_steps=found.escape_steps,
            attempts=found.attempts,
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

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        """What the oracle asks."""
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
                found = practical(
                    extra["chi"], extra["push"], eta=extra["eta"], curvature=0.5 * sought, radius=self.radius
                )
                extra.update(sought=found.tolerance, radius=found.radius, escape_steps=found.escape_steps)
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
        chi, push = self._error(session, dim)
        more: dict[str, Any] = {"alpha": 4.0 * chi}
        if self.mode == "practical":
            assert self.learning_rate is not None
            found = practical(chi, push, eta=self.learning_rate, curvature=self.curvature, radius=self.radius)
            if self.curvature is None and self.escape_steps is None:
                first = {"radius": found.radius, "escape_steps": found.escape_steps,
                         "sought": found.tolerance, "tolerance": found.tolerance}  # fmt: skip
                more |= {"push": push, "first": first, **first}
        else:
            smoothness = total_smoothness(self.oracle, session)
            rho = constant_of("hessian_lipschitz", "hessian_lipschitz", self.hessian_lipschitz, session)
            check_tolerance(session.plan.n_public, 4.0 * chi, rho, smoothness, session.objective, self.curvature)
            found = derived(
                chi, push, smoothness=smoothness, rho=rho, failure=self.failure, eta=self.learning_rate,
                radius=self.radius,
            )  # fmt: skip
            more["rho"] = rho
        if self.escape_steps is not None:
            found = found._replace(escape_steps=self.escape_steps)
        if self.attempts is not None:
            found = found._replace(attempts=self.attempts)
        return {**found._asdict(), **more, "claim": self._claim(session)}

    def _claim(self, session: Session) -> str:
        """Whether a stop rests on constants that the loss states, or on what was seen alone."""
        if self.mode == "theory":
            return "stated constants, with s and C taken as given"
        by_hand = (self.chi, self.radius, self.escape_steps, self.attempts, self.learning_rate)
        if self.mode == "practical" or any(value is not None for value in by_hand):
            return "observed"
        try:
            stated = session.objective.constants()
        except (AttributeError, ValueError):  # rows without a bound state nothing
            return "observed"
        oracle = self.oracle
        taken = [(stated.hessian_lipschitz, self.hessian_lipschitz), (stated.record_smoothness, oracle.smoothness)]
        if isinstance(oracle, AdaptiveSpider | MiniBatch):
            taken.append((stated.lipschitz, oracle.clip))
        weaker = any(given is not None and (least is None or given < least) for least, given in taken)
        bent = isinstance(oracle, AdaptiveSpider) and oracle.difference_clip is not None
        return "observed" if weaker or bent else "stated constants"

    def _error(self, session: Session, dim: int) -> tuple[float, float]:
        """χ, and the standard deviation of one coordinate that can be relied on to leave a saddle: r if any."""
        error = self.oracle.error(session)
        if error is None:
            if self.chi is None:
                raise ValueError(
                    f"chi=None: {type(self.oracle).__name__} states no error to derive it from; give chi."
                )
            return self.chi, self.chi / math.sqrt(dim)
        chi = estimate_error(error, dim, self.steps, self.failure) if self.chi is None else self.chi
        return chi, error.noise or error.sampling / math.sqrt(dim)


def _stop(state: State, reason: str) -> State:
    state.stopped_by, state.done = reason, True
    return state


class TheoremParameters(NamedTuple):
    """Everything equations (4), (5) and Theorem 2 set; ``steps`` is the bound T of (72).

    ``excess`` is the logarithm of 16√C·s·μ²ψ ÷ α: at most 0 where α is consistent.
    """

    mu: float
    alpha: float
    chi: float
    learning_rate: float
    escape_steps: int
    radius: float
    kappa: float
    batch_size: int
    difference_batch_size: int
    attempts: int
    steps: int
    excess: float


def solve(
    constants: LossConstants,
    *,
    n: int,
    dim: int,
    budget: Budget,
    risk_bound: float,
    failure: float = 0.05,
    scale: float = 1.0,
    constant: float = 1.0,
) -> TheoremParameters:
    """Theorem 2 of paper 003: the settings that its equations (4) and (5) ask for.

    All quantities follow from α and a logarithmic factor μ: χ = α/4, ι = sμ, η = √(ρα)/(Mι)², 𝒯 = ι/(sη√(ρα)),
    𝒮 = √(α/ρ)/ι^1.5, b₁ = nκ/(2Uη), b₂ = nηχ²/(2U). These give σ and r (Lemma 7), ψ = √(σ² + r²d), and back
    χ = 4√C·s·μ²·ψ; (5) gives μ from η, ψ and r. The least α that satisfies χ ≥ 4√C·s·μ²·ψ is taken.

    The paper leaves two absolute constants open, "sufficiently large" s and C. Here both default to 1, the least
    they could be; then the settings are consistent with (4) and (5), but Theorem 1 is not claimed for them. Lemma
    7's O(·) has constant 1 too, except for the noise, whose standard deviation is exact: it is the calibrated one.
    At d = 10 and G = M = ρ = U = ε = 1 they need n > 10¹¹ before √(ρα) falls below M.

    The batches of Theorem 2 fit the data up to a constant only: T·b₂ = (5/8)s²μ⁴ log(·)·n exceeds n. A run that
    follows these settings therefore often stops with its samples used up.

    Args:
        constants: G, M and ρ of the loss.
        risk_bound: U ≥ max F − min F.
        failure: ω.
        scale: s. constant: C.

    >>> hill = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
    >>> found = solve(hill, n=10**14, dim=10, budget=Budget(1.0, 1e-6), risk_bound=1.0)
    >>> found.alpha == 4 * found.chi, found.learning_rate <= 1.0
    (True, True)
    """
    g, m, rho = constants.needed("lipschitz", "smoothness", "hessian_lipschitz")
    s, c, u = scale, constant, risk_bound
    for name, number in (("risk_bound", u), ("scale", s), ("constant", c)):
        Within(0.0, 1e300, closed=False).check(name, number)
    Within(0.0, 1.0 - 1e-9, closed=False).check("failure", failure)
    noise = calibrate_event(events.Gaussian, budget=budget)
    many, few = g**1.5 * math.sqrt(u * rho / n) / m**2.5, (n * budget.epsilon) ** 0.8 * m ** (34 / 15)
    kappa = max(many, g ** (14 / 15) * dim**0.4 * u**0.8 * rho ** (8 / 15) / few)
    drift, log_d, quarter = m * math.sqrt(kappa), max(1.0, math.log(dim)), math.sqrt(math.sqrt(c))

    def found(alpha: float) -> TheoremParameters:
        """All numbers at this α, with the fixed point μ of (5), which enters its right-hand side by logarithms."""
        chi, gamma, mu = alpha / 4.0, math.sqrt(rho * alpha), 1.0
        for _ in range(200):
            iota = s * mu
            eta = gamma / (m * iota) ** 2
            b1, b2 = n * kappa / (2.0 * u * eta), n * eta * chi**2 / (2.0 * u)
            r = noise * math.hypot(g / b1, drift / b2)  # ψ and r are Lemma 7's
            sigma = log_d * math.hypot(g / math.sqrt(b1), drift / math.sqrt(b2))
            psi = math.hypot(sigma, r * math.sqrt(dim))
            # the logarithm of (71), of which Q is 2.5 times, and T of (72)
            saddles = math.log(max(math.e, 16.0 * iota**3 * u / (s * failure) * math.sqrt(rho / chi**3)))
            steps = 5.0 * u * s**2 * mu**4 / (4.0 * chi**2 * eta) * saddles
            inner = math.log(max(math.e, 4.0 * quarter / (s * eta * r) * math.sqrt(psi / rho)))
            first = math.log(9.0 * dim * inner / (quarter * eta * math.sqrt(s * rho * psi))) / s
            second = math.log(160.0 * math.sqrt(2.0 * psi / rho) * quarter / (s * math.sqrt(eta * r)))
            log_t = max(0.0, math.log(4.0 * steps / failure))
            third = math.sqrt(math.sqrt(c * log_t)) / math.sqrt(math.sqrt(8.0) * s)
            mu, before = max(first, second, third, 1.0), mu
            if abs(mu - before) <= 1e-12 * before:
                break
        else:
            raise ValueError("equation (5) has no fixed point at these constants; check G, M, ρ, U.")
        return TheoremParameters(
            mu=mu,
            alpha=alpha,
            chi=chi,
            learning_rate=eta,
            escape_steps=math.ceil(iota / (s * eta * gamma)),
            radius=math.sqrt(alpha / rho) / iota**1.5,
            kappa=kappa,
            batch_size=max(1, round(b1)),
            difference_batch_size=min(n, max(1, round(b2))),
            attempts=math.ceil(2.5 * saddles),
            steps=math.ceil(steps),
            excess=math.log(16.0 * math.sqrt(c) * s * mu**2 * psi / alpha),
        )

    low, high = math.log(1e-12), math.log(1e12)  # where α is looked for: on a grid, then by halving
    grid = [low + (high - low) * k / 240.0 for k in range(241)]
    top = next((k for k, x in enumerate(grid) if found(math.exp(x)).excess <= 0.0), None)
    if not top:
        raise ValueError("no α between 1e-12 and 1e12 satisfies equations (4) and (5); check G, M, ρ, U.")
    low, high = grid[top - 1], grid[top]
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if found(math.exp(middle)).excess <= 0.0 else (middle, high)
    settings = found(math.exp(high))
    if (gamma := math.sqrt(rho * settings.alpha)) > m:
        raise ValueError(
            f"n={n}: too small for the paper's settings, which give α={settings.alpha:.3g} and √(ρα)={gamma:.3g} "
            f"> M={m:.3g}, so that every point of small gradient would pass. Use more records, or practical "
            "settings."
        )
    if settings.batch_size > n:
        raise ValueError(f"n={n}: too small for one full query of b₁={settings.batch_size} records.")
    return settings
