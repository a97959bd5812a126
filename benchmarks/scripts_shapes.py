"""More ordinary scripts: trainer classes, several outputs and inputs, packed texts, tied weights, GANs, averages.

Registered with :mod:`benchmarks.scripts`.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import quietgrad as qg
import quietgrad.torch as qt
from benchmarks.scripts import BATCH, CLASSES, WORDS, N, epoch, private, shape

CONDITIONAL = "runs, conditional"


# --- memory, scaling and clipping together -----------------------------------------------------------------------


def _step(model: nn.Module, optimizer: Any, loss: Any, scaler: Any) -> None:
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@shape("mlp", "cnn", expected=CONDITIONAL)
def amp_recipe(model: nn.Module, data: Any) -> Any:
    """torch's recipe of mixed precision, with its order of calls."""
    model, optimizer, loader, criterion = private(model, data)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(model(x), y)
        _step(model, optimizer, loss, scaler)
    return loader.privacy


@shape("mlp", "cnn", expected=CONDITIONAL)
def amp_recipe_in_pieces(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    scaler = torch.amp.GradScaler("cpu")
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            _step(model, optimizer, criterion(model(x), y), scaler)
    return loader.privacy


@shape("mlp", "lstm")
def clipped_in_pieces(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return loader.privacy


@shape("mlp", expected=CONDITIONAL)
def accumulated_by_division(model: nn.Module, data: Any) -> Any:
    """Four small batches make a step, the loss divided by four."""
    model, optimizer, loader, criterion = private(model, data, loader=DataLoader(data, batch_size=4))
    for number, (x, y) in enumerate(loader):
        (criterion(model(x), y) / 4).backward()
        if (number + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return loader.privacy


# --- classes around a loop ---------------------------------------------------------------------------------------


class Engine:
    """The trainer class of a hundred repositories."""

    def __init__(self, model: Any, optimizer: Any, loader: Any, loss: Any, scheduler: Any = None) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.loss, self.scheduler = loss, scheduler
        self.history: list[float] = []
        self.hooks: dict[str, list[Callable[..., Any]]] = {"epoch": [], "step": []}

    def train(self, epochs: int) -> None:
        for number in range(epochs):
            self.model.train()
            for step, batch in enumerate(self.loader):
                inputs, targets = batch[0].to("cpu", non_blocking=True), batch[1].to("cpu")
                self.optimizer.zero_grad()
                self.loss(self.model(inputs), targets).backward()
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
                for hook in self.hooks["step"]:
                    hook(self, step)
            for hook in self.hooks["epoch"]:
                hook(self, number)


@shape("mlp", "cnn", "gru")
def trainer_class(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data, epochs=2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(loader))
    engine = Engine(model, optimizer, loader, criterion, schedule)
    engine.hooks["step"].append(lambda own, step: own.history.append(own.optimizer.param_groups[0]["lr"]))
    engine.train(2)
    return loader.privacy


@shape("mlp", "cnn")
def best_model_is_kept(model: nn.Module, data: Any) -> Any:
    """Validation on a part of its own after each epoch; the best is saved whole and loaded again."""
    train, held = random_split(data, [N - 12, 12])
    model, optimizer, loader, criterion = private(model, train, epochs=2)
    best, file = math.inf, io.BytesIO()

    def validate(own: Engine, _: int) -> None:
        nonlocal best
        own.model.eval()
        with torch.no_grad():
            value = sum(float(F.cross_entropy(own.model(x), y)) for x, y in DataLoader(held, batch_size=6))
        if value < best:
            best = value
            file.seek(0)
            torch.save(own.model, file)

    engine = Engine(model, optimizer, loader, criterion)
    engine.hooks["epoch"].append(validate)
    engine.train(2)
    file.seek(0)
    torch.load(file, weights_only=False)(data.tensors[0][:2])
    return loader.privacy


@shape("mlp")
def engine_prints_epsilon_each_epoch(model: nn.Module, data: Any) -> Any:
    engine = qt.PrivacyEngine(accountant="rdp")
    model, optimizer, loader, criterion = engine.make_private(
        module=model, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3), noise_multiplier=1.1,
        data_loader=DataLoader(data, batch_size=BATCH), max_grad_norm=1.0, criterion=nn.CrossEntropyLoss(),
    )  # fmt: skip
    for _ in range(2):
        epoch((model, optimizer, loader, criterion))
        f"(ε = {engine.get_epsilon(delta=1e-5):.2f}, {loader.privacy.epsilon:.2f}, {len(engine.accountant)})"
    return loader.privacy


@shape("mlp", "cnn")
def lightning_like_module(model: nn.Module, data: Any) -> Any:
    """A module whose training_step calls itself and returns its own loss, stepped by a closure."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss = model, nn.CrossEntropyLoss()

        def forward(self, batch: Any) -> Any:
            x, y = batch
            return self.loss(self.net(x), y)

        def training_step(self, batch: Any) -> Any:
            return self(batch)

    own = Module()
    private_module, optimizer, loader = private(own, data, criterion=None, wrap_model=False)
    for batch in loader:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = private_module.training_step(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    return loader.privacy


@shape("mlp", expected="refused")
def training_step_of_a_wrapped_module(model: nn.Module, data: Any) -> Any:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self(batch[0]), batch[1])

    private_module, optimizer, loader = private(Module(), data, criterion=None)
    for batch in loader:
        private_module.training_step(batch).backward()
        optimizer.step()


# --- inputs and outputs ------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Classes and a number, from one trunk."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.number = trunk, nn.Linear(CLASSES, 1)

    def forward(self, x: Tensor) -> Any:
        scores = self.trunk(x)
        return {"scores": scores, "number": self.number(scores).squeeze(-1)}


@shape("mlp", "cnn")
def two_heads(model: nn.Module, data: Any) -> Any:
    def loss(output: Any, target: Tensor) -> Any:
        return F.cross_entropy(output["scores"], target) + 0.1 * F.mse_loss(output["number"], target.float())

    return epoch(private(TwoHeads(model), data, criterion=loss))


@shape("mlp", expected=CONDITIONAL)
def two_losses_added(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader = private(TwoHeads(model), data, criterion=None)
    for x, y in loader:
        optimizer.zero_grad()
        output = model(x)
        loss: Any = F.cross_entropy(output["scores"], y) + 0.1 * F.mse_loss(output["number"], y.float())
        loss.backward()
        optimizer.step()
    return loader.privacy


class Rows(Dataset[Any]):
    """Dictionaries, as tokenizers and data sets' libraries give them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> dict[str, Any]:
        x, y = self.data[place]
        return {"x": x, "label": int(y), "id": f"row-{place}"}


@shape("mlp", "transformer")
def dictionaries_by_keyword(model: nn.Module, data: Any) -> Any:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
            scores = self.net(x)
            return {"scores": scores, "loss": None if label is None else F.cross_entropy(scores, label)}

    named = Named()
    loader = DataLoader(Rows(data), batch_size=BATCH, shuffle=True)
    own, optimizer, loader = private(named, data, loader=loader, criterion=None)
    for batch in loader:
        optimizer.zero_grad()
        own(x=batch["x"], label=batch["label"])["loss"].backward()
        optimizer.step()
    return loader.privacy


@shape("mlp", "cnn")
def custom_collate(model: nn.Module, data: Any) -> Any:
    def collate(samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack([each / 2 for each in x]), torch.as_tensor([int(each) for each in y])

    return epoch(private(model, data, loader=DataLoader(data, batch_size=BATCH, collate_fn=collate)))


@shape("mlp")
def data_sets_joined(model: nn.Module, data: Any) -> Any:
    both: Any = ConcatDataset([Subset(data, range(20)), Subset(data, range(20, N))])
    return epoch(private(model, both, loader=DataLoader(both, batch_size=BATCH, shuffle=True)))


@shape("lstm")
def packed_sequences(model: nn.Module, data: Any) -> Any:
    """Texts of several lengths, packed by their lengths in the model."""
    lengths = torch.arange(N) % 5 + 2
    texts = TensorDataset(data.tensors[0], lengths, data.tensors[1])

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own: Any = model

        def forward(self, x: Tensor, length: Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.own.table(x), length.cpu(), batch_first=True, enforce_sorted=False
            )
            _, (state, _) = self.own.layer(packed)
            return self.own.out(state[-1])

    private_model, optimizer, loader, criterion = private(
        Packed(), texts, loader=DataLoader(texts, batch_size=BATCH)
    )
    for x, length, y in loader:
        optimizer.zero_grad()
        criterion(private_model(x, length), y).backward()
        optimizer.step()
    return loader.privacy


class Tied(nn.Module):
    """A language model whose table of tokens is its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, WORDS, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Any:
        return self.out(self.layer(self.table(x))[0])


@shape("lstm")
def tied_language_model(model: nn.Module, data: Any) -> Any:
    tied, texts = Tied(), TensorDataset(data.tensors[0][:, :-1], data.tensors[0][:, 1:])

    def loss(output: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return epoch(private(tied, texts, loader=DataLoader(texts, batch_size=BATCH), criterion=loss))


@shape("lstm")
def bag_of_embeddings(model: nn.Module, data: Any) -> Any:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Any:
            return self.out(self.bag(x))

    return epoch(private(Bag(), data))


@shape("mlp", "cnn")
def autoencoder(model: nn.Module, data: Any) -> Any:
    width = data.tensors[0][0].numel()
    net = nn.Sequential(nn.Flatten(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width))
    private_net, optimizer, loader, criterion = private(
        net, data, criterion=lambda output, x: F.mse_loss(output, x.flatten(1))
    )
    for x, _ in loader:
        optimizer.zero_grad()
        criterion(private_net(x), x).backward()
        optimizer.step()
    return loader.privacy


class Variational(nn.Module):
    """Noise of its own for each record."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean, self.log_scale, self.back = nn.Linear(width, 3), nn.Linear(width, 3), nn.Linear(3, width)

    def forward(self, x: Tensor) -> Any:
        x = x.flatten(1)
        mean, log_scale = self.mean(x), self.log_scale(x)
        return self.back(mean + torch.randn_like(mean) * log_scale.exp()), mean, log_scale


@shape("mlp", "cnn")
def variational_autoencoder(model: nn.Module, data: Any) -> Any:
    def loss(output: Any, x: Tensor) -> Any:
        back, mean, log_scale = output
        divergence = -0.5 * (1 + 2 * log_scale - mean.square() - (2 * log_scale).exp()).sum(1).mean()
        return F.mse_loss(back, x.flatten(1)) + 0.1 * divergence

    net = Variational(data.tensors[0][0].numel())
    private_net, optimizer, loader, criterion = private(net, data, criterion=loss)
    for x, _ in loader:
        optimizer.zero_grad()
        criterion(private_net(x), x).backward()
        optimizer.step()
    return loader.privacy


@shape("mlp")
def double_inputs_and_whole_numbers(model: nn.Module, data: Any) -> Any:
    """A table as numpy gives it: float64 numbers, int32 labels."""
    given = TensorDataset(data.tensors[0].double(), data.tensors[1].int())

    def collate(samples: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(samples)
        return x.float(), y.long()

    return epoch(private(model, given, loader=DataLoader(given, batch_size=BATCH, collate_fn=collate)))


@shape("mlp")
def binary_scores(model: nn.Module, data: Any) -> Any:
    given = TensorDataset(data.tensors[0], (data.tensors[1] > 1).float())
    net = nn.Sequential(model, nn.Linear(CLASSES, 1), nn.Flatten(0))
    loader = DataLoader(given, batch_size=BATCH)
    return epoch(private(net, given, loader=loader, criterion=nn.BCEWithLogitsLoss()))


# --- two networks, averages, penalties ---------------------------------------------------------------------------


@shape("mlp", expected=CONDITIONAL)
def private_discriminator(model: nn.Module, data: Any) -> Any:
    """A GAN in which the discriminator alone sees records."""
    generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 6))
    own = torch.optim.Adam(generator.parameters(), lr=1e-3)
    judge, optimizer, loader = private(nn.Sequential(model, nn.Linear(CLASSES, 1)), data, criterion=None)
    for x, _ in loader:
        optimizer.zero_grad()
        made = generator(torch.randn(len(x), 2))
        real: Any = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
        real.backward()
        optimizer.step()
        own.zero_grad()
        fooled: Any = F.softplus(-judge(generator(torch.randn(BATCH, 2)))).mean()
        fooled.backward()
        own.step()
    return loader.privacy


@shape("mlp", expected="refused")
def contrastive_loss(model: nn.Module, data: Any) -> Any:
    """A loss of pairs of records cannot be clipped record by record."""

    def loss(output: Tensor, target: Tensor) -> Any:
        if len(output) < 2:
            raise ValueError("a contrastive loss needs two rows")
        return (output @ output.T).logsumexp(1).mean()

    return epoch(private(model, data, criterion=loss))


@shape("mlp", "cnn")
def averaged_model_and_swa(model: nn.Module, data: Any) -> Any:
    model, optimizer, loader, criterion = private(model, data)
    averages: Any = torch.optim.swa_utils
    mean = averages.AveragedModel(model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9))
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        mean.update_parameters(model)
        schedule.step()
    mean(data.tensors[0][:2])
    return loader.privacy


@shape("mlp", "cnn")
def distilled_from_a_public_teacher(model: nn.Module, data: Any) -> Any:
    teacher = copy.deepcopy(model).eval().requires_grad_(False)

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = model, teacher

        def forward(self, x: Tensor) -> Any:
            return self.student(x), self.teacher(x)

    def loss(output: Any, target: Tensor) -> Any:
        own, known = output
        soft = F.kl_div(own.log_softmax(-1), known.softmax(-1), reduction="batchmean")
        return F.cross_entropy(own, target) + soft

    student = Student()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return epoch(private(student, data, optimizer=optimizer, criterion=loss))


@shape("mlp", "cnn")
def frozen_trunk_then_whole(model: nn.Module, data: Any) -> Any:
    """First the last layer, then all: two loops of one engine, whose ε is that of both."""
    layers = list(model.children())
    for param in model.parameters():
        param.requires_grad_(False)
    layers[-1].requires_grad_(True)
    engine, told = qt.PrivacyEngine(), []
    for _ in range(2):
        trained = [param for param in model.parameters() if param.requires_grad]
        own, optimizer, loader, criterion = engine.make_private(
            module=model, optimizer=torch.optim.SGD(trained, lr=0.1), max_grad_norm=1.0, noise_multiplier=1.0,
            data_loader=DataLoader(data, batch_size=BATCH), criterion=nn.CrossEntropyLoss(),
        )  # fmt: skip
        told.append(epoch((own, optimizer, loader, criterion)))
        model = own.to_standard_module().requires_grad_(True)
    assert engine.get_epsilon(1e-5) > told[-1].epsilon
    return told[-1]


@shape("mlp")
def parameters_of_two_rates(model: nn.Module, data: Any) -> Any:
    first, *_, last = model.children()
    optimizer = torch.optim.AdamW(
        [{"params": first.parameters(), "lr": 1e-3}, {"params": last.parameters(), "lr": 1e-2}], weight_decay=0.01
    )
    return epoch(private(model, data, optimizer=optimizer))


@shape("mlp")
def stream_with_a_smaller_public_length(model: nn.Module, data: Any) -> Any:
    from benchmarks.scripts import Stream

    loader: Any = DataLoader(Stream(data), batch_size=BATCH)
    return epoch(private(model, data, loader=loader, n_public=2 * BATCH))


@shape("mlp")
def fit_then_continue_by_verbs(model: nn.Module, data: Any) -> Any:
    method, budget = qg.DPAdam(steps=3, batch_size=BATCH), qg.Budget(4.0, 1e-5)
    qt.fit(model, nn.CrossEntropyLoss(), data, method, budget=budget, n_public=N, progress=False)
    return epoch(private(model, data))
