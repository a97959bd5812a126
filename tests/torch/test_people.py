"""People with several records, in modules: their sums are the definition's, and nobody exceeds C."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UserLevelObjective
from quietgrad.torch.networks.engine import PerExampleEngine
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.networks.vectors import UnitAssignment
from tests.torch.autograd import KEY, gradients, grouped, in_passes_of, one_at_a_time, ruled, summed

RULES = [
    ClippingRule.gradient(0.3),
    ClippingRule.difference(0.1),
    ClippingRule.momentum(0.3, 0.3, 0.1),
    ClippingRule.joint(0.3, 0.2),
]
LOSS = nn.CrossEntropyLoss(reduction="none")
SIZES = [1, 2, 9, 3, 11, 4]


class Sentences(nn.Module):
    """A transformer on tokens whose table is also its output layer."""

    def __init__(self, words: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, words)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.layer(self.table(x))).mean(1)
        return result


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2),
        nn.Flatten(), nn.Linear(54, 3),
    )  # fmt: skip


def perceptron(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Dropout(dropout), nn.Linear(40, 3))


MODELS: dict[str, tuple[Any, Any]] = {
    "perceptron": (perceptron, lambda n: torch.randn(n, 5)),
    "convolutions": (convolutions, lambda n: torch.randn(n, 2, 8, 8)),
    "tied transformer": (Sentences, lambda n: torch.randint(0, 11, (n, 6))),
    "tied, many words": (lambda: Sentences(400), lambda n: torch.randint(0, 400, (n, 2))),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def scattered(sizes: list[int], seed: int = 0) -> Any:
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))


def combined(rule: ClippingRule, rows: Any, ids: Any, mean: bool) -> Tensor:
    """Records' gradients at two points, added up by person, clipped, summed."""
    sizes = torch.tensor([int((ids == person).sum()) for person in np.unique(ids)])[:, None] if mean else 1
    people = [torch.stack([each[ids == person].sum(0) for person in np.unique(ids)]) / sizes for each in rows]
    return ruled(rule, people[0], people[1] if rule.beta else None)[0]


def by_hand(
    model: nn.Module, points: Any, x: Tensor, y: Tensor, rule: ClippingRule, ids: Any, mean: bool
) -> Tensor:
    """One record at a time by autograd."""
    engine = PerExampleEngine(model, LOSS)
    return combined(rule, [gradients(engine, point, x, y) for point in points], ids, mean)


