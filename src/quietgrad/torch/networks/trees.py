"""Nested tuples, lists, dictionaries, dataclasses and plain objects of tensors: what models take and return."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.autograd import Function

from quietgrad.torch.networks.object_kinds import is_installed, is_without_state, slots_of

PyTree = Any  # nested tuples, lists, dictionaries and objects of tensors: a record, a model's arguments or outputs
Called = Callable[..., Any]  # a function of torch, as a mode sees it, and what it is given
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Options = Kwargs | None


def tensors_of(value: PyTree) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts, dataclasses and plain objects, in order."""
    return _tensors_of(value, ())


def _tensors_of(value: PyTree, above: tuple[int, ...]) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | UserDict):
        value = value.values()
    elif (parts := parts_of(value)) is not None:
        if id(value) in above:  # it refers to itself
            return []
        value, above = parts.values(), (*above, id(value))
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in _tensors_of(item, above)]


def mapped(value: PyTree, change: Callable[[Tensor], object]) -> PyTree:
    """The same structure, of the same types, with every tensor that :func:`tensors_of` finds changed."""
    return mapped_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def mapped_leaves(value: PyTree, change: Callable[[Any], object], above: tuple[int, ...] = ()) -> PyTree:
    """The same structure with everything changed that has no parts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        if type(value) is dict:
            return {key: mapped_leaves(item, change, above) for key, item in value.items()}
        filled = _copied(value)
        for key, item in value.items():
            filled[key] = mapped_leaves(item, change, above)
        for name, held in getattr(filled, "__dict__", {}).items():  # the same item, kept as an attribute as well
            if name in value and held is value[name]:
                filled.__dict__[name] = filled[name]
        return filled
    parts = parts_of(value)
    if parts is not None and id(value) not in above:
        filled = _copied(value)
        for name, item in parts.items():
            # a frozen one too
            object.__setattr__(filled, name, mapped_leaves(item, change, (*above, id(value))))
        return filled
    if isinstance(value, tuple | list):
        return like(value, [mapped_leaves(item, change, above) for item in value])
    return change(value)


def _copied(value: Any) -> Any:
    """A shallow copy of a dictionary or an object; no code of a user's class runs, which could share something."""
    cls: Any = type(value)
    if is_installed(cls.__module__):
        return copy.copy(value)
    base = next(
        each for each in cls.__mro__ if each.__module__ in ("builtins", "collections") and not _is_heap(each)
    )
    made = base.__new__(cls)
    if isinstance(value, dict):
        for key, item in dict.items(value):
            base.__setitem__(made, key, item)
    for slot in slots_of(cls):
        if slot.__name__ not in ("__dict__", "__weakref__") and _has(value, slot):
            slot.__set__(made, slot.__get__(value))
    if hasattr(made, "__dict__"):
        made.__dict__.update(vars(value))
        if isinstance(value, UserDict):
            made.__dict__["data"] = dict(value.data)
    return made


def _is_heap(cls: type) -> bool:
    """Whether a class was made by a ``class`` statement."""
    return bool(cls.__flags__ & 1 << 9)


