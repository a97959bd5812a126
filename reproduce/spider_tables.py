"""Do differences pay on tables? DP-GD beside SPIDER with split noise, logistic regression on a9a and ijcnn1.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/spider_tables.py
    OMP_NUM_THREADS=1 python reproduce/spider_tables.py --quick               # breast cancer, one setting each

Takes 5 CPU minutes. Rows get a constant 1 and are scaled to a length of at most 1, so G = 1 and M = ¼ are true of
every record, no clip is ever active, and both methods have the same. All records are in every release and budgets
compose exactly: T releases of DP-GD have the noise multiplier √T·z, SPIDER's K full gradients √(K/s)·z and its
differences √((T−K)/(1−s))·z with z that of one release. δ = 1e-5, add-remove, ε = 0.2.

Both methods search as in ``reproduce/valley.py``, by the loss on a fixed eighth of the training rows: the grid by
one run, the best 40 by 4 others, the best 12 by 16 others, the best 4 by 40 others. The choice is run on all
training rows by 40 + 40 further seeds; their test loss is published. Sums are computed for many settings at once,
in 32-bit floats; ``tests/methods/test_spider.py`` compares the walk with the library's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import calibrate_event
from quietgrad.data import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.comparisons import Comparison
from reproduce.staged_search import Floats, Search, Settings, Stage, contender
from reproduce.store import Row, print_table

Singles = npt.NDArray[np.float32]
FILE = Path(__file__).parent / "results" / "spider_tables.json"
COMMAND = "OMP_NUM_THREADS=1 python reproduce/spider_tables.py"
LIPSCHITZ, CURVATURE, DELTA = 1.0, 0.25, 1e-5
CELLS = [("a9a", 0.2), ("ijcnn1", 0.2)]
_RATES = [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]
GRIDS: dict[str, dict[str, list[Any]]] = {
    "dp-gd": {
        "steps": [8, 16, 32, 64, 128],
        "learning_rate": sorted([*_RATES, 2.8, 5.6, 11.0, 22.0, 45.0, 90.0]),
        "momentum": [0.0, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95],
        "decay": [False, True],
        "average": [False, True],
    },
    "dp-spider": {
        "steps": [8, 16, 32, 64, 128],
        "learning_rate": _RATES,
        "full_gradients": [1, 2, 4, 8],
        "split": [0.1, 0.3, 0.6, 0.85, 0.97],
        "decay": [False, True],
        "average": [False, True],
    },
}
STAGES = (Stage(1, 1, 0), Stage(4, 2, 40), Stage(16, 3, 12))
LAST, LONGEST, RUNS = Stage(40, 4, 4), 600, 40
FAR = 1e6  # where a run that diverges is left
WORST = 10.0  # its loss
_TOGETHER = 256  # models in one product


def scaled(X: Any) -> Floats:
    """Rows with a constant 1, scaled to a length of at most 1."""
    dense = X.toarray() if hasattr(X, "toarray") else np.asarray(X)
    rows = np.column_stack([dense.astype(np.float64), np.ones(len(dense))])
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0))


@dataclass(frozen=True, eq=False)
class Fit:
    """Logistic regression on some rows, and its loss on others."""

    X: Singles
    y: Singles
    X_new: Singles
    y_new: Singles
    z: float

    @classmethod
    def of(cls, rows: tuple[Any, Any], new: tuple[Any, Any], z: float) -> Fit:
        """Rows and labels 0/1, those that are looked at, and the noise multiplier of one release."""
        X, y, X_new, y_new = (np.ascontiguousarray(part, dtype=np.float32) for part in (*rows, *new))
        return cls(X, y, X_new, y_new, z)

    def reached(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats]:
        """The losses of the last iterates and of the averages of the second half."""
        last, average, _ = self.walk(method, steps, settings, seed, runs)
        return self._loss(last), self._loss(average)

    def walk(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats, Floats]:
        """Last iterates and averages by setting and run, and how long the walks were; all hear one noise."""
        size = max(1, _TOGETHER // runs)
        parts = [
            self._walk(method, steps, settings[k : k + size], seed, runs) for k in range(0, len(settings), size)
        ]
        last, average, length = (np.concatenate(each) for each in zip(*parts, strict=True))
        return last, average, length

    def _walk(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats, Floats]:
        rng, n = np.random.default_rng(seed), len(self.X)
        w = np.zeros((len(settings), runs, self.X.shape[1]))
        before, slope_before, estimate, total = w, w, w, np.zeros_like(w)
        length = np.zeros((len(settings), runs, 1))
        eta, decay = _column(settings, "learning_rate"), _column(settings, "decay")
        momentum, period, first, second = self._constants(method, steps, settings)
        for t in range(steps):
            slope, noise = self._slope(w), rng.standard_normal((runs, w.shape[2])) / n
            moved = np.sqrt(((w - before) ** 2).sum(-1, keepdims=True))
            fresh = slope + first * LIPSCHITZ * noise
            if method == "dp-gd":
                estimate = fresh if t == 0 else momentum * estimate + (1.0 - momentum) * fresh
            else:
                changed = estimate + slope - slope_before + second * CURVATURE * moved * noise
                estimate = np.clip(np.where(t % period == 0, fresh, changed), -FAR, FAR)
            before, slope_before = w, slope
            w = np.clip(w - eta * (1.0 - decay * t / steps) * estimate, -FAR, FAR)
            length += np.sqrt(((w - before) ** 2).sum(-1, keepdims=True))
            if 2 * t >= steps:
                total += w
        return w, total / (steps - (steps + 1) // 2), length[..., 0]

    def _constants(
        self, method: str, steps: int, settings: Sequence[Settings]
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Momentum, period, and the noise multipliers of full gradients and of differences."""
        one = np.ones((len(settings), 1, 1))
        if method == "dp-gd":
            return _column(settings, "momentum"), one, math.sqrt(steps) * self.z * one, one
        period = np.ceil(steps / _column(settings, "full_gradients"))
        full, split = np.ceil(steps / period), _column(settings, "split")
        share = np.where(full < steps, split, 1.0)  # full gradients alone have all of the budget
        return one, period, np.sqrt(full / share) * self.z, np.sqrt((steps - full) / (1.0 - split)) * self.z

    def _slope(self, w: Floats) -> Floats:
        """The mean gradient at every model."""
        flat = np.ascontiguousarray(w.reshape(-1, w.shape[2]).T, dtype=np.float32)
        rest = self.X @ flat
        np.clip(rest, -80.0, 80.0, out=rest)
        np.negative(rest, out=rest)
        np.exp(rest, out=rest)
        rest += 1.0
        np.reciprocal(rest, out=rest)
        rest -= self.y[:, None]
        return np.asarray((self.X.T @ rest).T.reshape(w.shape) / np.float64(len(self.X)))

    def _loss(self, w: Floats) -> Floats:
        flat, found = w.reshape(-1, w.shape[2]), []
        for k in range(0, len(flat), _TOGETHER):
            margin = (self.X_new @ flat[k : k + _TOGETHER].T.astype(np.float32)).astype(np.float64)
            found.append((np.logaddexp(0.0, margin) - self.y_new[:, None] * margin).mean(0))
        return np.asarray(np.minimum(np.concatenate(found).reshape(w.shape[:2]), WORST))


