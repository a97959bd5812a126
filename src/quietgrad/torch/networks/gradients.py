"""Per-example gradients of a pass, or of several, and what is found out about a program before it sees records.

A :class:`Collector` gathers what every site of a pass contributes, at one point or at two. Of the previous point it
keeps, as gradients arrive, stored vectors where there is room, or what the kernel needs. Records of one privacy
unit are laid out as one example there. :class:`ProgramProfile` runs a program on synthetic records: whether many
can be run at once, how much is written out for each, and whether the kernels agree with plain autograd.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.core.errors import QuietgradError
from quietgrad.core.session.clipping import Clipping, group_bounds
from quietgrad.torch.networks.kernels import TiedGradients
from quietgrad.torch.networks.one_record import BeginAgain, Pass, Program, RecordProgram
from quietgrad.torch.networks.pass_sizes import REFERENCE, synthetic_like
from quietgrad.torch.networks.patched_torch import full_precision
from quietgrad.torch.networks.randomness import RecordSeeds, preserved
from quietgrad.torch.networks.taps import TapSite, Vectors
from quietgrad.torch.networks.trees import PyTree, mapped
from quietgrad.torch.networks.vectors import (
    GradientTerms,
    LayerCall,
    PerExampleVectors,
    Rows,
    SizeBucket,
    Stored,
    StoredGradients,
    UnitAssignment,
    Workspace,
)

Piece = tuple[slice, PerExampleVectors]
Content = LayerCall | Vectors
GRADIENT = GradientTerms(gradient=True, change=False)


class OtherPath(Exception):
    """The program did other things at the two points of a difference."""


class ParameterGroups:
    """The groups of parameters that a clipping rule scales apart, by their places in the flat vector."""

    def __init__(self, clipping: Clipping, slices: Mapping[str, slice]) -> None:
        self.numbers, weights = clipping.groups(list(slices))
        self.shares = group_bounds(weights, 1.0)  # their squares add up to 1
        self._starts = [slot.start for slot in slices.values()]

    def __len__(self) -> int:
        return len(self.shares)

    def of(self, where: slice) -> int:
        """The group of a piece, which lies within one parameter."""
        return self.numbers[bisect_right(self._starts, where.start) - 1]


@dataclass(eq=False)
class Gradients:
    """Vectors of ``count`` records or units, for one family or two.

    ``units`` are the numbers of the units, each of whose vectors counts with its factor.
    """

    pieces: list[Piece]
    count: int
    families: int
    units: Rows | None = None
    factors: Tensor | None = None

    @full_precision()
    def norms(self, groups: ParameterGroups | None = None) -> Tensor:
        """(records, families), in float64; a negative square, an accident of rounding, counts as not finite.

        Of groups of parameters (records, families, groups).
        """
        squares = [torch.zeros((self.count, self.families), dtype=torch.float64)] * (
            1 if groups is None else len(groups)
        )
        for where, piece in self.pieces:
            number = 0 if groups is None else groups.of(where)
            squares[number] = squares[number].to(found := piece.squared_norms()) + found
        norms = squares[0].sqrt()
        if groups is not None:
            norms = torch.stack([each.to(norms.device) for each in squares], 2).sqrt()
        if self.factors is None:
            return norms
        return norms * self.factors.to(norms.device).view(-1, *[1] * (norms.dim() - 1))

    def some(self, rows: Tensor) -> Gradients:
        """Those of some records or units, given as a mask."""
        where = rows.cpu()
        units = None if self.units is None else self.units[where.numpy()]
        factors = None if self.factors is None else self.factors[where]
        pieces: list[Piece] = [(slot, piece.some(rows)) for slot, piece in self.pieces]
        return Gradients(pieces, int(where.sum()), self.families, units, factors)

    @full_precision()
    def add_weighted(self, weights: Tensor, out: Tensor, groups: ParameterGroups | None = None) -> None:
        """out += Σ_i w_i v_i, in float64; weights like the norms. Uses the vectors up."""
        weights = weights.double()
        if self.factors is not None:
            weights = weights * self.factors.to(weights.device).view(-1, *[1] * (weights.dim() - 1))
        total = out if out.dtype == torch.float64 else torch.zeros_like(out, dtype=torch.float64)
        while self.pieces:
            where, piece = self.pieces.pop()
            piece.add_weighted(weights if groups is None else weights[..., groups.of(where)], total[where])
        if total is not out:
            out += total.to(out.dtype)

    def add_families(self, total: Tensor) -> None:
        """total[f] += Σ_i v_{i,f}."""
        for family in range(self.families):
            weights = total.new_zeros((self.count, self.families))
            weights[:, family] = 1.0
            replace(self, pieces=[*self.pieces]).add_weighted(weights, total[family])


# The weights of the families of each record, or unit, from the norms of its vectors, of one shape with them.
Weights = Callable[[Tensor], Tensor]


def add_clipped(
    parts: Sequence[Gradients], weights: Weights, out: Tensor, groups: ParameterGroups | None = None
) -> Tensor:
    """out += the weighted vectors of each record, or unit; returns their norms.

    One whose norm is not finite counts as zero. 0 · inf is not 0, so the sum is taken over the others alone.
    """
    measured = [part.norms(groups) for part in parts]
    for part, norms in zip(parts, measured, strict=True):
        finite = norms.isfinite().flatten(1).all(1)
        if bool(finite.all()):
            part.add_weighted(weights(norms), out, groups)
        elif bool(finite.any()):
            part.some(finite).add_weighted(weights(norms[finite]), out, groups)
    if groups is not None:
        measured = [norms.square().sum(2).sqrt() for norms in measured]
    if parts[0].units is None:
        return measured[0]
    order = np.argsort(np.concatenate([part.units for part in parts if part.units is not None]))
    return torch.cat(measured)[torch.from_numpy(order)]


class _Gathered:
    """Contributions of a pass's sites to one bucket of units, or to all records."""

    def __init__(self, bucket: SizeBucket | None) -> None:
        self.bucket = bucket
        self.before: dict[int, LayerCall | StoredGradients | Vectors | None] = {}
        self.pieces: list[Piece] = []
        self.shared: dict[_Cluster, list[Piece]] = {}

    def arranged(self, content: Content | None) -> Content | None:
        """Records of a unit as one example with the positions of all of them; written-out vectors add up."""
        if self.bucket is None or content is None:
            return content
        if isinstance(content, LayerCall):
            return LayerCall(self.bucket.of(content.input, blank=False), self.bucket.of(content.output_grad))
        return self.added_up(content)

    def added_up(self, vectors: Vectors) -> Vectors:
        if self.bucket is None:
            return vectors
        sums = [self.bucket.of(values).sum(1, dtype=torch.float64) for _, values in vectors]
        return [(slot, total.to(values.dtype)) for (slot, values), total in zip(vectors, sums, strict=True)]


