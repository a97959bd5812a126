"""Data: readers, public schemas, a registry with checksums, and splits for parties.

Names are imported when first used, so that `import quietgrad` stays light.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad.data.builtin import a9a_from_adult
    from quietgrad.data.columns import Categorical, Date, Numeric, YesNo
    from quietgrad.data.dataset import (
        Dataset,
        clip_rows,
        normalized,
        split_dirichlet,
        split_even,
        split_uneven,
        uneven_sizes,
    )
    from quietgrad.data.loading import demo_dataset, load
    from quietgrad.data.registry import REGISTRY, fetch, find
    from quietgrad.data.scanning import Scan, scan
    from quietgrad.data.schema import Schema, read_schema
_HOMES = {
    "builtin": ("a9a_from_adult",),
    "columns": ("Categorical", "Date", "Numeric", "YesNo"),
    "dataset": (
        "Dataset", "clip_rows", "normalized", "split_dirichlet", "split_even", "split_uneven", "uneven_sizes",
    ),
    "loading": ("demo_dataset", "load"),
    "registry": ("REGISTRY", "fetch", "find"),
    "scanning": ("Scan", "scan"),
    "schema": ("Schema", "read_schema"),
}  # fmt: skip
__all__ = [
    "load", "scan", "Scan", "Dataset", "demo_dataset", "fetch", "find", "REGISTRY", "Schema", "Numeric",
    "YesNo", "Date", "Categorical", "read_schema", "clip_rows", "normalized", "a9a_from_adult", "split_even",
    "split_uneven",
    "uneven_sizes", "split_dirichlet",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve_name(f"{__name__}.{home}:{name}")
    globals()[name] = value
    return value
