"""Additive models as linear ones: every feature becomes a line and a few waves beside it, a pair a few products.

A numeric feature's line is the feature itself, moved into its range and scaled. Its bins are cut by a public or
released measure. On them stand cosines, orthogonal to the constant and to the line under that measure, the smaller
the more they bend: equal shrinkage of all coefficients, which the noise of a private fit does anyway, then is a
penalty on roughness. A category is a column of zeros and ones for each value. All of it is a public map of one
record to one record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.tables.range_queries import FeatureBox, RecordMap
from quietgrad.tables.table import Floats, Matrix, Table, Targets

_HEIGHT = 0.5  # root mean square of the first wave, where a line keeps within ±1
_FUNCTIONS = 3  # of each member of a pair: its line and two waves


def usual_edges(low: float, high: float, bins: int) -> Floats:
    """Bin edges where only a range is known: equal in √|x| on both sides of zero if it holds zero, else equal."""
    if not low <= 0.0 <= high:
        return np.linspace(low, high, bins + 1)
    reach = max(-low, high)
    ends = [math.copysign(math.sqrt(abs(end) / reach), end) for end in (low, high)]
    places = np.linspace(ends[0], ends[1], bins + 1)
    edges: Floats = np.sign(places) * places**2 * reach
    edges[0], edges[-1] = low, high
    return edges


@dataclass(frozen=True)
class Feature:
    """One feature: a number whose line has the range [low, high] and whose waves stand on bins, or a category.

    Args:
        name: of the column.
        low: lower limit of the line; values below are moved to it.
        high: upper limit of the line; values above are moved to it.
        cuts: edges of the bins; none for a category, and where there is a line alone.
        mass: of each bin, as far as it is known.
        values: the vocabulary of a category.
        weight: of the waves; 0 leaves the line alone.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    cuts: tuple[float, ...] = ()
    mass: tuple[float, ...] = ()
    values: tuple[Any, ...] = ()
    weight: float = 1.0

    @property
    def width(self) -> int:
        """Columns it becomes."""
        return len(self.values) or (1 + self.waves.shape[1] if self.weight else 1)

    @property
    def bins(self) -> int:
        return max(len(self.cuts) - 1, 0)

    def line(self, column: Floats) -> Floats:
        """The feature in its range, within ±1."""
        frame = FeatureBox(np.array([self.low]), np.array([self.high]))
        return np.asarray(frame.apply(column[:, None])[:, 0])

    def level_of(self, column: Floats) -> npt.NDArray[np.int64]:
        """The bin or category code of each value; −1 for a code that is not in the vocabulary."""
        if self.values:
            codes = np.nan_to_num(column, nan=-1.0).astype(np.int64)
            return np.where((codes >= 0) & (codes < len(self.values)), codes, -1)
        return np.asarray(np.searchsorted(np.array(self.cuts[1:-1]), column, side="right"))

    @cached_property
    def _middles(self) -> Floats:
        """The line at the middle of each bin."""
        edges = np.array(self.cuts)
        return self.line(0.5 * (edges[:-1] + edges[1:]))

    @cached_property
    def _measure(self) -> Floats:
        known = np.array(self.mass) if self.mass else np.ones(self.bins)
        return np.asarray(0.5 * known / known.sum() + 0.5 / self.bins)

    @cached_property
    def waves(self) -> Floats:
        """One row per bin, one column per wave: orthogonal to the constant and the line, damped as they bend."""
        if self.bins < 3:
            return np.zeros((self.bins, 0))
        places, orders = (np.arange(self.bins) + 0.5) / self.bins, np.arange(1, self.bins)
        root = np.sqrt(self._measure)[:, None]
        plain = np.column_stack([np.ones(self.bins), self._middles, np.cos(math.pi * np.outer(places, orders))])
        basis, triangle = np.linalg.qr(root * plain)
        kept = np.abs(np.diag(triangle)) > 1e-6  # the line may be a cosine itself, or constant over the bins
        kept[:2] = False
        shown = (basis / root)[:, kept[: basis.shape[1]]][:, : self.bins - 2]
        return np.asarray(_HEIGHT * self.weight * shown / np.arange(1, shown.shape[1] + 1))

    @property
    def wave_sizes(self) -> Floats:
        """The mean square of each wave, as far as the bins' masses tell."""
        return np.asarray(self._measure @ self.waves**2)

    def basis(self) -> Floats:
        """One row per bin or category, one column per coefficient; of the line, its middle in the bin."""
        if self.values:
            return np.eye(len(self.values))
        if not self.bins:
            return self.line(np.array([self.low, self.high]))[:, None]
        return np.column_stack([self._middles, self.waves]) if self.weight else self._middles[:, None]

    def columns(self, column: Floats) -> Floats:
        """The columns for raw numbers or category codes."""
        if self.values:
            level = self.level_of(column)
            return np.where((level >= 0)[:, None], np.eye(len(self.values))[level], 0.0)
        line = self.line(column)[:, None]
        return np.hstack([line, self.waves[self.level_of(column)]]) if self.weight else line

    def first(self, column: Floats, count: int) -> Floats:
        """The first functions of a member of a pair, of mean 0 and equal size; of a category all its values."""
        if self.values:
            return self.columns(column)
        measure = self._measure if self.bins else np.array([0.5, 0.5])
        middles = self._middles if self.bins else self.line(np.array([self.low, self.high]))
        mean = float(measure @ middles)
        deviation = math.sqrt(max(float(measure @ (middles - mean) ** 2), 1e-6))
        line = _HEIGHT * np.clip((self.line(column) - mean) / deviation, -2.0, 2.0)[:, None]
        plain = replace(self, weight=1.0)
        waves = np.clip(plain.waves[:, : count - 1] * np.arange(1, count)[: plain.waves.shape[1]], -1.0, 1.0)
        return np.hstack([line, waves[self.level_of(column)]]) if self.bins and count > 1 else line


