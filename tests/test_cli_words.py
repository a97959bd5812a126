"""The command line's words: flags in its errors, names that were nearly right, completion, one sentence each."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quietgrad.cli import COMMANDS, main


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "t.csv").write_text("x,y\n" + "1,0\n2,1\n" * 20)
    return str(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("args", "said", "unsaid"),
    [
        (["--epsilon", "-1"], "--epsilon -1.0: must be > 0", "budget="),
        (["--epsilon", "-1"], "--non-private", "epsilon="),
        (
            ["--epsilon", "1", "--delta", "0"],
            "output-perturbation --set mechanism=pure",
            "Perturbation(",
        ),
        (["--epsilon", "1", "--relation", "add"], "--relation add: must be", "relation="),
        (["--epsilon", "1", "--task", "foo"], "--task foo: must be binary, multiclass or regression", "task="),
        (["--epsilon", "1", "--task", "regresion"], "Did you mean 'regression'?", "task="),
        (["--epsilon", "1", "--algorithm", "dp-srn"], "Did you mean 'dp-srm'?", "="),
        (
            ["--epsilon", "1", "--algorithm", "dp-srm", "--set", "joint-clp=1"],
            "Did you mean 'joint_clip'?",
            "clip=",
        ),
        (["--epsilon", "1", "--algorithm", "dp-sgd", "--steps", "0"], "--steps 0: must be", "steps="),
        (["--epsilon", "1", "--algorith", "dp-sgd"], "--algorithm", "="),
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
@pytest.mark.parametrize("wrong", [["--task", "foo"], ["--classes", "no"], ["--classes", "1,1"]], ids=" ".join)
def test_a_task_or_classes_that_cannot_be_is_bad_usage(
    table: str, command: list[str], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    budget = [] if command == ["frontier"] else ["--epsilon", "1"]
    assert main([*command, table, *budget, *wrong]) == 2
    assert f"{' '.join(wrong)}: must be" in capsys.readouterr().err


def test_a_rehearsal_is_told_label_and_classes_as_a_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))
    rows = "".join(f"{'yes' if k % 3 else 'no'},{k % 7 / 7},{k % 5 / 5}\n" for k in range(90))
    (tmp_path / "yes.csv").write_text(f"ill,a,b\n{rows}")
    asked = ["federate", "simulate", str(tmp_path / "yes.csv"), "--parties", "3", "--epsilon", "1", "--quiet"]
    asked += ["--algorithm", "dp-gd", "--steps", "2", "--out", str(tmp_path / "run")]
    assert main([*asked, "--label", "ill", "--classes", "no,yes"]) == 0, capsys.readouterr().err


def test_names_that_are_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "dp-srn"]) == 2
    assert "Did you mean 'dp-srm'?" in capsys.readouterr().err


def test_a_damaged_gz_is_one_error_however_it_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = gzip.compress(b"x,y\n" + b"1,0\n2,1\n" * 200)
    damaged = {
        "cut": whole[:-12],
        "start": b"\x00\x00" + whole[2:],
        "middle": whole[:30] + b"\xff\xff" + whole[32:],
        "sum": whole[:-5] + b"\x00" + whole[-4:],
    }
    for name, content in damaged.items():
        for suffix in (".csv.gz", ".libsvm.gz"):
            file = tmp_path / (name + suffix)
            file.write_bytes(content)
            assert main(["train", str(file), "--epsilon", "1", "--out", str(tmp_path / "run")]) == 1
            error = capsys.readouterr().err
            assert error.startswith(f"quietgrad train: {file}: the compressed file is cut short or damaged. ")
            assert error.endswith("[QG-DATA]\n")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["calibrate", "--bat"], {"--batch-size"}),
        (["ledger", "ve"], {"verify"}),
        (["train", "x.csv", "--relation", "re"], {"replace-one"}),
        (["train", "a9"], {"a9a"}),
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
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == found


def test_completion_of_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "bash, zsh or fish" in capsys.readouterr().err
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "_QUIETGRAD_COMPLETE" in capsys.readouterr().out
