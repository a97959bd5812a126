"""Per-record gradients of a pass, or of several, in the form that their sites left them in.

Norms and weighted sums are taken of the same vectors; see :mod:`quietgrad.objectives.networks.contributions`. A
:class:`Collector` gathers what every site of a pass contributes, at one point or at two: of the previous point it
keeps, site by site as its gradients arrive, per-record vectors where there is room, or what the kernel needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    Record,
    Stored,
    Workspace,
    Written,
)
from quietgrad.objectives.networks.joint import Joint, written
from quietgrad.objectives.networks.one_record import Pass, full_precision
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.taps import Site, Vectors

__all__ = ["GRADIENT", "Collector", "Gradients", "OtherPath", "recorded"]

Piece = tuple[slice, Contribution]
Content = Record | Vectors
GRADIENT = Combination(gradient=True, change=False)


class OtherPath(Exception):
    """The program did other things at the two points of a difference."""


class Gradients:
    """Vectors of ``count`` records, or of people after :meth:`together`, for one family or two.

    ``slices`` are those of all parameters, in order.
    """

    def __init__(self, pieces: list[Piece], count: int, families: int, slices: Sequence[slice]) -> None:
        self.pieces = pieces
        self.count = count
        self.families = families
        self.slices = slices
        self.factors: Tensor | None = None  # of people
        self.kept: Tensor | None = None  # positions of the records that count; the others are of another pass

    def together(self, persons: Persons) -> Gradients:
        """Those of the people whose records these are."""
        if persons.single:
            return self
        pieces = [(where, piece.together(persons)) for where, piece in self.pieces]
        made = Gradients(pieces, len(persons), self.families, self.slices)
        made.factors = torch.from_numpy(persons.factors)
        return made

    @full_precision()
    def all_norms(self) -> Tensor:
        """(records, families), in float64; a negative square, an accident of rounding, counts as not finite."""
        squares = torch.zeros((self.count, self.families), dtype=torch.float64)
        for _, piece in self.pieces:
            squares = squares.to(found := piece.squared_norms()) + found
        norms = squares.sqrt()
        if self.kept is not None:
            norms = norms[self.kept.to(norms.device)]
        return norms if self.factors is None else norms * self.factors.to(norms.device)[:, None]

    def norms(self) -> Tensor:
        """(records,), of the first family."""
        return self.all_norms()[:, 0]

    @full_precision()
    def parameter_norms(self) -> Tensor:
        """(records, parameters)."""
        squares = torch.zeros((self.count, len(self.slices)), dtype=torch.float64)
        for where, piece in self.pieces:
            found = piece.squared_norms()
            squares = squares.to(found.device)
            squares[:, self._parameter(where)] += found[:, 0]
        return squares.sqrt()

    @full_precision()
    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """out += Σ_i w_i v_i, in float64; weights (records,) or (records, families). Uses the vectors up."""
        weights = (weights[:, None] if weights.dim() == 1 else weights).double()
        if self.factors is not None:
            weights = weights * self.factors.to(weights.device)[:, None]
        if self.kept is not None:
            some, weights = weights, weights.new_zeros((self.count, weights.shape[1]))
            weights[self.kept.to(weights.device)] = some
        total = out if out.dtype == torch.float64 else torch.zeros_like(out, dtype=torch.float64)
        while self.pieces:
            where, piece = self.pieces.pop()
            piece.add_weighted(weights, total[where])
        if total is not out:
            out += total.to(out.dtype)

    @full_precision()
    def add_weighted_by_parameter(self, weights: Tensor, out: Tensor) -> None:
        """The same with a weight of each record for each parameter, (records, parameters)."""
        weights = weights.double()
        while self.pieces:
            where, piece = self.pieces.pop()
            place = self._parameter(where)
            piece.add_weighted(weights[:, place : place + 1].contiguous(), out[where])

    def _parameter(self, where: slice) -> int:
        starts = [slot.start for slot in self.slices]
        return int(np.searchsorted(starts, where.start, side="right")) - 1


class Collector:
    """Gathers the contributions of a pass at one point, or of the passes at two."""

    def __init__(self, mix: Combination, space: Workspace, slices: Sequence[slice], count: int) -> None:
        self.mix = mix
        self.space = space
        self.slices = slices
        self.count = count
        self._nothing = Workspace(0.0, torch.empty(0, dtype=space.dtype))
        self._order: dict[int, int] = {}  # number of a site in its pass
        self._keys: list[Any] = []
        self._before: dict[int, Record | Written | Vectors | None] = {}
        self._first: bool = False
        self._clusters: list[_Cluster] = []
        self._pieces: list[Piece] = []
        self._shared: dict[int, _Cluster] = {}

    def begin(self, sites: Sequence[Site], first: bool = False) -> None:
        """The way back of a pass begins: ``first`` if it is that of the previous point."""
        keys = [site.key for site in sites]
        if self.mix.change and not first and keys != self._keys:
            raise OtherPath
        if not self._keys:
            self.space.reset(sum(site.copied for site in sites) * self.count * self.mix.families)
        self._keys, self._first = keys, first
        self._order = {id(site): number for number, site in enumerate(sites)}
        self._clusters = _clustered([cover for site in sites for cover in site.covers])
        if not first:
            self._shared = {c.start: c for c in self._clusters if c.uses > 1}

    def arrived(self, site: Site) -> None:
        """A gradient is there: what a kernel makes of it frees its memory at once."""
        if site.kernel is not None and id(site) in self._order:
            self._take(site)

    def end(self, sites: Sequence[Site]) -> None:
        """All gradients are there."""
        for site in sites:
            if id(site) in self._order:
                self._take(site)

    def _take(self, site: Site) -> None:
        number = self._order.pop(id(site))
        content = site.content(self.space.dtype)
        site.grad = None
        if self._first:
            kept: Any = content
            if isinstance(content, Record) and site.kernel is not None and not site.reads_batch:
                kept = site.kernel.remember(content, self.mix, self._space(site), site.slots)
            self._before[number] = kept
            return
        before = self._before.pop(number, None)
        self.put(site, content, before)

    def put(self, site: Site, now: Content | None, before: Any = None) -> None:
        """One site's content at the point, and at the previous one."""
        if now is None and before is None:
            return
        if isinstance(now, Record) and (
            isinstance(before, Record | Written) or (before is None and not self.mix.change)
        ):
            assert site.kernel is not None
            for role, piece in site.kernel.contributions(now, before, self.mix, self._space(site), site.slots):
                self._put(site.slots[role], piece)
            return
        if isinstance(now, Record) or isinstance(before, Record | Written):
            raise OtherPath  # a gradient arrived at one point alone
        now = now or [(slot, torch.zeros_like(values)) for slot, values in before]
        before = before or [None] * len(now)
        for (slot, values), old in zip(now, before, strict=True):
            change = None
            if self.mix.change:
                change = values if old is None else torch.sub(values, old[1], alpha=self.mix.scale)
            self._put(slot, self.mix.stored(values, change))

    def _put(self, slot: slice, piece: Contribution) -> None:
        cluster = self._cluster(slot)
        if cluster is None or cluster.uses == 1:
            self._pieces.append((slot, piece))
            return
        cluster.add(slot, piece)

    def _cluster(self, slot: slice) -> _Cluster | None:
        for cluster in self._clusters:
            if cluster.start <= slot.start < cluster.stop:
                return cluster
        return None

    def _space(self, site: Site) -> Workspace:
        """Memory to write vectors out; none where several uses add up: their factors are kept."""
        several = any((cluster := self._cluster(s)) is not None and cluster.uses > 1 for s in site.slots.values())
        return self._nothing if several else self.space

    def gradients(self) -> Gradients:
        """Everything that was put, parameter by parameter."""
        pieces = self._pieces
        for cluster in self._shared.values():
            found = cluster.piece()
            if found is not None:
                pieces.append(found)
        return Gradients(pieces, self.count, self.mix.families, self.slices)


