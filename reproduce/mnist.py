"""Figure 3 of paper 000: MNIST, the 4-layer CNN (d = 26 010), DP-SGD and DP-SRM at ε = 1.2, 3 and 7.

    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/mnist.py --tune     # the search on held-out images
    QUIETGRAD_DATA=... OMP_NUM_THREADS=1 python reproduce/mnist.py            # and five runs on all 60 000 images
    OMP_NUM_THREADS=1 python reproduce/mnist.py --quick                       # scikit-learn's small digits, seconds

Takes 50 CPU minutes, the search another 60. Protocol: add-remove, δ = 1e-5, Poisson samples, noise calibrated by
the accountant and drawn from the cryptographic stream. DP-SRM differentiates every example at two points, so it
gets half the epochs and thereby the same time. Both methods were searched on the same grid (`SHAPES`: batch, step
and schedule) by one fit each on 50 000 of the training images, looking at the other 10 000; DP-SRM then tried two
more γ at its best shape, and then three more C2 (`RATIOS`, as C2/(γC1); the paper's γ = C2, C1 = 1.5 is 0.67). The
settings that won are fitted on all 60 000 images; the 10 000 test images are looked at, but decide nothing. As in
the paper, ε is that of one fit; the search is not in it. Panels (g) and (h), and b₀, are in
`image_parties.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quietgrad as qg
import quietgrad.torch as qt

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save
from reproduce.allocator import keep_freed_memory
from reproduce.comparisons import Comparison, Contender, clip_of, looked_at, reached_by
from reproduce.models import MnistCNN4
from reproduce.store import print_table

RESULTS = Path(__file__).parent / "results" / "mnist.json"
PAPER = {  # test error in % as printed, mean of 10 trials
    "dp-sgd": {1.2: 5.33, 3.0: 3.81, 7.0: 2.93},
    "dp-srm": {1.2: 4.49, 3.0: 3.62, 7.0: 2.91},
}
CLIP = 0.1  # small enough that nearly every gradient is clipped: then only η·C matters
LOSS = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True)
class Settings:
    """One fit. ``step`` is η·C, the length of a step if all gradients agree; ``ratio`` is C2/(γC1)."""

    method: str
    epsilon: float
    batch_size: int
    epochs: float
    step: float
    rate: str = "linear"
    activation: str = "tanh"
    gamma: float = 0.4
    ratio: float = 0.25

    def algorithm(self, n: int) -> Any:
        """The algorithm for ``n`` records."""
        shared: dict[str, Any] = {
            "steps": max(2, round(self.epochs * n / self.batch_size)),
            "batch_size": min(n, self.batch_size),
            "learning_rate": f"{self.rate}:{self.step / CLIP}",
            "clip": CLIP,
            "returns": "ema",
        }
        if self.method == "dp-srm":
            return qg.DPSRM(**shared, gamma=self.gamma, difference_clip=self.ratio * self.gamma * CLIP)
        return qg.DPSGD(**shared)


class Net(MnistCNN4):
    """The paper's layers with a choice of activation."""

    def __init__(self, activation: str = "tanh") -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = torch.tanh if activation == "tanh" else torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.activation(self.conv1(x)), 2, stride=1)
        x = F.max_pool2d(self.activation(self.conv2(x)), 2, stride=1)
        output: Tensor = self.fc2(self.activation(self.fc1(x.flatten(1))))
        return output


Images = tuple[Tensor, Tensor]


def mnist() -> tuple[Images, Images]:
    """Training and test images, pixels shifted and scaled by public constants."""
    from quietgrad.data import load

    data = load("mnist")
    assert data.X_test is not None
    parts = ((data.X, data.y), (data.X_test, data.y_test))
    train, test = (((torch.tensor(x).reshape(-1, 1, 28, 28) - 0.1307) / 0.3081, torch.tensor(y)) for x, y in parts)
    return train, test