@pytest.mark.parametrize("budget", [512e6, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_a_loop_over_people(name: str, budget: float) -> None:
    """Kernels written out, by Gram matrices, from factors; passes that people do and do not fit into."""
    make, inputs = MODELS[name]
    model = make().double()
    ids = scattered(SIZES)
    x, y = inputs(len(ids)), torch.randint(0, 3, (len(ids),))
    x = x.double() if x.is_floating_point() else x
    engine = PerExampleEngine(model, LOSS, memory_budget=budget)
    theta = engine.flatten(dict(model.named_parameters()))
    points = theta, theta + 0.1 * torch.randn_like(theta)
    rows = [gradients(engine, point, x, y) for point in points]
    for micro_batch, mean in ((None, True), (7, False)):
        in_passes_of(engine, micro_batch)
        for rule in RULES if budget and mean else RULES[1:3]:
            found, _ = summed(engine, points, grouped(x, y), rule, UnitAssignment.of(ids, mean=mean))
            torch.testing.assert_close(found, combined(rule, rows, ids, mean), rtol=1e-9, atol=1e-12)


class Lengths(nn.Module):
    """For records of several shapes, which are several groups: a person's are in more than one."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.lift(x)).mean(1))
        return result


class Visited(Dataset[Any]):
    """Records of one, two or three visits."""

    def __init__(self, n: int) -> None:
        self.records = [(torch.randn(1 + k % 3, 2).double(), torch.tensor(k % 3)) for k in range(n)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.records[place]


@pytest.mark.parametrize("combine", ["mean", "sum"])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_people_with_records_of_several_shapes(combine: Any, micro_batch: int | None) -> None:
    """Whose records are in groups of their own is clipped once, as a whole."""
    model, ids = Lengths().double(), scattered(SIZES)
    records = Visited(len(ids))
    asked = UserLevelObjective(ModuleObjective(model, LOSS, micro_batch=micro_batch), PersonRule(combine))
    prepared = asked.prepare(RecordsWithIds(records, ids))
    theta: Any = asked.initial(prepared)
    points = theta, theta + 0.1 * torch.randn_like(theta)
    engine = PerExampleEngine(model, LOSS)
    rows = [
        torch.cat([gradients(engine, point, x[None], y[None]) for x, y in records.records]) for point in points
    ]  # fmt: skip
    for rule in RULES:
        out = torch.zeros_like(theta)
        asked.add(Batch(prepared, None, KEY), points, rule, out)
        torch.testing.assert_close(out, combined(rule, rows, ids, combine == "mean"), rtol=1e-9, atol=1e-12)


def test_clipped_sums_of_a_batch_by_person() -> None:
    model = perceptron().double()
    ids = [f"id-{i}" for i in scattered(SIZES)]
    x, y = torch.randn(len(ids), 5).double(), torch.randint(0, 3, (len(ids),))
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    before = {name: p.detach() - 0.1 for name, p in model.named_parameters()}
    sums, norms = qt.clipped_gradient_sum(model, LOSS, (x, y), 0.3, person=ids)
    wanted = by_hand(model, (theta, theta), x, y, RULES[0], np.array(ids), True)
    torch.testing.assert_close(torch.cat([s.flatten() for s in sums.values()]), wanted, rtol=1e-9, atol=1e-12)
    assert norms.shape == (len(SIZES),)
    changes, _ = qt.clipped_difference_sum(model, before, LOSS, (x, y), 0.1, person=ids, combine="sum")
    wanted = by_hand(model, (theta, theta - 0.1), x, y, RULES[1], np.array(ids), False)
    torch.testing.assert_close(torch.cat([s.flatten() for s in changes.values()]), wanted, rtol=1e-9, atol=1e-12)
    with pytest.raises(DataError, match="one id per record"):
        qt.clipped_gradient_sum(model, LOSS, (x, y), 0.3, person=ids[1:])
    with pytest.raises(ValueError, match="combine"):
        qt.clipped_gradient_sum(model, LOSS, (x, y), 0.3, person=ids, combine="average")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["written out", "from factors", "one at a time"])
def test_a_person_with_a_record_that_is_not_finite_counts_as_zero_and_nobody_else_does(way: str) -> None:
    model = convolutions()
    ids = scattered([1, 7, 30, 2, 3])
    x, y = torch.randn(len(ids), 2, 8, 8), torch.randint(0, 3, (len(ids),))
    if way == "one at a time":
        engine = one_at_a_time(model, LOSS, grouped(x, y))
    else:
        engine = PerExampleEngine(model, LOSS, memory_budget=0.0 if way == "from factors" else 512e6)
    theta = engine.flatten(dict(model.named_parameters()))
    for person, value in ((2, float("nan")), (1, float("inf")), (2, 3e38)):
        broken = x.clone()
        broken[np.flatnonzero(ids == person)[0], 0, 0, 0] = value
        others = torch.from_numpy(ids != person)
        for micro_batch in (None, 6):
            in_passes_of(engine, micro_batch)
            out, norms = summed(engine, (theta,), grouped(broken, y), RULES[0], UnitAssignment.of(ids, mean=True))
            whose = UnitAssignment.of(ids[others], mean=True)
            rest, _ = summed(engine, (theta,), grouped(x[others], y[others]), RULES[0], whose)
            assert norms.isfinite()[:, 0].tolist() == [k != person for k in range(5)]
            torch.testing.assert_close(out, rest, rtol=1e-4, atol=1e-6)


def objective(dropout: float = 0.5, **settings: Any) -> UserLevelObjective:
    micro_batch = settings.pop("micro_batch", None)
    model = perceptron(dropout)
    return UserLevelObjective(ModuleObjective(model, LOSS, micro_batch=micro_batch), PersonRule(**settings))


def asked_sum(asked: UserLevelObjective, records: Any, people: Any, key: bytes = KEY) -> Tensor:
    theta: Any = asked.initial(records)
    out = torch.zeros_like(theta, dtype=torch.float64)
    asked.add(Batch(records, people, key), (theta, theta - 0.1), RULES[2], out)
    return out


def test_what_a_person_contributes_depends_on_nobody_else() -> None:
    """Given the key: alone or with all others, in passes of 1024 or of 4, with masks and chosen records."""
    ids = scattered([1, 7, 60, 2, 3])
    x, y = torch.randn(len(ids), 5), torch.randint(0, 3, (len(ids),))
    for most in (None, 3):
        asked = objective(records_per_person=most, combine="sum")
        records = asked.prepare(RecordsWithIds((x, y), ids))
        whole = asked_sum(asked, records, None)
        each = [asked_sum(asked, records, np.array([person])) for person in range(5)]
        torch.testing.assert_close(torch.stack(each).sum(0), whole, rtol=1e-5, atol=1e-6)
        small = objective(records_per_person=most, combine="sum", micro_batch=4)
        torch.testing.assert_close(asked_sum(small, records, None), whole, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(asked_sum(asked, records, None, bytes(32)), whole, rtol=1e-3)  # another release
        if most is not None:
            assert torch.equal(asked_sum(asked, records, np.array([0])), each[0])


def visits(n: int = 90) -> tuple[Tensor, Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = np.random.default_rng(1).integers(0, n // 3, n)
    x = torch.randn(n, 5, generator=generator)
    return x, torch.randint(0, 3, (n,), generator=generator), ids


def test_a_fit_says_that_it_is_about_people(tmp_path: Path) -> None:
    x, y, ids = visits()
    people = len(np.unique(ids))
    algorithm = qg.DPSGD(steps=3, batch_size=10)
    folder = tmp_path / "run"
    result = qt.fit(
        perceptron(), LOSS, TensorDataset(x, y), algorithm, budget=qg.Budget(2.0, 1e-5), person=ids, combine="sum",
        records_per_person=5, ledger=tmp_path / "ledger.jsonl", account="patients", folder=folder, progress=False,
        n_public=people,
    )  # fmt: skip
    assert result.privacy.unit == "person"
    assert "per person" in str(result.privacy)
    assert "the sum of at most 5 of their records" in "".join(result.privacy.notes)
    plan = qg.plan(algorithm, n=people, budget=qg.Budget(2.0, 1e-5), unit="person")
    assert result.privacy.noise_multiplier == plan.noise_multiplier  # n is how many people there are
    assert f"{people} people" in plan.explain()
    with pytest.raises(BudgetError, match="person"):  # one account, one unit
        qt.fit(
            perceptron(), LOSS, (x, y), algorithm, budget=qg.Budget(2.0, 1e-5), ledger=tmp_path / "ledger.jsonl",
            account="patients", progress=False,
        )  # fmt: skip


def test_an_interrupted_fit_about_people_goes_on_and_others_do_not(tmp_path: Path) -> None:
    x, y, ids = visits()
    algorithm = qg.DPSGD(steps=6, batch_size=10)
    settings: dict[str, Any] = {"person": ids, "folder": tmp_path, "progress": False, "checkpoint_seconds": 0.0}

    def stop(progress: Any) -> None:
        if progress.step:
            raise KeyboardInterrupt

    model = perceptron(0.5)
    with pytest.raises(KeyboardInterrupt):
        qt.fit(model, LOSS, (x, y), algorithm, budget=qg.Budget(2.0, 1e-5), callbacks=[stop], every=3, **settings)
    for other in ({"person": None}, {"combine": "sum"}, {"records_per_person": 2}):
        with pytest.raises(DataError, match="started with another person="):
            qt.resume(perceptron(0.5), LOSS, (x, y), algorithm, **settings | other)
    result = qt.resume(perceptron(0.5), LOSS, (x, y), algorithm, **settings)
    assert result.privacy.unit == "person"
    assert result.privacy.releases["gradient"] == 6


class Shaky:
    """Ids that change from pass to pass."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, record: int) -> str:
        self.asked += 1
        return f"secret-{self.asked}"


BAD: dict[str, tuple[Any, str]] = {
    "too few": ([f"secret {i // 2}" for i in range(89)], "one id per record"),
    "none": ([None] * 90, "has no id"),
    "changing": (Shaky(), "another id"),
}


@pytest.mark.parametrize("bad", BAD)
def test_ids_that_cannot_be_used_cost_nothing_and_are_not_shown(bad: str, tmp_path: Path) -> None:
    x, y, _ = visits()
    person, message = BAD[bad]
    ledger = tmp_path / "ledger.jsonl"
    with pytest.raises(DataError, match=message) as refused:
        qt.fit(
            perceptron(), LOSS, (x, y), qg.DPSGD(steps=3, batch_size=10), budget=qg.Budget(2.0, 1e-5),
            person=person, ledger=ledger,
        )  # fmt: skip
    assert "secret" not in str(refused.value)
    with pytest.raises(DataError, match=message) as refused:
        private(perceptron(), person=person, ledger=ledger, epochs=1)
    assert "secret" not in str(refused.value)
    assert not ledger.exists()


def private(model: nn.Module, **settings: Any) -> Any:
    x, y, _ = visits()
    settings = {"noise_multiplier": 1e-7, "max_grad_norm": 0.3, "seed": 3} | settings
    size = settings.pop("batch_size", 12)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "seed=3")
        return qt.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=size), **settings,
        )  # fmt: skip


