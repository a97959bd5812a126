"""The coordinator's last word: no honest one is refused, and no forged one is kept."""

from __future__ import annotations

import copy
import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.core.accounting.events import gaussian
from quietgrad.federation import approved
from quietgrad.federation.approved import Approved, final_message
from quietgrad.federation.exchange import FINISH, Envelope, Exchange, agreement_of, body
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan_file import PlanFile, parse_plan
from quietgrad.federation.provisioning import provision
from quietgrad.federation.secure.identity import ProtocolError
from quietgrad.federation.wire import Message, blobs, decode, encode
from quietgrad.methods.result import Result, load
from tests.behaviour.hostile import PLAN
from tests.federation.faults import Fault, Faulty
from tests.federation.talk import approval

SECURE = PLAN.decode()
CURATOR = SECURE.replace('"secure"\nsecure = "masks"', '"curator"\nspare = 2')
LOCAL = SECURE.replace('"secure"\nsecure = "masks"', '"local"')
BARE = CURATOR.replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", "").replace("spare", "private = false\nspare")
Ran = tuple[PlanFile, Result, list[tuple[Approved, PartyCurator]]]


def federation(text: str, home: Path, faults: list[Fault] | None = None) -> Ran:
    """A federation that ran to its end, with both parties as they are before the last word arrives."""
    file = parse_plan(text)
    provision(file.members, home / "keys")
    rng = np.random.default_rng(7)
    parties = []
    for name, n in zip(file.parties, file.sizes, strict=True):
        X = rng.normal(size=(n, 2))
        mine = approval(text, home / "keys" / name, home / name)
        parties.append((mine, mine.party((X, (X[:, 0] > 0).astype(int)))))
    exchange = Exchange(Faulty({party.name: party.handle for _, party in parties}, faults or ()))
    result = approval(text, home / "keys" / "coordinator", home / "model").train(exchange)
    return file, result, parties


@pytest.mark.parametrize("text", [SECURE, CURATOR, LOCAL, BARE], ids=["secure", "curator", "local", "bare"])
def test_an_honest_statement_is_kept(text: str, tmp_path: Path) -> None:
    file, result, parties = federation(text, tmp_path)
    for mine, party in parties:
        assert sum(party.answered().values()) > 0
        mine.save_model(final_message(result), party)
        # Also as a coordinator that restarted after it had saved the result says it.
        again = approval(text, tmp_path / "keys" / "coordinator", tmp_path / "model").finished()
        assert again is not None
        mine.save_model(final_message(again), party)
        kept = load(mine.folder)
        # Who pays is each member's own word; where nothing is private nobody does.
        assert replace(kept.privacy, account=None) == replace(result.privacy, account=None)
        assert kept.privacy.is_private is (file.budget is not None)
        party.discard()
        party.close()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return federation(CURATOR, tmp_path_factory.mktemp("ran"))


FORGED: dict[str, tuple[str, dict[str, Any]]] = {
    "less ε": ("privacy", {"epsilon": 0.01}),
    "no ε": ("privacy", {"epsilon": None, "is_private": False}),
    "smaller δ": ("privacy", {"delta": 1e-9}),
    "another relation": ("privacy", {"relation": "replace-one"}),
    "fewer releases": ("privacy", {"releases": {"gradient": 1}}),
    "more releases": ("privacy", {"releases": {"gradient": 1000}}),
    "releases of something else": ("privacy", {"releases": {"gradient": 3, "hessian": 1}}),
    # ε follows from the events; only the plan knows that there was less noise.
    "a cheaper event": ("privacy", {"epsilon": 0.5, "event": gaussian(100.0, 3).to_json()}),
    "more noise": ("privacy", {"noise_multiplier": 99.0}),
    "no event": ("privacy", {"event": None}),
    "another algorithm": ("", {"algorithm": "dp-sgd"}),
    "another plan": ("details", {"plan_file": "0" * 64}),
    "no statement": ("", {"privacy": None}),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_statement_is_not_kept(ran: Ran, name: str) -> None:
    _, result, [(mine, party), _] = ran
    said = copy.deepcopy(result.to_json())
    section, change = FORGED[name]
    (said[section] if section else said).update(change)
    with pytest.raises(ProtocolError, match="refutes") as refusal:
        mine.save_model(spoken(said, result.params), party)
    assert "\n" not in str(refusal.value)
    assert not (mine.folder / "result.json").exists()


def test_a_number_beyond_all_numbers_is_no_statement(ran: Ran) -> None:
    _, result, [(mine, party), _] = ran
    said = json.dumps(
        {**result.to_json(), "privacy": {**result.to_json()["privacy"], "releases": {"gradient": 777}}}
    )
    text = np.frombuffer(said.replace("777", "1e400").encode(), np.uint8)
    with pytest.raises(ProtocolError, match="handed out"):
        mine.save_model(encode(Message("model", {}, {"params": np.asarray(result.params), "result": text})), party)


def test_a_full_disk_at_the_end_is_not_the_end(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model can be handed out again; what tells of progress never stops a party."""
    _, result, [(mine, party), _] = ran

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(approved, "write_atomically", full)
    monkeypatch.setattr(Path, "write_text", full)
    site = mine.site(party, lambda words: None)
    end = encode(Message("end", {"words": "done"}, blobs({"parting": bytes(final_message(result))})))
    frame = Envelope(FINISH, 1, bytes(16), agreement_of(mine.digest)).around(end)
    assert decode(body(site.answer(frame))).fields["code"] == "failed"
    assert not site.over
    assert decode(site._handler(encode(Message("open", {"run": party.run, "plan": party.plan.digest})))).kind != ""


@pytest.mark.parametrize("params", [np.full(2, np.nan), np.zeros(3), np.zeros((1, 2))])
def test_what_is_not_the_plans_model_is_not_kept(ran: Ran, params: Any) -> None:
    _, result, [(mine, party), _] = ran
    with pytest.raises(ProtocolError, match="not a model"):
        mine.save_model(spoken(result.to_json(), params), party)
    assert not (mine.folder / "model.safetensors").exists()


def test_a_plan_without_noise_is_not_called_private(tmp_path: Path) -> None:
    _, result, [(mine, party), (_, other)] = federation(BARE, tmp_path)
    said = copy.deepcopy(result.to_json())
    said["privacy"].update(epsilon=1.0, delta=1e-5, relation="add-remove")
    with pytest.raises(ProtocolError, match="adds no noise"):
        mine.save_model(spoken(said, result.params), party)
    party.close()
    other.close()


def spoken(said: dict[str, Any], params: Any) -> bytearray:
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return encode(Message("model", {}, {"params": np.asarray(params, np.float64), "result": text}))
