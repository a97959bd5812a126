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

from quietgrad.objectives.networks.anatomy import plan_units, refuse_mixing_layers, refuse_mixing_losses
from quietgrad.objectives.networks.collector import Collector, Network, Piece
from quietgrad.objectives.networks.contributions import Combination, Workspace
from quietgrad.objectives.networks.fallback import model_gradients
from quietgrad.objectives.networks.tape import (
    Batch,
    LossFunction,
    Unit,
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
        memory_budget: float = 512e6,
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
            pieces = Collector(self._network, units, mix, self._space).collect(theta, previous, x, y)
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
    ) -> list[Piece]:
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
        return [(slice(0, self.dim), mix.stored(now, change))]

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
                Collector(self._network, units, mix, self._space).collect(theta, None, x, y)
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
