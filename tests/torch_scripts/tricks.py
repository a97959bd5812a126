"""Schedulers, averages, early stops, clipping and the other tricks of training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from quietgrad.training.result import Privacy
from tests.torch_scripts import script
from tests.torch_scripts.tables import mlp, table
from tests.torch_scripts.vision import CLASSES, all_steps, loop_of, sgd, verbs


@script()
def step_scheduler() -> Privacy:
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), epochs=3)
    assert loop.optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)
    for epoch in loop.epochs():
        for batch in epoch:
            loop.step(batch)
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.1 / 8)]
    return loop.privacy


@script()
def one_cycle_scheduler_in_opacus_verbs() -> Privacy:
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=nn.CrossEntropyLoss())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * len(loader))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return loader.privacy


@script()
def plateau_scheduler_on_public_validation() -> Privacy:
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), epochs=2)
    assert loop.optimizer is not None
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(loop.optimizer, patience=0)
    x, y = table().tensors
    for epoch in loop.epochs():
        for batch in epoch:
            loop.step(batch)
        with torch.no_grad():
            scheduler.step(F.cross_entropy(model(x), y))
    return loop.privacy


@script(conditional=True)
def plateau_scheduler_on_the_private_loss() -> Privacy:
    """What was read of private batches decides the rate: the ε says that this is not checked."""
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=nn.CrossEntropyLoss())
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
    return loader.privacy


@script()
def ema_by_averaged_model() -> Privacy:
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop = loop_of(model, nn.CrossEntropyLoss(), table())
    for batch in loop:
        loop.step(batch)
        average.update_parameters(model)
    average.eval()(table().tensors[0])
    return loop.privacy


@script()
def ema_of_a_wrapped_model() -> Privacy:
    """`AveragedModel` and `deepcopy` of what Opacus' verbs return."""
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=nn.CrossEntropyLoss())
    average, copied = AveragedModel(model), copy.deepcopy(model)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for slow, fast in zip(copied.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    copied.eval()(torch.randn(3, 6))
    return loader.privacy


@script()
def early_stopping_with_the_best_weights() -> Privacy:
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), epochs=3)
    x, y = table().tensors  # public
    best, best_loss, patience = copy.deepcopy(model.state_dict()), float("inf"), 0
    for epoch in loop.epochs():
        for batch in epoch:
            loop.step(batch)
        with torch.no_grad():
            value = float(F.cross_entropy(model(x), y))
        if value < best_loss:
            best, best_loss, patience = {k: v.clone() for k, v in model.state_dict().items()}, value, 0
        else:
            patience += 1
        if patience > 1:
            break
    model.load_state_dict(best)
    return loop.close()  # the whole plan is charged


@script()
def best_weights_within_the_loop() -> Privacy:
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=nn.CrossEntropyLoss())
    best = {k: v.clone() for k, v in model.state_dict().items()}
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        if number == 1:
            model.load_state_dict(best)
    return loader.privacy


@script(conditional=True)
def gradient_accumulation_opacus() -> Privacy:
    model, optimizer, loader = verbs(mlp(), table())
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if (number + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return loader.privacy


@script()
def gradient_norms_are_logged() -> Privacy:
    """What is released may be looked at."""
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table())
    assert loop.optimizer is not None
    norms = []
    for batch in loop:
        loop.backward(batch)
        norms.append({name: float(param.grad.norm()) for name, param in model.named_parameters()})  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=True)
    assert all(value > 0 for row in norms for value in row.values())
    return loop.privacy


@script()
def parameter_groups_and_weight_decay() -> Privacy:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[3].parameters(), "weight_decay": 0.1}]
    return all_steps(loop_of(model, nn.CrossEntropyLoss(), table(), optimizer=torch.optim.AdamW(groups, lr=1e-2)))


@script()
def two_optimizers() -> Privacy:
    model = mlp()
    first, second = sgd(model[0]), torch.optim.Adam(model[3].parameters())
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), optimizer=None)
    for batch in loop:
        loop.backward(batch)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return loop.privacy


@script(conditional=True)
def operations_on_rows_before_the_model() -> Privacy:
    model, optimizer, loader = verbs(nn.Linear(7, CLASSES), table())
    for x, y in loader:
        x = F.normalize((x - 0.1).clamp(-2, 2).float(), dim=1)
        x = torch.cat([x, x.norm(dim=1, keepdim=True)], 1)[:, torch.arange(7)]
        x = torch.where(x > 0, x, 0.1 * x) + torch.zeros_like(x) + 0.01 * torch.randn_like(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return loader.privacy
