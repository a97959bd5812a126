"""A saved ε is a claim: what its events, its options or its ledger do not bear out is shown as refuted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.methods.result import load


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by the command line, with its options and its ledger."""
    home = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    X = rng.normal(size=(300, 2))
    np.savez(home / "rows.npz", X=X, y=(X[:, 0] > 0) * 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIETGRAD_STATE", str(home / "state"))
        args = ["--algorithm", "dp-gd", "--steps", "4", "--epsilon", "1", "--n-public", "300"]
        args += ["--out", str(home / "run"), "--quiet"]
        (home / "run").mkdir()
        assert Ledger(home / "run" / "ledger.jsonl").id  # a ledger of the folder's own, which a copy brings along
        assert main(["train", str(home / "rows.npz"), *args]) == 0
    return home / "run"


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may forge."""
    import shutil

    return Path(shutil.copytree(original, tmp_path / "run"))


def forge(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((run / "result.json").read_text())
    change(data)
    (run / "result.json").write_text(json.dumps(data))


Forgery = Callable[[dict[str, Any]], None]


def less_epsilon_and_more_noise(data: dict[str, Any]) -> None:
    """The statement and its events agree; only the ledger knows better."""
    data["privacy"]["epsilon"] = 0.01
    data["privacy"]["event"]["inner"]["noise_multiplier"] = 1e5
    data["details"]["epsilon_curve"] = []


def stating(**changes: object) -> Forgery:
    return lambda data: data["privacy"].update(changes)


def test_the_run_itself_is_believed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "refuted" not in capsys.readouterr().err
    assert load(run).privacy.is_private
    assert "ε, proved" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "change",
    [
        stating(epsilon=0.01), less_epsilon_and_more_noise, stating(delta=1e-12), stating(relation="replace-one"),
        stating(event=None), stating(account="somebody else"), stating(releases={"gradient": 5000}),
        stating(epsilon=None),
    ],
)  # fmt: skip
def test_an_edited_statement_is_refuted(run: Path, change: Forgery, capsys: pytest.CaptureFixture[str]) -> None:
    forge(run, change)
    assert main(["report", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["refuted"][str(run)]
    page = (run / "report.html").read_text()
    assert "refuted" in page
    assert "ε, proved" not in page
    assert "Privacy certificate" not in page


def test_loading_proves_again(run: Path) -> None:
    forge(run, stating(epsilon=0.01))
    privacy = load(run).privacy
    assert not privacy.is_private
    assert str(privacy).startswith("REFUTED: ε = 0.01 is stated")


def test_a_ledger_without_the_run_refutes(run: Path) -> None:
    from quietgrad.core.accounting.events import gaussian

    for file in ("ledger.jsonl", "ledger.jsonl.head"):
        (run / file).unlink()
    Ledger(run / "ledger.jsonl").reserve(
        "default", gaussian(3.0, 2), delta=1e-5, relation="add-remove", run="another"
    )
    assert main(["report", str(run)]) == 1


@pytest.mark.parametrize(
    "change",
    [
        stating(epsilon="small"), stating(epsilon=float("nan")), stating(delta=-1.0), stating(releases=[1]),
        lambda d: d.update(privacy=[]), lambda d: d.update(data=None), lambda d: d.update(history=7),
        lambda d: d["details"].update(slots=3), lambda d: d["metrics"].update(test_accuracy="high"),
        lambda d: d["details"].update(epsilon_curve=[[1]]),
    ],
)  # fmt: skip
def test_a_statement_of_another_kind_is_one_error(
    run: Path, change: Forgery, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(run, change)
    assert main(["report", str(run)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--debug" not in said


def test_a_proof_that_would_take_hours_is_not_begun(run: Path) -> None:
    def many(data: dict[str, Any]) -> None:
        one = data["privacy"]["event"]
        parts = [{**one, "inner": {**one["inner"], "noise_multiplier": 5.0 + k}} for k in range(5000)]
        data["privacy"]["event"] = {"event": "composed", "parts": parts}

    forge(run, many)
    assert "not proved again" in str(load(run).privacy)


def test_deep_and_endless_json_is_refused(run: Path) -> None:
    (run / "result.json").write_text("[" * 200_000)
    with pytest.raises(DataError):
        load(run)
