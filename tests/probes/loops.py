"""The bookkeeping of custom loops: samples that serve twice, private batches that are read, and charges."""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.assurance.audit.networks import steep_table as table
from quietgrad.assurance.audit.report import AuditFinding
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import composed, poisson_gaussian
from quietgrad.core.errors import QuietgradError
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.methods.epoch_schedules import TableGradClip, TableNoise
from quietgrad.torch.loops.private_loop import PrivateLoop
from quietgrad.torch.opacus import PrivacyEngine, make_private
from tests.probes import found


def _made(engine: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    make: Callable[..., Any] = make_private if engine is None else engine.make_private
    return make(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(*table()), batch_size=20), max_grad_norm=1.0, **settings,
    )  # fmt: skip


def _opaque(**settings: Any) -> PrivateLoop:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    return PrivateLoop(
        model, nn.CrossEntropyLoss(), table(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=20,
        noise_multiplier=1.0, max_grad_norm=1.0, epochs=2, **settings,
    )  # fmt: skip


def _stepped_twice() -> None:
    model, optimizer, loader = _made()
    x, y = next(iter(loader))
    for _ in range(2):
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def _stepped_on_an_old_one() -> None:
    model, optimizer, loader, criterion = _made(criterion=nn.CrossEntropyLoss())
    batches = iter(loader)
    x, y = next(batches)
    next(batches)
    criterion(model(x), y).backward()
    optimizer.step()


def _two_iterators() -> None:
    model, optimizer, loader, criterion = _made(criterion=nn.CrossEntropyLoss())
    first, second = iter(loader), iter(loader)
    for batches in (first, second, first):
        x, y = next(batches)
        criterion(model(x), y).backward()
        optimizer.step()


def _opaque_twice() -> None:
    loop = _opaque()
    batch = next(iter(loop))
    for _ in range(2):
        loop.step(batch)


def _opaque_beyond_the_plan() -> None:
    loop = _opaque()
    for _ in range(2):
        for batch in loop:
            loop.step(batch)


_REUSES = {
    "two steps": _stepped_twice,
    "an old batch": _stepped_on_an_old_one,
    "two iterators": _two_iterators,
    "two steps, opaque": _opaque_twice,
    "beyond the plan": _opaque_beyond_the_plan,
}


def probe_loop_reuse() -> AuditFinding:
    """How many ways of using a sample twice, or more samples than were planned, a loop accepts."""
    accepted = []
    for name, attempt in _REUSES.items():
        try:
            attempt()
            accepted.append(name)
        except (QuietgradError, ValueError):
            continue
    return found("L0 reuse", "loops", "accepted", 0, len(accepted), ok=not accepted, note=", ".join(accepted))


_LOOKS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "a loss": lambda x, y, output, value: value.item(),
    "an accuracy": lambda x, y, output, value: (output.argmax(1) == y).sum(),
    "a size": lambda x, y, output, value: len(x),
    "a shape": lambda x, y, output, value: x.shape,
    "a batch statistic": lambda x, y, output, value: x - x.mean(0),
    "a scaled loss": lambda x, y, output, value: value / 2,
    "an array": lambda x, y, output, value: np.asarray(x),
    "a row": lambda x, y, output, value: y[0],
}


def probe_loop_conditions() -> AuditFinding:
    """How many ways of looking at private batches leave ε without its condition, in the loop or in its ledger."""
    silent = []
    for name, look in _LOOKS.items():
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, QUIETGRAD_STATE=folder):
            book = Ledger(os.path.join(folder, "ledger.jsonl"))
            model, _, loader, criterion = _made(criterion=nn.CrossEntropyLoss(), ledger=book, epochs=1)
            x, y = next(iter(loader))
            output = model(x)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                look(x, y, output, criterion(output, y))
            if loader.privacy.condition is None or not book.book().conditions("default"):
                silent.append(name)
    return found("L0 condition", "loops", "silent", 0, len(silent), ok=not silent, note=", ".join(silent))


def probe_loop_charges() -> AuditFinding:
    """The least ε said ÷ ε spent: skipped samples, earlier loops, seeded loops."""

    def spent(steps: int) -> float:
        event = poisson_gaussian(rate=0.5, noise_multiplier=1.0, steps=steps)
        return account(event, delta=1e-5, relation="add-remove")

    engine = PrivacyEngine()
    said = []
    for number in (1, 2):
        _, _, loader = _made(engine)
        for _ in loader:  # two samples, none of them stepped on
            pass
        said.append(engine.get_epsilon(1e-5) / spent(2 * number))
    said.append((loader.privacy.epsilon or 0.0) / spent(2))
    loop = _opaque()
    for _ in next(loop.epochs()):
        pass
    said.append((loop.privacy.epsilon or 0.0) / spent(2))
    said.append((loop.close().epsilon or 0.0) / spent(4))  # why it ended is not known
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, _, seeded = _made(seed=1)
    next(iter(seeded))
    said.append(1.0 if math.isinf(seeded.loop.epsilon()) and not seeded.privacy.is_private else 0.0)
    return found("L0 charge", "loops", "share", 1.0, min(said), ok=min(said) >= 1.0 - 1e-9)


def probe_loop_schedules() -> AuditFinding:
    """The least of: noise of a stretch ÷ the noise that is priced, and the ε of two epochs ÷ what they cost.

    Epochs have 1, ½ and 2 times the noise and C of 1, 3 and 1. A loss without gradient shows the noise: 1200
    numbers an epoch, whose deviation is within a tenth of its value but in one of 10⁶ runs.
    """
    noise, clips, multiplier = (1.0, 0.5, 2.0), (1.0, 3.0, 1.0), 1.0
    torch.manual_seed(0)
    loop = PrivateLoop(
        nn.Linear(19, 6), lambda output, y: 0.0 * output.sum(), (torch.randn(10, 19), torch.zeros(10)),
        batch_size=1, noise_multiplier=multiplier, max_grad_norm=1.0, epochs=3, n_public=10,
        noise_schedule=TableNoise(factors=noise), clip_schedule=TableGradClip(factors=clips),
    )  # fmt: skip
    released, stated = [], []
    for batch in loop:
        released.append(loop.backward(batch))
        stated.append(loop.epsilon())
    ratios = []
    for epoch, (factor, clip) in enumerate(zip(noise, clips, strict=True)):
        seen = torch.cat(released[10 * epoch : 10 * epoch + 10]).double()
        ratios.append(float(seen.square().mean().sqrt()) / (multiplier * factor * clip))
    parts = [poisson_gaussian(rate=0.1, noise_multiplier=multiplier * factor, steps=10) for factor in noise[:2]]
    spent = account(composed(parts), delta=1e-5, relation="add-remove")
    ratios.append(stated[19] / spent)
    worst = min(ratios)
    return found("L0 noise", "loops", "noise and ε of stretches ÷ stated", 1.0, worst, ok=worst > 0.9)
