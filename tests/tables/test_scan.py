"""Tables that are never in memory: a scan gives what the same rows in an array give, within bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import DataError, LedgerWarning
from quietgrad.core.sampling import CyclicCohorts, CyclicPoisson, FixedSize, Poisson, SinglePass
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientDifferenceQuery, GradientQuery, LossQuery, RecursiveMomentumQuery
from quietgrad.data.scanning import Scan, scan
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateHuberRegressor,
    PrivateLogisticRegression,
    PrivateScaler,
    private_score,
)
from quietgrad.tables.queries.second_order import GradientNorm, LeastEigenvalue
from quietgrad.tables.scanned import is_additive, merged

pytestmark = pytest.mark.filterwarnings("ignore:random_state=5")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N, D = 6000, 5


def rows(seed: int = 0, n: int = N) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, D))
    return X, (X[:, 0] - 0.5 * X[:, 1] + 0.3 * rng.standard_normal(n) > 0).astype(np.int64)


def arrow(X: Any, y: Any) -> Any:
    return pa.table({**{f"x{j}": X[:, j] for j in range(X.shape[1])}, "y": y})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parquet files of several row groups, of unequal sizes."""
    X, y = rows()
    for k, (first, last) in enumerate(((0, 1000), (1000, 3500), (3500, N))):
        pq.write_table(arrow(X[first:last], y[first:last]), tmp_path / f"part{k}.parquet", row_group_size=700)
    return tmp_path


def queries(dim: int) -> list[Any]:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal(dim), rng.standard_normal(dim)
    return [
        GradientQuery(a, 0.7),
        GradientDifferenceQuery(a, b, 0.5),
        RecursiveMomentumQuery(a, b, 0.3, 1.0, 0.5),
        LossQuery(a, 2.0),
        LeastEigenvalue(a, 0.2, float(N)),
        GradientNorm(a, 0.7, float(N)),
    ]


@pytest.mark.parametrize("indices", [None, np.array([5, 4999, 17, 3, 1000, 999])])
def test_every_sum_is_that_of_the_table(folder: Path, indices: Any) -> None:
    X, y = rows()
    loss = qg.objectives.Logistic(intercept=True, row_bound=2.0, rows="clip")
    table = loss.prepare((X, y))
    scanned: Any = loss.prepare(scan(folder, target="y"))
    for query in queries(D + 1):
        expected, found = np.zeros(query.dim(table)), np.zeros(query.dim(scanned))
        query.sum_into(loss, Batch(table, indices), expected)
        scanned.answer(query, Batch(scanned, indices), found)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    w = queries(D + 1)[0].params
    certificates = [str(qg.certify(loss, w, data)) for data in ((X, y), scan(folder, target="y"))]
    assert certificates[0] == certificates[1]
    assert loss.risk(scanned, w) == pytest.approx(loss.risk(table, w), rel=1e-12)
    np.testing.assert_allclose(loss.risk_gradient(scanned, w), loss.risk_gradient(table, w), rtol=1e-9)


def test_the_sum_does_not_depend_on_the_number_of_threads(folder: Path) -> None:
    loss = qg.objectives.Logistic(intercept=True)
    query, sums = queries(D + 1)[0], []
    for threads in (1, 2, 5):
        records: Any = loss.prepare(scan(folder, target="y", threads=threads))
        sums.append(np.zeros(D + 1))
        records.answer(query, Batch(records, None), sums[-1])
    assert (sums[0] == sums[1]).all()
    assert (sums[0] == sums[2]).all()


def test_groups_of_a_power_of_two_are_branches_of_the_tree() -> None:
    """A cluster merges groups first: the same tree, whatever the number of values."""
    for count in range(1, 70):
        words = [str(k) for k in range(count)]
        groups = [merged(words[start : start + 8], _pair) for start in range(0, count, 8)]
        assert merged(groups, _pair) == merged(words, _pair)


