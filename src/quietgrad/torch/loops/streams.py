"""Data sets that can only be read in order, made ready for secret samples."""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError


class RecordList(Dataset[Any]):
    """Records in memory, by position."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, place: int) -> Any:
        return self._records[place]


def read_stream(data: Any, n_public: int | None, relation: str | Relation) -> Any:
    """The data set itself, or the records of an ``IterableDataset``, read once into memory.

    A secret sample may be any of the records, so all of them must be at hand. Under add-remove the stream is read
    to its end: cut after ``n_public`` records, it would give up one more record whenever an earlier one leaves, and
    two records would change. Under replace-one a record that is replaced moves no other, so ``n_public`` cuts.

    >>> class Numbers(IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(10))
    >>> len(read_stream(Numbers(), 4, "add-remove")), len(read_stream(Numbers(), 4, "replace-one"))
    (10, 4)
    """
    if not isinstance(data, IterableDataset):
        return data
    if n_public is None and not isinstance(data, Sized):
        raise DataError(
            f"a data set of type {type(data).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Say its public length (n_public=), give it __len__, or use a map-style data set. It is "
            "read to its end; only under relation='replace-one' is one without end cut, after n_public records."
        )
    cut = n_public if Relation.parse(relation) is Relation.REPLACE_ONE else None
    records = list(islice(iter(data), cut))
    if not records:
        raise DataError(f"the data set of type {type(data).__name__} gave no record: there is nothing to train on.")
    return RecordList(records)
