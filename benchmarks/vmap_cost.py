"""What vmap costs: passes of the engine beside plain forward and backward passes, both without weight gradients.

    OMP_NUM_THREADS=1 python benchmarks/vmap_cost.py [PART OF A NAME ...]

A program that is recorded once and replayed by plain autograd could save what stands between the two, and no more:
kernels, norms, sums and noise are the same. Models and sizes as in zoo.py, 64 records, CPU time in parts of a plain
SGD step, taken in turn, medians. `plain` has frozen parameters, and gradients begin at the first layers' outputs.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.torch.zoo import CASES, Case

from benchmarks.record import save
from benchmarks.zoo import RECORDS, SCALE, plain
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.one_record import Pass, go_back
from quietgrad.torch.networks.randomness import RecordSeeds

BATCH, REPEATS = 64, 7
Times = tuple[float, float]


@contextmanager
def gradients_begin_at_outputs(module: nn.Module) -> Iterator[None]:
    """Frozen parameters; outputs of layers with parameters that no gradient reaches yet ask for one."""

    def begin(layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not output.requires_grad:
            output.requires_grad_()

    own = [layer for layer in module.modules() if any(True for _ in layer.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(begin) for layer in own if not list(layer.children())]
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
        for hook in hooks:
            hook.remove()


def plain_pass(case: Case) -> Times:
    """CPU seconds of a plain forward and backward pass of the first records."""
    x, y = [part[:BATCH] for part in case.x], case.y[:BATCH]
    with gradients_begin_at_outputs(case.model):
        began = time.process_time()
        loss = case.loss(case.model(*x), y).mean()
        middle = time.process_time()
        loss.backward()
        return middle - began, time.process_time() - middle


def vmapped_pass(case: Case, engine: PerExampleEngine) -> Times:
    """The same of the engine's passes; what arrives at taps is let go of at once."""
    record = (*(part[:BATCH, None] for part in case.x), case.y[:BATCH, None])
    record = ((record[0] if len(record) == 2 else record[:-1]), record[-1])
    engine.try_out(record)
    (known,) = engine.programs.values()
    theta = engine.flatten(dict(engine.module.named_parameters()))
    forward = backward = 0.0
    left = np.arange(BATCH)

    def arrived(site: Any) -> None:
        site.grad = None

    keys = RecordSeeds(bytes(32), left)
    with known.program.release(keys):
        while len(left):
            rows, made = left, None
            while not isinstance(made, Pass):
                began = time.process_time()
                made = known.program.together(engine.loss_of, engine._leaves(theta), record, keys, rows, arrived)
                forward += time.process_time() - began
                if made is None:
                    raise RuntimeError("its records are run one at a time")
                rows = rows[made] if isinstance(made, np.ndarray) else rows
            began = time.process_time()
            go_back(made.outputs)
            backward += time.process_time() - began
            left = np.setdiff1d(left, rows)
    return forward, backward


def measured(name: str) -> dict[str, float]:
    """Parts of an SGD step."""
    torch.manual_seed(0)
    case = CASES[name](RECORDS, SCALE)
    step = plain(case._replace(model=copy.deepcopy(case.model)), BATCH)
    engine = PerExampleEngine(copy.deepcopy(case.model), case.loss)
    kinds: dict[str, Callable[[], Times]] = {
        "plain": lambda: plain_pass(case), "vmapped": lambda: vmapped_pass(case, engine),
    }  # fmt: skip
    times: dict[str, list[Times]] = {kind: [] for kind in kinds}
    steps = []
    for repeat in range(REPEATS + 2):
        began = time.process_time()
        step()
        taken = time.process_time() - began
        for kind, run in kinds.items():
            seconds = run()
            if repeat > 1:  # the first ones warm up: sizes of passes are tried
                times[kind].append(seconds)
        if repeat > 1:
            steps.append(taken)
    whole = statistics.median(steps)
    return {
        f"{kind} {part}": round(statistics.median(each[k] for each in times[kind]) / whole, 3)
        for kind in kinds
        for k, part in enumerate(("forward", "backward"))
    } | {"sgd_cpu_ms": round(1000 * whole, 1)}


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    table: dict[str, Any] = {}
    for name in CASES:
        if name.endswith(", LoRA") or (sys.argv[1:] and not any(part in name for part in sys.argv[1:])):
            continue
        try:
            table[name] = measured(name)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:100], flush=True)
            continue
        print(name, table[name], flush=True)
    if not sys.argv[1:]:
        save(Path(__file__).parent / "results" / "vmap_cost.json", {"batch": BATCH, "models": table})


if __name__ == "__main__":
    main()
