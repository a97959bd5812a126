"""The algorithms by name, with examples of each. The command line, plan files, tests and audits all read it.

A new algorithm is a file of this room and an entry here. Its examples make it part of the common table of tests,
its attacks part of every audit; a test fails if a private algorithm has none.

Each algorithm has settings for the common problem of the tests and small settings for attacks. The common problem
has 3000 records and 6 features (``tests/methods/common.py``): the risk at the origin is 0.693, the least about
0.40, and ``loss`` is what the settings reach. A claim of ε = 0.2 cannot be attacked with thousands of runs, one of
μ ≥ 1 can: for attacks releases are few and budgets generous, and both relations, un-sampled, Poisson-sampled and
fixed-size batches are covered wherever the algorithm has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

from quietgrad import named_settings as settings
from quietgrad.core.sanitize import did_you_mean

_ADD, _REPLACE = "add-remove", "replace-one"


@dataclass(frozen=True)
class Example:
    """Settings in use: for how many records, under which relation, and how well.

    ``share`` of the runs that an audit makes is made where a run is dear; the budget then leaves signal to spare.
    ``space`` is where the canary's contribution is dictated: its gradients, or its part of every query (in the
    slots ``only``, if not in all, and at every ``every``-th release of them).
    """

    settings: Mapping[str, Any]
    relation: str = "add-remove"
    loss: float = math.inf
    n: int = 3000
    epsilon: float = 4.0
    delta: float = 1e-5
    label: str = ""
    share: float = 1.0
    space: Literal["gradients", "queries"] = "gradients"
    only: tuple[str, ...] = ()
    every: int = 1


def _row(loss: float, relation: str = "add-remove", **settings: object) -> Example:
    return Example(settings, relation, loss)


def _attack(
    label: str,
    relation: str = "add-remove",
    n: int = 4,
    epsilon: float = 6.0,
    share: float = 1.0,
    **settings: object,
) -> Example:
    return Example(settings, relation, n=n, epsilon=epsilon, label=label, share=share)


def _queries(label: str, relation: str = "add-remove", **settings: Any) -> Example:
    return replace(_attack(label, relation, **settings), space="queries")


def _batches(n: int = 4, **settings: Any) -> tuple[Example, ...]:
    """Un-sampled, Poisson and fixed-size settings of a method that has ``batch_size`` and ``sampling``."""
    half = n // 2
    return (
        _attack("every record", batch_size=n, n=n, **settings),
        _attack("every record", _REPLACE, batch_size=n, n=n, **settings),
        _attack("Poisson", batch_size=half, n=n, **settings),
        _attack("fixed-size", _REPLACE, batch_size=half, sampling="fixed-size", n=n, **settings),
    )


_SRM: dict[str, Any] = {"steps": 150, "batch_size": 200, "learning_rate": 1.0}
_SGD: dict[str, Any] = {"steps": 150, "batch_size": 200}
_TURNS: dict[str, Any] = {"sampling": "turns", "cohorts": 15, "noise": "correlated"}
_ONCE: dict[str, Any] = {"sampling": "single-pass", "noise": "correlated"}
_BANDS: dict[str, Any] = {"sampling": "poisson-turns", "cohorts": 5, "noise": "correlated"}
_STAGES: dict[str, Any] = {"stages": 3, "first_steps": 20, "batch_size": 200}
_ESCAPE: dict[str, Any] = {
    "learning_rate": 2.0, "radius": 1.0, "escape_steps": 10, "attempts": 2, "hessian_lipschitz": 0.1,
}  # fmt: skip
_PATH: dict[str, Any] = {"learning_rate": 3.0, "smoothness": 0.25}
_TREE: dict[str, Any] = {**_PATH, "noise": "correlated", "difference_clip": 0.05}
_SPIDER: dict[str, Any] = {
    "name": "adaptive-spider", "clip": 1.0, "smoothness": 0.25, "kappa": 3.0, "batch_size": 300,
}  # fmt: skip

EXAMPLES: dict[str, tuple[Example, ...]] = {
    "dp-srm": (
        _row(0.50, **_SRM),
        _row(0.50, joint_clip=True, **_SRM),
        _row(0.52, difference_clip=1.0, smoothness=0.3, **_SRM),
        _row(0.50, _REPLACE, sampling="fixed-size", **_SRM),
        _row(0.66, **{**_SRM, "steps": 300}, returns="random"),
        _row(0.52, learning_rate=1.0, steps=60, **_TURNS),
        _row(0.50, **_SRM, **_BANDS),
    ),
    "dp-sgd": (
        _row(0.48, learning_rate=1.0, **_SGD),
        _row(0.50, learning_rate="cosine:1.0", momentum=0.9, momentum_kind="ema", **_SGD),
        _row(
            0.50,
            learning_rate=1.0,
            **_SGD,
            noise_schedule={"schedule": "StepNoise", "step_size": 4, "gamma": 0.8},
            clip_schedule={"schedule": "ExponentialGradClip", "gamma": 0.9},
        ),
        _row(0.50, _REPLACE, learning_rate="inverse-sqrt:3", returns="average", **_SGD),
        _row(0.50, steps=100, batch_size=200, learning_rate="linear:0.5", momentum=0.9, momentum_steps=20),
        _row(0.50, _REPLACE, steps=100, batch_size=200, learning_rate=1.0, returns="ema", sampling="fixed-size"),
        _row(0.48, learning_rate=1.0, steps=60, **_TURNS),
        _row(0.50, _REPLACE, learning_rate=4.0, steps=30, batch_size=100, **_ONCE),
        _row(0.48, learning_rate=1.0, **_SGD, **_BANDS),
        _row(0.48, _REPLACE, learning_rate=1.0, **_SGD, **_BANDS),
    ),
    "dp-adam": (_row(0.50, steps=100, batch_size=300, learning_rate=0.1),),
    "dp-disk": (
        _row(0.50, learning_rate=1.0, **_SGD),
        _row(0.50, learning_rate=1.0, kappa=0.5, lookahead=1.0, **_SGD),
    ),
    "dp-gd": (
        _row(0.46, steps=40, learning_rate=3.0),
        _row(0.50, _REPLACE, steps=40, learning_rate=1.0, momentum=0.8, returns="average"),
    ),
    "dp-spider": (
        _row(0.46, steps=60, **_PATH),
        _row(0.48, _REPLACE, steps=60, period=20, split=0.7, returns="average", **_PATH),
        _row(0.50, steps=60, period=15, sampling="poisson", batch_size=600, difference_batch_size=300, **_PATH),
        _row(0.50, _REPLACE, steps=60, period=20, sampling="fixed-size", batch_size=600, **_PATH),
        _row(0.48, steps=60, warm_steps=5, warm_learning_rate=3.0, **_PATH),
        _row(0.48, steps=60, kappa=2.0, full_queries=10, **_PATH),
        _row(0.66, steps=60, returns="random", **_PATH),
        _row(0.55, steps=60, period=20, sampling="turns", cohorts=15, **_TREE),
        _row(0.60, _REPLACE, steps=30, sampling="single-pass", batch_size=100, **_TREE),
    ),
    "dp-agd": (_row(0.52),),
    "stagewise": (
        _row(0.50, learning_rate=2.0, **_STAGES),
        _row(0.50, learning_rate=4.0, early_momentum=0, **_STAGES),
        _row(0.60, learning_rate=2.0, returns="random", **_STAGES),
    ),
    "rrpsgd": (_row(0.66, steps=225, batch_size=200, learning_rate=1.0),),
    "bassily-sgd": (_row(0.50, steps=225, batch_size=200, learning_rate=3.0),),
    "output-perturbation": (
        _row(0.60, _REPLACE, steps=60),
        _row(0.65, _REPLACE, steps=60, mechanism="pure"),
    ),
    "whitened-gd": (_row(0.48, _REPLACE, steps=20, row_bound=1.0),),
    "fedavg": (  # every record is a party of its own
        _row(0.50, rounds=60, sample=0.1, clip=0.5, local_rate=0.5, server_rate=3.0),
        _row(0.50, rounds=60, sampling="poisson", sample=0.1, clip=0.5, local_rate=0.5, server_rate=2.0),
        _row(0.50, rounds=60, sampling="poisson", sample=0.1, clip=0.1, clip_quantile=0.5, local_rate=0.5),
        _row(0.55, _REPLACE, rounds=30, sampling="full", clip=0.5, local_rate=0.5, server="adam", server_rate=0.2),
    ),
    "perturbed-sgd": (
        _row(0.58, _REPLACE, oracle={**_SPIDER, "difference_batch_size": 60}, chi=0.02, **_ESCAPE),
        _row(
            0.55,
            oracle={**_SPIDER, "difference_batch_size": 150, "regime": "reuse", "full_queries": 20},
            steps=60,
            chi=0.01,
            **_ESCAPE,
        ),
    ),
}

_LOOKS: dict[str, Any] = {"ranges": "each", "range_share": 0.1, "offset_share": 0.05, "octave_share": 0.05}

# χ so small that the run never thinks it has arrived, κ so large that differences follow the first gradient.
_NEVER: dict[str, Any] = {
    "learning_rate": 0.1, "chi": 1e-3, "radius": 1.0, "escape_steps": 2, "attempts": 1, "hessian_lipschitz": 1e-6,
}  # fmt: skip
_TWO_TURNS: dict[str, Any] = {"sampling": "turns", "cohorts": 2, "noise": "correlated"}
_TWO_BANDS: dict[str, Any] = {**_TWO_TURNS, "sampling": "poisson-turns"}
_AUDIT_SPIDER: dict[str, Any] = {"name": "adaptive-spider", "clip": 1.0, "smoothness": 1.0, "kappa": 1e6}
_AUDIT_TREE: dict[str, Any] = {
    **_AUDIT_SPIDER, "batch_size": 2, "difference_batch_size": 1, "difference_clip": 0.5, "noise": "correlated",
}  # fmt: skip
_SELECTION: dict[str, Any] = {
    "n": 8, "epsilon": 2.0, "alpha": 0.1, "steps": 2, "learning_rate": 0.1,
    "oracle": {**_AUDIT_SPIDER, "batch_size": 2, "difference_batch_size": 2},
}  # fmt: skip
_PERIODIC: dict[str, Any] = {"name": "spider", "period": 2, "clip": 1.0, "smoothness": 1.0}
_MINI_BATCH: dict[str, Any] = {"name": "mini-batch", "batch_size": 4, "clip": 1.0}
_REUSE: dict[str, Any] = {"batch_size": 4, "difference_batch_size": 4, "regime": "reuse", "full_queries": 1}
# A refused step costs as much as a fresh one, so that every run spends all of ρ on the same few releases. Under
# add-remove a choice shows half of what it pays for, hence more runs.
_GREEDY: dict[str, Any] = {"growth": 1.0, "max_steps": 4, "grid": 6}

ATTACKED: dict[str, tuple[Example, ...]] = {
    "dp-srm": (
        *_batches(steps=6, difference_clip=0.2),
        _attack("one clip", steps=6, batch_size=4, joint_clip=True),
        _attack("C2 follows the step", _REPLACE, steps=4, batch_size=4, smoothness=1.0),
        _attack("random round", steps=4, batch_size=2, returns="random"),
        _attack("turns", steps=6, difference_clip=0.2, **_TWO_TURNS),
    ),
    "dp-sgd": (
        *_batches(steps=6, learning_rate=0.1, momentum=0.5),
        _attack("random allocation", steps=6, batch_size=2, sampling="random-allocation"),
        _attack("turns", steps=6, **_TWO_TURNS),
        _attack("turns", _REPLACE, steps=6, **_TWO_TURNS),
        _attack("single pass", _REPLACE, n=6, steps=2, batch_size=3, sampling="single-pass", noise="correlated"),
        _attack("Poisson turns", steps=6, batch_size=1, **_TWO_BANDS),
        _attack("Poisson turns", _REPLACE, steps=6, batch_size=1, **_TWO_BANDS),
        # A record in every third release, as early as it can be: the worst turns there are, and they are known.
        replace(
            _queries("known turns", n=6, share=0.4, steps=9, cohorts=3, sampling="turns", noise="correlated"),
            every=3,
        ),
    ),
    "dp-adam": _batches(steps=6),
    "dp-disk": _batches(steps=6, learning_rate=0.1),
    "dp-gd": (_attack("every record", steps=6), _attack("every record", _REPLACE, steps=6, momentum=0.5)),
    "dp-spider": (
        # Its clip takes a norm, so runs are made one by one.
        _attack("two noises", share=0.4, steps=6, period=3, split=0.5, learning_rate=0.1),
        _attack("two noises", _REPLACE, share=0.4, steps=6, period=3, split=0.8, learning_rate=0.1),
        _attack("Poisson", share=0.4, steps=4, period=2, batch_size=2, sampling="poisson", learning_rate=0.1),
        _attack("warm start", share=0.4, steps=6, warm_steps=3, learning_rate=0.1),
        _attack("tree", share=0.4, steps=6, period=3, difference_clip=0.2, learning_rate=0.1, **_TWO_TURNS),
        _attack("by drift", share=0.4, steps=4, kappa=1e-3, full_queries=3, learning_rate=0.1),
    ),
    "dp-agd": (
        _attack("every record", splits=1, share=2.5, **_GREEDY),
        _attack("every record", _REPLACE, splits=2, **_GREEDY),
    ),
    "stagewise": (
        *_batches(stages=2, first_steps=1),
        _attack("random round", stages=1, first_steps=2, batch_size=2, returns="random"),
    ),
    "bassily-sgd": _batches(steps=4, share=0.4),  # its projection takes a norm: runs are made one by one
    "rrpsgd": (
        _attack("Poisson", steps=4, batch_size=2, share=5.0),
        _attack("every record", _REPLACE, steps=4, batch_size=4),
    ),
    "output-perturbation": (
        _attack("one Gaussian", _REPLACE, steps=5, learning_rate=0.5),
        _attack("pure ε", _REPLACE, epsilon=2.0, share=0.5, steps=2, learning_rate=0.5, mechanism="pure"),
    ),
    "whitened-gd": (
        _queries("every record", steps=2, row_bound=1.0, share=0.4),
        _queries("every record", _REPLACE, steps=2, row_bound=1.0, share=0.4),
        _queries("row norms too", steps=2, share=0.4),
        _queries("ranges and standard errors too", _REPLACE, steps=2, share=0.3, inference_share=0.3, look=_LOOKS),
        _queries("mean octaves too", steps=2, share=0.3, moments="diagonal", look={**_LOOKS, "ranges": "means"}),
    ),
    "perturbed-sgd": (
        _attack("every record", share=0.5, steps=4, oracle={**_AUDIT_SPIDER, **_REUSE}, **_NEVER),
        _attack("by period", share=0.2, steps=4, mode="practical", oracle=_PERIODIC, **_NEVER),
        _attack("mini-batch", share=0.2, steps=4, mode="practical", oracle=_MINI_BATCH, **_NEVER),
        _attack(
            "fresh records",
            _REPLACE,
            n=6,
            share=0.4,
            steps=2,
            oracle={**_AUDIT_SPIDER, "batch_size": 6, "difference_batch_size": 6},
            **_NEVER,
        ),
        _attack("tree", _REPLACE, n=6, share=0.4, steps=5, oracle=_AUDIT_TREE, **_NEVER),
    ),
    "fedavg": (
        _queries("every party", rounds=4, sampling="full", share=0.4),
        _queries("every party", _REPLACE, rounds=4, sampling="full", share=0.4),
        replace(_queries("known turns", n=6, share=0.4, rounds=6, sample=0.5), every=2),
        _queries("adaptive clip", rounds=4, sampling="full", share=0.4, clip_quantile=0.5, clip_share=0.2),
    ),
    "model-selection": (
        # A search of pure ε allows so much at larger ε that thousands of runs would say nothing.
        _attack("fresh records", _REPLACE, share=0.15, hessian_lipschitz=1e-6, **_SELECTION),
        # One record is in one part: here in the one that is searched.
        replace(_queries("the search", _REPLACE, share=0.5, **_SELECTION), only=("select",)),
    ),
    "weighted-average": (
        _attack("one shot", _REPLACE, steps=5, learning_rate=0.5),
        _attack("rounds", steps=5, learning_rate=0.5, method="rounds"),
    ),
}


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm by name: its class, settings for the common problem, and small ones that show a bug."""

    name: str
    home: str
    examples: tuple[Example, ...] = field(default=(), repr=False)
    attacks: tuple[Example, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> Any:
        """The class, imported when used."""
        module, _, cls = self.home.partition(".")
        return resolve_name(f"quietgrad.methods.{module}:{cls}")

    def make(self, given: Mapping[str, object]) -> Any:
        """The algorithm with the settings ``given``, texts or values.

        >>> entry("perturbed-sgd").make({"steps": "50", "oracle": {"name": "mini-batch", "batch_size": 3}}).oracle
        MiniBatch(batch_size=3, ...)
        """
        return settings.build_dataclass(self.name, self.kind, current_config(self.name, given), _readers())


_RETIRED: dict[str, dict[str, Any]] = {
    "rrpsgd": {"noise": "tight"},
    "bassily-sgd": {"noise": "tight"},
}


def current_config(name: str, config: Mapping[str, object]) -> dict[str, object]:
    """The settings that a run of 0.2 wrote, without those that are no settings any more and had their default."""
    gone = _RETIRED.get(name, {})
    return {key: value for key, value in config.items() if key not in gone or value != gone[key]}


_HOMES = {
    "dp-srm": "dp_srm.DPSRM",
    "storm": "dp_srm.STORM",
    "dp-sgd": "dp_sgd.DPSGD",
    "sgd": "dp_sgd.SGD",
    "dp-adam": "dp_sgd.DPAdam",
    "dp-disk": "dp_disk.DPDiSK",
    "dp-gd": "dp_sgd.DPGD",
    "dp-spider": "dp_spider.DPSpider",
    "gd": "dp_sgd.GD",
    "dp-agd": "dp_agd.DPAGD",
    "stagewise": "stagewise.StagewiseDPSGD",
    "output-perturbation": "output_perturbation.OutputPerturbation",
    "rrpsgd": "rrpsgd.RRPSGD",
    "bassily-sgd": "rrpsgd.BassilySGD",
    "perturbed-sgd": "perturbed_sgd.PerturbedSGD",
    "model-selection": "model_selection.ModelSelection",
    "whitened-gd": "whitened_gd.WhitenedGD",
    "weighted-average": "output_perturbation.WeightedAverage",
    "fedavg": "fedavg.FedAvg",
}

ALGORITHMS: dict[str, AlgorithmSpec] = {
    name: AlgorithmSpec(name, home, EXAMPLES.get(name, ()), ATTACKED.get(name, ())) for name, home in _HOMES.items()
}
"""By the name on the command line and in plan files."""


def entry(name: str) -> AlgorithmSpec:
    """The algorithm called ``name``.

    >>> entry("dp-srm").kind.__name__
    'DPSRM'
    """
    if name not in ALGORITHMS:
        near = did_you_mean(name, ALGORITHMS)
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(sorted(ALGORITHMS))}.{near}")
    return ALGORITHMS[name]


def _readers() -> settings.Readers:
    from quietgrad.core.noise.mechanisms import Mechanism
    from quietgrad.core.session.clipping import Clipping, read_clipping
    from quietgrad.methods.epoch_schedules import ClipSchedule, NoiseSchedule, read_schedule
    from quietgrad.methods.learning_rates import LearningRate, as_rate
    from quietgrad.methods.oracles.base import Oracle, read_noise
    from quietgrad.methods.oracles.gradient_estimators import ORACLES, make_oracle, oracle_class
    from quietgrad.methods.range_estimation import RangeEstimation, range_estimation_from_json

    kinds = {kind: partial(make_oracle, kind=kind) for kind in map(oracle_class, ORACLES)}
    return {
        LearningRate: as_rate,
        Oracle: make_oracle,
        RangeEstimation: range_estimation_from_json,
        Mechanism: read_noise,
        Clipping: read_clipping,
        NoiseSchedule: partial(read_schedule, kind=NoiseSchedule),
        ClipSchedule: partial(read_schedule, kind=ClipSchedule),
        **kinds,
    }
