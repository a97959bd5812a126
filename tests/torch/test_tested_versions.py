"""Versions of torch outside the tested range are refused, at import and by the metadata alike."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from quietgrad.torch.tested_versions import TESTED, require_tested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.4.0", "2.1", "2.130.0", "2.15.0+cu132", "3.12.0", "2", ""])
def test_another_version_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match="Install one of these"):
        require_tested(version)


def test_the_installed_version_passes() -> None:
    require_tested(torch.__version__)


def test_the_extra_installs_what_is_tested_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = Requirement(project["optional-dependencies"]["torch"][0]).specifier
    versions = {f"2.{minor}" for minor in range(40)} | {"3.0"}
    assert {version for version in versions if specifier.contains(f"{version}.0")} == set(TESTED)


def test_the_package_refuses_before_it_imports_its_engine() -> None:
    code = (
        "import sys, torch; torch.__version__ = '2.15.0'\n"
        "try: import quietgrad.torch.networks.module\n"
        "except ImportError as error: print(error, 'quietgrad.torch.networks' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch 2.15.0 is installed" in done.stdout
    assert done.stdout.endswith("False\n")
