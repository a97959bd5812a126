"""Public names of a package that are imported when first used, so that importing the package stays quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names are imported when first used.

    Args:
        package: the package's own name.
        homes: modules of quietgrad, each with the names that live there, separated by spaces.
        modules: names that stand for whole modules of quietgrad.

    >>> find, names = lazy_names("example", {"core.accounting.budget": "Budget Relation"})
    >>> find("Budget").__name__, names()
    ('Budget', ['Budget', 'Relation'])
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    whole = dict(modules or {})

    def find(name: str) -> Any:
        if name in home_of:
            value = getattr(import_module(f"quietgrad.{home_of[name]}"), name)
        elif name in whole:
            value = import_module(f"quietgrad.{whole[name]}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if package in sys.modules:
            setattr(sys.modules[package], name, value)  # from now on an ordinary attribute
        return value

    return find, lambda: sorted({*home_of, *whole})
