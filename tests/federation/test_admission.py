"""The coordinator's door: nobody without a certificate keeps members out, and refusals say why on both sides."""

from __future__ import annotations

import datetime
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.federation import provisioning
from quietgrad.federation.exchange import Responder
from quietgrad.federation.provisioning import Credentials, provision
from quietgrad.federation.revocation import check_none_revoked, revoke
from quietgrad.federation.secure.identity import DropoutError, ProtocolError
from quietgrad.federation.transport import tls_connection
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from quietgrad.federation.transport.tls_connection import HELLO, LARGEST, REFUSED, REPLY, context_for, receive
from tests.federation.talk import Talk


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Credentials]:
    return {home.name: Credentials.read(home) for home in provision(["a", "coordinator"], tmp_path / "keys")}


class Coordinator:
    """A TLS server and what it says."""

    def __init__(self, keys: dict[str, Credentials]) -> None:
        self.said: list[str] = []
        self.server = TlsServer(
            keys["coordinator"], ("127.0.0.1", 0), ["a"], agreement="plan", most=1000, tell=self.said.append
        )
        self.talk = Talk(self.server)

    def party(self, credentials: Credentials, patience: float = 60.0) -> tuple[threading.Thread, list[object]]:
        ends: list[object] = []
        party = TlsParty(
            credentials, ("127.0.0.1", self.server.port), Responder(bytes, "plan"), agreement="plan", most=1000,
            patience=patience, tell=self.said.append,
        )  # fmt: skip

        def run() -> None:
            try:
                ends.append(party.run())
            except QuietgradError as error:
                ends.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread, ends


@pytest.fixture
def coordinator(keys: dict[str, Credentials]) -> Iterator[Coordinator]:
    made = Coordinator(keys)
    yield made
    made.talk.finish("over")


def connected(coordinator: Coordinator, credentials: Credentials) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", coordinator.server.port), timeout=60.0)
    return context_for(credentials).wrap_socket(sock, server_hostname="coordinator")


def test_idle_callers_keep_nobody_out(coordinator: Coordinator, keys: dict[str, Credentials]) -> None:
    idle = [socket.create_connection(("127.0.0.1", coordinator.server.port)) for _ in range(200)]
    try:
        thread, _ = coordinator.party(keys["a"])
        replies, missing = coordinator.talk.exchange({"a": b"hello"}, timeout=60.0)
        assert (bytes(replies["a"]), missing) == (b"hello", [])
        assert coordinator.server._door.waiting <= 70
        gone = idle[0]  # the oldest made room
        gone.settimeout(60.0)
        assert gone.recv(1) == b""
    finally:
        for sock in idle:
            sock.close()
    coordinator.talk.finish("over")
    thread.join(timeout=60.0)


def test_a_lasting_flood_keeps_nobody_out(coordinator: Coordinator, keys: dict[str, Credentials]) -> None:
    """New idle callers at 50 a second, without end and from the party's own address: more than any place count."""
    over, held = threading.Event(), []

    def flood() -> None:
        while not over.wait(0.02):
            try:
                held.append(socket.create_connection(("127.0.0.1", coordinator.server.port), timeout=5.0))
            except OSError:  # turned away at once: that is an answer
                continue

    pressing = threading.Thread(target=flood, daemon=True)
    pressing.start()
    try:
        while len(held) < 100:  # longer than the door's patience with the first of them
            time.sleep(0.05)
        thread, _ = coordinator.party(keys["a"])
        for turn in range(20):  # and the exchange goes on under it
            said = str(turn).encode()
            replies, missing = coordinator.talk.exchange({"a": said}, timeout=60.0)
            assert (bytes(replies["a"]), missing) == (said, [])
            time.sleep(0.05)
        assert coordinator.server._door.waiting <= 70
    finally:
        over.set()
        pressing.join(timeout=60.0)
        for sock in held:
            sock.close()
    coordinator.talk.finish("over")
    thread.join(timeout=60.0)


@pytest.mark.parametrize("body", [b"[" * 4000, b'{"a":' * 600, b"[]", b"null", b"\xff\xfe", b"7"])
def test_nonsense_from_a_member_is_answered(
    coordinator: Coordinator, keys: dict[str, Credentials], body: bytes, recwarn: pytest.WarningsRecorder
) -> None:
    with connected(coordinator, keys["a"]) as line:
        tls_connection.send(line, HELLO, body, deadline=time.monotonic() + 60.0)
        try:
            kind, reason = receive(line, most=1000, deadline=None)
            assert kind == REFUSED
            assert reason
        except OSError:
            pass  # hung up is an answer too
    # A thread that died of it would leave a warning, and the seat's next caller outside.
    with connected(coordinator, keys["a"]) as line:
        tls_connection.send(line, HELLO, b'{"version": 99}', deadline=time.monotonic() + 60.0)
        assert receive(line, most=1000, deadline=None)[0] == REFUSED
    assert not [w for w in recwarn if issubclass(w.category, pytest.PytestUnhandledThreadExceptionWarning)]


