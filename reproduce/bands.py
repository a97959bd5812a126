"""Where could DP-SRM win? DP-SRM with one joint clip against DP-SGD, both with noise in bands (paper 000's method).

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/bands.py              # resumable
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/bands.py --only a9a   # one of the two data sets
    OMP_NUM_THREADS=1 python reproduce/bands.py --quick                         # breast cancer, seconds

Takes 6 CPU minutes. No table of the paper: a study of its method with the two changes that help it most, the joint
clip and noise that cancels over 16 releases (``sampling="poisson-turns"``); on a9a also plain Poisson samples. Both
methods have the same steps, batches, samples, ε and number of settings to choose from; DP-SRM differentiates every
example at two points, so it has twice the gradients. DP-SGD may average its gradients (momentum β), which is what
DP-SRM is with C2 → 0 and γ = 1 − β. If a winner has the smallest or largest step of the grid, all settings of the
next step are tried too, for either method.

mnist: the 2-layer CNN with ELU (d = 8266), 100 steps of 256 images, C1 = 0.1, step η·C1 with linear decay; one fit
for each of six settings on 50 000 training images, looking at the other 10 000; then three runs on all 60 000, each
of which looks at the test images once; error in %. a9a: logistic regression (d = 123), 256 steps; one run for each
of 75 settings on seven eighths of the training rows, looking at the others, and five more of the best eight; then
sixteen on all rows; test loss. δ = 1e-5, add-remove. β = 0.95 and γ = 0.2 were added, one for each method, after
β = 0.9 had won at the edge of its list at ε = 0.2 and test losses there had been seen.

``noise_to_sampling`` is d·z²/b for DP-SGD on plain Poisson samples: the variance of a step's noise over that of its
sample, if every gradient has length C and their mean is small. Above 1 noise dominates, below 1 sampling does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.data import load
from quietgrad.objectives import Logistic

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.allocator import keep_freed_memory
from reproduce.comparisons import Comparison, Contender, clip_of, looked_at, reached_by
from reproduce.mnist import LOSS, error, mnist
from reproduce.models import MnistCNN2
from reproduce.store import Row, Store, Table, print_table

DELTA = 1e-5
METHODS = ("dp-sgd", "dp-srm")
BANDS = {"a9a": (1, 16), "mnist": (16,)}  # one band: plain Poisson samples and independent noise
CELLS: dict[str, tuple[tuple[float, int], ...]] = {  # ε and batch
    "a9a": ((0.2, 1000), (1.0, 1000)),
    "mnist": ((2.0, 256), (8.0, 256)),
}
STEPS = {"a9a": 256, "mnist": 100}
DIMENSION = {"a9a": 123, "mnist": 8266}
RECORDS = {"a9a": 32_561, "mnist": 60_000}
REACHES = {"a9a": (0.5, 1.0, 2.0, 4.0, 8.0), "mnist": (4.0, 8.0, 16.0)}  # η·C1
CLIPS = {"a9a": (1.0, 2.0, 4.0), "mnist": (0.1,)}
OWN: dict[tuple[str, str], tuple[Row, ...]] = {  # as many for either method; ratio: C2/(γC1)
    ("a9a", "dp-sgd"): tuple({"momentum": beta} for beta in (0.0, 0.3, 0.6, 0.9, 0.95)),
    ("a9a", "dp-srm"): (
        {"gamma": 0.7, "ratio": 0.25}, {"gamma": 0.4, "ratio": 0.25}, {"gamma": 0.4, "ratio": 0.05},
        {"gamma": 0.2, "ratio": 0.25}, {"gamma": 0.1, "ratio": 0.25},
    ),
    ("mnist", "dp-sgd"): ({"momentum": 0.0}, {"momentum": 0.6}),
    ("mnist", "dp-srm"): ({"gamma": 0.7, "ratio": 0.25}, {"gamma": 0.4, "ratio": 0.25}),
}  # fmt: skip
FINALISTS, LOOKS = 8, {"a9a": 6, "mnist": 1}  # the best so many are looked at so often
RUNS = {"a9a": 16, "mnist": 3}
Fit = Callable[[Any, float, int], float]


def algorithm(method: str, given: Mapping[str, Any], bands: int, steps: int, batch: int) -> Any:
    """The method at these settings."""
    shared: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch,
        "clip": given["clip"],
        "learning_rate": f"linear:{given['reach'] / given['clip']:g}",
    }
    if bands > 1:
        shared |= {"sampling": "poisson-turns", "cohorts": bands, "noise": "correlated"}
    if method == "dp-sgd":
        return qg.DPSGD(**shared, momentum=given["momentum"], momentum_kind="ema")
    gamma = given["gamma"]
    second = given["ratio"] * gamma * given["clip"]
    return qg.DPSRM(**shared, gamma=gamma, difference_clip=second, joint_clip=True)


def grid(data: str, method: str, reaches: tuple[float, ...]) -> list[Row]:
    """All settings with these steps; as many for either method."""
    return [
        {"reach": reach, "clip": clip, **own}
        for reach in reaches
        for clip in CLIPS[data]
        for own in OWN[data, method]
    ]


def chosen(method: str, rows: list[Row]) -> Row:
    """The setting of the least held-out mean, of those of one cell that were looked at most often."""
    best = Contender(method, looked_at(rows, _SETTINGS, _value), [], lambda given: 0.0).chosen
    return dict(best or {})


def search(data: str, method: str, tried: Callable[[Row, int], Row]) -> Row:
    """The best setting on held-out rows: the grid, and the next step while the winner's is the last one tried."""
    reaches = REACHES[data]
    while True:
        rows = sorted(
            (tried(given, 0) for given in grid(data, method, reaches)), key=lambda row: float(row["value"])
        )
        looked = [tried(row, k) for row in rows[:FINALISTS] for k in range(LOOKS[data])]
        best = chosen(method, looked)
        if best["reach"] not in (min(reaches), max(reaches)):
            return best
        low = best["reach"] == min(reaches)
        reaches = (min(reaches) / 2, *reaches) if low else (*reaches, max(reaches) * 2)


