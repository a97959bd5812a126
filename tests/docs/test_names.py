"""Every name in backticks on the pages and in docstrings stands for something that exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tests.docs import names

ROOT = names.ROOT
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(names.SOURCE.rglob("*.py"))
_ROLE = re.compile(r":(?:py:)?(\w+):`~?([^`<>]+)`")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def in_backticks(text: str) -> Iterator[str]:
    """What stands between backticks, single or double, outside blocks; a role's target is not among them."""
    text = _ROLE.sub("", _FENCE.sub("", text))
    for double, single in re.findall(r"``((?:[^`]|`(?!`))+)``|(?<!`)`([^`]+)`(?!`)", text):
        yield double or single


def references(text: str) -> Iterator[str]:
    """The targets of roles such as :class:`quietgrad.Budget`."""
    for _, target in _ROLE.findall(_FENCE.sub("", text)):
        yield target.strip()


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of the docstrings of a module, those below attributes included, without their examples."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for text in names._docstrings(tree):
        prose = "\n".join(line for line in str(text.value).splitlines() if not re.match(r"\s*(>>>|\.\.\. )", line))
        yield f"{path.relative_to(ROOT)}:{text.lineno}", prose


def module_of(path: Path) -> str:
    dotted = ".".join(path.relative_to(names.SOURCE.parent).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


def stale(text: str, module: str = "") -> list[str]:
    """What a text names that does not exist."""
    found = [
        f"{wrong} in `{content}`" for content in in_backticks(text) for wrong in names.problems(content, module)
    ]
    return found + [target for target in references(text) if not names.is_target(target.lstrip("~."), module)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_what_exists(page: Path) -> None:
    assert stale(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(names.SOURCE)))
def test_docstrings_name_what_exists(path: Path) -> None:
    found = {where: wrong for where, text in docstrings(path) if (wrong := stale(text, module_of(path)))}
    assert found == {}


def changes() -> dict[str, list[str]]:
    """The items of the changelog's current section, by heading."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    current = re.split(r"\n## \d", text)[1]
    parts = re.split(r"\n### (\w+)\n", current)[1:]
    return {head: re.split(r"\n(?=- )", body.strip()) for head, body in zip(parts[::2], parts[1::2], strict=True)}


def test_the_changelog_promises_what_exists() -> None:
    """What was added exists; a guarantee names what is gone only where it says so; nothing is both."""
    found = changes()
    assert [wrong for item in found["Added"] for wrong in stale(item)] == []
    gone = re.compile(r"\b(gone|removed|no longer|was|were|had|before)\b", re.IGNORECASE)
    assert [wrong for item in found["Guarantees"] if not gone.search(item) for wrong in stale(item)] == []
    removed = {
        content
        for item in found["Removed"]
        for content in in_backticks(item.partition(":")[0])
        if names.problems(content)
    }
    kept = [item for head in ("Guarantees", "Added") for item in found[head]]
    assert {name for name in removed for item in kept if f"`{name}`" in item} == set()


def test_pages_list_all_names_of_their_registries() -> None:
    """Events, oracles, samplings, trust, columns and models, where a page lists them."""
    from quietgrad.cli.training import MODELS
    from quietgrad.core.accounting import events
    from quietgrad.core.sampling import SamplingName
    from quietgrad.data import schema
    from quietgrad.federation.plan import Trust
    from quietgrad.federation.secure.terms import Mode
    from quietgrad.methods.oracles.gradient_estimators import ORACLES

    def text(page: str) -> str:
        return (ROOT / "docs" / page).read_text(encoding="utf-8")

    listed = set(in_backticks(text("accounting.md")))
    kinds = {kind.__name__ for kind in vars(events).values() if isinstance(kind, type) and kind is not events.Event
             and issubclass(kind, events.Event)}  # fmt: skip
    assert kinds - listed == set(), "docs/accounting.md says what each event costs"
    assert all(oracle in text("second-order.md") for oracle in ORACLES)
    assert [name for name in get_args(SamplingName) if name not in text("choosing.md") + text("cli.md")] == []
    assert [name for name in get_args(Trust) if f'"{name}"' not in text("coming-from.md")] == []
    assert [name for name in get_args(Mode) if f"`{name}`" not in text("threat-model.md")] == []
    assert [name for name in schema._KINDS if name not in text("first-csv.md")] == []
    assert [name for name in MODELS if f"`{name}" not in text("first-csv.md")] == []


def test_the_table_of_algorithms_is_that_of_the_registry() -> None:
    """Every registered algorithm has its row, with a page of its own, what it returns and whether it is private."""
    from quietgrad.methods.registry import ALGORITHMS

    text = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    by_name = {name: row for row in rows[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert set(by_name) == {entry.kind.__name__ for entry in ALGORITHMS.values()}
    for entry in ALGORITHMS.values():
        kind, row = entry.kind, by_name[entry.kind.__name__]
        assert (row[4] != "**not private**") is kind.private, kind
        page = re.search(r"\]\(([\w-]+\.md)\)", row[0])
        assert page is None or (ROOT / "docs" / "methods" / page[1]).exists(), kind
        assert page is not None or not kind.private, kind
        options = get_args(get_type_hints(kind).get("returns"))
        if options:
            known = {"last", "average", "ema", "random", "certified"}
            assert set(re.findall(r"\w+", row[3])) & known == set(options), kind


def test_help_texts_list_the_registered_samplings() -> None:
    from quietgrad.cli.accounting import SAMPLED_HELP
    from quietgrad.cli.run_spec import RunSpec
    from quietgrad.core.accounting.accounting import SAMPLED_NAMES, sampled_gaussian
    from quietgrad.core.sampling import SamplingName

    words = RunSpec.__dataclass_fields__["sampling"].metadata["option"].help
    assert re.findall(r"[\w-]+(?=[,.])", words.partition(":")[2]) == list(get_args(SamplingName))
    assert set(SAMPLED_NAMES) <= set(get_args(SamplingName))
    assert all(name in SAMPLED_HELP for name in SAMPLED_NAMES)
    for name in SAMPLED_NAMES:
        given: dict[str, Any] = {} if name == "full" else {"n": 100, "batch_size": 10}
        assert sampled_gaussian(1.0, 10, sampling=name, **given)


PLANTED = [
    "`RunTerms`", "`PerParty`", "`oracle=svrg`", "`NAME.people`", '`grad_sample_mode="ghost_fsdp2"`',
    "`qg.stream`", "`qg.stream(X)`", "`simulate(match_people=True)`", "`scan(filesystem=…)`", "`--no-cache`",
    "`quietgrad train --wavelets scattering`", "`quietgrad deal x`", "`privacy/mechanisms.py`",
    "`privacy.noise.NoiseStream`", "`events.Slack`", "`DPSGD.gain`", "`plan.gone_away`", "`QUIETGRAD_CACHE`",
    "`phase-retrieval`", "`calibrate_batch_size`", ":class:`quietgrad.privacy.Gone`", ":meth:`gone_away`",
    ':func:`~quietgrad.federation.deal_out`', '`sampling="shuffled-turns"`', "`benchmarks/results/none.json`",
    "`algorithms.dp_sgd`", "`privacy.ledger`", "`curators.central`", "`objectives.tables.layout`",
    "`report.charts`", "`objectives.networks.taps`", "`test_that_was_never_written`",
    "`result.details[\"gone_rounds\"]`",
]  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_stale_name_is_found(planted: str) -> None:
    """On a page and in a docstring: classes, calls, keywords, options, commands, files, registered names, roles."""
    assert stale(f"A sentence about {planted}, in a page.")
    assert stale(
        f"A sentence about {planted.replace('`', '``') if planted[0] == '`' else planted}.",
        "quietgrad.core.session.kept",
    )
