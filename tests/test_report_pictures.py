"""Pictures and notebooks: drawn from public numbers, whole by themselves, nothing in them that a page obeys."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.charts import Bars, Chart, Intervals, Lines, Series, Steps, in_a_file, in_a_notebook
from quietgrad.cli import main
from quietgrad.errors import QuietgradError
from quietgrad.privacy.ledger import project_ledger
from quietgrad.report.figures import save_chart

EVIL = "</svg><script>alert(1)</script>\x1b[2J\u202e"
CHARTS: list[Chart] = [
    Lines("ε", (Series("a", [(0.1, 0.8), (1, 0.9)], (0.01, 0.02)), Series("b", [(1, 0.95)], level=True)), "ε", "y",
          log_x=True),
    Bars("Budget", (("people", 1.5, 2.0), (EVIL, 3.0, 2.0), ("free", 0.5, None)), "ε"),
    Steps("age", (0.0, 40.0, 90.0), (-0.2, 0.3), (0.1, 0.2), "effect"),
    Steps("job", ("nurse", EVIL), (0.2, -0.3), (0.0, 0.1), "effect"),
    Intervals("Coefficients", (("age", 1.0, 0.5, 1.5), (EVIL, -2.0, -3.0, -1.0)), "coefficient"),
]  # fmt: skip


def rows(n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(1).normal(size=(n, 3))
    return X, (X[:, 0] > 0) * 1


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_a_chart_is_a_whole_picture_in_every_format(chart: Chart, tmp_path: Path) -> None:
    text = in_a_file(chart)
    root = xml.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert not {"\x1b", "\u202e"} & set(text)
    assert save_chart(tmp_path / "c.svg", chart).read_text() == text
    assert save_chart(tmp_path / "c.png", chart).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(QuietgradError, match=r"svg, \.png or \.pdf"):
        save_chart(tmp_path / "c.gif", chart)


def test_a_picture_without_matplotlib_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert save_chart(tmp_path / "c.svg", CHARTS[0]).exists()
    with pytest.raises(QuietgradError, match=r"quietgrad\[report\]"):
        save_chart(tmp_path / "c.png", CHARTS[0])


def test_plans_results_and_statements_show_themselves(tmp_path: Path) -> None:
    budget = qg.Budget(1.0, 1e-5)
    plan = qg.plan(qg.DPGD(steps=5), n=200, budget=budget)
    ledger = qg.Ledger(tmp_path / "ledger.jsonl")
    result = qg.minimize(
        qg.objectives.Logistic(), rows(), qg.DPGD(steps=5), budget=budget, ledger=ledger, account="people"
    )
    said = {
        "5 × gradient": plan._repr_html_(),
        "proved by": result.privacy._repr_html_(),
        "Gradient estimate": result._repr_html_(),
    }
    for words, text in said.items():
        assert words in text
        xml.fromstring(text)
    assert "NOT PRIVATE" in qg.plan(qg.GD(steps=2), n=9, budget=None)._repr_html_()
    assert EVIL not in in_a_notebook(EVIL, [(EVIL, EVIL)], CHARTS)


def test_a_frontier_of_public_data_has_the_line_without_privacy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(400)
    np.savez(tmp_path / "t.npz", X=X, y=y)
    args = ["frontier", str(tmp_path / "t.npz"), "--epsilons", "0.5,8", "--out", str(tmp_path / "f"), "--json"]
    args += ["--row-bound", "6"]
    assert main([*args, "--public", "--repeats", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["epsilon"] for point in found["points"]] == [0.5, 8.0]
    assert found["non_private"] > 0.9
    assert "without privacy" in (tmp_path / "f" / "frontier.svg").read_text()
    assert not (tmp_path / "f" / "ledger.jsonl").exists()


def test_a_frontier_takes_labels_that_are_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    X, y = rows(300)
    lines = ["a,b,ill", *(f"{a:.4f},{b:.4f},{'yes' if t else 'no'}" for (a, b), t in zip(X[:, :2], y, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    args = ["frontier", str(tmp_path / "t.csv"), "--label", "ill", "--public", "--repeats", "1", "--epsilons", "4"]
    assert main([*args, "--classes", "no,yes", "--out", str(tmp_path / "f"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["points"]) == 1


def test_a_frontier_of_people_is_charged_and_has_no_such_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    X, y = rows(400)
    np.savez(tmp_path / "t.npz", X=X, y=y)
    args = ["frontier", str(tmp_path / "t.npz"), "--epsilons", "0.5,2", "--out", str(tmp_path / "f"), "--json"]
    args += ["--row-bound", "6"]
    assert main([*args, "--cap-epsilon", "2"]) == 1
    assert "Nothing was spent" in capsys.readouterr().err
    assert main(args) == 1
    assert "uncertain by about ± 0." in (why := capsys.readouterr().err)
    assert "Nothing was spent" in why
    assert main([*args, "--force"]) == 1
    assert "Pass --yes" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
    assert main([*args, "--force", "--yes"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["non_private"] is None
    spent = project_ledger().spent("t.npz", delta=1e-5, relation="add-remove").epsilon  # fits and scores together
    assert spent == found["spent"]["t.npz"]
    assert spent > 2.0
    assert "without privacy" not in (tmp_path / "f" / "frontier.svg").read_text()


def test_the_command_line_draws_what_the_report_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = qg.Ledger(tmp_path / "ledger.jsonl")
    method = qg.WhitenedGD(steps=4, row_bound=2.0, inference_share=0.2)
    result = qg.minimize(
        qg.objectives.Logistic(), rows(20_000), method, budget=qg.Budget(2.5, 1e-5), ledger=ledger, account="people"
    )
    result.save(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"ledger": str(tmp_path / "ledger.jsonl")}))
    assert main(["report", str(tmp_path / "run"), "--figures", str(tmp_path / "figures")]) == 0
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    assert {"size-of-the-gradient-estimate.svg", "budget-of-the-account.svg", "coefficients.svg"} <= drawn
    assert main(["ledger", "show", str(tmp_path / "ledger.jsonl"), "--plot", str(tmp_path / "b.svg")]) == 0
    assert "spent" in (tmp_path / "b.svg").read_text()
    args = ["--steps", "20", "--rate", "0.1", "--noise-multiplier", "2", "--plot", str(tmp_path / "e.svg")]
    assert main(["account", *args]) == 0
    xml.parse(tmp_path / "e.svg")
