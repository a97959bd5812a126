"""Ordinary scripts run, state an ε, and say whether it rests on the loop's own code; none is refused.

Each is in the shape that people write, with small data and a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import quietgrad.torch as qt
from quietgrad.core.session.statement import Privacy

transformers = pytest.importorskip("transformers", reason="needs quietgrad[hf]")

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


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, **settings,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


class Encoded(Reviews):
    """What a tokenizer makes of each text."""

    def __getitem__(self, index: int) -> Any:
        text, label = super().__getitem__(index)
        return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": label}


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


# --- tricks of training -----------------------------------------------------------------------------------------


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
