"""Scans: rates, memory, cores, a cluster's overhead, CSV beside pandas, and the cost model of `quietgrad plan`.

Run with::

    python benchmarks/scan.py rate --rows 10000000     # 4 GB of Parquet in --folder, removed afterwards
    python benchmarks/scan.py cost                     # fits src/quietgrad/core/plans/pass_cost.json

Rates are of one full-batch gradient pass (logistic, 100 float32 columns) beside pyarrow's own scan of the same
columns with as many threads; medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import save

RESULTS = Path(__file__).parent / "results"
COST_FILE = Path(__file__).parents[1] / "src" / "quietgrad" / "core" / "plans" / "pass_cost.json"


def write(path: Path, rows: int, columns: int, group: int = 125_000, seed: int = 0) -> None:
    """A table of float32 columns and a label, in row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    writer = None
    for start in range(0, rows, group):
        X = rng.standard_normal((min(group, rows - start), columns), dtype=np.float32)
        names = {f"x{j}": X[:, j].copy() for j in range(columns)}
        block = pa.table({**names, "y": (X[:, 0] > 0).astype(np.int8)})
        if writer is None:
            writer = pq.ParquetWriter(path, block.schema, use_dictionary=False)  # 4 bytes a value, as in the claim
        writer.write_table(block)
    assert writer is not None
    writer.close()


def _records(path: Path, threads: int) -> Any:
    import quietgrad as qg

    table = qg.data.scan(path, target="y", threads=threads)
    return table, qg.objectives.Logistic(intercept=True).prepare(table)


def _pass(records: Any) -> None:
    from quietgrad.core.session.objectives import Batch
    from quietgrad.core.session.queries import GradientQuery

    out = np.zeros(records.dim)
    records.answer(GradientQuery(np.full(records.dim, 0.01), 1.0), Batch(records, None), out)


def _arrow(path: Path, threads: int) -> None:
    """pyarrow alone: every column of every row group decoded, groups shared among threads."""
    from concurrent.futures import ThreadPoolExecutor

    import pyarrow.parquet as pq

    groups = pq.read_metadata(path).num_row_groups

    def read(group: int) -> None:
        with pq.ParquetFile(path, buffer_size=1 << 16) as file:
            for _ in file.iter_batches(65_536, row_groups=[group], use_threads=False):
                pass

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(groups)))


def _dataset(path: Path, threads: int) -> None:
    """pyarrow's dataset scanner, its own threads."""
    import pyarrow as pa
    import pyarrow.dataset as ds

    pa.set_cpu_count(threads)
    for _ in ds.dataset(path).scanner(use_threads=threads > 1).to_batches():
        pass


def _timed(function: Any, *given: Any) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function(*given)
    return time.perf_counter() - wall, time.process_time() - cpu


def rate(folder: Path, rows: int, columns: int, rounds: int) -> dict[str, Any]:
    """One gradient pass beside pyarrow alone, with one thread and with two; and how far memory grew."""
    path = folder / "rows.parquet"
    write(path, rows, columns)
    size = path.stat().st_size
    found: dict[str, Any] = {"rows": rows, "columns": columns, "bytes": size}
    child = subprocess.run(
        [sys.executable, __file__, "grow", "--path", str(path)], capture_output=True, text=True, check=True
    )
    found["memory_growth_mb"] = json.loads(child.stdout)["growth_mb"]
    for threads in (1, 2):
        _, records = _records(path, threads)
        runs: dict[str, list[tuple[float, float]]] = {"pass": [], "arrow": [], "dataset": []}
        for _ in range(rounds):
            runs["pass"].append(_timed(_pass, records))
            runs["arrow"].append(_timed(_arrow, path, threads))
            runs["dataset"].append(_timed(_dataset, path, threads))
        told = {
            name: {
                "seconds": statistics.median(wall for wall, _ in times),
                "cpu_seconds": statistics.median(cpu for _, cpu in times),
            }
            for name, times in runs.items()
        }
        best = min(told["arrow"]["seconds"], told["dataset"]["seconds"])
        told["share_of_pyarrow"] = {
            "wall, of its faster way": best / told["pass"]["seconds"],
            "wall, of the same reader": told["arrow"]["seconds"] / told["pass"]["seconds"],
            "cpu, of the same reader": told["arrow"]["cpu_seconds"] / told["pass"]["cpu_seconds"],
        }
        found[f"threads {threads}"] = told
    found["speedup_two_cores"] = found["threads 1"]["pass"]["seconds"] / found["threads 2"]["pass"]["seconds"]
    return found


def grow(path: Path) -> dict[str, float]:
    """How far the resident memory of a process grows over a check and three passes with two threads."""
    import pyarrow.parquet  # noqa: F401

    import quietgrad as qg

    warm = Path(tempfile.mkdtemp()) / "warm.parquet"
    write(warm, 2000, 3)
    _pass(_records(warm, 1)[1])  # libraries are loaded
    shutil.rmtree(warm.parent)
    before = _resident()
    table = qg.data.scan(path, target="y", threads=2, memory=400)
    records: Any = qg.objectives.Logistic(intercept=True).prepare(table)
    for _ in range(3):
        _pass(records)
    return {"growth_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cluster(folder: Path, rounds: int = 30) -> dict[str, Any]:
    """What a release costs beyond its sums: a table so small that summing takes nothing, two workers."""
    import distributed

    import quietgrad as qg

    for k in range(8):
        write(folder / f"{k}.parquet", 2000, 10, seed=k)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as workers,
        distributed.Client(workers, set_as_default=False) as client,
    ):
        seconds = {}
        for name, where in (("cluster", client), ("threads", None)):
            table = qg.data.scan(folder, target="y", cluster=where, threads=2)
            records = qg.objectives.Logistic(intercept=True).prepare(table)
            _pass(records)
            seconds[name] = statistics.median(_timed(_pass, records)[0] for _ in range(rounds))
    return {**seconds, "overhead_ms": 1000.0 * (seconds["cluster"] - seconds["threads"])}


