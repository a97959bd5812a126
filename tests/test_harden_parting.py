"""The coordinator's last word: no honest one is refused, and no forged one is kept."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.federation import approved
from quietgrad.federation.exchange import Exchange
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan_file import PlanFile, parse_plan
from quietgrad.federation.provisioning import Credentials, provision
from quietgrad.federation.wire import Message, encode
from quietgrad.secure.identity import ProtocolError
from quietgrad.training.result import Result, load
from tests.faults import Fault, Faulty
from tests.hostile import PLAN

SECURE = PLAN.decode()
CURATOR = SECURE.replace('"secure"\nsecure = "masks"', '"curator"\nspare = 2')
LOCAL = SECURE.replace('"secure"\nsecure = "masks"', '"local"')
BARE = CURATOR.replace("[budget]\nepsilon = 1.0\ndelta = 1e-5\n", "").replace("spare", "private = false\nspare")
# Ends when its budget is used up, or after these steps: neither looks at the records.
FILTER = CURATOR.replace('"dp-gd"\nsteps = 3', '"dp-agd"\nmax_steps = 2')


def federation(
    text: str, home: Path, faults: list[Fault] | None = None
) -> tuple[PlanFile, Result, PartyCurator, PartyCurator]:
    """A federation that ran to its end, with both parties as they are before the last word arrives."""
    file = parse_plan(text)
    keys = {folder.name: Credentials.read(folder) for folder in provision(file.members, home / "keys")}
    rng = np.random.default_rng(7)
    parties = {}
    for name, n in zip(file.parties, file.sizes, strict=True):
        X = rng.normal(size=(n, 2))
        ledger = home / name / "ledger.jsonl" if file.budget else None
        data = (X, (X[:, 0] > 0).astype(int))
        parties[name] = approved.make_party(file, keys[name], data, folder=home / name, ledger=ledger)
    handlers = {name: party.handle for name, party in parties.items()}
    transport = Faulty(handlers, faults or ())
    exchange = Exchange(transport)
    result = approved.coordinate(file, keys["coordinator"], exchange, folder=home / "model")
    return file, result, parties["a"], parties["b"]


@pytest.mark.parametrize(
    "text", [SECURE, CURATOR, LOCAL, BARE, FILTER], ids=["secure", "curator", "local", "bare", "filter"]
)
def test_an_honest_statement_is_kept(text: str, tmp_path: Path) -> None:
    file, result, *parties = federation(text, tmp_path)
    for party in parties:
        home = tmp_path / party.name
        assert sum(party.answered().values()) > 0
        approved.save_model(approved.final_message(result), file, home, party)
        # Also as a coordinator that restarted after it had saved the result says it.
        again = approved.finished(file, tmp_path / "model")
        assert again is not None
        approved.save_model(approved.final_message(again), file, home, party)
        kept = load(home)
        assert kept.privacy == result.privacy
        assert kept.privacy.is_private is (file.budget is not None)
        party.discard()
        party.close()


def test_an_honest_statement_with_lost_rounds_is_kept(tmp_path: Path) -> None:
    text = CURATOR.replace("spare = 2", "quorum = 1")
    file, result, a, b = federation(text, tmp_path, [Fault("b", "outage", first=2, seconds=1e9)])
    assert result.details["lost_rounds"] == 2  # complete, without one
    for party in (a, b):
        approved.save_model(approved.final_message(result), file, tmp_path / party.name, party)
        party.close()


def less_epsilon(said: dict[str, Any]) -> None:
    said["privacy"]["epsilon"] = 0.01


def no_epsilon(said: dict[str, Any]) -> None:
    said["privacy"].update(epsilon=None, is_private=False)


def smaller_delta(said: dict[str, Any]) -> None:
    said["privacy"]["delta"] = 1e-9


def another_relation(said: dict[str, Any]) -> None:
    said["privacy"]["relation"] = "replace-one"


def fewer_releases(said: dict[str, Any]) -> None:
    said["privacy"]["releases"]["gradient"] = 1


def more_releases(said: dict[str, Any]) -> None:
    said["privacy"]["releases"]["gradient"] = 1000


def releases_of_something_else(said: dict[str, Any]) -> None:
    said["privacy"]["releases"]["hessian"] = 1


def cheaper_event(said: dict[str, Any]) -> None:
    """ε follows from the events; only the plan knows that there was less noise."""
    from quietgrad.privacy.events import gaussian

    said["privacy"].update(epsilon=0.5, event=gaussian(100.0, 3).to_json())


def more_noise(said: dict[str, Any]) -> None:
    said["privacy"]["noise_multiplier"] *= 10.0


def no_event(said: dict[str, Any]) -> None:
    said["privacy"]["event"] = None


def another_algorithm(said: dict[str, Any]) -> None:
    said["algorithm"] = "dp-sgd"


def another_plan(said: dict[str, Any]) -> None:
    said["details"]["plan_file"] = "0" * 64


def no_statement(said: dict[str, Any]) -> None:
    del said["privacy"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanFile, Result, PartyCurator, PartyCurator]:
    return federation(CURATOR, tmp_path_factory.mktemp("ran"))


FORGED = (
    less_epsilon, no_epsilon, smaller_delta, another_relation, fewer_releases, more_releases,
    releases_of_something_else, cheaper_event, more_noise, no_event, another_algorithm, another_plan, no_statement,
)  # fmt: skip


@pytest.mark.parametrize("change", FORGED)
def test_a_forged_statement_is_not_kept(
    ran: tuple[PlanFile, Result, PartyCurator, PartyCurator],
    change: Callable[[dict[str, Any]], None],
    tmp_path: Path,
) -> None:
    file, result, party, _ = ran
    said = copy.deepcopy(result.to_json())
    change(said)
    with pytest.raises(ProtocolError, match="refutes") as refusal:
        approved.save_model(spoken(said, result), file, tmp_path / "out", party)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_plan_without_noise_is_not_called_private(tmp_path: Path) -> None:
    file, result, party, other = federation(BARE, tmp_path)
    said = copy.deepcopy(result.to_json())
    said["privacy"].update(epsilon=1.0, delta=1e-5, relation="add-remove")
    with pytest.raises(ProtocolError, match="adds no noise"):
        approved.save_model(spoken(said, result), file, tmp_path / "out", party)
    party.close()
    other.close()


def spoken(said: dict[str, Any], result: Result) -> bytearray:
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return encode(Message("model", {}, {"params": np.asarray(result.params, np.float64), "result": text}))
