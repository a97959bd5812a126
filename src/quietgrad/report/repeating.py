"""How to repeat a run: the command that its options say, without the machine's own folders."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quietgrad.files import read_json

_FLAGS = (
    "test", "objective", "regularizer", "row_bound", "algorithm", "oracle", "landscape", "epsilon", "delta",
    "relation", "account", "cap_epsilon", "n_public",
)  # fmt: skip
_USUAL = {"account": "default", "rows": "clip"}


def command_of(folder: Path) -> str | None:
    """The ``quietgrad train`` that made the run in ``folder``; ``None`` if something else made it.

    Files are named without their folders: the folders of a machine are private.
    """
    try:
        told = read_json(folder / "result.json")["details"].get("repeat")  # the run's own words, if it has them
        if isinstance(told, str):
            return told
        asked = read_json(folder / "run.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(asked, Mapping):
        return None
    words = ["quietgrad", "train"]
    if isinstance(asked.get("data"), str):
        words.append(Path(asked["data"]).name)
    given: dict[str, Any] = {key: asked.get(key) for key in _FLAGS}
    for more in (asked.get("flags"), asked.get("reading")):
        given |= dict(more) if isinstance(more, Mapping) else {}
    if asked.get("non_private"):
        given |= {"epsilon": None, "delta": None, "relation": None}
        words.append("--non-private")
    if asked.get("intercept") is False:
        words.append("--no-intercept")
    for key, value in ({"rows": asked.get("rows")} | given).items():
        if value is not None and value != _USUAL.get(key):
            words += [f"--{str(key).replace('_', '-')}", _text(key, value)]
    for setting in asked.get("settings") or ():
        words += ["--set", str(setting)]
    return " ".join(shlex.quote(word) for word in words)


def _text(key: str, value: Any) -> str:
    if key in ("test", "schema"):
        return Path(str(value)).name
    if isinstance(value, list):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
