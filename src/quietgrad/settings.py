"""Settings by name: what a command line or a plan file says becomes the fields of a dataclass, by their types.

Both speak through the one parser here, so that both accept the same: a command line has texts, a plan file texts
and numbers, and a text is read the same way wherever it stands. What neither can express is refused.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quietgrad.sanitize import did_you_mean, sanitize

Readers = Mapping[Any, Callable[[Any], Any]]
"""For types that are themselves made from settings: what reads one from a text or a table."""

_SHOWN = 60  # characters of a value in an error
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "text"}


def fields_of(kind: Any) -> dict[str, Any]:
    """The settings of a dataclass and their types.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
    >>> list(fields_of(DPGD))
    ['steps', 'learning_rate', 'clip', 'momentum', 'returns']
    """
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def build_dataclass(
    name: str,
    kind: Any,
    settings: Mapping[str, Any],
    readers: Readers | None = None,
    *,
    ready: Mapping[str, Any] | None = None,
    hidden: Sequence[str] = (),
) -> Any:
    """An object of the dataclass ``kind``, called ``name`` in errors.

    Fields that are ``ready`` have their values already; they and the ``hidden`` ones cannot be set by name.

    >>> from quietgrad.algorithms.dp_sgd import DPGD
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
        values[field] = read(field, given, known[field], readers)
    try:
        return kind(**values, **ready)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def read(key: str, given: Any, wanted: Any, readers: Readers | None = None) -> Any:
    """``given``, a text or a value of a plan file, as a value of type ``wanted``.

    >>> read("steps", "1e3", int), read("steps", 1e3, int), read("zeta", "none", float | None)
    (1000, 1000, None)
    >>> read("steps", True, int)
    Traceback (most recent call last):
    ValueError: steps=True: must be a whole number.
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
    raise ValueError(f"{key}={sanitize(repr(given), most=_SHOWN)}: must be {_describe(options)}.")


def _of_text(text: str, wanted: Any) -> Any:
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


def _of_value(value: Any, wanted: Any) -> Any:
    if isinstance(value, bool) or value is None:
        if isinstance(value, wanted if isinstance(wanted, type) and wanted not in (int, float) else ()):
            return value
    elif wanted is float and isinstance(value, int | float):
        return float(value)
    elif wanted is int and isinstance(value, int | float) and math.isfinite(value) and int(value) == value:
        return int(value)
    raise ValueError


def _describe(options: Sequence[Any]) -> str:
    said: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            said.extend(repr(choice) for choice in get_args(option))
        elif option in _WORDS:
            said.append(_WORDS[option])
    return " or ".join(said) or "set in Python; a command line or a plan file cannot express it"
