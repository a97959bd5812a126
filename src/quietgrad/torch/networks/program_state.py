"""What a program could keep between records, put back before each of its passes.

A model and a loss are ordinary Python: they can write into an attribute, a list, a global, a closure, a class or an
array, and the next record would see it. :class:`ProgramState` finds everything that the program can reach and keeps
its contents. Before every pass, and after the last one of a release, all of it is as it was before the release:
each record meets the same state, and nothing of a record stays in the model.

    containers  (dictionaries, lists, sets, deques, attributes, slots, closure cells, globals)  compared by identity
    tensors     share their memory with a copy that torch makes at the first write, and get it back if there was one
    arrays      numpy's, bytearrays: copied
    generators of random numbers are seeded by the release, as Python's and numpy's own are

What has contents of its own that can be neither read nor copied (a generator, a database) is refused when the
program is planned, by its type. Which objects are reached is decided by code and objects, never by a record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quietgrad.torch.networks.containers import SavedArray
from quietgrad.torch.networks.reachable import Found, reach

_address: Any = getattr(torch._C, "_data_address")  # noqa: B009  # reads it; data_ptr() would count as a write


_GLOBAL_HOOKS = tuple(
    vars(torch.nn.modules.module)[f"_global_{when}_hooks"]
    for when in ("forward_pre", "forward", "backward_pre", "backward")
)


def _modes() -> tuple[object, ...]:
    """The modes of the user's that see torch's functions now."""
    return tuple(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


class ProgramState:
    """The state that programs with these ``roots`` can reach: modules, losses, functions, objects.

    >>> from functools import partial
    >>> seen = []
    >>> remember = partial(seen.append)  # stands for a loss that keeps what it was given
    >>> state = ProgramState(remember)
    >>> with state.release(0):
    ...     for record in ("ann", "bob"):
    ...         state.begin_pass()
    ...         remember(record)
    ...         print(seen)
    ['ann']
    ['bob']
    >>> seen
    []
    """

    def __init__(self, *roots: object) -> None:
        self._roots = roots
        self._depth = 0
        self._word = 0
        self._watch()

    def _watch(self) -> None:
        """Find what is reachable now. Raises ValueError for what cannot be put back."""
        # Hooks that torch calls for all modules are the user's code too, and run in every pass.
        self._modes = _modes()
        found: Found = reach((*self._roots, *_GLOBAL_HOOKS, *self._modes))
        self._containers = found.containers
        self._memories = _memories(found.tensors)
        self._tensors = [_TensorFace(tensor) for tensor in found.tensors]
        self._arrays = found.arrays
        self._generators = found.generators
        self._caches = found.caches
        self._copied = found.copied
        self.names_internals = found.names_internals
        self._saved_arrays: list[SavedArray] = []

    @contextmanager
    def release(self, word: int) -> Iterator[None]:
        """Passes whose state is that of the beginning, and so it is afterwards; ``word`` seeds the generators."""
        if self._depth:  # part of a release that has begun
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        # What changed since the last release was changed by the user, between records: it counts from here on.
        unchanged = all(container.same() for container in self._containers)
        if not unchanged or _modes() != self._modes or not all(face.same() for face in self._tensors):
            self._watch()
        self._word = word
        for memory in self._memories:
            memory.save()
        self._saved_arrays = [SavedArray(array) for array in self._arrays]
        states = [own.state() for own in self._generators]
        self._depth = 1
        self._clean = True
        try:
            self._stand_in()
            yield
        finally:
            self._depth = 0
            self._put_back()
            for own, state in zip(self._generators, states, strict=True):
                own.put(state)
            for memory in self._memories:
                memory.forget()
            self._saved_arrays = []

    def begin_pass(self) -> None:
        """Put everything back: the next records meet what the first ones met."""
        if self._clean:  # the first pass of a release
            self._clean = False
            return
        self._put_back()
        self._stand_in()

    def _put_back(self) -> None:
        for container in self._containers:
            if not container.same():
                container.restore()
        for face in self._tensors:
            if not face.same():
                face.restore()
        for saved in self._saved_arrays:
            saved.restore()
        for memory in self._memories:
            memory.restore()
        for clear in self._caches:
            clear()

    def _stand_in(self) -> None:
        for clear in self._caches:
            clear()
        for own in self._generators:
            own.seed(self._word)
        for put_copy in self._copied:
            put_copy()


class _TensorFace:
    """What a tensor is of its memory, and what else hangs on it; its numbers are those of a :class:`_Memory`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._alias = tensor, tensor.detach()
        self._grad, self._requires_grad = tensor.grad if tensor.is_leaf else None, tensor.requires_grad

    def same(self) -> bool:
        tensor = self._tensor
        if tensor.is_leaf and (tensor.grad is not self._grad or tensor.requires_grad is not self._requires_grad):
            return False
        return tensor.dtype is self._alias.dtype and tensor.is_set_to(self._alias)

    def restore(self) -> None:
        tensor = self._tensor
        if tensor.dtype is not self._alias.dtype or not tensor.is_set_to(self._alias):
            tensor.data = self._alias
        if tensor.is_leaf:
            tensor.grad = self._grad
            if tensor.requires_grad is not self._requires_grad:
                tensor.requires_grad_(self._requires_grad)


class _Memory:
    """The memory of one tensor or of several; a copy of it costs nothing until somebody writes.

    torch's copy-on-write: after ``_lazy_clone`` both have the same address until one is written to, by whatever way
    torch has for that (in place, through ``.data``, through ``numpy()``); that one then gets memory of its own.
    Memory that torch does not own (of an array, shared between processes, mapped from a file) is copied.
    """

    def __init__(self, storage: torch.UntypedStorage, *, own: bool) -> None:
        device = storage.device
        self._whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        self._own = own
        self._saved: Tensor | None = None
        self._first: Tensor | None = None

    def save(self) -> None:
        self._saved = None
        if self._own:
            try:
                self._saved = torch._lazy_clone(self._whole)
            except RuntimeError:
                self._own = False
        if self._saved is None:
            self._saved = self._whole.clone()

    def restore(self) -> None:
        saved = self._saved
        assert saved is not None
        if self._own and _address(self._whole) == _address(saved):
            return
        with torch.no_grad():
            self._whole.copy_(saved)
        if self._own:
            # The write moved the tensor. What the user took of it before (``numpy()``) still points to the old
            # memory, which therefore stays; from here on the memory is copied, and moves no more.
            self._first, self._own = saved, False
            self._saved = self._whole.clone()

    def forget(self) -> None:
        self._saved = None


def lazily_copied(tensor: Tensor) -> Tensor:
    """A copy that takes memory and time when one of the two is written to."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:  # memory that is not torch's own
        return tensor.detach().clone()


def _memories(tensors: list[Tensor]) -> list[_Memory]:
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [_Memory(storage, own=storage.device.type != "meta") for storage in storages.values() if len(storage)]
