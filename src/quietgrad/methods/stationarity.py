"""Stationarity certificates: gradient norm and least Hessian eigenvalue, by Lanczos on Hessian–vector products.

A certificate is an evaluation. On a landscape's population risk it touches no data; on data it is **not private**:
use public records, or :func:`certify_privately` on held-out ones, which releases both numbers with noise and
charges them to the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.base import Session
from quietgrad.core.session.statement import Privacy
from quietgrad.core.vectors import OwnVector, dot, norm
from quietgrad.methods.base import Algorithm, State
from quietgrad.methods.minimizing import minimize
from quietgrad.methods.oracles.base import constant_of
from quietgrad.tables.queries.second_order import GradientNorm, LeastEigenvalue

Floats = npt.NDArray[np.float64]
Kind = Literal["sosp", "fosp", "saddle", "none"]

_DENSE = 64  # up to here the whole Hessian is cheaper than Lanczos


@dataclass(frozen=True)
class Certificate:
    """A stationarity certificate: ‖∇F‖, λ_min(∇²F) and the kind of point at ``alpha``.

    ``sosp``: ‖∇F‖ ≤ α and λ_min ≥ −√(ρα). ``saddle``: small gradient, λ_min < −√(ρα). ``none``: the gradient
    exceeds α. ``fosp``: small gradient, and no verdict on curvature, because ρ is not known or because √(ρα) is not
    below ``curvature``, the most negative that the risk can have: then every saddle would pass.
    """

    gradient_norm: float
    lambda_min: float
    kind: Kind
    alpha: float
    rho: float | None
    curvature: float | None

    @property
    def tolerance(self) -> float | None:
        """√(ρα), the negative curvature that ``alpha`` lets pass; ``None`` without ρ."""
        return None if self.rho is None else math.sqrt(self.rho * self.alpha)

    def __str__(self) -> str:
        allows = "" if self.tolerance is None else f" (α lets −√(ρα)={-self.tolerance:.3g} pass"
        if allows and self.kind == "fosp":
            allows += f": no verdict on curvature, for a saddle has {-(self.curvature or 0.0):.3g}"
        numbers = f"‖∇F‖={self.gradient_norm:.3g}, λ_min={self.lambda_min:.3g}"
        return f"{self.kind} at α={self.alpha:.3g}: {numbers}{allows and allows + ')'}"


def classify(
    gradient_norm: float, lambda_min: float, alpha: float, rho: float | None, curvature: float | None = None
) -> Kind:
    """The kind of a point with these two numbers; ``curvature`` is the most negative that the risk can have.

    >>> classify(0.01, -0.5, alpha=0.04, rho=1.0), classify(0.01, -0.1, alpha=0.04, rho=1.0)
    ('saddle', 'sosp')
    >>> classify(0.01, -0.1, alpha=0.04, rho=1.0, curvature=0.1)  # α lets every saddle pass
    'fosp'
    """
    if not gradient_norm <= alpha:
        return "none"
    if rho is None:
        return "fosp"
    tolerance = math.sqrt(rho * alpha)
    if lambda_min < -tolerance:
        return "saddle"
    vacuous = curvature is not None and tolerance >= curvature
    return "fosp" if vacuous and lambda_min < -1e-9 * (curvature or math.inf) else "sosp"


def certify(
    objective: Any, params: OwnVector, data: object = None, *, alpha: float = 0.01, rho: float | None = None
) -> Certificate:
    """Evaluate ‖∇F‖ and λ_min(∇²F) at ``params`` and classify the point. Not private.

    Args:
        objective: a loss or a landscape.
        data: what the objective takes, or ``None`` for a landscape's population risk.
        alpha: the level α.
        rho: ρ of the whole risk; default the objective's constant, or no verdict on curvature if it has none.

    >>> from quietgrad.tables.landscapes import landscape
    >>> hill = landscape("strict-saddle", d=100)
    >>> certify(hill, hill.saddle()).kind, certify(hill, hill.minimum()).kind
    ('saddle', 'sosp')
    """
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha!r}: must be a finite number > 0.")
    product: Callable[[OwnVector], OwnVector]
    if data is None:
        if not isinstance(objective, HasPopulation):
            raise ValueError("data=None: only a landscape has a population risk; pass the data to evaluate on.")
        gradient = objective.population_gradient(params)
        product = partial(objective.population_hessian_product, params)
    else:
        records = objective.prepare(data)
        gradient = objective.risk_gradient(records, params)
        product = _product_on(objective, records, params)
    least, largest = extreme_eigenvalues(product, params)
    length = norm(gradient)
    rho, curvature = _known(objective, rho)
    if curvature is None:  # nothing is stated; that of this point is there for certain
        curvature = largest
    return Certificate(length, least, classify(length, least, alpha, rho, curvature), alpha, rho, curvature)


def extreme_eigenvalues(product: Callable[[OwnVector], OwnVector], like: OwnVector) -> tuple[float, float]:
    """λ_min of the symmetric operator v ↦ ``product(v)``, and the largest curvature in absolute value.

    Small operators are written out; larger ones go to Lanczos, and the eigenpair found is checked: the residual
    ‖Hv − λv‖ bounds the distance to an eigenvalue.
    """
    dim = len(like)

    def apply(v: Floats) -> Floats:
        if isinstance(like, np.ndarray):
            return np.asarray(product(v), np.float64)
        return np.asarray(product(like.new_tensor(v)).detach().cpu().numpy(), np.float64)

    if dim <= _DENSE:
        matrix = np.stack([apply(row) for row in np.eye(dim)])
        values = np.linalg.eigvalsh(0.5 * (matrix + matrix.T))
        return float(values[0]), float(np.abs(values).max())
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    operator = LinearOperator((dim, dim), matvec=lambda v: apply(v.ravel()), dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(dim)
    # λ_min of H is the end of largest magnitude of H − cI with c above the spectrum: ARPACK is quickest there.
    top = abs(float(eigsh(operator, k=1, which="LM", v0=start, tol=1e-3, return_eigenvectors=False)[0])) * 1.01
    shifted = LinearOperator((dim, dim), matvec=lambda v: operator.matvec(v) - top * v.ravel(), dtype=np.float64)
    try:
        values, vectors = eigsh(shifted, k=1, which="LM", v0=start, tol=1e-7, maxiter=50 * dim)
    except ArpackNoConvergence as error:
        raise ValueError(f"Lanczos did not converge in {50 * dim} steps: {error}") from None
    least, vector = float(values[0]) + top, vectors[:, 0]
    residual = float(np.linalg.norm(operator.matvec(vector) - least * vector))
    if residual > 1e-3 * max(top, 1e-12):
        raise ValueError(f"Lanczos stopped at a residual of {residual:.2g}; the Hessian products may be inexact.")
    return least, top


@runtime_checkable
class HasPopulation(Protocol):
    """An objective whose population risk is known, such as a landscape."""

    def population_gradient(self, params: Any) -> Any:
        """The gradient of the population risk."""
        ...

    def population_hessian_product(self, params: Any, vector: Any) -> Any:
        """The Hessian of the population risk times a vector."""
        ...


@runtime_checkable
class HasHessianProduct(Protocol):
    """An objective with its own exact Hessian products."""

    def hessian_product(self, records: Any, params: Any, vector: Any) -> Any:
        """∇²F(θ)·vector on these records."""
        ...


@runtime_checkable
class HasNegativeCurvature(Protocol):
    """An objective that bounds how negative its curvature can be."""

    def negative_curvature(self) -> float | None:
        """The bound, or ``None`` if none is known."""
        ...


def _product_on(objective: Any, records: Any, params: OwnVector) -> Callable[[OwnVector], OwnVector]:
    if isinstance(objective, HasHessianProduct):
        return partial(objective.hessian_product, records, params)
    from quietgrad.tables import full_batch

    if full_batch.covers(objective):
        return partial(full_batch.hessian_product, objective, records, params)

    def differences(vector: OwnVector) -> OwnVector:
        # Central differences of the gradient: error of order h² plus rounding/h, least near h = ε^(1/3).
        length = math.sqrt(dot(vector, vector)) or 1.0
        h = 6e-6 * (1.0 + norm(params)) / length
        ahead = objective.risk_gradient(records, params + h * vector)
        return (ahead - objective.risk_gradient(records, params - h * vector)) * (0.5 / h)

    return differences


def _known(objective: Any, rho: float | None) -> tuple[float | None, float | None]:
    """ρ, as given or the objective's, and the most negative curvature it can have; ``None`` where nothing is said.

    A loss may be known by its gradient alone.
    """
    stated = objective.negative_curvature() if isinstance(objective, HasNegativeCurvature) else None
    if rho is None:
        with suppress(AttributeError, ValueError):
            rho = objective.constants().hessian_lipschitz
    return rho, stated


@dataclass(frozen=True)
class PrivateCertificate(Certificate):
    """A certificate whose two numbers are noisy releases; ``*_error`` are the noise's standard deviations."""

    gradient_error: float
    curvature_error: float
    privacy: Privacy