@pytest.mark.parametrize(("combine", "cut"), [("mean", None), ("sum", None), ("mean", 5), ("sum", 1)])
def test_a_step_of_a_custom_loop_is_the_clipped_sum_over_people(combine: str, cut: int | None) -> None:
    """In one call of the model or in pieces that cut through people, whose gradient is then clipped as one."""
    x, y, ids = visits()
    model = perceptron().double()
    people = len(np.unique(ids))
    made, optimizer, loader = private(model, person=ids, combine=combine)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    batch = next(iter(loader))
    rows = torch.tensor(np.array(loader.loop.sample.keys.indices))
    counts = {int(p): int((ids == p).sum()) for p in np.unique(ids[rows])}
    assert {int(p): int((ids[rows] == p).sum()) for p in np.unique(ids[rows])} == counts  # with all their records
    assert len(loader) == -(-people // 12)
    optimizer.zero_grad()
    for part in torch.split(torch.arange(len(rows)), cut or len(rows)):
        torch.autograd.backward(nn.functional.cross_entropy(made(batch[0][part].double()), batch[1][part]))
    optimizer.step()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    owners = ids[rows.numpy()]
    wanted = by_hand(model, (theta, theta), x[rows].double(), y[rows], RULES[0], owners, combine == "mean")
    torch.testing.assert_close(found, wanted / 12, rtol=1e-4, atol=1e-6)


def test_a_loop_is_about_people_and_says_so() -> None:
    _, _, ids = visits()
    x, y, _ = visits()
    model = perceptron(0.5)
    engine = qt.PrivacyEngine()
    made, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=2.0, target_delta=1e-5,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10), epochs=2, max_grad_norm=1.0, person=ids,
        records_per_person=2,
    )  # fmt: skip
    for _ in range(2):
        for rows, labels in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(made(rows), labels))
            optimizer.step()
            assert len(rows) <= 2 * len(np.unique(ids))
    assert "per person" in str(loader.privacy)
    assert engine.get_epsilon(1e-5) == pytest.approx(2.0, abs=0.01)
    other = perceptron()
    engine.make_private(
        module=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
    )  # fmt: skip
    with pytest.raises(ValueError, match="privacy units"):
        engine.get_epsilon(1e-5)
    for wrong in ({"combine": "sum"}, {"person": ids, "records_per_person": 0}):
        with pytest.raises(ValueError, match="person"):
            private(perceptron(), **wrong)
    with pytest.raises(DataError, match="people of the data set"):
        private(perceptron(), person=ids, batch_size=60)
