"""Nested tuples, lists, dictionaries and dataclasses of tensors: what models take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

PyTree = (
    Any  # nested tuples, lists, dictionaries and dataclasses of tensors: a record, a model's arguments or outputs
)
Called = Callable[..., Any]  # a function of torch, as a mode sees it, and what it is given
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Options = Kwargs | None


def tensors_of(value: PyTree) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | UserDict):
        value = value.values()
    elif _is_dataclass(value):
        value = _fields(value).values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def mapped(value: PyTree, change: Callable[[Tensor], object]) -> PyTree:
    """The same structure, of the same types, with every tensor that :func:`tensors_of` finds changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        if type(value) is dict:
            return {key: mapped(item, change) for key, item in value.items()}
        filled = copy.copy(value)
        for key, item in value.items():
            filled[key] = mapped(item, change)
        for name, held in getattr(filled, "__dict__", {}).items():  # the same item, kept as an attribute as well
            if name in value and held is value[name]:
                filled.__dict__[name] = filled[name]
        return filled
    if _is_dataclass(value):
        filled = copy.copy(value)
        for name, item in _fields(value).items():
            object.__setattr__(filled, name, mapped(item, change))  # a frozen one too
        return filled
    if isinstance(value, tuple | list):
        return like(value, [mapped(item, change) for item in value])
    return value


def like(value: PyTree, items: list[Any]) -> PyTree:
    """Items in a tuple, a named one included, or a list of the type of ``value``."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def refilled(value: PyTree, tensors: Iterator[object]) -> PyTree:
    return mapped(value, lambda _: next(tensors))


def _is_dataclass(value: PyTree) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: PyTree) -> dict[str, Any]:
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}


class ModuleState:
    """Where a module keeps its parameters and buffers, found once; ``beside`` may be a loss that is a module."""

    def __init__(self, module: nn.Module, beside: object = None) -> None:
        names = {id(param): name for name, param in module.named_parameters()}
        self.layers = list(module.modules())
        if isinstance(beside, nn.Module):
            self.layers += [layer for layer in beside.modules() if layer not in set(self.layers)]
        self.params: list[tuple[dict[str, Any], str, str]] = []
        self.buffers: list[tuple[dict[str, Any], str]] = []
        for layer in self.layers:
            held = {key: names.get(id(param)) for key, param in layer._parameters.items()}
            self.params += [(layer._parameters, key, name) for key, name in held.items() if name is not None]
            # Parameters of the loss alone are constants of a program: no record's gradient is left in them.
            own = [key for key, name in held.items() if name is None and layer._parameters[key] is not None]
            self.buffers += [(layer._parameters, key) for key in own]
            self.buffers += [(layer._buffers, key) for key, value in layer._buffers.items() if value is not None]

    @contextmanager
    def holding(
        self, params: Mapping[str, Tensor], buffers: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[None]:
        """The module with other parameters, and with buffers that are afterwards what they were.

        A parameter that several layers hold is replaced in all of them. ``buffers`` makes what stands in for a
        buffer meanwhile; whatever a program assigns to one is forgotten.
        """
        held: list[tuple[dict[str, Any], str, Any]] = [(store, key, store[key]) for store, key, _ in self.params]
        held += [(store, key, store[key]) for store, key in self.buffers]
        try:
            for store, key, name in self.params:
                if name in params:
                    store[key] = params[name]
            if buffers is not None:
                for own, key in self.buffers:
                    value = own[key]
                    assert value is not None
                    own[key] = buffers(value)
            yield
        finally:
            for store, key, value in held:
                store[key] = value


@contextmanager
def replaced(owner: ModuleType, values: Mapping[str, object]) -> Iterator[None]:
    """Names of a Python module with other values meanwhile."""
    names = vars(owner)
    held = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(held)


def name_of(func: Called) -> str:
    return str(getattr(func, "__name__", func))


def applied(function: type[Function], *given: object) -> Any:
    apply: Called = function.apply
    return apply(*given)
