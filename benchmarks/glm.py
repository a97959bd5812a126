"""Private linear models against their peers, in one run and one thread.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/glm.py [speed|accuracy|memory] ...

speed: CPU time of one DP-SRM step on a9a with b = 100, through the real curator with cryptographic noise, against
the same algorithm in plain numpy (dense rows, numpy's own generator) and an Opacus DP-SGD loop on a linear layer.
accuracy: ``PrivateLogisticRegression`` as it comes, 20 fits, beside diffprivlib where it can be installed.
memory: what a fit of 10⁶ × 100 float32 adds to the data.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.core.session.curator import CentralCurator
from quietgrad.data import load
from quietgrad.objectives import Logistic, Nonconvex

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "glm.json"
PEERS = Path(__file__).parents[1] / "runs" / "peers"
BATCH, STEPS, GAMMA, CLIP, RATE = 100, 3000, 0.1, 1.0, 0.3


def speed(repeats: int = 7) -> dict[str, Any]:
    """Median CPU µs per step of each, measured in turn."""
    data = load("a9a")
    contenders: dict[str, Callable[[], float]] = {"quietgrad": ours(data), "numpy": plain_numpy(data)}
    contenders["opacus"] = opacus_loop(data)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats + 1):
        for name, contender in contenders.items():
            times[name].append(contender())
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first warms up
    return {
        "what": "CPU µs per DP-SRM step, a9a, b=100 (Opacus: per DP-SGD step), median of 7, 1 thread",
        "cpu_us_per_step": medians,
        "numpy / quietgrad": medians["numpy"] / medians["quietgrad"],
        "opacus / quietgrad": medians["opacus"] / medians["quietgrad"],
    }


def ours(data: Any) -> Callable[[], float]:
    """DP-SRM through the door."""
    objective = Logistic(regularizer=Nonconvex(1e-3))
    algorithm = qg.DPSRM(steps=STEPS, batch_size=BATCH, learning_rate=RATE, gamma=GAMMA, clip=CLIP)
    plan = qg.plan(algorithm, n=data.n, budget=qg.Budget(0.5, 1e-5))
    curator = CentralCurator(objective, (data.X.astype(np.float32), data.y))

    def run() -> float:
        session = curator.open(plan)
        state = algorithm.init(curator.initial())
        start = time.process_time()
        while not state.done:
            state = algorithm.step(state, session)
        return (time.process_time() - start) / STEPS * 1e6

    return run


def plain_numpy(data: Any) -> Callable[[], float]:
    """The same updates as a user would write them: dense rows, default_rng, fixed batches."""
    X, y = data.X.toarray().astype(np.float32), data.y.astype(np.float64)
    norms = np.linalg.norm(X, axis=1)
    n, d = X.shape
    c2 = GAMMA * CLIP / 4.0
    sigma = 1.114 * ((1 - GAMMA) * c2 + GAMMA * CLIP)

    def clipped(r: Any, lengths: Any, c: float) -> Any:
        return r * np.minimum(1.0, c / np.maximum(np.abs(r) * lengths, 1e-12))

    def run() -> float:
        rng = np.random.default_rng()
        theta, previous, v = np.zeros(d), np.zeros(d), np.zeros(d)
        start = time.process_time()
        for _ in range(STEPS):
            batch = rng.choice(n, BATCH, replace=False)
            rows, labels, lengths = X[batch], y[batch], norms[batch]
            r = 1.0 / (1.0 + np.exp(-(rows @ theta))) - labels
            before = 1.0 / (1.0 + np.exp(-(rows @ previous))) - labels
            w = (1 - GAMMA) * clipped(r - before, lengths, c2) + GAMMA * clipped(r, lengths, CLIP)
            v = (1 - GAMMA) * v + (rows.T @ w + sigma * rng.standard_normal(d)) / BATCH
            squares = theta * theta
            previous, theta = theta, theta - RATE * (v + 1e-3 * 2 * theta / (1 + squares) ** 2)
        return (time.process_time() - start) / STEPS * 1e6

    return run


def opacus_loop(data: Any, steps: int = 200) -> Callable[[], float]:
    """Opacus 1.6.0's own DP-SGD loop on the same rows."""
    if not (PEERS / "opacus").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(PEERS)]
        subprocess.run([*command, "opacus==1.6.0", "opt_einsum"], check=True)
    sys.path.append(str(PEERS))
    import warnings

    import torch
    from opacus import PrivacyEngine

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = torch.from_numpy(data.X.toarray().astype(np.float32))
    dataset = torch.utils.data.TensorDataset(rows, torch.from_numpy(data.y.astype(np.float32)))
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=BATCH)
    model: Any = torch.nn.Linear(data.d, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.114, max_grad_norm=CLIP
    )
    loss_fn = torch.nn.BCEWithLogitsLoss()

    def run() -> float:
        done, start = 0, time.process_time()
        for x, t in loader:
            optimizer.zero_grad()
            loss_fn(model(x).squeeze(1), t).backward()
            optimizer.step()
            done += 1
            if done == steps:
                break
        return (time.process_time() - start) / done * 1e6

    return run


