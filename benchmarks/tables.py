"""The defaults for tables against their peers, on the tables of ``table_suite``.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/tables.py linear|rival|additive|peers|report [table ...]

linear: the estimators as they come, and with declared bounds, 10 fits at each ε; on small tables also with declared
bounds under add-remove.
rival: DP-GD, DP-SGD and DP-Newton on features scaled by the declared bounds, each with settings searched on
held-out rows (a fifth of the training rows) at the same ε, then 3 to 5 fits; the search is not charged. On large
tables at ε = 0.2 and 1 only; on small ones DP-GD and DP-Newton under add-remove as well. Cells that are saved
already are not run again.
additive: the additive estimators with declared bounds and vocabularies under both relations, 3 fits on large tables
and 10 on others.
peers: DP-EBM (interpret-core 0.7.8) and diffprivlib, in an environment of their own under the user's cache, with
the same bounds, δ and ε; DP-EBM's promise is about adding or removing a record, which is the easier one.
report: gaps to the best private method of each cell, as a Markdown table.

What a table gave is saved before the next begins. δ = 1e-5, and replace-one where nothing else is said. Test rows
are looked at here only; every constant was settled on held-out rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad.core.errors import DataError, TooNoisyError
from quietgrad.estimators import (
    PrivateAdditiveClassifier,
    PrivateAdditiveRegressor,
    PrivateLinearRegression,
    PrivateLogisticRegression,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from benchmarks.table_rivals import KINDS, Rival, settings
from benchmarks.table_suite import PROBLEMS, Problem, outward

RESULTS = Path(__file__).parent / "results"
PEERS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quietgrad" / "table-peers"
EPSILONS = (0.2, 0.5, 1.0, 3.0)
ADDITIVE_EPSILONS = (0.2, 1.0, 4.0)
FITS = 10
RIVAL_EPSILONS = (0.2, 1.0)  # on large tables, where a search takes minutes
RIVAL_FITS = 5
LARGE = 5000
SLOW = {"mnist": 2, "kdd": 4, "ijcnn1": 6}
DELTA = 1e-5
RUNS = ("linear", "rival", "peers", "additive")
RIVALS = {"dp-gd": "GD", "dp-sgd": "SGD", "dp-newton": "Newton", "diffprivlib": "dpl", "dp-ebm": "EBM"}
EASED = ", add-remove"  # after the name of a method that promises under it instead of replace-one
EQUALS = ("dp-gd", "dp-newton", "diffprivlib")  # the others' promise is about adding or removing a record
OURS = {  # whether bounds are declared, and the promise; the last is DP-SGD's and DP-EBM's, for small tables
    "as is": (False, "replace-one"),
    "bounds": (True, "replace-one"),
    "bounds, add-remove": (True, "add-remove"),
}
Cell = dict[str, Any]


def scores_of(problem: Problem, model: Any) -> tuple[float, float]:
    """(accuracy, AUC) of a classifier, (R², NaN) of a regressor."""
    from sklearn.metrics import r2_score, roc_auc_score

    if problem.task == "regression":
        return float(r2_score(problem.y_test, model.predict(problem.X_test))), float("nan")
    accuracy = float(np.mean(model.predict(problem.X_test) == problem.y_test))
    if problem.task != "binary":
        return accuracy, float("nan")
    return accuracy, float(roc_auc_score(problem.y_test, model.decision_function(problem.X_test)))


def summary(scores: list[tuple[float, float]], refused: int, seconds: float) -> Cell:
    """Mean, worst and standard error of the fits of one cell."""
    if not scores:
        return {"refused": refused}
    first, second = np.array(scores).T
    return {
        "mean": float(first.mean()),
        "worst": float(first.min()),
        "error": float(first.std(ddof=1) / np.sqrt(len(first))) if len(first) > 1 else None,
        "auc": None if np.isnan(second).any() else float(second.mean()),
        "fits": len(scores),
        "refused": refused,
        "seconds": round(seconds / max(1, len(scores)), 3),
    }


def repeated(fits: int, once: Any) -> Cell:
    scores: list[tuple[float, float]] = []
    refused, start = 0, time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(fits):
            try:
                scores.append(once())
            except (DataError, TooNoisyError):
                refused += 1
    return summary(scores, refused, time.perf_counter() - start)


def estimator(
    problem: Problem, epsilon: float, *, declared: bool, additive: bool = False, relation: str = "replace-one"
) -> Any:
    """The estimator as an analyst would make it; classes are declared throughout."""
    settings: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "relation": relation}
    bounds = problem.bounds if declared else None
    if problem.task == "regression":
        settings["target_bounds"] = outward(problem.y) if declared else None
        kind: Any = PrivateAdditiveRegressor if additive else PrivateLinearRegression
    else:
        settings["classes"] = sorted(set(problem.y.tolist()))
        kind = PrivateAdditiveClassifier if additive else PrivateLogisticRegression
    if additive and problem.frame is not None:
        train = problem.frame[0]
        numeric = [c for c in train if str(train[c].dtype) != "category"]
        settings["feature_bounds"] = {c: problem.bounds[j] for c, j in zip(numeric, problem.numeric, strict=True)}
        return kind(**settings)
    return kind(feature_bounds=bounds, **settings)


def linear(names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in names:
        problem = PROBLEMS[name]()
        cells = out.setdefault(name, {"n": problem.X.shape[0], "d": problem.X.shape[1], "task": problem.task})
        cells["majority"] = majority(problem)
        for epsilon, (kind, (declared, relation)) in itertools.product(EPSILONS, OURS.items()):
            if (declared and problem.bounds is None) or (relation == "add-remove" and len(problem.y) >= LARGE):
                continue
            chosen = {"declared": declared, "relation": relation}

            def once(problem: Problem = problem, epsilon: float = epsilon, chosen: Any = chosen) -> Any:
                return scores_of(problem, estimator(problem, epsilon, **chosen).fit(problem.X, problem.y))

            cells[f"{kind} {epsilon:g}"] = repeated(SLOW.get(name, FITS), once)
        print(name, json.dumps(cells), flush=True)
    return out


def majority(problem: Problem) -> float | None:
    if problem.task == "regression":
        return 0.0
    _, counts = np.unique(problem.y_test, return_counts=True)
    return float(counts.max() / counts.sum())


def rival(names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in names:
        problem = PROBLEMS[name]()
        inner = problem.held_out()
        cells = out.setdefault(name, dict(saved("rival").get(name, {})))
        large = problem.X.shape[0] >= LARGE
        kinds = KINDS if large else (*KINDS, *(kind + EASED for kind in KINDS if kind in EQUALS))
        for kind, epsilon in itertools.product(kinds, RIVAL_EPSILONS if large else EPSILONS):
            if f"{kind} {epsilon:g}" in cells or not settings(kind, inner):
                continue
            best, tries = searched(kind, inner, epsilon)

            def once(
                problem: Problem = problem, kind: str = kind, epsilon: float = epsilon, best: Any = best
            ) -> Any:
                return scores_of(problem, Rival(kind, problem, epsilon, best).fit(problem.X, problem.y))

            found = repeated(min(3 if large else RIVAL_FITS, SLOW.get(name, FITS)), once)
            cells[f"{kind} {epsilon:g}"] = {**found, "setting": best, "tries": tries}
        print(name, json.dumps(cells), flush=True)
    return out


def searched(kind: str, inner: Problem, epsilon: float) -> tuple[dict[str, Any], int]:
    """The setting of a rival that does best on held-out rows at this ε, and how often each was tried."""
    tries = 1 if inner.X.shape[0] >= LARGE else 2
    trials = []
    for setting in settings(kind, inner):
        tried = [scores_of(inner, Rival(kind, inner, epsilon, setting).fit(inner.X, inner.y)) for _ in range(tries)]
        trials.append((float(np.mean([first for first, _ in tried])), setting))
    return max(trials, key=lambda trial: trial[0])[1], tries


def as_columns(problem: Problem) -> Problem | None:
    """The table as additive models take it: a frame with categories, or numbers with bounds; else ``None``."""
    if problem.task == "multiclass" or problem.bounds is None:
        return None
    if problem.frame is not None:
        return dataclasses.replace(problem, X=problem.frame[0], X_test=problem.frame[1])
    if isinstance(problem.X, np.ndarray):
        return problem
    import pandas as pd

    dense = [pd.DataFrame(X.toarray()) for X in (problem.X, problem.X_test)]
    if set(problem.bounds) == {(0.0, 1.0)}:  # indicators, as their code book says
        dense = [part.astype(bool) for part in dense]
    train, test = (part.rename(columns=lambda j: f"x{j}") for part in dense)
    return dataclasses.replace(problem, X=train, X_test=test)


def additive(names: list[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in names:
        problem = as_columns(PROBLEMS[name]())
        if problem is None:
            continue
        cells = out.setdefault(name, {})
        for epsilon, relation in itertools.product(ADDITIVE_EPSILONS, ("replace-one", "add-remove")):

            def once(problem: Problem = problem, epsilon: float = epsilon, relation: str = relation) -> Any:
                model = estimator(problem, epsilon, declared=True, additive=True, relation=relation)
                return scores_of(problem, model.fit(problem.X, problem.y))

            kind = "additive" if relation == "replace-one" else "additive" + EASED
            cells[f"{kind} {epsilon:g}"] = repeated(3 if len(problem.y) >= LARGE else FITS, once)
        print(name, json.dumps(cells), flush=True)
    return out


def peers(names: list[str]) -> dict[str, Any]:
    """Run :file:`table_peers.py` in an environment of its own on the tables written out for it."""
    if not (PEERS / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        # diffprivlib 0.6.6 lags behind scikit-learn; with 1.7.2 it works.
        packages = ["interpret-core==0.7.8", "diffprivlib==0.6.6", "pandas", "pyarrow", "scikit-learn<1.8"]
        subprocess.run([str(PEERS / "bin" / "pip"), "install", "-q", *packages], check=True)
    out: dict[str, Any] = {}
    folder = PEERS / "tables"
    folder.mkdir(exist_ok=True)
    for name in names:
        problem = PROBLEMS[name]()
        done = saved("peers").get(name, {})
        if problem.bounds is None:
            continue  # 20 000 sparse columns, which neither of them takes
        facts = {"task": problem.task, "done": list(done), **written(problem, folder)}
        (folder / f"{name}.json").write_text(json.dumps(facts))
        script = Path(__file__).parent / "table_peers.py"
        answer = subprocess.run(
            [str(PEERS / "bin" / "python"), str(script), str(folder / name)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        out[name] = {**done, **json.loads(answer.stdout.splitlines()[-1])}
        print(name, json.dumps(out[name]), flush=True)
    return out


def written(problem: Problem, folder: Path) -> dict[str, Any]:
    """Write a table's parts for the peers; what is public about its columns."""
    import pandas as pd

    parts = problem.frame
    if parts is None:
        dense = [X if isinstance(X, np.ndarray) else X.toarray() for X in (problem.X, problem.X_test)]
        parts = [pd.DataFrame(X, columns=[f"x{j}" for j in range(X.shape[1])]) for X in dense]
    for part, frame, y in zip(("train", "test"), parts, (problem.y, problem.y_test), strict=True):
        frame.assign(__target__=y).to_csv(folder / f"{problem.name}.{part}.csv", index=False)
    train = parts[0]
    words = {c: [str(v) for v in train[c].cat.categories] for c in train if str(train[c].dtype) == "category"}
    numeric = [c for c in train if c not in words]
    places = problem.numeric if problem.frame is not None else range(len(numeric))
    bounds = {c: problem.bounds[j] for c, j in zip(numeric, places, strict=True)}
    target = outward(problem.y) if problem.task == "regression" else None
    return {"bounds": bounds, "words": words, "target": target}


