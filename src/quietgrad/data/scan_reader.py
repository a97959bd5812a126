"""Reading the partitions of a scan: blocks of rows on the cores of this machine, checked on the first reading.

With people as privacy units, which rows are whose must be known without a list of the people. So ids must not
decrease from row to row: equal ones then lie together, and a person's rows can be read as one block. That is
checked in every pass, in the memory of one id. A person whose rows go on in the next pieces belongs to the piece
where they begin: its reader goes on reading there, and the next piece leaves them out. No person is summed in
fragments, in any process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from quietgrad.core.errors import ChangedError, DataError
from quietgrad.core.session.objectives import RecordAdapter
from quietgrad.data.scan_sources import FilePartition, Partition
from quietgrad.data.tables import RowLayout
from quietgrad.tables.person_ids import KINDS, MISSING, NO_ONE, is_plain_text, whole_numbers
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UnitGrouping
from quietgrad.tables.row_cache import RowCache
from quietgrad.tables.scanned import Merge, RowBlock, Task, merged, one_thread_each

Value = TypeVar("Value")
Array = npt.NDArray[Any]
ScanWork = Callable[["ScanParts", Task], Value]


@dataclass(frozen=True)
class ScanParts:
    """Reader of the blocks of pieces. It is sent to threads and workers."""

    layout: RowLayout
    rows: int
    turned: tuple[Callable[[Array, Array], Any], ...] = ()
    whose: PersonRule | None = None
    mapped: tuple[Callable[[Array], Array], ...] = ()

    def blocks(self, task: Task) -> Iterator[Any]:
        """Iterate over the blocks of a task, each as an objective's ``prepare`` takes it."""
        return (self.seen(*block) for block in self.read(task))

    def seen(self, X: Array, y: Array, people: UnitGrouping | None) -> Any:
        """Return a block as an objective takes it."""
        data: Any = RowBlock(X, y)
        for turned in self.turned:
            data = turned(*data)
        return data if people is None else RecordsWithIds(data, people)

    def read(self, task: Task) -> Iterator[tuple[Array, Array, UnitGrouping | None]]:
        """Yield (X, y) and the people that rows are about, block by block. A person's rows are in one block."""
        if self.whose is not None:
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
                X, y, kept_batch = self.layout.rows(batch.take(wanted))
            else:
                X, y, kept_batch = self.layout.rows(batch)
                if rows is not None:
                    wanted = _within(rows, seen, len(X))
                    seen += len(X)
                    X, y, kept_batch = X[wanted], y[wanted], kept_batch.take(wanted)
            if rows is not None and not len(wanted):
                continue
            for mapped in self.mapped:
                X = mapped(X)
            ids = None if self.layout.person is None else kept_batch.column(self.layout.person)
            yield X if rows is None else np.ascontiguousarray(X), y, ids


def _within(rows: Array, first: int, count: int) -> Array:
    """Those of the sorted ``rows`` that are among ``count`` ones, by their places there."""
    begin, end = np.searchsorted(rows, (first, first + count))
    return rows[begin:end] - first


@dataclass
class Threads:
    """Does the work on this machine, ``count`` pieces at a time."""

    count: int

    def row_cache(self, memory: int) -> RowCache:
        """Room for rows in this process."""
        return RowCache(memory)

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


def copied(pieces: Sequence[Partition], checksums: Sequence[Verified]) -> bool:
    """Whether two files hold the same rows throughout. Files that repeat a single row do not count."""
    files: dict[str, list[Verified]] = {}
    for piece, verified in zip(pieces, checksums, strict=True):
        if isinstance(piece, FilePartition):
            files.setdefault(piece.path, []).append(verified)
    long = [
        tuple(each.digest for each in of)
        for of in files.values()
        if sum(each.rows for each in of) >= _COPY and any(each.varied for each in of)
    ]
    return len(set(long)) < len(long)


# --- people -------------------------------------------------------------------------------------------------

UNSORTED = (
    "person: the rows of a scan must be sorted by the column of people's ids, so that each person's lie together. "
    "Sort the whole table by it, over all its files, and write it again."
)
_CHANGED = (
    "person: the ids are not those of the first reading. Nothing is released from a table that changes under a "
    "run: let it rest, scan it again, and resume or start again."
)


@dataclass(frozen=True)
class UserAlignedPartition:
    """A piece without its first ``skip`` rows, which belong to a person who began earlier, and with the ``tail`` of
    its own last person: the first rows of later pieces.
    """

    unit: Partition
    skip: int
    tail: tuple[tuple[Partition, int], ...] = ()


