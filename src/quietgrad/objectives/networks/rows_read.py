"""Which rows a data set looks at when one record is read, where they are kept in memory.

Mixup or mosaic in ``__getitem__`` puts one person into many records. In general nobody sees what a data set reads.
Where it keeps a tensor, an array or a list with one row per record, rows are watched while some records are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["watched"]

Rows = dict[str, set[int]]


@contextmanager
def watched(data: Any) -> Iterator[Rows]:
    """The rows that are taken, while this lasts, of each attribute with one row per record.

    >>> class Pairs:
    ...     x = None
    ...     def __init__(self): self.x = torch.arange(4.0)
    ...     def __len__(self): return 4
    ...     def __getitem__(self, i): return self.x[i] + self.x[-1]
    >>> with watched(pairs := Pairs()) as rows:
    ...     print(pairs[1], rows)
    tensor(4.) {'x': {1, 3}}
    """
    held = getattr(data, "__dict__", {})
    kept = {name: value for name, value in held.items() if type(value) in _KINDS and _length(value) == len(data)}
    rows: Rows = {name: set() for name in kept}
    try:
        for name, value in kept.items():
            held[name] = _KINDS[type(value)](value, rows[name])
        yield rows
    finally:
        held.update(kept)


def _length(value: Any) -> int:
    return 0 if isinstance(value, Tensor | np.ndarray) and value.ndim == 0 else len(value)


def _note(rows: set[int], key: Any, length: int) -> None:
    first = key[0] if isinstance(key, tuple) and key else key
    if isinstance(first, slice) or first is None or first is Ellipsis:
        return
    numbers = np.asarray(first)
    if numbers.dtype.kind in "iu":
        rows.update((numbers.reshape(-1) % length).tolist())


class _List(list[Any]):
    def __init__(self, value: list[Any], rows: set[int]) -> None:
        super().__init__(value)
        self.rows = rows

    def __getitem__(self, key: Any) -> Any:
        _note(self.rows, key, len(self))
        return super().__getitem__(key)


class _Array(np.ndarray[Any, Any]):
    rows: set[int]

    def __getitem__(self, key: Any) -> Any:
        plain = self.view(np.ndarray)
        if hasattr(self, "rows"):  # not what was computed of it
            _note(self.rows, key, len(plain))
        return plain[key]


class _Tensor(Tensor):
    rows: set[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__ and isinstance(args[0], cls) and "rows" in vars(args[0]):
                _note(args[0].rows, args[1], len(args[0]))
            return func(*args, **(kwargs or {}))


def _array(value: Any, rows: set[int]) -> Any:
    view = value.view(_Array)
    view.rows = rows
    return view


def _tensor(value: Tensor, rows: set[int]) -> Tensor:
    view = value.as_subclass(_Tensor)
    view.rows = rows
    return view


_KINDS: dict[type, Any] = {list: _List, np.ndarray: _array, Tensor: _tensor}
