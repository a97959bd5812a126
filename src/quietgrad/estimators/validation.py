"""Inputs of estimators: rows, columns with vocabularies, scans and privacy units."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import DataError, DeclaredWarning
from quietgrad.estimators.dates import dates_as_days
from quietgrad.estimators.raw_frames import encode_raw_frame
from quietgrad.methods.base import Algorithm
from quietgrad.methods.minimizing import check_people, how_people_count
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.privacy_units import (
    MEAN_OF_ALL,
    PersonRule,
    RecordsWithIds,
    SurveyData,
    UnitGrouping,
    UserLevelObjective,
)
from quietgrad.tables.scanned import ScannedPeople, ScanSource
from quietgrad.tables.table import NOT_FINITE, Array, lay_out, refuse_text

Vocabularies = Mapping[Any, Sequence[Any]]
"""The public values of category columns, by name or position."""


class DataFrame(Protocol):
    """The part of a pandas or polars data frame that estimators read."""

    columns: Any
    dtypes: Any
    shape: tuple[int, int]

    def __getitem__(self, key: Any, /) -> Any: ...


class ScanTable(ScanSource, Protocol):
    """The part of a :class:`quietgrad.data.scanning.Scan` that estimators read."""

    name: str
    feature_names: Sequence[str]
    bounds: Any
    classes: Any
    person: Any
    indicators: frozenset[str]
    shape: tuple[int, int]

    def __len__(self) -> int: ...
    def blocks(self) -> Iterator[tuple[Array, Array]]: ...
    def known(self) -> ScanTable: ...
    def named(self) -> Any: ...
    def labelled(self, labels: Callable[[Any], Any]) -> ScanTable: ...
    def mapped(self, turned: Callable[[Any], Any], names: Sequence[str]) -> ScanTable: ...
    def of_people(self, person: object) -> ScanTable: ...


def is_frame(X: object) -> TypeGuard[DataFrame]:
    return hasattr(X, "columns")


def from_arrow(X: Any, *, typed: bool = False) -> Any:
    """Columns of any library that hands them over by the Arrow C stream; a frame of pandas.

    Arrays, frames of pandas and of polars stay as they are: scikit-learn knows them. ``typed`` keeps the types of
    columns, which do not change with a gap, and takes frames of polars too.
    """
    library = type(X).__module__.partition(".")[0]
    if not hasattr(X, "__arrow_c_stream__") or library == "pandas" or (library == "polars" and not typed):
        return X
    try:
        import pandas as pd
    except ImportError:
        raise DataError(
            "X: is a frame of Arrow columns, which needs pandas here. Install it, or give arrays."
        ) from None
    import pyarrow as pa

    try:
        column = pa.chunked_array(X)
    except (TypeError, ValueError, pa.ArrowException):
        pass
    else:
        if not pa.types.is_struct(column.type):  # one column: labels, or ids
            plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
            return np.asarray(plain.to_numpy(zero_copy_only=False))

    def nullable(kind: pa.DataType) -> Any:
        if pa.types.is_integer(kind):
            return pd.UInt64Dtype() if kind == pa.uint64() else pd.Int64Dtype()
        return pd.BooleanDtype() if pa.types.is_boolean(kind) else None

    frame: pd.DataFrame = pa.table(X).to_pandas(types_mapper=nullable if typed else None)
    return frame


def is_scan(X: object) -> TypeGuard[ScanTable]:
    return isinstance(X, ScanSource)


def refuse_scan(X: object, what: str) -> None:
    """Raise if records are a scan, where only a table in memory will do."""
    if is_scan(X):
        raise DataError(
            f"X: is a scan, and {what} needs the table in memory; load it, or fit one of the linear or additive "
            "models, which scan."
        )


def scan_if_one(X: object, y: object) -> tuple[Any, Any]:
    """A frame that names its target column becomes a scan; everything else stays as it is."""
    if is_scan(X):
        if y is not None:
            raise ValueError("y: a scan has its own target; pass it to scan(..., target=...).")
        return X, None
    if isinstance(y, str):  # whatever the frame, its columns are read by the Arrow C stream
        # Readers are no part of an estimator: they are asked for only where a column's name stands for the labels.
        return import_module("quietgrad.data").scan(X, target=y), None
    return from_arrow(X), from_arrow(y)


def with_labels(X: object, y: object, labels: Callable[[Any], Any] | None) -> Any:
    """Return records as an objective takes them, with ``labels(y)`` for their targets."""
    if is_scan(X):
        return X if labels is None else X.labelled(labels)
    return X, y if labels is None else labels(y)


def coder(X: object, known: ClassLabels) -> Callable[[Any], Any]:
    """How the labels of records become codes of the ``known`` classes: by their values, or by a scan's own codes.

    A label too rare to be found, or not declared, counts as the first class.
    """
    if is_scan(X) and X.classes is not None:
        return partial(np.take, known.encode_known(ClassLabels.of(X.classes).values))
    return known.encode_known


@dataclass(frozen=True)
class ColumnSchema:
    """The names of a table's columns and the vocabularies of its categories; ``named`` if it came with names."""

    names: list[str]
    named: bool
    vocabularies: dict[str, list[Any]] = field(default_factory=dict)
    typed: tuple[str, ...] = ()
    """Columns whose vocabulary only their category dtype declares."""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(taken_as_public(f"column {name}", f"categories={{{name!r}: [...]}}") for name in self.typed)

    @classmethod
    def of(cls, X: DataFrame | Array, categories: Vocabularies | None) -> ColumnSchema:
        """Read names and types; boolean and category columns declare their vocabularies."""
        named = is_frame(X)
        names = [str(name) for name in X.columns] if is_frame(X) else [f"x{j}" for j in range(X.shape[1])]
        if len(set(names)) < len(names):
            raise ValueError("X: two columns have the same name. Rename or drop one of them.")
        found: dict[str, list[Any]] = {}
        typed = []
        for name, kind in zip(names, X.dtypes, strict=True) if is_frame(X) else ():
            if (listed := listed_by(kind)) is not None:
                found[name] = listed
                typed += [name] if hasattr(kind, "categories") else []
        if not isinstance(categories or {}, Mapping):
            raise ValueError("categories: must map columns to lists of their values.")
        for key, values in (categories or {}).items():
            name = names[key] if not named and isinstance(key, (int, np.integer)) and key < len(names) else str(key)
            if name not in names:
                raise ValueError(f"categories: {name}: not among the columns of X.")
            if isinstance(values, str) or len(set(values)) < len(list(values)) or not len(list(values)):
                raise ValueError(f"categories: {name}: must be distinct values, at least one.")
            found[name] = list(values)
            typed = [other for other in typed if other != name]
        return cls(names, named, found, tuple(typed))

    def numbers(self, X: Any) -> Any:
        """The table as float64, categories as codes, −1 for what is not in the vocabulary.

        Raises:
            DataError: other columns, NaN, infinity, or text in a column without a vocabulary.
        """
        framed = is_frame(X)
        if np.shape(X)[1:] != (len(self.names),) or (framed and not self.named):
            raise DataError(f"X: must have the {len(self.names)} columns that the model was fitted on.")
        if framed and [str(name) for name in X.columns] != self.names:
            raise ValueError(
                "The feature names should match those that were passed during fit: same columns, same order."
            )
        columns = []
        for j, name in enumerate(self.names):
            column = X.iloc[:, j] if hasattr(X, "iloc") else np.asarray(X)[:, j]
            if name in self.vocabularies:
                columns.append(codes_in(column, self.vocabularies[name]))
                continue
            try:
                columns.append(np.asarray(column, dtype=np.float64))
            except (TypeError, ValueError):
                raise DataError(
                    f"X: column {name} has cells that are not numbers. Declare its vocabulary with categories=."
                ) from None
        table = np.column_stack(columns).astype(np.float64)
        if not np.isfinite(table).all():
            raise DataError(NOT_FINITE)
        return lay_out(table)