@dataclass(frozen=True)
class AdditiveBasis:
    """The public map from raw rows to the columns of an additive model.

    Args:
        features: one per raw column.
        pairs: positions of features whose products get a column each.
        functions: how many of each member of a pair are multiplied.
    """

    features: tuple[Feature, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    functions: int = _FUNCTIONS

    @property
    def columns(self) -> int:
        return int(self.parts()[-1].stop)

    def parts(self) -> Sequence[slice]:
        """Which columns belong to each feature, then to each pair."""
        firsts = [[self.features[i].first(np.zeros(1), self.functions) for i in pair] for pair in self.pairs]
        widths = [f.width for f in self.features] + [a.shape[1] * b.shape[1] for a, b in firsts]
        ends = np.cumsum([0, *widths])
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    def expand(self, X: Floats) -> Floats:
        """The columns of the additive model for raw rows of numbers and category codes."""
        blocks = [feature.columns(column) for column, feature in zip(X.T, self.features, strict=True)]
        for i, j in self.pairs:
            a, b = (self.features[k].first(X[:, k], self.functions) for k in (i, j))
            blocks.append((a[:, :, None] * b[:, None, :]).reshape(len(X), -1))
        return np.hstack(blocks)

    def embed(self, params: Floats, other: AdditiveBasis, outputs: int) -> Floats:
        """Parameters of ``other`` for these shapes: those of lines and categories as they are, zeros elsewhere."""
        mine = np.zeros((self.columns + 1, outputs))
        theirs = params.reshape(-1, outputs)
        for feature, here, there in zip(self.features, self.parts(), other.parts(), strict=False):
            width = feature.width if feature.values else 1
            mine[here.start : here.start + width] = theirs[there.start : there.start + width]
        mine[-1] = theirs[-1]
        return mine.ravel()

    def to_json(self) -> list[Any]:
        features = []
        for f in self.features:
            values = [v.item() if isinstance(v, np.generic) else v for v in f.values]
            features.append([f.name, f.low, f.high, list(f.cuts), list(f.mass), values, f.weight])
        return [features, [list(pair) for pair in self.pairs], self.functions]

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> AdditiveBasis:
        """The map of :meth:`to_json`."""
        features = (
            Feature(str(name), low, high, tuple(cuts), tuple(mass), tuple(values), weight)
            for name, low, high, cuts, mass, values, weight in said[0]
        )
        return cls(tuple(features), tuple((int(i), int(j)) for i, j in said[1]), int(said[2]))


@dataclass(frozen=True, eq=False)
class Expanded(RecordMap):
    """Records as the shapes show them, targets as a frame does."""

    shapes: AdditiveBasis
    frame: FeatureBox

    def apply(self, X: Matrix) -> Floats:
        return self.shapes.expand(np.asarray(X, dtype=np.float64))

    def targets(self, y: Targets | None) -> Any:
        return self.frame.targets(y)

    def features_of(self, records: Table) -> int:
        return self.shapes.columns
