"""A hundred ordinary training scripts in the shapes people write: which run, under which ε, and which do not.

    OMP_NUM_THREADS=1 python benchmarks/scripts.py

A script is a way to train (a loop's shape) with a model and its data, small and for a few steps. It *runs* if it
ends and states an ε > 0, with or without a condition; it is *refused* if an error of the library says why in a
sentence. Every other error is *bare*. What a script should do is written beside it: a refusal that is not expected
is a false one. Lightning and TRL are tried if they are installed.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import quietgrad as qg
import quietgrad.torch as qt
from quietgrad.core.errors import QuietgradError
from quietgrad.core.session.clipping import PerLayer

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.record import save

OUT = Path(__file__).parent / "results" / "scripts.json"
N, BATCH, CLASSES, WORDS = 48, 12, 4, 20


# --- models and their data ---------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Tokens, a recurrent layer, classes."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.table, self.layer, self.out = (
            nn.Embedding(WORDS, 8),
            kind(8, 8, batch_first=True),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x: Tensor) -> Any:
        return self.out(self.layer(self.table(x))[0][:, -1])


class Attentive(nn.Module):
    """Tokens, a transformer layer, classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.layer(self.table(x)).mean(1))


class Residual(nn.Module):
    """Convolutions with a way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.first(x))
        x = x + F.relu(self.norm(self.second(x)))
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _numbers() -> TensorDataset:
    return TensorDataset(torch.randn(N, 6), torch.arange(N) % CLASSES)


def _pictures() -> TensorDataset:
    return TensorDataset(torch.rand(N, 1, 8, 8), torch.arange(N) % CLASSES)


def _texts() -> TensorDataset:
    return TensorDataset(torch.randint(0, WORDS, (N, 7)), torch.arange(N) % CLASSES)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, CLASSES)), _numbers),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)),
        _pictures,
    ),
    "residual": (Residual, _pictures),
    "lstm": (lambda: Recurrent(nn.LSTM), _texts),
    "gru": (lambda: Recurrent(nn.GRU), _texts),
    "transformer": (Attentive, _texts),
}
SOME = ("mlp", "cnn", "lstm")

Script = Callable[[nn.Module, TensorDataset], Any]
SHAPES: dict[str, tuple[Script, tuple[str, ...], str]] = {}  # what, with which models, and what it should do


def shape(*models: str, expected: str = "runs") -> Callable[[Script], Script]:
    """A way to train, with these models."""

    def register(run: Script) -> Script:
        SHAPES[run.__name__] = run, models, expected
        return run

    return register


def private(model: nn.Module, data: Any, **settings: Any) -> Any:
    """The verbs with a criterion."""
    loader = settings.pop("loader", None)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True) if loader is None else loader
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    known: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "criterion": nn.CrossEntropyLoss(),
        "epochs": 1,
    }
    return qt.make_private(module=model, optimizer=optimizer, data_loader=loader, **(known | settings))


def epoch(made: Any, before: Callable[[Any], Any] = lambda model: None) -> Any:
    """One epoch in the usual form; ``before`` is done between backward pass and step."""
    model, optimizer, loader, criterion = made
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        before(model)
        optimizer.step()
    return loader.privacy


# --- shapes ------------------------------------------------------------------------------------------------------


@shape(*MODELS)
def verbs_with_a_criterion(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data))


@shape(*MODELS, expected="runs, conditional")
def verbs_without_a_criterion(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader = private(model, data, criterion=None)
    for x, y in loader:
        optimizer.zero_grad()
        loss: Any = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()
    return loader.privacy


@shape(*MODELS)
def fit(model: nn.Module, data: Any) -> Any:
    algorithm = qg.DPSGD(steps=3, batch_size=BATCH)
    budget = qg.Budget(8.0, 1e-5)
    return qt.fit(model, nn.CrossEntropyLoss(), data, algorithm, budget=budget, n_public=N, progress=False).privacy


@shape(*MODELS)
def private_loop(model: nn.Module, data: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), data, optimizer=optimizer, batch_size=BATCH, epochs=1, max_grad_norm=1.0,
        noise_multiplier=1.0,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return loop.privacy


@shape(*SOME)
def engine_with_epsilon(model: nn.Module, data: Any) -> Any:
    engine = qt.PrivacyEngine()
    made = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data,
        batch_size=BATCH), criterion=nn.CrossEntropyLoss(), target_epsilon=8.0, target_delta=1e-5, epochs=1,
    max_grad_norm=1.0, )  # fmt: skip
    told = epoch(made)
    assert engine.get_epsilon(1e-5) > 0.0
    return told


@shape(*SOME)
def ghost_mode(model: nn.Module, data: Any) -> Any:
    made = qt.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=BATCH), noise_multiplier=1.0, max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )  # fmt: skip
    model, optimizer, criterion, loader = made
    return epoch((model, optimizer, loader, criterion))


@shape(*SOME)
def memory_manager(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
    return loader.privacy


@shape(*SOME)
def closure(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    for x, y in loader:

        def once(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(once)
    return loader.privacy


@shape(*SOME)
def clipped_by_norm(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data), lambda made: nn.utils.clip_grad_norm_(made.parameters(), 1.0))


@shape("mlp", "cnn")
def clipped_by_value(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data), lambda made: nn.utils.clip_grad_value_(made.parameters(), 0.5))


@shape(*SOME)
def gradient_norms_logged(model: nn.Module, data: Any) -> Any:
    def log(made: Any) -> None:
        assert (
            sum(param.grad.detach().norm(2).item() for param in made.parameters() if param.grad is not None) > 0.0
        )

    return epoch(private(model, data), log)


@shape("mlp", "cnn", expected="runs, conditional")
def grad_scaler(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=True):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return loader.privacy


@shape("mlp", "cnn")
def accumulated_samples(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    for number, (x, y) in enumerate(loader):
        criterion(model(x), y).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return loader.privacy


def _scheduled(make: Callable[[Any], Any], model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    scheduler = make(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return loader.privacy


@shape("mlp", "cnn")
def cosine_schedule(model: nn.Module, data: Any) -> Any:
    return _scheduled(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4), model, data)


@shape("mlp")
def one_cycle_schedule(model: nn.Module, data: Any) -> Any:
    return _scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), model, data)


def _optimizer(name: str) -> Script:
    def run(model: nn.Module, data: Any) -> Any:
        made: Any = getattr(torch.optim, name)
        return epoch(private(model, data, optimizer=made(model.parameters(), lr=0.01)))

    run.__name__ = name.lower()
    return run


for _name in ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Adamax", "ASGD", "Rprop"):
    shape("mlp")(_optimizer(_name))
shape("mlp", expected="refused")(_optimizer("LBFGS"))


@shape("mlp", expected="refused")
def sparse_adam(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, optimizer=torch.optim.SparseAdam(list(model.parameters()))))


@shape("mlp", "cnn")
def parameter_groups(model: nn.Module, data: Any) -> Any:
    layers: Any = list(model.children())
    groups = [{"params": layers[0].parameters(), "lr": 0.01}, {"params": layers[-1].parameters()}]
    return epoch(private(model, data, optimizer=torch.optim.AdamW(groups, lr=0.1)))


@shape("mlp", "cnn", "transformer")
def frozen_layers(model: nn.Module, data: Any) -> Any:
    first: Any = next(model.children())
    first.requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    return epoch(private(model, data, optimizer=torch.optim.SGD(trained, lr=0.1)))


@shape("mlp", "cnn")
def evaluated_in_between(model: nn.Module, data: Any) -> Any:
    made = private(model, data, epochs=2)
    for _ in range(2):
        told = epoch(made)
        made[0].eval()
        with torch.no_grad():
            assert made[0](data[:5][0]).shape == (5, CLASSES)
    return told


@shape("mlp", "cnn")
def averaged_weights(model: nn.Module, data: Any) -> Any:
    made = private(model, data)
    averaged = torch.optim.swa_utils.AveragedModel(made[0])
    told = epoch(made)
    averaged.update_parameters(made[0])
    return told


@shape("mlp", "cnn")
def states_saved_and_loaded(model: nn.Module, data: Any) -> Any:
    made = private(model, data)
    told = epoch(made)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": made[0].state_dict(), "optimizer": made[1].state_dict()}, f"{folder}/state.pt")
        states = torch.load(f"{folder}/state.pt")
    made[0].load_state_dict(states["model"])
    made[1].load_state_dict(states["optimizer"])
    return told


@shape("mlp", "cnn")
def hooks_on_modules(model: nn.Module, data: Any) -> Any:
    seen: list[int] = []
    next(model.children()).register_forward_hook(lambda *_: seen.append(1))
    return epoch(private(model, data))


@shape("mlp", "cnn")
def batch_norm_fixed(model: nn.Module, data: Any) -> Any:
    wide: Any = nn.Sequential(*model.children())
    place = nn.BatchNorm1d(8) if data[0][0].dim() == 1 else nn.BatchNorm2d(4)
    wide = nn.Sequential(wide[0], place, *wide[1:])
    fixed = qt.ModuleValidator.fix(wide)
    return epoch(private(fixed, data))


@shape("mlp", expected="refused")
def batch_norm_as_it_is(model: nn.Module, data: Any) -> Any:
    return epoch(private(nn.Sequential(nn.BatchNorm1d(6), model), data))


@shape(*SOME)
def automatic_clipping(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, clipping="automatic"))


@shape(*SOME)
def per_layer_clipping(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, clipping=PerLayer()))


@shape("mlp", expected="refused")
def adaptive_clipping(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, clipping="adaptive"))


@shape("mlp", "cnn", "lstm")
def people(model: nn.Module, data: Any) -> Any:
    whose = [k // 4 for k in range(N)]
    return epoch(private(model, data, person=whose, loader=DataLoader(data, batch_size=4), records_per_person=2))


@shape("mlp", "cnn")
def subset_sampler(model: nn.Module, data: Any) -> Any:
    return epoch(
        private(model, data, loader=DataLoader(data, batch_size=6, sampler=SubsetRandomSampler(range(24))))
    )


@shape("mlp")
def random_split_of_the_data(model: nn.Module, data: Any) -> Any:
    train, _ = random_split(data, [36, 12])
    return epoch(private(model, train))


@shape("mlp")
def batch_sampler(model: nn.Module, data: Any) -> Any:
    batches = BatchSampler(RandomSampler(data), BATCH, drop_last=True)
    return epoch(private(model, data, loader=DataLoader(data, batch_sampler=batches)))


@shape("mlp", expected="refused")
def weighted_sampler(model: nn.Module, data: Any) -> Any:
    sampler: Any = WeightedRandomSampler([1.0] * N, N)
    return epoch(private(model, data, loader=DataLoader(data, batch_size=BATCH, sampler=sampler)))


class Stream(IterableDataset[Any]):
    """Records in order."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[k] for k in range(N))


