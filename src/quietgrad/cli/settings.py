"""Algorithms from the command line: a name, common flags and ``--set KEY=VALUE``, typed by their dataclasses."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from quietgrad.algorithms import by_name


def algorithm_from(name: str, flags: Mapping[str, Any], settings: Sequence[str] = ()) -> Any:
    """The algorithm called ``name`` with the flags that were given and the settings ``KEY=VALUE``.

    >>> algorithm_from("dp-srm", {"steps": 100, "gamma": None}, ["joint-clip=true", "first_batch_size=400"])
    DPSRM(steps=100, ..., joint_clip=True, ..., first_batch_size=400, ...)
    """
    kind = _class(name)
    known = fields_of(kind)
    values: dict[str, Any] = {}
    for text in settings:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise typer.BadParameter(f"{text!r}: must be KEY=VALUE.", param_hint="--set")
        _check_known(name, key, known, "--set")
        values[key] = parse(key, value.strip(), known[key])
    for key, given in flags.items():
        if given is not None:
            _check_known(name, key, known, "--" + key.replace("_", "-"))
            values[key] = parse(key, given, known[key]) if isinstance(given, str) else given
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def fields_of(kind: Any) -> dict[str, Any]:
    """The settings of an algorithm and their types.

    >>> from quietgrad.algorithms.dp_gd import DPGD
    >>> list(fields_of(DPGD))
    ['steps', 'learning_rate', 'clip', 'momentum', 'returns']
    """
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def parse(key: str, text: str, wanted: Any) -> Any:
    """``text`` as a value of type ``wanted``.

    >>> parse("steps", "1e3", int), parse("zeta", "none", float | None), parse("returns", "last", Literal["last"])
    (1000, None, 'last')
    """
    options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    for option in options:
        try:
            return _one(text, option)
        except ValueError:
            continue
    raise typer.BadParameter(f"{key}={text!r}: must be {_describe(options)}.")


def _one(text: str, wanted: Any) -> Any:
    low = text.lower()
    if wanted is type(None) and low in ("none", ""):
        return None
    if wanted is bool and low in ("true", "yes", "1", "false", "no", "0"):
        return low in ("true", "yes", "1")
    if wanted is int:
        number = float(text)
        if not math.isfinite(number) or int(number) != number:
            raise ValueError
        return int(number)
    if wanted is float:
        return float(text)
    if wanted is str:
        return text
    if get_origin(wanted) is Literal:
        for choice in get_args(wanted):
            if text == str(choice):
                return choice
    raise ValueError


def _describe(options: Sequence[Any]) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none", str: "text"}
    said: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            said.extend(repr(choice) for choice in get_args(option))
        elif option in words:
            said.append(words[option])
    return " or ".join(said) or "set in Python; the command line cannot express it"


def _class(name: str) -> Any:
    try:
        return by_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="algorithm") from None


def _check_known(name: str, key: str, known: Mapping[str, Any], hint: str) -> None:
    if key not in known:
        settable = ", ".join(known)
        raise typer.BadParameter(f"{name} has no setting {key!r}; it has {settable}.", param_hint=hint)
