"""How the numbers of a benchmark or reproduction are kept: with the command, versions and date that made them."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("quietgrad", "numpy", "scipy", "scikit-learn", "numba", "torch", "dp-accounting")


def versions(*more: str) -> dict[str, str | None]:
    """Versions of Python and of the packages the numbers depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if "quietgrad" in sys.modules:  # the tree that ran, not what some earlier install of it was called
        found["quietgrad"] = str(sys.modules["quietgrad"].__version__)
    return found


def command(words: list[str]) -> str:
    """The call as it is made in a clone; ``python -m`` names a script by where this clone happens to be.

    >>> command([str(ROOT / "benchmarks" / "glm.py"), "speed"])
    'python benchmarks/glm.py speed'
    """
    script, *rest = words
    where = Path(script).resolve()
    return " ".join(["python", where.relative_to(ROOT).as_posix() if where.is_relative_to(ROOT) else script, *rest])


def as_text(record: Any) -> str:
    """JSON with one line for each value, and one for each list of numbers and words.

    >>> print(as_text({"rows": [[1, 2.5], ["a]", 3]]}))
    {
     "rows": [
      [1, 2.5],
      [
       "a]",
       3
      ]
     ]
    }
    """
    text = json.dumps(record, indent=1, ensure_ascii=False)
    return re.sub(r"\[\n[^\[\]{}]*\n *\]", _on_one_line, text)


def _on_one_line(found: re.Match[str]) -> str:
    return re.sub(r"\n *", " ", found[0]).replace("[ ", "[").replace(" ]", "]")


def save(path: Path, numbers: dict[str, Any], *more: str) -> None:
    """Write ``numbers`` with what made them."""
    record = {
        "command": command(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": versions(*more),
        **numbers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(record) + "\n")