def small_digits() -> tuple[Images, Images]:
    """scikit-learn's 1797 digits of 8×8 pixels, enlarged to the network's input."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 8 - 1, dtype=torch.float32).reshape(-1, 1, 8, 8)
    images = F.interpolate(images, size=(28, 28), mode="bilinear")
    labels = torch.tensor(y, dtype=torch.int64)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def error(model: nn.Module, images: Images) -> float:
    """Misclassified images in %."""
    x, y = images
    with torch.no_grad():
        answers = torch.cat([model(x[start : start + 2000]).argmax(1) for start in range(0, len(x), 2000)])
    return 100.0 * float((answers != y).double().mean())


def fit(
    settings: Settings,
    train: Images,
    test: Images,
    number: int,
    make: Callable[[str], nn.Module] = Net,
    first: int = 1,
) -> dict[str, Any]:
    """One private fit and its error on ``test``; ``make`` builds the network, ``first`` is b₀/b."""
    torch.manual_seed(number)  # the starting point is public; noise and samples are secret whatever the seed
    model = make(settings.activation)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    curve: list[tuple[int, float, float]] = []
    method, began = settings.algorithm(len(train[1])), time.process_time()
    if first > 1:
        method = replace(method, first_batch_size=first * method.batch_size)
    result = qt.fit(
        model, LOSS, train, method, budget=qg.Budget(settings.epsilon, 1e-5), progress=False,
        evaluate=lambda model: {"error": error(model, test)}, every=max(1, method.steps // 10),
        callbacks=[lambda at: curve.append((at.step, round(time.process_time() - began, 2), at.metrics["error"]))],
    )  # fmt: skip
    return {
        **asdict(settings), "run": number, "error": error(model, test), "cpu_seconds": time.process_time() - began,
        "epsilon_proved": result.privacy.epsilon, "noise_multiplier": result.privacy.noise_multiplier,
        "curve": curve,
    }  # fmt: skip


EPOCHS = {1.2: 8.0, 3.0: 16.0, 7.0: 20.0}  # of DP-SGD; DP-SRM has half of them
SHAPES = [(1024, 2.0, "constant"), (1024, 4.0, "linear"), (2048, 4.0, "constant"), (2048, 6.0, "linear")]
GAMMAS = [0.2, 0.7]  # after 0.4, at the best shape
RATIOS = [0.0, 0.05, 0.67]  # after 0.25, at the best shape and γ


def search(method: str, epsilon: float, train: Images) -> None:
    """Fit the grid on 50 000 images, look at the other 10 000, and keep every row."""
    x, y = train
    learn, look = (x[:50000], y[:50000]), (x[50000:], y[50000:])

    def tried(settings: Settings) -> float:
        known = [row for row in finished("search") if _same(row, settings, 0)]
        if not known:
            row = fit(settings, learn, look, 0)
            keep("search", row)
            known = [row]
        return float(known[0]["error"])

    epochs = EPOCHS[epsilon] / (2 if method == "dp-srm" else 1)
    shapes = [Settings(method, epsilon, batch, epochs, step, rate) for batch, step, rate in SHAPES]
    best = min(shapes, key=tried)
    if method == "dp-srm":
        best = min([best, *(replace(best, gamma=gamma) for gamma in GAMMAS)], key=tried)
        best = min([best, *(replace(best, ratio=ratio) for ratio in RATIOS)], key=tried)
    print(f"chosen: {best}", flush=True)


def chosen(method: str, epsilon: float) -> Settings:
    """The settings of the least held-out error."""
    rows = [row for row in finished("search") if (row["method"], row["epsilon"]) == (method, epsilon)]
    if not rows:
        raise SystemExit(f"{method} at ε = {epsilon:g} is not searched yet: run with --tune first.")
    best = min(rows, key=lambda row: row["error"])
    return Settings(**{name.name: best[name.name] for name in fields(Settings) if name.name in best})


def compared(record: Mapping[str, Any]) -> list[Comparison]:
    """Both methods at equal time, at each ε."""
    return [
        Comparison(
            f"MNIST at settings of ours, ε = {epsilon:g}, equal time: test error in %",
            [contender(record, {"epsilon": epsilon}, method) for method in PAPER],
        )
        for epsilon in EPOCHS
    ]


def contender(record: Mapping[str, Any], key: Mapping[str, Any], method: str) -> Contender:
    """A method at one ε, and of one network if the key has that; C2 = 0 is the end of its list, and so is γ = 1."""
    own = {"dp-sgd": {"method", "gamma", "ratio"}, "dp-srm": {"method"}}[method]
    names = [name.name for name in fields(Settings) if name.name not in own]
    defaults = {name.name: name.default for name in fields(Settings) if name.name in names}
    search, finished = (
        [
            {**defaults, **row}  # early rows leave out what had one value
            for row in record[kind]
            if row["method"] == method and all(row[name] == key[name] for name in key)
        ]
        for kind in ("search", "fits")
    )
    return Contender(
        method, looked_at(search, names, _error), reached_by(finished, names, _error),
        lambda given: clip_of(Settings(method, **given).algorithm(60_000)),
        lambda name, _: {"gamma": 1.0, "ratio": 0.0}.get(name),
    )  # fmt: skip


def _error(row: Mapping[str, Any]) -> float:
    return float(row["error"])


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard error over the runs of each method and ε, for the settings that won."""
    table = []
    for epsilon, method in ((epsilon, method) for epsilon in EPOCHS for method in PAPER):
        mine = [row for row in rows if _same(row, chosen(method, epsilon))]
        if not mine:
            continue
        errors = [row["error"] for row in mine]
        table.append({
            "epsilon": epsilon, "method": method, "epochs": mine[0]["epochs"], "runs": len(errors),
            "mean_error": statistics.fmean(errors),
            "standard_error": statistics.stdev(errors) / len(errors) ** 0.5 if len(errors) > 1 else None,
            "cpu_seconds": statistics.fmean([row["cpu_seconds"] for row in mine]),
            "paper_error": PAPER[method][epsilon],
        })  # fmt: skip
    return table


