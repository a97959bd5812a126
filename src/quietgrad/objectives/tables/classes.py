"""Losses of several classes that need no kernel of their own: one hinge per class, and public weights of classes.

They are summed over the full batch only; a record is cut to its clip after it is weighted, so weights cost nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Indices, Numbers
from quietgrad.objectives.privacy_units import GroupIndex
from quietgrad.objectives.tables.glm import Hinge, Logistic, Multinomial
from quietgrad.objectives.tables.linear import LinearObjective, Task
from quietgrad.objectives.tables.table import Floats, Packed

_FULL_BATCH = "works on the full batch only: use the default method, DPGD or WhitenedGD."


@dataclass(frozen=True)
class OneVsRestHinge(LinearObjective):
    """Σₖ of the rounded hinge of score k, with y = k against the rest. G = √K·R, L = R²/h, no ρ.

    >>> objective = OneVsRestHinge(3, 0.5, row_bound=1.0)
    >>> records = objective.prepare(([[1.0], [0.5]], [0, 2]))
    >>> records.dim, objective.constants().smoothness
    (3, 2.0)
    """

    classes: int
    smoothing: float = 1.0
    task: ClassVar[Task] = "multiclass"
    full_batch_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes < 2:
            raise ValueError(f"classes={self.classes!r}: must be >= 2, a public number.")
        Hinge(self.smoothing)

    @property
    def outputs(self) -> int:
        """K."""
        return self.classes

    def _sides(self, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(np.eye(self.classes)[y])

    def losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(Hinge.value(scores, self._sides(y), self.smoothing).sum(axis=1))

    def residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(Hinge.residual(scores, self._sides(y), self.smoothing))

    def bends(self, scores: Floats, y: npt.NDArray[Any], tilts: Floats) -> Floats:
        return np.asarray(Hinge.curvature(scores, self._sides(y), self.smoothing) * tilts)

    def moduli(self) -> tuple[float, float, None]:
        return math.sqrt(self.classes), 1.0 / self.smoothing, None

    def add_indexed(
        self, table: Packed, indices: Indices, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        raise ValueError(f"a hinge of several classes {_FULL_BATCH}")

    def add_grouped(
        self, table: Packed, groups: GroupIndex, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        raise ValueError(f"a hinge of several classes {_FULL_BATCH}")

    def predict(self, data: Any, params: Floats) -> npt.NDArray[np.int64]:
        """The class with the highest score."""
        return np.asarray(self.decision(data, params).argmax(axis=1), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class _ClassWeights(LinearObjective):
    """w_y times the loss, w public; the largest weight is 1."""

    class_weights: tuple[float, ...] = ()
    gathered: ClassVar[bool] = False
    full_batch_only: ClassVar[bool] = True

    def _of(self, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(self.class_weights)[np.asarray(y, dtype=np.int64)]

    def losses(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(super().losses(scores, y) * self._of(y))  # type: ignore[safe-super]

    def residuals(self, scores: Floats, y: npt.NDArray[Any]) -> Floats:
        return np.asarray(super().residuals(scores, y) * self._of(y)[:, None])  # type: ignore[safe-super]

    def bends(self, scores: Floats, y: npt.NDArray[Any], tilts: Floats) -> Floats:
        return np.asarray(super().bends(scores, y, tilts) * self._of(y)[:, None])  # type: ignore[safe-super]

    def add_indexed(
        self, table: Packed, indices: Indices, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        raise ValueError(f"class_weight {_FULL_BATCH}")

    def add_grouped(
        self, table: Packed, groups: GroupIndex, params: Floats, previous: Floats, rule: Numbers, out: Floats
    ) -> None:
        raise ValueError(f"class_weight {_FULL_BATCH}")


@dataclass(frozen=True, kw_only=True)
class WeightedLogistic(_ClassWeights, Logistic):
    """The logistic loss with public class weights of at most 1."""


@dataclass(frozen=True, kw_only=True)
class WeightedMultinomial(_ClassWeights, Multinomial):
    """The multinomial loss with public class weights of at most 1."""


@dataclass(frozen=True, kw_only=True)
class WeightedHinge(_ClassWeights, Hinge):
    """The rounded hinge with public class weights of at most 1."""


@dataclass(frozen=True, kw_only=True)
class WeightedOneVsRestHinge(_ClassWeights, OneVsRestHinge):
    """One rounded hinge per class with public class weights of at most 1."""


_WEIGHTED: dict[type[LinearObjective], Any] = {
    Logistic: WeightedLogistic,
    Multinomial: WeightedMultinomial,
    Hinge: WeightedHinge,
    OneVsRestHinge: WeightedOneVsRestHinge,
}


def weighted(loss: LinearObjective, weights: tuple[float, ...] | None) -> LinearObjective:
    """``loss`` with class k counted ``weights[k]`` times, scaled so that the largest weight is 1.

    >>> weighted(Logistic(), (1.0, 4.0)).class_weights
    (0.25, 1.0)
    """
    if weights is None:
        return loss
    settings = {field.name: getattr(loss, field.name) for field in fields(loss) if field.init}
    scaled = tuple(weight / max(weights) for weight in weights)
    made: LinearObjective = _WEIGHTED[type(loss)](**settings, class_weights=scaled)
    return made
