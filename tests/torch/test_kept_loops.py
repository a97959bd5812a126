"""Loops that are kept in a folder: the same call goes on with them, for the price that is sealed there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.accounting.accounting import account
from quietgrad.core.errors import BudgetError, DataError, QuietgradError
from quietgrad.core.ledger.keys import KeyFile
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session import checkpoint
from quietgrad.core.session.kept import FILE, is_kept
from quietgrad.core.session.transcript import plan_key
from quietgrad.methods.result import ledger_of, problems_of
from tests.behaviour.kept_runs import Killed, LoopRun, NetworkRun

BUDGET = qg.Budget(2.0, 1e-5)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def loop_of(dtype: torch.dtype = torch.float32, moved: float = 0.0, **settings: Any) -> qt.PrivateLoop:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = (x[:, 0] > 0).long()
    x[:10] += moved
    torch.manual_seed(1)
    model = nn.Linear(3, 2).to(dtype)
    settings = {
        "budget": BUDGET, "steps": 6, "batch_size": 20, "max_grad_norm": 0.5, "n_public": 60, "folder": "run",
        "checkpoint_seconds": 0.0, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1), **settings,
    }  # fmt: skip
    return qt.PrivateLoop(model, nn.CrossEntropyLoss(), (x, y), **settings)


def train(loop: qt.PrivateLoop, form: str = "step", die: int | None = None) -> Tensor:
    """A loop of one's own, with a step for each sample or for two; it dies after sample ``die``."""
    try:
        for k, batch in enumerate(loop, start=loop.handed_out + 1):
            if form == "step":
                loop.step(batch)
            else:
                loop.backward(batch)
                if k % 2 == 0:
                    assert loop.optimizer is not None
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
            if k == die:
                raise Killed
    finally:
        if loop._kept is not None:
            loop._kept.close()
    return loop.engine.flatten(loop.parameters())


def interrupted(die: int = 4, form: str = "step", **settings: Any) -> None:
    with pytest.raises(Killed):
        train(loop_of(**settings), form, die)


