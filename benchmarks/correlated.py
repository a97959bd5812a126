"""Correlated against independent noise on a9a, where nobody samples in secret: single pass, and cohorts in turn.

    python benchmarks/correlated.py single | turns | srm | adam | poisson | disk | cost

Both sides search the same settings of one grid (all, or 600 at random): one run each, twelve more of the best
twenty, on held-out rows of the training set. The chosen ones train on all of it, sixteen times, and are tested once
each. The promise is add-remove at δ = 1e-5; every run goes through ``minimize`` with secret noise. What is chosen
here is run through a federation by ``reproduce/cohorts.py``.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import quietgrad as qg
from quietgrad.data import load
from quietgrad.objectives import Logistic

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULTS = Path(__file__).parent / "results"
NOISES = ("independent", "correlated")
EPSILONS = (0.2, 0.5, 1.0)
SETTINGS, FINALISTS, AGAIN, RUNS = 600, 20, 12, 16
GRID: dict[str, tuple[Any, ...]] = {
    "learning_rate": (0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.4, 3.2, 4.8, 6.4, 12.8),
    "clip": (1.0, 1.5, 2.0, 3.0, 4.0),
    "momentum": (0.0, 0.9),
    "decay": ("", "linear:"),
}
PASSES = {"steps": (32, 64, 128, 256, 512)}
MOMENTUM = {"gamma": (0.1, 0.3, 0.6, 0.8, 0.95), "difference": (0.05, 0.1, 0.25, 0.5), "momentum": (0.0,)}
ADAM = {"learning_rate": (0.003, 0.01, 0.03, 0.06, 0.1, 0.2), "beta2": (0.9, 0.999)}
DISK = {"kappa": (0.3, 0.7), "ahead": (0.5, 1.0), "momentum": (0.0,)}
COHORTS, TURNS = 64, 4

Make = Callable[[dict[str, Any], str, int], Any]
Table = tuple[Any, Any]


def single(given: dict[str, Any], noise: str, n: int) -> Any:
    """One pass of DP-SGD."""
    steps = given["steps"]
    return qg.DPSGD(**_common(given), steps=steps, batch_size=n // steps, sampling="single-pass", noise=noise)


def turns(given: dict[str, Any], noise: str, n: int) -> Any:
    """64 cohorts, each four times."""
    return qg.DPSGD(**_common(given), steps=COHORTS * TURNS, sampling="turns", cohorts=COHORTS, noise=noise)


def adam(given: dict[str, Any], noise: str, n: int) -> Any:
    """The same cohorts under Adam, whose second moment sees how loud single releases are."""
    rate = f"{given['decay']}{given['learning_rate']}" if given["decay"] else given["learning_rate"]
    return qg.DPAdam(
        learning_rate=rate, clip=given["clip"], beta1=given["momentum"], beta2=given["beta2"],
        steps=COHORTS * TURNS, sampling="turns", cohorts=COHORTS, noise=noise,
    )  # fmt: skip


def poisson(given: dict[str, Any], noise: str, n: int) -> Any:
    """Eight epochs of a central DP-SGD that samples in secret: what a federation of cohorts is held against."""
    return qg.DPSGD(**_common(given), steps=8 * n // 1000, batch_size=1000)


def disk(given: dict[str, Any], noise: str, n: int) -> Any:
    """DiSK on the same secret samples as ``poisson``."""
    rate = f"{given['decay']}{given['learning_rate']}" if given["decay"] else given["learning_rate"]
    kappa = given["kappa"]
    return qg.DPDiSK(
        learning_rate=rate, clip=given["clip"], kappa=kappa, lookahead=given["ahead"] * (1 - kappa) / kappa,
        steps=8 * n // 1000, batch_size=1000,
    )  # fmt: skip


def srm(given: dict[str, Any], noise: str, n: int) -> Any:
    """One pass of DP-SRM."""
    steps, gamma, clip = given["steps"], given["gamma"], given["clip"]
    return qg.DPSRM(
        learning_rate=f"{given['decay']}{given['learning_rate']}" if given["decay"] else given["learning_rate"],
        clip=clip, gamma=gamma, difference_clip=given["difference"] * gamma * clip, steps=steps,
        batch_size=n // steps, sampling="single-pass", noise=noise,
    )  # fmt: skip


def _common(given: dict[str, Any]) -> dict[str, Any]:
    rate = given["learning_rate"]
    return {
        "learning_rate": f"{given['decay']}{rate}" if given["decay"] else rate,
        "clip": given["clip"],
        "momentum": given["momentum"],
        "momentum_kind": "ema",
    }


def compare(
    make: Make,
    grid: dict[str, tuple[Any, ...]],
    noises: tuple[str, ...] = NOISES,
    epsilons: tuple[float, ...] = EPSILONS,
) -> list[dict[str, Any]]:
    """Both noises at every ε: settings by held-out loss, then the test loss of the chosen ones."""
    (X, y), test = _table("train"), _table("test")
    order = np.random.default_rng(0).permutation(len(y))
    kept, held = order[len(y) // 8 :], order[: len(y) // 8]
    rows = []
    for epsilon in epsilons:
        for noise in noises:
            tried = _settings(grid)
            scores = [
                [_loss(make, given, noise, epsilon, (X[kept], y[kept]), (X[held], y[held]))] for given in tried
            ]
            best = sorted(range(len(tried)), key=lambda i: scores[i][0])[:FINALISTS]
            for i in best:
                scores[i] += [
                    _loss(make, tried[i], noise, epsilon, (X[kept], y[kept]), (X[held], y[held]))
                    for _ in range(AGAIN)
                ]
            chosen = tried[min(best, key=lambda i: statistics.mean(scores[i]))]
            losses = [_loss(make, chosen, noise, epsilon, (X, y), test) for _ in range(RUNS)]
            rows.append({"epsilon": epsilon, "noise": noise, "settings": chosen, **_summary(losses)})
            print(rows[-1], flush=True)
    return rows


def cost() -> list[dict[str, Any]]:
    """CPU time of a release, correlated ÷ independent: medians of interleaved blocks."""
    from quietgrad.core.session.curator import CentralCurator
    from quietgrad.core.session.queries import GradientQuery

    X, y = _table("train")
    rows = []
    for dim in (123, 3969, 26010):
        table = (X, y) if dim == 123 else (np.zeros((2000, dim), np.float32), np.arange(2000) % 2)
        steps = 150 if dim == 123 else 20
        theta, took = np.zeros(dim), {noise: [] for noise in NOISES}  # type: dict[str, list[float]]
        for _ in range(9):
            for noise in NOISES:
                method = qg.DPSGD(steps=steps, sampling="turns", cohorts=steps // 5, noise=noise)
                curator = CentralCurator(Logistic(), table)
                session = curator.open(qg.plan(method, n=len(table[1]), budget=qg.Budget(1.0, 1e-5)))
                started = time.process_time()
                for _ in range(steps):
                    session.release("gradient", GradientQuery(theta, 1.0))
                took[noise].append((time.process_time() - started) / steps)
        medians = {noise: 1e6 * statistics.median(times) for noise, times in took.items()}
        rows.append({"dim": dim, "ratio": medians["correlated"] / medians["independent"], "cpu_us": medians})
        print(rows[-1], flush=True)
    return rows


def _settings(grid: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    every = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(every) <= SETTINGS:
        return every
    return [every[i] for i in np.random.default_rng(7).permutation(len(every))[:SETTINGS]]


def _loss(make: Make, given: dict[str, Any], noise: str, epsilon: float, train: Table, test: Table) -> float:
    budget = qg.Budget(epsilon, 1e-5)
    result = qg.minimize(Logistic(), train, make(given, noise, len(train[1])), budget=budget)
    return _risk(result.params, test)


def _risk(params: Any, table: Table) -> float:
    X, y = table
    margin = np.asarray(X @ params).ravel() * np.where(y > 0, 1.0, -1.0)
    return float(np.logaddexp(0.0, -margin).mean())


def _table(part: str) -> Table:
    data = load("a9a")
    X, y = (data.X, data.y) if part == "train" else (data.X_test, data.y_test)
    return X, np.asarray(y)


def _summary(losses: list[float]) -> dict[str, Any]:
    error = statistics.stdev(losses) / len(losses) ** 0.5
    return {"test_loss": statistics.mean(losses), "standard_error": error, "runs": len(losses)}


def main() -> None:
    """One part, by name."""
    part = sys.argv[1] if len(sys.argv) > 1 else "single"
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "single": lambda: compare(single, {**GRID, **PASSES}),
        "turns": lambda: compare(turns, GRID),
        "srm": lambda: compare(srm, {**GRID, **PASSES, **MOMENTUM}),
        "adam": lambda: compare(adam, {**GRID, **ADAM}, epsilons=(1.0,)),
        "poisson": lambda: compare(poisson, GRID, ("independent",), (1.0,)),
        "disk": lambda: compare(disk, {**GRID, **DISK}, ("independent",), (1.0,)),
        "cost": cost,
    }
    rows = parts[part]()
    save(RESULTS / f"correlated_{part}.json", {"what": __doc__, "part": part, "rows": rows})


if __name__ == "__main__":
    main()
