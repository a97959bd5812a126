"""Random allocation: proved ε against simulation, Poisson's ε and a second accountant; time; accuracy.

    python benchmarks/random_allocation.py [price] [finer] [time] [a9a] [mnist]

``price``: 40 settings. Runs are simulated under both orders of neighbours by importance sampling; the ε at which
the simulated δ is the target is compared with the proved one.
``finer``: the proved ε against that on ten times more accurate grids, where no simulation reaches.
``time``: CPU seconds of fresh processes, imports included, with numba's compiled code kept from a process before.
``a9a``: both samplings search the same grid on held-out rows; the chosen settings are run again and tested.
``mnist``: the same for a small CNN on 20 000 of MNIST's training rows, three epochs; four rates, two runs each. A
grid of rates 1 and 2 with one run each was tried first; it chose its edge, and its test scores were seen.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import quietgrad as qg
from quietgrad.assurance.certificates.independent_accountant import second_proof
from quietgrad.core.accounting import random_allocation as room
from quietgrad.core.accounting.accounting import prove, prove_or_infinite
from quietgrad.core.accounting.budget import Relation

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULTS = Path(__file__).parent / "results"
NORMALS = 60_000_000  # of a simulation in one order
EXTREME = (
    (0.5, 2, 1, 1e-10), (0.5, 100_000, 1, 1e-10), (0.5, 1000, 1000, 1e-10), (0.5, 100_000, 1000, 1e-10),
    (1.0, 50, 1000, 1e-10), (1.0, 99_999, 100, 1e-8), (4.0, 100_000, 1000, 1e-10), (20.0, 2, 1000, 1e-10),
)  # fmt: skip
Setting = tuple[float, int, int, float]


def settings() -> list[Setting]:
    """(σ, T, epochs, δ): 40 that can be simulated."""
    rng = np.random.default_rng(34)
    found: list[Setting] = []
    while len(found) < 40:
        sigma = round(float(np.exp(rng.uniform(math.log(0.5), math.log(5.0)))), 2)
        steps = int(np.exp(rng.uniform(math.log(2), math.log(2000))))
        epochs = int(np.exp(rng.uniform(0.0, math.log(50))))
        delta = float(rng.choice([1e-2, 1e-3, 1e-4, 1e-5]))
        if steps * epochs <= 3000 and _price((sigma, steps, epochs, delta)) > 0.02:
            found.append((sigma, steps, epochs, delta))
    return found


def _event(setting: Setting) -> Any:
    sigma, steps, epochs, _ = setting
    return qg.events.random_allocation(steps_per_epoch=steps, noise_multiplier=sigma, epochs=epochs)


def _price(setting: Setting) -> float:
    return prove(_event(setting), delta=setting[3], relation="add-remove").epsilon


def simulated(setting: Setting, present: bool, runs: int, tilt: float, seed: int) -> tuple[Any, Any]:
    """Losses of ``runs`` runs with their weights.

    With the record its own coordinate is shifted by 1 + tilt, else all coordinates together by −tilt deviations.
    """
    sigma, steps, epochs, _ = setting
    rng = np.random.default_rng([seed, steps, epochs, int(present)])
    losses, weights = np.zeros(runs), np.zeros(runs)
    block = max(1, 4_000_000 // steps)
    for first in range(0, runs, block):
        rows = slice(first, min(first + block, runs))
        for _ in range(epochs):
            x = rng.standard_normal((rows.stop - rows.start, steps))
            if present:
                x[:, 0] += (1.0 + tilt) / sigma
                log_p = _log_mean(x / sigma - 0.5 / sigma**2)
                losses[rows] += log_p
                shift = (1.0 + tilt) / sigma
                weights[rows] += log_p - _log_mean(x * shift - shift**2 / 2)
            else:
                shift = -tilt / math.sqrt(steps * epochs)
                x += shift
                losses[rows] -= _log_mean(x / sigma - 0.5 / sigma**2)
                weights[rows] -= (x * shift - shift**2 / 2).sum(axis=1)
    return losses, np.exp(weights)


def _log_mean(exponents: Any) -> Any:
    largest = exponents.max(axis=1)
    return largest + np.log(np.exp(exponents - largest[:, None]).mean(axis=1))


def _delta(found: tuple[Any, Any], epsilon: float) -> tuple[float, float]:
    losses, weights = found
    values = weights * np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0)
    return float(values.mean()), float(values.std() / math.sqrt(values.size))


def _epsilon(found: tuple[Any, Any], delta: float) -> tuple[float, float]:
    """ε at which the simulated δ is ``delta``, and its standard error."""
    low, high = 0.0, float(found[0].max())
    if _delta(found, 0.0)[0] <= delta:
        return 0.0, 0.0
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(found, middle)[0] > delta else (low, middle)
    slope = (_delta(found, low * 0.999)[0] - _delta(found, low * 1.001)[0]) / (0.002 * low)
    return low, _delta(found, low)[1] / max(slope, 1e-300)


def price() -> list[dict[str, Any]]:
    """Every setting: proved, simulated, Poisson's, the second accountant's."""
    rows = []
    for number, setting in enumerate(settings()):
        sigma, steps, epochs, delta = setting
        proved = _price(setting)
        runs = min(2_000_000, NORMALS // (steps * epochs))
        best = (0.0, 0.0)
        excess = -math.inf
        for present, tilts in ((True, (0.0, 0.3, 0.7)), (False, (0.0, 1.0, 2.0, 3.0))):
            pilots = [simulated(setting, present, max(2000, runs // 50), tilt, 1) for tilt in tilts]
            errors = [
                _delta(p, proved)[1] if np.isfinite(_delta(p, proved)[1]) and _delta(p, proved)[0] > 0 else math.inf
                for p in pilots
            ]
            found = simulated(setting, present, runs, tilts[int(np.argmin(errors))], 2 + number)
            mean, error = _delta(found, proved)
            excess = max(excess, (mean - delta) / max(error, 1e-300))
            best = max(best, _epsilon(found, delta))
        poisson = prove(
            qg.events.poisson_gaussian(1 / steps, sigma, steps * epochs), delta=delta, relation="add-remove"
        ).epsilon
        second = second_proof(_event(setting), delta=delta, relation=Relation.ADD_REMOVE).epsilon
        rows.append({
            "noise_multiplier": sigma, "steps_per_epoch": steps, "epochs": epochs, "delta": delta, "proved": proved,
            "simulated": best[0], "standard_error": best[1], "above": proved / best[0] - 1.0,
            "deviations_of_simulated_delta_above_target": excess, "poisson": poisson, "second": second,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def finer() -> list[dict[str, Any]]:
    """Where no simulation reaches: the same proof on grids whose own error is a tenth."""
    rows = []
    for setting in EXTREME:
        values = []
        for accuracy in (room._ACCURACY, room._ACCURACY / 10):
            room._ACCURACY = accuracy
            room.law_of_sum.cache_clear()
            prove_or_infinite.cache_clear()
            values.append(_price(setting))
        room._ACCURACY = 3e-3
        room.law_of_sum.cache_clear()
        prove_or_infinite.cache_clear()
        rows.append(
            {"setting": setting, "proved": values[0], "finer": values[1], "above": values[0] / values[1] - 1}
        )
        print(rows[-1], flush=True)
    return rows


def times() -> list[dict[str, Any]]:
    """CPU seconds of fresh processes that prove one ε, and what the proof alone takes of them."""
    rows = []
    for setting in ((1.0, 100, 1, 1e-5), (1.0, 1000, 100, 1e-6), *EXTREME):
        sigma, steps, epochs, delta = setting
        code = (
            "import time, quietgrad as qg; from quietgrad.core.accounting.accounting import prove;"
            f"e = qg.events.random_allocation(steps_per_epoch={steps}, noise_multiplier={sigma}, epochs={epochs});"
            "import quietgrad.core.accounting.pld_accountant, quietgrad.core.accounting.random_allocation;"
            "t = time.process_time();"
            f"prove(e, delta={delta}, relation='add-remove'); print(time.process_time() - t)"
        )
        both = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            both.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, float(out.stdout)))
        process, proof = (statistics.median(column) for column in zip(*both, strict=True))
        rows.append({"setting": setting, "process_seconds": process, "proof_seconds": proof})
        print(rows[-1], flush=True)
    return rows


GRID = {
    "learning_rate": (1.0, 2.0, 4.0, 8.0),
    "clip": (1.0, 2.0),
    "batch_size": (256, 1024),
    "epochs": (4, 10),
    "decay": ("", "linear:"),
}
FINALISTS, AGAIN, RUNS = 6, 4, 12


def a9a() -> list[dict[str, Any]]:
    """Test accuracy of DP-SGD under both samplings, at equal search."""
    from quietgrad.data import load
    from quietgrad.objectives import Logistic

    data = load("a9a")
    X, y, test = data.X, np.asarray(data.y), (data.X_test, np.asarray(data.y_test))
    order = np.random.default_rng(0).permutation(len(y))
    kept, held = order[len(y) // 8 :], order[: len(y) // 8]

    def score(sampling: str, epsilon: float, given: dict[str, Any], train: Any, against: Any) -> float:
        n = len(train[1])
        epoch = -(-n // given["batch_size"])
        method = qg.DPSGD(
            steps=epoch * given["epochs"], batch_size=given["batch_size"], clip=given["clip"], sampling=sampling,
            learning_rate=f"{given['decay']}{given['learning_rate']}" if given["decay"] else given["learning_rate"],
            momentum=0.9, momentum_kind="ema",
        )  # fmt: skip
        result = qg.minimize(Logistic(), train, method, budget=qg.Budget(epsilon, 1e-5))
        return float(np.mean((np.asarray(against[0] @ result.params).ravel() > 0) == (against[1] > 0)))

    rows = []
    tried = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    for epsilon in (1.0, 3.0):
        for sampling in ("poisson", "random-allocation"):
            part, rest = (X[kept], y[kept]), (X[held], y[held])
            scores = [[score(sampling, epsilon, given, part, rest)] for given in tried]
            best = sorted(range(len(tried)), key=lambda i: -scores[i][0])[:FINALISTS]
            for i in best:
                scores[i] += [score(sampling, epsilon, tried[i], part, rest) for _ in range(AGAIN)]
            chosen = tried[max(best, key=lambda i: statistics.mean(scores[i]))]
            found = [score(sampling, epsilon, chosen, (X, y), test) for _ in range(RUNS)]
            rows.append({
                "epsilon": epsilon, "sampling": sampling, "settings": chosen, "accuracy": statistics.mean(found),
                "deviation": statistics.stdev(found), "runs": RUNS,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def mnist() -> list[dict[str, Any]]:
    """Test accuracy of a small CNN under both samplings, at equal search over four rates."""
    import torch
    from torch import nn

    import quietgrad.torch as qt
    from quietgrad.data import load

    data = load("mnist")
    X, y = torch.as_tensor(np.asarray(data.X), dtype=torch.float32), torch.as_tensor(np.asarray(data.y)).long()
    pictures = (X / X.max()).reshape(-1, 1, 28, 28)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    kept, held = order[:20_000], order[20_000:25_000]
    test = torch.as_tensor(np.asarray(data.X_test), dtype=torch.float32), torch.as_tensor(np.asarray(data.y_test))
    against = (test[0] / X.max()).reshape(-1, 1, 28, 28), test[1].long()

    def score(sampling: str, epsilon: float, rate: float, to: Any) -> float:
        model = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
        method = qg.DPSGD(
            steps=120, batch_size=500, clip=1.0, learning_rate=rate, momentum=0.9, momentum_kind="ema",
            sampling=sampling,
        )  # fmt: skip
        rows = torch.utils.data.TensorDataset(pictures[kept], y[kept])
        qt.fit(model, nn.CrossEntropyLoss(), rows, method, budget=qg.Budget(epsilon, 1e-5), n_public=20_000)
        with torch.no_grad():
            return float((model(to[0]).argmax(1) == to[1]).float().mean())

    rows = []
    rates = (1.0, 2.0, 4.0, 8.0)
    for epsilon, sampling in itertools.product((1.0, 3.0), ("poisson", "random-allocation")):
        searched = {
            rate: statistics.mean(score(sampling, epsilon, rate, (pictures[held], y[held])) for _ in range(2))
            for rate in rates
        }
        chosen = max(rates, key=searched.__getitem__)
        found = [score(sampling, epsilon, chosen, against) for _ in range(4)]
        rows.append({
            "epsilon": epsilon, "sampling": sampling, "learning_rate": chosen, "searched": searched, "runs": 4,
            "accuracy": statistics.mean(found), "deviation": statistics.stdev(found),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """The parts that are named, kept beside those that were made before."""
    makers: dict[str, Any] = {"price": price, "finer": finer, "time": times, "a9a": a9a, "mnist": mnist}
    path = RESULTS / "random_allocation.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    parts = {name: kept[name] for name in makers if name in kept}
    for name in sys.argv[1:] or makers:
        parts[name] = makers[name]()
        save(path, {"what": __doc__, **parts})


if __name__ == "__main__":
    main()