class Collector:
    """Gathers the contributions of a pass at one point, or of the passes at two."""

    def __init__(
        self, mix: GradientTerms, space: Workspace, count: int, units: UnitAssignment | None = None
    ) -> None:
        self.mix, self.space, self.count = mix, space, count
        self._units = None if units is None or units.single else units
        self._nothing = Workspace(0.0, torch.empty(0, dtype=space.dtype))
        self._order: dict[int, int] = {}  # number of a site in its pass
        self._keys: list[Any] = []
        self._first: bool = False
        self._clusters: list[_Cluster] = []
        self._gathered = [_Gathered(each) for each in ([None] if self._units is None else self._units.buckets)]

    def begin(self, sites: Sequence[TapSite], first: bool = False) -> None:
        """Begin the backward pass of ``sites``: with ``first``, that of the previous point."""
        keys = [site.key for site in sites]
        if self.mix.change and not first and keys != self._keys:
            raise OtherPath
        if not self._keys:
            self.space.reset(sum(site.copied for site in sites) * self.count * self.mix.families)
        self._keys, self._first = keys, first
        self._order = {id(site): number for number, site in enumerate(sites)}
        self._clusters = _clustered([cover for site in sites for cover in site.covers])

    def arrived(self, site: TapSite) -> None:
        """Take the gradient that arrived at a site with a kernel, which frees its memory at once."""
        if site.kernel is not None and id(site) in self._order:
            self._take(site)

    def end(self, sites: Sequence[TapSite]) -> None:
        for site in sites:
            if id(site) in self._order:
                self._take(site)

    def _take(self, site: TapSite) -> None:
        number = self._order.pop(id(site))
        content = site.content(self.space.dtype)
        site.grad = None
        for part in self._gathered:
            own = part.arranged(content)
            if not self._first:
                self._put(part, site, own, part.before.pop(number, None))
            elif isinstance(own, LayerCall) and site.kernel is not None and not site.reads_batch:
                part.before[number] = site.kernel.remember(own, self.mix, self._space(site), site.slots)
            else:
                part.before[number] = own

    def put(self, site: TapSite, content: Content) -> None:
        for part in self._gathered:
            self._put(part, site, part.arranged(content), None)

    def _put(
        self, part: _Gathered, site: TapSite, now: Content | None,
        before: LayerCall | StoredGradients | Vectors | None,
    ) -> None:  # fmt: skip
        if now is None and before is None:
            return
        if isinstance(now, LayerCall) and (
            isinstance(before, LayerCall | StoredGradients) or (before is None and not self.mix.change)
        ):
            assert site.kernel is not None
            for role, piece in site.kernel.contributions(now, before, self.mix, self._space(site), site.slots):
                self._add(part, site.slots[role], piece)
            return
        if isinstance(now, LayerCall) or isinstance(before, LayerCall | StoredGradients):
            raise OtherPath  # a gradient arrived at one point alone
        self._put_vectors(part, now, before)

    def put_vectors(self, now: Vectors, before: Vectors | None) -> None:
        """Written-out vectors of all parameters, at the point and at the previous one."""
        for part in self._gathered:
            self._put_vectors(part, part.added_up(now), None if before is None else part.added_up(before))

    def _put_vectors(self, part: _Gathered, now: Vectors | None, before: Vectors | None) -> None:
        now = now or [(slot, torch.zeros_like(values)) for slot, values in before or ()]
        for number, (slot, values) in enumerate(now):
            change = None
            if self.mix.change:
                change = torch.sub(values, before[number][1], alpha=self.mix.scale) if before else values
            self._add(part, slot, self.mix.stored(values, change))

    def _add(self, part: _Gathered, slot: slice, piece: PerExampleVectors) -> None:
        cluster = self._cluster(slot)
        if cluster is None or cluster.uses == 1:
            part.pieces.append((slot, piece))
        else:
            part.shared.setdefault(cluster, []).append((slot, piece))

    def _cluster(self, slot: slice) -> _Cluster | None:
        number = bisect_right(self._clusters, slot.start, key=_Cluster.first) - 1
        return self._clusters[number] if number >= 0 and slot.start < self._clusters[number].stop else None

    def _space(self, site: TapSite) -> Workspace:
        """Memory to write vectors out; none where several uses add up: their factors are kept."""
        several = any((cluster := self._cluster(s)) is not None and cluster.uses > 1 for s in site.slots.values())
        return self._nothing if several else self.space

    def gradients(self) -> list[Gradients]:
        """Everything that was put, parameter by parameter: of all records, or bucket by bucket of units."""
        found = []
        for part in self._gathered:
            pieces = [*part.pieces, *(cluster.piece(uses) for cluster, uses in part.shared.items())]
            count, units, factors = self.count, None, None
            if part.bucket is not None and self._units is not None:
                units, count = part.bucket.units, len(part.bucket.units)
                factors = torch.from_numpy(self._units.factors[units])
            found.append(Gradients(pieces, count, self.mix.families, units, factors))
        return found


