"""A thousand parties of whom one in ten is away in every round: whole private runs on this machine.

    python benchmarks/federation_cohorts.py            # everybody asked, and cohorts of 100; some minutes
    python benchmarks/federation_cohorts.py --parties 200 --rounds 5

Each party is away with probability 0.1 in every round, independently, and falls silent at one of the round's
messages at
random: before its keys, before its vector, or before it helps to open the sum. The run is DP gradient descent
for logistic regression on made-up records, ten per party, with secure sums by masks. Reported: CPU and wall
seconds, lost rounds, how many were in the sums, and the accuracy of the model beside that of a run with
everybody present and one trusted curator.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import quietgrad as qg
from benchmarks.record import save
from quietgrad.federation import Party
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.exchange import ASK, Envelope, body
from quietgrad.federation.simulation import assemble, simulate, train
from quietgrad.federation.transport import Away, Bytes
from quietgrad.federation.transport.in_process import InProcess
from quietgrad.federation.wire import decode

RESULT = Path(__file__).parent / "results" / "federation_cohorts.json"
AWAY = 0.1
ROUND = ("hello", "meet", "prepare", "ask", "reveal")


class Absent(InProcess):
    """A transport on which parties fall silent for the rest of a round."""

    def __init__(self, handlers: Mapping[str, Any], seed: int) -> None:
        super().__init__(handlers)
        self._random = random.Random(seed)
        self._quiet: dict[str, str] = {}
        self._last = len(ROUND)
        self.sent = {"coordinator": 0, "parties": 0}

    def send(self, frames: Mapping[str, Bytes], seconds: float) -> dict[str, Bytes | Away]:
        envelope = next(iter(frames.values()))
        kind = decode(body(envelope)).kind if Envelope.of(envelope).kind == ASK else ""
        if kind in ROUND:
            stage = ROUND.index(kind)
            if stage < self._last:  # a new round begins
                phases = ("prepare", "ask", "reveal")
                self._quiet = {
                    name: self._random.choice(phases) for name in self.parties() if self._random.random() < AWAY
                }
            self._last = stage
            gone = {name for name, since in self._quiet.items() if stage >= ROUND.index(since)}
        else:
            gone = set()
        here = {name: frame for name, frame in frames.items() if name not in gone}
        replies = super().send(here, seconds)
        self.sent["coordinator"] += sum(len(frame) for frame in here.values())
        self.sent["parties"] += sum(len(reply) for reply in replies.values() if not isinstance(reply, Away))
        return {**replies, **{name: Away("fell silent") for name in frames if name in gone}}


def records(parties: int, seed: int) -> list[Party]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(10 * parties, 20))
    y = (X @ np.linspace(1.0, -1.0, 20) + rng.logistic(size=len(X)) > 0.0) * 1.0
    return [Party(X[10 * j : 10 * j + 10], y[10 * j : 10 * j + 10], n_public=10) for j in range(parties)]


def accuracy(params: Any) -> float:
    rng = np.random.default_rng(1)
    X = rng.normal(size=(20_000, 20))
    y = X @ np.linspace(1.0, -1.0, 20) + rng.logistic(size=len(X)) > 0.0
    return float(((X @ params > 0.0) == y).mean())


def run(parties: int, cohort: int | None, rounds: int) -> dict[str, Any]:
    asked = cohort or parties
    algorithm = qg.DPGD(steps=rounds, learning_rate=4.0)
    objective, people = qg.objectives.Logistic(), records(parties, 0)
    settings: dict[str, Any] = {
        "budget": qg.Budget(4.0, 1e-6), "trust": "secure", "secure": "masks", "cohort": cohort,
        "quorum": asked - 2 * asked // 10, "spare": max(1, rounds // 10),
    }  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    plan, federation = assemble(algorithm, objective, people, **settings)
    transport = Absent(federation.handlers, seed=2)
    curator = FederatedCurator(objective, transport, identity=federation.identity, roster=federation.roster)
    result = train(algorithm, curator, plan, np.zeros(20))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    trusted = simulate(algorithm, objective, people, budget=settings["budget"])
    graph = plan.terms(20).graph
    row = {
        "parties": parties, "cohort": cohort, "quorum": plan.quorum, "rounds": rounds,
        "epsilon": round(result.privacy.epsilon, 3), "neighbours": graph.neighbours, "partners": graph.partners,
        "lost_rounds": result.privacy.releases["gradient"] - rounds,
        "noise_multiplier": plan.noise_multiplier, "variance_factor": plan.variance_factor,
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1),
        "megabytes_per_round": {who: round(n / 1e6 / rounds, 2) for who, n in transport.sent.items()},
        "accuracy": round(accuracy(result.params), 4), "accuracy_trusted": round(accuracy(trusted.params), 4),
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parties", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    m, rounds = arguments.parties, arguments.rounds
    rows = [run(m, m // 10, rounds), run(m, None, rounds)]
    save(arguments.out, {"away": AWAY, "records_per_party": 10, "dimension": 20, "rows": rows}, "cryptography")


if __name__ == "__main__":
    main()
