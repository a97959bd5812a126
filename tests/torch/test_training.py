"""Modules trained by every algorithm, `qt.fit` with its hooks, resume, and what is refused beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.objectives import Batch
from quietgrad.core.vectors import norm
from quietgrad.tables.regularizers import L2
from quietgrad.torch.networks.module import ModuleObjective

LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = qg.Budget(3.0, 1e-5)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def data(n: int = 400) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 6, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network(width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 2))


ALGORITHMS: list[Any] = [
    qg.DPSGD(steps=20, batch_size=100, learning_rate=1.0, momentum=0.5, returns="ema"),
    qg.DPSRM(steps=20, batch_size=100, learning_rate=1.0, gamma=0.5),
    qg.DPSRM(steps=20, batch_size=100, learning_rate=1.0, gamma=0.5, joint_clip=True),
    qg.DPSRM(steps=20, batch_size=100, learning_rate=1.0, gamma=0.5, difference_clip=0.0),
    qg.DPAdam(steps=20, batch_size=100, learning_rate=0.1),
    qg.DPGD(steps=10, learning_rate=2.0),
    qg.DPAGD(),
    qg.StagewiseDPSGD(stages=2, first_steps=4, batch_size=100, learning_rate=2.0, early_momentum=1),
    qg.RRPSGD(steps=40, batch_size=100),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
def test_every_algorithm_trains_a_module_unchanged(algorithm: Any) -> None:
    model, (x, y) = network(), data()
    result = qt.fit(model, LOSS, (x, y), algorithm, budget=qg.Budget(50.0, 1e-5), seed=5)
    assert isinstance(result.params, Tensor)
    assert result.params.shape == (74,)
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon <= 50.0
    assert float((model(x).argmax(1) == y).float().mean()) > (0.8 if algorithm.name != "rrpsgd" else 0.5)


def test_perturbed_sgd_with_spider_trains_a_module() -> None:
    oracle = qg.AdaptiveSpider(
        batch_size=100, difference_batch_size=50, clip=1.0, smoothness=2.0, regime="reuse", kappa=0.05
    )
    algorithm = qg.PerturbedSGD(
        oracle=oracle, steps=15, learning_rate=0.5, chi=1e-3, radius=0.5, escape_steps=5, hessian_lipschitz=1.0
    )
    model, (x, y) = network(), data()
    before = float(LOSS(model(x), y).detach().mean())
    result = qt.fit(model, LOSS, (x, y), algorithm, budget=qg.Budget(50.0, 1e-5), seed=5)
    assert float(LOSS(model(x), y).detach().mean()) < before - 0.05
    assert result.privacy.releases["o2"] > 0


def test_risk_its_gradient_and_bounded_losses() -> None:
    model, (x, y) = network(dropout=0.5), data(50)
    objective = ModuleObjective(model, LOSS, regularizer=L2(0.1), micro_batch=16)
    records = objective.prepare((x, y))
    theta = objective.initial(records)
    model.eval()
    loss = LOSS(model(x), y)
    bounded = float(loss.detach().clamp(max=0.5).sum())
    assert objective.risk(records, theta) == pytest.approx(
        float(loss.detach().mean()) + 0.05 * norm(theta) ** 2, rel=1e-5
    )
    own = torch.cat([g.flatten() for g in torch.autograd.grad(loss.mean(), list(model.parameters()))])
    torch.testing.assert_close(objective.risk_gradient(records, theta), own + 0.1 * theta, rtol=1e-4, atol=1e-6)
    assert objective.loss_sum(Batch(records, None), theta, 0.5) == pytest.approx(bounded, rel=1e-4)
    assert model[2].training is False


class Pairs(Dataset[Any]):
    """A data set that reads one sample at a time, as files are read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index].numpy(), int(self.y[index])


