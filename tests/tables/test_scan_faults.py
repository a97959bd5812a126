"""Bad files and faults: one clear sentence each, nothing spent twice, nothing lost."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import ChangedError, DataError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.data.scanning import scan
from quietgrad.estimators import PrivateAdditiveClassifier, PrivateLogisticRegression, PrivateSearch
from quietgrad.tables.scanned import is_additive

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are stopped here leave keys behind, which are nobody else's affair."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


SECRET = "jane-doe-4711"


def table(n: int = 3000, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, 3))
    return pa.table({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": (X[:, 0] > 0).astype(np.int64)})


def spent(ledger: Path) -> float:
    """What the account's entries prove to cost together."""
    return Ledger(ledger).spent("default", delta=1e-5, relation="add-remove").epsilon


def refused(what: Any, words: str, ledger: Path, **options: Any) -> None:
    """The fit is refused with these words, quotes no cell, and leaves no entry."""
    with pytest.raises((DataError, ValueError), match=words) as caught:
        PrivateLogisticRegression(classes=[0, 1], ledger=ledger).fit(scan(what, target="y", **options))
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert not ledger.exists() or not Ledger(ledger).entries()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    ledger, where = tmp_path / "ledger.jsonl", tmp_path / "people"
    where.mkdir()
    good, bad = where / "a.parquet", where / "b.parquet"
    pq.write_table(table(), good, row_group_size=500)
    bad.write_bytes(good.read_bytes()[:-2000])
    refused(where, "cut short", ledger)
    bad.write_bytes(b"")
    refused(where, "cut short", ledger)
    pq.write_table(table().set_column(1, "b", pa.array([SECRET] * 3000)), bad)
    refused(where, "b.parquet: column 'b' is string", ledger)
    pq.write_table(table().set_column(1, "b", pa.array(np.zeros(3000, np.float32))), bad)
    refused(where, "column 'b' is float", ledger)
    pq.write_table(table().drop_columns(["c"]), bad)
    refused(where, "no column 'c'", ledger)
    gap = table().set_column(1, "b", pa.array([None, *np.zeros(2999)]))
    pq.write_table(gap, bad)
    refused(where, "gaps, NaN or infinite", ledger)
    pq.write_table(table().set_column(1, "b", pa.array([np.inf, *np.zeros(2999)])), bad)
    refused(where, "gaps, NaN or infinite", ledger)
    pq.write_table(table().set_column(3, "y", pa.array([None, *np.zeros(2999, int)], pa.int64())), bad)
    refused(where, "target 'y' has missing", ledger)
    pq.write_table(table().set_column(3, "y", pa.array([np.nan, *np.zeros(2999)])), bad)
    pq.write_table(table().set_column(3, "y", pa.array(np.zeros(3000))), good)
    refused(where, "target holds NaN", ledger)
    pq.write_table(table(0), bad)
    good.unlink()
    refused(where, "no rows", ledger)
    bad.unlink()
    refused(where, "no table files", ledger)
    refused(where / "none.parquet", "no such file", ledger)
    refused(where, "needs about|no table files", ledger, memory=1)


def test_text_that_cannot_be_used(tmp_path: Path) -> None:
    ledger, where = tmp_path / "ledger.jsonl", tmp_path / "people.csv"
    lines = ["a,b,y", *(f"{k / 100},1.5,{k % 2}" for k in range(4000))]

    def written(*lines: str) -> Path:
        where.write_text("\n".join(lines) + "\n")
        return where

    assert len(scan(written(*lines), target="y")) == 4000
    refused(written(*lines, f"1,{SECRET},0"), "not numeric", ledger)
    refused(written(*lines, "1,2"), "data row 4001 has 2 fields", ledger)
    refused(written(*lines, "1,,0"), "gaps, NaN", ledger)
    refused(written(*lines, "1,2,3,4"), "4 fields", ledger)
    packed = tmp_path / "people.csv.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode())[:-200])
    refused(packed, "cannot be read as csv", ledger)
    schema = {
        "label": {"column": "y", "classes": ["0", "1"]},
        "columns": {"a": {"bounds": [0, 40]}, "b": {"categories": ["1.5", "2"]}},
    }
    model = PrivateLogisticRegression().fit(scan(written(*lines, f"1,{SECRET},0"), schema=schema))
    assert SECRET not in str(vars(model))


@pytest.mark.parametrize("way", ["append", "replace", "same size and time", "gone"])
def test_a_file_that_changes_between_passes(tmp_path: Path, way: str) -> None:
    """The run stops where it meets the change; what it had released stays charged."""
    ledger, path = tmp_path / "ledger.jsonl", tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=500)
    before = path.stat()

    def change(progress: qg.Progress) -> None:
        if progress.step != 3:
            return
        if way == "append":
            with path.open("ab") as file:
                file.write(b"x")
        elif way == "gone":
            path.unlink()
        else:
            other = tmp_path / "other.parquet"
            pq.write_table(table(seed=0 if way == "replace" else 1), other, row_group_size=500)
            content = other.read_bytes()
            if way == "replace":
                other.replace(path)
            else:
                path.write_bytes(content[: before.st_size].ljust(before.st_size, b"\0"))
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    loss, method = qg.objectives.Logistic(), qg.DPGD(steps=6)
    with pytest.raises(ChangedError, match=r"a\.parquet: the file changed"):
        qg.minimize(
            loss, scan(path, target="y"), method, budget=qg.Budget(1.0, 1e-5), ledger=ledger,
            folder=tmp_path / "run", callback=change, checkpoint_seconds=0.0,
        )  # fmt: skip
    assert spent(ledger) == pytest.approx(1.0, rel=0.01)
    if way == "append":  # put back, the run goes on and nothing more is charged
        with path.open("rb+") as file:
            file.truncate(before.st_size)
        result = qg.resume(loss, scan(path, target="y"), method, folder=tmp_path / "run", ledger=ledger)
        assert result.privacy.epsilon == pytest.approx(1.0, rel=0.01)
        assert spent(ledger) == pytest.approx(1.0, rel=0.01)


