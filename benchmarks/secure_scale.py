"""How secure sums grow with the number of parties: one process, every frame and key of the real protocols.

    python benchmarks/secure_scale.py                                  # ours, about ten minutes
    python benchmarks/secure_scale.py --flower BIN_FOLDER_OF_A_VENV    # Flower's SecAgg+ beside it
    python benchmarks/secure_scale.py --dimensions 1000 --parties 10 30 100   # the other rows stay as they are

A tenth of the parties drop after their keys were shared and before they send (masks must then open their round
keys). CPU time is that of the role's own calls, frames are counted as they would be sent; a party's numbers are
the mean over parties. The exponents are least-squares slopes of log cost on log m, over all m and over m ≥ 100,
where masks choose drawn neighbours. Flower's SecAgg+ (1.41) is driven through its own workflow and client mod,
with as many neighbours and the same threshold as ours; it adds no noise, masks 32-bit words with NumPy's
generator and signs nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.record import save
from quietgrad.federation import (
    Identity,
    MaskingParty,
    MaskingServer,
    Roster,
    SecureSumConfig,
    SharingParty,
    SumServer,
)

RESULT = Path(__file__).parent / "results" / "secure_scale.json"
PARTIES = [10, 30, 100, 300, 1000]
DIMENSIONS = [1_000, 100_000]
FLOWER_LIMIT = {1_000: 300, 100_000: 100}  # beyond this its pure-Python shares or masks take too long

Clock = dict[str, float]


class Lazy(Mapping[int, bytes]):
    """Frames that are made when the server reads them, so that a thousand long vectors are never held at once."""

    def __init__(self, members: list[int], make: Callable[[int], bytes]) -> None:
        self._members, self._make = members, make

    def __getitem__(self, i: int) -> bytes:
        return self._make(i)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, i: object) -> bool:
        return i in self._members


class Meter:
    """CPU seconds and bytes by role."""

    def __init__(self) -> None:
        self.seconds: Clock = {"party": 0.0, "server": 0.0}
        self.sent: dict[str, int] = {"party": 0, "server": 0}

    def run(self, role: str, work: Callable[[], Any]) -> Any:
        """Do something for a role; what another role does meanwhile is that one's."""
        others = "server" if role == "party" else "party"
        before, start = self.seconds[others], time.process_time()
        result = work()
        self.seconds[role] += time.process_time() - start - (self.seconds[others] - before)
        frames = result.values() if isinstance(result, dict) else [result]
        self.sent[role] += sum(len(frame) for frame in frames if isinstance(frame, bytes))
        return result


def people(terms: SecureSumConfig) -> tuple[list[Identity], Roster]:
    names = [f"party-{i}" for i in range(terms.parties)] + [f"server-{k}" for k in range(terms.server_count)]
    identities = [Identity(name) for name in names]
    return identities, Roster.of(identities)


def terms_of(mode: str, m: int, d: int) -> SecureSumConfig:
    left = m - m // 10
    extra = {"honest": left - 1} if mode == "masks" else {"quorum": left}
    return SecureSumConfig(mode, parties=m, dimension=d, bound=1.0, sigma=1.0, **extra)  # type: ignore[arg-type]


def masks(m: int, d: int) -> dict[str, Any]:
    terms = terms_of("masks", m, d)
    who, roster = people(terms)
    run, setup, meter = os.urandom(16), Meter(), Meter()
    parties = [setup.run("party", lambda p=p: MaskingParty(p, roster, terms, run)) for p in who[:m]]
    server = setup.run("server", lambda: MaskingServer(who[m], roster, terms, run))
    setup.sent["party"] = sum(len(p.hello) for p in parties)
    setup.run("server", lambda: server.meet([p.hello for p in parties]))
    hellos = setup.run("server", server.introductions)
    setup.sent["server"] = sum(len(frame) for frames in hellos.values() for frame in frames)
    for p in parties:
        setup.run("party", lambda p=p: p.meet(hellos[p.me]))
    vector = np.full(d, 0.1 / math.sqrt(d))
    here = [i for i in range(m) if i % 10 != 3]
    prepared = {p.me: meter.run("party", lambda p=p: p.prepare(0)) for p in parties}
    delivery = meter.run("server", lambda: server.relay(0, prepared))
    for p in parties:
        meter.run("party", lambda p=p: p.deliver(0, delivery[p.me]))
    masked = Lazy(here, lambda i: meter.run("party", lambda: parties[i].submit(0, vector)))
    questions = meter.run("server", lambda: server.survivors(0, masked))
    revealed = {i: meter.run("party", lambda i=i: parties[i].reveal(0, questions[i])) for i in here}
    total = meter.run("server", lambda: server.finish(0, revealed))
    check(total, terms, len(here))
    return row(terms, m, setup, meter, neighbours=terms.graph.neighbours, partners=terms.graph.partners)


