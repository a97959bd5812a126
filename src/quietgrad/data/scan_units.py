"""Pieces of a table that are read on their own: row groups of files, slices of frames, partitions of a cluster.

A piece is small and can be sent to another process. It remembers what its file looked like when the scan was made
and refuses a file that looks otherwise, before and after it is read: a sum over half of an old table and half of a
new one is a sum over neither.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quietgrad.data.quick_csv import line_blocks, read_block
from quietgrad.errors import ChangedError, DataError, QuietgradError
from quietgrad.sanitize import sanitize

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
class FileUnit:
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
                f"what "
                "the schema does not say."
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
                f"table "
                "that changes under a run: let it rest, scan it again, and resume or start again."
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


def _parquet(unit: FileUnit, columns: list[str], rows: int) -> Iterator[Any]:
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


def _arrow(unit: FileUnit, columns: list[str], rows: int) -> Iterator[Any]:
    import pyarrow as pa

    with open_file(unit.path, unit.filesystem) as source, pa.ipc.open_file(source) as file:
        wanted = pa.ipc.IpcReadOptions(included_fields=[file.schema.get_field_index(name) for name in columns])
    with open_file(unit.path, unit.filesystem) as source, pa.ipc.open_file(source, options=wanted) as file:
        for group in unit.groups:
            batch = file.get_batch(group).select(columns)
            for start in range(0, batch.num_rows, rows):
                yield batch.slice(start, rows)


def _csv(unit: FileUnit, columns: list[str], rows: int) -> Iterator[Any]:
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


_READERS: dict[str, Callable[[FileUnit, list[str], int], Iterator[Any]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "csv": _csv,
}


@dataclass(frozen=True)
class TableUnit:
    """Some rows of an Arrow table in memory, which never changes."""

    table: Any

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Record batches of at most ``rows`` rows, none of them copied."""
        yield from self.table.select(list(columns)).to_batches(max_chunksize=rows)


def arrow_table(frame: Any) -> Any:
    """A frame of any library as an Arrow table: polars, pandas, or one already.

    >>> import pyarrow as pa
    >>> arrow_table(pa.table({"a": [1, 2]})).num_rows
    2
    """
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