def accuracy(fits: int = 20) -> dict[str, Any]:
    """Test accuracy and loss of the default estimator, and the CPU time of a fit in this process."""
    from quietgrad.estimators import PrivateLogisticRegression

    rows = []
    for name in ("a9a", "ijcnn1"):
        data = load(name)
        for epsilon in (0.2, 0.5, 1.0):
            model = PrivateLogisticRegression(epsilon=epsilon, delta=1e-5, relation="replace-one", classes=[0, 1])
            scores, losses, seconds = [], [], []
            for _ in range(fits):
                start = time.process_time()
                model.fit(data.X, data.y)
                seconds.append(time.process_time() - start)
                scores.append(model.score(data.X_test, data.y_test))
                p = model.predict_log_proba(data.X_test)[np.arange(len(data.y_test)), data.y_test.astype(int)]
                losses.append(-float(p.mean()))
            rows.append({
                "data": name, "epsilon": epsilon, "fits": fits, "row_bound": "found privately",
                "accuracy": statistics.mean(scores), "accuracy_se": statistics.stdev(scores) / math.sqrt(fits),
                "loss": statistics.mean(losses), "first_fit_cpu_s": seconds[0],
                "fit_cpu_s": statistics.median(seconds[1:]),
                "proved_epsilon": model.privacy_.epsilon,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return {
        "what": "PrivateLogisticRegression(epsilon, delta=1e-5, replace-one, classes=[0, 1]), defaults",
        "rows": rows,
    }


def memory() -> dict[str, Any]:
    """Peak memory of a fit on 10⁶ × 100 float32 above the data's own, in a fresh process."""
    child = subprocess.run(
        [sys.executable, __file__, "_memory"],
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ},
    )
    return dict(json.loads(child.stdout.splitlines()[-1]))


def _memory() -> None:
    from quietgrad.estimators import PrivateLogisticRegression

    rng = np.random.default_rng(0)
    small = rng.standard_normal((1000, 100)).astype(np.float32)
    labels = (small[:, 0] > 0).astype(np.float64)
    PrivateLogisticRegression(classes=[0, 1]).fit(small, labels)  # imports and work space
    X = np.empty((10**6, 100), np.float32)
    for start in range(0, 10**6, 10**5):
        X[start : start + 10**5] = rng.standard_normal((10**5, 100), dtype=np.float32)
    y = (X[:, 0] > 0).astype(np.float64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start_time = time.process_time()
    PrivateLogisticRegression(classes=[0, 1]).fit(X, y)
    seconds = time.process_time() - start_time
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"what": "fit of 10⁶ × 100 float32, default estimator", "data_bytes": X.nbytes,
                      "added_bytes": added, "added / data": added / X.nbytes, "cpu_s": seconds}))  # fmt: skip


def main() -> None:
    """Run the parts named (default: all) and keep their numbers."""
    if sys.argv[1:] == ["_memory"]:
        return _memory()
    parts = {"speed": speed, "accuracy": accuracy, "memory": memory}
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept = {name: kept[name] for name in parts if name in kept}
    for name in sys.argv[1:] or list(parts):
        kept[name] = parts[name]()
        print(name, json.dumps(kept[name], indent=1, ensure_ascii=False)[:600])
    save(RESULT, kept)
    return None


if __name__ == "__main__":
    main()
