"""Rounds that ask some of the parties: who is drawn, what the sum stands for, and what it does not buy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.federation import Party, deal, simulate
from quietgrad.federation.party import PartyCurator
from quietgrad.federation.simulation import assemble
from quietgrad.tables.losses import Logistic

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 3))
Y = (X[:, 0] > 0.0) * 1.0
MODES: dict[str, dict[str, Any]] = {
    "curator": {"trust": "curator", "parties_per_round": 2},
    "local": {"trust": "local", "parties_per_round": 2},
    "masks": {"trust": "secure", "secure": "masks", "parties_per_round": 5},
    "servers": {"trust": "secure", "secure": "servers", "parties_per_round": 2},
    "mpc": {"trust": "secure", "secure": "mpc", "parties_per_round": 2},
}


def parties() -> list[Party]:
    return deal(X, Y, 6)


@pytest.mark.parametrize("mode", MODES)
def test_each_round_asks_as_many_as_planned_and_over_rounds_all(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()
    answer = PartyCurator._answer

    def counted(self: PartyCurator, *rest: Any) -> Any:
        asked[self.name] += 1
        return answer(self, *rest)

    monkeypatch.setattr(PartyCurator, "_answer", counted)
    result = simulate(
        qg.DPSRM(steps=48, batch_size=60), Logistic(), parties(), budget=qg.Budget(4.0, 1e-4), **MODES[mode]
    )
    assert sum(asked.values()) == 48 * MODES[mode]["parties_per_round"]
    assert len(asked) == 6  # of 48 rounds: some party is in none with probability 6·(2/3)^48 = 2e-8 at most
    assert any("it buys no privacy" in note for note in result.privacy.notes)


@pytest.mark.parametrize("mode", MODES)
def test_asking_fewer_costs_the_same(mode: str) -> None:
    """The event, and so ε, is that of the plan that asks all parties in every round."""
    settings = dict(MODES[mode])
    fewer, _ = assemble(qg.DPSGD(steps=9, batch_size=60), Logistic(), parties(), budget=None, **settings)
    budget = qg.Budget(1.0, 1e-5)
    some, _ = assemble(
        qg.DPSGD(steps=9, batch_size=60), Logistic(), parties(), budget=budget, noise_multiplier=2.0, **settings
    )
    quorum = settings.pop("parties_per_round")
    whole, _ = assemble(
        qg.DPSGD(steps=9, batch_size=60), Logistic(), parties(), budget=budget, noise_multiplier=2.0,
        quorum=quorum, **settings,
    )  # fmt: skip
    assert some.event == whole.event
    assert some.epsilon() == whole.epsilon()
    assert fewer.upscaling == pytest.approx(6 / quorum)
    assert some.variance_factor > whole.variance_factor
    assert "buys no privacy" in some.explain()


def test_the_sum_of_some_stands_for_all() -> None:
    """Parties with the same records: asking half of them, without noise, walks the path of all."""
    same = [Party(X[:40], Y[:40]) for _ in range(4)]
    all_of_them = simulate(qg.DPGD(steps=6), Logistic(), same, budget=None).params
    half = simulate(qg.DPGD(steps=6), Logistic(), same, budget=None, parties_per_round=2).params
    np.testing.assert_allclose(half, all_of_them, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parties_per_round": 7, "quorum": 2}, "from the quorum to the number of parties"),
        ({"parties_per_round": 2, "quorum": 3}, "from the quorum"),
        ({"parties_per_round": 2, "trust": "secure", "secure": "masks"}, "masks need"),
    ],
)
def test_what_cannot_be_asked_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(qg.DPGD(steps=2), Logistic(), parties(), budget=qg.Budget(1.0, 1e-5), **settings)


def test_records_in_turn_are_asked_of_all_parties() -> None:
    by_turns = qg.DPSGD(steps=6, sampling="turns", cohorts=3, noise="correlated")
    with pytest.raises(ValueError, match="turns or correlated noise"):
        simulate(by_turns, Logistic(), parties(), budget=qg.Budget(1.0, 1e-5), parties_per_round=2)
