"""Old import paths: modules that moved into rooms of their own are still found under their earlier names.

``import quietgrad.privacy.events`` gives the module :mod:`quietgrad.core.accounting.events` itself, not a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from importlib.abc import Loader

_ROOMS = {
    # earlier package: {room now: modules, "old:new" where the name changed too}
    "": {
        "core": "errors files settings vectors sanitize sampling plans",
        "methods": "oracles",
        "federation": "secure",
        "assurance": "audit certificates report",
    },
    "privacy.": {
        "core": "compiled",
        "core.accounting": "budget events composition accounting closed_form_accountants loss_distribution "
        "pld_accountant random_allocation",
        "core.noise": "rng noise:grid device_stream:device mechanisms correlated",
        "core.ledger": "keys chain ledger ledger_state:state",
    },
    "curators.": {"core.ledger": "account", "core.session": "base central:curator session transcript"},
    "objectives.": {
        "core.session": "base:queries",
        "tables": "landscapes person_ids privacy_units registry regularizers queries",
        "torch": "networks",
    },
    "objectives.tables.": {
        "tables": "full_batch histogram_decoding kernels linear losses range_queries scanned shapes table whitening"
    },
    "torch.": {
        "torch.loops": "private_loop recorded_loop:handle_loop loop_wrappers:wrappers private_batch distributed"
    },
    "torch.loops.": {"torch.loops": "recorded_loop:handle_loop"},
    "algorithms.": {
        "methods": "additive_gd base budget_allocation custom_loop dp_agd dp_disk dp_sgd dp_srm learning_rates "
        "model_selection output_perturbation perturbed_sgd range_estimation registry rrpsgd stagewise theorems "
        "whitened_gd"
    },
    "training.": {
        "core.session": "checkpoint runs:kept",
        "methods": "callbacks minimizing result stationarity",
    },
}
_PACKAGES = {"algorithms": "methods", "training": "methods", "objectives.tables": "tables"}
_EMPTY = ("privacy", "curators")


def _pairs() -> Iterator[tuple[str, str]]:
    for package, rooms in _ROOMS.items():
        for room, names in rooms.items():
            for old, _, new in (name.partition(":") for name in names.split()):
                yield f"quietgrad.{package}{old}", f"quietgrad.{room}.{new or old}"
    for old, new in _PACKAGES.items():
        yield f"quietgrad.{old}", f"quietgrad.{new}"


MOVED = dict(_pairs())
"""Where a module that had the first name is now."""


class MovedFinder:
    """A finder and loader of modules under the names that they had before they moved.

    It is asked first: an ordinary finder would read the file a second time, under the old name. It has the methods
    of the classes of ``importlib.abc`` and is none of them: importing that module takes as long as this package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _EMPTY_PACKAGES:
            return ModuleSpec(fullname, cast("Loader", self), is_package=True)
        parent, _, name = fullname.rpartition(".")
        if fullname in MOVED or MOVED.get(parent) is not None:
            return ModuleSpec(
                fullname, cast("Loader", self), loader_state=MOVED.get(fullname) or f"{MOVED[parent]}.{name}"
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.loader_state is None:
            return None
        module = import_module(spec.loader_state)
        spec.loader_state = module.__spec__  # importing under the old name puts its own spec there
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


_EMPTY_PACKAGES = tuple(f"quietgrad.{name}" for name in _EMPTY)
if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, MovedFinder())
