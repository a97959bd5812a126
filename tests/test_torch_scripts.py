"""Ordinary scripts run, state an ε, and say whether it rests on the loop's own code; none is refused.

Each is in the shape that people write, with small data and a few steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad.torch as qt
from quietgrad.training.result import Privacy

transformers = pytest.importorskip("transformers", reason="needs quietgrad[hf]")
peft = pytest.importorskip("peft", reason="needs quietgrad[hf]")

SCRIPTS: dict[str, tuple[Callable[[], Privacy], bool]] = {}  # and whether ε rests on the loop's own code


def script(*, conditional: bool = False) -> Callable[[Callable[[], Privacy]], Callable[[], Privacy]]:
    def register(run: Callable[[], Privacy]) -> Callable[[], Privacy]:
        SCRIPTS[run.__name__] = run, conditional
        return run

    return register


# --- images -----------------------------------------------------------------------------------------------------

N, BATCH, CLASSES = 48, 12, 4


def images(channels: int = 1, side: int = 12) -> TensorDataset:
    return TensorDataset(torch.rand(N, channels, side, side), torch.randint(CLASSES, (N,)))


class SampleConvNet(nn.Module):
    """The convolutional network of Opacus' MNIST example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, 2, padding=2), nn.Conv2d(4, 8, 3, 1)
        self.fc1, self.fc2 = nn.Linear(8 * 2 * 2, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = x.view(-1, 8 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


def sgd(model: nn.Module, lr: float = 0.1) -> Any:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=lr, momentum=0.9)


def loop_of(model: nn.Module, loss: Any, data: Any, **settings: Any) -> qt.PrivateLoop:
    known: dict[str, Any] = {
        "noise_multiplier": 1.0, "max_grad_norm": 1.0, "batch_size": BATCH, "epochs": 1, "optimizer": sgd(model)
    }  # fmt: skip
    return qt.PrivateLoop(model, loss, data, **(known | settings))


def verbs(model: nn.Module, data: Any, **settings: Any) -> Any:
    loader = settings.pop("data_loader", None) or DataLoader(data, batch_size=BATCH, shuffle=True)
    known: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "optimizer": sgd(model)}
    return qt.make_private(module=model, data_loader=loader, **(known | settings))


def all_steps(loop: qt.PrivateLoop) -> Privacy:
    for batch in loop:
        loop.step(batch)
    return loop.privacy


@script()
def mnist_opacus_with_criterion() -> Privacy:
    model, optimizer, loader, criterion = verbs(SampleConvNet(), images(), criterion=nn.CrossEntropyLoss())
    for _epoch in range(2):
        model.train()
        for data, target in loader:
            data, target = data.to("cpu"), target.to("cpu")
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
    return loader.privacy


@script(conditional=True)
def mnist_opacus_example() -> Privacy:
    """Opacus' mnist.py: losses are read, a plain criterion is called."""
    engine = qt.PrivacyEngine(secure_mode=False)
    model = SampleConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    criterion = nn.CrossEntropyLoss()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(images(), batch_size=BATCH, num_workers=0),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    losses = []
    for _batch_idx, (data, target) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert engine.accountant.get_epsilon(delta=1e-5) > 0
    return loader.privacy


@script(conditional=True)
def flattened_in_the_loop() -> Privacy:
    model = nn.Sequential(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    private, optimizer, loader = verbs(model, images())
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x.view(x.shape[0], -1) / 0.5 - 1), y).backward()
        optimizer.step()
    return loader.privacy


def group_normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES),
    )  # fmt: skip


class Augmented(Dataset[Any]):
    """Random crops and flips, as torchvision's transforms draw them."""

    def __init__(self) -> None:
        self.images, self.labels = images(3, 12).tensors

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.images[index], (2, 2, 2, 2))
        top, left = torch.randint(5, (2,)).tolist()
        image = image[:, top : top + 12, left : left + 12]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[index]


@script()
def cifar_with_augmentation_and_views() -> Privacy:
    model = group_normed()
    return all_steps(loop_of(model, nn.CrossEntropyLoss(), Augmented(), views=2))


