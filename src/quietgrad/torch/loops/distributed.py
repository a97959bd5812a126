"""Several processes inside one institution: one sample, shared out by secret words; one noise.

Every process holds the same data and model and runs the same program (``torchrun`` with the gloo or nccl backend).
Each sums the clipped contributions of its share of a sample, and the leader alone adds the noise and holds the
ledger. Each privacy unit goes to one process with all its records, so the bound on a unit is that of one process.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import composed
from quietgrad.core.errors import BudgetError, DataError, QuietgradError
from quietgrad.core.ledger.account import Account
from quietgrad.core.noise.rng import fresh_key
from quietgrad.core.plans.counting import PublicCount
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.base import SessionCost
from quietgrad.core.session.curator import CentralCurator, CentralSession
from quietgrad.core.session.objectives import Batch, RecordAdapter, public_loss
from quietgrad.core.session.opening import Terms
from quietgrad.core.session.queries import Query
from quietgrad.core.session.session import PendingRelease
from quietgrad.torch.networks.randomness import RecordSeeds
from quietgrad.torch.networks.records import bytes_of
from quietgrad.torch.networks.usable import uncompiled

_LEADER = 0

Made = TypeVar("Made")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def process_count() -> int:
    return dist.get_world_size() if is_distributed() else 1


def is_leader() -> bool:
    """Whether this process adds noise and holds the ledger."""
    return not is_distributed() or dist.get_rank() == _LEADER


def broadcast_loop_key() -> bytes | None:
    """Return a key of samples that all processes share, or ``None`` for one process, whose curator makes it."""
    return _told(fresh_key()) if is_distributed() else None


def broadcast_from_leader(make: Callable[[], Made]) -> Made:
    """Run ``make`` on the leading process, and return what it makes on all processes."""
    return _told(make() if is_leader() else None) if is_distributed() else make()


def any_of_us(here: bool, device: torch.device) -> bool:
    """Return whether ``here`` is true on any process."""
    said = torch.tensor(float(here), device=device)
    with while_all_are_there():
        dist.all_reduce(said)
    return bool(said > 0.0)


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """The part of a batch that process ``rank`` of ``world`` sums: whole people, where records are people's.

    By secret words, as passes are: cut by position, every later record would change places when one leaves.
    """
    everyone = np.arange(len(batch.records)) if batch.indices is None else batch.indices
    return batch._replace(indices=everyone[RecordSeeds.of(batch.key, everyone).share(rank, world)])


def _told(message: object) -> Any:
    box: list[Any] = [message]
    with while_all_are_there():
        dist.broadcast_object_list(box, _LEADER)
    return box[0]


UNREADABLE = "another process cannot read its data"
_OTHER_SAMPLES = (
    "the processes step on different samples: a record could be in two shares and count twice. Nothing was "
    "released; every process must take every batch and step on it, also if its own share is empty."
)


def read_by_all(read: Callable[[], Made]) -> Made:
    """Return what ``read`` makes of this process's data; if it fails on one process, raise on all."""
    return all_or_none(read, UNREADABLE) if is_distributed() else read()


