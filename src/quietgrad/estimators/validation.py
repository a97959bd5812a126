"""What estimators are given: rows, columns with vocabularies, scans, privacy units, and models to be scored."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.utils import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.core.errors import DataError, DeclaredWarning
from quietgrad.estimators.dates import dates_as_days
from quietgrad.methods.base import Algorithm
from quietgrad.methods.minimizing import check_people, how_people_count
from quietgrad.tables.labels import ClassLabels
from quietgrad.tables.privacy_units import (
    Combine,
    RecordsWithIds,
    UnitGrouping,
    UserLevelObjective,
    check_combination,
)
from quietgrad.tables.scanned import ScannedPeople, ScanSource
from quietgrad.tables.table import NOT_FINITE, Array, Floats, Matrix, lay_out, refuse_text, rows_in

Vocabularies = Mapping[Any, Sequence[Any]]
"""The public values of category columns, by name or position."""


class DataFrame(Protocol):
    """What is read of a data frame of pandas or polars."""

    columns: Any
    dtypes: Any
    shape: tuple[int, int]

    def __getitem__(self, key: Any, /) -> Any: ...


class ScanTable(ScanSource, Protocol):
    """What an estimator reads of a :class:`quietgrad.data.scanning.Scan`."""

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
            raise ValueError("y: a scan knows its target; say it there: scan(..., target=...).")
        return X, None
    if isinstance(y, str):
        # Readers are no part of an estimator: they are asked for only where a column's name stands for the labels.
        return import_module("quietgrad.data").scan(X, target=y), None
    return X, y


def with_labels(X: object, y: object, labels: Callable[[Any], Any] | None) -> Any:
    """What an objective takes: records with ``labels(y)`` for their targets."""
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


def predict_to(model: Any, scan: object, path: str | Path) -> int:
    """Write ``model``'s predictions for all records of ``scan``, block by block; how many they are."""
    import pyarrow as pa
    import pyarrow.csv as csv
    import pyarrow.parquet as pq

    if not is_scan(scan):
        raise ValueError("predict_to: takes a scan; use predict for arrays.")
    plain = nameless(model, scan)

    def answers(X: Array) -> dict[str, Any]:
        found = {"prediction": np.asarray(plain.predict(X))}
        if hasattr(plain, "predict_proba"):
            chances = plain.predict_proba(X)
            if chances.shape[1] == 2:
                found[f"probability_of_{plain.classes_[1]}"] = chances[:, 1]
            else:
                found["probability"] = chances.max(axis=1)
        return found

    target = Path(path)
    if target.suffix not in (".csv", ".parquet", ".pq"):
        raise ValueError(f"{target.name}: predictions of a scan are written as .csv or .parquet.")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    rows, writer = 0, None
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    try:
        for X, _ in scan.blocks():
            part = pa.table(answers(X))
            if writer is None:
                kind = csv.CSVWriter if target.suffix == ".csv" else pq.ParquetWriter
                writer = kind(str(unfinished), part.schema)
            writer.write_table(part)
            rows += part.num_rows
        if writer is not None:
            writer.close()
        unfinished.replace(target)
    except BaseException:
        if writer is not None:
            writer.close()
        unfinished.unlink(missing_ok=True)
        raise
    return rows


def nameless(model: Any, scan: ScanTable) -> Any:
    """The model for blocks of ``scan``, which carry no names: they are compared here, once."""
    plain = copy(model)
    known = list(vars(plain).pop("feature_names_in_", ()))
    width = vars(plain).get("n_features_in_", scan.features)
    if scan.features != width or (known and known != list(scan.feature_names)):
        raise DataError(f"{scan.name}: has other columns than the table the model was fitted on.")
    return plain


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
    """What is said of categories that only a dtype declares: the type itself may have been read from records."""
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
    X = dates_as_days(X)
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


