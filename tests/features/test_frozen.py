"""Public networks as features: one record at a time, pinned, refused where they are no public function."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone

pytest.importorskip("torch")

import torch

from quietgrad.cli import main
from quietgrad.core.errors import DataError
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch, from_run, to_run
from quietgrad.features import Frozen, Pictures, Whitened

X = np.random.default_rng(0).random((400, 16))
Y = (X[:, :8].sum(axis=1) > X[:, 8:].sum(axis=1)).astype(int)


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 6, 2), torch.nn.ReLU(), torch.nn.Flatten())


def frozen(seed: int = 0, **more: Any) -> Frozen:
    return Frozen(network(seed), shape=(1, 4, 4), **more)


def model(**more: Any) -> PrivateLogisticRegression:
    usual: dict[str, Any] = {"epsilon": 8.0, "classes": [0, 1], "features": frozen()}
    return PrivateLogisticRegression(**usual | more)


# --- rows -----------------------------------------------------------------------------------------------------


def test_rows_are_the_networks_answers_to_the_last_bit_wherever_a_record_stands() -> None:
    features, net = frozen(unit_rows=False), network()
    rows = features.rows(X)
    with torch.no_grad():
        expected = net(torch.tensor(X, dtype=torch.float32).reshape(-1, 1, 4, 4)).numpy()
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    assert rows.dtype == np.float32
    assert (features.rows(X[7:]) == rows[7:]).all()
    assert (features.rows(sparse.csr_array(X)) == rows).all()
    lengths = np.linalg.norm(frozen().rows(X).astype(np.float64), axis=1)
    np.testing.assert_allclose(lengths, 1.0, rtol=1e-6)
    assert (frozen().row_bound, features.row_bound) == (1.0, None)


class Mixing(torch.nn.Module):
    """Centres the records of a batch by each other."""

    def forward(self, x: Any) -> Any:
        return x - x.mean(0)


class Counting(torch.nn.Module):
    """Remembers what it was asked, as an attribute that is no buffer."""

    total = 0.0

    def forward(self, x: Any) -> Any:
        self.total += float(x.sum())
        return x + self.total


class Buffered(torch.nn.Module):
    """Moves a buffer that its answers do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.get_buffer("asked").add_(1)
        return x


def test_a_batch_cannot_be_mixed_and_state_is_refused() -> None:
    assert (Frozen(Mixing(), unit_rows=False).rows(X) == 0.0).all()  # it sees one record, whose mean is itself
    torch.manual_seed(0)
    shaking = torch.nn.Dropout(0.5)
    assert (Frozen(shaking, unit_rows=False).rows(X) == X.astype(np.float32)).all()  # evaluation mode
    for network_with_state in (Counting(), Buffered()):
        with pytest.raises(DataError, match="keeps state or draws random"):
            Frozen(network_with_state).rows(X)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_weights_of_other_kinds(kind: torch.dtype) -> None:
    rows = Frozen(network().to(kind), shape=(1, 4, 4)).rows(X[:5])
    np.testing.assert_allclose(rows, frozen().rows(X[:5]), atol=0.05)


def test_training_the_original_does_not_move_the_features() -> None:
    net = network()
    features = Frozen(net, shape=(1, 4, 4))
    before = features.rows(X)
    with torch.no_grad():
        net[0].weight += 0.1
    assert (features.rows(X) == before).all()
    assert Frozen(net, shape=(1, 4, 4)).digest != features.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].weight.data.add_(1e-7),
        lambda net: net[0].bias.data.neg_(),
        lambda net: net.append(torch.nn.Tanh()),
        lambda net: net.double(),
    ],
)
def test_a_pinned_network_refuses_any_other(change: Any) -> None:
    pinned = frozen().digest
    assert Frozen(network(), shape=(1, 4, 4), digest=pinned) == frozen()
    other = network()
    change(other)
    with pytest.raises(DataError, match="is not the pinned network"):
        Frozen(other, shape=(1, 4, 4), digest=pinned)


