"""Kinds of columns: how the cells of numbers, categories, yes/no answers and dates become features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError

Floats: TypeAlias = npt.NDArray[np.float64]
Cells: TypeAlias = Sequence[object] | npt.NDArray[np.generic]
Range: TypeAlias = tuple[float, float] | None
"""The public range of a feature; ``None`` where it is to be found privately."""
MISSING = ("", "NA", "NaN", "nan")
GAP_WORDS = (
    *MISSING, "na", "N/A", "n/a", "#N/A", "NAN", "null", "Null", "NULL", "nil", "none", "None", "NONE", "-", "--",
    "–", "—", ".", "..", "?", "missing", "Missing", "unknown", "Unknown", "n.a.", "N.A.", "k.A.", "k. A.",
    "keine Angabe", "unbekannt", "#NV", "#NULL!", "#DIV/0!", "#VALUE!", "#WERT!",
)  # fmt: skip
"""What people write where a number, a date or a yes or no is missing; a drafted schema lists them."""
SINCE = date(2000, 1, 1)
"""The public date that days are counted from, unless a schema names another."""
YES = frozenset(("yes", "true", "y", "t", "1", "1.0", "on"))
NO = frozenset(("no", "false", "n", "f", "0", "0.0", "off"))
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y%m%d")
CURRENCIES = "EUR|USD|GBP|CHF|SEK|NOK|DKK|PLN|CZK|CAD|AUD|JPY|INR|kr\\.?|zł|Kč|Fr\\."
"""Beside the signs $ € £ ¥ ₹, as a pattern."""
_MARKS = re.compile(rf"[\s'\u2019$€£¥₹%]|(?:{CURRENCIES})")


class ColumnKind:
    """Base class of column kinds: named features, each with its public range, in a block of numbers.

    ``indicator`` adds a flag, a feature of its own, that is 1 where an entry is missing.
    """

    indicator: bool
    zero_one = True  # whether all features are 0 or 1
    plain = False  # whether cells are numbers as every reader writes them

    def features(self, column: str) -> list[tuple[str, Range]]:
        """Name and range of each feature but the flag."""
        raise NotImplementedError

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        """The column as numbers, one row each; a missing entry without `fill` or `indicator` is NaN."""
        raise NotImplementedError

    @property
    def reach(self) -> float | None:
        """The most that a row's features of this column add to ‖x‖²; ``None`` without bounds."""
        return 1.0  # at most one bit is set

    @property
    def width(self) -> int:
        return len(self.ranges)

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The public range of each feature."""
        return (*(pair for _, pair in self.features("")), *((0.0, 1.0),) * self.indicator)

    def names(self, column: str) -> tuple[str, ...]:
        return (*(name for name, _ in self.features(column)), *(f"{column} missing",) * self.indicator)


@dataclass(frozen=True)
class Numeric(ColumnKind):
    """A numeric column with public bounds.

    Values are clipped to [low, high], then mapped to [0, 1].

    Without bounds the column keeps its scale. With `log` the map is log(1 + x − low) / log(1 + high − low), for
    heavy tails. `fill` replaces a missing entry; `indicator` gives it the lowest value (0 without bounds) and sets
    a flag, a feature of its own. `decimal` and `thousands` say how numbers are written. `whole` says that they are
    whole: a histogram then has bins of whole numbers. With `lenient` a cell that is no number is a missing entry.

    >>> Numeric((0, 10)).encode("age", ["5", "20"])
    array([[0.5],
           [1. ]])
    >>> Numeric((0, 10), indicator=True).encode("age", ["5", ""])
    array([[0.5, 0. ],
           [0. , 1. ]])
    """

    bounds: Range
    log: bool = False
    fill: float | None = None
    indicator: bool = False
    decimal: str = "."
    thousands: str = ""
    whole: bool = False
    lenient: bool = False
    zero_one = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", self.decimal == "." and not self.thousands and not self.lenient)
        if self.bounds is None:
            if self.log:
                raise DataError("log = true needs bounds = [low, high].")
        elif not (np.isfinite(self.bounds).all() and self.bounds[0] < self.bounds[1]):
            raise DataError(f"bounds={self.bounds}: must be two finite numbers, low < high.")

    @property
    def reach(self) -> float | None:
        return None if self.bounds is None else 1.0 + (self.indicator and self.fill is not None)

    def features(self, column: str) -> list[tuple[str, Range]]:
        return [(column, None if self.bounds is None else (0.0, 1.0))]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        x = to_numbers(
            column, values, missing, decimal=self.decimal, thousands=self.thousands, lenient=self.lenient
        )
        absent = np.isnan(x)
        low, high = self.bounds or (0.0, 0.0)
        if self.fill is not None or self.indicator:
            x = np.where(absent, low if self.fill is None else self.fill, x)
        if self.bounds is not None:
            x = np.where(np.isinf(x), np.nan, x)  # clipping would hide an infinity that is to be refused
            x = np.clip(x, low, high) - low
            x = np.log1p(x) / np.log1p(high - low) if self.log else x / (high - low)
        return np.column_stack([x, absent]) if self.indicator else x[:, None]


@dataclass(frozen=True)
class Categorical(ColumnKind):
    """A categorical column with a public vocabulary, one-hot encoded in its order.

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

    def features(self, column: str) -> list[tuple[str, Range]]:
        return [(f"{column}={word}", (0.0, 1.0)) for word in self.categories[int(self.drop_first) :]]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        index = {c: i for i, c in enumerate(self.categories)}
        count = len(self.categories)
        if self.indicator:
            index = {**dict.fromkeys((*missing, "None"), count), **index}
        codes = np.fromiter((index.get(_word(v, index), -1) for v in values), np.int64, len(values))
        bits = (codes[:, None] == np.arange(count + self.indicator)).astype(np.float64)
        kept: Floats = bits[:, int(self.drop_first) :]
        return kept


