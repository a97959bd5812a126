"""Accountants against closed forms, quadrature, the published tables and dp-accounting."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import (
    ACCOUNTANTS,
    ProvedGuarantee,
    account,
    delta_of,
    gdp_mu,
    noise_multiplier_for_rho,
    prove,
    sensitivity_factor,
)
from quietgrad.core.accounting.budget import Relation
from quietgrad.core.accounting.closed_form_accountants import gaussian_delta, gaussian_epsilon, gaussian_mu
from quietgrad.core.accounting.events import (
    ZCDP,
    Composed,
    Event,
    FixedSizeSampled,
    Gaussian,
    MaxOverParties,
    Parallel,
    PoissonSampled,
    Pure,
    RandomNumberOfReleases,
    RepeatAndSelect,
    Repeated,
    TotalVariationSlack,
    Upfront,
    fixed_size_gaussian,
    from_json,
    gaussian,
    poisson_gaussian,
)
from quietgrad.core.errors import UnprovableError

ADD, REPLACE = "add-remove", "replace-one"
DELTA = 1e-5

cost = partial(account, delta=DELTA, relation=ADD)
proved = partial(prove, delta=DELTA, relation=ADD)
delta_at = partial(delta_of, relation=ADD)
mu_of = partial(gdp_mu, relation=ADD)


# ---- the exact Gaussian ----


@pytest.mark.parametrize(("mu", "epsilon"), [(0.1, 0.05), (1.0, 1.0), (1.0, 8.0), (5.0, 20.0), (0.01, 0.08)])
def test_gaussian_delta_equals_quadrature(mu: float, epsilon: float) -> None:
    """δ(ε) = ∫ (φ(x − μ) − e^ε φ(x))₊ dx to 30 digits."""
    with mpmath.workdps(30):
        start = mpmath.mpf(mu) / 2 + mpmath.mpf(epsilon) / mu
        exact = mpmath.quad(
            lambda x: mpmath.npdf(x - mu) - mpmath.exp(epsilon) * mpmath.npdf(x), [start, start + 5, start + 40]
        )
    assert gaussian_delta(mu, epsilon) == pytest.approx(float(exact), rel=1e-9)


@given(st.floats(0.01, 20.0), st.floats(1e-12, 0.1))
@settings(deadline=None)
def test_gaussian_epsilon_and_mu_invert_each_other(epsilon: float, delta: float) -> None:
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-7, abs=1e-9)


def test_gaussian_releases_add_their_inverse_variances() -> None:
    event = Composed((Gaussian(3.0), Repeated(Gaussian(4.0), 2), Composed((Gaussian(5.0),))))
    assert mu_of(event) == pytest.approx(math.sqrt(1 / 9 + 2 / 16 + 1 / 25))
    assert mu_of(event, relation=REPLACE) == pytest.approx(2 * mu_of(event))
    proof = proved(event, relation=REPLACE)
    assert proof.accountant == "gaussian-exact"
    assert proof.epsilon == pytest.approx(gaussian_epsilon(mu_of(event, relation=REPLACE), DELTA))


def test_sampling_at_rate_one_is_no_sampling() -> None:
    for event, relation in [
        (PoissonSampled(1.0, Gaussian(2.0)), ADD),
        (FixedSizeSampled(9, 9, Gaussian(2.0)), ADD),
    ]:
        assert proved(event, relation=relation) == proved(Gaussian(2.0), relation=relation)


@pytest.mark.parametrize(("epsilon", "saving"), [(0.1, 15.9), (1.0, 13.3), (8.0, 10.3)])
def test_random_round_saves_noise(epsilon: float, saving: float) -> None:
    """A uniformly random round needs 10–16 % less noise than the last one, in the Gaussian regime."""
    rounds = 2000
    law = tuple((k + 1, 1 / rounds) for k in range(rounds))
    full = math.sqrt(rounds) / gaussian_mu(epsilon, DELTA)
    for tenth, reached in ((saving - 0.1, True), (saving + 0.1, False)):
        event = RandomNumberOfReleases(Gaussian(full * (1 - tenth / 100)), law)
        assert (cost(event) <= epsilon) is reached


# ---- the tables of noise multipliers ----

# n, batch, steps, ε; z: Rényi and PLD fixed-size, attack on it, PLD Poisson/replace, Rényi and PLD
# Poisson/add
NOISE_TABLE = [
    (32561, 100, 1500, 0.2, 8.765, 4.693, 4.203, 3.880, 2.311, 2.101),
    (60000, 512, 2000, 1.2, 5.491, 3.225, 2.845, 2.417, 1.518, 1.423),
    (60000, 512, 2000, 3.0, 2.704, 1.894, 1.726, 1.115, 0.909, 0.863),
]


def assert_noise(event: Any, z: float, epsilon: float, **options: Any) -> None:
    """ε(z) passes through ``epsilon`` within 0.2 % of z: three significant digits."""
    assert cost(event(z * 1.002), **options) <= epsilon
    assert cost(event(z * 0.998), **options) > epsilon


@pytest.mark.parametrize("row", NOISE_TABLE, ids=lambda row: f"n={row[0]} eps={row[3]}")
def test_noise_table(row: tuple[float, ...]) -> None:
    n, b, steps = int(row[0]), int(row[1]), int(row[2])
    epsilon, rdp_fixed, pld_fixed, lower, pld_replace, rdp_poisson, pld_poisson = row[3:]
    assert_noise(
        lambda z: fixed_size_gaussian(n, b, z, steps), rdp_fixed, epsilon, relation=REPLACE, accountant="rdp"
    )
    assert_noise(lambda z: fixed_size_gaussian(n, b, z, steps), pld_fixed, epsilon, relation=REPLACE)
    # An attack achieves the Poisson pair at half the noise: others at −C, the record at C or −C.
    assert_noise(lambda z: poisson_gaussian(b / n, z / 2, steps), lower, epsilon)
    assert_noise(lambda z: poisson_gaussian(b / n, z, steps), pld_replace, epsilon, relation=REPLACE)
    assert_noise(lambda z: poisson_gaussian(b / n, z, steps), rdp_poisson, epsilon, accountant="rdp")
    assert_noise(lambda z: poisson_gaussian(b / n, z, steps), pld_poisson, epsilon)
    assert lower < pld_fixed < rdp_fixed


@pytest.mark.parametrize(
    ("n", "b", "s", "steps", "delta", "lower", "ours", "rdp"),
    [
        (100, 1, 1, 1000, 1e-5, 1.828, 2.199, 3.576),
        (100, 5, 2, 500, 1e-6, 2.873, 3.241, 6.615),
        (5, 1, 3, 100, 1e-5, 2.977, 3.151, 7.011),
    ],
)
def test_fixed_size_table(
    n: int, b: int, s: float, steps: int, delta: float, lower: float, ours: float, rdp: float
) -> None:
    event = fixed_size_gaussian(n, b, 2 * s, steps)
    assert cost(event, delta=delta, relation=REPLACE) == pytest.approx(ours, rel=1e-3)
    assert cost(event, delta=delta, relation=REPLACE, accountant="rdp") == pytest.approx(rdp, rel=1e-3)
    assert cost(poisson_gaussian(b / n, s, steps), delta=delta) == pytest.approx(lower, rel=1e-3)


# ---- conventions ----


def test_dp_accounting_still_forgets_the_factor_two() -> None:
    """If this fails, dp-accounting changed its convention: `renyi` must stop dividing z by Δ/C."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent, pld, rdp

    replace = NeighboringRelation.REPLACE_ONE
    forgets = rdp.RdpAccountant(neighboring_relation=replace).compose(GaussianDpEvent(2.0)).get_epsilon(1e-5)
    honours = pld.PLDAccountant(replace).compose(GaussianDpEvent(2.0)).get_epsilon(1e-5)
    assert forgets == pytest.approx(2.1657, abs=1e-3)
    assert honours == pytest.approx(4.3772, abs=1e-3)
    sampled = rdp.RdpAccountant(neighboring_relation=replace)
    sampled.compose(SampledWithoutReplacementDpEvent(100, 99, GaussianDpEvent(2.0)))
    assert sampled.get_epsilon(1e-5) < 4.3  # z would be at least 4.37 at rate 1, were it doubled


