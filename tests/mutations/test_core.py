"""Mutants of samplers, calibration, searches and charges, each with the probe that tells it from the sound code.

Every row is run twice: the probe must accept the code as it is and reject the mutant. Seeds are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting import accounting
from quietgrad.core.accounting.accounting import account as price_of
from quietgrad.core.accounting.accounting import calibrate_event, gdp_mu, prove
from quietgrad.core.accounting.events import (
    Composed,
    Event,
    Gaussian,
    RepeatAndSelect,
    Upfront,
    poisson_gaussian,
    repeated,
)
from quietgrad.core.errors import BudgetError, UnprovableError
from quietgrad.core.ledger import state
from quietgrad.core.ledger.account import Charge
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.noise.rng import SecureStream, seed_key
from quietgrad.core.plans import schedule
from quietgrad.core.plans.schedule import Plan
from quietgrad.core.sampling import Poisson
from quietgrad.core.sampling.samplers import SubsetSampler
from quietgrad.core.session.curator import CentralCurator
from quietgrad.estimators import PrivateLogisticRegression, PrivateSearch
from quietgrad.estimators import search as searching

Patch = pytest.MonkeyPatch
BUDGET = qg.Budget(1.0, 1e-5)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


# --- Poisson samples --------------------------------------------------------------------------------------------


def sizes_do_not_tell_members() -> bool:
    """Whether the k-th record drawn and the size of the k-th batch of a block are uncorrelated.

    4000 independent pairs: under independence |r| exceeds 0.12 with probability below 1e-13.
    """
    pairs = []
    for block in range(4000):
        sampler = Poisson(0.01).sampler(2000, SecureStream(seed_key(block), "batches"))
        batches = [np.asarray(sampler.batch(i)) for i in range(3)]
        pairs.append((np.concatenate(batches)[1], len(batches[1])))
    return abs(float(np.corrcoef(np.array(pairs).T)[0, 1])) < 0.12


def members_from_the_words_of_sizes(patch: Patch) -> None:
    drawn = SecureStream.uint64

    def same_words(self: SecureStream, block: int, size: int) -> Any:
        return drawn(self, block - block % 2, size)

    draw = SubsetSampler._draw

    def mutant(self: SubsetSampler, block: int) -> Any:
        with Patch.context() as inner:
            inner.setattr(SecureStream, "uint64", same_words)
            return draw(self, block)

    patch.setattr(SubsetSampler, "_draw", mutant)


# --- calibration ------------------------------------------------------------------------------------------------


def remembered_answers_are_proved() -> bool:
    """Whether an answer found for one run is within the budget of another that looks like it at two points."""
    accounting._FOUND.clear()

    def cheap(z: float) -> Event:
        return repeated(Gaussian(z), 100)

    def dear(z: float) -> Event:
        return cheap(z) if z in (1.0, 2.0) else repeated(Gaussian(z), 400)

    calibrate_event(cheap, budget=BUDGET)
    return prove(dear(calibrate_event(dear, budget=BUDGET)), delta=1e-5, relation="add-remove").within(BUDGET)


def answers_by_the_question_at_one_point() -> bool:
    """The same for runs that look alike at one point only."""
    accounting._FOUND.clear()

    def cheap(z: float) -> Event:
        return repeated(Gaussian(z), 100)

    def dear(z: float) -> Event:
        return cheap(z) if z == 1.0 else repeated(Gaussian(z), 400)

    calibrate_event(cheap, budget=BUDGET)
    return prove(dear(calibrate_event(dear, budget=BUDGET)), delta=1e-5, relation="add-remove").within(BUDGET)


def trusts_what_it_remembers(points: tuple[float, ...]) -> Callable[[Patch], None]:
    """The mutant: a known answer is returned without a proof, if the question is the same at ``points``."""

    def mutate(patch: Patch) -> None:
        search = accounting.calibrate_event
        known: dict[object, float] = {}

        def remembering(make_event: Callable[[float], Event], *, budget: qg.Budget) -> float:
            question = (*map(make_event, points), budget)
            if question not in known:
                accounting._FOUND.clear()
                known[question] = search(make_event, budget=budget)
            return known[question]

        patch.setitem(globals(), "calibrate_event", remembering)

    return mutate


def plans_are_proved_again() -> bool:
    """Whether a plan whose noise is too small for its budget is refused, however the noise was found."""
    with Patch.context() as patch:
        patch.setitem(vars(schedule), "calibrate_event", lambda make, budget: 5.0)
        try:
            qg.plan(qg.DPGD(steps=30), n=1000, budget=BUDGET)
        except BudgetError:
            return True
    return False


def believes_the_calibration(patch: Patch) -> None:
    def calibrate_plan(make: Any, budget: qg.Budget) -> Any:
        return make(vars(schedule)["calibrate_event"](lambda z: make(z).total, budget=budget))

    patch.setattr(schedule, "calibrate_plan", calibrate_plan)


# --- searches ---------------------------------------------------------------------------------------------------


def rounds_cost_what_the_search_pays() -> bool:
    """Whether every round's own plan is within the release that the search is priced by."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (2000, 2))
    opened = CentralCurator.open
    rounds: list[Plan] = []
    whole: list[Plan] = []

    def listening(self: CentralCurator, plan: Any, **how: Any) -> Any:
        (whole if how.get("within") is None else rounds).append(plan)
        return opened(self, plan, **how)

    model = PrivateLogisticRegression(classes=[False, True], feature_bounds=[(-1, 1)] * 2)
    with Patch.context() as patch:
        patch.setattr(CentralCurator, "open", listening)
        PrivateSearch(model, {"regularization": [0.0, 0.1]}, epsilon=4.0, mean_rounds=3.0).fit(X, X[:, 0] > 0)
    event = whole[0].event
    assert isinstance(event, RepeatAndSelect)
    assert rounds
    allowed = gdp_mu(event.inner, relation="add-remove") * (1.0 + 1e-9)
    return all(gdp_mu(plan.event, relation="add-remove") <= allowed for plan in rounds)


