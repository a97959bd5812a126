"""Random rounds: an attacker who knows R and saw everything up to it, which the guarantee allows.

A method that stops at a random round R is priced as δ(ε) = E[δ_R(ε)], which holds even if R and all releases
before it are published. So R is fixed here, one possible round after the other, and thousands of runs of each are
made side by side: what R releases show of the canary is measured against what they may, and the average over the
law of R against the whole claim. That R really follows its law is a test of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from quietgrad.audit.canaries import Pattern, amplitude
from quietgrad.audit.confidence_bounds import TEACH, dprime_refuted
from quietgrad.audit.distinguishers import PrivacyClaim, attack_dprime, attack_profile, likelihood
from quietgrad.audit.noise_checks import categories
from quietgrad.audit.replicas import CuratorFactory, Game, Views, collect, collect_blocks
from quietgrad.audit.report import AuditFinding
from quietgrad.errors import UnprovableError
from quietgrad.plans.schedule import Law, Plan
from quietgrad.privacy.accounting import gdp_mu
from quietgrad.privacy.closed_form_accountants import gaussian_delta

Floats = npt.NDArray[np.float64]
_DRAWS = 400


def law_of(plan: Plan) -> Law | None:
    """The law of the random round, if the plan has one."""
    laws = [slot.law for slot in plan.schedule.slots if slot.law is not None]
    return tuple(sorted((r, p) for r, p in laws[0] if p > 0.0)) if len(laws) == 1 else None


def attack_rounds(
    algorithm: Any,
    plan: Plan,
    game: Game,
    pattern: Pattern,
    runs: int,
    *,
    curator: CuratorFactory,
    seed: int | None,
    what: str,
    alpha: float,
) -> list[AuditFinding]:
    """L1 for every possible round of un-sampled releases, else L2 on runs of rounds drawn by the auditor."""
    law = law_of(plan)
    assert law is not None
    edges = np.cumsum([0.0, *(p for _, p in law)])
    middles = (edges[:-1] + edges[1:]) / 2
    try:
        mus = [_mu(plan, rounds) for rounds, _ in law]
    except UnprovableError:
        mus = None
    rng = np.random.default_rng(seed)
    sizes = [runs] * len(law) if mus is not None else rng.multinomial(runs, [p for _, p in law]).tolist()

    def views(k: int) -> tuple[Views, Views]:
        pair = tuple(
            collect_blocks(
                algorithm, plan, game, which, sizes[k], curator=curator, uniform=float(middles[k]),
                seed=None if seed is None else seed + 1000 * k,
            )
            for which in (0, 1)
        )  # fmt: skip
        return pair[0], pair[1]

    claim = PrivacyClaim(plan)
    if mus is not None:
        return [_dprimes([views(k) for k in range(len(law))], law, mus, claim, what, alpha)]
    scores: tuple[list[Floats], list[Floats]] = ([], [])
    for k in range(len(law)):
        if sizes[k]:
            for into, view in zip(scores, views(k), strict=True):
                score = likelihood(view, claim, lambda t: math.copysign(1.0, amplitude(pattern, t)))
                assert score is not None
                into.append(score)
    order = rng.permutation(runs)  # the first quarter teaches: it must hold all rounds
    a, b = (np.concatenate(part)[order] for part in scores)
    return [attack_profile((a, b), claim, f"{what}, R and all releases", alpha)]


def _mu(plan: Plan, rounds: int) -> float:
    """μ of a run whose random round is ``rounds``."""
    assert plan.budget is not None
    counts = {slot.name: rounds if slot.law is not None else slot.count for slot in plan.schedule.slots}
    return gdp_mu(plan.event_of(counts), relation=plan.budget.relation)


def _dprimes(
    views: Sequence[tuple[Views, Views]],
    law: Law,
    mus: Sequence[float],
    claim: PrivacyClaim,
    what: str,
    alpha: float,
) -> AuditFinding:
    share = alpha / len(law)
    found = [attack_dprime(pair, claim, what, share, mu=mu) for pair, mu in zip(views, mus, strict=True)]
    worst = max(range(len(law)), key=lambda k: found[k].measured / mus[k])
    verdicts = [f.verdict for f in found]
    verdict = "violation" if "violation" in verdicts else "vacuous" if set(verdicts) == {"vacuous"} else "pass"
    lows = [f.measured for f in found]
    epsilon = mixture_epsilon([(p, low) for (_, p), low in zip(law, lows, strict=True)], claim.delta_budget)
    words = f"{what}, R = {law[worst][0]} and all releases"
    tested = len(views[0][0].transcript) - int(len(views[0][0].transcript) * TEACH)
    least = [(p, dprime_refuted(mu, tested, share)) for (_, p), mu in zip(law, mus, strict=True)]
    known = all(math.isfinite(mu) for _, mu in least)
    refutes = mixture_epsilon(least, claim.delta_budget) if known else math.inf
    return AuditFinding("L1", words, "μ", mus[worst], lows[worst], verdict, epsilon, refutes=refutes)  # type: ignore[arg-type]


def mixture_epsilon(parts: Sequence[tuple[float, float]], delta: float) -> float:
    """ε at which Σ p·δ_μ(ε) = δ: what is proved of a mixture whose part is known.

    >>> from quietgrad.privacy.closed_form_accountants import gaussian_epsilon
    >>> abs(mixture_epsilon([(0.5, 1.0), (0.5, 1.0)], 1e-5) - gaussian_epsilon(1.0, 1e-5)) < 1e-6
    True
    """

    def excess(epsilon: float) -> float:
        return sum(p * gaussian_delta(mu, epsilon) for p, mu in parts if mu > 0.0) - delta

    return float(brentq(excess, 0.0, 200.0, xtol=1e-9)) if excess(0.0) > 0.0 else 0.0


def probe_rounds(
    algorithm: Any, plan: Plan, game: Game, *, curator: CuratorFactory, seed: int | None, alpha: float
) -> AuditFinding:
    """Whether R follows the law that was priced: as many runs as it takes, each with its own session.

    A price may put rounds together and count each as the last of its group, which only costs more; so do we.
    """
    law = law_of(plan)
    assert law is not None
    name = next(slot.name for slot in plan.schedule.slots if slot.law is not None)
    view = collect(algorithm, plan, game, 0, _DRAWS, curator=curator, seed=seed, together=False)
    width = view.model.shape[1]
    here = np.array([slot == name for slot in view.slots[::width]])
    rounds = (~np.isnan(view.transcript[:, ::width]) & here).sum(axis=1)
    group = np.searchsorted([r for r, _ in law], rounds)
    seen = np.bincount(group, minlength=len(law) + 1)
    strange = int(seen[len(law)])  # later than any round that was paid for
    seen = seen[: len(law)]
    expected = _DRAWS * np.array([p for _, p in law])
    chance = categories(seen.astype(np.float64), expected)
    verdict = "violation" if strange or chance < alpha else "pass"
    return AuditFinding("L0 rounds", "the law of R", "p", alpha, 0.0 if strange else chance, verdict)  # type: ignore[arg-type]
