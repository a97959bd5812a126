"""Batches of a private loader know which record each row is, and stay so through what a loop does to them.

A loop may move a batch, scale it, cut it into pieces. It may not mix its rows: then a record would be in several
contributions, and the noise is for one. Rows are therefore followed by identity, through every torch function that
is applied to the batch: what selects or moves entries is applied to the records' numbers as well, what works entry
by entry keeps them, and what is left (a mean over the batch, a product, noise from a public generator) is marked as
mixed and the private model refuses it. A number made of records (``x.mean().item()``) cannot be followed, so the
sample remembers that there was one. A parameter that meets rows outside the model would be trained on them, and is
refused.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quietgrad.errors import BudgetError
from quietgrad.objectives.networks.tape import mapped
from quietgrad.torch.loss_replay import Given, Held, Made, backward, held, lost

__all__ = ["Owners", "Rows", "Sample", "owners_of", "plain"]


class Owners(NamedTuple):
    """Rows of sample ``draw``: the place in the sample of each; −1 is a row of no record."""

    draw: int
    places: Tensor

    def same(self, other: Owners) -> bool:
        """Whether the rows are the same, in the same order."""
        return self.draw == other.draw and torch.equal(self.places, other.places)


class Sample:
    """Whether numbers were made of a sample's records: those cannot be followed any further.

    ``made`` are the calls that ``losses`` are made again by.
    """

    def __init__(self) -> None:
        self.read = False
        self.made: list[Made] = []
        self.losses: list[Held] = []  # what may be differentiated

    def forget(self) -> None:
        """Its steps are made: sums of losses that outlive it keep nothing of it."""
        for made in self.made:
            made.forget()
        self.made.clear()
        self.losses.clear()


class Rows(Tensor):
    """A tensor whose first axis is examples of a known sample; ``owners`` is ``None`` if they are mixed.

    ``samples`` are those it was made of, and ``told`` is whether an output of the private model went into it: a
    loss or an accuracy, which a loop may look at.
    """

    owners: Owners | None = None
    samples: tuple[Sample, ...] = ()
    told: bool = False
    made: Held | None = None  # how, unless it is rows of the batch as they are
    seen: int = -1  # the tensor's version when it was marked: writing through another view of its memory changes it

    @staticmethod
    def mark(tensor: Tensor, owners: Owners | None) -> Tensor:
        """The tensor, marked."""
        marked = tensor if isinstance(tensor, Rows) else tensor.as_subclass(Rows)
        assert isinstance(marked, Rows)
        with torch._C.DisableTorchFunctionSubclass():
            marked.owners, marked.seen = owners, _version(marked)
        return marked

    @staticmethod
    def of(tensor: Tensor, owners: Owners, sample: Sample, output: Given | None = None) -> Tensor:
        """Rows of a sample, or an output of the model for them."""
        marked = Rows.mark(tensor, owners)
        assert isinstance(marked, Rows)
        marked.samples, marked.told = (sample,), output is not None
        marked.made = None if output is None else Held(output)
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__format__":  # f"{loss:.3f}": torch formats the numbers of plain tensors only
            return func(*plain(args), **kwargs)
        given = [value for value in _tensors((args, kwargs)) if isinstance(value, Rows)]
        with torch._C.DisableTorchFunctionSubclass():
            for value in given:
                if _version(value) != value.seen:
                    Rows.mark(value, None)
                    value.made = lost()
            strangers = [value for value in _tensors((args, kwargs)) if not isinstance(value, Rows)]
            if torch.is_grad_enabled() and any(value.is_leaf and value.requires_grad for value in strangers):
                raise BudgetError(
                    f"{name}: a parameter meets rows of the private loader outside the private model, or its "
                    "outputs: its gradient would be one of the records, without noise. Put it into the module "
                    "given to make_private; if it is not trained, set requires_grad_(False) or use torch.no_grad()."
                )
            others = [(value, _version(value)) for value in strangers]
            if name == "backward" and isinstance(args[0], Rows) and args[0].made is not None:
                weights = held(args[1] if len(args) > 1 else kwargs.get("gradient"), _origin)
                return backward(args[0].made, weights, lambda: func(*args, **kwargs))
            made = Made(func, held(args, _origin), held(kwargs, _origin), torch.is_grad_enabled())
            result = func(*(plain(args) if name == "__deepcopy__" else args), **kwargs)
            samples = tuple({id(sample): sample for value in given for sample in value.samples}.values())
            told = any(value.told for value in given)
            if not told and (name in _NUMBERS or any(_version(value) != before for value, before in others)):
                for sample in samples:
                    sample.read = True
            if name == "__setitem__":
                inner = [value for value in _tensors(args[1:]) if isinstance(value, Rows)]
                if isinstance(args[0], Rows):
                    Rows.mark(args[0], None if inner else args[0].owners)
                    args[0].samples, args[0].told = samples, told
                    args[0].made = Held(made)
                    for sample in samples:
                        sample.made.append(made)
                return result
            if name == "__set__" and func.__self__.__name__ not in _HARMLESS:
                args[0].owners = None
            if not any(True for _ in _tensors(result)):
                return result
            result = _marked(name, func, args, kwargs, given, result)
            for number, each in enumerate(_tensors(result)):
                if isinstance(each, Rows):
                    each.samples, each.told, each.made = samples, told, Held(made, number)
                    if told and each.dim() == 0 and each.requires_grad:
                        for sample in samples:
                            sample.losses.append(each.made)
            for sample in samples:
                sample.made.append(made)
            return result


def _origin(value: Tensor) -> Held | None:
    """Where rows come from; ``None`` of a tensor of nobody."""
    if not isinstance(value, Rows):
        return None
    if value.owners is not None and not value.told:
        return Held(Given(value.as_subclass(Tensor), value.owners.places))
    return lost() if value.made is None else value.made


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENTRYWISE = _words("""
    to float double half bfloat16 long int bool type type_as cpu cuda contiguous clone detach requires_grad
    pin_memory add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow neg negative
    abs exp log log1p sqrt rsqrt square reciprocal sin cos tanh sigmoid relu clamp clip round floor ceil trunc
    nan_to_num eq ne lt le gt ge logical_and logical_or logical_not logical_xor where masked_fill maximum
    minimum copy rsub radd rmul rdiv rtruediv rpow truediv floordiv mod iadd isub imul itruediv ipow invert and
    or xor isfinite isnan sign erf expm1 lerp deepcopy""")
_MOVING = _words("""
    __getitem__ split split_with_sizes chunk tensor_split narrow index_select select unbind flip roll permute
    transpose swapaxes movedim moveaxis reshape view view_as flatten unflatten squeeze unsqueeze expand expand_as
    cat concat stack repeat repeat_interleave hstack vstack""")

_NUMBERS = _words("""
    item tolist numpy equal allclose is_nonzero storage untyped_storage __float__ __int__ __bool__ __index__
    __complex__ __array__ __contains__ __dlpack__""")  # values leave torch, and nobody follows them
_JOINING = _words("cat concat stack hstack vstack")
_HARMLESS = _words("requires_grad grad")  # attributes that may be set


def _marked(name: str, func: Any, args: Any, kwargs: Any, given: list[Rows], result: Any) -> Any:
    owners = [value.owners for value in given]
    known = [each for each in owners if each is not None]
    if len(known) < len(owners) or not known or any(each.draw != known[0].draw for each in known):
        return mapped(result, lambda tensor: Rows.mark(tensor, None))
    if name.strip("_") in _ENTRYWISE:
        aligned = all(each.same(known[0]) for each in known)

        def keep(tensor: Tensor) -> Tensor:
            fits = all(v.dim() == tensor.dim() and v.dim() > 0 and len(v) == len(tensor) for v in given)
            return Rows.mark(tensor, known[0] if aligned and fits else None)

        return mapped(result, keep)
    by_rows = name == "__getitem__" and any(isinstance(value, Rows) for value in _tensors(args[1:]))
    if name in _MOVING and not by_rows:
        places = _places if name not in _JOINING else _places_or_none
        try:
            numbers = iter(_tensors(func(*mapped(args, places), **mapped(kwargs, places))))
            return mapped(result, lambda tensor: Rows.mark(tensor, _rows_of(next(numbers), known[0].draw)))
        except (RuntimeError, TypeError, ValueError, IndexError):
            pass
    return mapped(result, lambda tensor: Rows.mark(tensor, None))


def _places(value: Tensor) -> Tensor:
    """The place in the sample of every entry's row; indices are left as they are."""
    if isinstance(value, Rows):
        assert value.owners is not None
        column = value.owners.places.to(value.device).view(-1, *([1] * (value.dim() - 1)))
        return column.expand(value.shape)
    return torch.full_like(value, -1, dtype=torch.int64) if value.is_floating_point() else value


