"""People in scans: rows sorted by person, summed as the table in memory sums them, wherever the files are cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.cli import main
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.errors import ChangedError, DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery, LossQuery
from quietgrad.estimators import PrivateLogisticRegression, private_score
from quietgrad.tables.privacy_units import PersonRule, with_privacy_unit
from quietgrad.tables.queries.counts import LabelCounts, LabelSet
from quietgrad.tables.whitening import FeatureMean

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

KEY = b"k" * 32
LOSS = qg.objectives.Logistic(intercept=True)


@pytest.fixture(scope="module")
def table() -> tuple[Any, Any, Any]:
    """600 rows of about 150 people, sorted; one of them has 80 rows, over five files."""
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 160, 600))
    ids[200:280] = ids[200]
    X = rng.normal(size=(600, 3))
    return np.sort(ids), X, (X[:, 0] > 0).astype(float)


CUTS = (0, 37, 190, 220, 240, 260, 430, 600)


def write(folder: Path, ids: Any, X: Any, y: Any, cuts: Any = CUTS, group: int = 25) -> Path:
    folder.mkdir(exist_ok=True)
    for k, (a, b) in enumerate(pairwise(cuts)):
        features = {f"x{j}": X[a:b, j] for j in range(X.shape[1])}
        pq.write_table(
            pa.table({"id": ids[a:b], **features, "y": y[a:b]}), folder / f"{k}.parquet", row_group_size=25
        )
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row group a piece of its own, read seven rows at a time: people are cut everywhere."""
    monkeypatch.setattr("quietgrad.data.scan_sources.LEAST_ROWS", 1)


@pytest.mark.parametrize(("combine", "most"), [("mean", None), ("sum", None), ("mean", 2), ("sum", 3)])
def test_a_scan_sums_people_as_the_table_in_memory(
    tmp_path: Path, table: Any, small: None, combine: Any, most: Any
) -> None:
    from dataclasses import replace

    ids, X, y = table
    people = qg.data.scan(write(tmp_path / "p", ids, X, y), target="y", person="id", threads=2)
    people = replace(people, rows_at_once=90)
    there, scanned = with_privacy_unit(LOSS, people, None, PersonRule(combine, most))
    here, held = with_privacy_unit(LOSS, (X, y), ids, PersonRule(combine, most))
    scanned, held = there.prepare(scanned), here.prepare(held)
    assert len(scanned) == len(held) == len(np.unique(ids))
    queries: list[Any] = [GradientQuery(np.full(4, 0.3), 0.5), LossQuery(np.full(4, 0.3), 1.0)]
    if (combine, most) == ("mean", None):
        queries.append(FeatureMean(1.0))
    some = np.array([0, 3, 40, 41, 42, 43, len(held) - 1])
    for query in queries:
        for indices in (None, some):
            found, wanted = np.zeros(query.dim(held)), np.zeros(query.dim(held))
            scanned.answer(query, Batch(scanned, indices, KEY), found)
            query.sum_into(here, Batch(held, indices, KEY), wanted)
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    if most is None:
        at = np.full(4, 0.3)
        assert there.risk(scanned, at) == pytest.approx(here.risk(held, at), rel=1e-9)


def test_whole_runs_and_labels_are_those_in_memory(tmp_path: Path, table: Any, small: None) -> None:
    ids, X, y = table
    people = qg.data.scan(write(tmp_path / "p", ids, X, y), target="y", person="id")
    method = qg.DPGD(steps=4, learning_rate=1.0)
    scanned = qg.minimize(LOSS, people, method, budget=None, seed=3)
    held = qg.minimize(LOSS, (X, y), method, budget=None, seed=3, person=ids)
    np.testing.assert_allclose(scanned.params, held.params, rtol=1e-9)
    query = LabelCounts(Relation.ADD_REMOVE)
    there, labelled = with_privacy_unit(LabelSet(), people, None)
    here, in_memory = with_privacy_unit(LabelSet(), (X, y), ids)
    labelled, in_memory = there.prepare(labelled), here.prepare(in_memory)
    found = query.count(Batch(labelled, None, KEY))
    wanted = query.count(Batch(in_memory, None, KEY))
    assert [a.tolist() for a in found] == [a.tolist() for a in wanted]
    assert sum(found[1]) == len(np.unique(ids))  # one count each, however many rows


