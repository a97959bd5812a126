"""What audits can see and what they cost: false alarms, power against too little noise, tightness, one-run audits.

Times are CPU seconds of this process (``time.process_time``), because the machine may be shared. Run with

    OMP_NUM_THREADS=1 python benchmarks/audit.py [STAGE ...]

where stages are probes, power, tightness, one-run, false-alarms, half-noise, quick-command and full-command; all
unless named. ``false-alarms=dp-agd,dp-gd`` measures these algorithms only and keeps the other rows. Results go to
``benchmarks/results/audit.json`` stage by stage, and curves of both bounds to ``audit_tightness.svg``.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from record import save

import quietgrad as qg
from quietgrad.assurance.audit.attacks import attacked, attacks_on
from quietgrad.assurance.audit.noise_checks import check_normals
from quietgrad.assurance.audit.replicas import central
from quietgrad.assurance.audit.running import run

RESULTS = Path(__file__).parent / "results"
MANY = 200
LOOPED = 400  # runs of each world where they are made one by one
SRM = qg.DPSRM(steps=6, batch_size=4, difference_clip=0.2)
BUDGET = qg.Budget(6.0, 1e-5, qg.Relation.REPLACE_ONE)


def quieter(factor: float) -> Callable[[Any, Any, bytes], Any]:
    """A curator that adds ``factor`` times the planned noise."""

    class Quieter:
        def __init__(self, objective: Any, data: Any, key: bytes) -> None:
            self.inner = central(objective, data, key)

        def initial(self) -> Any:
            return self.inner.initial()

        def open(self, plan: Any, **settings: Any) -> Any:
            return self.inner.open(replace(plan, noise_multiplier=plan.noise_multiplier * factor), **settings)

    return Quieter


def statistical(report: Any) -> bool:
    """Whether a layer that only sees transcripts, not the noise itself, reports a violation."""
    return any(f.verdict == "violation" and not f.layer.startswith("L0") for f in report.findings)


def false_alarms(names: Sequence[str] = tuple(attacked())) -> dict[str, Any]:
    """``MANY`` audits of every algorithm, its configurations in turn; fewer runs where they are made one by one."""
    found = {}
    for name in names:
        attacks = attacks_on(name)
        looped = [bool(run(a.algorithm, budget=a.budget, n=a.n, runs=200, game=a.game).notes) for a in attacks]
        accused, vacuous = 0, 0
        started = time.process_time()
        for k in range(MANY):
            attack = attacks[k % len(attacks)]
            runs = LOOPED if looped[k % len(attacks)] else 2000
            report = run(attack.algorithm, budget=attack.budget, n=attack.n, runs=runs, game=attack.game)
            accused += report.verdict == "violation"
            vacuous += report.vacuous
        seconds = (time.process_time() - started) / MANY
        found[name] = {
            "audits": MANY,
            "runs": sorted({LOOPED if one_by_one else 2000 for one_by_one in looped}),
            "false alarms": accused,
            "vacuous": vacuous,
            "CPU seconds per audit": round(seconds, 3),
            "date": now(),
        }
        print("false alarms", name, found[name], flush=True)
    return found


def power() -> list[dict[str, Any]]:
    """How often DP-SRM with too little noise is caught by its transcripts alone."""
    rows = []
    for factor, runs, audits in ((1.0, 2000, 100), (0.5, 2000, 100), (0.9, 20_000, 20), (0.95, 20_000, 20)):
        seconds, caught = [], 0
        for _ in range(audits):
            started = time.process_time()
            caught += statistical(run(SRM, budget=BUDGET, n=4, runs=runs, curator=quieter(factor)))
            seconds.append(time.process_time() - started)
        rows.append(
            {
                "noise": factor,
                "runs": runs,
                "audits": audits,
                "caught": caught,
                "median CPU seconds per audit": round(statistics.median(seconds), 4),
            }
        )
        print("power", rows[-1], flush=True)
    return rows


def tightness() -> list[dict[str, Any]]:
    """Lower bound ÷ claim with all steps visible, at ε = 6, 20000 runs; sampled DP-SGD by L2 at 200000 runs."""
    rows = []

    def row(what: str, algorithm: Any, steps: int, n: int, runs: int, budget: qg.Budget) -> None:
        report = run(algorithm, budget=budget, n=n, runs=runs)
        rows.append(
            {
                "what": what,
                "steps": steps,
                "runs": runs,
                "claimed": round(report.epsilon_claimed, 4),
                "lower": round(report.epsilon_lower, 4),
                "ratio": round(report.tightness, 3),
                "delta": budget.delta,
                "verdict": report.verdict,
            }
        )
        print("tightness", rows[-1], flush=True)

    budget = qg.Budget(6.0, 1e-5)
    row("single Gaussian release", qg.DPGD(steps=1), 1, 4, 20_000, budget)
    for steps in (1, 2, 5, 10, 20, 50):
        row("DP-SGD, every record", qg.DPSGD(steps=steps, batch_size=4), steps, 4, 20_000, budget)
        row("DP-SRM, every record", qg.DPSRM(steps=steps, batch_size=4), steps, 4, 20_000, budget)
    for steps in (1, 5, 20):
        sampled = qg.Budget(2.0, 1e-2)
        row("DP-SGD, Poisson 1/2", qg.DPSGD(steps=steps, batch_size=2), steps, 4, 200_000, sampled)
    return rows


def one_run() -> list[dict[str, Any]]:
    """One training of a logistic model with planted canaries, correct and with half the noise."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((2000, 50))
    y = (X[:, 0] > 0).astype(float)
    rows = []
    for canaries in (1000, 10_000):
        for factor in (1.0, 0.5):
            caught, lower, seconds = {"L3 one-run": 0, "L3 f-DP": 0, "L3 d′": 0}, [], []
            for seed in range(5):
                started = time.process_time()
                report = qg.audit.one_run(
                    qg.objectives.Logistic(), (X, y), qg.DPGD(steps=20), budget=qg.Budget(3.0, 1e-5), seed=seed,
                    canaries=canaries, curator=quieter(factor),
                )  # fmt: skip
                seconds.append(time.process_time() - started)
                lower.append(report.epsilon_lower)
                for finding in report.findings:
                    caught[finding.layer] += finding.verdict == "violation"
            rows.append(
                {
                    "canaries": canaries,
                    "noise": factor,
                    "claimed": 3.0,
                    "median lower": round(statistics.median(lower), 3),
                    "caught of 5": caught,
                    "median CPU seconds": round(statistics.median(seconds), 3),
                }
            )
            print("one run", rows[-1], flush=True)
    return rows


