"""How a loss weighs its examples, found by making it again for one record alone.

A loop multiplies what a mean-reduced loss sent back by the size of the batch, so that an example's gradient is its
own. The size is data: if the loss was a sum, that product would put the number of all others into every
contribution, before it is clipped, and one record would move the released sum by more than C. What is declared is
therefore tried. Every torch function that meets the model's outputs is noted (:class:`Made`); when the loss is
differentiated it is made again of one record's rows, and that record's gradient b′ is compared with b in the batch
of m: b′ = m·b is a mean, b′ = b a sum, and anything else a loss in which examples weigh each other.

Numbers that left torch are not followed: ``loss.sum() / len(x)`` looks like a sum. So what a factor or a divisor
holds of m is tried again as 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quietgrad.objectives.networks.randomness import preserved
from quietgrad.objectives.networks.tape import tensors_of

__all__ = ["Given", "Held", "Made", "Weighing", "backward", "guessed", "held", "lost"]

_SCALING = frozenset(
    [
        "div", "divide", "true_divide", "truediv", "itruediv", "rtruediv", "rdiv",
        "mul", "multiply", "imul", "rmul", "reciprocal",
    ]
)  # fmt: skip
_SHAPING = frozenset(["view", "reshape", "expand", "view_copy", "unflatten"])
_NOTHING = 1e-30  # a gradient so small says nothing
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "uniform", "exponential")


@dataclass(frozen=True)
class Weighing:
    """What was found of one loss: ``"mean"``, ``"sum"``, ``"mixed"``, ``"any"``, or ``""``: it cannot be told."""

    kind: str
    numbers: tuple[float, ...] = ()  # factors that may hold the size of the batch
    by_size: str = ""  # what it is if they do


@dataclass(eq=False)
class Given:
    """Where a loss begins: rows of the batch, or a leaf that the model returned for them."""

    value: Tensor
    places: Tensor
    leaf: bool = False
    found: list[Weighing] = field(default_factory=list)  # of each loss that sent a gradient to it


@dataclass(eq=False)
class Made:
    """One call of a torch function; ``args`` hold a :class:`Held` where the rows were."""

    func: Any
    args: Any
    kwargs: Any
    grad: bool  # whether gradients went through it

    def forget(self) -> None:
        """The sample is over: hold nothing of it."""
        self.func = self.args = self.kwargs = None


@dataclass(eq=False)
class Held:
    """A tensor of the batch in a call: where it begins, or the call that made it and which of its results it is."""

    origin: Given | Made
    number: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return lost, ()  # a loss that is saved is a number


@dataclass
class _Replay:
    """The loss made again for the record at ``place`` of the sample."""

    place: int
    row: int  # of the output, where the record is
    size: int
    lengths: bool = False  # whether sizes of the batch that are in factors are those of one record
    others: bool = False  # whether plain tensors with as many rows as the batch are cut too
    leaves: dict[int, Tensor] = field(default_factory=dict)
    numbers: list[float] = field(default_factory=list)
    random: bool = False
    _done: dict[int, list[Tensor]] = field(default_factory=dict)

    def value(self, held: Held) -> Tensor:
        origin = held.origin
        if id(origin) not in self._done:
            self._done[id(origin)] = self._given(origin) if isinstance(origin, Given) else self._made(origin)
        return self._done[id(origin)][held.number]

    def _given(self, given: Given) -> list[Tensor]:
        rows = (given.places == self.place).to(given.value.device)
        value = given.value.detach()[rows].clone()
        if given.leaf:
            self.leaves[id(given)] = value.requires_grad_()
        return [value]

    def _made(self, made: Made) -> list[Tensor]:
        if made.func is None:
            raise LookupError
        name = made.func.__name__
        self.random = self.random or any(word in name for word in _RANDOM)
        args, kwargs = (self._filled(name, part) for part in (made.args, made.kwargs))
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if writes and name not in ("__invert__", "__index__"):
            args = (args[0].clone(), *args[1:])
        with torch.set_grad_enabled(made.grad):
            result = made.func(*args, **kwargs)
        return [args[0]] if name == "__setitem__" else tensors_of(result)

    def _filled(self, name: str, value: Any) -> Any:
        if isinstance(value, Held):
            return self.value(value)
        if isinstance(value, Tensor):
            return self._other(value)
        if isinstance(value, slice):
            return slice(*(self._filled(name, item) for item in (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self._filled(name, item) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)([self._filled(name, item) for item in value])
        if isinstance(value, int | float) and not isinstance(value, bool) and value:
            return self._number(name.strip("_"), value)
        return value

    def _other(self, value: Tensor) -> Tensor:
        if not (self.others and value.dim() > 0 and len(value) == self.size):
            return value
        if torch.equal(value, torch.arange(self.size, dtype=value.dtype, device=value.device)):
            return value[:1]  # the numbers of the rows
        return value[self.row : self.row + 1]

    def _number(self, name: str, value: float) -> float:
        if name in _SHAPING and value >= self.size and value % self.size == 0:
            return int(value) // self.size
        if self.lengths and name in _SCALING:
            for whole, alone in ((value, value / self.size), (1 / value, value * self.size)):
                if abs(whole) >= self.size and abs(whole / self.size - round(whole / self.size)) < 1e-6:
                    self.numbers.append(value)
                    return alone
        return value


def lost() -> Held:
    """Where nobody knows where a tensor comes from."""
    return Held(Made(None, None, None, False))


def held(value: Any, origin: Any) -> Any:
    """``value`` with ``origin(tensor)`` in the places of tensors that have one."""
    if isinstance(value, slice):
        return slice(*(held(item, origin) for item in (value.start, value.stop, value.step)))
    if isinstance(value, tuple | list):
        items = [held(item, origin) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: held(item, origin) for key, item in value.items()}
    if isinstance(value, Tensor):
        found = origin(value)
        return value.detach() if found is None else found
    return value


def backward(loss: Held, weights: Any, run: Any) -> Any:
    """Differentiate a loss by ``run()``, and note at the model's outputs how it weighs their examples."""
    outputs = _outputs(loss)
    before = [None if each.value.grad is None else each.value.grad.clone() for each in outputs]
    result = run()
    for output, earlier in zip(outputs, before, strict=True):
        now = output.value.grad
        if now is not None:
            output.found.append(_weighing(loss, weights, output, now if earlier is None else now - earlier))
    return result


