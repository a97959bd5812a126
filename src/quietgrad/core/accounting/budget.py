"""Privacy budgets: (ε, δ), the neighbouring relation and the privacy unit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from quietgrad.core.errors import SettingError

_LONGEST_CONDITION = 300  # characters: it stands in one sentence with ε

Json = Mapping[str, Any]
"""A JSON object that was read from a file or a message."""


class _Named(StrEnum):
    """Names that a user may spell."""

    @classmethod
    def parse(cls, value: str) -> Self:
        """Return the one named ``value``."""
        try:
            return cls(value)
        except ValueError:
            choices = " or ".join(repr(str(one)) for one in cls)
            what = "relation" if cls is Relation else "unit"
            raise SettingError(f"{{{what}}}: must be {choices}.", **{what: value}) from None


class Relation(_Named):
    """The neighbouring relation: the pairs of data sets that an output must not distinguish.

    ``add-remove``: one has a record more; the sensitivity of a sum of vectors of norm ≤ C is C.
    ``replace-one``: both have n records and differ in one; the sensitivity is 2C and n is public.
    They are different guarantees: never compare an ε of one with an ε of the other.
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


DEFAULT_RELATION = Relation.ADD_REMOVE.value
"""The default relation of every front end, as in Opacus, DP-EBM and dp-accounting."""


class PrivacyUnit(_Named):
    """The privacy unit: what two neighbouring data sets differ in.

    ``record``: one row of the data. ``person``: a person with all their rows. ``party``: a member of a federation
    with all that it holds; who the members are is public, and a neighbour has the same members, of which one holds
    nothing (add-remove) or other data (replace-one). An ε of one unit says little about another, so one account has
    one unit.
    """

    RECORD = "record"
    PERSON = "person"
    PARTY = "party"

    def in_words(self, text: str) -> str:
        """Return a sentence about records as one about this unit.

        >>> PrivacyUnit.parse("person").in_words("every record, of 3 records")
        'every person, of 3 people'
        """
        if self is PrivacyUnit.RECORD:
            return text
        return re.sub(r"\brecord\b", self.value, re.sub(r"\brecords\b", self.plural, text))

    @property
    def plural(self) -> str:
        """Several of them, in words."""
        return {"record": "records", "person": "people", "party": "parties"}[self.value]


def check_delta(delta: float) -> float:
    """Return ``delta`` if it is a probability strictly between 0 and 1, else raise."""
    if not isinstance(delta, (int, float)) or not 0.0 < delta < 1.0:
        raise SettingError(
            "{delta}: must be strictly between 0 and 1, and at most 1/(100 n). "
            "For pure ε use {algorithm='output-perturbation'} with {mechanism='pure'}: its claim holds with δ = 0.",
            delta=delta,
        )
    return float(delta)


def advised_delta(n: int) -> float:
    """The power of ten at or below 1/(100 n): the largest δ that is advised for n people.

    >>> advised_delta(1000), advised_delta(2000), advised_delta(10_000)
    (1e-05, 1e-06, 1e-06)
    """
    return float(f"1e-{len(str(100 * max(n, 1) - 1))}")


def check_condition(condition: str | None) -> str | None:
    """Return ``condition`` if it is ``None`` or a clause that can stand behind an ε, else raise.

    >>> check_condition("if the loop's own code treats records apart (not checked)")
    "if the loop's own code treats records apart (not checked)"
    """
    if condition is None:
        return None
    fits = isinstance(condition, str) and condition.startswith("if ") and len(condition) <= _LONGEST_CONDITION
    if not fits or not condition.isprintable():
        raise ValueError(
            f"condition={condition!r}: must be None or one line of at most {_LONGEST_CONDITION} characters that "
            "begins with 'if ' and says what ε rests on."
        )
    return condition


@dataclass(frozen=True)
class Budget:
    """A privacy budget: (ε, δ) under a neighbouring relation.

    A run M within it satisfies Pr[M(D) ∈ S] ≤ e^ε · Pr[M(D′) ∈ S] + δ for all neighbours D, D′ and all sets S of
    outcomes. Smaller ε and δ are more private; choose δ ≤ 1/(100 n).

    >>> Budget(epsilon=1.0, delta=1e-5)
    Budget(epsilon=1.0, delta=1e-05, relation=<Relation.ADD_REMOVE: 'add-remove'>)
    >>> Budget(epsilon=-1.0, delta=1e-5)
    Traceback (most recent call last):
    ...
    quietgrad.core.errors.SettingError: epsilon=-1.0: must be > 0 and finite. ...
    """

    epsilon: float
    delta: float
    relation: Relation = Relation.ADD_REMOVE

    def __post_init__(self) -> None:
        e = self.epsilon
        if not isinstance(e, (int, float)) or not 0.0 < e < math.inf:
            raise SettingError(
                "{epsilon}: must be > 0 and finite. For a non-private run pass {budget=None}.", epsilon=e
            )
        object.__setattr__(self, "epsilon", float(e))
        object.__setattr__(self, "delta", check_delta(self.delta))
        object.__setattr__(self, "relation", Relation.parse(self.relation))

    def to_json(self) -> dict[str, Any]:
        """Return the budget as plain JSON values."""
        return {"epsilon": self.epsilon, "delta": self.delta, "relation": str(self.relation)}

    @classmethod
    def from_json(cls, data: Json) -> Budget:
        """Rebuild a budget from :meth:`to_json`."""
        return cls(data["epsilon"], data["delta"], Relation.parse(data["relation"]))
