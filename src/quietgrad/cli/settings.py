"""Algorithms from the command line: a name, common flags and ``--set KEY=VALUE``, typed by their dataclasses."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from quietgrad.algorithms import by_name

_ORACLES = {"adaptive-spider": "AdaptiveSpider", "spider": "Spider", "mini-batch": "MiniBatch"}


def algorithm_from(
    name: str, flags: Mapping[str, Any], settings: Sequence[str] = (), oracle: str | None = None
) -> Any:
    """The algorithm called ``name`` with the flags that were given and the settings ``KEY=VALUE``.

    An algorithm that takes any oracle gets the one called ``oracle``, with settings ``oracle.KEY=VALUE`` and the
    flags that are the oracle's.

    >>> algorithm_from("dp-srm", {"steps": 100, "gamma": None}, ["joint-clip=true", "first_batch_size=400"])
    DPSRM(steps=100, ..., joint_clip=True, ..., first_batch_size=400, ...)
    >>> algorithm_from("perturbed-sgd", {"batch_size": 500}, ["oracle.kappa=0.01"], oracle="adaptive-spider")
    PerturbedSGD(oracle=AdaptiveSpider(batch_size=500, ..., kappa=0.01), ...)
    """
    kind = _class(name)
    known = fields_of(kind)
    if "oracle" in known:
        source = _oracle_class(oracle or "adaptive-spider")
        its = [text.partition(".")[2] for text in settings if text.startswith("oracle.")]
        own = {key: value for key, value in flags.items() if key not in known and key in fields_of(source)}
        flags = {**{key: value for key, value in flags.items() if key not in own}}
        settings = [text for text in settings if not text.startswith("oracle.")]
        made = build(oracle or "adaptive-spider", source, own, its)
        return build(name, kind, {**flags, "oracle": made}, settings)
    if oracle is not None:
        raise typer.BadParameter(f"{name} has its own oracle; perturbed-sgd takes any.", param_hint="--oracle")
    return build(name, kind, flags, settings)


def build(name: str, kind: Any, flags: Mapping[str, Any], settings: Sequence[str] = ()) -> Any:
    """An object of the dataclass ``kind``, called ``name`` in errors, from flags and ``KEY=VALUE`` settings."""
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


def _oracle_class(name: str) -> Any:
    if name not in _ORACLES:
        raise typer.BadParameter(f"{name!r}: must be one of {', '.join(_ORACLES)}.", param_hint="--oracle")
    from quietgrad.oracles import minibatch, spider

    return getattr(minibatch if name == "mini-batch" else spider, _ORACLES[name])


def _class(name: str) -> Any:
    try:
        return by_name(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="algorithm") from None


def _check_known(name: str, key: str, known: Mapping[str, Any], hint: str) -> None:
    if key not in known:
        settable = ", ".join(known)
        raise typer.BadParameter(f"{name} has no setting {key!r}; it has {settable}.", param_hint=hint)
