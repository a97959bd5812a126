"""One flat vector, numpy or torch: the four operations algorithms need beyond arithmetic.

Algorithms are written with ``+ - *`` and the functions here, so the same file trains a table and a network.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self, TypeAlias

import numpy as np


class Vector(Protocol):
    """A one-dimensional array, ``np.ndarray`` or ``torch.Tensor``; a module's parameters are views of it.

    Arithmetic with a number or with a vector of the same kind gives a vector of the same kind.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __neg__(self) -> Self: ...
    def __add__(self, other: Any, /) -> Self: ...
    def __radd__(self, other: Any, /) -> Self: ...
    def __sub__(self, other: Any, /) -> Self: ...
    def __rsub__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def __rmul__(self, other: Any, /) -> Self: ...
    def __truediv__(self, other: Any, /) -> Self: ...
    def dot(self, other: Any, /) -> Any: ...


OwnVector: TypeAlias = Any
"""A vector of the kind that an objective works with: an array for a table, a tensor for a network.

Objectives receive only vectors that their own ``initial`` method made, so their methods name their own kind.
"""


def dot(a: Vector, b: Vector) -> float:
    """⟨a, b⟩.

    >>> dot(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    11.0
    """
    return float(a.dot(b))


def norm(a: Vector) -> float:
    """‖a‖₂.

    >>> norm(np.array([3.0, 4.0]))
    5.0
    """
    return math.sqrt(dot(a, a))


def zeros_like(a: OwnVector) -> OwnVector:
    """A zero vector of the same kind, length and type as ``a``."""
    return np.zeros(a.shape, a.dtype) if isinstance(a, np.ndarray) else a.new_zeros(a.shape)


def zeros_without_memory(a: OwnVector) -> OwnVector:
    """A zero vector of the same kind, length and type as ``a``, to be read and not written.

    numpy's zeros take memory when they are written, and torch's when they are made.
    """
    return np.zeros(a.shape, a.dtype) if isinstance(a, np.ndarray) else a.new_zeros(()).expand(a.shape)


def wide_zeros(a: OwnVector) -> OwnVector:
    """A zero vector of the same kind and length as ``a`` that sums are formed in: float64.

    In float32 adding a record changes how all later ones are rounded; at 10⁶ records that is as much as C.
    """
    return np.zeros(a.shape, np.float64) if isinstance(a, np.ndarray) else a.new_zeros(0).double().new_zeros(len(a))


def subtracted_from(a: OwnVector, b: OwnVector) -> OwnVector:
    """a − b, in the memory of ``b`` where it can be: of a network's length, new memory costs more than the sum.

    >>> subtracted_from(np.array([3.0, 4.0]), np.array([1.0, 1.0]))
    array([2., 3.])
    """
    if isinstance(a, np.ndarray) or a.dtype != b.dtype or a.requires_grad:
        return a - b
    return b.neg_().add_(a)


def copy(a: OwnVector) -> OwnVector:
    """A vector equal to ``a`` that shares no memory with it."""
    return a.copy() if isinstance(a, np.ndarray) else a.detach().clone()


def sqrt(a: OwnVector) -> OwnVector:
    """Coordinate-wise square root."""
    return np.sqrt(a) if isinstance(a, np.ndarray) else a.sqrt()


def all_finite(a: OwnVector) -> bool:
    """Whether every coordinate is a finite number."""
    return bool(np.isfinite(a).all()) if isinstance(a, np.ndarray) else bool(a.isfinite().all())