def finished(kind: str = "fits") -> list[dict[str, Any]]:
    """The fits (or, with "search", the searched ones) made so far."""
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()).get(kind, []) if RESULTS.exists() else []
    return rows


def keep(kind: str, row: dict[str, Any]) -> None:
    """Write one more row at once; the file is read again, since several calls with --only may run side by side."""
    about = f"{row['method']} ε={row['epsilon']:g} γ={row['gamma']:g} C2/(γC1)={row['ratio']:g}"
    print(f"{kind}: {about} batch {row['batch_size']} step {row['step']:g}: {row['error']:.2f} % wrong", flush=True)
    rows = {name: finished(name) for name in ("fits", "search")}
    rows[kind].append(row)
    told = {"delta": 1e-5, "relation": "add-remove", "clip": CLIP}
    save(RESULTS, {**told, "table": report(rows["fits"]), **rows})


def _same(row: dict[str, Any], settings: Settings, number: int | None = None) -> bool:
    wanted = asdict(settings) if number is None else {**asdict(settings), "run": number}
    return all(row.get(key, 0.25 if key == "ratio" else None) == value for key, value in wanted.items())


def main() -> None:
    """Run what is asked for; every finished fit is written at once, and found again by the next call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small digits, one run; nothing is saved")
    parser.add_argument("--tune", action="store_true", help="the grid, on held-out training images")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", help="such as dp-srm@3")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if arguments.quick:
        train, test = small_digits()
        rows = [fit(Settings(method, 7.0, 250, 8, 2.0), train, test, 0) for method in ("dp-sgd", "dp-srm")]
        body = [[row["method"], row["error"], row["epsilon_proved"]] for row in rows]
        print_table(
            "scikit-learn's small digits, one run (not a result)", ["method", "test error %", "proved ε"], body
        )
        return
    train, test = mnist()
    cells = [(method, epsilon) for epsilon in EPOCHS for method in PAPER]
    cells = [(m, e) for m, e in cells if arguments.only in (None, f"{m}@{e:g}")]
    for method, epsilon in cells if arguments.tune else ():
        search(method, epsilon, train)
    for number in range(0 if arguments.tune else arguments.runs):
        for settings in (chosen(*each) for each in cells):
            if not any(_same(row, settings, number) for row in finished()):
                keep("fits", fit(settings, train, test, number))
    for row in report(finished()):
        print(
            f"ε = {row['epsilon']:<4} {row['method']:7} {row['epochs']:>4} epochs: {row['mean_error']:.2f} % wrong "
            f"({row['runs']} runs, {row['cpu_seconds']:.0f} CPU s); the paper's {row['paper_error']} %"
        )


if __name__ == "__main__":
    main()
