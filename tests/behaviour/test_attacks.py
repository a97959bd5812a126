"""Attacks that once worked: each test is a promise that was broken and what keeps it now."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sparse
from scipy.special import ndtr

import quietgrad as qg
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import BudgetError, DataError, UnprovableError
from quietgrad.core.ledger.ledger import Ledger, project_ledger
from quietgrad.core.noise.grid import NoiseStream, grid_step, l2_laplace_for, release_l2_laplace, sigma_for
from quietgrad.core.noise.mechanisms import GaussianPartitionSelection
from quietgrad.core.noise.rng import fresh_key, seed_key
from quietgrad.core.plans.schedule import Plan, Schedule, Slot
from quietgrad.core.sampling import FullBatch
from quietgrad.core.session.curator import CentralCurator
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.estimators import PrivateHuberRegressor, PrivateLogisticRegression, PrivateSearch
from quietgrad.methods import plan, run
from quietgrad.methods.dp_agd import DPAGD
from quietgrad.methods.dp_sgd import DPGD, DPSGD
from quietgrad.methods.output_perturbation import OutputPerturbation
from quietgrad.methods.whitened_gd import WhitenedGD
from quietgrad.tables.losses import Huber, Logistic, Multinomial, Squared
from quietgrad.tables.queries.counts import LabelCounts, LabelSet
from quietgrad.tables.regularizers import L2
from quietgrad.tables.table import Affine

BUDGET = Budget(1.0, 1e-5)
_rng = np.random.default_rng(0)
X = _rng.standard_normal((400, 3))
Y = (X[:, 0] > 0) * 1.0


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


# --- noise ----------------------------------------------------------------------------------------------------


def test_pure_noise_covers_the_last_bit_of_the_sum() -> None:
    scale, step = l2_laplace_for(1.0, 1.0 - 1e-9, 64)
    assert grid_step(scale) == 2.0 * step  # the growth for rounding crosses a power of two
    total = np.zeros(64)
    release_l2_laplace(total, scale, step, NoiseStream(seed_key(0), "output"), 0)
    odd = np.abs(total / step) % 2.0
    assert 0 < odd.sum() < 64  # all even would tell the sum's last bit; false alarm 2^-63


# --- sensitivity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [None, np.array([0])])
@pytest.mark.parametrize("layout", [np.array, sparse.csr_array])
def test_a_row_whose_square_leaves_the_floats_is_still_clipped(indices: Any, layout: Any) -> None:
    objective = Squared()
    for size in (0.0, 5e-324, 3e-162, 1e-160, 1e-155, 1e-150, 1e-100, 1e153, 1e200):
        table = objective.prepare((layout(np.array([[size, -size]])), np.array([1e300])))
        out = np.zeros(2)
        GradientQuery(np.zeros(2), 1.0).sum_into(objective, Batch(table, indices), out)
        assert np.linalg.norm(out) <= 1.0 + 1e-9, size


@pytest.mark.parametrize("rows", ["clip", "normalize"])
def test_a_row_that_overflows_when_scaled_counts_as_nothing(rows: Any) -> None:
    transform = Affine(np.ones(2), np.full(2, 10.0))
    objective = Multinomial(classes=3, transform=transform, row_bound=1.0, rows=rows, intercept=True)
    table = objective.prepare((np.array([[1e308, 1.0], [0.0, 0.0]]), np.array([1, 2])))
    for indices in (None, np.array([0, 1])):
        out = np.zeros(table.dim)
        GradientQuery(np.zeros(table.dim), 1.0).sum_into(objective, Batch(table, indices), out)
        assert np.linalg.norm(out) <= 2.0


@pytest.mark.parametrize("layout", [np.array, sparse.csr_array])
def test_an_absurd_record_raises_no_warning(layout: Any) -> None:
    features, targets = X.copy(), X[:, 0].copy()
    features[3], targets[3] = 1e200, 1.7e308
    PrivateHuberRegressor(epsilon=4.0, relation="add-remove").fit(layout(features), targets)


def test_a_short_row_is_still_bounded_after_normalizing() -> None:
    table = Huber(row_bound=1.0, rows="normalize").prepare(([[1e-160, 0.0], [0.0, 0.0]], [1.0, 1.0]))
    shortened = np.abs(table.X * table.factors[:, None])
    assert shortened.max() <= 1.0 + 1e-9


# --- what is claimed ------------------------------------------------------------------------------------------


def test_a_seeded_run_is_never_private_and_cannot_become_so_by_resuming(tmp_path: Path) -> None:
    curator = CentralCurator(Logistic(), (X, Y), seed=1)
    session = curator.open(plan(DPGD(steps=2), n=len(X), budget=BUDGET))
    assert not run(DPGD(steps=2), session, curator.initial()).privacy.is_private

    def crash(progress: qg.Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"seed": 1, "folder": tmp_path / "run", "callback": crash, "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        qg.minimize(Logistic(), (X, Y), DPGD(steps=6), budget=BUDGET, **settings)
    with pytest.raises(DataError, match="seeded"):
        qg.resume(Logistic(), (X, Y), DPGD(steps=6), folder=tmp_path / "run")


def test_what_a_statement_rests_on_is_noted() -> None:
    budget = Budget(1.0, 1 / len(X))
    loose = qg.minimize(Logistic(), (X, Y), DPGD(steps=2), budget=budget, n_public=len(X))
    assert any("below 1/n" in note for note in loose.privacy.notes)
    for n_public in (None, 400):
        model = PrivateLogisticRegression(classes=[0, 1], row_bound=3.0, relation="add-remove", n_public=n_public)
        notes = model.fit(X, Y).privacy_.notes
        assert any("counted privately" in note for note in notes) == (n_public is None)


def test_a_filter_and_a_random_round_cost_their_total_whatever_a_run_happened_to_spend() -> None:
    algorithm = DPAGD(max_steps=4)
    result = qg.minimize(Logistic(), (X, Y), algorithm, budget=BUDGET, n_public=len(X))
    assert result.privacy.epsilon == plan(algorithm, n=len(X), budget=BUDGET).epsilon()
    priced = plan(DPGD(steps=20, returns="random"), n=len(X), budget=BUDGET)
    assert priced.epsilon_after({"gradient": 1}) == priced.epsilon()


def test_replace_one_runs_are_not_priced_under_add_remove(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    rows = X / np.linalg.norm(X, axis=1, keepdims=True)
    objective = Logistic(regularizer=L2(0.1), row_bound=1.0)
    budget = Budget(1.0, 1e-5, Relation.REPLACE_ONE)
    qg.minimize(objective, (rows, Y), OutputPerturbation(steps=5), budget=budget, ledger=ledger)
    # The bound of this run is half the distance of two models: read as one record's bound it would halve ε.
    with pytest.raises(UnprovableError, match="replace-one"):
        ledger.spent("default", delta=1e-5, relation="add-remove")
    with pytest.raises(BudgetError, match="replace-one"):
        qg.minimize(Logistic(), (X, Y), DPGD(steps=2), budget=BUDGET, ledger=ledger, cap=Budget(9.0, 1e-5))
    assert ledger.spent("default", delta=1e-5, relation="replace-one").epsilon <= 1.0


def test_a_cap_without_a_ledger_is_held_against_the_projects() -> None:
    with pytest.raises(BudgetError, match="exceed the cap"):
        qg.minimize(Logistic(), (X, Y), DPGD(steps=2), budget=BUDGET, cap=Budget(0.1, 1e-5))
    with pytest.raises(BudgetError, match="exceed the cap"):
        PrivateLogisticRegression(classes=[0, 1], row_bound=3.0, cap=Budget(0.1, 1e-5)).fit(X, Y)


# --- labels ---------------------------------------------------------------------------------------------------


def test_found_labels_do_not_tell_how_long_the_others_are() -> None:
    labels = np.array(["no"] * 2000 + ["yes"] * 2000 + ["a name that nobody else has"])
    slot = Slot("labels", FullBatch(), mechanism=GaussianPartitionSelection(1e-9), fixed=10.0)
    plan = Plan("look", {}, Schedule((slot,)), len(labels), Budget(1.0, 1e-5, Relation.REPLACE_ONE), 1.0)
    door = CentralCurator(LabelSet(), (np.zeros((len(labels), 1)), labels)).open(plan)
    found = door.discover("labels", LabelCounts(Relation.REPLACE_ONE))
    assert found.tolist() == ["no", "yes"]
    assert found.dtype == "<U3"


@pytest.mark.parametrize("noise_multiplier", [1.0, 1500.0, 1e6])
@pytest.mark.parametrize("relation", list(Relation))
def test_a_label_of_one_record_passes_as_rarely_as_promised(noise_multiplier: float, relation: Relation) -> None:
    look, bound = GaussianPartitionSelection(1e-8), LabelCounts(relation).bound
    sigma, step = look.counts_noise(noise_multiplier, bound)
    assert sigma >= sigma_for(noise_multiplier, bound, 1)[0]
    threshold = look.threshold(noise_multiplier, bound)
    assert ndtr(-(threshold - 1.0 - 2.0 * step) / sigma) <= 1e-8 * (1.0 + 1e-6)


# --- private search -------------------------------------------------------------------------------------------


def _model(**settings: Any) -> PrivateLogisticRegression:
    return PrivateLogisticRegression(classes=[0, 1], row_bound=3.0, **settings)


@pytest.mark.parametrize(
    ("estimator", "grid"),
    [
        (_model(), {"algorithm": [DPSGD(steps=10, batch_size=20)]}),
        (_model(), {"algorithm": [DPAGD(max_steps=4)]}),
        (_model(algorithm=DPSGD(steps=10, batch_size=20)), {"regularization": [0.0]}),
        (_model(), {"classes": [None]}),
        (_model(random_state=1), {"regularization": [0.0]}),
        (_model(), {"random_state": [1]}),
        (_model(), {"epsilon": [8.0]}),
    ],
)
def test_a_search_refuses_rounds_it_cannot_price(estimator: Any, grid: Any) -> None:
    search = PrivateSearch(estimator, grid, epsilon=2.0, account="refused")
    with pytest.raises(ValueError):
        search.fit(X, Y)
    assert not project_ledger().book().counted("refused")


@pytest.mark.parametrize("relation", list(Relation))
def test_the_chosen_model_states_what_the_search_cost(relation: Relation) -> None:
    grid = {"algorithm": [WhitenedGD(steps=4, row_bound=3.0), WhitenedGD(steps=8, row_bound=3.0)]}
    search = PrivateSearch(_model(), grid, epsilon=2.0, relation=relation, mean_rounds=3.0, account="owner")
    chosen = search.fit(np.tile(X, (4, 1)), np.tile(Y, 4)).best_estimator_  # so many that no count is too small
    assert chosen.privacy_.epsilon == chosen.result_.privacy.epsilon == search.privacy_epsilon_ <= 2.0
    assert "search/" not in json.dumps(chosen.result_.to_json())


def test_one_record_more_moves_no_other_across_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    key = fresh_key()
    monkeypatch.setattr("quietgrad.estimators.search.fresh_key", lambda: key)
    seen: list[set[float]] = []

    class Watched(PrivateLogisticRegression):
        def fit(self, X: Any, y: Any = None, **options: Any) -> Any:
            seen.append(set(X[:, 0]))
            return super().fit(X, y, **options)

    model = Watched(classes=[0, 1], row_bound=3.0, n_public=400)
    for n in (399, 400):
        PrivateSearch(model, {"regularization": [0.0]}, relation="add-remove", mean_rounds=1.01).fit(X[:n], Y[:n])
    with_it, without = seen[-1], seen[0]
    assert without <= with_it <= without | {X[399, 0]}


def test_the_number_of_rounds_is_not_cut_off() -> None:
    from quietgrad.estimators.search import _rounds

    rare = 1.0 - 2.0**-53  # of probability 2^-53: a cut at 10000 rounds costs e^-11
    assert _rounds(900.0, rare) == 1 + math.floor(53.0 * math.log(2.0) / -math.log1p(-1.0 / 900.0))


# --- statements -----------------------------------------------------------------------------------------------


def test_a_plan_names_what_was_released_beforehand() -> None:
    look = Slot("means", FullBatch(), fixed=30.0)
    with_means = plan(DPGD(steps=5), n=len(X), budget=BUDGET, looks=(look,))
    assert "1× 'means'" in with_means.explain()
    assert "scale 30·C" in with_means.explain()


def test_not_private_says_why() -> None:
    seeded = qg.minimize(Logistic(), (X, Y), DPGD(steps=5), budget=BUDGET, seed=1).privacy
    assert str(seeded).startswith("NOT PRIVATE (seeded")
    printed = replace(seeded, notes=("noise as printed; the claim ε=1 is false for the server",))
    assert str(printed).startswith("NOT PRIVATE (noise as printed")


def test_a_saved_result_tells_whole_seconds_only(tmp_path: Path) -> None:
    result = replace(qg.minimize(Logistic(), (X, Y), DPGD(steps=5), budget=BUDGET), seconds=1.2345)
    result.save(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["seconds"] == 2
    assert qg.load(tmp_path).seconds == 2
