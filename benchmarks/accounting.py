"""Calibration against dp-accounting's own, in one run: n = 60000, b = 512, T = 2000, ε = 1.2, δ = 1e-5, Poisson.

    python benchmarks/accounting.py

Both search the noise multiplier with a privacy loss distribution at step 1e-4, to the same tolerance: quietgrad
stops at 0.1 % of ε, which here is about 0.0011 of z on one side; dp-accounting is given ±0.0007 of z, once with its
own search for a bracket and once with a bracket around the answer, which a user would not know.
Times are CPU seconds, because wall time depends on what else the machine does. "Process" times are whole fresh
interpreters, imports included, as a command line pays them.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting import pld

from quietgrad.core.accounting.accounting import account, calibrate, prove_or_infinite
from quietgrad.core.accounting.events import fixed_size_gaussian, poisson_gaussian

N, BATCH, STEPS, EPSILON, DELTA = 60000, 512, 2000, 1.2, 1e-5
RATE = BATCH / N
TOLERANCE_IN_Z = 7e-4
PEER_WITH_BRACKET = "dp-accounting, bracket [1, 2] given"
RESULT = Path(__file__).parent / "results" / "accounting.json"

QUIETGRAD_PROCESS = (
    "from quietgrad.core.accounting.accounting import calibrate;"
    f"calibrate(epsilon={EPSILON}, delta={DELTA}, n={N}, batch_size={BATCH}, steps={STEPS})"
)
PEER_PROCESS = (
    "import dp_accounting as d; from dp_accounting import pld;"
    f"d.calibrate_dp_mechanism(pld.PLDAccountant, lambda z: d.SelfComposedDpEvent(d.PoissonSampledDpEvent({RATE!r},"
    f" d.GaussianDpEvent(z)), {STEPS}), {EPSILON}, {DELTA}, tol={TOLERANCE_IN_Z})"
)
FULL_BATCH_PROCESS = (
    "from quietgrad.core.accounting.accounting import calibrate;"
    "calibrate(epsilon=1.0, delta=1e-5, steps=50, sampling='full', relation='replace-one')"
)


def peer(bracket: Any = None) -> float:
    """dp-accounting's calibration with its PLD accountant (default step 1e-4)."""
    return float(
        dp_accounting.calibrate_dp_mechanism(
            pld.PLDAccountant,
            lambda z: dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(z)), STEPS
            ),
            EPSILON,
            DELTA,
            bracket,
            tol=TOLERANCE_IN_Z,
        )
    )


def ours() -> float:
    """quietgrad's calibration of the same run."""
    prove_or_infinite.cache_clear()  # a process remembers its proofs; what is timed here is making them
    return calibrate(epsilon=EPSILON, delta=DELTA, n=N, batch_size=BATCH, steps=STEPS)


def cpu(run: Callable[[], Any], repeats: int) -> float:
    """Median CPU seconds of ``run``."""
    times = []
    for _ in range(repeats):
        prove_or_infinite.cache_clear()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def process(code: str, repeats: int) -> float:
    """Median CPU seconds of a fresh interpreter that runs ``code``, imports included."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times)


def main() -> None:
    """Measure, print, write the result."""
    z, peer_z = ours(), peer()
    bracket = dp_accounting.ExplicitBracketInterval(1.0, 2.0)
    seconds = {
        "quietgrad cold": cpu(ours, 15),
        "dp-accounting": cpu(peer, 5),
        PEER_WITH_BRACKET: cpu(lambda: peer(bracket), 5),
        "quietgrad cold, process": process(QUIETGRAD_PROCESS, 5),
        "dp-accounting, process": process(PEER_PROCESS, 3),
        "quietgrad full batch (exact Gaussian)": cpu(
            lambda: calibrate(epsilon=1.0, delta=DELTA, steps=50, sampling="full"), 15
        ),
        "quietgrad full batch, process": process(FULL_BATCH_PROCESS, 5),
        "quietgrad fixed-size": cpu(
            lambda: calibrate(
                epsilon=EPSILON,
                delta=DELTA,
                n=N,
                batch_size=BATCH,
                steps=STEPS,
                sampling="fixed-size",
                relation="replace-one",
            ),
            9,
        ),
        "quietgrad fixed-size, RDP bound, one evaluation": cpu(_rdp_evaluation(), 3),
        "quietgrad one evaluation, T = 1e6": cpu(
            lambda: account(poisson_gaussian(1e-3, 3.8, 10**6), delta=DELTA, relation="add-remove"), 5
        ),
    }
    event = dp_accounting.PoissonSampledDpEvent(RATE, dp_accounting.GaussianDpEvent(z))
    check = pld.PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, STEPS)).get_epsilon(DELTA)
    result = {
        "command": "python benchmarks/accounting.py",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("dp-accounting", "numpy", "scipy")},
        "setting": {"n": N, "batch_size": BATCH, "steps": STEPS, "epsilon": EPSILON, "delta": DELTA, "step": 1e-4},
        "noise_multiplier": {"quietgrad": z, "dp-accounting": peer_z},
        "epsilon of quietgrad's noise": {
            "quietgrad": account(poisson_gaussian(RATE, z, STEPS), delta=DELTA, relation="add-remove"),
            "dp-accounting": check,
        },
        "cpu_seconds": seconds,
        "times_faster": {
            "cold": seconds["dp-accounting"] / seconds["quietgrad cold"],
            "cold, peer given a bracket": seconds["dp-accounting, bracket [1, 2] given"]
            / seconds["quietgrad cold"],
            "cold, process": seconds["dp-accounting, process"] / seconds["quietgrad cold, process"],
        },
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def _rdp_evaluation() -> Callable[[], float]:
    """One Rényi bound of the fixed-size run, at a new multiplier each time so that nothing is remembered."""
    count = iter(range(1000))
    return lambda: account(
        fixed_size_gaussian(N, BATCH, 3.0 + next(count) / 1000, STEPS),
        delta=DELTA,
        relation="replace-one",
        accountant="rdp",
    )


if __name__ == "__main__":
    main()
