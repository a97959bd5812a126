"""Table 3 of paper 004: output perturbation against Bassily's SGD on five UCI sets, error and time.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/output_perturbation.py
    OMP_NUM_THREADS=1 python reproduce/output_perturbation.py --quick      # scikit-learn's sets, seconds

Takes 15 CPU minutes. Error is F(w) − min F on the training rows, as in the paper: there is no test set and nothing
is chosen by looking at a result. Replace-one, δ = 1e-3.

The paper leaves the scale of its rows and its guess D ≥ ‖ŵ‖ open. Both follow roughly from its run times, which are
∝ T: the strongly convex rows give (D/L)², the ratio to the convex ones gives β = R²/4. So rows are normalised to
R = 1 (Bank), 6.3 (Adult), 3.3 (CreditCard), and D/L = 0.2, 0.77, 0.71; Wine and Bike run too fast to tell: R = 1,
D/L = 0.5. Huber's threshold is 1, wine's target its quality, bike's the hundreds of rides.

Two noises for each method, everything else equal: *paper*, as printed, with the ε that is really proved for it; and
*true*, calibrated to ε by the accountant. Output perturbation runs T steps of η = 1/(μ+β), or 1/β, with T from
Theorems 2 and 3 (Θ read as 1); the fit is made once and its noise drawn 100 times. RRPSGD and Bassily's SGD take
(n/b)² steps of b records, fixed-size batches, 10 runs (5 on Adult and Bank); b = 50 as in the paper on Wine, larger
elsewhere (`BATCH`), which spends as much privacy for fewer gradients. Their rates are the theorems'; the ball has
radius 5.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

import quietgrad as qg
from quietgrad.core.accounting import events
from quietgrad.core.accounting.accounting import account
from quietgrad.data import load
from quietgrad.objectives import L2, Huber, Logistic
from quietgrad.tables.queries.local_fit import local_fit

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.store import print_table

RESULTS = Path(__file__).parent / "results" / "output_perturbation.json"
Floats = npt.NDArray[np.float64]
EPSILONS, DELTA, RADIUS = (0.1, 0.5, 1.0, 2.0), 1e-3, 5.0

# (error ours, error Bassily, seconds ours, seconds Bassily) at ε = 0.1, 0.5, 1, 2, as printed.
PAPER: dict[tuple[str, float], tuple[tuple[float, float, float, float], ...]] = {
    ("bank", 0.0): ((0.3983, 2.2552, 12.613, 518.67), (0.2231, 1.4585, 36.796, 519.33),
                    (0.1459, 1.0203, 58.305, 519.02), (0.0838, 0.7824, 92.501, 518.27)),
    ("bank", 0.1): ((0.2566, 0.4829, 20.483, 518.03), (0.0106, 0.4090, 40.541, 519.44),
                    (0.0025, 0.3387, 49.311, 516.73), (0.0005, 0.2475, 57.947, 520.17)),
    ("adult", 0.0): ((0.0499, 0.6229, 23.813, 250.50), (0.0208, 0.6081, 69.536, 254.14),
                     (0.0122, 0.4781, 110.20, 254.18), (0.0065, 0.3691, 175.01, 253.72)),
    ("adult", 0.1): ((3.2039, 5.2166, 112.09, 256.70), (0.1287, 5.1532, 193.98, 255.36),
                     (0.0309, 5.1148, 229.23, 255.69), (0.0080, 5.1009, 264.23, 257.23)),
    ("credit-default", 0.0): ((0.0293, 0.4106, 4.9595, 190.30), (0.0102, 0.4220, 14.591, 190.89),
                              (0.0053, 0.3140, 22.983, 188.67), (0.0024, 0.2708, 36.721, 188.86)),
    ("credit-default", 0.1): ((0.3643, 1.3271, 13.664, 190.36), (0.0141, 1.2973, 22.012, 189.97),
                              (0.0035, 1.2792, 25.743, 188.81), (0.0008, 1.2501, 29.256, 187.97)),
    ("wine-quality", 0.0): ((0.6061, 6.1755, 0.1672, 6.3859), (0.2487, 4.1900, 0.4328, 6.3828),
                            (0.1713, 3.0972, 0.7469, 6.4234), (0.1110, 1.3609, 1.1719, 6.3016)),
    ("wine-quality", 0.5): ((1.0842, 8.2900, 0.0922, 6.4328), (0.0364, 7.9584, 0.1437, 6.3625),
                            (0.0101, 6.5471, 0.1891, 6.5391), (0.0024, 5.3811, 0.1812, 6.4484)),
    ("bike", 0.0): ((5.4659, 35.279, 0.1531, 6.4953), (4.0404, 30.822, 0.4375, 6.2375),
                    (3.2768, 27.196, 0.6922, 6.2734), (2.4081, 23.865, 1.1766, 6.3969)),
    ("bike", 0.5): ((0.0555, 3.0770, 0.1031, 6.5766), (0.0301, 3.0448, 0.1578, 6.5094),
                    (0.0242, 2.1792, 0.1625, 6.4094), (0.0232, 1.0406, 0.1984, 6.3625)),
}  # fmt: skip
ROWS = {"bank": 1.0, "adult": 6.3, "credit-default": 3.3}  # R; 1 elsewhere
GUESS = {"bank": 0.2, "adult": 0.77, "credit-default": 0.71}  # D/L; 0.5 elsewhere
BATCH = {"wine-quality": 50, "bike": 200, "breast-cancer": 25, "diabetes": 25}  # 500 elsewhere


@dataclass(frozen=True)
class Problem:
    """One data set with its loss; ``guess`` is D, the public guess of ‖ŵ‖."""

    name: str
    objective: Any
    table: tuple[Any, Any]
    strength: float
    guess: float
    start_loss: float

    @property
    def n(self) -> int:
        return len(self.table[1])

    @property
    def d(self) -> int:
        return int(self.table[0].shape[1])

    @property
    def lipschitz(self) -> float:
        return float(self.objective.constants().lipschitz)

    @property
    def smoothness(self) -> float:
        """β of the regularised loss."""
        return float(self.objective.constants().smoothness)


def problem(name: str, strength: float) -> Problem:
    """All rows of the set (its training file for Adult, which has the paper's 32 561), rows of norm R."""
    data = load(name)
    X, y = np.asarray(data.X), np.asarray(data.y)
    if name != "adult":
        assert data.X_test is not None
        X, y = np.concatenate([X, np.asarray(data.X_test)]), np.concatenate([y, np.asarray(data.y_test)])
    settings: dict[str, Any] = {"regularizer": L2(strength), "row_bound": ROWS.get(name, 1.0), "rows": "normalize"}
    objective: Any
    if data.task == "binary":
        objective, start_loss = Logistic(**settings), math.log(2.0)
    else:
        assert data.label_bounds is not None
        unit = 1.0 if name == "wine-quality" else 100.0
        objective, start_loss, y = Huber(1.0, **settings), data.label_bounds[1] / unit, y / unit
    guess = GUESS.get(name, 0.5) * float(objective.constants().lipschitz)
    return Problem(name, objective, (X, y), strength, guess, start_loss)


def least_risk(objective: Any, records: Any) -> float:
    """min F by L-BFGS, without privacy: what errors are measured from."""
    found = minimize(
        lambda w: (objective.risk(records, w), objective.risk_gradient(records, w)),
        objective.initial(records), jac=True, method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 10_000, "ftol": 1e-15, "gtol": 1e-9},
    )  # fmt: skip
    return float(found.fun)


