"""A whole default fit of a scan, in reads: one single-thread pyarrow read of the same cached file is the unit.

    python benchmarks/scan_fit.py 1000000x20:1 1000000x20:2 300000x100:1 10000000x20:2

Words are ROWSxCOLUMNS:THREADS. Float64 columns, snappy, row groups of 131 072, logistic regression with declared
bounds at ε = 1, ``memory=400`` to 20 columns, else 800. A small fit comes first, so that compiled loops are loaded.
"planned cpu" is what `quietgrad plan --rows ROWS --columns COLUMNS` says of the same fit before a file is opened.
The unit is the median of reads before and after the fit, in CPU seconds and in seconds; CPU seconds count on
a shared machine.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import quietgrad as qg
from quietgrad.core.plans.explain import expected_cost
from quietgrad.estimators import PrivateLogisticRegression
from quietgrad.methods.budget_allocation import for_table

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "scan_fit.json"
GROUP = 131_072


def write(path: Path, rows: int, columns: int) -> None:
    rng, writer = np.random.default_rng(0), None
    for start in range(0, rows, GROUP):
        X = rng.standard_normal((min(GROUP, rows - start), columns))
        y = (X[:, 0] - X[:, 1] + rng.logistic(size=len(X)) > 0).astype(np.int8)
        table = pa.table({**{f"x{j}": X[:, j] for j in range(columns)}, "y": y})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def read(path: Path) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in pq.ParquetFile(path, pre_buffer=False).iter_batches(GROUP, use_threads=False):
        pass
    return time.perf_counter() - wall, time.process_time() - cpu


def fit(path: Path, columns: int, threads: int, ledger: Path) -> tuple[float, float, int]:
    table = qg.data.scan(path, target="y", memory=400 if columns <= 20 else 800, threads=threads)
    bounds = [(-6.0, 6.0)] * columns
    model = PrivateLogisticRegression(epsilon=1.0, delta=1e-8, classes=[0, 1], feature_bounds=bounds, ledger=ledger)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(table)
    return time.perf_counter() - wall, time.process_time() - cpu, table.passes


def planned(rows: int, columns: int) -> float:
    """Processor seconds that the plan of the fit expects."""
    budget = qg.Budget(1.0, 1e-8)
    method = for_table(rows, columns, budget=budget, feature_bounds=[(-6.0, 6.0)] * columns, inference=None)
    return 3600.0 * expected_cost(qg.plan(method, n=rows, budget=budget), columns, 1, 1).processor_hours


def main() -> None:
    warnings.simplefilter("ignore")
    cells: dict[str, Any] = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder / "small.parquet", 40_000, 20)
        fit(folder / "small.parquet", 20, 1, folder / "small.jsonl")
        for word in sys.argv[1:]:
            size, _, threads = word.partition(":")
            rows, columns = (int(part) for part in size.split("x"))
            path = folder / f"{size}.parquet"
            if not path.exists():
                write(path, rows, columns)
            read(path)
            units = [read(path)]
            wall, cpu, passes = fit(path, columns, int(threads), folder / f"{word}.jsonl")
            units += [read(path) for _ in range(2)]
            unit, unit_cpu = (statistics.median(values) for values in zip(*units, strict=True))
            cells[word] = {
                "rows": rows, "columns": columns, "threads": int(threads), "passes": passes,
                "read seconds": unit, "read cpu": unit_cpu, "fit seconds": wall, "fit cpu": cpu,
                "reads": wall / unit, "reads of cpu": cpu / unit_cpu, "planned cpu": planned(rows, columns),
                "memory of the process so far, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }  # fmt: skip
            print(word, cells[word], flush=True)
            save(RESULT, {"cells": cells})


if __name__ == "__main__":
    main()
