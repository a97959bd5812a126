"""Generalised linear models: logistic, multinomial, Huber, squared, smoothed-hinge, Poisson and pinball losses.

A class is the whole declaration of its loss: the value, its first and second derivative in the score, what targets
it takes, and the constants G, L, ρ that hold on all of ℝᵈ for rows no longer than R. Kernels, full-batch sums,
Hessians and constants are all read from it. (Objectives of the DP-SRM §6.1 and of the output-perturbation
experiments; the latter's printed logistic loss lacks a minus sign: it is log(1+exp(−y⟨w,x⟩)).)

A record is cut to its clip after it is weighted by its class, so public weights of classes cost nothing.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import SettingError
from quietgrad.core.session.contributions import Numbers
from quietgrad.core.session.objectives import Indices
from quietgrad.tables.linear import LinearObjective, Task
from quietgrad.tables.table import Floats, Packed, Targets

_CUBIC = 1.0 / (6.0 * math.sqrt(3.0))  # the largest third central moment of a variable of range 1


class OneScoreLoss(LinearObjective):
    """A loss f(score, y) of one score, given by three formulas of numbers.

    ``value``, ``residual`` and ``curvature`` take arrays as well as numbers, so they are written with arithmetic,
    comparisons and numpy's functions, without ``if``. The residual is compiled besides (see
    :mod:`~quietgrad.tables.kernels`), so it calls nothing else of this file. ``h`` is the loss's one
    number, the field that :attr:`number` names.
    """

    compiled: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        """f, at least 0."""

    @staticmethod
    @abstractmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        """∂f/∂score."""

    @staticmethod
    @abstractmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        """∂²f/∂score², of the shape of ``score``; where it jumps, either side's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.number is not None and not (math.isfinite(self.h) and self.h > 0.0):
            raise ValueError(f"{self.number}={self.h!r}: must be a finite number > 0.")

    @cached_property
    def h(self) -> float:
        """The loss's one number, or 0."""
        return 0.0 if self.number is None else float(vars(self)[self.number])

    def losses(self, scores: Floats, y: Targets) -> Floats:
        return np.asarray(self.value(scores[:, 0], y, self.h))

    def residuals(self, scores: Floats, y: Targets) -> Floats:
        return np.asarray(self.residual(scores, y[:, None], self.h))

    def bends(self, scores: Floats, y: Targets, tilts: Floats) -> Floats:
        return np.asarray(self.curvature(scores, y[:, None], self.h) * tilts)

    def add_indexed(
        self, table: Packed, indices: Indices, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        add, formula = _compiled(self.residual)
        add(table, indices, formula, self.h, params, previous, rule, out)


@cache
def _compiled(residual: Callable[..., Floats]) -> tuple[Callable[..., None], int]:
    """The kernel and where this formula's code is; importing it imports numba, which only index batches pay for.

    An address holds in this process only, so no object keeps it.
    """
    from quietgrad.tables import kernels

    return kernels.add_scalar, kernels.address_of(residual)


@dataclass(frozen=True, kw_only=True)
class Logistic(OneScoreLoss):
    """Logistic loss for labels 0 and 1: log(1 + exp(−(2y−1)·score)). G = R, L = R²/4, ρ = R³/(6√3).

    >>> objective = Logistic(row_bound=1.0)
    >>> records = objective.prepare(([[1.0, 0.0], [0.0, 1.0]], [1, 0]))
    >>> objective.risk_gradient(records, objective.initial(records))
    array([-0.25,  0.25])
    >>> objective.constants().smoothness
    0.25
    """

    task: ClassVar[Task] = "binary"

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        return np.logaddexp(0.0, (1.0 - 2.0 * y) * score)

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        e = np.exp(-np.abs(score))  # at most 1: no overflow at either end
        sigmoid: Floats = np.maximum(e, (score >= 0.0) * 1.0) / (1.0 + e)
        return sigmoid - y

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        e: Floats = np.exp(-np.abs(score))
        return e / (1.0 + e) ** 2

    def moduli(self) -> tuple[float, float, float]:
        return 1.0, 0.25, _CUBIC

    def probabilities(self, data: object, params: Floats) -> Floats:
        return self.residual(self.decision(data, params), np.zeros(()), 0.0)


@dataclass(frozen=True)
class Huber(OneScoreLoss):
    """Huber loss for regression.

    f = e²/2 for e = score − y within ±h, else h·abs(e) − h²/2. G = hR, L = R², no ρ (the curvature jumps).

    >>> Huber(0.5, row_bound=2.0).constants().lipschitz
    1.0
    """

    threshold: float = 1.0
    number: ClassVar[str | None] = "threshold"
    task: ClassVar[Task] = "regression"

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        error = np.abs(score - y)
        inner = np.minimum(error, h)
        return np.asarray(inner * (error - 0.5 * inner))

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        return np.minimum(np.maximum(score - y, -h), h)

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        return np.asarray((np.abs(score - y) <= h) * 1.0)

    def moduli(self) -> tuple[float, float, None]:
        return self.threshold, 1.0, None


@dataclass(frozen=True, kw_only=True)
class Squared(OneScoreLoss):
    """Squared loss for regression: (score − y)²/2. L = R², ρ = 0; no G, as residuals are unbounded: clip it.

    >>> Squared(row_bound=2.0).constants().lipschitz is None
    True
    """

    task: ClassVar[Task] = "regression"

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        return np.asarray(0.5 * (score - y) ** 2)

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        return score - y

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        return np.ones_like(score)

    def moduli(self) -> tuple[None, float, float]:
        return None, 1.0, 0.0


@dataclass(frozen=True)
class Hinge(OneScoreLoss):
    """Hinge loss with a rounded corner, for labels 0 and 1.

    With g = 1 − (2y−1)·score: 0 if g ≤ 0, g²/(2h) if g ≤ h, else g − h/2. G = R, L = R²/h, no ρ.

    >>> Hinge(0.5, row_bound=1.0).constants().smoothness
    2.0
    """

    smoothing: float = 1.0
    number: ClassVar[str | None] = "smoothing"
    task: ClassVar[Task] = "binary"

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        gap = np.maximum(1.0 - (2.0 * y - 1.0) * score, 0.0)
        inner = np.minimum(gap, h)
        return np.asarray(inner * (gap - 0.5 * inner) / h)

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        sign = 2.0 * y - 1.0
        return -sign * np.minimum(np.maximum((1.0 - sign * score) / h, 0.0), 1.0)

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        gap = 1.0 - (2.0 * y - 1.0) * score
        return ((gap > 0.0) & (gap < h)) / h

    def moduli(self) -> tuple[float, float, None]:
        return 1.0, 1.0 / self.smoothing, None


@dataclass(frozen=True)
class PoissonDeviance(OneScoreLoss):
    """Half the Poisson deviance of a count y ∈ [0, h] with mean exp(score). L = hR², ρ = hR³, no G.

    Above log h, the largest mean, the exponential goes on as its parabola: means stay convex and grow no faster.

    >>> PoissonDeviance(20.0, row_bound=1.0).constants().smoothness
    20.0
    """

    largest: float = 100.0
    number: ClassVar[str | None] = "largest"
    task: ClassVar[Task] = "regression"
    pace: ClassVar[float | None] = 3.0
    log_link: ClassVar[bool] = True

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        y, beyond = np.minimum(np.maximum(y, 0.0), h), np.maximum(score - np.log(h), 0.0)
        mean = np.exp(np.minimum(score, np.log(h)))
        own = y * (np.log(np.maximum(y, 1e-300)) - 1.0)  # of the best score; 0·log 0 = 0
        return np.asarray(np.maximum(mean + h * beyond * (1.0 + 0.5 * beyond) - y * score + own, 0.0))

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        mean: Floats = np.exp(np.minimum(score, np.log(h))) + h * np.maximum(score - np.log(h), 0.0)
        return mean - np.minimum(np.maximum(y, 0.0), h)

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        return np.asarray(np.exp(np.minimum(score, np.log(h))))

    def moduli(self) -> tuple[None, float, float]:
        return None, self.largest, self.largest

    def _coded(self, y: Targets) -> npt.NDArray[Any]:
        # A count below 0 counts as 0. A refusal would tell that a record holds one.
        return np.asarray(np.maximum(super()._coded(y), 0.0))

    def predict(self, data: object, params: Floats) -> Floats:
        return self.residual(self.decision(data, params), np.zeros(()), self.largest)


@dataclass(frozen=True)
class Pinball(OneScoreLoss):
    """Pinball loss for a quantile: q(y − score)₊ + (1−q)(score − y)₊, its corner rounded over a width of 1/10.

    G = max(q, 1−q)·R, L = 10R². Rounding spreads y evenly over the width: the minimum is off by the width's square.

    >>> Pinball(0.9, row_bound=1.0).constants().lipschitz
    0.9
    """

    quantile: float = 0.5
    number: ClassVar[str | None] = "quantile"
    task: ClassVar[Task] = "regression"
    pace: ClassVar[float | None] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.quantile < 1.0:
            raise ValueError(f"quantile={self.quantile!r}: must be strictly between 0 and 1.")

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        above = np.maximum(10.0 * (score - y) + 0.5, 0.0)
        inner = np.minimum(above, 1.0)
        return np.asarray(0.1 * inner * (above - 0.5 * inner) - h * (score - y))

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        return np.minimum(np.maximum(10.0 * (score - y) + 0.5, 0.0), 1.0) - h

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        return np.asarray((np.abs(score - y) < 0.05) * 10.0)

    def moduli(self) -> tuple[float, float, None]:
        return max(self.quantile, 1.0 - self.quantile), 10.0, None


@dataclass(frozen=True)
class _ClassScores(LinearObjective):
    """A loss of one score per class, for classes 0 to K−1."""

    classes: int
    task: ClassVar[Task] = "multiclass"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise SettingError("{classes}: must be >= 2, a public number.", classes=self.classes)

    @property
    def outputs(self) -> int:
        return self.classes


@dataclass(frozen=True)
class Multinomial(_ClassScores):
    """Multinomial logistic loss for classes 0 to K−1: log Σₖ exp(scoreₖ) − score_y.

    G = √2·R, L = R²/2, ρ = √2·R³/(3√3): the gradient is (p − e_y) ⊗ x̃ with ‖p − e_y‖ < √2; the softmax covariance
    has no eigenvalue above 1/2; its third cumulant in a unit direction is a third central moment of a variable of
    range at most √2.

    >>> objective = Multinomial(classes=3)
    >>> records = objective.prepare(([[1.0], [2.0]], [0, 2]))
    >>> records.dim, round(objective.risk(records, objective.initial(records)), 6)
    (3, 1.098612)
    """

    def losses(self, scores: Floats, y: Targets) -> Floats:
        top = scores.max(axis=1)
        losses: Floats = np.log(np.exp(scores - top[:, None]).sum(axis=1)) + (top - scores[np.arange(len(y)), y])
        return losses

    def residuals(self, scores: Floats, y: Targets) -> Floats:
        residuals = _softmax(scores)
        residuals[np.arange(len(y)), y] -= 1.0
        return residuals

    def bends(self, scores: Floats, y: Targets, tilts: Floats) -> Floats:
        p = _softmax(scores)
        return np.asarray(p * (tilts - (p * tilts).sum(axis=1, keepdims=True)))

    def moduli(self) -> tuple[float, float, float]:
        return math.sqrt(2.0), 0.5, math.sqrt(2.0) ** 3 * _CUBIC

    def probabilities(self, data: object, params: Floats) -> Floats:
        return _softmax(self.decision(data, params))


def _softmax(scores: Floats) -> Floats:
    powers: Floats = np.exp(scores - scores.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


LOSSES: dict[str, type[LinearObjective]] = {
    "logistic": Logistic,
    "multinomial": Multinomial,
    "huber": Huber,
    "squared": Squared,
    "hinge": Hinge,
    "poisson": PoissonDeviance,
    "pinball": Pinball,
}
"""The losses of tables by name; whatever is here is tested against finite differences and attacked by the audit."""


@dataclass(frozen=True)
class OneVsRestHinge(_ClassScores):
    """Σₖ of the rounded hinge of score k, with y = k against the rest. G = √K·R, L = R²/h, no ρ.

    >>> objective = OneVsRestHinge(3, 0.5, row_bound=1.0)
    >>> records = objective.prepare(([[1.0], [0.5]], [0, 2]))
    >>> records.dim, objective.constants().smoothness
    (3, 2.0)
    """

    smoothing: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        Hinge(self.smoothing)

    def _sides(self, y: Targets) -> Floats:
        return np.asarray(np.eye(self.classes)[y])

    def losses(self, scores: Floats, y: Targets) -> Floats:
        return np.asarray(Hinge.value(scores, self._sides(y), self.smoothing).sum(axis=1))

    def residuals(self, scores: Floats, y: Targets) -> Floats:
        return np.asarray(Hinge.residual(scores, self._sides(y), self.smoothing))

    def bends(self, scores: Floats, y: Targets, tilts: Floats) -> Floats:
        return np.asarray(Hinge.curvature(scores, self._sides(y), self.smoothing) * tilts)

    def moduli(self) -> tuple[float, float, None]:
        return math.sqrt(self.classes), 1.0 / self.smoothing, None
