"""State that constructors and destructors of a program reach, memory it resizes, and objects it may hold."""

from __future__ import annotations

import csv
import dataclasses
import gc
import io
import itertools
import math
import sqlite3
import weakref
from collections import UserList
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import polars
import pytest
import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from quietgrad.torch.clipped_sums import clipped_gradient_sum
from quietgrad.torch.networks.constructors import Sentry
from quietgrad.torch.networks.program_state import ProgramState
from tests.torch.one_record.cases import CLASSES, FEATURES, Case, by_autograd, clipped_sum, moved, table
from tests.torch.one_record.keeping import Keeps, Memory

LOG: list[float] = []
DATABASE = sqlite3.connect(":memory:", check_same_thread=False)


class Writes:
    """Its constructor writes into a global that nothing else names."""

    def __init__(self, number: float = 0.0) -> None:
        LOG.append(number)
        self.all = sum(LOG)

    @classmethod
    def another(cls, number: float) -> Writes:
        return cls(number)


class WritesText:
    def __repr__(self) -> str:
        LOG.append(self.number)
        return str(sum(LOG))

    number = 0.0


class Meta(type):
    def __call__(cls, *args: float) -> Any:
        LOG.extend(args)
        made = super().__call__()
        made.all = sum(LOG)
        return made


class OfMeta(metaclass=Meta):
    all = 0.0


@dataclasses.dataclass
class Replaced:
    number: float = 0.0
    all: float = 0.0

    def __new__(cls, number: float = 0.0, all: float = 0.0) -> Replaced:
        LOG.append(number)
        made = super().__new__(cls)
        return made

    def total(self) -> float:
        return len(LOG) + self.number


def _text(held: WritesText, number: float) -> float:
    held.number = number
    return float(f"{held!r}")


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any, float], float]]] = {
    "type(obj)(v)": (Writes, lambda held, number: float(type(held)(number).all)),
    "obj.__class__(v)": (Writes, lambda held, number: float(held.__class__(number).all)),
    "obj.__init__(v)": (Writes, lambda held, number: held.__init__(number) or held.all),
    "a class method": (Writes, lambda held, number: held.another(number).all),
    "a text of an object": (WritesText, _text),
    "a metaclass": (OfMeta, lambda held, number: float(type(held)(number).all)),
    "dataclasses.replace": (Replaced, lambda held, number: dataclasses.replace(held, number=number).total()),
}


