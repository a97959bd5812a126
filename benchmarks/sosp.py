"""Leaving saddles: escape rates, true and claimed α, scaling, selection, and the cost of a difference query.

    OMP_NUM_THREADS=1 python benchmarks/sosp.py            # all, about a quarter of an hour of CPU time
    OMP_NUM_THREADS=1 python benchmarks/sosp.py --quick    # small sizes, for a look; writes nothing

Every part runs on landscapes whose saddles and minima are known, started exactly at a strict saddle. α₀ is fixed
beforehand so that √(ρα₀) is half the saddle's curvature. Seeds are fixed, so ε is what the noise would give.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import betaincinv

import quietgrad as qg
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientDifferenceQuery, RecursiveMomentumQuery

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.landscapes import landscape
from reproduce.local_parties import run_on_parties

from benchmarks.record import save

BUDGET = qg.Budget(2.0, 1e-6, qg.Relation.REPLACE_ONE)
RECORDS = {10: 2_500_000, 100: 3_200_000, 1000: 5_000_000}  # enough for an error below α₀/4, see `escapes`


def level(land: Any) -> float:
    """α₀ with √(ρα₀) = ½|λ_saddle|."""
    rho = land.constants().hessian_lipschitz
    assert rho is not None
    return land.saddle_curvature**2 / (4.0 * rho)


def true_alpha(land: Any, params: Any) -> float:
    """The least α at which the population risk calls the point second-order stationary."""
    found = qg.certify(land, params)
    assert found.rho is not None
    return max(found.gradient_norm, max(0.0, -found.lambda_min) ** 2 / found.rho)


def interval(hits: int, runs: int, miss: float = 0.05) -> list[float]:
    """Clopper–Pearson."""
    low = 0.0 if hits == 0 else float(betaincinv(hits, runs - hits + 1, miss / 2))
    high = 1.0 if hits == runs else float(betaincinv(hits + 1, runs - hits, 1 - miss / 2))
    return [round(low, 4), round(high, 4)]


def slope(x: list[float], y: list[float]) -> float:
    """Of log y against log x."""
    return round(float(np.polyfit(np.log(x), np.log(y), 1)[0]), 3)


def escapes(most: int, dims: list[int]) -> list[dict[str, Any]]:
    """Runs from the saddle at equal (ε, δ) and records, ours and first-order ones."""
    rows = []
    for d in dims:
        land = qg.objectives.landscape("strict-saddle", d=d)
        n, alpha, stated = RECORDS[d], level(land), land.constants()
        records = land.prepare(n)
        assert stated.lipschitz is not None
        assert stated.smoothness is not None
        rate, clip, batch, steps = 1.0 / stated.smoothness, stated.lipschitz, n // 120, 120
        methods: dict[str, tuple[Any, qg.Budget | None]] = {
            "perturbed-sgd": (qg.PerturbedSGD(chi=alpha / 4.0), BUDGET),
            "perturbed-sgd, last iterate": (qg.PerturbedSGD(chi=alpha / 4.0, returns="last"), BUDGET),
            "dp-gd": (qg.DPGD(steps=60, learning_rate=rate, clip=clip), BUDGET),
            "dp-sgd": (qg.DPSGD(steps=steps, batch_size=batch, learning_rate=rate, clip=clip), BUDGET),
            "dp-srm": (qg.DPSRM(steps=steps, batch_size=batch, learning_rate=rate, clip=clip), BUDGET),
        }
        still = dataclasses.replace(land, slope_noise=0.0)  # type: ignore[call-arg]
        stays = qg.minimize(still, still.prepare(1000), qg.GD(steps=500, learning_rate=rate), budget=None)
        rows.append({"d": d, "method": "gd without noise", "escaped": float(np.abs(stays.params).max()) > 0.0})
        for name, (method, budget) in methods.items():
            started = time.process_time()
            seeds = max(1, most // 5) if name.endswith("last iterate") else most
            runs = [qg.minimize(land, records, method, budget=budget, seed=seed) for seed in range(seeds)]
            spent = (time.process_time() - started) / seeds
            kinds = [qg.certify(land, run.params, alpha=alpha) for run in runs]
            out = sum(c.lambda_min > 0.5 * land.saddle_curvature for c in kinds)
            row: dict[str, Any] = {
                "d": d, "n": n, "method": name, "runs": seeds, "alpha": alpha,
                "escaped": out / seeds, "interval": interval(out, seeds),
                "sosp_at_alpha": sum(c.kind == "sosp" for c in kinds) / seeds,
                "median_true_alpha": float(np.median([true_alpha(land, run.params) for run in runs])),
                "epsilon": runs[0].privacy.epsilon, "cpu_seconds": round(spent, 3),
            }  # fmt: skip
            if name == "perturbed-sgd":
                said = [c for c, run in zip(kinds, runs, strict=True) if run.stopped_by == "sosp"]
                right = sum(c.kind == "sosp" for c in said)
                row |= {
                    "stopped_by": {k: sum(r.stopped_by == k for r in runs) for k in ("sosp", "samples", "steps")},
                    "said_sosp_and_is": right / max(1, len(said)),
                    "said_interval": interval(right, len(said)) if said else None,
                    "omega": method.failure,
                    "median_samples": int(np.median([r.samples_used for r in runs])),
                    "median_escapes": float(np.median([r.escapes for r in runs])),
                }
            rows.append(row)
            print(row, flush=True)
    return rows


def scaling(seeds: int, sizes: list[int], dims: list[int], many: list[int]) -> dict[str, Any]:
    """Claimed α = 4χ and true α of the returned point, against n, d and the number of parties m."""

    def run(d: int, n: int, m: int = 1) -> dict[str, Any]:
        land = qg.objectives.landscape("strict-saddle", d=d)
        stated = land.constants()
        assert stated.smoothness is not None
        assert stated.hessian_lipschitz is not None
        most = 0.24 * stated.smoothness**2 / stated.hessian_lipschitz  # χ beyond which no stop means anything
        data = [dataclasses.replace(land, seed=j).prepare(n) for j in range(m)]
        # The scaling of α is of interest beyond where the saddle would pass: only √(ρα) < M is asked for.
        method, meaningful = qg.PerturbedSGD(curvature=stated.smoothness), True
        try:
            runs = [run_on_parties(land, data, method, budget=BUDGET, seed=100 * s) for s in range(seeds)]
        except ValueError:
            meaningful, method = False, qg.PerturbedSGD(chi=most, curvature=stated.smoothness)
            runs = [run_on_parties(land, data, method, budget=BUDGET, seed=100 * s) for s in range(seeds)]
        row = {
            "d": d, "n": n, "m": m,
            "claimed_alpha": runs[0].details["alpha"] if meaningful else None,
            "true_alpha": float(np.median([true_alpha(land, r.params) for r in runs])),
            "stopped_by": sorted({r.stopped_by for r in runs}),
        }  # fmt: skip
        print(row, flush=True)
        return row

    by_n = [run(10, n) for n in sizes]
    by_d = [run(d, sizes[-1]) for d in dims]
    by_m = [run(10, sizes[-3], m) for m in many]

    def fit(rows: list[dict[str, Any]], x: str, y: str) -> float | None:
        kept = [r for r in rows if r[y] is not None]
        return slope([r[x] for r in kept], [r[y] for r in kept]) if len(kept) > 1 else None

    return {
        "by_n": by_n,
        "by_d": by_d,
        "by_m": by_m,
        "slopes": {
            f"{y} in {x}": fit(rows, x, y)
            for rows, x in ((by_n, "n"), (by_d, "d"), (by_m, "m"))
            for y in ("claimed_alpha", "true_alpha")
        },
        "paper": {"n (privacy term)": -0.4, "n (sampling term)": -1 / 3, "d": 0.2, "m (privacy term)": -0.2},
    }


def selection(seeds: int, dims: list[int]) -> list[dict[str, Any]]:
    """The drift criterion against training on half the records and searching on the other half."""
    rows = []
    for d in dims:
        land, n = qg.objectives.landscape("strict-saddle", d=d), 1_000_000
        records = land.prepare(n)
        methods = {
            "drift criterion": qg.PerturbedSGD(),
            "held-out search": qg.ModelSelection(oracle=qg.AdaptiveSpider(n // 60, n // 600)),
        }
        for name, method in methods.items():
            runs = [qg.minimize(land, records, method, budget=BUDGET, seed=s) for s in range(seeds)]
            claimed = runs[0].details["alpha"]
            said = [r for r in runs if r.stopped_by == "sosp"]
            wrong = [r for r in said if qg.certify(land, r.params, alpha=claimed).kind != "sosp"]
            row = {
                "d": d, "n": n, "method": name, "runs": seeds, "claimed_alpha": claimed,
                "median_true_alpha": float(np.median([true_alpha(land, r.params) for r in runs])),
                "median_samples": int(np.median([r.samples_used for r in runs])),
                "no_verdict": seeds - len(said), "wrong_verdict": len(wrong),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def other_losses(seeds: int, n: int) -> list[dict[str, Any]]:
    """A small network and matrix sensing from their symmetric saddles, and nonconvex-regularised logistic loss."""
    rows = []
    cases: list[tuple[Any, Any, dict[str, float]]] = [
        (landscape("two-layer", inputs=4, hidden=3), n, {"clip": 1.0, "smooth": 2.0, "rho": 2.0}),
        (landscape("matrix-sensing", size=4, rank=2), n, {"clip": 8.0, "smooth": 8.0, "rho": 12.0}),
    ]
    for land, size, c in cases:
        records = land.prepare(size)
        shared: dict[str, Any] = {"steps": 120, "batch_size": size // 120, "learning_rate": 1.0 / c["smooth"]}
        oracle = qg.AdaptiveSpider(clip=c["clip"], smoothness=c["smooth"], kappa=4e-3)
        methods: dict[str, Any] = {
            "perturbed-sgd": qg.PerturbedSGD(oracle=oracle, hessian_lipschitz=c["rho"], curvature=c["smooth"]),
            "dp-sgd": qg.DPSGD(**shared, clip=c["clip"]),
            "dp-srm": qg.DPSRM(**shared, clip=c["clip"]),
        }
        for name, method in methods.items():
            runs = [qg.minimize(land, records, method, budget=BUDGET, seed=s) for s in range(seeds)]
            found = [qg.certify(land, r.params) for r in runs]
            row = {
                "loss": land.name, "d": land.dim, "n": size, "method": name, "runs": seeds,
                "lambda_saddle": land.saddle_curvature,
                "median_excess_risk": float(
                    np.median([land.population_risk(r.params) for r in runs]) - land.population_risk(land.minimum())
                ),
                "risk_gap_of_saddle": land.population_risk(land.saddle()) - land.population_risk(land.minimum()),
                "median_lambda_min": float(np.median([f.lambda_min for f in found])),
                "median_gradient_norm": float(np.median([f.gradient_norm for f in found])),
                "stopped_by": sorted({r.stopped_by for r in runs}),
                "claimed_alpha": runs[0].details.get("alpha"),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return [*rows, *_logistic(seeds)]


def _logistic(seeds: int) -> list[dict[str, Any]]:
    """Nonconvex-regularised logistic regression on synthetic rows: the penalty's bumps make saddles of its own."""
    rng = np.random.default_rng(0)
    n, d = 200_000, 20
    X = rng.standard_normal((n, d))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = (X @ rng.standard_normal(d) + 0.3 * rng.standard_normal(n) > 0).astype(float)
    loss = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(0.02), row_bound=1.0, rows="clip")
    rho = loss.constants().hessian_lipschitz
    shared: dict[str, Any] = {"steps": 150, "batch_size": 4000, "learning_rate": 3.0}
    oracle = qg.AdaptiveSpider(8000, 2000, regime="reuse", full_queries=30, kappa=0.05)
    methods: dict[str, Any] = {
        # So few records prove nothing about this penalty's saddles: no claim is made, the run only leaves them. χ,
        # radius and drift are the run's own: at χ = 0.05 by hand the start counts as a saddle, and runs end there.
        "perturbed-sgd": qg.PerturbedSGD(oracle=oracle, steps=150, learning_rate=3.0, mode="practical"),
        "dp-sgd": qg.DPSGD(**shared, clip=1.0),
        "dp-srm": qg.DPSRM(**shared, clip=1.0),
    }
    rows = []
    table = loss.prepare((X, y))
    for name, method in methods.items():
        runs = [qg.minimize(loss, table, method, budget=BUDGET, seed=s) for s in range(seeds)]
        found = [qg.certify(loss, r.params, table, rho=rho) for r in runs]
        row = {
            "loss": "logistic, nonconvex penalty 0.02", "d": d, "n": n, "method": name, "runs": seeds,
            "median_risk": float(np.median([loss.risk(table, r.params) for r in runs])),
            "risk_at_start": loss.risk(table, np.zeros(d)),
            "median_lambda_min": float(np.median([f.lambda_min for f in found])),
            "median_gradient_norm": float(np.median([f.gradient_norm for f in found])),
            "stopped_by": sorted({r.stopped_by for r in runs}),
            "claimed_alpha": runs[0].details.get("alpha"),
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    return rows


def cost(repeats: int) -> dict[str, Any]:
    """CPU time of one O2 release against one DP-SRM release, same logistic table and batch; medians of ratios."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((30_000, 120))
    y = (X[:, 0] > 0).astype(float)
    loss = qg.objectives.Logistic()
    rows = {}
    for batch in (100, 1000):
        spider = qg.AdaptiveSpider(batch, batch, clip=1.0, smoothness=1.0, kappa=1.0, regime="reuse")
        plans = {
            "o2": qg.plan(qg.PerturbedSGD(oracle=spider, steps=5000), n=30_000, budget=qg.Budget(8.0, 1e-5)),
            "next": qg.plan(qg.DPSRM(steps=5000, batch_size=batch), n=30_000, budget=qg.Budget(8.0, 1e-5)),
        }
        doors = {slot: CentralCurator(loss, (X, y), seed=0).open(plan) for slot, plan in plans.items()}
        points = [rng.standard_normal(120) * 0.1 for _ in range(2)]
        queries: dict[str, Any] = {
            "o2": lambda p=points: GradientDifferenceQuery(p[0], p[1], float(np.linalg.norm(p[0] - p[1]))),
            "next": lambda p=points: RecursiveMomentumQuery(p[0], p[1], 0.1, 1.0, 0.1),
        }

        def timed(slot: str, doors: Any = doors, queries: Any = queries) -> float:
            start = time.process_time()
            for _ in range(200):
                doors[slot].release(slot, queries[slot]())
            return (time.process_time() - start) / 200

        for slot in doors:
            timed(slot)
        times = {slot: [timed(slot) for _ in range(repeats)] for slot in doors}
        rows[batch] = {
            "o2_microseconds": round(1e6 * float(np.median(times["o2"])), 1),
            "dp_srm_microseconds": round(1e6 * float(np.median(times["next"])), 1),
            "ratio": round(float(np.median(np.array(times["o2"]) / np.array(times["next"]))), 3),
        }
    print(rows, flush=True)
    return {str(k): v for k, v in rows.items()}


def draw(numbers: dict[str, Any], target: Path) -> None:
    """Claimed and true α against n, d and m, with the paper's slopes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    found = numbers["scaling"]
    panels = (
        ("by_n", "n", "records n", -1 / 3),
        ("by_d", "d", "dimension d", 0.2),
        ("by_m", "m", "parties m", -0.2),
    )
    for ax, (rows, x, label, printed) in zip(axes, panels, strict=True):
        for y, style in (("claimed_alpha", "o-"), ("true_alpha", "s--")):
            kept = [(r[x], r[y]) for r in found[rows] if r[y]]
            ax.loglog(*zip(*kept, strict=True), style, label=y.replace("_alpha", " α"))
        kept = [(r[x], r["claimed_alpha"]) for r in found[rows] if r["claimed_alpha"]]
        line = [kept[0][1] * (v / kept[0][0]) ** printed for v, _ in kept]
        ax.loglog([v for v, _ in kept], line, ":", color="gray", label=f"slope {printed:.2g} (paper)")
        ax.set_xlabel(label)
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("α")
    figure.tight_layout()
    figure.savefig(target)


def main() -> None:
    """Measure, print, and write ``results/sosp.json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; nothing is written")
    parser.add_argument("--draw", action="store_true", help="only draw results/sosp.json as results/sosp.svg")
    parser.add_argument("--only", help="measure one part again, such as other_losses; the others stay")
    parser.add_argument("--seeds", type=int, default=100, help="runs per method in the escape table")
    options = parser.parse_args()
    results = Path(__file__).parent / "results"
    if options.draw:
        draw(json.loads((results / "sosp.json").read_text()), results / "sosp.svg")
        return
    started = time.process_time()
    if options.quick:
        RECORDS[10] = 400_000
        escapes(2, [10])
        scaling(1, [20_000, 60_000, 200_000], [10], [1, 2])
        selection(1, [10])
        other_losses(1, 200_000)
        cost(2)
        return
    parts: dict[str, Callable[[], Any]] = {
        "cost_of_o2": lambda: cost(15),
        "escapes": lambda: escapes(options.seeds, [10, 100, 1000]),
        "scaling": lambda: scaling(
            7, [1_000, 10_000, 100_000, 300_000, 1_000_000, 3_000_000], [10, 30, 100, 300, 1000], [1, 2, 4, 8]
        ),
        "selection": lambda: selection(20, [10, 100]),
        "other_losses": lambda: other_losses(5, 1_000_000),
    }
    numbers: dict[str, Any] = {
        "budget": {"epsilon": BUDGET.epsilon, "delta": BUDGET.delta, "relation": str(BUDGET.relation)}
    }
    before = json.loads((results / "sosp.json").read_text()) if options.only else {}
    dates = before.get("dates", dict.fromkeys(parts, before.get("date")))
    for name, measure in parts.items():
        again = options.only in (None, name)
        numbers[name] = measure() if again else before[name]
        if again:
            dates[name] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    numbers["dates"] = dates
    numbers["cpu_seconds"] = round(time.process_time() - started)
    save(results / "sosp.json", numbers)


if __name__ == "__main__":
    main()
