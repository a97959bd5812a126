"""The cache of boxed rows: the same numbers wherever they lie, nothing readable on the disk, the same sums."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import ChangedError, DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.data import scan
from quietgrad.estimators import PrivateLogisticRegression
from quietgrad.tables.losses import Logistic
from quietgrad.tables.range_queries import BoxedQuery, FeatureBox
from quietgrad.tables.row_cache import RowCache
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import (
    CentredMoments,
    CentredNormHistogram,
    SecondMomentMatrix,
    WhitenedGradient,
    Whitening,
)

RNG = np.random.default_rng(0)
X = RNG.standard_normal((70_000, 4)) * [1.0, 5.0, 0.1, 1.0] + [0.0, 2000.0, 0.0, 1.0]
Y = (X[:, 0] + RNG.standard_normal(len(X)) > 0).astype(np.int64)


def kept(cache: RowCache, key: object, blocks: list[Any]) -> None:
    writer = cache.writer(key)
    for block in blocks:
        writer.add(block)
    writer.done()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # pytest's threads do nothing here
def test_a_forked_process_reads_and_writes_nothing() -> None:
    """Parent and child would write to the same places, under the same key stream."""
    cache = RowCache(memory=0)
    kept(cache, "before", [(np.arange(4.0),)])
    child = os.fork()
    if not child:
        status = 1
        try:
            kept(cache, "child", [(np.full(4, 7.0),)])
            (block,) = next(cache.get("before"))
            status = 0 if "child" not in cache and block.tolist() == [0.0, 1.0, 2.0, 3.0] else 2
        finally:
            os._exit(status)
    kept(cache, "parent", [(np.full(4, 5.0),)])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(cache.get("parent"))[0].tolist() == [5.0] * 4


@pytest.mark.parametrize("memory", [0, 100, 10**6])
def test_blocks_come_back_as_they_were(memory: int) -> None:
    cache = RowCache(memory)
    blocks: list[Any] = [
        (RNG.standard_normal((3, 5)).astype(np.float32), np.arange(5)),
        (np.zeros((3, 0)), np.ones(1)),
    ]
    kept(cache, "a", blocks)
    kept(cache, "b", blocks[:1])
    assert "c" not in cache
    for key, expected in (("a", blocks), ("b", blocks[:1])):
        found = [tuple(np.array(part) for part in block) for block in cache.get(key)]
        assert len(found) == len(expected)
        for got, given in zip(found, expected, strict=True):
            for one, other in zip(got, given, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)


def test_the_file_has_no_name_and_holds_nothing_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache = RowCache(0)
    rows = np.full((64, 64), 1234.5)
    kept(cache, "a", [(rows,)])
    kept(cache, "b", [(rows,)])
    assert not list(tmp_path.iterdir())
    assert cache._file is not None
    content = os.pread(cache._file, 1 << 20, 0)
    assert rows[:1, :2].tobytes() not in content
    assert content[: rows.nbytes] != content[rows.nbytes : 2 * rows.nbytes]  # equal rows, other places
    with pytest.raises(TypeError, match="process"):
        pickle.dumps(cache)


def test_a_full_disk_keeps_nothing_of_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    cache = RowCache(0)
    kept(cache, "a", [(np.ones(3),)])
    assert "a" not in cache


def written(folder: Path) -> Path:
    table = pa.table({**{f"x{j}": X[:, j] for j in range(4)}, "y": Y})
    pq.write_table(table, folder / "rows.parquet", row_group_size=20_000)
    return folder / "rows.parquet"


class Uncached:
    """A source that never has room."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def row_cache(self) -> None:
        return None


FRAME = FeatureBox(np.array([-3.0, 1985.0, -0.3, -2.0]), np.array([3.0, 2015.0, 0.3, 4.0]))
MIX = RNG.standard_normal((4, 4))
WHITENING = Whitening(Affine(np.array([0.1, 0.0, -0.1, 0.0]), MIX @ MIX.T), 1.0, 1, 2.0)


def sums(records: Any, count: int = 3) -> list[Any]:
    found = []
    for k in range(count):
        for query in (
            WhitenedGradient(0.1 * (k + 1.0) * np.arange(5.0), 0.5, WHITENING),
            SecondMomentMatrix(1.5, Relation.ADD_REMOVE),
            CentredMoments(1.5, Relation.ADD_REMOVE, np.full(4, 0.2)),
            CentredNormHistogram(Relation.ADD_REMOVE, np.full(4, 0.2), 4.0),
        ):
            boxed = BoxedQuery(query, FRAME)
            out = np.zeros(boxed.dim(records))
            records.answer(boxed, Batch(records, None), out)
            found.append(out)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("spare", [0, 10**9])
