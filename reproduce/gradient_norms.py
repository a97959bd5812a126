"""Gradient norms on a9a (paper 000, table 2): what clipping to C1 = 1 leaves of them, with and without noise.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/gradient_norms.py
    OMP_NUM_THREADS=1 python reproduce/gradient_norms.py --quick                 # scikit-learn's breast cancer

Takes 1 CPU minute. a9a's rows are 3.3 to 3.7 long, so C1 = 1 clips gradients, and clipped descent ends where
clipped gradients cancel, not where ∇F = 0. Descent without noise shows how much that is. DP-GD and DP-SRM of
`nonconvex_printed.py` (its passes, clips, batches, true noise, ε = 0.2) follow, with rows as they are and its
steps, and with rows scaled to a length of at most 1, which nothing clips, at four times the steps. Nothing is
searched.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.data import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.nonconvex_printed import OBJECTIVE, PAPER, fit
from reproduce.store import Row, Store, Table, print_table

EPSILON, RUNS = 0.2, 10
COLUMNS = ["rows", "method", "step", "runs", "F", "± se", "‖∇F‖", "± se", "paper: ‖∇F‖"]
KEYS = ("rows", "method", "step", "runs", "risk", "risk_se", "gradient_norm", "gradient_norm_se",
        "paper_gradient_norm")  # fmt: skip


def rows_of(table: Any, runs: int, steps: int) -> list[Row]:
    """Three methods, on rows as they are and on short ones."""
    squares = table.X.multiply(table.X) if hasattr(table.X, "multiply") else table.X**2
    longest = float(np.sqrt(np.asarray(squares.sum(axis=1))).max())
    found = []
    for said, X, factor in (("as they are", table.X, 1.0), ("at most 1 long", table.X / longest, 4.0)):
        data, n = (X, table.y), len(table.y)
        records = OBJECTIVE.prepare(data)
        momentum = qg.DPSRM(steps=4 * n // 50, batch_size=50, learning_rate=0.04 * factor, gamma=0.01,
                            difference_clip=0.01, sampling="fixed-size")  # fmt: skip
        still = qg.DPGD(steps=steps, learning_rate=2.0 * factor, clip=1.0)
        made: dict[str, tuple[Any, int]] = {
            "descent without noise": (still, 1),
            "DP-GD": (qg.DPGD(steps=20, learning_rate=5.12 * factor, clip=1.0), runs),
            "DP-SRM": (momentum, runs),
        }
        for method, (algorithm, repeats) in made.items():
            if algorithm is still:
                points = [qg.minimize(OBJECTIVE, data, still, budget=None).params]
            else:
                points = [fit(method, data, algorithm, EPSILON).params for _ in range(repeats)]
            printed = PAPER["a9a"][EPSILON].get(method)
            row: Row = {"rows": said, "method": method, "step": algorithm.learning_rate, "runs": repeats,
                        "longest_row": longest, "paper_gradient_norm": printed and printed[4]}  # fmt: skip
            values = {
                "risk": [float(OBJECTIVE.risk(records, x)) for x in points],
                "gradient_norm": [float(np.linalg.norm(OBJECTIVE.risk_gradient(records, x))) for x in points],
            }
            for name, seen in values.items():
                spread = float(np.std(seen, ddof=1) / len(seen) ** 0.5) if len(seen) > 1 else None
                row |= {name: float(np.mean(seen)), f"{name}_se": spread}
            found.append(row)
    return found


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """One table."""
    body = [[row[key] for key in KEYS] for row in rows["rows"]]
    return [{"title": "a9a, C1 = 1, ε = 0.2, replace-one, δ = 1e-5", "columns": COLUMNS, "rows": body}]


STORE = Store(
    Path(__file__).parent / "results" / "gradient_norms.json", "python reproduce/gradient_norms.py",
    {"relation": "replace-one", "delta": 1e-5}, kinds=("rows",), tables=tables,
)  # fmt: skip


def main() -> None:
    """Run it unless the results are there; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="breast cancer, two runs; nothing is saved")
    quick = parser.parse_args().quick
    if not quick and STORE.rows("rows"):
        return
    rows = rows_of(load("breast-cancer" if quick else "a9a"), 2 if quick else RUNS, 50 if quick else 2000)
    print_table("ε = 0.2", COLUMNS, [[row[key] for key in KEYS] for row in rows])
    if not quick:
        STORE.keep("rows", *rows)


if __name__ == "__main__":
    main()
