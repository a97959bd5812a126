"""Where the examples of a batch lie in a tensor: along an axis of their own, or folded into one of k·B rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Place", "UnplannedRows", "example_places", "parted", "refuse_other_rows", "rejoined"]


class UnplannedRows(RuntimeError):
    """A layer was called with other rows than one for each example."""


class Place(NamedTuple):
    """An axis of k·B rows: the k rows of an example follow each other, or (``inner``) those of a batch do.

    >>> rows = torch.arange(6)
    >>> parted(rows, Place(0, folded=True), 2)[0].tolist(), parted(rows, Place(0, True, inner=True), 2)[0].tolist()
    ([[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5]])
    """

    axis: int
    folded: bool = False
    inner: bool = False


def parted(value: Tensor, place: Place | None, examples: int) -> tuple[Tensor, int | None]:
    """The tensor with an axis for the examples alone beside one of k rows, and which axis that is."""
    if place is None:
        return value, None
    rows = value.shape[place.axis]
    if rows % examples or (rows != examples and not place.folded):
        raise UnplannedRows(f"{rows} rows for {examples} examples.")
    if place.inner:
        return _split(value, place.axis, rows // examples, examples), place.axis + 1
    return _split(value, place.axis, examples, rows // examples), place.axis


def rejoined(value: Tensor, place: Place) -> Tensor:
    """The inverse of :func:`parted`."""
    return value.flatten(place.axis, place.axis + 1)


def refuse_other_rows(name: str, tensors: Sequence[Tensor], places: Sequence[Place | None], examples: int) -> None:
    """Raise UnplannedRows unless there are rows for each example where the plan says so."""
    wrong = len(tensors) != len(places)
    for tensor, place in zip(tensors, places, strict=False):
        if place is not None:
            rows = tensor.shape[place.axis] if tensor.dim() > place.axis else -1
            wrong |= rows % examples != 0 if place.folded else rows != examples
    if wrong:
        raise UnplannedRows(f"layer {name!r} was not called with one row for each of {examples} examples.")


def example_places(two: Sequence[Tensor], one: Sequence[Tensor]) -> tuple[Place | None, ...] | None:
    """Where the examples lie in each tensor, from its values for two examples and for the first of them.

    The axis is the one that is twice as long. In which order an axis of 2k rows holds them the values tell.
    """
    if [t.dim() for t in two] != [t.dim() for t in one]:
        return None
    places: list[Place | None] = []
    for a, b in zip(two, one, strict=True):
        grown = [axis for axis, sizes in enumerate(zip(a.shape, b.shape, strict=True)) if sizes[0] != sizes[1]]
        if len(grown) > 1 or any(a.shape[axis] != 2 * b.shape[axis] for axis in grown):
            return None
        if not grown:
            places.append(None)
            continue
        (axis,) = grown
        rows = b.shape[axis]
        outer = _split(a, axis, 2, rows).select(axis, 0)
        inner = _split(a, axis, rows, 2).select(axis + 1, 0)
        places.append(Place(axis, rows > 1, rows > 1 and _distance(inner, b) < _distance(outer, b)))
    return tuple(places)


def _split(value: Tensor, axis: int, *sizes: int) -> Tensor:
    return value.reshape(*value.shape[:axis], *sizes, *value.shape[axis + 1 :])


def _distance(a: Tensor, b: Tensor) -> float:
    with torch.no_grad():
        return float((a.double() - b.double()).nan_to_num().norm())
