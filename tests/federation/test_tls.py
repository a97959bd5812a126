"""The TLS transport on loopback: certificates, plans, lost connections, slow and oversized answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.core.errors import BudgetError, QuietgradError
from quietgrad.federation.exchange import Responder
from quietgrad.federation.provisioning import Credentials, provision
from quietgrad.federation.transport import Bytes, tls_connection
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from tests.federation.talk import Talk

MOST = 100_000


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        pytest.skip("loopback sockets are not permitted here")
    made = provision(["a", "b", "coordinator"], tmp_path_factory.mktemp("keys") / "all")
    return {home.name: Credentials.read(home) for home in made}


class Members:
    """A coordinator and parties in threads."""

    def __init__(self, keys: dict[str, Credentials]) -> None:
        self.keys = keys
        self.said: list[str] = []
        self.server = TlsServer(
            keys["coordinator"], ("127.0.0.1", 0), ["a", "b"],
            agreement="plan", most=MOST, timeout=20.0, tell=self.said.append,
        )  # fmt: skip
        self.talk = Talk(self.server)
        self.ends: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []

    def join(self, name: str, handler: Any = None, label: str | None = None, **settings: Any) -> TlsParty:
        settings = {"agreement": "plan", "most": MOST, "patience": 10.0, **settings}
        credentials = settings.pop("credentials", self.keys[name])
        address = ("127.0.0.1", settings.pop("port", self.server.port))
        self.handed: dict[str, bytes] = {}

        def finish(words: str, parting: Bytes) -> None:
            self.handed[label or name] = bytes(parting)

        site = Responder(handler or (lambda data: bytes(data)[::-1]), "plan", finish)
        party = TlsParty(credentials, address, site, **settings)

        def run() -> None:
            try:
                self.ends[label or name] = party.run()
            except QuietgradError as error:
                self.ends[label or name] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()
        return party

    def end(self, label: str) -> Any:
        limit = time.monotonic() + 20.0
        while label not in self.ends and time.monotonic() < limit:
            time.sleep(0.01)
        return self.ends[label]


@pytest.fixture
def members(keys: dict[str, Credentials]) -> Iterator[Members]:
    made = Members(keys)
    yield made
    made.talk.finish("over")
    for thread in made.threads:
        thread.join(timeout=20.0)
        assert not thread.is_alive()


def test_messages_and_the_end_reach_everybody(members: Members) -> None:
    members.join("a")
    members.join("b", lambda data: bytes(data) * 2)
    for t in range(5):
        replies, missing = members.talk.exchange({"a": b"x%d" % t, "b": b"y"}, timeout=20.0)
        assert (bytes(replies["a"]), bytes(replies["b"]), missing) == (b"%dx" % t, b"yy", [])
    large = np.random.default_rng(0).bytes(90_000)
    replies, _ = members.talk.exchange({"a": large}, timeout=20.0)
    assert bytes(replies["a"]) == large[::-1]
    members.talk.finish("well done", b"model")
    assert [members.end(name) for name in ("a", "b")] == ["well done"] * 2
    assert members.handed == {"a": b"model", "b": b"model"}


def test_slow_answer_is_missing_and_never_taken_for_another(members: Members) -> None:
    gate = threading.Event()

    def slow(data: bytearray) -> bytes:
        if bytes(data) == b"one":
            gate.wait(20.0)
        return bytes(data)

    members.join("a", slow)
    members.join("b")
    replies, missing = members.talk.exchange({"a": b"one", "b": b"12"}, timeout=3.0)
    assert (missing, bytes(replies["b"])) == (["a"], b"21")
    gate.set()
    replies, missing = members.talk.exchange({"a": b"two", "b": b"34"}, timeout=20.0)
    assert (bytes(replies["a"]), missing) == (b"two", [])


def test_lost_reply_is_repeated_and_not_computed_again(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []
    cut = threading.Event()
    real = tls_connection.send

    def send(connection: Any, kind: int, *parts: Any, deadline: float) -> None:
        if kind == tls_connection.REPLY and not cut.is_set():
            cut.set()
            raise ConnectionResetError("cable")
        real(connection, kind, *parts, deadline=deadline)

    monkeypatch.setattr(tls_connection, "send", send)

    def handler(data: bytearray) -> bytes:
        calls.append(bytes(data))
        return b"answer %d" % len(calls)

    members.join("a", handler)
    replies, missing = members.talk.exchange({"a": b"ask"}, timeout=20.0)
    assert (bytes(replies["a"]), missing, calls, cut.is_set()) == (b"answer 1", [], [b"ask"], True)
    replies, _ = members.talk.exchange({"a": b"ask"}, timeout=20.0)
    assert bytes(replies["a"]) == b"answer 2"


def test_oversized_answer_is_refused_before_it_is_read(members: Members) -> None:
    members.join("a", lambda data: bytes(MOST + 100) if bytes(data) == b"big" else b"ok")
    _, missing = members.talk.exchange({"a": b"big"}, timeout=3.0)
    assert missing == ["a"]
    assert any("announces a frame" in words for words in members.said)
    assert bytes(members.talk.exchange({"a": b"small"}, timeout=20.0)[0]["a"]) == b"ok"


def test_other_plan_is_turned_away_by_name(members: Members) -> None:
    members.join("a", agreement="another plan")
    assert "plan file is not the coordinator's" in str(members.end("a"))
    assert any(words.startswith("turned away a:") for words in members.said)
    members.talk.exchange({"a": b"1"}, timeout=0.2)
    assert "compare the digests" in members.talk.why["a"]


def test_party_refuses_a_coordinator_with_another_plan(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members.server, "_stranger", lambda *_: None)  # a coordinator who takes anybody
    members.join("a", agreement="what was approved here")
    assert isinstance(members.end("a"), BudgetError)


def test_strangers_and_impostors_are_refused(members: Members, tmp_path: Path) -> None:
    foreign = Credentials.read(provision(["a", "coordinator"], tmp_path / "foreign")[0])
    members.join("a", label="foreign authority", credentials=foreign, patience=0.5)
    assert "certificate is not accepted" in str(members.end("foreign authority"))
    # A certificate of the right authority, by someone without a seat.
    extra = provision(["a", "b", "c", "coordinator"], tmp_path / "more")
    server = TlsServer(Credentials.read(extra[3]), ("127.0.0.1", 0), ["a"], agreement="plan", most=MOST)
    members.join("a", label="c", credentials=Credentials.read(extra[2]), port=server.port)
    assert "c is not a member of this federation" in str(members.end("c"))
    server.close()
    # A party who poses as the coordinator has the wrong certificate.
    posing = replace(members.keys["b"], name="coordinator")
    with pytest.MonkeyPatch.context() as patch:  # an impostor does not check its own certificate
        patch.setattr(Credentials, "check_dates", lambda self: None)
        fake = TlsServer(posing, ("127.0.0.1", 0), ["a"], agreement="plan", most=MOST)
    members.join("a", label="fooled", port=fake.port)
    assert "unsuitable certificate purpose" in str(members.end("fooled"))
    fake.close()


def test_second_process_with_the_same_keys_takes_the_seat(members: Members) -> None:
    members.join("a", lambda data: b"first", label="first")
    assert bytes(members.talk.exchange({"a": b"?"}, timeout=20.0)[0]["a"]) == b"first"
    members.join("a", lambda data: b"second", label="second")
    assert "another process with the same keys" in str(members.end("first"))
    assert bytes(members.talk.exchange({"a": b"?"}, timeout=20.0)[0]["a"]) == b"second"
