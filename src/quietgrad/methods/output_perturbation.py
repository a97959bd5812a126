"""Output perturbation (paper 004, Algorithm 1) and weighted averaging of parties' models (WD-DP, paper 002).

Output perturbation runs gradient descent without noise and adds noise once, to the model.

The stability of gradient descent bounds how far one record moves the model: Δ = (2L/(nμ))(1 − (1−ημ)^T) if the
regulariser is μ-strongly convex and η ≤ 2/(μ+β), and 2LTη/n if the risk is only convex and η ≤ 2/β. Both improve
on the printed lemmas and need no ball: L is the Lipschitz constant of the *unregularised* loss, which the row bound
enforces. Per-record clipping is refused: a clipped field need not be the gradient of anything convex.

*Weighted averaging.* The printed theorem is false: averaging weighted models also averages their noise away, so
the output carries ‖w‖₂²σ² and not σ², and the server sees models with n/n_j times less noise than claimed
(``reproduce/printed_average.py`` has both numbers). Three calibrations are right, all runs of this one algorithm
through different curators:

(i)   ``method="rounds"``: in every round the n_j/n-weighted mean gradient leaves with noise for all n records
      together; under a secure sum no party sees more. T rounds.
(ii)  ``method="one-shot"`` with ``trust="local"``: party j sends its model under its own noise, for n_j records.
(iv)  ``method="one-shot"`` with ``trust="secure"``: the weighted sum Σ(n_j/n)θ_j leaves under noise on the sum. One
      replaced record moves it by Δ = (n_j/n)·(2G/(n_jλ))(1−(1−ηλ)ᵀ) = (2G/(nλ))(1−(1−ηλ)ᵀ): independent of the
      number of parties and of the smallest one, which is what the paper advertised. One round. Recommended.

With ``weights="equal"`` the same code is the unweighted average (Jayaraman et al. 2018), whose Δ grows by
n/(m·n_min); on a central curator ``method="rounds"`` is DP-GD and ``"one-shot"`` is output perturbation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import SettingError
from quietgrad.core.noise.mechanisms import from_json
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import LossConstants, Objective
from quietgrad.core.session.queries import Asked, GradientQuery
from quietgrad.core.settings import Count, Positive, Within
from quietgrad.core.vectors import Vector
from quietgrad.methods.base import Algorithm, State, check_known
from quietgrad.tables.queries.local_fit import LocalFit, local_fit


@dataclass(frozen=True)
class OutputPerturbation(Algorithm):
    """Exact gradient descent with noise on the final model.

    θ_T of T exact gradient steps, plus noise on the model once; convex losses with bounded rows only.

    Args:
        steps: T.
        learning_rate: η; default 2/(μ+β) or 1/β, the largest the proof allows or the usual choice.
        mechanism: ``"gaussian"`` for (ε, δ), or ``"pure"`` for ε alone (‖noise‖ ~ Gamma(d, Δ/ε)).

    Only the relation ``replace-one`` is proved: the stability argument keeps n fixed.

    >>> OutputPerturbation(steps=50).schedule(1000).releases
    1
    """

    steps: Count = 100
    learning_rate: Positive | None = None
    mechanism: Literal["gaussian", "pure"] = "gaussian"

    name: ClassVar[str] = "output-perturbation"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        distance: float,
        mechanism: Literal["gaussian", "pure"] = "gaussian",
        scale: float = 1.0,
    ) -> OutputPerturbation:
        """Theorem 2's settings if the risk is strongly convex, else Theorem 3's; their Θ(·) is read as ``scale``.

        With S = (nεD/L)²/(d·ln(1/δ)), or /d² for pure ε: η = 1/(μ+β) and T = (μ²+β²)/(μβ)·ln(μ²S), or η = 1/β and
        T = (β²S)^⅓. The noise is the accountant's for the T that is run, so ``scale`` moves the error only.

        Args:
            constants: L (without the regulariser) and β of the loss, μ of the regulariser.
            distance: D ≥ ‖ŵ‖, a public guess.

        >>> from quietgrad.objectives import L2, Logistic
        >>> losses = [Logistic(regularizer=L2(mu), row_bound=1.0, rows="clip") for mu in (0.0, 0.1)]
        >>> known = {"n": 10_000, "dim": 20, "budget": Budget(1.0, 1e-3, Relation.REPLACE_ONE), "distance": 1.0}
        >>> [OutputPerturbation.theory(loss.constants(), **known).steps for loss in losses]
        [36, 34]
        """
        lipschitz, beta = constants.needed("lipschitz", "smoothness")
        check_known(n, dim, budget, distance=distance, scale=scale)
        mu = constants.strong_convexity
        size = float(dim * dim) if mechanism == "pure" else dim * math.log(1.0 / budget.delta)
        signal = (n * budget.epsilon * distance / lipschitz) ** 2 / size
        if mu:
            steps = (mu * mu + beta * beta) / (mu * beta) * math.log(max(math.e, mu * mu * signal))
            rate = 1.0 / (mu + beta)
        else:
            steps, rate = (beta * beta * signal) ** (1.0 / 3.0), 1.0 / beta
        return cls(steps=max(1, round(scale * steps)), learning_rate=rate, mechanism=mechanism)

    @staticmethod
    def regularization(
        constants: LossConstants, *, n: int, dim: int, budget: Budget, failure: float = 0.05
    ) -> float:
        """μ = √(2L/(nεγ))·(βd)^¼, the L2 penalty with which the paper takes a convex risk to new records (3.1).

        Fit ``L2(μ)`` by :meth:`theory`, and :func:`quietgrad.methods.theorems.bounds` says what is left of it.

        >>> from quietgrad.objectives import Logistic
        >>> convex = Logistic(row_bound=1.0, rows="clip").constants()
        >>> round(OutputPerturbation.regularization(convex, n=10**6, dim=20, budget=Budget(1.0, 1e-5)), 4)
        0.0095
        """
        lipschitz, beta = constants.needed("lipschitz", "smoothness")
        return math.sqrt(2.0 * lipschitz / (n * budget.epsilon * failure)) * math.sqrt(math.sqrt(beta * dim))

    def check_budget(self, budget: Budget) -> None:
        """Raise unless the budget is stated under the relation the proof is for."""
        if budget.relation is not Relation.REPLACE_ONE:
            raise SettingError(
                "{relation}: output perturbation is proved under 'replace-one' only; "
                "pass {relation='replace-one'}.",
                relation=str(budget.relation),
            )

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("model", FullBatch(), mechanism=from_json(self.mechanism)),))

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        yield "model", Asked(whole_fit(self, x0, session), pinned=("start",))

    def step(self, state: State, session: Session) -> State:
        state.params = session.release("model", whole_fit(self, state.params, session))
        state.step, state.done = 1, True
        return state


@dataclass(frozen=True)
class WeightedAverage(Algorithm):
    """A size-weighted average of the parties' models, with a proved ε.

    Σ (n_j/n)·θ_j over parties, after T local steps each, or the same average in every step.

    Args:
        steps: T.
        learning_rate: η; default 2/(μ+β) if the risk is strongly convex, else 1/β.
        method: ``"one-shot"`` (local fits, one noisy sum; convex losses with bounded rows, replace-one) or
            ``"rounds"`` (a noisy mean gradient per step).
        clip: C of one record's gradient, ``"rounds"`` only.

    >>> [WeightedAverage(steps=100, method=m).schedule(1000).releases for m in ("one-shot", "rounds")]
    [1, 100]
    """

    steps: Count = 1000
    learning_rate: Positive | None = None
    method: Literal["one-shot", "rounds"] = "one-shot"
    clip: Positive = 1.0

    name: ClassVar[str] = "weighted-average"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        method: Literal["one-shot", "rounds"] = "rounds",
        scale: float = 1.0,
        growth: float | None = None,
    ) -> WeightedAverage:
        """Theorem 2's settings: η = 1/β and T = (β/λ)·ln(n²ε²/(p·G²·ln(1/δ))), its Õ(·) read as ``scale``·β/λ.

        The theorem is about a gradient that is noisy in every step, hence ``"rounds"``. Its noise is not taken
        over: that is the accountant's, and its λ is the risk's strong convexity. With ``growth`` they are Theorem
        3's, about risks that need not be convex: λ is then μ of the Polyak–Łojasiewicz inequality
        ‖∇F‖² ≥ 2μ(F − min F), which nothing here can check. :mod:`quietgrad.methods.theorems` has both bounds.

        >>> from quietgrad.objectives import L2, Logistic
        >>> strong = Logistic(regularizer=L2(0.01), row_bound=1.0, rows="clip").constants()
        >>> made = WeightedAverage.theory(strong, n=10_000, dim=20, budget=Budget(1.0, 1e-3, Relation.REPLACE_ONE))
        >>> made.steps, round(made.learning_rate, 2)
        (351, 3.85)
        """
        lipschitz, beta = constants.needed("lipschitz", "smoothness")
        check_known(n, dim, budget, scale=scale)
        strength = constants.strong_convexity if growth is None else growth
        if not strength:
            raise ValueError(
                "Theorem 2 is about strongly convex risks; add a regulariser such as L2(0.01). Theorem 3 is about "
                "others: give growth, μ of the Polyak–Łojasiewicz inequality."
            )
        Within(0.0, beta, closed=False).check("growth", strength)
        if growth is not None and method == "one-shot":
            raise ValueError("growth: Theorem 3 is about noise in every step; use method='rounds'.")
        signal = (n * budget.epsilon / lipschitz) ** 2 / (dim * math.log(1.0 / budget.delta))
        steps = max(1, round(scale * beta / strength * math.log(max(math.e, signal))))
        return cls(steps=steps, learning_rate=1.0 / beta, method=method, clip=lipschitz)

    def check_budget(self, budget: Budget) -> None:
        """Raise unless the budget is stated under a relation that is proved."""
        if self.method == "one-shot" and budget.relation is not Relation.REPLACE_ONE:
            raise SettingError(
                "{relation}: a fit's stability is proved under 'replace-one' only; "
                "pass {relation='replace-one'}, or method='rounds'.",
                relation=str(budget.relation),
            )

    def schedule(self, n_public: int) -> Schedule:
        if self.method == "one-shot":
            return Schedule((Slot("model", FullBatch()),))
        return Schedule((Slot("gradient", FullBatch(), self.steps),))

    def asks(self, x0: Vector, session: Session) -> Iterator[tuple[str, Asked]]:
        if self.method == "one-shot":
            yield "model", Asked(whole_fit(self, x0, session), pinned=("start",))
        else:
            yield "gradient", Asked(GradientQuery(x0, self.clip))

    def step(self, state: State, session: Session) -> State:
        if self.method == "one-shot":
            state.params = session.release("model", whole_fit(self, state.params, session))
            state.step, state.done = 1, True
            return state
        gradient = session.release("gradient", GradientQuery(state.params, self.clip))
        gradient *= 1.0 / session.expected_batch("gradient")
        gradient += session.regularizer.gradient(state.params)
        state.estimate.value = gradient
        state.params = state.params - step_size(self.learning_rate, session.objective) * gradient
        state.step += 1
        state.done = state.step >= self.steps
        return state


def step_size(given: float | None, objective: Objective) -> float:
    """η: as given, or the largest that the stability of a smooth risk allows."""
    if given is not None:
        return given
    constants = objective.constants()
    mu, beta = constants.strong_convexity, constants.smoothness
    if beta is None:
        raise SettingError("{learning_rate=None}: this loss is not smooth, so no step follows from it; give one.")
    return 2.0 / (mu + beta) if mu else 1.0 / beta


def whole_fit(method: OutputPerturbation | WeightedAverage, start: Vector, session: Session) -> LocalFit:
    """The query for a model after all steps from ``start``, without noise in between."""
    rate = step_size(method.learning_rate, session.objective)
    return local_fit(session.objective, session.plan.n_public, method.steps, rate, start=start)
