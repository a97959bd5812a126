"""Calibration: on the safe side, within 0.1 %, from few proofs, remembered safely."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.errors import BudgetError, UnprovableError
from quietgrad.privacy import calibration as disk
from quietgrad.privacy import calibration as module
from quietgrad.privacy.accounting import account, prove_or_infinite
from quietgrad.privacy.budget import Budget, Relation
from quietgrad.privacy.calibration import calibrate, calibrate_batch_size, calibrate_event, calibrate_steps
from quietgrad.privacy.closed_form_accountants import gaussian_mu
from quietgrad.privacy.events import (
    ZCDP,
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    Laplace,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    TotalVariationSlack,
    fixed_size_gaussian,
    gaussian,
    poisson_gaussian,
)

MNIST: dict[str, Any] = {"epsilon": 1.2, "delta": 1e-5, "n": 60000, "batch_size": 512, "steps": 2000}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Every event that calibration asked a proof for."""
    asked: list[Event] = []

    def counted(event: Event, delta: float, relation: Relation) -> Any:
        asked.append(event)
        return prove_or_infinite(event, delta, relation)

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

    z = calibrate_event(event, budget=budget, cache=False)
    reached = account(event(z), delta=budget.delta, relation=budget.relation)
    assert 0.999 * budget.epsilon <= reached <= budget.epsilon


@pytest.mark.parametrize(
    "make",
    [
        lambda z: Composed((PoissonSampled(0.04, Gaussian(2 * z)), poisson_gaussian(0.01, z, 300))),
        lambda z: Composed((Gaussian(z), Laplace(3 * z))),
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
    assert calibrate_steps(**budget, **options) == steps


def test_batch_size_is_the_largest_that_fits(proofs: list[Event]) -> None:
    options: dict[str, Any] = {"epsilon": 1.2, "delta": 1e-5, "noise_multiplier": 1.43, "steps": 2000, "n": 60000}
    size = calibrate_batch_size(**options)
    assert len(proofs) <= 15
    assert account(poisson_gaussian(size / 60000, 1.43, 2000), delta=1e-5, relation="add-remove") <= 1.2
    assert account(poisson_gaussian((size + 1) / 60000, 1.43, 2000), delta=1e-5, relation="add-remove") > 1.2
    fixed = options | {"noise_multiplier": 3.3, "sampling": "fixed-size", "relation": "replace-one"}
    size = calibrate_batch_size(**fixed)
    assert account(fixed_size_gaussian(60000, size, 3.3, 2000), delta=1e-5, relation="replace-one") <= 1.2
    assert account(fixed_size_gaussian(60000, size + 1, 3.3, 2000), delta=1e-5, relation="replace-one") > 1.2
    assert calibrate_batch_size(**options | {"n": 50, "steps": 1, "noise_multiplier": 9.0}) == 50
    with pytest.raises(BudgetError, match="batch_size=1 already costs"):
        calibrate_batch_size(**options | {"noise_multiplier": 0.1, "n": 2})
    with pytest.raises(BudgetError, match="steps=1 already costs"):
        calibrate_steps(epsilon=0.1, delta=1e-5, noise_multiplier=0.5, sampling="full")


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
            r"sampling='shuffled': must be 'poisson', 'random-allocation', 'fixed-size' or 'full'",
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


# ---- the cache ----


def entries() -> list[Path]:
    return sorted(disk.directory().glob("calibration/*"))


def test_second_time_is_looked_up(proofs: list[Event]) -> None:
    first = calibrate(**MNIST)
    assert len(entries()) == 1
    proofs.clear()
    assert calibrate(**MNIST) == first
    assert len(proofs) == 1  # what a file remembers is proved again, once
    proofs.clear()
    assert calibrate(**MNIST, cache=False) == first
    assert len(proofs) > 1


@pytest.mark.parametrize(
    "change", [{"epsilon": 1.3}, {"delta": 1e-6}, {"steps": 2001}, {"batch_size": 513}, {"relation": "replace-one"}]
)
def test_every_input_is_part_of_the_key(change: dict[str, Any]) -> None:
    calibrate(**MNIST)
    calibrate(**MNIST | change)
    assert len(entries()) == 2


def test_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch, proofs: list[Event]) -> None:
    calibrate(**MNIST)
    monkeypatch.setattr(disk, "_versions", lambda: ("numpy 0.0",))
    proofs.clear()
    calibrate(**MNIST)
    assert proofs
    assert len(entries()) == 2


def test_a_user_key_tells_functions_apart() -> None:
    for power in (1, 3):

        def make(z: float, power: int = power) -> Event:
            return Gaussian(z + abs((z - 1) * (z - 2)) / 9**power)  # the same at z = 1 and z = 2 for all powers

        z = calibrate_event(make, budget=Budget(1.0, 1e-5), key=power)
        assert 0.999 <= account(make(z), delta=1e-5, relation="add-remove") <= 1.0
    assert len(entries()) == 2


@pytest.mark.parametrize("damage", ["", "not json", "[]", '{"answer": 0.1}', "smaller", "\x00\xff"])
def test_damaged_entries_are_ignored(damage: str) -> None:
    right = calibrate(**MNIST)
    (entry,) = entries()
    if damage == "smaller":  # an edited answer without its check sum must not lower the noise
        entry.write_text(json.dumps(json.loads(entry.read_text()) | {"answer": right / 2}))
    else:
        entry.write_text(damage, encoding="latin-1")
    assert calibrate(**MNIST) == right


def test_a_directory_that_cannot_be_used_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("QUIETGRAD_CACHE", str(blocked / "below"))
    assert calibrate(**MNIST) == pytest.approx(1.423, rel=1e-3)
    monkeypatch.setenv("QUIETGRAD_CACHE", str(tmp_path / "fails"))

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    assert calibrate(**MNIST) == pytest.approx(1.423, rel=1e-3)
    assert entries() == []  # nothing half-written stays behind


def test_parallel_writers_leave_one_intact_entry() -> None:
    question = {"ask": "test"}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: disk.store_calibration(question, 1.25), range(200)))
        answers = set(pool.map(lambda _: disk.load_calibration(question), range(200)))
    assert answers == {1.25}
    assert len(entries()) == 1


def test_a_full_batch_imports_nothing_heavy(tmp_path: Path) -> None:
    """A fit whose releases are exactly Gaussian must start without dp-accounting and without the PLD."""
    code = (
        "import sys; from quietgrad.privacy.calibration import calibrate;"
        "calibrate(epsilon=1.0, delta=1e-5, steps=50, sampling='full', relation='replace-one');"
        "heavy = {'dp_accounting', 'scipy.stats', 'scipy.optimize', 'quietgrad.privacy.pld_accountant'};"
        "heavy &= set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
