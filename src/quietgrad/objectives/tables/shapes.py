"""Additive models as linear ones: every feature becomes a few columns, one smooth function of it each.

A numeric feature's range is cut into B bins and its function on them written in cosines (the eigenvectors of the
penalty Σ(f_{b+1} − f_b)² between neighbouring bins), each divided by √(1 + λ·its roughness). Equal shrinkage of all
coefficients, which the noise of a private fit does anyway, then is that smoothness penalty. Bins are narrower near
zero, where most of the values of amounts and counts are. A category is a column of zeros and ones. All of it is a
public map of one record to one record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.tables.table import Floats

ROUGHNESS = 10.0
"""λ, in units of the roughness of a tenth of a wave per range."""
_PAIR_BINS = 4  # of each numeric feature of a pair


@dataclass(frozen=True)
class Feature:
    """One feature: a number in [low, high] cut into ``bins``, or one of ``values`` categories (``bins = 0``).

    >>> Feature("age", 0.0, 4.0, bins=4).edges().tolist()
    [0.0, 0.25, 1.0, 2.25, 4.0]
    >>> Feature("sex", values=("f", "m")).width
    2
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    bins: int = 0
    values: tuple[Any, ...] = ()

    @property
    def width(self) -> int:
        """Columns it becomes; a numeric feature's constant is the intercept's."""
        return self.bins - 1 if self.bins else len(self.values)

    @property
    def levels(self) -> int:
        """Bins or categories."""
        return self.bins or len(self.values)

    def edges(self, bins: int | None = None) -> Floats:
        """Bin edges: equal in √|x| on both sides of zero if the range holds it, else equal."""
        count = (bins or self.bins) + 1
        if not self.low <= 0.0 <= self.high:
            return np.linspace(self.low, self.high, count)
        reach = max(-self.low, self.high)
        ends = [math.copysign(math.sqrt(abs(end) / reach), end) for end in (self.low, self.high)]
        places = np.linspace(ends[0], ends[1], count)
        edges: Floats = np.sign(places) * places**2 * reach
        edges[0], edges[-1] = self.low, self.high
        return edges

    def level_of(self, column: Floats, bins: int | None = None) -> npt.NDArray[np.int64]:
        """The bin or category code of each value; −1 for a code that is not in the vocabulary."""
        if not self.bins:
            codes = np.nan_to_num(column, nan=-1.0).astype(np.int64)
            return np.where((codes >= 0) & (codes < len(self.values)), codes, -1)
        edges = self.edges(bins)
        return np.asarray(np.clip(np.searchsorted(edges, column, side="right") - 1, 0, len(edges) - 2))

    def basis(self) -> Floats:
        """One row per bin or category, one column per coefficient, entries within ±1."""
        if not self.bins:
            return np.eye(len(self.values))
        places, waves = (np.arange(self.bins) + 0.5) / self.bins, np.arange(1, self.bins)
        rough = (2.0 * np.sin(math.pi * waves / (2.0 * self.bins)) * self.bins) ** 2 / 10.0
        columns = np.cos(math.pi * np.outer(places, waves)) / np.sqrt(1.0 + ROUGHNESS * rough)
        return np.asarray(columns / np.abs(columns).max())


@dataclass(frozen=True)
class Shapes:
    """The public map from raw rows to the columns of an additive model.

    Args:
        features: one per raw column.
        pairs: positions of features whose joint cells get a column each.
    """

    features: tuple[Feature, ...]
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def columns(self) -> int:
        """Columns of the expanded table."""
        return sum(f.width for f in self.features) + sum(self._cells(pair) for pair in self.pairs)

    def _cells(self, pair: tuple[int, int]) -> int:
        return math.prod(self._coarse(i) for i in pair)

    def _coarse(self, position: int) -> int:
        feature = self.features[position]
        return _PAIR_BINS if feature.bins else len(feature.values)

    def parts(self) -> Sequence[slice]:
        """Which columns belong to each feature, then to each pair."""
        widths = [f.width for f in self.features] + [self._cells(pair) for pair in self.pairs]
        ends = np.cumsum([0, *widths])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    def expand(self, X: Floats) -> Floats:
        """The columns of the additive model for raw rows of numbers and category codes.

        >>> shapes = Shapes((Feature("x", 0.0, 1.0, bins=4), Feature("c", values=("a", "b"))))
        >>> shapes.expand(np.array([[0.5, 1.0], [2.0, -1.0]])).shape, shapes.columns
        ((2, 5), 5)
        """
        blocks = []
        for column, feature in zip(X.T, self.features, strict=True):
            level = feature.level_of(column)
            blocks.append(np.where((level >= 0)[:, None], feature.basis()[level], 0.0))
        for pair in self.pairs:
            cell = np.zeros(len(X), dtype=np.int64)
            known = np.ones(len(X), dtype=bool)
            for position in pair:
                level = self.features[position].level_of(X[:, position], _PAIR_BINS)
                known &= level >= 0
                cell = cell * self._coarse(position) + np.maximum(level, 0)
            blocks.append(np.eye(self._cells(pair))[cell] * known[:, None])
        return np.hstack(blocks)
