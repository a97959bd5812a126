"""Clipping rules: their arithmetic, what one record moves under each, and what notices when one is broken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.session import clipping as rules
from quietgrad.core.session.clipping import (
    FLAT,
    Automatic,
    Clipping,
    PerLayer,
    group_bounds,
    known_rules,
    read_clipping,
    scale_factors,
)
from quietgrad.core.session.contributions import ClippingRule
from quietgrad.core.session.objectives import Batch
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, simulate
from quietgrad.federation.wire import pack, template, template_mismatch, unpack
from quietgrad.methods.registry import entry
from quietgrad.objectives import Logistic, Multinomial, Squared
from quietgrad.tables.landscapes import landscape
from quietgrad.tables.privacy_units import PersonRule, RecordsWithIds, UserLevelObjective
from quietgrad.torch.networks import engine, gradients
from quietgrad.torch.networks.module import ModuleObjective
from tests.mutations import broken_networks as broken
from tests.probes.networks import probe_network

RULES: tuple[Clipping, ...] = (
    FLAT, Automatic(), Automatic(1e-6), PerLayer(), PerLayer({"0": 3.0, "": 1.0}), PerLayer(within=Automatic()),
)  # fmt: skip
BUDGET = qg.Budget(4.0, 1e-5)


# --- arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_factor_lifts_a_vector_above_the_bound_in_numpy_or_torch(rule: Clipping) -> None:
    norms = np.array([0.0, 5e-324, 1e-200, 1e-12, 0.3, 1.0, 1e6, 1e300, math.inf, math.nan])
    for clip in (2.0**-60, 0.7, 2.0**100):
        made = scale_factors(rule, norms, clip)
        assert np.isfinite(made).all()
        assert (np.abs(made[:8]) * norms[:8] <= clip * (1 + 1e-15)).all()
        again = scale_factors(rule, torch.from_numpy(norms), clip).numpy()
        np.testing.assert_allclose(made, again, rtol=1e-14)


@pytest.fixture
def foreign() -> Iterator[type[Clipping]]:
    """A rule that answers by a function of all the norms that it is given."""

    class Foreign(Clipping, kind="foreign"):
        def __init__(self, answer: Callable[[Any, Any], Any]) -> None:
            object.__setattr__(self, "answer", answer)

        def __post_init__(self) -> None: ...

        def factors(self, norms: Any, clip: Any) -> Any:
            return self.answer(norms, clip)  # type: ignore[attr-defined]

    yield Foreign
    del rules._KINDS["foreign"]


def test_a_rule_that_answers_nonsense_cannot_exceed_the_bound(foreign: Any) -> None:
    answers = {1.0: 1e300, 2.0: -1e300, 3.0: math.nan, 4.0: math.inf}
    made = scale_factors(foreign(lambda norms, clip: answers[norms[0]]), np.array([1.0, 2.0, 3.0, 4.0]), 1.0)
    assert made.tolist() == [1.0, -0.5, 0.0, 0.0]


@pytest.mark.parametrize("of", [np.array, torch.tensor])
@pytest.mark.parametrize("within", [False, True])
def test_no_rule_sees_two_norms_at_once(foreign: Any, of: Any, within: bool) -> None:
    """Divided by the largest norm of a sample, one record more would move the contributions of all others."""
    rule: Any = foreign(lambda norms, clip: clip / norms.max())
    rule = PerLayer(within=rule) if within else rule
    alone, beside = (np.asarray(scale_factors(rule, of(n), of([1.0]))) for n in ([0.5, 1.0], [0.5, 1.0, 1e6]))
    assert beside[:2].tolist() == alone.tolist() == [2.0, 1.0]


def test_no_rule_remembers_a_norm(foreign: Any) -> None:
    class Remembers:
        def __init__(self) -> None:
            self.largest = 0.0

        def __call__(self, norms: Any, clip: Any) -> Any:
            self.largest = max(self.largest, norms[0])
            return clip / self.largest

    rule = foreign(Remembers())
    for _ in range(2):
        assert scale_factors(rule, np.array([1e6, 0.5, 1.0]), 1.0).tolist() == [1e-6, 2.0, 1.0]


def test_bounds_of_groups_have_squares_that_add_up_whatever_the_weights() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = 2.0 ** rng.uniform(-30, 30, rng.integers(1, 40))
        assert math.hypot(*group_bounds(weights.tolist(), 0.3)) == pytest.approx(0.3, rel=1e-14)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Automatic(0.0), "stability=0.0"),
        (lambda: PerLayer({"a": 0.0}), "one for each group"),
        (lambda: PerLayer((("a", 1.0), ("a", 2.0))), "given twice"),
        (lambda: PerLayer(within=PerLayer()), "not cut again"),
        (lambda: PerLayer({"a": 1.0}).groups(["b.weight"]), "'b.weight' is in none of the groups a"),
        (lambda: read_clipping("adaptive"), "second release"),
        (lambda: read_clipping("none"), "must be one of 'flat', 'automatic', 'per-layer'"),
        (lambda: read_clipping({"kind": "automatic", "gamma": 1.0}), "gamma"),
        (lambda: ClippingRule.gradient(math.inf, Automatic()), "needs a finite clip"),
        (lambda: qg.DPSRM(mode="theory", zeta=0.1, smoothness=1.0, clipping="automatic"), "flat clipping"),
    ],
)
def test_settings_that_mean_nothing_are_refused_in_words(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_groups_go_by_module_or_by_the_longest_beginning() -> None:
    names = ["conv.weight", "conv.bias", "block.0.weight", "block.1.weight", "scale"]
    assert PerLayer().groups(names) == ([0, 0, 1, 2, 3], [1.0] * 4)
    rule = PerLayer({"": 1.0, "block": 2.0, "block.1": 5.0, "unused": 9.0})
    assert rule.groups(names) == ([0, 0, 1, 2, 0], [1.0, 2.0, 5.0])


# --- networks ----------------------------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("people", [False, True])
def test_the_sum_of_a_network_is_that_of_autograd_scaled_by_the_rule(rule: Clipping, people: bool) -> None:
    model, x, y = _net(), torch.randn(7, 3, dtype=torch.float64), torch.randint(0, 2, (7,))
    owners = [0, 1, 1, 2, 0, 0, 3] if people else list(range(7))
    sums, norms = qt.clipped_gradient_sum(model, nn.CrossEntropyLoss(), (x, y), 0.4, clipping=rule, person=owners)
    names = [name for name, _ in model.named_parameters()]
    numbers, weights = rule.groups(names)
    bounds = group_bounds(weights, 0.4)
    wanted = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
    for owner in sorted(set(owners)):
        mine = [k for k in range(7) if owners[k] == owner]
        loss = torch.stack([nn.functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1]) for k in mine]).mean()
        own = torch.autograd.grad(loss, list(model.parameters()))
        lengths = [
            math.sqrt(sum(float(g.square().sum()) for g, k in zip(own, numbers, strict=True) if k == group))
            for group in range(len(weights))
        ]
        assert float(norms[owner]) == pytest.approx(math.hypot(*lengths))
        for name, grad, group in zip(names, own, numbers, strict=True):
            length, bound = lengths[group], bounds[group]
            inner = rule.within if isinstance(rule, PerLayer) else rule
            gamma = inner.stability if isinstance(inner, Automatic) else None
            wanted[name] += grad * (min(1.0, bound / length) if gamma is None else bound / (length + gamma))
    for name in names:
        torch.testing.assert_close(sums[name], wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [PerLayer(within=Automatic())], ids=str)
def test_no_record_moves_a_networks_sum_by_more_than_c(rule: Clipping) -> None:
    assert probe_network("tied weights", clipping=rule).verdict != "violation"


def _whole_bound_for_each_group(patch: pytest.MonkeyPatch) -> None:
    """A group bound that is not in the sum: each group has all of C."""
    patch.setattr(gradients, "group_bounds", lambda weights, clip: [clip] * len(weights))


def _no_stability(patch: pytest.MonkeyPatch) -> None:
    """γ = 0, and nothing that catches what a zero gradient makes of it."""
    patch.setattr(Automatic, "factors", lambda self, norms, clip: clip / norms)
    patch.setattr(engine, "scale_factors", lambda rule, norms, clip: rule.factors(norms, clip))


def _zero_gradient(rule: Clipping) -> Any:
    """Neighbours of whom one has no gradient at all."""
    networks: Any = import_module("tests.probes.networks")
    loss, networks.loss = networks.loss, lambda output, y: output[:, 0]
    networks.MODELS["no intercept"] = lambda: nn.Linear(8, 1, bias=False)
    try:
        return probe_network("no intercept", clipping=rule)
    finally:
        networks.loss = loss
        del networks.MODELS["no intercept"]


@pytest.mark.parametrize(
    ("make", "probe"),
    [
        (_whole_bound_for_each_group, lambda: probe_network("layers", clipping=PerLayer())),
        (_no_stability, lambda: _zero_gradient(Automatic())),
    ],
)
def test_the_neighbours_find_a_broken_rule_and_spare_the_sound_one(make: Any, probe: Any) -> None:
    assert any(f.verdict == "violation" for f in broken.under(make, probe))
    assert not any(f.verdict == "violation" for f in broken.under(None, probe))


def test_automatic_clipping_amplifies_what_company_rounds_otherwise_within_the_slack() -> None:
    """Short gradients are scaled up by as much as C/γ, and with them how a pass of other records rounds them."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    objective = ModuleObjective(model, nn.CrossEntropyLoss())
    x, y = torch.randn(512, 64), torch.randint(0, 8, (512,))
    with torch.no_grad():
        model[2].weight.mul_(1e-3)  # short gradients of the first layer
    records = objective.prepare((x, y))
    theta, key = objective.initial(records), bytes(range(32))
    sums = []
    for kept in (np.arange(512), np.arange(511)):
        out = torch.zeros_like(theta, dtype=torch.float64)
        objective.add(Batch(records, kept, key), (theta,), ClippingRule.gradient(1.0, Automatic()), out)
        sums.append(out)
    assert float((sums[0] - sums[1]).norm()) <= 1.0


