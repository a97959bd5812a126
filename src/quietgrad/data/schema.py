"""Public schemas: which columns of a table are used, and how each becomes numbers.

A vocabulary or a range learnt from private rows is itself a release. So it is declared here, by the user
(`schema.json`) or by the registry, and never inferred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad import files
from quietgrad.errors import DataError


@dataclass(frozen=True)
class Numeric:
    """A numeric column with public bounds: clipped to [low, high], then mapped to [0, 1].

    With `log` the map is log(1 + x − low) / log(1 + high − low), for heavy tails. `fill` replaces a missing entry.

    >>> Numeric((0, 10)).encode("age", ["5", "20"])
    array([[0.5],
           [1. ]])
    """

    bounds: tuple[float, float]
    log: bool = False
    fill: float | None = None

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not (np.isfinite([low, high]).all() and low < high):
            raise DataError(f"bounds={self.bounds}: must be two finite numbers, low < high.")

    @property
    def width(self) -> int:
        """How many features the column becomes."""
        return 1

    def names(self, column: str) -> tuple[str, ...]:
        """Feature names."""
        return (column,)

    def encode(
        self, column: str, values: Sequence[Any] | npt.NDArray[Any], missing: Sequence[str] = ("",)
    ) -> npt.NDArray[np.float64]:
        """The column as numbers in [0, 1], one row each; missing entries without a `fill` stay NaN."""
        low, high = self.bounds
        x = to_numbers(column, values, missing)
        if self.fill is not None:
            x = np.where(np.isnan(x), self.fill, x)
        x = np.where(np.isinf(x), np.nan, x)  # clipping would hide an infinity that is to be refused
        x = np.clip(x, low, high) - low
        scaled = np.log1p(x) / np.log1p(high - low) if self.log else x / (high - low)
        return scaled[:, None]


@dataclass(frozen=True)
class Categorical:
    """A categorical column with a public vocabulary, one-hot encoded in the order given.

    `drop_first` leaves out the first category's bit. A value outside the vocabulary sets no
    bit: a refusal would tell that somebody has one.

    >>> Categorical(("no", "yes")).encode("loan", ["yes", "no"])
    array([[0., 1.],
           [1., 0.]])
    """

    categories: tuple[str, ...]
    drop_first: bool = False

    def __post_init__(self) -> None:
        if len(self.categories) < 2 or len(set(self.categories)) != len(self.categories):
            raise DataError(f"categories={list(self.categories)}: must be two or more different values.")

    @property
    def width(self) -> int:
        """How many features the column becomes."""
        return len(self.categories) - self.drop_first

    def names(self, column: str) -> tuple[str, ...]:
        """Feature names."""
        return tuple(f"{column}={c}" for c in self.categories[int(self.drop_first) :])

    def encode(
        self, column: str, values: Sequence[Any] | npt.NDArray[Any], missing: Sequence[str] = ("",)
    ) -> npt.NDArray[np.float64]:
        """The column as 0/1 features, one row each."""
        index = {c: i for i, c in enumerate(self.categories)}
        codes = np.fromiter((index.get(str(v).strip(), -1) for v in values), np.int64, len(values))
        bits = (codes[:, None] == np.arange(len(self.categories))).astype(np.float64)
        kept: npt.NDArray[np.float64] = bits[:, int(self.drop_first) :]
        return kept


@dataclass(frozen=True)
class Schema:
    """How a table becomes features and labels; columns that are not listed are left out.

    `label` names the target; `classes` are its public values, or `label_bounds` its public range for regression.
    `names` gives the columns of a file without a header. `drop_incomplete` removes rows with a missing entry.

    >>> schema = Schema({"age": Numeric((0, 100)), "sex": Categorical(("F", "M"))}, "rich", classes=("no", "yes"))
    >>> schema.width, round(schema.row_bound, 3)
    (3, 1.414)
    """

    columns: Mapping[str, Numeric | Categorical]
    label: str
    classes: tuple[str, ...] | None = None
    label_bounds: tuple[float, float] | None = None
    delimiter: str = ","
    names: tuple[str, ...] | None = None
    missing: tuple[str, ...] = field(default=("", "NA", "NaN", "nan"))
    drop_incomplete: bool = False

    def __post_init__(self) -> None:
        if not self.columns:
            raise DataError("schema: `columns` is empty; list the feature columns.")
        if self.label in self.columns:
            raise DataError(f"schema: the label {self.label!r} is also listed as a feature column.")
        if (self.classes is None) == (self.label_bounds is None):
            raise DataError("schema: give the label either `classes` (classification) or `bounds` (regression).")

    @property
    def width(self) -> int:
        """Number of features d."""
        return sum(c.width for c in self.columns.values())

    @property
    def row_bound(self) -> float:
        """√(number of columns): each contributes at most 1 to ‖x‖²."""
        return float(np.sqrt(len(self.columns)))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the d features."""
        return tuple(n for column, kind in self.columns.items() for n in kind.names(column))