def cell(data: str, key: Row, look: Fit, final: Fit) -> None:
    """Search one cell and run what it chose; rows that are there are kept."""
    known = _of(STORE.rows("search"), **key)
    made: list[Row] = []

    def measured(kind: Fit, given: Row, run: int) -> Row:
        began = time.process_time()
        method = algorithm(key["method"], given, key["bands"], STEPS[data], key["batch_size"])
        row = {**key, **given, "run": run, "value": kind(method, key["epsilon"], run)}
        return {**row, "cpu_seconds": round(time.process_time() - began, 3)}

    def tried(given: Row, run: int) -> Row:
        wanted: Row = {
            name: given[name] for name in ("reach", "clip", "momentum", "gamma", "ratio") if name in given
        }
        found = next(iter(_of([*known, *made], **wanted, run=run)), None)
        if found is None:
            found = measured(look, wanted, run)
            made.append(found)
        return found

    search(data, key["method"], tried)
    best = chosen(key["method"], [*known, *made])
    STORE.keep("search", *made)
    runs = [k for k in range(RUNS[data]) if STORE.find("fits", **key, **best, run=k) is None]
    STORE.keep("fits", *(measured(final, best, k) for k in runs))
    print(key, best, [row["value"] for row in _of(STORE.rows("fits"), **key, **best)], flush=True)


def on_a_table(train: tuple[Any, Any], test: tuple[Any, Any]) -> Fit:
    """Logistic loss on ``test`` of one private run on ``train``."""
    sign = np.where(np.asarray(test[1]) > 0, 1.0, -1.0)

    def fit(method: Any, epsilon: float, run: int) -> float:
        result = qg.minimize(Logistic(), train, method, budget=qg.Budget(epsilon, DELTA))
        return float(np.logaddexp(0.0, -np.asarray(test[0] @ result.params).ravel() * sign).mean())

    return fit


def on_images(train: Any, test: Any) -> Fit:
    """Error in % on ``test`` of one private fit on ``train``."""

    def fit(method: Any, epsilon: float, run: int) -> float:
        torch.manual_seed(run)  # the starting point is public; noise and samples are secret whatever the seed
        model = MnistCNN2().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        qt.fit(model, LOSS, train, method, budget=qg.Budget(epsilon, DELTA), progress=False)
        return error(model, test)

    return fit


