"""Layer L0: what one record contributes, by brute force.

Every sum of gradients is α·clip_A(g − βg′) + γ·clip_B(g), and clipping means the Euclidean ball: a record's
contribution is its own gradient, shortened if it is too long. Here each record is asked alone, its gradients
without any clip, and what it should contribute is worked out anew. Clipping coordinates one by one, a norm of
another kind, or a direction that was bent all show.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.audit.canaries import shorten
from quietgrad.audit.neighbours import labels
from quietgrad.audit.replicas import as_numbers
from quietgrad.audit.report import AuditFinding
from quietgrad.objectives.base import Batch, ClippingRule
from quietgrad.privacy.rng import seed_key
from quietgrad.vectors import Vector, zeros_like

Floats = npt.NDArray[np.float64]
_FREE = 1e30  # a clip that nothing reaches
_FLOAT_SLACK = 1e-9
_BENT = 1e-3  # of the bound: float32 kernels clip a little shorter than they may

RULES = (
    ClippingRule.gradient(1.0),
    ClippingRule.gradient(0.05),
    ClippingRule.difference(0.2),
    ClippingRule.momentum(0.1, 1.0, 0.2),
    ClippingRule.joint(0.1, 0.3),
)


def probe_clip(
    objective: Any, data: Any, points: Iterable[tuple[Any, Any]] | None = None, what: str = "objective"
) -> AuditFinding:
    """The worst of every record's contribution: its length in units of the bound, and how far from the right one.

    >>> from quietgrad.objectives import Logistic
    >>> probe_clip(Logistic(), adversarial_table(Logistic())).verdict
    'pass'
    """
    records = objective.prepare(data)
    longest = bent = 0.0
    for pair, rule in itertools.product(points or _points(objective, records), RULES):
        wanted = [contribution(objective, records, i, pair, rule) for i in range(len(records))]
        given = [_sum(objective, records, np.array([i]), pair, rule) for i in range(len(records))]
        together = _sum(objective, records, None, pair, rule)
        longest = max(longest, *(float(np.linalg.norm(g)) / rule.bound for g in given))
        pairs = zip([*given, together], [*wanted, sum(wanted)], strict=True)
        bent = max(bent, *(float(np.linalg.norm(g - w)) / rule.bound for g, w in pairs))
    wrong = not (longest <= 1.0 + _FLOAT_SLACK and bent <= _BENT)  # NaN is wrong too
    note = f"{bent:.2g} of the bound away from what the L2 ball leaves" if wrong else ""
    return AuditFinding("L0 clip", what, "C", 1.0, longest, "violation" if wrong else "pass", note=note)


def contribution(objective: Any, records: Any, i: int, points: tuple[Any, Any], rule: ClippingRule) -> Floats:
    """What record ``i`` contributes by the definition, from its two gradients without a clip."""
    now, before = (_sum(objective, records, np.array([i]), (x, x), ClippingRule.gradient(_FREE)) for x in points)
    moved = shorten((now - rule.beta * before)[None], rule.clip)[0]
    wanted: Floats = rule.alpha * moved + rule.gamma * shorten(now[None], rule.second_clip)[0]
    return wanted


def _sum(objective: Any, records: Any, indices: Any, points: tuple[Any, Any], rule: ClippingRule) -> Floats:
    like: Vector = objective.initial(records)
    out = zeros_like(like)
    objective.add(Batch(records, indices, seed_key(0)), points if rule.beta else points[:1], rule, out)
    return as_numbers(out)


def _points(objective: Any, records: Any, seed: int = 3) -> Iterator[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    start = objective.initial(records)
    for scale in (0.3, 5.0):
        a, b = (scale * rng.standard_normal(len(start)) for _ in range(2))
        if isinstance(start, np.ndarray):
            yield a.astype(start.dtype), b.astype(start.dtype)
        else:
            yield start.new_tensor(a), start.new_tensor(b)


def adversarial_table(objective: Any, *, features: int = 5, seed: int = 0, dtype: Any = np.float64) -> Any:
    """A few rows of all lengths from 10⁻² to 10³, and labels for them."""
    rng = np.random.default_rng(seed)
    lengths = [1e-2, 0.3, 1.0, 3.0, 30.0, 1e3]
    rows = rng.standard_normal((len(lengths), features))
    rows *= (np.array(lengths) / np.linalg.norm(rows, axis=1) * (1.0 - 1e-9))[:, None]
    return rows.astype(dtype), labels(objective, rng, len(lengths))


def probe_clips() -> Iterator[AuditFinding]:
    """Every registered loss on tables, dense and sparse, and a network if torch is there."""
    from importlib.util import find_spec

    import scipy.sparse as sparse

    from quietgrad.objectives.registry import TABLE_LOSSES

    for name, entry in TABLE_LOSSES.items():
        for intercept in (False, True):
            objective = entry.make_example(intercept=intercept)
            X, y = adversarial_table(objective)
            yield probe_clip(objective, (X, y), what=f"{name}{', intercept' if intercept else ''}")
            if not intercept:
                yield probe_clip(objective, (sparse.csr_array(X), y), what=f"{name}, sparse")
    if find_spec("torch") is not None:
        yield probe_clip(*small_network(), what="module")


def small_network() -> tuple[Any, Any]:
    """A network with a hidden layer and records of all sizes."""
    import torch

    from quietgrad.objectives.networks.module import ModuleObjective

    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    X = torch.randn(5, 4, generator=generator) * torch.tensor([0.01, 0.3, 1.0, 10.0, 1e3])[:, None]
    loss = partial(torch.nn.functional.cross_entropy, reduction="none")
    return ModuleObjective(module, loss), (X, torch.tensor([0, 1, 0, 1, 1]))
