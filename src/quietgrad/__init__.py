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

from typing import TYPE_CHECKING

from quietgrad import moved
from quietgrad.core.exports import lazy_names

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
    from quietgrad.methods.dp_spider import DPSpider
    from quietgrad.methods.dp_srm import DPSRM, STORM
    from quietgrad.methods.fedavg import FedAvg
    from quietgrad.methods.model_selection import ModelSelection
    from quietgrad.methods.oracles.spider import AdaptiveSpider, Spider
    from quietgrad.methods.output_perturbation import OutputPerturbation, WeightedAverage
    from quietgrad.methods.perturbed_sgd import PerturbedSGD
    from quietgrad.methods.result import Result, load
    from quietgrad.methods.rrpsgd import RRPSGD, BassilySGD
    from quietgrad.methods.stagewise import StagewiseDPSGD
    from quietgrad.methods.stationarity import Certificate, certify
    from quietgrad.methods.whitened_gd import WhitenedGD
__version__ = "0.3.0"

_HOMES = {
    "core.accounting.budget": "Budget Relation",
    "core.ledger.ledger": "Ledger",
    "core.accounting.accounting": "account calibrate",
    "core.plans.schedule": "plan Plan",
    "methods": "minimize resume",
    "methods.callbacks": "Progress CSVLog TensorBoardLog MLflowLog",
    "methods.result": "Privacy Result load",
    "methods.dp_srm": "DPSRM STORM",
    "methods.dp_sgd": "DPSGD SGD DPAdam DPGD GD",
    "methods.dp_spider": "DPSpider",
    "methods.dp_disk": "DPDiSK",
    "methods.dp_agd": "DPAGD",
    "methods.stagewise": "StagewiseDPSGD",
    "methods.output_perturbation": "OutputPerturbation WeightedAverage",
    "methods.rrpsgd": "RRPSGD BassilySGD",
    "methods.perturbed_sgd": "PerturbedSGD",
    "methods.fedavg": "FedAvg",
    "methods.model_selection": "ModelSelection",
    "methods.oracles.spider": "AdaptiveSpider Spider",
    "methods.stationarity": "certify Certificate",
    "methods.whitened_gd": "WhitenedGD",
}
_MODULES = {
    "audit": "assurance.audit",
    "data": "data",
    "events": "core.accounting.events",
    "objectives": "objectives",
}

__all__ = [*(name for names in _HOMES.values() for name in names.split()), *_MODULES, "__version__"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES, _MODULES)
