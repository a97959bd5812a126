"""NVIDIA FLARE as the engine: calls that hang, raise or lie, what sites allow, and one real run over mutual TLS."""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.cli.flare import _follow
from quietgrad.federation.flare import KIT, SiteSettings, environment, prepare_kit, write_job
from quietgrad.federation.provision import Credentials
from quietgrad.federation.queries import pack
from quietgrad.federation.toml_plan import parse_plan, read_plan
from quietgrad.federation.wire import Message, decode, encode
from quietgrad.objectives.base import Gradient
from quietgrad.privacy.ledger import Ledger
from quietgrad.secure.faults import DropoutError
from tests.test_federate_network import TWO, ended, folder, start, two
from tests.test_federate_plan import TEXT

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (extra `federated`)")
__all__ = ["folder", "start"]  # fixtures of the other file


class Proxy:
    """Stands for FLARE's proxy of a site."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.calls, self.words = answer, 0, ""

    def __call__(self, timeout: float) -> Proxy:
        return self

    def answer(self, session: str, number: int, message: bytes) -> Any:
        self.calls += 1
        return self._answer(number, message)

    def finish(self, words: str, parting: bytes) -> bool:
        self.words = words
        return True


def transport_to(**answers: Any) -> tuple[Any, dict[str, Proxy]]:
    from quietgrad.federation.transport.nvflare import CollabTransport

    proxies = {name: Proxy(answer) for name, answer in answers.items()}
    return CollabTransport(proxies, "digest"), proxies


def test_calls_that_hang_raise_or_lie_are_counted_and_named() -> None:
    gate = threading.Event()

    def hang(number: int, message: bytes) -> bytes:
        gate.wait(30.0)
        return b"late"

    def fail(number: int, message: bytes) -> bytes:
        raise RuntimeError("site is gone")

    transport, proxies = transport_to(
        good=lambda number, message: message * 2, hung=hang, gone=fail, liar=lambda number, message: "text"
    )
    before = threading.active_count()
    for _ in range(5):
        begun = time.monotonic()
        replies, missing = transport.exchange(dict.fromkeys(proxies, b"m"), timeout=0.3)
        assert time.monotonic() - begun < 20.0
        assert ({name: bytes(r) for name, r in replies.items()}, missing) == (
            {"good": b"mm"},
            ["hung", "gone", "liar"],
        )
    assert proxies["hung"].calls == 1  # a call that hangs is not made again
    assert threading.active_count() == before
    gate.set()
    limit = time.monotonic() + 20.0
    replies = {}
    while "hung" not in replies and time.monotonic() < limit:
        replies, _ = transport.exchange({"hung": b"m"}, timeout=1.0)
    assert proxies["hung"].calls == 2
    transport.finish("over")
    assert {name: proxy.words for name, proxy in proxies.items()} == dict.fromkeys(proxies, "over")


def test_site_answers_the_coordinator_only_and_never_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from quietgrad.federation import flare_job

    caller = "server"
    monkeypatch.setattr(flare_job, "collab", type("Fake", (), {"caller": property(lambda _: caller)})())
    site = flare_job.Site()
    assert decode(site.answer("s", 1, b"")).fields["reason"] == "is not ready"
    calls: list[bytes] = []

    def handler(message: Any) -> bytes:
        calls.append(bytes(message))
        return b"reply %d" % len(calls)

    site._handler, site._file = handler, parse_plan(TEXT)
    session = f"{site._file.digest}:1"
    assert [site.answer(session, n, b"x") for n in (1, 1, 2)] == [b"reply 1", b"reply 1", b"reply 2"]
    assert "not the one that was approved" in decode(site.answer("another:1", 3, b"x")).fields["reason"]
    caller = "hospital-2"
    assert "only the coordinator" in decode(site.answer(session, 3, b"x")).fields["reason"]
    assert site.finish("over", b"") is False
    assert len(calls) == 2


def test_second_job_in_one_party_command_gets_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's server may submit jobs as it likes; the approval is of the party's folder, not of a job."""
    from quietgrad.federation import flare_job

    two(folder, TWO.replace('trust = "curator"', 'trust = "local"'))
    (folder / "kit" / "local").mkdir(parents=True)
    SiteSettings("plan.toml", "keys/a", "a", data="a.npz").write(folder / "kit")
    workspace = SimpleNamespace(get_site_config_dir=lambda: str(folder / "kit" / "local"))
    monkeypatch.setattr(flare_job, "collab", SimpleNamespace(caller="server", workspace=workspace))
    file = read_plan("plan.toml")

    def job() -> Any:
        site = flare_job.Site()
        site.start()
        return site

    def say(site: Any, number: int, kind: str, arrays: Any = None, **fields: Any) -> Any:
        message = bytes(encode(Message(kind, {"plan": file.plan.digest, **fields}, arrays or {})))
        return decode(site.answer(f"{file.digest}:1", number, message))

    first = job()
    query, arrays = pack(Gradient(np.zeros(3), 1.0))
    assert say(first, 1, "open", run="r1").kind == "ready"
    ask = {"run": "r1", "round": 0, "slot": "gradient", "draw": 0, "rho": None, "query": query}
    assert say(first, 2, "ask", arrays, **ask).kind == "sum"
    assert "another process answers for a" in say(job(), 1, "open", run="r2").fields["reason"]
    assert first.finish("aborted", b"") is False
    first._member.close()  # its process ends
    second = job()
    assert "one run was approved here" in say(second, 1, "open", run="r2").fields["reason"]
    assert say(second, 2, "open", run="r1").fields["round"] == 0
    assert say(second, 3, "ask", arrays, **ask).kind == "refused"  # the same round
    second._member.close()
    assert len(Ledger("a/ledger.jsonl").book().held) == 1


