"""What can be scanned, cut into partitions: files by path, pattern, folder or address; frames; Dask frames."""

from __future__ import annotations

import csv
import fnmatch
import glob
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.data.scan_partitions import (
    LEAST_ROWS,
    CSVDialect,
    FilePartition,
    RowLayout,
    Stamp,
    TablePartition,
    _text_stream,
    arrow_table,
    is_frame,
    open_file,
    parquet_facts,
    stamp_of,
)
from quietgrad.data.schema import Schema
from quietgrad.errors import DataError, boundary
from quietgrad.files import PACKED, table_kind
from quietgrad.sanitize import sanitize

if TYPE_CHECKING:
    from quietgrad.data.scanning import _ScanOptions

_LONGEST_HEADER = 1 << 22


def find_files(sources: Sequence[str], filesystem: Any) -> tuple[Any, list[str]]:
    """The file system and the paths, sorted: the order of the rows is that of the names."""
    if filesystem is None and any("://" in source for source in sources):
        filesystem, sources = _remote(sources)
    elif filesystem is not None:
        filesystem = _as_arrow(filesystem)
    if filesystem is not None and _is_local(filesystem):
        filesystem = None
    found: list[str] = []
    for source in sources:
        found += _local(source) if filesystem is None else _matching(filesystem, source)
    names = sorted(set(found))
    if filesystem is None:  # a file with several names is one file: its records count once
        first: dict[tuple[int, int], str] = {}
        for name in names:
            seen = os.stat(name)
            first.setdefault((seen.st_dev, seen.st_ino), name)
        names = list(first.values())
    packed = {name.removesuffix(Path(name).suffix) for name in names if Path(name).suffix in PACKED}
    if not packed.isdisjoint(names):
        raise DataError(
            f"{sanitize(', '.join(sources))}: a file lies there packed and unpacked, so each person in it would "
            "count twice. Name the files that are meant, or remove one of the two."
        )
    if not names:
        raise DataError(f"{sanitize(', '.join(sources))}: no table files there (parquet, arrow, feather or csv).")
    return filesystem, names


def _local(source: str) -> Iterator[str]:
    path = Path(source)
    if path.is_dir():
        inside = (p for p in path.rglob("*") if _told(p.relative_to(path).parts))
        yield from (str(p.resolve()) for p in inside if p.is_file() and table_kind(p.name))
    elif path.is_file():
        yield str(path.resolve())
    elif glob.has_magic(source):
        yield from (str(Path(p).resolve()) for p in glob.glob(source, recursive=True) if Path(p).is_file())
    else:
        raise DataError(f"{sanitize(source)}: no such file.")


def _told(parts: Sequence[str]) -> bool:
    """Whether a path inside a folder is of its table: engines and editors leave copies of records beside it."""
    return not any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in parts)


def _remote(sources: Sequence[str]) -> tuple[Any, list[str]]:
    import pyarrow as pa
    from pyarrow import fs

    try:
        system, _ = fs.FileSystem.from_uri(_root(sources[0]))
        return system, [source.partition("://")[2] for source in sources]
    except (pa.ArrowException, ValueError, OSError):
        pass
    try:
        import fsspec

        system = fsspec.filesystem(sources[0].partition("://")[0])
    except (ImportError, ValueError):
        raise DataError(
            f"{sanitize(sources[0])}: nothing installed knows this kind of address; install its fsspec package, or "
            "pass filesystem=."
        ) from None
    return _as_arrow(system), [str(system._strip_protocol(source)) for source in sources]


def _root(source: str) -> str:
    """The address up to the first pattern character."""
    cut = min((source.index(mark) for mark in "*?[" if mark in source), default=len(source))
    return source[:cut].rpartition("/")[0] if cut < len(source) else source


def _as_arrow(system: Any) -> Any:
    from pyarrow import fs

    return system if isinstance(system, fs.FileSystem) else fs.PyFileSystem(fs.FSSpecHandler(system))


def _is_local(system: Any) -> bool:
    from pyarrow import fs

    protocol = getattr(getattr(getattr(system, "handler", None), "fs", None), "protocol", ())
    return isinstance(system, fs.LocalFileSystem) or "file" in (
        (protocol,) if isinstance(protocol, str) else protocol
    )


