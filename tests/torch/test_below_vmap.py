# mypy: disable-error-code="no-untyped-call,assignment"
"""Code that torch would call below vmap, with the tensors of all records, and answers that look alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import QuietgradError
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import examples_of
from tests.torch.one_record.cases import CLASSES, FAR, FEATURES, Case, N, clipped_sum, moved, table

AT_MOST = 1.0001
HIDDEN = 4


class Mixes(TorchDispatchMode):
    """Scales by the sum of all that it sees."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * made.abs().sum() if func is torch.ops.aten.tanh.default else made


class MixesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * made.abs().sum() if func is torch.tanh else made


def mixed_when_saved(saved: Tensor) -> Tensor:
    return saved * (1.0 + saved.abs().sum())


class Subclass(Tensor):
    """A constant whose class sees what is below vmap."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Subclass:
        made: Subclass = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = [each.inner if isinstance(each, Subclass) else each for each in args]
        made = func(*plain, **(kwargs or {}))
        return made * (1.0 + made.abs().sum())


class Below(nn.Module):
    """A perceptron that does something to its hidden layer, inside of something."""

    def __init__(self, inside: Callable[[], Any] = nullcontext, change: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.inside, self.change = inside, change

    def forward(self, x: Tensor) -> Any:
        with self.inside():
            hidden = torch.tanh(self.first(x))
            hidden = hidden if self.change is None else self.change(hidden)
            return self.second(hidden)


def by_its_text(hidden: Tensor) -> Tensor:
    """All numbers that the text of a tensor shows."""
    digits = [float(part) for part in "".join(c if c in "0123456789.-" else " " for c in repr(hidden)).split()
              if part.strip(".-")]  # fmt: skip
    return hidden * math.cos(100.0 * sum(digits))


def unwrapped(hidden: Tensor) -> Tensor:
    inner: Tensor = hidden
    if torch._C._functorch.is_batchedtensor(hidden):
        inner = torch._C._functorch.get_unwrapped(hidden)
    return hidden * (1.0 + inner.detach().abs().sum())


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "a dispatch mode": lambda: Below(Mixes),
    "a function mode": lambda: Below(MixesFunctions),
    "hooks on saved tensors": lambda: Below(
        lambda: torch.autograd.graph.saved_tensors_hooks(mixed_when_saved, lambda saved: saved)
    ),
    "a tensor of another class": lambda: Below(change=partial(torch.mul, Subclass(torch.ones(HIDDEN)))),
    "the text of a tensor": lambda: Below(change=by_its_text),
    "internals of torch": lambda: Below(change=unwrapped),
    "another vmap": lambda: Below(change=lambda h: torch.func.vmap(lambda row: row * row.abs().sum())(h)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_sees_the_records_of_a_pass(name: str) -> None:
    by, _, _ = moved(Case(PROGRAMS[name]))
    assert by <= AT_MOST


def test_a_mode_around_the_whole_run_sees_one_record_at_a_time() -> None:
    def alone(rows: list[int]) -> Tensor:
        with Mixes():
            return clipped_sum(Case(Below), table(), rows)

    everyone = list(range(N))
    assert float((alone(everyone) - alone([row for row in everyone if row != FAR])).norm()) <= AT_MOST


# --- answers ----------------------------------------------------------------------------------------------------


class Turned(nn.Module):
    """Asks each record for a number whose sign of zero decides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        side = math.atan2(x[0, 0].item(), -1.0)  # π, or −π for negative zero
        return self.second(torch.tanh(self.first(x)) * side)


@pytest.mark.parametrize("n", [N, 4])
def test_negative_zero_answers_for_itself(n: int) -> None:
    data = table(n)
    data.tensors[0][:, 0] = 0.0
    data.tensors[0][0, 0] = -0.0
    torch.manual_seed(0)
    case = Case(Turned)
    whole, rest = clipped_sum(case, data, range(n)), clipped_sum(case, data, range(1, n))
    assert float((whole - rest).norm()) <= AT_MOST