# --- tables ------------------------------------------------------------------------------------------------------


TABLE_RULES = (
    ClippingRule.gradient(0.6, Automatic()),
    ClippingRule.difference(0.2, Automatic(0.1)),
    ClippingRule.momentum(0.3, 1.0, 0.1, Automatic()),
    ClippingRule.joint(0.3, 0.5, Automatic()),
)


@pytest.mark.parametrize("rule", TABLE_RULES, ids=str)
@pytest.mark.parametrize(
    "loss", [Logistic(intercept=True), Multinomial(3), Squared()], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("people", [False, True])
def test_no_record_moves_a_tables_sum_by_more_than_the_bound(loss: Any, rule: ClippingRule, people: bool) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12, 4)) * np.array([1e-9, 1.0, 1e3, 1e-3])
    X[3], X[4], X[5] = 0.0, 1e200, 1e-200
    y = rng.integers(0, 2, 12)
    asked = UserLevelObjective(loss, PersonRule("sum")) if people else loss
    ids = np.arange(12) % 6
    records = asked.prepare(RecordsWithIds((X, y), ids) if people else (X, y))
    points = [rng.normal(size=records.rows.dim if people else records.dim) for _ in range(2)]
    everyone = np.arange(6 if people else 12)

    def total(indices: Any) -> Any:
        out = np.zeros(len(points[0]))
        asked.add(Batch(records, indices, bytes(32)), points, rule, out)
        return out

    np.testing.assert_allclose(total(everyone), total(None), rtol=1e-9, atol=1e-12)
    for one in everyone:
        alone = total(np.array([one]))
        assert np.isfinite(alone).all()
        assert np.linalg.norm(alone) <= rule.bound * (1 + 1e-9)
        # What is short enough for flat clipping is scaled too: this is another rule.
        assert np.linalg.norm(total(everyone) - total(np.delete(everyone, one))) <= rule.bound * (1 + 1e-9)


