"""A table that is never in memory: read in parts, each summed by the arithmetic of an ordinary table.

A part is laid out as a :class:`~quietgrad.tables.table.Table`, the query adds it up as it would add up
any table, and the parts' sums are added. A record is in one part, so what it contributes, and the bound on it, are
those of the table: nothing is proved twice. Sums of parts are merged in a tree whose shape depends on the number
of parts alone. One machine with any number of threads and a cluster with any number of workers then add the same
numbers in the same order, and a run that is resumed finds its sums again bit for bit.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch, Indices, Objective, RecordAdapter, StreamedRecords, Summand
from quietgrad.core.session.queries import (
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    LossQuery,
    Query,
    RecursiveMomentumQuery,
)
from quietgrad.tables.privacy_units import (
    MEAN_OF_ALL,
    PersonRule,
    RecordsWithIds,
    UserLevelObjective,
    refuse_person,
)
from quietgrad.tables.queries.counts import CellSums
from quietgrad.tables.range_queries import (
    BoxedQuery,
    FeatureBins,
    FeatureBox,
    MagnitudeHistogram,
    MeanOctaves,
    RangeHistogram,
    TargetMagnitudeHistogram,
    TargetRangeHistogram,
)
from quietgrad.tables.row_cache import CacheWriter, RowCache
from quietgrad.tables.table import Affine, Table
from quietgrad.tables.whitening import (
    CentredMoments,
    CentredNormHistogram,
    FeatureMean,
    MeanSquares,
    RowNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    WhitenedInformation,
)

Floats = npt.NDArray[np.float64]
Value = TypeVar("Value")
Merge = Callable[[Any, Any], Any]


class RowBlock(NamedTuple):
    """Rows of a part and their targets, checked when the table was first read."""

    X: Any
    y: Any


class Task(NamedTuple):
    """A piece of the source, and which of its rows (in increasing order; ``None``: all).

    Of a source that counts people, ``rows`` are people: ``people`` of them begin here, the number of the first
    among all being ``first``. ``number`` is the piece's own: one without rows begins where the next one does.
    """

    unit: Any
    rows: Indices | None
    first: int = 0
    people: int = 0
    number: int = 0

    def __repr__(self) -> str:
        return f"Task({self.unit!r})"  # never the rows: who is in a sample is a secret


class RowCaches(Protocol):
    """Room for rows on the workers of a cluster, as the runner that gives each its own knows it."""

    @property
    def memory(self) -> int: ...  # bytes on each worker


class PartReader(Protocol):
    """Reads parts; small, frozen, and sent to wherever the data lie."""

    def blocks(self, task: Task) -> Iterator[Any]: ...  # what ``prepare`` takes, a few MB at a time


Work = Callable[[PartReader, Task], Value]


@runtime_checkable
class ScanSource(Protocol):
    """Where parts come from; :class:`quietgrad.data.scanning.Scan` is one."""

    @property
    def features(self) -> int: ...

    @property
    def units(self) -> Sequence[Any]: ...  # pieces that can be read on their own

    @property
    def sizes(self) -> Sequence[int]: ...  # rows of each piece

    @property
    def leaves_out(self) -> bool: ...  # whether rows are left out for what they hold

    @property
    def person(self) -> Any: ...  # the column that says whose a row is, or None

    @property
    def whose(self) -> PersonRule | None: ...  # how a person's rows count, if records are people

    def total(self, work: Work[Value], tasks: Sequence[Task], merge: Merge) -> Value | None:
        """``work`` of every task, merged by :func:`merged`; ``None`` if there is none."""

    def row_cache(self) -> RowCache | RowCaches | None:
        """Room for rows that need not be read again, where they are read; ``None`` where there is none."""
        ...

    def verify(self, reading: RecordAdapter) -> None:
        """Read everything once and refuse what ``reading`` cannot use, before anything is reserved."""

    def fingerprint(self) -> Iterator[bytes]:
        """The features' content, whatever the files are called."""
        ...

    def contents(self) -> Iterator[bytes]:
        """The same in the order of the rows."""
        ...


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()  # finding the libraries takes longer than many a sum


def one_thread_each() -> Any:
    """A context in which BLAS uses one thread, which also fixes the order in which it adds."""
    return _blas().limit(limits=1)


