"""The columns of a table that is described: how cells become numbers, what is public of each, and their bins."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError, DeclaredWarning
from quietgrad.estimators.dates import bounds_in_days, days_since_1970
from quietgrad.estimators.validation import codes_in, is_frame, listed_by, taken_as_public
from quietgrad.methods.range_estimation import checked_bounds
from quietgrad.tables.cells import as_floats, cell_numbers, day_text
from quietgrad.tables.shapes import usual_edges
from quietgrad.tables.table import Floats

_SKIPPED = ("id", "text", "drop")


@dataclass(frozen=True)
class DescribedColumn:
    """One column: how its cells become numbers, and what is public of it."""

    name: str
    kind: str
    bounds: tuple[float, float] | None = None
    values: tuple[Any, ...] = ()
    gaps: bool = False
    edges: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def levels(self) -> list[str]:
        """The names of its cells: values and "other", or bins and, if it may have gaps, "missing"."""
        if self.values:
            return [*map(str, self.values), "other"]
        pairs = itertools.pairwise(self.edges.tolist())
        if self.kind == "integer":  # edges lie between whole numbers
            ends = [(round(a + 0.5), round(b - 0.5)) for a, b in pairs]
            bins = [str(a) if a == b else f"{a} to {b}" for a, b in ends]
        elif self.kind == "date":
            bins = [f"{day_text(a)} to {day_text(b)}" for a, b in pairs]
        else:
            bins = [f"{a:.6g} to {b:.6g}" for a, b in pairs]
        return [*bins, "missing"] if self.gaps else bins

    def binned(self, low: float, high: float, bins: int) -> DescribedColumn:
        """The column with at most ``bins`` bins from low to high; of integers each holds equally many whole
        numbers.

        Bins of 3.1 would hold three numbers, and now and then four: a comb that is not in the data.
        """
        if self.kind != "integer":
            return replace(self, edges=usual_edges(low, high, bins))
        first, last = math.floor(low), math.ceil(high)
        numbers = last - first + 1
        width = 1 if numbers <= 2 * bins else math.ceil(numbers / bins)
        return replace(self, edges=first - 0.5 + width * np.arange(math.ceil(numbers / width) + 1.0))

    def cells(self, column: Floats) -> Any:
        """The cell of each value; numbers beyond the edges are in the first or the last bin.

        A gap in a column that is said to have none is in the first, so that nothing tells of it.
        """
        if self.values:
            return np.where(column < 0, len(self.values), column).astype(np.int64)
        inner = np.searchsorted(self.edges[1:-1], column, side="right")
        return np.where(np.isnan(column), len(self.edges) - 1 if self.gaps else 0, inner)


def read_columns(
    frame: Any, schema: object, leave: Collection[str] = ()
) -> tuple[list[DescribedColumn], Floats, tuple[str, ...]]:
    """The columns, their cells as numbers (NaN for a gap, −1 for a value that is not listed), and notes.

    Columns of ``leave`` are not described; if there are any, there may be no other.
    """
    given = declared_columns(schema)
    names = [str(name) for name in (frame.columns if is_frame(frame) else frame)]
    if len(set(names)) < len(names):
        raise DataError("frame: two columns have the same name. Rename or drop one of them. Nothing was spent.")
    typed: list[str] = []
    columns, numbers = [], []
    described = {name for name, said in (given or {}).items() if said.get("kind") not in _SKIPPED}
    if unknown := sorted(described - set(names)):
        raise DataError(f"schema: {', '.join(unknown)}: not among the columns of the table.")
    for name in (name for name in names if name not in leave and (given is None or name in given)):
        cells = frame[name]
        said = dict(given[name]) if given is not None else kind_by_type(name, cells, typed)
        if said.get("kind") in _SKIPPED:
            continue
        column = _column(name, said)
        columns.append(column)
        numbers.append(codes_in(cells, column.values) if column.values else _numbers(column, cells))
    if not columns and not leave:
        raise DataError("there are no columns to describe: declare their kinds in a schema.")
    notes = tuple(taken_as_public(f"column {name}", "a schema with its categories") for name in typed)
    if notes:
        warnings.warn("; ".join(notes) + ".", DeclaredWarning, stacklevel=3)
    rows = frame.shape[0] if is_frame(frame) else len(next(iter(frame.values())))
    table = np.column_stack(numbers).astype(np.float64) if numbers else np.zeros((rows, 0))
    return columns, table, notes


def for_ranges(columns: list[DescribedColumn], numbers: Floats) -> Floats:
    """The numbers as range estimation reads them: gaps are NaN and count nowhere.

    A gap in a column that is said to have none counts as a zero, so that nothing tells of it.
    """
    gaps = np.array([column.gaps for column in columns], dtype=bool)
    return np.where(np.isnan(numbers) & ~gaps, 0.0, numbers)


def refuse_empty(rows: int, relation: Relation) -> None:
    """Refuse a table without records, where their number is public; where it is a secret, so is that it is zero."""
    if not rows and relation is Relation.REPLACE_ONE:
        raise DataError("there are no records to describe. No privacy budget was spent.")


def declared_columns(schema: Any) -> dict[str, Mapping[str, Any]] | None:
    """The schema as a mapping of names to what is said of each column."""
    if schema is None:
        return None
    if isinstance(schema, str | Path):
        from importlib import import_module

        schema = import_module("quietgrad.data.schema").read_schema(schema)  # readers are no part of an estimator
    if isinstance(schema, Mapping):
        return {str(name): said for name, said in (schema.get("columns") or schema).items()}
    columns: Mapping[str, object] = schema.columns
    known = ("bounds", "categories", "missing", "kind")
    aside = {str(name): {"kind": kind} for kind in ("id", "text") for name in getattr(schema, f"{kind}s", ())}
    described = {
        str(n): {key: getattr(kind, key) for key in known if hasattr(kind, key)} for n, kind in columns.items()
    }
    return {**described, **aside}


def kind_by_type(name: str, cells: object, typed: list[str]) -> dict[str, Any]:
    kind: Any = getattr(cells, "dtype", None)
    if kind is None:  # numpy would find one that a single cell decides
        raise DataError(
            f"column {name!r} is a list: declare its kind in a schema, or give an array or a data frame."
        )
    if str(kind) in ("bool", "boolean"):
        return {"kind": "bool"}
    if (listed := listed_by(kind)) is not None:
        typed.append(name)
        return {"kind": "category", "categories": listed}
    if str(kind).startswith(("datetime", "date")):
        return {"kind": "date"}
    if getattr(kind, "kind", "O") not in "iuf":
        raise DataError(f"column {name!r} is text: declare its categories in a schema, or leave it out.")
    # An integer type of numpy becomes float with the first gap; one that has gaps of its own stays what it is.
    whole = kind.kind in "iu" and not isinstance(kind, np.dtype)
    return {"kind": "integer" if whole else "number"}


def _column(name: str, said: Mapping[str, Any]) -> DescribedColumn:
    values = tuple(said.get("categories") or ())
    kind = str(said.get("kind") or ("category" if values else "number"))
    if kind == "bool":
        values = values or (False, True)
    if kind == "category" and not values:
        raise DataError(f"schema: column {name!r} is a category: list its public `categories`.")
    bounds = said.get("bounds")
    if kind == "date":
        bounds = bounds_in_days(bounds)
    pair = None if bounds is None or values else checked_bounds(f"schema: column {name!r}", bounds)
    # Whatever the type: one gap turns a column of whole numbers into floats, and its cell must not tell of it.
    return DescribedColumn(name, kind, pair, values, gaps=not values and said.get("missing") is not False)


def _numbers(column: DescribedColumn, cells: object) -> Floats:
    """The cells as numbers, dates as days since 1970; what is no finite number is a gap, NaN."""
    return cell_numbers(cells, days_since_1970 if column.kind == "date" else as_floats)
