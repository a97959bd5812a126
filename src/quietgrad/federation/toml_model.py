"""What is run on what: the algorithm and the objective that a plan file names, built by the registries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quietgrad.algorithms.registry import entry
from quietgrad.objectives.registry import loss_entry, make_objective


def needed(section: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of a setting that must be there."""
    if key not in section:
        raise ValueError(f"{where} needs {key!r}.")
    return section[key]


def algorithm_of(settings: dict[str, Any]) -> Any:
    """The algorithm that the section ``[algorithm]`` describes."""
    name = _name(settings, "[algorithm]")
    return entry(name).make(settings)


def objective_of(settings: dict[str, Any], data: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The objective of ``[objective]``, and the public facts that a saved model needs to score records."""
    name = _name(settings, "[objective]")
    task = loss_entry(name)[0].task
    names = data.get("classes", [0, 1] if task == "binary" else None)
    classes = None if names is None else len(names)
    objective, facts = make_objective(name, settings, classes=classes)
    labels = None if names is None else [str(label) for label in names]
    return objective, {**facts, "features": data.get("features"), "class_names": labels}


def _name(settings: dict[str, Any], where: str) -> str:
    name = needed(settings, "name", where)
    if not isinstance(name, str):
        raise ValueError(f"{where} name={name!r}: must be a text.")
    del settings["name"]
    return name


def reading_of(data: Mapping[str, Any], task: str) -> dict[str, Any]:
    """The arguments of :func:`quietgrad.data.load` that a plan fixes."""
    reading = {key: data[key] for key in ("classes", "label", "schema", "person") if key in data}
    if task == "binary":
        reading.setdefault("classes", [0, 1])
    return {**reading, "n_features": data.get("features"), **({"task": task} if task == "regression" else {})}