def steps_of(p: Problem, epsilon: float) -> int:
    """T of Theorem 2 (strongly convex) or 3 (convex), Θ read as 1."""
    beta, mu = p.smoothness, p.strength
    ratio = (p.n * epsilon * p.guess / p.lipschitz) ** 2 / (p.d * math.log(1 / DELTA))
    if mu:
        return max(1, round((mu * mu + beta * beta) / (mu * beta) * math.log(max(math.e, mu * mu * ratio))))
    return max(1, round((beta * beta * ratio) ** (1 / 3)))


def output_perturbation(p: Problem, records: Any, least: float, epsilon: float, draws: int) -> dict[str, Any]:
    """Algorithm 1: one fit, ``draws`` noises of the printed size and as many of the true one."""
    beta, mu = p.smoothness, p.strength
    rate, steps = (1 / (mu + beta) if mu else 1 / beta), steps_of(p, epsilon)
    algorithm = qg.OutputPerturbation(steps=steps, learning_rate=rate)
    budget = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)
    began = time.process_time()
    run = qg.minimize(p.objective, p.table, algorithm, budget=budget)
    seconds = time.process_time() - began
    exact = qg.minimize(p.objective, p.table, algorithm, budget=None).params
    bound = local_fit(p.objective, p.n, steps, rate).bound
    printed = 5 * p.lipschitz * (mu + beta) / (p.n * mu * beta) if mu else 3 * p.lipschitz * steps * rate / p.n
    sigma = math.sqrt(2 * math.log(2 / DELTA)) * printed / epsilon
    rng = np.random.default_rng(0)

    def errors(scale: float) -> list[float]:
        noises = rng.normal(size=(draws, p.d)) * scale
        return [p.objective.risk(records, exact + each) - least for each in noises]

    relation = qg.Relation.REPLACE_ONE
    return {
        "method": "output perturbation", "steps": steps, "cpu_seconds": seconds,
        **_both(errors(sigma), errors(run.privacy.noise_multiplier * bound)),
        "epsilon_of_paper_noise": account(events.Gaussian(sigma / bound), delta=DELTA, relation=relation),
        "epsilon_proved": run.privacy.epsilon, "error_without_noise": p.objective.risk(records, exact) - least,
    }  # fmt: skip


