"""Schedules of noise and of C: each step has what was declared, and the plan's price is that of all steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.dp_event import ComposedDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
import quietgrad_verify
from quietgrad.assurance.certificates import check, issue
from quietgrad.core.errors import BudgetError, SettingError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.plans.schedule import Plan
from quietgrad.methods.epoch_schedules import NoiseSchedule, read_schedule
from quietgrad.methods.oracles.base import Estimate
from quietgrad.methods.registry import entry
from tests.torch.loops import network, table

DELTA = 1e-5
HALVES, DOUBLES = qt.StepNoise(step_size=1, gamma=0.5), qt.ExponentialGradClip(gamma=2.0)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def verbs(model: nn.Module, data: Any = None, **given: Any) -> Any:
    settings: dict[str, Any] = {
        "max_grad_norm": 1.0,
        "criterion": nn.CrossEntropyLoss(),
        "n_public": 60,
        "epochs": 3,
    } | given
    settings.setdefault("noise_multiplier", None if "target_epsilon" in settings else 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(data or table(), batch_size=settings.pop("batch_size", 15))
    return qt.make_private(module=model, optimizer=optimizer, data_loader=loader, **settings)


def gradients_of(made: Any) -> list[torch.Tensor]:
    """What each step released, times the public size of a sample."""
    model, optimizer, loader, criterion = made
    seen = []
    while loader.loop.handed_out < loader.loop.total:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double() * loader.batch_size)
    return seen


def by_dp_accounting(plan: Plan) -> float:
    parts = [
        SelfComposedDpEvent(
            PoissonSampledDpEvent(slot.sampling.rate, GaussianDpEvent(slot.multiplier(plan.noise_multiplier))),  # type: ignore[attr-defined]
            slot.count,
        )
        for slot in plan.schedule.slots
    ]
    return float(PLDAccountant().compose(ComposedDpEvent(parts)).get_epsilon(DELTA))


def test_each_epoch_has_its_own_noise_and_its_own_bound() -> None:
    """Per epoch 34·200 numbers of a loss without gradient: the mean square is 5 standard errors from its value in
    less than one of 10⁶ runs; noise of an epoch is z·factor times C·factor."""
    made = verbs(
        network(), batch_size=1, data=table(200), n_public=200, noise_schedule=HALVES, clip_schedule=DOUBLES,
        criterion=lambda out, y: 0.0 * out.sum(), epochs=2, noise_multiplier=2.0,
        max_grad_norm=0.5,
    )  # fmt: skip
    optimizer = made[1]
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (2.0, 0.5)
    steps = gradients_of(made)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (1.0, 1.0)
    for epoch, deviation in enumerate([2.0 * 0.5, 1.0 * 1.0]):
        squares = torch.stack(steps[200 * epoch : 200 * epoch + 200]).square().flatten() / deviation**2
        assert abs(float(squares.mean()) - 1.0) < 5 * math.sqrt(2 / len(squares))


@pytest.mark.parametrize("kind", ["verbs", "loop"])
def test_a_record_is_clipped_to_the_bound_of_its_epoch(kind: str) -> None:
    """One record with a long gradient in every sample; hardly any noise."""
    data = TensorDataset(100.0 * torch.ones(1, 5), torch.tensor([0]))
    clips = qt.TableGradClip(factors=[1.0, 3.0, 0.25])
    settings: dict[str, Any] = {"noise_multiplier": 1e-7, "clip_schedule": clips, "n_public": 1, "epochs": 4}
    if kind == "verbs":
        made = verbs(network(), data, batch_size=1, criterion=lambda out, y: 50.0 * out.sum(), **settings)
        lengths = [float(each.norm()) for each in gradients_of(made)]
    else:
        loop = qt.PrivateLoop(
            network(), lambda out, y: 50.0 * out.sum(), data, batch_size=1, max_grad_norm=1.0, **settings
        )
        lengths = [float(loop.backward(batch).norm()) for batch in loop]
    assert lengths == pytest.approx([1.0, 3.0, 0.25, 0.25], rel=1e-4)


@pytest.mark.parametrize("schedule", [
    HALVES, qt.ExponentialNoise(gamma=0.9), qt.LambdaNoise(noise_lambda=lambda epoch: 1.0 + epoch % 2),
    qt.TableNoise(factors=(3.0, 1.0)),
], ids=lambda schedule: type(schedule).__name__)  # fmt: skip
def test_the_plan_is_calibrated_for_all_of_its_steps_and_a_second_accountant_agrees(schedule: Any) -> None:
    loop = verbs(network(), target_epsilon=2.0, noise_schedule=schedule, epochs=4)[2].loop
    plan, length = loop.plan, loop.epoch_length
    multipliers = [plan.schedule.slot_at(k).multiplier(plan.noise_multiplier) for k in range(4 * length)]
    expected = [plan.noise_multiplier * schedule.factor(k // length) for k in range(4 * length)]
    assert multipliers == pytest.approx(expected)
    assert plan.epsilon() <= 2.0
    assert by_dp_accounting(plan) == pytest.approx(plan.epsilon(), rel=0.02)
    constant = verbs(network(), target_epsilon=2.0, epochs=4)[2].loop.plan
    assert sum(z**-2 for z in multipliers) == pytest.approx(16 * constant.noise_multiplier**-2, rel=0.5)


@pytest.mark.parametrize("sampling", ["poisson", "random-allocation", "turns"])
def test_a_schedule_of_ones_and_any_schedule_of_c_cost_what_none_costs(sampling: str) -> None:
    plain = verbs(network(), sampling=sampling)[2].loop.plan
    ones = verbs(network(), sampling=sampling, noise_schedule=qt.StepNoise(step_size=1, gamma=1.0))[2].loop.plan
    clips = verbs(network(), sampling=sampling, clip_schedule=DOUBLES)[2].loop.plan
    assert plain.schedule == ones.schedule == clips.schedule
    assert plain.epsilon() == ones.epsilon() == clips.epsilon()
    assert clips.config["clip_factors"] == [[4, 1.0], [4, 2.0], [4, 4.0]]
    # Cut in stretches of nearly equal noise, it costs nearly the same.
    table = qt.TableNoise(factors=(1.0, 1.0 + 1e-9, 1.0))
    parts = verbs(network(), sampling=sampling, noise_schedule=table)[2].loop.plan
    assert len(parts.schedule.slots) == 3
    assert parts.epsilon() == pytest.approx(plain.epsilon(), rel=0.02)


def test_a_loop_states_and_is_charged_the_steps_it_made(tmp_path: Path) -> None:
    """An early end that is not data-dependent costs the first steps, at their own noise."""
    loop = qt.PrivateLoop(
        network(), nn.CrossEntropyLoss(), table(), batch_size=15, epochs=3, noise_multiplier=2.0, n_public=60,
        max_grad_norm=1.0, noise_schedule=HALVES, ledger=tmp_path / "ledger.jsonl", account="people",
    )  # fmt: skip
    ledger = Ledger(tmp_path / "ledger.jsonl")
    whole = ledger.spent("people", delta=DELTA, relation="add-remove").epsilon
    assert whole == pytest.approx(loop.plan.epsilon())
    seen = []
    for _, batch in zip(range(6), loop, strict=False):
        loop.backward(batch)
        seen.append(loop.epsilon())
    assert np.diff(seen)[3] > 2 * np.diff(seen)[2]  # the fifth step has half the noise
    assert loop.privacy.releases == {"stretch-0": 4, "stretch-1": 2, "stretch-2": 0}
    said = loop.close(data_dependent=False)
    assert said.epsilon == pytest.approx(seen[-1])
    assert ledger.spent("people", delta=DELTA, relation="add-remove").epsilon == pytest.approx(seen[-1])
    assert seen[-1] < whole


def test_an_engine_adds_up_the_stretches_and_lists_them() -> None:
    engine = qt.PrivacyEngine()
    model = network()
    made = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, n_public=60,
        data_loader=DataLoader(table(), batch_size=15), max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(),
        epochs=2, noise_schedule=HALVES,
    )  # fmt: skip
    assert engine.accountant.history == []
    for x, y in made[2]:
        made[3](made[0](x), y).backward()
        made[1].step()
    assert engine.accountant.history == [(1.0, 0.25, 4)]
    gradients_of(made)
    assert engine.accountant.history == [(1.0, 0.25, 4), (0.5, 0.25, 4)]
    assert engine.get_epsilon(DELTA) == pytest.approx(made[2].loop.plan.epsilon())


@pytest.mark.parametrize("counted", [False, True])
def test_a_certificate_proves_a_schedule_and_the_independent_verifier_agrees(counted: bool) -> None:
    loop = qt.PrivateLoop(
        network(), nn.CrossEntropyLoss(), table(400), batch_size=100, epochs=3, budget=qg.Budget(3.0, DELTA),
        n_public=None if counted else 400, max_grad_norm=1.0, noise_schedule=HALVES, clip_schedule=DOUBLES,
        folder="run", ledger="ledger.jsonl", account="people",
    )  # fmt: skip
    for batch in loop:
        loop.backward(batch)
    result = qg.load("run")
    assert result.privacy.is_private
    certificate = issue("run", ledger="ledger.jsonl")
    assert check(certificate).ok
    Path("certificate.json").write_bytes(certificate.to_bytes())
    verdict = quietgrad_verify.check(quietgrad_verify.read("certificate.json"))
    assert verdict.ok
    # One that leaves the louder stretches out of its plan is refuted.
    body = {
        **certificate.body,
        "plan": {**certificate.body["plan"], "slots": certificate.body["plan"]["slots"][:1]},
    }
    assert not check(replace(certificate, body=body)).ok


def test_a_fit_follows_the_schedules_and_is_resumed_with_them() -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    data, settings = (x, (x[:, 0] > 0).long()), {"noise_schedule": HALVES, "clip_schedule": DOUBLES}
    algorithm = qg.DPSGD(steps=9, batch_size=20)
    result = qt.fit(
        network(), nn.CrossEntropyLoss(), data, algorithm, budget=qg.Budget(2.0, DELTA), n_public=60, folder="fit",
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    assert result.privacy.releases == {"stretch-0": 3, "stretch-1": 3, "stretch-2": 3}
    assert 1.99 < (result.privacy.epsilon or 0.0) <= 2.0
    again = replace(algorithm, **settings)  # type: ignore[arg-type]
    assert entry("dp-sgd").make(again.config()) == again
    assert "noise_schedule" not in algorithm.config()
    with pytest.raises(ValueError, match="noise_schedule: dp-srm has no schedule of its noise"):
        qt.fit(network(), nn.CrossEntropyLoss(), data, qg.DPSRM(steps=2), budget=None, noise_schedule=HALVES)


def test_bounds_of_an_algorithms_epochs() -> None:
    """A plan of ⌈n ÷ batch_size⌉ steps an epoch; each release has its epoch's slot and bound."""
    asked: list[tuple[str, float]] = []

    class Session:
        plan = qg.plan(
            qg.DPSGD(steps=5, batch_size=30, noise_schedule=HALVES, clip_schedule=DOUBLES), n=60, budget=None
        )

        def release(self, slot: str, query: Any) -> Any:
            asked.append((slot, query.bound))
            return np.zeros(2)

        def expected_batch(self, slot: str) -> float:
            return 30.0

    oracle = qg.DPSGD(steps=5, batch_size=30, noise_schedule=HALVES, clip_schedule=DOUBLES).oracle()
    session: Any = Session()
    state = Estimate()
    for _ in range(5):
        state = oracle.estimate(state, np.zeros(2), session)
    slots, bounds = zip(*asked, strict=True)
    assert slots == ("stretch-0", "stretch-0", "stretch-1", "stretch-1", "stretch-2")
    assert bounds == (1.0, 1.0, 2.0, 2.0, 4.0)


