"""Make ``features/photographs.json`` again: ``python tools/photographs.py``, with scikit-learn, pillow and torch.

Means and deviations of scattering maps over 600 squares of the two photographs that come with scikit-learn.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_sample_images

from quietgrad.features import Scattering

Floats = npt.NDArray[np.float64]
_CROPS, _SIDE, _SMALLEST, _LARGEST, _SEED = 600, 32, 48, 400, 20190


def made() -> dict[str, Any]:
    """The constants, from the photographs."""
    photographs = [np.asarray(each, np.float64) / 255.0 for each in load_sample_images().images]
    rng = np.random.default_rng(_SEED)
    crops = []
    for number in range(_CROPS):
        whole = photographs[number % len(photographs)]
        side = int(np.exp(rng.uniform(np.log(_SMALLEST), np.log(_LARGEST))))
        row, column = (int(rng.integers(0, edge - side + 1)) for edge in whole.shape[:2])
        shrink = _averages(side)
        square = whole[row : row + side, column : column + side]
        crops.append(np.einsum("im,mnc,jn->cij", shrink, square, shrink, optimize=True))
    colour = np.array(crops)
    kept = {}
    for name, pictures in (("colour", colour), ("grey", colour.mean(1, keepdims=True))):
        maps = Scattering(_SIDE)(torch.tensor(pictures)).double().movedim(0, 2).flatten(2)
        kept[name] = {"mean": _rounded(maps.mean(2)), "std": _rounded(maps.std(2, correction=0))}
    return kept


def _averages(side: int) -> Floats:
    """The matrix that shrinks ``side`` pixels to 32 by averaging what each of the new ones covers."""
    edges = np.linspace(0.0, side, _SIDE + 1)
    pixels = np.arange(side)
    covered = np.minimum(edges[1:, None], pixels + 1.0) - np.maximum(edges[:-1, None], pixels)
    weights = np.clip(covered, 0.0, None)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _rounded(values: Any) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(made()).replace("]], ", "]],\n") + "\n")