def _pair(a: str, b: str) -> str:
    return f"({a}+{b})"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PrivateLogisticRegression, {"classes": [0, 1]}),
        (PrivateLogisticRegression, {}),
        (PrivateHuberRegressor, {}),
        (PrivateHuberRegressor, {"algorithm": "dp-gd", "target_bounds": (0.0, 1.0)}),
        (PrivateAdditiveClassifier, {"bins": 4}),
        (PrivateAdditiveRegressor, {"target_bounds": (0.0, 1.0), "bins": 4}),
    ],
)
def test_estimators_fit_a_scan_as_an_array(folder: Path, kind: Any, options: dict[str, Any]) -> None:
    X, y = rows()
    table = scan(folder, target="y")
    mine, other = (kind(epsilon=4.0, random_state=5, **options) for _ in range(2))
    mine.fit(table)
    other.fit(X, y)
    np.testing.assert_allclose(mine.coef_, other.coef_, rtol=1e-7, atol=1e-9)
    assert mine.privacy_.epsilon == other.privacy_.epsilon
    assert list(mine.feature_names_in_) == [f"x{j}" for j in range(D)]
    if kind is PrivateLogisticRegression:
        assert mine.classes_.tolist() == [0, 1]
        assert table.passes <= 40  # 32 steps, up to seven looks, and the check before them
        with pytest.raises(DataError, match="predict_to"):
            mine.predict(table)


def test_minimize_a_scan(folder: Path) -> None:
    X, y = rows()
    loss = qg.objectives.Logistic(intercept=True)
    method = qg.GD(steps=8, learning_rate=1.0)
    one, two = (qg.minimize(loss, data, method, budget=None) for data in (scan(folder, target="y"), (X, y)))
    np.testing.assert_allclose(one.params, two.params, rtol=1e-9, atol=1e-9)
    budget = qg.Budget(3.0, 1e-5, qg.Relation.REPLACE_ONE)
    sampled = qg.DPSGD(steps=10, batch_size=600, sampling="fixed-size")
    result = qg.minimize(loss, scan(folder, target="y"), sampled, budget=budget, seed=2)
    assert (((X @ result.params[:-1] + result.params[-1]) > 0) == y).mean() > 0.8


