"""Ranges of settings: a field's type says which values it may have (:data:`Count`, :data:`Positive`, …).

:func:`check_fields` holds a dataclass to them.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from quietgrad.core.errors import SettingError


@dataclasses.dataclass(frozen=True)
class Within:
    """A range of numbers: low ≤ value ≤ high, or low < value if not ``closed``; whole ones only if ``whole``."""

    low: float
    high: float = math.inf
    closed: bool = True
    whole: bool = False

    def check(self, name: str, value: object) -> None:
        """Raise ``ValueError`` unless ``value``, called ``name``, is a number in the range."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise SettingError(f"{{{name}}}: must be a {'whole ' * self.whole}number.", **{name: value})
        try:
            number = float(value)
        except OverflowError:
            raise SettingError(f"{name}: the number is too large.") from None
        if self.whole and (not number.is_integer() or number < self.low):
            raise SettingError(f"{{{name}}}: must be a whole number ≥ {self.low}.", **{name: value})
        if not (self.low <= number if self.closed else self.low < number) or not number <= self.high:
            high = f"{self.high:g}"  # 1 − 1e-9 reads "1", which is not in the range
            interval = (
                f"{'[' if self.closed else '('}{self.low:g}, {high}{']' if float(high) == self.high else ')'}"
            )
            raise SettingError(f"{{{name}}}: must be in {interval}.", **{name: value})


Count = Annotated[int, Within(1, whole=True)]
Positive = Annotated[float, Within(0.0, closed=False)]
NotNegative = Annotated[float, Within(0.0)]
Fraction = Annotated[float, Within(0.0, 1.0 - 1e-9)]
PositiveFraction = Annotated[float, Within(0.0, 1.0 - 1e-9, closed=False)]


def field_values(settings: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields by name, in their order, without copying them.

    >>> field_values(Within(0.0, 1.0))["high"]
    1.0
    """
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def check_fields(settings: object) -> None:
    """Raise ``ValueError`` unless each field of a dataclass is in the range, or among the choices, of its type.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> DPGD(momentum=1.0)
    Traceback (most recent call last):
    quietgrad.core.errors.SettingError: momentum=1.0: must be in [0, 1).
    """
    kind: Any = type(settings)
    limits, values = _limits(kind), field_values(settings)
    for name, (ranges, choices, optional) in limits.items():
        value = values[name]
        if choices and value not in choices:
            raise SettingError(f"{{{name}}}: must be one of {', '.join(map(str, choices))}.", **{name: value})
        for limit in () if optional and value is None else ranges:
            limit.check(name, value)


@cache
def _limits(kind: Any) -> dict[str, tuple[list[Within], tuple[object, ...], bool]]:
    """The ranges of numbers, the choices of texts, and whether ``None`` will do, as the types of fields state."""
    limits_of = {}
    try:
        hints = get_type_hints(kind, include_extras=True)
    except (NameError, AttributeError, TypeError):  # a user's class whose types are known only where it was written
        return {}
    for name, hint in hints.items():
        options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        ranges = [limit for option in options for limit in getattr(option, "__metadata__", ())]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        limits_of[name] = (ranges, choices, type(None) in options)
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: limits for name, limits in limits_of.items() if name in names and any(limits[:2])}


def fields_of(kind: type) -> dict[str, Any]:
    """The settings of a dataclass and their types.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> list(fields_of(DPGD))
    ['steps', 'learning_rate', 'clip', 'momentum', 'returns', 'clipping']
    """
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
