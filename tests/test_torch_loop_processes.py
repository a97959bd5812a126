"""Own loops on two processes: the model of one process, noise once, samples disjoint; under DDP and FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.errors import BudgetError, DataError, QuietgradError

WRAPPERS = ("plain", "ddp", "opacus", "fsdp")
PEOPLE = ("plain", "ddp", "fsdp")
IDS = (
    [0] * 30 + [1] * 9 + [k % 5 + 2 for k in range(22)]
)  # seven people, scattered; small samples leave shares empty


def data() -> TensorDataset:
    x = torch.randn(61, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def network(wrapper: str, width: int = 8) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2))
    if not dist.is_initialized():
        return model
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper == "opacus":
        return qt.DifferentiallyPrivateDistributedDataParallel(model)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(wrapper: str, folder: Path | None = None, **settings: Any) -> dict[str, Any]:
    model = network(wrapper)
    engine = qt.PrivacyEngine()
    settings = {"clipping": "per_layer"} | settings if wrapper == "opacus" else settings
    size = 3 if "person" in settings else 20
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), target_epsilon=4.0,
        target_delta=1e-5, epochs=2, max_grad_norm=1.0, seed=7,
        data_loader=DataLoader(data(), batch_size=size, shuffle=True),
        ledger=None if folder is None else folder / f"{wrapper}.jsonl", **settings,
    )  # fmt: skip
    seen = []
    for _ in range(2):
        for x, y in loader:
            seen.append(torch.as_tensor(x).as_subclass(torch.Tensor)[:, 1].clone())
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    params = {name: value.clone() for name, value in model.state_dict().items()}
    return {"params": params, "seen": seen, "history": engine.accountant.history}


def refusal(rank: int) -> dict[str, str]:
    said = {}
    x, y = data().tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rank))
    cases: dict[str, tuple[nn.Module, TensorDataset, dict[str, Any]]] = {
        "order": (network("plain"), TensorDataset(x[order], y[order]), {}),
        "width": (network("plain", 8 + rank), data(), {}),
        "seed": (network("plain"), data(), {"seed": 5 + rank}),
        "ids": (network("plain"), data(), {"person": IDS if rank else IDS[::-1]}),
        "combine": (network("plain"), data(), {"person": IDS, "combine": "sum" if rank else "mean"}),
    }
    for name, (model, records, settings) in cases.items():
        try:
            qt.make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
                data_loader=DataLoader(records, batch_size=5), max_grad_norm=1.0, **settings,
            )  # fmt: skip
        except (DataError, QuietgradError) as error:
            said[name] = str(error)
    return said


def misaligned(rank: int) -> str:
    """One process leaves a batch out: the shares would be of different samples."""
    model = network("plain")
    made = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(data(), batch_size=20),
    )  # fmt: skip
    batches = iter(made[2])
    for _ in range(rank):
        next(batches)
    x, y = next(batches)
    loss: Any = nn.functional.cross_entropy(made[0](x), y)
    loss.backward()
    try:
        made[1].step()
    except BudgetError as error:
        return str(error)
    return "stepped"


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    # A file, not a port: nobody else can have taken it.
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    out: dict[str, Any] = {wrapper: train(wrapper, Path(folder)) for wrapper in WRAPPERS}
    for wrapper in PEOPLE:
        out[f"people {wrapper}"] = train(wrapper, None, person=IDS)
    out["refusals"] = refusal(rank)
    out["misaligned"] = misaligned(rank)
    torch.save(out, Path(folder) / f"{rank}.pt")
    dist.barrier()  # nobody leaves while the other still talks
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    start: Any = torch.multiprocessing
    for attempt in range(3):
        folder = tmp_path_factory.mktemp("ranks")
        try:
            start.spawn(process, (str(folder),), nprocs=2)
            break
        except start.ProcessExitedException:  # gloo aborts if its peer is gone first: a race of its own
            if attempt == 2:
                raise
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:seed=7")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_processes_train_the_model_of_one(wrapper: str, both: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, answers = both
    first, second = (answer[wrapper] for answer in answers)
    alone = train(wrapper)
    for name, value in alone["params"].items():
        assert torch.equal(first["params"][name], second["params"][name])
        # Noise twice, or another one on each process, would be off by its own size; sums differ by rounding.
        torch.testing.assert_close(first["params"][name], value, rtol=1e-3, atol=1e-4)
    for a, b, whole in zip(first["seen"], second["seen"], alone["seen"], strict=True):
        assert torch.equal(torch.cat([a, b]).sort().values, whole.sort().values)  # disjoint, together the sample
    assert sum(len(a) for a in first["seen"]) > 0 < sum(len(b) for b in second["seen"])
    assert first["history"] == second["history"] == alone["history"]
    entries = [entry for entry in qg.Ledger(folder / f"{wrapper}.jsonl").entries() if entry.kind == "reserve"]
    assert len(entries) == 1


def whole_people(rows: Any) -> bool:
    """Whether everybody of whom a row is there is there with all their rows."""
    mine = [IDS[k] for k in rows]
    return all(mine.count(each) == IDS.count(each) for each in set(mine))


@pytest.mark.filterwarnings("ignore:seed=7")
@pytest.mark.parametrize("wrapper", PEOPLE)
def test_people_stay_together_on_two_processes(wrapper: str, both: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (answer[f"people {wrapper}"] for answer in both[1])
    alone = train(wrapper, None, person=IDS)
    for name, value in alone["params"].items():
        assert torch.equal(first["params"][name], second["params"][name])
        torch.testing.assert_close(first["params"][name], value, rtol=1e-3, atol=1e-4)
    places = {float(value): k for k, value in enumerate(data().tensors[0][:, 1])}
    shares = list(zip(first["seen"], second["seen"], alone["seen"], strict=True))
    for a, b, whole in shares:
        assert torch.equal(torch.cat([a, b]).sort().values, whole.sort().values)
        assert all(whole_people([places[float(value)] for value in part]) for part in (a, b))
    assert any(len(a) and len(b) for a, b, _ in shares)  # both had people at once
    assert any(not len(a) or not len(b) for a, b, _ in shares)  # and one had nobody


@pytest.mark.parametrize(
    ("what", "message"),
    [("order", "order"), ("width", "training begins"), ("seed", "seed"), ("ids", "whose"), ("combine", "whose")],
)
def test_processes_that_hold_different_things_are_refused(
    what: str, message: str, both: tuple[Path, list[dict[str, Any]]]
) -> None:
    assert all(message in answer["refusals"][what] for answer in both[1])


def test_shares_of_different_samples_are_never_added(both: tuple[Path, list[dict[str, Any]]]) -> None:
    """A record in the one process's sample and in the other's would count twice."""
    assert all("step on different samples" in answer["misaligned"] for answer in both[1])
