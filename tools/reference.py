# ruff: noqa: E501  (the texts of pages are as wide as other pages)
"""Write docs/api.md and docs/api/*.md: every public name, grouped, under the name by which users import it.

Pages about parties get their table of trust from here too.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from typer.main import get_command

from quietgrad.cli import COMMANDS, app_of
from quietgrad.core.accounting.events import kinds as event_kinds
from quietgrad.core.noise.mechanisms import kinds as mechanism_kinds
from quietgrad.core.sampling.schemes import KINDS as SAMPLINGS
from quietgrad.federation.plan import Trust
from quietgrad.federation.planning import ADVERSARIES
from quietgrad.federation.secure.terms import Mode, SecureSumConfig
from quietgrad.methods.oracles.gradient_estimators import ORACLES
from quietgrad.methods.registry import ALGORITHMS as METHODS
from quietgrad.tables.losses import LOSSES

DOCS = Path(__file__).resolve().parent.parent / "docs"


@dataclass(frozen=True)
class Group:
    """One page of the reference: a room, what it is for, and its names (all public ones if none are listed)."""

    page: str
    title: str
    room: str
    purpose: str
    example: str
    names: tuple[str, ...] = ()


ALGORITHMS = (
    "WhitenedGD", "DPSGD", "DPAdam", "DPGD", "DPSRM", "DPDiSK", "DPAGD", "StagewiseDPSGD", "OutputPerturbation",
    "RRPSGD", "BassilySGD", "PerturbedSGD", "ModelSelection", "WeightedAverage", "AdaptiveSpider", "STORM",
    "SGD", "GD",
)  # fmt: skip
GROUPS = (
    Group(
        "estimators", "Estimators for tables", "quietgrad.estimators",
        "Private models with scikit-learn's interface, private scores, and pipeline steps that do not leak.",
        "from quietgrad.estimators import PrivateLogisticRegression\n\n"
        "model = PrivateLogisticRegression(epsilon=1.0, delta=1e-5, classes=[0, 1]).fit(X, y)",
    ),
    Group(
        "torch", "PyTorch", "quietgrad.torch", "Private training of torch modules.",
        "import quietgrad.torch as qt\n\n"
        "result = qt.fit(model, loss_fn, train_set, qg.DPSGD(steps=10, batch_size=50), budget=budget)",
    ),
    Group(
        "federation", "Federated learning", "quietgrad.federation",
        "Training between parties, and secure sums on their own.",
        "from quietgrad.federation import secure_sum\n\n"
        'secure_sum([[1.0, 2.0], [3.0, 4.0]], clip=10.0, noise_multiplier=0.0, mode="masks", seed=0)',
    ),
    Group(
        "training", "Budgets, plans, runs", "quietgrad",
        "Plan a run, run it, resume it, account for it.",
        "import quietgrad as qg\n\n"
        "plan = qg.plan(qg.DPGD(steps=10), n=1000, budget=qg.Budget(epsilon=1.0, delta=1e-5))\n"
        "print(plan.explain())",
    ),
    Group(
        "algorithms", "Algorithms", "quietgrad",
        "The settings of every algorithm. What each does and when to use it is on [its own page](../methods/index.md).",
        "import quietgrad as qg\n\n"
        "result = qg.minimize(objective, (X, y), qg.DPSGD(steps=10, batch_size=50), budget=budget)",
        ALGORITHMS,
    ),
    Group(
        "objectives", "Objectives", "quietgrad.objectives", "Losses of linear models, regularisers and test landscapes.",
        "import quietgrad as qg\n\n"
        "objective = qg.objectives.Logistic(regularizer=qg.objectives.L2(0.01))",
    ),
    Group(
        "data", "Data", "quietgrad.data", "Reading files, schemas, scans, registered data sets, splits for experiments.",
        "import quietgrad.data as qd\n\nparts = qd.split_even(100, 4)",
    ),
    Group(
        "audit", "Audits", "quietgrad.assurance.audit", "Attacks that test a claimed ε.",
        "import quietgrad as qg\n\n"
        "report = qg.audit.run(qg.DPGD(steps=10), budget=qg.Budget(6.0, 1e-5), n=50, runs=400)",
    ),
    Group(
        "certificates", "Certificates", "quietgrad.assurance.certificates", "Claims as files that others can check.",
        "from quietgrad.assurance.certificates import new_key\n\nnew_key(\"signer.key\")",
    ),
)  # fmt: skip
ROOMS = {group.room: group.title for group in GROUPS}


def public(room: str) -> list[str]:
    """The names that a room offers and that are not rooms themselves."""
    module = import_module(room)
    return [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]


def names(group: Group) -> list[str]:
    """The names of a page."""
    taken = {name for other in GROUPS if other is not group and other.room == group.room for name in other.names}
    return list(group.names) or [name for name in public(group.room) if name not in taken]


def entry(room: str, name: str) -> str:
    """How Sphinx is asked for one name."""
    value = getattr(import_module(room), name)
    if inspect.isclass(value):
        # What scikit-learn adds to every estimator is described there, with labels of its own pages.
        added = ", ".join(each for each in dir(value) if each.startswith("set_") and each.endswith("_request"))
        without = f"   :exclude-members: {added}\n" if added else ""
        return f".. autoclass:: {room}.{name}\n   :members:\n{without}   :show-inheritance:\n"
    if callable(value):
        return f".. autofunction:: {room}.{name}\n"
    return f".. py:data:: {room}.{name}\n\n   {_words(room, name)}\n"


def _words(room: str, name: str) -> str:
    known = {"__version__": "The version, as text.", "REGISTRY": "Registered data sets by name."}
    return known.get(name, f"{name} of {room}.")


def _elsewhere(group: Group, name: str) -> bool:
    """Whether the package itself offers the same object, and describes it."""
    root = import_module("quietgrad")
    return group.room != "quietgrad" and getattr(root, name, None) is getattr(import_module(group.room), name)


def text(group: Group) -> str:
    """The page of a group."""
    again = [name for name in names(group) if _elsewhere(group, name)]
    entries = "\n".join(entry(group.room, name) for name in names(group) if name not in again)
    also = (
        f"\nAlso here, described under [budgets, plans, runs](training.md): {', '.join(f'`{n}`' for n in again)}.\n"
    )
    events = (
        "\n\n## Events\n\n`from quietgrad import events` · what accountants price.\n\n```{eval-rst}\n"
        ".. automodule:: quietgrad.core.accounting.events\n   :members:\n```"
    )
    beside = _TRAINER if group.page == "torch" else events if group.page == "training" else ""
    return (
        f"# {group.title}\n\n{group.purpose} `import {group.room}`\n\n```python\n{group.example}\n```\n\n"
        f"```{{eval-rst}}\n{entries}```{beside}\n{also if again else ''}"
    )


# It needs packages that quietgrad.torch does not, so it is no name of that room.
_TRAINER = (
    "\n\n## Hugging Face\n\n`from quietgrad.torch.hugging_face import DPTrainer` · needs `pip install 'quietgrad[hf]'`.\n\n"
    "```{eval-rst}\n.. autoclass:: quietgrad.torch.hugging_face.DPTrainer\n   :members: train, epsilon, create_model_card\n"
    "   :show-inheritance:\n```"
)


def _first_line(value: object) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    words = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")
    return words.replace("``", "`")


_SECURE = "no member alone sees a party's sum: the noise is added inside a secure sum (`masks`, `servers` or `mpc`)"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _own(kinds: Mapping[str, type]) -> dict[str, str]:
    """The kinds that the core itself registers; audits and tests register more."""
    core = {name: kind for name, kind in sorted(kinds.items()) if kind.__module__.startswith("quietgrad.core.")}
    return {name: _first_line(kind) for name, kind in core.items()}


def _table(title: str, rows: Mapping[str, str]) -> str:
    cells = "\n".join(f"| `{name}` | {words} |" for name, words in rows.items())
    return f"## {title}\n\n| name | what it is |\n|---|---|\n{cells}\n"


def _options() -> str:
    """Every command with its options, as the command line itself knows them."""
    parts = []
    for name, words in COMMANDS.items():
        waiting: list[tuple[str, Any]] = [(name, get_command(app_of(name)))]
        options: dict[str, list[str]] = {}
        while waiting:
            path, command = waiting.pop(0)
            waiting += [(f"{path} {sub}", inner) for sub, inner in getattr(command, "commands", {}).items()]
            named = [max(p.opts, key=len) for p in command.params if p.param_type_name == "option"]
            options[path] = sorted({option for option in named if option != "--help"})
        parts.append(f"### {name}\n\n{words[0].upper()}{words[1:]}.\n")
        parts += [
            f"`{path}`: {' '.join(f'`{option}`' for option in listed) or 'no options.'}\n"
            for path, listed in options.items()
            if listed or len(options) == 1
        ]
    return "\n".join(parts)


def registered() -> str:
    """docs/api/registered.md: the names that settings, plan files and commands take, from the registries."""
    tables = [
        _table("Algorithms", {name: _first_line(spec.kind) for name, spec in sorted(METHODS.items())}),
        _table("Oracles", {name: _first_line(kind) for name, kind in sorted(ORACLES.items())}),
        _table("Losses of tables", {name: _first_line(kind) for name, kind in sorted(LOSSES.items())}),
        _table("Samplings", _own(SAMPLINGS)),
        _table("Mechanisms", _own(mechanism_kinds())),
        _table("Events", _own(event_kinds())),
        _table(
            "Trust between parties",
            {trust: _sentence(ADVERSARIES.get(trust, _SECURE)) for trust in get_args(Trust)},
        ),
    ]
    return (
        "# Registered names\n\nThe names that settings, plan files, certificates and the command line take. This page is written from the\n"
        "registries themselves.\n\n```python\nimport quietgrad as qg\n\n"
        'qg.DPSGD(steps=100, batch_size=50, sampling="poisson")      # a name of the table below\n```\n\n'
        + "\n".join(tables)
        + "\n## Commands and options\n\n"
        + _options()
    )


def index() -> str:
    """docs/api.md: the groups and their names."""
    parts = [
        "# Python API",
        "Every public name, where users import it from, grouped by task. Each class shows its parameters and an example.",
        "```python\nimport quietgrad as qg                                        # budgets, plans, runs, algorithms\n"
        "from quietgrad.estimators import PrivateLogisticRegression    # tables\n```",
    ]
    for group in GROUPS:
        listed = " · ".join(f"`{name}`" for name in names(group))
        listed += " · `hugging_face.DPTrainer`" if group.page == "torch" else ""
        parts.append(f"## [{group.title}](api/{group.page}.md)\n\n{group.purpose}\n\n{listed}".replace("../", ""))
    parts.append(
        "## [Registered names](api/registered.md)\n\nAlgorithms, losses, samplings, mechanisms, events, trust, commands and options."
    )
    pages = "\n".join([*(f"api/{group.page}" for group in GROUPS), "api/registered"])
    parts.append(f"```{{toctree}}\n:maxdepth: 1\n:hidden:\n\n{pages}\nglossary\n```")
    parts.append(
        "`tools/reference.py` writes these pages; a test fails if a name is missing, untyped or undocumented."
    )
    return "\n\n".join(parts) + "\n"


TRUST_SEES = {
    "curator": "the coordinator sees each party's exact sums",
    "secure": "no role sees a sum without noise",
    "local": "the coordinator sees each party's noisy sums, and no role an exact sum",
}
TRUST_HOLDS = {
    "curator": "all but the coordinator",
    "secure": "all, up to the stated collusion",
    "local": "all but the party itself (ICRL-DP)",
}
TRUST_BEGIN, TRUST_END = "<!-- trust: python tools/reference.py -->\n", "<!-- end of trust -->\n"
TRUST_PAGES = ("choosing", "federation", "coming-from", "security-office")


def _noise_of(trust: str) -> str:
    """The variance of the noise in a sum of five parties, over a trusted curator's, from the configurations themselves."""
    if trust != "secure":
        return "that of one table" if trust == "curator" else "× m, the number of parties (of equal size)"

    def factor(mode: Mode, honest: int | None = None) -> str:
        terms = SecureSumConfig(mode, parties=5, dimension=100, bound=1.0, sigma=1.0, honest=honest)
        return f"{terms.variance_factor:.4g}"

    return (
        f"× m/h (`masks`; h honest parties remain in any sum, m − 1 unless given: {factor('masks')} of five parties, "
        f"{float(factor('masks', 3)):.3g} with h = 3), {factor('servers')} (two `servers`), {factor('mpc')} (`mpc`)"
    )


def trust_table() -> str:
    """Who sees what, and what it costs, for every trust between parties."""
    rows = [f'| `"{t}"` | {TRUST_SEES[t]} | {_noise_of(t)} | {TRUST_HOLDS[t]} |' for t in get_args(Trust)]
    head = "| `trust` | who sees what | variance of the noise in a sum | ε holds against |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def with_trust_table(page: str) -> str:
    """A page with its table of trust made anew."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    before, begin, rest = text.partition(TRUST_BEGIN)
    _, end, after = rest.partition(TRUST_END)
    assert end, f"docs/{page}.md: has no place for the table of trust"
    return before + begin + trust_table() + end + after


def pages() -> dict[Path, str]:
    """Every page of the reference and its text."""
    groups = {DOCS / "api" / f"{group.page}.md": text(group) for group in GROUPS}
    return {DOCS / "api.md": index(), **groups, DOCS / "api" / "registered.md": registered()}


if __name__ == "__main__":
    (DOCS / "api").mkdir(exist_ok=True)
    for path, content in {
        **pages(),
        **{DOCS / f"{page}.md": with_trust_table(page) for page in TRUST_PAGES},
    }.items():
        path.write_text(content, encoding="utf-8")
