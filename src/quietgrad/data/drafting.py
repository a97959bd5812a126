"""Drafting a schema from a file's header and the form of its cells.

This looks at private data for their owner, once, without noise. It decides kinds and formats alone: no value of a
cell is written into the draft, and bounds and vocabularies are left for the owner to fill in from public knowledge.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quietgrad.core.errors import DataError
from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import DATE_FORMATS, MISSING, NO, YES, is_number, to_date
from quietgrad.data.file_formats import read_content

_WHOLE = re.compile(r"[+-]?\d{1,15}")
_MONEY = r"[+-]?(?:[$€£¥]|EUR|USD|GBP|CHF)?\s?[+-]?"
_UNIT = r"\s?(?:[$€£¥%]|EUR|USD|GBP|CHF)?"
_FORMATS: tuple[tuple[str, str, re.Pattern[str]], ...] = (
    (".", ",", re.compile(rf"{_MONEY}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?{_UNIT}")),
    (",", ".", re.compile(rf"{_MONEY}(?:\d{{1,3}}(?:\.\d{{3}})+|\d+)(?:,\d+)?{_UNIT}")),
    (".", "'", re.compile(rf"{_MONEY}(?:\d{{1,3}}(?:['’ ]\d{{3}})+|\d+)(?:\.\d+)?{_UNIT}")),
    (",", " ", re.compile(rf"{_MONEY}(?:\d{{1,3}}(?:[ \u00a0]\d{{3}})+|\d+)(?:,\d+)?{_UNIT}")),
)
_FEW = 30  # different whole numbers up to which a label is a class
_MANY = 200  # different words above which a column is text
_LONG = 60  # characters


@dataclass(frozen=True)
class DraftColumn:
    """What the form of a column's cells tells: its kind, how it is written, whether cells are empty."""

    name: str
    kind: str
    gaps: bool = False
    decimal: str = "."
    thousands: str = ""
    format: str = ""

    def lines(self, *, is_label: bool) -> list[str]:
        """The column's part of a schema file, with comments on what to fill in."""
        is_class = is_label and "number" not in self.kind and self.kind != "yes/no"
        lines = [f'kind = "{"category" if is_class else self.kind}"']
        if is_class:
            lines.append('classes = []  # all class labels, such as ["no", "yes"]: needed')
        elif "number" in self.kind:
            if self.decimal != ".":
                lines.append(f"decimal = {json.dumps(self.decimal)}")
            if self.thousands:
                lines.append(f"thousands = {json.dumps(self.thousands)}")
            ends = "possible value, such as [0, 100000]; [] is found privately"
            plausible = "plausible value, such as [0, 120]"
            lines.append(f"bounds = []  # the lowest and highest {ends if is_label else plausible}")
        elif self.kind == "category":
            lines.append(
                'categories = []  # all values that matter, such as ["a", "b"]; others set no feature: needed'
            )
        elif self.kind == "date":
            lines += [
                f"format = {json.dumps(self.format)}",
                'bounds = []  # the first and last plausible day, such as ["2000-01-01", "2030-12-31"]',
                'parts = ["days", "month", "weekday"]',
            ]
        elif self.kind in ("id", "text"):
            lines[0] += (
                "  # no feature; it can be kept beside predictions" if self.kind == "id" else "  # no feature"
            )
        if self.gaps and not is_label and self.kind not in ("id", "text"):
            lines.append('missing = "indicator"  # some cells are empty: a constant in their place, and a flag')
        return lines


