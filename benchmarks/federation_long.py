"""One round of a vector of 7 million numbers, ten parties: masks of 32 and 64 bits beside stock FLARE and Flower.

    QUIETGRAD_FLOWER=... python benchmarks/federation_long.py      # the bin folder of an environment with Flower

Every party is a process of its own. Ours talk over TLS and mask, seal, add noise and open; each answers a question
that carries the parameters in float32. FLARE's clients add 1 to the float32 vector that they were sent, over TLS;
Flower's return it, without TLS. Kept are medians over five rounds, three of Flower: wall seconds of a round, CPU
seconds of all parties and of the server, bytes, and how much a party's memory rises over what it was before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import ROOT, save
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.noise.rng import SecureStream
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.exchange import Exchange, Responder
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.provisioning import Credentials, provision
from quietgrad.federation.rounds import largest_reply
from quietgrad.federation.secure.discrete_gaussian import discrete_gaussian
from quietgrad.federation.secure.identity import Roster
from quietgrad.federation.secure.ring import add_rounded
from quietgrad.federation.transport.tls import TlsParty, TlsServer
from quietgrad.methods.dp_sgd import DPSGD

RESULT = Path(__file__).parent / "results" / "federation_long.json"
PARTIES, ROUNDS, WARM = 10, 5, 1
NAMES = tuple(f"p{k}" for k in range(PARTIES))
SECONDS = 600.0


class Fixed:
    """An objective whose records contribute a vector that is there already: what is measured is the round."""

    silent_batches = False

    def __init__(self, dimension: int) -> None:
        import torch

        from quietgrad.core.session.objectives import NoRegularizer

        self.regularizer = NoRegularizer()
        self._start = torch.zeros(dimension)

    def prepare(self, data: Any) -> Any:
        return self

    dim, features = property(lambda self: len(self._start)), 0

    def __len__(self) -> int:
        return 100

    def contents(self) -> Any:
        yield b"fixed"

    fingerprint_parts = contents

    def initial(self, records: Any) -> Any:
        return self._start

    def add(self, batch: Any, points: Any, rule: Any, out: Any) -> None:
        out[::1000] += 1e-3


def plan_of(dimension: int, bits: int) -> tuple[Any, FederatedPlan]:
    objective: Any = Fixed(dimension)
    plan = federate(
        DPSGD(steps=ROUNDS + WARM, batch_size=200), objective, names=NAMES, sizes=[100] * PARTIES,
        shape=Shape(dimension), budget=Budget(4.0, 1e-4), trust="secure", secure="masks", ring=bits,
    )  # fmt: skip
    return objective, plan


def used() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def party(folder: Path, name: str, dimension: int, bits: int, port: int) -> None:
    """One party's process: answers until the end, and says what it used."""
    objective, plan = plan_of(dimension, bits)
    keys = Credentials.read(folder / "keys" / name)
    roster = keys.roster((*NAMES, "coordinator"))
    mine = PartyCurator(name, objective, None, plan, identity=keys.identity, roster=roster)
    if bits == 32:  # what a process compiles and builds once is not a round's
        small = np.zeros(8, np.uint32)
        add_rounded(small, np.zeros(8), bound=1.0, step=1.0, dither=SecureStream(bytes(32), "warm"), t=0)
        discrete_gaussian(plan.terms(dimension).share_sigma).add_to(small, SecureStream(bytes(32), "warm"), 1)
    discrete_gaussian(plan.terms(dimension).share_sigma)
    before, begun = resident(), used()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    words: dict[str, Any] = {}

    def finish(said: str, model: Any) -> None:
        peak = next(
            int(r.split()[1]) * 1024 for r in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in r
        )
        words.update(cpu=used() - begun, rise=peak - before)

    site = Responder(mine.handle, "bench", finish, keys.identity)
    TlsParty(
        keys, ("127.0.0.1", port), site, agreement="bench", most=largest_reply(plan), timeout=SECONDS,
        patience=SECONDS,
    ).run()  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(words))


