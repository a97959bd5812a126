"""CSV and parquet tables into features and labels, with or without a public schema.

Plain delimited text is read by pyarrow where it is installed. Readers differ on quotes inside fields, lone carriage
returns and bytes that are not UTF-8, so text with any of these goes to the strict reader, and so does text that
pyarrow refuses. Both readers give the same numbers.
"""

from __future__ import annotations

import csv
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad import files
from quietgrad.data.dataset import Dataset, Task, check, encode_labels
from quietgrad.data.file_formats import EXPANSION, budget
from quietgrad.data.schema import Numeric, Schema, to_numbers
from quietgrad.errors import DataError, QuietgradError
from quietgrad.sanitize import sanitize

_MOST_COLUMNS = 4096
_BLOCK = 1 << 20  # bytes read at a time
_AT_ONCE = 2
_LONGEST_LINE = 1 << 26
_LEAST = 1 << 16  # bytes below which loading another reader takes longer than reading


class NotPlainError(Exception):
    """The text is for the strict reader."""


@dataclass(frozen=True)
class DictionaryColumn:
    """A column by its different words: row i holds ``words[codes[i]]``."""

    words: list[Any]
    codes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.codes)


def coded(values: Any) -> DictionaryColumn:
    """An Arrow column by its words; only those that occur, a gap being ``None``."""
    held = values if hasattr(values, "dictionary") else values.dictionary_encode()
    places = np.asarray(held.indices.fill_null(len(held.dictionary)).to_numpy(zero_copy_only=False), np.int64)
    used, codes = unique_small_ints(places)
    known = [*held.dictionary.to_pylist(), None]
    return DictionaryColumn([known[place] for place in used], codes)


