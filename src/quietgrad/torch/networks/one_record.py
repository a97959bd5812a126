"""One record's program, run for many records at once: every function of the user sees one record.

A *program* is called with what ``collate([record])`` gives, a batch of one; it returns a loss or a model's outputs.
torch's ``vmap`` runs it for all records of a pass. Nothing else is in its reach, so what comes of record i is a
function of that record, the parameters and the record's own random numbers; that is the whole proof of the
sensitivity (docs/torch-proof.md). Records that answer a question of the program apart are run apart. What cannot be
run together (an operation without a rule, a side effect) is run one record at a time: the same function, slower.
How records are put together changes no bit of what comes of one (:mod:`quietgrad.torch.networks.pass_sizes`).
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

import quietgrad.torch.networks.operations  # noqa: F401  # fills the table of operations
from quietgrad.core.errors import DataError, QuietgradError
from quietgrad.torch.networks.pass_sizes import (
    BitComparison,
    Fingerprint,
    Layout,
    PassSizes,
    form_of,
    joined,
    placed,
    synthetic_like,
    without_zeros,
)
from quietgrad.torch.networks.patched_torch import full_precision, nothing_below, torch_as_needed
from quietgrad.torch.networks.program_state import ProgramState, copied_lazily
from quietgrad.torch.networks.randomness import (
    OwnGenerators,
    PerRecordRNG,
    RecordSeeds,
    UnplannedDraw,
    preserved,
)
from quietgrad.torch.networks.taps import (
    DivergentRecords,
    EachItsOwn,
    NotTogether,
    Taps,
    TapSite,
    Vectors,
    functorch,
)
from quietgrad.torch.networks.trees import (
    ModuleState,
    PyTree,
    carried,
    mapped,
    refilled,
    tensors_of,
)
from quietgrad.torch.networks.vectors import Rows

_MOST = 2**31  # records to try together, as long as they can be

Program = Callable[[Any], Any]
Made = TypeVar("Made")


@dataclass(eq=False)
class Pass:
    """A pass of some records: their outputs, (n, …), and the sites where parameters met them.

    ``rows`` are positions among the records that were asked for.
    """

    rows: Rows
    outputs: PyTree
    sites: list[TapSite]
    alone: bool = False
    failed: bool = False  # the program raised an exception on this record, which counts as zero
    runner: RecordProgram | None = None  # if code of the program's runs on the way back: who goes back for it


class BeginAgain(Exception):
    """Something was found out on the way back: the pass must be run again."""


def in_passes(left: Rows, run: Callable[[Rows], Made | Rows]) -> Iterator[tuple[Rows, Made]]:
    """Yield the rows and the result of each pass. ``run`` may return fewer of its rows to begin with instead."""
    while len(left):
        rows = left
        made = run(rows)
        while isinstance(made, np.ndarray):
            rows = rows[made]
            made = run(rows)
        # Before it is handed out: the receiver may number its rows otherwise.
        left = np.setdiff1d(left, rows)
        yield rows, made


def go_back(outputs: PyTree) -> None:
    """The way back from every output, each number with a weight of its own, so that nothing cancels by symmetry.

    A loss is one number, and its weight is 1.
    """
    with torch.enable_grad():
        floats = [t.reshape(len(t), -1) for t in tensors_of(outputs) if t.requires_grad]
        values = [(t * torch.linspace(1.0, 1.5, t.shape[1]).to(t)).sum() for t in floats]
        if values:
            copy_context().run(torch.autograd.backward, values)


class RecordProgram:
    """Runs programs of one record on a module with given parameters.

    What was found out about the program (that it draws random numbers, writes into tensors it made, cannot be run
    together) is kept: it is asked once.
    """

    def __init__(
        self, module: nn.Module | None = None, slices: Mapping[str, slice] | None = None, beside: object = None
    ) -> None:
        self.module = nn.Identity() if module is None else module
        self.slices = slices or {}
        self.places = ModuleState(self.module, beside)
        self.state = ProgramState(self.module, beside)
        self.draws = False  # by operations that only the dispatcher sees
        self.factories = False
        self.alone: str | None = None  # why each record is run by itself
        if any(layer._backward_hooks or layer._backward_pre_hooks for layer in self.places.layers):
            self.alone = "a layer has a backward hook, which may change gradients"
        elif self.state.names_internals:
            self.alone = "its code names internals of torch, below vmap, where all records lie together"
        self.synthetic = False  # whether records are synthetic, so that errors may be shown as they are
        self.synthetic_numbers = "few"  # whole numbers that it takes (synthetic_like)
        self.most: int | None = None  # records that a pass has room for
        self._sizes: dict[Any, PassSizes] = {}  # by the form of records
        # Records to try together next: half as many after some could not be, twice as many after some could. It
        # may follow the data, since the sizes of passes change no bit of what comes of a record.
        self._next = _MOST
        self._copies_lazily = True
        self._lent: list[tuple[Tensor, int]] = []  # copies of a pass, with the bytes they had
        self.own_functions = False  # whether it has autograd functions of its own
        self.raises = False  # whether an exception on one record ends the run: for debugging on public data

    def release(self, keys: RecordSeeds) -> AbstractContextManager[None]:
        """All passes of a release: each finds the state that the first one found, and none leaves anything."""
        self._next = _MOST
        return self.state.release(keys.shared)

    def passes(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds
    ) -> Iterator[Pass]:
        """All records of a stacked structure, (n, …) each, in as few passes as there are answers."""

        def run(rows: Rows) -> Pass | Rows | None:
            return self.together(program, params, record, keys, rows)

        with self.release(keys):
            for rows, found in in_passes(np.arange(len(keys.indices)), run):
                if found is None:
                    yield from (self.by_itself(program, params, record, keys, int(row)) for row in rows)
                else:
                    yield found

    def together(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds, rows: Rows,
        arrived: Callable[[TapSite], None] | None = None,
    ) -> Pass | Rows | None:  # fmt: skip
        """A pass of all records at ``rows``; which of these to begin again with; ``None``: each is run alone.

        ``arrived`` is called with every site whose gradient has come.
        """
        factories = self.factories  # beyond what synthetic records showed, for this pass alone
        if not self._admits(record):
            return None
        while self.alone is None:
            known = self.draws, self.factories
            layout = Layout(len(rows))
            if not self.synthetic:
                count = min(len(rows), self._next)
                layout = self._layout(program, params, record, count)
                if min(count, layout.size) < len(rows):
                    return np.arange(min(count, layout.size))
            try:
                made = self._vmapped(program, params, record, keys, rows, arrived, layout, factories)
                if self._must_begin_again():
                    continue
                self._next = min(_MOST, 2 * self._next)
                return made
            except DivergentRecords as apart:
                most = np.unique(apart.most.numpy() // layout.places)
                return most[most < len(rows)]  # without those that fill the pass: copies of the first
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if is_out_of_memory(error) or (self.synthetic and isinstance(error, QuietgradError)):
                    raise
                if self._must_begin_again(error) or (self.draws, self.factories) != known:
                    continue
                if not self.synthetic and len(rows) > 1:
                    return self.fewer(len(rows))
                if not isinstance(error, NotTogether | UnplannedDraw) and not factories:
                    factories = True  # most often a record was written into a tensor that was made for none
                    self.factories |= self.synthetic
                    continue
                if not self.synthetic or isinstance(error, EachItsOwn):
                    return None  # a record that may raise an exception, and no other's affair
                self.alone = str(error)
                if not isinstance(error, NotTogether | UnplannedDraw):
                    text = self.alone.split("\n")[0]
                    self.alone = f"vmap cannot run it ({type(error).__name__}: {text[:120]})"
        return None

    def _admits(self, record: PyTree) -> bool:
        """Watch the classes and objects that come with a record; false if one of them cannot be put back."""
        try:
            self.state.admit(carried(record))
        except ValueError:
            if self.synthetic:
                raise
            return False
        return True

    def fewer(self, count: int) -> Rows:
        """Some of ``count`` records that could not be run together, to try next."""
        self._next = max(1, count // 2)
        return np.arange(self._next)

    def _layout(self, program: Program, params: Mapping[str, Tensor], record: PyTree, count: int) -> Layout:
        """The layout of a pass for ``count`` records at most (:mod:`quietgrad.torch.networks.pass_sizes`)."""
        sizes = self._sizes.setdefault((form_of(record), self.factories), PassSizes())
        return sizes.fitting(count, self.most, partial(self._trial, program, params, record))

    def _trial(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, layout: Layout, records: Rows,
        count: int,
    ) -> Fingerprint | Rows | None:  # fmt: skip
        """Fingerprint of passes of synthetic records; those that go one way, if not all do; ``None``: none."""
        synthetic, fingerprints = synthetic_like(record, self.synthetic_numbers), []
        for first in range(count):
            which = layout.rows(records[(np.arange(layout.size) + first) % len(records)])
            several = mapped(synthetic, lambda each: placed(each, which))  # noqa: B023
            made = self._trial_pass(program, params, several, which, layout.places)
            if not isinstance(made, dict):
                return made
            fingerprints.append(made)
        return joined(fingerprints)

    def _trial_pass(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, which: Rows, places: int
    ) -> Fingerprint | Rows | None:
        keys, compared = RecordSeeds(bytes(32), which), BitComparison(which, places)

        def arrived(site: TapSite) -> None:
            compared.add(site.numbers())
            site.grad = None

        before = self.alone, self._next
        self.synthetic = True
        try:
            made = self.together(program, without_zeros(params), record, keys, np.arange(len(which)), arrived)
            if isinstance(made, np.ndarray):
                return np.unique(which[made])
            if made is None:
                return None
            compared.add(tensors_of(made.outputs))
            go_back(made.outputs)
        except Exception as error:  # synthetic records that it does not take, or no way back
            if is_out_of_memory(error):
                raise
            return None
        finally:
            self.synthetic = False
            self.alone, self._next = before
            self._must_begin_again()
        return compared.fingerprint()

    def _must_begin_again(self, error: BaseException | None = None) -> bool:
        """Whether more is known of the program now than when its pass began.

        Also of one that has ended well: it may have caught what stopped it.
        """
        lent, self._lent = self._lent, []
        resized = self.state.is_resized() or any(len(each.untyped_storage()) != size for each, size in lent)
        if resized or (error is not None and "COW.cpp" in str(error)):
            # Memory that is to be copied at the first write cannot be resized, so it is copied beforehand.
            self._copies_lazily = False
            if self.state.copy_at_once():
                return True
        return self.state.widened(refuse=self.synthetic)

    def _copied(self, tensor: Tensor) -> Tensor:
        """A copy for one pass, made at the first write if the program resizes none."""
        if not self._copies_lazily:
            return tensor.detach().clone()
        copy = copied_lazily(tensor)
        self._lent.append((copy, len(copy.untyped_storage())))
        return copy

    def _vmapped(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds, rows: Rows,
        arrived: Callable[[TapSite], None] | None, layout: Layout, factories: bool,
    ) -> Pass:  # fmt: skip
        device = _device(params, record)
        places = layout.rows(rows)
        mine = keys if np.array_equal(places, np.arange(len(keys.indices))) else keys.rows(places)
        tensors = [placed(tensor, places) for tensor in tensors_of(record)]
        # Whatever the program writes into a parameter is gone with these.
        params = {name: self._copied(param).requires_grad_() for name, param in params.items()}
        taps = Taps(params, self.slices, len(places), factories)
        taps.draws = PerRecordRNG(mine.draws, True, device)
        kept: list[Any] = [None]

        def one(*own: Tensor) -> list[Tensor]:
            taps.level, taps.modes = functorch.current_level(), int(self.draws)
            with taps:
                outputs = program(refilled(record, iter(own)))
            kept[0] = outputs  # for its structure
            return [taps.copy(t) if taps.is_shared(t) else t for t in tensors_of(outputs)]

        with self._context(params, mine, taps.draws if self.draws else None), torch.enable_grad():
            before = torch.default_generator.get_state()
            with nothing_below():
                run = vmap(one, randomness="different")
                outputs = copy_context().run(run, *tensors) if tensors else []
            drew = not torch.equal(before, torch.default_generator.get_state())
        if drew and not self.draws:
            self.draws = True
            return self._vmapped(program, params, record, keys, rows, arrived, layout, factories)
        sites = taps.done()
        for site in sites:
            site.arrived, site.first_places = arrived, layout.first_places(len(rows))
        if len(places) > len(rows):
            with torch.enable_grad():
                outputs = [output[layout.first_places(len(rows))] for output in outputs]
        return Pass(rows, refilled(kept[0], iter(outputs)), sites, runner=self if self.own_functions else None)

    def by_itself(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds, row: int
    ) -> Pass:
        """A pass of one record, by plain autograd: each parameter is one site."""
        if not self._admits(record):
            if self.raises:
                raise DataError("a record holds an object whose state cannot be put back after a pass.")
            return Pass(np.array([row]), None, [], alone=True, failed=True)
        device = _device(params, record)
        mine = keys.rows(np.array([row]))
        sites: list[TapSite] = []
        own: dict[str, Tensor] = {}
        for name, param in params.items():
            slot = self.slices[name]
            site = TapSite("alone", (name,), vectors=partial(_vector, slot), covers=[slot], copied=param.numel())
            leaf = param.detach().clone().requires_grad_()
            # Called by backward() alone, not by a gradient that the program itself takes.
            leaf.register_post_accumulate_grad_hook(partial(_tell, site))  # type: ignore[no-untyped-call]
            own[name] = leaf
            sites.append(site)
        part = mapped(record, lambda tensor: tensor[row])
        before = self.draws
        outputs = self._alone(program, own, part, mine, device)
        failed = isinstance(outputs, BaseException)
        if self._must_begin_again(outputs if failed else None) or self.draws != before:
            return self.by_itself(program, params, record, keys, row)
        if failed:
            if self.synthetic or self.raises:
                raise self._refusal(outputs) from (outputs if self.synthetic else None)
            # Counted as zero: an exception that ended the run would tell that the record is there.
            return Pass(np.array([row]), None, [], alone=True, failed=True)
        return Pass(np.array([row]), outputs, sites, alone=True, runner=self)

    def _alone(
        self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds,
        device: torch.device,
    ) -> Any:  # fmt: skip
        """The program's outputs for one record, (1, …), or the exception that it raised."""
        draws = PerRecordRNG(keys.draws, False, device) if self.draws else None
        before = torch.default_generator.get_state()
        with self._context(params, keys, draws), OwnGenerators(), torch.enable_grad():
            try:
                outputs = copy_context().run(program, record)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit, too: a record that ends the run tells that it is there
                if is_out_of_memory(error):
                    raise
                return error
            outputs = mapped(outputs, lambda tensor: tensor[None])
            self.draws |= not torch.equal(before, torch.default_generator.get_state())
        return outputs

    @contextmanager
    def apart(self, params: Mapping[str, Tensor], keys: RecordSeeds, *, together: bool = False) -> Iterator[None]:
        """The module with these parameters, as every pass finds it: for programs of whole clients.

        If clients run ``together``, by vmap, code of the user's that would see several of them ends the pass.
        """
        with self._context(params, keys, None), nothing_below() if together else nullcontext():
            yield

    def goes_back(self, outputs: PyTree, back: Callable[[PyTree], None] = go_back) -> bool:
        """Go back from outputs; false if that raises an exception, as one record's may.

        Raises :class:`BeginAgain` if the pass must be run again, from its beginning.
        """
        try:
            back(outputs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if is_out_of_memory(error):
                raise
            if self._must_begin_again(error):
                raise BeginAgain from None
            if self.synthetic or self.raises:
                raise self._refusal(error) from (error if self.synthetic else None)
            return False
        if self._must_begin_again():
            raise BeginAgain
        return True

    def _refusal(self, error: BaseException) -> QuietgradError:
        """Return the error to raise for an exception, without a word of what a record holds."""
        if isinstance(error, QuietgradError):
            return error
        return DataError(
            f"model or loss failed on a batch of one record ({type(error).__name__}). Both are called with "
            "what collate_fn makes of one record: try them on one yourself. Other records are not in reach "
            "there (a contrastive loss, a batch statistic)."
        )

    @contextmanager
    def _context(
        self, params: Mapping[str, Tensor], keys: RecordSeeds, draws: PerRecordRNG | None
    ) -> Iterator[None]:
        """The module with these parameters and copies of its buffers; generators of the release; full precision."""
        with ExitStack() as stack:
            stack.enter_context(preserved())
            # What a program draws in Python or numpy is the same for all records: of the release, and of no record.
            word = keys.shared
            random.seed(word)
            np.random.seed([word % 2**32, word >> 32])  # noqa: NPY002
            stack.enter_context(self.state.release(word))
            self.state.begin_pass()
            stack.enter_context(self.places.holding(params, self._stand_in_for))
            stack.enter_context(full_precision())
            stack.enter_context(torch_as_needed(self._note_own_function))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "There is a performance drop")  # without a rule: slower, and right
            warnings.filterwarnings("ignore", "Using padding='same'")
            stack.enter_context(draws if draws is not None else nullcontext())
            yield

    def _note_own_function(self) -> None:
        self.own_functions = True

    def _stand_in_for(self, buffer: Tensor) -> Tensor:
        """Return a copy of a buffer for programs, in float32 at least. Whatever they write into it is forgotten."""
        return buffer.float() if buffer.dtype in (torch.bfloat16, torch.float16) else self._copied(buffer)