@script(conditional=True)
def cifar_opacus_with_a_memory_manager() -> Privacy:
    model, optimizer, loader = verbs(group_normed(), None, data_loader=DataLoader(Augmented(), batch_size=BATCH))
    with qt.BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as pieces:
        for x, y in pieces:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return loader.privacy


# --- generative, siamese and adversarial models -----------------------------------------------------------------


def generator() -> nn.Sequential:
    return nn.Sequential(nn.ConvTranspose2d(6, 4, 3), nn.ReLU(True), nn.ConvTranspose2d(4, 1, 4, 4), nn.Tanh())


def discriminator() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 6), nn.Flatten(0)
    )


@script(conditional=True)
def dcgan_opacus_example() -> Privacy:
    """Opacus' dcgan.py: the discriminator is private, the generator learns from what it says."""
    fake_maker, critic = generator(), discriminator()
    by_fake = torch.optim.Adam(fake_maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic, by_critic, loader = verbs(critic, images(), optimizer=torch.optim.Adam(critic.parameters(), lr=2e-4))
    criterion = nn.BCEWithLogitsLoss()
    for real, _ in loader:
        by_critic.zero_grad(set_to_none=True)
        size = real.size(0)
        if size == 0:
            continue
        output = critic(real)
        error_real = criterion(output, torch.full((size,), 0.9))
        fake = fake_maker(torch.randn(size, 6, 1, 1))
        error_fake = criterion(critic(fake.detach()), torch.full((size,), 0.1))
        (error_real + error_fake).backward()
        by_critic.step()
        by_critic.zero_grad(set_to_none=True)
        fake_maker.zero_grad()
        error = criterion(critic(fake), torch.full((size,), 0.9))
        error.backward()
        assert fake_maker[0].weight.grad is not None
        by_fake.step()
    return loader.privacy


@script()
def gan_whose_critic_draws_its_fakes() -> Privacy:
    fake_maker, critic = generator(), discriminator()
    by_fake = torch.optim.Adam(fake_maker.parameters(), lr=2e-4)

    def loss(model: nn.Module, real: Tensor, _label: Tensor) -> Tensor:
        fake = fake_maker(torch.randn(1, 6, 1, 1)).detach()
        real_score, fake_score = model(real), model(fake)
        return F.softplus(-real_score).mean() + F.softplus(fake_score).mean()

    loop = loop_of(critic, loss, images())
    for batch in loop:
        loop.step(batch)
        by_fake.zero_grad()
        F.softplus(-critic(fake_maker(torch.randn(8, 6, 1, 1)))).mean().backward()
        by_fake.step()
        critic.zero_grad()
    return loop.privacy


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(144, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 144), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.encode(x.view(-1, 144)))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return self.decode(z), mean, spread


@script()
def vae_pytorch_example() -> Privacy:
    def elbo(model: nn.Module, x: Tensor, _label: Tensor) -> Tensor:
        made, mean, spread = model(x)
        entropy = F.binary_cross_entropy(made, x.view(-1, 144), reduction="sum")
        return entropy - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())

    return all_steps(loop_of(VAE(), elbo, images()))


@script(conditional=True)
def fgsm_adversarial_training() -> Privacy:
    model, optimizer, loader = verbs(SampleConvNet(), images())
    for x, y in loader:
        x = x.clone().requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        assert x.grad is not None
        attacked = (x + 0.1 * x.grad.sign()).clamp(0, 1).detach()
        optimizer.zero_grad()
        F.cross_entropy(model(attacked), y).backward()
        optimizer.step()
    return loader.privacy


# --- tables -----------------------------------------------------------------------------------------------------


def table(features: int = 6) -> TensorDataset:
    x = torch.randn(N, features)
    return TensorDataset(x, torch.arange(N) % CLASSES)


def mlp(outputs: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, outputs))


# --- texts ------------------------------------------------------------------------------------------------------

WORDS = 20


