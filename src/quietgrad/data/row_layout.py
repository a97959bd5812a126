"""Arrow record batches as rows of numbers: by a public schema, or as they are where every column is a number.

Encodings are those of :mod:`quietgrad.data.schema`, asked for the few different words of a batch and not for every
row, so a scan and a loaded table hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.dataset import Task, encode_labels
from quietgrad.data.quick_csv import coded
from quietgrad.data.schema import Categorical, Numeric, Schema
from quietgrad.errors import DataError
from quietgrad.sanitize import sanitize

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class RowLayout:
    """Which columns of a table are features, which is the target, and how they become numbers.

    ``person`` is the column of people's ids, which are no feature.

    Without a ``schema`` features keep their scale. ``classes`` turn targets into codes 0…k−1, ``task="regression"``
    into numbers; without either, labels stay as they are (an estimator decides what they are).
    """

    name: str
    columns: tuple[str, ...]
    target: str | None
    schema: Schema | None = None
    classes: tuple[object, ...] | None = None
    task: Task | None = None
    person: str | None = None

    @property
    def width(self) -> int:
        """Number of features."""
        return len(self.columns) if self.schema is None else self.schema.width

    @property
    def read(self) -> list[str]:
        """The columns that are read."""
        return [*self.columns, *(name for name in (self.target, self.person) if name is not None)]

    @property
    def may_drop(self) -> bool:
        """Whether rows with a gap are left out."""
        return self.schema is not None and self.schema.drop_incomplete

    def check_types(self, kinds: Any, where: str) -> None:
        """Refuse a file whose columns are missing, or are no numbers and have no vocabulary."""
        import pyarrow as pa

        names = set(kinds.names)
        for column in self.read:
            if column not in names:
                raise DataError(f"{where}: has no column {column!r}.")
        for column in self.columns:
            kind = kinds.field(column).type
            wanted = None if self.schema is None else self.schema.columns[column]
            plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            words = pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
            if wanted is None and not plain:
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}, not a number. Declare it in a "
                    f"schema, "
                    "with bounds or categories."
                )
            if isinstance(wanted, Numeric) and not (plain or pa.types.is_decimal(kind) or words):
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}; its declared bounds need a number."
                )
            if isinstance(wanted, Categorical) and not (plain or words):
                raise DataError(
                    f"{where}: column {column!r} is {sanitize(kind, most=40)}; its categories need words or codes."
                )

    def rows(self, batch: Any) -> tuple[Array, Array, Any]:
        """(X, y, people's ids or ``None``) of a record batch: X column-major, float32 or float64."""
        import pyarrow as pa

        try:
            X = self._plain(batch) if self.schema is None else self._encoded(batch, self.schema)
            y = np.zeros(len(X)) if self.target is None else self.targets(batch.column(self.target))
        except pa.ArrowException:  # its message may quote a cell
            raise DataError(f"{self.name}: has columns that cannot be made numbers.") from None
        ids = None if self.person is None else batch.column(self.person)
        if self.may_drop:
            kept = np.isfinite(X).all(axis=1)
            X, y = X[kept], y[kept]
            ids = None if ids is None else ids.filter(pa.array(kept))
        return X, y, ids

    def _plain(self, batch: Any) -> Array:
        import pyarrow as pa

        chosen = batch.select(list(self.columns))
        wider = {pa.bool_(): pa.uint8(), pa.float16(): pa.float32()}
        if any(field.type in wider for field in chosen.schema):
            columns = [c.cast(wider[c.type]) if c.type in wider else c for c in chosen.columns]
            chosen = pa.RecordBatch.from_arrays(columns, names=list(self.columns))
        X: Array = chosen.to_tensor(null_to_nan=True, row_major=False).to_numpy()
        return X if X.dtype in (np.float32, np.float64) else X.astype(np.float64)

    def _encoded(self, batch: Any, schema: Schema) -> Array:
        X = np.empty((batch.num_rows, schema.width), order="F")
        at = 0
        for column, kind in schema.columns.items():
            X[:, at : at + kind.width] = _encode(kind, column, batch.column(column), schema.missing)
            at += kind.width
        return X

    def targets(self, values: Any) -> Array:
        """The target column as codes, numbers or the labels it holds."""
        import pyarrow as pa

        target = str(self.target)
        if values.null_count:
            raise DataError(f"{self.name}: the target {target!r} has missing entries. Remove those records first.")
        number = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        classes = self.classes if self.schema is None else self.schema.classes
        if self.schema is not None and self.schema.label_bounds is not None:
            return np.clip(_numbers(values, target), *self.schema.label_bounds)
        if self.task == "regression":
            return _numbers(values, target)
        if classes is None and (number or pa.types.is_boolean(values.type)):
            return np.asarray(values.to_numpy(zero_copy_only=False))
        words, codes = _words(values)
        if classes is None:
            if not all(isinstance(word, str) for word in words):
                raise DataError(f"{self.name}: the target {target!r} is neither numbers nor words.")
            return np.asarray(words)[codes]
        raw = np.array([str(word).strip() if isinstance(word, str) else str(word) for word in words], dtype=object)
        if all(isinstance(label, int | float) for label in classes):
            raw = np.array([float(word) if isinstance(word, bool) else word for word in words], dtype=object)
        numbers: Array = encode_labels(self.name, raw, None, classes)[0]
        return numbers[codes]


def _numbers(values: Any, column: str) -> Array:
    from quietgrad.data.schema import to_numbers

    if hasattr(values.type, "value_type") or str(values.type) in ("string", "large_string"):
        words, codes = _words(values)
        return to_numbers(column, words)[codes]
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64)


def _words(values: Any) -> tuple[list[Any], Array]:
    """The different values of a column that occur, and the code of each row's among them; a gap is ``None``."""
    found = coded(values)
    return found.words, found.codes


def _encode(kind: Numeric | Categorical, column: str, values: Any, missing: Sequence[str]) -> Array:
    import pyarrow as pa

    plain = (
        pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_boolean(values.type)
    )
    if isinstance(kind, Numeric) and plain:
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.uint8())
        return kind.encode(column, np.asarray(values.to_numpy(zero_copy_only=False), np.float64), missing)
    words, codes = _words(values)
    if not words:
        return np.zeros((0, kind.width))
    return kind.encode(column, words, missing)[codes]