def test_automatic_clipping_of_a_table_is_the_formula() -> None:
    rng = np.random.default_rng(1)
    X, y, theta = rng.normal(size=(9, 3)), rng.normal(size=9), rng.normal(size=3)
    loss, out = Squared(), np.zeros(3)
    loss.add(Batch(loss.prepare((X, y)), np.arange(9)), (theta,), ClippingRule.gradient(0.5, Automatic(0.2)), out)
    rows = (X @ theta - y)[:, None] * X
    wanted = (rows * 0.5 / (np.linalg.norm(rows, axis=1, keepdims=True) + 0.2)).sum(0)
    np.testing.assert_allclose(out, wanted, rtol=1e-9)


def test_a_landscape_knows_the_rules_too() -> None:
    loss = landscape("strict-saddle", d=4)
    records = loss.prepare(20)
    out = np.zeros(4)
    loss.add(Batch(records, np.array([0])), (np.ones(4),), ClippingRule.gradient(0.5, Automatic(1e-6)), out)
    assert np.linalg.norm(out) == pytest.approx(0.5, rel=1e-4)


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp-sgd", "dp-adam", "dp-gd", "dp-srm"])
def test_a_rule_is_a_setting_of_a_method_and_flat_is_what_plans_without_it_mean(name: str) -> None:
    flat = entry(name).make({"steps": 8})
    assert "clipping" not in flat.config()
    for given in ("automatic", PerLayer({"": 1.0}).config()):
        method = entry(name).make({"steps": 8, "clipping": given})
        assert entry(name).make(method.config()) == method


