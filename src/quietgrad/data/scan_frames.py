"""What can be scanned, cut into pieces: files, frames in memory, and frames that a cluster holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.data.row_layout import RowLayout
from quietgrad.data.scan_files import cut, find_files, header_of
from quietgrad.data.scan_units import LEAST_ROWS, TableUnit, arrow_table, is_frame
from quietgrad.errors import DataError
from quietgrad.files import table_kind
from quietgrad.sanitize import sanitize

if TYPE_CHECKING:
    from quietgrad.data.scanning import _Asked

Pieces = Sequence[tuple[Any, int | None]]


def cut_source(
    source: Any, asked: _Asked, filesystem: Any, cluster: Any
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
        return layout, [(TableUnit(table.slice(*piece)), piece[1]) for piece in slices], runner, ()
    return _cut_files(source, asked, filesystem, runner)


def _cut_files(
    source: Any, asked: _Asked, filesystem: Any, runner: Any
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
                    f"it is "
                    f"{header.field(column).type}. Write all files alike, or declare a schema."
                )


def is_dask(value: Any) -> bool:
    """Whether a value is a Dask data frame; Dask is not imported to know."""
    return type(value).__module__.partition(".")[0] in ("dask", "dask_expr") and hasattr(value, "partitions")
