"""Correlated noise among parties: absences, restarts, lost rounds, and what a hostile coordinator may ask."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.noise.correlated import BufferedToeplitzNoise
from quietgrad.core.noise.rng import fresh_key
from quietgrad.core.session.queries import GradientQuery
from quietgrad.federation import Party, simulate
from quietgrad.federation.members import SumMember
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import FederatedPlan, Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.secure.channel import NoiseShare
from quietgrad.federation.secure.identity import DropoutError
from quietgrad.federation.secure.terms import SecureSumConfig
from quietgrad.federation.simulation import assemble
from quietgrad.federation.wire import Message
from quietgrad.objectives import Logistic
from tests.core.test_correlated import matrix, white
from tests.federation import talk
from tests.federation.faults import Fault, faulty

Floats = npt.NDArray[np.float64]
BUDGET = qg.Budget(4.0, 1e-5)
TURNS = qg.DPSGD(steps=24, sampling="turns", cohorts=6, noise="correlated", learning_rate=0.01)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


# --- absences, by linear algebra on what shares are -----------------------------------------------------------


def worst(K: Floats, s: float, turns: list[list[int]]) -> float:
    """The most of xᵀK⁻¹x ÷ s² over records with these turns and any signs."""
    found, precision = 0.0, np.linalg.inv(K)
    for chosen in turns:
        for signs in np.ndindex(*(2,) * len(chosen)):
            x = np.zeros(len(K))
            x[chosen] = 1.0 - 2.0 * np.array(signs)
            found = max(found, float(x @ precision @ x) / s**2)
    return found


T, HONEST, PARTIES = 8, 3, 5
CORRELATED = BufferedToeplitzNoise.made(T, 2, 4)
EVERY_TURN = [[j, j + 4] for j in range(4)]


def covariance(present: npt.NDArray[np.bool_], lives: npt.NDArray[np.int64] | None = None) -> Floats:
    """Of the honest noise, if party j is present in rounds present[j], each life of it an independent share."""
    S = np.linalg.inv(matrix(CORRELATED))
    K = np.zeros((T, T))
    for j, here in enumerate(present):
        for life in range(2):
            D = np.diag((here & (life == (np.zeros(T) if lives is None else lives[j]))).astype(float))
            K += D @ S @ S.T @ D / HONEST
    return K


def test_whoever_is_absent_when_every_round_keeps_enough_noise() -> None:
    rng, s = np.random.default_rng(0), CORRELATED.sensitivity()
    seen = []
    for _ in range(400):
        present = np.array(
            [rng.permutation(np.arange(PARTIES) < rng.integers(HONEST, PARTIES + 1)) for _ in range(T)]
        )
        lives = np.maximum.accumulate(rng.random((PARTIES, T)) < 0.1, axis=1).astype(np.int64)
        seen.append(worst(covariance(present.T, lives if rng.random() < 0.5 else None), s, EVERY_TURN))
    assert max(seen) <= 1.0 + 1e-9
    everybody = np.array([np.arange(PARTIES) < HONEST] * T)
    assert worst(covariance(everybody.T), s, EVERY_TURN) == pytest.approx(1.0)  # and no more than enough


def terms(mode: Any = "masks", dimension: int = 20_000) -> SecureSumConfig:
    more: dict[str, Any] = {"honest": HONEST} if mode == "masks" else {}
    return SecureSumConfig(mode, PARTIES, dimension, 1.0, 1.0, correlated=CORRELATED, **more)


def test_real_shares_have_that_covariance() -> None:
    agreed = terms()
    shares = [NoiseShare(agreed, j, seed=3) for j in range(3)]
    present = np.array([[1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]], bool)
    total = np.zeros((T, agreed.dimension))
    for share, here in zip(shares, present, strict=True):
        for t in np.flatnonzero(here):
            total[t] += share.draw(int(t)).view(np.int64)
    total /= agreed.noise_units
    found = total @ total.T / agreed.dimension
    assert np.abs(found - covariance(present)).max() < 6 * 1.5 / math.sqrt(agreed.dimension)


def test_a_share_belongs_to_the_run_and_a_round_draws_once() -> None:
    agreed, key = terms(dimension=50), fresh_key()
    first, again = NoiseShare(agreed, 0, None, key), NoiseShare(agreed, 0, None, key)
    kept = [first.draw(t) for t in range(T)]
    assert np.array_equal(again.draw(5), kept[5])  # restarted with its key: the same recursion
    assert not np.array_equal(NoiseShare(agreed, 0, None).draw(5), kept[5])
    with pytest.raises(ValueError, match="already drawn"):
        again.draw(5)
    with pytest.raises(ValueError, match="made for 8 rounds"):
        again.draw(8)


def test_rounding_every_share_is_charged_and_negligible() -> None:
    assert terms("servers").slack() == 0.0
    assert terms().slack() < 1e-15
    many = SecureSumConfig("masks", 9000, 10, 1.0, 1.0, honest=8999, correlated=BufferedToeplitzNoise.made(4096))
    assert 0.0 < many.slack() < 1e-20  # thousands of rounded shares are not free
    with pytest.raises(ValueError, match="mpc"):
        SecureSumConfig("mpc", 3, 10, 1.0, 1.0, correlated=CORRELATED)
    assert terms().digest(b"r") != SecureSumConfig("masks", PARTIES, 20_000, 1.0, 1.0, honest=HONEST).digest(b"r")


# --- through the federation -----------------------------------------------------------------------------------


def silent(m: int = 4, width: int = 3000) -> list[Party]:
    """Records whose gradients are zero: all that is heard is noise."""
    return [Party(np.zeros((6, width)), np.arange(6) % 2) for _ in range(m)]


@pytest.mark.parametrize(
    ("trust", "secure", "factor"),
    [("curator", None, 1.0), ("local", None, 4.0), ("secure", "servers", 2.0), ("secure", "masks", 4.0 / 3.0)],
)
def test_a_federation_has_the_planned_noise(trust: Any, secure: Any, factor: float) -> None:
    heard: list[Floats] = []
    result = simulate(
        TURNS, Logistic(), silent(), budget=BUDGET, trust=trust, secure=secure, spare=1,
        callback=lambda progress: heard.append(np.array(progress.estimate)),
    )  # fmt: skip
    mechanism = BufferedToeplitzNoise.made(25, 5, 6)  # a spare round may be the fifth turn of a cohort
    sums = np.stack(heard[1:]) * (24 / 6)  # the estimate is the sum ÷ (n ÷ cohorts)
    unit = result.privacy.noise_multiplier * mechanism.sensitivity() * math.sqrt(factor)
    assert white(matrix(mechanism, 24) @ sums / unit)
    assert not white(sums / unit)
    assert result.privacy.epsilon is not None
    assert result.privacy.epsilon <= 4.0


def people(m: int = 4, n: int = 60) -> list[Party]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(m * n, 3)) / 2.0
    return [Party(X[j::m], (X[j::m, 0] > 0) * 1.0) for j in range(m)]


@pytest.mark.parametrize(("secure", "first"), [("masks", 13), ("servers", 5)])
def test_a_lost_round_goes_to_the_next_cohort_and_is_paid_for(secure: Any, first: int, tmp_path: Path) -> None:
    """Its keys died with a party that was killed when the question had left."""
    faults = [Fault("party-2", "restart", first=first, seconds=60.0)]
    settings: dict[str, Any] = {"budget": BUDGET, "trust": "secure", "secure": secure, "transport": faulty(faults)}
    result = simulate(TURNS, Logistic(), people(), spare=2, folder=tmp_path / "one", **settings)
    assert result.privacy.releases["gradient"] > 24
    assert result.privacy.events is not None
    assert result.privacy.events == events.Gaussian(result.privacy.noise_multiplier)
    assert result.details["slots"][0]["mechanism"]["participations"] == 5  # of 24 + 2 rounds
    with pytest.raises(DropoutError, match="spare"):
        simulate(TURNS, Logistic(), people(), folder=tmp_path / "two", **settings)


def test_absent_parties_leave_enough_noise() -> None:
    faults = [Fault("party-2", "crash", first=20)]
    result = simulate(
        TURNS, Logistic(), people(5), budget=BUDGET, trust="secure", secure="masks", quorum=4,
        transport=faulty(faults), spare=3,
    )  # fmt: skip
    assert result.privacy.is_private
    plan = made_plan(trust="secure", secure="masks", quorum=3, names=4)
    assert "never taken back" in plan.explain()


def made_plan(names: int = 2, algorithm: Any = TURNS, **settings: Any) -> FederatedPlan:
    settings = {"budget": BUDGET, **settings}
    parties = [f"p{j}" for j in range(names)]
    return federate(algorithm, Logistic(), names=parties, sizes=[40] * names, shape=Shape(3, 3), **settings)


def opened(plan: FederatedPlan) -> PartyCurator:
    rng = np.random.default_rng(0)
    return talk.opened(PartyCurator("p0", Logistic(), (rng.normal(size=(40, 3)), np.arange(40) % 2), plan))


def ask(someone: PartyCurator, t: int, draw: int) -> Message:
    return talk.ask(someone.handle, GradientQuery(np.zeros(3), 1.0), round=t, draw=draw)


def test_a_coordinator_cannot_ask_one_cohort_out_of_turn() -> None:
    someone = opened(made_plan(trust="local"))
    assert ask(someone, 0, 0).kind == "sum"
    out_of_turn = ask(someone, 1, 6)  # the cohort of draw 0 again, one round later
    assert out_of_turn.kind == "refused"
    assert "they are the same here" in str(out_of_turn.fields["reason"])
    assert ask(someone, 5, 5).kind == "sum"  # skipping rounds tells less
    assert ask(someone, 0, 0).kind == "refused"
    assert ask(someone, 24, 24).kind == "refused"


def test_altered_plans_are_not_the_one_that_was_approved() -> None:
    plan = made_plan(trust="secure", secure="servers")
    wire = json.loads(json.dumps(plan.to_json()))
    assert FederatedPlan.from_json(wire).digest == plan.digest
    mechanism = wire["slots"][0]["mechanism"]
    for change in ({"alpha": [a / 2 for a in mechanism["alpha"]]}, {"releases": 30}, {"participations": 6}):
        altered = {**wire, "slots": [{**wire["slots"][0], "mechanism": {**mechanism, **change}}]}
        assert FederatedPlan.from_json(altered).digest != plan.digest
    # Less noise than the turns need is refused before any approval.
    for change in ({"participations": 3}, {"separation": 7}, {"releases": 23}):
        with pytest.raises(ValueError, match="Build it with those values"):
            FederatedPlan.from_json({**wire, "slots": [{**wire["slots"][0], "mechanism": {**mechanism, **change}}]})
    with pytest.raises(ValueError, match="mpc"):
        made_plan(trust="secure", secure="mpc")


def test_a_party_that_restarts_keeps_its_cohorts_and_draws_new_noise(tmp_path: Path) -> None:
    _, federation = assemble(
        TURNS, Logistic(), people(), budget=BUDGET, trust="secure", secure="masks", folder=tmp_path
    )

    def share_of(curator: PartyCurator) -> NoiseShare:
        assert curator._member is not None
        share = curator._member._share(3)
        assert share is not None
        return share

    first = talk.opened(federation.handlers["party-1"].__self__)  # type: ignore[attr-defined]
    kept, cohort = share_of(first).draw(9), first._samplers["gradient"](9)
    assert cohort is not None
    first._journal.close()  # the process goes away
    again = talk.opened(federation.again("party-1").__self__)  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(again._samplers["gradient"](9)), cohort)
    assert not np.array_equal(share_of(again).draw(9), kept)


def test_a_server_keeps_its_recursion_over_new_keys_of_one_run() -> None:
    _, federation = assemble(TURNS, Logistic(), people(), budget=BUDGET, trust="secure", secure="servers")
    server: SumMember = federation.handlers["server-1"].__self__  # type: ignore[attr-defined]

    def hello(run: str) -> NoiseShare:
        assert talk.say(server.handle, "hello", run=run, dim=3, epoch="00" * 16).kind == "hello"
        return server._roles[3]._noise_share

    first = hello("one")
    first.draw(4)
    assert hello("one") is first  # a lost round: new keys, the same noise, never the same round
    with pytest.raises(ValueError, match="already drawn"):
        first.draw(4)
    assert hello("two") is not first


# --- correlated differences beside full gradients ---------------------------------------------------------------


SPIDER = qg.DPSpider(
    steps=12, period=6, noise="correlated", sampling="turns", cohorts=3, difference_clip=0.05, smoothness=0.5
)


@pytest.mark.parametrize("trust", ["curator", "local"])
def test_a_slot_with_correlated_noise_runs_beside_one_without(trust: Any) -> None:
    """Draws of the second slot are not rounds: noise and cohorts go by draws, and the price is that of both."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 4))
    parties = [Party((X[k::3], (X[k::3, 0] > 0).astype(float)), name=f"p{k}") for k in range(3)]
    result = simulate(SPIDER, Logistic(), parties, budget=BUDGET, trust=trust, seed=1)
    alone = qg.plan(SPIDER, n=120, budget=BUDGET)
    assert result.privacy.epsilon == pytest.approx(alone.epsilon(), rel=1e-6)
    assert np.isfinite(result.params).all()


@pytest.mark.parametrize("secure", ["masks", "servers"])
def test_a_secure_sum_makes_one_kind_of_noise(secure: Any) -> None:
    rng = np.random.default_rng(0)
    parties = [Party((rng.normal(size=(40, 4)), np.zeros(40)), name=f"p{k}") for k in range(3)]
    with pytest.raises(ValueError, match="one kind of noise"):
        simulate(SPIDER, Logistic(), parties, budget=BUDGET, trust="secure", secure=secure, seed=1)
