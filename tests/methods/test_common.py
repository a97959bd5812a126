"""Every algorithm passes the same table: it converges, its claim is its events' price, and its counts are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.errors import BudgetError, DataError, ExhaustedError
from quietgrad.core.session import checkpoint as checkpoints
from quietgrad.core.session.curator import CentralCurator
from tests.methods.common import ROWS, Row, labels, objective, problem

table = pytest.mark.parametrize("row", ROWS, ids=labels(ROWS))


@table
def test_converges_and_claims_the_price_of_its_events(row: Row) -> None:
    X, y = problem()
    result = qg.minimize(objective(), (X, y), row.algorithm, budget=row.budget, seed=11)
    records = objective().prepare((X, y))
    assert objective().risk(records, result.params) < row.loss
    privacy = result.privacy
    assert privacy.events is not None
    assert privacy.epsilon is not None
    assert privacy.epsilon <= row.budget.epsilon
    again = qg.account(events.from_json(privacy.events.to_json()), delta=1e-5, relation=row.budget.relation)
    # Where n was counted, the budget is stated: it holds for whatever count came out, and so for this one.
    assert privacy.epsilon * (1.0 - 2e-3 * ("count" in privacy.releases) - 1e-9) <= again
    assert again <= privacy.epsilon * (1.0 + 1e-9)
    assert ("count" in privacy.releases) == (row.budget.relation is qg.Relation.ADD_REMOVE)
    assert not privacy.is_private  # seeded
    assert sum(privacy.releases.values()) >= 1


@table
def test_calibration_uses_the_whole_budget(row: Row) -> None:
    plan = qg.plan(row.algorithm, n=3000, budget=row.budget)
    assert 0.99 * row.budget.epsilon <= plan.epsilon() <= row.budget.epsilon
    assert "NOT PRIVATE" in qg.plan(row.algorithm, n=3000, budget=None).explain()
    assert f"{row.name} on n = 3000" in plan.explain()
    json.dumps(plan.to_json())


@table
def test_without_noise_it_says_not_private(row: Row) -> None:
    X, y = problem(500)
    result = qg.minimize(objective(), (X, y), shortened(row.algorithm), budget=None)
    assert result.privacy.epsilon is None
    assert not result.privacy.is_private
    assert str(result.privacy) == "NOT PRIVATE"


@table
def test_plan_is_a_hard_limit(row: Row) -> None:
    X, y = problem(300)
    algorithm = shortened(row.algorithm)
    plan = qg.plan(algorithm, n=300, budget=row.budget)
    curator = CentralCurator(objective(), (X, y), seed=0)
    session = curator.open(plan)
    state = algorithm.init(curator.initial())
    while not state.done:
        state = algorithm.step(state, session)
    for slot in plan.schedule.slots:
        assert session.used[slot.name] <= slot.count
        spend = 1e-9 if session_is_filter(plan) else None
        if slot.mechanism.verb != "release":
            continue
        while session.used[slot.name] < slot.count:
            try:
                session.release(slot.name, qg_gradient(curator), rho=spend)
            except ExhaustedError:  # slots on fresh records share them
                break
        with pytest.raises(BudgetError, match=r"all were made|has .* left|fresh records asked for"):
            session.release(slot.name, qg_gradient(curator), rho=spend)
    session.close("test")
    with pytest.raises(BudgetError, match="closed"):
        session.release(plan.schedule.slots[0].name, qg_gradient(curator))


def qg_gradient(curator: CentralCurator) -> Any:
    from quietgrad.core.session.queries import GradientQuery

    return GradientQuery(curator.initial(), 1.0)


def session_is_filter(plan: qg.Plan) -> bool:
    return plan.schedule.composition == "filter"


def shortened(algorithm: Any) -> Any:
    """The same method with few steps and small batches."""
    fields = {f.name for f in dataclasses.fields(algorithm)}
    changes = {"steps": 6, "first_steps": 2, "stages": 2, "batch_size": 30, "max_steps": 5}
    return dataclasses.replace(algorithm, **{k: v for k, v in changes.items() if k in fields})


@table
def test_resume_is_bit_exact_from_any_checkpoint(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is stopped after each of its first steps and continued: the model is that of the undisturbed run."""
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    X, y = problem(400)
    algorithm = shortened(row.algorithm)
    plan = qg.plan(algorithm, n=400, budget=row.budget)

    def steps(stop: int | None) -> Any:
        curator = CentralCurator(objective(), (X, y), seed=5)
        session = curator.open(plan)
        state = algorithm.init(curator.initial())
        while not state.done:
            state = algorithm.step(state, session)
            if state.step == stop and not state.done:
                rho = session.rho_left if session_is_filter(plan) else None
                path = tmp_path / "c.safetensors"
                checkpoints.save(path, "run", {"state": state, "used": session.used, "rho_left": rho}, bytes(32))
                _, saved = checkpoints.load(path, lambda run: bytes(32))
                state = saved.pop("state")
                session = CentralCurator(objective(), (X, y), seed=5).open(plan, **saved)
        return algorithm.output(state)

    undisturbed = steps(None)
    for stop in (1, 3):
        assert np.array_equal(steps(stop), undisturbed)


