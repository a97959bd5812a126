"""NVIDIA FLARE around a federation: startup kits, what each site allows, the job, and the site's own settings.

A kit is made for each member by FLARE's own provisioning (mutual TLS). Before a site starts, its kit is told what
this site permits: a job may build the two classes of :mod:`quietgrad.federation.flare_job` and FLARE's
Collab runtime, ships no code of its own, and runs no shell commands. The job itself is three small JSON files.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quietgrad.errors import DataError
from quietgrad.federation import network
from quietgrad.federation.matching import read_matching
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.provision import COORDINATOR, Credentials
from quietgrad.federation.toml_plan import PlanFile
from quietgrad.files import close_to_others, read_json, write_atomically
from quietgrad.privacy.budget import Budget

ADMIN = "admin@quietgrad.local"
KIT, ADMIN_KIT = "nvflare", "nvflare-admin"
_ORG = _PROJECT = "quietgrad"
_HOME = "quietgrad.federation.flare_job"
_ALLOWED = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    f"{_HOME}.Coordinator",
    f"{_HOME}.Site",
)
_CHUNKS = (1 << 16, 1 << 20)  # bytes; the longest is what FLARE uses
_LOGS = ("site_log_streamer", "log_receiver")
_RIGHTS = {
    "submit_job": "any", "clone_job": "none", "manage_job": "any", "download_job": "none", "view": "any",
    "operate": "any", "shell_commands": "none", "byoc": "none",
}  # fmt: skip


@dataclass(frozen=True)
class SiteSettings:
    """What one site reads and writes, in ``local/quietgrad.json`` of its kit; a job cannot change it."""

    plan: str
    keys: str
    folder: str
    data: str | None = None
    ledger: str | None = None
    account: str = "default"
    cap_epsilon: float | None = None
    people_key: str | None = None
    people_lists: str | None = None

    FILE = "quietgrad.json"

    def write(self, kit: Path) -> None:
        """Put the settings into a kit."""
        write_atomically(kit / "local" / self.FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, local: str | Path) -> SiteSettings:
        """Read the settings of the site that runs here."""
        return cls(**read_json(Path(local) / cls.FILE))

    @property
    def out(self) -> Path:
        """The folder for what this site keeps."""
        return Path(self.folder)

    def ledger_for(self, file: PlanFile) -> Path | None:
        """The site's ledger; none for a plan without noise."""
        if file.budget is None:
            return None
        return self.out / "ledger.jsonl" if self.ledger is None else Path(self.ledger)

    def cap_for(self, file: PlanFile) -> Budget | None:
        """The most that the account may spend."""
        if self.cap_epsilon is None or file.budget is None:
            return None
        return Budget(self.cap_epsilon, file.budget.delta, file.budget.relation)

    def member(self, file: PlanFile) -> PartyCurator | SumMember:
        """What answers at this site: a party with its records, or a server of a secure sum."""
        credentials = Credentials.read(self.keys)
        if self.data is None:
            return network.server(file, credentials)
        table = network.records(file, self.data)
        key, lists = (None if path is None else Path(path) for path in (self.people_key, self.people_lists))
        return network.party(
            file, credentials, network.held(table), folder=self.out, ledger=self.ledger_for(file),
            account=self.account, cap=self.cap_for(file), matching=read_matching(key, lists, file.parties),
        )  # fmt: skip

    def tell(self, words: str) -> None:
        """Add a line to the folder's ``progress.log``."""
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "progress.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {words}\n")

    def end(self, words: str, *, done: bool) -> None:
        """Leave how the run ended in the folder's ``outcome.json``."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_atomically(self.out / "outcome.json", json.dumps({"words": words, "done": done}).encode())


def make_kits(file: PlanFile, keys: Path) -> None:
    """Make a startup kit for every member inside its folder of keys; the coordinator also gets the admin's."""
    import tempfile

    from nvflare.lighter.prov_utils import prepare_builders, prepare_packager
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    project = _project(file)
    # FLARE writes its root's private key with the rights of any file: here only the owner may enter and read.
    with tempfile.TemporaryDirectory() as scratch, _private_files():
        builders, packager = prepare_builders(project), prepare_packager(project)
        with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
            Provisioner(scratch, builders, packager).provision(prepare_project(project))
        made = Path(scratch) / _PROJECT / "prod_00"
        for name in file.members:
            _move(made / name, keys / name / KIT)
        _move(made / ADMIN, keys / COORDINATOR / ADMIN_KIT)
        bind(file, keys / COORDINATOR / KIT / "startup" / "fed_server.json")


def prepare_kit(credentials: Credentials, settings: SiteSettings) -> Path:
    """Tell a kit what this site permits and where its things are; returns the kit."""
    kit = (credentials.folder / KIT).resolve()
    if not (kit / "startup").is_dir():
        raise DataError(f"{kit}: no startup kit here; run `quietgrad federate provision --engine nvflare`.")
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = list(_ALLOWED)
    resources["class_list_enforcement_mode"] = "enforce"
    # FLARE would send a site's error log to the server, and a log may hold what no release may.
    resources["allow_log_streaming"] = False
    resources["components"] = [part for part in resources["components"] if part["id"] not in _LOGS]
    text = json.dumps(resources, indent=2)
    text = text.replace("/tmp/nvflare/", f"{kit}/")  # FLARE's own storage belongs to this site, not to everybody
    write_atomically(local / "resources.json", text.encode())
    rights = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
    write_atomically(local / "authorization.json", json.dumps(rights, indent=2).encode())
    logging = json.loads((local / "log_config.json.default").read_text())
    logging["loggers"]["root"]["level"] = "WARNING"  # else a dozen lines per party and round
    write_atomically(local / "log_config.json", json.dumps(logging, indent=2).encode())
    settings.write(kit)
    return kit


