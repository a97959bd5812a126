"""Matrix products that round every row alike, wherever it lies in memory.

Intel's MKL, by which torch multiplies matrices, chooses its kernels by the alignment of rows: the same row may be
rounded otherwise in another place. In its strict mode of *conditional numerical reproducibility*, a product
does not depend on alignment or on the number of threads. That is documented, and no cost of it could be measured.
The mode can be chosen before MKL's first call alone, so it is asked for when this module is imported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from pathlib import Path

import torch

_MODE, _VALUE = "MKL_CBWR", "AUTO,STRICT"
_STRICT, _ALL = 0x10000, -1

os.environ.setdefault(_MODE, _VALUE)  # what the user has set stays


@functools.cache
def rounds_rows_alike() -> bool:
    """Whether MKL is in its strict mode; warns if it is there and is not."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        strict = bool(library.mkl_serv_cbwr_get(_ALL) & _STRICT)
    except (OSError, AttributeError):  # another build of torch
        return False
    if not strict:
        warnings.warn(
            f"torch multiplied matrices before quietgrad.torch was imported, or {_MODE} is set otherwise: products "
            "round rows by their place in memory, so each record takes four places of a pass, and a step takes up "
            f"to four times as long. Import quietgrad.torch first, or set {_MODE}={_VALUE} before Python starts.",
            stacklevel=2,
        )
    return strict
