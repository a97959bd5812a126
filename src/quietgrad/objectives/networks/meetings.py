"""Parameters that meet the examples outside of a layer: class tokens, position embeddings, scales, raw weights.

A tensor made of parameters alone is the same for every example: *shared*. Where it meets a tensor that has examples
(or is copied for them), each example gets a copy of its own, so that the copy's gradient is that example's:

    out = op(s, x)   →   out_i = op(s_i, x_i),  s_i = s,      ∂L/∂s_i = b_i,   v_i = (∂s/∂θ)ᵀ b_i

Products with a raw weight, look-ups in a raw table and normalisations with raw scales go to the kernels of the
layers that do the same. Sums and products, element by element, broadcast the copies; any other operation is mapped
over the examples by vmap. Which operation meets whom, and where the examples lie, is planned on made-up examples
(:mod:`quietgrad.objectives.networks.anatomy`); what was not planned ends the pass, which is then done one record
at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from quietgrad.objectives.networks.arranged import matrix_kernel, sum_of_products
from quietgrad.objectives.networks.fallback import vmapping
from quietgrad.objectives.networks.layers import Kernel, embedding_kernel, layer_norm_kernel, linear_kernel
from quietgrad.objectives.networks.places import Place, UnplannedRows, parted, rejoined
from quietgrad.objectives.networks.recurrent import RECURRENT, recurrent_use
from quietgrad.objectives.networks.tape import Tape, Unit, tensors_of

__all__ = ["CannotMeet", "Form", "Meeting", "Meetings", "Origin", "Sharing", "ELEMENTWISE", "form_of", "in_place"]

_NAMES = ("add", "sub", "mul", "div", "true_divide", "rsub", "__rsub__", "__rdiv__", "__rtruediv__")
ELEMENTWISE = {*_NAMES, "add_", "sub_", "mul_", "div_"}


class CannotMeet(RuntimeError):
    """An operation on these parameters cannot be taken apart by examples."""

    def __init__(self, names: Sequence[str], why: str) -> None:
        super().__init__(f"parameter {names[0]!r}: {why}.")
        self.names = tuple(names)
        self.why = why


class Origin(NamedTuple):
    """What a shared tensor is: a parameter, its transpose, rows of it, or something made of several."""

    kind: Literal["parameter", "transposed", "rows", "made"]
    names: tuple[str, ...]
    tokens: Tensor | None = None
    padding_idx: int | None = None


@dataclass(frozen=True)
class Meeting:
    """How one operation on shared tensors is done.

    "shared": it gives a shared tensor; "kernel": by a layer's kernel; "copied": element by element, or as the mask
    of an attention; "mapped": by vmap. ``places`` are those of the leaves of its arguments, ``units`` one for each
    shared leaf that is copied; ``scaled`` leaves are sizes that count examples.
    """

    kind: Literal["shared", "kernel", "copied", "mapped"]
    places: tuple[Place | None, ...] = ()
    outputs: tuple[Place | None, ...] = ()
    units: tuple[Unit | None, ...] = ()
    scaled: tuple[int, ...] = ()
    given: int = 0  # "kernel": which leaf is the layer's input


class Form(NamedTuple):
    """An operation that is a layer's: its input, and which parameters are its weight and bias."""

    input: Tensor
    roles: dict[str, str]  # weight, bias → name
    kernel: Kernel


def in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _without_overrides(function: Any) -> Callable[..., Any]:
    """The same Python function, which does not offer itself to modes: what it calls does."""
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# Operations that are made of others, which meet the parameters one by one.
_COMPOSED: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _without_overrides(F.multi_head_attention_forward)
}


# Operations that are rewritten into others.
_TAKEN_APART: dict[Any, Callable[..., Any]] = {**RECURRENT, torch.einsum: sum_of_products}


