"""Tables 2–3 and figures 1–2 of paper 000 at its own settings: passes, batches, clips, fixed-size, replace-one.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/nonconvex_printed.py
    OMP_NUM_THREADS=1 python reproduce/nonconvex_printed.py --quick               # scikit-learn's breast cancer,
    seconds

Takes 12 CPU minutes. What the paper states is taken over: the loss (logistic, λ = 0.001 nonconvex, no intercept),
b ∈ {50, 100, 200}, C1 = 1, C2 = γ = 0.01, b₀ = b, the passes of its tables (20 for DP-GD, 8 or 10 for RRPSGD, 4
or 5 for DP-SRM), δ = 1e-5, 10 runs (3 of DDP-SRM), fixed-size batches, neighbours by replacing one record, 10
parties for DDP-SRM. What it leaves open is searched for every method on the same grid of step lengths, on a fixed
fifth of the training rows (fit once on the other four fifths, least validation loss); DP-AGD chooses its own
steps. Test rows decide nothing, and the search is not in ε. Models are last iterates, but RRPSGD's. DDP-SRM sums
over ten parties with local batches; the coordinator adds the noise that a secure sum by mpc would.

Noise *true*: calibrated to ε by the accountant. Noise *printed*: of Theorem 4.1 for DP-SRM (β = ½; no noise meets
the theorem's own condition at these ε, so it is only the formula), and of paper 004 for RRPSGD; ε beside it is
what is proved for it. The settings that suit each method best are in `nonconvex_logistic.py`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.data import load
from quietgrad.federation import Party, deal, simulate
from quietgrad.objectives import Logistic, Nonconvex

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.store import Row, Store, Table, print_table

OBJECTIVE, PLAIN = Logistic(regularizer=Nonconvex(1e-3)), Logistic()
DELTA, RUNS, POINTS = 1e-5, 10, 16
# As printed: test loss and its deviation over 10 runs, passes, CPU seconds, gradient norm and its deviation.
PAPER: dict[str, dict[float, dict[str, tuple[float, float, int, float, float, float]]]] = {
    "a9a": {
        0.2: {"DP-GD": (0.4153, 0.0110, 20, 1.240, 0.0950, 0.0217),
              "DP-AGD": (0.3708, 0.0045, 360, 95.18, 0.0431, 0.0021),
              "RRPSGD": (0.4026, 0.0036, 8, 39.50, 0.2138, 0.0111),
              "DP-SRM": (0.3598, 0.0009, 4, 0.6003, 0.0534, 0.0046),
              "DDP-SRM": (0.3629, 0.0017, 4, 11.53, 0.0664, 0.0053)},
        0.5: {"DP-GD": (0.3856, 0.0066, 20, 1.266, 0.0861, 0.0128),
              "DP-AGD": (0.3619, 0.0041, 365, 95.88, 0.0405, 0.0022),
              "RRPSGD": (0.3859, 0.0029, 10, 51.90, 0.1460, 0.0128),
              "DP-SRM": (0.3517, 0.0010, 5, 0.7390, 0.0504, 0.0065),
              "DDP-SRM": (0.3572, 0.0022, 5, 13.32, 0.0691, 0.0058)},
    },
    "ijcnn1": {
        0.2: {"DP-GD": (0.3160, 0.0120, 20, 0.5180, 0.0184, 0.0024),
              "DP-AGD": (0.2645, 0.0044, 346, 90.05, 0.0133, 0.0018),
              "RRPSGD": (0.3110, 0.0106, 8, 47.64, 0.0175, 0.0023),
              "DP-SRM": (0.2503, 0.0090, 5, 0.4748, 0.0117, 0.0008),
              "DDP-SRM": (0.2618, 0.0121, 5, 11.62, 0.0136, 0.0009)},
        0.5: {"DP-GD": (0.2717, 0.0081, 20, 0.4990, 0.0171, 0.0024),
              "DP-AGD": (0.2416, 0.0029, 365, 94.28, 0.0397, 0.0025),
              "RRPSGD": (0.3033, 0.0110, 10, 59.06, 0.0160, 0.0018),
              "DP-SRM": (0.2341, 0.0042, 5, 0.4368, 0.0082, 0.0005),
              "DDP-SRM": (0.2393, 0.0048, 5, 12.87, 0.0096, 0.0008)},
    },
}  # fmt: skip
BASELINE = {"a9a": (0.3346, 0.007), "ijcnn1": (0.2096, 0.002)}  # STORM, not private
STEPS = [0.01 * 2.0**k for k in range(14)]  # 0.01 … 82: ijcnn1's rows are short, its steps long
EVERY = (
    "DP-GD",
    "DP-AGD",
    "RRPSGD",
    "RRPSGD, printed noise",
    "DP-SGD",
    "DP-SRM",
    "DP-SRM, printed noise",
    "DDP-SRM",
)


def grid(method: str, n: int, passes: int, quick: bool = False) -> list[Any]:
    """What a method may choose from; batch and passes are the paper's."""
    rates = STEPS[3:10:3] if quick else STEPS
    batches = (50,) if quick else (50, 100, 200)
    shared: dict[str, Any] = {"sampling": "fixed-size", "clip": 1.0}
    if method == "DP-GD":
        return [qg.DPGD(steps=passes, learning_rate=e, clip=1.0) for e in rates]
    if method == "DP-AGD":
        return [
            qg.DPAGD(splits=k, clip=1.0, loss_clip=m, longest_step=1.0, max_steps=passes)
            for k in (30, 60) for m in (2.0, 4.0)
        ][: 1 if quick else None]  # fmt: skip
    if method.startswith("RRPSGD"):
        noise = "paper" if "printed" in method else "tight"
        return [
            qg.RRPSGD(steps=math.ceil(passes * n / 200), batch_size=min(200, n), learning_rate=e, noise=noise,
            **shared) for e in rates
        ]  # fmt: skip
    cls = qg.DPSGD if method == "DP-SGD" else qg.DPSRM
    more = {} if method == "DP-SGD" else {"gamma": 0.01, "difference_clip": 0.01}
    return [
        cls(steps=math.ceil(passes * n / b), batch_size=b, learning_rate=e, **shared, **more)
        for b in batches for e in rates
    ]  # fmt: skip


