"""Attacks on what networks release, and on the bookkeeping of a user's own loop.

The distinguishers run the production session, in both worlds, with fresh secrets each time. In the second world the
first record is really gone: all others move up by one place, as they do when someone removes a row from a file.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.audit.distinguishers import PrivacyClaim, attack_profile, learned
from quietgrad.audit.report import AuditFinding, AuditReport
from quietgrad.audit.zoo import MODELS, Augmented, loss, table
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import QuietgradError
from quietgrad.objectives.base import Batch, ClippingRule, Gradient
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget
from quietgrad.privacy.ledger import Ledger
from quietgrad.torch.opacus import PrivacyEngine, make_private
from quietgrad.torch.private_loop import PrivateLoop

__all__ = ["audit_networks", "distinguish_fit", "distinguish_loop", "loop_probes", "probe_loop_charges",
           "probe_loop_conditions", "probe_loop_reuse"]  # fmt: skip

Floats = npt.NDArray[np.float64]
_BUDGET = Budget(4.0, 1e-5)
_ALPHA = 1e-6
_N = 50
_ONE = ClippingRule.gradient(1.0)


def audit_networks(runs: int) -> Iterator[AuditReport]:
    """Distinguishers on what a fit and an own loop release."""
    attacks: dict[str, Callable[[], tuple[Plan, AuditFinding]]] = {
        "network: a fit with dropout": lambda: distinguish_fit("dropout", runs),
        "network: a fit with augmentation": lambda: distinguish_fit("layers", runs, augmented=True),
        "network: an own loop with dropout": lambda: distinguish_loop(runs),
    }
    for name, attack in attacks.items():
        started = time.perf_counter()
        plan, finding = attack()
        yield AuditReport(
            algorithm=name,
            relation=_BUDGET.relation,
            delta=_BUDGET.delta,
            epsilon_claimed=plan.epsilon(),
            epsilon_lower=finding.epsilon_lower,
            confidence=1.0 - _ALPHA,
            runs=runs,
            seconds=time.perf_counter() - started,
            findings=(finding,),
        )


def distinguish_fit(name: str, runs: int, *, augmented: bool = False) -> tuple[Plan, AuditFinding]:
    """One step of gradient descent on all records, with and without the first, told apart by what is released."""
    from quietgrad.algorithms.dp_sgd import DPGD
    from quietgrad.training import plan as make_plan

    plan = make_plan(DPGD(steps=1), n=_N, budget=_BUDGET)
    torch.manual_seed(0)
    objective: Any = ModuleObjective(MODELS[name](), loss)
    x, y = _far(*table(_N))
    views = []
    for first in (0, 1):
        data = Augmented(x[first:], y[first:]) if augmented else (x[first:], y[first:])
        curator = CentralCurator(objective, data)
        query = Gradient(curator.initial(), 1.0)
        slot = plan.schedule.slots[0].name
        # Each session has a key of its own: samples, masks and noise are fresh.
        seen = [curator.open(plan).release(slot, query).double().numpy() for _ in range(runs)]
        views.append(np.stack(seen))
    what = f"network: {name}{', augmented' * augmented}, one release"
    return plan, attack_profile(_scores(objective, views), PrivacyClaim(plan), what, _ALPHA)


def distinguish_loop(runs: int) -> tuple[Plan, AuditFinding]:
    """As :func:`distinguish_fit`, for an own loop that never moves its parameters: each step is a run by itself."""
    from quietgrad.algorithms.dp_sgd import DPGD
    from quietgrad.training import plan as make_plan

    plan = make_plan(DPGD(steps=1), n=_N, budget=_BUDGET)
    x, y = _far(*table(_N))
    views = []
    for first in (0, 1):
        torch.manual_seed(0)
        data = TensorDataset(x[first:], y[first:])
        model = MODELS["dropout"]()
        private, optimizer, loader, criterion = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=1.0,
            data_loader=DataLoader(data, batch_size=len(data)), noise_multiplier=plan.noise_multiplier,
            criterion=lambda output, labels: loss(output, labels).sum(), loss_reduction="sum",
        )  # fmt: skip
        seen = []
        for _ in range(runs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                criterion(private(inputs), labels).backward()
                optimizer.step()
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            seen.append(torch.cat(grads).numpy())
        views.append(np.stack(seen))
    torch.manual_seed(0)
    scores = _scores(ModuleObjective(MODELS["dropout"](), loss), views)
    return plan, attack_profile(scores, PrivacyClaim(plan), "own loop: dropout, one step", _ALPHA)


def _far(x: Any, y: Any) -> tuple[Any, Any]:
    """The first record far out, so that its contribution is as long as it may be."""
    x = x.clone()
    x[0] = 3.0
    return x, y


def _scores(objective: Any, views: list[Floats]) -> tuple[Floats, Floats]:
    """What was released along the missing record's mean contribution, and along the difference that was seen.

    The attacker knows all records and the model: he can compute the first, and learns the second from a quarter of
    the runs; the better of the two is used.
    """
    x, y = _far(*table(_N))
    records = objective.prepare((x, y))
    mean = torch.zeros(records.dim, dtype=torch.float64)
    for k in range(64):
        objective.add(Batch(records, np.array([0]), bytes([k]) * 32), (objective.initial(records),), _ONE, mean)
    quarter = len(views[0]) // 4
    taught = [view[:quarter] for view in views]
    seen = taught[0].mean(0) - taught[1].mean(0)
    best = max((mean.numpy(), seen), key=lambda way: _apart(taught[0] @ way, taught[1] @ way))
    return learned(((views[0] @ best)[:, None], (views[1] @ best)[:, None]))


def _apart(a: Floats, b: Floats) -> float:
    # On runs that taught the direction itself it looks better than it is: half of them judge.
    half = len(a) // 2
    return float(abs(a[half:].mean() - b[half:].mean()) / (a[half:].std() + b[half:].std()))


def loop_probes() -> list[AuditFinding]:
    """The bookkeeping of own loops."""
    return [probe_loop_reuse(), probe_loop_conditions(), probe_loop_charges()]


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
    verdict = "violation" if accepted else "pass"
    note = f"accepted: {', '.join(accepted)}" if accepted else ""
    return AuditFinding("L0 reuse", "own loops", "accepted", 0.0, float(len(accepted)), verdict, note=note)  # type: ignore[arg-type]


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
    verdict = "violation" if silent else "pass"
    note = f"without a word: {', '.join(silent)}" if silent else ""
    return AuditFinding("L0 condition", "own loops", "silent", 0.0, float(len(silent)), verdict, note=note)  # type: ignore[arg-type]


def probe_loop_charges() -> AuditFinding:
    """The least ε said ÷ ε spent: skipped samples, earlier loops, seeded loops, states that were loaded."""
    from quietgrad.privacy.accounting import account
    from quietgrad.privacy.events import poisson_gaussian

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
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, QUIETGRAD_STATE=folder):
        file = os.path.join(folder, "checkpoint")
        first, second = PrivacyEngine(), PrivacyEngine()
        model, optimizer, loader = _made(first)
        next(iter(loader))
        first.save_checkpoint(path=file, module=model, optimizer=optimizer)
        model, optimizer, loader = _made(second)
        second.load_checkpoint(path=file, module=model, optimizer=optimizer)
        next(iter(loader))
        said.append(second.get_epsilon(1e-5) / spent(2))
    verdict = "violation" if min(said) < 1.0 - 1e-9 else "pass"
    return AuditFinding("L0 charge", "own loops", "share", 1.0, min(said), verdict)  # type: ignore[arg-type]