def test_one_person_moves_a_sum_by_no_more_than_the_clip(tmp_path: Path, table: Any, small: None) -> None:
    """The person with rows in five files, each pulling the same way: clipped once, not once in every file."""
    ids, X, y = table
    X = X.copy()
    X[ids == ids[200]] = 50.0
    people = qg.data.scan(write(tmp_path / "p", ids, X, y), target="y", person="id", threads=2)
    kept = ids != ids[200]
    others = qg.data.scan(
        write(tmp_path / "o", ids[kept], X[kept], y[kept], (0, 300, kept.sum())), target="y", person="id"
    )
    query, sums = GradientQuery(np.zeros(4), 0.5), []
    for scan in (people, others):
        objective, data = with_privacy_unit(LOSS, scan, None, PersonRule("sum"))
        records = objective.prepare(data)
        out = np.zeros(4)
        records.answer(query, Batch(records, None, KEY), out)
        sums.append(out)
    assert np.linalg.norm(sums[0] - sums[1]) <= 0.5 * (1 + 1e-9)


def test_estimators_promise_to_the_people_of_a_scan(tmp_path: Path, table: Any) -> None:
    ids, X, y = table
    folder = write(tmp_path / "p", ids, X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = qg.data.scan(folder, target="y", person="id")
        model = PrivateLogisticRegression(epsilon=3.0, classes=[0, 1]).fit(named)
        score = private_score(model, named, epsilon=2.0)
    assert model.privacy_.unit == "person"
    assert list(model.feature_names_in_) == ["x0", "x1", "x2"]
    with pytest.raises(DataError, match="where the scan is made"):
        PrivateLogisticRegression(classes=[0, 1]).fit(qg.data.scan(folder, target="y"), person="id")
    assert score.privacy.unit == "person"
    with pytest.raises(DataError, match="made with a person column"):  # never by row, once people are named
        LOSS.prepare(named)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids: np.concatenate([ids[:-1], ids[:1]]),  # somebody comes again at the very end
        lambda ids: np.concatenate([ids[220:], ids[:220]]),  # sorted within files, not over them
    ],
)
def test_rows_that_are_not_sorted_are_refused_before_anything_is_spent(
    tmp_path: Path, table: Any, spoil: Any
) -> None:
    ids, X, y = table
    people = qg.data.scan(write(tmp_path / "p", spoil(ids), X, y), target="y", person="id")
    with pytest.raises(DataError, match="must be sorted") as refusal:
        PrivateLogisticRegression(epsilon=1.0, classes=[0, 1], ledger=tmp_path / "book.jsonl").fit(people)
    assert not any(str(id) in str(refusal.value) for id in ids[:5])
    assert not (tmp_path / "book.jsonl").exists()


def test_ids_in_another_order_within_a_run_stop_it(tmp_path: Path, table: Any, monkeypatch: Any) -> None:
    """The order is looked at in every pass, also where a file looks as it did."""
    ids, X, y = table
    people = qg.data.scan(write(tmp_path / "p", ids, X, y), target="y", person="id", threads=1)
    objective, data = with_privacy_unit(LOSS, people, None)
    records = objective.prepare(data)
    monkeypatch.setattr("quietgrad.data.scan_sources.FilePartition.check", lambda unit: None)
    monkeypatch.setattr("quietgrad.data.scan_sources._FOOTERS", {})
    query = GradientQuery(np.zeros(4), 0.5)
    moved = ids.copy()
    moved[200:280] = np.arange(200, 280)  # the one with 80 rows is now 80 people
    write(tmp_path / "p", np.sort(moved), X, y)
    with pytest.raises((ChangedError, DataError), match=r"first reading|must be sorted"):
        records.answer(query, Batch(records, None, KEY), np.zeros(4))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, None, 3, 4, 5, 6, 7, 8, 9], "has no id"),
        (["a", "b", "b ", "c", "d", "e", "f", "g", "h", "i"], "spaces around"),
        ([0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9], "fractions"),
        ([True, True, False, True, True, True, True, True, True, True], "whole numbers"),
    ],
)
def test_ids_that_are_nobodys_are_refused(ids: Any, message: str) -> None:
    rows = pa.table({"id": ids, "x": np.arange(10.0), "y": [0, 1] * 5})
    with pytest.raises(DataError, match=message):
        qg.data.scan(rows, target="y", person="id").people  # noqa: B018


def test_ids_are_sorted_as_numbers_or_as_texts() -> None:
    for ids in (["1", "2", "10", "11"], ["1", "10", "11", "2"], [b"a", b"b", b"c", b"d"], [1, 2, 10, 11]):
        rows = pa.table({"id": ids, "x": np.arange(4.0), "y": [0, 1] * 2})
        assert qg.data.scan(rows, target="y", person="id").people == 4
    rows = pa.table({"id": ["1", "10", "2", "11"], "x": np.arange(4.0), "y": [0, 1] * 2})
    with pytest.raises(DataError, match="must be sorted"):
        qg.data.scan(rows, target="y", person="id").people  # noqa: B018