def _vector(slot: slice, site: TapSite, grad: Tensor) -> Vectors:
    return [(slot, grad)]


def _tell(site: TapSite, leaf: Tensor) -> None:
    assert leaf.grad is not None
    site.receive(leaf.grad.to_dense().reshape(1, -1))  # dense, whatever nn.Embedding(sparse=True) makes of it
    leaf.grad = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine failed, and not the record.

    It depends on what else is in memory, on the other records of a pass too. Counted as zero, it would let one
    record silence others; so it ends the run, as any failure of the machine does.
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "alloc_cpu" in str(error)


def _device(params: Mapping[str, Tensor], record: PyTree) -> torch.device:
    return next(iter((*params.values(), *tensors_of(record))), torch.empty(0)).device


def each_record(
    function: Program, record: PyTree, keys: RecordSeeds | None = None, runner: RecordProgram | None = None
) -> Any:
    """``function`` of each record of a stacked structure, (n, …); what it returns, stacked.

    What it keeps in what ``runner`` watches is forgotten. A record on which it raises an exception gets 0.

    >>> each_record(lambda record: record[0].sum() * record[1], (torch.ones(2, 1, 3), torch.tensor([[1.0], [2.0]])))
    tensor([[3.],
            [6.]])
    """
    count = len(tensors_of(record)[0])
    keys = keys or RecordSeeds.of(None, np.arange(count))
    parts = list((runner or RecordProgram()).passes(function, {}, record, keys))
    for part in parts:
        if part.failed:
            part.outputs = torch.zeros(1, device=tensors_of(record)[0].device)
    return stacked(parts, count)


def stacked(parts: Sequence[Pass], count: int) -> Any:
    """The outputs of passes that together have every record, in the order of the records."""
    if len(parts) == 1:
        return parts[0].outputs
    columns = [tensors_of(part.outputs) for part in parts]
    order = torch.from_numpy(np.argsort(np.concatenate([part.rows for part in parts]), kind="stable"))
    try:
        joined = [torch.cat(column)[order.to(column[0].device)] for column in zip(*columns, strict=True)]
    except (RuntimeError, ValueError):
        raise DataError(
            "records of one shape gave outputs of different shapes: what a model returns for a record must have a "
            "shape that follows from the record's own."
        ) from None
    return refilled(parts[0].outputs, iter(joined))
