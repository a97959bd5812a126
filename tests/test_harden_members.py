"""What the members of a federation say and do when something is wrong: a thief, a full disk, silence, FLARE."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from quietgrad.cli import main
from quietgrad.errors import BudgetError, DataError
from quietgrad.federation import approved
from quietgrad.federation.plan_file import parse_plan
from quietgrad.federation.provisioning import Credentials, check_none_revoked, provision
from quietgrad.secure.identity import DropoutError
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


def test_a_party_drops_a_silent_coordinator(keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that welcomes and then says nothing is called anew, without alarm, and given up when it is gone."""
    from quietgrad.federation.exchange import Responder
    from quietgrad.federation.transport import tls
    from quietgrad.federation.transport.tls import TlsParty
    from quietgrad.federation.transport.tls_connection import WELCOME, context_for, receive, send

    listener = socket.create_server(("127.0.0.1", 0))
    held: list[ssl.SSLSocket] = []

    def silent() -> None:
        context = context_for(Credentials.read(keys["coordinator"]))
        with listener:
            for _ in range(2):
                line = context.wrap_socket(listener.accept()[0], server_side=True)
                held.append(line)
                receive(line, most=1 << 16, deadline=time.monotonic() + 30.0)
                welcome = json.dumps({"session": "s", "plan": "plan"}).encode()
                send(line, WELCOME, welcome, deadline=time.monotonic() + 30.0)

    thread = threading.Thread(target=silent, daemon=True)
    thread.start()
    said: list[str] = []
    party = TlsParty(
        Credentials.read(keys["a"]), listener.getsockname(), Responder(lambda message: b""), agreement="plan",
        most=1 << 16, timeout=1.0, patience=0.4, tell=said.append,
    )  # fmt: skip
    monkeypatch.setattr(tls, "_SILENCE", 0.4)
    with pytest.raises(DropoutError, match="coordinator: cannot be reached"):
        party.run()
    assert not [words for words in said if words.startswith("lost the coordinator")]
    for line in held:
        line.close()
    thread.join(timeout=30.0)
