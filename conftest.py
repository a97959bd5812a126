"""Tests and doctests keep keys, fingerprints and the ledger of runs without one in a folder of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import settings

# As `make test` has it: some tests fork, and a child cannot use threads that its parent's libraries had started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("quietgrad", deadline=None)  # machines are noisy: nothing here asserts a time
settings.load_profile("quietgrad")

_state = tempfile.TemporaryDirectory(prefix="quietgrad-state-")
os.environ["QUIETGRAD_STATE"] = _state.name

# Adapters of engines that are extras: their doctests are read where the engine is.
_ADAPTERS = {"nvflare": "flare", "flwr": "flower"}
collect_ignore = [
    f"src/quietgrad/federation/transport/{adapter}.py"
    for engine, adapter in _ADAPTERS.items()
    if find_spec(engine) is None
]


@pytest.fixture(autouse=True, scope="module")
def _state_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each module a ledger of its own: a run without an account reads the whole project ledger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIETGRAD_STATE", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests that take minutes to `make long`; what they show is shown in the ordinary run by fewer cases."""
    if not os.environ.get("QUIETGRAD_LONG"):
        for item in items:
            if item.get_closest_marker("long") is not None:
                item.add_marker(pytest.mark.skip(reason="takes minutes; run by `make long`"))