def command(credentials: Credentials, kit: Path) -> list[str]:
    """What starts this member's FLARE process."""
    if credentials.name == COORDINATOR:
        module, config, who = "server.server_train", "fed_server.json", []
    else:
        module, config, who = "client.client_train", "fed_client.json", [f"uid={credentials.name}"]
    start = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(kit), "-s", config]
    return [*start, "--set", "secure_train=true", *who, f"org={_ORG}", "config_folder=config"]


def environment(file: PlanFile) -> dict[str, str]:
    """This process's environment, and the settings without which FLARE's memory grows with the rounds.

    It keeps a thread and a copy for a minute for every message it received; what is lost on the way is missed at
    the exchange's deadline anyway, so two seconds do. For every message, however short, it makes a buffer for a
    whole chunk of a megabyte, which leaves the heap in pieces: here a chunk is about as long as the plan's vectors.
    And glibc gives every thread an arena and keeps long vectors in it; with a fixed threshold they go back to the
    system.
    """
    vector = 8 * max([1, *file.plan.dims.values()]) + 4096  # bytes, with the message's header
    chunk = min(max(1 << (vector - 1).bit_length(), _CHUNKS[0]), _CHUNKS[1])
    retry = {"NVFLARE_STREAMING_RETRY_TIMEOUT": "2", "NVFLARE_STREAMING_RETRY_WAIT": "0.5"}
    # FLARE's receivers keep places for 1024 chunks and complain if its usual window of 64 MB has more.
    window = min(256 * chunk, 1 << 26)
    sizes = {"NVFLARE_STREAMING_CHUNK_SIZE": str(chunk), "NVFLARE_STREAMING_WINDOW_SIZE": str(window)}
    memory = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "67108864"}
    return {**memory, **retry, **sizes, **os.environ}


def write_job(file: PlanFile, folder: Path) -> Path:
    """Write the job; returns the folder to submit."""
    job = folder / "quietgrad-job"
    threads = {"max_inbound_call_threads": 8, "max_outbound_call_threads": 2 * len(file.members)}
    shared: dict[str, Any] = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}
    arguments = {"collab_obj_ids": [], "props": {}, **threads}
    controller = {"path": _ALLOWED[0], "args": {"server_obj_id": "_server", **arguments}}
    executor = {"path": _ALLOWED[1], "args": {"client_obj_id": "_client", **arguments}}
    files = {
        "meta.json": {
            "name": "quietgrad", "resource_spec": {}, "deploy_map": {"app": ["@ALL"]},
            "min_clients": len(file.members) - 1,
        },
        "app/config/config_fed_server.json": {
            **shared, "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "_server", "path": _ALLOWED[2], "args": {}}],
        },
        "app/config/config_fed_client.json": {
            **shared, "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [{"id": "_client", "path": _ALLOWED[3], "args": {}}],
        },
    }  # fmt: skip
    for name, content in files.items():
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text(json.dumps(content, indent=2) + "\n")
    return job


def _project(file: PlanFile) -> dict[str, Any]:
    server = {
        "name": COORDINATOR, "type": "server", "org": _ORG, "fed_learn_port": file.port,
        "admin_port": file.port + 1, "default_host": file.host, "host_names": [file.host],
    }  # fmt: skip
    clients = [{"name": name, "type": "client", "org": _ORG} for name in file.members if name != COORDINATOR]
    impl = "nvflare.lighter.impl"
    return {
        "api_version": 3,
        "name": _PROJECT,  # it becomes a folder; the federation's own name is of no use to FLARE
        "description": "made by quietgrad federate provision",
        "participants": [
            server, *clients, {"name": ADMIN, "type": "admin", "org": _ORG, "role": "project_admin"},
        ],
        "builders": [
            {"path": f"{impl}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{impl}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{impl}.cert.CertBuilder"},
            {"path": f"{impl}.signature.SignatureBuilder"},
        ],
    }  # fmt: skip


def is_bound(file: PlanFile) -> bool:
    """Whether FLARE's server listens on the plan's address only: it can on IPv4's loopback, and nowhere else.

    >>> from types import SimpleNamespace as at
    >>> [is_bound(at(host=host)) for host in ("127.0.0.1", "localhost", "10.0.0.7", "clinic.example", "::1")]
    [True, True, False, False, False]
    """
    if file.host == "localhost":
        return True
    try:
        return ipaddress.IPv4Address(file.host).is_loopback
    except ValueError:
        return False


def bind(file: PlanFile, config: Path) -> None:
    """Give FLARE's server the host to listen on; its own provisioning writes a name there, which means all."""
    settings = read_json(config)
    host = file.host if is_bound(file) else "0.0.0.0"
    for server in settings["servers"]:
        server["service"]["target"] = f"{host}:{file.port}"
        server["admin_host"] = host
    write_atomically(config, json.dumps(settings, indent=2).encode())


def _move(source: Path, target: Path) -> None:
    import shutil

    shutil.move(str(source), str(target))
    close_to_others(target)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Whatever a library writes inside, others may not read."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
