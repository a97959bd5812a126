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

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quietgrad.objectives.contributions import (
    Combination,
    Contribution,
    OuterProducts,
    Record,
    Stored,
    TokenSums,
)
from quietgrad.objectives.fallback import model_gradients, module_gradients
from quietgrad.objectives.layers import MemoryBudget
from quietgrad.objectives.plan import plan_units, refuse_mixing_layers, refuse_mixing_losses
from quietgrad.objectives.tape import (
    Batch,
    Call,
    LossFunction,
    Unit,
    backpropagate,
    batch_length,
    per_example_losses,
    replayed_randomness,
    select,
)

__all__ = ["PerExampleEngine", "Strategy", "clip_weights"]

Strategy = Literal["auto", "factored", "functional"]

# Clipping aims this much below C, so that rounding never lifts a contribution above C.
_SLACK = {torch.float32: 2e-5, torch.float64: 1e-12}


def clip_weights(norms: Tensor, clip: float) -> Tensor:
    """min(1, C/‖v_i‖) with C lowered by the rounding of the norm's precision.

    >>> clip_weights(torch.tensor([0.5, 2.0], dtype=torch.float64), 1.0)
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    if not clip > 0:
        raise ValueError(f"clip={clip}: must be > 0.")
    return (clip / (1 + _SLACK[norms.dtype]) / norms).clamp(max=1.0)


class PerExampleEngine:
    """Per-example gradients of `module` as sums over a batch, on one flat parameter vector θ.

    Args:
        module: any torch module; layers that mix examples (BatchNorm) are refused.
        loss_fn: loss_fn(output, y) → one loss per example, shape (B,).
        memory_budget: bytes of per-example gradients kept at a time. What does not fit is computed from
            factors: less memory, somewhat more time.
        micro_batch: examples per pass; None: the whole batch, except in fallbacks that would exceed the budget.
        strategy: "auto"; "factored" never keeps per-example gradients (the low-memory mode); "functional" is
            vmap(grad) over the whole model, the slow reference.

    θ holds the trainable parameters in the order of `named_parameters`; frozen ones stay in the module.
    Half-precision modules get a float32 θ, and their norms are computed in float32.
    An example whose norm is not finite counts as zero. Both points of a difference see the same dropout mask.

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
        memory_budget: float = 256e6,
        micro_batch: int | None = None,
        strategy: Strategy = "auto",
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: must be ≥ 1, or None for the whole batch at once.")
        if strategy not in ("auto", "factored", "functional"):
            raise ValueError(f"strategy={strategy!r}: choose 'auto', 'factored' or 'functional'.")
        refuse_mixing_layers(module)
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
        self._plans: dict[tuple[bool, ...], list[Unit] | None] = {}
        self._vectorised = True

    def flatten(self, params: Mapping[str, Tensor]) -> Tensor:
        """One flat vector of a dict of the trainable parameters."""
        missing = [name for name in self.names if name not in params]
        if missing:
            raise ValueError(f"parameter {missing[0]!r} is missing; the engine trains {self.names}.")
        return torch.cat([params[name].detach().to(self.dtype).flatten() for name in self.names])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by parameter name (copies where the module's precision is lower)."""
        return {
            name: vector[self._slices[name]].view(param.shape).to(param.dtype)
            for name, param in self._params.items()
        }

    def losses(self, theta: Tensor, x: Batch, y: Batch) -> Tensor:
        """The loss of each example at θ, in whatever mode (train or eval) the module is."""
        with torch.no_grad():
            args = (x,) if isinstance(x, Tensor) else x
            output = functional_call(self.module, self.unflatten(theta.detach()), args)
            return per_example_losses(self.loss_fn, output, x, y)

    def add_clipped_gradients(self, theta: Tensor, x: Batch, y: Batch, clip: float, out: Tensor) -> Tensor:
        """out += Σ clip_C(g_i(θ)); returns the norms ‖g_i(θ)‖ before clipping."""
        mix = Combination(gradient=True, change=False)
        return self._add(theta, None, x, y, mix, lambda norms: clip_weights(norms, clip), out)[:, 0]

    def add_clipped_differences(
        self, theta: Tensor, previous: Tensor, x: Batch, y: Batch, clip: float, out: Tensor
    ) -> Tensor:
        """out += Σ clip_C(g_i(θ) − g_i(θ′)); returns the norms of the differences before clipping."""
        mix = Combination(gradient=False, change=True)
        return self._add(theta, previous, x, y, mix, lambda norms: clip_weights(norms, clip), out)[:, 0]

    def add_joint_momentum(
        self, theta: Tensor, previous: Tensor, x: Batch, y: Batch, gamma: float, clip: float, out: Tensor
    ) -> Tensor:
        """out += Σ clip_C(g_i(θ) − (1−γ) g_i(θ′)); returns the norms before clipping."""
        mix = Combination(gradient=False, change=True, scale=1 - gamma)
        return self._add(theta, previous, x, y, mix, lambda norms: clip_weights(norms, clip), out)[:, 0]

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
        mix = Combination(gradient=True, change=True)

        def weigh(norms: Tensor) -> Tensor:
            gradient, change = norms.unbind(1)
            return torch.stack(
                [gamma * clip_weights(gradient, clip), (1 - gamma) * clip_weights(change, difference_clip)], 1
            )

        return self._add(theta, previous, x, y, mix, weigh, out)

    @torch.no_grad()
    def _add(
        self,
        theta: Tensor,
        previous: Tensor | None,
        x: Batch,
        y: Batch,
        mix: Combination,
        weigh: Callable[[Tensor], Tensor],
        out: Tensor,
    ) -> Tensor:
        """out += Σ_i Σ_f weigh(norms)[i, f] · v_{i,f}; returns the norms (examples, families)."""
        self._check(theta, previous, out)
        examples = batch_length(x)
        if examples == 0:
            return theta.new_zeros((0, mix.families))
        units = self._plan(theta, x, y)
        norms = []
        size = self._pass_size(units, mix) or examples
        for start in range(0, examples, size):
            part = slice(start, start + size)
            norms.append(self._add_pass(units, theta, previous, select(x, part), select(y, part), mix, weigh, out))
        return torch.cat(norms)

    def _add_pass(
        self,
        units: list[Unit] | None,
        theta: Tensor,
        previous: Tensor | None,
        x: Batch,
        y: Batch,
        mix: Combination,
        weigh: Callable[[Tensor], Tensor],
        out: Tensor,
    ) -> Tensor:
        if units is None:
            pieces = self._model_pieces(theta, previous, x, y, mix)
        else:
            pieces = _Collector(self, units, mix).collect(theta, previous, x, y)
        squares = theta.new_zeros((batch_length(x), mix.families))
        for _, piece in pieces:
            squares += piece.squared_norms()
        # A negative square is a rounding accident that says nothing about the norm: it counts as not finite.
        norms = squares.sqrt()
        finite = norms.isfinite().all(1)
        if not finite.all():
            # 0 · inf is not 0, so the sum is formed again without these examples.
            del pieces
            good = finite.nonzero().flatten()
            if len(good):
                self._add_pass(units, theta, previous, select(x, good), select(y, good), mix, weigh, out)
            return norms
        weights = weigh(norms).to(theta.dtype)
        while pieces:
            where, piece = pieces.pop()
            piece.add_weighted(weights, out[where])
        return norms

    def _model_pieces(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch, mix: Combination
    ) -> list[tuple[slice, Contribution]]:
        def rows(point: Tensor) -> Tensor:
            return model_gradients(self.module, self.loss_fn, self.unflatten, point, x, y, self._vectorised)

        with replayed_randomness(theta.device) as rewind:
            change = None
            if previous is not None:
                change = rows(previous).mul_(-mix.scale)
                rewind()
            now = rows(theta)
            if change is not None:
                change += now
        values = mix.stack(now, change, 1).unflatten(1, (mix.families, -1))
        return [(slice(0, self.dim), Stored(values))]

    def _plan(self, theta: Tensor, x: Batch, y: Batch) -> list[Unit] | None:
        """How to take the module apart; planned anew when a layer changes between train and eval mode."""
        key = tuple(layer.training for layer in self.module.modules())
        if key not in self._plans:
            ends = torch.tensor([0, batch_length(x) - 1], device=self.device)
            pair_x, pair_y = select(x, ends), select(y, ends)
            with replayed_randomness(self.device) as rewind:
                refuse_mixing_losses(self.module, lambda a, b: self.losses(theta, a, b), pair_x, pair_y)
                self._plans[key] = self._try_plan(theta.detach(), pair_x, pair_y)
                rewind()
        return self._plans[key]

    def _try_plan(self, theta: Tensor, x: Batch, y: Batch) -> list[Unit] | None:
        mix = Combination(gradient=True, change=False)
        params = self.unflatten(theta)
        slots = {self._params[name]: self._slices[name] for name in self.names}
        units = None if self._functional else plan_units(self.module, slots, params, self._slices, x)
        if units is not None and all(unit.kernel is not None for unit in units):
            return units
        if units is not None:
            try:
                _Collector(self, units, mix).collect(theta, None, x, y)
                return units
            except (RuntimeError, NotImplementedError):
                units = None  # vmap has no rule for something in the module
        try:
            self._model_pieces(theta, None, x, y, mix)
        except (RuntimeError, NotImplementedError):
            self._vectorised = False
        return None

    def _pass_size(self, units: list[Unit] | None, mix: Combination) -> int | None:
        if self.micro_batch is not None or units is not None:
            return self.micro_batch
        row = (mix.families + 1) * self.dim * torch.finfo(self.dtype).bits // 8
        return max(1, int(self.memory_budget // row))

    def _check(self, theta: Tensor, previous: Tensor | None, out: Tensor) -> None:
        for name, vector in (("theta", theta), ("previous", previous), ("out", out)):
            if vector is not None and (vector.shape != (self.dim,) or vector.dtype != self.dtype):
                raise ValueError(
                    f"{name} has shape {tuple(vector.shape)} and {vector.dtype}: it must be the flat vector of "
                    f"{self.dim} parameters in {self.dtype}, e.g. engine.flatten(dict(module.named_parameters()))."
                )


class _Collector:
    """Runs one or two points and gathers the contributions of all layers."""

    def __init__(self, engine: PerExampleEngine, units: list[Unit], mix: Combination) -> None:
        self.engine = engine
        self.units = units
        self.mix = mix
        self.budget = MemoryBudget(engine.memory_budget)
        self.pieces: list[tuple[slice, Contribution]] = []
        self.joint: dict[int, Stored] = {}
        self.uses: dict[int, int] = {}
        self.before: dict[tuple[Unit, int], Record | dict[str, Tensor]] = {}

    def collect(
        self, theta: Tensor, previous: Tensor | None, x: Batch, y: Batch
    ) -> list[tuple[slice, Contribution]]:
        """Contributions of all parameters to the combination of g_i(θ) and g_i(θ′)."""
        with replayed_randomness(theta.device) as rewind:
            if previous is not None:
                self._run(previous, x, y, self._remember)
                rewind()
            self._run(theta, x, y, self._receive)
        if self.before:
            unit, _ = next(iter(self.before))
            raise RuntimeError(
                f"layer {unit.name!r} was used at one of the two points only: the module's path depends on its "
                "parameters. Use PerExampleEngine(..., strategy='functional')."
            )
        return self.pieces

    def _run(
        self, point: Tensor, x: Batch, y: Batch, receive: Callable[[Call, Mapping[str, Tensor]], None]
    ) -> None:
        params = self.engine.unflatten(point.detach())
        backpropagate(
            self.engine.module, self.engine.loss_fn, params, x, y, self.units,
            lambda call: receive(call, params), self._count,
        )  # fmt: skip

    def _count(self, numbers: Mapping[Unit, int]) -> None:
        self.uses = {}
        for unit, number in numbers.items():
            for slot in unit.slots.values():
                self.uses[slot.start] = self.uses.get(slot.start, 0) + number

    def _remember(self, call: Call, params: Mapping[str, Tensor]) -> None:
        self.before[call.unit, call.number] = self._content(call, params)

    def _receive(self, call: Call, params: Mapping[str, Tensor]) -> None:
        before = self.before.pop((call.unit, call.number)) if self.mix.change else None
        now = self._content(call, params)
        if isinstance(now, Record):
            assert call.unit.kernel is not None
            assert before is None or isinstance(before, Record)
            kernel, wanted = call.unit.kernel, call.unit.slots
            for name, piece in kernel.contributions(now, before, self.mix, self.budget, wanted):
                self._put(call.unit.slots[name], piece)
            return
        for name, value in now.items():
            change = None
            if before is not None:
                assert isinstance(before, dict)
                change = torch.sub(value, before[name], alpha=self.mix.scale)
            values = self.mix.stack(value, change, 1).unflatten(1, (self.mix.families, -1))
            self._put(call.unit.slots[name], Stored(values))

    def _content(self, call: Call, params: Mapping[str, Tensor]) -> Record | dict[str, Tensor]:
        """What the unit's gradient is made of: input and output gradient, or the fallback's gradients."""
        dtype = self.engine.dtype
        if call.unit.kernel is None:
            own = {name: self._own(params, slot) for name, slot in call.unit.slots.items()}
            return {k: v.to(dtype).flatten(1) for k, v in module_gradients(call, own).items()}
        (grad,) = call.output_grads
        assert grad is not None
        given = call.args[0] if call.args else next(iter(call.kwargs.values()))
        given, axis = given.detach(), call.unit.input_dims[0]
        if axis:
            given, grad = given.movedim(axis, 0), grad.movedim(axis, 0)
        return Record(given.to(dtype) if given.is_floating_point() else given, grad.to(dtype))

    def _own(self, params: Mapping[str, Tensor], slot: slice) -> Tensor:
        return next(params[name] for name, where in self.engine._slices.items() if where == slot)

    def _put(self, slot: slice, piece: Contribution) -> None:
        if self.uses[slot.start] == 1:
            self.pieces.append((slot, piece))
            return
        # A parameter that is used several times: its vectors add up before they have a norm.
        whole = _written_out(piece)
        if slot.start in self.joint:
            joint = self.joint[slot.start]
            joint.values = joint.values + whole.values  # not in place: the values may be views of the tape
        else:
            self.joint[slot.start] = whole
            self.pieces.append((slot, whole))


def _written_out(piece: Contribution) -> Stored:
    if isinstance(piece, OuterProducts):
        return piece.stored()
    if isinstance(piece, TokenSums):
        return piece.dense()
    assert isinstance(piece, Stored)
    return piece