class Reviews(Dataset[Any]):
    """Texts of several lengths with a label."""

    def __init__(self) -> None:
        self.texts = [torch.randint(1, WORDS, (int(length),)) for length in torch.randint(3, 12, (N,))]

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.texts[index], index % 2


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    """The collate function of Opacus' imdb example."""
    return pad_sequence([text for text, _ in batch], batch_first=True), torch.tensor([label for _, label in batch])


class SampleNet(nn.Module):
    """The network of Opacus' imdb example."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pool = nn.Embedding(WORDS, 8), nn.AdaptiveAvgPool1d(1)
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.emb(x).transpose(1, 2)).squeeze(2)
        return self.fc2(F.relu(self.fc1(x)))


@script(conditional=True)
def imdb_opacus_example() -> Privacy:
    loader = DataLoader(Reviews(), batch_size=BATCH, collate_fn=padded)
    model, optimizer, loader = verbs(SampleNet(), None, data_loader=loader, pad=16)
    losses = []
    for data, label in loader:
        optimizer.zero_grad()
        predictions = model(data).squeeze(1)
        loss = nn.CrossEntropyLoss()(predictions, label)
        (predictions.argmax(1) == label).float().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return loader.privacy


@script()
def lstm_of_packed_sequences() -> Privacy:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.lstm, self.out = nn.Embedding(WORDS, 6), nn.LSTM(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
            _, (h, _) = self.lstm(packed)
            return self.out(h[-1])

    def collate(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.tensor([len(text) for text, _ in batch])
        return (
            pad_sequence([text for text, _ in batch], batch_first=True),
            lengths,
            torch.tensor([y for _, y in batch]),
        )

    return all_steps(loop_of(Packed(), nn.CrossEntropyLoss(), Reviews(), collate_fn=collate))


class CharNN(nn.Module):
    """The classifier of names of Opacus' char-lstm example; its state comes from the loop."""

    def __init__(self, layer: Any = nn.LSTM) -> None:
        super().__init__()
        self.emb, self.lstm, self.out = nn.Embedding(WORDS, 6), layer(6, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor, hidden: Any = None) -> tuple[Tensor, Any]:
        x, hidden = self.lstm(self.emb(x), hidden)
        return self.out(x[:, -1]), hidden


def zeros(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, size, 8), torch.zeros(1, size, 8)


@script(conditional=True)
def char_lstm_opacus_example() -> Privacy:
    loader = DataLoader(Reviews(), batch_size=BATCH, collate_fn=padded)
    model, optimizer, loader = verbs(CharNN(qt.DPLSTM), None, data_loader=loader, pad=16)
    for x, y in loader:
        optimizer.zero_grad()
        logits, _ = model(x, zeros(x.shape[0]))
        F.cross_entropy(logits, y).backward()
        optimizer.step()
    return loader.privacy


class NextCharacter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru, self.out = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.gru(self.emb(x))[0])


def lines() -> TensorDataset:
    text = torch.randint(WORDS, (N, 9))
    return TensorDataset(text[:, :-1], text[:, 1:])


@script()
def language_model_with_view() -> Privacy:
    """`logits.view(-1, V)`, whatever V is."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, WORDS), target.reshape(-1))

    return all_steps(loop_of(NextCharacter(), loss, lines()))


class BagOfWords(nn.Module):
    """The classifier of PyTorch's text tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(WORDS, 8), nn.Linear(8, 2)

    def forward(self, text: Tensor, offsets: Tensor) -> Any:
        return self.out(self.bag(text, offsets))


def flat(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """All texts in one tensor, with the places where each begins."""
    lengths = [0, *(len(text) for text, _ in batch)]
    return (
        torch.cat([t for t, _ in batch]),
        torch.tensor(lengths[:-1]).cumsum(0),
        torch.tensor([y for _, y in batch]),
    )


@script()
def flat_text_with_offsets() -> Privacy:
    return all_steps(loop_of(BagOfWords(), nn.CrossEntropyLoss(), Reviews(), collate_fn=flat))


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=20, bos_token_id=1,
                                eos_token_id=1)
    )  # fmt: skip


