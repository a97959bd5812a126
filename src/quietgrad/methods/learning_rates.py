"""Step sizes: a number, or one of these schedules wherever a number is taken.

A rate maps the step t = 0, 1, … of a run of T steps to η_t. All are public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from quietgrad.core.errors import SettingError
from quietgrad.core.settings import Count, Within, check_fields
from quietgrad.named_settings import build_dataclass


@dataclass(frozen=True)
class LearningRate:
    """Base of step-size schedules; η_t = ``start``."""

    start: float

    def __post_init__(self) -> None:
        if not 0.0 < self.start < math.inf:
            raise SettingError("{learning_rate}: must be a finite number > 0.", learning_rate=self.start)
        check_fields(self)

    def __call__(self, step: int, steps: int) -> float:
        return self.start

    def config(self) -> dict[str, Any]:
        """The schedule's name and numbers."""
        return {"schedule": type(self).__name__, **asdict(self)}


class Constant(LearningRate):
    """η_t = c.

    >>> Constant(0.5)(step=10, steps=100)
    0.5
    """


class Inverse(LearningRate):
    """η_t = c/(t+1)."""

    def __call__(self, step: int, steps: int) -> float:
        return self.start / (step + 1.0)


class InverseSqrt(LearningRate):
    """η_t = c/√(t+1)."""

    def __call__(self, step: int, steps: int) -> float:
        return self.start / math.sqrt(step + 1.0)


@dataclass(frozen=True)
class StepDecay(LearningRate):
    """η_t = c·factor^⌊t/every⌋."""

    every: Count = 100
    factor: Annotated[float, Within(0.0, 1.0, closed=False)] = 0.5

    def __call__(self, step: int, steps: int) -> float:
        return float(self.start * self.factor ** (step // self.every))


@dataclass(frozen=True)
class Linear(LearningRate):
    """From c down to c·end on a straight line."""

    end: float = 0.02

    def __call__(self, step: int, steps: int) -> float:
        return self.start * (1.0 - (1.0 - self.end) * step / max(1, steps - 1))


@dataclass(frozen=True)
class Cosine(LearningRate):
    """From c down to c·end on half a cosine."""

    end: float = 0.02

    def __call__(self, step: int, steps: int) -> float:
        fall = 0.5 * (1.0 + math.cos(math.pi * step / max(1, steps - 1)))
        return self.start * (self.end + (1.0 - self.end) * fall)


RATES: dict[str, type[LearningRate]] = {
    "constant": Constant,
    "inverse": Inverse,
    "inverse-sqrt": InverseSqrt,
    "step": StepDecay,
    "linear": Linear,
    "cosine": Cosine,
}


def as_rate(given: float | str | LearningRate | Mapping[str, object]) -> LearningRate:
    """A rate from a number, a schedule, text such as ``"cosine:0.5"``, or a table of its ``schedule`` and numbers.

    >>> as_rate(0.1), as_rate("cosine:0.5").start
    (Constant(start=0.1), 0.5)
    >>> as_rate({"schedule": "Linear", "start": 1.0, "end": 0.1})
    Linear(start=1.0, end=0.1)
    """
    if isinstance(given, LearningRate):
        return given
    if isinstance(given, Mapping):  # as results keep it
        numbers = dict(given)
        name = str(numbers.pop("schedule", None))
        named = {**RATES, **{kind.__name__: kind for kind in RATES.values()}}
        if name not in named:
            raise ValueError(f"schedule={name!r}: must be one of {', '.join(RATES)}.")
        rate: LearningRate = build_dataclass(f"schedule {name}", named[name], numbers)
        return rate
    if not isinstance(given, str):
        return Constant(float(given))
    name, _, start = given.partition(":")
    if name not in RATES:
        raise SettingError(
            f"{{learning_rate}}: must be a number or NAME:NUMBER, NAME of {', '.join(RATES)}.", learning_rate=given
        )
    try:
        return RATES[name](float(start or 1.0))
    except ValueError:
        raise SettingError(
            f"{{learning_rate}}: {start!r} must be a finite number > 0.", learning_rate=given
        ) from None
