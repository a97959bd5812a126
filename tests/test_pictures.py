"""Pictures as rows of scattering features, and models on them from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse

pytest.importorskip("torch")

from quietgrad.cli import main
from quietgrad.errors import DataError
from quietgrad.features import Pictures, Scattering
from quietgrad.features.scattering import constants, made
from quietgrad.privacy.ledger import Ledger


def pictures(n: int, seed: int) -> tuple[Any, Any]:
    """Waves along rows, columns or a diagonal, of any phase: no linear model of pixels tells them apart."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[0:8, 0:8]
    y = rng.integers(0, 3, n)
    waves = np.stack([(row, column, row + column)[k] for k in y]) * 1.5 + rng.uniform(0.0, 6.3, (n, 1, 1))
    X = 0.5 + 0.25 * np.sin(waves) + 0.08 * rng.normal(size=(n, 8, 8))
    return X.reshape(n, 64), y


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    for name, n, seed in (("people.npz", 2000, 0), ("others.npz", 200, 1)):
        X, y = pictures(n, seed)
        np.savez(tmp_path / name, X=X, y=y)
    return tmp_path / "people.npz"


def arguments(table: Path, out: Path, *more: str) -> list[str]:
    test = str(table.parent / "others.npz")
    promise = ("--epsilon", "2", "--classes", "0,1,2", "--features", "scattering", "--exact-score")
    return ["train", str(table), "--test", test, "--out", str(out), *promise, *more]


def result_of(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "result.json").read_text())
    return loaded


# --- rows -----------------------------------------------------------------------------------------------------


def test_rows_are_the_features_of_their_own_picture() -> None:
    rng = np.random.default_rng(2)
    grey, colour = Pictures.of(64), Pictures(8, 3, "photographs")
    mean, deviation = (c[:, :, None, None] for c in constants(3))
    for kind, scaled in (
        (grey, lambda x: Scattering(8).normalized(x)),
        (colour, lambda x: (Scattering(8)(x).numpy() - mean) / deviation),
    ):
        X = rng.random((300, kind.pixels))
        rows = kind.rows(X)
        assert rows.shape == (300, kind.width)
        assert rows.dtype == np.float32
        expected = scaled(X.astype(np.float32).reshape(300, kind.channels, 8, 8))
        np.testing.assert_allclose(rows, np.asarray(expected).reshape(300, -1), rtol=1e-4, atol=1e-4)
        assert (kind.rows(X[1:]) == rows[1:]).all()  # to the last bit, wherever a record stands
        assert (kind.rows(sparse.csr_array(X)) == rows).all()
        if kind.row_bound is not None:
            assert np.linalg.norm(rows.astype(np.float64), axis=1).max() <= kind.row_bound
    flat = np.concatenate([np.zeros((1, 64)), np.full((1, 64), 1e30), np.eye(1, 64)])
    assert grey.row_bound is not None
    lengths = np.linalg.norm(grey.rows(flat).astype(np.float64), axis=1)
    assert (np.isnan(lengths) | (lengths <= grey.row_bound)).all()


@pytest.mark.slow
def test_the_kept_constants_are_those_of_the_photographs() -> None:
    pytest.importorskip("PIL")
    again = made()
    for name, channels in (("grey", 1), ("colour", 3)):
        mean, deviation = constants(channels)
        np.testing.assert_allclose(again[name]["mean"], mean, rtol=2e-3)
        np.testing.assert_allclose(again[name]["std"], deviation, rtol=2e-3)


def test_words() -> None:
    for kind in (Pictures(28), Pictures(32, 3, "photographs")):
        assert Pictures.from_json(json.loads(json.dumps(kind.to_json()))) == kind
    good = Pictures(28).to_json()
    for key, value in (("features", "hog"), ("size", 30), ("size", 10**9), ("size", True), ("channels", 2)):
        with pytest.raises(DataError, match="not described"):
            Pictures.from_json({**good, key: value})
    wrong: Any
    for wrong in (None, [], {}, {**good, "normalization": "people"}):
        with pytest.raises(DataError, match="not described"):
            Pictures.from_json(wrong)
    for pixels in (100, 36, 3, 785, 2 * 784):
        with pytest.raises(DataError, match="no square pictures"):
            Pictures.of(pixels)


# --- from the command line ------------------------------------------------------------------------------------


def test_train_predict_and_evaluate_use_the_same_features(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, others = tmp_path / "run", str(tmp_path / "others.npz")
    assert main(arguments(table, out)) == 0
    result = result_of(out)
    assert result["metrics"]["test_accuracy"] > 0.95  # pixels: a third
    assert result["privacy"]["epsilon"] <= 2.0
    assert result["details"]["model"]["pictures"] == {**Pictures(8).to_json(), "columns": None}
    assert result["details"]["model"]["features"] == 324
    capsys.readouterr()
    assert main(["predict", str(out), others, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["scores"]["accuracy"] == pytest.approx(result["metrics"]["test_accuracy"])
    assert main(["evaluate", str(out), others, "--epsilon", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"][0] > 0.8
    np.savez(tmp_path / "wide.npz", X=np.zeros((2, 324)), y=np.array([0, 1]))
    assert main(["predict", str(out), str(tmp_path / "wide.npz")]) == 1
    assert "has 324 features, the model was trained on 64" in capsys.readouterr().err


def test_a_killed_run_goes_on_with_the_same_features(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    often = ("--checkpoint-seconds", "0.02", "--quiet")
    command = arguments(table, out, "--steps", "1500", "--batch-size", "50", *often)
    process = subprocess.Popen([sys.executable, "-m", "quietgrad", *command])
    while process.poll() is None and not (out / "checkpoint.safetensors").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert main(["resume", str(out), "--quiet"]) == 0
    result = result_of(out)
    assert len(Ledger(out / "ledger.jsonl").book().held) == 2  # the count of the records, and the run
    assert not any("fresh noise" in note for note in result["privacy"]["notes"])
    assert result["metrics"]["test_accuracy"] > 0.9
    assert result["details"]["model"]["pictures"]["size"] == 8


def test_refusals_before_anything_is_spent(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main([*arguments(table, out)[:-1], "hog"]) == 2
    assert main(["train", "--landscape", "strict-saddle", "--epsilon", "1", "--features", "scattering"]) == 2
    assert main(["train", "breast-cancer", "--epsilon", "1", "--features", "scattering", "--out", str(out)]) == 1
    assert "rows of 30 numbers are no square pictures" in capsys.readouterr().err
    assert not (out / "ledger.jsonl").exists()