def test_all_kinds_of_data_sets_give_the_same_model() -> None:
    x, y = data()
    results = [
        qt.fit(network(), LOSS, each, qg.DPSGD(steps=5, batch_size=50), budget=BUDGET, seed=1).params
        for each in (
            (x, y),
            (x.numpy(), y.numpy()),
            TensorDataset(x, y),
            Pairs(x, y),
            Subset(Pairs(x, y), range(400)),
        )
    ]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_progress_scores_and_early_stop(tmp_path: Path) -> None:
    x, y = data()
    model = network()
    seen: list[qt.Progress] = []
    result = qt.fit(
        model, LOSS, (x, y), qg.DPSGD(steps=40, batch_size=50), budget=BUDGET, every=10,
        evaluate=lambda m: {"accuracy": float((m(x).argmax(1) == y).float().mean())},
        callbacks=[
            seen.append, qt.CSVLog(tmp_path / "log.csv"), qt.CSVLog(tmp_path / "scores.csv", metrics=True)
        ],
        stop=lambda progress: progress.step == 30,
    )  # fmt: skip
    assert [progress.step for progress in seen] == [0, 10, 20, 30]
    epsilons = [progress.epsilon for progress in seen]
    assert epsilons == sorted(epsilons)  # type: ignore[type-var]
    assert result.stopped_by == "callback"
    assert result.privacy.epsilon == pytest.approx(3.0, rel=1e-2)  # what it saw may be private: all of it counts
    assert result.metrics == {
        "accuracy": seen[-1].metrics["accuracy"], "private": False, "computed_by": "evaluate, without noise"
    }  # fmt: skip
    assert (tmp_path / "scores.csv").read_text().startswith("step,epsilon,estimate_norm,accuracy\n")
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0] == "step,epsilon,estimate_norm"  # scores are data
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "10", "20", "30"]
    assert model.training


def test_fixed_noise_must_stay_within_the_budget() -> None:
    def fit(steps: int) -> qg.Result:
        algorithm = qg.DPSGD(steps=steps, batch_size=50)
        return qt.fit(network(), LOSS, data(), algorithm, budget=BUDGET, noise_multiplier=1.5, n_public=400)

    event = qg.events.poisson_gaussian(rate=50 / 400, noise_multiplier=1.5, steps=20)
    assert fit(20).privacy.epsilon == pytest.approx(qg.account(event, delta=1e-5, relation="add-remove"))
    with pytest.raises(BudgetError, match="above the budget of 3"):
        fit(400)


class Interrupted(Exception):
    pass


def interrupt_at(step: int) -> Any:
    def callback(progress: qt.Progress) -> None:
        if progress.step == step:
            raise Interrupted

    return callback


ALGORITHM = qg.DPSRM(steps=12, batch_size=60, gamma=0.3)


def interrupted(folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    monkeypatch.setattr("quietgrad.core.ledger.keys.fresh_key", lambda: key)
    with pytest.raises(Interrupted):
        qt.fit(
            model, LOSS, data(), ALGORITHM, budget=BUDGET, n_public=400, folder=folder,
            ledger=folder / "ledger.jsonl", checkpoint_seconds=0.0, callbacks=[interrupt_at(7)], every=1,
        )  # fmt: skip


def test_resume_refuses_another_model_and_half_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path, network(), monkeypatch)
    before = Ledger(tmp_path / "ledger.jsonl").entries()
    with pytest.raises(DataError, match="74 parameters"):
        qt.resume(network(width=9), LOSS, data(), ALGORITHM, folder=tmp_path)
    with pytest.raises(DataError, match="an interrupted run is kept here"):
        qt.fit(network(), LOSS, data(), ALGORITHM, budget=BUDGET, folder=tmp_path)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(DataError, match="not a readable checkpoint"):
        qt.resume(network(), LOSS, data(), ALGORITHM, folder=tmp_path)
    assert Ledger(tmp_path / "ledger.jsonl").entries() == before


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(6), 0


class Boxes(Dataset[Any]):
    """Samples that nothing can stack, compare or hash."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return {1, 2}, bytearray(3)


NAN = (torch.full((400, 6), float("nan")), data()[1])
BAD: dict[str, tuple[nn.Module, Any, Any, int, type[Exception]]] = {
    r"no length": (network(), LOSS, Stream(), 50, DataError),
    r"batch_size=401": (network(), LOSS, data(), 401, ValueError),
    r"could not be read": (network(), LOSS, Boxes(), 5, DataError),
    r"lengths \[3, 4\]": (network(), LOSS, (torch.zeros(3, 6), torch.zeros(4)), 2, DataError),
    r"not finite": (network(), LOSS, NAN, 50, DataError),
    r"empty": (network(), LOSS, Pairs(torch.zeros(0, 6), torch.zeros(0)), 1, DataError),
    r"trainable parameter": (network().requires_grad_(False), LOSS, data(), 50, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_nothing_is_spent(message: str, tmp_path: Path) -> None:
    model, loss, records, batch_size, error = BAD[message]
    with pytest.raises(error, match=message):
        qt.fit(
            model, loss, records, qg.DPSGD(steps=3, batch_size=batch_size), budget=BUDGET,
            ledger=tmp_path / "ledger.jsonl", n_public=400 if "batch_size" in message else None,
        )  # fmt: skip
    assert not (tmp_path / "ledger.jsonl").exists()
