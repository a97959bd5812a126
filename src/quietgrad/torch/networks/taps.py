"""Taps: what each record sends through every operation on a parameter.

A program of one record is run for n records at once by torch's ``vmap``; nothing but that record is in its reach. A
:class:`Taps` mode sees its operations. Where a parameter meets a record, the operation is done on all records
together with the parameter as a constant, and a *tap* at its output keeps the gradient b_i that arrives there on
the way back. With what went in, that is all a kernel needs for norms and weighted sums of the records' gradients:
plain autograd goes back through the program, and no gradient by a parameter is ever formed.

    site        one operation on parameters in one pass: what went in, what came back, who makes vectors of them
    derived     a tensor made of parameters alone (a transpose, a slice, weight_norm): as good as a parameter
    spread      a parameter in an operation without a kernel is copied for each record: right for any operation

Questions of the program to a tensor (``if mask.all()``, ``.item()``) are each record's own. Where records answer
differently the pass ends, and begins again with those that answer as most do; the others get a pass of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from quietgrad.torch.networks.kernels import Kernel, embedding_kernel, kernel_vectors
from quietgrad.torch.networks.object_kinds import has_own_dispatch
from quietgrad.torch.networks.randomness import PerRecordRNG, refuse_own_generator
from quietgrad.torch.networks.trees import Args, Called, Kwargs, Options, PyTree, applied, name_of
from quietgrad.torch.networks.vectors import LayerCall

functorch = torch._C._functorch
Vectors = list[tuple[slice, Tensor]]  # parts of the flat vector, and the records' vectors there, (n, size)

_EMBEDDING = inspect.signature(torch.nn.functional.embedding)
_ANSWERS = 8  # ways that the records of a pass may answer a question; with more each is run alone


class NotTogether(Exception):
    """Records of this program cannot be run in one pass; the reason is for :func:`quietgrad.torch.explain`."""


class EachItsOwn(NotTogether):
    """Every record answers a question in its own way."""


class DivergentRecords(NotTogether):
    """Records answer a question in several ways: ``most`` are those of the commonest answer."""

    def __init__(self, most: Tensor) -> None:
        super().__init__("records branch apart")
        self.most = most


class TapSite:
    """One operation on parameters: what went in, (n, …), and the gradient at its output, as it arrives.

    Either ``kernel`` makes contributions of both for the parameters at ``slots``, or ``vectors`` makes the records'
    vectors of the gradient.
    """

    def __init__(
        self,
        operation: str,
        names: Sequence[str],
        *,
        kernel: Kernel | None = None,
        slots: Mapping[str, slice] | None = None,
        given: Tensor | None = None,
        vectors: Callable[[TapSite, Tensor], Vectors] | None = None,
        covers: Sequence[slice] = (),
        copied: int = 0,
    ) -> None:
        self.operation = operation
        self.names = tuple(names)
        self.kernel = kernel
        self.slots = dict(slots or {})
        # Without its graph, which holds the site: both would keep each other alive, with all activations.
        self.given = None if given is None else given.detach()
        self.reads_batch = given is not None and not given.requires_grad  # the same at both points of a difference
        self.vectors = vectors
        self.covers = tuple(covers) or tuple(self.slots.values())
        self.copied = copied  # numbers that are written out for each record
        self.arrange: Callable[[Tensor], Tensor] | None = None  # records in front
        self.grad: Tensor | None = None
        self.arrived: Callable[[TapSite], None] | None = None
        self.first_places = slice(
            None
        )  # of the records of a pass; other places hold copies, which count for nothing

    @property
    def key(self) -> tuple[Any, ...]:
        return self.operation, self.names, self.kernel, tuple((s.start, s.stop) for s in self.covers)

    def receive(self, grad: Tensor) -> None:
        """Take the gradient at the output. A second one, of another loss, is added to it."""
        grad = grad.detach()
        if self.arrange is not None:
            grad = self.arrange(grad)
        self.grad = grad if self.grad is None else self.grad + grad
        if self.arrived is not None:
            self.arrived(self)

    def content(self, dtype: torch.dtype) -> LayerCall | Vectors | None:
        """Return the layer call, or the records' vectors, in ``dtype``. ``None`` if no gradient arrived."""
        if self.grad is None:
            return None
        if self.kernel is not None:
            assert self.given is not None
            given = self.given[self.first_places]
            given = given.to(dtype) if given.is_floating_point() else given
            return LayerCall(given, self.grad[self.first_places].to(dtype))
        assert self.vectors is not None
        return [(slot, values[self.first_places].to(dtype)) for slot, values in self.vectors(self, self.grad)]

    def numbers(self) -> list[Tensor]:
        """All numbers that a record's contribution is made of, (n, …) each, as the program computed them."""
        if self.grad is None:
            return []
        if self.kernel is not None:
            assert self.given is not None
            return [self.given, self.grad]
        assert self.vectors is not None
        return [values for _, values in self.vectors(self, self.grad)]


