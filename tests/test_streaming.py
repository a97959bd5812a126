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
from quietgrad.objectives.base import GradientQuery
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
        session.release("gradient", GradientQuery(np.zeros(6), 1.0))


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
    kinds = [entry.kind for entry in Ledger(tmp_path / "ledger.jsonl").entries()]
    assert kinds == ["open", "reserve", "resume", "close"]


def interrupted(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Floats:
    """Three batches, the process dying after the third release and before its checkpoint."""
    from quietgrad.training.runs import Run

    model = qg.stream(objective(), METHOD, **settings)
    for batch in batches()[:2]:
        model.fit(batch)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", lambda *args, **more: None)
        model.fit(batches()[2])
    assert model._kept is not None
    model._kept.close()
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
    with pytest.raises(ValueError, match="must not be empty"):
        model.fit()
    with pytest.raises(ValueError, match="no record has arrived"):
        model.close()
    with pytest.raises(ValueError, match="so there is no model"):
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
    assert kept._kept is not None
    kept._kept.close()
    with pytest.raises(DataError, match="another budget"):
        qg.stream(objective(), METHOD, budget=qg.Budget(9.0, 1e-5), folder=tmp_path / "run")
    with pytest.raises(DataError, match="another config"):
        qg.stream(objective(), qg.DPSGD(**{**vars_of(METHOD), "clip": 9.0}), budget=BUDGET, folder=tmp_path / "run")


def by_person(folder: Path, **settings: Any) -> Any:
    return qg.stream(objective(), METHOD, budget=BUDGET, by_person=True, folder=folder, **settings)


def ids(batch: int, size: int) -> list[str]:
    return [f"{batch}-{one}" for one in range(size)]


def come(model: Any, batch: int) -> None:
    X, y = batches()[batch]
    model.fit((X, y), person=ids(batch, len(X)))


def gone(model: Any) -> None:
    """The process goes away."""
    model.__exit__(KeyboardInterrupt, None, None)


def test_a_restarted_stream_knows_who_was_there(tmp_path: Path) -> None:
    """It forgot them, and everybody could come twice at the ε of once."""
    ledger = tmp_path / "ledger.jsonl"
    model = by_person(tmp_path / "run", ledger=ledger)
    come(model, 0)
    model.fit()  # nobody came
    come(model, 2)
    gone(model)
    again = by_person(tmp_path / "run", ledger=ledger)
    X, y = batches()[1]
    for known in (0, 2):
        with pytest.raises(DataError, match="in an earlier one"):
            again.fit((X, y), person=[*ids(1, len(X) - 1), ids(known, 1)[0]])
    with pytest.raises(DataError, match="of another kind"):
        again.fit((X, y), person=np.arange(len(X)))
    come(again, 1)
    with pytest.raises(DataError, match="in an earlier one"):
        come(again, 1)
    for batch in (3, 4):
        come(again, batch)
    assert again.step == 6
    assert again.result.privacy.epsilon <= 1.0
    assert not list((tmp_path / "state" / "keys").iterdir())  # whom it met goes with the key


def test_people_of_the_batch_under_way_come_in_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quietgrad.training.runs import Run

    for released in (False, True):
        folder = tmp_path / str(released)
        model = by_person(folder)
        come(model, 0)
        with monkeypatch.context() as patch:
            patch.setattr(*((Run, "save", _dies) if released else (qg.DPSGD, "step", _dies)))
            with pytest.raises(KeyboardInterrupt):
                come(model, 1)
        with pytest.raises(DataError, match="in an earlier one"):
            come(model, 1)  # in one process nobody can tell what was made of them
        gone(model)
        with by_person(folder) as again:
            assert again.step == 1
            with pytest.raises(DataError, match="in an earlier one"):
                come(again, 0)
            come(again, 1)
            with pytest.raises(DataError, match="in an earlier one"):
                come(again, 1)
        assert again.result.privacy.epsilon <= 1.0


def test_batches_are_given_again_from_an_older_checkpoint_and_nobody_moves(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    model = by_person(folder)
    come(model, 0)
    kept = (folder / "checkpoint.safetensors").read_bytes()
    for batch in (1, 2):
        come(model, batch)
    seen = np.array(model.params)
    gone(model)
    (folder / "checkpoint.safetensors").write_bytes(kept)
    again = by_person(folder)
    with pytest.raises(DataError, match="in an earlier one"):
        come(again, 2)
    for batch in (1, 2):
        come(again, batch)
    assert np.array_equal(again.params, seen)


def _dies(*args: Any, **settings: Any) -> None:
    raise KeyboardInterrupt


def test_a_stream_that_lost_whom_it_met_is_not_continued(tmp_path: Path) -> None:
    model = by_person(tmp_path / "run")
    for batch in (0, 1, 2):
        come(model, batch)
    gone(model)
    (file,) = (tmp_path / "state" / "keys").glob("*.people")
    whole = file.read_text()
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    torn = whole.splitlines()
    changed = [torn[3].replace(torn[3].split(" ")[2], "0" * 64), *torn[4:]]
    for content in (None, "\n".join(torn[:3]), "\n".join([*torn[:3], *changed])):
        file.unlink() if content is None else file.write_text(content)
        with pytest.raises(DataError, match="who was in every batch"):
            come(by_person(tmp_path / "run"), 3)
    file.write_text(whole + "\n3 text 0123")  # a crash while the next line was written
    again = by_person(tmp_path / "run")
    come(again, 3)
    assert again.step == 4


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