@contextmanager
def while_all_are_there() -> Iterator[None]:
    """Say in words that a process is gone, where torch says that a connection was closed."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise QuietgradError(
            "another process of this training is gone, so this step cannot be made. Every released number was "
            "charged beforehand. Start all processes again: with folder= the same call goes on where it was saved."
        ) from error


def all_or_none(make: Callable[[], Made], why: str) -> Made:
    """Return what ``make`` makes if it succeeds on every process. Otherwise raise on all of them."""
    failed: BaseException | None = None
    try:
        made = make()
    except BaseException as error:
        failed = error
    answers: list[Any] = [None] * dist.get_world_size()
    with while_all_are_there():
        dist.all_gather_object(answers, failed is None)
    if failed is not None:
        raise failed
    if not all(answers):
        raise QuietgradError(f"{why}, and said why there; nothing was released.")
    return made


def agree_on_keeping(folder: object) -> None:
    """Raise on every process if some were given a folder and others none: each would wait for the others."""
    if not is_distributed():
        return
    answers: list[Any] = [None] * dist.get_world_size()
    with while_all_are_there():
        dist.all_gather_object(answers, folder is not None)
    if len(set(answers)) > 1:
        raise DataError(
            "folder: some processes were given one and others none. Give it to every process, or to none; the "
            "leading one keeps the run. Nothing was released."
        )


def _digest(key: bytes, parts: Iterable[bytes | memoryview]) -> str:
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(part)
    return mac.hexdigest()


def _digests(objective: RecordAdapter, examples: Any, key: bytes, settings: str = "") -> dict[str, str]:
    module = public_loss(objective).module
    modes = "".join("t" if layer.training else "e" for layer in module.modules())
    said = f"{objective!r} {len(examples)} {modes} {settings}"
    start = (part for value in (*module.parameters(), *module.buffers()) for part in bytes_of(value))
    return {
        "the records, their order, whose they are, frozen parameters or buffers": _digest(key, examples.contents()),
        "the parameters or buffers that training begins with": _digest(key, start),
        "model, loss or settings": _digest(key, [said.encode()]),
    }


def shared_terms(terms: Terms) -> Terms:
    """The terms of a run on several processes: all draw alike, and the leader alone pays."""
    terms = replace(terms, key=broadcast_loop_key())
    return terms if is_leader() else replace(terms, account=Account(terms.account.name))


class DifferentiallyPrivateDistributedDataParallel(nn.Module):
    """Opacus' wrapper of a module on several processes.

    Every process starts with the leader's parameters; ``make_private`` does the rest.

    torch's own ``DistributedDataParallel`` may be used as well. It would sum gradients that were not clipped, so
    the private loop replaces its sums.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        if is_distributed():
            for value in (*module.parameters(), *module.buffers()):
                dist.broadcast(value.detach(), _LEADER)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, as it was written, without what adds up its gradients over processes."""
    module = uncompiled(module)
    while isinstance(module, DifferentiallyPrivateDistributedDataParallel | nn.parallel.DistributedDataParallel):
        module = uncompiled(module.module)
    return module


_AGAIN, _FAILED = 1.0, 2.0  # what came of a release


class _EpochIsOver(Exception):
    """The leader went on in a new epoch, whose samples are others."""


class SharedSession(CentralSession):
    """The session of a loop on several processes: each reads and sums its share, the leader releases.

    Followers draw the same samples from the same key and add no noise.
    """

    leader_draws: bool = False
    """Whether the leader says who is in a sample: only it knows the key of a run that is kept in a folder."""
    _leaders_epochs: int = 1

    def share(self, batch: Batch) -> Batch:
        """The part of a batch that this process sums."""
        return share_of(batch, dist.get_rank(), dist.get_world_size())

    def _batch(self, drawn: PendingRelease) -> Batch:
        return self.share(super()._batch(drawn))

    def _take_leaders_sample(self, drawn: PendingRelease) -> None:
        """Hold the share of the sample that the leader draws."""
        whole, place = super()._batch(drawn) if is_leader() else None, self._place(drawn)
        leaders, indices, key = _told(None if whole is None else (place, whole.indices, whole.key))
        if leaders != place:
            raise BudgetError(_OTHER_SAMPLES)
        self._batches[drawn] = self.share(Batch(self._records, indices, key))

    def _place(self, drawn: PendingRelease) -> int:
        """A release's own number among those of all slots."""
        return self.plan.schedule.place_of(drawn.slot, drawn.number)

    def release(self, slot: str, query: Query, *, rho: float | None = None) -> Tensor:
        """The noisy sum of the slot's next sample, over all shares."""
        return self.release_drawn(self.draw(slot), query, rho=rho)

    def choose(self, *_: object, **__: object) -> NoReturn:
        """Not on several processes, where no one has the exact numbers: raises."""
        raise BudgetError("on several processes sums are released, and nothing is chosen by exact numbers.")

    first_below = discover = choose

    @property
    def epochs(self) -> int:
        """How often the plan was charged: the leader, who pays, tells it with every release."""
        return max(super().epochs, self._leaders_epochs)

    def follow_charges(self, epochs: int) -> None:
        """Take over how often the leader was charged for the plan."""
        self._leaders_epochs = epochs

    def close(self, reason: str, *, data_dependent: bool = False) -> SessionCost:
        """End the session; every process states what the leader was charged."""
        cost = super().close(reason, data_dependent=data_dependent)
        if is_leader() or cost.event is None or self.epochs == 1:
            return cost
        return replace(cost, event=composed([self.plan.event] * self.epochs), data_dependent=True)

    def release_drawn(self, drawn: PendingRelease, query: Query, *, rho: float | None = None) -> Tensor:
        """The noisy sum over all shares; noise is added once, and every process gets the same numbers."""
        while True:
            total = self._sum_of_shares(drawn, query)
            answer = self._leaders_answer(drawn, query, total)
            if answer is not None:
                return answer

    def _sum_of_shares(self, drawn: PendingRelease, query: Query) -> Tensor:
        """The exact sum of a sample over all processes; it leaves them with noise alone."""
        # Behind the sum: whether a share failed, and of which sample it is.
        share = torch.zeros(query.dim(self._records) + 3, dtype=torch.float64, device=self._device)
        sums, place = share[:-3], float(self._place(drawn))
        failed: BaseException | None = None
        try:
            if self.leader_draws:
                self._take_leaders_sample(drawn)
            with np.errstate(all="ignore"):
                query.sum_into(self._reading, self.batch(drawn), sums)
        except BaseException as error:
            failed = error
            sums.zero_()
        sums.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        share[-3:] = torch.tensor([float(failed is not None), place, place**2])
        with while_all_are_there():
            dist.all_reduce(share)
        world = dist.get_world_size()
        if share[-2:].tolist() != [world * place, world * place**2]:
            raise BudgetError(_OTHER_SAMPLES)
        if float(share[-3]) > 0.0:
            raise failed or QuietgradError(
                "another process failed in its share of this step; nothing was released."
            )
        return sums

    def _leaders_answer(self, drawn: PendingRelease, query: Query, total: Tensor) -> Tensor | None:
        """What the leader releases of ``total``; ``None`` if it was the sum of an epoch that is over.

        A resumed run that finds another sum under a number goes on in a new epoch, which is charged as one with
        samples of its own. All processes must sum the new epoch's sample: the old one was released already.
        """
        # Behind the numbers: what came of it, and how often the plan is charged by now.
        answer = torch.zeros(len(total) + 2, dtype=torch.float64, device=self._device)
        failed: BaseException | None = None
        if is_leader():
            try:
                answer[:-2] = torch.as_tensor(super().release_drawn(drawn, _SumOfShares(total, query)))
            except _EpochIsOver:
                self._begun.add(drawn)
                answer[-2] = _AGAIN
            except BaseException as error:
                failed = error
                answer.zero_()[-2] = _FAILED
            answer[-1] = float(super().epochs)
        with while_all_are_there():
            dist.broadcast(answer, _LEADER)
        self.follow_charges(int(answer[-1]))
        outcome = float(answer[-2])
        if outcome == _FAILED:
            raise failed or QuietgradError("the leading process could not release this step.")
        if outcome == _AGAIN:
            self._batches.pop(drawn, None)
            return None
        if not is_leader():
            self.forget(drawn)
        return answer[:-2].to(torch.as_tensor(self._zero).dtype)

    @property
    def _device(self) -> torch.device:
        return torch.as_tensor(self._zero).device


