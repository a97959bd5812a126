"""DP-SPIDER: descent along a full gradient that gradient differences keep up to date, with two noises.

One class holds the family. With all records in every release and a full gradient every ``period`` steps it is
DIFF2 (arXiv 2302.03884, which is federated; here that is the curator's business). On samples it is DP-SpiderBoost
(arXiv 2206.00846). With ``kappa`` a full gradient is asked when the iterates have drifted, as in paper 003. With
``warm_steps`` plain DP-SGD comes first (arXiv 2402.11173). With ``noise="correlated"`` differences are aggregated
by a tree's successor (arXiv 2410.07502). Under the Polyak–Łojasiewicz inequality the last iterate converges (arXiv
2311.13447). Slots, split and privacy: :mod:`quietgrad.methods.oracles.spider`.

**What it reaches** (all records in every release, G and M true of every record, so that no clip is active). Write
v_t = ∇F(x_t) + e_t, x_{t+1} = x_t − ηv_t, s₁ = z₁G/n and s₂ = z₂M/n. Given the past, the noise of a difference is
N(0, (s₂‖x_j − x_{j−1}‖)²I), ‖x_j − x_{j−1}‖ = η‖v_{j−1}‖, and noises are independent, so in a chain of p steps

    E‖e_t‖² = d·s₁² + d·s₂²η²·E Σ_{j<t}‖v_j‖²,   j since the last full gradient.                              (1)

For F of smoothness β the descent lemma and 2⟨∇F, v⟩ = ‖∇F‖² + ‖v‖² − ‖e‖² give

    F(x_{t+1}) ≤ F(x_t) − (η/2)‖∇F(x_t)‖² − (η/2)(1 − βη)‖v_t‖² + (η/2)‖e_t‖².                             (2)

*Stationary points.* Sum (2) over T steps and insert (1): each ‖v_j‖² occurs in at most p of the e_t. If

    βη + d·p·(s₂η)² ≤ 1,                                                                                   (3)

the terms in ‖v‖² cancel, and the mean of E‖∇F(x_t)‖² over the steps, which is that of a random iterate, is at most

    2·gap/(ηT) + d·s₁²,   gap = F(x₀) − min F.                                                             (4)

With K chains, p = T/K and large T, (3) allows η = n√K·√(1−s)·μ/(MT√d) (less what βη takes), and (4) is of the order
M·gap√d/(nμ√K) + dG²K/(nμ)². The best K makes it (√d/nμ)^(4/3), so ‖∇F‖ ~ (√d/nμ)^⅔ where DP-GD has the exponent ½.

*Polyak–Łojasiewicz*: ‖∇F‖² ≥ 2μ_F(F − min F). Then (2) contracts the gap by 1 − ημ_F. Weigh step t by
(1−ημ_F)^(T−1−t): ‖v_j‖² has weight at most (1−ημ_F)^(−p) times its own in the e_t that follow. If

    βη + d·p·(s₂η)²·(1−ημ_F)^(−p) ≤ 1,   E F(x_T) − min F ≤ (1−ημ_F)ᵀ·gap + d·s₁²/(2μ_F).                    (5)

DP-GD's floor is d(G/nμ)²·T/(2μ_F) (paper 002, theorems 2 and 3), and T is at least the logarithm that makes the
first term small times β/μ_F; here T is replaced by K/s, the full gradients alone.

*Kurdyka–Łojasiewicz*: F − min F ≤ γ^κ‖∇F‖^κ with 1 ≤ κ ≤ 2. At a random iterate (4) and Jensen's inequality, with
x ↦ x^(κ/2) concave, give E F − min F ≤ γ^κ(2·gap/(ηT) + d·s₁²)^(κ/2).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, ClassVar

from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import calibrate_event
from quietgrad.core.accounting.budget import Budget
from quietgrad.core.accounting.events import round_law
from quietgrad.core.errors import ExhaustedError, SettingError
from quietgrad.core.plans.schedule import Schedule
from quietgrad.core.plans.slots import Law
from quietgrad.core.session.base import Session
from quietgrad.core.session.objectives import LossConstants
from quietgrad.core.settings import Count, Positive, field_values
from quietgrad.core.vectors import Vector, norm
from quietgrad.methods.base import FirstOrder, Output, State, check_known
from quietgrad.methods.learning_rates import LearningRate, as_rate
from quietgrad.methods.oracles.spider import AdaptiveSpider, Finite, Spider, SpiderOracle, SpiderSettings

_MOST_STEPS = 10**6  # of theory's settings


@dataclass(frozen=True)
class DPSpider(SpiderSettings, FirstOrder):
    """Variance-reduced descent (DP-SPIDER).

    Full gradients and differences of gradients get separate noise.

    θ ← θ − η_t·ĝ, where ĝ is a noisy full gradient every ``period`` steps and gains noisy differences in between.

    Args:
        steps: T, the number of updates, those of a warm start among them.
        learning_rate: a number or a schedule of :mod:`quietgrad.methods.learning_rates`.
        clip: G, the bound on one record's gradient.
        smoothness: M; one record's difference is clipped to M‖θ − θ′‖. Its noise is proportional to M.
        difference_clip: a constant that differences are clipped to if that is less.
        period: steps from one full gradient to the next (default: one full gradient for the whole run).
        kappa: instead of a period: ask a full gradient when Σ‖θ − θ′‖² since the last one reaches κ.
        full_queries: with ``kappa``, the most full gradients (default: a tenth of the steps); the run stops there.
        split: share of the budget for full gradients (default: theory's, from ``path`` or ``kappa``, else half).
        path: a public bound on the length of the walk, from which theory gives the split. ``details["path"]`` of a
            result is the length that was walked, a function of what was released.
        batch_size: expected records of a full gradient, unless ``sampling`` is ``"full"``.
        difference_batch_size: expected records of a difference, unless ``sampling`` is ``"full"``.
        sampling: all records (``"full"``), or samples of the expected sizes.
        warm_steps: number of steps of plain DP-SGD at the beginning.
        warm_share: share of the budget for these steps.
        warm_learning_rate: learning rate of these steps (default: that of the others).
        cohorts: number of cohorts that take turns.
        noise: ``"correlated"`` for differences on a ``"single-pass"`` or in ``"turns"``; needs ``difference_clip``,
            and steps are shortened to ``difference_clip`` ÷ ``smoothness``.
        returns: ``"last"``, ``"average"`` of the second half, ``"ema"``, or ``"random"`` round. The round is drawn
            before the run, and the accountant averages over the number of differences. It counts full gradients
            and a warm start as if all were asked, since their numbers grow with that of the differences: two
            averages taken apart would be too small. With ``kappa``, in turns and under correlated noise everything
            is counted.

    >>> [(slot.name, slot.count) for slot in DPSpider(steps=100, period=25, warm_steps=20).schedule(1000).slots]
    [('warm', 20), ('o1', 4), ('o2', 76)]
    """

    steps: Count = 200
    learning_rate: float | str | LearningRate = 1.0
    _: KW_ONLY
    clip: Finite = 1.0
    smoothness: Finite = 1.0
    kappa: Finite | None = None
    full_queries: Count | None = None
    warm_learning_rate: Positive | None = None
    returns: Output = "last"

    name: ClassVar[str] = "dp-spider"

    def __post_init__(self) -> None:
        if self.kappa is None and self.full_queries is not None:
            raise ValueError(
                "full_queries: needs kappa. With a period, the period sets the number of full gradients."
            )
        if self.kappa is not None and (
            self.period is not None or self.warm_steps or self.noise != "independent" or self.path is not None
            or self.sampling not in ("full", "poisson")
        ):  # fmt: skip
            raise ValueError(
                "kappa: full gradients are asked by drift, on all records or Poisson samples; leave period, path, "
                "warm_steps and noise out."
            )
        if self.warm_learning_rate is not None and not self.warm_steps:
            raise ValueError("warm_learning_rate: needs warm_steps, the steps of DP-SGD that have this rate.")
        super().__post_init__()

    @classmethod
    def theory(
        cls,
        constants: LossConstants,
        *,
        n: int,
        dim: int,
        budget: Budget,
        initial_gap: float,
        growth: float | None = None,
    ) -> DPSpider:
        """The settings that make the bounds of the module's text least: (4), or (5) with ``growth`` = μ_F.

        Every constant is explicit. K runs over powers of two and s over a list; η is half of what (3) allows by its
        first term, or what its second allows if that is less, and T follows from them. Without ``growth`` a random
        iterate is returned, with it the last.

        Args:
            constants: G, M and β of the loss at its row bound.
            initial_gap: F(θ⁰) − min F at most, a public number.
            growth: μ_F of the Polyak–Łojasiewicz inequality.
        """
        lipschitz, record, smooth = constants.needed("lipschitz", "record_smoothness", "smoothness")
        check_known(n, dim, budget, initial_gap=initial_gap, growth=growth)
        # The noise of a coordinate of a mean, for clip 1 and one release that spends the whole budget.
        unit = calibrate_event(events.Gaussian, budget=budget) / n
        best: tuple[float, DPSpider] | None = None
        for chains, share in itertools.product((2**k for k in range(16)), (0.1, 0.25, 0.5, 0.75, 0.9)):
            # With z₂ = √(T/(1−s))·z and p = T/K the second term of (3) is d(M·unit·ηT)²/(K(1−s)), which is ½ here.
            walk = math.sqrt(chains * (1.0 - share) / (2.0 * dim)) / (record * unit)
            floor = dim * (lipschitz * unit) ** 2 * chains / share
            bound = 2.0 * initial_gap / walk + floor
            if growth is not None:
                # pημ ≤ ½ keeps (1−ημ)^(−p) below 2, by Bernoulli's inequality.
                needed = max(1.0, math.log(2.0 * growth * initial_gap / floor)) / growth
                if needed > walk / math.sqrt(2.0) or 2.0 * growth * needed > chains:
                    continue
                walk, bound = needed, math.exp(-growth * needed) * initial_gap + floor / (2.0 * growth)
            steps = max(2, chains, math.ceil(2.0 * smooth * walk))  # βη ≤ ½
            if steps <= _MOST_STEPS and (best is None or bound < best[0]):
                settings: dict[str, Any] = {"steps": steps, "learning_rate": walk / steps, "split": share}
                last = {"returns": "random" if growth is None else "last", "period": -(-steps // chains)}
                best = bound, cls(clip=lipschitz, smoothness=record, **settings, **last)
        if best is None:
            raise SettingError(
                f"{{n}}: too small for the bound under growth={growth!r}: the noise of differences would outweigh "
                "what they save. Use more records, or practical settings.",
                n=n,
            )
        return best[1]

    def oracle(self) -> SpiderOracle:
        values = field_values(self)
        if self.kappa is None:
            shared = {field.name: values[field.name] for field in fields(SpiderSettings)}
            return Spider(**shared, law=self._law_of_differences())
        values.update(regime="reuse", difference_batch_size=self.difference_batch_size or self.batch_size)
        return AdaptiveSpider(**{field.name: values[field.name] for field in fields(AdaptiveSpider)})

    def _law_of_differences(self) -> Law | None:
        """The law of the number of differences of a random round; ``None`` where all of them are counted."""
        rounds = self.rounds()
        if rounds is None or self.noise != "independent" or self.sampling not in ("full", "poisson", "fixed-size"):
            return None
        chances: dict[int, float] = {}
        for steps, chance in enumerate(rounds):
            left = max(0, steps - self.warm_steps)
            differences = left - -(-left // (self.period or self.steps))
            chances[differences] = chances.get(differences, 0.0) + chance
        return round_law([chances[count] for count in sorted(chances)], first=0)

    def schedule(self, n_public: int) -> Schedule:
        """``o1`` and ``o2`` with their own multipliers, after the ``warm`` start."""
        oracle = self.oracle()
        if isinstance(oracle, AdaptiveSpider) and self.sampling == "full":
            oracle = replace(oracle, batch_size=n_public, difference_batch_size=n_public)
        most = self.steps if self.rounds() is None else self.steps - 1
        return Schedule.of(oracle.slots(n_public, most), adaptive=self.kappa is not None)

    def step(self, state: State, session: Session) -> State:
        try:
            return super().step(state, session)
        except ExhaustedError:  # no full gradient is left: what was planned was released
            state.stopped_by, state.done = "full-gradients", True
            return state

    def direction(self, state: State, gradient: Vector) -> tuple[float, Vector]:
        size = self._rate(state.step, self.steps)
        length = norm(gradient)
        if state.step < self.warm_steps and self.warm_learning_rate is not None:
            size = as_rate(self.warm_learning_rate)(state.step, self.warm_steps)
        elif self.noise != "independent" and self.difference_clip is not None and length > 0.0:
            # A longer step would have differences longer than their clip.
            size = min(size, self.difference_clip / (self.smoothness * length))
        if state.step >= self.warm_steps:
            state.extra["path"] = state.extra.get("path", 0.0) + size * length
        return size, gradient
