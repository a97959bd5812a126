"""The mutation table of private loops: every defect that was once there, and the layer that notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.mutations import broken_loops as broken
from tests.probes.loops import probe_loop_charges, probe_loop_conditions, probe_loop_reuse, probe_loop_schedules
from tests.probes.networks import probe_agreement, probe_people_drawn
from tests.probes.shards import probe_noise_of_shards, probe_samples_of_epochs

TABLE: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], Callable[[], Any]]] = {
    "a sample again": ("L0 reuse", broken.samples_serve_again, probe_loop_reuse),
    "an old batch": ("L0 reuse", broken.old_batches_accepted, probe_loop_reuse),
    "two iterators": ("L0 reuse", broken.two_iterators, probe_loop_reuse),
    "an opaque batch again": ("L0 reuse", broken.opaque_batches_serve_again, probe_loop_reuse),
    "looks are free": ("L0 condition", broken.looks_are_free, probe_loop_conditions),
    "sizes are free": ("L0 condition", broken.sizes_are_free, probe_loop_conditions),
    "ledgers are not told": ("L0 condition", broken.ledgers_are_not_told, probe_loop_conditions),
    "earlier loops forgotten": ("L0 charge", broken.last_loop_only, probe_loop_charges),
    "skipped samples free": ("L0 charge", broken.stepped_samples_only, probe_loop_charges),
    "stops are public": ("L0 charge", broken.stops_are_public, probe_loop_charges),
    "seeded loop says nothing": ("L0 charge", broken.seeded_says_nothing, probe_loop_charges),
    "records drawn, not people": ("L0 sampling", broken.records_drawn, probe_people_drawn),
    "noise by both ranks of shards": ("L0 noise", broken.both_ranks_add_noise, probe_noise_of_shards),
    "noise by no rank of shards": ("L0 noise", broken.no_rank_adds_noise, probe_noise_of_shards),
    "an old sample charged anew": ("L0 reuse", broken.old_samples_in_new_epochs, probe_samples_of_epochs),
    "one stretch charged": ("L0 noise", broken.first_stretch_alone_is_charged, probe_loop_schedules),
    "least noise everywhere": ("L0 noise", broken.stretches_have_least_noise, probe_loop_schedules),
    "noise of the first bound": ("L0 noise", broken.noise_of_the_first_bound, probe_loop_schedules),
    "processes compared by name": ("L0 agreement", broken.processes_by_settings, probe_agreement),
}


@pytest.mark.parametrize("bug", TABLE)
def test_named_layer_catches_the_bug(bug: str) -> None:
    layer, make, probe = TABLE[bug]
    with pytest.MonkeyPatch.context() as patch:
        make(patch)
        found = probe()
    assert (found.layer, found.verdict) == (layer, "violation"), f"{bug}: {found}"


@pytest.mark.parametrize(
    "probe", dict.fromkeys(entry[2] for entry in TABLE.values()), ids=lambda probe: probe.__name__
)
def test_the_sound_twin_is_spared(probe: Callable[[], Any]) -> None:
    assert probe().verdict == "pass"
