"""Several processes inside one institution: one sample, shared out by secret words; one noise.

Every process holds the same data and model and runs the same program (``torchrun`` with the gloo or nccl backend).
Each sums the clipped contributions of its share of a sample, and the leader alone adds the noise and holds the
ledger. Each privacy unit goes to one process with all its records, so the bound on a unit is that of one process.

With FSDP2 a whole twin of the module computes: per-example norms need whole layers. The released gradient and the
optimizer's averages are cut into shards.
"""

from __future__ import annotations

import copy
import hmac
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.curators.central import CentralCurator, CentralSession
from quietgrad.curators.session import PendingRelease
from quietgrad.errors import BudgetError, DataError, QuietgradError
from quietgrad.objectives.base import Batch, ClippingRule, Query, RecordAdapter
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.networks.randomness import RecordSeeds
from quietgrad.objectives.networks.records import bytes_of
from quietgrad.objectives.privacy_units import UserLevelObjective, public_loss
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.rng import fresh_key
from quietgrad.training.result import Result

_LEADER = 0
_AGREED = "the processes do not agree on {}: every process must be given the same."

Asked = ModuleObjective | UserLevelObjective
Made = TypeVar("Made")


def is_distributed() -> bool:
    """Whether this is one of several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def process_count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if is_distributed() else 1


def is_leader() -> bool:
    """Whether this process adds noise and holds the ledger."""
    return not is_distributed() or dist.get_rank() == _LEADER


def broadcast_loop_key() -> bytes | None:
    """A key of samples that all processes share; alone a curator makes its own."""
    return _told(fresh_key()) if is_distributed() else None


def broadcast_from_leader(make: Callable[[], Made]) -> Made:
    """What the leading process makes, on all of them."""
    return _told(make() if is_leader() else None) if is_distributed() else make()


def any_of_us(here: bool, device: torch.device) -> bool:
    """Whether something is so on any process."""
    said = torch.tensor(float(here), device=device)
    dist.all_reduce(said)
    return bool(said > 0.0)


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """The part of a batch that process ``rank`` of ``world`` sums: whole people, where records are people's.

    By secret words, as passes are: cut by position, every later record would change places when one leaves.
    """
    everyone = np.arange(len(batch.records)) if batch.indices is None else batch.indices
    return batch._replace(indices=everyone[RecordSeeds.of(batch.key, everyone).share(rank, world)])


def _told(message: Any = None) -> Any:
    """What the leading process says, on all."""
    box: list[Any] = [message]
    dist.broadcast_object_list(box, _LEADER)
    return box[0]


def _refuse_others(digests: Callable[[bytes], Mapping[str, str]], why: str) -> None:
    """Raise on all processes unless all hold the same; what differs is named.

    A record that lies elsewhere on another process would be in two shares and contribute twice.
    """
    key = _told(fresh_key())
    mine = _all_or_none(lambda: digests(key), why)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, mine)
    for what in mine:
        if len({answer[what] for answer in answers}) > 1:
            raise DataError(_AGREED.format(what))


def _all_or_none(make: Callable[[], Made], why: str) -> Made:
    """What ``make`` makes, if it does so on every process; else all raise."""
    failed: BaseException | None = None
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


def _digest(key: bytes, parts: Iterable[bytes | memoryview]) -> str:
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(part)
    return mac.hexdigest()


def _modes(module: nn.Module) -> str:
    return "".join("t" if layer.training else "e" for layer in module.modules())


# --- fits: one process leads, the others answer -----------------------------------------------------------------


def run_on_leader(objective: Asked, data: Any, lead: Callable[[Any, Any], Result]) -> Result:
    """Prepare ``data`` and ``lead(objective, examples)``, on the leading process if there are several.

    All processes return its result. They must agree first on all that a sum depends on.
    """
    if not is_distributed():
        return lead(objective, objective.prepare(data))
    held: list[Any] = []

    def prepared(key: bytes) -> Mapping[str, str]:
        held.append(objective.prepare(data))
        return _digests(objective, held[0], key)

    _refuse_others(prepared, "another process refused its model or its data")
    if not is_leader():
        return _serve(objective, held[0])
    shared = copy.copy(objective)  # whose sums are computed by all processes together
    vars(shared)["add"] = lambda batch, points, rule, out: out.add_(_sum(objective, batch, points, rule))
    try:
        result = lead(shared, held[0])
    except BaseException as error:
        _told(("failed", f"{type(error).__name__}: {error}"))
        raise
    _told(("done", result))
    return result


def _digests(objective: RecordAdapter, examples: Any, key: bytes, settings: str = "") -> dict[str, str]:
    module = public_loss(objective).module
    said = f"{objective!r} {len(examples)} {_modes(module)} {settings}"
    start = (part for value in (*module.parameters(), *module.buffers()) for part in bytes_of(value))
    return {
        "the records, their order, whose they are, frozen parameters or buffers": _digest(key, examples.contents()),
        "the parameters or buffers that training begins with": _digest(key, start),
        "model, loss or settings": _digest(key, [said.encode()]),
    }


def _serve(objective: Asked, examples: Any) -> Result:
    """Answer the leader's queries until it is done."""
    like: Any = objective.initial(examples)
    while True:
        word, *rest = _told()
        if word == "done":
            result: Result = rest[0]
            return result
        if word == "failed":
            raise QuietgradError(f"the leading process stopped: {rest[0]}")
        indices, key, count, rule = rest
        points = tuple(torch.empty_like(like) for _ in range(count))
        for point in points:
            dist.broadcast(point, _LEADER)
        _shares_added(objective, Batch(examples, indices, key), points, rule)


