"""Randomness inside a query is each record's own: dropout, noise layers, augmentation, in every way of summing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.module import CompensatedSum, ModuleObjective
from quietgrad.torch.networks.randomness import PerRecordRNG, RecordSeeds

LOSS = nn.CrossEntropyLoss(reduction="none")
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


class Coin(nn.Module):
    """One coin for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if torch.rand(()) < 0.5 else x


class PythonCoin(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if random.random() < 0.5 else x * float(np.random.rand())  # noqa: NPY002


class DropConnect(nn.Module):
    """Dropout of a weight: no row of it belongs to an example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ F.dropout(self.weight, 0.5, self.training)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1) + torch.rand(x.shape, dtype=x.dtype)


class Poisson(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.poisson(x.abs())


RANDOM: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # whether records are run one at a time
    "dropout": (lambda: nn.Dropout(0.5), False),
    "in place": (lambda: nn.Dropout(0.5, inplace=True), False),
    "alpha dropout": (lambda: nn.AlphaDropout(0.3), False),
    "rrelu": (nn.RReLU, True),
    "noise": (Noise, False),
    "dropconnect": (DropConnect, False),
    "one coin": (Coin, False),  # each record's own, and records that fall apart are run apart
    "python's coin": (PythonCoin, False),  # of the release
    "poisson": (Poisson, True),
}


def objective_of(layer: nn.Module, n: int = 30, **more: Any) -> tuple[ModuleObjective, Any, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 2)).double()
    x = torch.randn(n, 6, dtype=torch.float64)
    objective = ModuleObjective(model, LOSS, **more)
    records = objective.prepare((x, (x[:, 0] > 0).long()))
    return objective, records, objective.initial(records)


def ask(
    objective: ModuleObjective, records: Any, theta: Tensor, indices: Any, rule: ClippingRule, key: bytes = KEY
) -> Tensor:
    out = torch.zeros_like(theta, dtype=torch.float64)
    points = (theta, theta - 0.01)
    objective.add(Batch(records, None if indices is None else np.array(indices), key), points, rule, out)
    return out


@pytest.mark.parametrize("name", RANDOM)
def test_what_a_record_contributes_depends_on_that_record_alone(name: str) -> None:
    """The sum is the sum of what the records contribute alone: in any batch, pass and order, at both points."""
    layer, alone = RANDOM[name]
    objective, records, theta = objective_of(layer(), n=12)
    (known,) = objective.engine.programs.values()
    assert (known.program.alone is not None) == alone, known.program.alone
    for rule in (ClippingRule.gradient(1.0), ClippingRule.momentum(0.3, 1.0, 0.05)):
        apart = [ask(objective, records, theta, [i], rule) for i in range(12)]
        assert max(float(v.norm()) for v in apart) <= rule.bound
        for indices, micro_batch in ((None, 1024), (range(11, -1, -1), 5), ([4, 7, 1], 1024), (range(1, 12), 5)):
            objective.micro_batch = micro_batch
            total = ask(objective, records, theta, indices, rule)
            chosen = range(12) if indices is None else indices
            torch.testing.assert_close(total, sum(apart[i] for i in chosen), rtol=1e-9, atol=1e-12)
    losses = [objective.loss_sum(Batch(records, np.array([i]), KEY), theta, 9.0) for i in range(12)]
    assert objective.loss_sum(Batch(records, None, KEY), theta, 9.0) == pytest.approx(sum(losses), rel=1e-9)


def test_masks_are_secret_and_fresh_in_every_release() -> None:
    objective, records, theta = objective_of(nn.Dropout(0.5))
    plan = qg.plan(qg.DPGD(steps=3), n=30, budget=qg.Budget(1.0, 1e-5))
    seen: list[bytes] = []
    session = CentralCurator(objective, records, seed=1).open(plan)
    for _ in range(3):
        key = session.batch(session.draw("gradient")).key
        assert key is not None
        seen.append(key)
    assert len(set(seen)) == 3
    sums = [ask(objective, records, theta, None, ClippingRule.gradient(1.0), key) for key in seen]
    assert float((sums[0] - sums[1]).norm()) > 0.1


def test_masks_have_the_right_law() -> None:
    """A mean of 10⁶ fair numbers is off by 5 standard errors in 6 of 10⁷ runs; so are the correlations."""
    words = RecordSeeds(KEY, np.arange(1000)).draws
    with PerRecordRNG(words, True, torch.device("cpu")):
        kept = F.dropout(torch.ones(1000, 1000), 0.3) > 0
        normal, uniform = torch.randn(1000, 1000), torch.rand(1000, 1000)
        exponential = torch.empty(1000, 1000).exponential_(2.0)
    assert abs(kept.double().mean() - 0.7) < 5 * (0.21 / 1e6) ** 0.5
    assert abs(normal.mean()) < 5e-3
    assert abs(normal.square().mean() - 1) < 5 * (2 / 1e6) ** 0.5
    assert abs(uniform.mean() - 0.5) < 5 * (1 / 12e6) ** 0.5
    assert float(uniform.min()) >= 0.0
    assert float(uniform.max()) < 1.0
    assert abs(exponential.mean() - 0.5) < 5 * 0.5e-3
    for a, b in ((normal, normal.roll(1, 0)), (normal, normal.roll(1, 1))):  # other records, other places
        assert abs((a * b).mean()) < 5e-3


class Augmented(Dataset[Any]):
    """Draws from all three generators, some records more often than others."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        x = self.x[i] + 0.1 * torch.randn(6) * random.random()
        for _ in range(i % 3):
            x = x * float(np.random.rand() + 0.5)  # noqa: NPY002
        return x, int(self.x[i, 0] > 0)


def test_augmentation_is_each_records_own() -> None:
    torch.manual_seed(1)
    objective = ModuleObjective(nn.Linear(6, 2), LOSS)
    records = objective.prepare(Augmented(torch.randn(20, 6)))
    theta = objective.initial(records)
    state = torch.get_rng_state(), random.getstate()
    whole = ask(objective, records, theta, None, ClippingRule.gradient(1.0))
    apart = sum(ask(objective, records, theta, [i], ClippingRule.gradient(1.0)) for i in range(20))
    torch.testing.assert_close(whole, apart, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(whole, ask(objective, records, theta, None, ClippingRule.gradient(1.0), bytes(32)))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


@pytest.mark.parametrize("alone", [False, True])
def test_a_generator_of_the_model_s_own_is_refused(alone: bool) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.as_tensor(x.detach().numpy()) if alone else x  # vmap cannot follow
            output: Tensor = self.layer(x * torch.rand(x.shape, generator=torch.Generator()))
            return output

    with pytest.raises(ValueError, match=r"torch\.Generator of the model's own"):
        ModuleObjective(Own(), LOSS).prepare((torch.randn(20, 6), torch.zeros(20, dtype=torch.int64)))


class Surprising(nn.Module):
    """Draws for one value only, which made-up examples never have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) if bool((x == 7.25).any()) else x


def test_a_draw_that_nobody_foresaw_is_still_each_records_own() -> None:
    torch.manual_seed(1)
    objective = ModuleObjective(nn.Sequential(Surprising(), nn.Linear(6, 2)).double(), LOSS)
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 2
    records = objective.prepare((x, y))
    theta = objective.initial(records)
    calm = ask(objective, records, theta, None, ClippingRule.gradient(0.1))
    x = x.clone()
    x[5] = 7.25
    wild = ask(objective, objective.prepare((x, y)), theta, None, ClippingRule.gradient(0.1))
    assert 0.0 < float((wild - calm).norm()) <= 0.2


@pytest.mark.parametrize("n", [100, 5000])
def test_one_record_more_changes_one_pass(n: int) -> None:
    """Passes are leaves of a tree on secret words: whoever leaves changes the leaf he was in."""
    keys = RecordSeeds(KEY, np.arange(n))
    most = 64
    passes = {tuple(keys.indices[rows]) for rows in keys.passes(most)}
    assert sorted(i for each in passes for i in each) == list(range(n))
    assert max(map(len, passes)) <= most
    for gone in (0, n // 2, n - 1):
        rest = RecordSeeds(KEY, np.delete(np.arange(n), gone))
        changed = {tuple(rest.indices[rows]) for rows in rest.passes(most)} ^ passes
        assert sum(gone in each for each in changed) == 1
        assert sum(len(each) for each in changed) <= 2 * most + 1


def test_no_pass_is_lost_in_a_long_sum() -> None:
    """In float32 a sum of 2²⁴ ones no longer grows; with compensation no term is lost."""
    for out in (torch.zeros(2, dtype=torch.float64), torch.zeros(2)):
        total = CompensatedSum(out)
        for number in (2.0**53, 1.0, 1.0, 1.0, -(2.0**53)):
            with total.term() as term:
                term += number
        total.finish()
        assert out.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("views", [1, 2])
def test_resume_draws_the_same_masks(views: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with dropout, augmentation and views, though the program has drawn other numbers in between."""
    key = bytes(range(32))
    monkeypatch.setattr("quietgrad.core.ledger.keys.fresh_key", lambda: key)
    torch.manual_seed(0)
    data, algorithm, budget = Augmented(torch.randn(60, 6)), qg.DPSRM(steps=6, batch_size=20), qg.Budget(3.0, 1e-5)

    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    class Stopped(Exception):
        pass

    def stop(progress: qt.Progress) -> None:
        if progress.step == 3:
            raise Stopped

    settings: dict[str, Any] = {"checkpoint_seconds": 0.0, "micro_batch": 8, "views": views}
    run, whole_run = {**settings, "folder": tmp_path / "run"}, {**settings, "folder": tmp_path / "whole"}
    with pytest.raises(Stopped):
        qt.fit(model(), LOSS, data, algorithm, budget=budget, n_public=60, callbacks=[stop], every=1, **run)
    random.seed(99)
    again = qt.resume(model(), LOSS, data, algorithm, **run)
    whole = qt.fit(model(), LOSS, data, algorithm, budget=budget, n_public=60, **whole_run)
    assert torch.equal(again.params, whole.params)
