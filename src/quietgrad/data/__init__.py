"""Data: readers, public schemas, a registry with checksums, and splits for parties.

Names are imported when first used, so that `import quietgrad` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quietgrad.core.exports import lazy_names

if TYPE_CHECKING:
    from quietgrad.data.builtin import a9a_from_adult
    from quietgrad.data.columns import Categorical, Choices, Date, Numeric, YesNo
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
__all__ = [
    "load", "scan", "Scan", "Dataset", "demo_dataset", "fetch", "find", "REGISTRY", "Schema", "Numeric",
    "YesNo", "Date", "Categorical", "Choices", "read_schema", "clip_rows", "normalized",
    "a9a_from_adult", "split_even",
    "split_uneven",
    "uneven_sizes", "split_dirichlet",
]  # fmt: skip


__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "data.builtin": "a9a_from_adult",
        "data.columns": "Categorical Choices Date Numeric YesNo",
        "data.dataset": "Dataset clip_rows normalized split_dirichlet split_even split_uneven uneven_sizes",
        "data.loading": "demo_dataset load",
        "data.registry": "REGISTRY fetch find",
        "data.scanning": "Scan scan",
        "data.schema": "Schema read_schema",
    },
)
