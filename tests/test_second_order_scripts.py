"""The scripts behind the second-order numbers run, in their small form."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "said"),
    [("benchmarks/sosp.py", "'method': 'held-out search'"), ("reproduce/sosp.py", "goe")],
)
def test_the_quick_form_runs(
    script: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--quick"])
    monkeypatch.syspath_prepend(str(ROOT))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    assert said in capsys.readouterr().out