def test_what_cannot_be_features() -> None:
    with pytest.raises(DataError, match="records of shape"):
        frozen().rows(X[:, :9])
    with pytest.raises(ValueError, match="torch module or the path"):
        Frozen(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sizes > 0"):
        Frozen(network(), shape=(0, 4))
    with pytest.raises(DataError, match="one tensor"):
        Frozen(torch.nn.LSTM(16, 2)).rows(X)
    with pytest.raises(DataError, match="Pass the shape that it takes"):
        Frozen(network()).rows(X)
    with pytest.raises(DataError, match="not finite"):
        Frozen(torch.nn.Identity()).rows(np.full((2, 3), np.inf))
    with pytest.raises(ValueError, match="a map of quietgrad"):
        model(features=network()).fit(X, Y)


# --- estimators -----------------------------------------------------------------------------------------------


def test_an_estimator_fits_predicts_and_is_saved_with_its_features(tmp_path: Path) -> None:
    fitted = clone(model()).fit(X, Y)
    assert fitted.coef_.shape == (1, 54)
    assert fitted.n_features_in_ == 16
    assert fitted.score(X, Y) > 0.8
    assert any(frozen().digest in note for note in fitted.privacy_.notes)
    folder = to_run(fitted, tmp_path / "run")
    assert json.loads((folder / "result.json").read_text())["details"]["model"]["feature_map"]["shape"] == [1, 4, 4]
    again = from_run(folder, features=frozen())
    assert (again.predict_proba(X) == fitted.predict_proba(X)).all()
    with pytest.raises(DataError, match=r"Pass the same features=Frozen"):
        from_run(folder)
    for other in (frozen(1), frozen(unit_rows=False)):
        with pytest.raises(DataError, match="other features"):
            from_run(folder, features=other)
    assert (pickle.loads(pickle.dumps(fitted)).predict(X) == fitted.predict(X)).all()


def test_pictures_are_features_too_and_need_no_file(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).random((300, 64))
    labels = (pixels[:, :32].mean(axis=1) > pixels[:, 32:].mean(axis=1)).astype(int)
    fitted = model(features=Pictures(8)).fit(pixels, labels)
    folder = to_run(fitted, tmp_path / "run")
    assert (from_run(folder).predict(pixels) == fitted.predict(pixels)).all()


def test_a_search_maps_the_rows_of_each_round_once() -> None:
    search = PrivateSearch(model(), {"regularization": [0.0, 0.1]}, epsilon=8.0, mean_rounds=2.0).fit(X, Y)
    assert search.best_estimator_.coef_.shape == (1, 54)
    assert search.predict(X).shape == (400,)


# --- public rows ----------------------------------------------------------------------------------------------


def test_public_rows_whiten_each_row_by_itself(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    mix = rng.standard_normal((54, 54))
    public, private = (rng.standard_normal((n, 54)) @ mix for n in (3000, 700))
    whitened = Whitened(public, unit_rows=False, damping=1e-9)
    rows = whitened.rows(private)
    np.testing.assert_allclose(np.cov(rows.T), np.eye(54), atol=0.3)  # as many standard errors as 54² entries need
    for first in (1, 2, 7, 301):  # each row to the last bit, wherever it stands
        assert (whitened.rows(private[first:]) == rows[first:]).all()
        assert (whitened.rows(np.delete(private, first, axis=0)) == np.delete(rows, first, axis=0)).all()
    assert Whitened(public, components=5).rows(private).shape == (700, 5)
    assert Whitened(public).digest != Whitened(public + 1e-3).digest
    for words, wanted in (({"components": 55}, "from 1 to 54"), ({"damping": 0.0}, "must be > 0")):
        with pytest.raises(ValueError, match=wanted):
            Whitened(public, **words)
    with pytest.raises(ValueError, match="all rows are the same"):
        Whitened(np.ones((3, 2)))
    with pytest.raises(DataError, match="as the public rows are"):
        Whitened(public).rows(X)


def test_a_whitened_network_is_saved_and_pinned(tmp_path: Path) -> None:
    features = Whitened(X[:50], frozen())
    fitted = model(features=features).fit(X[50:], Y[50:])
    noted = " ".join(fitted.privacy_.notes)
    assert features.digest in noted
    assert frozen().digest in noted
    folder = to_run(fitted, tmp_path / "run")
    again = from_run(folder, features=Whitened(X[:50], frozen()))
    assert (again.predict_proba(X) == fitted.predict_proba(X)).all()
    for other in (Whitened(X[:49], frozen()), Whitened(X[:50], frozen(1)), frozen()):
        with pytest.raises(DataError, match="other features"):
            from_run(folder, features=other)
    plain = to_run(model(features=Whitened(X[:50])).fit(X[50:], Y[50:]), tmp_path / "plain")
    assert from_run(plain).features == Whitened(X[:50])
    Whitened(X[:49]).save(plain)
    with pytest.raises(DataError, match="is not the one"):
        from_run(plain)


# --- ONNX files: written here byte by byte, as protobuf spells them -------------------------------------------


def _field(number: int, value: bytes | int | str) -> bytes:
    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def _value(name: str, sizes: list[int | str]) -> bytes:
    shape = b"".join(_field(1, _field(1, n) if isinstance(n, int) else _field(2, n)) for n in sizes)
    return _field(1, name) + _field(2, _field(1, _field(1, 1) + _field(2, shape)))


def onnx_file(path: Path, *, batch: int | str = "N", beside: bool = False) -> Any:
    """relu(x·W) for rows of 16 numbers, its weights inside or in a file beside it; W."""
    weights = np.random.default_rng(3).standard_normal((16, 5)).astype(np.float32)
    tensor = _field(1, 16) + _field(1, 5) + _field(2, 1) + _field(8, "W")
    if beside:
        (path.parent / "w.bin").write_bytes(weights.tobytes())
        tensor += _field(13, _field(1, "location") + _field(2, "w.bin")) + _field(14, 1)
    else:
        tensor += _field(9, weights.tobytes())
    nodes = (("MatMul", ["x", "W"], "h"), ("Relu", ["h"], "y"))
    graph = b"".join(
        _field(1, b"".join(_field(1, one) for one in inputs) + _field(2, output) + _field(4, kind))
        for kind, inputs, output in nodes
    )
    graph += _field(2, "g") + _field(5, tensor) + _field(11, _value("x", [batch, 16]))
    graph += _field(12, _value("y", [batch, 5]))
    path.write_bytes(_field(1, 8) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 13)))
    return weights


