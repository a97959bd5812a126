"""No link is followed: at each path that a party or a coordinator writes, a link's target stays as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.errors import QuietgradError
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, simulate
from quietgrad.federation.journal import Journal
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.provisioning import provision, request
from quietgrad.federation.revocation import revoke
from quietgrad.tables.losses import Logistic
from tests.federation.talk import approval, ask, opened, toml_plan

SECRET = b"not yours: 0123456789abcdef0123456789abcdef"
PLAN = toml_plan({"a": 4, "b": 4}, steps=2, features=2)
DATA = (np.ones((4, 2)), np.array([0, 1, 0, 1]))


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    return path


def linked(folder: Path, name: str, victim: Path, *, hard: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    if hard:
        os.link(victim, folder / name)
    else:
        (folder / name).symlink_to(victim)


JOURNALS = ("a.journal", "a.journal.key", "a.reply", "progress.json", "result.json", "model.safetensors")


def party_run(folder: Path) -> None:
    """A party that is opened, withdraws, is opened again, and clears away."""
    keys = folder.parent / "keys"
    if not keys.exists():
        provision(["a", "b", "coordinator"], keys)
    party = approval(PLAN, keys / "a", folder).party(DATA)
    try:
        opened(party).withdraw()
        opened(party, "s")
        ask(party.handle, GradientQuery(np.zeros(2), 1.0), run="s")
        party.discard()
    finally:
        party.close()


@pytest.mark.parametrize("name", JOURNALS)
@pytest.mark.parametrize("hard", [False, True], ids=["link", "hard link"])
def test_a_partys_files_follow_no_link(name: str, hard: bool, victim: Path, tmp_path: Path) -> None:
    if hard and name == "a.journal":
        pytest.skip("a journal of foreign bytes is refused; hard links of it are the owner's own")
    linked(tmp_path / "run", name, victim, hard=hard)
    with contextlib.suppress(QuietgradError):  # a refusal before anything is asked is as good
        party_run(tmp_path / "run")
    assert victim.read_bytes() == SECRET


@pytest.mark.parametrize("name", ["a.journal.key", "a.reply"])
def test_a_link_put_there_in_mid_run_is_removed_and_not_written_through(
    name: str, victim: Path, tmp_path: Path
) -> None:
    provision(["a", "b", "coordinator"], tmp_path / "keys")
    party = opened(approval(PLAN, tmp_path / "keys" / "a", tmp_path / "run").party(DATA))
    linked(tmp_path / "run", name, victim)
    party.discard()
    party.close()
    assert victim.read_bytes() == SECRET
    assert not os.path.lexists(tmp_path / "run" / name)


def test_a_journals_key_that_is_a_link_is_not_believed(victim: Path, tmp_path: Path) -> None:
    victim.write_bytes(bytes(32))
    journal = Journal(tmp_path / "run", "a", "digest")
    journal.bind("r")
    journal.close()
    linked(tmp_path / "run", "a.journal.key", victim)
    with pytest.raises(QuietgradError, match="is a link"):
        Journal(tmp_path / "run", "a", "digest")
    assert victim.read_bytes() == bytes(32)


COORDINATORS = ("aggregates.bin", "result.json", "model.safetensors", "party-1.journal", "party-1.journal.key")


@pytest.mark.parametrize("name", COORDINATORS)
def test_a_coordinators_files_follow_no_link(name: str, victim: Path, tmp_path: Path) -> None:
    linked(tmp_path / "run", name, victim)
    parties = [Party(*DATA), Party(*DATA)]
    with contextlib.suppress(QuietgradError):
        simulate(
            qg.DPGD(steps=2), Logistic(), parties, budget=qg.Budget(1.0, 1e-4), folder=tmp_path / "run",
            keep=lambda result: result.save(tmp_path / "run"),
        )  # fmt: skip
    assert victim.read_bytes() == SECRET


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "request": ("a.request.json", lambda home: request("a", home)),
    "key": ("key.pem", lambda home: request("a", home)),
    "identity": ("identity.key", lambda home: request("a", home)),
    "revocations": ("revoked.json", lambda home: revoke(home, "b", "stolen")),
}


@pytest.mark.parametrize("what", WRITERS)
def test_keys_and_requests_follow_no_link(what: str, victim: Path, tmp_path: Path) -> None:
    name, write = WRITERS[what]
    linked(tmp_path / "home", name, victim)
    with contextlib.suppress(QuietgradError):
        write(tmp_path / "home")
    assert victim.read_bytes() == SECRET


def test_an_approval_replaces_a_link(victim: Path, tmp_path: Path) -> None:
    Path("plan.toml").write_text(PLAN)
    Path("rows.csv").write_text("u,v,ill\n" + "0.1,0.2,0\n" * 4)
    provision(["a", "b", "coordinator"], tmp_path / "keys")
    for name in ("approval.json", "run/run.json", "run/ledger.jsonl.head"):
        linked(tmp_path / Path(name).parent, Path(name).name, victim)
    words = ["approve", "plan.toml", "--keys", "keys/a", "--data", "rows.csv", "--out", "run"]
    main(["federate", *words, "--file", "approval.json", "--pin", parse_plan(PLAN).digest])
    assert victim.read_bytes() == SECRET
