"""Figures 1 to 16 of paper 002: weighted averaging over parties, five sets: accuracy and optimal gap.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/weighted_average.py
    OMP_NUM_THREADS=1 python reproduce/weighted_average.py --quick         # scikit-learn's breast cancer, seconds

Takes 25 CPU minutes. δ = 1e-3, replace-one, rows of norm 1 so that G = 1. The paper shows curves without numbers;
what is compared is what its text says of them. Over ε ∈ {.01, .05, .1, .25} (figures 1 and 3–11: m = 32, 2, 4, 8,
16) sizes are random, as in the paper; ours are proportional to numbers drawn uniformly from [.2, 1] by a public
seed. Over u = n_max/n_min (2 and 12: m = 16, ε = .05; 13–14: m = 32, ε = .1; 15–16: m = 8, ε = .01) half of the
parties have u times as many rows as the others, as in the paper; u is 1, 3, 5, 7, 9, or 1 to 5 on the two small
sets. KDD Cup is 70 000 rows drawn by a public seed. The optimal gap is F(θ) − min F of the unregularised loss on
the training rows.

As printed: T = 1000 local steps, σ² = c·T·ln(1/δ)/(nε)² with c = 16, the least its proof allows; the unweighted
average has m·n_min in place of n. η is the best of the paper's five, chosen once for a set at ε = 0.05, on a fifth
of the training rows, by the printed method on one party; the test rows have no part in it. Two runs each where
m = 16 and u varies, one elsewhere. The claimed ε is not what holds, so nothing printed is called private: beside it
stands the true ε for the server, who sees each party's model, and the least for an observer of the average.

With true ε: (iv) one noisy weighted sum of local fits, secure sums by mpc; the unweighted sum; and, where m = 32
and ε varies, (ii) every party adds its own noise, (i) a noisy sum per round, and DP-GD on all rows in one place.
One public rule for all sets: λ = 7e-4/√ε and 100 steps for the fits, 60 steps of 6 for (i) and DP-GD. 100 draws
of noise, or 5 runs ((i): through a trusted coordinator, whose noise is that of mpc). ε is that of one fit; the
search for η is not in it, as in the paper.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

import quietgrad as qg
from quietgrad.core.accounting.closed_form_accountants import gaussian_mu
from quietgrad.data import load
from quietgrad.federation import Party, simulate
from quietgrad.federation.simulation import assemble
from quietgrad.methods.output_perturbation import step_size
from quietgrad.objectives import L2, Logistic
from quietgrad.tables.queries.local_fit import local_fit

sys.path.insert(0, str(Path(__file__).parents[1]))
from reproduce.output_perturbation import least_risk
from reproduce.printed_average import Truth, printed_average, truth
from reproduce.store import Row, Store, Table, print_table

Floats = npt.NDArray[np.float64]
DELTA, DRAWS, RUNS, STEPS = 1e-3, 100, 5, 1000
RATES = (0.01, 0.05, 0.1, 0.5, 1.0)
EPSILONS = (0.01, 0.05, 0.1, 0.25)
# Which of the paper's figures a cell belongs to: (accuracy, optimal gap).
OVER_EPSILON = {32: (1, 3), 2: (4, 5), 4: (6, 7), 8: (8, 9), 16: (10, 11)}
OVER_U = {(16, 0.05): (2, 12), (32, 0.1): (13, 14), (8, 0.01): (15, 16)}
LARGE = ("kddcup99", "adult", "bank-additional")
SMALL = ("breast-cancer-wisconsin", "credit-fraud")
FIT, CENTRAL = qg.WeightedAverage(steps=100), qg.DPGD(steps=60, learning_rate=6.0)
ROUNDS = qg.WeightedAverage(method="rounds", steps=60, learning_rate=6.0)


class Study:
    """One data set at one ε: the loss with its public penalty, and how a noisy model scores on the test rows."""

    def __init__(self, table: Any, epsilon: float) -> None:
        self.X, self.y = table.X, np.asarray(table.y)
        self.truth, self.n = np.asarray(table.y_test) > 0, int(table.X.shape[0])
        self.budget = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)
        self.objective = Logistic(regularizer=L2(7e-4 / math.sqrt(epsilon)), row_bound=1.0, rows="normalize")
        self.test = self.objective.prepare((table.X_test, table.y_test))
        rate = step_size(FIT.learning_rate, self.objective)
        self.bound = local_fit(self.objective, self.n, FIT.steps, rate).bound
        self.rng = np.random.default_rng(0)
        self.plain = Logistic(row_bound=1.0, rows="normalize")
        self.train = self.plain.prepare((self.X, self.y))
        self.least = 0.0

    def gap(self, params: Floats) -> float:
        """F(θ) − min F of the unregularised loss on the training rows."""
        return float(self.plain.risk(self.train, params)) - self.least

    def accuracy(self, params: Floats) -> float:
        """On the test rows."""
        return float(np.mean((self.objective.decision(self.test, params) > 0.0) == self.truth))

    def noisy(self, exact: Floats, sigma: float) -> tuple[float, float]:
        """Mean accuracy and mean gap over draws of the noise (the gap over ten of them)."""
        draws = exact + self.rng.normal(size=(DRAWS, len(exact))) * sigma
        return (
            statistics.fmean(self.accuracy(each) for each in draws),
            statistics.fmean(self.gap(each) for each in draws[:10]),
        )

    def centres(self) -> dict[str, float]:
        """All rows in one place: without noise, one noisy fit, and DP-GD."""
        rows = (self.X, self.y)
        whole = qg.minimize(self.objective, rows, FIT, budget=None).params
        sigma = qg.plan(FIT, n=self.n, budget=self.budget).noise_multiplier * self.bound
        runs = [qg.minimize(self.objective, rows, CENTRAL, budget=self.budget) for _ in range(2 * RUNS)]
        accuracy, gap = self.noisy(whole, sigma)
        return {
            "no_noise": self.accuracy(whole),
            "central_one_shot": accuracy,
            "central_one_shot_gap": gap,
            "central_dp_gd": statistics.fmean(self.accuracy(run.params) for run in runs),
        }

    def one_shot(self, parties: list[Party], weights: Any) -> tuple[float, float, float]:
        """Accuracy, gap and proved ε of a noisy sum of local fits; they are made once, the noise is drawn often."""
        exact = simulate(FIT, self.objective, parties, budget=None, weights=weights).params
        settings: dict[str, Any] = {"budget": self.budget, "trust": "secure", "secure": "mpc", "weights": weights}
        plan, _ = assemble(FIT, self.objective, parties, **settings)
        spread = plan.noise_multiplier * self.bound * max(plan.factors)
        return *self.noisy(exact, spread * math.sqrt(plan.variance_factor)), plan.epsilon()

    def repeated(self, algorithm: Any, parties: list[Party], trust: Any) -> float:
        """Mean accuracy of whole private runs."""
        runs = [simulate(algorithm, self.objective, parties, budget=self.budget, trust=trust) for _ in range(RUNS)]
        return statistics.fmean(self.accuracy(run.params) for run in runs)


def split(study: Study, weights: Floats) -> list[Party]:
    """The rows, shuffled by a public seed, among parties of sizes proportional to ``weights``."""
    order = np.random.default_rng(0).permutation(study.n)
    cuts = np.round(np.cumsum(weights) / weights.sum() * study.n).astype(int)[:-1]
    return [Party(study.X[part], study.y[part], ids=part) for part in np.split(order, cuts)]


def random_sizes(m: int) -> Floats:
    """Uneven without a rule."""
    return np.random.default_rng(m).uniform(0.2, 1.0, m)


def two_groups(m: int, u: float) -> Floats:
    """Half of the parties have u times as many rows as the other half."""
    return np.repeat([u, 1.0], [m // 2, m - m // 2])


def unnamed(parties: list[Party]) -> list[Party]:
    """Without record ids: every party draws for itself, as in a real federation."""
    return [Party(party.X, party.y) for party in parties]


def printed(
    parties: list[Party], epsilon: float, rate: float, steps: int, weights: str = "size", run: int = 0
) -> tuple[Floats, Truth]:
    """Algorithm 1 as printed, which is not private, and what is true of it."""
    algorithm = qg.WeightedAverage(steps=steps, learning_rate=rate)
    objective = Logistic(row_bound=1.0, rows="normalize")
    budget = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)
    tables = [party.data for party in parties]
    return printed_average(algorithm, objective, tables, budget, weighted=weights == "size", seed=run)


def chosen_rate(table: Any, epsilon: float, steps: int, rates: tuple[float, ...] = RATES) -> float:
    """The paper's η with the best accuracy on a fixed fifth of the training rows, one party, one run each."""
    n = int(table.X.shape[0])
    order = np.random.default_rng(20).permutation(n)
    held, inner = order[: n // 5], order[n // 5 :]
    labels = np.asarray(table.y)
    objective = Logistic(row_bound=1.0, rows="normalize")
    look, learn = objective.prepare((table.X[held], labels[held])), Party(table.X[inner], labels[inner])

    def right(rate: float) -> float:
        params = printed([learn], epsilon, rate, steps)[0]
        return float(np.mean((objective.decision(look, params) > 0.0) == (labels[held] > 0)))

    return max(rates, key=right)


def least_constant(parties: list[Party], epsilon: float, steps: int) -> dict[str, float]:
    """The true ε if c were the least for which the claim holds with one party: what another reading allows."""
    sizes = [party.size for party in parties]
    n = sum(sizes)
    sigma = 2.0 * math.sqrt(steps) / (n * gaussian_mu(epsilon, DELTA))
    told = truth(sizes, [s / n for s in sizes], lipschitz=1.0, steps=steps, sigma=sigma, claimed=epsilon)
    seen = told.epsilons(DELTA)
    return {f"{name}_least_c": seen[name] for name in ("epsilon_server", "epsilon_observer_at_least")}


def cell(
    study: Study,
    weights: Floats,
    epsilon: float,
    rate: float,
    *,
    steps: int = STEPS,
    runs: int = 1,
    more: bool = False,
) -> Row:
    """Every method on one split of the rows among parties of these sizes."""
    parties = split(study, weights)
    sizes = [party.size for party in parties]
    row: Row = {"m": len(parties), "u": max(sizes) / min(sizes), "epsilon": epsilon, "runs": runs}
    for label, rule in (("printed_weighted", "size"), ("printed_unweighted", "equal")):
        made = [printed(parties, epsilon, rate, steps, rule, run) for run in range(runs)]
        row[label] = statistics.fmean(study.accuracy(params) for params, _ in made)
        row[f"{label}_gap"] = statistics.fmean(study.gap(params) for params, _ in made)
        if runs > 1:
            row[f"{label}_se"] = statistics.stdev(study.accuracy(params) for params, _ in made) / math.sqrt(runs)
        seen = made[0][1].epsilons(DELTA)
        row.update(seen if rule == "size" else {f"{key}_unweighted": seen[key] for key in seen})
    row.update(least_constant(parties, epsilon, steps))
    row["iv"], row["iv_gap"], row["epsilon_proved"] = study.one_shot(parties, "size")
    row["unweighted"], row["unweighted_gap"], _ = study.one_shot(parties, "equal")
    if more:
        row["ii"] = study.repeated(FIT, unnamed(parties), "local")
        row["i"] = study.repeated(ROUNDS, unnamed(parties), "curator")
    return row


def cells(name: str) -> list[tuple[str, int, float | None, float]]:
    """(axis, m, u, ε) of every point of the sixteen figures on one set."""
    levels = (1.0, 3.0, 5.0, 7.0, 9.0) if name in LARGE else (1.0, 2.0, 3.0, 4.0, 5.0)
    over_u = [("u", m, u, epsilon) for m, epsilon in OVER_U for u in levels]
    over_epsilon: list[tuple[str, int, float | None, float]] = [
        ("ε", m, None, epsilon) for m in OVER_EPSILON for epsilon in EPSILONS
    ]
    return [*over_u[:5], *over_epsilon, *over_u[5:]]


def run_set(name: str) -> None:
    """All points of one data set that are not in the results yet."""
    wanted = [
        point for point in cells(name)
        if STORE.find("rows", data=name, axis=point[0], m=point[1], target=point[2], epsilon=point[3]) is None
    ]  # fmt: skip
    if not wanted:
        return
    table: Any = load(name)
    if name in LARGE:  # one-hot columns: mostly zeros
        table = replace(table, X=sparse.csr_matrix(table.X), X_test=sparse.csr_matrix(table.X_test))
    rate = next((row["rate"] for row in STORE.rows("rows") if row["data"] == name), None)
    rate = chosen_rate(table, 0.05, STEPS) if rate is None else rate
    whole = [Party(table.X, np.asarray(table.y))]
    studies: dict[float, tuple[Study, Row]] = {}
    least = None
    for axis, m, u, epsilon in wanted:
        if epsilon not in studies:
            study = Study(table, epsilon)
            least = least_risk(study.plain, study.train) if least is None else least
            study.least = least
            alone, _ = printed(whole, epsilon, rate, STEPS)
            lone = {"printed_central": study.accuracy(alone), "printed_central_gap": study.gap(alone), "rate": rate}
            studies[epsilon] = (study, {**study.centres(), **lone})
        study, centres = studies[epsilon]
        weights = random_sizes(m) if u is None else two_groups(m, u)
        runs, more = (2 if axis == "u" and m == 16 else 1), axis == "ε" and m == 32
        found = cell(study, weights, epsilon, rate, runs=runs, more=more)
        figures = OVER_EPSILON[m] if u is None else OVER_U[m, epsilon]
        STORE.keep("rows", {"data": name, "figures": figures, "axis": axis, "target": u, **found, **centres})
        show("", STORE.rows("rows")[-1:])


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Each pair of figures as a table of accuracies and gaps, with the ε that is true of what is printed."""
    columns = [
        "data", "m", "u", "ε", "WD-DP as printed", "gap", "its ε: server", "its ε: observer ≥",
        "printed unweighted", "gap", "printed, one party", "gap", "(iv)", "gap", "unweighted, true ε", "gap",
    ]  # fmt: skip
    keys = ("data", "m", "u", "epsilon", "printed_weighted", "printed_weighted_gap", "epsilon_server",
            "epsilon_observer_at_least", "printed_unweighted", "printed_unweighted_gap", "printed_central",
            "printed_central_gap", "iv", "iv_gap", "unweighted", "unweighted_gap")  # fmt: skip
    found = []
    for figures in (*OVER_EPSILON.values(), *OVER_U.values()):
        body = [[row.get(key) for key in keys] for row in rows["rows"] if tuple(row["figures"]) == figures]
        if body:
            body.sort(key=lambda line: ((*LARGE, *SMALL).index(line[0]), line[3], line[2]))
            found.append({"title": "Figures {} and {}".format(*figures), "columns": columns, "rows": body})
    return found


STORE = Store(
    Path(__file__).parent / "results" / "weighted_average.json",
    "python reproduce/weighted_average.py",
    {"relation": "replace-one", "delta": DELTA, "steps_as_printed": STEPS},
    kinds=("rows",),
    tables=tables,
)


def show(title: str, rows: list[Row]) -> None:
    """Test accuracies, and the ε that is true."""
    columns = ["data", "m", "u", "claimed ε", "WD-DP as printed", "its true ε, server", "unweighted as printed",
               "(iv)", "unweighted", "proved ε"]  # fmt: skip
    keys = ("data", "m", "u", "epsilon", "printed_weighted", "epsilon_server", "printed_unweighted", "iv",
            "unweighted", "epsilon_proved")  # fmt: skip
    print_table(title, columns, [[row[key] for key in keys] for row in rows])


def main() -> None:
    """Run the figures; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set, one split; nothing is saved")
    parser.add_argument("--only", help="one data set; the others stay as they are")
    arguments = parser.parse_args()
    if arguments.quick:
        table, epsilon = load("breast-cancer"), 0.25
        rate = chosen_rate(table, epsilon, 50, (0.1, 1.0))
        found = cell(Study(table, epsilon), two_groups(4, 3.0), epsilon, rate, steps=50, more=True)
        title = "scikit-learn's breast cancer, 50 steps (not a result of the paper): test accuracy"
        show(title, [{"data": "breast-cancer", **found}])
        return
    for name in ("adult", "bank-additional", *SMALL, "kddcup99"):
        if arguments.only in (None, name):
            run_set(name)


if __name__ == "__main__":
    main()