def _word(value: object, words: Mapping[str, int]) -> str:
    """The word of a cell; a frame with gaps holds the codes 1, 2, 3 as 1.0, 2.0, 3.0, and a gap as NaN."""
    text = str(value).strip()
    if text in words or not isinstance(value, float):
        return text
    return "None" if value != value else str(int(value)) if value.is_integer() else text


@dataclass(frozen=True)
class Choices(ColumnKind):
    """A column whose cells hold several answers of a public list, as a question with boxes to tick has.

    Each listed answer is a feature, 1 where the cell has it. Other answers set no feature. `indicator` sets a flag
    for an empty cell. A row with all answers adds their number to ‖x‖².

    >>> Choices(("bus", "car"), ";").encode("ways", ["car; bus", "bike", ""]).tolist()
    [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    """

    categories: tuple[str, ...]
    separator: str = ";"
    indicator: bool = False

    def __post_init__(self) -> None:
        if not self.categories or len(set(self.categories)) != len(self.categories):
            raise DataError(f"categories={list(self.categories)}: must be one or more different values.")
        if not self.separator.strip() or any(self.separator in word for word in self.categories):
            raise DataError(f"separator={self.separator!r}: must be a mark that is in none of the categories.")

    @property
    def reach(self) -> float | None:
        return float(len(self.categories))

    def features(self, column: str) -> list[tuple[str, Range]]:
        return [(f"{column}={word}", (0.0, 1.0)) for word in self.categories]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        place = {word: k for k, word in enumerate(self.categories)}
        bits = np.zeros((len(values), self.width))
        for row, value in enumerate(values):
            text = str(value).strip()
            if self.indicator and (text in missing or text == "None"):
                bits[row, -1] = 1.0
                continue
            for word in text.split(self.separator):
                if (at := place.get(word.strip())) is not None:
                    bits[row, at] = 1.0
        return bits


@dataclass(frozen=True)
class YesNo(ColumnKind):
    """A column of yes and no, true and false, or 1 and 0.

    It is one feature, 1 for yes. What is neither counts as no.

    >>> YesNo(indicator=True).encode("member", ["TRUE", "no", ""]).tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """

    indicator: bool = False

    def features(self, column: str) -> list[tuple[str, Range]]:
        return [(column, (0.0, 1.0))]

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        said = [str(v).strip() for v in values]
        bits = [[yes_or_no(word) == "yes", word in missing or word == "None"][: self.width] for word in said]
        return np.array(bits, dtype=np.float64).reshape(len(said), self.width)


def yes_or_no(word: str) -> str:
    """A cell of a yes/no column as one of the two."""
    return "yes" if word.strip().lower() in YES else "no"


