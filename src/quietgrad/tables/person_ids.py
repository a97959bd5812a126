"""Ids of people: which of them are equal, found without showing any of them.

Two records are one person's exactly if their ids are equal, so nothing is hashed to decide it: two ids that
collided would make two people one, whose removal one by one is not what add-remove bounds. One person under two ids
would be protected as neither; ids that look so (missing, of mixed kinds, equal but for spaces or Unicode form) are
refused. Ids are whole numbers or texts.
"""

from __future__ import annotations

import hmac
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError

Codes = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_NOTHING = ("NoneType", "NAType", "NaTType")  # what pandas and others write where nothing is known
# How a missing id is spelt once a file or a conversion has made it a text: all of them would be one person.
NO_ONE = frozenset(
    ("NA", "N/A", "n/a", "NaN", "nan", "NAN", "None", "none", "null", "NULL", "Null", "NaT", "<NA>", "#N/A", "-nan")
)
_INVISIBLE = ("Cc", "Cf")
_ONE_EACH = "person: must be one id per record, a list or a column."
MISSING = (
    "person: a record has no id, or one that spells a missing value (NA, None, nan, null). Remove such records, or "
    "give each an id of its own."
)
KINDS = (
    "person: ids must be all whole numbers or all texts. Convert others to texts first, so that 1 and '1' are not "
    "two people."
)


def factorize_ids(ids: object, records: int | None = None) -> tuple[Codes, int]:
    """Number people 0, 1, … in the order of their first records: (each record's number, how many there are).

    >>> factorize_ids(["b", "a", "b"])
    (array([0, 1, 0]), 2)
    >>> factorize_ids([1, "1"])
    Traceback (most recent call last):
    quietgrad.core.errors.DataError: person: ids must be all whole numbers or all texts. ...
    """
    cells = _cells(ids)
    if records is not None and len(cells) != records:
        raise DataError("person: must be one id per record; there are more or fewer ids than records.")
    if cells.dtype.kind == "O":
        numbers: dict[Any, int] = {}
        codes = np.fromiter((numbers.setdefault(cell, len(numbers)) for cell in cells), np.int64, len(cells))
        known = list(numbers)
    else:
        values, first, codes = np.unique(cells, return_index=True, return_inverse=True)
        codes = np.argsort(np.argsort(first))[codes]
        known = values.tolist()
    texts = known if isinstance(known[0], str) else []
    if not NO_ONE.isdisjoint(texts):
        raise DataError(MISSING)
    if len({_plain(text) for text in texts}) < len(texts):
        raise DataError(
            "person: some ids differ only in spaces, in how accents are written or in what cannot be seen. If they "
            "are one person's make them equal, else make them differ."
        )
    return codes.astype(np.int64), len(known)


def call_id_function(person: Callable[[int], object], records: int) -> list[Any]:
    """Return the ids that a function of the record's number gives; refuse ids that change on a second call.

    >>> call_id_function(lambda record: record // 2, 3)
    [0, 0, 1]
    """

    def number(value: Any) -> Any:  # a tensor of one number as that number
        return value.item() if getattr(value, "shape", None) == () else value

    try:
        first, again = ([number(person(record)) for record in range(records)] for _ in range(2))
        same = all(bool(a == b) for a, b in zip(first, again, strict=True))
    except Exception as error:  # its message may name a person
        raise DataError(
            f"person: the function failed for a record ({type(error).__name__}). It is called with a record's "
            "number from 0 on and returns the id of a person, a whole number or a text."
        ) from None
    if not same:
        raise DataError(
            "person: the function gave another id for a record when it was asked again. Make it one of the "
            "record's number alone: a person whose id changes from pass to pass would not be protected."
        )
    return first


def kind_of(ids: object) -> str:
    """Return the kind of the ids. All data about the same people must have ids of one kind.

    >>> kind_of([1, 2]), kind_of(["1", "2"])
    ('number', 'text')
    """
    return "text" if isinstance(_cells(ids)[0], str) else "number"