@dataclass(frozen=True)
class Draft:
    """A drafted schema; ``problems`` say what keeps a column from being read."""

    file: str
    columns: tuple[DraftColumn, ...]
    label: str
    delimiter: str
    encoding: str
    problems: tuple[str, ...] = field(default=())

    def to_toml(self) -> str:
        """The schema file, with comments on what to fill in."""
        out = [
            f"# Schema of {sanitize(self.file)}, drafted from its header and the form of its cells. It holds none.",
            "# Fill in bounds, categories and classes from PUBLIC knowledge: a range or a list that is computed",
            "# from this file would publish something about its people. Empty bounds are found privately.",
            *(f"# problem: {problem}" for problem in self.problems),
            f"delimiter = {json.dumps(self.delimiter)}",
            f"encoding = {json.dumps(self.encoding)}",
            "",
        ]
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
    """Draft the schema of a delimited file from its header and the form of its cells.

    The label is `label`, or the last column. Columns of `drop` are left out; `keep` is a column of ids.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "people.csv"
    >>> _ = path.write_text("age;town;ill\\n31;Bonn;yes\\n;Ulm;no\\n45;Bonn;no\\n")
    >>> [(column.name, column.kind, column.gaps) for column in draft_schema(path).columns]
    [('age', 'whole number', True), ('town', 'category', False), ('ill', 'yes/no', False)]
    """
    name = Path(path).name
    content = read_content(Path(path))
    for one in (encoding,) if encoding else ("utf-8-sig", "cp1252"):
        try:
            text = content.decode(one)
            break
        except (UnicodeDecodeError, LookupError):
            continue
    else:
        raise DataError(f"{name}: the file is not {encoding or 'UTF-8 or cp1252'} text; say its --encoding.")
    first = text[: text.find("\n") + 1 or len(text)]
    mark = delimiter or max(",;\t|", key=first.count)
    try:
        rows = [
            [cell.strip() for cell in row]
            for row in csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True)
        ]
    except (csv.Error, TypeError):
        raise DataError(f"{name}: not readable as delimited text; say --delimiter and --encoding.") from None
    header, body = rows[0] if rows else [], [row for row in rows[1:] if row]
    if not header or len(set(header)) != len(header):
        raise DataError(f"{name}: the header names a column twice, or none.")
    whole = [row for row in body if len(row) == len(header)]
    if not whole:
        raise DataError(f"{name}: the file holds no rows of {len(header)} fields; is the delimiter another one?")
    ragged = len(body) - len(whole)
    problems = [f"{ragged} rows do not have the header's {len(header)} fields"] if ragged else []
    if all(is_number(cell) for cell in header if cell):
        problems.append("the first line holds only numbers; a CSV file needs a header line of names")
    target = label or header[-1]
    if unknown := [c for c in (target, *drop, *([] if keep is None else [keep])) if c not in header]:
        raise DataError(f"{name}: no column {', '.join(map(repr, unknown))}; the file has {', '.join(header)}.")
    found: list[DraftColumn] = []
    for place, column in enumerate(header):
        if column in drop:
            continue
        drafted = (
            DraftColumn(column, "id")
            if column == keep
            else _column(column, [row[place] for row in whole], is_label=column == target)
        )
        if drafted.kind == "empty":
            problems.append(f"column {column!r} is empty and left out")
        else:
            found.append(drafted)
        if column == target and drafted.gaps:
            problems.append(
                f"the label {target!r} has empty cells: they count as the first class; remove those rows"
            )
    if target not in [column.name for column in found]:
        raise DataError(f"{name}: the label {target!r} has no entries, or is dropped.")
    return Draft(name, tuple(found), target, mark, "utf-8" if one == "utf-8-sig" else one, tuple(problems))


def _column(name: str, cells: Sequence[str], *, is_label: bool) -> DraftColumn:
    """The kind of a column by the form of its cells."""
    filled = [cell for cell in cells if cell not in MISSING]
    gaps = len(filled) < len(cells)
    words = set(filled)
    if not filled:
        return DraftColumn(name, "empty")
    if len(words) <= 6 and {word.lower() for word in words} <= YES | NO:
        return DraftColumn(name, "yes/no", gaps)
    if all(_WHOLE.fullmatch(word) for word in words):
        dated = _dates(words) if all(len(word) == 8 for word in words) else ""
        if dated and not is_label:
            return DraftColumn(name, "date", gaps, format=dated)
        if not is_label and _is_id(name, filled, words):
            return DraftColumn(name, "id", gaps)
        few = is_label and len(words) <= _FEW
        return DraftColumn(name, "category" if few else "whole number", gaps)
    if all(is_number(word) for word in words):
        return DraftColumn(name, "number", gaps)
    for decimal, thousands, form in _FORMATS:
        if all(form.fullmatch(word) for word in words):
            return DraftColumn(name, "number", gaps, decimal, thousands)
    if dated := _dates(words):
        return DraftColumn(name, "date", gaps, format=dated)
    if is_label:
        return DraftColumn(name, "category", gaps)
    if _is_id(name, filled, words):
        return DraftColumn(name, "id", gaps)
    wordy = sum(word.count(" ") for word in words) > 3 * len(words)
    text = len(words) > _MANY or wordy or max(map(len, words)) > _LONG
    return DraftColumn(name, "text" if text else "category", gaps)


def _is_id(name: str, filled: Sequence[str], words: set[str]) -> bool:
    """Whether every cell is another, in a column that is called an id or holds no ordinary numbers or words."""
    if len(words) < len(filled) or len(filled) < 20:
        return False
    called = re.search(r"(^|[^a-z])(id|nr|no|key|uuid|number|code)$", name.lower()) or name.endswith("Id")
    return bool(called) or not any(is_number(word) or " " in word for word in words)


def _dates(words: set[str]) -> str:
    def fits(format: str) -> bool:
        try:
            return all(1900 <= to_date(word, format).year <= 2100 for word in words)
        except ValueError:
            return False

    return next((format for format in DATE_FORMATS if fits(format)), "")
