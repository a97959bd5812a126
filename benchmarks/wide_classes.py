"""Wide features and ten classes: the untuned estimator against tuned DP-SGD and DP-Adam, and against no privacy.

    QUIETGRAD_DATA=FOLDER python benchmarks/wide_classes.py [TABLE…] [EPSILON…]

Tables: pixels of MNIST (mnist-784); random features of MNIST (mnist-1792) and of CIFAR-10 (cifar10-1792,
cifar10-4096): rectified random patches of 6 × 6, averaged over four quarters of the picture, a public function
of one picture. Ours gets rows of length 1, no other declaration, and its defaults. "public photographs" whitens
by crops of the two photographs that come with scikit-learn. Rivals see the same rows of length 1, take 250
Poisson batches of 8 %, and report each learning rate: the best *by test accuracy* is not charged for, which is
in their favour. The probe is a logistic regression without privacy on standardised features. add-remove, δ =
1e-5. The estimator's constants were settled on Fashion-MNIST, which is not reported. Cells that the result file
holds are kept.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import quietgrad as qg
from quietgrad.data import load
from quietgrad.estimators import PrivateLogisticRegression
from quietgrad.features import Whitened

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "wide_classes.json"
TABLES = ("mnist-784", "mnist-1792", "cifar10-1792", "cifar10-4096")
DELTA, CLASSES, STEPS, RATE = 1e-5, 10, 250, 0.08
RATES = {"DP-SGD": (36.0, 108.0, 324.0, 972.0), "DP-Adam": (0.03, 0.1, 0.3, 1.0)}
COMPONENTS = 1024


def filters(channels: int, count: int) -> Any:
    """Random patches of mean 0 and length 1, every second one smoothed: natural pictures are smooth."""
    bank = torch.randn(count, channels, 6, 6, generator=torch.Generator().manual_seed(7))
    smooth = torch.nn.functional.pad(bank[::2], (1, 1, 1, 1), mode="replicate")
    bank[::2] = torch.nn.functional.avg_pool2d(smooth, 3, 1)
    bank = bank - bank.mean((1, 2, 3), keepdim=True)
    return bank / bank.flatten(1).norm(dim=1)[:, None, None, None]


@torch.no_grad()
def random_features(pixels: Any, channels: int, width: int) -> Any:
    """``width`` features of each picture, from that picture alone; pixels in [0, 1], channel after channel."""
    bank, side = filters(channels, width // 4), math.isqrt(pixels.shape[1] // channels)
    rows = []
    for start in range(0, len(pixels), 250):
        x = torch.tensor(pixels[start : start + 250], dtype=torch.float32).reshape(-1, channels, side, side)
        mean = torch.nn.functional.avg_pool2d(x.mean(1, keepdim=True), 6, 2)
        spread = torch.nn.functional.avg_pool2d((x**2).mean(1, keepdim=True), 6, 2) - mean**2
        patches = torch.nn.functional.conv2d(x, bank, stride=2) / (spread.clamp_min(0.0) + 0.01).sqrt()
        active = torch.relu(patches / math.sqrt(36.0 * channels) - 0.05)
        rows.append(torch.nn.functional.adaptive_avg_pool2d(active, 2).flatten(1).numpy())
    return np.concatenate(rows)


def photographs(count: int = 4000) -> Any:
    """Crops of two public photographs, as rows of pixels of 32 × 32 colours."""
    from sklearn.datasets import load_sample_images

    rng, pictures = np.random.default_rng(3), load_sample_images().images
    rows = []
    for _ in range(count):
        picture, side = pictures[rng.integers(2)], int(rng.integers(48, 400))
        top, left = (int(rng.integers(size - side + 1)) for size in picture.shape[:2])
        crop = torch.tensor(picture[top : top + side, left : left + side]).permute(2, 0, 1)[None].float()
        rows.append(torch.nn.functional.interpolate(crop, (32, 32), mode="area")[0].flatten().numpy() / 255.0)
    return np.stack(rows)


def unit(X: Any) -> Any:
    return (X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-9)).astype(np.float32)


def table(name: str) -> tuple[Any, Any, Any, Any]:
    """(X, y, X_test, y_test) with rows of length 1, kept under the folder of temporary files."""
    kept = Path(tempfile.gettempdir()) / f"quietgrad-wide-{name}.npz"
    if not kept.exists():
        source, _, width = name.partition("-")
        data: Any = load(source)
        parts = [
            np.asarray(part if isinstance(part, np.ndarray) else part.toarray()) for part in (data.X, data.X_test)
        ]
        if width != "784":
            parts = [random_features(part, 3 if source == "cifar10" else 1, int(width)) for part in parts]
        np.savez(kept, X=unit(parts[0]), y=data.y, X_test=unit(parts[1]), y_test=data.y_test)
    with np.load(kept) as arrays:
        return arrays["X"], arrays["y"], arrays["X_test"], arrays["y_test"]


def ours(data: Any, epsilon: float, features: Any) -> float:
    """Test accuracy of the estimator as it comes."""
    X, y, X_test, y_test = data
    with tempfile.TemporaryDirectory() as folder:
        model = PrivateLogisticRegression(
            epsilon=epsilon, delta=DELTA, classes=list(range(CLASSES)), row_bound=None if features else 1.0,
            features=features, ledger=Path(folder) / "ledger.jsonl",
        )  # fmt: skip
        return float(model.fit(X, y).score(X_test, y_test))


def rival(data: Any, epsilon: float, kind: str, rate: float) -> float:
    """Test accuracy of DP-SGD (heavy ball .9) or DP-Adam with clip 1, the second half of the steps averaged."""
    X, y, X_test, y_test = (torch.from_numpy(np.ascontiguousarray(part)) for part in data)
    n, d = X.shape
    sigma = qg.calibrate(
        epsilon=epsilon, delta=DELTA, n=n, batch_size=int(RATE * n), steps=STEPS, relation="add-remove"
    )
    generator = torch.Generator().manual_seed(0)
    weights, first, second, mean = (torch.zeros(d + 1, CLASSES) for _ in range(4))
    for step in range(1, STEPS + 1):
        chosen = torch.nonzero(torch.rand(n, generator=generator) < RATE).ravel()
        x = X[chosen]
        residual = torch.softmax(x @ weights[:-1] + weights[-1], 1)
        residual[torch.arange(len(chosen)), y[chosen]] -= 1.0
        residual *= (1.0 / (residual.norm(dim=1) * math.sqrt(2.0))).clamp(max=1.0)[:, None]  # rows have length √2
        total = torch.cat([x.T @ residual, residual.sum(0)[None]])
        gradient = (total + sigma * torch.randn(d + 1, CLASSES, generator=generator)) / (RATE * n)
        if kind == "DP-Adam":
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
            ahead, spread = first / (1.0 - 0.9**step), second / (1.0 - 0.999**step)
            weights = weights - rate * ahead / (spread.sqrt() + 1e-8)
        else:
            first = 0.9 * first + gradient
            weights = weights - 0.1 * rate * first
        if 2 * step > STEPS:
            mean += weights / (STEPS - STEPS // 2)
    return float(((X_test @ mean[:-1] + mean[-1]).argmax(1) == y_test).float().mean())


def probe(data: Any) -> float:
    """Test accuracy of a logistic regression without privacy, ℓ2 3e-4, on standardised features."""
    X, y, X_test, y_test = data
    mean, spread = X.mean(0), X.std(0) + 1e-6
    inputs, tests = (torch.from_numpy((part - mean) / spread) for part in (X, X_test))
    weights = torch.zeros(X.shape[1] + 1, CLASSES, requires_grad=True)
    solver: Any = torch.optim.LBFGS([weights], max_iter=80, history_size=10, line_search_fn="strong_wolfe")

    def loss() -> Any:
        solver.zero_grad()
        scores = inputs @ weights[:-1] + weights[-1]
        value: Any = (
            torch.nn.functional.cross_entropy(scores, torch.from_numpy(y)) + 1.5e-4 * (weights[:-1] ** 2).sum()
        )
        value.backward()
        return value

    solver.step(loss)
    return float(((tests @ weights[:-1] + weights[-1]).argmax(1).numpy() == y_test).mean())


def main() -> None:
    torch.set_num_threads(1)
    names = [word for word in sys.argv[1:] if word in TABLES] or list(TABLES)
    budgets = [float(word) for word in sys.argv[1:] if word not in TABLES] or [1.0, 3.0, 8.0]
    cells: dict[str, Any] = json.loads(RESULT.read_text())["cells"] if RESULT.exists() else {}

    def cell(key: str, measure: Any) -> None:
        if key not in cells:
            started = time.process_time()
            cells[key] = {"accuracy": round(measure(), 4), "cpu_s": round(time.process_time() - started, 1)}
            print(key, cells[key], flush=True)
            save(RESULT, {"what": __doc__, "cells": dict(sorted(cells.items()))})

    for name in names:
        data = table(name)
        public = None
        if name.startswith("cifar10"):
            width = int(name.partition("-")[2])
            rows = unit(random_features(photographs(), 3, width))
            public = Whitened(rows, components=COMPONENTS)
        for epsilon in budgets:
            at = f"{name}, ε = {epsilon:g}"
            cell(f"{at}, untuned", lambda data=data, epsilon=epsilon: ours(data, epsilon, None))
            if public is not None:
                cell(
                    f"{at}, public photographs",
                    lambda data=data, epsilon=epsilon, public=public: ours(data, epsilon, public),
                )
        for epsilon in reversed(budgets):
            at = f"{name}, ε = {epsilon:g}"
            for kind, rates in RATES.items():
                for rate in rates:
                    cell(
                        f"{at}, {kind} {rate:g}",
                        lambda data=data, epsilon=epsilon, kind=kind, rate=rate: rival(data, epsilon, kind, rate),
                    )
        cell(f"{name}, no privacy", lambda data=data: probe(data))


if __name__ == "__main__":
    main()
