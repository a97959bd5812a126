"""The mutation table of the PyTorch rooms: every defect that was once there, and the layer that notices.

As in ``test_mutations.py``: broken, the named layer must report a violation; sound, it must not. The false-alarm
rate of a distinguisher is 1e-6; 200 runs see a broken one, and are too few to say much of a sound one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from quietgrad.audit.network_people import probe_people, probe_people_drawn
from quietgrad.audit.networks import (
    probe_agreement,
    probe_gradients,
    probe_long_sums,
    probe_network,
    probe_refusals,
)
from quietgrad.audit.own_loops import distinguish_fit, distinguish_loop, probe_loop_charges, probe_loop_reuse
from tests import broken_networks as broken


@dataclass(frozen=True)
class Mutation:
    """A bug, the layer that must notice it, how to make it, and the probe."""

    bug: str
    layer: str
    make: Callable[[pytest.MonkeyPatch], None]
    probe: Callable[[], Any]


TABLE = [
    Mutation("masks by place", "L0 sensitivity", broken.public_masks, lambda: probe_network("dropout")),
    Mutation("masks by place, released", "L2", broken.public_masks, lambda: distinguish_fit("dropout", 200)[1]),
    Mutation("masks by place in a loop", "L2", broken.public_masks, lambda: distinguish_loop(200)[1]),
    Mutation("masks drawn again", "L0 sensitivity", broken.redrawn_masks, lambda: probe_network("dropout")),
    Mutation("masks not replayed", "L0 replay", broken.other_masks_every_time,
             lambda: probe_network("dropout")),
    Mutation("public augmentation", "L0 replay", broken.public_augmentation,
             lambda: probe_network("layers", augmented=True)),
    Mutation("float32 over passes", "L0 sensitivity", broken.float32_sums, probe_long_sums),
    Mutation("aliased weight twice", "L0 gradients", broken.counted_twice,
             lambda: probe_gradients("aliased weights")),
    Mutation("checkpoint at old parameters", "L0 gradients", broken.checkpoints_at_the_start,
             lambda: probe_gradients("checkpointed")),
    Mutation("batch statistics accepted", "L0 mixing", broken.mixing_accepted, probe_refusals),
    Mutation("running statistics accepted", "L0 mixing", broken.buffers_accepted, probe_refusals),
    Mutation("mixup accepted", "L0 mixing", broken.collate_accepted, probe_refusals),
    Mutation("pieces by count", "L0 reuse", broken.rows_by_count, probe_loop_reuse),
    Mutation("two iterators, one sample", "L0 reuse", broken.two_iterators, probe_loop_reuse),
    Mutation("earlier loops forgotten", "L0 charge", broken.last_loop_only, probe_loop_charges),
    Mutation("skipped samples free", "L0 charge", broken.stepped_samples_only, probe_loop_charges),
    Mutation("seeded loop says nothing", "L0 charge", broken.seeded_says_nothing, probe_loop_charges),
    Mutation("clipped by record", "L0 sensitivity", broken.clipped_by_record,
             lambda: probe_people("layers", "sum")),
    Mutation("a person in two passes", "L0 sensitivity", broken.person_in_two_passes,
             lambda: probe_people("layers", "sum")),
    Mutation("a person on two processes", "L0 sensitivity", broken.person_on_two_processes,
             lambda: probe_people("layers", "sum", processes=2)),
    Mutation("one NaN for everybody", "L0 sensitivity", broken.one_nan_for_everybody,
             lambda: probe_people("convolutions", "mean")),
    Mutation("records drawn, not people", "L0 sampling", broken.records_drawn, probe_people_drawn),
    Mutation("processes compared by name", "L0 agreement", broken.processes_by_settings, probe_agreement),
]  # fmt: skip


@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.bug)
def test_named_layer_catches_the_bug_and_spares_the_sound_twin(mutation: Mutation) -> None:
    caught = {f.layer: f for f in broken.under(mutation.make, mutation.probe) if f.verdict == "violation"}
    assert mutation.layer in caught, f"{mutation.bug}: caught by {caught or 'nothing'}"
    spared = [f for f in broken.under(None, mutation.probe) if f.verdict == "violation"]
    assert not spared, f"{mutation.bug}: the sound twin was accused by {spared}"
