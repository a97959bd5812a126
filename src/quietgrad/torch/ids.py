"""Ids of the people that a data set's records are about: an array, a tensor, or a function of a record's number."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from quietgrad.errors import DataError
from quietgrad.objectives.people import Combine, OfPeople, OfRecords, People, check_combination

__all__ = ["as_ids", "asked_about", "people_of"]


def as_ids(person: Any, data: Any) -> Any:
    """One id per record of ``data``.

    A function is asked twice for each, since a person whose id changes from pass to pass is several.

    >>> as_ids(lambda i: i // 2, [10, 11, 12])
    [0, 0, 1]
    """
    if isinstance(person, Tensor):
        return person.detach().cpu().numpy()
    if not callable(person):
        return person
    if not hasattr(data, "__len__"):
        raise DataError("person: must be one id per record here, not a function.")
    try:
        asked = [[_plain(person(i)) for i in range(_records(data))] for _ in range(2)]
        same = len(asked[0]) == len(asked[1]) and all(bool(a == b) for a, b in zip(*asked, strict=True))
    except Exception as error:  # whatever it says may name someone
        raise DataError(
            f"person: the function could not be asked for the id of every record ({type(error).__name__}). It is "
            "called with the record's number, 0 to n − 1, and returns a whole number or a text."
        ) from None
    if not same:
        raise DataError(
            "person: the function gave another id for a record when it was asked again, or one that does not equal "
            "itself. A person must have one id; make it a function of the record's number alone."
        )
    return asked[0]


def people_of(person: Any, data: Any, combine: Combine, records_per_person: int | None) -> People | None:
    """Who a data set's records are about; ``None``: each is a person's own."""
    check_combination(combine, records_per_person)
    if person is None:
        if combine != "mean" or records_per_person is not None:
            raise ValueError(
                "combine, records_per_person: say how a person's records count; give person= with them."
            )
        return None
    return People.of(
        as_ids(person, data), combine=combine, records_per_person=records_per_person, records=_records(data)
    )


def asked_about(people: People | None, objective: Any, data: Any) -> tuple[Any, Any]:
    """(objective, data) for a curator: as they are, or asked about people."""
    if people is None:
        return objective, data
    return OfPeople(objective, people.combine, people.records_per_person), OfRecords(data, people)


def _records(data: Any) -> int:
    """How many records (X, y), a data set or prepared examples have."""
    if isinstance(data, TensorDataset):
        return len(data.tensors[0])
    while isinstance(data, tuple | list) and data:
        data = data[0]
    if not hasattr(data, "__len__"):
        raise DataError(
            f"a data set of type {type(data).__name__} has no length, so no sample of known probability can be "
            "drawn from it. Use a map-style data set."
        )
    return len(data)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
