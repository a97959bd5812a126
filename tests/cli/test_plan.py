"""`quietgrad plan`: what it says of a run besides its cost."""

from __future__ import annotations

import json
import re

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


def test_dp_spider_names_its_bounds_and_has_its_own_path_as_radius(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "dp-spider", "--n", "60000", "--steps", "300", "--epsilon", "1", "--set", "smoothness=0.25"]
    assert main([*words, "--set", "path=3"]) == 0
    out = capfd.readouterr().out
    assert "G/(M·path) = 1.33: " in out
    assert re.search(r"o1\W.* 1·G\W.*[\d.]+·G\W", out)
    assert re.search(r"o2\W.* 1·M·step\W.*[\d.]+·M·step\W", out)
    assert "C of 'o1' is G: the clip of gradients, 1" in out
    assert "C of 'o2' is M·step: M = 0.25 (smoothness) and step = ‖θ − θ′‖ bound a difference" in out
    assert main(words) == 0
    assert "G/(M·path)" not in capfd.readouterr().out


def test_a_radius_without_a_curvature_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dp-gd", "--n", "60000", "--epsilon", "1", "--radius", "4"]) == 2
    assert "--smoothness" in capfd.readouterr().err
