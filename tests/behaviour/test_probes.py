"""The exact probes, asked of everything that is registered: one table over losses, curators, parties and networks.

What is broken on purpose is in the mutation tables. The false-alarm rate of a statistical probe is 1e-6.
"""

from __future__ import annotations

from typing import Any

import pytest

from quietgrad.assurance.audit.noise_checks import MECHANISMS, probe_mechanism
from tests.probes.loops import probe_loop_charges, probe_loop_conditions, probe_loop_reuse
from tests.probes.networks import probe_networks
from tests.probes.parties import probe_federations
from tests.probes.people import probe_drawn_people, probe_ids, probe_people
from tests.probes.records import probe_losses, probe_second_order
from tests.probes.sessions import probe_charges, probe_fresh_records, probe_ledger, probe_replay, probe_samples

PROBES: dict[str, Any] = {
    "losses on tables": probe_losses,
    "queries of second order": probe_second_order,
    "charges": probe_charges,
    "reservation before release": lambda: [probe_ledger()],
    "replays": probe_replay,
    "samples": probe_samples,
    "fresh records": lambda: [probe_fresh_records()],
    "people": lambda: [probe_drawn_people(), probe_ids(), *probe_people()],
    "federations": probe_federations,
    "networks": probe_networks,
    "custom loops": lambda: [probe_loop_reuse(), probe_loop_conditions(), probe_loop_charges()],
    **{f"{m.kind} noise": lambda m=m: probe_mechanism(m) for m in MECHANISMS},
}


@pytest.mark.parametrize("name", PROBES)
def test_sound_code_passes(name: str) -> None:
    findings = list(PROBES[name]())
    assert findings
    assert [finding for finding in findings if finding.verdict != "pass"] == []
