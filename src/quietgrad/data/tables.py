"""CSV and parquet tables into features and labels, with or without a public schema."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad import files
from quietgrad.data.arrow_csv import (
    DictionaryColumn,
    NotPlainError,
    by_word,
    coded,
    quick_chunks,
    unique_small_ints,
)
from quietgrad.data.columns import NotNumericError, to_numbers
from quietgrad.data.dataset import Dataset, Task, check, encode_labels
from quietgrad.data.file_formats import EXPANSION, budget, read_content
from quietgrad.data.schema import Schema
from quietgrad.errors import DataError, QuietgradError, boundary
from quietgrad.sanitize import sanitize

Columns: TypeAlias = dict[str, "Sequence[Any] | npt.NDArray[Any] | DictionaryColumn"]
_CHUNK = 16384  # rows turned into numbers at a time: Python strings of a whole table would dwarf its numbers
_CELLS = 1 << 20  # fewer rows at a time if they are long
_LONGEST_LABEL = 1000  # characters


def parse_csv(
    content: bytes,
    schema: Schema | None = None,
    *,
    label: str | None = None,
    task: Task | None = None,
    classes: Sequence[object] | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
    name: str = "csv",
    person: str | None = None,
    drop: Sequence[str] = (),
    keep: str | None = None,
    labelled: bool = True,
) -> Dataset:
    """Parse delimited text. Without a schema every column must be numeric and keeps its own scale.

    The label is `label`, or the last column. `person` is the column of the ids of the people that rows are about;
    `keep` one of ids that stand beside predictions. Columns of `drop` are no features.

    >>> parse_csv(b"a,b,y\\n1,2,0\\n3,4,1\\n").X.tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if schema is not None:
        delimiter, encoding = delimiter or schema.delimiter, encoding or schema.encoding
    content = as_utf8(content, encoding, name)
    if delimiter is None:
        first = content[: content.find(b"\n") + 1 or len(content)]
        delimiter = max(",;\t", key=lambda mark: first.count(mark.encode()))
    try:
        rows = _rows(content, delimiter)
    except TypeError:
        raise DataError(f"{name}: the delimiter {delimiter!r} must be a single character.") from None
    try:
        header = list(schema.names) if schema is not None and schema.names else [h.strip() for h in next(rows, [])]
        if schema is None and header and all(_is_number(h) for h in header):
            raise DataError(f"{name}: the first line holds only numbers; a CSV file needs a header line of names.")
        # Ids are taken as they are written: 007 is not 7.
        apart = _ColumnRoles(person, keep, tuple(drop), labelled)
        quick = None if apart != _ColumnRoles() else quick_chunks(content, header, delimiter, schema, label)
        if quick is not None:
            try:
                return _assemble(quick, header, schema, label, task, classes, name, apart)
            except NotPlainError:
                pass  # what the quick reader cannot take, the strict one reads or refuses, saying why
        chunks = _column_chunks(rows, header, name)
        return _assemble(chunks, header, schema, label, task, classes, name, apart)
    except csv.Error as error:
        raise DataError(f"{name}: not readable as delimited text ({error}).") from None
    except UnicodeDecodeError:
        raise DataError(_NOT_TEXT.format(name)) from None


_NOT_TEXT = "{}: the file is not UTF-8 text. Say its encoding (such as encoding='cp1252'), or is it no CSV file?"


def as_utf8(content: bytes, encoding: str | None, name: str) -> bytes:
    """Delimited text of any encoding as UTF-8."""
    try:
        if encoding is None or codecs.lookup(encoding).name in ("utf-8", "ascii"):
            return content
        return content.decode(encoding).encode()
    except LookupError:
        raise DataError(f"encoding={encoding!r}: not a known encoding, such as utf-8, cp1252 or utf-16.") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: the file is not {encoding} text.") from None


def read_header(path: Path, schema: Schema | None, delimiter: str | None, encoding: str | None) -> list[str]:
    """The column names of a delimited file."""
    encoding = encoding or (schema.encoding if schema is not None else None)
    content = as_utf8(read_content(path), encoding, path.name)
    first = content[: content.find(b"\n") + 1 or len(content)].decode("utf-8-sig", errors="replace")
    mark = delimiter or (schema.delimiter if schema is not None else max(",;\t", key=first.count))
    return [name.strip() for name in next(csv.reader([first], delimiter=mark, skipinitialspace=True), [])]


