"""How good a model is on held-out people, as one sum: which cell of a public table each person falls into.

A cell is a pair such as (bin of the predicted probability, true class). The model and the bins are public, so a
person's cells depend on that person alone, and accuracy, AUC, log loss, calibration and confusion are all read off
the noisy counts.

How well a model does on held-out records, as a query: one record is right or not.

Which labels a table has, as a query: counts of labels nobody named before, and an objective that holds them.

The number of labels is itself private, so this is no sum of known length: a session answers it by
:meth:`~quietgrad.curators.base.Session.discover`, whose mechanism lets only the frequent ones out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError
from quietgrad.objectives.base import Batch, NoRegularizer, Regularizer
from quietgrad.objectives.privacy_units import UserLevelRecords, rows_of
from quietgrad.privacy.budget import Relation

Floats = npt.NDArray[np.float64]


class CellPlaces:
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
        from quietgrad.objectives.tables.table import Table, lay_out

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
        from quietgrad.objectives.tables.scanned import Scanned, ScanSource

        if isinstance(data, ScanSource):
            return Scanned(self, data, 1)
        cells, weights, *people = data
        cells = np.asarray(cells, dtype=np.int64)
        if cells.ndim != 2 or not len(cells):
            raise DataError("there are no records to evaluate on.")
        weights = np.ones(cells.shape) if weights is None else np.asarray(weights, dtype=np.float64)
        return CellPlaces(cells, weights, *people)

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
        places: CellPlaces = shared.records
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


@dataclass(frozen=True, eq=False)
class MeanScore:
    """Σ over the held-out records of what ``each(X, y)`` gives them, each cut to [0, 1]; all others count 0.

    ``held_out`` are positions of rows. A person's rows count their mean, those that are not held out 0.

    >>> records = Scoring().prepare((np.array([[0.0], [2.0]]), np.array([0.0, 9.0])))
    >>> out = np.zeros(1)
    >>> query = MeanScore(lambda X, y: 1.0 - np.abs(X[:, 0] - y), np.array([0, 1]))
    >>> query.sum_into(Scoring(), Batch(records, None), out)
    >>> out
    array([1.])
    """

    each: Callable[[Any, Any], Any]
    held_out: npt.NDArray[np.integer[Any]]
    bound: float = 1.0

    def dim(self, records: Any) -> int:
        """One number."""
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: npt.NDArray[np.float64]) -> None:
        """out += the sum; what is not a number counts 0."""
        shared = rows_of(batch)
        records = shared.records
        if len(self.held_out):
            from sklearn.utils import _safe_indexing

            scores = np.asarray(self.each(_safe_indexing(records.X, self.held_out), records.y[self.held_out]))
            scores = np.clip(np.nan_to_num(scores, nan=0.0), 0.0, 1.0)
            out += float((scores * shared.of(self.held_out)).sum())


@dataclass(frozen=True, eq=False)
class ScoredRecords:
    """A table as it was given, for models that read it themselves."""

    X: Any
    y: npt.NDArray[Any]
    dim: int = 1

    def __len__(self) -> int:
        return len(self.y)

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything an answer depends on, as bytes."""
        yield from self.fingerprint_parts()
        yield repr(self.y.tolist()).encode()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features as bytes: a ledger knows the table by them."""
        from quietgrad.objectives.tables.table import Table, lay_out

        yield from Table(lay_out(self.X), None).fingerprint_parts()


@dataclass(frozen=True)
class Scoring:
    """An objective for scoring finished models; it fits nothing."""

    regularizer: Regularizer = field(default_factory=NoRegularizer)
    silent_batches: ClassVar[bool] = True

    def prepare(self, data: Any) -> ScoredRecords:
        """``(X, y)`` as the models take them."""
        X, y = data
        return ScoredRecords(X, np.asarray(y))

    def initial(self, records: Any) -> npt.NDArray[np.float64]:
        """There are no parameters."""
        return np.zeros(1)


Labels = npt.NDArray[Any]


@dataclass(frozen=True)
class LabelCounts:
    """One count per label; counts of two neighbours differ by 1 in one place, or by 1 in two: √2 = 2·(1/√2).

    A person of several records counts once, for one of them that the release's key chooses.

    >>> LabelCounts(Relation.ADD_REMOVE).count(Batch(LabelRecords(np.array(["b", "a", "b"])), None))[1].tolist()
    [1.0, 2.0]
    """

    relation: Relation

    @property
    def bound(self) -> float:
        """C: 1 under add-remove, 1/√2 under replace-one, where only the distance of two counts."""
        return 1.0 if self.relation is Relation.ADD_REMOVE else 1.0 / math.sqrt(2.0)

    def count(self, batch: Batch) -> tuple[Labels, npt.NDArray[np.float64]]:
        """The labels of the batch and how often each occurs: secret."""
        from quietgrad.objectives.tables.scanned import Scanned

        records = batch.records
        if isinstance(records, Scanned):
            return records.labels(batch.indices, batch.key)
        if isinstance(records, UserLevelRecords):
            # Not a share of each of theirs: of many labels that nobody else has, one would pass by luck too often.
            rows: Any = records.rows
            labels = rows.labels[records.people.one_each(batch.indices, batch.key)]
        else:
            labels = records.labels if batch.indices is None else records.labels[batch.indices]
        values, counts = np.unique(labels, return_counts=True)
        return values, counts.astype(np.float64)

    def kept(self, labels: Labels, passing: npt.NDArray[np.bool_]) -> Labels:
        """The labels that pass, and nothing else about the others."""
        found = labels[passing]
        # An array of texts is as wide as its longest: that one may be a label that did not pass.
        return np.array(found.tolist(), dtype=found.dtype.kind) if found.dtype.kind in "US" else found


@dataclass(frozen=True, eq=False)
class LabelRecords:
    """The labels of a table and the table's own bytes."""

    labels: Labels
    table: tuple[Any, ...] = ()
    dim: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything an answer depends on, as bytes."""
        yield repr(self.labels.tolist()).encode()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features as bytes: a ledger knows the table by them."""
        for part in self.table:
            yield from part.fingerprint_parts()


@dataclass(frozen=True)
class LabelSet:
    """An objective for looking at labels alone, before it is known what to fit."""

    regularizer: Regularizer = field(default_factory=NoRegularizer)
    silent_batches: ClassVar[bool] = False  # of a person with several records one is drawn

    def prepare(self, data: Any) -> Any:
        """``(X, y)`` with raw labels; only ``y`` is looked at."""
        from quietgrad.objectives.tables.scanned import RowBlock, Scanned, ScanSource
        from quietgrad.objectives.tables.table import Table, lay_out

        if isinstance(data, ScanSource):
            return Scanned(self, data, 1)
        if isinstance(data, RowBlock):
            return LabelRecords(np.asarray(data.y))
        X, y = data
        return LabelRecords(np.asarray(y), (Table(lay_out(X), None),))

    def initial(self, records: Any) -> npt.NDArray[np.float64]:
        """There are no parameters."""
        return np.zeros(1)
