"""Sources of a scan, cut into partitions: files by path, pattern, folder or address, and frames in memory.

A partition is some row groups of a file or a slice of a frame. It is small and can be sent to another process. It
keeps the state of its file from when the scan was made, and refuses a file that has changed before or while it is
read.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from quietgrad.core.errors import ChangedError, DataError, QuietgradError, boundary
from quietgrad.core.files import PACKED, table_kind
from quietgrad.core.sanitize import sanitize
from quietgrad.data.address import Address, guarded, open_addresses, pattern_root, public
from quietgrad.data.delimited import CSVDialect
from quietgrad.data.schema import Schema
from quietgrad.data.tables import RowLayout

_LONGEST_HEADER = 1 << 22
_BLOCK = 1 << 20  # bytes of text read at a time
_LONGEST_LINE = 1 << 26
_PAGE = 1 << 20  # bytes that a page of a column usually has at most
_BUFFER = 1 << 16  # bytes of a column chunk read at a time: a chunk is never held whole
_SMALL = 32 << 20  # bytes of a file whose columns are read at once
LEAST_ROWS = 1 << 15
"""Row groups smaller than this are read together."""


class Stamp(NamedTuple):
    """State of a file by which a change is detected: size, times and place on the disk."""

    size: int
    modified: int
    changed: int = 0
    place: int = 0


@dataclass(frozen=True)
class FilePartition:
    """Some row groups of a parquet file, or all of a CSV file."""

    path: str
    filesystem: fs.FileSystem
    stamp: Stamp
    groups: tuple[int, ...] = ()
    dialect: CSVDialect | None = None
    kinds: tuple[tuple[str, pa.DataType], ...] = ()
    host: str = field(default_factory=platform.node)

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Record batches of at most ``rows`` rows."""
        self.check()
        try:
            yield from self._parquet(list(columns), rows) if self.dialect is None else self._csv(columns, rows)
            is_read = True
        except QuietgradError:
            raise
        except Exception:  # whatever a parser has for bytes that are not its own; its message may quote a cell
            is_read = False
        self.check()
        if not is_read:
            raise DataError(_unreadable(self.path))

    def _parquet(self, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        facts = parquet_facts(self.path, self.filesystem, self.stamp)
        kinds = facts.schema.to_arrow_schema()
        # Words stay codes into a short list: one long word in a million rows is stored once.
        words = [name for name in columns if str(kinds.field(name).type) in ("string", "large_string", "binary")]
        # Through a buffer pyarrow makes room for whatever a page's header announces, 2 GiB at most; without one no
        # more than the column has. So no file takes more than 64 times its size.
        buffer = _BUFFER if self.stamp.size > _SMALL else 0
        with (
            self.filesystem.open_input_file(self.path) as source,
            pq.ParquetFile(
                source, metadata=facts, buffer_size=buffer, pre_buffer=False, read_dictionary=words
            ) as file,
        ):
            yield from file.iter_batches(rows, row_groups=list(self.groups), columns=columns, use_threads=False)

    def _csv(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        assert self.dialect is not None
        kinds = {name: kind for name, kind in self.kinds if name in columns}
        first, seen = True, 0
        with self.filesystem.open_input_stream(self.path) as stream:
            for block in line_blocks(stream):
                lines = self.dialect.body(block) if first else block
                first = False
                table = self.dialect.table(lines, kinds, sanitize(self.path), before=seen)
                seen += table.num_rows
                yield from table.to_batches(max_chunksize=rows)

    def room(self, columns: Sequence[str]) -> int:
        """Bytes that reading takes beside the rows: of parquet, a page of every column, and dictionaries twice."""
        if self.dialect is not None:
            return 4 * _PAGE
        facts = parquet_facts(self.path, self.filesystem, self.stamp)
        # pyarrow ends the process if a column's facts are damaged and the column was not read before it is asked
        # for them; a reader meets the same damage as an error.
        next(self.batches(columns, 1), None)
        group, total = facts.row_group(self.groups[0]), 0
        for place in range(len(facts.schema)):
            if facts.schema.column(place).path in columns:
                chunk = group.column(place)
                total += min(chunk.total_uncompressed_size, _PAGE) * (3 if chunk.has_dictionary_page else 1)
        return total + (len(columns) * _BUFFER if self.stamp.size > _SMALL else self.stamp.size)

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


@dataclass(frozen=True)
class TablePartition:
    """Some rows of an Arrow table in memory, which never changes."""

    table: pa.Table

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Record batches of at most ``rows`` rows."""
        yield from self.table.select(list(columns)).to_batches(max_chunksize=rows)

    def check(self) -> None:
        """A table in memory is what it was."""


Partition: TypeAlias = FilePartition | TablePartition


def line_blocks(stream: pa.NativeFile) -> Iterator[bytes]:
    """The lines of a stream, about a MB at a time; a line may hold ends of lines within quotes.

    A reader of pyarrow that streams reads ahead in threads of its own, which may still do so when it is closed
    early. So blocks are cut here, and each is read by a call that is done when it returns.
    """
    kept = b""
    while piece := stream.read(_BLOCK):
        block = kept + piece if kept else bytes(piece)
        end = block.rfind(b"\n") + 1
        odd = block.count(b'"', 0, end) % 2
        while odd and end:  # inside quotes: back to an end of a line that is outside
            before = block.rfind(b"\n", 0, max(block.rfind(b'"', 0, end), 0)) + 1
            odd = (odd + block.count(b'"', before, end)) % 2
            end = before
        if end:
            yield block[:end]
        kept = block[end:]
        if len(kept) > _LONGEST_LINE:
            raise OSError("a line without an end")
    if kept:
        yield kept


def stamp_of(path: str, filesystem: fs.FileSystem) -> Stamp | None:
    """Return the current stamp of a file, or ``None`` if it is gone."""
    if isinstance(filesystem, fs.LocalFileSystem):
        try:
            seen = os.stat(path)
        except OSError:
            return None
        # The time of a change of the file's entry cannot be set back, as that of its content can.
        return Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)
    info = guarded(lambda: filesystem.get_file_info(path), f"{sanitize(path)}: cannot be reached.")
    return Stamp(int(info.size), int(info.mtime_ns or 0)) if info.is_file else None


_FOOTERS: dict[tuple[str, str, Stamp], pq.FileMetaData] = {}
_MOST_FOOTERS = 256


def parquet_facts(path: str, filesystem: fs.FileSystem, stamp: Stamp) -> pq.FileMetaData:
    """A parquet file's footer, read once for a file that stays as it is."""
    key = (path, filesystem.type_name, stamp)
    if key not in _FOOTERS:
        if len(_FOOTERS) >= _MOST_FOOTERS:
            _FOOTERS.clear()

        def read() -> pq.FileMetaData:
            with filesystem.open_input_file(path) as source:
                return pq.read_metadata(source)

        _FOOTERS[key] = guarded(read, _unreadable(path))
    return _FOOTERS[key]


def _unreadable(path: str) -> str:
    return f"{sanitize(path)}: cannot be read as {table_kind(path)}; it may be cut short."


# --- which files --------------------------------------------------------------------------------------------


def find_files(sources: Sequence[str], *, allow_http: bool = False) -> tuple[fs.FileSystem, list[str]]:
    """The file system and the paths, sorted: the order of the rows is that of the names."""
    said = sanitize(", ".join(sources))
    filesystem: fs.FileSystem = fs.LocalFileSystem()
    addresses = [source for source in sources if isinstance(source, Address)]
    if addresses:
        if len(addresses) < len(sources):
            raise DataError(f"{said}: scan files of this machine and addresses apart.")
        filesystem, sources = open_addresses(addresses, allow_http=allow_http)
    here = isinstance(filesystem, fs.LocalFileSystem)
    names = sorted(
        {name for source in sources for name in (_local(source) if here else _matching(filesystem, source))}
    )
    if here:  # a file with several names is one file: its records count once
        first: dict[tuple[int, int], str] = {}
        for name in names:
            seen = os.stat(name)
            first.setdefault((seen.st_dev, seen.st_ino), name)
        names = list(first.values())
    packed = {name.removesuffix(Path(name).suffix) for name in names if Path(name).suffix in PACKED}
    if not packed.isdisjoint(names):
        raise DataError(
            f"{said}: a file lies there packed and unpacked, so each person in it would count twice. Name the "
            "files that are meant, or remove one of the two."
        )
    if not names:
        raise DataError(f"{said}: no table files there (parquet or csv).")
    return filesystem, names


def _local(source: str) -> Iterator[str]:
    path = Path(source)
    if path.is_dir():
        inside = (p for p in path.rglob("*") if _is_told(p.relative_to(path).parts))
        yield from (str(p.resolve()) for p in inside if p.is_file() and table_kind(p.name))
    elif path.is_file():
        yield str(path.resolve())
    elif glob.has_magic(source):
        yield from (str(Path(p).resolve()) for p in glob.glob(source, recursive=True) if Path(p).is_file())
    else:
        raise DataError(f"{sanitize(source)}: no such file.")


def _is_told(parts: Sequence[str]) -> bool:
    """Whether a path inside a folder is of its table: engines and editors leave copies of records beside it."""
    return not any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)


def _matching(system: fs.FileSystem, source: str) -> list[str]:
    folder = pattern_root(source)
    if folder == source and stamp_of(source, system) is not None:
        return [source]
    inside = guarded(
        lambda: system.get_file_info(fs.FileSelector(folder, recursive=True)),
        f"{sanitize(source)}: no such file or folder, or it cannot be reached.",
    )
    paths = [info.path for info in inside if info.is_file]
    if folder != source:
        return [path for path in paths if fnmatch.fnmatchcase(path, source)]
    under = folder.strip("/").count("/") + 1 if folder.strip("/") else 0
    return [path for path in paths if table_kind(path) and _is_told(path.strip("/").split("/")[under:])]


# --- partitions ---------------------------------------------------------------------------------------------

Pieces: TypeAlias = list[tuple[Partition, int | None]]
Laying: TypeAlias = Callable[[Sequence[str], str], RowLayout]


def cut_source(
    source: object, laying: Laying, schema: Schema | None, *, allow_http: bool = False
) -> tuple[RowLayout, Pieces, tuple[str, ...]]:
    """(layout, pieces with their rows, notes) of what can be scanned."""
    if not isinstance(source, list | tuple | str | os.PathLike):
        table = _arrow_table(source)
        layout = laying([str(c) for c in table.column_names], "frame")
        layout.check_types(table.schema, "frame")
        step = 4 * LEAST_ROWS
        slices = [(start, min(step, table.num_rows - start)) for start in range(0, table.num_rows, step)]
        return layout, [(TablePartition(table.slice(*piece)), piece[1]) for piece in slices], ()
    many = [public(one) for one in (source if isinstance(source, list | tuple) else [source])]
    if not many or not all(isinstance(one, str | os.PathLike) for one in many):
        raise DataError(_WHAT)
    system, paths = find_files([os.fspath(one) for one in many], allow_http=allow_http)
    kinds = {table_kind(path) for path in paths}
    if None in kinds:
        odd = next(path for path in paths if table_kind(path) is None)
        raise DataError(
            f"{sanitize(odd)}: unknown kind of file. A scan reads parquet and csv. A file of another kind, such as "
            "a spreadsheet, is read whole: leave --memory out, or in Python load it without scan()."
        )
    if len(kinds) > 1:
        raise DataError(
            f"{sanitize(many[0])}: holds files of several kinds ({', '.join(sorted(map(str, kinds)))})."
        )
    header = _header_of(paths[0], system, schema)
    name = Path(os.fspath(many[0])).name if len(many) == 1 else f"{len(paths)} files"
    layout = laying([str(c) for c in header.names], name)
    pieces = [piece for path in paths for piece in cut(path, system, layout, header)]
    left_out = [h for h in header.names if h not in set(layout.read)]
    notes = (f"columns left out: {sanitize(', '.join(left_out), most=400)}",) if left_out else ()
    return layout, pieces, notes


_WHAT = (
    "scan: takes paths, an Arrow table, or a frame of polars, pandas, DuckDB, ibis or any other library that hands "
    "its columns over as an Arrow stream (__arrow_c_stream__)."
)


def _arrow_table(frame: object) -> pa.Table:
    """A frame of any library as an Arrow table: by the Arrow C stream, or of pandas without its index."""
    if isinstance(frame, pa.Table):
        return frame
    if type(frame).__module__.partition(".")[0] == "pandas":  # its own stream would make the index a column
        with boundary("scan: a column of the frame holds values of several types."):
            return pa.Table.from_pandas(frame, preserve_index=False)
    if hasattr(frame, "__arrow_c_stream__"):  # polars and Arrow share their memory
        with boundary("scan: the frame hands over no stream of columns that can be read."):
            return pa.table(frame)
    raise DataError(_WHAT)


def _header_of(path: str, filesystem: fs.FileSystem, schema: Schema | None) -> pa.Schema | CSVDialect:
    """The Arrow schema of a parquet file, or how delimited text is read; both have ``names``."""

    def read() -> pa.Schema | CSVDialect:
        if table_kind(path) == "csv":
            if schema is not None and schema.skip_end:
                raise DataError(
                    f"{sanitize(path)}: a scan does not know which lines are the last (skip_end). Load the file "
                    "whole, or remove these lines."
                )
            with filesystem.open_input_stream(path) as source:
                return CSVDialect.of(source.read(_LONGEST_HEADER), sanitize(path), schema)
        stamp = stamp_of(path, filesystem)
        assert stamp is not None
        return parquet_facts(path, filesystem, stamp).schema.to_arrow_schema()

    return guarded(read, _unreadable(path))


def cut(
    path: str, filesystem: fs.FileSystem, layout: RowLayout, first: pa.Schema | CSVDialect | None = None
) -> list[tuple[Partition, int | None]]:
    """The pieces of a file with their rows, ``None`` where only reading tells; ``first``: of the first file."""
    stamp = stamp_of(path, filesystem)
    if stamp is None:
        raise DataError(f"{sanitize(path)}: no such file.")
    header = _header_of(path, filesystem, layout.schema)
    if isinstance(header, CSVDialect):
        kinds = layout.csv_kinds()
        if len(set(header.names)) != len(header.names):
            raise DataError(f"{sanitize(path)}: the header names a column twice.")
        found = pa.schema([(name, kinds.get(name, pa.string())) for name in header.names])
        layout.check_types(found, sanitize(path))
        return [(FilePartition(path, filesystem, stamp, (), header, tuple(kinds.items())), None)]
    layout.check_types(header, sanitize(path))
    if layout.schema is None and isinstance(first, pa.Schema):
        for column in layout.read:  # a sum of columns of two types means nothing
            if header.field(column).type != first.field(column).type:
                raise DataError(
                    f"{sanitize(path)}: column {column!r} is {header.field(column).type}, in the first file it is "
                    f"{first.field(column).type}. Write all files alike, or declare a schema."
                )
    facts = parquet_facts(path, filesystem, stamp)
    sizes = guarded(
        lambda: [facts.row_group(group).num_rows for group in range(facts.num_row_groups)], _unreadable(path)
    )
    units: list[tuple[Partition, int | None]] = []
    groups: list[int] = []
    rows = 0
    for group, size in enumerate(sizes):
        groups.append(group)
        rows += size
        if rows >= LEAST_ROWS or group == len(sizes) - 1:
            units.append((FilePartition(path, filesystem, stamp, tuple(groups)), rows))
            groups, rows = [], 0
    return units
