"""The tables of docs/epsilon.md are what the library computes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import quietgrad as qg
from quietgrad.assurance.report.certificate import detection
from quietgrad.estimators.holdout import expected_error
from quietgrad.methods.score_noise import TOO_NOISY

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "epsilon.md").read_text(encoding="utf-8")


def row(name: str) -> list[str]:
    """The cells of the table row that begins with ``name``."""
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert found is not None, name
    return [cell.strip() for cell in found[1].split("|")]


def test_detection() -> None:
    shown = [float(cell.removesuffix(" %")) for cell in row("she detects at most")]
    assert shown == [round(100 * detection(float(level), 1e-6, 0.05), 1) for level in row("ε")]


def test_delta_is_far_below_one_over_n() -> None:
    for people, delta in zip((1e3, 1e4, 1e5, 1e6), map(float, row("δ")), strict=True):
        assert delta == pytest.approx(10.0 ** math.floor(math.log10(1.0 / (100.0 * people)) + 1e-9))


def test_runs_under_a_cap() -> None:
    for runs, shown in zip(map(int, row("runs")), row("ε of each"), strict=True):
        noise = qg.calibrate(epsilon=3.0, delta=1e-6, steps=runs, sampling="full")
        each = qg.account(qg.events.gaussian(noise), delta=1e-6, relation="add-remove")
        assert f"{each:.2g}" == shown


@pytest.mark.parametrize("people", [500, 2_000, 10_000, 50_000, 1_000_000])
def test_errors_of_scores(people: int) -> None:
    delta = 10.0 ** math.floor(math.log10(1.0 / (100.0 * people)) + 1e-9)
    for level, shown in zip((0.5, 1.0, 2.0, 4.0), row(f"{people:,}".replace(",", " ")), strict=True):
        error = expected_error(0.2 * people, qg.Budget(0.2 * level, 0.2 * delta), classes=2)
        assert shown == ("not worth it" if error > TOO_NOISY else f"{error:.2g}")
