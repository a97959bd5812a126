"""Model cards: declared facts and paid releases only, in Markdown that hubs read and in HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.report.card import FILL_IN, card_of, write_cards
from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.estimators import PrivateLogisticRegression, private_score, to_run
from tests.assurance.test_report import read, words


def table(n: int = 4000) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(4)
    X = rng.uniform(-1, 1, size=(n, 2))
    return X, (rng.random(n) < 1 / (1 + np.exp(-4 * X[:, 0]))) * 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fit that was saved as a run, with a private score beside it."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    X, y = table()
    paid: dict[str, Any] = {"ledger": str(tmp_path / "ledger.jsonl")}
    model = PrivateLogisticRegression(
        epsilon=1.0, delta=1e-6, classes=[0, 1], feature_bounds=[(-1, 1)] * 2, account="patients", **paid
    ).fit(X[:3000], y[:3000])
    folder = to_run(model, tmp_path / "run")
    private_score(model, X[3000:], y[3000:], epsilon=0.5, delta=1e-6, account="held-out", **paid).save(folder)
    return folder


def metadata(text: str) -> dict[str, Any]:
    """The block between the first two rules; every value is JSON, which is YAML."""
    block = text.split("---\n")[1]
    return {key: json.loads(value) for key, _, value in (line.partition(": ") for line in block.splitlines())}


def test_a_card_states_claim_scores_and_what_is_left_to_write(run: Path, tmp_path: Path) -> None:
    text = card_of(run, tmp_path / "ledger.jsonl").markdown()
    meta, saved = metadata(text), json.loads((run / "evaluation.json").read_text())
    assert (meta["library_name"], meta["pipeline_tag"]) == ("quietgrad", "tabular-classification")
    assert "differential-privacy" in meta["tags"]
    assert meta["privacy"]["epsilon"] <= 1.0 + 1e-9
    assert meta["privacy"]["condition"] is None
    scored = f"{saved['accuracy'][0]:.4f} ± {saved['accuracy'][1]:.4f}"
    assert [fact for fact in ("add-remove", scored, "account “patients”") if fact not in text] == []
    assert text.count(FILL_IN) == 4


def test_a_card_has_no_number_that_was_not_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    X, y = table(700)
    np.savez("rows.npz", X=X[:600], y=y[:600], X_test=X[600:], y_test=y[600:])
    asked = ["--epsilon", "1", "--algorithm", "dp-gd", "--steps", "4", "--row-bound", "2", "--evaluate-train"]
    assert main(["train", "rows.npz", *asked, "--out", "r", "--quiet"]) == 0
    result = json.loads(Path("r/result.json").read_text())
    scores, counted = result["metrics"], str(result["data"]["n_public"])  # by chance, noise may be 0
    assert main(["card", "r"]) == 0
    for name in ("MODEL_CARD.md", "model_card.html"):
        text = (tmp_path / "r" / name).read_text().replace(counted, "")
        text = words(read(text)).partition("Intended use")[2] if name.endswith("html") else text
        for key in ("test_accuracy", "test_loss", "train_accuracy", "train_loss"):
            assert f"{scores[key]:.4f}" not in text
            assert f"{scores[key]:.3g}" not in text
        assert "600" not in text, "the exact number of records is secret under add-remove"
        assert "No private score stands beside this run" in text


def test_a_card_in_html_is_one_page_and_a_refuted_run_has_none(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (page,) = write_cards(run, run / "card.html")
    found = read(page.read_text())
    assert found.links == []
    assert "(1, 1e-06)-DP, add-remove" in words(found)
    assert main(["card", str(run), "-o", "card.pdf"]) == 1
    assert "a card is a .md or .html file" in capsys.readouterr().err
    said = json.loads((run / "result.json").read_text())
    said["privacy"]["epsilon"] /= 2
    (run / "result.json").write_text(json.dumps(said))
    with pytest.raises(DataError, match="refuted"):
        card_of(run)


def test_a_run_without_noise_says_so(tmp_path: Path) -> None:
    qg.minimize(qg.objectives.Logistic(), table(300), qg.GD(steps=4), budget=None).save(tmp_path / "r")
    text = card_of(tmp_path / "r").markdown()
    assert "NOT PRIVATE" in text
    assert "differential-privacy" not in metadata(text)["tags"]


def test_names_from_files_are_no_markup(run: Path) -> None:
    said = json.loads((run / "result.json").read_text())
    said["data"]["name"] = "<img src=x> [click](http://x) | a\n---\nlicense: mit"
    (run / "result.json").write_text(json.dumps(said))
    card = card_of(run)
    text = card.markdown()
    assert "\\<img" in text
    assert not re.search(r"(?<!\\)\]\(", text)
    assert metadata(text)["license"] == "other"
    read(card.html())
