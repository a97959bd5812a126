"""Generalised linear models: logistic, multinomial logistic, Huber, squared and smoothed-hinge losses.

Each class states its loss, its derivative in the score, and the constants G, L, ρ that hold on all of ℝᵈ for rows
no longer than R (Objectives of the DP-SRM §6.1 and of the output-perturbation experiments; the latter's printed
logistic loss lacks a minus sign: it is log(1+exp(−y⟨w,x⟩))).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.objectives.tables.linear import LinearObjective
from quietgrad.objectives.tables.table import Floats

_CUBIC = 1.0 / (6.0 * math.sqrt(3.0))  # the largest third central moment of a variable of range 1


def _binary(y: npt.NDArray[Any]) -> Floats:
    if not ((y == 0) | (y == 1)).all():
        raise DataError("y: labels must be 0 and 1. Encode the two classes first.")
    return np.ascontiguousarray(y, dtype=np.float64)


def _sigmoid(scores: Floats) -> Floats:
    return 0.5 * (1.0 + np.tanh(0.5 * scores))  # no overflow at either end


def _required_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ValueError(f"{name}={value!r}: must be a finite number > 0.")


@dataclass(frozen=True, kw_only=True)
class Logistic(LinearObjective):
    """f = log(1 + exp(−(2y−1)·score)), y ∈ {0, 1}. G = R, L = R²/4, ρ = R³/(6√3).

    >>> objective = Logistic(row_bound=1.0)
    >>> records = objective.prepare(([[1.0, 0.0], [0.0, 1.0]], [1, 0]))
    >>> objective.risk_gradient(records, objective.initial(records))
    array([-0.25,  0.25])
    >>> objective.constants().smoothness
    0.25
    """

    _code: ClassVar[int] = 1

    def _targets(self, y: npt.NDArray[Any]) -> Floats:
        return _binary(y)

    def _residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(_sigmoid(scores) - y[:, None])

    def _losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.logaddexp(0.0, (1.0 - 2.0 * y) * scores[:, 0])

    def _moduli(self) -> tuple[float, float, float]:
        return 1.0, 0.25, _CUBIC

    def probabilities(self, data: Any, params: Floats) -> Floats:
        """P(y = 1) of each record."""
        return _sigmoid(self.decision(data, params))

    def predict(self, data: Any, params: Floats) -> npt.NDArray[np.int64]:
        """0 or 1."""
        return (self.decision(data, params) > 0.0).astype(np.int64)


@dataclass(frozen=True)
class Multinomial(LinearObjective):
    """f = log Σₖ exp(scoreₖ) − score_y, y ∈ {0, …, K−1}. G = √2·R, L = R²/2, ρ = √2·R³/(3√3).

    The gradient is (p − e_y) ⊗ x̃. ‖p − e_y‖ < √2; the softmax covariance has no eigenvalue above 1/2; its third
    cumulant in a unit direction is a third central moment of a variable of range at most √2.

    >>> objective = Multinomial(classes=3)
    >>> records = objective.prepare(([[1.0], [2.0]], [0, 2]))
    >>> records.dim, round(objective.risk(records, objective.initial(records)), 6)
    (3, 1.098612)
    """

    classes: int

    def __post_init__(self) -> None:
        LinearObjective.__post_init__(self)
        if self.classes < 2:
            raise ValueError(f"classes={self.classes!r}: must be >= 2, a public number.")

    @property
    def outputs(self) -> int:
        """K."""
        return self.classes

    def _targets(self, y: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if not ((y >= 0) & (y < self.classes) & (y == np.floor(y))).all():
            raise DataError(
                f"y: labels must be the whole numbers 0 to {self.classes - 1}. Encode the classes first."
            )
        return np.ascontiguousarray(y, dtype=np.int64)

    def _residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        probabilities = _softmax(scores)
        probabilities[np.arange(len(y)), y] -= 1.0
        return probabilities

    def _losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        top = scores.max(axis=1)
        losses: Floats = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + (top - scores[np.arange(len(y)), y])
        return losses

    def _moduli(self) -> tuple[float, float, float]:
        return math.sqrt(2.0), 0.5, math.sqrt(2.0) ** 3 * _CUBIC

    def probabilities(self, data: Any, params: Floats) -> Floats:
        """P(y = k) of each record and class."""
        return _softmax(self.decision(data, params))

    def predict(self, data: Any, params: Floats) -> npt.NDArray[np.int64]:
        """The likeliest class code."""
        return np.asarray(self.decision(data, params).argmax(axis=1), dtype=np.int64)


def _softmax(scores: Floats) -> Floats:
    powers: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


@dataclass(frozen=True)
class Huber(LinearObjective):
    """f = e²/2 for e = score − y within ±h, else h·abs(e) − h²/2. G = hR, L = R², no ρ (the curvature jumps).

    >>> Huber(0.5, row_bound=2.0).constants().lipschitz
    1.0
    """

    threshold: float = 1.0
    _code: ClassVar[int] = 2

    def __post_init__(self) -> None:
        LinearObjective.__post_init__(self)
        _required_positive("threshold", self.threshold)

    @property
    def _knob(self) -> float:
        return float(self.threshold)

    def _targets(self, y: npt.NDArray[Any]) -> Floats:
        return np.ascontiguousarray(y, dtype=np.float64)

    def _residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(np.clip(scores - y[:, None], -self.threshold, self.threshold))

    def _losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        error = np.abs(scores[:, 0] - y)
        inner = np.minimum(error, self.threshold)
        losses: Floats = inner * (error - 0.5 * inner)
        return losses

    def _moduli(self) -> tuple[float, float, None]:
        return self.threshold, 1.0, None


@dataclass(frozen=True, kw_only=True)
class Squared(LinearObjective):
    """f = (score − y)²/2. L = R², ρ = 0; no G, because residuals are unbounded: it needs clipping.

    >>> Squared(row_bound=2.0).constants().lipschitz is None
    True
    """

    _code: ClassVar[int] = 3

    def _targets(self, y: npt.NDArray[Any]) -> Floats:
        return np.ascontiguousarray(y, dtype=np.float64)

    def _residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(scores - y[:, None])

    def _losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        losses: Floats = 0.5 * (scores[:, 0] - y) ** 2
        return losses

    def _moduli(self) -> tuple[None, float, float]:
        return None, 1.0, 0.0


@dataclass(frozen=True)
class Hinge(LinearObjective):
    """The hinge (1 − (2y−1)·score)₊ with its corner rounded over a width h. G = R, L = R²/h, no ρ.

    With g = 1 − (2y−1)·score: 0 if g ≤ 0, g²/(2h) if g ≤ h, else g − h/2.

    >>> Hinge(0.5, row_bound=1.0).constants().smoothness
    2.0
    """

    smoothing: float = 1.0
    _code: ClassVar[int] = 4

    def __post_init__(self) -> None:
        LinearObjective.__post_init__(self)
        _required_positive("smoothing", self.smoothing)

    @property
    def _knob(self) -> float:
        return float(self.smoothing)

    def _targets(self, y: npt.NDArray[Any]) -> Floats:
        return _binary(y)

    def _residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        sign = 2.0 * y[:, None] - 1.0
        return np.asarray(-sign * np.clip((1.0 - sign * scores) / self.smoothing, 0.0, 1.0))

    def _losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        gap = np.maximum(1.0 - (2.0 * y - 1.0) * scores[:, 0], 0.0)
        inner = np.minimum(gap, self.smoothing)
        losses: Floats = inner * (gap - 0.5 * inner) / self.smoothing
        return losses

    def _moduli(self) -> tuple[float, float, None]:
        return 1.0, 1.0 / self.smoothing, None

    def predict(self, data: Any, params: Floats) -> npt.NDArray[np.int64]:
        """0 or 1."""
        return (self.decision(data, params) > 0.0).astype(np.int64)
