"""Mutants of clients: what each would leak, and the audit or probe that sees it; the sound code passes the same."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from quietgrad.assurance.audit.clients import attack_party, round_plan
from quietgrad.assurance.audit.running import PrivacyClaim, attack_profile
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import delta_of
from quietgrad.core.accounting.budget import Budget, Relation
from quietgrad.federation import public_time
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.plan import Shape
from quietgrad.federation.planning import federate
from quietgrad.federation.public_time import AtOnce, PublicTime
from quietgrad.federation.wire import Message, decode, encode, pack
from quietgrad.methods.fedavg import FedAvg
from quietgrad.objectives import Logistic
from quietgrad.tables.queries.local_update import LocalUpdateQuery

from .broken_clients import (
    ClippedSteps,
    CoinFirst,
    HeldTooEarly,
    LateIsAbsent,
    NoClip,
    OldCoin,
    PlainZeros,
    SlowLogistic,
    Uncapped,
    UnpricedBit,
    Watching,
    WhenReady,
)

FULL = FedAvg(rounds=1, local_steps=2, sampling="full", clip=1.0)
ADAPTIVE = replace(FULL, clip_quantile=0.5, clip_share=0.8)  # σ_b = z/(2√share) = 0.45
DRAWN = replace(ADAPTIVE, sampling="poisson", sample=0.5)


def _as(kind: type[LocalUpdateQuery]) -> Any:
    return lambda q: kind(q.params, q.steps, q.rate, q.batch_size, q.clip, q.share)


# --- what is released ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FULL, ADAPTIVE, DRAWN], ids=["fixed", "adaptive", "sampled"])
def test_the_audit_passes_the_sound_query(method: FedAvg) -> None:
    assert attack_party(method, 800).verdict == "pass"  # false alarms: 1e-6


@pytest.mark.parametrize(
    ("method", "mutant"), [(ADAPTIVE, UnpricedBit), (FULL, NoClip), (FULL, ClippedSteps)],
    ids=["the bit is unpriced", "no clip", "steps are clipped, not their sum"],
)  # fmt: skip
def test_the_audit_sees_a_broken_query(method: FedAvg, mutant: type[LocalUpdateQuery]) -> None:
    assert attack_party(method, 2000, ask=_as(mutant)).verdict == "violation"


def _joint_delta(rate: float, z_update: float, sigma_b: float, epsilon: float) -> float:
    """δ(ε) of (B·1 + N(0, z²), B·½ + N(0, σ_b²)) against no party, B one coin, by quadrature."""

    grid = np.linspace(-7, 8, 1201)
    u, v = grid[None], grid[:, None]
    nothing = stats.norm.pdf(u, 0, z_update) * stats.norm.pdf(v, 0, sigma_b)
    there = stats.norm.pdf(u, 1, z_update) * stats.norm.pdf(v, 0.5, sigma_b)
    values = np.maximum(0.0, (1 - rate) * nothing + rate * there - math.exp(epsilon) * nothing)
    return float(integrate.trapezoid(integrate.trapezoid(values, grid), grid))


def test_one_coin_for_update_and_bit_costs_more_than_a_coin_for_each() -> None:
    rate, z_update, sigma_b, epsilon = 0.3, 1.0, 0.7, 0.6
    share = 1.0 / (1.0 + (2.0 * sigma_b / z_update) ** 2)  # of the squared bound
    z = 1.0 / math.hypot(1.0 / z_update, 0.5 / sigma_b)
    truth = _joint_delta(rate, z_update, sigma_b, epsilon)
    method = FedAvg(rounds=1, sampling="poisson", sample=rate, clip=1.0, clip_quantile=0.5, clip_share=share)
    priced = delta_of(
        round_plan(method, Relation.ADD_REMOVE, z).event, epsilon=epsilon, relation=Relation.ADD_REMOVE
    )
    assert priced == pytest.approx(truth, rel=5e-3)
    sampled = [events.PoissonSampled(rate, events.Gaussian(each)) for each in (z_update, 2.0 * sigma_b)]
    forgotten, second = (events.composed(sampled[:k]) for k in (1, 2))
    for mutant in (forgotten, second):
        assert delta_of(mutant, epsilon=epsilon, relation=Relation.ADD_REMOVE) < 0.97 * truth


# --- what a party shows -------------------------------------------------------------------------------------------


def _federated(method: FedAvg, **settings: Any) -> Any:
    return federate(
        method, Logistic(), names=["a", "b", "slow"], sizes=[9, 9, 9], shape=Shape(2, 2),
        budget=Budget(8.0, 1e-3), trust="local", noise_multiplier=1.0, **settings,
    )  # fmt: skip


def _party(
    method: FedAvg, kind: type[PartyCurator] = PartyCurator, name: str = "a", loss: Any = None, **more: Any
) -> tuple[PartyCurator, Any]:
    plan = _federated(method)
    X = np.array([[9.0, 0.0], [8.0, 1.0], [7.0, 0.0]])
    party = kind(name, loss or Logistic(), (X, np.ones(3)), plan, **more)
    assert decode(party.handle(encode(Message("open", {"run": "r1", "plan": plan.digest})))).kind == "ready"
    return party, plan


def _is_drawn(party: PartyCurator, t: int) -> bool:
    rows = party._samplers["update"](t)
    return rows is None or len(rows) > 0


def _ask(party: PartyCurator, plan: Any, t: int, draw: int | None = None, **fields: Any) -> Message:
    query = LocalUpdateQuery(np.zeros(2), 2, 0.1, 20, 1.0)
    packed, arrays = pack(query)
    words = {
        "run": "r1",
        "round": t,
        "slot": "update",
        "draw": t if draw is None else draw,
        "dim": 2,
        "query": packed,
    }
    return decode(party.handle(encode(Message("ask", {**words, **fields}, arrays))))


SELF = FedAvg(rounds=40, local_steps=2, sampling="self", sample=0.5, clip=1.0, answer_seconds=0.05)


def _visible(kind: type[PartyCurator], pace: Any, rounds: int = 24, **more: Any) -> dict[bool, set[Any]]:
    """By a party's coin, what others see of its answers: kind, whether it has noise, how long it took."""
    party, plan = _party(SELF, kind, pace=pace, **more)
    shown: dict[bool, set[Any]] = {False: set(), True: set()}
    for t in range(rounds):
        begun = time.monotonic()
        reply = _ask(party, plan, t)
        seconds = round((time.monotonic() - begun) / 0.04)  # steps that are longer than a machine's hiccups
        total = reply.arrays.get("total")
        coin = _is_drawn(party, t)
        shown[coin].add((reply.kind, total is not None and bool(total.all()), min(seconds, 1)))
    return shown