def test_kits_allow_two_classes_no_code_and_no_log_streaming(folder: Path) -> None:
    (folder / "plan.toml").write_text(TWO)
    assert main(["federate", "provision", "plan.toml", "--engine", "nvflare", "--out", "keys"]) == 0
    credentials = Credentials.read("keys/a")
    assert not [path for path in Path("keys").rglob("*.key") if path.stat().st_mode & 0o077]
    kit = prepare_kit(credentials, SiteSettings("plan.toml", "keys/a", "a", data="a.npz"))
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert [name.rpartition(".")[2] for name in resources["class_allow_list"]] == [
        "CollabController", "CollabExecutor", "Coordinator", "Site",
    ]  # fmt: skip
    assert resources["allow_log_streaming"] is False
    assert "/tmp/nvflare" not in json.dumps(resources)
    rights = json.loads((kit / "local" / "authorization.json").read_text())["permissions"]["project_admin"]
    assert (rights["byoc"], rights["shell_commands"]) == ("none", "none")
    assert json.loads((kit / "startup" / "fed_client.json").read_text())["client"]["connection_security"] == "mtls"
    job = write_job(read_plan("plan.toml"), folder)
    assert not list(job.rglob("*.py"))
    assert main(["federate", "party", "plan.toml", "--keys", "keys/b", "--data", "none.npz", "--engine", "x"]) == 2
    (Path("keys/b") / KIT / "startup").rename("elsewhere")
    words = ["party", "plan.toml", "--keys", "keys/b", "--data", "none.npz", "--engine", "nvflare"]
    assert main(["federate", *words]) == 1


@pytest.mark.parametrize(("features", "chunk"), [(3, 1 << 16), (20_000, 1 << 18), (400_000, 1 << 20)])
def test_chunks_are_about_as_long_as_the_vectors(features: int, chunk: int) -> None:
    """FLARE makes a buffer of a chunk for every message; its own megabyte made the heap grow with the rounds."""
    settings = environment(parse_plan(TWO.replace("features = 3", f"features = {features}")))
    assert int(settings["NVFLARE_STREAMING_CHUNK_SIZE"]) == chunk


def test_site_waits_for_a_job_as_long_as_its_patience(folder: Path) -> None:
    process: Any = SimpleNamespace(poll=lambda: None)
    said: list[str] = []
    with pytest.raises(DropoutError, match="coordinator: has not started a job here for 0 s"):
        _follow(folder, process, said.append, patience=0.0)
    settings = SiteSettings("plan.toml", "keys/a", str(folder))
    settings.tell("the job has started")
    settings.end("the run is complete", done=True)
    assert _follow(folder, process, said.append, patience=0.0) == ("the run is complete", True)
    assert said == ["the job has started"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at Linux's table of sockets")
def test_two_sites_on_flare(folder: Path, start: Any) -> None:
    (folder / "plan.toml").write_text(with_two_free_ports(TWO.replace("steps = 300", "steps = 12")))
    assert main(["federate", "provision", "plan.toml", "--engine", "nvflare", "--out", "keys"]) == 0
    rng = np.random.default_rng(3)
    for name, n in (("a", 60), ("b", 40)):
        X = rng.normal(size=(n, 3))
        np.savez(folder / f"{name}.npz", X=X, y=(X[:, 0] > 0).astype(int))
    engine = ("--engine", "nvflare")
    running = [start("server", "plan.toml", "--keys", "keys/coordinator", "--out", "model", "--json", *engine)]
    for name in ("a", "b"):
        words = ("party", "plan.toml", "--keys", f"keys/{name}", "--data", f"{name}.npz", "--out", name)
        running.append(start(*words, "--json", *engine))
    port = read_plan("plan.toml").port
    heard = listening()
    while not {port, port + 1} <= {each for _, each in heard} and running[0].poll() is None:
        time.sleep(0.05)
        heard = listening()
    assert {host for host, each in heard if each in (port, port + 1)} == {"127.0.0.1"}  # the admin's port too
    for process in running:
        code, out, err = ended(process)
        assert (code, err) == (0, ""), err
        assert json.loads(out)
    result = qg.load(folder / "model")
    assert (result.privacy.is_private, result.details["lost_rounds"]) == (True, 0)
    for name in ("a", "b"):
        np.testing.assert_array_equal(qg.load(folder / name).params, result.params)
        assert (folder / name / "ledger.jsonl").exists()


def listening() -> set[tuple[str, int]]:
    """Addresses and ports that anything on this machine listens on, as Linux tells."""
    found = set()
    for table, size in (("tcp", 4), ("tcp6", 16)):
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        for address, port in (row[1].split(":") for row in rows if row[3] == "0A"):
            octets = bytes.fromhex(address)
            words = b"".join(octets[i : i + 4][::-1] for i in range(0, size, 4))
            found.add((str(ipaddress.ip_address(words)), int(port, 16)))
    return found


def with_two_free_ports(text: str) -> str:
    """FLARE's server takes the plan's port and the next one."""
    for port in range(20_000 + (time.time_ns() % 20_000), 65_000, 7):
        try:
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
        except PermissionError:
            break
        except OSError:
            continue
        return text.replace("127.0.0.1:7443", f"127.0.0.1:{port}")
    pytest.skip("loopback sockets are not permitted here")
