"""Write docs/api.md: every public name of every public room, under the name by which users import it."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOMS = {
    "quietgrad": "Planning, running, accounting, algorithms",
    "quietgrad.estimators": "Estimators",
    "quietgrad.torch": "PyTorch",
    "quietgrad.federation": "Many parties",
    "quietgrad.objectives": "Objectives",
    "quietgrad.data": "Data",
    "quietgrad.audit": "Audits",
    "quietgrad.certificates": "Certificates",
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"


def public(room: str) -> list[str]:
    """The names that a room offers and that are not rooms themselves."""
    module = import_module(room)
    return [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]


def entry(room: str, name: str) -> str:
    """How Sphinx is asked for one name."""
    value = getattr(import_module(room), name)
    if inspect.isclass(value):
        # What scikit-learn adds to every estimator is described there, with labels of its own pages.
        added = ", ".join(each for each in dir(value) if each.startswith("set_") and each.endswith("_request"))
        without = f"   :exclude-members: {added}\n" if added else ""
        return f".. autoclass:: {room}.{name}\n   :members:\n{without}   :show-inheritance:\n"
    if callable(value):
        return f".. autofunction:: {room}.{name}\n"
    return f".. py:data:: {room}.{name}\n\n   {_words(room, name)}\n"


def _words(room: str, name: str) -> str:
    return {"__version__": "The version, as text.", "REGISTRY": "Registered data sets by name.",
            "CURATORS": "Curators that can be audited, by name."}.get(name, f"{name} of {room}.")  # fmt: skip


def text() -> str:
    """The page."""
    parts = [
        "# Reference",
        "Every public name, where users import it from. `tools/reference.py` writes this page; a test fails if a "
        "name is\nmissing, untyped or has no docstring.",
    ]
    for room, title in ROOMS.items():
        entries = "\n".join(entry(room, name) for name in public(room))
        parts.append(f"## {title}\n\n`import {room}`\n\n```{{eval-rst}}\n{entries}```")
    parts.append(
        "## Events\n\n`from quietgrad import events`\n\n```{eval-rst}\n"
        ".. automodule:: quietgrad.privacy.events\n   :members:\n```"
    )
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
