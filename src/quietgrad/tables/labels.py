"""Classes in an order, and the only place where labels become codes and codes become labels.

A code is a position in one order of the classes. Files, estimators and losses may each have an order of their own,
so codes of two orders cannot be compared. What is handed from one to another is labels: whoever needs codes asks
its own :class:`ClassLabels` for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import SettingError

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClassLabels:
    """Two or more different classes in an order.

    A label belongs to the class that is written alike. Where every class is a number, a label that is the same
    number belongs to it too, so 1, 1.0, True, "1" and "1.0" are one label. Every label is judged by itself.

    >>> grades = ClassLabels.of(["low", "medium", "high"])
    >>> grades.encode(np.array(["high", "low", "none"]))
    array([ 2,  0, -1])
    >>> grades.decode(np.array([2, 0])).tolist()
    ['high', 'low']
    >>> ClassLabels.of([10, 2]).encode(np.array(["2.0", "10"], dtype=object))
    array([1, 0])
    """

    values: npt.NDArray[Any]
    _by_text: Mapping[str, int] = field(init=False, repr=False)
    _by_number: Mapping[float, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        labels = _listed(self.values)
        texts = {_text(label): code for code, label in enumerate(labels)}
        if self.values.ndim != 1 or len(texts) < 2 or len(texts) < len(labels) or any(map(_is_gap, labels)):
            raise SettingError(
                "{classes}: must be two or more different labels, none of them a gap.", classes=labels
            )
        numbers = {number: code for code, label in enumerate(labels) if math.isfinite(number := _number(label))}
        are_texts = all(isinstance(label, str | bytes) for label in labels)
        if len(numbers) < len(labels):
            if not are_texts and all(math.isfinite(_number(label)) for label in labels):  # 1 and True, say
                raise SettingError(
                    "{classes}: must be two or more different labels, none of them a gap.", classes=labels
                )
            numbers = {}  # not all are numbers, or two texts such as "7" and "007" are one
        object.__setattr__(self, "_by_text", texts)
        object.__setattr__(self, "_by_number", numbers)

    @classmethod
    def of(cls, classes: Iterable[Any]) -> ClassLabels:
        """The classes in the given order, of numpy's common type or as they are where that would change them."""
        given = classes if isinstance(classes, np.ndarray) else list(classes)
        values = np.asarray(given)
        if (
            isinstance(given, list)
            and values.dtype.kind in "US"
            and not all(isinstance(v, str | bytes) for v in given)
        ):
            values = np.array(given, dtype=object)
        return cls(values)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def names(self) -> tuple[str, ...]:
        """The classes as they are written."""
        return tuple(self._by_text)

    def encode(self, labels: Sequence[Any] | npt.NDArray[Any]) -> Codes:
        """Return the code of each label in this order, −1 for a label of no class."""
        given = np.asarray(labels)
        if given.dtype.kind in "biuf" and self._by_number:
            codes = np.full(len(given), -1, dtype=np.int64)
            for number, code in self._by_number.items():
                codes[given == number] = code
            return codes
        if given.dtype.kind in "USbiuf":  # each different label is looked up once
            different, places = np.unique(given, return_inverse=True)
            return np.fromiter(map(self._code, different.tolist()), np.int64, len(different))[places]
        return np.fromiter(map(self._code, _listed(given)), np.int64, len(given))

    def encode_known(self, labels: Sequence[Any] | npt.NDArray[Any]) -> Codes:
        """Encode labels like :meth:`encode`, but count a label of no class as the first class.

        It is a rule for every record by itself. A refusal would tell that there is a record with such a label.
        """
        return np.maximum(self.encode(labels), 0)

    def decode(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The labels whose codes in this order are given."""
        return np.asarray(self.values[np.asarray(codes, dtype=np.int64)])

    def agree(self, first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return by record whether its two labels are of one class. A label of no class agrees with none."""
        codes = self.encode(first)
        return np.asarray((codes >= 0) & (codes == self.encode(second)))

    def _code(self, label: object) -> int:
        if _is_gap(label):  # None is not the class "None"
            return -1
        code = self._by_text.get(_text(label))
        return self._by_number.get(_number(label), -1) if code is None else code


def _listed(labels: npt.NDArray[Any]) -> list[Any]:
    """The labels as Python's values; dates of any unit become dates, and not numbers of that unit."""
    values: list[Any] = (labels.astype("M8[us]") if labels.dtype.kind == "M" else labels).tolist()
    return values


def _text(label: object) -> str:
    if isinstance(label, datetime) and label.tzinfo is None and label.time() == time():
        label = label.date()  # midnight of a day is the day, in whatever unit it was written
    return label.decode("utf-8", "backslashreplace") if isinstance(label, bytes) else str(label)


def _number(label: Any) -> float:
    try:
        return float(label)
    except (ValueError, TypeError, OverflowError):
        return math.nan


def _is_gap(label: Any) -> bool:
    """Whether a label says nothing: None, NaN, and pandas' NA, which is equal to nothing it can say."""
    return label is None or type(label).__name__ in ("NAType", "NaTType") or bool(label != label)
