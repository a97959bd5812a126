"""CPU time of one recursive-momentum sum (DP-SRM, b = 100) on a9a: the compiled kernels against plain numpy.

    OMP_NUM_THREADS=1 python benchmarks/kernels.py

CPU time, because wall time on a shared machine measures its neighbours; the median over repeats of the mean call.
The numpy peer does the same algorithm on the same batches with dense row gathers.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import scipy
from sklearn.datasets import load_svmlight_file

from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import RecursiveMomentumQuery
from quietgrad.tables.losses import Logistic

Floats = npt.NDArray[np.float64]
HERE = Path(__file__).resolve().parent
BATCH, CALLS, REPEATS = 100, 400, 15
GAMMA, CLIP, DIFFERENCE_CLIP = 0.1, 1.0, 0.1


def numpy_momentum(
    X: Floats, y: Floats, norms: Floats, batch: Any, theta: Floats, previous: Floats, out: Floats
) -> None:
    """The same sum as an experienced numpy user would write it."""
    rows, labels, lengths = X[batch], y[batch], norms[batch]
    now = 1.0 / (1.0 + np.exp(-(rows @ theta))) - labels
    moved = now - 1.0 / (1.0 + np.exp(-(rows @ previous))) + labels
    first = np.minimum(1.0, CLIP / np.maximum(np.abs(now) * lengths, 1e-300))
    second = np.minimum(1.0, DIFFERENCE_CLIP / np.maximum(np.abs(moved) * lengths, 1e-300))
    out += (GAMMA * first * now + (1.0 - GAMMA) * second * moved) @ rows


def microseconds(calls: list[Callable[[], None]]) -> float:
    """Mean CPU time of one call."""
    start = time.process_time()
    for call in calls:
        call()
    return (time.process_time() - start) / len(calls) * 1e6


def main() -> None:
    """Measure, print, and write ``results/kernels.json``."""
    folder = Path(os.environ.get("QUIETGRAD_DATA", HERE.parent.parent / "shared" / "data"))
    if not (folder / "a9a.bz2").exists():
        sys.exit("a9a.bz2 not found: set QUIETGRAD_DATA to the folder that holds it.")
    sparse, labels = load_svmlight_file(str(folder / "a9a.bz2"), n_features=123)
    y = (labels > 0).astype(np.float64)
    dense = sparse.toarray()
    norms = np.linalg.norm(dense, axis=1)
    rng = np.random.default_rng(0)
    theta = 0.1 * rng.normal(size=123)
    previous = theta + 0.01 * rng.normal(size=123)
    batches = [rng.choice(len(y), BATCH, replace=False) for _ in range(CALLS)]
    objective, out = Logistic(), np.zeros(123)

    def kernel_calls(X: Any, indices: list[Any]) -> list[Callable[[], None]]:
        records = objective.prepare((X, y))
        query = RecursiveMomentumQuery(theta, previous, GAMMA, CLIP, DIFFERENCE_CLIP)
        return [partial(query.sum_into, objective, Batch(records, b), out) for b in indices]

    contenders: dict[str, list[Callable[[], None]]] = {
        "csr float32": kernel_calls(sparse.astype(np.float32), batches),
        "csr float64": kernel_calls(sparse, batches),
        "dense float32": kernel_calls(dense.astype(np.float32), batches),
        "dense float64": kernel_calls(dense, batches),
        "numpy dense float64": [partial(numpy_momentum, dense, y, norms, b, theta, previous, out) for b in batches],
        "empty batch (dispatch)": kernel_calls(sparse, [batches[0][:0]] * CALLS),
        "full batch csr float32": kernel_calls(sparse.astype(np.float32), [None] * 10),
        "full batch dense float32": kernel_calls(dense.astype(np.float32), [None] * 10),
    }
    for calls in contenders.values():
        calls[0]()  # compile
    # Alone: a training loop has one table, which the caches then hold. Interleaved: every contender finds the
    # caches full of the others' tables. Both are reported, because they differ by more than most optimisations.
    alone = {name: [microseconds(calls) for _ in range(REPEATS)] for name, calls in contenders.items()}
    interleaved: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(REPEATS):
        for name, calls in contenders.items():
            interleaved[name].append(microseconds(calls))
    medians = {
        protocol: {name: round(statistics.median(times), 2) for name, times in timings.items()}
        for protocol, timings in (("alone", alone), ("interleaved", interleaved))
    }
    result = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/kernels.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "numba": numba.__version__,
        },
        "data": "a9a 32561 x 123",
        "batch_size": BATCH,
        "unit": "CPU microseconds per call, median of repeats",
        "repeats": REPEATS,
        "medians": medians,
        "numpy / csr float32": {
            protocol: round(times["numpy dense float64"] / times["csr float32"], 2)
            for protocol, times in medians.items()
        },
    }
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "kernels.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
