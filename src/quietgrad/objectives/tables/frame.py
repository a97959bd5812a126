"""A public box that rows and targets are kept in and scaled by: what is outside is moved to its edge.

The box comes from the user or from releases. It is applied to every record alike, when a model is fitted and when
it predicts, so it depends on no record and a record's contribution depends on that record alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from quietgrad.objectives.base import Batch, Query
from quietgrad.objectives.privacy_units import UserLevelRecords
from quietgrad.objectives.tables.table import Floats, Table

TARGET_REACH = 2.0
"""Scaled targets are within ± this."""


class View(ABC):
    """A public map of rows and targets: a query may be asked of the records as it shows them."""

    @abstractmethod
    def apply(self, X: Any) -> Any:
        """Rows as they are shown."""

    @abstractmethod
    def targets(self, y: Any) -> Any:
        """Targets as they are shown."""

    def features_of(self, records: Any) -> int:
        """Columns of the rows that are shown."""
        return int(records.features)

    def of(self, records: Any) -> Any:
        """The table, or the people's table, as it is shown, made once."""
        if isinstance(records, UserLevelRecords):
            return records.seen(self.of(records.rows))
        cached = records.views.get(id(self))
        if cached is None or cached.frame is not self:
            moved = self.apply(records.X)
            if isinstance(moved, np.ndarray) and records.X.dtype == np.float32:
                moved = moved.astype(np.float32)
            cached = Table(moved, self.targets(records.y), outputs=records.outputs, intercept=records.intercept)
            cached.frame = self
            records.views.clear()
            records.views[id(self)] = cached
        return cached


@dataclass(frozen=True, eq=False)
class Frame(View):
    """x ↦ (clip(x, low, high) − c)/h per feature; zero stays zero (c = 0) wherever it is in the box.

    Args:
        low, high: the box, low < high.
        target: the interval targets are kept in, scaled to ±2; ``None`` leaves them as they are (classes).
        unit: what counts are divided by instead, about their mean.

    >>> frame = Frame(np.array([0.0, 1990.0]), np.array([4.0, 2010.0]))
    >>> frame.apply(np.array([[8.0, 2005.0]])).tolist(), frame.centre.tolist(), frame.half.tolist()
    ([[1.0, 0.5]], [0.0, 2000.0], [4.0, 10.0])
    """

    low: Floats
    high: Floats
    target: tuple[float, float] | None = None
    unit: float | None = None

    @classmethod
    def told(cls, details: Mapping[str, Any]) -> Frame | None:
        """The frame that a run's result tells of, if its method had one."""
        limits, target = details.get("feature_range"), details.get("target_range")
        if limits is None and (target is None or "model" not in details):
            return None
        if limits is None:  # the targets alone are kept in an interval
            wide = np.full(int(details["model"]["features"]), np.inf)
            limits = (-wide, wide)
        return cls(np.asarray(limits[0]), np.asarray(limits[1]), None if target is None else (target[0], target[1]))

    @property
    def centre(self) -> Floats:
        """c: 0, or the middle of a box that does not hold 0."""
        straddles = (self.low <= 0.0) & (self.high >= 0.0)
        return np.where(straddles, 0.0, 0.5 * (self.low + self.high))

    @property
    def half(self) -> Floats:
        """h: how far the box reaches from c."""
        return np.maximum(self.high - self.centre, self.centre - self.low)

    @property
    def target_centre(self) -> float:
        """The middle of the targets' interval."""
        return 0.0 if self.target is None or self.unit else 0.5 * (self.target[0] + self.target[1])

    @property
    def target_scale(self) -> float:
        """Targets per unit of the scaled ones."""
        if self.unit is not None:
            return self.unit
        return 1.0 if self.target is None else 0.5 * (self.target[1] - self.target[0]) / TARGET_REACH

    def zero_kept(self) -> Frame:
        """This frame for rows whose zeros are not stored: a box that does not hold 0 is widened to do so."""
        return replace(self, low=np.minimum(self.low, 0.0), high=np.maximum(self.high, 0.0))

    def clipped(self, X: Any) -> Any:
        """Rows moved into the box, not scaled: what a model with coefficients for raw features is given."""
        if isinstance(X, np.ndarray):
            return np.clip(X, self.low, self.high)
        moved = X.copy()
        moved.data = np.clip(X.data, self.low[X.indices], self.high[X.indices])
        return moved

    def apply(self, X: Any) -> Any:
        """Rows in the frame's units."""
        if isinstance(X, np.ndarray):
            return (np.clip(X, self.low, self.high) - self.centre) / self.half
        moved = self.clipped(X)
        moved.data = moved.data / self.half[X.indices]
        return moved

    def targets(self, y: Any) -> Any:
        """Targets in the frame's units."""
        if self.target is None or y is None:
            return y
        return (np.clip(y, *self.target) - self.target_centre) / self.target_scale


class _Shown(NamedTuple):
    """What a query may ask of records before they are shown."""

    features: int


@dataclass(frozen=True, eq=False)
class Framed:
    """A query asked of the records as a view shows them; its bound holds for any rows, so for these."""

    query: Query
    frame: View

    @property
    def bound(self) -> float:
        """That of the query."""
        return self.query.bound

    def dim(self, records: Any) -> int:
        """That of the query."""
        return self.query.dim(_Shown(self.frame.features_of(records)))

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += the query's sum."""
        self.query.sum_into(objective, batch._replace(records=self.frame.of(batch.records)), out)
