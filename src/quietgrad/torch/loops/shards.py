"""Data that lie in shards: each process of a loop holds its own records, and no record lies on two.

The numbers of records of the shards are public. Records are numbered shard after shard, one sample is drawn over
all of
them, and each process sums those of the sample that it holds: a record is in the sum of one process.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.distributed as dist

from quietgrad.core.session.curator import CentralSession
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.loops.distributed import SharedCurator, SharedSession, while_all_are_there
from quietgrad.torch.networks.records import Examples


@dataclass(frozen=True)
class Shard:
    """The records of this process among those of all."""

    own: Examples
    first: int
    total: int
    digests: tuple[bytes, ...]  # of all shards

    @staticmethod
    def of(own: Examples) -> Shard:
        """This process's shard; all processes call it."""
        digest = hashlib.sha256()
        for part in own.fingerprint_parts():
            digest.update(part)
        answers: list[Any] = [None] * dist.get_world_size()
        with while_all_are_there():
            dist.all_gather_object(answers, (len(own), digest.digest()))
        sizes = [size for size, _ in answers]
        return Shard(own, sum(sizes[: dist.get_rank()]), sum(sizes), tuple(known for _, known in answers))

    @property
    def dim(self) -> int:
        """Number of trained parameters."""
        return self.own.dim

    def __len__(self) -> int:
        return self.total

    def share_of(self, batch: Batch) -> Batch:
        """The records of a batch that are held here, by their places here.

        Two records of different shards may have the same place, so each shard has a secret of its own.
        """
        everyone = np.arange(self.total) if batch.indices is None else batch.indices
        mine = everyone[(everyone >= self.first) & (everyone < self.first + len(self.own))] - self.first
        secret = None
        if batch.key is not None:
            secret = hmac.new(batch.key, f"shard {self.first}".encode(), hashlib.sha256).digest()
        return Batch(self.own, mine, secret)

    def contents(self) -> Iterator[bytes | memoryview]:
        """The digests of all shards: every process yields the same."""
        yield from self.digests

    fingerprint_parts = contents


class ShardedSession(SharedSession):
    """The session of a loop whose processes hold different records."""

    def share(self, batch: Batch) -> Batch:
        """The part of a batch that is held here."""
        shard: Any = self._records
        held: Batch = shard.share_of(batch)
        return held


class ShardedCurator(SharedCurator):
    """Holds the records of this process, and knows how many the others hold."""

    session: ClassVar[type[CentralSession]] = ShardedSession

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.records = Shard.of(self.records)  # type: ignore[arg-type]
