"""Statistics by groups on Adult (education × sex): error beside OpenDP and diffprivlib, and coverage of intervals.

``PEERS_PYTHON=... python -m benchmarks.groups``, the interpreter of an environment with opendp[polars] and
diffprivlib. Errors are root mean squares over cells, medians over repeats. Means are judged in cells of 100 records
and more. Coverage is over all cells, those of a dozen records too. Adult is read from ``QUIETGRAD_DATA``.

``--only undeclared`` measures columns without bounds again, and ``--only counts`` the law of the noise of one table
of counts beside OpenDP's, discrete Laplace noise of the same ε; neither needs peers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import save
from benchmarks.table_suite import _read
from quietgrad.estimators import describe

NAMES = ["age", "workclass", "weight", "education", "years", "marital", "occupation", "relationship", "race", "sex"]
NAMES += ["gain", "loss", "hours", "country", "income"]
BOUNDS = {"age": [0, 100], "hours": [0, 100], "years": [0, 20], "gain": [0, 100_000], "loss": [0, 5000]}
TASKS: dict[str, list[str]] = {
    "count": [],
    "count and mean": ["age"],
    "count and two means": ["age", "hours"],
    "count and five means": list(BOUNDS),
}
RESULT = Path(__file__).parent / "results" / "groups.json"


def errors(answers: list[dict[str, Any]], counts: Any, means: dict[str, Any]) -> dict[str, float]:
    """Median over repeats of the root mean square error of counts, and of means as a part of their range."""
    out = {
        "count": statistics.median(float(np.sqrt(np.mean((np.array(a["counts"]) - counts) ** 2))) for a in answers)
    }
    big = counts >= 100
    for name, exact in means.items():
        width = BOUNDS[name][1] - BOUNDS[name][0]
        off = [np.sqrt(np.mean((np.array(a["means"][name])[big] - exact[big]) ** 2)) for a in answers]
        out[f"mean {name}"] = statistics.median(float(x) for x in off) / width
    return out


def ours(frame: Any, columns: list[str], epsilon: float, repeats: int, cover: dict[str, list[bool]]) -> list[Any]:
    """The answers of describe(by=), and which intervals held the exact number."""
    listed = {name: sorted(frame[name].unique()) for name in ("education", "sex")}
    schema = {name: {"kind": "category", "categories": values} for name, values in listed.items()}
    schema |= {name: {"kind": "integer", "bounds": BOUNDS[name], "missing": False} for name in columns}
    groups = frame.groupby(["education", "sex"])
    answers = []
    for _ in range(repeats):
        told = describe(
            frame, schema, by=["education", "sex"], epsilon=epsilon, delta=1e-6, statistics=("count", "mean", "sum")
        )
        answer: dict[str, Any] = {"counts": [], "means": {name: [] for name in columns}}
        for row in told.rows:
            if row["education"] == "other":
                continue
            part = groups.get_group((row["education"], row["sex"]))
            if row["statistic"] == "count":
                answer["counts"].append(row["value"])
                exact = float(len(part))
            else:
                exact = float(getattr(part[row["column"]], row["statistic"])())
                if row["statistic"] == "mean":
                    value = row["value"] if row["value"] is not None else sum(BOUNDS[row["column"]]) / 2
                    answer["means"][row["column"]].append(value)
            cover.setdefault(row["statistic"], []).append(row["lower"] - 1e-6 <= exact <= row["upper"] + 1e-6)
        answers.append(answer)
    return answers


def more_coverage(frame: Any, epsilon: float, repeats: int) -> dict[str, Any]:
    """Coverage of quantiles and shares by sex and race, and how many undeclared groups are found."""
    listed = {name: sorted(frame[name].unique()) for name in ("race", "sex", "income")}
    schema: dict[str, Any] = {name: {"kind": "category", "categories": values} for name, values in listed.items()}
    schema["age"] = {"kind": "integer", "bounds": [0, 100], "missing": False}
    held: dict[str, list[bool]] = {}
    for _ in range(repeats):
        told = describe(
            frame, schema, by=["race", "sex"], epsilon=epsilon, delta=1e-6, statistics=("quantiles", "shares")
        )
        for row in told.rows:
            if row["race"] == "other" and row["sex"] == "other":
                continue
            part = frame[(frame.race == row["race"]) & (frame.sex == row["sex"])][row["column"]]
            if row["statistic"] == "share":
                exact = float((part == row["level"]).mean())
            else:
                exact = float(np.quantile(part, int(row["statistic"][1:]) / 100, method="inverted_cdf"))
            kind = "share" if row["statistic"] == "share" else "quantile"
            held.setdefault(kind, []).append(row["lower"] - 1e-6 <= exact <= row["upper"] + 1e-6)
    found = []
    for _ in range(repeats):
        told = describe(frame, {"age": schema["age"]}, by=["education", "sex"], epsilon=epsilon, delta=1e-5,
                        statistics=("count", "mean"))  # fmt: skip
        found.append(sum(row["statistic"] == "count" for row in told.rows) - 1)
    cells = int(frame.groupby(["education", "sex"]).ngroups)
    share = {kind: {"covered": float(np.mean(each)), "intervals": len(each)} for kind, each in held.items()}
    return {**share, "undeclared cells found": {"median": statistics.median(found), "of": cells}}


def generated(rng: np.random.Generator, n: int = 2000) -> Any:
    """Columns of several shapes in three groups: none has public bounds."""
    import pandas as pd

    return pd.DataFrame({
        "group": rng.choice(["a", "b", "c"], n), "whole 0 to 8": pd.array(rng.integers(0, 9, n), dtype="Int64"),
        "normal 20 ± 5": rng.normal(20.0, 5.0, n), "normal 0 ± 1": rng.normal(0.0, 1.0, n),
        "even 100 to 110": rng.uniform(100.0, 110.0, n), "exponential": rng.exponential(50.0, n),
        "lognormal": np.exp(rng.normal(10.0, 1.0, n)),
    })  # fmt: skip


def undeclared_coverage(frame: Any, epsilon: float, repeats: int) -> dict[str, Any]:
    """By column without bounds: how often an interval holds the mean of its cut values, and of its values."""
    rng, held = np.random.default_rng(5), dict[str, dict[str, list[bool]]]()

    def one(rows: Any, by: str, columns: list[str]) -> None:
        listed = {"kind": "category", "categories": sorted(rows[by].unique())}
        kinds = {c: {"kind": "number" if rows[c].dtype.kind == "f" else "integer"} for c in columns}
        told = describe(
            rows, {by: listed, **kinds}, by=by, epsilon=epsilon, delta=1e-6, statistics=("count", "mean")
        )
        for row in told.rows:
            if row["statistic"] != "mean" or row[by] == "other":
                continue
            values = rows[rows[by] == row[by]][row["column"]].astype(float)
            cell = held.setdefault(row["column"], {"cut": [], "true": [], "hidden": []})
            cell["hidden"].append(row["range"] == "hidden")
            if row["range"] == "found":
                cut = values.clip(row["cut_low"], row["cut_high"]).mean()
                cell["cut"].append(row["lower"] - 1e-6 <= cut <= row["upper"] + 1e-6)
                cell["true"].append(row["lower"] - 1e-6 <= values.mean() <= row["upper"] + 1e-6)

    for _ in range(repeats):
        rows = generated(rng)
        one(rows, "group", [name for name in rows if name != "group"])
        one(frame, "race", list(BOUNDS))
    return {
        name: {
            "mean of cut values": float(np.mean(cell["cut"])), "mean": float(np.mean(cell["true"])),
            "hidden": float(np.mean(cell["hidden"])), "intervals": len(cell["cut"]),
        }
        for name, cell in held.items()
    }  # fmt: skip


def count_law(epsilon: float, repeats: int, cells: int = 32) -> dict[str, float]:
    """The deviation of the noise of one table of counts, beside the exact one of discrete Laplace noise."""
    import pandas as pd

    rng = np.random.default_rng(0)
    names = [f"c{k}" for k in range(cells)]
    rows = pd.DataFrame({"cell": rng.choice(names, 100 * cells)})
    exact = rows.cell.value_counts()
    schema, off = {"cell": {"kind": "category", "categories": names}}, []
    for _ in range(repeats):
        told = describe(rows, schema, by="cell", epsilon=epsilon, delta=1e-6, statistics=("count",))
        off += [row["value"] - exact[row["cell"]] for row in told.rows if row["cell"] != "other"]
    q = np.exp(-epsilon)
    deviation, discrete = float(np.sqrt(np.mean(np.square(off)))), float(np.sqrt(2.0 * q) / (1.0 - q))
    return {
        "deviation": deviation, "standard error": float(np.std(np.square(off)) / len(off) ** 0.5 / 2 / deviation),
        "discrete laplace": discrete, "laplace": 2.0**0.5 / epsilon, "ratio": deviation / discrete,
        "noises": len(off),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--only", choices=["undeclared", "counts"], help="measure this part again")
    asked = parser.parse_args()
    os.environ["QUIETGRAD_STATE"] = tempfile.mkdtemp()
    frame = _read("adult.data.gz", header=None, names=NAMES)
    if asked.only is not None:
        kept = json.loads(RESULT.read_text())
        part = (
            count_law(1.0, asked.repeats)
            if asked.only == "counts"
            else undeclared_coverage(frame, 1.0, asked.repeats)
        )
        name = {"counts": "noise of one table of counts", "undeclared": "undeclared bounds"}[asked.only]
        RESULT.write_text(json.dumps(kept | {name: {"repeats": asked.repeats, **part}}, indent=1) + "\n")
        print(json.dumps(part, indent=1))
        return
    joint = frame.groupby(["education", "sex"]).ngroup().to_numpy()
    size = int(joint.max()) + 1
    counts = np.bincount(joint, minlength=size).astype(float)
    numbers: dict[str, Any] = {
        "repeats": asked.repeats,
        "epsilon": 1.0,
        "cells": size,
        "smallest cell": counts.min(),
    }
    cover: dict[str, list[bool]] = {}
    for name, columns in TASKS.items():
        values = {column: frame[column].to_numpy() for column in columns}
        means = {column: np.bincount(joint, x, size) / counts for column, x in values.items()}
        task = {
            "epsilon": 1.0, "groups": size, "cells": joint.tolist(), "repeats": asked.repeats,
            "columns": {column: x.tolist() for column, x in values.items()}, "bounds": BOUNDS,
        }  # fmt: skip
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(task, file)
            file.flush()
            side = Path(__file__).parent / "peers" / "groups_side.py"
            answer = subprocess.run(
                [os.environ["PEERS_PYTHON"], side, file.name], check=True, capture_output=True, text=True
            )
        peers = json.loads(answer.stdout)
        numbers["peers"] = peers.pop("versions")
        found = {peer: errors(answers, counts, means) for peer, answers in peers.items()}
        own = errors(ours(frame, columns, 1.0, asked.repeats, cover), counts, means)
        ratios = {peer: {key: own[key] / error[key] for key in own} for peer, error in found.items()}
        numbers[name] = {"quietgrad": own, **found, "ratio": ratios}
        print(name, json.dumps(ratios, indent=1), flush=True)
    covered = {kind: {"covered": float(np.mean(each)), "intervals": len(each)} for kind, each in cover.items()}
    numbers["coverage"] = covered | more_coverage(frame, 1.0, max(5, asked.repeats // 4))
    numbers["undeclared bounds"] = {"repeats": 60, **undeclared_coverage(frame, 1.0, 60)}
    numbers["noise of one table of counts"] = {"repeats": 400, **count_law(1.0, 400)}
    print(json.dumps(numbers["coverage"], indent=1))
    save(RESULT, numbers, "pandas")


if __name__ == "__main__":
    main()
