"""The first reading of a scan: what it refuses, and what it remembers of every piece."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quietgrad.errors import DataError
from quietgrad.objectives.tables.scanned import Task

__all__ = ["Verification", "Verified", "copied"]

_COPY = 100  # rows: shorter files of tables with few different rows may be equal by chance


class Verified(NamedTuple):
    """A piece as it was first read; ``varied`` if not all of its rows are the same."""

    digest: bytes
    rows: int
    checksum: int
    varied: bool


@dataclass(frozen=True)
class Verification:
    """Checks a piece as an objective checks a table in memory, and digests its content by columns."""

    reading: Any
    digest: bool
    name: str
    width: int

    def __call__(self, parts: Any, task: Task) -> list[Verified]:
        columns = [hashlib.sha256() for _ in range(self.width)] if self.digest else []
        rows, varied, first = 0, False, None
        checksum = parts.checksum(task.unit) if hasattr(task.unit, "checksum") else 0
        for X, y, people in parts.read(task):
            if not np.isfinite(X).all():
                raise DataError(
                    f"{self.name}: the features hold gaps, NaN or infinite values. Say in a schema what stands for "
                    "a gap (`fill`), leave such rows out (`drop_incomplete`), or remove them first."
                )
            if y.dtype.kind == "f" and not np.isfinite(y).all():
                raise DataError(
                    f"{self.name}: the target holds NaN or infinite values. Remove those records first."
                )
            self.reading.prepare(parts.seen(X, y, people))
            if not varied and len(X):
                first = X[:1].copy() if first is None else first
                varied = bool((first != X).any())
            rows += len(X)
            if people is not None and columns:
                columns[0].update(people.sizes.tobytes())  # the same rows, otherwise grouped, are another table
            for place, column in enumerate(columns):
                column.update(np.ascontiguousarray(X[:, place], dtype=np.float64).data)
        digest = hashlib.sha256(b"".join(c.digest() for c in columns)).digest()
        return [Verified(digest, rows, checksum, varied)]


def copied(pieces: Sequence[Any], found: Sequence[Verified]) -> bool:
    """Whether two files hold the same rows throughout; files of one and the same row may."""
    files: dict[str, list[Verified]] = {}
    for piece, verified in zip(pieces, found, strict=True):
        if (path := getattr(piece, "path", None)) is not None:
            files.setdefault(str(path), []).append(verified)
    long = [
        tuple(each.digest for each in of)
        for of in files.values()
        if sum(each.rows for each in of) >= _COPY and any(each.varied for each in of)
    ]
    return len(set(long)) < len(long)
