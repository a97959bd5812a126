"""Deliberately broken pieces of private loops, each a defect that was once there; none may pass an audit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralSession
from quietgrad.core.session.queries import GradientQuery
from quietgrad.torch import opacus_arguments
from quietgrad.torch.loops import base as loops
from quietgrad.torch.loops import distributed, handle_loop, private_loop
from quietgrad.torch.loops import wrappers as loop_wrappers
from quietgrad.torch.loops.private_batch import Handle, Sample
from quietgrad.torch.networks.randomness import RecordSeeds

Patch = pytest.MonkeyPatch


def samples_serve_again(patch: Patch) -> None:
    """A sample stays in hand after its step."""
    write = handle_loop.HandleLoop.write_gradients

    def kept(self: Any) -> bool:
        sample, drawn = self.sample, self._drawn
        written = write(self)
        self._session._begun.add(drawn)
        self._drawn, self.sample = drawn, sample
        return written

    patch.setattr(handle_loop.HandleLoop, "write_gradients", kept)


def old_batches_accepted(patch: Patch) -> None:
    """Rows of any sample are those of the last."""
    patch.setattr(Sample, "refuse_others", lambda self, tensors: None)


def two_iterators(patch: Patch) -> None:
    """Iterators do not know of each other."""

    def pieces(self: Any, most: Any) -> Iterator[Any]:
        for _ in range(len(self)):
            yield from self.loop.batches(most)

    patch.setattr(loop_wrappers.PrivateLoader, "pieces", pieces)


def opaque_batches_serve_again(patch: Patch) -> None:
    """A batch does not know that it was stepped on."""

    def backward(self: Any, batch: Any) -> None:
        self._session._begun.add(batch._drawn)
        self.release(batch._drawn, GradientQuery(self.engine.flatten(self.parameters()), self.clip))

    patch.setattr(private_loop.PrivateLoop, "backward", backward)


def looks_are_free(patch: Patch) -> None:
    """What the loop's own code reads leaves ε as it was."""
    patch.setattr(handle_loop.HandleLoop, "rest_on_code", lambda self: None)


def sizes_are_free(patch: Patch) -> None:
    """How large a sample is may be asked."""
    answer = Handle._answer

    def told(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(func, "__name__", "") == "__len__":
            return len(self._sample)
        return answer(self, func, args, kwargs)

    patch.setattr(Handle, "_answer", told)


def ledgers_are_not_told(patch: Patch) -> None:
    """The loop knows that its ε is conditional, and its ledger does not."""
    patch.setattr(Ledger, "set_condition", lambda self, reservation_id, condition: None)


def last_loop_only(patch: Patch) -> None:
    """An engine forgets its earlier loops."""
    patch.setattr(opacus_arguments, "epsilon_of", lambda loops, delta: loops_epsilon(loops[-1:], delta))


loops_epsilon = loops.epsilon_of


def stepped_samples_only(patch: Patch) -> None:
    """Samples that were seen and not stepped on are not charged."""
    patch.setattr(loops.Loop, "used", property(lambda self: max(0, self.handed_out - 1)))


def stops_are_public(patch: Patch) -> None:
    """A loop that ends early pays for what it had, whatever ended it."""
    close = loops.Loop.close
    patch.setattr(loops.Loop, "close", lambda self, *, data_dependent=True: close(self, data_dependent=False))


def seeded_says_nothing(patch: Patch) -> None:
    """A loop whose noise can be subtracted says what it would have cost."""
    init = loops.Loop.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_private = True

    patch.setattr(loops.Loop, "__init__", silent)


def records_drawn(patch: Patch) -> None:
    """A loop's samples are of records, whoever they are about."""

    def sample(self: Any, drawn: Any) -> Sample:
        _, indices, key = self._session.batch(drawn)
        return Sample(self, RecordSeeds.of(key, indices * 3), None)

    patch.setattr(handle_loop.HandleLoop, "_sample", sample)


def processes_by_settings(patch: Patch) -> None:
    """Processes compare models and settings by name, and how many records there are."""
    patch.setattr(distributed, "_digests", lambda objective, records, key: {repr(objective): str(len(records))})


def both_ranks_add_noise(patch: Patch) -> None:
    """Every process adds the noise of a release to its share."""

    def answer(self: Any, drawn: Any, query: Any, total: Any) -> Any:
        share = distributed._SumOfShares(total / dist.get_world_size(), query)
        noisy = torch.as_tensor(CentralSession.release_drawn(self, drawn, share)).double()
        dist.all_reduce(noisy)
        return noisy.float()

    patch.setattr(distributed.SharedSession, "_leaders_answer", answer)


def no_rank_adds_noise(patch: Patch) -> None:
    """Every process takes it that another one adds the noise."""

    def answer(self: Any, drawn: Any, query: Any, total: Any) -> Any:
        self.forget(drawn)
        return total.float()

    patch.setattr(distributed.SharedSession, "_leaders_answer", answer)


def old_samples_in_new_epochs(patch: Patch) -> None:
    """A sum that is charged anew is that of the sample which was released before."""

    def sum_into(self: Any, objective: object, batch: object, out: Any) -> None:
        out = torch.as_tensor(out)
        out += self._total

    patch.setattr(distributed._SumOfShares, "sum_into", sum_into)


def first_stretch_alone_is_charged(patch: Patch) -> None:
    """A loop states what its first stretch costs, whatever the others have for noise."""
    patch.setattr(Plan, "first", lambda self, count: {self.schedule.slots[0].name: count})


def stretches_have_least_noise(patch: Patch) -> None:
    """All stretches have the noise of the quietest one, and are priced as planned."""
    init = CentralSession.__init__

    def quiet(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._multipliers = dict.fromkeys(self._multipliers, min(self._multipliers.values()))

    patch.setattr(CentralSession, "__init__", quiet)


def noise_of_the_first_bound(patch: Patch) -> None:
    """C grows by its schedule, and the noise stays that of the first C."""
    patch.setattr(loops.Loop, "rule_of", lambda self, drawn: _loose(self._clip_at(0)))


def _loose(clip: float) -> ClippingRule:
    return ClippingRule.gradient(clip)