def test_sums_are_bit_for_bit_those_without_a_cache(threads: int, spare: int, tmp_path: Path) -> None:
    source = scan(written(tmp_path), target="y", classes=[0, 1], threads=threads)
    loss = Logistic(intercept=True)
    cached = loss.prepare(replace(source, spare=spare))
    plain = loss.prepare(source)
    plain.source = Uncached(source)  # type: ignore[attr-defined]
    for one, other in zip(sums(cached), sums(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_record_moves_a_cached_sum_by_no_more_than_its_clip(tmp_path: Path) -> None:
    """Rows whose boxed numbers are no float32, and far outside of the box: each alone is within the clip."""
    rows = np.array([[1e300, 1e-300, 0.1 + 1e-9, -1e12], [1 / 3, 2000.123456789, 1e-7, 0.7], [-1e9] * 4])
    loss = Logistic(intercept=True)
    for place, row in enumerate(rows):
        table = pa.table({**{f"x{j}": [row[j]] for j in range(4)}, "y": [1]})
        pq.write_table(table, tmp_path / f"{place}.parquet")
        records: Any = loss.prepare(scan(tmp_path / f"{place}.parquet", target="y", classes=[0, 1]))
        for clip in (1e-3, 0.5):
            query = BoxedQuery(WhitenedGradient(50.0 * np.arange(-2.0, 3.0), clip, WHITENING), FRAME)
            for _ in range(2):  # read, then cached
                out = np.zeros(5)
                records.answer(query, Batch(records, None), out)
                assert np.linalg.norm(out) <= clip
                query = BoxedQuery(query.query, FRAME)


@pytest.mark.parametrize("order", [["none", "some"], ["some", "none", "more"]])
def test_a_file_without_rows_shares_no_place_with_another(order: list[str], tmp_path: Path) -> None:
    """It begins at the row at which the next one does: rows were lost, or, by two threads, counted twice."""
    head = "x0,x1,x2,x3,y\n"
    lines = [",".join(f"{cell:.6g}" for cell in row) + f",{label}\n" for row, label in zip(X, Y, strict=True)]
    for name, rows in (("none", []), ("some", lines[:200]), ("more", lines[200:300])):
        (tmp_path / f"{name}.csv").write_text(head + "".join(rows))
    source = scan([tmp_path / f"{name}.csv" for name in order], target="y", classes=[0, 1], threads=1)
    loss = Logistic(intercept=True)
    plain = loss.prepare(source)
    plain.source = Uncached(source)  # type: ignore[attr-defined]
    for one, other in zip(sums(loss.prepare(source)), sums(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_that_changes_after_its_rows_are_cached_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    records: Any = Logistic(intercept=True).prepare(scan(path, target="y", classes=[0, 1]))
    sums(records, 1)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ChangedError):
        sums(records, 1)


def test_a_fit_reads_its_files_a_few_times_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from quietgrad.data.scan_sources import FilePartition

    reads = []
    batches = FilePartition.batches

    def counted(self: FilePartition, columns: Any, rows: int) -> Any:
        reads.append(self.groups)
        return batches(self, columns, rows)

    monkeypatch.setattr(FilePartition, "batches", counted)
    source = scan(written(tmp_path), target="y", classes=[0, 1])
    PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(source)
    assert len(reads) <= 9 * len(source.pieces)  # 37 passes and more without a cache


def test_an_altered_scratch_file_is_not_summed() -> None:
    cache = RowCache(memory=0)
    kept(cache, "piece", [(np.arange(4.0),), (np.arange(5.0),)])
    assert cache._file is not None
    os.pwrite(cache._file, b"\x00\x01", 3)
    blocks = cache.get("piece")
    with pytest.raises(DataError, match="scratch file"):
        next(blocks)
    os.ftruncate(cache._file, 16)
    with pytest.raises(DataError, match="scratch file"):
        list(RowCache.get(cache, "piece"))


def test_empty_blocks_have_nonces_of_their_own() -> None:
    cache = RowCache(memory=0)
    kept(cache, "piece", [(np.zeros(0),), (np.arange(3.0),), (np.zeros((0, 2), dtype=np.float32),)])
    places: Any = cache._blocks["piece"]
    assert len({place.offset for place in places} if hasattr(places[0], "offset") else {1, 2, 3}) == 3
    assert [block[0].tolist() for block in cache.get("piece")] == [[], [0.0, 1.0, 2.0], []]
