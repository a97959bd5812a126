"""One callback protocol for tables, networks and parties: told of step 0 before anything is reserved."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.federation import Party, simulate

BUDGET = qg.Budget(1.0, 1e-5)
Run = Callable[..., qg.Result]


def rows(n: int = 200) -> tuple[Any, Any]:
    X = np.random.default_rng(0).normal(size=(n, 3))
    return X, (X[:, 0] > 0) * 1.0


def table(callback: Any, **settings: Any) -> qg.Result:
    return qg.minimize(
        qg.objectives.Logistic(), rows(), qg.DPGD(steps=4), budget=BUDGET, callback=callback, **settings
    )


def network(callback: Any, **settings: Any) -> qg.Result:
    X, y = rows()
    data = torch.tensor(X, dtype=torch.float32), torch.tensor(y).long()
    return qt.fit(
        nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), data, qg.DPSGD(steps=4, batch_size=50),
        budget=BUDGET, callbacks=[callback], every=1, **settings,
    )  # fmt: skip


def parties(callback: Any, **settings: Any) -> qg.Result:
    X, y = rows()
    people = [Party(X[::2], y[::2]), Party(X[1::2], y[1::2])]
    return simulate(
        qg.DPGD(steps=4), qg.objectives.Logistic(), people, budget=BUDGET, callback=callback, **settings
    )


FRONTS = pytest.mark.parametrize("train", [table, network, parties])


@FRONTS
def test_every_front_end_tells_the_same(train: Run, tmp_path: Path) -> None:
    seen: list[qg.Progress] = []
    train(seen.append)
    assert [progress.step for progress in seen] == [0, 1, 2, 3, 4]
    assert [progress.releases for progress in seen] == [0, 1, 2, 3, 4]
    assert {progress.planned for progress in seen} == {4}
    assert [progress.done for progress in seen] == [False, False, False, False, True]
    epsilons = [progress.epsilon for progress in seen]
    assert epsilons[0] == 0.0
    assert epsilons == sorted(epsilons)  # type: ignore[type-var]
    assert epsilons[-1] == pytest.approx(1.0, rel=0.02)
    assert math.isnan(seen[0].estimate_norm)
    assert all(progress.estimate_norm > 0 for progress in seen[1:])
    train(qg.CSVLog(tmp_path / "log.csv"))
    with (tmp_path / "log.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["0", "1", "2", "3", "4"]


class Unreachable:
    """A tracker whose server is away."""

    def __call__(self, progress: qg.Progress) -> None:
        raise ConnectionError("no server")


@FRONTS
@pytest.mark.parametrize("broken", [lambda state, session: None, qg.CSVLog, "log.csv", Unreachable()])
def test_a_callback_that_cannot_be_called_costs_nothing(train: Run, broken: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises((TypeError, ConnectionError)):
        train(broken, ledger=ledger)
    assert not ledger.exists()


def test_an_evaluation_that_fails_costs_nothing(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(AttributeError):
        network(lambda progress: None, evaluate=lambda model: 0.5, ledger=ledger)
    assert not ledger.exists()


@FRONTS
def test_a_stop_costs_the_plan(train: Run, tmp_path: Path) -> None:
    def stop(progress: qg.Progress) -> None:
        if progress.step in (0, 2):  # at step 0 there is nothing to stop
            progress.stop()

    ledger = qg.Ledger(tmp_path / "ledger.jsonl")
    result = train(stop, ledger=ledger, **({} if train is parties else {"n_public": 200}))
    assert result.stopped_by == "callback"
    assert result.privacy.releases["gradient"] == 2
    assert result.privacy.epsilon == pytest.approx(1.0, rel=0.02)
    assert ledger.spent("default", delta=1e-5, relation="add-remove").epsilon == result.privacy.epsilon


def at(step: int, **scores: float) -> qg.Progress:
    return qg.Progress(step, step, 10, np.zeros(2), np.array([0.6, 0.8]), scores, spent=lambda: 0.5)


def test_a_csv_log_keeps_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    log = qg.CSVLog(path, every=2, metrics=True)
    for progress in (at(0, accuracy=0.5), at(1, accuracy=0.6), at(2, accuracy=0.7, auc=0.8), at(4)):
        log(progress)
    qg.CSVLog(path)(at(5, accuracy=0.9))  # a resumed run, and scores that were not asked for
    with path.open() as file:
        found = [(row["step"], row["accuracy"]) for row in csv.DictReader(file)]
    assert found == [("0", "0.5"), ("2", "0.7"), ("4", ""), ("5", "")]
    assert path.read_text().splitlines()[0] == "step,epsilon,estimate_norm,accuracy"
    with pytest.raises(OSError, match="directory"):
        qg.CSVLog(tmp_path)  # before any run
    with pytest.raises(ValueError, match="every"):
        qg.CSVLog(path, every=0)


def test_tensorboard_gets_public_numbers_only(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    def tags(folder: Path) -> set[tuple[int, str]]:
        (file,) = folder.iterdir()
        told = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
        # The time of a step depends on the size of its secret sample: whole seconds alone are written.
        assert [event.wall_time % 1.0 for event in told] == [0.0] * len(told)
        return {(event.step, value.tag) for event in told for value in event.summary.value}

    log = qg.TensorBoardLog(tmp_path / "a", every=2)
    table(log)
    log(at(6, accuracy=0.75))
    log.close()
    assert tags(tmp_path / "a") == {
        (0, "epsilon"), *((step, tag) for step in (2, 4, 6) for tag in ("epsilon", "estimate_norm"))
    }  # fmt: skip
    log = qg.TensorBoardLog(tmp_path / "b", metrics=True)
    log(at(3, accuracy=0.75))
    log.close()
    assert (3, "accuracy") in tags(tmp_path / "b")


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_public_numbers_and_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base would need more packages
    import mlflow

    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with mlflow.start_run() as run:
        log = qg.MLflowLog()
        log.finish(table(log))
    kept = mlflow.get_run(run.info.run_id).data
    assert set(kept.metrics) == {"epsilon", "estimate_norm"}
    assert 0.99 < kept.metrics["epsilon"] <= 1.0
    assert (kept.tags["privacy.relation"], kept.tags["privacy.condition"]) == ("add-remove", "None")
    assert kept.params["algorithm"] == "dp-gd"
