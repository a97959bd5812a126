"""A loop that writes into its batch before the step, or goes on from another loop's state, tells the truth."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.errors import BudgetError
from quietgrad.privacy.ledger import Ledger
from quietgrad.torch.history import epsilon_of
from quietgrad.torch.opacus_verbs import make_private
from quietgrad.torch.privacy_engine import PrivacyEngine

QUIET = 1e-6  # a noise multiplier that leaves the clipped sum readable


class _Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        for param in self.parameters():
            nn.init.constant_(param, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x))


def _released(first: Tensor, meddle: Callable[[Tensor, Tensor], Any], clipping: str) -> Tensor:
    """The released sum of 50 records whose first one is ``first``, all in the sample."""
    x = torch.tensor([0.1, 0.0, 0.0]).repeat(50, 1)
    x[0] = first
    model = _Squashed()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "seed=1")
        private, optimizer, loader = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), epochs=1, seed=1,
            data_loader=DataLoader(TensorDataset(x, x), batch_size=50), noise_multiplier=QUIET, max_grad_norm=1.0,
            clipping=clipping, loss_reduction="sum",
        )  # fmt: skip
    rows, _ = next(iter(loader))
    output = private(rows)
    (100.0 * output**2).sum().backward()
    meddle(rows, output)
    optimizer.step()
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def _centre(rows: Tensor, output: Tensor) -> None:
    rows.sub_(rows.mean(0))


def _fill_data(rows: Tensor, output: Tensor) -> None:
    rows.data.copy_(rows.data.mean(0).expand_as(rows))


def _fill_output(rows: Tensor, output: Tensor) -> None:
    output.data.copy_(output.data[0].clone().expand_as(output))


@pytest.mark.parametrize("meddle", [_centre, _fill_data, _fill_output])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_what_is_written_into_a_batch_after_the_forward_pass_is_not_released(
    meddle: Callable[[Tensor, Tensor], Any], clipping: str
) -> None:
    """One record that changes moves the sum by 2C at most, whatever the loop does to its batch before the step."""
    one, other = (_released(torch.tensor([0.0, far, 0.0]), meddle, clipping) for far in (0.0, 300.0))
    assert float((one - other).norm()) <= 2.0 + 1e-3
    assert torch.allclose(one, _released(torch.zeros(3), lambda rows, output: None, clipping), atol=1e-3)


def _loop(engine: PrivacyEngine, **settings: Any) -> Any:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 1)
    return engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), epochs=2,
        data_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=20), noise_multiplier=1.0, max_grad_norm=1.0,
        **settings,
    )  # fmt: skip


def _epoch(made: Any) -> None:
    model, optimizer, loader = made
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def _by_model(engine: PrivacyEngine, old: Any, new: Any) -> None:
    new[0].load_state_dict(old[0].state_dict())


def _by_optimizer(engine: PrivacyEngine, old: Any, new: Any) -> None:
    new[1].load_state_dict(old[1].state_dict())


def _by_checkpoint(engine: PrivacyEngine, old: Any, new: Any) -> None:
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=old[0], optimizer=old[1])
    file.seek(0)
    engine.load_checkpoint(path=file, module=new[0], optimizer=new[1])


@pytest.mark.parametrize("carry", [_by_model, _by_optimizer, _by_checkpoint])
def test_a_state_of_the_same_engines_other_loop_brings_what_it_cost(carry: Callable[..., None]) -> None:
    engine = PrivacyEngine()
    old = _loop(engine)
    _epoch(old)
    alone = old[2].privacy.epsilon()
    new = _loop(engine)
    apart = _loop(engine)
    carry(engine, old, new)
    assert new[2].privacy.epsilon() == pytest.approx(alone)
    _epoch(new)
    assert new[2].privacy.epsilon() == pytest.approx(engine.get_epsilon(1e-5))
    assert new[2].privacy.epsilon() > 1.1 * alone
    assert old[2].privacy.epsilon() == pytest.approx(alone)
    _epoch(apart)  # has nothing of the others
    assert apart[2].privacy.epsilon() == pytest.approx(alone)
    limited = _loop(engine, target_epsilon=1.05 * alone)
    samples = limited[2].privacy.total
    carry(engine, old, limited)
    assert limited[2].privacy.total < samples
    kept = limited[2].privacy.total
    limited[0].load_state_dict(limited[0].state_dict())  # its own state again costs nothing
    assert limited[2].privacy.total == kept


def _plainly(module: nn.Module) -> Any:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("way", ["private", "its module", "a layer of it"])
def test_a_state_that_does_not_say_what_it_cost_is_refused(way: str) -> None:
    """Plain dictionaries, and what safetensors makes of one, forget it: loaded, two epochs were stated as one."""
    old, new = _loop(PrivacyEngine()), _loop(PrivacyEngine())
    _epoch(old)
    inner = new[0].module
    into = {"private": new[0], "its module": inner, "a layer of it": nn.Sequential(inner)[0]}[way]
    before = inner.weight.detach().clone()
    for state in (_plainly(old[0]), _plainly(old[0].module), dict(old[0].state_dict())):
        with pytest.raises(BudgetError, match="does not say what it cost"):
            into.load_state_dict(state)
    assert torch.equal(inner.weight, before)
    _epoch(new)
    assert new[2].privacy.epsilon() == pytest.approx(old[2].privacy.epsilon())


@pytest.mark.parametrize("way", ["private", "its module", "around it"])
def test_tensors_that_were_put_into_a_state_are_refused(way: str) -> None:
    """``state.update(others)`` keeps the metadata: it would say of the others' tensors what it says of its own."""
    old, new = _loop(PrivacyEngine()), _loop(PrivacyEngine())
    _epoch(old)
    inner = new[0].module
    into = {"private": new[0], "its module": inner, "around it": nn.Sequential(inner, nn.Linear(1, 1))}[way]
    before = inner.weight.detach().clone()
    for values in (_plainly(old[0]), {"weight": before + 1.0, "bias": before[0, :1]}):
        state = into.state_dict()
        state.update({f"0.{name}" if way == "around it" else name: value for name, value in values.items()})
        with pytest.raises(BudgetError, match="put in or changed"):
            into.load_state_dict(state)
    assert torch.equal(inner.weight, before)
    kept, live = copy.deepcopy(into.state_dict()), into.state_dict()
    _epoch(new)
    into.load_state_dict(live)  # no copy: what the module holds by now
    assert not torch.equal(inner.weight, before)
    into.load_state_dict(kept)
    assert torch.equal(inner.weight, before)


