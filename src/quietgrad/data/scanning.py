"""`scan`: a table that stays where it is and is read again for every release, in bounded memory.

What a full-batch private method needs of a table is a sum over its rows. So nothing is kept of the rows: pieces of
files are read, laid out, summed and forgotten, the next while the last is summed, on as many cores as there are or
on the workers of a cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from joblib import cpu_count

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import RecordAdapter
from quietgrad.data.dataset import Task as Kind
from quietgrad.data.scan_reader import (
    Array,
    IdRuns,
    RunsOf,
    ScanParts,
    ScanWork,
    Threads,
    UserAlignedPartition,
    Verification,
    copied,
    cut_by_person,
)
from quietgrad.data.scan_sources import FilePartition, Partition, cut_source
from quietgrad.data.schema import SchemaSource, read_schema
from quietgrad.data.tables import RowLayout
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.privacy_units import MEAN_OF_ALL, PersonRule
from quietgrad.tables.row_cache import RowCache
from quietgrad.tables.scanned import Merge, RowBlock, RowCaches, Task

if TYPE_CHECKING:
    from quietgrad.cluster import DaskRunner

Value = TypeVar("Value")

_CELLS = 1 << 21  # numbers of a block: few enough to stay near the processor, many enough to ask for at once
_MOST_ROWS = 44_000  # not a power of two, which would put all columns into the same lines of the cache
_PAGE = 1 << 20  # bytes of a column that a reader may hold unpacked
_SPARE = 40  # MB: what libraries and results take, whatever the table


@dataclass
class _ScanMetadata:
    """Facts that earlier readings found. The views of one scan share those that hold for each."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    sizes: tuple[int, ...] | None = None
    by_person: tuple[tuple[Partition | UserAlignedPartition, ...], tuple[int, ...]] | None = None
    digests: tuple[bytes, ...] | None = None
    passes: list[int] = field(default_factory=lambda: [0])

    def of_rows(self) -> _ScanMetadata:
        """Return the facts that hold for any view of the same rows: the rows of each piece, and the passes."""
        return _ScanMetadata(self.lock, sizes=self.sizes, passes=self.passes)


