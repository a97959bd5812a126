"""`quietgrad reproduce`: what it lists, shows, runs and refuses, and that the scripts behind it run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import quietgrad
from quietgrad.cli import main
from quietgrad.cli.reproduce import reproductions

ROOT = Path(__file__).parents[2]
PAPERS = {"mnist": "000", "stagewise": "001", "weighted-average": "002", "saddles": "003", "cohorts": None}
SCRIPT = '''"""Table 1 of paper 009: a toy.

Takes a blink.
"""
import json, sys
from pathlib import Path

if __name__ == "__main__":
    print("running", *sys.argv[1:])
    if "--quick" not in sys.argv:
        made = {"command": "python toy.py", "date": "2026-01-01T00:00:00", "versions": {"quietgrad": "0"}}
        rows = [{"method": "a", "error": 0.25, "settings": {"steps": 3}}, {"method": "b", "error": None}]
        Path(__file__).with_name("results").joinpath("a_toy.json").write_text(json.dumps({**made, "rows": rows}))
'''


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the package came from a wheel; the current folder is empty."""
    monkeypatch.setattr(quietgrad, "__file__", str(tmp_path / "site" / "packages" / "quietgrad" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clone(elsewhere: Path) -> Path:
    """A clone with two scripts: one writes results, one fails."""
    (elsewhere / "reproduce" / "results").mkdir(parents=True)
    (elsewhere / "reproduce" / "a_toy.py").write_text(SCRIPT)
    (elsewhere / "reproduce" / "broken.py").write_text('if __name__ == "__main__":\n    raise SystemExit(3)\n')
    (elsewhere / "reproduce" / "models.py").write_text('"""Not a script."""\n')
    return elsewhere / "reproduce"


def answer(capfd: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["reproduce", *args, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def refusal(capfd: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    assert main(["reproduce", *args]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_every_reproduction_is_listed_with_its_paper(capfd: pytest.CaptureFixture[str]) -> None:
    rows = answer(capfd, "list")
    assert PAPERS.items() <= {row["name"]: row["paper"] for row in rows}.items()
    assert main(["reproduce", "list"]) == 0
    text = capfd.readouterr().out
    assert all(f"\n{row['name']} " in text for row in rows)


KEPT = [name for name, each in reproductions(ROOT).items() if each.results.exists()]


@pytest.mark.parametrize("name", KEPT)
def test_committed_results_are_shown_as_tables(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    shown = answer(capfd, name)
    assert shown["name"] == name
    assert {"quietgrad", "numpy"} <= shown["versions"].keys()
    assert shown["tables"]
    for table in shown["tables"]:
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert main(["reproduce", name.replace("-", "_")]) == 0
    text = capfd.readouterr().out
    assert all(table["title"] in text for table in shown["tables"])


OWN = [name.replace("-", "_") for name in KEPT if name not in ("audit-peers", "mnist")]


@pytest.mark.parametrize("name", OWN)
def test_committed_tables_are_what_the_script_makes_of_its_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    record = json.loads((ROOT / "reproduce" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    tables = json.loads(json.dumps(runpy.run_path(str(ROOT / "reproduce" / f"{name}.py"))["tables"](record)))
    assert [(table["title"], table["columns"]) for table in tables] == [
        (table["title"], table["columns"]) for table in record["tables"]
    ]
    for table, committed in zip(tables, record["tables"], strict=True):
        # Noise multipliers are roots, found again here: their last digits depend on the machine's arithmetic.
        expected = [
            [pytest.approx(cell, rel=1e-6) if isinstance(cell, float) else cell for cell in row]
            for row in committed["rows"]
        ]
        assert table["rows"] == expected, table["title"]


SLOW = {"cohorts", "printed_average", "sosp"}


@pytest.mark.parametrize("name", [*(name for name in OWN if name not in SLOW), "mnist", "audit_peers"])
def test_the_quick_form_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ROOT / "reproduce" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--quick"])
    monkeypatch.syspath_prepend(str(ROOT))
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 2
    assert not {"None", "{"} & set(out.split())  # what is not known is a dash, and rows are lines of a table


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("sospp", "did you mean sosp?"),
        ("zzz", "known are"),
        ("sosp --quick --run", "--run"),
        ("list --quick", "list"),
    ],
)
def test_what_cannot_be_asked_is_bad_usage(args: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capfd, 2, *args.split())


def test_without_a_clone_it_says_so(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "clone the repository" in refusal(capfd, 1, "list")


def test_a_script_without_results_is_run_first(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    about = {"name": "a-toy", "paper": "009", "what": "Table 1 of paper 009: a toy.", "takes": "a blink"}
    assert answer(capfd, "list")[0] == {**about, "results": None}
    assert set(reproductions(clone.parent)) == {"a-toy", "broken"}
    assert main(["reproduce", "a-toy"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("running\n")
    assert "method  error\na       0.25\nb       –\n" in out
    assert main(["reproduce", "a-toy"]) == 0
    assert "running" not in capfd.readouterr().out
    shown = answer(capfd, "a-toy", "--run")  # what the script prints is kept out of the JSON
    assert shown["tables"] == [
        {"title": "rows", "columns": ["method", "error"], "rows": [["a", 0.25], ["b", None]]}
    ]


def test_the_quick_form_keeps_nothing_and_a_failure_is_one(clone: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "a-toy", "--quick"]) == 0
    assert capfd.readouterr().out == "running --quick\n"
    assert answer(capfd, "a-toy", "--quick")["ran"] == "quick"
    assert not list((clone / "results").iterdir())
    assert "broken.py ended with code 3" in refusal(capfd, 1, "broken")
