"""Partitions of a scanned table, and their rows as numbers by a public schema.

A partition is a row group of a file or a slice of a frame. It is small and can be sent to another process. It keeps
the state of its file from when the scan was made, and refuses a file that has changed before or while it is read.
Encodings are those of :mod:`quietgrad.data.schema`, applied to the distinct values of a batch, so a scan and a
loaded table hold the same numbers.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quietgrad.data.arrow_csv import coded, line_blocks, read_block
from quietgrad.data.columns import Column, Date, Numeric
from quietgrad.data.dataset import Task, encode_labels
from quietgrad.data.schema import Schema
from quietgrad.errors import ChangedError, DataError, QuietgradError
from quietgrad.sanitize import sanitize

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowLayout:
    """Which columns of a table are features, which is the target, and how they become numbers.

    ``person`` is the column of people's ids, which are no feature.

    Without a ``schema`` features keep their scale. ``classes`` turn targets into codes 0…k−1, ``task="regression"``
    into numbers; without either, labels stay as they are (an estimator decides what they are).
    """

    name: str
    columns: tuple[str, ...]
    target: str | None
    schema: Schema | None = None
    classes: tuple[object, ...] | None = None
    task: Task | None = None
    person: str | None = None

    @property
    def width(self) -> int:
        return len(self.columns) if self.schema is None else self.schema.width

    @property
    def read(self) -> list[str]:
        return [*self.columns, *(name for name in (self.target, self.person) if name is not None)]

    @property
    def may_drop(self) -> bool:
        """Whether rows with a gap are left out."""
        return self.schema is not None and self.schema.drop_incomplete

    def check_types(self, kinds: Any, where: str) -> None:
        """Refuse a file whose columns are missing, or are no numbers and have no vocabulary."""
        import pyarrow as pa

        names = set(kinds.names)
        for column in self.read:
            if column not in names:
                raise DataError(f"{where}: has no column {column!r}.")
        for column in self.columns:
            kind = kinds.field(column).type
            wanted = None if self.schema is None else self.schema.columns[column]
            plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            words = pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
            if wanted is None and not plain:
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}, not a number. Declare it in a "
                    "schema, with bounds or categories."
                )
            if isinstance(wanted, Numeric) and not (plain or pa.types.is_decimal(kind) or words):
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}; its declared bounds need a number."
                )
            days = isinstance(wanted, Date) and pa.types.is_temporal(kind)
            if wanted is not None and not isinstance(wanted, Numeric) and not (plain or words or days):
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}; its categories need words or codes."
                )

    def rows(self, batch: Any) -> tuple[Array, Array, Any]:
        """(X, y, people's ids or ``None``) of a record batch: X column-major, float32 or float64."""
        import pyarrow as pa

        try:
            X = self._plain(batch) if self.schema is None else self._encoded(batch, self.schema)
            y = np.zeros(len(X)) if self.target is None else self.targets(batch.column(self.target))
        except pa.ArrowException:  # its message may quote a cell
            raise DataError(f"{self.name}: has columns that cannot be made numbers.") from None
        ids = None if self.person is None else batch.column(self.person)
        if self.may_drop:
            kept = np.isfinite(X).all(axis=1)
            X, y = X[kept], y[kept]
            ids = None if ids is None else ids.filter(pa.array(kept))
        return X, y, ids

    def _plain(self, batch: Any) -> Array:
        import pyarrow as pa

        chosen = batch.select(list(self.columns))
        wider = {pa.bool_(): pa.uint8(), pa.float16(): pa.float32()}
        if any(field.type in wider for field in chosen.schema):
            columns = [c.cast(wider[c.type]) if c.type in wider else c for c in chosen.columns]
            chosen = pa.RecordBatch.from_arrays(columns, names=list(self.columns))
        X: Array = chosen.to_tensor(null_to_nan=True, row_major=False).to_numpy()
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)

    def _encoded(self, batch: Any, schema: Schema) -> Array:
        X = np.empty((batch.num_rows, schema.width), order="F")
        at = 0
        for column, kind in schema.columns.items():
            X[:, at : at + kind.width] = _encode(kind, column, batch.column(column), schema.missing)
            at += kind.width
        return X

    def targets(self, values: Any) -> Array:
        """The target column as codes, numbers or the labels it holds."""
        import pyarrow as pa

        target = str(self.target)
        if values.null_count:
            raise DataError(f"{self.name}: the target {target!r} has missing entries. Remove those records first.")
        number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        classes = self.classes if self.schema is None else self.schema.classes
        if self.schema is not None and self.schema.label_bounds is not None:
            return np.clip(_numbers(values, target, self.schema), *self.schema.label_bounds)
        if self.task == "regression":
            return _numbers(values, target, self.schema)
        if classes is None and (number or pa.types.is_boolean(values.type)):
            return np.asarray(values.to_numpy(zero_copy_only=False))
        held = coded(values)
        words, codes = held.words, held.codes
        if classes is None:
            if not all(isinstance(word, str) for word in words):
                raise DataError(f"{self.name}: the target {target!r} is neither numbers nor words.")
            return np.asarray(words)[codes]
        told = self.schema.label_word if self.schema is not None else str
        raw = np.array([told(str(word).strip()) for word in words], dtype=object)
        if all(isinstance(label, int | float) for label in classes):
            raw = np.array([float(word) if isinstance(word, bool) else word for word in words], dtype=object)
        numbers: Array = encode_labels(self.name, raw, None, classes)[0]
        return numbers[codes]


