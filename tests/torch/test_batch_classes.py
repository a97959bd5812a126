"""Batches that are of any class: each record's gradient is its own, and nothing but tensors is handed out."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError
from quietgrad.torch.networks.records import _constants
from quietgrad.torch.networks.trees import mapped, outline, parts_of, tensors_of
from tests.torch.loops import network, table

Named = namedtuple("Named", "x y")


@dataclasses.dataclass
class Data:
    x: Tensor
    y: Tensor
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: Tensor


class Own:
    """A batch as scripts write one: attributes, and ``to``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.y, self.x = y, x
        self.text = f"record {x.sum()}"
        self.nested = SimpleNamespace(x=x, of=self)

    def to(self, device: str) -> Own:
        moved = object.__new__(Own)
        moved.__dict__ = {**self.__dict__, "x": self.x.to(device), "y": self.y.to(device)}
        return moved


class Tokens(UserDict):  # type: ignore[type-arg]
    """What a tokenizer makes: data, and the text beside it."""

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.encodings = [f"text of {data['x'].sum()}"]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: str) -> Tokens:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def _local() -> Any:
    class Local:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y, self.unpicklable = x, y, lambda: x

    return Local


CLASSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": lambda x, y: Data(x, y, f"record {x.sum()}"),
    "frozen dataclass with slots": Frozen,
    "named tuple": Named,
    "dictionary": lambda x, y: {"x": x, "y": y, "text": f"record {x.sum()}"},
    "ordered dictionary": lambda x, y: OrderedDict(x=x, y=y),
    "user dictionary": lambda x, y: Tokens({"x": x, "y": y}),
    "namespace": lambda x, y: SimpleNamespace(x=x, y=y),
    "own class": Own,
    "local class": _local(),
    "arrays in a dataclass": lambda x, y: Data(x.numpy(), y.numpy()),  # type: ignore[arg-type]
}


def part(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, dict | UserDict) else getattr(batch, name)


def collate(make: Callable[[Tensor, Tensor], Any]) -> Callable[[list[Any]], Any]:
    return lambda rows: make(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))


class Taking(nn.Module):
    """A module that takes the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, batch: Any) -> Any:
        return self.net(part(batch, "x"))


def expected(model: nn.Module, places: Any, clip: float = 0.5) -> list[Tensor]:
    """The clipped mean by autograd on each record alone."""
    params = list(model.parameters())
    sums = [torch.zeros_like(param) for param in params]
    for place in places:
        x, y = table()[int(place)]
        grads = torch.autograd.grad(F.cross_entropy(network_of(model)(x[None]), y[None]), params)
        norm = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())
        for total, grad in zip(sums, grads, strict=True):
            total += grad * min(1.0, clip / norm) / 15
    return sums


def network_of(model: Any) -> Any:
    return model.net if isinstance(model, Taking) else model


@pytest.mark.filterwarnings("ignore:seed=")
@pytest.mark.parametrize("whole", [False, True], ids=["its tensors", "the batch"])
@pytest.mark.parametrize("name", CLASSES)
def test_verbs_take_a_batch_of_a_class_and_hand_out_tensors_alone(name: str, whole: bool) -> None:
    model: Any = Taking() if whole else network()
    made, optimizer, loader, criterion = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(table(), batch_size=15, collate_fn=collate(CLASSES[name])), max_grad_norm=0.5,
        noise_multiplier=1e-7, n_public=60, epochs=1, seed=3,
    )  # fmt: skip
    steps = 0
    for given in loader:
        batch = given.to("cpu") if hasattr(given, "to") else given
        if name in ("dataclass", "own class", "user dictionary", "namespace", "named tuple"):
            assert type(batch) is type(CLASSES[name](*table()[:2]))
        assert getattr(given, "text", None) is None
        assert not getattr(given, "encodings", None)
        optimizer.zero_grad()
        criterion(made(batch if whole else part(batch, "x")), part(batch, "y")).backward()
        want = expected(model, loader.loop.sample.keys.indices)
        optimizer.step()
        for param, value in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(param.grad, value, rtol=1e-4, atol=1e-6)
        steps += 1
    assert (steps, loader.privacy.condition) == (4, None)


@pytest.mark.filterwarnings("ignore:seed=")
@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_of_model_and_batch_takes_any_class(name: str) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(part(batch, "x")), part(batch, "y"))

    model = network()
    loop = qt.PrivateLoop(
        model, loss, table(), steps=2, batch_size=15, max_grad_norm=0.5, noise_multiplier=1e-7, n_public=60, seed=3,
        collate_fn=collate(CLASSES[name]),
    )  # fmt: skip
    for batch in loop:
        model.zero_grad()
        want = expected(model, loop._session.batch(batch._drawn).indices)  # type: ignore[arg-type]
        loop.backward(batch)
        for param, value in zip(model.parameters(), want, strict=True):
            torch.testing.assert_close(param.grad, value, rtol=1e-4, atol=1e-6)


def test_records_of_one_class_and_one_shape_run_together() -> None:
    """What a dataclass or an object holds besides tensors decides, and not the tensors' values."""
    first, second = (Data(torch.full((1, 2), value), torch.zeros(1)) for value in (1.0, 2.0))
    assert _constants(first) == _constants(second)
    assert _constants(first) != _constants(dataclasses.replace(second, text="other"))
    assert _constants(SimpleNamespace(x=first.x, n=1)) != _constants(SimpleNamespace(x=first.x, n=True))
    assert _constants(lambda: 0) != _constants(lambda: 0)
    kinds = [OrderedDict(x=first.x) for _ in range(2)]
    assert _constants(kinds[0]) == _constants(kinds[1])
    for weight, each in enumerate(kinds):
        each.weight = torch.tensor(weight)  # type: ignore[attr-defined]
    assert _constants(kinds[0]) != _constants(kinds[1])  # such a tensor is no part that is stacked


