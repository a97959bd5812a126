"""The model of a private loop: the user's module, run record by record while the loop trains on a sample."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quietgrad.errors import BudgetError
from quietgrad.objectives.networks.trees import mapped, with_parameters
from quietgrad.torch.private_batch import plain

if TYPE_CHECKING:
    from quietgrad.torch.recorded_loop import RecordedLoop

__all__ = ["PrivateModule"]

_CALLBACK: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)
_OWN = ("_module", "_loop")


class PrivateModule(nn.Module):
    """The user's module under another class: the same layers, parameters, buffers, names and attributes.

    In training mode, with a sample of the private loader in hand, a call is recorded for the step. In any other
    call the parameters are constants: gradients go to the inputs, and none without noise to a parameter. A
    copy, a pickle and a state are the plain module's.
    """

    _module: nn.Module
    _loop: RecordedLoop

    def __init__(self, module: nn.Module, loop: RecordedLoop) -> None:
        super().__init__()
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_loop", loop)
        for store in ("_modules", "_parameters", "_buffers", "training", "_non_persistent_buffers_set"):
            self.__dict__[store] = module.__dict__[store]

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; recorded for the next step when training."""
        # Asked here and not in a function of its own: a compiler that cannot take this one runs it as it is.
        if torch.compiler.is_compiling() or callable(_CALLBACK()):
            raise ValueError(
                "torch.compile: a compiled model would fuse the operations at which records' gradients are taken. "
                "Train with the private model as it is."
            )
        if not torch.is_grad_enabled():
            return self._module(*plain(args), **plain(kwargs))
        if self.training and self._loop.sample is not None:
            return self._loop.call(args, kwargs)
        constants = {name: param.detach() for name, param in self._module.named_parameters()}
        with with_parameters(self._module, constants):
            return mapped(self._module(*plain(args), **plain(kwargs)), _not_trained_on)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _OWN:
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        setattr(self._module, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module, whatever made it: what it cost is in the account of who was trained on."""
        if kwargs.get("assign") or (len(args) > 2 and args[2]):
            raise ValueError(
                "load_state_dict(assign=True) puts new parameters into the module, which neither the optimizer nor "
                "the private loop would know: nothing would train. Load without assign."
            )
        loaded = self._module.load_state_dict(*args, **kwargs)
        if self._loop.shards is not None:
            self._loop.shards.scatter()
        return loaded

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, and what came back to the records in hand."""
        self._loop.clear()
        self._module.zero_grad(set_to_none)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self._module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._module.__reduce_ex__(protocol)


def _not_trained_on(value: Tensor) -> Tensor:
    """An output from which no gradient goes back to a parameter; it may to an input, of which it is made."""
    if not value.is_floating_point() or value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()
    leaf.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]
    return leaf.view_as(leaf)


def _refuse_backward(_: Tensor) -> None:
    raise BudgetError(
        "backward() from an output of the private model that no step can use: it was called in evaluation mode, or "
        "without a fresh batch of the private loader. Each step needs one fresh batch; call model.train() before "
        "it, and wrap evaluations in torch.no_grad()."
    )
