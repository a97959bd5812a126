# mypy: disable-error-code="unused-ignore,name-defined,assignment"
"""Programs that keep something of a record where the next record would find it, one for each place to keep it in.

Each :data:`Memory` is made anew for a model. It is called with the module and a number of the record, adds that to
what it keeps, and returns all it has of the records so far.
"""

from __future__ import annotations

import array
import contextvars
import functools
import io
import itertools
import math
import random
import sys
import threading
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.torch.one_record.cases import CLASSES, FEATURES

Memory = Callable[[nn.Module, float], float]
HIDDEN = 4


class Keeps(nn.Module):
    """A perceptron whose hidden layer is turned by what it kept of the records before."""

    def __init__(self, make: Callable[[nn.Module], Memory]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.memory = make(self)

    def forward(self, x: Tensor) -> Any:
        number = float(x.detach().abs().sum())  # asked of each record: they run one at a time
        return self.second(torch.tanh(self.first(x)) * math.cos(self.memory(self, number)))


def attribute(value: Callable[[], Any], add: Callable[[Any, float], float]) -> Callable[[nn.Module], Memory]:
    """What is kept in an attribute of the module, changed in place."""

    def make(module: nn.Module) -> Memory:
        object.__setattr__(module, "store", value())
        return lambda own, number: add(own.store, number)

    return make


def appended(store: Any, number: float) -> float:
    store.append(number)
    return float(sum(store))


def nested(store: dict[str, Any], number: float) -> float:
    store["a"]["b"].append(number)
    return float(sum(store["a"]["b"]))


def counted(store: Any, number: float) -> float:
    store["sum"] += number
    return float(store["sum"])


def grown(store: Tensor, number: float) -> float:
    return float(store.add_(number))


def grown_below(store: Tensor, number: float) -> float:
    """Past autograd's count of versions."""
    return float(store.data.add_(number))


def grown_as_array(store: Tensor, number: float) -> float:
    store.numpy()[...] += number
    return float(store)


def resized(store: Tensor, number: float) -> float:
    store.resize_(len(store) + 1)[-1] = number
    return float(store.sum())


def replaced(store: Tensor, number: float) -> float:
    store.data = torch.cat([store.data, torch.tensor([number])])
    return float(store.sum())


def with_a_note(store: Any, number: float) -> float:
    store.note = getattr(store, "note", 0.0) + number
    return float(store.note)


def differentiated(store: Tensor, number: float) -> float:
    (store * number).sum().backward()
    assert store.grad is not None
    return float(store.grad)


def in_an_array(store: Any, number: float) -> float:
    store += number
    return float(store.sum())


def in_bytes(store: bytearray, number: float) -> float:
    store.extend(b"x" * int(number))
    return float(len(store))


def in_a_view(store: memoryview, number: float) -> float:
    store[0] = min(255, store[0] + int(number))
    return float(store[0])


def in_a_text(store: io.StringIO, number: float) -> float:
    store.write(f"{number} ")
    return sum(map(float, store.getvalue().split()))


def moved_to_the_end(store: OrderedDict[str, float], number: float) -> float:
    first = next(iter(store))
    if number > 1e3:
        store.move_to_end(first)
    return 1e3 * (first == "a")


def stepped(store: Iterator[int], number: float) -> float:
    return float(next(store))


def drawn(store: Any, number: float) -> float:
    return 100.0 * sum(store.random() for _ in range(int(number)))


class State:
    total = 0.0
    totals: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, number: float) -> float:
        self.total += number
        return self.total


class Slotted:
    __slots__ = ("__weakref__", "total")

    def __init__(self) -> None:
        self.total = 0.0


@dataclass
class Record:
    parts: dict[str, list[float]] = field(default_factory=lambda: {"x": []})


def on_an_object(store: Any, number: float) -> float:
    store.total += number
    return float(store.total)


def in_a_layer(store: list[nn.Module], number: float) -> float:
    """A buffer of a module that is not registered."""
    running: Any = store[0].running_mean
    return float(running.add_(number).sum())


def by_made_up_names(module: nn.Module) -> Memory:
    module.box = State()

    def memory(own: Any, number: float) -> float:
        name = "to" + "tals_of_mine"
        vars(own.box).setdefault(name, []).append(number)
        return float(sum(getattr(own.box, name)))

    return memory