def merged(values: Iterable[Value], merge: Merge) -> Value | None:
    """Merge in pairs, pairs of pairs and so on, in order, holding no more than log₂ of the values."""
    waiting: list[tuple[int, Value]] = []
    for value in values:
        height, found = 0, value
        while waiting and waiting[-1][0] == height:
            found = merge(waiting.pop()[1], found)
            height += 1
        waiting.append((height, found))
    return (
        None if not waiting else reduce(lambda later, earlier: merge(earlier, later), [v for _, v in waiting[::-1]])
    )


_ADDITIVE = frozenset({
    GradientQuery, GradientDifferenceQuery, RecursiveMomentumQuery, JointMomentumQuery, LossQuery,
    CellSums, FeatureMean, MeanSquares, SecondMomentMatrix, CentredMoments, RowNormHistogram, CentredNormHistogram,
    WhitenedGradient, WhitenedInformation, FeatureBins, MagnitudeHistogram, MeanOctaves, RangeHistogram,
    TargetMagnitudeHistogram, TargetRangeHistogram,
})  # fmt: skip


def is_additive(query: object) -> bool:
    """Whether the query of a table is the sum of the queries of its parts.

    A query must be known to be so: summed by parts, one whose bound rests on the number of records (a whole fit, of
    which a part has fewer) would tell more of a record than its cost covers.
    """
    while type(query) is BoxedQuery:
        query = query.query
    return type(query) in _ADDITIVE  # a class derived from one of them may add up otherwise


@dataclass(frozen=True)
class _Sum:
    """The sum of one part, as work that can be sent elsewhere."""

    reading: Any
    summand: Summand
    shape: tuple[int, ...]
    key: bytes | None = field(default=None, repr=False)

    def __call__(self, parts: PartReader, task: Task) -> npt.NDArray[np.float64]:
        out = np.zeros(self.shape)
        # A warning about an overflow would tell that there is a record that causes it.
        with np.errstate(all="ignore"):
            for data in parts.blocks(task):
                records = self.reading.prepare(data)
                # Queries about pairs of records refuse samples: a sample of a part must still look like one.
                chosen = None if task.rows is None else np.arange(len(records))
                self.summand(self.reading, Batch(records, chosen, self.key), out)
        return out


def _common_frame(queries: Sequence[Query]) -> FeatureBox | None:
    """The box that all queries see rows in, if it is one and nothing else is between."""
    frames = [query.map if type(query) is BoxedQuery else None for query in queries]
    first = frames[0]
    plain = type(first) is FeatureBox and all(frame is first for frame in frames)
    nested = any(type(query.query) is BoxedQuery for query in queries if isinstance(query, BoxedQuery))
    return first if plain and not nested and isinstance(first, FeatureBox) else None


def _sum_each(queries: Sequence[Query], ends: Sequence[int], reading: Objective, batch: Batch, out: Floats) -> None:
    for query, part in zip(queries, np.split(out, ends[:-1]), strict=True):
        query.sum_into(reading, batch, part)


