"""Claims of real runs of other libraries, and the four misstatements that quietgrad-verify finds in them.

It runs in an environment of its own, because these libraries do not fit into ours. It imports nothing of quietgrad:

    python3 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0
    /tmp/peers/bin/pip install opacus diffprivlib 'scikit-learn<1.7' dp-accounting==0.6.0 opendp jax-privacy flwr
    PYTHONPATH=verifier/src /tmp/peers/bin/python benchmarks/foreign_claims.py

``results/foreign_claims.json`` holds, for each run, the ε that the library printed, the ε that is proved, and the
verdict. ``results/foreign_claims/`` holds the claims, which the tests check and charge to a ledger.
"""

from __future__ import annotations

import json
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from quietgrad_verify import Claim, check
from quietgrad_verify import adapters as to_claim

RESULTS = Path(__file__).parent / "results"
DELTA = 1e-5
ADAPTIVE = {
    "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0,
    "min_clipbound": 0.01, "unclipped_num_std": 2.0,
}  # fmt: skip


def opacus_run(noise: float = 1.1, *, poisson: bool = True, epochs: int = 3, **settings: Any) -> Claim:
    """A linear model on 400 made-up records, three epochs of ten batches."""
    import opacus
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(400, 3), torch.randint(0, 2, (400,)))
    model = torch.nn.Linear(3, 2)
    loader = DataLoader(data, batch_size=40, shuffle=True)
    engine = opacus.PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader,
        noise_multiplier=noise, max_grad_norm=1.0, poisson_sampling=poisson, **settings,
    )  # fmt: skip
    for _ in range(epochs):
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
    return to_claim.from_opacus(engine, delta=DELTA, data_loader=loader, optimizer=optimizer)


def accountant(kind: str) -> Claim:
    """One Gaussian release of σ = 2C under replace-one, as two accountants of one library price it."""
    import dp_accounting

    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    made = {"rdp": dp_accounting.rdp.RdpAccountant, "pld": dp_accounting.pld.PLDAccountant}[kind]
    counted = made(neighboring_relation=relation)
    counted.compose(dp_accounting.GaussianDpEvent(2.0))
    return to_claim.from_dp_accounting(counted, delta=DELTA)


def flower_run(stated_rounds: int) -> Claim:
    """Thirty rounds of twenty clients; the ε that is published is that of ``stated_rounds`` rounds."""
    import dp_accounting
    from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

    wrapped = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 4.0, clipping_norm=1.0, num_sampled_clients=20)
    stated = dp_accounting.get_epsilon_gaussian(4.0 / 2.0 / stated_rounds**0.5, DELTA)
    return to_claim.from_flower(wrapped, clients=20, rounds=30, delta=DELTA, stated=stated)


def diffprivlib_fit(epsilon: float = 1.0) -> Claim:
    """One logistic regression on 200 made-up records."""
    import diffprivlib
    from diffprivlib.models import LogisticRegression

    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 2))
    spent = diffprivlib.BudgetAccountant()
    LogisticRegression(epsilon=epsilon, data_norm=4.0, accountant=spent).fit(features, (features[:, 0] > 0) * 1)
    return to_claim.from_diffprivlib(spent, delta=1e-6)


def opendp_sum() -> Claim:
    """A bounded sum with Laplace noise."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(bounds=(0.0, 1.0)), size=100), dp.symmetric_distance()
    query = space >> dp.t.then_sum() >> dp.m.then_laplace(4.0)
    return to_claim.from_opendp(query, 2, delta=1e-6)


def jax_plan(bands: int) -> Claim:
    """An execution plan that was calibrated to ε = 1."""
    from jax_privacy.experimental import execution_plan

    made = execution_plan.BandMFExecutionPlanConfig.default(
        num_bands=bands, iterations=100, epsilon=1.0, delta=DELTA, sampling_prob=0.1
    )
    return to_claim.from_jax_privacy(made.plan, delta=DELTA, stated=1.0)


RUNS = {
    "opacus, Poisson samples": (True, lambda: opacus_run()),
    "opacus, a shuffled loader": (False, lambda: opacus_run(poisson=False)),
    "opacus, adaptive clipping": (False, lambda: opacus_run(**ADAPTIVE)),
    "opacus, more noise": (True, lambda: opacus_run(3.0)),
    "dp-accounting, replace-one by RDP": (False, lambda: accountant("rdp")),
    "dp-accounting, replace-one by PLD": (True, lambda: accountant("pld")),
    "flower, the cost of one round": (False, lambda: flower_run(1)),
    "flower, the cost of all rounds": (True, lambda: flower_run(30)),
    "diffprivlib, a fit": (True, lambda: diffprivlib_fit()),
    "opendp, a sum": (True, lambda: opendp_sum()),
    "jax-privacy, DP-SGD": (True, lambda: jax_plan(1)),
    "jax-privacy, four bands": (True, lambda: jax_plan(4)),
}


def main() -> None:
    """Make every claim, check it, and write down what was found."""
    warnings.simplefilter("ignore")
    folder, rows = RESULTS / "foreign_claims", []
    folder.mkdir(parents=True, exist_ok=True)
    for name, (sound, made) in RUNS.items():
        claim = made()
        verdict, body = check(claim), claim.body
        assert verdict.ok == sound, (name, verdict)
        claim.write(folder / f"{name.replace(', ', '-').replace(' ', '_')}.json")
        printed = (body["source"]["stated"] or {}).get("epsilon")
        rows.append({
            "run": name, "printed": printed, "proved": body["claim"]["epsilon"], "delta": body["claim"]["delta"],
            "relation": body["claim"]["relation"], "verdict": "proved" if verdict.ok else "refuted",
            "notes": body["claim"]["notes"], "condition": body["claim"]["condition"],
        })  # fmt: skip
        print(
            f"{name}: printed {printed}, proved {body['claim']['epsilon']:.4f}: {rows[-1]['verdict']}", flush=True
        )
    names = ("opacus", "dp-accounting", "flwr", "diffprivlib", "opendp", "jax-privacy", "torch")
    result = {
        "command": "python benchmarks/foreign_claims.py",
        "versions": {n: version(n) for n in names},
        "runs": rows,
    }
    (RESULTS / "foreign_claims.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
