"""Deliberately broken pieces of the PyTorch rooms, each a defect that was once there; none may pass an audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from quietgrad.objectives.networks import checks, choosing, collector, engine, examples, module, tape
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.people import People, PeopleRecords
from quietgrad.privacy.rng import SecureStream
from quietgrad.torch import distributed, history, opacus_verbs, own_loop, poisson_loader, private_module
from quietgrad.torch.rows import Owners, Rows

Patch = pytest.MonkeyPatch


def public_masks(patch: Patch) -> None:
    """Masks by place in the batch, from a key that everyone knows: one record more moves all later ones."""

    def by_place(self: Any) -> Any:
        return SecureStream(bytes(32), "records").at(0, np.arange(len(self.indices)))

    patch.setattr(RecordKeys, "draws", property(by_place))


def redrawn_masks(patch: Patch) -> None:
    """The second summation, after an overflow, draws new masks for everyone."""

    def rows(self: Any, where: Any) -> RecordKeys:
        chosen = self.indices[where]
        return RecordKeys(self.key, chosen + 1000 if len(chosen) < len(self.indices) else chosen)

    patch.setattr(RecordKeys, "rows", rows)


def other_masks_every_time(patch: Patch) -> None:
    """Every pass of a release draws from a fresh secret: a replay differs, and a difference is of two models."""
    draws: Any = RecordKeys.__dict__["draws"].func

    def fresh(self: Any) -> Any:
        if self.key == bytes(32):  # where the module is tried out
            return draws(self)
        return np.random.default_rng().integers(0, 2**63, len(self.indices)).astype(np.uint64)

    patch.setattr(RecordKeys, "draws", property(fresh))


def public_augmentation(patch: Patch) -> None:
    """Records are read with whatever the generators hold: what one draws moves all later ones."""

    def read(data: Any, index: int, word: int) -> Any:
        return data[index]

    patch.setattr(examples, "read_record", read)
    patch.setattr(examples, "refuse_own_generators", lambda data: None)


def float32_sums(patch: Patch) -> None:
    """Passes are added up in float32."""

    class Narrow(module.CompensatedSum):
        def __init__(self, out: Any) -> None:
            self._out, self._low, self._begun = out, None, True
            self._high = torch.zeros_like(out, dtype=torch.float32)

        @contextmanager
        def term(self) -> Iterator[Any]:
            part = torch.zeros_like(self._out)
            yield part
            self.add(part)

        def add(self, term: Any) -> None:
            self._high += term.float()

    patch.setattr(module, "CompensatedSum", Narrow)


def counted_twice(patch: Patch) -> None:
    """A parameter that is used several times counts twice each time, and nothing is compared with autograd."""

    def put(self: Any, slot: slice, piece: Any) -> None:
        self.pieces += [(slot, piece)] * min(2, self.uses[slot.start])

    patch.setattr(collector.Collector, "_put", put)
    patch.setattr(choosing, "differing", lambda *_: [])


def checkpoints_at_the_start(patch: Patch) -> None:
    """The module has other parameters during the forward pass only: a checkpoint runs again at the old ones."""

    def backward(self: Any, results: Any, grads: Any) -> None:
        old = {name: param.detach() for name, param in self._module.named_parameters()}
        hooks = tape.hooked(self._units, None, self._tape.leave)
        with torch.enable_grad(), hooks, tape.with_parameters(self._module, old):
            self._tape.backward(results, grads)

    made = tape.Recording.__init__

    def begin(self: Any, *args: Any, at_once: Any = None) -> None:
        made(self, *args)
        if at_once is not None:
            backward(self, [self.result], [at_once(self.result)])

    patch.setattr(tape.Recording, "__init__", begin)
    patch.setattr(tape.Recording, "backward", backward)
    patch.setattr(choosing, "differing", lambda *_: [])


def mixing_accepted(patch: Patch) -> None:
    """Compared in evaluation mode, where batch statistics vanish."""
    patch.setattr(checks, "refuse_mixing", lambda *_: None)


def buffers_accepted(patch: Patch) -> None:
    for room in (checks, module):
        patch.setattr(room, "refuse_changed_buffers", lambda module, run: run())


def collate_accepted(patch: Patch) -> None:
    for room in (examples, opacus_verbs):
        patch.setattr(room, "refuse_mixing_collate", lambda data, collate: None)
    for room in (examples, poisson_loader):
        patch.setattr(room, "collated", lambda collate, samples: collate(samples))


def rows_by_count(patch: Patch) -> None:
    """As many rows as the sample has are its rows."""
    counter = iter(range(10**9))

    def owners(values: Any) -> Any:
        rows = len(values[0])
        return Owners(draws[0].handed_out - 1, torch.tensor([next(counter) for _ in range(rows)]))

    draws: list[Any] = []
    forward = private_module.PrivateModule.forward

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        draws[:] = [self._loop]
        return forward(self, *args, **kwargs)

    class Anyones(RecordKeys):
        def rows(self, where: Any) -> RecordKeys:
            return RecordKeys(self.key, np.resize(self.indices, len(where)))

    patch.setattr(private_module, "owners_of", owners)
    patch.setattr(private_module.PrivateModule, "forward", noted)
    patch.setattr(own_loop.PrivateLoop, "_keys", lambda self, drawn: Anyones(
        bytes(32), self._session.batch(drawn).indices))  # fmt: skip


def two_iterators(patch: Patch) -> None:
    """Iterators do not know of each other: each begins at the sample that was last handed out."""

    def every(self: Any) -> Iterator[Any]:
        loop = self.privacy
        for number in range(len(self)):
            drawn = shared.setdefault((id(loop), number), None) or loop._session.draw("stretch-0")
            shared[(id(loop), number)] = drawn
            loop._now, loop.handed_out = drawn, loop.handed_out + 1
            loop._session._begun.add(drawn)
            x, y = self.dataset[torch.tensor(loop._session.batch(drawn).indices.copy())]
            owners = Owners(loop.handed_out - 1, torch.arange(len(x)))
            yield tuple(Rows.mark(part, owners) for part in (x, y))

    shared: dict[Any, Any] = {}
    patch.setattr(poisson_loader.PoissonLoader, "__iter__", every)


def last_loop_only(patch: Patch) -> None:
    """An engine forgets its earlier loops."""

    patch.setattr(history.History, "add", lambda self, loop: setattr(self, "_loops", [loop]))


def stepped_samples_only(patch: Patch) -> None:
    """Samples that were seen and not stepped on are not charged."""
    cost = vars(own_loop.PrivateLoop)["cost"].fget
    patch.setattr(
        own_loop.PrivateLoop, "cost", property(lambda self: replace(cost(self), used=max(0, self.handed_out - 1)))
    )


def states_are_free(patch: Patch) -> None:
    """What a loaded state cost stays behind."""
    patch.setattr(history.History, "load", lambda self, data: None)


def continuations_forgotten(patch: Patch) -> None:
    """A loop counts what came with the state, and tells nobody what it goes on to spend."""
    patch.setattr(history.History, "handed_out", lambda self, name, used: None)


def seeded_says_nothing(patch: Patch) -> None:
    init = own_loop.PrivateLoop.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.is_private = True

    patch.setattr(own_loop.PrivateLoop, "__init__", silent)


def processes_by_settings(patch: Patch) -> None:
    """Processes compare models and settings by name, and how many records there are."""
    patch.setattr(distributed, "_digests", lambda objective, records, key: (repr(objective), str(len(records)), ""))


def clipped_by_record(patch: Patch) -> None:
    """Each record of a person is clipped by itself."""

    def add_people(self: Any, batch: Any, groups: Any, points: Any, rule: Any, out: Any) -> None:
        self.add(batch._replace(indices=groups.flat()[0]), points, rule, out)

    patch.setattr(module.ModuleObjective, "add_people", add_people)


def person_in_two_passes(patch: Patch) -> None:
    """A batch is cut through people, and what each half holds of somebody is clipped there."""
    whole = engine.PerExampleEngine.add_people

    def halves(
        self: Any, points: Any, read: Any, rule: Any, add: Any, keys: Any, persons: Any, most: int | None = None
    ) -> Any:
        for rows in np.array_split(np.arange(len(persons.owners)), 2):

            def some(which: Any, rows: Any = rows) -> Any:
                return read(rows[which])

            whose = Persons.of(persons.owners[rows], mean=False)
            whole(self, points, some, rule, add, keys.rows(rows), whose, most)
        return torch.zeros(1, 1)

    patch.setattr(engine.PerExampleEngine, "add_people", halves)


def person_on_two_processes(patch: Patch) -> None:
    """Records are shared out, not people: each process clips what it has of somebody."""

    def share_of(batch: Any, rank: int, world: int) -> Any:
        held = batch.records.people
        rows = np.flatnonzero(np.arange(len(held.order)) % world == rank)
        owners = np.repeat(np.arange(len(held)), held.sizes)[rows]
        kept = owners if batch.indices is None else owners[np.isin(owners, batch.indices)]
        rows = rows if batch.indices is None else rows[np.isin(owners, batch.indices)]
        sizes = np.bincount(kept)
        sizes = sizes[sizes > 0]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        some = People(held.order[rows], starts, held.combine, held.records_per_person)
        return batch._replace(records=PeopleRecords(batch.records.rows, some), indices=np.arange(len(some)))

    patch.setattr(distributed, "share_of", share_of)


def one_nan_for_everybody(patch: Patch) -> None:
    """People's records are added up by a product with a matrix of zeros and ones."""

    def summed(self: Any, values: Any) -> Any:
        ones = torch.zeros(len(self), len(self.owners), dtype=values.dtype)
        ones[torch.from_numpy(self.owners), torch.arange(len(self.owners))] = 1.0
        return ones @ values

    patch.setattr(Persons, "summed", summed)


def records_drawn(patch: Patch) -> None:
    """A loop's samples are of records, whoever they are about."""

    def keys(self: Any, drawn: Any) -> RecordKeys:
        _, indices, key = self._session.batch(drawn)
        return RecordKeys.of(key, indices * 3)

    patch.setattr(own_loop.PrivateLoop, "_keys", keys)


def under(break_it: Callable[[Patch], None] | None, probe: Callable[[], Any]) -> Any:
    """What a probe finds with something broken, or with nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        found = probe()
        return found if isinstance(found, list) else [found]