STEPS: Any = qt.StepNoise
CLIPS: Any = qt.LambdaGradClip
NONE = qt.LambdaNoise(noise_lambda=lambda epoch: 0.0)
SLOW, ONES = qt.ExponentialNoise(gamma=0.999), qt.LambdaNoise(noise_lambda=lambda epoch: 1.0)
ONCE: dict[str, Any] = {"noise": "correlated", "sampling": "single-pass"}
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "without an end": (lambda: verbs(network(), epochs=None, noise_schedule=HALVES), "noise_schedule: is part of"),
    "the other kind": (lambda: verbs(network(), clip_schedule=HALVES), "clip_schedule=StepNoise: must be None or"),
    "not a schedule": (lambda: verbs(network(), noise_schedule=0.5), "noise_schedule=0.5: must be None or"),
    "Opacus' call": (lambda: STEPS(object(), gamma=0.5), "takes no optimizer and no last_epoch"),
    "last_epoch": (lambda: CLIPS(scheduler_function=abs, last_epoch=3), "clip_schedule=LambdaGradClip"),
    "stepped": (HALVES.step, "the run follows it by itself"),
    "read": (HALVES.get_noise_multiplier, "optimizer.noise_multiplier is that of the step"),
    "negative": (lambda: qt.ExponentialNoise(gamma=-1.0), "gamma"),
    "zero": (lambda: verbs(network(), noise_schedule=NONE), "epoch 0 must be a finite number > 0"),
    "no number": (lambda: verbs(network(), clip_schedule=qt.TableGradClip(factors=[True])), "epoch 0 must be a"),
    "overflow": (lambda: verbs(network(), clip_schedule=qt.ExponentialGradClip(gamma=1e200)), "epoch 2 must be"),
    "beyond": (lambda: verbs(network(), clip_schedule=qt.TableGradClip(factors=[1.0, 1e-30])), "max_grad_norm"),
    "empty": (lambda: qt.TableNoise(factors=()), "factors"),
    "many levels": (lambda: verbs(network(), epochs=300, noise_schedule=SLOW), "300 levels"),
    "correlated": (lambda: qg.DPSGD(**ONCE, noise_schedule=HALVES), "correlated"),
    "random": (lambda: qg.DPSGD(returns="random", clip_schedule=DOUBLES), "random number of steps"),
    "Adam's noise": (lambda: qg.DPAdam(subtract_noise=True, clip_schedule=DOUBLES), "subtract_noise"),
    "a function": (lambda: qg.DPSGD(noise_schedule=ONES), r"TableNoise\(factors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_schedule_can_be_is_said(what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises((ValueError, SettingError), match=words):
        call()


def test_a_schedule_that_was_passed_by_is_not_changed_on_the_way() -> None:
    """Opacus' way to change it, and a function that changes its mind, have no effect on what was planned."""
    answers = [1.0, 0.5, 0.25]
    changes = qt.LambdaNoise(noise_lambda=lambda epoch: answers[epoch])
    made = verbs(network(), noise_schedule=changes)
    answers[:] = [100.0, 100.0, 100.0]
    gradients_of(made)
    assert made[1].noise_multiplier == 0.25
    with pytest.raises(AttributeError):
        made[1].noise_multiplier = 3.0
    with pytest.raises(BudgetError, match="planned are made"):
        made[2].loop.draw()
    assert read_schedule("none", NoiseSchedule) is None
