"""Own loops on two processes: the model of one process, noise once, samples disjoint; also under DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError, DataError, QuietgradError

WRAPPERS = ("plain", "ddp", "opacus")
PEOPLE = ("plain", "ddp")
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
    return model


def train(wrapper: str, folder: Path | None = None, **settings: Any) -> dict[str, Any]:
    model = network(wrapper)
    engine = qt.PrivacyEngine()
    size, n = (3, 7) if "person" in settings else (20, 61)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader, criterion = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), target_epsilon=4.0,
        target_delta=1e-5, epochs=2, max_grad_norm=1.0, seed=7, criterion=criterion, n_public=n,
        data_loader=DataLoader(data(), batch_size=size, shuffle=True),
        ledger=None if folder is None else folder / f"{wrapper}.jsonl", **settings,
    )  # fmt: skip
    seen = []
    for _ in range(2):
        for x, y in loader:
            seen.append(torch.tensor(np.array(loader.loop.sample.keys.indices)))
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    params = {name: value.clone() for name, value in model.state_dict().items()}
    return {"params": params, "seen": seen, "steps": loader.loop.handed_out, "condition": loader.privacy.condition}


def opaque(wrapper: str, **settings: Any) -> dict[str, Any]:
    model = network(wrapper)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), data(), optimizer=optimizer, budget=qg.Budget(4.0, 1e-5), epochs=2, seed=7,
        batch_size=3 if "person" in settings else 20, max_grad_norm=1.0, **settings,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return {"params": {str(k): p.detach().clone() for k, p in enumerate(model.parameters())}}


def told_by_one(rank: int) -> str | None:
    """One process's code looks at a batch: all of them, and the leader's ledger, say so before the release."""
    model = network("plain")
    made = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(data(), batch_size=20), criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    x, y = next(iter(made[2]))
    if rank == 1:
        with pytest.warns(UserWarning, match="conditional"):
            x.sum()
    loss = made[3](made[0](x), y)
    loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made[1].step()
    condition: str | None = made[2].privacy.condition
    return condition


def refusal(rank: int) -> dict[str, str]:
    said = {}
    x, y = data().tensors
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rank))
    frozen, other = network("plain"), network("plain")
    frozen[0].requires_grad_(False).weight.data.mul_(1.0 + rank)
    other[0].weight.data.mul_(1.0 + rank)
    cases: dict[str, tuple[nn.Module, TensorDataset, dict[str, Any]]] = {
        "order": (network("plain"), TensorDataset(x[order], y[order]), {}),
        "width": (network("plain", 8 + rank), data(), {}),
        "seed": (network("plain"), data(), {"seed": 5 + rank}),
        "ids": (network("plain"), data(), {"person": IDS if rank else IDS[::-1]}),
        "combine": (network("plain"), data(), {"person": IDS, "combine": "sum" if rank else "mean"}),
        "frozen": (frozen, data(), {}),
        "start": (other, data(), {}),
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
        out[f"opaque {wrapper}"] = opaque(wrapper)
    out["opaque people"] = opaque("plain", person=IDS)
    out["told"] = told_by_one(rank)
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
    assert first["steps"] == second["steps"] == alone["steps"]
    assert first["condition"] is second["condition"] is None
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
    shares = list(zip(first["seen"], second["seen"], alone["seen"], strict=True))
    for a, b, whole in shares:
        assert torch.equal(torch.cat([a, b]).sort().values, whole.sort().values)
        assert all(whole_people(part.tolist()) for part in (a, b))
    assert any(len(a) and len(b) for a, b, _ in shares)  # both had people at once
    assert any(not len(a) or not len(b) for a, b, _ in shares)  # and one had nobody


@pytest.mark.filterwarnings("ignore:seed=7")
@pytest.mark.parametrize("what", [*PEOPLE, "people"])
def test_opaque_loops_on_two_processes_are_those_of_one(what: str, both: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (answer[f"opaque {what}"]["params"] for answer in both[1])
    alone = opaque("plain", **({"person": IDS} if what == "people" else {}))["params"]
    for name, value in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, rtol=1e-3, atol=1e-4)


def test_a_condition_of_one_process_is_that_of_all(both: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all((answer["told"] or "").startswith("if the loop's own code") for answer in both[1])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("order", "order"),
        ("width", "training begins"),
        ("seed", "seed"),
        ("ids", "whose"),
        ("combine", "whose"),
        ("frozen", "frozen parameters"),
        ("start", "training begins"),
    ],
)
def test_processes_that_hold_different_things_are_refused(
    what: str, message: str, both: tuple[Path, list[dict[str, Any]]]
) -> None:
    assert all(message in answer["refusals"][what] for answer in both[1])


def test_shares_of_different_samples_are_never_added(both: tuple[Path, list[dict[str, Any]]]) -> None:
    """A record in the one process's sample and in the other's would count twice."""
    assert all("step on different samples" in answer["misaligned"] for answer in both[1])
