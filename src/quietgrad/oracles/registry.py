"""The oracles that an algorithm can be given by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quietgrad import settings

ORACLES = {
    "adaptive-spider": "spider.AdaptiveSpider",
    "spider": "spider.Spider",
    "mini-batch": "minibatch.MiniBatch",
}
"""Where each one lives, by its name on the command line and in plan files; the first is the default."""

_HIDDEN = ("law",)  # of a random round: the algorithm's


def oracle_class(name: str) -> Any:
    """The class called ``name``; results name it as Python does.

    >>> oracle_class("spider") is oracle_class("Spider")
    True
    """
    homes = {**ORACLES, **{home.partition(".")[2]: home for home in ORACLES.values()}}
    if name not in homes:
        raise ValueError(f"oracle {name!r}: must be one of {', '.join(ORACLES)}.")
    module, _, cls = homes[name].partition(".")
    return getattr(import_module(f"quietgrad.oracles.{module}"), cls)


def make_oracle(given: Any, kind: Any = object) -> Any:
    """The oracle that a name, or a table of a ``name`` and settings, describes; it must be a ``kind``.

    >>> make_oracle({"name": "spider", "period": 3}).period
    3
    """
    if not isinstance(given, str | Mapping):
        raise ValueError(f"oracle={given!r}: must be a name, or a table of a name and settings.")
    values = {"name": given} if isinstance(given, str) else dict(given)
    name = values.pop("name", next(iter(ORACLES)))
    found = oracle_class(name) if isinstance(name, str) else None
    if found is None or not issubclass(found, kind):
        wanted = [n for n in ORACLES if issubclass(oracle_class(n), kind)]
        raise ValueError(f"oracle {name!r}: must be {' or '.join(wanted)} here.")
    return settings.build(f"oracle {name}", found, values, hidden=_HIDDEN)
