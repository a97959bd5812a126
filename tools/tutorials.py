"""Tutorials: Python scripts in cells (``# %%``) that are run as they stand, and shown as pages and notebooks.

``# %% [markdown]`` begins a cell of text, ``# %%`` one of code. A script is run cell by cell in one namespace; what
a cell prints, and what its last expression shows, stands under it on the page.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A part of a tutorial: text, or code with what it printed and what it showed."""

    kind: str
    source: str
    printed: str = ""
    html: str = ""


def cells(text: str) -> list[Cell]:
    """The cells of a script.

    >>> [cell.kind for cell in cells("# %% [markdown]\\n# # Title\\n# %%\\nx = 1\\n")]
    ['markdown', 'code']
    """
    found = []
    for part in ("\n" + text).split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip("\n").split("\n")]
            found.append(Cell("markdown", "\n".join(lines)))
        else:
            found.append(Cell("code", body.strip("\n")))
    return found


def run(path: Path) -> list[Cell]:
    """The cells of a script with what running them in an empty folder showed."""
    namespace: dict[str, Any] = {"__name__": "__tutorial__"}
    before, script = os.getcwd(), cells(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return [_run(cell, namespace, str(path)) if cell.kind == "code" else cell for cell in script]
        finally:
            os.chdir(before)


def _run(cell: Cell, namespace: dict[str, Any], name: str) -> Cell:
    tree = ast.parse(cell.source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    html = ""
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if hasattr(value, "_repr_html_"):
                html = value._repr_html_()
            elif value is not None:
                print(value)
    return Cell("code", cell.source, printed.getvalue().rstrip(), html)


def page(ran: list[Cell], notebook: str) -> str:
    """A page of Markdown."""
    parts = []
    for cell in ran:
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed}\n```")
        if cell.html:
            parts.append(f'```{{raw}} html\n<div class="shows">{cell.html}</div>\n```')
    parts.append(f'```{{raw}} html\n<p><a href="{notebook}" download>Download as a notebook</a></p>\n```')
    return "\n\n".join(parts) + "\n"


def notebook(ran: list[Cell]) -> str:
    """The same as a Jupyter notebook."""
    made = []
    for k, cell in enumerate(ran):
        shared = {"id": f"cell-{k}", "metadata": {}, "source": cell.source}
        if cell.kind == "markdown":
            made.append({"cell_type": "markdown", **shared})
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed + "\n"})
        if cell.html:
            data = {"text/html": cell.html, "text/plain": ""}
            outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
        made.append({"cell_type": "code", "execution_count": None, "outputs": outputs, **shared})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": kernel, "cells": made}, indent=1) + "\n"
