"""The documentation is true: every block of Python runs, every tutorial too, every public name is there, typed."""

from __future__ import annotations

import enum
import inspect
import json
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy

from quietgrad.data.schema import read_schema
from quietgrad.federation import plan_file
from quietgrad.federation.plan import Trust

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

reference: Any = import_module("reference")
tutorials: Any = import_module("tutorials")

TABLE = """
import numpy as np
import quietgrad as qg
rng = np.random.default_rng(0)
X = rng.normal(size=(3000, 4)); X /= np.maximum(1.0, np.linalg.norm(X, axis=1))[:, None]; y = (X[:, 0] > 0) * 1
objective = qg.objectives.Logistic(); data = (X, y); budget = qg.Budget(1.0, 1e-5)
"""
PARTIES = """
from quietgrad.federation import Party, simulate
X1, y1, X2, y2, X3, y3 = X[:1000], y[:1000], X[1000:2000], y[1000:2000], X[2000:], y[2000:]
size = 3
parties = [Party(X[k::size], y[k::size]) for k in range(size)]
days = [(X[:200], y[:200])] * 36
"""
PEOPLE = """
import pandas as pd
from quietgrad.estimators import PrivateAdditiveClassifier, PrivateLogisticRegression
n, JOBS = 20_000, ["nurse", "cook"]
X = pd.DataFrame({"age": rng.uniform(17, 90, n), "income": rng.uniform(0, 1e6, n)})
y = (rng.random(n) < 1 / (1 + np.exp((50 - X["age"]) / 15))).to_numpy() * 1
y = np.where(y == 1, "yes", "no") if '"yes"' in BLOCK else y
frame = pd.DataFrame({"age": X["age"], "job": rng.choice(JOBS, n)})
BOUNDS = {"age": (0, 120), "income": (0, 1e6)}
X_held_out, y_held_out, X_new = X[:5000], y[:5000], X[:5]
"""
MODULES = """
import torch
from torch import nn
import quietgrad.torch as qt
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))
previous_params = {name: value.detach() + 0.01 for name, value in model.named_parameters()}
x = torch.randn(1000, 20); y = (x[:, 0] > 0).long()
train_set = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(train_set, batch_size=50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn, criterion = nn.CrossEntropyLoss(reduction="none"), nn.CrossEntropyLoss()
algorithm, score = qg.DPSGD(steps=10, batch_size=50), lambda model: 0.5
"""
CSV = """
import pandas
from sklearn.pipeline import make_pipeline
from quietgrad.estimators import PublicOneHot
if "read_csv" in BLOCK and "bmi" in BLOCK:
    pandas.DataFrame({
        "age": rng.uniform(18, 100, 3000), "bmi": rng.uniform(15, 45, 3000), "smoker": rng.integers(0, 2, 3000),
        "diabetes": rng.choice(["no", "yes"], 3000),
    }).to_csv("patients.csv", index=False)
elif "patients.csv" in BLOCK:
    pandas.DataFrame({
        "age": rng.uniform(18, 100, 3000), "income": np.where(rng.random(3000) < 0.1, np.nan, 5e4),
        "year": rng.integers(1980, 2025, 3000), "smoker": rng.choice(["yes", "no"], 3000),
        "city": rng.choice(["Berlin", "Hamburg", "Bremen"], 3000), "sick": rng.choice(["yes", "no"], 3000),
    }).to_csv("patients.csv", index=False)
"""
VISITS = """
from quietgrad.estimators import PrivateLogisticRegression, PrivateScaler, PublicOneHot, private_score
from quietgrad.federation import Party, simulate
import pandas, sklearn
from sklearn.pipeline import make_pipeline
ids = patient_ids = np.arange(3000) // 5
frame = pandas.DataFrame(X, columns=list("abcd")).assign(patient_id=ids)
frame = frame.assign(ward="icu") if "PublicOneHot" in BLOCK else frame
X_test, y_test, test_ids = X[:500], y[:500], ids[:500]
clf = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1])
model = PrivateLogisticRegression(epsilon=1.0, classes=[0, 1]).fit(X, y)
loss, method = objective, qg.DPSGD(steps=3, batch_size=20, sampling="single-pass")
X1, y1, ids1, X2, y2, ids2 = X[:1500], y[:1500], ids[:1500], X[1500:], y[1500:], ids[1500:]
"""
PIXELS = """
import torch
pictures, X, C = torch.rand(2, 28, 28), rng.random((3, 784)), rng.random((3, 3072))
"""
FILES = """
import os
import pyarrow, pyarrow.parquet
for name in ("people", "new", "held-out"):
    os.makedirs(name, exist_ok=True)
    pyarrow.parquet.write_table(
        pyarrow.table({**{f"x{j}": X[:, j] for j in range(4)}, "income": y}), f"{name}/a.parquet")
os.makedirs("visits", exist_ok=True)
pyarrow.parquet.write_table(
    pyarrow.table({"patient_id": [k // 2 for k in range(len(y))], "x": X[:, 0], "readmitted": y}),
    "visits/a.parquet")
"""
PERIODS = """
import pandas
from quietgrad.estimators import PrivateLogisticRegression
cost = X[:, 0]
rows = pandas.DataFrame({"patient": np.arange(3000) // 3, "age": X[:, 0], "period": np.arange(3000) % 3})
event, future_rows = y, rows[:3].drop(columns="patient")
"""
PATIENTS = """
stays, ids = train_set, [k // 2 for k in range(1000)]
patient_ids = ids
"""
PAGES = {
    "README.md": TABLE + CSV + MODULES.replace("y = (x", "labels = (x").replace("(x, y)", "(x, labels)") + PARTIES,
    "api/estimators.md": TABLE,
    "api/torch.md": TABLE + MODULES,
    "benchmarks-tables.md": TABLE,
    "certificates.md": "",
    "correlated.md": TABLE + PARTIES,
    "estimators-results.md": TABLE + PEOPLE,
    "estimators-models.md": TABLE + PERIODS + PEOPLE + CSV,
    "estimators-releases.md": TABLE + VISITS,
    "estimators.md": TABLE + PERIODS + PEOPLE + CSV,
    "federation.md": TABLE + PARTIES,
    "people-parties.md": TABLE + VISITS,
    "people-proof.md": TABLE + VISITS,
    "people.md": TABLE + VISITS,
    "features.md": "import numpy as np\nimport torch\nX = np.random.default_rng(0).random((300, 64))\n"
    "y, X_new, X_public, module = np.arange(300) % 3, X[:3], X[:99], torch.nn.Flatten()\n",
    "pictures.md": TABLE + PIXELS,
    "scan.md": TABLE + FILES,
    "start.md": "import numpy as np\nrng = np.random.default_rng(0)\n" + CSV,
    "opacus-arguments.md": TABLE
    + MODULES
    + "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    "model, loader = nn.Linear(2, 2), DataLoader(TensorDataset(torch.randn(90, 2), torch.arange(90) % 2), "
    "batch_size=30)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    "torch-more.md": TABLE + MODULES,
    "torch-proof.md": TABLE + MODULES,
    "torch.md": TABLE + MODULES + PATIENTS,
}
"""What the blocks of a page take as given (``BLOCK`` is the text of the one that runs next); else ``TABLE``."""

SKETCHES = (
    "class Transport(Protocol):",  # what a transport must have; tests/test_federation_processes.py has two
    "FederatedCurator(objective, transport",  # needs a network; tests/federation/test_network.py has one
    'qd.load("people.csv"',  # a file of the reader's; tests/data/test_readers.py reads such files
    "for mechanism in MECHANISMS:",  # exact probes of every mechanism; tests/assurance/test_audit.py makes them
    "DPTrainer(",  # needs transformers; tests/torch/test_hugging_face.py trains with it
    "fully_shard(model)",  # needs processes; tests/torch/test_two_processes.py makes two
    "qg.audit.one_run(",  # ten thousand canaries take minutes; tests/assurance/test_audit.py plants fewer
)
"""Blocks that cannot be run as they stand, and where what they show is run: they must at least be Python."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


DOCS = ROOT / "docs"
SOURCES = [page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts]
PYTHON = {
    str(page.relative_to(DOCS) if DOCS in page.parents else page.name): page
    for page in [ROOT / "README.md", *SOURCES]
    if blocks(page)
}


def _shorter(block: str) -> str:
    """The block with a tenth of its steps: the same calls, in a tenth of the time."""
    return re.sub(r"\bsteps=(\d+)0\b|\bsteps=(256|365)\b", _fewer, block)


def _fewer(found: re.Match[str]) -> str:
    return f"steps={found[1]}" if found[1] else {"256": "steps=64", "365": "steps=36"}[found[2]]


@pytest.mark.parametrize("name", PYTHON)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    given = compile(PAGES.get(name, TABLE), f"what {name} takes as given", "exec")
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for k, block in enumerate(blocks(PYTHON[name])):
        code = compile(_shorter(block), f"{name}, block {k + 1}", "exec")
        if any(sketch in block for sketch in SKETCHES):
            continue
        fresh: dict[str, Any] = {"BLOCK": block}
        exec(given, fresh)
        kept = {"model": namespace["model"]} if "private_score" in block and "model" in namespace else {}
        namespace = {**namespace, **fresh, **kept}
        exec(code, namespace)


def test_every_sketch_is_on_a_page_and_python_says_so() -> None:
    """A sketch that no block has is stale; a block of Python without its language would be run by nobody."""
    text = "\n".join(block for page in PYTHON.values() for block in blocks(page))
    assert [sketch for sketch in SKETCHES if sketch not in text] == []
    looks = re.compile(r"^(?:from [\w.]+ import |import \w|for .+:$|def \w+\(|with .+:$|class \w+|\w+ = \w+[.(])")
    unmarked = [
        f"{page.name}: {block.splitlines()[0]}"
        for page in [*PLAIN_PAGES, *SOURCES]
        for language, block in fenced(page)
        if language == "" and block.strip() and looks.match(block.strip())
    ]
    assert unmarked == []


PLAIN_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
LANGUAGES = {"", "python", "toml", "json", "console", "diff", "text"}
"""What blocks may be: Python runs, TOML and JSON are read below, the diffs of CONTRIBUTING.md are applied by
``test_adding.py``, and the lines of consoles are checked by ``test_commands.py``."""


def fenced(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every block of a page; Sphinx's own directives apart."""
    found = re.findall(
        r"^( *)```([^\n`]*)\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [(language.strip(), text) for _, language, text in found if not language.startswith("{")]


def test_every_block_has_a_language_that_something_reads() -> None:
    found = {(language, page.name) for page in [*PLAIN_PAGES, *SOURCES] for language, _ in fenced(page)}
    assert {language for language, _ in found} <= LANGUAGES
    assert {page for language, page in found if language == "diff"} <= {"CONTRIBUTING.md"}


SETTINGS = [
    pytest.param(language, text, id=f"{page.name}: {text.split()[0]} {k}")
    for page in [*PLAIN_PAGES, *SOURCES]
    for k, (language, text) in enumerate(fenced(page))
    if language in ("toml", "json")
]
_PLAN = next(block.values[1] for block in SETTINGS if "[coordinator]" in str(block.values[1]))


@pytest.mark.parametrize(("language", "text"), SETTINGS)
def test_a_block_of_settings_is_read(language: str, text: str, tmp_path: Path) -> None:
    """A schema by the reader of schemas; a plan, or a part of one set into the whole one, by that of plans."""
    content = tomllib.loads(text) if language == "toml" else json.loads(text)
    if "columns" in content:
        file = tmp_path / f"schema.{language}"
        file.write_text(text, encoding="utf-8")
        assert set(read_schema(file).columns) == set(content["columns"])
        return
    plan = {**tomllib.loads(str(_PLAN)), **content}
    plan["party"] = [{"name": f"hospital-{k}", "records": 12000} for k in range(1, 6)]
    if plan["algorithm"]["name"] == "fedavg":
        plan["federation"] = {"name": "five-hospitals", "trust": "curator"}
    files = {
        "network.py": b"import torch\n\n\ndef make(classes):\n    return torch.nn.Linear(784, classes)\n",
        "start.safetensors": safetensors.numpy.save({"weight": np.zeros((10, 784), np.float32)}),
    }
    read = plan_file._plan(plan, lambda name, most: files[name])
    assert read.parties == tuple(entry["name"] for entry in plan["party"])
    assert read.plan.names == read.parties


@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "tutorials").glob("*.py")), ids=lambda path: path.stem)
def test_a_tutorial_runs_and_becomes_a_notebook(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    if script.stem == "torch_from_opacus":
        pytest.importorskip("torch")
    if script.stem == "causal_lm":
        pytest.importorskip("peft", reason="needs quietgrad[hf]")
    ran = tutorials.run(script)
    shown = [cell for cell in ran if cell.printed or cell.html]
    assert shown, "a tutorial that shows nothing teaches nothing"
    notebook = json.loads(tutorials.notebook(ran))
    assert [cell["source"] for cell in notebook["cells"]] == [cell.source for cell in ran]
    page = tutorials.page(ran, "n.ipynb")
    assert page.startswith("# ")
    assert page.count("```python") == sum(cell.kind == "code" for cell in ran)


def test_the_reference_has_every_public_name() -> None:
    pages = reference.pages()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run tools/reference.py"
    whole = "\n".join(pages.values())
    for room in reference.ROOMS:
        for name in reference.public(room):
            assert f":: {room}.{name}\n" in whole or f"`{name}`" in pages[DOCS / "api" / "torch.md"], (
                f"{room}.{name}"
            )
    assert list(pages)[1].name == "estimators.md", "estimators come first"


def test_pages_about_parties_have_one_table_of_trust() -> None:
    """Written from the configurations: no page has a table of trust of its own, and each kind of trust is in it."""
    for page in reference.TRUST_PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert text == reference.with_trust_table(page), "run tools/reference.py"
    for page in SOURCES:
        text = page.read_text(encoding="utf-8")
        by_hand = text.replace(reference.trust_table(), "")
        assert "| `trust` |" not in by_hand, page.name
    assert set(reference.TRUST_SEES) == set(reference.TRUST_HOLDS) == set(get_args(Trust))
    hostile = (DOCS / "security-office.md").read_text(encoding="utf-8")
    assert [trust for trust in get_args(Trust) if f"| coordinator, `{trust}` |" not in hostile] == []


@pytest.mark.parametrize("room", reference.ROOMS)
def test_every_public_name_is_documented_and_typed(room: str) -> None:
    module = import_module(room)
    for name in reference.public(room):
        value = getattr(module, name)
        if not callable(value) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
            continue
        assert (inspect.getdoc(value) or "").strip(), f"{room}.{name} has no docstring"
        target = value.__init__ if inspect.isclass(value) else value
        if not inspect.isfunction(target) or not str(target.__module__).startswith("quietgrad"):
            continue  # somebody else's: made by a decorator, or torch's own layer under Opacus's name
        parameters = list(inspect.signature(target).parameters.values())
        hints = target.__annotations__
        untyped = [p.name for p in parameters if p.name not in ("self", "cls") and p.name not in hints]
        assert not untyped, f"{room}.{name}: {untyped} have no types"


def test_every_algorithm_has_its_page() -> None:
    from quietgrad.methods.registry import ALGORITHMS

    private = {name for name, entry in ALGORITHMS.items() if entry.kind.private}
    pages = {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")} - {"index", "papers"}
    assert pages == private
    listed = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8").splitlines()
    assert not private - set(listed), "not in the list of docs/methods/index.md"
    for name in private:
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
        assert "## The step" in text


def trees(page: Path) -> list[str]:
    """What the table of contents of a page lists."""
    found = re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in found for line in block.splitlines() if line and not line.startswith(":")]
    return [str((page.parent / line).resolve().relative_to(DOCS)) for line in lines]


def test_every_page_is_found_from_a_short_sidebar() -> None:
    listed = trees(DOCS / "index.md")
    assert len(set(listed)) <= 15
    reached = list(listed)
    for name in reached:
        if (DOCS / f"{name}.md").exists():
            reached += trees(DOCS / f"{name}.md")
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in SOURCES}
    pages |= {f"tutorials/{script.stem}" for script in (DOCS / "tutorials").glob("*.py")}
    assert sorted(reached) == sorted(pages - {"index"}), "each page stands in the contents once"


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *SOURCES]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)", text):
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                broken.append(f"{page.name}: {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert not broken


def anchors(page: Path) -> set[str]:
    """The headings of a page as addresses, and the terms of the glossary."""
    text = page.read_text(encoding="utf-8")
    found = {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    }
    if page.name == "glossary.md":
        found |= {
            "term-" + re.sub(r"[^a-zA-Z]+", "-", term).strip("-")
            for term in re.findall(r"^(\S.*)\n  \S", text, re.MULTILINE)
        }
    return found


def test_modules_that_are_named_exist() -> None:
    """A path with a slash that ends in .py is one of the repository, or of the package."""
    homes = (ROOT, ROOT / "src" / "quietgrad", ROOT / "src")
    named = {
        (page.name, path)
        for page in [*SOURCES, ROOT / "README.md"]
        for path in re.findall(r"`((?:[\w-]+/)+\w+\.py)\b", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 40
    assert not {(page, path) for page, path in named if not any((home / path).exists() for home in homes)}


def test_results_that_are_cited_exist() -> None:
    cited = set()
    for page in [*SOURCES, ROOT / "README.md"]:
        cited |= set(re.findall(r"(?:benchmarks|reproduce)/results/\w+\.json", page.read_text(encoding="utf-8")))
    assert len(cited) > 15
    assert not [file for file in cited if not (ROOT / file).exists()]
