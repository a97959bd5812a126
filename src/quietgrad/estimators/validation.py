"""Columns as numbers: quantities as they are, categories as codes of a public vocabulary.

Whom a fit is about: its rows, or people with several rows each.

Answers of a model that rest on one row each: what a bound on one person's share of a score needs.

A score bounds what one person moves by the one cell that the person falls into. That holds only if nobody moves
anybody else's answer, and a model may be anybody's code: a step that standardises the rows it is given, or ranks
them, lets one record move them all. So a model is asked again about the same rows in other company.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse
from sklearn.utils import _safe_indexing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietgrad.algorithms.base import Algorithm
from quietgrad.errors import DataError, DeclaredWarning
from quietgrad.estimators.scans import is_scan, refuse_scan
from quietgrad.objectives.privacy_units import (
    Combine,
    RecordsWithIds,
    UnitGrouping,
    UserLevelObjective,
    check_combination,
)
from quietgrad.objectives.tables.scanned import ScannedPeople
from quietgrad.objectives.tables.table import NOT_FINITE, lay_out, refuse_text
from quietgrad.privacy.budget import PrivacyUnit
from quietgrad.training.minimizing import check_people, how_people_count


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns and the vocabularies of its categories; ``named`` if it came with names."""

    names: list[str]
    named: bool
    vocabularies: dict[str, list[Any]] = field(default_factory=dict)
    typed: tuple[str, ...] = ()
    """Columns whose vocabulary nobody declared but their category dtype."""

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(taken_as_public(f"column {name}", f"categories={{{name!r}: [...]}}") for name in self.typed)

    @classmethod
    def of(cls, X: Any, categories: Mapping[Any, Sequence[Any]] | None) -> Columns:
        """Read names and types; boolean and category columns declare their vocabularies."""
        named = hasattr(X, "columns")
        shape = np.shape(X)
        if len(shape) != 2 or not shape[1]:
            raise DataError("X: must have two dimensions and at least one column.")
        names = [str(name) for name in X.columns] if named else [f"x{j}" for j in range(shape[1])]
        if len(set(names)) < len(names):
            raise ValueError("X: two columns have the same name. Rename or drop one of them.")
        found: dict[str, list[Any]] = {}
        typed = []
        for name, kind in zip(names, X.dtypes, strict=True) if named else ():
            if str(kind) in ("bool", "boolean"):
                found[name] = [False, True]
            elif getattr(kind, "categories", None) is not None:
                found[name] = list(kind.categories)
                typed.append(name)
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
        if self.named != hasattr(X, "columns") or np.shape(X)[1:] != (len(self.names),):
            if not (self.named and np.shape(X)[1:] == (len(self.names),)):
                raise DataError(f"X: must have the {len(self.names)} columns that the model was fitted on.")
        elif self.named and [str(name) for name in X.columns] != self.names:
            raise ValueError(
                "The feature names should match those that were passed during fit: same columns, same order."
            )
        columns = []
        for j, name in enumerate(self.names):
            column = X.iloc[:, j] if hasattr(X, "iloc") else np.asarray(X)[:, j]
            vocabulary = self.vocabularies.get(name)
            columns.append(_numeric(column, name) if vocabulary is None else codes_in(column, vocabulary))
        table = np.column_stack(columns).astype(np.float64)
        if not np.isfinite(table).all():
            raise DataError(NOT_FINITE)
        return lay_out(table)


def taken_as_public(what: str, instead: str) -> str:
    """What is said of categories that only a dtype declares: the type itself may have been read from records."""
    return (
        f"the categories of {what} are taken as public, as declared by its dtype; if they were read from the "
        f"records (astype('category')), give {instead}"
    )


def say(notes: tuple[str, ...]) -> None:
    """Say in one warning what is taken as public by its type."""
    if notes:
        warnings.warn("; ".join(notes) + ".", DeclaredWarning, stacklevel=5)


def checked_rows(estimator: Any, X: Any, *targets: Any, **options: Any) -> Any:
    """Rows of numbers, and targets if they are given, as every scikit-learn estimator takes them.

    What scikit-learn would answer by printing the array, or a page, is refused here: no record is in an error.
    """
    for name, kind in getattr(getattr(X, "dtypes", None), "items", dict)():
        if str(getattr(kind, "kind", "")) in ("m", "M"):
            raise DataError(f"X: column {name!r} holds dates. Pass numbers, such as days since a public date.")
    refuse_text(X, "X")
    names = getattr(X, "columns", None)
    if names is not None and len(set(map(str, names))) < len(names):
        raise ValueError("X: two columns have the same name. Rename or drop one of them.")
    shape = X.shape if hasattr(X, "shape") else np.shape(np.asarray(X, dtype=object))
    if len(shape) == 1:
        raise DataError("X: Expected 2D array, got 1D array instead. Reshape your data to (records, features).")
    if not shape or (names is not None and not shape[1]):
        raise DataError("X: must be a table of records and at least one feature.")
    checked = validate_data(estimator, X, *targets, ensure_all_finite=False, **options)
    rows = checked[0] if targets else checked
    if not np.isfinite(rows if isinstance(rows, np.ndarray) else rows.data).all():
        raise DataError(NOT_FINITE)
    if targets and not _all_finite(checked[1]):
        raise DataError("y: contains NaN or infinite values. Drop those rows. No privacy budget was spent.")
    return checked


