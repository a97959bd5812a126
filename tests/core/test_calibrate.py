"""Calibration: on the safe side, within 0.1 %, from few proofs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.core.accounting import accounting as module
from quietgrad.core.accounting.accounting import (
    account,
    calibrate,
    calibrate_event,
    calibrate_steps,
    prove_or_infinite,
)
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.core.accounting.events import (
    ZCDP,
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    TotalVariationSlack,
    gaussian,
    poisson_gaussian,
)
from quietgrad.core.errors import BudgetError, UnprovableError

MNIST: dict[str, Any] = {"epsilon": 1.2, "delta": 1e-5, "n": 60000, "batch_size": 512, "steps": 2000}


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Every event that calibration asked a proof for."""
    asked: list[Event] = []

    def counted(event: Event, delta: float, relation: Relation, *accountant: str) -> Any:
        asked.append(event)
        return prove_or_infinite(event, delta, relation, *accountant)

    monkeypatch.setattr(module, "prove_or_infinite", counted)
    return asked


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MNIST, 1.423),
        (MNIST | {"sampling": "fixed-size", "relation": "replace-one"}, 3.225),
        (MNIST | {"relation": "replace-one"}, 2.417),
        ({"epsilon": 0.2, "delta": 1e-5, "n": 32561, "batch_size": 100, "steps": 1500}, 2.101),
        ({"epsilon": 7.0, "delta": 1e-5, "rate": 512 / 60000, "steps": 2000}, 0.639),
        ({"epsilon": 1.0, "delta": 1e-5, "steps": 100, "sampling": "full"}, 10 / gaussian_mu(1.0, 1e-5)),
    ],
)
def test_known_noise_from_few_proofs(options: dict[str, Any], expected: float, proofs: list[Event]) -> None:
    assert calibrate(**options) == pytest.approx(expected, rel=1.5e-3)
    assert len(proofs) <= 6


BUDGETS = st.builds(
    Budget, st.floats(0.05, 10.0), st.sampled_from([1e-3, 1e-5, 1e-8]), st.sampled_from(list(Relation))
)


@given(BUDGETS, st.integers(1, 1000), st.floats(0.002, 1.0), st.sampled_from(["poisson", "fixed-size", "full"]))
@settings(max_examples=25, deadline=None)
def test_lands_on_the_safe_side_within_a_thousandth(budget: Budget, steps: int, rate: float, sampling: str) -> None:
    def event(z: float) -> Event:
        one: Event = Gaussian(z)
        if sampling == "fixed-size" and budget.relation is Relation.REPLACE_ONE:
            one = FixedSizeSampled(500, max(1, round(500 * rate)), one)
        elif sampling == "poisson":
            one = PoissonSampled(rate, one)
        return Repeated(one, steps)

    z = calibrate_event(event, budget=budget)
    reached = account(event(z), delta=budget.delta, relation=budget.relation)
    assert 0.999 * budget.epsilon <= reached <= budget.epsilon


@pytest.mark.parametrize(
    "make",
    [
        lambda z: Composed((PoissonSampled(0.04, Gaussian(2 * z)), poisson_gaussian(0.01, z, 300))),
        lambda z: RandomNumberOfReleases(PoissonSampled(0.02, Gaussian(z)), ((50, 0.5), (100, 0.5))),
        lambda z: RepeatAndSelect(gaussian(z, 5), mean=4.0),
        lambda z: ZCDP(1 / z**2, Relation.ADD_REMOVE),
        lambda z: Composed((gaussian(z, 9), TotalVariationSlack(1e-8))),
        lambda z: Composed((gaussian(z, 9), Pure(1.0, Relation.ADD_REMOVE))),
    ],
)
def test_any_event_can_be_calibrated(make: Callable[[float], Event]) -> None:
    budget = Budget(2.0, 1e-5)
    z = calibrate_event(make, budget=budget)
    assert 0.999 * 2.0 <= account(make(z), delta=1e-5, relation=budget.relation) <= 2.0


