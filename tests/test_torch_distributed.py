"""Two processes on loopback train the model that one process trains; the noise is added once."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.errors import DataError, QuietgradError

LOSS = nn.CrossEntropyLoss(reduction="none")
ALGORITHMS: dict[str, Any] = {
    "sgd": qg.DPSGD(steps=6, batch_size=80, learning_rate=1.0),
    "srm": qg.DPSRM(steps=6, batch_size=80, learning_rate=1.0, gamma=0.4),
    "gd": qg.DPGD(steps=2),
    "dropout": qg.DPSRM(steps=4, batch_size=80, learning_rate=1.0, gamma=0.4),
    "people": qg.DPSRM(steps=4, batch_size=40, learning_rate=1.0, gamma=0.4),
}
PERSON = [record**2 % 101 for record in range(301)]  # up to six records each, scattered


def network(width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(301, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def train(name: str, folder: Path | None = None) -> Any:
    model = network(dropout=0.5 if name in ("dropout", "people") else 0.0)
    ledger = None if folder is None else folder / f"{name}.jsonl"
    people: dict[str, Any] = {"person": PERSON, "records_per_person": 3} if name == "people" else {}
    result = qt.fit(
        model, LOSS, data(), ALGORITHMS[name], budget=qg.Budget(4.0, 1e-5), seed=7, ledger=ledger, **people
    )
    written = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.equal(written, result.params)
    return result


def process(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    out: dict[str, Any] = {}
    for name in ALGORITHMS:
        result = train(name, Path(folder))
        out[name] = (result.params, result.privacy.epsilon, dict(result.privacy.releases))
    try:
        qt.fit(network(8 + rank), LOSS, data(), ALGORITHMS["sgd"], budget=qg.Budget(4.0, 1e-5))
    except DataError as error:
        out["disagreement"] = str(error)
    x, y = data()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(rank))
    frozen: Any = network()
    other: Any = network()
    frozen[0].requires_grad_(False).weight.data.mul_(1.0 + rank)
    other[0].weight.data.mul_(1.0 + rank)
    for what, model, records, person in (
        ("order", network(), (x[order], y[order]), None),
        ("frozen", frozen, (x, y), None),
        ("start", other, (x, y), None),
        ("refused on one", network(), (x / (1 - rank), y), None),
        ("ids", network(), (x, y), PERSON[rank:] + PERSON[:rank]),
        ("ids on one", network(), (x, y), PERSON[rank:]),
    ):
        try:
            qt.fit(
                model, LOSS, records, ALGORITHMS["people"], budget=qg.Budget(4.0, 1e-5), person=person,
                ledger=Path(folder) / "refused.jsonl",
            )  # fmt: skip
        except (ValueError, QuietgradError) as error:
            out[what] = str(error)
    try:
        qt.fit(
            network(), LOSS, data(), qg.DPSGD(steps=2, batch_size=999), budget=qg.Budget(4.0, 1e-5), n_public=301
        )
    except (ValueError, QuietgradError) as error:
        out["failure"] = str(error)
    torch.save(out, Path(folder) / f"{rank}.pt")
    dist.barrier()  # nobody leaves while the other still talks
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    start: Any = torch.multiprocessing
    for attempt in range(3):
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            start.spawn(process, (port, str(folder)), nprocs=2)
            break
        except start.ProcessExitedException:  # gloo aborts if its peer is gone first: a race of its own
            if attempt == 2:
                raise
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_processes_give_the_model_of_one(name: str, both: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, (first, second) = both
    alone = train(name)
    assert torch.equal(first[name][0], second[name][0])
    # Twice the noise, or fresh noise on each process, would be off by its own size; sums differ by rounding.
    torch.testing.assert_close(first[name][0], alone.params, rtol=1e-4, atol=1e-5)
    assert first[name][1] == second[name][1] == alone.privacy.epsilon
    assert first[name][2] == alone.privacy.releases
    reservations = [entry for entry in qg.Ledger(folder / f"{name}.jsonl").entries() if entry.kind == "reserve"]
    assert len(reservations) == 2  # the count of the records, and the run: the leader's alone


@pytest.mark.parametrize(("what", "message"), [
    ("order", "the records, their order"), ("frozen", "frozen parameters"), ("start", "training begins with"),
    ("ids", "whose they are"),
])  # fmt: skip
def test_processes_that_hold_different_things_are_refused(
    what: str, message: str, both: tuple[Path, list[dict[str, Any]]]
) -> None:
    """A record at another place on another process would be in two shares: it would contribute 2 C."""
    folder, answers = both
    assert all(message in answer[what] for answer in answers)
    assert not (folder / "refused.jsonl").exists()


def test_what_fails_on_one_fails_on_both(both: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = both
    assert "do not agree" in first["disagreement"]
    assert "do not agree" in second["disagreement"]
    assert "batch_size=999" in first["failure"]
    assert "batch_size=999" in second["failure"]
    assert "another process refused" in first["refused on one"]
    assert "not finite" in second["refused on one"]
    assert "another process refused" in first["ids on one"]
    assert "one id per record" in second["ids on one"]
