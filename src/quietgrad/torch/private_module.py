"""The model of a private loop: in training mode its outputs are leaves and its parameters out of reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quietgrad.errors import BudgetError
from quietgrad.objectives.networks.tape import mapped, tensors_of, with_parameters
from quietgrad.torch.call_layout import CallLayout
from quietgrad.torch.provenance import Provenance
from quietgrad.torch.rows import Rows, owners_of, plain

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = ["PrivateModule"]


_CALLBACK: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: None)


class PrivateModule(nn.Module):
    """The user's module; in training mode its outputs are leaves and its parameters out of reach."""

    def __init__(self, module: nn.Module, loop: PrivateLoop, provenance: Provenance) -> None:
        super().__init__()
        self._module = module
        self._loop = loop
        self._provenance = provenance

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output; recorded for the next step when training."""
        if not (self.training and torch.is_grad_enabled()):
            return self._evaluate(args, kwargs)
        # The second question is asked here and not in a function of its own: a compiler that cannot take this one
        # runs it as it is, and compiles what it calls.
        if torch.compiler.is_compiling() or callable(_CALLBACK()):
            raise ValueError(
                "torch.compile: a compiled model would follow no rows and fuse the layers whose inputs and "
                "gradients are needed. Train with the private model as it is."
            )
        tensors = tuple(tensors_of((args, kwargs)))
        if not tensors or not all(_known(value) for value in (*args, *kwargs.values())):
            raise TypeError(
                "a private model takes tensors, examples first, alone or in tuples, lists and dictionaries, beside "
                "None, flags, numbers and texts: a list of numbers or texts, or an object of another kind, may "
                "hold records that nobody follows."
            )
        owners = owners_of(tensors)
        if isinstance(owners, str):
            raise BudgetError(
                f"the private model was given {owners}: each row must be one record of the loader's batch, whole "
                "or in pieces. Augment records in the data set or in the model, where their random numbers are "
                "their own; make a hidden state inside the module, or pass None; wrap evaluations in model.eval() "
                "or torch.no_grad()."
            )
        return self._loop.forward(plain(tensors), owners, CallLayout(args, kwargs))

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (torch.is_grad_enabled() and any(isinstance(t, Rows) for t in tensors_of((args, kwargs)))):
            return self._module(*plain(args), **plain(kwargs))
        # Another optimizer may hold the parameters: on private records they are constants.
        constants = {name: param.detach() for name, param in self._module.named_parameters()}
        with with_parameters(self._module, constants):
            return mapped(self._module(*plain(args), **plain(kwargs)), _not_trained_on)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state, under its own names, and in its metadata what it cost."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own state; one of a private loop brings what it cost, and any other is refused."""
        if kwargs.get("assign") or (len(args) > 2 and args[2]):
            raise ValueError(
                "load_state_dict(assign=True) puts new parameters into the module, which neither the optimizer nor "
                "the private loop would know: nothing would train. Load without assign."
            )
        state: Any = args[0] if args else kwargs.get("state_dict")
        told = (getattr(state, "_metadata", None) or {}).get("", {})
        self._provenance.admit(self._module, state or {}, "", told)  # a module may load in a way of its own
        loaded = self._module.load_state_dict(*args, **kwargs)
        if self._loop.shards is not None:
            self._loop.shards.scatter()
        return loaded

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients and recorded outputs."""
        self._loop.clear()
        self._module.zero_grad(set_to_none)


def _known(value: Any) -> bool:
    """Whether all there is in a call can be seen: a list of numbers or texts may have one for each record."""
    if type(value) in (tuple, list):
        nested = (item for item in value if item is not None)
        return all(isinstance(item, Tensor | tuple | list | dict) and _known(item) for item in nested)
    if type(value) is dict:
        return all(_known(item) for item in value.values())
    return value is None or isinstance(value, Tensor | bool | int | float | str | torch.dtype | torch.device)


def _not_trained_on(value: Tensor) -> Tensor:
    """An output from which no gradient goes back to a parameter; it may to an input, of which it is made."""
    if not value.is_floating_point() or value.requires_grad:
        return value
    leaf = value.detach().requires_grad_()
    leaf.register_hook(_refuse_backward)  # type: ignore[no-untyped-call]
    return leaf.view_as(leaf)


def _refuse_backward(_: Tensor) -> None:
    raise BudgetError(
        "backward() from an output of the private model in evaluation mode, on records of the private loader: such "
        "gradients would have no noise. Call model.train() before a step; wrap evaluations in torch.no_grad()."
    )
