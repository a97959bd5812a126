"""Clipped per-record gradients of a torch module, at about the cost of an ordinary gradient.

`PerExampleEngine` sums what private methods need of each record's gradient g_i, clipped to an L2 bound C:

    Σ clip_C(g_i(θ))                                          DP-SGD
    Σ clip_C(g_i(θ) − g_i(θ′))                                SPIDER
    Σ [(1−γ) clip_C₂(g_i(θ) − g_i(θ′)) + γ clip_C₁(g_i(θ))]   DP-SRM
    Σ clip_C(g_i(θ) − (1−γ) g_i(θ′))                          DP-SRM with one clip

Model and loss are called for one record (:mod:`quietgrad.torch.networks.one_record`); one forward and one
backward pass per point do so for all records of a pass, and kernels make norms and sums of what the taps kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.session.clipping import FLAT, Clipping, scale_factors
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.torch.networks.gradients import (
    GRADIENT,
    Collector,
    Gradients,
    OtherPath,
    ParameterGroups,
    Piece,
    ProgramProfile,
    Weights,
    add_clipped,
    recorded,
    vectors_by_autograd,
)
from quietgrad.torch.networks.one_record import BeginAgain, Pass, RecordProgram, in_passes
from quietgrad.torch.networks.patched_torch import full_precision
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import RecordGroup
from quietgrad.torch.networks.trees import PyTree, mapped
from quietgrad.torch.networks.usable import (
    LossFunction,
    RecordLoss,
    refuse_mixing_layers,
    refuse_shards,
    refuse_unusable_modules,
)
from quietgrad.torch.networks.vectors import GradientTerms, Rows, Stored, UnitAssignment, Workspace

# Clipping aims this much below C, so that rounding never lifts a contribution above C. By the precision that
# gradients are computed in.
_SLACK = {torch.float32: 2e-5, torch.float64: 1e-12}

MATTERS = 4096  # numbers that may be written out for each record without a word
# Bytes that what has no kernel may take in any case: with less, a class token would cost a pass for each record.
_LEAST = 16e6


def clip_weights(
    norms: Tensor, clip: float, precision: torch.dtype, clipping: Clipping = FLAT, shares: Tensor | None = None
) -> Tensor:
    """min(1, C/‖v_i‖) with C lowered by the rounding of the precision the vectors are in; or what a rule gives.

    ``shares`` are the parts of C that groups of parameters have, along the last axis of the norms.

    >>> clip_weights(torch.tensor([0.5, 2.0], dtype=torch.float64), 1.0, torch.float64)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if not clip > 0:
        raise SettingError("{clip}: must be > 0.", clip=clip)
    tight = clip / (1 + _SLACK[precision])
    if clipping == FLAT:
        return (tight / norms).clamp(max=1.0)
    factors: Tensor = scale_factors(clipping, norms, tight if shares is None else tight * shares.to(norms))
    return factors


