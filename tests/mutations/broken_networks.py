"""Deliberately broken pieces of the PyTorch rooms; none may pass an audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from quietgrad.core.noise.rng import SecureStream
from quietgrad.tables.privacy_units import UnitGrouping, UserLevelRecords
from quietgrad.torch.loops import distributed
from quietgrad.torch.networks import gradients, module, one_record, outer_products, program_state, records, taps
from quietgrad.torch.networks.randomness import PerRecordRNG, RecordSeeds
from quietgrad.torch.networks.vectors import SizeBucket, UnitAssignment

Patch = pytest.MonkeyPatch


def uncompared(patch: Patch) -> None:
    """Nothing is compared with autograd beforehand, so that a defect gets as far as a sum."""
    patch.setattr(gradients.ProgramProfile, "_check", lambda *_: None)


# --- random numbers ------------------------------------------------------------------------------------------


def public_masks(patch: Patch) -> None:
    """Masks by place in the batch, from a key that everyone knows: one record more moves all later ones."""

    def by_place(self: Any) -> Any:
        return SecureStream(bytes(32), "records").at(0, np.arange(len(self.indices)))

    patch.setattr(RecordSeeds, "draws", property(by_place))
    uncompared(patch)


def redrawn_masks(patch: Patch) -> None:
    """A part of the records draws other masks than the whole: what a record draws depends on its company."""

    def rows(self: Any, where: Any) -> RecordSeeds:
        chosen = self.indices[where]
        return RecordSeeds(self.key, chosen, chosen + 1000 * len(self.indices))

    patch.setattr(RecordSeeds, "rows", rows)


def other_masks_every_time(patch: Patch) -> None:
    """Every pass of a release draws from a fresh secret: a replay differs, and a difference is of two models."""
    draws: Any = RecordSeeds.__dict__["draws"].func

    def fresh(self: Any) -> Any:
        if self.key == bytes(32):  # where the module is tried out
            return draws(self)
        return np.random.default_rng().integers(0, 2**63, len(self.indices)).astype(np.uint64)

    patch.setattr(RecordSeeds, "draws", property(fresh))


def one_stream_for_all(patch: Patch) -> None:
    """Draws are not keyed by record: all of a pass have the first one's."""
    numbers = PerRecordRNG.numbers

    def first(self: Any, shape: Any) -> Any:
        made = numbers(self, shape)
        return made[:1].expand(made.shape).clone() if made.dim() and len(self.words) > 1 else made

    patch.setattr(PerRecordRNG, "numbers", first)
    uncompared(patch)


def public_augmentation(patch: Patch) -> None:
    """Records are read with whatever the generators hold: what one draws moves all later ones."""
    patch.setattr(records, "seed_generators", lambda word: None)


# --- one record ----------------------------------------------------------------------------------------------


def another_records_gradient(patch: Patch) -> None:
    """A tap keeps what came back to another record."""
    receive = taps.TapSite.receive
    patch.setattr(taps.TapSite, "receive", lambda self, grad: receive(self, grad.flip(0)))
    uncompared(patch)


def copies_summed(patch: Patch) -> None:
    """The gradients of a parameter's copies are added up over records."""

    def backward(ctx: Any, grad: Any) -> Any:
        ctx.site.receive(grad.sum(0, keepdim=True).expand(grad.shape))
        return None, None, None, None

    patch.setattr(taps._Spread, "backward", staticmethod(backward))
    uncompared(patch)


def first_for_all(patch: Patch) -> None:
    """Answers of a program's records are not compared: all are run as the first of them answers.

    Synthetic records, which may answer apart too, are not compared with autograd either.
    """
    patch.setattr(taps.Taps, "_go_apart", lambda self, answers: None)
    patch.setattr(gradients.ProgramProfile, "_check", lambda self, *given: self._agree(*given) and None)


def first_for_loops(patch: Patch) -> None:
    """The same, of what a loop records alone."""
    passes, apart = one_record.RecordProgram.passes, taps.Taps._go_apart

    def together(self: Any, *args: Any) -> Iterator[Any]:
        taps.Taps._go_apart = lambda self, answers: None  # type: ignore[method-assign]
        try:
            yield from passes(self, *args)
        finally:
            taps.Taps._go_apart = apart  # type: ignore[method-assign]

    patch.setattr(one_record.RecordProgram, "passes", together)


def joint_counted_twice(patch: Patch) -> None:
    """A parameter that is used several times counts twice each time."""
    piece = gradients._Cluster.piece
    patch.setattr(gradients._Cluster, "piece", lambda self, uses: piece(self, [*uses, *uses]))
    uncompared(patch)


