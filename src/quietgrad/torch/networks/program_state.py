"""State that a program could keep between records, restored before each of its passes.

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

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quietgrad.core.errors import DataError
from quietgrad.torch.networks.constructors import Method, Sentry
from quietgrad.torch.networks.containers import Container, Dictionaries, Entries, SavedArray
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
        self._carried: tuple[Any, ...] = ()  # what the records of the present pass bring along
        self._called: set[Method] = set()  # constructors that a pass was stopped at, watched since
        self._forbidden: set[Method] = set()  # those that reach what cannot be put back
        self._depth = 0
        self._word = 0
        self._copies_lazily = True
        self._sentry = Sentry()
        self._watch()

    def _watch(self) -> None:
        """Find what is reachable now. Raises ValueError for what cannot be put back."""
        # Hooks that torch calls for all modules are the user's code too, and run in every pass.
        self._modes = _modes()
        found = self._reach(self._called)
        if self._depth:
            found.sentry.relieve(self._sentry)
        plain = [each for each in found.containers if type(each) is Entries and type(each.held) is dict]
        others = [each for each in found.containers if type(each) is not Entries or type(each.held) is not dict]
        self._containers: list[Container] = [Dictionaries(plain), *others]
        self._memories = _memories(found.tensors, lazy=self._copies_lazily)
        memories = {memory.address: memory for memory in self._memories}
        self._tensors = [_TensorFace(t, memories.get(t.untyped_storage()._cdata)) for t in found.tensors]
        self._arrays = found.arrays
        self._generators = found.generators
        self._caches = found.caches
        self._copied = found.copied
        self._sentry = found.sentry
        self._destructors = found.destructors
        self.names_internals = found.names_internals
        self._saved_arrays: list[SavedArray] = []
        self._stale = False

    def let_go(self) -> None:
        """Hold nothing until the next release, which finds what is reachable then."""
        self._containers, self._tensors, self._memories, self._stale = [], [], [], True
        self._carried = ()

    def _reach(self, called: set[Method]) -> Found:
        return reach((*self._roots, *self._carried, *_GLOBAL_HOOKS, *_modes()), called)

    def admit(self, objects: Sequence[object]) -> None:
        """Watch what comes with the next records, too: classes and objects that a program reaches by them alone.

        Raises ValueError for what cannot be put back; then nothing more is watched than before.
        """
        classes = {id(each): each for each in self._carried if isinstance(each, type)}
        wanted = classes | {id(each): each for each in objects}
        if wanted.keys() == {id(each) for each in self._carried}:
            return
        if self._depth:
            self._put_back()
        before, self._carried = self._carried, tuple(wanted.values())
        try:
            self._watch_again()
        except ValueError:
            self._carried = before
            self._watch_again()
            raise

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
        unchanged = not self._stale and all(container.same() for container in self._containers)
        if not unchanged or _modes() != self._modes or not all(face.same() for face in self._tensors):
            self._watch()
        self._word = word
        self._save()
        states = {id(own.held): (own, own.state()) for own in self._generators}
        self._depth = 1
        try:
            with self._sentry.on_duty(), _no_garbage_left(self._destructors):
                try:
                    self._stand_in()
                    yield
                finally:
                    self._put_back()
        finally:
            self._depth = 0
            for own in self._generators:  # those that a stopped constructor reaches are as their makers left them
                if id(own.held) in states:
                    own.put(states[id(own.held)][1])
            for memory in self._memories:
                memory.forget()
            self._saved_arrays = []

    def _save(self) -> None:
        for memory in self._memories:
            memory.save()
        self._saved_arrays = [SavedArray(array) for array in self._arrays]
        self._clean = True

    def begin_pass(self) -> None:
        """Put everything back: the next records meet what the first ones met."""
        if self._clean:  # the first pass of a release
            self._clean = False
            return
        self._put_back()
        self._stand_in()

    def widened(self, *, refuse: bool = False) -> bool:
        """Watch what stopped constructors reach, and put all else back: whether the pass must be run again.

        A constructor that reaches what cannot be put back is stopped whenever it is called: a record whose program
        calls it counts as zero. With ``refuse`` it raises ValueError instead.
        """
        stopped = self._sentry.stopped - self._forbidden
        self._sentry.stopped.clear()
        for method in stopped:
            try:
                self._reach({*self._called, method})
            except ValueError:
                if refuse:
                    raise
                self._forbidden.add(method)
            else:
                self._called.add(method)
        return self._watch_again() if stopped & self._called else False

    def is_resized(self) -> bool:
        """Whether a pass has resized memory that is copied at the first write."""
        return any(memory.is_resized() for memory in self._memories)

    def copy_at_once(self) -> bool:
        """Copy memory when it is saved, and not at the first write: whether that is new."""
        changed, self._copies_lazily = self._copies_lazily, False
        return changed and self._watch_again()

    def _watch_again(self) -> bool:
        if self._depth:
            self._put_back()
        self._watch()
        if self._depth:
            self._save()
            self._stand_in()
        return True

    def _put_back(self) -> None:
        """Put everything back, and again as long as destructors of what was dropped change something."""
        changed = False
        for _ in range(_MOST_ROUNDS):
            changed = self._restore()
            if not self._destructors or (gc.collect() == 0 and not changed):
                return
        if changed:  # as a program that does not end, which no record can be asked to answer for
            raise DataError(
                "objects of the model or the loss make new ones whenever they are destroyed (__del__, a "
                "finalizer), without an end. Let destructors make no objects that have one."
            )

    def _restore(self) -> bool:
        """Restore everything, and return whether something may have changed."""
        careful, changed = self._destructors, False
        for clear in self._caches:
            clear()
        for container in self._containers:
            if not container.same():
                container.restore()
                changed = True
        # Memory first: a tensor whose storage was made smaller would lie outside of it.
        for memory in self._memories:
            changed |= memory.restore()
        for face in self._tensors:
            if not face.same():
                face.restore()
                changed = True
        for saved in self._saved_arrays:
            if not careful or not saved.same():
                saved.restore()
                changed = True
        return changed

    def _stand_in(self) -> None:
        for clear in self._caches:
            clear()
        for own in self._generators:
            own.seed(self._word)
        for put_copy in self._copied:
            put_copy()


_MOST_ROUNDS = 100


@contextmanager
def _no_garbage_left(destructors: bool) -> Iterator[None]:
    """Collect garbage only where state is put back afterwards: a destructor could run in another record's pass.

    What was there before is set aside, so that each collection looks at a pass's own objects.
    """
    if not destructors:
        yield
        return
    automatic, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if automatic:
            gc.enable()


class _TensorFace:
    """A tensor's view of its memory, its gradient and its flags. A :class:`_Memory` holds the numbers."""

    def __init__(self, tensor: Tensor, memory: _Memory | None) -> None:
        self._tensor, self._alias, self._memory = tensor, tensor.detach(), memory
        self._grad, self._requires_grad = tensor.grad if tensor.is_leaf else None, tensor.requires_grad

    def same(self) -> bool:
        tensor = self._tensor
        if self._memory is not None:
            self._memory.lend(self._alias)
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
    """The memory of one tensor or of several. A copy of it costs nothing until the first write.

    torch's copy-on-write: after ``_lazy_clone`` both have the same address until one is written to, by whatever way
    torch has for that (in place, through ``.data``, through ``numpy()``); that one then gets memory of its own.
    Memory that torch does not own (of an array, shared between processes, mapped from a file) is copied.
    """

    def __init__(self, storage: torch.UntypedStorage, *, lazy: bool) -> None:
        self._storage, self._size, self.address = storage, len(storage), storage._cdata
        self._whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._lazy = lazy
        self._saved: Tensor | None = None
        self._first: Tensor | None = None

    def save(self) -> None:
        self._saved = None
        if self._lazy:
            try:
                self._saved = torch._lazy_clone(self._whole)
            except RuntimeError:
                self._lazy = False
        if self._saved is None:
            self._saved = self._whole.clone()

    def restore(self) -> bool:
        """Put the contents back: whether they were others."""
        saved = self._saved
        assert saved is not None
        resized = len(self._storage) != self._size
        if resized and self._lazy:
            # torch cannot write into it any more: its tensors get other memory.
            self._whole, self._lazy = saved.clone(), False
            self._storage = self._whole.untyped_storage()
            return True
        if resized:
            self._storage.resize_(self._size)
        if self._lazy:
            if _address(self._whole) == _address(saved):
                return resized
        elif torch.equal(self._whole, saved):
            return resized
        with torch.no_grad():
            self._whole.copy_(saved)
        if self._lazy:
            # The write moved the tensor. What the user took of it before (``numpy()``) still points to the old
            # memory, which therefore stays; from here on the memory is copied, and moves no more.
            self._first, self._lazy = saved, False
            self._saved = self._whole.clone()
        return True

    def lend(self, alias: Tensor) -> None:
        """Give a tensor that lies in other memory than before its place in this one."""
        if self._storage._cdata != self.address:
            alias.set_(self._storage, alias.storage_offset(), alias.shape, alias.stride())

    def is_resized(self) -> bool:
        return self._lazy and len(self._storage) != self._size

    def forget(self) -> None:
        self._saved = None


def copied_lazily(tensor: Tensor) -> Tensor:
    """A copy that takes memory and time when one of the two is written to."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:  # memory that is not torch's own
        return tensor.detach().clone()


def _memories(tensors: list[Tensor], *, lazy: bool) -> list[_Memory]:
    storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return [
        _Memory(storage, lazy=lazy and len(storage) > 0)
        for storage in storages.values()
        if storage.device.type != "meta"  # which has no contents
    ]
