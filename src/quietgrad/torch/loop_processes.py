"""A loop of the user's own on several processes: one sample, shared out by secret words; one noise.

Every process runs the same loop on the same data. Samples come from a key that all share, and each process gets its
own share of their records from the loader and clips their gradients. The shares are added, the leading process
alone adds the noise to the sum and holds the ledger, and all step with what it released. A sum is the same whoever
computed its terms, up to the order of additions. What is shared out is what a sampler draws: where records are
people's, each person with all theirs goes to one process, which clips what they are together; so the bound on a
person is that of one process. This is for one institution that trusts its machines.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.curators.session import Drawn
from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.objectives.base import Batch, Query
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.rng import fresh_key

__all__ = ["DifferentiallyPrivateDistributedDataParallel", "SharedSession", "leads", "same_for_all", "several",
           "unwrapped"]  # fmt: skip

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


def leads() -> bool:
    """Whether this process adds noise and holds the ledger."""
    return not several() or dist.get_rank() == LEADER


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what distributes it."""
    while isinstance(module, DifferentiallyPrivateDistributedDataParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def same_for_all() -> tuple[bytes | None, str]:
    """The key of samples and the name of a loop that all processes share; alone the curator makes its own key."""
    box: list[Any] = [None, os.urandom(16).hex()]
    if several():
        box[0] = fresh_key()
        dist.broadcast_object_list(box, LEADER)
    return box[0], box[1]


class SharedSession:
    """The door of a loop on several processes: each reads and sums its share, the leader's session releases.

    Followers draw the same samples from the same key and add no noise.
    """

    def __init__(self, curator: CentralCurator, plan: Plan, module: nn.Module, device: torch.device) -> None:
        self._device = device
        _refuse_other_loops(curator, plan, module)
        self._session: CentralSession = _all_or_none(lambda: curator.open(plan), "the ledger refused the loop")

    def draw(self, slot: str) -> Drawn:
        """Begin a release, here and everywhere."""
        return self._session.draw(slot)

    def expected_batch(self, slot: str) -> float:
        """The public size of a sample, all shares together."""
        return self._session.expected_batch(slot)

    def batch(self, drawn: Drawn) -> Batch:
        """This process's share of a sample: whole people, where records are people's."""
        whole = self._session.batch(drawn)
        everyone = np.arange(len(whole.records)) if whole.indices is None else whole.indices
        # By secret words: cut by position, every later record would change processes when one leaves.
        mine = RecordKeys.of(whole.key, everyone).share(dist.get_rank(), dist.get_world_size())
        return whole._replace(indices=everyone[mine])

    def release_drawn(self, drawn: Drawn, query: Query) -> Tensor:
        """The noisy sum over all shares; noise is added once, and everybody gets the same numbers."""
        dim = query.dim(self._session._records)
        # Behind the sum: whether a share failed, and of which sample it is.
        share = torch.zeros(dim + 3, dtype=torch.float64, device=self._device)
        sums, place = share[:-3], float(self._place(drawn))
        failed: BaseException | None = None
        try:
            with np.errstate(all="ignore"):
                query.sum_into(self._session.objective, self.batch(drawn), sums)
        except BaseException as error:
            failed = error
            sums.zero_()
        sums.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        share[-3:] = torch.tensor([float(failed is not None), place, place**2])
        dist.all_reduce(share)
        world = dist.get_world_size()
        if share[-2:].tolist() != [world * place, world * place**2]:
            raise BudgetError(
                "the processes step on different samples: a record could be in two shares and count twice. Nothing "
                "was released; every process must take every batch and step on it, also if its own share is empty."
            )
        if float(share[-3]) > 0.0:
            raise failed or QuietgradError(
                "another process failed in its share of this step; nothing was released."
            )
        answer = torch.zeros(dim + 1, dtype=torch.float64, device=self._device)
        if dist.get_rank() == LEADER:
            try:
                answer[:-1] = torch.as_tensor(self._session.release_drawn(drawn, _Summed(query, sums)))
            except BaseException as error:
                failed = error
                answer.zero_()[-1] = 1.0
        else:
            self._session.forget(drawn)
        dist.broadcast(answer, LEADER)
        if float(answer[-1]) > 0.0:
            raise failed or QuietgradError("the leading process could not release this step.")
        return answer[:-1].to(self._session._zero.dtype)

    def _place(self, drawn: Drawn) -> int:
        """The number of a sample among all of the plan."""
        before = 0
        for slot in self._session.plan.schedule.slots:
            if slot.name == drawn.slot:
                break
            before += slot.count
        return before + drawn.number

    def close(self, reason: str, *, data_dependent: bool = False) -> Any:
        """End the loop."""
        return self._session.close(reason, data_dependent=data_dependent)


class _Summed:
    """A query whose sum was formed elsewhere."""

    def __init__(self, query: Query, total: Tensor) -> None:
        self._query, self._total = query, total

    @property
    def bound(self) -> float:
        return self._query.bound

    def dim(self, records: Any) -> int:
        return self._query.dim(records)

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        out = torch.as_tensor(out)
        out += self._total.to(out.device)


def _refuse_other_loops(curator: CentralCurator, plan: Plan, module: nn.Module) -> None:
    """Raise on all processes unless all hold the same records in the same order, the same module and settings.

    A record that lies elsewhere on another process would be in two shares and contribute twice. What is compared is
    a digest under a key of this run; nothing has been reserved yet.
    """
    box: list[Any] = [fresh_key()]
    dist.broadcast_object_list(box, LEADER)

    def digests() -> tuple[str, ...]:
        start = [param.detach().cpu() for param in (*module.parameters(), *module.buffers())]
        modes = "".join("t" if layer.training else "e" for layer in module.modules())
        parts: tuple[Iterator[bytes | memoryview], ...] = (
            curator.records.contents(),
            (tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in start if tensor.numel()),
            iter([f"{module!r} {modes} {json.dumps(plan.to_json())}".encode()]),
            iter([curator._key]),
        )
        found = []
        for part in parts:
            mac = hmac.new(box[0], digestmod="sha256")
            for piece in part:
                mac.update(piece)
            found.append(mac.hexdigest())
        return tuple(found)

    answers: list[Any] = [None] * dist.get_world_size()
    mine = _all_or_none(digests, "another process cannot read its data")
    dist.all_gather_object(answers, mine)
    for what, found in zip(_COMPARED, zip(*answers, strict=True), strict=True):
        if len(set(found)) > 1:
            raise DataError(f"the processes do not agree on {what}: every process must be given the same.")


_COMPARED = (
    "the records, their order or whose they are",
    "the parameters that training begins with",
    "model or settings",
    "seed",
)


def _all_or_none(make: Callable[[], Any], why: str) -> Any:
    """What ``make`` makes, if it does so on every process; else all raise."""
    made, failed = None, None
    try:
        made = make()
    except BaseException as error:
        failed = error
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, failed is None)
    if failed is not None:
        raise failed
    if not all(answers):
        raise QuietgradError(f"{why}, and said why there; nothing was released.")
    return made