def _both(paper: list[float], true: list[float]) -> dict[str, Any]:
    parts = (("paper_noise", paper), ("true_noise", true))
    means = {f"error_{name}": statistics.fmean(errors) for name, errors in parts}
    spread = {f"error_{name}_se": statistics.stdev(errors) / math.sqrt(len(errors)) for name, errors in parts}
    return {"runs": len(paper), **means, **spread}


def printed_noise(cls: Any, n: int, epsilon: float) -> float:
    """σ/C on the sum of a batch as paper 004 prints it, for RRPSGD and for Bassily's SGD."""
    if cls is qg.RRPSGD:
        return 2 * math.sqrt(math.log(3 * n / DELTA) * math.log(2 / DELTA)) / epsilon
    return math.sqrt(32 * math.log(n / DELTA) * math.log(1 / DELTA)) / epsilon


def noisy_sgd(p: Problem, cls: Any, least: float, epsilon: float, runs: int) -> dict[str, Any]:
    """RRPSGD or Bassily's SGD under its printed and under the true noise, rates by their theorems."""
    budget, batch = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE), BATCH.get(p.name, 500)
    records = p.objective.prepare(p.table)
    found: dict[str, Any] = {}
    for noise in ("paper", "tight"):
        shape = {"batch_size": batch, "clip": p.lipschitz, "sampling": "fixed-size"}
        draft = cls.for_data(p.n, **shape)
        printed = printed_noise(cls, p.n, epsilon) if noise == "paper" else None
        z = qg.plan(draft, n=p.n, budget=budget).noise_multiplier if printed is None else printed
        squared = p.lipschitz**2 * (1 + p.d * (z / batch) ** 2)  # E‖noisy gradient‖², at most
        if cls is qg.RRPSGD:
            reach = math.sqrt(2 * p.start_loss / p.smoothness)  # D_F with F* ≥ 0, public
            rate = min(1 / p.smoothness, reach / math.sqrt(squared * draft.steps))
            algorithm = cls.for_data(p.n, **shape, learning_rate=rate, smoothness=p.smoothness)
        else:
            more = {"learning_rate": 2 * RADIUS / math.sqrt(squared), "strong_convexity": p.strength}
            algorithm = cls.for_data(p.n, **shape, **more, radius=RADIUS)
        began = time.process_time()
        fits = [
            qg.minimize(p.objective, p.table, algorithm, budget=budget, noise_multiplier=printed)
            for _ in range(runs)
        ]
        seconds = (time.process_time() - began) / runs
        found[noise] = [p.objective.risk(records, fit.params) - least for fit in fits]
        found[f"epsilon {noise}"] = fits[0].privacy.epsilon
    return {
        "method": "RRPSGD" if cls is qg.RRPSGD else "Bassily SGD", "steps": draft.steps, "batch_size": batch,
        "cpu_seconds": seconds, **_both(found["paper"], found["tight"]),
        "epsilon_of_paper_noise": found["epsilon paper"], "epsilon_proved": found["epsilon tight"],
    }  # fmt: skip


