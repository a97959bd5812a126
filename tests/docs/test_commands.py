"""The commands on the pages are those of the command line: all are parsed by it, and those that can be are run.

A run command's output is held against what the page shows below it, number by number replaced by a mark: noise and
clocks differ, words must not.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quietgrad.cli import COMMANDS, app_of, main

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA = ROOT.parent / "shared" / "data"


@dataclass(frozen=True)
class Shown:
    """A command of a page, and the lines the page shows below it."""

    page: str
    line: str
    output: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """What the shell hands over, without the comment."""
        return shlex.split(self.line, comments=True)[1:]


def in_blocks(page: Path) -> Iterator[Shown]:
    """The commands of blocks that are no Python."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        if kind in ("python", "toml", "json"):
            continue
        shown: list[str] | None = None
        command = ""
        for line in [*block.splitlines(), "$ "]:
            prompt = re.match(r"(?:[\w-]*\$ +|)(?=quietgrad )|[\w-]*\$ ", line)
            if prompt:
                if shown is not None:
                    yield Shown(page.name, command, tuple(shown))
                command = line[prompt.end() :]
                shown = [] if command.startswith("quietgrad ") else None
            elif shown is not None and line.strip():
                shown.append(line)


def in_sentences(page: Path) -> Iterator[Shown]:
    for command in re.findall(r"(?<!`)`(quietgrad [^`]+)`(?!`)", page.read_text(encoding="utf-8")):
        yield Shown(page.name, command.replace("\\|", "|"))


def examples() -> Iterator[Shown]:
    """The example that each command's --help ends with."""
    from typer.main import get_command

    for name in COMMANDS:
        waiting = [get_command(app_of(name))]
        for command in waiting:
            waiting += list(getattr(command, "commands", {}).values())
            for line in re.findall(r"quietgrad [^·)>\n]+", " ".join((command.epilog or "").split())):
                yield Shown(f"quietgrad {name} --help", line)


def refusal(words: list[str]) -> str | None:
    """What the real parser says against a command, without running it; a missing argument is no mistake."""
    from typer.main import get_command

    if words and words[0] in ("--version", "--help"):
        return None
    if not words or words[0] not in COMMANDS:
        return f"{words[:1]} is no command"
    command: Any = get_command(app_of(words[0]))
    rest = words[1:]
    try:
        while hasattr(command, "commands"):
            context = command.make_context("quietgrad", rest or ["--help"], resilient_parsing=not rest)
            if not rest:
                return None
            _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context("quietgrad", rest)
    except Exception as error:
        said = str(error.format_message() if hasattr(error, "format_message") else error)
        return None if "Missing" in said else f"{type(error).__name__}: {said}"
    return None


ALL = [*(shown for page in FILES for shown in in_blocks(page)), *examples()]
MENTIONED = [shown for page in FILES for shown in in_sentences(page)]


def test_there_are_commands_to_check() -> None:
    assert len(ALL) > 40
    assert len(MENTIONED) > 40
    assert refusal(["train", "a9a", "--epsilo", "1"])
    assert refusal(["ledger", "verfy", "x"])
    assert refusal(["trian"])
    assert refusal(["train", "a9a", "--epsilon", "1"]) is None


@pytest.mark.parametrize("shown", ALL, ids=lambda s: f"{s.page}: {s.line[:60]}")
def test_a_command_of_a_block_is_one(shown: Shown) -> None:
    assert refusal([word for word in shown.words if word != "…"]) is None


@pytest.mark.parametrize("shown", MENTIONED, ids=lambda s: f"{s.page}: {s.line[:60]}")
def test_a_command_in_a_sentence_is_one(shown: Shown) -> None:
    """Choices (a|b) are tried one by one; brackets mark what may be left out, and are taken off."""
    plain = re.sub(r"[\[\]]", "", shown.line)
    if alternatives := re.search(r"\S+\|\S+", plain):
        lines = [plain.replace(alternatives[0], word) for word in alternatives[0].split("|")]
    else:
        lines = [plain]
    for line in lines:
        words = [word for word in shlex.split(line, comments=True)[1:] if word != "…"]
        assert refusal(words) is None


# ---- run -----------------------------------------------------------------------------------------------------


