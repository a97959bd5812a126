"""The objectives that can be asked for by name, and how a text becomes one.

Tables of features have the losses of :mod:`~quietgrad.objectives.tables`; landscapes make their own records;
networks are modules, which a command line cannot spell, and stand here because what is registered is attacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quietgrad import settings
from quietgrad.errors import DataError
from quietgrad.objectives.privacy_units import UserLevelObjective
from quietgrad.objectives.tables.linear import Task
from quietgrad.objectives.tables.losses import LOSSES


@dataclass(frozen=True)
class LossSpec:
    """An objective by name: its class, and settings that probes use."""

    name: str
    kind: Any
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> Task:
        """What its targets are."""
        task: Task = self.kind.task
        return task

    @property
    def knob(self) -> str | None:
        """The field that NAME:NUMBER sets."""
        return getattr(self.kind, "number", None)

    def make_example(self, **more: Any) -> Any:
        """The objective with its example settings."""
        return self.kind(**{**self.example, **more})


_EXAMPLES: dict[str, dict[str, Any]] = {"multinomial": {"classes": 3}}

TABLE_LOSSES: dict[str, LossSpec] = {
    name: LossSpec(name, kind, _EXAMPLES.get(name, {})) for name, kind in LOSSES.items()
}
"""The losses of tables by the name on the command line and in plan files."""

NETWORKS = {"module": "networks.module.ModuleObjective"}
"""Objectives that only Python can spell, by name; they are registered because what is registered is attacked."""

_USUAL: dict[Task, str] = {"binary": "logistic", "multiclass": "multinomial", "regression": "huber"}
_FITS = {"binary": ("binary",), "multiclass": ("binary", "multiclass"), "regression": ("regression",)}
_HIDDEN = ("transform", "classes", "regularizer")  # found out, or read apart
_PENALTIES = {"l2": "L2", "nonconvex": "Nonconvex"}


def usual_loss(task: str) -> str:
    """The loss for labels of a kind if none is named.

    >>> usual_loss("regression")
    'huber'
    """
    return _USUAL[task]  # type: ignore[index]


def loss_entry(text: str) -> tuple[LossSpec, dict[str, float]]:
    """The entry that NAME or NAME:NUMBER names, and the setting that the number makes.

    >>> loss_entry("huber:0.5")[1]
    {'threshold': 0.5}
    """
    name, number = _name_and_number("objective", text)
    entry = TABLE_LOSSES.get(name)
    if entry is None:
        said = [n if e.knob is None else f"{n}[:{e.knob.upper()}]" for n, e in TABLE_LOSSES.items()]
        raise ValueError(f"objective {name!r}: must be {', '.join(said[:-1])} or {said[-1]}.")
    if number is not None and entry.knob is None:
        raise ValueError(f"objective {text!r}: {name} takes no number.")
    return entry, {} if number is None or entry.knob is None else {entry.knob: number}


def make_objective(
    text: str, given: Mapping[str, Any], *, task: str | None = None, classes: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The objective called ``text`` with the settings ``given``, and the facts that a saved model needs of it.

    ``task`` and ``classes`` are those of the data; without a task the data is taken to be as the loss needs it.

    >>> make_objective("huber", {"threshold": "0.5", "regularizer": "l2:0.1", "intercept": True})[0]
    Huber(regularizer=L2(strength=0.1, unpenalized=1), intercept=True, ..., threshold=0.5)
    """
    entry, knob = loss_entry(text)
    task = entry.task if task is None else task
    if task not in _FITS[entry.task] or (entry.task == "binary" and classes not in (None, 2)):
        raise DataError(f"the objective {entry.name} is for {entry.task} labels, and the data is {task}.")
    values = dict(given)
    if values.get("rows") == "refuse":  # of runs of older versions, none of whose rows is above the bound
        values["rows"] = "clip"
    penalty = values.pop("regularizer", None)
    if doubly := knob.keys() & {key.replace("-", "_") for key in values}:
        raise ValueError(f"{doubly.pop()!r} is set twice: in {text!r} and beside it.")
    ready: dict[str, Any] = {}
    if entry.task == "multiclass":
        if classes is None:
            raise ValueError(f"a {entry.name} objective needs the public list of classes.")
        ready["classes"] = classes
    free = ready.get("classes", 1) if settings.read("intercept", values.get("intercept", False), bool) else 0
    if (found := make_regularizer(penalty, free)) is not None:
        ready["regularizer"] = found
    objective = settings.build_dataclass(entry.name, entry.kind, {**knob, **values}, ready=ready, hidden=_HIDDEN)
    facts = {
        "objective": entry.name if entry.knob is None else f"{entry.name}:{getattr(objective, entry.knob)!r}",
        "regularizer": None if found is None else str(penalty),
        "intercept": objective.intercept,
        "row_bound": objective.row_bound,
        "rows": objective.rows,
        "task": task,
        "classes": classes,
    }
    return objective, facts


def facts_of(objective: Any) -> dict[str, Any] | None:
    """What :func:`from_facts` makes the same objective of, as JSON values; ``None`` if it is none of ours by name.

    >>> from quietgrad.objectives import L2, Logistic
    >>> facts_of(Logistic(regularizer=L2(0.1)))["regularizer"], facts_of("anything else")
    ('l2:0.1', None)
    """
    asked = objective.loss if isinstance(objective, UserLevelObjective) else objective
    name = next((name for name, entry in TABLE_LOSSES.items() if entry.kind is type(asked)), None)
    if name is None:
        return None
    knob, penalty = TABLE_LOSSES[name].knob, asked.regularizer
    kind = next((key for key, cls in _PENALTIES.items() if cls == type(penalty).__name__), None)
    facts = {
        "objective": name if knob is None else f"{name}:{getattr(asked, knob)!r}",
        "regularizer": None if kind is None else f"{kind}:{penalty.strength!r}",
        "intercept": asked.intercept,
        "row_bound": asked.row_bound,
        "rows": asked.rows,
        "classes": getattr(asked, "classes", None),
    }
    try:
        return facts if from_facts(facts) == asked else None
    except (ValueError, TypeError, DataError):
        return None


def from_facts(facts: Mapping[str, Any]) -> Any:
    """The objective that :func:`facts_of` describes."""
    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    return make_objective(facts["objective"], given, classes=facts["classes"])[0]


def make_regularizer(text: Any, unpenalized: int) -> Any:
    """A penalty from text such as ``l2:0.1`` or ``nonconvex:0.001``, none from ``none``; intercepts stay free.

    >>> make_regularizer("l2:0.1", 1), make_regularizer("none", 0)
    (L2(strength=0.1, unpenalized=1), None)
    """
    if text is None or text == "none":
        return None
    name, strength = _name_and_number("regularizer", text)
    if name not in _PENALTIES or strength is None:
        said = ", ".join(f"{known}:STRENGTH" for known in _PENALTIES)
        raise ValueError(f"regularizer {text!r}: must be {said} or none.")
    from quietgrad.objectives import regularizers

    return getattr(regularizers, _PENALTIES[name])(strength, unpenalized=unpenalized)


def _name_and_number(what: str, text: Any) -> tuple[str, float | None]:
    if not isinstance(text, str):
        raise ValueError(f"{what}={text!r}: must be a text.")
    name, colon, number = text.partition(":")
    try:
        return name, float(number) if colon else None
    except ValueError:
        raise ValueError(f"{what} {text!r}: {number!r} is no number.") from None
