"""What loops have cost, so that a model that went through several of them never says less than the truth.

A checkpoint is loaded again, maybe twice; an optimizer's state moves into another loop. What was spent on the way
must come along, and so must what others went on to spend from the same checkpoint. So a loop whose state leaves it
gets a *family*: a file of this user that every loop that continues from that state writes its samples into, before
they are handed out. Each of them reads there what all have cost together. Counts only grow, and a loop has one name
wherever it is told of, so nothing is counted twice and nothing is forgotten.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quietgrad.errors import DataError
from quietgrad.files import append_privately, parse_json, read_text, reason
from quietgrad.naming import is_path_name
from quietgrad.plans.schedule import Schedule, Slot
from quietgrad.privacy.budget import Relation, Unit
from quietgrad.privacy.events import Event, composed
from quietgrad.privacy.keys import KeyFile
from quietgrad.sampling import Poisson

if TYPE_CHECKING:
    from quietgrad.torch.own_loop import PrivateLoop

__all__ = ["History", "LoopCost"]

_MOST = 1 << 28  # bytes of a family's file


@dataclass(frozen=True)
class LoopCost:
    """One loop: its name, what its samples are accounted as, and how many it has handed out.

    >>> cost = LoopCost("a", (Slot("stretch-0", Poisson(0.1), 50),), 2.0, Relation.ADD_REMOVE, True, 3)
    >>> cost.history, LoopCost.from_json(cost.to_json()) == cost
    ([(2.0, 0.1, 3)], True)
    """

    name: str
    slots: tuple[Slot, ...]
    noise_multiplier: float
    relation: Relation
    private: bool
    used: int
    unit: Unit = Unit.RECORD

    @property
    def counts(self) -> dict[str, int]:
        """Samples handed out, by stretch."""
        left, counts = self.used, {}
        for slot in self.slots:
            counts[slot.name] = min(left, slot.count)
            left -= counts[slot.name]
        return counts

    @property
    def event(self) -> Event | None:
        """What they are accounted as; ``None`` before the first."""
        if not self.used:
            return None
        return Schedule(self.slots).event(self.noise_multiplier, self.relation, self.counts)

    @property
    def history(self) -> list[tuple[float, float, int]]:
        """(noise multiplier, sample rate, steps) of each stretch that has begun; without secret samples rate 1."""
        rows = []
        for slot in self.slots:
            count, held = self.counts[slot.name], slot.sampling.participation(self.counts[slot.name])
            if count:
                rate = slot.sampling.rate if isinstance(slot.sampling, Poisson) else 1.0
                steps = count if held is None else held[0]
                rows.append((slot.multiplier(self.noise_multiplier), rate, steps))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "loop": self.name, "slots": [slot.to_json() for slot in self.slots], "private": self.private,
            "noise_multiplier": self.noise_multiplier, "relation": str(self.relation), "used": self.used,
            "unit": str(self.unit),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LoopCost:
        """Rebuild it from :meth:`to_json`."""
        slots = tuple(Slot.from_json(slot) for slot in data["slots"])
        used, most = int(data["used"]), sum(slot.count for slot in slots)
        if not 0 <= used <= most:
            raise ValueError(f"used={used}: must be between 0 and {most}.")
        return cls(
            str(data["loop"]), slots, float(data["noise_multiplier"]), Relation.parse(data["relation"]),
            bool(data["private"]), used, Unit.parse(data.get("unit", "record")),
        )  # fmt: skip


class History:
    """The loops of an engine, those whose states were loaded into them, and all that go on from the same states."""

    def __init__(self) -> None:
        self._loops: list[PrivateLoop] = []
        self._known: dict[str, LoopCost] = {}  # from elsewhere
        self._families: set[str] = set()
        self._sizes: dict[str, int] = {}  # of the families' files, when they were last looked at
        self.told = 0  # bytes of the last sample that was told

    def add(self, loop: PrivateLoop) -> None:
        """A loop of this process; from now on its samples are told to every family."""
        self._loops.append(loop)
        for family in self._families:
            _tell(family, [json.dumps(loop.cost.to_json())])

    def handed_out(self, name: str, used: int) -> None:
        """A sample is about to be handed out: families know before the loop does, and no crash can hide it."""
        line = f"{used} {name}"
        for family in self._families:
            _tell(family, [line])
        self.told = len(line) + 2

    def grew(self, told: int) -> bool:
        """Whether a family's file has other than ``told`` bytes more than when this was last asked."""
        before, self._sizes = self._sizes, {family: _size(family) for family in self._families}
        return any(size != before.get(family, -1) + told for family, size in self._sizes.items())

    def costs(self) -> list[LoopCost]:
        """All loops that are known to belong together, each with the most samples it was seen with."""
        for family in self._families:
            self._learn(_family(family).values())
        own = {loop.cost.name: loop.cost for loop in self._loops}
        return [*own.values(), *(cost for name, cost in self._known.items() if name not in own)]

    def others(self, loop: PrivateLoop) -> list[LoopCost]:
        """What came along with states that were loaded; of the loops made here, whose state ``loop`` holds."""
        own = {each.name for each in self._loops} - (loop.came_from - {loop.name})
        return [cost for cost in self.costs() if cost.name not in own]

    def epsilon(self, delta: float) -> float:
        """ε of all of them, as if all were on the same people; infinite if one was seeded."""
        return epsilon_of(self.costs(), delta)

    def to_json(self) -> dict[str, Any]:
        """What leaves with a state. Whoever continues from it is counted here, and this loop there."""
        if not self._families:
            family = os.urandom(16).hex()
            _tell(family, [json.dumps(cost.to_json()) for cost in self.costs()])
            self._families.add(family)
        return {"families": sorted(self._families), "loops": [cost.to_json() for cost in self.costs()]}

    def load(self, data: Any) -> None:
        """A state of another loop was loaded here: what it cost came along."""
        try:
            families = [str(family) for family in data["families"]]
            costs = [LoopCost.from_json(cost) for cost in data["loops"]]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the state's record of its spending cannot be read ({type(error).__name__})."
            ) from None
        if not families or not all(is_path_name(family) for family in families):
            raise DataError("the state's record of its spending names no family; it cannot be continued from.")
        own = {loop.cost.name for loop in self._loops}
        self._learn(cost for cost in costs if cost.name not in own)
        fresh = set(families) - self._families
        for family in fresh:
            self._learn(cost for name, cost in _family(family).items() if name not in own)
        self._families |= fresh
        for family in self._families:
            _tell(family, [json.dumps(cost.to_json()) for cost in self.costs()])

    def keep_promises(self) -> None:
        """Let each loop of this process plan no more than its budget affords after what was loaded."""
        for loop in self._loops:
            loop.keep_promise()

    def _learn(self, costs: Iterable[LoopCost]) -> None:
        for cost in costs:
            known = self._known.get(cost.name)
            if known is None or cost.used > known.used:
                self._known[cost.name] = cost