@dataclass(frozen=True)
class Date(ColumnKind):
    """A column of dates.

    `parts` chooses days since a public date (mapped to [0, 1] by bounds), month and weekday.

    A missing entry sets no bit of month and weekday and takes the first day; `indicator` sets a flag for it.
    `format` is one form of dates or several, the first of which that fits is taken. With `lenient` a cell that is
    no date of these forms is a missing entry.

    >>> Date((date(2020, 1, 1), date(2020, 1, 31)), parts=("days",)).encode("joined", ["2020-01-16"]).tolist()
    [[0.5]]
    """

    bounds: tuple[date, date] | None = None
    format: str | tuple[str, ...] = "%Y-%m-%d"
    parts: tuple[str, ...] = ("days", "month", "weekday")
    indicator: bool = False
    since: date = SINCE
    lenient: bool = False
    zero_one = False

    def __post_init__(self) -> None:
        if not self.formats:
            raise DataError('format: must be a form of dates such as "%d.%m.%Y", or a list of some.')
        if not self.parts or set(self.parts) - {"days", "month", "weekday"}:
            raise DataError(f"parts={list(self.parts)}: must be some of days, month, weekday.")
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise DataError("bounds: must be two dates such as 2000-01-01, the earlier first.")

    @property
    def reach(self) -> float | None:
        return None if "days" in self.parts and self.bounds is None else float(len(self.parts))

    def features(self, column: str) -> list[tuple[str, Range]]:
        days: list[tuple[str, Range]] = [(f"{column} days", None if self.bounds is None else (0.0, 1.0))]
        found = days if "days" in self.parts else []
        for part, words in (("month", _MONTHS), ("weekday", _WEEKDAYS)):
            if part in self.parts:
                found += [(f"{column} {part}={word}", (0.0, 1.0)) for word in words]
        return found

    def dates(self, column: str, values: Cells, missing: Sequence[str]) -> list[date | None]:
        """The cells as dates, ``None`` for a missing one."""
        texts, absent = [str(value).strip() for value in values], {*missing, "None", "NaT"}
        # Columns that a file or a frame holds as dates arrive in this form, whatever the schema says of texts.
        stored = () if any(format.startswith("%Y-") for format in self.formats) else ("%Y-%m-%d",)
        found = [None if text in absent else first_date(text, (*self.formats, *stored)) for text in texts]
        if not self.lenient and any(
            day is None and text not in absent for day, text in zip(found, texts, strict=True)
        ):
            raise DataError(
                f"column {column!r} holds cells that are not dates of the form {' or '.join(self.formats)}. "
                'Give its format in the schema, such as format = "%d.%m.%Y", or several: ["%Y-%m-%d", "%d.%m.%Y"]. '
                'To count the other cells as gaps, write unreadable = "gap" and missing = "indicator" for the '
                "column. No privacy budget was spent."
            )
        return found

    @property
    def formats(self) -> tuple[str, ...]:
        """The forms of dates, in the order in which they are tried."""
        return (self.format,) if isinstance(self.format, str) else tuple(self.format)

    def encode(self, column: str, values: Cells, missing: Sequence[str] = ("",)) -> Floats:
        found = self.dates(column, values, missing)
        start = self.bounds[0] if self.bounds is not None else self.since
        days = np.array([np.nan if d is None else (d - start).days for d in found], dtype=np.float64)
        gaps = np.isnan(days)
        if self.bounds is not None:
            days = np.clip(days / (self.bounds[1] - self.bounds[0]).days, 0.0, 1.0)
        blocks = {
            "days": np.where(gaps & self.indicator, 0.0, days)[:, None],
            "month": np.array([-1 if d is None else d.month - 1 for d in found])[:, None] == np.arange(12),
            "weekday": np.array([-1 if d is None else d.weekday() for d in found])[:, None] == np.arange(7),
        }
        chosen = [block for part, block in blocks.items() if part in self.parts]
        return np.hstack([*chosen, *(gaps[:, None],) * self.indicator]).astype(np.float64)


