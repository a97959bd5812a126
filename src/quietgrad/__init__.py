"""Differentially private training that proves what privacy it spent.

Four entry points: :mod:`quietgrad.estimators` for tables, :mod:`quietgrad.torch` for PyTorch modules,
:mod:`quietgrad.federation` for several parties, and :func:`minimize` with an algorithm of your choice. A plan
states what a run will release and cost before it reads data:

>>> import quietgrad as qg
>>> budget = qg.Budget(epsilon=1.0, delta=1e-5)
>>> plan = qg.plan(qg.DPGD(steps=30), n=32561, budget=budget)
>>> round(plan.epsilon(1e-5), 2)
1.0
"""

# ruff: noqa: F401
# mypy: implicit-reexport
from __future__ import annotations

from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quietgrad import audit, data, objectives
    from quietgrad.algorithms.dp_agd import DPAGD
    from quietgrad.algorithms.dp_disk import DPDiSK
    from quietgrad.algorithms.dp_sgd import DPGD, DPSGD, GD, SGD, DPAdam
    from quietgrad.algorithms.dp_srm import DPSRM, STORM
    from quietgrad.algorithms.model_selection import ModelSelection
    from quietgrad.algorithms.output_perturbation import OutputPerturbation, WeightedAverage
    from quietgrad.algorithms.perturbed_sgd import PerturbedSGD
    from quietgrad.algorithms.rrpsgd import RRPSGD, BassilySGD
    from quietgrad.algorithms.stagewise import StagewiseDPSGD
    from quietgrad.algorithms.whitened_gd import WhitenedGD
    from quietgrad.oracles.gradient_estimators import AdaptiveSpider
    from quietgrad.plans.schedule import Plan
    from quietgrad.privacy import events
    from quietgrad.privacy.accounting import account, calibrate
    from quietgrad.privacy.budget import Budget, Relation
    from quietgrad.privacy.ledger import Ledger
    from quietgrad.training import minimize, plan, resume
    from quietgrad.training.callbacks import CSVLog, MLflowLog, Progress, TensorBoardLog
    from quietgrad.training.result import Privacy, Result, load
    from quietgrad.training.stationarity import Certificate, certify
__version__ = "0.2.0"

_HOMES = {
    "Budget": "privacy.budget",
    "Relation": "privacy.budget",
    "Ledger": "privacy.ledger",
    "account": "privacy.accounting",
    "calibrate": "privacy.accounting",
    "plan": "plans.schedule",
    "minimize": "training",
    "resume": "training",
    "Progress": "training.callbacks",
    "CSVLog": "training.callbacks",
    "TensorBoardLog": "training.callbacks",
    "MLflowLog": "training.callbacks",
    "Plan": "plans.schedule",
    "Privacy": "training.result",
    "Result": "training.result",
    "load": "training.result",
    "DPSRM": "algorithms.dp_srm",
    "STORM": "algorithms.dp_srm",
    "DPSGD": "algorithms.dp_sgd",
    "SGD": "algorithms.dp_sgd",
    "DPAdam": "algorithms.dp_sgd",
    "DPDiSK": "algorithms.dp_disk",
    "DPGD": "algorithms.dp_sgd",
    "GD": "algorithms.dp_sgd",
    "DPAGD": "algorithms.dp_agd",
    "StagewiseDPSGD": "algorithms.stagewise",
    "OutputPerturbation": "algorithms.output_perturbation",
    "RRPSGD": "algorithms.rrpsgd",
    "BassilySGD": "algorithms.rrpsgd",
    "PerturbedSGD": "algorithms.perturbed_sgd",
    "ModelSelection": "algorithms.model_selection",
    "AdaptiveSpider": "oracles.gradient_estimators",
    "certify": "training.stationarity",
    "Certificate": "training.stationarity",
    "WhitenedGD": "algorithms.whitened_gd",
    "WeightedAverage": "algorithms.output_perturbation",
}
_MODULES = {"audit": "audit", "data": "data", "events": "privacy.events", "objectives": "objectives"}

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = resolve_name(f"quietgrad.{_HOMES[name]}:{name}")
    elif name in _MODULES:
        value = import_module(f"quietgrad.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'quietgrad' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
