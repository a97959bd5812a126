"""Several views of a record: its contribution is the clipped mean of their gradients, by brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UserLevelObjective
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.randomness import RecordSeeds

LOSS = nn.CrossEntropyLoss(reduction="none")
KEY = bytes(range(32))
VIEWS, CLIP = 3, 2.0


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


class Shifted(Dataset[Any]):
    """Records that are moved by noise whenever they are read."""

    def __init__(self, x: Tensor, y: Tensor, much: float = 1.0) -> None:
        self.x, self.y, self.much = x, y, much

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i] + self.much * torch.randn(self.x.shape[1]), self.y[i]


def made(n: int = 7, much: float = 1.0) -> tuple[Shifted, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.4 if much else 0.0), nn.Linear(6, 3))
    return Shifted(2.0 * torch.randn(n, 5), torch.randint(0, 3, (n,)), much), model


def gradient(objective: ModuleObjective, data: Any, theta: Tensor, record: int, view: int) -> Tensor:
    """What one view of one record says, unclipped, from an engine that knows of no views."""
    keys = RecordSeeds(KEY, np.array([record]), np.array([VIEWS * record + view]))
    out = torch.zeros_like(theta, dtype=torch.float64)
    objective.engine.add((theta,), objective.prepare(data).read(keys), ClippingRule.gradient(1e6), out, keys)
    return out


def clipped(vector: Tensor, clip: float = CLIP) -> Tensor:
    return vector * min(1.0, clip / float(vector.norm()))


def total(objective: Any, records: Any, indices: Any, points: tuple[Tensor, ...], rule: ClippingRule) -> Tensor:
    out = torch.zeros_like(points[0], dtype=torch.float64)
    objective.add(Batch(records, indices, KEY), points, rule, out)
    return out


@pytest.mark.parametrize("micro_batch", [2, 4, None])
def test_a_record_counts_with_the_clipped_mean_of_its_views(micro_batch: int | None) -> None:
    data, model = made()
    plain = ModuleObjective(model, LOSS)
    objective = ModuleObjective(model, LOSS, views=VIEWS, micro_batch=micro_batch)
    records = objective.prepare(data)
    theta = objective.initial(records)
    each = [
        torch.stack([gradient(plain, data, theta, i, j) for j in range(VIEWS)]) for i in range(len(data))
    ]  # fmt: skip
    assert all((g[0] - g[1]).norm() > 1e-3 for g in each)  # views differ
    assert any(g.mean(0).norm() > CLIP for g in each)
    assert any(g.mean(0).norm() < CLIP for g in each)
    expected = sum(clipped(g.mean(0)) for g in each)
    found = total(objective, records, None, (theta,), ClippingRule.gradient(CLIP))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    # Someone else's absence changes nothing of the others.
    kept = np.array([0, 1, 3, 4, 5, 6])
    without = total(objective, records, kept, (theta,), ClippingRule.gradient(CLIP))
    torch.testing.assert_close(found - without, clipped(each[2].mean(0)), rtol=1e-4, atol=1e-5)
    assert float((found - without).norm()) <= CLIP + 1e-6


def test_two_points_see_the_same_views() -> None:
    data, model = made()
    plain, objective = ModuleObjective(model, LOSS), ModuleObjective(model, LOSS, views=VIEWS)
    records = objective.prepare(data)
    theta = objective.initial(records)
    before = theta + 0.1 * torch.randn(theta.shape, generator=torch.Generator().manual_seed(1))
    rule = ClippingRule.momentum(0.3, CLIP, 0.2)
    alpha, beta, first, gamma, second = rule.numbers
    expected = torch.zeros_like(theta, dtype=torch.float64)
    for i in range(len(data)):
        now, then = (
            torch.stack([gradient(plain, data, point, i, j) for j in range(VIEWS)]).mean(0)
            for point in (theta, before)
        )
        expected += alpha * clipped(now - beta * then, first) + gamma * clipped(now, second)
    found = total(objective, records, None, (theta, before), rule)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_views_of_people_s_records(combine: Any) -> None:
    data, model = made()
    plain, objective = ModuleObjective(model, LOSS), ModuleObjective(model, LOSS, views=VIEWS)
    asked = UserLevelObjective(objective, PersonRule(combine))
    records = asked.prepare(RecordsWithIds(data, [0, 0, 1, 2, 2, 2, 1]))
    rows: Any = records.rows
    theta = objective.initial(rows)
    expected = torch.zeros_like(theta, dtype=torch.float64)
    for rows in ((0, 1), (2, 6), (3, 4, 5)):
        means = [torch.stack([gradient(plain, data, theta, i, j) for j in range(VIEWS)]).mean(0) for i in rows]
        whole = torch.stack(means)
        expected += clipped(whole.mean(0) if combine == "mean" else whole.sum(0))
    found = total(asked, records, None, (theta,), ClippingRule.gradient(CLIP))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fit_takes_views_at_no_cost() -> None:
    fits = []
    for views in (2, 2, 3):
        data, model = made(60)
        method = qg.DPSGD(steps=4, batch_size=12)
        fits.append(qt.fit(model, LOSS, data, method, budget=qg.Budget(2.0, 1e-5), views=views, seed=5))
    assert torch.equal(fits[0].params, fits[1].params)
    assert not torch.equal(fits[0].params, fits[2].params)
    assert fits[0].privacy.epsilon == fits[2].privacy.epsilon
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="views"):
            ModuleObjective(model, LOSS, views=wrong)  # type: ignore[arg-type]
