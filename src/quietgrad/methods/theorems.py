"""Bounds by the papers' theorems as numbers, with the noise that a run adds and with explicit constants.

A theorem's O(·) hides constants; the inequality that its proof ends with does not, and that is what is evaluated
here, with the step, the clip and the noise of the plan. Where a printed proof is loose or wrong the line that
replaces it is in the docstring. Everything is computed from public numbers, before any data is touched. A theorem
whose constants are not known, or whose assumptions no run enforces, gives a rate, and no limit is printed for it.

>>> from quietgrad.core.accounting.budget import Budget
>>> from quietgrad.core.plans.schedule import plan
>>> from quietgrad.methods.rrpsgd import RRPSGD
>>> from quietgrad.objectives import Logistic
>>> stated, budget = Logistic(row_bound=1.0, rows="clip").constants(), Budget(1.0, 1e-5, "replace-one")
>>> known = {"dim": 5, "initial_gap": 0.7}
>>> made = RRPSGD.theory(stated, n=1000, budget=budget, batch_size=50, sampling="fixed-size", **known)
>>> for found in bounds(made, stated, plan(made, n=1000, budget=budget), **known):
...     print(found)
004 theorem 5: ‖∇F‖² is at most 0.0132 in expectation
004 theorem 6: the mean over the random round of ‖∇F‖² is at most 0.453 with probability 0.95
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.objectives import LossConstants
from quietgrad.methods.dp_spider import DPSpider
from quietgrad.methods.dp_srm import DPSRM
from quietgrad.methods.output_perturbation import OutputPerturbation, WeightedAverage
from quietgrad.methods.rrpsgd import RRPSGD
from quietgrad.methods.stagewise import StagewiseDPSGD
from quietgrad.tables.queries.local_fit import stability


class Always(NamedTuple):
    """A number that a quantity exceeds in no run whatsoever, and the reason; a bound above it says nothing."""

    value: float
    because: str


@dataclass(frozen=True)
class Bound:
    """A theorem's bound on one quantity: a limit in expectation or with a probability, or only a rate.

    Args:
        theorem: paper and theorem.
        what: the quantity.
        value: its limit; of a rate, the order of its size.
        kind: how the limit is meant.
        probability: with which the limit holds, if ``kind`` is ``"probability"``.
        always: what the quantity stays below in any case, if that is proved too.

    >>> print(Bound("001 theorem 3.4", "the excess risk", 0.02, "rate"))
    001 theorem 3.4: the excess risk is of the order of 0.02: a rate, whose constant is not known
    """

    theorem: str
    what: str
    value: float
    kind: Literal["expectation", "probability", "rate"]
    probability: float | None = None
    always: Always | None = None

    def __post_init__(self) -> None:
        if (self.kind == "probability") != (self.probability is not None):
            raise ValueError(f"probability={self.probability!r}: goes with a limit of kind 'probability' alone.")
        if self.kind == "rate" and self.always is not None:
            raise ValueError("always: a rate is no limit, so nothing can be above or below it.")

    def __str__(self) -> str:
        if self.kind == "rate":
            order = f"{self.what} is of the order of {self.value:.3g}"
            return f"{self.theorem}: {order}: a rate, whose constant is not known"
        meant = "in expectation" if self.probability is None else f"with probability {self.probability:g}"
        limit = f"{self.theorem}: {self.what} is at most {self.value:.3g} {meant}"
        if self.always is None or self.value < self.always.value:
            return limit
        return (
            f"{limit}, which says nothing: it is never above {self.always.value:g}, because {self.always.because}"
        )


@dataclass(frozen=True)
class Known:
    """Public facts about a run: its plan, the constants of its loss, and the caller's bounds."""

    constants: LossConstants
    plan: Plan
    dim: int
    initial_gap: float | None
    distance: float | None
    growth: float | None
    failure: float
    sharpness: tuple[float, float] | None = None

    @property
    def convexity(self) -> float:
        """μ: of the Polyak–Łojasiewicz inequality if it was given, else that of strong convexity."""
        return self.constants.strong_convexity if self.growth is None else self.growth

    def noise(self, clip: float, name: str | None = None) -> float:
        """The standard deviation of a coordinate of the mean gradient (or of the model, whose mean is itself)."""
        slot = self.plan.schedule.slots[-1] if name is None else self.plan.schedule[name]
        scale = slot.multiplier(self.plan.noise_multiplier) * slot.mechanism.factor
        return scale * clip / slot.sampling.expected_batch(self.plan.n_public)


