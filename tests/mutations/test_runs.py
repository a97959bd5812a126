"""Bugs of state that is rebuilt, restarted, or counted from the wrong end; and the probe that notices each.

Every row is run broken, where its probe must fail, and sound, where it must not.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates import PrivacyCertificate, check, issue
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import prove
from quietgrad.core.errors import DataError, LedgerError
from quietgrad.core.ledger.account import Account
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.ledger.log import SealedLog
from quietgrad.core.noise.correlated import BufferedToeplitzNoise, NoiseRecurrence
from quietgrad.core.noise.rng import seed_key
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.session import checkpoint
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery
from quietgrad.core.session.session import CentralSession
from quietgrad.core.session.transcript import Transcript
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch
from quietgrad.federation.journal import Journal
from quietgrad.objectives import Logistic
from quietgrad.tables.queries.counts import MeanScore
from tests.behaviour.kept_runs import BUDGET, SampledRun, TableRun, World, rows

Patch = pytest.MonkeyPatch
Probe = Callable[[Path], None]


@pytest.fixture
def home() -> Iterator[Path]:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def put_back(world: World, *, ledger: bool = False) -> None:
    """Everything as it was at the snapshot, into the same files, as ``cp`` does it."""
    time.sleep(0.03)
    assert world.snapshot is not None
    for path, content in world.snapshot.items():
        if ledger or not path.name.startswith("ledger"):
            path.write_bytes(content)


# --- probes -----------------------------------------------------------------------------------------------------


def changed_again_and_again(home: Path) -> None:
    """A run whose table changes at every resume: each epoch has noise of its own, and a charge."""
    world = TableRun(home / "run")
    world.go(0, kill=2)
    for data, kill in ((1, 3), (0, 4), (1, 5)):
        world.go(data, kill=kill)
    world.go(0)
    world.check()
    assert world.witness.epochs() > 3


def put_back_within_an_opening(home: Path) -> None:
    world = TableRun(home / "run")
    world.go(0, kill=5, look=2, saved=True)
    put_back(world)
    world.go(1)
    world.check()


def put_back_by_rename(home: Path) -> None:
    """The files of an earlier opening, whose clock nobody moved: only the ledger knows that there was another."""
    world = TableRun(home / "run")
    world.go(0, kill=2, saved=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedLog, "untouched", property(lambda self: True, lambda self, value: None), raising=False)
        world.snapshot = world.files()
        world.go(0, kill=4, saved=True)
        put_back(world)
        world.go(1)
    world.check()


def put_back_and_opened_in_vain(home: Path) -> None:
    """After a restore, a process that dies before it releases anything makes nothing whole."""
    world = TableRun(home / "run")
    world.go(0, kill=5, look=2, saved=True)
    put_back(world)
    world.go(1, kill=2, saved=True)  # dies at its first checkpoint, which is that of step 2
    world.go(1)
    world.check()


def put_back_while_an_epoch_began(home: Path) -> None:
    """The transcript as it was when a new epoch was intended, and not yet begun."""
    world = TableRun(home / "run")
    world.go(0, kill=3)
    forked = Transcript.fork

    def look(log: Transcript) -> int:
        world.snapshot = world.files()
        time.sleep(0.03)
        return forked(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transcript, "fork", look)
        world.go(1, kill=5)
    put_back(world)
    world.go(0)
    world.check()


def an_epoch_is_forgotten(home: Path) -> None:
    """The statement holds every charge of the ledger, those that the transcript has forgotten included."""
    world = TableRun(home / "run")
    world.go(0, kill=3, look=2)
    world.go(1, kill=5)
    put_back(world)
    world.go(0)
    world.check()


def a_checkpoint_is_newer(home: Path) -> None:
    """A checkpoint knows how many releases there were; here it is all that does."""
    world = TableRun(home / "run")
    world.go(0, kill=5, look=2, saved=True)
    assert world.snapshot is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SealedLog, "untouched", property(lambda self: True, lambda self, value: None), raising=False)
        for path, content in world.snapshot.items():
            if path.suffix == ".transcript":
                path.write_bytes(content)
        world.go(1)
    world.check()
    assert world.result.privacy.epsilon > 1.2  # the second charge


def altered(home: Path) -> None:
    """No byte of a checkpoint can be changed, be it of its header, its state or its arrays."""
    world = SampledRun(home / "run")
    world.go(0, kill=3)
    path = world.folder / "checkpoint.safetensors"
    whole = path.read_bytes()
    places = [whole.index(word) for word in (b"released", b"noise_multiplier", b"n_public")]
    digits = [next(i for i in range(at, at + 60) if 48 <= whole[i] <= 57) for at in places]
    for at in (*digits, len(whole) - 3, len(whole) - 9):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError):
            world.go(0)
    path.write_bytes(whole)
    world.go(0)
    world.check()


def a_line_is_missing(home: Path) -> None:
    world = TableRun(home / "run")
    world.go(0, kill=4)
    (path,) = (world.home / "state" / "keys").glob("*.transcript")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2] + lines[-1:]))
    with pytest.raises(LedgerError):
        world.go(1)


def nothing_is_spent_twice(home: Path) -> None:
    """Killed and resumed, again and again, on the same table."""
    world = TableRun(home / "run")
    for kill in (2, 3, 4, 5):
        world.go(0, kill=kill)
    world.go(0)
    world.check()
    assert world.charges() == 1
    assert Ledger(world.ledger).openings(world.result.details["run"]) == 5


def indices(session: CentralSession, count: int) -> list[Any]:
    return [session.batch(session._begin("gradient", "release")).indices for _ in range(count)]


def samples_after_a_restart(home: Path) -> None:
    """Samples go by the number of a release: what is resumed draws what an undisturbed run would."""
    for method in (
        qg.DPSGD(steps=8, batch_size=5),
        qg.DPSGD(steps=8, batch_size=5, sampling="single-pass"),
        qg.DPSGD(steps=8, batch_size=5, sampling="fixed-size"),
    ):
        plan = qg.plan(method, n=60, budget=qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE))
        whole = indices(CentralCurator(Logistic(), rows(0), key=seed_key(1)).open(plan), 8)
        resumed = CentralCurator(Logistic(), rows(0), key=seed_key(1)).open(plan, used={"gradient": 5})
        for before, after in zip(whole[5:], indices(resumed, 3), strict=True):
            assert np.array_equal(before, after), method.sampling


def a_filter_after_a_restart(home: Path) -> None:
    """What a zCDP filter had left is what is left of it."""
    method = qg.DPAGD()
    plan = qg.plan(method, n=60, budget=BUDGET)
    session = CentralCurator(Logistic(), rows(0)).open(plan)
    left = 0.25 * session.rho_left
    resumed = CentralCurator(Logistic(), rows(0)).open(plan, rho_left=left)
    assert resumed.rho_left == left


def an_early_end_after_a_restart(home: Path) -> None:
    """Ended early by a clock: what earlier processes released is charged, though this one did not count it."""
    path, key = home / "ledger.jsonl", seed_key(2)
    plan = qg.plan(qg.DPGD(steps=8), n=60, budget=BUDGET)
    query = GradientQuery(np.zeros(2), 1.0)
    for resumed, count in ((False, 6), (True, 0)):
        log = Transcript(home / "transcript", "run", key, resumed=resumed)
        curator = CentralCurator(Logistic(), rows(0), ledger=path, run="run", key=key)
        session = curator.open(plan, transcript=log, used={"gradient": 1} if resumed else None)
        for _ in range(count):
            session.release("gradient", query)
        log.close()
    session.close("out of time", data_dependent=False)
    (held,) = Ledger(path).book().held.values()
    assert held.counts == plan.event_of({"gradient": 6})


def a_closed_entry(home: Path) -> None:
    """An entry that was closed pays for nothing new."""
    path, key = home / "ledger.jsonl", seed_key(2)
    plan = qg.plan(qg.DPGD(steps=8), n=60, budget=BUDGET)
    for resumed in (False, True):
        log = Transcript(home / "transcript", "run", key, resumed=resumed)
        session = CentralCurator(Logistic(), rows(0), ledger=path, run="run", key=key).open(plan, transcript=log)
        for _ in range(4 if resumed else 2):
            session.release("gradient", GradientQuery(np.zeros(2), 1.0))
        session.close("out of time", data_dependent=False)
        log.close()
    assert len(Ledger(path).book().held) == 2


def correlated_rows_after_a_restart(home: Path) -> None:
    """Row 150 of correlated noise depends on all before it, however it is come to."""
    on, again = (BufferedToeplitzNoise.made(200).rows(seed_key(3), "noise") for _ in range(2))
    kept = [on.row(k, 4) for k in range(151)]
    assert np.array_equal(again.row(150, 4), kept[150])


def a_search_scores_strangers(home: Path) -> None:
    """A round costs one release because who scores a model did not train it."""
    X, y = rows(0, 400)
    seen: list[Any] = []
    fit, sum_into = PrivateLogisticRegression.fit, MeanScore.sum_into

    def fits(model: Any, rows: Any, *args: Any, **settings: Any) -> Any:
        seen.append({row.tobytes() for row in np.ascontiguousarray(rows)})
        return fit(model, rows, *args, **settings)

    def scores(query: MeanScore, *args: Any) -> None:
        held = {row.tobytes() for row in np.ascontiguousarray(X[query.held_out])}
        assert not held & seen[-1]
        sum_into(query, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateLogisticRegression, "fit", fits)
        patch.setattr(MeanScore, "sum_into", scores)
        model = PrivateLogisticRegression(classes=[0, 1], row_bound=2.0, inference=False)
        grid = {"regularization": [0.0, 0.1]}
        PrivateSearch(model, grid, epsilon=4.0, relation="replace-one", ledger=home / "l").fit(X, y)
    assert seen


def a_party_after_lost_rounds(home: Path) -> None:
    """Draws that were skipped stay used: after a restart a party counts from the largest, not by lines."""
    journal = Journal(home, "a", "digest")
    journal.bind("run")
    for t, draw in ((0, 0), (1, 4), (2, 7)):
        journal.record(t, "gradient", draw)
    journal.close()
    again = Journal(home, "a", "digest")
    assert (again.last_round, again.draws("gradient")) == (2, 8)
    again.close()


def a_certificates_count(home: Path) -> None:
    """Whatever a certificate says of its private count otherwise than it was, with all that follows from it."""
    method, loss = qg.DPSGD(steps=3, batch_size=20), qg.objectives.Logistic()
    qg.minimize(loss, rows(0, 400), method, budget=BUDGET, ledger=home / "l").save(home)
    body = issue(home, ledger=home / "l").body
    counted, (first, *rest) = body["plan"]["counted"], body["event"]["parts"]
    free = {**first, "epsilon": first["epsilon"] / 100}
    gaussian = {"event": "gaussian", "noise_multiplier": counted["noise_multiplier"]}
    releases = body["claim"]["releases"]
    unsaid = {name: number for name, number in releases.items() if name != "count"}
    edits: list[tuple[Any, Any, Any]] = [
        ({**counted, "noise_multiplier": 100 * counted["noise_multiplier"]}, [first, *rest], releases),
        (counted, [free, *rest], releases),
        (counted, rest, releases),
        (counted, [first, *rest], unsaid),
        (None, [first, *rest], releases),
        (None, rest, releases),
        ({**counted, "gaussian": True}, [gaussian, *rest], releases),
    ]
    for said, parts, stated in edits:
        event = events.from_json(parts[0] if len(parts) == 1 else {"event": "composed", "parts": parts})
        proof = prove(event, delta=BUDGET.delta, relation=BUDGET.relation)
        claim = {**body["claim"], "epsilon": proof.epsilon, "accountant": proof.accountant, "releases": stated}
        plan = {**body["plan"], "counted": said}
        changed = {**body, "claim": claim, "event": event.to_json(), "plan": plan, "ledger": None}
        found = {finding.what: finding.ok for finding in check(PrivacyCertificate(changed)).findings}
        assert found["proof"]
        assert found["plan"] is False, (said, parts)
    assert check(PrivacyCertificate(body)).ok


# --- bugs -------------------------------------------------------------------------------------------------------


def third_epoch_reuses_the_seconds_key(patch: Patch) -> None:
    key = Transcript.key
    patch.setattr(Transcript, "key", lambda self, epoch: key(self, min(epoch, 1)))


def openings_are_not_compared(patch: Patch) -> None:
    patch.setattr(SealedLog, "agrees", lambda self, openings: True)


def touched_files_are_believed(patch: Patch) -> None:
    patch.setattr(SealedLog, "untouched", property(lambda self: True, lambda self, value: None), raising=False)


def a_vain_opening_makes_whole(patch: Patch) -> None:
    """The file is not told that something may be missing from it."""
    add = SealedLog.add
    patch.setattr(SealedLog, "add", lambda log, text, **how: None if text == "torn" else add(log, text, **how))


def an_intended_epoch_is_taken_up(patch: Patch) -> None:
    reopen = Transcript.reopen

    def keeps(log: Transcript, openings: int) -> int:
        intended = log._intended
        number = reopen(log, openings)
        log._intended = intended
        return number

    patch.setattr(Transcript, "reopen", keeps)


def epochs_by_transcript_alone(patch: Patch) -> None:
    patch.setattr(Account, "epochs", lambda self, run: ())


def released_is_not_looked_at(patch: Patch) -> None:
    init = Transcript.__init__

    def forgets(log: Transcript, *args: Any, least: int = 0, **settings: Any) -> None:
        init(log, *args, **settings)

    patch.setattr(Transcript, "__init__", forgets)


def seal_of_arrays_alone(patch: Patch) -> None:
    seal = checkpoint._seal
    patch.setattr(checkpoint, "_seal", lambda key, said, tensors: seal(key, "", tensors))


def seal_of_the_header_alone(patch: Patch) -> None:
    seal = checkpoint._seal
    patch.setattr(checkpoint, "_seal", lambda key, said, tensors: seal(key, said, {}))


def lines_are_sealed_one_by_one(patch: Patch) -> None:
    seal = SealedLog._seal

    def alone(log: SealedLog, said: str) -> bytes:
        before, log._last = log._last, b""
        try:
            return seal(log, said)
        finally:
            log._last = before

    patch.setattr(SealedLog, "_seal", alone)


def openings_are_not_told(patch: Patch) -> None:
    patch.setattr(Account, "resume", lambda self, run: None)


def samples_are_counted_from_the_restart(patch: Patch) -> None:
    advance, batch = CentralSession.advance, CentralSession._batch
    begun: dict[int, dict[str, int]] = {}

    def note(session: CentralSession, used: Any, rho_left: Any) -> None:
        advance(session, used, rho_left)
        begun[id(session)] = dict(used)

    def early(session: CentralSession, drawn: Any) -> Any:
        return batch(session, drawn._replace(number=drawn.number - begun[id(session)].get(drawn.slot, 0)))

    patch.setattr(CentralSession, "advance", note)
    patch.setattr(CentralSession, "_batch", early)


def fresh_records_begin_again(patch: Patch) -> None:
    advance = CentralSession.advance

    def anew(session: CentralSession, used: Any, rho_left: Any) -> None:
        advance(session, used, rho_left)
        session._fresh_at = 0

    patch.setattr(CentralSession, "advance", anew)


def a_filter_is_full_again(patch: Patch) -> None:
    advance = CentralSession.advance
    patch.setattr(CentralSession, "advance", lambda session, used, rho_left: advance(session, used, None))


def ends_count_this_process_alone(patch: Patch) -> None:
    patch.setattr(Transcript, "count", lambda self, slot: 0)


def closed_entries_pay_again(patch: Patch) -> None:
    init = CentralSession.__init__

    def trusts(session: CentralSession, *args: Any, **settings: Any) -> None:
        init(session, *args, **settings)
        session._trusted = True

    patch.setattr(CentralSession, "__init__", trusts)


def rows_from_the_last_64(patch: Patch) -> None:
    row = NoiseRecurrence.row

    def short(self: NoiseRecurrence, release: int, dim: int) -> Any:
        if self._buffers is None and release > 64:
            self._buffers, self._next = np.zeros((self._buffer_rows, dim)), release - 64
        return row(self, release, dim)

    patch.setattr(NoiseRecurrence, "row", short)


def who_scores_trained_too(patch: Patch) -> None:
    split = PrivateSearch._split

    def overlapping(search: Any, *sizes: Any) -> Any:
        apart = split(search, *sizes)
        return apart._replace(train=np.concatenate([apart.train[:-1], apart.test[:1]]))

    patch.setattr(PrivateSearch, "_split", overlapping)


def draws_are_counted_by_lines(patch: Patch) -> None:
    opened = Journal._opened

    class Lines(dict[str, int]):
        def __setitem__(self, slot: str, draws: int) -> None:
            super().__setitem__(slot, self.get(slot, 0) + 1)

    def counts(journal: Journal, path: Path) -> Any:
        journal._draws = Lines()
        return opened(journal, path)

    patch.setattr(Journal, "_opened", counts)


def a_certificates_first_release_is_not_compared(patch: Patch) -> None:
    def trusts(count: PublicCount, event: events.Event, relation: qg.Relation) -> events.Event:
        return events.composed(event.parts[1:]) if isinstance(event, events.Composed) else event

    patch.setattr(PublicCount, "rest_of", trusts)


def a_count_stands_before_anything(patch: Patch) -> None:
    def joined(count: PublicCount, event: events.Event, relation: qg.Relation) -> events.Event:
        first = count.event(relation)
        return event if first is None else events.Composed((first, event))

    patch.setattr(PublicCount, "before", joined)


@dataclass(frozen=True)
class Mutation:
    """A bug and the probe that must notice it."""

    bug: Callable[[Patch], None]
    probe: Probe


TABLE = [
    Mutation(third_epoch_reuses_the_seconds_key, changed_again_and_again),
    Mutation(openings_are_not_compared, put_back_by_rename),
    Mutation(touched_files_are_believed, put_back_within_an_opening),
    Mutation(a_vain_opening_makes_whole, put_back_and_opened_in_vain),
    Mutation(an_intended_epoch_is_taken_up, put_back_while_an_epoch_began),
    Mutation(epochs_by_transcript_alone, an_epoch_is_forgotten),
    Mutation(released_is_not_looked_at, a_checkpoint_is_newer),
    Mutation(seal_of_arrays_alone, altered),
    Mutation(seal_of_the_header_alone, altered),
    Mutation(lines_are_sealed_one_by_one, a_line_is_missing),
    Mutation(openings_are_not_told, nothing_is_spent_twice),
    Mutation(samples_are_counted_from_the_restart, samples_after_a_restart),
    Mutation(fresh_records_begin_again, samples_after_a_restart),
    Mutation(a_filter_is_full_again, a_filter_after_a_restart),
    Mutation(ends_count_this_process_alone, an_early_end_after_a_restart),
    Mutation(closed_entries_pay_again, a_closed_entry),
    Mutation(rows_from_the_last_64, correlated_rows_after_a_restart),
    Mutation(who_scores_trained_too, a_search_scores_strangers),
    Mutation(draws_are_counted_by_lines, a_party_after_lost_rounds),
    Mutation(a_certificates_first_release_is_not_compared, a_certificates_count),
    Mutation(a_count_stands_before_anything, a_certificates_count),
]


@pytest.mark.filterwarnings("ignore::quietgrad.core.errors.LedgerWarning")
@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.bug.__name__)
def test_the_probe_notices_the_bug_and_spares_the_sound_twin(mutation: Mutation, home: Path) -> None:
    (home / "sound").mkdir()
    mutation.probe(home / "sound")
    (home / "broken").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        mutation.bug(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            mutation.probe(home / "broken")
