"""Many clients in one process: parties as the privacy unit, trained together by one trusted curator.

With a trusted curator a federation of clients is one session that holds them all: the plan, the samples, the noise,
the ledger and the transcript are those of one table whose privacy unit is a party. No message is made, so 10⁵
clients are simulated, some at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from quietgrad.core.errors import DataError
from quietgrad.core.session.objectives import Objective
from quietgrad.federation.planning import ADVERSARIES, Party
from quietgrad.methods.base import Algorithm
from quietgrad.methods.minimizing import minimize
from quietgrad.methods.result import Result
from quietgrad.tables.privacy_units import UnitGrouping
from quietgrad.tables.table import rows_in


@dataclass(frozen=True, eq=False)
class Clients(Sequence[Party]):
    """The clients of one table, as a sequence of parties that copies nothing.

    An id per record says whose it is.

    Args:
        X, y: all records, as in :class:`~quietgrad.federation.planning.Party`.
        party: one id per record, of the client that holds it.

    >>> clients = Clients(np.arange(6.0)[:, None], np.zeros(6), party=["a", "b", "a", "b", "b", "a"])
    >>> len(clients), clients[1].X.ravel()
    (2, array([1., 3., 4.]))
    """

    X: Any
    y: Any
    party: Any

    @cached_property
    def _groups(self) -> UnitGrouping:
        return UnitGrouping.of(self.party, records=rows_in(self.X))

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, place: int) -> Party: ...
    @overload
    def __getitem__(self, place: slice) -> list[Party]: ...
    def __getitem__(self, place: int | slice) -> Party | list[Party]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        rows = self._groups.order[self._groups.starts[place] : self._groups.starts[place + 1]]
        return Party(self.X[rows], self.y[rows], name=f"client-{place + 1}")


def together(parties: Sequence[Party]) -> tuple[Any, Any]:
    """(data, ids) of all parties' records as one table, in the order of the parties."""
    if isinstance(parties, Clients):
        return (parties.X, parties.y), parties.party
    sizes = [rows_in(party.X) for party in parties]
    if any((party.y is None) != (parties[0].y is None) for party in parties):
        raise DataError("parties: give all of them y=, or none.")
    X = _stacked([party.X for party in parties])
    ids = np.repeat(np.arange(len(parties)), sizes)
    return (X, _stacked([party.y for party in parties])), ids


def _stacked(parts: list[Any]) -> Any:
    first = parts[0]
    if type(first).__module__.partition(".")[0] == "torch":
        import torch

        return torch.cat(parts)
    if hasattr(first, "tocsr"):
        from scipy import sparse

        return sparse.vstack(parts, format="csr")
    return np.concatenate([np.asarray(part) for part in parts])


def fits_one_curator(algorithm: Algorithm, parties: Sequence[Party], **settings: Any) -> bool:
    """Whether a simulation needs no messages: parties are the unit, the curator is trusted, none keeps a ledger."""
    plain = settings["trust"] == "curator" and not any(settings[name] for name in ("folder", "transport", "spare"))
    if not algorithm.by_party or not plain or settings["quorum"] not in (None, len(parties)):
        return False
    return isinstance(parties, Clients) or all(
        party.ledger is None and party.cap is None and party.y is not None for party in parties
    )


def simulate_together(
    algorithm: Algorithm, objective: Objective, parties: Sequence[Party], **settings: Any
) -> Result:
    """Train on all parties' records through one session; ``settings`` are those of :func:`quietgrad.minimize`."""
    if any(party.person is not None for party in ([] if isinstance(parties, Clients) else parties)):
        raise ValueError(f"{algorithm.name}: its privacy unit is a party; leave out person=.")
    data, ids = together(parties)
    result = minimize(objective, data, algorithm, party=ids, **settings)
    details = {**result.details, "trust": "curator", "secure": None, "n_parties": len(parties)}
    notes = ("the coordinator is a trusted curator: it sees each party's exact sums", *result.privacy.notes)
    if not result.privacy.is_private and result.privacy.notes:  # the reason stands first
        notes = (*result.privacy.notes, notes[0])
    adversary = ADVERSARIES["curator"] if result.privacy.epsilon is not None else result.privacy.adversary
    return replace(result, privacy=replace(result.privacy, adversary=adversary, notes=notes), details=details)
