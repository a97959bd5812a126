"""One list of revoked members: the coordinator signs it, every member keeps it and goes by it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.core.errors import DataError
from quietgrad.federation import (
    Identity,
    MaskingParty,
    MaskingServer,
    Roster,
    SecureSumConfig,
    SharingParty,
    SumServer,
)
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.provisioning import Credentials, provision
from quietgrad.federation.revocation import LIST, Revocations, revoke, revoked
from quietgrad.federation.run_status import read_status, status_rows
from quietgrad.federation.secure.choreography import ANSWERS
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.simulation import InProcess
from tests.federation.talk import approval, toml_plan

NAMES = ["a", "b", "c", "d", "coordinator"]


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Credentials]:
    return {home.name: Credentials.read(home) for home in provision(NAMES, tmp_path / "keys")}


def handed_out(keys: dict[str, Credentials]) -> dict[str, Any]:
    return keys["coordinator"].revocations.handed_out()


def test_a_list_is_kept_and_only_grows(keys: dict[str, Credentials]) -> None:
    assert handed_out(keys) == {}
    revoke(keys["coordinator"].folder, "c", "its laptop was stolen")
    first = handed_out(keys)
    revoke(keys["coordinator"].folder, "d", "it left")
    keys["a"].revocations.take(handed_out(keys))
    keys["a"].revocations.take(first)  # an older one, replayed
    keys["a"].revocations.take({})
    assert list(revoked(keys["a"].folder)) == ["c", "d"]
    assert revoked(keys["b"].folder) == {}


def forged(keys: dict[str, Credentials], how: str) -> dict[str, Any]:
    revoke(keys["coordinator"].folder, "c", "stolen")
    fields: dict[str, Any] = handed_out(keys)
    packed = fields["revocations"]
    if how == "another name":
        packed["revoked"] = {"b": "stolen"}
    elif how == "a reason":
        packed["revoked"]["c"] = "nothing"
    elif how == "signed by a party":
        revoke(keys["b"].folder, "c", "stolen")
        fields = Revocations(keys["b"].folder, keys["b"].publics, keys["b"].identity).handed_out()
    elif how == "of another federation":
        other = dict(keys["coordinator"].publics) | {"d": bytes(32)}
        fields = Revocations(keys["coordinator"].folder, other, keys["coordinator"].identity).handed_out()
    elif how == "no signature":
        del packed["signature"]
    else:
        fields["revocations"] = {
            "a list": [["c"]],
            "a number": 7,
            "nothing": None,
            "nested": {"revoked": {"c": {}}},
        }[how]
    return fields


@pytest.mark.parametrize(
    "how",
    ["another name", "a reason", "signed by a party", "of another federation", "no signature", "a list", "a number",
     "nothing", "nested"],
)  # fmt: skip
def test_a_list_that_the_coordinator_did_not_sign_is_refused(keys: dict[str, Credentials], how: str) -> None:
    with pytest.raises(ProtocolError, match="coordinator: hands out a list"):
        keys["a"].revocations.take(forged(keys, how))
    assert not (keys["a"].folder / LIST).exists()


def test_the_coordinator_cannot_be_listed_and_a_damaged_list_is_refused(keys: dict[str, Credentials]) -> None:
    (keys["coordinator"].folder / "revoked.json").write_text(json.dumps({"coordinator": "itself"}))
    with pytest.raises(ProtocolError):
        keys["a"].revocations.take(handed_out(keys))
    (keys["a"].folder / LIST).write_text("{")
    with pytest.raises(DataError, match="repair or restore"):
        keys["a"].revocations()


def roles(mode: Any, revoked_at: dict[str, dict[str, str]], parties: int = 4) -> tuple[list[Any], list[Any]]:
    enough: dict[str, Any] = {"honest": 2} if mode == "masks" else {"quorum": 2}
    terms = SecureSumConfig(mode, parties=parties, dimension=2, bound=1.0, sigma=0.5, **enough)
    servers = ["server"] if mode == "masks" else ["server-1", "server-2"]
    people = [Identity(f"party-{i}") for i in range(parties)] + [Identity(name) for name in servers]
    roster, run = Roster.of(people), os.urandom(16)
    kinds = (MaskingParty, MaskingServer) if mode == "masks" else (SharingParty, SumServer)
    made = []
    for i, person in enumerate(people):
        known = partial(lambda name: revoked_at.get(name, {}), person.name)
        made.append(kinds[i >= parties](person, roster, terms, run, revoked=known))
    return made[:parties], made[parties:]


def test_a_masking_party_meets_no_revoked_party_and_joins_no_sum_with_one() -> None:
    listed: dict[str, dict[str, str]] = {}
    parties, [server] = roles("masks", listed)
    server.meet([party.hello for party in parties])
    listed["party-0"] = {"party-3": "stolen"}
    with pytest.raises(ProtocolError, match=r"party-3: is revoked here \(stolen\)"):
        parties[0].meet(server.introductions()[0])
    listed.clear()
    parties, [server] = roles("masks", listed)
    server.meet([party.hello for party in parties])
    for party in parties:
        party.meet(server.introductions()[party.me])
    delivery = server.relay(0, {party.me: party.prepare(0) for party in parties})
    listed["party-0"] = {"party-3": "stolen"}  # after they have met
    with pytest.raises(ProtocolError, match=r"party-3: is revoked here .* and a member of the sum"):
        parties[0].deliver(0, delivery[0])


def test_a_sum_server_leaves_a_revoked_party_out() -> None:
    listed = {"server-1": {"party-3": "stolen"}}
    parties, servers = roles("servers", listed)
    hellos = {f"{k:04}": role.hello for k, role in enumerate([*servers, *parties])}
    replies = [ANSWERS[SumServer]["meet"].of(server, 0, hellos) for server in servers]
    assert [list(reply.left_out) for reply in replies] == [["0005"], []]
    listed["party-0"] = {"server-2": "stolen"}
    with pytest.raises(ProtocolError, match="server-2: is revoked here"):
        parties[0].meet([server.hello for server in servers])


def test_a_revocation_counts_for_those_who_have_met_already() -> None:
    listed: dict[str, dict[str, str]] = {}
    parties, servers = roles("servers", listed)
    for role in (*parties, *servers):
        role.meet([other.hello for other in (*servers, *parties)])
    shares = {party.me: party.share(0, [0.1, 0.2]) for party in parties}
    listed["server-1"] = {"party-3": "stolen"}
    servers[0].receive(0, {i: frames[servers[0].me] for i, frames in shares.items()})
    assert servers[0].left_out == {"party-3": "is revoked here (stolen)"}
    listed |= {"party-0": {"server-2": "stolen"}, "server-1": {"server-2": "stolen"}}
    with pytest.raises(ProtocolError, match="server-2: is revoked here"):
        parties[0].share(1, [0.1, 0.2])
    with pytest.raises(ProtocolError, match="server-2: is revoked here"):
        servers[0].partial(0, {})


PLAN = toml_plan(
    dict.fromkeys("abcd", 50), 'trust = "secure"\nsecure = "masks"\nquorum = 3\nspare = 3', steps=3, features=2
)


def members(home: Path, keys: dict[str, Credentials]) -> dict[str, Any]:
    made = {}
    for k, name in enumerate("abcd"):
        X = np.random.default_rng(k).normal(size=(50, 2))
        mine = approval(PLAN, keys[name].folder, home / name)
        made[name] = mine.site(mine.party((X, (X[:, 0] > 0) * 1)), lambda words: None)
    return made


@pytest.mark.parametrize("coordinator_goes_by_it", [True, False])
def test_a_run_goes_on_without_a_revoked_party_at_all_members(
    coordinator_goes_by_it: bool, tmp_path: Path, keys: dict[str, Credentials]
) -> None:
    """Also where the coordinator asks the revoked party on: the others take part in no sum with it."""
    sites = members(tmp_path, keys)
    revoke(keys["coordinator"].folder, "d", "stolen")
    mine = approval(PLAN, keys["coordinator"].folder, tmp_path / "model")
    over = InProcess({})
    over._sites = sites
    folder = keys["coordinator"].folder
    exchange = Exchange(
        over, agreement=mine.digest, revoked=(lambda: revoked(folder)) if coordinator_goes_by_it else dict
    )
    told: list[str] = []
    result = mine.train(exchange, told.append)
    assert result.privacy.is_private
    assert any("d is revoked here" in words or "d: is revoked" in words for words in [*result.privacy.notes, *told])
    for name in "abc":
        assert revoked(keys[name].folder) == {"d": revoked(folder)["d"]}
    assert result.privacy.releases["gradient"] <= 3 + 1
    keys["d"].revocations.take(handed_out(keys))
    with pytest.raises(DataError, match="the coordinator has revoked this member"):
        _ = approval(PLAN, keys["d"].folder, tmp_path / "more").credentials


def test_status_of_every_role(tmp_path: Path, keys: dict[str, Credentials]) -> None:
    members(tmp_path, keys)
    revoke(keys["a"].folder, "c", "stolen")
    rows = dict(status_rows(read_status(tmp_path / "b")))
    assert rows["role"] == "party"
    assert rows["words"] == "waiting for the coordinator"
    assert rows["certificate"].endswith("days")
    assert "n=200" in rows["plan"]
    older = {"member": "a", "federation": "f", "line": "round 1 of 3", "words": "running", "time": "now"}
    assert [title for title, _ in status_rows(older)] == ["federation", "rounds", "words", "time"]
    late = {**older, "certificate_until": "2020-01-01", "away": {"c": "hung up"}, "revoked": {"d": "stolen"}}
    assert [text for _, text in status_rows(late)][-2:] == ["c (hung up)", "d (stolen)"]
    assert "renew it" in dict(status_rows(late))["certificate"]
