"""FedAvg with a party as the privacy unit: MNIST in 1000 clients, against pfl-research and Flower's simulation.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python benchmarks/clients.py accuracy [speed] [flower] [scale]

*accuracy*: 1000 clients of 60 pictures, iid and by label (two shards of one label each), ε = 2 and 8 per party at
δ = 1000^−1.1, 120 rounds of about 100 clients, 3 local steps of 20 pictures. *fixed* and *adaptive* clips with a
curator's Poisson samples, and *correlated* noise with turns, which needs no secret. The adaptive clip starts at 0.1
and was not searched; the fixed clips (0.3 at ε = 2, 0.6 at ε = 8) are those of an earlier search on other seeds,
which private users do not have for free.
*speed*: CPU seconds of one round of 100 of these clients, all in one run, turn by turn: quietgrad, the same
arithmetic by PyTorch one client after the other, and pfl-research. *flower*: wall time of a round of Flower's
simulation, between the ends of its rounds, and quietgrad's right after it, since Flower's workers are other
processes. The peers are imported from the folder that PEERS names.
*scale*: 10 000 and 100 000 clients of a table in one process, and how far memory rises above the table's own.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import quietgrad as qg
from quietgrad.core.session.opening import Terms, opening
from quietgrad.federation import Clients, simulate
from quietgrad.objectives import Logistic
from quietgrad.tables.parties import PartyLevelObjective
from quietgrad.tables.privacy_units import RecordsWithIds
from quietgrad.torch.networks.module import ModuleObjective

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

RESULT = Path(__file__).parent / "results" / "clients.json"
CLIENTS, PER, ROUNDS, SAMPLE = 1000, 60, 120, 0.1
DELTA = CLIENTS**-1.1
STEPS, RATE, BATCH = 3, 0.1, 20


class Net(nn.Module):
    """The CNN of the experiments, 25 854 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 16, 8, 4), nn.Conv2d(16, 32, 2, 2)
        self.c, self.d = nn.Linear(288, 76), nn.Linear(76, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.b(self.a(x).relu()).relu().flatten(1)
        return self.d(self.c(hidden).relu())  # type: ignore[no-any-return]


def mnist() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    root = Path(os.environ["QUIETGRAD_DATA"])

    def read(name: str, skip: int) -> Any:
        with gzip.open(root / f"mnist-{name}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=skip)

    def pictures(name: str) -> torch.Tensor:
        raw = read(name, 16).reshape(-1, 1, 28, 28)
        return torch.from_numpy((raw.astype(np.float32) / 255 - 0.1307) / 0.3081)

    def labels(name: str) -> torch.Tensor:
        return torch.from_numpy(read(name, 8).astype(np.int64))

    return (
        pictures("train-images-idx3-ubyte"), labels("train-labels-idx1-ubyte"),
        pictures("t10k-images-idx3-ubyte"), labels("t10k-labels-idx1-ubyte"),
    )  # fmt: skip


def split(y: torch.Tensor, kind: str, seed: int) -> Any:
    """The client of each picture."""
    rng, owner = np.random.default_rng(1000 + seed), np.empty(len(y), np.int64)
    if kind == "iid":
        owner[rng.permutation(len(y))] = np.arange(len(y)) // PER
        return owner
    shards = np.argsort(y.numpy(), kind="stable").reshape(2 * CLIENTS, PER // 2)[rng.permutation(2 * CLIENTS)]
    owner[shards.reshape(CLIENTS, PER)] = np.arange(CLIENTS)[:, None]
    return owner


def network(seed: int) -> tuple[Net, ModuleObjective]:
    torch.manual_seed(seed)
    net = Net()
    return net, ModuleObjective(net, nn.CrossEntropyLoss())


def method(mode: str, epsilon: float) -> qg.FedAvg:
    common: dict[str, Any] = {
        "rounds": ROUNDS, "local_steps": STEPS, "local_rate": RATE, "local_batch_size": BATCH, "sample": SAMPLE,
        "clip": 0.3 if epsilon < 4 else 0.6,
    }  # fmt: skip
    if mode == "correlated":
        return qg.FedAvg(**common, returns="average")
    if mode == "adaptive":
        return qg.FedAvg(**{**common, "clip": 0.1}, sampling="poisson", clip_quantile=0.5)
    return qg.FedAvg(**common, sampling="poisson")


def accuracy(data: Any, seeds: int, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    X, y, Xt, yt = data
    rows: list[dict[str, Any]] = []
    for kind in ("iid", "label"):
        for epsilon in (2.0, 8.0):
            for mode in ("fixed", "adaptive", "correlated"):
                found, cpu = [], time.process_time()
                for seed in range(seeds):
                    net, objective = network(seed)
                    clients = Clients(X, y, party=split(y, kind, seed))
                    budget = qg.Budget(epsilon, DELTA)
                    result = simulate(method(mode, epsilon), objective, clients, budget=budget)
                    objective.write_back(result.params)
                    with torch.no_grad():
                        found.append(float((net(Xt).argmax(1) == yt).double().mean()))
                record = next(note for note in result.privacy.notes if note.startswith("one record"))
                rows.append({
                    "split": kind, "epsilon": epsilon, "mode": mode, "accuracy": [round(a, 4) for a in found],
                    "mean": round(statistics.mean(found), 4), "stated": str(result.privacy), "record": record,
                    "noise_multiplier": round(result.privacy.noise_multiplier, 4),
                    "last_clip": result.details.get("clip"),
                    "cpu_seconds": round((time.process_time() - cpu) / seeds, 1),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
                keep(rows)
    return rows


# --- speed --------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """(CPU, wall) seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def speed(data: Any, repeats: int = 3) -> dict[str, Any]:
    X, y = data[:2]
    owner = split(y, "iid", 0)
    rows_of = [torch.from_numpy(np.flatnonzero(owner == k)) for k in range(CLIENTS)]
    calls: dict[str, Callable[[], tuple[float, float]]] = {
        "quietgrad": partial(timed, _ours(X, y, owner)), "in turn": partial(timed, _in_turn(X, y, rows_of)),
    }  # fmt: skip
    if "PEERS" in os.environ:
        sys.path.append(os.environ["PEERS"])
        calls["pfl-research"] = _pfl(X, y, rows_of)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            made = call()
            if repeat:  # the first warms up
                times[name].append(made)
    found: dict[str, Any] = {}
    for name, pairs in times.items():
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(times["quietgrad"], pairs, strict=True)]
        found[name] = {
            "cpu_seconds": round(statistics.median(cpu for cpu, _ in pairs), 4),
            "wall": round(statistics.median(wall for _, wall in pairs), 4),
            "quietgrad_cpu_ratio": round(statistics.median(ratios), 3),
        }
    print(json.dumps(found, indent=1), flush=True)
    return found


def flower(data: Any) -> dict[str, Any]:
    sys.path.append(os.environ["PEERS"])
    X, y = data[:2]
    owner = split(y, "iid", 0)
    rows_of = [np.flatnonzero(owner == k) for k in range(CLIENTS)]
    found = _flower(X, y, rows_of, _ours(X, y, owner))
    print(json.dumps(found), flush=True)
    return found


def _ours(X: Any, y: Any, owner: Any) -> Callable[[], None]:
    """A round of a real run: sample, local training, clips, noise, server step."""
    _, objective = network(0)
    terms = Terms.of(qg.Budget(8.0, DELTA), takes_n=True, noise_multiplier=0.8, seed=0)
    fixed = replace(method("fixed", 8.0), rounds=1000)
    run = opening(PartyLevelObjective(objective), RecordsWithIds((X, y), owner), fixed, terms)
    states = [fixed.init(run.start)]

    def one_round() -> None:
        states[0] = fixed.step(states[0], run.session)

    return one_round


def _train(net: nn.Module, X: Any, y: Any, rows: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for k in range(0, PER, BATCH):
        some = rows[k : k + BATCH]
        optimizer.zero_grad()
        F.cross_entropy(net(X[some]), y[some]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _in_turn(X: Any, y: Any, rows_of: Any) -> Callable[[], None]:
    net, rng = network(0)[0], np.random.default_rng(0)
    home = {name: value.clone() for name, value in net.state_dict().items()}

    def one_round() -> None:
        for k in rng.permutation(CLIENTS)[:100]:
            _train(net, X, y, rows_of[k])
            net.load_state_dict(home)

    return one_round


def _pfl(X: Any, y: Any, rows_of: Any) -> Callable[[], tuple[float, float]]:
    """Rounds after the first, which evaluates: the difference of four rounds and one, by three."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

    class Model(Net):
        def loss(self, x: Any, t: Any, eval: bool = False) -> Any:
            return F.cross_entropy(self(x), t)

        def metrics(self, x: Any, t: Any, eval: bool = False) -> Any:
            return {"loss": Weighted(float(self.loss(x, t)) * len(t), len(t))}

    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    users = FederatedDataset(
        lambda k: Dataset((X[rows_of[k]], y[rows_of[k]]), user_id=k),
        get_user_sampler("random", list(range(CLIENTS))),
    )
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(0.6, 0.8))
    backend = SimulatedBackend(training_data=users, val_data=users, postprocessors=[noise])

    def rounds(count: int) -> None:
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=count, evaluation_frequency=10**6, train_cohort_size=100, val_cohort_size=0
            ),
            backend, model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
            NNEvalHyperParams(local_batch_size=None),
        )  # fmt: skip

    def later_round() -> tuple[float, float]:
        one, four = timed(partial(rounds, 1)), timed(partial(rounds, 4))
        return (four[0] - one[0]) / 3, (four[1] - one[1]) / 3

    return later_round


def _flower(X: Any, y: Any, rows_of: Any, ours: Callable[[], None], rounds: int = 4) -> dict[str, Any]:
    """Wall seconds of a round of Flower's simulation, between those of its rounds, and quietgrad's right after."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    marks: list[float] = []
    folder = tempfile.mkdtemp()  # workers read a client's pictures from here: sending all of them would take longer
    np.save(f"{folder}/X.npy", X.numpy())
    labels = y.numpy()
    start = [value.numpy() for value in network(0)[0].state_dict().values()]

    class Trains(NumPyClient):
        def __init__(self, place: int) -> None:
            self.place = place

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            net = Net()
            names = list(net.state_dict())
            net.load_state_dict({n: torch.tensor(v) for n, v in zip(names, parameters, strict=True)})
            rows = rows_of[self.place]
            own = torch.from_numpy(np.load(f"{folder}/X.npy", mmap_mode="r")[rows])
            _train(net, own, torch.from_numpy(labels[rows]), torch.arange(PER))
            return [value.numpy() for value in net.state_dict().values()], PER, {}

    class Timed(FedAvg):
        def aggregate_fit(self, *given: Any) -> Any:
            made = super().aggregate_fit(*given)
            marks.append(time.perf_counter())
            return made

    def client(context: Context) -> Any:
        return Trains(int(context.node_config["partition-id"])).to_client()

    def server(context: Context) -> Any:
        strategy = Timed(
            fraction_fit=SAMPLE, fraction_evaluate=0.0, min_fit_clients=100, min_available_clients=CLIENTS,
            initial_parameters=ndarrays_to_parameters(start),
        )  # fmt: skip
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

    run_simulation(
        ServerApp(server_fn=server), ClientApp(client_fn=client), num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip
    theirs = statistics.median(np.diff(marks).tolist())
    walls = []
    for _ in range(3):
        begun = time.perf_counter()
        ours()
        walls.append(time.perf_counter() - begun)
    mine = statistics.median(walls)
    return {
        "wall": round(theirs, 3), "cores": os.cpu_count(), "quietgrad_wall": round(mine, 3),
        "quietgrad_wall_ratio": round(mine / theirs, 3),
    }  # fmt: skip


def resident_mb(line: str) -> float:
    """Memory of this process: ``VmRSS`` now, ``VmHWM`` at its peak."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) / 1e3 for row in rows if row.startswith(line))


def scale() -> list[dict[str, Any]]:
    rows = []
    for clients in (10_000, 100_000):
        rng = np.random.default_rng(0)
        X = rng.standard_normal((clients * 5, 20))
        y = (X[:, 0] + rng.logistic(size=len(X)) > 0) * 1.0
        data_mb = (X.nbytes + y.nbytes) / 1e6
        before = resident_mb("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        begun, cpu = time.perf_counter(), time.process_time()
        result = simulate(
            qg.FedAvg(rounds=20, sampling="poisson", sample=0.05, local_rate=0.5), Logistic(),
            Clients(X, y, party=np.arange(len(X)) // 5), budget=qg.Budget(2.0, clients**-1.1),
        )  # fmt: skip
        rows.append({
            "clients": clients, "drawn": clients // 20, "cpu_per_round": round((time.process_time() - cpu) / 20, 3),
            "wall": round(time.perf_counter() - begun, 1), "data_mb": round(data_mb, 1),
            "memory_rise_mb": round(resident_mb("VmHWM") - before, 1),
            "accuracy": round(float(((X @ result.params > 0) == y).mean()), 3),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    torch.set_num_threads(1)
    parts = sys.argv[1:] or ["accuracy", "speed", "scale"]
    kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    numbers = {name: kept[name] for name in ("accuracy", "speed", "flower", "scale") if name in kept}
    data = mnist() if {"accuracy", "speed", "flower"} & set(parts) else None
    if "accuracy" in parts:
        seeds = int(os.environ.get("SEEDS", "1"))
        keep = lambda rows: save(RESULT, {**numbers, "accuracy": rows}, "pfl", "flwr", "ray")  # noqa: E731
        numbers["accuracy"] = accuracy(data, seeds, keep)
    if "speed" in parts:
        numbers["speed"] = speed(data)
        save(RESULT, numbers, "pfl", "flwr", "ray")
    if "flower" in parts:
        numbers["flower"] = flower(data)
        save(RESULT, numbers, "pfl", "flwr", "ray")
    if "scale" in parts:
        numbers["scale"] = scale()
    save(RESULT, numbers, "pfl", "flwr", "ray")


if __name__ == "__main__":
    main()
