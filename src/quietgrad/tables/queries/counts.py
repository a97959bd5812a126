"""Queries that fit nothing: counts of cells, scores of finished models, and the label set of a table.

Cells score a model on held-out people as one sum. A cell is a pair such as (bin of the predicted probability, true
class). The model and the bins are public, so a person's cells depend on that person alone, and accuracy, AUC, log
loss, calibration and confusion are all computed from the noisy counts.

The number of labels is itself private, so a label count is no sum of known length. A session answers it by
:meth:`~quietgrad.core.session.session.CentralSession.discover`, whose mechanism releases only the frequent labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import PrivacyUnit, Relation
from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch, NoRegularizer, Regularizer, StreamedRecords
from quietgrad.tables.privacy_units import SurveyData, UserLevelRecords, rows_of
from quietgrad.tables.range_queries import check_everyone, pair_bound
from quietgrad.tables.table import Array, Floats, Table, lay_out


@dataclass(frozen=True)
class NothingToFit:
    """An objective without parameters; a session needs one to ask."""

    regularizer: Regularizer = field(default_factory=NoRegularizer)
    silent_batches: ClassVar[bool] = False
    unit: ClassVar[PrivacyUnit] = PrivacyUnit.RECORD

    def initial(self, records: object) -> Floats:
        """Nothing to start from."""
        return np.zeros(1)


@dataclass(frozen=True, eq=False)
class TableRecords:
    """``features`` are the rows as they were given: a ledger knows the table by them."""

    features: Any
    dim: ClassVar[int] = 1

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features as bytes, as those of a fit on the same people."""
        if self.features is not None:
            yield from Table(lay_out(self.features), None).fingerprint_parts()


@dataclass(frozen=True, eq=False)
class CellPlaces(TableRecords):
    """For each person a row of numbers in [0, 1]: their shares of the cells, sparse as (cell, weight) pairs.

    ``cells`` and ``weights`` have one row per person and one column per group of cells they fall into.
    """

    cells: npt.NDArray[np.int64]
    weights: Floats
    sample_weights: Floats | None = None
    """What each person counts, in [0, 1]; ``None`` if all count 1."""

    def __len__(self) -> int:
        return len(self.cells)

    def contents(self) -> Iterator[bytes]:
        """Everything a sum depends on, as bytes."""
        yield self.cells.tobytes()
        yield self.weights.tobytes()
        yield b"" if self.sample_weights is None else self.sample_weights.tobytes()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features, or the cells where no features are known."""
        return self.contents() if self.features is None else super().fingerprint_parts()


@dataclass(frozen=True)
class Tabulation(NothingToFit):
    """The objective of :class:`CellSums`: it holds people's cells.

    >>> places = Tabulation().prepare((np.array([[0], [1], [1]]), None))
    >>> len(places)
    3
    """

    def prepare(self, data: Any) -> Any:
        """(cells, weights) or (cells, weights, features of the people), weights ``None`` for ones; or a scan."""
        from quietgrad.tables.scanned import Scanned, ScanSource

        if isinstance(data, ScanSource):
            return Scanned(self, data, 1)
        data, survey = SurveyData.of(data)
        cells, weights, *people = data
        cells = np.asarray(cells, dtype=np.int64)
        if cells.ndim != 2:
            raise DataError("cells: must be one row of cells per record.")
        weights = np.ones(cells.shape) if weights is None else np.asarray(weights, dtype=np.float64)
        return CellPlaces(people[0] if people else None, cells, weights, survey)


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
        return pair_bound(math.sqrt(self.groups), self.relation)

    def k_norm_bound(self, width: int) -> float:
        """``groups``, a person's weights together; each cell is a block of its own."""
        if width != 1:
            raise ValueError(f"width={width}: cells are blocks of one number.")
        return float(self.groups)

    def dim(self, records: object) -> int:
        return self.cells

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        """out += the sums; a cell that does not exist counts nowhere."""
        check_everyone(batch, self.relation)
        shared = rows_of(batch)
        places: CellPlaces = shared.records
        which = slice(None) if shared.indices is None else shared.indices
        cells, weights = places.cells[which], places.weights[which]
        weights = np.clip(np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0), 0.0, 1.0)
        weights = np.where((cells >= 0) & (cells < self.cells), weights, 0.0)
        # Cells of one person that coincide add up before they are squared; the sum of its weights bounds that too.
        ordered = np.sort(cells, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        lengths = np.where(twice, weights.sum(axis=1), np.sqrt((weights**2).sum(axis=1)))
        limit = math.sqrt(self.groups)
        # Both bounds hold for every person: in L2, and of the weights together.
        shorter = np.minimum(
            limit / np.maximum(lengths, limit), self.groups / np.maximum(weights.sum(axis=1), self.groups)
        )
        counts = shared.of(which) * shorter / (1.0 + 1e-12)
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
    held_out: npt.NDArray[np.int64]
    bound: float = 1.0

    def dim(self, records: object) -> int:
        return 1

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        """out += the sum; what is not a number counts 0."""
        shared = rows_of(batch)
        records = shared.records
        if len(self.held_out):
            from sklearn.utils import _safe_indexing

            scores = np.asarray(
                self.each(_safe_indexing(records.features, self.held_out), records.labels[self.held_out])
            )
            scores = np.clip(np.nan_to_num(scores, nan=0.0), 0.0, 1.0)
            out += float((scores * shared.of(self.held_out)).sum())


@dataclass(frozen=True, eq=False)
class TargetRecords(TableRecords):
    """A table's labels or targets, and its features for models that read them themselves."""

    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self) -> Iterator[bytes | memoryview]:
        """Everything an answer depends on, as bytes."""
        yield from self.fingerprint_parts()
        yield repr(self.labels.tolist()).encode()


