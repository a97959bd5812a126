"""Where variance reduction pays: DP-GD beside SPIDER with split noise, on a curved valley with records that differ.

    OMP_NUM_THREADS=1 python reproduce/valley.py                  # no data needed
    OMP_NUM_THREADS=1 python reproduce/valley.py --finish         # further search where a comparison has a fault
    OMP_NUM_THREADS=1 python reproduce/valley.py --draw           # docs/_static/regimes.svg
    OMP_NUM_THREADS=1 python reproduce/valley.py --quick          # one setting each, seconds

Takes 25 CPU minutes. The risk is F(x) = ½(x₁ − 1)² + ½κ Σ(x_{i+1} − x_i²)², a chain of curved valleys (κ = 10,
d = 5) that is entered at x = 0 and left at x = 1. Record (i, ±) adds the slope ±ς·e_i, so every record's gradient
is about ς long while the mean is F's own, and all records have the same Hessian: G = 1.1ς is the clip of full
gradients in both methods, and M = 5κ, the largest curvature along the valley, bounds differences by M‖x − x′‖. What
varies is

- G/(M·path), with the path that descent without noise takes: how dear a full gradient is against a difference, and
- ν = ς√d/(nμ), the length of the noise of one full gradient that spends the whole budget μ (Gaussian DP).

Every release asks all n records, so budgets compose exactly: T releases of DP-GD have noise ς·1.1√T/(nμ) each;
SPIDER's K full gradients spend the share s of μ² and its T − K differences the rest. Both methods try the same
number of settings with common random numbers; the best by the mean of ‖∇F‖ is run again with fresh noise. A method
whose best number of steps, step size, momentum or split is the last of its list gets a longer list, until it is not
(``reproduce/comparisons.py``); ``--finish`` goes on around the best settings of a method that has tried less than
half of what the other has. A cell that still has a fault states no lead. K = 1 and momentum 0 end by nature.
Sums are those of infinitely many records of each kind, which saves the records; ``tests/methods/test_spider.py``
runs the library's own method on real ones and gets the same path.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quietgrad.charts import Lines, Series, to_svg_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.comparisons import Comparison, Contender, Searched
from reproduce.store import Row, print_table

Floats = npt.NDArray[np.float64]
KAPPA, DIM = 10.0, 5
SMOOTHNESS = 5.0 * KAPPA
ROOT = Path(__file__).parents[1]
FILE = ROOT / "reproduce" / "results" / "valley.json"
PICTURE = ROOT / "docs" / "_static" / "regimes.svg"
COMMAND = "OMP_NUM_THREADS=1 python reproduce/valley.py"
FAR = 1e3  # where a run that diverges is left


def value(x: Floats) -> Floats:
    """F; points are along the last axis."""
    bends = x[..., 1:] - x[..., :-1] ** 2
    return np.asarray(0.5 * KAPPA * (bends**2).sum(-1) + 0.5 * (x[..., 0] - 1.0) ** 2)


def gradient(x: Floats) -> Floats:
    """∇F."""
    bends = KAPPA * (x[..., 1:] - x[..., :-1] ** 2)
    out = np.zeros_like(x)
    out[..., 1:] = bends
    out[..., :-1] -= 2.0 * bends * x[..., :-1]
    out[..., 0] += x[..., 0] - 1.0
    return out


def clipped_mean(slope: Floats, spread: float, clip: float) -> Floats:
    """The mean over the 2d kinds of records of clip_C(∇F ± ς·e_i)."""
    square = (slope**2).sum(-1, keepdims=True)
    out = np.zeros_like(slope)
    for sign in (-spread, spread):
        length = np.sqrt(np.maximum(square + 2.0 * sign * slope + spread**2, 1e-300))
        weight = np.minimum(1.0, clip / length)
        out += weight.sum(-1, keepdims=True) * slope + sign * weight
    return np.asarray(out / (2.0 * slope.shape[-1]))


def path_length() -> float:
    """How far descent without noise walks from 0 to the minimum: the public radius of this family."""
    x, length = np.zeros(DIM), 0.0
    for _ in range(50_000):
        step = 0.02 * gradient(x)
        x, length = x - step, length + float(np.linalg.norm(step))
    return length


@dataclass(frozen=True)
class Cell:
    """One place of the picture: how records spread, and the noise of a whole budget's full gradient."""

    spread: float
    noise: float

    @property
    def clip(self) -> float:
        return 1.1 * self.spread

    @property
    def n_mu(self) -> float:
        return self.spread * math.sqrt(DIM) / self.noise


