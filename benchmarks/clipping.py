"""Automatic clipping against flat clipping with a searched C, at the same ε: logistic regression and a CNN.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/clipping.py [a9a|mnist]

Both rules try the same steps η·C; flat clipping also tries every C. A setting is chosen by its median on held-out
records and then scored on the test records by fresh fits. ε is that of one fit, so the search is not in it: flat
clipping is searched over as many settings as there are clips and steps, the automatic rule over steps alone.
a9a: 256 steps of 1000, ε = 1, test loss. mnist: a CNN, 100 steps of 256 images, ε = 3, test error in %.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.session.clipping import Automatic
from quietgrad.data import load
from quietgrad.objectives import Logistic

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

OUT = Path(__file__).parent / "results"
CLIPS = {"a9a": (0.1, 0.3, 1.0, 3.0), "mnist": (0.03, 0.3, 3.0)}
STEPS = {"a9a": (0.5, 1.0, 2.0, 4.0, 8.0), "mnist": (1.0, 3.0)}  # η·C
LOOKS, RUNS = {"a9a": 5, "mnist": 1}, {"a9a": 11, "mnist": 3}
Fit = Callable[[Any, int, bool], float]  # algorithm, number, whether test records score it


def network() -> nn.Module:
    """Two convolutions and two layers, d = 26 010 as in the field's usual MNIST model."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3), nn.ELU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ELU(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.ELU(), nn.Linear(32, 10),
    )  # fmt: skip


def tables() -> Fit:
    """Fits of logistic regression on a9a, by the mean loss."""
    data = load("a9a")
    X, y = data.X, data.y
    cut = int(0.8 * len(y))
    order = np.random.default_rng(0).permutation(len(y))
    loss = Logistic(intercept=True)

    def fit(algorithm: Any, number: int, final: bool) -> float:
        rows = order if final else order[:cut]
        budget = qg.Budget(1.0, 1e-5)
        result = qg.minimize(
            loss, (X[rows], y[rows]), algorithm, budget=budget, n_public=len(rows), seed=100 * final + number
        )
        held = (data.X_test, data.y_test) if final else (X[order[cut:]], y[order[cut:]])
        return float(loss.risk(loss.prepare(held), result.params))

    return fit


def pictures() -> Fit:
    """Fits of the CNN on MNIST, by the error in %."""
    data = load("mnist")
    assert data.X_test is not None
    parts = ((data.X, data.y), (data.X_test, data.y_test))
    train, test = (((torch.tensor(x).reshape(-1, 1, 28, 28) - 0.1307) / 0.3081, torch.tensor(y)) for x, y in parts)
    cut = 50_000

    def fit(algorithm: Any, number: int, final: bool) -> float:
        torch.manual_seed(number)
        model = network()
        x, y = train if final else (train[0][:cut], train[1][:cut])
        qt.fit(
            model, nn.CrossEntropyLoss(), (x, y), algorithm, budget=qg.Budget(3.0, 1e-5), n_public=len(x),
            seed=100 * final + number, progress=False,
        )  # fmt: skip
        x, y = test if final else (train[0][cut:], train[1][cut:])
        with torch.no_grad():
            answers = torch.cat([model(x[k : k + 2000]).argmax(1) for k in range(0, len(x), 2000)])
        return 100.0 * float((answers != y).double().mean())

    return fit


def compared(data: str, fit: Fit) -> dict[str, Any]:
    """The chosen setting of each rule, and its score on the test records."""
    steps, batch = (256, 1000) if data == "a9a" else (100, 256)
    found: dict[str, Any] = {}
    for rule, clips in (("flat", CLIPS[data]), ("automatic", (1.0,))):
        tried: list[dict[str, Any]] = []
        for clip in clips:
            for step in STEPS[data]:
                algorithm = qg.DPSGD(
                    steps=steps, batch_size=batch, clip=clip, learning_rate=f"linear:{step / clip:g}",
                    clipping=Automatic() if rule == "automatic" else "flat",
                )  # fmt: skip
                value = statistics.median(fit(algorithm, k, False) for k in range(LOOKS[data]))
                tried.append({"clip": clip, "step": step, "held_out": value, "algorithm": algorithm})
                print(data, rule, clip, step, round(value, 4), flush=True)
        best = min(tried, key=lambda row: row["held_out"])
        scores = sorted(fit(best["algorithm"], k, True) for k in range(RUNS[data]))
        each = [{name: value for name, value in row.items() if name != "algorithm"} for row in tried]
        found[rule] = {
            "settings_tried": len(tried), "clip": best["clip"], "step": best["step"], "search": each,
            "test": {"median": statistics.median(scores), "least": scores[0], "most": scores[-1]},
        }  # fmt: skip
    medians = [found[rule]["test"]["median"] for rule in ("automatic", "flat")]
    return {**found, "automatic_over_flat": medians[0] / medians[1]}


def main() -> None:
    """The data sets that are named, or both."""
    names = sys.argv[1:] or ["a9a", "mnist"]
    fits = {"a9a": tables, "mnist": pictures}
    for name in names:
        made = compared(name, fits[name]())
        print(name, made["automatic"]["test"], made["flat"]["test"])
        save(OUT / f"clipping-{name}.json", {"data": name, **made})


if __name__ == "__main__":
    main()