def test_a_scaled_scan_is_a_scan(folder: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    X, y = pandas.DataFrame(rows()[0], columns=[f"x{j}" for j in range(D)]), rows()[1]
    bounds = [(-3.0, 3.0)] * D
    options: dict[str, Any] = {"epsilon": 4.0, "classes": [0, 1], "random_state": 5}
    turner = PrivateScaler(feature_bounds=bounds)
    seen = turner.fit(scan(folder, target="y")).transform(scan(folder, target="y"))
    Z = pandas.DataFrame(turner.transform(X), columns=turner.get_feature_names_out())
    assert seen.shape == Z.shape
    limits = [(-1.0, 1.0)] * Z.shape[1]
    mine = PrivateLogisticRegression(feature_bounds=limits, **options).fit(seen)
    other = PrivateLogisticRegression(feature_bounds=limits, **options).fit(Z, y)
    np.testing.assert_allclose(mine.coef_, other.coef_, rtol=1e-7, atol=1e-9)
    mine.predict_to(seen, tmp_path.parent / "scaled.parquet")
    assert (pq.read_table(tmp_path.parent / "scaled.parquet")["prediction"].to_numpy() == mine.predict(Z)).all()
    found = PrivateScaler(epsilon=4.0).fit(scan(folder, target="y"))
    assert found.privacy_.epsilon == pytest.approx(4.0, rel=0.02)
    with pytest.raises(DataError, match="other columns"):
        found.transform(scan(folder, target="y", columns=["x0"]))


def test_a_whole_fit_runs_on_a_scan_and_is_not_added_up_by_parts(folder: Path) -> None:
    """Its bound rests on n: summed by parts, of fewer records each, it would tell more than it was priced for."""
    X, y = rows()
    loss = qg.objectives.Logistic(regularizer=qg.objectives.L2(0.1), row_bound=1.0, rows="clip")
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    method = qg.OutputPerturbation(steps=5)
    one = qg.minimize(loss, scan(folder, target="y"), method, budget=budget, seed=1)
    two = qg.minimize(loss, (X, y), method, budget=budget, seed=1)
    np.testing.assert_allclose(one.params, two.params, rtol=1e-9)
    from quietgrad.tables.queries.local_fit import local_fit

    assert not is_additive(local_fit(loss, N, 5, 0.1))
    assert not is_additive(GradientNorm(np.zeros(D), 1.0, float(N)))


@pytest.mark.parametrize(
    "sampling",
    [
        Poisson(0.05),
        FixedSize(N, 300),
        SinglePass(N, 600),
        SinglePass(N, 600, qg.Relation.ADD_REMOVE),
        CyclicCohorts(10),
        CyclicPoisson(4, 0.2),
    ],
)
def test_samples_of_a_scan_have_the_law_of_those_of_a_table(sampling: Any) -> None:
    """Sizes and overlaps of batches; each test fails by chance once in a thousand."""
    from quietgrad.core.noise.rng import SecureStream, seed_key

    sampler = sampling.scanning(N, SecureStream(seed_key(4), "sample/x"))
    batches = [sampler.batch(i) for i in range(10)]
    assert all(len(set(batch.tolist())) == len(batch) for batch in batches)
    expected = sampling.expected_batch(N)
    assert all(abs(len(batch) - expected) < 6.0 * np.sqrt(expected) for batch in batches)
    together = np.concatenate(batches)
    if isinstance(sampling, SinglePass | CyclicCohorts):
        assert sorted(together.tolist()) == list(range(N))  # everybody once
    else:
        assert np.bincount(together, minlength=N).max() > 1
    again = sampling.scanning(N, SecureStream(seed_key(4), "sample/x"))
    assert again.batch(0).tolist() == batches[0].tolist()


def test_queries_about_pairs_of_records_refuse_samples_of_a_scan(folder: Path) -> None:
    from quietgrad.core.accounting.budget import Relation
    from quietgrad.tables.range_queries import MagnitudeHistogram

    loss = qg.objectives.Logistic()
    records: Any = loss.prepare(scan(folder, target="y"))
    query = MagnitudeHistogram(np.arange(D), Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="needs all of them"):
        records.answer(query, Batch(records, np.arange(N)), np.zeros(query.dim(records)))


SCHEMA: dict[str, Any] = {
    "label": {"column": "rich", "classes": ["no", "yes"]},
    "columns": {
        "age": {"bounds": [0, 100], "fill": 40},
        "gain": {"bounds": [0, 1000], "log": True},
        "job": {"categories": ["clerk", "smith", "?"], "unknown": "zero"},
        "code": {"categories": ["1", "2"]},
    },
}


def schema_rows(n: int = 500) -> dict[str, list[Any]]:
    rng = np.random.default_rng(3)
    return {
        "code": [int(v) for v in rng.integers(1, 3, n)],
        "age": [None if k % 7 == 0 else float(v) for k, v in enumerate(rng.integers(0, 120, n))],
        "job": [["clerk", " smith", "?", "baker"][v] for v in rng.integers(0, 4, n)],
        "other": ["x"] * n,
        "gain": [float(v) for v in rng.integers(-10, 2000, n)],
        "rich": [["no", "yes"][v] for v in rng.integers(0, 2, n)],
    }


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "dictionary"])
def test_a_schema_makes_the_same_numbers_of_a_scan_and_a_file(tmp_path: Path, kind: str) -> None:
    columns = schema_rows()
    table = pa.table(columns)
    loaded = tmp_path / "loaded.parquet"
    pq.write_table(table, loaded)
    where = tmp_path / "scanned"
    where.mkdir()
    if kind == "dictionary":
        table = table.set_column(2, "job", table["job"].dictionary_encode())
    if kind in ("parquet", "dictionary"):
        pq.write_table(table, where / "a.parquet", row_group_size=100)
    else:
        from pyarrow import csv

        with pa.output_stream(str(where / f"a.{kind}"), compression="detect") as out:
            csv.write_csv(table, out)
    data = qg.data.load(loaded, schema=SCHEMA)
    seen = scan(where, schema=SCHEMA)
    X, y = (np.concatenate(parts) for parts in zip(*seen.blocks(), strict=True))
    np.testing.assert_array_equal(X, data.X)
    np.testing.assert_array_equal(y, data.y)
    assert seen.feature_names == data.feature_names
    model = PrivateLogisticRegression(epsilon=5.0).fit(seen)
    assert model.classes_.tolist() == ["no", "yes"]
    assert private_score(model, seen, epsilon=1.0).accuracy is not None


