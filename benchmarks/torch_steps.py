"""What a whole private step costs: sampling, reading, clipping, secure noise, accounting and update, ÷ plain SGD.

    pip install --no-deps --target DIR opacus==1.6.0 opt_einsum
    OMP_NUM_THREADS=1 PYTHONPATH=DIR python benchmarks/torch_steps.py

Plain SGD is the loop every torch user writes on random batches of the same size. CPU time, one thread, the kinds of
step taken in turn within each repeat, ratios of medians. `loop` is PrivateLoop with torch.optim.SGD, `verbs` is
make_private with a criterion, `own-loop` make_private with a loss that the loop makes itself; `opacus` and
`opacus-ghost` are Opacus' make_private, measured where it is installed. `first` is the first
step of DP-SGD, planning and all, ÷ a later one; `sum` the second call of clipped_gradient_sum ÷ a backward pass.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.session.curator import CentralCurator
from quietgrad.methods import plan
from quietgrad.torch.networks.module import ModuleObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.models import MODELS

from benchmarks.record import save

CASES = {"mnist-cnn4": ((1, 28, 28), 256, 8), "cnn5": ((3, 32, 32), 256, 8), "resnet20": ((3, 32, 32), 64, 3)}
REPEATS = int(os.environ.get("REPEATS", "5"))
N = 4096


def plain(model: nn.Module, x: Tensor, y: Tensor, size: int) -> Callable[[], None]:
    """Ordinary SGD, one step per call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()

    def step() -> None:
        where = torch.randint(0, len(y), (size,))
        optimizer.zero_grad()
        loss(model(x[where]), y[where]).backward()
        optimizer.step()

    return step


def algorithm(method: Any, model: nn.Module, x: Tensor, y: Tensor, size: int) -> Callable[[], None]:
    """One step of a run as qt.fit makes it."""
    objective: Any = ModuleObjective(model, nn.CrossEntropyLoss(reduction="none"))
    curator = CentralCurator(objective, (x, y))
    chosen = method(steps=10000, batch_size=size, learning_rate=0.01)
    session = curator.open(plan(chosen, n=len(y), budget=qg.Budget(3.0, 1e-5)))
    state = chosen.init(curator.initial())
    chosen.step(state, session)  # the first step of DP-SRM has no difference

    def step() -> None:
        chosen.step(state, session)

    return step


def private_loop(model: nn.Module, x: Tensor, y: Tensor, size: int) -> Callable[[], None]:
    """One step of a PrivateLoop."""
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), (x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        noise_multiplier=1.0, batch_size=size, max_grad_norm=1.0, steps=10000,
    )  # fmt: skip
    samples = iter(loop)

    def step() -> None:
        loop.step(next(samples))

    return step


def users_step(private: Any, optimizer: Any, of: Any, loader: Any) -> Callable[[], None]:
    """One step of the loop that a user writes around what make_private returned."""
    samples = (batch for _ in range(10**6) for batch in loader)

    def step() -> None:
        inputs, labels = next(samples)
        optimizer.zero_grad()
        of(private(inputs), labels).backward()
        optimizer.step()

    return step


def own_loop(model: nn.Module, x: Tensor, y: Tensor, size: int, *, given: bool) -> Callable[[], None]:
    """One step of a user's loop made private; ``given``: with a criterion of ours."""
    loss: Any = nn.CrossEntropyLoss()
    private, optimizer, loader, *criterion = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=size),
        criterion=loss if given else None,
    )  # fmt: skip
    of = criterion[0] if given else loss
    return users_step(private, optimizer, of, loader)


def opacus(model: nn.Module, x: Tensor, y: Tensor, size: int, *, mode: str) -> Callable[[], None]:
    """One step of the same loop made private by Opacus; ``mode`` is its "hooks" or "ghost"."""
    engine = importlib.import_module("opacus").PrivacyEngine()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=size),
        grad_sample_mode=mode, criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    private, optimizer, of, loader = made if mode == "ghost" else (*made[:2], nn.CrossEntropyLoss(), made[2])
    return users_step(private, optimizer, of, loader)


def took(step: Callable[[], object], count: int = 1) -> float:
    """CPU seconds of a step."""
    began = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - began) / count


def first_step(make: Callable[[], nn.Module], x: Tensor, y: Tensor, size: int) -> float:
    """The first step of DP-SGD, with all that is found out about the model, ÷ a later one."""
    method = qg.DPSGD(steps=10000, batch_size=size, learning_rate=0.01)
    priced = plan(method, n=len(y), budget=qg.Budget(3.0, 1e-5))
    objective: Any = ModuleObjective(make(), nn.CrossEntropyLoss())

    def first() -> None:
        curator = CentralCurator(objective, (x, y))
        kept[:] = [curator.open(priced), method.init(curator.initial())]
        method.step(kept[1], kept[0])

    kept: list[Any] = []
    begun = took(first)
    return begun / took(lambda: method.step(kept[1], kept[0]), 5)


def second_sum(make: Callable[[], nn.Module], x: Tensor, y: Tensor, size: int) -> float:
    """The second call of clipped_gradient_sum ÷ a forward and backward pass of the same batch."""
    model, batch = make(), (x[:size], y[:size])
    loss: Any = nn.CrossEntropyLoss()
    qt.clipped_gradient_sum(model, loss, batch, 1.0)
    ours = took(lambda: qt.clipped_gradient_sum(model, loss, batch, 1.0), 5)
    loss(model(batch[0]), batch[1]).backward()
    return ours / took(lambda: loss(model(batch[0]), batch[1]).backward(), 5)


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus warns about hooks on inputs without gradients
    table: dict[str, Any] = {}
    for name, (shape, size, count) in CASES.items():
        torch.manual_seed(0)
        x, y = torch.randn(N, *shape), torch.randint(0, 10, (N,))
        steps = {
            "sgd": plain(MODELS[name](), x, y, size),
            "dp-sgd": algorithm(qg.DPSGD, MODELS[name](), x, y, size),
            "dp-srm": algorithm(qg.DPSRM, MODELS[name](), x, y, size),
            "loop": private_loop(MODELS[name](), x, y, size),
            "verbs": own_loop(MODELS[name](), x, y, size, given=True),
            "own-loop": own_loop(MODELS[name](), x, y, size, given=False),
        }
        if importlib.util.find_spec("opacus"):
            steps["opacus"] = opacus(MODELS[name](), x, y, size, mode="hooks")
            steps["opacus-ghost"] = opacus(MODELS[name](), x, y, size, mode="ghost")
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for repeat in range(REPEATS + 1):
            for kind, step in steps.items():
                spent = took(step, count)
                if repeat:  # the first one warms up
                    times[kind].append(spent)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        table[name] = {
            "batch": size,
            "cpu_ms": {kind: 1000 * value for kind, value in medians.items()},
            "ratio_to_sgd": {kind: value / medians["sgd"] for kind, value in medians.items()},
            "first": first_step(MODELS[name], x, y, size),
            "sum": second_sum(MODELS[name], x, y, size),
        }
        ratios = {kind: round(value / medians["sgd"], 2) for kind, value in medians.items()}
        print(name, ratios, {kind: round(table[name][kind], 2) for kind in ("first", "sum")}, flush=True)
        save(
            Path(__file__).parent / "results" / "torch_steps.json", {"repeats": REPEATS, "models": table}, "opacus"
        )


if __name__ == "__main__":
    main()