@dataclass(frozen=True, eq=False)
class Scan:
    """A table on disk that is read in blocks. Made by :func:`scan`."""

    is_source: ClassVar[bool] = True

    layout: RowLayout
    pieces: tuple[Partition, ...]
    runner: Threads | DaskRunner
    rows_at_once: int
    memory: int
    spare: int = 0
    notes: tuple[str, ...] = ()
    turned: tuple[Callable[[Array, Array], Any], ...] = ()
    begun: bool = False
    whose: PersonRule | None = None
    mapping: tuple[Callable[[Array], Array], ...] = ()
    names: tuple[str, ...] | None = None
    _seen: _ScanMetadata = field(default_factory=_ScanMetadata, repr=False)

    def __repr__(self) -> str:
        return f"Scan({self.name!r}, features={self.features}, target={self.layout.target!r})"

    def __len__(self) -> int:
        return sum(self._row_sizes)

    # --- public facts, as of a loaded table -----------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def features(self) -> int:
        return self.layout.width if self.names is None else len(self.names)

    @property
    def feature_names(self) -> tuple[str, ...]:
        schema = self.layout.schema
        if self.names is not None:
            return self.names
        return self.layout.columns if schema is None else schema.feature_names

    @property
    def classes(self) -> tuple[object, ...] | None:
        """The declared classes, whose codes the labels are; ``None`` if labels are as they were found."""
        return self.layout.classes

    @property
    def leaves_out(self) -> bool:
        return self.layout.may_drop

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.features

    @property
    def person(self) -> str | None:
        """The column of people's ids, if what counts as one is a person."""
        return self.layout.person

    @property
    def people(self) -> int:
        """How many people the rows are about; the column of ids is read once to know."""
        return sum(self._people[1])

    @property
    def passes(self) -> int:
        """How often the table was gone through so far, for whole sums and for samples alike."""
        return self._seen.passes[0]

    # --- the source of :mod:`quietgrad.tables.scanned` --------------------------------------------

    @property
    def units(self) -> tuple[Partition | UserAlignedPartition, ...]:
        """The partitions; with privacy unit person, each holds all rows of the people who begin in it."""
        return self.pieces if self.whose is None else self._people[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each piece, or people where they count."""
        return self._row_sizes if self.whose is None else self._people[1]

    @property
    def _row_sizes(self) -> tuple[int, ...]:
        """Rows of each piece; read off the files' own records of them where there are any."""
        with self._seen.lock:
            if self._seen.sizes is None:
                self._seen.sizes = tuple(self._of_all_rows(_count_rows, _join) or ())
            return self._seen.sizes

    @property
    def _people(self) -> tuple[tuple[Partition | UserAlignedPartition, ...], tuple[int, ...]]:
        """The partitions cut so that a person's rows are read together, and the people who begin in each."""
        with self._seen.lock:
            if self._seen.by_person is None:
                if self.person is None:
                    raise DataError("person: name the column of people's ids: scan(..., person=...).")
                read: ScanWork[list[IdRuns]] = RunsOf(self.layout)
                self._seen.by_person = cut_by_person(self.pieces, self._of_all_rows(read, _join) or [])
            return self._seen.by_person

    def _of_all_rows(self, work: ScanWork[Value], merge: Merge) -> Value | None:
        return replace(self, whose=None).total(work, [Task(unit, None) for unit in self.pieces], merge)

    def total(self, work: ScanWork[Value], tasks: Sequence[Task], merge: Merge) -> Value | None:
        """``work`` of every task, merged in a fixed order."""
        self._seen.passes[0] += 1
        parts = ScanParts(self.layout, self.rows_at_once, self.turned, self.whose, self.mapping)
        found: Value | None = self.runner.total(parts, work, tasks, merge)
        return found

    def row_cache(self) -> RowCache | RowCaches | None:
        """Room for rows in the memory that reading leaves, and beyond it in a scratch file; people have none."""
        return None if self.whose is not None else self.runner.row_cache(self.spare)

    def verify(self, reading: RecordAdapter) -> None:
        """Read everything once: refuse gaps, infinities and what ``reading`` cannot use; remember the content."""
        if self.begun:
            return
        firsts = np.cumsum((0, *self.sizes)).tolist() if self.whose is not None else [0] * (len(self.pieces) + 1)
        people = self.sizes if self.whose is not None else firsts
        tasks = [Task(unit, None, a, b) for unit, a, b in zip(self.units, firsts, people, strict=False)]
        with self._seen.lock:
            first = self._seen.digests is None
            found = self.total(Verification(reading, first, self.name, self.features), tasks, _join) or []
            if first:
                if copied(self.pieces, found):
                    raise DataError(
                        f"{self.name}: two files hold the same rows, and each person in them would count twice. "
                        "Name the files that are meant."
                    )
                self._seen.digests = tuple(each.digest for each in found)
            sizes = tuple(each.rows for each in found)
            if self._seen.sizes is None:
                if self.whose is None:
                    self._seen.sizes = sizes
            # Of people with very many rows not all are read; who is there is counted person by person.
            elif (self._seen.sizes != sizes) if self.whose is None else (sum(self._seen.sizes) < sum(sizes)):
                raise DataError(f"{self.name}: has other numbers of rows than its files say; they may be damaged.")

    def contents(self) -> Iterator[bytes]:
        """The content of the features in the order of the rows."""
        assert self._seen.digests is not None
        yield f"scan {self.features}".encode()
        yield from self._seen.digests

    def fingerprint(self) -> Iterator[bytes]:
        """The content of the features: the same whatever the files are called and in whatever order they come."""
        assert self._seen.digests is not None
        yield f"scan {self.features}".encode()
        yield from sorted(self._seen.digests)

    def of_people(self, column: object = None) -> Scan:
        """The same scan, if the column of ids is not named or is the one that the scan was made with."""
        if column is not None and column != self.person:
            raise DataError("person: say it where the scan is made: scan(..., person=COLUMN).")
        return self

    def by_row(self) -> Scan:
        """The same rows without their people: for scores without a privacy guarantee."""
        if self.person is None:
            return self
        return replace(self, layout=replace(self.layout, person=None), whose=None, _seen=self._seen.of_rows())

    def by_person(self, rule: PersonRule = MEAN_OF_ALL) -> Scan:
        """The same people as privacy units: a sum combines each person's records first."""
        return replace(self, whose=rule)

    # --- views ----------------------------------------------------------------------------------------------

    def with_rows(self, turned: Callable[[Array, Array], Any]) -> Scan:
        """The same records, each block seen as ``turned(X, y)``: a public map of one record to one record."""
        return replace(self, turned=(*self.turned, turned))

    def mapped(self, rows: Callable[[Array], Array], names: Sequence[str]) -> Scan:
        """The same records with ``rows(X)`` for their features: a public map of each row, kept nowhere."""
        return replace(
            self,
            mapping=(*self.mapping, rows),
            names=tuple(names),
            rows_at_once=max(256, min(self.rows_at_once, _CELLS // max(1, len(names)))),
            _seen=replace(self._seen.of_rows(), by_person=self._seen.by_person),
        )

    @property
    def bounds(self) -> tuple[tuple[float, float] | None, ...] | None:
        """The ranges that are public: a schema maps every column that it bounds to [0, 1]."""
        if self.layout.schema is None or self.names is not None:
            return None
        return self.layout.schema.feature_bounds

    @property
    def indicators(self) -> frozenset[str]:
        """Features that are 0 or 1 by the schema: one for each category."""
        schema = self.layout.schema
        if schema is None or self.names is not None:
            return frozenset()
        kinds = [kind.zero_one for kind in schema.columns.values() for _ in range(kind.width)]
        return frozenset(name for name, told in zip(self.feature_names, kinds, strict=True) if told)

    def named(self) -> Scan:
        """The same records with the names of their classes for labels, where the classes are declared."""
        return self if self.classes is None else self.labelled(ClassLabels.of(self.classes).decode)

    def undeclared(self) -> int:
        """How many labels are none of the declared classes, read from that column only: for their owner alone."""
        return int(self._of_all_rows(partial(_undeclared, self.layout), np.add) or 0)

    def known(self) -> Scan:
        """The same records for a run that has begun: its next pass refuses what it cannot use, and no other."""
        return replace(self, begun=self._seen.digests is not None)

    def labelled(self, labels: Callable[[Array], Array]) -> Scan:
        """The same records with ``labels(y)`` for their targets."""
        return self.with_rows(partial(_labelled, labels))

    def label_pair(self) -> tuple[int, int] | None:
        """(0, 1) or (−1, 1) if the numbers in the target column are these and no others; reads that column only.

        That a table has two classes and how they are written is taken as public, as when a file is loaded.
        """
        found = self._of_all_rows(partial(_pairs, self.layout), np.logical_and)
        if found is None or not np.any(found):
            return None
        return (0, 1) if found[0] else (-1, 1)

    def blocks(self) -> Iterator[tuple[Array, Array]]:
        """(X, y) of all records in order, a block at a time: for predictions, which need no sum."""
        parts = ScanParts(self.layout, self.rows_at_once, mapped=self.mapping)
        for unit in self.pieces:
            yield from ((X, y) for X, y, _ in parts.rows_of(unit))


def _labelled(labels: Callable[[Array], Array], X: Array, y: Array) -> RowBlock:
    return RowBlock(X, labels(y))


def _join(a: list[Value], b: list[Value]) -> list[Value]:
    return a + b


def _pairs(layout: RowLayout, parts: ScanParts, task: Task) -> Any:
    found = np.array([True, True])
    for batch in task.unit.batches([layout.target], parts.rows):
        labels = layout.targets(batch.column(0))
        for place, pair in enumerate(((0, 1), (-1, 1))):
            found[place] &= labels.dtype.kind in "iufb" and bool(np.isin(labels, pair).all())
    return found


def _undeclared(layout: RowLayout, parts: ScanParts, task: Task) -> Any:
    return np.array(sum(layout.undeclared(batch) for batch in task.unit.batches([layout.target], parts.rows)))


def _count_rows(parts: ScanParts, task: Task) -> list[int]:
    return [sum(len(X) for X, _, _ in parts.rows_of(task.unit))]


def scan(
    source: object,
    *,
    target: str | None = None,
    schema: SchemaSource | None = None,
    columns: Sequence[str] | None = None,
    classes: Sequence[object] | None = None,
    task: Kind | None = None,
    labelled: bool = True,
    person: str | None = None,
    memory: int = 400,
    threads: int | None = None,
    cluster: object = None,
    allow_http: bool = False,
) -> Scan:
    """Open a table that is read in blocks and never loaded whole.

    Estimators, ``minimize`` and the command line take it in place of an array.

    Args:
        source: a path, a pattern such as ``"people/*.parquet"``, a folder, an address (``"s3://…"``), a list of
            them, or a frame: an Arrow table, polars or pandas. Files are Parquet or CSV, compressed or not; rows
            are in the order of the files' names. Addresses are those of pyarrow and of fsspec. A login or a query
            in an address opens it and is shown nowhere.
        target: the column to predict; the last one if not given, or the schema's.
        schema: a public schema (:mod:`quietgrad.data.schema`): types, bounds, categories, what stands for a gap.
            Without it every column must be numbers without gaps.
        columns: the features, where there is no schema; all columns but the target if not given.
        classes: public class labels of the target; an estimator has its own.
        task: ``"binary"``, ``"multiclass"`` or ``"regression"``; an estimator has its own.
        labelled: whether there is a target; not where records are only predicted.
        person: the column of the ids of the people rows are about, by which the whole table must be sorted. The
            guarantee of a fit is then per person, with all their rows.
        memory: MB that reading and summing may take; fewer cores are used where it does not suffice for all. On a
            cluster, of each worker: rows that are read once are kept in what its threads leave of it.
        threads: cores to use; all of this process's by default.
        cluster: ``"local"``, the address of a Dask scheduler, or a Dask client: sums are made by its workers.
        allow_http: whether an address may be plain http, which every machine on the way can read and change.

    Raises:
        DataError: a file is missing, damaged, or not what the schema or the other files say.

    >>> import pyarrow as pa
    >>> table = scan(pa.table({"x": [0.0, 1.0], "z": [1.0, 1.0], "y": [0, 1]}), target="y")
    >>> table.shape, table.feature_names
    ((2, 2), ('x', 'z'))
    """
    if not (isinstance(memory, int | float) and memory > 0):
        raise ValueError(f"memory={memory!r}: must be a number of MB > 0.")
    public = None if schema is None else read_schema(schema)
    if public is not None and (columns is not None or classes is not None):
        raise ValueError("columns, classes: the schema says them already.")
    if public is not None and target not in (None, public.label):
        raise ValueError(f"target={target!r}: the schema's label is {public.label!r}.")
    laying = partial(
        RowLayout.of, schema=public, columns=columns, label=target, classes=classes, task=task, labelled=labelled,
        person=person,
    )  # fmt: skip
    layout, pieces, notes = cut_source(source, laying, public, allow_http=allow_http)
    rows = max(256, min(_MOST_ROWS, _CELLS // max(1, layout.width)))
    units = tuple(unit for unit, _ in pieces)
    one = _block_memory(layout, rows, units)
    if cluster is None:
        runner: Threads | DaskRunner = Threads(_affordable(threads, memory, one, len(layout.read)))
    else:
        from quietgrad.cluster import connected

        runner = connected(cluster)
    spare = max(0, int((memory - _SPARE - runner.count * one) * 2**20))
    sizes = tuple(size for _, size in pieces if size is not None)
    known = None if layout.may_drop or len(sizes) < len(pieces) else sizes
    if known is not None and not sum(known):
        raise DataError(f"{layout.name}: holds no rows.")
    if layout.may_drop:
        notes = (*notes, "rows with a missing entry left out")
    return Scan(layout, units, runner, rows, int(memory), spare, notes, _seen=_ScanMetadata(sizes=known))


def _block_memory(layout: RowLayout, rows: int, units: Sequence[Partition]) -> float:
    """MB that reading and summing one piece takes."""
    read = len(layout.read)
    firsts = {unit.path: unit for unit in reversed(units) if isinstance(unit, FilePartition)}
    held = max((unit.room(layout.read) for unit in firsts.values()), default=read * _PAGE)
    # Two batches read ahead, their rows laid out, a view of them by a frame; and what a reader holds of a file.
    together = 1 if layout.person is None else 2  # a person's rows are kept until all of them have come
    return (together * rows * (2 * read + 3 * layout.width) * 8 + held) / 2**20


def _affordable(threads: int | None, memory: float, one: float, columns: int) -> int:
    """How many pieces of ``one`` MB can be read and summed at a time within ``memory`` MB."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads!r}: must be ≥ 1.")
    wanted = cpu_count() if threads is None else threads
    if _SPARE + one > memory:
        raise DataError(
            f"memory={memory:g}: {columns} columns need about {int(_SPARE + one) + 1} MB to be read a block at a "
            "time. Allow that much, or scan fewer columns."
        )
    return max(1, min(wanted, int((memory - _SPARE) / one)))
