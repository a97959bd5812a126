"""Paper 003's method where it can be checked: does it leave saddles, and does it beat DP-SGD with noise alone?

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/saddles.py
    OMP_NUM_THREADS=1 python reproduce/saddles.py --quick          # two landscapes, seconds, no download

Takes 10 CPU minutes. The paper (as seeded) has no experiments; its later version, arXiv 2505.15647, has MNIST and
CIFAR-10, of which small forms are here with settings of our own. (ε, δ) = (4, 1e-6), replace-one, unless said.

1. Four landscapes with 10⁶ records and a two-layer ReLU network with 2·10⁵, all started exactly on a saddle, 12
runs.
   *derived*: what the loss's own constants allow; it is refused where the saddle itself would pass. *practical*:
   η half of 1/the largest curvature between saddle and minimum, C where nine tenths of gradients end, both
   estimated on 2000 further records, which are synthetic and nobody's. *dp-sgd*: the same η, C, and 300 steps of
   n/100 records. "Left" means λ_min above a fifth of the saddle's.
2. From what n on the derived claim means anything on each landscape: √(ρα) below the saddle's curvature; by
planning
   alone, no run.
3. a9a with the nonconvex penalty (ε = 0.5, δ = 1e-5): test loss after the same records in the same batches.
4. MNIST (2-layer CNN, ε = 8, δ = 1e-5) and CIFAR-10 (CNN5, ε = 8): test error after 280 steps of 512 images.
   Perturbed SGD with SPIDER on re-used records (practical) beside DP-SGD, at the same clip; both try three steps on
   held-out training images.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

import quietgrad as qg
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.methods.oracles.base import plan_preview
from quietgrad.methods.perturbed_sgd import SmallGradient

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.landscapes import landscape
from reproduce.store import Row, Store, Table, print_table

BUDGET = qg.Budget(4.0, 1e-6, qg.Relation.REPLACE_ONE)
LANDSCAPES = ("strict-saddle", "matrix-sensing", "phase-retrieval", "two-layer")


def gradient(land: Any, records: Any, record: int, params: Any) -> Any:
    """The gradient of one record."""
    out = np.zeros(land.dim)
    land.add(Batch(records, np.array([record])), (params,), ClippingRule.gradient(math.inf), out)
    return out


def estimated(land: Any) -> tuple[float, float]:
    """(η, C) from records that are nobody's: see the module's text."""
    records = dataclasses.replace(land, seed=99).prepare(2000)
    points = [land.saddle() + t * (land.minimum() - land.saddle()) for t in (0.05, 0.3, 0.6, 1.0)]
    lengths = [np.linalg.norm(gradient(land, records, i, p)) for p in points for i in range(2000)]
    bends = [np.stack([land.population_hessian_product(p, e) for e in np.eye(land.dim)]) for p in points]
    top = max(float(np.abs(np.linalg.eigvalsh(bend)).max()) for bend in bends)
    return 0.5 / top, float(np.quantile(lengths, 0.9))


def methods(eta: float, clip: float, n: int) -> dict[str, Any]:
    """The three that start on a saddle."""
    oracle = qg.AdaptiveSpider(clip=clip)
    return {
        "derived": qg.PerturbedSGD(),
        "practical": qg.PerturbedSGD(oracle, learning_rate=eta, mode="practical"),
        "dp-sgd": qg.DPSGD(steps=300, batch_size=n // 100, learning_rate=eta, clip=clip),
    }


def on_landscape(name: str, n: int, runs: int) -> list[Row]:
    """All three methods from the saddle of one landscape."""
    land: Any = landscape(name)
    eta, clip = estimated(land)
    records, rows = land.prepare(n), []
    best = land.population_risk(land.minimum())
    for label, method in methods(eta, clip, n).items():
        row: Row = {"loss": name, "n": n, "d": land.dim, "method": label, "runs": runs,
                    "saddle": land.saddle_curvature}  # fmt: skip
        try:
            made = [qg.minimize(land, records, method, budget=BUDGET, seed=s) for s in range(runs)]
        except ValueError as refusal:
            rows.append({**row, "refused": str(refusal)})
            continue
        found = [qg.certify(land, run.params) for run in made]
        rows.append({
            **row, "left": sum(f.lambda_min > 0.2 * land.saddle_curvature for f in found),
            "lambda_min": statistics.median(f.lambda_min for f in found),
            "gradient_norm": statistics.median(f.gradient_norm for f in found),
            "risk_above_minimum": statistics.median(land.population_risk(r.params) - best for r in made),
            "tolerance": made[0].details.get("tolerance"), "claim": made[0].details.get("claim"),
            "stopped_by": {why: sum(r.stopped_by == why for r in made) for why in {r.stopped_by for r in made}},
            "records_used": statistics.median(r.samples_used / n if label != "dp-sgd" else 3.0 for r in made),
            "epsilon": made[0].privacy.epsilon,
        })  # fmt: skip
    return rows


def least_records(name: str) -> Row:
    """The least n (within 2 %) from which √(ρα) is below the saddle's curvature, by planning alone."""
    land: Any = landscape(name)
    rho, clip = land.constants().hessian_lipschitz, land.constants().lipschitz

    def tolerance(n: int) -> float:
        method = qg.PerturbedSGD()
        door = plan_preview(land, qg.plan(method, n=n, budget=BUDGET))
        oracle: Any = method.oracle
        return math.sqrt(rho * SmallGradient.of(oracle.error(door), land.dim, method.failure).alpha)

    low, high = 10**4, 10**16
    while high > 1.02 * low:
        middle = round(math.sqrt(low * high))
        low, high = (low, middle) if tolerance(middle) < abs(land.saddle_curvature) else (middle, high)
    return {
        "loss": name, "saddle": land.saddle_curvature, "lipschitz": clip,
        "smoothness": land.constants().smoothness, "hessian_lipschitz": rho, "least_n": high,
        "tolerance_at_a_million": tolerance(10**6),
    }  # fmt: skip