class _Cluster:
    """A part of the flat vector that one use, or several that overlap, contribute to."""

    def __init__(self, slot: slice) -> None:
        self.start, self.stop = slot.start, slot.stop
        self.uses = 1
        self.same = True
        self.parts: list[Piece] = []

    def add(self, slot: slice, piece: Contribution) -> None:
        self.parts.append((slot, piece))

    def piece(self) -> Piece | None:
        """Vectors of several uses add up before they have a norm."""
        if not self.parts:
            return None
        if len(self.parts) == 1:
            return self.parts[0]
        where = slice(self.start, self.stop)
        if self.same:
            joint = Joint(self.stop - self.start)
            for _, part in self.parts:
                joint.add(part)
            return where, joint
        total: Tensor | None = None
        for slot, part in self.parts:  # uses of parts of a parameter that overlap
            values = written(part, slice(None)).flatten(2)
            if total is None:
                total = values.new_zeros((*values.shape[:2], self.stop - self.start))
            total[..., slot.start - self.start : slot.stop - self.start] += values
        assert total is not None
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
    passes: Sequence[Pass], count: int, space: Workspace, slices: Sequence[slice], rows: Tensor | None = None
) -> Gradients:
    """Vectors of ``count`` records from all passes that saw them: what several passes of a record left adds up.

    With ``rows`` those of some records alone.
    """
    collector = Collector(GRADIENT, space, slices, count if rows is None else len(rows))
    sites = [site for each in passes for site in each.sites]
    collector.begin(sites)
    for each in passes:
        for site in each.sites:
            content = site.content(space.dtype)
            if content is not None:
                collector.put(site, _placed(content, each, count, rows))
    return collector.gradients()


def _placed(content: Content, made: Pass, count: int, rows: Tensor | None) -> Content:
    """What a pass left, with a row for every record: zero for those that it did not see."""
    valid = np.arange(len(made.rows)) if made.valid is None else np.flatnonzero(made.valid.numpy())
    whole = len(valid) == count and bool((made.rows[valid] == np.arange(count)).all())

    def place(values: Tensor) -> Tensor:
        if not whole:
            full = values.new_zeros((count, *values.shape[1:]))
            full[torch.from_numpy(made.rows[valid]).to(values.device)] = values[
                torch.from_numpy(valid).to(values.device)
            ]
            values = full
        return values if rows is None else values[rows.to(values.device)]

    if isinstance(content, Record):
        return Record(place(content.input), place(content.output_grad))
    return [(slot, place(values)) for slot, values in content]
