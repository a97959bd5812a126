"""Kinds of columns: how the cells of numbers, categories, yes/no answers and dates become features."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.errors import DataError

Floats: TypeAlias = npt.NDArray[np.float64]
Cells: TypeAlias = "Sequence[Any] | npt.NDArray[Any]"
MISSING = ("", "NA", "NaN", "nan")
SINCE = date(2000, 1, 1)
"""The public date that days are counted from, unless a schema names another."""
YES = frozenset(("yes", "true", "y", "t", "1", "1.0", "on"))
NO = frozenset(("no", "false", "n", "f", "0", "0.0", "off"))
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y%m%d")
_MARKS = re.compile(r"[\s'\u2019$€£¥%]|(?:EUR|USD|GBP|CHF)")


@dataclass(frozen=True)
class Numeric:
    """A numeric column with public bounds: clipped to [low, high], then mapped to [0, 1].

    Without bounds the column keeps its scale. With `log` the map is log(1 + x − low) / log(1 + high − low), for
    heavy tails. `fill` replaces a missing entry; `indicator` gives it the lowest value (0 without bounds) and sets
    a flag, a feature of its own. `decimal` and `thousands` say how numbers are written.

    >>> Numeric((0, 10)).encode("age", ["5", "20"])
    array([[0.5],
           [1. ]])
    >>> Numeric((0, 10), indicator=True).encode("age", ["5", ""])
    array([[0.5, 0. ],
           [0. , 1. ]])
    """

    bounds: tuple[float, float] | None
    log: bool = False
    fill: float | None = None
    indicator: bool = False
    decimal: str = "."
    thousands: str = ""
    zero_one = False

    def __post_init__(self) -> None:
        if self.bounds is None:
            if self.log:
                raise DataError("log = true needs bounds = [low, high].")
            return
        low, high = self.bounds
        if not (np.isfinite([low, high]).all() and low < high):
            raise DataError(f"bounds={self.bounds}: must be two finite numbers, low < high.")

    @property
    def plain(self) -> bool:
        """Whether cells are numbers as every reader writes them."""
        return self.decimal == "." and not self.thousands

    @property
    def width(self) -> int:
        return 1 + self.indicator

    @property
    def reach(self) -> float | None:
        """The most that a row's features of this column add to ‖x‖²; ``None`` without bounds."""
        return None if self.bounds is None else 1.0 + (self.indicator and self.fill is not None)

    @property
    def ranges(self) -> tuple[tuple[float, float] | None, ...]:
        """The public range of each feature."""
        return (None if self.bounds is None else (0.0, 1.0), *_FLAG[: self.indicator])

    def names(self, column: str) -> tuple[str, ...]:
        return (column, f"{column} missing")[: self.width]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        """The column as numbers, one row each; missing entries without `fill` or `indicator` stay NaN."""
        x = to_numbers(column, values, missing, decimal=self.decimal, thousands=self.thousands)
        absent = np.isnan(x)
        low, high = self.bounds or (0.0, 0.0)
        if self.fill is not None or self.indicator:
            x = np.where(absent, low if self.fill is None else self.fill, x)
        if self.bounds is not None:
            x = np.where(np.isinf(x), np.nan, x)  # clipping would hide an infinity that is to be refused
            x = np.clip(x, low, high) - low
            x = np.log1p(x) / np.log1p(high - low) if self.log else x / (high - low)
        return np.column_stack([x, absent]) if self.indicator else x[:, None]


_FLAG = ((0.0, 1.0),)


class _Bits:
    """What columns that become 0/1 features share."""

    plain = False
    zero_one = True
    width: int

    @property
    def reach(self) -> float | None:
        """At most one bit is set."""
        return 1.0

    @property
    def ranges(self) -> tuple[tuple[float, float] | None, ...]:
        return _FLAG * self.width


