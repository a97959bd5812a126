"""More ordinary scripts: schedules, batches of many classes, Opacus' own names, Lightning, accelerate, adapters.

Registered with :mod:`benchmarks.scripts`, which runs them.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import quietgrad as qg
import quietgrad.torch as qt
from benchmarks.scripts import BATCH, CLASSES, WORDS, N, epoch, private, shape
from benchmarks.scripts_processes import two_processes
from benchmarks.scripts_tutorials import _bert, _conversations, _gpt, _lora, _tokens, _trainer_privacy

own: Any = qt  # names of Opacus that a type checker does not know


def engine(model: nn.Module, data: Any, **settings: Any) -> Any:
    """Opacus' engine, as its tutorials call it."""
    made: Any = qt.PrivacyEngine()
    known: dict[str, Any] = {
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3), "max_grad_norm": 1.0,
        "data_loader": DataLoader(data, batch_size=BATCH, shuffle=True),
    }  # fmt: skip
    if "target_epsilon" in settings:
        return made, *made.make_private_with_epsilon(module=model, target_delta=1e-5, **(known | settings))
    return made, *made.make_private(module=model, **({"noise_multiplier": 1.0} | known | settings))


# --- schedules ---------------------------------------------------------------------------------------------------


@shape("mlp", "lstm")
def noise_that_falls(model: nn.Module, data: Any) -> Any:
    made = private(model, data, epochs=2, noise_schedule=qt.ExponentialNoise(gamma=0.8))
    epoch(made)
    return epoch(made)


@shape("mlp", "cnn")
def both_schedules_at_an_epsilon(model: nn.Module, data: Any) -> Any:
    made, *rest = engine(
        model, data, target_epsilon=6.0, epochs=3, criterion=nn.CrossEntropyLoss(),
        noise_schedule=qt.LambdaNoise(noise_lambda=lambda e: 1.0 / (1.0 + e)),
        clip_schedule=qt.StepGradClip(step_size=1, gamma=0.7),
    )  # fmt: skip
    for _ in range(3):
        epoch(rest)
    assert made.get_epsilon(1e-5) <= 6.0
    return rest[2].privacy


@shape("mlp")
def schedules_of_a_fit(model: nn.Module, data: Any) -> Any:
    return qt.fit(
        model, nn.CrossEntropyLoss(), data, qg.DPAdam(steps=8, batch_size=BATCH), budget=qg.Budget(8.0, 1e-5),
        n_public=N, progress=False, noise_schedule=qt.StepNoise(step_size=1, gamma=0.5),
        clip_schedule=qt.TableGradClip(factors=[1, 2]),
    ).privacy  # fmt: skip


@shape("transformer")
def schedules_of_a_loop_that_is_kept(model: nn.Module, data: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        loop = qt.PrivateLoop(
            model, nn.CrossEntropyLoss(), data, optimizer=torch.optim.Adam(model.parameters()), batch_size=BATCH,
            epochs=2, noise_multiplier=1.0, max_grad_norm=1.0, noise_schedule=qt.ExponentialNoise(gamma=0.9),
            folder=f"{folder}/run",
        )  # fmt: skip
        for batch in loop:
            loop.step(batch)
        return qg.load(f"{folder}/run").privacy


@shape("mlp", expected="refused")
def scheduler_as_opacus_writes_it(model: nn.Module, data: Any) -> Any:
    """Its scheduler changes the optimizer while it runs."""
    made = private(model, data)
    scheduler: Any = own.ExponentialNoise(made[1], gamma=0.9)
    epoch(made)
    scheduler.step()
    return made[2].privacy


# --- losses ------------------------------------------------------------------------------------------------------


@shape("mlp", "cnn")
def class_weights(model: nn.Module, data: Any) -> Any:
    weight = torch.linspace(1.0, 2.0, CLASSES)
    criterion = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    return epoch(private(model, data, criterion=criterion, loss_reduction="mean"))


@shape("mlp")
def class_weights_in_a_mean(model: nn.Module, data: Any) -> Any:
    """Each record loses its weight, which a warning says."""
    return epoch(private(model, data, criterion=nn.CrossEntropyLoss(weight=torch.ones(CLASSES))))


@shape("mlp", "lstm")
def smoothed_labels(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, criterion=nn.CrossEntropyLoss(label_smoothing=0.1)))


