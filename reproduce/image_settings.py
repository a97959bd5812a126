"""Figures 3, 4 and 5 of paper 000 at the paper's own settings: clips, batches, steps and epochs as printed.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_settings.py --only mnist --epsilon 1.2   # one cell
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_settings.py                              # all of it
    ... python reproduce/image_settings.py --only mnist --epsilon 3 --batch 1024 --step 0.5     # a part of a search
    ... python reproduce/image_settings.py --only mnist --epsilon 3 --search coordinates --inherit  # ten fits each
    ... python reproduce/image_settings.py --only mnist --epsilon 7 --search coordinates --like 3 --fits 7
    OMP_NUM_THREADS=1 python reproduce/image_settings.py --quick                 # small digits, seconds

Takes 900 CPU hours in full and is resumable: 25 CPU minutes for one run of CNN5, 2.4 for one of DP-SGD on MNIST
and 4.1 of DP-SRM, for each setting of the search. A part of a search is kept and continued; what it chose is fitted
when it is complete. Until then the page says what was tried, and no verdict.

``--search coordinates`` walks along one list at a time from the middle of the paper's lists until no neighbour is
better (:mod:`reproduce.coordinates`), both methods from one effective clip and by as many fits at most. With
``--inherit`` DP-SRM starts from DP-SGD's best batch and step at γ = .99, where it nearly is DP-SGD.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.allocator import keep_freed_memory
from reproduce.cifar import cifar10
from reproduce.comparisons import Comparison, Contender, clip_of, looked_at, reached_by
from reproduce.coordinates import coordinate_search
from reproduce.mnist import LOSS, PAPER, Images, Net, error, mnist, small_digits
from reproduce.models import CNN5
from reproduce.store import Row, Store, Table, print_table

DELTA, RUNS = 1e-5, 10
COORDINATES = "coordinates"
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

    def axes(self, method: str) -> dict[str, tuple[Any, ...]]:
        """The lists of the coordinate search, each in the direction in which a run travels further.

        They go one place beyond the paper's, so that its largest step can be bracketed: a step twice as large, and
        γ = C2 = 1, where DP-SRM is DP-SGD.
        """
        steps = (*self.steps, 2.0 * self.steps[-1])
        shared: dict[str, tuple[Any, ...]] = {"step": steps, "batch": self.batches[::-1]}
        if method == "dp-sgd":
            return {**shared, "clip": tuple(self.clips()[1:]), "momentum": (0.0, 0.9, 0.99)}
        return {**shared, "second": (1.0, *self.second[::-1]), "joint": (True, False)}

    def centre(self, method: str) -> Row:
        """The middle of the paper's lists; both methods start with one effective clip, that of γ = C2 = 1/2."""
        printed = {"step": self.steps, "second": self.second}
        middle = {
            name: (middle := printed.get(name, values))[len(middle) // 2]
            for name, values in self.axes(method).items()
        }
        return {**middle, "clip": self.clip, "joint": True} if method == "dp-srm" else {**middle, "momentum": 0.0}

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


def algorithm(method: str, given: Mapping[str, Any], n: int, epochs: float, first: int = 1) -> Any:
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


def effective_clip(method: str, given: Mapping[str, Any]) -> float:
    """The length of the gradients that updates work with; γ = C2.

    >>> effective_clip("dp-srm", {"batch": 256, "step": 0.1, "clip": 1.5, "second": 0.3, "joint": True})
    2.2
    """
    return clip_of(algorithm(method, given, given["batch"], 1))


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


@dataclass(frozen=True)
class Cell:
    """One method at one ε of one figure: fits that are in the store are not made again."""

    name: str
    epsilon: float
    method: str
    data: tuple[Images, Images]
    make: Make

    @property
    def figure(self) -> Figure:
        return FIGURES[self.name]

    @property
    def key(self) -> Row:
        return {"figure": self.name, "epsilon": self.epsilon, "method": self.method}

    def look(self, given: Row, search: str) -> float:
        """The error at a setting on the sixth of the training images that is held out, by one fit."""
        row = STORE.find("search", **self.key, **given)
        if row is None:
            images, labels = self.data[0]
            cut = 5 * len(labels) // 6
            parts = (images[:cut], labels[:cut]), (images[cut:], labels[cut:])
            row = self._fit("search", given, parts, search, 0)
        return float(row["error"])

    def run(self, given: Row, search: str, run: int) -> None:
        """One fit on all training images, looked at on the test images."""
        if STORE.find("fits", **self.key, **given, run=run) is None:
            self._fit("fits", given, self.data, search, run)

    def _fit(self, kind: str, given: Row, parts: tuple[Images, Images], search: str, run: int) -> Row:
        learn, look = parts
        method = algorithm(self.method, given, len(learn[1]), self.figure.epochs)
        made = fit(method, self.epsilon, learn, look, self.make, run)
        count = iterations(made["curve"], self.figure.target[self.epsilon])
        row = {**self.key, **given, "search": search, **made, "iterations": count}
        STORE.keep(kind, row)
        return row


def grid_search(cell: Cell, only: Row) -> None:
    """Fit every setting of the paper's grid, or those with the values of ``only``; then what won, ten times."""
    grid = list(cell.figure.grid(cell.method))
    for given in grid:
        if all(given.get(setting, value) == value for setting, value in only.items()):
            cell.look(given, "grid")
    if any(STORE.find("search", **cell.key, **given) is None for given in grid):
        return
    best = min(grid, key=lambda given: cell.look(given, "grid"))
    for run in range(RUNS):
        cell.run(best, "grid", run)


def search_coordinates(cells: dict[str, Cell], inherit: bool, allowed: int, like: float | None) -> None:
    """Search both methods by ``allowed`` fits each.

    DP-SRM with γ → 1 is DP-SGD. To ``inherit``, it starts there: at DP-SGD's best batch and step and the largest γ.
    Both start from what each found best at the ε ``like``, if there is one.
    """
    shape: Row = {}
    for method, cell in cells.items():
        axes, start = cell.figure.axes(method), cell.figure.centre(method)
        if like is not None:
            start = best_found(replace(cell, epsilon=like))
            axes = {name: axes[name] for name in ("second", "step", "batch", "clip", "joint") if name in axes}
        elif inherit and shape:
            start = {**start, **shape, "second": max(cell.figure.second)}
            axes = {name: axes[name] for name in ("second", "step", "batch", "joint")}
        found = coordinate_search(axes, start, partial(cell.look, search=COORDINATES), allowed)
        print(f"{method}: {found}", flush=True)
        shape = {name: found.best[name] for name in ("batch", "step")}


def best_found(cell: Cell) -> Row:
    """The setting of the coordinate search with the least error so far."""
    row = min(STORE.having("search", **cell.key, search=COORDINATES), key=lambda row: float(row["error"]))
    return {name: row[name] for name in _SETTINGS if name in row}


def run_chosen(cells: dict[str, Cell], runs: int) -> None:
    """Run what the coordinate searches found best so far, and DP-SGD also at DP-SRM's effective clip."""
    best = {method: best_found(cell) for method, cell in cells.items()}
    # First the pair that can be judged, then DP-SGD at the clip that it likes best.
    level = {**best["dp-sgd"], "clip": effective_clip("dp-srm", best["dp-srm"])}
    for run in range(runs):
        cells["dp-srm"].run(best["dp-srm"], COORDINATES, run)
        cells["dp-sgd"].run(level, COORDINATES, run)
    for run in range(runs):
        cells["dp-sgd"].run(best["dp-sgd"], COORDINATES, run)


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Errors and iterations: of searches, however far they are, and of what they chose."""
    key = ["figure", "ε", "method", "search"]
    searched = [
        [*group, len(tried), len(list(FIGURES[group[0]].grid(group[2]))), *_least(tried)]
        for group, tried in _groups(rows["search"], "search")
    ]
    made = [{
        "title": "Figures 3 and 4 at the paper's settings. The search, one fit each, held-out images",
        "columns": [*key, "settings tried", "of the grid's", "best", "error %", "iterations to the printed error"],
        "rows": searched,
    }]  # fmt: skip
    chosen = []
    for group, runs in _groups(rows["fits"], "search", *_SETTINGS):
        printed = FIGURES[group[0]].target[group[1]]
        common = _common(rows["fits"], group[:2])
        chosen.append([
            *group[:4], _words(runs[0]), effective_clip(group[2], runs[0]), len(runs),
            *_spread([run["error"] for run in runs]), *_spread(_counts(runs, printed)),
            common, *_spread(_counts(runs, common)), statistics.fmean(run["cpu_seconds"] for run in runs),
        ])  # fmt: skip
    if chosen:
        spread = ["iterations to the printed error", "± se", "error all reach", "iterations to it", "± se"]
        columns = [*key, "settings", "effective clip", "runs", "test error %", "± se", *spread, "CPU s a run"]
        title = "Figures 3 and 4 at the paper's settings. What was chosen, all training images, test images"
        made.append({"title": title, "columns": columns, "rows": chosen})
    return made


_SETTINGS = ("batch", "step", "clip", "momentum", "second", "joint")


def _groups(rows: list[Row], *more: str) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Rows by figure, ε, method and more, in the order in which they come."""
    names = ("figure", "epsilon", "method", *more)
    for group in dict.fromkeys(tuple(row.get(name) for name in names) for row in rows):
        yield group, [row for row in rows if tuple(row.get(name) for name in names) == group]


def _words(given: Row) -> str:
    """A setting as it is read.

    >>> _words({"batch": 512, "step": 0.5, "clip": 1.5, "second": 0.9, "joint": True})
    'b = 512, step 0.5, C1 = 1.5, γ = C2 = 0.9, one joint clip'
    """
    shape = f"b = {given['batch']}, step {given['step']:g}, C1 = {given['clip']:g}"
    if "second" in given:
        return f"{shape}, γ = C2 = {given['second']:g}, {'one joint clip' if given['joint'] else 'two clips'}"
    return f"{shape}, momentum {given['momentum']:g}"


def _least(tried: list[Row]) -> list[Any]:
    best = min(tried, key=lambda row: float(row["error"]))
    return [_words(best), best["error"], best["iterations"]]


def _common(fits: list[Row], place: tuple[Any, ...]) -> float:
    """The least error that every run of one figure and ε reaches."""
    mine = [row for row in fits if (row["figure"], row["epsilon"]) == place]
    return max(min(float(error) for _, error in row["curve"]) for row in mine)


def _counts(runs: list[Row], target: float) -> list[float]:
    """Iterations of each run to an error; none at all unless every run reaches it."""
    counts = [iterations(run["curve"], target) for run in runs]
    reached = [float(count) for count in counts if count is not None]
    return reached if len(reached) == len(runs) else []


def _spread(values: list[float]) -> list[float | None]:
    """The mean and its standard error."""
    if not values:
        return [None, None]
    return [statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None]


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """DP-SGD at the effective clip of DP-SRM's choice beside DP-SRM, for each figure and ε that was searched."""
    found = []
    for figure, epsilon in dict.fromkeys((row["figure"], row["epsilon"]) for row in record["search"]):
        reduced = contender(record, figure, epsilon, "dp-srm", {})
        plain = contender(record, figure, epsilon, "dp-sgd", {"clip": reduced.effective_clip})
        what = f"{figure}, ε = {epsilon:g}, the paper's settings: test error in %"
        found.append(Comparison(what, [plain, reduced]))
    return found


def contender(record: Mapping[str, Any], figure: str, epsilon: float, method: str, imposed: Row) -> Contender:
    """A method at one ε of one figure; γ = C2 = 1 is DP-SGD, and ends the list of γ."""
    key = (figure, epsilon, method)
    search, fits = (
        [row for row in record[kind] if (row["figure"], row["epsilon"], row["method"]) == key]
        for kind in ("search", "fits")
    )
    return Contender(
        method, looked_at(search, _SETTINGS, _error), reached_by(fits, _SETTINGS, _error),
        partial(effective_clip, method), lambda name, _: {"momentum": 0.0, "second": 1.0}.get(name), imposed,
    )  # fmt: skip


def _error(row: Mapping[str, Any]) -> float:
    return float(row["error"])


STORE = Store(
    Path(__file__).parent / "results" / "image_settings.json",
    "python reproduce/image_settings.py --only mnist --epsilon 3 --search coordinates; the same with --inherit; "
    "the same with --search none --runs 3; ... --method dp-srm --batch 512 --step 0.5 --second 0.5 --no-joint; "
    "... --epsilon 7 --search coordinates --like 3 --fits 5",
    {"stopped": "ε = 3: DP-SGD's search after twelve fits. DP-SRM's after two from the middle; it was then begun "
     "anew from DP-SGD's best and stopped after eight more. ε = 7: DP-SGD's search is complete, DP-SRM's was "
     "stopped for want of time, and nothing was run in the end."},
    tables=tables,
)  # fmt: skip


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
    parser.add_argument("--search", choices=("grid", COORDINATES, "none"), default="grid")
    parser.add_argument("--fits", type=int, default=10, help="of the coordinate search, the fits of each method")
    parser.add_argument("--inherit", action="store_true", help="DP-SRM's search starts from DP-SGD's best")
    parser.add_argument("--like", type=float, help="both searches start from what was best at this ε")
    parser.add_argument("--runs", type=int, default=RUNS, help="of what the coordinate search chose")
    asked = parser.parse_args()
    if asked.search != "grid" and asked.method is not None:
        parser.error(f"--search {asked.search} compares both methods: leave out --method")
    settings = ("batch", "step", "clip", "momentum", "second", "joint")
    only = {name: getattr(asked, name) for name in settings if getattr(asked, name) is not None}
    torch.set_num_threads(1)
    keep_freed_memory()
    if asked.quick:
        quick()
        return
    methods = ("dp-sgd", "dp-srm") if asked.method is None else (asked.method,)
    for name, figure in FIGURES.items():
        if asked.only not in (None, name):
            continue
        data, make = (mnist(), lambda: Net("relu")) if name == "mnist" else (cifar10(), CNN5)
        for epsilon in figure.epsilons if asked.epsilon is None else (asked.epsilon,):
            cells = {method: Cell(name, epsilon, method, data, make) for method in methods}
            if asked.search == "grid":
                for cell in cells.values():
                    grid_search(cell, only)
                continue
            if asked.search == COORDINATES:
                search_coordinates(cells, asked.inherit, asked.fits, asked.like)
            run_chosen(cells, asked.runs)


if __name__ == "__main__":
    main()