class Encoded(Dataset[Any]):
    """What a tokenizer makes of each text; ``labels``: a class, or the text itself."""

    def __init__(self, labels: str = "class") -> None:
        self.reviews, self.labels = Reviews(), labels

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        text, label = self.reviews[index]
        mask = torch.ones_like(text)
        return {"input_ids": text, "attention_mask": mask, "labels": label if self.labels == "class" else text}


def own_loss(model: Any, **batch: Tensor) -> Tensor:
    return model(**batch).loss


@script()
def bert_by_its_own_loss_in_opacus_verbs() -> Privacy:
    loader = DataLoader(Encoded(), batch_size=BATCH)
    model, optimizer, loader = verbs(bert(), None, data_loader=loader, pad=16)
    for batch in loader:
        batch = {name: value.to("cpu") for name, value in batch.items()}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return loader.privacy


@script()
def gpt2_with_lora_in_a_private_loop() -> Privacy:
    model = peft.get_peft_model(
        gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    return all_steps(loop_of(model, own_loss, Encoded("text"), pad=16))


# --- tricks of training -----------------------------------------------------------------------------------------


@script()
def step_scheduler() -> Privacy:
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), epochs=3)
    assert loop.optimizer is not None
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)
    for epoch in loop.epochs():
        for batch in epoch:
            loop.step(batch)
        scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.1 / 8)]
    return loop.privacy


@script()
def ema_of_a_wrapped_model() -> Privacy:
    """`AveragedModel` and `deepcopy` of what Opacus' verbs return."""
    model, optimizer, loader, criterion = verbs(mlp(), table(), criterion=nn.CrossEntropyLoss())
    average, copied = AveragedModel(model), copy.deepcopy(model)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for slow, fast in zip(copied.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    copied.eval()(torch.randn(3, 6))
    return loader.privacy


@script()
def early_stopping_with_the_best_weights() -> Privacy:
    model = mlp()
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), epochs=3)
    x, y = table().tensors  # public
    best, best_loss, patience = copy.deepcopy(model.state_dict()), float("inf"), 0
    for epoch in loop.epochs():
        for batch in epoch:
            loop.step(batch)
        with torch.no_grad():
            value = float(F.cross_entropy(model(x), y))
        if value < best_loss:
            best, best_loss, patience = {k: v.clone() for k, v in model.state_dict().items()}, value, 0
        else:
            patience += 1
        if patience > 1:
            break
    model.load_state_dict(best)
    return loop.close()  # the whole plan is charged


@script(conditional=True)
def gradient_accumulation_opacus() -> Privacy:
    model, optimizer, loader = verbs(mlp(), table())
    for number, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if (number + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return loader.privacy


@script()
def two_optimizers() -> Privacy:
    model = mlp()
    first, second = sgd(model[0]), torch.optim.Adam(model[3].parameters())
    loop = loop_of(model, nn.CrossEntropyLoss(), table(), optimizer=None)
    for batch in loop:
        loop.backward(batch)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return loop.privacy


@script(conditional=True)
def operations_on_rows_before_the_model() -> Privacy:
    model, optimizer, loader = verbs(nn.Linear(7, CLASSES), table())
    for x, y in loader:
        x = F.normalize((x - 0.1).clamp(-2, 2).float(), dim=1)
        x = torch.cat([x, x.norm(dim=1, keepdim=True)], 1)[:, torch.arange(7)]
        x = torch.where(x > 0, x, 0.1 * x) + torch.zeros_like(x) + 0.01 * torch.randn_like(x)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return loader.privacy


# --- all of them -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:a private batch")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_and_states_what_is_true(name: str) -> None:
    torch.manual_seed(0)
    run, conditional = SCRIPTS[name]
    privacy = run()
    assert privacy.is_private
    assert privacy.epsilon is not None
    assert 0.0 < privacy.epsilon < math.inf
    assert (privacy.condition is not None) == conditional
    assert conditional == (" if " in str(privacy))