TOTAL = 0.0
SEEN: list[float] = []


def in_a_global(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float) -> float:
        global TOTAL
        TOTAL += number
        return TOTAL

    globals()["TOTAL"] = 0.0
    return memory


def in_a_new_global(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float) -> float:
        global FRESH
        try:
            FRESH += number  # type: ignore[name-defined,used-before-def]
        except NameError:
            FRESH = number
        return float(FRESH)

    globals().pop("FRESH", None)
    return memory


def in_a_list_of_the_file(module: nn.Module) -> Memory:
    SEEN.clear()
    return lambda own, number: appended(SEEN, number)


def in_another_file(module: nn.Module) -> Memory:
    """An attribute of a Python module, by its name."""
    other = types.ModuleType("tests.torch.one_record.other_file")
    other.kept = []  # type: ignore[attr-defined]
    sys.modules[other.__name__] = other

    def memory(own: nn.Module, number: float) -> float:
        import tests.torch.one_record.other_file as there  # type: ignore[import-not-found]

        there.kept = [*there.kept, number]
        return float(sum(there.kept))

    return memory


def in_a_closure(module: nn.Module) -> Memory:
    total = 0.0

    def memory(own: nn.Module, number: float) -> float:
        nonlocal total
        total += number
        return total

    return memory


def in_a_closure_below(module: nn.Module) -> Memory:
    seen: list[float] = []

    def inner(number: float) -> float:
        return appended(seen, number)

    @functools.wraps(inner)
    def outer(own: nn.Module, number: float) -> float:
        return inner(number)

    return outer


def in_a_default(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float, seen: list[float] = []) -> float:  # noqa: B006
        return appended(seen, number)

    return memory


def in_its_defaults(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float, total: float = 0.0) -> float:
        memory.__defaults__ = (total + number,)
        return total + number

    return memory


def on_a_function(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float) -> float:
        memory.total = getattr(memory, "total", 0.0) + number  # type: ignore[attr-defined]
        return float(memory.total)  # type: ignore[attr-defined]

    return memory


def on_a_class(module: nn.Module) -> Memory:
    class Store:
        total = 0.0

    def memory(own: nn.Module, number: float) -> float:
        Store.total += number
        return Store.total

    return memory


def on_the_class_of_the_module(module: nn.Module) -> Memory:
    if hasattr(Keeps, "total"):
        del Keeps.total

    def memory(own: nn.Module, number: float) -> float:
        type(own).total = getattr(type(own), "total", 0.0) + number  # type: ignore[attr-defined]
        return float(type(own).total)  # type: ignore[attr-defined]

    return memory


def in_a_list_of_a_class(module: nn.Module) -> Memory:
    State.totals.clear()
    return lambda own, number: appended(State.totals, number)


def by_a_partial(module: nn.Module) -> Memory:
    def memory(seen: list[float], own: nn.Module, number: float) -> float:
        return appended(seen, number)

    return functools.partial(memory, [])


def by_a_bound_method(module: nn.Module) -> Memory:
    add = State().add
    return lambda own, number: add(number)


def in_a_cache(module: nn.Module) -> Memory:
    """The first record answers for all."""
    given: list[float] = []

    @functools.cache
    def first() -> float:
        return given[-1]

    def memory(own: nn.Module, number: float) -> float:
        given.append(number)
        return first()

    return memory


def through_a_weak_reference(module: nn.Module) -> Memory:
    module.slotted = Slotted()
    reference = weakref.ref(module.slotted)
    return lambda own, number: on_an_object(reference(), number)


def in_a_weak_dictionary(module: nn.Module) -> Memory:
    kept: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()

    def memory(own: nn.Module, number: float) -> float:
        kept[own] = kept.get(own, 0.0) + number
        return kept[own]

    return memory


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")


def in_a_context_variable(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float) -> float:
        VARIABLE.set(VARIABLE.get(0.0) + number)
        return VARIABLE.get()

    return memory


def in_a_thread_local(module: nn.Module) -> Memory:
    local = threading.local()

    def memory(own: nn.Module, number: float) -> float:
        local.total = getattr(local, "total", 0.0) + number
        return float(local.total)

    return memory


