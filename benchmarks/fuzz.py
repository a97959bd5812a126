"""Every reader of files and bytes made by others, fed with spoiled input for as long as asked.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py --minutes 10 [--seed 1] [--jobs 2] [--only csv npz]

The corpus and the ways to spoil it are those of ``tests/behaviour/hostile.py``. A reader runs in a process of its
own, whose address space may grow by ``GROWTH`` and no more; each input is named by the run's seed and its number,
so that a finding can be repeated. A finding is an exception that is not one of quietgrad's, an input that takes
longer than ``SECONDS`` of processor time, a process that died, or more memory than ``MULTIPLE`` times the input and
a fixed ``ALLOWANCE``.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.behaviour.hostile import ALLOWED, READERS, Reader

from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "fuzz.json"
SECONDS = 10
PATIENCE = 300  # seconds by the clock: something that waits for ever uses no processor
MULTIPLE = 64
ALLOWANCE = 256 << 20  # bytes: libraries that are imported on the way, and archives of up to 16 MiB
GROWTH = 4 << 30


def fuzz(reader: Reader, seconds: float, seed: int) -> dict[str, Any]:
    """Feed one reader until the time is over; counts and findings."""
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, _too_long)  # the processor's time: other work on the machine does not count
    signal.signal(signal.SIGALRM, _too_long)
    counts = {"inputs": 0, "valid": 0, "refused": 0}
    findings: list[dict[str, Any]] = []
    slowest, longest = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        seeds = reader.seeds()
        for good in seeds:
            reader.read(reader.pack(good), Path(scratch))
        limit = _address_space() + GROWTH
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(findings) < 20:
            number = counts["inputs"]
            rng = random.Random(f"{seed} {reader.name} {number}")
            data = reader.case(seeds, rng)
            counts["inputs"] += 1
            longest = max(longest, len(data))
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(PATIENCE)
            try:
                reader.read(data, Path(scratch))
                counts["valid"] += 1
            except ALLOWED:
                counts["refused"] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                findings.append({"input": number, "what": f"{type(error).__name__}: {error}"[:300]})
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            slowest = max(slowest, time.process_time() - begun)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            if grown > ALLOWANCE + MULTIPLE * longest:
                findings.append({"input": number, "what": f"{grown} bytes of memory for {len(data)}"})
                break
    return {
        **counts, "seconds": round(seconds, 1), "cpu_seconds": round(time.process_time(), 1),
        "slowest_cpu_seconds": round(slowest, 3), "longest_input": longest, "memory_grown_bytes": grown,
        "findings": findings,
    }  # fmt: skip


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s of processor time, or {PATIENCE} s")


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _apart(name: str, minutes: float, seed: int) -> dict[str, Any]:
    """Fuzz a reader in a process of its own: one that dies takes nothing with it."""
    args = ["--minutes", str(minutes), "--seed", str(seed), "--reader", name]
    done = subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True)
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"findings": [{"what": f"the process died ({done.returncode}): {done.stderr[-300:]}"}]}
    return result


def main() -> int:
    """Fuzz every reader in a process of its own and keep what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="readers at a time")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--reader", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reader:
        reader = next(reader for reader in READERS if reader.name == given.reader)
        print(json.dumps(fuzz(reader, 60.0 * given.minutes, given.seed)))
        return 0
    wanted = [reader.name for reader in READERS if not given.only or reader.name in given.only]
    results: dict[str, Any] = {}
    about = {"seed": given.seed, "minutes_per_reader": given.minutes, "readers_at_a_time": given.jobs,
             "seconds_allowed": SECONDS, "memory_multiple_allowed": MULTIPLE}  # fmt: skip
    with ThreadPoolExecutor(given.jobs) as pool:
        for name, result in pool.map(lambda name: (name, _apart(name, given.minutes, given.seed)), wanted):
            results[name] = result
            print(name, json.dumps(result), flush=True)
            save(given.out, {**about, "readers": results}, "pyarrow", "safetensors", "cryptography")
    return int(any(result["findings"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
