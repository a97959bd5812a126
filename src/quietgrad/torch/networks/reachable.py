"""Objects in which a program could keep something, reached by its code and by what it holds.

Followed are the attributes of modules and objects, the items of containers, the closures and defaults of functions,
the globals that their code names, the classes that the user wrote and, by the names in the code, the attributes of
other Python modules. Installed packages (torch, numpy, the standard library, whatever lies in site-packages) are
taken as they are: their objects' attributes are followed, their globals and classes are not.
"""

from __future__ import annotations

import array
import contextvars
import copy
import functools
import gc
import random
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.torch.networks.code_names import DYNAMIC, inherited_names, names_in
from quietgrad.torch.networks.constructors import CONSTRUCTORS, Method, Sentry, unguarded
from quietgrad.torch.networks.containers import (
    MISSING,
    Bytes,
    Cell,
    ClassBody,
    Container,
    Empty,
    Entries,
    FileInMemory,
    FunctionParts,
    Items,
    Members,
    Names,
    OwnGenerator,
    Slots,
    SparseParts,
    contents,
    member,
)
from quietgrad.torch.networks.object_kinds import (
    CSV_WRITER,
    IN_MEMORY,
    has_own_dispatch,
    is_foreign,
    is_installed,
    is_installed_file,
    is_of_a_package,
    is_without_state,
    slots_of,
)

Put = Callable[[Any], None] | None  # puts another object in the place where one was found

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_ENGINES = ("torch._", "torch.fx", "torch.jit", "torch.library", "torch.cuda", "torch.distributed", "torch.export")
_INTERNALS = frozenset({
    "_functorch", "functorch", "get_unwrapped", "_unwrap_batched", "_remove_batch_dim", "DisableTorchFunction",
    "_push_on_torch_dispatch_stack",
})  # fmt: skip  # of torch, where the records of a pass lie together
_EVERY_GLOBAL = frozenset({"globals", "eval", "exec"})
# Code that runs when an object is no more, which may be in another record's pass.
_AT_THE_END = frozenset({"__del__", "weakref", "_weakref"})


@dataclass
class Found:
    """Objects that a program can reach, by how they are restored."""

    containers: list[Container] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    generators: list[OwnGenerator] = field(default_factory=list)
    caches: list[Callable[[], None]] = field(default_factory=list)
    copied: list[Callable[[], None]] = field(default_factory=list)  # each puts a fresh copy into the program's hand
    names_internals: bool = False  # whether the code names what is below torch's vmap
    destructors: bool = False  # whether code of the program's may run when an object is no more
    sentry: Sentry = field(default_factory=Sentry)  # stops constructors that were not followed


def reach(roots: Iterable[object], called: Iterable[Method] = ()) -> Found:
    """Everything that the roots and the constructors ``called`` can reach.

    Raises ValueError for an object that cannot be put back.
    """
    walk = _Walk()
    for method in called:
        walk.follow_constructor(method)
    for root in roots:
        if root is not None:
            walk.add(root, None, type(root).__name__)
    walk.run()
    return walk.found


