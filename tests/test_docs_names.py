"""Every name in backticks on the pages and in docstrings stands for something that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import names

ROOT = names.ROOT
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(names.SOURCE.rglob("*.py"))
_ROLE = re.compile(r":(?:py:)?(\w+):`~?([^`<>]+)`")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def in_backticks(text: str) -> Iterator[str]:
    """What stands between backticks, single or double, outside blocks; a role's target is not among them."""
    text = _ROLE.sub("", _FENCE.sub("", text))
    for double, single in re.findall(r"``((?:[^`]|`(?!`))+)``|(?<!`)`([^`]+)`(?!`)", text):
        yield double or single


def references(text: str) -> Iterator[str]:
    """The targets of roles such as :class:`quietgrad.Budget`."""
    for _, target in _ROLE.findall(_FENCE.sub("", text)):
        yield target.strip()


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of the docstrings of a module, those below attributes included, without their examples."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for text in names._docstrings(tree):
        prose = "\n".join(line for line in str(text.value).splitlines() if not re.match(r"\s*(>>>|\.\.\. )", line))
        yield f"{path.relative_to(ROOT)}:{text.lineno}", prose


def module_of(path: Path) -> str:
    dotted = ".".join(path.relative_to(names.SOURCE.parent).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


def stale(text: str, module: str = "") -> list[str]:
    """What a text names that does not exist."""
    found = [
        f"{wrong} in `{content}`" for content in in_backticks(text) for wrong in names.problems(content, module)
    ]
    return found + [
        target for target in references(text) if names.lookup(target.lstrip("~."), module) is names.MISSING
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page: Path) -> None:
    assert stale(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(names.SOURCE)))
def test_docstrings_name_what_exists(path: Path) -> None:
    found = {where: wrong for where, text in docstrings(path) if (wrong := stale(text, module_of(path)))}
    assert found == {}
