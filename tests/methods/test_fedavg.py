"""FedAvg: the bound of a unit's update, the adaptive clip, the server's steps, its statements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.budget import PrivacyUnit, Relation
from quietgrad.core.errors import BudgetError
from quietgrad.methods.fedavg import RECORD_NOTE, FedAvg
from quietgrad.methods.result import load

M, N = 40, 12
RNG = np.random.default_rng(0)
X = RNG.standard_normal((M * N, 3))
Y = (X @ [1.0, -1.0, 0.5] + RNG.logistic(size=M * N) > 0) * 1.0
PARTY = np.repeat([f"p{k}" for k in range(M)], N)
LOSS, BUDGET = qg.objectives.Logistic(), qg.Budget(8.0, 1e-2)


def _run(method: FedAvg, **settings: Any) -> qg.Result:
    return qg.minimize(LOSS, (X, Y), method, **{"budget": BUDGET, "party": PARTY, **settings})


def test_a_run_states_two_epsilons_each_as_what_it_is() -> None:
    result = _run(FedAvg(rounds=20, sampling="poisson", local_rate=0.5))
    privacy = result.privacy
    assert privacy.unit is PrivacyUnit.PARTY
    assert " per party" in str(privacy)
    assert result.n_public == M
    assert privacy.events is not None
    (note,) = [note for note in privacy.notes if note.startswith(RECORD_NOTE)]
    record = account(privacy.events, delta=1e-2, relation=Relation.REPLACE_ONE)
    assert f"({record:.4g}, 0.01)-DP" in note
    assert privacy.epsilon is not None
    assert record > 1.1 * privacy.epsilon  # one record can turn an update round


def test_under_replace_one_a_record_has_its_partys_epsilon() -> None:
    result = _run(FedAvg(rounds=4, sampling="full"), budget=qg.Budget(8.0, 1e-2, Relation.REPLACE_ONE))
    assert any(note.startswith(f"{RECORD_NOTE}the ε of its party") for note in result.privacy.notes)


def test_the_ledger_charges_parties_and_refuses_to_add_records(tmp_path: Any) -> None:
    ledger = {"ledger": tmp_path / "ledger.jsonl", "account": "clients"}
    _run(FedAvg(rounds=5), **ledger)
    with pytest.raises(BudgetError, match="do not add up"):
        qg.minimize(LOSS, (X, Y), qg.DPGD(steps=2), budget=BUDGET, n_public=M * N, **ledger)


def test_a_saved_run_is_read_back_and_proved_again(tmp_path: Any) -> None:
    _run(FedAvg(rounds=5, clip_quantile=0.5), folder=tmp_path / "run")
    again = load(tmp_path / "run")
    assert not again.privacy.refuted
    assert again.privacy.unit is PrivacyUnit.PARTY


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("start", [0.01, 3.0])
def test_an_adaptive_clip_finds_the_median_update(start: float, relation: Relation) -> None:
    method = FedAvg(rounds=60, sampling="full", clip=start, clip_quantile=0.5, local_rate=0.05)
    result = _run(method, budget=None) if relation is Relation.ADD_REMOVE else _run(method, budget=None, seed=1)
    updates = [np.linalg.norm(_local(result.params, X[p == PARTY], Y[p == PARTY], 5, 0.05)) for p in set(PARTY)]
    assert result.details["clip"] == pytest.approx(float(np.median(updates)), rel=0.25)


def _local(theta: Any, x: Any, y: Any, steps: int, rate: float) -> Any:
    """Plain gradient descent on a party's records, which are fewer than a batch."""
    own = np.array(theta)
    for _ in range(steps):
        own -= rate * x.T @ (1.0 / (1.0 + np.exp(-x @ own)) - y) / len(x)
    return own - theta


def test_one_round_is_the_mean_of_the_parties_own_training() -> None:
    result = _run(FedAvg(rounds=1, sampling="full", clip=100.0, local_steps=4, local_rate=0.3), budget=None)
    updates = [_local(np.zeros(3), X[p == PARTY], Y[p == PARTY], 4, 0.3) for p in dict.fromkeys(PARTY)]
    assert result.params == pytest.approx(np.mean(updates, axis=0), abs=1e-12)


def test_the_servers_adam_moves_every_coordinate_by_its_rate_at_first() -> None:
    result = _run(FedAvg(rounds=1, sampling="full", server="adam", server_rate=0.1, stabiliser=1e-9), budget=None)
    assert np.abs(result.params) == pytest.approx(np.full(3, 0.1), rel=1e-3)


def test_people_of_a_table_train_by_themselves_too() -> None:
    result = qg.minimize(LOSS, (X, Y), FedAvg(rounds=3, sampling="full"), budget=BUDGET, person=PARTY, n_public=M)
    assert result.privacy.unit is PrivacyUnit.PERSON
    assert any("one record of a party: " not in note for note in result.privacy.notes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampling": "coordinator"}, "most_rounds"),
        ({"most_rounds": 3}, "most_rounds"),
        ({"sample": 0.0}, "sample"),
        ({"clip_quantile": 1.0}, "clip_quantile"),
        ({"sampling": "poisson", "noise": "correlated"}, None),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], words: str | None) -> None:
    with pytest.raises(ValueError, match=words):
        FedAvg(**settings).schedule(100)


def test_the_price_of_the_adaptive_clip_is_in_the_bound() -> None:
    method = FedAvg(sampling="poisson", clip=0.3, clip_quantile=0.5, clip_share=0.2)
    query = method.query(np.zeros(3), 0.3)
    assert query.bound == pytest.approx(np.hypot(0.3, query.bit), rel=1e-12)
    assert (query.bit / query.bound) ** 2 == pytest.approx(0.2)
    fixed = replace(method, clip_quantile=None)
    assert (
        method.schedule(100).slots[0].sampling == fixed.schedule(100).slots[0].sampling
    )  # one event in either case
