"""Output perturbation (paper 004, Algorithm 1): gradient descent without noise, then one noise on the model.

The stability of gradient descent bounds how far one record moves the model: Δ = (2L/(nμ))(1 − (1−ημ)^T) if the
regulariser is μ-strongly convex and η ≤ 2/(μ+β), and 2LTη/n if the risk is only convex and η ≤ 2/β. Both improve
on the printed lemmas and need no ball: L is the Lipschitz constant of the *unregularised* loss, which the row bound
enforces. Per-record clipping is refused: a clipped field need not be the gradient of anything convex.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quietgrad.algorithms.base import Algorithm, State, check_count, check_range, config_of
from quietgrad.curators.base import Session
from quietgrad.objectives.base import Constants
from quietgrad.objectives.queries.asked import Asked
from quietgrad.objectives.queries.local_fit import LocalFit, local_fit
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.mechanisms import from_json
from quietgrad.sampling import FullBatch
from quietgrad.vectors import Vector, copy


@dataclass(frozen=True)
class OutputPerturbation(Algorithm):
    """θ_T of T exact gradient steps, plus noise on the model once; convex losses with bounded rows only.

    Args:
        steps: T.
        learning_rate: η; default 2/(μ+β) or 1/β, the largest the proof allows or the usual choice.
        mechanism: ``"gaussian"`` for (ε, δ), or ``"pure"`` for ε alone (‖noise‖ ~ Gamma(d, Δ/ε)).

    Only the relation ``replace-one`` is proved: the stability argument keeps n fixed.

    >>> OutputPerturbation(steps=50).schedule(1000).releases
    1
    """

    steps: int = 100
    learning_rate: float | None = None
    mechanism: Literal["gaussian", "pure"] = "gaussian"

    name: ClassVar[str] = "output-perturbation"
    needs_means: ClassVar[bool] = True  # a fit or a Hessian of a sum of records has no bound

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        if self.learning_rate is not None:
            check_range("learning_rate", self.learning_rate, 0.0, math.inf, closed=False)
        if self.mechanism not in ("gaussian", "pure"):
            raise ValueError(f"mechanism={self.mechanism!r}: must be 'gaussian' or 'pure'.")

    @classmethod
    def theory(
        cls,
        constants: Constants,
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
        check_range("distance", distance, 0.0, math.inf, closed=False)
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
    def regularization(constants: Constants, *, n: int, dim: int, budget: Budget, failure: float = 0.05) -> float:
        """μ = √(2L/(nεγ))·(βd)^¼, the L2 penalty with which the paper takes a convex risk to new records (3.1).

        Fit ``L2(μ)`` by :meth:`theory`, and :func:`quietgrad.algorithms.theorems.bounds` says what is left of it.

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
            raise ValueError(
                f"relation={str(budget.relation)!r}: output perturbation is proved under 'replace-one' only; "
                "pass Budget(..., relation='replace-one')."
            )

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("model", FullBatch(), mechanism=from_json(self.mechanism)),))

    def asks(self, x0: Vector, door: Session) -> Iterator[tuple[str, Asked]]:
        yield "model", Asked(self._fit(x0, door), pinned=("start",))

    def init(self, x0: Vector) -> State:
        return State(params=copy(x0))

    def step(self, state: State, door: Session) -> State:
        state.params = door.release("model", self._fit(state.params, door))
        state.step = 1
        state.done = True
        return state

    def _fit(self, start: Vector, door: Session) -> LocalFit:
        step_size = self.learning_rate
        if step_size is None:
            constants = door.objective.constants()
            mu, beta = constants.strong_convexity, constants.smoothness
            step_size = 2.0 / (mu + beta) if mu else 1.0 / beta
        n = door.plan.n_public
        return local_fit(door.objective, n=n, steps=self.steps, step_size=step_size, start=start)

    def output(self, state: State) -> Vector:
        return state.params

    def config(self) -> dict[str, Any]:
        return config_of(self)
