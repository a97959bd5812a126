"""The optimizer of a private loop: the user's own object, whose steps use released gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer, SparseAdam

from quietgrad.errors import BudgetError

if TYPE_CHECKING:
    from quietgrad.torch.recorded_loop import RecordedLoop

__all__ = ["PrivateOptimizer", "check_optimizer", "made_private"]


class PrivateOptimizer(Optimizer):
    """What a private loop adds to an optimizer: it stays of its own class, and schedulers work on it."""

    _loop: RecordedLoop
    _step_hooks: list[Callable[[Any], None]]
    _opt_called: bool

    def step(self, closure: Any = None, **options: Any) -> Any:
        """Release the noisy clipped sum of the sample, make it the gradient, and step."""
        if closure is not None or options:
            raise TypeError(
                "optimizer.step(closure): a step may use its sample once; call step() without a closure."
            )
        loop, self._opt_called = self._loop, True
        check_optimizer(self, loop.stepped().values())  # parameters may have joined since
        if not loop.write_gradients():  # a piece of the sample: the step comes with the last one
            return None
        for hook in self._step_hooks:
            hook(self)
        result = super().step()
        loop.has_stepped()
        return result

    # Learning-rate schedulers wrap a step to see that it was called, and warn of one that they did not wrap; one
    # wrapped before the loop was made private would be the public step.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and what came back to the records in hand; a sample's earlier pieces are kept."""
        self._loop.clear()
        super().zero_grad(set_to_none)

    def virtual_step(self) -> None:
        """Release the sample's gradient now; the next sample's is added to it."""
        self._loop.write_gradients()

    def attach_step_hook(self, hook: Callable[[Any], None]) -> None:
        """Call ``hook(optimizer)`` when the gradients are released, before each step."""
        self._step_hooks.append(hook)

    @property
    def original_optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self

    @property
    def noise_multiplier(self) -> float:
        """That of the next step."""
        return self._loop.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> NoReturn:
        raise BudgetError(
            "optimizer.noise_multiplier: the noise of a loop is declared beforehand, because noise that is chosen "
            "on the way may follow what was seen, and no ε could be stated. Give make_private epochs and "
            "noise_schedule=lambda epoch: …; it is accounted for."
        )

    @property
    def max_grad_norm(self) -> Any:
        """C of the next step; a list if every parameter has its own."""
        clip = self._loop.rule.clip
        return list(clip) if isinstance(clip, tuple) else clip

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> NoReturn:
        raise BudgetError(
            "optimizer.max_grad_norm: a bound that is set on the way may follow what was seen without noise. Give "
            "make_private clipping='adaptive': its bound follows the gradients, and that is accounted for."
        )

    @property
    def expected_batch_size(self) -> float:
        """The public size of a sample, which sums are divided by."""
        return self._loop.expected_batch

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a private optimizer cannot be copied or pickled: two would share one loop. Save its state_dict()."
        )


def made_private(optimizer: Optimizer, loop: RecordedLoop) -> Optimizer:
    """The optimizer, the same object, from now on of ``loop``."""
    known = type(optimizer)
    if not isinstance(optimizer, PrivateOptimizer):
        for name in ("step", "zero_grad"):  # a scheduler's or a profiler's wrapper around the public step
            optimizer.__dict__.pop(name, None)
        private: Any = type(f"Private{known.__name__}", (PrivateOptimizer, known), {})
        optimizer.__class__ = private
    assert isinstance(optimizer, PrivateOptimizer)
    optimizer._loop, optimizer._step_hooks = loop, []
    return optimizer


def check_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Raise ValueError unless all that ``optimizer`` steps are among the parameters of the private module."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: must be a torch optimizer of the module's parameters, not {type(optimizer).__name__}, "
            "e.g. torch.optim.SGD(model.parameters(), lr=0.1)."
        )
    if isinstance(optimizer, SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients only, and a noisy one is dense: use Adam instead.")
    own = {id(param) for param in params}
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", range(len(group["params"])))
        for name, param in zip(names, group["params"], strict=True):
            if id(param) not in own:
                raise ValueError(
                    f"the optimizer holds parameters of another module: {name!r} of its group {number}, of shape "
                    f"{tuple(param.shape)}. Their gradients would not be private, and nothing was stepped. Make "
                    "one module of all that is trained and give it to make_private."
                )
