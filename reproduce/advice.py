"""Does the advice at G/(M·path) hold on risks that it was not made from? A ring, a quadratic, and wrong constants.

    OMP_NUM_THREADS=1 python reproduce/advice.py            # no data needed
    OMP_NUM_THREADS=1 python reproduce/advice.py --quick    # one setting each, seconds

Takes 5 CPU minutes. `quietgrad plan --radius` gives advice that was measured on one curved valley
(``reproduce/valley.py``). Here a user states the constants of two other risks in d = 10 dimensions:

- *ring*: F(x) = ¾(‖x‖² − 1)² + 0.05‖x + e₁‖², entered beside the ring and left half way around it. M = 8 where
  ‖x‖ ≤ 1.1;
- *quadratic*: curvatures from 0.02 to 1, M = 1. By a short calculation averaged gradient descent equals variance
  reduction there.

Record (i, ±) adds the slope ±ς·e_i, so that G = 1.1ς + 1 bounds its gradient. A user may be wrong: state a fifth of
M, which cuts differences, or a tenth of the radius. All records are in every release, ν = G√d/(nμ). Both methods
search as in ``reproduce/staged_search.py``.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.methods.regimes import Regime

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.comparisons import Comparison
from reproduce.staged_search import Floats, Search, Settings, Stage, contender
from reproduce.store import Row, print_table

FILE = Path(__file__).parent / "results" / "advice.json"
DIM, FAR = 10, 50.0  # where a run that diverges is left
CURVATURE = {"ring": 8.0, "quadratic": 1.0}
START = {"ring": np.array([0.3, 0.9] + [0.0] * 8), "quadratic": np.full(DIM, 1.0)}
_AXES = np.geomspace(0.02, 1.0, DIM)
_PULL = np.array([1.0] + [0.0] * 9)
CELLS = (  # risk, spread ς, ν, and the shares of M and of the radius that the user states
    *(("ring", spread, noise, 1.0, 1.0) for spread in (60.0, 0.05) for noise in (0.01, 0.05)),
    *(("quadratic", spread, noise, 1.0, 1.0) for spread in (60.0, 10.0) for noise in (0.01, 0.05)),
    *(("ring", 60.0, noise, 0.2, 1.0) for noise in (0.01, 0.05)),
    *(("ring", 3.0, noise, 1.0, 0.1) for noise in (0.01, 0.05)),
)
GRIDS: dict[str, dict[str, list[Any]]] = {
    "dp-gd": {
        "steps": [100, 300, 1000],
        "learning_rate": [0.003, 0.006, 0.01, 0.02, 0.03, 0.06, 0.1, 0.2, 0.3, 0.6],
        "momentum": [0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.97, 0.99],
        "average": [False, True],
    },
    "dp-spider": {
        "steps": [100, 300, 1000],
        "learning_rate": [0.003, 0.01, 0.03, 0.1, 0.3, 0.6],
        "full_gradients": [1, 4, 16, 64],
        "split": [0.3, 0.6, 0.85, 0.97],
        "average": [False, True],
    },
}
STAGES = (Stage(12, 1, 0), Stage(60, 2, 40), Stage(300, 3, 12))
LAST, LONGEST, RUNS = Stage(1000, 4, 4), 10_000, 600


def gradient(risk: str, x: Floats) -> Floats:
    """∇F; points are along the last axis."""
    if risk == "quadratic":
        return np.asarray(_AXES * x)
    return np.asarray(3.0 * ((x**2).sum(-1, keepdims=True) - 1.0) * x + 0.1 * (x + _PULL))


@lru_cache
def path_length(risk: str) -> float:
    """How far descent without noise walks."""
    x, length = START[risk], 0.0
    for _ in range(40_000):
        step = 0.01 * gradient(risk, x)
        x, length = x - step, length + float(np.linalg.norm(step))
    return length


@dataclass(frozen=True)
class Cell:
    """A risk, its noise, and what a user states of it; something to search."""

    risk: str
    spread: float
    noise: float
    share_of_curvature: float
    share_of_radius: float

    @property
    def lipschitz(self) -> float:
        return 1.1 * self.spread + 1.0

    @property
    def curvature(self) -> float:
        """M as it is stated."""
        return self.share_of_curvature * CURVATURE[self.risk]

    @property
    def regime(self) -> Regime:
        """What `quietgrad plan` says."""
        return Regime(self.lipschitz, self.curvature, self.share_of_radius * path_length(self.risk))

    def reached(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats]:
        """‖∇F‖ at last iterates and at averages of the second half; all settings hear the same noise."""
        rng, unit = (
            np.random.default_rng(seed),
            self.noise / math.sqrt(DIM),
        )  # one coordinate, one release of all of μ
        x = np.broadcast_to(START[self.risk], (len(settings), runs, DIM)).copy()
        before, slope_before, estimate, total = x, x, np.zeros_like(x), np.zeros_like(x)
        eta = column(settings, "learning_rate")
        momentum, period, first, second = self._constants(method, steps, settings)
        for t in range(steps):
            slope = cut(gradient(self.risk, x), self.lipschitz)
            noise = rng.standard_normal((runs, DIM)) * unit
            fresh = slope + first * noise
            if method == "dp-gd":
                estimate = fresh if t == 0 else momentum * estimate + (1.0 - momentum) * fresh
            else:
                moved = np.linalg.norm(x - before, axis=-1, keepdims=True)
                change = cut(slope - slope_before, self.curvature * moved) + second * moved * noise
                estimate = np.where(t % period == 0, fresh, estimate + change)
            before, slope_before = x, slope
            x = np.clip(x - eta * estimate, -FAR, FAR)
            if 2 * t >= steps:
                total += x
        ends = (x, total / (steps - (steps + 1) // 2))
        last, average = (np.linalg.norm(gradient(self.risk, each), axis=-1) for each in ends)
        return np.minimum(last, FAR), np.minimum(average, FAR)

    def _constants(
        self, method: str, steps: int, settings: Sequence[Settings]
    ) -> tuple[Floats, Floats, Floats, Floats]:
        """Momentum, period, and how much louder full gradients and differences are than one release of all of μ."""
        one = np.ones((len(settings), 1, 1))
        if method == "dp-gd":
            return column(settings, "momentum"), one, math.sqrt(steps) * one, one
        period = np.ceil(steps / column(settings, "full_gradients"))
        full, split = np.ceil(steps / period), column(settings, "split")
        share = np.where(full < steps, split, 1.0)  # full gradients alone have all of the budget
        louder = self.curvature / self.lipschitz
        return one, period, np.sqrt(full / share), np.sqrt((steps - full) / (1.0 - split)) * louder


def column(settings: Sequence[Settings], name: str) -> Floats:
    """A setting of each, to multiply settings × runs × coordinates."""
    return np.array([each[name] for each in settings], dtype=np.float64)[:, None, None]


def cut(vectors: Floats, length: float | Floats) -> Floats:
    """Vectors clipped to a length."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors * np.minimum(1.0, length / np.maximum(norms, 1e-300)))


