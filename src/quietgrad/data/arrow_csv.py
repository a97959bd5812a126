"""Plain delimited text through pyarrow, where it is installed; columns by their distinct values.

Readers differ on quotes inside fields, lone carriage returns and bytes that are not UTF-8. Text with any of these
goes to the strict reader of :mod:`quietgrad.data.tables`, and so does text that pyarrow refuses. Both readers give
the same numbers.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.schema import Schema

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

    numbers = set(wanted[:-1]) if schema is None else {c for c, k in schema.columns.items() if k.plain}
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
    if b"(" in content and b"nan(" in content.lower():  # a spelling of NaN that not every reader knows
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