def bounds(
    algorithm: HasSchedule,
    constants: LossConstants,
    plan: Plan,
    *,
    dim: int,
    initial_gap: float | None = None,
    distance: float | None = None,
    growth: float | None = None,
    failure: float = 0.05,
    sharpness: tuple[float, float] | None = None,
) -> tuple[Bound, ...]:
    """Return the bounds of all theorems on this run. There are none for a method or a risk without a theorem.

    Args:
        initial_gap: F(θ⁰) − min F at most. distance: ‖θ⁰ − θ̂‖ and ‖θ*‖ at most. Both are public guesses.
        growth: μ of the Polyak–Łojasiewicz inequality, if the risk obeys it without being strongly convex.
        failure: γ of statements with probability 1 − γ.
        sharpness: (γ, κ) of the Kurdyka–Łojasiewicz inequality F − min F ≤ γ^κ‖∇F‖^κ, 1 ≤ κ ≤ 2, if it holds.
    """
    if not 0.0 < failure < 1.0:
        raise ValueError(f"failure={failure!r}: must be in (0, 1).")
    if sharpness is not None and not (sharpness[0] > 0.0 and 1.0 <= sharpness[1] <= 2.0):
        raise ValueError(f"sharpness={sharpness!r}: must be (γ, κ) with γ > 0 and κ in [1, 2].")
    known = Known(constants, plan, dim, initial_gap, distance, growth, failure, sharpness)
    said = next((say for kind, say in _THEOREMS.items() if isinstance(algorithm, kind)), None)
    return () if said is None or constants.lipschitz is None or constants.smoothness is None else tuple(
        said(algorithm, known)
    )  # fmt: skip


def _rounds(algorithm: RRPSGD, known: Known) -> Iterator[Bound]:
    """Paper 004, theorems 5 and 6.

    F(w_{t+1}) ≤ F(w_t) − (η−βη²/2)‖∇F‖² + …, summed over w₁ … w_T, which is what R chooses from (so that T+1 steps
    count, from w₀). In expectation the rest is βη²σ²/2 a step. With probability, the four sums of the proof: two
    martingales, one of them bounded by (η−βη²)·2L² (Azuma), one Gaussian given the past with deviation at most
    (η+βη²)L·s, which needs no factor d; s²χ²; and 4L² a step. Batches must be of fixed size (δ_t is bounded by 2L
    then) and ∇F by L, so there must be no regulariser.
    """
    constants, gap = known.constants, known.initial_gap
    lipschitz, beta = constants.needed("lipschitz", "smoothness")
    rates = {algorithm.rate()(k, algorithm.steps) for k in (0, algorithm.steps - 1)}
    if gap is None or len(rates) != 1 or not (eta := rates.pop()) < 2.0 / beta or algorithm.clip < lipschitz:
        return
    steps, s = algorithm.steps, known.noise(algorithm.clip)
    gain, every = steps * (eta - beta * eta * eta / 2.0), (steps + 1) * beta * eta * eta / 2.0
    sampling = 4.0 * lipschitz**2 / algorithm.batch_size
    mean = (gap + every * (sampling + known.dim * s * s)) / gain
    plain = constants.smoothness == constants.record_smoothness  # no regulariser, whose slope L does not bound
    short = Always(lipschitz**2, "no record's gradient is longer than L") if plain else None
    yield Bound("004 theorem 5", "‖∇F‖²", mean, "expectation", always=short)
    if algorithm.sampling == "fixed-size" and plain and eta <= 1.0 / beta:
        tail = math.log(3.0 / known.failure)
        root, many = math.sqrt(2.0 * (steps + 1) * tail), known.dim * (steps + 1)
        wander = 2.0 * (eta - beta * eta * eta) * lipschitz**2 * root
        wander += s * (eta + beta * eta * eta) * lipschitz * root
        squares = beta * eta * eta / 2.0 * s * s * (many + 2.0 * math.sqrt(many * tail) + 2.0 * tail)
        high = (gap + wander + squares + every * 4.0 * lipschitz**2) / gain
        what = "the mean over the random round of ‖∇F‖²"
        yield Bound("004 theorem 6", what, high, "probability", 1.0 - known.failure, always=short)