@shape("mlp", "cnn")
def stream_of_public_length(model: nn.Module, data: Any) -> Any:
    loader: Any = DataLoader(Stream(data), batch_size=BATCH)
    return epoch(private(model, data, loader=loader, n_public=N, sampling="single-pass"))


@shape("mlp", expected="refused")
def stream_without_length(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, loader=DataLoader(Stream(data), batch_size=BATCH)))


@shape("mlp")
def loader_workers(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, loader=DataLoader(data, batch_size=BATCH, num_workers=2, prefetch_factor=4)))


@shape("mlp", "cnn")
def epochs_in_turns(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, poisson_sampling=False))


@shape("mlp", expected="not private")
def without_noise(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, noise_multiplier=0.0))


def _accelerated(model: nn.Module, data: Any, first: bool) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    if first:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model, optimizer, loader, criterion = private(model, data, optimizer=optimizer, loader=loader)
    if not first:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(criterion(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loader.privacy


@shape("mlp", "cnn")
def accelerate_before(model: nn.Module, data: Any) -> Any:
    return _accelerated(model, data, True)


@shape("mlp", "cnn")
def accelerate_after(model: nn.Module, data: Any) -> Any:
    return _accelerated(model, data, False)


def _lightning(model: nn.Module, data: Any, automatic: bool) -> Any:
    import lightning

    private_model, optimizer, loader, criterion = private(model, data)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.automatic_optimization = private_model, automatic

        def training_step(self, batch: Any, _: int) -> Any:
            loss = criterion(self.model(batch[0]), batch[1])
            if automatic:
                return loss
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            return self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)
    return loader.privacy


@shape("mlp", "cnn")
def lightning_automatic(model: nn.Module, data: Any) -> Any:
    return _lightning(model, data, True)


@shape("mlp", "cnn")
def lightning_manual(model: nn.Module, data: Any) -> Any:
    return _lightning(model, data, False)


@shape("mlp", "cnn")
def trainer(model: nn.Module, data: Any) -> Any:
    from transformers import TrainingArguments

    from quietgrad.torch.hugging_face import DPTrainer

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.model(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    rows = [{"x": x, "labels": int(y)} for x, y in data]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=3, save_strategy="no", disable_tqdm=True,
            report_to=[], use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        privacy = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        made = DPTrainer(model=WithLoss(), args=args, train_dataset=rows, privacy=privacy)
        made.train()
        return made.privacy


@shape("mlp", expected="runs, conditional")
def fgsm(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, _ = private(model, data)
    for x, y in loader:
        x.requires_grad_()
        first: Any = F.cross_entropy(model(x), y)
        first.backward()
        optimizer.zero_grad()
        second: Any = F.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y)
        second.backward()
        optimizer.step()
    return loader.privacy


@shape("mlp", "cnn", expected="runs, conditional")
def penalty_in_the_loss(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y) + 1e-3 * sum(param.square().sum() for param in model.parameters())
        loss.backward()
        optimizer.step()
    return loader.privacy


@shape("mlp", "cnn", expected="runs, conditional")
def accuracy_while_training(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        criterion(output, y).backward()
        (output.argmax(1) == y).float().mean().item()
        optimizer.step()
    return loader.privacy


@shape("mlp", expected="refused")
def compiled_model(model: nn.Module, data: Any) -> Any:
    made = private(model, data)
    compiled: Any = torch.compile(made[0], backend="eager")
    return epoch((compiled, *made[1:]))


# --- all of them -------------------------------------------------------------------------------------------------


def outcome(run: Script, name: str) -> tuple[str, str]:
    """What became of a script, and what an error said."""
    torch.manual_seed(0)
    make, records = MODELS[name]
    try:
        told = run(make(), records())
    except ImportError as error:
        return "not installed", str(error)
    except (QuietgradError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        # A refusal of the library's own ends in a full sentence; those of others are bare errors.
        own = isinstance(error, QuietgradError) or _raised_here(error)
        return ("refused" if own else "bare"), f"{type(error).__name__}: {error}"
    except Exception as error:
        return "bare", f"{type(error).__name__}: {error}"
    if not told.is_private:
        return "not private", ""
    return ("runs" if told.condition is None else "runs, conditional"), ""


def _raised_here(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "quietgrad" in trace.tb_frame.f_code.co_filename


def main() -> None:
    """All scripts, or those that are named."""
    from benchmarks import scripts_more, scripts_processes, scripts_shapes, scripts_tutorials  # noqa: F401

    warnings.simplefilter("ignore")
    named = sys.argv[1:]
    rows, begin = [], time.perf_counter()
    for name, (run, models, expected) in SHAPES.items():
        for model in models if not named or name in named else ():
            made, said = outcome(run, model)
            as_expected = made in (expected, "not installed")
            rows.append({"script": name, "model": model, "expected": expected, "outcome": made, "said": said[:160]})
            if not as_expected:
                print(name, model, made, said[:300], flush=True)
    counts = {
        kind: sum(row["outcome"] == kind for row in rows) for kind in sorted({row["outcome"] for row in rows})
    }
    false_refusals = [row for row in rows if row["outcome"] == "refused" != row["expected"]]
    bare = [row for row in rows if row["outcome"] == "bare"]
    others = [row for row in rows if row["outcome"] not in (row["expected"], "not installed")]
    print(len(rows), counts, f"{time.perf_counter() - begin:.0f} s")
    found = {
        "scripts": len(rows),
        "counts": counts,
        "false_refusals": len(false_refusals),
        "bare_errors": len(bare),
    }
    if named:
        return
    save(OUT, {**found, "unexpected": others, "rows": rows}, "accelerate", "transformers", "lightning")


if __name__ == "__main__":
    from benchmarks import scripts  # the module that the others register with

    scripts.main()
