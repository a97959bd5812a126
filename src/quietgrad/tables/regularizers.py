"""Regularisers: public terms of an objective. They see no record, so they are never clipped and never noised.

They are written with arithmetic only, so numpy and torch vectors both fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from quietgrad.core.vectors import OwnVector, dot


@dataclass(frozen=True)
class _Separable:
    """A penalty summed over the coordinates, except the last ``unpenalized`` ones (an intercept)."""

    strength: float
    unpenalized: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0.0):
            raise ValueError(
                f"strength={self.strength!r}: must be a finite number >= 0. For no penalty pass NoRegularizer()."
            )
        if self.unpenalized < 0:
            raise ValueError(
                f"unpenalized={self.unpenalized!r}: must be >= 0, the number of trailing free coordinates."
            )

    def _penalized(self, params: OwnVector) -> OwnVector:
        return params[: len(params) - self.unpenalized]

    def _free_tail(self, gradient: OwnVector) -> OwnVector:
        if self.unpenalized:
            gradient[len(gradient) - self.unpenalized :] = 0.0
        return gradient


@dataclass(frozen=True)
class L2(_Separable):
    """Squared L2 penalty.

    μ/2 ‖θ‖², strongly convex unless some coordinates are left free.

    Args:
        strength: μ ≥ 0.
        unpenalized: how many trailing coordinates are free: 1 for an intercept, K for K classes' intercepts.

    >>> import numpy as np
    >>> L2(0.5).value(np.array([2.0, 2.0])), L2(0.5, unpenalized=1).gradient(np.array([2.0, 2.0]))
    (2.0, array([1., 0.]))
    """

    @property
    def strong_convexity(self) -> float:
        """μ, or 0 if a coordinate is free."""
        return 0.0 if self.unpenalized else self.strength

    @property
    def smoothness(self) -> float:
        """μ."""
        return self.strength

    hessian_lipschitz: ClassVar[float] = 0.0
    weak_convexity: ClassVar[float] = 0.0

    def value(self, params: OwnVector) -> float:
        """Return μ/2 ‖θ‖²."""
        head = self._penalized(params)
        return 0.5 * self.strength * dot(head, head)

    def gradient(self, params: OwnVector) -> OwnVector:
        """Return μθ."""
        return self._free_tail(self.strength * params)

    def curvature(self, params: OwnVector) -> OwnVector:
        """Return μ in every penalised coordinate."""
        return self._free_tail(0.0 * params + self.strength)


_SQUARE = 1.0 - 2.0 / math.sqrt(5.0)
_STEEPEST = 24.0 * math.sqrt(_SQUARE) * (1.0 - _SQUARE) / (1.0 + _SQUARE) ** 4


@dataclass(frozen=True)
class Nonconvex(_Separable):
    """Bounded nonconvex penalty of the DP-SRM experiments.

    λ Σⱼ θⱼ²/(1+θⱼ²), the bounded penalty of the DP-SRM experiments; 2λ-smooth, not convex.

    Args:
        strength: λ ≥ 0.
        unpenalized: how many trailing coordinates are free.

    >>> import numpy as np
    >>> Nonconvex(0.5).value(np.array([1.0, 0.0])), Nonconvex(0.5).gradient(np.array([1.0, 0.0]))
    (0.25, array([0.25, 0.  ]))
    """

    strong_convexity: ClassVar[float] = 0.0

    @property
    def smoothness(self) -> float:
        """2λ, the curvature at 0; abs(r″(θ)) = 2λ·abs(1−3θ²)/(1+θ²)³ is nowhere larger."""
        return 2.0 * self.strength

    @property
    def hessian_lipschitz(self) -> float:
        """4.669λ: abs(r‴(θ)) = 24λ·abs(θ(1−θ²))/(1+θ²)⁴ is largest where θ² = 1 − 2/√5."""
        return _STEEPEST * self.strength

    @property
    def weak_convexity(self) -> float:
        """λ/2: r″ is least, −λ/2, at θ = ±1."""
        return 0.5 * self.strength

    def value(self, params: OwnVector) -> float:
        """Return λ Σ θ²/(1+θ²)."""
        squares = self._penalized(params) ** 2
        return self.strength * float((squares / (1.0 + squares)).sum())

    def gradient(self, params: OwnVector) -> OwnVector:
        """Return 2λθ/(1+θ²)²."""
        return self._free_tail(2.0 * self.strength * params / (1.0 + params * params) ** 2)

    def curvature(self, params: OwnVector) -> OwnVector:
        """Return 2λ(1−3θ²)/(1+θ²)³."""
        squares = params * params
        return self._free_tail(2.0 * self.strength * (1.0 - 3.0 * squares) / (1.0 + squares) ** 3)