def csv(folder: Path, rounds: int) -> dict[str, Any]:
    """`load` of a CSV file beside pandas.read_csv: 200 000 rows of 20 numbers and a label."""
    import pandas as pd

    import quietgrad.data as qd

    path = folder / "rows.csv"
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((200_000, 20)).round(6), columns=[f"x{j}" for j in range(20)])
    frame["y"] = rng.integers(0, 2, len(frame))
    frame.to_csv(path, index=False)
    ways = {"load": qd.load, "pandas": pd.read_csv}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(_timed(way, path))
    wall = {name: statistics.median(w for w, _ in many) for name, many in times.items()}
    cpu = {name: statistics.median(c for _, c in many) for name, many in times.items()}
    return {
        "seconds": wall,
        "cpu_seconds": cpu,
        "wall_ratio": wall["load"] / wall["pandas"],
        "cpu_ratio": cpu["load"] / cpu["pandas"],
    }


# --- the cost model -------------------------------------------------------------------------------------------

SEEN = [(300_000, 10), (100_000, 60), (50_000, 160), (200_000, 30), (100_000, 100), (600_000, 15)]
UNSEEN = [(300_000, 20), (60_000, 130), (150_000, 80), (200_000, 45)]


def _measured(folder: Path, rows: int, columns: int, repeats: int) -> list[dict[str, float]]:
    """CPU seconds of a plain fit and of the default one, with how many passes of each kind they make."""
    import warnings

    import quietgrad as qg
    from quietgrad.estimators import PrivateLogisticRegression

    path = folder / f"{rows}x{columns}.parquet"
    write(path, rows, columns)
    bounds = [(-5.0, 5.0)] * columns
    found = []
    for method in (qg.DPGD(steps=8, learning_rate=1.0), None):
        spent = []
        for _ in range(repeats):
            table = qg.data.scan(path, target="y", threads=1)
            model = PrivateLogisticRegression(
                classes=[0, 1], algorithm=method, feature_bounds=None if method else bounds, inference=False
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                spent.append(_timed(model.fit, table)[1])
        releases = model.privacy_.releases
        reads = table.passes if method else 2  # the default method's rows are kept at the second reading
        found.append(
            {
                "rows": rows, "columns": columns, "reads": reads, "kept_passes": table.passes - reads,
                "matrix_passes": releases.get("second-moments", 0),
                "cpu_seconds": min(spent),  # other load only adds
            }
        )  # fmt: skip
    path.unlink()
    return found


def cost(folder: Path, repeats: int) -> dict[str, Any]:
    """Fit the seven numbers of ``ScanCostModel.seconds`` and test them on other tables.

    The release of second moments is counted as a pass, too.
    """
    from scipy.optimize import nnls

    def terms(run: dict[str, float]) -> list[float]:
        n, d, reads, kept = run["rows"], run["columns"], run["reads"], run["kept_passes"]
        rows = [reads * n, reads * n * d, kept * n, kept * n * d]
        return [1.0, reads + kept, *rows, run["matrix_passes"] * n * d * d]

    seen = [run for rows, columns in SEEN for run in _measured(folder, rows, columns, repeats)]
    unseen = [run for rows, columns in UNSEEN for run in _measured(folder, rows, columns, repeats)]
    matrix, times = np.array([terms(run) for run in seen]), np.array([run["cpu_seconds"] for run in seen])
    weights, _ = nnls(matrix / times[:, None], np.ones(len(times)))  # relative errors
    for run in (*seen, *unseen):
        run["predicted"] = float(np.dot(terms(run), weights))
    errors = [abs(run["predicted"] / run["cpu_seconds"] - 1.0) for run in unseen]
    names = ("fixed", "per_pass", "per_row", "per_value", "kept_row", "kept_value", "per_square")
    model = {name: float(value) for name, value in zip(names, weights, strict=True)}
    return {
        "model": {**model, "typical_error": statistics.median(errors), "worst_error": max(errors)},
        "seen": seen,
        "unseen": unseen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("rate", "grow", "cluster", "csv", "cost", "all"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.what == "grow":
        print(json.dumps(grow(given.path)))
        return
    file = RESULTS / "scan.json"
    kept = {k: v for k, v in json.loads(file.read_text()).items() if k in NAMES} if file.exists() else {}
    for what in NAMES if given.what == "all" else (given.what,):
        folder = Path(tempfile.mkdtemp(prefix="scan-", dir=given.folder))
        try:
            if what == "rate":
                kept[what] = rate(folder, given.rows, given.columns, given.rounds)
            elif what == "cost":
                kept[what] = cost(folder, given.rounds)
                COST_FILE.write_text(json.dumps(kept[what]["model"], indent=1) + "\n")
            else:
                kept[what] = cluster(folder) if what == "cluster" else csv(folder, 5)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(what, json.dumps({k: v for k, v in kept[what].items() if k not in ("seen", "unseen")}, indent=1))
    save(file, kept, "pyarrow", "pandas", "dask", "distributed")


NAMES = ("rate", "cluster", "csv", "cost")

if __name__ == "__main__":
    main()
