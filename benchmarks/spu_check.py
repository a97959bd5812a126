"""A second opinion on the noise of ``secure="mpc"``: the same law sampled in ABY3 by SPU, and compared.

Ours looks a draw of N_Z(24²) up by the alias method on replicated bits; here three SPU parties invert the
cumulative table by comparing a shared 30-bit word with every threshold. Nothing is common to the two but the law.
Both are tested against the exact masses and against each other (χ², two-sample χ², Kolmogorov–Smirnov), each at a
false-alarm rate of 1e-6. SPU needs Python < 3.12 and numpy < 2, hence an environment of its own:

    python3.11 -m venv spu-env && spu-env/bin/pip install spu==0.9.5
    OMP_NUM_THREADS=1 python benchmarks/spu_check.py --spu spu-env/bin/python [--draws 40000]

Numbers go to ``benchmarks/results/spu_check.json``; without SPU the check says so and ends. Times are of all three
parties in one process without a network, after compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

ALPHA = 1e-6
WORD_BITS = 30
BATCH = 2000
_ABSENT = 3  # exit code of a worker without SPU


def worker(thresholds: list[int], draws: int) -> dict[str, Any]:
    """Under SPU's Python: draws by inversion in ABY3. Each party gives random words; their XOR nobody knows."""
    try:
        import jax.numpy as jnp
        import spu
        from spu.utils.simulation import Simulator, sim_jax
    except ImportError:
        sys.exit(_ABSENT)
    table = np.array(thresholds, np.int32)

    def invert(a: Any, b: Any, c: Any, signs: Any) -> Any:
        word = a ^ b ^ c
        magnitude = jnp.sum((word[:, None] >= table[None, :]).astype(jnp.int32), axis=1)
        return magnitude * (1 - 2 * (signs[0] ^ signs[1] ^ signs[2]))

    simulator = Simulator.simple(3, spu.ProtocolKind.ABY3, spu.FieldType.FM64)
    kept: list[Any] = []

    def compiled(executable: Any, *shares: Any) -> Any:
        kept.append(executable)
        return simulator(executable, *shares)

    def words(top: int, *shape: int) -> npt.NDArray[np.int32]:
        raw = np.frombuffer(os.urandom(4 * int(np.prod(shape))), np.uint32)
        return (raw % np.uint32(top)).astype(np.int32).reshape(shape)

    def inputs() -> list[npt.NDArray[np.int32]]:
        return [*(words(1 << WORD_BITS, BATCH) for _ in range(3)), words(2, 3, BATCH)]

    first = inputs()
    found = np.asarray(sim_jax(compiled, invert)(*first))
    # In the clear, the same words must give the same numbers.
    clear = np.searchsorted(table, first[0] ^ first[1] ^ first[2], side="right")
    exact = bool(np.array_equal(found, clear * (1 - 2 * (first[3][0] ^ first[3][1] ^ first[3][2]))))
    wall, cpu = time.perf_counter(), time.process_time()
    values = [np.asarray(simulator(kept[0], *inputs())[0]) for _ in range(draws // BATCH)]
    spent = {"seconds": time.perf_counter() - wall, "CPU seconds": time.process_time() - cpu}
    return {"values": np.concatenate(values).tolist(), "exact": exact, "version": spu.__version__, **spent}


def ours(draws: int) -> tuple[Integers, dict[str, float]]:
    """The same number of draws by our three servers, in one process."""
    from quietgrad.core.noise.rng import SecureStream, fresh_key
    from quietgrad.federation.secure.servers import ReplicatedSharing, sample

    streams = [SecureStream(fresh_key(), "replicated") for _ in range(3)]  # stream i is that of servers i − 1 and i
    wall, cpu = time.perf_counter(), time.process_time()
    sharings = [
        ReplicatedSharing(i, streams[i], streams[(i + 1) % 3], 0, f"server-{(i + 1) % 3}") for i in range(3)
    ]
    computations = [sample(sharing, draws) for sharing in sharings]
    frames = [next(computation) for computation in computations]
    shares: list[npt.NDArray[np.uint64]] = []
    while not shares:
        inbound, frames = [frames[(i + 1) % 3] for i in range(3)], []
        for computation, frame in zip(computations, inbound, strict=True):
            try:
                frames.append(computation.send(frame))
            except StopIteration as done:
                shares.append(done.value)
    spent = {"seconds": time.perf_counter() - wall, "CPU seconds": time.process_time() - cpu}
    total: Integers = (shares[0] + shares[1] + shares[2]).view(np.int64)
    return total, spent


def chances(theirs: Integers, mine: Integers, masses: npt.NDArray[np.float64]) -> dict[str, float]:
    """p-values: each sample against the exact masses of |X| with fair signs, and the two against each other."""
    from scipy.special import chdtrc, kolmogorov

    top = len(masses) - 1
    pmf = np.concatenate([masses[:0:-1] / 2, masses[:1], masses[1:] / 2])
    counts = [np.bincount(x + top, minlength=2 * top + 1) for x in (theirs, mine)]
    # Cells with at least 25 expected in the smaller sample; the rest go to the ends.
    inside = np.flatnonzero(pmf * min(theirs.size, mine.size) >= 25)
    cells = [slice(0, inside[0] + 1), *(slice(k, k + 1) for k in inside[1:-1]), slice(inside[-1], None)]
    expected = np.array([pmf[cell].sum() for cell in cells])
    seen = [np.array([c[cell].sum() for cell in cells]) for c in counts]
    found = {}
    for name, row in zip(("SPU", "ours"), seen, strict=True):
        ideal = expected * row.sum()
        found[f"χ² {name} against the law"] = chdtrc(len(cells) - 1, float(((row - ideal) ** 2 / ideal).sum()))
    sizes = [row.sum() for row in seen]
    pooled = (seen[0] + seen[1]) / sum(sizes)
    both = sum(((row - pooled * n) ** 2 / (pooled * n)).sum() for row, n in zip(seen, sizes, strict=True))
    found["χ² SPU against ours"] = chdtrc(len(cells) - 1, float(both))
    gap = float(np.abs(np.cumsum(counts[0]) / sizes[0] - np.cumsum(counts[1]) / sizes[1]).max())
    found["Kolmogorov–Smirnov SPU against ours"] = kolmogorov(gap * np.sqrt(sizes[0] * sizes[1] / sum(sizes)))
    return {name: float(f"{p:.4g}") for name, p in found.items()}


def main() -> None:
    """Draw on both sides, compare, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--spu", default=os.environ.get("SPU_PYTHON", sys.executable), help="a Python with SPU")
    options.add_argument("--draws", type=int, default=40_000)
    asked = options.parse_args()

    from record import save

    from quietgrad.federation.secure.discrete_gaussian import gaussian_masses
    from quietgrad.federation.secure.terms import COARSE_SIGMA, COARSE_TOP

    masses = gaussian_masses(COARSE_SIGMA, COARSE_TOP, 1 << WORD_BITS, magnitudes=True)
    cumulative = np.cumsum(masses)
    thresholds = [int(t) for t in cumulative if t < 1 << WORD_BITS]
    task = json.dumps({"thresholds": thresholds, "draws": asked.draws})
    made = subprocess.run([asked.spu, __file__, "--worker"], input=task, stdout=subprocess.PIPE, text=True)
    if made.returncode == _ABSENT:
        print(f"skipped: {asked.spu} has no SPU; see the top of this file for how to install it.")
        return
    if made.returncode != 0:
        raise SystemExit(f"SPU's worker failed with code {made.returncode}.")
    answer = json.loads(made.stdout.splitlines()[-1])
    theirs = np.array(answer["values"], np.int64)
    mine, spent = ours(theirs.size)
    law = np.array(masses, np.float64) / (1 << WORD_BITS)
    p = chances(theirs, mine, law)
    numbers = {
        "law": f"N_Z({COARSE_SIGMA:g}²)",
        "draws of each": theirs.size,
        "thresholds": f"{len(thresholds)} of {WORD_BITS} bits",
        "SPU": {"version": answer["version"], "protocol": "ABY3, 64-bit ring", "equals the clear": answer["exact"]},
        "standard deviation": {"SPU": round(float(theirs.std()), 3), "ours": round(float(mine.std()), 3)},
        "p-values": p,
        "agree": answer["exact"] and min(p.values()) >= ALPHA,
        "per 1000 draws": {
            name: {unit: round(1000 * took[unit] / theirs.size, 5) for unit in ("seconds", "CPU seconds")}
            for name, took in (("SPU", answer), ("ours", spent))
        },
    }
    save(Path(__file__).parent / "results" / "spu_check.json", numbers)
    print(json.dumps(numbers, indent=1, ensure_ascii=False))
    if not numbers["agree"]:
        raise SystemExit("the two samplers disagree.")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        given = json.loads(sys.stdin.read())
        print(json.dumps(worker(given["thresholds"], given["draws"])))
    else:
        main()
