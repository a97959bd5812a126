"""Rows of a description by groups: statistics with their intervals, what they are of, and how they are written."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from quietgrad.core.files import write_atomically
from quietgrad.core.session.statement import Privacy
from quietgrad.estimators.described_columns import DescribedColumn
from quietgrad.methods.described_ranges import DescribedRanges
from quietgrad.methods.noise_intervals import NoiseLaw, quantile_interval, ratio_interval
from quietgrad.tables.cells import day_text
from quietgrad.tables.table import Floats

Row = dict[str, Any]
Origin = Literal["declared", "found", "hidden"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
FIELDS = ("column", "statistic", "level", "value", "lower", "upper", "cut_low", "cut_high", "range")
_MOST_NOTES = 10  # columns with a note each
_DATED = ("value", "lower", "upper")


class Cut(NamedTuple):
    """The range that a column's values are cut to, and where it is from; ``hidden`` where noise drowns it."""

    low: float
    high: float
    origin: Origin

    @classmethod
    def of(cls, ranges: DescribedRanges, place: int, column: DescribedColumn) -> Cut:
        """The range of a column; of whole numbers it ends at whole numbers."""
        low, high = float(ranges.low[place]), float(ranges.high[place])
        if not ranges.found[place]:
            return cls(low, high, "declared")
        if column.kind == "integer":
            low, high = float(math.floor(low)), float(math.ceil(high))
        return cls(low, high, "hidden" if ranges.hidden[place] else "found")

    def words(self, *, dated: bool = False) -> str:
        """What a number of the column is of.

        >>> Cut(0.0, 16.0, "found").words()
        'of values cut to [0, 16], found privately'
        """
        ends = ", ".join(day_text(end) if dated else f"{end:.6g}" for end in (self.low, self.high))
        return f"of values cut to [{ends}], {'found privately' if self.origin == 'found' else 'declared'}"


def range_notes(columns: list[DescribedColumn], cuts: Mapping[int, Cut]) -> tuple[str, ...]:
    """Notes on the columns whose ranges are not declared: one for all that are hidden, and for many found ones."""
    notes = []
    hidden = [columns[place].name for place, cut in cuts.items() if cut.origin == "hidden"]
    found = [columns[place].name for place, cut in cuts.items() if cut.origin == "found"]
    if hidden:
        several = len(hidden) > 1
        notes.append(
            f"{_listed(hidden)}: the range{'s do' if several else ' does'} not stand out of the noise, so nothing "
            "is said of the values; declare bounds in the schema"
        )
    if len(found) > _MOST_NOTES:
        notes.append(
            f"{_listed(found)}: numbers are of values cut to ranges found privately, cut_low to cut_high of each "
            "row"
        )
    else:
        for place, cut in cuts.items():
            if cut.origin == "found":
                column = columns[place]
                notes.append(f"column {column.name}: numbers are {cut.words(dated=column.kind == 'date')}")
    return tuple(notes)


def _listed(names: list[str]) -> str:
    """Columns by name, the first of many.

    >>> _listed(["a"]), _listed([f"x{k}" for k in range(20)])
    ('column a', '20 columns (x0, x1, x2, x3, x4, …)')
    """
    if len(names) > _MOST_NOTES:
        return f"{len(names)} columns ({', '.join(names[:5])}, …)"
    return f"column{'s' if len(names) > 1 else ''} {', '.join(names)}"


