"""An NVIDIA FLARE deployment of this machine, as an institution would have it: provisioned by FLARE, mutual TLS.

Used by ``tests/federation/test_flare.py`` and ``benchmarks/federation_engines.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADMIN, SERVER = "admin@quietgrad.local", "server"
SECONDS = 150.0  # to give up, not to measure
_IMPL = "nvflare.lighter.impl"
_ADMINISTRATOR = """
import os, sys, time
from nvflare.fuel.flare_api.flare_api import new_secure_session
session = new_secure_session(sys.argv[1], sys.argv[2], timeout=20.0)
job = session.submit_job(sys.argv[3])
while "FINISHED" not in (status := str(session.get_job_status(job))):
    time.sleep(0.3)
print(status, flush=True)
os._exit(0)  # not by way of FLARE's threads
"""


class Flare:
    """A server and sites of these names, running.

    Args:
        folder: for the kits.
        names: of the sites.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.names = folder, names
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        port = free_ports()
        participants = [
            {"name": SERVER, "type": "server", "org": "o", "fed_learn_port": port, "default_host": "localhost"},
            *({"name": name, "type": "client", "org": "o"} for name in names),
            {"name": ADMIN, "type": "admin", "org": "o", "role": "project_admin"},
        ]
        builders: list[dict[str, Any]] = [
            {"path": f"{_IMPL}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{_IMPL}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{_IMPL}.cert.CertBuilder"},
            {"path": f"{_IMPL}.signature.SignatureBuilder"},
        ]
        project = {"api_version": 3, "name": "p", "participants": participants, "builders": builders}
        (folder / "project.json").write_text(json.dumps(project))  # JSON is YAML
        subprocess.run(
            [Path(sys.executable).parent / "nvflare", "provision", "-p", "project.json", "-w", "kits"],
            cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kit(self, name: str) -> Path:
        """A member's startup kit; the server is called :data:`SERVER`."""
        return self.folder / "kits" / "p" / "prod_00" / name

    def allow(self, name: str, classes: tuple[str, ...]) -> None:
        """What a site's administrator does: our classes on the allow list, and nothing else."""
        local = self.kit(name) / "local"
        text = (local / "resources.json.default").read_text().replace("/tmp/nvflare/", f"{self.kit(name)}/")
        resources = json.loads(text)
        resources["class_allow_list"] += classes
        (local / "resources.json").write_text(json.dumps(resources))

    def start(self) -> None:
        """Start everybody and wait until the sites are connected."""
        for name in (SERVER, *self.names):
            self._start(name)
        limit = time.monotonic() + SECONDS
        while not all("Successfully registered" in self.log(name) for name in self.names):
            if time.monotonic() > limit:
                raise TimeoutError("FLARE did not come up: " + self.log(SERVER)[-2000:])
            time.sleep(0.2)

    def submit(self, job: Path) -> subprocess.Popen[str]:
        """Submit a job folder, as an administrator would; the process ends with the job."""
        words = [sys.executable, "-c", _ADMINISTRATOR, ADMIN, str(self.kit(ADMIN)), str(job.resolve())]
        return subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    @staticmethod
    def status(submitted: subprocess.Popen[str]) -> str:
        """How a job ended."""
        out, _ = submitted.communicate(timeout=SECONDS)
        return out.splitlines()[-1]

    def log(self, name: str) -> str:
        """What a member's processes said."""
        files = [self.folder / f"{name}.log", *sorted(self.kit(name).rglob("log*.txt"))]
        return "\n".join(path.read_text(errors="replace") for path in files if path.exists())

    def job_process(self, name: str) -> int:
        """The process in which a site answers for a job."""
        kit = str(self.kit(name))
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if each.name.isdigit():
                    words = (each / "cmdline").read_bytes().decode(errors="replace")
                    if kit in words and "worker_process" in words:
                        return int(each.name)
        raise ProcessLookupError(name)

    def close(self) -> None:
        """End everything that was started here."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own group: it and its jobs
            process.wait()

    def _start(self, name: str) -> None:
        kit = self.kit(name)
        if name == SERVER:
            module, config, who = "server.server_train", "fed_server.json", []
        else:
            module, config, who = "client.client_train", "fed_client.json", [f"uid={name}"]
        words = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}", "-m", str(kit), "-s", config]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [*words, "--set", "secure_train=true", *who, "org=o", "config_folder=config"],
                cwd=kit, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip


def free_ports() -> int:
    """A port such that it and the next one are free."""
    for port in range(20_000 + (time.time_ns() % 20_000), 65_000, 7):
        try:
            for each in (port, port + 1):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
    raise OSError("no ports are free")