def _numbers(values: Any, column: str, schema: Schema | None) -> Array:
    from quietgrad.data.columns import to_numbers

    if hasattr(values.type, "value_type") or str(values.type) in ("string", "large_string"):
        held = coded(values)
        words, codes = held.words, held.codes
        decimal, thousands = (".", "") if schema is None else schema.label_format
        return to_numbers(column, words, decimal=decimal, thousands=thousands)[codes]
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _encode(kind: Column, column: str, values: Any, missing: Sequence[str]) -> Array:
    import pyarrow as pa

    plain = (
        pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_boolean(values.type)
    )
    if isinstance(kind, Numeric) and plain:
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        return kind.encode(column, np.asarray(values.to_numpy(zero_copy_only=False), np.float64), missing)
    held = coded(values)
    if not held.words:
        return np.zeros((0, kind.width))
    return kind.encode(column, held.words, missing)[held.codes]


_PAGE = 1 << 20  # bytes that a page of a column usually has at most
_BUFFER = 1 << 16  # bytes of a column chunk read at a time: a chunk is never held whole
_SMALL = 32 << 20  # bytes of a file whose columns are read at once
LEAST_ROWS = 1 << 15
"""Row groups smaller than this are read together."""


class Stamp(NamedTuple):
    """What tells that a file is the one it was: size, times and place on the disk."""

    size: int
    modified: int
    changed: int = 0
    place: int = 0


@dataclass(frozen=True)
class CSVDialect:
    """How delimited text is read: its delimiter and columns, what means a gap, and the type of each column read."""

    delimiter: str
    names: tuple[str, ...]
    header: bool
    missing: tuple[str, ...]
    kinds: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FilePartition:
    """Some row groups of a file, or all of one that has none."""

    path: str
    filesystem: Any  # of pyarrow; None for this machine's
    kind: str  # parquet, arrow or csv
    stamp: Stamp
    groups: tuple[int, ...] = ()
    dialect: CSVDialect | None = None
    host: str = field(default_factory=platform.node)

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of at most ``rows`` rows."""

        self.check()
        try:
            yield from _READERS[self.kind](self, list(columns), rows)
        except QuietgradError:
            raise
        except Exception:  # whatever a parser has for bytes that are not its own; its message may quote a cell
            self.check()
            raise DataError(
                f"{sanitize(self.path)}: cannot be read as {self.kind}; it may be cut short, or a column holds "
                "what the schema does not say."
            ) from None
        self.check()

    def room(self, columns: Sequence[str]) -> int:
        """Bytes that reading takes beside the rows: of parquet, a page of every column, and dictionaries twice."""
        if self.kind != "parquet":
            return 4 * _PAGE
        facts = parquet_facts(self.path, self.filesystem, self.stamp)
        # pyarrow ends the process if a column's facts are damaged and nobody has read the column before it is asked
        # for them; a reader meets the same damage as an error.
        next(self.batches(columns, 1), None)
        group, total = facts.row_group(self.groups[0]), 0
        for place in range(len(facts.schema)):
            if facts.schema.column(place).path in columns:
                chunk = group.column(place)
                total += min(chunk.total_uncompressed_size, _PAGE) * (3 if chunk.has_dictionary_page else 1)
        return total + (len(columns) * _BUFFER if self.stamp[0] > _SMALL else self.stamp[0])

    def check(self) -> None:
        """Raise unless the file is as it was when the scan was made."""
        now, before = stamp_of(self.path, self.filesystem), self.stamp
        # Machines of a cluster may see one file at different places; its size and time they see alike.
        parts = None if platform.node() == self.host else 2
        if now is None or now[:parts] != before[:parts]:
            raise ChangedError(
                f"{sanitize(self.path)}: the file changed since the scan was made. Nothing is released from a "
                "table that changes under a run: let it rest, scan it again, and resume or start again."
            )


def stamp_of(path: str, filesystem: Any) -> Stamp | None:
    """What the file looks like now; ``None`` if it is gone."""
    if filesystem is None:
        try:
            seen = os.stat(path)
        except OSError:
            return None
        # The time of a change of the file's entry cannot be set back, as that of its content can.
        return Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)
    info = filesystem.get_file_info(path)
    return Stamp(int(info.size), int(info.mtime_ns or 0)) if info.is_file else None


def open_file(path: str, filesystem: Any) -> Any:
    """The file, for reading at any place."""
    import pyarrow as pa

    return pa.OSFile(path) if filesystem is None else filesystem.open_input_file(path)


_FOOTERS: dict[tuple[str, str, Stamp], Any] = {}
_MOST_FOOTERS = 256


def parquet_facts(path: str, filesystem: Any, stamp: Stamp) -> Any:
    """A parquet file's footer, read once for a file that stays as it is."""
    import pyarrow.parquet as pq

    key = (path, "" if filesystem is None else filesystem.type_name, stamp)
    if key not in _FOOTERS:
        with open_file(path, filesystem) as source:
            found = pq.read_metadata(source)
        if len(_FOOTERS) >= _MOST_FOOTERS:
            _FOOTERS.clear()
        _FOOTERS[key] = found
        return found
    return _FOOTERS[key]


