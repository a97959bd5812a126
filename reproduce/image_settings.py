"""Figures 3, 4 and 5 of paper 000 at the paper's own settings: clips, batches, steps and epochs as printed.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_settings.py --only mnist --epsilon 1.2   # one cell
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_settings.py                              # all of it
    ... python reproduce/image_settings.py --only mnist --epsilon 3 --batch 1024 --step 0.5     # a part of a search
    OMP_NUM_THREADS=1 python reproduce/image_settings.py --quick                 # small digits, seconds

Takes 900 CPU hours in full and is resumable: 25 CPU minutes for one run of CNN5, 2.4 for one of DP-SGD on MNIST
and about twice that for DP-SRM, for each setting of the search. A part of a search is kept and continued; what it
chose is fitted when it is complete. Until then the page says what was tried, and no verdict.

The paper clips at C1 = 1.5 (MNIST) and 2 (CIFAR-10), searches C2 with γ = C2, b, the step and b₀ ∈ {b, 2b, 4b}, and
trains for 20 epochs (MNIST), 100 (CNN5) and 150 (CNN6). It counts iterations: its claim is that DP-SRM needs fewer
of them for an error, so ``iterations`` has for each run the first step at which its error is at most the paper's
final DP-SGD error. Every ε is searched on its own, on a sixth of the training images, by one fit each;
DP-SRM with two clips and with one joint clip, DP-SGD at C1 and at the effective clips of DP-SRM's winners
(``reproduce/comparisons.py``), so that a lead is none of the clip. Add-remove and Poisson samples with noise from
the accountant: the paper's own noise has no proof.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.allocator import keep_freed_memory
from reproduce.cifar import cifar10
from reproduce.mnist import LOSS, PAPER, Images, Net, error, mnist, small_digits
from reproduce.models import CNN5
from reproduce.store import Row, Store, Table, print_table

DELTA, RUNS = 1e-5, 10
Make = Callable[[], nn.Module]


@dataclass(frozen=True)
class Figure:
    """What the paper states of one figure."""

    epsilons: tuple[float, ...]
    clip: float
    batches: tuple[int, ...]
    steps: tuple[float, ...]
    second: tuple[float, ...]
    epochs: int
    target: dict[float, float]  # DP-SGD's final error in %, by ε

    def grid(self, method: str) -> Iterator[Row]:
        """Its search, and DP-SGD alike: as many clips as DP-SRM has (γ, C2) and kinds of clip."""
        for batch, step in itertools.product(self.batches, self.steps):
            if method == "dp-sgd":
                for clip, momentum in itertools.product(self.clips(), (0.0, 0.9)):
                    yield {"batch": batch, "step": step, "clip": clip, "momentum": momentum}
            else:
                for second, joint in itertools.product(self.second, (False, True)):
                    yield {"batch": batch, "step": step, "clip": self.clip, "second": second, "joint": joint}

    def clips(self) -> list[float]:
        """C1, and the effective clips C1 + (1−γ)C2/γ of the joint form, γ = C2: C1 + 1 − γ."""
        return sorted({self.clip, *(self.clip + 1.0 - gamma for gamma in self.second)})


_SECOND = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
FIGURES = {
    "mnist": Figure(
        (1.2, 3.0, 7.0), 1.5, (256, 512, 1024), (0.01, 0.05, 0.1, 0.25, 0.5), _SECOND, 20, PAPER["dp-sgd"]
    ),
    "cnn5": Figure(
        (6.0, 8.0, 10.0), 2.0, (32, 64, 128), (0.01, 0.02, 0.05, 0.1, 0.2), _SECOND, 100,
        {6.0: 51.0, 8.0: 50.2, 10.0: 49.3},
    ),
}  # fmt: skip
"""Figure 5 is not here: its public data, CIFAR-100, could not be had."""


def algorithm(method: str, given: Row, n: int, epochs: float, first: int = 1) -> Any:
    """The method at a setting of the grid; ``first`` is b₀/b."""
    batch = min(n, given["batch"])
    shared: dict[str, Any] = {
        "steps": max(1, math.ceil(epochs * n / batch)), "batch_size": batch, "clip": given["clip"],
        "learning_rate": given["step"],
    }  # fmt: skip
    if method == "dp-sgd":
        return qg.DPSGD(**shared, momentum=given["momentum"], momentum_kind="ema")
    clips = {"gamma": given["second"], "difference_clip": given["second"], "joint_clip": given["joint"]}
    return qg.DPSRM(**shared, **clips, first_batch_size=min(n, first * batch))


def fit(method: Any, epsilon: float, train: Images, test: Images, make: Make, run: int) -> Row:
    """One fit, its error and its curve over iterations."""
    torch.manual_seed(run)  # the starting point is public; noise and samples are secret whatever the seed
    model = make().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    curve: list[tuple[int, float]] = []
    began = time.process_time()
    qt.fit(
        model, LOSS, train, method, budget=qg.Budget(epsilon, DELTA), progress=False,
        evaluate=lambda model: {"error": error(model, test)}, every=max(1, method.steps // 50),
        callbacks=[lambda at: curve.append((at.step, at.metrics["error"]))],
    )  # fmt: skip
    return {"run": run, "error": error(model, test), "curve": curve, "cpu_seconds": time.process_time() - began}


def iterations(curve: list[tuple[int, float]], target: float) -> int | None:
    """The first step at which the error is at most ``target``; the paper's claim is about this number.

    >>> iterations([(10, 9.0), (20, 5.0), (30, 4.0)], 5.3)
    20
    """
    return next((step for step, seen in curve if seen <= target), None)


def cell(
    name: str, epsilon: float, method: str, data: tuple[Images, Images], make: Make, only: Row | None = None
) -> None:
    """Search one ε of one figure for one method, and run what won ten times; rows that are there are kept.

    ``only`` restricts the search to some values by setting; what won is run when no setting is left.
    """
    figure, (train, test) = FIGURES[name], data
    cut = 5 * len(train[1]) // 6
    learn, look = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
    key = {"figure": name, "epsilon": epsilon, "method": method}
    for given in figure.grid(method):
        asked = all(given.get(setting, value) == value for setting, value in (only or {}).items())
        if asked and STORE.find("search", **key, **given) is None:
            made = fit(algorithm(method, given, cut, figure.epochs), epsilon, learn, look, make, 0)
            count = iterations(made["curve"], figure.target[epsilon])
            STORE.keep("search", {**key, **given, **made, "iterations": count})
    tried = [row for row in STORE.rows("search") if all(row[k] == v for k, v in key.items())]
    if len(tried) < len(list(figure.grid(method))):
        return
    names = next(figure.grid(method)).keys()
    best = {k: min(tried, key=lambda row: float(row["error"]))[k] for k in names}
    for run in range(RUNS):
        if STORE.find("fits", **key, **best, run=run) is None:
            made = fit(algorithm(method, best, len(train[1]), figure.epochs), epsilon, train, test, make, run)
            STORE.keep(
                "fits", {**key, **best, **made, "iterations": iterations(made["curve"], figure.target[epsilon])}
            )


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Errors and iterations to the paper's DP-SGD error: of searches, however far they are, and of what won."""
    made = []
    for what, kind, where in (("The search", "search", "held-out"), ("What it chose", "fits", "test")):
        body = []
        for key in dict.fromkeys((r["figure"], r["epsilon"], r["method"]) for r in rows[kind]):
            mine = [r for r in rows[kind] if (r["figure"], r["epsilon"], r["method"]) == key]
            body.append([*key, *(_searched(mine) if kind == "search" else _fitted(mine))])
        least = ["settings tried", "of", "least error %"]
        columns = least if kind == "search" else ["runs", "test error %", "± se"]
        title = f"Figures 3 and 4 at the paper's settings. {what}, {where} images"
        last = "iterations to the paper's DP-SGD error"
        if body:
            made.append({"title": title, "columns": ["figure", "ε", "method", *columns, last], "rows": body})
    return made


