"""Write the software bill of materials of an environment: CycloneDX JSON, by the tool of the CycloneDX project.

``tools/release.py`` writes one for a plain install of the wheel with the versions of constraints.txt. The bill has
every package with its version, licence and dependencies, and nothing of the machine that made it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from supply import licence

TOOL = "cyclonedx-bom==7.5.0"  # in an environment of its own: its dependencies are not quietgrad's
_HERE = re.compile(r"file:|(?<![\w./])/(?:home|root|tmp|work|opt|Users)/")


def write(python: Path, project: Path, target: Path, needed: Collection[str]) -> int:
    """Write the bill of what is installed for `python` to `target`; return the number of packages.

    Parameters
    ----------
    python: the interpreter of the environment, in which the package of `project` is installed.
    project: the folder of the package's pyproject.toml.
    target: the file to write.
    needed: names of packages that the bill must have.
    """
    with tempfile.TemporaryDirectory() as folder:
        tool = Path(folder) / "tool"
        subprocess.run([sys.executable, "-m", "venv", tool], check=True)
        subprocess.run([tool / "bin" / "python", "-m", "pip", "install", "--quiet", TOOL], check=True)
        command = [tool / "bin" / "cyclonedx-py", "environment", "--pyproject", project / "pyproject.toml"]
        options = ["--mc-type", "library", "--output-reproducible", "--of", "JSON", "--validate"]
        done = subprocess.run([*command, *options, python], check=True, capture_output=True, text=True)
    bill = with_licences(without_paths(json.loads(done.stdout)), licences_of(python))
    if problems := problems_of(bill, needed):
        raise SystemExit(f"{target.name}: " + "; ".join(problems))
    target.write_text(json.dumps(bill, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(bill["components"])


def licences_of(python: Path) -> dict[str, str]:
    """What the metadata of every package of an environment says about its licence, by canonical name."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    installed = distributions(path=[folder])
    return {canonicalize_name(each.metadata["Name"]): licence(each) for each in installed}


def with_licences(bill: dict[str, Any], licences: Mapping[str, str]) -> dict[str, Any]:
    """The bill with licences that metadata states in free words, which the tool leaves out."""
    for component in bill["components"]:
        words = licences.get(canonicalize_name(component["name"]))
        if not component.get("licenses") and words:
            component["licenses"] = [{"license": {"name": words, "acknowledgement": "declared"}}]
    return bill


def without_paths(bill: dict[str, Any]) -> dict[str, Any]:
    """The bill without references to files of this machine, from which the wheel was installed."""
    for component in [bill["metadata"]["component"], *bill["components"]]:
        references = component.get("externalReferences", [])
        component["externalReferences"] = [each for each in references if not each["url"].startswith("file:")]
    return bill


def problems_of(bill: dict[str, Any], needed: Collection[str]) -> list[str]:
    """What makes a bill useless: packages missing, or without version or licence, or a path of this machine."""
    parts = {canonicalize_name(each["name"]): each for each in bill["components"]}
    missing = sorted({canonicalize_name(name) for name in needed} - parts.keys())
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} has no version" for name, each in parts.items() if not each.get("version")]
    problems += [f"{name} has no licence" for name, each in parts.items() if not each.get("licenses")]
    if _HERE.search(json.dumps(bill)):
        problems.append("it names a path of this machine")
    return problems
