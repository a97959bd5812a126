"""The command line's contract: quick to start, one sentence per error, exit codes 0, 1 and 2, JSON for programs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quietgrad.cli import COMMANDS, available, main

HEAVY = ("scipy", "sklearn", "torch", "matplotlib", "numba", "dp_accounting", "pandas", "typer", "rich")


def answer(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """The JSON that a command prints."""
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], code: int, *args: str) -> str:
    """The one sentence that a refused command says."""
    assert main(list(args)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    return captured.err


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "action",
    ["import quietgrad", "from quietgrad.cli import main; main(['--help'])", "import quietgrad.algorithms"],
)
def test_starting_imports_nothing_heavy(action: str) -> None:
    loaded = python(f"import sys\n{action}\nprint('loaded:', [m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize("command", ["train", "plan", "account", "calibrate", "ledger", "data", "report", "demo"])
def test_a_command_s_help_imports_no_numerics(command: str) -> None:
    heavy = tuple(name for name in HEAVY if name not in ("typer", "rich"))
    code = f"import sys\nfrom quietgrad.cli import main\nassert main([{command!r}, '--help']) == 0\n"
    loaded = python(code + f"print('loaded:', [m for m in {heavy!r} if m in sys.modules])")
    assert loaded.splitlines()[-1] == "loaded: []"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in available())
    assert {"train", "resume", "predict", "account", "calibrate", "plan", "ledger", "data", "report"} <= set(
        available()
    )
    assert set(available()) <= set(COMMANDS)


@pytest.mark.parametrize(
    "command", ["train", "resume", "predict", "account", "calibrate", "plan", "report", "demo"]
)
def test_every_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"Example: quietgrad {command}" in capsys.readouterr().out


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "quietgrad", "plann"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean `quietgrad plan`?" in done.stderr


@pytest.mark.parametrize("command", ["--help", "data list --json", "plan --list"])
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    program = [sys.executable, "-m", "quietgrad", *command.split()]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_account_says_what_the_accountant_proves(capsys: pytest.CaptureFixture[str]) -> None:
    described = ("--n", "60000", "--batch-size", "512", "--steps", "2000", "--noise-multiplier", "1.42")
    proof = answer(capsys, "account", *described, "--delta", "1e-5")
    assert proof["epsilon"] == pytest.approx(1.2, rel=5e-3)
    assert proof["relation"] == "add-remove"
    assert proof["accountant"] == "pld-poisson"
    replaced = answer(capsys, "account", *described, "--relation", "replace-one", "--sampling", "fixed-size")
    assert replaced["epsilon"] > proof["epsilon"]
    assert main(["account", *described]) == 0
    assert capsys.readouterr().out.startswith("ε = 1.2")


def test_account_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "deep" / "epsilon.png"
    run = ("--sampling", "full", "--steps", "50", "--noise-multiplier", "20")
    curve = answer(capsys, "account", *run, "--plot", str(target))["curve"]
    assert target.read_bytes().startswith(b"\x89PNG")
    assert curve[0][0] == 1
    assert curve[-1][0] == 50
    assert all(a[1] < b[1] for a, b in pairwise(curve))
    assert ".svg, .png or .pdf" in refusal(capsys, 1, "account", *run, "--plot", str(tmp_path / "epsilon.xyz"))


def test_calibrate_finds_what_account_confirms(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--epsilon", "1", "--delta", "1e-5", "--n", "1000", "--batch-size", "50")
    found = answer(capsys, "calibrate", *shared, "--steps", "200")
    assert 0.999 <= found["epsilon"] <= 1.0
    noise = str(found["noise_multiplier"])
    steps = answer(capsys, "calibrate", *shared, "--find", "steps", "--noise-multiplier", noise)["steps"]
    assert 200 <= steps <= 202


def test_plan_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("plan", "dp-srm", "--n", "10000", "--steps", "40", "--batch-size", "100", "--epsilon", "1")
    described = answer(capsys, *args, "--set", "joint-clip=true", "--learning-rate", "cosine:0.5")
    assert described["proof"]["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert [(slot["name"], slot["count"]) for slot in described["slots"]] == [("first", 1), ("next", 39)]
    assert described["config"]["joint_clip"] is True
    assert main(list(args)) == 0
    text = capsys.readouterr().out
    assert "proved by the pld-poisson accountant" in text
    assert "39" in text


def test_plan_with_fixed_noise_states_its_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    described = answer(capsys, "plan", "dp-gd", "--n", "1000", "--steps", "100", "--noise-multiplier", "10")
    exact = answer(capsys, "account", "--sampling", "full", "--steps", "100", "--noise-multiplier", "10")
    assert described["proof"]["epsilon"] == pytest.approx(exact["epsilon"])


def test_plan_lists_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer(capsys, "plan", "--list")
    assert {"dp-srm", "dp-sgd", "dp-gd", "dp-agd", "storm"} <= {row["name"] for row in rows}
    assert next(row for row in rows if row["name"] == "gd")["private"] is False


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("account --rate 2 --steps 5 --noise-multiplier 1", "--rate 2.0: must be in (0, 1]"),
        ("account --steps 0 --rate 0.1 --noise-multiplier 1", "must be a whole number"),
        ("account --steps 5 --noise-multiplier 1", "needs either rate"),
        ("account --steps 5 --rate 0.1 --noise-multiplier 1 --delta 0", "--delta 0.0"),
        ("account --steps 5", "--noise-multiplier"),
        ("account --steps many --noise-multiplier 1", "--steps"),
        ("account --steps 5 --rate .1 --noise-multiplier 1 --relation both", "--relation both"),
        ("account --steps 5 --rate .1 --noise-multiplier 1 --accountant clt", "--accountant clt"),
        ("account --n 10 --batch-size 20 --steps 5 --noise-multiplier 1", "--batch-size 20"),
        ("calibrate --steps 5 --rate 0.1", "--epsilon"),
        ("calibrate --epsilon -1 --steps 5 --rate 0.1", "--epsilon -1.0: must be > 0"),
        ("calibrate --epsilon nan --steps 5 --rate 0.1", "--epsilon nan"),
        ("calibrate --epsilon 1 --find luck", "'luck': must be one of"),
        ("calibrate --epsilon 1 --find steps", "--noise-multiplier"),
        ("plan dp-sgdd --n 10 --epsilon 1", "'dp-sgdd': must be one of"),
        ("plan dp-gd --epsilon 1", "--n"),
        ("plan dp-gd --n 10", "--epsilon"),
        ("plan dp-gd --n 10 --epsilon 1 --gamma 0.1", "dp-gd has no setting 'gamma'"),
        ("plan dp-gd --n 10 --epsilon 1 --set clip", "must be KEY=VALUE"),
        ("plan dp-gd --n 10 --epsilon 1 --set steps=1.5", "must be a whole number"),
        ("plan dp-gd --n 10 --epsilon 1 --set returns=best", "'last' or 'average'"),
        ("plan dp-gd --n 10 --epsilon 1 --steps 0", "--steps 0"),
        ("plan dp-gd --n 10 --epsilon 1 --learning-rate fast", "--learning-rate fast"),
        ("plan dp-sgd --n 10 --epsilon 1", "--batch-size 256"),
        ("plan output-perturbation --n 10 --epsilon 1", "replace-one"),
    ],
)
def test_a_mistake_in_usage_is_one_sentence_and_exit_code_two(
    args: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, 2, *args.split())


def test_what_cannot_be_proved_is_refused_with_exit_code_one(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--n",
        "1000",
        "--batch-size",
        "10",
        "--steps",
        "5",
        "--noise-multiplier",
        "3",
        "--sampling",
        "fixed-size",
    ]
    assert "No accountant can prove" in refusal(capsys, 1, "account", *args)


def test_debug_shows_the_traceback() -> None:
    command = [sys.executable, "-m", "quietgrad", "report", "nowhere", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" in done.stderr
    assert done.returncode == 1


def test_files_that_cannot_be_written_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "plot.png"
    run = ("--sampling", "full", "--steps", "5", "--noise-multiplier", "20", "--plot", str(target))
    assert "quietgrad account:" in refusal(capsys, 1, "account", *run)


def test_warnings_of_a_command_do_not_outlive_it(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    before = warnings.showwarning
    answer(capsys, "data", "list")
    assert warnings.showwarning is before