@pytest.mark.parametrize("width", [10, 64, 1 << 20])
def test_quoted_text_is_cut_between_lines(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a block, a line's end inside quotes ends no line."""
    monkeypatch.setattr("quietgrad.data.scan_sources._BLOCK", width)
    lines = ["a,w,y"]
    for k in range(200):
        word = ('"two\nlines"', '"a ""quoted"" word"', "plain")[k % 3]
        lines.append(f"{k},{word},{k % 2}")
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    words = ["two\nlines", 'a "quoted" word', "plain"]
    schema = {
        "label": {"column": "y", "classes": ["0", "1"]},
        "columns": {"a": {"bounds": [0, 200]}, "w": {"categories": words}},
    }
    seen, data = scan(tmp_path, schema=schema), qg.data.load(tmp_path / "a.csv", schema=schema)
    X, y = (np.concatenate(parts) for parts in zip(*seen.blocks(), strict=True))
    np.testing.assert_array_equal(X, data.X)
    np.testing.assert_array_equal(y, data.y)


@pytest.mark.parametrize("declared", [False, True])
def test_cells_of_text_are_read_alike_by_load_and_scan(declared: bool, tmp_path: Path) -> None:
    schema = {
        "label": {"column": "y", "classes": ["0", "1"]},
        "missing": ["", "-999"],
        "columns": {"a": {"bounds": [-10, 10], "fill": 3}, "b": {"bounds": [-10, 10]}},
    }
    options: dict[str, Any] = {"schema": schema} if declared else {}
    good, words = ("1", " 2.5", "-0.0", "1e300", "1e-320", "+7", ".5", "5."), ("1_0", "0x10", "secret")
    for cell in (*good, "", "nan", "inf", "-999", *words):
        for end in ("\n", "\r\n"):
            text = f"a,b,y{end}1,2,0{end}{cell},4,1{end}{end}5,6, 1{end}"
            (tmp_path / "a.csv").write_bytes(text.encode())
            seen = []
            for read in (
                lambda: qg.data.load(tmp_path / "a.csv", **options),
                lambda: scan(tmp_path / "a.csv", **options),
            ):
                try:
                    data: Any = read()
                    if isinstance(data, Scan):
                        qg.objectives.Logistic().prepare(data)
                        X, y = (np.concatenate(parts) for parts in zip(*data.blocks(), strict=True))
                    else:
                        X, y = data.X, data.y
                    seen.append((X.tobytes("C"), y.astype(float).tolist()))
                except DataError as error:
                    seen.append((b"", [cell in str(error)] if cell in words else []))
            assert seen[0] == seen[1], cell
            assert (seen[0][0] != b"") == (cell in (*good, "-999") or (declared and cell in ("", "nan"))), cell
            assert seen[0] != (b"", [True])  # a refusal quotes no cell


def test_rows_with_gaps_are_left_out_where_the_schema_says_so(tmp_path: Path) -> None:
    columns: dict[str, Any] = {**SCHEMA["columns"], "age": {"bounds": [0, 100]}}
    schema = {**SCHEMA, "columns": columns, "drop_incomplete": True}
    pq.write_table(pa.table(schema_rows()), tmp_path / "a.parquet", row_group_size=100)
    seen, data = scan(tmp_path, schema=schema), qg.data.load(tmp_path / "a.parquet", schema=schema)
    assert len(seen) == data.n < 500
    loss = qg.objectives.Logistic()
    records: Any = loss.prepare(seen)
    table = loss.prepare((data.X, data.y))
    for indices in (None, np.array([0, 3, len(table) - 1])):
        out, expected = np.zeros(seen.features), np.zeros(seen.features)
        query = GradientQuery(np.ones(seen.features), 1.0)
        records.answer(query, Batch(records, indices), out)
        query.sum_into(loss, Batch(table, indices), expected)
        np.testing.assert_allclose(out, expected, rtol=1e-9)


def test_frames_are_scanned_without_a_copy() -> None:
    X, y = rows()
    table = arrow(X, y)
    frames = [table, table.to_pandas()]
    polars = pytest.importorskip("polars")
    frames.append(polars.from_arrow(table))
    expected = PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], random_state=5).fit(X, y).coef_
    for frame in frames:
        before = pa.total_allocated_bytes()
        seen = scan(frame, target="y")
        if frame is table:
            assert pa.total_allocated_bytes() == before
        found = PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], random_state=5).fit(seen)
        np.testing.assert_allclose(found.coef_, expected, rtol=1e-6)
    named = PrivateLogisticRegression(epsilon=4.0, classes=[0, 1], random_state=5).fit(frames[2], "y")
    np.testing.assert_allclose(named.coef_, expected, rtol=1e-6)