def command(*options: str) -> dict[str, float]:
    """Seconds of ``quietgrad audit --all``, as a process of its own, and the machine's load when it ended."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "quietgrad", "audit", "--all", *options], check=True, stdout=subprocess.DEVNULL
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "CPU seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "seconds": round(seconds, 1),
        "load": round(os.getloadavg()[1], 1),
    }


def plot(rows: list[dict[str, Any]]) -> None:
    """Claimed ε and lower bound against the number of steps."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.2))
    for what, marker in (("DP-SGD, every record", "o"), ("DP-SRM, every record", "s")):
        mine = [r for r in rows if r["what"] == what]
        axes.plot([r["steps"] for r in mine], [r["lower"] for r in mine], marker + "-", label=f"{what}: at least")
    axes.plot([r["steps"] for r in mine], [r["claimed"] for r in mine], "k--", label="claimed")
    axes.set(xlabel="steps, all visible", ylabel="ε at δ = 1e-5", ylim=(0, None), xscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "audit_tightness.svg")


def half_noise() -> list[dict[str, Any]]:
    """Which layers see half the noise missing, in every attack configuration at the size of ``--quick``."""
    rows = []
    for name in attacked():
        for attack in attacks_on(name):
            runs = round(2000 * attack.share)
            report = run(
                attack.algorithm,
                budget=attack.budget,
                n=attack.n,
                runs=runs,
                curator=quieter(0.5),
                game=attack.game,
                seed=5,
            )
            caught = sorted({f.layer for f in report.findings if f.verdict == "violation"})
            config = f"{name}: {attack.label}, {attack.budget.relation}"
            rows.append({"configuration": config, "runs": runs, "caught by": caught})
            print("half the noise", rows[-1], flush=True)
    return rows


def probes() -> dict[str, Any]:
    """How often the tests of noise over time accuse true normals at a countable level, and what they see."""
    rng = np.random.default_rng(0)
    level, draws, shape = 0.2, 2000, (256, 64)
    accused: Counter[str] = Counter()
    for _ in range(draws):
        accused.update(f.layer for f in check_normals(rng.standard_normal(shape), "", level) if f.verdict != "pass")
    bugs: dict[str, Callable[[Any], None]] = {
        "one release of 256 at 0.3 of the noise": lambda z: np.multiply(z[100], 0.3, out=z[100]),
        "every 64th release at 0.5": lambda z: np.multiply(z[5::64], 0.5, out=z[5::64]),
        "all releases at 0.96": lambda z: np.multiply(z, 0.96, out=z),
        "one coordinate of 64 at 0.6": lambda z: np.multiply(z[:, 9], 0.6, out=z[:, 9]),
        "one release used again": lambda z: np.copyto(z[200], z[40]),
        "a correlation of 0.1 with the release before": lambda z: np.add(z[1:], 0.1 * z[:-1], out=z[1:]),
    }
    seen = {}
    for bug, put in bugs.items():
        caught = 0
        for _ in range(50):
            z = rng.standard_normal(shape)
            put(z)
            caught += any(f.verdict != "pass" for f in check_normals(z, "", 1e-6))
        seen[bug] = f"{caught} of 50"
    return {
        "level of each layer": level / 4,
        "accused at that level": {layer: count / draws for layer, count in sorted(accused.items())},
        "sound probes": draws,
        "caught at 1e-6": seen,
    }


STAGES: dict[str, Callable[[], Any]] = {
    "probes": probes,
    "power": power,
    "tightness": tightness,
    "one-run": one_run,
    "false-alarms": false_alarms,
    "half-noise": half_noise,
    "quick-command": lambda: command("--quick"),
    "full-command": command,
}


def now() -> str:
    """The date and time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main() -> None:
    """Measure the stages asked for and write each as soon as it is done."""
    path = RESULTS / "audit.json"
    for asked in sys.argv[1:] or STAGES:
        stage, _, names = asked.partition("=")
        numbers = false_alarms(names.split(",")) if names else STAGES[stage]()
        measured = {"date": now(), "numbers": numbers}
        stages = json.loads(path.read_text())["stages"] if path.exists() else {}
        if names:
            measured["numbers"] = {**stages[stage]["numbers"], **numbers}
        save(path, {"clock": "CPU seconds (time.process_time)", "stages": {**stages, stage: measured}})
        if stage == "tightness":
            plot(measured["numbers"])


if __name__ == "__main__":
    main()