Settings = dict[str, Any]
DESCENT: dict[str, list[Any]] = {
    "learning_rate": [0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06],
    "momentum": [0.0, 0.9, 0.98, 0.995, 0.999],
    "decay": [False, True],
    "average": [False, True],
}
SPIDER: dict[str, list[Any]] = {
    "learning_rate": DESCENT["learning_rate"],
    "full_gradients": [1, 4],
    "split": [0.1, 0.3, 0.6, 0.85, 0.97],
    "decay": [False, True],
}
STEPS = [300, 1000, 3000, 10000]
NATURAL = {"momentum": 0.0, "full_gradients": 1}
LONGEST = 300_000


def column(settings: list[Settings], name: str) -> Floats:
    """One setting of many runs, to be broadcast over seeds and coordinates."""
    return np.array([each[name] for each in settings], dtype=np.float64)[:, None, None]


def descend(cell: Cell, steps: int, settings: list[Settings], rng: np.random.Generator, seeds: int) -> Floats:
    """DP-GD with every one of the settings at once; where each ends, by setting and seed."""
    eta, momentum = column(settings, "learning_rate"), column(settings, "momentum")
    decay, average = column(settings, "decay"), column(settings, "average")
    x = np.zeros((len(settings), seeds, DIM))
    velocity, total = np.zeros_like(x), np.zeros_like(x)
    noise = cell.clip * math.sqrt(steps) / cell.n_mu
    for t in range(steps):
        noisy = clipped_mean(gradient(x), cell.spread, cell.clip) + noise * rng.standard_normal((seeds, DIM))
        velocity = noisy if t == 0 else momentum * velocity + (1.0 - momentum) * noisy
        x = np.clip(x - eta * (1.0 - decay * t / steps) * velocity, -FAR, FAR)
        if 2 * t >= steps:
            total += x
    return np.where(average > 0, total / (steps - (steps + 1) // 2), x)


def spider(cell: Cell, steps: int, settings: list[Settings], rng: np.random.Generator, seeds: int) -> Floats:
    """SPIDER with split noise, with every one of the settings at once."""
    eta, decay = column(settings, "learning_rate"), column(settings, "decay")
    chains, split = column(settings, "full_gradients"), column(settings, "split")
    period = np.ceil(steps / chains)
    full = np.ceil(steps / period)
    full_noise = np.sqrt(full / split) * cell.clip / cell.n_mu
    difference_noise = np.sqrt((steps - full) / (1.0 - split)) * SMOOTHNESS / cell.n_mu
    x = np.zeros((len(settings), seeds, DIM))
    before, slope_before, estimate = x, gradient(x), np.zeros_like(x)
    for t in range(steps):
        slope, due = gradient(x), (t % period) == 0
        noise = rng.standard_normal((seeds, DIM))
        moved = np.sqrt(((x - before) ** 2).sum(-1, keepdims=True))
        change = slope - slope_before
        length = np.sqrt((change**2).sum(-1, keepdims=True))
        change = change * np.minimum(1.0, SMOOTHNESS * moved / np.maximum(length, 1e-300))
        estimate = estimate + change + difference_noise * moved * noise
        if due.any():
            fresh = clipped_mean(slope, cell.spread, cell.clip) + full_noise * noise
            estimate = np.where(due, fresh, estimate)
        before, slope_before = x, slope
        x = np.clip(x - eta * (1.0 - decay * t / steps) * estimate, -FAR, FAR)
    return x


METHODS: dict[str, tuple[Any, dict[str, list[Any]]]] = {"dp-gd": (descend, DESCENT), "dp-spider": (spider, SPIDER)}


def norms(points: Floats) -> Floats:
    """‖∇F‖ at the points; a run that diverged counts as far away."""
    return np.asarray(np.minimum(np.linalg.norm(gradient(points), axis=-1), FAR))


def search(
    name: str, cell: Cell, steps: int, seeds: int, lists: dict[str, list[Any]]
) -> list[tuple[float, Settings]]:
    """The mean of ‖∇F‖ of every setting with so many steps."""
    run, _ = METHODS[name]
    settings = [dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())]
    with np.errstate(all="ignore"):
        found = norms(run(cell, steps, settings, np.random.default_rng(1), seeds)).mean(-1)
    return [(float(score), {"steps": steps, **each}) for score, each in zip(found, settings, strict=True)]


def beyond(key: str, values: list[Any], chosen: Any) -> Any:
    """A value further out than the end of the list that was chosen; ``None`` if it is not at an end."""
    if not Searched(key, values, chosen, NATURAL.get(key)).at_an_edge():
        return None
    up = chosen == max(values)
    if key in ("split", "momentum"):  # odds of four to one more
        odds = chosen / (1.0 - chosen) * (4.0 if up else 0.25)
        return odds / (1.0 + odds)
    factor = {"learning_rate": 2, "steps": 3, "full_gradients": 4}[key]
    further = chosen * factor if up else chosen / factor
    return further if key == "learning_rate" else max(1, round(further))


def best(name: str, cell: Cell, seeds: int) -> tuple[Settings, dict[str, list[Any]], int]:
    """The best settings, the lists they were chosen from, and how many were tried; lists grow at their ends."""
    lists = {"steps": list(STEPS), **{key: list(values) for key, values in METHODS[name][1].items()}}
    tried: list[tuple[float, Settings]] = []

    def more(key: str, values: list[Any]) -> None:
        asked = {**lists, key: values}
        rest = {each: asked[each] for each in METHODS[name][1]}
        for steps in asked["steps"]:
            tried.extend(search(name, cell, steps, seeds, rest))

    more("steps", STEPS)
    while True:
        chosen = min(tried, key=lambda each: each[0])[1]
        grown = {
            key: further
            for key, values in lists.items()
            if not isinstance(values[0], bool)
            and (further := beyond(key, values, chosen[key])) is not None
            and (key != "steps" or further <= LONGEST)
        }
        if not grown:
            return chosen, lists, len(tried)
        key, further = next(iter(grown.items()))
        more(key, [further])
        lists[key] = sorted([*lists[key], further])


def around(name: str, chosen: Settings, steps: list[int]) -> dict[str, list[Any]]:
    """Lists of values next to the chosen ones, closer than those of the grid."""
    lists: dict[str, list[Any]] = {}
    for key, value in chosen.items():
        if isinstance(value, bool):
            lists[key] = [False, True]
        elif key == "steps":
            lists[key] = steps
        elif key == "full_gradients":
            lists[key] = sorted({max(1, value // 2), value, 2 * value})
        elif key == "learning_rate":
            lists[key] = [0.35 * value, 0.7 * value, value, 1.4 * value]
        else:
            odds = value / (1.0 - value)
            lists[key] = [each / (1.0 + each) for each in (odds / 2.0, odds, 2.0 * odds)]
    return lists


def finished(name: str, cell: Cell, row: Row, searched: Contender, seeds: int) -> tuple[Settings, Contender]:
    """Search on around the best settings, once."""
    chosen = row["settings"]
    known = {each.name: list(each.values) for each in searched.searched}
    scores = search(name, cell, chosen["steps"], seeds, {k: [v] for k, v in chosen.items() if k != "steps"})
    lists = around(name, chosen, [max(1, round(chosen["steps"] * factor)) for factor in (0.6, 1.7)])
    steps = lists.pop("steps")
    for count in steps:
        scores += search(name, cell, count, seeds, lists)
    # A longer search finds luckier noise too: the best three and the old choice are told apart by other noise.
    finalists = [chosen, *(each[1] for each in sorted(scores, key=lambda each: each[0])[:3])]
    chosen = min(finalists, key=lambda each: _mean_norm(name, cell, each, np.random.default_rng(2), 10 * seeds))
    for key, values in known.items():
        known[key] = sorted({*values, *(steps if key == "steps" else lists[key])})
    ordered = [Searched(key, values, chosen[key], NATURAL.get(key)) for key, values in known.items()]
    return chosen, Contender(name, ordered, searched.tried + len(scores) - 1, cell.clip)


def _mean_norm(name: str, cell: Cell, given: Settings, rng: np.random.Generator, seeds: int) -> float:
    return float(norms(METHODS[name][0](cell, given["steps"], [given], rng, seeds)).mean())


def finish(rows: list[Row], seeds: int, runs: int) -> None:
    """Go on for the method that has tried less than half of what the other has."""
    for place, row in enumerate(rows):
        comparison = Comparison.from_json(row["comparison"])
        cell = Cell(row["spread"], row["noise"])
        most = max(each.tried for each in comparison.contenders)
        contenders = []
        for each in comparison.contenders:
            if 2 * each.tried >= most:
                contenders.append(each)
                continue
            chosen, more = finished(each.method, cell, row[each.method], each, seeds)
            row[each.method] = ended(each.method, cell, chosen, more.tried, runs)
            contenders.append(more)
        rows[place] = judged(row, Comparison(comparison.what, contenders))


def ended(name: str, cell: Cell, chosen: Settings, tried: int, runs: int) -> Row:
    """Where the chosen settings end with noise that chose nothing."""
    run, _ = METHODS[name]
    points = run(cell, chosen["steps"], [chosen], np.random.default_rng(20_000), runs)[0]
    lengths, risks = norms(points), np.minimum(value(points), FAR)
    return {
        "gradient_norm": float(lengths.mean()),
        "gradient_norm_se": float(lengths.std(ddof=1) / math.sqrt(runs)),
        "risk": float(risks.mean()),
        "risk_se": float(risks.std(ddof=1) / math.sqrt(runs)),
        "settings": chosen,
        "tried": tried,
    }


def contender(name: str, cell: Cell, seeds: int, runs: int) -> tuple[Contender, Row]:
    """A method's best settings, run again."""
    chosen, lists, tried = best(name, cell, seeds)
    ordered = [
        Searched(key, values, chosen[key], NATURAL.get(key))
        for key, values in lists.items()
        if not isinstance(values[0], bool)
    ]
    return Contender(name, ordered, tried, cell.clip), ended(name, cell, chosen, tried, runs)


def measured(cell: Cell, path: float, seeds: int, runs: int) -> Row:
    """Both methods at one place of the picture."""
    pairs = {name: contender(name, cell, seeds, runs) for name in METHODS}
    place = {"spread": cell.spread, "noise": cell.noise, "n_mu": cell.n_mu}
    row = {"ratio": cell.clip / (SMOOTHNESS * path), **place, **{name: pair[1] for name, pair in pairs.items()}}
    return judged(row, Comparison("valley", [pair[0] for pair in pairs.values()]))


def judged(row: Row, comparison: Comparison) -> Row:
    """The row with what the comparison says."""
    descent, reduced = (row[name] for name in METHODS)
    apart = math.hypot(descent["gradient_norm_se"], reduced["gradient_norm_se"])
    place = {key: value for key, value in row.items() if key not in ("gain", "standard_errors", "faults")}
    place["comparison"] = comparison.to_json()
    if faults := list(comparison.faults()):  # then no lead is stated
        return {**place, "faults": faults}
    lead = (descent["gradient_norm"] - reduced["gradient_norm"]) / apart
    return {**place, "gain": descent["gradient_norm"] / reduced["gradient_norm"], "standard_errors": lead}


def draw(rows: list[Row]) -> None:
    """The picture of ``docs/choosing.md``."""
    lines = []
    for noise in dict.fromkeys(row["noise"] for row in rows):
        mine = [row for row in rows if row["noise"] == noise and "gain" in row]
        bars = [
            row["gain"] * math.hypot(*(row[m]["gradient_norm_se"] / row[m]["gradient_norm"] for m in METHODS))
            for row in mine
        ]
        lines.append(Series(f"ν = {noise:g}", [(row["ratio"], row["gain"]) for row in mine], bars))
    lines.append(Series("equal", [(rows[0]["ratio"], 1.0)], level=True))
    chart = Lines(
        "Curved valley: when differences pay", lines, "G/(M·path)", "‖∇F‖ of DP-GD ÷ that of DP-SPIDER",
        log_x=True, log_y=True,
    )  # fmt: skip
    PICTURE.write_text(to_svg_file(chart), encoding="utf-8")


def main() -> None:
    """Measure all cells, or go on with those that have a fault."""
    parser = argparse.ArgumentParser(description="Where variance reduction pays.")
    parser.add_argument("--quick", action="store_true", help="one setting each, nothing written")
    parser.add_argument("--finish", action="store_true", help="search further where a comparison has a fault")
    parser.add_argument("--draw", action="store_true", help="draw the picture from the results")
    asked = parser.parse_args()
    if asked.finish or asked.draw:
        record = json.loads(FILE.read_text(encoding="utf-8"))
        rows: list[Row] = record["rows"]
        if asked.finish:
            finish(rows, 4, 200)
            write(record["path"], rows)
        draw(rows)
        print_table(**tables({"rows": rows})[0])
        return
    if asked.quick:
        quick()
        return
    path, rows = path_length(), []
    for spread, noise in itertools.product([10.0, 60.0, 300.0, 1500.0], [0.0025, 0.01, 0.04]):
        rows.append(measured(Cell(spread, noise), path, 4, 200))
        write(path, rows)
    print_table(**tables({"rows": rows})[0])


def quick() -> None:
    """Both methods at one setting each, with few runs."""
    cell, shared = Cell(1500.0, 0.0025), {"learning_rate": 0.016, "decay": False}
    own: dict[str, Settings] = {
        "dp-gd": {"momentum": 0.98, "average": True},
        "dp-spider": {"full_gradients": 1, "split": 0.6},
    }
    rng, body = np.random.default_rng(0), []
    for name, (run, _) in METHODS.items():
        points = run(cell, 1000, [{**shared, **own[name]}], rng, 20)
        body.append([name, float(norms(points).mean())])
    print_table("Curved valley, 1000 steps, 20 runs, nothing searched (not a result)", ["method", "‖∇F‖"], body)


def write(path: float, rows: list[Row]) -> None:
    """Keep the results."""
    about = {"path": path, "smoothness": SMOOTHNESS, "command": f"{COMMAND}; {COMMAND} --finish"}
    save(FILE, {**about, "rows": rows, "tables": tables({"rows": rows})})


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What `quietgrad reproduce valley` shows."""
    return [_table(record["rows"])]


def _table(rows: list[Row]) -> dict[str, Any]:
    columns = ["G/(M·path)", "ν", "‖∇F‖ DP-GD", "± se", "‖∇F‖ SPIDER", "± se", "gain", "standard errors"]
    return {
        "title": "DP-GD and SPIDER with split noise on the curved valley",
        "columns": columns,
        "rows": [
            [
                row["ratio"], row["noise"], row["dp-gd"]["gradient_norm"], row["dp-gd"]["gradient_norm_se"],
                row["dp-spider"]["gradient_norm"], row["dp-spider"]["gradient_norm_se"], row.get("gain"),
                row.get("standard_errors"),
            ]
            for row in rows
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()
