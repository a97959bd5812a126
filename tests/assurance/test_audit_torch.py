"""Audits of torch modules: the per-example engine on adversarial images, and one run with planted canaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import quietgrad as qg
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.session.queries import GradientQuery, JointMomentumQuery, Query, RecursiveMomentumQuery
from tests.mutations.broken import Broken
from tests.probes.records import probe_sensitivity

torch = pytest.importorskip("torch")


def objective() -> Any:
    from quietgrad.torch.networks.module import ModuleObjective

    torch.manual_seed(0)
    conv = torch.nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    module = torch.nn.Sequential(conv, torch.nn.Flatten())
    return ModuleObjective(module, torch.nn.CrossEntropyLoss(reduction="none"))


def images(seed: int, count: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 4, 4, generator=generator), torch.randint(0, 16, (count,), generator=generator)


def neighbours(relation: Relation) -> Iterator[tuple[Any, Any]]:
    """Images of all sizes, some with mass on the border only: there wrong padding shows most."""
    for seed in range(6):
        x, y = images(seed, 3)
        x[-1] *= 10.0 ** (seed % 4 - 1)
        if seed % 2:
            x[-1, :, 1:-1, 1:-1] = 0.0
        if relation is Relation.ADD_REMOVE:
            yield (x, y), (x[:-1], y[:-1])
        else:
            yield (x, y), (torch.cat([x[:-1], -x[-1:]]), torch.cat([y[:-1], (y[-1:] + 8) % 16]))


@pytest.mark.parametrize("relation", list(Relation))
def test_clipped_sums_of_a_circular_convolution_keep_their_bound(relation: Relation) -> None:
    """Ghost norms that take the padding for zeros exceed the bound fivefold here (reproduce/audit_peers.py)."""
    loss = objective()

    def queries(records: Any) -> Iterator[Query]:
        theta = loss.initial(records)
        yield GradientQuery(theta, 1.0)
        yield RecursiveMomentumQuery(theta, -theta, 0.1, 1.0, 0.2)
        yield JointMomentumQuery(theta, 0.5 * theta, 0.1, 0.28)

    found = probe_sensitivity(loss, neighbours(relation), queries, relation)
    assert found.verdict == "pass", found
    assert found.measured > 0.7  # the probe does reach the clip


@pytest.mark.parametrize(("noise", "verdict"), [(1.0, "pass"), (0.5, "violation")])
def test_one_run_of_a_module(noise: float, verdict: str) -> None:
    report = qg.audit.one_run(
        objective(), images(9, 60), qg.DPSRM(steps=5, batch_size=1060), budget=qg.Budget(8.0, 1e-5), seed=1,
        curator=Broken(noise=noise),
    )  # fmt: skip
    assert report.verdict == verdict, str(report)
