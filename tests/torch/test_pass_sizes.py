"""How records are put together changes no bit of what comes of one, also in networks that expand rounding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks import one_record, pass_sizes
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.pass_sizes import REFERENCE, Layout, PassSizes, pass_size
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup

CE = nn.CrossEntropyLoss()
STEPS, WIDTH = 60, 24
ROOT = Path(__file__).parents[2]


class Expanding(nn.Module):
    """A recurrent network that about doubles a difference at every step of time."""

    def __init__(self, steps: int = STEPS) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.steps = steps
        with torch.no_grad():
            self.again.weight.normal_().mul_(3 / WIDTH**0.5)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.into(x))
        for _ in range(self.steps):
            hidden = torch.tanh(self.again(hidden))
        return self.out(hidden)


class Asks(Expanding):
    """Raises, branches or asks for a number of its own on some records: those are run apart."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        far = x[:, 0].abs().max()
        if self.what == "raises" and far > 100:
            raise ValueError("far away")
        if self.what == "branches" and far > 100:
            x = x / 100
        if self.what == "numbers" and far > 1:
            x = x * far.item()
        if self.what == "cannot be batched" and far > 100:
            x = x + torch.nonzero(x).sum()
        return super().forward(x)


def group(x: Tensor) -> RecordGroup:
    y = (x.sum(1) > 0).long()
    return RecordGroup(np.arange(len(x)), (x[:, None], y[:, None]))


def clipped_sum(engine: PerExampleEngine, theta: Tensor, x: Tensor, numbers: np.ndarray[Any, Any]) -> Tensor:
    out = torch.zeros(engine.dim, dtype=torch.float64)
    engine.add((theta,), [group(x)], ClippingRule.gradient(1.0), out, RecordSeeds(bytes(32), numbers))
    return out


def longest_move(module: nn.Module, x: Tensor, tries: int = 6, **settings: Any) -> float:
    """How far the clipped sum moves, in L2 norm, when one record leaves."""
    engine, everyone = PerExampleEngine(module, CE, **settings), np.arange(len(x))
    theta = engine.flatten(dict(module.named_parameters()))
    whole = clipped_sum(engine, theta, x, everyone)
    rest = (np.delete(everyone, who) for who in range(tries))
    return max(float((whole - clipped_sum(engine, theta, x[some], some)).norm()) for some in rest)


