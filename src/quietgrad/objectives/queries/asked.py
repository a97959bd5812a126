"""What an algorithm asks, declared: the query of each release, and the interval of every number that may vary.

A plan that others approve is made of these. Nothing is found out by trying: a number that is not declared to vary
is fixed, and a vector that is declared to be pinned is fixed in every entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quietgrad.objectives.base import Query


@dataclass(frozen=True)
class Asked:
    """One kind of query of one kind of release.

    Args:
        query: as it may be asked; several for a choice between them. Its numbers and words are fixed, its vectors
            have their lengths.
        between: by field (``"clip"``, ``"whitening.radius"``), the interval in which a number may vary.
        pinned: fields whose vector is fixed too, because it is public before the run.
    """

    query: Query | tuple[Query, ...]
    between: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
