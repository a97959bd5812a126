"""Delimited text as Arrow columns, for files that are loaded and for scans.

pyarrow reads it. Its messages may quote a cell, so none of them is shown. The csv module reads again what pyarrow
refuses, and its refusals name columns and row numbers.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from quietgrad.core.errors import DataError
from quietgrad.data.columns import MISSING, NotNumericError, is_number, to_numbers
from quietgrad.data.schema import Schema


@dataclass(frozen=True)
class CSVDialect:
    """How delimited text is read: its delimiter, columns and header, and what means a gap in a number."""

    delimiter: str
    names: tuple[str, ...]
    header: bool
    missing: tuple[str, ...] = ("",)
    declared: bool = False
    """Whether a schema says what the columns are, so that an error can name its entries."""
    before: int = 0
    """Lines before the header."""
    behind: int = 0
    """Lines behind the header that hold no records, such as units."""

    @classmethod
    def of(cls, start: bytes, where: str, schema: Schema | None = None, delimiter: str | None = None) -> CSVDialect:
        """The dialect that the first line and the schema tell."""
        before, behind = (0, 0) if schema is None else (schema.skip_lines, schema.skip_rows)
        start = start[_end_of_lines(start, before) :]
        first = start[: start.find(b"\n") + 1 or len(start)]
        if delimiter is None:
            delimiter = (
                schema.delimiter if schema is not None else max(",;\t", key=lambda m: first.count(m.encode()))
            )
        missing = MISSING if schema is None else schema.missing
        try:
            arrow_csv.ParseOptions(delimiter=delimiter)
            if schema is not None and schema.names:
                return cls(delimiter, schema.names, False, missing, True, before, behind)
            row = next(csv.reader([first.decode("utf-8-sig")], delimiter=delimiter, skipinitialspace=True), [])
        except UnicodeDecodeError:
            raise DataError(_NOT_TEXT.format(where)) from None
        except (TypeError, ValueError):
            raise DataError(f"{where}: the delimiter {delimiter!r} must be a single character.") from None
        except csv.Error:
            raise DataError(f"{where}: not readable as delimited text.") from None
        return cls(
            delimiter, tuple(name.strip() for name in row), True, missing, schema is not None, before, behind
        )

    def body(self, text: bytes) -> memoryview:
        """A file's text without its header line and the lines around it that hold no records."""
        return memoryview(text)[_end_of_lines(text, self.before + self.header + self.behind) :]

    def table(
        self,
        lines: bytes | memoryview,
        kinds: dict[str, pa.DataType],
        where: str,
        *,
        before: int = 0,
        threads: bool = False,
    ) -> pa.Table:
        """The columns of ``kinds`` in some lines; ``before`` is the number of rows read already.

        Raises:
            DataError: the lines are no such table; the message quotes no cell.
        """
        if len(lines) < 4096 and not bytes(lines).strip(b"\r\n"):
            return pa.schema(list(kinds.items())).empty_table()
        table = None
        self._check_quotes(lines, where)
        # pyarrow takes a quote after a space as part of the cell.
        if not re.search(rb'(?:^|[%b\n]) +"' % re.escape(self.delimiter.encode()), lines):
            with suppress(pa.ArrowException, ValueError):
                table = self._by_arrow(lines, kinds, threads)
        if table is None:
            table = self._by_csv(lines, kinds, where, before)
        # pyarrow compares cells with gaps before it leaves spaces out: numbers that mean a gap are compared here.
        gaps = pa.array([float(gap) for gap in self.missing if is_number(gap)], pa.float64())
        for place, column in enumerate(table.column_names if len(gaps) else ()):
            if kinds[column] == pa.float64():
                kept = pc.if_else(pc.is_in(table[column], gaps), pa.scalar(None, pa.float64()), table[column])
                table = table.set_column(place, column, kept)
        return table

    def _check_quotes(self, lines: bytes | memoryview, where: str) -> None:
        """Raise DataError for a quoted cell that does not end, or that goes on behind its closing quote.

        Readers take what follows for a part of the cell: one record would remove all others up to the next quote.
        """
        if re.search(b'"', lines) is None:
            return
        mark = re.escape(self.delimiter.encode())
        cells = re.compile(rb'(?:\A|[%b\r\n]) *"(?:[^"]|"")*+("?) *([%b\r\n]?)' % (mark, mark))
        place = 0
        while cell := cells.search(lines, place):
            place = cell.start(2)
            if not cell[1] or (not cell[2] and place < len(lines)):
                raise DataError(
                    f"{where}: a quoted cell has no closing quote, or text behind it. Double the quotes "
                    "that belong to a cell. No privacy budget was spent."
                )
            place = max(place, cell.start() + 1)

    def _by_arrow(self, lines: bytes | memoryview, kinds: dict[str, pa.DataType], threads: bool) -> pa.Table:
        read = arrow_csv.ReadOptions(
            use_threads=threads, block_size=1 << 20 if threads else len(lines) + 1, column_names=list(self.names)
        )
        quoted = re.search(b'"', lines) is not None  # pyarrow is faster where it need not look for quotes
        parse = arrow_csv.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if quoted else False,
            newlines_in_values=quoted,
            ignore_empty_lines=len(self.names) > 1,  # of one column, an empty line is an empty cell
        )
        convert = arrow_csv.ConvertOptions(
            column_types=kinds,
            include_columns=list(kinds),
            null_values=list(self.missing),
            strings_can_be_null=False,
        )
        return arrow_csv.read_csv(pa.BufferReader(lines), read, parse, convert)

    def _by_csv(
        self, lines: bytes | memoryview, kinds: dict[str, pa.DataType], where: str, before: int
    ) -> pa.Table:
        """The same by the csv module: slower, with spaces around cells left out, and with reasons of its own."""
        tables: list[pa.Table] = []
        wrong: set[str] = set()
        number = before
        text = io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", newline="")
        read = csv.reader(text, delimiter=self.delimiter, skipinitialspace=True)
        try:
            while some := list(islice(read, _ROWS)):
                rows = [row or [""] for row in some if row or len(self.names) == 1]
                for row in rows:
                    number += 1
                    if len(row) != len(self.names):
                        raise DataError(
                            f"{where}: data row {number} has {len(row)} fields, the header {len(self.names)}. Was "
                            "the file cut short, or is the delimiter another one?"
                        )
                found: dict[str, pa.Array] = {}
                for column, kind in kinds.items():
                    place = self.names.index(column)
                    cells = [row[place].strip() for row in rows]
                    try:
                        numbers = to_numbers(column, cells, self.missing) if kind == pa.float64() else None
                        found[column] = pa.array(cells if numbers is None else numbers, kind, from_pandas=True)
                    except NotNumericError:
                        wrong.add(column)
                if rows and not wrong:
                    tables.append(pa.table(found))
        except UnicodeDecodeError:
            raise DataError(_NOT_TEXT.format(where)) from None
        except csv.Error:
            raise DataError(f"{where}: not readable as delimited text.") from None
        if wrong:
            raise NotNumericError(*(column for column in kinds if column in wrong), declared=self.declared)
        return pa.concat_tables(tables or [pa.schema(list(kinds.items())).empty_table()])