def _matching(system: Any, source: str) -> list[str]:
    from pyarrow import fs

    if not glob.has_magic(source):
        info = system.get_file_info(source)
        if info.is_file:
            return [source]
        folder, pattern = source, None
    else:
        folder, pattern = _root(source), source
    try:
        inside = system.get_file_info(fs.FileSelector(folder, recursive=True))
    except OSError:
        raise DataError(f"{sanitize(source)}: no such file or folder.") from None
    paths = [info.path for info in inside if info.is_file]
    if pattern is not None:
        return [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    under = folder.strip("/").count("/") + 1 if folder.strip("/") else 0
    return [path for path in paths if table_kind(path) and _told(path.strip("/").split("/")[under:])]


def header_of(path: str, filesystem: Any, kind: str, schema: Schema | None) -> Any:
    """The Arrow schema of a file; of delimited text, the names alone, as the schema types them."""
    import pyarrow as pa

    with boundary(f"{sanitize(path)}: cannot be read as {kind}; it may be cut short."):
        if kind == "csv":
            return pa.schema([(name, pa.string()) for name in _csv_names(path, filesystem, schema)[0]])
        if kind == "parquet":
            stamp = stamp_of(path, filesystem)
            assert stamp is not None
            return parquet_facts(path, filesystem, stamp).schema.to_arrow_schema()
        with open_file(path, filesystem) as source, pa.ipc.open_file(source) as file:
            return file.schema


def _csv_names(path: str, filesystem: Any, schema: Schema | None) -> tuple[tuple[str, ...], str, bool]:
    if schema is not None and schema.names:
        return schema.names, schema.delimiter, False
    with _text_stream(path, filesystem) as source:
        start = source.read(_LONGEST_HEADER)
    try:
        line = start.split(b"\n", 1)[0].decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{sanitize(path)}: the file is not UTF-8 text; is it a CSV file?") from None
    delimiter = schema.delimiter if schema is not None else max(",;\t", key=line.count)
    try:
        row = next(csv.reader(io.StringIO(line), delimiter=delimiter, skipinitialspace=True), [])
    except csv.Error as error:
        raise DataError(f"{sanitize(path)}: not readable as delimited text ({error}).") from None
    return tuple(name.strip() for name in row), delimiter, True


def cut(path: str, filesystem: Any, layout: RowLayout) -> list[tuple[FilePartition, int | None]]:
    """The pieces of a file with their rows, ``None`` where only reading tells."""

    kind = table_kind(path)
    if kind is None:
        raise DataError(f"{sanitize(path)}: unknown kind of file. A scan reads parquet, arrow, feather and csv.")
    stamp = stamp_of(path, filesystem)
    if stamp is None:
        raise DataError(f"{sanitize(path)}: no such file.")
    layout.check_types(_typed(header_of(path, filesystem, kind, layout.schema), kind, layout), sanitize(path))
    if kind == "csv":
        return [(FilePartition(path, filesystem, kind, stamp, (), _dialect(path, filesystem, layout)), None)]
    with boundary(f"{sanitize(path)}: cannot be read as {kind}; it may be cut short."):
        sizes = _group_sizes(path, filesystem, kind, stamp)
    units: list[tuple[FilePartition, int | None]] = []
    groups: list[int] = []
    rows = 0
    for group, size in enumerate(sizes):
        groups.append(group)
        rows += size
        if rows >= LEAST_ROWS or group == len(sizes) - 1:
            units.append((FilePartition(path, filesystem, kind, stamp, tuple(groups)), rows))
            groups, rows = [], 0
    return units


def _group_sizes(path: str, filesystem: Any, kind: str, stamp: Stamp) -> list[int]:
    if kind == "parquet":
        facts = parquet_facts(path, filesystem, stamp)
        return [facts.row_group(group).num_rows for group in range(facts.num_row_groups)]
    import pyarrow as pa

    one = pa.ipc.IpcReadOptions(included_fields=[0])
    with open_file(path, filesystem) as source, pa.ipc.open_file(source, options=one) as file:
        return [file.get_batch(group).num_rows for group in range(file.num_record_batches)]


def _typed(kinds: Any, kind: str, layout: RowLayout) -> Any:
    """Of delimited text, numbers wherever the layout wants them: what is none is refused as it is read."""
    import pyarrow as pa

    if kind != "csv":
        return kinds
    known = dict(_csv_kinds(layout))
    return pa.schema([(name, getattr(pa, known.get(name, "string"))()) for name in kinds.names])


def _csv_kinds(layout: RowLayout) -> tuple[tuple[str, str], ...]:
    schema = layout.schema
    words = {} if schema is None else {c: "string" for c, k in schema.columns.items() if not k.plain}
    kinds = {column: words.get(column, "float64") for column in layout.columns}
    if layout.target is not None:
        classes = layout.classes if schema is None else schema.classes
        by_number = classes is None or all(isinstance(label, int | float) for label in classes)
        by_number = by_number and (schema is None or schema.label_format == (".", ""))
        kinds[layout.target] = "float64" if by_number else "string"
    if layout.person is not None:
        kinds[layout.person] = "string"
    return tuple(kinds.items())


def _dialect(path: str, filesystem: Any, layout: RowLayout) -> CSVDialect:
    names, delimiter, header = _csv_names(path, filesystem, layout.schema)
    if len(set(names)) != len(names):
        raise DataError(f"{sanitize(path)}: the header names a column twice.")
    missing = ("", "NA", "NaN", "nan") if layout.schema is None else layout.schema.missing
    return CSVDialect(delimiter, names, header, missing, _csv_kinds(layout))


Pieces = Sequence[tuple[Any, int | None]]


def cut_source(
    source: Any, asked: _ScanOptions, filesystem: Any, cluster: Any
) -> tuple[RowLayout, Pieces, Any, tuple[str, ...]]:
    """(layout, pieces with their rows, who does the work if not this process's threads, notes)."""
    if is_dask(source):
        from quietgrad.cluster import cut_partitions

        layout = asked.layout([str(c) for c in source.columns], "frame")
        pieces, runner = cut_partitions(source, layout, cluster)
        return layout, pieces, runner, ()
    runner = None
    if cluster is not None:
        from quietgrad.cluster import connected

        runner = connected(cluster)
    if is_frame(source):
        table = arrow_table(source)
        layout = asked.layout([str(c) for c in table.column_names], "frame")
        layout.check_types(table.schema, "frame")
        step = 4 * LEAST_ROWS
        slices = [(start, min(step, table.num_rows - start)) for start in range(0, table.num_rows, step)]
        return layout, [(TablePartition(table.slice(*piece)), piece[1]) for piece in slices], runner, ()
    return _cut_files(source, asked, filesystem, runner)


def _cut_files(
    source: Any, asked: _ScanOptions, filesystem: Any, runner: Any
) -> tuple[RowLayout, Pieces, Any, tuple[str, ...]]:
    many = list(source) if isinstance(source, list | tuple) else [source]
    if not many or not all(isinstance(one, str | os.PathLike) for one in many):
        raise DataError("scan: takes paths, an Arrow table, or a frame of polars, pandas or dask.")
    system, paths = find_files([os.fspath(one) for one in many], filesystem)
    kinds = {table_kind(path) for path in paths}
    if None in kinds:
        odd = next(path for path in paths if table_kind(path) is None)
        raise DataError(f"{sanitize(odd)}: unknown kind of file. A scan reads parquet, arrow, feather and csv.")
    if len(kinds) > 1:
        raise DataError(
            f"{sanitize(many[0])}: holds files of several kinds ({', '.join(sorted(map(str, kinds)))})."
        )
    kind = str(next(iter(kinds)))
    header = header_of(paths[0], system, kind, asked.schema)
    name = Path(os.fspath(many[0])).name if len(many) == 1 else f"{len(paths)} files"
    layout = asked.layout([str(c) for c in header.names], name)
    pieces = [piece for path in paths for piece in cut(path, system, layout)]
    left_out = [h for h in header.names if h not in set(layout.read)]
    notes = (f"columns left out: {sanitize(', '.join(left_out), most=400)}",) if left_out else ()
    if asked.schema is None:
        _check_alike(paths, system, kind, header, layout)
    return layout, pieces, runner, notes


def _check_alike(paths: Sequence[str], system: Any, kind: str, header: Any, layout: RowLayout) -> None:
    """Refuse a file whose columns have other types than the first one's: a sum of both means nothing."""
    for path in paths[1:]:
        other = header_of(path, system, kind, None)
        for column in layout.read:
            if other.field(column).type != header.field(column).type:
                raise DataError(
                    f"{sanitize(path)}: column {column!r} is {other.field(column).type}, in {sanitize(paths[0])} "
                    f"it is {header.field(column).type}. Write all files alike, or declare a schema."
                )


def is_dask(value: Any) -> bool:
    """Whether a value is a Dask data frame; Dask is not imported to know."""
    return type(value).__module__.partition(".")[0] in ("dask", "dask_expr") and hasattr(value, "partitions")