def report(names: list[str]) -> dict[str, Any]:
    """Gaps to the best private mean of each cell, and additive models beside DP-EBM, from what the runs saved."""
    parts = {p: saved(p) for p in RUNS}
    gaps: dict[str, list[tuple[float, str]]] = {}
    winners: dict[str, int] = {}
    lines = ["| table | n × d | " + " | ".join(f"ε = {e:g}" for e in EPSILONS) + " |", "|---" * 6 + "|"]
    for name in names:
        ours = parts["linear"].get(name)
        if ours is None:
            continue
        others = {**parts["rival"].get(name, {}), **parts["peers"].get(name, {})}
        columns = []
        for epsilon in EPSILONS:
            cells = {k: ours.get(f"{k} {epsilon:g}", {}).get("mean") for k in ("as is", "bounds")}
            known = {k: others.get(f"{k} {epsilon:g}", {}).get("mean") for k in RIVALS}
            rivals = {k: v for k, v in known.items() if v is not None}
            best_rival = max(rivals, key=lambda k: rivals[k], default=None)
            means = [v for v in cells.values() if v is not None]
            if best_rival is not None:
                means.append(rivals[best_rival])
                winners[best_rival] = winners.get(best_rival, 0) + 1
            size = "large" if ours["n"] >= LARGE else "small"
            alike = [v for v in (*cells.values(), *(rivals.get(k) for k in EQUALS)) if v is not None]
            eased = ours.get(f"bounds, add-remove {epsilon:g}", {}).get("mean")
            if eased is not None:  # every rival under the same relation, or under the harder one
                alike_eased = [others.get(f"{k}{EASED} {epsilon:g}", {}).get("mean") for k in RIVALS]
                best = max(*means, eased, *(v for v in alike_eased if v is not None))
                gaps.setdefault("small bounds, add-remove", []).append((best - eased, f"{name} {epsilon:g}"))
            for kind, value in cells.items():
                if alike and (value is not None or kind == "as is"):
                    value = ours["majority"] if value is None else value  # a refusal predicts nothing
                    gaps.setdefault(f"{size} {kind}", []).append((max(means) - value, f"{name} {epsilon:g}"))
                    same = f"{size} {kind}, rivals under replace-one"
                    gaps.setdefault(same, []).append((max(alike) - value, f"{name} {epsilon:g}"))
            shown = [("–" if v is None else short(v)) for v in cells.values()]
            shown.append("–" if best_rival is None else f"{short(rivals[best_rival])} {RIVALS[best_rival]}")
            columns.append(" / ".join(shown))
        lines.append(f"| {name} | {ours['n']} × {ours['d']} | " + " | ".join(columns) + " |")
    summary_of = {
        kind: {"mean": float(np.mean([g for g, _ in found])), "worst": sorted(found)[::-1][:4]}
        for kind, found in gaps.items()
    }
    beside, score = additive_beside(parts["additive"], parts["peers"])
    print("\n".join([*lines, "", *beside]))
    told = {"gaps": summary_of, "best rival": winners, "additive not behind": score}
    print(json.dumps(told, indent=1))
    return {**told, "table": lines, "additive": beside}