def read_cells(path: Path, schema: Schema, extra: Sequence[str] = ()) -> dict[str, list[Any]]:
    """The cells of the columns that a schema lists, its label among them, and of ``extra`` ones."""
    wanted = list(dict.fromkeys((*schema.columns, schema.label, *extra)))
    if path.suffix in (".parquet", ".pq"):
        import pyarrow.parquet

        with boundary(f"{path.name}: not a readable parquet file, or it lacks columns of the schema."):
            table = pyarrow.parquet.read_table(path, columns=wanted)
            return {name: table.column(name).to_pylist() for name in wanted}
    content = as_utf8(read_content(path), schema.encoding, path.name)
    out: dict[str, list[Any]] = {name: [] for name in wanted}
    try:
        rows = _rows(content, schema.delimiter)
        header = list(schema.names) if schema.names else [name.strip() for name in next(rows, [])]
        if absent := [name for name in wanted if name not in header]:
            raise DataError(
                f"{path.name}: no column {', '.join(map(repr, absent))}; the file has {_listed(header)}."
            )
        for chunk in _column_chunks(rows, header, path.name):
            for name in wanted:
                out[name] += _texts(chunk[name])
    except (csv.Error, UnicodeDecodeError, TypeError):
        raise DataError(_NOT_TEXT.format(path.name)) from None
    return out


def read_parquet(
    path: Path,
    schema: Schema | None = None,
    *,
    label: str | None = None,
    task: Task | None = None,
    classes: Sequence[object] | None = None,
    name: str = "parquet",
    person: str | None = None,
    drop: Sequence[str] = (),
    keep: str | None = None,
    labelled: bool = True,
) -> Dataset:
    """Read a parquet file with pyarrow (the `data` extra), under the same rules as CSV."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{name}: reading parquet needs pyarrow; pip install 'quietgrad[data]'.") from None
    try:
        most = budget(files.check_regular(path).st_size)
        table = pyarrow.parquet.ParquetFile(path)
        kinds = table.schema_arrow
        header = [str(c) for c in kinds.names]
        # Words stay codes into a short list: one long word in a million rows is stored once.
        words = [f.name for f in kinds if pyarrow.types.is_string(f.type) or pyarrow.types.is_binary(f.type)]
        table = pyarrow.parquet.ParquetFile(path, read_dictionary=words)
        facts = table.metadata
        packed = sum(facts.row_group(k).total_byte_size for k in range(facts.num_row_groups))
        if max(packed, 8 * facts.num_rows * max(1, len(header))) > most:
            raise DataError(
                f"{name}: {facts.num_rows} rows of {len(header)} columns are more than {EXPANSION} times the "
                "file's size; if it is meant so, write it as CSV or npz."
            )
        rows = max(1, min(_CHUNK, _CELLS // max(1, len(header))))
        chunks = (_parquet_columns(batch, header) for batch in table.iter_batches(batch_size=rows))
        return _assemble(
            chunks, header, schema, label, task, classes, name, _ColumnRoles(person, keep, tuple(drop), labelled)
        )
    except QuietgradError:
        raise
    except Exception:  # pyarrow's own, and what it lets through of bytes that are not parquet
        raise DataError(f"{name}: not a readable parquet file; it may be cut short.") from None


def _parquet_columns(batch: Any, header: Sequence[str]) -> Columns:
    batch.validate(full=True)  # pyarrow decodes codes beyond the dictionary without a word
    out: Columns = {}
    for k, column in enumerate(header):
        values = batch.column(k)
        out[column] = coded(values) if hasattr(values, "dictionary") else values.to_pylist()
    return out


def parse_columns(content: bytes, names: Sequence[str], name: str = "csv") -> dict[str, tuple[str, ...]]:
    """The columns of a comma-separated file without a header, as text.

    >>> parse_columns(b"1, a\\n2, b\\n", ("n", "c"))
    {'n': ('1', '2'), 'c': ('a', 'b')}
    """
    rows = _rows(content, ",")
    out: dict[str, list[Any]] = {c: [] for c in names}
    try:
        for chunk in _column_chunks(rows, list(names), name):
            for column, values in chunk.items():
                assert not isinstance(values, DictionaryColumn)
                out[column].extend(values)
    except (csv.Error, UnicodeDecodeError):
        raise DataError(f"{name}: not readable as comma-separated UTF-8 text.") from None
    return {column: tuple(values) for column, values in out.items()}


def _rows(content: bytes, delimiter: str) -> Iterator[list[str]]:
    """The rows of delimited text, decoded as they are asked for."""
    text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
    return csv.reader(text, delimiter=delimiter, skipinitialspace=True)


def _column_chunks(rows: Iterator[list[str]], header: list[str], name: str) -> Iterator[Columns]:
    seen = 0
    filled = (row for row in rows if row)  # blank lines, usually at the end, are no rows
    at_once = max(1, min(_CHUNK, _CELLS // max(1, len(header))))
    while chunk := list(islice(filled, at_once)):
        for offset, row in enumerate(chunk, start=1):
            if len(row) != len(header):
                raise DataError(
                    f"{name}: data row {seen + offset} has {len(row)} fields, the header {len(header)}. Was the "
                    "file cut short, or is the delimiter another one?"
                )
        seen += len(chunk)
        yield dict(zip(header, zip(*chunk, strict=True), strict=True))


@dataclass(frozen=True)
class _ColumnRoles:
    """Columns that are no features: of people's ids, of ids to keep, and those to leave out."""

    person: str | None = None
    keep: str | None = None
    drop: tuple[str, ...] = ()
    labelled: bool = True

    @property
    def read(self) -> list[str]:
        return [name for name in (self.person, self.keep) if name is not None]


