"""Gradients that are asked for before ``optimizer.step()``: reading one releases it.

After ``backward()`` a parameter has no gradient yet: what came back is single records'. A :class:`PendingGradient`
stands in its place. Whatever reads it (``clip_grad_norm_``, a log of norms, ``GradScaler``) makes the loop release
the noisy sum of the sample, once, and gets that. The step that follows uses the same numbers.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from quietgrad.core.errors import BudgetError
from quietgrad.torch.loops.distributed import is_distributed
from quietgrad.torch.networks.trees import Args, Called, Options, mapped, tensors_of

if TYPE_CHECKING:
    from quietgrad.torch.loops.handle_loop import HandleLoop

_UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_  # of GradScaler.unscale_


class PendingGradient(Tensor):
    """Stands for the gradient of a parameter that the loop has not released yet."""

    _loop: HandleLoop
    _param: nn.Parameter
    _earlier: Tensor | None  # what was there before

    @classmethod
    def of(cls, loop: HandleLoop, param: nn.Parameter) -> Self:
        """In the place of the gradient of ``param``, which it remembers."""
        new: Self = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        new._loop, new._param, new._earlier = loop, param, param.grad
        return new

    def released(self) -> Tensor:
        """The parameter's gradient, after its release."""
        loop = self._loop
        if isinstance(self._param.grad, PendingGradient):
            if loop.partial and _by_clipping():  # it asks again after the last piece of the sample
                return torch.zeros_like(self._param.detach())
            if loop.partial or (is_distributed() and not _by_clipping()):
                where = "on several processes" if is_distributed() else "before the last piece of a sample"
                raise BudgetError(
                    f"a gradient was read before optimizer.step(), and {where} there is none yet: it is released "
                    "by step(), for all parameters at once. Read it afterwards, before zero_grad(). Before step() "
                    "clip_grad_norm_, clip_grad_value_ and GradScaler may be called, on every process."
                )
            self._release()
        gradient = self._param.grad
        assert gradient is not None
        return gradient

    def unscaled(self, scale: float) -> None:
        """Have ``scale``, which the loss was multiplied by, undone before clipping, and release the gradient."""
        if not isinstance(self._param.grad, PendingGradient):
            return
        self._loop.scale = scale
        if not self._loop.partial:
            self._release()

    def _release(self) -> None:
        self._loop.write_gradients()
        self._loop.watch_for_others()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"PendingGradient(shape={tuple(self._param.shape)}): released by optimizer.step(), or when it is read"
        )

    @classmethod
    def __torch_function__(cls, func: Called, types: object, args: Args = (), kwargs: Options = None) -> Any:
        kwargs = kwargs or {}
        if func in _FORM and isinstance(args[0], PendingGradient):
            return func(args[0]._param.detach(), *args[1:], **kwargs)
        if func is _UNSCALE:
            # The scale of the loss is undone before clipping: a scaled gradient would be clipped to nothing.
            grads = [each for each in tensors_of(args) if isinstance(each, PendingGradient)]
            for grad in grads:
                grad.unscaled(float(args[2]))
            return None

        def plain(tensor: Tensor) -> Tensor:
            return tensor.released() if isinstance(tensor, PendingGradient) else tensor

        return func(*mapped(args, plain), **mapped(kwargs, plain))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Called, types: object, args: Args = (), kwargs: Options = None
    ) -> Any:
        # Autograd adds the gradient of something else, such as a penalty: it is added to what was there before.
        if func in _ADDED and isinstance(args[0], PendingGradient):
            held = args[0]
            sum_of = args[1] if held._earlier is None else held._earlier + args[1]
            new = held if func is torch.ops.aten.add_.Tensor else PendingGradient.of(held._loop, held._param)
            new._earlier = sum_of
            return new
        return cls.__torch_function__(func, types, args, kwargs)


def _by_clipping() -> bool:
    """Whether torch's functions that clip gradients ask, which a training calls on all its processes alike.

    A log of norms may be written by one process alone: a release there would wait for the others.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _CLIPPING:
        frame = frame.f_back
    return frame is not None


_CLIPPING = {
    inspect.unwrap(function).__code__
    for function in (
        nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_, nn.utils.clip_grads_with_norm_,
    )
}  # fmt: skip
_own: Any = Tensor
_FORM = {
    _own.dtype.__get__, _own.device.__get__, _own.layout.__get__, _own.shape.__get__, _own.ndim.__get__,
    _own.is_cuda.__get__, _own.is_sparse.__get__, _own.is_leaf.__get__, _own.requires_grad.__get__, Tensor.size,
    Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.stride,
}  # fmt: skip


_ADDED = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor}


def announce(loop: HandleLoop) -> None:
    """Put a pending gradient in the place of each trained parameter's."""
    for param in loop.parameters().values():
        if param.requires_grad and not isinstance(param.grad, PendingGradient):
            param.grad = PendingGradient.of(loop, param)


def withdraw(loop: HandleLoop) -> None:
    """Put back what was there before."""
    for param in loop.parameters().values():
        if isinstance(param.grad, PendingGradient):
            param.grad = param.grad._earlier
