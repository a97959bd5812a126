"""Curators and sessions: the only way in which a number that depends on data leaves the data holder.

A curator holds the data. It opens a *session* for a plan after it has reserved the plan's whole cost in the ledger.
The session answers the releases of that plan until their counts are used up, and refuses all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from quietgrad.core.accounting.events import Event
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.objectives import Regularizer
from quietgrad.core.session.queries import Query
from quietgrad.core.vectors import OwnVector


@dataclass(frozen=True)
class SessionCost:
    """The releases of a closed session, and the reason why it stopped.

    ``event`` is what must be accounted: the whole plan when the stop could depend on the data.
    """

    event: Event | None
    releases: dict[str, int]
    reason: str
    data_dependent: bool


def offsets_above_minimum(offsets: Sequence[float] | None, count: int) -> npt.NDArray[np.float64]:
    """Public offsets of ``count`` scores above the least of them: a choice depends on no more.

    A large common part would swallow the scores' last digits, and what rounding then makes of one record is not
    bounded by the loss's bound; a large difference does no harm, since such a candidate is not chosen anyway.

    >>> offsets_above_minimum([1e18, 1e18 + 512.0], 2).tolist(), offsets_above_minimum(None, 2).tolist()
    ([0.0, 512.0], [0.0, 0.0])
    """
    if offsets is None:
        return np.zeros(count)
    public = np.asarray(offsets, np.float64)
    finite = public[np.isfinite(public)]
    return public - finite.min() if finite.size else np.zeros(count)


class Session(Protocol):
    """A session that answers the releases of one plan and refuses all others."""

    plan: Plan
    objective: Any
    """The public description of the loss; it holds no data."""
    regularizer: Regularizer
    rho_left: float
    """What is left of a zCDP filter; infinite in a run without noise."""

    @property
    def run(self) -> str:
        """The run's name, under which the ledger has what it costs."""
        ...

    @property
    def seeded(self) -> bool:
        """Whether its randomness was fixed for a test: then nothing is private."""
        ...

    @property
    def epochs(self) -> int:
        """How often the plan was charged: more than once if a resumed run asked something else than before."""
        ...

    @property
    def charged(self) -> tuple[str, ...]:
        """Notes on how the run was charged, which its statement must carry."""
        ...

    @property
    def used(self) -> dict[str, int]:
        """Releases made so far, by slot."""
        ...

    def expected_batch(self, slot: str) -> float:
        """The public number that averages of this slot divide by: q·n_public, the batch size, or n_public."""
        ...

    def uniform(self, label: str) -> float:
        """A uniform number in [0, 1), independent of the data: random rounds are drawn with it."""
        ...

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> OwnVector:
        """The noisy sum of ``query`` over a fresh sample of ``slot``; refuses beyond the planned count.

        ``rho`` is given exactly in a plan with a zCDP filter: the release then spends that much of it.
        """
        ...

    def choose(
        self, slot: str, queries: Sequence[Query], *, rho: float, offsets: Sequence[float] | None = None
    ) -> int:
        """The position of the least sum among scalar ``queries``, by a noisy choice that spends ``rho``.

        ``offsets`` are public numbers, one per query, that are added to the sums before they are compared: the
        part of a score that no record has a share in, such as n·r(θ) of a regulariser. They move no sensitivity.
        """
        ...

    def first_below(self, slot: str, queries: Sequence[Query], threshold: float) -> int | None:
        """The position of the first scalar query whose sum is, noisily, at most ``threshold``; ``None`` if none is.

        However many are asked, all of it is one release.
        """
        ...

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        """End the session; only a stop that does not depend on data gives unused budget back."""
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A session that reads its table anew for every release, and once for several if it knows of them."""

    def foresee(self, *queries: Query) -> None:
        """Announce the queries of the next releases; nothing is released by it."""
        ...


class Curator(Protocol):
    """The holder of the data."""

    def open(self, plan: Plan) -> Session:
        """Reserve the whole cost of ``plan``, durably, and return the session."""
        ...

    def initial(self) -> Any:
        """The starting point, which depends on no record."""
        ...