def _sum(objective: Asked, batch: Batch, points: Sequence[Tensor], rule: ClippingRule) -> Tensor:
    """The leader's side of a sum: everybody is told what is asked, and gives their share."""
    if batch.key is None:
        batch = batch._replace(key=fresh_key())  # one for all processes
    _told(("add", batch.indices, batch.key, len(points), rule))
    for point in points:
        dist.broadcast(point, _LEADER)
    return _shares_added(objective, batch, points, rule)


def _shares_added(objective: Asked, batch: Batch, points: Sequence[Tensor], rule: ClippingRule) -> Tensor:
    total = torch.zeros_like(points[0], dtype=torch.float64)
    objective.add(share_of(batch, dist.get_rank(), dist.get_world_size()), points, rule, total)
    dist.reduce(total, _LEADER)
    return total


# --- loops: every process runs the loop -------------------------------------------------------------------------


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus's wrapper by name: every process begins with the leader's parameters; ``make_private`` does the rest.

    torch's own ``DistributedDataParallel`` may be used as well: what it would add up are gradients that were not
    clipped, so its sums are replaced by those of the private loop.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if is_distributed():
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), _LEADER)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        return self.module(*args, **kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what distributes it."""
    while isinstance(module, DifferentiallyPrivateDistributedDataParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module


class SharedSession(CentralSession):
    """The session of a loop on several processes: each reads and sums its share, the leader releases.

    Followers draw the same samples from the same key and add no noise.
    """

    def _batch(self, drawn: PendingRelease) -> Batch:
        """This process's share of a sample."""
        return share_of(super()._batch(drawn), dist.get_rank(), dist.get_world_size())

    def release_drawn(self, drawn: PendingRelease, query: Query, *, rho: float | None = None) -> Tensor:
        """The noisy sum over all shares; noise is added once, and everybody gets the same numbers."""
        zero = torch.as_tensor(self._zero)
        dim = query.dim(self._records)
        # Behind the sum: whether a share failed, and of which sample it is.
        share = torch.zeros(dim + 3, dtype=torch.float64, device=zero.device)
        sums, place = share[:-3], float(self._place(drawn))
        failed: BaseException | None = None
        try:
            with np.errstate(all="ignore"):
                query.sum_into(self._reading, self.batch(drawn), sums)
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
        answer = torch.zeros(dim + 1, dtype=torch.float64, device=zero.device)
        if is_leader():
            try:
                answer[:-1] = torch.as_tensor(super().release_drawn(drawn, Summed(sums, query.bound)))
            except BaseException as error:
                failed = error
                answer.zero_()[-1] = 1.0
        else:
            self.forget(drawn)
        dist.broadcast(answer, _LEADER)
        if float(answer[-1]) > 0.0:
            raise failed or QuietgradError("the leading process could not release this step.")
        return answer[:-1].to(zero.dtype)

    def _place(self, drawn: PendingRelease) -> int:
        """The number of a sample among all of the plan."""
        slots = self.plan.schedule.slots
        before = [slot.name for slot in slots].index(drawn.slot)
        return sum(slot.count for slot in slots[:before]) + drawn.number


class SharedCurator(CentralCurator):
    """Holds the records of a loop on several processes, which must agree on all that a sum depends on."""

    session: ClassVar[type[CentralSession]] = SharedSession

    def open(self, plan: Plan, **options: Any) -> CentralSession:
        """The session, on every process or on none."""

        def digests(key: bytes) -> Mapping[str, str]:
            secret = _digest(key, [self._key])
            return {**_digests(self.objective, self.records, key, json.dumps(plan.to_json())), "seed": secret}

        _refuse_others(digests, "another process cannot read its data")
        return _all_or_none(lambda: super(SharedCurator, self).open(plan, **options), "the ledger refused the loop")


class Summed:
    """A query whose sum was formed beforehand."""

    def __init__(self, total: Tensor, bound: float) -> None:
        self._total, self.bound = total, bound

    def dim(self, records: Any) -> int:
        return len(self._total)

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        out = torch.as_tensor(out)  # of an array: its own memory
        out += self._total.to(out.device)


class Shards:
    """A module that ``fully_shard`` has cut, and its twin."""

    def __init__(self, module: nn.Module) -> None:
        self.params = dict(module.named_parameters())
        self.twin = _twin(module, {}, {})

    @staticmethod
    def of(module: nn.Module) -> Shards | None:
        """The shards of a module, if it has any."""
        return Shards(module) if any(_is_sharded(param) for param in module.parameters()) else None

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
        from torch.distributed.tensor import distribute_tensor  # it takes seconds to load

        like: Any = self.params[name]
        # Everybody has the same numbers: each cuts its own out, and nothing is sent.
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def _is_sharded(param: Tensor) -> bool:
    return hasattr(param, "full_tensor")


def _whole(param: Any) -> Tensor:
    whole: Tensor = param.full_tensor() if _is_sharded(param) else param
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
            kept = {k: h for k, h in held.items() if not str(h.__module__).startswith("torch.distributed.")}
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
