"""Features whitened by public rows: principal directions that other people's records paid for.

With many correlated features, a private fit must first learn their second moments, and the noise of a matrix grows
with its size. Public rows of the same kind, such as photographs for a private collection of pictures, tell much of
it at no cost: a record's coordinates along the principal directions of the public rows, each divided by its public
deviation, are a function of that record and of public constants.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.core.errors import DataError
from quietgrad.core.files import write_atomically
from quietgrad.features.frozen import MARK, PublicFeatures, Rows, unit_length

WHITENING_FILE = "whitening.npz"
"""Mean and directions of the public rows, in the folder of a run."""
_AT_ONCE = 256  # rows that are made dense at a time


class Whitened:
    """Coordinates along the principal directions of public rows.

    Args:
        public: public rows, as the private table has them. They must not be a part of it.
        features: a public map that all rows go through first, such as :class:`~quietgrad.features.Frozen`.
        components: how many directions are kept, the strongest first; ``None`` keeps all that public rows fill.
        damping: τ in units of the largest public variance: a direction of variance λ is divided by √(λ + τ).
        unit_rows: divide every row by its length, which is then a public bound.

    >>> public = np.random.default_rng(0).normal(size=(50, 3)) * [10.0, 1.0, 0.1]
    >>> Whitened(public, unit_rows=False).rows(public).std(axis=0).round(1)
    array([1. , 0.9, 0.2], dtype=float32)
    """

    def __init__(
        self,
        public: Any,
        features: PublicFeatures | None = None,
        *,
        components: int | None = None,
        damping: float = 1e-3,
        unit_rows: bool = True,
    ) -> None:
        given = np.asarray(public, dtype=np.float64)
        if given.ndim != 2 or len(given) < 2 or not np.isfinite(given).all():
            raise ValueError("public: must be a table of at least two rows of finite numbers.")
        if not damping > 0.0:
            raise ValueError(f"damping={damping!r}: must be > 0.")
        rows = given if features is None else features.rows(given).astype(np.float64)
        mean = rows.mean(axis=0)
        _, lengths, directions = np.linalg.svd(rows - mean, full_matrices=False)
        variances = lengths**2 / len(rows)
        if not variances[0] > 0.0:
            raise ValueError("public: all rows are the same, so they have no directions.")
        filled = int((variances > 1e-12 * variances[0]).sum())
        if components is not None and not 1 <= components <= filled:
            raise ValueError(f"components={components!r}: must be from 1 to {filled}, what the public rows fill.")
        kept = filled if components is None else components
        scale = 1.0 / np.sqrt(variances[:kept] + damping * variances[0])
        self._set(features, mean, directions[:kept].T * scale, unit_rows)

    def _set(self, features: PublicFeatures | None, mean: Any, matrix: Any, unit_rows: bool) -> None:
        self.features, self.unit_rows = features, bool(unit_rows)
        self.mean: npt.NDArray[np.float32] = np.ascontiguousarray(mean, np.float32)
        self.matrix: npt.NDArray[np.float32] = np.ascontiguousarray(matrix, np.float32)
        content = f"{self.matrix.shape}\n".encode() + self.mean.tobytes() + self.matrix.tobytes()
        self.digest = MARK + hashlib.sha256(content).hexdigest()

    @property
    def row_bound(self) -> float | None:
        """A public bound on the length of a row of features, if there is one."""
        return 1.0 if self.unit_rows else None

    @property
    def note(self) -> str:
        """The note in the privacy statement: which public numbers the features rest on."""
        first = "" if self.features is None else f"{self.features.note}; "
        return f"{first}features are whitened by public rows, {self.digest}"

    def to_json(self) -> dict[str, Any]:
        """Public words that pin the map."""
        inner = None if self.features is None else self.features.to_json()
        return {"features": "whitened", "digest": self.digest, "of": inner, "unit_rows": self.unit_rows}

    def save(self, folder: str | Path) -> None:
        """Write the public mean and directions into a run's folder, for predictions."""
        content = io.BytesIO()
        np.savez(content, mean=self.mean, matrix=self.matrix)
        write_atomically(Path(folder) / WHITENING_FILE, content.getvalue())
        if self.features is not None:
            self.features.save(folder)

    @classmethod
    def read(cls, words: Mapping[str, Any], folder: str | Path, features: PublicFeatures | None) -> Whitened:
        """The map that :meth:`save` wrote; ``DataError`` if it is another one than ``words`` pin."""
        try:
            with np.load(Path(folder) / WHITENING_FILE, allow_pickle=False) as kept:
                mean, matrix = kept["mean"], kept["matrix"]
        except (OSError, ValueError, KeyError):
            raise DataError(f"{folder}: {WHITENING_FILE} is missing or cannot be read.") from None
        whitened = cls.__new__(cls)
        whitened._set(features, mean, matrix, bool(words["unit_rows"]))
        if whitened.digest != words["digest"]:
            raise DataError(f"{folder}: {WHITENING_FILE} is not the one that the model was fitted with.")
        return whitened

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Whitened) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.digest, self.unit_rows))

    def __deepcopy__(self, memo: object) -> Whitened:
        return self  # it never changes

    def rows(self, X: Any) -> Rows:
        """Rows of features of a table of records, dense or sparse, each from its own record alone."""
        from quietgrad.features.ordered_products import add_products

        if self.features is not None:
            X = self.features.rows(X)
        if X.shape[1] != len(self.mean):
            raise DataError(f"rows of {X.shape[1]} numbers, must be {len(self.mean)} as the public rows are.")
        out = np.zeros((X.shape[0], self.matrix.shape[1]), np.float32)
        for start in range(0, len(out), _AT_ONCE):
            some = X[start : start + _AT_ONCE]
            dense = some if isinstance(some, np.ndarray) else some.toarray()
            centred = np.ascontiguousarray(dense - self.mean, np.float32)
            add_products(centred, self.matrix, out[start : start + _AT_ONCE])
        return unit_length(out) if self.unit_rows else out