class Sharing(TorchFunctionMode):
    """Knows which tensors are made of the given parameters alone."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        # With the tensors: an id is one only while its object lives.
        self.known = {id(t): (t, Origin("parameter", (name,))) for name, t in parameters.items()}
        self.leaves = dict(parameters)

    def origin(self, value: Any) -> Origin | None:
        """What a shared tensor is; None of any other."""
        found = self.known.get(id(value))
        return None if found is None else found[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._concerned(args) and not (kwargs and self._concerned(tuple(kwargs.values()))):
            return self.apart(func, args, kwargs or {})
        kwargs = kwargs or {}
        if func in _COMPOSED:
            with self:
                return _COMPOSED[func](*args, **kwargs)
        if func in _TAKEN_APART:
            return _TAKEN_APART[func](self, func, *args, **kwargs)
        return self.meet(func, args, kwargs)

    def _concerned(self, values: Sequence[Any]) -> bool:
        for value in values:  # every call of the forward pass comes here
            if id(value) in self.known or (isinstance(value, tuple | list) and self._concerned(value)):
                return True
        return False

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation without shared tensors."""
        return func(*args, **kwargs)

    def meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation with some."""
        raise NotImplementedError

    def key(self, func: Any, leaves: Sequence[Any]) -> Hashable:
        """By what an operation is known again: what it is, and of what kind its arguments are."""
        return func, tuple(
            (origin.kind, origin.names) if (origin := self.origin(leaf)) else leaf.dim()
            for leaf in leaves
            if isinstance(leaf, Tensor)
        )

    def share(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """The result is made of shared tensors alone. One that needs no gradient is a constant."""
        values = tensors_of(result)
        names = sorted({n for t in tensors_of((args, kwargs)) if (o := self.origin(t)) for n in o.names})
        for value in values:
            if value.requires_grad and id(value) not in self.known:
                self.known[id(value)] = (value, self._origin_of(func, args, kwargs, tuple(names)))

    def _origin_of(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]
    ) -> Origin:
        first = self.origin(args[0]) if args else None
        if first is not None and first.kind == "parameter" and args[0].dim() == 2 and _transposes(func, args):
            return Origin("transposed", names)
        if func is F.embedding:
            given = _bound(("input", "weight", "padding_idx"), args, kwargs)
            origin = self.origin(given["weight"])
            if origin is not None and origin.kind == "parameter" and given["input"].numel():
                return Origin("rows", names, given["input"], _padding(given))
        return Origin("made", names)


def _padding(given: Mapping[str, Any]) -> int | None:
    padding = given.get("padding_idx")
    return None if padding is None else int(padding) % len(given["weight"])


def _transposes(func: Any, args: tuple[Any, ...]) -> bool:
    # Accessors of one attribute are equal, though each asking makes a new one.
    if func in (Tensor.T.__get__, Tensor.mT.__get__) or func in (Tensor.t, torch.t):  # type: ignore[attr-defined]
        return True
    return func in (Tensor.transpose, torch.transpose) and {axis % 2 for axis in args[1:]} == {0, 1}


def form_of(sharing: Sharing, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
    """The layer that an operation is, or None."""
    name = getattr(func, "__name__", "")
    arrangement = getattr(func, "arrangement", None)
    if arrangement is not None:
        given = _bound(("input", "weight"), args, kwargs)
    elif func in (F.linear, recurrent_use):
        given = _bound(("input", "weight", "bias"), args, kwargs)
    elif name in ("matmul", "mm", "__matmul__"):
        given = _bound(("input", "weight"), args, kwargs)
        given["weight"] = given.get("weight", given.get("other", given.get("mat2")))
    elif name == "addmm" and not {"beta", "alpha"} & set(kwargs):
        given = _bound(("bias", "input", "weight"), args, kwargs)
    elif func is F.embedding:
        given = _bound(("input", "weight", "padding_idx", "max_norm", "norm_type", "by_freq"), args, kwargs)
        if given.get("max_norm") is not None or given.get("by_freq") or kwargs.get("scale_grad_by_freq"):
            return None
    elif func is F.layer_norm:
        given = _bound(("input", "shape", "weight", "bias", "eps"), args, kwargs)
        given["shape"] = given.get("shape", given.get("normalized_shape"))
    else:
        return None
    roles, origins = {}, {}
    for role in ("weight", "bias"):
        value = given.get(role)
        origin = sharing.origin(value) if isinstance(value, Tensor) else None
        if origin is not None:
            origins[role] = origin
            (roles[role],) = origin.names if len(origin.names) == 1 else ("",)
    x, weight = given.get("input"), given.get("weight")
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or sharing.origin(x) is not None or not roles:
        return None
    if any(o.kind != "parameter" for role, o in origins.items() if role == "bias") or len(
        set(roles.values())
    ) < len(roles):
        return None
    kind = origins["weight"].kind if "weight" in origins else "parameter"
    kernel: Kernel
    if arrangement is not None:
        kernel = matrix_kernel(weight.shape, arrangement)
    elif func in (F.linear, recurrent_use) and kind == "parameter" and weight.dim() == 2:
        kernel = linear_kernel(*weight.shape)
    elif name in ("matmul", "mm", "__matmul__", "addmm") and weight.dim() == 2 and x.dim() >= 2:
        if kind == "parameter":
            kernel = linear_kernel(weight.shape[1], weight.shape[0], swapped=True)
        elif kind == "transposed":
            kernel = linear_kernel(weight.shape[1], weight.shape[0])
        else:
            return None
        bias = given.get("bias")
        if isinstance(bias, Tensor) and bias.shape != weight.shape[1:]:
            return None
    elif func is F.embedding and kind == "parameter":
        kernel = embedding_kernel(len(weight), _padding(given))
    elif func is F.layer_norm and kind == "parameter":
        kernel = layer_norm_kernel(list(given["shape"]), given.get("eps", 1e-5))
    else:
        return None
    return Form(x, roles, kernel)


def _bound(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


class Meetings(Sharing):
    """Does the planned operations so that every example's gradient is its own."""

    def __init__(self, plan: Mapping[Hashable, Meeting], parameters: Mapping[str, Tensor], tape: Tape) -> None:
        super().__init__(parameters)
        self.plan = plan
        self.tape = tape

    def meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, shape = tree_flatten((args, kwargs))
        meeting = self.plan.get(self.key(func, leaves))
        if meeting is None or meeting.kind == "shared":
            result = func(*args, **kwargs)
            if meeting is not None:
                self.share(func, args, kwargs, result)
            elif tensors_of(result) or in_place(func):  # else a shape, a device: no use of the values
                raise UnplannedRows(f"{getattr(func, '__name__', func)} met parameters as it did not when planned.")
            return result
        try:
            return getattr(self, f"_{meeting.kind}")(func, leaves, shape, meeting)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UnplannedRows):
                raise
            names = [n for leaf in leaves if (o := self.origin(leaf)) for n in o.names]
            raise CannotMeet(names, f"{getattr(func, '__name__', func)} cannot be mapped over examples") from error

    def _kernel(self, func: Any, leaves: list[Any], shape: Any, meeting: Meeting) -> Any:
        plain = [leaf.detach() if self.origin(leaf) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(plain, shape)
        output = func(*args, **kwargs)
        (unit,) = meeting.units
        assert unit is not None
        self.tape.leave(unit, (leaves[meeting.given],), {}, output)
        return output

    def _copied(self, func: Any, leaves: list[Any], shape: Any, meeting: Meeting) -> Any:
        """Element by element: a copy broadcasts as the shared tensor does, with an axis for the examples."""
        (place,) = meeting.outputs
        assert place is not None
        rank = max(leaf.dim() for leaf in leaves if isinstance(leaf, Tensor))
        (rows, *_) = {parted(leaves[i], p, self.tape.examples)[0].shape[p.axis + (not p.inner)]
                      for i, p in enumerate(meeting.places) if p is not None}  # fmt: skip
        for i, unit in enumerate(meeting.units):
            if unit is None:
                continue
            shared = leaves[i]
            wide = shared.detach().reshape((1,) * (rank - shared.dim()) + shared.shape)
            if wide.shape[place.axis] != 1:
                raise UnplannedRows("a shared tensor met the axis of the examples.")
            axis = place.axis + place.inner
            sizes_of_copy = list(wide.unsqueeze(place.axis).shape)
            sizes_of_copy[axis] = self.tape.examples
            copy = wide.unsqueeze(place.axis).expand(sizes_of_copy).requires_grad_()
            spread = list(sizes_of_copy)
            spread[place.axis + (not place.inner)] = rows
            leaves[i] = rejoined(copy.expand(spread) if rows > 1 else copy, place)
            self._keep(unit, shared, copy, axis)
        args, kwargs = tree_unflatten(leaves, shape)
        return func(*args, **kwargs)

    def _mapped(self, func: Any, leaves: list[Any], shape: Any, meeting: Meeting) -> Any:
        """One example at a time, as a batch of its own, by vmap."""
        examples = self.tape.examples
        axes: list[int | None] = []
        for i, leaf in enumerate(leaves):
            unit = meeting.units[i]
            if unit is not None:
                copy = leaf.detach().expand(examples, *leaf.shape).requires_grad_()
                self._keep(unit, leaf, copy, 0)
                leaves[i] = copy
                axes.append(0)
            elif isinstance(leaf, Tensor):
                leaves[i], axis = parted(leaf, meeting.places[i], examples)
                axes.append(axis)
            elif i in meeting.scaled:
                if leaf % examples:
                    raise UnplannedRows(f"a size of {leaf} for {examples} examples.")
                leaves[i] = leaf // examples
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        made: Any = None

        def one(*values: Tensor) -> tuple[Tensor, ...]:
            filled = list(leaves)
            for i, value in zip(tensors, values, strict=True):
                filled[i] = value
            args, kwargs = tree_unflatten(filled, shape)
            nonlocal made
            made = func(*args, **kwargs)
            return tuple(tensors_of(made))

        out = tuple(place.axis + place.inner for place in meeting.outputs if place is not None)
        with vmapping():
            results = vmap(one, in_dims=tuple(axes), out_dims=out)(*(leaves[i] for i in tensors))
        # As the operation itself lays its result out: what follows may look at it as another shape.
        joined = [
            rejoined(value, p).contiguous()
            for value, p in zip(results, meeting.outputs, strict=True)
            if p is not None
        ]
        if isinstance(made, Tensor):
            return joined[0]
        return type(made)(joined)

    def _keep(self, unit: Unit, shared: Tensor, copy: Tensor, axis: int) -> None:
        origin = self.origin(shared)
        assert origin is not None
        args: tuple[Any, ...] = ()
        size = (self.tape.examples, *shared.shape)
        if origin.kind == "rows":
            assert origin.tokens is not None
            args = (origin.tokens.reshape(1, -1).expand(self.tape.examples, -1),)
            size = (self.tape.examples, origin.tokens.numel(), shared.shape[-1])
        self.tape.copied(unit, args, shared, copy, lambda grad: grad.movedim(axis, 0).reshape(size))