def check_labels(y: Any, declared: Sequence[Any] | None) -> None:
    """Refuse labels that no classifier takes: some text and some not, gaps, or numbers without end.

    Where classes are declared, a label that is none of them counts as the first. Only if no label is one of them
    are labels refused like undeclared ones.
    """
    if not _all_finite(y):
        raise DataError("y: contains NaN or infinite values. Drop those rows. No privacy budget was spent.")
    if y.dtype.kind == "O" and len({isinstance(label, str) for label in y.tolist()}) > 1:
        raise DataError("y: some labels are text and some are not. Make them all of one kind.")
    if declared is None or not np.isin(y, np.asarray(declared)).any():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one about many different labels comes and goes with a record
            check_classification_targets(y)


def _all_finite(y: Any) -> bool:
    if y.dtype.kind in "fc":
        return bool(np.isfinite(y).all())
    return y.dtype.kind != "O" or not any(v is None or v != v for v in y.tolist())


def read_table(estimator: Any, X: Any, categories: Mapping[Any, Sequence[Any]] | None, *, reset: bool) -> Any:
    """``X`` as float64, categories as codes; with ``reset`` its columns are kept, else they must be those kept.

    Numbers alone take the way of every scikit-learn estimator, whose refusals people know.
    """
    refuse_scan(X, "an additive model")
    X = X if hasattr(X, "columns") or sparse.issparse(X) else np.asarray(X)
    shape = X.shape
    if reset:
        is_table = not sparse.issparse(X) and len(shape) == 2 and shape[0] > 0 and shape[1] > 0
        columns = Columns.of(X, categories) if is_table else Columns([], named=False)
    else:
        columns = estimator._columns
    if columns.vocabularies:
        numbers = columns.numbers(X)
    else:
        try:
            refuse_text(X, "X")
        except DataError as error:
            raise DataError(f"{error} A vocabulary is declared with categories=.") from None
        numbers = lay_out(checked_rows(estimator, X, dtype=np.float64, reset=reset))
    if reset:
        say(columns.notes)
        estimator._columns = columns
        estimator.n_features_in_ = len(columns.names)
        if columns.named and columns.vocabularies:  # else they were set above, if they are all text
            estimator.feature_names_in_ = np.array(columns.names, dtype=object)
    return numbers


def _numeric(column: Any, name: str) -> Any:
    try:
        return np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(
            f"X: column {name} has cells that are not numbers. Declare its vocabulary with categories=."
        ) from None


def codes_in(column: Any, vocabulary: Sequence[Any]) -> npt.NDArray[np.float64]:
    """The place of each cell in a vocabulary, as it is or as text; −1 for one that is not there."""
    place = {value: code for code, value in enumerate(vocabulary)}
    place |= {str(value): code for code, value in enumerate(vocabulary) if str(value) not in place}

    def code(cell: Any) -> int:
        try:
            return place.get(cell, place.get(str(cell), -1))
        except TypeError:  # a list, say
            return -1

    return np.array([code(cell) for cell in np.asarray(column, dtype=object)], dtype=np.float64)


class Whom(NamedTuple):
    """Who is one in a fit; ``people`` is ``None`` where every row is. It lives as long as the fit does."""

    people: UnitGrouping | ScannedPeople | None = None
    records_public: int | None = None

    @classmethod
    def of(
        cls,
        person: Any,
        rows: int,
        combine: Combine = "mean",
        records_per_person: int | None = None,
        records_public: int | None = None,
    ) -> Whom:
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

    def count(self, rows: int) -> int:
        return rows if self.people is None else len(self.people)

    def asks(self, loss: Any) -> Any:
        """The loss as a curator must be asked about it."""
        if self.people is None:
            return loss
        return UserLevelObjective(loss, self.people.combine, self.people.records_per_person)

    def of_data(self, data: Any) -> Any:
        return data if self.people is None else RecordsWithIds(data, self.people)

    @property
    def means(self) -> bool:
        """Whether what is bounded for means of all records may be asked."""
        return self.people is None or (self.people.combine == "mean" and self.people.records_per_person is None)

    def check(self, method: Algorithm, loss: Any) -> None:
        """Refuse a method that knows no bound for a person, before anything is reserved."""
        check_people(method, self.asks(loss))

    @property
    def notes(self) -> tuple[str, ...]:
        return () if self.people is None else how_people_count(self.asks(None))


