"""Tables of named columns as numbers: one layout and one encoding for files that are loaded and for scans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from quietgrad.core import files
from quietgrad.core.errors import DataError, boundary
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import (
    MISSING,
    NO,
    YES,
    Date,
    NotNumericError,
    Numeric,
    is_number,
    to_numbers,
    yes_or_no,
)
from quietgrad.data.dataset import LABELS_ARE_WORDS, Dataset, Task, check, encode_labels
from quietgrad.data.delimited import CSVDialect, as_utf8, without_end
from quietgrad.data.file_formats import EXPANSION, budget, read_content
from quietgrad.data.schema import Schema
from quietgrad.tables.labels import ClassLabels

Floats: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float64]
_UNUSUAL = (pa.bool_(), pa.float16())  # to_tensor takes neither
_ROWS = 16_384  # rows of a parquet file turned into numbers at a time


def coded(values: pa.Array) -> tuple[list[object], npt.NDArray[np.int64]]:
    """(words, codes) of an Arrow column: row i holds ``words[codes[i]]``, a gap being ``None``."""
    if pa.types.is_dictionary(values.type):
        values.validate(full=True)  # pyarrow itself decodes codes beyond the dictionary without a word
    else:
        plain = values.cast(pa.large_string()) if pa.types.is_string_view(values.type) else values
        values = plain.dictionary_encode()
    places = np.asarray(values.indices.fill_null(len(values.dictionary)).to_numpy(zero_copy_only=False), np.int64)
    # The codes that occur, without sorting.
    used = np.flatnonzero(np.bincount(places))
    at = np.zeros(len(values.dictionary) + 1, np.int64)
    at[used] = np.arange(len(used))
    words = [*values.dictionary.to_pylist(), None]
    return [words[place] for place in used], at[places]


def is_number_type(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are numbers, true and false included."""
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
    )


