"""Readers: each format round-trips on generated files, and every kind of bad file is refused without its values."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from scipy import sparse

from quietgrad.core.errors import DataError
from quietgrad.data import Categorical, Numeric, Schema, clip_rows, load, read_schema
from quietgrad.data.dataset import Dataset, encode_labels, hold_out, public_order
from quietgrad.data.file_formats import build_idx, parse_idx, parse_libsvm
from quietgrad.data.tables import parse_csv

ROWS = b"+1 1:0.5 3:-2e-1\n-1 2:1\n-1\n+1 3:4 # a comment\n"
SCHEMA = {
    "label": {"column": "rich", "classes": ["no", "yes"]},
    "columns": {
        "age": {"bounds": [0, 100]},
        "job": {"categories": ["clerk", "smith", "?"]},
        "gain": {"bounds": [0, 99], "log": True},
    },
}
CSV = b"id,age,job,gain,rich\n1,50,clerk,0,no\n2,200,?,99,yes\n3,25,smith,9,no\n"


def dense(data: Dataset) -> Any:
    return data.X if isinstance(data.X, np.ndarray) else data.X.toarray()


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".txt", bytes), (".txt.gz", gzip.compress), (".bz2", bz2.compress)],
)
def test_libsvm_files(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(pack(ROWS))
    data = load(path, n_features=4)
    assert sparse.isspmatrix_csr(data.X)
    np.testing.assert_array_equal(dense(data), [[0.5, 0, -0.2, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 4, 0]])
    assert data.y.tolist() == [1, 0, 0, 1]
    assert (data.task, data.classes, data.class_names) == ("binary", (0, 1), ("-1", "1"))
    assert load(path, dtype="float32").X.dtype == np.float32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 1:2\n-1 3:", "label index:value.*cut short"),
        (b"1 1:2 7\n", "label index:value"),
        (b"1 1:2:3 7\n", "label index:value"),
        (b"yes 1:2\n", "numbers"),
        (b"1 1:abc\n", "numbers"),
        (b"1,2 1:1\n", "numbers"),
        (b"1 0:1\n", "start at 1"),
        (b"1 2:1 1:1\n", "increase within the row"),
        (b"1 1:1\n1 5:1\n", "exceeds n_features=4"),
        (b"# nothing\n", "no rows"),
    ],
)
def test_libsvm_refuses(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_libsvm(text, 4)


def test_csv_with_schema(tmp_path: Path) -> None:
    (tmp_path / "people.csv").write_bytes(CSV)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    data = load(tmp_path / "people.csv", schema=tmp_path / "schema.json")
    expected = np.array([[0.5, 1, 0, 0, 0], [1, 0, 0, 1, 1], [0.25, 0, 1, 0, 0.5]])  # log(1+9)/log(1+99) = 1/2
    np.testing.assert_allclose(dense(data), expected, atol=1e-15)
    assert data.y.tolist() == [0, 1, 0]
    assert data.row_bound == pytest.approx(np.sqrt(3))
    assert data.feature_names == ("age", "job=clerk", "job=smith", "job=?", "gain")
    assert data.notes == ("columns left out: id",)


def test_features_do_not_depend_on_other_rows() -> None:
    # The point of a public schema: a record's features are a function of that record alone.
    schema = read_schema(SCHEMA)
    whole = dense(parse_csv(CSV, schema))
    header, *lines = CSV.splitlines()
    alone = dense(parse_csv(b"\n".join([header, lines[1], lines[2]]), schema))
    np.testing.assert_array_equal(alone, whole[1:])


def test_csv_without_schema_keeps_numbers_and_refuses_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"y;a;b\n0;1;2\n1;3;4\n"))
    data = load(path, label="y")
    np.testing.assert_array_equal(dense(data), [[1, 2], [3, 4]])
    assert data.row_bound is None
    with pytest.raises(DataError, match=r"'job'.*not numeric.*--schema schema.toml") as refused:
        parse_csv(CSV)
    assert "clerk" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CSV[:-8], "data row 3 has 3 fields, the header 5"),
        (CSV.replace(b"25", b""), "NaN or infinite"),
        (CSV.replace(b"25", b"inf"), "NaN or infinite"),
        (
            CSV.replace(b"25", b"secret-word"),
            "'age': not numeric in every row, though declared.*unreadable = \"gap\"",
        ),
        (CSV.replace(b"id,age", b"age,age"), "twice"),
        (CSV.replace(b"gain", b"loss"), "no column 'gain'"),
        (CSV.splitlines()[0], "no rows"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_csv_refuses(text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as refused:
        parse_csv(text, read_schema(SCHEMA), name="people.csv")
    assert "secret-word" not in str(refused.value)
    assert refused.value.__cause__ is None  # no chained error that quotes the value


def test_what_was_declared_is_not_refused_for_what_a_row_holds(tmp_path: Path) -> None:
    """One class, another label, another word: a refusal would tell that somebody has it."""
    usual = parse_csv(CSV, read_schema(SCHEMA))
    for old, new in ((b"yes", b"no"), (b",yes", b",secret-word"), (b"smith", b"secret-word")):
        (tmp_path / "people.csv").write_bytes(CSV.replace(old, new))
        data = load(tmp_path / "people.csv", schema=SCHEMA)
        assert (data.X.shape, data.classes) == (usual.X.shape, usual.classes)
        assert set(data.y.tolist()) <= {0, 1}
    assert encode_labels("t", np.array(["1", "x", "0"]), classes=(0, 1))[0].tolist() == [1, 0, 0]


def test_csv_without_a_header_is_refused() -> None:
    with pytest.raises(DataError, match="header line"):
        parse_csv(b"1,0\n2,1\n")


def test_schema_options() -> None:
    zero = Categorical(("a", "b")).encode("c", ["b", "z"])
    np.testing.assert_array_equal(zero, [[0, 1], [0, 0]])
    np.testing.assert_array_equal(Categorical(("a", "b"), drop_first=True).encode("c", ["a", "b"]), [[0], [1]])
    np.testing.assert_array_equal(Numeric((0, 4), fill=1).encode("c", ["", "2"]), [[0.25], [0.5]])
    schema = Schema({"a": Numeric((0, 1))}, "y", classes=("0", "1"), drop_incomplete=True)
    assert parse_csv(b"a,y\n,1\n1,0\n0,1\n", schema).n == 2
    target = Schema({"a": Numeric((0, 1))}, "y", label_bounds=(0, 5))
    data = parse_csv(b"a,y\n1,9\n0,1\n", target)
    assert (data.task, data.y.tolist(), data.label_bounds) == ("regression", [5, 1], (0, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": {}}, "empty"),
        ({"columns": {"age": {}}}, "needs `bounds`"),
        ({"columns": {"age": {"bounds": [1, 1]}}}, "low < high"),
        ({"columns": {"age": {"categories": ["a", "a"]}}}, "different"),
        ({"columns": {"rich": {"bounds": [0, 1]}}}, "also listed"),
        ({"label": {"column": "rich"}}, "either `classes`"),
        ({"label": {}}, "Expected"),
    ],
)
def test_schema_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_schema(SCHEMA | change)


def test_schema_file_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_schema(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_schema(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(DataError, match="JSON object"):
        read_schema(tmp_path / "list.json")


def test_npz(tmp_path: Path) -> None:
    X = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], np.float32)
    y = np.array([-1, 1, 1])
    np.savez(tmp_path / "d.npz", X=X, y=y, X_test=X[:1], y_test=y[:1])
    data = load(tmp_path / "d.npz")
    np.testing.assert_array_equal(dense(data), X)
    assert data.X.dtype == np.float32
    assert data.y_test is not None
    assert data.y_test.tolist() == [0]


def test_npz_refuses(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, X=np.eye(2), y=np.array([0, 1]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="not a readable npz"):
        load(path)
    np.savez(path, X=np.array([{}], dtype=object), y=np.array([0]))
    with pytest.raises(DataError, match="pickled"):
        load(path)
    arrays: dict[str, Any]
    for arrays, message in (
        ({"X": np.eye(2)}, "no array 'y'"),
        ({"X": np.eye(2), "y": np.array([0, 1, 1])}, "2 rows, labels have shape"),
        ({"X": np.full((2, 1), np.inf), "y": np.array([0, 1])}, "NaN or infinite"),
        ({"X": np.empty((2, 0)), "y": np.array([0, 1])}, "at least one row and column"),
        ({"X": np.array([["a"], ["b"]]), "y": np.array([0, 1])}, "must be numbers"),
        ({"X": np.eye(2), "y": np.array([0, 1]), "X_test": np.eye(3), "y_test": np.array([0, 1, 1])}, "test rows"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(DataError, match=message):
            load(path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "people.parquet"
    columns = {
        "age": [50.0, 200.0, 25.0],
        "job": ["clerk", "?", "smith"],
        "gain": [0, 99, 9],
        "rich": ["no", "yes", "no"],
    }
    parquet.write_table(pa.table(columns), path)
    np.testing.assert_array_equal(dense(load(path, schema=SCHEMA)), dense(parse_csv(CSV, read_schema(SCHEMA))))
    parquet.write_table(pa.table(columns | {"age": [None, 1.0, 2.0]}), path)
    with pytest.raises(DataError, match="NaN or infinite"):
        load(path, schema=SCHEMA)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="not a readable parquet"):
        load(path, schema=SCHEMA)


def test_idx_round_trip_and_refusals() -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    np.testing.assert_array_equal(parse_idx(build_idx(array)), array)
    with pytest.raises(DataError, match="cut short"):
        parse_idx(build_idx(array)[:-1])
    with pytest.raises(DataError, match="not an idx"):
        parse_idx(b"\x00\x00\x0d\x01")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    for content in (b"", b"\n \n", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(DataError, match="empty"):
            load(path)
    with pytest.raises(DataError, match="no such file"):
        load(tmp_path / "absent.csv")
    (tmp_path / "rows.doc").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unknown kind of file '\.doc'"):
        load(tmp_path / "rows.doc")


def test_labels() -> None:
    assert encode_labels("t", np.array(["b", "a"]), classes=("a", "b", "c"))[:2][1] == "multiclass"
    assert encode_labels("t", np.array([3.0, 1.0]), classes=(1, 3))[0].tolist() == [1, 0]
    assert encode_labels("t", np.array([0.5]), task="regression")[1] == "regression"
    for raw, given_, message in (
        ([1, 2], {}, "neither 0/1 nor -1/\\+1"),
        (["no", "yes"], {}, "not numbers"),
        ([0, 1], {"classes": (0, 0)}, "different labels"),
        ([0, 1], {"classes": (0, 1, 2), "task": "binary"}, "use task='multiclass'"),
        ([np.nan, 1], {}, "NaN"),
    ):
        with pytest.raises(DataError, match=message):
            encode_labels("t", np.array(raw), **given_)


def test_test_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"1 1:1 3:1\n-1 2:1\n")
    (tmp_path / "b.txt").write_bytes(b"-1 1:1\n1 1:2\n")
    data = load(tmp_path / "a.txt", test=tmp_path / "b.txt")
    assert data.X_test is not None
    assert data.y_test is not None
    assert data.X_test.shape == (2, 3)
    assert data.y_test.tolist() == [0, 1]
    (tmp_path / "b.txt").write_bytes(b"-1 4:1\n1 1:2\n")
    with pytest.raises(DataError, match="exceeds n_features=3"):
        load(tmp_path / "a.txt", test=tmp_path / "b.txt")
    with pytest.raises(DataError, match="no such test file"):
        load(tmp_path / "a.txt", test=tmp_path / "c.txt")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_clip_rows_dense_equals_sparse(seed: int, bound: float) -> None:
    rng = np.random.default_rng(seed)
    X = np.where(rng.random((6, 4)) < 0.4, rng.normal(size=(6, 4)), 0.0)
    clipped = np.asarray(clip_rows(X, bound))
    norms = np.linalg.norm(X, axis=1)
    assert (np.linalg.norm(clipped, axis=1) <= bound * (1 + 1e-12)).all()
    np.testing.assert_allclose(clipped[norms <= bound], X[norms <= bound])
    from_sparse: Any = clip_rows(sparse.csr_matrix(X), bound)
    np.testing.assert_allclose(from_sparse.toarray(), clipped, atol=1e-15)


def test_public_split_depends_on_n_only() -> None:
    # Pinned: a change here would silently move people between training and test sets.
    assert public_order(6).tolist() == PINNED_ORDER
    toy = Dataset("toy", np.arange(20.0)[:, None], np.arange(20) % 2, classes=(0, 1))
    parts = hold_out(toy, 0.25)
    assert parts.X_test is not None
    assert parts.X_test.shape[0] == 5
    both = np.concatenate([dense(parts).ravel(), np.asarray(parts.X_test).ravel()])
    assert sorted(both.tolist()) == list(range(20))


PINNED_ORDER = [5, 2, 1, 0, 4, 3]


def test_spaces_before_quotes_and_around_gaps_change_no_cell() -> None:
    """One person written in two ways is one person; a number that means a gap means it with spaces, too."""
    text = b'x,p,y\n1,"7",1\n2, "7",1\n3,"a, ""b""",0\n4,  "a, ""b""",0\n'
    people = parse_csv(text, person="p").person
    assert people is not None
    assert people.tolist() == ["7", "7", 'a, "b"', 'a, "b"']
    schema = Schema({"x": Numeric((0, 10), indicator=True)}, "y", classes=("0", "1"), missing=("-999",))
    rows = np.asarray(parse_csv(b"x,y\n-999,0\n -999 ,1\n5,1\n", schema).X)
    assert rows[0].tolist() == rows[1].tolist() != rows[2].tolist()
    job = Schema(
        {"x": Numeric((0, 10), indicator=True), "job": Categorical(("a", "b"))}, "y", classes=("no", "yes")
    )
    text = b'x, job, y\n NA , "a", no\n5, "b", yes\n'  # by the csv module, with a header of the same kind
    assert np.asarray(parse_csv(text, job).X).tolist() == [[0, 1, 1, 0], [0.5, 0, 0, 1]]


def test_a_gap_of_the_only_column_is_no_line_less() -> None:
    with pytest.raises(DataError):
        parse_csv(b"a\n1\n\n3\n", labelled=False)
