"""One private step of a network against its peers, in one process and one thread.

    OMP_NUM_THREADS=1 python benchmarks/torch_engine.py [MODEL ...] [--peers DIR] [--repeats N] [--keep-memory]
        [--no-peers]

For each model the steps take turns, and a step's CPU time (the machine is shared, so not wall time) is divided by
that of plain SGD in the same round; the result is the median of these ratios. Peers: Opacus 1.6.0 with hooks and
with ghost clipping (`pip install --no-deps --target DIR opacus==1.6.0`), torch.func's vmap(grad), and for DP-SRM
two Opacus passes and vmap. "two passes" is the floor of every method that needs gradients at two points. Our DP-SRM
step includes cryptographic noise; the others draw torch's, our DP-SGD both ways. Peak memory is the growth of the
process over two steps, each method in a process of its own; a batch of 1024 in passes of 32 is held against plain
SGD with a batch of 64.
--keep-memory: with `reproduce.allocator.keep_freed_memory` on, for every contender alike.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from quietgrad.core.noise.grid import NoiseStream
from quietgrad.core.noise.rng import fresh_key
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.records import RecordGroup

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.allocator import keep_freed_memory
from reproduce.models import MODELS

from benchmarks.record import save

ROOT = Path(__file__).parents[1]

BATCHES = {"mnist-cnn4": 256, "cnn5": 256, "resnet20": 64, "transformer": 16}
LARGE = ("mnist-cnn4", "cnn5", "resnet20")  # where a batch of 1024 is measured too
RATE, CLIP, DIFFERENCE_CLIP, GAMMA, NOISE = 1e-3, 1.0, 0.1, 0.1, 1.0
Step = Callable[[], object]


class Problem:
    """A model, a batch, and the ways to take a step on it."""

    def __init__(self, name: str, batch: int | None = None) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = MODELS[name]()
        self.batch = batch or BATCHES[name]
        shape = (1, 28, 28) if name.startswith("mnist") else (3, 32, 32)
        tokens = name == "transformer"
        self.x = torch.randint(8000, (self.batch, 128)) if tokens else torch.randn(self.batch, *shape)
        self.y = torch.randint(2 if tokens else 10, (self.batch,))

    def sgd(self) -> Step:
        """Plain, non-private SGD."""
        optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(self.module(self.x), self.y))
            optimizer.step()

        return step

    def two_passes(self) -> Step:
        """Ordinary gradients at two points."""
        other, optimizer = copy.deepcopy(self.module), torch.optim.SGD(self.module.parameters(), lr=RATE)

        def step() -> None:
            for module in (self.module, other):
                module.zero_grad()
                torch.autograd.backward(F.cross_entropy(module(self.x), self.y))
            optimizer.step()

        return step

    def records(self) -> list[RecordGroup]:
        """The batch as the engine takes it: each record a batch of one."""
        return [RecordGroup(np.arange(self.batch), (self.x[:, None], self.y[:, None]))]

    def dp_sgd(self, secure: bool = False, **options: Any) -> Step:
        """Ours, with torch's noise as the peers have it, or with cryptographic noise."""
        engine, group = PerExampleEngine(self.module, _losses, **options), self.records()
        theta = engine.flatten(dict(self.module.named_parameters()))
        stream, block = NoiseStream(fresh_key(), "benchmark"), iter(range(1 << 40))

        def step() -> None:
            total = torch.zeros_like(theta)
            engine.add((theta,), group, ClippingRule.gradient(CLIP), total)
            if secure:
                _add_secure_noise(total, NOISE * CLIP, stream, block)
            else:
                total += NOISE * CLIP * torch.randn_like(total)
            theta.sub_(total, alpha=RATE / self.batch)

        return step

    def dp_srm(self, **options: Any) -> Step:
        """Ours: recursive momentum, gradients at two points."""
        engine, group = PerExampleEngine(self.module, _losses, **options), self.records()
        theta = engine.flatten(dict(self.module.named_parameters()))
        previous, estimate = theta.clone(), torch.zeros_like(theta)
        stream, block = NoiseStream(fresh_key(), "benchmark"), iter(range(1 << 40))
        bound = GAMMA * CLIP + (1 - GAMMA) * DIFFERENCE_CLIP

        def step() -> None:
            total = torch.zeros_like(theta)
            engine.add((theta, previous), group, ClippingRule.momentum(GAMMA, CLIP, DIFFERENCE_CLIP), total)
            _add_secure_noise(total, NOISE * bound, stream, block)
            estimate.mul_(1 - GAMMA).add_(total, alpha=1 / self.batch)
            previous.copy_(theta)
            theta.sub_(estimate, alpha=RATE)

        return step

    def _per_example(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(self.module, p, (x[None],)), y[None])

        gradients: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0, 0))(params, self.x, self.y)
        return gradients

    def vmap_sgd(self) -> Step:
        """DP-SGD by vmap(grad)."""
        params = {name: p.detach() for name, p in self.module.named_parameters()}

        @torch.no_grad()
        def step() -> None:
            gradients = self._per_example(params)
            weights = _weights(gradients, CLIP)
            for name, g in gradients.items():
                noisy = (weights @ g.flatten(1)).view_as(params[name]) + NOISE * CLIP * torch.randn_like(
                    params[name]
                )
                params[name].sub_(noisy, alpha=RATE / self.batch)

        return step

    def vmap_srm(self) -> Step:
        """DP-SRM by vmap(grad) at both points."""
        params = {name: p.detach() for name, p in self.module.named_parameters()}
        previous = {name: p.clone() for name, p in params.items()}

        @torch.no_grad()
        def step() -> None:
            _srm_step(self._per_example(params), self._per_example(previous), params, previous, self.batch)

        return step

    def opacus(self) -> Step:
        """DP-SGD by Opacus' per-sample hooks."""
        peer, optimizers = (
            importlib.import_module("opacus.grad_sample"),
            importlib.import_module("opacus.optimizers"),
        )
        module = peer.GradSampleModule(self.module)
        optimizer = optimizers.DPOptimizer(
            torch.optim.SGD(module.parameters(), lr=RATE), noise_multiplier=NOISE, max_grad_norm=CLIP,
            expected_batch_size=self.batch,
        )  # fmt: skip

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(self.x), self.y))
            optimizer.step()

        return step

    def opacus_ghost(self) -> Step:
        """DP-SGD by Opacus' ghost clipping."""
        peer, optimizers = (
            importlib.import_module("opacus.grad_sample"),
            importlib.import_module("opacus.optimizers"),
        )
        losses = importlib.import_module("opacus.utils.fast_gradient_clipping_utils")
        module = peer.GradSampleModuleFastGradientClipping(self.module, max_grad_norm=CLIP)
        optimizer = optimizers.DPOptimizerFastGradientClipping(
            torch.optim.SGD(module.parameters(), lr=RATE), noise_multiplier=NOISE, max_grad_norm=CLIP,
            expected_batch_size=self.batch,
        )  # fmt: skip
        criterion = losses.DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())

        def step() -> None:
            optimizer.zero_grad()
            criterion(module(self.x), self.y).backward()
            optimizer.step()

        return step

    def opacus_srm(self) -> Step:
        """DP-SRM by two Opacus passes."""
        peer = importlib.import_module("opacus.grad_sample")
        other = peer.GradSampleModule(copy.deepcopy(self.module), loss_reduction="sum")
        module = peer.GradSampleModule(self.module, loss_reduction="sum")
        params = {name: p.detach() for name, p in module.named_parameters()}
        previous = {name: p.detach() for name, p in other.named_parameters()}

        def gradients(wrapped: nn.Module) -> dict[str, Tensor]:
            torch.autograd.backward(F.cross_entropy(wrapped(self.x), self.y, reduction="sum"))
            taken = {}
            for name, p in wrapped.named_parameters():
                taken[name], p.grad_sample, p.grad = p.grad_sample, None, None  # type: ignore[attr-defined]
            return taken

        def step() -> None:
            now = gradients(module)
            before = gradients(other)
            with torch.no_grad():
                _srm_step(now, before, params, previous, self.batch)

        return step


