"""What a program keeps of a record is not there for the next one, and not in the model afterwards."""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import operator
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quietgrad.torch as qt
from quietgrad.torch.networks.containers import Members
from tests.torch.one_record.cases import CLASSES, CLIP, FAR, FEATURES, Case, by_autograd, clipped_sum, moved, table
from tests.torch.one_record.keeping import MEMORIES, WHOLE_MODULES, Keeps
from tests.torch.one_record.modules import Between
from tests.torch.test_one_record import by_fit, by_loop, by_verbs, without

AT_MOST = 1.0001
FRONTS: dict[str, Any] = {"fit": by_fit, "loop": by_loop, "verbs": by_verbs}
PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Keeps, make) for name, make in MEMORIES.items()},
    **WHOLE_MODULES,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_next_record_finds_nothing_of_the_last(name: str) -> None:
    by, _, _ = moved(Case(PROGRAMS[name], table))
    assert by <= AT_MOST


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "a context variable"])
def test_nothing_of_a_record_stays_in_the_model(name: str) -> None:
    make, probe = PROGRAMS[name], torch.ones(1, FEATURES)

    def answer(rows: int) -> Tensor:
        torch.manual_seed(0)
        model = make()
        if rows:
            clipped_sum(Case(make), table(), range(rows), model)
        answered: Tensor = model(probe).detach()
        return answered

    assert torch.equal(answer(0), answer(20))


def _remembering_criterion() -> Any:
    """A criterion that is turned by the losses before."""
    seen: list[float] = []

    def criterion(output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(output, y)
        seen.append(loss.item())
        return loss * math.cos(sum(seen))

    return criterion


@pytest.mark.filterwarnings("ignore:seed=0")
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", ["a deque", "a trained parameter", *WHOLE_MODULES, "a criterion"])
def test_no_front_end_hands_on_what_a_record_left(name: str, front: str) -> None:
    torch.manual_seed(0)
    make = PROGRAMS.get(name, Between)
    start = make().state_dict()

    def released(data: Any) -> Tensor:
        model = make()
        model.load_state_dict(start)
        summed: Tensor = FRONTS[front](
            model, _remembering_criterion() if name == "a criterion" else nn.CrossEntropyLoss(), data
        )
        return summed

    data = table()
    assert float((released(data) - released(without(data, FAR))).norm()) <= AT_MOST * CLIP + 1e-3


# --- sound programs are not refused -----------------------------------------------------------------------------

LOG = logging.getLogger(__name__)
MASK = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
NOTHING = object()


@dataclass(frozen=True)
class Config:
    scale: float = 2.0
    names: tuple[str, ...] = ("a", "b")


class Sound(nn.Module):
    """Constants, settings, a log, a lock, a file, a compiled expression, a sentinel, a table of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.config, self.log, self.lock = Config(), LOG, threading.Lock()
        self.pattern, self.out, self.path = re.compile("a+"), sys.stdout, Path("x")
        self.constants: dict[str, Any] = {"mask": torch.ones(4), "array": np.arange(4.0)}
        self.bends: dict[str, Any] = {"tanh": torch.tanh, "relu": F.relu, "own": lambda x: x * MASK[1].sum()}
        self.pick, self.missing, self.kind = operator.itemgetter(0), NOTHING, Color.RED
        self.pool = ThreadPoolExecutor(1)

    def forward(self, x: Tensor) -> Any:
        LOG.debug("one record")
        with self.lock:
            hidden = self.bends["tanh"](self.first(x)) * self.constants["mask"] * self.config.scale
        if self.missing is NOTHING and self.kind is Color.RED and self.pattern.match("aa"):
            hidden = self.bends["own"](hidden) + torch.from_numpy(self.constants["array"]).to(hidden)
        return self.second(hidden)


class Color(enum.Enum):
    RED = 1


def test_a_sound_program_runs_together_as_autograd_says() -> None:
    case = Case(Sound)
    by, whole, data = moved(case)
    assert by <= AT_MOST
    expected = by_autograd(case, data, range(len(data)))
    assert float((whole - expected).norm()) <= 1e-4 * float(expected.norm())
    found = qt.explain(Sound(), data.tensors, nn.CrossEntropyLoss())
    assert [part.how for part in found.parts] == ["kernel", "kernel"]


def test_what_can_be_neither_put_back_nor_copied_is_refused_by_its_type() -> None:
    steps = (float(k) for k in range(1000))

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) * next(steps)

    with pytest.raises(ValueError, match=r"holds a builtins\.generator.*No privacy budget was spent"):
        clipped_sum(Case(Between, loss=loss), table(), range(3))
    assert next(steps) == 0.0  # not even a synthetic record met it


def test_what_the_user_changes_between_releases_counts() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model, (x, y) = Scaled(FEATURES, CLASSES), table().tensors

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return output.sum()

    _, before = qt.clipped_gradient_sum(model, loss, (x, y), 1.0)
    model.scale = 3.0
    _, after = qt.clipped_gradient_sum(model, loss, (x, y), 1.0)
    assert torch.allclose(after, 3.0 * before)
    assert model.scale == 3.0


def test_a_view_that_the_user_took_before_stays_readable() -> None:
    """A program writes into a plain tensor; the memory that an array of the user's points to is not freed."""
    torch.manual_seed(0)
    model: Any = PROGRAMS["a tensor in a tuple"]()
    store = model.memory_store = torch.zeros(1 << 16)
    view = store.numpy()

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        model.memory_store[0] += float(x.sum())
        return F.cross_entropy(model(x), y)

    x, y = torch.randn(6, FEATURES), torch.zeros(6, dtype=torch.int64)
    for _ in range(3):
        qt.clipped_gradient_sum(model, loss, (x, y), clip=1.0)
        assert float(model.memory_store[0]) == 0.0
        assert not view.any()


class _Remembering(TorchFunctionMode):
    """Turns what a layer gives by what went into layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function is not F.linear:
            return out
        self.seen.append(float(args[0].abs().sum()))
        return out * math.cos(sum(self.seen))


@pytest.mark.parametrize("where", ["a global hook", "a mode"])
def test_code_of_the_user_s_around_the_program_finds_nothing_of_another_record(where: str) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2), 2 * torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)
    seen: list[float] = []

    def hook(*call: Any) -> Any:
        _, given, out = call
        seen.append(float(given[0].abs().sum()))
        return out * math.cos(sum(seen))

    mode = _Remembering()
    with contextlib.ExitStack() as stack:
        if where == "a mode":
            stack.enter_context(mode)
        else:
            stack.callback(nn.modules.module.register_module_forward_hook(hook).remove)
        whole, _ = qt.clipped_gradient_sum(model, F.cross_entropy, (x, y), clip=1.0)
        rest, _ = qt.clipped_gradient_sum(model, F.cross_entropy, (x[1:], y[1:]), clip=1.0)
    assert float(torch.cat([(whole[name] - rest[name]).flatten() for name in whole]).norm()) <= AT_MOST
    assert not seen
    assert not mode.seen


def test_a_set_has_the_table_of_the_beginning_even_if_its_order_is_the_same() -> None:
    """Members that came and went decide where later ones lie, and so the order of all."""
    held = {0, 1, 2, 3}
    members, size = Members(held), sys.getsizeof(held)
    held.update(range(4, 200))
    held.difference_update(range(4, 200))
    assert sys.getsizeof(held) > size
    assert members.same()
    assert (list(held), sys.getsizeof(held)) == ([0, 1, 2, 3], size)
