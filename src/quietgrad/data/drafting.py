"""Drafting a schema from a file's header and the form of its cells.

This looks at private data for their owner, once, without noise. It decides kinds and formats alone: no value of a
cell is written into the draft, and bounds and vocabularies are left for the owner to fill in from public knowledge.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quietgrad.core.errors import DataError, boundary
from quietgrad.core.files import check_regular
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import CURRENCIES, DATE_FORMATS, GAP_WORDS, MISSING, NO, YES, first_date, is_number
from quietgrad.data.file_formats import read_content
from quietgrad.data.id_columns import is_id_column, may_be_ids
from quietgrad.data.text_layout import TextLayout, delimiter_of, layout_of, separator_of

_WHOLE = re.compile(r"[+-]?\d{1,15}")
_WEIGHTS = re.compile(r"(^|[^a-z])(p|hh|survey)?_?(weight|weights|wgt|wt)$")
_SIGN = rf"(?:[$€£¥₹]|{CURRENCIES})?"
_DIGITS: tuple[tuple[str, str, str], ...] = (
    (".", ",", r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"),
    (",", ".", r"(?:\d{1,3}(?:\.\d{3})+|\d+)(?:,\d+)?"),
    (".", "'", r"(?:\d{1,3}(?:['’ ]\d{3})+|\d+)(?:\.\d+)?"),
    (",", " ", r"(?:\d{1,3}(?:[ \u00a0]\d{3})+|\d+)(?:,\d+)?"),
)


def _amount(digits: str) -> re.Pattern[str]:
    """Amounts with their currency or per cent; negative ones have a minus on one side, or stand in parentheses."""
    unit = rf"\s?(?:[$€£¥₹%]|{CURRENCIES})?"
    inner = rf"{_SIGN}\s?{digits}{unit}"
    negative = rf"{_SIGN}\s?\(\s?{inner}\s?\){unit}|{inner}-"
    return re.compile(rf"[+-]?{_SIGN}\s?[+-]?{digits}{unit}|{negative}")


_FORMATS = tuple((decimal, thousands, _amount(digits)) for decimal, thousands, digits in _DIGITS)
_FEW = 30  # different whole numbers up to which a label is a class
_MANY = 200  # different words above which a column is text
_LONG = 60  # characters
_GAP_NUMBERS = ("999", "9999", "99999", "999999", "9999999", "-999", "-9999", "99", "-99", "-9", "-1")
"""Numbers that stand for a gap where they stand alone, far from all others."""
_ENOUGH = 20  # cells from which on a few may be written otherwise
_FEW_WORDS = 3  # different words in a column of numbers that count as gaps however many cells have them
_STRAYS = 0.05  # share of cells that are no numbers or dates, up to which they count as gaps
_FEWEST_GAPS = 3  # cells with such a number


@dataclass(frozen=True)
class DraftColumn:
    """Findings from the form of a column's cells: its kind, its notation, and whether cells are empty."""

    name: str
    kind: str
    gaps: bool = False
    gap_words: bool = False
    """Whether gaps are written as words, such as n/a or -, that a file read without a schema does not know."""
    decimal: str = "."
    thousands: str = ""
    formats: tuple[str, ...] = ()
    """Of dates: the forms in which they are written."""
    lenient: bool = False
    """Whether a few cells are no numbers or no dates, and count as gaps."""
    gap_number: str = ""
    """The number that stands alone, such as 999, and is taken for a gap."""
    separator: str = ""
    """Of choices: the mark between the answers of one cell."""
    coded: bool = False
    """Whether a label's classes are written as whole numbers."""

    def lines(self, *, is_label: bool) -> list[str]:
        """The column's part of a schema file, with comments on what to fill in."""
        is_class = is_label and "number" not in self.kind and self.kind != "yes/no"
        lines = [f'kind = "{"category" if is_class else self.kind}"']
        if is_class:
            regression = '; or kind = "whole number", and bounds, for a regression' if self.coded else ""
            lines.append(f'classes = []  # all class labels, such as ["no", "yes"]: needed{regression}')
        elif "number" in self.kind:
            if self.decimal != ".":
                lines.append(f"decimal = {json.dumps(self.decimal)}")
            if self.thousands:
                lines.append(f"thousands = {json.dumps(self.thousands)}")
            if self.lenient:
                lines.append('unreadable = "gap"  # a cell that is no number counts as missing')
            ends = "possible value, such as [0, 100000]; [] is found privately"
            plausible = "plausible value, such as [0, 120]"
            lines.append(f"bounds = []  # the lowest and highest {ends if is_label else plausible}")
        elif self.kind in ("category", "choices"):
            if self.separator:
                lines.append(f"separator = {json.dumps(self.separator)}  # between the answers of a cell")
            lines.append(
                'categories = []  # all values that matter, such as ["a", "b"]; others set no feature: needed'
            )
        elif self.kind == "date":
            lines += [
                f"format = {json.dumps(self.formats[0] if len(self.formats) == 1 else self.formats)}",
                *('unreadable = "gap"  # a cell that is no date counts as missing' for _ in range(self.lenient)),
                'bounds = []  # the first and last plausible day, such as ["2000-01-01", "2030-12-31"]',
                'parts = ["days", "month", "weekday"]',
            ]
        elif self.kind in ("id", "text"):
            lines[0] += (
                "  # no feature; it can be kept beside predictions" if self.kind == "id" else "  # no feature"
            )
        if self.gaps and not is_label and self.kind not in ("id", "text"):
            lines.append('missing = "indicator"  # some cells are gaps: a constant in their place, and a flag')
        return lines


