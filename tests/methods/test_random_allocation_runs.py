"""Runs of random allocation: what a record moves, what a resumed run pays, loops, scans, proofs, and mutants."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.assurance.certificates import check, checking, issue
from quietgrad.assurance.certificates.independent_accountant import DP_ACCOUNTING, OURS, second_proof
from quietgrad.cli import main
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.rng import SecureStream, fresh_key, seed_key
from quietgrad.core.plans.schedule import Slot
from quietgrad.core.sampling import RandomAllocation
from quietgrad.core.sampling.samplers import CohortSampler
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, simulate
from quietgrad.objectives import Logistic
from tests.methods.common import interrupted, problem, resumed, spent_after

BUDGET = qg.Budget(1.0, 1e-5)
METHOD = qg.DPSGD(steps=32, batch_size=38, sampling="random-allocation")  # 4 epochs of 8 steps on 300 records


def made() -> Any:
    return qg.plan(METHOD, n=300, budget=BUDGET)


def test_a_record_moves_one_release_of_every_epoch_by_at_most_its_bound() -> None:
    plan, (X, y) = made(), problem(300)
    X = X.copy()
    X[-1] = 1e6

    def releases(X: Any, y: Any) -> Any:
        session = CentralCurator(Logistic(), (X, y), key=seed_key(9)).open(plan)
        return np.stack([session.release("gradient", GradientQuery(np.zeros(X.shape[1]), 1.0)) for _ in range(32)])

    moved = np.linalg.norm(releases(X, y) - releases(X[:-1], y[:-1]), axis=1)  # noise of one key cancels
    steps = np.flatnonzero(moved)
    assert [int(step) // 8 for step in steps] == [0, 1, 2, 3]
    assert len({int(step) % 8 for step in steps}) > 1
    assert (moved <= 1.0 + 1e-5).all()


def test_a_run_that_stops_early_pays_for_the_epochs_it_began(tmp_path: Path) -> None:
    plan = made()
    spent = spent_after(plan, problem(300), 9, tmp_path / "ledger.jsonl", data_dependent=False)
    begun = events.random_allocation(steps_per_epoch=8, noise_multiplier=plan.noise_multiplier, epochs=2)
    assert spent == pytest.approx(account(begun, delta=1e-5, relation="add-remove"), rel=1e-9)


def test_an_interrupted_run_continues_to_the_bit(tmp_path: Path) -> None:
    seen = interrupted(problem(300), METHOD, tmp_path, BUDGET, after=13)
    result, again = resumed(problem(300), METHOD, tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(seen, again, strict=False))
    assert len(again) == 32
    assert Ledger(tmp_path / "ledger.jsonl").spent("default", delta=1e-5, relation="add-remove").epsilon <= 1.0
    assert result.privacy.accountant == "pld-random-allocation"


@pytest.mark.parametrize("by_person", [True, False])
def test_a_table_in_another_order_is_another_run(
    by_person: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an epoch a record that was used would have the place of one that is still to come."""
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(120), rng.integers(1, 4, 120))
    X = rng.normal(size=(len(ids), 3))
    y = (X[:, 0] > 0) * 1.0
    n = 120 if by_person else len(ids)
    method = qg.DPSGD(steps=6, batch_size=-(-n // 6), sampling="random-allocation")
    loss, step = Logistic(row_bound=4.0, rows="clip"), qg.DPSGD.step

    def dies(self: Any, state: Any, door: Any) -> Any:
        if state.step == 3:
            raise KeyboardInterrupt
        return step(self, state, door)

    epsilons = {}
    for name in ("same", "shuffled"):
        order = np.arange(len(ids)) if name == "same" else rng.permutation(len(ids))
        kept: dict[str, Any] = {"folder": tmp_path / name, "checkpoint_seconds": 0.0}
        whose = ids if by_person else None
        with monkeypatch.context() as patch:
            patch.setattr(qg.DPSGD, "step", dies)
            with pytest.raises(KeyboardInterrupt):
                qg.minimize(loss, (X, y), method, budget=BUDGET, person=whose, n_public=n, **kept)
        whose = ids[order] if by_person else None
        result = qg.resume(loss, (X[order], y[order]), method, person=whose, **kept)
        epsilons[name] = result.privacy.epsilon or 0.0
    assert epsilons["same"] <= 1.0
    assert epsilons["shuffled"] > 1.3


def test_parties_are_told_to_draw_poisson_samples() -> None:
    X, y = problem(300)
    parties = [Party(X[:150], y[:150]), Party(X[150:], y[150:])]
    with pytest.raises(ValueError, match="is for one curator"):
        simulate(METHOD, Logistic(), parties, budget=BUDGET)


# --- loops ----------------------------------------------------------------------------------------------------


def test_an_epoch_of_a_loop_is_every_record_once() -> None:
    torch = pytest.importorskip("torch")
    import quietgrad.torch as qt

    torch.manual_seed(0)
    x = torch.randn(60, 5)
    model = torch.nn.Linear(5, 2)
    loop = qt.PrivateLoop(
        model, torch.nn.CrossEntropyLoss(), torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=16, epochs=3, n_public=60,
        noise_multiplier=1.5, max_grad_norm=1.0, sampling="random-allocation",
    )  # fmt: skip
    for epoch in loop.epochs():
        seen: list[int] = []
        for batch in epoch:
            assert batch._drawn is not None
            seen += np.asarray(loop._session.batch(batch._drawn).indices).tolist()
            loop.step(batch)
        assert sorted(seen) == list(range(60))
    event = events.random_allocation(steps_per_epoch=4, noise_multiplier=1.5, epochs=3)
    whole = account(event, delta=1e-5, relation="add-remove")
    assert loop.privacy.epsilon == pytest.approx(whole)


def test_opacus_verbs_allocate_a_loaders_epoch() -> None:
    torch = pytest.importorskip("torch")
    import quietgrad.torch as qt

    x = torch.randn(50, 5)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    model = torch.nn.Linear(5, 2)
    module, optimizer, loader, criterion = qt.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), epochs=2, target_epsilon=2.0,
        target_delta=1e-5, max_grad_norm=1.0, criterion=torch.nn.CrossEntropyLoss(), n_public=50,
        data_loader=torch.utils.data.DataLoader(data, batch_size=20, shuffle=True, drop_last=True),
        sampling="random-allocation",
    )  # fmt: skip
    assert len(loader) == 3  # where nothing is dropped
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()
    assert loader.privacy.accountant == "pld-random-allocation"
    assert 1.9 < loader.privacy.epsilon <= 2.0


