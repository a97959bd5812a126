"""One environment for each peer, made once and kept under the user's cache; a peer that cannot be had says so."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quietgrad" / "peers"
SCIKIT_LEARNS = ("1.9", "1.8", "1.7", "1.6")  # newest first: diffprivlib lags behind


@dataclass(frozen=True)
class Environment:
    """What is installed where."""

    name: str
    packages: tuple[str, ...]
    try_it: tuple[str, ...]  # words after ``python`` that only work if it was installed

    @property
    def folder(self) -> Path:
        return CACHE / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def made(self) -> str | None:
        """Make it unless it is there; None, or why it cannot be had."""
        if (self.folder / "ready").exists():
            return None
        CACHE.mkdir(parents=True, exist_ok=True)
        commands = {
            "venv": [sys.executable, "-m", "venv", "--clear", str(self.folder)],
            "pip install": [str(self.python), "-m", "pip", "install", "--quiet", *self.packages],
            "its first use": [str(self.python), *self.try_it],
        }
        for what, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, env=alone())
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()] or ["(nothing said)"]
                return f"{what} failed: {lines[-1].partition(' (/')[0][:300]}"
        (self.folder / "ready").touch()
        return None


def alone() -> dict[str, str]:
    """The environment of a process that sees its own packages alone and one thread."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    jax = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "JAX_PLATFORMS": "cpu"}
    return {**kept, **one, **jax, "FLWR_TELEMETRY_ENABLED": "0"}


OPACUS = Environment("opacus", ("torch==2.13.0", "opacus==1.6.0", str(ROOT)), ("-c", "import opacus, quietgrad"))
JAX_PRIVACY = Environment("jax-privacy", ("jax-privacy==2.0.0",), ("-c", "import jax_privacy, optax"))
FLOWER = Environment("flower", ("flwr==1.41.0", "hatchling"), ("-c", "import flwr.serverapp"))


def diffprivlib() -> tuple[Environment | None, list[str]]:
    """diffprivlib with the newest scikit-learn that it works with, and why newer ones do not do."""
    said = []
    for line in SCIKIT_LEARNS:
        packages = ("diffprivlib==0.6.6", f"scikit-learn=={line}.*")
        script = str(Path(__file__).parent / "diffprivlib_side.py")
        environment = Environment(f"diffprivlib-{line}", packages, (script, "try"))
        why = environment.made()
        if why is None:
            return environment, said
        said.append(f"scikit-learn {line}: {why}")
    return None, said
