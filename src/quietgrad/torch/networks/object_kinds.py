"""Kinds of Python objects, by what of them a program could change."""

from __future__ import annotations

import abc
import array
import contextvars
import csv
import functools
import io
import logging
import operator
import queue
import random
import sys
import sysconfig
import threading
import types
import weakref
from _ctypes import CFuncPtr
from collections import defaultdict, deque
from collections.abc import Iterable
from multiprocessing.synchronize import SemLock
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def installed_paths(searched: Iterable[str]) -> tuple[str, ...]:
    """Folders of installed packages: this interpreter's, and others that are searched (a user's, a system's).

    >>> installed_paths(["/home/ann/.local/lib/site-packages", "/home/ann/project"])[-1]
    '/home/ann/.local/lib/site-packages'
    """
    own = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return *own, *(each for each in searched if Path(each).name in ("site-packages", "dist-packages"))


_INSTALLED = installed_paths(sys.path)
_VALUES: tuple[type, ...] = (
    int, float, complex, str, bytes, types.NoneType, types.EllipsisType, types.NotImplementedType, range, slice,
    types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.FrameType, types.TracebackType, np.generic,
    np.dtype, np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    operator.itemgetter, operator.attrgetter, operator.methodcaller, type(vars(abc.ABC)["_abc_impl"]),
    type(csv.writer(io.StringIO()).dialect),
)  # fmt: skip
# What these hold is outside of the program, as files are: it is the machine's, and a proof says so.
_OUTSIDE: tuple[type, ...] = (
    logging.Logger, logging.Handler, threading.Thread, threading.Event, threading.Condition, threading.Semaphore,
    type(threading.Lock()), type(threading.RLock()), queue.SimpleQueue, CFuncPtr, SemLock,
)  # fmt: skip
IN_MEMORY = (io.StringIO, io.BytesIO)
# It keeps nothing that could be read again; what it writes to is among its referents.
CSV_WRITER = type(csv.writer(io.StringIO()))


@functools.cache
def has_own_dispatch(cls: Any) -> bool:
    """Whether a class of tensors does its operations itself, below all that torch does before."""
    dispatch: object = cls.__torch_dispatch__
    return dispatch is not torch._C._disabled_torch_dispatch_impl


@functools.cache
def is_installed_file(path: str) -> bool:
    return path.startswith((*_INSTALLED, "<frozen"))


def is_installed(module: str | None) -> bool:
    """Whether a Python module is an installed package's, by its file; ``quietgrad`` counts as one."""
    root = (module or "").partition(".")[0]
    if root in ("torch", "numpy", "quietgrad"):
        return True
    path = getattr(sys.modules.get(module or ""), "__file__", None)
    if path is not None:  # a user's file may have the name of one of Python's
        return is_installed_file(path)
    return root in sys.stdlib_module_names and root != "__main__"


_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made at run time
_KNOWN: tuple[type, ...] = (
    type, types.ModuleType, types.FunctionType, types.CellType, types.MethodType, types.BuiltinMethodType,
    types.MethodWrapperType, Tensor, dict, list, deque, set, frozenset, tuple, bytearray, array.array, np.ndarray,
    np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random, torch.Generator,
    functools.partial, functools._lru_cache_wrapper, staticmethod, classmethod, property, weakref.ref,
    contextvars.ContextVar, types.MappingProxyType, memoryview, types.SimpleNamespace, threading.local,
    BaseException, CSV_WRITER, *weakref.ProxyTypes, *IN_MEMORY,
)  # fmt: skip


def is_without_state(value: object) -> bool:
    cls = type(value)
    if cls is object or isinstance(value, _OUTSIDE):
        return True
    if isinstance(value, io.IOBase):
        return not isinstance(value, IN_MEMORY)
    return isinstance(value, _VALUES) and cls.__dictoffset__ == 0


def is_foreign(value: object) -> bool:
    """Whether an object is, or is made on, one of an extension in C, whose contents are in no attribute."""
    cls: Any = type(value)
    return not is_without_state(value) and not isinstance(value, _KNOWN) and _is_extension(cls)


def is_of_a_package(value: object) -> bool:
    plain = is_without_state(value) or isinstance(value, (*_KNOWN, nn.Module))
    return not plain and is_installed(type(value).__module__)


@functools.cache
def _is_extension(cls: Any) -> bool:
    hashed: Any = cls.__hash__
    if hashed is not None and hashed is not object.__hash__:
        return False  # what is compared by value is a value
    return any(
        base is not object and base.__module__.partition(".")[0] not in ("torch", "numpy") and _is_in_c(base)
        for base in cls.__mro__
    )


def _is_in_c(cls: type) -> bool:
    """A class that Python's ``class`` made has a dictionary for each object, or says its slots."""
    return not cls.__flags__ & _HEAP or (
        cls.__dictoffset__ == 0 and not any("__slots__" in vars(base) for base in cls.__mro__)
    )


@functools.cache
def slots_of(cls: Any) -> tuple[Any, ...]:
    """The slots that a class and those above it declare, and the factory of a dictionary's defaults."""
    return tuple(
        each
        for base in cls.__mro__
        if "__slots__" in vars(base) or base is defaultdict
        for each in vars(base).values()
        if isinstance(each, types.MemberDescriptorType)
    )