class Dropped:
    """Its destructor writes into a global."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __del__(self) -> None:
        LOG.append(self.number)


def _attribute(held: Any, number: float) -> float:
    held.last = Dropped(number)
    return sum(LOG)


def _cycle(held: Any, number: float) -> float:
    made = Dropped(number)
    made.itself = made  # type: ignore[attr-defined]
    return sum(LOG)


def _finalize(held: Any, number: float) -> float:
    held.last = Thing()
    weakref.finalize(held.last, LOG.append, number).atexit = False
    return sum(LOG)


def _generator(held: Any, number: float) -> float:
    def suspended() -> Iterator[int]:
        try:
            yield 1
        finally:
            LOG.append(number)

    held.last = suspended()
    next(held.last)
    return sum(LOG)


class Chain:
    """Its destructor leaves another object, whose destructor writes."""

    def __init__(self, held: Any, number: float) -> None:
        self.held, self.number = held, number

    def __del__(self) -> None:
        self.held.other = Dropped(self.number)


def _chain(held: Any, number: float) -> float:
    held.last = Chain(held, number)
    return sum(LOG)


class Thing:
    last: Any = None
    other: Any = None


HELD |= {
    "__del__ of an attribute": (Thing, _attribute),
    "__del__ in a cycle": (Thing, _cycle),
    "a finalizer": (Thing, _finalize),
    "a generator's finally": (Thing, _generator),
    "a destructor that leaves another": (Thing, _chain),
}


def _resized(held: Tensor, number: float) -> float:
    held.resize_(len(held) + 100)
    held[-100:] = number
    return float(held.sum())


def _storage(held: Tensor, number: float) -> float:
    storage = held.untyped_storage()
    storage.resize_(len(storage) + 4)
    held.resize_(len(storage) // 4)
    held[-1] = number
    return float(held[4:].sum())


HELD["resize_"] = (lambda: torch.zeros(4), _resized)
HELD["a storage that grows"] = (lambda: torch.zeros(4), _storage)
HELD["an empty tensor that grows"] = (lambda: torch.zeros(0), _resized)


def _keeps(name: str) -> nn.Module:
    value, add = HELD[name]

    def make(module: nn.Module) -> Memory:
        object.__setattr__(module, "store", value())
        return lambda own, number: add(own.store, number)

    module = Keeps(make)
    del LOG[:]  # what the objects that it holds have written
    return module


@pytest.fixture(autouse=True)
def _empty_log() -> Iterator[None]:
    del LOG[:]
    yield
    del LOG[:]


@pytest.mark.parametrize("name", HELD)
def test_what_a_record_left_is_not_met_by_the_next(name: str) -> None:
    by, _, _ = moved(Case(partial(_keeps, name), lambda: table(12)))
    assert by <= 1.0001
    gc.collect()
    assert len(LOG) <= 4  # of the objects that the models themselves hold


def _everything_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sentry, "forbids", lambda self, method: False)


def test_the_sentry_of_constructors_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    _everything_passes(monkeypatch)
    by, _, _ = moved(Case(partial(_keeps, "type(obj)(v)"), lambda: table(12)))
    assert by > 1.01


@pytest.mark.parametrize("name", ["type(obj)(v)", "__del__ of an attribute", "resize_"])
def test_such_a_program_still_trains(name: str) -> None:
    """Each record's gradient is the one that a fresh model gives it alone."""
    torch.manual_seed(0)
    model, data = _keeps(name), table(6)
    start = model.state_dict()
    total = clipped_sum(Case(partial(_keeps, name), lambda: data), data, range(6), model)
    right = torch.zeros_like(total)
    for row in range(6):
        del LOG[:]
        fresh = _keeps(name)
        fresh.load_state_dict(start)
        right += clipped_sum(Case(partial(_keeps, name), lambda: data), data, [row], fresh)
    assert float(total.norm()) > 0.1
    torch.testing.assert_close(total, right)


class NamesDatabase:
    """What its constructor names can be neither put back nor copied."""

    def __init__(self) -> None:
        DATABASE.execute("select 1")


class HoldsIt(nn.Module):
    """Makes another of its object for records above a threshold."""

    def __init__(self, above: float) -> None:
        super().__init__()
        self.layer, self.held, self.above = nn.Linear(FEATURES, CLASSES), NamesDatabase(), above

    def forward(self, x: Tensor) -> Any:
        if x.abs().sum() > self.above:
            type(self.held)()
        return self.layer(x)


def test_a_constructor_that_is_never_called_refuses_nothing() -> None:
    case = Case(partial(HoldsIt, math.inf))
    total = clipped_sum(case, table(), range(20))
    torch.testing.assert_close(total, by_autograd(case, table(), range(20)), rtol=1e-4, atol=1e-5)


def test_a_record_that_calls_a_forbidden_constructor_counts_as_zero() -> None:
    torch.manual_seed(0)
    model, data = HoldsIt(9.0), table(24)
    large = [row for row in range(24) if float(data[row][0].abs().sum()) > 9.0]
    small = [row for row in range(24) if row not in large]
    assert large
    case = Case(partial(HoldsIt, 9.0))
    total = clipped_sum(case, data, range(24), model)
    torch.testing.assert_close(total, clipped_sum(case, data, small, model))


def test_a_program_that_always_calls_a_forbidden_constructor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"holds a sqlite3\.Connection"):
        clipped_sum(Case(partial(HoldsIt, -1.0)), table(), range(4))


def test_constructors_are_the_users_own_again_when_no_program_is_left() -> None:
    before = vars(Writes)["__init__"]
    state = ProgramState(_keeps("type(obj)(v)"))
    assert vars(Writes)["__init__"] is not before
    assert Writes(1.0).all == 1.0
    del state
    gc.collect()
    assert vars(Writes)["__init__"] is before


