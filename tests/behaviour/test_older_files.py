"""Files that an earlier version wrote are still read: a run folder, its ledger, and a signed certificate of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quietgrad.assurance.certificates import check, issue, public_key, read
from quietgrad.cli import main
from quietgrad.cli.audit import audit_folder
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.methods.result import load

MADE = Path(__file__).parent / "made_before"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MADE, tmp_path / "made"))


def test_a_certificate_is_verified(made: Path) -> None:
    key = public_key(str(made / "signer.key.pub"))
    found = check(
        read(made / "certificate.json"), public_key=key, model=made / "run/model.safetensors",
        ledger=made / "ledger.jsonl",
    )  # fmt: skip
    assert [finding for finding in found.findings if finding.ok is False] == []
    assert {finding.what for finding in found.findings if finding.ok} >= {"signature", "plan", "proof", "ledger"}


def test_a_run_is_loaded_and_certified_as_it_was(made: Path) -> None:
    assert load(made / "run").privacy.epsilon == pytest.approx(2.0, abs=1e-3)
    assert len(Ledger(made / "ledger.jsonl").entries()) == 3
    old, new = read(made / "certificate.json").body, issue(made / "run", ledger=made / "ledger.jsonl").body
    assert {part for part in new if new[part] != old.get(part)} == {"issued", "ledger", "source", "statement"}
    assert new["ledger"]["lines"][:-1] == old["ledger"]["lines"]
    assert new["ledger"]["lines"][-1]["kind"] == "certificate"


def test_a_run_is_audited(made: Path) -> None:
    assert audit_folder(made / "run", 400).verdict != "violation"


def test_another_version_is_refused_in_one_sentence(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = made / "certificate.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 3}))
    assert main(["verify", str(file)]) == 1
    assert "version" in capsys.readouterr().err
