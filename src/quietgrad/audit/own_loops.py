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

from quietgrad.audit.distinguish import Claim, Finding, attack_profile, learned
from quietgrad.audit.report import AuditReport
from quietgrad.audit.zoo import MODELS, Augmented, loss, table
from quietgrad.curators.central import CentralCurator
from quietgrad.errors import QuietgradError
from quietgrad.objectives.base import Batch, Gradient, Rule
from quietgrad.objectives.networks.module import ModuleObjective
from quietgrad.plans.schedule import Plan
from quietgrad.privacy.budget import Budget
from quietgrad.torch.opacus_verbs import make_private
from quietgrad.torch.privacy_engine import PrivacyEngine

__all__ = ["audit_networks", "distinguish_fit", "distinguish_loop", "loop_probes", "probe_loop_charges",
           "probe_loop_reuse"]  # fmt: skip

Floats = npt.NDArray[np.float64]
_BUDGET = Budget(4.0, 1e-5)
_ALPHA = 1e-6
_N = 50
_ONE = Rule.gradient(1.0)


def audit_networks(runs: int) -> Iterator[AuditReport]:
    """Distinguishers on what a fit and an own loop release."""
    attacks: dict[str, Callable[[], tuple[Plan, Finding]]] = {
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


def distinguish_fit(name: str, runs: int, *, augmented: bool = False) -> tuple[Plan, Finding]:
    """One step of gradient descent on all records, with and without the first, told apart by what is released."""
    from quietgrad.algorithms.dp_gd import DPGD
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
    return plan, attack_profile(_scores(objective, views), Claim(plan), what, _ALPHA)


def distinguish_loop(runs: int) -> tuple[Plan, Finding]:
    """As :func:`distinguish_fit`, for an own loop that never moves its parameters: each step is a run by itself."""
    from quietgrad.algorithms.dp_gd import DPGD
    from quietgrad.training import plan as make_plan

    plan = make_plan(DPGD(steps=1), n=_N, budget=_BUDGET)
    x, y = _far(*table(_N))
    views = []
    for first in (0, 1):
        torch.manual_seed(0)
        data = TensorDataset(x[first:], y[first:])
        model = MODELS["dropout"]()
        private, optimizer, loader = make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loss_reduction="sum",
            data_loader=DataLoader(data, batch_size=len(data)), max_grad_norm=1.0,
            noise_multiplier=plan.noise_multiplier,
        )  # fmt: skip
        seen = []
        for _ in range(runs):
            for inputs, labels in loader:
                optimizer.zero_grad()
                torch.autograd.backward(loss(private(inputs), labels).sum())
                optimizer.step()
            grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
            seen.append(torch.cat(grads).numpy())
        views.append(np.stack(seen))
    torch.manual_seed(0)
    scores = _scores(ModuleObjective(MODELS["dropout"](), loss), views)
    return plan, attack_profile(scores, Claim(plan), "own loop: dropout, one step", _ALPHA)


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


def loop_probes() -> list[Finding]:
    """The bookkeeping of own loops."""
    return [probe_loop_reuse(), probe_loop_charges()]


def _made(engine: Any = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    make: Callable[..., Any] = make_private if engine is None else engine.make_private
    settings.setdefault(
        "loss_reduction", "mean"
    )  # vouched for: refusing the loss must not hide what else is accepted
    return make(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        data_loader=DataLoader(TensorDataset(*table()), batch_size=20), max_grad_norm=1.0, **settings,
    )  # fmt: skip


def _fed_twice(model: Any, optimizer: Any, loader: Any) -> None:
    x, y = next(iter(loader))
    for _ in range(2):
        torch.autograd.backward(F.cross_entropy(model(x[: len(x) // 2]), y[: len(x) // 2]))
    optimizer.step()


def _mixed_up(model: Any, optimizer: Any, loader: Any) -> None:
    x, y = next(iter(loader))
    torch.autograd.backward(F.cross_entropy(model(0.5 * x + 0.5 * x.flip(0)), y))
    optimizer.step()


def _stepped_twice(model: Any, optimizer: Any, loader: Any) -> None:
    x, y = next(iter(loader))
    for _ in range(2):
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def _two_iterators(model: Any, optimizer: Any, loader: Any) -> None:
    first, second = iter(loader), iter(loader)
    kept = []
    for batches in (first, second, first):
        x, y = next(batches)
        kept.append(x)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()


_REUSES = {
    "a piece fed twice": _fed_twice,
    "mixup": _mixed_up,
    "two steps": _stepped_twice,
    "two iterators": _two_iterators,
}


def probe_loop_reuse() -> Finding:
    """How many ways of letting a record contribute twice to a step, or to a sample, a loop accepts."""
    accepted = []
    for name, attempt in _REUSES.items():
        try:
            attempt(*_made())
            accepted.append(name)
        except (QuietgradError, ValueError):
            continue
    verdict = "violation" if accepted else "pass"
    note = f"accepted: {', '.join(accepted)}" if accepted else ""
    return Finding("L0 reuse", "own loops", "accepted", 0.0, float(len(accepted)), verdict, note=note)  # type: ignore[arg-type]


def probe_loop_charges() -> Finding:
    """The least ε said ÷ ε spent: skipped samples, earlier loops, seeded loops, states that went on elsewhere."""
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
    said.append(loader.privacy.epsilon() / spent(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, _, seeded = _made(seed=1)
    next(iter(seeded))
    said.append(1.0 if math.isinf(seeded.privacy.epsilon()) else 0.0)
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, QUIETGRAD_STATE=folder):
        loops = [_made() for _ in range(3)]
        next(iter(loops[0][2]))
        state = loops[0][1].state_dict()
        for _, optimizer, loader in loops[1:]:  # one state, and two that go on from it
            optimizer.load_state_dict(state)
            next(iter(loader))
        said += [loader.privacy.epsilon() / spent(3) for _, _, loader in loops]
    verdict = "violation" if min(said) < 1.0 - 1e-9 else "pass"
    return Finding("L0 charge", "own loops", "share", 1.0, min(said), verdict)  # type: ignore[arg-type]