@pytest.mark.parametrize("sampling", ["poisson", "fixed-size"])
def test_live_epsilon_never_passes_the_plan(sampling: Any) -> None:
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    plan = qg.plan(qg.DPSGD(steps=100, batch_size=50, sampling=sampling), n=1000, budget=budget)
    spent = [plan.epsilon_after({"gradient": k}) for k in (0, 1, 10, 50, 100)]
    assert spent == sorted(spent)
    assert spent[0] == 0.0
    assert spent[-1] <= plan.epsilon()


def test_early_data_independent_stop_gives_budget_back(tmp_path: Path) -> None:
    X, y = problem(500)
    plan = qg.plan(qg.DPSGD(steps=50, batch_size=50), n=500, budget=qg.Budget(2.0, 1e-5))
    path = {stop: tmp_path / f"{stop}.jsonl" for stop in (False, True)}
    for stop, seen in ((False, 1), (True, 50)):
        session = CentralCurator(objective(), (X, y), ledger=path[stop], account="a").open(plan)
        session.release("gradient", qg_gradient(CentralCurator(objective(), (X, y))))
        spent = session.close("stopped early", data_dependent=stop)
        assert spent.event == plan.event_of({"gradient": seen}) or (stop and spent.event == plan.event)
    cheap, dear = (qg.Ledger(p).spent("a", delta=1e-5, relation="add-remove").epsilon for p in path.values())
    assert cheap < 0.9 * dear
    assert dear == pytest.approx(plan.epsilon())