# --- second proofs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "steps", "epochs"), [(1.0, 100, 10), (0.7, 20, 3), (3.0, 1000, 50)])
def test_the_second_accountant_finds_no_more(sigma: float, steps: int, epochs: int) -> None:
    event = events.random_allocation(steps_per_epoch=steps, noise_multiplier=sigma, epochs=epochs)
    ours = account(event, delta=1e-6, relation="add-remove")
    theirs = second_proof(event, delta=1e-6, relation=Relation.ADD_REMOVE).epsilon
    assert theirs is not None
    assert 0.99 * ours < theirs <= ours * (1 + 1e-6)


def test_a_second_proof_of_our_own_is_not_called_another_accountants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = qg.minimize(Logistic(), problem(300), METHOD, budget=BUDGET, n_public=300, folder=tmp_path / "run")
    assert result.privacy.sampling.startswith("gradient: random allocation")
    both = check(issue(tmp_path / "run"))
    assert both.accountants == 2
    assert any(f.what == "second proof" and "quietgrad-verify" in f.words for f in both.findings)
    monkeypatch.setattr(checking, "verifier_proof", lambda *args, **settings: None)  # as if it were not installed
    verdict = check(issue(tmp_path / "run"))
    found = {finding.what: finding for finding in verdict.findings}
    assert found["proof"].ok
    assert found["second proof"].ok is None
    assert verdict.accountants == 1
    assert "quietgrad itself by a second derivation" in found["second proof"].words
    second = second_proof(made().event, delta=1e-5, relation=Relation.ADD_REMOVE)
    assert second.epsilon is not None
    assert second.epsilon > 0.97  # a claim of less would not be confirmed
    assert second.authors == {OURS, DP_ACCOUNTING}
    issue(tmp_path / "run").write(tmp_path / "c.json")
    assert main(["verify", str(tmp_path / "c.json")]) == 0
    told = capsys.readouterr().out
    assert "yes  dp-accounting" not in " ".join(told.split()).replace("yes dp", "yes  dp")
    assert "One accountant proved it." in told


@pytest.mark.parametrize(
    ("event", "foreign"),
    [
        (events.poisson_gaussian(0.1, 2.0, 5), True),
        (events.random_allocation(steps_per_epoch=5, noise_multiplier=2.0), False),
        (events.Composed((events.random_allocation(steps_per_epoch=5, noise_multiplier=2.0), events.Gaussian(9.0))),
         False),
        (events.Parallel((events.random_allocation(steps_per_epoch=5, noise_multiplier=9.0), events.Gaussian(2.0))),
         False),
        (events.RandomNumberOfReleases(events.random_allocation(steps_per_epoch=5, noise_multiplier=3.0),
                                       ((1, 0.5), (2, 0.5))), False),
        (events.Upfront(0.1, Relation.ADD_REMOVE), False),
    ],
)  # fmt: skip
def test_a_proof_has_the_authors_of_all_its_parts(event: events.Event, foreign: bool) -> None:
    proof = second_proof(event, delta=1e-5, relation=Relation.ADD_REMOVE)
    assert proof.epsilon is not None
    assert proof.foreign == foreign
    assert proof.how.startswith("dp-accounting") == foreign


