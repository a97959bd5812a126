"""Federations in one process: equal to central training, cheap per round, and weighted averages that keep accuracy.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/federation.py [overhead] [equality] [averages]

*overhead*: CPU time of one round of 5 parties above (a) the same 5 gradients without any federation and (b) one
release of a central curator on the same records; cryptographic noise is in both. *equality*: DDP-SRM on 10 parties
against DP-SRM, same method and ε, 100 steps, 20 independent seeds each; noise by a curator, by masks with one
colluder, and by two servers. *averages*: one noisy weighted average of local fits (WD-DP iv, secure sums by mpc)
against the unweighted one and central DP-GD, all at the same true ε. The fits of a split are made once and the
noise drawn 100 times at the scale the plan states: the scale that leaves a secure sum is what
tests/federation/test_noise.py measures. CPU times, since others share the machine.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad import data
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, deal
from quietgrad.federation.coordinator import FederatedCurator
from quietgrad.federation.simulation import InProcess, assemble, simulate
from quietgrad.methods import plan as central_plan
from quietgrad.tables.losses import Logistic
from quietgrad.tables.regularizers import Nonconvex

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.weighted_average import Study, unnamed

from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "federation.json"
SEEDS, STEPS = 20, 100


def milliseconds(call: Callable[[], object], repeats: int, rounds: int = 5) -> float:
    """Median over ``rounds`` of the CPU milliseconds of one call."""
    call()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(repeats):
            call()
        times.append((time.process_time() - start) / repeats * 1e3)
    return statistics.median(times)


def overhead() -> list[dict[str, float]]:
    """One round of 5 parties with two records each, so that there is little but the round itself."""
    rows = []
    objective, budget, rng = Logistic(), qg.Budget(1.0, 1e-5), np.random.default_rng(0)
    for d, repeats in ((123, 100), (26_010, 20), (10**6, 2)):
        X, y = rng.normal(size=(10, d)), np.arange(10) % 2.0
        parties = [Party(X[k : k + 2], y[k : k + 2]) for k in range(0, 10, 2)]
        algorithm = qg.DPGD(steps=10**6)
        query = GradientQuery(rng.normal(size=d) * 0.01, 1.0)
        tables = [objective.prepare(party.data) for party in parties]

        def gradients(tables: Any = tables, query: Any = query, d: int = d) -> None:
            for table in tables:
                GradientQuery(query.params, 1.0).sum_into(objective, Batch(table, None), np.zeros(d))

        row: dict[str, float] = {"dimension": d, "gradients_ms": milliseconds(gradients, repeats)}
        curator = CentralCurator(objective, (X, y))
        central = curator.open(central_plan(algorithm, n=10, budget=budget, noise_multiplier=1.0))
        row["central_ms"] = milliseconds(lambda s=central, q=query: s.release("gradient", q), repeats)  # type: ignore[misc]
        settings: list[dict[str, Any]] = [
            {"trust": "curator"},
            {"trust": "local"},
            {"trust": "secure", "secure": "masks"},
        ]
        for trust in settings:
            if trust["trust"] == "secure" and d > 10**5:
                continue
            plan, people = assemble(algorithm, objective, parties, budget=budget, noise_multiplier=1.0, **trust)
            session = FederatedCurator(
                objective, InProcess(people.handlers), identity=people.identity, roster=people.roster
            ).open(plan)
            took = milliseconds(lambda s=session, q=query: s.release("gradient", q), repeats)  # type: ignore[misc]
            name = trust.get("secure") or trust["trust"]
            row[f"{name}_above_gradients_ms"] = took - row["gradients_ms"]
            row[f"{name}_above_central_ms"] = took - row["central_ms"]
        rows.append(row)
        print(row, flush=True)
    return rows


TRUSTED: dict[str, dict[str, Any]] = {  # who adds the noise
    "curator": {"trust": "curator"},
    "masks": {"trust": "secure", "secure": "masks"},
    "servers": {"trust": "secure", "secure": "servers"},
}


def equality() -> list[dict[str, Any]]:
    """DDP-SRM on 10 parties in three trust modes, and DP-SRM: test loss over seeds."""
    rows = []
    for name in ("a9a", "ijcnn1"):
        table = data.load(name)
        assert table.X_test is not None
        objective = Logistic(regularizer=Nonconvex(1e-3), intercept=True)
        test = objective.prepare((table.X_test, table.y_test))
        parties = deal(table.X, table.y, 10)
        budget = qg.Budget(0.5, 1e-5)
        algorithm = qg.DPSRM(steps=STEPS, batch_size=500, learning_rate=1.0)

        def loss(run: Any, objective: Any = objective, test: Any = test) -> float:
            return float(objective.risk(test, run.params) - objective.regularizer.value(run.params))

        runs = [
            qg.minimize(objective, (table.X, table.y), algorithm, budget=budget, seed=seed) for seed in range(SEEDS)
        ]
        central, proved = [loss(run) for run in runs], runs[0].privacy.epsilon
        for number, (trusted, how) in enumerate(TRUSTED.items(), start=1):
            runs = [
                simulate(algorithm, objective, unnamed(parties), budget=budget, seed=10_000 * number + seed, **how)
                for seed in range(SEEDS)
            ]
            losses = [loss(run) for run in runs]
            apart = statistics.mean(losses) - statistics.mean(central)
            error = math.sqrt((statistics.variance(losses) + statistics.variance(central)) / SEEDS)
            rows.append(
                {
                    "data": name, "trust": trusted, "parties": 10, "seeds": SEEDS, "steps": STEPS,
                    "variance_factor": runs[0].details["variance_factor"],
                    "epsilon": {"central": proved, "federated": runs[0].privacy.epsilon},
                    "test_loss": {"central": statistics.mean(central), "federated": statistics.mean(losses)},
                    "difference": apart, "standard_error": error, "in_standard_errors": apart / error,
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def averages() -> list[dict[str, Any]]:
    """Test accuracy of one-shot averages, mean over 100 draws of the noise, beside two central methods.

    The methods and their public settings are those of reproduce/weighted_average.py.
    """
    rows = []
    for name in ("adult", "bank", "kddcup99"):
        table = data.load(name)
        for epsilon in (0.01, 0.05, 0.25):
            study = Study(table, epsilon)
            centres = study.centres()
            for m in (2, 8, 32):
                for u in (1.0, 3.0, 9.0):
                    parties = deal(table.X, table.y, m, unevenness=u)
                    row: dict[str, Any] = {"data": name, "m": m, "u": u, "epsilon": epsilon, **centres}
                    for label, weights in (("weighted", "size"), ("unweighted", "equal")):
                        row[label], _, row["epsilon_proved"] = study.one_shot(parties, weights)
                    rows.append(row)
            for label in ("weighted", "unweighted"):
                gaps = [row[label] - row["central_one_shot"] for row in rows[-9:]]
                worst, mean = round(min(gaps), 4), round(statistics.mean(gaps), 4)
                print(name, epsilon, label, "minus central: worst", worst, "mean", mean, flush=True)
    return rows


PARTS: dict[str, Callable[[], Any]] = {"overhead": overhead, "equality": equality, "averages": averages}

if __name__ == "__main__":
    asked = sys.argv[1:] or list(PARTS)
    numbers: dict[str, Any] = {}
    if RESULT.exists():
        import json

        numbers = {name: value for name, value in json.loads(RESULT.read_text()).items() if name in PARTS}
    for part in asked:
        numbers[part] = PARTS[part]()
    save(RESULT, numbers)