def test_parts_of_objects() -> None:
    own = Own(torch.ones(1, 2), torch.zeros(1))
    own.itself = own  # type: ignore[attr-defined]
    assert len(tensors_of(own)) == 3  # x, y, and the x of the nested one
    doubled = mapped(own, lambda tensor: 2 * tensor)
    assert float(doubled.nested.x.sum()) == 4.0
    assert float(own.x.sum()) == 2.0
    assert doubled.text == own.text
    assert "record" not in repr(outline(own))
    for value in (nn.Linear(1, 1), torch.ones(1), "text", [1], {1: 2}, len, Own, logging.getLogger()):
        assert parts_of(value) is None


# --- what a script may do to its module before --------------------------------------------------------------------

compiled: Any = torch.compile


def _whole(model: nn.Module) -> nn.Module:
    made: nn.Module = compiled(model, backend="eager")
    return made


def _layer(model: Any) -> nn.Module:
    model[0] = compiled(model[0], backend="eager")
    return nn.Sequential(model)


def _in_place(model: Any) -> nn.Module:
    model.compile(backend="eager")
    model[2].compile(backend="eager")
    return nn.Sequential(model)


@pytest.mark.filterwarnings("ignore:seed=")
@pytest.mark.parametrize("compile_", [_whole, _layer, _in_place])
@pytest.mark.parametrize("way", ["verbs", "loop", "fit"])
def test_a_compiled_module_is_trained_as_it_was_written(
    way: str, compile_: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """The same seed gives the same parameters as the module that was never compiled, and a line says so."""

    def trained(model: nn.Module) -> Tensor:
        params = list(model.parameters())
        optimizer: Any = torch.optim.SGD(params, lr=0.1)
        if way == "fit":
            algorithm = qg.DPSGD(steps=3, batch_size=15)
            qt.fit(
                model, nn.CrossEntropyLoss(), table(), algorithm, budget=qg.Budget(4.0, 1e-5), n_public=60, seed=3
            )
        elif way == "loop":
            loop = qt.PrivateLoop(
                model, nn.CrossEntropyLoss(), table(), optimizer=optimizer, batch_size=15, steps=3,
                max_grad_norm=1.0, noise_multiplier=1.0, n_public=60, seed=3,
            )  # fmt: skip
            for batch in loop:
                loop.step(batch)
        else:
            made, optimizer, loader, criterion = qt.make_private(
                module=model, optimizer=optimizer, data_loader=DataLoader(table(), batch_size=15), seed=3,
                max_grad_norm=1.0, noise_multiplier=1.0, n_public=60, epochs=1, criterion=nn.CrossEntropyLoss(),
            )  # fmt: skip
            for x, y in loader:
                optimizer.zero_grad()
                criterion(made(x), y).backward()
                optimizer.step()
            assert loader.privacy.condition is None
        return torch.cat([param.detach().flatten() for param in params])

    plain = trained(network())
    with caplog.at_level(logging.WARNING, logger="quietgrad"):
        assert torch.equal(trained(compile_(network())), plain)
    assert "torch.compile was taken off" in caplog.text


@pytest.mark.parametrize("in_place", [True, False])
def test_compiling_the_private_model_changes_nothing_and_says_so(
    in_place: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    made, optimizer, loader, criterion = qt.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(table(), batch_size=15), max_grad_norm=1.0, noise_multiplier=1.0, n_public=60,
        epochs=1, wrap_model=not in_place,
    )  # fmt: skip
    made.compile()
    assert "Train with the private model as it is" in caplog.text
    for x, y in loader:
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        optimizer.step()
    assert loader.privacy.condition is None


def test_a_lightning_module_says_what_to_give_instead() -> None:
    class LightningModule(nn.Module):
        """As Lightning names it."""

    LightningModule.__module__ = "lightning.pytorch.core.module"

    class Mine(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    model = Mine()
    with pytest.raises(ValueError, match=r"the module is a LightningModule.*make_private\(module=self\.net"):
        qt.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
            data_loader=DataLoader(table(), batch_size=15), noise_multiplier=1.0, n_public=60,
        )  # fmt: skip


def test_layers_that_are_unfrozen_later_need_a_new_plan() -> None:
    model: Any = network()
    model[0].requires_grad_(False)

    def private() -> Any:
        return qt.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(TensorDataset(*table()[:]), batch_size=15), max_grad_norm=1.0,
            noise_multiplier=1.0, n_public=60, epochs=1,
        )  # fmt: skip

    made, optimizer, loader, criterion = private()
    x, y = next(iter(loader))
    criterion(made(x), y).backward()
    optimizer.step()
    assert [param.grad is None for param in model.parameters()] == [True, True, False, False]
    model[0].requires_grad_(True)
    x, y = next(iter(loader))
    with pytest.raises(BudgetError, match=r"'0\.bias' was frozen, unfrozen.*then make the loop"):
        made(x)
    made, optimizer, loader, criterion = private()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        optimizer.step()
    assert all(param.grad is not None for param in model.parameters())