def _assemble(
    chunks: Iterator[Columns],
    header: list[str],
    schema: Schema | None,
    label: str | None,
    task: Task | None,
    classes: Sequence[object] | None,
    name: str,
    apart: _ColumnRoles,
) -> Dataset:
    known, person = set(header), apart.person
    if len(known) != len(header):
        raise DataError(f"{name}: the header names a column twice.")
    target = schema.label if schema is not None else (label or (header[-1] if header else ""))
    if schema is not None and apart.drop:
        schema = schema.without([column for column in apart.drop if column in schema.columns])
    aside = {target, *apart.read, *apart.drop}
    features = list(schema.columns) if schema is not None else [h for h in header if h not in aside]
    if person is not None and (person == target or person in (schema.columns if schema is not None else ())):
        raise DataError(f"{name}: the column of people's ids cannot be the label or a feature as well.")
    wanted = (*features, *([target] if apart.labelled else []), *apart.read, *apart.drop)
    absent = [c for c in wanted if c not in known]
    if absent:
        named = ", ".join(repr(column) for column in dict.fromkeys(absent))
        raise DataError(f"{name}: no column {named}; the file has {_listed(header) or 'no columns'}.")
    if not features:
        raise DataError(f"{name}: there is no column besides the label {target!r}; is the delimiter another one?")
    # Without labels, one public class or number stands in their place.
    filler = str(((classes if schema is None else schema.classes) or ("0",))[0])
    parts: list[npt.NDArray[np.float64]] = []
    labels: list[npt.NDArray[np.int64]] = []
    ids: dict[str, list[Any]] = {column: [] for column in apart.read}
    gaps: dict[str, int] = {}
    seen: dict[str, int] = {}  # labels are few words: an array of text would give every row the longest one's room
    for columns in chunks:
        block = _encoded(columns, features, schema, gaps)
        # Without labels, one public class or number stands in their place.
        said = columns[target] if target in columns else [filler] * len(block)
        words = [str(v).strip() for v in (said.words if isinstance(said, DictionaryColumn) else said)]
        if schema is not None:
            words = [schema.label_word(word) for word in words]
        if max(map(len, words), default=0) > _LONGEST_LABEL:
            raise DataError(f"{name}: a label has more than {_LONGEST_LABEL} characters; is {target!r} the label?")
        raw = np.fromiter((seen.setdefault(word, len(seen)) for word in words), np.int64, len(words))
        if isinstance(said, DictionaryColumn):
            raw = raw[said.codes]
        whose = {column: _texts(columns[column]) for column in ids}
        if schema is not None and schema.drop_incomplete:
            complete = np.asarray(np.isfinite(block).all(axis=1))
            block, raw = block[complete], raw[complete]
            whose = {c: [v for v, kept in zip(of, complete, strict=True) if kept] for c, of in whose.items()}
        for column, of in whose.items():
            ids[column] += of
        parts.append(block)
        labels.append(raw)
    if not parts:
        raise DataError(f"{name}: the file holds no rows.")
    X, raw = np.concatenate(parts), np.concatenate(labels)
    if gaps and not (schema is not None and schema.drop_incomplete):
        counted = ", ".join(f"{sanitize(column, most=80)!r} ({rows} rows)" for column, rows in gaps.items())
        raise DataError(
            f"{name}: the features hold missing, NaN or infinite values in {counted}. Fill them with public values "
            'first: in a schema missing = "indicator" or fill = NUMBER for the column, or drop_incomplete = true '
            "for the table. No privacy budget was spent."
        )
    if schema is not None:
        task = "regression" if schema.classes is None else None
        classes = schema.classes
    occurring, places = unique_small_ints(raw)
    words_seen = np.array(list(seen), dtype=object)[occurring]
    y, kind_of_task, codes, class_names = encode_labels(name, words_seen, task, classes)
    y = y[places]
    bounds = schema.label_bounds if schema is not None else None
    if bounds is not None:
        y = np.clip(y.astype(np.float64), *bounds)
    notes = []
    used = {*features, target, *apart.read}
    if left_out := [h for h in header if h not in used]:
        notes.append(f"columns left out: {_listed([h or '(row name)' for h in left_out])}")
    if schema is not None and schema.drop_incomplete:
        notes.append("rows with a missing entry left out")
    return check(
        Dataset(
            name, X, y, task=kind_of_task, classes=codes,
            row_bound=schema.row_bound if schema is not None else None,
            notes=tuple(notes), class_names=class_names, label_bounds=bounds,
            feature_names=schema.feature_names if schema is not None else tuple(features),
            person=None if person is None else np.array([*ids[person], None], dtype=object)[:-1],
            ids=None if apart.keep is None else tuple(str(v) for v in ids[apart.keep]),
            feature_bounds=None if schema is None else schema.feature_bounds,
            bounded_names=() if schema is None else schema.bounded_names,
            leaves_out=schema is not None and schema.drop_incomplete,
        )
    )  # fmt: skip


