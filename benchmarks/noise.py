"""Cryptographic noise and sampling against numpy's ordinary generator.

    OMP_NUM_THREADS=1 python benchmarks/noise.py

Peers, timed in turn within the same run: ``Generator(PCG64).standard_normal`` for 10⁶ normals, and
``Generator.choice(10⁶, 100, replace=False)`` for a batch. Batches are asked for one by one through the public
``batch(i)``, so drawing ahead is part of the time. Times are CPU time of the process (other work on the
machine would distort wall time), medians over repeats; keys are fresh.
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

import cryptography
import numba
import numpy as np
import scipy

from quietgrad.core.noise.grid import NoiseStream, add_discretized_gaussian, sigma_for
from quietgrad.core.noise.rng import SecureStream, fresh_key
from quietgrad.core.sampling import FixedSize, Poisson
from quietgrad.federation.secure.discrete_gaussian import discrete_gaussian

REPEATS = 15
DRAWS = 10**6
RECORDS, BATCH, BATCHES = 10**6, 100, 5000
RESULT = Path(__file__).parent / "results" / "noise.json"


def microseconds(calls: dict[str, Callable[[int], object]], per: int) -> dict[str, dict[str, float]]:
    """Time the calls in turn, ``REPEATS`` times, and return the median and spread per unit of work."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(-1, REPEATS):  # the first round compiles and fills tables
        for name, call in calls.items():
            start = time.process_time()
            call(repeat + 1)
            if repeat >= 0:
                times[name].append((time.process_time() - start) / per * 1e6)
    return {
        name: {"median_us": statistics.median(t), "min_us": min(t), "max_us": max(t)} for name, t in times.items()
    }


def normals() -> dict[str, Any]:
    """10⁶ standard normals."""
    ordinary, secure = np.random.default_rng(), NoiseStream(fresh_key(), "noise")
    times = microseconds(
        {
            "numpy PCG64 standard_normal": lambda i: ordinary.standard_normal(DRAWS),
            "quietgrad NoiseStream.normal": lambda i: secure.normal(i, DRAWS),
        },
        per=1,
    )
    ratio = times["quietgrad NoiseStream.normal"]["median_us"] / times["numpy PCG64 standard_normal"]["median_us"]
    return {"draws": DRAWS, "times": times, "time_over_numpy": ratio, "target": "at most 3"}


def batches() -> dict[str, Any]:
    """Batches of 100 of 10⁶ records, per batch."""
    ordinary = np.random.default_rng()
    fixed = FixedSize(RECORDS, BATCH).sampler(RECORDS, SecureStream(fresh_key(), "fixed"))
    poisson = Poisson(BATCH / RECORDS).sampler(RECORDS, SecureStream(fresh_key(), "poisson"))

    def ask(draw: Callable[[int], object]) -> Callable[[int], object]:
        def run(repeat: int) -> None:
            for i in range(repeat * BATCHES, (repeat + 1) * BATCHES):
                draw(i)

        return run

    times = microseconds(
        {
            "numpy Generator.choice(replace=False)": ask(lambda i: ordinary.choice(RECORDS, BATCH, replace=False)),
            "quietgrad FixedSize.batch": ask(fixed.batch),
            "quietgrad Poisson.batch": ask(poisson.batch),
        },
        per=BATCHES,
    )
    peer = times["numpy Generator.choice(replace=False)"]["median_us"]
    return {
        "records": RECORDS,
        "batch": BATCH,
        "times": times,
        "fixed_times_faster": peer / times["quietgrad FixedSize.batch"]["median_us"],
        "poisson_times_faster": peer / times["quietgrad Poisson.batch"]["median_us"],
        "target": "fixed at least 10",
    }


def releases() -> dict[str, Any]:
    """One release on the grid (noise drawn before), and discrete Gaussian shares."""
    calls, result, shares = 200, {}, discrete_gaussian(2.0**20)
    for dim in (123, 26_010):
        total, stream = np.zeros(dim), NoiseStream(fresh_key(), "noise")
        unit = stream.normal(0, dim)
        sigma, step = sigma_for(1.0, 1.0, dim)
        release = partial(add_discretized_gaussian, total, unit, sigma, step)
        share = partial(shares.sample, SecureStream(fresh_key(), "share"), size=dim)
        times = microseconds({"release": lambda i, f=release: [f() for _ in range(calls)]}, per=calls)  # type: ignore[misc]
        result[f"release_gaussian, dim {dim}"] = times["release"]
        result[f"discrete_gaussian, sigma 2^20, dim {dim}"] = microseconds({"share": share}, per=1)["share"]
    return result


def main() -> None:
    """Run everything, print the ratios, write the result file."""
    report: dict[str, Any] = {
        "command": "OMP_NUM_THREADS=1 python benchmarks/noise.py",
        "date": datetime.now(UTC).date().isoformat(),
        "clock": "CPU time of the process, medians",
        "repeats": REPEATS,
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "machine": platform.machine(),
        "versions": {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "numba": numba.__version__,
            "cryptography": cryptography.__version__,
        },
        "normals": normals(),
        "batches": batches(),
        "releases": releases(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(report, indent=1) + "\n")
    drawn = report["batches"]
    print(f"10^6 normals: {report['normals']['time_over_numpy']:.2f} x numpy's time (target <= 3)")
    print(f"100 of 10^6, fixed size: {drawn['fixed_times_faster']:.1f} x faster than choice (target >= 10)")
    print(f"100 of 10^6, Poisson: {drawn['poisson_times_faster']:.1f} x faster than choice")
    print(f"written: {RESULT}")


if __name__ == "__main__":
    main()
