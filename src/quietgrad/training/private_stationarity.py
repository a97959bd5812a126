"""A certificate on people's records: gradient norm and least eigenvalue with noise, paid for like any release."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from quietgrad.algorithms.base import Algorithm, State
from quietgrad.curators.base import Session
from quietgrad.objectives.queries.second_order import GradientNorm, LeastEigenvalue
from quietgrad.oracles.base import constant_of
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Budget
from quietgrad.sampling import FullBatch
from quietgrad.training import minimize
from quietgrad.training.result import Privacy
from quietgrad.training.stationarity import Certificate, classify, known_curvature, known_rho
from quietgrad.vectors import Vector


@dataclass(frozen=True)
class PrivateCertificate(Certificate):
    """A certificate whose two numbers are noisy releases; ``*_error`` are the noise's standard deviations."""

    gradient_error: float
    curvature_error: float
    privacy: Privacy


@dataclass(frozen=True)
class TwoScalars(Algorithm):
    """The plan of :func:`certify_privately`: a gradient norm and a least eigenvalue of the same records."""

    name: ClassVar[str] = "private-certificate"
    private: ClassVar[bool] = True

    needs_means: ClassVar[bool] = True  # a Hessian of a sum of records has no bound

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("norm", FullBatch()), Slot("curvature", FullBatch())))

    def init(self, x0: Vector) -> State:
        return State(params=x0)

    def step(self, state: State, door: Session) -> State:
        clip, smoothness = (constant_of(name, name, None, door) for name in ("lipschitz", "record_smoothness"))
        n = float(door.plan.n_public)
        slope = float(door.release("norm", GradientNorm(state.params, clip, n))[0]) / n
        curve = float(door.release("curvature", LeastEigenvalue(state.params, smoothness, n))[0]) / n
        scale = door.plan.noise_multiplier / n
        state.extra = {
            "gradient_norm": slope,
            "lambda_min": curve,
            "gradient_error": scale * clip,
            "curvature_error": scale * smoothness,
        }
        state.step, state.done = 1, True
        return state

    def output(self, state: State) -> Vector:
        return state.params

    def config(self) -> dict[str, Any]:
        return {}


def certify_privately(
    objective: Any,
    params: Vector,
    data: Any,
    *,
    budget: Budget,
    alpha: float = 0.01,
    rho: float | None = None,
    **options: Any,
) -> PrivateCertificate:
    """A certificate on people's records: ‖∇F‖ and λ_min with Gaussian noise of G/n and M/n times the multiplier.

    The records must be held out from training, or the budgets add up: give ``ledger`` and ``account`` and they do.
    The objective must state G and M (``constants()``); every record is shortened to them.

    Args:
        options: passed to :func:`quietgrad.minimize`: ledger, account, cap, n_public, seed.

    >>> import quietgrad as qg
    >>> hill = qg.objectives.landscape("strict-saddle", d=5)
    >>> found = certify_privately(hill, hill.saddle(), 10**5, budget=Budget(1.0, 1e-6), alpha=0.03, seed=0)
    >>> found.kind, found.curvature_error < 1e-3
    ('saddle', True)
    """
    result = minimize(objective, data, TwoScalars(), budget=budget, start=params, **options)
    rho = known_rho(objective) if rho is None else rho
    curvature = known_curvature(objective)
    slope, curve = (float(result.details[key]) for key in ("gradient_norm", "lambda_min"))
    return PrivateCertificate(
        slope,
        curve,
        classify(slope, curve, alpha, rho, curvature),
        alpha,
        rho,
        curvature,
        float(result.details["gradient_error"]),
        float(result.details["curvature_error"]),
        result.privacy,
    )
