"""One DP-SGD step of a linear model with ten classes on dense rows, against the same arithmetic in plain torch.

    OMP_NUM_THREADS=1 python benchmarks/dense_classes.py

Ours is ``minimize`` whole: Poisson samples, float64 sums, secret noise on the grid, the step. The peer gathers
the batch, multiplies, takes softmax residuals, clips, multiplies back and adds normals, in float32. CPU time
per step, medians of interleaved repeats; the first call of a fresh process is given apart.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import quietgrad as qg
from quietgrad.objectives import Multinomial

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "dense_classes.json"
STEPS, CLASSES = 20, 10


def measure(rows: int, features: int, batch: int, repeats: int = 7) -> dict[str, Any]:
    """Milliseconds of CPU per step of both, and of our first call."""
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((rows, features), dtype=np.float32), rng.integers(0, CLASSES, rows)
    objective = Multinomial(CLASSES)
    table = objective.prepare((X, y))
    inputs, labels, lengths = torch.from_numpy(X), torch.from_numpy(y), torch.from_numpy(X).norm(dim=1)
    method = qg.DPSGD(steps=STEPS, batch_size=batch, learning_rate=0.1, clip=0.1)
    plan = qg.plan(method, n=rows, budget=qg.Budget(1.0, 1e-5))

    def ours() -> None:
        qg.minimize(objective, table, method, budget=qg.Budget(1.0, 1e-5), planned=plan)

    def peer() -> None:
        weights = torch.zeros(features, CLASSES)
        for _ in range(STEPS):
            which = torch.nonzero(torch.rand(rows) < batch / rows).ravel()
            x = inputs[which]
            r = torch.softmax(x @ weights, 1)
            r[torch.arange(len(which)), labels[which]] -= 1.0
            factor = (0.1 / (r.norm(dim=1) * lengths[which])).clamp(max=1.0)
            weights -= 0.1 * (x.T @ (r * factor[:, None]) + torch.randn_like(weights)) / batch

    took: dict[str, list[float]] = {"quietgrad": [], "torch": []}
    for _ in range(1 + repeats):
        for name, run in (("quietgrad", ours), ("torch", peer)):
            started = time.process_time()
            run()
            took[name].append(1e3 * (time.process_time() - started) / STEPS)
    medians = {name: statistics.median(times[1:]) for name, times in took.items()}
    row = {
        "rows": rows, "features": features, "batch": batch, "cpu_ms_per_step": medians,
        "ratio": medians["quietgrad"] / medians["torch"],
        "first_call_cpu_s": {name: 1e-3 * STEPS * times[0] for name, times in took.items()},
    }  # fmt: skip
    print(row, flush=True)
    return row


def main() -> None:
    """Scattering features of MNIST, pixels, and a small table."""
    torch.set_num_threads(1)
    rows = [measure(20_000, 3969, 4096), measure(20_000, 784, 1024), measure(20_000, 64, 256)]
    save(RESULT, {"what": __doc__, "classes": CLASSES, "rows": rows})


if __name__ == "__main__":
    main()
