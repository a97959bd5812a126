"""A training loop of the user's own, made private: the model, the loader and the optimizer share one session.

The loader hands out Poisson samples. The model runs without a graph in training mode and returns leaves, so that
``loss.backward()`` stops at its outputs: no gradient of the data ever reaches a parameter. Before
``optimizer.step()`` the engine turns the outputs' gradients b into clipped sums: the gradient of fᵢ with respect
to θ is that of ⟨b_i, output_i(θ)⟩. The session adds noise, counts, and refuses what the plan does not hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quietgrad.curators.central import CentralCurator
from quietgrad.errors import BudgetError, ExhaustedError
from quietgrad.objectives.base import Batch, NoRegularizer
from quietgrad.objectives.networks.engine import PerExampleEngine
from quietgrad.objectives.networks.module import private_log
from quietgrad.objectives.networks.tape import batch_length, tensors_of
from quietgrad.plans.schedule import Plan, Schedule, Slot
from quietgrad.privacy.rng import SecureStream
from quietgrad.sampling import Poisson
from quietgrad.torch.private_module import mapped

__all__ = ["OutputGradients", "OwnLoop", "PrivateLoop", "pairing"]


@dataclass(frozen=True)
class OwnLoop:
    """The releases of a loop: for each stretch of equal settings its batches, expected batch size and noise.

    A "method" for :func:`quietgrad.plan`, whose update the user writes.

    >>> OwnLoop(((300, 64, 1.0), (100, 64, 0.5)), clip=1.0).schedule(1000).releases
    400
    """

    stretches: tuple[tuple[int, int, float], ...]
    clip: float

    name: ClassVar[str] = "own-loop"
    private: ClassVar[bool] = True

    def schedule(self, n_public: int) -> Schedule:
        """One slot per stretch."""
        return Schedule(
            tuple(
                Slot(f"stretch-{k}", Poisson(batch_size / n_public), count, noise)
                for k, (count, batch_size, noise) in enumerate(self.stretches)
            )
        )

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return {"stretches": [list(stretch) for stretch in self.stretches], "clip": self.clip}


class PrivateLoop:
    """What model, loader and optimizer of one loop share: the open session and the outputs since the last step."""

    def __init__(
        self,
        plan: Plan,
        curator: CentralCurator,
        key: bytes,
        engine: PerExampleEngine,
        clip: float,
        mean_reduced: bool,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.clip = clip
        self.mean_reduced = mean_reduced
        self.drawn = 0  # samples handed out
        self.stepped = 0  # of these, how many a step has used or skipped
        self._records = curator.records
        self._session = curator.open(plan)
        self._samplers = [
            slot.sampling.sampler(len(self._records), SecureStream(key, f"sample/{slot.name}"))
            for slot in plan.schedule.slots
        ]
        self._pieces: list[_Piece] = []
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def epsilon(self, delta: float | None = None) -> float:
        """ε of the samples used so far, at ``delta`` (default: the plan's)."""
        from quietgrad.privacy.accounting import account

        assert self.plan.budget is not None
        used = self._session.used
        if not any(used.values()):
            return 0.0
        budget = self.plan.budget
        event = self.plan.event_of(used)
        return account(event, delta=budget.delta if delta is None else delta, relation=budget.relation)

    @property
    def total(self) -> int:
        """Samples the plan allows."""
        return self.plan.schedule.releases

    def indices(self, number: int) -> list[int]:
        """Records of sample ``number``: what the session will draw for it, from the same stream."""
        slot, within = self._place(number)
        chosen = self._samplers[slot].batch(within)
        return list(range(len(self._records))) if chosen is None else chosen.tolist()

    def handed_out(self, count: int) -> None:
        """The loader gave a sample of ``count`` records to the loop."""
        self.drawn += 1
        self._count = count
        # A forward pass nobody differentiated was an evaluation.
        self._pieces = [piece for piece in self._pieces if piece.has_gradient]

    def clear(self) -> None:
        """Forget the outputs: ``zero_grad()``."""
        self._pieces = []

    def record(self, args: tuple[Any, ...], output: Any, rng: Tensor) -> Any:
        """Remember a forward pass; returns its output with leaves in place of tensors."""
        length = batch_length(args)
        leaves: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            if not value.is_floating_point():
                return value
            if value.dim() < 1 or len(value) != length:
                raise ValueError(
                    f"the model returned shape {tuple(value.shape)} for {length} examples: they must come first."
                )
            leaves.append(value.detach().requires_grad_())
            return leaves[-1]

        wrapped = mapped(output, leaf)
        self._pieces.append(_Piece(args, leaves, length, rng, self.drawn - 1))
        return wrapped

    def write_gradients(self) -> None:
        """Release the noisy clipped sum of the current sample and make it the parameters' gradients."""
        pieces = [piece for piece in self._pieces if piece.has_gradient]
        self._check(pieces)
        number = self.drawn - 1
        slot, within = self._place(number)
        slots = self.plan.schedule.slots
        # Samples that no step was taken on count as used: whether to skip may have depended on them.
        self._session.advance({**{s.name: s.count for s in slots[:slot]}, slots[slot].name: within}, None)
        theta = self.engine.flatten(self._params())
        total = self._session.release(slots[slot].name, _FromOutputs(self, theta, pieces))
        self.stepped = self.drawn
        self._pieces = []
        if self.stepped == self.total:
            self._session.close("steps")
        if self.mean_reduced:
            # By the public expected size: the size of the sample itself is private.
            total = total / self._session.expected_batch(slots[slot].name)
        params = self._params()
        for name, value in self.engine.unflatten(total).items():
            gradient = value.clone()
            params[name].grad = gradient
            self._released[params[name]] = (gradient, gradient._version)

    def close(self) -> None:
        """End the loop. What it did not use stays spent: when it stopped may have depended on the data."""
        self._session.close("closed by the loop", data_dependent=True)

    def _params(self) -> dict[str, nn.Parameter]:
        return dict(self.engine.module.named_parameters())

    def _place(self, number: int) -> tuple[int, int]:
        for position, slot in enumerate(self.plan.schedule.slots):
            if number < slot.count:
                return position, number
            number -= slot.count
        raise ExhaustedError(self.refusal())

    def refusal(self) -> str:
        """Why there is no further sample."""
        return (
            f"the {self.total} steps that were planned are made, and ε = {self.epsilon():.4g} is spent. Stop here, "
            "or plan a longer loop from the start."
        )

    def _check(self, pieces: list[_Piece]) -> None:
        if not pieces:
            raise RuntimeError(
                "optimizer.step(): no loss.backward() has reached an output of the private model since the last "
                "step. Call the model that make_private returned, in training mode, on a batch of its loader."
            )
        if self.drawn == self.stepped or any(piece.draw != self.drawn - 1 for piece in pieces):
            raise BudgetError(
                "optimizer.step(): each step must use one fresh sample of the private loader, and only that. A "
                "second step on a sample, or a step on two samples, is not what was accounted for; for larger "
                "batches raise the loader's batch_size and set micro_batch."
            )
        if sum(piece.length for piece in pieces) > self._count:
            raise BudgetError(
                "optimizer.step(): more examples went through the model than the sample holds, so some contribute "
                "twice. Call the model once per example and step."
            )
        for name, param in self._params().items():
            if param.requires_grad and param.grad is not None:
                known = self._released.get(param)
                if known is None or known[0] is not param.grad or known[1] != param.grad._version:
                    raise BudgetError(
                        f"parameter {name!r} has a gradient that did not pass through the private model: of a "
                        "penalty in the loss (use the optimizer's weight_decay), or of unprotected data."
                    )


@dataclass(eq=False)
class _Piece:
    """One forward pass: inputs, output leaves, and the generator's state its dropout masks came from."""

    args: tuple[Any, ...]
    leaves: list[Tensor]
    length: int
    rng: Tensor
    draw: int

    @property
    def has_gradient(self) -> bool:
        return any(leaf.grad is not None for leaf in self.leaves)


class _FromOutputs:
    """Σ clip_C(∇fᵢ(θ)) from the gradients that arrived at the outputs."""

    def __init__(self, loop: PrivateLoop, theta: Tensor, pieces: list[_Piece]) -> None:
        self.loop = loop
        self.theta = theta
        self.pieces = pieces

    @property
    def bound(self) -> float:
        return self.loop.clip

    def dim(self, records: Any) -> int:
        return self.loop.engine.dim

    def sum_into(self, objective: Any, batch: Batch, out: Tensor) -> None:
        loop, now = self.loop, torch.get_rng_state()
        for piece in self.pieces:
            # A mean over the piece's examples is undone by its own length, whatever that is.
            scale = float(piece.length) if loop.mean_reduced else 1.0
            grads = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad * scale for leaf in piece.leaves
            )
            torch.set_rng_state(piece.rng)
            norms = loop.engine.add_clipped_gradients(self.theta, piece.args, grads, loop.clip, out)
            if not norms.isfinite().all():
                private_log.info("contributions of a release were not finite and counted as zero")
        torch.set_rng_state(now)


def pairing(output: Any, grads: tuple[Tensor, ...]) -> Tensor:
    """⟨b_i, output_i⟩ for each example: its gradient in θ is that of the loss whose output gradients are b."""
    outputs = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
    products = [(o * g).reshape(len(o), -1).sum(1) for o, g in zip(outputs, grads, strict=True)]
    return torch.stack(products).sum(0)


class OutputGradients:
    """The objective of a loop: its records are counted here and read by the loader."""

    def __init__(self, engine: PerExampleEngine) -> None:
        self.engine = engine
        self.regularizer = NoRegularizer()

    def prepare(self, data: Any) -> Any:
        """The data set itself; the loader has been checked."""
        return data

    def initial(self, records: Any) -> Tensor:
        """The module's parameters."""
        return self.engine.flatten(dict(self.engine.module.named_parameters()))