class _Cluster:
    """A part of the flat vector that one use, or several that overlap, contribute to."""

    def __init__(self, slot: slice) -> None:
        self.start, self.stop = slot.start, slot.stop
        self.uses = 1
        self.same = True

    def first(self) -> int:
        """The place of its first number, by which clusters are sorted."""
        return int(self.start)

    def piece(self, uses: Sequence[Piece]) -> Piece:
        """Vectors of several uses add up before they have a norm."""
        if len(uses) == 1:
            return uses[0]
        where = slice(self.start, self.stop)
        if self.same:
            joint = TiedGradients(self.stop - self.start)
            for _, part in uses:
                joint.add(part)
            return where, joint
        first = uses[0][1].written(slice(None))
        total = first.new_zeros((*first.shape[:2], self.stop - self.start))
        for slot, part in uses:  # uses of parts of a parameter that overlap
            total[..., slot.start - self.start : slot.stop - self.start] += part.written(slice(None))
        return where, Stored(total)


def _clustered(covers: Sequence[slice]) -> list[_Cluster]:
    clusters: list[_Cluster] = []
    for slot in sorted(covers, key=lambda each: (each.start, each.stop)):
        last = clusters[-1] if clusters else None
        if last is None or slot.start >= last.stop:
            clusters.append(_Cluster(slot))
            continue
        last.uses += 1
        last.same &= (slot.start, slot.stop) == (last.start, last.stop)
        last.stop = max(last.stop, slot.stop)
    return clusters