def listed_by(kind: object) -> list[Any] | None:
    """The values that a column's type lists: of booleans, and of pandas' categories."""
    if str(kind) in ("bool", "boolean"):
        return [False, True]
    categories = getattr(kind, "categories", None)
    return None if categories is None else list(categories)


def taken_as_public(what: str, instead: str) -> str:
    """Return the note on categories that only a dtype declares, which may itself come from the records."""
    return (
        f"the categories of {what} are taken as public, as declared by its dtype; if they were read from the "
        f"records (astype('category')), give {instead}"
    )


def warn_declared(notes: tuple[str, ...]) -> None:
    """Say in one warning what is taken as public by its type."""
    if notes:
        warnings.warn("; ".join(notes) + ".", DeclaredWarning, stacklevel=5)


def checked_rows(estimator: BaseEstimator, X: object, *targets: object, **options: Any) -> Any:
    """Rows of numbers, and targets if they are given, as every scikit-learn estimator takes them.

    What scikit-learn would answer by printing the array, or a page, is refused here: no record is in an error.
    """
    X = dates_as_days(from_arrow(X))
    refuse_text(X, "X")
    if is_frame(X) and len(set(map(str, X.columns))) < len(X.columns):
        raise ValueError("X: two columns have the same name. Rename or drop one of them.")
    shape = X.shape if hasattr(X, "shape") else np.shape(np.asarray(X, dtype=object))
    if len(shape) == 1:
        raise DataError("X: Expected 2D array, got 1D array instead. Reshape your data to (records, features).")
    if not shape or (is_frame(X) and not shape[1]):
        raise DataError("X: must be a table of records and at least one feature.")
    checked = validate_data(estimator, X, *targets, ensure_all_finite=False, **options)
    rows = checked[0] if targets else checked
    if not np.isfinite(rows if isinstance(rows, np.ndarray) else rows.data).all():
        raise DataError(NOT_FINITE)
    if targets:
        check_finite(checked[1])
    return checked


