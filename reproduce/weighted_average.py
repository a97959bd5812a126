"""Figures 1 to 16 of paper 002: weighted averaging over parties, five sets, against ε, unevenness u and parties m.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/weighted_average.py
    OMP_NUM_THREADS=1 python reproduce/weighted_average.py --quick         # scikit-learn's breast cancer, seconds

Takes 6 CPU minutes. Accuracy on held-out test rows, δ = 1e-3, replace-one, rows of norm 1 so that G = 1. The paper
shows curves without numbers; what is compared is what its text says of them. The figure over ε has m = 32 and u = 9
(the paper: random sizes), that over u has m = 16 and ε = 0.05, that over m has u = 5 and ε = 0.05. Sets of a few
hundred rows stop at u = 5, as in the paper. KDD Cup is 70 000 rows drawn by a public seed.

As printed: T = 1000 local steps, σ² = c·T·ln(1/δ)/(nε)² with c = 16, the least its proof allows; the unweighted
average has m·n_min in place of n. η is the best of the paper's five, chosen once for a set at ε = 0.05, on a fifth
of the training rows, by the printed method on one party; the test rows have no part in it. One run each. The
claimed ε is not what holds, so nothing printed is called private: beside it stands the true ε for the server, who
sees each party's model, and the least for an observer of the average.

With true ε: (iv) one noisy weighted sum of local fits, secure sums by mpc; the unweighted sum; (ii) every party
adds its own noise; (i) a noisy sum per round; and one-shot and DP-GD on all rows in one place. One public rule for
all sets: λ = 7e-4/√ε and 100 steps for the fits, 60 steps of 6 for (i) and DP-GD. 100 draws of noise, or 5 runs
((i): through a trusted coordinator, whose noise is that of mpc). ε is that of one fit; the search for η is not in
it, as in the paper.
"""

from __future__ import annotations

import argparse
import json
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
from quietgrad.data import load
from quietgrad.federation import Party, deal, simulate
from quietgrad.federation.printed_average import truth
from quietgrad.federation.simulation import assemble
from quietgrad.objectives import L2, Logistic
from quietgrad.objectives.queries.local_fit import local_fit
from quietgrad.privacy.gaussian import gaussian_mu

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULTS = Path(__file__).parent / "results" / "weighted_average.json"
Floats = npt.NDArray[np.float64]
DELTA, DRAWS, RUNS, STEPS = 1e-3, 100, 5, 1000
RATES = (0.01, 0.05, 0.1, 0.5, 1.0)
EPSILONS = (0.01, 0.05, 0.1, 0.25)
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
        self.bound = local_fit(self.objective, self.n, FIT.steps, FIT.step_size(self.objective)).bound
        self.rng = np.random.default_rng(0)

    def accuracy(self, params: Floats) -> float:
        """On the test rows."""
        return float(np.mean((self.objective.decision(self.test, params) > 0.0) == self.truth))

    def noisy(self, exact: Floats, sigma: float) -> float:
        """Mean accuracy over draws of the noise."""
        draws = self.rng.normal(size=(DRAWS, len(exact))) * sigma
        return statistics.fmean(self.accuracy(exact + each) for each in draws)

    def centres(self) -> dict[str, float]:
        """All rows in one place: without noise, one noisy fit, and DP-GD."""
        rows = (self.X, self.y)
        whole = qg.minimize(self.objective, rows, FIT, budget=None).params
        sigma = qg.plan(FIT, n=self.n, budget=self.budget).noise_multiplier * self.bound
        runs = [qg.minimize(self.objective, rows, CENTRAL, budget=self.budget) for _ in range(2 * RUNS)]
        return {
            "no_noise": self.accuracy(whole),
            "central_one_shot": self.noisy(whole, sigma),
            "central_dp_gd": statistics.fmean(self.accuracy(run.params) for run in runs),
        }

    def one_shot(self, parties: list[Party], weights: Any) -> tuple[float, float]:
        """Accuracy and proved ε of one noisy sum of local fits; the fits are made once, the noise drawn often."""
        exact = simulate(FIT, self.objective, parties, budget=None, weights=weights).params
        settings: dict[str, Any] = {"budget": self.budget, "trust": "secure", "secure": "mpc", "weights": weights}
        plan, _ = assemble(FIT, self.objective, parties, **settings)
        spread = plan.noise_multiplier * self.bound * plan.largest_factor
        return self.noisy(exact, spread * math.sqrt(plan.variance_factor)), plan.epsilon()

    def repeated(self, algorithm: Any, parties: list[Party], trust: Any) -> float:
        """Mean accuracy of whole private runs."""
        runs = [simulate(algorithm, self.objective, parties, budget=self.budget, trust=trust) for _ in range(RUNS)]
        return statistics.fmean(self.accuracy(run.params) for run in runs)


def unnamed(parties: list[Party]) -> list[Party]:
    """Without record ids: every party draws for itself, as in a real federation."""
    return [Party(party.X, party.y) for party in parties]


def printed(parties: list[Party], epsilon: float, rate: float, steps: int, weights: Any = "size") -> Any:
    """Algorithm 1 as printed; its result says what is true."""
    algorithm = qg.WeightedAverage(steps=steps, learning_rate=rate, noise="paper")
    objective = Logistic(row_bound=1.0, rows="normalize")
    budget = qg.Budget(epsilon, DELTA, qg.Relation.REPLACE_ONE)
    return simulate(algorithm, objective, parties, budget=budget, weights=weights)


