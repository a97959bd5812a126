"""Figures 3–5 of paper 000, panels (g) and (h): DDP-SRM with 1 to 16 parties; and the first batch b₀ = b, 2b, 4b.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_parties.py                # all, resumable
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/image_parties.py --only mnist   # one network
    OMP_NUM_THREADS=1 python reproduce/image_parties.py --quick                           # made-up images, seconds

Takes 45 CPU minutes. The settings of DP-SRM are those that `mnist.py` and `cifar.py` found; nothing is searched but
b₀. The training images are dealt by a public permutation to m = 1, 2, 4, 8 and 16 parties of equal size, and one
model is trained on them at two ε, one run each (the paper has 10). The noise is that of one trusted place, as
inside the paper's secure computation, whose cost its figures leave out too. A curve has the iterates as they are;
the error is that of the average which DP-SRM returns.

b₀ is tried at one ε (1.2, 8 and 4) on the held-out images of the search, up to three fits each; the fits with
b₀ = b are made here anew, so that all three have the same code and length. CNN6 learns on features of 10 000
public images.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from quietgrad import Budget
from quietgrad.federation import Party, simulate
from quietgrad.methods.callbacks import Progress
from quietgrad.torch.networks.module import ModuleObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce import cifar, mnist
from reproduce.allocator import keep_freed_memory
from reproduce.mnist import LOSS, Images, Settings, error, fit
from reproduce.models import CNN5
from reproduce.store import Row, Store, Table, print_table

PARTIES = (1, 2, 4, 8, 16)
EPSILONS = {"mnist": (1.2, 3.0), "cnn5": (8.0, 10.0), "cnn6": (4.0, 8.0)}
FIGURES = {"mnist": "Figure 3", "cnn5": "Figure 4", "cnn6": "Figure 5"}
FIRST = (1, 2, 4)  # b₀/b
POINTS = 8  # of a curve


@dataclass(frozen=True)
class Problem:
    """One network with its images and the settings that its own script found."""

    train: Images
    test: Images
    held_out: int  # the images from here on were held out in the search
    make: Callable[[str], nn.Module]
    settings: Callable[[float], Settings]


@cache
def problem(network: str) -> Problem:
    """The images of a figure, and what was searched for it."""
    if network == "mnist":
        train, test = mnist.mnist()
        return Problem(train, test, 50_000, mnist.Net, lambda epsilon: mnist.chosen("dp-srm", epsilon))
    train, test = cifar.cifar10()
    make: Callable[[str], nn.Module] = lambda _: CNN5()  # noqa: E731
    if network == "cnn6":
        model = cifar.public_features((train[0][: cifar.PUBLIC], train[1][: cifar.PUBLIC]))
        train = cifar.features(model, (train[0][cifar.PUBLIC :], train[1][cifar.PUBLIC :]))
        test = cifar.features(model, test)
        make = lambda _: cifar.Dense()  # noqa: E731
    found = cifar.best(network, "dp-srm")
    if found is None:
        raise SystemExit(f"{network} is not searched yet: run reproduce/cifar.py --only {network} first.")
    settings = found
    return Problem(train, test, len(train[1]) * 4 // 5, make, lambda epsilon: replace(settings, epsilon=epsilon))


def on_parties(at: Problem, settings: Settings, m: int, number: int) -> Row:
    """DDP-SRM on ``m`` equal parties, dealt by a public permutation."""
    torch.manual_seed(number)
    model = at.make(settings.activation).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    objective = ModuleObjective(model, LOSS)
    order = torch.randperm(len(at.train[1]), generator=torch.Generator().manual_seed(1))
    parties = [Party(at.train[0][part], at.train[1][part]) for part in order.chunk(m)]
    method, began = settings.algorithm(len(at.train[1])), time.process_time()
    every, curve = max(1, method.steps // POINTS), list[tuple[int, float, float]]()

    def look(progress: Progress) -> None:
        if progress.step and progress.step % every == 0:
            seconds = time.process_time() - began
            objective.write_back(progress.params)
            curve.append((progress.step, round(seconds, 2), error(objective.module, at.test)))

    result = simulate(method, objective, parties, budget=Budget(settings.epsilon, 1e-5), callback=look)
    seconds = time.process_time() - began
    objective.write_back(result.params)
    return {
        "parties": m, "run": number, "error": error(objective.module, at.test), "cpu_seconds": seconds,
        "epsilon_proved": result.privacy.epsilon, "variance_factor": result.details["variance_factor"],
        "curve": curve,
    }  # fmt: skip


def parties_at(network: str, epsilon: float) -> None:
    """Every number of parties at one ε; a row that is there is not made again."""
    for m in PARTIES:
        about: Row = {"network": network, "epsilon": epsilon, "parties": m, "run": 0}
        if STORE.find("parties", **about) is None:
            at = problem(network)
            row = on_parties(at, at.settings(epsilon), m, 0)
            STORE.keep("parties", {**about, **row})
            print(f"{network} ε = {epsilon:g}, {m} parties: {row['error']:.2f} % wrong", flush=True)


def first_batches(network: str, number: int) -> None:
    """One fit for every b₀ on held-out images; a row that is there is not made again."""
    for first in FIRST:
        about: Row = {"network": network, "first": first, "run": number}
        if STORE.find("first", **about) is None:
            at = problem(network)
            (x, y), cut = at.train, at.held_out
            settings = at.settings(1.2 if network == "mnist" else cifar.MIDDLE[network])
            row = fit(settings, (x[:cut], y[:cut]), (x[cut:], y[cut:]), number, at.make, first)
            STORE.keep("first", {**asdict(settings), **about, **row})
            print(f"{network} b₀ = {first}b: held-out error {row['error']:.2f} %", flush=True)


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Errors by parties, and by first batch."""
    parties = [
        [FIGURES[r["network"]], r["network"].upper(), r["epsilon"], r["parties"], r["error"], r["epsilon_proved"],
         r["cpu_seconds"]]
        for r in rows["parties"]
    ]  # fmt: skip
    columns = ["figure", "network", "ε", "parties", "test error %", "proved ε", "CPU s"]
    found: list[Table] = [{"title": "Panels (g), (h): DDP-SRM", "columns": columns, "rows": parties}]
    body = []
    for network in FIGURES:
        for first in FIRST:
            mine = [r["error"] for r in rows["first"] if (r["network"], r["first"]) == (network, first)]
            if mine:
                spread = statistics.stdev(mine) / len(mine) ** 0.5 if len(mine) > 1 else None
                body.append([network.upper(), first, statistics.fmean(mine), spread, len(mine)])
    columns = ["network", "b₀/b", "held-out error %", "standard error", "runs"]
    return [*found, {"title": "First batch of DP-SRM", "columns": columns, "rows": body}]


