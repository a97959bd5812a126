"""DiSK is its filter: without noise and clipping the run is the recursion written down plainly."""

from __future__ import annotations

import numpy as np
import pytest

import quietgrad as qg
from quietgrad.objectives import Logistic
from tests.common import problem


@pytest.mark.parametrize(("kappa", "lookahead"), [(0.7, 0.4), (0.5, 1.0), (0.3, 0.5)])
def test_the_run_is_the_filter(kappa: float, lookahead: float) -> None:
    X, y = problem(200)
    loss = Logistic()
    records = loss.prepare((X, y))
    method = qg.DPDiSK(
        steps=7, batch_size=200, learning_rate=2.0, clip=1e9, kappa=kappa, lookahead=lookahead, sampling="full"
    )
    found = qg.minimize(loss, (X, y), method, budget=None).params
    theta = np.zeros(X.shape[1])
    previous = theta
    filtered = loss.risk_gradient(records, theta)
    for step in range(7):
        if step:
            fresh, ahead = (loss.risk_gradient(records, p) for p in (theta, theta + lookahead * (theta - previous)))
            filtered = (1 - kappa) * (filtered + (ahead - fresh) / lookahead) + kappa * fresh
        previous, theta = theta, theta - 2.0 * filtered
    np.testing.assert_allclose(found, theta, atol=1e-9)


def test_a_record_counts_once_and_bad_settings_are_refused() -> None:
    plan = qg.plan(qg.DPDiSK(steps=10, batch_size=20), n=300, budget=qg.Budget(1.0, 1e-5))
    twin = qg.plan(qg.DPSGD(steps=10, batch_size=20), n=300, budget=qg.Budget(1.0, 1e-5))
    assert plan.noise_multiplier == twin.noise_multiplier
    with pytest.raises(ValueError, match="lookahead"):
        qg.DPDiSK(kappa=0.7, lookahead=0.5)
    with pytest.raises(ValueError, match="kappa"):
        qg.DPDiSK(kappa=1.0)
