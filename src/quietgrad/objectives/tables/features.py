"""Queries about the features alone: private means and second moments, for centring and diagonal scaling.

They read the raw rows of a :class:`~quietgrad.objectives.tables.table.Table`, before any transform, and use no
parameters; one full-batch release of each costs little beside a training run and often buys most of its accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.objectives.base import Batch, check_clip
from quietgrad.objectives.privacy_units import rows_of
from quietgrad.objectives.tables.table import Floats, Table
from quietgrad.privacy.budget import Relation

_LARGEST = 1e75  # its fourth power is finite, so one absurd record cannot turn a sum into NaN


@dataclass(frozen=True)
class _FeatureSum:
    """Σ clip_C(vᵢ), vᵢ the concatenation of weighted powers of the raw row xᵢ.

    Args:
        clip: C.
        nonnegative: a public promise that features are ≥ 0, kept by replacing negative ones by 0. Two
            non-negative vectors of norm ≤ C are at most √2·C apart, not 2C, so under ``replace-one`` the bound
            is C/√2. It holds for the full batch only.
        relation: what a neighbour is.
    """

    clip: float
    nonnegative: bool = False
    relation: Relation = Relation.ADD_REMOVE

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        if not (math.isfinite(self.clip) and self.clip > 0.0):
            raise ValueError(f"clip={self.clip!r}: must be a finite number > 0.")
        object.__setattr__(self, "relation", Relation(self.relation))

    @property
    def _powers(self) -> tuple[tuple[int, float], ...]:
        """(power, weight) of each piece of v."""
        return ((1, 1.0),)

    @property
    def _is_pairwise(self) -> bool:
        return self.nonnegative and self.relation is Relation.REPLACE_ONE

    @property
    def bound(self) -> float:
        """C, or C/√2 where only the distance between two records counts."""
        return self.clip / math.sqrt(2.0) if self._is_pairwise else self.clip

    def dim(self, records: Any) -> int:
        """Length of the released vector: features × pieces."""
        return int(records.features) * len(self._powers)

    def sum_into(self, objective: Any, batch: Batch, out: Floats) -> None:
        """out += Σ clip_C(vᵢ)."""
        shared = rows_of(batch)
        records: Table = shared.records
        if self._is_pairwise and batch.indices is not None:
            raise ValueError(
                "under replace-one this bounds the distance of two records, not a record: "
                "release it with FullBatch() sampling."
            )
        pieces = out.reshape(len(self._powers), records.features)
        slack = 1.0 + (16 + records.features) * float(np.finfo(np.float64).eps)
        lowest = 0.0 if self.nonnegative else -_LARGEST
        for which, block in records.blocks(shared.indices):
            values = _mapped(block, lambda v: np.clip(v, lowest, _LARGEST))
            powers = [_mapped(values, lambda v, p=p, w=w: w * v**p) for p, w in self._powers]
            squares = sum(_row_totals(_mapped(piece, np.square)) for piece in powers)
            lengths = np.sqrt(squares) * slack
            factors = (self.clip / np.maximum(lengths, self.clip)) / (1.0 + 1e-12) * shared.of(which)
            for total, piece in zip(pieces, powers, strict=True):
                total += piece.T @ factors


def _mapped(block: Any, function: Any) -> Any:
    """Apply an entrywise function that keeps 0 at 0."""
    if isinstance(block, np.ndarray):
        return function(block)
    mapped = block.copy()
    mapped.data = function(block.data.astype(np.float64))
    return mapped


def _row_totals(block: Any) -> Floats:
    return np.asarray(block.sum(axis=1)).ravel()


@dataclass(frozen=True)
class FeatureMean(_FeatureSum):
    """Σ clip_C(xᵢ): divided by n, a private mean to centre with.

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query, out = FeatureMean(clip=5.0), np.zeros(2)
    >>> query.sum_into(None, Batch(Table(lay_out([[3.0, 4.0], [30.0, 40.0]]), None), None), out)
    >>> out.round(6), query.bound
    (array([6., 8.]), 5.0)
    """


@dataclass(frozen=True)
class SecondMoments(_FeatureSum):
    """Σ clip_C(xᵢ∘xᵢ): divided by n, private mean squares to scale with.

    >>> SecondMoments(clip=2.0, nonnegative=True, relation=Relation.REPLACE_ONE).bound == 2.0 / 2**0.5
    True
    """

    @property
    def _powers(self) -> tuple[tuple[int, float], ...]:
        return ((2, 1.0),)


@dataclass(frozen=True)
class FeatureMoments(_FeatureSum):
    """Σ clip_C((xᵢ, w·xᵢ∘xᵢ)): means and mean squares in one release, with one clip.

    Args:
        weight: w, how much of the noise budget the squares get; 1 suits features in [−1, 1].

    >>> from quietgrad.objectives.tables.layout import lay_out
    >>> query, out = FeatureMoments(clip=10.0), np.zeros(2)
    >>> query.sum_into(None, Batch(Table(lay_out([[1.0], [2.0]]), None), None), out)
    >>> [moment.round(6).tolist() for moment in query.moments(out, n=2)]
    [[1.5], [2.5]]
    """

    weight: float = 1.0

    def __post_init__(self) -> None:
        _FeatureSum.__post_init__(self)
        check_clip("weight", self.weight)
        if not (math.isfinite(self.weight) and self.weight > 0.0):
            raise ValueError(
                f"weight={self.weight!r}: must be a finite number > 0. For means alone use FeatureMean."
            )

    @property
    def _powers(self) -> tuple[tuple[int, float], ...]:
        return ((1, 1.0), (2, self.weight))

    def moments(self, released: Floats, n: int) -> tuple[Floats, Floats]:
        """Means and mean squares from a released sum and the public number of records."""
        first, second = np.split(released, 2)
        return first / n, second / (self.weight * n)
