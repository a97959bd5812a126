"""The part of an algorithm that a plan is made from: its public settings, and the releases they lead to."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol, runtime_checkable

from quietgrad.core.accounting.budget import Budget
from quietgrad.core.noise.mechanisms import Mechanism
from quietgrad.core.plans.slots import Schedule
from quietgrad.core.settings import check_fields, field_values


@runtime_checkable
class HasConfig(Protocol):
    """A setting that is made of settings: an oracle, a learning rate, which ranges of a table are estimated."""

    def config(self) -> dict[str, Any]:
        """Its settings as JSON values."""
        ...


def config_of(settings: Any) -> dict[str, Any]:
    """The public settings of a frozen dataclass as JSON values."""

    def plain(value: object) -> object:
        if isinstance(value, HasConfig):
            return value.config()
        if isinstance(value, Mechanism):
            text = value.to_json()
            return {"kind": text} if isinstance(text, str) else text  # a bare kind would be read as a name of noise
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return list(value) if isinstance(value, tuple) else value

    values = {name: plain(value) for name, value in field_values(settings).items()}
    if values.get("clipping") in ("flat", {"kind": "flat"}):
        del values["clipping"]  # what settings without it mean
    for name in ("noise_schedule", "clip_schedule"):
        if values.get(name, 0) is None:
            del values[name]
    return values


class HasSchedule(Protocol):
    """Public settings, each in the range of its type, and the releases they lead to: enough to make a plan."""

    name: ClassVar[str]
    private: ClassVar[bool] = True
    whole_epochs: ClassVar[bool] = True
    """Whether a plan of random allocation that ends within an epoch, which is paid for whole, is refused."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def condition(self) -> str | None:
        """The clause under which the ε of its releases holds; ``None`` where the library enforces all of it."""
        return None

    def schedule(self, n_public: int) -> Schedule:
        """The releases of a run on ``n_public`` records, known before any data."""
        ...

    def config(self) -> dict[str, Any]:
        """The public settings as JSON values."""
        return config_of(self)

    def check_budget(self, budget: Budget) -> None:
        """Raise if there is no proof for such a budget; before any noise is calibrated."""
        return
