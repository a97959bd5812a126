"""Certificates: eigenvalues against dense references, exact products of linear models, verdicts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.objectives.landscapes.base import landscape
from quietgrad.objectives.tables import curvature
from quietgrad.training.stationarity import classify, least_eigenvalue


@pytest.mark.parametrize("dim", [3, 64, 65, 300])
def test_least_eigenvalue_matches_a_dense_solver(dim: int) -> None:
    rng = np.random.default_rng(dim)
    a = rng.standard_normal((dim, dim))
    a = a + a.T
    for matrix in (a, a @ a, -(a @ a), np.diag(np.linspace(-1e-3, 1e3, dim))):
        expected = np.linalg.eigvalsh(matrix)[0]
        scale = float(np.abs(np.linalg.eigvalsh(matrix)).max())
        assert least_eigenvalue(matrix.__matmul__, np.zeros(dim)) == pytest.approx(expected, abs=1e-5 * scale)


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


def table() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((60, 4)), rng


OBJECTIVES = qg.objectives
SMOOTH = [
    OBJECTIVES.Logistic(regularizer=OBJECTIVES.Nonconvex(0.3, unpenalized=1), intercept=True),
    OBJECTIVES.Logistic(regularizer=OBJECTIVES.L2(0.2), row_bound=1.0, rows="clip"),
    OBJECTIVES.Squared(intercept=True, intercept_scale=2.0),
    OBJECTIVES.Multinomial(3, regularizer=OBJECTIVES.L2(0.1)),
    OBJECTIVES.Logistic().transformed(np.full(4, 0.5), np.array([1.0, 2.0, 0.5, 1.0])),
]


@pytest.mark.parametrize("objective", SMOOTH, ids=lambda o: type(o).__name__)
def test_products_of_linear_models_match_differences_of_gradients(objective: Any) -> None:
    X, rng = table()
    y = rng.integers(0, objective.outputs if objective.outputs > 1 else 2, 60).astype(float)
    records = objective.prepare((X, y))
    params, vector = (0.5 * rng.standard_normal(records.dim) for _ in range(2))
    h = 1e-5
    ahead, behind = (objective.risk_gradient(records, params + s * h * vector) for s in (1, -1))
    assert curvature.covers(objective)
    np.testing.assert_allclose(
        curvature.hessian_product(objective, records, params, vector), (ahead - behind) / (2 * h), atol=1e-8
    )


def test_products_where_the_curvature_jumps() -> None:
    X, rng = table()
    y = (X[:, 0] > 0).astype(float)
    for objective in (OBJECTIVES.Huber(0.5), OBJECTIVES.Hinge(0.7)):
        records = objective.prepare((X, y))
        params, vector = (0.3 * rng.standard_normal(4) for _ in range(2))
        h = 1e-9  # within every record's piece
        ahead, behind = (objective.risk_gradient(records, params + s * h * vector) for s in (1, -1))
        np.testing.assert_allclose(
            curvature.hessian_product(objective, records, params, vector), (ahead - behind) / (2 * h), atol=1e-6
        )


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


def test_torch_vectors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    a = torch.diag(torch.tensor([-0.25, 1.0], dtype=torch.float64))
    found = qg.certify(Plain(a), torch.zeros(2, dtype=torch.float64), "data", rho=1.0)
    assert found.lambda_min == pytest.approx(-0.25, abs=1e-8)


def test_a_module_is_differentiated_twice() -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    from quietgrad.objectives.networks.module import ModuleObjective

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
