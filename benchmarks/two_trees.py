"""Two source trees beside each other: CPU seconds of the same small jobs, run in turn, as ratios of medians.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/two_trees.py OLD NEW [repeats [only jobs with this word]]

OLD and NEW are checkouts. Every job runs in a process of its own with that tree's ``src`` on the path. The trees
take turns, so that a busy machine slows both. A job warms up once (compiled kernels) and is then timed; the CPU
time of the timed part is recorded. A ratio above 1 means that NEW is slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "two_trees.json"
HEAD = """
import json, os, sys, tempfile, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import quietgrad as qg
rng = np.random.default_rng(0)
X = rng.normal(size=(20000, 30)); X /= np.linalg.norm(X, axis=1, keepdims=True)
y = np.where(X @ rng.normal(size=30) > 0, 1.0, 0.0)
budget = qg.Budget(1.0, 1e-5)
def timed(job, times):
    job()
    start = time.process_time()
    for _ in range(times):
        job()
    print(json.dumps((time.process_time() - start) / times))
"""
JOBS = {
    "calibrate, Poisson": """
sizes = iter(range(500, 600))
timed(lambda: qg.calibrate(epsilon=1.2, delta=1e-5, n=60000, batch_size=next(sizes), steps=2000,
                           sampling="poisson", relation="add-remove"), 20)
""",
    "secure Gaussian noise, 10⁶ numbers": """
from quietgrad.privacy.noise import NoiseStream
from quietgrad.privacy.rng import fresh_key
stream = NoiseStream(fresh_key(), "noise")
rounds = iter(range(100))
timed(lambda: stream.normal(next(rounds), 1_000_000), 20)
""",
    "DP-SRM on a table, 1500 steps": """
method = qg.DPSRM(steps=1500, batch_size=100)
timed(lambda: qg.minimize(qg.objectives.Logistic(), (X, y), method, budget=budget, n_public=20000), 5)
""",
    "PrivateLogisticRegression": """
from quietgrad.estimators import PrivateLogisticRegression
timed(lambda: PrivateLogisticRegression(epsilon=1.0, delta=1e-5, classes=[0.0, 1.0]).fit(X, y), 10)
""",
    "PrivateAdditiveClassifier": """
from quietgrad.estimators import PrivateAdditiveClassifier
timed(lambda: PrivateAdditiveClassifier(epsilon=1.0, delta=1e-5, classes=[0.0, 1.0],
                                        feature_bounds=[(-1, 1)] * 30).fit(X, y), 5)
""",
    "scan of a Parquet file, 10 steps": """
import pandas as pd
folder = tempfile.mkdtemp()
frame = pd.DataFrame(np.repeat(X, 10, axis=0), columns=[f"x{j}" for j in range(30)])
frame.assign(label=np.repeat(y > 0, 10)).to_parquet(folder + "/a.parquet", row_group_size=20000)
table = qg.data.scan(folder + "/*.parquet", target="label", classes=[False, True])
method = qg.DPGD(steps=10)
timed(lambda: qg.minimize(qg.objectives.Logistic(), table, method, budget=budget, n_public=200000), 3)
""",
    "secure sum by masks, 20 parties of 10⁴ numbers": """
from quietgrad.federation import secure_sum
vectors = list(rng.normal(size=(20, 10000)) / 100)
timed(lambda: secure_sum(vectors, clip=1.0, noise_multiplier=1.0, mode="masks"), 3)
""",
    "federation, 3 parties, 50 rounds of masks": """
from quietgrad.federation import Party, simulate
parties = [Party(X[i::3], y[i::3]) for i in range(3)]
method = qg.DPGD(steps=50)
timed(lambda: simulate(method, qg.objectives.Logistic(), parties, budget=budget, trust="secure", secure="masks"), 2)
""",
    "audit of DP-SGD, 500 runs": """
timed(lambda: qg.audit.run(qg.DPSGD(steps=4, batch_size=50), budget=budget, runs=500), 1)
""",
    "DP-SGD on a small CNN, 10 steps of 128": """
import torch, quietgrad.torch as qt
from torch import nn
torch.set_num_threads(1)
data = (torch.randn(2000, 1, 28, 28), torch.randint(0, 10, (2000,)))
def job():
    model = nn.Sequential(nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2),
                          nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 10))
    qt.fit(model, nn.CrossEntropyLoss(reduction="none"), data, qg.DPSGD(steps=10, batch_size=128), budget=budget,
           progress=False)
timed(job, 3)
""",
    "DP-SGD on perceptrons, a step of 20-64-2 and one of 784-256-256-10": """
import torch, quietgrad.torch as qt
from torch import nn
torch.set_num_threads(1)
loops = []
for sizes, rows in (((20, 64, 2), 250), ((784, 256, 256, 10), 256)):
    layers = [part for a, b in zip(sizes, sizes[1:]) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    model = nn.Sequential(*layers)
    data = torch.randn(6000, sizes[0]), torch.randint(0, sizes[-1], (6000,))
    loops.append(qt.PrivateLoop(model, nn.CrossEntropyLoss(), data, batch_size=rows, max_grad_norm=1.0,
                                optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
                                n_public=6000))
samples = [iter(loop) for loop in loops]
def job():
    for loop, batches, times in zip(loops, samples, (5, 1)):
        for _ in range(times):
            loop.step(next(batches))
for _ in range(10):
    job()
timed(job, 60)
""",
    "import quietgrad": """
import subprocess
def job():
    subprocess.run([sys.executable, "-c", "import quietgrad"], check=True)
job()
start = os.times()
for _ in range(5):
    job()
end = os.times()
print(json.dumps((end.children_user + end.children_system - start.children_user - start.children_system) / 5))
""",
}


def once(tree: Path, job: str) -> float:
    """CPU seconds of one job on one tree."""
    with tempfile.TemporaryDirectory() as cache:  # calibrations are remembered there
        own = {
            "PYTHONPATH": str(tree / "src"),
            "OMP_NUM_THREADS": "1",
            "QUIETGRAD_CACHE": cache,
            "QUIETGRAD_STATE": cache,
        }
        words = [sys.executable, "-c", HEAD + job]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | own, cwd=cache)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    old, new = Path(sys.argv[1]), Path(sys.argv[2])
    repeats = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    only = sys.argv[4] if len(sys.argv) > 4 else ""
    result = RESULT.with_stem(f"two_trees_{only}") if only else RESULT
    commits = [
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True)
        .stdout.strip()[:10] for tree in (old, new)
    ]  # fmt: skip
    jobs = {}
    for name, job in JOBS.items():
        if only not in name:
            continue
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for _ in range(repeats):
            seconds["old"].append(once(old, job))
            seconds["new"].append(once(new, job))
        medians = {which: median(found) for which, found in seconds.items()}
        jobs[name] = {**medians, "ratio": round(medians["new"] / medians["old"], 3), "seconds": seconds}
        print(f"{jobs[name]['ratio']:.3f}  {name}", flush=True)
        save(result, {"old": commits[0], "new": commits[1], "repeats": repeats, "jobs": jobs})


if __name__ == "__main__":
    main()
