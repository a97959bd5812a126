"""Clipped per-record gradients of a torch module, at about the price of an ordinary gradient.

`PerExampleEngine` sums what private methods need of each record's gradient g_i, clipped to an L2 bound C:

    Σ clip_C(g_i(θ))                                          DP-SGD
    Σ clip_C(g_i(θ) − g_i(θ′))                                SPIDER
    Σ [(1−γ) clip_C₂(g_i(θ) − g_i(θ′)) + γ clip_C₁(g_i(θ))]   DP-SRM
    Σ clip_C(g_i(θ) − (1−γ) g_i(θ′))                          DP-SRM with one clip

Model and loss are called for one record (:mod:`quietgrad.objectives.networks.one_record`); one forward and one
backward pass per point do so for all records of a pass, and kernels make norms and sums of what the taps kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quietgrad.objectives.base import ClippingRule
from quietgrad.objectives.networks.gradients import (
    GRADIENT,
    Collector,
    Gradients,
    Known,
    OtherPath,
    recorded,
    vectors_by_autograd,
)
from quietgrad.objectives.networks.one_record import Pass, RecordProgram, full_precision
from quietgrad.objectives.networks.randomness import RecordSeeds
from quietgrad.objectives.networks.records import RecordGroup
from quietgrad.objectives.networks.trees import mapped
from quietgrad.objectives.networks.usable import (
    LossFunction,
    RecordLoss,
    refuse_mixing_layers,
    refuse_unusable_modules,
)
from quietgrad.objectives.networks.vectors import GradientTerms, UnitAssignment, Workspace, squares_of

Rows = npt.NDArray[np.int64]

# Clipping aims this much below C, so that rounding never lifts a contribution above C. By the precision that
# gradients are computed in.
_SLACK = {torch.float32: 2e-5, torch.float64: 1e-12}

# Bytes that what has no kernel may take in any case: with less, a class token would cost a pass for each record.
_LEAST = 16e6


def clip_weights(norms: Tensor, clip: float, precision: torch.dtype) -> Tensor:
    """min(1, C/‖v_i‖) with C lowered by the rounding of the precision the vectors are in.

    >>> clip_weights(torch.tensor([0.5, 2.0], dtype=torch.float64), 1.0, torch.float64)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if not clip > 0:
        raise ValueError(f"clip={clip}: must be > 0.")
    return (clip / (1 + _SLACK[precision]) / norms).clamp(max=1.0)


class Recording:
    """Forward passes of a module in a loop of the user's own, kept until its gradients are asked for.

    ``parts`` are (rows, outputs): positions of records, and what the model returned for each, (n, …), with a graph.
    """

    def __init__(self, passes: list[Pass]) -> None:
        self.passes = passes

    @property
    def parts(self) -> list[tuple[Rows, Any]]:
        return [(each.rows, each.outputs) for each in self.passes]


