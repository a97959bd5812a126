"""Schedules of noise and of clipping bounds: a factor for each epoch, public and fixed before a run.

A noise schedule multiplies the noise multiplier of a plan. Epochs of equal factors are one *stretch*, a slot of its
own, so the accountant composes releases of different noise, and calibration finds the one number that all factors
multiply. A clip schedule multiplies C. Noise is relative to C, so a clip schedule changes no ε.

They have the names and settings of ``opacus.schedulers``. Opacus' change an optimizer while it runs; these are
given to the run, because its whole cost is charged before its first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from numbers import Real
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from quietgrad.core.errors import SettingError
from quietgrad.core.settings import Count, Positive, check_fields
from quietgrad.named_settings import build_dataclass

Stretches = tuple[tuple[int, float], ...]
"""Numbers of steps and their factor, in the order of the run."""
_MOST_LEVELS = 256  # slots of a plan that a certificate may hold
_Kind = TypeVar("_Kind", bound="EpochSchedule")


class EpochSchedule:
    """Base of schedules: a finite factor > 0 for each epoch, which are numbered from 0."""

    argument: ClassVar[str]
    """The argument that takes it."""

    def __new__(cls, *optimizer: object, **settings: object) -> Self:
        """Refuse Opacus' way to call it, with an optimizer."""
        if optimizer or "last_epoch" in settings:
            raise ValueError(
                f"{cls.__name__}: takes no optimizer and no last_epoch. A run is charged before its first step, so "
                f"its schedule is given beforehand: make_private(…, epochs=…, {cls.argument}={cls.__name__}(…))."
            )
        return super().__new__(cls)

    def factor(self, epoch: int) -> float:
        """The factor of an epoch."""
        raise NotImplementedError

    def stretches(self, steps: int, epoch_length: int) -> Stretches:
        """The factors of ``steps`` steps; neighbouring epochs of one factor are one stretch.

        >>> StepNoise(step_size=2, gamma=0.5).stretches(steps=11, epoch_length=2)
        ((4, 1.0), (4, 0.5), (3, 0.25))
        """
        starts = range(0, steps, epoch_length)
        epochs = [(min(epoch_length, steps - start), self._checked(k)) for k, start in enumerate(starts)]
        runs = groupby(epochs, key=lambda epoch: epoch[1])
        made = tuple((sum(count for count, _ in run), factor) for factor, run in runs)
        if len(made) > _MOST_LEVELS:
            raise SettingError(
                f"{self.argument}: has {len(made)} levels, and a plan holds at most {_MOST_LEVELS}. Let several "
                "epochs have one factor, for example by step_size."
            )
        return made

    def _checked(self, epoch: int) -> float:
        try:
            value: object = self.factor(epoch)
            number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            number = math.inf
        if not 0.0 < number < math.inf:
            raise SettingError(f"{self.argument}: the factor of epoch {epoch} must be a finite number > 0.")
        return number

    def config(self) -> dict[str, Any]:
        """The schedule's name and numbers."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}  # type: ignore[call-overload]
        return {"schedule": type(self).__name__, **plain}

    def step(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(
            f"{type(self).__name__}.step: the schedule is part of the plan, and the run follows it by itself. "
            "Leave the call out."
        )

    def get_noise_multiplier(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError("get_noise_multiplier: optimizer.noise_multiplier is that of the step in hand.")

    def get_max_grad_norm(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError("get_max_grad_norm: optimizer.max_grad_norm is that of the step in hand.")


class NoiseSchedule(EpochSchedule):
    """Base of schedules of noise."""

    argument: ClassVar[str] = "noise_schedule"


class ClipSchedule(EpochSchedule):
    """Base of schedules of clipping bounds."""

    argument: ClassVar[str] = "clip_schedule"


@dataclass(frozen=True, kw_only=True)
class _Exponential:
    gamma: Positive

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, epoch: int) -> float:
        return float(self.gamma**epoch)


@dataclass(frozen=True, kw_only=True)
class _Steps:
    step_size: Count
    gamma: Positive

    def __post_init__(self) -> None:
        check_fields(self)

    def factor(self, epoch: int) -> float:
        return float(self.gamma ** (epoch // self.step_size))


@dataclass(frozen=True, kw_only=True)
class _Factors:
    factors: Sequence[float]

    def __post_init__(self) -> None:
        given: object = self.factors
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise SettingError("{factors}: must be a list with a number for each epoch.", factors=given)
        object.__setattr__(self, "factors", tuple(given))
        if not self.factors:
            raise SettingError("{factors}: must hold a number for each epoch.", factors=[])

    def factor(self, epoch: int) -> float:
        return self.factors[min(epoch, len(self.factors) - 1)]


class ExponentialNoise(_Exponential, NoiseSchedule):
    """The noise multiplier is multiplied by ``gamma`` after every epoch.

    >>> ExponentialNoise(gamma=0.5).stretches(steps=6, epoch_length=2)
    ((2, 1.0), (2, 0.5), (2, 0.25))
    """


class StepNoise(_Steps, NoiseSchedule):
    """The noise multiplier is multiplied by ``gamma`` after every ``step_size`` epochs."""


class TableNoise(_Factors, NoiseSchedule):
    """The noise multiplier times the epoch's number in ``factors``; the last one is for all that follow."""