def hashed_ids(ids: object, key: bytes) -> set[bytes]:
    """A keyed hash of each person's id: only a holder of the key can test whether two are equal.

    The kind of the ids is part of it: 1 and "1" are different people here as everywhere. How a number is held is
    not: an id is the same in a list, an array or a column.

    >>> hashed_ids([1, 1], b"k" * 32) == hashed_ids([1.0, 1.0], b"k" * 32) != hashed_ids(["1"], b"k" * 32)
    True
    """
    known = set(_cells(ids).tolist())
    written = (f"text\0{_plain(i)}" if isinstance(i, str) else f"number\0{int(i)}" for i in known)
    return {hmac.digest(key, text.encode(), "sha256") for text in written}


def _plain(value: str | bytes) -> Any:
    """Normalise the spelling of an id: its spaces, its invisible characters and its Unicode form."""
    if isinstance(value, bytes):
        return b" ".join(value.split())
    if not value.isascii():
        value = unicodedata.normalize("NFKC", value)
    if not value.isprintable():
        value = "".join(c for c in value if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
    return " ".join(value.split())


def is_plain_text(value: str | bytes) -> bool:
    """Whether an id is written as no other one that looks like it: a text that is not may be two people's.

    >>> is_plain_text("ann"), is_plain_text(" ann")
    (True, False)
    """
    return bool(_plain(value) == value)


def _cells(ids: Any) -> npt.NDArray[Any]:
    """The ids as one array: of whole numbers, or of texts or long numbers as objects, which numpy would cut."""
    if isinstance(ids, (str, bytes)) or callable(ids):
        raise DataError("person: must be one id per record here, not a name or a function.")
    if isinstance(ids, (set, frozenset, Mapping)):
        raise DataError("person: must be one id per record in the records' order, a list or a column.")
    if isinstance(ids, np.ma.MaskedArray) and np.ma.getmaskarray(ids).any():
        raise DataError(MISSING)
    try:
        if hasattr(ids, "to_numpy"):  # a column of pandas or polars: its own missing values become objects or NaN
            array = np.asarray(ids.to_numpy())
        elif hasattr(ids, "cpu"):  # a tensor
            array = np.asarray(ids.cpu())
        elif isinstance(ids, np.ndarray):
            array = ids
        else:  # numpy would make texts of mixed numbers and texts, and floats of whole numbers with one missing
            array = np.asarray([*ids, None], dtype=object)[:-1]
    except (TypeError, ValueError):
        raise DataError(_ONE_EACH) from None
    if array.ndim != 1:
        raise DataError(_ONE_EACH)
    if not len(array):
        raise DataError("person: there are no ids.")
    if array.dtype.kind == "U":
        array = array.astype(object)
    if array.dtype.kind == "O":
        kinds = {type(cell) for cell in array}
        if any(kind.__name__ in _NOTHING for kind in kinds) or any(cell != cell for cell in array):
            raise DataError(MISSING)
        if all(issubclass(kind, str) for kind in kinds):
            if not all(array):
                raise DataError(MISSING)
            return array
        if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            return array
        if not all(issubclass(kind, (float, np.floating)) for kind in kinds):
            raise DataError(KINDS)
        array = array.astype(np.float64)
    if array.dtype.kind == "f":
        return whole_numbers(array)
    if array.dtype.kind not in "iu":
        raise DataError(KINDS)
    return array


def whole_numbers(array: Array) -> npt.NDArray[np.int64]:
    """Floats that are whole numbers: tables often hold ids so."""
    if np.isnan(array).any():
        raise DataError(MISSING)
    exact = 2.0 ** (np.finfo(array.dtype).nmant + 1)  # whole numbers above it are not distinct
    if not (np.abs(array) < exact).all() or (array != np.floor(array)).any():
        raise DataError("person: ids are fractions or too large to be distinct. Give whole numbers or texts.")
    return array.astype(np.int64)
