"""The TOML file that all institutions of a federation agree on, and the plan, objective and algorithm it describes.

All members read the same file and derive the same plan from it, noise included. Two files agree when their digests
do: comments, order and spacing do not count. What is submitted to an engine that is there already, a job folder of
FLARE or an app of Flower, is written here too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from quietgrad.core import files
from quietgrad.core.accounting.budget import DEFAULT_RELATION, Budget, Relation
from quietgrad.core.errors import DataError, QuietgradError, SettingError
from quietgrad.core.files import check_path_name
from quietgrad.federation.network import NETWORK, Beside, NetworkSource, nothing_beside
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.record_format import SETTINGS, RecordFormat
from quietgrad.federation.table_format import SETTINGS as TABLE_SETTINGS
from quietgrad.federation.table_format import TableFormat
from quietgrad.methods.registry import entry
from quietgrad.named_settings import check_types
from quietgrad.tables.registry import loss_entry, make_objective


def needed(section: Mapping[str, object], key: str, where: str) -> Any:
    if key not in section:
        raise ValueError(f"{where} needs {key!r}.")
    return section[key]


def objective_of(
    settings: Mapping[str, object], data: Mapping[str, Any], beside: Beside
) -> tuple[Any, TableFormat | RecordFormat, dict[str, Any]]:
    """The objective of ``[objective]``, the records of ``[data]``, and the public facts that a saved model needs.

    A network's objective is for planning only: see :mod:`quietgrad.federation.network`.
    """
    name, settings = _named(settings, "[objective]")
    if name == NETWORK:
        network, records = NetworkSource.of(settings, beside), RecordFormat.of(data)
        return network, records, {**records.facts, **network.facts}
    check_types(data, "[data]", TABLE_SETTINGS)
    table = TableFormat.of(data, loss_entry(name)[0].task)
    names = table.class_names
    objective, facts = make_objective(name, settings, classes=None if names is None else len(names))
    return objective, table, {**facts, "features": table.features, "class_names": names}


def _named(settings: Mapping[str, object], where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(settings, dict):
        raise ValueError(f"{where} must be a table.")
    name = needed(settings, "name", where)
    if not isinstance(name, str):
        raise ValueError(f"{where} name={name!r}: must be a text.")
    return name, {key: value for key, value in settings.items() if key != "name"}


COORDINATOR = "coordinator"
MOST_BYTES = 1 << 20  # about fifteen thousand parties
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
SECTIONS: dict[str, dict[str, Any]] = {
    "federation": {
        "name": str, "trust": str, "secure": str, "weights": str, "quorum": int, "colluders": int, "servers": int,
        "spare": int, "private": bool, "parties_per_person": int, "records_public": int, "combine": str,
        "records_per_person": int, "ring": int, "parties_per_round": int,
    },
    "coordinator": {"address": str, "timeout": float, "grace": float},
    "data": SETTINGS,
    "budget": {"epsilon": float, "delta": float, "relation": str},
}  # fmt: skip
"""The settings of a plan file's sections, with their types; those of algorithms and losses are their own fields."""
PARTY: dict[str, Any] = {"name": str, "records": int, "weight": float}


@dataclass(frozen=True)
class PlanFile:
    """A federation as its TOML file describes it; read it with :func:`read_plan` or :func:`parse_plan`.

    All members pin ``digest``, of the file's content. ``settings`` are further arguments of
    :func:`~quietgrad.federation.planning.federate`, ``table`` is the format of the parties' files, and ``model``
    what a saved model needs to score records. ``objective`` is what planning needs: that of a network cannot be
    asked for sums, and :class:`~quietgrad.federation.approved.Approved` builds the one that can.
    """

    name: str
    digest: str
    algorithm: Any
    objective: Any
    budget: Budget | None
    parties: tuple[str, ...]
    sizes: tuple[int, ...]
    table: TableFormat | RecordFormat
    settings: Mapping[str, Any]
    host: str
    port: int
    timeout: float
    grace: float
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> int:
        return self.table.features

    @cached_property
    def plan(self) -> FederatedPlan:
        """The calibrated plan; its noise multiplier is rounded up to four digits, so that all machines agree."""
        shape = self._shape
        try:
            plan = federate(
                self.algorithm, self.objective, names=self.parties, sizes=self.sizes,
                shape=shape, budget=self.budget, **self.settings,
            )  # fmt: skip
        except SettingError as error:
            raise DataError(f"{self.name}: {error}") from error
        except QuietgradError:
            raise
        except ValueError as error:
            raise DataError(f"{self.name}: {error}") from error
        if not plan.is_private:
            return plan
        return dataclasses.replace(plan, noise_multiplier=_rounded_up(plan.noise_multiplier))

    @property
    def _shape(self) -> Shape:
        if (network := self.network) is not None:
            return Shape(network.parameters)
        return Shape((self.features + self.objective.intercept) * self.objective.outputs, self.features)

    @property
    def network(self) -> NetworkSource | None:
        """The network's text and weights, if the plan names one."""
        return self.objective if isinstance(self.objective, NetworkSource) else None

    @cached_property
    def members(self) -> tuple[str, ...]:
        """All who need keys: the parties, the servers if there are any, and the coordinator."""
        return (*self.plan.names, *self.plan.servers, COORDINATOR)


def read_plan(path: str | Path) -> PlanFile:
    """Read a plan file, and the files beside it that it names; none of their code is run."""
    return parse_plan(read_text(path), str(path), beside(path))


