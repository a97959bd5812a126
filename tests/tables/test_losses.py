"""One declaration per table loss: whatever is registered agrees with itself, and a new one needs nothing else."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery, JointMomentumQuery, LossQuery, RecursiveMomentumQuery
from quietgrad.tables import full_batch, kernels
from quietgrad.tables.landscapes import landscape
from quietgrad.tables.linear import LinearObjective, Task
from quietgrad.tables.losses import LOSSES, Logistic, OneScoreLoss, Squared
from quietgrad.tables.queries.second_order import hessian_total
from quietgrad.tables.regularizers import L2
from quietgrad.tables.table import Affine

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogCosh(OneScoreLoss):
    """f = h²·log cosh((score − y)/h): a loss that no other file of the library has heard of."""

    width: float = 0.7
    number: ClassVar[str | None] = "width"
    task: ClassVar[Task] = "regression"

    @staticmethod
    def value(score: Floats, y: Floats, h: float) -> Floats:
        e = np.abs(score - y) / h
        return np.asarray(h * h * (e + np.log1p(np.exp(-2.0 * e)) - math.log(2.0)))

    @staticmethod
    def residual(score: Floats, y: Floats, h: float) -> Floats:
        slope: Floats = h * np.tanh((score - y) / h)
        return slope

    @staticmethod
    def curvature(score: Floats, y: Floats, h: float) -> Floats:
        return np.asarray(1.0 - np.tanh((score - y) / h) ** 2)

    def moduli(self) -> tuple[float, float, float]:
        return self.width, 1.0, 4.0 / (3.0 * math.sqrt(3.0)) / self.width


EVERY: dict[str, type[LinearObjective]] = {**LOSSES, "log-cosh": LogCosh}
ONE_SCORE = {name: kind for name, kind in EVERY.items() if issubclass(kind, OneScoreLoss)}
GRID = np.concatenate([np.linspace(-6.0, 6.0, 241), [0.0, -0.0, 1e-300, -800.0, 800.0, 1e10, -1e10, 1e300, -1e300]])


def made(name: str, **settings: Any) -> LinearObjective:
    needed: dict[str, Any] = {"classes": 3} if name == "multinomial" else {}
    return EVERY[name](**needed, **settings)


def targets_of(objective: LinearObjective, rng: np.random.Generator, n: int) -> Floats:
    if objective.task == "regression":
        return np.abs(rng.normal(size=n)) if objective.log_link else rng.normal(size=n)
    return rng.integers(0, max(objective.outputs, 2), n).astype(np.float64)


@pytest.mark.parametrize("name", ONE_SCORE)
def test_a_compiled_residual_is_the_declared_one(name: str) -> None:
    objective = made(name)
    assert isinstance(objective, OneScoreLoss)
    rows = objective.prepare((np.ones((1, 1)), [1.0]))
    for y in (0.0, 1.0) if objective.task == "binary" else (-2.5, 0.0, 1.0):
        declared = objective.residual(GRID, np.array(y), objective.h)
        rows.y[0] = y  # type: ignore[index]
        for score, expected in zip(GRID, declared, strict=True):
            out = np.zeros(1)
            GradientQuery(np.array([score]), math.inf).sum_into(objective, Batch(rows, np.array([0])), out)
            assert out[0] == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ONE_SCORE)
def test_residual_and_curvature_are_the_derivatives_of_the_value(name: str) -> None:
    objective = made(name)
    assert isinstance(objective, OneScoreLoss)
    scores, step = np.linspace(-4.0, 4.0, 161) + 0.0123, 1e-5
    for y in np.array([0.0, 1.0]):
        ahead, behind = (objective.value(scores + s, y, objective.h) for s in (step, -step))
        slope = objective.residual(scores, y, objective.h)
        np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), atol=1e-8)
        ahead, behind = (objective.residual(scores + s, y, objective.h) for s in (step, -step))
        np.testing.assert_allclose(
            objective.curvature(scores, y, objective.h), (ahead - behind) / (2 * step), atol=1e-7
        )
        assert (objective.value(scores, y, objective.h) >= 0.0).all()
    # G, L and ρ bound what the formulas do, and are no looser than 3 %.
    fine = np.linspace(-8.0, 8.0, 100_001)
    bends = objective.curvature(fine, np.array(1.0), objective.h)
    seen = (
        np.abs(objective.residual(fine, np.array(1.0), objective.h)).max(),
        np.abs(bends).max(),
        np.abs(np.diff(bends)).max() / (fine[1] - fine[0]),
    )
    for modulus, most in zip(objective.moduli(), seen, strict=True):
        if modulus is not None:
            assert most <= modulus * (1 + 1e-9)
            assert most >= 0.97 * modulus


@pytest.mark.parametrize("name", EVERY)
def test_hessians_are_the_derivatives_of_gradients(name: str) -> None:
    rng = np.random.default_rng(12)
    objective = made(name, intercept=True, regularizer=L2(0.3, unpenalized=1))
    X = rng.normal(size=(12, 3))
    records = objective.prepare((X, targets_of(objective, rng, 12)))
    theta, vector = rng.normal(size=(2, records.dim))
    h = 1e-7
    ahead, behind = (objective.risk_gradient(records, theta + s * h * vector) for s in (1, -1))
    assert full_batch.covers(objective)
    product = full_batch.hessian_product(objective, records, theta, vector)
    np.testing.assert_allclose(product, (ahead - behind) / (2 * h), atol=1e-6)
    if objective.outputs > 1:
        with pytest.raises(ValueError, match="Multinomial"):
            hessian_total(objective, Batch(records, None), theta, 1e6)
        return
    summed = hessian_total(objective, Batch(records, None), theta, 1e6)
    total = summed @ vector / 12 + objective.regularizer.curvature(theta) * vector
    np.testing.assert_allclose(total, product, atol=1e-10)


def test_a_loss_is_known_to_the_compiled_kernels_by_its_own_formula_in_every_process(tmp_path: Path) -> None:
    """Two versions of one file declare two losses: what numba remembered of the first is not run for the second."""
    source = Path(__file__).read_text().split("EVERY: ")[0]
    program = "import numpy as np, sys\nsys.path.insert(0, {folder!r})\n"
    program += "from own_loss import LogCosh, Batch, GradientQuery\n"
    program += "o = LogCosh(1.0); r = o.prepare((np.ones((1, 1)), [0.0])); out = np.zeros(1)\n"
    program += "GradientQuery(np.array([1.0]), 9.0).sum_into(o, Batch(r, np.array([0])), out)\nprint(out[0])"
    answers = []
    for factor in ("1.0", "20.0"):
        (tmp_path / "own_loss.py").write_text(
            source.replace("slope: Floats = h *", f"slope: Floats = {factor} * h *")
        )
        command = [sys.executable, "-c", program.format(folder=str(tmp_path))]
        answers.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert answers == pytest.approx([math.tanh(1.0), 9.0], rel=1e-9)


def test_a_residual_that_cannot_be_compiled_is_refused_by_name() -> None:
    class Looser(Squared):
        @staticmethod
        def residual(score: Floats, y: Floats, h: float) -> Floats:
            return np.asarray(np.vectorize(math.tanh)(score - y))

    records = Looser().prepare((np.ones((2, 1)), [0.0, 1.0]))
    with pytest.raises(TypeError, match=r"Looser\.residual"):
        GradientQuery(np.zeros(1), 1.0).sum_into(Looser(), Batch(records, np.array([0])), np.zeros(1))


def test_no_objective_carries_an_address_to_another_process() -> None:
    objective = Logistic()
    records = objective.prepare((np.ones((2, 1)), [0.0, 1.0]))
    GradientQuery(np.zeros(1), 1.0).sum_into(objective, Batch(records, np.array([0])), np.zeros(1))
    address = kernels.address_of(Logistic.residual)
    assert str(address).encode() not in pickle.dumps(objective, protocol=0)
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_rules_refuse_what_would_make_their_bound_false() -> None:
    for wrong in (
        lambda: GradientQuery(np.zeros(1), math.nan),
        lambda: GradientQuery(np.zeros(1), -1.0),
        lambda: RecursiveMomentumQuery(
            np.zeros(1), np.zeros(1), 2.0, 1.0, 1.0
        ),  # (1−γ)C2 + γC1 would be below the truth
        lambda: JointMomentumQuery(np.zeros(1), np.zeros(1), -1.0, 1.0),
        lambda: ClippingRule(1.0, 0.0, 1.0, math.nan, 1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


# --- what is not a number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("indices", [None, np.array([0, 1])])
def test_a_loss_that_is_not_a_number_counts_as_the_bound(name: str, indices: Any) -> None:
    objective = made(name)
    records = objective.prepare((np.ones((2, 2)), [1.0, 1.0]))
    total = np.zeros(1)
    with np.errstate(all="ignore"):
        LossQuery(np.full(records.dim, math.nan), 2.0).sum_into(objective, Batch(records, indices), total)
    assert total[0] == 4.0


def test_landscapes_and_modules_count_it_so_too() -> None:
    land = landscape("strict-saddle", d=3)
    sample = land.prepare(4)
    with np.errstate(all="ignore"):
        assert land.loss_sum(Batch(sample, None), np.full(3, math.nan), 2.0) == 8.0
    torch = pytest.importorskip("torch")
    from quietgrad.torch.networks.module import ModuleObjective

    objective = ModuleObjective(torch.nn.Linear(1, 1, bias=False), lambda out, y: (out[:, 0] - y) ** 2)
    examples = objective.prepare((torch.ones(3, 1), torch.zeros(3)))
    assert objective.loss_sum(Batch(examples, None), torch.full((1,), math.nan), 2.0) == 6.0


@pytest.mark.parametrize("indices", [None, np.array([0, 1])])
def test_a_row_that_overflows_adds_no_hessian(indices: Any) -> None:
    objective = Squared(transform=Affine(np.zeros(2), np.full(2, 10.0)), intercept=True)
    records = objective.prepare((np.array([[1e308, 1.0], [0.5, 0.0]]), [0.0, 0.0]))
    out = np.zeros((3, 3))
    objective.add_hessians(Batch(records, indices), np.zeros(3), 1.0, out)
    assert np.isfinite(out).all()
    assert np.linalg.norm(out) <= 1.0 + 1e-9