def test_ledger_is_charged_before_the_first_release(tmp_path: Path) -> None:
    X, y = problem(500)
    path = tmp_path / "ledger.jsonl"
    plan = qg.plan(qg.DPGD(steps=5), n=500, budget=qg.Budget(2.0, 1e-5))
    CentralCurator(objective(), (X, y), ledger=path, account="a").open(plan)
    held = qg.Ledger(path).book().of("a")
    assert [entry.reservation.event for entry in held] == [plan.event]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: qg.DPSGD(steps=0), "steps=0"),
        (lambda: qg.DPSGD(batch_size=0), "batch_size=0"),
        (lambda: qg.DPSGD(clip=-1.0), "clip=-1.0"),
        (lambda: qg.DPSGD(momentum=1.0), "momentum=1.0"),
        (lambda: qg.DPSGD(learning_rate="circular:1"), "NAME:NUMBER"),
        (lambda: qg.DPSGD(learning_rate=0.0), "learning_rate=0.0"),
        (lambda: qg.DPSRM(gamma=0.0), "gamma=0.0"),
        (lambda: qg.DPAdam(floor=0.0), "floor=0.0"),
        (lambda: qg.DPSGD(sampling="some"), "sampling='some'"),  # type: ignore[arg-type]
        (lambda: qg.DPSGD(steps=np.int64(0)), "steps="),  # type: ignore[arg-type]
        (lambda: qg.DPSGD(clip="1"), "clip='1'"),  # type: ignore[arg-type]
        (lambda: qg.RRPSGD(learning_rate=3.0, smoothness=1.0), "below 2/smoothness"),
        (lambda: qg.BassilySGD(radius=0.0), "radius=0.0"),
        (lambda: qg.StagewiseDPSGD(stages=0), "stages=0"),
        (lambda: qg.OutputPerturbation(mechanism="loud"), "mechanism='loud'"),  # type: ignore[arg-type]
        (lambda: qg.plan(qg.DPSGD(batch_size=200), n=100, budget=None), "batch_size=200"),
        (lambda: qg.plan(qg.DPGD(), n=0, budget=None), "n=0"),
        (lambda: qg.plan(qg.STORM(), n=10, budget=qg.Budget(1, 1e-5)), "non-private baseline"),
        (lambda: qg.plan(qg.OutputPerturbation(), n=10, budget=qg.Budget(1, 1e-5)), "replace-one"),
    ],
)
def test_bad_settings_are_refused_in_words(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_data_is_refused_before_anything_is_reserved(tmp_path: Path) -> None:
    X, y = problem(100)
    path = tmp_path / "ledger.jsonl"
    broken = X.copy()
    broken[3, 2] = np.nan
    for data in ((broken, y), (X, y[:50]), (X, y + 3), (X[:0], y[:0]), (X[:, :0], y), "text"):
        with pytest.raises(DataError):
            qg.minimize(objective(), data, qg.DPGD(), budget=qg.Budget(1.0, 1e-5), ledger=path)
    assert not path.exists()


def test_replace_one_needs_the_exact_n() -> None:
    X, y = problem(100)
    budget = qg.Budget(1.0, 1e-5, qg.Relation.REPLACE_ONE)
    with pytest.raises(DataError, match="exact"):
        qg.minimize(objective(), (X, y), qg.DPGD(), budget=budget, n_public=90)


def test_start_is_checked_and_used() -> None:
    X, y = problem(200)
    start = np.full(6, 0.5)
    result = qg.minimize(objective(), (X, y), qg.GD(steps=1, learning_rate=1e-9), budget=None, start=start)
    assert result.params == pytest.approx(start, abs=1e-6)
    with pytest.raises(DataError, match="6 finite numbers"):
        qg.minimize(objective(), (X, y), qg.GD(), budget=None, start=np.zeros(5))


def test_results_are_saved_and_read_back(tmp_path: Path) -> None:
    X, y = problem(300)
    result = qg.minimize(objective(), (X, y), qg.DPGD(steps=3), budget=qg.Budget(1.0, 1e-5))
    again = qg.load(result.save(tmp_path / "run"))
    assert np.array_equal(again.params, result.params)
    assert again.privacy == result.privacy
    assert again.history == result.history
    (tmp_path / "run" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="cut short"):
        qg.load(tmp_path / "run")
    with pytest.raises(DataError, match="no result here"):
        qg.load(tmp_path / "nothing")


def test_a_random_output_is_uniform_on_the_points_that_were_asked_about() -> None:
    """Algorithm 1 of paper 000 chooses from θ⁰ … θᵀ⁻¹: 240 draws at T = 4, each share within 0.12 of 1/4 (fixed
    seeds; a false alarm in 10⁻⁴ of choices of them). R = 0 releases nothing and returns the start."""
    made = qg.DPSRM(steps=4, batch_size=100, returns="random")
    assert [(slot.name, slot.law) for slot in made.schedule(4000).slots] == [
        ("first", None), ("next", ((0, 0.5), (1, 0.25), (2, 0.25))),
    ]  # fmt: skip
    assert qg.DPGD(steps=4, returns="random").schedule(100).slots[0].law == tuple((r, 0.25) for r in range(4))
    assert qg.RRPSGD(steps=4).schedule(4000).slots[0].law == tuple((r, 0.25) for r in range(1, 5))
    X = np.random.default_rng(0).normal(size=(200, 3))
    data = X, (X[:, 0] > 0).astype(int)
    runs = [qg.minimize(qg.objectives.Logistic(), data, made, budget=None, seed=seed) for seed in range(240)]
    drawn = np.array([int(run.history[-1]["step"]) for run in runs])
    assert np.abs(np.bincount(drawn, minlength=4) / 240 - 0.25).max() < 0.12
    assert all((not run.params.any()) == (r == 0) for run, r in zip(runs, drawn, strict=True))
    with pytest.raises(ValueError, match="steps=1"):
        qg.DPSRM(steps=1, returns="random")
