"""Where an own loop stands, in one safetensors file: states, what else the user adds, and what it cost, sealed.

Tensors go to tensors, everything else to the file's JSON header. Nothing is pickled, so loading runs no code.
The seal is a MAC of all of it under a key of this user: a cost that was edited, or put beside other weights, is
not believed.
"""

from __future__ import annotations

import hmac
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quietgrad.errors import DataError
from quietgrad.files import parse_json, read_bytes, write_atomically
from quietgrad.objectives.networks.records import bytes_of
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Relation
from quietgrad.privacy.events import Event, composed
from quietgrad.privacy.ledger_state import fingerprint

if TYPE_CHECKING:
    from quietgrad.torch.loops import Loop

FORMAT = 2
_HEADER = "quietgrad loop"


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
    from quietgrad.privacy.accounting import account

    known = list(costs)
    if not all(cost.private for cost in known):
        return math.inf
    relations = {cost.relation for cost in known}
    if len(relations) > 1:
        raise ValueError(
            "get_epsilon: loops of this engine were made for different relations, which do not add up. Use one "
            "relation for all loops on the same records."
        )
    if len({cost.plan.unit for cost in known}) > 1:
        raise ValueError(
            "get_epsilon: some loops of this engine were about records and some about people, which do not add "
            "up. Use another engine for each."
        )
    events = [event for event in (cost.event for cost in known) if event is not None]
    return account(composed(events), delta=delta, relation=relations.pop()) if events else 0.0


def seal(costs: Iterable[LoopCost], beside: Iterable[bytes | memoryview] = ()) -> dict[str, Any]:
    """What loops cost, and a MAC of it and of what lies beside it, under a key of this user."""
    told = json.dumps([cost.to_json() for cost in costs])
    return {"loops": told, "seal": fingerprint([_HEADER.encode(), told.encode(), *beside])}


def unsealed(sealed: Any, beside: Iterable[bytes | memoryview] = ()) -> list[LoopCost]:
    """The costs, if nothing about them was changed since they were sealed here."""
    try:
        told, found = str(sealed["loops"]), str(sealed["seal"])
        if hmac.compare_digest(found, fingerprint([_HEADER.encode(), told.encode(), *beside])):
            return [LoopCost.from_json(cost) for cost in parse_json(told)]
    except (KeyError, TypeError, ValueError):
        pass
    raise DataError(
        "the record of what this state cost does not bear the seal of this user: it was edited, or written by "
        "another user or on another machine. Load the weights by load_state_dict, and let a ledger keep what was "
        "spent."
    )


def save(path: Any, content: dict[str, Any], costs: Iterable[LoopCost]) -> None:
    """Write ``content`` and what it cost to a path or an open binary file."""
    from safetensors.torch import save as to_bytes

    tensors: dict[str, Tensor] = {}
    packed = json.dumps(pack(content, "checkpoint", tensors))
    header = {"format": FORMAT, "spent": seal(costs, _beside(packed, tensors)), "content": packed}
    data = to_bytes(tensors, metadata={_HEADER: json.dumps(header)})
    if hasattr(path, "write"):
        path.write(data)
    else:
        write_atomically(Path(os.fspath(path)), data)


def load(path: Any) -> tuple[dict[str, Any], list[LoopCost]]:
    """The content and what it cost; whatever is not a whole file of ours is refused.

    >>> import io, tempfile, torch, unittest.mock
    >>> state, file = tempfile.TemporaryDirectory(), io.BytesIO()
    >>> with unittest.mock.patch.dict(os.environ, QUIETGRAD_STATE=state.name):
    ...     save(file, {"epoch": 3, "sizes": (1, 2), "w": torch.ones(2)}, [])
    ...     _ = file.seek(0)
    ...     load(file)
    ({'epoch': 3, 'sizes': (1, 2), 'w': tensor([1., 1.])}, [])
    >>> state.cleanup()
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    name = getattr(path, "name", "the file") if hasattr(path, "read") else os.fspath(path)
    try:
        data: bytes = path.read() if hasattr(path, "read") else read_bytes(path)
        # The header of a safetensors file: its length in 8 bytes, then JSON.
        length = int.from_bytes(data[:8], "little")
        header = parse_json(parse_json(data[8 : 8 + length])["__metadata__"][_HEADER])
        if header["format"] != FORMAT:
            raise DataError(f"{name}: checkpoint format {header['format']!r}; this version reads {FORMAT}.")
        tensors = from_bytes(data)
        costs = unsealed(header["spent"], _beside(header["content"], tensors))
        content = unpack(parse_json(header["content"]), tensors)
        if not isinstance(content, dict):
            raise TypeError
        return content, costs
    except FileNotFoundError:
        raise DataError(f"{name}: there is no checkpoint; save one with save_checkpoint first.") from None
    except DataError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{name}: not a whole checkpoint of save_checkpoint ({type(error).__name__}). Pickled files are not "
            "opened, because they may run code, and do not say what they cost."
        ) from None


def _beside(packed: str, tensors: Mapping[str, Tensor]) -> Iterable[bytes | memoryview]:
    yield packed.encode()
    for name in sorted(tensors):
        yield name.encode()
        yield from bytes_of(tensors[name])


def pack(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON values; copies of its tensors go to ``tensors``."""
    if isinstance(value, Tensor):
        # A copy: tensors that share memory cannot be told apart in the file.
        tensors[place] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": place}
    if isinstance(value, dict):
        items = [[_key(key), pack(item, f"{place}.{k}", tensors)] for k, (key, item) in enumerate(value.items())]
        return {"dict": items}
    if isinstance(value, tuple | list):
        items = [pack(item, f"{place}.{k}", tensors) for k, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise TypeError(
        f"a checkpoint cannot hold a {type(value).__name__}: it takes tensors, numbers, texts, lists and "
        "dictionaries, and nothing is pickled."
    )


def _key(key: Any) -> Any:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"a key of type {type(key).__name__} in a checkpoint: must be a text or a whole number.")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`pack` was given."""
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value].clone()
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in value}
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value)
    if kind == "list":
        return [unpack(item, tensors) for item in value]
    if kind == "plain":
        return value
    raise ValueError(f"{kind!r}: not a kind of value.")
