"""Certificates: eigenvalues against dense references, exact products of linear models, verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reproduce.landscapes import landscape

import quietgrad as qg
from quietgrad.methods.stationarity import certify_privately, classify, extreme_eigenvalues
from quietgrad.tables import full_batch
from quietgrad.tables.table import Affine


@pytest.mark.parametrize("dim", [3, 65, 300])
def test_least_eigenvalue_matches_a_dense_solver(dim: int) -> None:
    rng = np.random.default_rng(dim)
    a = rng.standard_normal((dim, dim))
    a = a + a.T
    for matrix in (a, a @ a, -(a @ a), np.diag(np.linspace(-1e-3, 1e3, dim))):
        expected = np.linalg.eigvalsh(matrix)[0]
        scale = float(np.abs(np.linalg.eigvalsh(matrix)).max())
        assert extreme_eigenvalues(matrix.__matmul__, np.zeros(dim))[0] == pytest.approx(expected, abs=1e-5 * scale)


@pytest.mark.parametrize("d", [10, 1000])
def test_saddle_and_minimum_of_a_landscape(d: int) -> None:
    hill = landscape("strict-saddle", d=d)
    saddle, minimum = qg.certify(hill, hill.saddle()), qg.certify(hill, hill.minimum())
    assert (saddle.kind, minimum.kind) == ("saddle", "sosp")
    assert saddle.lambda_min == pytest.approx(-1.0, abs=1e-5)
    assert minimum.lambda_min == pytest.approx(1.0, abs=1e-5)
    assert "saddle at α=0.01" in str(saddle)
    sampled = qg.certify(hill, hill.saddle(), 50_000, alpha=0.05)
    assert sampled.kind == "saddle"
    assert sampled.lambda_min == pytest.approx(-1.0, abs=0.01)


def test_kinds() -> None:
    assert classify(0.2, 1.0, 0.1, 1.0) == "none"
    assert classify(math.nan, 1.0, 0.1, 1.0) == "none"
    assert classify(0.1, -1.0, 0.1, None) == "fosp"
    assert classify(0.1, -0.4, 0.1, 1.0) == "saddle"
    assert classify(0.1, -0.3, 0.1, 1.0) == "sosp"


OBJECTIVES = qg.objectives
SMOOTH = [
    (OBJECTIVES.Logistic(regularizer=OBJECTIVES.Nonconvex(0.3, unpenalized=1), intercept=True), 1e-5),
    (OBJECTIVES.Logistic(regularizer=OBJECTIVES.L2(0.2), row_bound=1.0, rows="clip"), 1e-5),
    (OBJECTIVES.Squared(intercept=True, intercept_scale=2.0), 1e-5),
    (OBJECTIVES.Multinomial(3, regularizer=OBJECTIVES.L2(0.1)), 1e-5),
    (OBJECTIVES.Logistic(transform=Affine(np.full(4, 0.5), np.array([1.0, 2.0, 0.5, 1.0]))), 1e-5),
    # Where the curvature jumps, the difference stays within every record's piece.
    (OBJECTIVES.Huber(0.5), 1e-9),
    (OBJECTIVES.Hinge(0.7), 1e-9),
]


@pytest.mark.parametrize(("objective", "h"), SMOOTH, ids=lambda o: type(o).__name__)
def test_products_of_linear_models_match_differences_of_gradients(objective: Any, h: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4))
    y = rng.integers(0, objective.outputs if objective.outputs > 1 else 2, 60).astype(float)
    records = objective.prepare((X, y))
    params, vector = (0.4 * rng.standard_normal(records.dim) for _ in range(2))
    ahead, behind = (objective.risk_gradient(records, params + s * h * vector) for s in (1, -1))
    assert full_batch.covers(objective)
    product = full_batch.hessian_product(objective, records, params, vector)
    np.testing.assert_allclose(product, (ahead - behind) / (2 * h), atol=1e-8 if h > 1e-6 else 1e-6)


class Plain:
    """A loss known by its gradient only: F = ½xᵀAx."""

    def __init__(self, a: Any) -> None:
        self.a = a

    def prepare(self, data: Any) -> Any:
        return data

    def risk_gradient(self, records: Any, params: Any) -> Any:
        return self.a @ params


def test_a_loss_known_by_its_gradient_only_is_differenced() -> None:
    a = np.diag(np.array([-0.5, 1.0, 2.0]))
    found = qg.certify(Plain(a), np.zeros(3), "data", alpha=0.1)
    assert found.lambda_min == pytest.approx(-0.5, abs=1e-8)
    assert found.kind == "fosp"  # no ρ is known
    assert qg.certify(Plain(a), np.zeros(3), "data", alpha=0.1, rho=1.0).kind == "saddle"
    torch = pytest.importorskip("torch")  # vectors of torch are taken as they are
    found = qg.certify(Plain(torch.from_numpy(a)), torch.zeros(3, dtype=torch.float64), "data", rho=1.0)
    assert found.lambda_min == pytest.approx(-0.5, abs=1e-8)


def test_a_module_is_differentiated_twice() -> None:
    torch = pytest.importorskip("torch")  # nothing is stated of a module: its own Hessian is looked at
    from torch import nn

    from quietgrad.torch.networks.module import ModuleObjective

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    penalty = qg.objectives.Nonconvex(0.05)
    loss = ModuleObjective(module, nn.CrossEntropyLoss(reduction="none"), regularizer=penalty, micro_batch=16)
    data = (torch.randn(50, 3, dtype=torch.float64), torch.randint(0, 2, (50,)))
    records = loss.prepare(data)
    theta = loss.initial(records)
    slopes = []
    for row in torch.eye(len(theta), dtype=torch.float64) * 1e-5:
        ahead, behind = (loss.risk_gradient(records, theta + s * row) for s in (1, -1))
        slopes.append(((ahead - behind) / 2e-5).numpy())
    expected = np.linalg.eigvalsh(np.array(slopes))[0]
    found = qg.certify(loss, theta, data, alpha=1.0, rho=1.0)
    assert found.lambda_min == pytest.approx(expected, abs=1e-7)
    assert found.gradient_norm == pytest.approx(float(loss.risk_gradient(records, theta).norm()))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    # All units alike: for a module, too, a symmetric point is stationary up to the output bias, and bends down.
    flat = qg.certify(loss, loss.initial(records), data, alpha=1.0, rho=1e-6)
    assert flat.kind == "saddle"


def test_bad_input_is_refused() -> None:
    hill = landscape("strict-saddle", d=3)
    with pytest.raises(ValueError, match="alpha=0"):
        qg.certify(hill, hill.saddle(), alpha=0.0)
    with pytest.raises(ValueError, match="only a landscape has a population risk"):
        qg.certify(qg.objectives.Logistic(), np.zeros(3))


def test_a_level_that_lets_every_saddle_pass_gives_no_verdict() -> None:
    """√(ρα) = 1.2 where the saddle curves by 0.5: it was called second-order stationary."""
    net = landscape("two-layer")
    found = qg.certify(net, net.saddle(), alpha=0.01)
    assert found.kind == "fosp"
    assert found.curvature == pytest.approx(0.4975, abs=1e-4)
    assert "no verdict on curvature" in str(found)
    assert qg.certify(net, net.saddle(), alpha=1e-4).kind == "saddle"
    assert qg.certify(net, net.minimum(), alpha=0.01).kind == "sosp"  # nothing curves down: so it is at every α


def test_on_a_table_the_penalty_counts_in_rho() -> None:
    """The penalty alone curves down, by λ/2 at most; α = 0.2 lets more than that pass."""
    loss = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(0.33), row_bound=0.5, rows="clip")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    X /= np.linalg.norm(X, axis=1, keepdims=True) * 2
    data = X, rng.integers(0, 2, 200)
    found = qg.certify(loss, np.array([3.0, -3.0]), data, alpha=0.2)
    assert found.rho == pytest.approx(4.6687 * 0.33 + 0.5**3 * 0.0962, rel=1e-3)
    assert (found.kind, found.curvature) == ("fosp", 0.165)
    assert found.lambda_min < 0.0
    assert qg.certify(loss, np.zeros(2), data, alpha=0.2).kind == "sosp"


def test_a_private_certificate_has_the_noise_it_states(tmp_path: Path) -> None:
    """Both numbers over 60 seeds: their spread is the stated error within 50 % (false alarm below 1e-6)."""
    hill, budget = landscape("strict-saddle", d=5), qg.Budget(2.0, 1e-6, qg.Relation.REPLACE_ONE)
    records, ledger = hill.prepare(20_000), tmp_path / "ledger.jsonl"
    asked: dict[str, Any] = {"budget": budget, "alpha": 0.03}
    found = [certify_privately(hill, hill.saddle(), records, **asked, seed=seed) for seed in range(60)]
    exact = qg.certify(hill, hill.saddle(), records)
    for number, error in (("gradient_norm", "gradient_error"), ("lambda_min", "curvature_error")):
        values, stated = np.array([getattr(each, number) for each in found]), getattr(found[0], error)
        assert float(values.std()) == pytest.approx(stated, rel=0.5)
        assert float(values.mean()) == pytest.approx(getattr(exact, number), abs=6 * stated / math.sqrt(60))
    assert found[0].kind == "saddle"
    paid = certify_privately(hill, hill.minimum(), records, **asked, ledger=ledger)
    spent = qg.Ledger(ledger).spent("default", delta=1e-6, relation=qg.Relation.REPLACE_ONE)
    assert paid.privacy.epsilon == pytest.approx(spent.epsilon, rel=2e-3)
    X = np.random.default_rng(0).standard_normal((5000, 4)) / 4.0
    loss = qg.objectives.Logistic(regularizer=qg.objectives.Nonconvex(0.5), row_bound=2.0)
    data, point = (X, (X[:, 0] > 0).astype(float)), np.full(4, 1.5)  # the penalty bends down there
    noisy = certify_privately(loss, point, data, budget=qg.Budget(1000.0, 1e-6), seed=0)
    assert noisy.lambda_min == pytest.approx(qg.certify(loss, point, data).lambda_min, rel=1e-2)