def _searched(tried: list[Row]) -> list[Any]:
    grid = list(FIGURES[tried[0]["figure"]].grid(tried[0]["method"]))
    counts = [row["iterations"] for row in tried if row["iterations"] is not None]
    return [len(tried), len(grid), min(row["error"] for row in tried), min(counts, default=None)]


def _fitted(runs: list[Row]) -> list[Any]:
    errors, counts = [r["error"] for r in runs], [r["iterations"] for r in runs if r["iterations"] is not None]
    spread = statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else None
    return [len(runs), statistics.fmean(errors), spread, statistics.median(counts) if counts else None]


STORE = Store(
    Path(__file__).parent / "results" / "image_settings.json", "python reproduce/image_settings.py", tables=tables
)


def quick() -> None:
    """Both methods on small digits, two settings each."""
    train, test = small_digits()
    body = []
    for method in ("dp-sgd", "dp-srm"):
        given = {**next(FIGURES["mnist"].grid(method)), "step": 0.5, "batch": 150}
        made = fit(algorithm(method, given, len(train[1]), 1.0), 7.0, train, test, lambda: Net("relu"), 0)
        body.append([method, made["error"], iterations(made["curve"], 95.0)])
    columns = ["method", "test error %", "iterations to 95 %"]
    print_table("scikit-learn's small digits, one epoch, one run (not a result)", columns, body)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Figures 3 and 4 of paper 000 at its settings.")
    parser.add_argument("--quick", action="store_true", help="small digits; nothing is written")
    parser.add_argument("--only", choices=list(FIGURES))
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--method", choices=("dp-sgd", "dp-srm"))
    parser.add_argument("--batch", type=int, help="of the search, only this batch size")
    parser.add_argument("--step", type=float, help="of the search, only this step")
    parser.add_argument("--clip", type=float, help="of DP-SGD's search, only this clip")
    parser.add_argument("--momentum", type=float, help="of DP-SGD's search, only this momentum")
    parser.add_argument("--second", type=float, help="of DP-SRM's search, only this C2 = γ")
    parser.add_argument("--joint", action=argparse.BooleanOptionalAction, help="of DP-SRM's search, one joint clip")
    asked = parser.parse_args()
    settings = ("batch", "step", "clip", "momentum", "second", "joint")
    only = {name: getattr(asked, name) for name in settings if getattr(asked, name) is not None}
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.quick:
        quick()
        return
    for name, figure in FIGURES.items():
        if asked.only not in (None, name):
            continue
        data, make = (mnist(), lambda: Net("relu")) if name == "mnist" else (cifar10(), CNN5)
        for epsilon in figure.epsilons if asked.epsilon is None else (asked.epsilon,):
            for method in ("dp-sgd", "dp-srm") if asked.method is None else (asked.method,):
                cell(name, epsilon, method, data, make, only)


if __name__ == "__main__":
    main()
