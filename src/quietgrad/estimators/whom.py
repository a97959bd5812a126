"""Whom a fit is about: its rows, or people with several rows each."""

from __future__ import annotations

from typing import Any, NamedTuple

from quietgrad.algorithms.base import Algorithm
from quietgrad.errors import DataError
from quietgrad.estimators.scans import is_scan
from quietgrad.objectives.privacy_units import (
    Combine,
    RecordsWithIds,
    UnitGrouping,
    UserLevelObjective,
    check_combination,
)
from quietgrad.objectives.tables.scanned import ScannedPeople
from quietgrad.privacy.budget import PrivacyUnit
from quietgrad.training.minimizing import check_people, how_people_count


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
        """n."""
        return rows if self.people is None else len(self.people)

    def asks(self, loss: Any) -> Any:
        """The loss as a curator must be asked about it."""
        if self.people is None:
            return loss
        return UserLevelObjective(loss, self.people.combine, self.people.records_per_person)

    def of_data(self, data: Any) -> Any:
        """Data to go with it."""
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
        """What a statement says of it."""
        return () if self.people is None else how_people_count(self.asks(None))


def named(X: Any, person: Any) -> tuple[Any, Any]:
    """(X, ids): a ``person`` that names a column of a data frame is taken out of the features.

    >>> import pandas
    >>> X, ids = named(pandas.DataFrame({"patient": [7, 7], "age": [40, 41]}), "patient")
    >>> list(X.columns), ids.tolist()
    (['age'], [7, 7])
    """
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