def check_labels(y: Array, declared: Sequence[object] | None) -> None:
    """Refuse labels that no classifier takes: gaps, and undeclared ones that are of two kinds or measurements.

    Where classes are declared, a label that is none of them counts as the first, whatever it is and however many
    such labels there are.
    """
    check_finite(y)
    if declared is not None:
        return
    if y.dtype.kind == "O" and len({isinstance(label, str) for label in y.tolist()}) > 1:
        raise DataError("y: some labels are text and some are not. Make them all of one kind.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one about many different labels comes and goes with a record
        check_classification_targets(y)


def check_finite(y: Array) -> None:
    """Refuse labels or targets with gaps or infinities."""
    if y.dtype.kind in "fc":
        finite = bool(np.isfinite(y).all())
    else:
        finite = y.dtype.kind != "O" or not any(v is None or v != v for v in y.tolist())
    if not finite:
        raise DataError("y: contains NaN or infinite values. Drop those rows. No privacy budget was spent.")


def read_table(estimator: Any, X: object, categories: Vocabularies | None, *, reset: bool) -> Any:
    """``X`` as float64, categories as codes; with ``reset`` its columns are kept, else they must be those kept.

    Numbers alone take the way of every scikit-learn estimator, whose refusals people know.
    """
    refuse_scan(X, "an additive model")
    X = from_arrow(X if reset else encode_raw_frame(X, vars(estimator).get("_schema")))
    table: Any = dates_as_days(X if is_frame(X) or sparse.issparse(X) else np.asarray(X))
    if reset:
        is_table = not sparse.issparse(table) and len(table.shape) == 2 and 0 not in table.shape
        columns = ColumnSchema.of(table, categories) if is_table else ColumnSchema([], named=False)
    else:
        columns = estimator._columns
    if columns.vocabularies:
        numbers = columns.numbers(table)
    else:
        try:
            refuse_text(table, "X")
        except DataError as error:
            raise DataError(f"{error} A vocabulary is declared with categories=.") from None
        numbers = lay_out(checked_rows(estimator, table, dtype=np.float64, reset=reset))
    if reset:
        warn_declared(columns.notes)
        estimator._columns = columns
        estimator.n_features_in_ = len(columns.names)
        if columns.named and columns.vocabularies:  # else they were set above, if they are all text
            estimator.feature_names_in_ = np.array(columns.names, dtype=object)
    return numbers


def codes_in(column: object, vocabulary: Sequence[object]) -> npt.NDArray[np.float64]:
    """The place of each cell in a vocabulary, as it is or as text; −1 for one that is not there."""
    place = {value: code for code, value in enumerate(vocabulary)}
    place |= {str(value): code for code, value in enumerate(vocabulary) if str(value) not in place}

    def code(cell: object) -> int:
        try:
            return place.get(cell, place.get(str(cell), -1))
        except TypeError:  # a list, say
            return -1

    return np.array([code(cell) for cell in np.asarray(column, dtype=object)], dtype=np.float64)


WEIGHTED = "a record counts with its weight over the largest that was declared; ε is the same for all of them"


class PrivacyUnitSpec(NamedTuple):
    """The privacy unit of one fit: a row if ``people`` is ``None``, else a person. It lives as long as the fit."""

    people: UnitGrouping | ScannedPeople | None = None
    records_public: int | None = None
    weights: Any = None
    """The weight of each record, in [0, 1]: survey weights over the largest that was declared."""

    @classmethod
    def of(
        cls,
        person: object,
        rows: int,
        rule: PersonRule = MEAN_OF_ALL,
        records_public: int | None = None,
    ) -> PrivacyUnitSpec:
        """Build it from what ``fit`` was given. Before anything is planned, refuse ids that are not one per row."""
        if person is None:
            rule.refuse_without_people()
            return cls(None, records_public)
        if isinstance(person, UnitGrouping | ScannedPeople):
            return cls(person, records_public)
        if is_scan(person):
            return cls(ScannedPeople(person, rule), records_public)
        return cls(UnitGrouping.of(person, rule, records=rows), records_public)

    @property
    def unit(self) -> PrivacyUnit:
        """The privacy unit, which the fit's n counts."""
        return PrivacyUnit.RECORD if self.people is None else PrivacyUnit.PERSON

    def asks(self, loss: object) -> Any:
        """Return the loss as a curator must be asked about it: about rows, or about people."""
        if self.people is None:
            return loss
        return UserLevelObjective(loss, self.people.rule)

    def of_data(self, data: object) -> Any:
        given = data if self.weights is None else SurveyData(data, self.weights)
        return given if self.people is None else RecordsWithIds(given, self.people)

    @property
    def means(self) -> bool:
        """Whether what is bounded for means of all records may be asked."""
        return self.people is None or self.people.rule.is_mean_of_all

    def check(self, method: Algorithm, loss: object) -> None:
        """Refuse a method that knows no bound for a person, before anything is reserved."""
        check_people(method, self.asks(loss))

    @property
    def notes(self) -> tuple[str, ...]:
        counted = () if self.people is None else how_people_count(self.asks(None))
        return counted if self.weights is None else (*counted, WEIGHTED)


def take_person_column(X: Any, person: object) -> tuple[Any, Any]:
    """(X, ids): a ``person`` that names a column of a data frame is taken out of the features."""
    if is_scan(X):
        people = X.of_people(person)
        return people, None if people.person is None else people
    if not isinstance(person, str):
        return X, person
    if not is_frame(X) or person not in list(X.columns):
        raise DataError("person: names no column of X; give a column of a data frame, or one id per record.")
    return drop_person_column(X, person), X[person]


def drop_person_column(X: object, column: str | None) -> Any:
    """X without the column that named people, if it has it: a model predicts from features alone."""
    if column is None or not is_frame(X) or column not in list(X.columns):
        return X
    return X[[name for name in X.columns if name != column]]
