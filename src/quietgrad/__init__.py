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

from quietgrad import moved

if TYPE_CHECKING:
    from quietgrad import data, objectives
    from quietgrad.assurance import audit
    from quietgrad.core.accounting import events
    from quietgrad.core.accounting.accounting import account, calibrate
    from quietgrad.core.accounting.budget import Budget, Relation
    from quietgrad.core.ledger.ledger import Ledger
    from quietgrad.core.plans.schedule import Plan
    from quietgrad.core.session.statement import Privacy
    from quietgrad.methods import minimize, plan, resume
    from quietgrad.methods.callbacks import CSVLog, MLflowLog, Progress, TensorBoardLog
    from quietgrad.methods.dp_agd import DPAGD
    from quietgrad.methods.dp_disk import DPDiSK
    from quietgrad.methods.dp_sgd import DPGD, DPSGD, GD, SGD, DPAdam
    from quietgrad.methods.dp_srm import DPSRM, STORM
    from quietgrad.methods.model_selection import ModelSelection
    from quietgrad.methods.oracles.gradient_estimators import AdaptiveSpider
    from quietgrad.methods.output_perturbation import OutputPerturbation, WeightedAverage
    from quietgrad.methods.perturbed_sgd import PerturbedSGD
    from quietgrad.methods.result import Result, load
    from quietgrad.methods.rrpsgd import RRPSGD, BassilySGD
    from quietgrad.methods.stagewise import StagewiseDPSGD
    from quietgrad.methods.stationarity import Certificate, certify
    from quietgrad.methods.whitened_gd import WhitenedGD
__version__ = "0.2.0"

_HOMES = {
    "Budget": "core.accounting.budget",
    "Relation": "core.accounting.budget",
    "Ledger": "core.ledger.ledger",
    "account": "core.accounting.accounting",
    "calibrate": "core.accounting.accounting",
    "plan": "core.plans.schedule",
    "minimize": "methods",
    "resume": "methods",
    "Progress": "methods.callbacks",
    "CSVLog": "methods.callbacks",
    "TensorBoardLog": "methods.callbacks",
    "MLflowLog": "methods.callbacks",
    "Plan": "core.plans.schedule",
    "Privacy": "methods.result",
    "Result": "methods.result",
    "load": "methods.result",
    "DPSRM": "methods.dp_srm",
    "STORM": "methods.dp_srm",
    "DPSGD": "methods.dp_sgd",
    "SGD": "methods.dp_sgd",
    "DPAdam": "methods.dp_sgd",
    "DPDiSK": "methods.dp_disk",
    "DPGD": "methods.dp_sgd",
    "GD": "methods.dp_sgd",
    "DPAGD": "methods.dp_agd",
    "StagewiseDPSGD": "methods.stagewise",
    "OutputPerturbation": "methods.output_perturbation",
    "RRPSGD": "methods.rrpsgd",
    "BassilySGD": "methods.rrpsgd",
    "PerturbedSGD": "methods.perturbed_sgd",
    "ModelSelection": "methods.model_selection",
    "AdaptiveSpider": "methods.oracles.gradient_estimators",
    "certify": "methods.stationarity",
    "Certificate": "methods.stationarity",
    "WhitenedGD": "methods.whitened_gd",
    "WeightedAverage": "methods.output_perturbation",
}
_MODULES = {
    "audit": "assurance.audit",
    "data": "data",
    "events": "core.accounting.events",
    "objectives": "objectives",
}

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