def relu_network(runs: int, n: int = 200_000) -> list[Row]:
    """A two-layer ReLU network started where all its weights are zero, on a teacher's labels."""
    import torch
    from torch import nn

    from quietgrad.torch.networks.module import ModuleObjective

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.second(torch.relu(self.first(x)))[:, 0]
            return output

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    x /= x.norm(dim=1, keepdim=True)
    teacher = torch.randn(3, 4, generator=generator)
    y = torch.relu(x @ teacher.T).sum(1) / 3 + 0.1 * torch.randn(n, generator=generator)
    rows = []
    for label, method in methods(0.5, 1.0, n).items():
        if label == "derived":
            continue  # a ReLU network has no smoothness constant
        losses, stops, proved = [], [], 0.0
        for seed in range(runs):
            student = Student()
            for p in student.parameters():
                nn.init.zeros_(p)
            objective = ModuleObjective(student, lambda out, target: 0.5 * (out - target) ** 2)
            run = qg.minimize(objective, (x, y), method, budget=BUDGET, seed=seed)
            losses.append(float(objective.risk(objective.prepare((x, y)), run.params)))
            stops.append(run.stopped_by)
            proved = run.privacy.epsilon or 0.0
        start = 0.5 * float((y**2).mean())
        rows.append({
            "loss": "two-layer ReLU", "n": n, "d": 30, "method": label, "runs": runs, "saddle": None,
            "left": sum(loss < 0.5 * start for loss in losses),
            "risk_above_minimum": statistics.median(losses) - 0.005,
            "risk_at_start": start, "claim": run.details.get("claim"), "tolerance": run.details.get("tolerance"),
            "stopped_by": {why: stops.count(why) for why in set(stops)}, "epsilon": proved,
        })  # fmt: skip
    return rows


