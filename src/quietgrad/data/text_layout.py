"""Where the table stands in delimited text: lines before the header, a row of units, and totals at the end.

Exports of laboratories, banks and offices put such lines around their records. They are found by their form, for
the owner's draft of a schema, which then names their numbers (`skip_lines`, `skip_rows`, `skip_end`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quietgrad.data.columns import GAP_WORDS, is_number

MARKS = ",;\t|"
_SEVERAL, _MOST_ANSWERS = 0.1, 40  # share of cells with several answers, and different answers at most
_SAMPLE = 200  # lines that tell the delimiter and the number of fields
_NUMERIC = 0.5  # share of numbers from which on a column is one of numbers
_TOTALS = re.compile(
    r"(grand )?(total|sub-?total|sum|summe|gesamt|insgesamt|rows|records|count|anzahl|average|mean)\b"
)
_DIGITS = re.compile(r"[<>≤≥]?[^\w(]*\(?-?\d[\d.,' ]*\)?\D{0,4}")


class TextLayout(NamedTuple):
    """Lines of a file that hold no records: before the header, behind it and at the end."""

    before: int = 0
    behind: int = 0
    end: int = 0

    @property
    def problems(self) -> list[str]:
        """What the owner is told of these lines."""
        places = (
            (self.before, "stand before the header", "skip_lines"),
            (self.behind, "behind the header hold units and no record", "skip_rows"),
            (self.end, "at the end hold totals and no record", "skip_end"),
        )
        return [
            f"{count} lines {what}, and are skipped ({key}); look at them" for count, what, key in places if count
        ]


def delimiter_of(text: str) -> str:
    """The mark that the header has most of, or most lines where the first line has none."""
    lines = [line for line in text[: 1 << 20].splitlines()[:_SAMPLE] if line.strip()]
    if not lines:
        return ","
    best = max(MARKS, key=lines[0].count)
    usual = max(MARKS, key=lambda mark: _median([line.count(mark) for line in lines]))
    fields = _median([line.count(usual) for line in lines])
    return usual if lines[0].count(best) * 2 < fields else best


def layout_of(rows: Sequence[Sequence[str]]) -> TextLayout:
    """The layout of a file whose lines were split into stripped cells; a blank line is an empty row.

    >>> records = [["a", "1"], ["b", "2"], ["c", "3"]]
    >>> layout_of([["Export"], [], ["id", "dose"], ["", "mg"], *records, ["Total"]])
    TextLayout(before=2, behind=1, end=1)
    """
    filled = [row for row in rows if row]
    if not filled:
        return TextLayout()
    width = Counter(map(len, filled[:_SAMPLE])).most_common(1)[0][0]
    before = next((place for place, row in enumerate(rows) if _is_header(row, width)), 0)
    if any(2 * sum(map(bool, row)) > max(width, 2) for row in rows[:before]):
        before = 0  # a line with most of the fields is no title: the file is ragged
    body = [row for row in rows[before + 1 :] if row]
    end = 0
    while end < min(len(body) - 1, 10) and _is_total(body[-1 - end], width):
        end += 1
    return TextLayout(before, int(_has_units(body[: len(body) - end], width)), end)


def separator_of(cells: Sequence[str]) -> str:
    """The mark between several answers in the cells of one column; empty if the cells hold one answer each.

    The different answers are then few, and fewer than the different cells that they make.

    >>> separator_of(["bus; car", "car", "bus", "bike; bus", "bike", "car; bike; bus"] * 5)
    ';'
    """
    for mark in ";|,/":
        several = sum(mark in cell for cell in cells)
        answers = {word.strip() for cell in cells for word in cell.split(mark)}
        if (
            several >= _SEVERAL * len(cells)
            and 2 <= len(answers) <= _MOST_ANSWERS
            and len(answers) < len(set(cells))
        ):
            return mark
    return ""


def _is_header(row: Sequence[str], width: int) -> bool:
    return len(row) == width and len(set(row)) == width and all(cell and not is_number(cell) for cell in row)


def _is_total(row: Sequence[str], width: int) -> bool:
    """Whether a row is mostly empty, or shorter than the others, and begins with a word for a total."""
    first = next((cell for cell in row if cell), "")
    sparse = len(row) != width or 2 * sum(map(bool, row)) <= width
    return sparse and _TOTALS.match(first.lower()) is not None


def _has_units(body: Sequence[Sequence[str]], width: int) -> bool:
    """Whether the first row has words in all columns of numbers, and elsewhere nothing that another row has."""
    whole = [row for row in body if len(row) == width]
    if len(whole) < 3 or len(body[0]) != width:
        return False
    first, others = whole[0], whole[1:]
    words = 0
    for place, cell in enumerate(first):
        column = [row[place] for row in others if row[place] not in GAP_WORDS]
        if column and sum(_is_amount(one) for one in column) > _NUMERIC * len(column):
            if _is_amount(cell):
                return False
            words += cell not in GAP_WORDS
        elif cell and cell in column:
            return False
    return words > 0


def _is_amount(cell: str) -> bool:
    return is_number(cell) or _DIGITS.fullmatch(cell) is not None


def _median(counts: Sequence[int]) -> int:
    return sorted(counts)[len(counts) // 2]
