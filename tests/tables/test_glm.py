"""Every sum of every linear objective against a naive per-example implementation, in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sparse

from quietgrad.core.session.objectives import Batch, NoRegularizer
from quietgrad.core.session.queries import (
    GradientDifferenceQuery,
    GradientQuery,
    JointMomentumQuery,
    Query,
    RecursiveMomentumQuery,
)
from quietgrad.tables import full_batch
from quietgrad.tables.linear import LinearObjective
from quietgrad.tables.losses import Hinge, Huber, Logistic, Multinomial, Squared
from quietgrad.tables.regularizers import L2, Nonconvex
from quietgrad.tables.table import Affine

Floats = npt.NDArray[np.float64]
N, D, K = 37, 6, 3

LOSSES: dict[str, Callable[..., LinearObjective]] = {
    "logistic": Logistic,
    "multinomial": lambda **options: Multinomial(K, **options),
    "huber": lambda **options: Huber(0.7, **options),
    "squared": Squared,
    "hinge": lambda **options: Hinge(0.3, **options),
}
LAYOUTS = list(product(["dense", "csr"], ["float32", "float64"]))
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "intercept": {"intercept": True, "intercept_scale": 0.7},
    "centred": {"intercept": True},
    "clipped rows": {"intercept": True, "row_bound": 1.5, "rows": "clip"},
    "unit rows": {"row_bound": 2.0, "rows": "normalize"},
    "all at once": {"intercept": True, "row_bound": 1.2, "rows": "clip"},
}


def features(rng: np.random.Generator, dtype: str) -> Floats:
    X = rng.normal(size=(N, D)) * (rng.random((N, D)) < 0.6)
    X[3] = 0.0
    return np.asarray(X.astype(dtype), dtype=np.float64)


def targets(rng: np.random.Generator, loss: str) -> npt.NDArray[Any]:
    if loss == "multinomial":
        return rng.integers(0, K, N)
    return rng.integers(0, 2, N) if loss in ("logistic", "hinge") else rng.normal(size=N)


def build(loss: str, shape: str, rng: np.random.Generator) -> LinearObjective:
    objective = LOSSES[loss](**SHAPES[shape])
    if shape in ("centred", "all at once"):
        objective = replace(objective, transform=Affine(rng.normal(size=D) * 0.5, rng.uniform(0.5, 2.0, size=D)))
    return objective


def seen_rows(objective: LinearObjective, X: Floats) -> Floats:
    """The rows a model sees, written out."""
    if objective.transform is not None:
        X = (X - objective.transform.shift) * objective.transform.scale
    if objective.row_bound is not None:
        norms = np.linalg.norm(X, axis=1, keepdims=True)
        factor = objective.row_bound / np.where(norms == 0, np.inf, norms)
        X = X * np.where(norms == 0, 1.0, factor if objective.rows == "normalize" else np.minimum(1.0, factor))
    column = np.full((len(X), 1), objective.intercept_scale)
    return np.hstack([X, column]) if objective.intercept else X


def clipped(g: Floats, clip: float) -> Floats:
    length = float(np.linalg.norm(g))
    return g * (clip / length) if length > clip else g


def laid_out(X: Floats, layout: str, dtype: str) -> Any:
    return sparse.csr_array(X.astype(dtype)) if layout == "csr" else X.astype(dtype)


def added(objective: LinearObjective, records: Any, indices: Any, query: Query) -> Floats:
    out = np.ones(records.dim)  # sums are added, not assigned
    query.sum_into(objective, Batch(records, indices), out)
    return out - 1.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_sum_equals_the_naive_one(loss: str, shape: str) -> None:
    for layout, dtype in LAYOUTS:
        rng = np.random.default_rng(7)
        objective = build(loss, shape, rng)
        X, y = features(rng, dtype), targets(rng, loss)
        records = objective.prepare((laid_out(X, layout, dtype), y))
        plain = LOSSES[loss]()  # its formulas are tested against finite differences; here, sums of single records
        each = [plain.prepare((row[None], y[i : i + 1])) for i, row in enumerate(seen_rows(objective, X))]
        theta, previous = rng.normal(size=records.dim), rng.normal(size=records.dim)
        gradients = [[plain.risk_gradient(one, at) for one in each] for at in (theta, previous)]
        batch = rng.choice(N, 15, replace=False)
        for indices in (None, batch, batch[:0], np.array([5, 5])):
            chosen = range(N) if indices is None else indices
            now, then = ([found[i] for i in chosen] for found in gradients)
            zero = np.zeros(records.dim)

            answer = partial(added, objective, records, indices)
            for clip in (0.0, 0.4, math.inf):
                expected = sum((clipped(g, clip) for g in now), zero)
                np.testing.assert_allclose(answer(GradientQuery(theta, clip)), expected, atol=1e-10)
                expected = sum((clipped(g - h, clip) for g, h in zip(now, then, strict=True)), zero)
                np.testing.assert_allclose(
                    answer(GradientDifferenceQuery(theta, previous, clip)), expected, atol=1e-10
                )
            expected = sum(
                (0.8 * clipped(g - h, 0.3) + 0.2 * clipped(g, 0.5) for g, h in zip(now, then, strict=True)), zero
            )
            got = answer(RecursiveMomentumQuery(theta, previous, 0.2, 0.5, 0.3))
            np.testing.assert_allclose(got, expected, atol=1e-10)
            expected = sum((clipped(g - 0.8 * h, 0.5) for g, h in zip(now, then, strict=True)), zero)
            got = answer(JointMomentumQuery(theta, previous, 0.2, 0.5))
            np.testing.assert_allclose(got, expected, atol=1e-10)
            losses = [plain.risk(each[i], theta) for i in chosen]
            assert objective.loss_sum(Batch(records, indices), theta, 0.9) == pytest.approx(
                sum(min(value, 0.9) for value in losses), abs=1e-10
            )


@pytest.mark.parametrize("regularizer", [L2(0.3), L2(0.3, unpenalized=2), Nonconvex(0.2), Nonconvex(0.2, 1)])
@pytest.mark.parametrize("loss", LOSSES)
def test_risk_gradient_is_the_derivative_of_the_risk(loss: str, regularizer: L2 | Nonconvex) -> None:
    rng = np.random.default_rng(3)
    objective = LOSSES[loss](regularizer=regularizer, intercept=True)
    records = objective.prepare((features(rng, "float64"), targets(rng, loss)))
    theta = rng.normal(size=records.dim)
    steps = 1e-5 * np.eye(records.dim)
    numeric = [(objective.risk(records, theta + h) - objective.risk(records, theta - h)) / 2e-5 for h in steps]
    np.testing.assert_allclose(objective.risk_gradient(records, theta), numeric, atol=1e-7)


def test_constants_of_the_softmax_hold_and_are_nearly_attained() -> None:
    """Along two live classes G, L and ρ are never exceeded and come within 3 %; other losses: test_table_losses."""
    bound = 1.7
    objective = Multinomial(2, row_bound=bound)
    records = objective.prepare((np.array([[bound, 0.0], [bound, 0.0]]), [0, 1]))
    v = np.array([1.0, -1.0, 0.0, 0.0]) / math.sqrt(2.0)
    places = np.linspace(-12.0, 12.0, 12_001)
    one = np.array([0], dtype=np.int64)
    gradients = np.zeros((len(places), 4))
    for t, out in zip(places, gradients, strict=True):
        GradientQuery(t * v, math.inf).sum_into(objective, Batch(records, one), out)
    products = np.gradient(gradients, places, axis=0)
    changes = np.gradient(products, places, axis=0)
    constants = objective.constants()
    for found, claimed in zip(
        (gradients, products, changes),
        (constants.lipschitz, constants.smoothness, constants.hessian_lipschitz),
        strict=True,
    ):
        assert claimed is not None
        assert 0.97 * claimed <= np.linalg.norm(found, axis=1).max() <= claimed * (1 + 1e-3)


def test_the_intercept_counts_in_the_constants() -> None:
    constants = Logistic(intercept=True, intercept_scale=2.0, row_bound=1.5, regularizer=L2(0.1, 1)).constants()
    assert constants.lipschitz == constants.row_bound == 2.5
    assert (constants.strong_convexity, constants.convex) == (0.0, True)
    assert constants.record_smoothness is not None
    assert constants.smoothness == constants.record_smoothness + 0.1
    with pytest.raises(ValueError, match="row_bound=None"):
        Logistic().constants()


@pytest.mark.parametrize("loss", LOSSES)
def test_decisions_predictions_and_coefficients_agree(loss: str) -> None:
    rng = np.random.default_rng(11)
    objective = LOSSES[loss](intercept=True, transform=Affine(rng.normal(size=D), rng.uniform(0.5, 2.0, size=D)))
    X, y = features(rng, "float64"), targets(rng, loss)
    records = objective.prepare((X, y))
    theta = rng.normal(size=records.dim)
    scores = objective.decision(X, theta)
    np.testing.assert_allclose(objective.decision(records, theta), scores)
    np.testing.assert_allclose(objective.decision(sparse.csc_array(X), theta), scores)
    W, b = objective.coefficients(theta)
    np.testing.assert_allclose((X @ W + b).reshape(scores.shape), scores, atol=1e-12)
    predicted = objective.predict(X, theta)
    if isinstance(objective, Multinomial):
        np.testing.assert_allclose(objective.probabilities(X, theta).sum(axis=1), 1.0)
        np.testing.assert_array_equal(predicted, scores.argmax(axis=1))
    elif isinstance(objective, Logistic):
        np.testing.assert_array_equal(predicted, objective.probabilities(X, theta) > 0.5)
    elif loss == "hinge":
        np.testing.assert_array_equal(predicted, scores > 0)
    else:
        np.testing.assert_array_equal(predicted, scores)


def test_regularizers_accept_torch_vectors() -> None:
    torch = pytest.importorskip("torch")
    theta = np.array([0.5, -2.0, 1.0])
    for regularizer in (L2(0.3, unpenalized=1), Nonconvex(0.2)):
        tensor = torch.tensor(theta)
        assert regularizer.value(tensor) == pytest.approx(regularizer.value(theta))
        np.testing.assert_allclose(regularizer.gradient(tensor).numpy(), regularizer.gradient(theta))
        np.testing.assert_array_equal(tensor.numpy(), theta)


def test_many_blocks_equal_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    X, y = features(rng, "float32"), targets(rng, "logistic")
    objective = Logistic(intercept=True, row_bound=1.5, rows="clip")
    theta = rng.normal(size=D + 1)
    whole = objective.risk_gradient(objective.prepare((X, y)), theta)
    monkeypatch.setattr("quietgrad.tables.table._BLOCK", 2 * D)
    for layout, dtype in LAYOUTS:
        records = objective.prepare((laid_out(X, layout, dtype), y))
        assert len(list(records.blocks())) > 5
        np.testing.assert_allclose(objective.risk_gradient(records, theta), whole, atol=1e-12)


@pytest.mark.parametrize("regularizer", [NoRegularizer(), L2(0.3), Nonconvex(0.33)])
def test_a_regulariser_states_what_its_curvature_does(regularizer: Any) -> None:
    """Largest, least and steepest curvature on a fine grid: stated bounds hold and are attained."""
    grid = np.linspace(-6.0, 6.0, 240_001)
    bends = regularizer.curvature(grid)
    steepest = float(np.abs(np.diff(bends) / np.diff(grid)).max())
    assert float(np.abs(bends).max()) == pytest.approx(regularizer.smoothness, abs=1e-9)
    assert max(0.0, -float(bends.min())) == pytest.approx(regularizer.weak_convexity, abs=1e-9)
    assert steepest <= regularizer.hessian_lipschitz * (1 + 1e-6) + 1e-9
    assert steepest >= regularizer.hessian_lipschitz * (1 - 1e-6) - 1e-9


def test_constants_are_totals_of_the_whole_risk() -> None:
    """The risk's Hessian changes many times faster than the loss's ρ says, and just as fast as the stated one."""
    penalty = Nonconvex(0.33)
    loss = Logistic(regularizer=penalty, row_bound=0.5, rows="clip")
    rng = np.random.default_rng(1)
    X = rng.normal(size=(50, 2))
    records = loss.prepare((X, rng.integers(0, 2, 50)))

    def hessian(theta: Floats) -> Floats:
        return np.stack([full_batch.hessian_product(loss, records, theta, e) for e in np.eye(2)])

    step = np.array([1e-4, 0.0])
    steepest = max(
        float(np.linalg.norm(hessian(at + step) - hessian(at), 2)) / 1e-4
        for at in np.linspace(-1.0, 1.0, 81)[:, None] * np.eye(2)[0]
    )
    stated, alone = loss.constants(), Logistic(row_bound=0.5, rows="clip").constants()
    assert stated.hessian_lipschitz is not None
    assert alone.hessian_lipschitz is not None
    assert alone.smoothness is not None
    assert 50 * alone.hessian_lipschitz < 0.98 * stated.hessian_lipschitz < steepest <= stated.hessian_lipschitz
    assert stated.smoothness == pytest.approx(alone.smoothness + penalty.smoothness)
    assert (stated.lipschitz, stated.record_smoothness) == (alone.lipschitz, alone.smoothness)
    assert (stated.convex, alone.convex) == (False, True)
    assert Squared(row_bound=1.0, regularizer=L2(0.1)).constants().strong_convexity == 0.1