@dataclass(frozen=True)
class BoxedSum:
    """The sum of one part as a frame shows it: rows in the box, rounded to float32, kept where there is a cache.

    They are rounded with or without a cache, on every machine, so all of them add the same numbers. A row is
    rounded by itself, and its norm is computed from the numbers that are summed: a bound that holds for any row
    holds for this one.
    """

    reading: Any
    frame: FeatureBox
    queries: tuple[Query, ...]
    ends: Sequence[int]
    cache: RowCache | RowCaches | None = field(default=None, repr=False)
    """Of this process; or those of a cluster, where each worker is given its own before it begins."""
    seen: int = 0
    """The number of the transform among those of the run: the cache knows its lengths by it."""

    def __call__(self, parts: PartReader, task: Task) -> npt.NDArray[np.float64]:
        out = np.zeros(self.ends[-1])
        transform = self.transform
        lengths = ("lengths", self.seen, task.number)
        known = self._kept(lengths)
        new = None if known is not None else self._writer(lengths)
        with np.errstate(all="ignore"):
            for records in self._boxed(parts, task):
                if known is not None and transform is not None:
                    records.show(transform, records.by(transform, *next(known)))
                _sum_each(self.queries, self.ends, self.reading, Batch(records, None), out)
                if new is not None and transform is not None:
                    new.add((records.shown(transform).norms,))
        if new is not None and transform is not None:
            new.done()
        return out

    @property
    def transform(self) -> Affine | None:
        """The transform by which the sum sees rows, and needs their lengths."""
        transforms = [query.whitening.transform for query in self.queries if isinstance(query, WhitenedGradient)]
        return transforms[0] if transforms else None

    def _kept(self, key: tuple[object, ...]) -> Iterator[Any] | None:
        return self.cache.get(key) if isinstance(self.cache, RowCache) and key in self.cache else None

    def _writer(self, key: tuple[object, ...]) -> CacheWriter | None:
        return self.cache.writer(key) if isinstance(self.cache, RowCache) else None

    def _boxed(self, parts: PartReader, task: Task) -> Iterator[Table]:
        key = ("rows", task.number)
        kept = self._kept(key)
        if kept is not None:
            task.unit.check()  # nothing is released from a table that changes under a run
            for columns, y in kept:
                yield self._table(columns.T, y)
            return
        writer = self._writer(key)
        for data in parts.blocks(task):
            records = self.reading.prepare(data)
            X = self.frame.rounded(records.X)
            y = self.frame.targets(records.y)
            if writer is not None:
                writer.add((X.T, y))
            yield self._table(X, y)
        if writer is not None:
            writer.done()

    def _table(self, X: Any, y: Any) -> Table:
        return Table(X, y, outputs=self.reading.outputs, intercept=self.reading.column)


class NotScannedError(DataError, AttributeError):
    """A query cannot be answered part by part."""

    code = "QG-SCAN"


@dataclass(frozen=True)
class ScannedPeople:
    """The people of a source, who are counted and never listed; what
    :class:`~quietgrad.tables.privacy_units.UnitGrouping` is of a table in memory.
    """

    source: Any
    rule: PersonRule = MEAN_OF_ALL

    def __len__(self) -> int:
        return int(self.source.people)


