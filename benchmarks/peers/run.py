"""quietgrad beside Opacus, JAX Privacy, diffprivlib and Flower, each in an environment of its own.

    python benchmarks/peers/run.py [PEER ...] [--page]

Environments are made by pip under the user's cache on the first run. Every measure takes seconds; the whole some
minutes. Answers of peers that are not named stay as they are in the JSON. A peer that cannot be installed is said
to be absent, with pip's last line. --page: write docs/peers.md again from the JSON and measure nothing.
Times are CPU seconds of one thread, steps are ratios to plain SGD of the same framework in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import environments
import numpy as np
import task
from benchmarks.record import save
from page import write

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
NETWORKS = ("mnist-cnn4",)
PARTIES, DIMENSION, ROUND_DIMENSION = 100, 1000, 123


def asked(python: Path | str, script: Path, *words: str, env: dict[str, str] | None = None) -> Any:
    """The JSON that a script prints last."""
    command = [str(python), str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env or environments.alone())
    if done.returncode:
        raise RuntimeError(f"{script.name}: {(done.stderr.strip().splitlines() or ['failed'])[-1][:400]}")
    return json.loads(done.stdout.splitlines()[-1])


def ours() -> dict[str, str]:
    """The environment of our own processes: this interpreter, this tree."""
    return {**environments.alone(), "PYTHONPATH": str(ROOT / "src")}


def table(folder: Path) -> tuple[str, str]:
    """a9a (or what stands in for it) with rows of norm ≤ 1, for all to read."""
    from quietgrad.data import demo_dataset

    data = demo_dataset()
    X, X_test = ((rows if isinstance(rows, np.ndarray) else rows.toarray()) for rows in (data.X, data.X_test))
    bound = data.row_bound or float(np.linalg.norm(X, axis=1).max())  # public data: the benchmark's own
    path = folder / "table.npz"
    np.savez(path, X=X / bound, y=data.y, X_test=X_test / bound, y_test=data.y_test)
    return str(path), f"{data.name}, n = {len(data.y)}, d = {X.shape[1]}"


def quietgrad(path: str, folder: Path) -> dict[str, Any]:
    return dict(asked(sys.executable, HERE / "quietgrad_side.py", path, env=ours()))


def opacus(path: str, folder: Path) -> dict[str, Any]:
    """Its answers, and steps of both engines in one process by torch_engine.py."""
    if why := environments.OPACUS.made():
        return {"absent": why}
    env = {**environments.alone(), "PYTHONPATH": str(ROOT / "src")}  # the tree as it is, not as it was installed
    found = asked(environments.OPACUS.python, HERE / "opacus_side.py", path, env=env)
    steps = folder / "steps.json"
    script = ROOT / "benchmarks" / "torch_engine.py"
    words = [*NETWORKS, "--repeats", "5", "--out", str(steps)]
    subprocess.run([environments.OPACUS.python, script, *words], check=True, env=env, stdout=subprocess.DEVNULL)
    return {**found, "steps": json.loads(steps.read_text())["models"]}


def jax_privacy(path: str, folder: Path) -> dict[str, Any]:
    if why := environments.JAX_PRIVACY.made():
        return {"absent": why}
    script, python = HERE / "jax_privacy_side.py", environments.JAX_PRIVACY.python
    return {**asked(python, script, path), "peak_mb": asked(python, script, "memory")}


def diffprivlib(path: str, folder: Path) -> dict[str, Any]:
    environment, said = environments.diffprivlib()
    if environment is None:
        return {"absent": "; ".join(said)}
    return {"newer_scikit_learn": said, **asked(environment.python, HERE / "diffprivlib_side.py", path)}


def flower(path: str, folder: Path) -> dict[str, Any]:
    """Its rounds and secure sums beside ours, by the scripts that measure them at length."""
    if why := environments.FLOWER.made():
        return {"absent": why}
    binaries = str(environments.FLOWER.folder / "bin")
    commands = {
        "secure": f"secure_scale.py --flower {binaries} --parties {PARTIES} --dimensions {DIMENSION}",
        "rounds": f"federation_flower.py {binaries} --dimensions {ROUND_DIMENSION}",
    }
    found = {}
    for name, words_of in commands.items():
        (script, *words), out = words_of.split(), folder / f"{name}.json"
        command = [sys.executable, str(ROOT / "benchmarks" / script), *words, "--out", str(out)]
        done = subprocess.run(command, env=ours(), stdout=subprocess.DEVNULL)
        if done.returncode == 0:
            found[name] = json.loads(out.read_text())["rows"]
        else:  # five real processes on a loaded machine may miss their deadlines; the other measure stands
            found[f"{name} failed"] = words_of
    return {"versions": {"flwr": "1.41.0"}, **found}


PEERS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    "quietgrad": quietgrad,
    "opacus": opacus,
    "jax-privacy": jax_privacy,
    "diffprivlib": diffprivlib,
    "flower": flower,
}


def main() -> None:
    """Ask those that were named, keep the others' answers, write the JSON and the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; none means all")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.peers if name not in PEERS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(PEERS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not options.page:
        found = json.loads(RESULT.read_text())["peers"] if RESULT.exists() else {}
        with tempfile.TemporaryDirectory() as folder:
            path, data = table(Path(folder))
            for name in options.peers or PEERS:
                try:
                    found[name] = PEERS[name](path, Path(folder))
                except (RuntimeError, subprocess.CalledProcessError) as error:
                    found[name] = {"absent": f"was installed and failed: {error}"}
                print(name, json.dumps(found[name])[:600], flush=True)
                keep(found, data)
    write(json.loads(RESULT.read_text()), ROOT / "docs" / "peers.md")


def keep(found: dict[str, Any], data: str) -> None:
    """Write the JSON."""
    proved_again(found)
    asked_for = {
        "data": data, "epsilon": task.EPSILON, "delta": task.DELTA, "steps": task.STEPS,
        "sampling": f"Poisson, n // {task.PARTS} in the mean", "dp_sgd_grid": task.DP_SGD_GRID,
        "penalties": task.PENALTIES, "fits": task.RUNS,
        "calibration": {
            "n": task.RUN_N, "batch_size": task.RUN_BATCH, "steps": task.RUN_STEPS,
            "epsilon": task.RUN_EPSILON, "delta": task.DELTA, "given_noise_multiplier": task.GIVEN_NOISE,
        },
        "parties": PARTIES, "dimension": DIMENSION,
    }  # fmt: skip
    save(RESULT, {"task": asked_for, "peers": {name: found[name] for name in PEERS if name in found}})


def proved_again(found: dict[str, Any]) -> None:
    """For every noise multiplier that somebody chose, the ε that our accountant proves of it."""
    from quietgrad_side import epsilon_of

    for answers in found.values():
        for entry in answers.get("calibration", {}).values():
            entry["epsilon_of_noise_proved_by_quietgrad"] = epsilon_of(entry["noise_multiplier"])


if __name__ == "__main__":
    main()