@dataclass(frozen=True)
class IdRuns:
    """Summary of the person ids in a piece. It is secret, and held only while the scan is being cut.

    ``orders`` says whether ids never decrease: by value, and of texts by length first, as whole numbers do.
    """

    kind: str
    first: Any
    last: Any
    rows: int
    people: int
    head: int
    orders: tuple[bool, bool]

    def __repr__(self) -> str:
        return "IdRuns()"

    def then(self, other: IdRuns) -> IdRuns:
        """Return the summary of both pieces, one after the other."""
        if not self.rows or not other.rows:
            return self if self.rows else other
        if self.kind != other.kind:
            raise DataError(KINDS)
        same = self.last == other.first
        by_value = by_length = bool(self.last <= other.first)
        if isinstance(self.last, str | bytes):
            before, after = (len(id.encode() if isinstance(id, str) else id) for id in (self.last, other.first))
            by_length = before < after or (before == after and by_value)
        return IdRuns(
            self.kind,
            self.first,
            other.last,
            self.rows + other.rows,
            self.people + other.people - same,
            self.head + other.head if same and self.people == 1 else self.head,
            (
                self.orders[0] and other.orders[0] and by_value,
                self.orders[1] and other.orders[1] and by_length,
            ),
        )


_EMPTY = IdRuns("", None, None, 0, 0, 0, (True, True))