def _average(algorithm: WeightedAverage, known: Known) -> Iterator[Bound]:
    """Paper 002, theorem 2 (strong convexity) and theorem 3 (Polyak–Łojasiewicz), inequality (11).

    E F(θ_T) − F* ≤ (1−μ/β)ᵀ·gap + (d·s²/2μ)(1 − (1−μ/β)ᵀ) for η = 1/β, s the noise of the mean gradient. The gap of
    the start is no limit: noise can end a run above its start.
    """
    lipschitz, beta = known.constants.needed("lipschitz", "smoothness")
    mu, gap = known.convexity, known.initial_gap
    fits = algorithm.method == "rounds" and algorithm.learning_rate == 1.0 / beta and algorithm.clip >= lipschitz
    if gap is None or not fits or not 0.0 < mu <= beta:
        return
    left = (1.0 - mu / beta) ** algorithm.steps
    value = left * gap + known.dim * known.noise(algorithm.clip) ** 2 / (2.0 * mu) * (1.0 - left)
    number = 2 if known.growth is None else 3
    yield Bound(f"002 theorem {number}", "F(θ_T) − min F", value, "expectation")


def _output(algorithm: OutputPerturbation, known: Known) -> Iterator[Bound]:
    """Paper 004, section 3.1, with the tail of the noise: ‖z‖ ≤ s(√d + √(2 ln(1/γ))).

    The printed theorems are about the mean, up to a constant. Their proof of the (ε, δ) case of theorem 2 ends with
    50L²(μ+β)²(d+1)d/(n²ε²μ²β), which is short of the noise's own 25L²(μ+β)²d·ln(2/δ)/(n²ε²μ²β) where
    2(d+1) < ln(2/δ). Here the noise is the plan's and the statement holds with probability. The noise has no
    largest length, so no limit holds in every run.

    Strongly convex: ‖w_T − ŵ‖ ≤ (1−ημ)ᵀD and F(w) − F(ŵ) ≤ (β/2)‖w − ŵ‖². Convex: D²/(2ηT) + L‖z‖ for η ≤ 1/β.
    New records, by inequality (18) of Shalev-Shwartz et al. (2009) with half of γ for each part:
    √(2L²/μ · error) + 4L²/(γμn), L that of the regularised loss where w can be. Without the regulariser it is
    (μ/2)D² more, which is the paper's route to convex risks.
    """
    lipschitz, beta = known.constants.needed("lipschitz", "smoothness")
    mu, far = known.constants.strong_convexity, known.distance
    if far is None or algorithm.mechanism != "gaussian" or algorithm.learning_rate is None:
        return
    eta, n = algorithm.learning_rate, known.plan.n_public
    s = known.noise(stability(known.constants, n, algorithm.steps, eta) / 2.0) * n
    sure = 1.0 - known.failure

    def length(failure: float) -> float:
        return s * (math.sqrt(known.dim) + math.sqrt(2.0 * math.log(1.0 / failure)))

    if not mu:
        if eta <= 1.0 / beta:
            value = far * far / (2.0 * eta * algorithm.steps) + lipschitz * length(known.failure)
            yield Bound("004 theorem 3", "F(w) − min F", value, "probability", sure)
        return

    def error(failure: float) -> float:
        return beta / 2.0 * ((1.0 - eta * mu) ** algorithm.steps * far + length(failure)) ** 2

    yield Bound("004 theorem 2", "F(w) − min F", error(known.failure), "probability", sure)
    half = known.failure / 2.0
    steep = lipschitz + mu * (2.0 * far + length(half))
    new = math.sqrt(2.0 * steep**2 / mu * error(half)) + 4.0 * steep**2 / (half * mu * n)
    what = "the risk on new records above the least"
    yield Bound("004 excess risk, regularised", what, new, "probability", sure)
    what = "the risk without the regulariser on new records above the least"
    yield Bound("004 excess risk, convex", what, new + mu / 2.0 * far**2, "probability", sure)


