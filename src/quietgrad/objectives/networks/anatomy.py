"""How to take a module apart: decided once, on made-up examples, and refused where privacy would break.

A module is planned as a set of units: layers with a kernel, layers that fall back to vmap, and operations that use
parameters outside of a layer (:mod:`quietgrad.objectives.networks.meetings`). What a unit is given and gives for
two examples and for the first of them alone tells where examples lie. A parameter whose unit does not fit is
demoted, and no other: from its layer to the operations that use it, from there to the vmap of the layer that owns
it. Only if that fails too (it belongs to the model itself, it draws random numbers) the whole model falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from quietgrad.objectives.networks.layers import Kernel, embedding_kernel, kernel_for
from quietgrad.objectives.networks.meetings import (
    ELEMENTWISE,
    CannotMeet,
    Form,
    Meeting,
    Origin,
    Sharing,
    form_of,
    in_place,
)
from quietgrad.objectives.networks.places import Place, example_places
from quietgrad.objectives.networks.recurrent import recurrent_use
from quietgrad.objectives.networks.tape import Batch, Unit, hooked, select, tensors_of, with_parameters

__all__ = ["Plan", "plan_units"]

Places = tuple[Place | None, ...]
Drawing = Callable[[int], AbstractContextManager[Any]]  # the context in which so many examples draw
_ROUNDS = 32
_REPEATING = {"expand", "expand_as", "repeat", "broadcast_to", "tile", "cat", "concat"}  # as cheap as copies


@dataclass(frozen=True)
class Plan:
    """The units of a module, its operations on parameters, and which parameters these use."""

    layers: list[Unit]
    meetings: dict[Hashable, Meeting]
    raw: tuple[str, ...]

    @property
    def units(self) -> list[Unit]:
        """Layers and operations."""
        operations = [u for meeting in self.meetings.values() for u in meeting.units if u is not None]
        return [*self.layers, *dict.fromkeys(operations)]

    def written_out(self, families: int) -> int:
        """Numbers per example of what has no kernel; vmap makes about two copies more on the way."""
        return sum(
            (families + (2 if unit.why else 0)) * (slot.stop - slot.start)
            for unit in self.units
            if unit.kernel is None
            for slot in unit.slots.values()
        )


class _Event(NamedTuple):
    """An operation on shared tensors: its arguments and what it gave."""

    func: Any
    key: Hashable
    leaves: list[Any]
    origins: list[Origin | None]
    results: list[Tensor]
    single: bool
    form: Form | None
    apart: bool  # an argument has touched the examples
    versions: list[int]


class _Visit(NamedTuple):
    """A call of a layer."""

    unit: Unit
    given: list[Tensor]
    made: list[Tensor]
    versions: list[int]


@dataclass
class _Trace:
    """One forward pass."""

    events: list[_Event] = field(default_factory=list)
    visits: list[_Visit] = field(default_factory=list)
    strayed: set[str] = field(default_factory=set)
    random: set[Unit] = field(default_factory=set)


class _Misfit(Exception):
    """Parameters that must be looked for in the operations that use them."""

    def __init__(self, names: set[str], why: str) -> None:
        super().__init__(why)
        self.names = names


def plan_units(
    module: nn.Module,
    slots: Mapping[nn.Parameter, slice],
    params: Mapping[str, Tensor],
    slices: Mapping[str, slice],
    variants: Sequence[Batch],
    drawing: Drawing,
    demoted: Mapping[str, str],
) -> Plan | str:
    """The units of the module, or why only whole-model gradients are sure to be right.

    ``demoted`` maps parameters that are to be taken by the vmap of their layer to the reason.
    """
    names = {slot.start: name for name, slot in slices.items()}
    own = {p: names[slot.start] for p, slot in slots.items()}
    raw: set[str] = set()
    demoted = dict(demoted)
    for _ in range(_ROUNDS):
        layers = _layers(module, slots, own, raw, demoted)
        if isinstance(layers, str):
            return layers
        held = {slot.start for unit in layers for slot in unit.slots.values()}
        raw = {name for name, slot in slices.items() if slot.start not in held}
        study = _Study(module, params, slices, layers, raw, drawing)
        try:
            for x in variants:
                study.look(x)
        except _Misfit as misfit:
            if misfit.names <= raw or misfit.names & demoted.keys():
                return f"parameter {sorted(misfit.names)[0]!r}: {misfit}"
            raw |= misfit.names
        except CannotMeet as failure:
            if set(failure.names) <= demoted.keys():
                return str(failure).rstrip(".")
            demoted |= dict.fromkeys(failure.names, failure.why)
            raw -= set(failure.names)
        else:
            return Plan(layers, study.meetings, tuple(name for name in slices if name in raw))
    return "its parameters are used in too many ways"


def _layers(
    module: nn.Module,
    slots: Mapping[nn.Parameter, slice],
    own: Mapping[nn.Parameter, str],
    raw: set[str],
    demoted: Mapping[str, str],
) -> list[Unit] | str:
    """Layers with kernels, and those that fall back; what is in none of them is raw."""
    units: list[Unit] = []
    inside: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if layer in inside:
            continue
        below = {key: slots[p] for key, p in layer.named_parameters() if p in slots and own[p] not in raw}
        direct = {p for p in layer.parameters(recurse=False) if p in slots and own[p] not in raw}
        # Attention uses the weights of a layer inside it that is never called.
        held = layer.parameters() if isinstance(layer, nn.MultiheadAttention) else layer.parameters(recurse=False)
        why = next((demoted[own[p]] for p in held if p in slots and own[p] in demoted), None)
        if why is None and direct and _falls_back(layer):
            why = f"{type(layer).__name__} has no kernel"
        if why is not None:
            if layer is module and next(module.children(), None) is not None:
                return f"a parameter of the model itself: {why}"
            inside.update(layer.modules())
            units.append(Unit(name, layer, below, None, why))
        elif direct and set(below) <= {"weight", "bias"} and (kernel := kernel_for(layer)) is not None:
            units.append(Unit(name, layer, below, kernel))
    return units


def _falls_back(layer: nn.Module) -> bool:
    """Layers of torch whose one operation has no kernel; layers of one's own are looked into."""
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase) or next(layer.children(), None) is not None:
        return False
    return type(layer).__module__.startswith("torch.nn.modules") and kernel_for(layer) is None