_RUN = """
import sys, time
import quietgrad as qg
table = qg.data.scan(sys.argv[1], target="y")
def slow(progress):
    print(progress.step, flush=True)
    time.sleep(0.3 if progress.step > 3 else 0.0)
qg.minimize(qg.objectives.Logistic(), table, qg.DPGD(steps=8), budget=qg.Budget(1.0, 1e-5),
            ledger=sys.argv[2], folder=sys.argv[3], callback=slow, checkpoint_seconds=0.0)
"""


def test_a_killed_client_resumes_bit_for_bit(tmp_path: Path) -> None:
    """kill −9 in the middle: the resumed run, with another number of threads, is charged once and replays."""
    path = tmp_path / "a.parquet"
    pq.write_table(table(100_000), path, row_group_size=10_000)
    env = {**os.environ, "PYTHONPATH": "src"}
    ledger, folder = tmp_path / "ledger.jsonl", tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", _RUN, str(path), str(ledger), str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == "5":
            child.send_signal(signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    again = scan(path, target="y", threads=3)
    result = qg.resume(qg.objectives.Logistic(), again, qg.DPGD(steps=8), folder=folder, ledger=ledger)
    assert result.privacy.releases == {"count": 1, "gradient": 8}
    kinds = [json.loads(line)["kind"] for line in ledger.read_text().splitlines()]
    assert kinds.count("reserve") == 2  # the count, and the run, once each
    assert spent(ledger) == pytest.approx(1.0, rel=0.01)


class _Reads:
    """A query of somebody's own that nobody knows to be a sum over records."""

    bound = 1.0

    def sum_into(self, objective: Any, batch: Batch, out: Any) -> None:
        out += np.median(batch.records.X)


class _Derived(GradientQuery):
    """A known query that was changed: what it sums to by parts is not known."""


def test_what_a_scan_is_not_for(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet")
    seen = scan(tmp_path, target="y")
    with pytest.raises(ValueError, match="a scan has its own target"):
        PrivateLogisticRegression(classes=[0, 1]).fit(seen, np.zeros(3000))
    schema = {"label": {"column": "y", "classes": ["0", "1"]}, "columns": {"a": {"bounds": [0, 1]}}}
    with pytest.raises(ValueError, match="the schema says them already"):
        scan(tmp_path, schema=schema, columns=["a"])
    with pytest.raises(DataError, match="takes paths"):
        scan(17)
    with pytest.raises(DataError, match="needs the table in memory"):
        PrivateSearch(PrivateLogisticRegression(classes=[0, 1]), {"regularization": [0.0]}).fit(
            seen, np.zeros(3000)
        )
    with pytest.raises(DataError, match="in its schema"):
        PrivateAdditiveClassifier(categories={"a": [0, 1]}).fit(seen)
    loss = qg.objectives.Logistic()
    records: Any = loss.prepare(seen)
    with pytest.raises(DataError, match="needs the table in memory"):
        records.answer(_Reads(), Batch(records, None), np.zeros(1))
    assert not is_additive(_Reads())
    assert not is_additive(_Derived(np.zeros(3), 1.0))
    with pytest.raises(DataError, match="samples its own records"):
        qg.minimize(
            qg.objectives.landscape("strict-saddle", d=4), seen, qg.PerturbedSGD(), budget=qg.Budget(1.0, 1e-5)
        )


def test_a_record_of_a_folder_counts_once(tmp_path: Path) -> None:
    """Copies that engines and editors leave, other names of one file and other spellings of a path add no rows."""
    import fsspec

    rows = pa.table({"x": [0.0, 1.0, 2.0], "y": [0, 1, 0]})
    folder = tmp_path / "people"
    for name in ("year=2020/a.parquet", "_temporary/0/a.parquet", ".snapshot/a.parquet", "_a.parquet"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, folder / name)
    one = folder / "year=2020" / "a.parquet"
    os.link(one, folder / "z.parquet")
    (folder / "s.parquet").symlink_to(one)
    spelt = [
        str(folder),
        str(one),
        f"{folder}//year=2020/a.parquet",
        f"{folder}/./z.parquet",
        f"{folder}/*.parquet",
    ]
    for sources in (str(folder), f"file://{folder}", spelt[:-1]):
        assert len(scan(sources, target="y")) == 3
    memory = fsspec.filesystem("memory")
    for name in ("year=2020/a.parquet", "_temporary/0/a.parquet", ".snapshot/a.parquet"):
        with memory.open(f"/counted/people/{name}", "wb") as file:
            pq.write_table(rows, file)
    assert len(scan("memory:///counted/people", target="y")) == 3
    memory.rm("/counted", recursive=True)


def test_files_in_another_order_are_other_places(tmp_path: Path) -> None:
    """A ledger knows the table by its rows in any order; a single pass, which goes by place, must not."""
    loss: Any = qg.objectives.Logistic()
    for k in range(2):
        pq.write_table(table(50 + k), tmp_path / f"{k}.parquet")
    before = loss.prepare(scan(tmp_path, target="y"))
    (tmp_path / "0.parquet").rename(tmp_path / "9.parquet")
    after = loss.prepare(scan(tmp_path, target="y"))
    assert list(before.fingerprint_parts()) == list(after.fingerprint_parts())
    assert list(before.contents()) != list(after.contents())
