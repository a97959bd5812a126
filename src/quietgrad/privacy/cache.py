"""Remembered calibrations: one small file each, written whole or not at all, and believed only if it is intact.

The directory is ``QUIETGRAD_CACHE`` or ``~/.cache/quietgrad``. A cache never fails: what cannot be read is
computed, what cannot be written is not remembered. Files are replaced atomically, so processes may share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Raise when any accountant's or calibration's numbers change.
_REVISION = 1


def directory() -> Path:
    """Return the directory that calibrations are remembered in."""
    return Path(os.environ.get("QUIETGRAD_CACHE") or Path.home() / ".cache" / "quietgrad")


def recall(question: dict[str, Any]) -> float | None:
    """Return the remembered answer to ``question``, or None."""
    key = _key(question)
    try:
        entry = json.loads(_path(key).read_bytes())
        answer = entry["answer"]
        intact = entry["key"] == key and entry["check"] == _digest(f"{key} {answer!r}")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return float(answer) if intact else None


def remember(question: dict[str, Any], answer: float) -> None:
    """Keep ``answer`` to ``question`` for later processes, if the directory can be written."""
    key = _key(question)
    answer = float(answer)
    entry = {"key": key, "answer": answer, "check": _digest(f"{key} {answer!r}")}
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            part.write_text(json.dumps(entry))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, RuntimeError):
        return


def _path(key: str) -> Path:
    return directory() / "calibration" / f"{_digest(key)}.json"


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {version(name)}" for name in ("numpy", "scipy", "dp-accounting"))


def _key(question: dict[str, Any]) -> str:
    return json.dumps({"revision": _REVISION, "versions": _versions(), **question}, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
