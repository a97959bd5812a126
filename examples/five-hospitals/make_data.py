"""Write five hospitals' files, and one of held-out patients, from the tumour data that scikit-learn carries.

Features are scaled by the limits below, which anybody could look up, and never by looking at the records.

    python make_data.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

SIZES = (150, 110, 90, 60, 46)
# Public limits: centre and half-width of ten measurements (radius, texture, …), for mean, error and worst value.
CENTRES = np.array([14, 19, 92, 650, 0.096, 0.10, 0.09, 0.05, 0.18, 0.063])
WIDTHS = np.array([4, 5, 25, 350, 0.015, 0.05, 0.08, 0.04, 0.03, 0.007])
CENTRE = np.concatenate([CENTRES, 0.04 * CENTRES, 1.25 * CENTRES])
WIDTH = np.concatenate([WIDTHS, 0.1 * WIDTHS, 1.5 * WIDTHS])


def main(folder: Path) -> None:
    """Write hospital-1.npz … hospital-5.npz and held-out.npz into ``folder``."""
    table = load_breast_cancer()
    X = (table.data - CENTRE) / WIDTH
    X /= 12.0  # so that the rows of most patients are shorter than 1, the bound in the plan
    y = table.target.astype(np.int64)
    order = np.random.default_rng(20190).permutation(len(y))
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, size in enumerate(SIZES, 1):
        part = order[start : start + size]
        np.savez(folder / f"hospital-{number}.npz", X=X[part], y=y[part])
        start += size
    np.savez(folder / "held-out.npz", X=X[order[start:]], y=y[order[start:]])
    print(f"{len(SIZES)} hospitals with {', '.join(map(str, SIZES))} patients in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "data"))
