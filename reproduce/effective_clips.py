"""Is DP-SRM ahead of DP-SGD on a9a at ε = 0.2 by its method, or by its clip?

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/effective_clips.py
    OMP_NUM_THREADS=1 python reproduce/effective_clips.py --quick          # breast cancer, seconds

Takes 3 CPU minutes. ``reproduce/bands.py`` once had DP-SRM with one joint clip ahead by many standard errors in
this cell. Its joint clip γC1 + (1−γ)C2 is applied to g − (1−γ)g′, which is γ·g where the gradient does not change.
So it works with gradients of length E = C1 + (1−γ)C2/γ, its *effective clip*, and E was larger than DP-SGD's C.
Here both methods search the same list of E, the same steps and as many values of their own (momentum; γ at C2 =
γC1/4), on held-out rows: one run each, five more of the best eight. Both are then run at the E that DP-SRM likes
best: 256 steps of 1000 records, Poisson samples, add-remove, δ = 1e-5, 32 runs, test loss.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.data import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.bands import Fit, on_a_table
from reproduce.comparisons import Comparison, Contender, Searched
from reproduce.store import Row, print_table

FILE = Path(__file__).parent / "results" / "effective_clips.json"
EPSILON, STEPS, BATCH, RATIO, RUNS, FINALISTS, LOOKS = 0.2, 256, 1000, 0.25, 32, 8, 6
CLIPS = [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]
REACHES = [1.0, 2.0, 4.0, 8.0, 16.0]  # η·E
OWN: dict[str, tuple[str, list[float]]] = {
    "dp-sgd": ("momentum", [0.0, 0.6, 0.9, 0.95, 0.98, 0.99]),
    "dp-srm": ("gamma", [1.0, 0.7, 0.4, 0.2, 0.1, 0.05]),
}


def algorithm(method: str, given: Row, steps: int = STEPS, batch: int = BATCH) -> Any:
    """The method at an effective clip E = ``clip``."""
    rate = f"linear:{given['reach'] / given['clip']:g}"
    if method == "dp-sgd":
        return qg.DPSGD(
            steps=steps, batch_size=batch, clip=given["clip"], learning_rate=rate, momentum=given["momentum"],
            momentum_kind="ema",
        )  # fmt: skip
    gamma = given["gamma"]
    first = given["clip"] / (1.0 + (1.0 - gamma) * RATIO)  # E = C1 + (1−γ)C2/γ with C2 = γ·C1·ratio
    return qg.DPSRM(
        steps=steps, batch_size=batch, clip=first, learning_rate=rate, gamma=gamma,
        difference_clip=RATIO * gamma * first, joint_clip=True,
    )  # fmt: skip


def searched(method: str, look: Fit) -> list[tuple[float, Row]]:
    """Held-out means of the finalists, best first."""
    name, values = OWN[method]
    grid = [{"clip": c, "reach": r, name: v} for c in CLIPS for r in REACHES for v in values]
    first = sorted(((look(algorithm(method, g), EPSILON, 0), g) for g in grid), key=lambda pair: pair[0])
    means = []
    for clip in CLIPS:  # finalists at every clip: the methods are compared at one of them
        for value, given in [pair for pair in first if pair[1]["clip"] == clip][: FINALISTS // 2]:
            again = [look(algorithm(method, given), EPSILON, k) for k in range(1, LOOKS)]
            means.append((statistics.fmean([value, *again]), given))
    return sorted(means, key=lambda pair: pair[0])


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Both methods at the one effective clip."""
    columns = ["method", "effective clip", "test loss", "± se", "settings"]
    body = [
        [row["method"], row["settings"]["clip"], row["mean"], row["se"], str(row["settings"])]
        for row in record["rows"]
    ]
    title = "DP-SRM and DP-SGD on a9a at ε = 0.2 and one effective clip"
    return [{"title": title, "columns": columns, "rows": body}]


def main() -> None:
    """Search, run, write."""
    parser = argparse.ArgumentParser(description="DP-SRM and DP-SGD at equal effective clips.")
    parser.add_argument("--quick", action="store_true", help="one run each on a small table; nothing is written")
    if parser.parse_args().quick:
        small = load("breast-cancer")
        fit = on_a_table((small.X, small.y), (small.X_test, small.y_test))
        shared = {"clip": 2.0, "reach": 2.0, "momentum": 0.9, "gamma": 0.1}
        one = [[method, fit(algorithm(method, shared, 32, 40), 4.0, 0)] for method in OWN]
        print_table("Breast cancer, 32 steps, one run (not a result)", ["method", "test loss"], one)
        return
    table = load("a9a")
    order = np.random.default_rng(0).permutation(table.n)
    held, rest = order[: table.n // 8], order[table.n // 8 :]
    X, y = table.X, np.asarray(table.y)
    look = on_a_table((X[rest], y[rest]), (X[held], y[held]))
    final = on_a_table((X, y), (table.X_test, table.y_test))
    found = {method: searched(method, look) for method in OWN}
    clip = found["dp-srm"][0][1]["clip"]
    rows: list[Row] = []
    contenders = []
    for method, means in found.items():
        given = next(each for _, each in means if each["clip"] == clip)
        values = [final(algorithm(method, given), EPSILON, k) for k in range(RUNS)]
        name, own = OWN[method]
        lists = [Searched("reach", REACHES, given["reach"]), Searched("clip", CLIPS, clip)]
        lists.append(Searched(name, own, given[name], 0.0 if name == "momentum" else 1.0))
        contenders.append(Contender(method, lists, len(CLIPS) * len(REACHES) * len(own), clip))
        rows.append({
            "method": method, "settings": given, "mean": statistics.fmean(values), "runs": RUNS,
            "se": statistics.stdev(values) / RUNS**0.5, "best_held_out": means[0][1],
        })  # fmt: skip
    lead = (rows[0]["mean"] - rows[1]["mean"]) / float(np.hypot(rows[0]["se"], rows[1]["se"]))
    comparison = Comparison("a9a, ε = 0.2", contenders)
    record = {"epsilon": EPSILON, "rows": rows}
    save(
        FILE,
        {**record, "tables": tables(record), "lead": {"standard_errors": lead, "comparison": comparison.to_json()}},
    )
    print_table(**tables(record)[0])
    print(f"DP-SRM ahead by {lead:.1f} standard errors", list(comparison.faults()))


if __name__ == "__main__":
    main()