def a9a(runs: int) -> list[Row]:
    """Nonconvex-penalised logistic regression: test loss after equal use of the data."""
    from quietgrad.data import load

    d: Any = load("a9a")
    n = len(d.y)
    held = np.random.default_rng(20).permutation(n)
    look, learn = held[: n // 5], np.sort(held[n // 5 :])
    loss, plain = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(1e-3)), qg.objectives.Logistic()
    budget = qg.Budget(0.5, 1e-5, qg.Relation.REPLACE_ONE)
    rates, steps = (0.25, 0.5, 1.0, 2.0), 400
    reuse = {"regime": "reuse", "full_queries": 60, "clip": 1.0}
    grids: dict[str, list[Any]] = {
        "practical, fresh": [qg.PerturbedSGD(qg.AdaptiveSpider(clip=1.0), learning_rate=e, mode="practical")
                             for e in rates],
        "practical, re-used": [qg.PerturbedSGD(qg.AdaptiveSpider(1000, 400, **reuse), steps=steps, learning_rate=e,
                                               mode="practical") for e in rates],
        "dp-sgd": [qg.DPSGD(steps=steps, batch_size=400, learning_rate=e) for e in rates],
    }  # fmt: skip
    rows = []
    for label, grid in grids.items():
        check = plain.prepare((d.X[look], d.y[look]))
        best = min(grid, key=lambda a: plain.risk(
            check, qg.minimize(loss, (d.X[learn], d.y[learn]), a, budget=budget).params))  # fmt: skip
        made = [qg.minimize(loss, (d.X, d.y), best, budget=budget) for _ in range(runs)]
        test = plain.prepare((d.X_test, d.y_test))
        losses = [float(plain.risk(test, run.params)) for run in made]
        rows.append({
            "loss": "a9a, nonconvex penalty", "n": n, "d": 123, "method": label, "runs": runs,
            "test_loss": statistics.fmean(losses), "test_loss_se": statistics.stdev(losses) / math.sqrt(runs),
            "learning_rate": best.learning_rate, "epsilon": made[0].privacy.epsilon,
            "stopped_by": {why: sum(r.stopped_by == why for r in made) for why in {r.stopped_by for r in made}},
        })  # fmt: skip
    return rows


def images(name: str, runs: int, steps: int = 280) -> list[Row]:
    """A small form of the later paper's experiments."""
    import torch
    from reproduce.cifar import cifar10
    from reproduce.mnist import LOSS, error, mnist
    from reproduce.models import CNN5, MnistCNN2

    import quietgrad.torch as qt

    torch.set_num_threads(1)
    train, test = mnist() if name == "mnist" else cifar10()
    make: Any = MnistCNN2 if name == "mnist" else CNN5
    cut = len(train[1]) * 5 // 6
    parts = ((train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:]))
    budget = qg.Budget(8.0, 1e-5)
    reuse: dict[str, Any] = {"regime": "reuse", "full_queries": 60, "clip": 0.1}

    def practical(eta: float) -> Any:
        # Differences are clipped to what a gradient is: ‖x − x′‖/η would let the noise follow the step.
        oracle = qg.AdaptiveSpider(1024, 512, **reuse, smoothness=0.1 / eta)
        return qg.PerturbedSGD(oracle, steps=steps, learning_rate=eta, mode="practical")

    grids = {
        "practical, re-used": [practical(e) for e in (2.5, 10.0, 40.0)],
        "dp-sgd": [qg.DPSGD(steps=steps, batch_size=512, learning_rate=e, clip=0.1) for e in (20.0, 40.0, 80.0)],
    }

    def fitted(method: Any, learn: Any, number: int) -> tuple[Any, Any]:
        torch.manual_seed(number)
        model = make().to(memory_format=torch.channels_last)
        return model, qt.fit(model, LOSS, learn, method, budget=budget, progress=False)

    rows = []
    for label, grid in grids.items():
        best = min(grid, key=lambda a: error(fitted(a, parts[0], 0)[0], parts[1]))
        made = [fitted(best, train, number) for number in range(runs)]
        errors = [error(model, test) for model, _ in made]
        result = made[0][1]
        rows.append({
            "loss": f"{name}, {make.__name__}", "n": len(train[1]), "method": label, "runs": runs,
            "test_error": errors,
            "mean_error": statistics.fmean(errors), "learning_rate": best.learning_rate,
            "epsilon": result.privacy.epsilon, "stopped_by": {result.stopped_by: runs},
            "escapes": result.details.get("escapes"),
        })  # fmt: skip
    return rows


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """What `quietgrad reproduce saddles` shows."""
    found = []
    if rows["saddles"]:
        keys = ("loss", "saddle", "method", "left", "runs", "lambda_min", "tolerance", "gradient_norm",
                "risk_above_minimum", "claim", "stopped_by")  # fmt: skip
        body = [[_said(row, key) for key in keys] for row in rows["saddles"]]
        columns = ["loss", "λ_min at the start", "method", "left", "of", "λ_min", "a stop rules out", "‖∇F‖",
                   "F − min F", "rests on", "ended by"]  # fmt: skip
        found.append({"title": "From a saddle, ε = 4, medians", "columns": columns, "rows": body})
    if rows["least_n"]:
        keys = (
            "loss",
            "saddle",
            "lipschitz",
            "smoothness",
            "hessian_lipschitz",
            "tolerance_at_a_million",
            "least_n",
        )
        columns = [
            "loss",
            "λ_min at the saddle",
            "G",
            "M",
            "ρ",
            "√(ρα) at n = 10⁶",
            "claims mean something from n =",
        ]
        body = [[row[key] for key in keys] for row in rows["least_n"]]
        found.append({"title": "From what n on the derived claim means anything", "columns": columns, "rows": body})
    if rows["data"]:
        body = [
            [row["loss"], row["method"], row.get("test_loss"), row.get("test_loss_se"), row.get("mean_error"),
             row["runs"], row["epsilon"], _said(row, "stopped_by")] for row in rows["data"]
        ]  # fmt: skip
        columns = ["data", "method", "test loss", "± se", "test error %", "runs", "proved ε", "ended by"]
        found.append({"title": "On data", "columns": columns, "rows": body})
    return found


