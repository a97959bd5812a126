"""One registry of algorithms, oracles and objectives: the command line and plan files accept the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import typer

import quietgrad as qg
from quietgrad.cli.run_spec import algorithm_from, objective_from
from quietgrad.core.errors import DataError, SettingError
from quietgrad.federation.network import nothing_beside
from quietgrad.federation.plan_file import objective_of
from quietgrad.methods.learning_rates import StepDecay
from quietgrad.methods.oracles.gradient_estimators import ORACLES, make_oracle, oracle_class
from quietgrad.methods.registry import ALGORITHMS, entry
from quietgrad.tables.losses import LOSSES
from tests.probes.records import example_loss, labels


def test_names_are_those_of_the_classes_and_every_example_can_be_built() -> None:
    for name, found in ALGORITHMS.items():
        assert found.kind.name == name
        assert found.kind.private == bool(found.attacks), f"{name}: private and attacked must be the same"
        for example in (*found.examples, *found.attacks):
            made = found.make(example.settings)
            assert made.schedule(example.n).releases >= 1


def test_results_describe_algorithms_so_that_they_can_be_built_again() -> None:
    for found in ALGORITHMS.values():
        for example in (*found.examples, *found.attacks):
            made = found.make(example.settings)
            assert found.make(json.loads(json.dumps(made.config()))) == made
    oracle = make_oracle({"name": "mini-batch", "batch_size": 5})
    assert make_oracle(oracle.config()) == oracle
    rated = qg.DPGD(learning_rate=StepDecay(0.5, every=7))
    assert entry("dp-gd").make(rated.config()) == rated


def from_command_line(name: str, settings: dict[str, Any]) -> Any:
    try:
        return algorithm_from(name, {}, [f"{key}={value}" for key, value in settings.items()])
    except (typer.BadParameter, SettingError) as error:
        return str(error)


def from_plan_file(name: str, settings: dict[str, Any]) -> Any:
    try:
        return entry(name).make(settings)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("name", "settings", "accepted"),
    [
        ("dp-gd", {"steps": 1e3}, True),
        ("dp-gd", {"steps": "30"}, True),
        ("dp-gd", {"steps": 1.5}, False),
        ("dp-gd", {"steps": True}, False),
        ("dp-gd", {"steps": 10**400}, False),
        ("dp-gd", {"steps": "many"}, False),
        ("dp-gd", {"steps": 0}, False),
        ("dp-gd", {"stepz": 3}, False),
        ("dp-gd", {"learning_rate": 4}, True),
        ("dp-gd", {"learning_rate": "cosine:0.5"}, True),
        ("dp-gd", {"learning_rate": "circle:0.5"}, False),
        ("dp-gd", {"clip": "nan"}, False),
        ("dp-srm", {"joint-clip": "true"}, True),
        ("dp-srm", {"smoothness": "none"}, True),
        ("dp-srm", {"smoothness": "nothing"}, False),
        ("dp-srm", {"sampling": "fixed-size"}, True),
        ("dp-srm", {"sampling": "some"}, False),
        ("perturbed-sgd", {"oracle": "mini-batch"}, False),  # it needs a batch size
        ("perturbed-sgd", {"oracle": "gauss"}, False),
        ("model-selection", {"oracle": "adaptive-spider"}, True),
        ("model-selection", {"oracle": "mini-batch"}, False),  # its test needs the adaptive one
        ("gauss", {}, False),
    ],
)
def test_command_line_and_plan_files_accept_the_same(name: str, settings: dict[str, Any], accepted: bool) -> None:
    spoken, written = from_command_line(name, settings), from_plan_file(name, settings)
    assert isinstance(spoken, str) is isinstance(written, str) is not accepted
    if accepted:
        assert spoken == written
    else:
        assert "\n" not in spoken + written


def test_nothing_that_was_said_is_dropped() -> None:
    """Said twice is refused; an oracle named by --set keeps its settings and the flags that are its own."""
    found: Any = algorithm_from("perturbed-sgd", {"batch_size": 5}, ["oracle=adaptive-spider", "oracle.kappa=2"])
    assert (found.oracle.batch_size, found.oracle.kappa) == (5, 2)
    for flags, settings in (
        ({"steps": 3}, ["steps=4"]),
        ({}, ["steps=4", "steps=5"]),
        ({"batch_size": 3}, ["oracle.batch-size=4"]),
    ):
        with pytest.raises(typer.BadParameter, match="set twice"):
            algorithm_from("perturbed-sgd", flags, settings)


def test_oracles_by_name_take_their_settings_from_both() -> None:
    for name in ORACLES:
        spoken: Any = algorithm_from("perturbed-sgd", {"batch_size": 40}, [f"oracle={name}"])
        written = entry("perturbed-sgd").make({"oracle": {"name": name, "batch_size": 40}})
        assert spoken == written
        assert type(spoken.oracle) is oracle_class(name)
    with pytest.raises(ValueError, match="no setting 'law'"):
        make_oracle({"name": "mini-batch", "batch_size": 4, "law": [[1, 1.0]]})
    with pytest.raises(ValueError, match="a name, or a table"):
        make_oracle(3)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_same_from_both(name: str) -> None:
    loss = LOSSES[name]
    knob = "" if loss.number is None else ":0.5"
    classes = {"binary": 2, "multiclass": 3, "regression": None}[loss.task]
    data = {"features": 2} if classes is None else {"features": 2, "classes": list(range(classes))}
    settings = {"intercept": True, "row_bound": 2, "rows": "clip", "regularizer": "l2:0.1"}
    written, _, facts = objective_of({"name": name + knob, **settings}, data, nothing_beside)
    assert objective_from(facts) == written  # what a model is saved with makes the same objective
    spoken = {"objective": name + knob, **settings, "task": loss.task, "classes": classes}
    assert objective_from(spoken) == written
    assert dataclasses.is_dataclass(written)
    assert len(labels(example_loss(loss), np.random.default_rng(0), 6)) == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "logit"}, "must be logistic"),
        ({"name": "squared:2"}, "takes no number"),
        ({"name": "huber:x"}, "no number"),
        ({"name": "huber:0.5", "threshold": 1.0}, "set twice"),
        ({"name": "module"}, "must be logistic"),
        ({"name": "huber", "transform": 3}, "no setting 'transform'"),
        ({"name": "huber", "rows": "drop"}, "'clip' or 'normalize'"),
        ({"name": "huber", "regularizer": "l3:1"}, "l2:STRENGTH"),
        ({"name": "huber", "regularizer": 3}, "must be a text"),
        ({"name": "logistic", "intercept": 2}, "true or false"),
        ({"name": ["logistic"]}, "must be a text"),
        ({"name": "multinomial"}, "needs the public list of classes"),
    ],
)
def test_objectives_are_refused_in_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        objective_of(dict(settings), {"features": 2}, nothing_beside)
    assert "\n" not in str(caught.value)


def test_labels_of_another_kind_are_refused_by_both() -> None:
    for classes, words in ((3, "for binary labels"), (1, "two or more different labels")):
        with pytest.raises(ValueError, match=words):
            objective_of({"name": "logistic"}, {"features": 2, "classes": list(range(classes))}, nothing_beside)
    facts = {"objective": "hinge", "regularizer": None, "intercept": True, "row_bound": None, "rows": "refuse"}
    with pytest.raises(DataError, match="for binary labels"):
        objective_from({**facts, "task": "multiclass", "classes": 3})
