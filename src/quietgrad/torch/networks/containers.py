"""Containers of Python as a program may change them: their contents by identity, and how to put those back."""

from __future__ import annotations

import array
import io
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from operator import is_
from types import CellType, FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

MISSING: Any = object()


class Container(Protocol):
    """Something with contents: whether these are the same objects as before, and how to put them back."""

    def same(self) -> bool: ...

    def restore(self) -> None: ...


class Entries:
    """A dictionary of any class, in its order; also the attributes of an object."""

    __slots__ = ("_base", "_keys", "_values", "held")

    def __init__(self, held: dict[Any, Any]) -> None:
        # The class's own methods may be the program's; those of the base are not.
        self._base: Any = OrderedDict if isinstance(held, OrderedDict) else dict
        self.held = held
        self._keys, self._values = tuple(self._base.keys(held)), tuple(self._base.values(held))

    def same(self) -> bool:
        held = self.held
        if len(held) != len(self._keys):
            return False
        return all(map(is_, self._base.values(held), self._values)) and all(
            map(is_, self._base.keys(held), self._keys)
        )

    def restore(self) -> None:
        self._base.clear(self.held)
        for key, value in zip(self._keys, self._values, strict=True):
            self._base.__setitem__(self.held, key, value)


class Dictionaries:
    """Many plain dictionaries, as the attributes of modules are: asked all at once."""

    __slots__ = ("_each", "_held", "_keys", "_sizes", "_values")

    def __init__(self, each: list[Entries]) -> None:
        self._each = each
        self._held = [entries.held for entries in each]
        self._sizes = [len(held) for held in self._held]
        self._keys = tuple(chain.from_iterable(self._held))
        self._values = tuple(chain.from_iterable(map(dict.values, self._held)))

    def same(self) -> bool:
        held = self._held
        return (
            list(map(len, held)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, held)), self._values))
            and all(map(is_, chain.from_iterable(held), self._keys))
        )

    def restore(self) -> None:
        for entries in self._each:
            if not entries.same():
                entries.restore()