def is_text_type(kind: pa.DataType) -> bool:
    """Whether values of an Arrow type are words."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    # Frames of polars hand their texts over as views.
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _floats(values: pa.Array) -> npt.NDArray[np.float64]:
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        values = values.cast(pa.uint8() if pa.types.is_boolean(values.type) else pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


class ColumnOptions(TypedDict, total=False):
    """Options for the columns that a caller gives beside a schema.

    The label is the last column if `label` is not given, and there is none unless `labelled`. `person` is the
    column of the ids of the people that rows are about, `keep` one of ids that stand beside predictions; columns of
    `drop` are no features.
    """

    label: str | None
    task: Task | None
    classes: Sequence[object] | None
    labelled: bool
    person: str | None
    keep: str | None
    drop: Sequence[str]


@dataclass(frozen=True)
class RowLayout:
    """Which columns of a table are features, which is the target, and how they become numbers.

    Without a ``schema`` features keep their scale. ``classes`` turn targets into codes 0…k−1, ``task="regression"``
    into numbers; without either, labels stay as they are (an estimator decides what they are). ``person`` is the
    column of people's ids and ``keep`` one of ids that stand beside predictions; neither is a feature.
    """

    name: str
    columns: tuple[str, ...]
    target: str | None
    schema: Schema | None = None
    classes: tuple[object, ...] | None = None
    task: Task | None = None
    person: str | None = None
    keep: str | None = None

    @classmethod
    def of(
        cls,
        header: Sequence[str],
        name: str,
        schema: Schema | None = None,
        columns: Sequence[str] | None = None,
        **options: Unpack[ColumnOptions],
    ) -> RowLayout:
        """The layout of a table with these columns; refuses what is not among them, and columns of two roles."""
        target, task, classes = options.get("label"), options.get("task"), options.get("classes")
        person, keep, drop = options.get("person"), options.get("keep"), options.get("drop", ())
        labelled = options.get("labelled", True)
        header_names, aside = set(header), {person, keep, *drop}
        if len(header_names) != len(header):
            raise DataError(f"{name}: the header names a column twice.")
        if schema is not None:
            chosen = {column: kind for column, kind in schema.columns.items() if column not in drop}
            schema = replace(schema, columns=chosen)
            target, columns, classes = schema.label, list(schema.columns), schema.classes
            task = "regression" if classes is None else None
        elif target is None and labelled:
            target = next((column for column in reversed(header) if column not in aside), None)
        if columns is None:
            columns = [column for column in header if column != target and column not in aside]
        if not labelled:
            target = None
        if person is not None and person in (target, *columns):
            raise DataError(f"{name}: the column of people's ids cannot be the label or a feature as well.")
        wanted = dict.fromkeys((*columns, target, person, keep, *drop))
        if absent := [column for column in wanted if column is not None and column not in header_names]:
            named = ", ".join(repr(sanitize(column)) for column in absent[:40])
            hint = _other_delimiter(header, absent, "," if schema is None else schema.delimiter)
            raise DataError(f"{name}: no column {named}; the file has {_listed(header) or 'no columns'}.{hint}")
        if not columns or target in columns or len(set(columns)) != len(columns):
            raise DataError(
                f"{name}: needs feature columns, each named once, besides the label {target!r}; is the delimiter "
                "another one?"
            )
        public = None if classes is None else tuple(classes)
        return cls(name, tuple(columns), target, schema, public, task, person, keep)

    @property
    def width(self) -> int:
        return len(self.columns) if self.schema is None else self.schema.width

    @property
    def read(self) -> list[str]:
        """The columns that are read."""
        beside = (self.target, self.person, self.keep)
        return list(dict.fromkeys((*self.columns, *(name for name in beside if name is not None))))

    @property
    def may_drop(self) -> bool:
        """Whether rows with a gap are left out."""
        return self.schema is not None and self.schema.drop_incomplete

    @property
    def missing(self) -> tuple[str, ...]:
        return MISSING if self.schema is None else self.schema.missing

    def csv_kinds(self) -> dict[str, pa.DataType]:
        """The types that columns of delimited text are read as: a number wherever one is wanted."""
        numbers = {name for name in self.columns if self.schema is None or self.schema.columns[name].plain}
        plain = self.schema is None or self.schema.label_format == (".", "")
        if self.target is not None and self.classes is None and plain:
            numbers.add(self.target)
        # Ids are taken as they are written: 007 is not 7.
        return {name: pa.float64() if name in numbers else pa.string() for name in self.read}

    def check_types(self, kinds: pa.Schema, where: str) -> None:
        """Refuse a file that lacks columns, or whose features are neither numbers nor what the schema says."""
        names = set(kinds.names)
        for column in self.read:
            if column not in names:
                raise DataError(f"{where}: has no column {column!r}.")
        for column in self.columns:
            kind = kinds.field(column).type
            if is_number_type(kind):
                continue
            if self.schema is None:
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}, not a number. Declare it in a "
                    "schema, with bounds or categories."
                )
            days = isinstance(self.schema.columns[column], Date) and pa.types.is_temporal(kind)
            if not (is_text_type(kind) or pa.types.is_dictionary(kind) or days):
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}, not what the schema says of it."
                )

    def rows(self, batch: pa.RecordBatch) -> tuple[Floats, npt.NDArray[np.generic], pa.RecordBatch]:
        """(X, y, the batch without rows that are left out): X column-major, float32 or float64."""
        try:
            X = self._plain(batch) if self.schema is None else self._encoded(batch, self.schema)
            if self.may_drop:
                complete_rows = np.isfinite(X).all(axis=1)
                X, batch = X[complete_rows], batch.filter(pa.array(complete_rows))
            y = np.zeros(len(X)) if self.target is None else self.targets(batch.column(self.target))
        except pa.ArrowException:  # its message may quote a cell
            raise DataError(f"{self.name}: has columns that cannot be made numbers.") from None
        return X, y, batch

    def _plain(self, batch: pa.RecordBatch) -> Floats:
        chosen = batch.select(list(self.columns))
        if any(field.type in _UNUSUAL or pa.types.is_decimal(field.type) for field in chosen.schema):
            columns = [
                c if pa.types.is_integer(c.type) or c.type in (pa.float32(), pa.float64()) else pa.array(_floats(c))
                for c in chosen.columns
            ]
            chosen = pa.RecordBatch.from_arrays(columns, names=list(self.columns))
        X: Floats = chosen.to_tensor(null_to_nan=True, row_major=False).to_numpy()
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)

    def _encoded(self, batch: pa.RecordBatch, schema: Schema) -> Floats:
        X = np.empty((batch.num_rows, schema.width), order="F")
        at = 0
        for column, kind in schema.columns.items():
            values = batch.column(column)
            if isinstance(kind, Numeric) and is_number_type(values.type):
                block = kind.encode(column, _floats(values), schema.missing)
            else:
                words, codes = coded(values)
                block = kind.encode(column, words, schema.missing)[codes] if len(values) else X[:, : kind.width]
            X[:, at : at + kind.width] = block
            at += kind.width
        return X

    def undeclared(self, batch: pa.RecordBatch) -> int:
        """How many targets are none of the declared classes: for the records' owner alone."""
        if self.classes is None or self.target is None:
            return 0
        return int(np.sum(self._codes(batch.column(self.target)) < 0))

    def _codes(self, values: pa.Array) -> npt.NDArray[np.int64]:
        """The places of targets among the declared classes; −1 for one that is none of them."""
        words, codes = coded(values)
        raw = [word.strip() if isinstance(word, str) else word for word in words]
        if self.schema is not None and self.schema.label_kind == "yes/no":
            spelled = [str(word).strip().lower() for word in words]
            raw = [yes_or_no(word) if word in YES | NO else None for word in spelled]
        return ClassLabels.of(self.classes or ()).encode(np.array([*raw, None], dtype=object)[:-1])[codes]

    def targets(self, values: pa.Array) -> npt.NDArray[np.generic]:
        """The target column as codes of the declared classes, as numbers, or as the labels it holds."""
        target, schema = str(self.target), self.schema
        if self.classes is not None:
            return np.maximum(self._codes(values), 0)  # what is not declared counts as the first class
        if values.null_count:
            raise DataError(f"{self.name}: the target {target!r} has missing entries. Remove those records first.")
        if not is_number_type(values.type) and not is_text_type(values.type):
            raise DataError(f"{self.name}: the target {target!r} is neither numbers nor words.")
        if self.task != "regression":
            if is_number_type(values.type):
                return np.asarray(values.to_numpy(zero_copy_only=False))
            words, codes = coded(values)
            return np.asarray(words)[codes]
        if is_number_type(values.type):
            y = _floats(values)
        else:
            words, codes = coded(values)
            decimal, thousands = (".", "") if schema is None else schema.label_format
            y = to_numbers(target, words, decimal=decimal, thousands=thousands)[codes]
        return y if schema is None or schema.label_bounds is None else np.clip(y, *schema.label_bounds)


