"""Where variance reduction pays: DP-GD beside SPIDER with split noise, on a curved valley with records that differ.

    OMP_NUM_THREADS=1 python reproduce/valley.py                  # no data needed
    OMP_NUM_THREADS=1 python reproduce/valley.py --resume         # cells that are missing or without a verdict
    OMP_NUM_THREADS=1 python reproduce/valley.py --draw           # docs/_static/regimes.svg
    OMP_NUM_THREADS=1 python reproduce/valley.py --quick          # one setting each, seconds

Takes 12 CPU minutes. The risk and the runs are in ``reproduce/valley_runs.py``. What varies is

- G/(M·path), with the path that descent without noise takes: how dear a full gradient is against a difference, and
- ν = ς√d/(nμ), the length of the noise of one full gradient that spends the whole budget μ (Gaussian DP).

Both methods search a grid and then closer values around its best (``reproduce/staged_search.py``). ‖∇F‖ has a
heavy tail: a setting that diverges once in a hundred runs looks best on a few lucky ones. So a grid's settings, run
on 8 seeds, are only screened: the best 100 are run again on 50 other seeds, the best 20 of these on 200 others, the
best 5 of these on 3000 others, and of those within one standard error of the best the one with fewest steps is
chosen. It is run on 1000 further seeds, which are published, and on another 1000, which must agree. A list whose
last value is chosen grows until it is not (``reproduce/comparisons.py``); K = 1 and momentum 0 end by nature.

The problem of DP-GD depends on ν alone as long as no clip is active, so all cells of one ν share its search, made
at the least and at the largest spread; each cell picks among the finalists.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.charts import Lines, Series, to_svg_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.comparisons import Comparison
from reproduce.staged_search import Floats, Search, Settings, Stage, contender
from reproduce.store import Row, print_table
from reproduce.valley_runs import FAR, SMOOTHNESS, Cell, ends, norms, path_length, points, value

ROOT = Path(__file__).parents[1]
FILE = ROOT / "reproduce" / "results" / "valley.json"
PICTURE = ROOT / "docs" / "_static" / "regimes.svg"
COMMAND = "OMP_NUM_THREADS=1 python reproduce/valley.py"
SPREADS, NOISES = [10.0, 60.0, 300.0, 1500.0], [0.0025, 0.01, 0.04]

_RATES = [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12]
_BETWEEN = [0.0007, 0.0014, 0.0028, 0.0056, 0.011, 0.022, 0.042, 0.085]  # as many settings for both methods
_STEPS = [300, 1000, 3000, 10_000, 30_000]
GRIDS: dict[str, dict[str, list[Any]]] = {
    "dp-gd": {
        "steps": _STEPS,
        "learning_rate": sorted([*_RATES, *_BETWEEN]),
        "momentum": [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999],
        "decay": [False, True],
        "average": [False, True],
    },
    "dp-spider": {
        "steps": _STEPS,
        "learning_rate": _RATES,
        "full_gradients": [1, 2, 4, 8, 16, 32],
        "split": [0.1, 0.3, 0.6, 0.85, 0.97],
        "decay": [False, True],
        "average": [False, True],
    },
}
STAGES = (Stage(8, 1, 0), Stage(50, 2, 100), Stage(200, 3, 20))
LAST, LONGEST, RUNS = Stage(3000, 4, 5), 300_000, 1000


@dataclass(frozen=True)
class Valley:
    """‖∇F‖ in one cell, as something to search."""

    cell: Cell

    def reached(
        self, method: str, steps: int, settings: Sequence[Settings], seed: int, runs: int
    ) -> tuple[Floats, Floats]:
        """The norms at the last iterates and at the averages."""
        last, average = ends(method, self.cell, steps, settings, seed, runs)
        return norms(last), norms(average)


def searching(method: str, cell: Cell, lists: Mapping[str, Sequence[Any]]) -> Search:
    """A search in a cell, with nothing tried yet."""
    return Search(method, Valley(cell), {name: list(each) for name, each in lists.items()}, STAGES, LAST, LONGEST)


def measured(path: float, noise: float, spreads: Sequence[float]) -> Iterator[Row]:
    """Both methods at some spreads for one ν."""
    shared = [searching("dp-gd", Cell(spread, noise), GRIDS["dp-gd"]) for spread in (SPREADS[0], SPREADS[-1])]
    pool = [each for search in shared for each in search.run()]
    lists = {name: sorted({*shared[0].lists[name], *shared[1].lists[name]}) for name in GRIDS["dp-gd"]}
    for spread in spreads:
        cell = Cell(spread, noise)
        descent, mine = searching("dp-gd", cell, lists), searching("dp-spider", cell, GRIDS["dp-spider"])
        descent.combined = [each for search in shared for each in search.combined]
        finalists = {"dp-gd": pool, "dp-spider": mine.run()}
        row: Row = {"ratio": cell.clip / (SMOOTHNESS * path), "spread": spread, "noise": noise, "n_mu": cell.n_mu}
        for search in (descent, mine):
            found = search.recorded(finalists[search.method], RUNS)
            risks = np.minimum(value(points(search.method, cell, found["fits"]["settings"], 20_000, RUNS)), FAR)
            spread_of = float(risks.std(ddof=1) / math.sqrt(RUNS))
            row[search.method] = {**found, "risk": float(risks.mean()), "risk_se": spread_of}
        yield row


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Both methods in every cell."""
    return [comparison(row) for row in record["rows"]]