@dataclass(frozen=True)
class GroupedDescription:
    """Private statistics by groups.

    ``rows`` have a statistic of a group each, with its interval of 95 %. Statistics of a number are of its values
    cut to [``cut_low``, ``cut_high``]; ``range`` says whether that was declared or found privately. Where it is
    "hidden" no range stands out of the noise: the value is ``None`` and its interval has no ends.

    ``table`` is a data frame if pandas is installed, else the rows. The last group, "other", has all records of no
    listed group. Columns of ``dates`` are days since 1970 in ``rows``, and dates in text.
    """

    privacy: Privacy
    by: tuple[str, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()

    @property
    def table(self) -> Any:
        try:
            import pandas
        except ImportError:
            return self.rows
        return pandas.DataFrame(self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "by": list(self.by),
            "rows": self.written_rows(),
            "notes": list(self.notes),
            "privacy": self.privacy.to_json(),
        }

    def written_rows(self) -> list[Row]:
        """The rows as files have them: dates as YYYY-MM-DD, and ``None`` where an interval has no end."""
        rows = []
        for row in self.rows:
            open_ended = {key: None for key in ("lower", "upper") if not math.isfinite(row[key])}
            days = {key: row[key] for key in FIELDS[3:8] if row["column"] in self.dates and row[key] is not None}
            if row["statistic"] == "sum":  # days added up are no date
                days = {key: day for key, day in days.items() if key not in _DATED}
            dated = {key: day_text(day) for key, day in days.items() if key not in open_ended}
            rows.append({**row, **dated, **open_ended})
        return rows

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV text, which is also written to ``path`` if that is given."""
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, [*self.by, *FIELDS])
        writer.writeheader()
        writer.writerows(self.written_rows())
        if path is not None:
            write_atomically(Path(path), out.getvalue().encode())
        return out.getvalue()

    def __str__(self) -> str:
        return f"{self.table}\n{self.privacy}"


def statistic_row(
    head: Row,
    column: str | None,
    statistic: str,
    value: float | None,
    lower: float,
    upper: float,
    cut: Cut | None = None,
) -> Row:
    """One row; a statistic of a number says what its values are cut to."""
    told = {"column": column, "statistic": statistic, "level": None, "value": value, "lower": lower, "upper": upper}
    if cut is None:
        return {**head, **told, "cut_low": None, "cut_high": None, "range": None}
    if cut.origin == "hidden":
        nothing = {"value": None, "lower": -math.inf, "upper": math.inf, "cut_low": None, "cut_high": None}
        return {**head, **told, **nothing, "range": cut.origin}
    return {**head, **told, "cut_low": cut.low, "cut_high": cut.high, "range": cut.origin}


def count_interval(count: float, law: NoiseLaw) -> tuple[float, float, float]:
    """A count of at least 0 with its interval."""
    off = law.half_width(1.0)
    return max(float(count), 0.0), max(float(count) - off, 0.0), max(float(count) + off, 0.0)


def totals(
    held: float, total: float, low: float, high: float, law: NoiseLaw
) -> dict[str, tuple[Any, float, float]]:
    """Sum and mean of one column in one group, each with its interval; ``total`` is that of values in [−1, 1]."""
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    value, off = middle * held + half * total, law.half_width(half, middle)
    widths = np.array([law.half_width(1.0, m) for m in np.linspace(-1.0, 1.0, 41)])
    ends = ratio_interval(total, held, widths)
    known = held > 0.0 and ends != (-1.0, 1.0)  # else the noise drowns it
    mean = middle + half * min(max(total / held, -1.0), 1.0) if known else None
    return {
        "sum": (float(value), float(value - off), float(value + off)),
        "mean": (mean, middle + half * ends[0], middle + half * ends[1]),
    }


def cell_rows(head: Row, column: DescribedColumn, counts: Floats, law: NoiseLaw, cut: Cut | None) -> list[Row]:
    """Shares of a category's values, or quantiles of a number, in one group."""
    rows = []
    if column.values:
        total, widths = counts.sum(), law.share_widths(len(counts))
        for level, count in zip(column.levels, counts, strict=True):
            lower, upper = ratio_interval(float(count), float(total), widths, 0.0, 1.0)
            share = None if total <= 0.0 else min(max(float(count / total), 0.0), 1.0)
            rows.append({**statistic_row(head, column.name, "share", share, lower, upper), "level": level})
        return rows
    bins = counts[: len(column.edges) - 1]
    for q in QUANTILES:
        lower, upper = quantile_interval(bins, column.edges, q, law.edge_widths(len(bins), q))
        value = _quantile(bins, column, q, lower, upper)
        rows.append(statistic_row(head, column.name, f"q{round(100 * q):02d}", value, lower, upper, cut))
    return rows


def _quantile(counts: Floats, column: DescribedColumn, q: float, lower: float, upper: float) -> float:
    """The quantile of the noisy histogram, within its interval."""
    sums = np.concatenate([[0.0], np.cumsum(np.maximum(counts, 0.0))])
    at = float(np.interp(q * sums[-1], sums + 1e-9 * np.arange(len(sums)), column.edges))
    return min(max(at, lower), upper)
