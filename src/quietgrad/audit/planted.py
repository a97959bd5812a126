"""Canaries planted beside a real model: one more parameter for each, that nothing but it moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import BaseObjective, Batch, ClippingRule, LossConstants, Records, Regularizer
from quietgrad.privacy.budget import Relation
from quietgrad.vectors import Vector

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Planted:
    """Records with canaries behind them: canary j sits on coordinate ``places[j]`` and pulls with ``signs[j]``."""

    inner: Records
    places: npt.NDArray[np.int64]
    signs: Floats
    canaries: int

    def __len__(self) -> int:
        return len(self.inner) + len(self.places)

    @property
    def dim(self) -> int:
        """Parameters of the model and one per canary."""
        return int(self.inner.dim) + self.canaries

    def contents(self) -> Iterator[bytes | memoryview]:
        """The records and where the canaries sit."""
        yield from self.inner.contents()
        yield f"{self.canaries} {self.places.tolist()} {self.signs.tolist()}".encode()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The people alone: canaries are nobody."""
        return self.inner.fingerprint_parts()


class PlantedObjective(BaseObjective):
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

    def constants(self) -> LossConstants:
        constants: LossConstants = self.inner.constants()
        return constants

    def add(self, batch: Batch, points: Sequence[Vector], rule: ClippingRule, out: Vector) -> None:
        d = int(batch.records.inner.dim)
        own = self._split(batch, rule.bound, out[d:])
        self.inner.add(own, [point[:d] for point in points], rule, out[:d])

    def loss_sum(self, batch: Batch, params: Vector, bound: float) -> float:
        return float(self.inner.loss_sum(self._ordinary(batch), params[: -self.canaries], bound))

    def risk(self, records: Planted, params: Vector) -> float:
        return float(self.inner.risk(records.inner, params[: -self.canaries]))

    def risk_gradient(self, records: Planted, params: Vector) -> Vector:
        return _pad(self.inner.risk_gradient(records.inner, params[: -self.canaries]), self.canaries)

    def _split(self, batch: Batch, pull: float, out: Vector) -> Batch:
        """Add the canaries' pulls; return the batch of ordinary records."""
        records, n = batch.records, len(batch.records.inner)
        present = np.arange(len(records.places)) if batch.indices is None else batch.indices[batch.indices >= n] - n
        pulls = np.zeros(self.canaries)
        pulls[records.places[present]] = pull * records.signs[present]
        out += pulls if isinstance(out, np.ndarray) else out.new_tensor(pulls)
        return self._ordinary(batch)

    def _ordinary(self, batch: Batch) -> Batch:
        inner, indices = batch.records.inner, batch.indices
        return Batch(inner, indices if indices is None else indices[indices < len(inner)], batch.key)


@dataclass(frozen=True)
class _Padded:
    """The model's regulariser; canaries' coordinates have none."""

    inner: Regularizer
    canaries: int

    @property
    def strong_convexity(self) -> float:
        return 0.0  # in the canaries' coordinates

    @property
    def smoothness(self) -> float:
        return self.inner.smoothness

    @property
    def hessian_lipschitz(self) -> float:
        return self.inner.hessian_lipschitz

    @property
    def weak_convexity(self) -> float:
        return self.inner.weak_convexity

    def value(self, params: Vector) -> float:
        return float(self.inner.value(params[: -self.canaries]))

    def gradient(self, params: Vector) -> Vector:
        return _pad(self.inner.gradient(params[: -self.canaries]), self.canaries)

    def curvature(self, params: Vector) -> Vector:
        return _pad(self.inner.curvature(params[: -self.canaries]), self.canaries)


def _pad(vector: Vector, count: int) -> Vector:
    if isinstance(vector, np.ndarray):
        return np.concatenate([vector, np.zeros(count, vector.dtype)])
    longer = vector.new_zeros(len(vector) + count)
    longer[: len(vector)] = vector
    return longer
