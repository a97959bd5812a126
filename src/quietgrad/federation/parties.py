"""Parties of a federation: their records, names and ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from quietgrad.privacy.budget import Budget

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

    >>> import numpy as np
    >>> Party(np.zeros((3, 2)), np.zeros(3)).size
    3
    """

    X: Any
    y: Any = None
    name: str | None = None
    n_public: int | None = None
    ledger: Ledger | str | Path | None = None
    account: str = "default"
    cap: Budget | None = None
    ids: npt.ArrayLike | None = None

    @property
    def data(self) -> Any:
        """What the objective takes."""
        return self.X if self.y is None else (self.X, self.y)

    @property
    def size(self) -> int:
        """The declared number of records, or the true one."""
        if self.n_public is not None:
            return self.n_public
        return int(self.X.shape[0]) if hasattr(self.X, "shape") else len(self.X)


def names_of(parties: Sequence[Party]) -> tuple[str, ...]:
    """The parties' names, made up where they have none."""
    if not parties:
        raise ValueError("parties: must be at least one Party(X, y).")
    names = tuple(party.name or f"party-{i + 1}" for i, party in enumerate(parties))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"parties: the name {twice[0]!r} is given twice.")
    return names