@pytest.mark.parametrize("accountant", ["gaussian-exact", "pld", "zcdp", "rdp"])
def test_every_accountant_means_the_same_multiplier(accountant: str) -> None:
    """One Gaussian release, z = 2: under replace-one it is as revealing as z = 1 under add-remove."""
    replaced = cost(Gaussian(2.0), relation=REPLACE, accountant=accountant)
    assert replaced == pytest.approx(cost(Gaussian(1.0), accountant=accountant))
    assert 4.377 < replaced < 4.75


def test_sensitivity_factor_and_rho() -> None:
    assert (sensitivity_factor(ADD), sensitivity_factor(Relation.REPLACE_ONE)) == (1.0, 2.0)
    for relation in Relation:
        z = noise_multiplier_for_rho(0.3, relation)
        as_zcdp = proved(ZCDP(0.3, relation), relation=relation)
        as_gaussian = proved(Gaussian(z), relation=relation, accountant="zcdp")
        assert as_zcdp.epsilon == pytest.approx(as_gaussian.epsilon)
        assert as_zcdp.accountant == "zcdp"


@pytest.mark.parametrize(
    ("relation", "event", "theirs"),
    [
        (ADD, PoissonSampled(0.02, Gaussian(0.9)), (0.02, 0.9)),
        (ADD, PoissonSampled(0.3, Gaussian(5.0)), (0.3, 5.0)),
        (REPLACE, PoissonSampled(0.02, Gaussian(1.3)), (0.02, 1.3)),
        (REPLACE, PoissonSampled(0.5, Gaussian(8.0)), (0.5, 8.0)),
    ],
)
@pytest.mark.parametrize("steps", [1, 60])
def test_pld_agrees_with_dp_accounting(
    relation: str, event: Event, theirs: tuple[float, float], steps: int
) -> None:
    from dp_accounting import NeighboringRelation, dp_event, pld

    one = dp_event.PoissonSampledDpEvent(theirs[0], dp_event.GaussianDpEvent(theirs[1]))
    which = NeighboringRelation.ADD_OR_REMOVE_ONE if relation == ADD else NeighboringRelation.REPLACE_ONE
    accountant = pld.PLDAccountant(which).compose(dp_event.SelfComposedDpEvent(one, steps))
    ours = cost(events.repeated(event, steps), relation=relation, accountant="pld")
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-4, abs=1e-5)


