"""Random generators that a data set, a model or a loss holds: what they give cannot be a record's own.

The generators of torch, numpy and Python are seeded for each record. One that somebody keeps is not: what a record
gets from it depends on who was read before, and trying that out finds it only if it is used often. So it is looked
for where it is kept: in attributes, containers, closures, and the globals that one's own code names.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from dis import get_instructions
from functools import partial
from itertools import islice
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.errors import DataError

__all__ = ["refuse_held_generators"]

_KINDS: dict[type, str] = {
    np.random.Generator: "numpy.random.Generator",
    np.random.RandomState: "numpy.random.RandomState",
    np.random.BitGenerator: "numpy.random.BitGenerator",
    random.Random: "random.Random",
    torch.Generator: "torch.Generator",
}
_LEAVES = (Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, ModuleType, torch.dtype, torch.device)
_ITEMS, _OBJECTS = 1000, 100_000  # looked at in one container, and in all: records in memory are not walked through
_OF_STATES = ("_state_dict_hooks", "_load_state_dict_pre_hooks")  # they run when no record is read
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def refuse_held_generators(holder: Any, name: str) -> None:
    """Raise DataError if ``holder`` keeps a random generator somewhere; ``name`` is what to call it.

    >>> refuse_held_generators(partial(random.Random(0).gauss, 0.0), "the loss")
    Traceback (most recent call last):
    ...
    quietgrad.errors.DataError: the loss holds a random.Random of its own: ...
    """
    seen: dict[int, Any] = {}  # the objects too: an id is one only while its object lives
    near = deque([(holder, "")])
    while near and len(seen) < _OBJECTS:
        value, path = near.popleft()
        if value is None or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        kind = next((text for kind, text in _KINDS.items() if isinstance(value, kind)), None)
        if kind is None:
            near.extend(_parts(value, path))
        elif not _is_seeded(value):
            where = f" (at {path.lstrip('.')})" if path else ""
            raise DataError(
                f"{name} holds a {kind} of its own{where}: what a record draws from it depends on who came before "
                "it. Draw from the default generators of torch, numpy or random, which are seeded for each record, "
                "and keep no generator that was needed once."
            )


def _is_seeded(value: Any) -> bool:
    """Whether it is one of the generators that are seeded for each record."""
    default = np.random.random.__self__, random.random.__self__, torch.default_generator  # type: ignore[attr-defined]
    return any(value is one for one in default)


def _parts(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """What an object holds. Paths name attributes and variables, never keys or items: those may be records."""
    if isinstance(value, dict):
        yield from ((item, f"{path}[...]") for item in islice(value.values(), _ITEMS))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((item, f"{path}[...]") for item in islice(value, _ITEMS))
    elif isinstance(value, partial):
        yield from ((part, path) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield value.__self__, path
        yield getattr(value, "__func__", None), path
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__, path
    elif isinstance(value, property):
        yield value.fget, path
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value, path)
    elif isinstance(value, GeneratorType):
        yield dict(value.gi_frame.f_locals) if value.gi_frame else None, path
    elif isinstance(value, type):
        if not _is_installed(value.__module__):
            # What the constructor draws is drawn once, before any record is read.
            yield from ((item, f"{path}.{key}") for key, item in list(vars(value).items()) if key != "__init__")
    else:
        held = dict(getattr(value, "__dict__", None) or {})
        if isinstance(value, nn.Module):
            held |= held.pop("_modules", {})
            held = {key: item for key, item in held.items() if key not in _OF_STATES}
        for kind in type(value).__mro__:
            slots = [key for key, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)]
            held |= {key: getattr(value, key, None) for key in slots}
            yield kind, path
        yield from ((item, f"{path}.{key}") for key, item in held.items())


def _parts_of_function(function: FunctionType, path: str) -> Iterator[tuple[Any, str]]:
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=False):
        try:
            yield cell.cell_contents, f"{path}.{name}"
        except ValueError:  # not filled yet
            continue
    yield function.__defaults__, path
    yield function.__kwdefaults__, path
    yield dict(vars(function)), path
    known = function.__globals__
    if not _is_installed(known.get("__name__", "__main__")):
        yield from ((known[name], f"{path}.{name}") for name in _globals(function.__code__) if name in known)


def _globals(code: CodeType) -> Iterator[str]:
    """Names of the globals that a function, or one inside it, looks up."""
    yield from (step.argval for step in get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _is_installed(module: str) -> bool:
    """Whether it is a package's or Python's code, which is not one's own."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    return str(file).startswith(_INSTALLED)