def test_an_onnx_file_needs_its_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    onnx_file(tmp_path / "net.onnx")
    with pytest.raises(DataError, match=r"pip install 'quietgrad\[onnx\]'"):
        Frozen(tmp_path / "net.onnx")
    with pytest.raises(DataError, match="no such file"):
        Frozen(tmp_path / "none.onnx")


def test_rows_of_an_onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is an extra: pip install 'quietgrad[onnx]'")
    weights = onnx_file(tmp_path / "net.onnx")
    features = Frozen(tmp_path / "net.onnx", unit_rows=False)
    np.testing.assert_allclose(features.rows(X), np.maximum(X.astype(np.float32) @ weights, 0.0), atol=1e-5)
    assert (features.rows(X[5:]) == features.rows(X)[5:]).all()
    assert (pickle.loads(pickle.dumps(features)).rows(X) == features.rows(X)).all()
    with pytest.raises(DataError, match="must be one of y"):
        Frozen(tmp_path / "net.onnx", output="z").rows(X)
    onnx_file(tmp_path / "four.onnx", batch=4)
    with pytest.raises(DataError, match="batches of 4"):
        Frozen(tmp_path / "four.onnx")
    onnx_file(tmp_path / "beside.onnx", beside=True)
    monkeypatch.chdir(tmp_path)  # where a runtime would look for weights that the digest does not cover
    with pytest.raises(DataError, match="holds all of its weights"):
        Frozen("beside.onnx")


# --- the command line -----------------------------------------------------------------------------------------


def _table(path: Path, width: int) -> None:
    pixels = np.random.default_rng(4).integers(0, 9, (500, width))
    answer = (pixels[:, : width // 2].sum(axis=1) > pixels[:, width // 2 :].sum(axis=1)).astype(int)
    names = ",".join([*(f"p{j}" for j in range(width)), "answer"])
    np.savetxt(path, np.column_stack([pixels, answer]), "%d", ",", header=names, comments="")


def test_train_and_predict_with_scattering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _table(Path("t.csv"), 64)
    options = ["--epsilon", "4", "--features", "scattering"]
    assert main(["train", "t.csv", *options, "--out", "run", "--quiet"]) == 0
    assert main(["predict", "run", "t.csv", "-o", "p.csv"]) == 0
    assert len(Path("p.csv").read_text().splitlines()) == 501
    assert main(["train", "t.csv", *options, "--algorithm", "dp-sgd", "--out", "other"]) == 2
    assert main(["train", "t.csv", "--epsilon", "4", "--features", "net.pkl", "--out", "other"]) == 1


def test_train_certify_and_predict_with_an_onnx_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is an extra: pip install 'quietgrad[onnx]'")
    monkeypatch.chdir(tmp_path)
    _table(Path("t.csv"), 16)
    onnx_file(Path("net.onnx"))
    digest = Frozen("net.onnx").digest
    wanted = ["train", "t.csv", "--epsilon", "4", "--quiet", "--out"]
    assert main([*wanted, "other", "--features", "net.onnx@sha256:00"]) == 1
    assert "is not the pinned network" in capsys.readouterr().err
    assert main([*wanted, "run", "--features", f"net.onnx@{digest}"]) == 0
    assert main(["certificate", "run", "-o", "claim.json"]) == 0
    assert digest in Path("claim.json").read_text()
    assert main(["verify", "claim.json"]) == 0
    Path("net.onnx").unlink()  # the run has its own
    assert main(["predict", "run", "t.csv", "-o", "p.csv"]) == 0
    with Path("run/features.onnx").open("ab") as file:
        file.write(b"x")
    assert main(["predict", "run", "t.csv"]) == 1