class _Walk:
    def __init__(self) -> None:
        self.found = Found()
        self._seen: dict[int, object] = {}
        self._near: list[tuple[Any, Put, str]] = []
        self._mentioned: set[str] = set()  # names in the program's code
        self._every_name = False  # whether its code makes names up
        # Attributes that the program reaches only by name: by that name, until the code mentions it.
        self._waiting: dict[str, list[tuple[Any, Put, str]]] = {}
        self._spaces: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._files: list[dict[str, Any]] = []  # globals of the user's Python modules, reached as objects
        self._bodies: set[type] = set()  # classes whose definitions are watched
        self._called: set[type] = set()  # classes that the program may call
        self._places: dict[int, list[Callable[[Any], None]]] = {}  # where each copied object is held
        self._empty = Empty()
        self.found.containers.append(self._empty)

    def add(self, value: Any, put: Put, where: str) -> None:
        if not is_without_state(value):
            self._near.append((value, put, where))

    def add_if_mentioned(self, name: str, value: Any, put: Put, where: str) -> None:
        if self._every_name or name in self._mentioned:
            self.add(value, put, where)
        elif not is_without_state(value):
            self._waiting.setdefault(name, []).append((value, put, where))

    def mention(self, names: Iterable[str]) -> None:
        fresh = set(names) - self._mentioned
        self.found.names_internals |= not fresh.isdisjoint(_INTERNALS)
        self.found.destructors |= not fresh.isdisjoint(_AT_THE_END)
        self._mentioned |= fresh
        if fresh & DYNAMIC and not self._every_name:
            self._every_name = True
            fresh |= set(self._waiting)
        for name in fresh & self._waiting.keys():
            self._near += self._waiting.pop(name)

    def run(self) -> None:
        while self._near:
            value, put, where = self._near.pop()
            # A copy is put into every place; all else is followed once.
            if id(value) in self._seen and not is_foreign(value):
                continue
            self._seen[id(value)] = value
            self._follow(value, put, where)
        for file in self._files:
            every = set(file) if self._every_name else set()
            self._spaces.setdefault(id(file), (file, set()))[1].update(self._mentioned | every)
        for space, names in self._spaces.values():
            self.found.containers.append(Names(space, tuple(names), space.__setitem__, space.__delitem__))

    # --- kinds of objects -----------------------------------------------------------------------------------------

    def _follow(self, value: Any, put: Put, where: str) -> None:
        cls = type(value)
        self.found.destructors |= getattr(value, "__module__", None) in _AT_THE_END
        if cls in weakref.ProxyTypes:  # asked before all else: it says that it is of its object's class
            with suppress(ReferenceError):
                self.add(value.__setattr__.__self__, None, where)
        elif isinstance(value, type):
            self._class(value, called=True)
        elif isinstance(value, types.ModuleType):
            if not is_installed(value.__name__):
                self._files.append(vars(value))
                for name, item in vars(value).items():
                    self.add_if_mentioned(name, item, None, name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CellType):
            self.found.containers.append(Cell(value))
            held = contents(value)
            if held is not MISSING:
                self.add(held, functools.partial(setattr, value, "cell_contents"), where)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType):
            self.found.names_internals |= str(getattr(value, "__module__", "")).startswith("torch._C._functorch")
            self.add(value.__self__, None if put is None else _method_put(put, value.__name__), where)
            self.add(getattr(value, "__func__", None), None, where)
        elif cls.__module__.partition(".")[0] == "quietgrad":
            self._named_attributes(value)
        elif not self._standard(value, put, where):
            self._object(value, put, where)

    def _standard(self, value: Any, put: Put, where: str) -> bool:
        """Follow an object of the standard library or numpy whose contents are not in attributes alone."""
        found = self.found
        if type(value) in (dict, OrderedDict) and not value:
            self._empty.held.append(value)
            if type(value) is OrderedDict:  # which may have attributes
                self._empty.held.append(vars(value))
            return True
        if isinstance(value, dict):
            found.containers.append(Entries(value))
            for key, item in dict.items(value):
                self.add(key, None, where)
                self.add(item, functools.partial(dict.__setitem__, value, key), f"{where}[…]")
        elif isinstance(value, list):
            found.containers.append(Items(value))
            for place, item in enumerate(list.__iter__(value)):
                self.add(item, functools.partial(list.__setitem__, value, place), f"{where}[…]")
        elif isinstance(value, deque):
            found.containers.append(Items(value))
            for place, item in enumerate(deque.__iter__(value)):
                self.add(item, functools.partial(deque.__setitem__, value, place), f"{where}[…]")
        elif isinstance(value, set | frozenset | tuple):
            if isinstance(value, set):
                found.containers.append(Members(value))
            for item in value:
                self.add(item, None, where)
        elif isinstance(value, bytearray | array.array):
            found.containers.append(Bytes(value))
        elif isinstance(value, np.ndarray):
            self._array(value, where)
        elif isinstance(value, np.random.Generator):
            found.generators.append(OwnGenerator(value.bit_generator))
        elif isinstance(value, random.Random | np.random.RandomState | np.random.BitGenerator | torch.Generator):
            found.generators.append(OwnGenerator(value))
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(part, None, where)
            self.add(value.keywords, None, where)
        elif isinstance(value, functools._lru_cache_wrapper):
            if not is_installed(value.__module__):
                found.caches.append(value.cache_clear)
                self.add(value.__wrapped__, None, where)
        elif isinstance(value, staticmethod | classmethod):
            self.add(value.__func__, None, where)
        elif isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                self.add(part, None, where)
        elif isinstance(value, weakref.ref):
            self.add(value(), None, where)
        elif isinstance(value, contextvars.ContextVar):
            self.add(value.get(None), None, where)  # a pass has variables of its own
        elif isinstance(value, threading.local):
            self.add(value.__dict__, None, where)
        elif isinstance(value, types.MappingProxyType):
            for item in value.values():
                self.add(item, None, where)
        elif isinstance(value, memoryview):
            self.add(value.obj, None, where)
        elif isinstance(value, CSV_WRITER):
            for part in gc.get_referents(value):
                self.add(part, None, where)
            return True
        elif isinstance(value, IN_MEMORY):
            found.containers.append(FileInMemory(value))
        else:
            return False
        if hasattr(value, "__dict__") or type(value).__module__ != "builtins":
            self._attributes(value, where)
        return True

    def _function(self, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            self.add(cell, None, value.__name__)
        self.add(value.__defaults__, None, value.__name__)
        self.add(value.__kwdefaults__, None, value.__name__)
        if is_installed_file(value.__code__.co_filename) or is_installed(value.__globals__.get("__name__")):
            if value.__dict__:
                self.add(value.__dict__, None, value.__name__)
            return
        self.add(value.__dict__, None, value.__name__)
        self.found.containers.append(FunctionParts(value))
        names = names_in(value.__code__)
        self.found.destructors |= names.generators
        space = value.__globals__
        self.mention(names.attributes)
        wanted = set(space) if names.globals & _EVERY_GLOBAL else set(names.globals)
        known = self._spaces.setdefault(id(space), (space, set()))[1]
        for name in wanted - known:
            self.add(space.get(name), functools.partial(space.__setitem__, name), name)
        known |= wanted
        for module in names.imports:
            self.found.names_internals |= not _INTERNALS.isdisjoint(module.split("."))
            self.found.destructors |= module in _AT_THE_END
            self.add(sys.modules.get(module), None, module)

    def _class(self, cls: type, *, called: bool) -> None:
        """Classes of the user's: what they define, and by name their functions and values.

        Constructors of a class that the program names are followed (``called``). Those of one that it can only get
        at through an object are left to the sentry.
        """
        for each in cls.__mro__:
            if is_installed(each.__module__):
                continue
            if called and each not in self._called:
                self._called.add(each)
                for name in CONSTRUCTORS & vars(each).keys():
                    self.follow_constructor((each, name))
            if each in self._bodies:
                continue
            self._bodies.add(each)
            self._class(type(each), called=False)  # whose __call__ makes objects
            for name in CONSTRUCTORS & vars(each).keys():
                if not self.found.sentry.guard(each, name):
                    self.add(vars(each)[name], None, name)
            self.found.containers.append(ClassBody(each))
            self.found.destructors |= "__del__" in vars(each)
            whole = issubclass(each, torch.autograd.Function)
            for name, value in vars(each).items():
                special = name.startswith("__") and name.endswith("__") and name not in CONSTRUCTORS
                if special or whole or (name == "forward" and issubclass(each, nn.Module)):
                    self.add(value, None, name)
                elif name not in CONSTRUCTORS:
                    self.add_if_mentioned(name, value, functools.partial(type.__setattr__, each, name), name)

    def follow_constructor(self, method: Method) -> None:
        self.found.sentry.allow(method)
        self.add(unguarded(method), None, method[1])

    def _tensor(self, value: Tensor) -> None:
        if type(value).__module__.partition(".")[0] == "quietgrad":  # a private batch is nothing to look at
            return
        self.add(vars(value), None, "tensor")
        if value.is_leaf and value.grad is not None:
            self.add(value.grad, None, "grad")
        hooks = value._backward_hooks
        if hooks is not None:
            self.add(hooks, None, "hooks")
        if has_own_dispatch(type(value)):  # its numbers are in tensors among its attributes
            return
        try:
            value.untyped_storage()
        except (RuntimeError, NotImplementedError):
            if value.layout is not torch.strided and value.layout in _SPARSE:
                self.found.containers.append(SparseParts(value))
            return
        self.found.tensors.append(value)

    def _module(self, value: nn.Module) -> None:
        self._class(type(value), called=False)
        cls: Any = type(value)
        own, inherited = vars(value), inherited_names(cls)
        every = is_installed(cls.__module__) or not DYNAMIC.isdisjoint(inherited)
        self.found.containers.append(Entries(own))
        for name, item in own.items():
            put = functools.partial(own.__setitem__, name)
            if name == "_parameters":
                # Trained parameters are others while a program runs; frozen ones are what they are.
                self._seen[id(item)] = item
                self.found.containers.append(Entries(item))
                for param in item.values():
                    if param is not None and not param.requires_grad:
                        self.add(param, None, name)
            elif not every and name not in inherited and (is_foreign(item) or is_of_a_package(item)):
                self.add_if_mentioned(name, item, put, name)
            else:
                self.add(item, put, name)

    def _object(self, value: Any, put: Put, where: str) -> None:
        cls = type(value)
        if cls.__module__.startswith(_ENGINES):
            return
        if is_foreign(value) or self._is_copied_whole(value, put):
            self._foreign(value, put, where)
            return
        self._attributes(value, where)

    def _is_copied_whole(self, value: Any, put: Put) -> bool:
        """Whether a package's object can copy itself, and holds what no other code can copy (polars)."""
        cls: Any = type(value)
        if put is None or not is_installed(cls.__module__) or not hasattr(cls, "__deepcopy__"):
            return False
        parts = [*getattr(value, "__dict__", {}).values(), *(member(value, each) for each in slots_of(cls))]
        return any(is_foreign(part) and _copy_of(part) is None for part in parts)

    def _attributes(self, value: Any, where: str) -> None:
        """The attributes and slots of an object: all of a package's object, of the user's those that code names.

        Code of packages counts there if the class inherits it.
        """
        cls: Any = type(value)
        self._class(cls, called=False)
        inherited = inherited_names(cls)
        every = is_installed(cls.__module__) or not DYNAMIC.isdisjoint(inherited)
        self.mention(getattr(cls, "_program_attributes", ()))
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.found.containers.append(Entries(own))
            for name, item in own.items():
                self._attribute(name, item, functools.partial(own.__setitem__, name), every or name in inherited)
        slots = slots_of(cls)
        if slots:
            self.found.containers.append(Slots(value, slots))
            for each in slots:
                item = member(value, each)
                if item is not MISSING:
                    followed = every or each.__name__ in inherited
                    self._attribute(each.__name__, item, functools.partial(each.__set__, value), followed)

    def _attribute(self, name: str, item: Any, put: Put, every: bool) -> None:
        if every:
            self.add(item, put, name)
        else:
            self.add_if_mentioned(name, item, put, name)

    def _named_attributes(self, value: Any) -> None:
        for name in getattr(type(value), "_program_attributes", ()):
            self.add(getattr(value, name, None), None, name)

    def _array(self, value: Any, where: str) -> None:
        if value.dtype.hasobject:
            for item in value.ravel().tolist():
                self.add(item, None, where)
        if value.flags.writeable or value.flags.owndata:  # what owns its data can be made writeable
            self.found.arrays.append(value)
        elif isinstance(value.base, np.ndarray):
            self.add(value.base, None, where)

    # --- what has no contents that Python shows -----------------------------------------------------------------

    def _foreign(self, value: Any, put: Put, where: str) -> None:
        """Give the program a fresh copy in each pass, the same one in every place, or refuse."""
        cls = type(value)
        trial = _copy_of(value)
        if trial is value:
            return
        if trial is None or put is None:
            raise ValueError(
                f"{where!r} holds a {cls.__module__}.{cls.__qualname__}, which the model or the loss can reach. "
                "What a record leaves in it can be neither put back nor copied, so the next record would see it. "
                "Keep it out of model and loss, or make it anew in each call. No privacy budget was spent."
            )
        if id(value) not in self._places:
            self._places[id(value)] = []
            self.found.copied.append(functools.partial(_put_copy, value, self._places[id(value)]))
        self._places[id(value)].append(put)


def _copy_of(value: object) -> Any:
    """A copy of its own, the object itself if it is a value, or ``None``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # itertools: copied until Python 3.14
            return copy.deepcopy(value)
    except Exception:
        return None


def _put_copy(value: object, places: Iterable[Callable[[Any], None]]) -> None:
    fresh = _copy_of(value)
    for put in places:
        put(fresh)


def _method_put(put: Callable[[Any], None], name: str) -> Callable[[Any], None]:
    """Put the method of a copy where the method of an object was."""
    return lambda fresh: put(getattr(fresh, name))