def comparison(row: Row) -> Comparison:
    """Both methods in one cell."""
    what = f"curved valley, G/(M·path) = {row['ratio']:.2g}, ν = {row['noise']:g}: ‖∇F‖"
    clip = Cell(row["spread"], row["noise"]).clip
    return Comparison(what, [contender(method, row[method], clip) for method in GRIDS])


def lead(row: Row) -> tuple[float, float] | None:
    """‖∇F‖ of DP-GD ÷ that of SPIDER, and by how many standard errors they differ; ``None`` without a verdict."""
    found = comparison(row)
    descent, reduced = (each.outcome for each in found.contenders)
    if descent is None or reduced is None or list(found.faults()):
        return None
    return descent.mean / reduced.mean, found.apart()


def draw(rows: list[Row]) -> None:
    """The picture of ``docs/choosing.md``."""
    lines = []
    for noise in dict.fromkeys(row["noise"] for row in rows):
        mine = [(row, stated[0]) for row in rows if row["noise"] == noise and (stated := lead(row)) is not None]
        fits = [[row[method]["fits"] for method in GRIDS] for row, _ in mine]
        bars = [
            gain * math.hypot(*(fit["mean_se"] / fit["mean"] for fit in pair))
            for (_, gain), pair in zip(mine, fits, strict=True)
        ]
        lines.append(Series(f"ν = {noise:g}", [(row["ratio"], gain) for row, gain in mine], bars))
    lines.append(Series("equal", [(rows[0]["ratio"], 1.0)], level=True))
    chart = Lines(
        "Curved valley: when differences pay", lines, "G/(M·path)", "‖∇F‖ of DP-GD ÷ that of DP-SPIDER",
        log_x=True, log_y=True,
    )  # fmt: skip
    PICTURE.write_text(to_svg_file(chart), encoding="utf-8")


def main() -> None:
    """Measure all cells."""
    parser = argparse.ArgumentParser(description="Where variance reduction pays.")
    parser.add_argument("--quick", action="store_true", help="one setting each, nothing written")
    parser.add_argument("--resume", action="store_true", help="only cells that are missing or without a verdict")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the results")
    asked = parser.parse_args()
    if asked.quick:
        quick()
        return
    rows: list[Row] = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if asked.draw or asked.resume else []
    if not asked.draw:
        rows, path = [row for row in rows if lead(row) is not None], path_length()
        for noise in NOISES:
            done = {row["spread"] for row in rows if row["noise"] == noise}
            if missing := [spread for spread in SPREADS if spread not in done]:
                for row in measured(path, noise, missing):
                    rows = sorted([*rows, row], key=lambda each: (each["ratio"], each["noise"]))
                    write(path, rows)
    draw(rows)
    print_table(**tables({"rows": rows})[0])


def quick() -> None:
    """Both methods at one setting each, with few runs."""
    cell, shared = Cell(1500.0, 0.0025), {"steps": 1000, "learning_rate": 0.016, "decay": False}
    own: dict[str, Settings] = {
        "dp-gd": {"momentum": 0.98, "average": True},
        "dp-spider": {"full_gradients": 1, "split": 0.6, "average": False},
    }
    body = [
        [name, float(norms(points(name, cell, {**shared, **settings}, 0, 20)).mean())]
        for name, settings in own.items()
    ]
    print_table("Curved valley, 1000 steps, 20 runs, nothing searched (not a result)", ["method", "‖∇F‖"], body)


def write(path: float, rows: list[Row]) -> None:
    """Keep the results."""
    about = {"path": path, "smoothness": SMOOTHNESS, "command": COMMAND}
    save(FILE, {**about, "rows": rows, "tables": tables({"rows": rows})})


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What `quietgrad reproduce valley` shows."""
    return [_table(record["rows"])]


def _table(rows: list[Row]) -> dict[str, Any]:
    columns = ["G/(M·path)", "ν", "‖∇F‖ DP-GD", "± se", "‖∇F‖ SPIDER", "± se", "gain", "standard errors"]
    return {
        "title": "DP-GD and SPIDER with split noise on the curved valley",
        "columns": columns,
        "rows": [
            [
                row["ratio"], row["noise"], *(row[m]["fits"][name] for m in GRIDS for name in ("mean", "mean_se")),
                *(lead(row) or (None, None)),
            ]
            for row in rows
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