@dataclass(frozen=True)
class Scoring(NothingToFit):
    """The objective of :class:`MeanScore`: it holds the table for finished models."""

    silent_batches: ClassVar[bool] = True

    def prepare(self, data: Any) -> TargetRecords:
        """``(X, y)`` as the models take them."""
        X, y = data
        return TargetRecords(X, np.asarray(y))


@dataclass(frozen=True)
class LabelCounts:
    """One count per label; counts of two neighbours differ by 1 in one place, or by 1 in two: √2 = 2·(1/√2).

    A person of several records counts once, for one of them that the release's key chooses.

    >>> labels = TargetRecords(None, np.array(["b", "a", "b"]))
    >>> LabelCounts(Relation.ADD_REMOVE).count(Batch(labels, None))[1].tolist()
    [1.0, 2.0]
    """

    relation: Relation

    @property
    def bound(self) -> float:
        """C: 1 under add-remove, 1/√2 under replace-one, where only the distance of two counts."""
        return pair_bound(1.0, self.relation)

    def k_norm_bound(self, width: int) -> float:
        """1: a unit adds 1 to one count, and each count is a block of its own."""
        if width != 1:
            raise ValueError(f"width={width}: counts are blocks of one number.")
        return 1.0

    def count(self, batch: Batch) -> tuple[Array, Floats]:
        """The labels of the batch and how often each occurs: secret."""
        records = batch.records
        if isinstance(records, StreamedRecords):
            return records.labels(batch.indices, batch.key)
        if isinstance(records, UserLevelRecords):
            # Not a share of each of theirs: of many labels that one person alone has, one would often pass by luck.
            rows: Any = records.rows
            labels = rows.labels[records.people.one_each(batch.indices, batch.key)]
        else:
            labels = records.labels if batch.indices is None else records.labels[batch.indices]
        values, counts = np.unique(labels, return_counts=True)
        return values, counts.astype(np.float64)

    def kept(self, labels: Array, passing: npt.NDArray[np.bool_]) -> Array:
        """The labels that pass, and nothing else about the others."""
        found = labels[passing]
        # An array of texts is as wide as its longest: that one may be a label that did not pass.
        return np.array(found.tolist(), dtype=found.dtype.kind) if found.dtype.kind in "US" else found


@dataclass(frozen=True)
class LabelSet(NothingToFit):
    """The objective of :class:`LabelCounts`: it holds labels alone, before it is known what to fit."""

    def prepare(self, data: Any) -> Any:
        """``(X, y)`` with raw labels; only ``y`` is counted."""
        from quietgrad.tables.scanned import RowBlock, Scanned, ScanSource

        if isinstance(data, ScanSource):
            return Scanned(self, data, 1)
        X, y = SurveyData.of(data)[0]
        return TargetRecords(None if isinstance(data, RowBlock) else X, np.asarray(y))