@dataclass(frozen=True)
class StationarityRelease(Algorithm):
    """The plan of :func:`certify_privately`: a gradient norm and a least eigenvalue of the same records."""

    name: ClassVar[str] = "private-certificate"
    needs_means: ClassVar[bool] = True  # a Hessian of a sum of records has no bound

    def schedule(self, n_public: int) -> Schedule:
        return Schedule((Slot("norm", FullBatch()), Slot("curvature", FullBatch())))

    def step(self, state: State, session: Session) -> State:
        clip, smoothness = (constant_of(name, name, None, session) for name in ("lipschitz", "record_smoothness"))
        n = float(session.plan.n_public)
        slope = float(session.release("norm", GradientNorm(state.params, clip, n))[0]) / n
        curve = float(session.release("curvature", LeastEigenvalue(state.params, smoothness, n))[0]) / n
        scale = session.plan.noise_multiplier / n
        state.extra = {"gradient_norm": slope, "lambda_min": curve,
                       "gradient_error": scale * clip, "curvature_error": scale * smoothness}  # fmt: skip
        state.step, state.done = 1, True
        return state


def certify_privately(
    objective: Any,
    params: OwnVector,
    data: object,
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
    result = minimize(objective, data, StationarityRelease(), budget=budget, start=params, **options)
    rho, curvature = _known(objective, rho)
    names = ("gradient_norm", "lambda_min", "gradient_error", "curvature_error")
    slope, curve, slope_error, curve_error = (float(result.details[name]) for name in names)
    kind = classify(slope, curve, alpha, rho, curvature)
    return PrivateCertificate(slope, curve, kind, alpha, rho, curvature, slope_error, curve_error, result.privacy)
