"""What people with several records cost in modules: a release's clipped sum over people ÷ over the same records.

    OMP_NUM_THREADS=1 python benchmarks/people_torch.py

The same 500 records are summed record by record, as one person each, by 50 people with 10 each (side by side and
scattered), and by 50 people of uneven size. Reading and passes are part of it, as in a step of qt.fit; noise and
update, which do not depend on people, are not. CPU time of one thread, the ways taken in turn within each repeat,
medians of ratios within a repeat.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import RecordsWithIds, UserLevelObjective
from quietgrad.torch.networks.module import ModuleObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.models import MODELS

from benchmarks.record import save

RECORDS, PEOPLE, REPEATS = 500, 50, 15
KEY = bytes(range(32))
RULES = {"dp-sgd": ClippingRule.gradient(1.0), "dp-srm": ClippingRule.momentum(0.3, 1.0, 0.1)}


class Sentences(nn.Module):
    """Tokens, a transformer layer, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of ten classes."""
        scores: Tensor = self.out(self.layer(self.table(x)).mean(1))
        return scores


def perceptron() -> nn.Module:
    """Two hidden layers of 256."""
    return nn.Sequential(
        nn.Linear(100, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
    )  # fmt: skip


CASES: dict[str, tuple[Any, Any]] = {
    "perceptron": (perceptron, lambda n: torch.randn(n, 100)),
    "mnist-cnn4": (MODELS["mnist-cnn4"], lambda n: torch.randn(n, 1, 28, 28)),
    "transformer": (Sentences, lambda n: torch.randint(0, 1000, (n, 16))),
}


def groupings() -> dict[str, Any]:
    """Ids by name."""
    rng = np.random.default_rng(0)
    ten = np.arange(RECORDS) // (RECORDS // PEOPLE)
    weights = 1 / np.arange(1, PEOPLE + 1)
    uneven = rng.choice(PEOPLE, RECORDS, p=weights / weights.sum())
    return {
        "one each": np.arange(RECORDS),
        "ten each": ten,
        "ten, scattered": rng.permutation(ten),
        "uneven": uneven,
    }


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    for name, (make, inputs) in CASES.items():
        torch.manual_seed(0)
        x, y = inputs(RECORDS), torch.randint(0, 10, (RECORDS,))
        objective = ModuleObjective(make(), nn.CrossEntropyLoss(reduction="none"))
        rows = objective.prepare((x, y))
        asked: dict[str, tuple[Any, Any]] = {"records": (objective, rows)}
        for which, ids in groupings().items():
            people = UserLevelObjective(objective)
            asked[which] = people, people.prepare(RecordsWithIds((x, y), ids))
        theta = objective.initial(rows)
        for method, rule in RULES.items():
            times: dict[str, list[float]] = {which: [] for which in asked}
            for _ in range(REPEATS + 1):  # the first warms up
                for which, (whom, records) in asked.items():
                    out = torch.zeros_like(theta, dtype=torch.float64)
                    everyone = np.arange(len(records))
                    start = time.thread_time()
                    whom.add(Batch(records, everyone, KEY), (theta, theta - 0.01), rule, out)
                    times[which].append(time.thread_time() - start)
            base = times["records"][1:]
            ratios = {
                which: round(statistics.median(a / b for a, b in zip(taken[1:], base, strict=True)), 3)
                for which, taken in times.items()
            }
            table[f"{name}, {method}"] = {"milliseconds": round(1e3 * statistics.median(base), 2), "ratio": ratios}
            print(name, method, table[f"{name}, {method}"])
    save(
        Path(__file__).parent / "results" / "people_torch.json",
        {"records": RECORDS, "people": PEOPLE, "repeats": REPEATS, "clipped sums": table},
    )


if __name__ == "__main__":
    main()