def origins(data: Any) -> set[str]:
    """The loops whose releases a state is made of: all that it tells of, if it does not say."""
    told = data.get("of")
    return {str(name) for name in (told if isinstance(told, list) else [cost["loop"] for cost in data["loops"]])}


def epsilon_of(costs: Iterable[LoopCost], delta: float) -> float:
    """ε of loops together.

    >>> epsilon_of([], 1e-5)
    0.0
    """
    from quietgrad.privacy.accounting import account

    known = list(costs)
    if not all(cost.private for cost in known):
        return math.inf
    spent = [cost for cost in known if cost.used]
    relations = {cost.relation for cost in known}
    if len(relations) > 1:
        raise ValueError(
            "get_epsilon: loops of this engine were made for different relations, which do not add up. Use one "
            "relation for all loops on the same records."
        )
    if len({cost.unit for cost in known}) > 1:
        raise ValueError(
            "get_epsilon: some loops of this engine were about records and some about people, which do not add "
            "up. Use another engine for each."
        )
    events = [event for event in (cost.event for cost in spent) if event is not None]
    return account(composed(events), delta=delta, relation=relations.pop()) if events else 0.0


def _path(family: str) -> Path:
    return KeyFile.directory().parent / "loops" / family


def _size(family: str) -> int:
    try:
        return _path(family).stat().st_size
    except OSError:
        return -1


def _tell(family: str, lines: list[str]) -> None:
    path = _path(family)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Each line ends what a crash may have torn before it.
        append_privately(path, "".join(f"\n{line}\n" for line in lines).encode())
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({reason(error)}), so nobody could tell what loops that continue from one "
            "state cost together; make room there, or set QUIETGRAD_STATE. Nothing was handed out."
        ) from None


def _family(family: str) -> dict[str, LoopCost]:
    """The loops of a family by name. A line that a crash tore was never acted on."""
    costs: dict[str, LoopCost] = {}
    try:
        lines = read_text(_path(family), most=_MOST).split("\n")[:-1]
    except FileNotFoundError:  # the state was made on another machine: what is known came with it
        return costs
    for line in lines:
        try:
            if line.startswith("{"):
                told = parse_json(line)
            else:
                used, name = line.split(" ")
                if int(used) > costs[name].used:
                    costs[name] = replace(costs[name], used=int(used))
                continue
        except (KeyError, TypeError, ValueError):
            continue
        try:
            cost = LoopCost.from_json(told)
        except (KeyError, TypeError, ValueError):  # whole, and not to be read: passed over it would cost nothing
            raise DataError(
                f"{_path(family)}: a loop is written down there that this version cannot read, so nobody can tell "
                "what loops that continue from one state cost together; use the version that wrote it."
            ) from None
        before = costs.get(cost.name)
        costs[cost.name] = cost if before is None or cost.used > before.used else before
    return costs