def _encoded(
    columns: Columns, features: Sequence[str], schema: Schema | None, gaps: dict[str, int]
) -> npt.NDArray[np.float64]:
    """The features of some rows; counts rows with a gap by column, and refuses all columns that are no numbers."""
    blocks: list[npt.NDArray[np.float64]] = []
    refused: list[str] = []
    for column in features:
        if schema is None:
            encode: Any = partial(to_numbers, column)
        else:
            encode = partial(schema.columns[column].encode, column, missing=schema.missing)
        try:
            block = by_word(columns[column], encode)
        except NotNumericError as error:
            refused += error.columns
            continue
        block = block[:, None] if block.ndim == 1 else block
        if rows := int((~np.isfinite(block)).any(axis=1).sum()):
            gaps[column] = gaps.get(column, 0) + rows
        blocks.append(block)
    if refused:
        raise NotNumericError(*refused)
    return np.hstack(blocks)


def _texts(values: Any) -> list[Any]:
    """A column of ids as they are written."""
    words = values.words if isinstance(values, DictionaryColumn) else values
    words = [v.strip() if isinstance(v, str) else v for v in words]
    return [words[code] for code in values.codes] if isinstance(values, DictionaryColumn) else words


def _listed(names: Sequence[str]) -> str:
    """Names for a message: the first few dozen, without what a terminal would obey."""
    text = ", ".join(sanitize(name, most=80) for name in names[:40])
    return f"{text}, … {len(names)} in all" if len(names) > 40 else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