def records(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("count", [2, 5, 17, 70])
def test_one_record_moves_a_network_that_expands_rounding_by_c(count: int) -> None:
    torch.manual_seed(0)
    assert longest_move(Expanding(), records(count), min(count, 6)) <= 1.0


def test_without_fixed_sizes_it_would_move_further(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_size(self: PassSizes, count: int, most: int | None, trial: object) -> Layout:
        return Layout(count)

    monkeypatch.setattr(PassSizes, "fitting", any_size)
    torch.manual_seed(0)
    assert longest_move(Expanding(), records(2), 2) > 1.2


@pytest.mark.parametrize("what", ["raises", "branches", "numbers", "cannot be batched"])
def test_records_that_run_apart_leave_others_as_they_are(what: str) -> None:
    torch.manual_seed(0)
    x = records(20)
    x[0, 0] = 1000.0
    assert longest_move(Asks(what), x, 2) <= 1.0


@pytest.mark.parametrize("settings", [{"micro_batch": 3}, {"micro_batch": 1}, {"memory_budget": 0.0}])
def test_passes_of_limited_size(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert longest_move(Expanding(), records(9), 3, **settings) <= 1.0


def test_every_size_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    module, x = Expanding(), records(40)
    engine = PerExampleEngine(module, CE)
    theta = engine.flatten(dict(module.named_parameters()))
    losses = engine.losses(theta, [group(x)])
    for count in (1, 2, 3, 7, 16, 23, 40):
        where = torch.from_numpy(np.random.default_rng(count).permutation(40)[:count])
        assert torch.equal(engine.losses(theta, [group(x[where])]), losses[where])


def trial_of(bits: dict[tuple[int, int], Any]) -> Any:
    return lambda layout, rows, count: bits.get(layout, {0: b"same"})


OTHER = {0: b"other"}
AT_NO_PLACE = {(size, places): None for size in (2, 4, 8, REFERENCE, 72) for places in (1, 4, 16)}


@pytest.mark.parametrize(
    ("bits", "count", "most", "layout"),
    [
        ({}, 5, None, (5, 1)),
        ({}, 65, None, (72, 1)),
        ({(5, 1): OTHER}, 5, None, (8, 1)),
        ({(5, 1): OTHER, (8, 1): None}, 5, None, (REFERENCE, 1)),
        ({(72, 1): OTHER}, 65, None, (REFERENCE, 1)),
        ({}, 65, 70, (64, 1)),
        ({}, 65, 1, (1, 1)),
        (AT_NO_PLACE, 65, None, (1, 1)),
        ({(REFERENCE, 1): None}, 65, None, (72, 1)),
    ],
)
def test_a_layout_is_used_if_its_bits_are_those_of_the_reference(
    bits: dict[tuple[int, int], Any], count: int, most: int | None, layout: tuple[int, int]
) -> None:
    assert PassSizes().fitting(count, most, trial_of(bits)) == layout


@pytest.mark.parametrize(
    ("bits", "count", "most", "layout"),
    [
        ({}, 65, None, (72, 4)),
        ({}, 65, 140, (32, 4)),
        ({}, 65, 3, (1, 1)),
        ({(REFERENCE, 4): None, (3, 16): OTHER}, 3, None, (4, 16)),
    ],
)
def test_records_have_several_places_where_rows_are_rounded_by_their_alignment(
    bits: dict[tuple[int, int], Any], count: int, most: int | None, layout: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(pass_sizes, "rounds_rows_alike", lambda: False)
    assert PassSizes().fitting(count, most, trial_of(bits)) == layout


LATE = """
import torch, warnings
torch.ones(2, 2) @ torch.ones(2, 2)
import quietgrad.torch
from quietgrad.torch.networks.same_bits import rounds_rows_alike
from tests.torch.test_pass_sizes import odd_shapes
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert rounds_rows_alike() or any("Import quietgrad.torch first" in str(each.message) for each in caught)
odd_shapes(5, torch.float32)
odd_shapes(9, torch.float64)
"""


def test_products_before_the_import_are_noticed() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    subprocess.run([sys.executable, "-c", LATE], check=True, env=environment, cwd=ROOT)


def odd_shapes(features: int, dtype: torch.dtype) -> None:
    """A product with few columns may be rounded otherwise in every fourth or second row."""
    torch.manual_seed(0)
    hidden = features + 8
    module = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 7)).to(dtype)
    x = torch.randn(70, features, dtype=dtype)
    engine = PerExampleEngine(module, CE)
    theta = engine.flatten(dict(module.named_parameters()))
    losses = engine.losses(theta, [group(x)])
    for count in (1, 5, 33):
        assert torch.equal(engine.losses(theta, [group(x[-count:])]), losses[-count:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [5, 6, 8, 9, 23, 50])
def test_rows_are_rounded_alike_whatever_their_length(features: int, dtype: torch.dtype) -> None:
    odd_shapes(features, dtype)


def test_a_pass_has_at_most_an_eighth_more_places() -> None:
    sizes = [pass_size(count) for count in range(1, 3000)]
    assert all(count <= size <= 1.125 * count for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 80


@pytest.fixture
def rounding_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels round a record by its place: what torch could do and does not do here."""
    vmapped = one_record.RecordProgram._vmapped

    def shaken(self: one_record.RecordProgram, *args: Any, **kwargs: Any) -> one_record.Pass:
        made = vmapped(self, *args, **kwargs)
        with torch.enable_grad():
            made.outputs = made.outputs * (1 + 1e-6 * torch.arange(len(made.rows)))
        return made

    monkeypatch.setattr(one_record.RecordProgram, "_vmapped", shaken)


@pytest.mark.usefixtures("rounding_by_place")
def test_where_places_round_apart_each_record_has_a_pass_of_its_own() -> None:
    torch.manual_seed(0)
    module, x = Expanding(2), records(6)
    engine = PerExampleEngine(module, CE)
    theta = engine.flatten(dict(module.named_parameters()))
    clipped_sum(engine, theta, x, np.arange(6))
    (known,) = engine.programs.values()
    (sizes,) = known.program._sizes.values()
    assert sizes.fitting(6, None, trial_of({})) == (1, 1)  # nothing is tried again


def test_zeros_do_not_hide_the_order_of_additions() -> None:
    params = pass_sizes.without_zeros({"b": torch.zeros(3), "w": torch.ones(2)})
    assert (params["b"] != 0).all()
    assert torch.equal(params["w"], torch.ones(2))