def _said(row: Row, key: str) -> Any:
    value = row.get(key)
    if key == "left" and "refused" in row:
        return "refused"
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value


STORE = Store(
    Path(__file__).parent / "results" / "saddles.json",
    "python reproduce/saddles.py",
    {"relation": "replace-one"},
    kinds=("saddles", "least_n", "data"),
    tables=tables,
)


def show(saddles: list[Row], least: list[Row], data: list[Row]) -> None:
    """The same tables that the results have."""
    for table in tables({"saddles": saddles, "least_n": least, "data": data}):
        print_table(table["title"], table["columns"], table["rows"])


def main() -> None:
    """Run what is not in the results yet; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two landscapes, two runs; nothing is saved")
    parser.add_argument("--only", choices=("saddles", "data"))
    arguments = parser.parse_args()
    if arguments.quick:
        print("two runs each and 4·10⁵ records (the results have 12 and 10⁶)")
        names = ("strict-saddle", "two-layer")
        show([row for name in names for row in on_landscape(name, 400_000, 2)], [*map(least_records, names)], [])
        return
    if arguments.only != "data":
        for name in LANDSCAPES:
            if STORE.find("saddles", loss=name) is None:
                STORE.keep("saddles", *on_landscape(name, 1_000_000, 12))
            if STORE.find("least_n", loss=name) is None:
                STORE.keep("least_n", least_records(name))
        if STORE.find("saddles", loss="two-layer ReLU") is None:
            STORE.keep("saddles", *relu_network(12))
        show(STORE.rows("saddles"), STORE.rows("least_n"), [])
    if arguments.only != "saddles":
        for name, make in (("a9a", lambda: a9a(10)), ("mnist", lambda: images("mnist", 3)),
                           ("cifar10", lambda: images("cifar10", 2))):  # fmt: skip
            if not any(row["loss"].startswith(name) for row in STORE.rows("data")):
                STORE.keep("data", *make())
                show([], [], STORE.rows("data")[-3:])


if __name__ == "__main__":
    main()
