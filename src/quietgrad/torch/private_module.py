"""The model of a private loop: in training mode its outputs are leaves and its parameters out of reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quietgrad.objectives.networks.tape import batch_length, select, tensors_of

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = ["PrivateModule", "mapped"]


class PrivateModule(nn.Module):
    """The user's module; in training mode its outputs are leaves and its parameters out of reach."""

    def __init__(self, module: nn.Module, loop: PrivateLoop) -> None:
        super().__init__()
        self._module = module
        self._loop = loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; recorded for the next step when training."""
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        if kwargs or not args or not all(isinstance(arg, Tensor) for arg in args):
            raise TypeError(
                "a private model takes positional tensors only: model(x) or model(x1, x2), examples first."
            )
        rng = torch.get_rng_state()
        size = self._loop.engine.micro_batch or max(1, batch_length(args))
        with torch.no_grad():
            parts = [
                self._module(*select(args, slice(start, start + size)))
                for start in range(0, max(1, batch_length(args)), size)
            ]
        return self._loop.record(args, parts[0] if len(parts) == 1 else _joined(parts), rng)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, under its own names."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state."""
        return self._module.load_state_dict(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients and recorded outputs."""
        self._loop.clear()
        self._module.zero_grad(set_to_none)


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _joined(parts: list[Any]) -> Any:
    """One output of the outputs of consecutive parts."""
    tensors = iter([torch.cat(pieces) for pieces in zip(*(tensors_of(part) for part in parts), strict=True)])
    return mapped(parts[0], lambda _: next(tensors))