# ---- what `best` chooses ----


@pytest.mark.parametrize(
    ("event", "relation", "name"),
    [
        (gaussian(2.0, 10), ADD, "gaussian-exact"),
        (Pure(1.0, Relation.ADD_REMOVE), ADD, "pure"),
        (Composed((Pure(1.0, Relation.REPLACE_ONE), Gaussian(2.0))), REPLACE, "pld"),
        (Repeated(Pure(0.05, Relation.REPLACE_ONE), 400), REPLACE, "pld"),
        (
            Composed((Pure(0.5, Relation.REPLACE_ONE), fixed_size_gaussian(100, 3, 5.0, 5))),
            REPLACE,
            "pld-fixed-size",
        ),
        (Composed((ZCDP(0.1, Relation.REPLACE_ONE), Gaussian(2.0))), REPLACE, "zcdp"),
        (Composed((ZCDP(0.1, Relation.ADD_REMOVE), poisson_gaussian(0.01, 1.0, 9))), ADD, "rdp"),
        (RepeatAndSelect(gaussian(20.0), mean=10.0), ADD, "rdp"),
        (PoissonSampled(0.1, Composed((Gaussian(2.0), Repeated(Gaussian(3.0), 2)))), ADD, "pld-poisson"),
        (Composed((PoissonSampled(0.1, Gaussian(2.0)), FixedSizeSampled(9, 1, Gaussian(9.0)))), REPLACE, "pld"),
        (
            MaxOverParties((gaussian(9.0), fixed_size_gaussian(100, 3, 5.0, 5), ZCDP(2.0, Relation.REPLACE_ONE))),
            REPLACE,
            "zcdp",
        ),
    ],
)
def test_best_is_the_smallest_and_is_named(event: Event, relation: str, name: str) -> None:
    proof = proved(event, relation=relation)
    assert proof.accountant == name
    assert proof == ProvedGuarantee.from_json(json.loads(json.dumps(proof.to_json())))
    assert events.from_json(json.loads(json.dumps(event.to_json()))) == event
    for accountant in ACCOUNTANTS:
        if isinstance(event, MaxOverParties) or (accountant == "pld" and name == "pure"):
            continue  # best of each part, and a pure claim, which holds with δ = 0 too
        try:
            alone = cost(event, relation=relation, accountant=accountant)
        except UnprovableError:
            continue
        assert proof.epsilon <= alone * (1 + 1e-6)
    assert delta_at(event, epsilon=proof.epsilon, relation=relation) <= DELTA * (1 + 1e-6)


