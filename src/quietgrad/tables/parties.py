"""Party-level privacy: each member of a federation is one unit, with all that it holds.

:class:`PartyLevelObjective` asks a loss about parties, as
:class:`~quietgrad.tables.privacy_units.UserLevelObjective` asks it about people. A party that holds its own data is
one unit; a curator or a simulation holds many, told apart by an id per record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from quietgrad.core.accounting.budget import PrivacyUnit
from quietgrad.tables.privacy_units import RecordsWithIds, UnitGrouping, UserLevelObjective, UserLevelRecords


@dataclass(frozen=True)
class PartyLevelObjective(UserLevelObjective):
    """A loss asked about parties.

    >>> from quietgrad.objectives import Logistic
    >>> asked, data = PartyLevelObjective(Logistic()), ([[1.0], [2.0], [3.0]], [0, 1, 1])
    >>> len(asked.prepare(data)), len(asked.prepare(RecordsWithIds(data, ["a", "b", "a"])))
    (1, 2)
    """

    unit: ClassVar[PrivacyUnit] = PrivacyUnit.PARTY

    @property
    def silent_batches(self) -> bool:
        """Never: a party draws the order of its records from the secret of the release."""
        return False

    def prepare(self, data: object) -> UserLevelRecords:
        """Lay out the rows of several parties by their ids, or of one party that gives none."""
        if isinstance(data, RecordsWithIds | UserLevelRecords):
            return super().prepare(data)
        rows = self.loss.prepare(data)
        order = np.arange(len(rows), dtype=np.int64)
        return UserLevelRecords(rows, UnitGrouping(order, np.array([0, len(rows)], np.int64)))

    def initial(self, records: Any) -> Any:
        """The loss's own start; a public shape stands in for records where there are none."""
        return self.loss.initial(records.rows if isinstance(records, UserLevelRecords) else records)
