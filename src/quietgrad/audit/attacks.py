"""Attack configurations: for every private algorithm, small settings with enough signal to see a bug.

A claim of ε = 0.2 cannot be attacked with thousands of runs; one of μ ≥ 1 can. Releases are few, budgets generous,
and both relations, un-sampled, Poisson-sampled and fixed-size batches are covered wherever the algorithm has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from quietgrad.privacy.budget import Budget, Relation

_GENEROUS = (6.0, 1e-5)  # μ = 1.31


@dataclass(frozen=True)
class Attack:
    """One configuration to audit: a label, the algorithm, its public n and the promise.

    ``share`` of the runs asked for is made where a run is dear; the budget then leaves signal to spare.
    """

    label: str
    algorithm: Any
    n: int
    budget: Budget
    share: float = 1.0


def _budget(relation: str = "add-remove") -> Budget:
    return Budget(*_GENEROUS, Relation.parse(relation))


def _gradient_method(make: Callable[..., Any], n: int = 4) -> Iterator[Attack]:
    """Un-sampled, Poisson and fixed-size settings of a method that has ``batch_size`` and ``sampling``."""
    yield Attack("every record", make(batch_size=n), n, _budget())
    yield Attack("every record", make(batch_size=n), n, _budget("replace-one"))
    yield Attack("Poisson", make(batch_size=n // 2), n, _budget())
    yield Attack("fixed-size", make(batch_size=n // 2, sampling="fixed-size"), n, _budget("replace-one"))


def _dp_sgd() -> Iterator[Attack]:
    from quietgrad.algorithms.dp_sgd import DPSGD

    yield from _gradient_method(lambda **s: DPSGD(steps=6, learning_rate=0.1, momentum=0.5, **s))


def _dp_adam() -> Iterator[Attack]:
    from quietgrad.algorithms.dp_adam import DPAdam

    yield from _gradient_method(lambda **s: DPAdam(steps=6, **s))


def _dp_srm() -> Iterator[Attack]:
    from quietgrad.algorithms.dp_srm import DPSRM

    yield from _gradient_method(lambda **s: DPSRM(steps=6, difference_clip=0.2, **s))
    yield Attack("one clip", DPSRM(steps=6, batch_size=4, joint_clip=True), 4, _budget())
    yield Attack("C2 follows the step", DPSRM(steps=4, batch_size=4, smoothness=1.0), 4, _budget("replace-one"))
    yield Attack("random round", DPSRM(steps=4, batch_size=2, returns="random"), 4, _budget())


def _dp_gd() -> Iterator[Attack]:
    from quietgrad.algorithms.dp_gd import DPGD

    yield Attack("every record", DPGD(steps=6), 4, _budget())
    yield Attack("every record", DPGD(steps=6, momentum=0.5), 4, _budget("replace-one"))


def _dp_agd() -> Iterator[Attack]:
    from quietgrad.algorithms.dp_agd import DPAGD

    # A refused step costs as much as a fresh one, so that every run spends all of ρ on the same few releases. Under
    # add-remove a choice shows half of what it pays for, hence more runs.
    greedy = {"growth": 1.0, "max_steps": 4, "grid": 6}
    yield Attack("every record", DPAGD(splits=1, **greedy), 4, _budget(), share=2.5)  # type: ignore[arg-type]
    yield Attack("every record", DPAGD(splits=2, **greedy), 4, _budget("replace-one"))  # type: ignore[arg-type]


def _stagewise() -> Iterator[Attack]:
    from quietgrad.algorithms.stagewise import StagewiseDPSGD

    yield from _gradient_method(lambda **s: StagewiseDPSGD(stages=2, first_steps=1, **s))
    yield Attack(
        "random round", StagewiseDPSGD(stages=1, first_steps=2, batch_size=2, returns="random"), 4, _budget()
    )


def _bassily_sgd() -> Iterator[Attack]:
    from quietgrad.algorithms.bassily_sgd import BassilySGD

    yield from _gradient_method(lambda **s: BassilySGD(steps=4, **s))


def _rrpsgd() -> Iterator[Attack]:
    from quietgrad.algorithms.rrpsgd import RRPSGD

    yield Attack("Poisson", RRPSGD(steps=4, batch_size=2), 4, _budget())
    yield Attack("every record", RRPSGD(steps=4, batch_size=4), 4, _budget("replace-one"))


def _output_perturbation() -> Iterator[Attack]:
    from quietgrad.algorithms.output_perturbation import OutputPerturbation

    gaussian = OutputPerturbation(steps=5, learning_rate=0.5)
    pure = OutputPerturbation(steps=2, learning_rate=0.5, mechanism="pure")
    yield Attack("one Gaussian", gaussian, 4, _budget("replace-one"))
    yield Attack("pure ε", pure, 4, Budget(2.0, 1e-5, Relation.REPLACE_ONE), share=0.5)


def _whitened_gd() -> Iterator[Attack]:
    from quietgrad.algorithms.whitened_gd import WhitenedGD

    yield Attack("every record", WhitenedGD(steps=2, row_bound=1.0), 4, _budget(), share=0.4)
    yield Attack("every record", WhitenedGD(steps=2, row_bound=1.0), 4, _budget("replace-one"), share=0.4)


def _perturbed_sgd() -> Iterator[Attack]:
    from quietgrad.algorithms.perturbed_sgd import PerturbedSGD
    from quietgrad.oracles.spider import AdaptiveSpider

    # χ so small that the run never thinks it has arrived, κ so large that differences follow the first gradient.
    public = {"learning_rate": 0.1, "chi": 1e-3, "radius": 1.0, "escape_steps": 2, "attempts": 1}

    def make(steps: int, **oracle: Any) -> Any:
        spider = AdaptiveSpider(clip=1.0, smoothness=1.0, kappa=1e6, **oracle)
        return PerturbedSGD(oracle=spider, steps=steps, hessian_lipschitz=1e-6, **public)  # type: ignore[arg-type]

    again = make(4, batch_size=4, difference_batch_size=4, regime="reuse", full_queries=1)
    fresh = make(2, batch_size=6, difference_batch_size=6)
    yield Attack("every record", again, 4, _budget(), share=0.5)
    yield Attack("fresh records", fresh, 6, _budget("replace-one"), share=0.4)


def _model_selection() -> Iterator[Attack]:
    from quietgrad.algorithms.model_selection import ModelSelection
    from quietgrad.oracles.spider import AdaptiveSpider

    spider = AdaptiveSpider(clip=1.0, smoothness=1.0, kappa=1e6, batch_size=2, difference_batch_size=2)
    algorithm = ModelSelection(oracle=spider, alpha=0.1, steps=2, learning_rate=0.1, hessian_lipschitz=1e-6)
    # A search of pure ε allows so much at larger ε that thousands of runs would say nothing.
    yield Attack("fresh records", algorithm, 8, Budget(2.0, 1e-5, Relation.REPLACE_ONE), share=0.3)


def _weighted_average() -> Iterator[Attack]:
    from quietgrad.algorithms.weighted_average import WeightedAverage

    one_shot = WeightedAverage(steps=5, learning_rate=0.5)
    yield Attack("one shot", one_shot, 4, _budget("replace-one"))
    yield Attack("rounds", WeightedAverage(steps=5, learning_rate=0.5, method="rounds"), 4, _budget())


ATTACKS: dict[str, Callable[[], Iterator[Attack]]] = {
    "dp-sgd": _dp_sgd,
    "dp-srm": _dp_srm,
    "dp-adam": _dp_adam,
    "dp-gd": _dp_gd,
    "dp-agd": _dp_agd,
    "stagewise": _stagewise,
    "bassily-sgd": _bassily_sgd,
    "rrpsgd": _rrpsgd,
    "output-perturbation": _output_perturbation,
    "whitened-gd": _whitened_gd,
    "perturbed-sgd": _perturbed_sgd,
    "model-selection": _model_selection,
    "weighted-average": _weighted_average,
}
"""By the algorithm's name on the command line."""


def attacks_on(name: str) -> list[Attack]:
    """The configurations for an algorithm.

    >>> [attack.label for attack in attacks_on("dp-gd")]
    ['every record', 'every record']
    """
    if name not in ATTACKS:
        raise ValueError(f"algorithm {name!r}: no attack is prepared; there is one for {', '.join(ATTACKS)}.")
    return list(ATTACKS[name]())