# --- mutants: each is a way to get it wrong, and is seen --------------------------------------------------------


def faults(batch: Callable[[int], Any], steps: int = 4, records: int = 64, epochs: int = 200) -> set[str]:
    """What is wrong with samples; each kind is found by chance with probability below 10⁻⁶."""
    bins = np.full((epochs, records), -1)
    found = set()
    for epoch in range(epochs):
        for step in range(steps):
            members = batch(epoch * steps + step)
            if (bins[epoch, members] >= 0).any():
                found.add("twice")
            bins[epoch, members] = step
    if (bins < 0).any():
        found.add("never")
    share = np.stack([(bins == step).mean(axis=0) for step in range(steps)])
    if np.abs(share - 1 / steps).max() > 6.0 * math.sqrt((steps - 1) / steps**2 / epochs):
        found.add("a record's step is known")
    sizes = np.stack([(bins == step).sum(axis=1) for step in range(steps)], axis=1)
    if sizes.std() < 1.0:  # a binomial has √(64·3/16) = 3.5
        found.add("sizes are fixed")
    if (bins[1:] == bins[:-1]).mean() > 1 / steps + 6.0 * math.sqrt(
        (steps - 1) / steps**2 / (epochs - 1) / records
    ):
        found.add("epochs agree")
    return found


class TwoSteps:
    """Some records draw two steps."""

    def __init__(self, n: int, steps: int, stream: SecureStream) -> None:
        self.good, self.steps = RandomAllocation(steps).sampler(n, stream), steps

    def batch(self, i: int) -> Any:
        step = i % self.steps
        return np.unique(np.append(np.asarray(self.good.batch(i)), [7] if step == 0 else []).astype(np.int64))


class ByPosition:
    """Steps go by the record's place."""

    def __init__(self, n: int, steps: int, stream: SecureStream) -> None:
        self.turns = CohortSampler(np.arange(n) % steps, steps)

    def batch(self, i: int) -> Any:
        return self.turns.batch(i)


class SameEveryEpoch:
    """Steps are drawn once for all epochs."""

    def __init__(self, n: int, steps: int, stream: SecureStream) -> None:
        self.good, self.steps = RandomAllocation(steps).sampler(n, stream), steps

    def batch(self, i: int) -> Any:
        return self.good.batch(i % self.steps)


class Shuffled:
    """A permutation cut into batches of one size, which has no such proof."""

    def __init__(self, n: int, steps: int, stream: SecureStream) -> None:
        self.n, self.steps, self.key = n, steps, int(stream.uint64(0, 1)[0])

    def batch(self, i: int) -> Any:
        order = np.random.default_rng([self.key, i // self.steps]).permutation(self.n)
        return np.split(order, self.steps)[i % self.steps]


@pytest.mark.parametrize("how", ["sampler", "scanning"])
def test_the_samplers_have_no_fault(how: str) -> None:
    stream = SecureStream(fresh_key(), "sample/probe")
    assert not faults(getattr(RandomAllocation(4), how)(64, stream).batch)


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [
        (TwoSteps, "twice"), (ByPosition, "a record's step is known"), (SameEveryEpoch, "epochs agree"),
        (Shuffled, "sizes are fixed"),
    ],
)  # fmt: skip
def test_mutants_of_the_sampler_are_seen(mutant: Any, fault: str) -> None:
    assert fault in faults(mutant(64, 4, SecureStream(fresh_key(), "sample/probe")).batch)


def test_mutants_of_the_price_are_seen() -> None:
    """Poisson's rate in place of allocation, or fewer epochs, would state too little where it matters."""
    slot = Slot("gradient", RandomAllocation(10), 10_000)
    right = slot.event(0.7, Relation.ADD_REMOVE)
    assert right == events.random_allocation(steps_per_epoch=10, noise_multiplier=0.7, epochs=1000)
    epsilon = account(right, delta=1e-6, relation="add-remove")
    poisson = account(events.poisson_gaussian(0.1, 0.7, 10_000), delta=1e-6, relation="add-remove")
    assert poisson < 0.98 * epsilon  # little noise, many epochs: a record is in every one of them for certain
    fewer = events.random_allocation(steps_per_epoch=10, noise_multiplier=0.7, epochs=100)
    assert account(fewer, delta=1e-6, relation="add-remove") < 0.5 * epsilon
