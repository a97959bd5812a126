"""Settings by name: what a command line or a plan file says becomes the fields of a dataclass, by their types.

Both speak through the one parser here, so that both accept the same: a command line has texts, a plan file texts
and numbers, and a text is read the same way wherever it stands. What neither can express is refused. A field's type
also says its range (:data:`Count`, :data:`Positive`, …), which :func:`check_fields` holds it to.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from quietgrad.core.errors import SettingError
from quietgrad.core.sanitize import did_you_mean, sanitize

Readers = Mapping[Any, Callable[[Any], Any]]
"""For types that are themselves made from settings: what reads one from a text or a table."""

_SHOWN = 60  # characters of a value in an error
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "text"}


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
            interval = f"{'[' if self.closed else '('}{self.low:g}, {self.high:g}]"
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
    quietgrad.core.errors.SettingError: momentum=1.0: must be in [0, 1].
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


def has_type(value: object, wanted: Any) -> bool:
    """Whether a value of a TOML or JSON file is of a type.

    A whole number is a number too, unless it is beyond the floats. Neither true nor false is one.

    >>> has_type([1, 2.5], list[float]), has_type(True, int), has_type(None, str | None), has_type([1], list[str])
    (True, False, True, False)
    """
    if get_origin(wanted) in (Union, types.UnionType):
        return any(has_type(value, option) for option in get_args(wanted))
    if get_origin(wanted) is list:
        return isinstance(value, list) and all(has_type(item, get_args(wanted)[0]) for item in value)
    if wanted in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000
        return whole or (wanted is float and isinstance(value, float))
    if isinstance(value, datetime):  # which Python takes for a date
        return wanted is datetime
    return isinstance(value, wanted)


def check_types(table: object, where: str, allowed: Mapping[str, Any], *, others: bool = False) -> dict[str, Any]:
    """Return a table of a TOML or JSON file if each of its values has the type that ``allowed`` states.

    Other keys are refused unless ``others``.

    >>> check_types({"steps": "3"}, "[plan]", {"steps": int})
    Traceback (most recent call last):
    ValueError: [plan] steps='3': must be a whole number.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where} must be a table.")
    for key, value in table.items():
        if key not in allowed and others:
            continue
        if key not in allowed:
            raise ValueError(f"{where} has no setting {key!r}; it has {', '.join(allowed)}.")
        if not has_type(value, allowed[key]):
            shown = sanitize(repr(value), most=_SHOWN)
            raise ValueError(f"{where} {key}={shown}: must be {_type_in_words(allowed[key])}.")
    return dict(table)


def _type_in_words(wanted: Any) -> str:
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_in_words(each) for each in get_args(wanted)))
    if get_origin(wanted) is list:
        return f"a list, each {_type_in_words(get_args(wanted)[0])}"
    return {**_WORDS, str: "a text", dict: "a table", date: "a date"}.get(wanted, str(wanted))


def build_dataclass(
    name: str,
    kind: type,
    settings: Mapping[str, object],
    readers: Readers | None = None,
    *,
    ready: Mapping[str, object] | None = None,
    hidden: Sequence[str] = (),
) -> Any:
    """An object of the dataclass ``kind``, called ``name`` in errors.

    Fields that are ``ready`` have their values already; they and the ``hidden`` ones cannot be set by name.

    >>> from quietgrad.methods.dp_sgd import DPGD
    >>> build_dataclass("dp-gd", DPGD, {"steps": "1e2", "learning-rate": 4}) == DPGD(steps=100, learning_rate=4.0)
    True
    """
    ready = ready or {}
    known = {key: wanted for key, wanted in fields_of(kind).items() if key not in ready and key not in hidden}
    values = {}
    for key, given in settings.items():
        field = key.strip().replace("-", "_")
        if field not in known:
            near = did_you_mean(field, known)
            raise ValueError(f"{name} has no setting {field!r}; it has {', '.join(known)}.{near}")
        if field in values:
            raise ValueError(f"{name}: {field!r} is set twice.")
        values[field] = parse_setting(field, given, known[field], readers)
    try:
        return kind(**values, **ready)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def parse_setting(key: str, given: object, wanted: object, readers: Readers | None = None) -> Any:
    """``given``, a text or a value of a plan file, as a value of type ``wanted``.

    >>> parse_setting("steps", "1e3", int), parse_setting("zeta", "none", float | None)
    (1000, None)
    >>> parse_setting("steps", True, int)
    Traceback (most recent call last):
    quietgrad.core.errors.SettingError: steps=True: must be a whole number.
    """
    options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    readers = readers or {}
    for option in sorted(options, key=lambda option: option is str):  # any text is a text: that comes last
        if option in readers and (isinstance(given, Mapping) or str not in options):
            return readers[option](given)
        try:
            return _of_text(given.strip(), option) if isinstance(given, str) else _of_value(given, option)
        except (ValueError, OverflowError):
            continue
    raise SettingError(f"{{{key}}}: must be {_describe(options)}.", **{key: given})


def _of_text(text: str, wanted: object) -> Any:
    low = text.lower()
    if wanted is type(None) and low in ("none", ""):
        return None
    if wanted is bool and low in ("true", "yes", "1", "false", "no", "0"):
        return low in ("true", "yes", "1")
    if wanted is int or wanted is float:
        return _of_value(float(text), wanted)
    if wanted is str:
        return text
    if get_origin(wanted) is Literal:
        for choice in get_args(wanted):
            if text == str(choice):
                return choice
    raise ValueError


def _of_value(value: object, wanted: object) -> Any:
    if isinstance(value, bool) or value is None:
        if isinstance(value, wanted if isinstance(wanted, type) and wanted not in (int, float) else ()):
            return value
    elif wanted is float and isinstance(value, int | float):
        return float(value)
    elif wanted is int and isinstance(value, int | float) and math.isfinite(value) and int(value) == value:
        return int(value)
    raise ValueError


def _describe(options: Sequence[object]) -> str:
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words.extend(repr(choice) for choice in get_args(option))
        elif option in _WORDS:
            words.append(_WORDS[option])
    return " or ".join(words) or "set in Python; a command line or a plan file cannot express it"