def _parquet(unit: FilePartition, columns: list[str], rows: int) -> Iterator[Any]:
    import pyarrow.parquet as pq

    facts = parquet_facts(unit.path, unit.filesystem, unit.stamp)
    kinds = facts.schema.to_arrow_schema()
    words = [name for name in columns if str(kinds.field(name).type) in ("string", "large_string", "binary")]
    # Through a buffer pyarrow makes room for whatever a page's header announces, 2 GiB at most; without one no more
    # than the column has. So no file takes more than 64 times its size.
    buffer = _BUFFER if unit.stamp[0] > _SMALL else 0
    with (
        open_file(unit.path, unit.filesystem) as source,
        pq.ParquetFile(source, metadata=facts, buffer_size=buffer, pre_buffer=False, read_dictionary=words) as file,
    ):
        yield from file.iter_batches(rows, row_groups=list(unit.groups), columns=columns, use_threads=False)


def _arrow(unit: FilePartition, columns: list[str], rows: int) -> Iterator[Any]:
    import pyarrow as pa

    with open_file(unit.path, unit.filesystem) as source, pa.ipc.open_file(source) as file:
        wanted = pa.ipc.IpcReadOptions(included_fields=[file.schema.get_field_index(name) for name in columns])
    with open_file(unit.path, unit.filesystem) as source, pa.ipc.open_file(source, options=wanted) as file:
        for group in unit.groups:
            batch = file.get_batch(group).select(columns)
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def _csv(unit: FilePartition, columns: list[str], rows: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.csv as csv

    dialect = unit.dialect
    assert dialect is not None
    parse = csv.ParseOptions(delimiter=dialect.delimiter, newlines_in_values=True)
    convert = csv.ConvertOptions(
        column_types={name: getattr(pa, kind)() for name, kind in dialect.kinds if name in columns},
        include_columns=list(columns),
        null_values=list(dialect.missing),
        strings_can_be_null=False,
        check_utf8=True,
    )
    first = dialect.header
    with _text_stream(unit.path, unit.filesystem) as stream:
        for block in line_blocks(stream, quoted=True):
            lines = block.partition(b"\n")[2] if first else block
            first = False
            yield from read_block(lines, dialect.names, parse, convert).to_batches(max_chunksize=rows)


def _text_stream(path: str, filesystem: Any) -> Any:
    import pyarrow as pa

    if filesystem is None:
        return pa.input_stream(path, compression="detect")
    return filesystem.open_input_stream(path)


_READERS: dict[str, Callable[[FilePartition, list[str], int], Iterator[Any]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
}


@dataclass(frozen=True)
class TablePartition:
    """Some rows of an Arrow table in memory, which never changes."""

    table: Any

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        yield from self.table.select(list(columns)).to_batches(max_chunksize=rows)


def arrow_table(frame: Any) -> Any:
    """A frame of any library as an Arrow table: polars, pandas, or one already."""
    import pyarrow as pa

    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    if hasattr(frame, "to_arrow"):  # polars shares its memory
        return frame.to_arrow()
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.table(frame)
    if hasattr(frame, "iloc"):
        return pa.Table.from_pandas(frame, preserve_index=False)
    raise DataError("scan: takes paths, an Arrow table, or a frame of polars, pandas or dask.")


def is_frame(value: Any) -> bool:
    """Whether a value is a frame of columns in memory, of any library."""
    if isinstance(value, str | bytes | Path | os.PathLike):
        return False
    return any(hasattr(value, mark) for mark in ("to_arrow", "__arrow_c_stream__", "iloc", "to_batches"))
