"""Algorithms: the update, its schedules, when it stops and which iterate it returns."""

from __future__ import annotations

from importlib import import_module
from typing import Any

HOMES = {
    "DPSRM": "dp_srm",
    "STORM": "dp_srm",
    "DPSGD": "dp_sgd",
    "SGD": "dp_sgd",
    "DPAdam": "dp_adam",
    "DPGD": "dp_gd",
    "GD": "dp_gd",
    "DPAGD": "dp_agd",
    "StagewiseDPSGD": "stagewise",
    "OutputPerturbation": "output_perturbation",
    "RRPSGD": "rrpsgd",
    "BassilySGD": "bassily_sgd",
    "PerturbedSGD": "perturbed_sgd",
    "ModelSelection": "model_selection",
    "WhitenedGD": "whitened_gd",
    "WeightedAverage": "weighted_average",
}
"""Where each algorithm lives; imported when used."""


def __getattr__(name: str) -> Any:
    if name in HOMES:
        return getattr(import_module(f"quietgrad.algorithms.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def by_name(name: str) -> Any:
    """The algorithm class with a command-line name.

    >>> by_name("dp-srm").__name__
    'DPSRM'
    """
    classes = {getattr(import_module(f"quietgrad.algorithms.{home}"), cls).name: cls for cls, home in HOMES.items()}
    if name not in classes:
        raise ValueError(f"algorithm {name!r}: must be one of {', '.join(sorted(classes))}.")
    return __getattr__(classes[name])
