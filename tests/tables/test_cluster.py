"""The same scan on the workers of a Dask cluster of separate processes."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.errors import ClusterError, DataError
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.data.scanning import scan
from quietgrad.estimators import PrivateLogisticRegression
from quietgrad.tables.privacy_units import PersonRule
from quietgrad.tables.range_queries import BoxedQuery, FeatureBox
from quietgrad.tables.row_cache import WorkerRowCache
from quietgrad.tables.scanned import Task
from quietgrad.tables.table import Affine
from quietgrad.tables.whitening import WhitenedGradient, Whitening

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
pytestmark = [
    pytest.mark.filterwarnings("ignore:random_state=5"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # sockets of workers that are killed here
    pytest.mark.filterwarnings("ignore:.*:pandas.errors.PandasChangeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

N, D = 4000, 4


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", "src")
        one = dask.config.set({"distributed.scheduler.allowed-failures": 1})  # a piece may take one worker down
        with one, _started() as cluster, distributed.Client(cluster, set_as_default=False) as client:
            yield client


def _started() -> Any:
    """Two workers; on a machine that is busy their processes may come too late for dask, so up to three times."""
    for last in (False, False, True):
        try:
            return distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
            )
        except RuntimeError:
            if last:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("people")
    rng = np.random.default_rng(0)
    for k in range(5):
        X = rng.standard_normal((N // 5, D))
        columns = {f"x{j}": X[:, j] for j in range(D)}
        pq.write_table(pa.table({**columns, "y": (X[:, 0] > 0).astype(int)}), where / f"{k}.parquet")
    return where


def total(table: Any, indices: Any = None) -> Any:
    loss = qg.objectives.Logistic(intercept=True)
    records: Any = loss.prepare(table)
    out = np.zeros(D + 1)
    records.answer(GradientQuery(np.linspace(-1, 1, D + 1), 0.8), Batch(records, indices), out)
    return out


def test_sums_are_those_of_this_machine_bit_for_bit(client: Any, folder: Path) -> None:
    for indices in (None, np.array([3, 1, 3999, 800, 799])):
        mine, theirs = (total(scan(folder, target="y", cluster=c), indices) for c in (None, client))
        assert (mine == theirs).all()


def test_a_fit_costs_and_gives_the_same(client: Any, folder: Path) -> None:
    fits = [
        PrivateLogisticRegression(epsilon=4.0, random_state=5).fit(scan(folder, target="y", cluster=c))
        for c in (None, client)
    ]
    np.testing.assert_allclose(fits[0].coef_, fits[1].coef_, rtol=1e-9)
    assert fits[0].privacy_.epsilon == fits[1].privacy_.epsilon


def test_what_a_worker_refuses_is_said_here(client: Any, folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, np.nan], "y": [0, 1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="gaps, NaN or infinite"):
        qg.objectives.Logistic().prepare(scan(tmp_path, target="y", cluster=client))


def _kept_rows(dask_worker: Any) -> int:
    """Pieces whose rows a worker keeps."""
    caches = [each for each in dask_worker.data.values() if isinstance(each, WorkerRowCache)]
    return sum(key[0] == "rows" for cache in caches for key in cache._blocks)  # type: ignore[index]


@pytest.mark.parametrize("memory", [60, 400])
def test_workers_keep_the_rows_of_a_run_and_drop_them_with_it(client: Any, folder: Path, memory: int) -> None:
    frame = FeatureBox(np.full(D, -0.5), np.full(D, 2.0))
    whitening = Whitening(Affine(np.full(D, 0.1), np.eye(D) + 0.1), 1.0, 1, 2.0)
    sums: list[list[Any]] = []
    for runner in (None, client):
        source = scan(folder, target="y", classes=[0, 1], cluster=runner, memory=memory)
        records: Any = qg.objectives.Logistic(intercept=True).prepare(source)
        sums.append([])
        for scale in (1.0, 2.0, 3.0):
            query = BoxedQuery(WhitenedGradient(scale * np.arange(D + 1.0), 0.8, whitening), frame)
            sums[-1].append(np.zeros(D + 1))
            records.answer(query, Batch(records, None), sums[-1][-1])
    for mine, theirs in zip(*sums, strict=True):
        assert (mine == theirs).all()
    assert sum(client.run(_kept_rows).values()) >= 5  # every piece; twice if another worker took it over
    del source, records
    gc.collect()
    for _ in range(100):
        if not sum(client.run(_kept_rows).values()):
            break
        time.sleep(0.1)
    assert sum(client.run(_kept_rows).values()) == 0


class _KillsOnce:
    """A summand whose first caller is killed with −9, as by a machine that runs out of memory."""

    def __init__(self, mark: Path, always: bool = False) -> None:
        self.mark, self.always = str(mark), always

    def __call__(self, objective: Any, batch: Batch, out: Any) -> None:
        if self.always or not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        out += len(batch.records)


def test_a_killed_worker_costs_its_pieces_only(client: Any, folder: Path, tmp_path: Path) -> None:
    records: Any = qg.objectives.Logistic().prepare(scan(folder, target="y", cluster=client))
    out = np.zeros(1)
    records.add(_KillsOnce(tmp_path / "killed"), Batch(records, None), out)
    assert (tmp_path / "killed").exists()
    assert out[0] == N  # every piece once, none twice


def test_nobody_answers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quietgrad.cluster._PATIENCE", 0.5)
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(ClusterError, match=r"tcp://127\.0\.0\.1:9: no Dask scheduler answers"):
        scan(folder, target="y", cluster="tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match="must be 'local', an address"):
        scan(folder, target="y", cluster="somewhere")
    assert not ledger.exists()


def test_who_is_in_a_sample_is_not_printed() -> None:
    task = Task("piece", np.array([4711]))
    assert "4711" not in repr(task)
    assert "4711" not in str(task)


def test_a_piece_that_takes_every_worker_down_ends_the_release(client: Any, folder: Path, tmp_path: Path) -> None:
    records: Any = qg.objectives.Logistic().prepare(scan(folder, target="y", cluster=client))
    with pytest.raises(ClusterError, match="ended its worker"):
        records.add(_KillsOnce(tmp_path / "killed", always=True), Batch(records, None), np.zeros(1))


def test_people_are_those_of_this_machine(client: Any, tmp_path: Path) -> None:
    import pandas as pd

    from quietgrad.tables.privacy_units import with_privacy_unit

    rng = np.random.default_rng(2)
    ids, X = np.sort(rng.integers(0, 90, 400)), rng.standard_normal((400, 2))
    frame = pd.DataFrame({"id": ids, "a": X[:, 0], "b": X[:, 1], "y": (X[:, 0] > 0).astype(int)})
    for k in range(4):
        frame[100 * k : 100 * k + 100].to_parquet(tmp_path / f"{k}.parquet")  # somebody is in two files
    assert ids[99] == ids[100]

    def summed(table: Any, key: bytes = b"k" * 32) -> Any:
        objective, data = with_privacy_unit(qg.objectives.Logistic(), table, None, PersonRule("mean", 2))
        records = objective.prepare(data)
        out = np.zeros(2)
        records.answer(GradientQuery(np.ones(2), 0.5), Batch(records, None, key), out)
        return out

    mine = summed(scan(tmp_path, target="y", person="id"))
    theirs = summed(scan(tmp_path, target="y", person="id", cluster=client))
    assert (mine == theirs).all()


def test_a_local_cluster_listens_to_nobody_else() -> None:
    """On plain TCP another account of the machine ran its code in the workers."""
    import distributed

    from quietgrad.cluster import connected

    address = connected("local").client.scheduler.address
    assert address.startswith("tls://127.0.0.1:")
    for stranger in (None, distributed.Security.temporary()):
        where = address if stranger else address.replace("tls://", "tcp://")
        with pytest.raises(OSError, match=r"certificate|timed out|closed|reset"):
            distributed.Client(where, timeout=5, security=stranger, set_as_default=False)