def rows_of(name: str, strength: float, draws: int, runs: int) -> list[dict[str, Any]]:
    """All ε and methods of one set and one μ."""
    p = problem(name, strength)
    records = p.objective.prepare(p.table)
    least = least_risk(p.objective, records)
    rows = []
    for index, epsilon in enumerate(EPSILONS):
        for row in (
            output_perturbation(p, records, least, epsilon, draws),
            noisy_sgd(p, qg.RRPSGD, least, epsilon, runs),
            noisy_sgd(p, qg.BassilySGD, least, epsilon, runs),
        ):
            printed = PAPER.get((name, strength))
            place = {"output perturbation": 0, "Bassily SGD": 1}.get(row["method"])
            known = printed is not None and place is not None
            row = {
                "data": name, "n": p.n, "d": p.d, "mu": strength, "epsilon": epsilon, **row,
                "paper_error": printed[index][place] if known else None,  # type: ignore[index]
                "paper_seconds": printed[index][place + 2] if known else None,  # type: ignore[index,operator]
            }  # fmt: skip
            rows.append(row)
    return rows


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The paper's table beside ours."""
    columns = ("data", "μ", "ε", "method", "paper", "ours, paper's noise", "its proved ε", "ours, true noise",
               "paper s", "ours CPU s")  # fmt: skip
    keys = ("data", "mu", "epsilon", "method", "paper_error", "error_paper_noise", "epsilon_of_paper_noise",
            "error_true_noise", "paper_seconds", "cpu_seconds")  # fmt: skip
    rows = [[row[key] for key in keys] for row in record["rows"]]
    return [{"title": "F(w) − min F, δ = 1e-3, replace-one", "columns": list(columns), "rows": rows}]


def _shown(table: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The columns that mean something on sets which the paper does not have."""
    wanted = [i for i, column in enumerate(table["columns"]) if not column.startswith("paper")]
    return [table["columns"][i] for i in wanted], [[row[i] for i in wanted] for row in table["rows"]]


def keep(rows: list[dict[str, Any]]) -> None:
    """Write the rows of one set and one μ in place of older ones; the file is read again for the others."""
    old: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    fresh = {(row["data"], row["mu"]) for row in rows}
    merged = [row for row in old if (row["data"], row["mu"]) not in fresh] + rows
    merged.sort(key=lambda row: list(PAPER).index((row["data"], row["mu"])))
    about = {"relation": "replace-one", "delta": DELTA, "radius": RADIUS, "rows": merged}
    save(RESULTS, {"command": "python reproduce/output_perturbation.py", **about, "tables": tables(about)})


def main() -> None:
    """Run the table; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="scikit-learn's sets, few runs; nothing is saved")
    parser.add_argument("--runs", type=int, help="of RRPSGD and Bassily's SGD (default: 10; 5 on Adult and Bank)")
    parser.add_argument("--only", help="one part, such as bank@0.1; the others stay as they are")
    arguments = parser.parse_args()
    if arguments.quick:
        rows = [
            row for name, strength in (("breast-cancer", 0.1), ("diabetes", 0.0))
            for row in rows_of(name, strength, 10, 2)
        ]  # fmt: skip
        (table,) = tables({"rows": rows})
        print_table("scikit-learn's sets, few runs (the paper has others): " + table["title"], *_shown(table))
        return
    for name, strength in PAPER:
        if arguments.only in (None, f"{name}@{strength:g}"):
            runs = arguments.runs or (5 if name in ("adult", "bank") else 10)
            keep(rows := rows_of(name, strength, 100, runs))
            print_table(f"{name}, μ = {strength:g}", *_shown(tables({"rows": rows})[0]))


if __name__ == "__main__":
    main()
