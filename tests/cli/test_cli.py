"""The command line's contract: quick to start, one sentence per error, exit codes 0, 1 and 2, JSON for programs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from quietgrad.cli import COMMANDS, app_of, main

HEAVY = ("numpy", "scipy", "sklearn", "torch", "numba", "dp_accounting", "pandas", "pyarrow", "typer", "rich")


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "t.csv").write_text("x,y\n" + "1,0\n2,1\n" * 20)
    return str(tmp_path / "t.csv")


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


def program(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quietgrad", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


# --- starting -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "allowed"),
    [
        ("import quietgrad", ()),
        ("from quietgrad.cli import main; main(['--help'])", ()),
        ("import quietgrad.methods", ("numpy",)),
        ("from quietgrad.data import load, split_even", ("numpy",)),
        ("import quietgrad.cli.train, quietgrad.cli.predict", ("numpy", "scipy", "typer", "rich")),
    ],
)
def test_starting_imports_nothing_heavy(action: str, allowed: tuple[str, ...]) -> None:
    heavy = [name for name in HEAVY if name not in allowed]
    code = f"import sys\n{action}\nprint('loaded:', [m for m in {heavy!r} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ledger", "ve"], {"verify"}),
        (["train", "x.csv", "--rel"], {"--relation"}),
        ([""], set(COMMANDS)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bash_completes(tmp_path: Path, words: list[str], found: set[str]) -> None:
    (tmp_path / "quietgrad").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quietgrad "$@"\n')
    (tmp_path / "quietgrad").chmod(0o755)
    typed = " ".join(f"'{word}'" for word in ["quietgrad", *words])
    script = f"""eval "$(quietgrad completion bash)"
    COMP_WORDS=({typed}); COMP_CWORD={len(words)}; _quietgrad_completion quietgrad; echo "${{COMPREPLY[@]}}" """
    here = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **here}, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == found


def test_help_names_every_command_and_each_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    for name in COMMANDS:
        command = get_command(app_of(name))
        for each in getattr(command, "commands", {name: command}).values():
            assert "Example: " in (each.epilog or ""), (name, each.name)


def test_a_program_by_its_module() -> None:
    done = program("plann")
    assert (done.returncode, "did you mean `quietgrad plan`?" in done.stderr) == (2, True)
    done = program("report", "nowhere", "--debug")
    assert (done.returncode, "Traceback" in done.stderr) == (1, True)


@pytest.mark.parametrize("command", ["--help", "data list --json"])
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    words = [sys.executable, "-m", "quietgrad", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


# --- what is computed ---------------------------------------------------------------------------------------------


def test_account_says_what_the_accountant_proves(capsys: pytest.CaptureFixture[str]) -> None:
    described = ("--n", "60000", "--batch-size", "512", "--steps", "2000", "--noise-multiplier", "1.42")
    proof = answer(capsys, "account", *described, "--delta", "1e-5")
    assert proof["epsilon"] == pytest.approx(1.2, rel=5e-3)
    assert (proof["relation"], proof["accountant"]) == ("add-remove", "pld-poisson")
    replaced = answer(capsys, "account", *described, "--relation", "replace-one", "--sampling", "fixed-size")
    assert replaced["epsilon"] > proof["epsilon"]
    assert main(["account", *described]) == 0
    assert capsys.readouterr().out.startswith("ε = 1.2")


def test_calibrate_finds_what_account_confirms(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("--epsilon", "1", "--delta", "1e-5", "--n", "1000", "--batch-size", "50")
    found = answer(capsys, "calibrate", *shared, "--steps", "200")
    assert 0.999 <= found["epsilon"] <= 1.0
    given = ("--noise-multiplier", str(found["noise_multiplier"]))
    assert 200 <= answer(capsys, "calibrate", *shared, "--find", "steps", *given)["steps"] <= 202


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
    described = answer(capsys, "plan", "dp-gd", "--n", "1000", "--steps", "100", "--noise-multiplier", "10")
    exact = answer(capsys, "account", "--sampling", "full", "--steps", "100", "--noise-multiplier", "10")
    assert described["proof"]["epsilon"] == pytest.approx(exact["epsilon"])
    rows = {row["name"]: row for row in answer(capsys, "plan", "--list")}
    assert {"dp-srm", "dp-sgd", "dp-gd", "dp-agd", "storm"} <= rows.keys()
    assert rows["gd"]["private"] is False


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("account --rate 2 --steps 5 --noise-multiplier 1", "--rate 2.0: must be in (0, 1]"),
        ("account --steps 0 --rate 0.1 --noise-multiplier 1", "must be a whole number"),
        ("account --steps 5 --noise-multiplier 1", "needs either rate"),
        ("account --steps 5 --rate 0.1 --noise-multiplier 1 --delta 0", "--delta 0.0"),
        ("account --steps many --noise-multiplier 1", "--steps"),
        ("account --steps 5 --rate .1 --noise-multiplier 1 --relation both", "--relation both"),
        ("account --steps 5 --rate .1 --noise-multiplier 1 --accountant clt", "--accountant clt"),
        ("account --n 10 --batch-size 20 --steps 5 --noise-multiplier 1", "--batch-size 20"),
        ("calibrate --steps 5 --rate 0.1", "--epsilon"),
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
        ("plan dp-gd --n 10 --epsilon 1 --learning-rate fast", "--learning-rate fast"),
        ("plan dp-sgd --n 10 --epsilon 1", "--batch-size 256"),
        ("plan output-perturbation --n 10 --epsilon 1", "replace-one"),
        ("plan --rows 1.5 --columns 3", "--rows"),
        ("plan --rows 1e6 --columns 3 --cluster many", "--cluster"),
        ("audit dp-srn", "Did you mean 'dp-srm'?"),
        ("frontier", "DATA"),
    ],
)
def test_a_mistake_in_usage_is_one_sentence_and_exit_code_two(
    args: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, 2, *args.split())


@pytest.mark.parametrize(
    ("args", "said", "unsaid"),
    [
        (["--epsilon", "-1"], "--epsilon -1.0: must be > 0", "budget="),
        (["--epsilon", "-1"], "--non-private", "epsilon="),
        (["--epsilon", "1", "--delta", "0"], "--set mechanism=pure", "Perturbation("),
        (["--epsilon", "1", "--task", "regresion"], "Did you mean 'regression'?", "task="),
        (["--epsilon", "1", "--algorithm", "dp-srm", "--set", "joint-clp=1"], "'joint_clip'?", "clip="),
        (["--epsilon", "1", "--algorithm", "dp-sgd", "--steps", "0"], "--steps 0: must be", "steps="),
        (["--epsilon", "1", "--model", "additive", "--steps", "3"], "leave --steps out", "steps="),
        (["--epsilon", "1", "--model", "linear", "--evaluate-train"], "leave --evaluate-train out", "train="),
        (["--epsilon", "1", "--model", "linear", "--rows", "normalize"], "leave --rows out", "rows="),
        (["--epsilon", "1", "--model", "linear", "--score-share", "0.5"], "leave --score-share out", "share="),
        (["--epsilon", "1", "--exact-score"], "leave --exact-score out", "score="),
        (["--epsilon", "1", "--combine", "sum"], "give --person", "combine="),
        (["--epsilon", "1", "--model", "additive", "--inference"], "additive models do not have it", "inference="),
        (["--epsilon", "1", "--model", "oracle"], "must be one of linear", "model="),
        (["--epsilon", "1", "--rows", "drop"], "must be clip or normalize", "rows="),
    ],
)
def test_a_mistake_is_told_in_flags_and_nothing_is_spent(
    table: str, tmp_path: Path, args: list[str], said: str, unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", table, "--out", str(tmp_path / "run"), *args]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert unsaid not in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["train"], ["frontier"], ["federate", "simulate"]], ids=" ".join)
def test_a_task_or_classes_that_cannot_be_is_bad_usage(
    table: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    budget = [] if command == ["frontier"] else ["--epsilon", "1"]
    for wrong in (["--task", "foo"], ["--classes", "no"], ["--classes", "1,1"]):
        assert f"{' '.join(wrong)}: must be" in refusal(capsys, 2, *command, table, *budget, *wrong)


def test_what_cannot_be_done_is_refused_with_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = "--n 1000 --batch-size 10 --steps 5 --noise-multiplier 3 --sampling fixed-size"
    assert "No accountant can prove" in refusal(capsys, 1, "account", *args.split())
    (tmp_path / "file").write_text("")
    said = refusal(capsys, 1, "data", "schema", str(tmp_path / "nothing.csv"))
    assert said.startswith("quietgrad data:")


def test_warnings_of_a_command_do_not_outlive_it(capsys: pytest.CaptureFixture[str]) -> None:
    before = warnings.showwarning
    answer(capsys, "data", "list")
    assert warnings.showwarning is before


# --- what is explained --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["train", "resume", "evaluate", "frontier", "describe", "plan", "account", "verify",
              "federate simulate", "federate server"],
)  # fmt: skip
def test_commands_that_print_an_epsilon_explain_it(words: str) -> None:
    name, *rest = words.split()
    command = get_command(app_of(name))
    for word in rest:
        command = command.commands[word]  # type: ignore[attr-defined]
    assert any("--explain" in parameter.opts for parameter in command.params)


def meaning(text: str) -> tuple[float, float, float]:
    """ε, δ and e^ε as the one line has them."""
    (found,) = re.findall(r"ε = (\S+), δ = (\S+): one record changes .* e\^ε = (\S+), plus", text)
    return float(found[0]), float(found[1]), float(found[2])


def test_the_explanation_is_of_the_proved_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["account", "--n", "1000", "--batch-size", "50", "--steps", "20", "--noise-multiplier", "1.5"]
    assert main([*words, "--json", "--explain"]) == 0
    said = capsys.readouterr()
    proved = json.loads(said.out)["epsilon"]
    epsilon, delta, factor = meaning(said.err)
    assert math.isclose(epsilon, proved, rel_tol=1e-3)
    assert math.isclose(factor, math.exp(proved), rel_tol=1e-2)
    assert delta == 1e-5
    # A run and its certificate say the same; a run without noise says nothing.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    rows = np.random.default_rng(0).normal(size=(300, 2))
    np.savez("rows.npz", X=rows, y=(rows[:, 0] > 0) * 1)
    train = ["train", "rows.npz", "--algorithm", "dp-gd", "--steps", "3", "--quiet", "--explain"]
    assert main([*train, "--epsilon", "1", "--out", "run"]) == 0
    trained = meaning(capsys.readouterr().err)
    assert main(["certificate", "run", "-o", "claim.json"]) == 0
    capsys.readouterr()
    assert main(["verify", "claim.json", "--explain"]) == 0
    assert meaning(capsys.readouterr().err) == trained
    assert main([*train, "--non-private", "--out", "open"]) == 0
    assert "any outcome" not in capsys.readouterr().err
