"""How good a model is on held-out people, as one sum: which cell of a public table each person falls into.

A cell is a pair such as (bin of the predicted probability, true class). The model and the bins are public, so a
person's cells depend on that person alone, and accuracy, AUC, log loss, calibration and confusion are all read off
the noisy counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.objectives.base import Batch, NoRegularizer, Regularizer
from quietgrad.objectives.privacy_units import rows_of
from quietgrad.privacy.budget import Relation

Floats = npt.NDArray[np.float64]


class Places:
    """For each person a row of numbers in [0, 1]: their shares of the cells, sparse as (cell, weight) pairs.

    ``cells`` and ``weights`` have one row per person and one column per group of cells they fall into.
    """

    def __init__(self, cells: npt.NDArray[np.int64], weights: Floats, people: Any = None) -> None:
        self.cells, self.weights, self._people = cells, weights, people
        self.dim = 1

    def __len__(self) -> int:
        return len(self.cells)

    def contents(self) -> Iterator[bytes]:
        """Everything a sum depends on, as bytes."""
        yield self.cells.tobytes()
        yield self.weights.tobytes()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features as bytes, as those of a fit on the same people: a ledger knows the table by them."""
        if self._people is None:
            yield from self.contents()
            return
        from quietgrad.objectives.tables.layout import lay_out
        from quietgrad.objectives.tables.table import Table

        yield from Table(lay_out(self._people), None).fingerprint_parts()


@dataclass(frozen=True)
class Tabulation:
    """What is summed: people's places. It has no parameters to fit; a session needs something to ask.

    >>> places = Tabulation().prepare((np.array([[0], [1], [1]]), None))
    >>> len(places)
    3
    """

    regularizer: Regularizer = field(default_factory=NoRegularizer)
    silent_batches: ClassVar[bool] = False

    def prepare(self, data: Any) -> Any:
        """(cells, weights) or (cells, weights, features of the people), weights ``None`` for ones; or a scan."""
        from quietgrad.objectives.tables.scanned import Scanned, Source

        if isinstance(data, Source):
            return Scanned(self, data, 1)
        cells, weights, *people = data
        cells = np.asarray(cells, dtype=np.int64)
        if cells.ndim != 2 or not len(cells):
            raise DataError("there are no records to evaluate on.")
        weights = np.ones(cells.shape) if weights is None else np.asarray(weights, dtype=np.float64)
        return Places(cells, weights, *people)

    def initial(self, records: Any) -> Floats:
        """Nothing to start from."""
        return np.zeros(1)


@dataclass(frozen=True)
class CellSums:
    """Σ of people's weights by cell. Weights are in [0, 1] and a person has one cell in each of ``groups`` groups.

    A person's vector has no negative entry and norm at most √groups, to which it is cut whatever the weights say;
    under replace-one two of them are at most √(2·groups) apart.

    >>> CellSums(4, 2, Relation.REPLACE_ONE).bound
    1.0
    """

    cells: int
    groups: int
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """√groups, or √(groups/2) where only the distance of two records counts."""
        length = math.sqrt(self.groups)
        return length / math.sqrt(2.0) if self.relation is Relation.REPLACE_ONE else length

    def dim(self, records: Any) -> int:
        """The number of cells."""
        return self.cells

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        """out += the sums; a cell that does not exist counts nowhere."""
        shared = rows_of(batch)
        places: Places = shared.records
        if batch.indices is not None and self.relation is Relation.REPLACE_ONE:
            raise ValueError("a bound on pairs of records needs all of them: plan it with FullBatch() sampling.")
        which = slice(None) if shared.indices is None else shared.indices
        cells, weights = places.cells[which], places.weights[which]
        weights = np.clip(np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        weights = np.where((cells >= 0) & (cells < self.cells), weights, 0.0)
        # Cells of one person that coincide add up before they are squared; the sum of its weights bounds that too.
        ordered = np.sort(cells, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        lengths = np.where(twice, weights.sum(axis=1), np.sqrt((weights**2).sum(axis=1)))
        limit = math.sqrt(self.groups)
        counts = shared.of(which) * limit / np.maximum(lengths, limit) / (1.0 + 1e-12)
        weights = weights * counts[:, None]
        out += np.bincount(np.clip(cells, 0, self.cells - 1).ravel(), weights.ravel(), self.cells)[: self.cells]
