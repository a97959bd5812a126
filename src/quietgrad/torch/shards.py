"""FSDP2 in a private loop: a whole twin to compute with, and shards that the optimizer steps.

Per-example norms need whole layers, and a release is one vector of all parameters. So the parameters are gathered
once per step into a module without shards, which the engine differentiates; the released gradient goes back into
shards, and so do the optimizer's averages, which is the memory that is saved.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Shards"]


class Shards:
    """A module that ``fully_shard`` has cut, and its twin."""

    def __init__(self, module: nn.Module) -> None:
        self.params = dict(module.named_parameters())
        self.twin = _twin(module, {}, {})

    @staticmethod
    def of(module: nn.Module) -> Shards | None:
        """The shards of a module, if it has any."""
        return Shards(module) if any(_sharded(param) for param in module.parameters()) else None

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the twin to where the shards are; every process takes part."""
        for name, param in self.twin.named_parameters():
            param.copy_(_whole(self.params[name]))

    @torch.no_grad()
    def scatter(self) -> None:
        """Bring the shards to where the twin is."""
        for name, param in self.twin.named_parameters():
            self.params[name].copy_(self.cut(name, param.detach()))

    def cut(self, name: str, value: Tensor) -> Tensor:
        """This process's shard of a tensor that all have whole."""
        from torch.distributed.tensor import distribute_tensor

        like: Any = self.params[name]
        # Everybody has the same numbers: each cuts its own out, and nothing is sent.
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _sharded(param: Tensor) -> bool:
    return hasattr(param, "full_tensor")


def _whole(param: Any) -> Tensor:
    whole: Tensor = param.full_tensor() if _sharded(param) else param
    return whole.detach()


def _twin(module: nn.Module, made: dict[int, nn.Module], params: dict[int, nn.Parameter]) -> nn.Module:
    """The module without shards and without the hooks that gather them; shared layers and weights stay shared."""
    if id(module) in made:
        return made[id(module)]
    kind = type(module)
    if kind.__name__.startswith("FSDP") and len(kind.__bases__) == 2:  # made by fully_shard of the second
        kind = kind.__bases__[1]
    twin = made[id(module)] = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    for name, held in module.__dict__.items():
        if isinstance(held, OrderedDict) and name.endswith("_hooks"):
            kept = {key: hook for key, hook in held.items() if not _of_fsdp(hook)}
            twin.__dict__[name] = OrderedDict(kept)
    twin._buffers = dict(module._buffers)
    twin._modules = {
        name: None if child is None else _twin(child, made, params) for name, child in module._modules.items()
    }
    twin._parameters = {}
    for name, param in module._parameters.items():
        if param is not None and id(param) not in params:
            params[id(param)] = nn.Parameter(_whole(param).clone(), requires_grad=param.requires_grad)
        twin._parameters[name] = None if param is None else params[id(param)]
    return twin


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