def ours(dimension: int, bits: int) -> dict[str, Any]:
    """Rounds of ours over TLS."""
    from quietgrad.core.session.queries import GradientQuery

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        provision([*NAMES, "coordinator"], folder / "keys")
        keys = Credentials.read(folder / "keys" / "coordinator")
        objective, plan = plan_of(dimension, bits)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        server = TlsServer(
            keys, ("127.0.0.1", port), list(NAMES), agreement="bench", most=largest_reply(plan), timeout=SECONDS,
            tell=lambda words: None,
        )  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "QUIETGRAD_STATE": str(folder / "state")}
        words = [sys.executable, __file__, "--party", str(folder), str(dimension), str(bits), str(port)]
        running = [subprocess.Popen([*words, name], env=environment) for name in NAMES]
        try:
            exchange = Exchange(server, agreement="bench", timeout=SECONDS, grace=SECONDS, most=largest_reply(plan))
            roster: Roster = keys.roster((*NAMES, "coordinator"))
            curator = FederatedCurator(objective, exchange, identity=keys.identity, roster=roster)
            session = curator.open(plan, SECONDS)
            walls, cpus = [], []
            for _ in range(ROUNDS + WARM):
                begun, cpu = time.monotonic(), used()
                session.release("gradient", GradientQuery(objective.initial(None), 1.0))
                walls.append(time.monotonic() - begun)
                cpus.append(used() - cpu)
            session.close("steps")
            exchange.finish("over", b"\0" * 8, 60.0, list(NAMES))
            for process in running:
                process.wait(timeout=60)
            told = [json.loads((folder / f"{name}.json").read_text()) for name in NAMES]
        finally:
            for process in running:
                process.kill()
                process.wait()
            server.close()
    server_cpu = statistics.median(cpus[WARM:])
    party_cpu = statistics.median(each["cpu"] for each in told) / (ROUNDS + WARM)
    return {
        "bits": bits, "seconds": statistics.median(walls[WARM:]), "server_cpu": server_cpu, "party_cpu": party_cpu,
        "all_cpu": server_cpu + PARTIES * party_cpu,
        "party_rise_mb": max(each["rise"] for each in told) / 1e6,
        "copies_of_the_float64_vector": max(each["rise"] for each in told) / (8 * dimension),
        "masked_vector_mb": dimension * bits / 8e6, "slack_of_the_run": plan.slack,
        "noise_over_zc": plan.scale(plan.noise_multiplier, 1.0, dimension) / plan.noise_multiplier,
    }  # fmt: skip


def roles(dimension: int, bits: int) -> dict[str, Any]:
    """CPU of the roles of one round in one process, without a network: one party's work, and the server's."""
    from quietgrad.federation import Identity, MaskingParty, MaskingServer

    _, plan = plan_of(dimension, bits)
    people = [Identity(name) for name in (*NAMES, "coordinator")]
    known, run = Roster.of(people), os.urandom(16)
    parties = [MaskingParty(person, known, plan.terms(dimension), run) for person in people[:-1]]
    server = MaskingServer(people[-1], known, plan.terms(dimension), run)
    server.meet([each.hello for each in parties])
    for each in parties:
        each.meet(server.introductions()[each.me])
    vector, own, other = np.full(dimension, 1e-3), [], []
    for t in range(WARM + 2):
        delivery = server.relay(t, {each.me: each.prepare(t) for each in parties})
        frames = {}
        for each in parties:
            begun = used()
            each.deliver(t, delivery[each.me])
            frames[each.me] = each.submit(t, vector)
            own.append(used() - begun)
        begun = used()
        questions = server.survivors(t, frames)
        frames.clear()
        revealed = {each.me: each.reveal(t, questions[each.me]) for each in parties}
        server.finish(t, revealed)
        other.append(used() - begun)
    return {
        "bits": bits, "party_cpu": statistics.median(own[WARM * PARTIES :]),
        "server_cpu": statistics.median(other[WARM:]), "masked_vector_mb": dimension * bits / 8e6,
        "slack_of_the_run": plan.slack,
        "noise_over_zc": plan.scale(plan.noise_multiplier, 1.0, dimension) / plan.noise_multiplier,
    }  # fmt: skip


