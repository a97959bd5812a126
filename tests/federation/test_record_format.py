"""Pictures, tables and tokens as parties' records: what is read, and what is refused without naming a record."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import DataError
from quietgrad.federation import Party, simulate
from quietgrad.federation.record_format import RecordFormat

IMAGES: dict[str, Any] = {"form": "images", "shape": [1, 4, 4], "classes": ["cat", "dog"]}


def test_pictures_of_a_file_and_of_a_folder_are_the_same_records(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    X = np.random.default_rng(0).integers(0, 256, (3, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", X=X, y=["dog", "cat", "dog"], who=[1, 1, 2])
    home = tmp_path / "pictures"
    home.mkdir()
    with (home / "records.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["file", "label", "who"])
        for k, label in enumerate(("dog", "cat", "dog")):
            image.fromarray(X[k]).save(home / f"{k}.png")
            rows.writerow([f"{k}.png", label, (1, 1, 2)[k]])
    form = RecordFormat.of({**IMAGES, "person": "who"})
    one, many = form.load(tmp_path / "a.npz"), form.load(home)
    assert (one.X.shape, one.X.dtype, one.y.tolist()) == ((3, 1, 4, 4), np.float32, [1, 0, 1])
    np.testing.assert_array_equal(one.X, many.X)
    np.testing.assert_array_equal(one.X, X[:, None].astype(np.float32) / np.float32(255))
    assert (one.y.tolist(), len(set(many.person.tolist()))) == (many.y.tolist(), 2)  # type: ignore[union-attr]
    assert "2 people, 3 records" in one.in_words("a.npz", 2)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"y": ["cat"]}, "needs an array 'X'"),
        ({"X": np.zeros((1, 4, 4))}, "needs an array 'y'"),
        ({"X": np.zeros((1, 4, 5)), "y": ["cat"]}, "shape"),
        ({"X": np.full((1, 4, 4), np.nan), "y": ["cat"]}, "not finite"),
        ({"X": np.zeros((2, 4, 4)), "y": ["cat"]}, "one label per record"),
        ({"X": np.array([[["77"]]]), "y": ["cat"]}, "of numbers"),
        ({"X": np.array([{"77": 1}]), "y": ["cat"]}, "no npz file of arrays"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_and_not_shown(
    held: dict[str, Any], words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", **held)
    with pytest.raises(DataError, match=words) as raised:
        RecordFormat.of(IMAGES).load(tmp_path / "a.npz")
    assert "77" not in str(raised.value)


def test_folders_do_not_lead_outside(tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "records.csv").write_text("file,label\n../secret.png,cat\n")
    with pytest.raises(DataError, match="in this folder"):
        RecordFormat.of(IMAGES).load(tmp_path)
    (tmp_path / "records.csv").write_text("file,label\na.png,cat\n")
    (tmp_path / "a.png").write_bytes(b"none")
    with pytest.raises(DataError, match="cannot be read"):
        RecordFormat.of(IMAGES).load(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"form": "sound"}, "must be one of"),
        ({"form": "images", "classes": [0, 1]}, "shape"),
        ({"form": "images", "shape": [1, 2], "classes": [0]}, "two or more"),
        ({"form": "tokens"}, "vocabulary"),
        ({"form": "tokens", "vocabulary": 9, "features": 3}, "is not for form='tokens'"),
        ({"form": "table"}, "features"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RecordFormat.of(data)


def test_a_table_becomes_rows_of_float32_with_codes_or_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.eye(3), y=[7, 5, 7])
    found = RecordFormat.of({"features": 3, "classes": [5, 7]}).load(tmp_path / "a.npz")
    assert (found.X.dtype, found.y.tolist()) == (np.float32, [1, 0, 1])
    numbers = RecordFormat.of({"features": 3}).load(tmp_path / "a.npz")
    assert (str(numbers.y.dtype), numbers.y.tolist()) == ("float32", [7.0, 5.0, 7.0])


class Language(nn.Module):
    """The next token by the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4), nn.Linear(4, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = self.out(self.table(tokens))
        return said


def test_tokens_of_different_lengths_train_a_language_model(tmp_path: Path) -> None:
    form = RecordFormat.of({"form": "tokens", "vocabulary": 6})
    parties = []
    for k in range(2):
        lists = [[(j + i) % 6 for i in range(3 + j % 3)] for j in range(12)]
        pq.write_table(pa.table({"tokens": lists}), tmp_path / f"{k}.parquet")
        records = form.load(tmp_path / f"{k}.parquet")
        parties.append(Party(records.held, n_public=12))
    objective = qt.objective(Language(), qt.causal_lm_loss, pad=6)
    result = simulate(
        qg.DPSGD(steps=2, batch_size=8), objective, parties, budget=qg.Budget(4.0, 1e-3), trust="secure",
        secure="masks",
    )  # fmt: skip
    assert result.privacy.is_private
    pq.write_table(pa.table({"tokens": [[1, 6]]}), tmp_path / "odd.parquet")
    with pytest.raises(DataError, match="below vocabulary=6"):
        form.load(tmp_path / "odd.parquet")
