"""Clipped per-example gradients of a torch module, at about the price of an ordinary gradient.

`PerExampleEngine` sums what private methods need of each example's gradient g_i, clipped to an L2 bound C:

    Σ clip_C(g_i(θ))                                          DP-SGD
    Σ clip_C(g_i(θ) − g_i(θ′))                                SPIDER
    Σ [(1−γ) clip_C₂(g_i(θ) − g_i(θ′)) + γ clip_C₁(g_i(θ))]   DP-SRM
    Σ clip_C(g_i(θ) − (1−γ) g_i(θ′))                          DP-SRM with one clip

One forward and one backward pass per point ("book-keeping"): the backward pass stops at the layers' outputs,
and each layer's norms and clipped sums are computed from its input and output gradient alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quietgrad.objectives.base import Rule
from quietgrad.objectives.networks.checks import refuse_autocast, refuse_mixing_layers, refuse_unusable_modules
from quietgrad.objectives.networks.choosing import choose_way
from quietgrad.objectives.networks.collector import Network, Piece
from quietgrad.objectives.networks.contributions import (
    Combination,
    Contribution,
    Stored,
    Workspace,
    squares_of,
)
from quietgrad.objectives.networks.held_generators import refuse_held_generators
from quietgrad.objectives.networks.persons import Persons
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.networks.tape import Batch, LossFunction, batch_length, select
from quietgrad.objectives.networks.ways import Recorded, Way

__all__ = ["PerExampleEngine", "Strategy", "clip_weights", "positive"]

Strategy = Literal["auto", "factored", "functional"]

# Clipping aims this much below C, so that rounding never lifts a contribution above C. By the module's precision.
_SLACK = {torch.float32: 2e-5, torch.float64: 1e-12}


def clip_weights(norms: Tensor, clip: float, precision: torch.dtype) -> Tensor:
    """min(1, C/‖v_i‖) with C lowered by the rounding of the precision the vectors are in.

    >>> clip_weights(torch.tensor([0.5, 2.0], dtype=torch.float64), 1.0, torch.float64)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if not clip > 0:
        raise ValueError(f"clip={clip}: must be > 0.")
    return (clip / (1 + _SLACK[precision]) / norms).clamp(max=1.0)


# Bytes that what has no kernel may take in any case: with less, a class token would cost a pass for each example.
_LEAST = 16e6


