"""Canaries planted beside a real model: one more parameter for each, that nothing but it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Constants, Indices
from quietgrad.privacy.budget import Relation
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Planted:
    """Records with canaries behind them: canary j sits on coordinate ``places[j]`` and pulls with ``signs[j]``."""

    inner: Any
    places: npt.NDArray[np.int64]
    signs: Floats
    canaries: int

    def __len__(self) -> int:
        return len(self.inner) + len(self.places)

    @property
    def dim(self) -> int:
        """Parameters of the model and one per canary."""
        return int(self.inner.dim) + self.canaries


class PlantedObjective:
    """An objective with one more parameter per canary; the model's own sums are the inner objective's."""

    def __init__(self, inner: Any, canaries: int, coins: npt.NDArray[np.bool_], relation: Relation) -> None:
        self.inner = inner
        self.canaries = canaries
        replace = relation is Relation.REPLACE_ONE
        self.places = np.arange(canaries) if replace else np.flatnonzero(coins)
        self.signs = np.where(coins, 1.0, -1.0) if replace else np.ones(len(self.places))
        self.regularizer = _Padded(inner.regularizer, canaries)

    def prepare(self, data: Any) -> Planted:
        return Planted(self.inner.prepare(data), self.places, self.signs, self.canaries)

    def initial(self, records: Planted) -> Vector:
        return _pad(self.inner.initial(records.inner), self.canaries)

    def constants(self, row_bound: float | None = None) -> Constants:
        constants: Constants = self.inner.constants(row_bound)
        return constants

    def add_gradients(
        self, records: Planted, indices: Indices | None, params: Vector, clip: float, out: Vector
    ) -> None:
        own, d = self._split(records, indices, clip, out)
        self.inner.add_gradients(records.inner, own, params[:d], clip, out[:d])

    def add_differences(
        self, records: Planted, indices: Indices | None, params: Vector, previous: Vector, clip: float, out: Vector
    ) -> None:
        own, d = self._split(records, indices, clip, out)
        self.inner.add_differences(records.inner, own, params[:d], previous[:d], clip, out[:d])

    def add_momentum(
        self,
        records: Planted,
        indices: Indices | None,
        params: Vector,
        previous: Vector,
        gamma: float,
        clip: float,
        difference_clip: float,
        out: Vector,
    ) -> None:
        own, d = self._split(records, indices, (1.0 - gamma) * difference_clip + gamma * clip, out)
        inner = self.inner
        inner.add_momentum(records.inner, own, params[:d], previous[:d], gamma, clip, difference_clip, out[:d])

    def add_joint_momentum(
        self,
        records: Planted,
        indices: Indices | None,
        params: Vector,
        previous: Vector,
        gamma: float,
        clip: float,
        out: Vector,
    ) -> None:
        own, d = self._split(records, indices, clip, out)
        self.inner.add_joint_momentum(records.inner, own, params[:d], previous[:d], gamma, clip, out[:d])

    def loss_sum(self, records: Planted, indices: Indices | None, params: Vector, bound: float) -> float:
        own = indices if indices is None else indices[indices < len(records.inner)]
        return float(self.inner.loss_sum(records.inner, own, params[: -self.canaries], bound))

    def risk(self, records: Planted, params: Vector) -> float:
        return float(self.inner.risk(records.inner, params[: -self.canaries]))

    def risk_gradient(self, records: Planted, params: Vector) -> Vector:
        return _pad(self.inner.risk_gradient(records.inner, params[: -self.canaries]), self.canaries)

    def _split(
        self, records: Planted, indices: Indices | None, pull: float, out: Vector
    ) -> tuple[Indices | None, int]:
        """Add the canaries' pulls; return the indices of ordinary records and the model's dimension."""
        d, n = int(records.inner.dim), len(records.inner)
        present = np.arange(len(records.places)) if indices is None else indices[indices >= n] - n
        pulls = np.zeros(self.canaries)
        pulls[records.places[present]] = pull * records.signs[present]
        out[d:] += pulls if isinstance(out, np.ndarray) else out.new_tensor(pulls)
        return (None if indices is None else indices[indices < n]), d


@dataclass(frozen=True)
class _Padded:
    """The model's regulariser; canaries' coordinates have none."""

    inner: Any
    canaries: int

    def value(self, params: Vector) -> float:
        return float(self.inner.value(params[: -self.canaries]))

    def gradient(self, params: Vector) -> Vector:
        return _pad(self.inner.gradient(params[: -self.canaries]), self.canaries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _pad(vector: Vector, count: int) -> Vector:
    if isinstance(vector, np.ndarray):
        return np.concatenate([vector, np.zeros(count, vector.dtype)])
    longer = vector.new_zeros(len(vector) + count)
    longer[: len(vector)] = vector
    return longer
