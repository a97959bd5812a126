"""Data sets that can only be read in order, made ready for secret samples."""

from __future__ import annotations

from collections.abc import Sized
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from quietgrad.core.errors import DataError


class RecordList(Dataset[Any]):
    """Records in memory, by position."""

    def __init__(self, records: list[Any]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, place: int) -> Any:
        return self._records[place]


def read_stream(data: Any, n_public: int | None) -> Any:
    """The data set itself, or the records of an ``IterableDataset`` of public length, read once into memory.

    A secret sample may be any of the records, so all of them must be at hand.

    >>> class Numbers(IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(10))
    >>> read_stream(Numbers(), 4)[3]
    3
    """
    if not isinstance(data, IterableDataset):
        return data
    length = n_public
    if length is None and isinstance(data, Sized):
        length = len(data)
    if length is None:
        raise DataError(
            f"a data set of type {type(data).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Say its public length (n_public=), give it __len__, or use a map-style data set."
        )
    records = list(islice(iter(data), length))
    if not records:
        raise DataError(f"the data set of type {type(data).__name__} gave no record: there is nothing to train on.")
    return RecordList(records)