def _column(settings: Sequence[Settings], name: str) -> Floats:
    return np.array([each[name] for each in settings], dtype=np.float64)[:, None, None]


def measured(data: str, epsilon: float) -> Row:
    """Both methods on one table at one ε."""
    table = load(data)
    X, y, order = scaled(table.X), np.asarray(table.y), np.random.default_rng(0).permutation(table.n)
    held, rest = order[: table.n // 8], order[table.n // 8 :]
    z = calibrate_event(events.Gaussian, budget=qg.Budget(epsilon, DELTA))
    look = Fit.of((X[rest], y[rest]), (X[held], y[held]), z)
    final = Fit.of((X, y), (scaled(table.X_test), table.y_test), z)
    row: Row = {"data": data, "epsilon": epsilon, "n": table.n}
    for method, lists in GRIDS.items():
        search = Search(method, look, {name: list(each) for name, each in lists.items()}, STAGES, LAST, LONGEST)
        found = search.recorded(search.run(), RUNS, final)
        chosen = found["fits"]["settings"]
        lengths = final.walk(method, chosen["steps"], [chosen], 20_000, RUNS)[2]
        row[method] = {**found, "path": float(lengths.mean())}
    row["ratio"] = LIPSCHITZ / (CURVATURE * row["dp-spider"]["path"])
    return row


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Both methods on every table."""
    return [
        Comparison(
            f"{row['data']}, ε = {row['epsilon']:g}, full gradients or differences: test loss",
            [contender(method, row[method], LIPSCHITZ) for method in GRIDS],
        )
        for row in record["rows"]
    ]


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What `quietgrad reproduce spider-tables` shows."""
    columns = ["data", "ε", "G/(M·path)", "DP-GD", "± se", "SPIDER", "± se", "standard errors"]
    return [{
        "title": "DP-GD and SPIDER with split noise on tables, test loss", "columns": columns,
        "rows": [
            [
                row["data"], row["epsilon"], row["ratio"],
                *(row[m]["fits"][name] for m in GRIDS for name in ("mean", "mean_se")),
                None if list(comparison.faults()) else comparison.apart(),
            ]
            for row, comparison in zip(record["rows"], compared(record), strict=True)
        ],
    }]  # fmt: skip


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description="Whether variance reduction pays on tables.")
    parser.add_argument("--quick", action="store_true", help="a small table, one setting each; nothing is written")
    if parser.parse_args().quick:
        quick()
        return
    rows: list[Row] = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else []
    for data, epsilon in CELLS:
        if any((row["data"], row["epsilon"]) == (data, epsilon) for row in rows):
            continue  # to measure a cell again, delete its row
        rows.append(measured(data, epsilon))
        save(FILE, {"command": COMMAND, "rows": rows, "tables": tables({"rows": rows})})
    print_table(**tables({"rows": rows})[0])


def quick() -> None:
    """Both methods at one setting each."""
    table = load("breast-cancer")
    fit = Fit.of((scaled(table.X), table.y), (scaled(table.X_test), table.y_test), 1.0)
    shared = {"learning_rate": 4.0, "decay": True, "momentum": 0.5, "full_gradients": 2, "split": 0.6}
    body = [[name, float(fit.reached(name, 16, [shared], 0, 5)[0].mean())] for name in GRIDS]
    print_table("Breast cancer, 16 steps, 5 runs, nothing searched (not a result)", ["method", "test loss"], body)


if __name__ == "__main__":
    main()
