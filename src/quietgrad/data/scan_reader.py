"""Reading the partitions of a scan: blocks of rows on the cores of this machine, checked on the first reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quietgrad.data.scan_sources import FilePartition, Partition
from quietgrad.data.tables import RowLayout
from quietgrad.errors import DataError
from quietgrad.objectives.base import RecordAdapter
from quietgrad.objectives.privacy_units import ContributionBounds, RecordsWithIds, UnitGrouping
from quietgrad.objectives.tables.scanned import Merge, RowBlock, Task, merged, one_thread_each

Value = TypeVar("Value")
Array = npt.NDArray[Any]
ScanWork = Callable[["ScanParts", Task], Value]


@dataclass(frozen=True)
class ScanParts:
    """Reads the blocks of pieces; sent to threads and workers."""

    layout: RowLayout
    rows: int
    turned: tuple[Callable[[Array, Array], Any], ...] = ()
    whose: ContributionBounds | None = None
    mapped: tuple[Callable[[Array], Array], ...] = ()

    def blocks(self, task: Task) -> Iterator[Any]:
        """What an objective's ``prepare`` takes, block by block."""
        return (self.seen(*block) for block in self.read(task))

    def seen(self, X: Array, y: Array, people: UnitGrouping | None) -> Any:
        """A block as an objective takes it."""
        data: Any = RowBlock(X, y)
        for turned in self.turned:
            data = turned(*data)
        return data if people is None else RecordsWithIds(data, people)

    def read(self, task: Task) -> Iterator[tuple[Array, Array, UnitGrouping | None]]:
        """(X, y) and the people that rows are about, block by block; a person's rows are in one block."""
        if self.whose is not None:
            from quietgrad.data.scan_people import whole_people

            yield from whole_people(self, task, self.whose)
        else:
            yield from ((X, y, None) for X, y, _ in self.rows_of(task.unit, task.rows))

    def rows_of(self, unit: Partition, rows: Array | None = None) -> Iterator[tuple[Array, Array, pa.Array | None]]:
        """(X, y, people's ids) of all rows of a piece, or of those at ``rows``, block by block."""
        seen = 0
        for batch in unit.batches(self.layout.read, self.rows):
            if not batch.num_rows:
                continue
            if rows is not None and not self.layout.may_drop:  # take the sample first: the rest need not be encoded
                wanted = _within(rows, seen, batch.num_rows)
                seen += batch.num_rows
                X, y, kept = self.layout.rows(batch.take(wanted))
            else:
                X, y, kept = self.layout.rows(batch)
                if rows is not None:
                    wanted = _within(rows, seen, len(X))
                    seen += len(X)
                    X, y, kept = X[wanted], y[wanted], kept.take(wanted)
            if rows is not None and not len(wanted):
                continue
            for mapped in self.mapped:
                X = mapped(X)
            ids = None if self.layout.person is None else kept.column(self.layout.person)
            yield X if rows is None else np.ascontiguousarray(X), y, ids


def _within(rows: Array, first: int, count: int) -> Array:
    """Those of the sorted ``rows`` that are among ``count`` ones, by their places there."""
    begin, end = np.searchsorted(rows, (first, first + count))
    return rows[begin:end] - first


@dataclass
class Threads:
    """Does the work on this machine, ``count`` pieces at a time."""

    count: int

    def total(self, parts: ScanParts, work: ScanWork[Value], tasks: Sequence[Task], merge: Merge) -> Value | None:
        """``work`` of all tasks, merged in their order whichever is done first."""
        with one_thread_each(), ThreadPoolExecutor(self.count) as pool:
            return merged(self._in_order(pool, partial(work, parts), tasks), merge)

    def _in_order(
        self, pool: ThreadPoolExecutor, work: Callable[[Task], Value], tasks: Sequence[Task]
    ) -> Iterator[Value]:
        waiting: list[Future[Value]] = []
        try:
            for task in tasks:
                waiting.append(pool.submit(work, task))
                if len(waiting) > self.count:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


_COPY = 100  # rows: shorter files of tables with few different rows may be equal by chance


class Verified(NamedTuple):
    """A piece as it was first read; ``varied`` if not all of its rows are the same."""

    digest: bytes
    rows: int
    varied: bool


@dataclass(frozen=True)
class Verification:
    """Checks a piece as an objective checks a table in memory, and digests its content by columns."""

    reading: RecordAdapter
    digest: bool
    name: str
    width: int

    def __call__(self, parts: ScanParts, task: Task) -> list[Verified]:
        columns = [hashlib.sha256() for _ in range(self.width)] if self.digest else []
        rows, varied, first = 0, False, None
        for X, y, people in parts.read(task):
            if not np.isfinite(X).all():
                raise DataError(
                    f"{self.name}: the features hold gaps, NaN or infinite values. Say in a schema what stands for "
                    "a gap (`fill`), leave such rows out (`drop_incomplete`), or remove them first."
                )
            if y.dtype.kind == "f" and not np.isfinite(y).all():
                raise DataError(
                    f"{self.name}: the target holds NaN or infinite values. Remove those records first."
                )
            self.reading.prepare(parts.seen(X, y, people))
            if not varied and len(X):
                first = X[:1].copy() if first is None else first
                varied = bool((first != X).any())
            rows += len(X)
            if people is not None and columns:
                columns[0].update(people.sizes.tobytes())  # the same rows, otherwise grouped, are another table
            for place, column in enumerate(columns):
                column.update(np.ascontiguousarray(X[:, place], dtype=np.float64).data)
        digest = hashlib.sha256(b"".join(c.digest() for c in columns)).digest()
        return [Verified(digest, rows, varied)]


def copied(pieces: Sequence[Partition], found: Sequence[Verified]) -> bool:
    """Whether two files hold the same rows throughout; files of one and the same row may."""
    files: dict[str, list[Verified]] = {}
    for piece, verified in zip(pieces, found, strict=True):
        if isinstance(piece, FilePartition):
            files.setdefault(piece.path, []).append(verified)
    long = [
        tuple(each.digest for each in of)
        for of in files.values()
        if sum(each.rows for each in of) >= _COPY and any(each.varied for each in of)
    ]
    return len(set(long)) < len(long)
