"""Brute force: one record more or less moves a clipped sum by at most C, whatever models, losses and data sets do.

Each sum is the one that is released, before noise, on 100 rows of which one is far away (fewer where a row is an
image or a text). It must also be what plain autograd makes of the records one at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset, default_collate

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import QuietgradError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.torch.networks.module import ModuleObjective
from tests.torch.one_record.cases import (
    CLASSES,
    CLIP,
    FAR,
    FEATURES,
    KEY,
    Case,
    Texts,
    by_autograd,
    clipped_sum,
    moved,
    table,
)  # fmt: skip
from tests.torch.one_record.losses import LOSSES, contrastive, mined, plain, triplet
from tests.torch.one_record.modules import MIXING, MODULES, REMEMBERING, STATEFUL, Between, Mean

AT_MOST = 1.0001
CASES = {**MODULES, **{f"loss: {name}": case for name, case in LOSSES.items()}}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch itself, in forward mode
@pytest.mark.parametrize("name", CASES)
def test_one_record_moves_a_sum_by_at_most_c(name: str) -> None:
    case = CASES[name]
    by, whole, data = moved(case)
    assert by <= AT_MOST
    if not case.random:
        expected = by_autograd(case, data, range(len(data)))
        assert float((whole - expected).norm()) <= case.rtol * max(1.0, float(expected.norm()))


@pytest.mark.parametrize("name", STATEFUL)
def test_what_keeps_something_stays_within_c_or_is_refused(name: str) -> None:
    case = STATEFUL[name]
    try:
        by, _, _ = moved(case)
    except (QuietgradError, ValueError) as error:
        by, said = 0.0, str(error)
    else:
        said = "."
    assert by <= AT_MOST
    assert said.endswith(".")
    assert "1000" not in said


def test_what_needs_a_second_record_is_told_so() -> None:
    with pytest.raises(QuietgradError, match="one record"):
        clipped_sum(Case(plain, loss=triplet), table(), range(20))
    with pytest.raises(ValueError, match="statistics across the batch"):
        clipped_sum(Case(lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))), table(), range(20))
    # over one record there is nothing to contrast: it learns nothing, and tells nothing
    assert not clipped_sum(Case(plain, loss=contrastive), table(), range(20)).any()


# --- data sets and collate functions ----------------------------------------------------------------------------


def to_the_longest(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return pad_sequence([s[0] for s in samples], batch_first=True), torch.tensor([s[1] for s in samples])


def sorted_by_length(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return to_the_longest(sorted(samples, key=lambda sample: -len(sample[0])))


def with_mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = to_the_longest(samples)
    return x.float().lerp(x.flip(0).float(), 0.5).long(), y


def measured(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = to_the_longest(samples)
    return x % (1 + int(x.max())), (y + len(samples)) % CLASSES


COLLATES = [to_the_longest, sorted_by_length, with_mixup, measured]


@pytest.mark.parametrize("pad", [None, qt.Padding(24), qt.Padding(qt.Multiple(8))])
@pytest.mark.parametrize("collate", COLLATES)
def test_a_collate_function_sees_one_record(collate: Any, pad: Any) -> None:
    seen: list[int] = []

    def watched(samples: list[Any]) -> Any:
        seen.append(len(samples))
        return collate(samples)

    case = Case(Mean, lambda: Texts(60), settings={"collate_fn": watched, "pad": pad})
    by, whole, data = moved(case)
    assert by <= AT_MOST
    assert set(seen) == {1}
    expected = by_autograd(case, data, range(60))
    assert float((whole - expected).norm()) <= 1e-4 * float(expected.norm())


# --- two points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minus the mean of the batch", "sorted across the batch", "std().item()"])
def test_differences_of_two_points_are_bounded_too(name: str) -> None:
    objective = ModuleObjective(Between(MIXING[name]), nn.CrossEntropyLoss())
    data = table()
    examples: Any = objective.prepare(data)
    now = objective.initial(examples)
    before = now + 0.05 * torch.randn(len(now), generator=torch.Generator().manual_seed(1))

    def difference(rows: list[int]) -> Tensor:
        out = torch.zeros(len(now), dtype=torch.float64)
        objective.add(
            Batch(examples, torch.tensor(rows).numpy(), KEY), (now, before), ClippingRule.difference(0.1), out
        )
        return out

    everyone = list(range(len(data)))
    assert float((difference(everyone) - difference(everyone[:FAR] + everyone[FAR + 1 :])).norm()) <= 0.1 * AT_MOST


# --- the same through the front ends ----------------------------------------------------------------------------

QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable
Front = Callable[[nn.Module, Any, Any], Tensor]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().double().flatten() for param in model.parameters()])


def by_fit(model: nn.Module, loss: Any, data: Any, **settings: Any) -> Tensor:
    before = vector(model)
    method = qg.DPSGD(steps=1, batch_size=len(data), learning_rate=1.0, clip=CLIP)
    qt.fit(
        model, loss, data, method, budget=None, progress=False, **settings,
    )  # fmt: skip
    return (before - vector(model)) * len(data)


def by_loop(model: nn.Module, loss: Any, data: Any, **settings: Any) -> Tensor:
    before = vector(model)
    loop = qt.PrivateLoop(
        model, loss, data, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=QUIET, steps=1,
        batch_size=len(data), max_grad_norm=CLIP, seed=0, **settings,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    assert loop.condition is None
    return (before - vector(model)) * len(data)


def by_verbs(model: nn.Module, loss: Any, data: Any, collate_fn: Any = None) -> Tensor:
    """A criterion that is given is asked of one record."""
    before = vector(model)
    private, optimizer, loader, criterion = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), criterion=loss, seed=0,
        data_loader=DataLoader(data, batch_size=len(data), collate_fn=collate_fn), noise_multiplier=QUIET,
        max_grad_norm=CLIP,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(private(x), y).backward()
        optimizer.step()
    assert loader.loop.condition is None
    return (before - vector(model)) * len(data)


def by_sum(model: nn.Module, loss: Any, data: Any) -> Tensor:
    sums, _ = qt.clipped_gradient_sum(model, loss, default_collate([data[k] for k in range(len(data))]), CLIP)
    return torch.cat([value.double().flatten() for value in sums.values()])


ATTACKS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any], dict[str, Any]]] = {
    "padding to the longest": (Mean, nn.CrossEntropyLoss(), Texts, {"collate_fn": to_the_longest}),
    "rows silence each other": (plain, mined, table, {}),
    "the largest": (plain, LOSSES["the largest"].loss, table, {}),
    "std().item()": (plain, LOSSES["outputs over their std"].loss, table, {}),
    "loss.item()": (plain, LOSSES["divided by its own value"].loss, table, {}),
    "standardised targets": (plain, LOSSES["targets standardised"].loss, table, {}),
    "number of chunks": (plain, LOSSES["divided by the number of chunks"].loss, table, {}),
    "a scripted mean": (lambda: Between(MIXING["a scripted mean"]), nn.CrossEntropyLoss(), table, {}),
    "vmap of a mean": (lambda: Between(MIXING["vmap of a mean"]), nn.CrossEntropyLoss(), table, {}),
    "above 512 rows": (
        lambda: Between(MIXING["mixing above 512 rows"]), nn.CrossEntropyLoss(), lambda: table(1001), {}
    ),
}  # fmt: skip


def without(data: Any, row: int) -> Any:
    return torch.utils.data.Subset(data, [k for k in range(len(data)) if k != row])


@pytest.mark.filterwarnings("ignore:seed=0")
@pytest.mark.parametrize(
    ("front", "name"),
    [(front, name) for front in (by_fit, by_loop) for name in ATTACKS]
    + [(by_verbs, name) for name in ATTACKS if name != "number of chunks"]
    + [(by_sum, name) for name, attack in ATTACKS.items() if not attack[3]],  # a batch of tensors is padded already
)
def test_attacks_of_batches_come_to_nothing(front: Any, name: str) -> None:
    model, loss, records, settings = ATTACKS[name]
    torch.manual_seed(0)
    made, data = model().state_dict(), records()

    def released(data: Any) -> Tensor:
        fresh = model()
        fresh.load_state_dict(made)
        summed: Tensor = front(fresh, loss, data, **settings)
        return summed

    by = released(data) - released(without(data, FAR))
    assert float(by.norm()) <= AT_MOST * CLIP + 1e-3


@pytest.mark.parametrize("name", REMEMBERING)
def test_tensors_kept_for_the_next_record_are_gone(name: str) -> None:
    by, _, _ = moved(REMEMBERING[name])
    assert by <= AT_MOST


def _alive() -> int:
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


class _EveryKind(nn.Module):
    """A layer of each kind of site: kernels, scales, recurrent states, copies and derived parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.lstm, self.image = nn.LSTM(4, 4, batch_first=True), nn.Conv1d(4, 4, 3, padding=1)
        self.groups, self.attention = nn.GroupNorm(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale, self.last = nn.Parameter(torch.ones(4)), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.norm(self.table(tokens)))
        x = self.groups(self.image(x.mT)).mT * torch.exp(self.scale)
        x, _ = self.attention(x, x, x, need_weights=False)
        made: Tensor = self.last(x.mean(1))
        return made


@pytest.mark.parametrize("face", ["loop", "verbs"])
def test_a_step_keeps_no_tensor_of_the_step_before(face: str) -> None:
    model, x, y = _EveryKind(), torch.randint(0, 9, (40, 5)), torch.randint(0, 3, (40,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if face == "loop":
        loop = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), (x, y), optimizer=optimizer, noise_multiplier=1.0, batch_size=20,
            max_grad_norm=1.0, steps=100,
        )  # fmt: skip
        batches = iter(loop)

        def step() -> None:
            loop.step(next(batches))
    else:
        private, optimizer, loader, criterion = qt.make_private(
            module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
            noise_multiplier=1.0, max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(),
        )  # fmt: skip
        samples = (batch for _ in range(100) for batch in loader)

        def step() -> None:
            inputs, labels = next(samples)
            optimizer.zero_grad()
            criterion(private(inputs), labels).backward()
            optimizer.step()

    step()
    step()
    gc.collect()
    gc.disable()  # reference counts alone must free what a step made
    try:
        before = _alive()
        for _ in range(3):
            step()
        assert _alive() - before <= 8  # a sample in hand may hold some more than another
    finally:
        gc.enable()