def read_schema(source: Schema | Mapping[str, Any] | str | Path) -> Schema:
    """A `Schema` from itself, a mapping, or a JSON file of the form below.

    >>> read_schema({
    ...     "label": {"column": "rich", "classes": ["no", "yes"]},
    ...     "columns": {"age": {"bounds": [0, 100]}, "sex": {"categories": ["F", "M"]}},
    ... }).width
    3
    """
    if isinstance(source, Schema):
        return source
    where = "schema"
    if not isinstance(source, Mapping):
        where = str(source)
        try:
            source = files.read_json(source)
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"schema {where}: cannot be read ({files.os_error_text(error)}).") from None
        except ValueError as error:
            raise DataError(f"schema {where}: not valid JSON ({error}).") from None
        if not isinstance(source, Mapping):
            raise DataError(f"schema {where}: must be a JSON object with `label` and `columns`.")
    try:
        label = source["label"]
        bounds = label.get("bounds")
        return Schema(
            columns={str(k): _column(str(k), v) for k, v in source["columns"].items()},
            label=str(label["column"]),
            classes=tuple(str(c) for c in label["classes"]) if "classes" in label else None,
            label_bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            delimiter=source.get("delimiter", ","),
            names=tuple(source["names"]) if "names" in source else None,
            missing=tuple(source.get("missing", ("", "NA", "NaN", "nan"))),
            drop_incomplete=bool(source.get("drop_incomplete", False)),
        )
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{where}: is not laid out as a schema ({_missed(error)}). "
            'Expected {"label": {"column": …, "classes": […]}, '
            '"columns": {name: {"bounds": [low, high]} or {"categories": […]}}}.'
        ) from None


def _missed(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return "a value is of another kind than it should be" if isinstance(error, AttributeError) else str(error)


def _column(name: str, spec: Mapping[str, Any]) -> Numeric | Categorical:
    if "categories" in spec:
        categories = tuple(str(c) for c in spec["categories"])
        return Categorical(categories, bool(spec.get("drop_first", False)))
    if "bounds" in spec:
        low, high = spec["bounds"]
        return Numeric((float(low), float(high)), bool(spec.get("log", False)), spec.get("fill"))
    raise DataError(f"schema: column {name!r} needs `bounds` (numeric) or `categories` (one-hot).")


def is_number(text: str) -> bool:
    """Whether a text is a number, other than NaN.

    >>> is_number("-999"), is_number("nan"), is_number("NA")
    (True, False, False)
    """
    try:
        return not np.isnan(float(text))
    except ValueError:
        return False


def to_numbers(
    column: str, values: Sequence[Any] | npt.NDArray[Any], missing: Sequence[str] = ("",)
) -> npt.NDArray[np.float64]:
    """Convert a column of text to floats, missing entries to NaN; never quotes a value in its error.

    >>> to_numbers("age", ["1", "", "2.5"])
    array([1. , nan, 2.5])
    """
    absent = set(missing)
    try:
        numbers = np.asarray(values, dtype=np.float64)
        if numbers.ndim != 1:
            raise DataError(f"column {column!r} holds lists, not numbers.")
        # A number that stands for a gap is one in every row, not only beside cells that are no numbers.
        if not any(is_number(word) for word in absent) or not isinstance(next(iter(values), None), str):
            return numbers
    except DataError:
        raise
    except (ValueError, TypeError, OverflowError):
        pass
    try:
        texts = (str(v).strip() for v in values)
        return np.array([np.nan if t in absent or t == "None" else float(t) for t in texts], dtype=np.float64)
    except (ValueError, OverflowError):
        raise DataError(
            f"column {column!r} is not numeric. If it is a category, declare its public vocabulary in a schema: "
            f'--schema schema.json with "columns": {{"{column}": {{"categories": […]}}}}.'
        ) from None