@dataclass(frozen=True)
class Draft:
    """A drafted schema; ``problems`` say what keeps a column from being read."""

    file: str
    columns: tuple[DraftColumn, ...]
    label: str
    delimiter: str | None
    """Of delimited text; ``None`` of a file that has none, as ``encoding``."""
    encoding: str | None
    problems: tuple[str, ...] = field(default=())
    layout: TextLayout = field(default_factory=TextLayout)

    def to_toml(self) -> str:
        """The schema file, with comments on what to fill in."""
        out = [
            f"# Schema of {sanitize(self.file)}, drafted from its header and the form of its cells, without noise.",
            "# The draft is a look at the data for their owner. It is NOT private: kinds, formats, numbers that",
            "# stand for gaps and the comments depend on cells. Keep it to yourself, and publish a schema only if",
            "# you would have written each of its lines without the file. A run keeps it without the comments.",
            "# Fill in bounds, categories and classes from PUBLIC knowledge: a range or a list that is computed",
            "# from this file would publish something about its people. Empty bounds are found privately.",
            *(f"# problem: {problem}" for problem in self.problems),
            *(f"delimiter = {json.dumps(self.delimiter)}" for _ in range(self.delimiter is not None)),
            *(f"encoding = {json.dumps(self.encoding)}" for _ in range(self.encoding is not None)),
            *(
                f"{key} = {count}"
                for key, count in zip(("skip_lines", "skip_rows", "skip_end"), self.layout, strict=True)
                if count
            ),
        ]
        numbers = sorted({column.gap_number for column in self.columns if column.gap_number})
        if numbers or any(column.gap_words for column in self.columns):
            listed = ", ".join(json.dumps(word, ensure_ascii=False) for word in (*GAP_WORDS, *numbers))
            out += [
                "# What stands for a gap where a number, a date or a yes or no is expected.",
                f"missing = [{listed}]",
            ]
        out.append("")
        target = next(column for column in self.columns if column.name == self.label)
        out += ["[label]", f"column = {_quoted(target.name)}", *target.lines(is_label=True), ""]
        for column in self.columns:
            if column is not target:
                out += [f"[columns.{_quoted(column.name)}]", *column.lines(is_label=False), ""]
        return "\n".join(out)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def draft_schema(
    path: str | Path,
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
    keep: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Draft:
    """Draft the schema of a delimited, parquet or xlsx file from its header and the form of its cells.

    The label is `label`, or the last column. Columns of `drop` are left out; `keep` is a column of ids. Every other
    column that becomes no feature is named in the draft's problems.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text("age;town;ill\\n31;Bonn;yes\\nn/a;Ulm;no\\n45;Bonn;no\\n")
    >>> [(column.name, column.kind, column.gaps) for column in draft_schema(path).columns]
    [('age', 'whole number', True), ('town', 'category', False), ('ill', 'yes/no', False)]
    """
    path = Path(path)
    is_parquet = path.suffix.lower() in (".parquet", ".pq")
    cells = _parquet_cells(path) if is_parquet else _text_cells(path, delimiter, encoding)
    name, header, problems = path.name, list(cells.columns), list(cells.problems)
    target = label or (header[-1] if header else "")
    if unknown := [c for c in (target, *drop, *([] if keep is None else [keep])) if c not in cells.columns]:
        raise DataError(f"{name}: no column {', '.join(map(repr, unknown))}; the file has {', '.join(header)}.")
    columns: list[DraftColumn] = []
    alone = _numbers_alone(cells.columns)
    for column, texts in cells.columns.items():
        if column in drop:
            continue
        drafted = DraftColumn(column, "id") if column == keep else _column(column, texts, is_label=column == target)
        if column in alone and drafted.kind in ("whole number", "number"):
            drafted = replace(drafted, gaps=True, gap_number=alone[column])
            problems.append(
                f"column {column!r}: {alone[column]} stands alone, far from all other numbers, and is taken for a "
                "gap; strike it in missing = [...] if it is a number"
            )
        if drafted.kind == "empty":
            problems.append(f"column {column!r} is empty and left out")
            continue
        columns.append(drafted)
        if column == target and drafted.gaps:
            problems.append(f"the label {target!r} has gaps: they count as the first class; remove those rows")
        elif column != keep and drafted.kind in ("id", "text"):
            problems.append(f"column {column!r} is drafted as {drafted.kind} and is no feature")
        if drafted.kind == "id" and len(set(texts)) < len(texts):
            problems.append(
                f"column {column!r} repeats: if it names people, each has several rows. Train with --person "
                f"{shlex.quote(column)}, so that ε holds for a person and not for a row"
            )
        if len(set(texts)) == 1:
            problems.append(
                f"column {column!r} is the same in every row: it tells nothing, and its noise costs; leave it out "
                f"with --drop {column}"
            )
        if drafted.kind == "date" and any(map(_has_time, texts)):
            problems.append(
                f"column {column!r}: cells have a time of day, which is left out; the day alone becomes features"
            )
        if "number" in drafted.kind and column != target and _WEIGHTS.search(column.lower()):
            problems.append(
                f"column {column!r}: survey weights are no feature. If it holds them, leave it out, and pass it in "
                "Python as sample_weight with its public max_weight"
            )
        if drafted.lenient and drafted.kind == "date":
            problems.append(
                f"column {column!r}: most cells are dates, {_not_dates(drafted, texts)} are none and count as gaps "
                "(unreadable); look at them"
            )
        elif drafted.lenient:
            problems.append(
                f"column {column!r}: most cells are numbers, {_strays(texts, 0.5)} are words and count as gaps "
                "(unreadable); look at them"
            )
        if len(drafted.formats) > 1:
            problems.append(
                f"column {column!r}: dates are written in {len(drafted.formats)} ways; the first that fits is taken"
            )
        if drafted.kind in ("category", "choices", "text") and (strays := _strays(texts)):
            problems.append(
                f"column {column!r}: most cells are numbers, {strays} are words. If these are gaps, list them in "
                f'missing = [...] and set kind = "number"; as it stands the column is drafted as {drafted.kind}'
            )
    rest = [column for column in columns if column.name not in (target, keep)]
    if maybe := [column.name for column in rest if _may_be_people(column, cells.columns[column.name])]:
        problems.append(
            f"{named_columns(maybe)} may be ids of people: many values, each in a few rows. If so, train with "
            "--person and that column, so that ε holds for a person and not for a row"
        )
    if target not in [column.name for column in columns]:
        raise DataError(f"{name}: the label {target!r} has no entries, or is dropped.")
    return Draft(name, tuple(columns), target, cells.delimiter, cells.encoding, tuple(problems), cells.layout)


def named_columns(names: Sequence[str], most: int = 10) -> str:
    """Columns by name for one line, the first ones if there are many.

    >>> named_columns(["a", "b"]), named_columns(["a", "b", "c"], most=2)
    ("columns 'a', 'b'", "columns 'a', 'b', … 3 in all")
    """
    listed = ", ".join(repr(sanitize(name)) for name in names[:most])
    more = f", … {len(names)} in all" if len(names) > most else ""
    return f"column{'s' if len(names) > 1 else ''} {listed}{more}"


def _may_be_people(column: DraftColumn, texts: Sequence[str]) -> bool:
    """Whether a column that is drafted as another kind repeats as ids of people do."""
    if column.kind not in ("whole number", "text", "category"):
        return False
    return may_be_ids([text for text in texts if text not in GAP_WORDS])


def _has_time(text: str) -> bool:
    """Whether a date's cell has a time of day other than midnight."""
    time = re.split(r"[T ]", text, maxsplit=1)[1:]
    return bool(time) and any(digit in "123456789" for digit in re.split(r"[Z+]|-", time[0])[0])


@dataclass(frozen=True)
class _FileCells:
    """The cells of a file by column, as texts, and how they are written."""

    columns: Mapping[str, Sequence[str]]
    problems: Sequence[str] = ()
    delimiter: str | None = None
    encoding: str | None = None
    layout: TextLayout = field(default_factory=TextLayout)


def read_text_cells(
    path: Path, delimiter: str | None = None, encoding: str | None = None, layout: TextLayout | None = None
) -> Mapping[str, Sequence[str]]:
    """The cells of a delimited, parquet or xlsx file by column, as texts; ``layout``: as a schema says it."""
    is_parquet = path.suffix.lower() in (".parquet", ".pq")
    return (_parquet_cells(path) if is_parquet else _text_cells(path, delimiter, encoding, layout)).columns


def _text_cells(
    path: Path, delimiter: str | None, encoding: str | None, layout: TextLayout | None = None
) -> _FileCells:
    name, content = path.name, read_content(path)
    if path.suffix.lower() == ".xlsx":  # whose content is text of ours
        delimiter, encoding = ",", "utf-8"
    if encoding is None and b"\0" in content[:4096]:
        raise DataError(
            f"{name}: is no delimited text. A schema is drafted for CSV, .parquet and .xlsx files; text of another "
            "kind than UTF-8 or cp1252 needs its --encoding, such as utf-16."
        )
    for one in (encoding,) if encoding else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(one)
            break
        except (UnicodeDecodeError, LookupError):
            continue
    else:
        raise DataError(f"{name}: the file is not {encoding or 'UTF-8 or cp1252'} text; pass its --encoding.")
    mark = delimiter or delimiter_of(text)
    try:
        rows = [
            [cell.strip() for cell in row]
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True)
        ]
    except (csv.Error, TypeError):
        raise DataError(f"{name}: not readable as delimited text; pass --delimiter and --encoding.") from None
    layout = layout_of(rows) if layout is None else layout
    rows = rows[layout.before :]
    header, body = rows[0] if rows else [], [row for row in rows[1:] if row]
    body = body[layout.behind : len(body) - layout.end]
    if not header or len(set(header)) != len(header):
        raise DataError(f"{name}: the header names a column twice, or none.")
    whole = [row for row in body if len(row) == len(header)]
    if not whole:
        raise DataError(f"{name}: the file holds no rows of {len(header)} fields; is the delimiter another one?")
    ragged = len(body) - len(whole)
    problems = [f"{ragged} rows do not have the header's {len(header)} fields"] if ragged else []
    problems += layout.problems
    if all(is_number(cell) for cell in header if cell):
        problems.append("the first line holds only numbers; a CSV file needs a header line of names")
    columns = {column: [row[place] for row in whole] for place, column in enumerate(header)}
    return _FileCells(columns, problems, mark, "utf-8" if one == "utf-8-sig" else one, layout)


