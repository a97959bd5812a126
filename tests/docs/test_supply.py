"""The list of what quietgrad stands on: bounded, as installed here, and judged by an index that is a folder."""

from __future__ import annotations

import copy
import importlib
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.fixture
def supply() -> ModuleType:
    return importlib.import_module("supply")


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


BILL: dict[str, Any] = {
    "metadata": {"component": {"name": "quietgrad", "version": "0.3.0"}},
    "components": [
        {"name": "numpy", "version": "2.4.6", "licenses": [{"license": {"id": "BSD-3-Clause"}}]},
        {"name": "dp_accounting", "version": "0.6.0"},
        {
            "name": "quietgrad-verify",
            "version": "0.3.0",
            "licenses": [{"license": {"id": "Apache-2.0"}}],
            "externalReferences": [{"type": "distribution", "url": "file:///tmp/x/quietgrad_verify.whl"}],
        },
    ],
}


def test_bill_of_materials_states_every_package_and_no_path() -> None:
    sbom = importlib.import_module("sbom")
    raw = copy.deepcopy(BILL)
    assert sbom.problems_of(raw, ["numpy", "SciPy"]) == [
        "scipy is missing",
        "dp-accounting has no licence",
        "it names a path of this machine",
    ]
    mended = sbom.with_licences(sbom.without_paths(raw), {"dp-accounting": "Apache 2.0"})
    assert sbom.problems_of(mended, ["numpy", "dp-accounting"]) == []
    mended["components"][0]["version"] = ""
    assert sbom.problems_of(mended, []) == ["numpy has no version"]


def test_metadata_lists_the_pythons_that_a_release_tries() -> None:
    """`make release` installs the wheel with each of these that is installed, and names those that are not."""
    release = importlib.import_module("release")
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [line.rpartition(" :: ")[2] for line in classifiers if "Python :: 3." in line]
    assert tuple(versions) == release.PYTHONS
