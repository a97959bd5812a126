"""Columns as numbers: quantities as they are, categories as codes of a public vocabulary."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from quietgrad.errors import DataError, DeclaredWarning
from quietgrad.estimators.scans import refuse_scan
from quietgrad.objectives.tables.layout import lay_out, refuse_text

_MISSING = (
    "X: contains NaN or infinity. Fill them with a public constant (a mean or median of the data would tell "
    "of records), or remove such records."
)


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns and the vocabularies of its categories; ``named`` if it came with names.

    >>> columns = Columns.of(np.array([[1.0, 2.0]]), {1: [2.0, 3.0]})
    >>> columns.names, columns.numbers(np.array([[7.0, 3.0]])).tolist()
    (['x0', 'x1'], [[7.0, 1.0]])
    """

    names: list[str]
    named: bool
    vocabularies: dict[str, list[Any]] = field(default_factory=dict)
    typed: tuple[str, ...] = ()
    """Columns whose vocabulary nobody declared but their category dtype."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement says of them."""
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
            columns.append(_numeric(column, name) if vocabulary is None else _codes(column, vocabulary))
        table = np.column_stack(columns).astype(np.float64)
        if not np.isfinite(table).all():
            raise DataError(_MISSING)
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
            raise DataError(f"X: column {name!r} holds dates. Give numbers, such as days since a public day.")
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
        raise DataError(_MISSING)
    if targets and not _all_finite(checked[1]):
        raise DataError("y: contains NaN or infinity. Remove such records first.")
    return checked


def check_labels(y: Any) -> None:
    """Refuse labels that no classifier takes: some text and some not, gaps, or numbers without end."""
    if not _all_finite(y):
        raise DataError("y: contains NaN or infinity. Remove such records first.")
    if y.dtype.kind == "O" and len({isinstance(label, str) for label in y.tolist()}) > 1:
        raise DataError("y: some labels are text and some are not. Make them all of one kind.")
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


def _codes(column: Any, vocabulary: list[Any]) -> Any:
    place = {value: code for code, value in enumerate(vocabulary)}
    place |= {str(value): code for code, value in enumerate(vocabulary) if str(value) not in place}
    return np.array(
        [place.get(v, place.get(str(v), -1)) for v in np.asarray(column, dtype=object)], dtype=np.float64
    )
