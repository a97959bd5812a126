"""The core is a place with one way in: it imports nothing above itself, and only it makes curators."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "quietgrad"
ABOVE = (
    "tables",
    "methods",
    "estimators",
    "data",
    "torch",
    "federation",
    "assurance",
    "features",
    "cluster",
    "named_settings",
    "cli",
)
MOST_LINES = 13_500

# Reserve, release and close with the core alone: a reader of numbers, a clipped sum, three releases.
ALONE = """
import importlib.abc, sys

class Ban(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith(BANNED):
            raise ImportError(f"{name} is above the core")

sys.meta_path.insert(0, Ban())
from dataclasses import dataclass
from pathlib import Path
import numpy as np
from quietgrad.core import Budget, PrivacyUnit, Terms, opened
from quietgrad.core.plans.method import HasSchedule
from quietgrad.core.plans.slots import Schedule, Slot
from quietgrad.core.sampling import Poisson
from quietgrad.core.session.objectives import NoRegularizer

class Rows:
    def __init__(self, array):
        self.array, self.dim = array, array.shape[1]
    def __len__(self):
        return len(self.array)
    def contents(self):
        yield self.array.tobytes()
    fingerprint_parts = contents

class Numbers:
    unit, regularizer, silent_batches = PrivacyUnit.RECORD, NoRegularizer(), False
    def prepare(self, data):
        return Rows(np.asarray(data, float))
    def initial(self, records):
        return np.zeros(records.dim)

@dataclass(frozen=True)
class ClippedSum:
    bound: float
    def dim(self, records):
        return records.dim
    def sum_into(self, adapter, batch, out):
        rows = batch.records.array if batch.indices is None else batch.records.array[batch.indices]
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        out += (rows * np.minimum(1.0, self.bound / np.maximum(lengths, 1e-300))).sum(0)

@dataclass(frozen=True)
class ThreeSums(HasSchedule):
    name = "three-sums"
    def schedule(self, n):
        return Schedule((Slot("sum", Poisson(0.1), 3),))

rows = np.random.default_rng(0).normal(size=(1000, 2))
terms = Terms.of(Budget(1.0, 1e-5), account="people", ledger="ledger.jsonl", n_public=1000)
with opened(Numbers(), rows, ThreeSums(), terms) as run:
    sums = [run.session.release("sum", ClippedSum(1.0)) for _ in range(3)]
    print(run.close("steps"))
assert all(np.isfinite(total).all() for total in sums)
assert not [name for name in sys.modules if name.startswith(BANNED)]
"""


def test_the_core_works_with_everything_above_it_banned(tmp_path: Path) -> None:
    banned = tuple(f"quietgrad.{room}" for room in ABOVE)
    code = f"BANNED = {banned!r}\n{ALONE}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(SOURCE.parent), "QUIETGRAD_STATE": str(tmp_path / "state"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ", 1e-05)-DP, add-remove, proved by " in done.stdout
    assert (tmp_path / "ledger.jsonl").exists()


def calls(path: Path) -> set[str]:
    """Names that a file calls."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def test_no_front_end_makes_a_curator_or_resolves_an_account() -> None:
    outside = [
        path for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "core" and "audit" not in path.parts
    ]  # fmt: skip
    assert [path for path in outside if {"CentralCurator", "SharedCurator"} & calls(path)] == []
    resolving = [path for path in outside if "Account.of(" in path.read_text()]
    assert resolving == []


def test_the_core_stays_small_enough_to_read() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (SOURCE / "core").rglob("*.py"))
    assert lines <= MOST_LINES


@pytest.mark.parametrize("path", sorted((SOURCE / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_every_module_of_the_core_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