def like(value: PyTree, items: list[Any]) -> PyTree:
    """Items in a tuple, a named one included, or a list of the type of ``value``."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def refilled(value: PyTree, tensors: Iterator[object]) -> PyTree:
    return mapped(value, lambda _: next(tensors))


def parts_of(value: PyTree) -> dict[str, Any] | None:
    """The parts of a dataclass or of a plain object by name, and ``None`` for anything else.

    Plain objects are those of a user's own class, such as a batch with attributes, and of ``SimpleNamespace``.

    >>> from types import SimpleNamespace
    >>> parts_of(SimpleNamespace(y=1, x=2)), parts_of(3)
    ({'x': 2, 'y': 1}, None)
    """
    cls: Any = type(value)
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        if isinstance(value, nn.Module):
            return fields
    elif not _is_plain(cls):
        return None
    held = {**getattr(value, "__dict__", {})}
    held |= {slot.__name__: getattr(value, slot.__name__) for slot in slots_of(cls) if _has(value, slot)}
    # Attributes have a fixed order, whatever the one in which they were set.
    return fields | {name: held[name] for name in sorted(held) if name not in fields}


def _has(value: object, slot: Any) -> bool:
    return slot.__name__ not in ("__dict__", "__weakref__") and hasattr(value, slot.__name__)


def outline(
    value: PyTree, leaf: Callable[[Any], Any] = lambda _: None, above: tuple[int, ...] = (),
    aside: Callable[[Any], Any] | None = None,
) -> Any:  # fmt: skip
    """The names and kinds of parts, and ``leaf`` of what has none; an object within itself is a leaf.

    ``aside`` is asked in its place about what a container has beside its items.
    """
    if isinstance(value, dict | UserDict | tuple | list):
        items = value.items() if isinstance(value, dict | UserDict) else enumerate(value)
        made = tuple(
            (key, leaf(key), outline(item, leaf, above, aside)) for key, item in items
        )  # 1 == True as keys
        # What a subclass has besides its items; and, of a type made in C, what nobody can see.
        cls: Any = type(value)
        beside, hidden = _beside(value), _hides(cls)
        return (
            cls,
            made,
            outline(beside, aside or leaf, above, aside) if beside else None,
            leaf(value) if hidden else None,
        )
    if id(value) in above:
        return "itself"
    parts = parts_of(value)
    if parts is None:
        return leaf(value)
    return type(value), tuple((key, outline(item, leaf, (*above, id(value)), aside)) for key, item in parts.items())


def _beside(value: Any) -> dict[str, Any]:
    """Attributes and slots of a container, but for the dictionary in which a ``UserDict`` has its items."""
    if isinstance(value, UserDict):
        held = {name: each for name, each in vars(value).items() if name != "data"}
    else:
        items = value if isinstance(value, dict) else {}
        given = getattr(value, "__dict__", {})
        held = {name: each for name, each in given.items() if name not in items or items[name] is not each}
    cls: Any = type(value)
    return held | {slot.__name__: slot.__get__(value) for slot in slots_of(cls) if _has(value, slot)}


@functools.cache
def _hides(cls: Any) -> bool:
    return any(not _is_heap(base) and base not in _SHOWN for base in cls.__mro__)


_SHOWN = (object, dict, list, tuple, OrderedDict, defaultdict)


def carried(value: PyTree, above: tuple[int, ...] = ()) -> list[Any]:
    """The classes and objects that come with a record, in which code could keep something of it.

    >>> carried(({"x": 1, "seen": [2.0]}, "text")), carried(SimpleNamespace(seen=[1]))[0]
    ([], <class 'types.SimpleNamespace'>)
    """
    if isinstance(value, Tensor) or id(value) in above:
        return []
    above = (*above, id(value))
    cls: Any = type(value)
    own = [] if cls in (dict, list, tuple) else [cls]
    if isinstance(value, dict | UserDict):
        items = [*value.keys(), *value.values(), *_beside(value).values()]
    elif isinstance(value, tuple | list):
        items = [*value, *_beside(value).values()]
    elif (parts := parts_of(value)) is not None:
        items = list(parts.values())
    else:
        return [] if is_without_state(value) else [value]
    if own and _hides(cls):
        own.append(value)
    return own + [each for item in items for each in carried(item, above)]


@functools.cache
def _is_plain(cls: Any) -> bool:
    if cls is SimpleNamespace:
        return True
    bases = [base for base in cls.__mro__ if base is not object and base.__module__ not in ("abc", "typing")]
    own = bool(bases) and not any(is_installed(base.__module__) for base in bases)
    return own and not issubclass(cls, _OTHER) and not any("__call__" in vars(base) for base in bases)


_OTHER: tuple[type, ...] = (
    nn.Module, Tensor, dict, UserDict, list, tuple, set, frozenset, str, bytes, int, float, complex, BaseException,
    type, np.ndarray, Enum, Iterator,
)  # fmt: skip


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