@dataclass(frozen=True)
class Categorical(_Bits):
    """A categorical column with a public vocabulary, one-hot encoded in the order given.

    `drop_first` leaves out the first category's bit. A value outside the vocabulary sets no
    bit: a refusal would tell that a record has one. `indicator` sets a bit for a missing entry.

    >>> Categorical(("no", "yes")).encode("loan", ["yes", "no"])
    array([[0., 1.],
           [1., 0.]])
    """

    categories: tuple[str, ...]
    drop_first: bool = False
    indicator: bool = False

    def __post_init__(self) -> None:
        if len(self.categories) < 2 or len(set(self.categories)) != len(self.categories):
            raise DataError(f"categories={list(self.categories)}: must be two or more different values.")

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.categories) - self.drop_first + self.indicator

    def names(self, column: str) -> tuple[str, ...]:
        words = (f"{column}={c}" for c in self.categories[int(self.drop_first) :])
        return (*words, *((f"{column} missing",) if self.indicator else ()))

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        index = {c: i for i, c in enumerate(self.categories)}
        count = len(self.categories)
        if self.indicator:
            index = {**dict.fromkeys((*missing, "None"), count), **index}
        codes = np.fromiter((index.get(str(v).strip(), -1) for v in values), np.int64, len(values))
        bits = (codes[:, None] == np.arange(count + self.indicator)).astype(np.float64)
        kept: Floats = bits[:, int(self.drop_first) :]
        return kept


@dataclass(frozen=True)
class YesNo(_Bits):
    """A column of yes and no, true and false, or 1 and 0: one feature, 1 for yes. What is neither counts as no.

    >>> YesNo(indicator=True).encode("member", ["TRUE", "no", ""]).tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """

    indicator: bool = False

    @property
    def width(self) -> int:  # type: ignore[override]
        return 1 + self.indicator

    def names(self, column: str) -> tuple[str, ...]:
        return (column, f"{column} missing")[: self.width]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        said = [str(v).strip() for v in values]
        bits = [[word.lower() in YES, word in missing or word == "None"][: self.width] for word in said]
        return np.array(bits, dtype=np.float64).reshape(len(said), self.width)


def yes_or_no(word: str) -> str:
    """A cell of a yes/no column as one of the two."""
    return "yes" if word.strip().lower() in YES else "no"


