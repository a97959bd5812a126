"""The list of what quietgrad stands on: bounded, as installed here, and judged by an index that is a folder."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def supply() -> ModuleType:
    spec = importlib.util.spec_from_file_location("supply", ROOT / "tools" / "supply.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_direct_dependency_has_an_upper_bound(supply: ModuleType) -> None:
    wanted = supply.direct()
    assert {"numpy", "cryptography", "sphinx", "ruff"} <= wanted.keys()
    for name, each in wanted.items():
        assert any(part.operator in ("<", "<=", "==") for part in each.specifier), name


def test_constraints_are_what_is_installed(supply: ModuleType) -> None:
    """What is asked for and installed has the version of the list, and the list has all that is asked for."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    listed = dict(line.split("==") for line in lines)
    wanted = supply.direct()
    assert wanted.keys() <= listed.keys()
    seen = 0
    for name, pinned in listed.items():
        if name in wanted:
            assert wanted[name].specifier.contains(pinned), (name, pinned)
        try:
            here = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        seen += 1
        if name in wanted:
            assert here == pinned, name
    assert seen > 10


def test_yanked_and_abandoned_projects_are_found(
    supply: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = version("numpy").partition("+")[0]
    shelf = tmp_path / "numpy"
    shelf.mkdir()
    file = f"numpy-{here}-cp311-cp311-linux_x86_64.whl"
    (shelf / "index.html").write_text(f'<a href="{file}#sha256=00">{file}</a>')
    places = [tmp_path.as_uri()]
    assert supply.check(places) == 0
    assert capsys.readouterr().out.startswith("1 of ")
    (shelf / "index.html").write_text(f'<a href="{file}" data-yanked="wrong answers">{file}</a>')
    assert supply.check(places) == 1
    assert "was yanked: wrong answers" in capsys.readouterr().out
    assert supply.check([(tmp_path / "nothing").as_uri()]) == 2  # nobody was asked: that is no clean bill
