"""The releases of a training loop that the user writes: a plan for it, without an update of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Schedule, Slot
from quietgrad.core.sampling import CyclicCohorts, FullBatch, Poisson, RandomAllocation, Sampling, SinglePass

LoopSampling = Literal["poisson", "random-allocation", "turns", "single-pass"]


@dataclass(frozen=True)
class LoopReleases(HasSchedule):
    """The releases of a loop: for each stretch of equal settings its batches, expected batch size and noise.

    A "method" for :func:`quietgrad.plan`, whose update the user writes. ``condition`` says what ε rests on
    where the loop's code is not checked; it is one of the settings, so a certificate without it
    contradicts its plan.

    >>> LoopReleases(((300, 64, 1.0), (100, 64, 0.5)), clip=1.0).schedule(1000).releases
    400
    """

    stretches: tuple[tuple[int, int, float], ...]
    clip: float | Mapping[str, Any]
    sampling: LoopSampling = "poisson"
    """How batches are drawn. Under ``"turns"`` every record is in one batch an epoch, without amplification."""
    condition: str | None = None
    relation: Relation | None = None
    """Of a loop without a budget, which a plan would take it from: how places in a sample are drawn."""

    name: ClassVar[str] = "own-loop"
    private: ClassVar[bool] = True
    whole_epochs: ClassVar[bool] = False  # it may go on after an interruption, or have no planned end

    def schedule(self, n_public: int) -> Schedule:
        """One slot per stretch."""
        slots = []
        if self.sampling == "single-pass":  # of all stretches together: no record is drawn twice
            size = self.stretches[0][1]
            SinglePass(n_public, size).check_count(sum(count for count, _, _ in self.stretches))
        for k, (count, batch_size, noise) in enumerate(self.stretches):
            sampling = self._sampling(batch_size, n_public)
            slots.append(Slot(f"stretch-{k}", sampling, count, noise))
        schedule = Schedule(tuple(slots))
        return schedule if self.relation is None else schedule.under(self.relation)

    def _sampling(self, batch_size: int, n_public: int) -> Sampling:
        if self.sampling == "poisson":
            return Poisson(batch_size / n_public)
        if self.sampling == "single-pass":
            return SinglePass(n_public, batch_size)
        batches = -(-n_public // batch_size)
        if self.sampling == "random-allocation":
            return RandomAllocation(batches)
        return CyclicCohorts(batches) if batches > 1 else FullBatch()

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        clip = {"clip": self.clip} if isinstance(self.clip, float | int) else dict(self.clip)
        settings = {"stretches": [list(stretch) for stretch in self.stretches], "sampling": self.sampling}
        return {**settings, **({} if self.condition is None else {"condition": self.condition}), **clip}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LoopReleases:
        """Rebuild the loop's releases from :meth:`config`.

        >>> loop = LoopReleases(((300, 64, 1.0),), clip=1.0, condition="if its code treats records apart")
        >>> LoopReleases.from_config(loop.config()).condition == loop.condition
        True
        """
        clip = {key: value for key, value in config.items() if key not in ("stretches", "sampling", "condition")}
        stretches = tuple((int(count), int(batch), float(noise)) for count, batch, noise in config["stretches"])
        return cls(stretches, clip, config["sampling"], config.get("condition"))
