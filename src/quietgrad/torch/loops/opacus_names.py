"""Opacus' names on the private model and optimizer: what they are here, or a sentence that says what to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from quietgrad.torch.loops.handle_loop import HandleLoop

_NO_SAMPLES = (
    "{}: gradients of single records are never kept. qt.clipped_gradient_sum gives clipped sums and norms, without "
    "noise."
)


_FIXED = (
    "{0}: was planned, and paid for, before the first step, and cannot be set. For one that changes by epoch give "
    "make_private {1}."
)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, param) for name, param in module.named_parameters() if param.requires_grad)


def _nothing(*_: object, **__: object) -> None:
    """There are no hooks and no gradients of single records on the module, so there is nothing to do."""


def of_model(module: nn.Module, name: str) -> Any:
    """What Opacus' ``name`` is on a private model; ``AttributeError`` for all others.

    >>> of_model(nn.Linear(1, 1), "to_standard_module")()
    Linear(in_features=1, out_features=1, bias=True)
    """
    if name == "to_standard_module":
        return lambda: module
    if name == "trainable_parameters":
        return lambda: (param for _, param in _trained(module))
    if name == "trainable_named_parameters":
        return lambda: _trained(module)
    if name in _NOTHING_TO_DO:
        return _nothing
    if name in ("grad_sample", "get_grad_sample", *_OF_SAMPLES):
        raise ValueError(_NO_SAMPLES.format(name))
    if name in _OF_HOOKS:
        raise ValueError(f"{name}: {_OF_HOOKS[name]}.")
    raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")


_NOTHING_TO_DO = frozenset({
    "add_hooks", "remove_hooks", "disable_hooks", "enable_hooks", "cleanup", "del_grad_sample",
    "set_grad_sample_to_none", "allow_grad_accumulation", "forbid_grad_accumulation",
})  # fmt: skip


_OF_SAMPLES = ("get_norm_sample", "per_sample_gradient_norms", "get_clipping_coef", "rearrange_grad_samples")
_OF_HOOKS = {
    "iterate_submodules": "it is plain torch: model.named_modules()",
    "is_supported": "gradients of any layer are computed as they are; ModuleValidator.validate(model) says which "
    "layers mix records",
    "GRAD_SAMPLERS": "gradients of any layer are computed as they are, so there is no list of layers",
    "NORM_SAMPLERS": "norms of any layer are computed as they are, so there is no list of layers",
    "capture_activations_hook": "the model has no hooks; what records hold is not handed out",
    "capture_backprops_hook": "the model has no hooks; what records hold is not handed out",
    "log_module_gradient_sample_mode": "qt.explain(model, batch, loss) says how each parameter is made",
}


class OpacusOptimizer(Optimizer):
    """Opacus' attributes of a private optimizer."""

    _loop: HandleLoop

    @property
    def noise_multiplier(self) -> float:
        """Noise ÷ C of the step in hand. It cannot be set: noise chosen on the way may follow what was seen."""
        return self._loop.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: object) -> None:
        raise AttributeError(_FIXED.format("noise_multiplier", "noise_schedule=qt.ExponentialNoise(gamma=…)"))

    @property
    def max_grad_norm(self) -> float:
        """C of the step in hand, which cannot be set either."""
        return self._loop.clip

    @max_grad_norm.setter
    def max_grad_norm(self, value: object) -> None:
        raise AttributeError(_FIXED.format("max_grad_norm", "clip_schedule=qt.ExponentialGradClip(gamma=…)"))

    @property
    def expected_batch_size(self) -> float:
        """The public size of a sample, which sums are divided by."""
        return self._loop.expected_batch

    @property
    def original_optimizer(self) -> Optimizer:
        """Opacus' name for the optimizer that was given: it is this one."""
        return self

    @property
    def loss_reduction(self) -> str:
        """``"mean"`` or ``"sum"``: whether released sums are divided by the public size of a sample."""
        return "mean" if self._loop.mean else "sum"

    @property
    def accumulated_iterations(self) -> int:
        """A step releases one sample, whatever pieces it is cut into."""
        return 1

    @property
    def params(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [param for group in self.param_groups for param in group["params"] if param.requires_grad]

    @property
    def secure_mode(self) -> bool:
        """Noise is always cryptographic."""
        return True

    def attach_step_hook(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "attach_step_hook: cost is counted by the loop itself. For anything else use "
            "optimizer.register_step_post_hook(fn), which torch has for every optimizer."
        )

    def signal_skip_step(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "signal_skip_step: use BatchMemoryManager, which cuts a sample into pieces and steps once."
        )

    def clip_and_accumulate(self, *_: object, **__: object) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError("clip_and_accumulate: call optimizer.step(), which clips, adds noise and steps.")

    add_noise = scale_grad = pre_step = clip_and_accumulate

    @property
    def grad_samples(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(_NO_SAMPLES.format("grad_samples"))

    @property
    def summed_grad(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            "summed_grad: a sum without noise is not handed out. param.grad is what was released, after step()."
        )
