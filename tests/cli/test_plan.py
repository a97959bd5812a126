"""`quietgrad plan`: what it says of a run besides its cost."""

from __future__ import annotations

import json

import pytest

from quietgrad.cli import main


def planned(capfd: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["plan", "dp-gd", "--n", "60000", "--steps", "30", "--epsilon", "1", *more]) == 0
    return capfd.readouterr().out


def test_a_stated_radius_says_whether_differences_pay(capfd: pytest.CaptureFixture[str]) -> None:
    assert "G/(M·path) = 13.3: differences pay" in planned(capfd, "--radius", "0.3", "--smoothness", "0.25")
    assert "use dp-gd" in planned(capfd, "--radius", "300", "--smoothness", "0.25")
    assert "G/(M·path)" not in planned(capfd)
    found = json.loads(planned(capfd, "--radius", "4", "--smoothness", "0.25", "--json"))["differences"]
    assert found["ratio"] == 1.0
    assert "compare dp-gd" in found["advice"]


def test_a_radius_without_a_curvature_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dp-gd", "--n", "60000", "--epsilon", "1", "--radius", "4"]) == 2
    assert "--smoothness" in capfd.readouterr().err
