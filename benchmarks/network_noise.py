"""Two ways to less noise, tried on networks: DiSK's filtered gradients, and Poisson samples of cyclic bands.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/network_noise.py disk mnist      # also: disk cifar10
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/network_noise.py bands
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/network_noise.py table

One convolution of 16 filters and one dense layer with ELU; batches of 512, C = 0.1 so that only η·C matters,
δ = 1e-5, add-remove. Both sides search as many settings: one fit each on all training pictures but the last 10 000,
looking at those; then five runs on all of them, and every model sees the test pictures once. Fits that the result
file holds are kept. Takes 12, 20 and 20 CPU minutes.

disk: 280 steps at ε = 3; η·C, its decay and, for DP-SGD, momentum (0, 0.9), for DiSK κ (0.3, 0.7) with the full
lookahead, where one gradient a step is enough.

bands: 560 steps at ε = 2 and 8, η·C with linear decay. ``sampling="poisson-turns"`` with b cohorts and correlated
noise; b = 1 is DP-SGD. A prototype with numpy's normals had shown, with η·C up to 8 only, 3.35, 3.01 and 2.87 % at
ε = 2 and 2.90, 2.68 and 2.63 % at ε = 8 for b = 1, 4, 16 on the same test pictures.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quietgrad as qg
import quietgrad.torch as qt

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.cifar import cifar10
from reproduce.mnist import Images, error, mnist
from reproduce.store import Row, Store, Table, print_table

CLIP, BATCH, HELD_OUT, RUNS, DELTA = 0.1, 512, 10_000, 5, 1e-5
STEPS = {"disk": 280, "bands": 560}
REACHES = {"mnist": (2.0, 4.0, 8.0), "cifar10": (1.0, 2.0, 4.0)}  # η·C
BAND_REACHES = (2.0, 4.0, 8.0, 16.0)
BANDS, BAND_EPSILONS, DISK_EPSILON = (1, 4, 16), (2.0, 8.0), 3.0
LOSS = nn.CrossEntropyLoss(reduction="none")


class Net(nn.Module):
    """One convolution and one dense layer with ELU."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 5, stride=2, padding=2)
        self.fc = nn.Linear(16 * (side // 4) ** 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc(F.max_pool2d(F.elu(self.conv(x)), 2).flatten(1))
        return output


def network(images: Images, number: int) -> Net:
    """A network for such pictures; run ``number`` starts where ``number`` says, which is public."""
    torch.manual_seed(number)
    return Net(*images[0].shape[1:3])


def settings(data: str, method: str) -> list[Row]:
    """What a method may choose from: twelve of DP-SGD, twelve of DiSK."""
    own = {"momentum": (0.0, 0.9)} if method == "dp-sgd" else {"kappa": (0.3, 0.7)}
    (name, values), decays = next(iter(own.items())), ("constant", "linear")
    return [
        {"reach": reach * (0.1 if value == 0.9 else 1.0), "decay": decay, name: value}
        for reach, decay, value in itertools.product(REACHES[data], decays, values)
    ]


def disk_fit(method: str, given: Row, train: Images, test: Images, number: int) -> float:
    """Test error in % of one private fit."""
    shared: dict[str, Any] = {
        "steps": STEPS["disk"],
        "batch_size": BATCH,
        "clip": CLIP,
        "learning_rate": f"{given['decay']}:{given['reach'] / CLIP:g}",
    }
    algorithm: Any
    if method == "dp-sgd":
        algorithm = qg.DPSGD(**shared, momentum=given["momentum"])
    else:
        kappa = given["kappa"]
        algorithm = qg.DPDiSK(**shared, kappa=kappa, lookahead=(1.0 - kappa) / kappa)
    model = network(train, number)
    qt.fit(model, LOSS, train, algorithm, budget=qg.Budget(DISK_EPSILON, DELTA), progress=False)
    return error(model, test)


def band_fit(bands: int, epsilon: float, reach: float, train: Images, test: Images, number: int) -> float:
    """Test error in % of one private fit with noise that cancels over ``bands`` steps."""
    turns: dict[str, Any] = {"sampling": "poisson-turns", "cohorts": bands, "noise": "correlated"}
    algorithm = qg.DPSGD(
        steps=STEPS["bands"], batch_size=BATCH, clip=CLIP, learning_rate=f"linear:{reach / CLIP:g}",
        **(turns if bands > 1 else {}),
    )  # fmt: skip
    model = network(train, number)
    qt.fit(model, LOSS, train, algorithm, budget=qg.Budget(epsilon, DELTA), progress=False)
    return error(model, test)


def parts(data: str) -> tuple[Images, Images, Images, Images]:
    """To learn from and to look at in the search; all training pictures and the test pictures."""
    train, test = mnist() if data == "mnist" else cifar10()
    cut = len(train[1]) - HELD_OUT
    return (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:]), train, test


def fit(key: Row, given: Row, train: Images, test: Images, number: int) -> float:
    """One fit of a cell of the table."""
    if key["part"] == "disk":
        return disk_fit(key["method"], given, train, test, number)
    return band_fit(given["bands"], key["epsilon"], given["reach"], train, test, number)


def cells(part: str, data: str) -> list[tuple[Row, list[Row]]]:
    """What is compared, and the settings each may choose from."""
    if part == "disk":
        key = {"part": part, "data": data, "epsilon": DISK_EPSILON}
        return [({**key, "method": method}, settings(data, method)) for method in ("dp-sgd", "dp-disk")]
    out: list[tuple[Row, list[Row]]] = []
    for epsilon, bands in itertools.product(BAND_EPSILONS, BANDS):
        key = {"part": part, "data": data, "epsilon": epsilon, "method": f"{bands} bands"}
        out.append((key, [{"bands": bands, "reach": reach} for reach in BAND_REACHES]))
    return out


def run(part: str, data: str) -> None:
    """The search of every cell, then the runs of what it chose."""
    learn, look, train, test = parts(data)
    for key, tried in cells(part, data):
        for given in tried:
            if STORE.find("search", **key, **given) is None:
                began = time.process_time()
                row = {**key, **given, "error": fit(key, given, learn, look, 0)}
                STORE.keep("search", {**row, "cpu_seconds": time.process_time() - began})
                print(row, flush=True)
        best = min((STORE.find("search", **key, **given) for given in tried), key=lambda row: row["error"])  # type: ignore[index]
        given = {name: best[name] for name in tried[0]}  # type: ignore[index]
        for number in range(RUNS):
            if STORE.find("fits", **key, **given, run=number) is None:
                row = {**key, **given, "run": number, "error": fit(key, given, train, test, number)}
                STORE.keep("fits", row)
                print(row, flush=True)


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Mean error and standard error of every cell."""
    body: list[list[Any]] = []
    names = ("part", "data", "epsilon", "method")
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows["fits"]):
        found = [row["error"] for row in rows["fits"] if tuple(row[name] for name in names) == key]
        spread = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
        body.append([*key, statistics.fmean(found), spread, len(found)])
    columns = [*names, "test error %", "standard error", "runs"]
    return [{"title": "Networks: DiSK and bands against DP-SGD", "columns": columns, "rows": body}]


STORE = Store(
    Path(__file__).parent / "results" / "network_noise.json",
    "python benchmarks/network_noise.py disk mnist; … disk cifar10; … bands",
    {"what": __doc__},
    tables=tables,
)


def main() -> None:
    """One part, by name."""
    torch.set_num_threads(1)
    part, *more = sys.argv[1:]
    if part in STEPS:
        run(part, more[0] if more else "mnist")
    for table in tables({kind: STORE.rows(kind) for kind in STORE.kinds}):
        print_table(table["title"], table["columns"], table["rows"])


if __name__ == "__main__":
    main()
