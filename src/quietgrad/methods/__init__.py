"""Methods: the papers' algorithms, and what plans, runs and resumes them.

:func:`plan` needs no data. :func:`minimize` plans, reserves the whole cost, runs, and says what was proved;
:func:`resume` continues it after an interruption (``minimizing``). ``runs`` keeps a run in a folder and opens it
again. :func:`run` is the loop itself, for any algorithm and any curator. An algorithm is its update, its schedules,
when it stops and which iterate it returns; the registry names all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quietgrad.core.exports import lazy_names

if TYPE_CHECKING:
    from quietgrad.core.plans.schedule import plan
    from quietgrad.methods.callbacks import Callback
    from quietgrad.methods.minimizing import minimize, resume, run

__all__ = ["Callback", "minimize", "plan", "resume", "run"]


_found, __dir__ = lazy_names(
    __name__,
    {
        "core.plans.schedule": "plan",
        "methods.callbacks": "Callback",
        "methods.minimizing": "minimize resume run",
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _found(name)
    from quietgrad.methods.registry import ALGORITHMS  # an algorithm's class, by its name

    for registered in ALGORITHMS.values():
        if registered.home.partition(".")[2] == name:
            return registered.kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