def by_a_forward_hook(module: nn.Module) -> Memory:
    kept: list[float] = []
    layer = module.get_submodule("first")
    layer.register_forward_hook(lambda own, given, out: kept.append(float(given[0].detach().abs().sum())))
    return lambda own, number: float(sum(kept))


def by_a_hook_of_the_program(module: nn.Module) -> Memory:
    """Each record registers one more hook."""

    def memory(own: nn.Module, number: float) -> float:
        layer = own.get_submodule("first")
        if number > 1e3:
            layer.register_forward_hook(lambda layer, given, out: 10.0 * out)
        return 0.0

    return memory


class _Scaled(nn.Module):
    """A parametrization that grows with every record."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        self.times += 1.0
        return weight * self.times


def by_a_parametrization(module: nn.Module) -> Memory:
    parametrize.register_parametrization(module.get_submodule("second"), "weight", _Scaled())
    return lambda own, number: 0.0


def in_a_frozen_parameter(module: nn.Module) -> Memory:
    module.register_parameter("frozen", nn.Parameter(torch.zeros(()), requires_grad=False))
    return lambda own, number: float(own.frozen.data.add_(number))  # type: ignore[union-attr,operator]


def in_a_parameter(module: nn.Module) -> Memory:
    return lambda own, number: float(own.second.weight.data.add_(number).sum())  # type: ignore[union-attr,operator]


def in_a_new_layer(module: nn.Module) -> Memory:
    def memory(own: nn.Module, number: float) -> float:
        own.add_module(f"layer_{len(own._modules)}", nn.Identity())
        return float(len(own._modules) - 2) * 100.0

    return memory


class _Remembers(torch.autograd.Function):
    """Keeps what it saw on its class, forward and backward."""

    kept: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _Remembers.kept.append(float(grads[0].abs().sum()) + 1.0)
        return grads[0] * sum(_Remembers.kept)


class KeepsOnTheWayBack(nn.Module):
    """The gradient of each record is scaled by those of the records before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        _Remembers.kept.clear()

    def forward(self, x: Tensor) -> Any:
        hidden: Any = _Remembers.apply(torch.tanh(self.first(x)))  # type: ignore[no-untyped-call]
        return self.second(hidden)


class KeepsTogether(nn.Module):
    """Keeps a tensor of all records of a pass, and mixes it into the next pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.kept: deque[Tensor] = deque(maxlen=1)

    def forward(self, x: Tensor) -> Any:
        positive = bool(x[0, 0] > 0)  # two passes
        hidden = self.first(x) if positive else -self.first(x)
        before = self.kept[0] if self.kept else torch.zeros(())
        self.kept.append(hidden.detach().abs().sum())
        return self.second(torch.tanh(hidden)) * (1.0 + before)


class CountsPasses(nn.Module):
    """What it does depends on how many passes there were, which the records' answers decide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.passes = 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        far = bool(x.abs().max() > 100)
        return self.second(torch.tanh(self.first(x))) * (1.0 if far else 10.0**self.passes)


def crowded(store: set[Any], number: float) -> float:
    """Members come and go: the table of the set grows, and its order with it."""
    for extra in range(200 + int(number)):
        store.add(extra)
    for extra in range(200 + int(number)):
        store.discard(extra)
    return float(sum(place * ord(member) for place, member in enumerate(store)))


def _read_only() -> Any:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


def written_nevertheless(store: Any, number: float) -> float:
    store.flags.writeable = True
    store[0] += number
    store.flags.writeable = False
    return float(store[0])


def _csr() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a beta
        return torch.eye(2).to_sparse_csr()


def into_values(store: Tensor, number: float) -> float:
    store.values().add_(number)
    return float(store.values()[0])


def into_sparse(store: Tensor, number: float) -> float:
    store.add_(store, alpha=number)
    return float(store.to_dense()[0, 0])


