"""Remarks on a table before a budget is spent: gaps, clipped cells, labels, ids and rows left out.

This looks at private cells without noise, for their owner. What it returns is to be shown to the owner alone and
stored nowhere: it holds exact counts and words of cells.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quietgrad.core.sanitize import sanitize
from quietgrad.data.columns import GAP_WORDS, MISSING, Categorical, ColumnKind, Date, Numeric, is_number, to_numbers
from quietgrad.data.id_columns import may_be_ids
from quietgrad.data.schema import Schema
from quietgrad.tables.labels import ClassLabels

Table = Mapping[str, Sequence[str]]
"""Cells by column, as texts."""

_FEWEST = 20  # records of a class below which it is nearly absent
_RARE = 0.01
_CLIPPED = 0.01  # share of cells beyond the bounds that is worth a line
_SHOWN = 3  # words of cells in one line


@dataclass(frozen=True)
class ColumnRemark:
    """One thing to know of a table; ``wastes`` if records, cells or budget would be lost for it."""

    about: str
    text: str
    wastes: bool = False


def inspect_columns(cells: Table, schema: Schema | None, skip: Sequence[str | None] = ()) -> list[ColumnRemark]:
    """Remark on constant columns, gaps by their spelling, and cells that are clipped or not in a vocabulary."""
    findings: list[ColumnRemark] = []
    for name, column in cells.items():
        if name in skip or (schema is not None and name not in (*schema.columns, schema.label)):
            continue
        kind = None if schema is None else schema.columns.get(name)
        findings += _gaps(name, column, schema, kind)
        findings += _same(name, column, schema, kind)
        if isinstance(kind, Numeric | Date) and kind.lenient and schema is not None:
            findings += _unreadable(name, column, kind, schema)
        if isinstance(kind, Numeric) and kind.bounds is not None:
            findings += _clipped(name, column, kind, schema)
        elif isinstance(kind, Categorical):
            findings += _unlisted(name, column, kind)
    return findings


def _gap_words(schema: Schema | None, kind: ColumnKind | None) -> frozenset[str]:
    """What stands for a gap in a column; ``none`` is a word like others where a vocabulary lists it."""
    if isinstance(kind, Categorical):
        return frozenset(MISSING) - frozenset(kind.categories)
    return frozenset((*GAP_WORDS, *(() if schema is None else schema.missing)))


def _same(name: str, column: Sequence[str], schema: Schema | None, kind: ColumnKind | None) -> list[ColumnRemark]:
    """A column whose filled cells are all the same; where it has gaps, these may still tell something."""
    values = set(column)
    filled = values - _gap_words(schema, kind)
    if not filled and column:
        return [ColumnRemark(name, "every cell is a gap: the column tells nothing, and its noise costs", True)]
    if len(filled) > 1 or not column:
        return []
    if filled == values:
        return [ColumnRemark(name, "every cell is the same: the column tells nothing, and its noise costs", True)]
    flagged = kind is not None and kind.indicator
    told = "only where its gaps are tells something" if flagged else "a fill makes it constant"
    return [ColumnRemark(name, f"every cell that is no gap is the same: {told}", not flagged)]


def _gaps(name: str, column: Sequence[str], schema: Schema | None, kind: ColumnKind | None) -> list[ColumnRemark]:
    """Gaps of a column by how they are written; spellings that the schema does not list are words to it."""
    gaps = _gap_words(schema, kind)
    words = Counter(cell for cell in column if cell in gaps)
    if not words or isinstance(kind, Categorical):
        return []
    spelled = ", ".join(f"{count} × {word!r}" for word, count in words.most_common(6))
    filled = [cell for cell in column if cell not in gaps]
    if not filled or (kind is None and sum(map(is_number, filled)) < len(filled) / 2):
        return []  # in a column of words, "none" may well be an answer
    known = MISSING if schema is None else schema.missing
    lenient = isinstance(kind, Numeric | Date) and kind.lenient  # every word is a gap
    if strange := [word for word in words if word not in known and not lenient]:
        unlisted = ", ".join(map(repr, strange[:_SHOWN]))
        return [
            ColumnRemark(name, f"gaps are written {spelled}; list {unlisted} in the schema's missing = [...]", True)
        ]
    handled = kind is not None and (kind.indicator or getattr(kind, "fill", None) is not None)
    advice = "" if handled else '; the column has no missing = "indicator" and no fill, so the file is refused'
    return [
        ColumnRemark(
            name, f"{sum(words.values())} of {len(column)} cells are gaps ({spelled}){advice}", not handled
        )
    ]


def _clipped(name: str, column: Sequence[str], kind: Numeric, schema: Schema | None) -> list[ColumnRemark]:
    missing = MISSING if schema is None else schema.missing
    assert kind.bounds is not None
    numbers = to_numbers(name, column, missing, decimal=kind.decimal, thousands=kind.thousands, lenient=True)
    numbers, (low, high) = numbers[np.isfinite(numbers)], kind.bounds
    if not len(numbers):
        return []
    beyond = float(np.mean((numbers < low) | (numbers > high)))
    if beyond > _CLIPPED:
        why = f"{beyond:.1%} of the cells lie outside of the bounds [{low:g}, {high:g}] and are clipped"
        return [ColumnRemark(name, why, True)]
    used = (float(np.quantile(numbers, 0.99)) - float(np.quantile(numbers, 0.01))) / (high - low)
    if used < 0.02 and numbers.min() < numbers.max():
        why = (
            f"98 % of the cells lie within {used:.2%} of the bounds [{low:g}, {high:g}]; narrower public ones help"
        )
        return [ColumnRemark(name, why, True)]
    return []


def _unreadable(name: str, column: Sequence[str], kind: Numeric | Date, schema: Schema) -> list[ColumnRemark]:
    """Cells that are no numbers, or no dates, and count as gaps, because the schema says so."""
    if isinstance(kind, Date):
        gaps = np.array([day is None for day in kind.dates(name, column, ())], dtype=bool)
    else:
        numbers = to_numbers(name, column, (), decimal=kind.decimal, thousands=kind.thousands, lenient=True)
        gaps = np.isnan(numbers)
    absent = _gap_words(schema, kind)
    words = Counter(cell for cell, gap in zip(column, gaps, strict=True) if gap and cell not in absent)
    if not words:
        return []
    what = "dates" if isinstance(kind, Date) else "numbers"
    text = f"{sum(words.values())} of {len(column)} cells are no {what} and count as gaps ({_some(words)})"
    return [ColumnRemark(name, text)]


def _some(words: Counter[str]) -> str:
    """The most frequent words with their counts."""
    return ", ".join(f"{count} × {sanitize(word, most=30)!r}" for word, count in words.most_common(_SHOWN))


def _unlisted(name: str, column: Sequence[str], kind: Categorical) -> list[ColumnRemark]:
    others = Counter(cell for cell in column if cell not in kind.categories and cell not in GAP_WORDS)
    if not others:
        return []
    text = f"{sum(others.values())} of {len(column)} cells are none of the listed categories ({_some(others)})"
    return [ColumnRemark(name, f"{text}; they set no feature", sum(others.values()) > _RARE * len(column))]


def inspect_labels(label: str, column: Sequence[str], classes: Sequence[object] | None) -> list[ColumnRemark]:
    """Labels that match no class, and classes that are nearly absent."""
    if not classes:
        return []
    known = ClassLabels.of(list(classes))
    codes = known.encode(np.array([*column, None], dtype=object)[:-1])
    findings = []
    if strange := Counter(cell for cell, code in zip(column, codes, strict=True) if code < 0):
        named = f"{sum(strange.values())} of {len(column)} labels match no class ({_some(strange)})"
        findings.append(
            ColumnRemark(label, f"{named}; they count as {known.names[0]!r}. Declare or mend them", True)
        )
    counts = np.bincount(codes[codes >= 0], minlength=len(known))
    for name, count in zip(known.names, counts.tolist(), strict=True):
        if count < max(_FEWEST, _RARE * len(column)):
            text = (
                f"the class {name!r} has {count} of {len(column)} records: no private model learns it from so few"
            )
            findings.append(ColumnRemark(label, text, count < _FEWEST))
    return findings


def grouped_remarks(remarks: Sequence[ColumnRemark], most: int = 10) -> list[ColumnRemark]:
    """Remarks that differ in their numbers alone as one, where more than ``most`` columns have them.

    >>> remarks = [ColumnRemark(f"x{k}", f"{k} cells are gaps") for k in range(20)]
    >>> [(remark.about, remark.text) for remark in grouped_remarks(remarks)]
    [('20 columns (x0, x1, x2, x3, x4, …)', 'such as in the first: 0 cells are gaps')]
    """
    alike: dict[tuple[str, bool], list[ColumnRemark]] = {}
    for remark in remarks:
        alike.setdefault((re.sub(r"\d[\d.,e+-]*", "#", remark.text), remark.wastes), []).append(remark)
    told: list[ColumnRemark] = []
    for same in alike.values():
        if len(same) <= most:
            told += same
            continue
        names = ", ".join(sanitize(remark.about) for remark in same[:5])
        text = same[0].text if len({r.text for r in same}) == 1 else f"such as in the first: {same[0].text}"
        told.append(ColumnRemark(f"{len(same)} columns ({names}, …)", text, same[0].wastes))
    return told


def inspect_ids(
    cells: Table, ids: Sequence[str], person: str | None, others: Sequence[str] = ()
) -> list[ColumnRemark]:
    """Columns of ids that repeat: rows of one person, which ε then protects one by one only.

    Columns of ``others`` are called nothing of the kind, but their values may repeat as ids do.
    """
    findings = []
    if person is None and (maybe := [name for name in others if may_be_ids(_filled(cells[name]))]):
        text = (
            "may be ids of people: many values, each in a few rows. If so, ε would hold for one of their rows "
            "only: pass --person and that column"
        )
        some = ", ".join(map(sanitize, maybe[:5])) + (", …" if len(maybe) > 5 else "")
        findings.append(ColumnRemark(some, text))
    for name in ids:
        most = Counter(cells[name]).most_common(1)
        if person is None and most and most[0][1] > 1:
            text = (
                f"ids repeat, up to {most[0][1]} times. If it names people, ε would hold for one of their rows "
                f"only: pass --person {shlex.quote(sanitize(name))}"
            )
            findings.append(ColumnRemark(name, text))
    return findings


def _filled(column: Sequence[str]) -> list[str]:
    return [cell for cell in column if cell not in GAP_WORDS]


def inspect_left_out(notes: Sequence[Any]) -> list[ColumnRemark]:
    """Columns that become no features, as reading the file told."""
    return [ColumnRemark("columns", str(note)) for note in notes if str(note).startswith("columns left out")]