def additive_beside(ours: dict[str, Any], peers: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Additive models under replace-one and add-remove beside DP-EBM; in how many cells they are not lower."""
    lines = ["| table | " + " | ".join(f"ε = {e:g}" for e in ADDITIVE_EPSILONS) + " |", "|---" * 4 + "|"]
    score: dict[str, Any] = {}
    for name, cells in ours.items():
        row = []
        for epsilon in ADDITIVE_EPSILONS:
            peer = peers.get(name, {}).get(f"dp-ebm {epsilon:g}", {})
            trio = [cells.get(f"{kind} {epsilon:g}", {}) for kind in ("additive", "additive" + EASED)]
            for relation, cell in zip(("replace-one", "add-remove"), trio, strict=True):
                for what in ("mean", "auc"):
                    if peer.get(what) is None or cell.get(what) is None:
                        continue
                    found = score.setdefault(f"{relation} {what}", {"of": 0, "not behind": 0, "behind": []})
                    behind = round(peer[what], 3) - round(cell[what], 3)
                    found["of"] += 1
                    found["not behind"] += behind <= 0
                    if behind > 0:
                        found["behind"].append((round(behind, 3), f"{name} {epsilon:g}"))
            told = [" / ".join(short(c[k]) for k in ("mean", "auc") if c.get(k)) for c in (*trio, peer)]
            row.append(" – ".join(cell or "not run" for cell in told))
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines, score


def short(value: float) -> str:
    """.842, −.65"""
    return f"{value:.3f}".replace("0.", ".", 1).replace("-", "−")


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "linear"
    names = sys.argv[2:] or list(PROBLEMS)
    run = {"linear": linear, "rival": rival, "additive": additive, "peers": peers, "report": report}[what]
    if run is report:
        save(RESULTS / "tables_report.json", report(names))
        return
    for name in names:
        found = run([name])
        save(RESULTS / f"tables_{what}.json", {"tables": {**saved(what), **found}})


def saved(what: str) -> dict[str, Any]:
    """What earlier runs saved, by table."""
    path = RESULTS / f"tables_{what}.json"
    found: dict[str, Any] = json.loads(path.read_text())["tables"] if path.exists() else {}
    return found


if __name__ == "__main__":
    main()
