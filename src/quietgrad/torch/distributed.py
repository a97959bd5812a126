"""Data-parallel sums inside one institution: ``torchrun`` with the gloo (or nccl) backend.

One process leads: it runs the algorithm, holds the key, the ledger and the checkpoints, and adds the noise, once.
The others hold the same data and answer its queries: each sums the clipped contributions of its share of the
sample, and the shares are added. A sum is the same whoever computed its terms, up to the order of additions.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quietgrad.errors import DataError, QuietgradError
from quietgrad.objectives.base import BaseObjective, Batch, Regularizer, Rule
from quietgrad.objectives.networks.examples import Examples
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.objectives.networks.randomness import RecordKeys
from quietgrad.objectives.people import OfPeople, told
from quietgrad.privacy.rng import fresh_key
from quietgrad.training.result import Result

__all__ = ["one_leader", "share_of"]

_LEADER = 0


Asked = ModuleObjective | OfPeople


def one_leader(objective: Asked, data: Any, lead: Callable[[Any, Any], Result]) -> Result:
    """Prepare ``data`` and ``lead(objective, examples)``, on the leading process if there are several.

    All processes return its result. They must agree first on all that a sum depends on. What is shared out is what
    a sampler draws: where records are people's, a person's are all on one process.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return lead(objective, objective.prepare(data))
    examples = _agreed(objective, data)
    if dist.get_rank() != _LEADER:
        return _serve(objective, examples)
    shared = _SharedPeople.of(objective) if isinstance(objective, OfPeople) else _Shared(objective)
    try:
        result = lead(shared, examples)
    except BaseException as error:
        _send(("failed", f"{type(error).__name__}: {error}"))
        raise
    _send(("done", result))
    return result


class _Shared(BaseObjective):
    """A :class:`ModuleObjective` whose sums are computed by all processes together."""

    def __init__(self, objective: ModuleObjective) -> None:
        self._objective = objective

    def __repr__(self) -> str:
        return f"{self._objective!r} on {dist.get_world_size()} processes"

    @property
    def regularizer(self) -> Regularizer:
        return self._objective.regularizer

    def prepare(self, data: Any) -> Examples:
        return self._objective.prepare(data)

    def initial(self, records: Examples) -> Tensor:
        return self._objective.initial(records)

    def add(self, batch: Batch, points: Sequence[Tensor], rule: Rule, out: Tensor) -> None:
        out += _sum(self._objective, batch, points, rule)

    def loss_sum(self, batch: Batch, params: Tensor, bound: float) -> float:
        return self._objective.loss_sum(batch, params, bound)

    def risk(self, records: Examples, params: Tensor) -> float:
        return self._objective.risk(records, params)

    def risk_gradient(self, records: Examples, params: Tensor) -> Tensor:
        return self._objective.risk_gradient(records, params)


class _SharedPeople(OfPeople):
    """The same, asked about people: they are what is shared out, so that each is on one process with all theirs."""

    @staticmethod
    def of(asked: OfPeople) -> _SharedPeople:
        return _SharedPeople(asked.loss, asked.combine, asked.records_per_person)

    def add(self, batch: Batch, points: Sequence[Any], rule: Rule, out: Any) -> None:
        out += _sum(self.around(self.loss), batch, points, rule)


def _serve(objective: Asked, examples: Any) -> Result:
    """Answer the leader's queries until it is done."""
    like: Any = objective.initial(examples)
    while True:
        word, *rest = _receive()
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


def _sum(objective: Asked, batch: Batch, points: Sequence[Tensor], rule: Rule) -> Tensor:
    """The leader's side of a sum: everybody is told what is asked, and gives their share."""
    if batch.key is None:
        batch = batch._replace(key=fresh_key())  # one for all processes
    _send(("add", batch.indices, batch.key, len(points), rule))
    for point in points:
        dist.broadcast(point, _LEADER)
    return _shares_added(objective, batch, points, rule)


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """The part of a batch that process ``rank`` of ``world`` sums: whole people, where records are people's.

    By secret words, as passes are: cut by position, every later record would change places when one leaves.
    """
    everyone = np.arange(len(batch.records)) if batch.indices is None else batch.indices
    return batch._replace(indices=everyone[RecordKeys.of(batch.key, everyone).share(rank, world)])


def _shares_added(objective: Asked, batch: Batch, points: Sequence[Tensor], rule: Rule) -> Tensor:
    total = torch.zeros_like(points[0], dtype=torch.float64)
    objective.add(share_of(batch, dist.get_rank(), dist.get_world_size()), points, rule, total)
    dist.reduce(total, _LEADER)
    return total


def _agreed(objective: Asked, data: Any) -> Any:
    """The examples, if all processes hold the same records in the same order, the same weights and settings.

    A record that lies elsewhere on another process would be in two shares and contribute twice. What is compared is
    a digest under a key of this run, so that it tells nobody else anything; nothing has been reserved yet.
    """
    box: list[Any] = [fresh_key()]
    dist.broadcast_object_list(box, _LEADER)
    mine: tuple[str, ...] = ("failed",)
    try:
        examples = objective.prepare(data)
        mine = ("ready", *_digests(objective, examples, box[0]))
    finally:  # also when this process refuses: the others wait to hear of it
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, mine)
    if any(answer[0] == "failed" for answer in answers):
        raise QuietgradError("another process refused its model or its data, and said why; nothing was reserved.")
    for what, digests in zip(_COMPARED, list(zip(*answers, strict=True))[1:], strict=True):
        if len(set(digests)) > 1:
            raise DataError(f"the processes do not agree on {what}: every process must be given the same.")
    return examples


_COMPARED = (
    "the records, their order, whose they are, frozen parameters or buffers",
    "the parameters that training begins with",
    "model, loss or settings",
)


def _digests(objective: Asked, examples: Any, key: bytes) -> tuple[str, str, str]:
    def digest(parts: Iterable[bytes | memoryview]) -> str:
        mac = hmac.new(key, digestmod="sha256")
        for part in parts:
            mac.update(part)
        return mac.hexdigest()

    modes = "".join("t" if layer.training else "e" for layer in told(objective).module.modules())
    settings = f"{objective!r} {len(examples)} {modes}"
    initial: Any = objective.initial(examples)
    start = initial.cpu().numpy().tobytes()
    return digest(examples.contents()), digest([start]), digest([settings.encode()])


def _send(message: Any) -> None:
    dist.broadcast_object_list([message], _LEADER)


def _receive() -> Any:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, _LEADER)
    return box[0]
