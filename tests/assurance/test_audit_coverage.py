"""What is registered is attacked, and whatever can release anything is registered: read from the source itself."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import quietgrad
from quietgrad.assurance.audit.attacks import ATTACKS
from quietgrad.assurance.audit.noise_checks import MECHANISMS
from quietgrad.core.accounting.budget import Relation
from quietgrad.methods.oracles.gradient_estimators import ORACLES
from quietgrad.methods.registry import ALGORITHMS
from quietgrad.tables.losses import LOSSES
from quietgrad.tables.registry import NETWORKS
from tests.probes.records import SECOND_ORDER, probe_clips, probe_table_queries

ROOT = Path(quietgrad.__file__).parent


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
    return [(name, ast.parse(path.read_text())) for name, path in paths.items()]


def calls(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            found.add(called.id if isinstance(called, ast.Name) else getattr(called, "attr", ""))
    return found


def test_every_module_that_plans_a_release_is_attacked() -> None:
    known = {module for target in ATTACKS.values() for module in target.modules}
    known |= {
        "methods.oracles.gradient_estimators",
        "methods.oracles.spider",
        "methods.oracles.base",
    }  # DP-SRM's and DP-SPIDER's own, and what all oracles share
    planning = {
        name
        for name, tree in modules()
        if "Slot" in calls(tree) and not name.startswith(("assurance.audit.", "core.plans."))
    }
    assert not planning - known, f"these plan releases that nothing attacks: {sorted(planning - known)}"


def test_every_oracle_is_attacked() -> None:
    given = [example.settings.get("oracle") for entry in ALGORITHMS.values() for example in entry.attacks]
    assert {oracle["name"] for oracle in given if oracle is not None} == set(ORACLES)


def test_every_private_method_is_registered() -> None:
    """Whatever has a schedule and steps can be handed to minimize()."""
    homes = {f"methods.{entry.home.partition('.')[0]}" for entry in ALGORITHMS.values()}
    homes |= {module for target in ATTACKS.values() for module in target.modules}
    # The common loop, and one that runs a registered method for fewer steps.
    homes |= {"methods.base", "torch.loops.base"}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                if {"schedule", "step"} <= methods:
                    assert name in homes, f"{name}.{node.name} is a method that nothing attacks"


def test_every_mechanism_is_listened_to() -> None:
    existing = {
        node.name
        for _, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(b, ast.Name) and b.id in ("Mechanism", "CorrelatedNoise", "PartitionSelection")
            for b in node.bases
        )
        and any(keyword.arg == "kind" for keyword in node.keywords)
    }
    assert existing == {type(mechanism).__name__ for mechanism in MECHANISMS}


def test_every_loss_and_network_is_probed() -> None:
    findings = list(probe_clips())
    assert [f.what for f in findings if f.verdict != "pass"] == []
    probed = {finding.what.partition(",")[0] for finding in findings}
    assert probed >= {*LOSSES, *NETWORKS}


def test_every_query_of_tables_is_asked_of_hostile_neighbours() -> None:
    """Whatever sums or counts records in ``tables`` keeps its bound by brute force."""

    existing = {
        node.name
        for name, tree in modules()
        if name.startswith("tables.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if {"sum_into", "count"} & {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    }
    findings = list(probe_table_queries())
    assert [f.what for f in findings if f.verdict != "pass"] == []
    asked = " ".join(f.what for f in findings)
    elsewhere = {type(make(np.zeros(3), Relation.ADD_REMOVE)).__name__ for make in SECOND_ORDER.values()}
    # A query about no feature adds nothing (tests/tables/test_people_queries.py). A frame shows rows to another
    # query. The bound of a whole fit is a theorem with tests of its own, and what local steps give is asked of
    # parties, in tests/tables/test_local_update.py.
    others = {"BoxedQuery", "LocalFit", "LocalUpdateQuery", "NoFeatures"}
    assert not {name for name in existing if name not in asked} - elsewhere - others


def test_a_query_that_claims_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:

    from quietgrad.tables.range_queries import MagnitudeHistogram

    monkeypatch.setattr(MagnitudeHistogram, "bound", property(lambda query: 0.6))
    assert {f.what.partition(",")[0] for f in probe_table_queries() if f.verdict == "violation"} == {
        "MagnitudeHistogram"
    }


def test_what_is_no_algorithm_is_attacked_by_the_test_command() -> None:
    """Estimators, networks, federations, people: once and not twice. Algorithms are attacked in test_audit.py."""
    makefile = (ROOT.parents[1] / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^test: .*\battack\b", makefile, flags=re.M)
    assert re.search(r"^attack: .*\n.*quietgrad audit --quick \$\(ATTACKED\)$", makefile, flags=re.M)
    names = re.search(r"^ATTACKED := (.*)$", makefile, flags=re.M)
    assert names is not None
    assert set(names[1].split()) == set(ATTACKS) - set(ALGORITHMS)


# Where numbers that could be noise are drawn, and what they are there.
DRAWN = {
    "core.noise.grid": "noise",
    "core.noise.mechanisms": "noise",
    "core.noise.k_norm": "noise",
    "core.noise.device": "noise on an accelerator",
    "torch.networks.randomness": "a record's own dropout and augmentation",
    "tables.landscapes": "synthetic records",
    "features.scattering": "public pictures",
    "methods.stationarity": "a starting vector, the same for all data",
    "federation.planning": "made-up answers of a rehearsal",
    "methods.noise_intervals": "widths of intervals of what was released",
    "estimators.scoring": "error bars of what was released",
    "estimators.describing": "error bars of what was released",
}
LAWS = {
    "normal", "normal_pieces", "standard_normal", "exponential", "standard_exponential", "laplace", "gumbel",
    "gamma", "standard_gamma", "randn", "normal_", "exponential_", "multivariate_normal", "discrete_gaussian",
}  # fmt: skip


def test_only_mechanisms_draw_noise() -> None:
    """A second place that adds noise is a release outside the door: no charge, no cap, no ledger."""
    drawing = {
        name: calls(tree) & LAWS
        for name, tree in modules()
        if not name.startswith(("assurance.audit.", "federation.secure."))
    }
    assert {name for name, found in drawing.items() if found} <= set(DRAWN)


def test_streams_outside_the_mechanisms_have_no_noise() -> None:
    """By construction: others hold uniform words only, and ``core.noise.grid`` is imported by mechanisms."""
    from quietgrad.core.noise.grid import NoiseStream
    from quietgrad.core.noise.rng import SecureStream

    assert not LAWS & set(dir(SecureStream))
    assert {"normal", "exponential"} <= set(dir(NoiseStream))
    importing = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("quietgrad.core.noise.grid")
    }
    noisy = {"core.noise.mechanisms", "core.noise.correlated", "core.noise.k_norm"}
    assert importing <= {*noisy, "assurance.audit.noise_checks"}
