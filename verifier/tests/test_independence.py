"""The verifier shares no code with quietgrad, and is small enough to be read."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

import quietgrad_verify

SOURCE = Path(quietgrad_verify.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
ALLOWED = {"numpy", "scipy", "dp_accounting", "cryptography", "quietgrad_verify"}
MOST_LINES = 1500


def test_no_module_of_quietgrad_is_imported() -> None:
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names, f"{file.name} imports {name}"


def test_it_runs_where_quietgrad_cannot_be_imported() -> None:
    """In a process that refuses the name; what is imported by name at run time would be seen too."""
    code = (
        "import sys\n"
        "class Refuses:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'quietgrad': raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuses())\n"
        f"sys.path.insert(0, {str(SOURCE.parent)!r})\n"
        "import quietgrad_verify.cli, quietgrad_verify.adapters, quietgrad_verify.page\n"
        "from quietgrad_verify import prove\n"
        "g = {'event': 'gaussian', 'noise_multiplier': 2.0}\n"
        "g = {'event': 'random-allocation', 'steps_per_epoch': 10, 'inner': g}\n"
        "assert 0 < prove(g, delta=1e-5, relation='add-remove').epsilon < 2\n"
        "assert 'quietgrad' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_small_enough_to_be_read() -> None:
    """Lines of code: neither blank, nor comment, nor docstring."""
    total = sum(len(code_lines(file.read_text(encoding="utf-8"))) for file in FILES)
    assert total <= MOST_LINES, total


def code_lines(source: str) -> set[int]:
    spoken: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            words = node.body[0]
            spoken |= set(range(words.lineno, (words.end_lineno or words.lineno) + 1))
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - spoken
