"""Which labels a table has, as a query: counts of labels nobody named before, and an objective that holds them.

The number of labels is itself private, so this is no sum of known length: a session answers it by
:meth:`~quietgrad.curators.base.Session.discover`, whose mechanism lets only the frequent ones out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Batch, NoRegularizer, Regularizer
from quietgrad.objectives.privacy_units import UserLevelRecords
from quietgrad.privacy.budget import Relation

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
        from quietgrad.objectives.tables.layout import lay_out
        from quietgrad.objectives.tables.scanned import Laid, Scanned, Source
        from quietgrad.objectives.tables.table import Table

        if isinstance(data, Source):
            return Scanned(self, data, 1)
        if isinstance(data, Laid):
            return LabelRecords(np.asarray(data.y))
        X, y = data
        return LabelRecords(np.asarray(y), (Table(lay_out(X), None),))

    def initial(self, records: Any) -> npt.NDArray[np.float64]:
        """There are no parameters."""
        return np.zeros(1)