def test_nothing_that_is_seen_of_a_party_depends_on_its_coin() -> None:
    shown = _visible(PartyCurator, PublicTime())
    assert shown[True] == shown[False] == {("sum", True, 1)}


@pytest.mark.parametrize(
    ("kind", "pace"), [(CoinFirst, AtOnce()), (PlainZeros, AtOnce())],
    ids=["the coin before presence", "zeros without noise"],
)  # fmt: skip
def test_a_party_that_shows_its_coin_is_seen(kind: type[PartyCurator], pace: Any) -> None:
    shown = _visible(kind, pace)
    assert shown[True] != shown[False]


def test_a_party_that_trains_only_when_drawn_is_seen_by_the_clock() -> None:
    shown = _visible(PartyCurator, WhenReady(), rounds=12, loss=SlowLogistic(Logistic(), 0.05))
    assert shown[True] != shown[False]


@pytest.mark.parametrize(("pace", "answered"), [(Watching(), [1, 2, 3]), (HeldTooEarly(), [0, 1, 2])])
def test_an_answer_is_held_until_it_is_sealed_and_written_down(pace: Watching, answered: list[int]) -> None:
    """Sealing an update takes longer than sealing zeros: 43 % at a million numbers."""
    pace.party, plan = _party(SELF, pace=pace)
    for t in range(3):
        _ask(pace.party, plan, t)
    assert pace.answered == answered