def _parquet_cells(path: Path) -> _FileCells:
    """The cells of a parquet file as the texts that a CSV file would have; other types than those are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from quietgrad.data.tables import is_number_type, is_text_type

    check_regular(path)
    with boundary(f"{path.name}: not a readable parquet file; it may be cut short."):
        kinds = pq.read_schema(path)
        if len(set(kinds.names)) != len(kinds.names):
            raise DataError(f"{path.name}: the header names a column twice.")
        columns: dict[str, Sequence[str]] = {}
        problems = []
        for field in kinds:
            kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            if not (
                is_number_type(kind) or is_text_type(kind) or pa.types.is_date(kind) or pa.types.is_timestamp(kind)
            ):
                problems.append(f"column {field.name!r} is {sanitize(kind, most=40)} and left out")
                continue
            values = pq.read_table(path, columns=[field.name]).column(0).to_pylist()
            columns[str(field.name)] = ["" if value is None else str(value).strip() for value in values]
    if not columns or not any(columns.values()):
        raise DataError(f"{path.name}: the file holds no rows of numbers, words or dates.")
    return _FileCells(columns, problems)


def _column(name: str, cells: Sequence[str], *, is_label: bool) -> DraftColumn:
    """The kind of a column by the form of its cells.

    Words for a gap are gaps where the other cells are numbers, dates or yes and no. In a column of words they are
    words like the others, because ``none`` may well be an answer.
    """
    filled = [cell for cell in cells if cell not in MISSING]
    present = [cell for cell in filled if cell not in GAP_WORDS]
    if present and len(present) < len(filled):
        drafted = _kind(name, present, is_label=is_label)
        if drafted.kind not in ("category", "text") or (is_label and _are_numbers(present)):
            return replace(drafted, gaps=True, gap_words=drafted.kind != "id")
    drafted = _kind(name, filled, is_label=is_label, constant=len(set(cells)) == 1)
    return replace(drafted, gaps=drafted.gaps or len(filled) < len(cells))


def _numbers_alone(columns: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """By column, the number that stands for a gap: it is repeated, and further from the others than they spread.

    A number that is an ordinary one in another column is none, because a schema lists gaps for the whole table.
    """
    found: dict[str, str] = {}
    ordinary: set[str] = set()
    for name, cells in columns.items():
        filled = [cell for cell in cells if cell not in GAP_WORDS]
        if not filled or not all(_WHOLE.fullmatch(cell) or is_number(cell) for cell in filled):
            continue
        for code in _GAP_NUMBERS:
            others = [float(cell) for cell in filled if cell != code]
            if len(filled) - len(others) < _FEWEST_GAPS or len(set(others)) < _FEWEST_GAPS:
                continue
            low, high, value = min(others), max(others), float(code)
            apart = max(low - value, value - high)
            if apart > max(high - low, 10.0) and name not in found:
                found[name] = code
            else:
                ordinary.add(code)
    return {name: code for name, code in found.items() if code not in ordinary}


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(is_number(cell) for cell in cells)


def _mostly_numbers(cells: Sequence[str], at_most: float) -> tuple[str, str, int] | None:
    """Decimal mark and separator of thousands by which most cells are numbers, and how many are not.

    ``None`` if more than the share ``at_most`` of the cells are not.
    """
    notations = [(".", "", sum(not is_number(cell) for cell in cells))]
    notations += [
        (decimal, thousands, sum(not form.fullmatch(cell) for cell in cells))
        for decimal, thousands, form in _FORMATS
    ]
    best = min(notations, key=lambda notation: notation[2])  # the first of equals
    return best if best[2] <= at_most * len(cells) else None


def _numbers_and_few_words(cells: Sequence[str]) -> tuple[str, str, int] | None:
    """:func:`_mostly_numbers` of a column with a few words, or with few different ones such as "don't know".

    A code that has digits, such as A12, is no word.
    """
    mostly = _mostly_numbers(cells, _STRAYS)
    if mostly is not None:
        return mostly
    mostly = _mostly_numbers(cells, 0.5)
    if mostly is None:
        return None
    decimal, thousands, _ = mostly
    forms = [form for mark, apart, form in _FORMATS if (mark, apart) == (decimal, thousands)]
    words = {cell for cell in cells if not is_number(cell) and not any(form.fullmatch(cell) for form in forms)}
    plain = all(len(word) > 3 and not any(letter.isdigit() for letter in word) for word in words)
    numbers = {cell for cell in cells if cell not in words}
    return mostly if plain and len(words) <= _FEW_WORDS < len(numbers) else None


def _strays(cells: Sequence[str], at_most: float = 0.1) -> int:
    """How many cells of a column are words, if no more than the share ``at_most`` are; else 0."""
    filled = [cell for cell in cells if cell not in GAP_WORDS]
    mostly = _mostly_numbers(filled, at_most)
    return 0 if mostly is None else mostly[2]


def _kind(name: str, filled: Sequence[str], *, is_label: bool, constant: bool = False) -> DraftColumn:
    words = set(filled)
    if not filled:
        return DraftColumn(name, "empty")
    if len(words) <= 6 and {word.lower() for word in words} <= YES | NO and not constant:
        return DraftColumn(name, "yes/no")
    if all(_WHOLE.fullmatch(word) for word in words):
        dated = _dates(words) if all(len(word) == 8 for word in words) else ""
        if dated and not is_label:
            return DraftColumn(name, "date", formats=(dated,))
        if not is_label and is_id_column(name, filled, words):
            return DraftColumn(name, "id")
        few = is_label and len(words) <= _FEW
        return DraftColumn(name, "category" if few else "whole number", coded=few)
    if all(is_number(word) for word in words):
        return DraftColumn(name, "number")
    for decimal, thousands, form in _FORMATS:
        if all(form.fullmatch(word) for word in words):
            return DraftColumn(name, "number", decimal=decimal, thousands=thousands)
    if dated := _dates(words):
        return DraftColumn(name, "date", formats=(dated,))
    if is_label:
        return DraftColumn(name, "category")
    if len(filled) >= _ENOUGH and (written := _mostly_dates(filled)):
        strays = sum(not _is_date(cell, written) for cell in filled)
        return DraftColumn(name, "date", formats=written, lenient=strays > 0, gaps=strays > 0)
    if is_id_column(name, filled, words):
        return DraftColumn(name, "id")
    if len(filled) >= _ENOUGH and (mostly := _numbers_and_few_words(filled)) is not None:
        return DraftColumn(name, "number", gaps=True, decimal=mostly[0], thousands=mostly[1], lenient=True)
    if separator := separator_of(filled):
        return DraftColumn(name, "choices", separator=separator)
    wordy = sum(word.count(" ") for word in words) > 3 * len(words)
    text = len(words) > _MANY or wordy or max(map(len, words)) > _LONG
    return DraftColumn(name, "text" if text else "category")


def _dates(words: set[str]) -> str:
    """The first form in which all words are dates; empty if there is none."""
    return next((form for form in DATE_FORMATS if all(_is_date(word, (form,)) for word in words)), "")


def _is_date(word: str, forms: Sequence[str]) -> bool:
    day = first_date(word, forms)
    return day is not None and 1900 <= day.year <= 2100


_SLASHED = ("%d/%m/%Y", "%m/%d/%Y")  # the same cell is another day in each: a column is written in one of them


def _mostly_dates(cells: Sequence[str]) -> tuple[str, ...]:
    """The forms in which nearly all cells are dates, the most frequent first; each is that of one cell in 20."""
    rest: list[str] = list(cells)
    written: list[str] = []
    while len(rest) > _STRAYS * len(cells):
        free = [form for form in DATE_FORMATS if form not in _SLASHED or not set(written) & set(_SLASHED)]
        counts = {form: sum(_is_date(cell, (form,)) for cell in rest) for form in free if form not in written}
        best = max(counts, key=lambda form: counts[form], default="")
        if not best or counts[best] < _STRAYS * len(cells):
            return ()
        written.append(best)
        rest = [cell for cell in rest if not _is_date(cell, (best,))]
    return tuple(written)


def _not_dates(drafted: DraftColumn, cells: Sequence[str]) -> int:
    """How many cells of a column of dates are neither dates nor gaps."""
    return sum(cell not in GAP_WORDS and not _is_date(cell, drafted.formats) for cell in cells)
