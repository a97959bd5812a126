"""How large and how plain the source is: ``python tools/size.py [--json]``.

Counts lines, files, functions and words that make a reader stop (``Any``, ``type: ignore``, ``getattr``, imports
inside functions), and lists class names that mean two things. ``--beside opacus optax`` adds a column for packages
that are installed, without their tests. ``--rooms`` adds a line for every package; ``--trace`` the functions,
files and changes of room of one ``fit`` and of one `quietgrad train` on the embedded data.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import inspect
import io
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent / "src" / "quietgrad"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def doubles(root: Path = ROOT) -> dict[str, list[str]]:
    """Class names that are defined more than once, leading underscores ignored, with the files that define them."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, nodes in _modules(root).items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(root)))
    return {name: homes for name, homes in sorted(found.items()) if len(homes) > 1}


def measure(root: Path = ROOT) -> dict[str, Any]:
    """The numbers of the table."""
    texts = {path: path.read_text() for path in _modules(root)}
    nodes = [node for found in _modules(root).values() for node in found]
    functions = [node for node in nodes if isinstance(node, Function)]
    parameters = [a for f in functions for a in _parameters(f)]
    loose = [a for a in parameters if a.annotation is not None and "Any" in ast.unparse(a.annotation)]
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    return {
        "files": len(texts),
        "lines": len(lines),
        "code lines": sum(bool(line) and not line.startswith("#") for line in lines) - _docstring_lines(nodes),
        "comments, % of lines": round(100 * sum("# " in line for line in lines) / len(lines), 1),
        "longest file": max(text.count("\n") for text in texts.values()),
        "functions": len(functions),
        "function lines, median": lengths[len(lengths) // 2],
        "function lines, 90 %": round(quantiles(lengths, n=10)[-1]),
        "functions over 40 lines": sum(length > 40 for length in lengths),
        "functions with more than 9 parameters": sum(len(_parameters(f)) > 9 for f in functions),
        "parameters typed Any, %": round(100 * len(loose) / len(parameters), 1),
        "type: ignore": sum(line.count("type: ignore") for line in lines),
        "getattr and hasattr": sum(
            isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr") for call in calls
        ),
        "imports inside functions": sum(
            isinstance(node, ast.Import | ast.ImportFrom) for f in functions for node in ast.walk(f)
        ),
        "class names with two meanings": len(doubles(root)),
    }


def rooms(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """(files, lines) of every package."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in _modules(root):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "(top)"].append(path.read_text().count("\n"))
    return {name: (len(counts), sum(counts)) for name, counts in sorted(found.items())}


def trace(run: Callable[[], object], root: Path = ROOT) -> tuple[int, int, int]:
    """(functions, files, changes of room) of ``run``; lambdas and comprehensions do not count.

    A room is a package of the first level. A change of room is counted along the functions in the order of their
    first calls: it is how often a reader who follows the run walks through a door.
    """
    called: dict[tuple[str, str], None] = {}

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        function = code.co_flags & inspect.CO_OPTIMIZED and "<" not in code.co_name
        if event == "call" and function and code.co_filename.startswith(str(root)):
            called.setdefault((code.co_filename, code.co_qualname))

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(profile)
        try:
            run()
        finally:
            sys.setprofile(None)
    rooms = [Path(name).relative_to(root).parts[0] for name, _ in called]
    changes = sum(here != there for here, there in pairwise(rooms))
    return len(called), len({name for name, _ in called}), changes


def one_train(folder: str) -> None:
    """One `quietgrad train` on the embedded data."""
    from quietgrad.cli import main as quietgrad

    quietgrad(f"train breast-cancer --epsilon 1 --delta 1e-5 --out {folder}/run".split())


def one_fit(folder: str) -> None:
    """One ``fit`` of a linear model, paid by a ledger."""
    import numpy as np

    from quietgrad.estimators import PrivateLogisticRegression

    X = np.random.default_rng(0).uniform(-1.0, 1.0, (600, 3))
    bounds, ledger = [(-1.0, 1.0)] * 3, f"{folder}/ledger.jsonl"
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], feature_bounds=bounds, ledger=ledger).fit(X, X[:, 0] > 0)


@cache
def _modules(root: Path) -> dict[Path, list[ast.AST]]:
    """All nodes of every module; tests that a package carries are left out."""
    paths = (path for path in sorted(root.rglob("*.py")) if not _is_test(path.relative_to(root)))
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in paths}


def _is_test(path: Path) -> bool:
    return "tests" in path.parts or path.stem.endswith("_test") or path.stem.startswith("test_")


def _parameters(function: Function) -> list[ast.arg]:
    args = function.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return [each for each in every if each.arg not in ("self", "cls")]


def _docstring_lines(nodes: list[ast.AST]) -> int:
    documented = (
        node.body[0]
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node)
    )
    return sum((first.end_lineno or first.lineno) - first.lineno + 1 for first in documented)


def installed(package: str) -> Path:
    """Where an installed package is, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package}: not installed here; pip install it first.")
    return Path(next(iter(spec.submodule_search_locations)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--beside", nargs="+", default=[], metavar="PACKAGE")
    parser.add_argument("--rooms", action="store_true")
    parser.add_argument("--trace", action="store_true")
    options = parser.parse_args()
    numbers = measure()
    if options.json:
        print(json.dumps({**numbers, "rooms": rooms(), "doubles": doubles()}, indent=1))
        return
    columns = {"quietgrad": numbers, **{name: measure(installed(name)) for name in options.beside}}
    print(" " * 40 + "".join(f"{name:>16}" for name in columns))
    for name in numbers:
        print(f"{name:<40}" + "".join(f"{column[name]:>16}" for column in columns.values()))
    if options.rooms:
        for name, (files, lines) in rooms().items():
            print(f"{name:<28}{files:>6} files{lines:>8} lines")
    if options.trace:
        for name, run in (("fit", one_fit), ("train", one_train)):
            with tempfile.TemporaryDirectory() as folder:
                functions, files, changes = trace(partial(run, folder))
            print(f"one `{name}`: {functions} functions in {files} files, {changes} changes of room")
    for name, homes in doubles().items():
        print(f"{name}: {', '.join(homes)}")


if __name__ == "__main__":
    main()