def servers(m: int, d: int) -> dict[str, Any]:
    terms = terms_of("servers", m, d)
    who, roster = people(terms)
    run, setup, meter = os.urandom(16), Meter(), Meter()
    parties = [setup.run("party", lambda p=p: SharingParty(p, roster, terms, run)) for p in who[:m]]
    both = [setup.run("server", lambda p=p: SumServer(p, roster, terms, run)) for p in who[m:]]
    hellos = [role.hello for role in (*parties, *both)]
    setup.sent = {"party": sum(len(p.hello) for p in parties), "server": len(both[0].hello) * m * len(both)}
    for server in both:
        setup.run("server", lambda server=server: server.meet(hellos))
    for p in parties:
        setup.run("party", lambda p=p: p.meet(hellos[m:]))
    vector = np.full(d, 0.1 / math.sqrt(d))
    here = [i for i in range(m) if i % 10 != 3]
    first, last = both
    kept: dict[int, bytes] = {}

    def shared(i: int) -> bytes:
        frames = meter.run("party", lambda: parties[i].share(0, vector))
        kept[i] = frames[first.me]
        return bytes(frames[last.me])

    from_last = meter.run("server", lambda: last.receive(0, Lazy(here, shared)))
    from_first = meter.run("server", lambda: first.receive(0, kept))
    partial = meter.run("server", lambda: last.partial(0, {first.me: from_first[last.me]}))
    meter.run("server", lambda: first.partial(0, {last.me: from_last[first.me]}))
    total = meter.run("server", lambda: first.finish(0, {last.me: partial}))
    check(total, terms, len(here))
    return row(terms, m, setup, meter)


def check(total: Any, terms: SecureSumConfig, here: int) -> None:
    """The sum is right: its mean is that of the data within six standard errors of the noise."""
    d = terms.dimension
    error = abs(float(total.mean()) - here * 0.1 / math.sqrt(d))
    if error > 6.0 * terms.sigma * math.sqrt(terms.variance_factor / d):
        raise SystemExit(f"{terms.mode}, m = {terms.parties}: the sum is wrong by {error:.3g}")


def row(terms: SecureSumConfig, m: int, setup: Meter, meter: Meter, **more: int) -> dict[str, Any]:
    found = {"mode": terms.mode, "parties": m, "dimension": terms.dimension, **more}
    for name, each in (("set_up", setup), ("round", meter)):
        found[name] = {
            "cpu_seconds_party": each.seconds["party"] / m,
            "cpu_seconds_server": each.seconds["server"],
            "bytes_party": each.sent["party"] // m,
            "bytes_server": each.sent["server"],
        }
    print(found, flush=True)
    return found