def named(X: Any, person: Any) -> tuple[Any, Any]:
    """(X, ids): a ``person`` that names a column of a data frame is taken out of the features."""
    if is_scan(X):
        people = X.of_people(person)
        return people, None if people.person is None else people
    if not isinstance(person, str):
        return X, person
    if not hasattr(X, "columns") or person not in list(X.columns):
        raise DataError("person: names no column of X; give a column of a data frame, or one id per record.")
    return without(X, person), X[person]


def without(X: Any, column: str | None) -> Any:
    """X without the column that named people, if it has it: a model predicts from features alone."""
    if column is None or not hasattr(X, "columns") or column not in list(X.columns):
        return X
    return X[[name for name in X.columns if name != column]]


def row_by_row(model: Any, verb: str, X: Any) -> npt.NDArray[Any]:
    """``model.verb`` of every record, each answer from that record alone.

    This library's models answer by arithmetic of one row (:func:`row_products`). Any other model is asked about one
    record at a time: a step that standardises, ranks or fills by the rows it is given then sees one, and no product
    of matrices rounds differently for another number of rows. Models of scikit-learn keep nothing of what they are
    asked; of any other one each record is asked of a fresh copy. A record that the model cannot answer about is
    answered by NaN (``None`` where answers are no numbers), since an error would tell that there is one.

    Raises:
        DataError: the model could answer about no record; nothing was reserved.

    >>> class Ranks:
    ...     def predict(self, rows):
    ...         return rows[:, 0] - rows.mean()
    >>> Ranks.__module__ = "somebody_else"
    >>> row_by_row(Ranks(), "predict", np.array([[1.0], [2.0]])).tolist()
    [0.0, 0.0]
    """
    if isinstance(model, AskedOnce):
        return model.answers(verb, X)
    if _is_ours(model):
        return np.asarray(getattr(model, verb)(X))
    copied: Callable[[Any], Any] = (lambda one: one) if _keeps_nothing(model) else deepcopy
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # one about a value would tell of the record that has it
        found = [_answer(copied(model), verb, _safe_indexing(X, [row])) for row in range(_safe_len(X))]
    like = next((answer for answer in found if answer is not None), None)
    if like is None:
        raise DataError(f"X: the model could answer about no record. Call model.{verb} on a row to see why.")
    kind = np.result_type(like.dtype, np.float64) if like.dtype.kind in "biuf" else np.dtype(object)
    answers = np.full((len(found), *like.shape), np.nan if kind.kind == "f" else None, dtype=kind)
    for row, answer in enumerate(found):
        if answer is not None and answer.shape == like.shape:
            answers[row] = answer
    return answers


class AskedOnce:
    """A model whose answers about the same rows are kept, since one record at a time is slow."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[str, tuple[Any, npt.NDArray[Any]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def answers(self, verb: str, X: Any) -> npt.NDArray[Any]:
        """What :func:`row_by_row` says of these rows."""
        rows, found = self._known.get(verb, (None, None))
        if found is None or rows is not X:
            found = row_by_row(self._model, verb, X)
            self._known[verb] = X, found
        return found


def row_products(X: Any, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """X·W, each row's products rounded in the same way whatever other rows there are.

    A product of two matrices is cut into tiles by their shapes: one record more can change the last digit of every
    score, and where two scores tie every prediction.
    """
    if hasattr(X, "indptr"):  # sparse rows are summed one by one
        return np.asarray(X @ weights)
    X, columns = np.asarray(X, dtype=np.float64), np.ascontiguousarray(weights.T)
    out = np.empty((len(X), len(columns)))
    block = max(1, _BLOCK // max(1, columns.size))
    for start in range(0, len(X), block):
        rows = X[start : start + block]
        out[start : start + block] = (rows[:, None, :] * columns[None]).sum(axis=2)
    return out


_BLOCK = 2**18  # numbers of one block of products


def _is_ours(model: Any) -> bool:
    """Whether this library's code alone answers: a search answers by whatever model it chose."""
    ours = type(model).__module__.partition(".")[0] == "quietgrad"
    return ours and _is_ours(model.best_estimator_) if hasattr(model, "best_estimator_") else ours


def _keeps_nothing(model: Any) -> bool:
    """Whether a model is made of scikit-learn's parts alone, without functions of somebody else's."""
    parts = [model, *(model.get_params(deep=True).values() if hasattr(model, "get_params") else ())]
    homes = {type(part).__module__.partition(".")[0] for part in parts if part is model or hasattr(part, "fit")}
    return homes <= {"sklearn", "quietgrad"} and not any(callable(part) for part in parts)


def _safe_len(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def _answer(model: Any, verb: str, row: Any) -> npt.NDArray[Any] | None:
    try:
        return np.asarray(np.asarray(getattr(model, verb)(row))[0])
    except Exception:  # anybody's code: what it says may show a record
        return None
