"""Tests and doctests keep keys, fingerprints and the ledger of runs without one in a folder of their own."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec

_state = tempfile.TemporaryDirectory(prefix="quietgrad-state-")
os.environ["QUIETGRAD_STATE"] = _state.name

# Adapters of engines that are extras: their doctests are read where the engine is.
_ADAPTERS = {"nvflare": "flare", "flwr": "flower"}
collect_ignore = [
    f"src/quietgrad/federation/transport/{adapter}.py"
    for engine, adapter in _ADAPTERS.items()
    if find_spec(engine) is None
]