MEMORIES: dict[str, Callable[[nn.Module], Memory]] = {
    "a tensor, in place": attribute(lambda: torch.zeros(()), grown),
    "a tensor, through .data": attribute(lambda: torch.zeros(()), grown_below),
    "a tensor, through numpy": attribute(lambda: torch.zeros(()), grown_as_array),
    "a tensor of an array": attribute(lambda: torch.from_numpy(np.zeros(())), grown),
    "a tensor, resized": attribute(lambda: torch.zeros(0), resized),
    "a tensor, its data replaced": attribute(lambda: torch.zeros(1), replaced),
    "an attribute of a tensor": attribute(lambda: torch.zeros(1), with_a_note),
    "the gradient of a tensor": attribute(lambda: torch.zeros((), requires_grad=True), differentiated),
    "a tensor in a tuple": attribute(lambda: (torch.zeros(()),), lambda store, number: grown(store[0], number)),
    "a list": attribute(list, appended),
    "a deque": attribute(deque, appended),
    "a defaultdict": attribute(lambda: defaultdict(float), counted),
    "a counter": attribute(Counter, counted),
    "a nested dictionary": attribute(lambda: {"a": {"b": []}}, nested),
    "the order of a dictionary": attribute(lambda: OrderedDict(a=1.0, b=2.0), moved_to_the_end),
    "a set": attribute(set, lambda store, number: float(store.add(number) or sum(store))),
    "the order of a set": attribute(lambda: {"a", "b", "c", "d"}, crowded),
    "a read-only array": attribute(_read_only, written_nevertheless),
    "the values of a sparse matrix": attribute(_csr, into_values),
    "a sparse tensor": attribute(lambda: torch.eye(2).to_sparse(), into_sparse),
    "an object": attribute(State, on_an_object),
    "an object with slots": attribute(Slotted, on_an_object),
    "a namespace": attribute(lambda: types.SimpleNamespace(total=0.0), on_an_object),
    "a dataclass": attribute(Record, lambda store, number: appended(store.parts["x"], number)),
    "a numpy array": attribute(lambda: np.zeros(3), in_an_array),
    "an array of objects": attribute(
        lambda: np.array([[], None], dtype=object), lambda store, number: appended(store[0], number)
    ),
    "a structured array": attribute(
        lambda: np.zeros(1, [("x", float)]),
        lambda store, number: float(np.add(store["x"], number, out=store["x"])[0]),
    ),
    "an array of the standard library": attribute(lambda: array.array("d"), appended),
    "a bytearray": attribute(bytearray, in_bytes),
    "a memoryview": attribute(lambda: memoryview(bytearray(8)), in_a_view),
    "a text in memory": attribute(io.StringIO, in_a_text),
    "itertools.count": attribute(lambda: itertools.count(0, 100), stepped),
    "an iterator": attribute(lambda: iter([100.0 * k for k in range(500)]), stepped),
    "random.Random": attribute(lambda: random.Random(0), drawn),
    "a numpy generator": attribute(lambda: np.random.default_rng(0), drawn),
    "a module that is not registered": attribute(lambda: [nn.BatchNorm1d(2)], in_a_layer),
    "names that are made up": by_made_up_names,
    "a global": in_a_global,
    "a global that is new": in_a_new_global,
    "a list of the file": in_a_list_of_the_file,
    "another file": in_another_file,
    "nonlocal": in_a_closure,
    "a closure below another": in_a_closure_below,
    "a default argument": in_a_default,
    "the defaults of a function": in_its_defaults,
    "an attribute of a function": on_a_function,
    "an attribute of a class": on_a_class,
    "the class of the module": on_the_class_of_the_module,
    "a list of a class": in_a_list_of_a_class,
    "functools.partial": by_a_partial,
    "a bound method": by_a_bound_method,
    "functools.lru_cache": in_a_cache,
    "a weak reference": through_a_weak_reference,
    "a weak dictionary": in_a_weak_dictionary,
    "a context variable": in_a_context_variable,
    "a thread's own": in_a_thread_local,
    "a forward hook": by_a_forward_hook,
    "a hook that is registered in forward": by_a_hook_of_the_program,
    "a parametrization": by_a_parametrization,
    "a frozen parameter": in_a_frozen_parameter,
    "a trained parameter": in_a_parameter,
    "a new layer": in_a_new_layer,
}
WHOLE_MODULES: dict[str, Callable[[], nn.Module]] = {
    "a class, on the way back": KeepsOnTheWayBack,
    "a tensor of a pass": KeepsTogether,
    "the number of passes": CountsPasses,
}
