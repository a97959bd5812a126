"""OpenDP's polars context and diffprivlib on the groups of benchmarks/groups.py, in an environment of their own.

Reads a JSON file (ε, cells, columns with bounds, repeats) and prints, for each repeat, noisy counts and means by
cell. Groups are declared to both. OpenDP sums centred columns, which is its better choice. diffprivlib has no
grouping: counts are its histogram of cells, means its ``mean`` of each cell, which takes the exact size of the cell
as public.
"""

from __future__ import annotations

import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import opendp.prelude as dp
import polars as pl
from diffprivlib import tools


def opendp(task: dict[str, Any], cells: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """Counts and means of one query on the frame: its own split of ε over the aggregates."""
    size, bounds = int(task["groups"]), task["bounds"]
    centred = {name: values - sum(bounds[name]) // 2 for name, values in columns.items()}
    frame = pl.DataFrame({"cell": cells, **centred}).lazy()
    margin = dp.polars.Margin(by=["cell"], invariant="keys", max_length=10**6)
    context = dp.Context.compositor(
        data=frame, privacy_unit=dp.unit_of(contributions=1), privacy_loss=dp.loss_of(epsilon=task["epsilon"]),
        split_evenly_over=1, margins=[margin],
    )  # fmt: skip
    sums = []
    for name in columns:
        half = (bounds[name][1] - bounds[name][0]) // 2
        sums.append(pl.col(name).fill_null(0).dp.sum((-half, half)))
    released = context.query().group_by("cell").agg(dp.len(), *sums).release().collect().sort("cell")
    assert released["cell"].to_list() == list(range(size))
    counts = released["len"].to_numpy().astype(float)
    means = {}
    for name in columns:
        low, high = bounds[name]
        mean = (low + high) / 2 + released[name].to_numpy() / np.maximum(counts, 1.0)
        means[name] = np.clip(mean, low, high).tolist()
    return {"counts": counts.tolist(), "means": means}


def diffprivlib(task: dict[str, Any], cells: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """ε divided evenly over the table of counts and each table of means."""
    size, epsilon = int(task["groups"]), task["epsilon"] / (1 + len(columns))
    counts = tools.histogram(cells, epsilon=epsilon, bins=size, range=(-0.5, size - 0.5))[0]
    means = {}
    for name, values in columns.items():
        bounds = tuple(task["bounds"][name])
        each = [tools.mean(values[cells == g], epsilon=epsilon, bounds=bounds) for g in range(size)]
        means[name] = [float(mean) for mean in each]
    return {"counts": [float(c) for c in counts], "means": means}


def main() -> None:
    warnings.simplefilter("ignore")
    dp.enable_features("contrib")
    task = json.loads(Path(sys.argv[1]).read_text())
    cells = np.array(task["cells"])
    columns = {name: np.array(values) for name, values in task["columns"].items()}
    out: dict[str, Any] = {
        "versions": {name: version(name) for name in ("opendp", "polars", "diffprivlib", "numpy")}
    }
    for name, answer in (("opendp", opendp), ("diffprivlib", diffprivlib)):
        out[name] = [answer(task, cells, columns) for _ in range(task["repeats"])]
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