def test_any_file_system(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    X, y = rows()
    memory = fsspec.filesystem("memory")
    for k in range(2):
        with memory.open(f"/people/{k}.parquet", "wb") as out:
            pq.write_table(arrow(X[k::2], y[k::2]), out)
    try:
        for source in ("memory://people/*.parquet", "memory:///people"):
            seen = scan(source, target="y")
            assert seen.shape == (N, D)
            assert len(qg.objectives.Logistic().prepare(seen)) == N
    finally:
        memory.rm("/people", recursive=True)


def test_predictions_go_to_a_file(folder: Path, tmp_path: Path) -> None:
    X, _ = rows()
    model = PrivateLogisticRegression(epsilon=4.0, classes=[0, 1]).fit(scan(folder, target="y"))
    out = tmp_path / "out" / "predictions.parquet"
    assert model.predict_to(scan(folder, target="y"), out) == N
    del model.feature_names_in_
    written = pq.read_table(out)
    assert (written["prediction"].to_numpy() == model.predict(X)).all()
    np.testing.assert_allclose(written["probability_of_1"].to_numpy(), model.predict_proba(X)[:, 1], rtol=1e-6)
    assert out.stat().st_mode & 0o077 == 0


def test_a_ledger_knows_the_same_table_again(folder: Path, tmp_path: Path) -> None:
    """By its content: renamed files are the same people, a changed cell is another table."""
    ledger = tmp_path / "book" / "ledger.jsonl"
    options: dict[str, Any] = {"epsilon": 1.0, "classes": [0, 1]}
    ledger.parent.mkdir()
    PrivateLogisticRegression(ledger=ledger, account="a", **options).fit(scan(folder, target="y"))
    (folder / "part0.parquet").rename(folder / "zart.parquet")
    with pytest.warns(LedgerWarning, match="account"):
        PrivateLogisticRegression(ledger=ledger, account="b", **options).fit(scan(folder, target="y"))


def test_the_command_line_scans_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quietgrad.cli import main

    run = str(tmp_path / "run")
    words = ["--target", "y", "--epsilon", "2", "--out", run, "--quiet", "--evaluate-train"]
    assert main(["train", str(folder / "*.parquet"), *words]) == 0
    assert main(["resume", run]) == 0
    assert main(["predict", run, str(folder), "-o", str(tmp_path / "p.csv")]) == 0
    assert len((tmp_path / "p.csv").read_text().splitlines()) == N + 1
    book = str(tmp_path / "others.jsonl")  # the run's own ledger would know these people
    assert main(["evaluate", run, str(folder / "*.parquet"), "--epsilon", "1", "--ledger", book]) == 0
    assert qg.load(run).metrics["train_accuracy"] > 0.8
    capsys.readouterr()
    assert main(["plan", "--rows", "1e9", "--columns", "200", "--cluster", "64x8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["scan"]
    assert told["passes"] == 40
    assert told["reads"] == 6  # to check, for three looks at ranges and their offsets, and to keep the rows
    assert told["bytes_read"] == 6 * 10**9 * 201 * 4
    assert 0.0 < told["hours"] < told["processor_hours"]


_LIMITED = """
import resource, sys
import numpy as np
import quietgrad as qg
from quietgrad.estimators import PrivateLogisticRegression
import pyarrow.parquet, threadpoolctl, sklearn.utils.validation, scipy.special, quietgrad.data.scan_sources
from quietgrad.methods import whitened_gd
warm = pyarrow.table({"x": np.arange(9).astype(np.float32), "z": np.ones(9, np.float32), "y": np.arange(9) % 2})
PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], algorithm=qg.DPGD(steps=3)).fit(warm, "y")
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 600 * 2**20, now + 600 * 2**20))
table = qg.data.scan(sys.argv[1], target="y", memory=300)
model = PrivateLogisticRegression(epsilon=2.0, classes=[0, 1], algorithm=qg.DPGD(steps=3)).fit(table)
print(model.coef_.shape, table.passes)
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_folder_larger_than_the_memory_allowed(tmp_path: Path) -> None:
    """The table takes 0.8 GB unpacked, the process may grow by 0.6 GB of addresses, libraries' arenas too."""
    rng = np.random.default_rng(0)
    columns = {f"x{j}": rng.integers(0, 3, 100_000).astype(np.float32) for j in range(40)}
    block = pa.table({**columns, "y": (columns["x0"] > 1).astype(np.int8)})
    for k in range(4):
        with pq.ParquetWriter(tmp_path / f"{k}.parquet", block.schema) as out:
            for piece in range(13):
                other = pa.array(columns["x1"] + np.float32(13 * k + piece))  # no file is a copy of another
                out.write_table(block.set_column(1, "x1", other))
    unpacked = 4 * 13 * block.nbytes
    assert unpacked > 600 * 2**20
    env = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    env["MALLOC_ARENA_MAX"] = "2"  # arenas are addresses, not memory
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["(1,", "40)", "4"]