def unique_small_ints(places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The numbers that occur among small ones, and each one's place among them; without sorting.

    >>> [part.tolist() for part in unique_small_ints(np.array([4, 1, 4]))]
    [[1, 4], [1, 0, 1]]
    """
    used = np.flatnonzero(np.bincount(places))
    at = np.zeros(int(used[-1]) + 1 if len(used) else 0, np.int64)
    at[used] = np.arange(len(used))
    return used, at[places]


def by_word(values: Any, encode: Callable[[Any], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """``encode`` of a column, asked for its different words alone where they are known."""
    return encode(values.words)[values.codes] if isinstance(values, DictionaryColumn) else encode(values)


def quick_chunks(
    content: bytes, header: Sequence[str], delimiter: str, schema: Schema | None, label: str | None
) -> Iterator[dict[str, Any]] | None:
    """The columns of plain delimited text, a few MB at a time; ``None`` if this is not the reader for it.

    Raises:
        NotPlainError: on the way, for what only the strict reader may judge.
    """
    if len(content) < _LEAST or not 1 < len(header) <= _MOST_COLUMNS or len(set(header)) != len(header):
        return None
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in " \r\n" or not _is_plain(content):
        return None
    target = schema.label if schema is not None else (label or header[-1])
    wanted = [*(schema.columns if schema is not None else (h for h in header if h != target)), target]
    if any(column not in header for column in wanted):
        return None
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return None
    return _chunks(content, header, delimiter, schema, wanted)


def _chunks(
    content: bytes, header: Sequence[str], delimiter: str, schema: Schema | None, wanted: list[str]
) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.csv as arrow_csv

    numbers = (
        set(wanted[:-1]) if schema is None else {c for c, k in schema.columns.items() if isinstance(k, Numeric)}
    )
    convert = arrow_csv.ConvertOptions(
        column_types={column: pa.float64() if column in numbers else pa.string() for column in wanted},
        include_columns=wanted,
        null_values=[""] if schema is None else list(schema.missing),
        strings_can_be_null=False,
    )
    parse = arrow_csv.ParseOptions(delimiter=delimiter, quote_char=False)
    start = content.find(b"\n") + 1 or len(content) if schema is None or not schema.names else 0
    text = pa.BufferReader(pa.py_buffer(content).slice(start))

    def columns(block: Any) -> dict[str, Any]:
        table = read_block(block, header, parse, convert)
        return {
            column: values.to_numpy() if column in numbers else coded(values.combine_chunks())
            for column, values in zip(wanted, table.columns, strict=True)
        }

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            waiting: deque[Future[dict[str, Any]]] = deque()
            for block in line_blocks(text, quoted=False):
                waiting.append(pool.submit(columns, block))
                if len(waiting) > _AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
    except (pa.ArrowException, OSError):
        raise NotPlainError from None


def line_blocks(stream: Any, *, quoted: bool) -> Iterator[bytes]:
    """The lines of a stream, some MB at a time; where fields may be ``quoted``, a line may hold ends of lines."""
    kept = b""
    while piece := stream.read(_BLOCK):
        block = kept + piece if kept else bytes(piece)
        end = block.rfind(b"\n") + 1
        odd = quoted and block.count(b'"', 0, end) % 2
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


def read_block(block: bytes, names: Sequence[str], parse: Any, convert: Any) -> Any:
    """The rows of some lines as an Arrow table.

    A reader of pyarrow that streams reads ahead in threads of its own, which may still do so when it is closed
    early; this one is done when it returns.
    """
    import pyarrow as pa
    import pyarrow.csv as arrow_csv

    read = arrow_csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=list(names))
    if not block.strip(b"\r\n"):
        return pa.schema([(name, convert.column_types[name]) for name in convert.include_columns]).empty_table()
    return arrow_csv.read_csv(pa.BufferReader(block), read, parse, convert)


def _is_plain(content: bytes) -> bool:
    """Whether every reader of delimited text sees the same cells in it."""
    if b'"' in content or b"\0" in content or content.startswith(b"\xef\xbb\xbf"):
        return False
    if b"\r" in content and content.count(b"\r") != content.count(b"\r\n"):
        return False
    if b"(" in content and b"nan(" in content.lower():  # a way to write NaN that not everybody knows
        return False
    if not content.isascii():
        try:
            content.decode()
        except UnicodeDecodeError:
            return False
    return _has_short_lines(content)


def _has_short_lines(content: bytes) -> bool:
    """Whether no field can be longer than the strict reader allows: a line ends in every half of that length."""
    half = csv.field_size_limit() // 2
    whole = range(0, len(content) - half, half)
    return all(content.find(b"\n", start, start + half) >= 0 for start in whole)


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
    name: str = "csv",
    person: str | None = None,
) -> Dataset:
    """Parse delimited text. Without a schema every column must be numeric and keeps its own scale.

    The label is `label`, or the last column. `person` is the column of the ids of the people that rows are about.

    >>> parse_csv(b"a,b,y\\n1,2,0\\n3,4,1\\n").X.tolist()
    [[1.0, 2.0], [3.0, 4.0]]
    """
    if schema is not None:
        delimiter = schema.delimiter
    elif delimiter is None:
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
        quick = None if person is not None else quick_chunks(content, header, delimiter, schema, label)
        if quick is not None:
            try:
                return _assemble(quick, header, schema, label, task, classes, name, None)
            except NotPlainError:
                pass  # what the quick reader cannot take, the strict one reads or refuses, saying why
        chunks = _column_chunks(rows, header, name)
        return _assemble(chunks, header, schema, label, task, classes, name, person)
    except csv.Error as error:
        raise DataError(f"{name}: not readable as delimited text ({error}).") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: the file is not UTF-8 text; is it a CSV file?") from None


def read_parquet(
    path: Path,
    schema: Schema | None = None,
    *,
    label: str | None = None,
    task: Task | None = None,
    classes: Sequence[object] | None = None,
    name: str = "parquet",
    person: str | None = None,
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
        return _assemble(chunks, header, schema, label, task, classes, name, person)
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


def _assemble(
    chunks: Iterator[Columns],
    header: list[str],
    schema: Schema | None,
    label: str | None,
    task: Task | None,
    classes: Sequence[object] | None,
    name: str,
    person: str | None,
) -> Dataset:
    known = set(header)
    if len(known) != len(header):
        raise DataError(f"{name}: the header names a column twice.")
    target = schema.label if schema is not None else (label or (header[-1] if header else ""))
    features = list(schema.columns) if schema is not None else [h for h in header if h not in (target, person)]
    if person is not None and (person == target or person in (schema.columns if schema is not None else ())):
        raise DataError(f"{name}: the column of people's ids cannot be the label or a feature as well.")
    absent = [c for c in (*features, target, *([] if person is None else [person])) if c not in known]
    if absent:
        raise DataError(f"{name}: no column {absent[0]!r}; the file has {_listed(header) or 'no columns'}.")
    if not features:
        raise DataError(f"{name}: there is no column besides the label {target!r}; is the delimiter another one?")
    parts: list[npt.NDArray[np.float64]] = []
    labels: list[npt.NDArray[np.int64]] = []
    ids: list[Any] = []
    seen: dict[str, int] = {}  # labels are few words: an array of text would give every row the longest one's room
    for columns in chunks:
        if schema is None:
            block = np.column_stack([by_word(columns[c], partial(to_numbers, c)) for c in features])
        else:
            block = np.hstack(
                [
                    by_word(columns[c], partial(kind.encode, c, missing=schema.missing))
                    for c, kind in schema.columns.items()
                ]
            )
        said = columns[target]
        words = [str(v).strip() for v in (said.words if isinstance(said, DictionaryColumn) else said)]
        if max(map(len, words), default=0) > _LONGEST_LABEL:
            raise DataError(f"{name}: a label has more than {_LONGEST_LABEL} characters; is {target!r} the label?")
        raw = np.fromiter((seen.setdefault(word, len(seen)) for word in words), np.int64, len(words))
        if isinstance(said, DictionaryColumn):
            raw = raw[said.codes]
        whose: list[Any] = []
        if person is not None:
            ids_here = columns[person]
            by_code = ids_here.words if isinstance(ids_here, DictionaryColumn) else ids_here
            whose = [v.strip() if isinstance(v, str) else v for v in by_code]
            if isinstance(ids_here, DictionaryColumn):
                whose = [whose[code] for code in ids_here.codes]
        if schema is not None and schema.drop_incomplete:
            complete = np.asarray(np.isfinite(block).all(axis=1))
            block, raw = block[complete], raw[complete]
            whose = [v for v, kept in zip(whose, complete, strict=False) if kept]
        ids += whose
        parts.append(block)
        labels.append(raw)
    if not parts:
        raise DataError(f"{name}: the file holds no rows.")
    X, raw = np.concatenate(parts), np.concatenate(labels)
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
    used = {*features, target, person}
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
            person=None if person is None else np.array([*ids, None], dtype=object)[:-1],
            leaves_out=schema is not None and schema.drop_incomplete,
        )
    )  # fmt: skip


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
