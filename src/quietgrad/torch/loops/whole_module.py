"""A module that is whole for a pass, also one whose parameters are in shards (FSDP2's ``fully_shard``).

A record's gradient needs every parameter whole. All processes gather them before a pass and never within one: how
many passes a process makes depends on its share of a secret sample. For the pass the module is what it was before
``fully_shard``, with its own classes and without FSDP's hooks. What is released is cut into shards again, and each
process's optimizer steps its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quietgrad.core.errors import BudgetError
from quietgrad.torch.networks.trees import ModuleState

_STATE = "__composable_api_state_key"  # attributes in which FSDP keeps its own things


class WholeModule:
    """A module, its parameters as the optimizer holds them, and how to make it whole."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"the model must be a torch module (nn.Module), not {type(module).__name__}.")
        self.module = module
        self._layers: list[Any] = [layer for layer in module.modules() if _is_fsdp(layer)]
        self.given: type[nn.Module] | None = None  # the class of a module that was made private itself
        self.is_whole = False
        self._reshard()
        self._held = dict(module.named_parameters())
        self._shards: dict[str, Any] = {name: param for name, param in self._held.items() if is_shard(param)}
        self._places = ModuleState(module)
        self._refuse_other_shards()

    def refuse_later_shards(self) -> None:
        """Raise BudgetError if the module was sharded after the loop was made, which took its parameters whole."""
        if not self.in_shards and any(is_shard(param) for param in self.module.parameters()):
            raise BudgetError(
                "the module was sharded (fully_shard) after the private loop was made, whose optimizer and engine "
                "know its whole parameters. Shard first, then make the optimizer of the sharded parameters, then "
                "call make_private or qt.PrivateLoop. Nothing was released."
            )

    @property
    def in_shards(self) -> bool:
        return bool(self._shards)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that an optimizer steps: of a module in shards the shards."""
        return self._held if self.in_shards else dict(self.module.named_parameters())

    @torch.no_grad()
    def gather(self) -> dict[str, Tensor]:
        """The values of parameters in shards, whole; all processes call it."""
        return {
            name: nn.Parameter(shard.detach().full_tensor(), requires_grad=shard.requires_grad)
            for name, shard in self._shards.items()
        }

    @contextmanager
    def whole(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """The module with whole parameters: ``values``, which were gathered, or all processes gather them here."""
        if self.is_whole or not self.in_shards:
            with self.as_given():
                yield
            return
        values = self.gather() if values is None else values
        with self.as_given(), ExitStack() as stack:
            self._reshard()
            for layer in self._layers:
                stack.enter_context(_plain(layer))
            stack.enter_context(self._places.holding(values))
            self.is_whole = True
            try:
                yield
            finally:
                self.is_whole = False

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """The module as the user gave it, if it was made private itself."""
        private = type(self.module)
        if self.given is None or private is self.given:
            yield
            return
        self.module.__class__ = self.given
        try:
            yield
        finally:
            self.module.__class__ = private

    def place(self, name: str, value: Tensor) -> Tensor:
        """A whole value as this process holds it of the parameter: the value itself, or its shard."""
        return _like(value, self._held[name]) if name in self._shards else value

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Give parameters whole values."""
        own = self.parameters()
        for name, value in values.items():
            own[name].copy_(self.place(name, value.to(own[name].dtype)))

    def _reshard(self) -> None:
        """FSDP leaves a root module whole after a forward pass of its own."""
        for layer in self._layers:
            layer.reshard()

    def _refuse_other_shards(self) -> None:
        for name, shard in self._shards.items():
            cuts = [placement for placement in shard.placements if not placement.is_replicate()]
            if len(cuts) > 1 or not self._layers:
                raise ValueError(
                    f"parameter {name!r} is cut by tensor parallelism (parallelize_module), whose layers compute "
                    "with parts of it: a record's gradient needs it whole. Shard the module by fully_shard alone."
                )


def is_shard(value: object) -> bool:
    """Whether a tensor is spread over processes; who has such a one has imported its class."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, known.DTensor)


def gathered(value: Any) -> Any:
    """A state with whole tensors in the place of shards; all processes call it."""
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item) for item in value)
    return value.detach().full_tensor() if is_shard(value) else value


def load_whole(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state of whole tensors into an optimizer, which may step shards."""
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def cut(value: Any, param: Tensor) -> Any:
        shaped = isinstance(value, Tensor) and value.shape == param.shape
        return _like(value, param) if shaped and is_shard(param) else value

    own = {
        place: {key: cut(value, params[place]) for key, value in known.items()}
        for place, known in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": own})


def _like(value: Tensor, shard: Any) -> Tensor:
    """This process's shard of a whole value, in memory of its own. Every process has the same value."""
    from torch.distributed.tensor import distribute_tensor

    cut = distribute_tensor(value.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
    return cut.clone()


def _is_fsdp(layer: nn.Module) -> bool:
    known = sys.modules.get("torch.distributed.fsdp")
    return known is not None and isinstance(layer, known.FSDPModule)


def _is_of(hook: Any, state: object) -> bool:
    """Whether a hook is a method of ``state``, or a function around one."""
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


@contextmanager
def _plain(layer: Any) -> Iterator[None]:
    """A layer as it was before ``fully_shard``: of its own class, without FSDP's hooks and state."""
    from torch.distributed.fsdp import FSDPModule

    kind, state, own = type(layer), layer._get_fsdp_state(), layer.__dict__
    stores = [own["_forward_pre_hooks"], own["_forward_hooks"]]
    hooks = [dict(store) for store in stores]
    hidden = {key: own[key] for key in own if key.startswith(_STATE)}
    try:
        for store in stores:
            for number, hook in list(store.items()):
                if _is_of(hook, state):
                    del store[number]
        for key in hidden:
            del own[key]
        layer.__class__ = next(each for each in kind.__mro__ if not issubclass(each, FSDPModule))
        yield
    finally:
        layer.__class__ = kind
        own.update(hidden)
        for store, known in zip(stores, hooks, strict=True):
            store.clear()
            store.update(known)