_ROWS = 16_384  # that the csv module reads before they become Arrow columns
_NOT_TEXT = (
    "{}: the file is not UTF-8 text. Say its encoding (such as {{encoding='cp1252'}}), or is it no CSV file?"
)


def as_utf8(content: bytes, encoding: str | None, name: str) -> bytes:
    """Delimited text of any encoding as UTF-8."""
    try:
        if encoding is None or codecs.lookup(encoding).name in ("utf-8", "ascii"):
            return content
        return content.decode(encoding).encode()
    except LookupError:
        raise DataError(
            "{encoding}: not a known encoding, such as utf-8, cp1252 or utf-16.", encoding=encoding
        ) from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: the file is not {encoding} text.") from None


def _end_of_lines(text: bytes, count: int) -> int:
    """Where the first ``count`` lines of a text end."""
    place = 0
    for _ in range(count):
        if place == len(text):
            break
        place = text.find(b"\n", place) + 1 or len(text)
    return place


def without_end(text: bytes, count: int) -> bytes:
    """A text without its last ``count`` lines; blank lines behind them are none.

    >>> without_end(b"1\\n2\\ntotal\\n\\n", 1)
    b'1\\n2\\n'
    """
    place = len(text.rstrip(b"\r\n")) if count else len(text)
    for _ in range(count):
        place = max(text.rfind(b"\n", 0, place), 0)
    return text[: place + 1] if count and place else text[:place]
