"""Two gloo processes: what scripts do between ``backward()`` and ``step()``, and what ends all of them in words."""

from __future__ import annotations

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import QuietgradError

X = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
KINDS = ("plain", "ddp", "shards")
STEPS = ("clipped", "clipped by value", "scaled", "scaled and clipped", "logged by all after the step", "scheduled")
CASES = [(kind, step, most) for kind in KINDS for step in STEPS for most in (None, 6)]


def network(kind: str) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
    if not dist.is_initialized() or kind == "plain":
        return model
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


HALVES = qt.StepNoise(step_size=1, gamma=0.5)


def epochs_of(step: str) -> int:
    return 2 if step == "scheduled" else 1


def flat(model: nn.Module) -> Tensor:
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in model.parameters()]
    return torch.cat([value.detach().flatten() for value in whole])


def step_of(step: str, model: Any, optimizer: Any, loss: Any) -> None:
    """One step as scripts write it."""
    scaler = torch.amp.GradScaler("cpu", enabled=step.startswith("scaled"))
    scaler.scale(loss).backward()
    if step == "scaled and clipped":
        scaler.unscale_(optimizer)
    if step.endswith("clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    if step == "clipped by value":
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


def trained(kind: str, step: str, most: int | None) -> dict[str, Any]:
    model, settings = network(kind), dict[str, Any]()
    if step == "scheduled":
        settings = {"noise_schedule": HALVES, "clip_schedule": qt.ExponentialGradClip(gamma=0.5)}
    private, optimizer, loader, criterion = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=1.0, seed=7,
        data_loader=DataLoader(TensorDataset(X, Y), batch_size=20), max_grad_norm=1.0, n_public=61,
        criterion=nn.CrossEntropyLoss(), epochs=epochs_of(step), **settings,
    )  # fmt: skip
    batches = loader
    if most is not None:
        batches = qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=most, optimizer=optimizer)
    for x, y in chain.from_iterable(batches for _ in range(epochs_of(step))):
        optimizer.zero_grad()
        step_of(step, private, optimizer, criterion(private(x), y))
        if step == "logged by all after the step" and not loader.loop.partial:
            assert sum(float(param.grad.norm()) for param in private.parameters()) > 0.0
    return {"params": flat(model), "releases": loader.privacy.releases}


class Rows(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter([(X[place], Y[place]) for place in range(self.count)])

    def __len__(self) -> int:
        return self.count


def refusals(rank: int) -> dict[str, str]:
    """What both processes say where one of them cannot go on, or where shards come too late."""
    ends = slice(0, 0 if rank else 61)

    def own_loop(data: Any) -> None:
        model = network("plain")
        loop = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), data, noise_multiplier=1.0, batch_size=20, steps=2, max_grad_norm=1.0,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), sharded=True,
        )  # fmt: skip
        for batch in loop:
            loop.step(batch)

    def late(optimizer_first: bool, wrap: bool = True) -> None:
        from torch.distributed.fsdp import fully_shard

        model = network("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if optimizer_first:
            fully_shard(model)
        private, optimizer, loader = qt.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(X, Y), batch_size=20),
            noise_multiplier=1.0, max_grad_norm=1.0, wrap_model=wrap,
        )  # fmt: skip
        fully_shard(private)
        for x, y in loader:
            loss: Any = nn.functional.cross_entropy(private(x), y)
            loss.backward()
            optimizer.step()

    def people_in_pieces() -> None:
        model = network("shards")
        _, optimizer, loader = qt.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), person=[k // 3 for k in range(61)],
            data_loader=DataLoader(TensorDataset(X, Y), batch_size=5), noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
        next(iter(qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)))

    def fitted() -> None:
        qt.fit(
            network("plain"), nn.CrossEntropyLoss(), (X[ends], Y[ends]), qg.DPSGD(steps=2, batch_size=20),
            budget=qg.Budget(4.0, 1e-5), n_public=61, progress=False,
        )  # fmt: skip

    said = {}
    asked: dict[str, Any] = {
        "an empty shard": lambda: own_loop((X[ends], Y[ends])),
        "an empty stream": lambda: own_loop(Rows(0 if rank else 61)),
        "an empty fit": fitted,
        "people in pieces": people_in_pieces,
        "optimizer before shards": lambda: late(optimizer_first=True),
        "shards after make_private": lambda: late(optimizer_first=False),
        "shards after make_private, in place": lambda: late(optimizer_first=False, wrap=False),
    }
    for name, ask in asked.items():
        try:
            ask()
        except (ValueError, QuietgradError) as error:
            said[name] = str(error)
        dist.barrier()
    return said


def process(rank: int, home: str) -> None:
    torch.set_num_threads(1)
    folder = Path(home)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    out: dict[Any, Any] = {case: trained(*case) for case in CASES}
    out["refusals"] = refusals(rank)
    torch.save(out, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    start: Any = torch.multiprocessing
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start.spawn(process, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "step", "most"), CASES)
def test_a_step_on_two_processes_is_that_of_one(
    kind: str, step: str, most: int | None, ranks: list[dict[Any, Any]]
) -> None:
    first, second = (answer[kind, step, most] for answer in ranks)
    assert torch.equal(first["params"], second["params"])
    alone = trained("plain", step, most)
    # The same seed gives the same noise: released twice, or by both, it would be another.
    torch.testing.assert_close(first["params"], alone["params"], rtol=1e-4, atol=2e-5)
    expected = {f"stretch-{epoch}": 4 for epoch in range(epochs_of(step))}
    assert first["releases"] == alone["releases"] == expected


def test_where_one_process_cannot_go_on_all_end_in_words(ranks: list[dict[Any, Any]]) -> None:
    first, second = (answer["refusals"] for answer in ranks)
    for name in ("an empty shard", "an empty stream", "an empty fit"):
        assert "another process cannot read its data" in first[name], name
        assert any(words in second[name] for words in ("empty", "no record", "at least 1"))
    for said in (first, second):
        assert "Give records_per_person" in said["people in pieces"]
        assert "made before fully_shard" in said["optimizer before shards"]
        assert "Shard first" in said["shards after make_private"]
        assert "Shard first" in said["shards after make_private, in place"]