class PerExampleEngine:
    """Per-record gradients of `module` as sums over a batch, on one flat parameter vector θ.

    Args:
        module: any torch module; layers that keep statistics of batches (BatchNorm) are refused.
        loss: loss(output, target), or loss(model, *record), of a batch of one: one number.
        memory_budget: bytes of per-record gradients kept at a time. What does not fit is computed from
            factors: less memory, somewhat more time. What has no kernel is written out, in passes that fit.
        raises: whether an exception on one record ends the run, which tells that the record is there.
        micro_batch: records in a pass at most.

    θ holds the trainable parameters in the order of `named_parameters`; frozen ones stay in the module.
    The first engine of a process sets ``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` to 4096, unless it is set.
    Modules in half precision are computed with in float32, norms in float64. A record whose norm is not finite
    counts as zero, and so does one on which model or loss raise an exception. Each record draws its own random
    numbers (dropout), the same at both points of a difference.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> engine = PerExampleEngine(model, lambda output, y: (output.squeeze(1) - y).square() / 2)
    >>> theta, out = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    >>> x = torch.tensor([[3.0, 4.0], [0.1, 0.0]], dtype=torch.float64)
    >>> group = RecordGroup(np.arange(2), (x[:, None], torch.ones(2, 1, dtype=torch.float64)))
    >>> engine.add((theta,), [group], ClippingRule.gradient(1.0), out)[:, 0]
    tensor([5.0000, 0.1000], dtype=torch.float64)
    >>> out
    tensor([-0.7000, -0.8000], dtype=torch.float64)
    """

    def __init__(
        self, module: nn.Module, loss: LossFunction | None = None, *, memory_budget: float = 512e6,
        raises: bool = False, micro_batch: int | None = None,
    ) -> None:  # fmt: skip
        refuse_unusable_modules(module)
        refuse_mixing_layers(module)
        # Samples differ in size, and oneDNN prepares every convolution anew for every size; of the 1024 that it
        # keeps, a deep network's are gone before a size comes again. This is a setting of the whole process, which
        # oneDNN reads at its first convolution; what the user has set stays.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096")
        self.module = module
        self.loss = loss
        self.memory_budget = memory_budget
        self.raises = raises
        self.micro_batch = micro_batch
        self.loss_of: Any = None if loss is None else RecordLoss(module, loss)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the module has no trainable parameter (all have requires_grad=False).")
        self.names = list(trainable)
        self._params = trainable
        self._layers = list(module.modules())
        self.slices: dict[str, slice] = {}
        self.dim = 0
        for name, param in trainable.items():
            self.slices[name] = slice(self.dim, self.dim + param.numel())
            self.dim += param.numel()
        dtypes = [p.dtype for p in trainable.values()]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = next(iter(trainable.values())).device
        self.programs: dict[tuple[bool, ...], ProgramProfile] = {}
        self._grouped: dict[Clipping, ParameterGroups] = {}
        self.space = Workspace(self.memory_budget, torch.empty(0, dtype=self.dtype, device=self.device))

    # --- parameters ------------------------------------------------------------------------------------------

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """One flat vector of a dict of the trainable parameters."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise ValueError(f"parameter {missing[0]!r} is missing; the engine trains {self.names}.")
        refuse_shards(params.items())
        return torch.cat([params[name].detach().to(self.dtype).flatten() for name in self.names])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        return {name: vector[self.slices[name]].view(p.shape) for name, p in self._params.items()}

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameters for the module: views, or copies where the module's precision is lower."""
        return {name: view.to(self._params[name].dtype) for name, view in self.views(vector).items()}

    def _leaves(self, vector: Tensor) -> dict[str, Tensor]:
        """Leaves in the module's own memory format, in float32 at least: what is clipped is computed so."""
        leaves = {}
        for name, view in self.views(vector.detach()).items():
            param = self._params[name]
            dtype = torch.float32 if _is_half(param) else param.dtype
            value = view.to(dtype)
            if param.stride() != value.stride():
                strided = torch.empty_strided(param.shape, param.stride(), dtype=dtype, device=param.device)
                value = strided.copy_(value)
            leaves[name] = value.detach().requires_grad_()
        return leaves

    def let_go(self) -> None:
        """Hold the module's tensors no longer: those of one that is whole for a pass alone are then freed."""
        for known in self.programs.values():
            known.program.state.let_go()

    # --- sums ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @full_precision()
    def add(
        self,
        points: Sequence[Tensor],
        groups: Sequence[RecordGroup],
        rule: ClippingRule,
        out: Tensor,
        keys: RecordSeeds | None = None,
        units: UnitAssignment | None = None,
    ) -> Tensor:
        """out += Σ of what the rule makes of each record's gradients; returns their norms, (records, families).

        ``keys`` are the secrets by which the records draw random numbers; without them they are fresh. With
        ``units`` the rule is applied to each unit's combined gradients, and the norms are theirs. Where a unit's
        records are in several passes, they are added up before they are clipped: no unit is clipped twice.
        """
        mix = GradientTerms(not rule.beta or rule.gamma > 0.0, rule.beta > 0.0, rule.beta)
        grouped = self.parameter_groups(rule.clipping)
        weights = _weights(rule, mix, self.dtype, grouped)
        points = [points[1], points[0]] if mix.change else points[:1]  # the previous one first
        count = sum(len(group.rows) for group in groups)
        keys = keys or RecordSeeds.of(None, np.arange(count))
        units = None if units is None or units.single else units
        who, norms = [np.arange(0)], [out.new_zeros((0, mix.families), dtype=torch.float64)]
        spread: dict[int, Tensor] = {}
        for rows, whole, parts in self._each_pass(points, groups, keys, mix, units):
            if units is None or whole:
                norms.append(add_clipped(parts, weights, out, grouped))
                who.append(rows if units is None else units.whole_in(rows))
                continue
            (part,) = parts
            for unit in np.unique(units.owners[rows]).tolist():
                total = spread.setdefault(unit, out.new_zeros((mix.families, self.dim), dtype=torch.float64))
                part.some(torch.from_numpy(units.owners[rows] == unit)).add_families(total)
        for unit, total in spread.items():
            assert units is not None
            factors = torch.from_numpy(units.factors[[unit]])
            slots = [slice(0, self.dim)] if grouped is None else list(self.slices.values())
            pieces: list[Piece] = [(slot, Stored(total[:, None, slot])) for slot in slots]
            alone = Gradients(pieces, 1, mix.families, factors=factors)
            norms.append(add_clipped([alone], weights, out, grouped))
            who.append(np.array([unit]))
        found_norms = torch.cat([each.to(out.device) for each in norms if len(each)] or norms)
        return found_norms[torch.from_numpy(np.argsort(np.concatenate(who)))]

    def parameter_groups(self, clipping: Clipping) -> ParameterGroups | None:
        """The groups of a rule that scales parameters apart; raises if one is in none."""
        if not clipping.grouped:
            return None
        if clipping not in self._grouped:
            self._grouped[clipping] = ParameterGroups(clipping, self.slices)
        return self._grouped[clipping]

    def _each_pass(
        self, points: Sequence[Tensor], groups: Sequence[RecordGroup], keys: RecordSeeds, mix: GradientTerms,
        units: UnitAssignment | None,
    ) -> Iterator[tuple[Rows, bool, list[Gradients]]]:  # fmt: skip
        """Rows of a pass, whether each unit has all its records there, and the gradients of units or of records."""
        for group in groups:
            if not len(group.rows):
                continue
            record = self.on_device(group.record)
            known = self._known(record)
            mine = keys if len(groups) == 1 else keys.rows(group.rows)

            def run(rows: Rows) -> tuple[bool, list[Gradients]] | Rows:
                whose, places = None, group.rows[rows]  # noqa: B023
                if units is not None:
                    owners, whole = units.owners[places], units.whole_in(places)
                    if 0 < (inside := np.isin(owners, whole)).sum() < len(rows):
                        return np.flatnonzero(inside)  # units with all their records here first
                    if inside.all():
                        whose = UnitAssignment(np.searchsorted(whole, owners), units.factors[whole])
                made = self._together(known.program, points, *_of(record, mine, rows), mix, whose)  # noqa: B023
                return made if isinstance(made, np.ndarray) else (whose is not None, made)

            known.program.most = self._pass_size(known, mix)
            most = known.program.most or len(group.rows)
            with known.program.release(mine):
                for left in mine.passes(most):
                    for rows, (whole, made) in in_passes(left, run):
                        yield group.rows[rows], whole, made

    def _together(
        self, program: RecordProgram, points: Sequence[Tensor], record: PyTree, keys: RecordSeeds,
        mix: GradientTerms, units: UnitAssignment | None,
    ) -> list[Gradients] | Rows:  # fmt: skip
        rows = np.arange(len(keys.indices))
        collector = Collector(mix, self.space, len(rows), units)
        try:
            for number, point in enumerate(points):
                done = program.together(self.loss_of, self._leaves(point), record, keys, rows, collector.arrived)
                if done is None:
                    break
                if isinstance(done, np.ndarray):
                    return done
                collector.begin(done.sites, first=number < len(points) - 1)
                if done.outputs.requires_grad and not program.goes_back(done.outputs):
                    break
                collector.end(done.sites)
                del done  # with its graph: what the program hung on it ends before the next pass
            else:
                return collector.gradients()
        except OtherPath:
            pass
        except BeginAgain:
            return rows
        if program.alone is None and len(rows) > 1:
            return program.fewer(len(rows))
        # Each by plain autograd: a few at a time, so that what is written out fits.
        most = max(1, int(max(self.memory_budget, _LEAST) // (mix.families * self.dim * 8)))
        return rows[:most] if len(rows) > most else self._one_by_one(program, points, record, keys, mix, units)

    def _one_by_one(
        self, program: RecordProgram, points: Sequence[Tensor], record: PyTree, keys: RecordSeeds,
        mix: GradientTerms, units: UnitAssignment | None,
    ) -> list[Gradients]:  # fmt: skip
        vectors = []
        for point in points:
            all_of = vectors_by_autograd(program, self.loss_of, self._leaves(point), record, keys, self.dtype)
            vectors.append([(slot, all_of[:, slot].contiguous()) for slot in self.slices.values()])
        collector = Collector(mix, self.space, len(keys.indices), units)
        collector.put_vectors(vectors[-1], vectors[0] if mix.change else None)
        return collector.gradients()

    # --- custom training loops ---------------------------------------------------------------------------------

    def record(self, calls: Sequence[RecordGroup], keys: RecordSeeds) -> list[Pass]:
        """The module's outputs at its own parameters, one record at a time; each record is ``(args, kwargs)``.

        ``rows`` of calls and passes are positions among ``keys``. The graph of the outputs ends at taps, which keep
        what comes back.
        """
        passes: list[Pass] = []
        leaves = self._leaves(self.flatten(dict(self.module.named_parameters())))
        for call in calls:
            record = self.on_device(call.record)
            known = self._known(record, calls=True)
            for made in known.program.passes(self._call, leaves, record, keys.rows(call.rows)):
                if made.failed:
                    made.outputs = self._blank(known, leaves, mapped(record, itemgetter(made.rows)))
                made.rows = call.rows[made.rows]
                passes.append(made)
        return passes

    def _blank(self, known: ProgramProfile, leaves: Mapping[str, Tensor], record: PyTree) -> Any:
        """Return zeros, without a graph, in the place of the outputs of a record that the model failed on."""
        keys = RecordSeeds(bytes(32), np.arange(1))
        for fill in (torch.zeros_like, torch.ones_like):  # a record of the same shape; a length of zero fails too
            (made,) = known.program.passes(self._call, leaves, mapped(record, fill), keys)
            if not made.failed:
                return mapped(made.outputs, lambda tensor: torch.zeros_like(tensor, requires_grad=False))
        raise DataError(
            "the model fails on records of zeros and of ones, so its outputs have no form that could stand in for "
            "those of a record it fails on. Call it within a loss: qt.PrivateLoop(model, loss, data)."
        )

    @torch.no_grad()
    def add_recorded(
        self, passes: Sequence[Pass], count: int, units: UnitAssignment | None, rule: ClippingRule, out: Tensor
    ) -> None:
        """out += the clipped gradients of ``count`` records after the way back; several calls add up."""
        parts, groups = recorded(passes, count, self.space, units), self.parameter_groups(rule.clipping)
        add_clipped(parts, _weights(rule, GRADIENT, self.dtype, groups), out, groups)

    # --- programs --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def losses(self, theta: Tensor, groups: Sequence[RecordGroup], keys: RecordSeeds | None = None) -> Tensor:
        count = sum(len(group.rows) for group in groups)
        keys = keys or RecordSeeds.of(None, np.arange(count))
        found = theta.new_zeros(count)
        for group in groups:
            record = self.on_device(group.record)
            program, mine = self._known(record).program, keys.rows(group.rows)
            for made in program.passes(self.loss_of, self._leaves(theta), record, mine):
                where = torch.from_numpy(group.rows[made.rows]).to(found.device)
                found[where] = torch.nan if made.failed else made.outputs.detach().to(found)
        return found

    def _call(self, record: PyTree) -> Any:
        return self.module(*record[0], **record[1])

    def on_device(self, record: PyTree) -> Any:
        """Return a record on the module's device, in float32 at least."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, torch.float32) if _is_half(tensor) else tensor.to(self.device)

        return mapped(record, moved)

    def try_out(self, record: PyTree) -> ProgramProfile:
        """Run model and loss on synthetic records of this shape; raise if they cannot be run at all."""
        known = self._known(self.on_device(record))
        if known.failed is not None:
            raise known.failed
        return known

    @property
    def fallbacks(self) -> list[str]:
        found = []
        for known in self.programs.values():
            if known.program.alone is not None:
                found.append(f"the model, one record at a time: {known.program.alone}")
            else:
                large = [(names, operation) for operation, names, copied, _ in known.sites if copied > MATTERS]
                found += [f"{', '.join(names)}: {operation} has no kernel" for names, operation in large]
        return found

    def _known(self, record: PyTree, calls: bool = False) -> ProgramProfile:
        """Return the profile of the program in the layers' present modes, made on synthetic records."""
        key = (calls, *(layer.training for layer in self._layers))
        if key not in self.programs:
            refuse_mixing_layers(self.module)
            refuse_shards(self.module.named_parameters())
            self.programs[key] = known = ProgramProfile(self.module, self.slices, self.loss)
            known.program.raises, known.program.most = self.raises, self.micro_batch
            leaves = self._leaves(self.flatten(dict(self.module.named_parameters())))
            known.try_out(self._call if calls else self.loss_of, leaves, record)
        return self.programs[key]

    def _pass_size(self, known: ProgramProfile, mix: GradientTerms) -> int | None:
        numbers = (mix.families + 1) * known.copied
        if numbers == 0 or known.program.alone is not None:
            return self.micro_batch
        most = max(1, int(max(self.memory_budget, _LEAST) // (numbers * torch.finfo(self.dtype).bits // 8)))
        return most if self.micro_batch is None else min(most, self.micro_batch)


def _of(record: PyTree, keys: RecordSeeds, rows: Rows) -> tuple[Any, RecordSeeds]:
    """Some of the records, and their seeds."""
    if len(rows) == len(keys.indices):
        return record, keys
    where = torch.from_numpy(np.ascontiguousarray(rows))
    return mapped(record, lambda tensor: tensor[where.to(tensor.device)]), keys.rows(rows)


def _is_half(value: Tensor) -> bool:
    return value.dtype in (torch.bfloat16, torch.float16)


def _weights(
    rule: ClippingRule, mix: GradientTerms, precision: torch.dtype, groups: ParameterGroups | None
) -> Weights:
    """Return the function that gives each family of vectors its weights by their norms, as ``rule`` says."""
    shares = None if groups is None else torch.tensor(groups.shares, dtype=torch.float64)

    def clipped(norms: Tensor, clip: float) -> Tensor:
        return clip_weights(norms, clip, precision, rule.clipping, shares)

    def weights(norms: Tensor) -> Tensor:
        if mix.families == 2:
            gradient, change = norms.unbind(1)
            parts = rule.gamma * clipped(gradient, rule.second_clip), rule.alpha * clipped(change, rule.clip)
            return torch.stack(parts, 1)
        total = rule.alpha * clipped(norms, rule.clip)
        return total + rule.gamma * clipped(norms, rule.second_clip) if rule.gamma else total

    return weights
