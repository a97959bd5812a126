"""Objects from the command line: a name, common flags and ``--set KEY=VALUE``, built by the registries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer import BadParameter

from quietgrad.algorithms.base import Algorithm
from quietgrad.algorithms.registry import entry
from quietgrad.cli.options import usage
from quietgrad.objectives.registry import make_objective
from quietgrad.objectives.tables.linear import LinearObjective
from quietgrad.oracles.gradient_estimators import ORACLES, oracle_class
from quietgrad.settings import fields_of


def algorithm_from(name: str, flags: Mapping[str, Any], settings: Sequence[str] | None = None) -> Algorithm:
    """The algorithm called ``name`` with the flags that were given and the settings ``KEY=VALUE``.

    An algorithm that takes any oracle gets the one that ``oracle=NAME`` names, with settings ``oracle.KEY=VALUE``
    and the flags that are the oracle's.

    >>> algorithm_from("dp-srm", {"steps": 100, "gamma": None}, ["joint-clip=true", "first_batch_size=400"])
    DPSRM(steps=100, ..., joint_clip=True, ..., first_batch_size=400, ...)
    >>> algorithm_from("perturbed-sgd", {"batch_size": 500}, ["oracle=adaptive-spider", "oracle.kappa=0.01"])
    PerturbedSGD(oracle=AdaptiveSpider(batch_size=500, ..., kappa=0.01), ...)
    """
    given = {key: value for key, value in flags.items() if value is not None}
    said = key_values(settings)
    with usage():
        found = entry(name)
        known = fields_of(found.kind)
        if "oracle" in known:
            source = said.pop("oracle", next(iter(ORACLES)))
            its = fields_of(oracle_class(source))
            own = {key: given.pop(key) for key in list(given) if key not in known and key in its}
            there = {key.partition(".")[2]: said.pop(key) for key in list(said) if key.startswith("oracle.")}
            said["oracle"] = {"name": source, **_merged(own, there)}
        made: Algorithm = found.make(_merged(given, said))
    return made


def _merged(flags: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Both together; what is given by its flag and by ``--set`` is refused: the two may differ."""
    for key in flags.keys() & said.keys():
        raise ValueError(f"{key!r} is set twice: by its option and by --set.")
    return {**flags, **said}


def key_values(settings: Sequence[str] | None) -> dict[str, Any]:
    """The texts ``KEY=VALUE`` of ``--set``.

    >>> key_values(["joint-clip=true"])
    {'joint_clip': 'true'}
    """
    values: dict[str, Any] = {}
    for text in settings or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise BadParameter(f"{text!r}: must be KEY=VALUE.", param_hint="--set")
        name = key.strip().replace("-", "_")
        if name in values:
            raise BadParameter(f"{name!r} is set twice.", param_hint="--set")
        values[name] = value.strip()
    return values


def objective_from(facts: Mapping[str, Any]) -> LinearObjective:
    """The objective that ``RunSpec.describe_objective`` describes.

    >>> facts = {"objective": "huber:0.5", "regularizer": "l2:0.1", "intercept": True, "row_bound": None,
    ...          "rows": "clip", "task": "regression", "classes": None}
    >>> objective_from(facts)
    Huber(regularizer=L2(strength=0.1, unpenalized=1), intercept=True, ..., threshold=0.5)
    """
    given = {key: facts[key] for key in ("intercept", "row_bound", "rows", "regularizer")}
    with usage():
        loss: LinearObjective
        loss, _ = make_objective(facts["objective"], given, task=facts["task"], classes=facts["classes"])
    return loss
