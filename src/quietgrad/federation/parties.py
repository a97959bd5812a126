"""Parties of a federation: records, names, ledgers and weights, and ways to split a table among them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quietgrad.data.dataset import split_dirichlet, split_even, split_uneven
from quietgrad.errors import DataError
from quietgrad.objectives.person_ids import factorize_ids, hashed_ids, kind_of
from quietgrad.objectives.privacy_units import RecordsWithIds
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.rng import fresh_key

if TYPE_CHECKING:
    from quietgrad.privacy.ledger import Ledger


@dataclass(frozen=True, eq=False)
class Party:
    """One data holder.

    Args:
        X, y: its records; with ``y=None`` ``X`` is whatever the objective takes.
        name: how it is called in plans, errors and results; ``party-1`` … if left out.
        n_public: its declared number of records. Under add-remove the true number is private: declare one, or the
            length of the data is taken and thereby declared public.
        ledger, account, cap: its own ledger, as in :func:`quietgrad.minimize`.
        ids: whole numbers that name its records across all parties, for sampling by record in tests.
        person: one id per record, of the person it is about; ``n_public`` then counts people. Ids mean the same
            people at every party.
    """

    X: Any
    y: Any = None
    name: str | None = None
    n_public: int | None = None
    ledger: Ledger | str | Path | None = None
    account: str = "default"
    cap: Budget | None = None
    ids: npt.ArrayLike | None = None
    person: Any = None

    @property
    def data(self) -> Any:
        """What the objective takes."""
        return self.X if self.y is None else (self.X, self.y)

    @property
    def held(self) -> Any:
        """The same, with whose each record is, if that is known."""
        return self.data if self.person is None else RecordsWithIds(self.data, self.person)

    @cached_property
    def size(self) -> int:
        """The declared number of records, or people, or the true one."""
        if self.n_public is not None:
            return self.n_public
        rows = int(self.X.shape[0]) if hasattr(self.X, "shape") else len(self.X)
        return rows if self.person is None else factorize_ids(self.person, rows)[1]


def check_people(parties: Sequence[Party], most: int | None) -> bool:
    """Whether the privacy unit is a person; raises if only some parties say so, or one is in too many.

    Who is in several is found by hashes under a key that lives as long as this call. Parties that do not share a
    machine cannot look: there the number is their word.
    """
    whose = [party.person is not None for party in parties]
    if any(whose) and not all(whose):
        raise ValueError("parties: give all of them person=, or none.")
    if any(whose) and most is not None:
        if any(party.ids is not None for party in parties):
            raise ValueError("ids: name records across parties, for tests; leave them out where people are named.")
        if len({kind_of(party.person) for party in parties}) > 1:
            raise DataError("parties: ids of people are of different kinds, so no person would be found twice.")
        key = fresh_key()
        met = Counter(each for party in parties for each in hashed_ids(party.person, key))
        if max(met.values()) > most:
            raise DataError(f"parties: a person is known to more than parties_per_person={most}; declare as many.")
    return any(whose)


def names_of(parties: Sequence[Party]) -> tuple[str, ...]:
    """The parties' names, made up where they have none."""
    if not parties:
        raise ValueError("parties: must be at least one Party(X, y).")
    names = tuple(party.name or f"party-{i + 1}" for i, party in enumerate(parties))
    if len(set(names)) < len(names):
        raise ValueError(f"parties {names}: must have different names.")
    return names


def deal(
    X: Any,
    y: npt.ArrayLike,
    m: int,
    *,
    unevenness: float = 1.0,
    dirichlet: float | None = None,
    seed: int | None = 0,
) -> list[Party]:
    """Split one table among m parties: evenly, with sizes n_max/n_min = ``unevenness``, or with skewed labels.

    Args:
        unevenness: n_max/n_min, sizes between them geometric; 1 is even. (Paper 002's u has two groups of sizes.)
        dirichlet: α of label shares drawn from Dirichlet(α) instead; small α makes the parties' labels differ.
        seed: of the shuffle; ``None`` keeps the order (even and uneven splits only).
    """
    labels = np.asarray(y)
    if dirichlet is not None:
        if unevenness != 1.0 or seed is None:
            raise ValueError("dirichlet: needs a seed, and sizes follow from the labels; leave unevenness out.")
        parts = split_dirichlet(labels, m, dirichlet, seed)
    elif unevenness == 1.0:
        parts = split_even(len(labels), m, seed)
    else:
        parts = split_uneven(len(labels), m, unevenness, seed)
    return [Party(X[part], labels[part], ids=part) for part in parts]


Weights = str | Sequence[float]
"""``"size"`` (n_j/n), ``"equal"`` (1/m), or one number per party."""


def factors(weights: Weights, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """What party j multiplies its sum by, w_j·n/n_j, so that the average of parties has weights w_j.

    >>> factors("size", (30, 10)), factors("equal", (30, 10))
    ((1.0, 1.0), (0.6666666666666666, 2.0))
    """
    m, n = len(sizes), sum(sizes)
    if weights == "size":
        return (1.0,) * m
    given = [1.0] * m if weights == "equal" else [] if isinstance(weights, str) else [float(w) for w in weights]
    if len(given) != m or not all(0.0 <= w < math.inf for w in given) or not sum(given) > 0.0:
        raise ValueError(
            f"weights={weights!r}: must be 'size', 'equal' or {m} numbers ≥ 0, one per party, that do not sum to 0."
        )
    return tuple(w / sum(given) * n / size for w, size in zip(given, sizes, strict=True))
