"""Error codes: every class has its own or its base's, the page lists them all, and the command line prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from quietgrad.cli import main
from quietgrad.core.errors import DataError, ExhaustedError, QuietgradError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


def kinds(base: type[QuietgradError] = QuietgradError) -> Iterator[type[QuietgradError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_the_page_lists_every_code_with_its_class() -> None:
    for module in ("federation.secure.identity", "core.ledger.keys", "tables.scanned"):
        import_module(f"quietgrad.{module}")
    own = {kind.code: kind.__name__ for kind in kinds() if "code" in vars(kind)}
    listed = dict(re.findall(r"^\| `(QG-[A-Z]+)` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert listed == own
    assert all(kind.code != QuietgradError.code for kind in kinds() if kind.__module__.startswith("quietgrad."))


def test_the_code_is_of_the_class_and_behind_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert ExhaustedError("no more").code == "QG-EXHAUSTED"
    assert str(DataError("rows.csv: no rows.")) == "rows.csv: no rows."
    assert main(["verify", "no-such-file.json"]) == 1
    assert capsys.readouterr().err.endswith("[QG-DATA]\n")
