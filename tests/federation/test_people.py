"""People in federations: known to one party, or to several and priced so."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.core.errors import DataError
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, simulate
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.simulation import assemble, check_known_people
from quietgrad.tables.privacy_units import RecordsWithIds, UserLevelObjective
from tests.federation.talk import toml_plan

LOSS = qg.objectives.Logistic()


def visits(people: int, first: int, seed: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(first, first + people), rng.integers(1, 6, people))
    X = rng.normal(size=(len(ids), 2))
    return X, (X[:, 0] > 0) * 1.0, ids


def parties(overlap: int = 0) -> list[Party]:
    a, b = visits(60, 0, 1), visits(60, 60 - overlap, 2)
    return [Party(a[0], a[1], person=a[2]), Party(b[0], b[1], person=b[2])]


def planned(times: int, method: Any = None, relation: Any = Relation.ADD_REMOVE, **settings: Any) -> FederatedPlan:
    return federate(
        method or qg.DPGD(steps=4), LOSS, names=["a", "b", "c"], sizes=[50, 60, 70], shape=Shape(2, 2),
        budget=Budget(1.0, 1e-5, relation), unit="person", parties_per_person=times, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trust", "settings"),
    [("curator", {}), ("secure", {"combine": "sum"}), ("local", {"records_per_person": 2})],
)
def test_a_run_on_people_of_several_parties(trust: Any, settings: Any) -> None:
    secure: Any = "masks" if trust == "secure" else None
    result = simulate(
        qg.DPGD(steps=3), LOSS, parties(), budget=Budget(4.0, 1e-5), trust=trust, secure=secure,
        parties_per_person=1, **settings,
    )  # fmt: skip
    assert result.n_public == 120
    assert result.privacy.unit == "person"
    assert any("known to one party only" in note for note in result.privacy.notes)
    assert any(note.startswith("a person counts with") for note in result.privacy.notes)


def test_parties_without_noise_sum_as_one_curator_of_all_people() -> None:
    both = parties()
    rows = [np.concatenate([getattr(p, name) for p in both]) for name in ("X", "y", "person")]
    alone = qg.minimize(LOSS, (rows[0], rows[1]), qg.GD(steps=5), budget=None, person=rows[2])
    together = simulate(qg.GD(steps=5), LOSS, both, budget=None, parties_per_person=1)
    np.testing.assert_allclose(alone.params, together.params, rtol=1e-9)


def test_how_many_parties_know_a_person_must_be_said_and_is_looked_at_where_it_can_be() -> None:
    with pytest.raises(ValueError, match="say how many parties may know one person"):
        simulate(qg.DPGD(steps=3), LOSS, parties(), budget=Budget(1.0, 1e-5))
    with pytest.raises(DataError, match="known to more than") as error:
        simulate(qg.DPGD(steps=3), LOSS, parties(overlap=1), budget=Budget(1.0, 1e-5), parties_per_person=1)
    assert "59" not in str(error.value)
    assert check_known_people(parties(overlap=20), 2)
    a, b = parties()
    with pytest.raises(ValueError, match="give all of them person=, or none"):
        check_known_people([a, Party(b.X, b.y)], 1)
    with pytest.raises(ValueError, match="give every party person="):
        federate(qg.DPGD(steps=4), LOSS, names=["a", "b"], sizes=[9, 9], shape=Shape(2, 2), budget=None,
                 parties_per_person=2)  # fmt: skip


@pytest.mark.parametrize("trust", ["curator", "secure"])
def test_noise_is_as_loud_as_a_person_known_to_several_parties(trust: Any) -> None:
    secure: Any = "masks" if trust == "secure" else None
    one, three = (planned(times, trust=trust, secure=secure) for times in (1, 3))
    assert (one.reach, three.reach) == (1.0, 3.0)
    assert one.noise_multiplier == pytest.approx(three.noise_multiplier)  # a multiple of what a person contributes
    # Brute force: somebody in three parties moves their sum by three bounds and no more.
    rule, point = ClippingRule.gradient(1.0), np.array([0.3, -0.2])
    total, asked = np.zeros(2), UserLevelObjective(LOSS)
    for seed in range(3):
        X, y, ids = visits(20, 100, seed)
        there = np.vstack([X, np.tile([1e3, 0.0], (500, 1))]), np.concatenate([y, np.zeros(500)])
        whose = np.concatenate([ids, np.full(500, 7)])
        for sign, data, who in ((1.0, there, whose), (-1.0, (X, y), ids)):
            out = np.zeros(2)
            asked.add(Batch(asked.prepare(RecordsWithIds(data, _people(who))), None), (point,), rule, out)
            total += sign * out
    assert 2.9 * rule.bound < np.linalg.norm(total) <= three.reach * rule.bound * (1 + 1e-9)


@pytest.mark.parametrize("trust", ["curator", "secure"])
def test_the_noise_that_is_heard_is_for_as_many_parties(trust: Any) -> None:
    """Silent parties: what is released is noise. Its deviation over 2000 numbers is within 8 % but for 10⁻⁶."""
    secure: Any = "masks" if trust == "secure" else None
    heard = []
    for times in (1, 2):
        silent = [
            Party(np.zeros((40, 2000)), np.zeros(40), person=np.repeat(np.arange(20) + 100 * k, 2)) for k in (0, 1)
        ]
        result = simulate(
            qg.DPGD(steps=1, learning_rate=1.0, clip=1.0), LOSS, silent, budget=Budget(1.0, 1e-5), trust=trust,
            secure=secure, parties_per_person=times,
        )  # fmt: skip
        expected = result.privacy.noise_multiplier * times * np.sqrt(result.details["variance_factor"]) / 40
        assert np.std(result.params) == pytest.approx(expected, rel=0.08)
        heard.append(np.std(result.params))
    assert heard[1] == pytest.approx(2.0 * heard[0], rel=0.15)


def _people(ids: Any) -> Any:
    from quietgrad.tables.privacy_units import UnitGrouping

    codes = np.unique(ids, return_inverse=True)[1]
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    return UnitGrouping(np.argsort(codes, kind="stable"), starts)


def test_own_noise_of_several_parties_is_paid_for_by_all_of_them() -> None:
    one, two = planned(1, trust="local"), planned(2, trust="local")
    assert two.reach == 1.0
    assert two.noise_multiplier > 1.3 * one.noise_multiplier  # √2 for Gaussian releases
    event = two.party_event(0, None)
    assert isinstance(event, events.Repeated)
    assert event.count % 2 == 0


def test_sampled_people_of_several_parties_are_drawn_more_often() -> None:
    method = qg.DPSGD(steps=20, batch_size=18)
    one, two = planned(1, method), planned(2, method)
    (slot,) = one.schedule.slots
    q = slot.sampling.rate  # type: ignore[attr-defined]
    event = two.party_event(0, None)
    assert isinstance(event, events.Repeated)
    assert isinstance(event.inner, events.PoissonSampled)
    assert event.inner.rate == pytest.approx(1.0 - (1.0 - q) ** 2)
    assert two.epsilon() <= 1.0
    assert two.noise_multiplier > one.noise_multiplier
    with pytest.raises(ValueError, match="under add-remove only"):
        planned(2, method, Relation.REPLACE_ONE)
    with pytest.raises(ValueError, match="fixed local batches"):
        planned(2, qg.DPSGD(steps=20, batch_size=18, sampling="fixed-size"), Relation.REPLACE_ONE)


def test_the_mixture_over_who_drew_a_person_is_dominated() -> None:
    """Hockey-stick divergences of the k-party mixture against the one draw it is priced as, by quadrature."""
    q, k, z = 0.1, 3, 1.2
    x = np.linspace(-12 * z * k, 12 * z * k, 200_001)
    step = x[1] - x[0]

    def normal(mean: float, sigma: float) -> Any:
        return np.exp(-0.5 * ((x - mean) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))

    sigma = z * k  # noise priced for k·C
    chances = [1.0, 3.0, 3.0, 1.0]
    mixture = sum(c * q**j * (1 - q) ** (k - j) * normal(j, sigma) for j, c in enumerate(chances))
    rate = 1.0 - (1.0 - q) ** k
    single = (1.0 - rate) * normal(0.0, sigma) + rate * normal(float(k), sigma)
    nobody = normal(0.0, sigma)
    for epsilon, turned in itertools.product((0.01, 0.1, 0.5, 1.0), (False, True)):
        pairs = [(p, nobody) if not turned else (nobody, p) for p in (mixture, single)]
        true, priced = (float(np.maximum(p - np.exp(epsilon) * r, 0.0).sum() * step) for p, r in pairs)
        assert true <= priced + 1e-12


def test_a_plan_on_people_reads_back_and_a_party_holds_people() -> None:
    plan, _ = assemble(
        qg.DPGD(steps=3), LOSS, parties(), budget=Budget(1.0, 1e-5), parties_per_person=2, unit="person"
    )
    again = FederatedPlan.from_json(plan.to_json())
    assert again.digest == plan.digest
    assert again.parties_per_person == 2
    assert "one may be known to 2 parties" in plan.explain()
    assert "a person more or less moves it by at most C" in plan.explain()
    from quietgrad.federation.party import PartyCurator

    X, y, ids = visits(60, 0, 1)
    with pytest.raises(DataError, match="say whose each record is"):
        PartyCurator("party-1", LOSS, (X, y), plan)
    rows, _ = assemble(qg.DPGD(steps=3), LOSS, [Party(X, y)], budget=Budget(1.0, 1e-5))
    with pytest.raises(DataError, match="leave out whose"):
        PartyCurator("party-1", LOSS, RecordsWithIds((X, y), ids), rows)
    assert GradientQuery(np.zeros(2), 1.0).bound == 1.0


TWO_CLINICS = toml_plan(
    {"a": 60, "b": 60}, 'name = "two-clinics"\ntrust = "curator"\n{how}', steps=3, features=2,
    data='person = "patient"',
)  # fmt: skip


def test_a_plan_file_names_the_column_of_people(tmp_path: Any) -> None:
    from quietgrad.federation import approved
    from quietgrad.federation.party import PartyCurator
    from quietgrad.federation.plan_file import parse_plan

    file = parse_plan(TWO_CLINICS.format(how="parties_per_person = 2"))
    assert (file.plan.unit, file.plan.parties_per_person, file.plan.reach) == ("person", 2, 2.0)
    X, y, ids = visits(60, 0, 1)
    path = tmp_path / "a.csv"
    rows = [f"{a},{b},p{i},{int(t)}" for (a, b), i, t in zip(X, ids, y, strict=True)]
    path.write_text("\n".join(["x1,x2,patient,y", *rows]) + "\n")
    table = approved.records(file, path)
    assert (
        len(PartyCurator("a", file.objective, RecordsWithIds((table.X, table.y), table.person), file.plan).records)
        == 60
    )
    with pytest.raises(DataError, match="say how many parties may know one person"):
        _ = parse_plan(TWO_CLINICS.format(how="")).plan
