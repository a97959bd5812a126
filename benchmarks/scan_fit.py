"""A whole default fit of a scan, in reads: one single-thread pyarrow read of the same cached file is the unit.

    python benchmarks/scan_fit.py 1000000x20:1 1000000x20:2 300000x100:1 10000000x20:2

Words are ROWSxCOLUMNS:THREADS, or ROWSxCOLUMNS:dask for two local Dask workers of one thread each. Float64
columns, snappy, row groups of 131 072, logistic regression with declared bounds at ε = 1, ``memory=400`` to 20
columns, else 800. A small fit comes first, so that compiled loops are loaded.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


def fit(path: Path, columns: int, threads: int, ledger: Path, client: Any = None) -> tuple[float, float, int]:
    """Seconds, CPU seconds of all processes, and passes of a fit."""
    where: dict[str, Any] = {"threads": threads} if client is None else {"cluster": client}
    table = qg.data.scan(path, target="y", memory=400 if columns <= 20 else 800, **where)
    bounds = [(-6.0, 6.0)] * columns
    model = PrivateLogisticRegression(epsilon=1.0, delta=1e-8, classes=[0, 1], feature_bounds=bounds, ledger=ledger)

    def processors() -> float:
        workers = 0.0 if client is None else sum(client.run(time.process_time).values())
        return time.process_time() + workers

    wall, cpu = time.perf_counter(), processors()
    model.fit(table)
    return time.perf_counter() - wall, processors() - cpu, table.passes


@contextmanager
def two_workers() -> Iterator[Any]:
    """A client of two Dask workers, each a process of one thread."""
    import distributed

    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as workers,
        distributed.Client(workers, set_as_default=False) as client,
    ):
        yield client


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
            with two_workers() if threads == "dask" else nullcontext() as client:
                if client is not None:  # compiled loops are loaded on the workers, too
                    fit(folder / "small.parquet", 20, 1, folder / "small-dask.jsonl", client)
                count = 2 if threads == "dask" else int(threads)
                wall, cpu, passes = fit(path, columns, count, folder / f"{word}.jsonl", client)
            units += [read(path) for _ in range(2)]
            unit, unit_cpu = (statistics.median(values) for values in zip(*units, strict=True))
            cells[word] = {
                "rows": rows, "columns": columns, "threads": count, "passes": passes,
                "read seconds": unit, "read cpu": unit_cpu, "fit seconds": wall, "fit cpu": cpu,
                "reads": wall / unit, "reads of cpu": cpu / unit_cpu, "planned cpu": planned(rows, columns),
                "memory of the process so far, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }  # fmt: skip
            print(word, cells[word], flush=True)
            save(RESULT, {"cells": cells})


if __name__ == "__main__":
    main()