def _recursive(algorithm: DPSRM, known: Known) -> Iterator[Bound]:
    """Paper 000, theorem 4.4, by inequality (B.17), the last before constants are hidden; (B.20) follows from it.

    E‖∇F(θ̃)‖ is at most the mean of E‖v_t‖ and of E‖∇F − v_t‖. With E = Σ E‖∇F − v_t‖² ÷ T at most

        2(1−γ)²ζ²/(γb) + 2γG²/b + d(s² + s₀²/T)/γ + G²/(Tγb₀)                                              (B.14)

    they are 4L·gap/(Tζ) + E/ζ + 2ζ (B.7) and √E (Jensen). s and s₀ are the plan's noise, where the paper inserts
    (B.19), which no noise obeys at its own budgets. (B.10) prints ζ²/b² for ζ²/b; (B.11) has it right. (B.15) and
    (B.17) print γG²/(ζb) where (B.14) ÷ ζ has 2γG²/(ζb), which is what E/ζ is here.
    """
    lipschitz, smooth = known.constants.needed("lipschitz", "smoothness")
    gap, zeta, gamma = known.initial_gap, algorithm.zeta, algorithm.gamma
    clips = (algorithm.clip, algorithm.difference_clip or 0.0)
    enough = zeta is not None and clips[0] >= lipschitz and clips[1] >= zeta and algorithm.smoothness == smooth
    if gap is None or zeta is None or algorithm.mode != "theory" or algorithm.returns != "random" or not enough:
        return
    steps, batch, first = algorithm.steps, algorithm.batch_size, algorithm.first_batch_size or algorithm.batch_size
    s, s0 = known.noise((1.0 - gamma) * clips[1] + gamma * clips[0], "next"), known.noise(clips[0], "first")
    error = 2.0 * (1.0 - gamma) ** 2 * zeta**2 / (gamma * batch) + 2.0 * gamma * lipschitz**2 / batch
    error += known.dim * (s * s + s0 * s0 / steps) / gamma + lipschitz**2 / (steps * gamma * first)
    value = 4.0 * smooth * gap / (steps * zeta) + error / zeta + 2.0 * zeta + math.sqrt(error)
    plain = known.constants.smoothness == known.constants.record_smoothness
    short = Always(lipschitz, "no record's gradient is longer than G") if plain else None
    yield Bound("000 theorem 4.4", "‖∇F‖", value, "expectation", always=short)


def _spider(algorithm: DPSpider, known: Known) -> Iterator[Bound]:
    """Yield inequalities (4) and (5) of :mod:`quietgrad.methods.dp_spider`, for runs that ask all records."""
    lipschitz, record, beta = known.constants.needed("lipschitz", "record_smoothness", "smoothness")
    gap, steps = known.initial_gap, algorithm.steps
    rates = {algorithm.rate()(k, steps) for k in (0, steps - 1)}
    plain = algorithm.sampling == "full" and algorithm.kappa is None and not algorithm.warm_steps
    true = algorithm.clip >= lipschitz and algorithm.smoothness >= record and algorithm.difference_clip is None
    if gap is None or len(rates) != 1 or not (plain and true):
        return
    eta, period = rates.pop(), min(steps, algorithm.period or steps)
    full = known.dim * known.noise(algorithm.clip, "o1") ** 2
    difference = known.dim * known.noise(algorithm.smoothness, "o2") ** 2 if period > 1 else 0.0
    spread = difference * (period - 1) * eta * eta
    mean = 2.0 * gap / (eta * steps) + full
    if algorithm.returns == "random" and beta * eta + spread <= 1.0:
        yield Bound("DP-SPIDER, stationary points", "‖∇F‖²", mean, "expectation")
        if known.sharpness is not None:
            size, power = known.sharpness
            value = (size * math.sqrt(mean)) ** power
            yield Bound("DP-SPIDER, Kurdyka–Łojasiewicz", "F(θ) − min F", value, "expectation")
    mu = known.convexity
    if algorithm.returns == "last" and 0.0 < mu <= beta and beta * eta + spread / (1.0 - eta * mu) ** period <= 1.0:
        left = (1.0 - eta * mu) ** steps
        value = left * gap + full / (2.0 * mu) * (1.0 - left)
        yield Bound("DP-SPIDER, Polyak–Łojasiewicz", "F(θ_T) − min F", value, "expectation")


