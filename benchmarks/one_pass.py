"""MNIST once: every picture in one batch of a single pass, nobody samples in secret; noise of both kinds.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/one_pass.py search     # 12 fits on held-out pictures
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/one_pass.py final      # five runs of what it chose

The 4-layer CNN of ``reproduce/mnist.py`` (26 010 parameters, tanh, pixels shifted and scaled by public constants),
100 steps, rate falling linearly, C = 0.1 so that only η·C matters; δ = 1e-5, add-remove. search: one fit of each
η·C on 50 000 training pictures, scored on the other 10 000, one grid for both kinds of noise. final: all 60 000,
test pictures are seen once each. Fits that the result file holds are kept. Takes 6 and 10 CPU minutes. A first
form, with ReLU and pixels in [0, 1], stands in the results as ``first_form``: its test errors had been seen when
the form was changed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.mnist import Net, mnist

from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "one_pass.json"
EPSILONS, NOISES, REACHES = (1.2, 3.0), ("correlated", "independent"), (2.0, 4.0, 8.0)
STEPS, CLIP, HELD_OUT, RUNS = 100, 0.1, 10_000, 5
Part = tuple[torch.Tensor, torch.Tensor]


def error(train: Part, other: Part, epsilon: float, noise: str, reach: float) -> float:
    """Percent of ``other`` that a model of one private pass over ``train`` gets wrong."""
    model = Net()
    method = qg.DPSGD(
        steps=STEPS, batch_size=len(train[1]) // STEPS, sampling="single-pass", noise=noise, clip=CLIP,
        learning_rate=f"linear:{reach / CLIP:g}",
    )  # fmt: skip
    loss = nn.CrossEntropyLoss(reduction="none")
    qt.fit(model, loss, train, method, budget=qg.Budget(epsilon, 1e-5))
    model.eval()
    with torch.no_grad():
        return 100.0 * float((model(other[0]).argmax(1) != other[1]).double().mean())


def main() -> None:
    """One part, by name."""
    torch.set_num_threads(1)
    part = sys.argv[1] if len(sys.argv) > 1 else "final"
    kept: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    rows = {name: kept.get(name, []) for name in ("search", "fits")}
    (x, y), test = mnist()

    def keep(name: str, row: dict[str, Any]) -> None:
        rows[name].append(row)
        print(name, row, flush=True)
        first = kept.get("first_form", {})
        save(RESULT, {"what": __doc__, **rows, "table": summary(rows["fits"]), "first_form": first})

    for epsilon in EPSILONS:
        for noise in NOISES:
            key = {"epsilon": epsilon, "noise": noise}
            tried = [row for row in rows["search"] if {k: row[k] for k in key} == key]
            if part == "search":
                for reach in (r for r in REACHES if r not in [row["reach"] for row in tried]):
                    train, held = (x[:-HELD_OUT], y[:-HELD_OUT]), (x[-HELD_OUT:], y[-HELD_OUT:])
                    found = error(train, held, epsilon, noise, reach)
                    keep("search", {**key, "reach": reach, "held_out_error": found})
                continue
            reach = min(tried, key=lambda row: row["held_out_error"])["reach"]
            done = sum({k: row[k] for k in key} == key for row in rows["fits"])
            for _ in range(RUNS - done):
                keep("fits", {**key, "reach": reach, "test_error": error((x, y), test, epsilon, noise, reach)})


def summary(fits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard errors."""
    out = []
    for epsilon, noise in dict.fromkeys((row["epsilon"], row["noise"]) for row in fits):
        found = [row["test_error"] for row in fits if (row["epsilon"], row["noise"]) == (epsilon, noise)]
        spread = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
        mean = statistics.mean(found)
        out.append(
            {"epsilon": epsilon, "noise": noise, "test_error": mean, "standard_error": spread, "runs": len(found)}
        )
    return out


if __name__ == "__main__":
    main()
