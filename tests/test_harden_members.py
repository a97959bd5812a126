"""What the members of a federation say and do when something is wrong: a thief, a full disk, silence, FLARE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quietgrad.cli import main
from quietgrad.errors import BudgetError, DataError
from quietgrad.federation import approved
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.provisioning import check_none_revoked, provision
from tests.hostile import PLAN

TEXT = PLAN.decode()


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    file = parse_plan(TEXT)
    return {home.name: home for home in provision(file.members, tmp_path / "keys")}


def test_revoke_command(keys: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["federate", "revoke", "b", "--keys", str(keys["a"]), "--reason", "its laptop was stolen", "--json"]
    assert main(words) == 0
    (said,) = json.loads(capsys.readouterr().out).items()
    assert (said[0], said[1].partition(": ")[2]) == ("b", "its laptop was stolen")
    with pytest.raises(DataError, match="'b' is revoked here"):
        check_none_revoked(keys["a"], parse_plan(TEXT).members)
    check_none_revoked(keys["coordinator"], parse_plan(TEXT).members)  # each revokes for itself
    for name in ("a", "nobody", "../b"):  # itself, and who is no member
        assert main(["federate", "revoke", name, "--keys", str(keys["a"])]) == 2
    assert list(json.loads((keys["a"] / "revoked.json").read_text())) == ["b"]


def test_digests_can_be_read_out_and_typed_in(
    tmp_path: Path, keys: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from quietgrad.cli.federate_roles import approval

    plan = tmp_path / "plan.toml"
    plan.write_text(TEXT)
    digest = parse_plan(TEXT).digest
    groups = approved.readable_digest(digest)
    assert groups.replace(" ", "") == digest[:20]
    assert main(["federate", "show", str(plan)]) == 0
    assert f"to compare by telephone: {groups}" in capsys.readouterr().out
    assert approval(plan, keys["a"], plan.parent, pin=groups.upper()).digest == digest
    wrong = ("1" if groups[0] == "0" else "0") + groups[1:]
    with pytest.raises(BudgetError, match="nothing was given"):
        approval(plan, keys["a"], plan.parent, pin=wrong)