@given(
    st.sampled_from([(ADD, "poisson"), (REPLACE, "poisson"), (REPLACE, "fixed-size"), (ADD, "full")]),
    st.floats(0.6, 6.0),
    st.integers(1, 300),
    st.integers(1, 400),
)
@settings(max_examples=10, deadline=None)
def test_epsilon_falls_with_noise_and_grows_with_steps_and_rate(
    kind: tuple[str, str], z: float, batch: int, steps: int
) -> None:
    relation, sampling = kind

    def epsilon(z: float, batch: int, steps: int) -> float:
        one: Event = Gaussian(z)
        if sampling != "full":
            one = PoissonSampled(batch / 1000, one) if sampling == "poisson" else FixedSizeSampled(1000, batch, one)
        return cost(events.repeated(one, steps), relation=relation)

    here, slack = epsilon(z, batch, steps), 1e-7
    assert epsilon(z * 1.05, batch, steps) <= here * (1 + 1e-4) + slack
    assert epsilon(z, batch, steps + 1 + steps // 20) >= here * (1 - 1e-4) - slack
    assert epsilon(z, batch + 1 + batch // 10, steps) >= here * (1 - 1e-4) - slack


@pytest.mark.parametrize(("rate", "z", "steps"), [(0.01, 2.0, 500), (0.3, 9.0, 50), (0.05, 1.0, 20)])
def test_poisson_curves_under_replace_one(rate: float, z: float, steps: int) -> None:
    """The Poisson pair's curve lies a little above its PLD and joins other curves."""
    event = poisson_gaussian(rate, z, steps)
    tight = cost(event, relation=REPLACE)
    loose = cost(event, relation=REPLACE, accountant="rdp")
    assert tight < loose < 1.3 * tight
    mixed = proved(Composed((event, ZCDP(1e-6, Relation.REPLACE_ONE))), relation=REPLACE)
    assert mixed.accountant == "rdp"
    assert mixed.epsilon == pytest.approx(loose, rel=1e-2)


def test_poisson_curve_tends_to_the_unsampled_one() -> None:
    from quietgrad.core.accounting.closed_form_accountants import _ORDERS, _poisson_replace_curve

    curve, low = _poisson_replace_curve(1 - 1e-15, 1.0), _ORDERS <= 20
    assert curve[low] == pytest.approx(_ORDERS[low] / 2, rel=1e-9)
    assert np.isinf(_poisson_replace_curve(0.5, 20.0)[-1])  # left out, not guessed


@pytest.mark.parametrize("shape", [0.0, 1e-9, 1.0, math.inf])
@pytest.mark.parametrize("mean", [1.0, 1.0 + 2.0**-52, 1.01, 30.0, 1e6])
@pytest.mark.parametrize("z", [1.0, 20.0])
def test_selection_equals_dp_accounting(z: float, mean: float, shape: float) -> None:
    """Everywhere but where K = 1 for certain: there one run is released, and one run is what it costs."""
    from dp_accounting import NeighboringRelation, dp_event, rdp

    from quietgrad.core.accounting.closed_form_accountants import _ORDERS

    theirs = rdp.RdpAccountant(_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    theirs.compose(dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(z), mean, shape))
    ours = cost(RepeatAndSelect(Gaussian(z), mean, shape))
    once = cost(Gaussian(z), accountant="rdp")
    if mean == 1.0 and math.isfinite(shape):
        assert ours == once
    else:
        assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
        assert ours > once


# ---- compositions of all kinds ----


def test_parallel_costs_its_worst_part() -> None:
    parts = (gaussian(3.0, 5), poisson_gaussian(0.05, 1.0, 50), Pure(0.2, Relation.ADD_REMOVE))
    alone = [cost(part) for part in parts]
    for event in (Parallel(parts), MaxOverParties(parts)):
        assert cost(event) == max(alone)
    with_more = [cost(Composed((Gaussian(4.0), part))) for part in parts]
    assert cost(Composed((Gaussian(4.0), Parallel(parts)))) == max(with_more)
    assert delta_at(Parallel(parts), epsilon=1.0) == max(delta_at(part, epsilon=1.0) for part in parts)


def test_parallel_parts_that_another_covers_are_free() -> None:
    parties = tuple(fixed_size_gaussian(100 + k, 5, 4.0 + k, 30) for k in range(40))
    event = Composed((MaxOverParties(parties), MaxOverParties(parties), Repeated(MaxOverParties(parties), 3)))
    worst = Composed((parties[0], parties[0], Repeated(parties[0], 3)))
    assert proved(event, relation=REPLACE) == proved(worst, relation=REPLACE)


def test_repeated_parallel_tries_every_choice_or_takes_curves() -> None:
    parts = Parallel((PoissonSampled(0.5, Gaussian(5.0)), PoissonSampled(0.05, Gaussian(0.9))))
    choices = [cost(Composed((*[parts.parts[0]] * k, *[parts.parts[1]] * (4 - k)))) for k in range(5)]
    assert cost(Repeated(parts, 4)) == pytest.approx(max(choices), rel=1e-3)
    many = proved(Repeated(parts, 400))
    assert many.accountant == "rdp"
    assert many.epsilon >= cost(Repeated(parts.parts[0], 400))
    rounds = RandomNumberOfReleases(parts, ((2, 0.5), (4, 0.5)))
    assert proved(rounds).accountant == "rdp"
    selected = RepeatAndSelect(Parallel((Gaussian(30.0), Pure(0.01, Relation.ADD_REMOVE))), 5.0)
    assert cost(selected) == pytest.approx(cost(RepeatAndSelect(Gaussian(30.0), 5.0)))


def test_random_rounds_mix_profiles_by_every_accountant() -> None:
    law = ((10, 0.25), (40, 0.5), (90, 0.25))
    inner = PoissonSampled(0.1, Gaussian(2.0))
    mixed = RandomNumberOfReleases(inner, law)
    expected = sum(w * delta_at(Repeated(inner, k), epsilon=1.0) for k, w in law)
    assert delta_at(mixed, epsilon=1.0) == pytest.approx(expected, rel=1e-3)
    other = poisson_gaussian(0.02, 1.0, 30)
    expected = sum(w * delta_at(Composed((other, Repeated(inner, k))), epsilon=1.0) for k, w in law)
    assert delta_at(Composed((mixed, other)), epsilon=1.0) == pytest.approx(expected, rel=1e-3)
    for event in (mixed, Repeated(mixed, 2), RandomNumberOfReleases(Gaussian(20.0), law), Composed((mixed, mixed))):
        pld = cost(event, accountant="pld")
        assert cost(event) <= pld
        assert pld <= cost(event, accountant="rdp")
    exact = cost(RandomNumberOfReleases(Gaussian(20.0), law))
    assert cost(RandomNumberOfReleases(Gaussian(20.0), law), accountant="pld") == pytest.approx(exact)
    last = cost(gaussian(20.0, 90), accountant="zcdp")
    assert cost(RandomNumberOfReleases(Gaussian(20.0), law), accountant="zcdp") == last
    nested = RandomNumberOfReleases(RandomNumberOfReleases(Gaussian(50.0), law), ((1, 0.5), (2, 0.5)))
    assert proved(nested).accountant == "pld"
    both = Composed((RandomNumberOfReleases(Gaussian(50.0), law), RandomNumberOfReleases(Gaussian(60.0), law)))
    assert proved(both).accountant == "gaussian-exact"
    many = Composed((RandomNumberOfReleases(Gaussian(90.0), tuple((k, 1 / 200) for k in range(200))),) * 2)
    assert proved(many).accountant == "pld"
    assert cost(RandomNumberOfReleases(Gaussian(1.0), ((0, 1.0),))) == 0.0


def test_slack_adds_to_delta() -> None:
    core = poisson_gaussian(0.01, 1.0, 100)
    event = Composed((core, TotalVariationSlack(1e-9), Repeated(TotalVariationSlack(1e-10), 10)))
    epsilon = cost(event)
    spent = delta_at(core, epsilon=epsilon) + (1 + math.exp(epsilon)) * 2e-9
    assert spent == pytest.approx(DELTA, rel=1e-4)
    assert spent <= DELTA
    assert epsilon > cost(core)
    assert delta_at(event, epsilon=1.0) == pytest.approx(delta_at(core, epsilon=1.0) + (1 + math.e) * 2e-9)
    assert cost(TotalVariationSlack(1e-6)) == 0.0
    spread = Parallel(
        (
            PoissonSampled(0.5, Composed((Gaussian(9.0), TotalVariationSlack(1e-9)))),
            RepeatAndSelect(TotalVariationSlack(1e-9), 5.0),
        )
    )
    assert delta_at(RandomNumberOfReleases(spread, ((1, 1.0),)), epsilon=3.0) < 1e-6
    for hopeless in (TotalVariationSlack(DELTA), Composed((core, TotalVariationSlack(4e-6)))):
        with pytest.raises(UnprovableError, match="total variation"):
            cost(hopeless)


@pytest.mark.parametrize(
    ("event", "relation", "message"),
    [
        (fixed_size_gaussian(100, 10, 1.0, 5), ADD, r"FixedSize.*use the relation replace-one, or Poisson"),
        (
            PoissonSampled(0.1, Pure(1.0, Relation.REPLACE_ONE)),
            REPLACE,
            r"Poisson.*use FixedSize, or the relation add-remove",
        ),
        (PoissonSampled(0.1, gaussian(1.0, 2)), REPLACE, r"Poisson.*single Gaussian"),
        (PoissonSampled(0.1, ZCDP(0.1, Relation.ADD_REMOVE)), ADD, r"ZCDP.*; and Poisson"),
        (PoissonSampled(0.1, Repeated(Pure(1.0, Relation.ADD_REMOVE), 2)), ADD, r"sample anew"),
        (Pure(1.0, Relation.REPLACE_ONE), ADD, r"Pure.*proved under replace-one, not under add-remove"),
        (Repeated(ZCDP(1.0, Relation.ADD_REMOVE), 3), REPLACE, r"ZCDP.*proved under add-remove"),
        (FixedSizeSampled(9, 3, Pure(2000.0, Relation.REPLACE_ONE)), REPLACE, r"use a larger noise multiplier"),
        (
            Repeated(
                PoissonSampled(0.1, Repeated(Parallel((Pure(1.0, Relation.ADD_REMOVE), Gaussian(1.0))), 999)), 9
            ),
            ADD,
            r"Poisson",
        ),
    ],
)
def test_what_nobody_can_prove_is_refused_by_name(event: Event, relation: str, message: str) -> None:
    with pytest.raises(UnprovableError, match=message):
        cost(event, relation=relation)


def test_mu_of_refuses_what_is_not_one_gaussian() -> None:
    with pytest.raises(UnprovableError, match="un-sampled"):
        mu_of(poisson_gaussian(0.1, 1.0))
    with pytest.raises(UnprovableError, match="mixture"):
        mu_of(RandomNumberOfReleases(Gaussian(1.0), ((1, 0.5), (2, 0.5))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, "delta=0.0: must be strictly between 0 and 1"),
        ({"delta": math.nan}, "delta=nan"),
        ({"relation": "zero-out"}, "relation='zero-out': must be 'add-remove' or 'replace-one'"),
        ({"accountant": "clt"}, "accountant='clt': must be 'best' or one of gaussian-exact"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(Gaussian(1.0), **{"delta": DELTA, "relation": ADD, **options})
    with pytest.raises(ValueError, match="epsilon=-1"):
        delta_at(Gaussian(1.0), epsilon=-1.0)
    with pytest.raises(ValueError, match="rho=0"):
        noise_multiplier_for_rho(0.0, ADD)


def test_what_decides_about_the_rest_is_added_by_basic_composition() -> None:
    step, first = poisson_gaussian(0.01, 1.1, 1000), Upfront(0.01, Relation.ADD_REMOVE)
    alone = cost(step)
    both = Composed((first, step))
    proof = proved(both)
    assert proof.epsilon == pytest.approx(alone + 0.01, rel=1e-12)
    assert proof.accountant == "pld-poisson"
    assert proved(first).epsilon == 0.01
    assert delta_at(both, epsilon=alone + 0.01) == pytest.approx(1e-5, rel=1e-3)
    assert delta_at(both, epsilon=0.009) == 1.0
    assert from_json(both.to_json()) == both
    with pytest.raises(UnprovableError, match="proved under"):
        cost(both, relation=REPLACE)
    with pytest.raises(UnprovableError, match="before them"):
        cost(PoissonSampled(0.1, Composed((first, Gaussian(1.0)))))
    assert cost(Repeated(first, 3)) == pytest.approx(0.03)


@pytest.mark.parametrize(
    "wrong",
    [
        {"event": "gaussian", "noise_multiplier": 1e-200},
        {"event": "gaussian", "noise_multiplier": 1e300},
        {"event": "gaussian", "noise_multiplier": True},
        {"event": "zcdp", "rho": 1e200, "relation": "add-remove"},
        {"event": "pure", "epsilon": 1e-30, "relation": "add-remove"},
        {"event": "poisson", "rate": 1e-300, "inner": {"event": "gaussian", "noise_multiplier": 1.0}},
        {"event": "repeated", "count": 10**400, "inner": {"event": "gaussian", "noise_multiplier": 1.0}},
        {"event": "random-round", "law": [[10**400, 1.0]], "inner": {"event": "gaussian", "noise_multiplier": 1.0}},
        {"event": "random-round", "law": [[3, "nan"]], "inner": {"event": "gaussian", "noise_multiplier": 1.0}},
        {"event": "slack", "total_variation": "0.5"},
    ],
)
def test_events_are_made_of_numbers_in_a_stated_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        from_json(wrong)


@pytest.mark.parametrize("z", [1e-18, 1e-9, 1e9, 1e18])
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_at_the_ends_of_the_range_there_is_a_number_or_a_refusal(z: float, relation: str) -> None:
    for event in (
        gaussian(z, 10**6),
        poisson_gaussian(1e-15, z, 10**6),
        fixed_size_gaussian(10**15, 1, z),
    ):
        try:
            assert cost(event, relation=relation) >= 0.0
        except UnprovableError:
            assert z < 1.0 or relation == "add-remove"
