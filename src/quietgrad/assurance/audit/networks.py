"""Audits of PyTorch networks: one release of a fit or of a custom loop, and many canaries in one loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from quietgrad.assurance.audit.noise_checks import check_normals
from quietgrad.assurance.audit.report import AuditReport
from quietgrad.assurance.audit.running import PrivacyClaim, attack_profile, learned
from quietgrad.assurance.audit.single_run import judge_guesses
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.methods import plan as make_plan
from quietgrad.methods.dp_sgd import DPGD
from quietgrad.torch import PrivateLoop
from quietgrad.torch.networks.module import ModuleObjective
from quietgrad.torch.opacus import make_private

Floats = npt.NDArray[np.float64]
World = tuple[Tensor, Tensor]
_ALPHA = 1e-6


def steep_loss(output: Tensor, y: Tensor) -> Tensor:
    """A steep loss of two classes: gradients are far beyond any clip."""
    return 30.0 * nn.functional.cross_entropy(output.flatten(1)[:, :2], y, reduction="none")


def steep_table(n: int = 40) -> World:
    """Records of eight features."""
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def fit_releases(plan: Plan, world: World, runs: int) -> Floats:
    """Make ``runs`` first releases of a fit with dropout."""
    curator = CentralCurator(ModuleObjective(_network(), steep_loss), world)
    query, slot = GradientQuery(curator.initial(), 1.0), plan.schedule.slots[0].name
    # Each session has a key of its own: samples, masks and noise are fresh.
    return np.stack([curator.open(plan).release(slot, query).double().numpy() for _ in range(runs)])


def loop_releases(plan: Plan, world: World, runs: int) -> Floats:
    """Make ``runs`` steps of a custom loop that never moves its parameters: each step is a run by itself."""
    model, data = _network(), TensorDataset(*world)
    private, optimizer, loader, criterion = make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=len(data)), noise_multiplier=plan.noise_multiplier,
        criterion=lambda output, labels: steep_loss(output, labels).sum(), loss_reduction="sum",
    )  # fmt: skip
    seen = []
    for _ in range(runs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(private(inputs), labels).backward()
            optimizer.step()
        grads = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
        seen.append(torch.cat(grads).numpy())
    return np.stack(seen)


def distinguish(releases: Callable[[Plan, World, int], Floats], runs: int) -> AuditReport:
    """Tell from one release on all records whether the first record is in the table.

    In the second world all other records move up by one place, as they do when a row is removed from a file. The
    first record is far out, so that its contribution is as long as it may be.
    """
    started = time.perf_counter()
    x, y = steep_table(50)
    x[0] = 3.0
    plan = make_plan(DPGD(steps=1), n=len(x), budget=Budget(4.0, 1e-5))
    scores = _scores((x, y), [releases(plan, (x[first:], y[first:]), runs) for first in (0, 1)])
    what = "one release of a fit with dropout" if releases is fit_releases else "one step of a loop with dropout"
    finding = attack_profile(scores, PrivacyClaim(plan), what, _ALPHA)
    return AuditReport.of(f"network: {what}", plan, [finding], runs=runs, started=started)


def _scores(world: World, views: list[Floats]) -> tuple[Floats, Floats]:
    """Project releases on the missing record's mean contribution, or on the difference that was seen.

    The attacker knows all records and the model, and can compute the first; he learns the second from a quarter of
    the runs. The better of the two is used.
    """
    objective = ModuleObjective(_network(), steep_loss)
    records = objective.prepare(world)
    mean, points = torch.zeros(records.dim, dtype=torch.float64), (objective.initial(records),)
    for k in range(64):
        objective.add(Batch(records, np.array([0]), bytes([k]) * 32), points, ClippingRule.gradient(1.0), mean)
    quarter = len(views[0]) // 4
    taught = [view[:quarter] for view in views]
    seen = taught[0].mean(0) - taught[1].mean(0)

    def apart(way: Floats) -> float:
        # On runs that taught the direction itself it seems better than it is: half of them judge.
        a, b = (view[quarter // 2 :] @ way for view in taught)
        return float(abs(a.mean() - b.mean()) / (a.std() + b.std()))

    best = max((mean.numpy(), seen), key=apart)
    return learned(((views[0] @ best)[:, None], (views[1] @ best)[:, None]))


def audit_networks(runs: int) -> Iterator[AuditReport]:
    """Attack one release of a fit, and one step of a custom loop."""
    for releases in (fit_releases, loop_releases):
        yield distinguish(releases, max(600, runs // 20))


def audit_loops(runs: int) -> Iterator[AuditReport]:
    """Attack a custom loop with many canaries in one run, and with records that have no gradient for 256 steps."""
    started, count = time.perf_counter(), max(400, runs // 2)
    coins = np.random.default_rng().random(count) < 0.5
    # Every canary has a weight of its own; those that are out have no gradient.
    transcript, plan = _loop(np.diag(coins.astype(np.float32)), steps=6)
    findings = judge_guesses(transcript.sum(axis=0), coins, PrivacyClaim(plan), count // 10, _ALPHA)
    silence, longer = _loop(np.zeros((8, 64), np.float32), steps=256)
    findings += check_normals(silence / longer.noise_multiplier, "steps of a loop")
    yield AuditReport.of("own-loop", plan, findings, runs=1, started=started)


def _loop(rows: npt.NDArray[np.float32], steps: int) -> tuple[Floats, Plan]:
    """Run a loop over ``rows``, each in every sample, and return its gradients in units of the clip."""
    plain, heard = nn.Linear(rows.shape[1], 1, bias=False), []
    data = TensorDataset(torch.from_numpy(rows), torch.zeros(len(rows)))
    with TemporaryDirectory() as folder:  # canaries are not charged to the ledger of the project
        loop = PrivateLoop(
            plain, lambda output, _: 1e3 * output.sum(), data, batch_size=len(rows), max_grad_norm=1.0,
            budget=Budget(6.0, 1e-5), steps=steps, n_public=len(rows), ledger=f"{folder}/ledger.jsonl",
        )  # fmt: skip
        loop.mean = False
        for batch in loop:
            plain.weight.grad = None
            loop.backward(batch)
            heard.append(torch.as_tensor(plain.weight.grad).double().numpy().ravel().copy())
    return np.stack(heard), loop.plan