def beside(plan: str | Path) -> Beside:
    """Reads files of the folder that ``plan`` is in."""

    def read(name: str, most: int) -> bytes:
        path = Path(plan).parent / name
        try:
            return files.read_bytes(path, most=most)
        except OSError as error:
            raise DataError(f"{path}: the plan names this file ({files.os_error_text(error)}).") from None

    return read


def read_text(path: str | Path) -> str:
    try:
        return files.read_text(path, most=MOST_BYTES)
    except OSError as error:
        raise DataError(f"{path}: no plan file can be read here ({files.os_error_text(error)}).") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: not a text file.") from None


def parse_plan(text: str, source: str = "plan", files_beside: Beside = nothing_beside) -> PlanFile:
    """The federation that a TOML text describes; anything unknown in it is refused.

    ``files_beside`` reads the files that it names: a network's module and weights.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{source}: not a TOML file: {error}.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{source}: not a TOML file: nested too deep, or a number of too many digits.") from None
    try:
        return _plan(content, files_beside)
    except DataError:
        raise
    except (ValueError, TypeError, OverflowError, AttributeError, RecursionError) as error:
        raise DataError(f"{source}: {error}") from error


def _plan(content: dict[str, Any], files_beside: Beside) -> PlanFile:
    section_names = {*SECTIONS, "algorithm", "objective", "party"}
    if extra := sorted(content.keys() - section_names):
        raise ValueError(f"section {extra[0]!r} is not known; there may be {', '.join(sorted(section_names))}.")
    sections = (check_types(content.get(name, {}), f"[{name}]", allowed) for name, allowed in SECTIONS.items())
    federation, where, data, promise = sections
    parties = content.get("party", [])
    if not isinstance(parties, list) or not parties:
        raise ValueError("parties are missing: add a [[party]] with name and records for each.")
    names, sizes, weights = _parties(parties)
    if any(name == COORDINATOR or re.fullmatch(r"server-\d+", name) for name in names):
        raise ValueError("a party cannot be called 'coordinator' or 'server-1': these names are taken.")
    private = federation.pop("private", True)
    if private != bool(promise):
        raise ValueError("[budget] must state epsilon and delta, exactly when [federation] private is not false.")
    if weights is not None:
        if "weights" in federation:
            raise ValueError("weights are given twice: in [federation] and for each party.")
        federation["weights"] = weights
    if "person" in data:  # then the parties' records are numbers of people
        federation["unit"] = "person"
    objective, table, model = objective_of(content.get("objective", {}), data, files_beside)
    method, settings = _named(content.get("algorithm", {}), "[algorithm]")
    seconds = {name: float(where.get(name, default)) for name, default in (("timeout", 60), ("grace", 15))}
    for name, value in seconds.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"[coordinator] {name}={value!r}: must be a number of seconds > 0.")
    budget = None
    if private:
        epsilon, delta = (needed(promise, name, "[budget]") for name in ("epsilon", "delta"))
        budget = Budget(epsilon, delta, Relation.parse(promise.get("relation", DEFAULT_RELATION)))
    host, port = address_of(where.get("address", "127.0.0.1:7443"))
    return PlanFile(
        name=check_path_name("[federation] name", federation.pop("name", "federation")),
        digest=_digest(content, objective),
        algorithm=entry(method).make(settings), objective=objective, budget=budget, table=table,
        parties=names, sizes=sizes, settings=federation, host=host, port=port, model=model,
        **seconds,
    )  # fmt: skip


def _digest(content: Mapping[str, Any], objective: object) -> str:
    """SHA-256 of the plan's content, and of the files that it names, by theirs."""
    pinned = {**content, "files": objective.digests} if isinstance(objective, NetworkSource) else content
    return hashlib.sha256(json.dumps(pinned, sort_keys=True, default=str).encode()).hexdigest()


def _parties(entries: list[object]) -> tuple[tuple[str, ...], tuple[int, ...], list[float] | None]:
    rows = [check_types(entry, "[[party]]", PARTY) for entry in entries]
    names = tuple(needed(row, "name", "[[party]]") for row in rows)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"party {name!r}: a name has small letters, digits and hyphens, at most 63.")
    weighted = [row for row in rows if "weight" in row]
    if weighted and len(weighted) < len(rows):
        raise ValueError("weights: give every party a weight, or none.")
    sizes = tuple(needed(row, "records", f"party {row['name']!r}") for row in rows)
    return names, sizes, [float(row["weight"]) for row in rows] if weighted else None


def address_of(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"[coordinator] address={text!r}: must be HOST:PORT, such as 127.0.0.1:7443.")
    return host.strip("[]"), int(port)


def _rounded_up(z: float) -> float:
    """``z`` to four digits, never less: more noise costs no privacy.

    >>> _rounded_up(1.23401), _rounded_up(20.0)
    (1.235, 20.0)
    """
    grain = 10.0 ** (math.floor(math.log10(z)) - 3)
    return float(f"{math.ceil(z / grain * (1.0 - 1e-12)) * grain:.6g}")


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
        job_files = {name: json.dumps(each, indent=2) + "\n" for name, each in content.items()}
    else:
        job_files = {f"{_APP}/{end}.py": _FLOWER_END.format(home=_HOME, end=end) for end in ("server", "client")}
        job_files[f"{_APP}/__init__.py"] = ""
        job_files["pyproject.toml"] = _PYPROJECT.format(name=f"quietgrad-{file.name}", digest=file.digest, app=_APP)
    for name, text in job_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(folder / name, text.encode())
    return [folder / name for name in job_files]