@dataclass(frozen=True, kw_only=True)
class LambdaNoise(NoiseSchedule):
    """The noise multiplier times ``noise_lambda(epoch)``, a function of the epoch's number alone."""

    noise_lambda: Callable[[int], float]

    def factor(self, epoch: int) -> float:
        return self.noise_lambda(epoch)

    def config(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(_NO_NUMBERS.format("LambdaNoise", "TableNoise", "noise_lambda"))


class ExponentialGradClip(_Exponential, ClipSchedule):
    """C is multiplied by ``gamma`` after every epoch."""


class StepGradClip(_Steps, ClipSchedule):
    """C is multiplied by ``gamma`` after every ``step_size`` epochs."""


class TableGradClip(_Factors, ClipSchedule):
    """C times the epoch's number in ``factors``; the last one is for all epochs that follow."""


@dataclass(frozen=True, kw_only=True)
class LambdaGradClip(ClipSchedule):
    """C times ``scheduler_function(epoch)``, a function of the epoch's number alone."""

    scheduler_function: Callable[[int], float]

    def factor(self, epoch: int) -> float:
        return self.scheduler_function(epoch)

    def config(self) -> NoReturn:
        """Not here: raises, with what to use."""
        raise ValueError(_NO_NUMBERS.format("LambdaGradClip", "TableGradClip", "scheduler_function"))


_NO_NUMBERS = (
    "{0}: the settings of an algorithm are kept as numbers, and a function has none. Give "
    "{1}(factors=[{2}(epoch) for epoch in range(epochs)])."
)
_KINDS: dict[str, type[EpochSchedule]] = {
    kind.__name__: kind
    for kind in (ExponentialNoise, StepNoise, TableNoise, ExponentialGradClip, StepGradClip, TableGradClip)
}


def read_schedule(given: object, kind: type[_Kind]) -> _Kind | None:
    """A schedule of ``kind``, or of a table of its ``schedule`` and numbers, as results keep it.

    >>> read_schedule({"schedule": "StepNoise", "step_size": 2, "gamma": 0.9}, NoiseSchedule)
    StepNoise(step_size=2, gamma=0.9)
    """
    if given is None or given == "none":
        return None
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        numbers = dict(given)
        made = _KINDS.get(str(numbers.pop("schedule", None)))
        if made is not None and issubclass(made, kind):
            ready = {"factors": numbers.pop("factors")} if "factors" in numbers else {}
            built: _Kind = build_dataclass(f"schedule {made.__name__}", made, numbers, ready=ready)
            return built
    known = ", ".join(name for name, each in _KINDS.items() if issubclass(each, kind))
    what = type(given).__name__ if isinstance(given, EpochSchedule) else repr(given)
    raise SettingError(f"{kind.argument}={what}: must be None or a schedule of this kind: {known}.")