class Empty:
    """Dictionaries that are empty, as most of a module's are: asked all at once."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: list[dict[Any, Any]] = []

    def same(self) -> bool:
        return not any(self.held)

    def restore(self) -> None:
        for each in self.held:
            each.clear()


class FunctionParts:
    """The defaults and the code of a function."""

    __slots__ = ("_function", "_parts")

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._parts = function.__defaults__, function.__kwdefaults__, function.__code__

    def same(self) -> bool:
        now = self._function
        return all(map(is_, (now.__defaults__, now.__kwdefaults__, now.__code__), self._parts))

    def restore(self) -> None:
        now = self._function
        now.__defaults__, now.__kwdefaults__, now.__code__ = self._parts


class Items:
    """A list or a deque of any class."""

    __slots__ = ("_held", "_items")

    def __init__(self, held: Any) -> None:
        self._held, self._items = held, tuple(held)

    def same(self) -> bool:
        return len(self._held) == len(self._items) and all(map(is_, self._held, self._items))

    def restore(self) -> None:
        base: Any = list if isinstance(self._held, list) else deque
        base.clear(self._held)
        base.extend(self._held, self._items)


class Members:
    """A set of any class."""

    __slots__ = ("_held", "_ids", "_members")

    def __init__(self, held: set[Any]) -> None:
        self._held, self._members = held, tuple(held)
        self.restore()  # the order of a set tells what was in it before, so it is made anew from the beginning on
        self._ids = list(map(id, held))

    def same(self) -> bool:
        same = list(map(id, self._held)) == self._ids
        if same:  # members that came and went leave a larger table, in which those that follow have another order
            self.restore()
        return same

    def restore(self) -> None:
        set.clear(self._held)
        set.update(self._held, self._members)


class SparseParts:
    """A sparse tensor, by a copy: an operation in place gives it other indices and values."""

    __slots__ = ("_held", "_saved")

    def __init__(self, held: Tensor) -> None:
        self._held, self._saved = held, held.detach().clone()

    def same(self) -> bool:
        now, then = _parts(self._held), _parts(self._saved)
        return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(now, then, strict=True))

    def restore(self) -> None:
        with torch.no_grad():
            self._held.copy_(self._saved)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return tensor.crow_indices(), tensor.col_indices(), tensor.values()


class SavedArray:
    """The contents of an array when it was saved, with its shape and whether it may be written."""

    __slots__ = ("_held", "_saved", "_writeable")

    def __init__(self, held: Any) -> None:
        self._held, self._saved, self._writeable = held, held.copy(), held.flags.writeable

    def same(self) -> bool:
        """Whether it is what it was, bit by bit; of objects, the same ones."""
        held, saved = self._held, self._saved
        kind = held.flags.writeable is self._writeable and held.shape == saved.shape
        return kind and bool(held.tobytes() == saved.tobytes())

    def restore(self) -> None:
        held = self._held
        if not held.flags.writeable:
            if not self._writeable and held.shape == self._saved.shape and held.tobytes() == self._saved.tobytes():
                return
            held.flags.writeable = True
        if held.shape != self._saved.shape:
            held.shape = self._saved.shape
        held[...] = self._saved
        held.flags.writeable = self._writeable


class Names:
    """Some names of a namespace: globals of a Python module, or what a class defines."""

    __slots__ = ("_drop", "_names", "_put", "_space", "_values")

    def __init__(
        self, space: Mapping[str, Any], names: tuple[str, ...], put: Callable[[str, Any], None],
        drop: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._space, self._names, self._put, self._drop = space, names, put, drop
        self._values = tuple(space.get(name, MISSING) for name in names)

    def same(self) -> bool:
        return all(map(is_, map(self._space.get, self._names, repeat(MISSING)), self._values))

    def restore(self) -> None:
        for name, value in zip(self._names, self._values, strict=True):
            now = self._space.get(name, MISSING)
            if value is MISSING and now is not MISSING:
                self._drop(name)
            elif value is not now:
                self._put(name, value)


class ClassBody(Names):
    """Everything that a class defines. What a program adds to it is removed."""

    __slots__ = ("_class",)

    def __init__(self, cls: type) -> None:
        self._class = cls
        super().__init__(
            vars(cls), tuple(vars(cls)), lambda name, value: type.__setattr__(cls, name, value),
            lambda name: type.__delattr__(cls, name),
        )  # fmt: skip

    def same(self) -> bool:
        return len(self._space) == len(self._names) and super().same()

    def restore(self) -> None:
        for name in set(self._space).difference(self._names):
            self._drop(name)
        super().restore()


class Cell:
    """A variable of a closure."""

    __slots__ = ("_cell", "_value")

    def __init__(self, cell: CellType) -> None:
        self._cell, self._value = cell, contents(cell)

    def same(self) -> bool:
        return contents(self._cell) is self._value

    def restore(self) -> None:
        if self._value is MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._value


def contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


class Slots:
    """The slots of an object, by the descriptors of its classes."""

    __slots__ = ("_held", "_members", "_values")

    def __init__(self, held: object, members: tuple[Any, ...]) -> None:
        self._held, self._members, self._values = held, members, tuple(member(held, each) for each in members)

    def same(self) -> bool:
        return all(map(is_, map(member, repeat(self._held), self._members), self._values))

    def restore(self) -> None:
        for each, value in zip(self._members, self._values, strict=True):
            if member(self._held, each) is value:
                continue
            if value is MISSING:
                each.__delete__(self._held)
            else:
                each.__set__(self._held, value)


def member(held: object, descriptor: Any) -> Any:
    try:
        return descriptor.__get__(held, type(held))
    except AttributeError:
        return MISSING


class Bytes:
    """A bytearray or an array of the standard library."""

    __slots__ = ("_held", "_saved")

    def __init__(self, held: bytearray | array.array[Any]) -> None:
        self._held: Any = held
        self._saved: Any = held[:]

    def same(self) -> bool:
        return bytes(self._held) == bytes(self._saved)

    def restore(self) -> None:
        self._held[:] = self._saved


class FileInMemory:
    """A file in memory, of text or bytes: its contents and its position."""

    __slots__ = ("_held", "_saved")

    def __init__(self, held: Any) -> None:
        self._held, self._saved = held, _written(held)

    def same(self) -> bool:
        return _written(self._held) == self._saved

    def restore(self) -> None:
        if self._saved is None:
            self._held.close()
            return
        text, place = self._saved
        base: Any = io.StringIO if isinstance(self._held, io.StringIO) else io.BytesIO
        base.__init__(self._held, text)  # opens one again that was closed
        self._held.seek(place)


def _written(held: Any) -> tuple[Any, int] | None:
    return None if held.closed else (held.getvalue(), held.tell())


class OwnGenerator:
    """A generator of random numbers that the program has: the release seeds it, and it is put back afterwards."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state(self) -> Any:
        held = self.held
        if isinstance(held, random.Random):
            return held.getstate()
        if isinstance(held, np.random.BitGenerator):
            return held.state
        return held.get_state()

    def put(self, state: Any) -> None:
        held = self.held
        if isinstance(held, random.Random):
            held.setstate(state)
        elif isinstance(held, np.random.BitGenerator):
            held.state = state
        else:
            held.set_state(state)

    def seed(self, word: int) -> None:
        held = self.held
        if isinstance(held, random.Random):
            held.seed(word)
        elif isinstance(held, np.random.BitGenerator):
            held.state = type(held)(word).state
        elif isinstance(held, torch.Generator):
            held.manual_seed(word % 2**63)
        else:  # numpy's RandomState
            held.seed([word % 2**32, word >> 32])
