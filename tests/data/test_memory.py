"""The memory that reading a table takes: 64 bytes for each byte of the file, and 8 KiB for each of its columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from quietgrad.data import load
load(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load(sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize(("columns", "rows"), [(20_000, 2), (20_000, 20), (50, 20_000)])
def test_wide_and_long_csv_files_stay_within_the_stated_memory(columns: int, rows: int, tmp_path: Path) -> None:
    small, table = tmp_path / "small.csv", tmp_path / "table.csv"
    small.write_text("a,y\n1,0\n2,1\n")
    header = ",".join([*(f"{k:x}" for k in range(columns)), "y"])
    table.write_text("\n".join([header, *(("1," * columns) + str(k % 2) for k in range(rows))]) + "\n")
    words = [sys.executable, "-c", PROGRAM, str(small), str(table)]
    taken = 1024 * int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert taken <= 64 * table.stat().st_size + 8192 * columns
