"""What is run on what: the algorithm and the objective that a plan file names, each setting checked by its type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_OBJECTIVES = {"logistic": "binary", "hinge": "binary", "multinomial": "multiclass"}
_KNOBS = {"huber": "threshold", "hinge": "smoothing"}


def needed(section: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a setting that must be there."""
    if key not in section:
        raise ValueError(f"{where} needs {key!r}.")
    return section[key]


def algorithm_of(settings: dict[str, Any]) -> Any:
    """The algorithm that the section ``[algorithm]`` describes."""
    from quietgrad.algorithms import by_name

    kind = by_name(needed(settings, "name", "[algorithm]"))
    settings.pop("name")
    _check_settings(kind, settings, f"[algorithm] {kind.name}")
    if isinstance(settings.get("oracle"), dict):
        settings["oracle"] = _oracle(settings["oracle"])
    return kind(**settings)


def _check_settings(kind: Any, settings: Mapping[str, Any], where: str, never: tuple[str, ...] = ()) -> None:
    """Refuse settings that the dataclass ``kind`` does not have, and values of another type than it declares."""
    hints = get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind) if f.name not in never]
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{where} has no setting {key!r}; it has {', '.join(known)}.")
        options = get_args(hints[key]) if get_origin(hints[key]) in (Union, UnionType) else (hints[key],)
        plain = [option for option in options if option in (int, float, bool, str) or get_origin(option) is Literal]
        if len(plain) == len([option for option in options if option is not type(None)]) and not any(
            _fits(value, option) for option in plain
        ):
            raise ValueError(f"{where} {key}={value!r}: is not of the type that is needed.")


def _fits(value: Any, option: Any) -> bool:
    if get_origin(option) is Literal:
        return value in get_args(option)
    if isinstance(value, bool):
        return option is bool
    return isinstance(value, (int, float) if option is float else option)


def _oracle(settings: dict[str, Any]) -> Any:
    from quietgrad.oracles import spider

    kinds = {"spider": spider.Spider, "adaptive-spider": spider.AdaptiveSpider}
    values = dict(settings)
    name = values.pop("name", "adaptive-spider")
    if name not in kinds:
        raise ValueError(f"oracle {name!r}: must be {' or '.join(kinds)}.")
    _check_settings(kinds[name], values, f"oracle {name}")
    return kinds[name](**values)


def objective_of(settings: dict[str, Any], data: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The objective of ``[objective]``, and the public facts that a saved model needs to score records."""
    from quietgrad import objectives

    name = needed(settings, "name", "[objective]")
    if name not in ("logistic", "multinomial", "huber", "squared", "hinge"):
        raise ValueError(f"[objective] name={name!r}: must be logistic, multinomial, huber, squared or hinge.")
    settings.pop("name")
    kind = getattr(objectives, str(name).capitalize())
    _check_settings(kind, settings, f"[objective] {name}", never=("transform", "classes"))
    task = _OBJECTIVES.get(name, "regression")
    classes = data.get("classes", [0, 1] if task == "binary" else None)
    if name == "multinomial":
        settings["classes"] = len(needed(data, "classes", "[data] of a multinomial objective"))
    penalty = settings.pop("regularizer", None)
    free = (settings["classes"] if name == "multinomial" else 1) if settings.get("intercept") else 0
    if penalty is not None:
        settings["regularizer"] = _regularizer(str(penalty), free)
    objective = kind(**settings)
    knob = _KNOBS.get(name)
    model = {
        "objective": name if knob is None else f"{name}:{getattr(objective, knob)!r}",
        "regularizer": penalty,
        "intercept": objective.intercept,
        "row_bound": objective.row_bound,
        "rows": objective.rows,
        "features": data.get("features"),
        "task": task,
        "classes": None if classes is None else len(classes),
        "class_names": None if classes is None else [str(label) for label in classes],
    }
    return objective, model


def _regularizer(text: str, unpenalized: int) -> Any:
    from quietgrad import objectives

    name, _, strength = text.partition(":")
    kinds = {"l2": objectives.L2, "nonconvex": objectives.Nonconvex}
    try:
        return kinds[name](float(strength), unpenalized=unpenalized)
    except (KeyError, ValueError):
        raise ValueError(f"regularizer={text!r}: must be l2:STRENGTH or nonconvex:STRENGTH.") from None


def reading_of(data: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The arguments of :func:`quietgrad.data.load` that a plan fixes."""
    reading = {key: data[key] for key in ("classes", "label", "schema") if key in data}
    if task == "binary":
        reading.setdefault("classes", [0, 1])
    return {**reading, "n_features": data.get("features"), **({"task": task} if task == "regression" else {})}
