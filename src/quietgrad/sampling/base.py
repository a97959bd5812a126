"""What a sampling scheme is, and how it is written down."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from quietgrad.privacy import events
from quietgrad.privacy.budget import Relation

if TYPE_CHECKING:
    from quietgrad.privacy.correlated import CorrelatedNoise
    from quietgrad.privacy.rng import SecureStream

Indices = npt.NDArray[np.int64]

KINDS: dict[str, type[Sampling]] = {}


class Sampler(Protocol):
    """Draws the batch of each release; what it returns is secret."""

    def batch(self, i: int) -> Indices | None:
        """Return the record positions of release ``i``; ``None`` means all records."""
        ...


class Sampling(ABC):
    """Base of all sampling schemes; a frozen value that can be written as JSON and read back.

    Other rooms ask a scheme by its methods, never for its class: a new scheme is one class here and its sampler.
    """

    kind: ClassVar[str]
    in_turns: ClassVar[bool] = False
    """Whether cohorts of records take turns."""
    counts_exactly: ClassVar[bool] = False
    """Whether batches are drawn of an exact, public number of records."""
    only_central: ClassVar[str] = ""
    """Why parties cannot draw such samples together; empty if they can."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        KINDS[kind] = cls

    @classmethod
    def of(cls, n_public: int, batch_size: int | None, cohorts: int | None) -> Sampling:
        """Return the scheme for batches of about ``batch_size`` of ``n_public`` records, in turns of cohorts."""
        raise TypeError(f"{cls.kind}: is not made from the size of a batch.")

    @abstractmethod
    def event(self, inner: events.Event, steps: int = 1) -> events.Event:
        """Return the event of ``steps`` releases, each ``inner`` on a fresh batch."""

    @abstractmethod
    def expected_batch(self, n_public: int) -> float:
        """Return the public number that sums are divided by."""

    @abstractmethod
    def sampler(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return the sampler over ``n_records`` records that draws from ``stream``."""

    def scanning(self, n_records: int, stream: SecureStream) -> Sampler:
        """Return a sampler over ``n_records`` records that keeps no list of them: for tables beyond memory."""
        return self.sampler(n_records, stream)

    def by_id(self, record_ids: npt.ArrayLike, stream: SecureStream) -> Sampler:
        """Return the sampler over records named by ids; where records draw on their own, it goes by the ids alone.

        With one key any split of such records among several curators then gives the same union.
        """
        return self.sampler(len(np.asarray(record_ids)), stream)

    @abstractmethod
    def describe(self) -> str:
        """Return one line for people."""

    @property
    def fresh(self) -> int:
        """How many records a release uses up, which take part in no other; 0 where all records come back."""
        return 0

    @property
    def pass_size(self) -> int:
        """How many records there are to use up; 0 where all records come back."""
        return 0

    @property
    def probability(self) -> float:
        """The chance with which a record is drawn for a release; 1 if nothing about that is secret."""
        return 1.0

    @property
    def by_place(self) -> bool:
        """Whether how often a record takes part goes by its place among the others."""
        return self.participation(1) is not None

    def check_count(self, count: int) -> None:  # noqa: B027 most schemes serve any number
        """Raise ValueError if there are not records enough for ``count`` releases."""

    def check_whole(self, count: int) -> None:  # noqa: B027 most schemes may stop anywhere
        """Raise ValueError if a run should not end after ``count`` releases, some of them paid for in vain."""

    def sized(self, n: int) -> Sampling:
        """Return the same scheme over ``n`` records."""
        return self

    def local_batches(self, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the fixed batch of each party with ``sizes`` records; ``None`` if all draw by the one rule."""
        return None

    def at_party(self, sizes: tuple[int, ...], party: int) -> Sampling | None:
        """Return what one party draws; ``None`` if its share of a batch is no record."""
        return self

    def known_to(self, parties: int) -> Sampling:
        """Return what draws anything of a person whom so many parties know, each drawing on its own."""
        return self

    def correlated_noise(self, count: int) -> CorrelatedNoise:
        """Return noise correlated over ``count`` releases that suits how often records take part."""
        from quietgrad.privacy.correlated import BufferedToeplitzNoise

        # Where participation is not certain, a slot refuses any: then it is made for one.
        return BufferedToeplitzNoise.made(count, *(self.participation(count) or (1, count)))

    def participation(self, count: int) -> tuple[int, int] | None:
        """Return (k, b) if in ``count`` releases every record takes part at most k times, at least b apart.

        ``None`` if that is drawn, and so never certain.
        """
        return None

    def times(self, count: int) -> int:
        """Return how many of :meth:`event`'s samples ``count`` releases are: as many, unless several share one."""
        return count

    def under(self, relation: Relation) -> Sampling:
        """Return the scheme that gives the same event when neighbours are those of ``relation``."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the scheme as plain JSON values, with its kind under ``"sampling"``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {"sampling": self.kind, **{k: str(v) if isinstance(v, Relation) else v for k, v in fields.items()}}


def from_json(data: dict[str, Any]) -> Sampling:
    """Rebuild a sampling scheme from :meth:`Sampling.to_json`.

    >>> from quietgrad.sampling import Poisson
    >>> from_json(Poisson(0.01).to_json())
    Poisson(rate=0.01)
    """
    try:
        kind = KINDS[data["sampling"]]
        fields = {f.name: data[f.name] for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a sampling scheme: {data!r} ({error!r})") from None
    return kind(**fields)


def batch_of(n_public: int, batch_size: int | None) -> int:
    """Return ``batch_size`` if it can be one of n records."""
    if batch_size is None or not 1 <= batch_size <= n_public:
        raise ValueError(f"batch_size={batch_size}: must be between 1 and n={n_public}.")
    return batch_size


@lru_cache
def proportional_shares(total: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Whole numbers proportional to ``sizes`` that sum to ``total``, by largest remainders, never above a size.

    >>> proportional_shares(10, (70, 20, 10)), proportional_shares(2, (50, 30, 20))
    ((7, 2, 1), (1, 1, 0))
    """
    records = sum(sizes)
    exact = [total * size / records for size in sizes]
    given = [min(int(share), size) for share, size in zip(exact, sizes, strict=True)]
    order = sorted(range(len(sizes)), key=lambda j: given[j] - exact[j])
    for j in order[: total - sum(given)]:
        given[j] += 1
    return tuple(given)


def check_batch(n: int, batch_size: int) -> None:
    """Raise ValueError unless so many of n records can be a batch."""
    check_count("n", n)
    check_count("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size={batch_size}: must be ≤ n={n}.")


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a whole number ≥ 1.")
