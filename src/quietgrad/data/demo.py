"""The data set that a first run uses: a9a if it can be had, else one that scikit-learn carries."""

from __future__ import annotations

from dataclasses import replace

from quietgrad.data.dataset import Dataset
from quietgrad.data.loading import load
from quietgrad.errors import DataError


def demo_dataset(*, download: bool = True) -> Dataset:
    """a9a from QUIETGRAD_DATA, the cache, or one small package (Adult, rebuilt exactly); offline breast-cancer.

    `notes` say which was used and why. Never fails for want of data.

    >>> demo_dataset(download=False).name in ("a9a", "breast-cancer")
    True
    """
    try:
        data = load("a9a", download=download)
        return replace(data, notes=(*data.notes, "demo data: a9a"))
    except DataError as error:
        data = load("breast-cancer")
        return replace(
            data, notes=(*data.notes, f"demo data: breast-cancer, because a9a was not available ({error})")
        )
