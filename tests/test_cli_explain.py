"""``--explain``: one option on every command that prints an ε, and one sentence that is true of it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from quietgrad.cli import app_of, main

PRINTS_EPSILON = (
    ("train",), ("resume",), ("evaluate",), ("frontier",), ("describe",), ("plan",), ("account",), ("verify",),
    ("federate", "simulate"), ("federate", "server"),
)  # fmt: skip


@pytest.mark.parametrize("words", PRINTS_EPSILON, ids=" ".join)
def test_the_option_is_there(words: tuple[str, ...]) -> None:
    command = get_command(app_of(words[0]))
    for word in words[1:]:
        command = command.commands[word]  # type: ignore[attr-defined]
    assert any("--explain" in parameter.opts for parameter in command.params)


def meaning(text: str) -> tuple[float, float, float]:
    """ε, δ and e^ε as the one line has them."""
    lines = [line for line in text.splitlines() if "changes the probability of any outcome" in line]
    assert len(lines) == 1
    found = re.match(r"ε = (\S+), δ = (\S+): one record .* e\^ε = (\S+), plus", lines[0])
    assert found is not None
    return float(found[1]), float(found[2]), float(found[3])


def test_it_says_the_proved_epsilon_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["account", "--n", "1000", "--batch-size", "50", "--steps", "20", "--noise-multiplier", "1.5"]
    assert main([*words, "--json", "--explain"]) == 0
    said = capsys.readouterr()
    proved = json.loads(said.out)["epsilon"]
    epsilon, delta, factor = meaning(said.err)
    assert math.isclose(epsilon, proved, rel_tol=1e-3)
    assert math.isclose(factor, math.exp(proved), rel_tol=1e-2)
    assert delta == 1e-5
    assert main(words) == 0
    assert "probability of any outcome" not in capsys.readouterr().err


def test_a_run_and_its_certificate_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    rows = np.random.default_rng(0).normal(size=(300, 2))
    np.savez("rows.npz", X=rows, y=(rows[:, 0] > 0) * 1)
    words = [
        "train",
        "rows.npz",
        "--algorithm",
        "dp-gd",
        "--steps",
        "3",
        "--epsilon",
        "1",
        "--out",
        "run",
        "--quiet",
    ]
    assert main([*words, "--explain"]) == 0
    trained = meaning(capsys.readouterr().err)
    assert main(["certificate", "run", "-o", "claim.json"]) == 0
    capsys.readouterr()
    assert main(["verify", "claim.json", "--explain"]) == 0
    assert meaning(capsys.readouterr().err) == trained
    assert main([*words[:-3], "--out", "open", "--quiet", "--non-private", "--explain"]) == 0
    assert "probability of any outcome" not in capsys.readouterr().err
