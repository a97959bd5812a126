"""The mutation table of the PyTorch rooms: what could be wrong in them, and the layer that notices.

As in ``test_mutations.py``: broken, the named layer must report a violation; sound, it must not. The false-alarm
rate of a distinguisher is 1e-6; 200 runs see a broken one, and are too few to say much of a sound one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from quietgrad.assurance.audit.networks import distinguish, fit_releases, loop_releases
from quietgrad.torch.networks.pass_sizes import Layout, PassSizes
from tests.mutations import broken_networks as broken
from tests.probes.networks import (
    probe_gradients,
    probe_long_sums,
    probe_mixing,
    probe_network,
    probe_people,
    probe_recorded,
)


@dataclass(frozen=True)
class Mutation:
    """A bug, the layer that must notice it, how to make it, and the probe."""

    bug: str
    layer: str
    make: Callable[[pytest.MonkeyPatch], None]
    probe: Callable[[], Any]


TABLE = [
    Mutation("masks by place", "L0 sensitivity", broken.public_masks, lambda: probe_network("dropout")),
    Mutation("masks by place, released", "L2", broken.public_masks,
             lambda: distinguish(fit_releases, 200).findings[0]),
    Mutation("masks by place in a loop", "L2", broken.public_masks,
             lambda: distinguish(loop_releases, 200).findings[0]),
    Mutation("masks by company", "L0 sensitivity", broken.redrawn_masks,
             lambda: probe_network("dropout", micro_batch=3)),
    Mutation("masks not replayed", "L0 replay", broken.other_masks_every_time,
             lambda: probe_network("dropout")),
    Mutation("one mask for all", "L0 sensitivity", broken.one_stream_for_all, lambda: probe_network("dropout")),
    Mutation("public augmentation", "L0 replay", broken.public_augmentation,
             lambda: probe_network("layers", augmented=True)),
    Mutation("another record's gradient", "L0 sensitivity", broken.another_records_gradient,
             lambda: probe_network("layers")),
    Mutation("copies summed over records", "L0 sensitivity", broken.copies_summed,
             lambda: probe_network("raw parameters")),
    Mutation("the majority's answer", "L0 gradients", broken.first_for_all,
             lambda: probe_gradients("branches")),
    Mutation("the majority's answer in a loop", "L0 recorded", broken.first_for_loops,
             lambda: probe_recorded("branches")),
    Mutation("joint parameter twice", "L0 gradients", broken.joint_counted_twice,
             lambda: probe_gradients("aliased weights")),
    Mutation("uses measured apart", "L0 sensitivity", broken.uses_measured_apart,
             lambda: probe_network("tied weights")),
    Mutation("measured by other columns", "L0 sensitivity", broken.measured_by_other_columns,
             lambda: probe_network("layers")),
    Mutation("buffers kept", "L0 replay", broken.buffers_kept, lambda: probe_mixing("a running mean")),
    Mutation("attributes kept", "L0 replay", broken.attributes_stay, lambda: probe_mixing("a running mean")),
    Mutation("all records to a collate function", "L0 mixing", broken.all_to_a_collate,
             lambda: probe_mixing("mixup while collating")),
    Mutation("padded to the longest", "L0 mixing", broken.padded_to_the_longest,
             lambda: probe_mixing("padding to the longest")),
    Mutation("float32 over passes", "L0 sensitivity", broken.float32_sums, probe_long_sums),
    Mutation("clipped by record", "L0 sensitivity", broken.clipped_by_record,
             lambda: probe_people("layers", "sum")),
    Mutation("a person in two passes", "L0 sensitivity", broken.person_in_two_passes,
             lambda: probe_people("layers", "sum")),
    Mutation("a person on two processes", "L0 sensitivity", broken.person_on_two_processes,
             lambda: probe_people("layers", "sum", processes=2)),
    Mutation("one NaN for everybody", "L0 sensitivity", broken.one_nan_for_everybody,
             lambda: probe_people("convolutions", "mean")),
]  # fmt: skip


MIXES_RECORDS = ("masks by place", "one mask for all", "another record's gradient", "copies summed over records")
"""Bugs by which a record's numbers follow from its place or its neighbours: trials of passes see them."""


def untried(make: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """The bug in a library that tries no layout of passes before it is used."""

    def any_layout(self: PassSizes, count: int, most: int | None, trial: object) -> Layout:
        return Layout(count)

    def made(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PassSizes, "fitting", any_layout)
        make(patch)

    return made


@pytest.mark.parametrize("mutation", [m for m in TABLE if m.bug in MIXES_RECORDS], ids=lambda m: m.bug)
def test_what_mixes_records_is_run_one_record_at_a_time(mutation: Mutation) -> None:
    assert not [f for f in broken.under(mutation.make, mutation.probe) if f.verdict == "violation"]


@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.bug)
def test_named_layer_catches_the_bug_and_spares_the_sound_twin(mutation: Mutation) -> None:
    make = untried(mutation.make)
    caught = {f.layer: f for f in broken.under(make, mutation.probe) if f.verdict == "violation"}
    assert mutation.layer in caught, f"{mutation.bug}: caught by {caught or 'nothing'}"
    spared = [f for f in broken.under(None, mutation.probe) if f.verdict == "violation"]
    assert not spared, f"{mutation.bug}: the sound twin was accused by {spared}"
