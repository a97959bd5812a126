"""The objectives that can be asked for by name, and how a text becomes one.

Tables of features have the losses of :mod:`~quietgrad.tables`; landscapes make their own records;
networks are modules, which a command line cannot spell, and stand here because what is registered is attacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quietgrad import named_settings as settings
from quietgrad.core.errors import DataError, SettingError
from quietgrad.core.session.objectives import Regularizer
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import LOSSES, OneVsRestHinge
from quietgrad.tables.privacy_units import UserLevelObjective
from quietgrad.tables.regularizers import L2, Nonconvex

Facts = Mapping[str, Any]
"""What a saved model says of its objective, as JSON values."""

NETWORKS = {"module": "networks.module.ModuleObjective"}
"""Objectives that only Python can spell, by name; they are registered because what is registered is attacked."""

_USUAL = {"binary": "logistic", "multiclass": "multinomial", "regression": "huber"}
_FITS = {"binary": ("binary",), "multiclass": ("binary", "multiclass"), "regression": ("regression",)}
_HIDDEN = ("transform", "classes", "regularizer", "class_weights")  # found out, or read apart
_PENALTIES: dict[str, type[L2] | type[Nonconvex]] = {"l2": L2, "nonconvex": Nonconvex}


def usual_loss(task: str) -> str:
    """The loss for labels of a kind if none is named.

    >>> usual_loss("regression")
    'huber'
    """
    return _USUAL[task]


def loss_entry(text: str) -> tuple[type[LinearObjective], dict[str, float]]:
    """The loss that NAME or NAME:NUMBER names, and the setting that the number makes.

    >>> loss_entry("huber:0.5")[1]
    {'threshold': 0.5}
    """
    name, number = _name_and_number("objective", text)
    kind = LOSSES.get(name)
    if kind is None:
        forms = [n if k.number is None else f"{n}[:{k.number.upper()}]" for n, k in LOSSES.items()]
        raise ValueError(f"objective {name!r}: must be {', '.join(forms[:-1])} or {forms[-1]}.")
    if number is None:
        return kind, {}
    if kind.number is None:
        raise ValueError(f"objective {text!r}: {name} takes no number.")
    return kind, {kind.number: number}


def saved_objective(facts: Facts) -> Any:
    """The objective whose parameters a saved linear model holds.

    A support vector machine of several classes is one against the rest for each.
    """
    if str(facts["objective"]).partition(":")[0] == "hinge" and facts["task"] == "multiclass":
        return OneVsRestHinge(int(facts["classes"]), intercept=bool(facts["intercept"]))
    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    return make_objective(facts["objective"], given, task=facts["task"], classes=facts["classes"])[0]


def make_objective(
    text: str, given: Facts, *, task: str | None = None, classes: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The objective called ``text`` with the settings ``given``, and the facts that a saved model needs of it.

    ``task`` and ``classes`` are those of the data; without a task the data is taken to be as the loss needs it.

    >>> make_objective("huber", {"threshold": "0.5", "regularizer": "l2:0.1", "intercept": True})[0]
    Huber(regularizer=L2(strength=0.1, unpenalized=1), intercept=True, ..., threshold=0.5)
    """
    kind, number = loss_entry(text)
    name = text.partition(":")[0]
    task = kind.task if task is None else task
    if task not in _FITS[kind.task] or (kind.task == "binary" and classes not in (None, 2)):
        raise DataError(f"the objective {name} is for {kind.task} labels, and the data is {task}.")
    values = dict(given)
    if values.get("rows") == "refuse":  # of runs of older versions, none of whose rows is above the bound
        values["rows"] = "clip"
    penalty = values.pop("regularizer", None)
    if doubly := number.keys() & {key.replace("-", "_") for key in values}:
        raise ValueError(f"{doubly.pop()!r} is set twice: in {text!r} and beside it.")
    ready: dict[str, Any] = {}
    if kind.task == "multiclass":
        if classes is None:
            raise ValueError(f"a {name} objective needs the public list of classes.")
        ready["classes"] = classes
    free = (
        ready.get("classes", 1) if settings.parse_setting("intercept", values.get("intercept", False), bool) else 0
    )
    if (found := make_regularizer(penalty, free)) is not None:
        ready["regularizer"] = found
    objective = settings.build_dataclass(name, kind, {**number, **values}, ready=ready, hidden=_HIDDEN)
    stated = _stated(name, objective, None if found is None else str(penalty))
    return objective, {**stated, "task": task, "classes": classes}


def _stated(name: str, loss: LinearObjective, penalty: str | None) -> dict[str, Any]:
    return {
        "objective": name if loss.number is None else f"{name}:{vars(loss)[loss.number]!r}",
        "regularizer": penalty,
        "intercept": loss.intercept,
        "row_bound": loss.row_bound,
        "rows": loss.rows,
    }


def facts_of(objective: object) -> dict[str, Any] | None:
    """Return JSON values from which :func:`from_facts` rebuilds the objective, or ``None`` if it cannot.

    For a user-level objective they describe its loss.

    >>> from quietgrad.objectives import L2, Logistic
    >>> facts_of(Logistic(regularizer=L2(0.1)))["regularizer"], facts_of("anything else")
    ('l2:0.1', None)
    """
    asked: Any = objective.loss if isinstance(objective, UserLevelObjective) else objective
    name = next((name for name, kind in LOSSES.items() if kind is type(asked)), None)
    if name is None:
        return None
    penalty = asked.regularizer
    known = next((key for key, kind in _PENALTIES.items() if kind is type(penalty)), None)
    facts = _stated(name, asked, None if known is None else f"{known}:{penalty.strength!r}")
    facts["classes"] = asked.outputs if asked.task == "multiclass" else None
    try:
        return facts if from_facts(facts) == asked else None
    except (ValueError, TypeError, DataError):
        return None


def from_facts(facts: Facts) -> Any:
    """The objective that :func:`facts_of` describes."""
    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    return make_objective(facts["objective"], given, classes=facts["classes"])[0]


def make_regularizer(text: object, unpenalized: int) -> Regularizer | None:
    """A penalty from text such as ``l2:0.1`` or ``nonconvex:0.001``, none from ``none``; intercepts stay free.

    >>> make_regularizer("l2:0.1", 1), make_regularizer("none", 0)
    (L2(strength=0.1, unpenalized=1), None)
    """
    if text is None or text == "none":
        return None
    name, strength = _name_and_number("regularizer", text)
    if name not in _PENALTIES or strength is None:
        forms = ", ".join(f"{penalty}:STRENGTH" for penalty in _PENALTIES)
        raise ValueError(f"regularizer {text!r}: must be {forms} or none.")
    return _PENALTIES[name](strength, unpenalized=unpenalized)


def _name_and_number(what: str, text: object) -> tuple[str, float | None]:
    if not isinstance(text, str):
        raise SettingError(f"{{{what}}}: must be a text.", **{what: text})
    name, colon, number = text.partition(":")
    try:
        return name, float(number) if colon else None
    except ValueError:
        raise ValueError(f"{what} {text!r}: {number!r} is no number.") from None
