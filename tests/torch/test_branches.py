"""Records that answer a question of the program apart are run apart: the sums are those of each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.one_record import each_record
from quietgrad.torch.networks.vectors import UnitAssignment
from tests.torch.autograd import KEY, gradients, grouped, in_passes_of, ruled, start, summed

RULES = [ClippingRule.gradient(0.7), ClippingRule.momentum(0.3, 0.7, 0.2)]
N = 16


class Asks(nn.Module):
    """Three layers, of which a record's own answers decide the use."""

    def __init__(self, program: Callable[[Asks, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.c(self.program(self, x))
        return output


def early(own: Asks, x: Tensor) -> Tensor:
    x = 2 * x if x[0, 0] > 0 else -x
    return torch.tanh(own.a(3 * x if x[0, 1] > 0 else x + 1))


def six_times(own: Asks, x: Tensor) -> Tensor:
    for place in range(6):
        x = 1.2 * x if x[0, place] > 0 else x + 0.1
    return torch.tanh(own.a(x))


def late(own: Asks, x: Tensor) -> Tensor:
    """Of an activation, so that a record may answer otherwise at the second point."""
    z = torch.tanh(own.a(x))
    z = own.b(z) if z[0, 0] > 0 else 2 * z
    return z.tanh() if z[0, 1] > 0 else z.sin()


def until(own: Asks, x: Tensor) -> Tensor:
    while x.norm() < 20:
        x = 2 * x + torch.tanh(own.a(x))
    return x.tanh()


def numbered(own: Asks, x: Tensor) -> Tensor:
    for _ in range(int(3 * x[0, 0].abs())):
        x = torch.tanh(own.a(x))
    return x


def own_number(own: Asks, x: Tensor) -> Tensor:
    return torch.tanh(own.a(x)) * float(x.abs().sum())


def own_activation(own: Asks, x: Tensor) -> Tensor:
    z = torch.tanh(own.a(x))
    return z * z.sum().item()


def compared(own: Asks, x: Tensor) -> Tensor:
    """torch.equal and allclose are questions as well, and so is a list."""
    if torch.equal(x.round(), x.round().abs()) or torch.allclose(x[:, :1], x[:, :1].abs()):
        x = own.b(x)
    return torch.tanh(own.a(x)) if x.sign().tolist()[0][0] > 0 else x


PROGRAMS = [early, six_times, late, until, numbered, own_number, own_activation, compared]


def loss(output: Tensor, y: Tensor) -> Tensor:
    return (output.sum() - y).square()


def made(program: Any, budget: float = 512e6, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    engine = PerExampleEngine(Asks(program).to(dtype), loss, memory_budget=budget)
    return engine, torch.randn(N, 6, dtype=dtype), torch.randn(N, dtype=dtype)


@pytest.mark.parametrize("budget", [512e6, 0.0])
@pytest.mark.parametrize("program", PROGRAMS)
def test_sums_are_those_of_records_one_at_a_time(program: Any, budget: float) -> None:
    engine, x, y = made(program, budget)
    points = start(engine, 0.3)
    rows = [gradients(engine, point, x, y) for point in points]
    for rule in RULES:
        expected = ruled(rule, rows[0], rows[1] if rule.beta else None)
        torch.testing.assert_close(summed(engine, points, grouped(x, y), rule), expected, rtol=1e-9, atol=1e-10)
    ids = np.arange(N) % 3  # everybody's records answer in several ways
    people = [torch.stack([each[ids == person].mean(0) for person in range(3)]) for each in rows]
    in_passes_of(engine, 7)
    found = summed(engine, points, grouped(x, y), RULES[1], UnitAssignment.of(ids, mean=True))
    torch.testing.assert_close(found, ruled(RULES[1], *people), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_record_moves_a_sum_by_its_own_part(program: Any) -> None:
    """Whatever the others answer: without the one that decides what most answer, the others contribute the same."""
    engine, x, y = made(program, dtype=torch.float32)
    x[5] *= 100
    objective = ModuleObjective(engine.module, loss)
    records = objective.prepare((x, y))
    theta = objective.initial(records)
    sums = []
    for rows in (range(N), [row for row in range(N) if row != 5]):
        sums.append(torch.zeros_like(theta, dtype=torch.float64))
        objective.add(Batch(records, np.array(rows), KEY), (theta,), ClippingRule.gradient(1.0), sums[-1])
    assert float((sums[0] - sums[1]).norm()) <= 1.0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("program", [early, late, own_number, own_activation])
def test_a_record_that_overflows_takes_away_its_own_part_alone(program: Any, poison: float) -> None:
    engine, x, y = made(program, dtype=torch.float32)
    theta, rest = start(engine), [row for row in range(N) if row != 3]
    expected, _ = ruled(RULES[0], gradients(engine, theta, x[rest], y[rest]))
    x[3] = poison
    found, norms = summed(engine, (theta,), grouped(x, y), RULES[0])
    if not norms[3].isfinite():
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert norms[rest].isfinite().all()
    assert float((found - expected).norm()) <= 0.7 * (1 + 1e-4)
    ids = np.arange(N) // 2
    _, norms = summed(engine, (theta,), grouped(x, y), RULES[0], UnitAssignment.of(ids, mean=False))
    assert norms[np.arange(N // 2) != 1].isfinite().all()


def test_records_of_nobody_s_way_are_not_in_a_pass() -> None:
    """Losses of records that are run apart come back in their places, also what the engine gives back to a loop."""
    engine, x, y = made(late)
    theta = start(engine)
    each = torch.stack([loss(engine.module(row[None]), target) for row, target in zip(x, y, strict=True)])
    torch.testing.assert_close(engine.losses(theta, grouped(x, y)), each.detach().flatten())
    rounded = each_record(lambda row: row.sum() if row.sum() > 0 else row.prod(), x[:, None])
    expected = torch.stack([row.sum() if row.sum() > 0 else row.prod() for row in x])
    torch.testing.assert_close(rounded, expected)


@pytest.mark.parametrize("program", [early, late, until])
def test_few_answers_are_few_passes(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of one way are run together: no record is run by itself."""
    engine, x, y = made(program)
    theta = start(engine)
    engine.try_out(grouped(x, y)[0].record)
    monkeypatch.setattr("quietgrad.torch.networks.one_record.RecordProgram.by_itself", None)
    x = x.sign() + 0.1 * torch.arange(1, 7)  # few ways
    found, _ = summed(engine, (theta,), grouped(x, y), RULES[0])
    torch.testing.assert_close(found, ruled(RULES[0], gradients(engine, theta, x, y))[0], rtol=1e-9, atol=1e-10)