def flower(home: Path, dimension: int) -> dict[str, Any]:
    """Rounds of stock Flower, by ``federation_flower.py``'s apps: float32, no TLS."""
    from benchmarks import federation_flower as stock

    stock.PARTIES, stock.ROUNDS, stock.WARM_UP, stock.SECONDS = PARTIES, 3, WARM, SECONDS
    stock.SERVER = stock.SERVER.replace("np.zeros({d})", "np.zeros({d}, np.float32)")
    said = subprocess.run([home / "flwr", "--version"], capture_output=True, text=True, check=True)
    found = watched(lambda folder: stock.flower(home.resolve(), folder, dimension))
    return {"version": said.stdout.strip(), **found}


def flare(dimension: int) -> dict[str, Any]:
    """Rounds of stock FLARE: float32, mutual TLS."""
    from importlib.metadata import version

    from benchmarks import federation_flare as stock

    found = watched(lambda folder: stock.flare(folder, NAMES, dimension, WARM + ROUNDS)[WARM:])
    return {"version": version("nvflare"), **found}


def watched(run: Callable[[Path], list[float]]) -> dict[str, Any]:
    """Seconds of a round, and CPU seconds of all processes; ``run`` keeps a row per round in ``rows.json``."""
    from benchmarks.federation_flower import _started_by

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        seen: list[tuple[int, float]] = []  # rounds done, CPU seconds of all processes so far
        over = threading.Event()

        def watch() -> None:
            spent: dict[int, float] = {}
            while not over.wait(0.3):
                for pid in _started_by(os.getpid()):
                    with contextlib.suppress(OSError):
                        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                        spent[pid] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
                with contextlib.suppress(OSError, ValueError):
                    done = len(json.loads((folder / "rows.json").read_text()))
                    if done:
                        seen.append((done, sum(spent.values())))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            seconds = run(folder)
        finally:
            over.set()
            watcher.join()
    counted = dict(reversed(seen))  # when a round was first seen to be done
    first, last = min(counted), max(counted)
    cpu = (counted[last] - counted[first]) / (last - first) if last > first else None
    return {"seconds": statistics.median(seconds), "all_cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dimension", type=int, default=7_000_000)
    parser.add_argument("--bits", type=int, nargs="+", choices=(32, 64), default=(32, 64))
    parser.add_argument("--party", nargs=5)
    parser.add_argument("--roles", action="store_true", help="the roles' CPU in one process, and no network")
    parser.add_argument("--memory", action="store_true", help="rounds of ours alone, for a party's memory")
    asked = parser.parse_args()
    found: dict[str, Any]
    if asked.party is not None:
        folder, dimension, bits, port, name = asked.party
        party(Path(folder), name, int(dimension), int(bits), int(port))
        return
    if asked.roles:
        in_one = [roles(asked.dimension, bits) for bits in (32, 64)]
        ratios = {key: in_one[1][key] / in_one[0][key] for key in ("party_cpu", "server_cpu")}
        found = {"dimension": asked.dimension, "parties": PARTIES, "roles": in_one, "64_over_32": ratios}
        save(RESULT.with_name("federation_long_roles.json"), found)
        return
    rows = [ours(asked.dimension, bits) for bits in asked.bits]
    found = {"dimension": asked.dimension, "parties": PARTIES, "rounds": ROUNDS, "ours": rows}
    if asked.memory:
        save(RESULT.with_name("federation_long_memory.json"), found)
        return
    save(RESULT, found, "nvflare")
    peers: dict[str, Callable[[], dict[str, Any]]] = {"flare": lambda: flare(asked.dimension)}
    if home := os.environ.get("QUIETGRAD_FLOWER"):
        peers["flower"] = lambda: flower(Path(home), asked.dimension)
    for name, measure in peers.items():
        found[name] = stock = measure()
        found[f"wall_over_{name}"] = {str(row["bits"]): row["seconds"] / stock["seconds"] for row in rows}
        if stock["all_cpu"]:
            found[f"cpu_over_{name}"] = {str(row["bits"]): row["all_cpu"] / stock["all_cpu"] for row in rows}
        save(RESULT, found, "nvflare")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        main()
