"""People who arrive once: one release per batch, restarts to the bit, and every way to use somebody twice."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.errors import BudgetError, DataError, ExhaustedError
from quietgrad.objectives import Logistic
from quietgrad.objectives.base import Gradient
from quietgrad.privacy import events
from quietgrad.privacy.ledger import Ledger
from tests.common import objective, problem

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(1.0, 1e-5)
METHOD = qg.DPSGD(steps=6, batch_size=50, sampling="single-pass", noise="correlated", learning_rate=1.0)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


def batches() -> list[tuple[Floats, Floats]]:
    X, y = problem(300)
    edges = [0, 40, 95, 150, 210, 250, 300]  # sizes vary
    return [(X[a:b], y[a:b]) for a, b in itertools.pairwise(edges)]


def test_every_batch_is_one_release_and_the_run_one_gaussian(tmp_path: Path) -> None:
    with qg.stream(objective(), METHOD, budget=BUDGET, ledger=tmp_path / "ledger.jsonl") as model:
        for k, batch in enumerate(batches()):
            assert model.step == k
            assert model.fit(batch) is model
            assert np.isfinite(model.params).all()
    privacy = model.result.privacy
    assert privacy.events == events.Gaussian(privacy.noise_multiplier)
    assert privacy.releases == {"gradient": 6}
    assert privacy.epsilon is not None
    assert privacy.epsilon <= 1.0
    assert any("the caller's promise" in note for note in privacy.notes)
    spent = Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation="add-remove")
    assert spent.epsilon == pytest.approx(privacy.epsilon)
    with pytest.raises(ExhaustedError, match="plan a new one"):
        model.fit(batches()[0])


def test_a_batch_serves_one_release() -> None:
    model = qg.stream(objective(), METHOD, budget=BUDGET)
    model.fit(batches()[0])
    session = model._session
    assert session is not None
    with pytest.raises(BudgetError, match="without new arrivals"):
        session.release("gradient", Gradient(np.zeros(6), 1.0))


def test_one_person_moves_one_release() -> None:
    """Same noise, one batch with and without somebody: all other releases are the same to the bit."""

    def heard(without: int | None) -> Floats:
        seen = []
        model = qg.stream(
            Logistic(), qg.DPSGD(**{**vars_of(METHOD), "learning_rate": 1e-300}), budget=BUDGET, seed=3
        )
        for k, (X, y) in enumerate(batches()):
            model.fit((X[1:], y[1:]) if k == without else (X, y))
            assert model._state is not None
            seen.append(np.array(model._state.estimate.value))
        return np.stack(seen)

    moved = np.abs(heard(None) - heard(2)).max(axis=1) > 0
    assert moved.tolist() == [False, False, True, False, False, False]


def vars_of(method: Any) -> dict[str, Any]:
    return {field.name: getattr(method, field.name) for field in fields(method)}


def test_it_goes_on_after_a_crash_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"budget": BUDGET, "ledger": tmp_path / "ledger.jsonl", "folder": tmp_path / "run"}
    seen = []
    model = qg.stream(objective(), METHOD, **settings)
    for batch in batches()[:4]:
        model.fit(batch)
        seen.append(np.array(model.params))
    model.__exit__(KeyboardInterrupt, None, None)  # the process goes away
    with qg.stream(objective(), METHOD, **settings) as again:
        assert again.step == 4
        assert np.array_equal(again.params, seen[-1])
        for batch in batches()[4:]:
            again.fit(batch)
    assert again.done
    assert again.result.privacy.events == events.Gaussian(again.result.privacy.noise_multiplier)
    assert len(Ledger(tmp_path / "ledger.jsonl").entries()) <= 3  # opened once, closed once


def interrupted(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Floats:
    """Three batches, the process dying after the third release and before its checkpoint."""
    from quietgrad.training.saving import Saver

    model = qg.stream(objective(), METHOD, **settings)
    for batch in batches()[:2]:
        model.fit(batch)
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "save", lambda *args, **more: None)
        model.fit(batches()[2])
    assert model._saver is not None
    model._saver.close()
    return np.array(model.params)


def test_the_batch_under_way_is_free_if_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"budget": BUDGET, "ledger": tmp_path / "ledger.jsonl", "folder": tmp_path / "run"}
    before = interrupted(settings, monkeypatch)
    with qg.stream(objective(), METHOD, **settings) as again:
        assert again.step == 2
        assert np.array_equal(again.fit(batches()[2]).params, before)
        for batch in batches()[3:]:
            again.fit(batch)
    assert again.result.privacy.events == events.Gaussian(again.result.privacy.noise_multiplier)


def test_another_batch_in_its_place_is_charged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"budget": BUDGET, "ledger": tmp_path / "ledger.jsonl", "folder": tmp_path / "run"}
    before = interrupted(settings, monkeypatch)
    with qg.stream(objective(), METHOD, **settings) as again:
        assert not np.array_equal(again.fit(batches()[3]).params, before)
        for batch in batches()[3:]:
            again.fit(batch)
    spent = Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation="add-remove")
    assert spent.epsilon > 1.3
    assert again.result.privacy.epsilon == pytest.approx(spent.epsilon)


def test_a_stream_that_ends_early_costs_the_whole_plan() -> None:
    with qg.stream(objective(), METHOD, budget=BUDGET) as model:
        for batch in batches()[:2]:
            model.fit(batch)
    privacy = model.result.privacy
    assert privacy.events == events.Gaussian(privacy.noise_multiplier)
    assert privacy.releases == {"gradient": 2}


def test_a_day_without_anybody_is_released_as_noise() -> None:
    with qg.stream(objective(), METHOD, budget=BUDGET) as model:
        model.fit(batches()[0])
        before = np.array(model.params)
        model.fit()
        assert not np.array_equal(model.params, before)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="single-pass"):
        qg.stream(objective(), qg.DPSGD(steps=6, batch_size=50), budget=BUDGET)
    with pytest.raises(ValueError, match="batches of a public size"):
        qg.stream(objective(), qg.DPGD(steps=5), budget=BUDGET)
    model = qg.stream(objective(), METHOD, budget=BUDGET)
    with pytest.raises(ValueError, match="somebody in it"):
        model.fit()
    with pytest.raises(ValueError, match="nobody has arrived"):
        model.close()
    with pytest.raises(ValueError, match="no model before"):
        _ = model.params
    model.fit(batches()[0])
    X, y = batches()[1]
    with pytest.raises(DataError, match="same columns"):
        model.fit((X[:, :3], y))
    assert model.step == 1
    model.fit((X, y))
    with pytest.raises(ValueError, match="is open"):
        _ = model.result
    kept = qg.stream(objective(), METHOD, budget=BUDGET, folder=tmp_path / "run")
    kept.fit(batches()[0])
    assert kept._saver is not None
    kept._saver.close()
    with pytest.raises(DataError, match="another budget"):
        qg.stream(objective(), METHOD, budget=qg.Budget(9.0, 1e-5), folder=tmp_path / "run")
    with pytest.raises(DataError, match="other settings"):
        qg.stream(objective(), qg.DPSGD(**{**vars_of(METHOD), "clip": 9.0}), budget=BUDGET, folder=tmp_path / "run")


def test_a_module_learns_from_a_stream() -> None:
    torch = pytest.importorskip("torch")
    from quietgrad.objectives.networks.module import ModuleObjective

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    loss = ModuleObjective(net, torch.nn.CrossEntropyLoss(reduction="none"))
    with qg.stream(loss, METHOD, budget=BUDGET) as model:
        for X, y in batches():
            model.fit((torch.tensor(X, dtype=torch.float32), torch.tensor(y, dtype=torch.int64)))
    assert model.result.privacy.releases == {"gradient": 6}
    assert torch.isfinite(torch.as_tensor(model.result.params)).all()