STORE = Store(
    Path(__file__).parent / "results" / "image_parties.json",
    "python reproduce/image_parties.py",
    {"delta": 1e-5, "relation": "add-remove", "trust": "curator"},
    kinds=("parties", "first"),
    tables=tables,
)


def quick() -> None:
    """Made-up images, CNN5, a few steps."""
    settings = Settings("dp-srm", 8.0, 100, 1, 2.0, activation="relu")
    at = Problem(cifar.made_up(400), cifar.made_up(100, seed=1), 300, lambda _: CNN5(), lambda _: settings)
    rows = [on_parties(at, settings, m, 0) for m in (1, 4)]
    body = [[row["parties"], row["error"], row["epsilon_proved"]] for row in rows]
    print_table("Made-up images, one short run each (not a result)", ["parties", "test error %", "proved ε"], body)


def main() -> None:
    """Run what is asked for; every finished fit is written at once, and found again by the next call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="made-up images; nothing is saved")
    parser.add_argument("--only", choices=list(FIGURES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.quick:
        quick()
        return
    networks = [network for network in FIGURES if arguments.only in (None, network)]
    for panel in range(2):
        for network in networks:
            parties_at(network, EPSILONS[network][panel])
        for network in networks:
            for number in range(1) if panel == 0 else range(1, 3):
                first_batches(network, number)


if __name__ == "__main__":
    main()
