"""Samples and noise of one slot, made in blocks from a cryptographic stream.

They are addressed by (slot, number of the release), so that a resumed run replays exactly what an undisturbed one
draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quietgrad.curators.units import UnitNoise
from quietgrad.plans.schedule import Slot
from quietgrad.privacy.noise import sigma_for
from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling import SinglePass

if TYPE_CHECKING:
    from quietgrad.sampling.samplers import SlotSampler


class SlotSource:
    """Samples and noise of one slot, by number of the release.

    Args:
        slot: the kind of release.
        multiplier: its noise multiplier, 0 in a run without noise.
        n_records: how many records there are.
        n_public: how many there are said to be.
        key: of the session.
        fresh: the one store of unused records that all single-pass slots of a plan take from.
    """

    def __init__(
        self,
        slot: Slot,
        multiplier: float,
        n_records: int,
        n_public: int,
        key: bytes,
        fresh: SlotSampler | None,
    ) -> None:
        self.slot = slot
        self.used = 0
        self.is_search = slot.mechanism == "threshold"
        self.expected_batch = slot.sampling.expected_batch(n_public)
        self.multiplier = multiplier
        self._fresh = None
        self._share = 0  # fresh records per release
        if fresh is not None and isinstance(slot.sampling, SinglePass):
            self._fresh, self._share = fresh, slot.sampling.batch_size
        else:
            self._sampler = slot.sampling.sampler(n_records, SecureStream(key, f"sample/{slot.name}"))
        self.units = UnitNoise(key, f"unit/{slot.name}", slot.count)
        self.stream = SecureStream(key, f"noise/{slot.name}")
        self.choices = SecureStream(key, f"choice/{slot.name}")
        self._scaled: tuple[float, float, int] | None = None  # what the scale below is for
        self._scale = (0.0, 0.0)

    def batch(self) -> npt.NDArray[np.int64] | None:
        """The records of the next release; an :class:`ExhaustedError` if there are no fresh ones left."""
        if self._fresh is None:
            return self._sampler.batch(self.used)
        return self._fresh.take(self._share)

    @property
    def taken(self) -> int:
        """Fresh records that the releases so far have used up."""
        return self.used * self._share

    def scale(self, multiplier: float, bound: float, dim: int) -> tuple[float, float]:
        """:func:`~quietgrad.privacy.noise.sigma_for`, remembered: a slot mostly asks for the same again."""
        asked = (multiplier, bound, dim)
        if asked != self._scaled:
            self._scale = sigma_for(multiplier, bound, dim)
            self._scaled = asked
        return self._scale
