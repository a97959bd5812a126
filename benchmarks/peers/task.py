"""What every library is asked, the same words for each; needs numpy alone, so that all environments read it.

Accuracy: logistic regression on one table whose rows have norm ≤ 1. Where a method has settings, they are searched
on held-out rows, on the same grid for all; then ``RUNS`` models are fitted on all training rows and scored once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

EPSILON, DELTA = 1.0, 1e-5
PARTS, STEPS, RUNS = 32, 200, 5  # a step's sample holds n // PARTS records in the mean
DP_SGD_GRID = [{"rate": r, "clip": c} for r, c in itertools.product((8.0, 32.0, 128.0), (0.1, 0.3))]
PENALTIES = [{"penalty": p} for p in (1e-4, 1e-3, 1e-2)]  # λ of mean loss + λ/2·‖θ‖²

RUN_N, RUN_BATCH, RUN_STEPS, RUN_EPSILON = 60_000, 512, 2000, 1.2  # the run whose noise is calibrated
GIVEN_NOISE = 1.5  # the noise multiplier whose ε is asked

LOOSE = {"epsilon": 1e4}  # scikit-learn's checks fit a few dozen rows: at ε = 1 nobody could find their classes


@dataclass(frozen=True)
class Table:
    """Training and test rows, labels 0 and 1."""

    X: Any
    y: Any
    X_test: Any
    y_test: Any

    @classmethod
    def read(cls, path: str | Path) -> Table:
        """The table that run.py wrote."""
        held = np.load(path)
        return cls(*(held[name] for name in ("X", "y", "X_test", "y_test")))

    def held_out(self) -> Table:
        """The last fifth of the shuffled training rows in place of the test rows."""
        order = np.random.default_rng(7).permutation(len(self.y))
        fit, check = np.split(order, [len(order) * 4 // 5])
        return Table(self.X[fit], self.y[fit], self.X[check], self.y[check])


Model = Callable[[Any], Any]  # rows → labels


def searched(fit: Callable[..., Model], table: Table, grid: Iterable[dict[str, float]]) -> dict[str, Any]:
    """Accuracy with the setting that did best on held-out rows, over ``RUNS`` fits."""
    inner = table.held_out()
    found = [(float(np.mean(fit(inner, **s)(inner.X_test) == inner.y_test)), s) for s in grid]
    setting = max(found, key=lambda pair: pair[0])[1]
    start = time.process_time()
    scores = [float(np.mean(fit(table, **setting)(table.X_test) == table.y_test)) for _ in range(RUNS)]
    return {
        "accuracy": statistics.mean(scores), "spread": statistics.stdev(scores), "setting": setting, "fits": RUNS,
        "cpu_seconds_a_fit": (time.process_time() - start) / RUNS,
    }  # fmt: skip


def cpu(run: Callable[[], Any], repeats: int = 3) -> tuple[Any, float]:
    """What it answers, and the median CPU seconds it takes."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        answer = run()
        taken.append(time.process_time() - start)
    return answer, statistics.median(taken)


def ratios(steps: dict[str, Callable[[], Any]], repeats: int = 7) -> dict[str, dict[str, float]]:
    """CPU time of each step, and its ratio to the first one's in the same round; the first two rounds warm up."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats + 2):
        for name, step in steps.items():
            start = time.process_time()
            step()
            taken[name].append(time.process_time() - start)
    plain = taken[next(iter(steps))][2:]
    return {
        name: {
            "cpu_ms": 1e3 * statistics.median(values[2:]),
            "ratio_to_sgd": statistics.median(v / p for v, p in zip(values[2:], plain, strict=True)),
        }
        for name, values in taken.items()
    }


def grown(step: Callable[[], Any]) -> float:
    """Megabytes by which the process grows at most over two steps (Linux)."""

    def status(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith(field)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    step()
    return (status("VmHWM") - before) / 1024


def checks(estimators: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """scikit-learn's own checks of each estimator: how many pass, and the names of those that do not."""
    import warnings

    from sklearn.utils.estimator_checks import check_estimator

    found = {}
    for estimator in estimators:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = check_estimator(estimator, on_fail=None, on_skip=None)
        failed = sorted({r["check_name"] for r in results if r["status"] in ("failed", "xfail")})
        passed = sum(r["status"] == "passed" for r in results)
        skipped = sum(r["status"] == "skipped" for r in results)
        found[type(estimator).__name__] = {
            "passed": passed, "of": len(results) - skipped, "skipped": skipped, "failed": failed
        }  # fmt: skip
    return found
