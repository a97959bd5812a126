"""Paper 003, which has no experiments: what its theorems say in numbers, and where Algorithm 4's noise takes over.

    OMP_NUM_THREADS=1 python reproduce/sosp.py

1. Theorem 2's α against n, all unnamed constants 1, its slope beside the printed (√d/(nε))^(2/5) + n^(−1/3), and
   how many times over the printed batches use the n records (T·b₂/n).
2. The unnamed noise constants c₁ = c₂ that make the printed form (ε, δ)-DP, by the exact Gaussian profile.
3. Theorem 3's α against the number m of parties, each with n records and noise of its own.
4. Algorithm 4 on parties, d = 10 … 200: thresholds with the printed triangle of noise and with the orthogonal
   ensemble, the α′ they amount to, and what the selection does with a list of saddles that ends in a minimum.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import LossConstants
from quietgrad.methods.second_order_theorem import solve

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.hessian_selection import HessianSelection
from reproduce.local_parties import run_on_parties
from reproduce.store import print_table

UNIT = LossConstants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)


def theory() -> list[dict[str, Any]]:
    """α of equations (4), (5) and Theorem 2 at G = M = ρ = U = s = C = 1, ε = 1, δ = 1e-6."""
    rows: list[dict[str, Any]] = []
    for d in (10, 1000):
        found = []
        for power in range(6, 21, 2):
            n = 10**power
            try:
                s = solve(UNIT, n=n, dim=d, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0)
            except ValueError as error:
                rows.append({"d": d, "n": n, "refused": str(error)})
                continue
            found.append((float(n), s.alpha))
            rows.append(
                {"d": d, "n": n, "uses_of_each_record": s.steps * s.difference_batch_size / n, **s._asdict()}
            )
        logs = np.log(np.array(found))
        rows.append({"d": d, "slope": round(float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), 3)})
    return rows


def parties() -> list[dict[str, Any]]:
    """α of Theorem 3 at the same constants, d = 10 and n = 10¹⁴ records of each party, and its slope in m."""
    rows: list[dict[str, Any]] = []
    for m in (1, 4, 16, 64):
        s = solve(UNIT, n=10**14, dim=10, budget=qg.Budget(1.0, 1e-6), risk_bound=1.0, parties=m)
        rows.append({"d": 10, "n": 10**14, "m": m, **s._asdict()})
    logs = np.log(np.array([[row["m"], row["alpha"]] for row in rows]))
    return [*rows, {"slope": round(float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0]), 3)}]


def constants() -> list[dict[str, float]]:
    """c with noise variance c·G²log(1/δ)/(b²ε²) exactly (ε, δ)-DP under replace-one, δ = 1e-5."""
    delta = 1e-5
    return [
        {"epsilon": e, "c": round(4.0 * (e / gaussian_mu(e, delta)) ** 2 / math.log(1 / delta), 2)}
        for e in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    ]


def algorithm_four(dims: tuple[int, ...], n: int, m: int, candidates: int, seeds: int) -> list[dict[str, Any]]:
    """Nineteen saddles and then a minimum: a selection that is not drowned takes the last."""
    rows = []
    budget = qg.Budget(2.0, 1e-6, qg.Relation.REPLACE_ONE)
    for d in dims:
        land = qg.objectives.landscape("strict-saddle", d=d)
        rho = land.constants().hessian_lipschitz
        assert rho is not None
        alpha = land.saddle_curvature**2 / (4.0 * rho)
        data = [dataclasses.replace(land, seed=j).prepare(n) for j in range(m)]
        points = [land.saddle()] * (candidates - 1) + [land.minimum()]
        for noise in ("triangle", "goe"):
            test = HessianSelection(points, alpha=alpha, noise=noise)  # type: ignore[arg-type]
            door: Any = CentralCurator(land, data[0], seed=0).open(qg.plan(test, n=n, budget=budget))
            door.noise_sources, one = m, door.expected_batch
            door.expected_batch = lambda slot, one=one: m * one(slot)
            steep, bent = test.thresholds(door)
            runs = [run_on_parties(land, data, test, budget=budget, seed=100 * s) for s in range(seeds)]
            chosen = [int(run.details["chosen"]) for run in runs]
            row = {
                "d": d, "n": n, "m": m, "candidates": candidates, "noise": noise, "alpha": alpha,
                "gradient_threshold": steep, "curvature_threshold": bent,
                "alpha_selected": max(steep, bent**2 / rho),
                "passes_saddles": bent <= land.saddle_curvature,
                "took_the_minimum": sum(c == candidates - 1 for c in chosen),
                "took_a_saddle": sum(0 <= c < candidates - 1 for c in chosen),
                "took_none": sum(c < 0 for c in chosen),
                "remark_3_limit_of_d": (math.sqrt(m) * n * budget.epsilon) ** (6 / 13),
            }  # fmt: skip
            rows.append(row)
    return rows


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The four parts as tables."""
    solved = [row for row in record["theorem_2"] if "alpha" in row]
    refused = [row for row in record["theorem_2"] if "refused" in row]
    slopes = [row for row in record["theorem_2"] if "slope" in row]
    theory_rows = [
        *([row["d"], f"{row['n']:.0e}", None, None, "refused: n too small"] for row in refused),
        *(
            [row["d"], f"{row['n']:.0e}", row["alpha"], float(row["uses_of_each_record"]), "solved"]
            for row in solved
        ),
        *([row["d"], "slope of α in n", row["slope"], None, "printed: −1/3"] for row in slopes),
    ]
    keys = ("d", "n", "m", "noise", "curvature_threshold", "passes_saddles", "took_the_minimum", "took_a_saddle")
    return [
        {"title": "Theorem 2 at G = M = ρ = U = s = C = 1, ε = 1, δ = 1e-6",
         "columns": ["d", "n", "α", "uses of each record (T·b₂/n)", "equations (4) and (5)"], "rows": theory_rows},
        {"title": "Theorem 3 at the same constants, d = 10, n = 1e14 records of each party",
         "columns": ["parties m", "α", "κ", "b₁ of a party"],
         "rows": [
             [row["m"], row["alpha"], row["kappa"], row["batch_size"]] if "m" in row
             else ["slope of α in m", row["slope"], None, None]
             for row in record["theorem_3"]
         ]},
        {"title": "The unnamed c₁ = c₂ that make the printed noise (ε, 1e-5)-DP",
         "columns": ["ε", "c"], "rows": [[row["epsilon"], row["c"]] for row in record["noise_constants"]]},
        {"title": "Algorithm 4: saddles, and then a minimum, to select from",
         "columns": ["d", "n of a party", "parties", "noise", "λ_min must exceed", "saddles pass",
                     "runs that took the minimum", "a saddle"],
         "rows": [[row[key] for key in keys] for row in record["algorithm_4"]]},
    ]  # fmt: skip


def main() -> None:
    """Compute, print, and write ``results/sosp.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    quick = parser.parse_args().quick
    numbers = {"theorem_2": theory(), "theorem_3": parties(), "noise_constants": constants()}
    small = ((10,), 20_000, 2, 5, 1)
    numbers["algorithm_4"] = algorithm_four(*(small if quick else ((10, 20, 50, 100, 200), 10_000, 4, 20, 3)))
    shown = tables(numbers)
    for table in shown:
        print_table(table["title"], table["columns"], table["rows"])
    if not quick:
        save(Path(__file__).parent / "results" / "sosp.json", {**numbers, "tables": shown})


if __name__ == "__main__":
    main()
