"""Cost of one secure sum: separate processes over loopback TCP, five parties, every frame authenticated.

    python benchmarks/secure.py                      # the table of the documentation, about a minute
    python benchmarks/secure.py --dimensions 1000000 # a large vector

Writes benchmarks/results/secure.json: per mode and dimension the median wall time of a round (from the first
process that starts to the last that has the sum, after key setup), the part of it that needs data, CPU time of
every role, and bytes sent. Wall time depends on what else the machine does; CPU time and bytes do not.
Beside them stand the times of the paper (000, Tables 4 to 6: Yao's garbled circuits in Obliv-C, five parties).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cryptography
import numpy as np

from benchmarks.link import Link, run_over
from quietgrad.federation import (
    Identity,
    MaskingParty,
    MaskingServer,
    NoiseServer,
    Roster,
    SecureSumConfig,
    SharingParty,
    SumServer,
)
from quietgrad.federation.secure.channel import Endpoint

PARTIES = 5
TIMEOUT = 120.0
PAPER_SECONDS = {22: 3.52, 123: 18.04, 26_010: 2370.0, 62_006: 5627.0}
TARGET_SECONDS = {
    "masks": {22: 0.02, 123: 0.02, 26_010: 0.2, 62_006: 0.6},
    "servers": {22: 0.03, 123: 0.03, 26_010: 0.25, 62_006: 0.7},
    "mpc": {22: 0.08, 123: 0.1, 26_010: 1.5, 62_006: 2.2},
}
Links = dict[int, Link]


def neighbours(me: int, terms: SecureSumConfig) -> list[int]:
    """Whom a role is connected to: parties to every server, servers to everyone."""
    everyone = range(terms.parties + terms.server_count)
    return [k for k in everyone if k != me and max(k, me) >= terms.parties]


def connect(
    me: int, terms: SecureSumConfig, ports: list[int], listener: socket.socket, names: tuple[str, ...]
) -> Links:
    """Dial every neighbour with a higher number, accept every one with a lower."""
    limit = 80 * terms.dimension + (1 << 20)
    links = {}
    for peer in neighbours(me, terms):
        if peer > me:
            sock = socket.create_connection(("127.0.0.1", ports[peer]), timeout=TIMEOUT)
            sock.sendall(struct.pack("<H", me))
            links[peer] = Link(sock, names[peer], limit=limit)
    for _ in [peer for peer in neighbours(me, terms) if peer < me]:
        sock, _address = listener.accept()
        (peer,) = struct.unpack("<H", sock.recv(2, socket.MSG_WAITALL))
        links[peer] = Link(sock, names[peer], limit=limit)
    return links


def introduce(role: Endpoint, links: Links) -> None:
    """Exchange hellos; the server of a masked sum passes the parties' hellos on."""
    terms = role.terms
    is_party = role.me < terms.parties
    for peer, link in links.items():
        if is_party or peer >= terms.parties or terms.mode != "masks":
            link.send(role.hello)
    if terms.mode != "masks":
        role.meet([link.receive(TIMEOUT) for link in links.values()])
    elif is_party:
        size = len(role.hello)
        everyone = links[terms.parties].receive(TIMEOUT)
        role.meet([everyone[i : i + size] for i in range(0, len(everyone), size)])
    else:
        hellos = [links[i].receive(TIMEOUT) for i in range(terms.parties)]
        role.meet(hellos)
        for link in links.values():
            link.send(b"".join([*hellos, role.hello]))


def receive_all(links: Links, peers: range | list[int]) -> dict[int, bytes]:
    return {i: links[i].receive(TIMEOUT) for i in peers}


def send_all(links: Links, frames: dict[int, bytes]) -> None:
    for peer, frame in frames.items():
        links[peer].send(frame)


def prepare(role: Endpoint, links: Links, t: int) -> None:
    """What a round needs before there are data."""
    if isinstance(role, MaskingParty):
        server = links[role.terms.parties]
        server.send(role.prepare(t))
        role.deliver(t, server.receive(TIMEOUT))
    elif isinstance(role, MaskingServer):
        send_all(links, role.relay(t, receive_all(links, range(role.terms.parties))))
    elif isinstance(role, NoiseServer):
        following = links[role.next]
        run_over(role.prepare(t), links[role.previous].send, lambda: following.receive(TIMEOUT))


