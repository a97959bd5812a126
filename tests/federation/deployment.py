"""A federation of parties that train a small network: plan, module, pictures and keys in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

MODULE = '''"""A small convolutional network."""

from torch import nn


def make(classes: int = 3) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, classes),
    )
'''
PARAMETERS = 4 * 9 + 4 + 36 * 3 + 3
RAISES = 'raise SystemExit("the code of the plan was run")\n'
SIZES = {"a": 60, "b": 50, "c": 40, "d": 30, "e": 20}


def plan_text(
    sizes: Mapping[str, int], federation: str = 'trust = "secure"\nsecure = "masks"', *,
    algorithm: str = 'name = "dp-srm"\nsteps = 6\nbatch_size = 40\nclip = 1.0', port: int = 7443,
    objective: str = f"parameters = {PARAMETERS}", data: str = "", budget: str = "epsilon = 2.0\ndelta = 1e-4",
) -> str:  # fmt: skip
    """A plan file of a network on 8 × 8 pictures of three classes."""
    rows = [
        "[federation]", federation, "[coordinator]", f'address = "127.0.0.1:{port}"\ntimeout = 60\ngrace = 60',
        "[algorithm]", algorithm, "[objective]", 'name = "network"', 'module = "network.py:make"', objective,
        "[data]", data or 'form = "images"\nshape = [1, 8, 8]\nclasses = ["circle", "square", "line"]',
        "[budget]", budget, *(f'[[party]]\nname = "{name}"\nrecords = {n}' for name, n in sizes.items()),
    ]  # fmt: skip
    return "\n".join(row for row in rows if row) + "\n"


def pictures(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Synthetic pictures: each class has its own bright corner."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    X = rng.integers(0, 60, (n, 1, 8, 8))
    for k, corner in enumerate(((0, 0), (0, 4), (4, 0))):
        X[labels == k, 0, corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] += 150
    return X.astype(np.uint8), np.array(["circle", "square", "line"])[labels]


def write(folder: Path, sizes: Mapping[str, int], text: str) -> None:
    """Write plan, module and every party's pictures."""
    (folder / "plan.toml").write_text(text)
    (folder / "network.py").write_text(MODULE)
    for k, (name, n) in enumerate(sizes.items()):
        X, y = pictures(n, k)
        np.savez(folder / f"{name}.npz", X=X, y=y)
    X, y = pictures(90, 99)
    np.savez(folder / "held-out.npz", X=X, y=y)
