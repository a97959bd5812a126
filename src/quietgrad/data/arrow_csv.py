"""Columns by their distinct values, and blocks of lines for pyarrow's reader of delimited text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 20  # bytes read at a time
_LONGEST_LINE = 1 << 26


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
    """The numbers that occur among small ones, and each one's place among them; without sorting."""
    used = np.flatnonzero(np.bincount(places))
    at = np.zeros(int(used[-1]) + 1 if len(used) else 0, np.int64)
    at[used] = np.arange(len(used))
    return used, at[places]


def by_word(values: Any, encode: Callable[[Any], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """``encode`` of a column, asked for its different words alone where they are known."""
    return encode(values.words)[values.codes] if isinstance(values, DictionaryColumn) else encode(values)


def line_blocks(stream: Any) -> Iterator[bytes]:
    """The lines of a stream, some MB at a time; fields may be quoted, so a line may hold ends of lines."""
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