class Focal(nn.Module):
    """The focal loss, as people copy it."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        cross = F.cross_entropy(logits, target, reduction="none")
        return ((1 - torch.exp(-cross)) ** 2 * cross).mean()


@shape("mlp", "cnn")
def focal_loss(model: nn.Module, data: Any) -> Any:
    return epoch(private(model, data, criterion=Focal()))


@shape("mlp")
def multi_label_with_positive_weights(model: nn.Module, data: Any) -> Any:
    rows = [(x, F.one_hot(y, CLASSES).float()) for x, y in data]
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((CLASSES,), 3.0))
    return epoch(private(model, rows, loader=DataLoader(rows, batch_size=BATCH), criterion=criterion))  # type: ignore[arg-type]


@shape("mlp")
def regression(model: nn.Module, data: Any) -> Any:
    rows = [(x, x[:CLASSES]) for x, _ in data]
    return epoch(private(model, rows, loader=DataLoader(rows, batch_size=BATCH), criterion=nn.HuberLoss()))  # type: ignore[arg-type]


# --- batches -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Data:
    """A batch."""

    x: Tensor
    y: Tensor


Pair = namedtuple("Pair", "x y")


class Batch:
    """A batch as a class with ``to`` and ``pin_memory``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Batch:
        return Batch(self.x.to(device), self.y.to(device))

    def pin_memory(self) -> Batch:
        return self


def _of_class(model: nn.Module, data: Any, make: Any) -> Any:
    def collate(rows: list[Any]) -> Any:
        return make(torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))

    made, optimizer, loader, criterion = private(
        model, data, loader=DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    )
    for batch in loader:
        batch = batch.to("cpu") if hasattr(batch, "to") else batch
        optimizer.zero_grad()
        criterion(made(batch.x), batch.y).backward()
        optimizer.step()
    return loader.privacy


@shape("mlp", "lstm")
def batch_is_a_dataclass(model: nn.Module, data: Any) -> Any:
    return _of_class(model, data, Data)


@shape("mlp")
def batch_is_a_named_tuple(model: nn.Module, data: Any) -> Any:
    return _of_class(model, data, Pair)


@shape("mlp", "cnn")
def batch_is_an_object(model: nn.Module, data: Any) -> Any:
    return _of_class(model, data, Batch)


@shape("mlp")
def batch_is_a_namespace(model: nn.Module, data: Any) -> Any:
    return _of_class(model, data, lambda x, y: SimpleNamespace(x=x, y=y))


@shape("transformer")
def batch_is_a_batch_encoding(model: nn.Module, data: Any) -> Any:
    """As a tokenizer returns it, moved to a device and unpacked into the model."""
    from transformers import BatchEncoding

    def collate(rows: list[Any]) -> Any:
        ids = torch.stack([x for x, _ in rows])
        return BatchEncoding({"input_ids": ids, "labels": torch.stack([y for _, y in rows])})

    made, optimizer, loader, _ = private(
        _bert(), data, loader=DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    )
    made.train()
    for batch in loader:
        optimizer.zero_grad()
        made(**batch.to("cpu")).loss.backward()
        optimizer.step()
    return loader.privacy


# --- models ------------------------------------------------------------------------------------------------------


@shape("mlp", "cnn")
def compiled_before(model: nn.Module, data: Any) -> Any:
    compiled: Any = torch.compile(model)
    return epoch(private(compiled, data))


@shape("mlp")
def compiled_in_place(model: nn.Module, data: Any) -> Any:
    model.compile()
    made = private(model, data)
    made[0].compile()
    return epoch(made)


@shape("mlp")
def compiled_fit(model: Any, data: Any) -> Any:
    model[0] = torch.compile(model[0])
    algorithm, budget = qg.DPSGD(steps=3, batch_size=BATCH), qg.Budget(8.0, 1e-5)
    return qt.fit(model, nn.CrossEntropyLoss(), data, algorithm, budget=budget, n_public=N, progress=False).privacy


@shape("mlp", "cnn")
def head_first_then_all(model: Any, data: Any) -> Any:
    """Gradual unfreezing: each part is planned as a run of its own."""
    for layer in model[:-1]:
        layer.requires_grad_(False)
    epoch(private(model, data))
    model.requires_grad_(True)
    return epoch(private(model, data))


@shape("mlp", expected="refused")
def unfrozen_on_the_way(model: Any, data: Any) -> Any:
    model[0].requires_grad_(False)
    made = private(model, data, epochs=2)
    epoch(made)
    model[0].requires_grad_(True)
    return epoch(made)


@shape("transformer")
def adapters_by_opacus_verbs(model: nn.Module, data: Any) -> Any:
    """Opacus' tutorial on LoRA: a frozen bfloat16 base, the criterion of the loop's own over logits."""
    base = _lora(_gpt().to(torch.bfloat16))
    rows = [{"input_ids": x, "labels": x} for x, _ in data]
    loader: Any = DataLoader(rows, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
    _, made, optimizer, loader, criterion = engine(
        base, rows, data_loader=loader, target_epsilon=8.0, epochs=1, criterion=qt.causal_lm_loss,
        optimizer=torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=1e-3),
    )  # fmt: skip
    made.train()
    for batch in loader:
        optimizer.zero_grad()
        criterion(made(input_ids=batch["input_ids"]).logits, batch["labels"]).backward()
        optimizer.step()
    return loader.privacy


