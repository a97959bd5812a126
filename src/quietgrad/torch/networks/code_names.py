"""Names in code: what a function of the user's, or one that a class of theirs inherits, may reach."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from quietgrad.torch.networks.object_kinds import is_installed

DYNAMIC = frozenset({
    "getattr", "setattr", "delattr", "vars", "__dict__", "attrgetter", "__setattr__", "__getattribute__",
})  # fmt: skip
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Packages whose classes change nothing of an object's that a class below them brought.
_BARE = ("builtins", "abc", "typing", "torch", "numpy", "quietgrad")


@dataclass(frozen=True)
class CodeNames:
    """Names by which code may reach objects."""

    globals: frozenset[str]
    attributes: frozenset[str]  # and texts, which may name one
    imports: frozenset[str]
    generators: bool  # whether it is, or makes, a generator, whose ``finally`` runs when it is dropped


@functools.cache
def names_in(code: types.CodeType) -> CodeNames:
    """The names in a function's code, and in what is defined within."""
    named: set[str] = set()
    imports: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname.endswith(("_GLOBAL", "_NAME")) and isinstance(step.argval, str):
            (imports if step.opname == "IMPORT_NAME" else named).add(step.argval)
    attributes = set(code.co_names)
    # An expression in parentheses has no ``finally``.
    suspends = bool(code.co_flags & _SUSPENDS) and code.co_name != "<genexpr>"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            named |= inner.globals
            attributes |= inner.attributes
            imports |= inner.imports
            suspends |= inner.generators
        else:
            parts = constant if isinstance(constant, tuple) else (constant,)
            attributes.update(part for part in parts if isinstance(part, str))
    return CodeNames(frozenset(named), frozenset(attributes), frozenset(imports), suspends)


@functools.cache
def inherited_names(cls: Any) -> frozenset[str]:
    """Names in the code that a class of the user's has from packages.

    What that code changes of an object, no code of the user's need name. Of a module, what a call runs counts. A
    class that says its ``_program_attributes`` has no others.
    """
    if is_installed(cls.__module__) or hasattr(cls, "_program_attributes"):
        return frozenset()
    methods: dict[str, list[types.CodeType]] = {}
    for base in cls.__mro__:
        if not is_installed(base.__module__) or base.__module__.partition(".")[0] in _BARE:
            continue
        for name, value in vars(base).items():
            for part in (value, *(getattr(value, each, None) for each in ("fget", "fset", "__func__"))):
                function = inspect.unwrap(part) if callable(part) else None
                if isinstance(function, types.FunctionType):
                    methods.setdefault(name, []).append(function.__code__)
    fresh = {"__call__", "forward"} if issubclass(cls, nn.Module) else set(methods)
    found: set[str] = set()
    while fresh:
        found |= fresh
        codes = [code for name in fresh for code in methods.get(name, ())]
        fresh = {each for code in codes for each in names_in(code).attributes} - found
    return frozenset(found)
