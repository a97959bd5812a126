"""Accuracy against ε on a9a: the numbers and the picture of the first page.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/frontier.py

Runs ``quietgrad frontier a9a --public --repeats 10`` and keeps what it says; a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import quietgrad  # noqa: F401  (its version is recorded)

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import ROOT, save

RESULT = ROOT / "benchmarks" / "results" / "frontier.json"
PICTURE = ROOT / "docs" / "_static" / "frontier.svg"


def main() -> None:
    """Run the command in a folder of its own and keep the numbers and the picture."""
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [sys.executable, "-m", "quietgrad", "frontier", "a9a", "--public", "--repeats", "10", "--out", folder,
             "--json"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        PICTURE.write_bytes((Path(folder) / "frontier.svg").read_bytes())
    save(RESULT, json.loads(told.stdout))
    print(told.stdout)


if __name__ == "__main__":
    main()
