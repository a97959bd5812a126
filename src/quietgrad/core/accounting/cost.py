"""The cost of a run: the event that it releases, and the guarantee under which that event is priced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, PrivacyUnit, Relation, check_condition, check_delta


@dataclass(frozen=True)
class Cost:
    """An event with everything that its ε depends on; the ledger writes it down whole, or not at all.

    Args:
        event: everything that may be released.
        delta: δ at which ε is stated.
        relation: the neighbouring relation.
        unit: the privacy unit. An account has one, since costs of different units do not add up.
        condition: the clause under which ε holds, if it rests on something that is not checked.

    >>> cost = Cost.of(events.Gaussian(2.0), Budget(1.0, 1e-5))
    >>> str(cost.relation), str(cost.unit), cost.condition
    ('add-remove', 'record', None)
    """

    event: events.Event
    delta: float
    relation: Relation
    unit: PrivacyUnit = PrivacyUnit.RECORD
    condition: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.event, events.Event):
            raise TypeError(f"event={self.event!r}: must be an event of quietgrad.core.accounting.events.")
        check_delta(self.delta)
        check_condition(self.condition)

    @classmethod
    def of(
        cls,
        event: events.Event,
        budget: Budget,
        unit: PrivacyUnit = PrivacyUnit.RECORD,
        condition: str | None = None,
    ) -> Cost:
        """The cost of ``event`` at the δ and under the relation of ``budget``, whose ε plays no part."""
        return cls(event, budget.delta, budget.relation, unit, condition)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as a line of the ledger has them."""
        return {
            "event": self.event.to_json(),
            "delta": self.delta,
            "relation": str(self.relation),
            "unit": str(self.unit),
            **({} if self.condition is None else {"condition": self.condition}),
        }

    @classmethod
    def from_json(cls, data: Any) -> Cost:
        """Rebuild it from a line of the ledger; older lines do not say the unit, and were about records."""
        return cls(
            events.from_json(data["event"]),
            check_delta(data["delta"]),
            Relation.parse(data["relation"]),
            PrivacyUnit.parse(data.get("unit", "record")),
            check_condition(data.get("condition")),
        )