def comparable(values: pa.Array) -> tuple[str, pa.Array]:
    """(kind of ids, the ids as an Arrow column of numbers, texts or bytes); times become numbers."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        raise DataError(MISSING)
    kind, types = values.type, pa.types
    if types.is_floating(kind):
        return "number", pa.array(whole_numbers(values.to_numpy(zero_copy_only=False)))
    if types.is_integer(kind):  # files may hold one id in different widths
        return "number", values if types.is_uint64(kind) else values.cast(pa.int64())
    if types.is_string(kind) or types.is_large_string(kind):
        return "text", values.cast(pa.large_string())
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes", values.cast(pa.large_binary())
    if types.is_date32(kind):
        return str(kind), values.cast(pa.int32())
    if types.is_date64(kind) or types.is_timestamp(kind):
        return str(kind), values.cast(pa.int64())
    raise DataError(KINDS)


def starts_of(ids: pa.Array) -> tuple[Array, tuple[bool, bool]]:
    """Where people begin among sorted ids, and whether they are: by value, and by length before value."""
    before, after = ids.slice(0, len(ids) - 1), ids.slice(1)
    begins = np.asarray(pc.not_equal(after, before).to_numpy(zero_copy_only=False), dtype=bool)
    less = np.asarray(pc.less(after, before).to_numpy(zero_copy_only=False), dtype=bool)
    by_length = not less.any()
    if not pa.types.is_integer(ids.type):
        sizes = np.asarray(pc.binary_length(ids).to_numpy(zero_copy_only=False), dtype=np.int64)
        shorter, as_long = sizes[1:] < sizes[:-1], sizes[1:] == sizes[:-1]
        by_length = not (shorter | (as_long & less)).any()
    starts = np.concatenate([[0], np.flatnonzero(begins) + 1]).astype(np.int64)
    return starts, (not less.any(), bool(by_length))


@dataclass(frozen=True)
class RunsOf:
    """The people of a piece, as work: reads the ids alone where no rows are left out."""

    layout: RowLayout

    def __call__(self, parts: ScanParts, task: Task) -> list[IdRuns]:
        runs = _EMPTY
        if self.layout.may_drop:  # only all columns together tell which rows are left out
            columns = (ids for _, _, ids in parts.rows_of(task.unit))
        else:
            columns = (batch.column(0) for batch in task.unit.batches([self.layout.person], 1 << 17))
        for values in columns:
            kind, ids = comparable(values)
            if not len(ids):
                continue
            starts, orders = starts_of(ids)
            for text in ids.take(starts).to_pylist() if kind in ("text", "bytes") else ():
                if not len(text) or text in NO_ONE:
                    raise DataError(MISSING)
                if not is_plain_text(text):
                    raise DataError(
                        "person: an id has spaces around or doubled, accents written in parts, or what cannot be "
                        "seen. Write ids plainly: ones that look alike would be taken for two people."
                    )
            head = int(starts[1]) if len(starts) > 1 else len(ids)
            some = IdRuns(kind, ids[0].as_py(), ids[-1].as_py(), len(ids), len(starts), head, orders)
            runs = runs.then(some)
        return [runs]


def cut_by_person(
    units: Sequence[Partition], runs: Sequence[IdRuns]
) -> tuple[tuple[Partition | UserAlignedPartition, ...], tuple[int, ...]]:
    """The partitions with a person's rows in one of them, and how many people begin in each.

    Raises:
        DataError: ids are not sorted.
    """
    everyone = _EMPTY
    for person_runs in runs:
        everyone = everyone.then(person_runs)
    if not any(everyone.orders):
        raise DataError(UNSORTED)
    pieces: list[Partition | UserAlignedPartition] = list(units)
    people = [person_runs.people for person_runs in runs]
    owner, last = -1, None
    for place, person_runs in enumerate(runs):
        if not person_runs.rows:
            continue
        if owner >= 0 and person_runs.first == last:
            begun = pieces[owner]
            if not isinstance(begun, UserAlignedPartition):
                begun = UserAlignedPartition(begun, 0)
            pieces[owner] = replace(begun, tail=(*begun.tail, (units[place], person_runs.head)))
            pieces[place] = UserAlignedPartition(units[place], person_runs.head)
            people[place] -= 1
        if people[place]:
            owner = place
        last = person_runs.last
    return tuple(pieces), tuple(people)


def whole_people(parts: ScanParts, task: Task, whose: PersonRule) -> Iterator[tuple[Array, Array, UnitGrouping]]:
    """Yield (rows, targets, their people) by block, of the people who begin in a piece or of those asked for.

    Of a person with more rows than one block, only the first rows, as many as a block has, are used. This rule
    depends on that person's rows alone, while an error would stop the fit of all people.
    """
    if not task.people:
        return
    carried_rows: tuple[Array, Array, Any] | None = None
    met, orders = 0, (True, True)
    for X, y, ids in _carried(parts, task.unit):
        if carried_rows is not None:
            joined = pa.concat_arrays([carried_rows[2], ids]) if carried_rows[2].type == ids.type else None
            if joined is None:
                raise DataError(KINDS)
            X, y, ids = np.concatenate([carried_rows[0], X]), np.concatenate([carried_rows[1], y]), joined
        starts, here = starts_of(ids)
        orders = (orders[0] and here[0], orders[1] and here[1])
        if not any(orders):
            raise DataError(UNSORTED)
        end = int(starts[-1])  # the last person may go on in the next block
        if end:
            yield from _asked(X[:end], y[:end], starts, met, task, whose, parts.rows)
            met += len(starts) - 1
        carried_rows = X[end : end + parts.rows], y[end : end + parts.rows], ids.slice(end, parts.rows)
    if carried_rows is not None:
        yield from _asked(
            carried_rows[0], carried_rows[1], np.array([0, len(carried_rows[0])]), met, task, whose, parts.rows
        )
        met += 1
    if met != task.people:
        raise ChangedError(_CHANGED)


def _asked(
    X: Array, y: Array, starts: Array, met: int, task: Task, whose: PersonRule, most: int
) -> Iterator[tuple[Array, Array, UnitGrouping]]:
    sizes = np.diff(starts)
    if (sizes > most).any():
        first = np.flatnonzero(np.arange(starts[-1]) - np.repeat(starts[:-1], sizes) < most)
        X, y = X[first], y[first]
        starts = np.concatenate([[0], np.cumsum(np.minimum(sizes, most))])
    numbers = np.arange(met, met + len(starts) - 1)
    people = UnitGrouping(np.arange(len(X)), starts, whose, task.first + numbers)
    if task.rows is None:
        yield np.ascontiguousarray(X), y, people
        return
    wanted = np.flatnonzero(np.isin(numbers, task.rows, assume_unique=True))
    if len(wanted):
        rows, only = people.only(wanted)
        yield np.ascontiguousarray(X[rows]), y[rows], only


def _carried(parts: ScanParts, unit: Partition | UserAlignedPartition) -> Iterator[tuple[Array, Array, Any]]:
    """The rows of a piece from the first person who begins in it to the end of its last one."""
    if not isinstance(unit, UserAlignedPartition):
        yield from ((X, y, comparable(ids)[1]) for X, y, ids in parts.rows_of(unit) if len(X))
        return
    left, before, last = unit.skip, None, None
    for X, y, values in parts.rows_of(unit.unit):
        if not len(X):
            continue
        ids = comparable(values)[1]
        gone = min(left, len(X))
        left -= gone
        for id in (ids[0].as_py(), ids[gone - 1].as_py()) if gone else ():
            if id != (id if before is None else before):  # those who are left out are one person
                raise ChangedError(_CHANGED)
            before = id
        if gone < len(X):
            if last is None and before is not None and ids[gone].as_py() == before:
                raise ChangedError(_CHANGED)
            last = ids[-1].as_py()
            yield X[gone:], y[gone:], ids.slice(gone)
    for other, rows in unit.tail:
        for X, y, values in parts.rows_of(other):
            ids = comparable(values)[1].slice(0, rows)
            if len(ids) and (ids[0].as_py() != last or ids[-1].as_py() != last):
                raise ChangedError(_CHANGED)
            if len(ids):
                yield X[: len(ids)], y[: len(ids)], ids
            rows -= len(ids)
            if not rows:
                break
        left += rows
    if left:
        raise ChangedError(_CHANGED)
