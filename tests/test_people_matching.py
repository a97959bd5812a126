"""People known to several parties, matched by a keyed hash: each is kept by one party, and nobody else can tell."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.audit.federated import attack_shared_person, kept_once, priced
from quietgrad.certificates import check, issue
from quietgrad.certificates.document import PrivacyCertificate
from quietgrad.cli import main
from quietgrad.errors import DataError
from quietgrad.federation import Party, approved, simulate
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.matching import HashedIdList, RecordLinkage, new_key, read_key, read_matching, write_list
from quietgrad.federation.parties import matched
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import MATCHED, FederatedPlan
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.planning import BUT_FOR_LISTS
from quietgrad.federation.simulation import assemble
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.objectives.privacy_units import RecordsWithIds
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.rng import seed_key
from tests.faults import Fault, faulty
from tests.test_people_federation import TWO_CLINICS

LOSS = qg.objectives.Logistic()
KEY = seed_key(7)


def party(first: int, people: int = 60, seed: int = 0, **settings: Any) -> Party:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(first, first + people), rng.integers(1, 6, people))
    X = rng.normal(size=(len(ids), 2))
    return Party(X, (X[:, 0] > 0) * 1.0, person=ids, **settings)


def three(**settings: Any) -> list[Party]:
    """People 0…119, of whom 20 are known to two parties and 20 to all three."""
    return [party(0, 60, 0, **settings), party(40, 60, 1, **settings), party(20, 80, 2, **settings)]


def alone(parties: Sequence[Party]) -> tuple[Sequence[Party], dict[str, Any]]:
    """A mutant: people in several parties are priced as if in one."""
    return parties, {"parties_per_person": 1}


def test_a_person_of_two_parties_is_covered_by_either_way_and_a_price_for_one_is_caught() -> None:
    """False alarms of each attack: 10⁻⁶."""
    for way, runs, verdict in ((priced, 700, "pass"), (kept_once, 700, "pass"), (alone, 3000, "violation")):
        assert attack_shared_person(runs, way).verdict == verdict


def test_everybody_is_kept_once_and_nobody_moves_when_somebody_else_leaves() -> None:
    before, _ = matched(three(), KEY)
    ids = [set(each.person.tolist()) for each in before]
    assert set().union(*ids) == set(range(100))
    assert sum(map(len, ids)) == 100
    assert all(1 <= len(ids[k] & set(range(40, 60))) < 20 for k in range(3))  # not all of them in one place
    for gone in (0, 30, 45, 90):  # known to one, two, three, two
        fewer = []
        for each in three():
            stays = each.person != gone
            fewer.append(Party(each.X[stays], each.y[stays], person=each.person[stays]))
        after, _ = matched(fewer, KEY)
        assert [set(each.person.tolist()) for each in after] == [each - {gone} for each in ids]


FIXED = qg.DPSGD(steps=2, batch_size=20, sampling="fixed-size")


@pytest.mark.parametrize(
    ("method", "trust"),
    [
        (qg.DPGD(steps=2), "curator"),
        (qg.DPGD(steps=2), "local"),
        (qg.DPSGD(steps=2, batch_size=20), "curator"),
        (FIXED, "secure"),
    ],
    ids=["full", "own noise", "poisson", "fixed"],
)
def test_matched_people_cost_what_disjoint_ones_do(method: Any, trust: Any) -> None:
    secure: Any = "masks" if trust == "secure" else None
    budget = Budget(2.0, 1e-5, Relation.REPLACE_ONE)  # which has no price for samples of people in several parties
    result = simulate(method, LOSS, three(), budget=budget, trust=trust, secure=secure, match_people=True)
    assert sum(result.details["sizes"]) == result.n_public == 100
    if method is not FIXED:  # whose local batches are rounded
        alone = qg.plan(method, n=100, budget=budget, unit="person")
        assert result.privacy.noise_multiplier == pytest.approx(alone.noise_multiplier, rel=1e-3)
    assert any("matched between the parties by a keyed hash" in note for note in result.privacy.notes)
    assert "ε is not about whether somebody is known to a party" in str(result.privacy.adversary)


def test_the_noise_that_is_heard_is_for_one_contribution() -> None:
    """Silent parties of the same people: 2000 numbers, whose deviation is within 8 % but for 10⁻⁶."""
    silent = [Party(np.zeros((40, 2000)), np.zeros(40), person=np.repeat(np.arange(20), 2)) for _ in range(2)]
    method = qg.DPGD(steps=1, learning_rate=1.0, clip=1.0)
    result = simulate(method, LOSS, silent, budget=Budget(1.0, 1e-5), match_people=True)
    assert np.std(result.params) == pytest.approx(result.privacy.noise_multiplier / 20, rel=0.08)


def test_ids_are_the_same_however_they_are_held_and_kinds_are_not_mixed() -> None:
    a, b, c = three()
    held = [
        Party(a.X, a.y, person=a.person.astype(float)),
        Party(b.X, b.y, person=b.person.tolist()),
        Party(c.X, c.y, person=c.person.astype(np.uint16)),
    ]
    kept = [set(map(int, each.person)) for each in matched(held, KEY)[0]]
    assert kept == [set(each.person.tolist()) for each in matched([a, b, c], KEY)[0]]
    with pytest.raises(DataError, match="write them alike"):
        matched([a, Party(b.X, b.y, person=b.person.astype(str))], KEY)
    broken = b.person.astype(float)
    broken[3] = np.nan
    with pytest.raises(DataError, match="a record has no id"):
        matched([a, Party(b.X, b.y, person=broken)], KEY)
    with pytest.raises(DataError, match="there are no ids"):
        matched([a, Party(b.X[:0], b.y[:0], person=b.person[:0])], KEY)
    with pytest.raises(ValueError, match="give all parties person="):
        matched([a, Party(b.X, b.y)], KEY)
    with pytest.raises(ValueError, match="leave out parties_per_person"):
        simulate(qg.DPGD(steps=1), LOSS, [a, b], budget=None, match_people=True, parties_per_person=2)


def test_other_keys_lists_and_tables_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    parties = three(ledger=None)
    plan, _ = assemble(
        qg.DPGD(steps=1), LOSS, matched(parties, KEY)[0], budget=Budget(1.0, 1e-5), unit="person",
        matching=matched(parties, KEY)[1],
    )  # fmt: skip
    a = parties[0]
    held, ledger = RecordsWithIds((a.X, a.y), a.person), tmp_path / "ledger.jsonl"

    def taking_part(matching: Any, data: Any = held) -> Any:
        return PartyCurator("party-1", LOSS, data, plan, ledger=ledger, matching=matching)

    good = matched(parties, KEY)[1]
    with pytest.raises(DataError, match="give the people key and the lists"):
        taking_part(None)
    with pytest.raises(DataError, match="the lists that the plan was agreed on"):
        taking_part(matched(parties, seed_key(8))[1])  # another key
    fewer = [a, party(40, 59, 1), parties[2]]
    with pytest.raises(DataError, match="the lists that the plan was agreed on"):
        taking_part(matched(fewer, KEY)[1])  # another list
    somebody_new = RecordsWithIds((np.vstack([a.X, a.X[:1]]), np.append(a.y, 1.0)), np.append(a.person, 777))
    with pytest.raises(DataError, match="not in its list") as error:
        taking_part(good, somebody_new)
    assert "777" not in str(error.value)
    gone = a.person != 45  # who left since is missed by nobody
    kept = len(taking_part(good, RecordsWithIds((a.X[gone], a.y[gone]), a.person[gone])).records)
    assert kept in (len(taking_part(good).records) - 1, len(taking_part(good).records))
    assert not ledger.exists()
    plain, _ = assemble(qg.DPGD(steps=1), LOSS, [a], budget=Budget(1.0, 1e-5), unit="person", parties_per_person=1)
    with pytest.raises(DataError, match="the lists that the plan was agreed on"):
        PartyCurator("party-1", LOSS, held, plain, matching=good)
    with pytest.raises(ValueError, match="leave out parties_per_person"):
        FederatedPlan.from_json({**plan.to_json(), "parties_per_person": 2})
    assert FederatedPlan.from_json(plan.to_json()).digest == plan.digest
    assert "matched" not in plain.to_json()


def test_files_of_lists_and_keys(tmp_path: Path) -> None:
    key = new_key(tmp_path / "people.key")
    assert read_key(tmp_path / "people.key") == key
    with pytest.raises(DataError, match="exists already"):
        new_key(tmp_path / "people.key")
    with pytest.raises(DataError, match="for the parties alone"):
        read_key(tmp_path / "no.key")
    path = write_list(tmp_path / "lists", HashedIdList.of("north", ["ann", "bob"], key), key)
    assert path.stat().st_mode & 0o077 == 0
    assert b"ann" not in path.read_bytes()
    with pytest.raises(DataError, match=r"south.people: is missing"):
        RecordLinkage.read(key, tmp_path / "lists", ["north", "south"])
    with pytest.raises(DataError, match="both or neither"):
        read_matching(tmp_path / "people.key", None, ["north"])
    with pytest.raises(DataError, match="another people key"):
        RecordLinkage.read(seed_key(0), tmp_path / "lists", ["north"])
    path.rename(path.with_name("south.people"))
    with pytest.raises(DataError, match="is the list of 'north'"):
        RecordLinkage.read(key, tmp_path / "lists", ["south"])
    whole = (tmp_path / "lists" / "south.people").read_bytes()
    flipped = whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:]
    for altered in (whole[:-1], flipped, b"", b"[]\n" + b"x" * 32, whole * 2):
        with pytest.raises(DataError, match=r"not a list of people|or altered"):
            HashedIdList.parse(altered, key)
    (tmp_path / "people.key").chmod(0o644)
    with pytest.raises(DataError, match="others may read"):
        read_key(tmp_path / "people.key")


def test_the_coordinator_hears_neither_ids_nor_hashes_nor_how_many_are_shared() -> None:
    people = [f"patient-{k:05d}" for k in range(40)]
    tables = [people[:25], people[15:]]
    parties, matching = matched(
        [Party(np.ones((len(ids), 2)), np.zeros(len(ids)), person=ids, n_public=30) for ids in tables], KEY
    )
    plan, federation = assemble(
        qg.DPGD(steps=2), LOSS, parties, budget=Budget(1.0, 1e-5), unit="person", matching=matching
    )
    heard: list[bytes] = [json.dumps(plan.to_json()).encode()]

    def listening(handle: Any) -> Any:
        def answer(data: Any) -> Any:
            reply = handle(data)
            heard.extend((bytes(data), bytes(reply)))
            return reply

        return answer

    handlers = {name: listening(handle) for name, handle in federation.handlers.items()}
    curator = FederatedCurator(LOSS, InProcess(handlers), identity=federation.identity, roster=federation.roster)
    from quietgrad.federation.simulation import train

    train(qg.DPGD(steps=2), curator, plan, np.zeros(2))
    said = b"".join(heard)
    assert len(heard) > 5
    assert matching.digest.encode() in said
    assert b"patient" not in said
    for each in matching.lists.values():
        assert not any(one in said or one.hex().encode() in said for one in each.hashes)


def test_an_interrupted_run_finds_its_key_again(tmp_path: Path) -> None:
    def go(**settings: Any) -> Any:
        return simulate(
            qg.DPGD(steps=4),
            LOSS,
            three(),
            budget=Budget(1.0, 1e-5),
            match_people=True,
            folder=tmp_path,
            **settings,
        )

    def stop(progress: qg.Progress) -> None:
        if progress.releases == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(callback=stop)
    assert go().privacy.epsilon <= 1.0


def test_parties_that_drop_out_do_not_hand_their_people_on() -> None:
    result = simulate(
        qg.DPGD(steps=3), LOSS, three(), budget=Budget(1.0, 1e-5), match_people=True, quorum=2, spare=2,
        transport=faulty([Fault("party-2", "leave", 2, last=10**6)]),
    )  # fmt: skip
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon <= 1.0


def test_the_command_line_from_lists_to_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, key = tmp_path / "plan.toml", tmp_path / "people.key"
    plan.write_text(TWO_CLINICS.format(how=""))
    for name, first in (("a", 0), ("b", 40)):
        each = party(first, 60, first)
        rows = [f"{u},{v},p{i},{int(t)}" for (u, v), i, t in zip(each.X, each.person, each.y, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["x1,x2,patient,y", *rows]) + "\n")

    def said(*words: str) -> str:
        main(["federate", *words])
        heard = capsys.readouterr()
        return " ".join((heard.out or heard.err).split())

    def match(name: str, *more: str) -> str:
        given = ["--data", str(tmp_path / f"{name}.csv"), "--key", str(key), "--lists", str(tmp_path / "lists")]
        return said("match", str(plan), "--name", name, *given, "--json", *more)

    assert "for the parties alone" in match("a")
    first = json.loads(match("a", "--new-key"))
    assert "b; put them into" in first["still missing"]
    told = {name: json.loads(match(name)) for name in ("b", "a")}
    assert told["a"]["[federation]"] == told["b"]["[federation]"]
    counts = [int(told[name][f"[[party]] {name}"].split()[2].rstrip(",")) for name in ("a", "b")]
    assert sum(counts) == 100
    file = parse_plan(TWO_CLINICS.format(how=told["a"]["[federation]"]))
    assert (file.plan.reach, file.plan.parties_per_person) == (1.0, 1)
    plan.write_text(TWO_CLINICS.format(how=told["a"]["[federation]"]))
    assert "matched between the parties by a keyed hash" in said("show", str(plan))
    matching = read_matching(key, tmp_path / "lists", file.parties)
    held = approved.party_data(approved.records(file, tmp_path / "a.csv"))
    assert len(PartyCurator("a", file.objective, held, file.plan, matching=matching).records) == counts[0]


def test_a_certificate_says_that_people_were_matched(tmp_path: Path) -> None:
    simulate(
        qg.DPGD(steps=2), LOSS, three(), budget=Budget(1.0, 1e-5), match_people=True,
        ledger=tmp_path / "ledger.jsonl", keep=lambda result: result.save(tmp_path),
    )  # fmt: skip
    document = issue(tmp_path)
    assert "matched their people by lists" in document.to_bytes().decode()
    assert check(document).ok
    stronger = json.loads(json.dumps(document.body))
    stronger["claim"]["adversary"] = stronger["claim"]["adversary"].removesuffix(BUT_FOR_LISTS)
    assert stronger["claim"]["adversary"] != document.body["claim"]["adversary"]
    assert not check(PrivacyCertificate(stronger)).ok
    stronger["claim"]["notes"] = [note for note in stronger["claim"]["notes"] if MATCHED not in note]
    assert not check(PrivacyCertificate(stronger)).ok