def people(folder: Path) -> None:
    """Rows of x0 … x3 and a label, as the folders of Parquet that docs/scan.md names."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    for name in ("people", "new", "held-out"):
        X = rng.normal(size=(2000, 4))
        columns = {f"x{j}": X[:, j] for j in range(4)} | {"income": (X[:, 0] > 0) * 1}
        (folder / name).mkdir()
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / name / "a.parquet")


def patients(folder: Path) -> None:
    """A ledger in which one run on patients was paid for."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    np.savez(folder / "rows.npz", X=X, y=(X[:, 0] > 0) * 1)
    run = ["train", "rows.npz", "--algorithm", "dp-gd", "--steps", "4", "--epsilon", "1", "--delta", "1e-6"]
    assert main([*run, "--ledger", "ledger.jsonl", "--account", "patients", "--out", "r", "--quiet"]) == 0


def two_runs(folder: Path) -> None:
    """Two runs of an account, the first with the paper's method in runs/a9a."""
    shared = ["--epsilon", "1", "--ledger", "ledger.jsonl", "--account", "people", "--quiet"]
    assert main(["train", "a9a", *shared, "--algorithm", "dp-srm", "--steps", "60", "--out", "runs/a9a"]) == 0
    assert main(["train", "a9a", *shared, "--out", "runs/b"]) == 0


def own_csv(folder: Path) -> None:
    """A table of the reader's own, and new rows like it."""
    rng = np.random.default_rng(0)
    for name in ("people.csv", "new.csv"):
        ages = rng.integers(20, 90, 2000)
        lines = (f"p{k},{age},{'yes' if age + rng.normal(0, 9) > 55 else 'no'}" for k, age in enumerate(ages))
        (folder / name).write_text("\n".join(["patient_id,age,ill", *lines]))


def with_schema(folder: Path) -> None:
    own_csv(folder)
    columns = '[columns]\nage = {kind = "whole number", bounds = [0, 110]}\n'
    (folder / "schema.toml").write_text(f'[label]\ncolumn = "ill"\nkind = "yes/no"\n{columns}')


def first_run(folder: Path) -> None:
    """The run of first-csv.md, its claim, and an account for it."""
    with_schema(folder)
    train = ["train", "people.csv", "--schema", "schema.toml", "--epsilon", "1", "--algorithm", "dp-gd"]
    assert main([*train, "--steps", "4", "--out", "runs/first", "--quiet"]) == 0
    assert main(["certificate", "runs/first", "-o", "claim.json"]) == 0


PAGES = {
    "README.md": None,
    "first-csv.md": own_csv,
    "epsilon.md": with_schema,
    "check-claim.md": first_run,
    "cli.md": None,
    "certificates.md": two_runs,
    "ledger.md": patients,
    "ledger-file.md": patients,
    "scan.md": people,
    "data.md": None,
    "reproductions.md": None,
}
"""Pages whose commands are run, one after the other in one folder, and what is there before."""

PARSED_ONLY = (
    "tcp://scheduler",  # a cluster; tests/tables/test_cluster.py has one
    "--run",  # hours
    "--quick",  # tests/cli/test_reproduce.py runs quick forms
    "reproduce page",  # writes into the clone; tests/docs/test_reproduce_page.py has it
    "--head 5-",  # the digest of another ledger; tests/core/test_ledger_anchor.py
    "fetch",  # the network
    "visits/*.parquet",  # nobody's visits are here; tests/tables/test_scan_people.py has some
)


def marked(text: str) -> str:
    """Numbers and the width of columns do not count."""
    text = re.sub(r"[0-9a-f]{12,}", "0", text)  # digests
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "0", text)
    return re.sub(r"[ ━─┳┏┓┡┩╇└┘┴]+", " ", text).strip()


@pytest.mark.parametrize("name", PAGES)
def test_the_commands_of_a_page_run_and_say_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = next(file for file in FILES if file.name == name)
    commands = [shown for shown in in_blocks(page) if not any(part in shown.line for part in PARSED_ONLY)]
    if any("a9a" in shown.line or "adult" in shown.line for shown in commands):
        if not (DATA / "a9a.bz2").exists():
            pytest.skip(f"{DATA} is not here: the page trains on a9a")
        monkeypatch.setenv("QUIETGRAD_DATA", str(DATA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "120")
    if given := PAGES[name]:
        given(tmp_path)
    for shown in commands:
        capsys.readouterr()
        code = main(shown.words)
        said = capsys.readouterr()
        assert code == 0, f"{shown.line}: {said.err}"
        lines = [marked(line) for line in said.out.splitlines()]
        for line in shown.output:
            if line.strip() not in ("…", ""):
                assert marked(line) in lines, f"{shown.line}: {line!r} is not said, but\n{said.out}"
