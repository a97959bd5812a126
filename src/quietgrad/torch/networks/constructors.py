"""Constructors that a program can call only through an object: stopped until what they reach is watched.

A program that holds an object can make another one of its class (by its ``type``, by ``replace`` of dataclasses, a
class method), and the class's ``__init__`` may write into a global. Most programs never do, and what a constructor
names (a tokenizer, a table of words) may be large or impossible to copy. So constructors are not followed
beforehand. A :class:`Sentry` raises :class:`Unwatched` before the first line of one runs inside a pass. The pass is
then forgotten, what the constructor reaches is watched, and the pass is run again.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

CONSTRUCTORS = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__"})
"""Methods that nothing calls by their names when an object is used; a text of an object is made as rarely."""

Method = tuple[type, str]


class Unwatched(BaseException):
    """A constructor was called whose reach is not watched yet."""


class Sentry:
    """The constructors that must not run in a program's passes.

    >>> class Counter:
    ...     made = 0
    ...     def __init__(self):
    ...         Counter.made += 1
    >>> counter, sentry = Counter(), Sentry()
    >>> sentry.guard(Counter, "__init__")
    True
    >>> with sentry.on_duty():
    ...     type(counter)()
    Traceback (most recent call last):
    quietgrad.torch.networks.constructors.Unwatched
    >>> sentry.stopped == {(Counter, "__init__")}, Counter.made
    (True, 1)
    """

    def __init__(self) -> None:
        self._guarded: set[Method] = set()
        self._allowed: set[Method] = set()
        self.stopped: set[Method] = set()  # what was called since the last time that somebody asked
        weakref.finalize(self, _dismiss, self._guarded).atexit = False

    def guard(self, cls: type, name: str) -> bool:
        """Guard a method that ``cls`` defines; false if it is none of Python's plain functions."""
        original = vars(cls)[name]
        kind = type(original) if isinstance(original, staticmethod | classmethod) else None
        function = original.__func__ if kind is not None else original
        if not isinstance(function, FunctionType):
            return False
        method = cls, name
        if method not in self._guarded:
            self._guarded.add(method)
            if method not in _ORIGINALS:
                wrapper = _guarded(function, method)
                _ORIGINALS[method] = original, wrapper if kind is None else kind(wrapper), [0]
                type.__setattr__(cls, name, _ORIGINALS[method][1])
            _ORIGINALS[method][2][0] += 1
        return True

    def allow(self, method: Method) -> None:
        """Allow calls of the method, which is watched from now on."""
        self._allowed.add(method)

    def forbids(self, method: Method) -> bool:
        return method in self._guarded and method not in self._allowed

    @contextmanager
    def on_duty(self) -> Iterator[None]:
        """Guard constructors while a program runs, whatever thread it uses."""
        _ON_DUTY.append(self)
        place = len(_ON_DUTY) - 1
        try:
            yield
        finally:
            del _ON_DUTY[place:]

    def relieve(self, other: Sentry) -> None:
        """Stand where ``other`` stood."""
        _ON_DUTY[:] = [self if each is other else each for each in _ON_DUTY]


def unguarded(method: Method) -> Any:
    """Return what the class itself defines under the method's name."""
    return _ORIGINALS[method][0] if method in _ORIGINALS else vars(method[0])[method[1]]


_ON_DUTY: list[Sentry] = []
# What a class defined, what stands in its place, and how many sentries want it there.
_ORIGINALS: dict[Method, tuple[Any, Any, list[int]]] = {}


def _guarded(function: Callable[..., Any], method: Method) -> Callable[..., Any]:
    @functools.wraps(function)
    def constructor(*args: Any, **kwargs: Any) -> Any:
        for sentry in _ON_DUTY:
            if sentry.forbids(method):
                sentry.stopped.add(method)
                raise Unwatched
        return function(*args, **kwargs)

    # Its signature is the original's; the original itself is not there to be called past the guard.
    constructor.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    del constructor.__wrapped__
    return constructor


def _dismiss(methods: set[Method]) -> None:
    for method in methods:
        cls, name = method
        original, guarded, count = _ORIGINALS[method]
        count[0] -= 1
        if not count[0]:
            del _ORIGINALS[method]
            if vars(cls).get(name) is guarded:
                type.__setattr__(cls, name, original)