METHODS: dict[str, Callable[[Problem], Step]] = {
    "sgd": Problem.sgd,
    "two passes": Problem.two_passes,
    "quietgrad dp-sgd": Problem.dp_sgd,
    "quietgrad dp-sgd, secure noise": lambda p: p.dp_sgd(secure=True),
    "quietgrad dp-sgd, low memory": lambda p: p.dp_sgd(memory_budget=0, micro_batch=max(8, p.batch // 4)),
    "vmap dp-sgd": Problem.vmap_sgd,
    "opacus dp-sgd": Problem.opacus,
    "opacus ghost dp-sgd": Problem.opacus_ghost,
    "quietgrad dp-srm": Problem.dp_srm,
    "quietgrad dp-srm, micro-batches": lambda p: p.dp_srm(micro_batch=max(8, p.batch // 4)),
    "quietgrad dp-srm, passes of 32": lambda p: p.dp_srm(micro_batch=32),
    "vmap dp-srm": Problem.vmap_srm,
    "opacus dp-srm": Problem.opacus_srm,
}


def _losses(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def _add_secure_noise(total: Tensor, sigma: float, stream: NoiseStream, block: Iterator[int]) -> None:
    for part in torch.split(total, 1 << 16):
        part += torch.from_numpy(stream.normal(next(block), len(part))) * sigma


def _weights(gradients: dict[str, Tensor], clip: float) -> Tensor:
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    weights: Tensor = (clip / norms).clamp(max=1.0)
    return weights


def _srm_step(
    now: dict[str, Tensor],
    before: dict[str, Tensor],
    params: dict[str, Tensor],
    previous: dict[str, Tensor],
    n: int,
) -> None:
    change = {name: g - before[name] for name, g in now.items()}
    first, second = GAMMA * _weights(now, CLIP), (1 - GAMMA) * _weights(change, DIFFERENCE_CLIP)
    for name, p in params.items():
        total = (first @ now[name].flatten(1) + second @ change[name].flatten(1)).view_as(p) + torch.randn_like(p)
        previous[name].copy_(p)
        p.sub_(total, alpha=RATE / n)


def times(name: str, repeats: int, peers: bool) -> dict[str, Any]:
    """CPU milliseconds and ratios to plain SGD, contenders in turn."""
    others = () if peers else ("vmap", "opacus")
    ours = {m: build for m, build in METHODS.items() if "passes of" not in m and not m.startswith(others)}
    steps = {method: build(Problem(name)) for method, build in ours.items()}
    taken: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(repeats + 2):
        for method, step in steps.items():
            start = time.process_time()
            step()
            taken[method].append(time.process_time() - start)
    taken = {method: values[2:] for method, values in taken.items()}  # the first two warm up
    return {
        method: {
            "cpu_ms": round(1e3 * statistics.median(values), 2),
            "ratio_to_sgd": round(statistics.median(v / s for v, s in zip(values, taken["sgd"], strict=True)), 3),
        }
        for method, values in taken.items()
    }


def peak_megabytes(name: str, method: str, batch: int | None = None) -> float:
    """Growth of the resident set over two steps; Linux counts the high-water mark afresh after clear_refs."""
    METHODS[method](Problem(name, batch=2))()  # imports and compiled code are not the method's memory
    step = METHODS[method](Problem(name, batch))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    step()
    step()
    return (_status("VmHWM") - before) / 1024


def _peak(command: list[str]) -> float:
    return round(float(subprocess.run(command, check=True, capture_output=True).stdout), 1)


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    """Measure the models named on the command line, or all."""
    parser = argparse.ArgumentParser(description="One private step of a network against its peers.")
    parser.add_argument("models", nargs="*", default=list(BATCHES))
    parser.add_argument("--peers", type=Path, default=ROOT / "runs" / "peers")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--keep-memory", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, help="Where to write instead of benchmarks/results.")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path.append(str(options.peers))
    warnings.simplefilter("ignore")  # Opacus warns about hooks on inputs without gradients
    torch.set_num_threads(1)
    if options.keep_memory:
        keep_freed_memory()
    if options.memory_of:
        print(peak_megabytes(options.models[0], options.memory_of, options.batch))
        return
    usual = ROOT / "benchmarks" / "results" / f"torch_engine{'_keep_memory' if options.keep_memory else ''}.json"
    results = options.out or usual
    found: dict[str, Any] = {}  # one run, one file: rows of different runs do not share a header
    for name in options.models:
        found[name] = {
            "batch": BATCHES[name],
            "rounds": options.repeats,
            "methods": times(name, options.repeats, not options.no_peers),
        }
        command = [sys.executable, __file__, name, "--peers", str(options.peers)]
        command += ["--keep-memory"] * options.keep_memory
        for method, entry in found[name]["methods"].items():
            entry["peak_mb"] = _peak([*command, "--memory-of", method])
            print(name, method, entry, flush=True)
        if name in LARGE:
            large = [
                ("sgd", 64),
                ("quietgrad dp-srm, passes of 32", 1024),
            ]
            found[name]["large_batch_peak_mb"] = {
                f"{method}, b={size}": _peak([*command, "--memory-of", method, "--batch", str(size)])
                for method, size in large
            }
            print(name, found[name]["large_batch_peak_mb"], flush=True)
        what = "CPU time of a step, 1 thread: median, and median ratio to plain SGD in the same round; peak growth"
        save(results, {"what": what, "keep_memory": options.keep_memory, "models": found}, "opacus")


if __name__ == "__main__":
    main()
