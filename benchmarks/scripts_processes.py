"""Scripts for several processes, as ``torchrun`` starts them: DDP, Opacus' wrapper, samplers by rank, FSDP2.

Registered with :mod:`benchmarks.scripts`, which runs each on two gloo processes of its own.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import quietgrad as qg
import quietgrad.torch as qt
from benchmarks.scripts import BATCH, CLASSES, SHAPES, N, Script, epoch, private, shape

_RUNS: dict[str, Script] = {}


def two_processes(*models: str, expected: str = "runs") -> Callable[[Script], Script]:
    """A script that two processes run at once; what one of them raises is raised."""

    def register(run: Script) -> Script:
        _RUNS[run.__name__] = run

        @wraps(run)
        def started(model: nn.Module, data: Any) -> Any:
            start: Any = torch.multiprocessing
            with tempfile.TemporaryDirectory() as folder:
                torch.save((model, data), f"{folder}/given.pt")
                start.spawn(_process, (run.__module__, run.__name__, folder), nprocs=2)
                answers = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            first, second = answers
            assert torch.equal(first[1], second[1])
            assert first[0].epsilon == second[0].epsilon
            return first[0]

        return shape(*models, expected=expected)(started)

    return register


def _process(rank: int, module: str, name: str, folder: str) -> None:
    import_module(module)  # which registers the script
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model, data = torch.load(f"{folder}/given.pt", weights_only=False)
    answer: Any
    try:
        told = _RUNS[name](model, data)
        answer = told, torch.cat([_whole(param).detach().flatten() for param in model.parameters()])
    except Exception as error:
        answer = error
    torch.save(answer, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _whole(param: Any) -> Any:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def _sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@two_processes("mlp", "cnn")
def ddp(model: nn.Module, data: Any) -> Any:
    """torch's DDP tutorial: every process samples by rank."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // 2, sampler=sampler)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    sampler.set_epoch(0)
    return epoch(private(wrapped, data, optimizer=optimizer, loader=loader))


@two_processes("cnn")
def ddp_of_opacus(model: nn.Module, data: Any) -> Any:
    """Opacus' DDP tutorial."""
    wrapped = qt.DifferentiallyPrivateDistributedDataParallel(model)
    made = qt.PrivacyEngine().make_private_with_epsilon(
        module=wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1), target_epsilon=8.0, epochs=1,
        data_loader=DataLoader(data, batch_size=BATCH), target_delta=1e-5, max_grad_norm=1.0, n_public=N,
        criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    return epoch(made)


@two_processes("mlp")
def fit_on_two(model: nn.Module, data: Any) -> Any:
    method, budget = qg.DPSGD(steps=3, batch_size=BATCH), qg.Budget(8.0, 1e-5)
    return qt.fit(model, nn.CrossEntropyLoss(), data, method, budget=budget, n_public=N, progress=False).privacy


@two_processes("mlp")
def accelerate_on_two(model: nn.Module, data: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader: Any = DataLoader(data, batch_size=BATCH // 2, shuffle=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return epoch(private(prepared, data, optimizer=optimizer, loader=loader))


@two_processes("mlp", "cnn", "transformer")
def fsdp2_loop(model: nn.Module, data: Any) -> Any:
    sharded = _sharded(model)
    loop = qt.PrivateLoop(
        sharded, nn.CrossEntropyLoss(), data, optimizer=torch.optim.AdamW(sharded.parameters(), lr=1e-2),
        batch_size=BATCH, epochs=1, max_grad_norm=1.0, noise_multiplier=1.0,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return loop.privacy


@two_processes("mlp", "cnn")
def fsdp2_verbs(model: nn.Module, data: Any) -> Any:
    """As in a loop for DDP, with fully_shard in its place."""
    sharded = _sharded(model)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // 2, sampler=sampler)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    return epoch(private(sharded, data, optimizer=optimizer, loader=loader))


@two_processes("mlp")
def fsdp2_ghost(model: nn.Module, data: Any) -> Any:
    """Opacus' ghost_fsdp mode."""
    sharded = _sharded(model)
    made = qt.PrivacyEngine().make_private(
        module=sharded, optimizer=torch.optim.SGD(sharded.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0,
        grad_sample_mode="ghost_fsdp",
    )  # fmt: skip
    return epoch((made[0], made[1], made[3], made[2]))


@two_processes("mlp")
def fsdp2_fit(model: nn.Module, data: Any) -> Any:
    method, budget = qg.DPSGD(steps=3, batch_size=BATCH), qg.Budget(8.0, 1e-5)
    made = qt.fit(_sharded(model), nn.CrossEntropyLoss(), data, method, budget=budget, n_public=N, progress=False)
    return made.privacy


@two_processes("mlp")
def fsdp2_frozen_base(model: nn.Module, data: Any) -> Any:
    """A sharded frozen base in bfloat16 and a head in float32."""

    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = model.to(torch.bfloat16).requires_grad_(False)
            self.head = nn.Linear(CLASSES, CLASSES)

        def forward(self, x: Any) -> Any:
            return self.head(self.base(x.bfloat16()).float())

    torch.manual_seed(0)
    sharded = _sharded(Headed())
    optimizer = torch.optim.AdamW(sharded.head.parameters(), lr=1e-2)
    return epoch(private(sharded, data, optimizer=optimizer))


def _clipped(model: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _scaled(made: Any) -> Any:
    model, optimizer, loader, criterion = made
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(criterion(model(x), y)).backward()
        scaler.unscale_(optimizer)
        _clipped(model)
        scaler.step(optimizer)
        scaler.update()
    return loader.privacy


def _in_pieces(made: Any, train: Callable[[Any], Any]) -> Any:
    model, optimizer, loader, criterion = made

    class Pieces(qt.BatchMemoryManager):
        privacy = property(lambda self: loader.privacy)

    return train(
        (model, optimizer, Pieces(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer), criterion)
    )


def _ddp(model: nn.Module, data: Any) -> Any:
    wrapped = nn.parallel.DistributedDataParallel(model)
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // 2, sampler=sampler)
    made = private(wrapped, data, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1), loader=loader)
    made[2].sampler.set_epoch(1)
    return made


def _fsdp(model: nn.Module, data: Any) -> Any:
    sharded = _sharded(model)
    return private(sharded, data, optimizer=torch.optim.SGD(sharded.parameters(), lr=0.1))


@two_processes("mlp", "cnn")
def ddp_clipped(model: nn.Module, data: Any) -> Any:
    return epoch(_ddp(model, data), _clipped)


@two_processes("mlp", expected="runs, conditional")
def ddp_scaled_and_clipped(model: nn.Module, data: Any) -> Any:
    return _scaled(_ddp(model, data))


@two_processes("mlp")
def ddp_clipped_in_pieces(model: nn.Module, data: Any) -> Any:
    return _in_pieces(_ddp(model, data), lambda made: epoch(made, _clipped))


@two_processes("mlp", "cnn")
def fsdp2_clipped(model: nn.Module, data: Any) -> Any:
    return epoch(_fsdp(model, data), _clipped)


@two_processes("mlp", expected="runs, conditional")
def fsdp2_scaled_in_pieces(model: nn.Module, data: Any) -> Any:
    return _in_pieces(_fsdp(model, data), _scaled)


assert set(_RUNS) <= set(SHAPES)