def printed_noise(algorithm: Any, n: int, epsilon: float, beta: float = 0.5) -> float:
    """Theorem 4.1's σ on the mean, as a multiplier of C on the sum: b·√(14Tα/(βε))/n, α = ln(1/δ)/((1−β)ε) + 1."""
    alpha = math.log(1 / DELTA) / ((1 - beta) * epsilon) + 1
    return float(algorithm.batch_size * math.sqrt(14 * algorithm.steps * alpha / (beta * epsilon)) / n)


def fit(method: str, data: tuple[Any, Any], algorithm: Any, epsilon: float, watch: Any = None) -> Any:
    """One private fit."""
    budget = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)
    if method == "DDP-SRM":
        parties = [Party(party.X, party.y) for party in deal(*data, 10)]
        return simulate(algorithm, OBJECTIVE, parties, budget=budget, trust="curator", callback=watch)
    noise = None
    if method == "DP-SRM, printed noise":
        noise = printed_noise(algorithm, len(data[1]), epsilon)
        # The promise must cover what this noise is proved for; the result says how much that is.
        budget = replace(budget, epsilon=max(epsilon, 10.0))
    return qg.minimize(OBJECTIVE, data, algorithm, budget=budget, noise_multiplier=noise, callback=watch)


Points = list[tuple[float, ...]]