FLOWER = """
import json, logging, sys, time
import numpy as np
logging.disable(logging.CRITICAL)
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import FitIns, FitRes, Status, Code, Message, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.task_identity import TaskIdentity
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0
m, d, shares, threshold = map(int, sys.argv[1:5])
spent = {"party": 0.0, "all": 0.0, "sent_party": 0, "sent_server": 0}
parameters = ndarrays_to_parameters([np.full(d, 0.1 / d ** 0.5)])
def fresh(node):
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
contexts = {i: fresh(i) for i in range(1, m + 1)}
dropped = {i for i in contexts if i % 10 == 4}

def train(message, context):
    answer = FitRes(Status(Code.OK, ""), parameters, 1, {})
    return Message(compat.fitres_to_recorddict(answer, True), reply_to=message)

class Grid:
    stage = -1
    def send_and_receive(self, messages, timeout=None):
        self.stage += 1
        out = []
        for message in messages:
            node = message.metadata.dst_node_id
            if self.stage >= 2 and node in dropped:
                continue
            began = time.process_time()
            packed = recorddict_to_proto(message.content).SerializeToString()
            message = Message(recorddict_from_proto(ProtoRecordDict.FromString(packed)), dst_node_id=node,
                              message_type=message.metadata.message_type)
            start = time.process_time()
            reply = secaggplus_mod(message, contexts[node], train)
            spent["party"] += time.process_time() - start
            spent["sent_server"] += len(packed)
            spent["sent_party"] += len(recorddict_to_proto(reply.content).SerializeToString())
            out.append(reply)
            spent["all"] += time.process_time() - began
        return out

class Proxy:
    def __init__(self, node):
        self.node_id = node

class Strategy:
    def configure_fit(self, *_):
        return [(Proxy(i), FitIns(parameters, {})) for i in contexts]
    def aggregate_fit(self, server_round, results, failures):
        self.total = results[0][1].parameters
        return None, {}

class Manager:
    def num_available(self):
        return m

context = LegacyContext(fresh(0), config=None, strategy=Strategy(), client_manager=Manager())
context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(parameters, True)
flow = SecAggPlusWorkflow(num_shares=shares, reconstruction_threshold=threshold, clipping_range=8.0, max_weight=1)
start = time.process_time()
flow(Grid(), context)
whole = time.process_time() - start
from flwr.common import parameters_to_ndarrays
mean = float(parameters_to_ndarrays(context.strategy.total)[0].mean())
assert abs(mean - 0.1 / d ** 0.5) < 1e-4, mean
print(json.dumps({
    "cpu_seconds_party": spent["party"] / m, "cpu_seconds_server": whole - spent["all"],
    "bytes_party": spent["sent_party"] // m, "bytes_server": spent["sent_server"],
}))
"""


def flower(binaries: Path, m: int, d: int) -> dict[str, Any]:
    """One SecAgg+ round of Flower with our number of neighbours and threshold."""
    graph = terms_of("masks", m, d).graph
    shares = graph.neighbours + 1 if graph.complete else (graph.neighbours + 1) | 1
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(FLOWER)
        script.flush()
        settings = [str(n) for n in (m, d, shares, graph.threshold)]
        done = subprocess.run(
            [str(binaries / "python"), script.name, *settings],
            capture_output=True, text=True, env={**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "PYTHONPATH": ""},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found = {
        "mode": "Flower SecAgg+", "parties": m, "dimension": d, "shares": shares, "threshold": graph.threshold,
        "round": json.loads(done.stdout.splitlines()[-1]),
    }  # fmt: skip
    print(found, flush=True)
    return found


def label(row: dict[str, Any]) -> tuple[str, int, int]:
    """What is measured in a row."""
    return row["mode"], row["dimension"], row["parties"]


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Slopes of log cost on log m."""
    found = []
    for mode, d in sorted({(r["mode"], r["dimension"]) for r in rows}):
        mine = [r for r in rows if (r["mode"], r["dimension"]) == (mode, d)]
        for least in (1, 100):
            some = [r for r in mine if r["parties"] >= least]
            if len(some) < 2:
                continue
            logs = np.log([r["parties"] for r in some])
            slopes = {
                key: round(float(np.polyfit(logs, np.log([r["round"][key] for r in some]), 1)[0]), 3)
                for key in some[0]["round"]
            }
            found.append({"mode": mode, "dimension": d, "from_parties": some[0]["parties"], **slopes})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parties", type=int, nargs="+", default=PARTIES)
    parser.add_argument("--dimensions", type=int, nargs="+", default=DIMENSIONS)
    parser.add_argument("--modes", nargs="*", default=["masks", "servers"])
    parser.add_argument("--flower", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    masks(10, 10), servers(10, 10)  # tables are built once
    jobs: list[Callable[[], dict[str, Any]]] = []
    for d in arguments.dimensions:
        for m in arguments.parties:
            if "masks" in arguments.modes:
                jobs.append(lambda m=m, d=d: masks(m, d))  # type: ignore[misc]
            if "servers" in arguments.modes:
                jobs.append(lambda m=m, d=d: servers(m, d))  # type: ignore[misc]
            if arguments.flower is not None and m <= FLOWER_LIMIT.get(d, 100):
                jobs.append(lambda m=m, d=d: flower(arguments.flower, m, d))  # type: ignore[misc]
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    for job in jobs:
        found = job()
        rows = sorted([r for r in rows if label(r) != label(found)] + [found], key=label)
        save(arguments.out, {"dropped": "one in ten", "rows": rows, "exponents": exponents(rows)}, "cryptography")
    for line in exponents(rows):
        print(line)


if __name__ == "__main__":
    main()