SETTINGS: dict[str, dict[str, Any]] = {
    "flat": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "replace-one": {"n_public": None, "budget": qg.Budget(2.0, 1e-5, qg.Relation.REPLACE_ONE)},
    "own noise": {"noise_multiplier": 1.0, "budget": None},
    "schedules": {
        "noise_schedule": qt.StepNoise(step_size=1, gamma=0.5),
        "clip_schedule": qt.LambdaGradClip(scheduler_function=lambda epoch: 1.0 + epoch),
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("form", ["step", "two samples a step"])
def test_a_loop_goes_on_as_if_nothing_had_happened(
    form: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam's moments and a gradient that waits: bit for bit, for one charge."""
    interrupted(4, form, **settings)
    (key,) = (file.read_bytes() for file in KeyFile.directory().glob("*.key"))
    elsewhere = {**settings, "folder": None, "ledger": "other.jsonl"}
    plan = loop_of(**elsewhere).plan
    with monkeypatch.context() as patch:
        patch.setattr("quietgrad.torch.loops.base.broadcast_loop_key", lambda: plan_key(key, plan.digest))
        undisturbed = train(loop_of(**elsewhere), form)
    loop = loop_of(**settings)
    assert loop.handed_out == 3
    assert loop.used == 4  # the last release was made, whatever the checkpoint knows
    assert torch.equal(train(loop, form), undisturbed)
    result = qg.load("run")
    assert not is_kept("run")
    assert not list(KeyFile.directory().iterdir())
    assert result.params.tolist() == undisturbed.tolist()
    assert result.privacy.epsilon == pytest.approx(loop.plan.epsilon())
    assert result.algorithm == "own-loop"
    assert str(result.privacy) == str(loop.privacy)
    assert problems_of(result, Path("run"), ledger_of(Path("run"))) == []


def test_other_sums_are_charged_again_and_said_on_the_way() -> None:
    interrupted(ledger="ledger.jsonl", account="people")
    loop = loop_of(moved=0.5, ledger="ledger.jsonl", account="people")
    loop.step(next(iter(loop)))
    twice = account(loop.plan.event, delta=1e-5, relation=BUDGET.relation) * 1.2
    assert loop.epsilon() > twice  # after one step of it, with two left
    assert loop.privacy.epsilon == pytest.approx(loop.epsilon())
    assert any("charged again" in note for note in loop.privacy.notes)
    train(loop)
    assert len(Ledger("ledger.jsonl").book().held) == 2
    spent = Ledger("ledger.jsonl").spent("people", delta=1e-5, relation="add-remove").epsilon
    assert qg.load("run").privacy.epsilon == pytest.approx(spent) == pytest.approx(loop.epsilon())


@pytest.mark.parametrize("edit", ["loss", "forward", "nothing"])
@pytest.mark.parametrize("kind", [NetworkRun, LoopRun])
def test_an_edited_loss_or_forward_is_charged_again(
    kind: type[NetworkRun], edit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name tells of the edit; under the old noise the difference of two sums would have none."""
    world, scale = kind(tmp_path / "world"), {"loss": 1.0, "forward": 1.0}
    table = world._parts(0)[2]

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(scale["forward"] * x)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scale["loss"] * output, y, reduction="none")

    def parts(_world: Any, _data: int) -> tuple[Any, ...]:
        torch.manual_seed(0)
        return Scaled(2, 2), loss, table

    monkeypatch.setattr(kind, "_parts", parts)
    assert not world.go(kill=4)
    scale[edit] = 3.0
    assert world.go()
    world.check()
    assert world.charges() == world.witness.epochs() == (1 if edit == "nothing" else 2)


def test_people_who_were_counted_are_not_counted_again() -> None:
    counted: dict[str, Any] = {"n_public": None, "budget": qg.Budget(200.0, 1e-5), "ledger": "ledger.jsonl"}
    interrupted(**counted)
    before = list(Ledger("ledger.jsonl").book().held)
    train(loop_of(**counted))
    assert list(Ledger("ledger.jsonl").book().held) == before
    assert qg.load("run").privacy.epsilon == 200.0


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "noise": lambda plan: plan.update(noise_multiplier=20.0),
    "clip": lambda plan: plan["config"].update(clip=50.0),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_loop_is_refused(edit: str) -> None:
    interrupted()
    name, content = checkpoint.load(Path("run") / FILE, KeyFile.load)
    header = json.loads(content["header"])
    EDITS[edit](header["plan"])
    checkpoint.save(Path("run") / FILE, name, {**content, "header": json.dumps(header)}, bytes(32))
    with pytest.raises(DataError, match="was altered"):
        loop_of()


@pytest.mark.parametrize(("given", "what"), [
    ({"steps": 7}, "stretches"), ({"batch_size": 10}, "stretches"), ({"max_grad_norm": 0.6}, "clip"),
    ({"noise_schedule": qt.StepNoise(step_size=1, gamma=0.5)}, "stretches"),
    ({"clip_schedule": qt.StepGradClip(step_size=1, gamma=0.5)}, "clip_factors"),
    ({"sampling": "turns"}, "sampling"), ({"budget": qg.Budget(9.0, 1e-5)}, "budget"),
    ({"noise_multiplier": 20.0, "budget": None}, "budget"),
    ({"n_public": 6000}, "n_public"), ({"account": "others"}, "account"), ({"cap": BUDGET}, "cap"),
    ({"optimizer": None}, "optimizer"), ({"person": list(range(60))}, "people"),
])  # fmt: skip
def test_what_the_call_says_must_agree(given: dict[str, Any], what: str) -> None:
    interrupted(account="people")
    with pytest.raises(DataError, match=f"another {what}"):
        loop_of(**{"account": "people", **given})
    train(loop_of())  # which is let go: the folder says the account
    assert qg.load("run").privacy.account == "people"


def test_an_older_transcript_gives_nothing_back() -> None:
    """Of a loop whose transcript was put back nobody knows how many steps it made: a public stop costs the plan."""
    loop = loop_of()
    samples = iter(loop)
    loop.step(next(samples))
    files = [Path("run") / FILE, *KeyFile.directory().glob("*.transcript")]
    older = [file.read_bytes() for file in files]
    for _ in range(4):
        loop.step(next(samples))
    assert loop._kept is not None
    loop._kept.close()
    time.sleep(0.03)
    for file, content in zip(files, older, strict=True):
        file.write_bytes(content)
    again = loop_of()
    assert again.handed_out < 5
    assert again.used == 6
    assert again.close(data_dependent=False).epsilon == pytest.approx(again.plan.epsilon())


def test_pause_and_close() -> None:
    loop = loop_of()
    samples = iter(loop)
    for _ in range(2):
        loop.step(next(samples))
    held = next(samples)
    with pytest.raises(DataError, match="is running"):
        loop_of()
    loop.pause()
    loop.pause()
    assert list(samples) == []
    with pytest.raises(BudgetError, match="was paused"):
        iter(loop)
    with pytest.raises(BudgetError, match="was paused"):  # it would give back what another process releases
        loop.close(data_dependent=False)
    with pytest.raises((QuietgradError, OSError, ValueError)):
        loop.step(held)
    again = loop_of()
    assert again.handed_out == 3
    said = again.close(data_dependent=False)
    assert (
        said.epsilon == pytest.approx(again.epsilon()) == pytest.approx(again.plan.epsilon_after({"stretch-0": 3}))
    )
    assert qg.load("run").privacy.to_json() == said.to_json()
    assert loop_of().handed_out == 0  # what is over is over: a new loop, with its own charge


def test_what_is_not_kept() -> None:
    with pytest.raises(ValueError, match="needs its length"):
        loop_of(steps=None, budget=None, noise_multiplier=1.0)
    with pytest.warns(UserWarning, match="not private"):
        seeded = loop_of(seed=3)
    with pytest.raises(ValueError, match="not kept"):
        seeded.pause()
    train(seeded)
    assert not qg.load("run").privacy.is_private
    interrupted()
    with pytest.raises(ValueError, match="leave seed out"):
        loop_of(seed=3)
    with pytest.raises(DataError, match="loop run"):
        qg.resume(folder="run", data=([[0.0]], [0.0]))


def test_a_loop_that_was_refused_leaves_nothing() -> None:
    with pytest.raises(BudgetError):
        loop_of(ledger="ledger.jsonl", cap=qg.Budget(0.1, 1e-5))
    assert not is_kept("run")
    assert not list(KeyFile.directory().glob("*.key"))
