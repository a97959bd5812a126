"""Every public name of Opacus 1.6 has an answer: the same thing, or a sentence; none ends in a bare error."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import quietgrad.torch as qt
from quietgrad.core.accounting.accounting import account
from quietgrad.core.accounting.events import composed, poisson_gaussian
from quietgrad.torch.opacus_table import CLASSES, FUNCTIONS, MODULES
from tests.torch.loops import network, table

NAMES: dict[str, list[str]] = json.loads((Path(__file__).parent / "opacus_names.json").read_text())
PATHS = [(path, name) for path, names in NAMES.items() for name in names]
own: Any = qt


def made(**settings: Any) -> Any:
    model = network()
    engine = qt.PrivacyEngine()
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, n_public=60,
        data_loader=DataLoader(table(), batch_size=15), noise_multiplier=1.0, criterion=nn.CrossEntropyLoss(),
        **settings,
    )  # fmt: skip


@pytest.mark.parametrize(("path", "name"), PATHS, ids=lambda part: part)
def test_a_name_is_found_by_its_path_and_by_itself(path: str, name: str) -> None:
    module = importlib.import_module(f"quietgrad.torch{path.removeprefix('opacus')}")
    found = getattr(module, name)
    assert found is not None
    found = getattr(qt, name)
    if name in CLASSES or name in FUNCTIONS:
        with pytest.raises(ValueError, match=rf"^{name}: .+\.$"):
            found(nn.Linear(1, 1), noise_multiplier=1.0)


def test_the_list_is_that_of_opacus() -> None:
    opacus = pytest.importorskip("opacus", reason="needs opacus 1.6")
    for module in pkgutil.walk_packages(opacus.__path__, "opacus."):
        if ".tests" in module.name or module.name.endswith(".lightning"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.name:
                assert inspect.ismodule(value) or name in NAMES[module.name], (module.name, name)


def test_what_is_no_name_of_opacus_is_an_ordinary_attribute_error() -> None:
    assert not hasattr(qt, "make_privte")
    with pytest.raises(AttributeError, match="neither has Opacus"):
        _ = own.make_privte
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("quietgrad.torch.nothing_like_it")
    assert all(
        f"opacus.{path}" in NAMES or path.partition(".")[2] == "" for path in MODULES if "analysis" not in path
    )


def test_classes_can_be_asked_for() -> None:
    _, model, optimizer, loader, _ = made(epochs=1)
    assert isinstance(optimizer, own.DPOptimizer)
    assert isinstance(model, own.GradSampleModule)
    assert isinstance(loader, own.DPDataLoader)
    assert not isinstance(torch.optim.SGD(network().parameters(), lr=0.1), own.DPOptimizer)
    with pytest.raises(ValueError, match=r"DPDataLoader\.from_data_loader: make_private returns"):
        own.DPDataLoader.from_data_loader(loader)

    def typed(optimizer: own.DPOptimizer | None = None) -> None:
        """An annotation of a script."""

    typed(optimizer)


def test_attributes_of_engine_optimizer_and_model() -> None:
    engine, model, optimizer, loader, _ = made(epochs=1)
    assert (engine.secure_mode, engine.dataset) == (True, loader.dataset)
    assert optimizer.accumulated_iterations == 1
    assert [id(param) for param in optimizer.params] == [id(param) for param in model.parameters()]
    for name, words in {"noise_multiplier": "noise_schedule=", "max_grad_norm": "clip_schedule="}.items():
        with pytest.raises(AttributeError, match=words):
            setattr(optimizer, name, 0.1)
    for name in ("per_sample_gradient_norms", "GRAD_SAMPLERS", "is_supported", "capture_backprops_hook"):
        with pytest.raises(ValueError, match=name):
            getattr(model, name)
    with pytest.raises(ValueError, match="no table of layers"):
        _ = own.ModuleValidator.VALIDATORS
    with pytest.raises(ValueError, match="average_gradients: the private loop adds up"):
        own.average_gradients(model)


def test_batch_norms_become_instance_norms_if_that_is_asked() -> None:
    model: Any = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
    fixed: Any = qt.ModuleValidator.fix_and_validate(model, replace_bn_with_in=True)
    assert [type(layer) for layer in fixed] == [nn.Conv2d, nn.InstanceNorm2d, nn.InstanceNorm2d]
    assert fixed[1].weight.tolist() == model[1].weight.tolist()
    assert fixed[1].track_running_stats is False
    with pytest.raises(own.ShouldReplaceModuleError):
        qt.ModuleValidator.validate(model, strict=True)


def test_steps_counted_by_hand_are_proved() -> None:
    for name in ("rdp", "prv"):
        accountant = own.create_accountant(mechanism=name)
        assert (accountant.get_epsilon(1e-5), accountant.mechanism()) == (0.0, name)
        for z in (1.0, 1.0, 2.0, 1.0):
            accountant.step(noise_multiplier=z, sample_rate=0.1)
        assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]
        parts = [poisson_gaussian(rate=0.1, noise_multiplier=z, steps=k) for z, k in ((1.0, 3), (2.0, 1))]
        expected = account(composed(parts), delta=1e-5, relation="add-remove")
        assert accountant.get_epsilon(delta=1e-5) == expected
        again = own.RDPAccountant()
        again.load_state_dict(accountant.state_dict())
        assert again.get_epsilon(1e-5) == expected
        assert len(again) == 4
        with pytest.raises(ValueError, match="counts its own samples"):
            again.get_optimizer_hook_fn(sample_rate=0.1)
        with pytest.raises(ValueError, match="use get_epsilon"):
            again.get_privacy_spent(delta=1e-5)
    with pytest.raises(ValueError, match="no upper bound"):
        own.GaussianAccountant()
    with pytest.raises(ValueError, match="no upper bound"):
        own.create_accountant("gdp")


@pytest.mark.parametrize("length", [{"epochs": 5}, {"steps": 500}])
def test_a_noise_multiplier_meets_its_target_and_less_would_not(length: dict[str, int]) -> None:
    """500 samples of a hundredth: the ε of the answer is at most the target, of one 2 % below it is above."""
    z = qt.get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, **length)  # type: ignore[arg-type]
    costs = [
        account(poisson_gaussian(rate=0.01, noise_multiplier=each, steps=500), delta=1e-5, relation="add-remove")
        for each in (z, 0.98 * z)
    ]
    assert costs[0] <= 2.0 < costs[1]
    for wrong, words in (({}, "epochs= or steps="), ({"epochs": 1, "steps": 2}, "one of them")):
        with pytest.raises(ValueError, match=words):
            qt.get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.01, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'sample_size'"):
        qt.get_noise_multiplier(target_epsilon=2.0, target_delta=1e-5, sample_rate=0.1, epochs=1, sample_size=3)