def measured(place: tuple[Any, ...]) -> Row:
    """Both methods in one cell."""
    cell = Cell(*place)
    row: Row = {"place": list(place)}
    for method, lists in GRIDS.items():
        search = Search(method, cell, {name: list(each) for name, each in lists.items()}, STAGES, LAST, LONGEST)
        row[method] = search.recorded(search.run(), RUNS)
    return row


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Both methods in every cell."""
    found = []
    for row in record["rows"]:
        cell = Cell(*row["place"])
        wrong = {1.0: "", 0.2: ", M/5 stated"}[cell.share_of_curvature]
        wrong += {1.0: "", 0.1: ", radius/10 stated"}[cell.share_of_radius]
        what = f"{cell.risk}{wrong}, G/(M·path) = {cell.regime.ratio:.2g}, ν = {cell.noise:g}: ‖∇F‖"
        found.append(Comparison(what, [contender(method, row[method], cell.lipschitz) for method in GRIDS]))
    return found


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What `quietgrad reproduce advice` shows."""
    columns = [
        "risk",
        "stated G/(M·path)",
        "ν",
        "DP-GD",
        "± se",
        "SPIDER",
        "± se",
        "gain",
        "standard errors",
        "advice",
    ]
    body = []
    for row, comparison in zip(record["rows"], compared(record), strict=True):
        cell, outcomes = Cell(*row["place"]), [row[method]["fits"] for method in GRIDS]
        stated = None if list(comparison.faults()) else comparison.apart()
        body.append([
            comparison.what.partition(", G/")[0], cell.regime.ratio, cell.noise,
            *(each[name] for each in outcomes for name in ("mean", "mean_se")),
            None if stated is None else outcomes[0]["mean"] / outcomes[1]["mean"], stated, cell.regime.advice,
        ])  # fmt: skip
    return [{"title": "The advice at G/(M·path) on other risks", "columns": columns, "rows": body}]


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description="The advice at G/(M·path) on other risks.")
    parser.add_argument("--quick", action="store_true", help="one setting each, nothing written")
    if parser.parse_args().quick:
        shared = {"learning_rate": 0.1, "momentum": 0.9, "full_gradients": 1, "split": 0.85}
        cell = Cell(*CELLS[0])
        body = [[name, float(cell.reached(name, 100, [shared], 0, 50)[0].mean())] for name in GRIDS]
        print_table("Ring, 100 steps, 50 runs, nothing searched (not a result)", ["method", "‖∇F‖"], body)
        return
    rows: list[Row] = []
    for place in CELLS:
        rows.append(measured(place))
        save(FILE, {"rows": rows, "tables": tables({"rows": rows})})
    print_table(**tables({"rows": rows})[0])


if __name__ == "__main__":
    main()
