"""Ways to break people of several records, and the layer of the audit that notices each; sound code passes all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.audit.attacks import attack_person
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.objectives import Logistic
from quietgrad.tables import full_batch, table
from quietgrad.tables.privacy_units import UnitGrouping, UserLevelObjective, UserLevelRecords
from tests.probes.people import probe_drawn_people, probe_ids, probe_people

LOSSES = {"logistic": Logistic(intercept=True)}


class ClipsRecords(UserLevelObjective):
    """Clips every record on its own and adds them up."""

    def add(self, batch: Batch, points: Sequence[Any], rule: ClippingRule, out: Any) -> None:
        records: UserLevelRecords = batch.records
        rows = records.people.groups(batch.indices, batch.key).flat()[0]
        self.loss.add(Batch(records.rows, rows), points, rule, out)


class DrawsRecords(UserLevelObjective):
    """Takes every record for a person of its own, so that records are drawn."""

    def prepare(self, data: Any) -> UserLevelRecords:
        held = super().prepare(data)
        n = len(held.people.order)
        return UserLevelRecords(held.rows, UnitGrouping(np.arange(n), np.arange(n + 1)))


class ClipsHalves(UserLevelObjective):
    """Splits a person over two micro-batches, each clipped as if it were a person."""

    def add(self, batch: Batch, points: Sequence[Any], rule: ClippingRule, out: Any) -> None:
        records: UserLevelRecords = batch.records
        rows, starts = records.people.groups(batch.indices, batch.key).flat()
        cuts = np.unique(np.concatenate([starts, (starts[:-1] + starts[1:]) // 2]))
        halves = UnitGrouping(rows, cuts, records.people.rule)
        super().add(Batch(UserLevelRecords(records.rows, halves), None), points, rule, out)


class CountsTwice(UserLevelObjective):
    """Counts whoever has two records or more in two micro-batches, once in each."""

    def add(self, batch: Batch, points: Sequence[Any], rule: ClippingRule, out: Any) -> None:
        super().add(batch, points, rule, out)
        people = batch.records.people
        who = np.arange(len(people)) if batch.indices is None else batch.indices
        super().add(batch._replace(indices=who[people.sizes[who] > 1]), points, rule, out)


def by_hash(ids: Any) -> UnitGrouping:
    """Groups by a hash of the id, of a few bits."""
    return UnitGrouping.of([hash(str(i)) % 64 for i in ids])


def as_texts(ids: Any) -> UnitGrouping:
    """Makes texts of whatever is given."""
    return UnitGrouping.of([str(i) for i in ids])


def exactly(ids: Any) -> UnitGrouping:
    """Groups by equality and asks nothing: None is somebody, é is two people."""
    known: dict[Any, int] = {}
    return UnitGrouping.of([known.setdefault(repr(i), len(known)) for i in ids])


def sensitivity(asking: Any = UserLevelObjective) -> list[AuditFinding]:
    return list(probe_people(asking, LOSSES))


def told_apart(asking: Any = UserLevelObjective) -> list[AuditFinding]:
    return [attack_person(7, 2000, asking, relation=relation) for relation in Relation]


TABLE: list[tuple[str, Callable[..., list[AuditFinding]], Any, str]] = [
    ("clips records", sensitivity, ClipsRecords, "L0 sensitivity"),
    ("clips records", told_apart, ClipsRecords, "L2"),
    ("draws records", sensitivity, DrawsRecords, "L0 sensitivity"),
    ("clips halves", sensitivity, ClipsHalves, "L0 sensitivity"),
    ("counts twice", sensitivity, CountsTwice, "L0 sensitivity"),
    ("counts twice", told_apart, CountsTwice, "L2"),
    ("draws records", lambda how=UserLevelObjective: [probe_drawn_people(how)], DrawsRecords, "L0 sampling"),
    ("hashes collide", lambda how=UnitGrouping.of: [probe_ids(how)], by_hash, "L0 ids"),
    ("1 is '1'", lambda how=UnitGrouping.of: [probe_ids(how)], as_texts, "L0 ids"),
    ("nothing is asked of ids", lambda how=UnitGrouping.of: [probe_ids(how)], exactly, "L0 ids"),
]


@pytest.mark.parametrize(("bug", "probe", "how", "layer"), TABLE, ids=[f"{b[0]}, {b[3]}" for b in TABLE])
def test_every_known_bug_is_noticed(bug: str, probe: Any, how: Any, layer: str) -> None:
    found = probe(how)
    assert any(finding.layer == layer and finding.verdict == "violation" for finding in found), bug


@pytest.mark.parametrize("probe", [TABLE[k][1] for k in (0, 1, 6, 7)])
def test_sound_code_is_not_accused(probe: Any) -> None:
    assert {finding.verdict for finding in probe()} == {"pass"}


def test_a_block_that_ends_within_a_person_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full batch is summed in blocks; one that clips what it has of a person at its end is caught."""
    monkeypatch.setattr(table, "_BLOCK", 600)
    assert {finding.verdict for finding in sensitivity()} == {"pass"}
    true = full_batch.PersonSum.add

    def forgets(self: Any, block: Any, residuals: Any, before: Any) -> None:
        true(self, block, residuals, before)
        if self._unfinished:
            begin = np.searchsorted(self._starts, self._at, "right") - 1
            self._close([part.copy() for part in self._unfinished], self._starts[begin : begin + 2])
            self._unfinished = []

    monkeypatch.setattr(full_batch.PersonSum, "add", forgets)
    assert "violation" in {finding.verdict for finding in sensitivity()}


def test_a_saved_run_by_person_is_audited_by_person(tmp_path: Path) -> None:
    """Its canaries have one record each: alone they attack a claim about records."""
    from quietgrad.cli.audit import audit_folder

    X = np.random.default_rng(0).uniform(-1, 1, (60, 2))
    method, budget = qg.DPGD(steps=1), qg.Budget(4.0, 1e-5)
    run = qg.minimize(LOSSES["logistic"], (X, X[:, 0] > 0), method, budget=budget, person=np.repeat(range(20), 3))
    run.save(tmp_path)
    report = audit_folder(tmp_path, 400)
    assert report.verdict == "pass"
    assert any("per person" in note for note in report.notes)
    tried = " ".join(finding.what for finding in report.findings)
    assert "a person of 500 records, add-remove" in tried
    assert report.epsilon_lower <= report.epsilon_claimed