def chosen_rate(table: Any, epsilon: float, steps: int, rates: tuple[float, ...] = RATES) -> float:
    """The paper's η with the best accuracy on a fixed fifth of the training rows, one party, one run each."""
    n = int(table.X.shape[0])
    order = np.random.default_rng(20).permutation(n)
    held, inner = order[: n // 5], order[n // 5 :]
    labels = np.asarray(table.y)
    objective = Logistic(row_bound=1.0, rows="normalize")
    look, learn = objective.prepare((table.X[held], labels[held])), Party(table.X[inner], labels[inner])

    def right(rate: float) -> float:
        params = printed([learn], epsilon, rate, steps).params
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


def cell(study: Study, m: int, u: float, epsilon: float, rate: float, steps: int = STEPS) -> dict[str, Any]:
    """Every method on one split of the rows among m parties."""
    parties = deal(study.X, study.y, m, unevenness=u)
    row: dict[str, Any] = {"m": m, "u": u, "epsilon": epsilon}
    for label, weights in (("printed_weighted", "size"), ("printed_unweighted", "equal")):
        run = printed(parties, epsilon, rate, steps, weights)
        row[label] = study.accuracy(run.params)
        seen = {key: run.details[key] for key in run.details if key.startswith("epsilon_")}
        row.update(seen if weights == "size" else {f"{key}_unweighted": seen[key] for key in seen})
    row.update(least_constant(parties, epsilon, steps))
    row["iv"], row["epsilon_proved"] = study.one_shot(parties, "size")
    row["unweighted"], _ = study.one_shot(parties, "equal")
    row["ii"] = study.repeated(FIT, unnamed(parties), "local")
    row["i"] = study.repeated(ROUNDS, unnamed(parties), "curator")
    return row


def rows_of(name: str) -> list[dict[str, Any]]:
    """The three figures on one data set."""
    table: Any = load(name)
    if name in LARGE:  # one-hot columns: mostly zeros
        table = replace(table, X=sparse.csr_matrix(table.X), X_test=sparse.csr_matrix(table.X_test))
    unevenness = (1.0, 3.0, 9.0) if name in LARGE else (1.0, 3.0, 5.0)
    cells = [
        *(("ε", 32, unevenness[-1], epsilon) for epsilon in EPSILONS),
        *(("u", 16, u, 0.05) for u in unevenness),
        *(("m", m, 5.0, 0.05) for m in (2, 8)),
    ]
    studies, rows, rate = {}, [], chosen_rate(table, 0.05, STEPS)
    for epsilon in EPSILONS:
        study = Study(table, epsilon)
        alone = study.accuracy(printed([Party(table.X, np.asarray(table.y))], epsilon, rate, STEPS).params)
        studies[epsilon] = (study, {**study.centres(), "printed_central": alone, "rate": rate})
    for figure, m, u, epsilon in cells:
        study, centres = studies[epsilon]
        rows.append({"data": name, "figure": figure, **cell(study, m, u, epsilon, rate), **centres})
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True)
    return rows


def tables(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Each figure as a table of accuracies, with the ε that is true of what is printed."""
    columns = [
        "data", "m", "u", "ε", "WD-DP as printed", "its ε: server", "its ε: observer ≥", "printed unweighted",
        "printed, one party", "(iv)", "unweighted", "(ii)", "(i)", "DP-GD, one place",
    ]  # fmt: skip
    keys = ("data", "m", "u", "epsilon", "printed_weighted", "epsilon_server", "epsilon_observer_at_least",
            "printed_unweighted", "printed_central", "iv", "unweighted", "ii", "i", "central_dp_gd")  # fmt: skip
    found = []
    for figure in ("ε", "u", "m"):
        rows = [[row[key] for key in keys] for row in record["rows"] if row["figure"] == figure]
        found.append({"title": f"Test accuracy against {figure}", "columns": columns, "rows": rows})
    return found


def keep(name: str, rows: list[dict[str, Any]]) -> None:
    """Write one data set's rows in place of older ones."""
    old: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    merged = [row for row in old if row["data"] != name] + rows
    merged.sort(key=lambda row: (*LARGE, *SMALL).index(row["data"]))
    record = {"relation": "replace-one", "delta": DELTA, "steps_as_printed": STEPS, "rows": merged}
    save(RESULTS, {"command": "python reproduce/weighted_average.py", **record, "tables": tables(record)})


def main() -> None:
    """Run the figures; a quick run keeps nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set, one split; nothing is saved")
    parser.add_argument("--only", help="one data set; the others stay as they are")
    arguments = parser.parse_args()
    if arguments.quick:
        table, epsilon = load("breast-cancer"), 0.25
        rate = chosen_rate(table, epsilon, 50, (0.1, 1.0))
        for key, value in cell(Study(table, epsilon), 4, 3.0, epsilon, rate, 50).items():
            print(f"{key}: {value:.4g}")
        return
    for name in (*LARGE, *SMALL):
        if arguments.only in (None, name):
            keep(name, rows_of(name))


if __name__ == "__main__":
    main()