class SharedCurator(CentralCurator):
    """Holds the records of a loop on several processes, which must agree on all that a sum depends on."""

    session: ClassVar[type[CentralSession]] = SharedSession

    def __init__(self, *args: Any, **options: Any) -> None:
        all_or_none(lambda: super(SharedCurator, self).__init__(*args, **options), UNREADABLE)

    def count(
        self, budget: Budget | None, declared: int | PublicCount | None, algorithm: HasSchedule | None
    ) -> PublicCount:
        """The number that the leading process counted, on all of them."""
        return broadcast_from_leader(lambda: super(SharedCurator, self).count(budget, declared, algorithm))

    def open(self, plan: Plan, **options: Any) -> CentralSession:
        """The session, on every process or on none.

        A record that lies elsewhere on another process would be in two shares and contribute twice.
        """
        key = _told(fresh_key())

        def digests() -> dict[str, str]:
            found = _digests(self.objective, self.records, key, json.dumps(plan.to_json()))
            return {**found, "seed": _digest(key, [self._key])}

        mine = all_or_none(digests, UNREADABLE)
        answers: list[Any] = [None] * dist.get_world_size()
        with while_all_are_there():
            dist.all_gather_object(answers, mine)
        for what in mine:
            if len({answer[what] for answer in answers}) > 1:
                raise DataError(f"the processes do not agree on {what}: every process must be given the same.")
        session = all_or_none(
            lambda: super(SharedCurator, self).open(plan, **options), "the ledger refused the run"
        )
        if isinstance(session, SharedSession):
            session.follow_charges(_told(session.epochs))
        return session


class _SumOfShares:
    """The sum of what every process' query formed of its share, for the leader to add noise to.

    Each unit is in one share, where the query clips it: the bound is the query's. It answers once: the leader asks
    again only for another sample, of which this is not the sum.
    """

    def __init__(self, total: Tensor, query: Query) -> None:
        self._total, self.bound = total, query.bound
        self._is_used = False

    def dim(self, records: object) -> int:
        return len(self._total)

    def sum_into(self, objective: object, batch: Batch, out: Any) -> None:
        if self._is_used:
            raise _EpochIsOver
        self._is_used = True
        out = torch.as_tensor(out)  # of an array: its own memory
        out += self._total.to(out.device)


def average_gradients(model: nn.Module) -> NoReturn:
    """Not here: raises, with what to use."""
    raise ValueError("average_gradients: the private loop adds up the gradients of all processes; leave it out.")