def _stages(algorithm: StagewiseDPSGD, known: Known) -> Iterator[Bound]:
    """Paper 001, theorems 3.2, 3.3 and 3.4 as printed, the last two for losses in [0, 1]; θ = 1. All are rates.

    All three have the settings of theorem 3.2 as hypotheses, and nothing is said of a run that breaks one: no clip
    below L, η⁰ ≤ min{(1−ϱ)²/(2β), 1} with ϱ = 0 where momentum is never on, η⁰(T⁰ − t + t/(2(1−ϱ))) > 1/(2μ), and
    random iterates.

    Theorem 3.2 is (5) with the plan's noise s in the place of π: ½ᴷ(gap + X·η⁰(L²/B + d·s²)/2), where X is its
    fraction ÷ (1 − 2Γ). With (4) for π and T ≤ 2Tᴷ that is the printed line but for a factor η⁰ that stands there
    once too often. Its proof is in a supplement that is not at hand, so it is called a rate.

    No loss of a run is kept in [0, 1], so theorem 3.3 limits none; theorem 3.4 is printed up to a constant.
    1/(c₄μ) is η⁰(T⁰ − t + t/(2(1−ϱ))). The exponent of e grows with the steps of momentum, and the last term,
    (Tᴷ+1)B/n, is above 1 after one pass over the data: for what people run the bound says nothing, and the one that
    privacy itself implies (:attr:`~quietgrad.core.plans.schedule.Plan.generalization`) does.
    """
    lipschitz, beta = known.constants.needed("lipschitz", "smoothness")
    mu, n = known.convexity, known.plan.n_public
    t, rho = algorithm.early_momentum, algorithm.momentum if algorithm.early_momentum else 0.0
    steep = algorithm.learning_rate > min((1.0 - rho) ** 2 / (2.0 * beta), 1.0)
    if (
        mu <= 0.0
        or known.plan.budget is None
        or algorithm.clip < lipschitz
        or steep
        or algorithm.returns != "random"
    ):
        return
    rest = algorithm.first_steps - t
    reach = algorithm.learning_rate * (rest + t / (2.0 * (1.0 - rho)))
    if rest < 0 or not (small := 1.0 / (4.0 * mu * reach)) < 0.5:
        return
    last, on = algorithm.length(algorithm.stages), t << algorithm.stages
    if known.initial_gap is not None:
        fraction = (rest + t / (1.0 - rho) ** 3) / (rest + t / (2.0 * (1.0 - rho))) / (1.0 - 2.0 * small)
        square = lipschitz**2 / algorithm.batch_size + known.dim * known.noise(algorithm.clip) ** 2
        excess = (known.initial_gap + fraction * algorithm.learning_rate * square / 2.0) / 2**algorithm.stages
        yield Bound("001 theorem 3.2", "F(ω) − min F", excess, "rate")
    grown = (1.0 - 1.0 / n) * beta * reach * math.log(last)
    value = 2.0 * lipschitz**2 / ((n - 1) * beta) * _exp(grown) + (last + 1) * algorithm.batch_size / n
    if on and rho:
        late = math.log1p(1.0 / (2.0 * rho)) - 0.5 * math.log1p(1.0 / (rho * on))
        value += 2.0 * lipschitz**2 * reach / n * _exp(grown + 2.0 * rho * (on - 1)) * late
    yield Bound("001 theorem 3.3", "the mean risk on new records above that on these", value, "rate")
    budget = known.plan.budget
    signal = known.dim * (lipschitz / (n * budget.epsilon)) ** 2 * math.log(1.0 / budget.delta) / mu
    what = "the mean risk on new records above the least"
    yield Bound("001 theorem 3.4", what, max(signal, math.sqrt(1.0 / (mu * n))), "rate")


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700.0 else math.inf


_THEOREMS: dict[type, Callable[[Any, Known], Iterator[Bound]]] = {
    DPSRM: _recursive,
    DPSpider: _spider,
    RRPSGD: _rounds,
    WeightedAverage: _average,
    OutputPerturbation: _output,
    StagewiseDPSGD: _stages,
}