def test_a_frame_that_is_only_announced_takes_no_memory() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(struct.pack("<IB", LARGEST, REPLY) + b"x")
    theirs.close()
    sizes = []
    real = bytearray

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            sizes.append(len(self))

        def extend(self, more: bytes) -> None:
            super().extend(more)
            sizes.append(len(self))

    with (
        ours,
        mock.patch.object(tls_connection, "bytearray", Counted, create=True),
        pytest.raises(ConnectionResetError),
    ):
        receive(ours, most=LARGEST, deadline=None)
    assert max(sizes) <= 1 << 20


def certificates(tmp_path: Path, shift: datetime.timedelta) -> dict[str, Credentials]:
    """Keys whose certificates were made ``shift`` from now."""
    then = datetime.datetime.now(datetime.UTC) + shift
    with mock.patch.object(provisioning, "_now", return_value=then):
        homes = provision(["a", "coordinator"], tmp_path / f"keys{shift.days}")
    return {home.name: Credentials.read(home) for home in homes}


@pytest.mark.parametrize(
    ("days", "there", "here"),
    [(-900, "has expired", "expired"), (30, "is not yet valid", "the clocks")],
)
def test_reasons_on_both_sides(tmp_path: Path, days: int, there: str, here: str) -> None:
    keys = certificates(tmp_path, datetime.timedelta(days=days))
    with pytest.raises(DataError, match=r"expired on|valid from"):
        context_for(keys["a"])  # the first to notice is its owner
    good = {home.name: Credentials.read(home) for home in provision(["a", "coordinator"], tmp_path / "good")}
    (keys["a"].folder / "ca.pem").write_bytes((good["a"].folder / "ca.pem").read_bytes())
    trusting = good["coordinator"].folder / "ca.pem"
    trusting.write_bytes((keys["coordinator"].folder / "ca.pem").read_bytes() + trusting.read_bytes())
    with mock.patch.object(Credentials, "check_dates"):
        coordinator = Coordinator(good)
        thread, ends = coordinator.party(keys["a"], patience=0.2)
        thread.join(timeout=60.0)
    coordinator.server.close()
    assert any(there in words for words in coordinator.said), coordinator.said
    assert isinstance(ends[0], DropoutError)
    assert here in str(ends[0])


def test_a_foreign_certificate_is_called_so(
    coordinator: Coordinator, tmp_path: Path, keys: dict[str, Credentials]
) -> None:
    foreign = {home.name: Credentials.read(home) for home in provision(["a", "coordinator"], tmp_path / "foreign")}
    thread, ends = coordinator.party(foreign["a"])
    thread.join(timeout=60.0)
    assert isinstance(ends[0], ProtocolError)
    assert "its certificate is not accepted" in str(ends[0])
    (foreign["a"].folder / "ca.pem").write_bytes((keys["a"].folder / "ca.pem").read_bytes())
    with pytest.raises(DataError, match="not signed by the authority"):
        context_for(foreign["a"])
    with mock.patch.object(Credentials, "check_dates"):
        thread, ends = coordinator.party(foreign["a"], patience=0.2)
        thread.join(timeout=60.0)
    assert "compare ca.pem" in str(ends[0])
    assert any("turned away a caller from 127.0.0.1: its certificate" in said for said in coordinator.said)


def test_a_revoked_party_is_turned_away_even_when_it_is_here(
    coordinator: Coordinator, keys: dict[str, Credentials]
) -> None:
    thread, ends = coordinator.party(keys["a"])
    assert coordinator.talk.exchange({"a": b"1"}, timeout=60.0)[1] == []
    revoke(keys["coordinator"].folder, "a", "its laptop was stolen")
    _, missing = coordinator.talk.exchange({"a": b"2"}, timeout=2.0)
    assert missing == ["a"]
    thread.join(timeout=60.0)
    assert "revoked" in str(ends[0])
    with pytest.raises(DataError, match="agree on a plan without it"):
        check_none_revoked(keys["coordinator"].folder, ("a", "coordinator"))
