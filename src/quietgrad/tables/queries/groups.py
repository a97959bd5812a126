"""Sums by groups: each record is in one group, and adds there 1 to a count and its values to sums.

Values are scaled to [−1, 1] before. A record's contribution is a point of the cube [−1, 1]^d in the block of its
group, so it is bounded in L2 (Gaussian noise) and in the norm of the K-norm mechanism. Contributions are cut to
whole multiples of 2⁻²⁰, towards zero: sums of them are exact in float64 for as many records as a table has, so no
rounding of a sum moves with a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import SurveyData, rows_of
from quietgrad.tables.queries.counts import NothingToFit, TableRecords
from quietgrad.tables.range_queries import check_everyone
from quietgrad.tables.table import Floats

_UNIT = 2.0**-20


@dataclass(frozen=True, eq=False)
class GroupedRows(TableRecords):
    """Each row's group, −1 for none, and its values in [−1, 1]."""

    groups: npt.NDArray[np.int64]
    values: Floats
    sample_weights: Floats | None = None
    """What each record counts, in [0, 1]; ``None`` if all count 1."""

    def __len__(self) -> int:
        return len(self.groups)

    def contents(self) -> Iterator[bytes]:
        """Everything a sum depends on, as bytes."""
        yield self.groups.tobytes()
        yield self.values.tobytes()
        yield b"" if self.sample_weights is None else self.sample_weights.tobytes()

    def fingerprint_parts(self) -> Iterator[bytes | memoryview]:
        """The features, or the values where no features are known."""
        return self.contents() if self.features is None else super().fingerprint_parts()


@dataclass(frozen=True)
class Grouping(NothingToFit):
    """The objective of :class:`GroupSums`: it holds each row's group and values.

    >>> len(Grouping().prepare((np.array([0, 1, 1]), np.zeros((3, 0)))))
    3
    """

    def prepare(self, data: Any) -> GroupedRows:
        """(groups, values) or (groups, values, features of the people)."""
        data, survey = SurveyData.of(data)
        groups, values, *people = data
        groups, values = np.asarray(groups, dtype=np.int64), np.asarray(values, dtype=np.float64)
        if groups.ndim != 1 or values.ndim != 2 or len(values) != len(groups):
            raise DataError("groups and values: must be one group and one row of values per record.")
        return GroupedRows(people[0] if people else None, groups, values, survey)


@dataclass(frozen=True)
class GroupSums:
    """For each of ``groups`` groups the number of its records and the sums of their values, ``width`` numbers in
    all.

    Under add-remove a record moves the sums by (1, x) in one group, x in [−1, 1]^(width − 1). Under replace-one two
    such points are √(2·width) apart in L2 if they are in two groups, and 2√(width − 1) in one, where the counts
    agree. What a person of several records adds is a mean of such points, or less, and the distances of points
    bound those of means.

    >>> GroupSums(5, 3).bound, GroupSums(5, 3).k_norm_bound(3), GroupSums(5, 1, Relation.REPLACE_ONE).bound
    (1.7320508075688772, 1.0, 0.7071067811865476)
    """

    groups: int
    width: int
    relation: Relation = Relation.ADD_REMOVE

    @property
    def bound(self) -> float:
        """C in L2."""
        if self.relation is Relation.ADD_REMOVE:
            return math.sqrt(self.width)
        return max(math.sqrt(self.width / 2.0), math.sqrt(self.width - 1.0))

    def k_norm_bound(self, width: int) -> float:
        """C in the norm that sums the largest number of each group; that of single numbers if ``width`` is 1."""
        if width not in (1, self.width):
            raise ValueError(f"width={width}: a group of this query has {self.width} numbers.")
        return 1.0 if width == self.width else float(self.width)

    def dim(self, records: object) -> int:
        return self.groups * self.width

    def sum_into(self, objective: object, batch: Batch, out: Floats) -> None:
        """out += the sums, group by group; a row of no group counts nowhere, and what is no number is 0."""
        check_everyone(batch, self.relation)
        shared = rows_of(batch)
        rows: GroupedRows = shared.records
        which = slice(None) if shared.indices is None else shared.indices
        groups = rows.groups[which]
        belongs = (groups >= 0) & (groups < self.groups)
        share = np.where(belongs, shared.of(which), 0.0)
        places = np.where(belongs, groups, 0)
        values = np.clip(np.nan_to_num(rows.values[which], nan=0.0, posinf=0.0, neginf=0.0), -1.0, 1.0)
        sums = out.reshape(self.groups, self.width)
        for j in range(self.width):
            number = share if j == 0 else share * values[:, j - 1]
            sums[:, j] += np.bincount(places, np.trunc(number / _UNIT) * _UNIT, self.groups)
