"""What loops cost, and where a custom training loop stands: states and costs under one seal of this user.

A cost that was edited, or put beside other weights, is not believed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quietgrad.errors import DataError
from quietgrad.files import parse_json, read_bytes, write_atomically
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.accounting import account
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.events import Event, composed
from quietgrad.privacy.ledger_state import fingerprint
from quietgrad.training import checkpoint

if TYPE_CHECKING:
    from quietgrad.torch.loops import Loop


@dataclass(frozen=True)
class LoopCost:
    """One loop: its name, its plan, how many of its samples count, and whether they were drawn in secret.

    ``times`` is how often the plan was charged: a kept loop that went on with other sums costs it again.
    """

    name: str
    plan: Plan
    used: int
    private: bool
    times: int = 1

    @staticmethod
    def of(loop: Loop) -> LoopCost:
        """What a loop has cost: the samples it has handed out; all that were planned if it ended early or paused.

        Of a loop that goes on, what an earlier process released counts too.
        """
        times = int(loop._session.epochs)
        whole = times > 1 or loop.paused or (loop._spent is not None and loop._spent.data_dependent)
        made = loop.plan.schedule.releases if whole else max(loop.handed_out, sum(loop._session.made.values()))
        return LoopCost(loop.name, loop.plan, made, loop.is_private, times)

    @property
    def relation(self) -> Relation:
        """Which data sets must look alike."""
        assert self.plan.budget is not None
        return self.plan.budget.relation

    @property
    def counts(self) -> dict[str, int]:
        """Samples that count, by stretch."""
        left, counts = self.used, {}
        for slot in self.plan.schedule.slots:
            counts[slot.name] = min(left, slot.count)
            left -= counts[slot.name]
        return counts

    @property
    def event(self) -> Event | None:
        """What they are accounted as; ``None`` before the first. A plan that rests on a private count is whole."""
        if self.times > 1:
            return composed([self.plan.total, *[self.plan.event] * (self.times - 1)])
        if self.plan.whole_only:
            return self.plan.total
        return self.plan.event_of(self.counts) if self.used else None

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) of each stretch that has begun; without secret samples rate 1."""
        rows = []
        for slot in self.plan.schedule.slots:
            count, held = self.counts[slot.name], slot.sampling.participation(self.counts[slot.name])
            if count:
                rate = slot.sampling.probability if held is None else 1.0
                steps = count if held is None else held[0]
                rows.append((slot.multiplier(self.plan.noise_multiplier), rate, steps))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "loop": self.name, "plan": self.plan.to_json(), "used": self.used, "private": self.private,
            "times": self.times,
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoopCost:
        """Rebuild it from :meth:`to_json`."""
        used, private, times = int(data["used"]), bool(data["private"]), int(data.get("times", 1))
        return cls(str(data["loop"]), Plan.from_json(data["plan"]), used, private, times)


def epsilon_of(costs: Iterable[LoopCost], delta: float) -> float:
    """ε of loops together, as if all were on the same people; infinite if one was seeded.

    >>> epsilon_of([], 1e-5)
    0.0
    """
    known = list(costs)
    if not all(cost.private for cost in known):
        return math.inf
    relations = {cost.relation for cost in known}
    if len(relations) > 1:
        raise ValueError("get_epsilon: loops of different relations do not add up. Use one relation for all.")
    if len({cost.plan.unit for cost in known}) > 1:
        raise ValueError(
            "get_epsilon: loops of records and some about people do not add up. Use an engine for each."
        )
    events = [event for event in (cost.event for cost in known) if event is not None]
    return account(composed(events), delta=delta, relation=relations.pop()) if events else 0.0


def _key(*_: str) -> bytes:
    """The key of this user's checkpoints."""
    return bytes.fromhex(fingerprint([b"quietgrad loop"]))


def seal(costs: Iterable[LoopCost], content: Any = None) -> bytes:
    """A file of what loops cost and of what was made by it, under a key of this user; nothing is pickled."""
    told = {"loops": json.dumps([cost.to_json() for cost in costs]), "content": content}
    return checkpoint.sealed_bytes("loop", told, _key())


def unseal(data: bytes, name: str = "the accountant's state") -> tuple[Any, list[LoopCost]]:
    """The content and the costs, if nothing about them was changed since they were sealed here.

    >>> import tempfile, torch, unittest.mock
    >>> with tempfile.TemporaryDirectory() as state, unittest.mock.patch.dict(os.environ, QUIETGRAD_STATE=state):
    ...     unseal(seal([], {"epoch": 3, "sizes": (1, 2), "w": torch.ones(2)}))
    ({'epoch': 3, 'sizes': (1, 2), 'w': tensor([1., 1.])}, [])
    """
    try:
        _, told = checkpoint.unsealed(name, data, _key)
        return told["content"], [LoopCost.from_json(cost) for cost in parse_json(told["loops"])]
    except (DataError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{name}: not a whole checkpoint that bears the seal of this user ({error}). If it was written by "
            "another user or on another machine, load the weights by load_state_dict and let a ledger keep what "
            "was spent."
        ) from None


def save(path: str | os.PathLike[str] | IO[bytes], content: dict[str, Any], costs: Iterable[LoopCost]) -> None:
    """Write ``content`` and what it cost to a path or an open binary file."""
    data = seal(costs, content)
    if isinstance(path, str | os.PathLike):
        write_atomically(Path(path), data)
    else:
        path.write(data)


def load(path: str | os.PathLike[str] | IO[bytes]) -> tuple[dict[str, Any], list[LoopCost]]:
    """The content and what it cost; a file that is not wholly ours is refused."""
    if not isinstance(path, str | os.PathLike):
        return unseal(path.read(), "the file")
    try:
        data = read_bytes(Path(path))
    except OSError as error:
        raise DataError(f"{path}: no checkpoint can be read there ({type(error).__name__}).") from None
    return unseal(data, os.fspath(path))
