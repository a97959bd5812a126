"""Settings by name: what a command line or a plan file says becomes the fields of a dataclass, by their types.

Both speak through the one parser here, so that both accept the same: a command line has texts, a plan file texts
and numbers, and a text is read the same way wherever it stands. What neither can express is refused.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any, Literal, Union, get_args, get_origin

from quietgrad.core.errors import SettingError
from quietgrad.core.sanitize import did_you_mean, sanitize
from quietgrad.core.settings import fields_of

Readers = Mapping[Any, Callable[[Any], Any]]
"""For types that are themselves made from settings: what reads one from a text or a table."""

_SHOWN = 60  # characters of a value in an error
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "text"}


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
