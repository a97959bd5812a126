"""Reading the pieces of a scan: blocks of rows, the next while the last is used, on the cores of this machine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from quietgrad.data.row_layout import Array, RowLayout
from quietgrad.errors import ChangedError
from quietgrad.objectives.privacy_units import ContributionBounds, RecordsWithIds, UnitGrouping
from quietgrad.objectives.tables.scanned import Laid, Merge, Task, Work, merged, one_thread_each

Value = TypeVar("Value")


@dataclass(frozen=True)
class ScanParts:
    """Reads the blocks of pieces; sent to threads and workers."""

    layout: RowLayout
    rows: int
    turned: Callable[[Array, Array], Any] | None = None
    whose: ContributionBounds | None = None
    mapped: Callable[[Array], Array] | None = None

    def blocks(self, task: Task) -> Iterator[Any]:
        """What an objective's ``prepare`` takes, block by block."""
        for X, y, people in self.read(task):
            yield self.seen(X, y, people)

    def seen(self, X: Array, y: Array, people: UnitGrouping | None) -> Any:
        """A block as an objective takes it."""
        data = Laid(X, y) if self.turned is None else self.turned(X, y)
        return data if people is None else RecordsWithIds(data, people)

    def read(self, task: Task) -> Iterator[tuple[Array, Array, UnitGrouping | None]]:
        """(X, y) as the columns say and whose the rows are, block by block; everybody's rows in one block."""
        if self.whose is not None:
            from quietgrad.data.scan_people import whole_people

            yield from whole_people(self, task, self.whose)
        else:
            yield from ((X, y, None) for X, y, _ in self.rows_of(task.unit, task.rows))

    def checksum(self, unit: Any) -> int:
        """A checksum of what a piece holds, however it is then laid out."""
        found = 0
        for batch in unit.batches(self.layout.read, self.rows):
            if batch.num_rows:
                X, y, _ = self.layout.rows(batch)
                found = checksum_of(X, y, found)
        return found

    def _mapped(self, X: Array) -> Array:
        return X if self.mapped is None else self.mapped(X)

    def rows_of(self, unit: Any, rows: Array | None = None) -> Iterator[tuple[Array, Array, Any]]:
        """(X, y, people's ids) of all rows of a piece, or of those at ``rows``, block by block."""
        seen, watched, checksum = 0, hasattr(unit, "checksum"), 0
        batches = unit.batches(self.layout.read, self.rows)
        # The kernel reads local files ahead by itself; a thread for it costs a copy between two cores' caches.
        for batch in _ahead(batches) if getattr(unit, "filesystem", None) is not None else batches:
            if not batch.num_rows:
                continue
            if rows is not None and not (watched or self.layout.may_drop):
                wanted = _between(rows, seen, seen + batch.num_rows)
                seen += batch.num_rows
                if len(wanted):
                    X, y, ids = self.layout.rows(batch.take(_indices(wanted)))
                    yield np.ascontiguousarray(self._mapped(X)), y, ids
                continue
            X, y, ids = self.layout.rows(batch)
            if watched:
                checksum = checksum_of(X, y, checksum)
            if rows is None:
                yield self._mapped(X), y, ids
                continue
            wanted = _between(rows, seen, seen + len(X))
            seen += len(X)
            if len(wanted):
                yield np.ascontiguousarray(self._mapped(X[wanted])), y[wanted], None
        if watched and unit.checksum not in (None, checksum):
            raise ChangedError(
                "frame: a partition has other content than when it was first read. Make the frame's computation "
                "repeatable, or persist it; nothing is released from a table that changes under a run."
            )


def checksum_of(X: Array, y: Array, before: int) -> int:
    """A checksum of rows in memory, going on from ``before``: not secret, and no proof against malice."""
    return zlib.crc32(np.ascontiguousarray(y).tobytes(), zlib.crc32(np.ascontiguousarray(X.T).data, before))


def _between(rows: Array, first: int, last: int) -> Array:
    a, b = np.searchsorted(rows, (first, last))
    return np.asarray(rows[a:b] - first)


def _indices(places: Array) -> Any:
    import pyarrow as pa

    return pa.array(places)


def _ahead(values: Iterator[Value]) -> Iterator[Value]:
    """The same values, the next one being made while the last one is used."""
    done = object()
    with ThreadPoolExecutor(1) as reader:
        waiting: Future[Any] = reader.submit(next, values, done)
        try:
            while (value := waiting.result()) is not done:
                waiting = reader.submit(next, values, done)
                yield value
        finally:
            waiting.cancel()


@dataclass
class Threads:
    """Does the work on this machine, ``count`` pieces at a time."""

    count: int

    def total(self, parts: ScanParts, work: Work[Value], tasks: Sequence[Task], merge: Merge) -> Value | None:
        """``work`` of all tasks, merged in their order whichever is done first."""
        with one_thread_each(), ThreadPoolExecutor(self.count) as pool:
            return merged(_in_order(pool, partial(work, parts), tasks, self.count + 1), merge)


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[Task], Value], tasks: Iterable[Task], most: int
) -> Iterator[Value]:
    waiting: list[Future[Value]] = []
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) >= most:
                yield waiting.pop(0).result()
        while waiting:
            yield waiting.pop(0).result()
    finally:
        for future in waiting:
            future.cancel()