def test_a_method_with_a_rule_trains_a_table_at_the_price_of_the_flat_one() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 2))
    y = (X[:, 0] > 0) * 1.0
    method = qg.DPGD(steps=8, clipping="automatic")
    result = qg.minimize(Logistic(), (X, y), method, budget=BUDGET, n_public=600, seed=0)
    assert result.params[0] > 0
    plans = [qg.plan(m, n=600, budget=BUDGET) for m in (method, qg.DPGD(steps=8))]
    assert plans[0].noise_multiplier == plans[1].noise_multiplier
    with pytest.raises(ValueError, match="groups parameters by the modules of a network"):
        qg.minimize(Logistic(), (X, y), qg.DPGD(clipping="per-layer"), budget=BUDGET, n_public=600, seed=0)


@pytest.mark.parametrize("rule", ["automatic", PerLayer({"0": 2.0, "2": 1.0})], ids=str)
def test_fit_loop_and_verbs_take_a_rule_and_say_it(rule: Any) -> None:
    x = torch.randn(120, 3)
    data = (x, (x[:, 0] > 0).long())
    model = _net().float()
    result = qt.fit(
        model, nn.CrossEntropyLoss(), data, qg.DPSGD(steps=3, batch_size=30, clipping=rule), budget=BUDGET,
        n_public=120,
    )  # fmt: skip
    assert result.config["clipping"] == (rule if isinstance(rule, str) else rule.config())
    forwarded = qt.fit(
        model, nn.CrossEntropyLoss(), data, qg.DPSGD(steps=3, batch_size=30), budget=BUDGET, n_public=120,
        clipping=rule,
    )  # fmt: skip
    assert forwarded.config == result.config
    with pytest.raises(ValueError, match=r"clipping: .* has no clipping rule of its own"):
        qt.fit(model, nn.CrossEntropyLoss(), data, qg.DPAGD(), budget=BUDGET, n_public=120, clipping=rule)
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), data, optimizer=torch.optim.SGD(model.parameters(), 0.1), batch_size=30,
        steps=3, max_grad_norm=1.0, clipping=rule, budget=BUDGET, n_public=120,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    assert loop.plan.config["clipping"] == read_clipping(rule).config()


def test_opacus_bounds_of_single_parameters_are_groups_of_one() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 3), torch.randint(0, 2, (60,)))
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "criterion": nn.CrossEntropyLoss(), "epochs": 1}

    def made(bounds: Any, clipping: str) -> Any:
        model = _net().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(data, batch_size=20)
        return qt.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            max_grad_norm=bounds,
            clipping=clipping,
            **settings,
        )

    model, optimizer, loader, criterion = made([0.3, 0.4, 1.2, 0.0001], "per_layer")
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.max_grad_norm == pytest.approx(1.3)
    assert loader.privacy.condition is None
    with pytest.raises(ValueError, match="each of the 4 trained parameters"):
        made([0.3, 0.4], "per_layer")
    with pytest.raises(ValueError, match="A list goes with"):
        made([0.3, 0.4, 1.2, 0.1], "flat")


# --- parties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_query_with_a_rule_goes_over_the_wire_and_is_held_to_the_plan(rule: Clipping) -> None:
    from quietgrad.core.session.queries import Asked

    query = GradientQuery(np.zeros(2), 1.5, rule)
    fields, arrays = pack(query)
    assert ("clipping" in fields) == (rule != FLAT)
    again: Any = unpack(fields, arrays, np.zeros(1))
    assert again.clipping == rule
    assert again.rule == query.rule
    _, allowed = template(Asked(query))
    assert template_mismatch([allowed], fields, arrays) is None
    other, more = pack(GradientQuery(np.zeros(2), 1.5, Automatic(0.5)))
    assert template_mismatch([allowed], other, more) is not None


def test_parties_train_with_automatic_clipping() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    y = (X[:, 0] > 0) * 1.0
    parts = [Party(X[:150], y[:150]), Party(X[150:], y[150:])]
    method = qg.DPGD(steps=4, clipping="automatic")
    simulated = simulate(method, Logistic(), parts, budget=BUDGET, seed=0)
    assert simulated.params[0] > 0


def test_every_rule_is_known_by_its_name() -> None:
    assert set(known_rules()) == {"flat", "automatic", "per-layer"}