class Remembering:
    """A record whose own code keeps in its class what it saw."""

    top = 0.0

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def sign(self) -> float:
        Remembering.top = max(Remembering.top, float(self.y))
        return -1.0 if Remembering.top > 5 else 1.0


class Loose(dict):  # type: ignore[type-arg]
    """A dictionary with an attribute beside its items."""


class Slotted(dict):  # type: ignore[type-arg]
    __slots__ = ("w",)


class Hiding:
    """What pickle leaves the number out of."""

    def __init__(self, w: float) -> None:
        self.w = w

    def __call__(self) -> float:
        return self.w

    def __reduce__(self) -> Any:
        return Hiding, (0.0,)


SHARED: deque[float] = deque()


def _weight(y: Tensor) -> float:
    return -1.0 if float(y) > 5 else 1.0


def _loose(x: Tensor, y: Tensor) -> Any:
    record = Loose(x=x)
    record.data = _weight(y)  # type: ignore[attr-defined]
    return record


def _slotted(x: Tensor, y: Tensor) -> Any:
    record = Slotted(x=x)
    record.w = _weight(y)  # type: ignore[attr-defined]
    return record


def _default(x: Tensor, y: Tensor) -> Any:
    weight = _weight(y)
    record: Any = defaultdict(lambda: weight)
    record["x"] = x
    return record


def _seen(record: Any) -> float:
    record[2].append(float(record[1]))
    return -1.0 if max(record[2]) > 5 else 1.0


HOSTILE: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Any]]] = {
    "its class keeps": (Remembering, lambda b: b.x.sum() * b.sign()),
    "a shared object keeps": (lambda x, y: (x, y, SHARED), lambda b: b[0].sum() * _seen(b)),
    "an attribute beside items": (_loose, lambda b: b["x"].sum() * b.data),
    "a slot beside items": (_slotted, lambda b: b["x"].sum() * b.w),
    "a factory": (_default, lambda b: b["x"].sum() * b["absent"]),
    "an object that pickle cuts": (lambda x, y: (x, Hiding(_weight(y))), lambda b: b[0].sum() * b[1]()),
}


class Records:
    """Twenty records, of which the first has another label."""

    def __init__(self, first: float) -> None:
        self.first = first

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return torch.ones(2), torch.tensor(self.first if place == 0 else 1.0)


def _sum(model: nn.Module, loss: Any, data: Any, n: int, collate: Any = None) -> Tensor:
    """The clipped sum of all records, by a step with next to no noise."""
    for param in model.parameters():
        nn.init.zeros_(param)
    with pytest.warns(UserWarning, match="not private"):
        loop = qt.PrivateLoop(
            model, loss, data, batch_size=n, epochs=1, max_grad_norm=1.0, noise_multiplier=1e-6, sampling="turns",
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0), n_public=n, seed=0, collate_fn=collate,
        )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return torch.cat([param.detach().flatten() for param in model.parameters()]).mul_(-float(n))


@pytest.mark.parametrize("name", HOSTILE)
def test_what_comes_with_a_record_keeps_nothing_for_the_next(name: str) -> None:
    """One record's label moves the sum by its own contribution, and those of 19 others are as they were."""
    make, value = HOSTILE[name]

    def loss(model: Any, batch: Any) -> Any:
        return model(torch.ones(1, 2)).sum() * value(batch)

    def total(first: float) -> Tensor:
        return _sum(nn.Linear(2, 1, bias=False), loss, Records(first), 20, lambda batch: make(*batch[0]))

    alike, other = total(1.0), total(9.0)
    assert float((alike - other).norm()) <= 2.0 * (1 + 1e-3)
    assert float(alike.norm()) > 15.0
    assert not SHARED


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor, m: Tensor) -> Any:
        return self.layer(x.mul_(0.25)) * m.mul_(2.0)


def test_a_program_writes_into_its_input_and_not_into_the_users_data() -> None:
    """Also where the rows of a data set share their memory, as an expanded tensor's do."""
    X, shared = torch.ones(8, 2), torch.ones(1, 1).expand(8, 1)
    for _ in range(2):
        total = _sum(
            Writing(), lambda model, batch: model(batch[0], batch[1]).sum(), TensorDataset(X, shared, X[:, :1]), 8
        )
        torch.testing.assert_close(total, torch.full((2,), 4.0), rtol=1e-3, atol=1e-3)
    assert bool((X == 1.0).all())
    assert float(shared[0, 0]) == 1.0
