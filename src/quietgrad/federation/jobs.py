"""What is submitted to an engine that is there already: a job folder of FLARE, or an app of Flower."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, get_args

from quietgrad.errors import DataError
from quietgrad.federation.plan_file import PlanFile

Engine = Literal["flare", "flower"]
_HOME = "quietgrad.federation.transport"
CLASSES = (f"{_HOME}.flare.QuietgradController", f"{_HOME}.flare.QuietgradExecutor")
"""What FLARE's sites have on their ``class_allow_list``."""
_APP = "quietgrad_app"
_FLOWER_END = "from {home}.flower import {end}_app as app\n\n__all__ = ['app']\n"
_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation of quietgrad; the plan's digest is {digest}"
license = "Apache-2.0"
dependencies = ["flwr>=1.41", "quietgrad"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "quietgrad"

[tool.flwr.app.components]
serverapp = "{app}.server:app"
clientapp = "{app}.client:app"

[tool.flwr.app.config]
approval = ""
"""


def write_job(file: PlanFile, engine: str, folder: Path) -> list[Path]:
    """Write what is submitted to ``engine``; returns the files. There is nothing secret in them.

    Neither holds the plan: each site answers for the plan that it approved, and refuses all others.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r}: must be one of {', '.join(get_args(Engine))}.")
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder}: is not empty; choose another folder for the job.")
    if engine == "flare":
        base = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
        controller, executor = ({"path": path, "args": {}} for path in CLASSES)
        content = {
            "meta.json": {
                "name": f"quietgrad-{file.name}", "resource_spec": {}, "deploy_map": {"app": ["@ALL"]},
                "min_clients": file.plan.quorum + len(file.plan.servers),
            },
            "app/config/config_fed_server.json": {**base, "workflows": [{"id": "quietgrad", **controller}]},
            "app/config/config_fed_client.json": {
                **base, "executors": [{"tasks": ["quietgrad"], "executor": executor}],
            },
        }  # fmt: skip
        made = {name: json.dumps(each, indent=2) + "\n" for name, each in content.items()}
    else:
        made = {f"{_APP}/{end}.py": _FLOWER_END.format(home=_HOME, end=end) for end in ("server", "client")}
        made[f"{_APP}/__init__.py"] = ""
        made["pyproject.toml"] = _PYPROJECT.format(name=f"quietgrad-{file.name}", digest=file.digest, app=_APP)
    for name, text in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in made]