def add_up(role: Endpoint, links: Links, t: int, vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """The rest of the round; parties return the sum they received."""
    parties = range(role.terms.parties)
    if isinstance(role, MaskingParty):
        server = links[role.terms.parties]
        server.send(role.submit(t, vector))
        server.send(role.reveal(t, server.receive(TIMEOUT)))
        return role.result(t, server.receive(TIMEOUT))
    if isinstance(role, MaskingServer):
        send_all(links, role.survivors(t, receive_all(links, parties)))
        role.finish(t, receive_all(links, parties))
        send_all(links, role.results(t, parties))
    elif isinstance(role, SharingParty):
        send_all(links, role.share(t, vector))
        return role.result(t, links[role.servers[0]].receive(TIMEOUT))
    elif isinstance(role, SumServer):
        others = [k for k in role.servers if k != role.me]
        send_all(links, role.receive(t, receive_all(links, parties)))
        frame = role.partial(t, receive_all(links, others))
        if frame is not None:
            links[role.servers[0]].send(frame)
        else:
            role.finish(t, receive_all(links, others))
            send_all(links, role.results(t, parties))
    return None


def make_role(me: int, terms: SecureSumConfig, people: list[tuple[str, bytes]], run: bytes) -> Endpoint:
    identities = [Identity(name, secret) for name, secret in people]
    roster = Roster.of(identities)
    if terms.mode == "masks":
        kind: Callable[..., Endpoint] = MaskingParty if me < terms.parties else MaskingServer
    else:
        server = NoiseServer if terms.mode == "mpc" else SumServer
        kind = SharingParty if me < terms.parties else server
    return kind(identities[me], roster, terms, run)


def play(
    me: int,
    terms: SecureSumConfig,
    people: list[tuple[str, bytes]],
    run: bytes,
    ports: Any,
    barrier: Any,
    out: Any,
    rounds: int,
) -> None:
    """One process: set up, then 2·rounds rounds, every second one prepared ahead of the clock."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        ports[me] = listener.getsockname()[1]
        role = make_role(me, terms, people, run)
        barrier.wait(TIMEOUT)
        links = connect(me, terms, list(ports), listener, role.roster.names)
    introduce(role, links)
    rng = np.random.default_rng(me)
    records = []
    for t in range(2 * rounds + 2):  # the first of each kind warms up
        ahead = t % 2 == 1
        vector = rng.normal(size=terms.dimension) / terms.dimension**0.5 * 0.5
        if ahead:
            prepare(role, links, t)
        barrier.wait(TIMEOUT)
        sent = {peer: link.sent_bytes for peer, link in links.items()}
        cpu, start = time.process_time(), time.monotonic()
        if not ahead:
            prepare(role, links, t)
        total = add_up(role, links, t, vector)
        end, cpu = time.monotonic(), time.process_time() - cpu
        used = sum(link.sent_bytes - sent[peer] for peer, link in links.items())
        difference = None if total is None else total - (0.0 if me else vector)
        records.append((ahead, start, end, cpu, used, difference if me in (0, 1) else None))
        barrier.wait(TIMEOUT)
    for link in links.values():
        link.close()
    out.put((me, records))


def measure(terms: SecureSumConfig, rounds: int) -> dict[str, Any]:
    """Run one mode at one dimension and summarise."""
    context = mp.get_context("spawn")
    count = terms.parties + terms.server_count
    people = [(f"role-{i}", os.urandom(32)) for i in range(count)]
    ports, barrier, out = context.Array("i", count), context.Barrier(count), context.Queue()
    run = os.urandom(16)
    processes = [
        context.Process(target=play, args=(i, terms, people, run, ports, barrier, out, rounds))
        for i in range(count)
    ]
    for process in processes:
        process.start()
    results = dict(out.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(timeout=30)

    def spread(ahead: bool) -> list[float]:
        chosen = [t for t, r in enumerate(results[0]) if r[0] is ahead][1:]
        return [max(r[t][2] for r in results.values()) - min(r[t][1] for r in results.values()) for t in chosen]

    whole = [t for t, r in enumerate(results[0]) if r[0] is False][1:]

    def worst(roles: range, column: int) -> float:
        return max(statistics.median(results[i][t][column] for t in whole) for i in roles)

    parties, servers = range(terms.parties), range(terms.parties, count)
    check_sums(results, terms)
    return {
        "mode": terms.mode,
        "dimension": terms.dimension,
        "seconds": statistics.median(spread(False)),
        "seconds_min": min(spread(False)),
        "seconds_when_prepared_ahead": statistics.median(spread(True)),
        "target_seconds": TARGET_SECONDS[terms.mode].get(terms.dimension),
        "paper_seconds": PAPER_SECONDS.get(terms.dimension),
        "cpu_seconds_party": worst(parties, 3),
        "cpu_seconds_busiest_server": worst(servers, 3),
        "cpu_seconds_all": sum(statistics.median(results[i][t][3] for t in whole) for i in results),
        "bytes_party": int(worst(parties, 4)),
        "bytes_busiest_server": int(worst(servers, 4)),
        "variance_factor": terms.variance_factor,
        "rounds": len(whole),
        "load": os.getloadavg()[0],
    }


def check_sums(results: dict[int, Any], terms: SecureSumConfig) -> None:
    """Two parties got the same sums, and what is not data in them has the stated variance."""
    vectors = [np.random.default_rng(i) for i in range(terms.parties)]
    for t in range(len(results[0])):
        data = [r.normal(size=terms.dimension) / terms.dimension**0.5 * 0.5 for r in vectors]
        mine, theirs = results[0][t][5] + data[0], results[1][t][5]
        if not np.allclose(mine, theirs, atol=1e-9):
            raise SystemExit(f"{terms.mode}: two parties received different sums in round {t}")
        noise = mine - np.sum([clip(v) for v in data], axis=0)
        ratio = float((noise**2).mean()) / (terms.variance_factor * terms.sigma**2)
        if abs(ratio - 1) > 6.0 * (2.0 / terms.dimension) ** 0.5 + 1e-3 and terms.dimension > 1000:
            raise SystemExit(f"{terms.mode}: noise variance is {ratio:.3f} times what it should be")


def clip(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    norm = float(np.linalg.norm(vector))
    return vector if norm <= 1.0 else vector / norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dimensions", type=int, nargs="+", default=[22, 123, 26_010, 62_006, 1_000_000])
    parser.add_argument("--modes", nargs="+", default=["masks", "servers", "mpc"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "secure.json")
    arguments = parser.parse_args()
    rows = []
    print(
        f"{'mode':8} {'d':>8} {'s':>8} {'ahead s':>8} {'cpu/party':>9} {'cpu/server':>10} {'party B':>10}", end=""
    )
    print(f" {'server B':>11} {'paper s':>8}")
    for mode in arguments.modes:
        for dimension in arguments.dimensions:
            row = measure(SecureSumConfig(mode, PARTIES, dimension, bound=1.0, sigma=1.0), arguments.rounds)
            rows.append(row)
            print(
                f"{mode:8} {dimension:8} {row['seconds']:8.4f} {row['seconds_when_prepared_ahead']:8.4f} "
                f"{row['cpu_seconds_party']:9.4f} {row['cpu_seconds_busiest_server']:10.4f} "
                f"{row['bytes_party']:10} {row['bytes_busiest_server']:11} {row['paper_seconds'] or '':>8}",
                flush=True,
            )
    report = {
        "command": " ".join(["python benchmarks/secure.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "processor": platform.processor(), "load": os.getloadavg()},
        "threads_per_process": 1,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cryptography": cryptography.__version__,
        },
        "parties": PARTIES,
        "transport": "TCP loopback, one process per role, AES-256-GCM frames, after key setup",
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