@full_precision()
def recorded(
    passes: Sequence[Pass], count: int, space: Workspace, units: UnitAssignment | None = None
) -> list[Gradients]:
    """Vectors of ``count`` records from all passes that saw them: what several passes of a record left adds up."""
    collector = Collector(GRADIENT, space, count, units)
    collector.begin([site for each in passes for site in each.sites])
    for each in passes:
        for site in each.sites:
            content = site.content(space.dtype)
            if content is not None:
                collector.put(site, _placed(content, each.rows, count))
    return collector.gradients()


def _placed(content: Content, rows: Rows, count: int) -> Content:
    """Return the content with a row for every record: that of a pass at ``rows``, and zero for the others."""
    if np.array_equal(rows, np.arange(count)):
        return content

    def place(values: Tensor) -> Tensor:
        full = values.new_zeros((count, *values.shape[1:]))
        full[torch.from_numpy(rows).to(values.device)] = values
        return full

    if isinstance(content, LayerCall):
        return LayerCall(place(content.input), place(content.output_grad))
    return [(slot, place(values)) for slot, values in content]


_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}  # between kernels and autograd
_RECORDS = 3


class ProgramProfile:
    """Profile of a program in one mode of a module's layers."""

    def __init__(self, module: nn.Module, slices: Mapping[str, slice], loss: object = None) -> None:
        self.program = RecordProgram(module, slices, loss)
        self.sites: list[tuple[str, tuple[str, ...], int, bool]] = []  # operation, names, numbers copied, kernel
        self.copied = 0  # numbers that are written out for each record
        self.apart = False  # whether each record answers the program's questions in its own way
        self.failed: QuietgradError | None = None  # on every synthetic record

    def try_out(self, program: Program, params: Mapping[str, Tensor], record: PyTree) -> None:
        """One pass of a few synthetic records, compared with plain autograd."""
        runner, keys = self.program, RecordSeeds(bytes(32), np.arange(_RECORDS))
        alone, runner.synthetic = runner.alone, True
        with preserved(), torch.no_grad(), runner.release(keys):
            for numbers in ("few", "ones", "zeros"):
                try:
                    self._check(program, params, synthetic_like(record, numbers, _RECORDS), keys)
                except QuietgradError as error:  # numbers that the model does not take, or its own fault
                    self.failed = self.failed or error
                    runner.alone = alone
                else:
                    self.failed, runner.synthetic_numbers = None, numbers
                    if self.apart:
                        self._ask_many(program, params, synthetic_like(record, numbers, REFERENCE))
                    break
        runner.synthetic = False

    def _check(self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds) -> None:
        """Run each record by itself if kernels and autograd differ by more than rounding.

        In float32 they may differ where rounding decides on which side of a ReLU's corner a number is, so a
        difference counts only if it is there in float64 too.
        """
        if self._agree(program, params, record, keys):
            return
        runner = self.program
        wide = {name: p.double() if p.is_floating_point() else p for name, p in params.items()}
        as_double = mapped(record, lambda part: part.double() if part.is_floating_point() else part)
        try:
            agreed = self._agree(program, wide, as_double, keys) and runner.alone is None
        except QuietgradError:  # a model that does not run in float64
            agreed = False
        runner.alone = None if agreed else "a rule of torch's does not agree with autograd on this model"

    def _ask_many(self, program: Program, params: Mapping[str, Tensor], record: PyTree) -> None:
        """Run each record by itself if the program asks it for a number of its own, which no other one has."""
        runner, keys = self.program, RecordSeeds(bytes(32), np.arange(REFERENCE))
        if runner.together(program, params, record, keys, np.arange(REFERENCE)) is None and runner.alone is None:
            runner.alone = "it asks each record for a number of its own (.item(), a branch)"

    def _agree(self, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds) -> bool:
        """Whether norms and sums by kernels are those of autograd; true where there is nothing to compare."""
        runner = self.program
        done = runner.together(program, params, record, keys, np.arange(_RECORDS))
        while isinstance(done, np.ndarray):  # those that go one way
            record, keys = mapped(record, itemgetter(torch.from_numpy(done))), keys.rows(done)
            done = runner.together(program, params, record, keys, np.arange(len(done)))
        self.apart = len(keys.indices) == 1
        if not isinstance(done, Pass):
            runner.by_itself(program, params, record, keys, 0)  # raises if it cannot be run at all
            return True
        self.sites = [(site.operation, site.names, site.copied, site.kernel is not None) for site in done.sites]
        self.copied = sum(site.copied for site in done.sites)
        try:
            runner.goes_back(done.outputs)
        except BeginAgain:
            return self._agree(program, params, record, keys)
        first = next(iter(params.values()))
        wide = any(p.dtype == torch.float64 for p in params.values())
        like = torch.empty(0, dtype=torch.float64 if wide else torch.float32, device=first.device)
        (fast,) = recorded([done], len(done.rows), Workspace(0.0, like))
        norms = fast.norms()[:, 0].to(like.device)
        weights = torch.linspace(1.0, 2.0, len(norms), dtype=torch.float64, device=like.device)
        # One vector after the other: all at once would take more memory than a step of a large model.
        by_autograd, right = torch.zeros_like(norms), None
        for row in range(len(norms)):
            one = np.array([row])
            alone = mapped(record, itemgetter(torch.from_numpy(one)))
            slow = vectors_by_autograd(runner, program, params, alone, keys.rows(one), like.dtype)[0].double()
            by_autograd[row] = slow.norm()
            slow *= weights[row]
            right = slow if right is None else right.add_(slow)
        assert right is not None
        if not (bool(by_autograd.isfinite().all()) and bool(norms.isfinite().all())):
            return True
        longest, length = by_autograd.max(), right.norm()
        difference = right.neg_()
        fast.add_weighted(weights[:, None], difference)
        tolerance = _TOLERANCE[like.dtype]
        near = bool(((norms - by_autograd).abs() <= tolerance * (by_autograd + longest)).all())
        return near and bool(difference.norm() <= tolerance * (length + longest))


def vectors_by_autograd(
    runner: RecordProgram, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of each record by plain autograd, one after the other: (records, numbers)."""
    first, count = next(iter(params.values())), len(keys.indices)
    dim = max(slot.stop for slot in runner.slices.values())
    vectors = torch.zeros((count, dim), dtype=dtype, device=first.device)
    for row in range(count):
        while not _vector_by_autograd(runner, program, params, record, keys, row, vectors[row]):
            pass
    return vectors


def _vector_by_autograd(
    runner: RecordProgram, program: Program, params: Mapping[str, Tensor], record: PyTree, keys: RecordSeeds,
    row: int, out: Tensor,
) -> bool:  # fmt: skip
    """Write one record's gradient, not a number if the record counts as zero; false if it must be run again."""
    own = runner.by_itself(program, params, record, keys, row)
    try:
        if own.failed or not runner.goes_back(own.outputs):
            out.fill_(torch.nan)
            return True
    except BeginAgain:
        return False
    for site in own.sites:
        for slot, values in site.content(out.dtype) or ():
            out[slot] = values[0]
    return True
