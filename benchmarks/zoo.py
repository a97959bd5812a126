"""What a private step costs on the models people train: DP-SGD and DP-SRM ÷ plain SGD, whole steps.

    OMP_NUM_THREADS=1 python benchmarks/zoo.py [PART OF A NAME ...] [--repeats N] [--batch 64] [--without-lora]

    python benchmarks/zoo.py --table    # what was measured, as docs/benchmarks.md shows it

Randomly initialised small configurations (tests/torch/zoo.py, four times as wide as in the tests, with four times
as many tokens or pixels: 48 tokens, 64 × 64 images, 65 patches), attention with masks, CPU time, one thread, the
kinds of step taken in turn within each repeat, ratios of medians. A private step is sampling, clipping, secure
noise, accounting and update; plain SGD takes random batches of the same size. Before that, 24 private steps are
made, in which the sizes of passes that come are tried (networks/pass_sizes.py). `opacus` is the same ratio of its
step, where it is installed (`PYTHONPATH=DIR`, see torch_steps.py) and one of its settings runs the model: hooks,
functorch, or hooks without its checks (`strict=False`). Other batches than 32 have a file of their own.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import quietgrad as qg
from quietgrad.core.session.curator import CentralCurator
from quietgrad.methods import plan
from quietgrad.torch.networks.module import ModuleObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.torch.zoo import CASES, Case

from benchmarks.record import save

BATCH, RECORDS, SCALE, STEPS, WARM = 32, 256, 4, 2, 24
RESULTS = Path(__file__).parent / "results"
SETTINGS: dict[str, dict[str, bool]] = {
    "hooks": {}, "functorch": {"force_functorch": True}, "without checks": {"strict": False},
}  # fmt: skip


def plain(case: Case, batch: int = BATCH) -> Callable[[], None]:
    """Ordinary SGD, one step per call."""
    optimizer = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        where = torch.randint(0, RECORDS, (batch,))
        optimizer.zero_grad()
        case.loss(case.model(*(part[where] for part in case.x)), case.y[where]).mean().backward()
        optimizer.step()

    return step


def private(case: Case, method: Any, batch: int = BATCH) -> tuple[Callable[[], None], str]:
    """One step of a run as qt.fit makes it, and how the model is differentiated."""
    objective: Any = ModuleObjective(case.model, case.loss)
    curator = CentralCurator(objective, (case.x, case.y))
    chosen = method(steps=10000, batch_size=batch, learning_rate=0.01)
    session = curator.open(plan(chosen, n=RECORDS, budget=qg.Budget(8.0, 1e-5)))
    state = chosen.init(curator.initial())
    for _ in range(WARM):  # the first step of DP-SRM has no difference, and sizes of passes are tried once
        chosen.step(state, session)
    (known,) = objective.engine.programs.values()
    how = "one at a time" if known.program.alone else "copies" if known.copied else "kernels"

    def step() -> None:
        chosen.step(state, session)

    return step, how


def opacus(make: Callable[[], Case], batch: int) -> tuple[Callable[[], None], str] | None:
    """One step by Opacus and the setting it takes, or None where it is not installed or refuses the model."""
    if not importlib.util.find_spec("opacus"):
        return None
    for setting, options in SETTINGS.items():
        try:
            step = opacus_step(make(), batch, options)
            step()
        except Exception as refused:  # a peer that cannot run a model has no number for it
            print("opacus,", setting, type(refused).__name__, str(refused)[:100], flush=True)
        else:
            return step, setting
    return None


def opacus_step(case: Case, batch: int, options: dict[str, bool]) -> Callable[[], None]:
    """One step by Opacus' per-sample gradients."""
    peer, optimizers = importlib.import_module("opacus.grad_sample"), importlib.import_module("opacus.optimizers")
    module = peer.GradSampleModule(case.model, **options)
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01), noise_multiplier=1.0,
        max_grad_norm=1.0, expected_batch_size=batch,
    )  # fmt: skip

    def step() -> None:
        where = (torch.rand(RECORDS) < batch / RECORDS).nonzero().flatten()
        optimizer.zero_grad()
        case.loss(module(*(part[where] for part in case.x)), case.y[where]).mean().backward()
        optimizer.step()

    return step


def measured(name: str, repeats: int, batch: int = BATCH) -> dict[str, Any]:
    """Ratios of one model."""
    torch.manual_seed(0)
    case = CASES[name](RECORDS, SCALE)
    sgd = plain(case._replace(model=copy.deepcopy(case.model)), batch)
    dp_sgd, how = private(case._replace(model=copy.deepcopy(case.model)), qg.DPSGD, batch)
    dp_srm, _ = private(case, qg.DPSRM, batch)
    steps = {"sgd": sgd, "dp-sgd": dp_sgd, "dp-srm": dp_srm}
    peer = opacus(lambda: CASES[name](RECORDS, SCALE), batch)
    if peer is not None:
        steps["opacus"] = peer[0]
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for repeat in range(repeats + 1):
        for kind, step in steps.items():
            began = time.process_time()
            for _ in range(STEPS):
                step()
            if repeat:  # the first one warms up
                times[kind].append((time.process_time() - began) / STEPS)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    return {
        "parameters": sum(p.numel() for p in case.model.parameters() if p.requires_grad),
        "by": how,
        "sgd_cpu_ms": round(1000 * medians["sgd"], 1),
        "dp-sgd": round(medians["dp-sgd"] / medians["sgd"], 2),
        "dp-srm": round(medians["dp-srm"] / medians["sgd"], 2),
        "opacus": round(medians["opacus"] / medians["sgd"], 2) if "opacus" in medians else None,
        "opacus_by": None if peer is None else peer[1],
    }


def rows(models: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    lines = ["| model | DP-SGD | DP-SRM | with LoRA |", "|---|---|---|---|"]
    for name, found in models.items():
        if not name.endswith(", LoRA"):
            lora = models.get(f"{name}, LoRA")
            beside = f"{lora['dp-sgd']:.2f} / {lora['dp-srm']:.2f}" if lora else ""
            lines.append(f"| {name} | {found['dp-sgd']:.2f} | {found['dp-srm']:.2f} | {beside} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write; models that are not asked for keep their numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--without-lora", action="store_true")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    result = RESULTS / ("zoo.json" if options.batch == BATCH else f"zoo_{options.batch}.json")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus warns about hooks on inputs without gradients
    table = json.loads(result.read_text())["models"] if result.exists() else {}
    table = {name: table[name] for name in CASES if name in table}
    if options.table:
        print(rows(table))
        return
    for name in CASES:
        if options.names and not any(part in name for part in options.names):
            continue
        if options.without_lora and name.endswith(", LoRA"):
            continue
        table[name] = measured(name, options.repeats, options.batch)
        print(name, table[name], flush=True)
        save(result, {"batch": options.batch, "repeats": options.repeats, "models": table}, "opacus")


if __name__ == "__main__":
    main()