def test_a_jump_in_epsilon_is_taken_from_above() -> None:
    """If ε jumps over the target, the answer is the least z beyond the jump."""

    def make(z: float) -> Event:
        return Pure(3.0 if z < 1.7 else 0.5, Relation.ADD_REMOVE)

    assert calibrate_event(make, budget=Budget(1.0, 1e-5)) == pytest.approx(1.7, rel=1e-5)


def test_what_no_noise_can_reach_is_refused() -> None:
    fixed = Pure(2.0, Relation.ADD_REMOVE)
    with pytest.raises(BudgetError, match=r"cannot be reached.*already cost ε = 2"):
        calibrate_event(lambda z: Composed((gaussian(z), fixed)), budget=Budget(1.0, 1e-5))
    with pytest.raises(ValueError, match="does not depend on the noise multiplier"):
        calibrate_event(lambda z: fixed, budget=Budget(5.0, 1e-5))
    with pytest.raises(UnprovableError, match="replace-one, or Poisson"):
        calibrate(**MNIST, sampling="fixed-size")


@pytest.mark.parametrize(
    "options",
    [
        {"noise_multiplier": 1.43, "n": 60000, "batch_size": 512},
        {
            "noise_multiplier": 6.0,
            "n": 60000,
            "batch_size": 512,
            "sampling": "fixed-size",
            "relation": "replace-one",
        },
        {"noise_multiplier": 100.0, "sampling": "full"},
    ],
)
def test_steps_are_the_most_that_fit(options: dict[str, Any], proofs: list[Event]) -> None:
    budget: dict[str, Any] = {"epsilon": 1.2, "delta": 1e-5}
    steps = calibrate_steps(**budget, **options)
    assert len(proofs) <= 25
    event = proofs[0]
    relation = options.get("relation", "add-remove")
    assert account(Repeated(event, steps), delta=1e-5, relation=relation) <= 1.2
    assert account(Repeated(event, steps + 1), delta=1e-5, relation=relation) > 1.2
    with pytest.raises(BudgetError, match="steps=1 already costs"):
        calibrate_steps(**budget | {"epsilon": 1e-6}, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon=0.0: must be > 0"),
        ({"epsilon": math.nan}, r"epsilon=nan: must be > 0"),
        ({"delta": 0.0}, r"delta=0.0: must be strictly between 0 and 1"),
        ({"delta": 1.0}, r"delta=1.0: must be strictly between 0 and 1"),
        ({"n": None, "batch_size": None, "rate": 1.5}, r"rate=1.5: must be in \(0, 1\]"),
        ({"n": None, "batch_size": None, "rate": 0.0}, r"rate=0.0: must be in \(0, 1\]"),
        ({"batch_size": 60001}, r"batch_size=60001: must be between 1 and n=60000"),
        ({"batch_size": 0}, r"batch_size=0: must be between 1 and n=60000"),
        ({"steps": 0}, r"steps=0: must be a whole number from 1"),
        ({"steps": 2.5}, r"steps=2.5: must be a whole number from 1"),
        ({"relation": "bounded"}, r"relation='bounded': must be 'add-remove' or 'replace-one'"),
        (
            {"sampling": "shuffled"},
            r"sampling='shuffled': must be one of 'poisson', 'random-allocation', 'fixed-size', 'full'",
        ),
        ({"n": None}, r"sampling='poisson': needs either rate, or both n and batch_size"),
        ({"rate": 0.1}, r"sampling='poisson': needs either rate, or both n and batch_size"),
        ({"n": None, "sampling": "fixed-size"}, r"sampling='fixed-size': needs n and batch_size"),
        ({"sampling": "full"}, r"sampling='full': takes neither batch_size nor rate"),
    ],
)
def test_bad_input_is_one_clear_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(**MNIST | change)


def test_a_full_batch_imports_nothing_heavy() -> None:
    """A fit whose releases are exactly Gaussian must start without dp-accounting and without the PLD."""
    code = (
        "import sys; from quietgrad.core.accounting.accounting import calibrate;"
        "calibrate(epsilon=1.0, delta=1e-5, steps=50, sampling='full', relation='replace-one');"
        "heavy = {'dp_accounting', 'scipy.stats', 'scipy.optimize', 'quietgrad.core.accounting.pld_accountant'};"
        "heavy &= set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