def rounds_of_half_as_much_again(patch: Patch) -> None:
    patch.setattr(searching, "price_of", lambda *event, **how: 1.5 * price_of(*event, **how))
    patch.setattr(Charge, "part", lambda self, event, budget: Charge(event))


def a_dearer_round_is_refused() -> bool:
    """Whether an entry for a search pays for its round, and for nothing above it."""
    charge = Charge(RepeatAndSelect(Gaussian(2.0), mean=5.0, shape=1.0))
    charge.part(Gaussian(2.0), BUDGET)
    try:
        charge.part(Gaussian(2.0 / 1.001), BUDGET)
    except UnprovableError:
        return True
    return False


def pays_for_half_as_much_again(patch: Patch) -> None:
    def part(self: Charge, event: Event, budget: qg.Budget | None) -> Charge:
        assert isinstance(self.event, RepeatAndSelect)
        assert budget is not None
        if gdp_mu(event, relation=budget.relation) > 1.5 * gdp_mu(self.event.inner, relation=budget.relation):
            raise UnprovableError("too dear")
        return Charge(event)

    patch.setattr(Charge, "part", part)


# --- charges ----------------------------------------------------------------------------------------------------


def an_upfront_charge_stays() -> bool:
    """Whether a run that stops early pays for the count that it was planned from."""
    count, steps = Upfront(0.01, qg.Relation.ADD_REMOVE), poisson_gaussian(0.1, 2.0, 100)
    ledger = Ledger("upfront.jsonl")
    reserved = ledger.reserve("a", Composed((count, steps)), delta=1e-5, relation="add-remove", run="r")
    half = poisson_gaussian(0.1, 2.0, 50)
    try:
        ledger.close(reserved.id, spent_event=half, reason="stopped", data_dependent=False)
    except ValueError:
        charged = ledger.close(
            reserved.id, spent_event=Composed((count, half)), reason="stopped", data_dependent=False
        )
        return charged == Composed((count, half))
    return False


def gives_an_upfront_charge_back(patch: Patch) -> None:
    def in_order(wanted: Any, whole: Any) -> bool:
        place = 0
        for part in whole:
            place += place < len(wanted) and state.is_part(wanted[place], part)
        return place == len(wanted)

    patch.setattr(state, "_in_order", in_order)


TABLE: list[tuple[str, Callable[[], bool], Callable[[Patch], None]]] = [
    ("members from the words of sizes", sizes_do_not_tell_members, members_from_the_words_of_sizes),
    (
        "a remembered answer is not proved again",
        remembered_answers_are_proved,
        trusts_what_it_remembers((1.0, 2.0)),
    ),
    ("answers keyed by one number", answers_by_the_question_at_one_point, trusts_what_it_remembers((1.0,))),
    ("a calibrated plan is not proved", plans_are_proved_again, believes_the_calibration),
    ("a search's rounds cost half as much again", rounds_cost_what_the_search_pays, rounds_of_half_as_much_again),
    ("an entry pays for dearer rounds", a_dearer_round_is_refused, pays_for_half_as_much_again),
    ("an upfront charge is given back", an_upfront_charge_stays, gives_an_upfront_charge_back),
]


@pytest.mark.parametrize(("probe", "mutate"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_probe_tells_the_mutant_from_the_sound_code(
    probe: Callable[[], bool], mutate: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch
) -> None:
    for folder in ("sound", "broken"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "sound")
    assert probe()
    monkeypatch.chdir(tmp_path / "broken")
    mutate(monkeypatch)
    assert not probe()


def test_a_count_before_samples_is_added_and_not_composed() -> None:
    """The ε of an upfront count is added to the rest's, which holds for every outcome of the count."""
    steps = poisson_gaussian(0.1, 2.0, 100)
    alone = prove(steps, delta=1e-5, relation="add-remove").epsilon
    both = prove(
        Composed((Upfront(0.25, qg.Relation.ADD_REMOVE), steps)), delta=1e-5, relation="add-remove"
    ).epsilon
    assert math.isclose(both, alone + 0.25, rel_tol=1e-6)