@dataclass(frozen=True)
class Date(_Bits):
    """A column of dates: days since a public date (mapped to [0, 1] by bounds), month and weekday, as `parts` say.

    A missing entry sets no bit of month and weekday and takes the first day; `indicator` sets a flag for it.

    >>> Date((date(2020, 1, 1), date(2020, 1, 31)), parts=("days",)).encode("joined", ["2020-01-16"]).tolist()
    [[0.5]]
    """

    bounds: tuple[date, date] | None = None
    format: str = "%Y-%m-%d"
    parts: tuple[str, ...] = ("days", "month", "weekday")
    indicator: bool = False
    since: date = SINCE
    zero_one = False

    def __post_init__(self) -> None:
        if not self.parts or set(self.parts) - {"days", "month", "weekday"}:
            raise DataError(f"parts={list(self.parts)}: must be some of days, month, weekday.")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise DataError("bounds: must be two dates such as 2000-01-01, the earlier first.")

    @property
    def width(self) -> int:  # type: ignore[override]
        return sum({"days": 1, "month": 12, "weekday": 7}[part] for part in self.parts) + self.indicator

    @property
    def reach(self) -> float | None:
        return None if "days" in self.parts and self.bounds is None else float(len(self.parts))

    @property
    def ranges(self) -> tuple[tuple[float, float] | None, ...]:
        days = () if "days" not in self.parts else (None,) if self.bounds is None else _FLAG
        return (*days, *_FLAG * (self.width - len(days)))

    def names(self, column: str) -> tuple[str, ...]:
        months, weekdays = [f"month={m}" for m in _MONTHS], [f"weekday={d}" for d in _WEEKDAYS]
        words = (("days", ["days"]), ("month", months), ("weekday", weekdays))
        found = [f"{column} {word}" for part, those in words if part in self.parts for word in those]
        return (*found, *((f"{column} missing",) if self.indicator else ()))

    def dates(self, column: str, values: Cells, missing: Sequence[str]) -> list[date | None]:
        """The cells as dates, ``None`` for a missing one."""
        texts, absent = [str(value).strip() for value in values], {*missing, "None", "NaT"}
        try:
            return [None if text in absent else to_date(text, self.format) for text in texts]
        except ValueError:
            raise DataError(
                f"column {column!r} holds cells that are not dates of the form {self.format}. Say its format in "
                'the schema, such as format = "%d.%m.%Y".'
            ) from None

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        """The column as numbers, one row each; a missing entry without `indicator` is NaN."""
        found = self.dates(column, values, missing)
        start = self.bounds[0] if self.bounds is not None else self.since
        days = np.array([np.nan if d is None else (d - start).days for d in found], dtype=np.float64)
        gaps = np.isnan(days)
        if self.bounds is not None:
            days = np.clip(days / (self.bounds[1] - self.bounds[0]).days, 0.0, 1.0)
        blocks: dict[str, Any] = {
            "days": np.where(gaps, 0.0, days)[:, None] if self.indicator else days[:, None],
            "month": np.array([-1 if d is None else d.month - 1 for d in found])[:, None] == np.arange(12),
            "weekday": np.array([-1 if d is None else d.weekday() for d in found])[:, None] == np.arange(7),
        }
        chosen = [block for part, block in blocks.items() if part in self.parts]
        return np.hstack([*chosen, gaps[:, None]][: len(chosen) + self.indicator]).astype(np.float64)


def to_date(text: str, format: str) -> date:
    """The date in a cell; a time of day after it is left out."""
    return datetime.strptime(re.split(r"[T ]", text, maxsplit=1)[0], format).date()


Column: TypeAlias = "Numeric | Categorical | YesNo | Date"


def is_number(text: str) -> bool:
    """Whether a text is a number, other than NaN."""
    try:
        return not np.isnan(float(text))
    except ValueError:
        return False


def written_plainly(text: str, decimal: str = ".", thousands: str = "") -> str:
    """A number as Python writes it: without currency, spaces and separators.

    >>> written_plainly("$1,234.50", ".", ","), written_plainly("1.234,5 €", ",", ".")
    ('1234.50', '1234.5')
    """
    if decimal == "." and not thousands:
        return text
    plain = _MARKS.sub("", text)
    if thousands:
        plain = plain.replace(thousands, "")
    return plain if decimal == "." else plain.replace(decimal, ".")


def to_numbers(
    column: str, values: Cells, missing: Sequence[str] = ("",), *, decimal: str = ".", thousands: str = ""
) -> Floats:
    """Convert a column of text to floats, missing entries to NaN; never quotes a value in its error.

    >>> to_numbers("age", ["1", "", "2.5"])
    array([1. , nan, 2.5])
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values.astype(np.float64)
    absent = {*missing, "None"}
    texts = [str(v).strip() for v in values]
    try:
        cells = (np.nan if t in absent else float(written_plainly(t, decimal, thousands)) for t in texts)
        return np.fromiter(cells, np.float64, len(texts))
    except (ValueError, OverflowError):
        raise NotNumericError(column) from None


class NotNumericError(DataError):
    """A column holds cells that are not numbers; ``column`` is its name."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        named = ", ".join(repr(c) for c in columns)
        super().__init__(
            f"column{'s' if len(columns) > 1 else ''} {named}: not numeric. Draft a schema with "
            "`quietgrad data schema FILE -o schema.toml`, fill in what is public, and pass it: --schema "
            "schema.toml. A list of categories must be public, not computed from this file. No privacy budget was "
            "spent."
        )