class PrivacyUnitSpec(NamedTuple):
    """Who is one in a fit; ``people`` is ``None`` where every row is. It lives as long as the fit does."""

    people: UnitGrouping | ScannedPeople | None = None
    records_public: int | None = None

    @classmethod
    def of(
        cls,
        person: object,
        rows: int,
        combine: Combine = "mean",
        records_per_person: int | None = None,
        records_public: int | None = None,
    ) -> PrivacyUnitSpec:
        """From what ``fit`` was given; refused, before anything is planned, if it is not one id per row."""
        check_combination(combine, records_per_person)
        if person is None:
            if combine != "mean" or records_per_person is not None:
                raise ValueError(
                    "combine, records_per_person: say how a person's records count; give person= with them."
                )
            return cls(None, records_public)
        if isinstance(person, UnitGrouping | ScannedPeople):
            return cls(person, records_public)
        if is_scan(person):
            return cls(ScannedPeople(person, combine, records_per_person), records_public)
        people = UnitGrouping.of(person, combine=combine, records_per_person=records_per_person, records=rows)
        return cls(people, records_public)

    @property
    def unit(self) -> PrivacyUnit:
        """What the fit's n counts."""
        return PrivacyUnit.RECORD if self.people is None else PrivacyUnit.PERSON

    def asks(self, loss: object) -> Any:
        """The loss as a curator must be asked about it: about rows, or about people."""
        if self.people is None:
            return loss
        return UserLevelObjective(loss, self.people.combine, self.people.records_per_person)

    def of_data(self, data: object) -> Any:
        return data if self.people is None else RecordsWithIds(data, self.people)

    @property
    def means(self) -> bool:
        """Whether what is bounded for means of all records may be asked."""
        return self.people is None or (self.people.combine == "mean" and self.people.records_per_person is None)

    def check(self, method: Algorithm, loss: object) -> None:
        """Refuse a method that knows no bound for a person, before anything is reserved."""
        check_people(method, self.asks(loss))

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.people is None else how_people_count(self.asks(None))


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


def predict_row_independent(model: object, verb: str, X: object, width: int | None) -> Floats:
    """``model.verb`` of every record in numbers, each answer from that record alone: ``width`` of them, or one.

    A score bounds what one person moves by the cell that the person falls into, so no record may move another one's
    answer. This library's models answer by arithmetic of one row (:func:`row_products`). Any other model is asked
    about one record at a time: a step that standardises or ranks the rows it is given then sees one, and no product
    of matrices rounds differently for another number of rows. Models of scikit-learn keep nothing of what they are
    asked; any other one is copied for each record. How many numbers an answer has is public. An answer of another
    form, and a record that the model cannot answer about, are NaN, since an error would tell that there is one.
    """
    if isinstance(model, AskedOnce):
        return model.answers(verb, X, width)
    if _is_ours(model):
        return np.asarray(getattr(model, verb)(X), dtype=np.float64)
    copied: Callable[[Any], Any] = (lambda one: one) if _keeps_nothing(model) else deepcopy
    answers = np.full((rows_in(X), 1 if width is None else width), np.nan)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # one about a value would tell of the record that has it
        for row in range(len(answers)):
            with suppress(Exception):  # foreign code: its message may show a record
                answered = np.ravel(np.asarray(getattr(copied(model), verb)(_safe_indexing(X, [row])))[0])
                if answered.shape == answers[row].shape:
                    answers[row] = answered.astype(np.float64)
    return answers[:, 0] if width is None else answers


class AskedOnce:
    """A model whose answers about the same rows are kept, since one record at a time is slow."""

    def __init__(self, model: object) -> None:
        self._model = model
        self._known: dict[str, tuple[object, Floats]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def answers(self, verb: str, X: object, width: int | None) -> Floats:
        """What :func:`predict_row_independent` says of these rows."""
        rows, found = self._known.get(verb, (None, None))
        if found is None or rows is not X:
            found = predict_row_independent(self._model, verb, X, width)
            self._known[verb] = X, found
        return found


def row_products(X: Matrix, weights: Floats) -> Floats:
    """X·W, each row's products rounded in the same way whatever other rows there are.

    A product of two matrices is cut into tiles by their shapes: one record more can change the last digit of every
    score, and where two scores tie every prediction.
    """
    if not isinstance(X, np.ndarray):  # sparse rows are summed one by one
        return np.asarray(X @ weights)
    X, columns = np.asarray(X, dtype=np.float64), np.ascontiguousarray(weights.T)
    out = np.empty((len(X), len(columns)))
    block = max(1, 2**18 // max(1, columns.size))
    for start in range(0, len(X), block):
        rows = X[start : start + block]
        out[start : start + block] = (rows[:, None, :] * columns[None]).sum(axis=2)
    return out


def _is_ours(model: object) -> bool:
    """Whether this library's code alone answers: a search answers by whatever model it chose."""
    ours = type(model).__module__.partition(".")[0] == "quietgrad"
    best = getattr(model, "best_estimator_", None)
    return ours and (best is None or _is_ours(best))


def _keeps_nothing(model: Any) -> bool:
    """Whether a model is made of scikit-learn's parts alone, without a user's functions."""
    parts = [model, *(model.get_params(deep=True).values() if hasattr(model, "get_params") else ())]
    homes = {type(part).__module__.partition(".")[0] for part in parts if part is model or hasattr(part, "fit")}
    return homes <= {"sklearn", "quietgrad"} and not any(callable(part) for part in parts)