def test_a_layer_of_a_private_model_takes_no_state_without_its_cost() -> None:
    x = torch.randn(40, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    private, _, _ = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, epochs=1,
        data_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=10), max_grad_norm=1.0,
    )  # fmt: skip
    with pytest.raises(BudgetError, match="does not say what it cost"):
        model[0].load_state_dict(nn.Linear(3, 4).state_dict())
    model.load_state_dict(copy.deepcopy(private.state_dict()))  # its own, all parts of it marked


def _next_loop(module: nn.Module, **settings: Any) -> Any:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    return PrivacyEngine().make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.01), epochs=2,
        data_loader=DataLoader(TensorDataset(x, x[:, :1]), batch_size=20), noise_multiplier=1.0, max_grad_norm=1.0,
        **settings,
    )  # fmt: skip


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _pickled(module: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(module))
    return loaded


def _with_a_head(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.Tanh(), nn.Linear(1, 1))


def _from_the_module(module: nn.Module) -> nn.Module:
    other = nn.Linear(3, 1)
    made = _next_loop(other)
    made[0].load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("carry", [_as_it_is, copy.deepcopy, _pickled, _with_a_head, _from_the_module])
def test_a_trained_module_brings_what_it_cost_into_the_next_loop(
    carry: Callable[[nn.Module], nn.Module],
) -> None:
    old = _loop(PrivacyEngine())
    _epoch(old)
    new = _next_loop(carry(old[0].module))
    assert new[2].privacy.epsilon() == pytest.approx(old[2].privacy.epsilon())
    _epoch(new)
    assert new[2].privacy.epsilon() > 1.1 * _loop_alone(old)


def _loop_alone(made: Any) -> float:
    cost = made[2].privacy.cost
    return epsilon_of([cost], 1e-5)


def test_loops_that_do_not_add_up_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    old = _loop(PrivacyEngine())
    _epoch(old)
    with pytest.raises(ValueError, match="do not add up"):
        _next_loop(old[0].module, relation="replace-one", ledger=tmp_path / "ledger.jsonl")
    assert not (tmp_path / "ledger.jsonl").exists()
    copied = copy.deepcopy(old[0].module)
    copied.load_state_dict(nn.Linear(3, 1).state_dict())  # a copy is no loop's: its owner may


def test_the_ledger_has_every_loop_that_a_state_went_through(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    old = _next_loop(nn.Linear(3, 1), ledger=path)
    for _ in range(2):
        _epoch(old)
    new = _next_loop(nn.Linear(3, 1), ledger=path)
    new[0].load_state_dict(old[0].state_dict())
    for _ in range(2):
        _epoch(new)
    spent = Ledger(path).spent("default", delta=1e-5, relation="add-remove").epsilon
    assert spent == pytest.approx(new[2].privacy.epsilon())
    assert spent > 1.1 * _loop_alone(old)


def test_continuations_of_one_checkpoint_keep_a_promise_together() -> None:
    engine = PrivacyEngine()
    begun = _loop(engine)
    _epoch(begun)
    promise = 1.3 * engine.get_epsilon(1e-5)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=begun[0])
    going = []
    for _ in range(2):
        other = PrivacyEngine()
        made = _loop(other, target_epsilon=promise)
        file.seek(0)
        other.load_checkpoint(path=file, module=made[0])
        going.append((other, made))
    refused = 0
    for _ in range(2):
        for _, made in going:
            try:
                _epoch(made)
            except BudgetError:
                refused += 1
    assert refused
    for other, made in going:
        assert other.get_epsilon(1e-5) <= promise
        assert made[2].privacy.epsilon() <= promise
