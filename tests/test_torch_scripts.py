"""Ordinary scripts run, state an ε, and say whether it rests on the loop's own code; none is refused."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs quietgrad[hf]")
pytest.importorskip("peft", reason="needs quietgrad[hf]")

from tests.torch_scripts import SCRIPTS, generative, tables, text, tricks, vision

assert all((generative, tables, text, tricks, vision))  # each registers its scripts


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    torch.manual_seed(0)


def test_there_are_sixty() -> None:
    assert len(SCRIPTS) >= 60


@pytest.mark.filterwarnings("ignore:a private batch")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_states_what_is_true(name: str, tmp_path: Path) -> None:
    run, conditional = SCRIPTS[name]
    privacy = run(tmp_path) if inspect.signature(run).parameters else run()
    assert privacy.is_private
    assert privacy.epsilon is not None
    assert 0.0 < privacy.epsilon < math.inf
    assert (privacy.condition is not None) == conditional
    assert conditional == (" if " in str(privacy))