class Scanned(StreamedRecords):
    """Records of a source, as an objective reads them; see :class:`quietgrad.core.session.objectives.Records`."""

    def __init__(self, reading: Any, source: ScanSource, dim: int) -> None:
        whose = source.whose
        if whose is None and source.person is not None:
            raise DataError("person: the scan was made with a person column; pass person= here too.")
        # For sums, records are people, block by block.
        loss, reading = reading, reading if whose is None else UserLevelObjective(reading, whose)
        self.reading, self.source, self.dim, self._whose = reading, source, dim, whose
        self.features = source.features
        if whose is None or whose.is_mean_of_all:  # a mean of all of a person's rows has a row's constants
            self.row_bound: float | None = getattr(loss, "row_bound", None)
        self._foreseen: tuple[Query, ...] = ()
        self._sums: list[tuple[Query, Floats]] = []
        self._cache: RowCache | RowCaches | None = None
        self._frame: FeatureBox | None = None  # by which the cached rows are boxed
        self._transforms: list[Affine | None] = []  # of which the cache has lengths of rows
        source.verify(reading)
        self._ends = np.cumsum(np.asarray(source.sizes, dtype=np.int64))
        if not len(self):
            raise DataError("X: has no records.")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def leaves_out(self) -> bool:
        """Whether rows are left out for what they hold, so that their number is no public fact."""
        return self.source.leaves_out

    def __getattr__(self, name: str) -> Any:
        if name == "row_bound":
            refuse_person("a fit without clipping")
        raise NotScannedError(
            f"{name}: a query of this method needs the table in memory. Load the table, or use another method."
        )

    def contents(self) -> Iterator[bytes]:
        """The source's content, its rows in their order: who was drawn by place must lie there again."""
        return self.source.contents()

    def fingerprint_parts(self) -> Iterator[bytes]:
        """The source's content: a ledger knows the table by it."""
        return self.source.fingerprint()

    def foresee(self, *queries: Query) -> None:
        """Questions about all records that come next: one pass then sums for all of them."""
        self._foreseen = tuple(query for query in queries if is_additive(query))

    def answer(self, query: Query, batch: Batch, out: Floats) -> None:
        """out += what ``query`` sums to, part by part."""
        if not is_additive(query):  # it asks the objective for sums, and the objective asks here
            query.sum_into(self.reading, batch, out)
        elif batch.indices is not None or self._chooses:
            self.add(query.sum_into, batch, out)
        else:
            if not any(query is asked for asked, _ in self._sums):
                # Sums of the query and of those foreseen with it, kept until another one is asked.
                together = self._foreseen if any(query is asked for asked in self._foreseen) else (query,)
                self._foreseen = ()
                ends = np.cumsum([asked.dim(self) for asked in together]).tolist()
                sums = np.zeros(ends[-1])
                self._add_all(together, ends, batch, sums)
                self._sums = list(zip(together, np.split(sums, ends[:-1]), strict=True))
            out += next(total for asked, total in self._sums if asked is query)

    def _add_all(self, queries: tuple[Query, ...], ends: Sequence[int], batch: Batch, out: Floats) -> None:
        """out += what all the queries sum to, one after the other, in one pass."""
        frame = _common_frame(queries)
        if frame is None or self._whose is not None:
            self.add(partial(_sum_each, queries, ends), batch, out)
            return
        inner = tuple(query.query for query in queries if isinstance(query, BoxedQuery))
        if frame is not self._frame:  # another box: other rows
            self._cache, self._frame, self._transforms = self.source.row_cache(), frame, []
        work = BoxedSum(self.reading, frame, inner, ends, self._cache)
        if not any(known is work.transform for known in self._transforms):
            self._transforms.append(work.transform)
        seen = next(i for i, known in enumerate(self._transforms) if known is work.transform)
        total = self.source.total(replace(work, seen=seen), self.tasks(None), operator.iadd)
        if total is not None:
            out += total

    def add(self, summand: Summand, batch: Batch, out: Floats) -> None:
        """out += Σ over the parts of what ``summand(reading, batch, out)`` adds."""
        work = _Sum(self.reading, summand, out.shape, batch.key if self._chooses else None)
        total = self.source.total(work, self.tasks(batch.indices), operator.iadd)
        if total is not None:
            out += total

    @property
    def _chooses(self) -> bool:
        """Whether a release uses some of a person's records, by its own key."""
        return self._whose is not None and self._whose.records_per_person is not None

    def labels(
        self, indices: Indices | None, key: bytes | None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
        """Labels and how often each occurs, a person counting once: secret."""
        counts = self.source.total(_CountLabels(key), self.tasks(indices), _join_counts) or Counter()
        found = np.array(sorted(counts))
        return found, np.array([counts[label] for label in found.tolist()], dtype=np.float64)

    def tasks(self, indices: Indices | None) -> list[Task]:
        """The pieces to read, with the rows asked for."""
        firsts = np.concatenate([[0], self._ends[:-1]]).tolist()
        units = zip(self.source.units, firsts, self.source.sizes, strict=True)
        pieces = [Task(unit, None, first, size, number) for number, (unit, first, size) in enumerate(units)]
        if indices is None:
            return pieces
        order = np.sort(indices)
        if len(order) and (order[0] < 0 or order[-1] >= len(self)):
            raise IndexError("batch: an index lies outside the table")
        cuts = np.searchsorted(order, self._ends)
        starts = np.concatenate([[0], cuts[:-1]])
        return [
            piece._replace(rows=order[a:b] - piece.first)
            for piece, a, b in zip(pieces, starts, cuts, strict=True)
            if b > a
        ]


@dataclass(frozen=True)
class _CountLabels:
    """How often each label occurs in a part; of a person's, the one that the release's key chooses."""

    key: bytes | None = field(repr=False)

    def __call__(self, parts: PartReader, task: Task) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        for data in parts.blocks(task):
            rows = data.data if isinstance(data, RecordsWithIds) else data
            labels = np.asarray(rows[1])
            if isinstance(data, RecordsWithIds):
                labels = labels[data.person.one_each(None, self.key)]
            values, sizes = np.unique(labels, return_counts=True)
            counts.update(dict(zip(values.tolist(), sizes.tolist(), strict=True)))
        return counts


def _join_counts(a: Counter[Any], b: Counter[Any]) -> Counter[Any]:
    """Both together, however many labels there are: a limit would tell when one record more exceeds it."""
    more, less = (a, b) if len(a) >= len(b) else (b, a)
    more.update(less)
    return more