# --- Opacus' names and idioms ------------------------------------------------------------------------------------


@shape("mlp", "cnn")
def opacus_paths(model: nn.Module, data: Any) -> Any:
    """A script whose imports had ``opacus`` replaced by ``quietgrad.torch``."""
    from quietgrad.torch.accountants.utils import get_noise_multiplier  # type: ignore[import-not-found]
    from quietgrad.torch.optimizers import DPOptimizer  # type: ignore[import-not-found]
    from quietgrad.torch.utils.batch_memory_manager import BatchMemoryManager  # type: ignore[import-not-found]
    from quietgrad.torch.validators import ModuleValidator  # type: ignore[import-not-found]

    model = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(model, strict=False)
    sigma = get_noise_multiplier(target_epsilon=8.0, target_delta=1e-5, sample_rate=BATCH / N, epochs=1)
    made, optimizer, loader, criterion = private(model, data, noise_multiplier=sigma)
    assert isinstance(optimizer, DPOptimizer)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            criterion(made(x), y).backward()
            optimizer.step()
    return loader.privacy


@shape("mlp", expected="refused")
def samplers_registered_by_hand(model: nn.Module, data: Any) -> Any:
    @own.register_grad_sampler(nn.Linear)  # type: ignore[untyped-decorator]
    def compute(layer: Any, activations: Any, backprops: Any) -> Any:
        return {layer.weight: backprops}

    return epoch(private(model, data))


@shape("mlp", expected="refused")
def noise_multiplier_set_on_the_way(model: nn.Module, data: Any) -> Any:
    made = private(model, data, epochs=2)
    epoch(made)
    made[1].noise_multiplier = 0.5
    return epoch(made)


@shape("mlp", "cnn")
def trained_until_epsilon_is_reached(model: nn.Module, data: Any) -> Any:
    """Without a planned end: ε is asked for after every epoch."""
    made, *rest = engine(model, data, criterion=nn.CrossEntropyLoss())
    while made.get_epsilon(delta=1e-5) < 9.0:
        epoch(rest)
    return rest[2].privacy


@shape("mlp")
def left_in_the_middle_of_an_epoch(model: nn.Module, data: Any) -> Any:
    made, optimizer, loader, criterion = private(model, data, epochs=3)
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        optimizer.step()
        if number == 1:
            break
    assert "2 of 12 planned steps so far" in str(loader.privacy)
    return loader.privacy


@shape("mlp")
def cross_validation(model: nn.Module, data: Any) -> Any:
    """A model, an engine and a loader for each fold."""
    places = torch.randperm(N).tolist()
    for fold in range(3):
        held_out = set(places[fold::3])
        rows = Subset(data, [k for k in range(N) if k not in held_out])
        _, *made = engine(copy.deepcopy(model), rows, criterion=nn.CrossEntropyLoss(), epochs=1)
        stated = epoch(made)
    return stated


