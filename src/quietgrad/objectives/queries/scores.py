"""How well a model does on held-out records, as a query: one record is right or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quietgrad.objectives.base import Batch, NoRegularizer, Regularizer
from quietgrad.objectives.privacy_units import rows_of


@dataclass(frozen=True, eq=False)
class Correct:
    """How many of the held-out records ``predict`` gets right: each counts 0 or 1, all others 0.

    >>> records = Scoring().prepare((np.array([[0.0], [2.0], [3.0]]), np.array([0, 1, 0])))
    >>> out = np.zeros(1)
    >>> Correct(lambda X: (X[:, 0] > 1) * 1, np.array([0, 1, 2])).sum_into(Scoring(), Batch(records, None), out)
    >>> out
    array([2.])
    """

    predict: Callable[[Any], Any]
    held_out: npt.NDArray[np.integer[Any]]
    bound: float = 1.0

    def dim(self, records: Any) -> int:
        """One count."""
        return 1

    def sum_into(self, objective: Any, batch: Batch, out: npt.NDArray[np.float64]) -> None:
        """out += the number of right answers."""
        shared = rows_of(batch)
        records = shared.records
        if len(self.held_out):
            right = self.predict(records.X[self.held_out]) == records.y[self.held_out]
            out += float((right * shared.of(self.held_out)).sum())


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
        from quietgrad.objectives.tables.layout import lay_out
        from quietgrad.objectives.tables.table import Table

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