class _Study:
    """Looks at forward passes of two examples and of one until all operations are understood."""

    def __init__(
        self, module: nn.Module, params: Mapping[str, Tensor], slices: Mapping[str, slice], layers: list[Unit],
        raw: set[str], drawing: Drawing,
    ) -> None:  # fmt: skip
        self.module = module
        self.leaves = {name: params[name].detach().requires_grad_() for name in params if name in raw}
        self.params = dict(params) | self.leaves
        self.slices = slices
        self.layers = layers
        self.drawing = drawing
        self.meetings: dict[Hashable, Meeting] = {}
        self._places: dict[Unit, tuple[Places, Places]] = {}

    def look(self, x: Batch) -> None:
        """Plan what this batch does."""
        sites: set[int] = set()  # operations that give rows for examples without having touched one
        for _ in range(_ROUNDS):
            two, one = (self._trace(select(x, slice(0, n)), sites) for n in (2, 1))
            strayed = two.strayed | one.strayed
            if strayed:
                raise _Misfit(strayed, "it is used outside of its layer")
            self._visits(two, one)
            if self._events(two, one, sites):
                return
        raise CannotMeet(sorted(self.leaves), "its operations are too many to follow")

    def _trace(self, x: Batch, sites: set[int]) -> _Trace:
        trace = _Trace()
        owners = {
            id(t): (name, [u for u in self.layers if self.slices[name] in u.slots.values()])
            for name, t in self.params.items()
            if name not in self.leaves
        }
        recorder = _Recorder(self.leaves, owners, x, sites, trace)

        def enter(unit: Unit, args: Any, kwargs: Any) -> None:
            recorder.active.append(unit)
            recorder.generator = torch.get_rng_state()

        def leave(unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
            recorder.active.pop()
            # A layer that draws random numbers cannot be run again by the per-module fallback.
            if unit.kernel is None and not torch.equal(recorder.generator, torch.get_rng_state()):
                trace.random.add(unit)
            given = tensors_of((args, kwargs))
            trace.visits.append(_Visit(unit, given, tensors_of(output), [t._version for t in given]))

        count = len(x if isinstance(x, Tensor) else x[0])
        with (
            torch.enable_grad(),
            hooked(self.layers, enter, leave),
            with_parameters(self.module, self.params),
            self.drawing(count),
            recorder,
        ):
            self.module(*((x,) if isinstance(x, Tensor) else x))
        return trace

    def _visits(self, two: _Trace, one: _Trace) -> None:
        if [v.unit for v in two.visits] != [v.unit for v in one.visits]:
            raise CannotMeet(list(self.slices), "layers are called as the number of examples says")
        for a, b in zip(two.visits, one.visits, strict=True):
            unit = a.unit
            inputs, outputs = example_places(a.given, b.given), example_places(a.made, b.made)
            overwritten = any([t._version for t in visit.given] != visit.versions for visit in (a, b))
            fits = inputs is not None and outputs is not None and not overwritten and unit not in two.random
            if fits:
                assert inputs is not None
                assert outputs is not None
                unit.inputs, unit.outputs = self._places.setdefault(unit, (inputs, outputs))
                fits = _alike(unit.inputs, inputs) and _alike(unit.outputs, outputs)
                fits &= unit.kernel is None or _kernel_fits(unit.kernel, unit.inputs, unit.outputs)
                fits &= any(place is not None for place in outputs)
            if not fits:
                mine = {slot.start for slot in unit.slots.values()}
                names = {name for name, slot in self.slices.items() if slot.start in mine}
                why = (
                    "its layer draws random numbers" if unit in two.random else "its layer has no rows for examples"
                )
                raise _Misfit(names, why)

    def _events(self, two: _Trace, one: _Trace, sites: set[int]) -> bool:
        """Plan the operations; False if one gives rows for examples, unnoticed so far: then look again."""
        for number, (a, b) in enumerate(zip(two.events, one.events, strict=False)):
            if a.key != b.key:
                break
            plain = [_plain(event) for event in (a, b)]
            places, outputs = example_places(*plain), example_places(a.results, b.results)
            if places is None or outputs is None:
                raise CannotMeet(_names(a), f"{_name(a)} gives rows that are not those of examples")
            if not a.apart and any(place is not None for place in (*places, *outputs)):
                sites.add(number)
                return False
            self._plan(a, b, places, outputs)
        if [e.key for e in two.events] != [e.key for e in one.events]:
            raise CannotMeet(sorted(self.leaves), "operations are done as the number of examples says")
        return True

    def _plan(self, a: _Event, b: _Event, places: Places, outputs: Places) -> None:
        meeting = self._meeting(a, b, places, outputs)
        known = self.meetings.setdefault(a.key, meeting)
        if _same(known, meeting):
            return
        raise CannotMeet(_names(a), f"{_name(a)} is used on examples that lie in different places")

    def _meeting(self, a: _Event, b: _Event, places: Places, outputs: Places) -> Meeting:
        if not a.apart:
            return Meeting("shared")
        if any(place is None for place in outputs):
            raise CannotMeet(_names(a), f"{_name(a)} gives a result without rows for examples")
        tensors = iter(places)
        full = tuple(
            next(tensors) if isinstance(leaf, Tensor) and origin is None else None
            for leaf, origin in zip(a.leaves, a.origins, strict=True)
        )
        if a.form is not None:
            given = next(i for i, leaf in enumerate(a.leaves) if leaf is a.form.input)
            inputs: Places = (full[given],)
            others = [p for i, p in enumerate(full) if i != given and p is not None and a.func is not recurrent_use]
            if _kernel_fits(a.form.kernel, inputs, outputs) and not others and not _overwritten(a):
                unit = Unit(
                    ", ".join(a.form.roles.values()), None,
                    {role: self.slices[name] for role, name in a.form.roles.items()}, a.form.kernel,
                )  # fmt: skip
                unit.inputs, unit.outputs = inputs, outputs
                return Meeting("kernel", full, outputs, (unit,), given=given)
        units = tuple(None if origin is None else self._unit(origin) for origin in a.origins)
        masked = _name(a) == "scaled_dot_product_attention" and not any(a.origins[:3])
        if a.single and (masked or _name(a) in ELEMENTWISE):
            return Meeting("copied", full, outputs, units)
        if in_place(a.func):
            raise CannotMeet(_names(a), f"{_name(a)} writes it into another tensor")
        if _name(a) not in _REPEATING:
            for each in units:
                if each is not None and each.kernel is None:
                    each.why = f"{_name(a)} is mapped over the examples"
        return Meeting("mapped", full, outputs, units, _scaled(a, b))

    def _unit(self, origin: Origin) -> Unit:
        name = ", ".join(origin.names)
        if origin.kind == "rows":
            (only,) = origin.names
            table = self.leaves[only]
            return Unit(name, None, {"weight": self.slices[only]}, embedding_kernel(len(table), origin.padding_idx))
        return Unit(name, None, {each: self.slices[each] for each in origin.names}, None)


class _Recorder(Sharing):
    """Lets everything happen, and keeps what happened to shared tensors and who used parameters not their own."""

    def __init__(
        self, leaves: Mapping[str, Tensor], owners: Mapping[int, tuple[str, list[Unit]]], x: Batch, sites: set[int],
        trace: _Trace,
    ) -> None:  # fmt: skip
        super().__init__(leaves)
        self.owners = owners
        self.sites = sites
        self.trace = trace
        self.touched = {id(t): t for t in tensors_of(x)}
        self.active: list[Unit] = []
        self.generator = torch.empty(0)

    def apart(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        self._watch(given, made)
        if any(id(t) in self.touched for t in given):
            self.touched |= {id(t): t for t in (*made, *(given[:1] if in_place(func) else ()))}
        return result

    def _watch(self, given: list[Tensor], made: list[Tensor]) -> None:
        if not made:
            return  # asking for a shape or a device is no use of the values
        for tensor in given:
            name, owners = self.owners.get(id(tensor), ("", []))
            if name and not (self.active and self.active[-1] in owners):
                self.trace.strayed.add(name)

    def meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, _ = tree_flatten((args, kwargs))
        key = self.key(func, leaves)
        form = form_of(self, func, args, kwargs)
        origins = [self.origin(leaf) for leaf in leaves]
        if in_place(func) and args and self.origin(args[0]):
            raise CannotMeet(self.origin(args[0]).names, f"{func.__name__} changes it")  # type: ignore[union-attr]
        result = func(*args, **kwargs)
        given, made = [leaf for leaf in leaves if isinstance(leaf, Tensor)], tensors_of(result)
        self._watch(given, made)
        if not made:
            if in_place(func):
                names = sorted({name for o in origins if o is not None for name in o.names})
                raise CannotMeet(names, f"{func.__name__} writes it into another tensor")
            return result
        apart = len(self.trace.events) in self.sites or any(id(t) in self.touched for t in given)
        self.trace.events.append(
            _Event(
                func,
                key,
                leaves,
                origins,
                made,
                isinstance(result, Tensor),
                form,
                apart,
                [t._version for t in given],
            )
        )
        if apart:
            self.touched |= {id(t): t for t in made}
        else:
            self.share(func, args, kwargs, result)
        return result


def _kernel_fits(kernel: Kernel, inputs: Places, outputs: Places) -> bool:
    if len(inputs) != 1 or inputs != outputs or inputs[0] is None:
        return False
    return kernel.any_batch_dim or inputs[0] == Place(0)


def _plain(event: _Event) -> list[Tensor]:
    return [t for t, o in zip(event.leaves, event.origins, strict=True) if isinstance(t, Tensor) and o is None]


def _overwritten(event: _Event) -> bool:
    return event.versions != [t._version for t in event.leaves if isinstance(t, Tensor)]


def _scaled(a: _Event, b: _Event) -> tuple[int, ...]:
    """Which sizes count examples: those that are twice as large for two."""
    found = []
    for i, (first, second) in enumerate(zip(a.leaves, b.leaves, strict=True)):
        if isinstance(first, int) and first != second:
            if first != 2 * second:
                raise CannotMeet(_names(a), f"{_name(a)} is given a number that depends on the number of examples")
            found.append(i)
    return tuple(found)


def _same(a: Meeting, b: Meeting) -> bool:
    rest = [(m.kind, m.scaled, m.given) for m in (a, b)]
    return rest[0] == rest[1] and _alike(a.places, b.places) and _alike(a.outputs, b.outputs)


def _alike(a: Places, b: Places) -> bool:
    """The same places. In which order an axis holds folded rows only examples that differ tell: the first do."""
    return [p and p[:2] for p in a] == [p and p[:2] for p in b]


def _names(event: _Event) -> list[str]:
    return sorted({name for origin in event.origins if origin is not None for name in origin.names})


def _name(event: _Event) -> str:
    return str(getattr(event.func, "__name__", event.func))
