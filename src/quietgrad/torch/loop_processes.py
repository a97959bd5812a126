"""A loop of the user's own on several processes: one sample, shared out by secret words; one noise.

Every process runs the same loop on the same data. A sample is drawn once, from a key that all share; each process
gets its own share of its records from the loader and clips their gradients. The shares are added, the leading
process alone adds the noise to the sum and holds the ledger, and all step with what it released. This is for one
institution that trusts its machines.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "unwrapped"]

LEADER = 0


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus's wrapper by name: every process begins with the leader's parameters; ``make_private`` does the rest.

    torch's own ``DistributedDataParallel`` may be used as well: what it would add up are gradients that were not
    clipped, so its sums are replaced by those of the private loop.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if several():
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), LEADER)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        return self.module(*args, **kwargs)


def several() -> bool:
    """Whether this is one of several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what distributes it."""
    while isinstance(module, DifferentiallyPrivateDistributedDataParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module
