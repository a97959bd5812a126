"""Loops by construction: what a step releases, what an opaque batch tells, and when ε becomes conditional."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import gaussian, poisson_gaussian
from quietgrad.core.errors import BudgetError, DataError
from quietgrad.core.ledger.ledger import Ledger, project_ledger
from tests.torch.loops import network, table

F: Any = nn.functional
QUIET = 1e-7  # a noise multiplier that leaves the clipped sum readable
CLIP = 0.3

pytestmark = pytest.mark.filterwarnings("ignore:seed=")


def gradients(model: nn.Module, x: Any, y: Any, loss: Callable[..., Tensor] = F.cross_entropy) -> list[Tensor]:
    """Each record's gradient by autograd on it alone: one (records, …) tensor for each parameter."""
    params = [param for param in model.parameters() if param.requires_grad]
    rows = [
        torch.autograd.grad(loss(model(one[None]), label[None]), params) for one, label in zip(x, y, strict=True)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def clipped_mean(rows: list[Tensor], divisor: float, clip: float = CLIP) -> list[Tensor]:
    norms = torch.stack([row.flatten(1).square().sum(1) for row in rows]).sum(0).sqrt()
    weights = (clip / norms).clamp(max=1.0)
    return [torch.einsum("b,b...->...", weights, row) / divisor for row in rows]


def assert_gradients(model: nn.Module, expected: list[Tensor]) -> None:
    for param, value in zip((p for p in model.parameters() if p.requires_grad), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, value.to(param.grad), rtol=1e-3, atol=1e-6)


# --- PrivateLoop --------------------------------------------------------------------------------------------------


def loop_of(model: nn.Module, data: Any = None, loss: Any = None, **settings: Any) -> qt.PrivateLoop:
    settings = {
        "noise_multiplier": QUIET,
        "batch_size": 15,
        "max_grad_norm": CLIP,
        "seed": 3,
        "epochs": 2,
    } | settings
    if "person" not in settings:
        settings.setdefault("n_public", 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return qt.PrivateLoop(model, loss or nn.CrossEntropyLoss(), data or table(), optimizer=optimizer, **settings)


def indices(loop: Any, batch: Any) -> Any:
    return np.array(loop._session.batch(batch._drawn).indices)


@pytest.mark.parametrize("form", ["output", "model", "rows"])
def test_a_batch_becomes_the_clipped_mean_by_the_public_size(form: str) -> None:
    loss: Any = {
        "output": nn.CrossEntropyLoss(),
        "model": lambda model, x, y: F.cross_entropy(model(x), y),
        "rows": nn.CrossEntropyLoss(reduction="none"),
    }[form]
    model = network()
    loop = loop_of(model, loss=loss)
    batch = next(iter(loop))
    x, y = table()[indices(loop, batch)]
    expected = clipped_mean(gradients(model, x, y), 15)
    loop.backward(batch)
    assert_gradients(model, expected)
    again = next(iter(loop))
    x, y = table()[indices(loop, again)]
    more = clipped_mean(gradients(model, x, y), 15)
    loop.backward(again)  # gradients add up, as torch's do
    assert_gradients(model, [a + b for a, b in zip(expected, more, strict=True)])


def test_a_batch_tells_nothing_and_serves_once() -> None:
    model = network()
    loop = loop_of(model, epochs=None, steps=3)
    batch = next(iter(loop))
    assert bool(batch)
    assert repr(batch) == "PrivateBatch()"
    with pytest.raises(BudgetError, match="size of a sample is secret"):
        len(batch)
    with pytest.raises(BudgetError, match="cannot be unpacked"):
        list(batch)
    loop.step(batch)
    with pytest.raises(BudgetError, match="stepped on already"):
        loop.step(batch)
    with pytest.raises(TypeError, match="this loop handed out"):
        loop.step(next(iter(loop_of(network()))))
    assert len(list(loop)) == 2 == len(loop) - 1
    with pytest.raises(BudgetError, match="3 steps that were planned"):
        iter(loop)
    with pytest.raises(BudgetError, match="planned"):
        loop.epochs()


@pytest.mark.parametrize("sampling", ["poisson", "turns"])
def test_epochs_and_what_they_cost(sampling: str) -> None:
    loop = loop_of(network(), seed=None, noise_multiplier=1.5, sampling=sampling)
    lengths = [len([loop.step(batch) for batch in epoch]) for epoch in loop.epochs()]  # type: ignore[func-returns-value]
    assert lengths == [4, 4]
    poisson = poisson_gaussian(rate=0.25, noise_multiplier=1.5, steps=8)
    event = poisson if sampling == "poisson" else gaussian(1.5, steps=2)
    assert loop.privacy.epsilon == pytest.approx(account(event, delta=1e-5, relation="add-remove"))
    assert loop.privacy.condition is None
    assert [note.partition(":")[0] for note in loop.privacy.notes] == ["no account was named"]


def test_samples_count_when_they_are_handed_out_and_a_stop_costs_the_plan(tmp_path: Path) -> None:
    def epsilon(steps: int) -> float:
        event = poisson_gaussian(rate=0.25, noise_multiplier=1.5, steps=steps)
        return account(event, delta=1e-5, relation="add-remove")

    settings: dict[str, Any] = {"seed": None, "noise_multiplier": 1.5, "ledger": tmp_path / "ledger.jsonl"}
    loop = loop_of(network(), account="a", **settings)
    assert loop.privacy.epsilon == 0.0
    samples = iter(loop)
    next(samples)
    loop.step(next(samples))
    assert loop.privacy.epsilon == pytest.approx(epsilon(2))
    assert "2 of 8 planned steps" in loop.privacy.notes[0]
    assert loop.close().epsilon == pytest.approx(epsilon(8))
    public = loop_of(network(), table(60, seed=1), account="b", **settings)
    public.step(next(iter(public)))
    assert public.close(data_dependent=False).epsilon == pytest.approx(epsilon(1))
    book = Ledger(tmp_path / "ledger.jsonl")
    spent = [book.spent(name, delta=1e-5, relation="add-remove").epsilon for name in "ab"]
    assert spent == pytest.approx([epsilon(8), epsilon(1)])
    with pytest.raises(BudgetError, match="planned"):
        next(iter(public))


def test_a_private_count_is_part_of_what_a_loop_costs() -> None:
    """Another count would have led to another plan: the promise of all of them counts from the first release on."""
    model, engine = network(), qt.PrivacyEngine()
    loop = loop_of(model, noise_multiplier=None, budget=qg.Budget(2.0, 1e-5), n_public=None, seed=None)
    assert loop.privacy.epsilon == 2.0
    assert 1.9 < loop.epsilon() <= 2.0
    engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=2.0, target_delta=1e-5,
        data_loader=DataLoader(table(), batch_size=15), epochs=2, max_grad_norm=1.0,
    )  # fmt: skip
    assert 1.9 < engine.get_epsilon(1e-5) <= 2.0


def test_callbacks_are_told_and_may_stop_the_loop(tmp_path: Path) -> None:
    told: list[Any] = []

    def stop(progress: Any) -> None:
        told.append((progress.step, progress.planned, progress.epsilon, progress.estimate))
        if progress.step == 2:
            progress.stop()

    def unable(progress: Any) -> None:
        raise OSError("no such place")

    ledger = tmp_path / "ledger.jsonl"
    settings: dict[str, Any] = {"seed": None, "noise_multiplier": 1.5, "ledger": ledger}
    with pytest.raises(OSError, match="no such place"):
        loop_of(network(), callbacks=[unable], **settings)
    assert not ledger.exists()
    loop = loop_of(network(), callbacks=[stop], **settings)
    for batch in loop:
        loop.step(batch)
    assert [(step, planned) for step, planned, _, _ in told] == [(0, 0), (1, 8), (2, 8)]
    assert told[0][2] == 0.0 < told[1][2] < told[2][2] < loop.privacy.epsilon
    assert told[2][3].shape == (loop.engine.dim,)
    assert loop.privacy.epsilon == pytest.approx(loop.plan.epsilon())  # what it saw may have stopped it


@pytest.mark.parametrize(("settings", "message"), [
    ({"noise_multiplier": None}, "needs a budget"), ({"epochs": None, "ledger": "x"}, "needs the number of epochs"),
    ({"steps": 3}, "give one of them"), ({"epochs": 0}, "whole number"),
    ({"budget": qg.Budget(1.0, 1e-5)}, "give one of them"), ({"batch_size": 99}, "between 1"),
    ({"noise_multiplier": None, "budget": qg.Budget(1.0, 1e-5), "epochs": None}, "epochs= or steps="),
    ({"max_grad_norm": -1.0}, "finite number > 0"),
])  # fmt: skip
def test_what_is_refused_says_why(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "ledger" in settings:
        settings = {**settings, "ledger": tmp_path / "ledger.jsonl"}
    with pytest.raises(ValueError, match=message):
        loop_of(network(), **settings)


def test_parameters_that_join_or_leave_are_refused() -> None:
    model: Any = network()
    loop = loop_of(model)
    model[0].requires_grad_(False)
    with pytest.raises(BudgetError, match=r"'0\.\w+' was frozen"):
        loop.step(next(iter(loop)))


# --- the verbs, untouched -----------------------------------------------------------------------------------------


def private(model: nn.Module, criterion: Any = None, data: Any = None, **settings: Any) -> Any:
    settings = {"noise_multiplier": QUIET, "max_grad_norm": CLIP, "seed": 3} | settings
    loader = DataLoader(
        data or table(), batch_size=settings.pop("batch_size", 15), collate_fn=settings.pop("collate_fn", None)
    )
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return qt.make_private(module=model, optimizer=optimizer, data_loader=loader, criterion=criterion, **settings)


def in_hand(loader: Any, data: Any = None) -> Any:
    """The records of the sample that the loader handed out last."""
    return (data or table())[np.array(loader.loop.sample.keys.indices)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_untouched_handles_are_unconditional(reduction: str) -> None:
    model = network()
    made, optimizer, loader, criterion = private(model, nn.CrossEntropyLoss(reduction=reduction))
    for number, (x, y) in enumerate(loader):
        expected = clipped_mean(gradients(model, *in_hand(loader)), 1 if reduction == "sum" else 15)
        optimizer.zero_grad()
        assert (x.dtype, x.device.type, x.dim(), x.requires_grad) == (torch.float32, "cpu", 2, False)
        assert x.to("cpu").float() is x
        loss = criterion(made(x), y.long())
        loss = loss.mean() if reduction == "none" else loss
        loss.backward()
        assert all(type(param.grad).__name__ == "PendingGradient" for param in model.parameters())
        optimizer.step()
        assert_gradients(model, expected)
        assert (number, loader.privacy.condition) == (loader.loop.handed_out - 1, None)


@pytest.mark.parametrize(("of_loss", "declared"), [("sum", "mean"), ("mean", "sum"), ("none", "sum")])
@pytest.mark.parametrize("touched", [False, True])
def test_a_declared_reduction_decides_what_sums_are_divided_by(of_loss: str, declared: str, touched: bool) -> None:
    """Whatever the criterion's own reduction is, read or not: the length of a step is what was declared."""
    model = network()
    made, optimizer, loader, criterion = private(
        model, nn.CrossEntropyLoss(reduction=of_loss), loss_reduction=declared
    )
    assert optimizer.loss_reduction == declared
    for x, y in loader:
        expected = clipped_mean(gradients(model, *in_hand(loader)), 15 if declared == "mean" else 1)
        optimizer.zero_grad()
        loss = criterion(made(x), y)
        loss = loss.mean() if of_loss == "none" else loss
        if touched:
            with warnings.catch_warnings(action="ignore"):
                loss.item()
        loss.backward()
        optimizer.step()
        assert_gradients(model, expected)
        assert optimizer.loss_reduction == declared


def test_class_weights_count_in_a_sum_and_are_said_to_be_lost_in_a_mean() -> None:
    weight = torch.tensor([1.0, 5.0])
    model = network()
    summed = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    made, optimizer, loader, criterion = private(model, summed, loss_reduction="mean", max_grad_norm=50.0)
    x, y = next(iter(loader))
    x_in, y_in = in_hand(loader)
    expected = clipped_mean(gradients(model, x_in, y_in, summed), 15, 50.0)
    plain = clipped_mean(gradients(model, *in_hand(loader)), 15, 50.0)
    criterion(made(x), y).backward()
    optimizer.step()
    assert_gradients(model, expected)
    assert any(not torch.allclose(one, other) for one, other in zip(expected, plain, strict=True))
    divided = nn.CrossEntropyLoss(weight=weight)
    with pytest.warns(UserWarning, match="a record with one label loses its weight. Write reduction='sum'"):
        private(network(), divided)
    with pytest.warns(UserWarning, match="a record with one label loses its weight"):
        loop_of(network(), loss=divided)


def test_the_printed_line_says_what_was_taken_as_public_and_how_far_the_loop_is() -> None:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "seed": None, "batch_size": 15}
    loader = private(network(), nn.CrossEntropyLoss(), epochs=2, **settings)[2]
    next(iter(loader))
    line = str(loader.privacy)
    assert "n was taken from the data set's length, which is thereby declared public" in line
    whole = loader.loop.plan.epsilon()
    early = "a loop that ends early because of what it saw costs the whole plan"
    assert f"1 of 8 planned steps so far; {early}, ε = {whole:.4g}" in line
    assert loader.privacy.epsilon < whole
    loader = private(network(), nn.CrossEntropyLoss(), n_public=60, **settings)[2]
    next(iter(loader))
    line = str(loader.privacy)
    assert line.endswith("; kept in no ledger: the loop has no planned end (give epochs=)")
    assert "n was taken" not in line
    assert "so far" not in line


def test_a_function_as_criterion_class_weights_and_a_transform() -> None:
    """A criterion sees one record: a weighted mean is that record's own, and rows cannot silence each other."""
    model = nn.Sequential(nn.Linear(10, 2))
    hard = lambda out, y: (F.cross_entropy(out, y, reduction="none") * (out.max() > 0)).sum()  # noqa: E731
    made, optimizer, loader, criterion = private(
        model, hard, transform=lambda batch: (torch.cat([batch[0], -batch[0]], 1), batch[1])
    )
    x, y = next(iter(loader))
    plain, labels = in_hand(loader)
    expected = clipped_mean(gradients(model, torch.cat([plain, -plain], 1), labels, hard), 15)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which reaches nothing that is clipped
        criterion(made(x), y).backward()
    optimizer.step()
    assert_gradients(model, expected)
    assert loader.privacy.condition is None


TOUCHED: dict[str, Callable[..., Any]] = {
    "another gradient than one": lambda x, y, out, loss: loss.backward(torch.tensor(0.5), retain_graph=True),
    "loss.item()": lambda x, y, out, loss: loss.item(),
    "loss / 2": lambda x, y, out, loss: loss / 2,
    "x.shape": lambda x, y, out, loss: x.shape,
    "len(x)": lambda x, y, out, loss: len(x),
    "x[0]": lambda x, y, out, loss: x[0],
    "x.numpy()": lambda x, y, out, loss: x.numpy(),
    "x - x.mean()": lambda x, y, out, loss: x - x.mean(),
    "print": lambda x, y, out, loss: repr(x),
    "x.data": lambda x, y, out, loss: x.data,
    "without torch functions": lambda x, y, out, loss: _quietly(x),
}


def _quietly(x: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.sum()


@pytest.mark.parametrize("what", TOUCHED)
def test_whatever_is_read_makes_epsilon_conditional_and_the_ledger_knows(what: str, tmp_path: Path) -> None:
    made, optimizer, loader, criterion = private(
        network(),
        nn.CrossEntropyLoss(),
        epochs=1,
        ledger=tmp_path / "ledger.jsonl",
        noise_multiplier=1.0,
        seed=None,
    )
    x, y = next(iter(loader))
    out = made(x)
    loss = criterion(out, y)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.book().conditions("default") == ()
    with pytest.warns(UserWarning, match="its ε is conditional"):
        TOUCHED[what](x, y, out, loss)
    assert loader.privacy.condition.startswith("if the loop's own code treats records apart")
    assert ledger.book().conditions("default") == (loader.privacy.condition,)
    assert "(not checked)" in str(loader.privacy)
    loss.backward()
    optimizer.step()


def test_a_ledger_that_cannot_be_told_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, loader, _ = private(
        network(), nn.CrossEntropyLoss(), epochs=1, ledger=tmp_path / "l", noise_multiplier=1.0
    )
    x, _ = next(iter(loader))

    def full(*_: Any) -> Any:
        raise OSError("no space left")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(Ledger, "set_condition", full)
        with pytest.raises(OSError, match="no space"):
            x.sum()
        assert loader.privacy.condition is None
    with pytest.warns(UserWarning, match="conditional"):
        x.sum()
    assert Ledger(tmp_path / "l").book().conditions("default")


class Records(Dataset[Any]):
    """Words of several lengths."""

    def __init__(self, lengths: tuple[int, ...] = (3, 4, 5)) -> None:
        rows = torch.Generator().manual_seed(0)
        self.words = [torch.randint(1, 9, (lengths[k % len(lengths)],), generator=rows) for k in range(48)]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> Any:
        return {"ids": self.words[index], "label": int(self.words[index].sum()) % 3, "name": f"record {index}"}


class Reader(nn.Module):
    """Tokens, a recurrent layer, and a loss of its own if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.rnn, self.out = nn.Embedding(9, 4), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor, label: Tensor | None = None) -> Any:
        scores = self.out(self.rnn(self.table(ids))[0][:, -1])
        return {"scores": scores, "loss": None if label is None else F.cross_entropy(scores, label)}


@pytest.mark.parametrize("pad", [None, 4, qt.Multiple(3)])
def test_records_of_several_shapes_and_a_models_own_loss(pad: Any) -> None:
    model = Reader()
    made, optimizer, loader = private(model, data=Records(), pad=pad, batch_size=12)
    batch = next(iter(loader))
    assert batch.pop("name") in (None, [None])  # a record's own text is not handed out
    rows = []
    for index in loader.loop.sample.keys.indices:
        word = Records()[index]
        size = {None: len(word["ids"]), 4: 4}.get(pad, -(-len(word["ids"]) // 3) * 3)
        ids = F.pad(word["ids"], (0, max(0, size - len(word["ids"]))))[:size]
        loss = model(ids[None], torch.tensor([word["label"]]))["loss"]
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    expected = clipped_mean([torch.stack(column) for column in zip(*rows, strict=True)], 12)
    made(**batch)["loss"].backward()
    optimizer.step()
    assert_gradients(model, expected)
    assert loader.privacy.condition is None
    if pad is None:
        batch = next(iter(loader))
        with pytest.raises(DataError, match="several shapes"):
            len(batch["ids"])
        assert loader.privacy.condition is not None  # that there are several tells who is in the sample


# --- the verbs, with code of one's own ----------------------------------------------------------------------------


def _pieces(made: Any, x: Any, y: Any) -> None:
    for part, labels in zip(x.split(4), y.split(4), strict=True):
        F.cross_entropy(made(part), labels).backward()


OWN: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mean": lambda made, x, y: F.cross_entropy(made(x), y).backward(),
    "rows of one's own": lambda made, x, y: F.cross_entropy(made(x * 1.0), y).backward(),
    "pieces": _pieces,
    "pieces put together": lambda made, x, y: F.cross_entropy(
        torch.cat([made(p) for p in x.split(4)]), y
    ).backward(),
    "under autocast": lambda made, x, y: _autocast(made, x, y),
    "back under autocast": lambda made, x, y: _autocast(made, x, y, back=True),
}


def _autocast(made: Any, x: Tensor, y: Tensor, *, back: bool = False) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x)
        assert out.dtype == torch.float32
        if back:
            F.cross_entropy(out, y).backward()
    if not back:
        F.cross_entropy(out, y).backward()


def test_hooks_of_parameters_see_the_released_gradient() -> None:
    model = network()
    made, optimizer, loader, criterion = private(model, criterion=nn.CrossEntropyLoss())
    seen: list[Any] = []
    first = next(model.parameters())
    first.register_hook(lambda grad: torch.zeros_like(grad))  # type: ignore[no-untyped-call]
    first.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda param: seen.append(param.grad)
    )
    before = first.detach().clone()
    x, y = next(iter(loader))
    criterion(made(x), y).backward()
    assert not seen  # nothing without noise
    optimizer.step()
    assert len(seen) == 1
    torch.testing.assert_close(first.detach(), before)


@pytest.mark.parametrize("what", OWN)
def test_a_loss_of_ones_own_is_conditional_and_right(what: str) -> None:
    model = network()
    made, optimizer, loader = private(model)
    for x, y in loader:
        expected = clipped_mean(gradients(model, *in_hand(loader)), 15)
        optimizer.zero_grad()
        OWN[what](made, x, y)
        optimizer.step()
        assert_gradients(model, expected)
    assert loader.privacy.condition is not None


def test_two_calls_of_a_record_add_up_before_clipping() -> None:
    model = network()
    made, optimizer, loader = private(model)
    x, _ = next(iter(loader))
    plain, _ = in_hand(loader)

    def distance(a: Any, b: Any) -> Any:
        return (a - b).square().sum(1).mean()

    params = list(model.parameters())
    rows = [torch.autograd.grad(distance(model(one[None]), model(-one[None])), params) for one in plain]
    expected = clipped_mean([torch.stack(column) for column in zip(*rows, strict=True)], 15)
    distance(made(x), made(-x)).backward()
    optimizer.step()
    assert_gradients(model, expected)


def test_samples_add_up_and_each_has_its_own_noise() -> None:
    model = network()
    made, optimizer, loader, criterion = private(model, nn.CrossEntropyLoss())
    total = [torch.zeros_like(param) for param in model.parameters()]
    for number, (x, y) in zip(range(2), loader, strict=False):
        for sum_, more in zip(total, clipped_mean(gradients(model, *in_hand(loader)), 15), strict=True):
            sum_ += more
        criterion(made(x), y).backward()
        assert number == 0 or model[0].weight.grad is not None  # type: ignore[index]
    optimizer.step()
    assert_gradients(model, total)
    assert loader.privacy.condition is None
    with pytest.raises(RuntimeError, match=r"no loss\.backward"):
        optimizer.step()


def test_penalties_are_added_and_make_it_conditional() -> None:
    model = network()
    made, optimizer, loader, criterion = private(model, nn.CrossEntropyLoss())
    x, y = next(iter(loader))
    expected = clipped_mean(gradients(model, *in_hand(loader)), 15)
    criterion(made(x), y).backward()
    (0.1 * sum(param.square().sum() for param in made.parameters())).backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.warns(UserWarning, match="conditional"):
        optimizer.step()
    assert_gradients(model, [grad + 0.2 * param for grad, param in zip(expected, before, strict=True)])


def test_inputs_get_their_gradients() -> None:
    """FGSM: the gradient of the mean loss by the inputs, then a step on the changed records."""
    model = network()
    made, optimizer, loader = private(model)
    x, y = next(iter(loader))
    plain, labels = in_hand(loader)
    x.requires_grad_()
    F.cross_entropy(made(x), y).backward()
    own = plain.clone().requires_grad_()
    F.cross_entropy(model(own), labels).backward()
    torch.testing.assert_close(x.grad, own.grad, rtol=1e-4, atol=1e-7)
    assert own.grad is not None
    changed = plain + 0.1 * own.grad.sign()
    model.zero_grad()
    expected = clipped_mean(gradients(model, changed, labels), 15)
    optimizer.zero_grad()
    F.cross_entropy(made((x + 0.1 * x.grad.sign()).detach()), y).backward()
    optimizer.step()
    assert_gradients(model, expected)


# --- what cannot be ---------------------------------------------------------------------------------------------


def test_a_sample_serves_one_step_and_iterators_end_each_other() -> None:
    made, optimizer, loader, criterion = private(network(), nn.CrossEntropyLoss())
    first = iter(loader)
    x, y = next(first)
    with pytest.raises(RuntimeError, match=r"no loss\.backward"):
        optimizer.step()
    criterion(made(x), y).backward()
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BudgetError, match="no step can use"):
            F.cross_entropy(made(x), y).backward()
    u, _ = next(first)
    with pytest.raises(BudgetError, match="another batch than the loader's last"):
        made(x)
    with pytest.raises(BudgetError, match="another batch"):
        criterion(made(u), y)
    second = iter(loader)
    next(second)
    with pytest.raises(BudgetError, match="newer one was made"):
        next(first)


def test_rows_that_are_nobodys_are_refused_without_a_number() -> None:
    made, _, loader = private(network())
    next(iter(loader))
    with pytest.raises(BudgetError, match="cannot be matched to this batch") as refusal:
        made(torch.zeros(61, 5))
    assert not any(character.isdigit() for character in str(refusal.value).replace("split(16)", ""))
    with torch.no_grad():
        assert made(torch.zeros(61, 5)).shape == (61, 2)
    assert made.eval()(torch.zeros(61, 5)).shape == (61, 2)


def test_criteria_with_parameters_and_several_numbers_are_refused() -> None:
    model: Any = network()
    made, _, loader, criterion = private(
        model, lambda out, y: F.cross_entropy(out, y) + model[0].weight.square().sum()
    )
    x, y = next(iter(loader))
    with pytest.raises(DataError, match="trained parameters"):
        criterion(made(x), y)
    made, _, loader, criterion = private(network(), lambda out, y: out)
    x, y = next(iter(loader))
    with pytest.raises(DataError, match="one number for one record"):
        criterion(made(x), y)


@pytest.mark.parametrize("given", [True, False])
def test_an_empty_sample_is_a_step_of_pure_noise(given: bool) -> None:
    criterion = nn.CrossEntropyLoss()
    model = network()
    made, optimizer, loader, *rest = private(
        model, criterion if given else None, data=table(10), batch_size=1, noise_multiplier=1.0
    )
    empty = 0
    for x, y in loader:
        optimizer.zero_grad()
        sample = loader.loop.sample
        (rest[0] if given else criterion)(made(x), y).backward()
        optimizer.step()
        empty += not len(sample)
        assert all(param.grad is not None and bool(param.grad.any()) for param in model.parameters())
    assert empty
    assert (loader.privacy.condition is None) is given


def test_a_record_that_is_not_finite_counts_as_zero() -> None:
    model = network()
    made, optimizer, loader = private(model)
    batch, labels = next(iter(loader))
    plain, right = in_hand(loader)
    expected = clipped_mean(gradients(model, plain[1:], right[1:]), 15)
    batch[0, 0] = torch.inf
    F.cross_entropy(made(batch), labels).backward()
    optimizer.step()
    assert_gradients(model, expected)


compiled: Any = torch.compile


def test_the_private_model_is_the_plain_module_to_everyone_else() -> None:
    model: Any = network()
    model.note = "mine"
    made, optimizer, loader = private(model)
    assert list(made.state_dict()) == list(model.state_dict())
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert made.note == "mine"
    made.note = "changed"
    assert model.note == "changed"
    made.eval()
    assert not model.training
    made.train()
    assert model[0].training
    for copied in (copy.deepcopy(made), torch.optim.swa_utils.AveragedModel(made).module):
        assert type(copied) is nn.Sequential
    best = {name: value.clone() for name, value in made.state_dict().items()}
    made.load_state_dict(best)
    with pytest.raises(ValueError, match="assign"):
        made.load_state_dict(best, assign=True)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"no loss.backward\(\)"):
        optimizer.step(lambda: 0.0)
    for name in ("noise_multiplier", "max_grad_norm"):
        with pytest.raises(AttributeError, match=name):  # what is chosen on the way may follow what was seen
            setattr(optimizer, name, 0.1)
    with pytest.raises(Exception, match="would fuse"):
        compiled(made, backend="eager")(next(iter(loader))[0])


def test_a_loop_without_an_end_does_not_pass_a_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    project_ledger().set_cap("patients", qg.Budget(0.01, 1e-5))
    data = torch.utils.data.TensorDataset(torch.randn(60, 3), torch.zeros(60, dtype=torch.int64))
    model = nn.Linear(3, 2)
    settings: dict[str, Any] = {"batch_size": 10, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    with pytest.raises(BudgetError, match="has a cap"):
        qt.PrivateLoop(model, nn.CrossEntropyLoss(), data, account="patients", **settings)
    qt.PrivateLoop(model, nn.CrossEntropyLoss(), data, account="others", **settings)
