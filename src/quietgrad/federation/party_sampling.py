"""Which of its records a party lets take part in a round: its own secret samples, at the plan's public rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.federation.plan import FederatedPlan
from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling import CyclicCohorts, FixedSize, Poisson, SinglePass

Draw = Callable[[int], npt.NDArray[np.int64] | None]
"""Record positions of draw i of a slot; ``None`` means all records."""


def samplers(
    plan: FederatedPlan,
    party: int,
    key: bytes,
    n_records: int,
    ids: npt.NDArray[Any] | None,
    drawn: Callable[[str], int],
) -> dict[str, Draw]:
    """The sampler of every slot for one party.

    Args:
        key: secret; with ``ids`` all parties share it and sample by record, as one curator of all records would.
        drawn: how often each slot was drawn already, if the party restarted.
    """
    owner = f"/{plan.names[party]}" if ids is None else ""
    found: dict[str, Draw] = {}
    fresh = None
    for slot in plan.schedule.slots:
        sampling, stream = slot.sampling, SecureStream(key, f"sample/{slot.name}{owner}")
        if isinstance(sampling, SinglePass):
            if fresh is None:
                names = np.arange(n_records) if ids is None else ids
                fresh = _FreshRecords(names, sampling.n, SecureStream(key, f"sample/fresh{owner}"))
            fresh.skip(sampling.batch_size * drawn(slot.name))
            found[slot.name] = fresh.taking(sampling.batch_size)
        elif isinstance(sampling, FixedSize):
            batch = plan.batch_sizes(sampling.batch_size)[party]
            found[slot.name] = FixedSize(n_records, batch).sampler(n_records, stream).batch if batch else _nobody
        elif isinstance(sampling, CyclicCohorts) and ids is not None:
            found[slot.name] = sampling.by_id(ids, stream).batch
        elif isinstance(sampling, Poisson) and ids is not None:
            found[slot.name] = sampling.keyed_sampler(ids, stream).batch
        else:
            found[slot.name] = sampling.sampler(n_records, stream).batch
    return found


class _FreshRecords:
    """Records that are used once: each has a secret slot of n, drawn on its own by a keyed hash of its id.

    The same under both relations: a replaced record keeps its id, hence its slot.
    """

    def __init__(self, ids: npt.NDArray[Any], n: int, stream: SecureStream) -> None:
        from quietgrad.sampling.samplers import SlotSampler, hashed_slots

        self._sampler = SlotSampler(hashed_slots(ids, n, stream), n)

    def taking(self, count: int) -> Draw:
        return lambda draw: self._sampler.take(count)

    def skip(self, count: int) -> None:
        self._sampler.skip_to(self._sampler.position + count)


def _nobody(draw: int) -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)
