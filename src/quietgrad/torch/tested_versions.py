"""The versions of PyTorch that this package works with, checked before anything else of it is imported.

Per-example gradients need parts of PyTorch that are not public and change between its minor versions: the stack of
vmap levels, dispatch modes, hooks of autograd, how tensors share storage. After such a change a clipped sum can be
wrong without an error. With torch 2.15 the sum of a checkpointed layer differs from autograd's. The bound on one
record's part in a sum is then unproved, so any version that did not pass ``tests/torch`` is refused.
"""

from __future__ import annotations

TESTED = ("2.12", "2.13")


def require_tested(version: str) -> None:
    """Raise ``ImportError`` for a version of torch whose minor version is not in `TESTED`.

    >>> require_tested("2.13.0+cpu")
    >>> require_tested("2.15.0")
    Traceback (most recent call last):
    ImportError: quietgrad.torch works with torch 2.12 and 2.13, and torch 2.15.0 is installed. ...
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise ImportError(
            f"quietgrad.torch works with torch {' and '.join(TESTED)}, and torch {version} is installed. It uses "
            "parts of torch that change between versions, and clipping would be unproved with others. Install one "
            'of these: pip install "quietgrad[torch]". All of quietgrad outside quietgrad.torch works without it.'
        )
