"""Training from the command line: files in, files out, interruptions survived, mistakes refused before spending."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import quietgrad
from quietgrad.cli import main
from quietgrad.core.ledger.ledger import Ledger
from quietgrad.core.session.kept import is_kept
from quietgrad.core.session.session import CentralSession


@pytest.fixture(autouse=True)
def _private_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIETGRAD_STATE", str(tmp_path / "state"))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A binary problem that a line separates well, as a CSV file, with a test file beside it."""
    rng = np.random.default_rng(5)
    for name, n in (("people.csv", 600), ("others.csv", 150)):
        X = rng.normal(size=(n, 3))
        y = (X @ [2.0, -1.0, 0.5] + 0.3 * rng.normal(size=n) > 0).astype(int)
        rows = ["a,b,c,y", *(",".join(f"{v:.6f}" for v in x) + f",{k}" for x, k in zip(X, y, strict=True))]
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    return tmp_path / "people.csv"


def train(table: Path, out: Path, *args: str, code: int = 0) -> None:
    promise = ("--epsilon", "2", "--delta", "1e-5", "--n-public", "600")
    assert main(["train", str(table), "--out", str(out), *promise, *args]) == code


def result_of(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "result.json").read_text())
    return loaded


def test_train_leaves_everything_it_promises(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    test = str(tmp_path / "others.csv")
    train(table, out, "--algorithm", "dp-srm", "--steps", "60", "--batch-size", "60", "--test", test)
    said = capsys.readouterr().out
    assert "test accuracy" in said
    assert "DP, add-remove" in said
    assert "privacy in all" in said
    names = {path.name for path in out.iterdir()}
    assert {"model.safetensors", "result.json", "ledger.jsonl", "report.html", "run.json"} <= names
    assert "checkpoint.safetensors" not in names
    assert not list((tmp_path / "state" / "keys").iterdir())  # the key is gone after the close
    result = result_of(out)
    assert (result["schema_version"], result["algorithm"], result["config"]["steps"]) == (1, "dp-srm", 60)
    told = result["data"]
    assert (told["name"], told["n_public"], told["d"]) == ("people.csv", 600, 4)  # three features, the intercept
    privacy = result["privacy"]
    assert privacy["is_private"] is True
    assert privacy["epsilon"] == pytest.approx(1.6, rel=1e-3)  # a fifth is for the score of the held-out
    assert privacy["releases"] == {"first": 1, "next": 59}
    wanted = {"epsilon", "delta", "relation", "accountant", "sampling", "noise_multiplier", "releases", "adversary"}
    assert wanted | {"account", "is_private"} <= set(privacy)
    assert result["metrics"]["private"] is True
    noisy = result["metrics"]["too_noisy"]  # few are held out: by chance its error may be too large to state it
    assert noisy.get("test_accuracy", 0.0) > 0.0 or result["metrics"]["test_accuracy_error"] > 0.0
    assert not any(name.startswith("train") or name == "gradient_norm" for name in result["metrics"])
    ledger = Ledger(out / "ledger.jsonl")
    assert ledger.verify().ok
    assert ledger.verify().accounts == ("people.csv",)  # nobody named one
    assert 1.6 < ledger.spent("people.csv", delta=1e-5, relation="add-remove").epsilon <= 2.0  # model and score
    assert quietgrad.load(out).params.shape == (4,)


def test_exact_scores_are_asked_for_and_marked(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(table, tmp_path / "run", "--test", str(tmp_path / "others.csv"), "--exact-score", "--evaluate-train")
    assert "they are data, not private" in capsys.readouterr().out
    result = result_of(tmp_path / "run")
    metrics = result["metrics"]
    assert result["privacy"]["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert metrics["private"] is False
    assert min(metrics["train_accuracy"], metrics["test_accuracy"]) > 0.8
    assert metrics["gradient_norm"] > 0.0
    assert metrics["computed_on"]["train_loss"].startswith("private training records")


def test_without_noise_it_says_so(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", str(table), "--out", str(out), "--non-private", "--evaluate-train"]) == 0
    assert "NOT PRIVATE" in capsys.readouterr().out
    result = result_of(out)
    assert result["privacy"]["is_private"] is False
    assert result["privacy"]["epsilon"] is None
    assert result["metrics"]["train_accuracy"] > 0.9
    assert not (out / "ledger.jsonl").exists()
    assert "This run is not private." in (out / "report.html").read_text()


@pytest.mark.parametrize("objective", ["logistic", "hinge:0.5", "multinomial", "squared", "huber:1"])
def test_objectives_regularisers_and_predictions(
    objective: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, scored = tmp_path / "run", tmp_path / "scores" / "said.csv"
    regression = objective.partition(":")[0] in ("squared", "huber")
    extra = ("--task", "regression") if regression else ()
    train(table, out, "--algorithm", "dp-gd", "--objective", objective, "--regularizer", "l2:0.01", *extra)
    assert main(["predict", str(out), str(tmp_path / "others.csv"), "-o", str(scored)]) == 0
    lines = scored.read_text().splitlines()
    assert len(lines) == 151
    assert lines[0].split(",")[0] == "prediction"
    capsys.readouterr()
    assert main(["predict", str(out), str(tmp_path / "others.csv"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["scores"]["rmse"] < 0.5 if regression else said["scores"]["accuracy"] > 0.8
    assert [str(value) for value in said["prediction"]] == [line.split(",")[0] for line in lines[1:]]


@pytest.mark.parametrize("rows", ["clip", "normalize"])
def test_predictions_and_scores_are_of_the_same_rows(
    rows: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, others = tmp_path / "run", str(tmp_path / "others.csv")
    asked = ("--algorithm", "dp-gd", "--row-bound", "9", "--rows", rows, "--test", others, "--exact-score")
    train(table, out, *asked)
    capsys.readouterr()
    assert main(["predict", str(out), others, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["accuracy"] == result_of(out)["metrics"]["test_accuracy"]
    book = tmp_path / "of-others.jsonl"
    assert main(["evaluate", str(out), others, "--epsilon", "3", "--ledger", str(book)]) == 0
    assert Ledger(book).verify().accounts == ("held-out",)


def test_a_schema_and_text_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    ages = rng.integers(18, 90, size=300)
    rows = [f"{age},{'clerk' if age < 50 else 'smith'},{'yes' if age > 55 else 'no'}" for age in ages]
    (tmp_path / "people.csv").write_text("age,job,rich\n" + "\n".join(rows) + "\n")
    schema = {
        "label": {"column": "rich", "classes": ["no", "yes"]},
        "columns": {"age": {"bounds": [0, 100]}, "job": {"categories": ["clerk", "smith"]}},
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    train(tmp_path / "people.csv", tmp_path / "run", "--schema", str(tmp_path / "schema.json"))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "people.csv")]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "prediction,probability_of_yes"
    assert {line.split(",")[0] for line in captured.out.splitlines()[1:]} == {"no", "yes"}
    assert float(captured.err.split("accuracy = ")[1].split()[0]) > 0.8
    # New people have no labels yet, in a text or a parquet file.
    unlabelled = pd.read_csv(tmp_path / "people.csv").drop(columns="rich")
    unlabelled.to_csv(tmp_path / "new.csv", index=False)
    unlabelled.to_parquet(tmp_path / "new.parquet")
    for name in ("new.csv", "new.parquet"):
        assert main(["predict", str(tmp_path / "run"), str(tmp_path / name)]) == 0
        assert capsys.readouterr() == (captured.out, "")
    assert main(["evaluate", str(tmp_path / "run"), str(tmp_path / "new.csv"), "--epsilon", "1"]) == 1
    assert "no labels" in capsys.readouterr().err


def test_an_account_is_shared_and_its_cap_refuses(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ("--ledger", str(tmp_path / "all.jsonl"), "--account", "patients", "--cap-epsilon", "2.5")
    train(table, tmp_path / "one", *shared)
    train(table, tmp_path / "two", *shared, code=1)
    assert "Cap: ε=2.5" in capsys.readouterr().err
    assert not (tmp_path / "two" / "result.json").exists()
    assert not list((tmp_path / "state" / "keys").iterdir())
    assert not (tmp_path / "two" / "checkpoint.safetensors").exists()
    assert len(Ledger(tmp_path / "all.jsonl").book().held) == 1
    assert not (tmp_path / "one" / "ledger.jsonl").exists()


def test_a_folder_is_not_overwritten_by_accident(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(table, out)
    model = (out / "model.safetensors").read_bytes()
    train(table, out, code=1)
    assert "holds a finished run" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == model
    train(table, out, "--overwrite")
    assert (out / "model.safetensors").read_bytes() != model
    assert len(Ledger(out / "ledger.jsonl").book().held) == 2  # the ledger forgets nothing


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["--epsilon", "0"], 2, "--epsilon 0.0"),
        (["--delta", "1"], 2, "--delta 1.0"),
        (["--relation", "none"], 2, "--relation none"),
        (["--algorithm", "adam"], 2, "'adam': must be one of"),
        (["--algorithm", "dp-sgd", "--batch-size", "601"], 2, "--batch-size 601"),
        (["--algorithm", "storm"], 2, "non-private baseline"),
        (["--objective", "magic"], 2, "'magic'"),
        (["--objective", "huber"], 1, "is for regression labels"),
        (["--regularizer", "l2"], 2, "l2:STRENGTH"),
        (["--regularizer", "l2:x"], 2, "'x' is no number"),
        (["--n-public", "500", "--relation", "replace-one"], 1, "the plan is for n=500"),
        (["--classes", "0,1,2", "--objective", "logistic"], 1, "is for binary labels"),
        (["--test", "nowhere.csv"], 1, "no such test file"),
    ],
)
def test_nothing_is_spent_on_a_mistake(
    args: list[str], code: int, says: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(table, tmp_path / "run", *args, code=code)
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
    keys = tmp_path / "state" / "keys"
    assert not keys.exists() or not list(keys.iterdir())


def start(table: Path, out: Path, algorithm: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quietgrad", "train", str(table), "--out", str(out), "--epsilon", "2"]
    often = ["--n-public", "600", "--checkpoint-seconds", "0.02"]
    return subprocess.Popen([*command, *often, *algorithm], stdout=subprocess.DEVNULL)


def wait_for_checkpoints(process: subprocess.Popen[bytes], path: Path, count: int) -> None:
    seen: set[int] = set()
    deadline = time.monotonic() + 60.0
    while len(seen) < count:
        assert process.poll() is None, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline, "no checkpoint appeared"
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.002)


def undisturbed(out: Path, key: bytes) -> Any:
    """The parameters of a run that nobody disturbs, by the options in a folder and another run's key."""
    from quietgrad.cli.run_spec import RunSpec, objective_from
    from quietgrad.core.session.curator import CentralCurator
    from quietgrad.core.session.transcript import plan_key
    from quietgrad.methods import plan, run

    spec = RunSpec.load(out)
    data: Any = spec.load_data()
    method = spec.make_algorithm(data, 600)
    planned = plan(method, n=data.n, budget=spec.budget())
    bound = plan_key(key, planned.digest)
    curator = CentralCurator(objective_from(spec.describe_objective(data)), (data.X, data.y), key=bound)
    return run(method, curator.open(planned), curator.initial()).params


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        ["--algorithm", "dp-srm", "--steps", "8000", "--batch-size", "40"],
        ["--steps", "3000"],
    ],
)
def test_killed_and_resumed_is_undisturbed(algorithm: list[str], table: Path, tmp_path: Path) -> None:
    """A run that is killed again and again ends with the bits of one that nobody disturbs, for one charge."""
    out = tmp_path / "run"
    process = start(table, out, algorithm)
    wait_for_checkpoints(process, out / "checkpoint.safetensors", 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (key,) = (path.read_bytes() for path in (tmp_path / "state" / "keys").glob("*.key"))
    for _ in range(2 if "dp-srm" in algorithm else 1):
        again = subprocess.Popen([sys.executable, "-m", "quietgrad", "resume", str(out)], stdout=subprocess.DEVNULL)
        wait_for_checkpoints(again, out / "checkpoint.safetensors", 2)
        again.send_signal(signal.SIGKILL)
        again.wait()
    assert main(["resume", str(out)]) == 0
    assert np.array_equal(quietgrad.load(out).params, undisturbed(out, key))
    assert len(Ledger(out / "ledger.jsonl").book().held) == 1  # nothing was spent twice
    assert not list((tmp_path / "state" / "keys").iterdir())
    assert not (out / "checkpoint.safetensors").exists()
    result = result_of(out)
    assert result["privacy"]["epsilon"] <= 2.0
    assert not any("fresh noise" in note for note in result["privacy"]["notes"])
    assert result["history"][-1]["step"] == int(algorithm[algorithm.index("--steps") + 1])


def test_an_interrupted_run_guards_its_folder_and_its_data(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    process = start(table, out, ["--algorithm", "dp-gd", "--steps", "8000"])
    wait_for_checkpoints(process, out / "checkpoint.safetensors", 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(table, out, "--overwrite", code=1)
    assert "holds an interrupted run" in capsys.readouterr().err
    shutil.copy(out / "checkpoint.safetensors", tmp_path)
    assert main(["resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["privacy"]["is_private"] is True
    assert main(["resume", str(out)]) == 0
    assert "finished already" in capsys.readouterr().out
    # A crash after the key was destroyed leaves a checkpoint beside the result: nothing is left to do but tidy up.
    model = (out / "model.safetensors").read_bytes()
    shutil.copy(tmp_path / "checkpoint.safetensors", out)
    assert main(["resume", str(out)]) == 0
    assert (out / "model.safetensors").read_bytes() == model
    assert not (out / "checkpoint.safetensors").exists()
    assert len(Ledger(out / "ledger.jsonl").book().held) == 1


@pytest.mark.parametrize("how", [["--evaluate-train"], ["--model", "linear"], ["--model", "additive"]])
def test_stopped_between_training_and_its_end(how: list[str], table: Path, tmp_path: Path) -> None:
    """What a run leaves before it is scored and reported on is concluded by `resume`, whichever model it is."""
    out = tmp_path / "run"
    train(table, out, *how)
    whole = result_of(out)
    (out / "report.html").unlink()
    stopped = result_of(out)
    del stopped["details"]["repeat"]  # is written last
    (out / "result.json").write_text(json.dumps({**stopped, "metrics": {}}))
    assert main(["resume", str(out)]) == 0
    assert result_of(out)["metrics"] == whole["metrics"]
    assert (out / "report.html").exists()


@pytest.mark.parametrize("model", ["linear", "additive"])
def test_a_killed_fit_of_a_model_goes_on(model: str, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        releases: list[int] = []
        release = CentralSession.release

        def killed(self: CentralSession, *args: Any, **how: Any) -> Any:
            releases.append(1)
            if len(releases) > 2:
                raise KeyboardInterrupt
            return release(self, *args, **how)

        patch.setattr(CentralSession, "release", killed)
        train(table, out, "--model", model, "--holdout", "0.3", code=130)
    assert is_kept(out)
    assert main(["resume", str(out)]) == 0
    result = result_of(out)
    assert result["privacy"]["is_private"]
    assert not any("charged again" in note for note in result["privacy"]["notes"])
    assert not is_kept(out)
    assert main(["predict", str(out), str(table), "-o", str(tmp_path / "answers.csv")]) == 0


def test_resume_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {"data": "a9a", "reading": {"label": "y"}, "mirrored": "yes", "oracle": None}  # an option that is gone
    for content, says in ((None, "no run was started"), ("{", "cannot be read"), (json.dumps(old), "mirrored")):
        if content is not None:
            (tmp_path / "run.json").write_text(content)
        assert main(["resume", str(tmp_path)]) == 1
        assert says in capsys.readouterr().err


def test_the_demo_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quietgrad.core.errors import DataError
    from quietgrad.data import registry as store

    def offline(name: str) -> None:
        raise DataError(f"{name}: no network.")

    monkeypatch.setenv("QUIETGRAD_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "fetch", offline)
    monkeypatch.setattr("quietgrad.data.loading.fetch", offline)
    out = tmp_path / "demo"
    assert main(["demo", "--out", str(out)]) == 0
    assert main(["demo", "--out", str(out), "--json"]) == 0  # a second time is fine
    for name in ("dp-srm", "default"):
        result = result_of(out / name)
        assert result["data"]["name"] == "breast-cancer"
        assert result["privacy"]["is_private"] is True
    assert (out / "report.html").exists()
    assert len(Ledger(out / "ledger.jsonl").book().held) == 4


def test_the_progress_bar_shows_an_upper_epsilon() -> None:
    plan = quietgrad.plan(quietgrad.DPSRM(steps=100, batch_size=50), n=1000, budget=quietgrad.Budget(1.0, 1e-5))
    for used in (1, 7, 50, 100):
        shown = plan.epsilon_by(used)
        assert plan.epsilon_after({"first": 1, "next": used - 1}) <= shown + 1e-12
        assert shown <= plan.epsilon()


def test_runs_on_one_file_add_up_whichever_part_of_it_they_see(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cap = ("--cap-epsilon", "2.1")
    train(table, tmp_path / "a", "--holdout", "0.3", *cap)
    capsys.readouterr()
    train(table, tmp_path / "c", "--holdout", "0.3", *cap, code=1)
    assert "cap" in capsys.readouterr().err
