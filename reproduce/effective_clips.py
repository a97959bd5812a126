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
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.data import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.bands import Fit, on_a_table
from reproduce.comparisons import Comparison, Contender, looked_at, reached_by
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


def searched(method: str, look: Fit) -> list[Row]:
    """Looks at held-out rows: settings, run and loss."""
    name, values = OWN[method]
    grid = [{"clip": c, "reach": r, name: v} for c in CLIPS for r in REACHES for v in values]
    rows: list[Row] = [
        {"method": method, **each, "run": 0, "value": look(algorithm(method, each), EPSILON, 0)} for each in grid
    ]
    for clip in CLIPS:  # finalists at every clip: the methods are compared at one of them
        best = sorted((row for row in rows if (row["clip"], row["run"]) == (clip, 0)), key=lambda row: row["value"])
        for row in best[: FINALISTS // 2]:
            looks = (look(algorithm(method, row), EPSILON, k) for k in range(1, LOOKS))
            rows += [{**row, "run": k, "value": value} for k, value in enumerate(looks, 1)]
    return rows


def contender(record: Mapping[str, Any], method: str, imposed: Row) -> Contender:
    """A method as it was searched; ``imposed`` is the effective clip that the other one says."""
    names = ("clip", "reach", OWN[method][0])
    search, fits = ([row for row in record[kind] if row["method"] == method] for kind in ("search", "fits"))
    return Contender(
        method, looked_at(search, names, _loss), reached_by(fits, names, _loss),
        lambda given: float(given["clip"]), lambda name, _: {"momentum": 0.0, "gamma": 1.0}.get(name), imposed,
    )  # fmt: skip


def _loss(row: Mapping[str, Any]) -> float:
    return float(row["value"])


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """DP-SGD at the effective clip that DP-SRM likes best, beside DP-SRM."""
    reduced = contender(record, "dp-srm", {})
    plain = contender(record, "dp-sgd", {"clip": reduced.effective_clip})
    return [Comparison("a9a, ε = 0.2, one effective clip: test loss", [plain, reduced])]


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Both methods at the one effective clip."""
    columns = ["method", "effective clip", "test loss", "± se", "settings tried", "settings"]
    (comparison,) = compared(record)
    body = [
        [each.method, each.effective_clip, each.outcome.mean, each.outcome.error, each.count,
         ", ".join(f"{name} {value:g}" for name, value in each.outcome.settings.items())]
        for each in comparison.contenders if each.outcome is not None
    ]  # fmt: skip
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
    record: dict[str, Any] = {"epsilon": EPSILON, "fits": []}
    record["search"] = [row for method in OWN for row in searched(method, look)]
    for each in compared(record)[0].contenders:
        assert each.chosen is not None
        values = (final(algorithm(each.method, dict(each.chosen)), EPSILON, k) for k in range(RUNS))
        record["fits"] += [
            {"method": each.method, **each.chosen, "run": k, "value": value} for k, value in enumerate(values)
        ]
    save(FILE, {**record, "tables": tables(record)})
    print_table(**tables(record)[0])
    print(compared(record)[0].verdict())


if __name__ == "__main__":
    main()