@shape("mlp", "cnn")
def progress_bar_and_device(model: nn.Module, data: Any) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made, optimizer, loader, criterion = private(model.to(device), data)
    for x, y in tqdm(loader, disable=True):
        x, y = x.to(device, non_blocking=True), y.to(device)
        optimizer.zero_grad(set_to_none=True)
        criterion(made(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        made.eval()
        made(torch.stack([x for x, _ in data]).to(device)).argmax(1)
    torch.save(made._module.state_dict(), tempfile.mkdtemp() + "/weights.pt")
    return loader.privacy


@shape("mlp")
def weight_decay_by_groups(model: nn.Module, data: Any) -> Any:
    plain = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    made = private(model, data, optimizer=optimizer)
    return epoch(made, before=lambda model: scheduler.step)


# --- Lightning, accelerate, Trainer, several processes -----------------------------------------------------------

_QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


@shape("mlp", "cnn")
def lightning_in_configure_optimizers(model: nn.Module, data: Any) -> Any:
    """The network is made private in place; validation, a scheduler and checkpoints are Lightning's."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Any) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            return self.private[1](self.net(x), y)

        def validation_step(self, batch: Any, _: int) -> None:
            x, y = batch
            self.log("val_accuracy", (self(x).argmax(1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
            _, optimizer, loader, criterion = private(
                self.net, data, optimizer=optimizer, wrap_model=False, epochs=2
            )  # fmt: skip
            self.private = [loader, criterion]
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def train_dataloader(self) -> Any:
            return self.private[0]

        def val_dataloader(self) -> Any:
            return DataLoader(data, batch_size=BATCH)

    module = Module()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_epochs=2, default_root_dir=folder, num_sanity_val_steps=0, **_QUIET)
        trainer.fit(module)
    return module.private[0].privacy


@shape("mlp")
def accelerate_with_clipping_and_metrics(model: nn.Module, data: Any) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made, optimizer, loader, criterion = private(model, data, noise_schedule=qt.ExponentialNoise(gamma=0.9))
    made, optimizer = accelerator.prepare(made, optimizer)
    made.train()
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(criterion(made(x), y))
        accelerator.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    accelerator.unwrap_model(made).state_dict()
    return loader.privacy


@shape("transformer")
def trainer_by_epochs_with_evaluation(model: nn.Module, data: Any) -> Any:
    rows = _tokens(data)
    return _trainer_privacy(
        model=_bert(), train_dataset=rows, eval_dataset=rows[:8],
        args={"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"},
    )  # fmt: skip


@shape("transformer", expected="not private")
def trainer_without_noise(model: nn.Module, data: Any) -> Any:
    from quietgrad.torch.hugging_face import DPTrainer

    class Plain(DPTrainer):
        """For debugging."""

        def __init__(self, *args: Any, privacy: Any, **settings: Any) -> None:
            super().__init__(*args, privacy={**privacy, "noise_multiplier": 0.0}, **settings)

    return _trainer_privacy(model=_bert(), train_dataset=_tokens(data), kind=Plain)


@shape("transformer")
def trainer_of_adapters_with_padding(model: nn.Module, data: Any) -> Any:
    """Supervised fine-tuning of records of many lengths."""
    from quietgrad.torch.hugging_face import DPTrainer

    class Padded(DPTrainer):
        """Lengths are padded to a public multiple."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, pad=qt.Multiple(4), **settings)

    rows = [
        {name: values[: 3 + k % 5] for name, values in row.items()} for k, row in enumerate(_conversations(data))
    ]

    def collate(batch: list[Any]) -> Any:
        return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}

    return _trainer_privacy(model=_lora(_gpt()), train_dataset=rows, data_collator=collate, kind=Padded)


@two_processes("mlp")
def ddp_with_schedules(model: nn.Module, data: Any) -> Any:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    made = private(
        wrapped, data, optimizer=optimizer, epochs=2, noise_schedule=qt.StepNoise(step_size=1, gamma=0.5),
        clip_schedule=qt.ExponentialGradClip(gamma=0.5),
    )  # fmt: skip
    epoch(made)
    return epoch(made)


@two_processes("mlp")
def fsdp2_with_schedules(model: nn.Module, data: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=BATCH,
        epochs=2, noise_multiplier=1.0, max_grad_norm=1.0, noise_schedule=qt.TableNoise(factors=[1.0, 2.0]),
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return loop.privacy


@two_processes("mlp")
def gradients_logged_on_two(model: nn.Module, data: Any) -> Any:
    """Every process reads the gradients after the step, as a logger does."""
    wrapped = nn.parallel.DistributedDataParallel(model)
    made, optimizer, loader, criterion = private(
        wrapped, data, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1)
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        optimizer.step()
        assert sum(float(p.grad.norm()) for p in made.parameters() if p.grad is not None) > 0.0
    return loader.privacy


@two_processes("mlp", expected="refused")
def an_empty_shard(model: nn.Module, data: Any) -> Any:
    rank = torch.distributed.get_rank()
    rows = Subset(data, range(N) if rank == 0 else [])
    loop = qt.PrivateLoop(
        model, nn.CrossEntropyLoss(), rows, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=BATCH,
        steps=2, noise_multiplier=1.0, max_grad_norm=1.0, sharded=True,
    )  # fmt: skip
    for batch in loop:
        loop.step(batch)
    return loop.privacy


@shape("transformer")
def language_model_by_steps(model: nn.Module, data: Any) -> Any:
    """Next tokens, mean over each record's own positions, gradients clipped by norm, a warm-up."""
    table = nn.Embedding(WORDS, 8)
    net = nn.Sequential(
        table, nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), nn.Linear(8, WORDS)
    )
    rows = [(x, x) for x, _ in data]
    made, optimizer, loader, criterion = private(
        net, rows, loader=DataLoader(rows, batch_size=BATCH), criterion=qt.causal_lm_loss,  # type: ignore[arg-type]
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-3), clipping="automatic",
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        criterion(made(x), y).backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    return loader.privacy
