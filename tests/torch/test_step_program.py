"""Verbs with untouched handles run the closed program of one record that a private loop runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.loops.handle_loop import HandleLoop
from quietgrad.torch.loops.step_program import ClosedPiece, RecordedPiece, SampleQuery
from quietgrad.torch.networks.randomness import RecordSeeds
from tests.torch.loops import network, table

pytestmark = pytest.mark.filterwarnings("ignore:seed=")
CRITERION = nn.CrossEntropyLoss()
QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def private(model: nn.Module, data: Any = None, criterion: Any = CRITERION, **settings: Any) -> Any:
    settings = {"noise_multiplier": QUIET, "max_grad_norm": 1.0, "seed": 3, "epochs": 1} | settings
    loader = DataLoader(table() if data is None else data, batch_size=15)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return qt.make_private(module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, **settings)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def test_an_untouched_loop_is_the_private_loop_to_the_bit() -> None:
    own, verbs = network(), network()
    verbs.load_state_dict(own.state_dict())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    loop = qt.PrivateLoop(
        own, CRITERION, table(), optimizer=optimizer, batch_size=15, max_grad_norm=1.0, noise_multiplier=1.0,
        epochs=1, seed=3,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    model, optimizer, loader, criterion = private(verbs, noise_multiplier=1.0)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert torch.equal(flat(own), flat(verbs))
    assert loader.privacy.condition is None
    assert loader.privacy.epsilon == loop.privacy.epsilon


class Counted(Dataset[Any]):
    """Counts how often a record is read."""

    def __init__(self) -> None:
        self.data, self.read = table(), 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.data[index]


def test_no_record_is_read_before_the_session_asks() -> None:
    data = Counted()
    model, optimizer, loader, criterion = private(network(), data)
    batches = iter(loader)
    x, y = next(batches)
    criterion(model(x), y).backward()
    optimizer.step()  # the first one tries the program out on a synthetic record of the form of the first
    x, y = next(batches)
    before = data.read
    criterion(model(x.float()), y).backward()
    assert data.read == before
    optimizer.step()
    assert data.read > before


@pytest.mark.filterwarnings("ignore:a private batch")
@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_a_look_computes_what_was_written_down(when: str) -> None:
    """The recorded passes of a loop that reads its loss give the sums of the closed program."""
    models = network(), network()
    models[1].load_state_dict(models[0].state_dict())
    for looks, own in enumerate(models):
        model, optimizer, loader, criterion = private(own)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            if looks and when == "before backward":
                assert loss.item() > 0.0
            loss.backward()
            if looks and when == "after backward":
                assert loss.item() > 0.0
            optimizer.step()
        assert (loader.privacy.condition is None) is not bool(looks)
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-4, atol=1e-5)


class TellsANumber(nn.Module):
    """Returns a number of the record that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = network()

    def forward(self, x: Tensor) -> Any:
        output = self.layer(x)
        return output, float(x.sum())


def test_what_is_no_tensor_among_outputs_is_of_a_synthetic_record() -> None:
    model, _, loader, _ = private(TellsANumber())
    for x, _ in loader:
        _, number = model(x)
        assert number == 0.0


class WritesIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = network()

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        memory += x.abs().sum()
        return self.layer(x) * torch.cos(memory)


def test_a_public_tensor_is_each_records_own() -> None:
    memory = torch.zeros(1)
    model, optimizer, loader, criterion = private(WritesIntoInput())
    for x, y in loader:
        criterion(model(x, memory), y).backward()
        optimizer.step()
    assert loader.privacy.condition is None
    assert float(memory) == 0.0


class Modal(nn.Module):
    """Doubles its outputs in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = network()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (2.0 if self.training else 1.0)


def test_the_program_runs_in_the_modes_and_at_the_parameters_of_the_call() -> None:
    models = Modal(), Modal()
    models[1].load_state_dict(models[0].state_dict())
    start = {name: value.clone() for name, value in models[0].state_dict().items()}
    for evaluates, own in enumerate(models):
        model, optimizer, loader, criterion = private(own)
        x, y = next(iter(loader))
        loss = criterion(model(x), y)
        loss.backward()
        if evaluates:
            model.eval()
            with torch.no_grad():
                for param in own.parameters():
                    param.zero_()
        optimizer.step()
        own.train()
    with torch.no_grad():
        for name, param in models[1].named_parameters():
            param.add_(start[name])
    torch.testing.assert_close(flat(models[0]), flat(models[1]))


@pytest.mark.filterwarnings("ignore:a private batch")
def test_calls_at_two_points_are_no_program() -> None:
    model, optimizer, loader, criterion = private(network())
    x, y = next(iter(loader))
    criterion(model(x), y).backward()
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    criterion(model(x), y).backward()
    optimizer.step()
    assert loader.privacy.condition is not None


@pytest.mark.parametrize("kind", [ClosedPiece, RecordedPiece])
def test_a_record_in_two_pieces_is_refused(kind: type) -> None:
    _, _, loader, _ = private(network())
    loop: HandleLoop = loader.loop
    seeds = RecordSeeds(bytes(32), np.arange(4))
    rest: list[Any] = [None] * (1 if kind is RecordedPiece else 3)
    pieces = [kind(part, None, loop.engine, *rest) for part in (seeds, seeds.rows(np.array([1])))]
    query = SampleQuery(loop.objective, pieces, ClippingRule.gradient(1.0), loop._examples)
    with pytest.raises(BudgetError, match="two pieces"):
        query.sum_into(None, Batch(loop._examples, np.arange(4), bytes(32)), torch.zeros(loop.engine.dim))


def test_the_earlier_name_is_importable() -> None:
    assert import_module("quietgrad.torch.loops.recorded_loop").CustomLoop is HandleLoop