def to_date(text: str, format: str) -> date:
    """The date in a cell; a time of day after it is left out.

    >>> to_date("05-OCT-2020", "%d-%b-%Y"), to_date("5 Oct 2020 12:30", "%d %b %Y")
    (datetime.date(2020, 10, 5), datetime.date(2020, 10, 5))
    """
    try:
        return datetime.strptime(text, format).date()
    except ValueError:
        without_time = _TIME.sub("", text) if " " in format else _BEHIND.split(text, maxsplit=1)[0]
        return datetime.strptime(without_time, format).date()


_TIME = re.compile(r"(?:T| +)\d{1,2}:\d{2}.*$")
_BEHIND = re.compile(r"(?<=\d)T| ")


def first_date(text: str, formats: Sequence[str]) -> date | None:
    """The date in a cell by the first of some forms that fits; ``None`` if none does.

    >>> first_date("31.12.2020", ("%Y-%m-%d", "%d.%m.%Y")), first_date("soon", ("%Y-%m-%d",))
    (datetime.date(2020, 12, 31), None)
    """
    for format in formats:
        try:
            return to_date(text, format)
        except ValueError:
            continue
    return None


def is_number(text: str) -> bool:
    """Whether a text is a number, other than NaN."""
    try:
        return not np.isnan(float(text))
    except ValueError:
        return False


def to_numbers(
    column: str,
    values: Cells,
    missing: Sequence[str] = ("",),
    *,
    decimal: str = ".",
    thousands: str = "",
    lenient: bool = False,
) -> Floats:
    """Convert a column of text to floats, missing entries to NaN; never quotes a value in its error.

    With a decimal mark or separator of thousands, currencies and spaces are left out. A number in parentheses,
    or with a minus behind it, is negative, as accounts write it. With ``lenient`` a cell that
    is no number is missing, too.

    >>> to_numbers("age", ["1", "", "2.5"])
    array([1. , nan, 2.5])
    >>> to_numbers("pay", ["1.234,5 €", "(2,5)"], decimal=",", thousands=".")
    array([1234.5,   -2.5])
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return _without(values.astype(np.float64), missing)
    absent = {*missing, "None"}
    numbers = np.empty(len(values))
    for row, value in enumerate(values):
        text = str(value).strip()
        try:
            numbers[row] = np.nan if text in absent else _to_number(text, decimal, thousands)
        except (ValueError, OverflowError):
            if not lenient:
                raise NotNumericError(column, declared=True) from None
            numbers[row] = np.nan
    return _without(numbers, missing)


def _without(numbers: Floats, missing: Sequence[str]) -> Floats:
    """The numbers with NaN for those that mean a gap, however a file or a frame writes them."""
    gaps = [float(gap) for gap in missing if is_number(gap)]
    return np.where(np.isin(numbers, gaps), np.nan, numbers) if gaps else numbers


def _to_number(text: str, decimal: str, thousands: str) -> float:
    if "_" in text:
        raise ValueError("a number to Python alone")
    if decimal != "." or thousands:
        text = _MARKS.sub("", text)
        text = text.replace(thousands, "") if thousands else text
        text = text.replace(decimal, ".")
    accounts = (
        text[1:-1].strip() if text[:1] == "(" and text[-1:] == ")" else text[:-1] if text[-1:] == "-" else None
    )
    if accounts is not None:  # as accounts write what is negative: (5) or 5-
        if not accounts[:1].isdigit() and accounts[:1] != ".":
            raise ValueError("a number with two signs, or none")
        return -float(accounts)
    return float(text)


class NotNumericError(DataError):
    """Columns hold cells that are not numbers; ``declared`` if a schema says that they are numbers."""

    def __init__(self, *columns: str, declared: bool = False) -> None:
        self.columns = columns
        named = ", ".join(repr(c) for c in columns)
        where = f"column{'s' if len(columns) > 1 else ''} {named}: not numeric"
        if declared:
            super().__init__(
                f"{where} in every row, though declared as numbers. To count the other cells as gaps, write "
                'unreadable = "gap" and missing = "indicator" for the column in the schema; or declare its decimal '
                "mark and thousands separator, or a category. No privacy budget was spent."
            )
            return
        super().__init__(
            f"{where}. Draft a schema with "
            "`quietgrad data schema FILE -o schema.toml`, fill in what is public, and pass it: --schema "
            "schema.toml. A list of categories must be public, not computed from this file. No privacy budget was "
            "spent."
        )