class PerExampleEngine:
    """Per-record gradients of `module` as sums over a batch, on one flat parameter vector θ.

    Args:
        module: any torch module; layers that keep statistics of batches (BatchNorm) are refused.
        loss: loss(output, target), or loss(model, *record), of a batch of one: one number.
        memory_budget: bytes of per-record gradients kept at a time. What does not fit is computed from
            factors: less memory, somewhat more time. What has no kernel is written out, in passes that fit.
        micro_batch: most records per pass; None: as many as fit.

    θ holds the trainable parameters in the order of `named_parameters`; frozen ones stay in the module.
    Modules in half precision are computed with in float32, norms in float64. A record whose norm is not finite
    counts as zero. Each record draws its own random numbers (dropout), the same at both points of a difference.

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
        self,
        module: nn.Module,
        loss: LossFunction | None = None,
        *,
        memory_budget: float = 512e6,
        micro_batch: int | None = None,
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: must be ≥ 1, or None for the whole batch at once.")
        refuse_unusable_modules(module)
        refuse_mixing_layers(module)
        self.module = module
        self.loss = loss
        self.memory_budget = memory_budget
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
        self.programs: dict[tuple[bool, ...], Known] = {}
        self.space = Workspace(self.memory_budget, torch.empty(0, dtype=self.dtype, device=self.device))

    # --- parameters ------------------------------------------------------------------------------------------

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """One flat vector of a dict of the trainable parameters."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise ValueError(f"parameter {missing[0]!r} is missing; the engine trains {self.names}.")
        return torch.cat([params[name].detach().to(self.dtype).flatten() for name in self.names])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by parameter name, in the vector's precision."""
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
        persons: UnitAssignment | None = None,
    ) -> Tensor:
        """out += Σ of what the rule makes of each record's gradients; returns their norms, (records, families).

        ``keys`` are the secrets by which the records draw random numbers; without them they are fresh. With
        ``persons`` the rule is applied to each person's combined gradients, and the norms are theirs.
        """
        theta, previous = points[0], points[1] if rule.beta else None
        self._check(theta, previous, out)
        mix = _mixing(rule)
        count = sum(len(group.rows) for group in groups)
        keys = keys or RecordSeeds.of(None, np.arange(count))
        weigh = _weighing(rule, mix, self.dtype)
        if persons is not None and not persons.single:
            return self._add_people(theta, previous, groups, mix, weigh, out, keys, persons)
        norms = theta.new_zeros((count, mix.families), dtype=torch.float64)
        for rows, found in self._each_pass(theta, previous, groups, keys, mix):
            norms[torch.from_numpy(rows)] = self._add_clipped(found, weigh, out).to(norms)
        return norms

    def gradients(
        self, theta: Tensor, groups: Sequence[RecordGroup], keys: RecordSeeds
    ) -> Iterator[tuple[Rows, Gradients]]:
        """Gradients of all records pass by pass, with their rows; those that are not finite are left out."""
        with torch.no_grad(), full_precision():
            for rows, found in self._each_pass(theta, None, groups, keys, GRADIENT):
                norms = found(None).all_norms()
                finite = norms.isfinite().all(1)
                kept = None if bool(finite.all()) else finite.cpu().numpy()
                yield (rows, found(None)) if kept is None else (rows[kept], found(finite.cpu()))

    def _add_clipped(self, found: _Found, weigh: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        made = found(None)
        norms = made.all_norms()
        finite = norms.isfinite().all(1)
        if not bool(finite.all()):
            # 0 · inf is not 0, so the sum is formed again without these; the others draw as before.
            if bool(finite.any()):
                made = found(finite.cpu())
                made.add_weighted(weigh(made.all_norms()), out)
            return norms
        made.add_weighted(weigh(norms), out)
        return norms

    def _each_pass(
        self, theta: Tensor, previous: Tensor | None, groups: Sequence[RecordGroup], keys: RecordSeeds,
        mix: GradientTerms,
    ) -> Iterator[tuple[Rows, _Found]]:  # fmt: skip
        """Rows of a pass, and what makes their gradients: of all of them, or of those in a mask."""
        for group in groups:
            if not len(group.rows):
                continue
            record = self.on_device(group.record)
            known = self._known(record)
            mine = keys if len(groups) == 1 else keys.rows(group.rows)
            most = self._pass_size(known, mix) or len(group.rows)
            for left in mine.passes(most):
                while len(left):
                    rows = left
                    made = self._pass(known.program, theta, previous, *self._of(record, mine, rows), mix)
                    while isinstance(made, np.ndarray):  # only these, and fewer each time, go the same way
                        rows = rows[made]
                        made = self._pass(known.program, theta, previous, *self._of(record, mine, rows), mix)
                    yield group.rows[rows], made
                    left = np.setdiff1d(left, rows)

    @staticmethod
    def _of(record: Any, keys: RecordSeeds, rows: Rows) -> tuple[Any, RecordSeeds]:
        """Some of the records, and their seeds."""
        return (record, keys) if len(rows) == len(keys.indices) else (_select(record, rows), keys.rows(rows))

    def _pass(
        self, program: RecordProgram, theta: Tensor, previous: Tensor | None, record: Any, keys: RecordSeeds,
        mix: GradientTerms,
    ) -> _Found | Rows:  # fmt: skip
        """What makes these records' gradients, of all or of those in a mask; or which can be made together."""
        made = self._together(program, theta, previous, record, keys, mix)
        if isinstance(made, np.ndarray):
            return made
        first: list[Gradients] = [made]

        def found(kept: Tensor | None) -> Gradients:
            if kept is None and first:
                return first.pop()
            rows = np.arange(len(keys.indices)) if kept is None else np.flatnonzero(kept.numpy())
            part, own = self._of(record, keys, rows)
            again = self._together(program, theta, previous, part, own, mix)
            if isinstance(again, np.ndarray):
                # Fewer records may answer otherwise, by a rounding, or in ways few enough for a pass.
                points = [theta] if previous is None else [previous, theta]
                again = self._one_by_one(program, points, part, own, mix, whole=True)
                assert isinstance(again, Gradients)
            return again

        return found

    def _together(
        self, program: RecordProgram, theta: Tensor, previous: Tensor | None, record: Any, keys: RecordSeeds,
        mix: GradientTerms,
    ) -> Gradients | Rows:  # fmt: skip
        rows = np.arange(len(keys.indices))
        collector = Collector(mix, self.space, list(self.slices.values()), len(rows))
        points = [theta] if previous is None else [previous, theta]
        try:
            for number, point in enumerate(points):
                done = program.together(self.loss_of, self._leaves(point), record, keys, rows, collector.arrived)
                if done is None:
                    return self._one_by_one(program, points, record, keys, mix)
                if isinstance(done, np.ndarray):
                    return done
                collector.begin(done.sites, first=number < len(points) - 1)
                if done.outputs.requires_grad:
                    with torch.enable_grad():
                        torch.autograd.backward(done.outputs.sum())
                collector.end(done.sites)
        except OtherPath:
            return self._one_by_one(program, points, record, keys, mix)
        return collector.gradients()

    def _one_by_one(
        self, program: RecordProgram, points: list[Tensor], record: Any, keys: RecordSeeds, mix: GradientTerms,
        whole: bool = False,
    ) -> Gradients | Rows:  # fmt: skip
        """Each record by plain autograd; a few at a time, so that what is written out fits, or the ``whole``."""
        count = len(keys.indices)
        most = max(1, int(max(self.memory_budget, _LEAST) // (mix.families * self.dim * 8)))
        if count > most and not whole:
            return np.arange(most)
        vectors = [
            vectors_by_autograd(program, self.loss_of, self._leaves(point), record, keys, self.dtype)
            for point in points
        ]
        now = vectors[-1]
        change = torch.sub(now, vectors[0], alpha=mix.scale) if mix.change else None
        piece = mix.stored(now, change)
        slices = list(self.slices.values())
        pieces = [(slot, type(piece)(piece.values[..., slot].contiguous())) for slot in slices]
        return Gradients(pieces, count, mix.families, slices)  # type: ignore[arg-type]

    # --- people ----------------------------------------------------------------------------------------------

    def _add_people(
        self, theta: Tensor, previous: Tensor | None, groups: Sequence[RecordGroup], mix: GradientTerms,
        weigh: Callable[[Tensor], Tensor], out: Tensor, keys: RecordSeeds, persons: UnitAssignment,
    ) -> Tensor:  # fmt: skip
        """What the rule makes of each person's combined gradients.

        A person whose records are all in one pass is combined there. Those of the others are added up over passes
        before they are clipped: in no case is anybody clipped twice.
        """
        norms = theta.new_zeros((len(persons), mix.families), dtype=torch.float64)
        done = np.zeros(len(persons), bool)
        sizes = persons.sizes
        spread: dict[int, Tensor] = {}
        for rows, found in self._each_pass(theta, previous, groups, keys, mix):
            owners = persons.owners[rows]
            people, inside = np.unique(owners, return_counts=True)
            whole = people[inside == sizes[people]]
            mask = np.isin(owners, whole)
            if mask.any():
                numbers = np.searchsorted(whole, owners[mask])
                mine = UnitAssignment(numbers.astype(np.int64), persons.factors[whole])
                part = found(None if mask.all() else torch.from_numpy(mask)).together(mine)
                values = part.all_norms()
                finite = values.isfinite().all(1)
                norms[torch.from_numpy(whole)] = values.to(norms)
                done[whole] = True
                if bool(finite.all()):
                    part.add_weighted(weigh(values), out)
                elif bool(finite.any()):
                    good = whole[finite.cpu().numpy()]
                    kept = np.isin(owners, good)
                    again = UnitAssignment(
                        np.searchsorted(good, owners[kept]).astype(np.int64), persons.factors[good]
                    )
                    part = found(torch.from_numpy(kept)).together(again)
                    part.add_weighted(weigh(part.all_norms()), out)
            for person in np.setdiff1d(people, whole).tolist():
                total = spread.setdefault(
                    person, torch.zeros((mix.families, self.dim), dtype=torch.float64, device=self.device)
                )
                part = found(torch.from_numpy(owners == person))
                for family in range(mix.families):
                    weights = torch.zeros((part.count, mix.families), dtype=torch.float64, device=self.device)
                    weights[:, family] = 1.0
                    Gradients(list(part.pieces), part.count, mix.families, part.slices).add_weighted(
                        weights, total[family]
                    )
        for person, total in spread.items():
            factor = float(persons.factors[person])
            values = squares_of(total)[None].sqrt() * factor
            norms[person] = values[0].to(norms)
            if bool(values.isfinite().all()):
                out += ((weigh(values)[0] * factor) @ total).to(out.dtype)
        return norms

    # --- loops of the user's own -----------------------------------------------------------------------------

    def record(self, calls: Sequence[RecordGroup], keys: RecordSeeds) -> Recording:
        """The module's outputs at its own parameters, one record at a time; each record is ``(args, kwargs)``.

        ``rows`` of the calls are positions among ``keys``. The graph of the outputs ends at taps, which keep what
        comes back.
        """
        passes: list[Pass] = []
        leaves = self._leaves(self.flatten(dict(self.module.named_parameters())))
        for call in calls:
            record = self.on_device(call.record)
            known = self._known(record, calls=True)
            mine = keys.rows(call.rows)
            for made in known.program.passes(self._call, leaves, record, mine):
                made.rows = call.rows[made.rows]
                passes.append(made)
        return Recording(passes)

    @torch.no_grad()
    def gradients_recorded(
        self, recordings: Sequence[Recording], count: int, rows: Tensor | None = None
    ) -> Gradients:
        """Per-record gradients of ``count`` records after the way back; several calls of one add up.

        With ``rows`` (a mask or positions) those of some records alone.
        """
        passes = [each for recording in recordings for each in recording.passes]
        if rows is not None and rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        return recorded(passes, count, self.space, list(self.slices.values()), rows)

    # --- programs --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def losses(self, theta: Tensor, groups: Sequence[RecordGroup], keys: RecordSeeds | None = None) -> Tensor:
        """The loss of each record at θ, in whatever mode (train or eval) the module is."""
        count = sum(len(group.rows) for group in groups)
        keys = keys or RecordSeeds.of(None, np.arange(count))
        found = theta.new_zeros(count)
        for group in groups:
            record = self.on_device(group.record)
            program, mine = self._known(record).program, keys.rows(group.rows)
            for made in program.passes(self.loss_of, self._leaves(theta), record, mine):
                where = torch.from_numpy(group.rows[made.rows]).to(found.device)
                found[where] = made.outputs.detach().to(found)
        return found

    def _call(self, record: Any) -> Any:
        args, kwargs = record
        return self.module(*args, **kwargs)

    def on_device(self, record: Any) -> Any:
        """A record where the module is, in float32 at least."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, torch.float32) if _is_half(tensor) else tensor.to(self.device)

        return mapped(record, moved)

    def try_out(self, record: Any) -> None:
        """Run model and loss on made-up records of this shape; raise if they cannot be run at all."""
        known = self._known(self.on_device(record))
        if known.failed is not None:
            raise known.failed

    @property
    def fallbacks(self) -> list[str]:
        """What is not done by kernels, and why."""
        found = []
        for known in self.programs.values():
            if known.program.alone is not None:
                found.append(f"the model, one record at a time: {known.program.alone}")
            else:
                large = [(names, operation) for operation, names, copied, _ in known.sites if copied > 4096]
                found += [f"{', '.join(names)}: {operation} has no kernel" for names, operation in large]
        return found

    def program_of(self, record: Any) -> RecordProgram:
        """How records of this shape are run."""
        return self._known(self.on_device(record)).program

    def pass_of(self, theta: Tensor, record: Any, keys: RecordSeeds) -> Pass | None:
        """One pass there and back, for who wants to look at its sites; ``None`` if records are run apart."""
        program = self.program_of(record)
        rows = np.arange(len(keys.indices))
        done = program.together(self.loss_of, self._leaves(theta), self.on_device(record), keys, rows)
        if not isinstance(done, Pass):
            return None
        if done.outputs.requires_grad:
            torch.autograd.backward(done.outputs.sum())
        return done

    def _known(self, record: Any, calls: bool = False) -> Known:
        """What is known of the program in the layers' present modes: found out on made-up records of this shape."""
        key = (calls, *(layer.training for layer in self._layers))
        if key not in self.programs:
            refuse_mixing_layers(self.module)
            self.programs[key] = known = Known(self.module, self.slices, self.loss)
            leaves = self._leaves(self.flatten(dict(self.module.named_parameters())))
            known.try_out(self._call if calls else self.loss_of, leaves, record)
        return self.programs[key]

    def _pass_size(self, known: Known, mix: GradientTerms) -> int | None:
        numbers = (mix.families + 1) * known.copied
        if numbers == 0 or known.program.alone is not None:
            return self.micro_batch
        most = max(1, int(max(self.memory_budget, _LEAST) // (numbers * torch.finfo(self.dtype).bits // 8)))
        return most if self.micro_batch is None else min(most, self.micro_batch)

    def _check(self, theta: Tensor, previous: Tensor | None, out: Tensor) -> None:
        for name, vector in (("theta", theta), ("previous", previous), ("out", out)):
            wide = name == "out" and vector is not None and vector.dtype == torch.float64
            if vector is not None and (vector.shape != (self.dim,) or not (wide or vector.dtype == self.dtype)):
                raise ValueError(
                    f"{name} has shape {tuple(vector.shape)} and {vector.dtype}: it must be the flat vector of "
                    f"{self.dim} parameters in {self.dtype}, e.g. engine.flatten(dict(module.named_parameters()))."
                )


_Found = Callable[[Tensor | None], Gradients]


def _select(record: Any, rows: Rows) -> Any:
    where = torch.from_numpy(np.ascontiguousarray(rows))
    return mapped(record, lambda tensor: tensor[where.to(tensor.device)])


def _is_half(value: Tensor) -> bool:
    return value.dtype in (torch.bfloat16, torch.float16)


def _mixing(rule: ClippingRule) -> GradientTerms:
    """The families of vectors that a rule clips."""
    return GradientTerms(gradient=not rule.beta or rule.gamma > 0.0, change=rule.beta > 0.0, scale=rule.beta)


def positive(rule: ClippingRule) -> ClippingRule:
    """The rule, if its clip is one."""
    if not rule.clip > 0:
        raise ValueError(f"clip={rule.clip}: must be > 0.")
    return rule


def _weighing(rule: ClippingRule, mix: GradientTerms, precision: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The weights of each record's vectors, by their norms."""

    def weigh(norms: Tensor) -> Tensor:
        if mix.families == 2:
            gradient, change = norms.unbind(1)
            parts = (
                rule.gamma * clip_weights(gradient, rule.second_clip, precision),
                rule.alpha * clip_weights(change, rule.clip, precision),
            )
            return torch.stack(parts, 1)
        weights = rule.alpha * clip_weights(norms, rule.clip, precision)
        return weights + rule.gamma * clip_weights(norms, rule.second_clip, precision) if rule.gamma else weights

    return weigh
