"""The algorithms by name, and examples of each: what the command line, plan files, tests and audits all read.

A new algorithm is a file of this room and an entry here. Its examples make it part of the common table of tests,
its attacks part of every audit; a test fails if a private algorithm has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from quietgrad import settings
from quietgrad.algorithms.examples import ATTACKED, EXAMPLES, Example
from quietgrad.shown import did_you_mean


@dataclass(frozen=True)
class Entry:
    """An algorithm by name: its class, settings for the common problem, and small ones that show a bug."""

    name: str
    home: str
    examples: tuple[Example, ...] = field(default=(), repr=False)
    attacks: tuple[Example, ...] = field(default=(), repr=False)

    @property
    def kind(self) -> Any:
        """The class, imported when used."""
        module, _, cls = self.home.partition(".")
        return getattr(import_module(f"quietgrad.algorithms.{module}"), cls)

    def make(self, given: Mapping[str, Any]) -> Any:
        """The algorithm with the settings ``given``, texts or values.

        >>> entry("perturbed-sgd").make({"steps": "50", "oracle": {"name": "spider", "period": 3}}).oracle.period
        3
        """
        return settings.build(self.name, self.kind, given, _readers())


_HOMES = {
    "dp-srm": "dp_srm.DPSRM",
    "storm": "dp_srm.STORM",
    "dp-sgd": "dp_sgd.DPSGD",
    "sgd": "dp_sgd.SGD",
    "dp-adam": "dp_adam.DPAdam",
    "dp-disk": "dp_disk.DPDiSK",
    "dp-gd": "dp_gd.DPGD",
    "gd": "dp_gd.GD",
    "dp-agd": "dp_agd.DPAGD",
    "stagewise": "stagewise.StagewiseDPSGD",
    "output-perturbation": "output_perturbation.OutputPerturbation",
    "rrpsgd": "rrpsgd.RRPSGD",
    "bassily-sgd": "bassily_sgd.BassilySGD",
    "perturbed-sgd": "perturbed_sgd.PerturbedSGD",
    "model-selection": "model_selection.ModelSelection",
    "whitened-gd": "whitened_gd.WhitenedGD",
    "weighted-average": "weighted_average.WeightedAverage",
}

ALGORITHMS: dict[str, Entry] = {
    name: Entry(name, home, EXAMPLES.get(name, ()), ATTACKED.get(name, ())) for name, home in _HOMES.items()
}
"""By the name on the command line and in plan files."""


def entry(name: str) -> Entry:
    """The algorithm called ``name``.

    >>> entry("dp-srm").kind.__name__
    'DPSRM'
    """
    if name not in ALGORITHMS:
        near = did_you_mean(name, ALGORITHMS)
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(sorted(ALGORITHMS))}.{near}")
    return ALGORITHMS[name]


def _readers() -> settings.Readers:
    from quietgrad.algorithms.rates import Rate, read_rate
    from quietgrad.algorithms.table_looks import Look, read_look
    from quietgrad.oracles.base import Oracle, read_noise
    from quietgrad.oracles.registry import ORACLES, make_oracle, oracle_class
    from quietgrad.privacy.correlated import Cancelling

    kinds = {kind: partial(make_oracle, kind=kind) for kind in map(oracle_class, ORACLES)}
    return {Rate: read_rate, Oracle: make_oracle, Look: read_look, Cancelling: read_noise, **kinds}