def test_a_late_answer_is_a_noisy_zero_and_no_absence() -> None:
    pace = PublicTime()
    slow: dict[str, Any] = {"loss": SlowLogistic(Logistic(), 5.0), "name": "slow", "pace": pace}
    party, plan = _party(SELF, **slow)
    for t in range(2):  # the second is asked while the first is still trained for
        reply = _ask(party, plan, t)
        assert reply.kind == "sum"
        assert bool(reply.arrays["total"].all())
        assert pace._worker is not None
        assert pace._worker.is_alive()
    party, plan = _party(SELF, LateIsAbsent, **slow)
    assert _ask(party, plan, 0).kind == "refused"


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("drawn", [False, True])
def test_an_answer_that_leaves_late_warns_its_party_alike_for_either_coin(
    drawn: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pace = Clock(), PublicTime()
    monkeypatch.setattr(public_time, "time", clock)
    for sealing, leaves, warnings in ((0.5, 10.0, 0), (1.5, 10.5, 1)):  # a tenth of the time is left for it
        begun = clock.now
        pace.answer(lambda: np.ones(1), lambda: drawn, np.zeros(1), 10.0)
        clock.sleep(sealing)
        pace.hold()
        assert clock.now - begun == pytest.approx(leaves)
        assert len(caplog.messages) == warnings
    assert caplog.messages[0].endswith("was drawn: plan with a larger answer_seconds.")


def _coins(kind: type[PartyCurator]) -> list[bool]:
    party, plan = _party(SELF, kind, pace=AtOnce())
    coins = []
    for t in range(40):
        assert _ask(party, plan, t).kind == "sum"
        coins.append(_is_drawn(party, t))
    return coins


def test_every_retry_draws_a_new_coin() -> None:
    assert len(set(_coins(PartyCurator))) == 2  # false alarm: 2·2⁻⁴⁰
    assert len(set(_coins(OldCoin))) == 1
    party, plan = _party(SELF, pace=AtOnce())
    _ask(party, plan, 0)
    again = _ask(party, plan, 1, draw=0)  # a retry under the number, and so the coin, of a draw that was answered
    assert again.kind == "refused"


# --- the coordinator draws ----------------------------------------------------------------------------------------

ASKED = FedAvg(rounds=12, local_steps=2, sampling="coordinator", sample=0.25, most_rounds=3, clip=1.0)


def _times(kind: type[PartyCurator]) -> int:
    """How often a party takes part when the coordinator draws it in every round."""
    party, plan = _party(ASKED, kind)
    party._sources["update"].add = lambda *_: None  # type: ignore[method-assign]  # to see the sums
    return sum(bool(_ask(party, plan, t, drawn=True).arrays["total"].any()) for t in range(12))


def test_a_party_enforces_how_often_it_takes_part() -> None:
    assert _times(PartyCurator) == 3
    assert _times(Uncapped) == 12


def test_the_count_of_rounds_outlives_a_restart(tmp_path: Any) -> None:
    party, plan = _party(ASKED, folder=tmp_path, ledger=tmp_path / "ledger.jsonl")
    for t in range(2):
        _ask(party, plan, t, drawn=True)
    party.close()
    again, plan = _party(ASKED, folder=tmp_path, ledger=tmp_path / "ledger.jsonl")
    assert again._journal.times_drawn("update") == 2
    again.close()


def test_a_coordinator_that_draws_is_not_priced_as_a_secret() -> None:
    plan = _federated(ASKED)
    z, relation = plan.noise_multiplier, Relation.ADD_REMOVE
    assert plan.event == events.MaxOverParties((events.Repeated(events.Gaussian(z), 3),) * 3)
    assert plan.party_event(0, None, viewers=True) == events.Repeated(
        events.PoissonSampled(0.25, events.Gaussian(z)), 12
    )
    # A coordinator knows that the canary was drawn, so that its round is an unsampled Gaussian release.
    rng = np.random.default_rng(0)
    scores = rng.normal(1.0, 0.8, 3000), rng.normal(0.0, 0.8, 3000)
    drawn = round_plan(replace(ASKED, sample=0.1), relation, 0.8)  # priced as Poisson samples
    known = replace(drawn, schedule=replace(drawn.schedule, slots=tuple(
        replace(slot, sampling=slot.sampling.against_coordinator()) for slot in drawn.schedule.slots
    )))  # fmt: skip
    assert attack_profile(scores, PrivacyClaim(known), "the coordinator", 1e-6).verdict == "pass"
    assert attack_profile(scores, PrivacyClaim(drawn), "the coordinator", 1e-6).verdict == "violation"