class _Tap(torch.autograd.Function):
    """The identity; its way back hands the gradient to a site. ``anchor`` is a leaf: there always is one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, out: Tensor, site: TapSite) -> Tensor:
        ctx.site = site
        ctx.mark_dirty(out)  # the very tensor, so that the program may write into it (an in-place ReLU)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.site.receive(grad)
        return None, grad if ctx.needs_input_grad[1] else None, None


class _Spread(torch.autograd.Function):
    """A parameter, n times; no memory is taken. The way back hands a site the gradients of all copies."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, count: int, site: TapSite) -> Tensor:
        ctx.site = site
        return value.expand(count, *value.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.site.receive(grad)
        return None, None, None, None


class Taps(TorchFunctionMode):
    """Sees every operation of a program for ``count`` records and puts taps on those that use parameters.

    Args:
        params: the trained parameters by name, leaves that require gradients.
        slices: where each lies in the flat vector.
        count: how many records there are.
        factories: whether tensors that the program makes (``torch.zeros``) are made for each record, so that it may
            write records into them.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        slices: Mapping[str, slice],
        count: int,
        factories: bool = False,
    ) -> None:
        super().__init__()
        self.count = count
        self.factories = factories
        self.sites: list[TapSite] = []
        self.level = -1
        self.modes = 0  # dispatch modes that are active outside of the program
        self.anchor = torch.zeros((), requires_grad=True)
        self.draws: PerRecordRNG | None = None  # what each record draws
        self._params, self._slices = dict(params), {name: slices[name] for name in params}
        self._names = {id(p): name for name, p in params.items()}
        self._slots = {id(p): slices[name] for name, p in params.items()}
        self._known: dict[int, Tensor] = {id(p): p for p in params.values()}  # parameters and what is made of them
        self._looked_up: dict[int, tuple[Tensor, Tensor, int | None]] = {}  # table, rows, padding
        self._copies: dict[int, Tensor] = {}

    # --- the mode -----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Called, types: object, args: Args = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if "generator" in kwargs:
            refuse_own_generator(name_of(func), kwargs.values())
        if func in _QUESTIONS:
            return self._ask(func, args, kwargs)
        if isinstance(func, OpOverload | OpOverloadPacket) and str(func).partition(".")[0] != "aten":
            raise NotTogether("an operation of another library may have a rule for vmap of its own")
        if torch._C._len_torch_dispatch_stack() != self.modes:
            raise NotTogether("a dispatch mode is active, which would see all records")
        nested = functorch.current_level() != self.level
        operation = OPERATIONS.get(func)
        shared, together = False, False
        for leaf in _tensors(args, kwargs):
            if type(leaf) not in _PLAIN and has_own_dispatch(type(leaf)):
                raise NotTogether(f"a {type(leaf).__name__} has a dispatch of its own, which would see all records")
            if nested and self._is_of_records(leaf):
                raise NotTogether("records are inside another transform of torch.func")
            if id(leaf) in self._known:
                shared = True
            elif not together:
                together = functorch.is_functorch_wrapped_tensor(leaf)
        if not shared:
            if together and operation is not None and operation.always:
                return operation.run(self, func, args, kwargs)
            if self.factories and not together and func in _FACTORIES:
                return self._for_each(func(*args, **kwargs))
            return func(*args, **kwargs)
        if not together:
            return self._derive(func, args, kwargs)
        if operation is not None:
            result = operation.run(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        return self.spread(func, args, kwargs)

    def _derive(self, func: Called, args: Args, kwargs: Kwargs) -> Any:
        """An operation on parameters alone: plain autograd remembers what it is made of."""
        number = self.draws.number if self.draws is not None else 0
        result = func(*args, **kwargs)
        leaves = tree_leaves(result)
        if any(isinstance(leaf, Tensor) and functorch.is_functorch_wrapped_tensor(leaf) for leaf in leaves):
            if self.draws is not None:  # it drew for each record (dropout of a weight): each has its own then
                self.draws.number = number
            return self.spread(func, args, kwargs)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in self._known:
                self._known[id(leaf)] = leaf
                base = leaf._base
                same = base is not None and id(base) in self._names and base.dtype == leaf.dtype
                if base is not None and same and leaf.is_contiguous() and base.is_contiguous():
                    start = self._slots[id(base)].start + leaf.storage_offset() - base.storage_offset()
                    self._slots[id(leaf)] = slice(start, start + leaf.numel())
        if func is torch.nn.functional.embedding:
            call = _EMBEDDING.bind(*args, **kwargs).arguments
            table, padding = call["weight"], call.get("padding_idx")
            if id(table) in self._slots and isinstance(result, Tensor):
                padding = padding + len(table) if padding is not None and padding < 0 else padding
                self._looked_up[id(result)] = (table, call["input"], padding)
        return result

    def done(self) -> list[TapSite]:
        """The sites of a program that has ended. What only it needed is let go of."""
        sites, self.sites = self.sites, []
        self._copies.clear()
        return sites

    # --- records and parameters ---------------------------------------------------------------------------------

    def is_shared(self, value: object) -> bool:
        return isinstance(value, Tensor) and id(value) in self._known

    def is_records(self, value: object) -> bool:
        """Whether a value has an entry for each record."""
        if not isinstance(value, Tensor) or not functorch.is_functorch_wrapped_tensor(value):
            return False
        if functorch.maybe_get_level(value) != self.level or not functorch.is_batchedtensor(value):
            raise NotTogether("parameters are used inside another transform of torch.func")
        return True

    def _is_of_records(self, value: Tensor) -> bool:
        """Whether a value has the level of the records among those of its wrappers."""
        while functorch.is_functorch_wrapped_tensor(value):
            if functorch.maybe_get_level(value) == self.level:
                return True
            value = functorch.get_unwrapped(value)
        return False

    def rows(self, value: Tensor) -> Tensor:
        """The tensor behind a value, records first: (n, …)."""
        plain = functorch.get_unwrapped(value)
        if functorch.is_functorch_wrapped_tensor(plain):
            raise NotTogether("it is inside another transform of torch.func")
        dim = functorch.maybe_get_bdim(value)
        return plain.movedim(dim, 0) if dim else plain

    def all_rows(self, value: Tensor) -> Tensor:
        """(n, …) of a value, also of one that is the same for every record."""
        return self.rows(value) if self.is_records(value) else value.expand(self.count, *value.shape)

    def logical(self, rows: Tensor) -> Tensor:
        """The value of a tensor with records first, as the program sees it."""
        return functorch._add_batch_dim(rows, 0, self.level)

    def plain(self, value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    def slot(self, value: Tensor) -> slice | None:
        """Where a parameter, or an unbroken part of one, lies in the flat vector."""
        return self._slots.get(id(value))

    def names_of(self, value: Tensor) -> tuple[str, ...]:
        """The parameters that a shared value is, or is made of."""
        if id(value) in self._names:
            return (self._names[id(value)],)
        slot = self._slots.get(id(value))
        if slot is not None:
            return tuple(n for n, whole in self._slices.items() if whole.start <= slot.start < whole.stop)
        return tuple(dict.fromkeys(name for leaf in _leaves_below(value) if (name := self._names.get(id(leaf)))))

    # --- taps -----------------------------------------------------------------------------------------------------

    def outside(self) -> Any:
        """Work on the tensors of all records, outside of vmap."""
        return temporarily_pop_interpreter_stack()

    def tap(self, out: Tensor, site: TapSite) -> Tensor:
        """Put a tap on a tensor with all records; call it :meth:`outside`."""
        self.sites.append(site)
        if out._is_view() or (out.is_leaf and out.requires_grad):
            out = out.clone()
        tapped: Tensor = applied(_Tap, self.anchor, out, site)
        return tapped

    def use(self, operation: str, kernel: Kernel, given: Tensor, roles: Mapping[str, Tensor | None]) -> TapSite:
        """The site of a kernel: ``roles`` are its parameters by role, those that are not trained left out."""
        wanted = {role: value for role, value in roles.items() if value is not None and self.is_shared(value)}
        names = [name for value in wanted.values() for name in self.names_of(value)]
        slots = {role: self.slot(value) for role, value in wanted.items()}
        if all(slot is not None for slot in slots.values()):
            known = {role: slot for role, slot in slots.items() if slot is not None}
            return TapSite(operation, names, kernel=kernel, slots=known, given=given)

        def vectors(site: TapSite, grad: Tensor) -> Vectors:
            assert site.given is not None
            made = kernel_vectors(kernel, LayerCall(site.given, grad), wanted)
            return [part for role, each in made.items() for part in self._pulled_back(wanted[role], each)]

        return self._vector_site(operation, list(wanted.values()), vectors, given)

    def affine(
        self, operation: str, weight: Tensor | None, bias: Tensor | None,
        sums: Callable[[Tensor], Sequence[Tensor]],
    ) -> TapSite:  # fmt: skip
        """The site of a scale and a shift; ``sums`` gives the records' vectors of both, (n, size)."""
        trained = [(k, v) for k, v in enumerate((weight, bias)) if v is not None and self.is_shared(v)]

        def vectors(site: TapSite, grad: Tensor) -> Vectors:
            made = sums(grad)
            return [part for k, value in trained for part in self._pulled_back(value, made[k])]

        return self._vector_site(operation, [value for _, value in trained], vectors)

    def _vector_site(
        self, operation: str, values: list[Tensor], vectors: Callable[[TapSite, Tensor], Vectors],
        given: Tensor | None = None,
    ) -> TapSite:  # fmt: skip
        names = [name for value in values for name in self.names_of(value)]
        covers: list[slice] = []
        copied = 0
        for value in values:
            slot = self.slot(value)
            copied += value.numel()
            if slot is not None:
                covers.append(slot)
            else:
                covers += (made_of := [self._slices[name] for name in self.names_of(value)])
                copied += sum(part.stop - part.start for part in made_of)
        return TapSite(operation, names, given=given, vectors=vectors, covers=covers, copied=copied)

    def _pulled_back(self, value: Tensor, grads: Tensor) -> Vectors:
        """The records' vectors of the parameters that a shared value is made of: Jᵀ b_i, (n, size)."""
        slot = self.slot(value)
        if slot is not None:
            return [(slot, grads.reshape(len(grads), -1))]
        names = self.names_of(value)
        sources = [self._params[name] for name in names]
        made = torch.autograd.grad(
            value, sources, grads.reshape(len(grads), *value.shape).to(value.dtype), retain_graph=True,
            allow_unused=True, is_grads_batched=True,
        )  # fmt: skip
        parts = [
            torch.zeros_like(p).expand(len(grads), *p.shape) if g is None else g
            for p, g in zip(sources, made, strict=True)
        ]
        return [(self._slices[name], part.reshape(len(grads), -1)) for name, part in zip(names, parts, strict=True)]

    def copy(self, value: Tensor) -> Tensor:
        """A shared value as one of each record's own."""
        found = self._copies.get(id(value))
        if found is None:
            site = self._copy_site(value)
            self.sites.append(site)
            with self.outside():
                rows = applied(_Spread, self.anchor, value.detach(), self.count, site)
            found = self._copies[id(value)] = self.logical(rows)
        return found

    def _copy_site(self, value: Tensor) -> TapSite:
        looked_up = self._looked_up.get(id(value))
        if looked_up is not None:  # rows of a table that are the same for every record: no table is written out
            table, tokens, padding = looked_up
            slot = self.slot(table)
            assert slot is not None
            given = tokens.reshape(1, -1).expand(self.count, -1)
            return TapSite(
                "embedding", self.names_of(table), kernel=embedding_kernel(len(table), padding),
                slots={"weight": slot}, given=given,
            )  # fmt: skip
        return self._vector_site("copy", [value], lambda _, grad: self._pulled_back(value, grad))

    def spread(self, func: Called, args: Args, kwargs: Kwargs) -> Any:
        """An operation without a kernel: what it is given of parameters is copied for each record."""
        start = len(self.sites)
        args, kwargs = tree_map(lambda leaf: self.copy(leaf) if self.is_shared(leaf) else leaf, (args, kwargs))
        for site in self.sites[start:]:
            if site.operation == "copy":
                site.operation = name_of(func)
        return func(*args, **kwargs)

    def _for_each(self, made: PyTree) -> Any:
        if not isinstance(made, Tensor) or functorch.is_functorch_wrapped_tensor(made):
            return made
        return self.logical(made.expand(self.count, *made.shape).clone())

    # --- questions ------------------------------------------------------------------------------------------------

    def _ask(self, func: Called, args: Args, kwargs: Kwargs) -> Any:
        if func in _COMPARISONS:
            if not any(isinstance(a, Tensor) and functorch.is_functorch_wrapped_tensor(a) for a in args[:2]):
                return func(*args, **kwargs)
            if args[0].shape != args[1].shape:
                return False
            with self:
                return bool(_COMPARISONS[func](*args, **kwargs).all())
        value = args[0]
        if not functorch.is_functorch_wrapped_tensor(value):
            return func(*args, **kwargs)
        if not self.is_records(value):
            raise NotTogether("it asks a tensor of another transform for its value")
        rows = self.rows(value).detach()
        self._go_apart(rows)
        with self.outside():
            return func(rows[0], *args[1:], **kwargs)

    def _go_apart(self, answers: Tensor) -> None:
        """End the pass unless all records answer alike, bit by bit: 0.0 == −0.0, and no NaN equals another."""
        if not answers.numel():
            return
        bits = _bits(answers)
        if bool((bits == bits[0]).all()):
            return
        _, group, sizes = torch.unique(bits.cpu(), dim=0, return_inverse=True, return_counts=True)
        if len(sizes) > _ANSWERS:
            raise EachItsOwn("it asks each record for a number of its own (.item(), a branch)")
        raise DivergentRecords((group == int(sizes.argmax())).nonzero().flatten())


def _bits(values: Tensor) -> Tensor:
    """The bit patterns of numbers, (n, …) → (n, bytes)."""
    return values.contiguous().view(len(values), -1).view(torch.uint8)


def _tensors(args: Args, kwargs: Options) -> Iterator[Tensor]:
    """Tensors among arguments, also in lists and tuples: what tree_leaves finds, for less."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            for item in value:
                if isinstance(item, Tensor):
                    yield item
                elif isinstance(item, tuple | list):
                    yield from (leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor))


def _leaves_below(value: Tensor) -> Iterator[Tensor]:
    """The leaves that a tensor is made of, by its graph."""
    seen: set[Any] = set()
    near = [value.grad_fn]
    while near:
        node = near.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        near += [above for above, _ in node.next_functions]


@dataclass(frozen=True)
class Operation:
    """How it is done; ``always``: also if no parameter of it is trained, because vmap has no good rule for it."""

    handler: Callable[..., Any]
    always: bool = False

    def run(self, taps: Taps, func: Called, args: Args, kwargs: Kwargs) -> Any:
        try:
            result = self.handler(taps, *args, **kwargs)
        except TypeError as error:
            if "argument" in str(error):  # called in a way that is not known here
                result = NotImplemented
            else:
                raise
        if result is NotImplemented and self.always and not any(map(taps.is_shared, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        return result


OPERATIONS: dict[Any, Operation] = {}
"""By function of torch, how it is done for all records: :mod:`quietgrad.torch.networks.operations` says it."""

_COMPARISONS: dict[Any, Callable[..., Tensor]] = {
    torch.equal: torch.eq,
    Tensor.equal: torch.eq,
    torch.allclose: torch.isclose,
    Tensor.allclose: torch.isclose,
}
_PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}
_QUESTIONS = {
    Tensor.__bool__, Tensor.item, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.tolist,
    torch.is_nonzero, Tensor.is_nonzero, *_COMPARISONS,
}  # fmt: skip
_FACTORIES = {
    torch.zeros, torch.ones, torch.empty, torch.full, torch.zeros_like, torch.ones_like, torch.empty_like,
    torch.full_like, Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full,
}  # fmt: skip