class _Bits(nn.Module):
    """Asks each record for a NaN, and reads its bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        # A NaN of the record's own: the sign says which side it is on.
        made = torch.copysign(torch.full((), math.nan, dtype=torch.float64), x[0, 0].double())
        return self.first(x * math.copysign(1.0, made.item()))


def test_every_nan_answers_for_itself() -> None:
    by, _, _ = moved(Case(_Bits))
    assert by <= AT_MOST
    data = table(3)
    data.tensors[0][:, 0] = torch.tensor([-1.0, 1.0, 1.0])
    whole, rest = clipped_sum(Case(_Bits), data, range(3)), clipped_sum(Case(_Bits), data, range(1, 3))
    assert float((whole - rest).norm()) <= AT_MOST


class _Kinds(Dataset[Any]):
    """Records with a constant beside their tensor."""

    def __init__(self, constants: list[Any]) -> None:
        self.constants = constants

    def __len__(self) -> int:
        return len(self.constants)

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(2), "kind": self.constants[index]}


@pytest.mark.parametrize("constants", [[0.0, -0.0], [1, True], [1, 1.0], [(1,), [1]], [{1: 2}, {True: 2}]])
def test_constants_that_are_equal_and_differ_are_in_groups_of_their_own(constants: list[Any]) -> None:
    examples = examples_of(_Kinds(constants), 1, collate=lambda records: records[0])
    groups = examples.read(RecordSeeds(bytes(32), np.arange(2)))
    assert [repr(group.record["kind"]) for group in groups] == [repr(constant) for constant in constants]


# --- exceptions -------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    """Raises an exception on records that are far away: in forward, or on the way back."""

    def __init__(self, where: str, kind: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.where, self.kind = where, kind

    def forward(self, x: Tensor) -> Any:
        far = bool(x.abs().max() > 100)
        if far and self.where == "forward":
            raise self.kind(f"{x.tolist()}")
        hidden = torch.tanh(self.first(x))
        if far and self.where == "shape":
            hidden = hidden.repeat(2, 1)
        if far and self.where == "back":
            hidden.register_hook(self._fail)
        return self.second(hidden)

    def _fail(self, grad: Tensor) -> None:
        raise self.kind("on the way back")


def looked_up() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(3, CLASSES))


@pytest.mark.parametrize("where", ["forward", "shape", "back"])
def test_a_record_that_raises_counts_as_zero(where: str) -> None:
    case = Case(lambda: Fails(where))
    by, whole, _ = moved(case)
    assert by <= 1e-6  # others have the same bits, and are added up in other passes
    assert whole.norm() > 1.0


def test_an_index_out_of_range_counts_as_zero() -> None:
    x = torch.arange(20).remainder(5).reshape(20, 1)
    x[7] = 9
    data = torch.utils.data.TensorDataset(x, torch.arange(20) % CLASSES)
    rows = list(range(20))
    whole = clipped_sum(Case(looked_up), data, rows)
    rest = clipped_sum(Case(looked_up), data, [row for row in rows if row != 7])
    assert float((whole - rest).norm()) <= 1e-5  # the others are rounded otherwise one by one


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_what_is_not_the_record_s_ends_the_run(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        clipped_sum(Case(lambda: Fails("forward", kind)), table(), range(N))


def test_a_record_cannot_end_the_run_by_leaving_it() -> None:
    """``sys.exit`` in a model or a loss is an exception of its record like any other."""
    assert torch.isfinite(clipped_sum(Case(lambda: Fails("forward", SystemExit)), table(), range(N))).all()


def test_errors_raise_is_for_public_data() -> None:
    data = table()
    method = qg.DPSGD(steps=1, batch_size=N, learning_rate=1.0, clip=1.0)
    with pytest.raises(ValueError, match="public data"):
        qt.fit(Fails("forward"), nn.CrossEntropyLoss(), data, method, budget=qg.Budget(1.0, 1e-5), errors="raise")
    with pytest.raises(QuietgradError, match="ValueError") as told:
        qt.fit(Fails("forward"), nn.CrossEntropyLoss(), data, method, budget=None, errors="raise", progress=False)
    assert "1000" not in str(told.value)
    done = qt.fit(Fails("forward"), nn.CrossEntropyLoss(), data, method, budget=None, progress=False)
    assert done.params.isfinite().all()


def test_a_sum_says_which_record_raised() -> None:
    x, y = table().tensors
    _, norms = qt.clipped_gradient_sum(Fails("forward"), nn.CrossEntropyLoss(), (x, y), 1.0)
    assert norms.isnan().nonzero().flatten().tolist() == [FAR]
    with pytest.raises(QuietgradError, match="one record"):
        qt.clipped_gradient_sum(Fails("forward"), nn.CrossEntropyLoss(), (x, y), 1.0, errors="raise")


def test_a_program_that_raises_on_synthetic_records_is_refused() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("always")

    with pytest.raises(QuietgradError, match="one record"):
        clipped_sum(Case(lambda: Broken(FEATURES, CLASSES)), table(), range(N))


@pytest.mark.filterwarnings("ignore:seed=0")
@pytest.mark.parametrize("fails", ["model", "criterion"])
def test_a_loop_goes_on_over_a_record_that_raises(fails: str) -> None:
    def criterion(output: Tensor, y: Tensor) -> Tensor:
        if fails == "criterion" and bool(y == 2):
            raise ValueError("far")
        return nn.functional.cross_entropy(output, y)

    model = Fails("forward" if fails == "model" else "nowhere")
    private, optimizer, loader, loss = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), criterion=criterion, seed=0,
        data_loader=torch.utils.data.DataLoader(table(), batch_size=N), noise_multiplier=1e-7, max_grad_norm=1.0,
    )  # fmt: skip
    before = model.second.weight.detach().clone()
    for x, y in loader:
        optimizer.zero_grad()
        loss(private(x), y).backward()
        optimizer.step()
    assert loader.loop.condition is None
    assert model.second.weight.isfinite().all()
    assert not torch.equal(before, model.second.weight)