class Curve:
    """Training objective and gradient norm at moments of a run, against passes over the data (steps of DP-AGD)."""

    def __init__(self, records: Any, algorithm: Any, passes: float) -> None:
        self.records, self.algorithm, self.passes = records, algorithm, passes
        self.points: Points = []
        stops_early = isinstance(algorithm, qg.DPAGD)  # long before its limit
        self.steps = algorithm.max_steps if stops_early else algorithm.steps
        self.every = max(1, self.steps // (8 * POINTS if stops_early else POINTS))

    def __call__(self, progress: qg.Progress) -> None:
        if progress.step and (progress.step % self.every == 0 or progress.done):
            x = progress.params
            at = self.passes * progress.step / self.steps
            if self.points and self.points[-1][0] == at:
                return  # the end is told again
            slope = float(np.linalg.norm(OBJECTIVE.risk_gradient(self.records, x)))
            self.points.append((at, float(OBJECTIVE.risk(self.records, x)), slope))


def row_of(data: str, table: Any, method: str, epsilon: float, passes: int, runs: int, quick: bool) -> Row:
    """Search, ten fits on all training rows with their curves, and the test rows."""
    n = len(table.y)
    order = np.random.default_rng(20).permutation(n)
    held, inner = order[: n // 5], np.sort(order[n // 5 :])
    look, learn = PLAIN.prepare((table.X[held], table.y[held])), (table.X[inner], table.y[inner])
    choices = grid("DP-SRM" if method == "DDP-SRM" else method, n, passes, quick)
    if method == "DDP-SRM":  # the law of DP-SRM's release: what was best for it is taken over
        known = STORE.find("rows", data=data, epsilon=epsilon, method="DP-SRM")
        best = choices[known["choice"] if known else 0]
    else:
        single = method if "printed" in method else method.split(",")[0]
        best = min(choices, key=lambda a: PLAIN.risk(look, fit(single, learn, a, epsilon).params))
    train, test = (table.X, table.y), PLAIN.prepare((table.X_test, table.y_test))
    records = OBJECTIVE.prepare(train)
    losses, errors, norms, seconds = [], [], [], []
    curves: list[Points] = []
    for _ in range(runs):
        began = time.process_time()
        run = fit(method, train, best, epsilon)
        seconds.append(time.process_time() - began)
        losses.append(float(PLAIN.risk(test, run.params)))
        errors.append(float(np.mean(PLAIN.predict(table.X_test, run.params) != table.y_test)))
        norms.append(float(np.linalg.norm(OBJECTIVE.risk_gradient(records, run.params))))
    if method != "DDP-SRM":
        curves = curves_of(method, train, best, epsilon, passes, runs, run.privacy.noise_multiplier)
    paper = PAPER.get(data, {}).get(epsilon, {}).get(method.split(",")[0])
    return {
        "data": data, "epsilon": epsilon, "method": method, "passes": passes, "runs": runs,
        "choice": choices.index(best), "settings": best.config(), "searched": len(choices),
        "test_loss": float(np.mean(losses)), "test_loss_se": _se(losses),
        "test_error": float(np.mean(errors)),
        "gradient_norm": float(np.mean(norms)), "gradient_norm_se": _se(norms),
        "cpu_seconds": float(np.median(seconds)), "epsilon_proved": float(run.privacy.epsilon),
        "noise_multiplier": run.privacy.noise_multiplier,
        "paper": None if paper is None else dict(zip(
            ("test_loss", "test_loss_sd", "passes", "cpu_seconds", "gradient_norm", "gradient_norm_sd"), paper,
            strict=True)),
        **summed(curves),
    }  # fmt: skip


def curves_of(
    method: str, train: Any, algorithm: Any, epsilon: float, passes: int, runs: int, noise: float | None
) -> list[Points]:
    """Fits that are watched, all as long as the longest: a run that has stopped stays where it is.

    The path of RRPSGD, of which its random round picks a point, is that of DP-SGD with its noise.
    """
    records, found = OBJECTIVE.prepare(train), []
    path = algorithm
    if isinstance(algorithm, qg.RRPSGD):
        path = qg.DPSGD(steps=algorithm.steps, batch_size=algorithm.batch_size, clip=algorithm.clip,
                        learning_rate=algorithm.learning_rate, sampling="fixed-size")  # fmt: skip
    for _ in range(runs):
        curve = Curve(records, path, passes)
        if path is algorithm:
            fit(method, train, algorithm, epsilon, curve)
        else:
            budget = qg.Budget(100.0, DELTA, qg.Relation.REPLACE_ONE)  # covers the path; the row has the round's ε
            qg.minimize(OBJECTIVE, train, path, budget=budget, noise_multiplier=noise, callback=curve)
        found.append(curve.points)
    longest = max(found, key=len)
    return [[*c, *((at, *c[-1][1:]) for at, *_ in longest[len(c) :])] for c in found]


def summed(curves: list[Points]) -> Row:
    """Their mean and deviation."""
    return {
        "curve": np.mean(curves, axis=0).round(5).tolist() if curves else [],
        "curve_sd": np.std(curves, axis=0).round(5).tolist() if curves else [],
        "curves": len(curves),
    }


def watch(only: str | None) -> None:
    """Keep curves for rows of the results that have fewer than runs."""
    for row in STORE.rows("rows"):
        if row["method"] == "DDP-SRM" or row["curves"] >= row["runs"] or only not in (None, row["data"]):
            continue
        table = load(row["data"])
        best = grid(row["method"], len(table.y), row["passes"])[row["choice"]]
        curves = curves_of(row["method"], (table.X, table.y), best, row["epsilon"], row["passes"], row["runs"],
                           row["noise_multiplier"])  # fmt: skip
        STORE.change("rows", row, **summed(curves))
        print(row["data"], row["epsilon"], row["method"], curves[0][-1], flush=True)


def _se(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def baseline(data: str, table: Any) -> Row:
    """STORM without noise: the paper's non-private line."""
    unit = 1.0 if data == "a9a" else 12.0
    run = qg.minimize(
        OBJECTIVE, (table.X, table.y), qg.STORM(steps=1500, batch_size=400, learning_rate=0.3 * unit), budget=None
    )
    loss = float(PLAIN.risk(PLAIN.prepare((table.X_test, table.y_test)), run.params))
    printed = BASELINE.get(data, (None, None))
    return {"data": data, "method": "STORM, not private", "test_loss": loss, "paper_test_loss": printed[0]}


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Tables 2 and 3: the paper's numbers beside ours."""
    columns = ["data", "ε", "method", "paper: test loss", "ours", "± se", "paper: gradient norm", "ours", "± se",
               "passes", "paper: s", "CPU s", "proved ε"]  # fmt: skip
    body = [_cells(row) for row in rows["rows"]]
    found = [{"title": "At the paper's settings: replace-one, δ = 1e-5", "columns": columns, "rows": body}]
    if rows["baselines"]:
        plain = [[r["data"], r["method"], r["paper_test_loss"], r["test_loss"]] for r in rows["baselines"]]
        found.append({"title": "Without noise", "columns": ["data", "method", "paper", "ours"], "rows": plain})
    return [*found, *gradient_complexity(rows["rows"])]


GRADIENTS = {"DP-GD": 1, "DP-SGD": 1, "DP-SRM": 2}
"""Gradients of a record in a step that uses it: DP-SRM differentiates it at two points."""


def gradient_complexity(rows: list[Row]) -> list[Table]:
    """Gradients until ‖∇F‖ is small, which is what the paper's rates count, by the curves of figures 1 and 2.

    The target of a cell is the largest of the methods' final norms, so that all reach it; gradients are counted in
    passes over the data, up to the first point of the mean curve that is at most the target.
    """
    body: list[list[Any]] = []
    for data, epsilon in dict.fromkeys((row["data"], row["epsilon"]) for row in rows):
        curves = {
            row["method"]: row["curve"]
            for row in rows
            if (row["data"], row["epsilon"]) == (data, epsilon) and row["method"] in GRADIENTS and row["curve"]
        }
        if len(curves) < len(GRADIENTS):
            continue
        target = max(curve[-1][2] for curve in curves.values())
        counts = [
            GRADIENTS[method] * next(at for at, _, slope in curves[method] if slope <= target)
            for method in GRADIENTS
        ]
        body.append([data, epsilon, target, *counts])
    columns = ["data", "ε", "‖∇F‖ at most", *GRADIENTS]
    return (
        [{"title": "Gradients per record to a norm, in passes", "columns": columns, "rows": body}] if body else []
    )


def _cells(row: Row) -> list[Any]:
    paper = (row["paper"] or {}) if "printed" not in row["method"] and row["method"] != "DP-SGD" else {}
    return [
        row["data"], row["epsilon"], row["method"], paper.get("test_loss"), row["test_loss"], row["test_loss_se"],
        paper.get("gradient_norm"), row["gradient_norm"], row["gradient_norm_se"], row["passes"],
        paper.get("cpu_seconds"), row["cpu_seconds"], row["epsilon_proved"],
    ]  # fmt: skip


STORE = Store(
    Path(__file__).parent / "results" / "nonconvex_printed.json",
    "python reproduce/nonconvex_printed.py",
    {"relation": "replace-one", "delta": DELTA, "protocol": __doc__},
    kinds=("rows", "baselines"),
    tables=tables,
)


def show(title: str, rows: list[Row]) -> None:
    """The columns that matter most."""
    columns = ["data", "ε", "method", "paper: test loss", "ours", "± se", "‖∇F‖", "proved ε"]
    keys = ("data", "epsilon", "method", "test_loss", "test_loss_se", "gradient_norm", "epsilon_proved")
    lines = [[row[key] for key in keys] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        line.insert(3, row["paper"] and row["paper"]["test_loss"])
    print_table(title, columns, lines)


def main() -> None:
    """Run what is not in the results yet; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="breast cancer, two methods; nothing is saved")
    parser.add_argument("--only", help="one data set, or one cell such as a9a@0.2")
    parser.add_argument("--curves", action="store_true", help="only what figures 1 and 2 still lack")
    arguments = parser.parse_args()
    if arguments.curves:
        watch(arguments.only)
        return
    if arguments.quick:
        table = load("breast-cancer")
        rows = [row_of("breast-cancer", table, m, 2.0, 4, 2, quick=True) for m in ("DP-GD", "DP-SGD", "DP-SRM")]
        show("scikit-learn's breast cancer, two runs (the paper has other sets)", rows)
        return
    for data, budgets in PAPER.items():
        table = load(data)
        for epsilon, printed in budgets.items():
            if arguments.only not in (None, data, f"{data}@{epsilon:g}"):
                continue
            for method in EVERY:
                passes = printed.get(method.split(",")[0], printed["DP-SRM"])[2]
                if STORE.find("rows", data=data, epsilon=epsilon, method=method) is None:
                    runs = 3 if method == "DDP-SRM" else RUNS  # every round of it is ten messages
                    STORE.keep("rows", row_of(data, table, method, epsilon, passes, runs, quick=False))
                    show("", STORE.rows("rows")[-1:])
        if STORE.find("baselines", data=data) is None and arguments.only in (None, data):
            STORE.keep("baselines", baseline(data, table))


if __name__ == "__main__":
    main()
