"""Ordinary PyTorch scripts in the shape people write them, each with small data and a few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quietgrad.training.result import Privacy

__all__ = ["SCRIPTS", "Script", "script"]


class Script(NamedTuple):
    """A script: it returns what it states, and whether that rests on the loop's own code."""

    run: Callable[..., Privacy]
    conditional: bool


SCRIPTS: dict[str, Script] = {}


def script(*, conditional: bool = False) -> Callable[[Callable[..., Privacy]], Callable[..., Any]]:
    """Register a script under its function's name."""

    def register(run: Callable[..., Privacy]) -> Callable[..., Any]:
        assert run.__name__ not in SCRIPTS
        SCRIPTS[run.__name__] = Script(run, conditional)
        return run

    return register