def _places_or_none(value: Tensor) -> Tensor:
    return _places(value) if isinstance(value, Rows) else torch.full_like(value, -1, dtype=torch.int64)


def _rows_of(places: Tensor, draw: int) -> Owners | None:
    """Whose rows these are, or None if entries of several records are in one."""
    if places.dim() < 1:
        return None
    flat = places.reshape(len(places), -1)
    if flat.shape[1] == 0:
        return None
    highest = flat.max(1).values if len(flat) else flat[:, 0]
    if not bool(((flat == highest[:, None]) | (flat == -1)).all()):
        return None
    return Owners(draw, highest.cpu())


def _version(value: Tensor) -> int:
    """How often it was written into; torch.inference_mode() does not count."""
    return 0 if value.is_inference() else int(value._version)


def _stale(value: Rows) -> bool:
    """Whether someone has written into it since, through another view."""
    with torch._C.DisableTorchFunctionSubclass():
        return _version(value) != value.seen


def plain(value: Any) -> Any:
    """The same structure without marks."""
    return mapped(value, lambda tensor: tensor.as_subclass(Tensor) if isinstance(tensor, Rows) else tensor)


def owners_of(values: tuple[Any, ...]) -> Owners | str:
    """Whose rows the arguments of a model are; or why that is not known."""
    found: list[Owners] = []
    for value in values:
        if not isinstance(value, Rows):
            return "a tensor that did not come from the private loader"
        if value.told:
            return "an output of the private model"
        if value.owners is None or _stale(value):
            return "rows that were mixed, drawn for or reordered in a way that cannot be followed"
        found.append(value.owners)
    if not all(each.same(found[0]) for each in found):
        return "tensors whose rows are of different records"
    if bool((found[0].places < 0).any()):
        return "rows that are of no record"
    return found[0]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | UserDict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