def uses_measured_apart(patch: Patch) -> None:
    """The norms of a parameter's uses are added as if they were orthogonal, and its vectors as they are."""

    def add(self: Any, part: Any, slot: slice, piece: Any) -> None:
        part.pieces.append((slot, piece))

    patch.setattr(gradients.Collector, "_add", add)
    uncompared(patch)


def measured_by_other_columns(patch: Patch) -> None:
    """Gram matrices are taken of half of what the sum is made of."""
    columns = outer_products.LinearLayerMap.wide_columns
    patch.setattr(outer_products.LinearLayerMap, "wide_columns", lambda self, inputs: columns(self, inputs) / 2)
    uncompared(patch)


def buffers_kept(patch: Patch) -> None:
    """What a program writes into a buffer stays there."""
    patch.setattr(one_record.RecordProgram, "_stand_in_for", lambda self, buffer: buffer)
    patch.setattr(program_state.ProgramState, "_put_back", lambda self: None)


def attributes_stay(patch: Patch) -> None:
    """What a program keeps in a module's attributes stays there."""
    patch.setattr(program_state.ProgramState, "_put_back", lambda self: None)


def all_to_a_collate(patch: Patch) -> None:
    """A collate function gets a record with all others behind it."""

    def one(data: Any, index: int, collate: Any, pad: Any) -> Any:
        batch = collate([data[index], *(data[other] for other in range(len(data)) if other != index)])
        return tuple(part[:1] for part in batch)

    patch.setattr(records, "_one", one)


def padded_to_the_longest(patch: Patch) -> None:
    """Records are padded to the longest of those that are asked for."""
    reader = records._reader

    def padding(data: Any, collate: Any, pad: Any) -> Any:
        read = reader(data, collate, pad)

        def longest(keys: Any) -> Any:
            groups = read(keys)
            length = max(group.record[0].shape[2] for group in groups)
            return [
                records.RecordGroup(rows, (torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2])), y))
                for rows, (x, y) in groups
            ]

        return longest

    patch.setattr(records, "_reader", padding)


# --- sums ----------------------------------------------------------------------------------------------------


def float32_sums(patch: Patch) -> None:
    """Passes are added up in float32."""

    class Narrow(module.CompensatedSum):
        def __init__(self, out: Any) -> None:
            self._out, self._low = out, None
            self._high = torch.zeros_like(out, dtype=torch.float32)

        @contextmanager
        def term(self) -> Iterator[Any]:
            part = torch.zeros_like(self._out)
            yield part
            self._high += part.float()

    patch.setattr(module, "CompensatedSum", Narrow)


# --- people --------------------------------------------------------------------------------------------------


def clipped_by_record(patch: Patch) -> None:
    """Each record of a person is clipped by itself."""

    def add_people(self: Any, batch: Any, groups: Any, points: Any, rule: Any, out: Any) -> None:
        self.add(batch._replace(indices=groups.flat()[0]), points, rule, out)

    patch.setattr(module.ModuleObjective, "add_people", add_people)


def person_in_two_passes(patch: Patch) -> None:
    """A batch is cut through people, and what each half holds of somebody is clipped there."""

    def halves(self: Any, batch: Any, groups: Any, points: Any, rule: Any, out: Any) -> None:
        rows, starts = groups.flat()
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        keys = RecordSeeds.of(batch.key, rows)
        for half in np.array_split(np.arange(len(rows)), 2):
            part = keys.rows(half)
            whose = UnitAssignment.of(owners[half], mean=False)
            self.engine.add(points, batch.records.read(part), rule, out, part, whose)

    patch.setattr(module.ModuleObjective, "add_people", halves)


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
        some = UnitGrouping(held.order[rows], starts, held.rule)
        return batch._replace(records=UserLevelRecords(batch.records.rows, some), indices=np.arange(len(some)))

    patch.setattr(distributed, "share_of", share_of)


def one_nan_for_everybody(patch: Patch) -> None:
    """People's records are laid out by a product with a matrix of zeros and ones."""

    def product(self: Any, values: Any, blank: bool = True) -> Any:
        ones = torch.zeros(*self.rows.shape, len(values), dtype=values.dtype)
        ones.scatter_(2, torch.from_numpy(self.rows)[..., None], 1.0)
        if self.blank is not None:
            ones[torch.from_numpy(self.blank)] = 0.0
        return torch.einsum("prn,n...->pr...", ones, values)

    patch.setattr(SizeBucket, "of", product)


def under(break_it: Callable[[Patch], None] | None, probe: Callable[[], Any]) -> Any:
    """What a probe finds with something broken, or with nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if break_it is not None:
            break_it(patch)
        found = probe()
        return found if isinstance(found, list) else [found]