def test_csv_files_and_left_out_rows_keep_people_together(tmp_path: Path, table: Any) -> None:
    ids, X, y = table
    schema = {
        "label": {"column": "y", "classes": ["0", "1"]}, "drop_incomplete": True,
        "columns": {f"x{j}": {"bounds": [-4.0, 4.0]} for j in range(3)},
    }  # fmt: skip
    firsts = ["" if k % 7 == 0 else str(value) for k, value in enumerate(X[:, 0])]
    lines = [f"{i},{a},{x[1]},{x[2]},{int(t)}" for i, a, x, t in zip(ids, firsts, X, y, strict=True)]
    for k, (a, b) in enumerate(((0, 230), (230, 600))):
        (tmp_path / f"{k}.csv").write_text("\n".join(["id,x0,x1,x2,y", *lines[a:b]]) + "\n")
    people = qg.data.scan(str(tmp_path / "*.csv"), schema=schema, person="id")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "all.csv").write_text("\n".join(["id,x0,x1,x2,y", *lines]) + "\n")
    whole = qg.data.load(tmp_path / "whole" / "all.csv", schema=schema, person="id")
    assert people.people == len(np.unique(ids[np.arange(600) % 7 != 0]))
    method = qg.DPGD(steps=3, learning_rate=1.0)
    scanned = qg.minimize(LOSS, people, method, budget=None, seed=3)
    held = qg.minimize(LOSS, (whole.X, whole.y), method, budget=None, seed=3, person=whole.person)
    np.testing.assert_allclose(scanned.params, held.params, rtol=1e-9)


def test_of_somebody_with_more_rows_than_are_read_at_a_time_the_first_count() -> None:
    """A refusal would tell that there is such a person."""
    from dataclasses import replace

    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(6), [3, 200, 40, 41, 1, 90])
    X, y = rng.normal(size=(len(ids), 2)), rng.integers(0, 2, len(ids))
    turn = np.concatenate([np.arange(size) for size in np.bincount(ids)])
    first = turn < 40
    rows = pa.table({"id": ids, "a": X[:, 0], "b": X[:, 1], "y": y})
    scanned = replace(qg.data.scan(rows, target="y", person="id"), rows_at_once=40)
    assert scanned.people == 6
    method = qg.DPGD(steps=3, learning_rate=1.0)
    found = qg.minimize(LOSS, scanned, method, budget=None, seed=3)
    held = qg.minimize(LOSS, (X[first], y[first]), method, budget=None, seed=3, person=ids[first])
    np.testing.assert_allclose(found.params, held.params, rtol=1e-9)


def test_any_number_of_different_labels_is_counted() -> None:
    """A limit of 100 000 was a refusal that one record more could cause."""
    rare = [f"label {k}" for k in range(100_001)]
    labels = [*rare, *(["ja", "nein"] * 10_000)]
    x = np.concatenate([np.zeros(len(rare)), np.tile([1.0, -1.0], 10_000)])
    model = PrivateLogisticRegression(epsilon=2.0, relation="replace-one", delta=1e-6, feature_bounds=[(-1, 1)])
    model.fit(qg.data.scan(pa.table({"x": x, "y": labels}), target="y"))
    assert model.classes_.tolist() == ["ja", "nein"]


@pytest.mark.parametrize("person", [[], ["--person", "id"]])
def test_a_command_that_is_killed_is_resumed_and_charged_once(
    tmp_path: Path, table: Any, person: list[str]
) -> None:
    """kill −9 as soon as the cost is in the ledger; `resume` ends the run, and `predict` streams to a file."""
    ids, X, y = (np.repeat(part, 50, axis=0) for part in table)
    folder = write(tmp_path / "p", ids, X, y, (0, 9000, 30000), 5000)
    book, run = tmp_path / "run" / "ledger.jsonl", str(tmp_path / "run")
    words = [str(folder / "*.parquet"), "--target", "y", "--epsilon", "2", "--out", run, "--quiet", *person]
    words += ["--ledger", str(book), "--n-public", str(len(np.unique(ids)) if person else len(ids))]
    command = [sys.executable, "-m", "quietgrad", "train", *words]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "src"}, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (book.exists() and '"reserve"' in book.read_text()):
        time.sleep(0.01)
    child.kill()
    assert child.wait() == -9
    assert not (tmp_path / "run" / "result.json").exists()
    assert main(["resume", run]) == 0
    kinds = [json.loads(line)["kind"] for line in book.read_text().splitlines()]
    assert (kinds.count("reserve"), kinds.count("close")) == (1, 1)
    result = qg.load(run)
    assert result.privacy.epsilon == pytest.approx(2.0, rel=0.02)
    assert result.privacy.unit == ("person" if person else "record")
    assert main(["predict", run, str(folder), "-o", str(tmp_path / "out.csv")]) == 0
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 30001