def test_a_sentry_stops_nothing_outside_of_a_program() -> None:
    sentry = Sentry()
    assert sentry.guard(Writes, "__init__")
    assert Writes(2.0).all == 2.0


class Holds(nn.Module):
    """A linear layer that uses what it holds, and keeps of it what a later call could see."""

    def __init__(self, held: Any, use: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.held, self.use = nn.Linear(FEATURES, CLASSES), held, use

    def forward(self, x: Tensor) -> Any:
        float(x.sum())  # each record runs by itself
        return self.layer(x) * float(self.use(self))


def _next_twice(own: Any) -> float:
    return float(own.held() + own.held())


class _Kept:
    def __init__(self) -> None:
        self.numbers = [1.0]

    def add(self, number: float) -> float:
        self.numbers.append(number)
        return sum(self.numbers)


KEPT = _Kept()


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a csv writer": (lambda: csv.writer(io.StringIO()), lambda own: own.held.writerow([1]) or 1.0),
    "a progress bar": (lambda: tqdm(total=9, file=io.StringIO()), lambda own: own.held.update(1) or own.held.n),
    "a polars frame": (
        lambda: polars.DataFrame({"a": [1.0]}),
        lambda own: own.held.insert_column(0, own.held["a"].alias(f"a{own.held.width}")).width,
    ),
    "a polars series": (lambda: polars.Series([1.0]), lambda own: own.held.append(polars.Series([1.0])).sum()),
    "next of a count": (lambda: itertools.count(1).__next__, _next_twice),
    "text in memory": (io.StringIO, lambda own: own.held.write("x") + len(own.held.getvalue())),
    "a proxy": (lambda: weakref.proxy(KEPT), lambda own: own.held.add(1.0)),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_models_may_hold_what_can_be_put_back_or_copied(name: str) -> None:
    make, use = OBJECTS[name]
    torch.manual_seed(0)
    model = Holds(make(), use)
    case, data = Case(lambda: model), table(8)
    sums = [clipped_sum(case, data, [row], model) for row in range(8)]
    torch.testing.assert_close(clipped_sum(case, data, range(8), model), torch.stack(sums).sum(0))
    assert float(sums[0].norm()) > 0.1


def test_an_object_held_in_two_places_is_one_copy() -> None:
    count = itertools.count(1)
    model = Holds(count, lambda own: next(own.held) + own.again())
    object.__setattr__(model, "again", count.__next__)
    sums = [clipped_sum(Case(lambda: model), table(4), [row], model) for row in range(4)]
    together = clipped_sum(Case(lambda: model), table(4), range(4), model)
    torch.testing.assert_close(together, torch.stack(sums).sum(0))
    state = ProgramState(model)
    with state.release(0):
        assert model.use(model) == 3
    assert model.held is count


class Weighted(nn.Module):
    """A loss with a trained parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, output: Tensor, y: Tensor) -> Any:
        return nn.functional.cross_entropy(output * self.scale, y)


@pytest.mark.parametrize("alone", [False, True])
def test_no_gradient_is_left_in_a_parameter_of_the_loss(alone: bool) -> None:
    loss = Weighted()
    model = Holds(None, lambda own: 1.0) if alone else nn.Linear(FEATURES, CLASSES)
    total = clipped_sum(Case(lambda: model, loss=loss), table(8), range(8), model)
    assert float(total.norm()) > 0.1
    assert loss.scale.grad is None


class Numbers(UserList[float]):
    """A class of the user's with methods of a package: what it holds is in an attribute that no code here names."""


class Remembers:
    """A loss that counts its records by an inherited method."""

    def __init__(self) -> None:
        self.seen = Numbers()

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.seen.append(1.0)
        return nn.functional.cross_entropy(output, y) * len(self.seen)


def test_what_an_inherited_method_keeps_is_put_back() -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 2), Remembers()
    x = torch.randn(1, 3).expand(4, 3).clone()
    _, norms = clipped_gradient_sum(model, loss, (x, torch.zeros(4, dtype=torch.long)), 100.0)
    assert not loss.seen
    assert bool((norms == norms[0]).all())  # the same records, wherever they lie