def fits_of(data: str) -> tuple[Fit, Fit]:
    """The fit that a search looks at, and the one of the table."""
    if data == "mnist":
        train, test = mnist()
        look, learn = ([part[rows] for part in train] for rows in (slice(50_000, None), slice(50_000)))
        return on_images(tuple(learn), tuple(look)), on_images(train, test)
    table = load("a9a")
    order = np.random.default_rng(0).permutation(table.n)
    held, kept = order[: table.n // 8], order[table.n // 8 :]
    X, y = table.X, np.asarray(table.y)
    searched = on_a_table((X[kept], y[kept]), (X[held], y[held]))
    return searched, on_a_table((X, y), (table.X_test, table.y_test))


@lru_cache
def noise_to_sampling(data: str, epsilon: float, batch: int) -> float:
    """d·z²/b of DP-SGD on Poisson samples."""
    method = qg.DPSGD(steps=STEPS[data], batch_size=batch)
    z = qg.plan(method, n=RECORDS[data], budget=qg.Budget(epsilon, DELTA)).noise_multiplier
    assert z is not None
    return DIMENSION[data] * z * z / batch


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Both methods in every cell that has final runs."""
    found = []
    for data, epsilon, batch, bands in cells():
        key = {"data": data, "epsilon": epsilon, "batch_size": batch, "bands": bands}
        pair = [contender(record, key, method) for method in METHODS]
        if all(each.reached for each in pair):
            what = "test loss" if data == "a9a" else "test error in %"
            found.append(Comparison(f"{data}, ε = {epsilon:g}, noise in {bands} bands: {what}", pair))
    return found


def contender(record: Mapping[str, Any], key: Row, method: str) -> Contender:
    """A method in one cell; γ = 1 is DP-SGD, and C2 = 0 the end of its list."""
    data = key["data"]
    search, fits = (_of(record[kind], method=method, **key) for kind in ("search", "fits"))
    ends = {"momentum": 0.0, "gamma": 1.0, "ratio": 0.0}
    return Contender(
        method, looked_at(search, _SETTINGS, _value), reached_by(fits, _SETTINGS, _value),
        lambda given: clip_of(algorithm(method, given, 1, STEPS[data], key["batch_size"])),
        lambda name, _: ends.get(name),
    )  # fmt: skip


def cells() -> Iterator[tuple[str, float, int, int]]:
    """Data, ε, batch and bands."""
    for data, places in CELLS.items():
        for epsilon, batch in places:
            yield from ((data, epsilon, batch, bands) for bands in BANDS[data])


_SETTINGS = ("reach", "clip", "momentum", "gamma", "ratio")


def _value(row: Mapping[str, Any]) -> float:
    return float(row["value"])


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Means and standard errors of both methods, cell by cell, with the clips that their updates work with.

    No lead is stated: effective clips differ (``reproduce/comparisons.py``), so part of a difference is the clip's.
    """
    columns = ["data", "ε", "batch", "noise ÷ sampling", "bands", "DP-SGD", "± se", "DP-SRM", "± se",
               "effective clips", "runs", "settings tried", "CPU s, DP-SGD", "DP-SRM"]  # fmt: skip
    body: list[list[Any]] = []
    for data, epsilon, batch, bands in cells():
        key = {"data": data, "epsilon": epsilon, "batch_size": batch, "bands": bands}
        pair = [contender(rows, key, method) for method in METHODS]
        outcomes = [each.outcome for each in pair]
        if any(each is None or each.error is None for each in outcomes):
            continue
        runs = [_of(rows["fits"], method=each.method, **key, **(each.chosen or {})) for each in pair]
        body.append([
            data, epsilon, batch, noise_to_sampling(data, epsilon, batch), bands,
            *(number for each in outcomes if each is not None for number in (each.mean, each.error)),
            " / ".join(f"{each.effective_clip:.3g}" for each in pair), len(runs[0]),
            " / ".join(str(each.count) for each in pair),
            *(statistics.fmean(row["cpu_seconds"] for row in mine) for mine in runs),
        ])  # fmt: skip
    return [{"title": "Test loss (a9a) and test error in % (mnist)", "columns": columns, "rows": body}]


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


STORE = Store(
    Path(__file__).parent / "results" / "bands.json",
    "python reproduce/bands.py",
    {"delta": DELTA, "relation": "add-remove", "steps": STEPS},
    tables=tables,
)


def quick() -> None:
    """Both methods and both noises on a small table."""
    data = load("breast-cancer")
    fit = on_a_table((data.X, data.y), (data.X_test, data.y_test))
    body = []
    for method in METHODS:
        for bands in (1, 4):
            given = {"reach": 1.0, "clip": 1.0, **OWN["a9a", method][1]}
            body.append([method, bands, fit(algorithm(method, given, bands, 32, 40), 4.0, 0)])
    print_table("Breast cancer, 32 steps, one run (not a result)", ["method", "bands", "test loss"], body)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small table; nothing is saved")
    parser.add_argument("--only", choices=list(CELLS))
    parser.add_argument("--epsilon", type=float, help="the cells of one ε")
    parser.add_argument("--bands", type=int, help="the cells of one number of bands")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.quick:
        quick()
        return
    for data in CELLS:
        if arguments.only in (None, data):
            look, final = fits_of(data)
            for epsilon, batch in CELLS[data]:
                if arguments.epsilon not in (None, epsilon):
                    continue
                for bands in BANDS[data]:
                    if arguments.bands not in (None, bands):
                        continue
                    for method in METHODS:
                        key = {"data": data, "epsilon": epsilon, "batch_size": batch, "bands": bands}
                        cell(data, {**key, "method": method}, look, final)
    for table in tables({kind: STORE.rows(kind) for kind in STORE.kinds}):
        print_table(table["title"], table["columns"], table["rows"])


if __name__ == "__main__":
    main()