def guessed(losses: list[Held], output: Given) -> Weighing:
    """The same of a loss that was differentiated unseen (``torch.autograd.backward``): the last that fits."""
    gradient = output.value.grad
    assert gradient is not None
    for loss in reversed(losses):
        if any(each is output for each in _outputs(loss)):
            found = _weighing(loss, None, output, gradient)
            if found.kind in ("mean", "sum", "any"):
                return found
    return Weighing("" if len(output.places) > 1 else "any")


def _outputs(loss: Held) -> list[Given]:
    """The model's outputs that a loss was made of."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [loss.origin]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen[id(each)] = each
            if isinstance(each, Made):
                waiting.extend(found.origin for found in _helds((each.args, each.kwargs)))
    return [each for each in seen.values() if isinstance(each, Given) and each.leaf]


def _helds(value: Any) -> Iterator[Held]:
    if isinstance(value, Held):
        yield value
    elif isinstance(value, slice):
        yield from _helds((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _helds(item)


def _weighing(loss: Held, weights: Any, output: Given, gradient: Tensor) -> Weighing:
    """How the loss weighs the examples of one output, whose ``gradient`` it has sent back.

    Two records are tried, those that the loss moves most and least: a weight of its own does not hide in one.
    """
    size = len(output.places)
    norms = gradient.detach().reshape(size, -1).to(torch.float64).norm(dim=1) if size else torch.zeros(0)
    moved = torch.nonzero(norms.isfinite() & (norms > _NOTHING)).reshape(-1)
    if size < 2 or not len(moved):
        return Weighing("any")
    rows = {int(moved[norms[moved].argmax()]), int(moved[norms[moved].argmin()])}
    found = [_row(loss, weights, output, gradient, row) for row in sorted(rows)]
    kinds = {each.kind for each in found}
    return found[0] if len(kinds) == 1 else Weighing("" if "" in kinds else "mixed")


def _row(loss: Held, weights: Any, output: Given, gradient: Tensor, row: int) -> Weighing:
    size, here = len(output.places), gradient.detach()[row].to(torch.float64)
    near = 1e-3 if gradient.dtype in (torch.float32, torch.float64) else 0.05
    told = False

    def alone(lengths: bool, others: bool) -> tuple[str, tuple[float, ...]]:
        nonlocal told
        replay = _Replay(int(output.places[row]), row, size, lengths, others)
        try:
            with preserved(), torch.enable_grad():
                value = replay.value(loss)
                if weights is not None:
                    value = value * replay._filled("backward", weights)
                (found,) = torch.autograd.grad(value.sum(), replay.leaves[id(output)], allow_unused=True)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            return "", ()
        if found is None or len(found) != 1:
            return "", ()
        own = found[0].to(torch.float64)
        told = told or not replay.random
        if bool((own - size * here).norm() <= near * own.norm()):
            return "mean", tuple(replay.numbers)
        return "sum" if bool((own - here).norm() <= near * here.norm()) else "", tuple(replay.numbers)

    for others in (False, True):
        kind, _ = alone(False, others)
        if kind:
            by_size, numbers = alone(True, others)
            return Weighing(kind, numbers, by_size or "mixed") if numbers else Weighing(kind)
    return Weighing("mixed" if told else "")