def parse_csv(
    content: bytes,
    schema: Schema | None = None,
    *,
    name: str = "csv",
    delimiter: str | None = None,
    encoding: str | None = None,
    **options: Unpack[ColumnOptions],
) -> Dataset:
    """Parse delimited text. Without a schema every column must be numeric and keeps its own scale.

    >>> parse_csv(b"a,b,y\\n1,2,0\\n3,4,1\\n").X.tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    content = as_utf8(content, encoding or (schema.encoding if schema is not None else None), name)
    content = content if schema is None else without_end(content, schema.skip_end)
    dialect = CSVDialect.of(content, name, schema, delimiter)
    if schema is None and dialect.names and all(is_number(cell) for cell in dialect.names):
        raise DataError(f"{name}: the first line holds only numbers; a CSV file needs a header line of names.")
    layout = RowLayout.of(dialect.names, name, schema, **options)
    try:
        table = dialect.table(dialect.body(content), layout.csv_kinds(), name, threads=True)
    except NotNumericError as refused:
        if refused.columns == (layout.target,):
            raise DataError(f"{name}: {LABELS_ARE_WORDS}") from None
        raise
    return _loaded(table.to_batches(), table.num_rows, layout, dialect.names, options.get("task"))


def read_parquet(path: Path, schema: Schema | None = None, **options: Unpack[ColumnOptions]) -> Dataset:
    """Read a parquet file, under the same rules as CSV."""
    from quietgrad.data.scan_sources import cut

    most, name = budget(files.check_regular(path).st_size), path.name
    with boundary(f"{name}: not a readable parquet file; it may be cut short."):
        facts = pq.read_metadata(path)
        header = [str(column) for column in facts.schema.to_arrow_schema().names]
        packed = sum(facts.row_group(k).total_byte_size for k in range(facts.num_row_groups))
    if max(packed, 8 * facts.num_rows * max(1, len(header))) > most:
        raise DataError(
            f"{name}: {facts.num_rows} rows of {len(header)} columns are more than {EXPANSION} times the "
            "file's size; if it is meant so, write it as CSV or npz."
        )
    layout = RowLayout.of(header, name, schema, **options)
    pieces = [piece for piece, _ in cut(str(path), LocalFileSystem(), layout)]
    batches = (batch for piece in pieces for batch in piece.batches(layout.read, _ROWS))
    return _loaded(batches, facts.num_rows, layout, header, options.get("task"))


def _loaded(
    batches: Iterable[pa.RecordBatch], rows: int, layout: RowLayout, header: Sequence[str], task: Task | None
) -> Dataset:
    """The data set that the batches of a file make."""
    name, schema = layout.name, layout.schema
    X = np.empty((rows, layout.width))
    targets: list[npt.NDArray[np.generic]] = []
    ids: dict[str, list[object]] = {column: [] for column in (layout.person, layout.keep) if column is not None}
    n = undeclared = 0
    for batch in batches:
        block, y, kept_batch = layout.rows(batch)
        undeclared += layout.undeclared(kept_batch)
        if n + len(block) > rows:
            raise DataError(f"{name}: has other numbers of rows than the file says; it may be damaged.")
        X[n : n + len(block)] = block
        n += len(block)
        targets.append(y)
        for column, id_values in ids.items():
            id_values += [v.strip() if isinstance(v, str) else v for v in kept_batch.column(column).to_pylist()]
    if not rows:
        raise DataError(f"{name}: the file holds no rows.")
    X = X[:n]
    names = schema.feature_names if schema is not None else layout.columns
    gaps = n - np.isfinite(X).sum(axis=0)
    if gaps.any():
        counted = ", ".join(f"{sanitize(names[k], most=80)!r} ({gaps[k]} rows)" for k in np.flatnonzero(gaps)[:40])
        raise DataError(
            f"{name}: the features hold missing, NaN or infinite values in {counted}. Fill them with public values "
            'first: in a schema missing = "indicator" or fill = NUMBER for the column, or drop_incomplete = true '
            "for the table. No privacy budget was spent."
        )
    raw: Any = np.concatenate(targets) if targets else np.zeros(0)
    if layout.classes is None:
        labels = encode_labels(name, raw, layout.task or task)
    else:  # coded by the layout, batch by batch
        labels = encode_labels(name, raw[:0], None if schema is not None else task, layout.classes)
        labels = labels._replace(y=raw, undeclared=undeclared)
    used = set(layout.read)
    left_out = [column or "(row name)" for column in header if column not in used]
    notes = [f"columns left out: {_listed(left_out)}"] if left_out else []
    if layout.may_drop:
        notes.append("rows with a missing entry left out")
    return check(
        Dataset(
            name, X, labels.y, row_bound=schema.row_bound if schema is not None else None, notes=tuple(notes),
            label_bounds=schema.label_bounds if schema is not None else None, feature_names=names,
            person=None if layout.person is None else np.array([*ids[layout.person], None], dtype=object)[:-1],
            ids=None if layout.keep is None else tuple(str(v) for v in ids[layout.keep]),
            feature_bounds=None if schema is None else schema.feature_bounds,
            bounded_names=() if schema is None else schema.bounded_names, leaves_out=layout.may_drop,
            **labels.facts,
        )
    )  # fmt: skip


def read_header(path: Path, schema: Schema | None, delimiter: str | None, encoding: str | None) -> tuple[str, ...]:
    """The column names of a parquet or delimited file."""
    if path.suffix in (".parquet", ".pq"):
        with boundary(f"{path.name}: not a readable parquet file; it may be cut short."):
            return tuple(str(column) for column in pq.read_schema(path).names)
    content = as_utf8(read_content(path), encoding or (schema.encoding if schema is not None else None), path.name)
    return CSVDialect.of(content, path.name, schema, delimiter).names


def read_cells(path: Path, schema: Schema, extra: Sequence[str] = ()) -> dict[str, list[object]]:
    """The cells of the columns that a schema lists, its label among them, and of ``extra`` ones."""
    wanted = list(dict.fromkeys((*schema.columns, schema.label, *extra)))
    if path.suffix in (".parquet", ".pq"):
        with boundary(f"{path.name}: not a readable parquet file, or it lacks columns of the schema."):
            table = pq.read_table(path, columns=wanted)
            return {name: table.column(name).to_pylist() for name in wanted}
    content = without_end(as_utf8(read_content(path), schema.encoding, path.name), schema.skip_end)
    dialect = CSVDialect.of(content, path.name, schema)
    if absent := [name for name in wanted if name not in dialect.names]:
        raise DataError(
            f"{path.name}: no column {', '.join(map(repr, absent))}; the file has {_listed(dialect.names)}."
        )
    return text_columns(content, dialect, wanted, path.name)


def text_columns(content: bytes, dialect: CSVDialect, wanted: Sequence[str], name: str) -> dict[str, list[object]]:
    """Columns of delimited text as they are written.

    >>> text_columns(b"1, a\\n2, b\\n", CSVDialect(",", ("n", "c"), False), ["c"], "rows")
    {'c': ['a', 'b']}
    """
    table = dialect.table(dialect.body(content), dict.fromkeys(wanted, pa.string()), name, threads=True)
    return {column: [cell.strip() for cell in table.column(column).to_pylist()] for column in wanted}


def _other_delimiter(header: Sequence[str], absent: Sequence[str], used: str) -> str:
    """A hint where a header is one field that holds what is missed, between marks of another delimiter.

    >>> _other_delimiter(["age;sex"], ["age", "sex"], ",")
    " Its header is one field with ';' in it, but was read with delimiter ','. Say its own: delimiter = ';'."
    """
    for mark in ";,\t|":
        names = {name.strip(' "') for name in header[0].split(mark)} if len(header) == 1 else set()
        if len(names) > 1 and names & set(absent):
            return (
                f" Its header is one field with {mark!r} in it, but was read with delimiter {used!r}. Say its "
                f"own: delimiter = {mark!r}."
            )
    return ""


def _listed(names: Sequence[str]) -> str:
    """Names for a message: the first few dozen, without what a terminal would obey."""
    text = ", ".join(sanitize(name, most=80) for name in names[:40])
    return f"{text}, … {len(names)} in all" if len(names) > 40 else text
