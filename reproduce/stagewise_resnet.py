"""Figure 2 of paper 001: CIFAR-10, ResNet-20 with ELU, the seven schedules of figure 1 at ε = 10.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/stagewise_resnet.py     # resumable
    OMP_NUM_THREADS=1 python reproduce/stagewise_resnet.py --quick                # made-up images, seconds

Takes 50 CPU minutes. Reduced, and how: a private epoch of ResNet-20 takes 270 CPU seconds, so every schedule has
56 steps of 256 images (0.29 epochs; 3 stages of 8, 16 and 32 steps), and GroupNorm stands for batch normalisation,
which mixes records. All else is as in `stagewise.py`: C = 0.1, δ = 1e-5, momentum 0.9, Poisson samples under
add-remove. A schedule's rate is searched by one fit each on four fifths of the training images, looking at 5000 of
the others: first the rate of `stagewise.py` that won there and half of it, then half of the smallest for as long
as the smallest is the best, so that the chosen rate has tried ones on both sides. Then two runs on all images. What
such a length can show is the order of the first quarter of an epoch, not the paper's curves.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.allocator import keep_freed_memory
from reproduce.cifar import cifar10, made_up
from reproduce.comparisons import Comparison
from reproduce.mnist import Images
from reproduce.models import ResNet20
from reproduce.stagewise import RATES, best_step, contender, epsilon_as_printed, fit
from reproduce.store import Row, Store, Table, print_table

EPSILON, BATCH, FIRST, RUNS = 10.0, 256, 4, 2


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """One table, best schedule first."""
    body: list[list[Any]] = []
    for schedule in RATES:
        fits = [row for row in rows["fits"] if row["schedule"] == schedule]
        if fits:
            # Of the rates that have runs, the one that did best on held-out images.
            looked = {row["step"]: row["error"] for row in rows["search"] if row["schedule"] == schedule}
            step = min({row["step"] for row in fits}, key=lambda each: looked[each])
            row, *others = [row for row in fits if row["step"] == step]
            mine = [row["error"], *(other["error"] for other in others)]
            spread = statistics.stdev(mine) / len(mine) ** 0.5 if len(mine) > 1 else None
            printed = epsilon_as_printed(row["noise_multiplier"], 50_000, BATCH, 14 * FIRST)
            body.append([schedule, statistics.fmean(mine), spread, len(mine), row["epsilon_proved"], printed])
    columns = ["schedule", "test error %", "± se", "runs", "proved ε", "as the paper runs it: proved ε"]
    title = f"Figure 2: ResNet-20, ε = {EPSILON:g}, {14 * FIRST} steps of {BATCH}"
    return [{"title": title, "columns": columns, "rows": sorted(body, key=lambda row: float(row[1]))}]


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Every schedule beside a constant rate."""
    where = (record["epsilon"], "poisson", "add-remove")
    pairs = (
        [contender(record, where, name) for name in (schedule, "DP-SGD-const")]
        for schedule in RATES
        if schedule != "DP-SGD-const"
    )
    what = f"CIFAR-10, ResNet-20, ε = {record['epsilon']:g}, {record['steps']} steps: test error in %"
    return [Comparison(what, pair) for pair in pairs]


STORE = Store(
    Path(__file__).parent / "results" / "stagewise_resnet.json",
    "python reproduce/stagewise_resnet.py",
    {"epsilon": EPSILON, "delta": 1e-5, "batch_size": BATCH, "steps": 14 * FIRST, "clip": 0.1},
    tables=tables,
)


def searched(schedule: str, learn: Images, look: Images) -> float:
    """The best rate: from the one that won on MNIST down by halves, until the smallest is no longer the best."""
    step = best_step(schedule)
    tried: dict[float, float] = {}
    while not tried or min(tried, key=lambda each: tried[each]) == min(tried):
        tried[step] = float(kept("search", schedule, step, learn, look, 0)["error"])
        step /= 2.0
    return min(tried, key=lambda each: tried[each])


def kept(kind: str, schedule: str, step: float, train: Images, test: Images, number: int) -> Row:
    """The row, made now if it is not there yet."""
    row = STORE.find(kind, schedule=schedule, step=step, run=number)
    if row is None:
        how: dict[str, Any] = {"epsilon": EPSILON, "batch": BATCH, "first": FIRST, "make": ResNet20}
        how["looks"] = 1 if kind == "search" else 4  # a look takes as long as nine steps
        row = fit(schedule, step, train, test, number, **how)
        STORE.keep(kind, row)
        print(f"{kind}: {schedule} step {step:g} run {number}: {row['error']:.2f} % wrong", flush=True)
    return row


def quick() -> None:
    """Made-up images, two schedules, a small network of the same kind."""
    train, test = made_up(300), made_up(100, seed=1)
    body = []
    for schedule in ("DPageS", "DP-SGD-const"):
        small = lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ELU(), nn.Flatten(), nn.Linear(8 * 64, 10))  # noqa: E731
        row = fit(schedule, RATES[schedule][0], train, test, epsilon=EPSILON, batch=60, first=1, make=small)
        body.append([schedule, row["error"], row["epsilon_proved"]])
    print_table("Made-up images, 14 steps (not a result)", ["schedule", "test error %", "proved ε"], body)


def main() -> None:
    """Search and fit; every finished fit is written at once and not made again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="made-up images; nothing is saved")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.quick:
        quick()
        return
    (x, y), test = cifar10()
    learn, look = (x[:40_000], y[:40_000]), (x[40_000:45_000], y[40_000:45_000])
    chosen = {schedule: searched(schedule, learn, look) for schedule in RATES}
    for number in range(RUNS):
        for schedule, step in chosen.items():
            kept("fits", schedule, step, (x, y), test, number)


if __name__ == "__main__":
    main()