class PerExampleEngine:
    """Per-example gradients of `module` as sums over a batch, on one flat parameter vector θ.

    Args:
        module: any torch module; layers that mix examples (BatchNorm) are refused.
        loss_fn: loss_fn(output, y) → one loss per example, shape (B,).
        memory_budget: bytes of per-example gradients kept at a time. What does not fit is computed from
            factors: less memory, somewhat more time. What has no kernel is written out, in passes that fit.
        micro_batch: most examples per pass; None: as many as fit.
        strategy: "auto"; "factored" never keeps per-example gradients (the low-memory mode); "functional" is
            vmap(grad) over the whole model, the slow reference.

    θ holds the trainable parameters in the order of `named_parameters`; frozen ones stay in the module.
    Half-precision modules get a float32 θ; norms are computed in float64 whatever the module is in.
    An example whose norm is not finite counts as zero. Each example draws its own random numbers (dropout), the
    same at both points of a difference.

    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> engine = PerExampleEngine(model, lambda output, y: (output.squeeze(1) - y).square() / 2)
    >>> theta, out = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    >>> x = torch.tensor([[3.0, 4.0], [0.1, 0.0]], dtype=torch.float64)
    >>> engine.add_clipped_gradients(theta, x, torch.ones(2, dtype=torch.float64), 1.0, out)
    tensor([5.0000, 0.1000], dtype=torch.float64)
    >>> out
    tensor([-0.7000, -0.8000], dtype=torch.float64)
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction,
        *,
        memory_budget: float = 512e6,
        micro_batch: int | None = None,
        strategy: Strategy = "auto",
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: must be ≥ 1, or None for the whole batch at once.")
        if strategy not in ("auto", "factored", "functional"):
            raise ValueError(f"strategy={strategy!r}: choose 'auto', 'factored' or 'functional'.")
        refuse_unusable_modules(module)
        refuse_mixing_layers(module)
        refuse_held_generators(module, "the model")
        refuse_held_generators(loss_fn, "the loss")
        self.module = module
        self.loss_fn = loss_fn
        self.memory_budget = 0.0 if strategy == "factored" else memory_budget
        self.micro_batch = micro_batch
        self._functional = strategy == "functional"
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError("the module has no trainable parameter (all have requires_grad=False).")
        self.names = list(trainable)
        self._params = trainable
        self._slices: dict[str, slice] = {}
        self.dim = 0
        for name, param in trainable.items():
            self._slices[name] = slice(self.dim, self.dim + param.numel())
            self.dim += param.numel()
        dtypes = [p.dtype for p in trainable.values()]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.device = next(iter(trainable.values())).device
        self._ways: dict[tuple[bool, ...], Way] = {}
        self._network = Network(module, loss_fn, self._laid_out, self._slices)
        self._space = Workspace(self.memory_budget, torch.empty(0, dtype=self.dtype, device=self.device))

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """One flat vector of a dict of the trainable parameters."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise ValueError(f"parameter {missing[0]!r} is missing; the engine trains {self.names}.")
        return torch.cat([params[name].detach().to(self.dtype).flatten() for name in self.names])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by parameter name, in the vector's precision."""
        return {name: vector[self._slices[name]].view(p.shape) for name, p in self._params.items()}

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameters for the module: views, or copies where the module's precision is lower."""
        return {name: view.to(self._params[name].dtype) for name, view in self.views(vector).items()}

    def _laid_out(self, vector: Tensor) -> dict[str, Tensor]:
        """Parameters in the module's own memory format: channels-last convolutions stay channels-last."""
        params = self.unflatten(vector)
        for name, param in self._params.items():
            if param.stride() != params[name].stride():
                strided = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
                params[name] = strided.copy_(params[name])
        return params

    def losses(self, theta: Tensor, x: Batch, y: Batch, keys: RecordKeys | None = None) -> Tensor:
        """The loss of each example at θ, in whatever mode (train or eval) the module is."""
        if batch_length(x) == 0:
            return theta.new_zeros(0)
        keys = keys or RecordKeys.of(None, np.arange(batch_length(x)))
        way = self.way(x, y)
        with torch.no_grad():
            return way.losses(self.unflatten(theta.detach()), x, y, keys)

    def add_clipped_gradients(
        self, theta: Tensor, x: Batch, y: Batch, clip: float, out: Tensor, keys: RecordKeys | None = None
    ) -> Tensor:
        """out += Σ clip_C(g_i(θ)); returns the norms ‖g_i(θ)‖ before clipping."""
        return self.add((theta,), x, y, positive(Rule.gradient(clip)), out, keys)[:, 0]

    def add_clipped_differences(
        self, theta: Tensor, previous: Tensor, x: Batch, y: Batch, clip: float, out: Tensor
    ) -> Tensor:
        """out += Σ clip_C(g_i(θ) − g_i(θ′)); returns the norms of the differences before clipping."""
        return self.add((theta, previous), x, y, positive(Rule.difference(clip)), out)[:, 0]

    def add_joint_momentum(
        self, theta: Tensor, previous: Tensor, x: Batch, y: Batch, gamma: float, clip: float, out: Tensor
    ) -> Tensor:
        """out += Σ clip_C(g_i(θ) − (1−γ) g_i(θ′)); returns the norms before clipping."""
        return self.add((theta, previous), x, y, positive(Rule.joint(gamma, clip)), out)[:, 0]

    def add_recursive_momentum(
        self,
        theta: Tensor,
        previous: Tensor,
        x: Batch,
        y: Batch,
        gamma: float,
        clip: float,
        difference_clip: float,
        out: Tensor,
    ) -> Tensor:
        """out += Σ [(1−γ) clip_C₂(g_i(θ) − g_i(θ′)) + γ clip_C₁(g_i(θ))]; returns both norms, (B, 2).

        One record contributes at most γ·C₁ + (1−γ)·C₂ (DP-SRM, Algorithm 1, line 6).
        """
        return self.add((theta, previous), x, y, Rule.momentum(gamma, clip, difference_clip), out)

    @torch.no_grad()
    def add(
        self,
        points: Sequence[Tensor],
        x: Batch,
        y: Batch,
        rule: Rule,
        out: Tensor,
        keys: RecordKeys | None = None,
        persons: Persons | None = None,
    ) -> Tensor:
        """out += Σ of what the rule makes of each example's gradients; returns their norms, (examples, families).

        ``keys`` are the secrets by which the examples draw random numbers; without them they are fresh. With
        ``persons`` the rule is applied to each person's combined gradients, and the norms are theirs.
        """
        theta, previous = points[0], points[1] if rule.beta else None
        self._check(theta, previous, out)
        mix = _mixing(rule)
        examples = batch_length(x)
        if examples == 0:
            return theta.new_zeros((0, mix.families), dtype=torch.float64)
        refuse_autocast(theta.device)
        keys = keys or RecordKeys.of(None, np.arange(examples))
        way = self.way(x, y)
        if persons is not None and len(persons.owners) != examples:
            raise ValueError("person: must be one id per example of the batch.")
        if persons is not None and not persons.single:

            def read(rows: npt.NDArray[np.int64]) -> tuple[Batch, Batch]:
                where = _where(rows, examples, theta.device)
                return select(x, where), select(y, where)

            return self.add_people(points, read, rule, lambda part: out.add_(part.to(out.dtype)), keys, persons)
        weigh = _weighing(rule, mix, self.dtype)
        norms = theta.new_empty((examples, mix.families), dtype=torch.float64)
        for rows in keys.passes(self._pass_size(way, mix) or examples):
            where = _where(rows, examples, theta.device)
            part = select(x, where), select(y, where)
            norms[where] = self._add_pass(way, theta, previous, *part, mix, weigh, out, keys.rows(rows), None)
        return norms

    @torch.no_grad()
    def add_people(
        self,
        points: Sequence[Tensor],
        read: Callable[[npt.NDArray[np.int64]], tuple[Batch, Batch]],
        rule: Rule,
        add: Callable[[Tensor], object],
        keys: RecordKeys,
        persons: Persons,
        most: int | None = None,
    ) -> Tensor:
        """What the rule makes of each person's combined gradients, added pass by pass; returns their norms.

        ``read`` gives rows of the batch, at most ``most`` at a time. A person is in one pass, or alone in several,
        whose sum is clipped in the end: in no case twice.
        """
        theta, previous = points[0], points[1] if rule.beta else None
        mix = _mixing(rule)
        way = self._ways.get(self._modes) or self.way(*read(np.arange(min(4, len(persons.owners)))))
        weigh = _weighing(rule, mix, self.dtype)
        size = min(most or len(persons.owners), self._pass_size(way, mix) or len(persons.owners))
        norms = theta.new_empty((len(persons), mix.families), dtype=torch.float64)
        for people in persons.passes(keys, size):
            rows, whose = persons.some(people)
            out = torch.zeros_like(theta, dtype=torch.float64)
            if len(rows) <= size:
                part = read(rows)
                found = self._add_pass(way, theta, previous, *part, mix, weigh, out, keys.rows(rows), whose)
            else:
                whole = self.nothing(rule)
                for start in range(0, len(rows), size):
                    some = rows[start : start + size]
                    self.add_unclipped(points, *read(some), rule, whole, keys.rows(some))
                found = self.add_whole(whole, whose.factors[0], rule, out)
            norms[torch.from_numpy(people).to(theta.device)] = found
            add(out)
        return norms

    def nothing(self, rule: Rule) -> Tensor:
        """Zero, of as many vectors as a rule clips, for :meth:`add_unclipped`."""
        shape = _mixing(rule).families, self.dim
        return torch.zeros(shape, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add_unclipped(
        self, points: Sequence[Tensor], x: Batch, y: Batch, rule: Rule, whole: Tensor, keys: RecordKeys
    ) -> None:
        """whole += Σ v_i of some records of one person, (families, d) in float64: :meth:`add_whole` clips it.

        For someone whose records are not all in one pass.
        """
        theta, previous = points[0], points[1] if rule.beta else None
        mix, way = _mixing(rule), self.way(x, y)
        size = self._pass_size(way, mix) or batch_length(x)
        for start in range(0, batch_length(x), size):
            some = slice(start, start + size)
            part = select(x, some), select(y, some)
            for where, piece in way.pieces(theta, previous, *part, mix, keys.rows(some)):
                for family, total in enumerate(whole):
                    weights = total.new_zeros((batch_length(part[0]), mix.families))
                    weights[:, family] = 1.0
                    piece.add_weighted(weights, total[where])

    def add_whole(self, whole: Tensor, factor: float, rule: Rule, out: Tensor) -> Tensor:
        """out += what the rule makes of one person's combined vectors; returns their norms, (1, families)."""
        norms = squares_of(whole)[None].sqrt() * factor
        if norms.isfinite().all():
            weights = _weighing(rule, _mixing(rule), self.dtype)(norms)[0] * factor
            out += (weights @ whole).to(out.dtype)
        return norms

    def _add_pass(
        self,
        way: Way,
        theta: Tensor,
        previous: Tensor | None,
        x: Batch,
        y: Batch,
        mix: Combination,
        weigh: Callable[[Tensor], Tensor],
        out: Tensor,
        keys: RecordKeys,
        persons: Persons | None,
    ) -> Tensor:
        pieces = way.pieces(theta, previous, x, y, mix, keys)
        norms, factors = _norms(pieces, batch_length(x), mix, persons)
        finite = norms.isfinite().all(1)
        if not finite.all():
            # 0 · inf is not 0, so the sum is formed again without these examples; the others draw as before.
            pieces.clear()
            good = finite.nonzero().flatten().cpu().numpy()
            if len(good):
                rows, others = (good, None) if persons is None else persons.some(good)
                kept = torch.from_numpy(rows).to(theta.device)
                rest = select(x, kept), select(y, kept)
                self._add_pass(way, theta, previous, *rest, mix, weigh, out, keys.rows(rows), others)
            return norms
        _add_pieces(pieces, weigh(norms) * factors, out)
        return norms

    def record(self, x: tuple[Tensor, ...], keys: RecordKeys) -> Recorded | None:
        """The module's output at its own parameters, for :meth:`add_recorded`; None if it takes several passes."""
        way, mix = self.way(x, ()), Combination(gradient=True, change=False)
        most = self._pass_size(way, mix)
        if most is not None and most < len(keys.indices):
            return None
        return way.record(self.flatten(dict(self.module.named_parameters())), x, mix, keys)

    @torch.no_grad()
    def add_recorded(
        self,
        recorded: Recorded,
        grads: Sequence[Tensor],
        clip: float,
        out: Tensor,
        persons: Persons | None = None,
    ) -> bool:
        """out += Σ clip_C(∇⟨grads_i, output_i⟩), of examples or of ``persons``.

        False, and nothing added, if one of them is not finite.
        """
        mix = Combination(gradient=True, change=False)
        pieces = recorded.pieces(grads)
        norms, factors = _norms(pieces, len(grads[0]), mix, persons)
        if not norms.isfinite().all():
            return False
        _add_pieces(pieces, _weighing(positive(Rule.gradient(clip)), mix, self.dtype)(norms) * factors, out)
        return True

    @torch.no_grad()
    def add_clipped_by_parameter(
        self,
        theta: Tensor,
        x: Batch,
        y: Batch,
        clips: Sequence[float],
        out: Tensor,
        keys: RecordKeys | None = None,
    ) -> Tensor:
        """out += Σ over examples of each parameter's gradient, clipped to that parameter's own bound.

        ``clips`` are in the order of ``names``, ``out`` is in float64. One record contributes at most √Σ C_p².
        Returns the norms over all parameters; an example with a norm that is not finite counts as zero everywhere.
        """
        self._check(theta, None, out)
        if len(clips) != len(self.names) or not all(clip > 0 for clip in clips):
            raise ValueError(f"clips: must be {len(self.names)} numbers > 0, one for each trained parameter.")
        examples = batch_length(x)
        mix = Combination(gradient=True, change=False)
        norms = theta.new_zeros(examples, dtype=torch.float64)
        if examples == 0:
            return norms
        refuse_autocast(theta.device)
        keys = keys or RecordKeys.of(None, np.arange(examples))
        way = self.way(x, y)
        bounds = torch.tensor(clips, dtype=torch.float64, device=theta.device)
        for rows in keys.passes(self._pass_size(way, mix) or examples):
            left = rows
            while len(left):
                where = torch.from_numpy(left).to(theta.device)
                part = select(x, where), select(y, where)
                pieces = self._by_parameter(way.pieces(theta, None, *part, mix, keys.rows(left)))
                squares = torch.zeros((len(left), len(self.names)), dtype=torch.float64, device=theta.device)
                for place, _, piece in pieces:
                    squares[:, place] += piece.squared_norms()[:, 0]
                norms[where] = squares.sum(1).sqrt()
                finite = squares.sqrt().isfinite().all(1)
                if finite.all():
                    weights = torch.stack([
                        clip_weights(column, float(bound), self.dtype)
                        for column, bound in zip(squares.sqrt().unbind(1), bounds, strict=True)
                    ], 1)  # fmt: skip
                    for place, slot, piece in pieces:
                        piece.add_weighted(weights[:, place : place + 1], out[slot])
                    break
                norms[where[~finite]] = torch.inf
                left = left[finite.cpu().numpy()]  # 0 · inf is not 0: the sum is formed without them
        return norms

    def _by_parameter(self, pieces: list[Piece]) -> list[tuple[int, slice, Contribution]]:
        """Contributions with the place of their parameter; vectors of the whole model are cut into parameters."""
        places = {slot.start: (place, slot) for place, slot in enumerate(self._slices.values())}
        found: list[tuple[int, slice, Contribution]] = []
        for where, piece in pieces:
            place, slot = places[where.start]
            if slot == where:
                found.append((place, slot, piece))
                continue
            assert isinstance(piece, Stored)
            for place, slot in places.values():
                if where.start <= slot.start and slot.stop <= where.stop:
                    values = piece.values[..., slot.start - where.start : slot.stop - where.start]
                    found.append((place, slot, Stored(values)))
        return found

    @property
    def planned(self) -> bool:
        """Whether it is known how the module is differentiated in its present mode."""
        return self._modes in self._ways

    @property
    def _modes(self) -> tuple[bool, ...]:
        return tuple(layer.training for layer in self.module.modules())

    def way(self, x: Batch, y: Batch) -> Way:
        """How the module is differentiated; decided anew when a layer changes between train and eval mode.

        On made-up examples of the shapes given and the module's own parameters, so that nothing depends on records.
        """
        key = self._modes
        if key not in self._ways:
            own = dict(self.module.named_parameters())
            slots = {self._params[name]: self._slices[name] for name in self.names}
            self._ways[key] = choose_way(
                self._network, self._space, slots, self.flatten(own), x, y, by_layers=not self._functional
            )
        return self._ways[key]

    def _pass_size(self, way: Way, mix: Combination) -> int | None:
        numbers = (mix.families + 1) * self.dim if way.plan is None else 2 * way.plan.written_out(mix.families)
        if numbers == 0:
            return self.micro_batch
        most = max(1, int(max(self.memory_budget, _LEAST) // (numbers * torch.finfo(self.dtype).bits // 8)))
        return most if self.micro_batch is None else min(most, self.micro_batch)

    @property
    def fallbacks(self) -> list[str]:
        """What is not done by kernels, and why, in the modes that were asked for."""
        found = []
        for way in self._ways.values():
            if way.plan is None:
                how = "vmap over the whole model" if way.vectorised else "one example at a time"
                found.append(f"the model by {how}: {way.why}")
            else:
                found += [f"{unit.name!r}: {unit.why}" for unit in way.plan.units if unit.why]
        return found

    def _check(self, theta: Tensor, previous: Tensor | None, out: Tensor) -> None:
        for name, vector in (("theta", theta), ("previous", previous), ("out", out)):
            wide = name == "out" and vector is not None and vector.dtype == torch.float64
            if vector is not None and (vector.shape != (self.dim,) or not (wide or vector.dtype == self.dtype)):
                raise ValueError(
                    f"{name} has shape {tuple(vector.shape)} and {vector.dtype}: it must be the flat vector of "
                    f"{self.dim} parameters in {self.dtype}, e.g. engine.flatten(dict(module.named_parameters()))."
                )


def _mixing(rule: Rule) -> Combination:
    """The families of vectors that a rule clips."""
    return Combination(gradient=not rule.beta or rule.gamma > 0.0, change=rule.beta > 0.0, scale=rule.beta)


def _where(numbers: npt.NDArray[np.int64], total: int, device: torch.device) -> slice | Tensor:
    return slice(None) if len(numbers) == total else torch.from_numpy(numbers).to(device)


def _norms(pieces: list[Piece], examples: int, mix: Combination, persons: Persons | None) -> tuple[Tensor, Tensor]:
    """Norms of examples, or of people, whose pieces these then are; and what the vectors count."""
    factors = torch.ones((examples, 1), dtype=torch.float64)
    if persons is not None and not persons.single:
        for place, (where, piece) in enumerate(pieces):
            pieces[place] = where, piece.together(persons)
        factors = torch.from_numpy(persons.factors)[:, None]
    squares = factors.new_zeros((len(factors), mix.families))
    for _, piece in pieces:
        squares = squares.to(found := piece.squared_norms()) + found
    factors = factors.to(squares.device)
    # A negative square is a rounding accident that says nothing about the norm: it counts as not finite.
    return squares.sqrt() * factors, factors


def _add_pieces(pieces: list[Piece], weights: Tensor, out: Tensor) -> None:
    """Weights are in float64: C/‖v_i‖ may be below the range of float32."""
    total = out if out.dtype == torch.float64 else torch.zeros_like(out, dtype=torch.float64)
    while pieces:
        where, piece = pieces.pop()
        piece.add_weighted(weights, total[where])
    if total is not out:
        out += total


def positive(rule: Rule) -> Rule:
    """The rule, if its clip is one."""
    if not rule.clip > 0:
        raise ValueError(f"clip={rule.clip}: must be > 0.")
    return rule


def _weighing(rule: Rule, mix: Combination, precision: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The weights of each example's vectors, by their norms."""

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
